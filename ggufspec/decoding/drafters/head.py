"""Drafter with a prediction head (MTP blocks or EAGLE-3), whose inputs include the target's hidden states.

The head decodes accepted tokens with the target's hidden states. It decodes drafted tokens with its own hidden states,
and again with the target's once they are accepted. Accepted tokens that it has not decoded yet share one decode with
the first step of a chain, so n drafted tokens take n decodes, and rejected tokens are never decoded again. (llama.cpp's
common/speculative.cpp decodes accepted tokens separately, and rejected tokens with them.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ggufspec.decoding.drafters.base import (
    AloneDrafter,
    DraftCandidate,
    DrafterParts,
    RowDrafter,
    ShadowEvaluation,
)
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.timing import time_token
from ggufspec.decoding.rules.base import AcceptanceRule
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context, Logits


class HeadDrafter(AloneDrafter, RowDrafter):
    """Drafter with a head on the target's context, whose cache persists across rounds; named ``mtp`` or ``eagle3``."""

    def __init__(self, head: Head, target: Context, name: str) -> None:
        self.name = name
        self.head = head
        self._target = target
        self._shared_vocab = min(head.vocab_size, target.vocab_size)
        self._first = 0  # index in the text of the first token in the head's cache
        self._read = 0  # number of text tokens decoded with the target's hidden states, or forgotten
        self._chain: list[int] = []  # later tokens, decoded with the head's own hidden states
        self._rows: list[Logits] = []  # (size,): the target's hidden state before the last final token, then the head's

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

    def propose(self, text: Sequence[int], rule: AcceptanceRule) -> DraftCandidate | None:
        if self.failure or len(text) > self.head.capacity:
            return None
        certain = self._target.length + 1  # number of final tokens; the target has decoded all but the last
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

    def catch_up(self, text: Sequence[int], rule: AcceptanceRule, most: int) -> list[ShadowEvaluation]:
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
            self._forget(length)  # such a head decodes only the token after the target's cached ones

    def read(self, certain: Sequence[int], count: int) -> Logits:
        """Decode the new tokens in ``certain`` with hidden states of the target, which has decoded all but the last.

        Returns:
            logits (n, vocab) after at least the last ``count`` tokens, or after all decoded tokens if fewer; a view.
        """
        self._chain = []
        if 0 < self._target.hidden_first >= max(self._read, 1):
            self._forget(self._target.hidden_first + 1)
        self._rewind()
        first = max(self._read, self.head.shift)  # with a shift the first token has no hidden state
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
        for block in range(1, self.head.chained):  # each block has its own cache, with the same cells
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
        """Decode the last token of a chain with the head's own hidden state; return the logits after it."""
        drafted = len(text) - certain
        position = certain - 1 - self.head.shift  # position of the last final token
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
        """Remove a chain's tokens from the head's cache."""
        self.head.rewind(self._read - self.head.shift if self._read > self._first else 0)


def make(parts: DrafterParts) -> HeadDrafter:
    assert parts.head is not None
    assert parts.target is not None
    return HeadDrafter(parts.head, parts.target, "eagle3" if parts.head.is_eagle3 else "mtp")
