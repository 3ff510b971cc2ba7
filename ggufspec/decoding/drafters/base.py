"""The drafter protocol.

A drafter proposes one token at a time, so that the policy can weigh each token against its cost before it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ggufspec.decoding.batch import Batch
from ggufspec.decoding.rules.base import AcceptanceRule, DraftToken
from ggufspec.decoding.sampling import Logits, confidence
from ggufspec.errors import ModelError
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A drafter's proposal for the next token, before it is drawn."""

    confidence: float  # 0 to 1: the drafter's estimate, before the draw, of the acceptance probability
    draw: Callable[[], DraftToken]


@dataclass(frozen=True, slots=True)
class ShadowEvaluation:
    """A drafter's guess at a position whose token is already decided."""

    confidence: float  # see :class:`DraftCandidate`
    agreement: float  # 1 if the guess is the decided token, else 0; under speculative sampling, its draft probability


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """Parts of a pair from which a drafter is made."""

    target_vocab_size: int
    draft: Context | None = None
    corpus: Sequence[int] = ()  # token ids of --lookup-corpus
    like: Drafter | None = None  # drafter of the same kind whose corpus index to share
    target: Context | None = None  # context whose hidden states a head reads
    head: Head | None = None  # head on the target


class Drafter(Protocol):
    name: str  # name in the registry
    failure: str  # why the drafter has given up, for the user; empty if it has not

    def begin(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        """Start a new text with this prompt; a drafter that needs time to prefill it does so later.

        Args:
            prompt: (n,) token ids.
            choices: (m,) the target's likeliest token at each of the prompt's last m positions, not the prompt's own.
            same: length of the prefix shared with the previous text, which may still be cached.

        Returns:
            shadow evaluations against ``choices`` at these positions, unless they need decoding.
        """
        ...

    def pending(self, length: int) -> int:
        """Return the number of tokens to decode before the token at index ``length`` can be proposed; 0 if none."""
        ...

    def to_propose(self, text: Sequence[int]) -> Batch | None:
        """Return the batch to decode before the token after ``text`` can be proposed, if other answers may share it.

        Its logits go to :meth:`receive`. None: there is nothing to decode, or :meth:`propose` decodes it.
        """
        ...

    def to_catch_up(self, text: Sequence[int], most: int) -> Batch | None:
        """Return the batch to decode before :meth:`catch_up` with the same arguments, as :meth:`to_propose` does."""
        ...

    def receive(self, rows: Logits) -> None:
        """Take the logits of the batch that was asked for; the next method called is the one that needs them."""
        ...

    def propose(self, text: Sequence[int], rule: AcceptanceRule) -> DraftCandidate | None:
        """Return the candidate after ``text`` (emitted tokens and the chain so far); None if the drafter has none."""
        ...

    def catch_up(self, text: Sequence[int], rule: AcceptanceRule, most: int) -> list[ShadowEvaluation]:
        """Process emitted tokens that the drafter has not read; evaluate what it would have proposed there.

        If there are more than ``most``, a drafter that must decode them forgets all tokens before the last ``most``.
        Each position is evaluated once, drafted or not; a drafter without evaluations is judged by a prior.
        """
        ...

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:
        """Return the seconds to decode one more token, the shorter of two timings; the cache is left as it was.

        The result is None if the token cannot be timed now.
        """
        ...

    def commit(self, length: int) -> None:
        """Make the first ``length`` tokens of the text final and drop the others."""
        ...


class AloneDrafter:
    """Base of drafters whose batches, if any, no other answer can share."""

    def to_propose(self, text: Sequence[int]) -> Batch | None:  # noqa: ARG002
        return None

    def to_catch_up(self, text: Sequence[int], most: int) -> Batch | None:  # noqa: ARG002
        return None

    def receive(self, rows: Logits) -> None:  # noqa: ARG002
        raise AssertionError("nothing was asked for")


class FreeDrafter(AloneDrafter):
    """Base of drafters without a model, which process text at no cost."""

    failure = ""

    def pending(self, length: int) -> int:  # noqa: ARG002 - indexing takes microseconds
        return 0

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:  # noqa: ARG002
        return None


class RowDrafter:
    """Base of drafters whose candidates come from rows of logits.

    A damaged draft, whose logits are NaN, costs only the speedup, not the answer.
    """

    failure = ""
    _prompt = 0  # number of tokens in the prompt
    _choices: Sequence[int] = ()  # the target's likeliest tokens at the prompt's last positions

    def _candidate(self, row: Logits, rule: AcceptanceRule, position: int) -> DraftCandidate | None:
        try:
            sure = confidence(row)
        except ModelError as error:
            self.failure = error.message
            return None
        return DraftCandidate(sure, lambda: rule.draft_token(row, position))

    def _judge(self, seen: Iterable[tuple[Logits, float]]) -> list[ShadowEvaluation]:
        try:
            return [ShadowEvaluation(confidence(row), agreement) for row, agreement in seen]
        except ModelError as error:
            self.failure = error.message
            return []

    def _foretold(self, rows: Logits, text: Sequence[int], end: int, rule: AcceptanceRule) -> list[ShadowEvaluation]:
        """Evaluate rows of logits that predict the text's tokens up to index ``end``.

        Positions in the answer are compared with the text, those in the prompt with the target's likeliest tokens.
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
