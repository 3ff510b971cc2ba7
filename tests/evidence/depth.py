"""Tokens/s at depth: predicted from a machine profile and measured, on the CPU and on a worker device.

.venv/bin/python tests/evidence/depth.py

The model has four blocks of the shape of Llama-3.2-1B and weights of zeros, which decode at the speed of any others.
``by_bytes`` is what reading the cache alone would predict.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from common import save
from speed_prediction import worker

from ggufspec.files.write import scratch
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.headers import read_headers
from ggufspec.planning import machine_profile
from ggufspec.planning.machine_profile import DummyModel
from ggufspec.planning.speed import pass_s

SHAPE = DummyModel("q4_0", 2048, 8192, 4)
DEPTHS, BATCH_SIZES, CACHE_TYPES, ROUNDS = (1024, 0), (1, 8), ("f16", "q8_0"), 15
THREADS = 1


def timed_s(context: Context, depth: int, batch_size: int) -> float:
    """Seconds of one batch behind ``depth`` tokens."""
    context.rewind(depth)
    began = time.perf_counter()
    context.decode([1] * batch_size, batch_size)
    return time.perf_counter() - began


def measured(path: Path, placement: Placement) -> dict[tuple[str, int, int], list[float]]:
    """Seconds of batches by (cache type, depth, width); cache types and widths in turn, from the deepest up."""
    found: dict[tuple[str, int, int], list[float]] = {}
    with Model(path, placement) as model, ExitStack() as stack:
        contexts = {}
        for kind in CACHE_TYPES:
            options = ContextOptions(max(DEPTHS) + 16, 16, THREADS, cache_type_k=kind, cache_type_v=kind)
            contexts[kind] = stack.enter_context(closing(Context(model, options)))
            contexts[kind].decode([1] * max(DEPTHS), 1)
        for depth in DEPTHS:
            for _ in range(ROUNDS):
                for batch_size in BATCH_SIZES:
                    for kind, context in contexts.items():
                        found.setdefault((kind, depth, batch_size), []).append(timed_s(context, depth, batch_size))
    return found


def main() -> None:
    """Measure, print, save."""
    rows = []
    with worker(THREADS) as endpoint, scratch() as folder:
        spec = machine_profile.MachineProfileJob(THREADS, (endpoint,), types=("f16", "q4_0"))
        result = machine_profile.run(spec, lambda event: None, threading.Event())
        machine = machine_profile.interpret_timings(result, 1e9, "measured")
        blind = replace(
            machine, devices={name: replace(device, attention={}) for name, device in machine.devices.items()}
        )
        path = folder / "shape.gguf"
        SHAPE.write(path)
        header = read_headers([path])[0].header
        for device, placement in (("CPU", Placement(0)), ("RPC0", Placement(-1))):
            for (kind, depth, batch_size), samples in measured(path, placement).items():
                context = ContextOptions(max(DEPTHS) + 16, 16, THREADS, cache_type_k=kind, cache_type_v=kind)

                def predicted(speed: machine_profile.MachineProfile) -> float:
                    where = (header, placement, speed, ("RPC0",))  # noqa: B023
                    seconds = pass_s(*where, tokens=batch_size, depth=depth, context=context)  # noqa: B023
                    return batch_size / seconds  # noqa: B023

                tokens_per_s = batch_size / sorted(samples)[len(samples) // 4]
                row = {"device": device, "cache_type": kind, "depth": depth, "batch": batch_size}
                row |= {"measured": tokens_per_s, "predicted": predicted(machine), "by_bytes": predicted(blind)}
                rows.append(row | {"seconds": samples})
                print(
                    f"{device:5} {kind:5} depth {depth:5} batch {batch_size}: measured {tokens_per_s:7.1f} t/s, "
                    f"predicted {row['predicted']:7.1f} ({row['predicted'] / tokens_per_s - 1:+.0%}), by bytes alone "
                    f"{row['by_bytes']:7.1f} ({row['by_bytes'] / tokens_per_s - 1:+.0%})",
                    flush=True,
                )
    save(
        "depth",
        {
            "shape": "4 blocks of Llama-3.2-1B's shape, q4_0",
            "threads": THREADS,
            "others_cpus": result.others_cpus,
            "attention": {name: device.attention for name, device in machine.devices.items()},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
