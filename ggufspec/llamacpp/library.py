"""Loads llama.cpp once and routes what it says to Python's logging.

Nothing of llama.cpp reaches a terminal unless a handler is put on ``logging.getLogger("ggufspec.llamacpp")``.
The last warnings and errors are kept, since llama.cpp's calls return a bare null and say why only in the log.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import deque
from types import ModuleType

from ggufspec.errors import GgufspecError

logger = logging.getLogger("ggufspec.llamacpp")
logger.addHandler(logging.NullHandler())  # or Python's last resort would print warnings to stderr

# enum ggml_log_level, ggml/include/ggml.h
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUED = 5

# Said after every failure to load: src/llama.cpp.
_EMPTY_WORDS = ("llama_model_load_from_file_impl: failed to load model",)

_complaints: deque[str] = deque(maxlen=8)


class _Log:
    """Joins the fragments that llama.cpp logs into lines."""

    def __init__(self) -> None:
        self.level = logging.DEBUG
        self.pending = ""

    def __call__(self, level: int, text: bytes, _user_data: object) -> None:
        if level != _CONTINUED:
            self.level = _LEVELS.get(level, logging.DEBUG)
        *lines, self.pending = (self.pending + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if self.level >= logging.WARNING:
                _complaints.append(line.strip())
            logger.log(self.level, "%s", line)


@functools.cache
def load() -> ModuleType:
    """The module ``llama_cpp.llama_cpp``, its log routed and its backends initialised.

    Raises:
        GgufspecError: llama-cpp-python is missing or its libraries cannot be loaded.
    """
    try:
        import llama_cpp.llama_cpp as library
    except (ImportError, OSError, RuntimeError) as error:
        raise GgufspecError(f"llama-cpp-python cannot be loaded: {error}", "scripts/bootstrap") from error
    callback = library.llama_log_callback(_Log())
    library.llama_log_set(callback, ctypes.c_void_p(0))
    library.ggufspec_log_callback = callback  # llama.cpp keeps only the bare pointer
    library.llama_backend_init()
    module: ModuleType = library
    return module


def forget_complaints() -> None:
    """Start a new record of warnings and errors; call it before a call that may fail."""
    _complaints.clear()


def complaints() -> str:
    """What llama.cpp warned of since :func:`forget_complaints`, the root cause first."""
    return "; ".join(dict.fromkeys(line for line in _complaints if line and line not in _EMPTY_WORDS))
