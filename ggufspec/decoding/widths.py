"""Classes of batch widths whose logits agree to the bit: what strict mode is built on.

The width of a batch chooses the kernels, and different kernels round differently, so that the text of a greedy run can
depend on how many tokens were verified together. Widths fall into classes whose logits agree to the bit: multiples of
four for 4-bit types on CPUs, all widths but 1 for F16, say. In strict mode every token of the target is decoded in
batches of one class, a single token padded to its smallest width, and the text with and without a draft is the same by
construction. Which widths those are is measured, on the device and at several depths of context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ggufspec.decoding.model import Logits, Model
from ggufspec.decoding.options import STRICT_IMPOSSIBLE
from ggufspec.errors import ModelError

DEPTHS = (32, 248, 288)  # tokens of context: below, across and above llama.cpp's step of 256 cells
LEADING = 8  # tokens of a row that may come into question
_ROOM = 4  # widths of a class from which on more do not count
_SINGLES = 6  # tokens that are decoded one by one; the kernels' tiles are 4 wide or less


@dataclass(frozen=True, slots=True)
class WidthClass:
    """Widths that agree to the bit, ascending.

    ``noise`` is the largest change, against the class of the widest width, of the difference between any two of a row's
    leading tokens.
    """

    widths: tuple[int, ...]
    noise: float


def classes(model: Model, limit: int, depths: Sequence[int] = DEPTHS) -> tuple[WidthClass, ...]:
    """The classes of the widths 1 … ``limit``, the one of the widest first; each width is in one of them.

    Two widths agree if the logits at equal places of a text are the same to the bit, as far as both reach, at every
    depth. The model's cache is empty afterwards.

    Args:
        model: whose widths are compared.
        limit: the widest batch; less where the context is smaller.
        depths: tokens of context at which they are compared; those that do not fit are brought nearer.
    """
    model.rewind(0)
    limit = min(limit, model.capacity)
    agreeing: dict[int, list[int]] = {width: [] for width in range(1, limit + 1)}  # at each depth, with which width
    changes = dict.fromkeys(agreeing, 0.0)
    for depth, text in _places(model, limit, depths):
        reference = _batch(model, text, depth, limit).copy()
        kept = min(LEADING, model.vocab_size)
        leading = np.argpartition(reference, -kept, axis=1)[:, -kept:]
        seen: dict[int, list[int]] = {}  # hashes of the rows of each class's widest
        for width in range(limit, 0, -1):
            rows = reference if width == limit else _batch(model, text, depth, width)
            hashes = _hashes(rows)
            match = next((widest for widest, known in seen.items() if known[:width] == hashes), width)
            if match == width:
                seen[width] = hashes
            agreeing[width].append(match)
            if match != limit:
                now, before = (np.take_along_axis(of[:width], leading[:width], axis=1) for of in (rows, reference))
                change = now - before
                changes[width] = max(changes[width], float(np.ptp(change, axis=1).max()))
    model.rewind(0)
    members: dict[tuple[int, ...], list[int]] = {}
    for width in range(limit, 0, -1):
        members.setdefault(tuple(agreeing[width]), []).append(width)
    return tuple(
        WidthClass(tuple(reversed(widths)), max(changes[width] for width in widths)) for widths in members.values()
    )


def noise(found: Sequence[WidthClass]) -> float:
    """By how much the difference between two leading tokens may change from width to width."""
    return max((one.noise for one in found), default=0.0)


def strict_widths(model: Model, limit: int, depths: Sequence[int] = DEPTHS) -> tuple[int, ...]:
    """The class of widths that strict mode decodes in: of those with room for a few drafted tokens the narrowest.

    That is mostly the fastest where few tokens are decoded. Timings have no part in it: processes must agree.

    Within it a token's logits depend neither on the width, nor on its place in the batch, nor on padding: that is
    tested beyond what makes a class. The model's cache is empty afterwards.

    Args:
        model: the target; one that cannot pad (``can_pad`` is False) needs a class of 1, 2, … without a gap.
        limit: the widest batch that the context allows.
        depths: tokens of context at which the widths are compared.

    Raises:
        ModelError: there is no such class with room for a drafted token.
    """
    can_pad = getattr(model, "can_pad", True)
    candidates = [_usable(one.widths, can_pad) for one in classes(model, limit, depths)]
    best: tuple[int, ...] = ()
    for widths in sorted(filter(None, candidates), key=_rank):
        if best and _rank(best) <= _rank(widths):
            break
        steady = _usable(_steady(model, widths, depths), can_pad)
        if steady and (not best or _rank(steady) < _rank(best)):
            best = steady
    model.rewind(0)
    if not best:
        raise ModelError(
            f"{STRICT_IMPOSSIBLE} on this device: a token's logits depend on its place in the batch",
            "run without --strict; divergences are then counted and explained",
        )
    return best


def _rank(widths: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Lower is better."""
    return -min(len(widths), _ROOM), widths


def _usable(widths: tuple[int, ...], can_pad: bool) -> tuple[int, ...]:
    """What of a class can be decoded in; empty if nothing is left that holds a drafted token."""
    if not can_pad:
        widths = tuple(width for place, width in enumerate(widths, 1) if width == place)
    return widths if widths and max(widths) > 1 else ()


def _steady(model: Model, widths: tuple[int, ...], depths: Sequence[int]) -> tuple[int, ...]:
    """The widths of a class up to the first token whose logits depend on its place in the batch or on padding.

    The narrowest width is read from place to place, batch by batch and then one token at a time, padded.
    """
    narrow, count = min(widths), max(widths)
    for depth, text in reversed(_places(model, count, depths)):  # the deepest first, so that the text is read once
        known = _hashes(_batch(model, text, depth, count))
        for step, end in ((narrow, count), (1, min(count, _SINGLES))):
            found = [
                one
                for start in range(0, end, step)
                for one in _hashes(_batch(model, text, depth + start, min(step, end - start), narrow))
            ]
            same = next((place for place in range(end) if found[place] != known[place]), count)
            if same < count:
                kept = tuple(width for width in widths if width <= same)
                return _steady(model, kept, depths) if kept else ()
    return widths


def _places(model: Model, limit: int, depths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(depth, a text that goes ``limit`` tokens further), the shallowest first; each text begins like the others."""
    return [
        (depth, [(7 * i * i + 3 * i + 1) % min(model.vocab_size, 256) for i in range(depth + limit)])
        for depth in sorted({min(depth, model.capacity - limit) for depth in depths})
    ]


def _batch(model: Model, text: Sequence[int], depth: int, count: int, width: int = 0) -> Logits:
    """(count, vocab) logits of the tokens of ``text`` behind ``depth``, in one batch; valid until the next call."""
    if model.length < depth:
        model.decode(text[model.length : depth], 0)
    elif model.length > depth:
        model.rewind(depth)
    return model.decode(text[depth : depth + count], count, width)


def _hashes(rows: Logits) -> list[int]:
    """One number for each row; equal rows have equal ones, and a vocabulary of 128k tokens need not be kept."""
    return [hash(row.tobytes()) for row in rows]
