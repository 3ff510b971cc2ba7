"""The draft-and-verify loop, pure over a small Model protocol: no files, no clock but the one given.

A round drafts a chain of tokens, verifies them in one target batch, keeps the prefix that the rule accepts and adds
one token of the target's own. Without a drafter every round is one target token: target-only is the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.acceptance import Proposal, Rule

Logits = npt.NDArray[np.float32]
Clock = Callable[[], float]


class Model(Protocol):
    """What the loop needs of a model; ``llamacpp.model.Context`` is one."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that fit its cache."""
        ...

    @property
    def length(self) -> int:
        """Tokens in its cache."""
        ...

    def decode(self, tokens: Sequence[int], outputs: int, width: int = 0) -> Logits:
        """Append tokens; logits (outputs, vocab) of the last ones, valid until the next call."""
        ...

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        ...


class Drafter(Protocol):
    """Guesses what the target will say."""

    def read(self, prompt: Sequence[int]) -> None:
        """Start a new text with this prompt."""
        ...

    def draft(self, tokens: Sequence[int], limit: int, rule: Rule) -> list[Proposal]:
        """At most ``limit`` tokens to follow ``tokens``, which extend what was kept."""
        ...

    def keep(self, length: int) -> None:
        """Only the first ``length`` tokens of the text are certain to stay."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and one verification.

    ``emitted`` are the ``accepted`` drafted tokens and the target's own, cut after a token that ends the text.
    """

    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    draft_s: float
    verify_s: float
    total_s: float


class ModelDrafter:
    """A chain from a draft model whose cache is kept from round to round.

    After a full acceptance only the last drafted token is new to it; after a rejection it is rewound past the first
    wrong one. (llama.cpp's common/speculative.cpp decodes the accepted tokens again.)
    """

    def __init__(self, model: Model, is_end: Callable[[int], bool], target_vocab_size: int) -> None:
        self.model = model
        self.is_end = is_end
        self.shared_vocab = min(model.vocab_size, target_vocab_size)  # sizes may differ by padding at the end

    def read(self, prompt: Sequence[int]) -> None:
        self.model.rewind(0)
        if len(prompt) > 1:
            self.model.decode(self._known(prompt[:-1]), outputs=0)

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens that only the target has are read as token 0: the guess gets worse, the text does not change."""
        if max(tokens) < self.model.vocab_size:
            return tokens
        return [token if token < self.model.vocab_size else 0 for token in tokens]

    def draft(self, tokens: Sequence[int], limit: int, rule: Rule) -> list[Proposal]:
        proposals: list[Proposal] = []
        pending = self._known(tokens[self.model.length :])
        for position in range(len(tokens), min(len(tokens) + limit, self.model.capacity)):
            logits = self.model.decode(pending, outputs=1)[0, : self.shared_vocab]
            proposal = rule.propose(logits, position)
            proposals.append(proposal)
            if self.is_end(proposal.token):
                break
            pending = [proposal.token]
        return proposals

    def keep(self, length: int) -> None:
        if self.model.length > length:
            self.model.rewind(length)


def generate(
    target: Model,
    prompt: Sequence[int],
    rule: Rule,
    *,
    max_tokens: int,
    is_end: Callable[[int], bool],
    drafter: Drafter | None = None,
    draft_max: int = 0,
    clock: Clock,
) -> Iterator[Round]:
    """Rounds until ``max_tokens`` are emitted, a token ends the text, or the target's context is full.

    The target has read all but the last token of ``prompt`` already, and so has the drafter (:func:`read`).

    Args:
        target: the model whose distribution the text follows.
        prompt: (n,) token ids, at least one.
        rule: chooses drafted tokens and judges them.
        max_tokens: tokens to emit at most.
        is_end: whether a token ends the text.
        drafter: None for target-only.
        draft_max: drafted tokens a round at most.
        clock: seconds, monotonic.
    """
    tokens = list(prompt)
    last = min(len(prompt) + max_tokens, target.capacity + 1)
    while len(tokens) < last:
        began = clock()
        proposals: Sequence[Proposal] = ()
        limit = min(draft_max, last - len(tokens) - 1)
        if drafter is not None and limit > 0:
            proposals = drafter.draft(tokens, limit, rule)
        drafted = tuple(proposal.token for proposal in proposals)
        verify_began = clock()
        rows = target.decode((tokens[-1], *drafted), outputs=len(drafted) + 1)
        verify_ended = clock()
        verdict = rule.verify(rows, proposals, len(tokens))
        emitted = (*drafted[: verdict.accepted], verdict.token)
        end = next((i for i, token in enumerate(emitted) if is_end(token)), None)
        if end is not None:
            emitted = emitted[: end + 1]
        tokens.extend(emitted)
        target.rewind(len(tokens) - 1)
        if drafter is not None:
            drafter.keep(len(tokens) - 1)
        yield Round(
            drafted, verdict.accepted, emitted, verify_began - began, verify_ended - verify_began, clock() - began
        )
        if end is not None:
            return


def read(target: Model, prompt: Sequence[int], drafter: Drafter | None = None) -> None:
    """Put all but the last token of ``prompt`` into the caches; the last one is the first round's."""
    target.rewind(0)
    if len(prompt) > 1:
        target.decode(prompt[:-1], outputs=0)
    if drafter is not None:
        drafter.read(prompt)
