"""Disturbances of a measurement: other programs on the CPUs or GPUs, reduced clocks, weights read from the disk.

Read the system's counters before and after (:meth:`Counters.now`); :meth:`Counters.since` returns what happened in
between. A counter that the system lacks, or hides from a container, counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ggufspec.hardware import gpus, host
from ggufspec.hardware.host import CpuUse

_IO = Path("/proc/self/io")
_LEAST_S = 0.2  # minimum duration: the kernel counts CPU time in steps of 10 ms
_DISK_BYTES = 16 << 20  # enough disk reads to show in a measurement of half a second


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Disturbances during a measurement.

    Attributes:
        others_cpus: CPUs that other programs and the hypervisor kept busy, on average.
        disk_bytes: bytes that this process read from the disk: weights that were not in memory.
        gpus: one sentence for each GPU with reduced clocks or other programs at work.
    """

    others_cpus: float = 0.0
    disk_bytes: int = 0
    gpus: tuple[str, ...] = ()

    def reason(self, threads: int, cpus: int) -> str:
        """Return why ``threads`` on ``cpus`` logical CPUs would be faster undisturbed; empty if they would not be."""
        if host.threads_left(threads, cpus, self.others_cpus) < threads:
            return f"other programs used {self.others_cpus:.1f} CPUs"
        if self.disk_bytes > _DISK_BYTES:
            return f"{self.disk_bytes / 1e6:,.0f} MB of weights were read from the disk"
        return next(iter(self.gpus), "")


@dataclass(frozen=True, slots=True)
class Counters:
    """The system's counters at one moment; only differences mean something."""

    cpu: CpuUse
    disk_bytes: int

    @classmethod
    def now(cls) -> Counters:
        """Read the counters; takes a fraction of a millisecond."""
        return cls(host.cpu_use(), _disk_bytes())

    def since(self, before: Counters, *, with_gpus: bool = False) -> Disturbance:
        """Return what happened from ``before`` to these counters.

        ``with_gpus`` also asks NVML for the GPUs' present state, which takes some milliseconds.
        """
        long_enough = self.cpu.clock_s - before.cpu.clock_s >= _LEAST_S
        return Disturbance(
            others_cpus=self.cpu.others_since(before.cpu) if long_enough else 0.0,
            disk_bytes=max(0, self.disk_bytes - before.disk_bytes),
            gpus=gpus.disturbances() if with_gpus else (),
        )


def _disk_bytes() -> int:
    """Return the bytes that this process had read from the disk, mapped files included; 0 if unknown (Linux knows).

    Source: Documentation/filesystems/proc.rst of Linux, 3.3.
    """
    try:
        lines = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0
