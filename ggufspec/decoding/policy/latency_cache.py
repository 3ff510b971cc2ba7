"""Cache of the latency models and strict batch-size classes that were measured on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ggufspec.decoding.batch_sizes import strict_batch_sizes
from ggufspec.decoding.policy import timing
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.files.cache import JsonTable
from ggufspec.hardware import gpus, host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import streaming_card

_MOST = 64  # maximum number of models in the file; the oldest are dropped
_BUSY = 0.5  # a batch faster than this share of its cached time shows that the cached timing was disturbed
_HEAD_BYTES = 2**16  # number of leading bytes that identify a model's file


@dataclass(frozen=True, slots=True)
class LatencyKey:
    """Everything that identifies a latency model except the machine; built by :func:`latency_key`."""

    name: str  # name of the model's file
    head: str  # hash of the file's size and first bytes
    placement: Placement
    threads: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    op_offload: bool
    op_offload_min_batch: int
    limit: int  # largest batch size
    outputs: int | None  # maximum rows of logits per batch: 1 for a draft; None: one per token, for verification
    strict: bool  # True if all batch sizes belong to one class (strict mode)


def latency_key(
    path: Path, placement: Placement, context: ContextOptions, *, outputs: int | None = None, strict: bool = False
) -> LatencyKey:
    """Return the key of a model with this placement and context; for a split model, ``path`` is the first part."""
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD_BYTES))
    head.update(str(path.stat().st_size).encode())
    return LatencyKey(
        name=path.name,
        head=head.hexdigest()[:32],
        placement=placement,
        threads=context.threads,
        cache_type_k=context.cache_type_k,
        cache_type_v=context.cache_type_v,
        flash_attn=context.flash_attn,
        op_offload=context.op_offload,
        op_offload_min_batch=context.op_offload_min_batch,
        limit=context.max_outputs,
        outputs=outputs,
        strict=strict,
    )


@dataclass(frozen=True, slots=True)
class SavedLatency:
    points: dict[int, float]
    switch_s: float
    widths: tuple[int, ...] | None  # batch sizes of the strict class; None if all are allowed
    quiet: bool = False  # True if nothing disturbed the measurement; earlier versions did not save this

    def model(self, limit: int, *, can_pad: bool) -> LatencyModel:
        """Return the latency model for batches up to ``limit``; ValueError if the saved numbers are invalid."""
        return LatencyModel(
            self.points,
            batch_sizes=self.widths,
            switch_s=self.switch_s,
            trusted=self.quiet,
            limit=limit,
            can_pad=can_pad,
        )


def timing_facts() -> tuple[Any, ...]:
    """Return the facts besides its key that a cached model depends on: llama-cpp-python, CPU, devices, GPU driver."""
    names = [f"{device.name} {device.description}" for device in devices.devices()]
    return version("llama-cpp-python"), host.cpu_name(), names, gpus.survey().driver


def load_latency(folder: Path, key: LatencyKey) -> SavedLatency | None:
    """Return the cached latency of a model on this machine, or None."""
    saved = _table(folder).get(_name(key))
    if saved is None or (saved.widths is not None) != key.strict or max(saved.widths or [0]) > key.limit:
        return None
    try:
        saved.model(key.limit, can_pad=True)
    except ValueError:
        return None
    return saved


def save_latency(folder: Path, key: LatencyKey, latency: LatencyModel) -> None:
    """Cache a latency model, as updated by the batches that ran; a disturbed one does not replace an undisturbed one.

    The factor shared by all batch sizes is not saved, because a long text or other programs caused it during this run.
    """
    mine = SavedLatency(latency.own_points(), latency.switch_s, latency.batch_sizes, latency.trusted)
    _table(folder).update(_name(key), lambda saved: saved if saved and saved.quiet and not mine.quiet else mine)


def load_or_measure(
    model: Context | Head,
    key: LatencyKey,
    folder: Path | None,
    clock: Callable[[], float],
    *,
    budget_s: float = 0.5,
    quiet: bool = True,
) -> tuple[LatencyModel, list[str]]:
    """Return the latency model of ``model``, from the cache or measured now, and sentences for the user.

    A cached model is measured again if two batches now are far faster than it says, or if its measurement was disturbed
    and the machine is ``quiet`` now. In strict mode, the class of batch sizes is determined first unless it is cached,
    and this leaves the KV cache empty; otherwise the KV cache is left as it was.

    Raises:
        ModelError: strict mode is requested and no class of batch sizes allows it.
    """
    notes = []
    saved = load_latency(folder, key) if folder else None
    if saved is not None and (saved.quiet or not quiet) and (model.can_pad or saved.widths is None):
        latency = saved.model(key.limit, can_pad=model.can_pad)
        seconds = timing.spot_check(model, clock, latency.batch_size(1), key.outputs)
        if seconds >= _BUSY * latency.seconds(1):
            latency.observe(latency.batch_size(1), seconds)
            return latency, []
        notes.append(f"cached timings of {key.name} were taken while the machine was busier; they were measured again")
    batch_sizes = saved.widths if saved is not None and model.can_pad else None
    if key.strict and batch_sizes is None and not isinstance(model, Head):
        batch_sizes = strict_batch_sizes(model, key.limit)
    found = measure_latency(model, key, clock, batch_sizes, budget_s)
    assert found is not None
    latency, note = found
    if folder:
        save_latency(folder, key, latency)
    return latency, [*notes, note] if note else notes


def measure_latency(
    model: Context | Head,
    key: LatencyKey,
    clock: Callable[[], float],
    batch_sizes: tuple[int, ...] | None,
    budget_s: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[LatencyModel, str] | None:
    """Measure a latency model; return it with a sentence for the user, which is empty if nothing disturbed the timings.

    ``batch_sizes`` are the allowed batch sizes, None for all. ``goes_on`` is called before every batch; if it returns
    False, the measurement stops and the result is None.
    """
    streams = key.op_offload and streaming_card([one.name for one in devices.offloading(devices.devices())])
    try:
        measured = timing.time_batch_sizes(
            model,
            clock,
            limit=key.limit,
            budget_s=budget_s,
            allowed=batch_sizes,
            outputs=key.outputs,
            op_offload_min_batch=key.op_offload_min_batch if streams else 0,
            with_gpus=key.placement.gpu_layers != 0,
            goes_on=goes_on,
        )
    except timing.StoppedError:
        return None
    saved = SavedLatency(measured.points, measured.switch_s, batch_sizes, measured.trusted)
    return saved.model(key.limit, can_pad=model.can_pad), measured.note


def _table(folder: Path) -> JsonTable[SavedLatency]:
    return JsonTable(folder / "batch-latency.json", SavedLatency, _MOST)


def _name(key: LatencyKey) -> str:
    return hashlib.sha256(json.dumps([asdict(key), timing_facts()], sort_keys=True).encode()).hexdigest()[:32]
