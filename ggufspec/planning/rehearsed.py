"""Speeds measured by ``rehearse`` and ``bench`` on this machine, saved by model shape for later plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.files.cache import JsonTable
from ggufspec.hardware import host
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.speed import MachineProfile, MeasuredBatches, MeasuredToken, corrected, host_bytes

if TYPE_CHECKING:
    from ggufspec.planning.plan import ModelRequest, OffloadDevice, PlanMachine, PlanRequest
    from ggufspec.schema.plan import PlannedDevice

_MOST_POINTS = 16  # maximum number of saved measurements per model


@dataclass(frozen=True, slots=True)
class RehearsedSpeed:
    """Measured seconds per batch, by batch size, at one placement with ``depth`` tokens in the cache.

    ``machine``: :func:`devices_identity` of the machine.
    """

    placement: Placement
    threads: int
    depth: int
    cache_type_k: str
    cache_type_v: str
    batch_s: dict[int, float]
    machine: str
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    op_offload_min_batch: int = OP_OFFLOAD_MIN_BATCH

    @property
    def context(self) -> ContextOptions:
        """Context options that affect the measured times."""
        return ContextOptions(
            ctx_size=self.depth + 1,
            max_outputs=1,
            threads=self.threads,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            op_offload_min_batch=self.op_offload_min_batch,
        )


def devices_identity(cards: Sequence[OffloadDevice | PlannedDevice]) -> str:
    """Return a string with llama-cpp-python's version, the CPU's name, and the GPUs' names and descriptions."""
    return "; ".join(
        (version("llama-cpp-python"), host.cpu_name(), *(f"{card.name} {card.description}" for card in cards))
    )


def shape_key(header: ModelHeader) -> str:
    """Return a hash of a model's architecture and tensor shapes, which does not need the downloaded file."""
    shape = [header.architecture, *([t.name, t.type, t.shape] for t in header.tensors)]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:32]


def record(folder: Path, header: ModelHeader, point: RehearsedSpeed) -> None:
    """Save a measurement, replacing one with the same settings; its T(n) / T(1) fills in missing batch sizes."""

    def add(points: list[RehearsedSpeed] | None) -> list[RehearsedSpeed]:
        others, batch_s = [], point.batch_s
        for one in points or []:
            if _place(one) != _place(point):
                others.append(one)
            elif one.batch_s.get(1):
                batch_s = {n: s * batch_s[1] / one.batch_s[1] for n, s in one.batch_s.items()} | batch_s
        return [*others, replace(point, batch_s=batch_s)][-_MOST_POINTS:]

    _table(folder).update(shape_key(header), add)


def _table(folder: Path) -> JsonTable[list[RehearsedSpeed]]:
    return JsonTable(folder / "rehearsed.json", list[RehearsedSpeed])


def _place(point: RehearsedSpeed) -> tuple[object, ...]:
    op_offload_min_batch = point.op_offload_min_batch
    return point.placement, point.threads, point.machine, point.cache_type_k, point.cache_type_v, op_offload_min_batch


def known(folder: Path, header: ModelHeader, threads: int, machine: str) -> list[RehearsedSpeed]:
    """Return a model's measurements that were made with this number of threads on this machine."""
    points = _table(folder).get(shape_key(header)) or []
    return [p for p in points if (p.threads, p.machine) == (threads, machine) and p.batch_s.get(1, 0.0) > 0]


@dataclass(frozen=True, slots=True)
class RehearsedLatency:
    """Machine speeds corrected by measurements of one model, with its T(n) / T(1) and the latest measurement's date."""

    speed: MachineProfile
    batches: tuple[MeasuredBatches, ...]
    date: str

    def nearest(
        self,
        header: ModelHeader,
        placement: Placement,
        cards: Sequence[str],
        op_offload_min_batch: int = OP_OFFLOAD_MIN_BATCH,
    ) -> MeasuredBatches | None:
        """Return T(n) / T(1) with this ``op_offload_min_batch`` and the most similar CPU weight bytes, or None."""
        here = host_bytes(header, placement, cards)
        alike = [one for one in self.batches if one.op_offload_min_batch == op_offload_min_batch]
        return min(alike, key=lambda one: abs(host_bytes(header, one.placement, cards) - here), default=None)


def latency(
    points: Sequence[RehearsedSpeed], header: ModelHeader, speed: MachineProfile, cards: Sequence[str]
) -> RehearsedLatency | None:
    """Return the latency derived from measurements (:func:`ggufspec.planning.speed.corrected`), or None."""
    if not points:
        return None
    batches = tuple(
        MeasuredBatches(
            point.placement, {n: s / point.batch_s[1] for n, s in point.batch_s.items()}, point.op_offload_min_batch
        )
        for point in points
        if len(point.batch_s) > 1
    )
    date = max(point.date for point in points)
    tokens = [MeasuredToken(p.placement, p.batch_s[1], p.depth, p.context) for p in points]
    return RehearsedLatency(corrected(tokens, header, speed, cards), batches, date)


def as_rehearsed(
    request: PlanRequest, machine: PlanMachine, folder: Path, threads: int
) -> tuple[PlanRequest, PlanMachine]:
    """Return the request with saved measured latencies, and the machine with a speed origin that mentions them."""
    here, found = devices_identity(machine.cards), list[str]()

    def with_latency(subject: ModelRequest) -> ModelRequest:
        points = known(folder, subject.header, threads, here)
        rehearsed = latency(points, subject.header, machine.speed, machine.card_names)
        if rehearsed is not None:
            found.append(f"{subject.header.name} as measured here on {rehearsed.date}")
        return replace(subject, rehearsed=rehearsed)

    request = replace(
        request,
        target_only=with_latency(request.target_only),
        target=with_latency(request.target),
        draft=with_latency(request.draft) if request.draft else None,
    )
    origin = "; ".join([machine.speed.origin, *dict.fromkeys(found)])
    return request, replace(machine, speed=replace(machine.speed, origin=origin))
