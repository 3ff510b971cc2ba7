"""A target's batches on the CPU with and without flash attention, by depth: llama.cpp's default is with it.

    .venv/bin/python tests/evidence/flash_attention.py MODEL.gguf …        # some minutes each

At each depth a context of both kinds reads the same tokens and decodes batches of 1 to 64 in turn.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import EVIDENCE, save

from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.model import Context, ContextOptions, Model

BATCH_SIZES, DEPTHS = (1, 2, 4, 8, 16, 32, 64), (256, 2048, 6144)


def measured(model: Model, depth: int, threads: int, repetitions: int) -> dict[str, Any]:
    """Seconds of the prompt and of each batch, by flash attention."""
    draw = random.Random(depth)
    tokens = [draw.randrange(100, min(20_000, model.vocab_size)) for _ in range(depth + max(BATCH_SIZES))]
    found: dict[str, Any] = {}
    contexts = {}
    for flash in ("on", "off"):
        options = ContextOptions(ctx_size=depth + 256, max_outputs=max(BATCH_SIZES), threads=threads, flash_attn=flash)
        contexts[flash] = Context(model, options)
        began = time.perf_counter()
        contexts[flash].decode(tokens[:depth], outputs=1)
        found[flash] = {"prompt_s": time.perf_counter() - began, "batch_s": {}}
    for batch_size in BATCH_SIZES:
        samples: dict[str, list[float]] = {flash: [] for flash in contexts}
        for number in range(repetitions):
            for flash in sorted(contexts, reverse=bool(number % 2)):
                contexts[flash].rewind(depth)
                began = time.perf_counter()
                contexts[flash].decode(tokens[depth : depth + batch_size], outputs=batch_size)
                samples[flash].append(time.perf_counter() - began)
        for flash, seconds in samples.items():
            found[flash]["batch_s"][batch_size] = seconds
    for context in contexts.values():
        context.close()
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-r", type=int, default=5)
    parser.add_argument("-t", type=int, default=physical_cores())
    parser.add_argument("--folder", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    body: dict[str, Any] = {"settings": {"threads": arguments.t, "repetitions": arguments.r}, "models": {}}
    for path in arguments.models:
        body["models"][path.name] = {}
        with Model(path) as model:
            for depth in DEPTHS:
                found = measured(model, depth, arguments.t, arguments.r)
                body["models"][path.name][depth] = found
                on, off = ({w: median(s) for w, s in found[flash]["batch_s"].items()} for flash in ("on", "off"))
                ratios = "  ".join(
                    f"{batch_size}: {on[batch_size] / off[batch_size]:.2f}" for batch_size in BATCH_SIZES
                )
                prompt = found["on"]["prompt_s"] / found["off"]["prompt_s"]
                print(f"{path.name}, {depth} tokens: seconds with ÷ without: prompt {prompt:.2f}  {ratios}", flush=True)
    print(save("flash-attention", body, arguments.folder))


if __name__ == "__main__":
    main()
