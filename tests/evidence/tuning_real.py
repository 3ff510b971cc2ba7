"""Tuning against every setting, decoded for real: the demo pair on the CPU and an RPC device with a budget.

Every setting of a space is measured, then the fastest ones again, interleaved; then the search is made on the same
machine. An idle machine is needed, and a quarter of an hour.

.venv/bin/python tests/evidence/tuning_real.py [seconds for the exhaustive part, 1500 without]
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import save

from ggufspec.api.options import machine_to_plan_for
from ggufspec.api.pairs import open_pair
from ggufspec.api.plan import make_plan
from ggufspec.bench.run_log import RunLog
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import trial_speed
from ggufspec.bench.trial import attempt
from ggufspec.cli import inputs
from ggufspec.settings.table import Settings
from ggufspec.tune.experiment import experiment as tune_experiment
from ggufspec.tune.experiment import without_tuned
from ggufspec.tune.run import LOG, TuneExperiment, Tuning
from tests.support.processes import rpc_worker

CARD_BYTES = 20_000_000  # the target's seven layers take more
LEADERS, REPEATS = 8, 5


def experiment(endpoint: str) -> TuneExperiment:
    """The demo pair with 20 MB of a card, one thread."""
    free = machine_to_plan_for(Settings(rpc=(endpoint,)), 1).cards[0].free_bytes
    given = Settings(
        rpc=(endpoint,), headroom=str(free - CARD_BYTES), threads=1, flash_attn="on", predict=24, repetitions=3
    )
    pair = inputs.pair(given)
    untuned = without_tuned(pair, given)
    planned = make_plan(open_pair(untuned, given))
    return tune_experiment(pair, given, planned, prompt=None, threshold=0.001, budget_s=None)


def main() -> None:
    """Exhaust, repeat the leaders, tune, compare."""
    allowed_s = float(sys.argv[1]) if len(sys.argv) > 1 else 1500.0
    with rpc_worker() as (endpoint, _):
        made = experiment(endpoint)

        def measured(index: int) -> float:
            one = made.space[index]
            draft = made.spec.draft if one.options.needs_draft else None
            found = attempt(replace(made.spec, options=one.options, draft=draft))
            return trial_speed(found.result) if found.result else 0.0

        began, first = time.monotonic(), dict[int, float]()
        for index in range(len(made.space)):
            first[index] = measured(index)
            print(f"{index + 1} of {len(made.space)}", file=sys.stderr, flush=True)
            if time.monotonic() - began > allowed_s:
                break
        with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder) / "run_log", LOG) as run_log:
            run = Tuning(made, run_log)
            run.run(lambda *_: None)
            winner, trials = run.winner(), len(run.kept)
        assert winner is not None
        leaders = sorted(first, key=lambda index: -first[index])[:LEADERS]
        again: dict[int, list[float]] = {index: [] for index in dict.fromkeys([*leaders, winner])}
        for repeat in range(REPEATS):
            for index in list(again)[repeat:] + list(again)[:repeat]:
                again[index].append(measured(index))
    best = max(again, key=lambda index: spread(again[index]).median)
    results: dict[str, Any] = {
        "space": len(made.space),
        "measured": len(first),
        "trials": trials,
        "trials_of_exhaustive": trials / len(made.space),
        "share_of_best": spread(again[winner]).median / spread(again[best]).median,
        "winner": asdict(made.space[winner].setting) | {"tokens_per_s": asdict(spread(again[winner]))},
        "best": asdict(made.space[best].setting) | {"tokens_per_s": asdict(spread(again[best]))},
        "leaders": [asdict(made.space[index].setting) | {"samples": samples} for index, samples in again.items()],
    }
    print(results["share_of_best"], results["trials_of_exhaustive"])
    save("tuning-real", results)


if __name__ == "__main__":
    main()
