"""What a plan predicts of one model: calibrated idle, and calibrated beside a busy program and then asked idle.

    .venv/bin/python tests/evidence/calibrating.py -r 3            # docs/evidence/calibrating.json
    .venv/bin/python tests/evidence/calibrating.py --folder out    # elsewhere, for a trial

Each repetition has two caches of its own. One is calibrated on the idle machine. The other is calibrated beside one
busy program for each CPU but one, asked beside it, and asked again when that has ended: that plan says that it measures
again, and does. Predictions are target-only tokens/s of a billion parameters at Q4_0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from busy import busy
from common import EVIDENCE, grown_targets, save

from ggufspec.bench.statistics import spread
from ggufspec.hardware import host

AGAIN = "it was measured while"


def asked(model: Path, cache: str, *more: str) -> dict[str, Any]:
    """A plan of the command line: what it predicts and says, and what others used meanwhile."""
    (Path(cache) / "ggufspec" / "daily.json").unlink(missing_ok=True)  # of today's measurement
    command = [str(Path(sys.executable).with_name("ggufspec")), "plan", "-m", str(model), "--json", *more]
    before, began = host.cpu_use(), time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"XDG_CACHE_HOME": cache}, capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    return {
        "tokens_per_s": document["predicted"]["target_only_tokens_per_s"],
        "speed": document["speed"],
        "said": done.stderr.splitlines(),
        "seconds": time.perf_counter() - began,
        "cpus_used": host.cpu_use().others_since(before),  # by the command, too
    }


def repetition(model: Path) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as idle, tempfile.TemporaryDirectory() as beside:
        found = {"others_cpus": host.others_cpus(1.0), "idle": asked(model, idle, "--calibrate")}
        with busy(max(1, host.usable_cpus() - 1)):
            time.sleep(0.5)
            found["beside"] = asked(model, beside, "--calibrate")
            found["beside, again"] = asked(model, beside)
        time.sleep(1.0)
        found["idle after beside"] = asked(model, beside)
        found["idle, again"] = asked(model, idle)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    model = grown_targets(("Q4_0",))["Q4_0"]
    found = []
    for number in range(args.repetitions):
        found.append(repetition(model))
        print(f"{number + 1}/{args.repetitions}", found[-1], file=sys.stderr, flush=True)
    ratios = [one["idle after beside"]["tokens_per_s"] / one["idle"]["tokens_per_s"] for one in found]
    reported = [any(AGAIN in line for line in one["idle after beside"]["said"]) for one in found]
    save(
        "calibrating",
        {
            "model": model.stem,
            "idle_after_beside_over_idle": spread(ratios).median,
            "told": reported,
            "repetitions": found,
        },
        args.folder,
    )
    print("idle after beside / idle", ratios, "told", reported)


if __name__ == "__main__":
    main()
