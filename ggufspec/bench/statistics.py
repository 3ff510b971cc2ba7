"""Medians with bootstrap intervals, and whether a machine kept its speed. Pure.

Seeds are fixed, so that the same samples give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufspec.schema.base import Spread

RESAMPLES = 4000
SHUFFLES = 2000
_CERTAIN = 0.01  # p-value below which a trend is no chance
_WORTH_TELLING = 0.03  # of the speed, first repetition to last
_STANDS_OUT = 0.08  # of the speed, that a repetition lacks against the others
_FEWEST = 6  # samples for a trend

Floats = npt.NDArray[np.floating[Any]]


def spread(samples: Sequence[float]) -> Spread:
    """Median and percentile-bootstrap 95 % interval of the median.

    Args:
        samples: at least one; in the samples' own unit.

    Source: Efron and Tibshirani 1993, chapter 13.
    """
    values = np.asarray(samples, np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    picks = np.random.default_rng(0).integers(0, values.size, (RESAMPLES, values.size))
    low, high = np.percentile(np.median(values[picks], axis=1), (2.5, 97.5))
    return Spread(float(np.median(values)), (float(low), float(high)), tuple(float(value) for value in values))


def paired_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the ratio, pair by pair; the pairs were measured next to each other in time."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


# ---- drift


@dataclass(frozen=True, slots=True)
class Sample:
    """One trial's speed. Samples are in the order in which they were measured."""

    cell: str
    repetition: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Drift:
    """What was found.

    Args:
        change: by how much the speed changed from the first trial to the last, −0.1 is a tenth slower.
        p_value: how likely so strong a trend is by chance.
        trend: whether it is neither chance nor too small to matter.
        disturbed: (repetition, its speed ÷ the others', less one) of those that were slower than the others.
    """

    change: float
    p_value: float
    trend: bool
    disturbed: tuple[tuple[int, float], ...]


def relative(samples: Sequence[Sample]) -> Floats:
    """(n,) each speed ÷ the median of its cell."""
    cells = np.array([sample.cell for sample in samples])
    speeds = np.array([sample.tokens_per_s for sample in samples], np.float64)
    for cell in np.unique(cells):
        speeds[cells == cell] /= np.median(speeds[cells == cell])
    return speeds


def find_drift(samples: Sequence[Sample]) -> Drift:
    """Look for a trend, and for repetitions that stand out.

    The trend is Theil and Sen's line through the relative speeds; its p-value is that of the rank correlation with
    time, by shuffling speeds within their cells, which is exact whatever their distribution. Cells that were measured
    once tell nothing.

    Args:
        samples: in the order in which they were measured.

    Source: Theil 1950 and Sen 1968 for the line; Good 2005, chapter 3, for permutation within blocks.
    """
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.cell] = counts.get(sample.cell, 0) + 1
    samples = [sample for sample in samples if counts[sample.cell] > 1]
    if len(samples) < _FEWEST:
        return Drift(0.0, 1.0, False, ())
    speeds = relative(samples)
    times = np.arange(len(speeds), dtype=np.float64)
    first, last = np.triu_indices(len(speeds), 1)
    slope = float(np.median((speeds[last] - speeds[first]) / (times[last] - times[first])))
    change = slope * (len(speeds) - 1)
    p_value = _p_value(np.array([sample.cell for sample in samples]), speeds, times)
    trend = p_value < _CERTAIN and abs(change) >= _WORTH_TELLING
    return Drift(change, p_value, trend, () if trend else _disturbed(samples, speeds))


def _p_value(cells: npt.NDArray[np.str_], speeds: Floats, times: Floats) -> float:
    ranks = np.argsort(np.argsort(speeds, kind="stable"), kind="stable").astype(np.float64)
    centred = times - times.mean()
    rng = np.random.default_rng(0)
    blocks = [np.flatnonzero(cells == cell) for cell in np.unique(cells)]
    shuffled = np.empty((SHUFFLES, len(ranks)))
    for block in blocks:
        shuffled[:, block] = rng.permuted(np.tile(ranks[block], (SHUFFLES, 1)), axis=1)
    seen = abs(float(ranks @ centred))
    as_strong = np.count_nonzero(np.abs(shuffled @ centred) >= seen - 1e-9)
    return float((as_strong + 1) / (SHUFFLES + 1))


def _disturbed(samples: Sequence[Sample], speeds: Floats) -> tuple[tuple[int, float], ...]:
    """Repetitions in which most cells, three at least, were slower than in the others."""
    repetitions = np.array([sample.repetition for sample in samples])
    found = []
    for repetition in np.unique(repetitions):
        inside = repetitions == repetition
        if np.count_nonzero(inside) < 3 or np.all(inside):
            continue
        ratio = float(np.median(speeds[inside]) / np.median(speeds[~inside]))
        if ratio <= 1 - _STANDS_OUT:
            found.append((int(repetition), ratio - 1))
    return tuple(found)


def drift_notes(found: Drift) -> list[str]:
    """What there is to tell a person of it, a sentence each; nothing where the machine was steady."""
    if found.trend:
        what = "slower" if found.change < 0 else "faster"
        chance = "p < 0.001" if found.p_value < 0.001 else f"p = {found.p_value:.3f}"
        change = f"the machine became {abs(found.change):.0%} {what} from the first trial to the last ({chance})"
        return [f"{change}: heat, or something else that ran; speedups are paired and suffer little"]
    return [
        f"in repetition {repetition + 1} runs were {-change:.0%} slower than in the others: something else ran then"
        for repetition, change in found.disturbed
    ]
