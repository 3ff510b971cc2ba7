"""Whether a bench within its budget says what a long one says: short benches drawn from a long one's answers.

    .venv/bin/python tests/evidence/bench_budget.py record F16=big-F16.gguf Q4_K_M=big.gguf --draft small.gguf
    .venv/bin/python tests/evidence/bench_budget.py judge                # draws, counts, writes bench-budget.json

``record`` answers every bundled prompt target-only and speculatively, in turn, in one load of each pair, and writes
when each token came; it ends after so many seconds, and the same command goes on with the next pass. ``judge`` runs
:class:`ggufspec.bench.versus.Bench` itself, its budget and its stopping rule, on a clock of its own: an answer of the
short bench is the beginning of one that was recorded, of both ways from the same pass. The long bench is all passes at
full length. Nothing else must run on the machine while it records.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import EVIDENCE, save

from ggufspec.bench import prompting, trial
from ggufspec.bench.trials import in_turn
from ggufspec.bench.versus import BUDGET_S, Bench, BenchExperiment
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.models.profile import Pair
from ggufspec.schema import codec

WAYS = {"target": "target_only", "draft": "draft_only", "": "speculative"}
TOKENS, ASIDE_TOKENS = 128, 32


def spec_of(target: Path, draft: Path) -> trial.TrialJob:
    """The pair as ``bench`` runs it without options."""
    asked = prompting.make_texts(prompting.PromptsJob(target))
    return trial.TrialJob(target, draft, DecoderOptions(), Sampling(), **asked.trial, max_tokens=TOKENS, stream=True)


def record(name: str, target: Path, draft: Path, seconds: float, folder: Path) -> None:
    """Add passes over the prompts to NAME's file, for so long."""
    spec, path = spec_of(target, draft), folder / f"bench-budget-{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"spec": codec.dump(spec), "passes": []}
    moments: list[float] = []
    until = time.monotonic() + seconds
    with closing(trial.ModelProcess(spec, on_event=lambda event: moments.append(time.perf_counter()))) as load:
        kept["prompt_tokens"] = load.ready.prompt_tokens
        for alone in WAYS:
            load.ask(trial.TrialRequest(alone=alone, warm_up=True))
        order = [(prompt, len(kept["passes"])) for prompt in range(len(spec.prompts))]
        if kept["passes"] and len(kept["passes"][-1]) < len(spec.prompts):
            order = order[len(kept["passes"][-1]) :]
        else:
            kept["passes"].append([])
        for prompt, number in order:
            if time.monotonic() > until:
                break
            row: dict[str, Any] = {}
            for alone in in_turn(("target", ""), prompt + number) + (("draft",) if prompt < 3 else ()):
                moments.clear()
                began = time.perf_counter()
                length = ASIDE_TOKENS if alone == "draft" else TOKENS
                reply = load.ask(trial.TrialRequest((prompt,), length, alone))
                row[alone] = {
                    "moments_s": [round(moment - began, 5) for moment in moments[: len(reply.answers[0].tokens)]],
                    "reply": codec.dump(reply, trial.TrialResult),
                }
            kept["passes"][-1].append(row)
            path.write_text(json.dumps(kept))
            print(name, number, prompt, {k: len(v["moments_s"]) for k, v in row.items()}, flush=True)


@dataclass
class Clock:
    """What time it is in a replay."""

    now: float = 0.0


class Replay:
    """A load whose answers are recorded ones; time is what they took."""

    def __init__(self, kept: dict[str, Any], random_: random.Random) -> None:
        self.kept, self.random, self.clock = kept, random_, Clock()
        self.spec = codec.load(trial.TrialJob, kept["spec"])
        self.ready = trial.TrialReady(0.0, tuple(kept["prompt_tokens"]), True)
        self._drawn: dict[int, tuple[int, set[str]]] = {}  # of a prompt: the pass, and the ways that have used it

    def opened(self, spec: trial.TrialJob, *_: Any, **__: Any) -> Replay:
        """Another load, of the same clock: the check in strict mode has fewer prompts, and shorter ones."""
        load = copy.copy(self)
        load.spec = spec
        return load

    def ask(self, request: trial.TrialRequest) -> trial.TrialResult:
        prompts = range(len(self.spec.prompts)) if request.prompts is None else request.prompts
        found = [self._answer(prompt, request) for prompt in (prompts[:1] if request.warm_up else prompts)]
        return replace(found[0], answers=tuple(one.answers[0] for one in found))

    def _answer(self, prompt: int, request: trial.TrialRequest) -> trial.TrialResult:
        passes = [rows for rows in self.kept["passes"] if len(rows) > prompt and request.alone in rows[prompt]]
        number, used = self._drawn.get(prompt, (0, set(WAYS)))
        if request.alone in used:
            number, used = self.random.randrange(len(passes)), set()
        self._drawn[prompt] = number, used | {request.alone}
        row = passes[number % len(passes)][prompt][request.alone]
        reply = codec.load(trial.TrialResult, row["reply"])
        answer = reply.answers[0]
        count = min(4 if request.warm_up else request.max_tokens or self.spec.max_tokens, len(row["moments_s"]))
        whole = answer.statistics
        end = whole.prompt_s + whole.decode_s if count == whole.tokens else row["moments_s"][count - 1]
        self.clock.now += end
        short = replace(whole, tokens=count, decode_s=end - whole.prompt_s)
        # The texts are not what is judged: those of both ways are the same
        return replace(reply, answers=(replace(answer, tokens=tuple(range(count)), statistics=short),))

    def stop(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""


def verdict_of(bench: Bench) -> dict[str, Any]:
    """What a bench said, and what it took."""
    document = bench.document()
    return {
        "verdict": document.verdict.text.split(":")[0],
        "text": document.verdict.text,
        "speedup": document.speedup and document.speedup.median,
        "ci95": document.speedup and document.speedup.ci95,
        "prompts": bench.answers.prompts,
        "tokens": bench.answers.lengths,
        "passes": len(bench.results["speculative"]),
        "spent_s": bench.answers.budget.spent_s,
    }


def judge(path: Path, draws: int) -> dict[str, Any]:
    """Short benches of one pair against its long one."""
    kept = json.loads(path.read_text())
    kept["passes"] = [rows for rows in kept["passes"] if rows]
    spec = codec.load(trial.TrialJob, kept["spec"])
    pair = Pair(path.stem, spec.target, spec.draft)
    whole = Bench(BenchExperiment(pair, spec, len(kept["passes"])))
    for alone, mode in WAYS.items():
        rows = [[row[alone] for row in rows if alone in row] for rows in kept["passes"]]
        for found in filter(None, rows):
            results = [codec.load(trial.TrialResult, one["reply"]) for one in found]
            whole.results[mode].append(replace(results[0], answers=tuple(one.answers[0] for one in results)))
    found = []
    for seed in range(draws):
        replay = Replay(kept, random.Random(seed))
        bench = Bench(
            BenchExperiment(pair, spec, budget_s=BUDGET_S), opened=replay.opened, clock=lambda one=replay: one.clock.now
        )
        bench.run(lambda *_: None)
        found.append(verdict_of(bench))
    long_one = verdict_of(whole)
    return {
        "long": long_one,
        "short": found,
        "same": sum(one["verdict"] == long_one["verdict"] for one in found),
        "of": draws,
        "most_s": max(one["spent_s"] for one in found),
        "others_cpus": [row[""]["reply"]["others_cpus"] for rows in kept["passes"] for row in rows],
    }


def main() -> None:
    """Record, or judge and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "judge"))
    parser.add_argument("targets", nargs="*", metavar="NAME=FILE", help="what to record")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--seconds", type=float, default=170, help="for each target")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--raw", type=Path, default=Path(".cache/bench-budget"), help="folder of the recorded answers")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    arguments = parser.parse_args()
    arguments.raw.mkdir(parents=True, exist_ok=True)
    if arguments.what == "record":
        for name, _, file in (one.partition("=") for one in arguments.targets):
            record(name, Path(file), arguments.draft, arguments.seconds, arguments.raw)
        return
    pairs = {}
    for path in sorted(arguments.raw.glob("bench-budget-*.json")):
        name = path.stem.removeprefix("bench-budget-")
        pairs[name] = judge(path, arguments.draws)
        print(name, pairs[name]["long"]["text"], f"{pairs[name]['same']} of {pairs[name]['of']} say the same")
    save("bench-budget", {"pairs": pairs}, arguments.folder)


if __name__ == "__main__":
    main()
