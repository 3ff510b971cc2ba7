"""Table of the models on this disk."""

from __future__ import annotations

from functools import cache

from ggufspec.reports import table
from ggufspec.reports.table import ReportTable
from ggufspec.reports.words import fitted
from ggufspec.schema.models import ModelRow, ModelsDocument
from ggufspec.schema.text import of_file

_DRAFT = "  draft: "


def model_rows(document: ModelsDocument, width: int) -> ReportTable:
    """Return a table with a row per model, with its best draft below its name."""
    names = {row.path: row.name for row in document.models}
    shown = cache(lambda most: fitted(names.values(), most))  # names shortened to the available width
    quantization_width = max((len(row.quantization) for row in document.models), default=0)
    room = max(28, width - 36 - quantization_width)  # terminal columns available for the name
    rows = []
    for row in document.models:
        name = shown(room - 7)[row.name] + " (head)" if row.is_head else shown(room)[row.name]
        if row.drafts:
            more = f" and {len(row.drafts) - 1} more" if len(row.drafts) > 1 else ""
            draft = shown(room - len(_DRAFT) - len(more))[names[row.drafts[0]]]
            name += f"\n{_DRAFT}{draft}{more}"
        rows.append((name, of_file(row.size_bytes), row.size_label, row.quantization, row.program, row.architecture))
    heads = ("Model", "Size", "Params", table.word("Type"), table.word("From"), table.word("Architecture"))
    return ReportTable("Models", table.columns(*heads), rows)


def suggestions(document: ModelsDocument) -> list[ModelRow]:
    """Return the models that have no draft on this disk but for which a profile names one."""
    return [row for row in document.models if row.suggestion and not row.drafts]
