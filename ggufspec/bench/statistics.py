"""Medians with bootstrap intervals, and means over prompts. Pure.

Seeds are fixed, so that the same samples give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median, stdev

import numpy as np

from ggufspec.schema.base import Spread

RESAMPLES = 4000


def spread(samples: Sequence[float]) -> Spread:
    """Return the median and its percentile-bootstrap 95 % interval; raise ValueError without samples.

    Source: Efron and Tibshirani 1993, chapter 13.
    """
    values = np.asarray(samples, np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    picks = np.random.default_rng(0).integers(0, values.size, (RESAMPLES, values.size))
    low, high = np.percentile(np.median(values[picks], axis=1), (2.5, 97.5))
    return Spread(float(np.median(values)), (float(low), float(high)), tuple(float(value) for value in values))


def paired_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the spread of the ratios of samples that were measured in pairs, close to each other in time."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def weights_of(kinds: Sequence[str]) -> list[float]:
    """Return a weight for each prompt, 1 on average, so that all kinds of prompts count equally."""
    weights = [1 / kinds.count(kind) for kind in kinds]
    return [weight * len(kinds) / sum(weights) for weight in weights]


def paired_mean(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the geometric mean of paired ratios with Student's 95 % interval, which has width 0 for a single pair.

    With few pairs, :func:`paired_ratios` gives too narrow an interval: three pairs agree by chance one time in four.
    """
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    middle, half = fmean(logs), 0.0
    if len(logs) > 1:
        half = student(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Spread(math.exp(middle), (math.exp(middle - half), math.exp(middle + half)), tuple(ratios))


def mean_ratio(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], kinds: Sequence[str] = ()
) -> Spread:
    """Return the ratio of two means over prompts; kinds count equally, and so do the prompts within a kind.

    Each prompt counts as the median of its repetitions. The 95 % interval is for the mean over prompts like these:
    the prompts are the sample, and repetitions only make each prompt's value more precise. The interval is Student's,
    on the logarithm, with the ratio's variance by linearisation.

    ``numerators`` holds one or more values for each of at least two prompts; ``denominators`` holds as many, measured
    at about the same times. Without ``kinds``, each prompt is its own kind.

    Source: Cochran 1977, Sampling Techniques, section 6.3 (the variance of a ratio).
    """
    count = len(numerators)
    weights = weights_of(kinds or [str(i) for i in range(count)])
    above, below = ([median(values) for values in rows] for rows in (numerators, denominators))
    mean = fmean(w * b for w, b in zip(weights, below, strict=True))
    ratio = fmean(w * a for w, a in zip(weights, above, strict=True)) / mean
    parts = [w * (a - ratio * b) / mean for w, a, b in zip(weights, above, below, strict=True)]
    half = student(count - 1) * stdev(parts) / math.sqrt(count) / ratio
    samples = tuple(a / b for rows in zip(numerators, denominators, strict=True) for a, b in zip(*rows, strict=True))
    return Spread(ratio, (ratio * math.exp(-half), ratio * math.exp(half)), samples)


def student(freedom: int) -> float:
    """Return Student's 97.5 % quantile: exact for one and two degrees of freedom, within 1 % for more.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z: float = NormalDist().inv_cdf(0.975)
    powers = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + float(sum(term / freedom**power for power, term in enumerate(powers, 1)))
