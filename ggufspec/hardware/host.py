"""Cores, memory, disk and name of the machine; the only module that imports psutil.

Source for a container's limits: Linux's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
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

_NO_LIMIT = 2**62  # cgroup version 1 reports its largest page-aligned number if there is no limit
BUSY_CPUS = 0.25
"""Other programs disturb a trial if they use this many more CPUs than in the quietest; idle machines vary by 0.15."""

_FAST = 0.8  # minimum share of the fastest core's speed; below are efficiency cores, above are cores that boost less

TOLERATED_CPUS = 0.5
"""CPUs used by other programs at which one thread more and one thread fewer are equally fast (docs/decisions/024)."""


def physical_cores() -> int:
    """Return the number of fast cores that this process may use, within its affinity and its container's quota.

    llama.cpp gains nothing from two threads on one core, and its threads wait for the slowest one.
    """
    cores = _fast_cores() or min(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1, usable_cpus())
    quota = _cgroup_cores(_ROOT)
    return max(1, min(cores, quota) if quota else cores)


def _fast_cores() -> int:
    """Return the number of this process's cores that are about as fast as its fastest one; 0 if unknown.

    Source: Linux's Documentation/ABI/testing/sysfs-devices-system-cpu.
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
    """Time counters in seconds since an arbitrary moment; only differences are meaningful."""

    clock_s: float
    all_s: float  # CPU time of all programs on this process's CPUs, and time stolen by a hypervisor
    own_s: float  # CPU time of this process

    def others_since(self, before: CpuUse) -> float:
        """Return how many CPUs other programs kept busy since ``before``, on average; 0 if no time has passed."""
        passed_s = self.clock_s - before.clock_s
        busy_s = self.all_s - before.all_s - (self.own_s - before.own_s)
        return max(busy_s, 0.0) / passed_s if passed_s > 0 else 0.0


def usable_cpus() -> int:
    """Return the number of logical CPUs that this process may use."""
    return len(_affinity()) or psutil.cpu_count() or 1


def cpu_use() -> CpuUse:
    """Return the CPU time used so far, which the system counts in steps of about 10 ms.

    If the system does not report CPU times (a container without /proc/stat), other programs are assumed to be idle.
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

    ``others`` is the number of logical CPUs that other programs use. With two logical CPUs per core, they can use
    ``cores`` of them without costing a thread.
    """
    return max(1, min(cores, ceil(cpus - others - TOLERATED_CPUS)))


def others_cpus(look_s: float = 0.3) -> float:
    """Return how many CPUs other programs keep busy now, measured for ``look_s`` seconds."""
    before = cpu_use()
    time.sleep(look_s)
    return cpu_use().others_since(before)


def _affinity() -> set[int]:
    """Return the CPUs that this process is bound to; empty if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process so far, mapped model files included."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    for line in _text(_ROOT / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):  # a child's ru_maxrss is at least its parent's (exec_mmap in fs/exec.c)
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process (default: this one), mapped model files included; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def total_memory_bytes() -> int:
    return psutil.virtual_memory().total


def free_memory_bytes() -> int:
    """Return the RAM that this process can use without swapping, within all limits of its container."""
    free = psutil.virtual_memory().available
    allowed = _cgroup_memory_bytes(_ROOT)
    return free if allowed is None else min(free, allowed)


def obtainable_memory_bytes() -> int:
    """Return free RAM plus free swap."""
    return free_memory_bytes() + int(psutil.swap_memory().free)


def free_disk_bytes(path: Path) -> int:
    """Return this user's free disk space at ``path``, which need not exist yet; raise OSError if it is unknown."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def last_cache_bytes() -> int:
    """Return the size of the first CPU's largest cache; 0 if the system does not report it (only Linux does)."""
    sizes = [_text(path) for path in (_ROOT / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size[:-1].isdecimal() and size.endswith("K")), default=0)


def cpu_name() -> str:
    """Return the processor's name as its vendor writes it."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> tuple[str, ...]:
    """Return the processor's features as Linux names them (``avx2``, ``amx_int8``), sorted; empty if unknown.

    Source: Linux's arch/x86/include/asm/cpufeatures.h and arch/arm64/kernel/cpuinfo.c.
    """
    facts = _cpu_facts()
    return tuple(sorted(facts.get("flags", facts.get("Features", "")).split()))


def _cpu_facts() -> dict[str, str]:
    """Return the first CPU's fields in /proc/cpuinfo: arch/x86/kernel/cpu/proc.c, arch/arm64/kernel/cpuinfo.c."""
    facts: dict[str, str] = {}
    for line in _text(_ROOT / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


@dataclass(frozen=True, slots=True)
class Processor:
    """Vendor's numbers for a processor, whose name a hypervisor may shorten ("AMD EPYC"); empty if unknown."""

    vendor: str
    family: str
    model: str
    stepping: str
    vector_sets: tuple[str, ...]  # vector instruction sets, as Linux names them


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
    """Return the tightest CPU quota on this process in whole cores; 0 means no quota."""
    cores = []
    for folder in _cgroups(root, "cpu"):
        whole = _text(folder / "cpu.max") or " ".join(_text(folder / f"cpu.cfs_{of}_us") for of in ("quota", "period"))
        quota, _, period = whole.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 mean no quota
            cores.append(max(1, int(quota) // int(period)))
    return min(cores, default=0)


def _cgroup_memory_bytes(root: Path) -> int | None:
    """Return the memory left within the tightest limit on this process; None without a limit.

    Cached files count as free, as in the kernel's MemAvailable (mm/show_mem.c), because they are dropped on demand.
    """
    left = []
    for folder in _cgroups(root, "memory"):
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
        stat = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
        cached = ("inactive_file", "active_file", "slab_reclaimable")  # in version 1, total_… includes subgroups
        kept = max(0, int(used) - sum(int(stat.get(f"total_{key}", stat.get(key, "0"))) for key in cached))
        limits = (_text(folder / f"memory.{name}") for name in ("max", "high", "limit_in_bytes"))
        left += [max(0, int(limit) - kept) for limit in limits if limit.isdecimal() and int(limit) < _NO_LIMIT]
    return min(left, default=None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders that may limit this process, from its own up to the mount, for both versions.

    In a container, /proc may name the host's path, which does not exist there; the mount itself is then the
    container's cgroup.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        mounts = ("", "unified") if not controllers else (controller,) if controller in controllers.split(",") else ()
        for mount in mounts:  # version 2, perhaps mounted as "unified" next to version 1, or version 1
            folder = root / "sys/fs/cgroup" / mount
            yield from (folder.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _text(path: Path) -> str:
    """Return the file's text, stripped; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
