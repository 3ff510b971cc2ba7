"""Predicted outputs: a file is edited, and the request brings the file as the prediction.

    scripts/real-models qwen-coder Q4_K_M && scripts/peers llama-server
    .venv/bin/python tests/evidence/prediction.py        # forty minutes on two idle cores

The file has 120 lines and is in the prompt in every way; the instructions change some 1, 5 and 30 of its lines, and
``changed`` says how many lines the answer really changes. Every request is answered in every way, one right after the
other, by an order that rotates. Ways: our defaults with the prediction, without it, and with one that is wrong from the
first word; the lookup alone; target-only; llama-server's n-gram kinds. Rates are tokens of the answer per second of
decoding, as each server says; the prompt is in the cache from a first request of one token. Answers are cut off after
``--tokens``. docs/evidence/prediction.json has every answer.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import httpx2
from common import EVIDENCE, save
from lived_in_real import CLOSED
from real_pair import DRAFT, MODELS, NGRAMS, TARGETS
from servers import Server, ask, ours, rotated, theirs

from ggufspec.hardware import host
from ggufspec.hardware.host import physical_cores

CTX_SIZE = 4096
TOKENS = 400
LINES = 120
INSTRUCTIONS = {
    "1 line": "Change the name of the class from Inventory to Store. Change nothing else.",
    "5 lines": "Change the default of every parameter named limit from 10 to 25. Change nothing else.",
    "30 lines": "Rename the variable item to product everywhere. Change nothing else.",
}
OURS = ("prediction", "default", "wrong", "lookup", "target-only")
GOALS = {"lookup": 1.3, "target-only": 1.0, "llama-server": 1.3, "wrong": 0.98}
WRONG = "Ω "


def source() -> str:
    """Return a Python file of LINES lines."""
    lines = [
        '"""An inventory of a shop."""',
        "",
        "",
        "class Inventory:",
        "    def __init__(self):",
        "        self.items = {}",
        "",
    ]
    verbs = ("add", "remove", "count", "price", "reserve", "release", "move", "order", "label", "check")
    for number, verb in enumerate(verbs):
        limited = ", limit=10" if number % 2 == 0 else ""
        lines += [
            f"    def {verb}(self, item, amount=1{limited}):",
            f'        """{verb.capitalize()} some pieces and return what is left."""',
            f"        before = self.items.get(item, {number})",
        ]
        if limited:
            lines += ["        if amount > limit:", f'            raise ValueError("{verb}: too many at once")']
        else:
            lines += ["        if amount < 0:", f'            raise ValueError("{verb}: less than none")']
        lines += [
            f"        after = before {'+' if number % 3 else '-'} amount * {number + 1}",
            "        self.items[item] = max(0, after)",
            f'        self.log("{verb}", item, before, after)',
            "        return after",
            "",
        ]
    lines += ["    def log(self, what, *values):", "        print(what, *values)"]
    while len(lines) < LINES:
        lines.append(f"# {len(lines)}" if len(lines) % 3 else "")
    return "\n".join(lines[:LINES]) + "\n"


def body_of(text: str, instruction: str, tokens: int) -> dict[str, Any]:
    question = f"```python\n{text}```\n\n{instruction} Answer with the complete file and nothing else."
    return {"messages": [{"role": "user", "content": question}], "max_tokens": tokens}


def servers(stack: ExitStack, target: Path, draft: Path | None, folder: Path) -> dict[str, Server]:
    """Start a server for each way; ours with and without a prediction are the same."""
    size = ("-c", str(CTX_SIZE))
    with_draft = ("-md", draft) if draft else ("--drafter", "lookup")
    settings = {"default": with_draft, "lookup": ("--drafter", "lookup"), "target-only": ("--no-draft",)}
    found: dict[str, Server] = {}
    for name, more in settings.items():
        environment = {"XDG_CACHE_HOME": str(folder / name)}
        found[name] = stack.enter_context(ours(name, "-m", target, *more, *size, environment=environment))
    found |= {"prediction": found["default"], "wrong": found["default"]}
    for kind in NGRAMS:
        name = f"llama-server-{kind}"
        more = (*size, "-np", "1", "-t", str(physical_cores()), "--spec-type", kind)
        found[name] = stack.enter_context(theirs(name, "-m", target, *more, log=folder / f"{name}.log"))
    return found


def measured(target: Path, draft: Path | None, repetitions: int, tokens: int) -> list[dict[str, Any]]:
    rows, text = [], source()
    with (
        ExitStack() as stack,
        tempfile.TemporaryDirectory() as folder,
        httpx2.Client(timeout=3600, limits=CLOSED) as client,
    ):
        every = servers(stack, target, draft, Path(folder))
        ways = [*OURS, *(name for name in every if name.startswith("llama-server"))]
        number = 0
        for repetition in range(repetitions):
            for task, instruction in INSTRUCTIONS.items():
                body = body_of(text, instruction, tokens)
                predictions = {"prediction": text, "wrong": WRONG * len(text.split())}
                for way in rotated(ways, number):
                    server = Server(way, every[way].base)
                    ask(client, server, "chat/completions", body | {"max_tokens": 1})
                    more = (
                        {"prediction": {"type": "content", "content": predictions[way]}} if way in predictions else {}
                    )
                    before = host.cpu_use()
                    found = ask(client, server, "chat/completions", body | more)
                    row = {"repetition": repetition, "task": task, "way": way, "tokens": found.tokens}
                    row |= {"tokens_per_s": (found.tokens - 1) / found.decode_s, "total_s": found.total_s}
                    row |= {"drafted": found.drafted, "accepted": found.accepted, "text": found.text}
                    rows.append(row | {"cpus": host.cpu_use().others_since(before)})
                    print(
                        f"{task:9} {way:25} {found.tokens:5} tokens {row['tokens_per_s']:7.2f} tokens/s, "
                        f"{found.accepted} of {found.drafted} accepted",
                        flush=True,
                    )
                number += 1
    return rows


def changed(text: str) -> int:
    """Return how many lines of the file an answer changes or adds."""
    answer = text.removeprefix("```python\n").partition("\n```")[0].splitlines()
    blocks = difflib.SequenceMatcher(None, source().splitlines(), answer, autojunk=False).get_matching_blocks()
    return len(answer) - sum(block.size for block in blocks)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def rate(task: str, way: str) -> float:
        return geometric_mean(row["tokens_per_s"] for row in rows if (row["task"], row["way"]) == (task, way))

    tasks = [task for task in INSTRUCTIONS if any(row["task"] == task for row in rows)]
    rivals = sorted({row["way"] for row in rows if row["way"].startswith("llama-server")})
    ratios = {
        "prediction ÷ default": {task: rate(task, "prediction") / rate(task, "default") for task in tasks},
        "prediction ÷ lookup": {task: rate(task, "prediction") / rate(task, "lookup") for task in tasks},
        "prediction ÷ target-only": {task: rate(task, "prediction") / rate(task, "target-only") for task in tasks},
        "prediction ÷ llama-server's best": {
            task: rate(task, "prediction") / max(rate(task, way) for way in rivals) for task in tasks
        },
        "wrong ÷ default": {task: rate(task, "wrong") / rate(task, "default") for task in tasks},
    }
    texts = {task: {row["text"] for row in rows if row["task"] == task and row["way"] in OURS} for task in tasks}
    alone = {task: next(r["text"] for r in rows if (r["task"], r["way"]) == (task, "target-only")) for task in tasks}
    return {
        "changed_lines": {task: changed(alone[task]) for task in tasks},
        "texts": {task: len(texts[task]) for task in tasks},
        "ratios": {name: found | {"geomean": geometric_mean(found.values())} for name, found in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="Q4_K_M,SmolLM2", type=lambda text: text.split(","))
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    asked = parser.parse_args()
    path = asked.folder / "prediction.json"
    targets = json.loads(path.read_text())["targets"] if path.exists() else {}
    for name in asked.targets:
        draft = None if name == "SmolLM2" else MODELS / DRAFT
        rows = measured(MODELS / TARGETS[name], draft, asked.repetitions, asked.tokens)
        found = summary(rows)
        print(json.dumps({name: found}, indent=1), flush=True)
        targets[name] = found | {"answers": rows}
        save("prediction", {"goals": GOALS, "targets": targets}, asked.folder)


if __name__ == "__main__":
    main()
