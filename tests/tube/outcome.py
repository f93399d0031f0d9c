"""A schedule is run in this process, and what comes of it."""

from __future__ import annotations

import gc
import logging
import random
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hosted import obeying_schedules
from loop import TubeLoop, run
from schedule import Schedule
from small import pieces_of
from tube import Tube
from world import LogToWorld


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        steps: rounds that stage 0 has committed
        validated: shares of validations that were compared with one process's
        passes: over the text that are over
        told: lies
        price_s: for how long they may cost pace
        liars: the peers that have told them
        entries: where one member lies: when each was first followed, its stage, and the samples in it that each peer
            has computed
    """

    seed: str
    violations: list[str]
    trace_hash: str
    steps: int = 0
    strikes: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    rewinds: int = 0
    doubled: int = 0
    lost: int = 0
    checked: int = 0
    validated: int = 0
    passes: int = 0
    events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    log: list[str] = field(default_factory=list)
    told: int = 0
    price_s: float = 0.0
    liars: list[str] = field(default_factory=list)
    entries: list[tuple[float, int, dict[str, int]]] = field(default_factory=list)


def run_schedule(schedule: Schedule) -> Outcome:
    """Run a schedule in this process."""
    torch.set_num_threads(1)
    gc.disable()  # it would end forgotten generators at moments that differ from machine to machine
    gc.collect()
    gc.freeze()  # modules need no look
    random.seed(f"global {schedule.seed}")
    began_s = time.process_time()
    logger = logging.getLogger()
    hivemind_logger = logging.getLogger("hivemind")
    hivemind_logger.handlers.clear()  # it has one of its own, which prints
    hivemind_logger.propagate = True
    outcome = Outcome(schedule.seed, [], "")

    async def main(loop: TubeLoop) -> Tube:
        tube = Tube(schedule, loop, Path(folder))
        handler = LogToWorld(tube.world)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            with tube.invariants.watching(), obeying_schedules(), tube.lies:
                await tube.run()
        except Exception as error:
            tube.world.violation(f"the tube itself failed: {error!r}", error)
        finally:
            logger.removeHandler(handler)
            outcome.virtual_s = loop.time()
        return tube

    with tempfile.TemporaryDirectory(prefix="tube-") as folder, ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(pieces_of(schedule.seed))
        tube = run(main)
    world, records = tube.world, tube.invariants.records
    outcome.violations, outcome.trace_hash, outcome.log = world.violations, world.trace_hash, world.log
    outcome.steps = len(tube._committed[0])
    outcome.strikes = dict(world.strikes)
    outcome.moves, outcome.rewinds = records.moves_of.total(), records.rewinds
    outcome.doubled, outcome.lost = records.doubled, tube.lost
    outcome.checked, outcome.validated, outcome.passes = records.checked, records.validated, records.passes
    outcome.events = world.num_events
    if tube.liar is not None:
        outcome.told, outcome.price_s = tube.liar.told, tube.liar.price_s
        outcome.liars = [host.name for host in world.liars]
    outcome.entries = list(tube.invariants.entries)
    outcome.cpu_s = time.process_time() - began_s
    return outcome
