"""Several ways to decode one prompt, run in step with the same weights, and figures over such cases.

A case is a target, what drafts for it and a kind of text; a mode is a way to decode; a repetition has a run of each
mode. Ours run in step, a round of each in turn, since the speed of a shared machine wanders by a fifth within a minute,
and llama.cpp's program right before and after. Ratios are taken within a repetition.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import ROOT

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench.statistics import RESAMPLES, paired_ratios
from ggufspec.decoding import pair as pair_module
from ggufspec.llamacpp.model import Model
from ggufspec.llamacpp.options import Placement

CLOSE = 0.93  # a second length that reached this share of the best one's speed in the search runs for record too
EARLY = 64  # tokens in which a policy may learn that speculation does not pay
WARM_UP = "A decoder that has just been opened"
KEPT = (
    "prompt_s",
    "time_to_first_token_s",
    "rounds",
    "plain_rounds",
    "drafted",
    "accepted",
    "lookup_drafted",
    "lookup_accepted",
)

Run = dict[str, Any]
Case = dict[str, Any]
Opener = Callable[[str], tuple[Path | None, DecoderOptions]]  # the draft's file and the options of a mode


@dataclass(frozen=True, slots=True)
class Sieve:
    """Which modes leave a run in step early: ``losers`` of the speeds that all have once each has ``tokens``."""

    tokens: int
    losers: Callable[[dict[str, float]], set[str]]


# ---- one run --------------------------------------------------------------------------------------


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

    @property
    def speed(self) -> float:
        """Tokens/s so far."""
        return (len(self.ids) - 1) / max(sum(round_.total_s for round_ in self.decoder.rounds[1:]), 1e-9)

    def leave(self) -> None:
        """Run no more rounds."""
        self._emitted.close()

    def run(self) -> Run:
        """The figures, once all rounds have run.

        The first token is the prompt's: ``whole_`` figures count both. ``late_`` ones are those of rounds behind the
        first 64 tokens.
        """
        statistics = self.decoder.statistics
        assert statistics is not None
        assert statistics.tokens == len(self.ids)
        emitted = np.cumsum([len(round_.emitted) for round_ in self.decoder.rounds])
        late = [round_ for round_, before in zip(self.decoder.rounds, [0, *emitted], strict=False) if before >= EARLY]
        figures = asdict(statistics)
        return {
            "tokens": statistics.decoded,
            "seconds": statistics.decode_s,
            **{name: figures[name] for name in KEPT},
            "wall_s": self.wall_s,
            "late_tokens": sum(len(round_.emitted) for round_ in late),
            "late_seconds": sum(round_.total_s for round_ in late),
            "whole_tokens": statistics.tokens,
            "whole_seconds": statistics.prompt_s + statistics.decode_s,
            "batch_sizes": dict(sorted(Counter(round_.batch_size for round_ in self.decoder.rounds[1:]).items())),
            "ids": self.ids,
        }


def ours(decoder: SpeculativeDecoder, mode: str, prompt: str, tokens: int, sampling: Sampling | None = None) -> Run:
    """One answer of ours."""
    answer = Answer(decoder, mode, prompt, tokens, sampling)
    while answer.step():
        pass
    return answer.run()


def is_theirs(mode: str) -> bool:
    """Whether llama.cpp's program runs a mode."""
    return "theirs" in mode.split()


class Decoders:
    """The open decoders of one target. All of them decode with the same weights.

    They must: where weights are repacked or the memory they came to lie in is another, the same batch takes some
    per cent more or less, for as long as a model is loaded.

    They keep their latencies in a folder of their own, as the commands do in the user's: what one measures is known
    to the next, and two ways to decode differ in what they do and not in what they happened to measure.

    Args:
        target: the target's file.
        opener: the draft's file and the options of one of our modes.
        theirs: an answer of llama.cpp's program, for a mode that names it: mode, prompt, tokens.
        verbose: tell every run.
    """

    def __init__(
        self, target: Path, opener: Opener, theirs: Callable[[str, str, int], Run], *, verbose: bool = False
    ) -> None:
        self.target, self.opener, self.theirs, self.verbose = target, opener, theirs, verbose
        self._open: dict[str, SpeculativeDecoder] = {}
        self._models: dict[Path, Model] = {}
        self._latencies = tempfile.TemporaryDirectory()
        self.notes: set[str] = set()

    def run(self, mode: str, prompt: str, tokens: int) -> Run:
        """One answer."""
        run = self.theirs(mode, prompt, tokens) if is_theirs(mode) else ours(self._decoder(mode), mode, prompt, tokens)
        self._said(mode, run)
        return run

    def in_step(
        self,
        modes: Sequence[str],
        prompt: str,
        tokens: int,
        sampling: Sampling,
        *,
        fresh: bool = False,
        sieve: Sieve | None = None,
    ) -> dict[str, Run]:
        """An answer of each of our modes, all at once: whoever is the furthest behind in the text runs a round.

        So the machine is as fast for one as for another, however its speed wanders. ``fresh`` opens the decoders anew,
        so that they have learned nothing. Whoever falls through the sieve has no run.
        """
        answers = {mode: Answer(self._decoder(mode, fresh=fresh), mode, prompt, tokens, sampling) for mode in modes}
        waiting = dict(answers)
        while waiting:
            mode = min(waiting, key=lambda mode: len(waiting[mode].ids))
            if sieve and len(answers[mode].ids) >= sieve.tokens:
                for loser in sieve.losers({mode: answer.speed for mode, answer in answers.items()}):
                    answers.pop(loser).leave()
                    waiting.pop(loser, None)
                sieve = None
                continue
            if not waiting[mode].step():
                del waiting[mode]
        runs = {mode: answer.run() for mode, answer in answers.items()}
        for mode, run in runs.items():
            self._said(mode, run)
        return runs

    def repetition(
        self,
        modes: Sequence[str],
        prompt: str,
        tokens: int,
        sampling: Sampling,
        *,
        turn: int,
        fresh: bool = False,
        sieve: Sieve | None = None,
    ) -> dict[str, Run]:
        """A run of every mode, theirs before and after ours, which begin at another one each ``turn``."""
        turn = turn * (len(modes) // 2 + 1) % len(modes)
        others = [mode for mode in modes if is_theirs(mode)]
        own = [mode for mode in [*modes[turn:], *modes[:turn]] if mode not in others]
        runs = {mode: self.run(mode, prompt, tokens) for mode in others[: len(others) // 2]}
        runs |= self.in_step(own, prompt, tokens, sampling, fresh=fresh, sieve=sieve)
        runs |= {mode: self.run(mode, prompt, tokens) for mode in others[len(others) // 2 :]}
        alone = runs.get("target-only", {}).get("ids")
        for run in runs.values():
            ids = run.pop("ids", None)
            if ids is not None and alone is not None:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, alone, strict=False))
                run["tokens_as_target_only"] = sum(1 for _ in same)
        return runs

    def _decoder(self, mode: str, *, fresh: bool = False) -> SpeculativeDecoder:
        if fresh and mode in self._open:
            self._open.pop(mode).close()
        if mode not in self._open:
            with mock.patch.object(pair_module, "Model", self._model):
                draft, options = self.opener(mode)
                cache = Path(self._latencies.name)
                self._open[mode] = SpeculativeDecoder(self.target, draft, options, cache=cache)
                ours(self._open[mode], mode, WARM_UP, 4)  # so that its pages are in
        self.notes.update(f"{mode}: {note}" for note in self._open[mode].notes)
        return self._open[mode]

    def _model(self, path: Path, placement: Placement) -> Model:
        """The model of a file; no decoder closes it."""
        if path not in self._models:
            self._models[path] = Model(path, replace(placement, mtp=True))  # a head may be wanted later
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


def best_lengths(speed: Callable[[int], float], lengths: Sequence[int], first: Sequence[int]) -> dict[int, float]:
    """Tokens/s by draft length, of those that had to be tried to find the best; ``first`` are in any case."""
    found: dict[int, float] = {}
    wanted = first
    while wanted:
        found |= {length: speed(length) for length in wanted}
        place = lengths.index(max(found, key=lambda length: found[length]))
        wanted = [length for length in lengths[max(0, place - 1) : place + 2] if length not in found]
    return found


def finalists(found: dict[str, float]) -> list[str]:
    """The best length, and the second if it was close."""
    ordered = sorted(found, key=lambda length: found[length], reverse=True)
    return ordered[:1] + [length for length in ordered[1:2] if found[length] >= CLOSE * found[ordered[0]]]


def speed_of(run: Run) -> float:
    return run["tokens"] / run["seconds"]


# ---- figures --------------------------------------------------------------------------------------


def name_of(case: Case) -> str:
    sampling = case.get("sampling", "greedy")
    words = [case[key] for key in ("target", "draft", "kind") if key in case]
    return " ".join(words) + (f" ({sampling})" if sampling != "greedy" else "")


def modes_run(case: Case) -> list[str]:
    """All modes that ran, in no order of speed."""
    return list(dict.fromkeys(mode for repetition in case["repetitions"] for mode in repetition))


def speed(case: Case, mode: str, part: str = "") -> float:
    """Tokens/s of a mode over all its repetitions; ``part`` as of :func:`ratio`."""
    runs = [repetition[mode] for repetition in case["repetitions"] if mode in repetition]
    return sum(run[f"{part}tokens"] for run in runs) / sum(run[f"{part}seconds"] for run in runs)


def fastest(case: Case, *beginnings: str) -> str:
    """The fastest mode of those whose names begin so."""
    return max((mode for mode in modes_run(case) if mode.startswith(beginnings)), key=lambda mode: speed(case, mode))


def ratio(case: Case, mode: str, other: str, part: str = "") -> dict[str, Any]:
    """Speed of one mode ÷ speed of another, paired by repetition.

    ``part`` may be ``late_``, which looks behind the first tokens, or ``whole_``, which counts the prompt's time, too.
    """
    speeds = [
        [repetition[name][f"{part}tokens"] / repetition[name][f"{part}seconds"] for name in (mode, other)]
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


def goal(figures: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Figures with the limits that they are held to, and whether they keep them."""
    if not figures["cases"]:
        return figures
    met = figures["geomean"] >= limits.get("geomean", 0.0) and figures["worst"]["ratio"] >= limits.get("worst", 0.0)
    return {**figures, "limits": limits, "met": met}


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
        itertools.chain(*((ROOT / "ggufspec" / room).rglob("*.py") for room in ("decoding", "llamacpp")))
    ):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:16]


def several(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of some of ``known``, with commas between them."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
        return [name for name in known if name in chosen]

    return parse
