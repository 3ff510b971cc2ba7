"""How ggufspec is installed here, and what to type where its llama.cpp is broken or lacks something.

The one place that knows: a checkout is mended by ``scripts/bootstrap``, which builds llama.cpp; everything else by the
installer that it came with and a prebuilt llama-cpp-python (:mod:`ggufspec.hardware.prebuilt`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ggufspec import foreign
from ggufspec.errors import GgufspecError
from ggufspec.hardware import gpus, prebuilt
from ggufspec.hardware.prebuilt import Wheels
from ggufspec.schema.doctor import Build

_PACKAGE = "llama-cpp-python"
_CMAKE = {"cuda": "-DGGML_CUDA=on", "metal": "-DGGML_METAL=on", "rocm": "-DGGML_HIP=on", "vulkan": "-DGGML_VULKAN=on"}
# What a library that cannot be loaded says it misses, and the system's package that has it.
_SYSTEM_LIBRARIES = {
    "libgomp.so": "sudo apt install libgomp1 (dnf install libgomp)",
    "libvulkan.so": "sudo apt install libvulkan1 (dnf install vulkan-loader)",
    "libamdhip64.so": "install ROCm 7.2: https://rocm.docs.amd.com",
}


@dataclass(frozen=True, slots=True)
class Installation:
    """Where ggufspec runs: from a ``checkout``, or in the environment ``prefix`` that ``installer`` made.

    ``pip`` is the command that installs into that environment.
    """

    checkout: Path | None
    prefix: Path
    installer: str

    @property
    def pip(self) -> str:
        """What installs a package into the environment."""
        if self.installer == "pipx":
            return "pipx runpip ggufspec install"
        if self.installer == "uv":
            return f"uv pip install --python {shlex.quote(str(self.prefix))}"
        return f"{shlex.quote(sys.executable)} -m pip install"


def here(package: Path = Path(__file__).resolve().parents[1], prefix: Path = Path(sys.prefix)) -> Installation:
    """This one: pipx and uv leave a note in the environments that they make for a tool."""
    checkout = package.parent if (package.parent / "scripts" / "bootstrap").is_file() else None
    if (prefix / "pipx_metadata.json").is_file():
        return Installation(checkout, prefix, "pipx")
    if (prefix / "uv-receipt.toml").is_file() or importlib.util.find_spec("pip") is None:
        return Installation(checkout, prefix, "uv")
    return Installation(checkout, prefix, "pip")


def built(prefix: Path = Path(sys.prefix)) -> Build | None:
    """What scripts/bootstrap wrote into the environment that it made, if this is one."""
    try:
        stamp = foreign.read_json(prefix / "bootstrap.json")
        return Build(str(stamp.get("cpu", "native")), str(stamp.get("why", "")), str(stamp.get("cmake_args", "")))
    except (GgufspecError, AttributeError):
        return None


def requirement(name: str = _PACKAGE) -> str:
    """The versions of a package that ggufspec is made for: ``llama-cpp-python<0.4,>=0.3.36``."""
    try:
        needed = importlib.metadata.requires("ggufspec") or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    return next((one for one in needed if re.match(rf"{re.escape(name)}\b", one)), name)


def mend(backend: str = "", *, source: bool = False, flags: Sequence[str] = ()) -> str:
    """What to type so that this installation has a llama.cpp that works.

    Args:
        backend: the one that it shall have, ``cuda`` say; the best for this machine by default.
        source: built here, for what no prebuilt wheel has: RPC, this processor's own instructions.
        flags: CMake's options for that.
    """
    where = here()
    if where.checkout:
        return mending(where, None, backend)
    wheels = prebuilt.choose(prebuilt.facts(gpus.survey()))
    return mending(where, None if source else wheels, backend or (wheels.backend if wheels else ""), flags)


def mending(where: Installation, wheels: Wheels | None, backend: str = "", flags: Sequence[str] = ()) -> str:
    """The line for :func:`mend`: without wheels llama.cpp is built, which needs a compiler. Pure."""
    if where.checkout:
        return "scripts/bootstrap" + (f" --backend {backend}" if backend else "")
    spec = _quoted(requirement())
    is_uv = where.installer == "uv"
    again = f"--reinstall-package {_PACKAGE}" if is_uv else "--force-reinstall"
    if wheels is None:
        options = ";".join(filter(None, ["-DGGML_RPC=on", _CMAKE.get(backend), *flags]))
        source = f"--no-binary {_PACKAGE} --no-cache" + ("" if is_uv else "-dir")
        return f'{where.pip} {again} {source} -C "cmake.args={options}" {spec}'
    index = f"--{'index' if is_uv else 'extra-index-url'} {wheels.index} --only-binary {_PACKAGE}"
    return " ".join([where.pip, again, index, spec, *map(_quoted, wheels.runtime)])


def chat_library() -> str:
    """What to type so that llama.cpp's chat library can be used: a C++ compiler makes it."""
    return "ggufspec doctor --chat-library"


def tool_line(wheels: Wheels, what: str = ".") -> str:
    """What installs ggufspec, a checkout or a wheel's file, as a tool of its own beside a prebuilt llama-cpp-python."""
    python = f" --python {wheels.python}" if wheels.python else ""
    line = f"uv tool install {what}{python} --index {wheels.index} --no-build-package {_PACKAGE}"
    return " ".join([line, *(f"--with {_quoted(package)}" for package in wheels.runtime)])


def prebuilt_line(wheels: Wheels) -> str:
    """What to type for a prebuilt llama-cpp-python: in a checkout ggufspec is made a tool of its own beside it."""
    where = here()
    return tool_line(wheels) if where.checkout else mending(where, wheels)


def remedy(complaint: str) -> str:
    """What to type where llama.cpp's libraries cannot be loaded.

    Args:
        complaint: what the system's loader said of them.
    """
    found = re.search(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)", complaint)
    if found and (packages := prebuilt.cuda_runtime(int(found[1]))):
        return " ".join([here().pip, *map(_quoted, packages)])
    missing = next((line for name, line in _SYSTEM_LIBRARIES.items() if name in complaint), "")
    return missing or mend()


def _quoted(requirement: str) -> str:
    """In double quotes where a shell would read it otherwise, which every shell knows, Windows' too."""
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f'"{requirement}"'
