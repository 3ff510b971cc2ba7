"""Whether a bench in its default time says what served answers gain: both of a real pair, on the same machine.

    scripts/real-models qwen-coder F16
    .venv/bin/python tests/evidence/bench_length.py --targets F16,Q4_K_M      # half an hour each

``ggufspec serve`` answers the bundled requests with its defaults and target-only, in turn, another one first each time,
until twenty answers have the wanted length; those to requests whose answers end earlier do not count. Times are a
client's, from the request to its end. The speedup of served answers is the ratio of the mean times, each request
counting alike. Then ``ggufspec bench`` runs with its defaults, each time with an empty cache folder, and its speedup
for this length is compared. Nothing else must run on the machine. docs/evidence/bench-length.json has every answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx2
from common import EVIDENCE, save
from lived_in_real import CLOSED, arguments_of, serving
from real_pair import DRAFT, MODELS, TARGETS
from servers import ask, rotated

from ggufspec.bench.prompts import REQUESTS
from ggufspec.hardware import host

WAYS = ("default", "target-only")
GOALS = {"off": 0.08, "in_interval": True}

Row = dict[str, Any]


def served(target: Path, answers: int, tokens: int) -> list[Row]:
    """So many answers of this length in each way, and those that ended earlier."""
    rows: list[Row] = []
    short: set[str] = set()
    with (
        serving(WAYS[0], target, *arguments_of(WAYS[0])) as drafting,
        serving(WAYS[1], target, *arguments_of(WAYS[1])) as alone,
        httpx2.Client(timeout=3600, limits=CLOSED) as client,
    ):
        for number in islice(count(), 4 * answers):
            prompt = (*REQUESTS[::2], *REQUESTS[1::2])[number % len(REQUESTS)]
            if prompt.kind in short:
                continue
            messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
            for server in rotated((drafting, alone), number):
                before = host.cpu_use()
                tools = {"tools": list(prompt.tools)} if prompt.tools else {}
                body = {"messages": messages, "max_tokens": tokens} | tools
                found = ask(client, server, "chat/completions", body)
                row = {"way": server.name, "kind": prompt.kind, "number": number, "tokens": found.tokens}
                row |= {"total_s": found.total_s, "prompt_s": found.prompt_s, "decode_s": found.decode_s}
                row |= {"cached": found.cached, "drafted": found.drafted, "accepted": found.accepted}
                rows.append(row | {"cpus": host.cpu_use().others_since(before)})
                print(f"{server.name:11} {prompt.kind:8} {found.tokens} tokens in {found.total_s:.1f} s", flush=True)
                if found.tokens < tokens:
                    short.add(prompt.kind)
            if sum(row["tokens"] >= tokens for row in rows) >= len(WAYS) * answers:
                break
    return rows


def speedup(rows: list[Row], tokens: int) -> dict[str, Any]:
    """Of served answers of this length: the ratio of the mean times, each request counting alike."""
    seconds: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    short = {row["kind"] for row in rows if row["tokens"] < tokens}
    for row in rows:
        if row["kind"] not in short:
            seconds[row["way"]][row["kind"]].append(row["total_s"])
    means = {way: {kind: fmean(found) for kind, found in seconds[way].items()} for way in WAYS}
    default, alone = (means[way] for way in WAYS)
    return {
        "speedup": fmean(alone.values()) / fmean(default.values()),
        "by_kind": {kind: alone[kind] / default[kind] for kind in default},
        "answers": sum(map(len, seconds[WAYS[0]].values())),
    }


def bench(target: Path, arguments: list[str]) -> dict[str, Any]:
    """The document of a bench of the pair, with an empty cache folder."""
    files = ["-m", str(target), "-md", str(MODELS / DRAFT), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec", "bench", *files, "--results", folder, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": folder},
        )
    document: dict[str, Any] = json.loads(done.stdout)
    if "verdict" not in document:
        raise RuntimeError(document.get("error", done.stderr[-500:]))
    print(document["verdict"]["text"], flush=True)
    return document


def judged(document: dict[str, Any], served_speedup: float, tokens: int) -> dict[str, Any]:
    """What a bench says of this length, and whether that is what served answers gain."""
    found = next(one for one in document["by_length"] if one["tokens"] == tokens)
    low, high = found["speedup"]["ci95"]
    off = found["speedup"]["median"] / served_speedup - 1
    return {
        "speedup": found["speedup"]["median"],
        "ci95": [low, high],
        "off": off,
        "in_interval": low <= served_speedup <= high,
        "met": abs(off) <= GOALS["off"] and low <= served_speedup <= high,
        "seconds": {way: found[f"{way}_s"] for way in ("target_only", "speculative")},
        "measured_tokens": document["measured_tokens"],
        "prompts": document["settings"]["prompts"],
        "spent_s": document["settings"]["spent_s"],
        "verdict": document["verdict"]["text"],
        "by_length": {one["tokens"]: one["speedup"]["median"] for one in document["by_length"]},
        "answer_times": document["answer_times"],
        "disturbance": document["disturbance"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="F16,Q4_K_M", type=lambda text: text.split(","))
    parser.add_argument("--answers", type=int, default=20, help="served, in each way")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--benches", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    parser.add_argument("arguments", nargs="*", help="after --: for ggufspec bench")
    asked = parser.parse_args()
    path = asked.folder / "bench-length.json"
    pairs = json.loads(path.read_text())["pairs"] if path.exists() else {}
    for name in asked.targets:
        target = MODELS / TARGETS[name]
        rows = served(target, asked.answers, asked.tokens)
        found = speedup(rows, asked.tokens)
        print(json.dumps({name: found}), flush=True)
        benches = [judged(bench(target, asked.arguments), found["speedup"], asked.tokens) for _ in range(asked.benches)]
        print(json.dumps(benches, indent=1), flush=True)
        pairs[name] = {"tokens": asked.tokens, "served": found, "benches": benches, "answers": rows}
        save("bench-length", {"goals": GOALS, "pairs": pairs}, asked.folder)


if __name__ == "__main__":
    main()
