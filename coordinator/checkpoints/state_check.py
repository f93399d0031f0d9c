"""Whether the state that a peer gives is one of its stage: by the names, types and shapes of its tensors, and finite.

Peers refuse any other one, so a checkpoint of such states could not be gone on from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from torch import Tensor

from swarm_peer.model.checks import check_state
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.state.index import StageState

# Called with a stage and a state that somebody gave for it; raises InvalidMessage if it does not fit.
Check = Callable[[int, StageState], Awaitable[None]]


class StateCheck:
    """Checks states of a run's stages as its peers do. Belongs to the event loop's thread."""

    def __init__(self, resolved: ResolvedManifest, threads: Threads):
        self._resolved = resolved
        self._threads = threads
        self._templates: dict[int, Mapping[str, Tensor]] = {}

    async def check(self, stage: int, state: StageState) -> None:
        """Check a state that somebody gave for a stage. Takes a second per gigabyte.

        Raises:
            InvalidMessage: no peer of the stage would take it over
        """
        if stage not in self._templates:
            self._templates[stage] = await self._threads.run(_template, self._resolved, stage)
        await self._threads.run(check_state, state.tensors, self._templates[stage])


def _template(resolved: ResolvedManifest, stage: int) -> Mapping[str, Tensor]:
    return StageTrainer(resolved, resolved.specs[stage], blank=True).state_template()
