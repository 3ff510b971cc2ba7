"""Whether a machine that changed is found out, and one that did not is left alone. Speeds are made by hand."""

import numpy as np
import pytest

from ggufspec.bench.statistics import Drift, Sample, drift_notes, find_drift, relative

BASE = {"a": 10.0, "b": 25.0, "c": 3.0, "d": 80.0}


def samples(repetitions, factor, cells=BASE, noise=0.0, seed=0):
    """Cells by turns, in an order that rotates; ``factor(repetition, index)`` is how fast the machine is."""
    rng, names, made = np.random.default_rng(seed), list(cells), []
    for repetition in range(repetitions):
        turn = repetition % len(names)
        for name in (*names[turn:], *names[:turn]):
            speed = cells[name] * factor(repetition, len(made)) * np.exp(noise * rng.standard_normal())
            made.append(Sample(name, repetition, speed))
    return made


def test_speeds_are_seen_against_their_own_cell():
    found = relative([Sample("a", 0, 10), Sample("b", 0, 300), Sample("a", 1, 20), Sample("b", 1, 100)])
    assert found == pytest.approx([10 / 15, 1.5, 20 / 15, 0.5])


def test_a_steady_machine_has_no_drift():
    found = find_drift(samples(5, lambda *_: 1.0))
    assert (found.change, found.trend, found.disturbed) == (0.0, False, ())


@pytest.mark.parametrize("loss", [-0.2, -0.06, 0.15])
def test_a_machine_that_changes_by_and_by(loss):
    found = find_drift(samples(5, lambda _, index: 1 + loss * index / 19, noise=0.005))
    assert found.trend
    assert found.change == pytest.approx(loss, abs=0.25 * abs(loss))
    assert found.disturbed == ()  # told once


def test_noise_is_taken_for_a_trend_no_more_often_than_it_says():
    """300 machines that only rattle; at a p-value of 0.01 about three are wrongly accused."""
    accused = sum(find_drift(samples(5, lambda *_: 1.0, noise=0.05, seed=seed)).trend for seed in range(300))
    assert accused <= 9


def test_a_trend_too_small_to_matter_is_not_told():
    found = find_drift(samples(5, lambda _, index: 1 - 0.01 * index / 19))
    assert found.p_value < 0.01
    assert not found.trend


def test_a_repetition_that_was_disturbed():
    found = find_drift(samples(5, lambda repetition, _: 0.7 if repetition == 2 else 1.0, noise=0.01))
    assert not found.trend
    assert [repetition for repetition, _ in found.disturbed] == [2]
    assert found.disturbed[0][1] == pytest.approx(-0.3, abs=0.03)


def test_a_repetition_that_was_faster_is_no_disturbance():
    assert find_drift(samples(5, lambda repetition, _: 1.2 if repetition == 2 else 1.0, noise=0.01)).disturbed == ()


def test_one_slow_trial_is_no_disturbance():
    found = find_drift(samples(5, lambda _, index: 0.5 if index == 9 else 1.0))
    assert (found.trend, found.disturbed) == (False, ())


@pytest.mark.parametrize(
    "few",
    [[], [Sample("a", 0, 1.0)], samples(1, lambda *_: 1.0), samples(2, lambda r, _: 1 - r / 2, {"a": 1.0, "b": 2.0})],
)
def test_too_few_trials_tell_nothing(few):
    assert not find_drift(few).trend
    assert find_drift(few).disturbed == ()


def test_a_cell_that_was_measured_once_has_no_say():
    steady = samples(4, lambda *_: 1.0)
    assert find_drift([*steady, Sample("once", 0, 1e9)]) == find_drift(steady)


def test_what_was_found_in_words():
    assert drift_notes(Drift(-0.02, 0.5, False, ())) == []
    (trend,) = drift_notes(Drift(-0.124, 0.0005, True, ()))
    assert trend.startswith("the machine became 12% slower from the first trial to the last (p < 0.001)")
    assert drift_notes(Drift(0.1, 0.004, True, ()))[0].startswith("the machine became 10% faster")
    assert drift_notes(Drift(0.0, 1.0, False, ((2, -0.3),))) == [
        "in repetition 3 runs were 30% slower than in the others: something else ran then"
    ]
