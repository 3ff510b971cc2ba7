"""Speed of this machine, measured with dummy models in about ten seconds and cached, or taken from the catalogue.

Dummy models are all-zero llama models in sparse files (:func:`ggufspec.llamacpp.gguf.write_model`). Zeros cost as much
as any other weights: kernels do the same work for all values, and each hole is mapped to its own pages, so reading it
causes real memory traffic. Two narrow models, one with few blocks and one with many, give the fixed costs
per pass and per block; one wide model per weight type gives bandwidth and T(n). On the CPU, the wide models are loaded
together and timed in turn, so that none stays in the last-level cache, which servers share among many users. Only the
weight types and attention head sizes of the models at hand are measured; others are added when needed.

If other programs are busy, the CPU is measured with the threads that they leave free. Such a result is marked as
disturbed, is cached only if the cache has no undisturbed one, and is measured again once those programs have ended.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ggufspec import child
from ggufspec.errors import UsageError
from ggufspec.files.cache import JsonTable
from ggufspec.files.write import scratch
from ggufspec.hardware import gpus, host
from ggufspec.hardware.cards import GpuModel, find_card
from ggufspec.hardware.disturbance import Disturbance, SystemCounters
from ggufspec.llamacpp import devices as ggml
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, ContextOptions, Placement, is_remote
from ggufspec.planning.catalogue import CROSSING_S, UNKNOWN, cores_here, from_catalogue, link_bytes_per_s
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import BITS, Attention, DeviceProfile, MachineProfile, nearest_head, weight_bytes

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Context
    from ggufspec.models.header import ModelHeader

TYPES = ("f16", "q4_K", "q8_0", "q6_K", "q4_0", "q3_K")  # weight types, the most informative first
HEADS = (64, 128)
BATCH_SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 32)
_ATTENTION_BATCH_SIZES = (1, 8)
_FEWEST = 2  # number of narrow dummy models, which are always timed, as is one wide model
_ROUNDS = 2  # minimum number of timings per batch size
_MOST_TOGETHER_BYTES = 2**30
_MOST_KEPT = 16  # maximum number of cached machine profiles
_TELLING_SHARE = 0.02  # weight types with a smaller share of a model's bytes are not measured


# ---- dummy models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DummyModel:
    """All-zero llama model with four query heads per key-value head."""

    kind: str
    width: int
    ffn: int
    blocks: int
    vocabulary: int = 1024
    head: int = 64

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return (row length, number of rows) of each matrix in a block."""
        kv = max(self.width // 4, self.head)
        found = dict.fromkeys(("attn_q", "attn_output"), (self.width, self.width))
        found |= dict.fromkeys(("attn_k", "attn_v"), (self.width, kv))
        found |= dict.fromkeys(("ffn_gate", "ffn_up"), (self.width, self.ffn))
        return found | {"ffn_down": (self.ffn, self.width)}

    @property
    def block_numbers(self) -> int:
        """Number of weights in one block, excluding norms."""
        return sum(row * rows for row, rows in self.matrices().values())

    @property
    def numbers(self) -> int:
        """Number of weights read per token, in all blocks and the output."""
        return self.blocks * self.block_numbers + self.width * self.vocabulary

    @property
    def read_share(self) -> float:
        """Share of the file's weights read per token (of the embedding table, one row)."""
        return self.numbers / (self.numbers + self.width * self.vocabulary)

    def write(self, path: Path) -> None:
        """Write the model as a sparse file."""
        metadata: dict[str, str | int | float] = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "none",
            "llama.vocab_size": self.vocabulary,
            "llama.block_count": self.blocks,
            "llama.context_length": 4096,
            "llama.embedding_length": self.width,
            "llama.feed_forward_length": self.ffn,
            "llama.attention.head_count": self.width // self.head,
            "llama.attention.head_count_kv": max(self.width // (4 * self.head), 1),
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }
        tables = dict.fromkeys(("token_embd", "output"), (self.width, self.vocabulary))
        blocks = {f"blk.{i}.{name}": shape for i in range(self.blocks) for name, shape in self.matrices().items()}
        norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(self.blocks) for name in ("attn_norm", "ffn_norm"))]
        tensors: list[tuple[str, str, tuple[int, ...]]] = [(f"{name}.weight", "f32", (self.width,)) for name in norms]
        tensors += [(f"{name}.weight", self.kind, shape) for name, shape in (tables | blocks).items()]
        write_model(path, metadata, tensors)


# ---- the measurement -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineProfileJob:
    """Settings for measuring a machine; the defaults are for a full measurement."""

    threads: int  # CPU threads that plans assume
    rpc: tuple[str, ...] = ()  # endpoints of workers whose devices are measured too
    left: int = 0  # CPU threads that other programs currently leave free; 0: all
    types: tuple[str, ...] = TYPES  # weight types to measure
    batch_sizes: tuple[int, ...] = BATCH_SIZES  # batch sizes to time; the first is 1
    wide_bytes: int = 128 * 2**20  # minimum size of each dummy model with wide matrices
    together_bytes: int = 0  # minimum total size of the CPU's wide models; see beyond_cache_bytes
    card_bytes: int = 512 * 2**20  # minimum size of each wide model on a local GPU
    rounds: int = 9  # maximum number of timings per batch size
    model_s: float = 0.5  # seconds to spend on one model, after a warm-up batch
    device_s: float = 8.0  # seconds to spend on one GPU or worker; types not measured by then are skipped
    cache_types: tuple[str, ...] = ("f16", "q8_0")  # KV cache types to time attention with, on the CPU and workers
    heads: tuple[int, ...] = HEADS  # attention head sizes to time
    depth: int = 512  # number of cached tokens when attention is timed


@dataclass(frozen=True, slots=True)
class DummyTiming:
    """Timings of one dummy model on one device.

    Seconds are lower quartiles, because other programs inflate the mean and a long run does not sustain the minimum.
    """

    dummy: DummyModel
    read_bytes: int  # bytes read per token
    load_s: float
    seconds: dict[int, float]  # seconds per batch, by batch size


@dataclass(frozen=True, slots=True)
class MachineProfileResult:
    """Result of measuring a machine; the device ``HOST`` is the CPU."""

    timings: dict[str, list[DummyTiming]]  # timings by device, narrow models first
    devices: tuple[ggml.Device, ...]  # all devices that ggml sees
    disturbance: Disturbance = field(default_factory=Disturbance)  # other programs' load while the CPU was measured
    attention: dict[str, Attention] = field(default_factory=dict)  # attention speeds by device (``DeviceProfile``)


def run(spec: MachineProfileJob, emit: child.Emit, stopping: threading.Event) -> MachineProfileResult:
    """Measure in this process; before each timing, emit an event ``measuring`` with the device and dummy models."""
    ggml.add_rpc_workers(spec.rpc)
    here = ggml.devices()
    cards = [device.name for device in ggml.offloading(here)]
    timings: dict[str, list[DummyTiming]] = {name: [] for name in (HOST, *cards)}
    streams = any(not is_remote(name) for name in cards)
    before, disturbance = SystemCounters.now(), Disturbance()
    attention: dict[str, Attention] = {}
    with scratch() as folder:
        for index, (name, found) in enumerate(timings.items()):
            is_card = index > 0 and not is_remote(name)
            placement = Placement(-1, tuple(float(name == card) for card in cards)) if index else Placement()
            # Larger batches with CPU weights may run on a GPU, so they do not measure the CPU
            batch_sizes = [
                batch_size
                for batch_size in spec.batch_sizes
                if index or not streams or batch_size < OP_OFFLOAD_MIN_BATCH
            ]
            until = time.perf_counter() + spec.device_s
            wide_bytes = max(spec.wide_bytes, spec.together_bytes // len(spec.types) if index == 0 else 0)
            dummies = dummy_models(spec.types, spec.card_bytes if is_card else wide_bytes)
            groups = [[dummy] for dummy in dummies[: _FEWEST if index == 0 else None]]
            for group in [*groups, dummies[_FEWEST:]] if index == 0 else groups:
                if stopping.is_set():
                    return MachineProfileResult(timings, tuple(here), disturbance, attention)
                if index and len(found) > _FEWEST and time.perf_counter() > until:
                    break
                kinds = ", ".join(dummy.kind for dummy in group)
                emit({"event": "measuring", "device": name, "type": kinds, "blocks": group[0].blocks})
                found += _time(folder, group, placement, batch_sizes, spec)
            if not is_card:
                emit({"event": "measuring", "device": name, "type": "attention", "blocks": _ATTENTION.blocks})
                attention[name] = _attention(folder / "attention.gguf", placement, spec)
            if index == 0:
                disturbance = SystemCounters.now().since(before)
    return MachineProfileResult(timings, tuple(here), disturbance, attention)


def dummy_models(types: Sequence[str], wide_bytes: int) -> list[DummyModel]:
    """Return two narrow models, then a wide model per weight type."""
    found = [DummyModel(types[0], 256, 256, blocks) for blocks in (4, 28)]
    # As narrow as a 1.5B model, because predictions from wider ones were too optimistic: F16 rows of 1536 weights were
    # read at 23 to 25 GB/s, rows of 2048 and 8192 at 26 to 28 (two cores of a virtual Sapphire Rapids)
    width, ffn = (1536, 6144) if wide_bytes >= 2**26 else (512, 1024)
    for kind in types:
        block = DummyModel(kind, width, ffn, 1)
        block_bytes = block.block_numbers * BITS.get(kind, 4.5) / 8
        found.append(replace(block, blocks=max(2, round(wide_bytes / block_bytes))))
    return found


def _time(
    folder: Path,
    dummies: Sequence[DummyModel],
    placement: Placement,
    batch_sizes: Sequence[int],
    spec: MachineProfileJob,
) -> list[DummyTiming]:
    """Load dummy models together and time them in turn."""
    from ggufspec.llamacpp.model import Context, Model

    loaded: list[tuple[DummyModel, int, float, Context, dict[int, list[float]]]] = []
    with ExitStack() as stack:
        for number, dummy in enumerate(dummies):
            path = folder / f"dummy-{number}.gguf"
            dummy.write(path)
            began = time.perf_counter()
            model = stack.enter_context(Model(path, placement))
            load_s = time.perf_counter() - began
            options = ContextOptions(
                ctx_size=max(batch_sizes) + 1, max_outputs=max(batch_sizes), threads=spec.left or spec.threads
            )
            context = stack.enter_context(closing(Context(model, options)))
            _batch(context, max(batch_sizes))  # untimed, to page in weights and grow buffers to their maximum
            loaded.append(
                (
                    dummy,
                    int(model.size_bytes * dummy.read_share),
                    load_s,
                    context,
                    {batch_size: [] for batch_size in batch_sizes},
                )
            )
        until = time.perf_counter() + spec.model_s * len(loaded)
        for done, batch_size in ((done, batch_size) for done in range(spec.rounds) for batch_size in batch_sizes):
            if done >= _ROUNDS and time.perf_counter() > until:
                break
            for *_, context, samples in loaded:
                samples[batch_size].append(_batch(context, batch_size))
    for number, _ in enumerate(dummies):
        (folder / f"dummy-{number}.gguf").unlink()
    return [
        DummyTiming(
            dummy,
            read_bytes,
            load_s,
            {batch_size: sorted(taken)[len(taken) // 4] for batch_size, taken in samples.items()},
        )
        for dummy, read_bytes, load_s, _, samples in loaded
    ]


_ATTENTION = DummyModel("q8_0", 2048, 256, 2)  # dummy model that spends nearly all its time on attention
_TELLING = 0.1  # relative slowdown by cached tokens below which it counts as noise


def _attention(path: Path, placement: Placement, spec: MachineProfileJob) -> Attention:
    """Return the K/V elements that attention processes per second, by cache type, head size and batch size."""
    from ggufspec.llamacpp.model import Context, Model

    found: Attention = {kind: {} for kind in spec.cache_types}
    for head in spec.heads:
        replace(_ATTENTION, head=head).write(path)
        with Model(path, placement) as model:
            for kind, by_head in found.items():
                threads, widest = spec.left or spec.threads, max(_ATTENTION_BATCH_SIZES)
                options = ContextOptions(spec.depth + widest, widest, threads, cache_type_k=kind, cache_type_v=kind)
                with closing(Context(model, options)) as context:
                    seconds: dict[tuple[int, int], float] = {}
                    for depth in (0, spec.depth):
                        if depth:
                            context.decode([1] * depth, 1)
                        for batch_size in _ATTENTION_BATCH_SIZES:
                            seconds[depth, batch_size] = min(
                                _batch(context, batch_size, depth) for _ in range(spec.rounds)
                            )
                by_head[head] = {}
                for batch_size in _ATTENTION_BATCH_SIZES:
                    more_s = seconds[spec.depth, batch_size] - seconds[0, batch_size]
                    if more_s > _TELLING * seconds[0, batch_size]:
                        numbers = 2.0 * _ATTENTION.width * spec.depth * _ATTENTION.blocks * batch_size
                        by_head[head][batch_size] = numbers / more_s
        path.unlink()
    return found


def _batch(context: Context, batch_size: int, depth: int = 0) -> float:
    """Return the seconds for one batch after ``depth`` cached tokens, with logits for all tokens as in verification."""
    context.rewind(depth)
    tokens = [1] * batch_size
    began = time.perf_counter()
    context.decode(tokens, batch_size)
    return time.perf_counter() - began


# ---- interpretation --------------------------------------------------------------------------------------------------


def merged(new: MachineProfile, before: MachineProfile | None) -> MachineProfile:
    """Merge a measurement with an earlier one of the same machine, which may cover other types and head sizes. Pure.

    The new values win unless only the new measurement was disturbed. If only the old one was disturbed, it is dropped.
    """
    if before is None or (before.disturbed and not new.disturbed):
        return new
    first, second = (before, new) if new.disturbed and not before.disturbed else (new, before)
    devices = {
        name: device.merged(second.devices[name]) if name in second.devices else device
        for name, device in (second.devices | first.devices).items()
    }
    return first if devices == first.devices else replace(first, devices=devices, disturbed=new.disturbed)


@dataclass(frozen=True, slots=True)
class DueMeasurement:
    """Measurement to make, and the reason for it; a plan ``needs`` it if the main weight type was never measured."""

    spec: MachineProfileJob
    why: str
    needs: bool = False


def due(folder: Path, spec: MachineProfileJob, cpus: int, others_cpus: Callable[[], float]) -> DueMeasurement | None:
    """Return the part of ``spec`` that has not been measured yet, or None if everything has.

    ``others_cpus`` returns how many CPUs other programs keep busy; once these are free, disturbed measurements are due.
    """
    kept = _kept(folder, spec.threads)
    if kept is None:
        return DueMeasurement(spec, "it is not known yet", needs=True)
    here, speed = kept.speed.device(HOST), kept.speed
    if speed.disturbed and host.threads_left(spec.threads, cpus, others_cpus()) == spec.threads:
        known = (kind for kind in here.by_type if kind not in spec.types)
        needs = spec.types[0] not in here.by_type
        return DueMeasurement(
            replace(spec, types=(*spec.types, *known)), f"it was measured while {speed.disturbed}", needs
        )
    types = tuple(kind for kind in spec.types if kind not in here.by_type)
    known_heads = [set(here.attention.get(kind, {})) for kind in spec.cache_types]
    heads = tuple(head for head in spec.heads if not all(head in known for known in known_heads))
    if not types and not heads:
        return None
    what = ", ".join([*types, *(f"heads of {head}" for head in heads)])
    due_spec = replace(spec, types=types or spec.types[:1], heads=heads)
    return DueMeasurement(due_spec, f"{what} were not measured yet", needs=spec.types[0] in types)


def beyond_cache_bytes() -> int:
    """Return twice the size of the CPU's last-level cache, but at most 1 GiB and an eighth of the free RAM."""
    return min(2 * host.last_cache_bytes(), _MOST_TOGETHER_BYTES, host.free_memory_bytes() // 8)


def types_of(headers: Sequence[ModelHeader]) -> tuple[str, ...]:
    """Return the weight types to measure for these models, ordered by decreasing bytes. Pure."""
    found = Counter[str]()
    for header in headers:
        of_model = weight_bytes(header)
        least = _TELLING_SHARE * sum(of_model.values())
        found.update({kind: size for kind, size in of_model.items() if kind in BITS and size >= least})
    return tuple(kind for kind, _ in found.most_common()) or TYPES[:1]


def heads_of(headers: Sequence[ModelHeader]) -> tuple[int, ...]:
    """Return the sizes in :data:`HEADS` that are nearest to the models' attention head sizes. Pure."""
    return tuple(sorted({nearest_head(header.key_size, HEADS) for header in headers}))


def interpret_timings(result: MachineProfileResult, link_bytes_per_s: float, origin: str) -> MachineProfile:
    """Return the speeds that explain a measurement. Pure.

    T(1) of two narrow models and a wide one with the same weight type gives three equations for the costs per pass,
    per block and per byte. Each of the other wide models gives the cost of its weight type.
    """
    fixed = {name: _fixed(timings) for name, timings in result.timings.items()}
    speeds = {
        name: replace(_speed(timings[2:], *fixed[name]), attention=result.attention.get(name, {}))
        for name, timings in result.timings.items()
    }
    pass_s = fixed[HOST][0]
    beyond = [max(0.0, own - pass_s) / 2 for name, (own, _) in fixed.items() if name != HOST]  # two crossings per pass
    cards = [name for name in speeds if name != HOST]
    if cards and all(is_remote(name) for name in cards):
        link_bytes_per_s = max(t.read_bytes / t.load_s for name in cards for t in result.timings[name][2:])
    return MachineProfile(
        devices=speeds,
        pass_s=pass_s,
        crossing_s=median(beyond) if beyond else CROSSING_S,
        link_bytes_per_s=link_bytes_per_s,
        origin=origin,
        streams=any(not is_remote(name) for name in cards),
        memory_bytes=None,
    )


def _fixed(timings: Sequence[DummyTiming]) -> tuple[float, float]:
    """Return the fixed seconds (per pass, per block) from two narrow models and a wide one."""
    import numpy as np

    rows = [[1.0, timing.dummy.blocks, timing.read_bytes] for timing in timings[:3]]
    seconds = [timing.seconds[1] for timing in timings[:3]]
    pass_s, layer_s, _ = (float(value) for value in np.linalg.solve(np.array(rows), np.array(seconds)))
    return max(pass_s, 0.0), max(layer_s, 0.0)


def _speed(timings: Sequence[DummyTiming], pass_s: float, layer_s: float) -> DeviceProfile:
    by_type: dict[str, float] = {}
    batch_latencies: dict[str, dict[int, float]] = {}
    flops_per_s = 0.0
    for timing in timings:
        fixed_s = pass_s + timing.dummy.blocks * layer_s
        weights = {n: max(seconds - fixed_s, seconds / 10) for n, seconds in timing.seconds.items()}
        kind, widest = timing.dummy.kind, max(weights)
        by_type[kind] = timing.read_bytes / weights[1]
        batch_latencies[kind] = {n: seconds / weights[1] for n, seconds in sorted(weights.items())}
        flops_per_s = max(flops_per_s, 2 * timing.dummy.numbers * widest / weights[widest])
    return DeviceProfile(by_type[timings[0].dummy.kind], flops_per_s, layer_s, "measured", by_type, batch_latencies)


# ---- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Identity of the machine that was measured; ``devices``: names and descriptions of all ggml devices."""

    llama_cpp_python: str
    cpu: str
    threads: int
    devices: tuple[str, ...] = ()


def machine_identity(threads: int, here: Sequence[ggml.Device] = ()) -> MachineIdentity:
    names = tuple(f"{device.name} {device.description}" for device in here)
    return MachineIdentity(version("llama-cpp-python"), host.cpu_name(), threads, names)


def load_speeds(folder: Path, threads: int, here: Sequence[ggml.Device]) -> MachineProfile | None:
    """Return the cached profile for this machine with these threads and devices, or None."""
    kept = _kept(folder, threads)
    return kept.speed if kept and kept.identity == machine_identity(threads, here) else None


@dataclass(frozen=True, slots=True)
class _Kept:
    identity: MachineIdentity
    speed: MachineProfile


def _table(folder: Path) -> JsonTable[_Kept]:
    return JsonTable(folder / "calibration.json", _Kept, _MOST_KEPT)


def _key(of: MachineIdentity) -> str:
    return f"{of.cpu}; {of.threads} threads; llama-cpp-python {of.llama_cpp_python}"


def _kept(folder: Path, threads: int) -> _Kept | None:
    """Return the cached profile for this CPU with these threads, whatever its devices."""
    return _table(folder).get(_key(machine_identity(threads)))


def expected_speeds(
    cards: Mapping[str, GpuModel | None], *, folder: Path, threads: int, is_here: bool = True
) -> MachineProfile:
    """Return measured speeds of the GPUs, or else the catalogue's; ``cards``: GPUs by name (None: unrecognised).

    The CPU's speed is this machine's if it was measured or ``is_here`` is set, otherwise a typical desktop's.
    """
    kept = _kept(folder, threads)
    here = kept.speed if kept else None
    wanted = {name: card or UNKNOWN for name, card in cards.items()}
    cores = cores_here(threads) if here or is_here else None
    speed = from_catalogue(list(wanted.values()), list(wanted), here, cores)
    if kept and here:
        measured = [
            name for name, card in cards.items() if name in here.devices and _is_here(name, card, kept.identity)
        ]
        # On GPUs, attention at depth and batches with experts are not measured, so use the catalogue's values
        devices = {name: here.devices[name] for name in measured}
        cards_here = (name for name in measured if not is_remote(name))
        devices |= {name: _completed(devices[name], speed.devices[name]) for name in cards_here}
        base = here if measured and len(measured) == len(cards) else speed
        speed = replace(base, devices=base.devices | devices)
    return replace(speed, memory_bytes=host.free_memory_bytes())


def _completed(measured: DeviceProfile, guess: DeviceProfile) -> DeviceProfile:
    return replace(measured, attention=measured.attention or guess.attention, experts=measured.experts or guess.experts)


def _is_here(name: str, card: GpuModel | None, kept: MachineIdentity) -> bool:
    """Return whether the device that was measured under this name is this GPU."""
    found = next((device for device in kept.devices if device.startswith(f"{name} ")), "")
    try:
        return card is None or find_card(found.removeprefix(f"{name} ")) == card
    except UsageError:
        return False


def measure_machine(
    folder: Path, spec: MachineProfileJob, *, on_event: child.Emit | None = None, verbose: bool = False
) -> MachineProfile:
    """Measure this machine in a child process, and cache the result merged with an earlier one (:func:`merged`).

    Raises:
        GgufspecError: an RPC worker does not respond, or llama.cpp crashed.
        Interrupted: the user pressed Ctrl-C.
    """
    result = child.call(__name__, spec, MachineProfileResult, on_event=on_event, verbose=verbose)
    disturbed = result.disturbance.reason(spec.threads, host.usable_cpus())
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    origin = f"measured on {today} with llama-cpp-python {version('llama-cpp-python')}"
    speed = replace(
        interpret_timings(result, _link_here(result.devices), f"{origin} while {disturbed}" if disturbed else origin),
        disturbed=disturbed,
    )
    speed = merged(speed, load_speeds(folder, spec.threads, result.devices))
    _keep(folder, speed, machine_identity(spec.threads, result.devices))
    return speed


def _keep(folder: Path, speed: MachineProfile, of: MachineIdentity) -> None:
    _table(folder).put(_key(of), _Kept(of, speed))


def _link_here(devices: Sequence[ggml.Device]) -> float:
    """Return the slowest link rate among the GPUs that ggml sees."""
    seen = gpus.gpus()
    here = [card for one in devices if (card := gpus.of_device(one.device_id, one.description, seen))]
    return min((link_bytes_per_s(c.pcie_generation, c.pcie_width) for c in here), default=link_bytes_per_s(4, 16))
