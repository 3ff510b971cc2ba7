"""Cores, memory, disk and name of the machine; the only importer of psutil.

Source for a container's limits: Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import psutil

_ROOT = Path("/")
_VECTOR_SETS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "sve")  # prefixes of CPU flags

_NO_LIMIT = 2**62  # cgroup version 1 writes its highest number of whole pages for no limit
BUSY_CPUS = 0.25
"""CPUs in others' hands, above the quietest time, that disturb a measurement; idle machines vary by 0.15."""

_FAST = 0.8  # share of the fastest core's speed: slower ones are efficiency cores, others merely boost less

TOLERATED_CPUS = 0.5
"""CPUs in others' hands at which one thread more and one fewer are equally fast (docs/decisions/024)."""


def physical_cores() -> int:
    """Return the cores that this process may use: fast ones, within its affinity and its container's quota.

    llama.cpp gains nothing from two threads on one core, and its threads wait for the slowest.
    """
    cores = _fast_cores() or min(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1, usable_cpus())
    quota = _cgroup_cores(_ROOT)
    return max(1, min(cores, quota) if quota else cores)


def _fast_cores() -> int:
    """Count this process's cores that are about as fast as the fastest; 0 if unknown.

    Source: Documentation/ABI/testing/sysfs-devices-system-cpu of Linux.
    """
    speeds: dict[str, int] = {}
    for cpu in _affinity():
        folder = _ROOT / f"sys/devices/system/cpu/cpu{cpu}"
        speed = _text(folder / "cpu_capacity") or _text(folder / "cpufreq/cpuinfo_max_freq")
        if not speed.isdecimal():
            return 0
        speeds[_text(folder / "topology/thread_siblings_list") or str(cpu)] = int(speed)
    return sum(speed >= _FAST * max(speeds.values()) for speed in speeds.values())


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds since some moment in the past; only differences are meaningful."""

    clock_s: float
    all_s: float  # CPU time of all programs on the CPUs of this process, and what a hypervisor took
    own_s: float  # CPU time of this process

    def others_since(self, before: CpuUse) -> float:
        """Return the CPUs that other programs kept busy since ``before``, on average; 0 if no time has passed."""
        passed_s = self.clock_s - before.clock_s
        busy_s = self.all_s - before.all_s - (self.own_s - before.own_s)
        return max(busy_s, 0.0) / passed_s if passed_s > 0 else 0.0


def usable_cpus() -> int:
    """Return the number of logical CPUs that this process may use."""
    return len(_affinity()) or psutil.cpu_count() or 1


def cpu_use() -> CpuUse:
    """Return how busy the CPUs have been; the system counts in steps of about 10 ms.

    If the system does not report it (a container without /proc/stat), others use nothing.
    """
    allowed = _affinity()
    try:
        per_cpu = psutil.cpu_times(percpu=True)
    except (OSError, psutil.Error):
        return CpuUse(time.monotonic(), own_s := time.process_time(), own_s)
    if allowed and max(allowed) < len(per_cpu):
        per_cpu = [per_cpu[cpu] for cpu in allowed]
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    all_s = sum(getattr(cpu, part, 0.0) for cpu in per_cpu for part in busy)
    return CpuUse(time.monotonic(), all_s, time.process_time())


def threads_left(cores: int, cpus: int, others: float) -> int:
    """Return how many threads get a CPU of their own; ``cores`` on an idle machine.

    ``others`` of the logical CPUs are busy; if cores have two CPUs each, these fit next to ``cores`` threads.
    """
    return max(1, min(cores, ceil(cpus - others - TOLERATED_CPUS)))


def others_cpus(look_s: float = 0.3) -> float:
    """Return the CPUs that other programs keep busy now, measured for ``look_s`` seconds."""
    before = cpu_use()
    time.sleep(look_s)
    return cpu_use().others_since(before)


def _affinity() -> set[int]:
    """Return the CPUs that this process is bound to; empty if the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far, mapped model files included."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    for line in _text(_ROOT / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):  # ru_maxrss of a child is never below its parent's: fs/exec.c, exec_mmap
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of this process or another one, mapped model files included; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def total_memory_bytes() -> int:
    return psutil.virtual_memory().total


def free_memory_bytes() -> int:
    """Return the RAM that this process can get without swapping, within all limits of its container."""
    free = psutil.virtual_memory().available
    allowed = _cgroup_memory_bytes(_ROOT)
    return free if allowed is None else min(free, allowed)


def obtainable_memory_bytes() -> int:
    """Return free RAM plus free swap."""
    return free_memory_bytes() + int(psutil.swap_memory().free)


def free_disk_bytes(path: Path) -> int:
    """Return the free space for this user on the disk of ``path`` or of its nearest parent; OSError if unknown."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def last_cache_bytes() -> int:
    """Return the largest cache of the first CPU; 0 if the system does not report it (Linux does)."""
    sizes = [_text(path) for path in (_ROOT / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size[:-1].isdecimal() and size.endswith("K")), default=0)


def cpu_name() -> str:
    """Return the processor's name as its maker writes it."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> tuple[str, ...]:
    """Return the processor's features in Linux's words (``avx2``, ``amx_int8``, ``asimddp``), sorted; empty if unknown.

    Source: arch/x86/include/asm/cpufeatures.h and arch/arm64/kernel/cpuinfo.c of Linux.
    """
    facts = _cpu_facts()
    return tuple(sorted(facts.get("flags", facts.get("Features", "")).split()))


def _cpu_facts() -> dict[str, str]:
    """Return the first processor's fields: arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c of Linux."""
    facts: dict[str, str] = {}
    for line in _text(_ROOT / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor by its maker's numbers, because a hypervisor may shorten its name ("AMD EPYC"); empty if unknown."""

    vendor: str
    family: str
    model: str
    stepping: str
    vector_sets: tuple[str, ...]  # vector instructions in Linux's words


def processor() -> Processor:
    facts = _cpu_facts()
    names = (
        ("vendor_id", "CPU implementer"),
        ("cpu family", "CPU architecture"),
        ("model", "CPU part"),
        ("stepping", "CPU revision"),
    )
    vendor, family, model, stepping = (facts.get(x86, facts.get(arm, "")) for x86, arm in names)
    vector_sets = tuple(flag for flag in cpu_flags() if flag.startswith(_VECTOR_SETS))
    return Processor(vendor, family, model, stepping, vector_sets)


def _cgroup_cores(root: Path) -> int:
    """Return the whole cores of the narrowest CPU quota above this process; 0 means no quota."""
    cores = []
    for folder in _cgroups(root, "cpu"):
        whole = _text(folder / "cpu.max") or " ".join(_text(folder / f"cpu.cfs_{of}_us") for of in ("quota", "period"))
        quota, _, period = whole.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are no quota
            cores.append(max(1, int(quota) // int(period)))
    return min(cores, default=0)


def _cgroup_memory_bytes(root: Path) -> int | None:
    """Return the memory left within the narrowest limit above this process; None without a limit.

    Cached files count as free, as in the kernel's own MemAvailable (mm/show_mem.c): they are dropped on demand.
    """
    left = []
    for folder in _cgroups(root, "memory"):
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
        stat = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
        cached = ("inactive_file", "active_file", "slab_reclaimable")  # in version 1, total_… includes the groups below
        kept = max(0, int(used) - sum(int(stat.get(f"total_{key}", stat.get(key, "0"))) for key in cached))
        limits = (_text(folder / f"memory.{name}") for name in ("max", "high", "limit_in_bytes"))
        left += [max(0, int(limit) - kept) for limit in limits if limit.isdecimal() and int(limit) < _NO_LIMIT]
    return min(left, default=None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders that may limit this process, its own first, the mount's last, in both versions.

    In a container the path may be the host's, which does not exist there; then the mount itself is the container's
    group.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        mounts = ("", "unified") if not controllers else (controller,) if controller in controllers.split(",") else ()
        for mount in mounts:  # version 2, mounted as "unified" next to version 1; or version 1
            folder = root / "sys/fs/cgroup" / mount
            yield from (folder.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _text(path: Path) -> str:
    """Return the file's text, stripped; empty without a file."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
