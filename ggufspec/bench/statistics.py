"""Medians with bootstrap intervals. Pure.

Seeds are fixed, so that the same samples give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggufspec.schema.base import Spread

RESAMPLES = 4000


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
