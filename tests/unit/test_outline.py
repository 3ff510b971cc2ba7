"""What fits, by sizes alone: against the formula that has the headers, and at the edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models.headers import read_headers
from ggufspec.models.profile import ModelSource, load_profile
from ggufspec.planning import outline
from ggufspec.planning.outline import ModelMemory, PairFit, of_sizes, quick_fit
from tests.support import shapes

GIB = 1 << 30
CARDS = ("GPU0",)


def glance(model: ModelSource | None, context: ContextOptions) -> ModelMemory:
    assert model is not None
    assert model.size_bytes is not None
    assert model.layers is not None
    assert model.cache_bytes is not None
    return of_sizes(model.size_bytes, model.layers, model.cache_bytes, context)


@pytest.mark.parametrize(("gib", "least", "most"), [(12, 10, 30), (24, 35, 60), (32, 60, 81)])
def test_a_profile_s_sizes_say_what_its_headers_say(tmp_path: Path, gib: int, least: int, most: int) -> None:
    """Llama-3-70B beside the 8B on a card, within three layers of 81."""
    profile, options = load_profile("llama3-70b"), DecoderOptions(ctx_size=2048)
    contexts = options.context(with_draft=True), options.draft_context()
    by_sizes = [
        glance(model, context) for model, context in zip((profile.target, profile.draft), contexts, strict=True)
    ]
    read = []
    for name, context in zip(("llama3-70b-q3_k_s", "llama3-8b-q3_k_l"), contexts, strict=True):
        (known,) = read_headers([shapes.write(tmp_path / f"{name}.gguf", shapes.SHAPES[name])])
        read.append(outline.of_header(known.header, context, CARDS))
        part = by_sizes[len(read) - 1]
        assert part.layers == read[-1].layers
        assert part.on_host == pytest.approx(read[-1].on_host, rel=0.03)
    about, exact = (quick_fit(*parts, gib * GIB, 64 * GIB) for parts in (by_sizes, read))
    assert about.answer == exact.answer == "partly"
    assert about.layers is not None
    assert exact.layers is not None
    assert least <= exact.layers <= most
    assert abs(about.layers - exact.layers) <= 3


PART = ModelMemory(10, lambda count: 100 * count + (50 if count else 0), 1000)  # 1,050 on a card
DRAFT = ModelMemory(2, lambda count: 10 * count, 20)


@pytest.mark.parametrize(
    ("draft", "cards", "memory", "expected"),
    [
        (None, None, 1000, PairFit("whole")),
        (None, None, 999, PairFit("no")),
        (DRAFT, None, 1019, PairFit("no")),
        (None, 1050, 0, PairFit("whole", 10)),
        (None, 1049, 1000, PairFit("partly", 9)),
        (None, 151, 1000, PairFit("partly", 1)),
        (None, 149, 1000, PairFit("partly", 0)),
        (None, 500, 499, PairFit("no", 4)),
        (DRAFT, 1069, 1000, PairFit("partly", 9)),
        (DRAFT, 1070, 0, PairFit("whole", 10)),
        (DRAFT, 5, 2000, PairFit("partly", 0)),
    ],
)
def test_what_fits(draft: ModelMemory | None, cards: int | None, memory: int, expected: PairFit) -> None:
    assert quick_fit(PART, draft, cards, memory) == expected


def test_a_smaller_cache_takes_less() -> None:
    options = DecoderOptions(ctx_size=4096 - 64)
    whole = of_sizes(10_000, 10, 1024, options.context(with_draft=False))
    half = of_sizes(10_000, 10, 1024, replace(options, cache_type_k="q8_0").context(with_draft=False))
    assert whole.on_cards(10) - whole.on_cards(0) == half.on_cards(10) - half.on_cards(0) + 1024 * 4096 * 15 // 64
