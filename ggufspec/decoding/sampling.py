"""From logits to the tokens that may be sampled, by llama.cpp's default sampler chain. Pure NumPy.

The chain is top-k, top-p, min-p, then temperature (common/common.h, ``common_params_sampling::samplers``; each step in
src/llama-sampler.cpp): the truncations see the untempered probabilities. Ties go to the lower token id everywhere.
Penalties come first; they need the text and not only its last row (:mod:`ggufspec.decoding.penalties`).
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
_CLASSES, _FEW = 1024, 256  # classes of token ids; the maximum of each stands for it
_GLANCE = 128  # fewest tokens that a guess is chosen among
_STRIDE = 31  # stride of a sample of the vocabulary; odd, so that it cannot align with a period of ids
_CERTAIN: Floats = np.zeros(1)
_CERTAIN.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of a token from logits; the defaults of truncations and penalties are llama.cpp's.

    Args:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the fewest tokens whose probability, among those that top-k left, reaches this; 1 is off.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 is off.
        seed: seed of all randomness, in [0, 2**64).
        repeat_penalty: divides the logit of a token that the text has already, or multiplies it if negative, in [0.01,
            100]; 1 is off.
        repeat_last_n: tokens of text, prompt included, that penalties look back at; 0 turns all penalties off, -1 looks
            at the whole text.
        presence_penalty: subtracted from the logit of a token that the text has, in [-100, 100]; 0 is off.
        frequency_penalty: subtracted once for each time that the text has the token, in [-100, 100]; 0 is off.

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
        if self.seed < 0:  # --seed -1 has been replaced by a random seed before
            raise UsageError(f"seed {self.seed} is not in [0, 2**64)", "--seed 7; --seed -1 draws one")

    @property
    def truncates(self) -> bool:
        """True if a token with a finite logit can be left out."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """True if the tokens of the text change the logits."""
        penalties = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties and self.repeat_last_n != 0


def random_seed() -> int:
    """Return a seed from the system's randomness, of 32 bits as in llama.cpp, so that it is short to type."""
    return secrets.randbelow(2**32)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    ids: Ids  # (n,) ascending, at least one
    scores: Floats  # (n,) log-probabilities up to a constant, after temperature; all finite

    def probabilities(self) -> Floats:
        """Return (n,) probabilities of ``ids``, which sum to 1."""
        weights: Floats = np.exp(self.scores - self.scores.max())
        weights /= weights.sum()
        return weights


def candidates(logits: Logits, sampling: Sampling) -> Candidates:
    """Return the tokens that the sampler chain leaves, with scores ``(logit - highest logit) / temperature``.

    Temperature 0 leaves only the most likely token. A logit of -inf never stays.

    No step sorts the vocabulary. A floor that no retained token can be under selects a few ids, and the chain's exact
    rules decide among these. For top-k the floor is the k-th highest of the maxima of 4 k classes of ids: at least k
    tokens are on or above it, and rarely many more. The classes are ids modulo their number, because likely tokens have
    ids near each other (the end of a vocabulary is rare words and padding).

    All arithmetic is in 64 bits except one sum: where top-p counts the whole vocabulary, as it does without top-k, the
    sum is in 32 bits, as in llama.cpp. It decides where top-p ends, and does not affect the scores.

    ``logits`` (vocab,) are not retained.

    Raises:
        ModelError: a logit is NaN, or the highest is infinite.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())  # the index of a NaN, if there is one
        finite_peak(logits[token])
        return Candidates(np.array([token], dtype=np.int64), _CERTAIN)

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
    if bar >= lowest and spare > 0:  # drop the higher ids of a tie
        kept[(values == bar).nonzero()[0][-spare:]] = False
    return Candidates(ids[kept], values[kept] / sampling.temperature)


def likeliest(logits: Logits, sampling: Sampling) -> Candidates:
    """Approximate :func:`candidates` for top-p without top-k, for a guess, which costs a token if it is wrong.

    Top-p is applied without summing the whole vocabulary: to the tokens on or above the 128th highest of the maxima of
    1024 classes of ids. On rows of the demo's draft, far flatter than a big model's, noise chose the same token at 98.6
    % of all positions, and the target agreed with 45.4 % of them instead of 45.5 %; with 128k tokens it takes 60 % of
    the time.
    """
    if sampling.temperature == 0 or sampling.top_k or sampling.top_p == 1 or logits.size < 2 * _CLASSES:
        return candidates(logits, sampling)
    maxima = _class_maxima(logits, _CLASSES)
    peak = finite_peak(np.maximum.reduce(maxima))
    floor = max(_LOWEST, float(np.partition(maxima, -_GLANCE)[-_GLANCE]))
    ids, values = _at_least(floor, logits, peak)
    likely = np.sort(values)[::-1]
    reached = np.exp(likely).cumsum()
    bar = float(likely[min(int(reached.searchsorted(sampling.top_p * reached[-1])), likely.size - 1)])
    kept = values >= max(bar, math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)
    return Candidates(ids[kept], values[kept] / sampling.temperature)


def confidence(logits: Logits) -> float:
    """Return an upper estimate of the most likely token's probability, from one pass over the row.

    It is the probability if each of 1024 classes of ids (modulo their number) held only its most likely token; exact
    for a vocabulary of less than twice as many. Raises as :func:`candidates` does.
    """
    maxima = _class_maxima(logits, _CLASSES)
    peak = finite_peak(np.maximum.reduce(maxima))
    return 1 / float(np.add.reduce(np.exp(maxima - np.float32(peak))))


def _nucleus(logits: Logits, maxima: Logits, peak: float, sampling: Sampling) -> tuple[Ids, Floats, int, float]:
    """Apply top-p without top-k: return some ids, their values, how many of the highest stay, and the last of these.

    The floor is where the class maxima alone reach top-p's mass. On a flat row they do not: then a sample of the row,
    with a margin, sets the floor, and if that is wrong, it is so low that all tokens under it could be left out
    together. Tokens that min-p drops anyway may be missing. In a row that is mostly padding or masked, only tokens
    within 30 nats of the peak are examined: the others together weigh less than the rounding of the sum.
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
    shift = 0.0 if abs(peak) < 40 else peak  # a shift is another pass, and without it nothing overflows here
    weights = np.exp(logits - np.float32(shift) if shift else logits)
    return float(np.add.reduce(weights)) * math.exp(shift - peak)


def _fewest(mass: float, values: Floats) -> tuple[int, float]:
    """Return how many of the highest values it takes for their exponentials to reach ``mass``, and the last of them."""
    count = 0
    while values.size > _CLASSES:  # halve what must be sorted
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
    """Return the ids, ascending, of logits on or above ``floor``, and their log-probabilities up to a constant."""
    ids = (logits >= np.float32(floor)).nonzero()[0]
    return ids, logits[ids].astype(np.float64) - peak


def _class_maxima(logits: Logits, classes: int) -> Logits:
    """Return (classes,) the highest logit of each class of ids modulo ``classes``; all logits if there are fewer."""
    rows = logits.size // classes
    if rows < 2:
        return logits
    maxima: Logits = np.maximum.reduce(logits[: rows * classes].reshape(rows, classes), axis=0)
    rest = logits[rows * classes :]
    np.maximum(maxima[: rest.size], rest, out=maxima[: rest.size])
    return maxima


def finite_peak(peak: np.floating) -> float:
    """Return the highest logit as a float; ModelError if it is infinite or NaN (NumPy's maximum is NaN if any is)."""
    value = float(peak)
    if not math.isfinite(value):
        what = "NaN logits" if math.isnan(value) else f"logits with a maximum of {value}"
        raise ModelError(f"the model produced {what}", "the file may be damaged: download it again, or try another")
    return value


def _below(floor: float) -> float:
    """Return a slightly lower value, by more than the rounding of logits to 32 bits."""
    return floor - 1e-6 * (1 + abs(floor))
