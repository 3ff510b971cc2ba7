"""``ggufspec --help`` and ``--version`` as whole processes; the goal is a quarter of a second.

.venv/bin/python tests/evidence/start_up.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from common import save

from ggufspec.bench.statistics import spread

GOAL_S, RUNS = 0.25, 20


def whole_process(*arguments: str) -> float:
    """Seconds from start to exit of the console script."""
    began = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("ggufspec"), *arguments], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, save."""
    results = {}
    for option in ("--help", "--version"):
        whole_process(option)
        figures = spread([whole_process(option) for _ in range(RUNS)])
        results[option] = {"median_s": figures.median, "ci95_s": figures.ci95, "samples_s": figures.samples}
        print(f"ggufspec {option}: {figures.median:.3f} s (95 % {figures.ci95[0]:.3f} to {figures.ci95[1]:.3f})")
    save("start-up", {"goal_s": GOAL_S, "results": results})


if __name__ == "__main__":
    main()
