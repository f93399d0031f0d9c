"""`swarm-peer doctor`: says what keeps this machine from taking part, or from doing it well, before it joins."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarm_peer.addresses import check_own_addresses
from swarm_peer.initial_peers import check_initial_peers
from swarm_peer.logs import configure_logging, on_one_line
from swarm_peer.peer_options import LOGS, RUN, Addresses, PeerOptions

if TYPE_CHECKING:
    from swarm_peer.policy.diagnosis.finding import CheckFinding

# Exit code of a machine that could not take part.
CANNOT_TAKE_PART = 2
# By level: the word that a line begins with, and its colour on a terminal (ANSI's SGR).
WORDS = {"ok": ("ok", "32"), "warning": ("warn", "33"), "failure": ("FAIL", "31")}


class DoctorOptions(PeerOptions):
    """The options of the peer that this machine is to run; only the run may be left out."""

    initial_peers: Annotated[Addresses, RUN] = ()
    """Addresses of any peers of the run, or an invite, as the coordinator prints them; @FILE for a file of them."""


def doctor(
    *invite: Annotated[str, RUN],
    options: Annotated[DoctorOptions, Parameter(name="*")] = DoctorOptions(),  # noqa: B008  # it is frozen
    json_: Annotated[bool, Parameter(name="--json", negative=""), LOGS] = False,
) -> None:
    """Check this machine and its ways to a run: a line for each thing, with what to do where it is not well.

    Takes the options of swarm-peer, so that the line by which a machine joins works with `doctor` in it. Announces
    nothing, and downloads nothing but 4 MiB from each of three members, to which it sends as much. Exit code 0 means
    that the peer could take part, 2 that it could not.

    Args:
        invite: What the coordinator prints, in place of --initial-peers. Without any, the machine alone is looked at.
        json_: One JSON object on standard output, for programs.
    """
    configure_logging("error" if options.log_level == "info" else options.log_level)
    options = options.model_copy(update={"initial_peers": (*invite, *options.initial_peers)})
    check_initial_peers(options.initial_peers)
    check_own_addresses(options.host_maddrs, options.announce_maddrs)
    if options.initial_peers and not json_ and sys.stderr.isatty():
        print("Measuring: half a minute, or a few minutes on a slow link ...", file=sys.stderr)
    from swarm_peer.policy.diagnosis.finding import can_take_part
    from swarm_peer.runtime.doctor import examine

    findings = examine(options)
    is_able = can_take_part(findings)
    if json_:
        rows = [
            {"check": each.check, "level": each.level.value, "seen": each.seen, "remedy": each.remedy}
            for each in findings
        ]
        print(json.dumps({"can_take_part": is_able, "findings": rows}))
    else:
        _print(findings, has_colours=sys.stdout.isatty())
        print(f"This machine {'can' if is_able else 'cannot'} take part.")
    if not is_able:
        sys.exit(CANNOT_TAKE_PART)


def _print(findings: Sequence[CheckFinding], *, has_colours: bool) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        word, colour = WORDS[finding.level.value]
        sign = f"\x1b[{colour}m{word:4}\x1b[0m" if has_colours else f"{word:4}"
        print(f"{sign}  {finding.check:{width}}  {on_one_line(finding.text)}")
