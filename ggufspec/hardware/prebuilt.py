"""Which prebuilt llama-cpp-python serves a machine: the index that has it, what goes with it and what it lacks.

Source: llama-cpp-python 0.3.36, README.md ("Pre-built Wheel") and .github/workflows/build-*.yaml. Those indices could
not be reached from where this was written: their names are documented, the wheels behind them are untried.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ggufspec.hardware.gpus import Survey

Backend = Literal["cuda", "metal", "rocm", "vulkan", "cpu"]

_INDICES = "https://abetlen.github.io/llama-cpp-python/whl"
_CUDA = ((11, 8), (12, 1), (12, 2), (12, 3), (12, 4), (12, 5), (13, 0), (13, 2))
_NOT_ON_WINDOWS = ((12, 1), (12, 2), (12, 3))
# Compute capabilities that the wheels of a CUDA major version have code for: (least, most).
_CAPABILITIES = {11: ((6, 0), (8, 9)), 12: ((6, 0), None), 13: ((7, 5), None)}
# What the CUDA wheels of a major version leave out: packages of PyPI. NVIDIA dropped the suffix with CUDA 13.
CUDA_RUNTIME = {
    11: ("nvidia-cuda-runtime-cu11", "nvidia-cublas-cu11"),
    12: ("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"),
    13: ("nvidia-cuda-runtime==13.*", "nvidia-cublas==13.*"),
}
_DOCUMENTED_PYTHON = (3, 12)  # the newest that the README promises CUDA and Metal wheels for
_X86 = ("x86_64", "AMD64")
_ARM = ("arm64", "aarch64")
_CPU_WHEELS = {"Linux": (*_X86, *_ARM, "riscv64"), "Darwin": _ARM, "Windows": _X86}


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides. ``cuda`` is the newest CUDA that NVIDIA's driver runs, ``capability`` that of the oldest card.

    ``system`` and ``arch`` are :mod:`platform`'s. ``amd`` says that an AMD card is here, ``rocm`` that AMD's runtime is
    installed, ``vulkan`` that there are a loader and a card for it.
    """

    system: str
    arch: str
    python: tuple[int, int]
    cuda: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None
    amd: bool = False
    rocm: bool = False
    vulkan: bool = False


@dataclass(frozen=True, slots=True)
class Wheels:
    """Prebuilt wheels: ``runtime`` are packages of PyPI that they need, ``python`` is one to ask for; empty is any."""

    backend: Backend
    index: str
    lacks: tuple[str, ...]
    runtime: tuple[str, ...] = ()
    python: str = ""


def choose(facts: Facts) -> Wheels | None:
    """The wheels for a machine; None where none are built, as for an Intel Mac."""
    backend, name = _index(facts)
    if not name:
        return None
    lacks = ["RPC: no --rpc and no worker, and `plan --gpu` estimates compute buffers"]
    if backend == "cuda":
        lacks += ["AVX2, which their build switches off: layers that stay on the CPU may be several times slower"]
        lacks += ["the CUDA runtime, which the nvidia-… packages bring"]
    elif backend == "rocm":
        lacks += ["AVX and AVX2, which their build switches off: layers that stay on the CPU are several times slower"]
        lacks += ["ROCm 7.2 itself, which AMD's own packages bring"] if facts.system == "Linux" else []
    elif backend in ("vulkan", "cpu") and facts.arch in _X86:
        lacks += ["AVX-512 and AMX"]
    runtime = CUDA_RUNTIME[int(name[2:-1])] if backend == "cuda" else ()
    documented = backend not in ("cuda", "metal") or facts.python <= _DOCUMENTED_PYTHON
    python = "" if documented else "{}.{}".format(*_DOCUMENTED_PYTHON)
    return Wheels(backend, f"{_INDICES}/{name}", tuple(lacks), runtime, python)


def _index(facts: Facts) -> tuple[Backend, str]:
    """The backend and the index's name; an empty name is no wheel at all."""
    if facts.arch in _X86 and facts.system in ("Linux", "Windows"):
        if name := _cuda_index(facts):
            return "cuda", name
        if facts.amd and facts.system == "Windows":
            return "rocm", "hip-radeon"  # AMD's libraries are inside
        if facts.amd and facts.rocm:
            return "rocm", "rocm72"
        if facts.vulkan:
            return "vulkan", "vulkan"
    if (facts.system, facts.arch) == ("Darwin", "arm64"):
        return "metal", "metal"
    return "cpu", "cpu" if facts.arch in _CPU_WHEELS.get(facts.system, ()) else ""


def _cuda_index(facts: Facts) -> str:
    """The newest CUDA that the driver runs and that has code for the card.

    None newer than the driver's: newer ones of the same major version do run there, but not the code that the driver
    has to compile for cards that are newer than the wheel (CUDA's guide to compatibility, "minor version").
    """
    known = [version for version in _CUDA if not (facts.system == "Windows" and version in _NOT_ON_WINDOWS)]
    for version in sorted(known, reverse=True):
        least, most = _CAPABILITIES[version[0]]
        of_card = facts.capability or least
        if facts.cuda and version <= facts.cuda and least <= of_card and (most is None or of_card <= most):
            return "cu{}{}".format(*version)
    return ""


def facts(survey: Survey, root: Path = Path("/")) -> Facts:
    """Of this machine.

    Args:
        survey: what NVML says.
        root: where the system's own files are.
    """
    system = platform.system()
    vendors = [path.read_text().strip() for path in root.glob("sys/class/drm/card*/device/vendor")]
    homes = ("opt/rocm*/lib", "usr/lib/*-linux-gnu", "usr/lib64")
    capabilities = [card.compute_capability for card in survey.cards if card.compute_capability]
    return Facts(
        system=system,
        arch=platform.machine(),
        python=sys.version_info[:2],
        cuda=survey.cuda if survey.cards else None,
        capability=min(capabilities, default=None),
        amd="0x1002" in vendors or (system == "Windows" and _loads("amdhip64_7.dll", "amdhip64.dll")),
        rocm=any(any(root.glob(f"{home}/libamdhip64.so.7*")) for home in homes),
        vulkan=_loads("vulkan-1.dll")
        if system == "Windows"
        else any(root.glob("dev/dri/renderD*")) and _loads("libvulkan.so.1"),
    )


def _loads(*names: str) -> bool:
    """Whether the system has one of these libraries."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
