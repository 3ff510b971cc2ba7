"""Report of a quantisation, and names for its files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ggufspec.reports import table
from ggufspec.reports.table import ReportTable
from ggufspec.schema.quantize import QuantizeDocument

_SUFFIX = re.compile(r"(?i)[-._](?:UD-)?(?:F32|F16|BF16|I?Q\d+_[A-Z0-9_]+|TQ\d_0|MXFP4(?:_MOE)?)$")
_PART = re.compile(r"-00001-of-\d{5}$")


def outputs(source: Path, folder: Path, types: Sequence[str]) -> dict[str, Path]:
    """Return the output file for each type, named like the source except for the type."""
    stem = _SUFFIX.sub("", _PART.sub("", source.stem)) or source.stem
    return {name: folder / f"{stem}-{name}.gguf" for name in types}


def results(document: QuantizeDocument) -> ReportTable:
    rows = [
        (
            Path(one.file).name,
            f"{one.size_bytes / 1e9:.2f} GB" if one.size_bytes >= 1e9 else f"{one.size_bytes / 1e6:.1f} MB",
            f"{one.bits_per_weight:.2f}",
            f"{one.size_bytes / document.source_bytes:.0%}",
            f"{one.seconds:.1f} s",
        )
        for one in document.files
    ]
    columns = table.columns(table.words("File"), "Size", "Bits per weight", "Of the source", "Time")
    return ReportTable("Files", columns, rows)
