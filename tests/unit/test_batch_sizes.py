"""Classes of batch sizes and strict mode on models whose logits depend on the batch size, in given classes."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.batch_sizes import DEPTHS, classes, strict_batch_sizes
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models.profile import demo_pair
from tests.support.properties import examples

VOCAB = 4
LIMIT = 16


class WideModel:
    """Logits of a token depend on the context, and by rounding on ``rounding(batch_size, place, cells)``.

    As llama.cpp's context does, it takes padding away again and gives room for it behind its capacity.
    """

    def __init__(self, rounding, capacity=512, can_pad=True):
        self.rounding, self.capacity, self.can_pad = rounding, capacity, can_pad
        self.vocab_size = VOCAB
        self.cache = []
        self.calls = []  # (length before, tokens, outputs, batch size) of every call
        self._buffer = np.empty((64, VOCAB), np.float32)

    @property
    def length(self):
        return len(self.cache)

    def decode(self, tokens, outputs, batch_size=0):
        assert 0 <= outputs <= len(tokens)
        assert len(self.cache) + len(tokens) <= self.capacity
        assert self.can_pad or batch_size <= len(tokens)
        batch_size = max(batch_size, len(tokens))
        self.calls.append((len(self.cache), tuple(tokens), outputs, batch_size))
        self._buffer.fill(np.nan)  # rows are valid until the next call
        first = len(tokens) - outputs
        padding = batch_size - len(tokens)
        for place, token in enumerate(tokens):
            self.cache.append(token)
            if place >= first:
                self._buffer[place - first] = self.row(batch_size, place, padding)
        return self._buffer[:outputs]

    def row(self, batch_size, place, padding):
        spice = (31 * len(self.cache) + 7 * self.cache[-1]) % 11
        rounding = self.rounding(batch_size, place, len(self.cache), padding)
        return [(spice + 5 * token) % 11 + rounding * (token == 0) for token in range(self.vocab_size)]

    def rewind(self, length):
        assert 0 <= length <= len(self.cache)
        del self.cache[length:]


def nothing(batch_size, place, cells, padding):
    return 0


def fours(batch_size, place, cells, padding):
    """Multiples of four agree, and no other batch size does."""
    return 0 if batch_size % 4 == 0 else batch_size / 8


def fours_to_eight(batch_size, place, cells, padding):
    return 0 if batch_size in (4, 8) else batch_size / 8


def all_differ(batch_size, place, cells, padding):
    return batch_size / 8


def one_apart(batch_size, place, cells, padding):
    """F16 with flash attention."""
    return batch_size == 1


def deep_one_apart(batch_size, place, cells, padding):
    """Q8_0: only beyond 256 cells."""
    return (batch_size == 1) / 8 if cells > 256 else 0


def k_quants(batch_size, place, cells, padding):
    """Q4_K_M: 2 and 3 agree, multiples of four agree, 6 = 4 + 2 with neither."""
    return 2 if place < batch_size // 4 * 4 else (batch_size % 4 > 1)


def two_kernels(batch_size, place, cells, padding):
    """Q4_0 in plain blocks: one kernel below eight tokens, another from there on, and a third for a single one."""
    return 2 if batch_size == 1 else (batch_size >= 8) / 8


def deep_fours(batch_size, place, cells, padding):
    """Four and eight part beyond 256 cells."""
    return batch_size / 8 if cells > 256 else fours(batch_size, place, cells, padding)


def by_place(batch_size, place, cells, padding):
    return place / 8


def by_place_when_deep(batch_size, place, cells, padding):
    return place / 8 if cells > 256 else 0


def beyond_five(batch_size, place, cells, padding):
    """Every batch size agrees with every other, and the sixth token of a batch is another than if it were the first."""
    return place > 4


def by_padding(batch_size, place, cells, padding):
    """Multiples of four agree until they are padded."""
    return padding / 8 if batch_size % 4 == 0 else batch_size / 8


FOURS = (4, 8, 12, 16)


@pytest.mark.parametrize(
    ("rounding", "batch_sizes"),
    [
        (nothing, tuple(range(1, 17))),
        (fours, FOURS),
        (fours_to_eight, (4, 8)),
        (all_differ, (2,)),
        (one_apart, tuple(range(2, 17))),
        (deep_one_apart, tuple(range(2, 17))),
        (k_quants, FOURS),
        (deep_fours, (2,)),
        (beyond_five, (1, 2, 3, 4, 5)),
        (by_padding, (2,)),
        (two_kernels, (2, 3, 4, 5, 6, 7)),
    ],
)
def test_the_narrowest_class_with_room_for_drafts(rounding, batch_sizes):
    model = WideModel(rounding)
    assert strict_batch_sizes(model, LIMIT) == batch_sizes
    assert model.length == 0


@pytest.mark.parametrize("rounding", [by_place, by_place_when_deep])
def test_no_class_where_the_place_in_the_batch_matters(rounding):
    with pytest.raises(ModelError, match="place in the batch") as caught:
        strict_batch_sizes(WideModel(rounding), LIMIT)
    assert "--strict" in caught.value.hint


def test_a_class_that_breaks_gives_way_to_one_that_does_not():
    """The widest class falls apart at its third token; what is left of it is narrower than the second class."""

    def rounding(batch_size, place, cells, padding):
        return place > 2 if batch_size > 5 else 2 + (batch_size == 1)

    assert strict_batch_sizes(WideModel(rounding), LIMIT) == (2, 3, 4, 5)


def test_every_batch_size_is_in_one_class_and_the_widest_is_in_the_first():
    found = classes(WideModel(k_quants), LIMIT)
    assert sorted(batch_size for batch_sizes in found for batch_size in batch_sizes) == list(range(1, 17))
    assert found[0] == FOURS
    assert {(2, 3), (1,)} < set(found)


def test_one_depth_is_enough_to_part_two_batch_sizes():
    assert len(classes(WideModel(deep_one_apart), LIMIT, (32,))) == 1
    assert classes(WideModel(deep_one_apart), LIMIT) == (tuple(range(2, 17)), (1,))


@pytest.mark.parametrize("capacity", [16, 40, 47, 48, 64])
def test_a_small_context_is_measured_as_far_as_it_goes(capacity):
    assert strict_batch_sizes(WideModel(fours_to_eight, capacity), LIMIT) == (4, 8)
    with pytest.raises(ModelError):
        strict_batch_sizes(WideModel(by_place, capacity), LIMIT)


def test_a_context_smaller_than_the_widest_batch():
    assert strict_batch_sizes(WideModel(fours, capacity=9), LIMIT) == (4, 8)


@pytest.mark.parametrize(("capacity", "batch_sizes"), [(257, (2,)), (271, (2,)), (303, (2,)), (304, (2,))])
def test_a_context_that_reaches_beyond_256_cells_is_measured_there(capacity, batch_sizes):
    assert strict_batch_sizes(WideModel(deep_fours, capacity), LIMIT) == batch_sizes


def test_a_context_of_256_cells_is_not_measured_beyond():
    model = WideModel(deep_fours, 256)
    assert strict_batch_sizes(model, LIMIT) == FOURS
    assert max(before + len(tokens) for before, tokens, *_ in model.calls) <= 256


def test_what_was_in_the_cache_is_not_compared():
    model = WideModel(fours)
    model.decode([3] * 100, 0)
    assert strict_batch_sizes(model, LIMIT) == FOURS
    assert model.calls[1][0] == 0


def test_it_costs_little_more_than_every_batch_size_once_at_each_depth():
    model = WideModel(fours)
    strict_batch_sizes(model, LIMIT)
    batches = [batch_size for *_, outputs, batch_size in model.calls if outputs]
    assert sum(batches) <= len(DEPTHS) * (sum(range(1, 17)) + LIMIT + LIMIT + 6 * 4)
    assert sum(len(tokens) for _, tokens, outputs, _ in model.calls if not outputs) <= 2 * max(DEPTHS)


@pytest.mark.parametrize(("rounding", "batch_sizes"), [(nothing, tuple(range(1, 17))), (fours, ()), (one_apart, ())])
def test_a_model_that_cannot_pad_needs_a_class_without_a_gap(rounding, batch_sizes):
    model = WideModel(rounding, can_pad=False)
    if batch_sizes:
        assert strict_batch_sizes(model, LIMIT) == batch_sizes
        assert LatencyModel({1: 1.0}, batch_sizes=batch_sizes, can_pad=False).batch_size(3) == 3
    else:
        with pytest.raises(ModelError):
            strict_batch_sizes(model, LIMIT)


def read_as(model, text, counts, batch_size):
    """The logits of a text behind 30 tokens of prompt, so many tokens at a time, padded as ``batch_size`` says."""
    model.rewind(0)
    model.decode(text[:30], 0)
    rows = []
    for count in counts:
        batch = text[model.length : model.length + count]
        if batch:
            rows.append(model.decode(batch, len(batch), batch_size(len(batch))).copy())
    return np.concatenate(rows)


counts = st.lists(st.integers(1, 16), min_size=30, max_size=30)
slow_narrow = LatencyModel(
    {batch_size: 1 / batch_size for batch_size in range(1, 17)}
)  # a latency that pads whatever it may


@examples(60)
@given(
    st.sampled_from([fours, fours_to_eight, all_differ, deep_one_apart, k_quants, beyond_five]), counts, st.booleans()
)
def test_every_batch_of_the_class_gives_what_single_tokens_give(rounding, counts, pads):
    model = WideModel(rounding)
    batch_sizes = strict_batch_sizes(model, LIMIT)
    points = slow_narrow.points() if pads else {1: 1.0, 16: 16.0}
    latency = LatencyModel({batch_size: points[batch_size] for batch_size in points}, batch_sizes=batch_sizes)
    text = [(3 * i * i + i) % VOCAB for i in range(300)]
    counts = [min(count, latency.limit) for count in counts]
    drafted = read_as(model, text, counts, latency.batch_size)
    model.calls.clear()
    alone = read_as(model, text, [1] * len(drafted), latency.batch_size)
    assert np.array_equal(drafted, alone)
    assert all(batch_size in batch_sizes for *_, outputs, batch_size in model.calls if outputs)


def test_without_the_class_it_does_not():
    model = WideModel(all_differ)
    text = [(3 * i * i + i) % VOCAB for i in range(64)]
    drafted = read_as(model, text, [5, 4, 1, 2], lambda count: count)
    assert not np.array_equal(drafted, read_as(model, text, [1] * 12, lambda count: count))


def test_the_demo_target_to_the_bit():
    target, _ = demo_pair()
    with Model(target) as model, closing(Context(model, ContextOptions(512, LIMIT, 1))) as context:
        found = classes(context, LIMIT)
        assert sorted(batch_size for batch_sizes in found for batch_size in batch_sizes) == list(range(1, 17))
        batch_sizes = strict_batch_sizes(context, LIMIT)
        assert max(batch_sizes) > 1
        assert context.length == 0
        latency = LatencyModel({1: 1.0, 16: 16.0}, batch_sizes=batch_sizes)
        text = model.tokenize("import os\n\n\ndef walk(folder):\n    " * 40)[:300]
        counts = [min(1 + 5 * i % 16, latency.limit) for i in range(30)]
        drafted = read_as(context, text, counts, latency.batch_size)
        assert len(drafted) > 150
        assert np.array_equal(drafted, read_as(context, text, [1] * len(drafted), latency.batch_size))
