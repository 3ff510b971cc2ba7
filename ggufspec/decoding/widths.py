"""Classes of batch sizes whose logits agree to the bit: the basis of strict mode.

The size of a batch selects the kernels, and different kernels round differently, so that the text of a greedy run can
depend on how many tokens were verified together. Batch sizes fall into classes whose logits agree to the bit, e.g.
multiples of four for 4-bit types on CPUs, or all sizes but 1 for F16. In strict mode every token of the target is
decoded in batches of one class, a single token padded to its smallest size, and the text with and without a draft is
the same by construction. The classes are measured, on the device and at several depths of context.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.options import STRICT_IMPOSSIBLE
from ggufspec.decoding.sampling import Logits
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context

DEPTHS = (32, 248, 288)  # tokens of context: below, across and above llama.cpp's step of 256 cells
_ROOM = 4  # batch sizes of a class beyond which more do not count
_SINGLES = 6  # tokens that are decoded one by one; the kernels' tiles are 4 wide or less

Widths = tuple[int, ...]  # ascending


def classes(model: Context, limit: int, depths: Sequence[int] = DEPTHS) -> tuple[Widths, ...]:
    """Return the classes of the batch sizes 1 … ``limit``, the class of the largest first; each size is in one class.

    Two sizes agree if the logits at equal positions of a text are the same to the bit, as far as both reach, at every
    depth (tokens of context; depths that do not fit are reduced). The model's cache is empty afterwards.
    """
    model.rewind(0)
    limit = min(limit, model.capacity)
    agreeing: dict[int, list[int]] = {width: [] for width in range(limit, 0, -1)}  # for each depth, the matching size
    for depth, text in _places(model, limit, depths):
        seen: dict[int, list[int]] = {}  # row hashes of each class's largest batch
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
    """Return the class of batch sizes for strict mode: the smallest sizes among classes that allow a few drafted
    tokens.

    That is usually the fastest for few tokens. Timings play no part: processes must agree.

    Within the class a token's logits depend neither on the batch size, nor on its place in the batch, nor on padding;
    this is tested in addition to what defines a class. A model that cannot pad needs a class of 1, 2, … without a gap.
    The model's cache is empty afterwards.

    Raises:
        ModelError: no such class can hold a drafted token.
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
    """Return the usable sizes of a class; empty if none of them holds a drafted token."""
    if not model.can_pad:
        widths = tuple(width for place, width in enumerate(widths, 1) if width == place)
    return widths if max(widths, default=0) > 1 else ()


def _steady(model: Context, widths: Widths, depths: Sequence[int]) -> Widths:
    """Return the sizes of a class up to the first token whose logits depend on its place in the batch or on padding.

    The smallest size is decoded from position to position, batch by batch and then one token at a time, padded.
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
    """Return (depth, text reaching ``limit`` tokens further) pairs, shallowest first; all texts begin alike."""
    return [
        (depth, [(7 * i * i + 3 * i + 1) % min(model.vocab_size, 256) for i in range(depth + limit)])
        for depth in sorted({min(depth, model.capacity - limit) for depth in depths})
    ]


def _batch(model: Context, text: Sequence[int], depth: int, count: int, width: int = 0) -> Logits:
    """Return (count, vocab) logits of the tokens of ``text`` after ``depth``, in one batch; valid until the next."""
    if model.length < depth:
        model.decode(text[model.length : depth], 0)
    elif model.length > depth:
        model.rewind(depth)
    return model.decode(text[depth : depth + count], count, width)


def _hashes(rows: Logits) -> list[int]:
    """Return a hash per row, so that rows over a vocabulary of 128k tokens need not be stored for comparison."""
    return [hash(row.tobytes()) for row in rows]
