"""How fast a placement will be: seconds of one batch from bytes and bandwidths. Pure: no model, clock or I/O.

A token costs what must be read for it: the weights of every block on the block's device, the KV cache, and some fixed
costs. A batch of n tokens reads the same weights once and computes n times, and T(n) / T(1) is neither flat nor
monotonic: it belongs to the kernels of a machine and a weight type. So a device carries its measured batch latencies
(:mod:`ggufspec.planning.machine_profile`); otherwise the slower of memory and compute.
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

# Kernel launches of a block besides those of a dense block with attention: fitted, see planning.catalogue
ROUTING, RECURRENCE = 0.5, 0.5
_TABLES = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")  # rows, not matrices

# Of what a link carries from pinned memory: 0.5 to 0.55 by llama.cpp's issues 20978 and 28223; on PCIe 5 x16 with an
# H100 52 and 10 GB/s were measured
_PAGEABLE, _PAGEABLE_BYTES_PER_S = 0.5, 10e9
# Of the experts that tokens which choose at random would add: neighbours agree. Four tokens ran through 2.5 times one
# token's, not 3.6 (cohere.com/blog/mixture-of-experts-models-get-more-from-speculative-decoding)
_APART = 0.6
_DIRECT = 4 / 3  # of what a CPU reads of its memory, 0.6 of the data sheet: what a card does, a guess

BatchLatency = Mapping[int, float]
Attention = dict[str, dict[int, dict[int, float]]]
"""Numbers a second by type of the KV cache, size of a head and tokens in a batch."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device.

    Args:
        bandwidth_bytes_per_s: what reading weights reaches there.
        flops_per_s: what wide batches reach.
        layer_s: fixed cost of a block per pass.
        source: where the figures are from; "unknown" of a card that is in no catalogue.
        by_type: bandwidth by weight type as ggml spells it, where it is known: unpacking some types costs a CPU more
            than reading them.
        batch_latencies: T(n) / T(1) of the weights by type, then by n; each begins with n = 1.
        attention: numbers of keys and values that attention gets through in a second, counted for each query head and
            each token; empty if reading the cache is all that it costs.
        experts: what a batch's experts take, by its tokens, of what their bytes do; empty: as long.
    """

    bandwidth_bytes_per_s: float
    flops_per_s: float
    layer_s: float = 0.0
    source: Literal["measured", "catalogue", "guess", "unknown"] = "guess"
    by_type: dict[str, float] = field(default_factory=dict)
    batch_latencies: dict[str, dict[int, float]] = field(default_factory=dict)
    attention: Attention = field(default_factory=dict)
    experts: BatchLatency = field(default_factory=dict)

    def scaled(self, factor: float) -> DeviceProfile:
        """The same device, its weights' time multiplied by ``factor``."""
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
        """The same device with the types and heads that only ``other`` has."""
        kinds = dict.fromkeys([*self.attention, *other.attention])
        return replace(
            self,
            by_type=other.by_type | self.by_type,
            batch_latencies=other.batch_latencies | self.batch_latencies,
            attention={kind: other.attention.get(kind, {}) | self.attention.get(kind, {}) for kind in kinds},
        )

    def cache_s(self, size_bytes: float, numbers: float, types: Sequence[str], head: int, width: int = 1) -> float:
        """Seconds to read so many bytes of cache, or to get through so many numbers, whichever takes longer."""
        seconds = [size_bytes / self.bandwidth_bytes_per_s]
        for kind in types if self.attention else ():
            by_head = self.attention[_nearest(kind, self.attention)]
            rates = by_head[nearest_head(head, tuple(by_head))] if by_head else {}
            seconds += [numbers / interpolate(rates, width)] if rates else []
        return max(seconds)

    def weights_s(self, kind: str, size_bytes: float, flops: float, width: float = 1.0) -> float:
        """Seconds to read so many bytes of one type and compute; ``width`` is tokens that each weight meets."""
        read_s = size_bytes / self.by_type.get(_nearest(kind, self.by_type), self.bandwidth_bytes_per_s)
        batch_latency = self.batch_latencies.get(_nearest(kind, self.batch_latencies))
        if not batch_latency:
            return max(read_s, flops / self.flops_per_s)
        widest = max(batch_latency)
        seconds = read_s * interpolate(batch_latency, width)
        return seconds if width <= widest else max(seconds, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """A machine; the host is the device ``HOST``.

    Args:
        devices: by name.
        pass_s: fixed cost of a pass.
        crossing_s: fixed cost of handing the residual stream to another device.
        link_bytes_per_s: between host and cards.
        origin: where the figures are from, in a sentence.
        streams: whether a card computes with the host's weights in batches of ``op_offload_min_batch`` tokens and more;
            RPC does not.
        memory_bytes: RAM that can hold weights; None: enough.
        disk_bytes_per_s: what is read from disk when they do not fit; a guess, of an NVMe disk.
        disturbed: why an idle machine would have been found faster, or empty.
        repacked: with repacked weights the host takes this share of its time, by type and tokens; empty without cards,
            where it is measured so.
    """

    devices: dict[str, DeviceProfile]
    pass_s: float
    crossing_s: float
    link_bytes_per_s: float
    origin: str
    streams: bool = False
    memory_bytes: int | None = None
    disk_bytes_per_s: float = 2e9
    disturbed: str = ""
    repacked: dict[str, BatchLatency] = field(default_factory=dict)

    def copied_bytes_per_s(self, *, mapped: bool) -> float:
        """The link's rate for the host's weights; pages of a file go through a buffer of the driver's."""
        host, link = self.devices[HOST], self.link_bytes_per_s
        if host.source == "guess":  # by its memory; what few cores read of one is no bound
            link = min(link, host.bandwidth_bytes_per_s * _DIRECT)
        return min(link * _PAGEABLE, _PAGEABLE_BYTES_PER_S) if mapped else link

    def device(self, name: str) -> DeviceProfile:
        """One device.

        Raises:
            UsageError: nothing is known of it.
        """
        try:
            return self.devices[name]
        except KeyError:
            known = ", ".join(self.devices)
            raise UsageError(
                f"the speed of the device {name} is not known", f"known: {known}; calibrate again"
            ) from None


def interpolate(batch_latency: BatchLatency, width: float) -> float:
    """``batch_latency`` at ``width``: exact where it was measured, linear between, flat outside."""
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


_OTHER_FAMILY = 0.5  # as far as a factor of 2^0.5 in bits


def _nearest(kind: str, known: Mapping[str, object]) -> str:
    """The type of ``known`` that ``kind`` is most like: itself, else one of about its bits and of its family."""
    return kind if kind in known or not known else _nearest_of(kind, tuple(known))


@functools.cache
def _nearest_of(kind: str, known: tuple[str, ...]) -> str:
    def distance(other: str) -> float:
        bits = abs(math.log2(BITS.get(other, 4.5) / BITS.get(kind, 4.5)))
        return bits + _OTHER_FAMILY * (_family(kind) != _family(other))

    return min(known, key=distance)


def nearest_head(size: int, known: Sequence[int]) -> int:
    """The size of a head that ``size`` is most like, by ratio."""
    return min(known, key=lambda other: abs(math.log2(other / max(1, size))))


def _family(kind: str) -> str:
    """What is unpacked alike: blocks with a scale, or super-blocks of 256."""
    return "K" if kind.endswith("_K") or kind.startswith("iq") else kind[-2:]


# ---- what a model reads ----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Weights of one type, of experts or not, that are together wherever a layer is: :func:`memory.parts`."""

    type: str
    experts: bool
    part: str


@dataclass(frozen=True, slots=True)
class _Weights:
    """Matrices of one type on one device; of the experts a token reads only some."""

    device: str
    kind: str
    experts: bool
    size_bytes: int
    numbers: int


@dataclass(frozen=True, slots=True)
class _Cache:
    """What a block keeps: f32 numbers of state, numbers per token of keys and of values, and its window; 0 is none.

    ``attended`` are the numbers of keys and values of a token that its query heads together go through, ``head`` those
    of a head's keys.
    """

    state: int
    keys: int
    values: int
    window: int
    attended: int = 0
    head: int = 0

    def seen(self, cells: int) -> int:
        """Of so many tokens in the cache, those that a token looks at."""
        return min(cells, self.window) if self.window else cells

    def read_bytes(self, cells: int, types: Sequence[str]) -> float:
        """Bytes that a pass reads with so many tokens in the cache; a state is read and written."""
        keys_bytes, values_bytes = (KV_TYPES[kind][1] / KV_TYPES[kind][0] for kind in types)
        return 8.0 * self.state + self.seen(cells) * (self.keys * keys_bytes + self.values * values_bytes)


@dataclass(frozen=True, slots=True)
class _Placed:
    """One placement of a model, whatever the batch.

    ``host_bytes`` are those of the weights on the host. ``blocks`` counts alike blocks by device; ``table_bytes`` are
    tables on the host, of which a token reads ``row_bytes``; ``crossings`` is how often the residual stream changes
    devices, the logits' way home included.
    """

    weights: tuple[_Weights, ...]
    host_bytes: int
    blocks: tuple[tuple[str, _Cache, int], ...]
    table_bytes: int
    row_bytes: float
    crossings: int


@functools.lru_cache(maxsize=32)
def _layers(same: SameHeader, override_tensor: tuple[str, ...]) -> tuple[Mapping[_Kind, tuple[int, int]], ...]:
    """(bytes, numbers) that a pass may read of each layer by kind; the output comes last.

    NextN blocks have none: a pass does not run them (src/llama-hparams.cpp, n_layer).
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
    """Of each block that a pass runs."""
    return tuple(_cache(same.header, block) for block in range(same.header.blocks - same.header.nextn_blocks))


def _cache(header: ModelHeader, block: int) -> _Cache:
    state = header.conv_numbers + header.state_numbers if header.recurrent[block] else 0
    if header.recurrent[block] and not header.cached[block]:
        return _Cache(state, 0, 0, 0)
    keys, values = (header.latent, 0) if header.latent else (header.keys(block), header.values(block))
    groups = header.heads[block] / max(1, header.kv_heads[block])  # query heads of a key-value head
    attended = header.heads[block] * 2 * header.latent if header.latent else round(groups * (keys + values))
    window, head = header.sliding_window if header.windowed[block] else 0, header.latent or header.key_size
    return _Cache(state, keys, values, window, attended, head)


# ---- one pass --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one pass: of the weights and the KV cache by device, what is fixed, and of copies to a card."""

    devices: dict[str, float]
    fixed_s: float
    copies_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
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
    """Where the time of one batch goes; arguments as for :func:`pass_s`."""
    placed = _placed(SameHeader(header), placement, tuple(cards))
    used = header.experts_used / header.experts if header.experts else 1.0
    # Share of the experts that n tokens run through: if they chose at random it would be (arXiv:2505.19645, equation 1)
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
        width = tokens * share / read  # tokens that each weight meets
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
        # "expand gpu" in ggml_backend_sched_split_graph: attention follows its weights
        if streams and name == HOST and not placement.no_host:
            name = cards[0]
            copies_s += count * read_bytes / machine.copied_bytes_per_s(mapped=False)
        speed = machine.device(name)
        seconds[name] += count * speed.cache_s(read_bytes, numbers, types, cache.head, tokens)
        launches = 1.0 + ROUTING * bool(header.experts) + RECURRENCE * bool(cache.state)
        fixed_s += count * speed.layer_s * launches
    if placed.crossings:
        numbers = (placed.crossings - 1) * header.embedding + header.vocabulary  # the last hands the logits over
        fixed_s += placed.crossings * machine.crossing_s + 4.0 * tokens * numbers / machine.link_bytes_per_s
    return Cost(seconds, fixed_s, copies_s)


@dataclass(frozen=True, slots=True)
class MeasuredBatches:
    """T(n) / T(1) of a model as a placement ran, by n from 1 on.

    At another placement the prediction is corrected by as much as it was wrong there. So a mixture's expected number
    of experts gives way to what its router really did.
    """

    placement: Placement
    relative: BatchLatency
    op_offload_min_batch: int = STREAM_WIDTH


def weight_bytes(header: ModelHeader) -> dict[str, int]:
    """Bytes of the weights that a pass may read, by type."""
    found = Counter[str]()
    for weights in _placed(SameHeader(header), Placement(), ()).weights:
        found[weights.kind] += weights.size_bytes
    return dict(found)


def host_bytes(header: ModelHeader, placement: Placement, cards: Sequence[str] = ()) -> int:
    """Bytes of the weights on the host that a pass may read."""
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
    """Seconds of one batch.

    Args:
        header: the model.
        placement: its layers.
        machine: has the host and every card.
        cards: names of the devices that layers can be offloaded to, in llama.cpp's order.
        tokens: in the batch.
        depth: tokens that are in the KV cache already.
        context: for the types of the cache; f16 without it.
        measured: T(n) / T(1) of this very model at some placement; used up to its last width.

    Raises:
        UsageError: ``machine`` does not know a card.
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
    """A draft length and what it yields; length 0 is target-only."""

    length: int
    tokens_per_s: float


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per round, 1 + α + … + α^length. Source: Leviathan et al. 2023, equation 1 (arXiv:2211.17192)."""
    if not 0 <= acceptance <= 1 or length < 0:
        raise ValueError(f"an acceptance of {acceptance} at length {length}")
    return math.fsum(acceptance**i for i in range(length + 1))


def accepted_share(acceptance: float, length: int) -> float:
    """Accepted ÷ drafted tokens at one draft length, as programs log it; ``acceptance`` is the chance of a token."""
    return (expected_tokens(acceptance, length) - 1) / length


@dataclass(frozen=True, slots=True)
class LookupRounds:
    """Rounds that the n-gram lookup began, in answers on this machine.

    Args:
        share: of all tokens, those that came of these rounds.
        drafted: tokens drafted in such a round, the mean.
        gained: tokens that came of such a round, the target's own among them.
    """

    share: float
    drafted: float
    gained: float


def with_lookup(tokens_per_s: float, target_pass_s: Callable[[int], float], lookup: LookupRounds) -> float:
    """Tokens/s if the lookup's rounds write their share of the text, but never less than without it: an adaptive
    policy leaves out what does not pay.
    """
    rate = lookup.gained / target_pass_s(round(lookup.drafted) + 1)
    return max(tokens_per_s, 1 / (lookup.share / rate + (1 - lookup.share) / tokens_per_s))


def best_length(
    target_pass_s: Callable[[int], float], draft_token_s: float, acceptance: float, most: int = 16, least: int = 0
) -> Choice:
    """The draft length of the highest rate, the shortest of equals; of long ones those that fill a batch.

    Args:
        target_pass_s: seconds of a target batch of so many tokens.
        draft_token_s: seconds of one drafted token.
        acceptance: chance that a drafted token is kept, given that all before it were.
        most: longest draft.
        least: shortest draft; 0 allows target-only.
    """
    tokens = [*itertools.accumulate(acceptance**i for i in range(most + 1))]
    fine = (n for n in range(least, most + 1) if n < _FINE or (n + 1) % _STEP == 0 or n == most)
    rates = {n: tokens[n] / (n * draft_token_s + target_pass_s(n + 1)) for n in fine}
    length = max(rates, key=rates.__getitem__)
    return Choice(length, rates[length])


_FINE, _STEP = 16, 8  # tokens of batches that are run: each up to the first, and then every so many
_HALVINGS = 60


def break_even_acceptance(
    target_pass_s: Callable[[int], float],
    draft_token_s: float,
    rival_tokens_per_s: float,
    most: int = 16,
    least: int = 1,
) -> float | None:
    """The least acceptance at which drafting, at its best length, is as fast as the rival; None if even 1 is not.

    The rival is the best target-only run, whose placement holds more target layers than ``target_pass_s`` does. Not
    drafting is no answer here, or a draft that costs no layers would always break even at 0. ``least`` = ``most`` asks
    about one draft length.
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

# How far a device's time may be from the truth, as a standard deviation of its logarithm
_UNSURE = {"measured": 0.1, "catalogue": 0.2, "guess": 0.6, "unknown": 1.5}
_UNSURE_POINT = 0.02  # the same of a measured token
_STEPS = 100


@dataclass(frozen=True, slots=True)
class MeasuredToken:
    """Seconds of one target-only token as a placement ran, with ``depth`` tokens in a cache of ``context``'s types."""

    placement: Placement
    token_s: float
    depth: int = 0
    context: ContextOptions | None = None


def corrected(
    points: Sequence[MeasuredToken], header: ModelHeader, machine: MachineProfile, cards: Sequence[str] = ()
) -> MachineProfile:
    """``machine`` as measured placements of a model show it; any number of them, and unchanged without one.

    A token's time is a sum over the devices and what is fixed. Each part has an unknown factor; what is likely of it
    beforehand goes by the source of the figures (``_UNSURE``; fixed costs are as unsure as the least known device). So
    one point changes the device that is known least, two or more tell the devices apart, and what none of them used
    stays. The factors are the most likely ones (maximum a posteriori, by Levenberg-Marquardt).
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

    # the sum of exponentials may have a minimum for each part that can explain the points, so start at each
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
