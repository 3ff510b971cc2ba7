"""What quantising a model gave: names, the document, the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.schema.quantize import QuantizeDocument

if TYPE_CHECKING:
    from rich.table import Table

_SUFFIX = re.compile(r"(?i)[-._](?:UD-)?(?:F32|F16|BF16|I?Q\d+_[A-Z0-9_]+|TQ\d_0|MXFP4(?:_MOE)?)$")
_PART = re.compile(r"-00001-of-\d{5}$")


def outputs(source: Path, folder: Path, types: Sequence[str]) -> dict[str, Path]:
    """The file of each type: the source's name, with the type in place of its own."""
    stem = _SUFFIX.sub("", _PART.sub("", source.stem)) or source.stem
    return {name: folder / f"{stem}-{name}.gguf" for name in types}


def table(document: QuantizeDocument) -> Table:
    """One row per file."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(("File", "Size", "Bits per weight", "Of the source", "Time")):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for one in document.files:
        size = f"{one.size_bytes / 1e9:.2f} GB" if one.size_bytes >= 1e9 else f"{one.size_bytes / 1e6:.1f} MB"
        share = f"{one.size_bytes / document.source_bytes:.0%}"
        made.add_row(Path(one.file).name, size, f"{one.bits_per_weight:.2f}", share, f"{one.seconds:.1f} s")
    return made
