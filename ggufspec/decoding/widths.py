"""Classes of batch widths whose logits agree to the bit: what strict mode is built on.

The width of a batch chooses the kernels, and different kernels round differently, so that the text of a greedy run can
depend on how many tokens were verified together. Widths fall into classes whose logits agree to the bit: multiples of
four for 4-bit types on CPUs, all widths but 1 for F16, say. In strict mode every token of the target is decoded in
batches of one class, a single token padded to its smallest width, and the text with and without a draft is the same by
construction. Which widths those are is measured, on the device and at several depths of context.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.options import STRICT_IMPOSSIBLE
from ggufspec.decoding.sampling import Logits
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context

DEPTHS = (32, 248, 288)  # tokens of context: below, across and above llama.cpp's step of 256 cells
_ROOM = 4  # widths of a class from which on more do not count
_SINGLES = 6  # tokens that are decoded one by one; the kernels' tiles are 4 wide or less

Widths = tuple[int, ...]  # ascending


def classes(model: Context, limit: int, depths: Sequence[int] = DEPTHS) -> tuple[Widths, ...]:
    """The classes of the widths 1 … ``limit``, the one of the widest first; each width is in one of them.

    Two widths agree if the logits at equal places of a text are the same to the bit, as far as both reach, at every
    depth (tokens of context; those that do not fit are brought nearer). The model's cache is empty afterwards.
    """
    model.rewind(0)
    limit = min(limit, model.capacity)
    agreeing: dict[int, list[int]] = {width: [] for width in range(limit, 0, -1)}  # at each depth, with which width
    for depth, text in _places(model, limit, depths):
        seen: dict[int, list[int]] = {}  # hashes of the rows of each class's widest
        for width in agreeing:
            hashes = _hashes(_batch(model, text, depth, width))
            match = next((widest for widest, known in seen.items() if known[:width] == hashes), width)
            seen.setdefault(match, hashes)
            agreeing[width].append(match)
    model.rewind(0)
    members: dict[tuple[int, ...], list[int]] = {}
    for width, matches in agreeing.items():
        members.setdefault(tuple(matches), []).append(width)
    return tuple(tuple(reversed(widths)) for widths in members.values())


def strict_widths(model: Context, limit: int, depths: Sequence[int] = DEPTHS) -> Widths:
    """The class of widths that strict mode decodes in: of those with room for a few drafted tokens the narrowest.

    That is mostly the fastest where few tokens are decoded. Timings have no part in it: processes must agree.

    Within it a token's logits depend neither on the width, nor on its place in the batch, nor on padding: that is
    tested beyond what makes a class. A model that cannot pad needs a class of 1, 2, … without a gap. The model's cache
    is empty afterwards.

    Raises:
        ModelError: there is no such class with room for a drafted token.
    """
    best: Widths = ()
    for widths in sorted((_usable(model, widths) for widths in classes(model, limit, depths)), key=_rank):
        if widths and _rank(widths) < _rank(best):
            best = min(best, _usable(model, _steady(model, widths, depths)), key=_rank)
    model.rewind(0)
    if not best:
        raise ModelError(
            f"{STRICT_IMPOSSIBLE} on this device: a token's logits depend on its place in the batch",
            "run without --strict; divergences are then counted and explained",
        )
    return best


def _rank(widths: Widths) -> tuple[int, Widths]:
    return -min(len(widths), _ROOM), widths


def _usable(model: Context, widths: Widths) -> Widths:
    """What of a class can be decoded in; empty if nothing is left that holds a drafted token."""
    if not model.can_pad:
        widths = tuple(width for place, width in enumerate(widths, 1) if width == place)
    return widths if max(widths, default=0) > 1 else ()


def _steady(model: Context, widths: Widths, depths: Sequence[int]) -> Widths:
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


def _places(model: Context, limit: int, depths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(depth, a text that goes ``limit`` tokens further), the shallowest first; each text begins like the others."""
    return [
        (depth, [(7 * i * i + 3 * i + 1) % min(model.vocab_size, 256) for i in range(depth + limit)])
        for depth in sorted({min(depth, model.capacity - limit) for depth in depths})
    ]


def _batch(model: Context, text: Sequence[int], depth: int, count: int, width: int = 0) -> Logits:
    """(count, vocab) logits of the tokens of ``text`` after ``depth``, in one batch; valid until the next call."""
    if model.length < depth:
        model.decode(text[model.length : depth], 0)
    elif model.length > depth:
        model.rewind(depth)
    return model.decode(text[depth : depth + count], count, width)


def _hashes(rows: Logits) -> list[int]:
    """One number for each row; equal rows have equal ones, and a vocabulary of 128k tokens need not be kept."""
    return [hash(row.tobytes()) for row in rows]
