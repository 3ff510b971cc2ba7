"""Curves and strict classes that were measured on this machine, kept for the next start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from ggufspec.cache import Table
from ggufspec.decoding.model import Model
from ggufspec.decoding.policy.latency import Curve
from ggufspec.decoding.policy.timing import glance, measure
from ggufspec.decoding.widths import strict_widths
from ggufspec.hardware import gpus, host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.options import ContextOptions, Placement

_MOST = 64  # curves in the file; the oldest go
_BUSY = 0.5  # of the kept time: a batch that takes less tells that it was measured beside another program
_HEAD_BYTES = 2**16  # of a model's file, to know it by


@dataclass(frozen=True, slots=True)
class Key:
    """What a curve belongs to, the machine aside; :func:`key` makes one.

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
class Kept:
    """A curve as it is kept. ``widths`` is the strict class; None where every width may be used."""

    points: dict[int, float]
    switch_s: float
    widths: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a kept curve depends on beside its key. ``devices`` are names and descriptions of all that ggml sees."""

    llama_cpp_python: str
    cpu: str
    devices: tuple[str, ...]
    driver: str | None


@dataclass(frozen=True, slots=True)
class _Entry:
    machine: Machine
    key: Key
    curve: Kept


def this_machine() -> Machine:
    """The machine, the versions and the devices of this process, RPC workers included."""
    names = tuple(f"{device.name} {device.description}" for device in devices.devices())
    return Machine(version("llama-cpp-python"), host.cpu_name(), names, gpus.survey().driver)


def load(folder: Path, key: Key) -> tuple[Kept | None, str]:
    """What is kept of a model, and a sentence for the user if it is of no use here; both may be empty.

    Args:
        folder: the cache, see :func:`ggufspec.cache.cache_folder`.
        key: what is wanted.
    """
    entry = _table(folder).get(_name(key))
    if entry is None:
        return None, ""
    kept = entry.curve
    if (kept.widths is not None) != key.strict or max(kept.widths or [0]) > key.limit:
        return None, ""
    try:
        _curve(kept, key.limit, can_pad=True)  # which checks the numbers
    except ValueError:
        return None, ""
    difference = _difference(entry.machine, this_machine())
    return (None, f"the kept curve of {key.name} is of {difference}: measured again") if difference else (kept, "")


def save(folder: Path, key: Key, kept: Kept) -> None:
    """Keep a curve; it replaces the one of the same key."""
    _table(folder).put(_name(key), _Entry(this_machine(), key, kept))


def _table(folder: Path) -> Table[_Entry]:
    return Table(folder / "curves.json", _Entry, _MOST)


def keep(folder: Path, key: Key, curve: Curve) -> None:
    """Keep what the batches that ran have taught of each width; one that was never measured undisturbed is not kept.

    What all widths had in common, a long text or other programs, ended with the run: kept, it would be taken for a
    busier machine by the next one.
    """
    if curve.trusted:
        save(folder, key, Kept(curve.own_points(), curve.switch_s, curve.widths))


def known_or_measured(
    model: Model, key: Key, folder: Path | None, clock: Callable[[], float], *, budget_s: float = 0.5
) -> tuple[Curve, list[str]]:
    """The curve of a model, from the last run or measured now, and sentences for the user.

    What is measured undisturbed is kept at once; what is kept is compared with two batches of now. In strict mode the
    class is found first, and the cache is empty afterwards; else it is as it was.

    Args:
        model: whose curve is wanted; ``can_pad`` False on it means that no batch may be padded.
        key: what it is kept by.
        folder: the cache; None keeps nothing.
        clock: seconds, monotonic.
        budget_s: seconds for the timing, see :func:`ggufspec.decoding.policy.timing.measure`.

    Raises:
        ModelError: strict mode is wanted and there is no class of widths.
    """
    can_pad = bool(getattr(model, "can_pad", True))
    kept, note = load(folder, key) if folder else (None, "")
    if kept is not None and (can_pad or kept.widths is None):
        curve = _curve(kept, key.limit, can_pad=can_pad)
        seconds = glance(model, clock, curve.width(1), key.outputs)
        if seconds >= _BUSY * curve.seconds(1):
            curve.observe(curve.width(1), seconds)
            return curve, []
        note = f"the kept curve of {key.name} is of a busier machine: measured again"
    widths = strict_widths(model, key.limit) if key.strict else None
    measured = measure(model, clock, limit=key.limit, budget_s=budget_s, allowed=widths, outputs=key.outputs)
    kept = Kept(measured.points, measured.switch_s, widths)
    if folder and measured.trusted:
        save(folder, key, kept)
    curve = _curve(kept, key.limit, can_pad=can_pad, trusted=measured.trusted)
    return curve, [sentence for sentence in (note, measured.note) if sentence]


def _curve(kept: Kept, limit: int, *, can_pad: bool, trusted: bool = True) -> Curve:
    return Curve(kept.points, widths=kept.widths, switch_s=kept.switch_s, trusted=trusted, limit=limit, can_pad=can_pad)


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
