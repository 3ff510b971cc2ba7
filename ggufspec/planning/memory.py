"""Memory use of a placement by device: exact sums for weights and KV cache, dry runs for compute buffers.

llama.cpp reserves a compute buffer on each device for the graph of a full batch. Its size depends on which kinds of
blocks are on which device but hardly on their number, so placements with the same :func:`layout` share dry runs. See
docs/evidence/memory.json (34 measured models) and docs/decisions/026-compute-buffers-come-from-dry-runs.md.
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
from ggufspec.llamacpp.gguf import GgufTensor
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
from ggufspec.llamacpp.rewind import rollback_kind
from ggufspec.models import heads
from ggufspec.models.header import ModelHeader, block_of

HOST = options.HOST

_ALIGNMENT = 32  # alignment of tensors in ggml's buffers, in bytes
_CUDA_ALIGNMENT, _CUDA_STEP = 128, 512
_CELLS = 256  # the number of cache cells is a multiple of this: src/llama-context.cpp, src/llama-kv-cache-iswa.cpp
_ALIKE_FROM = 3  # number of consecutive blocks on a device after which further ones do not change the compute buffer

_PERIOD = 3  # compute buffers of recurrent models repeat after at most this many layers: docs/evidence/memory.json

# Tensors outside the blocks, by the layer that llama.cpp assigns them to (src/llama-arch.cpp); others go to the output
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
_WITH_BLOCK_0 = ("token_embd_norm.", "per_layer_model_proj.", "per_layer_proj_norm.", "nextn.pre_projection.")
_WITH_ALL_BLOCKS = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_READS_CACHE = "gemma4-assistant"  # architecture of a draft head that reads the cache of the target's last two blocks
_PARTS = {"experts": re.compile(EXPERTS), "ffn": re.compile(DENSE_FFN)}  # weights that may stay on the CPU


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Memory used on one device by purpose; ``overhead``: everything outside llama.cpp's breakdown."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute + self.overhead

    def __add__(self, other: DeviceBytes) -> DeviceBytes:
        return DeviceBytes(
            self.weights + other.weights,
            self.kv + other.kv,
            self.compute + other.compute,
            self.overhead + other.overhead,
        )


ByDevice = dict[str, DeviceBytes]


def total(parts: Iterable[ByDevice]) -> ByDevice:
    """Return the total memory of several models by device."""
    found: ByDevice = {}
    for part in parts:
        for name, used in part.items():
            found[name] = found.get(name, DeviceBytes()) + used
    return found


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Model with its placement and context; ``file`` needs metadata and tensor shapes but no weights.

    If ``target`` is given, the model is a draft head for it, possibly in the same file.
    """

    header: ModelHeader
    file: Path
    placement: Placement
    context: ContextOptions
    target: MemoryRequest | None = None

    def resident(self, cards: Sequence[str]) -> ByDevice:
        """Return weights, caches and overhead by device."""
        if self.target is None:
            return resident(self.header, self.placement, self.context, cards)
        return resident_head(self, self.target, cards)


DryRun = Callable[[Sequence[MemoryRequest]], list[ByDevice | str]]
"""Function that returns llama.cpp's allocation for each request, or its error message if it refuses the request."""


class MemoryEstimates:
    """Memory estimates for models on GPUs; ``cards``: GPU names in llama.cpp's order."""

    def __init__(self, cards: tuple[str, ...], dry_run: DryRun) -> None:
        self.dry_run = dry_run
        self._cards = cards
        self._answers: dict[object, list[ByDevice]] = {}  # results of dry runs by (model, context, layout)

    def resident(self, request: MemoryRequest) -> ByDevice:
        return request.resident(self._cards)

    def estimates(self, requests: Sequence[MemoryRequest]) -> list[ByDevice]:
        """Return the memory of each request, perhaps slightly overestimated.

        A few placements per layout are dry-run, and the largest compute buffer among them is used for all. If llama.cpp
        refuses all of them, no compute buffer is counted.
        """
        keys: list[object] = [(id(one.header), one.context, self._layout(one)) for one in requests]
        alike: dict[object, list[MemoryRequest]] = {}
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

    def _layout(self, request: MemoryRequest) -> object:
        header, placement = request.header, request.placement
        if request.target is not None:  # a draft head's memory also depends on the target's devices
            own = request.file == request.target.file
            there = layer_devices(request.target.header.blocks, request.target.placement, len(self._cards))
            return None if own else placement, there[-(header.nextn_blocks + 1) :], there[0]
        return layout(header, placement, self._cards) if header.regular else placement

    def _estimate(self, request: MemoryRequest, answers: Sequence[ByDevice]) -> ByDevice:
        if answers and (request.target is not None or not request.header.regular):
            return answers[0]
        return {
            name: replace(used, compute=max((answer[name].compute for answer in answers), default=0))
            for name, used in self.resident(request).items()
        }


def _samples(alike: Sequence[MemoryRequest]) -> Sequence[MemoryRequest]:
    """Return the placements of a layout to dry-run: the first (``_PERIOD`` of them if recurrent) and the last."""
    first = _PERIOD if any(alike[0].header.recurrent) else 1
    return (*alike[:first], *alike[first:][-1:])


def resident(header: ModelHeader, placement: Placement, context: ContextOptions, cards: Sequence[str] = ()) -> ByDevice:
    """Return the exact bytes of weights, KV cache and recurrent state on ``HOST`` and each GPU (no compute buffers).

    ``cards`` are in llama.cpp's order; without a ``split``, they share layers equally. Buffers for logits and hidden
    states count as the host's ``overhead``. Caches are not counted if the architecture is not ``regular``.
    """
    devices = layer_devices(header.blocks, placement, len(cards))
    weights = _weights(SameHeader(header), placement, tuple(cards))
    kv = _kv(header, devices, context, len(cards) + 1) if header.regular else [0] * (len(cards) + 1)
    rows = 4 * header.vocabulary * context.max_outputs + hidden_host_bytes(header, context)
    return {name: DeviceBytes(weights[i], kv[i], overhead=0 if i else rows) for i, name in enumerate((HOST, *cards))}


def resident_head(head: MemoryRequest, target: MemoryRequest, cards: Sequence[str] = ()) -> ByDevice:
    """Return a draft head's :func:`resident` bytes: its own blocks' cache, and weights outside the target's file.

    Source: ``llama_model::create_memory`` in src/llama-model.cpp.
    """
    in_target, count = head.file == target.file, len(cards) + 1
    read = heads.as_read(head.header if in_target else target.header, head.header)
    devices = layer_devices(head.header.blocks, head.placement, len(cards))
    weights = [0] * count if in_target else _weights(SameHeader(head.header), head.placement, tuple(cards))
    kv = [0] * count
    if head.header.architecture != _READS_CACHE:
        kv = _kv(read, devices[head.header.blocks - read.blocks :], head.context, count)
    rows = 4 * max(head.header.vocabulary, head.header.tokenizer.size) * head.context.max_outputs
    return {name: DeviceBytes(weights[i], kv[i], overhead=0 if i else rows) for i, name in enumerate((HOST, *cards))}


def copied_cache(head: MemoryRequest, target: MemoryRequest, cards: Sequence[str] = ()) -> dict[str, int]:
    """Return how many bytes of the target's cache a draft head copies to each of its devices from other devices."""
    if head.header.architecture != _READS_CACHE:
        return {}
    blocks, cache = target.header.blocks, _kv_by_block(target.header, target.context)
    there = layer_devices(blocks, target.placement, len(cards))
    devices = {*layer_devices(head.header.blocks, head.placement, len(cards))[:-1]}
    last = range(max(0, blocks - 2), blocks)
    return {(HOST, *cards)[one]: sum(cache[block] for block in last if there[block] != one) for one in devices}


def output_device(head: MemoryRequest, target: MemoryRequest, cards: Sequence[str] = ()) -> str:
    """Return the device of the target's output layer if a draft head uses that layer; "" if the head has its own."""
    own = {"token_embd.weight", "output.weight"} <= {tensor.name for tensor in head.header.tensors}
    if own and head.file != target.file:
        return ""
    return (HOST, *cards)[layer_devices(target.header.blocks, target.placement, len(cards))[-1]]


def hidden_host_bytes(header: ModelHeader, context: ContextOptions) -> int:
    """Return RAM for hidden states: one batch (``output_reserve``, src/llama-context.cpp) and a ring per sequence."""
    kept = context.batch + context.sequences * min(context.ctx_size, HIDDEN_RING)
    return 4 * header.embedding * len(context.hidden) * kept


def hidden_compute_bytes(header: ModelHeader, context: ContextOptions, devices: Sequence[int], count: int) -> list[int]:
    """Return upper bounds, by device, on compute buffers for hidden states, which are kept for one micro-batch."""
    found = [0] * count
    for source in context.hidden:
        found[devices[source]] += 4 * header.embedding * context.computed
    return found


def layer_devices(blocks: int, placement: Placement, cards: int) -> tuple[int, ...]:
    """Return the device index of each block and the output (0: CPU), like get_layer_buft_list (src/llama-model.cpp)."""
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
def part_rules(same: SameHeader, override_tensor: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rule that decides each tensor's device, for :func:`part_device`.

    A rule is the device of the first matching override (``create_tensor`` in src/llama-model-loader.cpp), ``experts``
    or ``ffn`` for tensors that the first blocks may keep on the CPU, or empty for the layer's own device.
    """
    overrides = [(re.compile(pattern), device) for pattern, device in map(parse_override, override_tensor)]

    def part(tensor: GgufTensor) -> str:
        for pattern, device in overrides:
            if pattern.search(tensor.name):
                return device
        if block_of(tensor) is None:
            return ""
        return next((part for part, pattern in _PARTS.items() if pattern.search(tensor.name)), "")

    return tuple(map(part, same.header.tensors))


def part_device(part: str, layer: int, device: int, placement: Placement, cards: Sequence[str]) -> int:
    """Return the device index of a part of a layer; ``device`` is the layer's own device (0: CPU)."""
    if part in ("", "experts", "ffn"):
        kept = {"": 0, "experts": placement.n_cpu_moe, "ffn": placement.n_cpu_ffn}[part]
        return 0 if layer < kept else device
    return 1 + cards.index(part) if part in cards else 0


def check_part(header: ModelHeader, part: str, flag: str) -> None:
    """Raise UsageError if the model lacks the weights (``experts`` or ``ffn``) that ``flag`` would keep on the CPU."""
    if part in part_rules(SameHeader(header), ()):
        return
    if part == "experts":
        raise UsageError(f"{header.name} has no experts to keep on the CPU", f"leave {flag} out")
    raise UsageError(
        f"{header.name} has no dense feed-forward weights to keep on the CPU",
        f"leave {flag} out; --n-cpu-moe N keeps experts there",
    )


def check_overrides(header: ModelHeader, override_tensor: Sequence[str], cards: Sequence[str]) -> None:
    """Check ``PATTERN=DEVICE`` overrides against a model's tensors and the available devices.

    Raises:
        UsageError: a pattern matches no tensor, or a device does not exist.
    """
    for pattern, device in map(parse_override, override_tensor):
        if device not in (HOST, *cards):
            raise UsageError(
                f"-ot {pattern}={device} names a device that does not exist",
                f"devices: {', '.join((HOST, *cards))}; -ot '{pattern}=CPU'",
            )
        if not any(re.search(pattern, tensor.name) for tensor in header.tensors):
            names = dict.fromkeys(tensor.name.removeprefix("blk.0.") for tensor in header.tensors)
            some = [name.removesuffix(".weight") for name in names if not name.startswith("blk.")]
            example = "ffn_.*_exps" if header.experts else "ffn_(up|down)"
            raise UsageError(
                f"-ot {pattern}={device} matches no tensor's name in {header.name}",
                f"-ot '{example}=CPU'; tensors in and outside a block: {', '.join(some)}",
            )


def layout(header: ModelHeader, placement: Placement, cards: Sequence[str]) -> object:
    """Return everything that compute buffers depend on; placements with equal layouts have nearly equal buffers.

    Each run of consecutive blocks on one device is described by that device, the devices of the blocks' parts, the kind
    of the first and last block, the set of kinds, and the number of blocks, capped at ``_ALIKE_FROM``.
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
    """Round to single precision, as llama.cpp does when it splits layers."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def padded(size: int, multiple: int) -> int:
    """Round ``size`` up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


class SameHeader:
    """Cache key that compares headers by identity, because hashing their contents costs more than the cache saves."""

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

    ``blocks`` and ``largest`` hold each block's total bytes and largest tensor by part (:func:`part_rules`);
    ``outside`` holds (layer, part, bytes) of the other tensors; ``tied`` is the size of an embedding that is also the
    output, which is copied to the output's GPU unless an override moves it.
    """

    blocks: tuple[Counter[str], ...]
    largest: tuple[dict[str, int], ...]
    kinds: tuple[int, ...]
    outside: tuple[tuple[str, str, int], ...]
    tied: int


@functools.lru_cache(maxsize=32)
def _sums(same: SameHeader, mtp: bool, override_tensor: tuple[str, ...]) -> _Sums:
    header = same.header
    main = header.blocks - (0 if mtp else header.nextn_blocks)  # llama.cpp skips unused MTP blocks
    blocks: list[Counter[str]] = [Counter() for _ in range(main)]
    largest: list[dict[str, int]] = [{} for _ in range(main)]
    shapes: list[set[object]] = [{header.windowed[i], ("recurrent", header.recurrent[i])} for i in range(main)]
    outside: Counter[tuple[str, str]] = Counter()
    tied = 0
    for tensor, part in zip(header.tensors, part_rules(same, override_tensor), strict=True):
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
    """Return the bytes of weights by device index. Source: ``create_tensor`` in src/llama-model-loader.cpp."""
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
    """Return an upper bound on CUDA's tensor padding: 128-byte alignment, and the last row padded to a kernel step.

    Source: ``ggml_backend_cuda_buffer_type_get_alloc_size`` in ggml/src/ggml-cuda/ggml-cuda.cu.
    """
    found = 0
    for tensor in same.header.tensors:
        missing = 0 if tensor.type in ("f32", "f16", "bf16") else -tensor.shape[0] % _CUDA_STEP
        needed = tensor.size_bytes + tensor.size_bytes * missing // math.prod(tensor.shape)
        found += padded(needed, _CUDA_ALIGNMENT) - padded(tensor.size_bytes, _ALIGNMENT)
    return found


def _kv(header: ModelHeader, devices: Sequence[int], context: ContextOptions, count: int) -> list[int]:
    """Return the bytes of caches and states by device (src/llama-kv-cache.cpp, src/llama-memory-recurrent.cpp)."""
    found = [0] * count
    cells = windowed_cells = context.cells
    if not context.swa_full:
        windowed_cells = padded(min(cells, header.sliding_window + context.computed), _CELLS)
    # Without flash attention, every block's V cache has as many elements per token as the widest block's V cache
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
    """Return upper bounds, by device, on CUDA's and HIP's extra buffer for flash attention with a non-f16 cache.

    The buffer holds an f16 copy of one block's cache. The real size may be smaller, because only prompt kernels need it
    and graphs may peak elsewhere. Source: ``ggml_cuda_flash_attn_ext_get_alloc_size`` in ggml/src/ggml-cuda/fattn.cu.
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
    """Return the GPU that computes large batches with CPU weights (the first local GPU), or "" without a local GPU.

    Source: ``ggml_backend_sched_backend_id_from_cur`` in ggml/src/ggml-backend.cpp.
    """
    return next((name for name in cards if not is_remote(name)), "")


def streamed_bytes(request: MemoryRequest, cards: Sequence[str]) -> int:
    """Return an upper bound on bytes of CPU weights and caches on :func:`streaming_card` at once; 0 if none are copied.

    The GPU holds one weight tensor (two for a hybrid model with experts), one block's KV cache (three times if latent)
    and :func:`activation_bytes`; for a draft head, also the output layer. Cache and output may be the target's. Source:
    ``ggml_backend_sched_split_graph`` in ggml/src/ggml-backend.cpp, which frees each weight before it copies the next.
    """
    header, context, target = request.header, request.context, request.target
    if not streaming_card(cards) or context.computed < context.op_offload_min_batch or not context.op_offload:
        return 0
    devices = layer_devices(header.blocks, request.placement, len(cards))
    in_blocks, output = _on_host(request, cards)
    rows = context.computed if target is None else HEAD_BATCH
    kept = zip(_kv_by_block(header, context), devices, strict=False)
    caches = [(3 if header.latent else 1) * size for size, device in kept if device == 0]
    if target is None:  # the output is not copied, because too few logits are requested
        output = 0
    elif output_device(request, target, cards) == HOST:
        output = _on_host(target, cards)[1]
    if target is not None and header.architecture == _READS_CACHE:
        there = layer_devices(target.header.blocks, target.placement, len(cards))[:-1]
        read = [*zip(_kv_by_block(target.header, target.context), there, strict=True)][-2:]
        caches.append(sum(size for size, device in read if device == 0))
    weights = max(in_blocks, default=0) * (2 if header.experts and any(header.recurrent) else 1) + output
    return weights + activation_bytes(header, rows) + max(caches, default=0) if weights else 0


def activation_bytes(header: ModelHeader, tokens: int) -> int:
    """Return an upper bound on how far copies shift later tensors in a buffer: one feed-forward and its input."""
    return 4 * tokens * (max(header.feed_forward, default=0) + header.embedding)


def _on_host(request: MemoryRequest, cards: Sequence[str]) -> tuple[list[int], int]:
    """Return the bytes of CPU weights copied one at a time (the largest by block and part), and the output's bytes."""
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
    """Return upper bounds, by device, on activations that fusion or reordering keeps longer in compute buffers.

    With experts, these are the used experts' outputs for a micro-batch, kept until weighted (CUDA, Vulkan). Otherwise,
    they are one row per token (Vulkan). A dense model partly on the CPU with flash attention and op offload adds
    nothing, because copied CPU weights cause its peak. A hybrid model entirely on GPUs without flash attention adds a
    mask. Vulkan's own dry runs are within these bounds: docs/evidence/backend-bytes.json.

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
    """Return whether rollback of this model needs one recurrent state per token."""
    return any(header.recurrent) and rollback_kind(header.architecture, options.REWIND_BY["target"]) == "snapshots"


def _states(header: ModelHeader, context: ContextOptions) -> int:
    """Return the number of recurrent states: the current one and those for rollback (llamacpp/params)."""
    if not context.rewind:
        return 1
    more = {"snapshots": min(context.rewind, context.computed - 2), "checkpoint": 1, "none": 0}
    return 1 + more[rollback_kind(header.architecture, context.rewind_by)]
