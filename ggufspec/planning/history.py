"""Records of earlier measurements on this machine: acceptance of drafted tokens, and GPU drivers' memory overhead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from pathlib import Path

from ggufspec.files.cache import JsonTable
from ggufspec.hardware.backends import overhead_bytes
from ggufspec.models.headers import cached_header
from ggufspec.planning.speed import LookupRounds
from ggufspec.schema.text import counted
from ggufspec.settings.table import PRIOR_ACCEPTANCE as PRIOR_ACCEPTANCE

# Weight of the Beta prior, in drafted tokens. Tokens in one answer are not independent, because acceptance varies about
# as much between texts as between pairs (ten answers: 0.66 to 0.98, tests/evidence/traces). An answer has about 130
# tokens, so the prior weighs as much as two answers: docs/decisions/007.
PRIOR_TOKENS = 250
_KNOWN_TOKENS = 250  # minimum number of emitted tokens needed to estimate the lookup's share of the text
_HALVED_BY = 2000  # an observation's weight halves after this many newer counted tokens


@dataclass(slots=True)
class EstimatorState:
    """Decayed observations of an acceptance estimator (``ggufspec.decoding.policy.estimator``)."""

    seen: list[list[float]]
    accepted: list[list[float]]
    usual: list[list[float]]
    run: list[float]
    mean: list[float]
    losses: list[float]


@dataclass(slots=True)
class DraftingHistory:
    """Decayed token counts for one drafter and target; ``accepted`` ÷ ``reached`` does not depend on draft length."""

    accepted: list[float] = field(default_factory=list)  # accepted tokens by position in the draft
    reached: list[float] = field(default_factory=list)  # tokens whose predecessors were all accepted, by position
    drafted: float = 0.0  # all drafted tokens, including those after a rejected one
    emitted: float = 0.0  # all tokens in answers in which the drafter took part
    estimator: EstimatorState | None = None  # None if no adaptive policy was used

    def __post_init__(self) -> None:
        pairs = zip_longest(self.accepted, self.reached, fillvalue=0.0)
        if not all(0 <= accepted <= reached < inf for accepted, reached in pairs):
            raise ValueError("more accepted than drafted")
        if not (0 <= self.drafted < inf and 0 <= self.emitted < inf):
            raise ValueError("an impossible number of tokens")
        self.drafted = max(self.drafted, sum(self.reached))

    def count(self, position: int, *, accepted: bool) -> None:
        """Count one verified token at this position in the draft."""
        missing = position + 1 - len(self.reached)
        self.reached += [0.0] * missing
        self.accepted += [0.0] * missing
        self.reached[position] += 1
        self.accepted[position] += accepted

    def joined(self, newer: DraftingHistory) -> DraftingHistory:
        """Return the ``newer`` counts plus these, which decay with the number of newer tokens in ``reached``."""
        share = 0.5 ** (sum(newer.reached) / _HALVED_BY)
        if newer.emitted and not self.emitted:  # written by an older version, which did not count every token
            share = 0.0

        def add(old: list[float], new: list[float]) -> list[float]:
            return [share * before + now for before, now in zip_longest(old, new, fillvalue=0.0)]

        return DraftingHistory(
            add(self.accepted, newer.accepted),
            add(self.reached, newer.reached),
            share * self.drafted + newer.drafted,
            share * self.emitted + newer.emitted,
            newer.estimator or self.estimator,
        )


def fingerprint(folder: Path, path: Path) -> str:
    """Return the fingerprint of a file's cached header, or an empty string if it is not cached."""
    known = cached_header(path, folder / "headers")
    return known.header.fingerprint if known else ""


def experience(folder: Path, target: str, drafter: str) -> DraftingHistory:
    """Return this machine's token counts for a drafter and a target from the cache ``folder``.

    Models are identified by fingerprint (:class:`ggufspec.models.header.ModelHeader`), drafters without a file by name.
    """
    return _experience(folder).get(_key(target, drafter)) or DraftingHistory()


def add_experience(folder: Path, target: str, drafter: str, newer: DraftingHistory) -> None:
    """Add newer token counts of a drafter to the cache; see :func:`experience`."""
    if newer != DraftingHistory():
        _experience(folder).update(_key(target, drafter), lambda known: (known or DraftingHistory()).joined(newer))


def expected_acceptance(
    folder: Path, target: str, drafter: str, profile: float | None, origin: str = "from its profile"
) -> tuple[float, str]:
    """Return the expected acceptance per token (the mean of a Beta distribution), and its origin in words.

    The prior, which weighs as much as ``PRIOR_TOKENS`` tokens, is the profile's acceptance or an assumed value.
    """
    known = experience(folder, target, drafter)
    prior, words = (PRIOR_ACCEPTANCE, "assumed") if profile is None else (profile, origin)
    reached = sum(known.reached)
    rate = (sum(known.accepted) + PRIOR_TOKENS * prior) / (reached + PRIOR_TOKENS)
    if round(reached):
        seen = counted(round(reached), "token")
        words = f"measured here, {seen}" if reached >= PRIOR_TOKENS else f"mostly {words}, {seen} measured here"
    return rate, words


def accepted_here(folder: Path, target: str, drafters: Iterable[str]) -> str:
    """Describe these drafters' acceptance rate over all answers on this machine; return "" if they drafted nothing."""
    known = [experience(folder, target, drafter) for drafter in drafters]
    drafted = sum(one.drafted for one in known)
    accepted = sum(sum(one.accepted) for one in known)
    return f"{accepted / drafted:.0%} of {drafted:,.0f} drafted tokens" if round(drafted) else ""


def lookup_rounds(folder: Path, target: str) -> LookupRounds | None:
    """Return n-gram lookup statistics from a target's answers on this machine; None if they have too few tokens."""
    known = experience(folder, target, "lookup")
    if known.emitted < _KNOWN_TOKENS:
        return None
    begun = known.reached[0] if known.reached else 0.0
    if not begun:
        return LookupRounds(0.0, 0.0, 1.0)
    gained = sum(known.accepted) / begun + 1
    return LookupRounds(min(1.0, begun * gained / known.emitted), known.drafted / begun, gained)


def _experience(folder: Path) -> JsonTable[DraftingHistory]:
    return JsonTable(folder / "acceptance.json", DraftingHistory)


def _key(target: str, drafter: str) -> str:
    return f"{target} + {drafter}"


def record_overhead(folder: Path, card: str, size_bytes: int) -> None:
    """Record the GPU memory used by a process beyond llama.cpp's breakdown, under the driver's name for the GPU."""
    _overheads(folder).put(card, max(0, size_bytes))


def known_overhead(folder: Path, card: str, device: str, total_bytes: int = 0) -> int:
    """Return a GPU's recorded overhead in bytes, or a guess; ``device`` is ggml's name for the GPU, such as CUDA0."""
    known = _overheads(folder).get(card)
    return overhead_bytes(device, total_bytes) if known is None else known


def _overheads(folder: Path) -> JsonTable[int]:
    return JsonTable(folder / "overheads.json", int)
