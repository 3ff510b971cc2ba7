"""How ggufspec is installed here, and what to type where its llama.cpp is broken or lacks something.

The one place that knows: a checkout is mended by ``scripts/bootstrap``, which builds llama.cpp; everything else by pip,
or uv where an environment has no pip, and a prebuilt llama-cpp-python (:mod:`ggufspec.hardware.prebuilt`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.hardware import gpus, prebuilt
from ggufspec.hardware.prebuilt import Wheels
from ggufspec.schema.doctor import Build

IN_CHECKOUT = (Path(__file__).resolve().parents[2] / "scripts" / "bootstrap").is_file()
_PACKAGE = "llama-cpp-python"
_CMAKE = {"cuda": "-DGGML_CUDA=on", "metal": "-DGGML_METAL=on", "rocm": "-DGGML_HIP=on", "vulkan": "-DGGML_VULKAN=on"}
# What a library that cannot be loaded says it misses, and the system's package that has it.
_SYSTEM_LIBRARIES = {
    "libgomp.so": "sudo apt install libgomp1 (dnf install libgomp)",
    "libvulkan.so": "sudo apt install libvulkan1 (dnf install vulkan-loader)",
    "libamdhip64.so": "install ROCm 7.2: https://rocm.docs.amd.com",
}


def pip() -> str:
    """What installs a package into this environment: those that pipx makes have a pip, those of uv have none."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"


def built(prefix: Path = Path(sys.prefix)) -> Build | None:
    """What scripts/bootstrap wrote into the environment that it made, if this is one."""
    try:
        stamp = untrusted.read_json(prefix / "bootstrap.json")
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
    if IN_CHECKOUT:
        return "scripts/bootstrap" + (f" --backend {backend}" if backend else "")
    wheels = prebuilt.choose(prebuilt.facts(gpus.survey()))
    return pip_line(None if source else wheels, backend or (wheels.backend if wheels else ""), flags)


def pip_line(wheels: Wheels | None, backend: str = "", flags: Sequence[str] = ()) -> str:
    """What installs llama-cpp-python anew: without wheels it is built, which needs a compiler.

    uv takes pip's options under pip's names.
    """
    options = ";".join(filter(None, ["-DGGML_RPC=on", _CMAKE.get(backend), *flags]))
    how = f'--no-binary {_PACKAGE} --no-cache-dir -C "cmake.args={options}"'
    if wheels:
        how = f"--extra-index-url {wheels.index} --only-binary {_PACKAGE}"
    packages = (requirement(), *(wheels.runtime if wheels else ()))
    return " ".join([pip(), "--force-reinstall", how, *map(_quoted, packages)])


def chat_library() -> str:
    """What to type so that llama.cpp's chat library can be used: a C++ compiler makes it."""
    return "ggufspec doctor --chat-library"


def prebuilt_line(wheels: Wheels) -> str:
    """What to type for a prebuilt llama-cpp-python: in a checkout ggufspec is made a tool of its own beside it."""
    if not IN_CHECKOUT:
        return pip_line(wheels)
    python = f" --python {wheels.python}" if wheels.python else ""
    line = f"uv tool install .{python} --index {wheels.index} --no-build-package {_PACKAGE}"
    return " ".join([line, *(f"--with {_quoted(package)}" for package in wheels.runtime)])


def remedy(complaint: str) -> str:
    """What to type where llama.cpp's libraries cannot be loaded.

    Args:
        complaint: what the system's loader said of them.
    """
    found = re.search(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)", complaint)
    if found and (packages := prebuilt.CUDA_RUNTIME.get(int(found[1]))):
        return " ".join([pip(), *map(_quoted, packages)])
    missing = next((line for name, line in _SYSTEM_LIBRARIES.items() if name in complaint), "")
    return missing or mend()


def _quoted(requirement: str) -> str:
    """In double quotes where a shell would read it otherwise, which every shell knows, Windows' too."""
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f'"{requirement}"'
