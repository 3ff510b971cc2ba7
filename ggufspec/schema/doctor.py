"""The JSON document of ``ggufspec doctor``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; ``fix`` is the command that fixes it, if necessary."""

    level: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class LlamaDevice:
    """A device of llama.cpp."""

    name: str
    description: str
    kind: str  # cpu, gpu, igpu, accelerator or meta
    free_bytes: int
    total_bytes: int
    device_id: str = ""  # identifies the GPU in every backend: its PCI bus id, as in 0000:c1:00.0


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """The installed llama-cpp-python."""

    version: str | None
    backends: tuple[str, ...] = ()
    devices: tuple[LlamaDevice, ...] = ()
    error: str | None = None  # why it does not load
    fix: str = ""
    system: str = ""  # llama.cpp's own line about its build
    lacks: dict[str, str] = field(default_factory=dict)  # by drafter, the function that is missing for its kind of head
    without_device: tuple[str, ...] = ()  # compiled-in backends that find no device
    without_chat: str = ""  # why its chat library cannot be used


@dataclass(frozen=True, slots=True)
class Build:
    """Build of llama.cpp by ``scripts/bootstrap``: its ``--cpu`` and why; ``cmake_args`` are all options."""

    cpu: str
    why: str
    cmake_args: str


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A step of the self-check."""

    type: str
    place: str = ""  # host or device; empty before anything is decoded
    flash: str = ""
    batch: int = 0


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Result of a step."""

    step: CheckStep
    error: float | None
    outcome: str  # ok, wrong (above the limit), the name of the signal that ended the child, silence (it hung), failed
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Results of llama.cpp on known models."""

    rows: tuple[CheckRow, ...]
    seconds: float
    limit: float  # allowed error (verify/selfcheck.py)

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.outcome != "ok")


@dataclass(frozen=True, slots=True)
class Machine:
    """The host."""

    cpu: str
    cores: int  # cores that this process may use
    total_memory_bytes: int
    free_memory_bytes: int  # RAM that this process may use
    model_folder: str  # the cache
    free_disk_bytes: int
    hub_is_offline: bool = False
    others_cpus: float = 0.0  # CPUs that other programs keep busy
    cpu_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """The llama-cpp-python that installs without a compiler on this machine, and what it lacks."""

    backend: str
    index: str
    command: str
    lacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DoctorDocument:
    """``ggufspec/doctor@1``."""

    ggufspec: str
    python: str
    llama_cpp: LlamaCpp
    machine: Machine
    driver: str | None  # NVIDIA's version; None without a driver
    cards: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    build: Build | None = None  # None outside a checkout
    self_check: SelfCheck | None = None  # None if it was skipped
    prebuilt: Prebuilt | None = None  # None if there are no wheels for such a machine
    schema: str = field(default="ggufspec/doctor@1")

    @property
    def healthy(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML sees it; None is what the GPU or its driver does not report.

    ``pcie_generation`` and ``pcie_width`` are the link's best in its slot: the highest generation that both ends
    support (a link at rest runs at a lower one) and the connected lanes. ``pcie_max_…`` is the GPU's own best.
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
    utilisation: float | None = None  # share of the last moment in which a kernel ran, 0 to 1
    processes: tuple[GpuProcess, ...] = ()
    throttled: tuple[str, ...] = ()  # why clocks are reduced now, e.g. heat
    pci_id: str = ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has memory on a GPU."""

    pid: int
    name: str  # empty if NVML does not know it, e.g. in a container
    used_bytes: int | None
