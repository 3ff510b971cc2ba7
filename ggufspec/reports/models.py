"""Table of the models on this disk."""

from __future__ import annotations

from ggufspec.reports import table
from ggufspec.reports.table import Table
from ggufspec.reports.words import shortened
from ggufspec.schema.models import ModelRow, ModelsDocument
from ggufspec.schema.text import of_file

_DRAFT = "  draft: "


def listing(document: ModelsDocument, width: int) -> Table:
    """Return one row per model, with its best draft below its name."""
    names = {row.path: row.name for row in document.models}
    beside = max((len(row.quantization) for row in document.models), default=0)
    room = max(28, width - 36 - beside)  # left for the name
    rows = []
    for row in document.models:
        name = shortened(row.name, room - 7) + " (head)" if row.is_head else shortened(row.name, room)
        if row.drafts:
            more = f" and {len(row.drafts) - 1} more" if len(row.drafts) > 1 else ""
            name += f"\n{_DRAFT}{shortened(names[row.drafts[0]], room - len(_DRAFT) - len(more))}{more}"
        rows.append((name, of_file(row.size_bytes), row.size_label, row.quantization, row.program, row.architecture))
    heads = ("Model", "Size", "Params", table.word("Type"), table.word("From"), table.word("Architecture"))
    return Table("Models", table.columns(*heads), rows)


def suggestions(document: ModelsDocument) -> list[ModelRow]:
    """Return the models that have no draft on this disk but one in a profile."""
    return [row for row in document.models if row.suggestion and not row.drafts]
