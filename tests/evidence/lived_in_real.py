"""A real pair on a machine that other programs use for a while: ``ggufspec serve`` before, while and after.

    scripts/real-models qwen-coder F16 && scripts/peers llama-server
    .venv/bin/python tests/evidence/lived_in_real.py start --targets F16,Q4_K_M      # fifteen minutes each
    .venv/bin/python tests/evidence/lived_in_real.py middle --targets F16            # twenty minutes

``start``: two programs compute for the first 75 seconds of a server that begins with an empty cache folder, while it
answers; then the machine is idle. The tasks (real_pair_tasks.py) that begin afterwards are compared with those of a
server that was never disturbed and answers the same tasks in the same order, and with llama-server at its best setting
for each task. The order rotates with the sessions.

``middle``: a server answers one task on an idle machine, two beside one program that computes, two of them, or one that
reads 8 GB of a file next to one that holds most of the memory, and two when they have gone; our default, target-only
and a fixed draft length do the same work in turn.

Times are a client's, from the request to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import httpx2
from busy import busy, programs
from common import EVIDENCE, ROOT, save
from real_pair import DRAFT, MODELS, TARGETS
from real_pair_tasks import MESSAGES
from servers import Server, ask, ours, rotated, theirs

from ggufspec.hardware import host

BUSY_S = 75.0
TASKS = tuple(MESSAGES)
NGRAM = ("--spec-type", "ngram-simple")
# llama-server's best settings for each task, of docs/evidence/real-pair.json: drafted tokens a round, or n-grams
RIVALS = ("target-only", "draft-1", "draft-2", "draft-3", "draft-4", "draft-8", "ngram-simple")
WAYS = ("default", "all cores", "target-only", "fixed-2")
INFORMS = "all cores"  # our default with a thread for each core, whatever else runs: docs/decisions/024
LOADS = ("one", "two", "reader")
SPARE_BYTES, FILE_BYTES = 5 << 30, 8 << 30
READER = """
import sys
while True:
    with open(sys.argv[1], "rb", buffering=0) as file:
        while file.read(1 << 22):
            pass
"""
HOLDER = (
    "import sys, time; held = bytearray(int(sys.argv[1])); held[::4096] = b'x' * len(held[::4096]); time.sleep(9999)"
)
CLOSED = httpx2.Limits(max_keepalive_connections=0)  # llama-server closes idle ones after 5 s
GOALS = {"first_after": 0.95, "later": 0.98, "llama_server_worst": 0.97, "during": 0.95}

Row = dict[str, Any]


def answer(client: httpx2.Client, server: Server, task: str, tokens: int) -> Row:
    """A task's answer with what other programs used meanwhile."""
    before, began = host.cpu_use(), time.perf_counter()
    found = asdict(ask(client, server, "chat/completions", {"messages": MESSAGES[task], "max_tokens": tokens}))
    del found["text"]
    others = host.cpu_use().others_since(before)  # the server's own threads are among them
    return {"task": task, "began_s": began, "tokens_per_s": found["tokens"] / found["total_s"], "cpus": others, **found}


@contextlib.contextmanager
def serving(name: str, target: Path, *more: str) -> Iterator[Server]:
    """Our server with an empty cache folder, on its defaults."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ours(name, "-m", target, *more, "-c", "2048", environment={"XDG_CACHE_HOME": folder}) as server,
    ):
        yield server


def arguments_of(way: str) -> list[str]:
    kind, _, length = way.partition("-")
    draft = ["-md", str(MODELS / DRAFT)]
    if way == "target-only":
        return ["--no-draft"]
    if way == INFORMS:
        return [*draft, "-t", str(host.physical_cores())]
    if kind == "fixed":
        return [*draft, "--drafter", "draft", "--draft-policy", "fixed", "--draft-max", length]
    return draft


def one_session(target: Path, tasks: Sequence[str], tokens: int, *, disturbed: bool) -> list[Row]:
    """Answers to the tasks; ``began_after_s`` is negative for those that began before the disturbance had ended."""
    rows = []
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(contextlib.ExitStack())
        ends_at = time.perf_counter() + (BUSY_S if disturbed else 0.0)
        if disturbed:
            load.enter_context(busy(2))
        server = stack.enter_context(serving("ours", target, *arguments_of("default")))
        client = stack.enter_context(httpx2.Client(timeout=3600, limits=CLOSED))
        if disturbed:  # ends in the midst of an answer, as in life
            stack.enter_context(_ended_at(load, ends_at))
        for task in tasks:
            row = answer(client, server, task, tokens)
            row["began_after_s"] = row["began_s"] - ends_at
            rows.append(row)
            print(
                f"{'disturbed' if disturbed else 'undisturbed':11} {task:8} {row['tokens_per_s']:6.2f} tokens/s "
                f"drafted {row['drafted']} accepted {row['accepted']} began {row['began_after_s']:+.0f} s",
                flush=True,
            )
    return rows


@contextlib.contextmanager
def _ended_at(load: contextlib.ExitStack, at_s: float) -> Iterator[None]:
    import threading

    timer = threading.Timer(max(0.0, at_s - time.perf_counter()), load.close)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def rivals(target: Path, kinds: dict[str, Sequence[str]], tokens: int) -> list[Row]:
    """llama-server's answers: to each task by the settings that may be its best."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, httpx2.Client(timeout=3600, limits=CLOSED) as client:
        for kind in sorted({kind for some in kinds.values() for kind in some}):
            more: list[str] = []
            if kind.startswith("draft"):
                more = ["-md", str(MODELS / DRAFT), "-ngld", "0", "--spec-type", "draft-simple"]
                more += ["--spec-draft-n-max", kind.rpartition("-")[2]]
            elif kind != "target-only":
                more = list(NGRAM)
            command = ["-m", target, "-t", str(host.physical_cores()), "-np", "1", "-c", "2048", "--cache-ram", "0"]
            with theirs(kind, *command, "-b", "512", "-ub", "512", *more, log=Path(folder) / "log") as server:
                ask(client, server, "completions", {"prompt": "To be warm:", "max_tokens": 4})
                for task in (task for task in TASKS if kind in kinds[task]):
                    rows.append({"way": kind} | answer(client, server, task, tokens))
                    print(f"llama-server {kind:12} {task:8} {rows[-1]['tokens_per_s']:6.2f}", flush=True)
    return rows


def best_settings(target: str, most: int = 1) -> dict[str, list[str]]:
    """By task, llama-server's best settings as they were measured before; llama.cpp's own program was the same one."""
    rows = json.loads((EVIDENCE / "real-pair.json").read_text())["rows"]
    found: dict[str, list[str]] = {}
    for task in TASKS:
        speeds = {
            row["way"].removeprefix("llama-server-"): row["tokens"] / row["total_s"]
            for row in rows
            if row["target"] == target and row["task"] == task and row["way"].startswith("llama-server")
        }
        ordered = sorted((way for way in speeds if way in RIVALS), key=lambda way: -speeds[way])
        found[task] = ordered[:most] or list(RIVALS[:most])
    return found


def start(target: str, sessions: int, tokens: int) -> dict[str, Any]:
    """Undisturbed and disturbed sessions in turn, and llama-server between them."""
    path, found = MODELS / TARGETS[target], []
    for number in range(sessions):
        tasks = rotated(TASKS, 3 * number)
        order = (False, True) if number % 2 == 0 else (True, False)
        both = {}
        for disturbed in order:
            both["disturbed" if disturbed else "undisturbed"] = one_session(path, tasks, tokens, disturbed=disturbed)
        found.append({"tasks": tasks, **both})
    theirs_rows = rivals(path, best_settings(target), tokens)
    return {"sessions": found, "llama_server": theirs_rows, "summary": start_summary(found, theirs_rows)}


def start_summary(sessions: Sequence[Row], theirs_rows: Sequence[Row]) -> dict[str, Any]:
    first, later, over = [], [], {}
    best = {task: max(r["tokens_per_s"] for r in theirs_rows if r["task"] == task) for task in TASKS}
    for one in sessions:
        quiet = {row["task"]: row["tokens_per_s"] for row in one["undisturbed"]}
        after = [row for row in one["disturbed"] if row["began_after_s"] >= 0]
        ratios = [row["tokens_per_s"] / quiet[row["task"]] for row in after]
        first += ratios[:1]
        later += ratios[1:]
        for row in after:
            over.setdefault(row["task"], []).append(row["tokens_per_s"] / best[row["task"]])
    undisturbed = [row["tokens_per_s"] / best[row["task"]] for one in sessions for row in one["undisturbed"]]
    return {
        "first_after_over_undisturbed": geometric_mean(first),
        "later_over_undisturbed": geometric_mean(later),
        "first_after": first,
        "later": later,
        "over_llama_server": {task: geometric_mean(values) for task, values in over.items()},
        "mean_over_llama_server": geometric_mean([v for values in over.values() for v in values]),
        "undisturbed_over_llama_server": geometric_mean(undisturbed),
    }


@contextlib.contextmanager
def loaded(kind: str) -> Iterator[None]:
    """One of :data:`LOADS`."""
    if kind in ("one", "two"):
        with busy(1 if kind == "one" else 2):
            yield
        return
    file = ROOT / ".cache" / "eight-gigabytes"
    if not file.exists() or file.stat().st_size < FILE_BYTES:
        block = os.urandom(1 << 22)
        with file.open("wb") as out:
            for _ in range(FILE_BYTES >> 22):
                out.write(block)
    hold = max(1 << 30, host.free_memory_bytes() - SPARE_BYTES)
    with programs([[HOLDER, str(hold)], [READER, str(file)]]):
        yield


def middle(target: str, loads: Sequence[str], ways: Sequence[str], tokens: int) -> dict[str, Any]:
    """Every way beside every load, in turn."""
    path, rows = MODELS / TARGETS[target], []
    for number, kind in enumerate(loads):
        tasks = rotated(TASKS, 5 * number)[:5]
        for way in rotated(ways, number):
            with serving(way, path, *arguments_of(way)) as server, httpx2.Client(timeout=3600, limits=CLOSED) as client:
                for place, task in enumerate(tasks):
                    phase = "before" if place < 1 else "during" if place < 3 else "after"
                    if place == 1:
                        load = contextlib.ExitStack()
                        load.enter_context(loaded(kind))
                        time.sleep(2.0)
                    if place == 3:
                        load.close()
                    row = {"load": kind, "way": way, "phase": phase} | answer(client, server, task, tokens)
                    rows.append(row)
                    print(
                        f"{kind:6} {way:12} {phase:6} {task:8} {row['tokens_per_s']:6.2f} tokens/s drafted "
                        f"{row['drafted']} accepted {row['accepted']}",
                        flush=True,
                    )
    return {"rows": rows, "summary": middle_summary(rows)}


def middle_summary(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["load"] for row in rows):
        for phase in ("before", "during", "after"):
            speeds: dict[str, dict[str, float]] = {}
            for row in rows:
                if (row["load"], row["phase"]) == (kind, phase):
                    speeds.setdefault(row["way"], {})[row["task"]] = row["tokens_per_s"]
            mine, every_core = speeds.pop("default"), speeds.pop(INFORMS, {})
            ratios = {task: mine[task] / max(speeds[way][task] for way in speeds) for task in mine}
            found[f"{kind} {phase}"] = {"over_best": geometric_mean(ratios.values()), "by_task": ratios}
            best = max(speeds, key=lambda way: geometric_mean(speeds[way].values()))
            found[f"{kind} {phase}"]["over_best_way"] = geometric_mean(
                [mine[task] / speeds[best][task] for task in mine]
            )
            found[f"{kind} {phase}"]["best_way"] = best
            if every_core:
                of_cores = geometric_mean([mine[task] / every_core[task] for task in mine])
                found[f"{kind} {phase}"]["over_all_cores"] = of_cores
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("start", "middle"))
    parser.add_argument("--targets", default="F16", type=lambda text: text.split(","))
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--loads", default=",".join(LOADS), type=lambda text: text.split(","))
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--folder", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    path = arguments.folder / "lived-in-real.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for target in arguments.targets:
        if arguments.part == "start":
            found = start(target, arguments.sessions, arguments.tokens)
        else:
            found = middle(target, arguments.loads, arguments.ways, arguments.tokens)
        print(json.dumps(found["summary"], indent=1))
        kept.setdefault("parts", {}).setdefault(arguments.part, {})[target] = found
        save("lived-in-real", {"goals": GOALS, "parts": kept["parts"]}, arguments.folder)


if __name__ == "__main__":
    main()
