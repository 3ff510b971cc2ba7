"""llama.cpp functions missing from llama.h, for hidden states and the heads that read them.

They are in ``src/llama-ext.h``, marked "work in progress", and exported under C++ names, which differ by compiler. A
build may lack some, and :func:`missing_function` finds the first. Instead of returning an error, they abort the process
if an architecture does not return its hidden states, so every caller first checks :data:`LAYER_INPUTS` and
:data:`LAST_ROWS`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from ggufspec.errors import ModelError
from ggufspec.llamacpp.library import load_library


class _Kind(NamedTuple):
    """A C type: its ctypes type, and its code in names mangled by GCC and Clang, and by MSVC."""

    ctype: Any
    itanium: str
    msvc: str


_VOID = _Kind(None, "v", "X")
_BOOL = _Kind(ctypes.c_bool, "b", "_N")
_INT32 = _Kind(ctypes.c_int32, "i", "H")
_UINT32 = _Kind(ctypes.c_uint32, "j", "I")
_ROWS = _Kind(ctypes.c_void_p, "", "PEAM")
_IDS = _Kind(ctypes.POINTER(ctypes.c_int32), "", "PEBH")
_CONTEXT = _Kind(ctypes.c_void_p, "P13llama_context", "PEAUllama_context@@")
_MODEL = _Kind(ctypes.c_void_p, "PK11llama_model", "PEBUllama_model@@")

# name: (result, arguments), from src/llama-ext.h at llama.cpp commit 0c1e570
_PROTOTYPES: dict[str, tuple[_Kind, tuple[_Kind, ...]]] = {
    "llama_set_embeddings_nextn": (_VOID, (_CONTEXT, _BOOL, _BOOL)),
    "llama_get_embeddings_nextn": (_ROWS, (_CONTEXT,)),
    "llama_set_nextn_layer_offset": (_VOID, (_CONTEXT, _INT32)),
    "llama_set_embeddings_layer_inp": (_VOID, (_CONTEXT, _UINT32, _BOOL)),
    "llama_get_embeddings_layer_inp": (_ROWS, (_CONTEXT, _UINT32)),
    "llama_get_ctx_other": (_CONTEXT, (_CONTEXT,)),
    "llama_model_target_layer_ids": (_IDS, (_MODEL,)),
    "llama_model_target_layer_ids_n": (_UINT32, (_MODEL,)),
}

_NEXTN = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn")
NEEDED = {  # llama.cpp functions that each drafter requires
    "mtp": (*_NEXTN, "llama_set_nextn_layer_offset", "llama_get_ctx_other"),
    "eagle3": (
        *_NEXTN,
        "llama_set_embeddings_layer_inp",
        "llama_get_embeddings_layer_inp",
        "llama_model_target_layer_ids",
        "llama_model_target_layer_ids_n",
    ),
}

# Architectures whose graph names the input of every layer (``t_layer_inp`` in src/models/*.cpp), as EAGLE-3 requires.
_LAYER_INPUTS = (
    "bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan_vl lfm2 lfm2moe llama mimo2 minimax-01 minimax-m2 muse-glimmer "
    "nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen4exp"
)
# Architectures with a graph for MTP blocks (``graph_mtp`` in src/models/*.cpp): one block, or one per drafted token.
_ONE_MTP_BLOCK = (
    "bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 glm-dsa glm4moe nemotron_h_moe qwen35 qwen35moe qwen3next"
)
_MTP_BLOCKS = "hy_v3 mimo2 step35"
LAYER_INPUTS = frozenset(_LAYER_INPUTS.split())
CHAINED_MTP = frozenset(_MTP_BLOCKS.split())
MTP = CHAINED_MTP | frozenset(_ONE_MTP_BLOCK.split())
# Architectures that name the last block's output (``t_h_nextn``) and have heads; Gemma 4's head has its own file.
LAST_ROWS = MTP | {"gemma4"}


@functools.cache
def function(name: str) -> Any:
    """Return the named function with its result and argument types; raise AttributeError if this build lacks it."""
    result, arguments = _PROTOTYPES[name]
    itanium = f"_Z{len(name)}{name}" + "".join(kind.itanium for kind in arguments)
    msvc = f"?{name}@@YA{result.msvc}{''.join(kind.msvc for kind in arguments)}@Z"
    library: ctypes.CDLL = load_library()._lib.whole
    found = next((getattr(library, symbol) for symbol in (name, itanium, msvc) if hasattr(library, symbol)), None)
    if found is None:
        raise AttributeError(name)
    found.restype = result.ctype
    found.argtypes = [kind.ctype for kind in arguments]
    return found


def require_functions(drafter: str) -> None:
    """Raise ModelError if this build of llama.cpp lacks a function that heads of this kind need."""
    if absent := missing_function(drafter):
        raise ModelError(f"the installed llama.cpp has no {absent}, which {drafter} heads need", "ggufspec doctor")


def missing_function(drafter: str) -> str:
    """Return the first function that ``drafter`` needs and this build of llama.cpp lacks; empty if it has all."""
    for name in NEEDED.get(drafter, ()):
        try:
            function(name)
        except AttributeError:
            return name
    return ""
