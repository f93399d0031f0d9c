"""A few rounds as a state machine of hypothesis, which shrinks what it finds to the shortest sequence of steps."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from walks import Walk

from swarm_peer.protocol.round_rules import RoundRules

INDICES = st.integers(0, 63)


class Rounds(RuleBasedStateMachine):
    """Messages arrive, come again or are lost; time passes for one peer or the other; peers end."""

    def __init__(self) -> None:
        super().__init__()
        self.walk: Any = None

    @initialize(
        num_stages=st.integers(1, 2),
        num_members=st.integers(2, 3),
        lag=st.integers(0, 1),
        batch=st.integers(1, 2),
        seed=st.integers(0, 3),
    )
    def begin(self, num_stages, num_members, lag, batch, seed):
        """All have their places, and heard of one another."""
        rounds = RoundRules(num_stages=num_stages, batch=batch, lag=lag, roots_every=(3,))
        self.walk = Walk(Random(seed), rounds, num_members)
        for _ in range(2):
            for process in self.walk.living:
                self.walk.wait(process, 4.0)
            while self.walk.flying:
                self.walk.deliver(0)

    @rule(index=INDICES, count=st.integers(1, 12), again=st.booleans())
    def deliver(self, index, count, again):
        """Some messages arrive."""
        for _ in range(min(count, len(self.walk.flying))):
            self.walk.deliver(index % len(self.walk.flying), again=again)

    @precondition(lambda self: self.walk.flying)
    @rule(index=INDICES)
    def lose(self, index):
        """A message is lost."""
        self.walk.lose(index % len(self.walk.flying))

    @rule(index=INDICES, seconds=st.sampled_from((0.6, 4.0, 12.0)))
    def wait(self, index, seconds):
        """Time passes for one peer."""
        self.walk.wait(self._one(index), seconds)

    @rule(seconds=st.sampled_from((0.6, 12.0)))
    def wait_all(self, seconds):
        """Time passes for all."""
        for process in self.walk.living:
            self.walk.wait(process, seconds)

    @rule(index=INDICES)
    def mute(self, index):
        """The stage-mates of a peer hear nothing of it any more."""
        self.walk.mute(self._one(index))

    @rule(index=INDICES, kind=st.sampled_from(("crash", "cut off", "leave")), loses=st.booleans())
    def end(self, index, kind, loses):
        """A peer ends, or the others believe so."""
        process = self._one(index)
        if not self.walk.is_spare(process):
            return
        if kind == "leave":
            self.walk.driver.leave(process)
        if kind == "crash":
            self.walk.crash(process, loses=loses)
        self.walk.put_out(process)

    def _one(self, index):
        return self.walk.living[index % len(self.walk.living)]

    def teardown(self):
        """Look at what was agreed."""
        if self.walk is not None:
            self.walk.end()
