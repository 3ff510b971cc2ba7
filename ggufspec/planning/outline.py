"""What of a pair fits, at a glance: for the list of profiles, where nothing is downloaded and no dry run is made. Pure.

With a header the sums of :mod:`ggufspec.planning.memory` say what layers take; without one, the few sizes that a
profile has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ggufspec.llamacpp.options import KV_TYPES, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.memory import HOST, resident

# Of compute buffers; Llama-3-70B's have 204 MiB.
_BUFFERS_BYTES = 200 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One model: what ``n`` of its layers take of the cards, ``on_cards(n)``, and all of them of the host's memory."""

    layers: int
    on_cards: Callable[[int], int]
    on_host: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits: all of it, a part, or not even with the rest in the host's memory.

    ``layers`` are those of the target that fit on the cards next to the whole draft; None without a card.
    """

    answer: Literal["whole", "partly", "no"]
    layers: int | None = None


def of_header(header: ModelHeader, context: ContextOptions, cards: tuple[str, ...]) -> Part:
    """By the sums of :mod:`ggufspec.planning.memory`, and usual compute buffers."""

    def on_cards(count: int) -> int:
        placed = resident(header, Placement(count), context, cards)
        return sum(placed[name].total for name in cards) + (_BUFFERS_BYTES if count else 0)

    return Part(header.layers, on_cards, resident(header, Placement(0), context)[HOST].total + _BUFFERS_BYTES)


def of_sizes(size_bytes: int, layers: int, cache_bytes: int, context: ContextOptions) -> Part:
    """By sizes alone, as if all layers were alike; ``cache_bytes`` are those of a token in the f16 KV cache."""
    types = (context.cache_type_k, context.cache_type_v)
    per_number = sum(size / numbers for numbers, size in (KV_TYPES[kind] for kind in types))
    whole = int(size_bytes + cache_bytes * per_number / 4 * context.cells)  # f16 has two bytes a number, twice

    def on_cards(count: int) -> int:
        return whole * count // layers + (_BUFFERS_BYTES if count else 0)

    return Part(layers, on_cards, whole + _BUFFERS_BYTES)


def fit(target: Part, draft: Part | None, cards_bytes: int | None, memory_bytes: int) -> Fit:
    """What of a pair fits into all cards together, None without one, and into the host's free memory."""
    all_of_it = target.on_host + (draft.on_host if draft else 0)
    if cards_bytes is None:
        return Fit("whole" if all_of_it <= memory_bytes else "no")
    room = cards_bytes - (draft.on_cards(draft.layers) if draft else 0)
    if target.on_cards(target.layers) <= room:
        return Fit("whole", target.layers)
    fits = (count for count in range(target.layers, 0, -1) if target.on_cards(count) <= room)
    layers = next(fits, 0)
    return Fit("partly" if all_of_it <= memory_bytes + cards_bytes else "no", layers)
