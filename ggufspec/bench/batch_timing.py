"""Job for a child process that measures batch latencies of models loaded together at given placements.

Dummy weights (:mod:`ggufspec.models.dummy_weights`) decode as fast as real ones.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from ggufspec import child
from ggufspec.hardware import host
from ggufspec.hardware.disturbance import SystemCounters
from ggufspec.hardware.host import BUSY_CPUS
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.dryrun import allocated
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.dummy_weights import TOKENS

_BURST_S = 0.25  # for a shorter batch, the median of _BURST more runs counts, because the first run rebuilds the graph
_BURST = 3
_FEWEST_ROUNDS = 3
_LOOK_S = 0.2  # minimum time between readings of the system counters, which have a resolution of 10 ms


@dataclass(frozen=True, slots=True)
class ModelToTime:
    """Model to time at ``batch_sizes``; a ``head`` belongs to the preceding model, whose file may contain it."""

    path: Path
    placement: Placement
    context: ContextOptions
    batch_sizes: tuple[int, ...]
    head: bool = False


@dataclass(frozen=True, slots=True)
class BatchTimingJob:
    """Models that are loaded together and timed in turn, with ``depth`` tokens in each cache.

    Each batch size of each model is timed ``rounds`` times, or until ``seconds`` have passed, but at least three times.
    """

    parts: tuple[ModelToTime, ...]
    depth: int
    rounds: int = 9
    seconds: float = 20.0
    rpc: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        return self.parts[0].context.environment


@dataclass(frozen=True, slots=True)
class ModelTimings:
    """Timings of one model.

    ``seconds`` has samples by batch size, one per round; ``bytes`` has the bytes that llama.cpp allocated, by device.
    ``depth``, the number of cached tokens, is less than requested if the context is too short.
    """

    layers: int
    gpu_layers: int
    load_s: float
    depth: int
    prompt_tokens_per_s: float
    seconds: dict[int, list[float]]
    bytes: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class BatchTimingResult:
    """Timings of all models; ``ram_bytes`` is the process's memory at the end, ``vram_bytes`` the rise in VRAM use.

    ``disturbed`` samples were dropped because other programs were busy, using up to ``others_cpus`` CPUs.
    """

    parts: tuple[ModelTimings, ...]
    ram_bytes: int
    vram_bytes: int
    finished: bool
    disturbed: int = 0
    others_cpus: float = 0.0


def run(spec: BatchTimingJob, emit: child.Emit, stopping: threading.Event) -> BatchTimingResult:
    """Time the models in this process; events ``loading``, ``reading`` (the prompt) and ``round`` report progress."""
    devices.add_rpc_workers(spec.rpc)
    vram_before = devices.used_bytes()
    with ExitStack() as stack:
        loaded: list[tuple[Context | Head, ModelTimings]] = []
        for part in spec.parts:
            emit({"event": "loading", "file": part.path.name})
            on = loaded[-1][0] if part.head else None
            loaded.append(_load(part, spec.depth, stack, emit, on))
        order, until = random.Random(0), time.perf_counter() + spec.seconds
        turns = [(context, timed, batch_size) for context, timed in loaded for batch_size in timed.seconds]
        loads: dict[tuple[int, int], list[float]] = {(id(timed), batch_size): [] for _, timed, batch_size in turns}
        waiting, before = list[tuple[int, int]](), SystemCounters.now()
        for done in range(spec.rounds):
            if stopping.is_set() or (done >= _FEWEST_ROUNDS and time.perf_counter() > until):
                break
            emit({"event": "round", "number": done + 1, "of": spec.rounds})
            for context, timed, batch_size in order.sample(turns, len(turns)):
                if stopping.is_set():
                    break
                timed.seconds[batch_size].append(_burst(context, timed.depth, batch_size))
                waiting.append((id(timed), batch_size))
                if (now := SystemCounters.now()).cpu.clock_s - before.cpu.clock_s >= _LOOK_S:
                    others_cpus = now.since(before).others_cpus
                    for key in waiting:
                        loads[key].append(others_cpus)
                    waiting, before = [], now
        others_cpus = SystemCounters.now().since(before).others_cpus
        for key in waiting:
            loads[key].append(others_cpus)
        every = [others for found in loads.values() for others in found]
        least = min(every, default=0.0)
        disturbed = sum(
            undisturbed(timed.seconds[batch_size], loads[id(timed), batch_size], least)
            for _, timed, batch_size in turns
        )
        return BatchTimingResult(
            parts=tuple(timed for _, timed in loaded),
            ram_bytes=host.resident_bytes(),
            vram_bytes=max(0, devices.used_bytes() - vram_before),
            finished=not stopping.is_set(),
            disturbed=disturbed,
            others_cpus=max(every, default=0.0),
        )


def undisturbed(seconds: list[float], loads: Sequence[float], least: float) -> int:
    """Drop samples during which other programs used clearly more than ``least`` CPUs, but keep at least three.

    ``loads`` are the CPUs that other programs used during each sample. Return the number of dropped samples.
    """
    order = sorted(range(len(seconds)), key=loads.__getitem__)
    kept = max(sum(others < least + BUSY_CPUS for others in loads), min(_FEWEST_ROUNDS, len(seconds)))
    seconds[:] = [seconds[i] for i in sorted(order[:kept])]
    return len(order) - kept


def _load(
    part: ModelToTime, depth: int, stack: ExitStack, emit: child.Emit, on: Context | Head | None
) -> tuple[Context | Head, ModelTimings]:
    began = time.perf_counter()
    own = on is not None and part.path == on.model.path
    model = on.model if on is not None and own else stack.enter_context(Model(part.path, part.placement))
    made = Head(model, on, part.context) if isinstance(on, Context) else Context(model, part.context)
    context: Context | Head = stack.enter_context(closing(made))
    load_s = time.perf_counter() - began
    if isinstance(made, Head) and isinstance(on, Context) and made.shares_cache:  # llama.cpp emptied the shared cache
        count = on.length
        on.rewind(0)
        on.decode(_tokens(on, count), 0)
    emit({"event": "reading", "file": part.path.name})
    depth = max(1, min(depth, context.capacity - max(part.batch_sizes)))
    context.decode(_tokens(context, 1), 0)  # reads memory-mapped weights from disk
    context.rewind(0)
    began = time.perf_counter()
    context.decode(_tokens(context, depth), 0 if isinstance(context, Head) else 1)  # a head returns all logits or none
    prompt_s = time.perf_counter() - began
    for batch_size in part.batch_sizes:  # build every compute graph once
        _batch(context, depth, batch_size)
    return context, ModelTimings(
        layers=model.layers,
        gpu_layers=model.gpu_layers if devices.has_gpu() else 0,
        load_s=load_s,
        depth=depth,
        prompt_tokens_per_s=depth / prompt_s,
        seconds={batch_size: [] for batch_size in part.batch_sizes},
        bytes={name: asdict(replace(found, weights=0) if own else found) for name, found in allocated(context).items()},
    )


def _tokens(context: Context | Head, count: int) -> list[int]:
    """Return distinct tokens, so that a mixture of experts uses as many experts as possible."""
    different = min(TOKENS, context.vocab_size)
    return [7 * place % different for place in range(1, count + 1)]


def _burst(context: Context | Head, depth: int, batch_size: int) -> float:
    first_s = _batch(context, depth, batch_size)
    return first_s if first_s > _BURST_S else median(_batch(context, depth, batch_size) for _ in range(_BURST))


def _batch(context: Context | Head, depth: int, batch_size: int) -> float:
    """Time one batch that returns all its logits, as verification does."""
    if isinstance(context, Head) or context.can_rewind:
        context.rewind(depth)
        context.mark()
    elif context.length + batch_size > context.capacity:  # recurrent states cost the same at any depth
        context.rewind(0)
    tokens = _tokens(context, batch_size)
    began = time.perf_counter()
    context.decode(tokens, batch_size)
    return time.perf_counter() - began


def time_batches(
    spec: BatchTimingJob, *, on_event: child.Emit | None = None, verbose: bool = False
) -> BatchTimingResult:
    """Time the models in a child process.

    Raises:
        GgufspecError: a model does not load, an RPC worker does not answer, or llama.cpp crashed.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    return child.call(__name__, spec, BatchTimingResult, on_event=on_event, verbose=verbose)
