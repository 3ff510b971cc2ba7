"""The JSON document of ``ggufspec bench --sweep``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One value of the swept option. A run is absent if it failed; ``failure`` says why."""

    value: str
    target_only: Run | None
    speculative: Run | SpeculativeRun | None
    speedup: Spread | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SweepDocument:
    """``ggufspec/sweep@1``: a bench with one option at several values. ``option`` is its name, e.g. ``draft_max``."""

    pair: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    option: str
    points: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/sweep@1")
