"""JSON document of ``ggufspec doctor``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; ``fix`` is the command that solves a problem, if any."""

    level: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class LlamaDevice:
    """Device that llama.cpp finds."""

    name: str
    description: str
    kind: str  # kind of device: cpu, gpu, igpu, accelerator or meta
    free_bytes: int
    total_bytes: int
    device_id: str = ""  # PCI bus id, such as 0000:c1:00.0, which is the same in every backend


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Installed llama-cpp-python, or the reason why it is missing."""

    version: str | None
    backends: tuple[str, ...] = ()
    devices: tuple[LlamaDevice, ...] = ()
    error: str | None = None  # reason why the library cannot be loaded
    fix: str = ""
    system: str = ""  # llama.cpp's own description of its build
    lacks: dict[str, str] = field(default_factory=dict)  # by drafter, the missing function that its head needs
    without_device: tuple[str, ...] = ()  # compiled-in backends that find no device
    without_chat: str = ""  # reason why llama.cpp's chat library cannot be used


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """Build of llama.cpp by ``scripts/bootstrap``: its ``--cpu`` value, the reason for it, and all CMake options."""

    cpu: str
    why: str
    cmake_args: str


@dataclass(frozen=True, slots=True)
class CheckStep:
    """Step of the self-check."""

    type: str
    place: str = ""  # where the model runs, host or device; empty before anything is decoded
    flash: str = ""
    batch: int = 0


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Result of a step in the self-check."""

    step: CheckStep
    error: float | None
    outcome: str  # ok, wrong (error above the limit), failed, silence (child hung), or the signal that ended the child
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Results of checking llama.cpp with models whose outputs are known."""

    rows: tuple[CheckRow, ...]
    seconds: float
    limit: float  # maximum permitted error (verify/selfcheck.py)

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.outcome != "ok")


@dataclass(frozen=True, slots=True)
class HostMachine:
    """Host machine and the resources that are available on it."""

    cpu: str
    cores: int  # number of cores that this process may use
    total_memory_bytes: int
    free_memory_bytes: int  # RAM that this process may use
    model_folder: str  # folder of the model cache
    free_disk_bytes: int
    hub_is_offline: bool = False
    others_cpus: float = 0.0  # number of CPUs that other programs keep busy
    cpu_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """Build of llama-cpp-python that can be installed on this machine without a compiler, and what it lacks."""

    backend: str
    index: str
    command: str
    lacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DoctorDocument:
    """Document ``ggufspec/doctor@1``."""

    ggufspec: str
    python: str
    llama_cpp: LlamaCpp
    machine: HostMachine
    driver: str | None  # NVIDIA driver version; None without a driver
    cards: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    build: LlamaBuild | None = None  # build by scripts/bootstrap; None outside a checkout
    self_check: SelfCheck | None = None  # None if the self-check was skipped
    prebuilt: Prebuilt | None = None  # None if no wheels are published for this kind of machine
    schema: str = field(default="ggufspec/doctor@1")

    @property
    def healthy(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU as NVML sees it; values that the GPU or its driver does not report are None.

    ``pcie_generation`` and ``pcie_width`` describe the best link in this slot: the highest generation that both ends
    support (an idle link uses a lower one) and the number of connected lanes. ``pcie_max_…`` is the GPU's own maximum.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    driver: str
    compute_capability: tuple[int, int] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    pcie_max_width: int | None = None
    utilisation: float | None = None  # share of the last sampling period in which a kernel ran, 0 to 1
    processes: tuple[GpuProcess, ...] = ()
    throttled: tuple[str, ...] = ()  # reasons why clocks are reduced now, e.g. heat
    pci_id: str = ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Process that uses GPU memory."""

    pid: int
    name: str  # empty if NVML cannot tell, e.g. in a container
    used_bytes: int | None
