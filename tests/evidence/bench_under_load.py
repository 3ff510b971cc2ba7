"""Whether a bench says the same while other programs come and go: quiet and loaded runs of ``ggufspec bench``, in turn.

    .venv/bin/python tests/evidence/bench_under_load.py -m big.gguf -md small.gguf --runs 10
    .venv/bin/python tests/evidence/bench_under_load.py -m big.gguf -md small.gguf --busy 2 --on 12 --period 24

Under load ``--busy`` programs compute for ``--on`` seconds of every ``--period``, and sleep for the rest. Each run is
kept in docs/evidence/bench-under-load.json as it ends; the same command goes on. Nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from busy import programs
from common import EVIDENCE, save

from ggufspec.bench.statistics import spread

PROGRAM = """
import sys, time
on, period = float(sys.argv[1]), float(sys.argv[2])
while True:
    until = time.monotonic() + on
    while time.monotonic() < until:
        pass
    time.sleep(max(0.0, period - on))
"""
NAME = "bench-under-load"


def bench(arguments: list[str]) -> dict[str, Any]:
    """What a run said, as far as it is compared."""
    command = [sys.executable, "-m", "ggufspec", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    if "verdict" not in document:
        return {"error": document.get("error", done.stderr[-500:])}
    runs, speedup = document["runs"], document["speedup"]
    return {
        "worth_it": document["verdict"]["worth_it"],
        "verdict": document["verdict"]["text"],
        "why": document["verdict"]["why"],
        "ratio": speedup and speedup["median"],
        "ci95": speedup and speedup["ci95"],
        "tokens_per_round": (runs.get("speculative") or {}).get("tokens_per_round"),
        "target_only_tokens_per_s": (runs.get("target_only") or {}).get("tokens_per_s", {}).get("median"),
        "busy_share": (document.get("disturbance") or {}).get("busy_share"),
        "disturbance": document.get("disturbance"),
        "notes": document["notes"],
        "spent_s": document["settings"].get("spent_s"),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many of the loaded runs agree with the quiet ones."""
    good = {kind: [row for row in rows if row["load"] == kind and row.get("ratio")] for kind in ("quiet", "busy")}
    if not all(good.values()):
        return {}
    ratio = spread([row["ratio"] for row in good["quiet"]]).median
    heads = {kind: [row["verdict"].split(":")[0] for row in found] for kind, found in good.items()}
    usual = max(set(heads["quiet"]), key=heads["quiet"].count)
    return {
        "quiet_ratio": ratio,
        "quiet_verdict": usual,
        "busy_runs": len(good["busy"]),
        "same_verdict": heads["busy"].count(usual),
        "intervals_with_quiet_ratio": sum(row["ci95"][0] <= ratio <= row["ci95"][1] for row in good["busy"]),
        "above_tokens_per_round": sum(row["ratio"] > row["tokens_per_round"] for row in good["busy"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--model-draft", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=10, help="of each, quiet and busy")
    parser.add_argument("--busy", type=int, default=2, help="programs")
    parser.add_argument("--on", type=float, default=12.0, help="seconds of a period in which they compute")
    parser.add_argument("--period", type=float, default=24.0, help="seconds")
    parser.add_argument("arguments", nargs="*", help="after --: for ggufspec bench, --budget 3m say")
    asked = parser.parse_args()
    files = ["-m", str(asked.model), "-md", str(asked.model_draft)]
    pattern = {"programs": asked.busy, "on_s": asked.on, "period_s": asked.period}
    facts = {"pair": [asked.model.name, asked.model_draft.name], "load": pattern, "arguments": asked.arguments}
    path = EVIDENCE / f"{NAME}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    rows = kept["runs"] if all(kept.get(name) == value for name, value in facts.items()) else []
    for number in range(len(rows), 2 * asked.runs):
        kind = ("quiet", "busy")[(number + number // 2) % 2]  # another one first each time
        with programs([[PROGRAM, str(asked.on), str(asked.period)]] * (asked.busy if kind == "busy" else 0)):
            rows.append({"load": kind} | bench([*files, *asked.arguments]))
        print(json.dumps(rows[-1]), flush=True)
        save(NAME, facts | {"summary": summary(rows), "runs": rows})


if __name__ == "__main__":
    main()
