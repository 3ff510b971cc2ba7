"""What this machine reaches: a measurement of ten to twenty seconds with dummy models, kept; or a catalogue's guess.

The dummy models are llama models of zeros in sparse files (:func:`ggufspec.llamacpp.gguf.write_model`). Zeros cost what
any weights cost: a hole is mapped to pages of its own, so that reading them is real traffic, and no kernel looks at
the values. Two narrow models of few and of many blocks tell the fixed cost of a pass and of a block; a wide one for
each weight type, larger than the caches, tells bandwidths and T(n).

Beside other programs the host is measured with the threads that they leave, as everything runs; what that finds is
kept where nothing better is, says so, and is measured again when they are gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ggufspec import cache, worker
from ggufspec.errors import UsageError
from ggufspec.files import scratch
from ggufspec.hardware import gpus, host
from ggufspec.hardware.cards import Card, find_card
from ggufspec.llamacpp import devices as ggml
from ggufspec.llamacpp.gguf import write_model
from ggufspec.llamacpp.options import STREAM_WIDTH, ContextOptions, Placement, is_remote
from ggufspec.planning.catalogue import CROSSING_S, UNKNOWN, from_catalogue, link_bytes_per_s
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import BITS, DeviceProfile, MachineProfile

if TYPE_CHECKING:
    from ggufspec.llamacpp.model import Context

TYPES = ("f16", "q4_K", "q8_0", "q6_K", "q4_0", "q3_K")  # the most telling first
WIDTHS = (1, 2, 3, 4, 5, 8, 16, 32)
_FEWEST = 2  # the narrow dummy models and one wide one are needed
_ROUNDS = 2  # times that each width is timed, whatever it takes


# ---- dummy models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DummyModel:
    """A llama model of zeros with heads of 64."""

    kind: str
    width: int
    ffn: int
    blocks: int
    vocabulary: int = 1024

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(row, rows) of one block's matrices."""
        kv = max(self.width // 4, 64)
        found = dict.fromkeys(("attn_q", "attn_output"), (self.width, self.width))
        found |= dict.fromkeys(("attn_k", "attn_v"), (self.width, kv))
        found |= dict.fromkeys(("ffn_gate", "ffn_up"), (self.width, self.ffn))
        return found | {"ffn_down": (self.ffn, self.width)}

    @property
    def block_numbers(self) -> int:
        """Weights of one block, norms aside."""
        return sum(row * rows for row, rows in self.matrices().values())

    @property
    def numbers(self) -> int:
        """Weights that a token reads: the blocks and the output."""
        return self.blocks * self.block_numbers + self.width * self.vocabulary

    def write(self, path: Path) -> None:
        """Write it as a sparse file."""
        metadata: dict[str, str | int | float] = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "none",
            "llama.vocab_size": self.vocabulary,
            "llama.block_count": self.blocks,
            "llama.context_length": 4096,
            "llama.embedding_length": self.width,
            "llama.feed_forward_length": self.ffn,
            "llama.attention.head_count": self.width // 64,
            "llama.attention.head_count_kv": max(self.width // 256, 1),
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
    """What to measure; everything but threads and RPC workers is for a shorter look.

    Args:
        threads: of the host, as plans have them.
        left: as many of them as other programs leave now; 0: all.
        rpc: workers whose devices are measured too.
        types: weight types.
        widths: tokens in a batch; the first is 1.
        wide_bytes: of the wide models; larger than the last cache.
        card_bytes: the same on a card of this machine.
        rounds: times that each width is timed, at most.
        model_s: seconds to spend on one model, after it was read once.
        device_s: seconds to spend on one device; types that are left then are left out.
        cache_types: of the KV cache, with which attention is timed where it computes like a CPU.
        depth: tokens in the cache then.
    """

    threads: int
    rpc: tuple[str, ...] = ()
    left: int = 0
    types: tuple[str, ...] = TYPES
    widths: tuple[int, ...] = WIDTHS
    wide_bytes: int = 128 * 2**20
    card_bytes: int = 512 * 2**20
    rounds: int = 9
    model_s: float = 0.5
    device_s: float = 8.0
    cache_types: tuple[str, ...] = ("f16", "q8_0")
    depth: int = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """One dummy model on one device: the bytes that a token reads, its time to load, and seconds of a batch by width.

    Seconds are the lower quartile, since whatever else runs on the machine only adds to them.
    """

    dummy: DummyModel
    read_bytes: int
    load_s: float
    seconds: dict[int, float]


@dataclass(frozen=True, slots=True)
class Result:
    """The narrow models' timings first, by device; ``devices`` is all that ggml sees. ``HOST`` is the host.

    ``others_cpus`` are CPUs that other programs used while the host was measured. ``attention`` is as of
    :class:`~ggufspec.planning.speed.DeviceProfile`, by device.
    """

    timings: dict[str, list[Timing]]
    devices: tuple[ggml.Device, ...]
    others_cpus: float = 0.0
    attention: dict[str, dict[str, float]] = field(default_factory=dict)


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Measure in this process; the event ``measuring`` names the device and the dummy model that comes next."""
    for endpoint in spec.rpc:
        ggml.add_rpc_worker(endpoint)
    here = ggml.devices()
    cards = offload_devices(here)
    timings: dict[str, list[Timing]] = {name: [] for name in (HOST, *cards)}
    streams = any(not is_remote(name) for name in cards)
    before, others_cpus = host.cpu_use(), 0.0
    attention: dict[str, dict[str, float]] = {}
    with scratch() as folder:
        path = folder / "dummy.gguf"
        for index, (name, found) in enumerate(timings.items()):
            is_card = index > 0 and not is_remote(name)
            placement = Placement(-1, tuple(float(name == card) for card in cards)) if index else Placement()
            widths = [width for width in spec.widths if index or not streams or width < STREAM_WIDTH]
            until = time.perf_counter() + spec.device_s
            for dummy in dummy_models(spec.types, spec.card_bytes if is_card else spec.wide_bytes):
                if stopping.is_set():
                    return Result(timings, tuple(here), others_cpus, attention)
                if len(found) > _FEWEST and time.perf_counter() > until:
                    break
                emit({"event": "measuring", "device": name, "type": dummy.kind, "blocks": dummy.blocks})
                dummy.write(path)
                found.append(_time(path, dummy, placement, widths, spec))
                path.unlink()
            if not is_card:
                emit({"event": "measuring", "device": name, "type": "attention", "blocks": _ATTENTION.blocks})
                attention[name] = _attention(path, placement, spec)
            if index == 0:
                others_cpus = host.cpu_use().others_since(before)
    return Result(timings, tuple(here), others_cpus, attention)


def dummy_models(types: Sequence[str], wide_bytes: int) -> list[DummyModel]:
    """Two narrow models, then a wide one for each type."""
    found = [DummyModel(types[0], 256, 256, blocks) for blocks in (4, 28)]
    width, ffn = (2048, 8192) if wide_bytes >= 2**26 else (512, 1024)
    for kind in types:
        block = DummyModel(kind, width, ffn, 1)
        block_bytes = block.block_numbers * BITS.get(kind, 4.5) / 8
        found.append(replace(block, blocks=max(2, round(wide_bytes / block_bytes))))
    return found


def offload_devices(here: Sequence[ggml.Device]) -> list[str]:
    """Names of the devices that layers are offloaded to, in llama.cpp's order: src/llama.cpp puts RPC first."""
    cards = [device.name for device in here if device.kind == "gpu"]
    cards.sort(key=lambda name: not is_remote(name))
    return cards or [device.name for device in here if device.kind == "igpu"][:1]


def _time(path: Path, dummy: DummyModel, placement: Placement, widths: Sequence[int], spec: Spec) -> Timing:
    from ggufspec.llamacpp.model import Context, Model

    began = time.perf_counter()
    with Model(path, placement) as model:
        load_s = time.perf_counter() - began
        options = ContextOptions(ctx_size=max(widths) + 1, width=max(widths), threads=spec.left or spec.threads)
        with closing(Context(model, options)) as context:
            samples: dict[int, list[float]] = {width: [] for width in widths}
            _batch(context, max(widths))  # pages in, and the buffers at their largest
            until = time.perf_counter() + spec.model_s
            for done, width in ((done, width) for done in range(spec.rounds) for width in widths):
                if done >= _ROUNDS and time.perf_counter() > until:
                    break
                samples[width].append(_batch(context, width))
        seconds = {width: sorted(taken)[len(taken) // 4] for width, taken in samples.items()}
        share = dummy.numbers / (dummy.numbers + dummy.width * dummy.vocabulary)  # tokens are only looked up
        return Timing(dummy, int(model.size_bytes * share), load_s, seconds)


_ATTENTION = DummyModel("q8_0", 2048, 256, 2)  # little but attention: 32 query heads, 8 key-value heads
_TELLING = 0.1  # of a token's time: a smaller rise with the depth is noise


def _attention(path: Path, placement: Placement, spec: Spec) -> dict[str, float]:
    """Numbers of the cache that attention gets through in a second, by the cache's type: a token deep and at once."""
    from ggufspec.llamacpp.model import Context, Model

    found: dict[str, float] = {}
    _ATTENTION.write(path)
    with Model(path, placement) as model:
        for kind in spec.cache_types:
            threads = spec.left or spec.threads
            options = ContextOptions(spec.depth + 1, 1, threads, cache_type_k=kind, cache_type_v=kind)
            with closing(Context(model, options)) as context:
                seconds = []
                for depth in (0, spec.depth):
                    if depth:
                        context.decode([1] * depth, 1)
                    seconds.append(min(_batch(context, 1, depth) for _ in range(spec.rounds)))
                more_s = seconds[1] - seconds[0]
                if more_s > _TELLING * seconds[0]:
                    found[kind] = 2.0 * _ATTENTION.width * spec.depth * _ATTENTION.blocks / more_s
    path.unlink()
    return found


def _batch(context: Context, width: int, depth: int = 0) -> float:
    """Seconds of one batch behind ``depth`` tokens, with all its logits, as a verification has."""
    context.rewind(depth)
    tokens = [1] * width
    began = time.perf_counter()
    context.decode(tokens, width)
    return time.perf_counter() - began


# ---- what it means ---------------------------------------------------------------------------------------------------


def disturbance(result: Result, threads: int, cpus: int) -> str:
    """Why an idle machine with so many logical CPUs would have been found faster, or empty. Pure."""
    is_idle = host.threads_left(threads, cpus, result.others_cpus) == threads
    return "" if is_idle else f"other programs used {result.others_cpus:.1f} CPUs"


def is_better(new: MachineProfile, before: MachineProfile | None) -> bool:
    """Whether a measurement takes the place of one of the same machine. Pure."""
    return not new.disturbed or before is None or bool(before.disturbed)


def is_due(folder: Path, threads: int, cpus: int, others_cpus: Callable[[], float]) -> str:
    """What disturbed the measurement that is kept, if it may be taken again now; else empty.

    ``others_cpus`` looks how many of the logical CPUs other programs keep busy.
    """
    kept = _kept(folder)
    if kept is None or replace(kept.identity, devices=()) != identity(threads) or not kept.speed.disturbed:
        return ""
    return kept.speed.disturbed if host.threads_left(threads, cpus, others_cpus()) == threads else ""


def interpret(result: Result, link_bytes_per_s: float, origin: str) -> MachineProfile:
    """The speeds behind a measurement. Pure.

    T(1) of two narrow models and of the wide one of the same type are three equations in the cost of a pass, of a
    block and of a byte. What is left of the other wide models is their weights'.
    """
    fixed = {name: _fixed(timings) for name, timings in result.timings.items()}
    speeds = {
        name: replace(_speed(timings[2:], *fixed[name]), attention=result.attention.get(name, {}))
        for name, timings in result.timings.items()
    }
    pass_s = fixed[HOST][0]
    beyond = [max(0.0, own - pass_s) / 2 for name, (own, _) in fixed.items() if name != HOST]  # there and back
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
    """(seconds of a pass, seconds of a block) from two narrow models and a wide one."""
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


# ---- kept ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """What a machine profile belongs to. ``devices`` are the names and descriptions of all that ggml sees."""

    llama_cpp_python: str
    cpu: str
    threads: int
    devices: tuple[str, ...] = ()


def identity(threads: int, here: Sequence[ggml.Device] = ()) -> Identity:
    """This machine with these devices."""
    names = tuple(f"{device.name} {device.description}" for device in here)
    return Identity(version("llama-cpp-python"), host.cpu_name(), threads, names)


def load(folder: Path, threads: int, here: Sequence[ggml.Device]) -> MachineProfile | None:
    """The profile that is cached for this machine with so many threads and these devices, or None."""
    kept = _kept(folder)
    return kept.speed if kept and kept.identity == identity(threads, here) else None


@dataclass(frozen=True, slots=True)
class _Kept:
    identity: Identity
    speed: MachineProfile


def _file(folder: Path) -> Path:
    return folder / "calibration.json"


def _kept(folder: Path) -> _Kept | None:
    return cache.read(_file(folder), _Kept)


def expected(cards: Mapping[str, Card | None], *, folder: Path, threads: int) -> MachineProfile:
    """The best that is known: what was measured here, the catalogue for the rest.

    ``cards`` are device names as placements use them, with the card that each is; None: unknown.
    """
    kept = _kept(folder)
    here = kept.speed if kept and replace(kept.identity, devices=()) == identity(threads) else None
    wanted = {name: card or UNKNOWN for name, card in cards.items()}
    speed = from_catalogue(list(wanted.values()), list(wanted), here)
    if kept and here:
        measured = [
            name for name, card in cards.items() if name in here.devices and _is_here(name, card, kept.identity)
        ]
        if measured and len(measured) == len(cards):
            speed = here
        else:
            speed = replace(speed, devices=speed.devices | {name: here.devices[name] for name in measured})
    return replace(speed, memory_bytes=host.free_memory_bytes())


def _is_here(name: str, card: Card | None, kept: Identity) -> bool:
    """Whether the device that was measured under this name is that card."""
    found = next((device for device in kept.devices if device.startswith(f"{name} ")), "")
    try:
        return card is None or find_card(found.removeprefix(f"{name} ")) == card
    except UsageError:
        return False


def measure(folder: Path, spec: Spec, *, on_event: worker.Emit | None = None, verbose: bool = False) -> MachineProfile:
    """Measure this machine in a child process, and keep the result unless a better one is kept.

    Raises:
        GgufspecError: an RPC worker does not answer, or llama.cpp died.
        Interrupted: Ctrl-C.
    """
    result = worker.call(__name__, spec, Result, on_event=on_event, verbose=verbose)
    disturbed = disturbance(result, spec.threads, host.usable_cpus())
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    origin = f"measured on {today} with llama-cpp-python {version('llama-cpp-python')}"
    speed = replace(
        interpret(result, _link_here(), f"{origin} while {disturbed}" if disturbed else origin), disturbed=disturbed
    )
    if is_better(speed, load(folder, spec.threads, result.devices)):
        _keep(folder, speed, identity(spec.threads, result.devices))
    return speed


def _keep(folder: Path, speed: MachineProfile, of: Identity) -> None:
    cache.write(_file(folder), _Kept(of, speed))


def _link_here() -> float:
    here = gpus.gpus()
    return min((link_bytes_per_s(c.pcie_generation, c.pcie_width) for c in here), default=link_bytes_per_s(4, 16))
