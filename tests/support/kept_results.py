"""Results as the commands write them, for tests of reports: figures made up, proportions as on real machines."""

from __future__ import annotations

import json
import random
from typing import Any

from ggufspec.schema.base import Document, Failure, MeasuredRun, SpeculativeRun, Spread, to_json
from ggufspec.schema.bench import BenchDocument, BenchVerdict
from ggufspec.schema.compare import CompareCell, ComparedModel, CompareDocument, Quality
from ggufspec.schema.plan import PlanDocument, PlannedDevice, PlannedModel, PlannedOption, SweepRow
from ggufspec.schema.sweep import SweepDocument, SweepPoint
from ggufspec.schema.tune import TuneDocument, TunedSetting, TuneTrial

GIB = 2**30
DESKTOP: dict[str, Any] = {
    "cpu": "AMD Ryzen 7 7700X 8-Core Processor",
    "cores": 8,
    "memory_bytes": 64 * GIB,
    "gpus": [{"name": "NVIDIA GeForce RTX 4090", "total_bytes": 24 * GIB, "driver": "580.65"}],
    "system": "Linux-6.12.48-x86_64-with-glibc2.41",
    "python": "3.12.11",
    "ggufspec": "0.1.0",
    "llama_cpp_python": "0.3.36",
}
LAPTOP: dict[str, Any] = DESKTOP | {
    "cpu": "13th Gen Intel(R) Core(TM) i7-13700H",
    "cores": 14,
    "memory_bytes": 32 * GIB,
    "gpus": [{"name": "NVIDIA GeForce RTX 4060 Laptop GPU", "total_bytes": 8 * GIB, "driver": "576.02"}],
}
SETTINGS: dict[str, Any] = {
    "ctx_size": 4096,
    "threads": 8,
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "flash_attn": "auto",
    "drafter": "both",
    "draft_policy": "adaptive",
    "draft_max": 15,
    "accept": "exact",
    "lossy": False,
    "strict": False,
    "temperature": 0.0,
    "prompts": 8,
    "max_tokens": 128,
    "repetitions": 5,
}
PAIR = {
    "name": "llama3-70b",
    "target": "/models/Meta-Llama-3-70B-Instruct-Q3_K_S.gguf",
    "draft": "/models/Meta-Llama-3-8B-Instruct-Q4_K_M.gguf",
}


def as_json(document: Document) -> dict[str, Any]:
    """The document as a reader of its file gets it."""
    body: dict[str, Any] = json.loads(to_json(document))
    return body


def spread(median: float, noise: float = 0.01, samples: int = 5, seed: int = 0) -> Spread:
    """Samples around a median, and an interval that holds it."""
    rng = random.Random(f"{median} {seed}")
    drawn = tuple(sorted(median * (1 + rng.gauss(0, noise)) for _ in range(samples)))
    return Spread(median, (min(*drawn, median), max(*drawn, median)), drawn)


def run(speed: float, layers: int, of: int = 80, **changes: Any) -> MeasuredRun:
    """A target-only run."""
    body = {
        "tokens": 1024,
        "prompt_tokens_per_s": 30 * speed,
        "peak_rss_bytes": 20 * GIB,
        "load_s": 6.4,
        "vram_bytes": 21 * GIB,
    }
    return MeasuredRun(gpu_layers=layers, layers=of, tokens_per_s=spread(speed), **(body | changes))


def drafted(
    speed: float, layers: int, of: int = 80, first: float = 0.86, places: int = 8, **changes: Any
) -> SpeculativeRun:
    """A run with a draft whose acceptance falls from place to place."""
    by_position = tuple(round(first * 0.97**place, 4) for place in range(places))
    body = {
        "tokens": 1024,
        "prompt_tokens_per_s": 24 * speed,
        "peak_rss_bytes": 24 * GIB,
        "vram_bytes": 22 * GIB,
        "load_s": 8.1,
        "gpu_layers_draft": 33,
        "draft_layers": 32,
        "acceptance_rate": first - 0.05,
        "tokens_per_round": 3.4,
        "drafted": 1600,
        "accepted": 1200,
        "rounds": 300,
        "draft_s": 0.02,
        "verify_s": 0.4,
    }
    return SpeculativeRun(
        gpu_layers=layers, layers=of, tokens_per_s=spread(speed), accepted_by_position=by_position, **(body | changes)
    )


def bench(machine: dict[str, Any] = DESKTOP, **changes: Any) -> BenchDocument:
    """A 70B target on 24 GiB, for which the draft did not pay."""
    body: dict[str, Any] = {
        "pair": PAIR,
        "machine": machine,
        "plan": {},
        "settings": SETTINGS,
        "runs": {
            "target_only": run(3.12, 58),
            "draft_only": run(96.0, 33, of=32),
            "speculative": drafted(2.58, 45),
            "target_only_at_pair": run(2.01, 45),
        },
        "speedup": spread(0.83),
        "identical_output": True,
        "identity_check": {"note": "1024 tokens of 8 answers compared in strict mode"},
        "divergences": (),
        "verdict": BenchVerdict(
            False,
            "Not worth it: 0.83× target-only (95 % interval 0.81 to 0.84): the draft takes the room of 13 layers.",
        ),
        "notes": ("the kept batch latencies are of a busier machine: measured again",),
    }
    return BenchDocument(**(body | changes))


QUANTS = {  # GB, tokens/s alone, mean KL, top-1 agreement, perplexity
    "Q8_0": (7.7, 9.4, 0.0, 1.0, 7.31),
    "Q4_K_M": (4.4, 24.8, 0.0312, 0.934, 7.46),
    "Q3_K_S": (3.3, 33.5, 0.1184, 0.871, 7.98),
}
DRAFTS = {"Q8_0": (0.53, 1.34), "Q4_0": (0.35, 1.41), "Q2_K": (0.26, 1.12)}  # GB, speedup


def compare(
    machine: dict[str, Any] = LAPTOP, prefix: str = "Qwen2.5-Coder-7B-Instruct-", **changes: Any
) -> CompareDocument:
    """3 targets × 3 drafts on 8 GiB; one cell aborted, one ran out of memory."""
    targets, cells = [], []
    for quant, (size, speed, kl, top1, perplexity) in QUANTS.items():
        name = f"{prefix}{quant}"
        quality = Quality(f"{prefix}Q8_0", 2048, perplexity, 0.04, kl, kl * 0.03, top1, 0.005 if kl else 0.0)
        targets.append(ComparedModel(name, f"/models/{name}.gguf", int(size * 1e9), quality))
        layers = min(29, int(6.6 / size * 28))
        parts = {
            "target weights": int(size * 1e9 * layers / 29),
            "target kv": 117_000_000,
            "target compute": 310_000_000,
            "overhead": 420_000_000,
        }
        cells.append(
            CompareCell(
                name,
                None,
                run(speed, layers, of=28, vram_bytes=sum(parts.values()), load_s=size / 2.5),
                None,
                {"CUDA0": parts, "CPU": {"target weights": 300_000_000}},
                12.0 / speed * 4,
            )
        )
        for draft, (draft_size, gain) in DRAFTS.items():
            draft_name = f"Qwen2.5-Coder-0.5B-Instruct-{draft}"
            failure = None
            if (quant, draft) == ("Q8_0", "Q8_0"):
                failure = Failure(
                    "the trial ended with signal 6 (SIGABRT): GGML_ASSERT(n_tokens_all <= cparams.n_batch) failed"
                )
            if (quant, draft) == ("Q8_0", "Q2_K"):
                failure = Failure("out of memory: CUDA0 could not give 512 MiB", "ggufspec compare --headroom 768MiB")
            if failure is not None:
                cells.append(CompareCell(name, draft_name, None, None, failure=failure))
                continue
            with_draft = parts | {
                "target weights": parts["target weights"] - (600_000_000 if layers < 29 else 0),
                "draft weights": int(draft_size * 1e9),
                "draft kv": 50_000_000,
                "draft compute": 298_000_000,
            }
            factor = gain * (1.0 if layers == 29 else 0.9)
            result = drafted(
                speed * factor,
                layers - (layers < 29) * 2,
                of=28,
                first=0.7 + 0.05 * list(DRAFTS).index(draft),
                draft_layers=24,
                gpu_layers_draft=25,
                vram_bytes=sum(with_draft.values()),
                load_s=(size + draft_size) / 2.4,
            )
            cells.append(
                CompareCell(
                    name,
                    draft_name,
                    result,
                    spread(factor, 0.006),
                    {"CUDA0": with_draft},
                    10.0 / speed / factor * 4,
                    leads=(quant, draft) in (("Q3_K_S", "Q4_0"), ("Q3_K_S", "Q8_0")),
                )
            )
    drafts = tuple(
        ComparedModel(f"Qwen2.5-Coder-0.5B-Instruct-{n}", f"/models/d-{n}.gguf", int(s * 1e9))
        for n, (s, _) in DRAFTS.items()
    )
    body: dict[str, Any] = {
        "machine": machine,
        "settings": SETTINGS,
        "targets": tuple(targets),
        "drafts": drafts,
        "cells": tuple(cells),
        "warnings": ("the two fastest pairings overlap after 10 repetitions: which of them is faster is not sure",),
        "notes": ("quality was measured on 2,048 tokens of the bundled text",),
    }
    return CompareDocument(**(body | changes))


def setting(**changes: Any) -> TunedSetting:
    """A setting of a tuning."""
    body: dict[str, Any] = {
        "gpu_layers": 45,
        "gpu_layers_draft": 33,
        "n_cpu_moe": 0,
        "drafted": True,
        "drafter": "both",
        "draft_policy": "adaptive",
        "draft_max": 15,
        "cache_type_k": "f16",
        "cache_type_v": "f16",
        "flash_attn": "auto",
        "threads": 8,
        "ubatch_size": 512,
    }
    return TunedSetting(**(body | changes))


def tune(machine: dict[str, Any] = DESKTOP, **changes: Any) -> TuneDocument:
    """A search of twelve settings; one ran out of memory, three were measured again in the end."""
    finalists = (0, 6, 8)
    alone = {"drafted": False, "gpu_layers_draft": 0}
    steps: tuple[tuple[dict[str, Any], float, float, str], ...] = (
        ({}, 2.6, 2.51, "the planner's first choice"),
        ({"gpu_layers": 58, **alone}, 3.0, 3.12, "the best without a draft"),
        ({"gpu_layers": 49, "gpu_layers_draft": 12}, 2.9, 2.77, "expected to gain most"),
        ({"draft_policy": "fixed", "draft_max": 4}, 2.6, 2.64, "fixed lengths are not known yet"),
        ({"draft_policy": "fixed", "draft_max": 8}, 2.7, 2.81, "expected to gain most"),
        ({"gpu_layers": 60, **alone}, 3.3, 0.0, "one step more layers"),
        ({"gpu_layers": 58, "threads": 7, **alone}, 3.1, 3.2, "fewer threads"),
        ({"gpu_layers": 58, "drafter": "lookup", "gpu_layers_draft": 0}, 3.3, 3.44, "the lookup needs no memory"),
        (
            {"gpu_layers": 58, "drafter": "lookup", "gpu_layers_draft": 0, "threads": 7},
            3.5,
            3.51,
            "both changes helped",
        ),
        (
            {"gpu_layers": 58, "drafter": "lookup", "gpu_layers_draft": 0, "threads": 7, "ubatch_size": 256},
            3.5,
            3.49,
            "micro-batch is not known yet",
        ),
        ({"gpu_layers": 40, "draft_policy": "fixed", "draft_max": 8}, 2.5, 2.46, "to learn of the layers"),
        (
            {
                "gpu_layers": 58,
                "drafter": "lookup",
                "gpu_layers_draft": 0,
                "threads": 7,
                "draft_policy": "fixed",
                "draft_max": 2,
            },
            3.4,
            3.31,
            "expected to gain most",
        ),
    )
    trials = tuple(
        TuneTrial(
            number,
            setting(**change),
            expected,
            spread(speed, samples=3 if number in finalists else 1) if speed else None,
            40 * speed if speed else None,
            31.5,
            why,
            None if speed else Failure("out of memory: CUDA0 could not give 391 MiB"),
            (1.02 * speed,) if number in finalists else (),
        )
        for number, (change, expected, speed, why) in enumerate(steps)
    )
    body: dict[str, Any] = {
        "pair": PAIR,
        "machine": machine,
        "settings": {"ctx_size": 4096, "budget_s": 600},
        "trials": trials,
        "winner": 8,
        "baseline": 0,
        "target_only": 6,
        "gain": spread(1.4),
        "stopped": "no setting is expected to gain 1 %",
        "saved": "/home/user/.config/ggufspec/profiles/llama3-70b.toml",
        "explanation": (
            "The draft's 4.6 GiB hold 13 layers of the target, which are worth more than it.",
            "The lookup costs no memory and is right often enough.",
        ),
    }
    return TuneDocument(**(body | changes))


def sweep(option: str = "draft_max", machine: dict[str, Any] = LAPTOP, **changes: Any) -> SweepDocument:
    """A pair at several values of an option; the last failed where layers are swept."""
    alone = 24.8
    values: dict[str, tuple[float, float]] = {
        "draft_max": {
            "1": (alone, 29.9),
            "2": (alone, 32.6),
            "4": (alone, 34.8),
            "8": (alone, 33.1),
            "16": (alone, 27.2),
        },
        "gpu_layers": {"0": (6.1, 7.7), "8": (8.4, 10.6), "16": (13.0, 17.1), "24": (20.2, 27.9), "29": (0.0, 0.0)},
        "cache_type_k": {"f16": (alone, 34.8), "q8_0": (24.1, 33.9), "q4_0": (23.6, 31.0)},
    }[option]
    points = tuple(
        SweepPoint(
            value,
            run(a, 29, of=28),
            drafted(b, 29, of=28, first=0.8 + 0.03 * place, draft_layers=24, gpu_layers_draft=25),
            spread(b / a, 0.005),
        )
        if a
        else SweepPoint(value, None, None, None, Failure("out of memory: CUDA0 could not give 391 MiB"))
        for place, (value, (a, b)) in enumerate(values.items())
    )
    pair = {
        "name": "",
        "target": "/models/Qwen2.5-Coder-7B-Instruct-Q4_K_M.gguf",
        "draft": "/models/Qwen2.5-Coder-0.5B-Instruct-Q8_0.gguf",
    }
    body: dict[str, Any] = {"pair": pair, "machine": machine, "settings": SETTINGS, "option": option, "points": points}
    return SweepDocument(**(body | changes))


def plan(**changes: Any) -> PlanDocument:
    """The 70B pair on 24 GiB, with a sweep over its layers."""

    def model(file: str, layers: int, of: int, size: float) -> PlannedModel:
        on_card = {
            "weights": int(size * layers / (of + 1)),
            "kv": int(13e6 * layers),
            "compute": 420_000_000,
            "overhead": 0,
        }
        rest = {
            "weights": int(size * (1 - layers / (of + 1))),
            "kv": int(13e6 * (of + 1 - layers)),
            "compute": 40_000_000,
            "overhead": 0,
        }
        return PlannedModel(file, layers, of, (), 0, "f16", "f16", {"CUDA0": on_card, "CPU": rest})

    alone = model(PAIR["target"], 58, 80, 30.9e9)
    target, draft = model(PAIR["target"], 45, 80, 30.9e9), model(PAIR["draft"], 33, 32, 4.9e9)
    options = {"speculative": PlannedOption(target, draft, 2.6, 6), "target_only": PlannedOption(alone, None, 3.0, 0)}
    rows = tuple(
        SweepRow(n, 1 / (1.05 - n * 0.0125) if n <= 58 else None, 1.3 / (1.05 - n * 0.0125) if n <= 45 else None)
        for n in (*range(0, 81, 5), 81)
    )
    body: dict[str, Any] = {
        "pair": PAIR,
        "devices": (
            PlannedDevice(
                "CUDA0", "NVIDIA GeForce RTX 4090", 24 * GIB, 24 * GIB, int(23.2 * GIB), int(22.4 * GIB), 450 * 2**20
            ),
            PlannedDevice("CPU", "AMD Ryzen 7 7700X", 64 * GIB, 60 * GIB, 56 * GIB, 14 * GIB, 0),
        ),
        "target": alone,
        "draft": None,
        "options": options,
        "predicted": {"target_only_tokens_per_s": 3.0, "speculative_tokens_per_s": 2.6, "break_even_acceptance": 0.93},
        "choice": "target-only",
        "why": "the draft's memory holds 13 layers of the target, worth more than its tokens",
        "settings": {"ctx_size": 4096},
        "draft_costs_layers": 13,
        "confirmed": True,
        "speed": "measured",
        "notes": (),
        "sweep": rows,
    }
    return PlanDocument(**(body | changes))


def all_kinds() -> list[dict[str, Any]]:
    """One document of each kind, of two machines."""
    return [
        as_json(each)
        for each in (bench(), tune(), plan(), compare(), sweep(), sweep("gpu_layers"), sweep("cache_type_k"))
    ]
