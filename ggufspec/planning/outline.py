"""Quick estimate of whether a pair fits in memory, for the list of profiles, without downloads or dry runs. Pure.

Sizes come from a header (:mod:`ggufspec.planning.memory`), or else from the few sizes that a profile states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ggufspec.llamacpp.options import KV_TYPES, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.memory import HOST, resident

# Assumed size of one model's compute buffers; Llama-3-70B's take 204 MiB.
_BUFFERS_BYTES = 200 << 20


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model in bytes: ``on_cards(n)`` for ``n`` layers on GPUs; ``on_host`` if it is all in RAM."""

    layers: int
    on_cards: Callable[[int], int]
    on_host: int


@dataclass(frozen=True, slots=True)
class PairFit:
    """Fit of a pair (``no``: GPUs and RAM together are too small), and how many target layers fit next to the draft."""

    answer: Literal["whole", "partly", "no"]
    layers: int | None = None


def of_header(header: ModelHeader, context: ContextOptions, cards: tuple[str, ...]) -> ModelMemory:
    """Return a model's memory from the sums in :mod:`ggufspec.planning.memory` plus assumed compute buffers."""

    def on_cards(count: int) -> int:
        placed = resident(header, Placement(count), context, cards)
        return sum(placed[name].total for name in cards) + (_BUFFERS_BYTES if count else 0)

    return ModelMemory(header.layers, on_cards, resident(header, Placement(0), context)[HOST].total + _BUFFERS_BYTES)


def of_sizes(size_bytes: int, layers: int, cache_bytes: int, context: ContextOptions) -> ModelMemory:
    """Return a model's memory from sizes alone, assuming equal layers; ``cache_bytes``: f16 KV cache of one token."""
    types = (context.cache_type_k, context.cache_type_v)
    per_number = sum(size / numbers for numbers, size in (KV_TYPES[kind] for kind in types))
    whole = int(size_bytes + cache_bytes * per_number / 4 * context.cells)  # f16: 4 bytes for a key and a value element

    def on_cards(count: int) -> int:
        return whole * count // layers + (_BUFFERS_BYTES if count else 0)

    return ModelMemory(layers, on_cards, whole + _BUFFERS_BYTES)


def quick_fit(target: ModelMemory, draft: ModelMemory | None, cards_bytes: int | None, memory_bytes: int) -> PairFit:
    """Return how much of a pair fits in all GPUs together (None: no GPU) and in the free RAM."""
    all_of_it = target.on_host + (draft.on_host if draft else 0)
    if cards_bytes is None:
        return PairFit("whole" if all_of_it <= memory_bytes else "no")
    room = cards_bytes - (draft.on_cards(draft.layers) if draft else 0)
    if target.on_cards(target.layers) <= room:
        return PairFit("whole", target.layers)
    fits = (count for count in range(target.layers, 0, -1) if target.on_cards(count) <= room)
    layers = next(fits, 0)
    return PairFit("partly" if all_of_it <= memory_bytes + cards_bytes else "no", layers)
