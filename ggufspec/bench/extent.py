"""Extent of a comparison that fits in a budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_FEWEST_TOKENS, _LEAST_TOKENS = 32, 8  # minimum answer length while trials or prompts can be dropped, and otherwise


@dataclass(frozen=True, slots=True)
class AnswerExtent:
    """Number and length of a cell's answers, and whether the targets' quality is measured."""

    prompts: int
    max_tokens: int
    repetitions: int
    quality: bool = False


@dataclass(frozen=True, slots=True)
class CellCosts:
    """Seconds that a cell takes per load, per prompt and per generated token."""

    load_s: float
    prompt_s: float
    token_s: float

    def trial_s(self, extent: AnswerExtent) -> float:
        """Return the seconds that a trial takes; its warm-up processes the first prompt once more."""
        answers_s = extent.prompts * extent.max_tokens * self.token_s
        return self.load_s + (extent.prompts + 1) * self.prompt_s + answers_s


def fit_extent(budget_s: float, cells: Sequence[CellCosts], most: AnswerExtent, *, cut: bool) -> AnswerExtent:
    """Return the largest extent that fits: with shorter answers if ``cut``, then fewer trials, then fewer prompts.

    The minimum is one trial with one prompt, even if that does not fit.
    """

    def tokens(extent: AnswerExtent) -> int:
        without_s = extent.repetitions * sum(one.trial_s(replace(extent, max_tokens=0)) for one in cells)
        token_s = extent.repetitions * extent.prompts * sum(one.token_s for one in cells)
        return int((budget_s - without_s) / max(token_s, 1e-9))

    fewest = min(_FEWEST_TOKENS, most.max_tokens) if cut else most.max_tokens
    fewer_trials = [replace(most, repetitions=count) for count in range(most.repetitions, 0, -1)]
    fewer_prompts = [replace(most, repetitions=1, prompts=count) for count in range(most.prompts - 1, 0, -1)]
    for extent in (*fewer_trials, *fewer_prompts):
        if (found := tokens(extent)) >= fewest:
            return replace(extent, max_tokens=min(found, most.max_tokens))
    least = min(_LEAST_TOKENS, most.max_tokens) if cut else most.max_tokens
    extent = replace(most, repetitions=1, prompts=1)
    return replace(extent, max_tokens=max(least, min(tokens(extent), most.max_tokens)))
