"""Log-probabilities of emitted tokens under the target's own distribution. Pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggufspec.decoding.sampling import Logits


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probabilities at temperature 1, without truncation or penalties."""

    own: float  # log-probability of the emitted token
    likeliest: tuple[tuple[int, float], ...] = ()  # (id, log-probability), likeliest first


def logprob(row: Logits, token: int, count: int) -> Logprob:
    """Return the log-probabilities of ``token`` and of the ``count`` likeliest tokens, from raw logits (vocab,)."""
    wide = row.astype(np.float64)
    total = float(np.logaddexp.reduce(wide))
    ids = np.argpartition(wide, -count)[-count:] if count else np.empty(0, np.int64)
    ids = ids[np.lexsort((ids, -wide[ids]))]
    return Logprob(float(wide[token]) - total, tuple((int(one), float(wide[one]) - total) for one in ids))
