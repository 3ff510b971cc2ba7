"""A draft's latency between the rounds that ask it: it follows the target's, is doubted with time, and is probed."""

import math

import pytest

from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.adaptive import AdaptivePolicy, ExplorationCosts
from ggufspec.decoding.policy.base import RoundOutcome
from ggufspec.decoding.policy.constants import CONSTANTS
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.timing import CHECKED

TARGET = {1: 0.13, 2: 0.15, 4: 0.17, 8: 0.2, 16: 0.3}
DRAFT = {1: 0.027, 2: 0.03, 16: 0.08}
BUSY = 8.6  # times as slow the target is beside two busy programs, measured; a draft with as many operations 80 times


def scaled(points, factor):
    return {batch_size: seconds * factor for batch_size, seconds in points.items()}


def settle(latency, seconds, count=12):
    for _ in range(count):
        latency.observe(1, seconds)


def pair(target=TARGET, draft=DRAFT, **more):
    latency = LatencyModel(target)
    return latency, DraftLatency(LatencyModel(draft), latency, **more)


def test_nothing_changes_while_the_target_does_not():
    _, draft = pair()
    assert draft.seconds(1) == pytest.approx(0.027)
    assert draft.spread(0.0) == 0.0
    assert draft.cheaper(0.0) == 1.0


@pytest.mark.parametrize("factor", [0.2, 0.6, 3.0, 10.0])
def test_a_draft_on_the_targets_device_follows_it(factor):
    target, draft = pair()
    settle(target, 0.13 * factor)
    assert draft.seconds(1) == pytest.approx(0.027 * factor, rel=0.03)
    assert draft.seconds(16) == pytest.approx(0.08 * factor, rel=0.03)
    assert draft.spread(0.0) == pytest.approx(CONSTANTS.unshared_change * abs(math.log(factor)), rel=0.05)


def test_a_draft_on_another_device_keeps_its_latency_and_is_doubted():
    target, draft = pair(same_device=False)
    settle(target, 0.13 * BUSY)
    assert draft.seconds(1) == pytest.approx(0.027)
    assert draft.spread(0.0) > 1.0


def test_doubt_grows_with_time_and_ends_when_the_draft_is_timed():
    _, draft = pair()
    spreads = [draft.spread(now) for now in (0.0, 60.0, 600.0)]
    assert spreads == sorted(spreads)
    assert spreads[-1] > CONSTANTS.stale
    draft.observe(1, 0.027, 600.0)
    assert draft.spread(600.0) == 0.0
    assert draft.spread(500.0) == 0.0  # a clock that jumps back
    assert draft.age_s(660.0) == 60.0


def test_one_batch_is_believed_as_far_as_the_latency_was_in_doubt():
    """Timed beside two busy programs at eighty times its latency, which the target's recovery tells in part."""
    target, draft = pair(scaled(TARGET, BUSY), scaled(DRAFT, 80))
    settle(target, 0.13)
    assert draft.seconds(1) == pytest.approx(80 / BUSY * 0.027, rel=0.05)
    draft.observe(1, 0.027, 10.0)
    assert draft.seconds(1) == pytest.approx(0.027, rel=0.1)


def disturbed_policy(ratio=80.0):
    """Timed beside two busy programs; the target is fast again by now."""
    target, draft = pair(scaled(TARGET, BUSY), scaled(DRAFT, ratio))
    trials = ExplorationCosts(answers=1, elapsed_s=75.0)
    policy = AdaptivePolicy(target, {"draft": draft}, trials=trials)
    return policy, target, draft, trials


def begin(policy):
    policy.begin(15, 128, may_trim=True)


def test_a_draft_that_was_timed_on_a_busy_machine_is_probed_when_the_target_recovers():
    policy, target, draft, trials = disturbed_policy()
    begin(policy)
    assert policy.probe("draft", 100) == ""
    settle(target, 0.13)
    begin(policy)
    why = policy.probe("draft", 100)
    assert why == "a target token takes 0.12 times as long as when the draft was last timed"
    policy.probed("draft", 0.027)
    assert draft.seconds(1) == pytest.approx(0.027, rel=0.1)
    assert trials.spent_s == pytest.approx(CHECKED * 0.027)
    begin(policy)
    assert policy.probe("draft", 100) == ""
    assert policy.catch_up_count("draft", 100) >= ROWS


def test_a_probe_that_finds_the_draft_slow_is_not_repeated_until_something_changes():
    policy, target, draft, _ = disturbed_policy()
    settle(target, 0.13)
    begin(policy)
    assert policy.probe("draft", 100)
    policy.probed("draft", draft.seconds(1))
    for _ in range(30):
        begin(policy)
        assert policy.probe("draft", 100) == ""
        policy.observe_round(RoundOutcome(1, 0, 1, 0.13, 0.13))


def test_a_probe_stays_within_what_trials_may_take():
    policy, target, _, trials = disturbed_policy()
    trials.spent_s = 10.0
    settle(target, 0.13)
    begin(policy)
    assert policy.probe("draft", 100) == ""


def test_a_draft_that_could_not_pay_at_any_latency_is_not_probed():
    policy, target, _, _ = disturbed_policy()
    settle(target, 0.13)
    estimator = policy.estimator("draft")
    for confidence in (0.05, 0.3, 0.6, 0.9, 0.999):
        for _ in range(60):
            estimator.observe_candidate(confidence, 0)
            estimator.observe(confidence, 0, 0.0)
    begin(policy)
    assert policy.probe("draft", 17) == ""


def test_a_draft_that_cannot_be_timed_now_is_left_alone():
    policy, target, _, trials = disturbed_policy()
    settle(target, 0.13)
    begin(policy)
    assert policy.probe("draft", 100)
    policy.probed("draft", None)
    begin(policy)
    assert policy.probe("draft", 100) == ""
    assert trials.spent_s == 0.0


def test_a_drafter_that_costs_nothing_is_never_probed():
    policy, target, _, _ = disturbed_policy()
    settle(target, 0.13)
    begin(policy)
    assert policy.probe("lookup", 0) == ""


@pytest.mark.parametrize("factor", [0.12, 8.6])
def test_the_rate_to_beat_follows_the_machine(factor):
    """The gain of the last rounds is kept, at the target's speed of now."""
    policy, target, _, _ = disturbed_policy()
    before = target.seconds(1)
    for _ in range(40):
        policy.begin(15, 128, may_trim=True)
        policy._verified = 3
        policy.observe_round(RoundOutcome(4, 2, 3, 1.5 * before, 1.6 * before))
    gain = policy.rate * target.seconds(1)
    assert gain > 1.4
    settle(target, before * factor)
    assert policy.rate * target.seconds(1) == pytest.approx(gain)


def test_a_machine_that_is_suspended_in_a_round_changes_little():
    policy, target, _, trials = disturbed_policy()
    for _ in range(40):
        policy.begin(15, 128, may_trim=True)
        policy._verified = 3
        policy.observe_round(RoundOutcome(4, 2, 3, 1.5 * target.seconds(1), 1.6 * target.seconds(1)))
    before, gain, token_s = trials.elapsed_s, policy.rate * target.seconds(1), target.seconds(1)
    policy.begin(15, 128, may_trim=True)
    policy.observe_round(RoundOutcome(4, 2, 3, 3600.0, 3600.0))
    assert trials.elapsed_s <= before + 60
    assert policy.rate * target.seconds(1) > 0.7 * gain
    for seconds in (0.0, -1.0):  # a clock that stands, or was set back
        policy.begin(15, 128, may_trim=True)
        policy.observe_round(RoundOutcome(1, 0, 1, seconds, seconds))
        assert policy.rate > 0
    assert target.seconds(1) < 2 * token_s


@pytest.mark.parametrize("factor", [0.12, 8.6])
def test_a_change_of_the_machine_is_believed_within_a_few_rounds(factor):
    """Batches without a draft are observed four at a time, but for those that are far from what was expected."""
    target = LatencyModel(TARGET)
    policy = AdaptivePolicy(target, {})
    for seconds in [TARGET[1]] * 20 + [factor * TARGET[1]] * 5:
        begin(policy)
        policy.verify_count()
        policy.observe_round(RoundOutcome(1, 0, 1, seconds, seconds))
    assert target.seconds(1) == pytest.approx(factor * TARGET[1], rel=0.25)


def test_what_drafts_must_beat_is_looked_at_when_it_is_in_doubt():
    """A machine that changed while batches of other sizes ran: the next round decodes a single token."""
    policy, target, _, _ = disturbed_policy()
    for _ in range(6):
        target.observe(8, 0.2)
    begin(policy)
    assert policy.choose({"lookup": 0.9}, {}) is None
    policy.verify_count()
    policy.observe_round(RoundOutcome(1, 0, 1, 0.13, 0.13))
    policy._back_off.target_only.clear()
    for _ in range(3):
        target.observe(1, 0.13)
    begin(policy)
    assert target.doubt(1) < CONSTANTS.stale
    assert policy.choose({"lookup": 0.99}, {}) == "lookup"


def test_a_single_token_that_seems_slower_than_wider_batches_is_looked_at_a_few_times():
    target = LatencyModel({1: 1.0, 2: 0.15, 16: 0.3})
    policy = AdaptivePolicy(target, {})
    chosen = []
    for _ in range(100):
        begin(policy)
        chosen.append(policy.choose({"lookup": 0.99}, {}))
        if chosen[-1] is None:
            target.observe(1, 1.0)  # it really is
    assert chosen[: int(CONSTANTS.most_checks)] == [None] * int(CONSTANTS.most_checks)
    assert chosen.count(None) <= CONSTANTS.most_checks + 100 * CONSTANTS.checks


def test_a_single_token_that_was_timed_too_slow_is_put_right_by_one_look():
    target = LatencyModel({1: 1.0, 2: 0.15, 16: 0.3})
    policy = AdaptivePolicy(target, {})
    begin(policy)
    assert policy.choose({"lookup": 0.99}, {}) is None
    target.observe(1, 0.13)
    assert target.seconds(1) < 0.3


def retimed(policy, rounds=60):
    """Batch sizes of rounds without a draft."""
    sizes = []
    for _ in range(rounds):
        begin(policy)
        policy.verify_count()
        sizes.append(policy.target_only_batch_size(1))
        policy.observe_round(RoundOutcome(sizes[-1], 0, 1, TARGET[1] if sizes[-1] == 1 else 0.2, 0.2))
    return [size for size in sizes if size > 1]


def test_batch_sizes_that_were_disturbed_are_timed_again_by_padding():
    """Each once, and only while the machine is quiet."""
    steep = {1: 0.13, 2: 0.26, 4: 0.52, 8: 1.0, 16: 2.0}
    quiet = False
    target = LatencyModel(steep, trusted=False)
    policy = AdaptivePolicy(target, {}, quiet=lambda: quiet)
    assert retimed(policy) == []
    quiet = True
    assert sorted(retimed(policy)) == sorted(CONSTANTS.retimed)
    assert retimed(policy) == []
    assert target.seconds(4) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("more", [{"trusted": True}, {"can_pad": False, "limit": 16}])
def test_a_batch_size_that_was_not_disturbed_or_cannot_be_padded_is_left(more):
    assert retimed(AdaptivePolicy(LatencyModel(TARGET, **{"trusted": False} | more), {})) == []


def test_strict_mode_is_padded_within_its_class():
    policy = AdaptivePolicy(LatencyModel({4: 0.2, 8: 0.4, 12: 0.6}, batch_sizes=(4, 8, 12), trusted=False), {})
    begin(policy)
    assert {policy.target_only_batch_size(4) for _ in range(20)} <= {4, 8}


def test_a_latency_model_goes_on_from_another_measurement():
    target, draft = pair(scaled(TARGET, BUSY))
    batch_size = target.batch_size
    target.become(LatencyModel(TARGET))
    assert target.seconds(1) == pytest.approx(0.13)
    assert batch_size(3) == LatencyModel(TARGET).batch_size(3)
    draft.timed(5.0)
    assert draft.target_change == 1.0
    assert draft.spread(5.0) == 0.0
