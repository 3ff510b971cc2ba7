"""What earlier runs on this machine measured: what became of drafted tokens, and what a card's driver takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from pathlib import Path

from ggufspec.files.cache import Table
from ggufspec.hardware.backends import overhead_bytes
from ggufspec.models.headers import cached_header
from ggufspec.planning.speed import LookupRounds

PRIOR_ACCEPTANCE = 0.7  # what chat and code reach with a draft of the same family, temperature 0: 0.6 to 0.8
# Weight of the Beta prior in drafted tokens. Tokens of one answer are not independent: a pair's chance differs by text
# about as much as pairs differ (ten answers: 0.66 to 0.98, tests/evidence/traces), and an answer has some 130. So the
# prior counts as two answers: docs/decisions/007.
PRIOR_TOKENS = 250
_KNOWN_TOKENS = 250  # emitted, from which on the lookup's share of the text is known
_HALVED_BY = 2000  # drafted tokens after which older ones count half


@dataclass(slots=True)
class EstimatorState:
    """What an acceptance estimator has seen, all of it decayed: see ``ggufspec.decoding.policy.estimator``."""

    seen: list[list[float]]
    accepted: list[list[float]]
    usual: list[list[float]]
    run: list[float]
    mean: list[float]
    losses: list[float]


@dataclass(slots=True)
class Experience:
    """What became of one drafter's tokens for one target; older ones count less.

    The chance that a token is accepted given that all before it were, and not accepted ÷ drafted, tells what another
    draft length would give.
    """

    accepted: list[float] = field(default_factory=list)  # tokens, by position in the draft
    reached: list[float] = field(default_factory=list)  # those whose predecessors all were accepted
    drafted: float = 0.0  # tokens, those after a rejected one too
    emitted: float = 0.0  # tokens of the answers that the drafter took part in, whoever wrote them
    estimator: EstimatorState | None = None  # where an adaptive policy judged them

    def __post_init__(self) -> None:
        pairs = zip_longest(self.accepted, self.reached, fillvalue=0.0)
        if not all(0 <= accepted <= reached < inf for accepted, reached in pairs):
            raise ValueError("more accepted than drafted")
        if not (0 <= self.drafted < inf and 0 <= self.emitted < inf):
            raise ValueError("a number of tokens that cannot be")
        self.drafted = max(self.drafted, sum(self.reached))

    def count(self, position: int, *, accepted: bool) -> None:
        """A token at this position was judged."""
        missing = position + 1 - len(self.reached)
        self.reached += [0.0] * missing
        self.accepted += [0.0] * missing
        self.reached[position] += 1
        self.accepted[position] += accepted

    def joined(self, newer: Experience) -> Experience:
        """This and what came later."""
        share = 0.5 ** (sum(newer.reached) / _HALVED_BY)
        if newer.emitted and not self.emitted:  # an older version wrote it, which did not count all
            share = 0.0

        def add(old: list[float], new: list[float]) -> list[float]:
            return [share * before + now for before, now in zip_longest(old, new, fillvalue=0.0)]

        return Experience(
            add(self.accepted, newer.accepted),
            add(self.reached, newer.reached),
            share * self.drafted + newer.drafted,
            share * self.emitted + newer.emitted,
            newer.estimator or self.estimator,
        )


def fingerprint(folder: Path, path: Path) -> str:
    """By which a file is known here: its header's, as far as that is in the cache; else empty."""
    known = cached_header(path, folder / "headers")
    return known.header.fingerprint if known else ""


def experience(folder: Path, target: str, drafter: str) -> Experience:
    """What a drafter did for a target on this machine.

    Args:
        folder: the cache folder.
        target: the target's fingerprint (:class:`ggufspec.models.header.ModelHeader`).
        drafter: the draft's, or the name of a drafter without a file.
    """
    return _experience(folder).get(_key(target, drafter)) or Experience()


def add_experience(folder: Path, target: str, drafter: str, newer: Experience) -> None:
    """Write what a drafter did since; see :func:`experience`."""
    if newer != Experience():
        _experience(folder).update(_key(target, drafter), lambda known: (known or Experience()).joined(newer))


def expected_acceptance(
    folder: Path, target: str, drafter: str, profile: float | None, origin: str = "from its profile"
) -> tuple[float, str]:
    """(chance per token, where it comes from): the mean of a Beta distribution, whose prior is the profile's chance or
    an assumption and counts as ``PRIOR_TOKENS``.
    """
    known = experience(folder, target, drafter)
    prior, words = (PRIOR_ACCEPTANCE, "assumed") if profile is None else (profile, origin)
    reached = sum(known.reached)
    rate = (sum(known.accepted) + PRIOR_TOKENS * prior) / (reached + PRIOR_TOKENS)
    if round(reached):
        seen = f"{reached:,.0f} tokens measured here"
        words = f"from {seen}" if reached >= PRIOR_TOKENS else f"mostly {words}, {seen}"
    return rate, words


def accepted_share(folder: Path, target: str, drafters: Iterable[str]) -> str:
    """Accepted ÷ drafted tokens of all answers on this machine, in words; empty if these drafters drafted nothing."""
    known = [experience(folder, target, drafter) for drafter in drafters]
    drafted = sum(one.drafted for one in known)
    accepted = sum(sum(one.accepted) for one in known)
    return f"{accepted / drafted:.0%} of {drafted:,.0f} drafted tokens" if round(drafted) else ""


def lookup_rounds(folder: Path, target: str) -> LookupRounds | None:
    """What the n-gram lookup did in a target's answers on this machine; None until there are enough of them."""
    known = experience(folder, target, "lookup")
    if known.emitted < _KNOWN_TOKENS:
        return None
    begun = known.reached[0] if known.reached else 0.0
    if not begun:
        return LookupRounds(0.0, 0.0, 1.0)
    gained = sum(known.accepted) / begun + 1
    return LookupRounds(min(1.0, begun * gained / known.emitted), known.drafted / begun, gained)


def _experience(folder: Path) -> Table[Experience]:
    return Table(folder / "acceptance.json", Experience)


def _key(target: str, drafter: str) -> str:
    return f"{target} + {drafter}"


def record_overhead(folder: Path, card: str, size_bytes: int) -> None:
    """Keep what a process took of a card, by its driver's name, beyond llama.cpp's own breakdown."""
    _overheads(folder).put(card, max(0, size_bytes))


def known_overhead(folder: Path, card: str, device: str, total_bytes: int = 0) -> int:
    """Bytes that were recorded for a card of so much memory, or a guess; ``device`` is ggml's name, CUDA0 say."""
    known = _overheads(folder).get(card)
    return overhead_bytes(device, total_bytes) if known is None else known


def _overheads(folder: Path) -> Table[int]:
    return Table(folder / "overheads.json", int)
