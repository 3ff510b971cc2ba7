"""Width classes and strict mode on models whose logits depend on the width of the batch, in given classes."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.widths import DEPTHS, classes, strict_widths
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.models.profile import demo_pair

VOCAB = 4
LIMIT = 16


class WideModel:
    """Logits of a token depend on the context, and by rounding on ``rounding(width, place, cells)``.

    As llama.cpp's context does, it takes padding away again and gives room for it behind its capacity.
    """

    def __init__(self, rounding, capacity=512, can_pad=True):
        self.rounding, self.capacity, self.can_pad = rounding, capacity, can_pad
        self.vocab_size = VOCAB
        self.cache = []
        self.calls = []  # (length before, tokens, outputs, width) of every call
        self._buffer = np.empty((64, VOCAB), np.float32)

    @property
    def length(self):
        return len(self.cache)

    def decode(self, tokens, outputs, width=0):
        assert 0 <= outputs <= len(tokens)
        assert len(self.cache) + len(tokens) <= self.capacity
        assert self.can_pad or width <= len(tokens)
        width = max(width, len(tokens))
        self.calls.append((len(self.cache), tuple(tokens), outputs, width))
        self._buffer.fill(np.nan)  # rows are valid until the next call
        first = len(tokens) - outputs
        padding = width - len(tokens)
        for place, token in enumerate(tokens):
            self.cache.append(token)
            if place >= first:
                self._buffer[place - first] = self.row(width, place, padding)
        return self._buffer[:outputs]

    def row(self, width, place, padding):
        spice = (31 * len(self.cache) + 7 * self.cache[-1]) % 11
        rounding = self.rounding(width, place, len(self.cache), padding)
        return [(spice + 5 * token) % 11 + rounding * (token == 0) for token in range(self.vocab_size)]

    def rewind(self, length):
        assert 0 <= length <= len(self.cache)
        del self.cache[length:]


def nothing(width, place, cells, padding):
    return 0


def fours(width, place, cells, padding):
    """Multiples of four agree, and no other width does."""
    return 0 if width % 4 == 0 else width / 8


def fours_to_eight(width, place, cells, padding):
    return 0 if width in (4, 8) else width / 8


def all_differ(width, place, cells, padding):
    return width / 8


def one_apart(width, place, cells, padding):
    """F16 with flash attention."""
    return width == 1


def deep_one_apart(width, place, cells, padding):
    """Q8_0: only beyond 256 cells."""
    return (width == 1) / 8 if cells > 256 else 0


def k_quants(width, place, cells, padding):
    """Q4_K_M: 2 and 3 agree, multiples of four agree, 6 = 4 + 2 with neither."""
    return 2 if place < width // 4 * 4 else (width % 4 > 1)


def two_kernels(width, place, cells, padding):
    """Q4_0 in plain blocks: one kernel below eight tokens, another from there on, and a third for a single one."""
    return 2 if width == 1 else (width >= 8) / 8


def deep_fours(width, place, cells, padding):
    """Four and eight part beyond 256 cells."""
    return width / 8 if cells > 256 else fours(width, place, cells, padding)


def by_place(width, place, cells, padding):
    return place / 8


def by_place_when_deep(width, place, cells, padding):
    return place / 8 if cells > 256 else 0


def beyond_five(width, place, cells, padding):
    """Every width agrees with every other, and the sixth token of a batch is another than if it were the first."""
    return place > 4


def by_padding(width, place, cells, padding):
    """Multiples of four agree until they are padded."""
    return padding / 8 if width % 4 == 0 else width / 8


FOURS = (4, 8, 12, 16)


@pytest.mark.parametrize(
    ("rounding", "widths"),
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
def test_the_narrowest_class_with_room_for_drafts(rounding, widths):
    model = WideModel(rounding)
    assert strict_widths(model, LIMIT) == widths
    assert model.length == 0


@pytest.mark.parametrize("rounding", [by_place, by_place_when_deep])
def test_no_class_where_the_place_in_the_batch_matters(rounding):
    with pytest.raises(ModelError, match="place in the batch") as caught:
        strict_widths(WideModel(rounding), LIMIT)
    assert "--strict" in caught.value.hint


def test_a_class_that_breaks_gives_way_to_one_that_does_not():
    """The widest class falls apart at its third token; what is left of it is narrower than the second class."""

    def rounding(width, place, cells, padding):
        return place > 2 if width > 5 else 2 + (width == 1)

    assert strict_widths(WideModel(rounding), LIMIT) == (2, 3, 4, 5)


def test_every_width_is_in_one_class_and_the_widest_is_in_the_first():
    found = classes(WideModel(k_quants), LIMIT)
    assert sorted(width for widths in found for width in widths) == list(range(1, 17))
    assert found[0] == FOURS
    assert {(2, 3), (1,)} < set(found)


def test_one_depth_is_enough_to_part_two_widths():
    assert len(classes(WideModel(deep_one_apart), LIMIT, (32,))) == 1
    assert classes(WideModel(deep_one_apart), LIMIT) == (tuple(range(2, 17)), (1,))


@pytest.mark.parametrize("capacity", [16, 40, 47, 48, 64])
def test_a_small_context_is_measured_as_far_as_it_goes(capacity):
    assert strict_widths(WideModel(fours_to_eight, capacity), LIMIT) == (4, 8)
    with pytest.raises(ModelError):
        strict_widths(WideModel(by_place, capacity), LIMIT)


def test_a_context_smaller_than_the_widest_batch():
    assert strict_widths(WideModel(fours, capacity=9), LIMIT) == (4, 8)


@pytest.mark.parametrize(("capacity", "widths"), [(257, (2,)), (271, (2,)), (303, (2,)), (304, (2,))])
def test_a_context_that_reaches_beyond_256_cells_is_measured_there(capacity, widths):
    assert strict_widths(WideModel(deep_fours, capacity), LIMIT) == widths


def test_a_context_of_256_cells_is_not_measured_beyond():
    model = WideModel(deep_fours, 256)
    assert strict_widths(model, LIMIT) == FOURS
    assert max(before + len(tokens) for before, tokens, *_ in model.calls) <= 256


def test_what_was_in_the_cache_is_not_compared():
    model = WideModel(fours)
    model.decode([3] * 100, 0)
    assert strict_widths(model, LIMIT) == FOURS
    assert model.calls[1][0] == 0


def test_it_costs_little_more_than_every_width_once_at_each_depth():
    model = WideModel(fours)
    strict_widths(model, LIMIT)
    batches = [width for *_, outputs, width in model.calls if outputs]
    assert sum(batches) <= len(DEPTHS) * (sum(range(1, 17)) + LIMIT + LIMIT + 6 * 4)
    assert sum(len(tokens) for _, tokens, outputs, _ in model.calls if not outputs) <= 2 * max(DEPTHS)


@pytest.mark.parametrize(("rounding", "widths"), [(nothing, tuple(range(1, 17))), (fours, ()), (one_apart, ())])
def test_a_model_that_cannot_pad_needs_a_class_without_a_gap(rounding, widths):
    model = WideModel(rounding, can_pad=False)
    if widths:
        assert strict_widths(model, LIMIT) == widths
        assert LatencyModel({1: 1.0}, widths=widths, can_pad=False).width(3) == 3
    else:
        with pytest.raises(ModelError):
            strict_widths(model, LIMIT)


def read_as(model, text, counts, width):
    """The logits of a text behind 30 tokens of prompt, so many tokens at a time, padded as ``width`` says."""
    model.rewind(0)
    model.decode(text[:30], 0)
    rows = []
    for count in counts:
        batch = text[model.length : model.length + count]
        if batch:
            rows.append(model.decode(batch, len(batch), width(len(batch))).copy())
    return np.concatenate(rows)


counts = st.lists(st.integers(1, 16), min_size=30, max_size=30)
slow_narrow = LatencyModel({width: 1 / width for width in range(1, 17)})  # a latency that pads whatever it may


@examples(60)
@given(
    st.sampled_from([fours, fours_to_eight, all_differ, deep_one_apart, k_quants, beyond_five]), counts, st.booleans()
)
def test_every_batch_of_the_class_gives_what_single_tokens_give(rounding, counts, pads):
    model = WideModel(rounding)
    widths = strict_widths(model, LIMIT)
    points = slow_narrow.points() if pads else {1: 1.0, 16: 16.0}
    latency = LatencyModel({width: points[width] for width in points}, widths=widths)
    text = [(3 * i * i + i) % VOCAB for i in range(300)]
    counts = [min(count, latency.limit) for count in counts]
    drafted = read_as(model, text, counts, latency.width)
    model.calls.clear()
    alone = read_as(model, text, [1] * len(drafted), latency.width)
    assert np.array_equal(drafted, alone)
    assert all(width in widths for *_, outputs, width in model.calls if outputs)


def test_without_the_class_it_does_not():
    model = WideModel(all_differ)
    text = [(3 * i * i + i) % VOCAB for i in range(64)]
    drafted = read_as(model, text, [5, 4, 1, 2], lambda count: count)
    assert not np.array_equal(drafted, read_as(model, text, [1] * 12, lambda count: count))


def test_the_demo_target_to_the_bit():
    target, _ = demo_pair()
    with Model(target) as model, closing(Context(model, ContextOptions(512, LIMIT, 1))) as context:
        found = classes(context, LIMIT)
        assert sorted(width for widths in found for width in widths) == list(range(1, 17))
        widths = strict_widths(context, LIMIT)
        assert max(widths) > 1
        assert context.length == 0
        latency = LatencyModel({1: 1.0, 16: 16.0}, widths=widths)
        text = model.tokenize("import os\n\n\ndef walk(folder):\n    " * 40)[:300]
        counts = [min(1 + 5 * i % 16, latency.limit) for i in range(30)]
        drafted = read_as(context, text, counts, latency.width)
        assert len(drafted) > 150
        assert np.array_equal(drafted, read_as(context, text, [1] * len(drafted), latency.width))
