"""Predictions against what others measured and published: docs/predictions.md and docs/evidence/published.json.

    .venv/bin/python tests/evidence/published.py           # predicts, writes the JSON and the page: about two minutes
    .venv/bin/python tests/evidence/published.py --fit     # prints the constants of ggufspec/planning/catalogue.py

The rows are published.csv (target-only speed and memory) and published_pairs.csv (is speculation worth it?); SOURCES
names where they are from. What physics leaves open is fitted; every speed is predicted without its own row, and once
more without any row of its card.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import EVIDENCE, ROOT, save
from published_models import header as published_header
from scipy.optimize import least_squares

from ggufspec.api.plan import plan_request
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError
from ggufspec.hardware.backends import backend_of
from ggufspec.hardware.cards import find_card
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning import catalogue, plan, search, speed
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.history import PRIOR_ACCEPTANCE
from ggufspec.planning.memory import HOST, DeviceBytes, MemoryRequest
from ggufspec.planning.speed import DeviceProfile, MachineProfile, MeasuredToken, corrected, expected_tokens, pass_s
from ggufspec.settings.table import OPTIONS, Settings

SOURCES = {
    "llama-swap": "github.com/mostlygeek/llama-swap, docs/examples/speculative-decoding",
    "llama.cpp-4766": "llama.cpp pull request 4766",
    "llama.cpp-5877": "llama.cpp discussion 5877",
    "llama.cpp-10664": "llama.cpp issue 10664",
    "llama.cpp-15802": "llama.cpp pull request 15802",
    "llama.cpp-22673": "llama.cpp pull request 22673",
    "llama.cpp-26284": "llama.cpp pull request 26284",
    "llama.cpp-26705": "llama.cpp pull request 26705",
    "llama.cpp-27788": "llama.cpp pull request 27788",
    "koboldcpp-2262": "github.com/LostRuins/koboldcpp, issue 2262",
    "openclawradar": "openclawradar.com/article/speculative-decoding-benchmarks-rtx-3090-qwen-hvac",
    "localllama": "r/LocalLLaMA 1oq5msi",
    "localllama-scoreboard": "r/LocalLLaMA 1ghvwsj",
    "hackmd": "hackmd.io/ODXuOQNzSiyUITz7g9mtBw",
    "llmfit": "github.com/AlexsJones/llmfit, llmfit-core/data/community; pull requests 755, 773, 778",
    "qwen38-mtp": "github.com/sudoingX/qwen38-mtp, README.md and sweeps",
    "glukhov": "glukhov.org/llm-performance/benchmarks/comparing-qwen-3-6-mtp-vs-standard",
    "inventivehq": "github.com/InventiveHQ/speculative-decoding-consumer-gpus, experiments/*/results (CC BY 4.0)",
    "gpu-benchmarks": "github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference",
    "khmel": "pavlokhmel.com/llm_throughput_benchmark_on_13_gpus_and_10_models.html",
}
PAGE = ROOT / "docs" / "predictions.md"
PAIRS = Path(__file__).with_name("published_pairs.csv")
PARTS = ["speed", "partial", "memory", "verdicts"]
EVEN = 1.02  # speculative ÷ target-only up to which a published pair did not gain
GOALS = {"median": 0.15, "four of five": 0.30, "vram_mib": 150, "partial": 0.25, "signs": 0.9}
ROWS = Path(__file__).with_name("published.csv")
DEPTH = 200  # tokens in the cache on average: these benchmarks generate 128 to 400 from short prompts
CARD = "GPU0"  # as plans name cards that are not here


@dataclass(frozen=True)
class Row:
    id: str
    card: str
    backend: str
    model: str
    quant: str
    file_bytes: int
    layers: int | None
    cpu_moe: str
    host: str
    context: int
    cache: str
    tokens_per_s: float | None
    vram_mib: int | None
    source: str
    note: str
    header: ModelHeader
    file: Path

    def described(self) -> dict[str, Any]:
        """For the JSON."""
        names = (
            "id",
            "card",
            "backend",
            "model",
            "quant",
            "layers",
            "cpu_moe",
            "host",
            "context",
            "cache",
            "source",
            "note",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def whole(self) -> bool:
        return bool(self.card) and self.layers is None and not self.cpu_moe

    @property
    def placement(self) -> Placement:
        if not self.card:
            return Placement(0)
        moe = int(self.cpu_moe) if self.cpu_moe.isdigit() else 0
        return Placement(-1 if self.layers is None else self.layers, n_cpu_moe=moe)

    @property
    def options(self) -> ContextOptions:
        return ContextOptions(self.context, 1, 1, self.cache, self.cache)


def read_rows(folder: Path) -> list[Row]:
    found = []
    for line in csv.DictReader(ROWS.open()):
        size = int(line["file_bytes"] or 0)
        header, file = published_header(line["model"], line["quant"], folder, size)
        found.append(
            Row(
                **{key: line[key] for key in ("id", "card", "backend", "model", "quant", "cpu_moe", "host", "cache")},
                **{key: line[key] for key in ("source", "note")},
                file_bytes=size,
                layers=int(line["layers"]) if line["layers"] else None,
                context=int(line["context"] or 4096),
                tokens_per_s=float(line["tokens_per_s"]) if line["tokens_per_s"] else None,
                vram_mib=int(line["vram_mib"]) if line["vram_mib"] else None,
                header=header,
                file=file,
            )
        )
    return found


# ---- the fit ---------------------------------------------------------------------------------------------------------

INF = float("inf")
TYPES = ("f16", "q8_0", "q6_K", "q5_K", "q4_K", "q4_0", "q3_K", "q2_K", "iq4_xs", "iq3_s", "iq2_s", "mxfp4")
ARCHITECTURES = tuple(name for name in catalogue.REACHES if name)


def features(row: Row) -> tuple[np.ndarray, float, np.ndarray]:
    """(bytes read by type, bytes of the cache, blocks: all, routed, recurrent)."""

    def cost(by_type: dict[str, float], cache: float = INF) -> float:
        device = DeviceProfile(cache, INF, 0.0, by_type=by_type)
        machine = MachineProfile({HOST: DeviceProfile(INF, INF), CARD: device}, 0.0, 0.0, INF, "")
        return speed.cost(row.header, Placement(-1), machine, (CARD,), depth=DEPTH, context=row.options).devices[CARD]

    by_type = [cost({kind: 1.0 if kind == one else INF for kind in TYPES}) for one in TYPES]
    cache = cost(dict.fromkeys(TYPES, INF), 1.0)
    header = row.header
    blocks = header.blocks - header.nextn_blocks
    recurrent = sum(header.recurrent[:blocks])
    return np.array(by_type), cache, np.array([blocks, blocks * bool(header.experts), recurrent])


@dataclass(frozen=True)
class Measured:
    """Rows as arrays: seconds a token, bandwidth and architecture of the card, and :func:`features`."""

    rows: list[Row]
    seconds: np.ndarray
    bandwidth: np.ndarray
    architecture: np.ndarray
    types: np.ndarray
    cache: np.ndarray
    blocks: np.ndarray

    def __getitem__(self, which: np.ndarray) -> Measured:
        rows = [row for row, kept in zip(self.rows, which, strict=True) if kept]
        arrays = (self.seconds, self.bandwidth, self.architecture, self.types, self.cache, self.blocks)
        return Measured(rows, *(array[which] for array in arrays))


def measured(rows: list[Row]) -> Measured:
    cards = [find_card(row.card) for row in rows]
    types, cache, blocks = zip(*(features(row) for row in rows), strict=True)
    return Measured(
        rows,
        np.array([1 / (row.tokens_per_s or 1) for row in rows]),
        np.array([card.bandwidth_bytes_per_s for card in cards]),
        np.array([ARCHITECTURES.index(card.architecture) for card in cards]),
        np.array(types),
        np.array(cache),
        np.array(blocks),
    )


@dataclass(frozen=True)
class Fitted:
    """``efficiency`` and ``layer_s`` by architecture, ``shares`` by type; ``at`` is where the fit ended."""

    efficiency: np.ndarray
    layer_s: np.ndarray
    shares: np.ndarray
    routing: float
    recurrence: float
    at: np.ndarray

    def seconds(self, of: Measured) -> np.ndarray:
        launches = of.blocks @ np.array([1.0, self.routing, self.recurrence])
        read = of.types @ (1 / self.shares) + of.cache
        return read / (of.bandwidth * self.efficiency[of.architecture]) + launches * self.layer_s[of.architecture]


PRIOR_EFFICIENCY, PRIOR_LAYER_S = 0.75, 35e-6
SIGMA = {"efficiency": 0.3, "layer": 0.5, "share": 0.12, "launches": 0.7, "row": 0.08}


def fit(of: Measured, start: np.ndarray | None = None) -> Fitted:
    """Least squares of log(predicted / measured), robust, with wide priors: one row cannot move a class far."""
    count, kinds = len(ARCHITECTURES), len(TYPES)

    def unpack(x: np.ndarray) -> Fitted:
        shares = np.exp(x[2 * count : 2 * count + kinds])
        return Fitted(
            PRIOR_EFFICIENCY * np.exp(x[:count]),
            PRIOR_LAYER_S * np.exp(x[count : 2 * count]),
            shares / shares[TYPES.index("q4_K")],
            float(np.exp(x[-2])),
            float(np.exp(x[-1])),
            x,
        )

    groups = {"efficiency": count, "layer": count, "share": kinds, "launches": 2}
    sigmas = np.repeat([SIGMA[name] for name in groups], list(groups.values()))

    def residuals(x: np.ndarray) -> np.ndarray:
        off = np.log(unpack(x).seconds(of) / of.seconds) / SIGMA["row"]
        robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))  # outliers count linearly
        return np.concatenate([robust, x / sigmas])

    return unpack(least_squares(residuals, np.zeros(len(sigmas)) if start is None else start, max_nfev=30).x)


def fitted_constants(of: Measured) -> dict[str, Any]:
    """What ggufspec/planning/catalogue.py has of it."""
    found = fit(of)
    return {
        "efficiency": dict(zip(ARCHITECTURES, found.efficiency.round(2).tolist(), strict=True)),
        "layer_us": dict(zip(ARCHITECTURES, (found.layer_s * 1e6).round().tolist(), strict=True)),
        "shares": dict(zip(TYPES, found.shares.round(2).tolist(), strict=True)),
        "routing": round(found.routing, 1),
        "recurrence": round(found.recurrence, 1),
    }


# ---- what is predicted -----------------------------------------------------------------------------------------------


def speeds(of: Measured) -> list[dict[str, Any]]:
    """Wholly on the card, each predicted without itself, and without its card."""
    found, start = [], fit(of).at
    for index, row in enumerate(of.rows):
        here = np.arange(len(of.rows)) == index
        others = np.array([one.card != row.card for one in of.rows])
        without = [float(1 / fit(of[some], start).seconds(of[here])[0]) for some in (~here, others)]
        found.append(
            {
                **row.described(),
                "architecture": find_card(row.card).architecture,
                "measured": row.tokens_per_s,
                "predicted": without[0],
                "error": without[0] / (row.tokens_per_s or 1) - 1,
                "error_without_card": without[1] / (row.tokens_per_s or 1) - 1,
            }
        )
    return found


def host_bytes_per_s(named: str) -> float:
    """Of memory such as ``DDR4-2400 x2``: transfers × channels × 8 bytes."""
    match = re.fullmatch(r"DDR\d-(\d+) x(\d+)", named)
    assert match, named
    return int(match[1]) * 1e6 * int(match[2]) * 8


def cores_of(source: str, note: str) -> catalogue.CpuCores:
    """As far as they were named: six of an i7-8700; of laptops as many, at a server's clock, which are guesses."""
    if "laptop" in note:
        return catalogue.CpuCores(6, is_desktop=False)
    return catalogue.CpuCores(6) if source == "inventivehq" else catalogue.CpuCores()


def machine_of(card: str, host: str, cores: catalogue.CpuCores | None = None) -> MachineProfile:
    known = catalogue.from_catalogue([find_card(card)] if card else [], [CARD] if card else [])
    if not host:
        return known
    there = catalogue.guessed_host(host_bytes_per_s(host), cores, repacked=not card)
    return replace(known, devices=known.devices | {HOST: there})


def partial(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Partly on the host: by the memory's data sheet alone, and with one other point of the same host."""
    some = [row for row in rows if row.host and not row.whole and row.cpu_moe != "fit"]
    found = []
    for row in some:
        cores, cards = cores_of(row.source, row.note), (CARD,) if row.card else ()
        machine = machine_of(row.card, row.host, cores)

        def rate(profile: MachineProfile, row: Row = row, cards: tuple[str, ...] = cards) -> float:
            return 1 / pass_s(row.header, row.placement, profile, cards, depth=DEPTH, context=row.options)

        points = [one for one in some if one.id != row.id and (one.source, one.host) == (row.source, row.host)]
        points = [one for one in points if one.card == row.card]
        point = min(points, key=lambda one: (one.model != row.model, one.layers or 0), default=None)
        learned = None
        if point is not None:
            token = MeasuredToken(point.placement, 1 / (point.tokens_per_s or 1), DEPTH, point.options)
            learned = rate(corrected([token], point.header, machine, cards))
        measured_rate = row.tokens_per_s or 1
        found.append(
            {
                **row.described(),
                "measured": row.tokens_per_s,
                "by_data_sheet": rate(machine),
                "error_by_data_sheet": rate(machine) / measured_rate - 1,
                "point": point.id if point else None,
                "predicted": learned,
                "error": None if learned is None else learned / measured_rate - 1,
            }
        )
    return found


def memory(rows: Sequence[Row], folder: Path) -> list[dict[str, Any]]:
    """MiB of the card with llama-server's reservations: rows of logits for four answers, no MTP block."""
    found = []
    with DryRuns({CARD: "any card"}, simulated=True, rpc=(), folder=folder) as dry_runs:
        for row in rows:
            if row.vram_mib is None or row.cpu_moe == "fit":
                continue
            options = replace(row.options, max_outputs=4, ctx_size=row.context - 64, swa_full=False)
            request = MemoryRequest(row.header, row.file, row.placement, options)
            answer = dry_runs([request])[0]
            assert not isinstance(answer, str), answer
            used = answer[CARD] + DeviceBytes(overhead=backend_of(row.backend).overhead_bytes)
            predicted = used.total / 2**20
            found.append(
                {**row.described(), "measured": row.vram_mib, "predicted": predicted, "error": predicted - row.vram_mib}
            )
    return found


def verdicts(folder: Path) -> list[dict[str, Any]]:
    """Is speculation at that draft length faster than the best target-only run, on a card of that memory?"""
    found = []
    for line in csv.DictReader(PAIRS.open()):
        target = published_header(line["model"], line["quant"], folder, int(line["file_bytes"] or 0))
        own = line["draft"] == "mtp"
        draft = target if own else published_header(line["draft"], line["draft_quant"], folder)
        length = int(line["draft_max"] or 0)  # 0: not published, so the best one
        chance = PRIOR_ACCEPTANCE
        if line["accepted"]:
            reader = OPTIONS["acceptance"].reader
            assert reader is not None
            chance = reader(f"{line['accepted']}@{length or 1}")
        options = DecoderOptions(
            ctx_size=int(line["context"]) - 64,
            cache_type_k=line["cache"],
            cache_type_v=line["cache"],
            drafters=("mtp",) if own or "assistant" in line["draft"] else ("draft",),
        )
        layers = None if line["cpu_moe"] else int(line["layers"] or -1)
        wanted = Settings(
            gpu_layers=layers,
            gpu_layers_draft=-1,
            draft_max=length or None,
            op_offload_min_batch=OP_OFFLOAD_MIN_BATCH,  # as everybody has it
            load_mode="auto",
        )
        request = plan_request(target, draft, options, chance, wanted)
        size = int(float(line["vram_gib"]) * 2**30)
        machine = plan.PlanMachine(
            (plan.OffloadDevice(CARD, line["card"], size, size, backend_of(line["backend"]).overhead_bytes),),
            64 * 2**30,
            0,
            machine_of(line["card"], line["host"], cores_of("", line["note"])),
            simulated=True,
        )
        note, predicted = "", None
        with DryRuns({CARD: line["card"]}, simulated=True, rpc=(), folder=folder) as dry_runs:
            try:
                made = search.search_plan(request, machine, dry_runs)
            except GgufspecError as error:
                note = error.message
            else:
                assert made.pair is not None
                asked, beside = replace(request.target, context=made.pair.context), request.draft
                assert beside is not None
                draft_at = made.pair.target if beside.in_target else made.pair.draft
                assert draft_at is not None
                planned = length or made.pair.draft_length
                rival = made.target_only.target if layers is None or layers < 0 else Placement(layers)
                alone_s = request.target_only.pass_s(machine, rival, 1, DEPTH)
                round_s = planned * beside.pass_s(machine, draft_at, 1, DEPTH)
                round_s += asked.pass_s(machine, made.pair.target, planned + 1, DEPTH)
                predicted = expected_tokens(chance, planned) * alone_s / round_s
        measured_ratio = float(line["speculative"]) / float(line["base"])
        pays = predicted is not None and predicted > 1
        found.append(
            {
                **{
                    key: line[key] for key in ("id", "card", "model", "quant", "draft", "draft_max", "accepted", "note")
                },
                "measured": measured_ratio,
                "predicted": predicted,
                "refused": note,
                "right": pays == (measured_ratio > EVEN),
            }
        )
    return found


# ---- the page --------------------------------------------------------------------------------------------------------


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that the goals are of."""

    def spread(rows: Sequence[dict[str, Any]], key: str = "error") -> dict[str, Any]:
        off = sorted(abs(row[key]) for row in rows if row[key] is not None)
        return {
            "rows": len(off),
            "median": median(off),
            "four of five": off[int(0.8 * (len(off) - 1))],
            "most": off[-1],
        }

    listed = [row for row in results["speed"] if row["id"][0] in "AB"]
    signs = [row["right"] for row in results["verdicts"] if row["id"][0] in "AB"]
    every = [row["right"] for row in results["verdicts"]]
    return {
        "speed": spread(results["speed"]),
        "speed, rows A and B": spread(listed),
        "speed without the card": spread(results["speed"], "error_without_card"),
        "partial, one point": spread(results["partial"]),
        "partial, by data sheet": spread(results["partial"], "error_by_data_sheet"),
        "memory_mib": spread(results["memory"]),
        "signs": {"rows": len(signs), "right": sum(signs), "all_rows": len(every), "all_right": sum(every)},
    }


def page(results: dict[str, Any]) -> str:
    """docs/predictions.md."""
    found = results["summary"]
    lines = [
        _TOP.format(**_words(found, results["verdicts"])),
        "## Speed of the target alone, whole on the card, by architecture",
        "",
    ]
    lines += ["| architecture | rows | median error | largest |", "| --- | ---: | ---: | ---: |"]
    for name in ARCHITECTURES:
        off = [row["error"] for row in results["speed"] if row["architecture"] == name]
        if off:
            largest = max(off, key=abs)
            lines.append(f"| {name} | {len(off)} | {median(map(abs, off)):.0%} | {largest:+.0%} |")
    lines += [
        "",
        "## Is speculation worth it?",
        "",
        "Speed with the draft ÷ speed without it, at the given draft length; 1.02 or less counts as not worth it.",
        "",
    ]
    lines += ["| row | card | target | draft | length | accepted | measured | predicted | |", "|" + " --- |" * 9]
    for row in results["verdicts"]:
        predicted = "does not fit" if row["predicted"] is None else f"{row['predicted']:.2f}"
        sign = "" if row["right"] else "**wrong sign**"
        cells = (row["id"], row["card"], row["model"], row["draft"], row["draft_max"] or "–", row["accepted"] or "–")
        lines.append("| " + " | ".join((*cells, f"{row['measured']:.2f}", predicted, sign)) + " |")
    lines += ["", "## Memory", "", "MiB that llama-server reserves on the card.", ""]
    lines += [
        "| row | card | target | layers | context | cache | measured | predicted | error | |",
        "|" + " --- |" * 10,
    ]
    for row in results["memory"]:
        layers = "all" if row["layers"] is None else row["layers"]
        cells = (row["id"], row["card"], f"{row['model']} {row['quant']}", layers, f"{row['context']:,}", row["cache"])
        figures = (f"{row['measured']:,}", f"{row['predicted']:,.0f}", f"{row['error']:+.0f}", row["note"])
        lines.append("| " + " | ".join(map(str, (*cells, *figures))) + " |")
    lines += [
        "",
        "## Partly in RAM",
        "",
        "Tokens/s, predicted from the RAM's data sheet and from one other measurement on the same machine.",
        "",
    ]
    lines += [
        "| row | card | target | placement | memory | measured | from data sheet | from one measurement | |",
        "|" + " --- |" * 9,
    ]
    for row in results["partial"]:
        where = f"--n-cpu-moe {row['cpu_moe']}" if row["cpu_moe"] else f"-ngl {row['layers'] or 0}"
        sheet = f"{row['by_data_sheet']:.1f} ({row['error_by_data_sheet']:+.0%})"
        point = (
            "–" if row["predicted"] is None else f"{row['predicted']:.1f} ({row['error']:+.0%}, from {row['point']})"
        )
        cells = (row["id"], row["card"] or "–", f"{row['model']} {row['quant']}", where, row["host"])
        lines.append("| " + " | ".join((*cells, f"{row['measured']}", sheet, point, row["note"])) + " |")
    lines += ["", "## Speed of the target alone, whole on the card, row by row", ""]
    lines += [
        "| row | card | backend | target | measured | predicted | error | without rows of its card | |",
        "|" + " --- |" * 9,
    ]
    for row in results["speed"]:
        cells = (row["id"], row["card"], row["backend"], f"{row['model']} {row['quant']}", f"{row['measured']}")
        figures = (f"{row['predicted']:.1f}", f"{row['error']:+.0%}", f"{row['error_without_card']:+.0%}", row["note"])
        lines.append("| " + " | ".join((*cells, *figures)) + " |")
    lines += ["", "## Sources", ""]
    lines += [f"- {name}: {where}" for name, where in SOURCES.items()]
    return "\n".join(lines) + "\n"


def _words(found: dict[str, Any], verdicts: list[dict[str, Any]]) -> dict[str, str]:
    def of(name: str) -> str:
        one = found[name]
        return f"median error {one['median']:.0%}, four of five within {one['four of five']:.0%}, {one['rows']} rows"

    one, right, rows = found["memory_mib"], found["signs"]["all_right"], found["signs"]["all_rows"]
    lost = [row["right"] for row in verdicts if row["measured"] <= EVEN]
    gains = [abs(row["predicted"] / row["measured"] - 1) for row in verdicts if row["predicted"]]
    return {
        "speed": of("speed"),
        "card": of("speed without the card"),
        "sheet": of("partial, by data sheet"),
        "point": of("partial, one point"),
        "memory": f"median error {one['median']:.0f} MiB, four of five within {one['four of five']:.0f} MiB, "
        f"{one['rows']} rows",
        "signs": f"right for {right} of {rows} pairs: for {right - sum(lost)} of the {rows - len(lost)} that were "
        f"faster with the draft, and for {sum(lost)} of the {len(lost)} that were not",
        "gain": f"{median(gains):.0%}",
    }


_TOP = """# Predictions against what others published

How far may a plan for a card that you do not have be from what you will measure on it? This page compares such
plans with public measurements. Builds, power limits and clocks differ: the same file on the same card was published
at 31.9 to 43.9 tokens/s, so no prediction can be right for every row. `tests/evidence/published.py` generates this
page. Its rows and their sources are in `tests/evidence/published.csv` and `published_pairs.csv`, the figures in
`docs/evidence/published.json`.

- **Target-only speed, fully on the GPU**: {speed}; each row is predicted with constants that were fitted
  without it. With constants fitted without any row for the same card: {card}.
- **Partly in RAM**: predicted from the RAM's data sheet: {sheet}; from one other measurement
  on the same machine: {point}.
- **Memory**: {memory}.
- **Is the draft worth it?** The answer is {signs}. The predicted speedup has a median error of {gain}.

The fitted constants are the share of its bandwidth that an architecture reaches with Q4_K weights, the fixed cost per
block, the cost of other weight types relative to Q4_K, and the additional kernel launches for mixture-of-experts and
recurrent blocks. Everything else comes from the file's header, the card's data sheet and llama.cpp's own memory
figures.

Known errors:

- A20 and B24 are drafts for Qwen3.6-35B-A3B, a hybrid model that llama.cpp rolled back by decoding again. The draft
  lost even at 100 % acceptance: three tokens took about 2.9 times as long as one. CUDA uses other kernels for the
  experts of a batch; their cost is known from only one other model (GLM-4.5-Air) and explains half of the difference.
- MTP on Qwen3.8-27B is predicted to be a fifth too fast, because its batch latencies are from a dense 8B model.
- The RTX 5090 and the RTX PRO 3000 (Q4 to Q6, Q15) use 540 to 930 MiB more than a plan says. The sources do not
  say what else was using the card; two of them ran Windows with a desktop.
- The laptops (B13, Q15) are assumed to have six fast cores.
- Pascal unpacks Q2_K and Q3_K far more slowly than other cards. Only one row is for an Intel Arc.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the constants and end")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others stay as they are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = read_rows(folder)
        wholly = measured([row for row in rows if row.whole and row.tokens_per_s])
        constants = fitted_constants(wholly)
        if options.fit:
            print(constants)
            return
        results: dict[str, Any] = {}
        if options.parts != PARTS:
            results = json.loads((EVIDENCE / "published.json").read_text())["results"]
        results["constants"] = constants
        for part, make in (
            ("speed", lambda: speeds(wholly)),
            ("partial", lambda: partial(rows)),
            ("memory", lambda: memory(rows, folder)),
            ("verdicts", lambda: verdicts(folder)),
        ):
            if part in options.parts:
                print(f"{part} ...", file=sys.stderr, flush=True)
                results[part] = make()
        results["summary"] = summary(results)
    print(results["summary"])
    save("published", {"goals": GOALS, "results": results})
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
