"""NVIDIA cards through NVML: who they are and how much of their memory is used. A card that fails costs its own row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as NVML sees it."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    driver: str


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, or None where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: no cards for us
        yield None
        return
    try:
        with suppress(pynvml.NVMLError):  # a driver that is lost on the way ends the list
            yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def gpus() -> list[Gpu]:
    """The cards that answer, in NVML's order; empty without a driver."""
    found = []
    with _nvml() as nvml:
        for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                name, driver = nvml.nvmlDeviceGetName(handle), nvml.nvmlSystemGetDriverVersion()
                found.append(Gpu(index, name, memory.total, memory.used, driver))
            except nvml.NVMLError:
                continue
    return found


def used_bytes() -> int:
    """Memory in use on all cards together, by every process; 0 without a card."""
    return sum(gpu.used_bytes for gpu in gpus())
