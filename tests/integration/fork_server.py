"""What the process imports that our programs are forked from. Its garbage collector passes by all of it."""

# ruff: noqa: F401
from __future__ import annotations

import gc

import cyclopts
import pytest  # each child imports the main module of the tests, and that imports it

import coordinator.run.serve
import swarm_peer.model.pretrained
import swarm_peer.runtime.startup

gc.collect()
gc.freeze()
