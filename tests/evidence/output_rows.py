"""What a batch takes by the outputs that its context is made for: whether tensors begin on lines of the cache.

    .venv/bin/python tests/evidence/output_rows.py        # eight minutes

llama.cpp reserves a graph whose first tensor has four bytes for each output, on buffers that it aligns to 32 bytes, so
that what follows begins on a line of 64 bytes or amid one. Contexts of one model decode the same batch in turn.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

from common import EVIDENCE, ROOT, grown_targets, save

from ggufspec.bench.statistics import paired_ratios
from ggufspec.llamacpp import params
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement

REAL = ROOT / ".cache" / "real-models"
NAMES = ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-Q8_0.gguf")
REAL_MODELS = [REAL / name for name in (*NAMES, "SmolLM2-135M-Instruct.Q4_1.gguf")]
OUTPUTS = (2, 8, 9, 16, 17, 24, 25, 32)
BATCHES = (1, 4, 200)


def measured(path: Path, repetitions: int) -> dict[str, dict[str, object]]:
    """Seconds of each batch by outputs, and their ratio to those at 16."""
    found: dict[int, dict[int, list[float]]] = {tokens: {count: [] for count in OUTPUTS} for tokens in BATCHES}
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, Placement()))
        with mock.patch.object(params, "_OUTPUTS", 1):
            made = {count: Context(model, ContextOptions(1024, max_outputs=count, threads=2)) for count in OUTPUTS}
        for one in made.values():
            stack.enter_context(closing(one))
            one.decode([1] * max(BATCHES), 1)
        for _ in range(repetitions):
            for tokens in BATCHES:
                for count, one in made.items():
                    one.rewind(0)
                    began = time.perf_counter()
                    one.decode(list(range(10, 10 + tokens)), 1)
                    found[tokens][count].append(time.perf_counter() - began)
    return {
        str(tokens): {
            "seconds": by_count,
            "ratio_to_16": {count: paired_ratios(taken, by_count[16]).median for count, taken in by_count.items()},
        }
        for tokens, by_count in found.items()
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", type=int, default=9, help="repetitions")
    parser.add_argument("--folder", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    grown = grown_targets(("Q4_0", "F16")).values()
    models = {path.name: measured(path, arguments.r) for path in (*grown, *REAL_MODELS) if path.exists()}
    for name, batches in models.items():
        for tokens, one in batches.items():
            print(f"{name}, {tokens} tokens: {one['ratio_to_16']}")
    print(save("output-rows", {"models": models}, arguments.folder))


if __name__ == "__main__":
    main()
