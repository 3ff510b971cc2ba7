"""Estimated bytes of placements against llama.cpp's own dry run, and the dry run against real loads.

    .venv/bin/python tests/evidence/memory.py        # some minutes

For every shape of shapes.py and several contexts, the bytes of all placements that a plan considers are estimated
(ggufspec/planning/memory.py) from dry runs of a few, and every one of them, or every third, is dry-run as well
(ggufspec/llamacpp/dryrun.py). The shapes that are small enough are loaded for real, too, with the weights read into
memory (``LLAMA_LOAD_MODE_NONE``): with a memory map the host's weights are the range of the file from the first to the
last tensor on the host, shared with the page cache.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ggufspec.llamacpp import dryrun, gguf
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, interpret
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import HOST, ByDevice, MemoryEstimates, MemoryRequest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from common import save

from tests.support.shapes import SHAPES, write

PARTS = ("weights", "kv", "compute")
COLUMNS = "device rows, dry runs for the estimates, rows with equal compute, worst compute above in %, rows below"


@dataclass(frozen=True)
class Family:
    """Placements of one model that a plan considers together, with one context, and which of them are checked."""

    model: str
    name: str
    context: ContextOptions
    placements: tuple[Placement, ...]
    checked: tuple[int, ...]
    cards: int = 1


def model_of(folder: Path, name: str) -> tuple[ModelHeader, Path]:
    """The header of a shape and its metadata-only file."""
    path = write(folder / f"{name}.gguf", SHAPES[name])
    with path.open("rb") as file:
        data = file.read(1 << 22)
    small = folder / f"{name}-metadata.gguf"
    gguf.write_metadata_only([data], small)
    return interpret(path.name, [gguf.parse_header(data)], path.stat().st_size), small


def families(header: ModelHeader, model: str) -> Iterator[Family]:
    """What is compared for one model."""
    counts = tuple(Placement(count) for count in range(header.layers + 1))
    everything = tuple(range(len(counts)))
    some = tuple(n for n in everything if n % 3 == 0 or n < 4 or n > header.layers - 3)
    contexts = {
        "flash attention": ContextOptions(4096, 9, 1, flash_attn="on"),
        "automatic": ContextOptions(4096, 9, 1, swa_full=False),
        "without": ContextOptions(4096, 9, 1, flash_attn="off"),
        "long, q8_0": ContextOptions(32768, 256, 1, cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on"),
        "micro-batch of 128": ContextOptions(4096, 9, 1, flash_attn="on", ubatch_size=128),
    }
    for name, context in contexts.items():
        yield Family(model, name, context, counts, everything if name == "flash attention" else some)
    context = contexts["flash attention"]
    if header.experts:
        experts = tuple(Placement(header.layers, n_cpu_moe=blocks) for blocks in range(header.blocks + 1))
        yield Family(model, "experts on the CPU", context, experts, some[:-1])
    for split in ((1.0, 1.0), (3.0, 1.0)):
        placements = tuple(Placement(count, split) for count in range(2, header.layers + 1))
        checked = tuple(range(0, len(placements), 4))
        yield Family(model, "two cards, {:.0f}:{:.0f}".format(*split), context, placements, checked, 2)


def card_names(count: int) -> tuple[str, ...]:
    return tuple(f"RPC{i}" for i in range(count))


def compare(family: Family, model: tuple[ModelHeader, Path], runs: DryRuns) -> tuple[dict[str, Any], list[str]]:
    """A row of COLUMNS and the rows with unequal compute buffers: placement, device, estimate, llama.cpp."""
    header, file = model
    asked: list[MemoryRequest] = []

    def counted(requests: Sequence[MemoryRequest]) -> list[ByDevice | str]:
        asked.extend(requests)
        return runs(requests)

    requests = [MemoryRequest(header, file, placement, family.context) for placement in family.placements]
    estimates = MemoryEstimates(card_names(family.cards), counted).estimates(requests)
    checked = [family.placements[i] for i in family.checked]
    truths = runs([requests[i] for i in family.checked])
    below, worst, rows, unequal = 0, 0.0, 0, []
    for index, placement, truth in zip(family.checked, checked, truths, strict=True):
        if isinstance(truth, str):  # llama.cpp refuses these types for this model
            return {"refused": truth}, []
        for device, real in truth.items():
            found = estimates[index][device]
            assert (found.weights, found.kv) == (real.weights, real.kv), (family, placement, device)
            rows += 1
            below += found.compute < real.compute
            worst = max(worst, 100 * (found.compute - real.compute) / max(real.compute, 1))
            if found.compute != real.compute:
                where = f"{placement.gpu_layers},{placement.n_cpu_moe},{device}"
                unequal.append(f"{where},{found.compute},{real.compute}")
    row = {"rows": rows, "dry_runs": len(asked), "equal": rows - len(unequal), "above_percent": round(worst, 2)}
    return row | {"below": below}, unequal


def loads(models: dict[str, tuple[ModelHeader, Path]], folder: Path) -> list[dict[str, Any]]:
    """The dry run and a real load of the tiny shapes, on the CPU alone and with one simulated device."""
    found = []
    for cards in (0, 1):
        wanted = [
            (name, Placement(layers), ContextOptions(512, 9, 1, flash_attn=flash))
            for name, (header, _) in models.items()
            if name.startswith("tiny-")
            for layers in ((0, header.blocks // 2, header.blocks + 1) if cards else (0,))
            for flash in ("on", "off")
        ]
        runs = [dryrun.PlacedModel(folder / f"{name}.gguf", *rest) for name, *rest in wanted]
        real, dry = (dryrun.ask(dryrun.DryRunJob((), cards, real), runs) for real in (True, False))
        for (name, placement, context), loaded, simulated in zip(wanted, real, dry, strict=True):
            case = {"model": name, "cards": cards, "gpu_layers": placement.gpu_layers, "flash_attn": context.flash_attn}
            for device in (HOST, *card_names(cards)):
                both = {"real": numbers(loaded.devices[device]), "dry": numbers(simulated.devices[device])}
                found.append(case | {"device": device} | both)
    return found


def numbers(found: dryrun.AllocatedBytes) -> str:
    """Weights, KV and compute in one line of JSON."""
    return " ".join(str(getattr(found, part)) for part in PARTS)


def main() -> None:
    """Compare everything, print, save."""
    results: dict[str, Any] = {}
    models: dict[str, tuple[ModelHeader, Path]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in SHAPES:
            header, _ = models[model] = model_of(folder, model)
            for family in families(header, model):
                cards = dict.fromkeys(card_names(family.cards), "")
                with DryRuns(cards, simulated=True, rpc=(), folder=folder / "cache") as runs:
                    row, unequal = compare(family, models[model], runs)
                print(f"{model:22} {family.name:20} {row}", flush=True)
                results[f"{model}, {family.name}"] = row | {"unequal": unequal}
        real = loads(models, folder)
    rows = [row for row in results.values() if "rows" in row]
    total = {key: sum(row[key] for row in rows) for key in ("rows", "dry_runs", "equal", "below")}
    total["above_percent"] = max(row["above_percent"] for row in rows)
    print(total, f"real loads equal to the dry run: {sum(row['real'] == row['dry'] for row in real)} of {len(real)}")
    save(
        "memory",
        {
            "llama_cpp_python": version("llama_cpp_python"),
            "columns": COLUMNS,
            "unequal": "gpu_layers,n_cpu_moe,device,estimated compute,llama.cpp's compute",
            "total": total,
            "results": results,
            "real_loads": "weights, KV and compute bytes; the weights read into memory, not mapped",
            "loads": real,
        },
    )


if __name__ == "__main__":
    main()
