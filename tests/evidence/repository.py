"""``ggufspec plan -hf REPO`` as a whole process: twenty files of Llama 3 8B's shape and vocabulary, hub on loopback.

.venv/bin/python tests/evidence/repository.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import save

from ggufspec.bench.statistics import spread
from ggufspec.hardware import host
from ggufspec.models.headers import read_headers
from tests.support import repositories
from tests.support.server import serving

GOAL_S, FIRST_GOAL_S, GOAL_BYTES = 1.0, 5.0, 60e6
FIRST_RUNS, RUNS = 3, 9
REPO = "user/Meta-Llama-3-8B-Instruct-GGUF"
CARD = ("--gpu", "RTX 3060 12GB", "--json")


def whole_process(cache: Path, endpoint: str) -> tuple[float, dict[str, Any]]:
    """Seconds from start to exit of ``ggufspec plan -hf REPO``, and its document."""
    began = time.perf_counter()
    environment = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(cache / "hub"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
    }
    program = [sys.executable, "-m", "ggufspec", "plan", "-hf", REPO, *CARD]
    done = subprocess.run(program, check=True, capture_output=True, env=environment, text=True)
    return time.perf_counter() - began, json.loads(done.stdout)


def read_whole(folder: Path, cache: Path, rows: list[dict[str, Any]]) -> int:
    """How many of the rows have the bits per weight of a header that was read whole."""
    from ggufspec.planning.quantisations import bits_per_weight

    known = read_headers([folder / row["file"] for row in rows], cache)
    return sum(row["bits_per_weight"] == bits_per_weight(one.header) for row, one in zip(rows, known, strict=True))


def main() -> None:
    """Measure, print, save."""
    with tempfile.TemporaryDirectory() as name, serving() as server:
        folder = Path(name)
        files = repositories.write(
            folder / "repo", "Meta-Llama-3-8B-Instruct", repositories.LLAMA3_8B, repositories.TWENTY
        )
        server.add_repo(REPO, folder / "repo")
        first, read = [], []
        for run in range(FIRST_RUNS):
            server.sent.clear()
            seconds, document = whole_process(folder / f"cache-{run}", server.address)
            first.append(seconds)
            read.append(sum(server.sent.values()))
        server.sent.clear()
        kept = [whole_process(folder / "cache-0", server.address)[0] for _ in range(RUNS)]
        kept_read, others = sum(server.sent.values()), host.others_cpus()
        equal = read_whole(folder / "repo", folder / "whole", document["rows"])
        size = sum(path.stat().st_size for path in files)
    print(f"first time {spread(first).median:.2f} s (goal {FIRST_GOAL_S}), kept {spread(kept).median:.2f} s ({GOAL_S})")
    print(
        f"{read[0] / 1e6:.1f} MB read of {size / 1e9:.0f} GB (goal {GOAL_BYTES / 1e6:.0f} MB), kept {kept_read} bytes"
    )
    print(f"{equal} of {len(document['rows'])} headers as when they are read whole")
    results = {
        "first_s": first,
        "first_bytes_read": read,
        "kept_s": kept,
        "kept_bytes_read": kept_read,
        "files": len(files),
        "file_bytes": size,
        "rows_as_read_whole": equal,
        "cpus_used_by_others": others,
    }
    goals = {"goal_s": GOAL_S, "first_goal_s": FIRST_GOAL_S, "goal_bytes": GOAL_BYTES}
    save("repository", {**goals, "results": results, "rows": document["rows"]})


if __name__ == "__main__":
    main()
