"""Memory of an image projector (mmproj): llama.cpp's own count, which allocates no compute buffer.

It covers the weights, and a compute buffer for an image of llama.cpp's warm-up size; a larger image for a model with
dynamic resolution takes more later.

Source: ``mtmd_get_memory_usage`` in tools/mtmd/mtmd.cpp, which llama-server's ``--fit`` uses, too.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ggufspec.errors import ModelError
from ggufspec.hardware import install
from ggufspec.llamacpp.devices import handle_of, name_of
from ggufspec.llamacpp.dryrun import Map, map_nodes
from ggufspec.llamacpp.library import load

_USAGE = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params"  # GCC's and Clang's mangling; MSVC's differs


def memory(path: Path, device: str = "") -> dict[str, int]:
    """Return bytes by device of a projector computed on ``device``, or on the CPU; ``path`` may be metadata-only.

    Raises:
        ModelError: llama.cpp cannot load it, or this llama.cpp cannot count it.
    """
    load()
    try:
        import llama_cpp.mtmd_cpp as mtmd

        usage = mtmd._libmtmd[_USAGE]
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ModelError(f"this llama.cpp does not tell what an mmproj takes: {error}", install.mend()) from None
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.print_timings = bool(device), False
    if device:
        params.device = handle_of(device)
    usage.restype, usage.argtypes = Map, [ctypes.c_char_p, mtmd.mtmd_context_params]
    found = {name_of(handle): size for handle, size in map_nodes(usage(os.fsencode(path), params), 2)}
    if not found:
        raise ModelError("llama.cpp cannot load it as an mmproj", "llama-mtmd-cli says why; or another file")
    return found
