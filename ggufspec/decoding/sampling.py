"""From logits to the tokens that may be sampled, by llama.cpp's default sampler chain. Pure NumPy.

The chain is top-k, top-p, min-p, then temperature (common/common.h, ``common_params_sampling::samplers``; each step in
src/llama-sampler.cpp): the truncations see the untempered probabilities. Ties go to the lower token id everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggufspec.errors import ModelError, UsageError

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LOWEST = float(np.finfo(np.float32).min)  # below every finite logit: only -inf is lower
_CERTAIN: Floats = np.zeros(1)
_CERTAIN.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits; the defaults of the truncations are llama.cpp's.

    Args:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the fewest tokens whose probability, among those that top-k left, reaches this; 1 is off.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 is off.
        seed: of all randomness, in [0, 2**64).

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UsageError(f"temperature {self.temperature} is not a number from 0 up", "--temp 0.8; 0 is greedy")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} is negative", "--top-k 40; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} is not in (0, 1]", "--top-p 0.95; 1 turns it off")
        if not 0 <= self.min_p < 1:
            raise UsageError(f"min-p {self.min_p} is not in [0, 1)", "--min-p 0.05; 0 turns it off")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed {self.seed} is not in [0, 2**64)", "--seed 0")

    @property
    def truncates(self) -> bool:
        """Whether a token with a finite logit can be left out."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The tokens that may be sampled.

    Args:
        ids: (n,) token ids, ascending, at least one.
        scores: (n,) log-probabilities up to a constant, after temperature; all finite.
    """

    ids: Ids
    scores: Floats

    def probabilities(self) -> Floats:
        """(n,) probabilities of ``ids``; their sum is 1."""
        weights: Floats = np.exp(self.scores - self.scores.max())
        weights /= weights.sum()
        return weights


def candidates(logits: Logits, sampling: Sampling) -> Candidates:
    """The tokens that the sampler chain leaves, with scores ``(logit - highest logit) / temperature``.

    Temperature 0 leaves the most likely token alone. A logit of -inf is never left.

    No step sorts the vocabulary. A floor that no kept token can be under selects a few ids, and the chain's exact
    rules decide among these. For top-k the floor is the k-th highest of the maxima of 4 k classes of ids: k tokens at
    least are on or above it, and rarely many more. The classes are ids modulo 4 k, since likely tokens have ids near
    each other (the end of a vocabulary is rare words and padding).

    Args:
        logits: (vocab,) as the model gives them; not kept.
        sampling: the truncations and the temperature; the seed has no part in this.

    Raises:
        ModelError: a logit is NaN, or the highest is infinite.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())  # a NaN, if there is one
        finite_peak(logits[token])
        return Candidates(np.array([token], dtype=np.int64), _CERTAIN)

    top_k = sampling.top_k if sampling.top_k < logits.size else 0
    maxima = _class_maxima(logits, 4 * top_k) if top_k else logits
    peak = finite_peak(maxima.max())
    floor, total = _LOWEST, 0.0
    if top_k:
        floor = max(floor, float(np.partition(maxima, -top_k)[-top_k]))
    else:
        if sampling.min_p > 0:
            floor = max(floor, _below(peak + math.log(sampling.min_p)))
        if sampling.top_p < 1:
            total = float(np.exp(logits.astype(np.float64) - peak).sum())
            # All tokens under this floor together hold less than half of what top-p may leave out.
            floor = max(floor, _below(peak + math.log((1 - sampling.top_p) * total / (2 * logits.size))))

    ids = np.flatnonzero(logits >= np.float32(floor))
    values = logits[ids].astype(np.float64) - peak  # (n,) untempered log-probabilities up to a constant
    if sampling.top_p < 1 or 0 < top_k < ids.size:
        order = np.argsort(-values, kind="stable")  # most likely first; ids ascend within a tie
        order = order[: top_k or None]
        if sampling.top_p < 1:
            reached = np.exp(values[order]).cumsum()
            order = order[: np.searchsorted(reached, sampling.top_p * (total or reached[-1])) + 1]
        order.sort()
        ids, values = ids[order], values[order]
    if sampling.min_p > 0:
        likely = values >= math.log(sampling.min_p)
        ids, values = ids[likely], values[likely]
    return Candidates(ids, values / sampling.temperature)


def _class_maxima(logits: Logits, classes: int) -> Logits:
    """(classes,) the highest logit of each class of ids modulo ``classes``; all logits where these are fewer."""
    rows = logits.size // classes
    if rows < 2:
        return logits
    maxima: Logits = logits[: rows * classes].reshape(rows, classes).max(axis=0)
    rest = logits[rows * classes :]
    np.maximum(maxima[: rest.size], rest, out=maxima[: rest.size])
    return maxima


def finite_peak(peak: np.floating) -> float:
    """The highest logit, as a float.

    Raises:
        ModelError: it is NaN (NumPy's maximum is NaN if any element is) or infinite.
    """
    value = float(peak)
    if not math.isfinite(value):
        what = "NaN logits" if math.isnan(value) else f"logits with a maximum of {value}"
        raise ModelError(f"the model produced {what}", "the file may be damaged: download it again, or try another")
    return value


def _below(floor: float) -> float:
    """A little lower, by more than the rounding of logits to 32 bits."""
    return floor - 1e-6 * (1 + abs(floor))
