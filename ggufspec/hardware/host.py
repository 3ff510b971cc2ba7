"""Cores, memory and name of the machine."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import psutil


def physical_cores() -> int:
    """Cores that this process may use: physical ones, less what affinity or a container's quota takes away.

    llama.cpp gains nothing from two threads on one core.
    """
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = _cgroup_cores()
    return max(1, min(cores, quota) if quota else cores)


def _cgroup_cores() -> int:
    """Whole cores of this process's cgroup-v2 quota; 0 means no quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return 0
    return 0 if quota == "max" else max(1, int(quota) // int(period))


def peak_rss_bytes() -> int:
    """The largest resident memory that this process has had, mapped model files included."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_memory_bytes() -> int:
    """RAM of the machine."""
    return psutil.virtual_memory().total


def cpu_name() -> str:
    """The processor's name as its maker writes it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
