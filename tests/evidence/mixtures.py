"""Mixtures of experts: plans of two published shapes for small cards, and predicted against measured T(n).

.venv/bin/python tests/evidence/mixtures.py

Plans: Qwen3-30B-A3B (Q4_K_M) and gpt-oss-120b (MXFP4 experts) as files without weights, each with a small draft, for
cards of 8, 12, 16 and 24 GB. The bytes of the chosen placements are llama.cpp's dry run; ``sums`` says whether weights
and caches by our own count are the same to the byte. Seconds are of the whole process, headers kept, once without
kept dry runs and then with them.

T(n): a mixture with random weights, so that the router's choices differ from token to token, on the CPU and with its
experts on the CPU beside an RPC worker on loopback, with a core each. Predicted by the measured speeds of the machine,
and once more with another placement of the model as a rehearsal would time it (on the CPU alone: the same one). Left
out while other programs use the CPUs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from common import save

from ggufspec.bench import batch_timing
from ggufspec.hardware.host import BUSY_CPUS, others_cpus
from ggufspec.llamacpp.gguf import parse_header
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.planning import machine_profile, rehearsed
from ggufspec.planning.memory import resident
from ggufspec.planning.speed import MachineProfile, pass_s
from tests.support import random_weights, shapes
from tests.support.processes import rpc_worker

GOAL_S, GOAL_OFF = 1.5, 0.2
VRAM_GB = (8, 12, 16, 24)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
DEPTH, THREADS, BLOCKS = 64, 1, 6  # a core for the host and one for the worker


def gpt_oss_120b() -> shapes.Shape:
    """The published dimensions: openai/gpt-oss-120b, config.json."""
    return shapes.transformer(
        shapes.Label("gpt-oss-120b", "moe", "gpt-oss", "MXFP4_MOE"),
        shapes.Dims(36, 2880, 64, 8, 2880, 201088, 64),
        norms=shapes.POST,
        bias=True,
        moe=shapes.Experts(128, 4, 2880, bias=True),
        extra={"attn_sinks.weight": (64,), "attn_output.bias": (2880,)},
        keys={"attention.sliding_window": 128},
    )


def qwen3_06b() -> shapes.Shape:
    """Qwen/Qwen3-0.6B, config.json."""
    return shapes.transformer(
        shapes.Label("qwen3-0.6b-q8_0", "dense", "qwen3", "Q8_0"),
        shapes.Dims(28, 1024, 16, 8, 3072, 151936, 128),
        qk_norm=True,
        tied=True,
    )


def pairs() -> dict[str, tuple[shapes.Shape, shapes.Shape]]:
    """(target, draft) by name."""
    return {
        "qwen3-30b-a3b": (shapes.SHAPES["qwen3moe-30b-a3b"], qwen3_06b()),
        "gpt-oss-120b": (gpt_oss_120b(), shapes.SHAPES["gpt-oss-20b"]),
    }


def header_of(path: Path) -> ModelHeader:
    """Of a file that is here."""
    with path.open("rb") as file:
        return interpret(path.name, [parse_header(file.read(32 << 20))], path.stat().st_size)


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan(target: Path, draft: Path, vram_gb: int, cache: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """(the document of ``plan --json``, seconds of the process: on the clock, and of CPU time with its child's)."""
    command = [sys.executable, "-m", "ggufspec", "plan", "-m", target, "-md", draft, "-c", "8192", "--json"]
    command += ["--vram", f"{vram_gb}GiB"]
    began, used = time.perf_counter(), cpu_s()
    done = subprocess.run(command, capture_output=True, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True)
    return json.loads(done.stdout), {"clock_s": time.perf_counter() - began, "cpu_s": cpu_s() - used}


def cpu_s() -> float:
    """CPU time of the processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def sums_agree(option: dict[str, Any], header: ModelHeader, settings: dict[str, Any]) -> bool:
    """Whether weights and caches of a planned target are what we count ourselves."""
    model = option["target"]
    placement = Placement(model["gpu_layers"], tuple(model["split"]), model["n_cpu_moe"])
    fields = {name: settings[name] for name in ContextOptions.__dataclass_fields__ if name in settings}
    context = ContextOptions(**{**fields, "hidden": tuple(fields.get("hidden", ()))})
    cards = [name for name in model["bytes"] if name != "CPU"]
    found = resident(header, placement, context, cards)
    return all(
        (found[name].weights, found[name].kv) == (used["weights"], used["kv"]) for name, used in model["bytes"].items()
    )


def planned(folder: Path) -> dict[str, Any]:
    """Every pair on every card."""
    results = {}
    for name, (target, draft) in pairs().items():
        files = [shapes.write(folder / f"{shape.name}.gguf", shape, tokenizer=True) for shape in (target, draft)]
        header, cache = header_of(files[0]), folder / f"cache-{name}"
        plan(files[0], files[1], 48, cache)  # keeps the headers
        for vram_gb in VRAM_GB:
            document, first = plan(files[0], files[1], vram_gb, cache)
            again = [plan(files[0], files[1], vram_gb, cache)[1] for _ in range(3)]
            kept = {clock: median(one[clock] for one in again) for clock in first}
            chosen = document["options"][document["choice"].replace("-", "_")]
            row = {
                "new_dry_runs": first,
                "kept_dry_runs": kept,
                "confirmed": document["confirmed"],
                "sums": sums_agree(chosen, header, document["settings"]),
                "choice": document["choice"],
                "why": document["why"],
                "gpu_layers": chosen["target"]["gpu_layers"],
                "n_cpu_moe": chosen["target"]["n_cpu_moe"],
                "card_bytes": document["devices"][0]["used_bytes"],
                "budget_bytes": document["devices"][0]["budget_bytes"],
                "target_only_tokens_per_s": document["predicted"]["target_only_tokens_per_s"],
                "speculative_tokens_per_s": document["predicted"]["speculative_tokens_per_s"],
            }
            results[f"{name}, {vram_gb} GB"] = row
            print(f"{name} on {vram_gb} GB: {kept}; {row['why']}", flush=True)
    return results


# ---- T(n) ------------------------------------------------------------------------------------------------------------


def random_mixture(folder: Path) -> Path:
    """A mixture of 1.3 GB whose routers choose by random weights: 4 of 32 experts."""
    shape = shapes.transformer(
        shapes.Label("random-moe", "moe", "qwen3moe", "Q8_0"),
        shapes.Dims(BLOCKS, 2048, 32, 8, 1024, 8192, 64),
        moe=shapes.Experts(32, 4, 1024),
        qk_norm=True,
    )
    return random_weights.write(folder / "random-moe.gguf", shape)


def timed(file: Path, placements: Sequence[Placement], rpc: tuple[str, ...], rounds: int) -> list[dict[int, float]]:
    """Seconds of a batch by width at each placement, interleaved: the lower quartile, since other programs only add."""
    context = ContextOptions(512, max(WIDTHS), THREADS, flash_attn="on")
    parts = tuple(batch_timing.ModelToTime(file, placement, context, WIDTHS) for placement in placements)
    result = batch_timing.time_batches(batch_timing.BatchTimingJob(parts, DEPTH, rounds=rounds, seconds=60.0, rpc=rpc))
    return [{width: quantiles(some, n=4)[0] for width, some in part.seconds.items()} for part in result.parts]


def compared(
    header: ModelHeader,
    placements: Sequence[Placement],
    seconds: Sequence[dict[int, float]],
    speed: MachineProfile,
    cards: tuple[str, ...] = (),
) -> dict[str, Any]:
    """T(n) of the second placement against measured: by the machine's speeds, and with what the first one showed."""
    threads = {"threads": THREADS, "depth": DEPTH, "cache_type_k": "f16", "cache_type_v": "f16", "machine": ""}
    points = [
        rehearsed.RehearsedSpeed(placement=at, batch_s=s, **threads) for at, s in zip(placements, seconds, strict=True)
    ]
    rows = {}
    for which, used in (("calibrated", []), ("rehearsed", points[:1])):
        latency = rehearsed.latency(used, header, speed, cards)
        at, truth = placements[1], seconds[1]
        predicted = {
            width: pass_s(
                header,
                at,
                latency.speed if latency else speed,
                cards,
                tokens=width,
                depth=DEPTH,
                measured=latency.nearest(header, at, cards) if latency else None,
            )
            for width in WIDTHS
        }
        off = {width: predicted[width] / predicted[1] / (truth[width] / truth[1]) - 1 for width in WIDTHS}
        rows[which] = {
            "relative": {width: predicted[width] / predicted[1] for width in WIDTHS},
            "off": off,
            "worst": max(map(abs, off.values())),
        }
    return {"measured_s": dict(zip(("rehearsed", "predicted"), seconds, strict=True)), **rows}


def batches(folder: Path, rounds: int = 9) -> dict[str, Any]:
    """On this CPU, and with a worker."""
    file = random_mixture(folder)
    header, results = header_of(file), {}
    alone = [Placement(), Placement()]
    with rpc_worker(THREADS) as (endpoint, _):
        speed = machine_profile.measure_machine(
            folder / "machine", machine_profile.MachineProfileJob(THREADS, (endpoint,))
        )
        results["cpu"] = compared(header, alone, timed(file, alone, (), rounds), speed)
        layers = header.layers
        for name, count, known in (("half of", BLOCKS // 2, BLOCKS), ("all", BLOCKS, 0)):
            places = [Placement(layers, n_cpu_moe=known), Placement(layers, n_cpu_moe=count)]
            name = f"experts of {name} blocks on the CPU"
            results[name] = compared(header, places, timed(file, places, (endpoint,), rounds), speed, ("RPC0",))
    for name, row in results.items():
        for which in ("calibrated", "rehearsed"):
            print(f"{name}, {which}: worst {row[which]['worst']:.0%}", flush=True)
    return results


def main() -> None:
    """Measure, print, save."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {"plans": planned(folder)}
        if others_cpus() < BUSY_CPUS:
            results["batches"] = batches(folder)
        else:
            print("other programs use the CPUs: T(n) is not measured")
    save("mixtures", {"load": os.getloadavg()[0], "goal_s": GOAL_S, "goal_off": GOAL_OFF, "results": results})


if __name__ == "__main__":
    main()
