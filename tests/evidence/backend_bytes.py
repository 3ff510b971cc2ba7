"""Planned bytes against a real load on the card that is here: planned on the card itself, and as if it were not here.

    .venv/bin/python tests/evidence/backend_bytes.py        # half a minute; Mesa's software driver:
    LLAMA_CPP_LIB_PATH="$(scripts/vulkan)" GGML_VK_VISIBLE_DEVICES=0 .venv/bin/python tests/evidence/backend_bytes.py

The tiny shapes of shapes.py with the placements and contexts of tests/evidence/memory.py. Each is loaded for real
with its weights, and its bytes on the card are compared with two plans: by dry runs on the card, and by dry runs on a
simulated device, as for a card that is not here; without the f16 copy of a quantised cache, which CUDA makes and Vulkan
does not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ggufspec.llamacpp import dryrun, probe
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import ByDevice, MemoryEstimates, MemoryRequest, f16_scratch_bytes, layer_devices

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from common import save
from memory import Family, families, model_of

from tests.support.shapes import SHAPES

MIB = 2**20
PLANS = ("here", "simulated")


@dataclass(frozen=True)
class Row:
    """Bytes of one placement on the card: really, and as planned; weights, cache and compute buffer together."""

    family: Family
    gpu_layers: int
    on_cpu: int
    real: int
    planned: dict[str, int]

    def over(self, plan: str) -> int:
        """Bytes planned too many; below zero, too few."""
        return self.planned[plan] - self.real

    def as_text(self) -> str:
        """One line of the JSON."""
        where = f"{self.family.model}, {self.family.name}, {self.gpu_layers}, {self.on_cpu}"
        return f"{where}: {self.real} " + " ".join(f"{self.over(plan):+d}" for plan in PLANS)


def more_families(header: ModelHeader, model: str) -> Iterator[Family]:
    """Those of tests/evidence/memory.py on one card, a long context in f16, without copies of the host's weights, and
    feed-forward weights on the CPU.
    """
    yield from (family for family in families(header, model) if family.cards == 1)
    counts = tuple(Placement(count) for count in range(header.layers + 1))
    yield Family(model, "long", ContextOptions(32768, 256, 1, flash_attn="on"), counts, ())
    yield Family(model, "no op offload", ContextOptions(4096, 9, 1, flash_attn="on", op_offload=False), counts, ())
    if not header.experts and any(header.cached):
        kept = tuple(Placement(header.layers, n_cpu_ffn=blocks) for blocks in range(1, header.blocks + 1))
        yield Family(model, "feed-forward on the CPU", ContextOptions(4096, 9, 1, flash_attn="on"), kept, ())


def compare(family: Family, folder: Path, runs: dict[str, DryRuns], card: str) -> list[Row]:
    """Real loads and both plans of all placements of a family."""
    header, small = model_of(folder, family.model)
    whole = folder / f"{family.model}.gguf"
    requests = [MemoryRequest(header, small, placement, family.context) for placement in family.placements]
    planned: dict[str, Sequence[ByDevice]] = {
        plan: MemoryEstimates((card,), dry_runs).estimates(requests) for plan, dry_runs in runs.items()
    }
    wanted = [dryrun.PlacedModel(whole, placement, family.context) for placement in family.placements]
    devices = [layer_devices(header.blocks, one.placement, 1) for one in requests]
    scratch = [f16_scratch_bytes(header, one, family.context, 2)[1] for one in devices]
    rows = []
    for i, loaded in enumerate(dryrun.ask(dryrun.DryRunJob(real=True), wanted)):
        if loaded.error:
            print(f"{family.model}, {family.name}, {family.placements[i]}: {loaded.error}")
            continue
        real = loaded.devices[card] if card in loaded.devices else dryrun.AllocatedBytes(0, 0, 0)
        placement = family.placements[i]
        rows.append(
            Row(
                family,
                placement.gpu_layers,
                placement.n_cpu_moe or placement.n_cpu_ffn,
                real.weights + real.kv + real.compute,
                {"here": planned["here"][i][card].total, "simulated": planned["simulated"][i][card].total - scratch[i]},
            )
        )
    return rows


def summary(rows: Sequence[Row], plan: str) -> dict[str, Any]:
    """How far a plan is from the truth; a percentage only of what is over by more than 1 MiB."""
    over = [row.over(plan) for row in rows]
    large = [100 * row.over(plan) / row.real for row in rows if row.over(plan) > MIB]
    return {
        "rows": len(rows),
        "equal": over.count(0),
        "below": sum(size < 0 for size in over),
        "most_below_bytes": -min(over),
        "most_over_bytes": max(over),
        "most_over_percent": max(100 * row.over(plan) / row.real for row in rows if row.real),
        "most_over_percent_beyond_1_mib": max(large, default=0.0),
    }


def main() -> None:
    """Compare everything, print, save."""
    cards = [d for d in probe.inspect().devices if d.kind in ("gpu", "igpu") and not d.is_remote]
    if not cards:
        sys.exit("no card is here: scripts/vulkan makes one of Mesa's software driver")
    card = cards[0]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = {plan: {card.name: card.description} for plan in PLANS}
        runs = {
            plan: DryRuns(asked[plan], simulated=plan == "simulated", rpc=(), folder=folder / plan) for plan in PLANS
        }
        with runs["here"], runs["simulated"]:
            for model in (one for one in SHAPES if one.startswith("tiny-")):
                header, _ = model_of(folder, model)
                for family in more_families(header, model):
                    rows += compare(family, folder, runs, card.name)
    result = {plan: summary(rows, plan) for plan in PLANS}
    for plan, figures in result.items():
        print(plan, figures)
    save(
        "backend-bytes",
        {
            "llama_cpp_python": version("llama_cpp_python"),
            "card": card.description,
            "total": result,
            "columns": "model, context, gpu_layers, blocks whose experts or feed-forward weights are on the CPU: bytes "
            "on the card of a real load, planned more by dry runs on the card, and on a simulated device",
            "rows": [row.as_text() for row in rows],
        },
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/evidence"),
    )


if __name__ == "__main__":
    main()
