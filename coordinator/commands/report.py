"""`report`: a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import RUN


def report(
    run: Annotated[Path | None, RUN, Parameter(name="RUN")] = None,
    /,
    *,
    to: Annotated[Path | None, RUN] = None,
    png: Annotated[bool, RUN, Parameter(negative="")] = False,
    price_per_peer_hour: Annotated[float | None, RUN, Parameter(validator=Number(gte=0))] = None,
) -> None:
    """Write a page about a run that is over or under way: losses, throughput, peers, events, where the time went.

    Args:
        run: Folder of a run, live or over, such as runs/demo; the newest one in ./runs if not given.
        to: HTML file to write; RUN/report.html if not given.
        png: Write the figures beside it, too.
        price_per_peer_hour: What an hour of one peer costs, in any currency, for the cost of the run.
    """
    configure_logging("warning")
    from coordinator.report.page import write_report
    from coordinator.run.found_runs import newest_folder

    page = write_report(newest_folder(run), to, pngs=png, price_per_peer_hour=price_per_peer_hour)
    print(f"Report: {page}")
    for figure in sorted(page.parent.glob(f"{page.stem}-*.png")) if png else ():
        print(f"Figure: {figure}")
