"""Penalties: llama.cpp's arithmetic, each row for the text before its own position, with and without a draft."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.rules import make_rule
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.sampling import Logits, Sampling, token_candidates
from ggufspec.errors import UsageError

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def penalised(row: Logits, text: Sequence[int], sampling: Sampling) -> Logits:
    penalties = Penalties(sampling)
    penalties.follow(0, text)
    row = row.copy()
    penalties.apply(row, len(text))
    return row


def by_llama(row: Logits, text: Sequence[int], sampling: Sampling, ctx_size: int = 4096) -> Logits:
    """The same by llama.cpp's own sampler."""
    last = (
        ctx_size if sampling.repeat_last_n == -1 else sampling.repeat_last_n
    )  # common/sampling.cpp, common_sampler_init
    sampler = llama_cpp.llama_sampler_init_penalties(
        row.size, last, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
    )
    try:
        for token in text:
            llama_cpp.llama_sampler_accept(sampler, token)
        data = (llama_cpp.llama_token_data * row.size)(
            *(llama_cpp.llama_token_data(id=token, logit=float(logit), p=0.0) for token, logit in enumerate(row))
        )
        array = llama_cpp.llama_token_data_array(data=data, size=row.size, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return np.array([one.logit for one in data], np.float32)
    finally:
        llama_cpp.llama_sampler_free(sampler)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"repeat_penalty": 2.0}, [0.5, -4.0, 0.0, 3.0]),
        ({"repeat_penalty": 0.5}, [2.0, -1.0, 0.0, 3.0]),
        ({"presence_penalty": 0.5}, [0.5, -2.5, -0.5, 3.0]),
        ({"frequency_penalty": 0.5}, [-0.5, -2.5, -0.5, 3.0]),
        ({"repeat_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": -0.25}, [0.25, -4.75, -0.75, 3.0]),
        ({"repeat_penalty": 2.0, "repeat_last_n": 2}, [0.5, -2.0, 0.0, 3.0]),
        ({"frequency_penalty": 0.5, "repeat_last_n": 3}, [0.5, -2.5, -0.5, 3.0]),
        ({"frequency_penalty": 0.5, "repeat_last_n": -1}, [-0.5, -2.5, -0.5, 3.0]),
    ],
)
def test_the_arithmetic_to_the_bit(options: dict[str, float], wanted: list[float]) -> None:
    row, text = np.array([1.0, -2.0, 0.0, 3.0], np.float32), [0, 0, 1, 2, 0]
    sampling = Sampling(**options)  # type: ignore[arg-type]
    assert sampling.penalises
    assert penalised(row, text, sampling).tolist() == wanted
    assert by_llama(row, text, sampling).tolist() == wanted


penalties = st.builds(
    Sampling,
    repeat_penalty=st.floats(0.25, 100, width=32),
    repeat_last_n=st.integers(-1, 40),
    presence_penalty=st.floats(-100, 100, width=32),
    frequency_penalty=st.floats(-100, 100, width=32),
)


@given(
    st.lists(st.floats(-40, 40, width=32) | st.just(-np.inf), min_size=8, max_size=8),
    st.lists(st.integers(0, 7), max_size=60),
    penalties,
)
def test_it_is_that_of_llama_cpp(logits: list[float], text: list[int], sampling: Sampling) -> None:
    row = np.array(logits, np.float32)
    # Its compiler may round a product and a sum at once.
    np.testing.assert_allclose(penalised(row, text, sampling), by_llama(row, text, sampling), rtol=1e-6, atol=1e-4)


@given(
    st.lists(st.integers(0, 5), max_size=20),
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 5), max_size=9), st.integers(0, 40)), max_size=9),
    st.sampled_from([-1, 1, 3, 64]),
)
def test_a_window_that_moves_is_the_one_that_is_counted_anew(
    text: list[int], steps: list[tuple[int, list[int], int]], last: int
) -> None:
    sampling = Sampling(frequency_penalty=1.0, repeat_last_n=last)
    moving = Penalties(sampling)
    moving.follow(0, text)
    for position, tokens, at in steps:
        position = min(position, len(text))
        text = [*text[:position], *tokens]
        moving.follow(position, tokens)
        row = np.zeros(6, np.float32)
        moving.apply(row, at := min(at, len(text)))
        assert row.tolist() == penalised(np.zeros(6, np.float32), text[:at], sampling).tolist()


def test_only_tokens_of_the_window_are_touched() -> None:
    row = np.arange(8, dtype=np.float32) + 1
    sampling = Sampling(repeat_penalty=2.0, repeat_last_n=2)
    assert np.flatnonzero(penalised(row, [1, 2, 3, 9], sampling) != row).tolist() == [3]  # 9 is the target's alone
    assert penalised(row, [], sampling).tolist() == row.tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repeat_last_n=-1),
        Sampling(repeat_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0, repeat_last_n=0),
    ],
)
def test_what_is_off_leaves_rows_alone(sampling: Sampling) -> None:
    assert not sampling.penalises
    row = np.array([1.0, -2.0, 3.0], np.float32)
    row.flags.writeable = False
    rule = make_rule("exact", sampling)
    rule.begin([0, 1])
    assert rule.penalised(row, 2) is row
    assert rule.verify(row[None], [], 2).token == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat_penalty": 0.0}, "--repeat-penalty 0 is out of range"),
        ({"repeat_penalty": -1.0}, "--repeat-penalty -1 is out of range"),
        ({"repeat_penalty": 101.0}, "--repeat-penalty 101 is out of range"),
        ({"repeat_penalty": float("nan")}, "--repeat-penalty nan is out of range"),
        ({"repeat_last_n": -2}, "--repeat-last-n -2 is out of range"),
        ({"presence_penalty": float("inf")}, "--presence-penalty inf is out of range"),
        ({"frequency_penalty": -101.0}, "--frequency-penalty -101 is out of range"),
    ],
)
def test_values_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Sampling(**options)  # type: ignore[arg-type]
    assert caught.value.hint.startswith("--")


def test_no_value_in_range_makes_a_logit_infinite() -> None:
    row = np.array([1e4, -1e4, 0.0], np.float32)
    for repeat in (0.01, 100):
        for other in (-100, 100):
            sampling = Sampling(
                repeat_penalty=repeat, repeat_last_n=-1, presence_penalty=other, frequency_penalty=other
            )
            assert np.isfinite(penalised(row, [0, 1, 2] * 100_000, sampling)).all()


# ---- rows of a round


class Row:
    """The same row after every text; the text alone decides what is chosen."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = np.array(logits, np.float32)

    def __call__(self, count: int) -> Logits:
        return np.tile(self.logits, (count, 1))


ROW = Row([4.0, 3.5, 3.0, 2.5])


@pytest.mark.parametrize("name", ["exact", "residual", "top-k:1"])
def test_a_row_is_penalised_for_the_drafted_tokens_before_it(name: str) -> None:
    """Greedy, and each token costs 1 for each time that it was there."""
    sampling = Sampling(frequency_penalty=1.0)
    wanted, text = [0, 1, 0, 2, 1, 3, 0], [0]
    counts: Counter[int] = Counter(text)
    for token in wanted[1:]:
        best = max(range(4), key=lambda one: (ROW.logits[one] - counts[one], -one))
        assert token == best
        counts[token] += 1
        text.append(token)
    rule = make_rule(name, sampling)
    rule.begin([0])
    verdict = rule.verify(ROW(7), [DraftToken(token) for token in wanted[1:]], 1)
    assert verdict.accepted == 6
    rule.begin([0])
    verdict = rule.verify(ROW(4), [DraftToken(1), DraftToken(1), DraftToken(1)], 1)
    assert (verdict.accepted, verdict.token) == (1, 0)
    # What was refused is forgotten: the next row is that of the text 0, 1, 0.
    assert rule.verify(ROW(1), [], 3).token == 2


def test_a_draft_follows_its_own_chain() -> None:
    rule = make_rule("exact", Sampling(frequency_penalty=1.0))
    text = [0]
    rule.begin(text)
    for wanted in (1, 0, 2):
        rule.follow(text)
        row = rule.penalised(ROW(1)[0], len(text))
        text.append(rule.draft_token(row, len(text)).token)
        assert text[-1] == wanted


def test_the_residual_rule_is_told_the_penalised_distributions() -> None:
    sampling = Sampling(1.0, **OFF, repeat_penalty=1.5, presence_penalty=0.5, seed=3)  # type: ignore[arg-type]
    rule = make_rule("residual", sampling)
    text = [0, 2, 2]
    rule.begin(text)
    rule.follow(text)
    proposal = rule.draft_token(rule.penalised(ROW(1)[0], 3), 3)
    wanted = token_candidates(penalised(ROW.logits, text, sampling), sampling)
    assert proposal.q is not None
    assert proposal.q.probabilities().tolist() == wanted.probabilities().tolist()


def test_a_position_that_is_not_known_is_an_error() -> None:
    known = Penalties(Sampling(repeat_penalty=2.0))
    known.follow(0, [1, 2])
    with pytest.raises(ValueError, match="the text ends at 2"):
        known.apply(np.zeros(4, np.float32), 3)
    with pytest.raises(ValueError, match="the text ends at 2, before position 3"):
        known.follow(3, [1])
