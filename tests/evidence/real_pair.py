"""Qwen2.5-Coder-1.5B with its 0.5B draft: ``ggufspec serve`` against ``llama-server`` of the same source.

    scripts/real-models qwen-coder F16 Q8_0 && scripts/peers llama-server
    .venv/bin/python tests/evidence/real_pair.py --targets F16       # an hour on two idle cores; again: it goes on

Eight tasks, one conversation each (real_pair_tasks.py), by the model's own chat template, greedy; what is timed is what
a client sees, from the request to its end. A task is answered in every way, one right after the other, by an order that
rotates with the tasks. Every repetition has new servers with empty caches, and each is asked each task once, so that
nothing is known of a text that is asked. Ways:

- ``default-1st`` to ``-3rd``: ``ggufspec serve`` with its defaults, which has just been started with an empty cache
  folder, or has answered the one or two tasks before; ``default-known``: just started, in a cache folder that is left
  from a server which answered the three tasks before;
- ``target-only``, ``lookup``: ``ggufspec serve --no-draft`` and ``--drafter lookup``, the same servers for all tasks;
- ``draft-N``: N tokens of the draft model a round, in a child process without HTTP, one load for all of them;
- ``llama-server-…``: target-only, so many tokens of the draft model a round, its n-gram kinds by their own defaults.

Memory permitting all servers stay up; the one that was used last makes room. Each row is kept as soon as it is measured
(.cache/real-pair), and is measured again if the code that decodes is another. A target that was not measured with this
code keeps its rows in the JSON file, which says with which code and when those of each target were measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean as geometric_mean_of
from statistics import median
from typing import Any

import gguf
import httpx2
import psutil
from common import EVIDENCE, ROOT, save
from in_step import code, geometric_mean, goal, reported, several
from real_pair_tasks import MESSAGES
from servers import PROGRAM, Answer, Server, ask, ours, rotated, theirs

from ggufspec import DecoderOptions, Sampling, child
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.summary import without_folders
from ggufspec.chat import session
from ggufspec.hardware.host import physical_cores
from ggufspec.prompting.conversation import Conversation

MODELS = ROOT / ".cache" / "real-models"
RUNS = ROOT / ".cache" / "real-pair" / "runs.jsonl"
QWEN = "qwen2.5-coder-1.5b-instruct-{}.gguf"
TARGETS = {
    "Q4_K_M": QWEN.format("q4_k_m"),
    "Q8_0": QWEN.format("Q8_0"),
    "F16": QWEN.format("F16"),
    "SmolLM2": "SmolLM2-135M-Instruct.Q4_1.gguf",  # which has no draft
}
DRAFT = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
LENGTHS, NGRAMS = (1, 2, 3, 4, 6, 8), ("ngram-simple", "ngram-mod", "ngram-map-k")
DEFAULT = ("default-1st", "default-2nd", "default-3rd", "default-known")
FIXED = tuple(f"draft-{length}" for length in LENGTHS)
RIVALS = tuple(f"llama-server-{kind}" for kind in ("target-only", *FIXED, *NGRAMS))
WAYS = (*DEFAULT, "target-only", "lookup", *FIXED, *RIVALS)
TASKS = tuple(MESSAGES)
CTX_SIZE, MOST_CACHED, MOST_REPETITIONS = 2048, 16, 20
SPARE_BYTES = 4 << 30  # contexts, and pages of files: with less, three requests waited for the disk, for minutes
GOALS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool, dict[str, float]]] = {
    # what, of the default unless said: (ways, their rivals, whether the rival is one for all tasks, limits)
    "first ÷ llama-server's best for the task": (DEFAULT[:1], RIVALS, False, {"geomean": 1.10, "worst": 0.97}),
    "later ÷ llama-server's best for the task": (
        DEFAULT[1:3],
        RIVALS,
        False,
        {"geomean": 1.10, "worst": 0.97},
    ),
    "first ÷ llama-server's best for all tasks": (DEFAULT[:1], RIVALS, True, {"geomean": 1.2}),
    "first ÷ target-only": (DEFAULT[:1], ("target-only",), True, {"worst": 0.98}),
    "later ÷ target-only": (DEFAULT[1:3], ("target-only",), True, {"worst": 0.98}),
    "first ÷ our best length for the task": (DEFAULT[:1], FIXED, False, {"geomean": 0.97}),
    "later ÷ our best length for the task": (DEFAULT[1:3], FIXED, False, {"geomean": 1.0}),
    "first in a known folder ÷ third": (DEFAULT[3:], DEFAULT[2:3], True, {"geomean": 0.99}),
    "lookup ÷ its best n-gram kind for the task": (("lookup",), RIVALS[-3:], False, {"geomean": 1.05, "worst": 0.97}),
}

Row = dict[str, Any]


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """A server of ours with its own cache folder; it has answered so many tasks, one after the other."""

    server: Server
    running: ExitStack
    folder: Path
    answered: int = 0


class Servers:
    """What answers for one target in one repetition; nothing of it knows a task before it is asked.

    Args:
        target: the target's file.
        draft: the draft's; None: the target has none.
        threads: CPU threads of each.
        tokens: of an answer at most.
    """

    def __init__(self, target: Path, draft: Path | None, threads: int, tokens: int) -> None:
        self.target, self.draft, self.threads, self.tokens = target, draft, threads, tokens
        self._files = ["-m", target, *(["-md", draft] if draft else [])]
        self._all = ExitStack()
        self._folder = Path(self._all.enter_context(tempfile.TemporaryDirectory()))
        # A connection each, as llama-server closes idle ones after 5 s
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = self._all.enter_context(httpx2.Client(timeout=3600, limits=limits))
        self._standing: dict[str, tuple[Server, ExitStack]] = {}  # the one that was used last is the last
        self._sessions: dict[int, Session] = {}  # by the index of the first task
        self._child: child.Session | None = None

    def answer(self, way: str, index: int) -> Answer:
        """The answer to a task in one of the ways.

        Raises:
            RuntimeError: a server fails, or had the prompt in its cache.
        """
        if way in FIXED:
            return self._fixed(int(way.rpartition("-")[2]), index)
        if way in DEFAULT:
            return self._default(index, DEFAULT.index(way))
        return self._ask(self._stands(way), index)

    def close(self) -> None:
        """End all."""
        for one in self._sessions.values():
            one.running.close()
        for _, running in self._standing.values():
            running.close()
        if self._child is not None:
            self._child.close()
        self._all.close()

    def _ask(self, server: Server, index: int) -> Answer:
        body = {"messages": MESSAGES[TASKS[index % len(TASKS)]], "max_tokens": self.tokens}
        found = ask(self._client, server, "chat/completions", body)
        if found.cached > MOST_CACHED:
            raise RuntimeError(f"{server.name}: {found.cached} tokens of the prompt were in its cache")
        return found

    def _default(self, index: int, position: int) -> Answer:
        """By the server that has answered the ``position`` tasks before; the last time by a new one in its folder."""
        for old in [begin for begin in self._sessions if begin < index - DEFAULT.index("default-known")]:
            self._sessions.pop(old).running.close()
        begin = index - position
        if begin not in self._sessions:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            self._sessions[begin] = Session(*self._start_ours("default", folder, *self._files), folder)
        one = self._sessions[begin]
        while one.answered < position:  # where this repetition begins, or goes on
            self._ask(one.server, begin + one.answered)
            one.answered += 1
        one.answered += 1
        if DEFAULT[position] != "default-known":
            return self._ask(one.server, index)
        self._sessions.pop(begin).running.close()
        server, running = self._start_ours("default-known", one.folder, *self._files)
        with running:
            return self._ask(server, index)

    def _fixed(self, length: int, index: int) -> Answer:
        """By a fixed number of tokens of the draft model."""
        options = DecoderOptions(ctx_size=CTX_SIZE, threads=self.threads)
        if self._child is None:
            self._make_room()
            self._child = child.Session()
            self._child.open(session.__name__, session.ChatJob(self.target, self.draft, options), session.ChatReady)
        system, question = (message["content"] for message in MESSAGES[TASKS[index]])
        request = session.ChatRequest(
            Conversation(system).ask(question),
            options=replace(options, drafters=("draft",), draft_policy="fixed", draft_max=length),
            sampling=Sampling(temperature=0),
            max_tokens=self.tokens,
            cache=False,
        )
        first_s: list[float] = []

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "token" and not first_s:
                first_s.append(time.perf_counter() - began)

        began = time.perf_counter()
        reply = self._child.ask(request, session.ChatReply, on_event=on_event)
        total_s, took = time.perf_counter() - began, reply.statistics
        assert took is not None
        return Answer(
            tokens=took.tokens,
            prompt_tokens=took.prompt_tokens,
            cached=took.prompt_tokens - took.prompt_read,
            first_s=first_s[0],
            total_s=total_s,
            prompt_s=took.prompt_s,
            decode_s=took.decode_s,
            drafted=took.drafted,
            accepted=took.accepted,
            text=reply.text,
        )

    # -- servers --

    def _stands(self, way: str) -> Server:
        """The server of one way, for all tasks."""
        if way not in self._standing:
            self._standing[way] = self._start(way)
            warm_up = {"prompt": "To be warm:", "max_tokens": 4}
            ask(self._client, self._standing[way][0], "completions", warm_up)
        self._standing[way] = self._standing.pop(way)
        return self._standing[way][0]

    def _start(self, way: str) -> tuple[Server, ExitStack]:
        kind = way.removeprefix("llama-server-")
        if kind == way:
            more = ["--no-draft"] if way == "target-only" else ["--drafter", "lookup"]
            return self._start_ours(way, self._folder / way, "-m", self.target, *more)
        command = ["-m", self.target, "-t", str(self.threads), "-np", "1", "-c", str(CTX_SIZE), "--cache-ram", "0"]
        command += ["-b", "512", "-ub", "512"]
        if kind in FIXED:
            length = kind.rpartition("-")[2]
            command += ["-md", self.draft, "-ngld", "0", "--spec-type", "draft-simple", "--spec-draft-n-max", length]
        elif kind in NGRAMS:
            command += ["--spec-type", kind]
        self._make_room()
        running = ExitStack()
        return running.enter_context(theirs(way, *command, log=self._folder / f"{way}.log")), running

    def _start_ours(self, name: str, folder: Path, *arguments: str | Path) -> tuple[Server, ExitStack]:
        self._make_room()
        running, more = ExitStack(), ["-c", str(CTX_SIZE), "-t", str(self.threads)]
        environment = {"XDG_CACHE_HOME": str(folder)}
        return running.enter_context(ours(name, *arguments, *more, environment=environment)), running

    def _make_room(self) -> None:
        """End servers, the one that was used last first, until another one has room; weights may be repacked."""
        sizes = [path.stat().st_size for path in (self.target, self.draft) if path]
        while psutil.virtual_memory().available < sum(sizes) + SPARE_BYTES:
            if self._standing:
                self._standing.popitem()[1][1].close()
            elif self._child is not None:
                self._child.close()
                self._child = None
            else:
                break


# ---- figures ------------------------------------------------------------------------------------------------------


class Figures:
    """Ratios of speeds, paired by repetition.

    Args:
        rows: of one target.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rates: dict[tuple[str, str], dict[int, float]] = {}  # tokens/s by (task, way) and repetition
        for row in rows:
            rate = row["tokens"] / row["total_s"]
            self.rates.setdefault((row["task"], row["way"]), {})[row["repetition"]] = rate
        self.tasks = [task for task in TASKS if any(task == key[0] for key in self.rates)]

    def speed(self, way: str, tasks: Sequence[str]) -> float:
        """Tokens/s, the geometric mean over tasks; 0 where one is missing."""
        if any((task, way) not in self.rates for task in tasks):
            return 0.0
        return geometric_mean_of([median(self.rates[task, way].values()) for task in tasks])

    def best(self, ways: Sequence[str], tasks: Sequence[str]) -> str | None:
        """The fastest of the ways that have all these tasks."""
        fastest = max(ways, key=lambda way: self.speed(way, tasks))
        return fastest if self.speed(fastest, tasks) else None

    def over(self, ways: Sequence[str], rivals: Sequence[str], *, one_for_all: bool) -> list[dict[str, Any]]:
        """The ratio of each way in each task over its best rival there, or over the one that is best in all tasks."""
        found = []
        for task in self.tasks:
            rival = self.best(rivals, self.tasks if one_for_all else [task])
            for way in ways:
                own, others = self.rates.get((task, way), {}), self.rates.get((task, rival or ""), {})
                if both := sorted(own.keys() & others.keys()):
                    ratio = median(own[repetition] / others[repetition] for repetition in both)
                    found.append({"case": f"{task} {way}", "ratio": ratio, "rival": rival})
        return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Every goal of one target: the ratios, their geometric mean and worst, and whether it is met."""
    figures, found = Figures(rows), {}
    for name, (ways, rivals, one_for_all, limits) in GOALS.items():
        ratios = figures.over(ways, rivals, one_for_all=one_for_all)
        if ratios:
            found[name] = {**goal(geometric_mean(ratios), limits), "ratios": ratios}
    return found


def table(rows: Sequence[Row]) -> str:
    """Tokens/s by way and task, prompt included; behind them the mean, that without the prompt, seconds to the first
    token, tokens kept of those drafted, and how many texts are those of llama-server's target-only."""
    figures = Figures(rows)
    texts = {(row["task"], row["repetition"]): row["text"] for row in rows if row["way"] == RIVALS[0]}
    names = (*figures.tasks, "mean", "decode", "first s", "kept", "as theirs")
    lines = [f"{'':26}" + "".join(f"{name:>10}" for name in names)]
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        if not own:
            continue
        speeds = [figures.speed(way, [task]) for task in figures.tasks]
        means = (
            geometric_mean_of([speed for speed in speeds if speed]),
            geometric_mean_of([_decoding(row) for row in own]),
        )
        cells = [*(f"{speed:.2f}" if speed else "" for speed in (*speeds, *means))]
        cells.append(f"{median(row['first_s'] for row in own):.2f}")
        drafted, accepted = (sum(row[name] for row in own) for name in ("drafted", "accepted"))
        cells.append(f"{accepted / drafted:.0%}" if drafted else "")
        same = sum(row["text"] == texts.get((row["task"], row["repetition"])) for row in own)
        cells.append(f"{same} of {len(own)}" if texts else "")
        lines.append(f"{way:26}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _decoding(row: Row) -> float:
    """Tokens/s from the end of the prompt."""
    return float(row["tokens"] / row["decode_s"])


def unequal(rows: Sequence[Row]) -> list[str]:
    """Tasks whose prompt has not the same number of tokens in all ways."""
    lengths = {task: {row["prompt_tokens"] for row in rows if row["task"] == task} for task in TASKS}
    return [f"{task}: prompts of {sorted(found)} tokens" for task, found in lengths.items() if len(found) > 1]


# ---- the command --------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = list(TARGETS)[:3]
    parser.add_argument("--targets", type=several(list(TARGETS)), default=usual, help=f"default: {','.join(usual)}")
    for name, known in (("tasks", TASKS), ("ways", WAYS)):
        parser.add_argument(f"--{name}", type=several(known), default=list(known), help=f"default: {','.join(known)}")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("-r", type=int, default=1, help="repetitions")
    parser.add_argument("-t", type=int, default=physical_cores(), help="threads")
    parser.add_argument("--summary", action="store_true", help="measure nothing; figures of what is there")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where rows are kept")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    parser.add_argument("--name", default="real-pair", help="of the JSON file: another one for another processor")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    arguments = parsed()
    if not (peers := PROGRAM.parent.with_name("made")).exists():
        raise SystemExit("llama-server is not there: scripts/peers llama-server")
    version, cmake_args = peers.read_text().splitlines()
    settings = {
        "tokens": arguments.tokens,
        "threads": arguments.t,
        "ctx_size": CTX_SIZE,
        "tasks": hashlib.sha256(json.dumps(MESSAGES).encode()).hexdigest(),
        "code": code(),
        "llama_server": {"llama_cpp_python": version, "cmake_args": without_folders(cmake_args)},
    }
    with RunLog(arguments.runs, "real-pair@1") as log:
        for target in [] if arguments.summary else arguments.targets:
            for repetition in range(arguments.r):
                measure(target, repetition, settings, log, arguments)
        found = {target: kept(target, settings, log) for target in TARGETS}
    measured, old = dict[str, Row](), earlier(arguments.folder / f"{arguments.name}.json")
    for target, rows in found.items():
        if rows:
            day = datetime.fromtimestamp(max(row["at"] for row in rows), UTC).strftime("%Y-%m-%d")
            measured[target] = {"date": day, "code": settings["code"]}
        elif target in old.get("measured", {}):
            measured[target] = old["measured"][target]
            found[target] = [row for row in old["rows"] if row["target"] == target]
    found = {target: rows for target, rows in found.items() if rows}
    for target, rows in found.items():
        print(f"\n{target}, tokens/s from the request to its end\n{table(rows)}\n")
        for name, figures in summary(rows).items():
            print(reported(name, figures))
        print("\n".join(unequal(rows)))
    body = {
        "settings": {name: value for name, value in settings.items() if name != "code"},
        "measured": measured,
        "templates": {target: template_digest(MODELS / TARGETS[target]) for target in found},
        "messages": MESSAGES,
        "goals": {name: limits for name, (*_, limits) in GOALS.items()},
        "summary": {target: summary(rows) for target, rows in found.items()},
        "rows": [row for rows in found.values() for row in rows],
    }
    print(save(arguments.name, body, arguments.folder))


def earlier(file: Path) -> Row:
    """The JSON file as it was."""
    return json.loads(file.read_text()) if file.exists() else {}


def measure(target: str, repetition: int, settings: Row, log: RunLog, arguments: argparse.Namespace) -> None:
    """The rows of one repetition that are not there yet."""
    draft = None if target == "SmolLM2" else MODELS / DRAFT
    for path in filter(None, (MODELS / TARGETS[target], draft)):
        if not path.exists():
            raise SystemExit(f"{path.name} is not there: scripts/real-models; scripts/real-models qwen-coder F16 Q8_0")
    servers = Servers(MODELS / TARGETS[target], draft, arguments.t, arguments.tokens)
    ways = [way for way in arguments.ways if draft or "draft-" not in way]
    try:
        for index, task in enumerate(TASKS):
            if task not in arguments.tasks:
                continue
            began = time.perf_counter()
            for way in rotated(ways, index * (len(ways) // len(TASKS) + 1) + repetition):
                key = key_of(settings, target, task, way, repetition)
                if log.get(key, dict) is None:
                    row = {"target": target, "task": task, "way": way, "repetition": repetition, "at": time.time()}
                    row |= {**asdict(servers.answer(way, index)), "load_average": os.getloadavg()[0]}
                    log.put(key, row)
                    print(f"{target} {task} {way}: {row['tokens'] / row['total_s']:.2f} tokens/s", flush=True)
            print(f"{target} {task}, repetition {repetition + 1}: {time.perf_counter() - began:.0f} s", flush=True)
    finally:
        servers.close()


def kept(target: str, settings: Row, log: RunLog) -> list[Row]:
    """All rows of a target."""
    repetitions = range(MOST_REPETITIONS)
    keys = (key_of(settings, target, task, way, one) for one in repetitions for task in TASKS for way in WAYS)
    return [row for key in keys if (row := log.get(key, dict)) is not None]


def template_digest(model: Path) -> str:
    """SHA-256 of a model's chat template."""
    field = gguf.GGUFReader(model).get_field("tokenizer.chat_template")
    return hashlib.sha256(str(field.contents() if field else "").encode()).hexdigest()


if __name__ == "__main__":
    main()
