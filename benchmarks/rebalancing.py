"""How near the optimum does a swarm stay whose peers come and go, and what does that cost?

Simulated (flow level): no rebalancing, the paper's protocol every 300 and every 60 seconds, the live search of moves by
a policy that knows everything at once (events), and the live policy itself (live), over recorded or drawn traces. Each
figure is the mean over seeds with its 95 % interval (Student's t). A seed draws the machines' speeds, the noise of what
they announce, and which machines leave where a trace has counts only. Newcomers and movers download alike under all
policies.

    python benchmarks/rebalancing.py --trace g4dn=traces/g4dn-trace.csv --stages 4 6 8 --seeds 10
    python benchmarks/rebalancing.py --draw 40,12,9000 --stages 4 --figure swarm_peer/policy/placement/rebalancing.png
    python benchmarks/rebalancing.py --decision

`--draw PEERS,HOURS,MEAN_LIFETIME_S` draws a trace per seed. `--decision` measures one decision for 1,000 peers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from statistics import mean, stdev

from coordinator.simulator.options import ArrivalOptions, StageOptions
from coordinator.simulator.simulate import HOUR_S, FlowResult, Scenario, best_of, simulate_flow
from coordinator.simulator.world import Distribution, Population
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import rebalance
from swarm_peer.policy.view import PeerState, PeerView, SwarmView

REBALANCINGS = ("none", "300", "60", "events", "live")
# Two-sided 95 % of Student's t, by the number of seeds.
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--draw", action="append", default=[], metavar="PEERS,HOURS,MEAN_LIFETIME_S")
    parser.add_argument("--stages", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--speed", default="lognormal:1,0.35")
    parser.add_argument("--make-before-break", action="store_true")
    parser.add_argument("--rebalance", nargs="+", default=list(REBALANCINGS))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--decision", action="store_true")
    options = parser.parse_args()
    if options.decision:
        measure_decision()
        return
    population = Population(speed=Distribution.parse(options.speed, "--speed"))
    print(
        "| trace | stages | rebalancing | overall % | first hour % | last hour % | moves (GB) "
        "| loss % joining / moving / imbalance | attainable % |"
    )
    print("|" + "---|" * 9)
    named = [item.split("=", 1) for item in options.trace]
    arrivals = {name: ArrivalOptions(trace=Path(path)) for name, path in named}
    for item in options.draw:
        peers, hours, lifetime_s = item.split(",")
        drawn = ArrivalOptions(num_peers=int(peers), hours=float(hours), mean_lifetime_s=float(lifetime_s))
        arrivals[f"{peers} peers, {lifetime_s} s"] = drawn
    for num_stages, name in itertools.product(options.stages, arrivals):
        stages = StageOptions(num_stages=num_stages, make_before_break=options.make_before_break)
        scenarios = [
            Scenario(stages=stages, arrivals=arrivals[name], seed=seed, population=population)
            for seed in range(options.seeds)
        ]
        report(name, scenarios, options.rebalance, options.figure)


def report(name: str, scenarios: list[Scenario], rebalancings: list[str], figure: Path | None) -> None:
    """Simulate all scenarios under all policies, and print one row of the table for each policy."""
    results: dict[str, list[FlowResult]] = {rebalance: [] for rebalance in rebalancings}
    for scenario in scenarios:
        trace = scenario.read_trace()
        best = best_of(scenario, trace)
        for rebalancing in rebalancings:
            results[rebalancing].append(simulate_flow(scenario, rebalancing, trace, best))
    for rebalancing, runs in results.items():
        summaries = [run.summary for run in runs]
        shares = [summary["share_of_optimum"] for summary in summaries]
        loss = " / ".join(
            f"{100 * mean(summary['loss'][kind] for summary in summaries):.1f}"
            for kind in ("joining", "moving", "imbalance")
        )
        cells = [
            name,
            str(scenarios[0].stages.num_stages),
            rebalancing,
            *(interval([100 * share[when] for share in shares if share[when] is not None]) for when in shares[0]),
            interval([summary["bytes_moved"] / 1e9 for summary in summaries], 0),
            loss,
            f"{100 * mean(summary['attainable_share_of_optimum'] for summary in summaries):.1f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    if figure is not None:
        from coordinator.simulator.figure import draw

        draw({rebalancing: runs[0] for rebalancing, runs in results.items()}, figure)


def interval(values: list[float], digits: int = 2) -> str:
    """The mean and its 95 % interval, as text."""
    if not values:
        return "-"
    half = STUDENT_T.get(len(values), 1.96) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{mean(values):.{digits}f} ± {half:.{digits}f}"


def measure_decision() -> None:
    """Time decisions, among them the most expensive kind: half of one stage's peers are gone."""
    for num_peers, num_stages in ((100, 4), (100, 8), (1000, 8), (1000, 16)):
        peers = [
            PeerView(
                peer_id=f"p{n:04d}",
                stage=n % num_stages,
                state=PeerState.SERVING,
                samples_per_s=0.5 + n * 37 % 100 / 100,
                movable=True,
            )
            for n in range(num_peers)
        ]
        view = SwarmView(num_stages, tuple(p for n, p in enumerate(peers) if n % num_stages or n % 2))
        params = RebalancingParameters(stage_costs=(1.0,) * num_stages, state_bytes=(1e9,) * num_stages)
        for what, seen in (("a stage is halved", view), ("at rest", SwarmView(num_stages, tuple(peers)))):
            spent = []
            for _ in range(20):
                begun = time.perf_counter()
                moves = rebalance(seen, params, HOUR_S).moves
                spent.append(1000 * (time.perf_counter() - begun))
            print(
                f"{num_peers} peers, {num_stages} stages, {what}: median {sorted(spent)[10]:.1f} ms, "
                f"most {max(spent):.1f} ms, {len(moves)} moves"
            )


if __name__ == "__main__":
    main()
