"""Speedup of drafting if rollback has a price. Pure: seconds in, a ratio out.

With a checkpoint (:mod:`ggufspec.llamacpp.rewind`) tokens accepted before a rejection are decoded again in front of the
next batch, so a round's price depends on how the previous rounds went: a small Markov chain over the tokens to decode
again, whose stationary mean is exact if tokens are accepted independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggufspec.llamacpp.options import AGAIN_MAX

_STEPS = 20  # halvings of the acceptance


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds.

    Args:
        batch_s: returns the seconds of a target batch of so many tokens.
        draft_s: seconds of one drafted token.
        again: True if tokens accepted before a rejection are decoded again (``rewind_kind == "checkpoint"``).
        checkpoint_s: seconds of taking a checkpoint.
        restore_s: seconds of restoring it.
    """

    batch_s: Callable[[int], float]
    draft_s: float = 0.0
    again: bool = False
    checkpoint_s: float = 0.0
    restore_s: float = 0.0


def speedup(costs: Costs, draft_length: int, acceptance: float) -> float:
    """Return the tokens per second at a draft length, as a multiple of target-only.

    Args:
        costs: measured on the machine.
        draft_length: drafted tokens per round, at least 1.
        acceptance: probability of each to be accepted if the previous ones are.
    """
    count = draft_length
    states = AGAIN_MAX + count + 2 if costs.again else 1  # tokens to decode again when a round begins
    moves = np.zeros((states, states))
    seconds = np.zeros(states)
    kept = acceptance ** np.arange(count + 1)
    ends = kept - np.append(kept[1:], 0)  # probability that exactly 0, 1, … are accepted
    for state in range(states):
        apart = state > AGAIN_MAX
        carried = 0 if apart else state
        seconds[state] = costs.batch_s(carried + count + 1) + count * costs.draft_s
        seconds[state] += costs.batch_s(state) if apart else 0.0
        seconds[state] += (costs.checkpoint_s if not carried else 0.0) + (1 - ends[count]) * costs.restore_s
        for accepted, chance in enumerate(ends):
            rejected = costs.again and accepted < count
            moves[state, min(states - 1, carried + 1 + accepted) if rejected else 0] += chance
    system = np.vstack([moves.T - np.eye(states), np.ones(states)])
    share = np.linalg.lstsq(system, np.append(np.zeros(states), 1.0), rcond=None)[0]
    return float(kept.sum() * costs.batch_s(1) / (share @ seconds))


def best(costs: Costs, draft_max: int, acceptance: float = 1.0) -> tuple[int, float]:
    """Return (draft length, speedup) of the fastest draft length from 1 to ``draft_max``."""
    return max(
        ((count, speedup(costs, count, acceptance)) for count in range(1, draft_max + 1)), key=lambda one: one[1]
    )


def break_even(costs: Costs, draft_max: int) -> float | None:
    """Return the least acceptance at which some draft length beats target-only; None if none does even at 1."""
    if best(costs, draft_max)[1] <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if best(costs, draft_max, middle)[1] > 1 else (middle, high)
    return high
