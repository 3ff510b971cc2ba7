"""Bytes per device of a placement, by formula. Pure: microseconds a placement, so that thousands can be ranked.

Weights and KV are exact; the compute buffer is an upper bound, held to llama.cpp's own dry run
(:mod:`ggufspec.llamacpp.dryrun`) by docs/evidence/memory-formula.json. What CUDA takes of its own is not here: its
context, scratch for a quantised KV cache, copies of inputs where several cards work as a pipeline.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ggufspec.llamacpp.options import KV_TYPES, ContextOptions, Placement
from ggufspec.llamacpp.rewind import way_back
from ggufspec.models.header import ModelHeader, block_of
from ggufspec.planning.allocator import ALIGNMENT
from ggufspec.planning.compute import graph
from ggufspec.planning.parts import Batch, Kind, Trunk, Where, begins_with_state

HOST = "CPU"

_KEPT_HEADERS = 16
# Architectures whose graph is followed node by node, and held to the dry run; the others' are near, hence the margin.
_FOLLOWED = frozenset(
    {
        "deepseek2",
        "falcon-h1",
        "gemma",
        "gemma2",
        "gemma3",
        "glm4moe",
        "gpt-oss",
        "gpt2",
        "granitehybrid",
        "jamba",
        "lfm2",
        "llama",
        "mamba",
        "mamba2",
        "qwen2",
        "qwen2moe",
        "qwen3",
        "qwen3moe",
        "qwen3next",
        "rwkv7",
    }
)
_MARGIN = 1.1
_REPEATS = 4  # of a run of blocks: after so many the allocator goes round in circles
_LONGEST_RUN = 8
_KEPT_GRAPHS = 4096
_PERIOD = 2
_STAGED_TOKENS = 32  # ggml_backend_cuda_device_offload_op, ggml/src/ggml-cuda/ggml-cuda.cu
_COPIES = 4  # GGML_SCHED_MAX_COPIES, where several cards have all layers: src/llama-context.cpp, pipeline_parallel
_CELLS = 256  # cells of a cache come in multiples: src/llama-context.cpp, src/llama-kv-cache-iswa.cpp

# Tensors outside the blocks by the layer that llama.cpp counts them to (src/llama-arch.cpp); the rest is the output's.
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
_WITH_BLOCK_0 = ("token_embd_norm.", "per_layer_model_proj.", "per_layer_proj_norm.")
_WITH_ALL_BLOCKS = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_EXPERTS = tuple(f"ffn_{part}_{kind}." for part in ("up", "down", "gate", "gate_up") for kind in ("exps", "chexps"))
# build_moe_ffn with norm_w, whatever expert_weights_norm says: src/models/*.cpp
_WEIGHTS_NORMED = frozenset(
    [
        "arctic",
        "dbrx",
        "ernie4_5-moe",
        "gemma4",
        "granitemoe",
        "granitehybrid",
        "granite_swa",
        "grok",
        "grovemoe",
        "kimi-linear",
        "lfm2moe",
        "llama",
        "maple",
        "mellum",
        "mimo2",
        "minimax-01",
        "minimax-m2",
        "mistral3",
        "phimoe",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen3vlmoe",
        "rnd1",
        "smallthinker",
    ]
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory on one device by what it is for. ``overhead`` is what no breakdown of llama.cpp counts."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.compute + self.overhead

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.weights + other.weights,
            self.kv + other.kv,
            self.compute + other.compute,
            self.overhead + other.overhead,
        )


def estimate(
    header: ModelHeader,
    placement: Placement,
    context: ContextOptions,
    cards: tuple[str, ...] = (),
    *,
    staging: bool = False,
) -> dict[str, Bytes]:
    """What one model takes on each device.

    Args:
        header: the model.
        placement: its layers; ``split`` has a share per card where there is more than one, equal shares without.
        context: its context.
        cards: names of the devices that layers can be offloaded to, in llama.cpp's order.
        staging: whether the first card computes with weights of the host in batches of 32 tokens and more, one weight
            at a time copied there, as GPUs do and RPC devices do not (``op_offload``, ggml/src/ggml-backend.cpp). An
            upper bound that no dry run has been held to.

    Returns:
        Bytes by device: ``HOST`` and every card, zeros where it takes nothing. The logits' buffer in host memory is
        the host's ``overhead``.
    """
    sizes = _sizes(header)
    devices = _devices(placement, header.blocks, len(cards))
    weights = sizes.weights(devices, placement.n_cpu_moe, len(cards) + 1)
    kv = sizes.kv(devices, context, len(cards) + 1)
    compute = sizes.compute(devices, placement.n_cpu_moe, context, len(cards) + 1)
    if staging and cards:
        first = sizes.staged(devices, placement.n_cpu_moe, context)
        compute = (compute[0], max(compute[1], first), *compute[2:])
    logits = 4 * header.vocabulary * context.width
    return {name: Bytes(weights[i], kv[i], compute[i], 0 if i else logits) for i, name in enumerate((HOST, *cards))}


def _devices(placement: Placement, blocks: int, cards: int) -> tuple[int, ...]:
    """Where each block and the output are; 0 is the host. Source: ``get_layer_buft_list`` in src/llama-model.cpp."""
    if not cards:
        return (0,) * (blocks + 1)
    shares = [*placement.split[:cards], *[0.0] * (cards - len(placement.split))]
    if not any(shares):
        shares = [1.0] * cards
    ends: list[float] = []
    for share in shares:
        ends.append(_single((ends[-1] if ends else 0.0) + _single(share)))
    ends = [_single(end / ends[-1]) for end in ends]
    offloaded = placement.offloaded(blocks)
    first = blocks + 1 - offloaded
    return (0,) * first + tuple(
        1 + min(bisect_right(ends, _single(i / offloaded)), cards - 1) for i in range(offloaded)
    )


def _single(value: float) -> float:
    """``value`` in single precision, as llama.cpp divides."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class _Sizes:
    """What a header comes to, summed once for all placements."""

    def __init__(self, header: ModelHeader) -> None:
        self.header = header
        self.block_bytes = [0] * header.blocks
        self.expert_bytes = [0] * header.blocks
        self.input_bytes = self.output_bytes = self.shared_bytes = self.first_bytes = embedding = 0
        self.largest = [0] * header.blocks
        shapes: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(header.blocks)]
        main = header.blocks - header.nextn_blocks
        for tensor in header.tensors:
            size = _padded(tensor.size_bytes, ALIGNMENT)
            block = block_of(tensor)
            if block is not None:
                if block >= main:
                    continue  # llama.cpp leaves them out unless it is told to predict further tokens
                name = tensor.name.split(".", 2)[2]
                shapes[block].append((name, tensor.shape))
                self.largest[block] = max(self.largest[block], size)
                (self.expert_bytes if name.startswith(_EXPERTS) else self.block_bytes)[block] += size
            elif tensor.name.startswith(_INPUT):
                self.input_bytes += size
                embedding = size if tensor.name == "token_embd.weight" else embedding
            elif tensor.name.startswith(_WITH_ALL_BLOCKS):
                self.shared_bytes += size
            elif tensor.name.startswith(_WITH_BLOCK_0) and header.architecture not in ("lfm2", "lfm2moe"):
                self.first_bytes += size
            else:
                self.output_bytes += size
        self.tied_bytes = embedding if header.tied else 0
        self.main = main
        self.values_most = max(header.values(i) for i in range(header.blocks))
        kinds: dict[Kind, int] = {}
        self.kind_of = [kinds.setdefault(self._kind(i, shapes[i]), len(kinds)) for i in range(main)]
        self.kinds = list(kinds)
        self.strays = [
            i
            for i, (kind, following) in enumerate(pairwise(self.kind_of))
            if _ends_with_attention(self.kinds[kind]) and begins_with_state(self.kinds[following])
        ]
        self.trunk = _trunk(header, self.values_most)
        self.graphs: OrderedDict[object, tuple[int, ...]] = OrderedDict()

    def _kind(self, block: int, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Kind:
        header = self.header
        windowed, recurrent = header.windowed[block], header.recurrent[block]
        return Kind(
            shapes=tuple(sorted(shapes)),
            heads=header.heads[block],
            kv_heads=header.kv_heads[block],
            key_size=header.key_size_windowed if windowed else header.key_size,
            value_size=header.value_size_windowed if windowed else header.value_size,
            windowed=windowed,
            recurrent=recurrent,
            conv_numbers=header.conv_numbers if recurrent else 0,
            state_numbers=header.state_numbers if recurrent else 0,
        )

    def weights(self, devices: Sequence[int], n_cpu_moe: int, count: int) -> list[int]:
        """Bytes of weights by device: src/llama-model-loader.cpp, ``create_tensor``."""
        found = [0] * count
        found[0] += self.input_bytes
        for i in range(self.main):
            found[devices[i]] += self.block_bytes[i]
            found[0 if i < n_cpu_moe else devices[i]] += self.expert_bytes[i]
        output = devices[-1]
        found[output] += self.output_bytes + (self.tied_bytes if output else 0)
        found[devices[0]] += self.first_bytes
        for device in set(devices[: self.main]):
            found[device] += self.shared_bytes
        return found

    def kv(self, devices: Sequence[int], context: ContextOptions, count: int) -> list[int]:
        """Bytes of caches and states by device: src/llama-kv-cache.cpp, src/llama-memory-recurrent.cpp."""
        header, found = self.header, [0] * count
        full, windowed = context.cells, self._cells_windowed(context)
        turned = self._values_turned(context)
        (block_k, bytes_k), (block_v, bytes_v) = KV_TYPES[context.cache_type_k], KV_TYPES[context.cache_type_v]
        state = _padded(4 * header.conv_numbers, ALIGNMENT) + _padded(4 * header.state_numbers, ALIGNMENT)
        state *= self._states(context)
        for i in range(header.blocks):
            if header.recurrent[i]:
                found[devices[i]] += state
            if header.cached[i]:
                many = windowed if header.windowed[i] else full
                size = many * (header.keys(i) // block_k * bytes_k)
                if not header.latent:
                    size += many * ((self.values_most if turned else header.values(i)) // block_v * bytes_v)
                found[devices[i]] += size
        return found

    def _states(self, context: ContextOptions) -> int:
        """Recurrent states that are kept, so that tokens can be taken back: llamacpp/params."""
        if not context.rewind:
            return 1
        more = {"snapshots": min(context.rewind, context.computed - 2), "checkpoint": 1, "none": 0}
        return 1 + more[way_back(self.header.architecture, context.rewind_by)]

    def compute(self, devices: Sequence[int], n_cpu_moe: int, context: ContextOptions, count: int) -> tuple[int, ...]:
        """Bytes of compute buffers by device."""
        batch = self._batch(context, devices)
        pipelined = count > 2 and all(devices) and not n_cpu_moe
        blocks = tuple((kind, devices[i], 0 if i < n_cpu_moe else devices[i]) for i, kind in enumerate(self.kind_of))
        key = (batch, _shortened(blocks), devices[-1], count, pipelined)
        if key not in self.graphs:
            placed = [(self.kinds[kind], Where(device, experts)) for kind, device, experts in key[1]]
            peaks = graph(self.trunk, batch, placed, devices[-1]).peaks(count, _COPIES if pipelined else 1)
            margin = 1 if self.header.architecture in _FOLLOWED else _MARGIN
            self.graphs[key] = tuple(int(peak * margin) for peak in peaks)
            if len(self.graphs) > _KEPT_GRAPHS:
                self.graphs.popitem(last=False)
        return self.graphs[key]

    def staged(self, devices: Sequence[int], n_cpu_moe: int, context: ContextOptions) -> int:
        """Compute buffer of a card that computes for the host too: the whole graph's, and the largest weight."""
        hosted = [self.largest[i] for i in range(self.main) if not devices[i] or i < n_cpu_moe]
        if not hosted or context.computed < _STAGED_TOKENS:
            return 0
        return self.compute([1] * len(devices), 0, context, 2)[1] + max(hosted)

    def _batch(self, context: ContextOptions, devices: Sequence[int]) -> Batch:
        header = self.header
        tokens = context.computed
        return Batch(
            tokens=tokens,
            outputs=min(tokens, context.width),
            cells=context.cells if any(header.cached) else 0,
            cells_windowed=self._cells_windowed(context) if any(header.windowed) else 0,
            flash=self._flash(context, devices),
            values_turned=self._values_turned(context),
            cache_type_k=KV_TYPES[context.cache_type_k],
            cache_type_v=KV_TYPES[context.cache_type_v],
            turn_k=_turn(header.key_size) if KV_TYPES[context.cache_type_k][0] > 1 else 0,
            turn_v=min(_turn(header.value_size), 64) if KV_TYPES[context.cache_type_v][0] > 1 else 0,
        )

    def _cells_windowed(self, context: ContextOptions) -> int:
        full = context.cells
        if context.swa_full:
            return full
        tokens = context.computed
        return _padded(min(full, self.header.sliding_window + tokens), _CELLS)

    def _values_turned(self, context: ContextOptions) -> bool:
        """Whether the V cache is made for attention without flash, before ``auto`` is known."""
        return context.flash_attn == "off" or self.header.architecture == "grok"

    def _flash(self, context: ContextOptions, devices: Sequence[int]) -> bool:
        """Whether attention is flash attention: ``resolve_fused_ops`` in src/llama-context.cpp.

        ``auto`` gives it up where one operation of it would leave its block's device: in a hybrid model, those before a
        block on a card whose states are loaded early go there.
        """
        if self._values_turned(context):
            return False
        return context.flash_attn == "on" or not any(devices[i + 1] and not devices[i] for i in self.strays)


_Block = TypeVar("_Block")


@functools.lru_cache(maxsize=4096)
def _shortened(blocks: tuple[_Block, ...]) -> tuple[_Block, ...]:
    """``blocks`` with what is repeated over and over left out.

    The last blocks are kept, since outputs are picked in the last one, and the parity of what is left out is even.
    """
    kept: list[_Block] = []
    start = 0
    while start < len(blocks):
        best = 0, 1
        for length in range(1, min(_LONGEST_RUN, len(blocks) - start) + 1):
            times = 1
            run = blocks[start : start + length]
            while blocks[start + times * length : start + (times + 1) * length] == run:
                times += 1
            if times > _REPEATS and times * length > best[0] * best[1]:
                best = times, length
        times, length = best
        if times:
            spared = (times - _REPEATS) // _PERIOD * _PERIOD
            kept += blocks[start : start + (times - spared) * length]
            start += times * length
        else:
            kept.append(blocks[start])
            start += 1
    return tuple(kept)


def _ends_with_attention(kind: Kind) -> bool:
    """Whether the graph of the block has been asked for up to its attention and no further."""
    return not kind.recurrent and not any(name == "ffn_gate_inp.weight" for name, _ in kind.shapes)


def _turn(head_size: int) -> int:
    """Edge of the Hadamard matrix that spreads outliers before quantisation: ``build_input_k_rot``."""
    return 0 if head_size % 64 else head_size & -head_size


def _trunk(header: ModelHeader, values_most: int) -> Trunk:
    def own(key: str) -> object:
        return header.metadata.get(f"{header.architecture}.{key}")

    groups, groups_used = own("expert_group_count"), own("expert_group_used_count")
    return Trunk(
        architecture=header.architecture,
        embedding=header.embedding,
        vocabulary=header.vocabulary,
        experts_used=header.experts_used,
        expert_groups=groups if isinstance(groups, int) else 0,
        expert_groups_used=groups_used if isinstance(groups_used, int) else 0,
        weights_normed=header.architecture in _WEIGHTS_NORMED or bool(own("expert_weights_norm")),
        weights_scaled=own("expert_weights_scale") not in (None, 0, 1),
        windows=any(header.windowed),
        value_width=values_most,
        latent=bool(header.latent),
        layer_norm=own("attention.layer_norm_epsilon") is not None,
        embedding_norm=header.architecture not in ("lfm2", "lfm2moe")
        and any(tensor.name == "token_embd_norm.weight" for tensor in header.tensors),
        learned_positions=any(tensor.name == "position_embd.weight" for tensor in header.tensors),
    )


_kept: OrderedDict[int, _Sizes] = OrderedDict()


def _sizes(header: ModelHeader) -> _Sizes:
    """The sums of ``header``, kept for the latest few headers by identity."""
    found = _kept.get(id(header))
    if found is None or found.header is not header:
        found = _kept[id(header)] = _Sizes(header)
        if len(_kept) > _KEPT_HEADERS:
            _kept.popitem(last=False)
    return found
