"""Install llama.cpp here: which prebuilt llama-cpp-python suits this machine, and what to type to repair it.

This is the only place that knows: a checkout is repaired by ``scripts/bootstrap``, which builds llama.cpp; everything
else by pip, or uv if an environment has no pip, and a prebuilt llama-cpp-python.

Source: llama-cpp-python 0.3.36, README.md ("Pre-built Wheel") and .github/workflows/build-*.yaml. Those indices could
not be reached when this was written: their names are documented, the wheels in them are untried.
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
from ggufspec.hardware.gpus import Survey
from ggufspec.schema.doctor import Build

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
# Compute capabilities that the wheels of a CUDA major version have code for: (lowest, highest)
_CAPABILITIES = {11: ((6, 0), (8, 9)), 12: ((6, 0), (99, 9)), 13: ((7, 5), (99, 9))}
# Packages of PyPI that the CUDA wheels of a major version need. NVIDIA dropped the suffix with CUDA 13.
CUDA_RUNTIME = {
    11: ("nvidia-cuda-runtime-cu11", "nvidia-cublas-cu11"),
    12: ("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"),
    13: ("nvidia-cuda-runtime==13.*", "nvidia-cublas==13.*"),
}
_DOCUMENTED_PYTHON = (3, 12)  # newest that the README promises CUDA and Metal wheels for
_X86 = ("x86_64", "AMD64")
_ARM = ("arm64", "aarch64")
_CPU_WHEELS = {"Linux": (*_X86, *_ARM, "riscv64"), "Darwin": _ARM, "Windows": _X86}


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that decide; ``system`` and ``arch`` are :mod:`platform`'s."""

    system: str
    arch: str
    python: tuple[int, int]
    cuda: tuple[int, int] | None = None  # newest that NVIDIA's driver runs
    capability: tuple[int, int] | None = None  # oldest GPU's
    amd: bool = False  # an AMD GPU is present
    rocm: bool = False  # AMD's runtime is installed
    vulkan: bool = False  # a Vulkan loader and a GPU for it are present


@dataclass(frozen=True, slots=True)
class Wheels:
    """Prebuilt wheels."""

    backend: Backend
    index: str
    lacks: tuple[str, ...]
    runtime: tuple[str, ...] = ()  # packages of PyPI that they need
    python: str = ""  # version to request; empty: any


def choose_wheels(facts: Facts) -> Wheels | None:
    """Choose the wheels for a machine; None if none are built, as for an Intel Mac."""
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
    """Return the backend and the index's name; an empty name means no wheel at all."""
    if facts.arch in _X86 and facts.system in ("Linux", "Windows"):
        if name := _cuda_index(facts):
            return "cuda", name
        if facts.amd and facts.system == "Windows":
            return "rocm", "hip-radeon"  # AMD's libraries are included
        if facts.amd and facts.rocm:
            return "rocm", "rocm72"
        if facts.vulkan:
            return "vulkan", "vulkan"
    if (facts.system, facts.arch) == ("Darwin", "arm64"):
        return "metal", "metal"
    return "cpu", "cpu" if facts.arch in _CPU_WHEELS.get(facts.system, ()) else ""


def _cuda_index(facts: Facts) -> str:
    """Choose the newest CUDA that the driver runs and that has code for the GPU.

    Never newer than the driver's: newer ones of the same major version do run, but not the code that the driver has to
    compile for GPUs newer than the wheel (CUDA's guide to compatibility, "minor version").
    """
    known = [version for version in _CUDA if not (facts.system == "Windows" and version in _NOT_ON_WINDOWS)]
    for version in sorted(known, reverse=True):
        least, most = _CAPABILITIES[version[0]]
        of_card = facts.capability or least
        if facts.cuda and version <= facts.cuda and least <= of_card <= most:
            return "cu{}{}".format(*version)
    return ""


def machine_facts(survey: Survey, root: Path = Path("/")) -> Facts:
    """Return the facts of this machine; ``root`` is where the system's files are."""
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
    """Return True if the system has one of these libraries."""
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


# ---- what to type ---------------------------------------------------------------------------------------------------


def pip() -> str:
    """Return the command that installs packages here: pipx environments have pip, uv's have none."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"


def built(prefix: Path = Path(sys.prefix)) -> Build | None:
    """Return what scripts/bootstrap wrote into the environment that it made, if this is one."""
    try:
        stamp = untrusted.read_json(prefix / "bootstrap.json")
        return Build(str(stamp.get("cpu", "native")), str(stamp.get("why", "")), str(stamp.get("cmake_args", "")))
    except (GgufspecError, AttributeError):
        return None


def requirement(name: str = _PACKAGE) -> str:
    """Return the supported versions of a package: ``llama-cpp-python<0.4,>=0.3.36``."""
    try:
        needed = importlib.metadata.requires("ggufspec") or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    return next((one for one in needed if re.match(rf"{re.escape(name)}\b", one)), name)


def mend(backend: str = "", *, source: bool = False, flags: Sequence[str] = ()) -> str:
    """Return the command that gives this installation a working llama.cpp.

    ``backend`` is ``cuda``, say; default: the best for this machine. ``source`` builds it here, with CMake's ``flags``,
    for what no prebuilt wheel has: RPC, this processor's own instructions.
    """
    if IN_CHECKOUT:
        return "scripts/bootstrap" + (f" --backend {backend}" if backend else "")
    wheels = choose_wheels(machine_facts(gpus.survey()))
    return pip_line(None if source else wheels, backend or (wheels.backend if wheels else ""), flags)


def pip_line(wheels: Wheels | None, backend: str = "", flags: Sequence[str] = ()) -> str:
    """Return the command that reinstalls llama-cpp-python: without wheels it is built, which needs a compiler.

    uv accepts pip's options under pip's names.
    """
    options = ";".join(filter(None, ["-DGGML_RPC=on", _CMAKE.get(backend), *flags]))
    how = f'--no-binary {_PACKAGE} --no-cache-dir -C "cmake.args={options}"'
    if wheels:
        how = f"--extra-index-url {wheels.index} --only-binary {_PACKAGE}"
    packages = (requirement(), *(wheels.runtime if wheels else ()))
    return " ".join([pip(), "--force-reinstall", how, *map(_quoted, packages)])


def prebuilt_line(wheels: Wheels) -> str:
    """Return the command for a prebuilt llama-cpp-python: in a checkout it makes ggufspec a separate uv tool."""
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
    return missing or mend()


def _quoted(requirement: str) -> str:
    """Quote with double quotes if a shell needs it; every shell knows them, Windows' too."""
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f'"{requirement}"'
