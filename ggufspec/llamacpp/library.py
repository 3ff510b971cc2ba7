"""llama.cpp's library, loaded once, with its log routed to Python's logging.

The installed llama.cpp may be the wrong version or build; if it is unusable, a :class:`GgufspecError` names the command
that fixes it. Its log reaches a terminal only through a handler on ``logging.getLogger("ggufspec.llamacpp")``. The last
warnings and errors are stored, because llama.cpp's calls return null on failure and give the reason only in the log.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware import install
from ggufspec.llamacpp.options import STREAM_VARIABLE
from ggufspec.schema.text import visible

logger = logging.getLogger("ggufspec.llamacpp")
logger.addHandler(logging.NullHandler())  # otherwise Python's handler of last resort would print warnings

# enum ggml_log_level, ggml/include/ggml.h
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUED = 5

# llama.cpp logs this line, which gives no reason, after every failed load (src/llama.cpp).
_EMPTY_WORDS = ("llama_model_load_from_file_impl: failed to load model",)

_PINNED = "pinned memory"  # in messages from CUDA (debug level) and Vulkan if pinned memory is unavailable

_complaints: deque[str] = deque(maxlen=8)


class _Log:
    """Log callback that concatenates the fragments of llama.cpp's log into lines."""

    def __init__(self) -> None:
        self.level = logging.DEBUG
        self.pending = ""

    def __call__(self, level: int, text: bytes, _user_data: object) -> None:
        if level != _CONTINUED:
            self.level = _LEVELS.get(level, logging.DEBUG)
        *lines, self.pending = (self.pending + visible(text.decode("utf-8", "replace"))).split("\n")
        for line in lines:
            if self.level >= logging.WARNING or _PINNED in line:
                _complaints.append(line.strip())
            logger.log(self.level, "%s", line)


class MissingFunctionError(GgufspecError, AttributeError):
    """Error for a function that the installed llama.cpp lacks because of its version or build.

    ``hasattr``, and ``getattr`` with a default, treat this error as a missing attribute.
    """

    def __init__(self, name: str) -> None:
        what = f"the installed llama.cpp has no {name}: ggufspec needs another version"
        super().__init__(what, install.repair_command())


class _Complete(ModuleType):
    """Wrapper around a module or library, in which a missing name raises :class:`MissingFunctionError`."""

    def __init__(self, whole: Any) -> None:
        super().__init__("llama_cpp.llama_cpp")
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self.whole, name)
        except AttributeError:
            raise MissingFunctionError(name) from None
        if name == "_lib":
            found = _Complete(found)
        setattr(self, name, found)
        return found


def min_batch_from_environment() -> int | None:
    """Return op_offload_min_batch from the environment, if set.

    Raises:
        UsageError: the variable is not a number of tokens.
    """
    text = os.environ.get(STREAM_VARIABLE)
    if text is not None and not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UsageError(f"{STREAM_VARIABLE}={text!r} is not a number of tokens", f"unset {STREAM_VARIABLE}")
    return int(text) if text else None


@functools.cache
def imported() -> ModuleType:
    """Return the module ``llama_cpp.llama_cpp``; its ``_lib`` is the C library.

    Raises:
        GgufspecError: llama-cpp-python is missing, its version is unsupported, or its libraries cannot be loaded.
            Using a missing function later raises :class:`MissingFunctionError`.
    """
    _check_version()
    try:
        return _Complete(_import())
    except AttributeError as error:  # the library was replaced by an older one, or the installation is broken
        raise GgufspecError(
            f"llama-cpp-python and its libraries do not match: {error}", install.repair_command()
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        said = f"llama-cpp-python cannot be loaded: {error}"
        raise GgufspecError(said, install.remedy(str(error))) from error


@functools.cache
def load_library() -> ModuleType:
    """Return the module from :func:`imported` with its log routed and backends initialised; raise as it does."""
    library: Any = imported()
    callback = library.llama_log_callback(_Log())
    library.llama_log_set(callback, ctypes.c_void_p(0))
    library.kept = callback  # keep alive, because llama.cpp holds only a pointer
    library.llama_backend_init()
    module: ModuleType = library
    return module


def bound(library: Any, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> Any:
    """Set the types of C functions in ``library`` and return it; ``functions`` maps names to (result, arguments)."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def system_info() -> str:
    """Return llama.cpp's one-line description of its build; raise as :func:`imported` does."""
    return str(load_library().llama_print_system_info().decode("utf-8", "replace").strip(" |"))


def _import() -> ModuleType:
    """Import llama_cpp; if CUDA's runtime is missing, load NVIDIA's packaged one from this environment and retry.

    The packaged runtime is not tried first, because a local build needs the runtime that it was built with.
    """
    if sys.platform == "win32":
        for folder in _runtime_folders("bin"):
            os.add_dll_directory(str(folder))
    try:
        import llama_cpp.llama_cpp as library
    except (OSError, RuntimeError) as error:
        missing = re.search(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)", str(error))
        if not (missing and _load_cuda_runtime(missing[1])):
            raise
        import llama_cpp.llama_cpp as library
    module: ModuleType = library
    return module


def _load_cuda_runtime(major: str) -> bool:
    """Load the libraries of ``nvidia-cuda-runtime-…`` and ``nvidia-cublas-…``; return True if any was loaded.

    The dynamic linker then finds the loaded libraries by SONAME. Each library needs the previous ones. ``major`` is
    CUDA's major version, because several may be installed.
    """
    loaded = False
    for name in ("libcudart", "libnvrtc", "libcublasLt", "libcublas"):
        for path in (path for folder in _runtime_folders("lib") for path in sorted(folder.glob(f"{name}.so.{major}*"))):
            try:
                ctypes.CDLL(str(path))
                loaded = True
            except OSError as error:
                logger.debug("%s cannot be loaded: %s", path, error)
    return loaded


def _runtime_folders(name: str) -> list[Path]:
    """Return library folders in NVIDIA's packages: ``nvidia/cublas/lib``, and since CUDA 13 ``nvidia/cu13/lib``."""
    spec = importlib.util.find_spec("nvidia")  # namespace package shared by NVIDIA's packages
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    patterns = (f"*/{name}", f"*/{name}/x86_64") if name == "bin" else (f"*/{name}",)
    return [
        folder for root in roots for pattern in patterns for folder in sorted(root.glob(pattern)) if folder.is_dir()
    ]


def _check_version() -> None:
    """Refuse an unsupported version of llama-cpp-python, which pip may have installed after ggufspec."""
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return  # the import reports a missing package better, and a package without metadata may work
    needed = install.requirement()
    limits = {sign: _numbers(number) for sign, number in re.findall(r"(>=|<)([\d.]+)", needed)}
    has = _numbers(version)
    if has < limits.get(">=", has) or ("<" in limits and has >= limits["<"]):
        raise GgufspecError(
            f"llama-cpp-python {version} is installed, but ggufspec needs {needed}", install.repair_command()
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers: (0, 3, 36) for ``0.3.36+cu124``."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def forget_complaints() -> None:
    """Clear the stored warnings and errors, before a call that may fail."""
    _complaints.clear()


def complaints(otherwise: str = "llama.cpp gave no reason") -> str:
    """Return why a call failed: llama.cpp's warnings and errors since :func:`forget_complaints`, root cause first."""
    found = dict.fromkeys(line for line in _complaints if line and line not in _EMPTY_WORDS)
    return "; ".join(found) or otherwise


def unpinned() -> str:
    """Return why a driver refused pinned memory since :func:`forget_complaints`; empty if none did."""
    return next((line for line in _complaints if _PINNED in line), "")
