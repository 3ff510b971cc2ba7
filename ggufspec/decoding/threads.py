"""Number of CPU threads for llama.cpp while other programs run.

llama.cpp's threads wait for each other after every operation. If another program occupies one of the CPUs, each wait
lasts until the scheduler gives that CPU back, and the speed falls to a fifth or less; one thread fewer, on the free
CPUs, retains most of it (docs/decisions/024). The usage of other programs comes from the system's own counters, at a
fraction of a millisecond twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ggufspec.files.cache import first_today
from ggufspec.hardware import host
from ggufspec.hardware.host import CpuUse, threads_left

_BUSY = "other programs are using the CPUs"
# Beginnings of notes about a busy machine; the latter two are of policy/timing.py
_OF_BUSY = (_BUSY, "batches were timed while ", "the machine was busy while batches were timed")
_FIRST_LOOK_S = 0.15  # the counters' steps are 10 ms
_INTERVAL_S = 0.5
_STALE_S = 2.0  # time between two answers after which the usage is out of date


class Threads:
    """Number of threads, following what other programs use from construction on.

    Args:
        fixed: always use this many threads; 0: follow other programs' use.
        cores: threads on an idle machine.
        cpus: logical CPUs.
        usage, clock, sleep: the system's.

    Attributes:
        cores: threads on an idle machine.
        count: threads now.
        others_cpus: CPUs that other programs used before the last look; 0 before the first.
        lowered: True if there were ever fewer than ``cores``.
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
        """Return the threads to begin with, by what other programs have used since construction."""
        if self._follows:
            self._sleep(max(0.0, self._next - self._clock()))
        self.look()
        self.changed = False
        return self.count

    @property
    def quiet(self) -> bool:
        """True if other programs leave a CPU for each core, as of the last look."""
        return threads_left(self.cores, self._cpus, self.others_cpus) == self.cores

    def resume(self) -> None:
        """Discard an outdated usage; call when an answer begins."""
        if self._clock() > self._next + _STALE_S:
            self._before, self._next = self._usage(), self._clock() + _INTERVAL_S

    def look(self) -> bool:
        """Return True if :attr:`count` changed; call often, it reads the counters twice a second."""
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
        """Sentence for the user if other programs were in the way, else empty."""
        if not self.lowered:
            return ""
        return (
            f"{_BUSY}: llama.cpp gets fewer than {self.cores} threads while they do "
            "(-t sets a number of threads for good)"
        )


def is_busy(note: str) -> bool:
    """Return whether a note is :attr:`Threads.note`."""
    return note.startswith(_BUSY)


def is_due(note: str) -> bool:
    """Return whether to show a note: one of those about a busy machine a day, any other always."""
    return not note.startswith(_OF_BUSY) or first_today(_BUSY)
