"""Has the decay of a `wsd` run begin, once its operator asks for it (policy/decay.py).

Owns when that is, and what becomes of what was asked for where the run begins anew without it.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import NamedTuple

from coordinator.run.agreed_run import AgreedRun
from coordinator.run.decay_file import DecayFile, DecayNote
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.optimizer import planned_decay
from swarm_peer.policy.decay import Decay
from swarm_peer.runtime.context import Threads

log = logging.getLogger(__name__)

# All seats have heard of a decay when it begins, so that all stages begin at the same step.
LEAD_S = 15.0
MIN_LEAD_STEPS = 2


class Standing(NamedTuple):
    """The run's progress, and its coordinator's part in it.

    Attributes:
        optimizer_step: that it has made
        step_s: seconds that the last one took; 0 if that is not known
        acts: whether this coordinator is the one that acts
    """

    optimizer_step: int
    step_s: float
    acts: bool


def why_not(manifest: RunManifest, decay: Decay) -> str:
    """The reason that a run cannot decay so; empty if it can."""
    planned, period = planned_decay(manifest), manifest.averaging.steps_per_average
    if (name := manifest.schedule.name) != "wsd":
        return f"schedule.name is {name}, and only the decay of wsd begins by a word"
    if manifest.averaging.mode == "delayed":
        return "with averaging.mode delayed, a run ends at training.steps alone"
    if decay.steps % period:
        return f"{decay.steps} steps are no multiple of averaging.inner_steps={period}"
    if decay.begins_at >= planned.begins_at or decay.end > planned.end:
        return (
            f"{decay.steps} steps would end at optimizer step {decay.end}; by its configuration, the run decays from "
            f"{planned.begins_at} on and ends at {planned.end}"
        )
    return ""


def begins_at(manifest: RunManifest, standing: Standing) -> int:
    """The optimizer step at which a decay can begin that is said now."""
    period = manifest.averaging.steps_per_average
    lead = math.ceil(LEAD_S / standing.step_s) if standing.step_s else 0
    earliest = max(standing.optimizer_step + max(lead, MIN_LEAD_STEPS), manifest.schedule.warmup_steps)
    return -(-earliest // period) * period


class Decaying:
    """Follows the decay of one run. Belongs to the event loop's thread."""

    def __init__(self, manifest: RunManifest, output: Path, threads: Threads):
        """Follow the decay of a run whose folder is `output`."""
        self._manifest = manifest
        self._file = DecayFile(output)
        self._threads = threads

    async def look(self, run: AgreedRun, standing: Standing) -> str:
        """Begin a decay that is asked for, or note one that has begun; to be called again and again.

        Returns:
            a sentence of what has become of it, if anything has
        """
        try:
            return await self._look(run, standing)
        except UserError as error:
            log.warning("decay_not_noted reason=%s", error)
            return ""

    async def _look(self, run: AgreedRun, standing: Standing) -> str:
        note, said = await self._threads.run(self._file.read), run.decay
        if said is not None:
            if note is None or note.decay != said:
                await self._keep(said)  # another coordinator has said it
            return ""
        if note is None or not standing.acts or not run.is_settled:
            return ""
        if note.decay is not None:
            await self._threads.run(self._file.remove)
            return "The run has begun anew, without its decay."
        return await self._begin(run, standing, note.steps) if standing.step_s else ""

    async def _begin(self, run: AgreedRun, standing: Standing, steps: int) -> str:
        """Have the run decay in a little while."""
        decay = Decay(begins_at(self._manifest, standing), steps)
        if why := why_not(self._manifest, decay):
            await self._threads.run(self._file.remove)
            log.warning("decay_refused begins_at=%d steps=%d reason=%s", *decay, why)
            return f"The decay of {steps} steps does not begin: {why}."
        run.say_decay(decay)
        log.warning("decay_said begins_at=%d steps=%d", *decay)
        await self._keep(decay)
        return f"The learning rate decays from optimizer step {decay.begins_at} on, and the run ends at {decay.end}."

    async def _keep(self, decay: Decay) -> None:
        await self._threads.run(self._file.write, DecayNote(steps=decay.steps, begins_at=decay.begins_at))
