"""GGUF files of true size without weights, for models of many architectures.

A file is its header and then one hole: an 80-block model costs a few kilobytes of disk, and llama.cpp's dry run
(``no_alloc`` with ``LLAMA_LOAD_MODE_NONE``) reads it as it would the real one. The ``tiny-`` shapes are small enough to
be loaded for real; all their weights are zeros, and so are their logits.

Tensor names and metadata keys are those that llama.cpp's src/models/*.cpp ask for, with the numbers of the published
models as their names say; the types of the tensors are those that llama-quantize chooses (src/llama-quant.cpp).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

Value = bool | int | float | str | np.uint16 | np.int32 | Sequence[bool] | Sequence[int] | Sequence[str]
Keys = dict[str, Any]  # metadata, whose values are Value
Tensors = dict[str, tuple[int, ...]]  # name -> ne, the fastest dimension first

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
LLAMA3_TOKENS, LLAMA3_MERGES = 128_256, 280_147
SPECIAL_TOKENS = 256  # the last ones of a vocabulary

# ---- shapes ---------------------------------------------------------------------------------------


def block_of(kind: str) -> tuple[int, int]:
    """(weights, bytes) of one block of a type."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


class Tensor(NamedTuple):
    name: str
    type: str  # as gguf.GGMLQuantizationType spells it
    ne: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        block, block_bytes = block_of(self.type)
        return math.prod(self.ne) // block * block_bytes


@dataclass(frozen=True)
class Shape:
    """A model without its weights; ``metadata`` is all but the tokenizer's."""

    name: str
    kind: str  # dense, tied, moe, swa, mla, recurrent, hybrid or nextn
    architecture: str
    metadata: Keys
    tensors: tuple[Tensor, ...]
    vocabulary: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights, each tensor padded as in a file."""
        return sum(padded(tensor.nbytes) for tensor in self.tensors)


class Dims(NamedTuple):
    """The sizes that most models have; ``head`` 0 stands for ``width // heads``."""

    blocks: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head: int = 0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts; ``ffn`` and ``shared`` are widths of one expert and of the shared ones together."""

    count: int
    used: int
    ffn: int
    shared: int = 0
    bias: bool = False  # on every expert
    shared_gate: bool = False
    routing_bias: bool = False

    def keys(self) -> Keys:
        keys: Keys = {"expert_count": self.count, "expert_used_count": self.used}
        keys |= {"expert_shared_feed_forward_length": self.shared} if self.shared else {}
        return keys | {"expert_feed_forward_length": self.ffn}


@dataclass(frozen=True)
class Ssm:
    """A Mamba layer; ``rank`` is the rank of the time step (Mamba 1) or the number of heads (Mamba 2)."""

    inner: int
    state: int
    rank: int
    groups: int = 0  # 0: Mamba 1
    conv: int = 4

    def keys(self) -> Keys:
        sizes = {"conv_kernel": self.conv, "inner_size": self.inner, "state_size": self.state}
        sizes |= {"time_step_rank": self.rank} | ({"group_count": self.groups} if self.groups else {})
        return {f"ssm.{key}": size for key, size in sizes.items()}


# ---- the tensors of one block ---------------------------------------------------------------------


def vectors(width: int, *names: str) -> Tensors:
    return dict.fromkeys((f"{name}.weight" for name in names), (width,))


def biased(width: int, *names: str) -> Tensors:
    """The two vectors of LayerNorms."""
    return {f"{name}.{part}": (width,) for name in names for part in ("weight", "bias")}


def attention(dims: Dims, *, bias: bool = False, qk_norm: bool = False, query_gate: bool = False) -> Tensors:
    width, head = dims.width, dims.head or dims.width // dims.heads
    rows = {"attn_q": dims.heads * head * (1 + query_gate), "attn_k": dims.kv_heads * head}
    rows["attn_v"] = rows["attn_k"]
    tensors = {f"{name}.weight": (width, n) for name, n in rows.items()}
    tensors |= {"attn_output.weight": (dims.heads * head, width)}
    tensors |= {f"{name}.bias": (n,) for name, n in rows.items()} if bias else {}
    return tensors | (vectors(head, "attn_q_norm", "attn_k_norm") if qk_norm else {})


def gated(width: int, ffn: int, suffix: str = "") -> Tensors:
    """A gated feed-forward layer."""
    wide = dict.fromkeys((f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight"), (width, ffn))
    return wide | {f"ffn_down{suffix}.weight": (ffn, width)}


def mixture(width: int, moe: Experts) -> Tensors:
    tensors: Tensors = {"ffn_gate_inp.weight": (width, moe.count)}
    tensors |= {name: (*ne, moe.count) for name, ne in gated(width, moe.ffn, "_exps").items()}
    if moe.bias:
        rows = {"ffn_gate_exps": moe.ffn, "ffn_up_exps": moe.ffn, "ffn_down_exps": width}
        tensors |= {f"{name}.bias": (n, moe.count) for name, n in rows.items()} | {"ffn_gate_inp.bias": (moe.count,)}
    tensors |= gated(width, moe.shared, "_shexp") if moe.shared else {}
    tensors |= vectors(width, "ffn_gate_inp_shexp") if moe.shared_gate else {}
    return tensors | ({"exp_probs_b.bias": (moe.count,)} if moe.routing_bias else {})


def mamba(width: int, ssm: Ssm) -> Tensors:
    """Mamba 1 where there are no groups, else Mamba 2."""
    tensors: Tensors = {"ssm_out.weight": (ssm.inner, width)}
    if ssm.groups:
        conv = ssm.inner + 2 * ssm.groups * ssm.state
        tensors |= {"ssm_in.weight": (width, ssm.inner + conv + ssm.rank), "ssm_dt.bias": (ssm.rank,)}
        tensors |= {"ssm_a": (1, ssm.rank), "ssm_d": (1, ssm.rank)}
        tensors |= {"ssm_norm.weight": (ssm.inner // ssm.groups, ssm.groups)}
    else:
        conv = ssm.inner
        tensors |= {"ssm_in.weight": (width, 2 * conv), "ssm_x.weight": (conv, ssm.rank + 2 * ssm.state)}
        tensors |= {"ssm_a": (ssm.state, conv), "ssm_d": (conv,)}
        tensors |= {"ssm_dt.weight": (ssm.rank, conv), "ssm_dt.bias": (conv,)}
    return tensors | {"ssm_conv1d.weight": (ssm.conv, conv), "ssm_conv1d.bias": (conv,)}


def nextn(width: int, vocabulary: int) -> Tensors:
    """What a block for multi-token prediction has besides an ordinary block's tensors."""
    tables = dict.fromkeys(("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"), (width, vocabulary))
    norms = vectors(width, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    return {"nextn.eh_proj.weight": (2 * width, width)} | tables | norms


# ---- the types of a model's tensors ---------------------------------------------------------------

# What llama-quantize leaves as it is, and what it takes where a row is no multiple of 256: src/llama-quant.cpp,
# tensor_allows_quantization and tensor_type_fallback.
KEPT = ("_norm.weight", "ffn_gate_inp.weight", "_conv1d", "shortconv.conv", "position_embd", "lerp_fused")
KEPT += tuple(f"time_mix_{name}{i}.weight" for name in "wavg" for i in range(3))
FALLBACKS = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def quantised(mix: str, tensors: Tensors, *, blocks: int, experts: int, tied: bool) -> tuple[Tensor, ...]:
    """The types that llama-quantize gives; source: src/llama-quant.cpp, llama_tensor_get_type_impl."""
    default = "MXFP4" if mix == "MXFP4_MOE" else "_".join(mix.split("_")[:2])
    values = [name for name in tensors if name.endswith(("attn_v.weight", "attn_qkv.weight"))]

    def more_bits(i: int, n: int) -> bool:
        return mix == "Q4_K_M" and (i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2)

    def wanted(name: str, ne: tuple[int, ...]) -> str:
        if math.prod(ne) == ne[0] or not name.endswith("weight") or any(kept in name for kept in KEPT):
            return "F32"
        if mix == "F16":
            return "F16"
        if name == "output.weight" or (tied and name == "token_embd.weight"):
            return "Q8_0" if default in ("Q8_0", "MXFP4") else "Q6_K"
        if mix == "MXFP4_MOE":
            return "MXFP4" if len(ne) == 3 else "Q8_0"
        if experts == 8 and (name in values or name.endswith("attn_k.weight")):
            return "Q8_0"
        if name in values and more_bits(values.index(name), len(values)):
            return "Q6_K"
        if name in values and blocks == 80 and default in ("Q3_K", "Q4_K"):
            return "Q5_K"
        if "ffn_down" in name and more_bits(int(name.split(".")[1]), blocks):
            return "Q6_K"
        is_output = name.endswith("attn_output.weight")
        if mix == "Q3_K_L" and (name in values or "ffn_down" in name or is_output):
            return "Q5_K"
        return "Q5_K" if is_output and experts == 8 and mix in ("Q3_K_S", "Q4_K_M") else default

    def fitting(kind: str, row: int) -> str:
        candidates = (kind, FALLBACKS.get(kind, "F16"), "F16")
        return next(name for name in candidates if row % block_of(name)[0] == 0)

    return tuple(Tensor(name, fitting(wanted(name, ne), ne[0]), ne) for name, ne in tensors.items())


# ---- whole models ---------------------------------------------------------------------------------

PRE = ("attn_norm", "ffn_norm")
POST = ("attn_norm", "post_attention_norm")
SANDWICH = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
TINY = Dims(4, 256, 4, 2, 768, 4096)


@dataclass(frozen=True)
class Label:
    name: str
    kind: str
    architecture: str
    mix: str = "Q4_K_M"


def make(
    label: Label, dims: Dims, blocks: Sequence[Tensors], keys: Keys, ends: Tensors, *, tied: bool = False
) -> Shape:
    """The shape with these blocks; ``ends`` are tensors outside them, besides the embeddings and the output."""
    tensors: Tensors = {"token_embd.weight": (dims.width, dims.vocabulary)} | ends
    tensors |= {} if tied else {"output.weight": (dims.width, dims.vocabulary)}
    for i, block in enumerate(blocks):
        tensors |= {f"blk.{i}.{tensor}": ne for tensor, ne in block.items()}
    own: Keys = {"block_count": len(blocks), "context_length": 131072, "embedding_length": dims.width}
    own |= {"feed_forward_length": dims.ffn, "attention.head_count": dims.heads, "vocab_size": dims.vocabulary}
    own |= {"attention.layer_norm_rms_epsilon": 1e-5} | keys
    metadata: Keys = {"general.architecture": label.architecture, "general.type": "model", "general.name": label.name}
    metadata |= {"general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{label.mix}"])}
    metadata |= {f"{label.architecture}.{key}": value for key, value in own.items()}
    experts = keys.get("expert_count", 0)
    typed = quantised(label.mix, tensors, blocks=len(blocks), experts=experts, tied=tied)
    return Shape(label.name, label.kind, label.architecture, metadata, typed, dims.vocabulary)


def attention_keys(dims: Dims, attends: Sequence[int] | None = None) -> Keys:
    """``attends``: the blocks with attention, where others have none."""
    head = dims.head or dims.width // dims.heads
    kv_heads = [dims.kv_heads * (i in attends) for i in range(dims.blocks)] if attends is not None else dims.kv_heads
    sizes = {"head_count_kv": kv_heads, "key_length": head, "value_length": head}
    return {f"attention.{key}": size for key, size in sizes.items()} | {"rope.freq_base": 1e6}


def transformer(
    label: Label,
    dims: Dims,
    *,
    moe: Experts | None = None,
    dense_lead: int = 0,
    nextn_blocks: int = 0,
    norms: tuple[str, ...] = PRE,
    bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    extra: Tensors | None = None,  # in every block
    ends: Tensors | None = None,
    keys: Keys | None = None,
) -> Shape:
    """Attention and a gated feed-forward layer or a mixture of experts in every block."""
    common = attention(dims, bias=bias, qk_norm=qk_norm) | vectors(dims.width, *norms) | (extra or {})
    dense = common | gated(dims.width, dims.ffn)
    block = common | mixture(dims.width, moe) if moe else dense
    plan = [dense] * dense_lead + [block] * (dims.blocks - dense_lead)
    plan += [block | nextn(dims.width, dims.vocabulary)] * nextn_blocks
    own = attention_keys(dims) | (moe.keys() if moe else {}) | (keys or {})
    own |= {"leading_dense_block_count": dense_lead} if dense_lead else {}
    own |= {"nextn_predict_layers": nextn_blocks} if nextn_blocks else {}
    return make(label, dims, plan, own, vectors(dims.width, "output_norm") | (ends or {}), tied=tied)


def gpt2(label: Label, dims: Dims) -> Shape:
    """Trained positions, fused projections, biases everywhere, no gate, tied."""
    width, ffn = dims.width, dims.ffn
    matrices = {"attn_qkv": (width, 3 * width), "attn_output": (width, width)}
    matrices |= {"ffn_up": (width, ffn), "ffn_down": (ffn, width)}
    block = {f"{name}.weight": ne for name, ne in matrices.items()} | biased(width, *PRE)
    block |= {f"{name}.bias": ne[1:] for name, ne in matrices.items()}
    ends = {"position_embd.weight": (width, 1024)} | biased(width, "output_norm")
    keys: Keys = {"attention.layer_norm_epsilon": 1e-5, "context_length": 1024}
    return make(label, dims, [block] * dims.blocks, keys, ends, tied=True)


def deepseek(
    label: Label,
    dims: Dims,
    moe: Experts,
    *,
    dense_lead: int,
    q_rank: int = 0,
    kv_rank: int = 512,
    keys: Keys | None = None,
) -> Shape:
    """Multi-head latent attention as converted today: one KV head, ``attn_k_b`` and ``attn_v_b``."""
    width, heads, head, rope = dims.width, dims.heads, dims.head, dims.head // 2
    block = {"attn_kv_a_mqa.weight": (width, kv_rank + rope), "attn_output.weight": (heads * head, width)}
    block |= {"attn_k_b.weight": (head, kv_rank, heads), "attn_v_b.weight": (kv_rank, head, heads)}
    block |= vectors(kv_rank, "attn_kv_a_norm") | vectors(width, *PRE)
    q_rows = heads * (head + rope)
    if q_rank:
        block |= {"attn_q_a.weight": (width, q_rank), "attn_q_b.weight": (q_rank, q_rows)}
        block |= vectors(q_rank, "attn_q_a_norm")
    else:
        block |= {"attn_q.weight": (width, q_rows)}
    plan = [block | gated(width, dims.ffn)] * dense_lead
    plan += [block | mixture(width, moe)] * (dims.blocks - dense_lead)
    sizes = {"head_count_kv": 1, "key_length": kv_rank + rope, "value_length": kv_rank, "kv_lora_rank": kv_rank}
    sizes |= {"key_length_mla": head + rope, "value_length_mla": head} | ({"q_lora_rank": q_rank} if q_rank else {})
    own = moe.keys() | {f"attention.{key}": size for key, size in sizes.items()} | {"rope.dimension_count": rope}
    own |= {"leading_dense_block_count": dense_lead, "expert_shared_count": moe.shared // moe.ffn}
    own |= keys or {}
    return make(label, dims, plan, own, vectors(width, "output_norm"))


def pure_mamba(label: Label, dims: Dims, ssm: Ssm) -> Shape:
    block = mamba(dims.width, ssm) | vectors(dims.width, "attn_norm")
    return make(label, dims, [block] * dims.blocks, ssm.keys(), vectors(dims.width, "output_norm"), tied=True)


def rwkv7(label: Label, dims: Dims, ranks: dict[str, int]) -> Shape:
    """``ranks`` of the low-rank matrices: w decay, a in-context rate, v value residual, g gate."""
    width, ffn = dims.width, dims.ffn
    block = vectors(width, *(f"time_mix_{key}" for key in ("w0", "a0", "v0", "k_k", "k_a", "r_k")))
    square = ("key", "value", "receptance", "output")
    block |= dict.fromkeys((f"time_mix_{key}.weight" for key in square), (width, width))
    block |= {"time_mix_lerp_fused.weight": (width, 1, 1, 6), "channel_mix_lerp_k.weight": (width, 1, 1)}
    block |= {"channel_mix_key.weight": (width, ffn), "channel_mix_value.weight": (ffn, width)}
    block |= biased(width, "attn_norm", "attn_norm_2", "time_mix_ln")

    def low_rank(sizes: dict[str, int]) -> Tensors:
        down = {f"time_mix_{key}1.weight": (width, rank) for key, rank in sizes.items()}
        return down | {f"time_mix_{key}2.weight": (rank, width) for key, rank in sizes.items()}

    first = low_rank(ranks | {"v": ranks["a"]})  # src/models/rwkv7.cpp: unused, and of this shape
    plan = [block | (low_rank(ranks) if i else first) for i in range(dims.blocks)]
    names = {"w": "decay", "a": "iclr", "v": "value_residual_mix", "g": "gate"}
    keys: Keys = {f"attention.{names[key]}_lora_rank": rank for key, rank in ranks.items()}
    keys |= {"wkv.head_size": 64, "attention.layer_norm_epsilon": 1e-5}
    return make(label, dims, plan, keys, biased(width, "token_embd_norm", "output_norm"))


def hybrid(
    label: Label, dims: Dims, attends: Sequence[int], ssm: Ssm, moe: Experts | None = None, *, moe_every: int = 1
) -> Shape:
    """Jamba (Mamba 1) and Granite (Mamba 2, tied): attention in the blocks of ``attends``, Mamba in the others."""
    recurrent = mamba(dims.width, ssm)
    if not ssm.groups:
        recurrent |= vectors(ssm.rank, "ssm_dt_norm") | vectors(ssm.state, "ssm_b_norm", "ssm_c_norm")
    plan = []
    for i in range(dims.blocks):
        routed = moe if i % moe_every == moe_every - 1 else None
        mixer = attention(dims) if i in attends else recurrent
        feed = mixture(dims.width, routed) if routed else gated(dims.width, dims.ffn)
        plan.append(vectors(dims.width, *PRE) | mixer | feed)
    keys = attention_keys(dims, attends) | ssm.keys() | {"rope.scaling.finetuned": False} | (moe.keys() if moe else {})
    keys.pop("expert_feed_forward_length", None)  # feed_forward_length holds it
    return make(label, dims, plan, keys, vectors(dims.width, "output_norm"), tied=ssm.groups > 0)


def lfm2(label: Label, dims: Dims, attends: Sequence[int]) -> Shape:
    """Short convolutions in the blocks that do not attend; the output's norm has an odd name."""
    matrices = {"in_proj": (dims.width, 3 * dims.width), "conv": (3, dims.width), "out_proj": (dims.width, dims.width)}
    short = {f"shortconv.{name}.weight": ne for name, ne in matrices.items()}
    common = vectors(dims.width, *PRE) | gated(dims.width, dims.ffn)
    plan = [common | (attention(dims, qk_norm=True) if i in attends else short) for i in range(dims.blocks)]
    keys = attention_keys(dims, attends) | {"shortconv.l_cache": 3}
    return make(label, dims, plan, keys, vectors(dims.width, "token_embd_norm"), tied=True)


def qwen3next(label: Label, dims: Dims, ssm: Ssm, moe: Experts) -> Shape:
    """Gated delta nets, and in every fourth block attention whose query carries a gate."""
    width, conv = dims.width, 2 * ssm.groups * ssm.state + ssm.inner
    delta = {"attn_qkv.weight": (width, conv), "attn_gate.weight": (width, ssm.inner)}
    delta |= {"ssm_conv1d.weight": (ssm.conv, conv), "ssm_ba.weight": (width, 2 * ssm.rank)}
    delta |= {"ssm_a": (ssm.rank,), "ssm_dt.bias": (ssm.rank,)}
    delta |= {"ssm_norm.weight": (ssm.state,), "ssm_out.weight": (ssm.inner, width)}
    full = attention(dims, qk_norm=True, query_gate=True)
    rest = vectors(width, *POST) | mixture(width, moe)
    plan = [(full if i % 4 == 3 else delta) | rest for i in range(dims.blocks)]
    keys = attention_keys(dims) | moe.keys() | ssm.keys()
    keys |= {"rope.dimension_count": dims.head // 4, "full_attention_interval": 4}
    return make(label, dims, plan, keys, vectors(width, "output_norm"))


def qwen35(label: Label, dims: Dims, ssm: Ssm, *, nextn_blocks: int = 0) -> Shape:
    """Gated delta nets and attention as in Qwen3-Next, without experts; a block for multi-token prediction attends."""
    width, conv = dims.width, 2 * ssm.groups * ssm.state + ssm.inner
    delta = {"attn_qkv.weight": (width, conv), "attn_gate.weight": (width, ssm.inner)}
    delta |= {"ssm_conv1d.weight": (ssm.conv, conv), "ssm_a": (ssm.rank,), "ssm_dt.bias": (ssm.rank,)}
    delta |= dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight"), (width, ssm.rank))
    delta |= {"ssm_norm.weight": (ssm.inner // ssm.rank,), "ssm_out.weight": (ssm.inner, width)}
    full = attention(dims, qk_norm=True, query_gate=True)
    rest = vectors(width, *POST) | gated(width, dims.ffn)
    plan = [(full if i % 4 == 3 else delta) | rest for i in range(dims.blocks)]
    plan += [full | rest | nextn(width, dims.vocabulary)] * nextn_blocks
    keys = attention_keys(dims) | ssm.keys() | {"rope.dimension_count": dims.head // 4, "full_attention_interval": 4}
    keys |= {"rope.dimension_sections": [dims.head // 8, 0, 0, 0]}
    keys |= {"nextn_predict_layers": nextn_blocks} if nextn_blocks else {}
    return make(label, dims, plan, keys, vectors(width, "output_norm"))


def gemma4(label: Label, dims: Dims, windowed: Sequence[bool], *, backbone: int = 0) -> Shape:
    """Gemma 4 with an output of its own and no per-layer embeddings; with ``backbone`` its assistant, a head of blocks
    without keys and values on a target so wide. Source: src/models/gemma4.cpp, src/models/gemma4-assistant.cpp.
    """
    width, head = dims.width, dims.head
    block = attention(dims, qk_norm=True) | gated(width, dims.ffn) | vectors(width, *SANDWICH[:3])
    block |= vectors(width, "post_ffw_norm") | vectors(1, "layer_output_scale")
    keys = attention_keys(dims) | {"embedding_length_per_layer_input": 0, "attention.sliding_window": 64}
    keys |= {"attention.sliding_window_pattern": [int(one) for one in windowed], "rope.dimension_count": head}
    keys |= {"attention.key_length_swa": head, "attention.value_length_swa": head, "rope.dimension_count_swa": head}
    ends = vectors(width, "output_norm") | vectors(head // 2, "rope_freqs")
    if backbone:
        block = {name: ne for name, ne in block.items() if not name.startswith(("attn_k", "attn_v"))}
        keys |= {"embedding_length_out": backbone, "nextn_predict_layers": dims.blocks}
        ends |= {
            "nextn.pre_projection.weight": (2 * backbone, width),
            "nextn.post_projection.weight": (width, backbone),
        }
    return make(label, dims, [block] * dims.blocks, keys, ends, tied=bool(backbone))


def falcon_h1(label: Label, dims: Dims, ssm: Ssm) -> Shape:
    """Attention and Mamba side by side in every block."""
    block = attention(dims) | mamba(dims.width, ssm) | gated(dims.width, dims.ffn)
    block |= vectors(dims.width, "attn_norm") | {"ffn_norm": (dims.width,)}  # src/models/falcon-h1.cpp: no ".weight"
    block.pop("ssm_norm.weight")
    keys = attention_keys(dims) | ssm.keys()
    return make(label, dims, [block] * dims.blocks, keys, vectors(dims.width, "output_norm"))


# ---- the list -------------------------------------------------------------------------------------


# fmt: off
def attention_shapes() -> list[Shape]:
    freqs: Any = {"ends": {"rope_freqs.weight": (32,)}, "tied": True}
    caps: Keys = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096}
    gemma2: Any = {"norms": SANDWICH, "tied": True, "keys": caps}
    gemma3: Any = {"norms": SANDWICH, "tied": True, "qk_norm": True}
    window, tiny_window = {"attention.sliding_window": 1024}, {"attention.sliding_window": 64}
    return [
        transformer(Label("llama3-70b-q3_k_s", "dense", "llama", "Q3_K_S"), Dims(80, 8192, 64, 8, 28672, 128256)),
        transformer(Label("llama3-8b-q3_k_l", "dense", "llama", "Q3_K_L"), Dims(32, 4096, 32, 8, 14336, 128256)),
        transformer(Label("llama-1b-q4_0", "dense", "llama", "Q4_0"), Dims(16, 2048, 32, 8, 8192, 128256)),
        transformer(Label("qwen2-7b", "dense", "qwen2"), Dims(28, 3584, 28, 4, 18944, 152064), bias=True),
        transformer(Label("qwen3-14b", "dense", "qwen3"), Dims(40, 5120, 40, 8, 17408, 151936, 128), qk_norm=True),
        gpt2(Label("gpt2-medium-f16", "dense", "gpt2", "F16"), Dims(24, 1024, 16, 16, 4096, 50257)),
        transformer(Label("tiny-llama", "dense", "llama"), TINY),
        transformer(Label("qwen2-0.5b-q8_0", "tied", "qwen2", "Q8_0"), Dims(24, 896, 14, 2, 4864, 151936),
                    bias=True, tied=True),
        transformer(Label("llama3.2-1b", "tied", "llama"), Dims(16, 2048, 32, 8, 8192, 128256), **freqs),
        transformer(Label("gemma-2b", "tied", "gemma"), Dims(18, 2048, 8, 1, 16384, 256000, 256), tied=True),
        transformer(Label("tiny-tied", "tied", "gemma", "Q8_0"), Dims(4, 256, 4, 1, 768, 4096, 128), tied=True),
        transformer(Label("gemma2-9b", "swa", "gemma2"), Dims(42, 3584, 16, 8, 14336, 256000, 256), **gemma2),
        transformer(Label("gemma3-27b", "swa", "gemma3"), Dims(62, 5376, 32, 16, 21504, 262208, 128),
                    **gemma3, keys=window),
        transformer(Label("tiny-swa", "swa", "gemma3"), TINY._replace(blocks=7), **gemma3, keys=tiny_window),
    ]


def moe_shapes() -> list[Shape]:
    tiny = Experts(8, 2, 256, 256, routing_bias=True)
    oss: Any = {"norms": POST, "bias": True, "moe": Experts(32, 4, 2880, bias=True)}
    oss |= {"extra": {"attn_sinks.weight": (64,), "attn_output.bias": (2880,)}}  # and a window in every second block
    oss |= {"keys": {"attention.sliding_window": 128}}
    glm: Any = {"norms": POST, "bias": True, "dense_lead": 1, "nextn_blocks": 1}
    glm |= {"keys": {"expert_shared_count": 1, "rope.dimension_count": 64}}
    groups: Keys = {"expert_group_count": 8, "expert_group_used_count": 4, "expert_gating_func": 2}
    return [
        transformer(Label("mixtral-8x7b", "moe", "llama"), Dims(32, 4096, 32, 8, 14336, 32000),
                    moe=Experts(8, 2, 14336)),
        transformer(Label("qwen3moe-30b-a3b", "moe", "qwen3moe"), Dims(48, 2048, 32, 4, 6144, 151936, 128),
                    moe=Experts(128, 8, 768), qk_norm=True),
        transformer(Label("gpt-oss-20b", "moe", "gpt-oss", "MXFP4_MOE"), Dims(24, 2880, 64, 8, 2880, 201088, 64),
                    **oss),
        transformer(Label("qwen1.5-moe-a2.7b", "moe", "qwen2moe"), Dims(24, 2048, 16, 16, 5632, 151936),
                    moe=Experts(60, 4, 1408, 5632, shared_gate=True), bias=True),
        transformer(Label("tiny-moe", "moe", "qwen3moe"), TINY, moe=Experts(8, 2, 256), qk_norm=True),
        transformer(Label("glm4.5-air", "nextn", "glm4moe"), Dims(46, 4096, 96, 8, 10944, 151552, 128),
                    moe=Experts(128, 8, 1408, 1408, routing_bias=True), **glm),
        transformer(Label("tiny-nextn", "nextn", "glm4moe"), TINY, moe=tiny, **glm),
        deepseek(Label("deepseek2-lite", "mla", "deepseek2"), Dims(27, 2048, 16, 1, 10944, 102400, 128),
                 Experts(64, 6, 1408, 2816), dense_lead=1),
        deepseek(Label("deepseek-v3-6-blocks", "mla", "deepseek2"), Dims(6, 7168, 128, 1, 18432, 129280, 128),
                 Experts(256, 8, 2048, 2048, routing_bias=True), dense_lead=3, q_rank=1536, keys=groups),
        deepseek(Label("tiny-mla", "mla", "deepseek2"), TINY._replace(head=64), tiny,
                 dense_lead=1, q_rank=256, kv_rank=256),
    ]


def recurrent_shapes() -> list[Shape]:
    return [
        pure_mamba(Label("mamba-1b", "recurrent", "mamba"), Dims(48, 2048, 0, 0, 0, 50280), Ssm(4096, 16, 128)),
        pure_mamba(Label("mamba2-1b", "recurrent", "mamba2"), Dims(48, 2048, 0, 0, 0, 50288), Ssm(4096, 128, 64, 1)),
        rwkv7(Label("rwkv7-1b", "recurrent", "rwkv7", "Q8_0"), Dims(24, 2048, 0, 0, 8192, 65536),
              {"w": 96, "a": 96, "v": 64, "g": 256}),
        pure_mamba(Label("tiny-mamba", "recurrent", "mamba"), Dims(4, 256, 0, 0, 0, 4096), Ssm(512, 16, 32)),
        hybrid(Label("jamba-mini", "hybrid", "jamba"), Dims(32, 4096, 32, 8, 14336, 65536), range(4, 32, 8),
               Ssm(8192, 16, 256), Experts(16, 2, 14336), moe_every=2),
        hybrid(Label("granite4-h-tiny", "hybrid", "granitehybrid"), Dims(40, 1536, 12, 4, 512, 100352),
               range(5, 40, 10), Ssm(3072, 128, 48, 1), Experts(64, 6, 512, 1024)),
        lfm2(Label("lfm2-1.2b", "hybrid", "lfm2"), Dims(16, 2048, 32, 8, 8192, 65536), (2, 5, 8, 10, 12, 14)),
        qwen3next(Label("qwen3next-80b-a3b", "hybrid", "qwen3next"), Dims(48, 2048, 16, 2, 0, 151936, 256),
                  Ssm(4096, 128, 32, 16), Experts(512, 10, 512, 512, shared_gate=True)),
        falcon_h1(Label("falcon-h1-1.5b", "hybrid", "falcon-h1"), Dims(24, 2048, 8, 2, 4096, 65537, 128),
                  Ssm(3072, 256, 48, 1)),
        hybrid(Label("tiny-hybrid", "hybrid", "granitehybrid"), TINY, (1, 3), Ssm(512, 64, 8, 1)),
    ]


# fmt: on

SHAPES: dict[str, Shape] = {shape.name: shape for shape in [*attention_shapes(), *moe_shapes(), *recurrent_shapes()]}

# ---- the files ------------------------------------------------------------------------------------


def write(path: Path, shape: Shape, *, tokenizer: bool = False) -> Path:
    """Write ``shape`` to ``path`` at its true size, with a hole for the weights.

    Args:
        path: the file.
        shape: one of ``SHAPES``.
        tokenizer: a vocabulary like Llama 3's (7 MB at its size) in place of none, with which loading takes longer.
    """
    return write_file(path, shape.metadata | (bpe(shape.vocabulary) if tokenizer else NO_TOKENIZER), shape.tensors)


def write_split(folder: Path, shape: Shape, parts: int) -> list[Path]:
    """Write ``shape`` as ``parts`` files, as llama.cpp's gguf-split does; the first one has all metadata."""
    step = -(-len(shape.tensors) // parts)
    pieces = [shape.tensors[i : i + step] for i in range(0, len(shape.tensors), step)]
    paths = []
    for i, piece in enumerate(pieces):
        keys = {"split.no": np.uint16(i), "split.count": np.uint16(len(pieces))}
        keys |= {"split.tensors.count": np.int32(len(shape.tensors))}
        path = folder / f"{shape.name}-{i + 1:05}-of-{len(pieces):05}.gguf"
        paths.append(write_file(path, keys if i else shape.metadata | NO_TOKENIZER | keys, piece))
    return paths


def write_file(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> Path:
    """One GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    fields = [b"GGUF", struct.pack("<IQQ", gguf.GGUF_VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = packed(value)
        fields += [string(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type]
        fields += [string(tensor.name), struct.pack(f"<I{len(tensor.ne)}QIQ", len(tensor.ne), *tensor.ne, kind, offset)]
        offset += padded(tensor.nbytes)
    header = b"".join(fields)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(padded(len(header)) + offset)
    return path


def packed(value: Value) -> tuple[int, bytes]:
    """(type, bytes) of a value; a Python int is a uint32, and an int32 in a list, as llama.cpp's converter writes."""
    kinds = gguf.GGUFValueType
    match value:
        case bool():
            return kinds.BOOL, struct.pack("<?", value)
        case np.uint16():
            return kinds.UINT16, value.tobytes()
        case np.int32():
            return kinds.INT32, value.tobytes()
        case int():
            return kinds.UINT32, struct.pack("<I", value)
        case float():
            return kinds.FLOAT32, struct.pack("<f", value)
        case str():
            return kinds.STRING, string(value)
    if isinstance(value[0], str):
        kind, data = kinds.STRING, b"".join(map(string, value))
    else:
        kind, data = kinds.INT32, np.array(value, np.int32).tobytes()
    return kinds.ARRAY, struct.pack("<IQ", kind, len(value)) + data


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def padded(size: int) -> int:
    return size + -size % ALIGNMENT


# ---- the vocabulary -------------------------------------------------------------------------------

NO_TOKENIZER: dict[str, Value] = {"tokenizer.ggml.model": "none"}


def bpe(size: int) -> dict[str, Value]:
    """A byte-level BPE vocabulary: the 256 bytes, words of letters, special tokens; merges as many as Llama 3 has."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]  # GPT-2's letters for bytes
    letters = str.maketrans("01234567", "etaoinsh")
    words = ["\u0120" + f"{i:o}".translate(letters) for i in range(size - len(characters) - SPECIAL_TOKENS)]
    tokens = [*characters, *words, *(f"<|reserved_special_token_{i}|>" for i in range(SPECIAL_TOKENS))]
    count = size * LLAMA3_MERGES // LLAMA3_TOKENS
    merges = [f"{word[:cut]} {word[cut:]}" for cut in (1, 2, 3, 4) for word in words if cut < len(word)][:count]
    first_special = size - SPECIAL_TOKENS
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(gguf.TokenType.NORMAL)] * first_special
        + [int(gguf.TokenType.CONTROL)] * SPECIAL_TOKENS,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first_special,
        "tokenizer.ggml.eos_token_id": first_special + 1,
    }


def small_shapes() -> dict[str, Shape]:
    """A shape of each kind of memory, for random weights that answer in milliseconds.

    In F16: tests compare answers whose prompts were read in other batches, and llama.cpp reads Q8_0 and Q4_0 in
    batches of 32 tokens and more by AMX, whose sums differ: a random mamba's logits by 14 to 17 % of their range. With
    AVX2, rounding Q8_0's activations to eight bits decided granite's answers of six of sixteen seeds.
    """
    dims = Dims(4, 256, 4, 2, 512, 1024)
    window: Keys = {"attention.sliding_window": 64}
    return {
        "llama": transformer(Label("llama", "dense", "llama", "F16"), dims),
        "mamba": pure_mamba(Label("mamba", "recurrent", "mamba", "F16"), dims, Ssm(512, 16, 32)),
        "granite": hybrid(Label("granite", "hybrid", "granitehybrid", "F16"), dims, (1, 3), Ssm(512, 64, 8, 1)),
        "lfm2": lfm2(Label("lfm2", "hybrid", "lfm2", "F16"), dims, (2,)),
        "gemma3": transformer(
            Label("gemma3", "swa", "gemma3", "F16"), dims, norms=SANDWICH, tied=True, qk_norm=True, keys=window
        ),
    }
