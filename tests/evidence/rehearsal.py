"""Dummy weights against the real file: tokens/s, T(n) and bytes on each device, interleaved in one process.

    .venv/bin/python tests/evidence/rehearsal.py      # about ten minutes with one thread

The target is the demo's, expanded to about a billion parameters, in F16 and Q4_0. Its dummy model is made from its
header alone, of holes, as ``ggufspec rehearse`` makes it. Both are loaded at once and timed in turn, in two processes,
so that each is loaded first once. Before that their pages are dropped from the
page cache and read anew: where pages lie in memory moves F16 by up to 10 %, whatever they hold. Nothing else must run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import grown_targets, save
from speed_prediction import worker

from ggufspec.bench.batch_timing import BatchTimingJob, BatchTimingResult, ModelToTime, time_batches
from ggufspec.bench.statistics import paired_ratios
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models import dummy_weights as dummy
from ggufspec.models.headers import read_headers

BATCH_SIZES = (*range(1, 9), 12, 16)
GOALS = {"tokens_per_s": 0.10, "batch_s": 0.15}
LAYERS = (0, 8, 17)  # on a worker, of 17


def drop(path: Path) -> None:
    """Take a file's pages out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def files_of(real: Path, folder: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """(the real file and its dummy models, what the dummy models took)."""
    (known,) = read_headers([real], folder / "headers")
    files, took = {"real": real}, {"header_bytes_read": known.bytes_read, "size_bytes": known.header.size_bytes}
    (folder / "holes").mkdir()
    made = dummy.make_dummy(known, folder / "holes")
    return files | {"holes": made.path}, took | {"holes_disk_bytes": made.disk_bytes}


def timed(files: dict[str, Path], threads: int, rounds: int, depth: int) -> list[dict[str, Any]]:
    """Seconds by width of each file, once per process."""
    context = ContextOptions(ctx_size=depth + max(BATCH_SIZES), max_outputs=max(BATCH_SIZES), threads=threads)
    names, found = list(files), []
    for turn in range(len(names)):
        order = names[turn:] + names[:turn]
        for name in order:
            drop(files[name])
        parts = tuple(ModelToTime(files[name], Placement(), context, BATCH_SIZES) for name in order)
        result = time_batches(BatchTimingJob(parts, depth, rounds, seconds=600.0))
        found.append(dict(zip(order, result.parts, strict=True)))
    return found


def ratios(runs: list[dict[str, Any]], name: str, other: str) -> dict[int, dict[str, Any]]:
    """Seconds of one file ÷ seconds of the other, by width."""
    found = {}
    for batch_size in BATCH_SIZES:
        pairs = [(run[name].seconds[batch_size], run[other].seconds[batch_size]) for run in runs]
        figures = paired_ratios([s for a, _ in pairs for s in a], [s for _, b in pairs for s in b])
        found[batch_size] = {"median": figures.median, "ci95": figures.ci95}
    return found


def devices(files: dict[str, Path], threads: int) -> list[dict[str, Any]]:
    """Bytes on each device, some layers on an RPC worker."""
    context, found = ContextOptions(ctx_size=2048, max_outputs=8, threads=threads), []
    with worker(1) as endpoint:
        for layers in LAYERS:
            used = {}
            for name in ("real", "holes"):
                part = ModelToTime(files[name], Placement(layers), context, (1,))
                result: BatchTimingResult = time_batches(BatchTimingJob((part,), depth=1, rounds=1, rpc=(endpoint,)))
                used[name] = result.parts[0].bytes
            found.append({"gpu_layers": layers, **used, "equal": used["real"] == used["holes"]})
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", type=int, default=1, help="threads")
    parser.add_argument("-r", type=int, default=5, help="rounds in each of three processes")
    parser.add_argument("-d", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--types", nargs="+", default=["F16", "Q4_0"])
    arguments = parser.parse_args()
    cases = []
    for kind in arguments.types:
        real = grown_targets((kind,))[kind]
        with tempfile.TemporaryDirectory(dir=real.parent) as name:
            files, took = files_of(real, Path(name))
            load_before = os.getloadavg()
            runs = timed(files, arguments.t, arguments.r, arguments.d)
            against_real = ratios(runs, "holes", "real")
            placed = devices(files, arguments.t)
        worst = max(abs(figures["median"] - 1) for batch_size, figures in against_real.items() if batch_size <= 8)
        case = {
            "target": kind,
            "load_average": {"before": load_before, "after": os.getloadavg()},
            **took,
            "standin_tokens_per_s_error": 1 / against_real[1]["median"] - 1,
            "worst_batch_error_to_8": worst,
            "holes_to_real_seconds": against_real,
            "bytes_by_device": placed,
            "bytes_equal": all(one["equal"] for one in placed)
            and all(run["real"].bytes == run["holes"].bytes for run in runs),
            "seconds": [{name: part.seconds for name, part in run.items()} for run in runs],
        }
        case["goals_met"] = (
            abs(case["standin_tokens_per_s_error"]) <= GOALS["tokens_per_s"]
            and worst <= GOALS["batch_s"]
            and case["bytes_equal"]
        )
        cases.append(case)
        print(f"{kind}: goals met: {case['goals_met']}; bytes equal: {case['bytes_equal']}")
        for batch_size in BATCH_SIZES:
            ms = 1e3 * median(s for run in runs for s in run["real"].seconds[batch_size])
            a = against_real[batch_size]
            print(
                f"  T({batch_size:2}) real {ms:7.1f} ms; holes ÷ real {a['median']:.3f} "
                f"({a['ci95'][0]:.3f} to {a['ci95'][1]:.3f})",
                flush=True,
            )
    save("rehearsal", {"goals": GOALS, "settings": vars(arguments), "cases": cases})


if __name__ == "__main__":
    main()
