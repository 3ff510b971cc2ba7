"""JSON document of ``ggufspec quantize``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class QuantisedFile:
    """Quantised file that was written."""

    type: str
    file: str
    expected_bytes: int
    size_bytes: int
    bits_per_weight: float
    seconds: float


@dataclass(frozen=True, slots=True)
class QuantizeDocument:
    """Document ``ggufspec/quantize@1``. ``weights`` is the number of weights in the model."""

    source: str
    source_bytes: int
    weights: int
    machine: dict[str, Any]
    files: tuple[QuantisedFile, ...]
    schema: str = field(default="ggufspec/quantize@1")
