"""Time of an answer by its length, from measured ones. Pure: figures made by hand."""

from __future__ import annotations

import pytest

from ggufspec.bench import lengths, trial
from ggufspec.decoding.answer import Statistics
from ggufspec.schema.base import Spread
from ggufspec.schema.bench import AnswerTime


def statistics(decoded: int, seconds: float, prompt_s: float = 0.0) -> Statistics:
    return Statistics(10, prompt_s, 1 + decoded, seconds, decoded, 0, 0, (), (), 0.0, 0.0, "")


def result(*answers: tuple[Statistics, Statistics | None]) -> trial.TrialResult:
    found = tuple(trial.TrialAnswer("", (), whole, start=start) for whole, start in answers)
    return trial.TrialResult(found, trial.LoadedModel("", 1, 0, 1), None, 0.0, 0, 0, True)


def times(*answers: tuple[Statistics, Statistics | None]) -> list[AnswerTime | None]:
    return lengths.answer_seconds([result(*answers)])[0]


WHOLE, START = statistics(55, 7.5, prompt_s=1.5), statistics(15, 3.5)  # 40 tokens in 4 s after the start


def test_what_is_lost_at_the_start_is_paid_once() -> None:
    (found,) = times((WHOLE, START))
    assert found == AnswerTime(pytest.approx(1.5 + 3.5 - 1.5), pytest.approx(0.1))  # type: ignore[arg-type]
    assert found is not None
    assert lengths.answer_s(found, 56) == pytest.approx(1.5 + 7.5)  # as it was measured
    assert lengths.answer_s(found, 256) == pytest.approx(3.5 + 25.5)


def test_an_answer_without_a_known_start_loses_what_others_do() -> None:
    """Other programs disturbed it; the statistics are of the rest."""
    _, found = times((WHOLE, START), (statistics(40, 8.0, prompt_s=1.0), None))
    assert found == AnswerTime(pytest.approx(1.0 + 2.0), pytest.approx(0.2))  # type: ignore[arg-type]
    (alone,) = times((statistics(40, 8.0, prompt_s=1.0), None))
    assert alone == AnswerTime(1.0, 0.2)


def test_an_answer_that_ends_at_its_start_is_no_slower_later_than_others() -> None:
    short = statistics(10, 3.0)
    _, found = times((WHOLE, START), (short, short))
    assert found is not None
    assert lengths.answer_s(found, 11) == pytest.approx(3.0)
    assert found.token_s == pytest.approx((3.0 - 1.5) / 10)  # half of it at most is lost
    assert times((short, short)) == [AnswerTime(0.0, 0.3)]  # nobody knows better
    _, few = times((WHOLE, START), (statistics(17, 3.2), START))  # two tokens show no rate
    assert few is not None
    assert few.token_s == pytest.approx((3.2 - 1.6) / 17)


def test_nothing_is_said_of_an_answer_of_which_nothing_counts() -> None:
    assert times((statistics(0, 0.0, prompt_s=1.0), None)) == [None]


def test_kinds_weigh_alike_in_the_mean() -> None:
    passes = [[AnswerTime(1.0, 0.1), None, AnswerTime(3.0, 0.3)], [AnswerTime(1.0, 0.1)]]
    assert lengths.mean_time(passes, [0.5, 0.5, 2.0]) == AnswerTime(pytest.approx(7 / 3), pytest.approx(0.7 / 3))  # type: ignore[arg-type]
    assert lengths.mean_time([[None]], [1.0]) is None


def test_beyond_what_was_measured_an_interval_is_wider() -> None:
    speedup = Spread(2.0, (1.0, 4.0), (2.0,))
    assert lengths.widened(speedup, 50, 60).ci95 == pytest.approx((1.0, 4.0))
    low, high = lengths.widened(speedup, 120, 60).ci95
    assert low == pytest.approx(2.0 * 0.5**1.25**0.5)
    assert low * high == pytest.approx(4.0)
    assert lengths.widened(speedup, 1e9, 60).ci95 == pytest.approx((2.0 * 0.5**2**0.5, 2.0 * 2**2**0.5))
