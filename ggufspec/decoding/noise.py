"""Shared-seed Gumbel noise: a token's randomness is a fixed function of (seed, position, token id). Pure NumPy.

``argmax(score + G)`` over a row is a sample of ``softmax(score)`` when the G are independent standard Gumbels. Because
G is a function of the position, target and draft share the noise at each position and tend to choose the same token,
and the target's choice does not depend on what was drafted (coupling: Daliri et al. 2024, arXiv:2408.07978).

The noise is a contract: a seed gives the same text in later versions. All arithmetic is modulo 2**64; ``mix`` is the
finaliser of splitmix64 and ``golden`` its increment:

    start      = mix(mix(seed + golden) + golden * (position + 1))
    block bits = mix(start + golden * (2 * (id // 1024) + 1))
    token bits = mix(start + golden * (2 * id))
    e(bits)    = -log((bits // 2**12 + 1/2) / 2**52)            an Exp(1) variable
    arrival    = e(block bits) / 1024                           if block bits and id agree modulo 1024
                 e(block bits) / 1024 + e(token bits)           otherwise
    G          = -log(arrival)

Each arrival is an Exp(1) variable: the first of 1024 independent arrivals is Exp(1) / 1024 and is equally likely to be
any token's; each other token arrives a further Exp(1) later, because an exponential distribution has no memory. In
terms of Gumbels this is top-down sampling (Maddison et al. 2014, arXiv:1411.0030, section 4): a block's highest noise
is computed before its tokens' noise, so even a large vocabulary needs the noise of only a few tokens.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ggufspec.decoding.sampling import Floats, Ids, Logits, finite_peak

Bits = npt.NDArray[np.uint64]

BLOCK = 1024
_FEW = 12  # maximum number of tokens for which Python is faster than NumPy
_BLOCK_BITS, _IN_BLOCK = np.uint64(10), np.uint64(BLOCK - 1)
_ONE, _TWELVE = np.uint64(1), np.uint64(12)
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)  # David Stafford's variant 13, as in splitmix64
_MIX_BITS = tuple(np.uint64(number) for number in _MIX)
_GOLDEN_BITS = np.uint64(_GOLDEN)


def gumbel(seed: int, position: int, ids: Ids) -> Floats:
    """Return the Gumbel noise for the given tokens.

    Args:
        seed: in [0, 2**64).
        position: index in the sequence of the token to choose, from 0.
        ids: (n,) token ids, from 0.

    Returns:
        (n,) standard Gumbel variables, independent over seeds, positions and ids.
    """
    return _gumbel(_start(seed, position), ids)


def choose_with_noise(ids: Ids, scores: Floats, seed: int, position: int) -> int:
    """Return the token of ``ids`` (n,) with the highest score plus noise: a sample of ``softmax(scores)``.

    The ids are ascending, so a tie goes to the lowest. The scores (n,) are log-probabilities up to a constant.
    """
    if ids.size == 1:
        return int(ids[0])
    return _choose(ids, scores, _start(seed, position))


def _choose(ids: Ids, scores: Floats, start: np.uint64) -> int:
    if ids.size <= _FEW:
        sums = [
            score + _gumbel_int(int(start), token) for token, score in zip(ids.tolist(), scores.tolist(), strict=True)
        ]
        return int(ids[sums.index(max(sums))])
    if ids.size > BLOCK:  # drop tokens that cannot win, as in choose_full
        highest, leaders = _block_highest(start, np.arange((int(ids[-1]) >> 10) + 1, dtype=np.uint64))
        places = np.minimum(ids.searchsorted(leaders), ids.size - 1)
        known = np.append(places[ids[places] == leaders], scores.argmax())
        best = (scores[known] + _gumbel(start, ids[known])).max()
        able = scores + highest[ids >> 10] >= best - _slack(best)
        ids, scores = ids[able], scores[able]
    return int(ids[(scores + _gumbel(start, ids)).argmax()])


def choose_full(logits: Logits, temperature: float, seed: int, position: int) -> int:
    """Apply :func:`choose_with_noise` to the whole vocabulary, with scores ``(logit - highest logit) / temperature``.

    The choice is exact, but needs the noise of only a few tokens: once one token's score plus noise is known, another
    token can win only if its score plus the highest noise in its block is at least as high. The first sums computed
    are likely to be high: those of the most likely token (which usually wins on peaked rows) and of the tokens with the
    highest noise in their block (one of which usually wins on flat rows).

    ``logits`` (vocab,) are not retained; the temperature is above 0.

    Raises:
        ModelError: a logit is NaN, or the highest is infinite.
    """
    whole = logits[: logits.size - logits.size % BLOCK].reshape(-1, BLOCK)
    rest = logits[whole.size :]  # logits of an incomplete last block
    tops = whole.argmax(axis=1) + np.arange(0, whole.size, BLOCK)
    if rest.size:
        tops = np.append(tops, whole.size + rest.argmax())
    maxima = logits[tops]  # (blocks,)
    peak = finite_peak(maxima.max())

    start, blocks = _start(seed, position), np.arange(tops.size, dtype=np.uint64)
    highest, leaders = _block_highest(start, blocks)
    inside = leaders if leaders[-1] < logits.size else leaders[:-1]
    led = _scores(logits, inside, peak, temperature) + highest[: inside.size]
    best = max(float(led.max(initial=-math.inf)), _gumbel_int(int(start), int(tops[maxima.argmax()])))
    bar = (peak + temperature * (best - highest - _slack(best))).astype(np.float32)
    bar = np.nextafter(bar, np.float32(-np.inf))  # (blocks,) a logit below this cannot win
    hot = np.flatnonzero(maxima[: len(whole)] >= bar[: len(whole)])
    able = np.flatnonzero(whole.take(hot, axis=0) >= bar[hot, None])
    able = np.concatenate((hot[able // BLOCK] * BLOCK + able % BLOCK, whole.size + np.flatnonzero(rest >= bar[-1])))
    return _choose(able, _scores(logits, able, peak, temperature), start)


def _block_highest(start: np.uint64, blocks: Bits) -> tuple[Floats, Ids]:
    """Return each block's highest noise, (n,), and the id of the token that has it, which may exceed the vocabulary."""
    bits = _bits(start, _block_counters(blocks))
    highest: Floats = -np.log(_exponential(bits) / BLOCK)
    return highest, ((blocks << _BLOCK_BITS) | (bits & _IN_BLOCK)).astype(np.int64)


def _slack(best: float) -> float:
    """Return an upper bound on the rounding error of score plus noise."""
    return 1e-9 * (1 + abs(best))


def _scores(logits: Logits, ids: Ids, peak: float, temperature: float) -> Floats:
    scores: Floats = (logits[ids].astype(np.float64) - peak) / temperature
    return scores


def _gumbel(start: np.uint64 | Bits, ids: Ids) -> Floats:
    """Return the noise for ``ids`` (n,); starts of shape (m, 1) and ids of shape (1, n) give shape (m, n)."""
    tokens = ids.astype(np.uint64)
    bits = _bits(start, np.array((_block_counters(tokens >> _BLOCK_BITS), tokens << _ONE)))
    first, later = _exponential(bits)
    later[((bits[0] ^ tokens) & _IN_BLOCK) == 0] = 0.0
    noise: Floats = -np.log(first / BLOCK + later)
    return noise


def _gumbel_int(start: int, token: int) -> float:
    """Return the noise for one token; for the few tokens left by truncation, this is faster than fifty NumPy calls."""
    block = _mix_int(start + _GOLDEN * (2 * (token // BLOCK) + 1))
    arrival = -math.log((block // 2**12 + 0.5) * 2.0**-52) / BLOCK
    if block % BLOCK != token % BLOCK:
        arrival -= math.log((_mix_int(start + _GOLDEN * 2 * token) // 2**12 + 0.5) * 2.0**-52)
    return -math.log(arrival)


def _block_counters(blocks: Bits) -> Bits:
    return (blocks << _ONE) | _ONE


def _bits(start: np.uint64 | Bits, counters: Bits) -> Bits:
    return _mix(start + _GOLDEN_BITS * counters)


def _exponential(bits: Bits) -> Floats:
    """Return Exp(1) variables from the upper 52 bits; never 0, never infinite."""
    variables: Floats = -np.log(((bits >> _TWELVE) + 0.5) * 2.0**-52)
    return variables


def _start(seed: int, position: int) -> np.uint64:
    """Return the start of the splitmix64 sequence of (seed, position)."""
    return np.uint64(_mix_int(_mix_int(seed + _GOLDEN) + _GOLDEN * (position + 1)))


def _mix(bits: Bits) -> Bits:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    a, b, c, d, e = _MIX_BITS
    bits = (bits ^ (bits >> a)) * b
    bits = (bits ^ (bits >> c)) * d
    return bits ^ (bits >> e)


def _mix_int(bits: int) -> int:
    """Apply :func:`_mix` to one integer, modulo 2**64; NumPy would take five times as long."""
    a, b, c, d, e = _MIX
    bits %= 2**64
    bits = (bits ^ (bits >> a)) * b % 2**64
    bits = (bits ^ (bits >> c)) * d % 2**64
    return bits ^ (bits >> e)
