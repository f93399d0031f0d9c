"""Has the decay of a `wsd` run begin, once its operator asks for it (policy/decay.py).

The run goes on from its newest snapshots by word of the run key, as it does where it goes back: it has made few steps
since. Owns when that is, and what becomes of the word where the run goes back without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio

from coordinator.run.agreed_run import AgreedRun
from coordinator.run.decay_file import DecayFile, DecayNote
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.model.optimizer import planned_decay
from swarm_peer.policy.decay import Decay, names_in
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.context import Threads

log = logging.getLogger(__name__)

# To ask peers for the names of their snapshots takes so long at most.
ASK_S = 15.0


class Standing(NamedTuple):
    """The run's progress, and its coordinator's part in it.

    Attributes:
        optimizer_step: that it has made
        known_round: the last round that it has come to
        acts: whether this coordinator is the one that acts
    """

    optimizer_step: int
    known_round: int
    acts: bool


def why_not(manifest: RunManifest, decay: Decay) -> str:
    """The reason that a run cannot decay so; empty if it can."""
    planned, period = planned_decay(manifest), manifest.averaging.steps_per_average
    if (name := manifest.schedule.name) != "wsd":
        return f"schedule.name is {name}, and only the decay of wsd begins by a word"
    if manifest.averaging.mode == "delayed":
        return "with averaging.mode delayed, a run ends at training.steps alone"
    if manifest.recovery.snapshot_every == 0:
        return "a decay begins at a snapshot, and recovery.snapshot_every is 0"
    if decay.steps % period:
        return f"{decay.steps} steps are no multiple of averaging.inner_steps={period}"
    if decay.begins_at >= planned.begins_at or decay.end > planned.end:
        return (
            f"{decay.steps} steps would end at optimizer step {decay.end}; by its configuration, the run decays from "
            f"{planned.begins_at} on and ends at {planned.end}"
        )
    return ""


def next_snapshot(manifest: RunManifest, optimizer_step: int) -> int:
    """The optimizer step of the next snapshot at which a decay can begin."""
    every = max(manifest.recovery.snapshot_every, 1)
    earliest = max(optimizer_step + 1, manifest.schedule.warmup_steps)
    return -(-earliest // every) * every


class Decaying:
    """Follows the decay of one run. Belongs to the event loop's thread."""

    def __init__(self, manifest: RunManifest, output: Path, threads: Threads):
        """Follow the decay of a run whose folder is `output`."""
        self._manifest = manifest
        self._file = DecayFile(output)
        self._threads = threads
        self._earliest: int | None = None  # the first snapshot after a decay was asked for

    async def look(self, run: AgreedRun, view: SwarmView, standing: Standing) -> str:
        """Begin a decay that is asked for, or note one that has begun; to be called again and again.

        Returns:
            a sentence of what has become of it, if anything has
        """
        try:
            return await self._look(run, view, standing)
        except UserError as error:
            log.warning("decay_not_noted reason=%s", error)
            return ""

    async def _look(self, run: AgreedRun, view: SwarmView, standing: Standing) -> str:
        note, said = await self._threads.run(self._file.read), run.decay
        if said is not None:
            if note is None or note.decay != said:
                await self._keep(said.steps, said.begins_at)  # another coordinator has said it
            return ""
        if note is None or not standing.acts:
            return ""
        if note.decay is not None:
            return await self._say_again(run, standing, note.decay)
        return await self._begin(run, view, standing, note.steps)

    async def _begin(self, run: AgreedRun, view: SwarmView, standing: Standing, steps: int) -> str:
        """Have the run go on from the next snapshots, as soon as peers of all stages tell their names."""
        every = self._manifest.recovery.snapshot_every
        earliest = next_snapshot(self._manifest, standing.optimizer_step) if self._earliest is None else self._earliest
        due = max(earliest, standing.optimizer_step // max(every, 1) * every)
        if why := why_not(self._manifest, Decay(due, steps)):
            await self._threads.run(self._file.remove)
            log.warning("decay_refused begins_at=%d steps=%d reason=%s", due, steps, why)
            self._earliest = None
            return f"The decay of {steps} steps does not begin: {why}."
        self._earliest = earliest
        for step in (due, due - every):  # peers keep the one before the newest as well
            is_made = earliest <= step <= standing.optimizer_step
            if is_made and (names := await self._names(run, view, step)):
                decay, self._earliest = Decay(step, steps), None
                await self._say(run, standing, names, step, decay)
                return f"The learning rate decays from optimizer step {step} on, and the run ends at {decay.end}."
        return ""

    async def _names(self, run: AgreedRun, view: SwarmView, optimizer_step: int) -> Sequence[str]:
        """The names of the snapshots of an optimizer step; none if they are not known yet."""
        holders = [[peer.peer_id for peer in view.serving(stage)] for stage in range(view.num_stages)]
        with anyio.move_on_after(ASK_S):
            try:
                return await run.names.kept(optimizer_step, holders)
            except CallError as error:
                log.info("decay_waits optimizer_step=%d reason=%s", optimizer_step, error)
        return ()

    async def _say_again(self, run: AgreedRun, standing: Standing, decay: Decay) -> str:
        """Say a decay once more, of which the run's newest restart has no word.

        A restart that voters have chosen, since a stage was lost, has none: the run goes on from the same snapshots
        once more. One that the run key has made was meant so.
        """
        restart = run.restart
        if restart.epoch is None or restart.epoch.number == 0 or not restart.entries:
            await self._threads.run(self._file.remove)
            return "The run has begun anew, without its decay."
        if standing.optimizer_step >= restart.optimizer_step + self._manifest.recovery.snapshot_every:
            await self._keep(decay.steps, None)  # it has come too far to go back there, and decays anew
            return ""
        names = names_in(restart.entries, self._manifest.stages.count)
        await self._say(run, standing, names, restart.optimizer_step, decay)
        return "The run has gone back, and goes on with its decay."

    async def _say(
        self, run: AgreedRun, standing: Standing, names: Sequence[str], optimizer_step: int, decay: Decay
    ) -> None:
        run.say_decay(decay, names, optimizer_step, standing.known_round)
        log.warning("decay_said begins_at=%d steps=%d optimizer_step=%d", *decay, optimizer_step)
        await self._keep(decay.steps, decay.begins_at)

    async def _keep(self, steps: int, begins_at: int | None) -> None:
        await self._threads.run(self._file.write, DecayNote(steps=steps, begins_at=begins_at))
