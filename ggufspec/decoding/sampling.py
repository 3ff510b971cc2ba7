"""Selection of the tokens that may be sampled, by llama.cpp's default sampler chain. Pure NumPy.

The chain is top-k, top-p, min-p, then temperature (common/common.h, ``common_params_sampling::samplers``; each step in
src/llama-sampler.cpp): truncation sees the untempered probabilities. Ties always go to the lower token id. Penalties
come before the chain, because they depend on the text and not only on the logits (:mod:`ggufspec.decoding.penalties`).
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggufspec.errors import ModelError, UsageError
from ggufspec.settings.table import OPTIONS

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LOWEST = float(np.finfo(np.float32).min)  # lowest finite logit
_CLASSES, _FEW = 1024, 256  # numbers of classes into which token ids are divided; a maximum logit represents each class
_GLANCE = 128  # minimum number of tokens among which a guess is chosen
_STRIDE = 31  # every 31st token is sampled; an odd stride cannot align with periodic patterns in the ids
_CERTAIN: Floats = np.zeros(1)
_CERTAIN.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for choosing a token from logits; truncation and penalty defaults are llama.cpp's.

    Args:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the fewest tokens whose share of the probability left by top-k reaches this; 1 is off.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 is off.
        seed: seed of all randomness, in [0, 2**64).
        repeat_penalty: divisor for the logit of a token that is already in the text (a negative logit is multiplied),
            in [0.01, 100]; 1 is off.
        repeat_last_n: number of last tokens, prompt included, that penalties consider; 0 turns all penalties off, -1
            considers the whole text.
        presence_penalty: subtracted from the logit of a token that is in the text, in [-100, 100]; 0 is off.
        frequency_penalty: subtracted once for each occurrence of the token in the text, in [-100, 100]; 0 is off.

    Raises:
        UsageError: a value is out of its range.
    """

    # Callers pass the first five by position: add new fields at the end
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            OPTIONS["temp" if name == "temperature" else name].check(getattr(self, name))
        if self.seed < 0:  # --seed -1 has already been replaced by a random seed
            raise UsageError(f"seed {self.seed} is not in [0, 2**64)", "--seed 7; --seed -1 draws one")

    @property
    def truncates(self) -> bool:
        """True if tokens with finite logits may be excluded."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """True if any penalty is on."""
        penalties = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties and self.repeat_last_n != 0


def random_seed() -> int:
    """Return a seed from the system's randomness: 32 bits as in llama.cpp, so that it is short to type."""
    return secrets.randbelow(2**32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenCandidates:
    ids: Ids  # (n,) ascending, at least one
    scores: Floats  # (n,) log-probabilities up to a constant, after temperature; all finite

    def probabilities(self) -> Floats:
        """Return (n,) probabilities of ``ids``, which sum to 1."""
        weights: Floats = np.exp(self.scores - self.scores.max())
        weights /= weights.sum()
        return weights


def token_candidates(logits: Logits, sampling: Sampling) -> TokenCandidates:
    """Return the tokens left by the sampler chain, with scores ``(logit - highest logit) / temperature``.

    Temperature 0 leaves only the most likely token. Tokens with a logit of -inf are never kept.

    No step sorts the vocabulary. Instead, a floor that every retained token reaches selects a few ids, and the chain's
    exact rules decide among these. For top-k the ids are divided into at least 4 · k classes, and the floor is the k-th
    highest of the class maxima: at least k tokens reach it, and rarely many more. An id's class is the id modulo the
    number of classes, because likely tokens have similar ids (a vocabulary ends in rare words and padding).

    All arithmetic is in 64 bits except one sum: without top-k, top-p sums over the whole vocabulary in 32 bits, as
    llama.cpp does. This sum only decides where top-p cuts off and does not affect the scores.

    ``logits`` (vocab,) are not retained.

    Raises:
        ModelError: a logit is NaN, or the highest is infinite.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())  # the index of a NaN, if there is one
        finite_peak(logits[token])
        return TokenCandidates(np.array([token], dtype=np.int64), _CERTAIN)

    top_k = sampling.top_k if sampling.top_k < logits.size else 0
    maxima = _class_maxima(logits, max(_FEW, 4 * top_k) if top_k else _CLASSES)
    peak = finite_peak(np.maximum.reduce(maxima))
    if top_k:
        ids, values = _at_least(max(_LOWEST, float(np.sort(maxima)[-top_k])), logits, peak)
        likely = np.sort(values)[: -top_k - 1 : -1]
        count = likely.size
        if sampling.top_p < 1:
            reached = np.exp(likely).cumsum()
            count = int(reached.searchsorted(sampling.top_p * reached[-1])) + 1
        bar = float(likely[count - 1])
    elif sampling.top_p < 1:
        ids, values, count, bar = _nucleus(logits, maxima, peak, sampling)
    else:
        ids, values = _at_least(_min_p_floor(peak, sampling.min_p), logits, peak)
        count, bar = ids.size, -math.inf
    lowest = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    kept = values >= max(bar, lowest)
    spare = np.count_nonzero(kept) - count
    if bar >= lowest and spare > 0:  # in a tie, drop the higher ids
        kept[(values == bar).nonzero()[0][-spare:]] = False
    return TokenCandidates(ids[kept], values[kept] / sampling.temperature)


def likeliest(logits: Logits, sampling: Sampling) -> TokenCandidates:
    """Approximate :func:`token_candidates` for drafting with top-p but without top-k: a wrong guess costs only a token.

    Top-p is applied only to the tokens at or above the 128th highest of 1024 class maxima, so that no sum over the
    whole vocabulary is needed. On rows from the demo's draft, which are far flatter than a large model's, the noise
    chose the same token at 98.6 % of all positions, and the target agreed with 45.4 % of the tokens instead of 45.5 %.
    With a vocabulary of 128k tokens this takes 60 % as long as :func:`token_candidates`.
    """
    if sampling.temperature == 0 or sampling.top_k or sampling.top_p == 1 or logits.size < 2 * _CLASSES:
        return token_candidates(logits, sampling)
    maxima = _class_maxima(logits, _CLASSES)
    peak = finite_peak(np.maximum.reduce(maxima))
    floor = max(_LOWEST, float(np.partition(maxima, -_GLANCE)[-_GLANCE]))
    ids, values = _at_least(floor, logits, peak)
    likely = np.sort(values)[::-1]
    reached = np.exp(likely).cumsum()
    bar = float(likely[min(int(reached.searchsorted(sampling.top_p * reached[-1])), likely.size - 1)])
    kept = values >= max(bar, math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)
    return TokenCandidates(ids[kept], values[kept] / sampling.temperature)


def confidence(logits: Logits) -> float:
    """Return an upper estimate of the most likely token's probability, from one pass over the row.

    Each of 1024 classes of ids (modulo 1024) is represented by its most likely token only. The estimate is exact for
    vocabularies of fewer than 2048 tokens. Raises ModelError as :func:`token_candidates` does.
    """
    maxima = _class_maxima(logits, _CLASSES)
    peak = finite_peak(np.maximum.reduce(maxima))
    return 1 / float(np.add.reduce(np.exp(maxima - np.float32(peak))))


def _nucleus(logits: Logits, maxima: Logits, peak: float, sampling: Sampling) -> tuple[Ids, Floats, int, float]:
    """Apply top-p without top-k: return some ids, their values, the number of values to keep, and the lowest of these.

    The floor is the value down to which the class maxima reach top-p's mass. On a flat row they do not reach it, so a
    sample of the row, with a margin, sets the floor. If that floor proves too high, it is lowered until top-p could
    drop all tokens below it. Tokens that min-p drops anyway may be missing. In a row that is mostly padding or masked,
    only tokens within 30 nats of the peak are examined: all others together weigh less than the sum's rounding error.
    """
    bar = np.float32(peak - 30)
    if 4 * _STRIDE * np.count_nonzero(logits[::_STRIDE] >= bar) < logits.size:
        warm = (logits >= bar).nonzero()[0]
        logits = logits[warm]
        ids, values, count, last = _nucleus(logits, _class_maxima(logits, _CLASSES), peak, sampling)
        return warm[ids], values, count, last
    lowest, top_p = _min_p_floor(peak, sampling.min_p), sampling.top_p
    total = _total(logits, peak)
    mass = top_p * total
    for few in (_class_maxima(maxima, _FEW), maxima):
        heads = np.sort(few)[::-1]
        reached = np.exp(heads.astype(np.float64) - peak).cumsum()
        if reached[-1] >= mass:
            floor = max(lowest, float(heads[reached.searchsorted(mass)]))
            ids, values = _at_least(floor, logits, peak)
            return ids, values, *_fewest(mass, values)
    sample = np.sort(logits[::_STRIDE])
    under = np.exp(sample.astype(np.float64) - peak).cumsum() * _STRIDE
    floor = max(lowest, float(sample[min(int(under.searchsorted((total - mass) / 2)), sample.size - 1)]))
    ids, values = _at_least(floor, logits, peak)
    if floor > lowest and np.exp(values).sum() < mass:
        floor = max(lowest, _below(peak + math.log((1 - top_p) * total / (2 * logits.size))))
        ids, values = _at_least(floor, logits, peak)
    return ids, values, *_fewest(mass, values)


def _total(logits: Logits, peak: float) -> float:
    """Return the sum of ``exp(logit - peak)`` in 32 bits, as llama.cpp does; the relative error is below 1e-5."""
    shift = 0.0 if abs(peak) < 40 else peak  # a shift costs another pass over the row, and a small peak cannot overflow
    weights = np.exp(logits - np.float32(shift) if shift else logits)
    return float(np.add.reduce(weights)) * math.exp(shift - peak)


def _fewest(mass: float, values: Floats) -> tuple[int, float]:
    """Return how many of the highest values it takes for their exponentials to sum to ``mass``, and the lowest one."""
    count = 0
    while values.size > _CLASSES:  # halve the number of values to sort
        middle = np.median(values[::_STRIDE])
        upper = values[values > middle]
        if upper.size == 0:
            break
        weight = float(np.exp(upper).sum())
        if weight >= mass:
            values = upper
        else:
            count, mass, values = count + upper.size, mass - weight, values[values <= middle]
    likely = np.sort(values)[::-1]
    last = min(int(np.exp(likely).cumsum().searchsorted(mass)), likely.size - 1)
    return count + last + 1, float(likely[last])


def _min_p_floor(peak: float, min_p: float) -> float:
    return _below(peak + math.log(min_p)) if min_p > 0 else _LOWEST


def _at_least(floor: float, logits: Logits, peak: float) -> tuple[Ids, Floats]:
    """Return the ids, ascending, of logits at or above ``floor``, and their log-probabilities up to a constant."""
    ids = (logits >= np.float32(floor)).nonzero()[0]
    return ids, logits[ids].astype(np.float64) - peak


def _class_maxima(logits: Logits, classes: int) -> Logits:
    """Return (classes,) highest logits by id modulo ``classes``; all logits if a class would have just one id."""
    rows = logits.size // classes
    if rows < 2:
        return logits
    maxima: Logits = np.maximum.reduce(logits[: rows * classes].reshape(rows, classes), axis=0)
    rest = logits[rows * classes :]
    np.maximum(maxima[: rest.size], rest, out=maxima[: rest.size])
    return maxima


def finite_peak(peak: np.floating) -> float:
    """Return the highest logit as a float; ModelError if it is infinite or NaN (the maximum of a row with a NaN)."""
    value = float(peak)
    if not math.isfinite(value):
        what = "NaN logits" if math.isnan(value) else f"logits with a maximum of {value}"
        raise ModelError(f"the model produced {what}", "the file may be damaged: download it again, or try another")
    return value


def _below(floor: float) -> float:
    """Return a slightly lower value; the difference exceeds the error of rounding logits to 32 bits."""
    return floor - 1e-6 * (1 + abs(floor))
