"""Memory use of an image projector (mmproj), as llama.cpp counts it without allocating a compute buffer.

The count covers the weights and a compute buffer for an image of llama.cpp's warm-up size; in models with dynamic
resolution, larger images take more.

Source: ``mtmd_get_memory_usage`` in tools/mtmd/mtmd.cpp, which llama-server's ``--fit`` uses, too.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ggufspec.errors import ModelError
from ggufspec.hardware import install
from ggufspec.llamacpp.devices import handle_of, name_of
from ggufspec.llamacpp.dryrun import StdMap, map_nodes
from ggufspec.llamacpp.library import load_library

_USAGE = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params"  # GCC's and Clang's mangling; MSVC's differs


def memory(path: Path, device: str = "") -> dict[str, int]:
    """Return a projector's bytes by device if it runs on ``device`` (empty: the CPU); ``path`` may be metadata-only.

    Raises:
        ModelError: llama.cpp cannot load the projector, or this build cannot count its memory.
    """
    load_library()
    try:
        import llama_cpp.mtmd_cpp as mtmd

        usage = mtmd._libmtmd[_USAGE]
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"this llama.cpp does not report an mmproj's memory: {error}", install.repair_command()
        ) from None
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.print_timings = bool(device), False
    if device:
        params.device = handle_of(device)
    usage.restype, usage.argtypes = StdMap, [ctypes.c_char_p, mtmd.mtmd_context_params]
    found = {name_of(handle): size for handle, size in map_nodes(usage(os.fsencode(path), params), 2)}
    if not found:
        raise ModelError("llama.cpp cannot load it as an mmproj", "llama-mtmd-cli shows why; or use another file")
    return found
