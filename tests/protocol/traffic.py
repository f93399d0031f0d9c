"""Count what agreement takes in calm rounds: python tests/protocol/traffic.py [--members 4 8 16] [--all-pairs].

Two stages with as many members each, and a coordinator, on links of 20 ms; each member of stage 0 launches samples as
they are granted, and sends them to few members of stage 1, as peers do, or to any. Bytes are those of the messages as
they travel, signatures included, without the calls around them.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter

from cluster import Process
from driver import Driver
from quiet import Quiet

from swarm_peer.policy.routing import parts_of
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Rounds, Sent
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity

WARM_UP_S = 40.0
COUNTED_S = 80.0


class RoutedDriver(Driver):
    """Sends microbatches where a peer would, if all were equally fast."""

    def choose(
        self, caller: str, stage: int, number: int, fits: list[tuple[Process, Member]]
    ) -> tuple[Process, Member]:
        """Of those that have a part of their time for this caller in this round, any."""
        callers, callees = (
            {peer: 1.0 for peer, process in self.world.processes.items() if process.stages == {each}}
            for each in (stage - 1, stage)
        )
        parts = parts_of(caller, callers, callees, number)
        return self.random.choice([fit for fit in fits if parts[fit[0].peer]] or fits)


class Calm(Quiet):
    """A run without faults whose messages are counted.

    Attributes:
        sent, num_bytes: of messages about rounds, and of all others, by the name of what they hold
    """

    def __init__(self, members: int, samples_each: int, *, all_pairs: bool):
        super().__init__(RoundRules(num_stages=2, batch=members * samples_each, roots_every=(0,)))
        if not all_pairs:
            self.driver = RoutedDriver(self)
            self.driver.fails = 0.0
        self.sent, self.num_bytes = Counter[str](), Counter[str]()
        self._is_counting = False
        # One key stands for all: signatures are as long as real ones.
        self._statements = Statements("run", Identity.generate())
        for stage, number in itertools.product((0, 1), range(members)):
            self.add(f"peer-{stage}-{number:03}-of-some-length-as-ids-have-it", {stage})

    def send(self, process: Process, sent: list[Sent]) -> None:
        """Count messages, and put them on their way."""
        for _, message in sent:
            if self._is_counting and isinstance(message.body, Rounds):
                kind = type(message.body).__name__
                self.sent[kind] += 1
                num_signed = repr(message.body).count("signature=b'")
                self.num_bytes[kind] += len(self._statements.encode(message)) + 60 * num_signed
        super().send(process, sent)

    def count_rounds(self) -> int:
        """Count the messages of some rounds; returns how many rounds these are."""
        self.run_until(WARM_UP_S)
        begun, self._is_counting = self.next_round(), True
        self.run_until(WARM_UP_S + COUNTED_S)
        return self.next_round() - begun


def main() -> None:
    """Print a table for stages of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--samples", type=int, default=4, help="of each member of stage 0 in a round")
    parser.add_argument("--all-pairs", action="store_true", help="everybody sends to everybody")
    chosen = parser.parse_args()
    print("| members of a stage | seconds a round | messages a round | KiB a round | most of the bytes |")
    print("|---|---|---|---|---|")
    for members in chosen.members:
        calm = Calm(members, chosen.samples, all_pairs=chosen.all_pairs)
        num_rounds = max(calm.count_rounds(), 1)
        whole = sum(calm.num_bytes.values())
        most = ", ".join(f"{kind} {count / whole:.0%}" for kind, count in calm.num_bytes.most_common(3))
        messages, kib = sum(calm.sent.values()) / num_rounds, sum(calm.num_bytes.values()) / num_rounds / 1024
        print(f"| {members} | {COUNTED_S / num_rounds:.1f} | {messages:.0f} | {kib:.0f} | {most} |", flush=True)


if __name__ == "__main__":
    main()
