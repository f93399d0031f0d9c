"""swarm-coordinator: its commands, each in coordinator/commands. Heavy imports come last, so that --help is quick."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.commands.check_data import check_data
from coordinator.commands.decay import decay
from coordinator.commands.export import export
from coordinator.commands.invites import invite, invites, revoke
from coordinator.commands.live import dashboard, end, evaluate, sample, status
from coordinator.commands.plan import plan
from coordinator.commands.report import report
from coordinator.commands.runs import baseline, local, serve
from coordinator.commands.simulate import simulate
from swarm_peer.cli import add_commands, make_app, run_app

# Of each command, in the order of use.
EXAMPLES: dict[Callable[..., None], str] = {
    local: "swarm-coordinator local demo --peers 2,2",
    check_data: "swarm-coordinator check-data my-chats.yaml --set data.packing=true",
    serve: "swarm-coordinator serve demo\nswarm-coordinator serve gpt2-124m --set training.steps=500",
    invite: "swarm-coordinator invite --label alice --expires 7d",
    invites: "swarm-coordinator invites runs/demo",
    revoke: "swarm-coordinator revoke alice",
    status: "swarm-coordinator status\nswarm-coordinator status runs/demo --json",
    dashboard: "swarm-coordinator dashboard\nswarm-coordinator dashboard --initial-peers swarm-invite-lMQgavLkz0...",
    sample: "swarm-coordinator sample --prompt 'def add(a, b):' --tokens 100\nswarm-coordinator sample --chat",
    evaluate: "swarm-coordinator evaluate --files book.txt --samples 64",
    report: "swarm-coordinator report\nswarm-coordinator report runs/demo --price-per-peer-hour 0.4",
    export: "swarm-coordinator export --output my-model",
    decay: "swarm-coordinator decay runs/demo --steps 200",
    end: "swarm-coordinator end runs/demo",
    plan: "swarm-coordinator plan gpt2-124m --peers volunteers --tokens 300B",
    baseline: "swarm-coordinator baseline demo --steps 30 --output runs/baseline",
    simulate: "swarm-coordinator simulate --stages 4 --peers 40 --hours 6",
}

app = make_app("swarm-coordinator", "More of each command:\n  swarm-coordinator serve --help")
add_commands(app, EXAMPLES)

run = run_app(app)

if __name__ == "__main__":
    run()
