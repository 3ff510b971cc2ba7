"""The protocol of drafters.

A drafter proposes one token at a time, so that the policy can weigh each against its cost before it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ggufspec.decoding.rules.base import DraftToken, Rule
from ggufspec.decoding.sampling import Logits, confidence
from ggufspec.errors import ModelError
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context


@dataclass(frozen=True, slots=True)
class Candidate:
    """The next token that a drafter proposes, not drawn yet."""

    confidence: float  # 0 to 1, the drafter's own estimate of acceptance, from what is known before the draw
    draw: Callable[[], DraftToken]


@dataclass(frozen=True, slots=True)
class ShadowEvaluation:
    """A drafter's guess at a position whose token is decided."""

    confidence: float  # as in its Candidate
    agreement: float  # 1 if it was the token that came, 0 if not; with speculative sampling its probability


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a pair from which a drafter is made."""

    target_vocab_size: int
    draft: Context | None = None
    corpus: Sequence[int] = ()  # token ids of --lookup-corpus
    target: Context | None = None  # context whose hidden rows a head reads
    head: Head | None = None  # head on the target


class Drafter(Protocol):
    name: str  # name in the registry
    failure: str  # why it has given up, for the user; else empty

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        """Start a new text with this prompt; a drafter whose reading costs time reads it later.

        Args:
            prompt: (n,) token ids.
            choices: (m,) the target's likeliest token at each of the prompt's last m positions, whatever stands there.
            same: length of the prefix shared with the previous text, which a cache may retain.

        Returns:
            what it would have proposed at these positions, judged by ``choices``, as far as it knows yet.
        """
        ...

    def pending(self, length: int) -> int:
        """Return how many tokens it must read before it can propose the one at index ``length``; 0: at no cost."""
        ...

    def propose(self, text: Sequence[int], rule: Rule) -> Candidate | None:
        """Return the candidate after ``text`` (emitted tokens and the chain so far); None if it has none."""
        ...

    def catch_up(self, text: Sequence[int], rule: Rule, most: int) -> list[ShadowEvaluation]:
        """Read emitted tokens that were not read yet; return what it would have proposed there.

        If there are more than ``most``, a drafter whose reading costs time forgets everything before the last ``most``.
        Each position is reported once, drafted or not; a drafter that reports none is judged by a prior forever.
        """
        ...

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:
        """Return the seconds to decode one unread token, the shorter of two timings; the cache is left as it was.

        None if it cannot be timed now.
        """
        ...

    def commit(self, length: int) -> None:
        """Make the first ``length`` tokens of the text final, and only these."""
        ...


class RowDrafter:
    """Base of drafters whose candidates are rows of logits.

    A damaged draft, one whose logits are NaN, costs the speedup and not the answer.
    """

    failure = ""
    _prompt = 0  # tokens of the prompt
    _choices: Sequence[int] = ()  # the target's likeliest tokens at its last positions

    def _candidate(self, row: Logits, rule: Rule, position: int) -> Candidate | None:
        try:
            sure = confidence(row)
        except ModelError as error:
            self.failure = error.message
            return None
        return Candidate(sure, lambda: rule.draft_token(row, position))

    def _judge(self, seen: Iterable[tuple[Logits, float]]) -> list[ShadowEvaluation]:
        try:
            return [ShadowEvaluation(confidence(row), agreement) for row, agreement in seen]
        except ModelError as error:
            self.failure = error.message
            return []

    def _foretold(self, rows: Logits, text: Sequence[int], end: int, rule: Rule) -> list[ShadowEvaluation]:
        """Evaluate rows that predict the text's tokens up to index ``end``.

        Positions of the answer are judged by the text, those of the prompt by the target's likeliest tokens.
        """
        known = self._prompt - len(self._choices)
        first = max(known, end - len(rows) + 1)
        rows = rows[len(rows) - (end + 1 - first) :] if first <= end else rows[:0]
        return self._judge(
            (row, float(row.argmax() == self._choices[position - known]))
            if position < self._prompt
            else (row, rule.agreement(rule.penalised(row, position), position, text[position]))
            for position, row in enumerate(rows, first)
        )
