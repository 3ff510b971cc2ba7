"""Who guesses what the target will say: the protocol.

A drafter offers one token at a time, so that the policy can weigh each against its cost before it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ggufspec.decoding.model import Model
from ggufspec.decoding.rules.base import DraftToken, Rule


@dataclass(frozen=True, slots=True)
class Candidate:
    """The next token that a drafter has, not drawn yet.

    Args:
        confidence: 0 to 1, the drafter's own estimate that the token will stay, from what is known before the draw.
        draw: gives the token.
    """

    confidence: float
    draw: Callable[[], DraftToken]


@dataclass(frozen=True, slots=True)
class ShadowEvaluation:
    """What a drafter would have offered at a place that is decided by now.

    Args:
        confidence: as in its :class:`Candidate`.
        agreement: 1 if it was the token that came, 0 if not; under the residual rule the chance that it would stay.
    """

    confidence: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Parts:
    """What a pair has to make a drafter of.

    Args:
        target_vocab_size: tokens that the target knows.
        draft: the draft model, or None.
        corpus: token ids of ``--lookup-corpus``; empty without one.
    """

    target_vocab_size: int
    draft: Model | None = None
    corpus: Sequence[int] = ()


class Drafter(Protocol):
    """Guesses what the target will say."""

    name: str

    def prefill(self, prompt: Sequence[int], choices: Sequence[int] = (), same: int = 0) -> list[ShadowEvaluation]:
        """Start a new text with this prompt.

        Args:
            prompt: (n,) token ids.
            choices: (m,) the target's likeliest token at each of the prompt's last m places, whatever stands there.
            same: the text before began with so many of these tokens: what is in a cache of them may stay.

        Returns:
            what it would have offered at these places, judged by ``choices``; nothing if it cannot tell.
        """
        ...

    def pending(self, length: int) -> int:
        """Tokens that it has yet to read before it can offer the one at index ``length``; 0: an offer costs nothing."""
        ...

    def propose(self, text: Sequence[int], rule: Rule) -> Candidate | None:
        """The token after ``text``, which is what was emitted and the chain so far; None if it has none."""
        ...

    def catch_up(self, text: Sequence[int], rule: Rule, most: int) -> list[ShadowEvaluation]:
        """Read what was emitted and not read yet, and tell what it would have offered there.

        Where that is more than ``most`` tokens, a drafter whose reading costs something forgets all before these.
        """
        ...

    def commit(self, length: int) -> None:
        """Only the first ``length`` tokens of the text are certain to stay."""
        ...
