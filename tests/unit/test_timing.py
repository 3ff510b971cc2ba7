"""Timing batches of a model on a clock that goes as a table says, on a quiet machine and on busy ones."""

import random
from contextlib import closing

import numpy as np
import pytest

from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.timing import time_batch_sizes
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models.profile import demo_pair
from tests.support import shapes

# milliseconds of a 1B target on two cores
Q4_0 = {1: 27, 2: 47, 3: 69, 4: 39, 5: 61, 6: 75, 8: 47, 12: 74, 16: 73, 32: 144}
F16 = {1: 52, 2: 66, 3: 72, 4: 74, 5: 80, 6: 77, 8: 100, 12: 118, 16: 153, 32: 240}


class TimedModel:
    """A model whose batches take ``cost(batch_size)`` seconds, more after another size, ``load(now)`` times as long."""

    vocab_size = 100

    def __init__(self, cost, *, switch_s=0.0, load=lambda now: 1.0, capacity=512):
        self.cost, self.switch_s, self.load, self.capacity = cost, switch_s, load, capacity
        self.model = self  # that it is a context of
        self.cache = []
        self.now = 0.0
        self.batches = []  # (batch size, rows)
        self.decoded = []  # tokens of every batch
        self.last = 0

    def sample_tokens(self, text):
        return [ord(letter) % self.vocab_size for letter in text]

    @property
    def length(self):
        return len(self.cache)

    def decode(self, tokens, outputs, batch_size=0):
        assert outputs <= len(tokens)
        assert all(0 <= token < self.vocab_size for token in tokens)
        batch_size = max(batch_size, len(tokens))
        self.cache += tokens
        self.decoded.append(list(tokens))
        assert len(self.cache) <= self.capacity
        if outputs:
            self.batches.append((batch_size, outputs))
        seconds = self.cost(batch_size) + (self.switch_s if batch_size != self.last else 0)
        self.now += seconds * self.load(self.now)
        self.last = batch_size
        return np.zeros((outputs, self.vocab_size), np.float32)

    def rewind(self, length):
        assert length <= len(self.cache)
        del self.cache[length:]

    def mark(self):
        """Any length can be gone back to."""

    def clock(self):
        return self.now


def table(milliseconds, scale=1.0):
    """Seconds by batch size, on lines between the batch sizes of a table."""
    return lambda batch_size: (
        scale * float(np.interp(batch_size, list(milliseconds), list(milliseconds.values()))) / 1e3
    )


def found(model, **options):
    return time_batch_sizes(model, model.clock, limit=options.pop("limit", 16), **options)


@pytest.mark.parametrize("milliseconds", [Q4_0, F16])
def test_a_small_model_is_timed_at_every_batch_size_that_tells(milliseconds):
    model = TimedModel(table(milliseconds, 1 / 50), switch_s=1e-4)
    measured = found(model)
    assert measured.trusted
    assert measured.note == ""
    assert measured.switch_s == pytest.approx(1e-4)
    assert set(measured.points) >= {1, 2, 3, 4, 5, 6, 8, 12, 16}
    for batch_size, seconds in measured.points.items():
        assert seconds == pytest.approx(model.cost(batch_size))
    assert model.now <= 0.5


@pytest.mark.parametrize("scale", [1, 2, 5, 20])
def test_a_large_model_is_timed_at_four_batch_sizes_and_twice_if_that_takes_a_second(scale):
    model = TimedModel(table(F16, scale))
    measured = found(model)
    assert set(measured.points) >= {1, 2, 4, 8}
    assert measured.trusted
    needed = sum(model.cost(batch_size) for batch_size in (1, 2, 4, 8))
    assert model.now <= max(1 + model.cost(8), needed + 2 * model.cost(1))
    assert [batch_size for batch_size, _ in model.batches].count(8) == (1 if needed > 1 else 2)


@pytest.mark.parametrize("budget_s", [0.0, 0.1, 0.3, 1.0, 3.0])
def test_the_budget_is_kept_beyond_the_batch_sizes_that_are_needed(budget_s):
    model = TimedModel(table(Q4_0, 1 / 5))
    measured = found(model, limit=256, budget_s=budget_s)
    needed = TimedModel(model.cost)
    found(needed, limit=8, budget_s=budget_s)
    assert model.now <= max(budget_s, needed.now + 2 * model.cost(16)) + 1e-9
    assert set(measured.points) >= {1, 2, 4, 8}
    assert (16 in measured.points) == (budget_s > 0)
    assert (len(measured.points) > 6) == (budget_s >= 1)


@pytest.mark.parametrize("milliseconds", [Q4_0, F16])
def test_a_wide_batch_is_timed_beyond_the_budget_and_twice(milliseconds):
    """Kernels may be good at sixteen tokens: from narrower ones nobody would know, and never try."""
    model = TimedModel(
        lambda batch_size: table(milliseconds)(batch_size) if batch_size < 16 else 0.7 * table(milliseconds)(16)
    )
    measured = found(model)
    assert measured.points[16] == pytest.approx(model.cost(16))
    assert [batch_size for batch_size, _ in model.batches].count(16) == 2
    assert model.now < 1.5 + model.cost(16)


@pytest.mark.parametrize(
    ("limit", "allowed", "batch_sizes"),
    [
        (1, None, {1}),
        (3, None, {1, 2, 3}),
        (6, None, {1, 2, 3, 4, 5, 6}),
        (16, (4, 8, 12, 16), {4, 8, 12, 16}),
        (16, (12, 14), {12, 14}),
        (16, (2, 3, 4), {2, 3, 4}),
        (20, (20,), {20}),
    ],
)
def test_only_batch_sizes_that_may_be_used(limit, allowed, batch_sizes):
    model = TimedModel(table(Q4_0, 1 / 100))
    assert set(found(model, limit=limit, allowed=allowed).points) == batch_sizes
    assert {batch_size for batch_size, _ in model.batches} == batch_sizes


def test_no_batch_size_to_time():
    with pytest.raises(ValueError, match="up to 8"):
        found(TimedModel(table(F16)), limit=8, allowed=(12,))


def test_a_draft_is_timed_with_one_row_of_logits():
    model = TimedModel(table(Q4_0, 1 / 100))
    assert 16 in found(model, outputs=1).points
    assert {rows for _, rows in model.batches} == {1}


def test_the_cache_is_left_as_it_was():
    model = TimedModel(table(Q4_0, 1 / 100))
    model.decode([5, 6, 7], 0)
    found(model)
    assert model.cache == [5, 6, 7]


def test_batches_are_of_a_text_that_goes_on():
    """A mixture's router chooses as it does of text: from all over the vocabulary a batch would have more experts."""
    model = TimedModel(table(F16))
    found(model, budget_s=60.0)
    largest = max(model.decoded, key=len)
    assert len(largest) == 16
    assert len(set(largest)) > 8
    assert all(tokens == largest[: len(tokens)] for tokens in model.decoded)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_model_has_tokens_to_time_with_or_without_a_vocabulary(tmp_path, tokenizer):
    path = shapes.write(tmp_path / "tiny.gguf", shapes.SHAPES["qwen2-0.5b-q8_0"], tokenizer=tokenizer)
    with Model(path, vocab_only=True) as model:
        tokens = model.sample_tokens("seven ferries, " * 40)
        assert len(set(tokens)) > 5
        assert all(0 <= token < model.vocab_size for token in tokens)


def test_a_small_context_bounds_the_batch_sizes():
    model = TimedModel(table(Q4_0, 1 / 100), capacity=6)
    assert set(found(model).points) == {1, 2, 3, 4, 5, 6}


def bursts(every_s, length_s, factor):
    return lambda now: factor if now % every_s < length_s else 1.0


@pytest.mark.parametrize("factor", [2, 30])
@pytest.mark.parametrize("every_s", [0.011, 0.05, 0.17])
def test_disturbed_now_and_then(every_s, factor):
    """A third of the time belongs to another program; what is found is the model's own all the same."""
    model = TimedModel(table(F16, 1 / 50), load=bursts(every_s, every_s / 3, factor))
    measured = found(model)
    for batch_size in (1, 2, 4, 8):
        assert measured.points[batch_size] == pytest.approx(model.cost(batch_size), rel=0.35)


def test_page_faults_of_the_first_batch_do_not_count():
    model = TimedModel(table(F16, 5), load=lambda now: 20 if now == 0 else 1)
    measured = found(model)
    assert measured.points[1] == pytest.approx(model.cost(1))
    assert measured.trusted


@pytest.mark.parametrize("seed", range(5))
def test_disturbed_always(seed):
    rng = random.Random(seed)
    model = TimedModel(table(F16, 1 / 50), load=lambda now: 10 ** rng.uniform(0, 3))
    measured = found(model)
    assert not measured.trusted
    assert "busy" in measured.note
    assert measured.note.count(".") <= 1
    latency = LatencyModel(measured.points, trusted=measured.trusted, limit=16)
    assert all(
        latency.seconds(count) < 0.99 * count * latency.seconds(1) for count in range(2, 9)
    )  # else none is tried


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [1 / 50, 1 / 2])
def test_a_burst_over_one_batch_size_is_seen_by_the_others(batch_size, scale):
    """All timings of one size in a row take three times as long; a slow model leaves no time for a second visit."""
    model = TimedModel(table(F16, scale))
    model.load = lambda now: (
        3 if model.batches[-1][0] == batch_size and [w for w, _ in model.batches].count(batch_size) < 4 else 1
    )
    measured = found(model, limit=8)
    assert measured.points[batch_size] == pytest.approx(model.cost(batch_size))
    assert measured.trusted


def test_a_batch_size_whose_times_never_agree_is_not_trusted():
    model = TimedModel(table(F16, 1 / 50))
    model.load = lambda now: 1.5 ** len(model.batches)
    measured = found(model, limit=1)
    assert not measured.trusted
    assert set(measured.points) == {1}


def test_nothing_is_timed_again_for_ever():
    """A machine so busy that the first batch size takes more than the patience: every other one is timed once."""
    rng = random.Random(3)
    model = TimedModel(table(F16, 1 / 50), load=lambda now: 10 ** rng.uniform(3, 5))
    assert not found(model).trusted
    assert len(model.batches) <= 3 + 3


def test_a_steep_curve_that_is_real_is_believed():
    """Twice the tokens in half the time: so it is with kernels that need four rows."""
    steep = {1: 27, 2: 90, 3: 70, 4: 39, 8: 47, 16: 73}
    model = TimedModel(table({1: 27, 2: 54, 3: 70, 4: 29, 8: 47, 16: 73}, 1 / 50))
    assert found(model).trusted
    assert not found(TimedModel(table(steep, 1 / 50))).trusted  # nobody would decode two tokens so


def test_it_is_deterministic():
    one, two = (TimedModel(table(Q4_0, 1 / 50), load=bursts(0.05, 0.01, 7)) for _ in range(2))
    assert found(one) == found(two)


def test_the_demo_pair():
    """Nothing is said of seconds here: the machine that runs the tests is busy."""
    ticks = iter(range(10**6))
    for path, rows in zip(demo_pair(), (None, 1), strict=True):
        with Model(path) as model, closing(Context(model, ContextOptions(64, 16, 1))) as context:
            context.decode([1, 2, 3], 0)
            measured = time_batch_sizes(context, lambda: next(ticks) / 1e3, limit=16, outputs=rows)
            assert context.length == 3
            assert set(measured.points) >= {1, 2, 4, 8}


def test_the_batch_size_from_which_a_card_computes_is_timed_whatever_it_takes():
    """70B beside eight cores: a batch of 8 takes 1.5 s, one of 16 too, and 12 are the first that a card computes."""

    def cost(batch_size):
        return 0.25 if batch_size >= 12 else float(np.interp(batch_size, [1, 2, 4, 8], [0.27, 0.48, 0.9, 1.54]))

    model = TimedModel(cost)
    assert 12 not in found(model).points
    streamed = found(TimedModel(cost), op_offload_min_batch=12)
    assert streamed.points[12] == pytest.approx(0.25)
    latency = LatencyModel(streamed.points, limit=16)
    assert [latency.batch_size(count) for count in (1, 4, 9)] == [1, 12, 12]
    assert 12 not in found(TimedModel(cost), limit=8, op_offload_min_batch=12).points
