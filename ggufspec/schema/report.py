"""The JSON document of ``ggufspec report``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Failure


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of the results folder that cannot be reported, and why."""

    file: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class ReportDocument:
    """``ggufspec/report@1``: documents by file, and the files that were left out."""

    results: dict[str, dict[str, Any]]
    left_out: tuple[LeftOut, ...] = ()
    schema: str = field(default="ggufspec/report@1")
