"""swarm-coordinator: its commands, each in coordinator/commands. Heavy imports come last, so that --help is quick."""

from __future__ import annotations

from cyclopts import App

from coordinator.commands.export import export
from coordinator.commands.live import end, evaluate, sample, status
from coordinator.commands.plan import plan
from coordinator.commands.runs import baseline, local, serve
from coordinator.commands.simulate import simulate
from swarm_peer import __version__
from swarm_peer.cli import run_app

app = App(name="swarm-coordinator", version=__version__, help_format="plaintext")
for command in (serve, local, status, end, plan, evaluate, sample, baseline, export, simulate):
    app.command(command)

run = run_app(app)

if __name__ == "__main__":
    run()
