"""Latency models and strict width classes that were measured on this machine, cached for the next start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from ggufspec.cache import Table
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.timing import measure, spot_check
from ggufspec.decoding.widths import strict_widths
from ggufspec.hardware import gpus, host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context
from ggufspec.llamacpp.options import ContextOptions, Placement

_MOST = 64  # models in the file; the oldest go
_BUSY = 0.5  # of the cached time: a batch that takes less shows that it was measured beside another program
_HEAD_BYTES = 2**16  # of a model's file, to know it by


@dataclass(frozen=True, slots=True)
class Key:
    """What a latency model belongs to, the machine aside; :func:`key` makes one.

    Args:
        name: of the model's file.
        head: hash of its size and first bytes.
        placement: which layers are where.
        threads: of the host.
        cache_type_k: type of the key cache.
        cache_type_v: type of the value cache.
        flash_attn: auto, on or off.
        limit: the widest batch.
        outputs: rows of logits of a batch at most; None: all.
        strict: whether its widths are of one class.
    """

    name: str
    head: str
    placement: Placement
    threads: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    limit: int
    outputs: int | None
    strict: bool


def key(
    path: Path,
    placement: Placement,
    context: ContextOptions,
    *,
    limit: int | None = None,
    outputs: int | None = None,
    strict: bool = False,
) -> Key:
    """The key of a model that is placed and decoded so.

    Args:
        path: its file; of a split model, its first part.
        placement: which layers are where.
        context: how it is decoded.
        limit: the widest batch; None: the context's width.
        outputs: rows of logits of a batch at most: 1 for a draft; None: all, as a verification has.
        strict: whether one class of widths is wanted.

    Raises:
        OSError: the file cannot be read.
    """
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
        limit=limit or context.width,
        outputs=outputs,
        strict=strict,
    )


@dataclass(frozen=True, slots=True)
class SavedLatency:
    """A latency model in the cache. ``widths`` is the strict class; None where every width may be used."""

    points: dict[int, float]
    switch_s: float
    widths: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a cached model depends on beside its key. ``devices`` are names and descriptions of all that ggml sees."""

    llama_cpp_python: str
    cpu: str
    devices: tuple[str, ...]
    driver: str | None


@dataclass(frozen=True, slots=True)
class _Entry:
    machine: Machine
    key: Key
    latency: SavedLatency


def this_machine() -> Machine:
    """The machine, the versions and the devices of this process, RPC workers included."""
    names = tuple(f"{device.name} {device.description}" for device in devices.devices())
    return Machine(version("llama-cpp-python"), host.cpu_name(), names, gpus.survey().driver)


def load(folder: Path, key: Key) -> tuple[SavedLatency | None, str]:
    """What the cache has of a model, and a sentence for the user if it is of no use here; both may be empty.

    Args:
        folder: the cache, see :func:`ggufspec.cache.cache_folder`.
        key: what is wanted.
    """
    entry = _table(folder).get(_name(key))
    if entry is None:
        return None, ""
    saved = entry.latency
    if (saved.widths is not None) != key.strict or max(saved.widths or [0]) > key.limit:
        return None, ""
    try:
        _model(saved, key.limit, can_pad=True)  # which checks the numbers
    except ValueError:
        return None, ""
    difference = _difference(entry.machine, this_machine())
    return (None, f"cached timings of {key.name} are of {difference}: measured again") if difference else (saved, "")


def save(folder: Path, key: Key, saved: SavedLatency) -> None:
    """Cache a latency model; it replaces the one of the same key."""
    _table(folder).put(_name(key), _Entry(this_machine(), key, saved))


def _table(folder: Path) -> Table[_Entry]:
    return Table(folder / "batch-latency.json", _Entry, _MOST)


def update(folder: Path, key: Key, latency: LatencyModel) -> None:
    """Cache what the batches that ran have taught of each width, unless the model was never measured undisturbed.

    What all widths had in common, a long text or other programs, ended with the run and is left out.
    """
    if latency.trusted:
        save(folder, key, SavedLatency(latency.own_points(), latency.switch_s, latency.widths))


def load_or_measure(
    model: Context | Head, key: Key, folder: Path | None, clock: Callable[[], float], *, budget_s: float = 0.5
) -> tuple[LatencyModel, list[str]]:
    """The latency model of a model, from the last run or measured now, and sentences for the user.

    What is measured undisturbed is cached at once; what was cached is compared with two batches of now. In strict mode
    the class of widths is found first, and the model's KV cache is empty afterwards; else it is as it was.

    Args:
        model: whose batches are timed.
        key: of the cache.
        folder: the cache; None caches nothing.
        clock: seconds, monotonic.
        budget_s: seconds for the timing, see :func:`ggufspec.decoding.policy.timing.measure`.

    Raises:
        ModelError: strict mode is wanted and there is no class of widths.
    """
    can_pad = model.can_pad
    saved, note = load(folder, key) if folder else (None, "")
    if saved is not None and (can_pad or saved.widths is None):
        latency = _model(saved, key.limit, can_pad=can_pad)
        seconds = spot_check(model, clock, latency.width(1), key.outputs)
        if seconds >= _BUSY * latency.seconds(1):
            latency.observe(latency.width(1), seconds)
            return latency, []
        note = f"cached timings of {key.name} are of a busier machine: measured again"
    widths = strict_widths(model, key.limit) if key.strict and isinstance(model, Context) else None
    measured = measure(model, clock, limit=key.limit, budget_s=budget_s, allowed=widths, outputs=key.outputs)
    saved = SavedLatency(measured.points, measured.switch_s, widths)
    if folder and measured.trusted:
        save(folder, key, saved)
    latency = _model(saved, key.limit, can_pad=can_pad, trusted=measured.trusted)
    return latency, [sentence for sentence in (note, measured.note) if sentence]


def _model(saved: SavedLatency, limit: int, *, can_pad: bool, trusted: bool = True) -> LatencyModel:
    return LatencyModel(
        saved.points, widths=saved.widths, switch_s=saved.switch_s, trusted=trusted, limit=limit, can_pad=can_pad
    )


def _name(key: Key) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:32]


def _difference(then: Machine, now: Machine) -> str:
    """What is not as it was, in words; empty if all is."""
    if then.cpu != now.cpu:
        return f"another machine ({then.cpu})"
    if then.devices != now.devices:
        return f"a machine with other devices ({', '.join(then.devices) or 'none'})"
    if then.llama_cpp_python != now.llama_cpp_python:
        return f"llama-cpp-python {then.llama_cpp_python}"
    return f"another driver ({then.driver or 'none'})" if then.driver != now.driver else ""
