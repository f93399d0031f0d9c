"""Judges a machine's place in a run: its clock, its port and router, its ways to members, its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, ip_address
from statistics import median

from swarm_peer.policy.diagnosis.finding import CheckFinding, failure, fine, in_bytes, in_figures, warning

# Addresses that providers give to customers who share a public one: RFC 6598.
SHARED_BY_PROVIDERS = IPv4Network("100.64.0.0/10")
# Frames of peers are given up that are slower (runtime/network/frame_stream.py).
SLOWEST_BYTES_PER_S = 64e3
# Of the time that a hop may take, the most that a microbatch should spend on the link.
LINK_SHARE = 0.25
# A closed port slows a peer, and keeps it from nothing.
WITHOUT_PORT = "without that the peer takes part with other members' help, slowly where they carry its connections"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWay:
    """The way to one member.

    Attributes:
        is_direct: whether it answers at an address of its own
        is_reached: whether it has answered a call, be it over a connection that it has made itself
        round_trip_s: the shortest of some
        clock_off_s: how far its clock is ahead of this machine's
        up_bytes_per_s, down_bytes_per_s: to the member, and from it; None if not measured
        reason: why it was not reached, or something not measured
    """

    peer_id: str
    is_direct: bool
    is_reached: bool
    round_trip_s: float | None = None
    clock_off_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPosition:
    """Where a machine is in the network, by its own word and by others'.

    Attributes:
        ports: that it listens on, or that its operator announces
        own_hosts: the IP addresses of its interfaces
        seen_hosts: those that members see
        is_reachable: whether those furthest away can dial it; None if nobody has told
        closed: hosts and ports that did not answer them
    """

    ports: Sequence[int] = ()
    own_hosts: Sequence[str] = ()
    seen_hosts: Sequence[str] = ()
    is_reachable: bool | None = None
    closed: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLimits:
    """How far clocks may differ.

    Attributes:
        tolerance_s: without any harm
        ahead_s: until others refuse what this machine announces
        behind_s: until that seems to have expired
    """

    tolerance_s: float
    ahead_s: float
    behind_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """The speed to expect of a machine in one stage.

    Attributes:
        samples_per_s: as `plan` has it, links included
        is_linked: whether the link bounds that, and not the device
        others_samples_per_s: the median of what the stage's peers announce; 0 if none has measured it
    """

    stage: int
    samples_per_s: float
    is_linked: bool
    others_samples_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that was measured in a run.

    Attributes:
        ways: to some members
        microbatch_bytes: that the busiest boundary between stages takes for one microbatch, in one direction
        hop_timeout_s: for a microbatch and its gradient
        num_stages: of the run
        too_small: why no stage fits into the memory; empty if one does
        too_large: the stages that do not fit
        fits: what is to be expected in the others
        tokens_per_sample: length of a sample
    """

    name: str
    clocks: ClockLimits
    position: NetworkPosition
    ways: Sequence[MemberWay]
    microbatch_bytes: float
    hop_timeout_s: float
    num_stages: int
    too_small: str = ""
    too_large: Sequence[int] = ()
    fits: Sequence[StageFit] = ()
    tokens_per_sample: int = 1


class RouterKind(Enum):
    """The router that a machine is behind, as far as others can tell it."""

    UNKNOWN = "not known, since nobody outside has said what it sees"
    NONE = "none that translates addresses"
    TRANSLATES = "one that translates addresses"
    SHARED = "a provider's, which shares one address among customers"
    SEVERAL = "one with several addresses, as providers have"


def judge_run(facts: RunFacts) -> tuple[CheckFinding, ...]:
    """Judge all of a machine's place in a run, a finding for each check."""
    return (
        fine("run", f"{facts.name}, of {facts.num_stages} stages"),
        judge_clock([way.clock_off_s for way in facts.ways if way.clock_off_s is not None], facts.clocks),
        judge_members(facts.ways),
        judge_port(facts.position),
        judge_router(facts.position),
        judge_links(facts.ways, facts.microbatch_bytes, facts.hop_timeout_s),
        judge_stages(facts),
        judge_speed(facts.fits, facts.tokens_per_sample),
    )


def judge_clock(offsets_s: Sequence[float], limits: ClockLimits) -> CheckFinding:
    """Whether this machine's clock agrees with those of members. The median counts, since one of them may be wrong."""
    if not offsets_s:
        return fine("clock", "not compared, since no member has told its time")
    off_s = median(offsets_s)
    words, plural = "behind" if off_s > 0 else "ahead of", "s" if len(offsets_s) > 1 else ""
    seen = f"{abs(off_s):.1f} s {words} the clock{plural} of {len(offsets_s)} member{plural}"
    if abs(off_s) <= limits.tolerance_s:
        return fine("clock", seen)
    judged = failure if off_s >= limits.behind_s or -off_s >= limits.ahead_s else warning
    return judged("clock", seen, "set it by the network's time, such as with `timedatectl set-ntp true`")


def judge_members(ways: Sequence[MemberWay]) -> CheckFinding:
    """Whether this machine reaches members."""
    if not ways:
        return warning("members", "none was found to try", "try again once the run has peers")
    reached = [way for way in ways if way.is_reached]
    lost = [way for way in ways if not way.is_reached]
    if not reached:
        seen = f"none of {len(ways)} answers ({lost[0].reason})"
        return failure("members", seen, "let this machine dial out by TCP, in its firewall and its network's")
    trips_ms = sorted(1e3 * way.round_trip_s for way in reached if way.round_trip_s is not None)
    trips = f", round trips of {trips_ms[0]:.0f} to {trips_ms[-1]:.0f} ms" if trips_ms else ""
    num_direct = sum(way.is_direct for way in reached)
    seen = f"{len(reached)} of {len(ways)} answer, {num_direct} at addresses of their own{trips}"
    if lost:
        names = ", ".join(way.peer_id[-8:] for way in lost)
        return warning("members", f"{seen}; not {names} ({lost[0].reason})", "forward this machine's port, or theirs")
    return fine("members", seen)


def judge_port(position: NetworkPosition) -> CheckFinding:
    """Whether others can dial this machine."""
    ports = " and ".join(map(str, position.ports)) or "none"
    if position.is_reachable is None:
        return fine("port", f"TCP {ports}; nobody outside has tried it")
    if position.is_reachable:
        return fine("port", f"TCP {ports} is reached from outside")
    remedy = f"forward port {ports} of the router (TCP) to this machine, and let its firewall through"
    if router_of(position) in (RouterKind.SHARED, RouterKind.SEVERAL):
        remedy = "ask the provider for an address of this machine's own, since its router forwards no port"
    elif router_of(position) is RouterKind.NONE:
        remedy = f"let port {ports} through the firewall of this machine or of its cloud (TCP)"
    return warning("port", f"closed to others at {', '.join(position.closed)}", f"{remedy}; {WITHOUT_PORT}")


def judge_router(position: NetworkPosition) -> CheckFinding:
    """Say which kind of router the machine is behind. The port's finding says what it costs."""
    router = router_of(position)
    hosts = f", as {', '.join(dict.fromkeys(position.seen_hosts))}" if position.seen_hosts else ""
    return fine("router", f"{router.value}{hosts}")


def router_of(position: NetworkPosition) -> RouterKind:
    """The router that a machine is behind, by the addresses that it has and those that members see of it."""
    seen = {host for host in position.seen_hosts if isinstance(ip_address(host), IPv4Address)}
    if not position.seen_hosts:
        return RouterKind.UNKNOWN
    if seen.issubset(position.own_hosts):  # so is IPv6, which hardly any router translates
        return RouterKind.NONE
    own = [ip_address(host) for host in position.own_hosts]
    if any(isinstance(host, IPv4Address) and host in SHARED_BY_PROVIDERS for host in own):
        return RouterKind.SHARED
    public = {host for host in seen if ip_address(host).is_global}
    return RouterKind.SEVERAL if len(public) > 1 else RouterKind.TRANSLATES


def judge_links(ways: Sequence[MemberWay], microbatch_bytes: float, hop_timeout_s: float) -> CheckFinding:
    """Whether the link carries a run's microbatches. The quickest way counts: others may end at slow members."""
    ups = [way.up_bytes_per_s for way in ways if way.up_bytes_per_s is not None]
    downs = [way.down_bytes_per_s for way in ways if way.down_bytes_per_s is not None]
    if not ups or not downs:
        reasons = [way.reason for way in ways if way.is_reached and way.reason]
        return fine("links", f"not measured ({reasons[0] if reasons else 'no member answers'})")
    slowest = min(max(ups), max(downs))
    seen = f"about {in_bytes(max(ups))}/s up and {in_bytes(max(downs))}/s down"
    if slowest < SLOWEST_BYTES_PER_S:
        return warning("links", seen, f"take another link: peers need {in_bytes(SLOWEST_BYTES_PER_S)}/s both ways")
    if microbatch_bytes / slowest > LINK_SHARE * hop_timeout_s:
        seen = f"{seen}, and a microbatch of {in_bytes(microbatch_bytes)} takes {microbatch_bytes / slowest:.0f} s"
        return warning("links", seen, f"take a faster link, since a hop may take {hop_timeout_s:.0f} s in all")
    return fine("links", seen)


def judge_stages(facts: RunFacts) -> CheckFinding:
    """Whether the memory is large enough for a stage of the run."""
    if facts.too_small:
        return failure("stages", facts.too_small)
    fitting = [str(stage) for stage in range(facts.num_stages) if stage not in facts.too_large]
    return fine("stages", f"memory for {'all' if len(fitting) == facts.num_stages else ', '.join(fitting)}")


def judge_speed(fits: Sequence[StageFit], tokens_per_sample: int) -> CheckFinding:
    """Say what is to be expected of the machine, in the stage where it does most."""
    if not fits:
        return fine("speed", "not estimated")
    best = max(fits, key=lambda fit: fit.samples_per_s)
    bound = "link" if best.is_linked else "device"
    tokens_per_s = in_figures(best.samples_per_s * tokens_per_sample)
    seen = f"about {tokens_per_s} tokens/s in stage {best.stage}, by its {bound}"
    if best.others_samples_per_s:
        seen += f"; a peer there computes {in_figures(best.others_samples_per_s * tokens_per_sample)}"
    return fine("speed", seen)
