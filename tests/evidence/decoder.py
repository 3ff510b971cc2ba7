"""The decoder's goals: against llama.cpp's own speculation, fixed draft lengths, target-only, and for identity.

    scripts/peers && .venv/bin/python tests/evidence/decoder.py          # some hours: everything, two repetitions
    .venv/bin/python tests/evidence/decoder.py --resume --targets Q4_0 --drafts 50m -r 1      # a slice, added to it

Targets of a billion parameters, drafts of 50 and 150 million, prompts of six kinds, greedy, 256 tokens. The parts:

A  our default ÷ ``llama-speculative-simple`` at its own best draft length of the case
B  the draft model, adaptive ÷ the draft model at the fixed length that was best looking back
C  speculation that cannot pay ÷ target-only: a draft of random weights; noise, greedily and at temperature 1
D  n-grams and draft together ÷ the better of them alone
E  the same text in strict mode whoever drafts, however far and however padded; what strict mode costs

A first search of short answers finds each case's best lengths, theirs and ours: 3 and 7 are tried, since batches
have dips at 4 and 8 tokens, and then the neighbours of the best until both are slower. The best, and the second if it
was close, run again for record, and the better one counts. In a repetition every way to decode runs once; ours run in
step with the same weights, a round of each in turn, since the speed of a shared machine wanders by a fifth within a
minute, and theirs right before and after. Ratios are taken within a repetition. Speed is tokens ÷ seconds from the end
of the prompt, as both programs report it. Nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from against_peers import theirs
from common import EVIDENCE, ROOT, demo_target, grown_draft, grown_targets, random_draft, save
from decoder_prompts import KINDS, short_prompts

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench.statistics import RESAMPLES, paired_ratios
from ggufspec.decoding import decoder as decoder_module
from ggufspec.decoding.policy.adaptive import Adaptive
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.llamacpp.model import Model
from ggufspec.llamacpp.options import Placement
from ggufspec.models.profile import demo_pair
from ggufspec.settings import parse_drafters

TARGETS = ("F16", "Q8_0", "Q4_0")
DRAFTS = ("50m", "150m")
PARTS = "ABCDE"
N_CTX = 2048
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 15)  # draft lengths that are searched
FIRST_LENGTHS = (3, 7)
CLOSE = 0.93  # a second length that reached this share of the best one's speed in the search runs for record too
PAYS = 1.05  # speculation pays where the best of all ways is faster than target-only by this factor
EARLY = 64  # tokens in which a policy may learn that speculation does not pay
WARM_UP = "A decoder that has just been opened"
SAMPLINGS = {"greedy": Sampling(), "temperature 1": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)}
GOALS = {
    "A": {"geomean": 1.20, "worst": 1.00},
    "B": {"geomean": 1.00, "worst": 0.95},
    "C": {"after 64 tokens": 0.98, "whole": 0.95},
    "D": {"geomean": 0.98},
}
MODES = {
    "A": ("target-only", "both", "theirs"),
    "B": ("target-only", "draft", "fixed"),
    "C": ("target-only", "both", "draft"),
    "D": ("both", "draft", "lookup"),
    "E": ("target-only", "target-only strict", "both", "both strict"),
}

KEPT = ("tokens", "prompt_s", "rounds", "plain_rounds", "drafted", "accepted", "lookup_drafted", "lookup_accepted")

Run = dict[str, Any]
Case = dict[str, Any]


# ---- one run --------------------------------------------------------------------------------------


def options_of(mode: str, threads: int) -> DecoderOptions:
    """The decoder of a mode: ``target-only``, ``both``, ``draft``, ``lookup`` or ``fixed 3``, and ``strict``."""
    name, *rest = mode.split()
    changes: dict[str, Any] = {"strict": "strict" in rest}
    if name == "fixed":
        changes |= {"drafters": ("draft",), "draft_policy": "fixed", "draft_max": int(rest[0])}
    elif name != "target-only":
        changes |= {"drafters": parse_drafters(name)}
    return DecoderOptions(ctx_size=N_CTX, threads=threads, **changes)


def opened(target: Path, draft: Path, mode: str, threads: int, latencies: Path) -> SpeculativeDecoder:
    """A decoder of a mode that has answered once, so that its pages are in. Latencies are kept in ``latencies``."""
    with_draft = mode.split()[0] not in ("target-only", "lookup")
    decoder = SpeculativeDecoder(target, draft if with_draft else None, options_of(mode, threads), cache=latencies)
    ours(decoder, mode, WARM_UP, 4)
    return decoder


class Answer:
    """One answer of ours, round by round."""

    def __init__(
        self, decoder: SpeculativeDecoder, mode: str, prompt: str, tokens: int, sampling: Sampling | None = None
    ) -> None:
        self.decoder = decoder
        self.ids: list[int] = []
        self.wall_s = 0.0
        alone = "target" if mode.startswith("target-only") else ""
        self._emitted = decoder.generate(prompt, max_tokens=tokens, sampling=sampling, alone=alone)

    def step(self) -> bool:
        """Run one more round; False if there is none."""
        began, known = time.perf_counter(), len(self.ids)
        for emitted in self._emitted:
            self.ids.append(emitted.token)
            if len(self.ids) == known + len(self.decoder.rounds[-1].emitted):
                break
        self.wall_s += time.perf_counter() - began
        return len(self.ids) > known

    def run(self) -> Run:
        """The figures, once all rounds have run; ``late_`` ones are those of rounds behind the first 64 tokens."""
        statistics = self.decoder.statistics
        assert statistics is not None
        assert statistics.tokens == len(self.ids)
        emitted = np.cumsum([len(round_.emitted) for round_ in self.decoder.rounds])
        late = [round_ for round_, before in zip(self.decoder.rounds, [0, *emitted], strict=False) if before >= EARLY]
        figures = asdict(statistics)
        return {
            "seconds": statistics.decode_s,
            **{name: figures[name] for name in KEPT},
            "wall_s": self.wall_s,
            "late_tokens": sum(len(round_.emitted) for round_ in late),
            "late_seconds": sum(round_.total_s for round_ in late),
            "widths": dict(sorted(Counter(round_.width for round_ in self.decoder.rounds).items())),
            "ids": self.ids,
        }


def ours(decoder: SpeculativeDecoder, mode: str, prompt: str, tokens: int, sampling: Sampling | None = None) -> Run:
    """One answer of ours."""
    answer = Answer(decoder, mode, prompt, tokens, sampling)
    while answer.step():
        pass
    return answer.run()


class Decoders:
    """The open decoders of one target and one draft. All of them decode with the same weights.

    They must: where weights are repacked or the memory they came to lie in is another, the same batch takes some
    per cent more or less, for as long as a model is loaded.

    They keep their latencies in a folder of their own, as the commands do in the user's: what one measures is known
    to the next, and two ways to decode differ in what they do and not in what they happened to measure.
    """

    def __init__(self, target: Path, draft: Path, threads: int, *, verbose: bool) -> None:
        self.target, self.draft, self.threads, self.verbose = target, draft, threads, verbose
        self._open: dict[str, SpeculativeDecoder] = {}
        self._models: dict[Path, Model] = {}
        self._latencies = tempfile.TemporaryDirectory()
        self.notes: set[str] = set()

    def run(self, mode: str, prompt: str, tokens: int) -> Run:
        """One answer."""
        if mode.startswith("theirs"):
            run = theirs(self.target, self.draft, prompt, tokens, int(mode.split()[1]), self.threads)
        else:
            run = ours(self._decoder(mode), mode, prompt, tokens)
        self._said(mode, run)
        return run

    def in_step(
        self, modes: Sequence[str], prompt: str, tokens: int, sampling: Sampling, *, fresh: bool = False
    ) -> dict[str, Run]:
        """An answer of each of our modes, all at once: whoever is the furthest behind in the text runs a round.

        So the machine is as fast for one as for another, however its speed wanders. ``fresh`` opens the decoders anew,
        so that they have learned nothing.
        """
        answers = {mode: Answer(self._decoder(mode, fresh=fresh), mode, prompt, tokens, sampling) for mode in modes}
        waiting = dict(answers)
        while waiting:
            mode = min(waiting, key=lambda mode: len(waiting[mode].ids))
            if not waiting[mode].step():
                del waiting[mode]
        runs = {mode: answer.run() for mode, answer in answers.items()}
        for mode, run in runs.items():
            self._said(mode, run)
        return runs

    def _decoder(self, mode: str, *, fresh: bool = False) -> SpeculativeDecoder:
        if fresh and mode in self._open:
            self._open.pop(mode).close()
        if mode not in self._open:
            with mock.patch.object(decoder_module, "Model", self._model):
                self._open[mode] = opened(self.target, self.draft, mode, self.threads, Path(self._latencies.name))
        self.notes.update(f"{mode}: {note}" for note in self._open[mode].notes)
        return self._open[mode]

    def _model(self, path: Path, placement: Placement) -> Model:
        """The model of a file; no decoder closes it."""
        if path not in self._models:
            self._models[path] = Model(path, placement)
            self._models[path].close = lambda: None  # type: ignore[method-assign]
        return self._models[path]

    def _said(self, mode: str, run: Run) -> None:
        if self.verbose:
            print(f"    {mode:18} {speed_of(run):6.2f} t/s, {run['accepted']} of {run['drafted']} kept", flush=True)

    def close(self) -> None:
        """Free all."""
        while self._open:
            self._open.popitem()[1].close()
        while self._models:
            Model.close(self._models.popitem()[1])
        self._latencies.cleanup()


# ---- one case -------------------------------------------------------------------------------------


def best_lengths(speed: Callable[[int], float]) -> dict[int, float]:
    """Tokens/s by draft length, of those that had to be tried to find the best."""
    found: dict[int, float] = {}
    wanted: Sequence[int] = FIRST_LENGTHS
    while wanted:
        found |= {length: speed(length) for length in wanted}
        place = LENGTHS.index(max(found, key=lambda length: found[length]))
        wanted = [length for length in LENGTHS[max(0, place - 1) : place + 2] if length not in found]
    return found


def finalists(found: dict[str, float]) -> list[str]:
    """The best length, and the second if it was close."""
    ordered = sorted(found, key=lambda length: found[length], reverse=True)
    return ordered[:1] + [length for length in ordered[1:2] if found[length] >= CLOSE * found[ordered[0]]]


def speed_of(run: Run) -> float:
    return run["tokens"] / run["seconds"]


def modes_of(case: Case, parts: str) -> list[str]:
    """The modes that ``parts`` need of a case, with lengths once they are known."""
    found: list[str] = []
    for part in parts:
        for mode in MODES[part]:
            lengths = finalists(case["search"][mode]) if mode in ("theirs", "fixed") else []
            found += [f"{mode} {length}" for length in lengths] or [mode]
    return list(dict.fromkeys(found))


def search(case: Case, parts: str, decoders: Decoders, tokens: int) -> None:
    """Fill in the case's best lengths, theirs and ours, where they are needed and not known."""
    for part, mode in (("B", "fixed"), ("A", "theirs")):
        if part in parts and mode not in case["search"]:
            found = best_lengths(
                lambda length, mode=mode: speed_of(decoders.run(f"{mode} {length}", KINDS[case["kind"]], tokens))
            )
            case["search"][mode] = {str(length): round(speed, 3) for length, speed in found.items()}


def repeat(case: Case, parts: str, decoders: Decoders, tokens: int, repetitions: int, place: int) -> Iterator[None]:
    """Add repetitions until every part has enough of them; yields after each."""
    while True:
        done = {part: sum(set(modes_of(case, part)) <= r.keys() for r in case["repetitions"]) for part in parts}
        lacking = "".join(part for part in parts if done[part] < repetitions)
        if not lacking:
            return
        modes = modes_of(case, lacking)
        turn = (place + len(case["repetitions"])) * (len(modes) // 2 + 1) % len(modes)
        prompt = KINDS[case["kind"]]
        others = [mode for mode in modes if mode.startswith("theirs")]
        own = [mode for mode in modes[turn:] + modes[:turn] if mode not in others]
        fresh = case["group"] == "switch-off"
        runs = {mode: decoders.run(mode, prompt, tokens) for mode in others[: len(others) // 2]}
        runs |= decoders.in_step(own, prompt, tokens, SAMPLINGS[case["sampling"]], fresh=fresh)
        runs |= {mode: decoders.run(mode, prompt, tokens) for mode in others[len(others) // 2 :]}
        alone = runs.get("target-only", {}).get("ids")
        for run in runs.values():
            ids = run.pop("ids", None)
            if ids is not None and alone is not None:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, alone, strict=False))
                run["tokens_as_target_only"] = sum(1 for _ in same)
        case["repetitions"].append(runs)
        case.setdefault("load_averages", []).append(os.getloadavg()[0])
        yield


def cases_of(arguments: argparse.Namespace) -> list[tuple[Case, str]]:
    """All cases that were asked for, with the parts that each serves, those of one pair together."""
    found = []
    grid = "".join(part for part in "ABD" if part in arguments.parts)

    def add(group: str, parts: str, target: str, draft: str, kind: str, sampling: str = "greedy") -> None:
        if parts and kind in arguments.kinds:
            case = {"group": group, "target": target, "draft": draft, "kind": kind, "sampling": sampling}
            found.append((case | {"search": {}, "repetitions": []}, parts))

    for target in arguments.targets:
        for draft in arguments.drafts:
            for kind in KINDS:
                add("grid", grid, target, draft, kind)
            if "C" in arguments.parts:
                for sampling in SAMPLINGS:
                    add("switch-off", "C", target, draft, "noise", sampling)
            if "E" in arguments.parts and draft == DRAFTS[0]:
                for kind in ("code", "prose"):
                    add("strict", "E", target, draft, kind)
        if "C" in arguments.parts:
            for kind in ("code", "prose", "noise"):
                add("switch-off", "C", target, "random", kind)
    return found


# ---- identity -------------------------------------------------------------------------------------

PADDINGS = ("pad", "no pad", "widest")  # as the latency says; as little as the class allows; always as much
POLICIES = ("adaptive", "fixed")
IDENTITY_SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling(temperature=0.8, seed=7)}


@contextlib.contextmanager
def padded(name: str) -> Iterator[None]:
    """One way to pad, at costs that are the same everywhere.

    A tiny pair on a busy machine would hardly draft by its own: here drafts cost nothing, each token that is verified
    with others a tenth of one alone, and the adaptive policy never rests.
    """

    def up_to(latency: LatencyModel, most: int, last: int | None = None) -> list[float]:
        return [latency.seconds(1) * (1 + place / 10) for place in range(most)]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Adaptive, "_cost", return_value=0.0))
        stack.enter_context(mock.patch.object(Adaptive, "REST_SHARE", math.inf))
        stack.enter_context(mock.patch.object(LatencyModel, "up_to", up_to))
        if name == "widest":
            stack.enter_context(
                mock.patch.object(LatencyModel, "width", lambda latency, count: max(count, latency.limit))
            )
        elif name == "no pad":
            narrowest = lambda latency, count: min(width for width in latency._allowed if width >= count)  # noqa: E731
            stack.enter_context(mock.patch.object(LatencyModel, "width", narrowest))
        yield


def answers(target: Path, draft: Path, drafter: str, policy: str, padding: str, count: int) -> dict[str, Any]:
    """Strict mode's texts of one way to draft, in a process of its own: tokens, widths and drafted tokens by sampling.

    Of the prompts, those of six kinds go beyond 256 cells of context, where kernels change.
    """
    short = short_prompts(count)[:: 10 if padding == "widest" else 1]  # which is slow
    prompts = [(text, 24) for text in short] + [(text, 128) for text in KINDS.values()]
    changes: dict[str, Any] = (
        {"drafters": parse_drafters(drafter), "draft_policy": policy, "draft_max": 7} if drafter else {}
    )
    options = DecoderOptions(ctx_size=512, threads=1, strict=True, **changes)
    found: dict[str, Any] = {}
    with padded(padding), SpeculativeDecoder(target, draft if drafter else None, options) as decoder:
        for name, sampling in IDENTITY_SAMPLINGS.items():
            runs = [ours(decoder, drafter or "target-only", text, tokens, sampling) for text, tokens in prompts]
            found[name] = {
                "texts": {text: run["ids"] for (text, _), run in zip(prompts, runs, strict=True)},
                "drafted": sum(run["drafted"] for run in runs),
                "widths": sorted(set[int]().union(*(run["widths"] for run in runs))),
            }
    return found


def identity(kind: str, count: int, processes: int) -> Iterator[dict[str, Any]]:
    """Compare strict mode's texts of every drafter, policy and padding with target-only's, to the token."""
    target, draft = demo_target(kind), demo_pair()[1]
    ways = [("", "", padding) for padding in PADDINGS]
    ways += list(itertools.product(("draft", "lookup", "both"), POLICIES, PADDINGS))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(answers, target, draft, *way, count) for way in ways]
        reference = jobs[0].result()
        for way, job in zip(ways, jobs, strict=True):
            for sampling, found in job.result().items():
                texts, alone = found["texts"], reference[sampling]["texts"]
                different = [text for text, ids in texts.items() if ids != alone[text]]
                yield {
                    "target": kind,
                    **dict(zip(("drafter", "policy", "padding"), way, strict=True)),
                    "sampling": sampling,
                    "drafted": found["drafted"],
                    "widths": found["widths"],
                    "prompts": len(texts),
                    "tokens": sum(map(len, texts.values())),
                    "identical": len(texts) - len(different),
                    "different": different[:5],
                }


# ---- goals ----------------------------------------------------------------------------------------


def name_of(case: Case) -> str:
    return " ".join(case[key] for key in ("target", "draft", "kind")) + (
        f" ({case['sampling']})" if case["sampling"] != "greedy" else ""
    )


def modes_run(case: Case) -> list[str]:
    """All modes that ran, in no order of speed."""
    return list(dict.fromkeys(mode for repetition in case["repetitions"] for mode in repetition))


def speed(case: Case, mode: str) -> float:
    """Tokens/s of a mode over all its repetitions."""
    runs = [repetition[mode] for repetition in case["repetitions"] if mode in repetition]
    return sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)


def fastest(case: Case, *beginnings: str) -> str:
    """The fastest mode of those whose names begin so."""
    return max((mode for mode in modes_run(case) if mode.startswith(beginnings)), key=lambda mode: speed(case, mode))


def ratio(case: Case, mode: str, other: str, late: str = "") -> dict[str, Any]:
    """Speed of one mode ÷ speed of another, paired by repetition; ``late_`` looks behind the first tokens."""
    speeds = [
        [repetition[name][f"{late}tokens"] / repetition[name][f"{late}seconds"] for name in (mode, other)]
        for repetition in case["repetitions"]
        if {mode, other} <= repetition.keys()
    ]
    found = paired_ratios(*zip(*speeds, strict=True))
    return {"case": name_of(case), "ratio": found.median, "ci95": found.ci95, "modes": [mode, other]}


def geometric_mean(ratios: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the cases' ratios, with the bootstrap interval over cases, and the worst case."""
    if not ratios:
        return {"cases": 0}
    logs = np.log([one["ratio"] for one in ratios])
    means = logs[np.random.default_rng(0).integers(0, logs.size, (RESAMPLES, logs.size))].mean(axis=1)
    return {
        "cases": len(ratios),
        "geomean": float(np.exp(logs.mean())),
        "ci95": np.exp(np.percentile(means, (2.5, 97.5))).tolist(),
        "worst": min(ratios, key=lambda one: one["ratio"]),
    }


def has(case: Case, *beginnings: str) -> bool:
    return all(any(mode.startswith(beginning) for mode in modes_run(case)) for beginning in beginnings)


def pays(case: Case) -> bool:
    """Whether any way to speculate, theirs or ours, is clearly faster than target-only."""
    return speed(case, fastest(case, "both", "draft", "lookup", "fixed", "theirs")) > PAYS * speed(case, "target-only")


def goal(figures: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Figures with the limits that they are held to, and whether they keep them."""
    if not figures["cases"]:
        return figures
    met = figures["geomean"] >= limits.get("geomean", 0.0) and figures["worst"]["ratio"] >= limits.get("worst", 0.0)
    return {**figures, "limits": limits, "met": met}


def summary(cases: Sequence[Case], identical: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every goal that something was measured for: its figures, its limits, and whether it is met."""
    found: dict[str, dict[str, Any]] = {}
    grid = [case for case in cases if case["group"] == "grid" and case["repetitions"]]

    if own := [case for case in grid if has(case, "both", "theirs", "target-only")]:
        against = {name_of(case): ratio(case, "both", fastest(case, "theirs")) for case in own}
        paying = [against[name_of(case)] for case in own if pays(case)]
        rule = f"speculation pays where the fastest way, theirs or ours, is {PAYS} times as fast as target-only"
        found["A where speculation pays"] = goal(geometric_mean(paying), GOALS["A"]) | {"pays": rule}
        found["A in all cases"] = geometric_mean(list(against.values()))
        found["both ÷ target-only"] = geometric_mean([ratio(case, "both", "target-only") for case in own])

    if own := [case for case in grid if has(case, "draft", "fixed")]:
        best = geometric_mean([ratio(case, "draft", fastest(case, "fixed")) for case in own])
        found["B"] = goal(best, GOALS["B"])
        own = [case for case in own if has(case, "target-only")]
        found["B with length 0 among the fixed ones"] = geometric_mean(
            [ratio(case, "draft", fastest(case, "fixed", "target-only")) for case in own]
        )

    own = [case for case in cases if case["group"] == "switch-off" and case["repetitions"]]
    for late, limit in (("late_", GOALS["C"]["after 64 tokens"]), ("", GOALS["C"]["whole"])):
        ratios = [ratio(case, mode, "target-only", late) for case in own for mode in ("both", "draft")]
        if ratios:
            name = f"C after {EARLY} tokens" if late else "C over all tokens"
            found[name] = goal(geometric_mean(ratios), {"worst": limit}) | {"ratios": ratios}

    together = [
        (case["kind"], ratio(case, "both", fastest(case, "draft", "lookup")))
        for case in grid
        if has(case, "both", "draft", "lookup")
    ]
    for kind in dict.fromkeys(kind for kind, _ in together):
        found[f"D {kind}"] = goal(geometric_mean([one for other, one in together if other == kind]), GOALS["D"])

    if identical:
        total, same = (sum(one[key] for one in identical) for key in ("prompts", "identical"))
        idle = [one for one in identical if one["drafter"] and not one["drafted"]]  # these prove nothing
        found["E identity"] = {"texts": total, "identical": same, "met": total == same and not idle, "idle": idle}
    own = [case for case in cases if case["group"] == "strict" and case["repetitions"]]
    for mode in ("target-only", "both"):
        if own:
            cost = geometric_mean([ratio(case, f"{mode} strict", mode) for case in own])
            found[f"E strict ÷ default, {mode}"] = cost

    found |= checks(grid)
    return found


def checks(grid: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """What would make the figures above untrue."""
    found: dict[str, dict[str, Any]] = {}
    for mode in ("target-only", "both", "draft", "lookup"):
        pairs = [
            {"case": name_of(case), "ratio": speed_of(second[mode]) / speed_of(first[mode])}
            for case in grid
            for first, second in itertools.pairwise(case["repetitions"])
            if mode in first and mode in second
        ]
        if pairs:  # the same text again must not be faster, as it would be from memory
            found[f"a repetition ÷ the one before, {mode}"] = geometric_mean(pairs)
    runs = [
        run for case in grid for repetition in case["repetitions"] for run in repetition.values() if "wall_s" in run
    ]
    if runs:
        outside = sum(run["wall_s"] - run["prompt_s"] - run["seconds"] for run in runs)
        found["our time outside of rounds"] = {"share": outside / sum(run["seconds"] for run in runs)}
    texts = [run for run in runs if "tokens_as_target_only" in run]
    if texts:
        same = sum(run["tokens_as_target_only"] == run["tokens"] for run in texts)
        found["texts as target-only's in default mode"] = {"texts": len(texts), "identical": same}
    return found


def reported(name: str, figures: dict[str, Any]) -> str:
    """One line for people."""
    parts = [f"{name:44}"]
    if "geomean" in figures:
        low, high = figures["ci95"]
        parts.append(f"{figures['geomean']:.3f} ({low:.3f} to {high:.3f}) over {figures['cases']}")
        parts.append(f"worst {figures['worst']['ratio']:.3f} {figures['worst']['case']}")
    elif "texts" in figures:
        parts.append(f"{figures['identical']} of {figures['texts']} identical")
    elif "share" in figures:
        parts.append(f"{100 * figures['share']:.2f} %")
    else:
        parts.append("no case")
    if "met" in figures:
        parts.append("PASS" if figures["met"] else "MISS")
    return "  ".join(parts)


# ---- the command ----------------------------------------------------------------------------------


def code() -> str:
    """A digest of what decodes: the sources without comments, docstrings and layout."""
    digest = hashlib.sha256()
    for path in sorted(
        itertools.chain(*((ROOT / "ggufspec" / room).glob("*.py") for room in ("decoding", "llamacpp")))
    ):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:16]


class Record:
    """The JSON file: all cases, the identities, and the summary of both."""

    def __init__(self, folder: Path, settings: dict[str, int] | None, *, resume: bool) -> None:
        self.folder, path = folder, folder / "decoder.json"
        self.document: dict[str, Any] = {"commands": [], "summary": {}, "identity": {"runs": []}, "cases": []}
        if path.exists() and resume:
            known = json.loads(path.read_text())
            self.document = {key: known[key] for key in self.document}
            if settings:
                self.document["cases"] = [case for case in known["cases"] if case["settings"] == settings]
        elif path.exists():
            shutil.copy(path, ROOT / ".cache" / "decoder-before.json")
        self.cases: list[Case] = self.document["cases"]

    def case(self, case: Case) -> Case:
        """The case as it is known, or else put in; of one that ran with other code only its best lengths are kept.

        They say which lengths run for record, and of those every figure is taken anew.
        """
        keys = ("group", "target", "draft", "kind", "sampling")
        for place, other in enumerate(self.cases):
            if all(case[key] == other[key] for key in keys):
                if other["code"] != case["code"]:
                    case["search"] = other["search"]
                    self.cases[place] = case
                return self.cases[place]
        self.cases.append(case)
        return case

    def save(self) -> None:
        self.document["summary"] = summary(self.cases, self.document["identity"]["runs"])
        save("decoder", {"goals": GOALS, **self.document}, self.folder)

    def summary(self) -> None:
        """Print the summary."""
        now = code()
        outdated = sum(case["code"] != now for case in self.cases)
        if outdated:
            print(f"{outdated} of {len(self.cases)} cases were measured with other code")
        for name, figures in summary(self.cases, self.document["identity"]["runs"]).items():
            print(reported(name, figures))


def line(case: Case) -> str:
    """The case's speeds and ratios for people."""
    speeds = "  ".join(f"{mode} {speed(case, mode):.1f}" for mode in sorted(modes_run(case)))
    ratios = []
    for part, mode, others in (
        ("A", "both", ("theirs",)),
        ("B", "draft", ("fixed",)),
        ("C both", "both", ("target-only",)),
        ("C draft", "draft", ("target-only",)),
        ("D", "both", ("draft", "lookup")),
        ("E", "both strict", ("both",)),
    ):
        wanted = {"grid": "ABD", "switch-off": "C", "strict": "E"}[case["group"]]
        if part[0] in wanted and has(case, mode, *others):
            late = f", late {ratio(case, mode, others[0], 'late_')['ratio']:.3f}" if part[0] == "C" else ""
            ratios.append(f"{part} {ratio(case, mode, fastest(case, *others))['ratio']:.3f}{late}")
    return f"{name_of(case)}: {speeds} t/s; {'; '.join(ratios)}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def several(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := set(chosen) - set(known):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
            return [name for name in known if name in chosen]

        return parse

    for name, known in (("parts", PARTS), ("targets", TARGETS), ("drafts", DRAFTS), ("kinds", tuple(KINDS))):
        every = ",".join(known)
        parser.add_argument(f"--{name}", type=several(known), default=list(known), help=f"default: {every}")
    parser.add_argument("-n", type=int, default=256, help="tokens an answer")
    parser.add_argument("-r", type=int, default=2, help="repetitions")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("--search", type=int, default=64, metavar="N", help="tokens of a search's answer")
    parser.add_argument("--identity", type=int, default=200, metavar="N", help="prompts of E")
    parser.add_argument("--resume", action="store_true", help="go on with docs/evidence/decoder.json")
    parser.add_argument("--summary", action="store_true", help="measure nothing; tell what the file holds")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every run")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    return parser.parse_args()


def measure_cases(record: Record, settings: dict[str, int], arguments: argparse.Namespace) -> None:
    """Everything but identity; saved after every repetition."""
    planned = cases_of(arguments)
    targets = grown_targets(tuple(arguments.targets))
    drafts = {
        name: random_draft() if name == "random" else grown_draft(name) for name in {c["draft"] for c, _ in planned}
    }
    numbered = enumerate(planned, 1)
    for (target, draft), own in itertools.groupby(numbered, key=lambda one: (one[1][0]["target"], one[1][0]["draft"])):
        decoders = Decoders(targets[target], drafts[draft], arguments.t, verbose=arguments.verbose)
        for number, (plan, parts) in own:
            case = record.case(plan | {"settings": settings, "code": code()})
            began = time.perf_counter()
            search(case, parts, decoders, arguments.search)
            for _ in repeat(case, parts, decoders, arguments.n, arguments.r, number):
                case["notes"] = sorted(decoders.notes)
                record.save()
            print(f"[{number}/{len(planned)}] {line(case)}  [{time.perf_counter() - began:.0f} s]", flush=True)
        decoders.close()


def measure_identity(record: Record, arguments: argparse.Namespace) -> None:
    """The texts of part E, unless they are known."""
    settings = {"code": code(), "prompts": arguments.identity}
    known = record.document["identity"]
    if all(known.get(key) == value for key, value in settings.items()):
        return
    runs: list[Run] = []
    for kind in TARGETS:
        count = arguments.identity if kind == "F16" else arguments.identity // 5
        for one in identity(kind, count, arguments.t):
            runs.append(one)
            how = ", ".join(one[key] or "target-only" for key in ("target", "drafter", "policy", "padding", "sampling"))
            print(f"{how}: {one['identical']} of {one['prompts']} identical, widths {one['widths']}", flush=True)
    record.document["identity"] = settings | {"runs": runs}
    record.save()


def main() -> None:
    """Measure, print, save."""
    arguments = parsed()
    settings = {
        "tokens": arguments.n,
        "threads": arguments.t,
        "ctx_size": N_CTX,
        "search": arguments.search,
        "in_step": 3,
    }
    record = Record(
        arguments.folder, None if arguments.summary else settings, resume=arguments.resume or arguments.summary
    )
    if not arguments.summary:
        record.document["commands"].append(" ".join(sys.argv[1:]))
        measure_cases(record, settings, arguments)
        if "E" in arguments.parts:
            measure_identity(record, arguments)
        record.save()
    record.summary()


if __name__ == "__main__":
    main()
