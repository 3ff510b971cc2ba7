"""Logits of a Llama model in plain NumPy: a reference for llama.cpp's kernels that does not call llama.cpp.

Source: src/models/llama.cpp, for RMSNorm, rotary embeddings of neighbouring pairs, grouped queries and SwiGLU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


def logits(weights: Mapping[str, Floats], keys: Mapping[str, Any], tokens: Sequence[int]) -> Floats:
    """Return the logits after each token, in the precision of the weights.

    Args:
        weights: tensors by their names in the GGUF file, rows first; with tied embeddings, no ``output.weight``.
        keys: metadata from the same file's header, such as ``llama.block_count``.
        tokens: (n,) ids.

    Returns:
        (n, vocab).
    """
    n, size = len(tokens), keys["llama.attention.key_length"]
    eps, base = keys["llama.attention.layer_norm_rms_epsilon"], keys["llama.rope.freq_base"]
    group = keys["llama.attention.head_count"] // keys["llama.attention.head_count_kv"]
    x = weights["token_embd.weight"][list(tokens)]
    angles = np.arange(n)[:, None] * base ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * angles)[:, None].astype(np.complex64 if x.dtype == np.float32 else np.complex128)
    future = np.triu(np.full((n, n), -np.inf, x.dtype), 1)

    def norm(name: str) -> Floats:
        scaled: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps, dtype=x.dtype) * weights[name]
        return scaled

    def heads(rows: Floats) -> Floats:
        return rows.reshape(n, -1, size)

    def rotated(rows: Floats) -> Floats:
        turned: Floats = (np.ascontiguousarray(rows).view(turn.dtype) * turn).view(x.dtype)
        return turned

    for block in range(keys["llama.block_count"]):
        own = {kind: weights[f"blk.{block}.{kind}.weight"] for kind in _KINDS}
        h = norm(f"blk.{block}.attn_norm.weight")
        q, k, v = (heads(_product(h, own[kind])) for kind in ("attn_q", "attn_k", "attn_v"))
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(rows, group, axis=1) for rows in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / x.dtype.type(size**0.5) + future
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + _product(np.einsum("hij,jhd->ihd", scores, v).reshape(n, -1), own["attn_output"])
        h = norm(f"blk.{block}.ffn_norm.weight")
        gate = _product(h, own["ffn_gate"])
        x = x + _product(gate / (1 + np.exp(-gate)) * _product(h, own["ffn_up"]), own["ffn_down"])
    output = weights.get("output.weight", weights["token_embd.weight"])
    return _product(norm("output_norm.weight"), output)


def _product(rows: Floats, weight: Floats) -> Floats:
    """Compute ``rows @ weight.T`` in slices so small that OpenBLAS uses one thread, because more threads would spin."""
    slices = np.matmul(weight.reshape(-1, _SLICE, weight.shape[1]), rows.T)
    product: Floats = slices.reshape(len(weight), len(rows)).T
    return np.ascontiguousarray(product)


_SLICE = 8
_KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
