"""Which weights a stage goes on with, and which average: all stage-mates decide it alike from what each of them holds.

Before an averaging round, a peer whose weights do not win takes no part in it. It downloads the state of a peer whose
weights do. After the round comes the vote: whether all stage-mates hold the same result, and if not, which result wins.
An all-reduce that loses a member can succeed for some members and fail for others, without an error. So stage-mates
exchange votes, and a peer whose result differs from the winning one downloads the state of a peer that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class AveragingVote:
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


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights of one peer before an averaging round.

    Attributes:
        history_hash: digest of the updates that led to them
        digest: of the weights themselves; empty where stage-mates do not compare it
        samples: whose work is lost if the peer takes over other weights, as it says
    """

    history_hash: str
    digest: str
    samples: int


class Verdict(Enum):
    """The action that follows from a vote."""

    COMMIT = "commit"  # apply the averaged gradients, or average with those who hold the same weights
    RETRY = "retry"  # not all have the same result: try again
    RESYNC = "resync"  # others went on with a different result: download their state


@dataclass(frozen=True, slots=True)
class VoteOutcome:
    """The outcome of a vote for one peer.

    Attributes:
        holders: peers that hold the winning result; empty if there is none
    """

    verdict: Verdict
    reason: str
    holders: tuple[str, ...] = ()


def agree(me: str, votes: Mapping[str, AveragingVote], *, may_retry: bool) -> VoteOutcome:
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
        return VoteOutcome(
            Verdict.RETRY, f"{len(votes)} peers: it failed for {num_failed}, the others hold {len(ballots)} results"
        )
    winner = min(ballots, key=lambda checksum: (-samples[checksum], -len(ballots[checksum]), checksum))
    holders = tuple(ballots[winner])
    if votes[me].checksum == winner:
        return VoteOutcome(Verdict.COMMIT, f"{len(holders)} of {len(votes)} peers hold this result", holders)
    why = "the round failed here" if votes[me].checksum is None else "the result here differs"
    if votes[me].abstains:
        why = "this peer took no part"
    return VoteOutcome(Verdict.RESYNC, f"{why}, {len(holders)} peers hold one of {samples[winner]} samples", holders)


def choose_weights(me: str, held: Mapping[str, HeldWeights]) -> VoteOutcome:
    """Decide whether this peer goes on with its own weights.

    The history of the most peers wins, and of those who hold it, the digest of the most peers: devices that differ may
    compute other weights from the same updates, and must not lose a history for that. Samples decide only between as
    many peers, so that less work is lost. They must not come first. Each peer tells its own, so one could have all
    others take over its state; and where a device has spoilt weights, it does so to no other peer's in the same way,
    while it may well be the fastest. At last, the smallest digest wins: peers that know the same decide the same.

    Args:
        held: by peer id, this peer's own among them
    """
    with_history = _most_held(held, lambda weights: weights.history_hash)
    holders = tuple(_most_held(with_history, lambda weights: weights.digest))
    verdict = Verdict.COMMIT if me in holders else Verdict.RESYNC
    return VoteOutcome(verdict, f"{len(holders)} of {len(held)} peers hold the weights to go on with", holders)


def _most_held(held: Mapping[str, HeldWeights], value: Callable[[HeldWeights], str]) -> dict[str, HeldWeights]:
    """The peers, sorted, that share the value of the most peers; then of the most samples, then the smallest."""
    groups: dict[str, dict[str, HeldWeights]] = {}
    for peer_id, weights in sorted(held.items()):
        groups.setdefault(value(weights), {})[peer_id] = weights

    def rank(name: str) -> tuple[int, int, str]:
        return -len(groups[name]), -sum(weights.samples for weights in groups[name].values()), name

    return groups[min(groups, key=rank)]
