"""Imported once by the process that our programs are forked from: what they import, which the collector then passes by.

Coordinators import more when they serve; what asks a run, and what only writes a line, import little.
"""

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
