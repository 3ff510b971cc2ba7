"""NVIDIA GPUs as NVML reports them: identity, memory and processes. A failing GPU affects only its own entry.

Source: NVIDIA's NVML API reference (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ggufspec.schema.doctor import Gpu, GpuProcess

# nvmlReturn_t errors after which the driver, or the GPU, reports nothing usable. Other errors affect only the requested
# field.
_DRIVER_IS_GONE = (1, 9)  # NVML_ERROR_UNINITIALIZED, _DRIVER_NOT_LOADED
_CARD_IS_GONE = (*_DRIVER_IS_GONE, 15, 16)  # _GPU_IS_LOST, _RESET_REQUIRED
_LIBRARY_NOT_FOUND = 12
# nvmlClocksEventReason… in nvml.h: reasons why a GPU is slower than a minute ago. The power limit is not among them,
# because a GPU under load reaches it in the first second.
_THROTTLING = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by hardware", 0x80: "power brake"}
_OTHERS_SHARE = 0.1  # other programs disturb if they use a larger share of a GPU's time; a desktop uses less
_RECENT_S = 1.0
# Vulkan drivers that run on the CPU: Mesa's, Google's, Microsoft's
_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "basic render driver")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """NVML's report on this machine's GPUs."""

    cards: tuple[Gpu, ...]  # GPUs that respond to queries
    problems: tuple[str, ...]  # problems with the other GPUs or the driver
    driver: str | None  # driver version; None without a driver
    cuda: tuple[int, int] | None = None  # newest CUDA version that the driver supports


def is_software(description: str) -> bool:
    """Return True if the GPU with this description is emulated: it uses host memory, and is slower than the CPU.

    llama.cpp lists such a GPU only if GGML_VK_VISIBLE_DEVICES names it (ggml/src/ggml-vulkan/ggml-vulkan.cpp).
    """
    return any(name in description.lower() for name in _SOFTWARE)


def gpus() -> list[Gpu]:
    """Return the GPUs that respond to queries, in NVML's order; empty without a driver."""
    return list(survey().cards)


def nvml_used_bytes() -> int | None:
    """Return the memory that all processes use on all GPUs; None without GPUs, or if a GPU does not report it."""
    used = [gpu.used_bytes for gpu in gpus()]
    return sum(filter(None, used)) if used and None not in used else None


def of_device(device_id: str, description: str, cards: Iterable[Gpu]) -> Gpu | None:
    """Return NVML's GPU for a ggml device; NVML's order differs, and it lists GPUs that CUDA_VISIBLE_DEVICES hides.

    NVML and ggml report the PCI bus id; ggml adds a suffix if it divides the GPU. A Jetson has only a name in NVML.
    """

    def is_it(card: Gpu) -> bool:
        return device_id.startswith(card.pci_id) if card.pci_id else description in card.name

    return next(filter(is_it, cards), None)


def disturbances() -> tuple[str, ...]:
    """Return a sentence for each GPU whose clocks are reduced or which another program is using now."""
    return _with_nvml(_disturbances, (), lambda _: ())


def _disturbances(nvml: Any) -> tuple[str, ...]:
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _ask(nvml, nvml.nvmlDeviceGetName, handle) or f"NVIDIA card {index}"
            if reasons := _throttled(nvml, handle):
                found.append(f"the clocks of {name} were reduced ({reasons[0]})")
            elif (share := _used_by_others(nvml, handle)) > _OTHERS_SHARE:
                found.append(f"other programs used {share:.0%} of {name}")
    except nvml.NVMLError:  # the GPU or the driver failed
        pass
    return tuple(found)


def _used_by_others(nvml: Any, handle: Any) -> float:
    """Return the share of a GPU's time that other processes used in the last second; 0 if NVML does not report it.

    In a container NVML may report the host's process ids. This process is then not in the list, its own share is
    unknown, and the result is 0, too.
    """
    if os.getpid() not in {process.pid for process in _processes(nvml, handle)}:
        return 0.0
    since_us = int((time.time() - _RECENT_S) * 1e6)
    samples = _ask(nvml, nvml.nvmlDeviceGetProcessUtilization, handle, since_us) or ()
    latest = {sample.pid: sample.smUtil for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
    return float(sum(share for pid, share in latest.items() if pid != os.getpid())) / 100


def energy_j() -> float | None:
    """Return the joules that all GPUs together have used since the driver was loaded; None unless all report it."""
    return _with_nvml(_energy_j, None, lambda _: None)


def _energy_j(nvml: Any) -> float | None:
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        used_mj = [_ask(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]
    except nvml.NVMLError:
        return None
    return None if None in used_mj or not used_mj else sum(used_mj) / 1000


def survey() -> GpuSurvey:
    """Query every GPU; if the driver fails midway, the list contains only the GPUs queried before."""
    said = "the NVIDIA driver does not start"
    return _with_nvml(_survey, GpuSurvey((), (), None), lambda error: GpuSurvey((), (f"{said}: {error}",), None))


def _with_nvml(ask: Callable[[Any], Answer], without: Answer, broken: Callable[[Exception], Answer]) -> Answer:
    """Return the result of ``ask``; ``without`` if NVML is missing, the result of ``broken`` if it does not start."""
    try:
        import pynvml as nvml
    except ImportError:
        return without
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        missing = isinstance(error, OSError) or _code(error) == _LIBRARY_NOT_FOUND
        return without if missing else broken(error)
    try:
        return ask(nvml)
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _survey(nvml: Any) -> GpuSurvey:
    cards: list[Gpu] = []
    problems: list[str] = []
    driver, cuda = "", None
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        if number := _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2):  # 12040 means 12.4: cuDriverGetVersion
            cuda = number // 1000, number % 1000 // 10
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return GpuSurvey((), (f"the NVIDIA driver stopped responding: {error}",), driver, cuda)
    for index in range(count):
        try:
            cards.append(_card(nvml, index, driver))
        except nvml.NVMLError as error:
            if _code(error) in _DRIVER_IS_GONE:
                problems.append(f"the NVIDIA driver stopped responding at card {index} of {count}: {error}")
                break
            problems.append(f"card {index} does not answer: {error}")
    return GpuSurvey(tuple(cards), tuple(problems), driver, cuda)


def _card(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    total, free, used = (memory.total, memory.free, memory.used) if memory and memory.total else (None, None, None)
    pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index=index,
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle) or f"NVIDIA card {index}",
        uuid=_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
        total_bytes=total,
        free_bytes=free,
        used_bytes=used,
        driver=driver,
        compute_capability=_ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
        pcie_generation=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_generation=_ask(nvml, nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, handle),
        pcie_max_width=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        utilisation=None if rates is None else rates.gpu / 100,
        processes=_processes(nvml, handle),
        throttled=_throttled(nvml, handle),
        pci_id=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci else "",
    )


def _throttled(nvml: Any, handle: Any) -> tuple[str, ...]:
    """Return why the clocks are reduced; both names of the query are tried, because driver R535 renamed it."""
    reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:
        reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return tuple(name for bit, name in _THROTTLING.items() if (reasons or 0) & bit)


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Return a GPU's processes, largest first; NVML lists a process twice, with all its memory, if it also draws."""
    used: dict[int, int | None] = {}
    for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(nvml, call, handle) or ():
            used[process.pid] = process.usedGpuMemory
    found = []
    for pid, size in used.items():
        name = _ask(nvml, nvml.nvmlSystemGetProcessName, pid) or ""
        found.append(GpuProcess(pid, name if name.isprintable() else "", size))
    return tuple(sorted(found, key=lambda process: (-(process.used_bytes or 0), process.pid)))


def _ask(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``call``; None if unsupported, forbidden or not text. Raise if the GPU or driver is gone."""
    try:
        return call(*arguments)
    except UnicodeDecodeError:
        return None
    except nvml.NVMLError as error:
        if _code(error) in _CARD_IS_GONE:
            raise
        return None


def _code(error: Exception) -> int | None:
    """Return the nvmlReturn_t of an NVMLError."""
    return getattr(error, "value", None)
