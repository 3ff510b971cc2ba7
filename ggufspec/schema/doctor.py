"""The JSON document of ``ggufspec doctor``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``fix`` is what to type, empty where there is nothing to mend."""

    level: Literal["ok", "warning", "error"]
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class LlamaDevice:
    """A device of llama.cpp; ``kind`` is cpu, gpu, igpu or accelerator."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama-cpp-python as it is installed: ``error`` and ``fix`` say why it does not load.

    ``system`` is llama.cpp's own line about what it was built with; ``lacks`` names the function that it has not and a
    kind of head needs, by drafter; ``without_device`` the backends that are compiled in and find no device;
    ``without_chat`` why its chat library cannot be used.
    """

    version: str | None
    backends: tuple[str, ...] = ()
    devices: tuple[LlamaDevice, ...] = ()
    error: str | None = None
    fix: str = ""
    system: str = ""
    lacks: dict[str, str] = field(default_factory=dict)
    without_device: tuple[str, ...] = ()
    without_chat: str = ""


@dataclass(frozen=True, slots=True)
class Build:
    """How ``scripts/bootstrap`` built llama.cpp: its ``--cpu`` and why; ``cmake_args`` are all options."""

    cpu: str
    why: str
    cmake_args: str


@dataclass(frozen=True, slots=True)
class CheckStep:
    """What the self-check was at: ``place`` is host or device, empty before anything is decoded."""

    type: str
    place: str = ""
    flash: str = ""
    batch: int = 0


@dataclass(frozen=True, slots=True)
class CheckRow:
    """What came of a step.

    ``outcome`` is ok, wrong (``error`` is above the limit), the name of the signal that ended the child, silence (it
    hung), or failed.
    """

    step: CheckStep
    error: float | None
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What llama.cpp computed of known models; ``limit`` is the error that is allowed (verify/selfcheck.py)."""

    rows: tuple[CheckRow, ...]
    seconds: float
    limit: float

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """What is not as it should be."""
        return tuple(row for row in self.rows if row.outcome != "ok")


@dataclass(frozen=True, slots=True)
class Machine:
    """The host: ``cores`` and ``free_memory_bytes`` are what this process may use, ``model_folder`` is the cache;
    ``others_cpus`` are CPUs that other programs keep busy.
    """

    cpu: str
    cores: int
    total_memory_bytes: int
    free_memory_bytes: int
    model_folder: str
    free_disk_bytes: int
    hub_is_offline: bool = False
    others_cpus: float = 0.0
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
    """``ggufspec/doctor@1``; ``driver`` is NVIDIA's version, None without a driver.

    ``build`` is None outside a checkout, ``self_check`` where it was left out, ``prebuilt`` where nobody builds wheels
    for such a machine.
    """

    ggufspec: str
    python: str
    llama_cpp: LlamaCpp
    machine: Machine
    driver: str | None
    cards: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    build: Build | None = None
    self_check: SelfCheck | None = None
    prebuilt: Prebuilt | None = None
    schema: str = field(default="ggufspec/doctor@1")

    @property
    def healthy(self) -> bool:
        """Whether nothing is an error."""
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as NVML sees it; None is what the card or its driver does not tell.

    ``pcie_generation`` and ``pcie_width`` are what the link reaches in its slot: the highest generation that both ends
    know (a link at rest runs at a lower one) and the lanes that are connected. ``pcie_max_…`` is the card's own best.
    ``utilisation`` is the share of the last moment in which a kernel ran, 0 to 1. ``throttled`` are the reasons for
    which the clocks are held down at this moment, heat say.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    driver: str
    compute_capability: tuple[int, int] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    pcie_max_width: int | None = None
    utilisation: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has memory on a card; ``name`` is empty where NVML does not know it, in a container say."""

    pid: int
    name: str
    used_bytes: int | None
