"""Memory of a placement by device: weights and KV cache as exact sums, compute buffers from a few dry runs.

llama.cpp reserves a compute buffer for the graph of one full batch. It depends on which kinds of blocks are on which
device, but hardly on their number: placements with the same :func:`layout` share dry runs. Measured for 34 models in
docs/evidence/memory.json; see docs/decisions/026-compute-buffers-come-from-dry-runs.md.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from ggufspec.errors import UsageError
from ggufspec.llamacpp import options
from ggufspec.llamacpp.gguf import Tensor
from ggufspec.llamacpp.options import (
    DENSE_FFN,
    EXPERTS,
    HEAD_BATCH,
    HIDDEN_RING,
    KV_TYPES,
    ContextOptions,
    Placement,
    is_remote,
    parse_override,
)
from ggufspec.llamacpp.rewind import way_back
from ggufspec.models import heads
from ggufspec.models.header import ModelHeader, block_of

HOST = options.HOST

_ALIGNMENT = 32  # bytes; alignment of tensors in ggml's buffers
_CUDA_ALIGNMENT, _CUDA_STEP = 128, 512
_CELLS = 256  # step of a cache's number of cells: src/llama-context.cpp, src/llama-kv-cache-iswa.cpp
_ALIKE_FROM = 3  # consecutive blocks on a device; more of them do not change the compute buffer

_PERIOD = 3  # longest period, in layers, of recurrent models' compute buffers: docs/evidence/memory.json

# Tensors outside the blocks by the layer that llama.cpp counts them to (src/llama-arch.cpp); the rest is the output's
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
_WITH_BLOCK_0 = ("token_embd_norm.", "per_layer_model_proj.", "per_layer_proj_norm.", "nextn.pre_projection.")
_WITH_ALL_BLOCKS = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_READS_CACHE = "gemma4-assistant"  # draft head without a cache: it reads that of the target's last two blocks
_PARTS = {"experts": re.compile(EXPERTS), "ffn": re.compile(DENSE_FFN)}  # what the first blocks may keep on the CPU


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory on one device by purpose; ``overhead``: everything outside llama.cpp's breakdown."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute + self.overhead

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.weights + other.weights,
            self.kv + other.kv,
            self.compute + other.compute,
            self.overhead + other.overhead,
        )


ByDevice = dict[str, Bytes]


def total(parts: Iterable[ByDevice]) -> ByDevice:
    """Return the memory of several models together."""
    found: ByDevice = {}
    for part in parts:
        for name, used in part.items():
            found[name] = found.get(name, Bytes()) + used
    return found


@dataclass(frozen=True, slots=True)
class Request:
    """Model with its placement and context; ``file`` has metadata and tensor shapes, weights are not needed.

    With ``target`` it is a draft head on that model, whose blocks may be in the target's file.
    """

    header: ModelHeader
    file: Path
    placement: Placement
    context: ContextOptions
    target: Request | None = None

    def resident(self, cards: Sequence[str]) -> ByDevice:
        """Return weights, caches and overhead by device."""
        if self.target is None:
            return resident(self.header, self.placement, self.context, cards)
        return resident_head(self, self.target, cards)


DryRun = Callable[[Sequence[Request]], list[ByDevice | str]]
"""Function that returns llama.cpp's allocation for each request, or the reason of a refusal."""


class Memory:
    """Memory estimates of models on GPUs, which are named in llama.cpp's order."""

    def __init__(self, cards: tuple[str, ...], dry_run: DryRun) -> None:
        self.dry_run = dry_run
        self._cards = cards
        self._answers: dict[object, list[ByDevice]] = {}  # by (model, context, layout)

    def resident(self, request: Request) -> ByDevice:
        return request.resident(self._cards)

    def estimates(self, requests: Sequence[Request]) -> list[ByDevice]:
        """Return the memory of each request, or slightly more.

        A few placements of each layout are dry-run, and the largest compute buffer counts for all. A request that
        llama.cpp refuses has no compute buffer.
        """
        keys: list[object] = [(id(one.header), one.context, self._layout(one)) for one in requests]
        alike: dict[object, list[Request]] = {}
        for key, one in zip(keys, requests, strict=True):
            if key not in self._answers:
                alike.setdefault(key, []).append(one)
        asked = [(key, one) for key, some in alike.items() for one in _samples(some)]
        answers = self.dry_run([one for _, one in asked]) if asked else []
        for (key, _), answer in zip(asked, answers, strict=True):
            known = self._answers.setdefault(key, [])
            if not isinstance(answer, str):
                known.append(answer)
        return [self._estimate(one, self._answers[key]) for key, one in zip(keys, requests, strict=True)]

    def _layout(self, request: Request) -> object:
        header, placement = request.header, request.placement
        if request.target is not None:  # draft heads also depend on the target's devices
            own = request.file == request.target.file
            there = layer_devices(request.target.header.blocks, request.target.placement, len(self._cards))
            return None if own else placement, there[-(header.nextn_blocks + 1) :], there[0]
        return layout(header, placement, self._cards) if header.regular else placement

    def _estimate(self, request: Request, answers: Sequence[ByDevice]) -> ByDevice:
        if answers and (request.target is not None or not request.header.regular):
            return answers[0]
        return {
            name: replace(used, compute=max((answer[name].compute for answer in answers), default=0))
            for name, used in self.resident(request).items()
        }


def _samples(alike: Sequence[Request]) -> Sequence[Request]:
    """Return placements of a layout to dry-run: the first (with recurrent blocks ``_PERIOD`` of them) and the last."""
    first = _PERIOD if any(alike[0].header.recurrent) else 1
    return (*alike[:first], *alike[first:][-1:])


def resident(header: ModelHeader, placement: Placement, context: ContextOptions, cards: Sequence[str] = ()) -> ByDevice:
    """Return weights, KV cache and recurrent state of ``HOST`` and every GPU, all exact; compute buffers are missing.

    ``cards`` are in llama.cpp's order, and share equally without a ``split``. Buffers of logits and hidden rows are
    ``overhead`` of the host. Caches of an architecture that is not ``regular`` are left out.
    """
    devices = layer_devices(header.blocks, placement, len(cards))
    weights = _weights(SameHeader(header), placement, tuple(cards))
    kv = _kv(header, devices, context, len(cards) + 1) if header.regular else [0] * (len(cards) + 1)
    rows = 4 * header.vocabulary * context.width + hidden_host_bytes(header, context)
    return {name: Bytes(weights[i], kv[i], overhead=0 if i else rows) for i, name in enumerate((HOST, *cards))}


def resident_head(head: Request, target: Request, cards: Sequence[str] = ()) -> ByDevice:
    """Return :func:`resident` of a draft head: a cache for its own blocks, and no weights if they are the target's.

    Source: ``llama_model::create_memory`` in src/llama-model.cpp.
    """
    in_target, count = head.file == target.file, len(cards) + 1
    read = heads.as_read(head.header if in_target else target.header, head.header)
    devices = layer_devices(head.header.blocks, head.placement, len(cards))
    weights = [0] * count if in_target else _weights(SameHeader(head.header), head.placement, tuple(cards))
    kv = [0] * count
    if head.header.architecture != _READS_CACHE:
        kv = _kv(read, devices[head.header.blocks - read.blocks :], head.context, count)
    rows = 4 * max(head.header.vocabulary, head.header.tokenizer.size) * head.context.width
    return {name: Bytes(weights[i], kv[i], overhead=0 if i else rows) for i, name in enumerate((HOST, *cards))}


def copied_cache(head: Request, target: Request, cards: Sequence[str] = ()) -> dict[str, int]:
    """Return by device the bytes that a draft head copies of the target's cache from other devices."""
    if head.header.architecture != _READS_CACHE:
        return {}
    blocks, cache = target.header.blocks, _kv_by_block(target.header, target.context)
    there = layer_devices(blocks, target.placement, len(cards))
    devices = {*layer_devices(head.header.blocks, head.placement, len(cards))[:-1]}
    last = range(max(0, blocks - 2), blocks)
    return {(HOST, *cards)[one]: sum(cache[block] for block in last if there[block] != one) for one in devices}


def lent_by(head: Request, target: Request, cards: Sequence[str] = ()) -> str:
    """Return the device of the target's output if a draft head uses that; empty if the head has its own."""
    own = {"token_embd.weight", "output.weight"} <= {tensor.name for tensor in head.header.tensors}
    if own and head.file != target.file:
        return ""
    return (HOST, *cards)[layer_devices(target.header.blocks, target.placement, len(cards))[-1]]


def hidden_host_bytes(header: ModelHeader, context: ContextOptions) -> int:
    """Return RAM for hidden rows: a batch (``output_reserve`` in src/llama-context.cpp), and a ring per sequence."""
    kept = context.batch + context.sequences * min(context.ctx_size, HIDDEN_RING)
    return 4 * header.embedding * len(context.hidden) * kept


def hidden_compute_bytes(header: ModelHeader, context: ContextOptions, devices: Sequence[int], count: int) -> list[int]:
    """Return bounds by device on compute buffers for hidden rows, which stay for a micro-batch."""
    found = [0] * count
    for source in context.hidden:
        found[devices[source]] += 4 * header.embedding * context.computed
    return found


def layer_devices(blocks: int, placement: Placement, cards: int) -> tuple[int, ...]:
    """Return the device of each block and of the output; 0: CPU. Source: get_layer_buft_list, src/llama-model.cpp."""
    offloaded = placement.offloaded(blocks) if cards else 0
    first = blocks + 1 - offloaded
    if cards < 2:
        return (0,) * first + (1,) * offloaded
    shares = [*placement.split[:cards], *[0.0] * (cards - len(placement.split))]
    if not any(shares):
        shares = [1.0] * cards
    ends: list[float] = []
    for share in shares:
        ends.append(_single((ends[-1] if ends else 0.0) + _single(share)))
    ends = [_single(end / ends[-1]) for end in ends]
    return (0,) * first + tuple(
        1 + min(bisect_right(ends, _single(i / offloaded)), cards - 1) for i in range(offloaded)
    )


@functools.lru_cache(maxsize=64)
def parts(same: SameHeader, override_tensor: tuple[str, ...]) -> tuple[str, ...]:
    """Return what decides the device of each tensor, for :func:`part_device`.

    It is the device of the first matching override (``create_tensor`` in src/llama-model-loader.cpp); ``experts`` or
    ``ffn`` in a block, which the first blocks may keep on the CPU; or empty: the tensor is with its layer.
    """
    overrides = [(re.compile(pattern), device) for pattern, device in map(parse_override, override_tensor)]

    def part(tensor: Tensor) -> str:
        for pattern, device in overrides:
            if pattern.search(tensor.name):
                return device
        if block_of(tensor) is None:
            return ""
        return next((part for part, pattern in _PARTS.items() if pattern.search(tensor.name)), "")

    return tuple(map(part, same.header.tensors))


def part_device(part: str, layer: int, device: int, placement: Placement, cards: Sequence[str]) -> int:
    """Return the device of a part of a layer; ``device`` is the layer's, 0 the CPU."""
    if part in ("", "experts", "ffn"):
        kept = {"": 0, "experts": placement.n_cpu_moe, "ffn": placement.n_cpu_ffn}[part]
        return 0 if layer < kept else device
    return 1 + cards.index(part) if part in cards else 0


def check_part(header: ModelHeader, part: str, flag: str) -> None:
    """Raise UsageError unless the model has the weights (``experts`` or ``ffn``) that ``flag`` keeps on the CPU."""
    if part in parts(SameHeader(header), ()):
        return
    if part == "experts":
        raise UsageError(f"{header.name} has no experts to keep on the CPU", f"leave {flag} away")
    raise UsageError(
        f"{header.name} has no dense feed-forward weights to keep on the CPU",
        f"leave {flag} away; --n-cpu-moe N keeps experts there",
    )


def check_overrides(header: ModelHeader, override_tensor: Sequence[str], cards: Sequence[str]) -> None:
    """Check ``PATTERN=DEVICE`` overrides against a model's tensors and the devices.

    Raises:
        UsageError: a pattern matches no tensor, or a device is missing.
    """
    for pattern, device in map(parse_override, override_tensor):
        if device not in (HOST, *cards):
            raise UsageError(
                f"-ot {pattern}={device} names a device that is not here",
                f"devices: {', '.join((HOST, *cards))}; -ot '{pattern}=CPU'",
            )
        if not any(re.search(pattern, tensor.name) for tensor in header.tensors):
            names = dict.fromkeys(tensor.name.removeprefix("blk.0.") for tensor in header.tensors)
            some = [name.removesuffix(".weight") for name in names if not name.startswith("blk.")]
            example = "ffn_.*_exps" if header.experts else "ffn_(up|down)"
            raise UsageError(
                f"-ot {pattern}={device} is found in no tensor's name of {header.name}",
                f"-ot '{example}=CPU'; a block's tensors and the others are {', '.join(some)}",
            )


def layout(header: ModelHeader, placement: Placement, cards: Sequence[str]) -> object:
    """Return all that compute buffers depend on; placements with equal layouts have about equal buffers.

    For each run of blocks on one device: the device, the devices of its parts, the kinds of its first, last and all
    blocks, and their number up to ``_ALIKE_FROM``.
    """
    sums = _sums(SameHeader(header), placement.mtp, placement.override_tensor)
    devices = layer_devices(header.blocks, placement, len(cards))

    def where(block: int) -> tuple[int, ...]:
        device = devices[block]
        own = sorted(part for part in sums.blocks[block] if part)
        return device, *(part_device(part, block, device, placement, cards) for part in own)

    runs = []
    for device, run in groupby(range(len(sums.kinds)), where):
        some = [sums.kinds[block] for block in run]
        runs.append((device, some[0], some[-1], frozenset(some), min(len(some), _ALIKE_FROM)))
    return tuple(runs), devices[-1], placement.override_tensor


def _single(value: float) -> float:
    """Round to single precision, as llama.cpp divides."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def padded(size: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-size // multiple) * multiple


class SameHeader:
    """Cache key of a header, by identity: hashing its contents costs more than what is cached."""

    __slots__ = ("header",)

    def __init__(self, header: ModelHeader) -> None:
        self.header = header

    def __hash__(self) -> int:
        return id(self.header)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameHeader) and other.header is self.header


@dataclass(frozen=True, slots=True)
class _Sums:
    """Bytes of a model's weights by destination, and a number for the kind of each computed block.

    ``blocks`` and ``largest`` (tensor) are by part (:func:`parts`); ``outside``: (place, part, bytes) of the other
    tensors; ``tied``: bytes of an embedding that is also the output, which a GPU copies unless an override places it.
    """

    blocks: tuple[Counter[str], ...]
    largest: tuple[dict[str, int], ...]
    kinds: tuple[int, ...]
    outside: tuple[tuple[str, str, int], ...]
    tied: int


@functools.lru_cache(maxsize=32)
def _sums(same: SameHeader, mtp: bool, override_tensor: tuple[str, ...]) -> _Sums:
    header = same.header
    main = header.blocks - (0 if mtp else header.nextn_blocks)  # llama.cpp skips MTP blocks otherwise
    blocks: list[Counter[str]] = [Counter() for _ in range(main)]
    largest: list[dict[str, int]] = [{} for _ in range(main)]
    shapes: list[set[object]] = [{header.windowed[i], ("recurrent", header.recurrent[i])} for i in range(main)]
    outside: Counter[tuple[str, str]] = Counter()
    tied = 0
    for tensor, part in zip(header.tensors, parts(same, override_tensor), strict=True):
        size, block = padded(tensor.size_bytes, _ALIGNMENT), block_of(tensor)
        if block is None:
            outside[_place(tensor.name, header.architecture), part] += size
            tied += size if tensor.name == "token_embd.weight" and header.tied and not part else 0
        elif block < main:
            shapes[block].add((tensor.name.split(".", 2)[2], tensor.shape, part))
            blocks[block][part] += size
            largest[block][part] = max(size, largest[block].get(part, 0))
    numbers: dict[object, int] = {}
    kinds = tuple(numbers.setdefault(frozenset(some), len(numbers)) for some in shapes)
    return _Sums(tuple(blocks), tuple(largest), kinds, tuple((*key, size) for key, size in outside.items()), tied)


def _place(name: str, architecture: str) -> str:
    if name.startswith(_INPUT):
        return "input"
    if name.startswith(_WITH_ALL_BLOCKS):
        return "with_all_blocks"
    return "with_block_0" if name.startswith(_WITH_BLOCK_0) and not architecture.startswith("lfm2") else "output"


@functools.lru_cache(maxsize=4096)
def _weights(same: SameHeader, placement: Placement, cards: tuple[str, ...]) -> list[int]:
    """Return the bytes of weights by device. Source: ``create_tensor`` in src/llama-model-loader.cpp."""
    sums = _sums(same, placement.mtp, placement.override_tensor)
    devices = layer_devices(same.header.blocks, placement, len(cards))
    found = [0] * (len(cards) + 1)
    for i, block in enumerate(sums.blocks):
        for part, size in block.items():
            found[part_device(part, i, devices[i], placement, cards)] += size
    layers = {"input": {0}, "output": {devices[-1]}, "with_block_0": {devices[0]}}
    layers["with_all_blocks"] = {*devices[: len(sums.blocks)]}
    for place, part, size in sums.outside:
        for device in {part_device(part, 0, device, placement, cards) for device in layers[place]}:
            found[device] += size
    found[devices[-1]] += sums.tied if devices[-1] else 0
    for index, card in enumerate(cards, 1):
        found[index] += cuda_padding_bytes(same) if found[index] and card.startswith("CUDA") else 0
    return found


@functools.lru_cache(maxsize=32)
def cuda_padding_bytes(same: SameHeader) -> int:
    """Return a bound on CUDA's padding of tensors: 128-byte alignment, whole kernel steps in the last row.

    Source: ``ggml_backend_cuda_buffer_type_get_alloc_size`` in ggml/src/ggml-cuda/ggml-cuda.cu.
    """
    found = 0
    for tensor in same.header.tensors:
        missing = 0 if tensor.type in ("f32", "f16", "bf16") else -tensor.shape[0] % _CUDA_STEP
        needed = tensor.size_bytes + tensor.size_bytes * missing // math.prod(tensor.shape)
        found += padded(needed, _CUDA_ALIGNMENT) - padded(tensor.size_bytes, _ALIGNMENT)
    return found


def _kv(header: ModelHeader, devices: Sequence[int], context: ContextOptions, count: int) -> list[int]:
    """Return bytes of caches and states by device (src/llama-kv-cache.cpp, src/llama-memory-recurrent.cpp)."""
    found = [0] * count
    cells = windowed_cells = context.cells
    if not context.swa_full:
        windowed_cells = padded(min(cells, header.sliding_window + context.computed), _CELLS)
    # Without flash attention the V cache has a column per token, as wide as the widest block's
    transposed = context.flash_attn == "off" or header.architecture == "grok"
    widest = max(header.values(i) for i in range(header.blocks)) if transposed else 0
    (block_k, bytes_k), (block_v, bytes_v) = KV_TYPES[context.cache_type_k], KV_TYPES[context.cache_type_v]
    state = padded(4 * header.conv_numbers, _ALIGNMENT) + padded(4 * header.state_numbers, _ALIGNMENT)
    state *= _states(header, context)
    for i in range(header.blocks):
        if header.recurrent[i]:
            found[devices[i]] += state
        if header.cached[i]:
            row = header.keys(i) // block_k * bytes_k
            if not header.latent:
                row += (widest if transposed else header.values(i)) // block_v * bytes_v
            found[devices[i]] += row * (windowed_cells if header.windowed[i] else cells)
    return [context.sequences * size for size in found]


def f16_scratch_bytes(header: ModelHeader, devices: Sequence[int], context: ContextOptions, count: int) -> list[int]:
    """Return bounds by device on CUDA's and HIP's extra buffer for flash attention on a cache that is not f16.

    It holds an f16 copy of one block's cache; only prompt kernels need it, and the buffer may peak elsewhere in the
    graph. Source: ``ggml_cuda_flash_attn_ext_get_alloc_size`` in ggml/src/ggml-cuda/fattn.cu.
    """
    found = [0] * count
    if context.flash_attn == "off":
        return found
    cells = {False: context.cells, True: context.cells}
    if not context.swa_full:
        cells[True] = padded(min(context.cells, header.sliding_window + context.computed), _CELLS)
    for i in range(header.blocks):
        if header.cached[i]:
            keys = header.keys(i) if context.cache_type_k != "f16" else 0
            values = header.values(i) if context.cache_type_v != "f16" and not header.latent else 0
            found[devices[i]] = max(found[devices[i]], 2 * (keys + values) * cells[header.windowed[i]])
    return found


def streaming_card(cards: Sequence[str]) -> str:
    """Return the GPU that computes large batches with CPU weights: the first that is no RPC worker's; empty if none.

    Source: ``ggml_backend_sched_backend_id_from_cur`` in ggml/src/ggml-backend.cpp.
    """
    return next((name for name in cards if not is_remote(name)), "")


def streamed_bytes(request: Request, cards: Sequence[str]) -> int:
    """Return a bound on the CPU's weights and caches that :func:`streaming_card` holds at once; 0 without weights.

    They are one weight (two of a hybrid with experts), the cache of a block (three times if latent), and
    :func:`activation_bytes`; for a draft head also the output, which may be the target's, as may the cache. Source:
    ``ggml_backend_sched_split_graph`` in ggml/src/ggml-backend.cpp, which frees a weight before the next one.
    """
    header, context, target = request.header, request.context, request.target
    if not streaming_card(cards) or context.computed < context.op_offload_min_batch or not context.op_offload:
        return 0
    devices = layer_devices(header.blocks, request.placement, len(cards))
    in_blocks, output = _on_host(request, cards)
    rows = context.computed if target is None else HEAD_BATCH
    kept = zip(_kv_by_block(header, context), devices, strict=False)
    caches = [(3 if header.latent else 1) * size for size, device in kept if device == 0]
    if target is None:  # few rows of logits are requested
        output = 0
    elif lent_by(request, target, cards) == HOST:
        output = _on_host(target, cards)[1]
    if target is not None and header.architecture == _READS_CACHE:
        there = layer_devices(target.header.blocks, target.placement, len(cards))[:-1]
        read = [*zip(_kv_by_block(target.header, target.context), there, strict=True)][-2:]
        caches.append(sum(size for size, device in read if device == 0))
    weights = max(in_blocks, default=0) * (2 if header.experts and any(header.recurrent) else 1) + output
    return weights + activation_bytes(header, rows) + max(caches, default=0) if weights else 0


def activation_bytes(header: ModelHeader, tokens: int) -> int:
    """Return a bound on how far copies shift later contents of a buffer: rows of a feed-forward and its input."""
    return 4 * tokens * (max(header.feed_forward, default=0) + header.embedding)


def _on_host(request: Request, cards: Sequence[str]) -> tuple[list[int], int]:
    """Return bytes of CPU weights: (those to copy one at a time, at most one per block and part; the output's)."""
    header, placement = request.header, request.placement
    sums = _sums(SameHeader(header), placement.mtp, placement.override_tensor)
    devices = layer_devices(header.blocks, placement, len(cards))
    found = [
        size
        for i, largest in enumerate(sums.largest)
        for part, size in largest.items()
        if part_device(part, i, devices[i], placement, cards) == 0
    ]
    output = 0 if devices[-1] else sums.tied
    for place, part, size in sums.outside:
        if place == "output" and part_device(part, 0, devices[-1], placement, cards) == 0:
            output += size
        elif place.startswith("with_") and part_device(part, 0, devices[0], placement, cards) == 0:
            found.append(size)
    return found, output


def _kv_by_block(header: ModelHeader, context: ContextOptions) -> list[int]:
    return _kv(header, range(header.blocks), context, header.blocks)


def fused_bytes(header: ModelHeader, devices: Sequence[int], context: ContextOptions, count: int) -> list[int]:
    """Return bounds by device on what fused or reordered operations add to compute buffers: longer-lived activations.

    With experts: each expert's rows of a micro-batch until they are weighted (CUDA, Vulkan). Otherwise one row per
    token (Vulkan), except for a dense model partly on the CPU with flash attention and ``op_offload``, where copied CPU
    weights are the peak. A hybrid entirely on GPUs without flash attention adds a mask. Vulkan's own dry runs are
    within these bounds: docs/evidence/backend-bytes.json.

    Source: ``add_alloc_dep`` in ggml/src/ggml-cuda/ggml-cuda.cu, ``ggml_vk_graph_optimize`` in
    ggml/src/ggml-vulkan/ggml-vulkan.cpp.
    """
    whole, masked, hybrid = 0 not in devices, context.flash_attn == "off", any(header.recurrent)
    kept = whole or masked or hybrid or not context.op_offload
    size = 4 * context.computed * header.embedding * (header.experts_used or kept)
    if whole and masked and hybrid:
        size += 2 * context.computed * context.cells
    computed = devices[: header.blocks - header.nextn_blocks]
    return [size if any(header.cached) and device in computed else 0 for device in range(count)]


def has_snapshots(header: ModelHeader) -> bool:
    """Return whether rollback takes a recurrent state for each token."""
    return any(header.recurrent) and way_back(header.architecture, options.REWIND_BY["target"]) == "snapshots"


def _states(header: ModelHeader, context: ContextOptions) -> int:
    """Return the number of recurrent states allocated for rollback (llamacpp/params)."""
    if not context.rewind:
        return 1
    more = {"snapshots": min(context.rewind, context.computed - 2), "checkpoint": 1, "none": 0}
    return 1 + more[way_back(header.architecture, context.rewind_by)]
