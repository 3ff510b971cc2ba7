"""Functions of llama.cpp that llama.h lacks: hidden rows, and the heads that read them.

They are in ``src/llama-ext.h``, marked "work in progress", and exported under C++ names, which differ by compiler. A
build may lack one: :func:`missing` names it before it is needed. None of them returns an error: they abort the process
for what an architecture does not compute, so every caller checks :data:`LAYER_INPUTS` and :data:`LAST_ROWS` first.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from ggufspec.errors import ModelError
from ggufspec.llamacpp.library import load


class _Kind(NamedTuple):
    """A C type: as ctypes has it, and its letters in the names of GCC and Clang, and of MSVC."""

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

# name: (result, arguments); src/llama-ext.h of llama.cpp 0c1e570
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
NEEDED = {  # functions that a drafter requires
    "mtp": (*_NEXTN, "llama_set_nextn_layer_offset", "llama_get_ctx_other"),
    "eagle3": (
        *_NEXTN,
        "llama_set_embeddings_layer_inp",
        "llama_get_embeddings_layer_inp",
        "llama_model_target_layer_ids",
        "llama_model_target_layer_ids_n",
    ),
}

# Architectures whose graph names the input of every layer (``t_layer_inp`` in src/models/*.cpp): EAGLE-3 can attach.
_LAYER_INPUTS = (
    "bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan_vl lfm2 lfm2moe llama mimo2 minimax-01 minimax-m2 muse-glimmer "
    "nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen4exp"
)
# Architectures with a graph for MTP blocks (``graph_mtp`` there): one block, or one for each drafted token.
_ONE_MTP_BLOCK = (
    "bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 glm-dsa glm4moe nemotron_h_moe qwen35 qwen35moe qwen3next"
)
_MTP_BLOCKS = "hy_v3 mimo2 step35"
LAYER_INPUTS = frozenset(_LAYER_INPUTS.split())
CHAINED_MTP = frozenset(_MTP_BLOCKS.split())
MTP = CHAINED_MTP | frozenset(_ONE_MTP_BLOCK.split())
# Architectures that name the rows after the last block (``t_h_nextn``) and have heads: Gemma 4's is a file.
LAST_ROWS = MTP | {"gemma4"}


@functools.cache
def function(name: str) -> Any:
    """Return the function of this name, with its types; AttributeError if this build has none of its names."""
    result, arguments = _PROTOTYPES[name]
    itanium = f"_Z{len(name)}{name}" + "".join(kind.itanium for kind in arguments)
    msvc = f"?{name}@@YA{result.msvc}{''.join(kind.msvc for kind in arguments)}@Z"
    library: ctypes.CDLL = load()._lib.whole
    found = next((getattr(library, symbol) for symbol in (name, itanium, msvc) if hasattr(library, symbol)), None)
    if found is None:
        raise AttributeError(name)
    found.restype = result.ctype
    found.argtypes = [kind.ctype for kind in arguments]
    return found


def require(drafter: str) -> None:
    """Raise a ModelError if this build of llama.cpp lacks a function that heads of this kind need."""
    if absent := missing(drafter):
        raise ModelError(f"the installed llama.cpp has no {absent}, which {drafter} heads need", "ggufspec doctor")


def missing(drafter: str) -> str:
    """Return the first function that ``drafter`` needs and this build of llama.cpp lacks; empty if it has all."""
    for name in NEEDED.get(drafter, ()):
        try:
            function(name)
        except AttributeError:
            return name
    return ""
