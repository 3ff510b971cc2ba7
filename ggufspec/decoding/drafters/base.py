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
    """The next token that a drafter has, not drawn yet."""

    confidence: float  # 0 to 1, the drafter's own estimate of acceptance, from what is known before the draw
    draw: Callable[[], DraftToken]


@dataclass(frozen=True, slots=True)
class ShadowEvaluation:
    """What a drafter would have proposed at a position that is decided by now."""

    confidence: float  # as in its Candidate
    agreement: float  # 1 if it was the token that came, 0 if not; with speculative sampling the chance of that


@dataclass(frozen=True, slots=True)
class Parts:
    """What a pair has to make a drafter of."""

    target_vocab_size: int
    draft: Context | None = None
    corpus: Sequence[int] = ()  # token ids of --lookup-corpus
    target: Context | None = None  # where the drafter reads its hidden rows
    head: Head | None = None  # on the target


class Drafter(Protocol):
    name: str  # of the registry
    failure: str  # why it has given up, for the user; empty while it has not

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        """A new text begins with this prompt; a drafter whose reading costs something reads it later.

        Args:
            prompt: (n,) token ids.
            choices: (m,) the target's likeliest token at each of the prompt's last m positions, whatever stands there.
            same: the text before began with so many of these tokens: a cache may keep them.

        Returns:
            what it would have proposed at these positions, judged by ``choices``, as far as it knows by now.
        """
        ...

    def pending(self, length: int) -> int:
        """Tokens that it has yet to read to propose the one at index ``length``; 0: a proposal costs nothing."""
        ...

    def propose(self, text: Sequence[int], rule: Rule) -> Candidate | None:
        """The token after ``text``, which is what was emitted and the chain so far; None if it has none."""
        ...

    def catch_up(self, text: Sequence[int], rule: Rule, most: int) -> list[ShadowEvaluation]:
        """Read what was emitted and not read yet; what it would have proposed there.

        If that is more than ``most`` tokens, a drafter whose reading costs something forgets all before these. Each
        position is told of once, drafted or not; a drafter that tells of none is judged by a prior for ever.
        """
        ...

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:
        """Seconds to decode one of the tokens that it has yet to read, the shorter of two times; it forgets that again.

        None if it cannot be tried now.
        """
        ...

    def commit(self, length: int) -> None:
        """The first ``length`` tokens of the text are final, and only these."""
        ...


class RowDrafter:
    """What drafters share whose candidates are rows of logits.

    A damaged draft, one whose logits are NaN, costs the speedup and not the answer.
    """

    failure = ""
    _prompt = 0  # tokens of the prompt
    _choices: Sequence[int] = ()  # what the target would have said at its last positions

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
        """Evaluations of the rows that foretell the text's tokens up to index ``end``.

        Those of the answer are judged by the text, those of the prompt by what the target would have said there.
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
