"""``ggufspec plan`` of a Llama-3-70B-shaped pair as a whole process, and what it reads of a 31 GB file over HTTP.

.venv/bin/python tests/evidence/planning.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import save

from ggufspec.bench.statistics import spread
from tests.support import shapes
from tests.support.server import serving

GOAL_S, FIRST_GOAL_S, GOAL_BYTES, RUNS = 1.0, 3.0, 12e6, 15
CARD = ("--gpu", "RTX 4090", "-c", "4096")


def whole_process(cache: Path, *arguments: str | Path) -> float:
    """Seconds from start to exit of ``ggufspec plan``."""
    began = time.perf_counter()
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    program = Path(sys.executable).with_name("ggufspec")
    subprocess.run([program, "plan", *arguments, *CARD], check=True, capture_output=True, env=environment)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, save."""
    with tempfile.TemporaryDirectory() as name, serving() as server:
        folder = Path(name)
        target, draft = (
            shapes.write(folder / f"{shape}.gguf", shapes.SHAPES[shape], tokenizer=True)
            for shape in ("llama3-70b-q3_k_s", "llama3-8b-q3_k_l")
        )
        pair = ("-m", target, "-md", draft)
        first = [whole_process(folder / f"cache-{run}", *pair) for run in range(3)]
        kept = spread([whole_process(folder / "cache-0", *pair) for _ in range(RUNS)])
        url = server.add("big.gguf", target)
        remote_s = whole_process(folder / "cache-remote", "-m", url)
        read = sum(server.sent.values())
    print(
        f"first time: {spread(first).median:.2f} s; header kept: {kept.median:.3f} s (goals {FIRST_GOAL_S}, {GOAL_S})"
    )
    print(f"over HTTP: {read / 1e6:.2f} MB read of {target.name}, {remote_s:.2f} s (goal {GOAL_BYTES / 1e6:.0f} MB)")
    results = {
        "first_s": first,
        "kept_s": {"median": kept.median, "ci95": kept.ci95, "samples": kept.samples},
        "remote_s": remote_s,
        "remote_bytes_read": read,
        "file_bytes": shapes.SHAPES["llama3-70b-q3_k_s"].nbytes,
    }
    save("planning", {"goal_s": GOAL_S, "first_goal_s": FIRST_GOAL_S, "goal_bytes": GOAL_BYTES, "results": results})


if __name__ == "__main__":
    main()
