"""Speed of this machine: measured in about ten seconds with dummy models and cached, or guessed from the catalogue.

Dummy models are llama models of zeros in sparse files (:func:`ggufspec.llamacpp.gguf.write_model`). Zeros cost what any
weights cost: a hole is mapped to pages of its own, so that reading is real traffic, and no kernel looks at values. Two
narrow models with few and many blocks give the fixed costs of a pass and a block; a wide one per weight type gives
bandwidth and T(n). On the CPU the wide ones are loaded together and timed in turn, so that none stays in the last-level
cache, which a server shares with many. Only weight types and attention head sizes of the models at hand are measured;
others are added when needed.

Next to other programs the CPU is measured with the threads that they leave. The result says so, is cached unless there
is a better one, and is measured again when the programs are gone.
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
from ggufspec.files.cache import Table
from ggufspec.files.write import scratch
from ggufspec.hardware import gpus, host
from ggufspec.hardware.cards import Card, find_card
from ggufspec.hardware.disturbance import Counters, Disturbance
from ggufspec.llamacpp import devices as ggml
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.options import STREAM_WIDTH, ContextOptions, Placement, is_remote
from ggufspec.planning.catalogue import CROSSING_S, UNKNOWN, cores_here, from_catalogue, link_bytes_per_s
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import BITS, Attention, DeviceProfile, MachineProfile, nearest_head, weight_bytes

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Context
    from ggufspec.models.header import ModelHeader

TYPES = ("f16", "q4_K", "q8_0", "q6_K", "q4_0", "q3_K")  # the most informative first
HEADS = (64, 128)
WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 32)
_ATTENTION_WIDTHS = (1, 8)
_FEWEST = 2  # narrow dummy models; they and one wide one are always timed
_ROUNDS = 2  # minimum timings of each batch size
_MOST_TOGETHER_BYTES = 2**30
_MOST_KEPT = 16  # cached machine profiles
_TELLING_SHARE = 0.02  # share of a model's weights from which on a type is measured


# ---- dummy models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DummyModel:
    """Llama model of zeros with four query heads per key-value head."""

    kind: str
    width: int
    ffn: int
    blocks: int
    vocabulary: int = 1024
    head: int = 64

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return (row length, rows) of one block's matrices."""
        kv = max(self.width // 4, self.head)
        found = dict.fromkeys(("attn_q", "attn_output"), (self.width, self.width))
        found |= dict.fromkeys(("attn_k", "attn_v"), (self.width, kv))
        found |= dict.fromkeys(("ffn_gate", "ffn_up"), (self.width, self.ffn))
        return found | {"ffn_down": (self.ffn, self.width)}

    @property
    def block_numbers(self) -> int:
        """Weights of one block without norms."""
        return sum(row * rows for row, rows in self.matrices().values())

    @property
    def numbers(self) -> int:
        """Weights read per token: the blocks and the output."""
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
class Spec:
    """Settings of a measurement; the defaults are for a full one."""

    threads: int  # CPU threads of plans
    rpc: tuple[str, ...] = ()  # endpoints of workers whose devices are measured too
    left: int = 0  # CPU threads that other programs leave now; 0: all
    types: tuple[str, ...] = TYPES  # weight types
    widths: tuple[int, ...] = WIDTHS  # batch sizes; the first is 1
    wide_bytes: int = 128 * 2**20  # minimum size of each wide model
    together_bytes: int = 0  # size of the CPU's wide models together; see beyond_cache_bytes
    card_bytes: int = 512 * 2**20  # size of each wide model on a local GPU
    rounds: int = 9  # maximum timings of each batch size
    model_s: float = 0.5  # seconds to spend on one model, after a first read
    device_s: float = 8.0  # seconds to spend on one GPU or worker; remaining types are left out
    cache_types: tuple[str, ...] = ("f16", "q8_0")  # KV cache types for timing attention on the CPU and workers
    heads: tuple[int, ...] = HEADS  # attention head sizes to time it with
    depth: int = 512  # cached tokens to time it with


@dataclass(frozen=True, slots=True)
class Timing:
    """Timings of one dummy model on one device.

    Seconds are the lower quartile: other programs only add to them, but a long run does not reach their minimum.
    """

    dummy: DummyModel
    read_bytes: int  # bytes that a token reads
    load_s: float
    seconds: dict[int, float]  # seconds per batch, by batch size


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a measurement; ``HOST`` is the CPU."""

    timings: dict[str, list[Timing]]  # timings by device, narrow models first
    devices: tuple[ggml.Device, ...]  # all devices that ggml sees
    disturbance: Disturbance = field(default_factory=Disturbance)  # disturbance of the CPU's measurement
    attention: dict[str, Attention] = field(default_factory=dict)  # attention by device, as in ``DeviceProfile``


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    """Measure in this process; an event ``measuring`` names each device and dummy model before it is timed."""
    ggml.add_rpc_workers(spec.rpc)
    here = ggml.devices()
    cards = [device.name for device in ggml.offloading(here)]
    timings: dict[str, list[Timing]] = {name: [] for name in (HOST, *cards)}
    streams = any(not is_remote(name) for name in cards)
    before, disturbance = Counters.now(), Disturbance()
    attention: dict[str, Attention] = {}
    with scratch() as folder:
        for index, (name, found) in enumerate(timings.items()):
            is_card = index > 0 and not is_remote(name)
            placement = Placement(-1, tuple(float(name == card) for card in cards)) if index else Placement()
            # larger batches with CPU weights may run on a GPU
            widths = [width for width in spec.widths if index or not streams or width < STREAM_WIDTH]
            until = time.perf_counter() + spec.device_s
            wide_bytes = max(spec.wide_bytes, spec.together_bytes // len(spec.types) if index == 0 else 0)
            dummies = dummy_models(spec.types, spec.card_bytes if is_card else wide_bytes)
            groups = [[dummy] for dummy in dummies[: _FEWEST if index == 0 else None]]
            for group in [*groups, dummies[_FEWEST:]] if index == 0 else groups:
                if stopping.is_set():
                    return Result(timings, tuple(here), disturbance, attention)
                if index and len(found) > _FEWEST and time.perf_counter() > until:
                    break
                kinds = ", ".join(dummy.kind for dummy in group)
                emit({"event": "measuring", "device": name, "type": kinds, "blocks": group[0].blocks})
                found += _time(folder, group, placement, widths, spec)
            if not is_card:
                emit({"event": "measuring", "device": name, "type": "attention", "blocks": _ATTENTION.blocks})
                attention[name] = _attention(folder / "attention.gguf", placement, spec)
            if index == 0:
                disturbance = Counters.now().since(before)
    return Result(timings, tuple(here), disturbance, attention)


def dummy_models(types: Sequence[str], wide_bytes: int) -> list[DummyModel]:
    """Return two narrow models, then a wide one per type."""
    found = [DummyModel(types[0], 256, 256, blocks) for blocks in (4, 28)]
    # As narrow as a model of 1.5 billion parameters: F16 rows of 1536 numbers were read at 23 to 25 GB/s, rows of 2048
    # and 8192 at 26 to 28 (a virtual Sapphire Rapids, two cores), so that wider dummy models made its plan too fast
    width, ffn = (1536, 6144) if wide_bytes >= 2**26 else (512, 1024)
    for kind in types:
        block = DummyModel(kind, width, ffn, 1)
        block_bytes = block.block_numbers * BITS.get(kind, 4.5) / 8
        found.append(replace(block, blocks=max(2, round(wide_bytes / block_bytes))))
    return found


def _time(
    folder: Path, dummies: Sequence[DummyModel], placement: Placement, widths: Sequence[int], spec: Spec
) -> list[Timing]:
    """Load dummy models together, and time them in turn."""
    from ggufspec.llamacpp.model import Context, Model

    loaded: list[tuple[DummyModel, int, float, Context, dict[int, list[float]]]] = []
    with ExitStack() as stack:
        for number, dummy in enumerate(dummies):
            path = folder / f"dummy-{number}.gguf"
            dummy.write(path)
            began = time.perf_counter()
            model = stack.enter_context(Model(path, placement))
            load_s = time.perf_counter() - began
            options = ContextOptions(ctx_size=max(widths) + 1, width=max(widths), threads=spec.left or spec.threads)
            context = stack.enter_context(closing(Context(model, options)))
            _batch(context, max(widths))  # page in weights and grow buffers to their maximum
            loaded.append(
                (dummy, int(model.size_bytes * dummy.read_share), load_s, context, {width: [] for width in widths})
            )
        until = time.perf_counter() + spec.model_s * len(loaded)
        for done, width in ((done, width) for done in range(spec.rounds) for width in widths):
            if done >= _ROUNDS and time.perf_counter() > until:
                break
            for *_, context, samples in loaded:
                samples[width].append(_batch(context, width))
    for number, _ in enumerate(dummies):
        (folder / f"dummy-{number}.gguf").unlink()
    return [
        Timing(dummy, read_bytes, load_s, {width: sorted(taken)[len(taken) // 4] for width, taken in samples.items()})
        for dummy, read_bytes, load_s, _, samples in loaded
    ]


_ATTENTION = DummyModel("q8_0", 2048, 256, 2)  # a model of little but attention
_TELLING = 0.1  # share of a token's time; a smaller rise with depth is noise


def _attention(path: Path, placement: Placement, spec: Spec) -> Attention:
    """Return the numbers of keys and values that attention processes per second, by type, head and batch size."""
    from ggufspec.llamacpp.model import Context, Model

    found: Attention = {kind: {} for kind in spec.cache_types}
    for head in spec.heads:
        replace(_ATTENTION, head=head).write(path)
        with Model(path, placement) as model:
            for kind, by_head in found.items():
                threads, widest = spec.left or spec.threads, max(_ATTENTION_WIDTHS)
                options = ContextOptions(spec.depth + widest, widest, threads, cache_type_k=kind, cache_type_v=kind)
                with closing(Context(model, options)) as context:
                    seconds: dict[tuple[int, int], float] = {}
                    for depth in (0, spec.depth):
                        if depth:
                            context.decode([1] * depth, 1)
                        for width in _ATTENTION_WIDTHS:
                            seconds[depth, width] = min(_batch(context, width, depth) for _ in range(spec.rounds))
                by_head[head] = {}
                for width in _ATTENTION_WIDTHS:
                    more_s = seconds[spec.depth, width] - seconds[0, width]
                    if more_s > _TELLING * seconds[0, width]:
                        numbers = 2.0 * _ATTENTION.width * spec.depth * _ATTENTION.blocks * width
                        by_head[head][width] = numbers / more_s
        path.unlink()
    return found


def _batch(context: Context, width: int, depth: int = 0) -> float:
    """Return the seconds of one batch after ``depth`` tokens, with all its logits, as in a verification."""
    context.rewind(depth)
    tokens = [1] * width
    began = time.perf_counter()
    context.decode(tokens, width)
    return time.perf_counter() - began


# ---- interpretation --------------------------------------------------------------------------------------------------


def beside(new: MachineProfile, before: MachineProfile | None) -> MachineProfile:
    """Merge a measurement with an earlier one of the same machine, which may have other types and heads. Pure.

    The new one wins unless only it was disturbed. A disturbed earlier one is dropped for an undisturbed new one.
    """
    if before is None or (before.disturbed and not new.disturbed):
        return new
    first, second = (before, new) if new.disturbed and not before.disturbed else (new, before)
    devices = {
        name: device.beside(second.devices[name]) if name in second.devices else device
        for name, device in (second.devices | first.devices).items()
    }
    return first if devices == first.devices else replace(first, devices=devices, disturbed=new.disturbed)


@dataclass(frozen=True, slots=True)
class Due:
    """Measurement to make, and why; a plan ``needs`` it if nothing, or not the main weight type, is known."""

    spec: Spec
    why: str
    needs: bool = False


def due(folder: Path, spec: Spec, cpus: int, others_cpus: Callable[[], float]) -> Due | None:
    """Return what is still to be measured of ``spec``, or None.

    ``others_cpus`` returns the CPUs that other programs keep busy: disturbed measurements are due again once they end.
    """
    kept = _kept(folder, spec.threads)
    if kept is None:
        return Due(spec, "it is not known yet", needs=True)
    here, speed = kept.speed.device(HOST), kept.speed
    if speed.disturbed and host.threads_left(spec.threads, cpus, others_cpus()) == spec.threads:
        known = (kind for kind in here.by_type if kind not in spec.types)
        needs = spec.types[0] not in here.by_type
        return Due(replace(spec, types=(*spec.types, *known)), f"it was measured while {speed.disturbed}", needs)
    types = tuple(kind for kind in spec.types if kind not in here.by_type)
    known_heads = [set(here.attention.get(kind, {})) for kind in spec.cache_types]
    heads = tuple(head for head in spec.heads if not all(head in known for known in known_heads))
    if not types and not heads:
        return None
    what = ", ".join([*types, *(f"heads of {head}" for head in heads)])
    due_spec = replace(spec, types=types or spec.types[:1], heads=heads)
    return Due(due_spec, f"{what} were not measured yet", needs=spec.types[0] in types)


def beyond_cache_bytes() -> int:
    """Return twice the size of the CPU's last-level cache, limited by RAM."""
    return min(2 * host.last_cache_bytes(), _MOST_TOGETHER_BYTES, host.free_memory_bytes() // 8)


def types_of(headers: Sequence[ModelHeader]) -> tuple[str, ...]:
    """Return the weight types of models that are worth a measurement, those with most bytes first. Pure."""
    found = Counter[str]()
    for header in headers:
        of_model = weight_bytes(header)
        least = _TELLING_SHARE * sum(of_model.values())
        found.update({kind: size for kind, size in of_model.items() if kind in BITS and size >= least})
    return tuple(kind for kind, _ in found.most_common()) or TYPES[:1]


def heads_of(headers: Sequence[ModelHeader]) -> tuple[int, ...]:
    """Return the sizes of :data:`HEADS` that are nearest to the models' attention heads. Pure."""
    return tuple(sorted({nearest_head(header.key_size, HEADS) for header in headers}))


def interpret(result: Result, link_bytes_per_s: float, origin: str) -> MachineProfile:
    """Return the speeds that explain a measurement. Pure.

    T(1) of two narrow models and a wide one of the same type are three equations in the cost of a pass, a block and a
    byte. The other wide models give the cost of their weights.
    """
    fixed = {name: _fixed(timings) for name, timings in result.timings.items()}
    speeds = {
        name: replace(_speed(timings[2:], *fixed[name]), attention=result.attention.get(name, {}))
        for name, timings in result.timings.items()
    }
    pass_s = fixed[HOST][0]
    beyond = [max(0.0, own - pass_s) / 2 for name, (own, _) in fixed.items() if name != HOST]  # to the device and back
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


def _fixed(timings: Sequence[Timing]) -> tuple[float, float]:
    """Return (seconds of a pass, seconds of a block) from two narrow models and a wide one."""
    import numpy as np

    rows = [[1.0, timing.dummy.blocks, timing.read_bytes] for timing in timings[:3]]
    seconds = [timing.seconds[1] for timing in timings[:3]]
    pass_s, layer_s, _ = (float(value) for value in np.linalg.solve(np.array(rows), np.array(seconds)))
    return max(pass_s, 0.0), max(layer_s, 0.0)


def _speed(timings: Sequence[Timing], pass_s: float, layer_s: float) -> DeviceProfile:
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
class Identity:
    """Machine that a profile belongs to; ``devices``: names and descriptions of all that ggml sees."""

    llama_cpp_python: str
    cpu: str
    threads: int
    devices: tuple[str, ...] = ()


def identity(threads: int, here: Sequence[ggml.Device] = ()) -> Identity:
    names = tuple(f"{device.name} {device.description}" for device in here)
    return Identity(version("llama-cpp-python"), host.cpu_name(), threads, names)


def load(folder: Path, threads: int, here: Sequence[ggml.Device]) -> MachineProfile | None:
    """Return the cached profile of this machine with these threads and devices, or None."""
    kept = _kept(folder, threads)
    return kept.speed if kept and kept.identity == identity(threads, here) else None


@dataclass(frozen=True, slots=True)
class _Kept:
    identity: Identity
    speed: MachineProfile


def _table(folder: Path) -> Table[_Kept]:
    return Table(folder / "calibration.json", _Kept, _MOST_KEPT)


def _key(of: Identity) -> str:
    return f"{of.cpu}; {of.threads} threads; llama-cpp-python {of.llama_cpp_python}"


def _kept(folder: Path, threads: int) -> _Kept | None:
    """Return the cached profile of this CPU with these threads, for any devices."""
    return _table(folder).get(_key(identity(threads)))


def expected(cards: Mapping[str, Card | None], *, folder: Path, threads: int, is_here: bool = True) -> MachineProfile:
    """Return the best known speeds of GPUs, by name (None: unknown model): measured ones, else the catalogue's.

    The CPU is this machine's if it was measured or ``is_here``, otherwise a usual desktop's.
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
        # Attention at depth and experts in batches are not measured on GPUs
        devices = {name: here.devices[name] for name in measured}
        cards_here = (name for name in measured if not is_remote(name))
        devices |= {name: _completed(devices[name], speed.devices[name]) for name in cards_here}
        base = here if measured and len(measured) == len(cards) else speed
        speed = replace(base, devices=base.devices | devices)
    return replace(speed, memory_bytes=host.free_memory_bytes())


def _completed(measured: DeviceProfile, guess: DeviceProfile) -> DeviceProfile:
    return replace(measured, attention=measured.attention or guess.attention, experts=measured.experts or guess.experts)


def _is_here(name: str, card: Card | None, kept: Identity) -> bool:
    """Return whether this GPU is the device that was measured under this name."""
    found = next((device for device in kept.devices if device.startswith(f"{name} ")), "")
    try:
        return card is None or find_card(found.removeprefix(f"{name} ")) == card
    except UsageError:
        return False


def measure(folder: Path, spec: Spec, *, on_event: child.Emit | None = None, verbose: bool = False) -> MachineProfile:
    """Measure this machine in a child process, and cache the result with what is known (:func:`beside`).

    Raises:
        GgufspecError: an RPC worker does not answer, or llama.cpp died.
        Interrupted: Ctrl-C.
    """
    result = child.call(__name__, spec, Result, on_event=on_event, verbose=verbose)
    disturbed = result.disturbance.reason(spec.threads, host.usable_cpus())
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    origin = f"measured on {today} with llama-cpp-python {version('llama-cpp-python')}"
    speed = replace(
        interpret(result, _link_here(result.devices), f"{origin} while {disturbed}" if disturbed else origin),
        disturbed=disturbed,
    )
    speed = beside(speed, load(folder, spec.threads, result.devices))
    _keep(folder, speed, identity(spec.threads, result.devices))
    return speed


def _keep(folder: Path, speed: MachineProfile, of: Identity) -> None:
    _table(folder).put(_key(of), _Kept(of, speed))


def _link_here(devices: Sequence[ggml.Device]) -> float:
    """Return the link rate of the slowest GPU that ggml sees."""
    seen = gpus.gpus()
    here = [card for one in devices if (card := gpus.of_device(one.device_id, one.description, seen))]
    return min((link_bytes_per_s(c.pcie_generation, c.pcie_width) for c in here), default=link_bytes_per_s(4, 16))
