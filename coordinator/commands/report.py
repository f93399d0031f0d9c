"""`report`: a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarm_peer.cli import configure_logging
from swarm_peer.config import RUN


def report(
    output: Annotated[Path, RUN, Parameter(name="OUTPUT")],
    /,
    *,
    to: Annotated[Path | None, RUN] = None,
    png: Annotated[bool, RUN, Parameter(negative="")] = False,
    price_per_peer_hour: Annotated[float | None, RUN, Parameter(validator=Number(gte=0))] = None,
) -> None:
    """Write a page about a run that is over or under way: losses, throughput, peers, events, where the time went.

    Args:
        output: Folder of the run, with its metrics.jsonl.
        to: HTML file to write; OUTPUT/report.html if not given.
        png: Write the figures beside it, too.
        price_per_peer_hour: What an hour of one peer costs, in any currency, for the cost of the run.
    """
    configure_logging("warning")
    from coordinator.report.page import write_report

    print(f"Report: {write_report(output, to, pngs=png, price_per_peer_hour=price_per_peer_hour)}")
