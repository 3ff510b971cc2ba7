"""What it costs to take tokens back out of a recurrent memory, and the acceptance from which drafting pays.

    .venv/bin/python tests/evidence/rewind.py        # five minutes

Models of published shapes with random weights (Q8_0, as time does not depend on the numbers): a Mamba and two hybrids.
For each way of taking back that its architecture has:

- the memory that it takes, by llama.cpp's own count, against a context that cannot go back;
- a batch of 1 and of 5 tokens, without (``plain``) and with the option; in turn, the median of ``REPEATS``;
- the same right after a checkpoint was taken or restored: the price of the other place in memory;
- a batch of 5 with 1 to 4 tokens in front that are decoded again, and these tokens alone;
- what a checkpoint in host memory would cost (``llama_state_seq_get_data_ext`` and ``_set_data_ext`` with
  ``PARTIAL_ONLY``), the way that is not built;
- the acceptance from which drafting beats target-only, by lab/rollback.py from these seconds, with
  a free draft (prompt lookup) and with one whose token takes a tenth of the target's.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.dryrun import allocated
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from lab.rollback import Costs, best, break_even

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from common import save

from tests.support import random_weights, shapes
from tests.support.shapes import Dims, Label, Ssm

DRAFT_MAX = 15
DEPTH = 256
REPEATS = 9
BATCH_SIZES = (1, 2, 3, 5, 8, 12, 16)
SHAPES = (
    shapes.pure_mamba(
        Label("mamba-130m", "recurrent", "mamba", "Q8_0"), Dims(24, 768, 0, 0, 0, 50280), Ssm(1536, 16, 48)
    ),
    shapes.hybrid(
        Label("granite-4.0-h-350m", "hybrid", "granitehybrid", "Q8_0"),
        Dims(32, 768, 12, 4, 2048, 100352),
        (10, 13, 17, 27),
        Ssm(1536, 128, 48, 1),
    ),
    shapes.lfm2(
        Label("lfm2-350m", "hybrid", "lfm2", "Q8_0"), Dims(16, 1024, 16, 8, 4608, 65536), (2, 5, 8, 10, 12, 14)
    ),
)


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def tokens(count: int) -> list[int]:
    """Different ones."""
    return [7 * i % 500 + 1 for i in range(count)]


def in_turn(actions: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each, ``REPEATS`` times, one after the other."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPEATS):
        for name, action in actions.items():
            samples[name].append(action())
    return {name: [round(value, 7) for value in values] for name, values in samples.items()}


def start(context: Context) -> None:
    """Read ``DEPTH`` tokens, again if the context has expanded."""
    if not DEPTH <= context.length < 2 * DEPTH:
        context.rewind(0)
        context.decode(tokens(DEPTH), 0)


def batch(context: Context, batch_size: int) -> float:
    """Seconds of a verification whose tokens all stay."""
    start(context)
    context.rewind(context.length)
    return timed(lambda: context.decode(tokens(batch_size), batch_size))


def after_rejection(context: Context, batch_size: int, again: int) -> float:
    """Seconds of a verification after one of which ``again`` tokens were kept."""
    start(context)
    context.rewind(context.length)
    length = context.length
    context.decode(tokens(batch_size), batch_size)
    context.rewind(length + again)
    return timed(lambda: context.decode(tokens(batch_size), batch_size))


def host_checkpoint(context: Context) -> tuple[float, float]:
    """Seconds of copying the state to host memory and back."""
    start(context)
    lib, handle = context._lib, context._handle
    flags = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    size = lib.llama_state_seq_get_size_ext(handle, 0, flags)
    buffer = (ctypes.c_uint8 * size)()
    save_s = timed(lambda: lib.llama_state_seq_get_data_ext(handle, buffer, size, 0, flags))
    return save_s, timed(lambda: lib.llama_state_seq_set_data_ext(handle, buffer, size, 0, flags))


def measure(model: Model, by: str, threads: int) -> dict[str, Any]:
    """All figures of one way to go back."""
    batch_size = DRAFT_MAX + 1
    options = ContextOptions(4 * DEPTH, batch_size, threads, rewind=DRAFT_MAX, rewind_by=by)
    with (
        closing(Context(model, ContextOptions(4 * DEPTH, batch_size, threads))) as plain,
        closing(Context(model, options)) as context,
    ):
        kind = context.rewind_kind
        before, after = allocated(plain)["CPU"], allocated(context)["CPU"]
        actions: dict[str, Callable[[], float]] = {
            "plain 1": lambda: batch(plain, 1),
            "plain 5": lambda: batch(plain, 5),
            **{f"T({n})": lambda n=n: batch(context, n) for n in BATCH_SIZES},
        }
        if kind == "checkpoint":
            actions |= {f"again {n}, then 5": lambda n=n: after_rejection(context, 5, n) for n in range(5)}
        for action in actions.values():
            action()
        samples = in_turn(actions)
        copies = [host_checkpoint(plain) for _ in range(REPEATS)]
        middle = {name: statistics.median(values) for name, values in samples.items()}

        def batch_s(count: int) -> float:
            return float(np.interp(count, BATCH_SIZES, [middle[f"T({n})"] for n in BATCH_SIZES])) + max(
                0, count - batch_size
            ) * (middle[f"T({batch_size})"] / batch_size)

        restore_s = max(0.0, middle["again 0, then 5"] - middle["T(5)"]) if kind == "checkpoint" else 0.0
        free = Costs(batch_s, 0.0, kind == "checkpoint", restore_s=restore_s)
        paid = Costs(batch_s, 0.1 * batch_s(1), kind == "checkpoint", restore_s=restore_s)
        exact = Costs(batch_s, 0.1 * batch_s(1))
        return {
            "kind": kind,
            "checkpoint_bytes": context.checkpoint_bytes,
            "more_kv_bytes": after.kv - before.kv,
            "more_compute_bytes": after.compute - before.compute,
            "median_s": middle,
            "host_checkpoint_s": statistics.median(save_s for save_s, _ in copies),
            "host_restore_s": statistics.median(restore_s for _, restore_s in copies),
            "break_even_acceptance": {
                "lookup": break_even(free, DRAFT_MAX),
                "draft of a tenth": break_even(paid, DRAFT_MAX),
                "draft of a tenth, were taking back free": break_even(exact, DRAFT_MAX),
            },
            "speedup_at_acceptance": {
                f"{rate:.1f}": {"this": best(paid, DRAFT_MAX, rate), "were it free": best(exact, DRAFT_MAX, rate)}
                for rate in (0.5, 0.7, 0.8, 0.9, 1.0)
            },
            "samples_s": samples,
        }


def main() -> None:
    """Measure, print, save."""
    threads, results = physical_cores(), []
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            path = random_weights.write(Path(folder) / f"{shape.name}.gguf", shape)
            with Model(path) as model:
                for by in ("snapshots", "checkpoint") if shape.architecture == "lfm2" else ("checkpoint",):
                    found = measure(model, by, threads)
                    results.append({"model": shape.name, "weight_bytes": shape.nbytes, **found})
                    middle = found["median_s"]
                    print(f"{shape.name}, {found['kind']}: {found['checkpoint_bytes'] / 1e6:.1f} MB of states")
                    print("  " + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in middle.items()))
                    print(f"  in host memory: {1e3 * found['host_checkpoint_s']:.2f} ms to take", end=", ")
                    print(f"{1e3 * found['host_restore_s']:.2f} ms to restore")
                    print(f"  break-even acceptance {found['break_even_acceptance']}")
                    print(f"  speedup {found['speedup_at_acceptance']}", flush=True)
            path.unlink()
    save("rewind", {"draft_max": DRAFT_MAX, "depth": DEPTH, "threads": threads, "results": results})


if __name__ == "__main__":
    main()
