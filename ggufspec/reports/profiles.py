"""Profiles for people."""

from __future__ import annotations

from ggufspec.display import of_file
from ggufspec.reports import table
from ggufspec.reports.table import Column, Table
from ggufspec.reports.values import shortened
from ggufspec.schema.profiles import (
    CheckDocument,
    ProfileCheck,
    ProfileDocument,
    ProfileModel,
    ProfileRow,
    ProfilesDocument,
)

FITS = {
    "whole": "fits whole",
    "partly": "in part",
    "no": "too large",
    "unknown": "unknown until its header is read",
}


def rows(document: ProfilesDocument) -> list[tuple[str, ...]]:
    """Cells of the list: name, target, its size, draft, its size, what fits; the user's own have a star."""
    return [
        (
            row.name + ("*" if row.mine else ""),
            *_model(row.target),
            *_model(row.draft),
            "no profile" if row.error else "?" if row.fits == "unknown" else _here(row),
        )
        for row in document.profiles
    ]


def _here(row: ProfileRow) -> str:
    """What fits, with the target's layers where only some of them do."""
    if row.fits != "partly" or row.target is None or row.fits_layers is None:
        return FITS[row.fits]
    about = "" if row.target.read else "≈ "
    return f"{about}{row.fits_layers}/{row.target.layers} layers"


def _model(model: ProfileModel | None) -> tuple[str, str]:
    if model is None:
        return "", ""
    return model.file.rpartition("/")[2].removesuffix(".gguf"), of_file(model.size_bytes)


def listing(document: ProfilesDocument, width: int) -> Table:
    """A row for each profile; where that is wider than ``width`` columns a draft is below its target."""
    cells = rows(document)
    columns = table.columns("Profile", table.word("Target"), "Size", table.word("Draft"), "Size", table.word("Here"))
    widths = [max(map(len, column)) for column in zip([one.label for one in columns], *cells, strict=True)]
    if sum(widths) + 3 * len(columns) - 1 <= width:
        return Table("Profiles", columns, tuple(cells))
    room = max(16, width - widths[0] - max(widths[2], widths[4]) - widths[5] - 11)
    stacked = tuple(
        (
            name,
            "\n".join(shortened(model, room) for model in (target, draft) if model),
            f"{target_size}\n{draft_size}",
            here,
        )
        for name, target, target_size, draft, draft_size, here in cells
    )
    return Table("Profiles", (columns[0], table.word("Target and draft"), *columns[4:]), stacked)


def checks(document: CheckDocument) -> Table:
    """A row for each profile, and what is wrong with it."""
    columns = table.columns("Profile", "Target", "Draft", Column("Found", _found, "left", wraps=True, style=_colour))
    rows = tuple((row.name, of_file(row.target_bytes), of_file(row.draft_bytes), row) for row in document.checks)
    return Table("Checks", columns, rows)


def _found(row: ProfileCheck) -> str:
    hints = (f"next: {hint}" for hint in dict.fromkeys(row.hints) if hint)
    return "\n".join((*row.problems, *row.warnings, *hints)) or "good"


def _colour(row: ProfileCheck) -> str:
    return "bold red" if row.problems else "yellow" if row.warnings else "green"


def facts(document: ProfileDocument) -> list[tuple[str, str]]:
    """One profile as names and values."""
    row = document.profile
    settings = ", ".join(f"{key} {value}" for key, value in row.settings.items() if value is not None)
    verdict = {"yes": "yes", "yes-with-warning": "yes, but ", "no": "no: "}.get(document.compatible or "", "")
    found = [
        ("profile", row.name + (" (your own)" if row.mine else "")),
        ("target", _source(row.target)),
        ("draft", _source(row.draft)),
        ("settings", settings),
        ("why", row.why),
        ("source", row.source),
        ("comment", document.comment),
        ("here", _here(row)),
        ("compatible", verdict + "; ".join(document.reasons)),
        ("file", row.path),
        ("error", row.error),
    ]
    return [(name, value) for name, value in found if value]


def _source(model: ProfileModel | None) -> str:
    if model is None:
        return ""
    where = f"{model.repo}/{model.file}" if model.repo else model.file
    where += f"@{model.revision}" if model.revision else ""
    layers = f"{model.layers} layers" if model.layers else ""
    source = "" if model.read or not model.size_bytes else "by the profile"
    known = ", ".join(filter(None, (of_file(model.size_bytes), layers, source)))
    return f"{where}  ({known})" if known else where
