"""Selection of the parts of a measurement that count when other programs are also using the machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ggufspec.bench.trial import TrialAnswer, TrialResult
from ggufspec.decoding.alternate import SEGMENT_S, AnswerSegment
from ggufspec.hardware.host import BUSY_CPUS, TOLERATED_CPUS
from ggufspec.schema.text import counted

MOST_TRIES = 3  # maximum number of tries for a trial disturbed by other programs
_FEWEST = 1 / 3  # minimum share of segment pairs for a verdict; if fewer are quiet, pairs under a similar load count
_Key = TypeVar("_Key")


def to_repeat(tries: Mapping[_Key, Sequence[float]], least: float) -> _Key | None:
    """Return the first trial that was disturbed in every try and may be tried again, or None.

    ``tries`` has the CPUs that other programs used in each try of each trial; ``least`` is the minimum over all trials.
    """
    disturbed = (key for key, others in tries.items() if min(others) >= least + BUSY_CPUS)
    return next((key for key in disturbed if len(tries[key]) < MOST_TRIES), None)


def are_alike(loads: Sequence[float]) -> bool:
    """Return whether trials ran under about the same load, so that they may be compared."""
    return max(loads, default=0.0) - min(loads, default=0.0) < BUSY_CPUS


def repeated_note(tries: Iterable[Sequence[float]]) -> tuple[str, ...]:
    """Return a note if trials were repeated; ``tries`` has the CPUs that other programs used in each try."""
    again = [others for others in tries if len(others) > 1]
    if not again:
        return ()
    most = max(one for others in again for one in others if one < math.inf)
    repeated = f"{counted(len(again), 'trial')} {'was' if len(again) == 1 else 'were'} repeated"
    return (f"{repeated} because other programs used up to {most:.1f} CPUs; the least disturbed try counts",)


@dataclass(frozen=True, slots=True)
class CountedRuns:
    """Results of two runs with the segments that count, and how these were chosen.

    Attributes:
        ours, theirs: results by pass; their statistics cover only segments that count (no tokens if none does).
        pairs, counting: number of segment pairs, and how many of them count.
        part: which pairs count: ``quiet``, ``similar load``, or ``all``.
        busy_share: share of the time in which other programs used ``TOLERATED_CPUS`` or more.
        others_cpus: highest number of CPUs that other programs used during a segment.
        least_cpus: lowest number of CPUs that they used during a segment; without pairs, the median over results.
    """

    ours: list[TrialResult]
    theirs: list[TrialResult]
    pairs: int = 0
    counting: int = 0
    part: str = "all"
    busy_share: float = 0.0
    others_cpus: float = 0.0
    least_cpus: float = 0.0

    @property
    def is_quiet(self) -> bool:
        """True if the machine was quiet during the segments that count, so that later plans may use their speeds."""
        return self.part == "quiet" and self.least_cpus < BUSY_CPUS

    @property
    def is_enough(self) -> bool:
        """True if these segments suffice for a verdict. If the machine was idle at times, only quiet pairs suffice."""
        return self.part == "quiet" or not self.pairs or self.least_cpus >= BUSY_CPUS

    @property
    def note(self) -> str:
        """Note for the user if other programs were busy or some pairs do not count; otherwise empty."""
        if self.is_quiet and self.counting == self.pairs and self.busy_share < _FEWEST:
            return ""
        used = f"other programs used up to {self.others_cpus:.1f} CPUs, and {TOLERATED_CPUS} or more during "
        used += f"{self.busy_share:.0%} of the run; "
        if self.counting == self.pairs:
            return used + "an idle machine would reach more tokens/s; speedups compare runs under the same load"
        part = "in which the machine was quiet" if self.part == "quiet" else "in which both runs saw a similar load"
        return f"{used}the verdict rests on the segments {part} ({self.counting} of {counted(self.pairs, 'pair')})"


def count(ours: list[TrialResult], theirs: list[TrialResult]) -> CountedRuns:
    """Choose the pairs of segments that count: quiet pairs; if fewer than a third are quiet, pairs with a similar load
    on both sides; if these are also fewer than a third, all pairs.
    """
    pairs = [
        (key, pair)
        for turn, results in enumerate(zip(ours, theirs, strict=False))
        for prompt, answers in enumerate(zip(*(one.answers for one in results), strict=False))
        for number, pair in enumerate(zip(*(one.segments for one in answers), strict=False))
        if all(one.statistics.decoded for one in pair)
        for key in [(turn, prompt, number)]
    ]
    if not pairs:
        others = sorted(result.others_cpus for result in (*ours, *theirs)) or [0.0]
        middle = others[len(others) // 2]
        part = "quiet" if middle < BUSY_CPUS else "all"
        busy_share = sum(one >= TOLERATED_CPUS for one in others) / len(others)
        return CountedRuns(ours, theirs, 0, 0, part, busy_share, others[-1], middle)
    loads = _loads([pair for _, pair in pairs])
    least = min(map(min, loads))
    quiet = [max(load) < least + BUSY_CPUS for load in loads]
    alike = [are_alike(load) for load in loads]
    named = (("quiet", quiet), ("similar load", alike), ("all", [True] * len(pairs)))
    part, chosen = next((name, rows) for name, rows in named if sum(rows) >= _FEWEST * len(pairs))
    keys = {key for (key, _), is_chosen in zip(pairs, chosen, strict=True) if is_chosen}
    times = [
        (one.statistics.decode_s, others)
        for (_, pair), load in zip(pairs, loads, strict=True)
        for one, others in zip(pair, load, strict=True)
    ]
    busy_s, all_s = sum(s for s, others in times if others >= TOLERATED_CPUS), sum(s for s, _ in times)
    if len(keys) < len(pairs):
        paired = min(len(ours), len(theirs))
        ours, theirs = (
            [*(_only(result, turn, keys) for turn, result in enumerate(one[:paired])), *one[paired:]]
            for one in (ours, theirs)
        )
    return CountedRuns(
        ours, theirs, len(pairs), len(keys), part, busy_s / max(all_s, 1e-9), max(others for _, others in times), least
    )


def _loads(pairs: Sequence[tuple[AnswerSegment, ...]]) -> list[tuple[float, ...]]:
    """Return the CPUs that other programs used during each half of each pair; adjacent short pairs share an average."""
    loads, group = list[tuple[float, ...]](), list[tuple[AnswerSegment, ...]]()
    for number, pair in enumerate(pairs, 1):
        group.append(pair)
        seconds = [sum(one.statistics.decode_s for one in half) for half in zip(*group, strict=True)]
        if min(seconds) >= SEGMENT_S or number == len(pairs):
            weighted = [
                sum(one.others_cpus * one.statistics.decode_s for one in half) / max(all_s, 1e-9)
                for half, all_s in zip(zip(*group, strict=True), seconds, strict=True)
            ]
            loads += [tuple(weighted)] * len(group)
            group = []
    return loads


def _only(result: TrialResult, turn: int, keys: set[tuple[int, int, int]]) -> TrialResult:
    """Return a result with only the segments in ``keys``."""

    def cut(prompt: int, answer: TrialAnswer) -> TrialAnswer:
        chosen = [one.statistics for i, one in enumerate(answer.segments) if (turn, prompt, i) in keys]
        start = answer.start if (turn, prompt, 0) in keys else None
        return replace(answer, statistics=answer.statistics.only(chosen), start=start)

    return replace(result, answers=tuple(cut(i, one) for i, one in enumerate(result.answers)))
