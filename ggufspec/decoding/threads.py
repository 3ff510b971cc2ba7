"""How many CPU threads llama.cpp gets while other programs run.

llama.cpp's threads wait for each other after every operation. Where another program holds one of the CPUs, each wait
lasts until the scheduler gives that CPU back, and the speed falls to a fifth or less; a thread fewer, on the CPUs that
are left, keeps most of it (docs/decisions/024). What the others use is read from the system's own counters, which
costs a fraction of a millisecond twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ggufspec.hardware import host
from ggufspec.hardware.host import CpuUse, threads_left

_FIRST_LOOK_S = 0.15  # the counters' steps are 10 ms
_INTERVAL_S = 0.5
_STALE_S = 2.0  # between two answers: what was used then is out of date


class Threads:
    """Follows what other programs use, from the moment it is made.

    Args:
        fixed: so many threads whatever else runs; 0 follows.
        cores: threads on an idle machine.
        cpus: logical CPUs.
        usage, clock, sleep: the system's.

    Attributes:
        cores: threads on an idle machine.
        count: threads now.
        others_cpus: CPUs that other programs used before the last look; 0 before the first.
        lowered: whether there were ever fewer than ``cores``.
        changed: whether ``count`` has changed since :meth:`start`.
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
        """Threads to begin with, by what the others have used since this was made."""
        if self._follows:
            self._sleep(max(0.0, self._next - self._clock()))
        self.look()
        self.changed = False
        return self.count

    @property
    def quiet(self) -> bool:
        """Whether other programs leave a CPU for each core, as far as the last look saw."""
        return threads_left(self.cores, self._cpus, self.others_cpus) == self.cores

    def resume(self) -> None:
        """To be called when an answer begins: what was used since the one before is out of date."""
        if self._clock() > self._next + _STALE_S:
            self._before, self._next = self._usage(), self._clock() + _INTERVAL_S

    def look(self) -> bool:
        """Whether :attr:`count` is another than before; to be called often, it reads the counters twice a second."""
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
        """A sentence for the user where others were in the way, else empty."""
        if not self.lowered:
            return ""
        return (
            f"other programs are using the CPUs: llama.cpp gets fewer than {self.cores} threads while they do "
            "(-t sets a number of threads for good)"
        )
