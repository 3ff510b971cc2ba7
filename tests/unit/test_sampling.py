"""The sampler chain against a slow reference that follows src/llama-sampler.cpp step by step."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ggufspec.decoding import sampling as module
from ggufspec.decoding.sampling import Sampling, TokenCandidates, confidence, likeliest, token_candidates
from ggufspec.errors import ModelError, UsageError
from tests.support.properties import examples

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def reference(logits, sampling):
    """Token id to probability, one step after the other over a sorted list; skips rows on a knife's edge."""
    peak = float(max(logits))
    row = [(float(x), i) for i, x in enumerate(logits) if x > -math.inf]
    row.sort(key=lambda pair: (-pair[0], pair[1]))
    if sampling.temperature == 0:
        return {row[0][1]: 1.0}
    if sampling.top_k > 0:
        row = row[: sampling.top_k]
    if sampling.top_p < 1:
        total = math.fsum(math.exp(x - peak) for x, _ in row)
        reached = 0.0
        for n, (x, _) in enumerate(row, 1):
            reached += math.exp(x - peak) / total
            assume(abs(reached - sampling.top_p) > 1e-5)  # the sum is of 32 bits
            if reached >= sampling.top_p:
                row = row[:n]
                break
    if sampling.min_p > 0:
        row = [(x, i) for x, i in row if x >= peak + math.log(sampling.min_p)]
    weights = {i: math.exp((x - peak) / sampling.temperature) for x, i in row}
    total = math.fsum(weights.values())
    return {i: weights[i] / total for i in sorted(weights)}


def assert_matches_reference(logits, sampling):
    wanted, found = reference(logits, sampling), token_candidates(logits, sampling)
    assert found.ids.tolist() == list(wanted)
    assert found.ids.dtype == np.int64
    assert found.scores.dtype == np.float64
    assert np.allclose(found.probabilities(), list(wanted.values()), rtol=1e-9, atol=1e-300)


def samplings(low=0.05):
    return st.builds(
        Sampling,
        temperature=st.one_of(st.just(0.0), st.floats(low, 5)),
        top_k=st.one_of(st.just(0), st.integers(1, 60)),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    )


@examples(200)
@given(
    st.lists(st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=50),
    samplings(),
)
def test_small_rows_with_ties_and_masks(values, sampling):
    assume(max(values) > -math.inf)
    assert_matches_reference(np.array(values, np.float32), sampling)


@examples(60)
@given(st.integers(0, 2**32), st.integers(50, 3000), st.sampled_from([0.01, 0.5, 3.0, 10.0]), samplings())
def test_large_rows(seed, vocab, spread, sampling):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=vocab) * spread).astype(np.float32)
    logits[rng.random(vocab) < rng.choice([0.0, 0.3, 0.99])] = -np.inf
    logits[rng.integers(vocab)] = 2 * spread
    assert_matches_reference(logits, sampling)


def shaped(kind, vocab, rng):
    """A row of a kind that top-p finds its way through differently."""
    row = rng.normal(size=vocab) * 2.5
    if kind == "head":
        row[rng.integers(vocab, size=vocab // 500)] = 15 - 2 * np.log(np.arange(1, vocab // 500 + 1))
    elif kind == "padded":
        row[vocab // 20 :] = -500
    elif kind == "masked":
        row[rng.random(vocab) < 0.99] = -np.inf
    elif kind == "two values":
        row = np.where(rng.random(vocab) < 0.3, 1.0, 0.0)
    elif kind == "equal":
        row[:] = 3
    elif kind == "a sample misleads":
        row = np.where(np.arange(vocab) % module._STRIDE == 0, 3, rng.random(vocab) / 100)
    elif kind == "a sample sees nothing":
        row[:: module._STRIDE] = -np.inf
        row *= 0.01
    elif kind == "far from 0":
        row += 1000
    return row.astype(np.float32)


SHAPES = [
    "flat",
    "head",
    "padded",
    "masked",
    "two values",
    "equal",
    "a sample misleads",
    "a sample sees nothing",
    "far from 0",
]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("vocab", [4096, 20_011])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_top_p_alone_over_every_shape_of_row(kind, vocab, min_p):
    logits = shaped(kind, vocab, np.random.default_rng(vocab))
    for top_p in (0.05, 0.5, 0.95, 0.9991):
        found = token_candidates(logits, Sampling(0.8, 0, top_p, min_p))
        fewest = top_p_exactly(logits, top_p * (1 - 1e-6), min_p)  # the row's sum is of 32 bits
        most = top_p_exactly(logits, top_p * (1 + 1e-6), min_p)
        assert set(fewest) <= set(found.ids) <= set(most)
        assert np.all(np.diff(found.ids) > 0)
        assert np.array_equal(found.scores, (logits[found.ids].astype(np.float64) - float(logits.max())) / 0.8)


def top_p_exactly(logits, top_p, min_p):
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    order = np.argsort(-logits, kind="stable")
    reached = weights[order].cumsum()
    kept = order[: np.searchsorted(reached, top_p * math.fsum(weights)) + 1]
    return np.sort(kept[logits[kept].astype(np.float64) >= float(logits.max()) + math.log(min_p or 1e-300)])


@pytest.mark.parametrize("kind", SHAPES)
def test_the_32_bit_total_is_within_its_word(kind):
    logits = shaped(kind, 20_011, np.random.default_rng(1))
    peak = float(logits.max())
    assert module._total(logits, peak) == pytest.approx(math.fsum(np.exp(logits.astype(float) - peak)), rel=1e-5)


def test_confidence_is_exact_where_every_class_is_one_token():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32)) + 20
    assert confidence(logits) == pytest.approx(0.6, rel=1e-5)
    logits = np.random.default_rng(0).normal(size=2047).astype(np.float32)
    assert confidence(logits) == pytest.approx(
        token_candidates(logits, Sampling(1, **OFF)).probabilities().max(), rel=1e-5
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_confidence_is_an_estimate_from_above(kind):
    logits = shaped(kind, 20_011, np.random.default_rng(2))
    highest = token_candidates(logits, Sampling(1, **OFF)).probabilities().max()
    assert highest * (1 - 1e-5) <= confidence(logits) <= min(1, 20 * highest) * (1 + 1e-5)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_top_k_takes_the_lowest_ids_of_a_tie(spread):
    logits = np.full(5000, -spread, np.float32)
    logits[4000:4003] = 0
    wanted = list(range(40)) if spread == 0 else [*range(37), 4000, 4001, 4002]
    assert token_candidates(logits, Sampling(temperature=1, top_k=40, top_p=1, min_p=0)).ids.tolist() == wanted


def test_the_likely_tokens_may_all_be_neighbours():
    logits = np.zeros(8000, np.float32)
    logits[100:150] = np.arange(50, 0, -1)
    assert token_candidates(logits, Sampling(temperature=1, top_k=40, top_p=1, min_p=0)).ids.tolist() == list(
        range(100, 140)
    )


def test_truncations_see_untempered_probabilities():
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    for temperature in (0.1, 1.0, 10.0):
        assert token_candidates(logits, Sampling(temperature, 0, 0.7, 0)).ids.tolist() == [0, 1]
        assert token_candidates(logits, Sampling(temperature, 0, 1, 0.4)).ids.tolist() == [0, 1]


def test_top_p_counts_what_top_k_left():
    logits = np.log(np.array([0.3, 0.2, 0.2, 0.2, 0.1], np.float32))
    assert token_candidates(logits, Sampling(1, 2, 0.55, 0)).ids.tolist() == [0]  # 0.3 of 0.5 is 0.6
    assert token_candidates(logits, Sampling(1, 2, 0.65, 0)).ids.tolist() == [0, 1]
    assert token_candidates(logits, Sampling(1, 0, 0.55, 0)).ids.tolist() == [0, 1, 2]


def test_nothing_off_keeps_every_finite_logit():
    logits = np.array([0, -np.inf, -80, 5], np.float32)
    found = token_candidates(logits, Sampling(temperature=2, **OFF))
    assert found.ids.tolist() == [0, 2, 3]
    assert found.scores.tolist() == [-2.5, -42.5, 0]
    assert not Sampling(temperature=2, **OFF).truncates


def test_temperature_0_is_a_one_hot_row_and_the_lowest_id_wins_a_tie():
    found = token_candidates(np.array([0, 7, 7, 1], np.float32), Sampling())
    assert (found.ids.tolist(), found.scores.tolist(), found.probabilities().tolist()) == ([1], [0.0], [1.0])
    assert Sampling(temperature=0, **OFF).truncates


def test_a_temperature_near_0_neither_overflows_nor_ties():
    logits = np.array([1e4, 1e4 - 1, -1e4], np.float32)
    assert token_candidates(logits, Sampling(temperature=1e-30, **OFF)).probabilities().tolist() == [1, 0, 0]


def test_probabilities_do_not_overflow():
    assert TokenCandidates(np.arange(2), np.array([1e4, 1e4])).probabilities().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1), Sampling(1, 0, 0.9, 0), Sampling(temperature=1, **OFF)]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinite_logits_are_the_models_fault(sampling, value):
    logits = np.zeros(100, np.float32)
    logits[77] = value
    with pytest.raises(ModelError, match="NaN logits" if np.isnan(value) else "maximum of inf"):
        token_candidates(logits, sampling)
    with pytest.raises(ModelError, match="maximum of -inf"):
        token_candidates(np.full(100, -np.inf, np.float32), sampling)
    large = np.zeros(20_011, np.float32)
    for place in (0, 12_345, 20_010):  # in a whole row of classes, and behind the last
        large[place] = value
        with pytest.raises(ModelError):
            token_candidates(large, sampling)
        with pytest.raises(ModelError):
            confidence(large)
        large[place] = 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_values_out_of_range_are_refused_with_a_hint(wrong):
    with pytest.raises(UsageError) as caught:
        Sampling(**wrong)
    assert caught.value.hint.startswith("--")


@pytest.mark.parametrize("vocab", [2047, 2048, 32000])
@pytest.mark.parametrize(("top_p", "min_p"), [(0.95, 0.0), (0.5, 0.02)])
def test_a_guess_has_the_likeliest_of_the_candidates(vocab, top_p, min_p):
    rng = np.random.default_rng(vocab)
    sampling = Sampling(0.8, top_k=0, top_p=top_p, min_p=min_p)
    for spread in (1.0, 3.0, 6.0):
        logits = rng.normal(0, spread, vocab).astype(np.float32)
        every, guess = token_candidates(logits, sampling), likeliest(logits, sampling)
        assert set(guess.ids.tolist()) <= set(every.ids.tolist())
        assert guess.ids.size >= min(every.ids.size, 8)
        assert logits[guess.ids].min() >= np.sort(logits)[-guess.ids.size]
        scores = dict(zip(every.ids.tolist(), every.scores.tolist(), strict=True))
        assert guess.scores.tolist() == [scores[token] for token in guess.ids.tolist()]
    if vocab < 2048:
        assert guess.ids.size == every.ids.size


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.8, **OFF)])
def test_a_guess_where_the_whole_is_as_cheap(sampling):
    logits = np.random.default_rng(0).normal(0, 3, 5000).astype(np.float32)
    every, guess = token_candidates(logits, sampling), likeliest(logits, sampling)
    assert np.array_equal(every.ids, guess.ids)
    assert np.array_equal(every.scores, guess.scores)


def test_a_guess_from_damaged_logits():
    with pytest.raises(ModelError, match="NaN"):
        likeliest(np.full(5000, np.nan, np.float32), Sampling(0.8, top_k=0))
