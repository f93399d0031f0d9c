"""After an averaging round: do all stage-mates hold the same result, and if not, whose is it?

An all-reduce that loses a member can succeed for some and fail for others, in silence. So stage-mates exchange votes
and a peer whose result differs from the winning one downloads the state of somebody who has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Vote:
    """What one peer got out of an averaging round.

    Attributes:
        attempt: number of the round within the step
        checksum: digest of the averaged gradients and of the weights they belong to; None if the round failed
        samples: samples in the average, over all members of the round
    """

    attempt: int
    checksum: str | None
    samples: int = 0


class Verdict(Enum):
    COMMIT = "commit"  # apply the averaged gradients
    RETRY = "retry"  # not all have the same result: run another round
    RESYNC = "resync"  # others went on with a different result: download their state


@dataclass(frozen=True, slots=True)
class Agreement:
    verdict: Verdict
    reason: str
    holders: tuple[str, ...] = ()  # peers that hold the winning result


def agree(me: str, votes: Mapping[str, Vote], *, may_retry: bool) -> Agreement:
    """Decide what this peer does with its own result.

    A member that failed may have left its share out of the results of the others, in silence, so as long as rounds may
    be repeated, only a result that all hold is taken. After that the result of the most samples wins, then that of the
    most peers, then the smallest checksum: all who know the same votes decide the same.

    Args:
        votes: by peer id, of this step's newest round, this peer's own among them; of peers that have died, none
    """
    ballots: dict[str, list[str]] = {}
    samples: dict[str, int] = {}
    for peer_id, vote in sorted(votes.items()):
        if vote.checksum is not None:
            ballots.setdefault(vote.checksum, []).append(peer_id)
            samples[vote.checksum] = max(samples.get(vote.checksum, 0), vote.samples)
    num_failed = sum(vote.checksum is None for vote in votes.values())
    if not ballots or (may_retry and (num_failed or len(ballots) > 1)):
        return Agreement(
            Verdict.RETRY, f"{len(votes)} peers: it failed for {num_failed}, the others hold {len(ballots)} results"
        )
    winner = min(ballots, key=lambda checksum: (-samples[checksum], -len(ballots[checksum]), checksum))
    holders = tuple(ballots[winner])
    if votes[me].checksum == winner:
        return Agreement(Verdict.COMMIT, f"{len(holders)} of {len(votes)} peers hold this result", holders)
    why = "the round failed here" if votes[me].checksum is None else "the result here differs"
    return Agreement(Verdict.RESYNC, f"{why}, {len(holders)} peers hold one of {samples[winner]} samples", holders)
