"""Predicted seconds of a batch at a placement, from bytes and bandwidths. Pure: no model, clock or I/O.

A token costs the reading of the weights and the KV cache, and fixed costs. A batch of n tokens reads the weights once
and computes n times. T(n) / T(1), neither flat nor monotonic, depends on a machine's kernels and the weight type, so a
device has its measured ones (:mod:`ggufspec.planning.machine_profile`), or the slower of memory and compute.
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
from ggufspec.llamacpp.gguf import Tensor
from ggufspec.llamacpp.options import KV_TYPES, STREAM_WIDTH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader, block_of
from ggufspec.planning.memory import HOST, SameHeader, layer_devices, part_device, parts

# Kernel launches of routing and of recurrence ÷ those of a dense block with attention: fitted, see planning.catalogue
ROUTING, RECURRENCE = 0.5, 0.5
_TABLES = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")  # looked up by row

# Copies from pageable memory: share of the pinned rate (0.5 to 0.55 by llama.cpp's issues 20978 and 28223) and maximum;
# PCIe 5 x16 with an H100 was measured at 52 GB/s pinned and 10 GB/s pageable
_PAGEABLE, _PAGEABLE_BYTES_PER_S = 0.5, 10e9
# Experts that further tokens add ÷ those that random choices would add, as neighbours agree: four tokens read 2.5 times
# one token's, not 3.6 (cohere.com/blog/mixture-of-experts-models-get-more-from-speculative-decoding)
_APART = 0.6
_DIRECT = 4 / 3  # RAM bandwidth of a GPU's copies ÷ that of a CPU (0.6 of the data sheet); a guess

BatchLatency = Mapping[int, float]
Attention = dict[str, dict[int, dict[int, float]]]
"""Keys' and values' numbers per second, by KV cache type, attention head size and batch size."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Speed of one device."""

    bandwidth_bytes_per_s: float  # bandwidth reached in reading weights
    flops_per_s: float  # rate reached by large batches
    layer_s: float = 0.0  # fixed seconds of a block per pass
    source: Literal["measured", "catalogue", "guess", "unknown"] = "guess"  # ``unknown``: a GPU in no catalogue
    by_type: dict[str, float] = field(default_factory=dict)  # bandwidth by weight type; unpacking may limit it
    batch_latencies: dict[str, dict[int, float]] = field(default_factory=dict)  # T(n) / T(1) by weight type and n
    attention: Attention = field(default_factory=dict)  # numbers/s over all query heads and tokens; empty: reading only
    experts: BatchLatency = field(default_factory=dict)  # factor on experts' reading, by batch size; empty: 1

    def scaled(self, factor: float) -> DeviceProfile:
        """Return this device with the time of its weights and attention multiplied by ``factor``."""
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

    def beside(self, other: DeviceProfile) -> DeviceProfile:
        """Return this device with added weight types and attention head sizes that only ``other`` has."""
        kinds = dict.fromkeys([*self.attention, *other.attention])
        return replace(
            self,
            by_type=other.by_type | self.by_type,
            batch_latencies=other.batch_latencies | self.batch_latencies,
            attention={kind: other.attention.get(kind, {}) | self.attention.get(kind, {}) for kind in kinds},
        )

    def cache_s(self, size_bytes: float, numbers: float, types: Sequence[str], head: int, width: int = 1) -> float:
        """Return the longer of the seconds to read these bytes of cache and to process these numbers."""
        seconds = [size_bytes / self.bandwidth_bytes_per_s]
        for kind in types if self.attention else ():
            by_head = self.attention[_nearest(kind, self.attention)]
            rates = by_head[nearest_head(head, tuple(by_head))] if by_head else {}
            seconds += [numbers / interpolate(rates, width)] if rates else []
        return max(seconds)

    def weights_s(self, kind: str, size_bytes: float, flops: float, width: float = 1.0) -> float:
        """Return the seconds to read and compute with weights of one type; ``width``: tokens that use each weight."""
        read_s = size_bytes / self.by_type.get(_nearest(kind, self.by_type), self.bandwidth_bytes_per_s)
        batch_latency = self.batch_latencies.get(_nearest(kind, self.batch_latencies))
        if not batch_latency:
            return max(read_s, flops / self.flops_per_s)
        widest = max(batch_latency)
        seconds = read_s * interpolate(batch_latency, width)
        return seconds if width <= widest else max(seconds, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Speed of a machine; the CPU is the device ``HOST``."""

    devices: dict[str, DeviceProfile]
    pass_s: float  # fixed seconds of a pass
    crossing_s: float  # fixed seconds of passing the residual stream to another device
    link_bytes_per_s: float  # rate between CPU and GPUs
    origin: str  # origin of the figures, in a sentence
    streams: bool = False  # True if a GPU computes large batches with copies of CPU weights; RPC does not
    memory_bytes: int | None = None  # RAM for weights; None: enough
    disk_bytes_per_s: float = 2e9  # rate for weights that exceed RAM; a guess for an NVMe disk
    disturbed: str = ""  # reason why an idle machine would have measured faster, or empty
    # Time of repacked CPU weights ÷ that in the file's layout; empty without GPUs, where the CPU is measured repacked
    repacked: dict[str, BatchLatency] = field(default_factory=dict)

    def copied_bytes_per_s(self, *, mapped: bool) -> float:
        """Return the rate of copying CPU weights to a GPU; mapped files go through a buffer of the driver."""
        host, link = self.devices[HOST], self.link_bytes_per_s
        if host.source == "guess":  # derived from RAM, so it bounds copies; a measured rate may be that of few cores
            link = min(link, host.bandwidth_bytes_per_s * _DIRECT)
        return min(link * _PAGEABLE, _PAGEABLE_BYTES_PER_S) if mapped else link

    def device(self, name: str) -> DeviceProfile:
        """Return one device's profile.

        Raises:
            UsageError: its speed is unknown.
        """
        try:
            return self.devices[name]
        except KeyError:
            known = ", ".join(self.devices)
            raise UsageError(
                f"the speed of the device {name} is not known", f"known: {known}; calibrate again"
            ) from None


def interpolate(batch_latency: BatchLatency, width: float) -> float:
    """Return the latency of a batch: exact if measured, linear between two points, constant outside."""
    known = sorted(batch_latency)
    if width >= known[-1]:
        return batch_latency[known[-1]]
    above = next(n for n in known if n > width)
    below = max((n for n in known if n <= width), default=above)
    if above == below:
        return batch_latency[above]
    return batch_latency[below] + (batch_latency[above] - batch_latency[below]) * (width - below) / (above - below)


# Bits per weight: ggml/src/ggml-common.h
BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q6_K": 6.56, "q5_1": 6, "q5_0": 5.5, "q5_K": 5.5, "q4_1": 5}
BITS |= {"q4_0": 4.5, "iq4_nl": 4.5, "q4_K": 4.5, "iq4_xs": 4.25, "mxfp4": 4.25, "q3_K": 3.44, "iq3_s": 3.44}
BITS |= {"iq3_xxs": 3.06, "q2_K": 2.63, "iq2_s": 2.56, "iq2_xs": 2.31, "iq2_xxs": 2.06, "iq1_m": 1.75, "iq1_s": 1.56}


_OTHER_FAMILY = 0.5  # distance between families, in log2 of bits per weight


def _nearest(kind: str, known: Mapping[str, object]) -> str:
    """Return the most similar known type: itself, else one of about as many bits and of the same family."""
    return kind if kind in known or not known else _nearest_of(kind, tuple(known))


@functools.cache
def _nearest_of(kind: str, known: tuple[str, ...]) -> str:
    def distance(other: str) -> float:
        bits = abs(math.log2(BITS.get(other, 4.5) / BITS.get(kind, 4.5)))
        return bits + _OTHER_FAMILY * (_family(kind) != _family(other))

    return min(known, key=distance)


def nearest_head(size: int, known: Sequence[int]) -> int:
    """Return the known attention head size that is nearest by ratio."""
    return min(known, key=lambda other: abs(math.log2(other / max(1, size))))


def _family(kind: str) -> str:
    """Return a key of types that are unpacked alike: blocks with a scale, or super-blocks of 256."""
    return "K" if kind.endswith("_K") or kind.startswith("iq") else kind[-2:]


# ---- what a model reads ----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Kind of weights; those of one kind in a layer share a device (:func:`memory.parts`)."""

    type: str
    experts: bool
    part: str


@dataclass(frozen=True, slots=True)
class _Weights:
    """Matrices of one type on one device; a token reads only some of the experts."""

    device: str
    kind: str
    experts: bool
    size_bytes: int
    numbers: int


@dataclass(frozen=True, slots=True)
class _Cache:
    """Memory of a block; 0: none of this kind."""

    state: int  # f32 numbers of recurrent state
    keys: int  # numbers of keys per cached token
    values: int  # numbers of values per cached token
    window: int  # tokens of the attention window
    attended: int = 0  # numbers of keys and values per cached token, over all query heads
    head: int = 0  # numbers of one key

    def seen(self, cells: int) -> int:
        """Return the number of cached tokens inside the attention window."""
        return min(cells, self.window) if self.window else cells

    def read_bytes(self, cells: int, types: Sequence[str]) -> float:
        """Return the bytes that a pass reads with this many cached tokens; a state is read and written."""
        keys_bytes, values_bytes = (KV_TYPES[kind][1] / KV_TYPES[kind][0] for kind in types)
        return 8.0 * self.state + self.seen(cells) * (self.keys * keys_bytes + self.values * values_bytes)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Weights and blocks of a model by device, for any batch size."""

    weights: tuple[_Weights, ...]
    host_bytes: int
    blocks: tuple[tuple[str, _Cache, int], ...]  # (device, cache, number of such blocks)
    table_bytes: int  # lookup tables in RAM
    row_bytes: float  # bytes of them that a token reads
    crossings: int  # device changes of the residual stream, with the logits' return to the CPU


@functools.lru_cache(maxsize=32)
def _layers(same: SameHeader, override_tensor: tuple[str, ...]) -> tuple[Mapping[_Kind, tuple[int, int]], ...]:
    """Return (bytes, numbers) that a pass may read, by layer and kind; the output is the last layer.

    NextN blocks are empty: a pass does not run them (src/llama-hparams.cpp, n_layer).
    """
    header = same.header
    found: tuple[dict[_Kind, tuple[int, int]], ...] = tuple({} for _ in range(header.layers))
    for tensor, part in zip(header.tensors, parts(same, override_tensor), strict=True):
        block = block_of(tensor)
        is_output = block is None and ((tensor.name == "token_embd.weight" and header.tied) or not _is_table(tensor))
        if is_output or (block is not None and block < header.blocks - header.nextn_blocks):
            layer = found[header.blocks if block is None else block]
            key = _Kind(tensor.type, "exps." in tensor.name, part)
            size_bytes, numbers = layer.get(key, (0, 0))
            layer[key] = size_bytes + tensor.size_bytes, numbers + math.prod(tensor.shape)
    return found


@functools.lru_cache(maxsize=32)
def _tables(same: SameHeader) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in same.header.tensors if block_of(tensor) is None and _is_table(tensor))


def _is_table(tensor: Tensor) -> bool:
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
class Cost:
    """Seconds of one pass: weights and KV cache by device, fixed costs, and copies to a GPU."""

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
) -> Cost:
    """Return the time of one batch by its parts; arguments as for :func:`pass_s`."""
    placed = _placed(SameHeader(header), placement, tuple(cards))
    used = header.experts_used / header.experts if header.experts else 1.0
    # Share of the experts that n tokens read; of random choices: 1 - (1 - used)^n (arXiv:2505.19645, equation 1)
    touched = used + _APART * (1 - (1 - used) ** tokens - used)
    streams_from = STREAM_WIDTH if context is None else context.op_offload_min_batch if context.op_offload else math.inf
    streams = machine.streams and tokens >= streams_from and bool(cards)
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
        width = tokens * share / read  # mean number of tokens that use a weight
        speed = machine.device(device)
        more = interpolate(speed.experts, tokens) if weights.experts and speed.experts else 1.0
        weights_s = more * speed.weights_s(weights.kind, read_bytes, flops, width)
        if share_of_s is not None:
            weights_s = max(weights_s * interpolate(share_of_s, width), read_bytes / speed.bandwidth_bytes_per_s)
        seconds[device] += weights_s
    if machine.memory_bytes is not None and host_bytes > machine.memory_bytes:
        seconds[HOST] = max(seconds[HOST], host_read_bytes / machine.disk_bytes_per_s)
    seconds[HOST] += tokens * placed.row_bytes / machine.device(HOST).bandwidth_bytes_per_s
    fixed_s = machine.pass_s
    types = (context.cache_type_k, context.cache_type_v) if context else ("f16", "f16")
    for name, cache, count in placed.blocks:
        cells = depth + tokens
        read_bytes, numbers = cache.read_bytes(cells, types), float(tokens * cache.seen(cells) * cache.attended)
        # Attention runs with its weights ("expand gpu" in ggml_backend_sched_split_graph)
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
    return Cost(seconds, fixed_s, copies_s)


@dataclass(frozen=True, slots=True)
class MeasuredBatches:
    """Measured T(n) / T(1) of a model at one placement, by n from 1 on.

    The error found here corrects other placements too, so that the router's real choices replace the expected ones.
    """

    placement: Placement
    relative: BatchLatency
    op_offload_min_batch: int = STREAM_WIDTH


def weight_bytes(header: ModelHeader) -> dict[str, int]:
    """Return the bytes of the weights that a pass may read, by type."""
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
    """Return the predicted seconds of a batch of ``tokens`` with ``depth`` tokens in the KV cache.

    ``cards`` are the devices for offloading, in llama.cpp's order. Without ``context`` the cache is f16. ``measured``,
    of the same model at any placement, corrects the prediction up to its largest batch size.

    Raises:
        UsageError: ``machine`` does not know a GPU.
    """
    if tokens < 1 or depth < 0:
        raise ValueError(f"a batch of {tokens} tokens at depth {depth}")
    options: dict[str, Any] = {"depth": depth, "context": context}

    def seconds(at: Placement, width: int) -> float:
        return cost(header, at, machine, cards, tokens=width, **options).total_s

    if not measured:
        return seconds(placement, tokens)
    width = min(tokens, max(measured.relative))
    known_s = seconds(measured.placement, 1) * interpolate(measured.relative, width)
    known_s *= seconds(placement, width) / seconds(measured.placement, width)
    return known_s if width == tokens else max(seconds(placement, tokens), known_s)


# ---- speculation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """Draft length (0: target-only) and its rate."""

    length: int
    tokens_per_s: float


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the tokens per round, 1 + α + … + α^length (Leviathan et al. 2023, equation 1, arXiv:2211.17192)."""
    if not 0 <= acceptance <= 1 or length < 0:
        raise ValueError(f"an acceptance of {acceptance} at length {length}")
    return math.fsum(acceptance**i for i in range(length + 1))


def accepted_share(acceptance: float, length: int) -> float:
    """Return accepted ÷ drafted tokens at one draft length; ``acceptance`` is the chance of one token."""
    return (expected_tokens(acceptance, length) - 1) / length


@dataclass(frozen=True, slots=True)
class LookupRounds:
    """Rounds that the n-gram lookup began, in answers on this machine."""

    share: float  # share of all tokens that these rounds produced
    drafted: float  # mean tokens drafted per round
    gained: float  # mean tokens produced per round, the target's own included


def with_lookup(tokens_per_s: float, target_pass_s: Callable[[int], float], lookup: LookupRounds) -> float:
    """Return tokens/s with the lookup's rounds, never less than without: an adaptive policy skips what does not pay."""
    rate = lookup.gained / target_pass_s(round(lookup.drafted) + 1)
    return max(tokens_per_s, 1 / (lookup.share / rate + (1 - lookup.share) / tokens_per_s))


def best_length(
    target_pass_s: Callable[[int], float], draft_token_s: float, acceptance: float, most: int = 16, least: int = 0
) -> Choice:
    """Return the fastest draft length, the shortest of equals; from 16 on only lengths that fill a batch, and ``most``.

    Args:
        target_pass_s: seconds of a target batch by its size.
        draft_token_s: seconds of one drafted token.
        acceptance: chance that a drafted token is accepted, given that all before it were.
        most: maximum draft length.
        least: minimum draft length; 0 allows target-only.
    """
    tokens = [*itertools.accumulate(acceptance**i for i in range(most + 1))]
    fine = (n for n in range(least, most + 1) if n < _FINE or (n + 1) % _STEP == 0 or n == most)
    rates = {n: tokens[n] / (n * draft_token_s + target_pass_s(n + 1)) for n in fine}
    length = max(rates, key=rates.__getitem__)
    return Choice(length, rates[length])


_FINE, _STEP = 16, 8  # batch sizes that are used: all up to the first, then multiples of the second
_HALVINGS = 60


def break_even_acceptance(
    target_pass_s: Callable[[int], float],
    draft_token_s: float,
    rival_tokens_per_s: float,
    most: int = 16,
    least: int = 1,
) -> float | None:
    """Return the least acceptance at which the best draft length is as fast as the rival; None if even 1 is too low.

    The rival is the best target-only run, whose placement holds more target layers than that of ``target_pass_s``. Not
    drafting is excluded, or a draft that costs no layers would always break even at 0. ``least`` = ``most`` fixes the
    length.
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

# Standard deviation of log(true ÷ stated time) of a device by source of its figures, and of a measured token
_UNSURE = {"measured": 0.1, "catalogue": 0.2, "guess": 0.6, "unknown": 1.5}
_UNSURE_POINT = 0.02
_STEPS = 100


@dataclass(frozen=True, slots=True)
class MeasuredToken:
    """Measured seconds of one target-only token at a placement, with ``depth`` tokens in ``context``'s cache."""

    placement: Placement
    token_s: float
    depth: int = 0
    context: ContextOptions | None = None


def corrected(
    points: Sequence[MeasuredToken], header: ModelHeader, machine: MachineProfile, cards: Sequence[str] = ()
) -> MachineProfile:
    """Return ``machine`` corrected by measured tokens of a model; unchanged without any.

    A token's time is a sum over the devices and fixed costs, each with an unknown factor, whose prior depends on the
    figures' source (``_UNSURE``; fixed costs: the least known device's). So one point changes the least known device,
    two or more tell devices apart, and unused ones stay. Maximum a posteriori by Levenberg-Marquardt.
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

    # The sum of exponentials may have a minimum for each part that can explain the points, so start at each
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
