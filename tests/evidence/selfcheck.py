"""The self-check's figures: the logits that ship with it, and its errors and time by build of llama.cpp.

.venv/bin/python tests/evidence/selfcheck.py --store                             # ggufspec/bench/selfcheck.json
.venv/bin/python tests/evidence/selfcheck.py                                     # this build, three times
.venv/bin/python tests/evidence/selfcheck.py --builds avx2=FOLDER plain=FOLDER   # and others' libraries
.venv/bin/python tests/evidence/selfcheck.py --damaged                           # and products that are spoiled
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import save

from ggufspec.verify import selfcheck
from ggufspec.verify.reference import logits

TEXT = (
    'def median(values):\n    """Return the median of a list of numbers, sorted first."""\n'
    "    ordered = sorted(values)\n    return ordered[len(ordered) // 2]\n"
)
TOKENS, POSITIONS, STRIDE = 32, 16, 63  # a stride that shares no factor with any number of lanes
RUNS = 2
CHECK = """
import json, sys
from dataclasses import asdict
from ggufspec.verify import selfcheck
from ggufspec.llamacpp import probe
print(json.dumps({"system": probe.inspect().system, **asdict(selfcheck.check())}))
"""


def figures(path: Path, tokens: list[int]) -> dict[str, Any]:
    """What ships, by float64 arithmetic on what gguf-py reads of the F16 model."""
    reader = gguf.GGUFReader(path)
    weights = {
        tensor.name: np.float64(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(
            [int(size) for size in tensor.shape[::-1]]
        )
        for tensor in reader.tensors
    }
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    rows = logits(weights, keys, tokens)
    ids = list(range(0, rows.shape[1], STRIDE))
    return {"tokens": tokens, "ids": ids, "logits": rows[-POSITIONS:, ids].round(3).tolist()}


def store(path: Path = selfcheck.STORED) -> None:
    """Write the figures that ship, a position a line."""
    from ggufspec.llamacpp.model import Model

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "F16.gguf"
        selfcheck.make_models("F16", file)
        with Model(file) as model:
            tokens = model.tokenize(TEXT)[:TOKENS]
        found = figures(file, tokens)
    rows = ",\n  ".join(json.dumps(row) for row in found["logits"])
    lines = [f' "tokens": {found["tokens"]}', f' "ids": {found["ids"]}', f' "logits": [\n  {rows}\n ]']
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def checked(**variables: str) -> dict[str, Any]:
    """One self-check in a process with those variables, as its document."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """The errors by type, batch size and flash attention, in short."""
    errors: dict[str, Any] = {}
    for row in document["rows"]:
        step = row["step"]
        name = f"{step['place']} {step['batch']} flash {step['flash']}" if step["place"] else "weights"
        value = row["error"] if row["outcome"] in ("ok", "wrong") else row["outcome"]
        errors.setdefault(step["type"], {})[name] = round(value, 5) if isinstance(value, float) else value
    return {"system": document["system"], "seconds": document["seconds"], "errors": errors}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--builds", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--damaged", action="store_true")
    arguments = parser.parse_args()
    if arguments.store:
        store()
        return
    builds: dict[str, dict[str, str]] = {"this": {}}
    builds |= {name: {"LLAMA_CPP_LIB_PATH": folder} for name, folder in (b.split("=", 1) for b in arguments.builds)}
    results: dict[str, Any] = {}
    for name, variables in builds.items():
        runs = [summary(checked(**variables)) for _ in range(RUNS if name == "this" else 1)]
        results[name] = runs[0] | {"seconds": [run["seconds"] for run in runs]}
    if arguments.damaged:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.support.damage import KINDS, library

        with tempfile.TemporaryDirectory() as folder:
            for kind in (kind for kind in KINDS if ":" in kind):  # those that compute wrongly
                found = summary(checked(LD_PRELOAD=str(library(kind, Path(folder)))))
                results[f"damaged: {kind}"] = found | {"seconds": [found["seconds"]]}
    for name, found in results.items():
        kernels = [e for rows in found["errors"].values() for key, e in rows.items() if key != "weights"]
        numbers = [error for error in kernels if isinstance(error, float)]
        print(f"{name:40} worst {max(numbers, default=0):.4f}, {found['seconds']} s, {len(kernels)} rows")
    limits = {"kernel_error": selfcheck.KERNEL_ERROR, "weight_error": selfcheck.WEIGHT_ERROR}
    save("self-check", limits | {"results": results})


if __name__ == "__main__":
    main()
