"""T(n) and what is learned of it from the batches that run."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.policy.latency import LatencyModel

# A 1B target on two cores, milliseconds: Q4_0 is good at four and eight
Q4_0 = {1: 27, 2: 47, 3: 69, 4: 39, 5: 61, 6: 75, 8: 47, 12: 74, 16: 73}
F16 = {1: 52, 2: 66, 3: 72, 4: 74, 5: 80, 6: 77, 8: 100, 12: 118, 16: 153}


def run(latency, truth, batch_sizes, spread=0.0, seed=0):
    """Tell the latency of batches of these sizes, as they take on a machine whose T(n) is ``truth``."""
    rng = random.Random(seed)
    for batch_size in batch_sizes:
        latency.observe(batch_size, truth[batch_size] * rng.lognormvariate(0, spread))


def test_three_tokens_are_padded_to_four_and_five_to_eight():
    latency = LatencyModel(Q4_0)
    assert [latency.batch_size(count) for count in range(1, 10)] == [1, 4, 4, 4, 8, 8, 8, 8, 9]
    assert [latency.seconds(count) for count in (1, 2, 3, 4, 5, 8)] == pytest.approx([27, 39, 39, 39, 47, 47])
    assert latency.limit == 16


def test_padding_must_be_clearly_faster():
    assert LatencyModel({1: 1, 2: 2, 3: 3, 4: 2.95}).batch_size(3) == 3
    assert LatencyModel({1: 1, 2: 2, 3: 3, 4: 2.9}).batch_size(3) == 4


def test_a_flat_curve_pads_nothing():
    latency = LatencyModel({1: 1, 16: 1})
    assert [latency.batch_size(count) for count in range(1, 17)] == list(range(1, 17))


def test_no_tokens_cost_nothing_and_too_many_have_no_batch_size():
    latency = LatencyModel(Q4_0)
    assert (latency.batch_size(0), latency.seconds(0)) == (0, 0)
    with pytest.raises(IndexError):
        latency.batch_size(17)
    with pytest.raises(IndexError):
        latency.seconds(17)


def test_between_points_it_is_a_line():
    assert LatencyModel({2: 10, 6: 30}).seconds(3) == pytest.approx(15)


def test_below_the_first_point_it_is_flat():
    assert LatencyModel({4: 10, 8: 30}).seconds(1) == pytest.approx(10)


def test_beyond_the_last_point_the_last_slope_goes_on():
    assert LatencyModel({1: 10, 4: 13, 8: 25}, limit=10).seconds(10) == pytest.approx(31)


def test_beyond_a_dip_the_slope_of_the_whole_curve_goes_on():
    latency = LatencyModel(Q4_0, limit=32)
    assert latency.seconds(32) == pytest.approx(73 + 16 * (73 - 27) / 15)
    assert latency.seconds(17) > latency.seconds(16)


@pytest.mark.parametrize("points", [{1: 5}, {1: 9, 4: 3}])
def test_the_line_beyond_never_falls(points):
    assert LatencyModel(points, limit=8).seconds(8) == pytest.approx(min(points.values()))


def test_only_the_class_of_strict_mode_is_used():
    latency = LatencyModel(F16, batch_sizes=(4, 8, 12))
    assert [latency.batch_size(count) for count in (1, 3, 4, 5, 8, 9, 12)] == [4, 4, 4, 8, 8, 12, 12]
    assert latency.limit == 12
    with pytest.raises(IndexError):
        latency.batch_size(13)
    assert LatencyModel({4: 50, 8: 40, 12: 60}, batch_sizes=(4, 8, 12)).batch_size(1) == 8


def test_a_model_that_cannot_pad_is_never_padded():
    latency = LatencyModel(Q4_0, can_pad=False)
    assert [latency.batch_size(count) for count in range(1, 17)] == list(range(1, 17))
    assert latency.seconds(3) == pytest.approx(69)
    with pytest.raises(ValueError, match="cannot pad"):
        LatencyModel(Q4_0, batch_sizes=(4, 8), can_pad=False)
    assert LatencyModel(Q4_0, batch_sizes=(1, 2), can_pad=False).batch_size(2) == 2


def test_beyond_sixteen_only_multiples_of_eight_are_used():
    latency = LatencyModel({1: 1, 64: 64}, limit=64)
    assert [latency.batch_size(count) for count in (16, 17, 24, 25, 60)] == [16, 24, 24, 32, 64]
    assert LatencyModel({1: 1, 64: 64}, limit=64, can_pad=False).batch_size(17) == 17


def test_padding_fits_the_room_behind_the_context():
    latency = LatencyModel({1: 1, 60: 60, 128: 2})
    assert latency.batch_size(60) == 64
    assert latency.batch_size(64) == 128


def test_a_switch_of_batch_size_costs():
    latency = LatencyModel(Q4_0, switch_s=5)
    assert latency.seconds(3) == latency.up_to(3, 4)[-1] == pytest.approx(39)
    assert latency.up_to(3, 3)[-1] == latency.up_to(3, 1)[-1] == pytest.approx(44)


@pytest.mark.parametrize("last", [None, 1, 4])
def test_all_batch_sizes_at_once(last):
    latency = LatencyModel(Q4_0, switch_s=5)
    for _ in range(5):
        latency.observe(2, 100.0)
    for most in range(latency.limit + 1):
        switches_s = [0 if last in (None, latency.batch_size(count)) else 5 for count in range(1, most + 1)]
        assert latency.up_to(most, last) == [latency.seconds(n) + more for n, more in enumerate(switches_s, 1)]
    with pytest.raises(IndexError):
        latency.up_to(latency.limit + 1)


@pytest.mark.parametrize("points", [{}, {1: 0.0}, {0: 1.0}, {1: -1.0}, {1: math.nan}, {1: math.inf}])
def test_points_that_are_none(points):
    with pytest.raises(ValueError, match="positive"):
        LatencyModel(points)


def test_no_batch_size():
    with pytest.raises(ValueError, match="may be used"):
        LatencyModel(Q4_0, batch_sizes=())
    with pytest.raises(ValueError, match="may be used"):
        LatencyModel(Q4_0, batch_sizes=(0, 4))


def test_what_is_as_expected_changes_nothing():
    latency = LatencyModel(Q4_0)
    run(latency, Q4_0, [1, 4, 8, 4, 4, 1] * 20)
    assert latency.points() == pytest.approx(Q4_0)
    assert [latency.batch_size(count) for count in range(1, 10)] == [1, 4, 4, 4, 8, 8, 8, 8, 9]


@pytest.mark.parametrize("batch_sizes", [[4] * 20, [1, 4, 8, 4] * 5, [16] * 20])
def test_load_that_doubles_doubles_all_batch_sizes(batch_sizes):
    latency = LatencyModel(Q4_0)
    run(latency, Q4_0, [1, 4, 8] * 10)
    twice = {batch_size: 2 * seconds for batch_size, seconds in Q4_0.items()}
    run(latency, twice, batch_sizes)
    for batch_size in Q4_0:
        assert latency.points()[batch_size] == pytest.approx(twice[batch_size], rel=0.12)
    assert latency.seconds(3) == pytest.approx(78, rel=0.08)
    assert latency.batch_size(3) == 4
    run(latency, Q4_0, [1, 4, 8, 4] * 5)
    assert latency.points() == pytest.approx(Q4_0, rel=0.12)


def test_load_is_followed_after_a_long_run_too():
    latency = LatencyModel(Q4_0)
    run(latency, Q4_0, [1, 4, 8, 4] * 1000, spread=0.1)
    twice = {batch_size: 2 * seconds for batch_size, seconds in Q4_0.items()}
    run(latency, twice, [4, 8, 4, 1] * 5, spread=0.1)
    assert latency.points() == pytest.approx(twice, rel=0.2)


def test_a_single_outlier_changes_little():
    latency = LatencyModel(Q4_0)
    run(latency, Q4_0, [1, 4, 8, 4] * 10)
    for factor in (50, 1 / 50):
        latency.observe(4, factor * Q4_0[4])
        for batch_size in Q4_0:
            assert latency.points()[batch_size] == pytest.approx(Q4_0[batch_size], rel=0.1)
        run(latency, Q4_0, [4, 1, 8] * 10)


def test_a_batch_size_that_gets_slower_alone():
    latency = LatencyModel(Q4_0)
    run(latency, Q4_0, [1, 4, 8] * 10)
    slower = Q4_0 | {4: 70}
    run(latency, slower, [1, 4, 8] * 30)
    assert latency.points()[4] == pytest.approx(70, rel=0.02)
    for batch_size in (1, 8):
        assert latency.points()[batch_size] == pytest.approx(Q4_0[batch_size], rel=0.02)
    for batch_size in (2, 5, 16):  # not seen: some of the change may have been the load's
        assert latency.points()[batch_size] == pytest.approx(Q4_0[batch_size], rel=0.15)
    assert [latency.batch_size(count) for count in (3, 4)] == [8, 8]


def test_a_batch_size_that_was_interpolated_becomes_a_point():
    latency = LatencyModel({1: 27, 2: 47, 4: 39, 8: 47})
    assert latency.seconds(3) == pytest.approx(39)
    assert set(latency.points()) == {1, 2, 4, 8}
    run(latency, {7: 20}, [7])
    assert latency.points()[7] == pytest.approx(20, rel=0.2)
    run(latency, Q4_0 | {7: 20}, [1, 4, 7] * 10)
    assert set(latency.points()) == {1, 2, 4, 7, 8}
    assert latency.points()[7] == pytest.approx(20, rel=0.05)
    assert latency.points()[1] == pytest.approx(27, rel=0.05)
    assert [latency.batch_size(count) for count in (2, 4, 5, 7, 8)] == [7, 7, 7, 7, 8]


def test_what_was_measured_on_a_busy_machine_is_corrected_soon():
    """Batch size 4 looked three times as slow as it is; without trust in the measurement it gives way."""
    points = dict.fromkeys((1, 2, 4, 8), 30.0) | {4: 90.0}
    trusting, doubting = LatencyModel(points), LatencyModel(points, trusted=False)
    for latency in (trusting, doubting):
        run(latency, {1: 30, 4: 30}, [1, 1, 1, 4])
    assert abs(doubting.points()[4] - 30) < abs(trusting.points()[4] - 30)
    for latency in (trusting, doubting):
        run(latency, {1: 30, 4: 30}, [1, 4, 1, 4, 1])
        assert latency.points()[4] == pytest.approx(30, rel=0.05)
    assert (trusting.trusted, doubting.trusted) == (True, False)


def test_noise_does_not_make_batch_sizes_flicker():
    """3 and 4 cost the same; which one is taken is settled once."""
    truth = {1: 20.0, 2: 30.0, 3: 40.0, 4: 40.0, 8: 60.0}
    latency = LatencyModel(truth)
    rng = random.Random(5)
    seen = []
    for _ in range(400):
        batch_size = rng.choice((1, 3, 4, 8))
        latency.observe(batch_size, truth[batch_size] * rng.lognormvariate(0, 0.08))
        seen.append(latency.batch_size(3))
    assert sum(a != b for a, b in pairwise(seen)) <= 6


def test_a_batch_size_stays_until_another_one_is_clearly_faster():
    truth = {1: 20.0, 3: 40.0, 4: 40.0}
    latency = LatencyModel(truth)
    taken = []
    for four in (40, 37, 40, 43):
        run(latency, truth | {4: four}, [1, 3, 4] * 100)
        taken.append(latency.batch_size(3))
    assert taken == [3, 4, 4, 3]


def test_the_cost_of_a_switch_is_not_taken_for_the_batch_size():
    latency = LatencyModel(F16, switch_s=10)
    latency.observe(1, 52)
    for _ in range(30):
        latency.observe(4, 84)
        latency.observe(1, 62)
    assert latency.points()[4] == pytest.approx(74, rel=0.01)
    assert latency.points()[1] == pytest.approx(52, rel=0.01)


@pytest.mark.parametrize(("batch_size", "seconds"), [(4, 0.0), (4, -1.0), (0, 1.0), (17, 1.0), (300, 1.0)])
def test_what_no_clock_saw_is_left_out(batch_size, seconds):
    latency = LatencyModel(Q4_0)
    latency.observe(batch_size, seconds)
    assert latency.points() == pytest.approx(Q4_0)


def test_it_starts_again_where_it_ended():
    latency = LatencyModel(Q4_0, limit=20)
    run(
        latency,
        {batch_size: 1.7 * seconds for batch_size, seconds in Q4_0.items()} | {20: 200, 7: 99},
        [1, 4, 20, 7] * 10,
        0.1,
    )
    again = LatencyModel(latency.points(), limit=20)
    for count in range(1, 21):
        assert again.seconds(count) == pytest.approx(latency.seconds(count), rel=0.03)


def test_it_is_deterministic():
    one, two = LatencyModel(Q4_0), LatencyModel(Q4_0)
    for latency in (one, two):
        run(latency, F16, [1, 4, 8, 6] * 50, spread=0.3, seed=7)
    assert one.points() == two.points()


tables = st.dictionaries(st.integers(1, 24), st.floats(1e-4, 10), min_size=1)
batches = st.lists(st.tuples(st.integers(1, 24), st.floats(1e-5, 100)), max_size=40)


@given(tables, batches, st.booleans(), st.one_of(st.none(), st.sets(st.integers(1, 24), min_size=1)))
def test_whatever_runs_a_batch_size_holds_its_tokens_and_is_allowed(points, batches, can_pad, batch_sizes):
    latency = LatencyModel(points, limit=24, batch_sizes=batch_sizes, can_pad=can_pad or batch_sizes is not None)
    for batch_size, seconds in batches:
        latency.observe(batch_size, seconds)
        for count in range(1, latency.limit + 1):
            assert latency.batch_size(count) >= count
            assert latency.batch_size(count) in (batch_sizes or range(1, 25))
            assert latency.can_pad or latency.batch_size(count) == count
            assert 0 < latency.seconds(count) < math.inf
            narrowest = min(batch_size for batch_size in batch_sizes or range(1, 25) if batch_size >= count)
            if latency.can_pad:
                direct = latency.seconds(narrowest) if latency.batch_size(narrowest) == narrowest else math.inf
                assert latency.seconds(count) <= 1.03 * direct
    assert all(0 < seconds < math.inf for seconds in latency.points().values())
