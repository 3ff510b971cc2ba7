"""Strict mode: every token of the target is decoded in batches of one width class.

The width of a batch chooses the kernels, and different kernels round differently, so that the text of a greedy run can
depend on how many tokens were verified together. Widths fall into classes whose logits agree to the bit (measured:
multiples of four, on CPUs with flash attention). Within one class the text with and without a draft is the same by
construction. A single token is padded to the smallest width of the class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggufspec.decoding.loop import Logits, Model
from ggufspec.errors import ModelError

UNIT = 4
LIMIT = 16  # widest batch; longer drafts are verified in several
_PROBE_DEPTHS = (32, 248, 288)  # tokens of context: below, across and above llama.cpp's step of 256 cells


class WidthLocked:
    """A model that is only ever asked for batches of ``UNIT`` tokens, or of its multiples up to ``limit``."""

    def __init__(self, model: Model, limit: int) -> None:
        self.model = model
        self.limit = limit

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def capacity(self) -> int:
        return self.model.capacity

    @property
    def length(self) -> int:
        return self.model.length

    def decode(self, tokens: Sequence[int], outputs: int, width: int = 0) -> Logits:
        """As the model's own, padded to the class; ``outputs`` is 0 (a prompt is read) or every token."""
        if outputs == 0:
            return self.model.decode(tokens, 0)
        if outputs != len(tokens):
            raise ValueError("strict mode gives the logits of all tokens or of none")
        if len(tokens) <= self.limit:
            return self.model.decode(tokens, outputs, max(width, padded(len(tokens))))
        parts = [tokens[i : i + self.limit] for i in range(0, len(tokens), self.limit)]
        return np.concatenate([self.model.decode(part, len(part), padded(len(part))).copy() for part in parts])

    def rewind(self, length: int) -> None:
        self.model.rewind(length)


def padded(count: int) -> int:
    """The smallest multiple of ``UNIT`` that holds ``count`` tokens."""
    return -(-count // UNIT) * UNIT


def lock_widths(model: Model) -> WidthLocked:
    """Measure the width class of ``model`` and lock it in; the model's cache is empty afterwards.

    Raises:
        ModelError: even batches of one width depend on where in the batch a token stands.
    """
    limit = LIMIT
    for depth in sorted({min(depth, model.capacity - LIMIT) for depth in _PROBE_DEPTHS}):
        if depth < 0:
            continue
        tokens = [(7 * i * i + 3 * i + 1) % min(model.vocab_size, 256) for i in range(depth + LIMIT)]
        reference = _logits_by(model, tokens, depth, UNIT)
        if not np.array_equal(_logits_by(model, tokens, depth, 1), reference):
            raise ModelError(
                "strict mode cannot be kept on this device: a token's logits depend on its place in the batch",
                "run without --strict; divergences are then counted and explained",
            )
        for width in range(2 * UNIT, limit + 1, UNIT):
            if not np.array_equal(_logits_by(model, tokens, depth, width), reference):
                limit = width - UNIT
                break
    model.rewind(0)
    return WidthLocked(model, limit)


def _logits_by(model: Model, tokens: Sequence[int], depth: int, step: int) -> Logits:
    """Logits of the tokens after ``depth``, ``step`` at a time in padded batches; (LIMIT, vocab)."""
    if model.length < depth:
        model.decode(tokens[model.length : depth], 0)
    model.rewind(depth)
    return np.concatenate(
        [
            model.decode(tokens[i : i + step], len(tokens[i : i + step]), padded(step)).copy()
            for i in range(depth, depth + LIMIT, step)
        ]
    )
