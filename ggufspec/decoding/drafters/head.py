"""The drafter with a head: MTP blocks or EAGLE-3, which read the target's hidden rows.

The head reads certain tokens with the target's rows. It reads the tokens of a chain with its own rows, and again once
they are accepted. Catching up and the first step of a chain are one decode: n drafted tokens take n decodes, and
rejected tokens are never read again. (llama.cpp's common/speculative.cpp catches up separately, over rejected tokens
too.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ggufspec.decoding.drafters.base import Candidate, Parts, RowDrafter, ShadowEvaluation
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.timing import time_token
from ggufspec.decoding.rules.base import Rule
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context, Logits


class HeadDrafter(RowDrafter):
    """Drafter with a head on the target's context, with a cache across rounds; named ``mtp`` or ``eagle3``."""

    def __init__(self, head: Head, target: Context, name: str) -> None:
        self.name = name
        self.head = head
        self._target = target
        self._shared_vocab = min(head.vocab_size, target.vocab_size)
        self._first = 0  # first token of the text that is in its cache
        self._read = 0  # tokens of the text read with the target's rows, or forgotten
        self._chain: list[int] = []  # tokens read with its own rows, after these
        self._rows: list[Logits] = []  # (size,) each: the row before the last certain token, then its own rows

    @property
    def has_read(self) -> int:
        return self._read

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        self.failure, self._prompt, self._choices = "", len(prompt), choices
        self._chain = []
        end = len(prompt) - 1
        if self.head.shares_cache:
            self._forget(end)
            return []
        self._read = min(same, self._read, end)
        if self._read <= self._first:
            self._forget(0)
        return []

    def pending(self, length: int) -> int:
        return length - self._read - len(self._chain)

    def propose(self, text: Sequence[int], rule: Rule) -> Candidate | None:
        if self.failure or len(text) > self.head.capacity:
            return None
        certain = self._target.length + 1  # the target has rows before these
        drafted = len(text) - certain
        if self.head.chained > 1 and drafted >= self.head.chained:
            return None
        logits = self.read(text[:certain], 1) if self._read < certain else None
        while len(self._chain) < drafted:
            logits = self._follow(text[: certain + len(self._chain) + 1], certain)
        if logits is None or not len(logits):
            return None
        row = rule.penalised(logits[-1, : self._shared_vocab], len(text))
        return self._candidate(row, rule, len(text))

    def catch_up(self, text: Sequence[int], rule: Rule, most: int) -> list[ShadowEvaluation]:
        if self.head.shares_cache:
            return []
        end = min(len(text) - 1, self.head.capacity)
        if end - self._read > most:
            self._forget(end - most)
        if self.failure or end <= self._read:
            return []
        rows = self.read(text[:end], ROWS)[:, : self._shared_vocab]
        return self._foretold(rows, text, end, rule)

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:
        if self.failure or self.head.shares_cache or self._read >= self.head.capacity:
            return None  # a cache shared with the target would be overwritten
        self._chain = []
        self._rewind()
        return time_token(self.head, clock, text[-1:])

    def commit(self, length: int) -> None:
        self._chain = []
        self._read = min(self._read, length + 1)
        if self.head.shares_cache:
            self._forget(length)  # it reads one pair at a time, the one after the target's cache

    def read(self, certain: Sequence[int], count: int) -> Logits:
        """Read these tokens with the target's rows, skipping those read already; the target has read all but the last.

        Returns:
            logits (n, vocab) after the last ``count`` tokens or more, if that many are read; a view.
        """
        self._chain = []
        if 0 < self._target.hidden_first >= max(self._read, 1):
            self._forget(self._target.hidden_first + 1)
        self._rewind()
        first = max(self._read, self.head.shift)  # the first token has no pair where pairs stand before their tokens
        tokens = certain[first:]
        if not tokens:
            self._read = len(certain)
            return np.empty((0, self.head.vocab_size), np.float32)
        rows = self._target.hidden(max(first - 1, 0), len(certain) - 1)
        rows = self.head.encode(rows)
        if first == 0:
            rows = np.concatenate([np.zeros((1, self.head.row_size), np.float32), rows])
        silent = max(0, len(tokens) - (ROWS if len(tokens) <= ROWS else count))
        count = len(tokens) - silent
        for block in range(1, self.head.chained):  # each has a cache of its own at the same cells
            self.head.read(tokens, rows, first - self.head.shift, outputs=False, block=block)
            self._rewind()
        self.head.read(tokens[:silent], rows[:silent], first - self.head.shift, outputs=False)
        self._read = len(certain)
        if not count:
            return np.empty((0, self.head.vocab_size), np.float32)
        logits, own = self.head.read(tokens[silent:], rows[silent:], first - self.head.shift + silent, outputs=True)
        self._rows = [rows[-1], own[-1]]
        return logits

    def _follow(self, text: Sequence[int], certain: int) -> Logits:
        """Read the last token of a chain with the head's own row; return the logits after it."""
        drafted = len(text) - certain
        position = certain - 1 - self.head.shift  # position of the last certain token
        if self.head.chained > 1:
            self.head.rewind(position)
            rows = np.stack(self._rows[: drafted + 1])
            logits, own = self.head.read(text[certain - 1 :], rows, position, outputs=True, block=drafted)
        else:
            at = position if self.head.shares_cache else position + drafted
            logits, own = self.head.read(text[-1:], self._rows[drafted][None], at, outputs=True)
        self._chain = list(text[certain:])
        self._rows = [*self._rows[: drafted + 1], own[-1]]
        return logits

    def _forget(self, length: int) -> None:
        self.head.rewind(0)
        self._first = self._read = length

    def _rewind(self) -> None:
        """Remove the pairs of a chain from the cache."""
        self.head.rewind(self._read - self.head.shift if self._read > self._first else 0)


def make(parts: Parts) -> HeadDrafter:
    assert parts.head is not None
    assert parts.target is not None
    return HeadDrafter(parts.head, parts.target, "eagle3" if parts.head.is_eagle3 else "mtp")
