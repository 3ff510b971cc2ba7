"""Whether the target has become slower: tables of answers, and what is reported of each."""

from __future__ import annotations

import math
import random

import pytest

from ggufspec.decoding.speed_watch import SpeedWatch

BUSY = "other programs used 1.5 CPUs"


def changes(speeds: list[float | None], watch: SpeedWatch | None = None, **more) -> list[str]:
    """What is reported of answers of 32 tokens, without the figures: the first words after "the target is"."""
    watch = watch or SpeedWatch()
    seen = [watch.observe(speed, **({"tokens": 32, "depth": 100} | more)) for speed in speeds]
    return [one.change.removeprefix("the target is ").split(":")[0] if one else "-" for one in seen]


@pytest.mark.parametrize(
    ("speeds", "reported"),
    [
        ([10, 10, 10, 9, 8, 7, 8, 12], [""] * 8),
        ([10, 6, 6, 5, 9, 10], ["", "slower now", "", "", "as fast as expected again", ""]),
        ([10, 6, 3.9, 3, 6.5, 10], ["", "slower now", "slower now", "", "", "as fast as expected again"]),
        ([10, 6.6, 8, 6.6, 8, 6.6, 8], ["", "slower now", *[""] * 5]),  # around the threshold
        ([10, 10, 10, 16, 16, 10], ["", "", "", "faster now", "", "as fast as expected again"]),
        ([10, 10, 10, 20, 5, 20], ["", "", "", "faster now", "slower now", "faster now"]),
        ([5, 10, 10, 10, 5, 10], ["", "", "", "", "slower now", "as fast as expected again"]),  # began with a warm-up
        ([10, 6, 3, 10], ["", "slower now", "slower now", "as fast as expected again"]),
    ],
)
def test_a_change_by_more_than_a_third_is_reported_once(speeds, reported):
    assert changes(speeds) == reported


@pytest.mark.parametrize("speed", [None, 0.0, -1.0, math.inf, math.nan])
def test_what_is_no_speed_says_nothing(speed):
    assert changes([10, speed, 10]) == ["", "-", ""]


@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_a_short_answer_says_nothing(tokens):
    watch = SpeedWatch()
    assert changes([10], watch) == [""]
    assert watch.observe(1.0, tokens=tokens, depth=100) is None
    assert changes([10], watch) == [""]


def test_the_sentence_and_the_figures():
    watch = SpeedWatch()
    watch.observe(8.2, tokens=32, depth=100)
    seen = watch.observe(3.1, tokens=32, depth=100, disturbed=BUSY, look=lambda: "not asked for")
    assert (seen.tokens_per_s, seen.expected, seen.state, seen.reason) == (3.1, 8.2, "slower", BUSY)
    assert seen.change == f"the target is slower now: 3.10 tokens/s, expected 8.20 ({BUSY})"
    seen = watch.observe(3.1, tokens=32, depth=100)
    assert (seen.state, seen.reason, seen.change) == ("slower", BUSY, "")
    seen = watch.observe(8.0, tokens=32, depth=100, disturbed=BUSY)
    assert (seen.state, seen.reason) == ("", "")
    assert seen.change == "the target is as fast as expected again: 8.00 tokens/s, expected 8.20"


def test_gpus_are_asked_only_when_the_target_has_become_slower():
    watch, asked = SpeedWatch(), []

    def look() -> str:
        asked.append(1)
        return "the clocks of A were reduced (heat)"

    for speed in (10, 10, 9, 5, 5, 10, 20):
        seen = watch.observe(speed, tokens=32, depth=100, look=look)
        assert ("clocks" in seen.change) == (speed == 5 and bool(seen.change))
    assert len(asked) == 1


def test_disturbed_answers_set_no_expectation():
    watch = SpeedWatch()
    seen = watch.observe(3.0, tokens=32, depth=100, disturbed=BUSY)
    assert (seen.expected, seen.state, seen.reason, seen.change) == (None, "", BUSY, "")
    assert watch.observe(10.0, tokens=32, depth=100).expected == 10
    assert watch.observe(9.0, tokens=32, depth=100, disturbed=BUSY).expected == 10


@pytest.mark.parametrize("attention", [0.0, 1e-4, 1e-2])  # seconds for each token in the context; the weights take 0.1
@pytest.mark.parametrize("order", ["deeper", "shallower", "any"])
def test_the_depth_is_no_change_of_the_machine(attention, order):
    depths = [*range(600, 60_000, 150)]
    random.Random(1).shuffle(depths) if order == "any" else depths.sort(reverse=order == "shallower")
    watch = SpeedWatch()
    found = [watch.observe(1 / (0.1 + attention * depth), tokens=32, depth=depth) for depth in depths]
    assert {one.change for one in found} == {""}


def test_a_recovery_at_a_new_depth_is_seen():
    watch = SpeedWatch()
    assert changes([10, 5], watch) == ["", "slower now"]
    assert changes([4.5], watch, depth=1000) == [""]
    assert changes([9.0], watch, depth=1000) == ["as fast as expected again"]
    assert changes([4], watch) == ["slower now"]
    assert changes([8.5], watch, depth=5000) == ["as fast as expected again"]


def test_a_conversation_grows_while_others_use_the_cpus():
    watch = SpeedWatch()
    for depth in range(100, 1000, 150):
        assert changes([10 - depth / 1e3], watch, depth=depth) == [""]
    assert changes([4], watch, depth=1100, disturbed=BUSY) == ["slower now"]
    seen = [watch.observe(4, tokens=32, depth=depth, disturbed=BUSY) for depth in range(1200, 9000, 300)]
    assert {(one.state, one.reason, one.change) for one in seen} == {("slower", BUSY, "")}
    assert changes([8.5], watch, depth=9000) == ["as fast as expected again"]


def test_the_plan_goes_before_the_first_answers():
    watch = SpeedWatch((0.1, 1e-4))
    seen = watch.observe(5.0, tokens=32, depth=100, disturbed=BUSY)
    assert seen.expected == pytest.approx(1 / 0.11)
    assert seen.change.startswith("the target is slower now: 5.00 tokens/s, expected 9.09 (")
    assert changes([5, 9], watch) == ["", "as fast as expected again"]
    assert changes([1 / 1.1], watch, depth=10_000) == [""]


def test_two_ways_of_timing_are_not_compared():
    watch = SpeedWatch()
    assert changes([10], watch, drafts=True) == [""]
    assert changes([5, 5], watch, drafts=False) == ["", ""]
    assert changes([10], watch, drafts=True) == [""]


def test_noise_does_not_chatter():
    noise = random.Random(7)
    assert set(changes([10 * math.exp(noise.gauss(0, 0.08)) for _ in range(2000)])) == {""}
