"""All orders of a few steps, from the moment when the members of one stage are about to end a round.

A step is a message that arrives or is lost, a while that passes for one member, or the leader's end. States that were
seen before are not gone on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from walks import Walk

from swarm_peer.protocol.log import Close
from swarm_peer.protocol.round_rules import RoundRules

Step = tuple[str, int]


class Still(Random):
    """No chance at all: whatever may happen happens at the first try, and nothing fails."""

    def random(self) -> float:
        """Low enough to do what is due, too high to fail."""
        return 0.1

    def choice(self, seq: Any) -> Any:
        """The first one."""
        return seq[0]

    def sample(self, population: Any, k: int, **_: Any) -> Any:
        """The first ones."""
        return list(population)[:k]

    def randrange(self, *_: Any) -> int:
        """One, if that is allowed."""
        return 1


def begin(num_members: int) -> Walk:
    """The members of one stage have computed a round, and its leader closes it."""
    walk = Walk(Still(), RoundRules(num_stages=1, batch=num_members), num_members)
    while not _is_closing(walk):
        for process in walk.living:
            walk.wait(process, 0.6)
        while walk.flying and not _is_closing(walk):
            walk.deliver(0)
    return walk


def _is_closing(walk: Walk) -> bool:
    return any(isinstance(message.body, Close) for _, message in walk.flying)


def steps_of(walk: Walk) -> list[Step]:
    """What can happen next; of equal messages one."""
    seen, steps = set[str](), list[Step]()
    for index, flying in enumerate(walk.flying):
        if (key := repr(flying)) not in seen:
            seen.add(key)
            steps += [("deliver", index), ("lose", index)]
    steps += [("wait", index) for index in range(len(walk.living))]
    steps += [("wait long", 0)]
    if walk.processes["p00"].core is not None and "crash" not in walk.counts:
        steps += [("crash", 0), ("crash silently", 0)]
    return steps


def do(walk: Walk, step: Step) -> None:
    """Have it happen."""
    kind, index = step
    match kind:
        case "deliver":
            walk.deliver(index)
        case "lose":
            walk.lose(index)
        case "wait" | "wait long":
            walk.wait(walk.living[index], 0.6 if kind == "wait" else 12.0)
        case _:
            walk.count("crash")
            walk.crash(walk.processes["p00"], loses=kind == "crash silently")
            walk.put_out(walk.processes["p00"])


def state_of(walk: Walk) -> str:
    """All that matters for what can happen next."""
    found: list[Any] = sorted(repr(flying) for flying in walk.flying)
    for process in walk.living:
        assert process.core is not None
        found.append((process.peer, process.core.epoch.id))
        for member in process.core.members.values():
            found += [member.log.head, member.state, member.reign, sorted(member.work.open.items()), member.work.guests]
        for leader in process.core.leaders.values():
            found.append(leader.round)
    return repr(found)


def explore(num_members: int, depth: int, max_states: int | None = None) -> int:
    """Go through all sequences of so many steps; returns how many states there are.

    Raises:
        Violation: an invariant is broken
    """
    seen, paths = set[int](), [()]
    num_states = 0
    for _ in range(depth):
        longer: list[Sequence[Step]] = []
        for path in paths:
            for step in steps_of(_after(num_members, path)):
                walk = _after(num_members, (*path, step))
                walk.look()
                num_states += 1
                if (state := hash(state_of(walk))) not in seen:
                    seen.add(state)
                    longer.append((*path, step))
                if max_states is not None and num_states >= max_states:
                    return num_states
        paths = longer
    return num_states


def _after(num_members: int, path: Sequence[Step]) -> Walk:
    walk = begin(num_members)
    for step in path:
        do(walk, step)
    return walk
