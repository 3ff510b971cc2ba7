"""Classes of batch sizes with bit-identical logits, on which strict mode is based.

The batch size selects the kernels, and different kernels round differently, so the text of a greedy run can depend on
how many tokens were verified together. Batch sizes fall into classes with bit-identical logits, e.g. multiples of four
for 4-bit types on CPUs, or all sizes but 1 for F16. In strict mode the target decodes every token in batches of one
class, padding a single token to the smallest size, so the text is the same with and without a draft by construction.
The classes are measured on the device, at several context depths.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.decoding.options import STRICT_IMPOSSIBLE
from ggufspec.decoding.sampling import Logits
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context

DEPTHS = (32, 248, 288)  # context depths in tokens: below, across and above llama.cpp's step of 256 cells
_ROOM = 4  # batch sizes beyond this number do not improve a class's rank
_SINGLES = 6  # number of tokens to decode one by one; kernel tiles are at most 4 wide

BatchSizes = tuple[int, ...]  # in ascending order


def classes(model: Context, limit: int, depths: Sequence[int] = DEPTHS) -> tuple[BatchSizes, ...]:
    """Partition the batch sizes 1 … ``limit`` into classes; the class of the largest size comes first.

    Two sizes share a class if, at every depth, the positions that both batches contain have bit-identical logits.
    ``depths`` are in tokens of context and are reduced if they do not fit. The model's cache is empty afterwards.
    """
    model.rewind(0)
    limit = min(limit, model.capacity)
    agreeing: dict[int, list[int]] = {
        batch_size: [] for batch_size in range(limit, 0, -1)
    }  # for each size, the largest size of its class at each depth
    for depth, text in _places(model, limit, depths):
        seen: dict[int, list[int]] = {}  # hashes of the logits rows in each class's largest batch
        for batch_size in agreeing:
            hashes = _hashes(_batch(model, text, depth, batch_size))
            match = next((largest for largest, known in seen.items() if known[:batch_size] == hashes), batch_size)
            seen.setdefault(match, hashes)
            agreeing[batch_size].append(match)
    model.rewind(0)
    members: dict[tuple[int, ...], list[int]] = {}
    for batch_size, matches in agreeing.items():
        members.setdefault(tuple(matches), []).append(batch_size)
    return tuple(tuple(reversed(batch_sizes)) for batch_sizes in members.values())


def strict_batch_sizes(model: Context, limit: int, depths: Sequence[int] = DEPTHS) -> BatchSizes:
    """Return the batch sizes for strict mode: the class with the smallest sizes that has room for a few drafted tokens.

    It is usually the fastest class for few tokens. Timings do not decide, because all processes must agree on a class.

    Within the class a token's logits depend neither on the batch size nor on the token's batch position nor on padding.
    Position and padding are tested separately, because equal logits across batch sizes do not imply this. A model that
    cannot pad needs a class with the sizes 1, 2, … without a gap. The model's cache is empty afterwards.

    Raises:
        ModelError: no such class has room for a drafted token.
    """
    best: BatchSizes = ()
    for batch_sizes in sorted(
        (_usable(model, batch_sizes) for batch_sizes in classes(model, limit, depths)), key=_rank
    ):
        if batch_sizes and _rank(batch_sizes) < _rank(best):
            best = min(best, _usable(model, _steady(model, batch_sizes, depths)), key=_rank)
    model.rewind(0)
    if not best:
        raise ModelError(
            f"{STRICT_IMPOSSIBLE} on this device: a token's logits depend on its place in the batch",
            "run without --strict; divergences are then counted and explained",
        )
    return best


def _rank(batch_sizes: BatchSizes) -> tuple[int, BatchSizes]:
    return -min(len(batch_sizes), _ROOM), batch_sizes


def _usable(model: Context, batch_sizes: BatchSizes) -> BatchSizes:
    """Return the usable sizes of a class; empty if no usable size has room for a drafted token."""
    if not model.can_pad:
        batch_sizes = tuple(batch_size for place, batch_size in enumerate(batch_sizes, 1) if batch_size == place)
    return batch_sizes if max(batch_sizes, default=0) > 1 else ()


def _steady(model: Context, batch_sizes: BatchSizes, depths: Sequence[int]) -> BatchSizes:
    """Return the sizes of a class up to the first batch position at which position or padding changes the logits.

    Each batch's tokens are decoded again in consecutive batches of the smallest size, then one at a time with padding.
    """
    narrow, count = min(batch_sizes), max(batch_sizes)
    for depth, text in reversed(_places(model, count, depths)):  # deepest first, so that the text is decoded only once
        known = _hashes(_batch(model, text, depth, count))
        for step, end in ((narrow, count), (1, min(count, _SINGLES))):
            found = [
                one
                for start in range(0, end, step)
                for one in _hashes(_batch(model, text, depth + start, min(step, end - start), narrow))
            ]
            same = next((place for place in range(end) if found[place] != known[place]), count)
            if same < count:
                kept = tuple(batch_size for batch_size in batch_sizes if batch_size <= same)
                return _steady(model, kept, depths) if kept else ()
    return batch_sizes


def _places(model: Context, limit: int, depths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return (depth, text of depth + ``limit`` tokens) pairs, shallowest first; each text is a prefix of the next."""
    return [
        (depth, [(7 * i * i + 3 * i + 1) % min(model.vocab_size, 256) for i in range(depth + limit)])
        for depth in sorted({min(depth, model.capacity - limit) for depth in depths})
    ]


def _batch(model: Context, text: Sequence[int], depth: int, count: int, batch_size: int = 0) -> Logits:
    """Decode ``count`` tokens after ``depth`` tokens; return (count, vocab) logits, valid until the next call."""
    if model.length < depth:
        model.decode(text[model.length : depth], 0)
    elif model.length > depth:
        model.rewind(depth)
    return model.decode(text[depth : depth + count], count, batch_size)


def _hashes(rows: Logits) -> list[int]:
    """Return one hash per row, so that rows of 128k logits need not be stored for comparison."""
    return [hash(row.tobytes()) for row in rows]
