"""Latency models and strict batch-size classes that were measured on this machine, cached for the next start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ggufspec.decoding.policy import timing
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.widths import strict_widths
from ggufspec.files.cache import Table
from ggufspec.hardware import gpus, host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import streaming_card

_MOST = 64  # models in the file; the oldest are dropped
_BUSY = 0.5  # share of the cached time; a faster batch shows that the cached one was measured on a busy machine
_HEAD_BYTES = 2**16  # bytes of a model's file that identify it


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a latency model, except for the machine; :func:`key` makes one."""

    name: str  # name of the model's file
    head: str  # hash of its size and first bytes
    placement: Placement
    threads: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    op_offload: bool
    op_offload_min_batch: int
    limit: int  # largest batch size
    outputs: int | None  # rows of logits per batch at most: 1 for a draft; None: all, as a verification has
    strict: bool  # True if its batch sizes are of one class


def key(
    path: Path, placement: Placement, context: ContextOptions, *, outputs: int | None = None, strict: bool = False
) -> Key:
    """Return the key of a model with this placement and context; of a split model, ``path`` is the first part."""
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD_BYTES))
    head.update(str(path.stat().st_size).encode())
    return Key(
        name=path.name,
        head=head.hexdigest()[:32],
        placement=placement,
        threads=context.threads,
        cache_type_k=context.cache_type_k,
        cache_type_v=context.cache_type_v,
        flash_attn=context.flash_attn,
        op_offload=context.op_offload,
        op_offload_min_batch=context.op_offload_min_batch,
        limit=context.width,
        outputs=outputs,
        strict=strict,
    )


@dataclass(frozen=True, slots=True)
class SavedLatency:
    points: dict[int, float]
    switch_s: float
    widths: tuple[int, ...] | None  # the strict class; None if every batch size is allowed
    quiet: bool = False  # nothing disturbed the measurement; earlier versions did not save this

    def model(self, limit: int, *, can_pad: bool) -> LatencyModel:
        """Return the model of batches up to ``limit``; ValueError if the numbers are invalid for a latency model."""
        return LatencyModel(
            self.points, widths=self.widths, switch_s=self.switch_s, trusted=self.quiet, limit=limit, can_pad=can_pad
        )


def machine() -> tuple[Any, ...]:
    """Return what a cached model depends on besides its key: versions, CPU and all devices of ggml, RPC workers too."""
    names = [f"{device.name} {device.description}" for device in devices.devices()]
    return version("llama-cpp-python"), host.cpu_name(), names, gpus.survey().driver


def load(folder: Path, key: Key) -> SavedLatency | None:
    """Return the cached latency of a model on this machine, or None."""
    saved = _table(folder).get(_name(key))
    if saved is None or (saved.widths is not None) != key.strict or max(saved.widths or [0]) > key.limit:
        return None
    try:
        saved.model(key.limit, can_pad=True)
    except ValueError:
        return None
    return saved


def save(folder: Path, key: Key, latency: LatencyModel) -> None:
    """Cache a latency model as the batches that ran have left it; a disturbed one does not replace another.

    The factor shared by all batch sizes, from a long text or other programs, is left out: it ended with the run.
    """
    mine = SavedLatency(latency.own_points(), latency.switch_s, latency.widths, latency.trusted)
    _table(folder).update(_name(key), lambda saved: saved if saved and saved.quiet and not mine.quiet else mine)


def load_or_measure(
    model: Context | Head,
    key: Key,
    folder: Path | None,
    clock: Callable[[], float],
    *,
    budget_s: float = 0.5,
    quiet: bool = True,
) -> tuple[LatencyModel, list[str]]:
    """Return the latency model of a model, from the cache or measured now, and sentences for the user.

    A cached model is compared with two batches now. If its measurement was disturbed, it is repeated if the machine is
    ``quiet`` now. In strict mode the class of batch sizes is found first, and the model's KV cache is empty afterwards;
    otherwise it is as before.

    Raises:
        ModelError: strict mode is requested and there is no class of batch sizes.
    """
    notes = []
    saved = load(folder, key) if folder else None
    if saved is not None and (saved.quiet or not quiet) and (model.can_pad or saved.widths is None):
        latency = saved.model(key.limit, can_pad=model.can_pad)
        seconds = timing.spot_check(model, clock, latency.width(1), key.outputs)
        if seconds >= _BUSY * latency.seconds(1):
            latency.observe(latency.width(1), seconds)
            return latency, []
        notes.append(f"cached timings of {key.name} are of a busier machine: measured again")
    widths = saved.widths if saved is not None and model.can_pad else None
    if key.strict and widths is None and not isinstance(model, Head):
        widths = strict_widths(model, key.limit)
    found = measure(model, key, clock, widths, budget_s)
    assert found is not None
    latency, note = found
    if folder:
        save(folder, key, latency)
    return latency, [*notes, note] if note else notes


def measure(
    model: Context | Head,
    key: Key,
    clock: Callable[[], float],
    widths: tuple[int, ...] | None,
    budget_s: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[LatencyModel, str] | None:
    """Measure a latency model now; also return a sentence for the user if the measurement was disturbed.

    ``widths`` are the allowed batch sizes, None for all. ``goes_on`` is called before every batch; None if it was
    False.
    """
    streams = key.op_offload and streaming_card([one.name for one in devices.offloading(devices.devices())])
    try:
        measured = timing.measure(
            model,
            clock,
            limit=key.limit,
            budget_s=budget_s,
            allowed=widths,
            outputs=key.outputs,
            streams_from=key.op_offload_min_batch if streams else 0,
            with_gpus=key.placement.gpu_layers != 0,
            goes_on=goes_on,
        )
    except timing.StoppedError:
        return None
    saved = SavedLatency(measured.points, measured.switch_s, widths, measured.trusted)
    return saved.model(key.limit, can_pad=model.can_pad), measured.note


def _table(folder: Path) -> Table[SavedLatency]:
    return Table(folder / "batch-latency.json", SavedLatency, _MOST)


def _name(key: Key) -> str:
    return hashlib.sha256(json.dumps([asdict(key), machine()], sort_keys=True).encode()).hexdigest()[:32]
