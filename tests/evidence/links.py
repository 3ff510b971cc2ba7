"""When a draft is worth it for Llama-3-70B Q3_K_S with its 8B: three cards, six links, two hosts that are not here.

The files have the published shapes and no weights. Each row is a plan: target-only at its best, the pair as llama.cpp
verifies by itself, and as a plan may choose, where the card verifies with the CPU's weights.

.venv/bin/python tests/evidence/links.py       # a minute or two
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import save
from honest_rival import DRAFT, TARGET

from ggufspec.api.pairs import open_pair
from ggufspec.api.plan import make_plan
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH
from ggufspec.models.profile import PairSpec
from ggufspec.settings.table import Settings
from tests.support import shapes

CARDS = ("RTX 4090", "RTX 3090", "RTX 4070 Ti")
LINKS = ("pcie3x8", "pcie3x16", "pcie4x8", "pcie4x16", "pcie5x8", "pcie5x16")
# GB/s of two channels, and cores
HOSTS = {
    "DDR4-3200, 8 cores with AVX2": (51.2, "8xavx2"),
    "DDR5-5600, 16 cores with AVX-512": (89.6, "16xavx512"),
}
ACCEPTANCE = 0.8


def row(spec: PairSpec, card: str, link: str, host: str) -> dict[str, Any]:
    """Tokens/s of the ways to run the pair on one machine."""
    memory, cpu = HOSTS[host]
    there = Settings(gpu=(card,), link=link, ram_bandwidth=memory, cpu=cpu, acceptance=ACCEPTANCE)
    as_usual = Settings(op_offload_min_batch=OP_OFFLOAD_MIN_BATCH, load_mode="mmap").over(there)
    best, usual = (make_plan(open_pair(spec, given)).plan for given in (there, as_usual))
    assert best.pair
    assert usual.pair
    return {
        "card": card,
        "link": link,
        "host": host,
        "target_only": best.target_only.tokens_per_s,
        "as_usual": usual.pair.tokens_per_s,
        "pair": best.pair.tokens_per_s,
        "draft_length": best.pair.draft_length,
        "gpu_layers": best.pair.target.gpu_layers,
        "n_cpu_ffn": best.pair.target.n_cpu_ffn,
        "streams_from": best.pair.context.op_offload_min_batch,
        "target_only_streams_from": best.target_only.context.op_offload_min_batch,
        "break_even_acceptance": best.break_even_acceptance,
    }


def main() -> None:
    """Plan, print, save."""
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / TARGET, Path(name) / DRAFT
        for path, shape in ((target, "llama3-70b-q3_k_s"), (draft, "llama3-8b-q3_k_l")):
            shapes.write(path, shapes.SHAPES[shape], tokenizer=True)
        pair = PairSpec("llama3-70b", target, draft)
        rows = []
        for card, host, link in product(CARDS, HOSTS, LINKS):
            rows.append(row(pair, card, link, host))
            print(rows[-1], flush=True)
    save("links", {"acceptance": ACCEPTANCE, "rows": rows})


if __name__ == "__main__":
    main()
