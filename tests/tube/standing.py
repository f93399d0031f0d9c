"""Where every host stands, in words, for the log of a schedule that has stood still."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from invariants import members_of

from swarm_peer.protocol.epochs import COORDINATORS

if TYPE_CHECKING:
    from hosts import Host
    from world import World


def note_standing(world: World) -> None:
    """Write into the log where every host stands."""
    for host in world.alive():
        for line in _lines(world, host):
            world.log.append(f"{world.loop.time():.6f} {host} stands {line}")


def _lines(world: World, host: Host) -> Iterator[str]:
    if host.agreement is None:
        yield "without epochs"
        return
    core = host.agreement.core
    membership, names = core.membership, {other.seat: other.name for other in world.hosts if other.seat is not None}
    rosters = {
        stage: [names.get(seat, "?") for seat in core.epoch.roster(stage)]
        for stage in range(COORDINATORS, membership.rules.num_stages)
    }
    silent = [names.get(seat, "?") for seat in membership._probed_s]
    wishes = [f"{type(each).__name__} {names.get(each.author, '?')}" for each in membership._wishes.bodies]
    yield f"in epoch {tuple(core.epoch.id)[::2]} {rosters} since {membership._since_s:.0f} s; {core.epoch.restart}"
    yield f"wants {set(membership.desired)} has {set(membership.prepared)} suspects {silent}; wishes {wishes}"
    before_round, step, held = membership.holds
    offered = sorted((name.optimizer_step, name.stage, name.base[:4]) for name in held)
    yield f"offers round {before_round}, step {step}: {offered}"
    for stage, member in members_of(host).items():
        log, work, at = member.log, member.work, f"stage {stage}:"
        doing = [
            name
            for name in ("working", "voiding", "draining", "rooting", "adopting", "averaging")
            if getattr(member, name) is not None
        ]
        rounds = {number: (each.voids, each.is_void, each.is_drained) for number, each in work.open.items()}
        yield f"{at} next {log.next_round} head {log.head[:6]} state {member.state[:6]} behind {member.is_behind}"
        reign, closes = member.reign and member.reign.number, list(member.closes)
        yield f"{at} reign {reign} {doing} rounds {rounds} closes {closes}"
        if (leader := core.leaders.get(stage)) is not None:
            ready = [names.get(seat, "?") for seat in leader.round.ready]
            attempt = leader.round.attempt
            cut = None if attempt is None else [names.get(seat, "?") for seat in attempt.cut.seats]
            base = leader.others.base(leader.round.number, core.epoch)
            base_text = None if base is None else [head[:6] for head in base]
            lease = membership.has_lease(membership._now_s)
            yield f"{at} leads; synced {leader.is_synced} lease {lease} ready {ready} cut {cut} base {base_text}"
        if (granted := member.granted) is not None:
            working = member.working
            claimed = None if working is None else (working.computed.claimed, working.voids)
            wants = f"wants {member.wants_samples} claimed, voids {claimed}"
            yield f"{at} granted {granted.round} up to {granted.up_to} {wants}"
    replica: Any = None if host.peer is None else host.peer._replica
    if replica is not None and host.peer is not None:
        driver, step, at = replica.parts.driver, replica.step, f"replica of {replica.stage}:"
        yield f"{at} weights {driver._weights[1][:6]} opened {driver._opened} {driver.complaint()!r}"
        yield f"{at} {host.peer._lifecycle.state} {step.phase} round {step.round_number}"
        launcher = replica.parts.launcher
        if launcher is not None:
            text = f"in flight {launcher._in_flight} waiting {len(launcher._waiting)} draws {launcher._is_drawing}"
            yield f"launcher: {text} window {launcher._most_in_flight}"
