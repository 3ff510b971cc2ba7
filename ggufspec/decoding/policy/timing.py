"""Measurement of a model's seconds per batch. It takes a fraction of a second and detects a busy machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ggufspec.hardware import host
from ggufspec.hardware.disturbance import SystemCounters
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context

# Text for the timed batches. In a mixture of experts, neighbouring tokens of a real text share experts; random tokens
# from the whole vocabulary would read more experts than verification does.
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
_NEEDED = (1, 2, 4, 8)  # batch sizes that are always timed
_WIDE = 16  # size that may be far faster than smaller sizes suggest; if not timed with the others, it is timed last
_WIDE_PATIENCE = 3  # size 16 is timed only if all timings then take at most this multiple of the budget
_ORDER = (3, 5, 16, 6, 12, 32, 24, 7, 10, 64, 14, 20, 48, 128, 96, 192, 256)  # other sizes, most informative first
CHECKED = 2  # number of batches in a spot check; the fastest counts
_AGREE = 1.25  # maximum ratio of two undisturbed timings of a size
_TRIES = 3  # maximum number of further timings per visit if a size's timings disagree
_SLOW = 1 / 8  # a size that takes more than this share of the budget is timed only once at first
_VISITS = 3  # maximum number of visits to a size, if the budget allows
_PATIENCE = 2  # multiple of the budget after which nothing is timed again
_TOO_FAST = 0.6  # a size's timings are suspect if a batch twice as large takes less than this share of its time
_TOO_SLOW = 1.5  # maximum undisturbed time, as a multiple of the time for as many tokens in smaller batches


class StoppedError(Exception):
    """A measurement was stopped; the KV cache is left as it was."""


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    points: dict[int, float]  # seconds by batch size
    switch_s: float  # extra seconds when the batch size changes; 0 if below noise
    trusted: bool  # True if the timings of every size agreed and no disturbance was detected
    note: str = ""  # a sentence for the user if the timings are not trusted


def time_batch_sizes(
    model: Context | Head,
    clock: Callable[[], float],
    *,
    limit: int,
    budget_s: float = 0.5,
    allowed: Collection[int] | None = None,
    outputs: int | None = None,
    op_offload_min_batch: int = 0,
    counters: Callable[[], SystemCounters] = SystemCounters.now,
    with_gpus: bool = False,
    goes_on: Callable[[], bool] = lambda: True,
) -> MeasuredLatency:
    """Time batches of several sizes after the text in the cache, and leave the cache as it was.

    Each size is decoded once to build its graph and twice to be timed, and again later if the budget allows. A slow
    size is first decoded only once, because its graph hardly matters. It is timed again after the other sizes, because
    a single timing is too often 50 % longer than the next. Contradictory timings are repeated, and the shortest counts,
    because other programs only ever add time.

    Among the ``allowed`` sizes (None: all) up to ``limit``, 1, 2, 4 and 8 are timed even if they take more than
    ``budget_s``, and 16 if it fits in three times ``budget_s``. In batches of ``op_offload_min_batch`` tokens or more a
    GPU computes with copies of CPU weights; this size is timed, too, because smaller sizes do not predict it. A batch
    has at most ``outputs`` rows of logits; None: one per token, as in verification. ``counters`` detect disturbances,
    on the GPUs only if ``with_gpus``. ``goes_on`` is called before every batch.

    Raises:
        ValueError: no batch size is allowed.
        StoppedError: ``goes_on`` returned False.
    """
    needed, others = _batch_sizes(min(limit, max(model.capacity - model.length, 1)), allowed)
    text = model.model.sample_tokens(_TEXT)
    before: SystemCounters | None = None

    def once(batch_size: int) -> float:
        nonlocal before
        if not goes_on():
            raise StoppedError
        seconds = _once(model, clock, text, batch_size, outputs)
        before = before or counters()  # read after the first batch, which may load weights from the disk
        return seconds

    timer = _Timer(once, clock, budget_s)
    for batch_size in needed:
        timer.visit(batch_size)
    for batch_size in others:
        if timer.spent_s + 3 * timer.widest_s <= budget_s / 2:
            timer.visit(batch_size)
    for _ in range(_VISITS - 1):  # visit sizes again later, when a disturbance may be over
        for batch_size, taken in timer.timings.items():
            if timer.spent_s + 3 * min(taken) <= budget_s:
                timer.visit(batch_size)
    for batch_size in reversed(needed):
        if len(timer.timings[batch_size]) < 2 and timer.spent_s <= _PATIENCE * budget_s:
            timer.again(batch_size)
    for batch_size in timer.suspects():
        if timer.spent_s <= _PATIENCE * budget_s:
            timer.visit(batch_size)
    if _WIDE in others and _WIDE not in timer.timings:
        for _ in range(2):
            guess_s = timer.widest_s * _WIDE / max(timer.timings)  # extrapolated from the largest size timed
            if timer.spent_s + guess_s <= _WIDE_PATIENCE * budget_s:
                timer.again(_WIDE)
    if op_offload_min_batch in others and op_offload_min_batch not in timer.timings:
        timer.once(op_offload_min_batch)  # the first batch allocates the GPU's buffers
        timer.again(op_offload_min_batch)
    measured = timer.result()
    assert before is not None
    reason = counters().since(before, with_gpus=with_gpus).reason(host.physical_cores(), host.usable_cpus())
    if not reason:
        return measured
    return replace(
        measured, trusted=False, note=f"batches were timed while {reason}: drafting begins with a rough estimate"
    )


def spot_check(model: Context | Head, clock: Callable[[], float], batch_size: int, outputs: int | None = None) -> float:
    """Time two batches of one size; return the shorter time in seconds. The cache is left as it was."""
    text = model.model.sample_tokens(_TEXT)
    return min(_once(model, clock, text, batch_size, outputs) for _ in range(CHECKED))


def _once(
    model: Context | Head, clock: Callable[[], float], text: Sequence[int], batch_size: int, outputs: int | None
) -> float:
    tokens = [text[i % len(text)] for i in range(batch_size)]
    return time_batch(model, clock, tokens, batch_size if outputs is None else min(batch_size, outputs))


def time_token(model: Context | Head, clock: Callable[[], float], tokens: Sequence[int]) -> float:
    """Time several one-token batches; return the shortest time in seconds. The cache is left as it was."""
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
    """Timings of each batch size, with detection of disturbances."""

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

    def visit(self, batch_size: int) -> None:
        first = self.once(batch_size)
        if first > _SLOW * self.budget_s and self.timings and batch_size not in self.timings:
            self.timings[batch_size] = [first]
            return
        known = self.timings.setdefault(batch_size, [])
        self.switches.append((batch_size, first))
        known += (self.once(batch_size), self.once(batch_size))
        for _ in range(_TRIES):
            if not _agree(known) and self.spent_s <= _PATIENCE * self.budget_s:
                known.append(self.once(batch_size))

    def again(self, batch_size: int) -> None:
        self.timings.setdefault(batch_size, []).append(self.once(batch_size))

    def suspects(self) -> list[int]:
        """Return the sizes whose timings contradict each other, or the timings of other sizes."""
        shortest = {batch_size: min(taken) for batch_size, taken in self.timings.items()}
        return [
            batch_size
            for batch_size, seconds in shortest.items()
            if not _agree(self.timings[batch_size])
            or shortest.get(2 * batch_size, seconds) < _TOO_FAST * seconds
            or seconds > _TOO_SLOW * (self._bound(batch_size) or seconds)
        ]

    def result(self) -> MeasuredLatency:
        """Return the shortest times, and whether they can be trusted."""
        points = {batch_size: min(taken) for batch_size, taken in sorted(self.timings.items())}
        bounds = {batch_size: self._bound(batch_size) or seconds for batch_size, seconds in points.items()}
        disturbed = [
            batch_size
            for batch_size, seconds in points.items()
            if not _agree(self.timings[batch_size]) or seconds > _TOO_SLOW * bounds[batch_size]
        ]
        switches = sorted(first - points[batch_size] for batch_size, first in self.switches) or [0.0]
        switch_s = min(max(switches[len(switches) // 4], 0.0), min(points.values()))
        if not disturbed:
            return MeasuredLatency(points, switch_s, True)
        batch_size = max(
            disturbed,
            key=lambda batch_size: max(self.timings[batch_size]) / min(points[batch_size], bounds[batch_size]),
        )
        note = (
            f"the machine was busy while batches were timed (one of {batch_size} took up to "
            f"{max(self.timings[batch_size]) * 1e3:.3g} ms): the first rounds use a rough estimate"
        )
        # Drop points that must be too slow. If a size then looks faster than it is, it will be used and thereby timed.
        points = {batch_size: seconds for batch_size, seconds in points.items() if seconds <= bounds[batch_size]}
        return MeasuredLatency(points, switch_s, False, note)

    def _bound(self, batch_size: int) -> float | None:
        """Return the shortest time for as many tokens in smaller batches; None if no smaller size was timed."""
        return min(
            (-(-batch_size // narrow) * min(taken) for narrow, taken in self.timings.items() if narrow < batch_size),
            default=None,
        )


def _agree(timings: Sequence[float]) -> bool:
    """Return True if the two shortest timings are close, or if there is only one."""
    return len(timings) < 2 or sorted(timings)[1] <= _AGREE * min(timings)


def _batch_sizes(limit: int, allowed: Collection[int] | None) -> tuple[list[int], list[int]]:
    """Return the sizes to time in any case, and those to time if the budget allows, most informative first."""
    usable = (
        set(range(1, limit + 1)) if allowed is None else {batch_size for batch_size in allowed if batch_size <= limit}
    )
    if not usable:
        raise ValueError(f"no batch size up to {limit} may be used")
    needed = [
        batch_size for batch_size in sorted({*_NEEDED, limit}) if batch_size in usable and batch_size <= max(_NEEDED)
    ]
    needed = needed or [min(usable)]
    return needed, [
        batch_size
        for batch_size in dict.fromkeys((*_ORDER, limit))
        if batch_size in usable and batch_size not in needed
    ]
