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
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from against_peers import theirs
from common import EVIDENCE, ROOT, demo_target, grown_draft, grown_targets, random_draft, save
from decoder_prompts import KINDS, short_prompts
from in_step import (
    EARLY,
    Case,
    Decoders,
    Run,
    best_lengths,
    code,
    fastest,
    finalists,
    geometric_mean,
    goal,
    has,
    modes_run,
    name_of,
    ours,
    ratio,
    reported,
    several,
    speed,
    speed_of,
)

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.decoding.policy.adaptive import AdaptivePolicy
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.models.profile import demo_pair
from ggufspec.settings.registry import parse_drafters

TARGETS = ("F16", "Q8_0", "Q4_0")
DRAFTS = ("50m", "150m")
PARTS = "ABCDE"
N_CTX = 2048
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 15)  # draft lengths that are searched
FIRST_LENGTHS = (3, 7)
PAYS = 1.05  # speculation pays where the best of all ways is faster than target-only by this factor
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


# ---- one case -------------------------------------------------------------------------------------


def options_of(mode: str, threads: int) -> DecoderOptions:
    """The decoder of a mode: ``target-only``, ``both``, ``draft``, ``lookup`` or ``fixed 3``, and ``strict``."""
    name, *rest = mode.split()
    changes: dict[str, Any] = {"strict": "strict" in rest}
    if name == "fixed":
        changes |= {"drafters": ("draft",), "draft_policy": "fixed", "draft_max": int(rest[0])}
    elif name != "target-only":
        changes |= {"drafters": parse_drafters(name)}
    return DecoderOptions(ctx_size=N_CTX, threads=threads, **changes)


def opened(target: Path, draft: Path, arguments: argparse.Namespace) -> Decoders:
    """The decoders of a pair."""

    def opener(mode: str) -> tuple[Path | None, DecoderOptions]:
        with_draft = mode.split()[0] not in ("target-only", "lookup")
        return draft if with_draft else None, options_of(mode, arguments.t)

    def other(mode: str, prompt: str, tokens: int) -> Run:
        return theirs(target, draft, prompt, tokens, int(mode.split()[1]), arguments.t)

    return Decoders(target, opener, other, verbose=arguments.verbose)


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
            prompt = KINDS[case["kind"]]
            found = best_lengths(
                lambda length, mode=mode, prompt=prompt: speed_of(decoders.run(f"{mode} {length}", prompt, tokens)),
                LENGTHS,
                FIRST_LENGTHS,
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
        runs = decoders.repetition(
            modes,
            KINDS[case["kind"]],
            tokens,
            SAMPLINGS[case["sampling"]],
            turn=place + len(case["repetitions"]),
            fresh=case["group"] == "switch-off",
        )
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

PADDINGS = ("pad", "no pad", "largest")  # as the latency says; as little as the class allows; always as much
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
        stack.enter_context(mock.patch.object(AdaptivePolicy, "_cost", return_value=0.0))
        stack.enter_context(mock.patch.object(AdaptivePolicy, "REST_SHARE", math.inf))
        stack.enter_context(mock.patch.object(LatencyModel, "up_to", up_to))
        if name == "largest":
            stack.enter_context(
                mock.patch.object(LatencyModel, "batch_size", lambda latency, count: max(count, latency.limit))
            )
        elif name == "no pad":
            narrowest = lambda latency, count: min(batch_size for batch_size in latency._allowed if batch_size >= count)  # noqa: E731
            stack.enter_context(mock.patch.object(LatencyModel, "batch_size", narrowest))
        yield


def answers(target: Path, draft: Path, drafter: str, policy: str, padding: str, count: int) -> dict[str, Any]:
    """Strict mode's texts of one way to draft, in a process of its own: tokens, widths and drafted tokens by sampling.

    Of the prompts, those of six kinds go beyond 256 cells of context, where kernels change.
    """
    short = short_prompts(count)[:: 10 if padding == "largest" else 1]  # which is slow
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
                "batch_sizes": sorted(set[int]().union(*(run["batch_sizes"] for run in runs))),
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
                    "batch_sizes": found["batch_sizes"],
                    "prompts": len(texts),
                    "tokens": sum(map(len, texts.values())),
                    "identical": len(texts) - len(different),
                    "different": different[:5],
                }


# ---- goals ----------------------------------------------------------------------------------------


def pays(case: Case) -> bool:
    """Whether any way to speculate, theirs or ours, is clearly faster than target-only."""
    return speed(case, fastest(case, "both", "draft", "lookup", "fixed", "theirs")) > PAYS * speed(case, "target-only")


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
        same = sum(run["tokens_as_target_only"] == run["whole_tokens"] for run in texts)
        found["texts as target-only's in default mode"] = {"texts": len(texts), "identical": same}
    return found


# ---- the command ----------------------------------------------------------------------------------


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
        decoders = opened(targets[target], drafts[draft], arguments)
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
            print(f"{how}: {one['identical']} of {one['prompts']} identical, widths {one['batch_sizes']}", flush=True)
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
