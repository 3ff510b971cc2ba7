"""JSON document of ``ggufspec run``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Count, MeasuredRun, SpeculativeRun


@dataclass(frozen=True, slots=True)
class RunDocument:
    """Document ``ggufspec/run@1``: one answer."""

    pair: dict[str, Any]
    settings: dict[str, Any]
    text: str
    tokens: tuple[Count, ...]
    stop_reason: str
    statistics: MeasuredRun | SpeculativeRun
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default="ggufspec/run@1")
