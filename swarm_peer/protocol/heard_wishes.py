"""The wishes about one epoch that a seat knows, its own among them. Pure."""

from __future__ import annotations

from swarm_peer.protocol.statements import Seat, Sign, Signed, Silent, Statement, Wish, subject_of

# A wish that its author has not repeated for so many times resend_s is none any more.
WISHES_LAPSE = 8


class HeardWishes:
    """Wishes about one epoch, each with the time at which it was heard last: its author repeats it for as long as it
    wishes so. A later one about the same thing replaces it.
    """

    def __init__(self) -> None:
        self._heard: dict[tuple[object, ...], tuple[Signed[Wish], float]] = {}

    def hear(self, signed: Signed[Wish], now_s: float) -> None:
        """Note a wish."""
        self._heard[subject_of(signed.body)] = signed, now_s

    def is_new(self, wish: Wish) -> bool:
        """Whether a wish is not known."""
        known = self._heard.get(subject_of(wish))
        return known is None or known[0].body != wish

    def accuses(self, author: Seat) -> bool:
        """Whether a voter has found somebody silent. Once it hears all of them again, it says that, too."""
        return any(isinstance(body, Silent) and body.author == author and bool(body.seats) for body in self.bodies)

    def renew(self, wish: Wish, sign: Sign, now_s: float) -> Signed[Wish]:
        """Note a wish of this seat's own, which it signs once."""
        signed = sign(wish) if self.is_new(wish) else self._heard[subject_of(wish)][0]
        self.hear(signed, now_s)
        return signed

    def lapse(self, now_s: float, resend_s: float) -> None:
        """Forget what its author has not repeated for long."""
        since_s = now_s - WISHES_LAPSE * resend_s
        self._heard = {subject: each for subject, each in self._heard.items() if each[1] >= since_s}

    def authors(self, kind: type[Statement] = Statement) -> set[Seat]:
        """Those who wish something, or something of one kind."""
        return {body.author for body in self.bodies if isinstance(body, kind)}

    @property
    def bodies(self) -> list[Wish]:
        """The wishes alone."""
        return [signed.body for signed, _ in self._heard.values()]

    @property
    def signed(self) -> list[Signed[Wish]]:
        """The same with signatures, in an order that all know."""
        wishes = (signed for signed, _ in self._heard.values())
        return sorted(wishes, key=lambda signed: repr((type(signed.body).__name__, signed.body.author)))
