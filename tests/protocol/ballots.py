"""Walks through the choice of one epoch: voters that all propose something else, and messages in any order.

Finer than world.py: no time passes, a walk chooses what comes next, so that rare orders of few messages come up.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from world import Violation

from swarm_peer.protocol.epochs import COORDINATORS, Certified, Epoch, Place, Rules
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Accept, Message, News, Prepare, Promise, Timing, Vote
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat, Signed

HASTY = Timing(propose_s=0.0, retry_s=0.0, silent_s=1e9, key_s=1e9, alive_s=1e9, resend_s=1e9)
BALLOT_MESSAGES = (Prepare, Promise, Accept, Vote)


def walk(seed: int, make: Callable[..., Membership] = Membership, *, num_voters: int = 3, num_steps: int = 150) -> int:
    """One walk; returns how many epochs were chosen.

    Raises:
        Violation: two epochs have one id
    """
    random = Random(seed)
    seats = [Seat(f"p{number}", 1, "all") for number in range(num_voters)]
    places = tuple(Place(0, seat) for seat in seats)
    epoch = Epoch(EpochId(1, Seat("c", 1, "all"), 0), places, begun=(0,))
    first = Certified(epoch, (Signed(KeySigned(epoch.hash), b"key"),))
    voters = {
        seat.peer: make(
            me=seat,
            first=first,
            rules=Rules(1, 0),
            timing=HASTY,
            random=Random(seed),
            sign=lambda body: Signed(body, b""),
        )
        for seat in seats
    }
    for number, voter in enumerate(voters.values()):
        voter.desired = frozenset({0} if number % 2 else {0, COORDINATORS})
        if random.random() < 0.3:
            voter.desired = frozenset()
    chosen, flying = dict[EpochId, str](), list[tuple[str, Message]]()
    for step in range(num_steps):
        if not flying or random.random() < 0.1:
            sent = random.choice(list(voters.values())).tick(float(step))
        else:
            index = random.randrange(len(flying))
            target, message = flying[index]
            if random.random() < 0.8:
                flying[index] = flying[-1]
                flying.pop()
            if target not in voters or random.random() < 0.1:
                continue
            # Not even what would fence old messages always comes.
            sent = voters[target].receive(float(step), message)
        flying += [(to, message) for to, message in sent if isinstance(message.body, (*BALLOT_MESSAGES, News))]
        for voter in voters.values():
            found = voter.epoch
            if chosen.setdefault(found.id, found.hash) != found.hash:
                raise Violation(f"two epochs of {found.id}")
    return len(chosen) - 1
