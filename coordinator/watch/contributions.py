"""Estimates what each peer has given to a run: samples and hours.

Peers do not tell how many samples they computed, and nobody would have to believe them. Each sample passes one peer of
each stage, chosen in proportion to the speeds that the stage's peers announce; so a step's samples are divided so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from coordinator.watch.run_watch import RunWatch
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.runtime.host.identities import KeptFile

CONTRIBUTIONS = "contributions.json"
# Peers that are remembered; one that gave next to nothing makes room for another.
MAX_PEERS = 5000
# A look that comes later than this says nothing of the time before it.
MAX_LOOK_S = 30.0
SAVE_S = 60.0


@dataclass(slots=True)
class Given:
    """The part of one peer in a run.

    Attributes:
        samples: that it computed of a stage, estimated
        served_s: for how long it was seen to serve
        moves: how often it was seen to change its stage
        since_s: Unix seconds at which it was first seen
    """

    name: str
    stage: int
    since_s: float
    samples: float = 0.0
    served_s: float = 0.0
    moves: int = 0


_FILE = TypeAdapter(dict[str, Given])


class ContributionEstimates:
    """The part of each peer in a run so far, kept in the run's folder.

    Args:
        folder: of the run; None if there is none
        is_writer: whether to keep them in the folder; an observer only reads

    Attributes:
        given: by peer id
    """

    def __init__(self, folder: Path | None = None, *, is_writer: bool = True):
        self._file = None if folder is None else KeptFile(folder / CONTRIBUTIONS)
        self._is_writer = is_writer
        self.given: dict[str, Given] = {}
        self._round_number: int | None = None
        self._looked_s: float | None = None
        self._saved_s = 0.0

    def begin(self, resume: bool, *, round_number: int | None = None) -> None:
        """Read what an earlier process has kept, if it is to be gone on with.

        Args:
            round_number: the last round whose samples were shared out, -1 if none was; None if nobody knows, so that
                they are shared from the second step on that is seen
        """
        self._round_number = round_number
        if self._file is not None and resume and (data := self._file.read()):
            try:
                self.given = _FILE.validate_json(data)
            except ValueError:  # it was cut off: estimates of the past are not worth more
                self.given = {}

    def look(self, watch: RunWatch, now_s: float) -> None:
        """Take in the time and the optimizer steps since the last look."""
        passed_s = 0.0 if self._looked_s is None else min(max(now_s - self._looked_s, 0.0), MAX_LOOK_S)
        self._looked_s = now_s
        for peer in watch.view.peers:
            given = self._given(peer, now_s)
            if given.stage != peer.stage:
                given.stage, given.moves = peer.stage, given.moves + 1
            if peer.state is PeerState.SERVING:
                given.served_s += passed_s
        self._share_samples(watch)
        if abs(now_s - self._saved_s) > SAVE_S:  # the clock may be set back
            self.save(now_s)

    def save(self, now_s: float) -> str:
        """Write down what is known; returns why that was not possible, or nothing."""
        self._saved_s = now_s
        return self._file.write(_FILE.dump_json(self.given)) if self._file is not None and self._is_writer else ""

    def _given(self, peer: PeerView, now_s: float) -> Given:
        known = self.given.get(peer.peer_id)
        if known is None:
            if len(self.given) >= MAX_PEERS:
                del self.given[min(self.given, key=lambda peer_id: self.given[peer_id].samples)]
            known = self.given[peer.peer_id] = Given(peer.name, peer.stage, round(now_s))
        known.name = peer.name
        return known

    def _share_samples(self, watch: RunWatch) -> None:
        if not watch.lines:
            return
        known = self._round_number
        self._round_number = max(watch.round_number, -1 if known is None else known)
        if known is None:
            return  # nobody has seen which peers computed the steps before the first look
        samples = sum(line["samples"] for line in watch.lines if line["round"] > known)
        for stage in range(watch.view.num_stages):
            serving = watch.view.serving(stage)
            total = sum(peer.samples_per_s for peer in serving)
            for peer in serving:
                share = peer.samples_per_s / total if total else 1 / len(serving)
                if (given := self.given.get(peer.peer_id)) is not None:  # it may have made room for another
                    given.samples += share * samples
