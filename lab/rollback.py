"""Whether drafting can win where taking tokens back has a price. Pure: seconds in, a ratio out.

With a checkpoint (:mod:`ggufspec.llamacpp.rewind`) what is accepted before a rejection is decoded again in front of
the next batch, so a round's price depends on how the rounds before it went: a small Markov chain over the tokens to
be decoded again, whose stationary mean is exact for tokens that are accepted independently of each other.
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
        batch_s: of a target batch of so many tokens.
        draft_s: of one drafted token.
        again: whether what is accepted before a rejection is decoded again (``rewind_kind == "checkpoint"``).
        checkpoint_s: of taking a checkpoint.
        restore_s: of going back to it.
    """

    batch_s: Callable[[int], float]
    draft_s: float = 0.0
    again: bool = False
    checkpoint_s: float = 0.0
    restore_s: float = 0.0


def speedup(costs: Costs, draft_length: int, acceptance: float) -> float:
    """Tokens per second with so many drafted tokens a round, as a multiple of target-only.

    Args:
        costs: measured on the machine.
        draft_length: drafted tokens a round, at least 1.
        acceptance: chance of each to be accepted if those before it are.
    """
    count = draft_length
    states = AGAIN_MAX + count + 2 if costs.again else 1  # tokens to be decoded again when a round begins
    moves = np.zeros((states, states))
    seconds = np.zeros(states)
    kept = acceptance ** np.arange(count + 1)
    ends = kept - np.append(kept[1:], 0)  # chance that 0, 1, … are accepted
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
    """(draft length, speedup) of the fastest draft length from 1 to ``draft_max``."""
    return max(
        ((count, speedup(costs, count, acceptance)) for count in range(1, draft_max + 1)), key=lambda one: one[1]
    )


def break_even(costs: Costs, draft_max: int) -> float | None:
    """The least acceptance at which some draft length beats target-only; None if none does even at 1."""
    if best(costs, draft_max)[1] <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if best(costs, draft_max, middle)[1] > 1 else (middle, high)
    return high
