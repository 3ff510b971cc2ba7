"""Drafter with a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ggufspec.decoding.batch import Batch
from ggufspec.decoding.drafters.base import DraftCandidate, DrafterParts, RowDrafter, ShadowEvaluation
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.timing import time_token
from ggufspec.decoding.rules.base import AcceptanceRule
from ggufspec.llamacpp.model import Context, Logits


class ModelDrafter(RowDrafter):
    """Drafter with a draft model, whose cache persists from round to round.

    After full acceptance the draft still has to decode the last drafted token; after a rejection its cache is rewound
    to before the first rejected token. (llama.cpp's common/speculative.cpp decodes the accepted tokens again.)

    Args:
        model: the draft.
        target_vocab_size: size of the target's vocabulary, which may differ from the draft's by padding at the end.
        batch_size: returns the padded batch size for a number of tokens.
    """

    name = "draft"
    _rows: Logits | None = None  # logits of the batch that the drafter asked for, until they are used
    _first = 0  # index in the text of the first token in the draft's cache; earlier tokens were removed from it

    def __init__(
        self, model: Context, target_vocab_size: int, batch_size: Callable[[int], int] = lambda count: count
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.shared_vocab = min(model.vocab_size, target_vocab_size)

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        self.failure, self._prompt, self._choices, self._rows = "", len(prompt), choices, None
        end = len(prompt) - 1
        cached = min(same, self.has_read, end)
        kept = cached - self._first
        if kept > 0 and end - self._first <= self.model.capacity and kept >= min(self.model.floor, self.model.length):
            self.model.rewind(kept)
        else:
            self.model.rewind(0)
            self._first = max(0, end - self.model.capacity)
        return []

    def let_go(self) -> None:
        """Reset after another use of the model, whose cache now holds a text from its beginning."""
        self._first = 0

    def follow(self, other: ModelDrafter) -> None:
        """Take over the state of another drafter whose cache was copied."""
        self._first = other._first

    def pending(self, length: int) -> int:
        return length - self.has_read

    @property
    def has_read(self) -> int:
        """Number of text tokens that the draft has decoded, including those since removed from its cache."""
        return self._first + self.model.length

    def to_propose(self, text: Sequence[int]) -> Batch | None:
        if self.failure or len(text) - self._first > self.model.capacity:
            return None
        unread = self._known(text[self.has_read :])
        return Batch(unread, 1, self._batch_size(len(unread)), is_prompt=len(unread) > ROWS, draft=self.model)

    def receive(self, rows: Logits) -> None:
        self._rows = rows

    def propose(self, text: Sequence[int], rule: AcceptanceRule) -> DraftCandidate | None:
        rows = self._taken(self.to_propose(text) if self._rows is None else None)
        if rows is None:
            return None
        return self._candidate(rule.penalised(rows[0, : self.shared_vocab], len(text)), rule, len(text))

    def to_catch_up(self, text: Sequence[int], most: int) -> Batch | None:
        end = len(text) - 1
        if end - self.has_read > most:
            self.model.rewind(0)
            self._first = end - most
        end = min(end, self._first + self.model.capacity)
        count = min(ROWS, end - self.has_read)
        if self.failure or count < 1:
            return None
        return Batch(self._known(text[self.has_read : end]), count, is_prompt=True, draft=self.model)

    def catch_up(self, text: Sequence[int], rule: AcceptanceRule, most: int) -> list[ShadowEvaluation]:
        rows = self._taken(self.to_catch_up(text, most) if self._rows is None else None)
        if rows is None:
            return []
        seen = self._foretold(rows[:, : self.shared_vocab], text, self.has_read, rule)
        self.model.rewind(self.model.length)  # all of these tokens are final
        return seen

    def _taken(self, batch: Batch | None) -> Logits | None:
        """Return the logits that the drafter received, or else those of a batch to decode now."""
        rows, self._rows = self._rows, None
        if batch is not None:
            rows = self.model.decode(batch.tokens, outputs=batch.outputs, batch_size=batch.batch_size)
        return rows

    def _batch_size(self, count: int) -> int:
        return self.batch_size(count) if count <= ROWS else 0

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:
        token = self._known(text[self.has_read : self.has_read + 1])
        if self.failure or not token or self.model.length >= self.model.capacity:
            return None
        return time_token(self.model, clock, token)

    def commit(self, length: int) -> None:
        self.model.rewind(min(length - self._first, self.model.length))

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """Replace tokens that only the target has with token 0: this worsens the draft but does not change the text."""
        if max(tokens, default=0) < self.model.vocab_size:
            return tokens
        return [token if token < self.model.vocab_size else 0 for token in tokens]


def make(parts: DrafterParts) -> ModelDrafter:
    assert parts.draft is not None
    return ModelDrafter(parts.draft, parts.target_vocab_size)
