"""Which parts of a measurement count beside other programs. Pure: figures made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ggufspec.bench import disturbed, trial
from ggufspec.decoding.alternate import AnswerSegment
from ggufspec.decoding.answer import Statistics
from ggufspec.hardware.host import BUSY_CPUS

Row = tuple[float, float]  # seconds for each token, CPUs that others used


def segment(token_s: float, others: float, decoded: int) -> AnswerSegment:
    seconds = token_s * decoded
    statistics = Statistics(0, 0.0, 1 + decoded, seconds, decoded, 0, 0, (0,), (0,), 0.0, seconds, "")
    return AnswerSegment(statistics, others)


def made(*answers: trial.TrialAnswer) -> trial.TrialResult:
    return trial.TrialResult(answers, trial.LoadedModel("", 1, 0, 1), None, 0.0, 0, 0, True)


def result(*answers: Sequence[Row], decoded: int = 10) -> trial.TrialResult:
    found = []
    for rows in answers:
        segments = tuple(segment(*row, decoded) for row in rows)
        whole = Statistics(7, 0.5, 1, 0.0, 0, 0, 0, (0,), (0,), 0.0, 0.0, "length", prompt_read=7)
        found.append(trial.TrialAnswer("", (), whole.only([one.statistics for one in segments]), segments=segments))
    return made(*found)


QUIET, BUSY = (0.1, 0.05), (0.5, 1.9)


def test_the_quiet_pairs_count() -> None:
    ours = result([(0.05, 0.1), (0.4, 1.9), (0.05, 0.0)], [(0.3, 2.0), (0.05, 0.0)])
    theirs = result([QUIET, BUSY, BUSY], [BUSY, QUIET])
    found = disturbed.count([ours], [theirs])
    assert (found.pairs, found.counting, found.part) == (5, 2, "quiet")
    assert [one.statistics.decode_s for one in found.ours[0].answers] == pytest.approx([0.5, 0.5])
    assert [one.statistics.decode_s for one in found.theirs[0].answers] == pytest.approx([1.0, 1.0])
    assert [one.statistics.decoded for one in found.ours[0].answers] == [10, 10]
    assert found.ours[0].answers[0].statistics.prompt_read == 7
    assert found.busy_share == pytest.approx(22 / 25.5)
    assert found.note == (
        "other programs used up to 2.0 CPUs, and 0.5 or more during 86% of the run; the verdict rests on the segments "
        "in which the machine was quiet (2 of 5 pairs)"
    )


def test_a_start_counts_with_its_segment() -> None:
    """What an answer loses in its first rounds is not measured while other programs compute."""

    def started(one: trial.TrialResult) -> trial.TrialResult:
        found = [replace(answer, start=answer.segments[0].statistics) for answer in one.answers]
        return replace(one, answers=tuple(found))

    ours, theirs = result([QUIET, QUIET], [BUSY, QUIET]), result([QUIET, QUIET], [BUSY, QUIET])
    found = disturbed.count([started(ours)], [started(theirs)])
    assert [one.start is None for one in found.ours[0].answers] == [False, True]
    assert [one.start is None for one in found.theirs[0].answers] == [False, True]


def test_where_too_little_is_quiet_a_similar_load_counts() -> None:
    """A pair half of which was quiet would make one way look fast."""
    ours, theirs = result([QUIET, BUSY, BUSY, QUIET, BUSY]), result([QUIET, BUSY, BUSY, BUSY, BUSY])
    found = disturbed.count([ours], [theirs])
    assert (found.pairs, found.counting, found.part, found.is_enough) == (5, 4, "similar load", False)
    assert "the segments in which both runs saw a similar load (4 of 5 pairs)" in found.note


def test_without_any_of_a_similar_load_all_counts() -> None:
    found = disturbed.count([result([QUIET, BUSY])], [result([BUSY, QUIET])])
    assert (found.pairs, found.counting, found.part, found.is_enough) == (2, 2, "all", False)


def test_a_machine_that_is_always_busy_is_as_quiet_as_it_gets() -> None:
    found = disturbed.count([result([BUSY, BUSY])], [result([BUSY, BUSY])])
    assert (found.counting, found.part, found.is_enough, found.busy_share) == (2, "quiet", True, 1.0)
    assert not found.is_quiet
    assert "an idle machine would reach more tokens/s" in found.note


def test_an_idle_machine_is_not_worth_a_word() -> None:
    found = disturbed.count([result([(0.1, 0.2), QUIET])], [result([QUIET, (0.1, 0.0)])])
    assert (found.counting, found.part, found.note) == (2, "quiet", "")


def test_segments_that_are_too_short_for_the_counters_are_joined() -> None:
    """A step of 10 ms in a segment of 10 ms is no program at work."""
    ours, theirs = ([(0.001, others) for others in rows] for rows in ([1.0, *[0.0] * 39], [*[0.0] * 39, 1.0]))
    found = disturbed.count([result(*([one] for one in ours))], [result(*([one] for one in theirs))])
    assert (found.pairs, found.counting, found.note) == (40, 40, "")


def test_what_is_in_one_run_alone_is_not_compared() -> None:
    """An answer that ended earlier, a pass that was interrupted, a result without segments."""
    short, long = result([QUIET, BUSY]), result([QUIET, BUSY, QUIET], [QUIET])
    found = disturbed.count([short], [long, long])
    assert (found.pairs, found.counting) == (2, 1)
    assert [one.statistics.decoded for one in found.theirs[0].answers] == [10, 0]
    assert found.theirs[1] is long
    bare = made(trial.TrialAnswer("", (), result([QUIET]).answers[0].statistics))
    assert disturbed.count([bare], [bare]) == disturbed.CountedRuns([bare], [bare], part="quiet")
    assert disturbed.count([], []).is_enough


@pytest.mark.parametrize("others_cpus", [0.1, 0.3, 0.6])
def test_results_without_segments_count_by_the_load_of_the_whole_run(others_cpus: float) -> None:
    """Their speeds are saved for later plans, or a note says why they are not: never neither."""
    bare = replace(made(trial.TrialAnswer("", (), result([QUIET]).answers[0].statistics)), others_cpus=others_cpus)
    found = disturbed.count([bare], [bare])
    assert found.is_quiet == (others_cpus < BUSY_CPUS)
    assert ("an idle machine would reach more tokens/s" in found.note) != found.is_quiet


@pytest.mark.parametrize(
    ("tries", "least", "expected"),
    [
        ({}, 0.0, None),
        ({"a": [0.1], "b": [0.2]}, 0.1, None),
        ({"a": [0.1], "b": [1.9]}, 0.1, "b"),
        ({"a": [1.9], "b": [0.1]}, 0.1, "a"),  # which was not known when it was measured
        ({"a": [1.9, 0.2], "b": [0.1]}, 0.1, None),
        ({"a": [1.9, 1.8, 2.0], "b": [0.1], "c": [1.0]}, 0.1, "c"),
        ({"a": [1.9], "b": [1.8]}, 1.8, None),
    ],
)
def test_what_is_measured_again(tries: dict[str, list[float]], least: float, expected: str | None) -> None:
    assert disturbed.to_repeat(tries, least) == expected
