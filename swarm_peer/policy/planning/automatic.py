"""Where peers end up by themselves: each takes a stage, and a coordinator balances what the stages compute."""

from __future__ import annotations

from swarm_peer.policy.planning.performance_model import Prediction, Predictor


def predict_automatic(predictor: Predictor) -> Prediction | None:
    """Predict a run that all peers join with `--stage auto`; None if some stage would have too few.

    None of them stays without a stage but for want of a way, and neither they nor a coordinator look at links, as
    policy/placement/rebalancing.py says. Balanced here as they end up after the coordinator's moves: each takes the
    stage with the least compute, of those that fit into its memory; first those that fit the fewest, then the fastest.
    """
    stages = range(len(predictor.works))
    counts = [[0] * len(predictor.groups) for _ in stages]
    capacity = [0.0 for _ in stages]  # samples per second
    fits = [[stage for stage in stages if predictor.fits(stage, index)] for index in range(len(predictor.groups))]
    groups = predictor.groups
    for index in sorted(range(len(fits)), key=lambda g: (groups[g].is_closed, len(fits[g]), -groups[g].flops_per_s)):
        group, fitting = predictor.groups[index], fits[index]
        for _ in range(group.count if fitting else 0):
            reached = [stage for stage in fitting if predictor.may_join(counts, stage, index)]
            if not reached:
                break  # the others wait for a way
            stage = min(reached, key=capacity.__getitem__)
            counts[stage][index] += 1
            capacity[stage] += group.flops_per_s / predictor.works[stage].flops
    if min(map(sum, counts)) < predictor.settings.min_peers:
        return None
    return predictor.predict(counts)
