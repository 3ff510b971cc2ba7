"""Disturbances of a measurement: other programs on the CPUs or GPUs, reduced clocks, weights read from disk.

Read the system's counters before and after the measurement (:meth:`SystemCounters.now`); :meth:`SystemCounters.since`
returns the disturbances in between. A counter that the system lacks, or hides from a container, counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ggufspec.hardware import gpus, host
from ggufspec.hardware.host import CpuUse

_IO = Path("/proc/self/io")
_LEAST_S = 0.2  # minimum duration to judge CPU use, because the kernel's CPU times have a resolution of 10 ms
_DISK_BYTES = 16 << 20  # disk reads that affect a measurement of half a second


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Disturbances during a measurement.

    Attributes:
        others_cpus: CPUs that other programs and the hypervisor kept busy, on average.
        disk_bytes: bytes that this process read from disk, i.e. weights that were not in memory.
        gpus: one sentence for each GPU whose clocks were reduced or which other programs used.
    """

    others_cpus: float = 0.0
    disk_bytes: int = 0
    gpus: tuple[str, ...] = ()

    def reason(self, threads: int, cpus: int) -> str:
        """Return the disturbance that slowed down ``threads`` threads on ``cpus`` logical CPUs; empty without one."""
        if host.threads_left(threads, cpus, self.others_cpus) < threads:
            return f"other programs used {self.others_cpus:.1f} CPUs"
        if self.disk_bytes > _DISK_BYTES:
            return f"{self.disk_bytes / 1e6:,.0f} MB of weights were read from the disk"
        return next(iter(self.gpus), "")


@dataclass(frozen=True, slots=True)
class SystemCounters:
    """The system's counters at one moment; only differences are meaningful."""

    cpu: CpuUse
    disk_bytes: int

    @classmethod
    def now(cls) -> SystemCounters:
        """Read the counters, which takes a fraction of a millisecond."""
        return cls(host.cpu_use(), _disk_bytes())

    def since(self, before: SystemCounters, *, with_gpus: bool = False) -> Disturbance:
        """Return the disturbances between ``before`` and these counters.

        ``with_gpus`` also asks NVML for the GPUs' current state, which takes a few milliseconds.
        """
        long_enough = self.cpu.clock_s - before.cpu.clock_s >= _LEAST_S
        return Disturbance(
            others_cpus=self.cpu.others_since(before.cpu) if long_enough else 0.0,
            disk_bytes=max(0, self.disk_bytes - before.disk_bytes),
            gpus=gpus.disturbances() if with_gpus else (),
        )


def _disk_bytes() -> int:
    """Return the bytes this process has read from disk, mapped files included; 0 if unknown (only Linux reports them).

    Source: Linux's Documentation/filesystems/proc.rst, 3.3.
    """
    try:
        lines = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0
