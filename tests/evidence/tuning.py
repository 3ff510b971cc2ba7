"""How near tuning comes to the best setting, and with how many trials: on simulated machines, every setting known.

The machines are those of tests/support/simulator.py; nothing is decoded.

.venv/bin/python tests/evidence/tuning.py
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import save

from tests.support import simulator

SEEDS = (0, 7, 3)
MACHINES = 64


def summary(outcomes: list[simulator.Outcome]) -> dict[str, Any]:
    """The distribution, and every miss."""
    shares = sorted(outcome.share for outcome in outcomes)
    return {
        "machines": len(outcomes),
        "at_least_97_percent": sum(share >= 0.97 for share in shares) / len(shares),
        "worst": shares[0],
        "fifth_percentile": shares[len(shares) // 20],
        "median": median(shares),
        "trials": {"median": median(o.trials for o in outcomes), "most": max(o.trials for o in outcomes)},
        "trials_of_exhaustive": {
            "median": median(o.trials / o.space for o in outcomes),
            "most": max(o.trials / o.space for o in outcomes),
        },
        "failed_trials": {"median": median(o.failed for o in outcomes), "most": max(o.failed for o in outcomes)},
        "planned_share": {
            "median": median(o.planned_share for o in outcomes),
            "did_not_fit": sum(o.planned_share == 0 for o in outcomes),
        },
        "misses": [asdict(outcome) for outcome in outcomes if outcome.share < 0.97],
    }


def main() -> None:
    """Tune on every machine of every seed; 0 is the one that the tests hold to the claim."""
    by_seed = {}
    for seed in SEEDS:
        outcomes = []
        for case in simulator.cases(MACHINES, seed):
            outcomes.append(simulator.tune(simulator.Simulated(case)))
            print(f"seed {seed}: {len(outcomes)} of {MACHINES}, {outcomes[-1].share:.3f}", file=sys.stderr, flush=True)
        by_seed[seed] = outcomes
    every = [outcome for outcomes in by_seed.values() for outcome in outcomes]
    save(
        "tuning",
        {
            "what": "true tokens/s of tuning's winner ÷ that of the best of all settings, on simulated machines",
            "noise": simulator.NOISE,
            "all": summary(every),
            "by_seed": {seed: summary(outcomes) for seed, outcomes in by_seed.items()},
            "outcomes": [asdict(outcome) | {"winner": None} for outcome in every],
        },
    )


if __name__ == "__main__":
    main()
