"""Predicted seconds per batch at a placement, from bytes and bandwidths. Pure: no model, clock or I/O.

A token costs one read of the weights and the KV cache, plus fixed costs. A batch of n tokens reads the weights once but
computes n times. T(n) / T(1) is neither flat nor monotonic and depends on the kernels and the weight type, so it is
measured on each device (:mod:`ggufspec.planning.machine_profile`). Without a measurement, the slower of memory and
compute counts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ggufspec.errors import UsageError
from ggufspec.llamacpp.gguf import GgufTensor
from ggufspec.llamacpp.options import KV_TYPES, OP_OFFLOAD_MIN_BATCH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader, block_of
from ggufspec.planning.memory import HOST, SameHeader, layer_devices, part_device, part_rules

# Kernel launch time for routing and recurrence, relative to a dense block with attention; fitted: planning.catalogue
ROUTING, RECURRENCE = 0.5, 0.5
_TABLES = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")  # lookup tables

# Copies from pageable memory: rate relative to pinned memory (0.5 to 0.55 in llama.cpp issues 20978 and 28223), and
# maximum rate, because an H100 on PCIe 5 x16 reached 52 GB/s from pinned memory but 10 GB/s from pageable memory
_PAGEABLE, _PAGEABLE_BYTES_PER_S = 0.5, 10e9
# (experts that further tokens add) ÷ (experts they would add with random routing). Neighbours share experts: four read
# 2.5 times one token's experts, not 3.6 (cohere.com/blog/mixture-of-experts-models-get-more-from-speculative-decoding)
_APART = 0.6
_DIRECT = 4 / 3  # RAM bandwidth of copies to a GPU ÷ RAM bandwidth of CPU reads (0.6 of the data sheet); a guess

BatchLatency = Mapping[int, float]
Attention = dict[str, dict[int, dict[int, float]]]
"""K/V elements processed per second, by KV cache type, attention head size and batch size."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Speed constants of one device."""

    bandwidth_bytes_per_s: float  # memory bandwidth reached when reading weights
    flops_per_s: float  # compute rate reached by large batches
    layer_s: float = 0.0  # fixed seconds per block and pass
    source: Literal["measured", "catalogue", "guess", "unknown"] = "guess"  # ``unknown``: GPU not in the catalogue
    by_type: dict[str, float] = field(default_factory=dict)  # bandwidth by weight type, which unpacking may limit
    batch_latencies: dict[str, dict[int, float]] = field(default_factory=dict)  # T(n) / T(1) by weight type and n
    attention: Attention = field(default_factory=dict)  # elements/s over all query heads and tokens; empty: no limit
    experts: BatchLatency = field(default_factory=dict)  # factor on the experts' read time by batch size; empty: 1

    def scaled(self, factor: float) -> DeviceProfile:
        """Return this device with the time for its weights and attention multiplied by ``factor``."""
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / factor,
            flops_per_s=self.flops_per_s / factor,
            by_type={kind: value / factor for kind, value in self.by_type.items()},
            attention={
                kind: {head: {n: rate / factor for n, rate in rates.items()} for head, rates in by_head.items()}
                for kind, by_head in self.attention.items()
            },
        )

    def merged(self, other: DeviceProfile) -> DeviceProfile:
        """Return this profile, supplemented by the weight types and attention head sizes that only ``other`` has."""
        kinds = dict.fromkeys([*self.attention, *other.attention])
        return replace(
            self,
            by_type=other.by_type | self.by_type,
            batch_latencies=other.batch_latencies | self.batch_latencies,
            attention={kind: other.attention.get(kind, {}) | self.attention.get(kind, {}) for kind in kinds},
        )

    def cache_s(self, size_bytes: float, numbers: float, types: Sequence[str], head: int, batch_size: int = 1) -> float:
        """Return the seconds to read this many cache bytes or process this many elements, whichever takes longer."""
        seconds = [size_bytes / self.bandwidth_bytes_per_s]
        for kind in types if self.attention else ():
            by_head = self.attention[_nearest(kind, self.attention)]
            rates = by_head[nearest_head(head, tuple(by_head))] if by_head else {}
            seconds += [numbers / interpolate(rates, batch_size)] if rates else []
        return max(seconds)

    def weights_s(self, kind: str, size_bytes: float, flops: float, batch_size: float = 1.0) -> float:
        """Return the seconds to read and compute with weights of one type; ``batch_size`` tokens use each weight."""
        read_s = size_bytes / self.by_type.get(_nearest(kind, self.by_type), self.bandwidth_bytes_per_s)
        batch_latency = self.batch_latencies.get(_nearest(kind, self.batch_latencies))
        if not batch_latency:
            return max(read_s, flops / self.flops_per_s)
        largest = max(batch_latency)
        seconds = read_s * interpolate(batch_latency, batch_size)
        return seconds if batch_size <= largest else max(seconds, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Speed constants of a machine, whose CPU is the device ``HOST``."""

    devices: dict[str, DeviceProfile]
    pass_s: float  # fixed seconds per pass
    crossing_s: float  # fixed seconds to pass the residual stream to another device
    link_bytes_per_s: float  # copy rate between CPU and GPUs
    origin: str  # source of these figures, in words
    streams: bool = False  # True if a GPU computes large batches with copies of CPU weights; RPC workers do not
    memory_bytes: int | None = None  # RAM for weights; None: unlimited
    disk_bytes_per_s: float = 2e9  # read rate if weights exceed RAM; a guess for an NVMe disk
    disturbed: str = ""  # what slowed the measurement down; empty if the machine was idle
    # (time with repacked CPU weights) ÷ (time in the file's layout); empty without GPUs: timings then include repacking
    repacked: dict[str, BatchLatency] = field(default_factory=dict)

    def copied_bytes_per_s(self, *, mapped: bool) -> float:
        """Return the rate at which CPU weights are copied to a GPU; memory-mapped ones pass through a driver buffer."""
        host, link = self.devices[HOST], self.link_bytes_per_s
        if host.source == "guess":  # unlike a guess, a measured rate may be limited by the cores, which copies bypass
            link = min(link, host.bandwidth_bytes_per_s * _DIRECT)
        return min(link * _PAGEABLE, _PAGEABLE_BYTES_PER_S) if mapped else link

    def device(self, name: str) -> DeviceProfile:
        """Return one device's profile.

        Raises:
            UsageError: the device's speed is unknown.
        """
        try:
            return self.devices[name]
        except KeyError:
            known = ", ".join(self.devices)
            raise UsageError(
                f"the speed of the device {name} is unknown", f"known: {known}; ggufspec plan --calibrate"
            ) from None


def interpolate(batch_latency: BatchLatency, batch_size: float) -> float:
    """Return T(n) at a batch size: exact if measured, linear between two sizes, constant outside the measured range."""
    known = sorted(batch_latency)
    if batch_size >= known[-1]:
        return batch_latency[known[-1]]
    above = next(n for n in known if n > batch_size)
    below = max((n for n in known if n <= batch_size), default=above)
    if above == below:
        return batch_latency[above]
    return batch_latency[below] + (batch_latency[above] - batch_latency[below]) * (batch_size - below) / (above - below)


# Bits per weight, from ggml/src/ggml-common.h
BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q6_K": 6.56, "q5_1": 6, "q5_0": 5.5, "q5_K": 5.5, "q4_1": 5}
BITS |= {"q4_0": 4.5, "iq4_nl": 4.5, "q4_K": 4.5, "iq4_xs": 4.25, "mxfp4": 4.25, "q3_K": 3.44, "iq3_s": 3.44}
BITS |= {"iq3_xxs": 3.06, "q2_K": 2.63, "iq2_s": 2.56, "iq2_xs": 2.31, "iq2_xxs": 2.06, "iq1_m": 1.75, "iq1_s": 1.56}


_OTHER_FAMILY = 0.5  # distance between two families of weight types, in log2 of bits per weight


def _nearest(kind: str, known: Mapping[str, object]) -> str:
    """Return the known type most similar to ``kind``: itself, or else one with similar bits per weight and family."""
    return kind if kind in known or not known else _nearest_of(kind, tuple(known))


@functools.cache
def _nearest_of(kind: str, known: tuple[str, ...]) -> str:
    def distance(other: str) -> float:
        bits = abs(math.log2(BITS.get(other, 4.5) / BITS.get(kind, 4.5)))
        return bits + _OTHER_FAMILY * (_family(kind) != _family(other))

    return min(known, key=distance)


def nearest_head(size: int, known: Sequence[int]) -> int:
    """Return the known attention head size nearest to ``size`` by ratio."""
    return min(known, key=lambda other: abs(math.log2(other / max(1, size))))


def _family(kind: str) -> str:
    """Return a key for types that are unpacked in the same way: blocks with a scale, or super-blocks of 256."""
    return "K" if kind.endswith("_K") or kind.startswith("iq") else kind[-2:]


# ---- what a model reads ----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Kind of weights; all weights of one kind in a layer share a device (:func:`memory.part_rules`)."""

    type: str
    experts: bool
    part: str


@dataclass(frozen=True, slots=True)
class _Weights:
    """Matrices with one weight type on one device; if they are experts, a token reads only some of them."""

    device: str
    kind: str
    experts: bool
    size_bytes: int
    numbers: int


@dataclass(frozen=True, slots=True)
class _Cache:
    """Sizes of a block's recurrent state and KV cache; 0: the block has none."""

    state: int  # f32 elements of recurrent state
    keys: int  # key elements per cached token
    values: int  # value elements per cached token
    window: int  # size of the attention window in tokens; 0: unlimited
    attended: int = 0  # key and value elements per cached token, over all query heads
    head: int = 0  # elements in one key

    def seen(self, cells: int) -> int:
        """Return the number of cached tokens inside the attention window."""
        return min(cells, self.window) if self.window else cells

    def read_bytes(self, cells: int, types: Sequence[str]) -> float:
        """Return the bytes that a pass reads with this many cached tokens; states count twice (read and written)."""
        keys_bytes, values_bytes = (KV_TYPES[kind][1] / KV_TYPES[kind][0] for kind in types)
        return 8.0 * self.state + self.seen(cells) * (self.keys * keys_bytes + self.values * values_bytes)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Weights and blocks of a placed model by device, for any batch size."""

    weights: tuple[_Weights, ...]
    host_bytes: int
    blocks: tuple[tuple[str, _Cache, int], ...]  # (device, cache, number of such blocks)
    table_bytes: int  # bytes of lookup tables in RAM
    row_bytes: float  # bytes read per token from lookup tables
    crossings: int  # moves of the residual stream to another device, including the logits' return to the CPU


@functools.lru_cache(maxsize=32)
def _layers(same: SameHeader, override_tensor: tuple[str, ...]) -> tuple[Mapping[_Kind, tuple[int, int]], ...]:
    """Return (bytes, number) of the weights that a pass may read, by layer and kind; the output is the last layer.

    NextN blocks have no entries, because a pass does not run them (src/llama-hparams.cpp, n_layer).
    """
    header = same.header
    found: tuple[dict[_Kind, tuple[int, int]], ...] = tuple({} for _ in range(header.layers))
    for tensor, part in zip(header.tensors, part_rules(same, override_tensor), strict=True):
        block = block_of(tensor)
        is_output = block is None and ((tensor.name == "token_embd.weight" and header.tied) or not _is_table(tensor))
        if is_output or (block is not None and block < header.blocks - header.nextn_blocks):
            layer = found[header.blocks if block is None else block]
            key = _Kind(tensor.type, "exps." in tensor.name, part)
            size_bytes, numbers = layer.get(key, (0, 0))
            layer[key] = size_bytes + tensor.size_bytes, numbers + math.prod(tensor.shape)
    return found


@functools.lru_cache(maxsize=32)
def _tables(same: SameHeader) -> tuple[GgufTensor, ...]:
    return tuple(tensor for tensor in same.header.tensors if block_of(tensor) is None and _is_table(tensor))


def _is_table(tensor: GgufTensor) -> bool:
    return tensor.name.startswith(_TABLES)


@functools.lru_cache(maxsize=4096)
def _placed(same: SameHeader, placement: Placement, cards: tuple[str, ...]) -> _Placed:
    header = same.header
    names = (HOST, *cards)
    devices = layer_devices(header.blocks, placement, len(cards))
    size_bytes, numbers = Counter[tuple[str, str, bool]](), Counter[tuple[str, str, bool]]()
    path = [0]
    for layer, (kinds, device) in enumerate(zip(_layers(same, placement.override_tensor), devices, strict=True)):
        path.append(device)
        elsewhere = set[int]()
        for kind, (size, count) in kinds.items():
            there = part_device(kind.part, layer, device, placement, cards)
            size_bytes[names[there], kind.type, kind.experts] += size
            numbers[names[there], kind.type, kind.experts] += count
            elsewhere |= {there} - {device}
        for there in elsewhere:
            path += [there, device]
    path.append(0)
    caches, tables = _caches(same), _tables(same)
    return _Placed(
        weights=tuple(_Weights(*key, size, numbers[key]) for key, size in size_bytes.items()),
        host_bytes=sum(size for (name, *_), size in size_bytes.items() if name == HOST),
        blocks=tuple(
            (names[device], cache, count)
            for (device, cache), count in Counter(zip(devices[: len(caches)], caches, strict=True)).items()
        ),
        table_bytes=sum(tensor.size_bytes for tensor in tables),
        row_bytes=sum(tensor.size_bytes / math.prod(tensor.shape[1:]) for tensor in tables),
        crossings=sum(a != b for a, b in itertools.pairwise(path)),
    )


@functools.lru_cache(maxsize=32)
def _caches(same: SameHeader) -> tuple[_Cache, ...]:
    return tuple(_cache(same.header, block) for block in range(same.header.blocks - same.header.nextn_blocks))


def _cache(header: ModelHeader, block: int) -> _Cache:
    state = header.conv_numbers + header.state_numbers if header.recurrent[block] else 0
    if header.recurrent[block] and not header.cached[block]:
        return _Cache(state, 0, 0, 0)
    keys, values = (header.latent, 0) if header.latent else (header.keys(block), header.values(block))
    groups = header.heads[block] / max(1, header.kv_heads[block])  # query heads per key-value head
    attended = header.heads[block] * 2 * header.latent if header.latent else round(groups * (keys + values))
    window, head = header.sliding_window if header.windowed[block] else 0, header.latent or header.key_size
    return _Cache(state, keys, values, window, attended, head)


# ---- one pass --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds per pass, broken down into weights and KV cache (per device), fixed costs, and copies to a GPU."""

    devices: dict[str, float]
    fixed_s: float
    copies_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole pass."""
        return sum(self.devices.values()) + self.fixed_s + self.copies_s


def cost(
    header: ModelHeader,
    placement: Placement,
    machine: MachineProfile,
    cards: Sequence[str] = (),
    *,
    tokens: int = 1,
    depth: int = 0,
    context: ContextOptions | None = None,
) -> PassCost:
    """Return the time for one batch, broken down into parts; see :func:`pass_s` for the arguments."""
    placed = _placed(SameHeader(header), placement, tuple(cards))
    used = header.experts_used / header.experts if header.experts else 1.0
    # Share of the experts that n tokens read; random routing would read 1 - (1 - used)^n (arXiv:2505.19645, equation 1)
    touched = used + _APART * (1 - (1 - used) ** tokens - used)
    op_offload_min_batch = (
        OP_OFFLOAD_MIN_BATCH if context is None else context.op_offload_min_batch if context.op_offload else math.inf
    )
    streams = machine.streams and tokens >= op_offload_min_batch and bool(cards)
    copied_bytes_per_s = machine.copied_bytes_per_s(mapped=placement.is_mapped)
    seconds, copies_s = dict.fromkeys((HOST, *cards), 0.0), 0.0
    host_bytes, host_read_bytes = placed.table_bytes + placed.host_bytes, 0.0
    for weights in placed.weights:
        read, share = (touched, used) if weights.experts else (1.0, 1.0)
        read_bytes, flops = weights.size_bytes * read, 2.0 * weights.numbers * tokens * share
        device = weights.device
        share_of_s = machine.repacked.get(weights.kind) if device == HOST and placement.no_host else None
        if device == HOST:
            host_read_bytes += read_bytes
            if streams and share_of_s is None:
                device = cards[0]
                copies_s += read_bytes / copied_bytes_per_s
        batch_size = tokens * share / read  # mean number of tokens that use a weight
        speed = machine.device(device)
        more = interpolate(speed.experts, tokens) if weights.experts and speed.experts else 1.0
        weights_s = more * speed.weights_s(weights.kind, read_bytes, flops, batch_size)
        if share_of_s is not None:
            weights_s = max(weights_s * interpolate(share_of_s, batch_size), read_bytes / speed.bandwidth_bytes_per_s)
        seconds[device] += weights_s
    if machine.memory_bytes is not None and host_bytes > machine.memory_bytes:
        seconds[HOST] = max(seconds[HOST], host_read_bytes / machine.disk_bytes_per_s)
    seconds[HOST] += tokens * placed.row_bytes / machine.device(HOST).bandwidth_bytes_per_s
    fixed_s = machine.pass_s
    types = (context.cache_type_k, context.cache_type_v) if context else ("f16", "f16")
    for name, cache, count in placed.blocks:
        cells = depth + tokens
        read_bytes, numbers = cache.read_bytes(cells, types), float(tokens * cache.seen(cells) * cache.attended)
        # Attention runs on the device that computes with its weights ("expand gpu" in ggml_backend_sched_split_graph)
        if streams and name == HOST and not placement.no_host:
            name = cards[0]
            copies_s += count * read_bytes / machine.copied_bytes_per_s(mapped=False)
        speed = machine.device(name)
        seconds[name] += count * speed.cache_s(read_bytes, numbers, types, cache.head, tokens)
        launches = 1.0 + ROUTING * bool(header.experts) + RECURRENCE * bool(cache.state)
        fixed_s += count * speed.layer_s * launches
    if placed.crossings:
        numbers = (placed.crossings - 1) * header.embedding + header.vocabulary  # the last crossing returns the logits
        fixed_s += placed.crossings * machine.crossing_s + 4.0 * tokens * numbers / machine.link_bytes_per_s
    return PassCost(seconds, fixed_s, copies_s)


@dataclass(frozen=True, slots=True)
class MeasuredBatches:
    """Measured T(n) / T(1) of a model at one placement, by n, starting at 1.

    These also correct predictions for other placements, because they reflect the router's real choices of experts.
    """

    placement: Placement
    relative: BatchLatency
    op_offload_min_batch: int = OP_OFFLOAD_MIN_BATCH


def weight_bytes(header: ModelHeader) -> dict[str, int]:
    """Return the bytes of the weights that a pass may read, by weight type."""
    found = Counter[str]()
    for weights in _placed(SameHeader(header), Placement(), ()).weights:
        found[weights.kind] += weights.size_bytes
    return dict(found)


def host_bytes(header: ModelHeader, placement: Placement, cards: Sequence[str] = ()) -> int:
    """Return the bytes of the CPU weights that a pass may read."""
    return _placed(SameHeader(header), placement, tuple(cards)).host_bytes


def pass_s(
    header: ModelHeader,
    placement: Placement,
    machine: MachineProfile,
    cards: Sequence[str] = (),
    *,
    tokens: int = 1,
    depth: int = 0,
    context: ContextOptions | None = None,
    measured: MeasuredBatches | None = None,
) -> float:
    """Return the predicted seconds for a batch of ``tokens`` with ``depth`` tokens in the KV cache.

    ``cards`` are the devices for offloading, in llama.cpp's order. Without ``context`` the cache is f16. ``measured``
    times of the same model at any placement correct the prediction up to their largest batch size.

    Raises:
        UsageError: ``machine`` lacks the speed of a device.
    """
    if tokens < 1 or depth < 0:
        raise ValueError(f"invalid batch of {tokens} tokens at depth {depth}")
    options: dict[str, Any] = {"depth": depth, "context": context}

    def seconds(at: Placement, batch_size: int) -> float:
        return cost(header, at, machine, cards, tokens=batch_size, **options).total_s

    if not measured:
        return seconds(placement, tokens)
    batch_size = min(tokens, max(measured.relative))
    known_s = seconds(measured.placement, 1) * interpolate(measured.relative, batch_size)
    known_s *= seconds(placement, batch_size) / seconds(measured.placement, batch_size)
    return known_s if batch_size == tokens else max(seconds(placement, tokens), known_s)


# ---- speculation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Draft length (0: target-only) with its predicted speed."""

    length: int
    tokens_per_s: float


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the mean tokens per round, 1 + α + … + α^length (Leviathan et al. 2023, equation 1, arXiv:2211.17192)."""
    if not 0 <= acceptance <= 1 or length < 0:
        raise ValueError(f"invalid acceptance {acceptance} or length {length}")
    return math.fsum(acceptance**i for i in range(length + 1))


def accepted_share(acceptance: float, length: int) -> float:
    """Return the expected ratio of accepted to drafted tokens at a draft length; ``acceptance`` is per token."""
    return (expected_tokens(acceptance, length) - 1) / length


@dataclass(frozen=True, slots=True)
class LookupRounds:
    """Statistics on rounds that the n-gram lookup drafted in answers on this machine."""

    share: float  # share of all generated tokens that these rounds produced
    drafted: float  # mean tokens drafted per round
    gained: float  # mean tokens produced per round, including the target's own


def with_lookup(tokens_per_s: float, target_pass_s: Callable[[int], float], lookup: LookupRounds) -> float:
    """Return tokens/s with lookup rounds, never fewer than without, as an adaptive policy skips losing rounds."""
    rate = lookup.gained / target_pass_s(round(lookup.drafted) + 1)
    return max(tokens_per_s, 1 / (lookup.share / rate + (1 - lookup.share) / tokens_per_s))


def best_length(
    target_pass_s: Callable[[int], float], draft_token_s: float, acceptance: float, most: int = 16, least: int = 0
) -> DraftChoice:
    """Return the fastest draft length, the shortest if several tie; above 15, only ``most`` and full batches are tried.

    Args:
        target_pass_s: seconds per target batch, by batch size.
        draft_token_s: seconds per drafted token.
        acceptance: probability that a drafted token is accepted, given that all earlier ones were.
        most: maximum draft length.
        least: minimum draft length; 0 allows target-only.
    """
    tokens = [*itertools.accumulate(acceptance**i for i in range(most + 1))]
    fine = (n for n in range(least, most + 1) if n < _FINE or (n + 1) % _STEP == 0 or n == most)
    rates = {n: tokens[n] / (n * draft_token_s + target_pass_s(n + 1)) for n in fine}
    length = max(rates, key=rates.__getitem__)
    return DraftChoice(length, rates[length])


_FINE, _STEP = 16, 8  # batch sizes to consider: all up to ``_FINE``, then multiples of ``_STEP``
_HALVINGS = 60


def break_even_acceptance(
    target_pass_s: Callable[[int], float],
    draft_token_s: float,
    rival_tokens_per_s: float,
    most: int = 16,
    least: int = 1,
) -> float | None:
    """Return the lowest acceptance at which the best draft length matches the baseline; None if even 1 is too low.

    The baseline is the best target-only run, which may have more target layers on GPUs than ``target_pass_s`` assumes.
    Length 0 is excluded by default, because a draft that costs no layers would always break even at 0. To fix the
    length, set ``least`` equal to ``most``.
    """
    times = functools.cache(target_pass_s)

    def wins(acceptance: float) -> bool:
        return best_length(times, draft_token_s, acceptance, most, least).tokens_per_s >= rival_tokens_per_s

    if not wins(1.0):
        return None
    if wins(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


# ---- from measured points --------------------------------------------------------------------------------------------

# Standard deviations of log(true ÷ stated time) for devices, by the source of their figures, and for measured tokens
_UNSURE = {"measured": 0.1, "catalogue": 0.2, "guess": 0.6, "unknown": 1.5}
_UNSURE_POINT = 0.02
_STEPS = 100


@dataclass(frozen=True, slots=True)
class MeasuredToken:
    """Measured seconds per target-only token at a placement, with ``depth`` tokens in ``context``'s cache."""

    placement: Placement
    token_s: float
    depth: int = 0
    context: ContextOptions | None = None


def corrected(
    points: Sequence[MeasuredToken], header: ModelHeader, machine: MachineProfile, cards: Sequence[str] = ()
) -> MachineProfile:
    """Return ``machine`` with its speeds corrected by a model's measured token times; unchanged without ``points``.

    A token's time is the sum of the devices' times and fixed costs, each multiplied by an unknown factor, whose prior
    depends on the source of the figures (``_UNSURE``; for fixed costs, the largest of these). So one point
    mostly corrects the least known device, several correct each device separately, and unused devices stay unchanged.
    The factors are the maximum a posteriori estimate, found by Levenberg-Marquardt.
    """
    import numpy as np

    if not points:
        return machine
    names = (HOST, *cards)
    costs = [cost(header, p.placement, machine, cards, depth=p.depth, context=p.context) for p in points]
    parts = np.array([[*(one.devices[name] for name in names), one.fixed_s + one.copies_s] for one in costs])
    measured = np.array([point.token_s for point in points])
    unsure = [_UNSURE[machine.device(name).source] for name in names]
    scale = np.array([*unsure, max(unsure)])

    def off(logs: Any) -> Any:
        return np.concatenate([np.log(parts @ np.exp(logs) / measured) / _UNSURE_POINT, logs / scale])

    def descend(logs: Any) -> Any:
        damping, here = 1.0, off(logs)
        for _ in range(_STEPS):
            shares = parts * np.exp(logs)
            slope = np.vstack([shares / shares.sum(axis=1, keepdims=True) / _UNSURE_POINT, np.diag(1 / scale)])
            square = slope.T @ slope
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope.T @ here)
            there = off(logs + step)
            is_lower = there @ there < here @ here
            if is_lower:
                logs, here = logs + step, there
            damping *= 0.2 if is_lower else 5.0
        return logs

    # Each device that can explain the measured times alone may have a local minimum, so start a descent at each
    starts = [np.zeros(len(scale))]
    for index in range(len(names)):
        part = parts[:, index]
        left = np.median(measured - parts.sum(axis=1) + part)
        if part.max() > 0 and left > 0:
            starts.append(np.eye(len(scale))[index] * np.log(left / np.median(part[part > 0])))
    *factors, fixed = np.exp(min((descend(start) for start in starts), key=lambda logs: off(logs) @ off(logs))).tolist()
    devices = {name: machine.device(name).scaled(factor) for name, factor in zip(names, factors, strict=True)}
    return replace(
        machine,
        devices=machine.devices | {name: replace(one, layer_s=one.layer_s * fixed) for name, one in devices.items()},
        pass_s=machine.pass_s * fixed,
        crossing_s=machine.crossing_s * fixed,
        link_bytes_per_s=machine.link_bytes_per_s / fixed,
    )
