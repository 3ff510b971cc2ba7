"""Turns a GGUF file into another tensor type with llama.cpp's own quantiser.

Source: src/llama-quant.cpp. A file type is a mixture: Q4_0 keeps tied embeddings in Q6_K, the K types give some
tensors more bits, norms stay F32.
"""

from __future__ import annotations

import ctypes
import difflib
from pathlib import Path

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.library import complaints, forget_complaints, load

# llama_ftype by llama-quantize's names; those that need an importance matrix are left out.
FILE_TYPES = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K"),
)


def check_type(type_name: str) -> str:
    """``type_name`` as ``FILE_TYPES`` spells it.

    Raises:
        UsageError: no file type has that name.
    """
    name = type_name.upper()
    if name not in FILE_TYPES:
        near = difflib.get_close_matches(name, FILE_TYPES, n=3)
        raise UsageError(
            f"{type_name!r} is no file type that can be written", "one of " + ", ".join(near or FILE_TYPES)
        )
    return name


def quantize(source: Path, target: Path, type_name: str, threads: int) -> None:
    """Write ``source`` to ``target`` in another file type; nothing is left at ``target`` on failure.

    Args:
        source: a GGUF file whose matrices are F32, F16 or BF16.
        target: the file to write; one that is there is replaced.
        type_name: one of ``FILE_TYPES``.
        threads: CPU threads; 0 takes all.

    Raises:
        UsageError: the file type is not known, or source and target are the same file.
        ModelError: the source is missing, the target cannot be written, or llama.cpp refuses the model.
    """
    name = check_type(type_name)
    if not source.is_file():
        raise ModelError(f"{source} does not exist", f"ls {source.parent}")
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} would overwrite the model it is made from", "give the new file another name")
    try:
        target.touch()  # llama.cpp does not say why it could not open a file
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}", f"ls -ld {target.parent}") from error
    lib = load()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, "LLAMA_FTYPE_ALL_F32" if name == "F32" else f"LLAMA_FTYPE_MOSTLY_{name}")
    params.nthread = threads
    forget_complaints()
    done = False
    try:
        done = lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0
    finally:
        if not done:
            target.unlink(missing_ok=True)
    if not done:
        reason = complaints() or "llama.cpp gave no reason"
        hint = "start from the model's F16 file" if "requantizing" in reason else "look for free disk space"
        raise ModelError(f"{source} cannot be quantised to {name}: {reason}", hint)
