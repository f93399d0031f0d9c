"""Explore the protocol's core: python tests/protocol [--first N] [--count N] [--kind KIND] [--planted MISTAKE]

Each schedule follows from its seed, so a line that names a seed is all that is needed to repeat it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

import planted_rounds
import was_alone
import world

# Kinds of schedules: as runs are; with seats that forget epochs soon; with one liar that was alone as the run began.
KINDS = {"usual": world.run, "forgetful": lambda seed: world.run(seed, kept=3), "alone": was_alone.run}


def main() -> int:
    """Run schedules; returns how many broke an invariant, at most 1 for the shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many schedules")
    parser.add_argument("--kind", choices=KINDS, default="usual", help="which schedules")
    parser.add_argument("--planted", choices=planted_rounds.MISTAKES, help="plant it, and stop where it is found")
    chosen = parser.parse_args()
    begun_s, counts, num_broken, seed = time.process_time(), Counter[str](), 0, chosen.first
    with planted_rounds.planted(chosen.planted) if chosen.planted else nullcontext():
        for seed in range(chosen.first, chosen.first + chosen.count):
            try:
                counts.update(KINDS[chosen.kind](seed).counts)
            except world.Violation as violation:
                num_broken += 1
                print(f"seed {seed}: {str(violation)[:300]}", flush=True)
                if chosen.planted:
                    break
    number = seed - chosen.first + 1
    seconds = (time.process_time() - begun_s) / number
    print(f"{number} schedules, {num_broken} broken, {seconds:.2f} core-seconds each")
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    return min(num_broken, 1)


if __name__ == "__main__":
    sys.exit(main())
