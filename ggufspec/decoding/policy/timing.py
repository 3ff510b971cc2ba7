"""Measures T(n) of a model in a fraction of a second, and notices if the machine was too busy for that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ggufspec.hardware import host
from ggufspec.hardware.disturbance import Counters
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context

# Text to batch: neighbouring tokens of a real text share a mixture's experts; random tokens from the whole vocabulary
# would read more experts than a verification does.
_TEXT = """The ferry left the harbour at half past seven, an hour late, and by then the fog had lifted from the water.
Anna counted the boxes once more: eleven, and the list said twelve. "Somebody will have to go back," she told the
captain, who shook his head and pointed at the tide table. In 1987 the crossing had taken 45 minutes; now it takes 30.

def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

{"name": "lisbon", "population": 545796, "rivers": ["Tagus"], "capital": true}
"""
_NEEDED = (1, 2, 4, 8)  # batch sizes that are timed in any case
_WIDE = 16  # size where kernels may be far better than smaller ones suggest: timed at the end
_WIDE_PATIENCE = 3  # within so many budgets
_ORDER = (3, 5, 16, 6, 12, 32, 24, 7, 10, 64, 14, 20, 48, 128, 96, 192, 256)  # the most informative first
CHECKED = 2  # batches of a spot check; the shortest counts
_AGREE = 1.25  # two timings of a size that are further apart were disturbed
_TRIES = 3  # further timings of a size whose timings disagree, before giving up
_SLOW = 1 / 8  # share of the budget; a slower size is timed once at first
_VISITS = 3  # visits of a size, if the budget allows
_PATIENCE = 2  # budgets, after which nothing is timed again
_TOO_FAST = 0.6  # a batch of half the tokens took longer than this share says: it was disturbed
_TOO_SLOW = 1.5  # times the same tokens in smaller batches: more means that it was disturbed


class StoppedError(Exception):
    """A measurement was stopped; the cache is as it was."""


@dataclass(frozen=True, slots=True)
class Measured:
    points: dict[int, float]  # seconds by batch size
    switch_s: float  # extra seconds when the batch size changes; 0 if below noise
    trusted: bool  # two timings of every size agreed, and no disturbance is known
    note: str = ""  # a sentence for the user if it is not trusted


def measure(
    model: Context | Head,
    clock: Callable[[], float],
    *,
    limit: int,
    budget_s: float = 0.5,
    allowed: Collection[int] | None = None,
    outputs: int | None = None,
    streams_from: int = 0,
    counters: Callable[[], Counters] = Counters.now,
    with_gpus: bool = False,
    goes_on: Callable[[], bool] = lambda: True,
) -> Measured:
    """Time batches of some sizes after the text in the cache, which is afterwards as it was.

    A batch size is decoded once for its graph and twice for its time, and again later if the budget allows; a slow one
    is decoded once, because the graph hardly counts for it, and once more after the others: a single time is too often
    half as long again as the next. Times that contradict each other are taken again: other programs only ever add to
    them, so that the shortest counts.

    Of the ``allowed`` sizes up to ``limit`` (None: all) 1, 2, 4 and 8 are timed even if they take more than
    ``budget_s``, and 16 within three times as much. From ``streams_from`` tokens on a GPU computes with copies of CPU
    weights; this size is timed, too, because smaller ones do not predict it. A batch has at most ``outputs`` rows of
    logits; None: all, as a verification has. The ``counters`` show disturbances, ``with_gpus`` on the GPUs, too.
    ``goes_on`` is called before every batch.

    Raises:
        ValueError: no batch size is allowed.
        StoppedError: ``goes_on`` returned False.
    """
    needed, others = _widths(min(limit, max(model.capacity - model.length, 1)), allowed)
    text = model.model.sample_tokens(_TEXT)
    before: Counters | None = None

    def once(width: int) -> float:
        nonlocal before
        if not goes_on():
            raise StoppedError
        seconds = _once(model, clock, text, width, outputs)
        before = before or counters()  # the first batch may read weights from the disk
        return seconds

    timer = _Timer(once, clock, budget_s)
    for width in needed:
        timer.visit(width)
    for width in others:
        if timer.spent_s + 3 * timer.widest_s <= budget_s / 2:
            timer.visit(width)
    for _ in range(_VISITS - 1):  # later, when a disturbance may be over
        for width, taken in timer.timings.items():
            if timer.spent_s + 3 * min(taken) <= budget_s:
                timer.visit(width)
    for width in reversed(needed):
        if len(timer.timings[width]) < 2 and timer.spent_s <= _PATIENCE * budget_s:
            timer.again(width)
    for width in timer.suspects():
        if timer.spent_s <= _PATIENCE * budget_s:
            timer.visit(width)
    if _WIDE in others and _WIDE not in timer.timings:
        for _ in range(2):
            guess_s = timer.widest_s * _WIDE / max(timer.timings)  # if it is no better than smaller sizes
            if timer.spent_s + guess_s <= _WIDE_PATIENCE * budget_s:
                timer.again(_WIDE)
    if streams_from in others and streams_from not in timer.timings:
        timer.once(streams_from)  # the first allocates the GPU's buffers
        timer.again(streams_from)
    measured = timer.result()
    assert before is not None
    reason = counters().since(before, with_gpus=with_gpus).reason(host.physical_cores(), host.usable_cpus())
    if not reason:
        return measured
    return replace(
        measured, trusted=False, note=f"batches were timed while {reason}: drafting begins with a rough guess"
    )


def spot_check(model: Context | Head, clock: Callable[[], float], width: int, outputs: int | None = None) -> float:
    """Return the seconds of the shorter of two batches of one size; the cache is left as it was."""
    text = model.model.sample_tokens(_TEXT)
    return min(_once(model, clock, text, width, outputs) for _ in range(CHECKED))


def _once(
    model: Context | Head, clock: Callable[[], float], text: Sequence[int], width: int, outputs: int | None
) -> float:
    tokens = [text[i % len(text)] for i in range(width)]
    return time_batch(model, clock, tokens, width if outputs is None else min(width, outputs))


def time_token(model: Context | Head, clock: Callable[[], float], tokens: Sequence[int]) -> float:
    """Return the seconds of the shortest of some batches of this one token; the cache is left as it was."""
    return min(time_batch(model, clock, tokens, 1) for _ in range(CHECKED))


def time_batch(model: Context | Head, clock: Callable[[], float], tokens: Sequence[int], outputs: int) -> float:
    """Return the seconds of one batch after the cached text; the cache is left as it was."""
    found = model.length
    model.mark()
    began = clock()
    model.decode(tokens, outputs)
    seconds = clock() - began
    model.rewind(found)
    return max(seconds, 1e-9)  # the clock may be coarse


class _Timer:
    """Collects the timings of each batch size and detects disturbances."""

    def __init__(self, once: Callable[[int], float], clock: Callable[[], float], budget_s: float) -> None:
        self.once = once
        self.clock = clock
        self.budget_s = budget_s
        self.began = clock()
        self.timings: dict[int, list[float]] = {}
        self.switches: list[tuple[int, float]] = []  # a batch size, and its time right after another size

    @property
    def spent_s(self) -> float:
        return self.clock() - self.began

    @property
    def widest_s(self) -> float:
        return min(self.timings[max(self.timings)])

    def visit(self, width: int) -> None:
        first = self.once(width)
        if first > _SLOW * self.budget_s and self.timings and width not in self.timings:
            self.timings[width] = [first]
            return
        known = self.timings.setdefault(width, [])
        self.switches.append((width, first))
        known += (self.once(width), self.once(width))
        for _ in range(_TRIES):
            if not _agree(known) and self.spent_s <= _PATIENCE * self.budget_s:
                known.append(self.once(width))

    def again(self, width: int) -> None:
        self.timings.setdefault(width, []).append(self.once(width))

    def suspects(self) -> list[int]:
        """Return the sizes whose timings contradict each other, or those of other sizes."""
        shortest = {width: min(taken) for width, taken in self.timings.items()}
        return [
            width
            for width, seconds in shortest.items()
            if not _agree(self.timings[width])
            or shortest.get(2 * width, seconds) < _TOO_FAST * seconds
            or seconds > _TOO_SLOW * (self._bound(width) or seconds)
        ]

    def result(self) -> Measured:
        """Return the shortest times, and whether they can be trusted."""
        points = {width: min(taken) for width, taken in sorted(self.timings.items())}
        bounds = {width: self._bound(width) or seconds for width, seconds in points.items()}
        disturbed = [
            width
            for width, seconds in points.items()
            if not _agree(self.timings[width]) or seconds > _TOO_SLOW * bounds[width]
        ]
        switches = sorted(first - points[width] for width, first in self.switches) or [0.0]
        switch_s = min(max(switches[len(switches) // 4], 0.0), min(points.values()))
        if not disturbed:
            return Measured(points, switch_s, True)
        width = max(disturbed, key=lambda width: max(self.timings[width]) / min(points[width], bounds[width]))
        note = (
            f"the machine was busy while batches were timed (one of {width} took up to "
            f"{max(self.timings[width]) * 1e3:.3g} ms): the first rounds go by a rough guess"
        )
        # Drop points that are surely too long: a size that looks better than it is will be tried, and then known.
        points = {width: seconds for width, seconds in points.items() if seconds <= bounds[width]}
        return Measured(points, switch_s, False, note)

    def _bound(self, width: int) -> float | None:
        """Return the seconds of the same tokens in smaller batches, the fastest way; None without smaller timings."""
        return min(
            (-(-width // narrow) * min(taken) for narrow, taken in self.timings.items() if narrow < width),
            default=None,
        )


def _agree(timings: Sequence[float]) -> bool:
    """Return True if the two shortest are close; a single one agrees with itself."""
    return len(timings) < 2 or sorted(timings)[1] <= _AGREE * min(timings)


def _widths(limit: int, allowed: Collection[int] | None) -> tuple[list[int], list[int]]:
    """Return the sizes to time in any case, and those to time if time is left, the most informative first."""
    usable = set(range(1, limit + 1)) if allowed is None else {width for width in allowed if width <= limit}
    if not usable:
        raise ValueError(f"no width up to {limit} may be used")
    needed = [width for width in sorted({*_NEEDED, limit}) if width in usable and width <= max(_NEEDED)]
    needed = needed or [min(usable)]
    return needed, [width for width in dict.fromkeys((*_ORDER, limit)) if width in usable and width not in needed]
