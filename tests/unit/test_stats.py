"""Medians, their intervals, paired ratios."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, t

from ggufspec.bench.statistics import mean_ratio, paired_mean, paired_ratios, spread, student
from tests.support.properties import examples

samples = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=12)


def test_one_sample_is_its_own_interval():
    assert (spread([2.5]).median, spread([2.5]).ci95, spread([2.5]).samples) == (2.5, (2.5, 2.5), (2.5,))


@pytest.mark.parametrize(("values", "median"), [([3, 1, 2], 2.0), ([4, 1, 3, 2], 2.5), ([1, 1, 9], 1.0)])
def test_the_median(values, median):
    assert spread(values).median == median


def test_the_samples_stay_as_they_came():
    assert spread([3, 1, 2]).samples == (3.0, 1.0, 2.0)


def test_the_mean_of_ratios_is_in_its_interval_as_often_as_it_says():
    """Of three pairs too, where the median's own interval, from the least to the largest, is half as wide."""
    chance, inside, narrower = np.random.default_rng(3), 0, 0
    for _ in range(1000):
        ours = list(np.exp(chance.normal(0, 0.05, 3)))
        found = paired_mean(ours, [1.0] * 3)
        inside += found.ci95[0] <= 1.0 <= found.ci95[1]
        narrower += paired_ratios(ours, [1.0] * 3).ci95[0] > 1.0
    assert 930 <= inside <= 970
    assert narrower > 80
    assert paired_mean([3.0], [2.0]).ci95 == (1.5, 1.5)


def test_no_samples_have_no_median():
    with pytest.raises(ValueError, match="no samples"):
        spread([])


@examples(50)
@given(samples)
def test_the_interval_holds_the_median_and_is_among_the_samples(values):
    found = spread(values)
    assert min(values) <= found.ci95[0] <= found.median <= found.ci95[1] <= max(values)


@examples(20)
@given(samples)
def test_the_same_samples_give_the_same_interval(values):
    assert spread(values) == spread(values)


def test_the_interval_of_a_known_case():
    """The median of 7 picks is at most the k-th smallest value if 4 picks or more are: with chance 0.010 for k = 1 and
    0.108 for k = 2. So 2.5 % falls on the second value and 97.5 % on the sixth.
    """
    chances = [sum(math.comb(7, i) * k**i * (7 - k) ** (7 - i) for i in range(4, 8)) / 7**7 for k in (1, 2)]
    assert chances == pytest.approx([0.010, 0.108], rel=0.02)
    assert spread([64, 1, 32, 2, 16, 4, 8]).ci95 == (2, 32)


def test_the_interval_of_many_samples_leaves_a_fortieth_on_either_side():
    """As above, of 1,001 samples; of 4,000 resamples the quantile is a fraction of a sample off."""
    low = next(k for k in range(1, 1001) if binom.sf(500, 1001, k / 1001) >= 0.025)
    assert spread(range(1, 1002)).ci95 == pytest.approx((low, 1002 - low), abs=2.5)


def test_more_scatter_is_a_wider_interval():
    narrow, wide = spread([10, 10.1, 9.9, 10.05, 9.95]), spread([10, 12, 8, 11, 9])
    assert narrow.ci95[1] - narrow.ci95[0] < wide.ci95[1] - wide.ci95[0]


def test_ratios_are_of_pairs():
    """Drift that is common to both halves of a pair is gone; the ratio of the medians would be 2 / 3."""
    found = paired_ratios([2, 20, 1], [1, 10, 3])
    assert found.samples == (2.0, 2.0, 1 / 3)
    assert found.median == 2.0


def test_unpaired_samples_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_ratios([1, 2], [1])


def test_a_mean_over_prompts_is_of_all_their_seconds():
    """Not of their ratios, which are 1.5, 1.5 and 2; the interval is Student's, on the logarithm."""
    found = mean_ratio([[3.0], [6.0], [2.0]], [[2.0], [4.0], [1.0]])
    assert found.median == pytest.approx(11 / 7)
    assert found.samples == (1.5, 1.5, 2.0)
    parts = [(a - 11 / 7 * b) / (7 / 3) for a, b in ((3, 2), (6, 4), (2, 1))]
    half = t.ppf(0.975, 2) * np.std(parts, ddof=1) / math.sqrt(3) / (11 / 7)
    assert np.log(found.ci95) == pytest.approx([math.log(11 / 7) - half, math.log(11 / 7) + half])


def test_each_kind_counts_alike():
    rows = [[2.0], [2.0], [2.0], [1.0]], [[1.0]] * 4
    assert mean_ratio(*rows, ("code", "code", "code", "prose")).median == pytest.approx(1.5)
    assert mean_ratio(*rows).median == pytest.approx(1.75)


def test_a_repetition_that_was_disturbed_is_no_end_of_an_interval():
    calm = mean_ratio([[2.0, 2.1, 1.9]] * 4, [[1.0, 1.0, 1.0]] * 4)
    assert mean_ratio([[2.0, 2.1, 1.9]] * 3 + [[2.0, 9.0, 1.9]], [[1.0, 1.0, 1.0]] * 4).ci95 == calm.ci95


def test_an_interval_over_prompts_holds_what_it_should():
    """Of eight prompts whose gains scatter by 30 %, about 95 in 100; of three, too."""
    rng = np.random.default_rng(0)
    for count in (8, 3):
        held = 0
        for _ in range(400):
            theirs = np.exp(rng.normal(0, 0.1, count))
            ours = theirs * np.exp(rng.normal(-0.2, 0.3, count))
            low, high = mean_ratio(theirs[:, None].tolist(), ours[:, None].tolist()).ci95
            held += low <= math.exp(0.2 - 0.3**2 / 2) <= high
        assert 0.91 <= held / 400 <= 0.98


def test_student_s_quantile():
    assert [student(n) for n in (1, 2)] == pytest.approx([t.ppf(0.975, n) for n in (1, 2)])
    assert [student(n) for n in range(3, 40)] == pytest.approx([t.ppf(0.975, n) for n in range(3, 40)], rel=0.008)
