"""What is installed, what this machine has, and what is wrong with it. Pure: the facts come in, findings go out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ggufspec.hardware.gpus import Gpu, Survey
from ggufspec.reports.sizes import gib

# Bytes a second of one lane: PCI Express base specification, generations 1 to 6, line coding taken off.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_LITTLE_MEMORY_BYTES = 4 * 2**30
_LITTLE_DISK_BYTES = 20 * 10**9
_BUSY_CPUS = 0.5
_BUSY_SHARE = 0.5  # of a card's memory, in others' hands


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
    """llama-cpp-python as it is installed: ``error`` and ``fix`` say why it does not load."""

    version: str | None
    backends: tuple[str, ...] = ()
    devices: tuple[LlamaDevice, ...] = ()
    error: str | None = None
    fix: str = ""


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


@dataclass(frozen=True, slots=True)
class DoctorDocument:
    """``ggufspec/doctor@1``; ``driver`` is NVIDIA's version, None without a driver."""

    ggufspec: str
    python: str
    llama_cpp: LlamaCpp
    machine: Machine
    driver: str | None
    cards: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    schema: str = field(default="ggufspec/doctor@1")

    @property
    def healthy(self) -> bool:
        """Whether nothing is an error."""
        return all(finding.level != "error" for finding in self.findings)


def examine(llama: LlamaCpp, machine: Machine, survey: Survey) -> tuple[Finding, ...]:
    """Everything that was looked at, errors first."""
    found = [*_llama_cpp(llama, survey), *_cards(survey), *_machine(machine)]
    order = ("error", "warning", "ok")
    return tuple(sorted(found, key=lambda finding: order.index(finding.level)))


def _llama_cpp(llama: LlamaCpp, survey: Survey) -> Iterator[Finding]:
    if llama.error is not None:
        yield Finding("error", llama.error, llama.fix or "scripts/bootstrap")
        return
    yield Finding("ok", f"llama.cpp works ({', '.join(llama.backends)})")
    if "RPC" not in llama.backends:
        yield Finding("warning", "llama.cpp was built without RPC: no --rpc and no worker", "scripts/bootstrap")
    gpus = [device for device in llama.devices if device.kind in ("gpu", "igpu")]
    if gpus:
        yield Finding("ok", f"llama.cpp uses {_listed(device.description.strip() for device in gpus)}")
    elif not survey.cards:
        yield Finding("ok", "no GPU: everything runs on the CPU; `ggufspec worker` on another machine lends its own")
    elif "CUDA" in llama.backends:
        yield Finding(
            "error",
            f"llama.cpp has CUDA and sees no card, NVIDIA's driver {survey.driver} sees {_names(survey.cards)}: "
            "the driver is older than the CUDA toolkit, or CUDA_VISIBLE_DEVICES hides the card",
            "unset CUDA_VISIBLE_DEVICES; nvidia-smi",
        )
    else:
        yield Finding(
            "error",
            f"llama.cpp was built without CUDA and leaves {_names(survey.cards)} idle: everything runs on the CPU",
            "scripts/bootstrap --backend cuda",
        )


def _cards(survey: Survey) -> Iterator[Finding]:
    for problem in survey.problems:
        yield Finding("error", f"NVML: {problem}", "nvidia-smi; sudo dmesg | grep -i -e nvrm -e xid; then reboot")
    if survey.driver is not None and not survey.cards and not survey.problems:
        version = f" {survey.driver}" if survey.driver else ""
        yield Finding("warning", f"NVIDIA's driver{version} is loaded and finds no card", "lspci | grep -i nvidia")
    for card in survey.cards:
        if card.total_bytes and card.used_bytes / card.total_bytes > _BUSY_SHARE:
            users = _listed(_process(p.name, p.pid, p.used_bytes) for p in card.processes)
            yield Finding(
                "warning",
                f"card {card.index} ({card.name}): {gib(card.used_bytes)} of {gib(card.total_bytes)} GiB are in use"
                + (f" by {users}" if users else ", by processes that cannot be seen from here"),
                "nvidia-smi",
            )
        yield from _link(card)


def _link(card: Gpu) -> Iterator[Finding]:
    """Whether the slot gives the card less than it can take."""
    if card.pcie_generation is None or card.pcie_width is None:
        return
    best_generation = max(card.pcie_generation, card.pcie_max_generation or 0)
    best_width = max(card.pcie_width, card.pcie_max_width or 0)
    if (card.pcie_generation, card.pcie_width) != (best_generation, best_width):
        yield Finding(
            "warning",
            f"card {card.index} ({card.name}): the slot gives PCIe {_speed(card.pcie_generation, card.pcie_width)}, "
            f"the card can take {_speed(best_generation, best_width)}; prompts are slow when layers stay on the CPU. "
            "Another slot or a setting of the BIOS may help",
            "nvidia-smi -q | grep -A 12 'GPU Link Info'",
        )


def _machine(machine: Machine) -> Iterator[Finding]:
    if machine.free_memory_bytes < _LITTLE_MEMORY_BYTES:
        yield Finding(
            "warning",
            f"only {gib(machine.free_memory_bytes)} GiB of memory can be had (the machine has "
            f"{gib(machine.total_memory_bytes)}): layers that stay on the CPU need more",
            "ps -eo rss,comm --sort=-rss | head",
        )
    if machine.others_cpus > _BUSY_CPUS:
        yield Finding(
            "warning",
            f"other programs keep {machine.others_cpus:.1f} CPUs busy: layers on the CPU run slower than they could, "
            "with as many threads as CPUs are left (with all of them they would wait for each other, and run at a "
            "fifth or less of their speed)",
            "ps -eo pcpu,comm --sort=-pcpu | head",
        )
    if machine.free_disk_bytes < _LITTLE_DISK_BYTES:
        yield Finding(
            "warning",
            f"only {machine.free_disk_bytes / 1e9:.1f} GB are free at {machine.model_folder}, where models are kept",
            "export HF_HOME=/a/larger/disk",
        )
    if machine.hub_is_offline:
        yield Finding("ok", "HF_HUB_OFFLINE is set: nothing is downloaded", "unset HF_HUB_OFFLINE")


def link(card: Gpu) -> str:
    """The link in short, 4.0 ×16 say; empty where the card does not tell."""
    if card.pcie_generation is None or card.pcie_width is None:
        return ""
    return f"{card.pcie_generation}.0 ×{card.pcie_width}"


def _speed(generation: int, width: int) -> str:
    lane = _LANE_BYTES_PER_S.get(generation)
    return f"{generation}.0 ×{width}" + (f" ({lane * width / 1e9:.0f} GB/s)" if lane else "")


def _process(name: str, pid: int, used_bytes: int | None) -> str:
    used = f", {gib(used_bytes)} GiB" if used_bytes is not None else ""
    return f"{name.rpartition('/')[2] or 'process'} ({pid}{used})"


def _names(cards: Iterable[Gpu]) -> str:
    return _listed(card.name for card in cards)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
