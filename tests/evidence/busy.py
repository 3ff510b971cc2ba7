"""Tokens per second beside busy programs: threads that follow, against as many threads as cores and other settings.

    .venv/bin/python tests/evidence/busy.py                                  # the library as it was built (libgomp)
    .venv/bin/python tests/evidence/busy.py --preload libomp.so.5            # LLVM's OpenMP in the place of libgomp
    .venv/bin/python tests/evidence/busy.py --library FOLDER --name ggml     # built without OpenMP

Each run adds its runtime to docs/evidence/busy.json. A target of a billion parameters at Q4_0 answers alone, each time
in a process of its own; settings take turns in random order, under every load: an idle machine, one program that
computes, one for each CPU, and one that comes a second after the answer has begun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import EVIDENCE, grown_targets, save

from ggufspec.bench.statistics import spread
from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.options import DecoderOptions
from ggufspec.hardware import host
from ggufspec.llamacpp.library import system_info

BUSY = "while True: pass"
LOADS = ("idle", "one", "all", "comes")
# threads (0 follows), and the environment of libgomp
SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "follows": (0, {}),
    "all cores": (host.physical_cores(), {}),
    "one fewer": (max(1, host.physical_cores() - 1), {}),
    "spin 30000": (host.physical_cores(), {"GOMP_SPINCOUNT": "30000"}),
    "spin 1000": (host.physical_cores(), {"GOMP_SPINCOUNT": "1000"}),
    "passive": (host.physical_cores(), {"OMP_WAIT_POLICY": "passive"}),
}


def busy(count: int) -> contextlib.AbstractContextManager[None]:
    """So many programs that do nothing but compute."""
    return programs([[BUSY]] * count)


@contextlib.contextmanager
def programs(texts: Sequence[Sequence[str]]) -> Iterator[None]:
    """Python programs that run meanwhile, each a text and its arguments."""
    running = [subprocess.Popen([sys.executable, "-c", *text]) for text in texts]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def child(model: str, threads: int, seconds: float, comes: bool) -> None:
    """Answer for so long, and print tokens/s of what came after the load was there."""
    options = DecoderOptions(threads=threads, drafters=(), flash_attn="on", ctx_size=1024)
    with SpeculativeDecoder(model, None, options) as decoder, contextlib.ExitStack() as stack:
        counted, begun, first = 0, 0.0, time.perf_counter()
        before = host.cpu_use()
        for _ in decoder.generate("import os\n\ndef ", max_tokens=900):
            now = time.perf_counter()
            if not begun and now - first > (1.0 if comes else 0.3):
                if comes:
                    stack.enter_context(busy(1))
                begun, before = time.perf_counter(), host.cpu_use()
                continue
            counted += bool(begun)
            if begun and now - begun > seconds:
                break
        passed = time.perf_counter() - begun
        others = host.cpu_use().others_since(before)
        sample = {"tokens_per_s": counted / passed, "others_cpus": others, "threads": decoder._pair.threads.count}
        print(json.dumps(sample | {"build": system_info()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--preload", help="a library that is loaded first")
    parser.add_argument("--library", help="folder of llama.cpp's libraries")
    parser.add_argument("--name", default="libgomp", help="what the runtime is called in the record")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model, threads, comes = args.child
        child(model, int(threads), args.seconds, comes == "comes")
        return
    model = grown_targets(("Q4_0",))["Q4_0"]
    base = dict(os.environ)
    if args.preload:
        base["LD_PRELOAD"] = args.preload
    if args.library:
        base["LLAMA_CPP_LIB_PATH"] = args.library
    names = args.settings.split(",")
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {load: {name: [] for name in names} for load in LOADS}
    for repetition in range(args.repetitions):
        for load in random.Random(repetition).sample(LOADS, len(LOADS)):
            with busy({"one": 1, "all": host.usable_cpus()}.get(load, 0)):
                for name in random.sample(names, len(names)):
                    threads, variables = SETTINGS[name]
                    command = [sys.executable, __file__, "--seconds", str(args.seconds)]
                    done = subprocess.run(
                        [*command, "--child", str(model), str(threads), load],
                        env=base | variables,
                        stdout=subprocess.PIPE,
                        check=True,
                    )
                    sample = json.loads(done.stdout)
                    samples[load][name].append(sample)
                    print(f"{load:6} {name:10} {sample}", file=sys.stderr, flush=True)
    medians = {
        load: {name: spread([one["tokens_per_s"] for one in taken]).median for name, taken in rows.items()}
        for load, rows in samples.items()
    }
    path = EVIDENCE / "busy.json"
    known = json.loads(path.read_text())["runtimes"] if path.exists() else {}
    known[args.name] = {
        "medians_tokens_per_s": medians,
        "follows_over_best": {load: row["follows"] / max(row.values()) for load, row in medians.items()},
        "samples": samples,
    }
    save("busy", {"model": model.stem, "seconds": args.seconds, "runtimes": known})
    for load, row in medians.items():
        print(load, {name: round(value, 1) for name, value in row.items()})


if __name__ == "__main__":
    main()
