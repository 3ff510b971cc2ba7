"""Image projectors (mmproj) of zeros, of a shape that llama.cpp's own graph takes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def write(path: Path, width: int, *, image: int = 224, hidden: int = 64, blocks: int = 2) -> Path:
    """A SigLIP encoder with Gemma 3's projector to embeddings of ``width``: tools/mtmd/models/siglip.cpp."""
    patch, ffn, heads = 14, 4 * hidden, 2
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    numbers = {"embedding_length": hidden, "feed_forward_length": ffn, "block_count": blocks, "projection_dim": width}
    numbers |= {"attention.head_count": heads, "image_size": image, "patch_size": patch}
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_bool("clip.use_gelu", True)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    square, norm = (hidden, hidden), (hidden,)
    shapes = {"v.patch_embd.weight": (hidden, 3, patch, patch), "v.patch_embd.bias": norm}
    shapes |= {"v.position_embd.weight": ((image // patch) ** 2, hidden)}
    shapes |= {"v.post_ln.weight": norm, "v.post_ln.bias": norm}
    shapes |= {"mm.input_projection.weight": (hidden, width), "mm.soft_emb_norm.weight": norm}
    for block in range(blocks):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"v.blk.{block}.{name}.weight": square, f"v.blk.{block}.{name}.bias": norm}
        for name in ("ln1", "ln2"):
            shapes |= {f"v.blk.{block}.{name}.weight": norm, f"v.blk.{block}.{name}.bias": norm}
        shapes |= {f"v.blk.{block}.ffn_up.weight": (ffn, hidden), f"v.blk.{block}.ffn_up.bias": (ffn,)}
        shapes |= {f"v.blk.{block}.ffn_down.weight": (hidden, ffn), f"v.blk.{block}.ffn_down.bias": norm}
    for name, shape in shapes.items():
        is_matrix = len(shape) > 1 and name != "v.position_embd.weight"
        writer.add_tensor(name, np.zeros(shape, np.float16 if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
