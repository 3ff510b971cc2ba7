"""Model of an answer's time as a function of its length: a fixed cost for prompt and start plus a cost per token. Pure.

The first rounds of an answer are slower, because the draft processes the prompt and the policy learns how much drafts
gain in this text. Like the target's prompt time, this loss is incurred once, so it weighs more in a short answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ggufspec.bench.trial import TrialAnswer, TrialResult
from ggufspec.schema.base import Spread
from ggufspec.schema.bench import AnswerTime

DEFAULT_TOKENS = 256  # answer length without -n, if the prompts do not determine it
SHOWN = (50, 128, 256, 500)  # answer lengths for which the speedup is reported
_LEAST_TOKENS = 8  # minimum number of tokens after an answer's start for computing their rate


def answer_s(time: AnswerTime, tokens: float) -> float:
    """Return the seconds for an answer of ``tokens`` tokens, of which the first comes from the prompt's batch."""
    return max(time.once_s + time.token_s * (tokens - 1), 1e-9)


def answer_seconds(results: Sequence[TrialResult]) -> list[list[AnswerTime | None]]:
    """Return the time of each answer of a run, by pass and prompt; None if no part of the answer counts.

    If an answer's start does not count, or few tokens follow it, the mean initial loss of the other answers is assumed.
    """
    answers = [answer for result in results for answer in result.answers]
    lost = [start.decode_s - rate * start.decoded for one in answers if (start := one.start) and (rate := _rate(one))]
    usual = max(0.0, fmean(lost)) if lost else 0.0
    return [[_time(answer, usual) for answer in result.answers] for result in results]


def _rate(answer: TrialAnswer) -> float | None:
    """Return the seconds per token after the start; None if there are too few tokens."""
    whole, start = answer.statistics, answer.start
    tokens = whole.decoded - (start.decoded if start else 0)
    return (whole.decode_s - (start.decode_s if start else 0.0)) / tokens if tokens >= _LEAST_TOKENS else None


def _time(answer: TrialAnswer, usual: float) -> AnswerTime | None:
    whole, start = answer.statistics, answer.start
    if not whole.decoded:
        return None
    if (rate := _rate(answer)) is None:
        lost = min(usual, whole.decode_s / 2)
        rate = (whole.decode_s - lost) / whole.decoded
    else:
        lost = start.decode_s - rate * start.decoded if start else usual
    return AnswerTime(whole.prompt_s + lost, rate)


def mean_time(passes: Sequence[Sequence[AnswerTime | None]], weights: Sequence[float]) -> AnswerTime | None:
    """Return the weighted mean of times over passes and prompts; ``weights`` are per prompt."""
    found = [(one, w) for row in passes for one, w in zip(row, weights, strict=False) if one is not None]
    total = sum(weight for _, weight in found)
    if not total:
        return None
    return AnswerTime(
        sum(weight * one.once_s for one, weight in found) / total,
        sum(weight * one.token_s for one, weight in found) / total,
    )


def widened(speedup: Spread, tokens: float, measured: float) -> Spread:
    """Return the speedup, with a wider interval if an answer has more ``tokens`` than were ``measured``.

    The unmeasured part is assumed to differ from the measured part as much as prompts differ from each other. If it is
    a share s of the answer, the variance of the logarithm is 1 + s² times as large.
    """
    share = max(0.0, 1 - measured / tokens)
    low, high = (speedup.median * (one / speedup.median) ** math.hypot(1, share) for one in speedup.ci95)
    return replace(speedup, ci95=(low, high))
