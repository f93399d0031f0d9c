"""The vote after an averaging round: whether all stage-mates hold the same result, and if not, which result wins.

An all-reduce that loses a member can succeed for some members and fail for others, without an error. So stage-mates
exchange votes, and a peer whose result differs from the winning one downloads the state of a peer that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of an averaging round at one peer.

    Attributes:
        attempt: number of the averaging round's try, from 0
        checksum: digest of the averaged gradients and of the weights they belong to; None if the try failed
        samples: samples in the average, over all members
        abstains: it took no part in the averaging round, since that began before it came: others need not try again
    """

    attempt: int
    checksum: str | None
    samples: int = 0
    abstains: bool = False


class Verdict(Enum):
    """The action that follows from a vote."""

    COMMIT = "commit"  # apply the averaged gradients
    RETRY = "retry"  # not all have the same result: try again
    RESYNC = "resync"  # others went on with a different result: download their state


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome of a vote for one peer.

    Attributes:
        holders: peers that hold the winning result; empty if there is none
    """

    verdict: Verdict
    reason: str
    holders: tuple[str, ...] = ()


def agree(me: str, votes: Mapping[str, Vote], *, may_retry: bool) -> Agreement:
    """Decide what this peer does with its own result.

    A member that failed may have left its share out of the results of the others, without an error. So while the
    averaging round may be tried again, a result is only taken if all hold it. After the last try the result with the
    most samples wins, then that of the most peers, then the smallest checksum: peers that know the same votes decide
    the same.

    Args:
        votes: the votes of the newest try by peer id, this peer's own among them; peers that have died have none
        may_retry: whether the averaging round may be tried again
    """
    ballots: dict[str, list[str]] = {}
    samples: dict[str, int] = {}
    for peer_id, vote in sorted(votes.items()):
        if vote.checksum is not None:
            ballots.setdefault(vote.checksum, []).append(peer_id)
            samples[vote.checksum] = max(samples.get(vote.checksum, 0), vote.samples)
    num_failed = sum(vote.checksum is None and not vote.abstains for vote in votes.values())
    if not ballots or (may_retry and (num_failed or len(ballots) > 1)):
        return Agreement(
            Verdict.RETRY, f"{len(votes)} peers: it failed for {num_failed}, the others hold {len(ballots)} results"
        )
    winner = min(ballots, key=lambda checksum: (-samples[checksum], -len(ballots[checksum]), checksum))
    holders = tuple(ballots[winner])
    if votes[me].checksum == winner:
        return Agreement(Verdict.COMMIT, f"{len(holders)} of {len(votes)} peers hold this result", holders)
    why = "the round failed here" if votes[me].checksum is None else "the result here differs"
    if votes[me].abstains:
        why = "this peer took no part"
    return Agreement(Verdict.RESYNC, f"{why}, {len(holders)} peers hold one of {samples[winner]} samples", holders)
