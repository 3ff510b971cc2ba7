"""JSON document of ``ggufspec bench --sweep``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Failure, MeasuredRun, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Results for one value of the swept option. A failed run is absent, and ``failure`` gives the reason."""

    value: str
    target_only: MeasuredRun | None
    speculative: MeasuredRun | SpeculativeRun | None
    speedup: Spread | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SweepDocument:
    """Document ``ggufspec/sweep@1``: a bench at several values of ``option``, such as ``draft_max``."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    option: str
    points: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/sweep@1")
