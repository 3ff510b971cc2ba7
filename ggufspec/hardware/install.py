"""Installation of llama.cpp: which prebuilt llama-cpp-python suits this machine, and the command that repairs it.

Only this module decides both. In a checkout, ``scripts/bootstrap`` builds llama.cpp. Everywhere else pip, or uv if the
environment has no pip, installs a prebuilt llama-cpp-python.

Source: llama-cpp-python 0.3.36, README.md ("Pre-built Wheel") and .github/workflows/build-*.yaml. The wheel indices
could not be reached when this was written, so their names come from the documentation, and their wheels are untested.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.hardware import gpus
from ggufspec.hardware.gpus import GpuSurvey
from ggufspec.schema.doctor import LlamaBuild

IN_CHECKOUT = (Path(__file__).resolve().parents[2] / "scripts" / "bootstrap").is_file()
CHAT_LIBRARY = "ggufspec doctor --chat-library"  # command to compile llama.cpp's chat library with a C++ compiler
_PACKAGE = "llama-cpp-python"
_CMAKE = {"cuda": "-DGGML_CUDA=on", "metal": "-DGGML_METAL=on", "rocm": "-DGGML_HIP=on", "vulkan": "-DGGML_VULKAN=on"}
# Missing libraries, as the loader's error names them, and how to install each.
_SYSTEM_LIBRARIES = {
    "libgomp.so": "sudo apt install libgomp1 (dnf install libgomp)",
    "libvulkan.so": "sudo apt install libvulkan1 (dnf install vulkan-loader)",
    "libamdhip64.so": "install ROCm 7.2: https://rocm.docs.amd.com",
}

Backend = Literal["cuda", "metal", "rocm", "vulkan", "cpu"]

_INDICES = "https://abetlen.github.io/llama-cpp-python/whl"
_CUDA = ((11, 8), (12, 1), (12, 2), (12, 3), (12, 4), (12, 5), (13, 0), (13, 2))
_NOT_ON_WINDOWS = ((12, 1), (12, 2), (12, 3))
# (lowest, highest) compute capability for which wheels of a CUDA major version have code
_CAPABILITIES = {11: ((6, 0), (8, 9)), 12: ((6, 0), (99, 9)), 13: ((7, 5), (99, 9))}
# PyPI packages that wheels for a CUDA major version need. NVIDIA dropped the suffix with CUDA 13.
CUDA_RUNTIME = {
    11: ("nvidia-cuda-runtime-cu11", "nvidia-cublas-cu11"),
    12: ("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"),
    13: ("nvidia-cuda-runtime==13.*", "nvidia-cublas==13.*"),
}
_DOCUMENTED_PYTHON = (3, 12)  # newest Python for which the README promises CUDA and Metal wheels
_X86 = ("x86_64", "AMD64")
_ARM = ("arm64", "aarch64")
_CPU_WHEELS = {"Linux": (*_X86, *_ARM, "riscv64"), "Darwin": _ARM, "Windows": _X86}


@dataclass(frozen=True, slots=True)
class InstallFacts:
    """Facts that decide which wheels fit; ``system`` and ``arch`` are as in :mod:`platform`."""

    system: str
    arch: str
    python: tuple[int, int]
    cuda: tuple[int, int] | None = None  # newest version that NVIDIA's driver supports
    capability: tuple[int, int] | None = None  # lowest compute capability of all GPUs
    amd: bool = False  # an AMD GPU is present
    rocm: bool = False  # AMD's runtime is installed
    vulkan: bool = False  # a Vulkan loader and a GPU for it are present


@dataclass(frozen=True, slots=True)
class Wheels:
    """Prebuilt wheels of llama-cpp-python."""

    backend: Backend
    index: str
    lacks: tuple[str, ...]
    runtime: tuple[str, ...] = ()  # PyPI packages that the wheels need
    python: str = ""  # Python version to request; empty: any


def choose_wheels(facts: InstallFacts) -> Wheels | None:
    """Choose the wheels for a machine; None if none are built, as for an Intel Mac."""
    backend, name = _index(facts)
    if not name:
        return None
    lacks = ["RPC, so there is no --rpc and no worker, and `plan --gpu` only estimates compute buffers"]
    if backend == "cuda":
        lacks += ["AVX2, which their build disables: layers that stay on the CPU may be several times slower"]
        lacks += ["the CUDA runtime, which the nvidia-… packages provide"]
    elif backend == "rocm":
        lacks += ["AVX and AVX2, which their build disables: layers that stay on the CPU are several times slower"]
        lacks += ["ROCm 7.2 itself, which AMD's own packages provide"] if facts.system == "Linux" else []
    elif backend in ("vulkan", "cpu") and facts.arch in _X86:
        lacks += ["AVX-512 and AMX"]
    runtime = CUDA_RUNTIME[int(name[2:-1])] if backend == "cuda" else ()
    documented = backend not in ("cuda", "metal") or facts.python <= _DOCUMENTED_PYTHON
    python = "" if documented else "{}.{}".format(*_DOCUMENTED_PYTHON)
    return Wheels(backend, f"{_INDICES}/{name}", tuple(lacks), runtime, python)


def _index(facts: InstallFacts) -> tuple[Backend, str]:
    """Return the backend and the index's name, which is empty if there are no wheels."""
    if facts.arch in _X86 and facts.system in ("Linux", "Windows"):
        if name := _cuda_index(facts):
            return "cuda", name
        if facts.amd and facts.system == "Windows":
            return "rocm", "hip-radeon"  # these wheels include AMD's libraries
        if facts.amd and facts.rocm:
            return "rocm", "rocm72"
        if facts.vulkan:
            return "vulkan", "vulkan"
    if (facts.system, facts.arch) == ("Darwin", "arm64"):
        return "metal", "metal"
    return "cpu", "cpu" if facts.arch in _CPU_WHEELS.get(facts.system, ()) else ""


def _cuda_index(facts: InstallFacts) -> str:
    """Choose the newest CUDA version that the driver supports and whose wheels have code for the GPU.

    The version is never newer than the driver's. Wheels for a newer minor version would run, but the driver could not
    compile their code for GPUs that are newer than the wheel (CUDA's compatibility guide, "minor version").
    """
    known = [version for version in _CUDA if not (facts.system == "Windows" and version in _NOT_ON_WINDOWS)]
    for version in sorted(known, reverse=True):
        least, most = _CAPABILITIES[version[0]]
        of_card = facts.capability or least
        if facts.cuda and version <= facts.cuda and least <= of_card <= most:
            return "cu{}{}".format(*version)
    return ""


def machine_facts(survey: GpuSurvey, root: Path = Path("/")) -> InstallFacts:
    """Return the facts about this machine; system files are read under ``root``."""
    system = platform.system()
    vendors = [path.read_text().strip() for path in root.glob("sys/class/drm/card*/device/vendor")]
    homes = ("opt/rocm*/lib", "usr/lib/*-linux-gnu", "usr/lib64")
    capabilities = [card.compute_capability for card in survey.cards if card.compute_capability]
    return InstallFacts(
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
    """Return True if the system has one of these libraries."""
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


# ---- what to type ---------------------------------------------------------------------------------------------------


def pip() -> str:
    """Return the command that installs packages in this environment; pipx's environments have pip, but uv's do not."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"


def built(prefix: Path = Path(sys.prefix)) -> LlamaBuild | None:
    """Return the build that scripts/bootstrap recorded, if it created this environment; otherwise None."""
    try:
        stamp = untrusted.read_json(prefix / "bootstrap.json")
        return LlamaBuild(str(stamp.get("cpu", "native")), str(stamp.get("why", "")), str(stamp.get("cmake_args", "")))
    except (GgufspecError, AttributeError):
        return None


def requirement(name: str = _PACKAGE) -> str:
    """Return the requirement for a package with its supported versions, e.g. ``llama-cpp-python<0.4,>=0.3.36``."""
    try:
        needed = importlib.metadata.requires("ggufspec") or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    return next((one for one in needed if re.match(rf"{re.escape(name)}\b", one)), name)


def repair_command(backend: str = "", *, source: bool = False, flags: Sequence[str] = ()) -> str:
    """Return the command that gives this installation a working llama.cpp.

    ``backend`` is e.g. ``cuda`` (default: the best for this machine). ``source`` builds llama.cpp from source
    with CMake ``flags``; only such a build has RPC and uses all of this processor's instructions.
    """
    if IN_CHECKOUT:
        return "scripts/bootstrap" + (f" --backend {backend}" if backend else "")
    wheels = choose_wheels(machine_facts(gpus.survey()))
    return pip_line(None if source else wheels, backend or (wheels.backend if wheels else ""), flags)


def pip_line(wheels: Wheels | None, backend: str = "", flags: Sequence[str] = ()) -> str:
    """Return the command that reinstalls llama-cpp-python, from ``wheels`` or else from source, with a compiler.

    uv accepts these options under pip's names.
    """
    options = ";".join(filter(None, ["-DGGML_RPC=on", _CMAKE.get(backend), *flags]))
    how = f'--no-binary {_PACKAGE} --no-cache-dir -C "cmake.args={options}"'
    if wheels:
        how = f"--extra-index-url {wheels.index} --only-binary {_PACKAGE}"
    packages = (requirement(), *(wheels.runtime if wheels else ()))
    return " ".join([pip(), "--force-reinstall", how, *map(_quoted, packages)])


def prebuilt_line(wheels: Wheels) -> str:
    """Return the command for a prebuilt llama-cpp-python; in a checkout it installs ggufspec as a separate uv tool."""
    if not IN_CHECKOUT:
        return pip_line(wheels)
    python = f" --python {wheels.python}" if wheels.python else ""
    line = f"uv tool install .{python} --index {wheels.index} --no-build-package {_PACKAGE}"
    return " ".join([line, *(f"--with {_quoted(package)}" for package in wheels.runtime)])


def remedy(complaint: str) -> str:
    """Return the command that fixes llama.cpp's libraries when the system's loader reported ``complaint``."""
    found = re.search(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)", complaint)
    if found and (packages := CUDA_RUNTIME.get(int(found[1]))):
        return " ".join([pip(), *map(_quoted, packages)])
    missing = next((line for name, line in _SYSTEM_LIBRARIES.items() if name in complaint), "")
    return missing or repair_command()


def _quoted(requirement: str) -> str:
    """Quote a requirement if necessary, with double quotes, which every shell supports, even on Windows."""
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f'"{requirement}"'
