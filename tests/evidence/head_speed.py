"""The speed of heads: against llama.cpp's own driver, fixed lengths, target-only, a draft model and n-gram lookup.

    scripts/peers && .venv/bin/python tests/evidence/head_speed.py            # everything, within 40 minutes
    .venv/bin/python tests/evidence/head_speed.py --resume --targets F16 --heads mtp        # a slice, added to it

A target of a billion parameters with an MTP block, an EAGLE-3 head for the same target and a draft model of 150M, all
expanded from small ones (lab/expanded_heads.py); six kinds of text, greedy. The target is ``mimo2``, which serves every
drafter. Heads have their target's type, the draft model is F16.

In one interleaved run of a case everything runs with the same weights, ours in step (in_step.py): target-only, lookup,
the draft model, each head, adaptive, alone and with the lookup, the head at fixed lengths of 1 to 4, and
``llama-speculative-simple`` with it at its best length of those. After 32 tokens our best fixed length goes on, and the
second if it is close. Of the program short answers find these: 2 and 3 are tried, and the neighbour of the better one.
The better one of two in full counts. Speed is tokens ÷ seconds from the end of the prompt, or the prompt's time
counted, too, which is the fairer one: the program's head reads the prompt before that end, ours behind it as far as
that pays. Nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import DEMO, EVIDENCE, MODELS, ROOT, grown_draft, grown_targets, save
from decoder_prompts import KINDS
from in_step import (
    Case,
    Decoders,
    Run,
    Sieve,
    best_lengths,
    code,
    fastest,
    finalists,
    geometric_mean,
    goal,
    has,
    modes_run,
    name_of,
    ratio,
    reported,
    several,
    speed,
    speed_of,
)

from ggufspec import DecoderOptions, Sampling
from ggufspec.llamacpp.quantize import write_quantised
from ggufspec.models.expansion import read_source
from ggufspec.models.profile import demo_pair
from ggufspec.settings.registry import parse_drafters
from lab import peers
from lab.expanded_heads import expand_eagle3, expand_mimo2

HEADS = {"eagle3": "EAGLE-3", "mtp": "MTP"}
TARGETS = ("Q4_0", "Q8_0", "F16")  # the fast ones first
LENGTHS, FIRST_LENGTHS = (1, 2, 3, 4), (2, 3)
N_CTX = 2048
GOALS = {
    "÷ llama.cpp at its best length": {"geomean": 1.15, "worst": 1.00},
    "÷ target-only": {"worst": 0.98},
    "÷ our best fixed length": {"geomean": 1.00},
}
PARTS = {"": "from the end of the prompt", "whole_": "with the prompt"}


# ---- the models -----------------------------------------------------------------------------------


def expanded_heads(kinds: Sequence[str], block: Path, threads: int) -> dict[str, dict[str, Path]]:
    """The expanded target with its MTP block and the EAGLE-3 head, by type: ``mtp`` is the target itself."""
    target, own = demo_pair()[0], DEMO / "demo-eagle3-Q8_0.gguf"
    llama = grown_targets(("F16",))["F16"]
    half = {"mtp": MODELS / "demo-1b-mimo2-F16.gguf", "eagle3": MODELS / "demo-eagle3-1b-F16.gguf"}
    if _is_older(half["mtp"], llama, block):
        expand_mimo2(block, target, llama, part := half["mtp"].with_suffix(".part"))
        part.rename(half["mtp"])
    if _is_older(half["eagle3"], llama, own):
        expand_eagle3(own, target, read_source(llama).shape, part := half["eagle3"].with_suffix(".part"))
        part.rename(half["eagle3"])
    found = {}
    for kind in kinds:
        found[kind] = {head: path.with_name(path.name.replace("F16", kind)) for head, path in half.items()}
        for head, path in found[kind].items():
            if _is_older(path, half[head]):
                write_quantised(half[head], path, kind, threads)
    return found


def _is_older(path: Path, *sources: Path) -> bool:
    return not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def opened(files: dict[str, Path], program: Path, arguments: argparse.Namespace) -> Decoders:
    """The decoders of a target. Modes are ``target-only``, drafters, ``mtp fixed 3`` and ``mtp theirs 3``."""
    target, draft = files["mtp"], grown_draft("150m")

    def opener(mode: str) -> tuple[Path | None, DecoderOptions]:
        name, *rest = mode.split()
        drafters = () if name == "target-only" else parse_drafters(name)
        changes: dict[str, Any] = {"draft_policy": rest[0], "draft_max": int(rest[1])} if rest else {}
        file = next((path for one, path in {**files, "draft": draft}.items() if one in drafters), None)
        return file, DecoderOptions(ctx_size=N_CTX, threads=arguments.t, drafters=drafters, **changes)

    def theirs(mode: str, prompt: str, tokens: int) -> Run:
        head, _, length = mode.split()
        found = asdict(
            peers.answer(
                program,
                target,
                files[head],
                prompt,
                tokens=tokens,
                draft_max=int(length),
                threads=arguments.t,
                ctx_size=N_CTX,
                offload=False,
                spec_type=f"draft-{head}",
            )
        )
        return {**found, "whole_tokens": found["tokens"], "whole_seconds": found["seconds"] + found["prompt_s"]}

    return Decoders(target, opener, theirs, verbose=arguments.verbose)


# ---- one case -------------------------------------------------------------------------------------


def modes_of(case: Case, heads: Sequence[str]) -> list[str]:
    """The modes of a case: fixed lengths all, theirs those that a search found."""
    found = ["target-only", "lookup", "draft"]
    for head in heads:
        found += [head, f"{head}+lookup", *(f"{head} fixed {length}" for length in LENGTHS)]
        found += [f"{head} theirs {length}" for length in finalists(case["search"][head])]
    return found


def measure(case: Case, decoders: Decoders, place: int, arguments: argparse.Namespace) -> Iterator[None]:
    """Search their best lengths and add repetitions until there are enough; yields after each."""
    prompt = KINDS[case["kind"]]
    for head in arguments.heads:
        if head not in case["search"]:
            found = best_lengths(
                lambda length, head=head: speed_of(decoders.run(f"{head} theirs {length}", prompt, arguments.search)),
                LENGTHS,
                FIRST_LENGTHS,
            )
            case["search"][head] = {str(length): round(value, 3) for length, value in found.items()}
    modes = modes_of(case, arguments.heads)
    needed = {mode for mode in modes if "fixed" not in mode}
    while sum(needed <= repetition.keys() for repetition in case["repetitions"]) < arguments.r:
        runs = decoders.repetition(
            modes,
            prompt,
            arguments.n,
            Sampling(),
            turn=place + len(case["repetitions"]),
            sieve=Sieve(arguments.search, slow_lengths),
        )
        case["repetitions"].append(runs)
        case.setdefault("load_averages", []).append(os.getloadavg()[0])
        yield


def slow_lengths(speeds: dict[str, float]) -> set[str]:
    """The fixed lengths of each head that are neither the fastest nor close to it."""
    found: set[str] = set()
    for head in HEADS:
        own = {mode: value for mode, value in speeds.items() if mode.startswith(f"{head} fixed")}
        found |= own.keys() - set(finalists(own)) if own else set()
    return found


# ---- goals ----------------------------------------------------------------------------------------


def against(head: str) -> dict[str, str]:
    """What each goal compares with: how its modes begin."""
    return dict(zip(GOALS, (f"{head} theirs", "target-only", f"{head} fixed"), strict=True))


def summary(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Every goal of every head that something was measured for: its figures, its limits, and whether it is met."""
    found: dict[str, dict[str, Any]] = {}
    for head in HEADS:
        own = [case for case in cases if has(case, head)]
        for part, told in PARTS.items() if own else ():
            for name, other in against(head).items():
                modes = (head,) if "fixed" in other else (f"{head}+lookup", head)
                for mode in modes:
                    ratios = [ratio(case, mode, fastest(case, other), part) for case in own]
                    found[f"{mode} {name}, {told}"] = goal(geometric_mean(ratios), GOALS[name])
    texts = [run for case in cases for one in case["repetitions"] for run in one.values() if "wall_s" in run]
    if texts:
        same = sum(run["tokens_as_target_only"] == run["whole_tokens"] for run in texts)
        found["texts as target-only's in default mode"] = {"texts": len(texts), "identical": same}
    return found


def line(case: Case) -> str:
    """The case's speeds and ratios for people."""
    speeds = "  ".join(f"{mode} {speed(case, mode):.1f}" for mode in sorted(modes_run(case)))
    ratios = [
        f"{head} {name} {ratio(case, head, fastest(case, other))['ratio']:.3f}"
        for head in HEADS
        if has(case, head)
        for name, other in against(head).items()
    ]
    return f"{name_of(case)}: {speeds} t/s; {'; '.join(ratios)}"


# ---- the command ----------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in (("heads", tuple(HEADS)), ("targets", TARGETS), ("kinds", tuple(KINDS))):
        every = ",".join(known)
        parser.add_argument(f"--{name}", type=several(known), default=list(known), help=f"default: {every}")
    parser.add_argument("-n", type=int, default=128, help="tokens an answer")
    parser.add_argument("-r", type=int, default=1, help="repetitions")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("--search", type=int, default=32, metavar="N", help="tokens that find the best lengths")
    parser.add_argument("--block", type=Path, default=DEMO / "mtp-demo-Q8_0.gguf", help="MTP block of the demo target")
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache" / "peers" / "bin", help="folder of the program")
    parser.add_argument("--resume", action="store_true", help="go on with docs/evidence/head-speed.json")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every run")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    arguments = parsed()
    path = arguments.folder / "head-speed.json"
    settings = {"tokens": arguments.n, "search": arguments.search, "threads": arguments.t, "ctx_size": N_CTX}
    settings["code"] = code()
    known = json.loads(path.read_text("utf-8")) if arguments.resume and path.exists() else {}
    cases: list[Case] = [case for case in known.get("cases", []) if case["settings"] == settings]
    commands = [*known.get("commands", []), " ".join(sys.argv[1:])]
    program = peers.find(arguments.peers)
    place, began = 0, time.perf_counter()
    for target, files in expanded_heads(arguments.targets, arguments.block, arguments.t).items():
        decoders = opened(files, program, arguments)
        for kind in arguments.kinds:
            place += 1
            key = {"target": target, "kind": kind}
            case = next((case for case in cases if case.items() >= key.items()), None)
            if case is None:
                case = key | {"settings": settings, "search": {}, "repetitions": []}
                cases.append(case)
            for _ in measure(case, decoders, place, arguments):
                case["notes"] = sorted(decoders.notes)
                body = {"goals": GOALS, "commands": commands, "summary": summary(cases), "cases": cases}
                save("head-speed", body, arguments.folder)
            print(f"[{place}, {time.perf_counter() - began:.0f} s] {line(case)}", flush=True)
        decoders.close()
    for name, figures in summary(cases).items():
        print(reported(name, figures))


if __name__ == "__main__":
    main()
