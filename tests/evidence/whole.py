"""Never slower, counted whole: prompt, answer and time to the first token, with drafters that pay or never pay.

    .venv/bin/python tests/evidence/whole.py            # everything; half an hour on two cores
    .venv/bin/python tests/evidence/whole.py --resume --targets F16      # a slice, added to it

The expanded target with its MTP block, a draft model of 150M, an EAGLE-3 head for the target; a draft of 50M and a head
of random weights, which are of no use. Answers of 96 tokens, greedy, to six kinds of text and to one long prompt, each
by a decoder that has just been opened, as the commands open one. All run in step with the same weights (in_step.py). A
ratio is target-only's seconds ÷ ours, from the request to the last token (whole), and ours ÷ target-only's to the first
token. Nothing else must run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import DEMO, EVIDENCE, MODELS, ROOT, grown_draft, random_draft, save
from decoder_prompts import KINDS
from head_speed import expanded_heads
from in_step import Case, Decoders, code, geometric_mean, goal, modes_run, name_of, ratio, reported, several

from ggufspec import DecoderOptions, Sampling

TARGETS = ("Q4_0", "Q8_0", "F16")
N_CTX = 2048
LONG = (ROOT / "ggufspec" / "decoding" / "loop.py").read_text("utf-8")[:3200]  # about a thousand tokens
PROMPTS = {**KINDS, "long": LONG}
GOOD, HOPELESS = ("draft", "eagle3", "mtp"), ("random draft", "random eagle3")
DRAFTS = ("draft", "random draft")
GOALS = {"whole": {"geomean": 0.98, "worst": 0.96}, "pair": {"geomean": 1.03}, "head": {"geomean": 1.05}}


def random_head(like: Path) -> Path:
    """The EAGLE-3 head ``like`` with random weights: it knows nothing and is sure of it."""
    path = like.with_name(f"random-{like.name}")
    if path.exists() and path.stat().st_mtime >= like.stat().st_mtime:
        return path
    shutil.copyfile(like, part := path.with_suffix(".part"))
    rng = np.random.default_rng(0)
    reader = gguf.GGUFReader(part, "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F16:
            tensor.data[:] = tensor.data.shape[1] ** -0.5 * rng.standard_normal(tensor.data.shape, np.float32)
        elif tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            tensor.data[:] = 10 if tensor.name == "output_norm.weight" else 1
    reader.data.flush()
    return part.rename(path)


def opened(files: dict[str, Path], head: Path, arguments: argparse.Namespace) -> Decoders:
    """The decoders of a target, by mode."""
    drafts = {"draft": grown_draft("150m"), "random draft": random_draft(), "eagle3": files["eagle3"]}
    drafts["random eagle3"] = head

    def opener(mode: str) -> tuple[Path | None, DecoderOptions]:
        drafters = () if mode == "target-only" else (mode.split()[-1],)
        return drafts.get(mode), DecoderOptions(ctx_size=N_CTX, threads=arguments.t, drafters=drafters)

    def theirs(mode: str, prompt: str, tokens: int) -> dict[str, Any]:
        raise NotImplementedError(mode)

    return Decoders(files["mtp"], opener, theirs, verbose=arguments.verbose)


def first_token(case: Case, mode: str) -> dict[str, Any]:
    """Seconds to the first token of a mode ÷ target-only's, as :func:`ratio` gives speeds."""
    pairs = [
        [one[mode]["time_to_first_token_s"] / one["target-only"]["time_to_first_token_s"]]
        for one in case["repetitions"]
    ]
    return {"case": name_of(case), "ratio": float(np.median(pairs)), "modes": [mode, "target-only"]}


def summary(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Every goal: its figures, its limits, and whether it is met."""
    found: dict[str, dict[str, Any]] = {}
    for mode in (*HOPELESS, *GOOD):
        own = [case for case in cases if mode in modes_run(case)]
        if not own:
            continue
        whole = geometric_mean([ratio(case, mode, "target-only", "whole_") for case in own])
        found[f"{mode}: whole"] = goal(whole, GOALS["whole"])
        limit = GOALS["pair" if mode in DRAFTS else "head"]["geomean"]
        first = geometric_mean([first_token(case, mode) for case in own])
        found[f"{mode}: first token"] = {**first, "limits": {"geomean": limit}, "met": first["geomean"] <= limit}
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in (("modes", (*HOPELESS, *GOOD)), ("targets", TARGETS), ("kinds", tuple(PROMPTS))):
        every = ",".join(known)
        parser.add_argument(f"--{name}", type=several(known), default=list(known), help=f"default: {every}")
    parser.add_argument("-n", type=int, default=96, help="tokens an answer")
    parser.add_argument("-r", type=int, default=1, help="repetitions")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("--resume", action="store_true", help="go on with docs/evidence/whole.json")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every run")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    arguments = parsed()
    path = arguments.folder / "whole.json"
    settings = {"tokens": arguments.n, "threads": arguments.t, "ctx_size": N_CTX, "code": code()}
    known = json.loads(path.read_text("utf-8")) if arguments.resume and path.exists() else {}
    cases: list[Case] = [case for case in known.get("cases", []) if case["settings"] == settings]
    commands = [*known.get("commands", []), " ".join(sys.argv[1:])]
    modes = ["target-only", *arguments.modes]
    targets = expanded_heads(arguments.targets, DEMO / "mtp-demo-Q8_0.gguf", arguments.t)
    head = random_head(MODELS / "demo-eagle3-1b-F16.gguf")
    began = time.perf_counter()
    for target, files in targets.items():
        decoders = opened(files, head, arguments)
        for place, kind in enumerate(arguments.kinds):
            key = {"target": target, "kind": kind}
            case = next((case for case in cases if case.items() >= key.items()), None)
            if case is None:
                cases.append(case := key | {"settings": settings, "repetitions": []})
            while sum(set(modes) <= one.keys() for one in case["repetitions"]) < arguments.r:
                turn = place + len(case["repetitions"])
                runs = decoders.repetition(modes, PROMPTS[kind], arguments.n, Sampling(), turn=turn, fresh=True)
                case["repetitions"].append(runs)
                case.setdefault("load_averages", []).append(os.getloadavg()[0])
                body = {"goals": GOALS, "commands": commands, "summary": summary(cases), "cases": cases}
                save("whole", body, arguments.folder)
            figures = {
                mode: (ratio(case, mode, "target-only", "whole_"), first_token(case, mode)) for mode in modes[1:]
            }
            line = "  ".join(f"{mode} {w['ratio']:.3f}, {first['ratio']:.3f}" for mode, (w, first) in figures.items())
            print(f"[{time.perf_counter() - began:.0f} s] {name_of(case)}: whole, first token: {line}", flush=True)
        decoders.close()
    for name, figures in summary(cases).items():
        print(reported(name, figures))


if __name__ == "__main__":
    main()
