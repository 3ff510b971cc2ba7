"""What a CPU's core takes for a batch by weight type and width: docs/evidence/host-batches.json.

    .venv/bin/python tests/evidence/host_batches.py        # ten minutes; adds this processor to the JSON

One thread, dummy models of a type beyond the last cache (:mod:`ggufspec.planning.machine_profile`), with weights as the
file has them, as they are beside a card (make_cpu_buft_list, src/llama-model.cpp), and repacked, as they are without.
Milliseconds of a batch for each 10^9 bytes of weights; the shortest of several, and of several runs on one processor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import EVIDENCE, save

from ggufspec.hardware import host
from ggufspec.llamacpp import params
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.machine_profile import _batch, dummy_models

TYPES = ("q4_K", "q3_K", "q6_K", "q8_0", "q4_0", "f16", "q5_K", "q2_K", "iq4_xs", "iq3_s", "iq2_s", "mxfp4")
BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64)
WIDE_BYTES, TRIES = 160 * 2**20, 4


def measure(kind: str, *, repacked: bool) -> dict[int, float]:
    """Milliseconds by width for 10^9 bytes."""
    load = params.load_model

    def as_in_the_file(lib: Any, path: Path, how: Any) -> Any:
        how.use_extra_bufts = repacked
        return load(lib, path, how)

    import ggufspec.llamacpp.model as module

    with tempfile.TemporaryDirectory() as folder:
        dummy = dummy_models((kind,), WIDE_BYTES)[-1]
        path = Path(folder) / "dummy.gguf"
        dummy.write(path)
        module.load_model = as_in_the_file
        try:
            model = Model(path, Placement())
        finally:
            module.load_model = load
        with model, closing(Context(model, ContextOptions(max(BATCH_SIZES) + 1, max(BATCH_SIZES), 1))) as context:
            _batch(context, max(BATCH_SIZES))
            seconds = {batch_size: min(_batch(context, batch_size) for _ in range(TRIES)) for batch_size in BATCH_SIZES}
            read_bytes = model.size_bytes * dummy.read_share
            return {batch_size: 1e3 * one / (read_bytes / 1e9) for batch_size, one in seconds.items()}


def main() -> None:
    """Measure, print, add to the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--types", type=lambda text: text.split(","), default=TYPES)
    arguments = parser.parse_args()
    found: dict[str, dict[str, dict[int, float]]] = {}
    for kind in arguments.types:
        for name, repacked in (("beside a card", False), ("alone", True)):
            figures = found.setdefault(name, {})[kind] = measure(kind, repacked=repacked)
            one = figures[1]
            print(
                f"{kind:7} {name:13} {one:6.0f} ms  "
                + "  ".join(f"{batch_size}: {ms / one:.2f}" for batch_size, ms in figures.items() if batch_size > 1),
                flush=True,
            )
    path = EVIDENCE / "host-batches.json"
    before = json.loads(path.read_text("utf-8"))["processors"] if path.exists() else []
    here = asdict(host.processor()) | {"vector_sets": list(host.processor().vector_sets)}
    shortest = next((one["ms_per_gb"] for one in before if one["processor"] == here), {})
    for name, table in found.items():
        for kind, row in table.items():
            known = shortest.setdefault(name, {}).setdefault(kind, {})
            known |= {
                str(batch_size): min(round(ms, 1), known.get(str(batch_size), ms)) for batch_size, ms in row.items()
            }
    others = [one for one in before if one["processor"] != here]
    save("host-batches", {"processors": [*others, {"processor": here, "ms_per_gb": shortest}]})


if __name__ == "__main__":
    main()
