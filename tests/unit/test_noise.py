"""Keyed noise: its golden values, its distribution, and the full-vocabulary shortcut against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ggufspec.decoding import noise
from ggufspec.decoding.noise import BLOCK, choose_full, choose_with_noise, gumbel
from ggufspec.decoding.sampling import Sampling, token_candidates
from ggufspec.errors import ModelError
from tests.support.properties import examples

MASK = 2**64 - 1


def starts(seed, positions):
    """(n, 1) for ``noise._gumbel``, which gives (n, ids)."""
    return np.array([noise._start(seed, position) for position in positions])[:, None]


def many(seed, positions, ids):
    return noise._gumbel(starts(seed, positions), np.asarray(ids)[None, :])


def brute_force(logits, temperature, seed, position):
    scores = (logits.astype(np.float64) - float(logits.max())) / temperature
    return int((scores + gumbel(seed, position, np.arange(logits.size))).argmax())


def by_the_docstring(seed, position, token):
    """The contract in plain integers, apart from the code."""

    def mix(z):
        z &= MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    def exponential(bits):
        return -np.log((bits // 2**12 + 0.5) / 2**52)

    golden = 0x9E3779B97F4A7C15
    start = mix(mix(seed + golden) + golden * (position + 1))
    block_bits = mix(start + golden * (2 * (token // 1024) + 1))
    arrival = exponential(block_bits) / 1024
    if block_bits % 1024 != token % 1024:
        arrival += exponential(mix(start + golden * 2 * token))
    return -np.log(arrival)


# The noise is a contract: these never change.
GOLDEN_VALUES = [
    (0, 0, 0, 1.047544774680304),
    (0, 0, 1, 3.4656475586538464),
    (0, 0, 657, 6.250714003085674),
    (42, 0, 0, 1.6655407195094205),
    (42, 17, 128255, 0.4195717757103311),
    (18446744073709551615, 4095, 31999, -0.32496330270313306),
    (1234567890123456789, 100000, 151935, 0.143296872497538),
]


@pytest.mark.parametrize(("seed", "position", "token", "value"), GOLDEN_VALUES)
def test_golden_values(seed, position, token, value):
    assert gumbel(seed, position, np.array([token]))[0] == pytest.approx(value, rel=1e-12)


def test_golden_choices():
    logits = (np.arange(5000) % 7).astype(np.float32)
    full = [choose_full(logits, 0.8, 42, position) for position in range(8)]
    assert full == [4947, 2624, 2595, 2175, 2575, 4598, 727, 3323]
    found = token_candidates(logits, Sampling(temperature=0.8, top_p=1, min_p=0))
    few = [choose_with_noise(found.ids, found.scores, 42, position) for position in range(8)]
    assert few == [237, 118, 27, 62, 20, 216, 48, 104]


@given(st.integers(0, MASK), st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_docstring_is_the_contract(seed, position, token):
    wanted = by_the_docstring(seed, position, token)
    assert gumbel(seed, position, np.array([token]))[0] == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@given(st.integers(0, MASK), st.integers(0, 2**40), st.lists(st.integers(0, 2**20), min_size=1, max_size=9))
def test_a_tokens_noise_does_not_depend_on_its_company(seed, position, ids):
    together = gumbel(seed, position, np.array(ids))
    assert together.tolist() == pytest.approx([gumbel(seed, position, np.array([i]))[0] for i in ids], rel=1e-14)


def is_gumbel(sample, location=0.0):
    return stats.kstest(sample, stats.gumbel_r(loc=location).cdf).pvalue > 1e-3


def test_standard_gumbel_over_ids_positions_and_seeds():
    assert is_gumbel(gumbel(7, 3, np.arange(200_000)))
    assert is_gumbel(many(7, range(50_000), [1023]).ravel())
    assert is_gumbel(np.array([gumbel(seed, 0, np.array([5]))[0] for seed in range(20_000)]))


def highest_of_blocks(positions=1500):
    return many(1, range(positions), np.arange(BLOCK, 2 * BLOCK)).max(axis=1)


def test_a_blocks_highest_noise_has_the_law_of_the_highest_of_its_tokens():
    assert is_gumbel(highest_of_blocks(), np.log(BLOCK))


def test_mutant_a_block_without_a_leader_is_caught(monkeypatch):
    monkeypatch.setattr(noise, "_IN_BLOCK", np.uint64(2**32 - 1))  # no token is its block's first arrival
    assert not is_gumbel(highest_of_blocks(), np.log(BLOCK))


def test_any_token_can_be_its_blocks_highest():
    first = many(2, range(4000), np.arange(BLOCK)).argmax(axis=1)
    assert stats.chisquare(np.bincount(first // 64, minlength=16)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(first % 16, minlength=16)).pvalue > 1e-3


def independent(a, b):
    """Chi-square over an 8 by 8 table of two samples' octiles."""
    octile = [np.minimum((8 * np.exp(-np.exp(-x))).astype(int), 7) for x in (a, b)]
    table = np.bincount(octile[0] * 8 + octile[1], minlength=64).reshape(8, 8)
    return stats.chi2_contingency(table).pvalue > 1e-3


def test_independent_of_neighbours():
    row = gumbel(11, 5, np.arange(200_001))
    assert independent(row[:-1], row[1:])  # ids, mostly of one block
    assert independent(row[: -BLOCK - 1], row[BLOCK:-1])  # ids of neighbouring blocks
    assert independent(row, gumbel(11, 6, np.arange(200_001)))  # positions
    assert independent(row, gumbel(12, 5, np.arange(200_001)))  # seeds
    column = many(11, range(50_001), [0, 1])
    assert independent(column[:, 0], column[:, 1])
    assert independent(column[:-1, 0], column[1:, 0])


def test_the_noise_tells_seeds_positions_and_their_sums_apart():
    rows = [gumbel(seed, position, np.arange(4)).tolist() for seed in range(20) for position in range(20)]
    assert len({tuple(row) for row in rows}) == 400
    assert gumbel(2**64 - 1, 0, np.arange(4)).tolist() != gumbel(0, 0, np.arange(4)).tolist()


@examples(300)
@given(
    seed=st.integers(0, MASK),
    position=st.integers(0, 10**6),
    vocab=st.one_of(st.integers(1, 4500), st.sampled_from([1, 1023, 1024, 1025, 2048, 4096])),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]),
    peaks=st.integers(0, 3),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    step=st.sampled_from([0.0, 1.0]),
    temperature=st.sampled_from([1e-6, 0.1, 0.8, 1.0, 5.0, 1e3]),
    offset=st.sampled_from([0.0, -1000.0, 1000.0]),
)
def test_choose_full_is_brute_force(seed, position, vocab, spread, peaks, masked, step, temperature, offset):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=vocab) * spread
    logits[rng.integers(vocab, size=peaks)] += 12
    if step:
        logits = np.round(logits)  # ties
    logits[rng.random(vocab) < masked] = -np.inf
    logits[rng.integers(vocab)] = 1
    logits = (logits + offset).astype(np.float32)
    assert choose_full(logits, temperature, seed, position) == brute_force(logits, temperature, seed, position)


def test_choose_full_is_brute_force_at_128k():
    rng = np.random.default_rng(0)
    for position, spread in enumerate([0.0, 0.3, 1.0, 2.0, 3.0, 5.0]):
        logits = (rng.normal(size=128_256) * spread).astype(np.float32)
        assert choose_full(logits, 0.8, 1, position) == brute_force(logits, 0.8, 1, position)


def test_choose_full_is_choose_over_every_token():
    rng = np.random.default_rng(0)
    for position in range(50):
        logits = rng.normal(size=1500).astype(np.float32)
        found = token_candidates(logits, Sampling(temperature=0.7, top_k=0, top_p=1, min_p=0))
        assert choose_full(logits, 0.7, 9, position) == choose_with_noise(found.ids, found.scores, 9, position)


@given(st.integers(0, MASK), st.integers(0, 2**40), st.integers(0, 2**40))
def test_one_tokens_noise_is_that_of_many(seed, position, token):
    one = noise._gumbel_int(int(noise._start(seed, position)), token)
    assert one == pytest.approx(gumbel(seed, position, np.array([token]))[0], rel=1e-12, abs=1e-12)


@examples(200)
@given(
    seed=st.integers(0, MASK),
    count=st.sampled_from([2, noise._FEW, noise._FEW + 1, BLOCK, BLOCK + 1, 5000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    stride=st.sampled_from([1, 3, 50]),
)
def test_choose_is_brute_force(seed, count, spread, stride):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(count * stride, size=count, replace=False))
    scores = rng.normal(size=count) * spread - 100
    assert choose_with_noise(ids, scores, seed, 5) == ids[(scores + gumbel(seed, 5, ids)).argmax()]


def test_one_candidate_needs_no_noise():
    assert choose_with_noise(np.array([17]), np.array([0.0]), 0, 0) == 17


def test_a_tie_goes_to_the_lowest_id(monkeypatch):
    monkeypatch.setattr(noise, "_gumbel", lambda _, ids: np.zeros(ids.size))
    monkeypatch.setattr(noise, "_gumbel_int", lambda _, __: 0.0)
    monkeypatch.setattr(noise, "_block_highest", lambda _, blocks: (np.zeros(blocks.size), np.zeros(1, np.int64)))
    for count in (3, 100, 3000):
        scores = np.zeros(count)
        scores[1:] = 1
        assert choose_with_noise(np.arange(0, 7 * count, 7), scores, 0, 0) == 7
    assert choose_full(np.array([0, 2, 2], np.float32), 1.0, 0, 0) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [3, 1500, 2047, 2060])
def test_choose_full_refuses_nan_and_infinite_logits(value, place):
    logits = np.zeros(2100, np.float32)
    logits[place] = value
    with pytest.raises(ModelError):
        choose_full(logits, 1.0, 0, 0)
