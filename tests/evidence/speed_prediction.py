"""Tokens/s of every placement, predicted from one measured one and from more, against the truth.

:func:`ggufspec.planning.speed.corrected` predicts, with what is known beforehand: both devices measured by the
calibration, or the host alone and nothing of the card, as of one in no catalogue, or the card alone and of the host the
usual guess.

    .venv/bin/python tests/evidence/speed_prediction.py      # about six minutes on two idle cores

The card is an RPC worker on loopback, whose threads are not the host's, so that the two differ: with F16 the worker has
two threads and the host one; with Q4_0 both have one, and the worker's kernels are slower, since only the host repacks.
All placements of a model are loaded at once and decode in turn, some tokens at a time in shuffled order: whatever else
happens on the machine happens to all. A placement's rate is the upper quartile of its turns, as the calibration takes
the lower one of its times: whatever else runs only slows. Nothing else should run there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import grown_targets, save

from ggufspec.bench.statistics import spread
from ggufspec.llamacpp.devices import add_rpc_workers
from ggufspec.llamacpp.gguf import parse_header
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.planning import catalogue, machine_profile
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import MachineProfile, MeasuredToken, corrected, pass_s

SERVE = "from ggufspec.llamacpp.devices import serve_rpc; serve_rpc('127.0.0.1:{port}', {threads})"
CARD = "RPC0"
GOAL = 0.10
DEPTH = 32  # tokens in the cache when a turn begins
CASES = {"F16": (1, 2), "Q4_0": (1, 1)}  # threads of the host and of the worker


@contextmanager
def worker(threads: int) -> Iterator[str]:
    """The endpoint of an RPC worker in a process of its own."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(port=port, threads=threads)],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},  # or its idle threads would spin on the host's cores
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with closing(socket.socket()) as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def read_header(path: Path) -> ModelHeader:
    """The header of a whole file."""
    with path.open("rb") as file:
        return interpret(path.name, [parse_header(file.read(2**24))], path.stat().st_size)


def turn(context: Context, tokens: int) -> float:
    """Tokens/s of some greedy tokens."""
    context.rewind(DEPTH)
    token = 7
    began = time.perf_counter()
    for _ in range(tokens):
        token = int(context.decode([token], 1)[0].argmax())
    return tokens / (time.perf_counter() - began)


def measure(
    path: Path, endpoint: str, layers: list[int], threads: int, repetitions: int, tokens: int
) -> dict[int, list[float]]:
    """Tokens/s of each placement, once per repetition."""
    add_rpc_workers([endpoint])
    samples: dict[int, list[float]] = {count: [] for count in layers}
    with ExitStack() as stack:
        contexts = {}
        for count in layers:
            model = stack.enter_context(Model(path, Placement(count)))
            options = ContextOptions(ctx_size=DEPTH + tokens, max_outputs=1, threads=threads)
            contexts[count] = stack.enter_context(closing(Context(model, options)))
            contexts[count].decode([7] * DEPTH, 0)
            turn(contexts[count], tokens)
        order = random.Random(0)
        for _ in range(repetitions):
            for count in order.sample(layers, len(layers)):
                samples[count].append(turn(contexts[count], tokens))
    return samples


def known_beforehand(machine: MachineProfile) -> dict[str, MachineProfile]:
    """The calibration, and the same where one of the devices was not measured."""
    no_card = machine_profile.expected_speeds({CARD: None}, folder=Path("nothing"), threads=1)
    return {
        "both measured": machine,
        "an unknown card": replace(machine, devices=machine.devices | {CARD: no_card.device(CARD)}),
        "a guessed host": replace(machine, devices=machine.devices | {HOST: catalogue.guessed_host()}),
    }


def predictions(
    measured: dict[int, float], header: ModelHeader, machine: MachineProfile, depth: int
) -> Iterator[dict[str, Any]]:
    """All placements from none, from each one, from the two ends and from three."""
    counts = sorted(measured)
    ends = (counts[0], counts[-1])
    groups = [(), *((count,) for count in counts), ends, (counts[0], counts[len(counts) // 2], counts[-1])]
    for name, known in known_beforehand(machine).items():
        for group in groups:
            points = [MeasuredToken(Placement(count), 1 / measured[count], depth) for count in group]
            found = corrected(points, header, known, (CARD,))
            predicted = {
                count: 1 / pass_s(header, Placement(count), found, (CARD,), depth=depth)
                for count in counts
                if count not in group
            }
            errors = {count: rate / measured[count] - 1 for count, rate in predicted.items()}
            yield {
                "points": group,
                "with": name,
                "predicted_tokens_per_s": predicted,
                "relative_errors": errors,
                "worst": max(abs(error) for error in errors.values()),
            }


def main() -> None:
    """Measure, predict, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=24, help="tokens in a turn")
    parser.add_argument("-r", type=int, default=15, help="repetitions")
    arguments = parser.parse_args()
    cases = []
    for kind, (threads, worker_threads) in CASES.items():
        path = grown_targets((kind,))[kind]
        header = read_header(path)
        layers = sorted({round(header.layers * share / 4) for share in range(5)})
        with worker(worker_threads) as endpoint, tempfile.TemporaryDirectory() as folder:
            spec = machine_profile.MachineProfileJob(threads=threads, rpc=(endpoint,))
            machine = machine_profile.measure_machine(Path(folder), spec)
            with multiprocessing.get_context("spawn").Pool(1) as child:  # a worker's devices stay with a process
                samples = child.apply(measure, (path, endpoint, layers, threads, arguments.r, arguments.n))
        depth = DEPTH + arguments.n // 2
        spreads = {count: spread(samples[count]) for count in layers}
        measured = {count: sorted(samples[count])[len(samples[count]) * 3 // 4] for count in layers}
        found = list(predictions(measured, header, machine, depth))
        cases.append(
            {
                "target": kind,
                "threads": {"host": threads, "worker": worker_threads},
                "layers": header.layers,
                "load_average": os.getloadavg(),
                "tokens_per_s": {
                    count: {"median": s.median, "ci95": s.ci95, "samples": s.samples} for count, s in spreads.items()
                },
                "machine_profile": asdict(machine),
                "predictions": found,
            }
        )
        print(f"{kind}, host {threads} and worker {worker_threads} threads")
        for count, figures in spreads.items():
            print(
                f"  {count:2}/{header.layers} layers  {figures.median:6.2f} t/s "
                f"(95 % {figures.ci95[0]:.2f} to {figures.ci95[1]:.2f})"
            )
        for one in found:
            errors = ", ".join(f"{count}: {error:+.1%}" for count, error in one["relative_errors"].items())
            print(f"  {one['with']}, from {one['points']}: {errors}", flush=True)
        save("speed-prediction", {"goal": GOAL, "settings": vars(arguments), "cases": cases})


if __name__ == "__main__":
    main()
