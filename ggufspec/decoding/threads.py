"""Number of CPU threads for llama.cpp while other programs run.

llama.cpp's threads wait for each other after every operation. If another program occupies one of the CPUs, each wait
lasts until the scheduler gives that CPU back, and the speed falls to a fifth or less. With one thread fewer, on the
free CPUs, most of the speed remains (docs/decisions/024). Other programs' CPU use is read from the system's counters
twice a second, which takes a fraction of a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ggufspec.files.cache import first_today
from ggufspec.hardware import host
from ggufspec.hardware.host import CpuUse, threads_left

_BUSY = "other programs are using the CPUs"
# Beginnings of notes about a busy machine; policy/timing.py writes the last two
_OF_BUSY = (_BUSY, "batches were timed while ", "the machine was busy while batches were timed")
_FIRST_LOOK_S = 0.15  # minimum seconds per measurement, because the counters have a resolution of 10 ms
_INTERVAL_S = 0.5
_STALE_S = 2.0  # pause between two answers after which the measured CPU use is out of date


class Threads:
    """Number of threads, adapted to the CPU use of other programs.

    Args:
        fixed: always use this many threads; 0: adapt to other programs.
        cores: threads on an idle machine.
        cpus: logical CPUs.
        usage, clock, sleep: system functions.

    Attributes:
        cores: threads on an idle machine.
        count: current number of threads.
        others_cpus: CPUs that other programs were using when last measured; 0 before the first measurement.
        lowered: True if ``count`` was ever below ``cores``.
        changed: True if ``count`` has changed since :meth:`start`.
    """

    def __init__(
        self,
        fixed: int = 0,
        *,
        cores: int | None = None,
        cpus: int | None = None,
        usage: Callable[[], CpuUse] = host.cpu_use,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._follows = fixed == 0
        self.cores = fixed or cores or host.physical_cores()
        self._cpus = cpus or host.usable_cpus()
        self._usage, self._clock, self._sleep = usage, clock, sleep
        self.count, self.lowered, self.changed = self.cores, False, False
        self.others_cpus = 0.0
        self._next = clock() + _FIRST_LOOK_S
        self._before = usage()

    def start(self) -> int:
        """Return the number of threads to begin with, based on other programs' CPU use since construction."""
        if self._follows:
            self._sleep(max(0.0, self._next - self._clock()))
        self.look()
        self.changed = False
        return self.count

    @property
    def quiet(self) -> bool:
        """True if, when last measured, other programs left enough CPUs free for one thread per core."""
        return threads_left(self.cores, self._cpus, self.others_cpus) == self.cores

    def resume(self) -> None:
        """Discard outdated counters; call after a pause."""
        if self._clock() > self._next + _STALE_S:
            self._before, self._next = self._usage(), self._clock() + _INTERVAL_S

    def begin(self) -> bool:
        """Update :attr:`count` at the beginning of an answer; return True if it changed.

        If the number of threads is lowered, measure again: a program that the user waited for, e.g. a test run, has
        often ended by now, and the prompt may be decoded in one batch before the next regular measurement.
        """
        self.resume()
        if self.count == self.cores:
            return False
        self._before = self._usage()
        self._sleep(_FIRST_LOOK_S)
        return self._look()

    def look(self) -> bool:
        """Update :attr:`count`; return True if it changed. Call often: the counters are read only twice a second."""
        return self._clock() >= self._next and self._look()

    def _look(self) -> bool:
        before, self._before = self._before, self._usage()
        self._next = self._clock() + _INTERVAL_S
        self.others_cpus = self._before.others_since(before)
        count = threads_left(self.cores, self._cpus, self.others_cpus) if self._follows else self.count
        if count < self.cores:
            self.lowered = True
        if count == self.count:
            return False
        self.count, self.changed = count, True
        return True

    @property
    def note(self) -> str:
        """Sentence for the user if other programs' CPU use lowered the number of threads, else empty."""
        if not self.lowered:
            return ""
        return (
            f"{_BUSY}: llama.cpp gets fewer than {self.cores} threads while they do (-t sets a fixed number of threads)"
        )


def is_busy(note: str) -> bool:
    """Return whether a note is :attr:`Threads.note`."""
    return note.startswith(_BUSY)


def is_due(note: str) -> bool:
    """Return whether to show a note: notes about a busy machine once a day, any other note always."""
    return not note.startswith(_OF_BUSY) or first_today(_BUSY)
