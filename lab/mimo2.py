"""A llama model as ``mimo2``: the llama.cpp architecture that supports MTP heads and hands out every layer's input.

The blocks are the same except for the order of rotated numbers (adjacent pairs there, halves here), so the text stays
the same up to rounding. Source: src/models/mimo2.cpp, src/models/llama.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

PARTS = ("whole", "trunk", "head")
_SKIPPED = ("general.architecture", "general.name", "llama.")


def halves(rows: Array, head_size: int) -> Array:
    """Reorder rows of a query or key matrix from adjacent rotated pairs to separate halves (NORM to NEOX)."""
    heads = rows.reshape(-1, head_size // 2, 2, rows.shape[-1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)


def adjacent(rows: Array, head_size: int) -> Array:
    """Invert :func:`halves`."""
    heads = rows.reshape(-1, 2, head_size // 2, rows.shape[-1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)


def read_blocks(path: Path) -> list[dict[str, Array]]:
    """Read the MTP blocks, of any type, from a file of :func:`write_mimo2`, in its input format."""
    reader = gguf.GGUFReader(path)
    fields = {field.name: field.contents() for field in reader.fields.values() if field.name.startswith("mimo2.")}
    size, count = fields["mimo2.rope.dimension_count"], fields["mimo2.nextn_predict_layers"]
    ends = np.cumsum([fields[f"mimo2.attention.head_count{kind}"] * size for kind in ("", "_kv")])
    blocks = []
    for index in range(fields["mimo2.block_count"] - count, fields["mimo2.block_count"]):
        start = f"blk.{index}."
        block = {
            tensor.name.removeprefix(start): gguf.dequantize(tensor.data, tensor.tensor_type)
            for tensor in reader.tensors
            if tensor.name.startswith(start)
        }
        q, k, v = np.split(block.pop("attn_qkv.weight"), ends)
        own = {"attn_q.weight": adjacent(q, size), "attn_k.weight": adjacent(k, size), "attn_v.weight": v}
        blocks.append(own | block)
    return blocks


def write_mimo2(source: Path, path: Path, blocks: Sequence[Mapping[str, Array]] = (), part: str = "whole") -> Path:
    """Write the llama model of ``source`` with these MTP blocks.

    Args:
        source: a llama GGUF in F16 or F32.
        path: the file to write.
        blocks: tensors of each MTP block, without ``blk.N.``: rows first, rotated pairs adjacent, ``attn_q``,
            ``attn_k`` and ``attn_v`` separate.
        part: ``whole``; ``trunk`` leaves the MTP blocks out though the metadata names them; ``head`` has them, the
            embeddings and the output, and no other block.
    """
    reader = gguf.GGUFReader(source)
    fields = {field.name: field.contents() for field in reader.fields.values()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    trunk, head_size = int(fields["llama.block_count"]), int(fields["llama.rope.dimension_count"])
    count = trunk + len(blocks)
    writer = gguf.GGUFWriter(path, "mimo2")
    writer.add_name(f"{fields['general.name']} as mimo2")
    writer.add_context_length(fields["llama.context_length"])
    writer.add_embedding_length(fields["llama.embedding_length"])
    writer.add_block_count(count)
    writer.add_feed_forward_length(fields["llama.feed_forward_length"])
    writer.add_expert_feed_forward_length(fields["llama.feed_forward_length"])
    writer.add_head_count(fields["llama.attention.head_count"])
    writer.add_head_count_kv(fields["llama.attention.head_count_kv"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(fields["llama.rope.freq_base"])
    writer.add_uint32("mimo2.vocab_size", int(tensors["token_embd.weight"].shape[1]))
    writer.add_layer_norm_rms_eps(fields["llama.attention.layer_norm_rms_epsilon"])
    writer.add_sliding_window(fields["llama.context_length"])
    writer.add_sliding_window_pattern([True] * count)
    if blocks:
        writer.add_nextn_predict_layers(len(blocks))
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", *_SKIPPED)):
            kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, of)

    def matrix(name: str, values: Array) -> None:
        writer.add_tensor(name, values.astype(np.float16 if values.ndim > 1 else np.float32))

    def numbers(name: str) -> Array:
        tensor = tensors[name]
        return np.asarray(tensor.data, np.float32)

    embedding = numbers("token_embd.weight")
    matrix("token_embd.weight", embedding)
    matrix("output_norm.weight", numbers("output_norm.weight"))
    matrix("output.weight", numbers("output.weight") if "output.weight" in tensors else embedding)
    for name in tensors if part != "head" else ():
        if name.startswith("blk."):
            values = numbers(name)
            matrix(name, halves(values, head_size) if "attn_q." in name or "attn_k." in name else values)
    for index, block in enumerate(blocks if part != "trunk" else (), trunk):
        qkv = [halves(block["attn_q.weight"], head_size), halves(block["attn_k.weight"], head_size)]
        matrix(f"blk.{index}.attn_qkv.weight", np.concatenate([*qkv, block["attn_v.weight"]]))
        for name, values in block.items():
            if name not in ("attn_q.weight", "attn_k.weight", "attn_v.weight"):
                matrix(f"blk.{index}.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
