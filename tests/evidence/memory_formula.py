"""The memory formula against llama.cpp's own dry run, and the dry run against real loads.

    .venv/bin/python tests/evidence/memory_formula.py        # two minutes

Every shape of tests/shapes.py is placed, by the formula (ggufspec/planning/memory.py) and by llama.cpp without weights
(ggufspec/llamacpp/dryrun.py), and the bytes on the host and on each paper card are compared. The shapes that are small
enough are loaded for real as well, with the weights read into memory (``LLAMA_LOAD_MODE_NONE``): with a memory map the
host's weights are the range of the file from the first to the last tensor on the host, shared with the page cache.

A case without offloaded layers stands for a machine without a card. llama.cpp's dry run itself ends with SIGSEGV there
when no device is offloaded to and a weight is of a type that it repacks for the CPU (Q4_0, Q4_K).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.dryrun import Allocated, Answer, Request, Spec, ask
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.planning.memory import Bytes, estimate

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from common import save
from shapes import SHAPES, write

KV_TYPES = ("f16", "q8_0", "q4_0")
PARTS = ("weights", "kv", "compute")
COLUMNS = ("model", "cards", "gpu_layers", "split", "n_cpu_moe", "ctx_size", "width", "cache_type_k", "cache_type_v")
COLUMNS += ("flash_attn", "swa_full", "device", *(f"formula_{part}" for part in PARTS))
COLUMNS += tuple(f"llama_cpp_{part}" for part in PARTS)
Found = dict[str, Allocated] | dict[str, Bytes]


@dataclass(frozen=True)
class Case:
    """One model, placed, on so many paper cards."""

    model: str
    placement: Placement
    context: ContextOptions
    cards: int = 1


def header_of(path: Path) -> ModelHeader:
    """The header of one of the shapes' files: far smaller than what is read."""
    with path.open("rb") as file:
        data = file.read(1 << 22)
    return interpret(path.stem, [gguf.parse(data)], path.stat().st_size)


def context(ctx_size: int, width: int, kv: str, flash: str, *, swa_full: bool = True) -> ContextOptions:
    """llama.cpp refuses a quantised V cache without flash attention: then K alone is quantised."""
    values = kv if flash == "on" else "f16"
    return ContextOptions(ctx_size, width, 1, cache_type_k=kv, cache_type_v=values, flash_attn=flash, swa_full=swa_full)


def cases(model: str, blocks: int) -> Iterator[Case]:
    """What is compared for one model."""
    latent = SHAPES[model].kind == "mla"  # llama.cpp cannot transpose a quantised latent cache
    for layers in (0, 1, (blocks + 1) // 2, blocks + 1):
        for flash in ("on", "off"):
            for kv in KV_TYPES:
                if not (latent and flash == "off" and kv != "f16"):
                    yield Case(model, Placement(layers), context(4096, 9, kv, flash))
    for layers in ((blocks + 1) // 2, blocks + 1):
        for ctx_size in (512, 32768):
            for width in (1, 256):
                for flash in ("on", "off"):
                    yield Case(model, Placement(layers), context(ctx_size, width, "f16", flash))
        yield Case(model, Placement(layers), context(4096, 9, "f16", "auto", swa_full=False))
        for split in ((1.0, 1.0), (3.0, 1.0)):
            yield Case(model, Placement(layers, split), context(4096, 9, "f16", "on"), cards=2)
        if f"{SHAPES[model].architecture}.expert_count" in SHAPES[model].metadata:
            yield Case(model, Placement(layers, n_cpu_moe=blocks // 2), context(4096, 9, "f16", "on"))


def answers(folder: Path, wanted: Sequence[Case], *, real: bool = False) -> list[Answer]:
    """What llama.cpp says, a child process for each number of cards."""
    found: dict[Case, Answer] = {}
    for cards in sorted({case.cards for case in wanted}):
        mine = [case for case in wanted if case.cards == cards]
        requests = tuple(Request(folder / f"{case.model}.gguf", case.placement, case.context) for case in mine)
        result = ask(Spec(requests, paper_cards=cards, real=real))
        found |= zip(mine, result.answers, strict=True)
    return [found[case] for case in wanted]


def card_names(count: int) -> tuple[str, ...]:
    return tuple(f"RPC{i}" for i in range(count))


def rows(case: Case, formula: dict[str, Bytes], truth: dict[str, Allocated]) -> Iterator[tuple[Any, ...]]:
    """A row of COLUMNS for each device."""
    placement, options = case.placement, case.context
    asked = (case.model, case.cards, placement.gpu_layers, "/".join(map(str, placement.split)), placement.n_cpu_moe)
    asked += (
        options.ctx_size,
        options.width,
        options.cache_type_k,
        options.cache_type_v,
        options.flash_attn,
        options.swa_full,
    )
    for device in ("CPU", *card_names(case.cards)):
        numbers = (getattr(found[device], part) for found in (formula, truth) for part in PARTS)
        yield (*asked, device, *numbers)


def table(measured: Iterable[tuple[Any, ...]]) -> str:
    """Worst differences by kind of model, as Markdown."""
    by_kind: dict[str, list[tuple[Any, ...]]] = {}
    for row in measured:
        by_kind.setdefault(SHAPES[row[0]].kind, []).append(row)
    lines = ["| kind | models | device rows | weights | KV | compute, bytes | compute, % | equal |", "|" + "---|" * 8]
    for kind, rows_of_kind in by_kind.items():
        off = {part: [row[12 + i] - row[15 + i] for row in rows_of_kind] for i, part in enumerate(PARTS)}
        share = [100 * diff / max(row[17], 1) for diff, row in zip(off["compute"], rows_of_kind, strict=True)]
        equal = sum(diff == 0 for diff in off["compute"])
        worst = {part: max(map(abs, off[part])) for part in ("weights", "kv")}
        lines.append(
            f"| {kind} | {len({row[0] for row in rows_of_kind})} | {len(rows_of_kind)} | {worst['weights']} | "
            f"{worst['kv']} | {min(off['compute'])} … {max(off['compute'])} | {min(share):.2f} … {max(share):.2f} | "
            f"{100 * equal / len(rows_of_kind):.1f} % |"
        )
    return "\n".join(lines)


def loads(folder: Path, headers: dict[str, ModelHeader]) -> list[dict[str, Any]]:
    """The dry run, the formula and a real load of the tiny shapes, on the CPU alone and with one paper card."""
    found = []
    for cards in (0, 1):
        wanted = [
            Case(name, Placement(layers), context(512, 9, "f16", flash), cards)
            for name, header in headers.items()
            if name.startswith("tiny-")
            for layers in ((0, header.blocks // 2, header.blocks + 1) if cards else (0,))
            for flash in ("on", "off")
        ]
        real = answers(folder, wanted, real=True)
        dry = answers(folder, [Case(case.model, case.placement, case.context) for case in wanted])
        for case, loaded, simulated in zip(wanted, real, dry, strict=True):
            formula = estimate(headers[case.model], case.placement, case.context, card_names(cards))
            found += [
                {
                    "model": case.model,
                    "cards": cards,
                    "gpu_layers": case.placement.gpu_layers,
                    "flash_attn": case.context.flash_attn,
                    "device": device,
                    "real": numbers(loaded.devices[device]),
                    "dry": numbers(simulated.devices[device]),
                    "formula": numbers(formula[device]),
                }
                for device in ("CPU", *card_names(cards))
            ]
    return found


def numbers(found: Allocated | Bytes) -> str:
    """Weights, KV and compute in one line of JSON."""
    return " ".join(str(getattr(found, part)) for part in PARTS)


def main() -> None:
    """Compare everything, print, save."""
    measured: list[tuple[Any, ...]] = []
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        headers = {shape.name: header_of(write(folder / f"{shape.name}.gguf", shape)) for shape in SHAPES.values()}
        for model, header in headers.items():
            wanted = list(cases(model, header.blocks))
            for case, answer in zip(wanted, answers(folder, wanted), strict=True):
                if answer.error:
                    failures.append(f"{case}: {answer.error}")
                    continue
                formula = estimate(header, case.placement, case.context, card_names(case.cards))
                measured += rows(case, formula, answer.devices)
        real = loads(folder, headers)
    print(table(measured))
    same = {name: sum(row["real"] == row[name] for row in real) for name in ("dry", "formula")}
    print(
        f"\nof {len(real)} device rows of real loads the dry run has {same['dry']} equal, the formula {same['formula']}"
    )
    for failure in failures:
        print(failure)
    save(
        "memory-formula",
        {
            "llama_cpp_python": version("llama_cpp_python"),
            "columns": ",".join(COLUMNS),
            "rows": [",".join(map(str, row)) for row in measured],
            "real_loads": "weights, KV and compute bytes; the weights read into memory, not mapped",
            "loads": real,
            "refused": failures,
        },
    )


if __name__ == "__main__":
    main()
