"""JSON document of ``ggufspec report``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.schema.base import Failure


@dataclass(frozen=True, slots=True)
class UnreportedFile:
    """File in the results folder that cannot be reported, with the reason."""

    file: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class ReportDocument:
    """Document ``ggufspec/report@1``: result documents by file, and the files that were skipped."""

    results: dict[str, dict[str, Any]]
    left_out: tuple[UnreportedFile, ...] = ()
    schema: str = field(default="ggufspec/report@1")
