"""Strict mode on models whose logits depend on the width of the batch, in given classes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufspec.decoding import loop
from ggufspec.decoding.acceptance import Proposal, make_rule
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.widths import LIMIT, UNIT, WidthLocked, lock_widths, padded
from ggufspec.errors import ModelError

VOCAB = 4


class WideModel:
    """Logits of a token depend on the context, and by rounding on ``rounding(width, place, cells)``.

    As llama.cpp's context does, it takes padding away again and gives room for it behind its capacity.
    """

    def __init__(self, rounding, capacity=512):
        self.rounding, self.capacity = rounding, capacity
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
        width = max(width, len(tokens))
        self.calls.append((len(self.cache), tuple(tokens), outputs, width))
        self._buffer.fill(np.nan)  # rows are valid until the next call
        first = len(tokens) - outputs
        for place, token in enumerate(tokens):
            self.cache.append(token)
            if place >= first:
                self._buffer[place - first] = self.row(width, place)
        return self._buffer[:outputs]

    def row(self, width, place):
        spice = (31 * len(self.cache) + 7 * self.cache[-1]) % 11
        noise = self.rounding(width, place, len(self.cache))
        return [(spice + 5 * token) % 11 + noise * (token == 0) for token in range(self.vocab_size)]

    def rewind(self, length):
        assert 0 <= length <= len(self.cache)
        del self.cache[length:]


def fours(width, place, cells):
    """Multiples of four agree, and no other width does."""
    return 0 if width % 4 == 0 else width / 8


def fours_to_eight(width, place, cells):
    return 0 if width in (4, 8) else width / 8


def all_differ(width, place, cells):
    return width / 8


def deep_fours(width, place, cells):
    """Four and eight part beyond 256 cells."""
    return width / 8 if cells > 256 else fours(width, place, cells)


def by_place(width, place, cells):
    return place / 8


def by_place_when_deep(width, place, cells):
    return place / 8 if cells > 256 else 0


@pytest.mark.parametrize(
    ("rounding", "limit"),
    [(fours, 16), (lambda *_: 0, 16), (fours_to_eight, 8), (all_differ, 4), (deep_fours, 4)],
)
def test_the_class_is_measured(rounding, limit):
    model = WideModel(rounding)
    assert lock_widths(model).limit == limit
    assert model.length == 0


@pytest.mark.parametrize("rounding", [by_place, by_place_when_deep])
def test_no_class_where_the_place_in_the_batch_matters(rounding):
    with pytest.raises(ModelError, match="place in the batch") as caught:
        lock_widths(WideModel(rounding))
    assert "--strict" in caught.value.hint


@pytest.mark.parametrize("capacity", [16, 40, 47, 48, 64])
def test_a_small_context_is_measured_as_far_as_it_goes(capacity):
    assert lock_widths(WideModel(fours_to_eight, capacity)).limit == 8
    with pytest.raises(ModelError):
        lock_widths(WideModel(by_place, capacity))


@pytest.mark.parametrize("capacity", [257, 303, 304])
def test_a_context_that_reaches_beyond_256_cells_is_measured_there(capacity):
    assert lock_widths(WideModel(deep_fours, capacity)).limit == 4


def test_a_context_of_256_cells_is_not_measured_beyond():
    model = WideModel(deep_fours, 256)
    assert lock_widths(model).limit == 16
    assert max(before + len(tokens) for before, tokens, *_ in model.calls) <= 256


@pytest.mark.parametrize(("count", "width"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 12), (16, 16)])
def test_padding_to_the_class(count, width):
    assert padded(count) == width
    model = WideModel(fours)
    rows = WidthLocked(model, 16).decode([1] * count, count)
    assert rows.shape == (count, VOCAB)
    assert model.calls == [(0, (1,) * count, count, width)]
    assert model.length == count  # no token of the padding is in the cache


def test_a_prompt_is_read_as_it_is():
    model = WideModel(fours)
    assert WidthLocked(model, 4).decode([1, 2, 3, 0, 1], 0).shape == (0, VOCAB)
    assert model.calls == [(0, (1, 2, 3, 0, 1), 0, 5)]


def test_logits_of_some_tokens_are_not_given():
    model = WideModel(fours)
    with pytest.raises(ValueError, match="all tokens or of none"):
        WidthLocked(model, 8).decode([1, 2, 3], 1)
    assert model.length == 0


def test_a_wider_batch_may_be_asked_for():
    model = WideModel(fours)
    WidthLocked(model, 16).decode([1, 2], 2, 12)
    assert model.calls[-1][-1] == 12


@pytest.mark.parametrize(("limit", "widths"), [(4, [4, 4, 4]), (8, [8, 4]), (12, [12]), (16, [12])])
def test_a_long_draft_is_verified_in_several_batches(limit, widths):
    model = WideModel(fours_to_eight if limit <= 8 else fours)
    tokens = [(3 * i + 1) % VOCAB for i in range(10)]
    rows = WidthLocked(model, limit).decode(tokens, 10)
    assert [width for *_, width in model.calls] == widths
    assert model.cache == tokens
    one_by_one = WideModel(fours)
    single = WidthLocked(one_by_one, 4)
    assert np.array_equal(rows, np.concatenate([single.decode([token], 1).copy() for token in tokens]))


def test_it_is_a_model_like_the_one_inside():
    model = WideModel(fours, capacity=99)
    locked = WidthLocked(model, 8)
    locked.decode([1, 2, 3], 3)
    locked.rewind(1)
    assert (locked.vocab_size, locked.capacity, locked.length, model.cache) == (VOCAB, 99, 1, [1])


class Scripted:
    def __init__(self, script):
        self.script = script

    def read(self, prompt):  # noqa: ARG002
        self.asked = 0

    def draft(self, tokens, limit, rule):  # noqa: ARG002
        self.asked += 1
        return [Proposal(token) for token in self.script[self.asked % len(self.script)][:limit]]

    def keep(self, length):
        self.kept = length


def answer(model, prompt, drafter=None):
    loop.read(model, prompt, drafter)
    rounds = loop.generate(
        model,
        prompt,
        make_rule("exact", Sampling()),
        max_tokens=24,
        is_end=lambda _: False,
        drafter=drafter,
        draft_max=12,
        clock=float,
    )
    return [token for round_ in rounds for token in round_.emitted]


def near_ties(rounding):
    """A model whose choice between its two best tokens is up to the rounding."""

    class Tie(WideModel):
        def row(self, width, place):
            spice = (7 * len(self.cache) + 3 * self.cache[-1]) % 5 / 2
            return [1.0 + self.rounding(width, place, len(self.cache)), 1.0 + spice, 0.9, 0.8]

    return Tie(rounding)


scripts = st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([fours, fours_to_eight, all_differ, deep_fours]), scripts)
def test_the_text_is_the_same_with_and_without_draft(rounding, script):
    model = near_ties(rounding)
    locked = lock_widths(model)
    alone = answer(locked, [1, 2, 3])
    assert answer(locked, [1, 2, 3], Scripted(script)) == alone
    assert all(width % UNIT == 0 and width <= LIMIT for *_, outputs, width in model.calls if outputs)


def test_without_the_lock_it_is_not():
    model = near_ties(all_differ)
    alone = answer(model, [1, 2, 3])
    assert answer(model, [1, 2, 3], Scripted([[0] * 12])) != alone
