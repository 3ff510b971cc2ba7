"""Profiles as documents, and as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufspec.display import of_file
from ggufspec.reports.tables import shortened
from ggufspec.schema.profiles import CheckDocument, ProfileDocument, ProfileModel, ProfileRow, ProfilesDocument

if TYPE_CHECKING:
    from rich.table import Table

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


def table(document: ProfilesDocument, width: int) -> Table:
    """The list, a line each; where that is wider than ``width`` columns a draft is below its target."""
    cells = rows(document)
    heads = ("Profile", "Target", "Size", "Draft", "Size", "Here")
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    if sum(widths) + _between(len(heads)) <= width:
        made = _table(*heads, right=(2, 4))
        for row in cells:
            made.add_row(*row)
        return made
    room = max(16, width - widths[0] - max(widths[2], widths[4]) - widths[5] - _between(4))
    made = _table("Profile", "Target and draft", "Size", "Here", right=(2,))
    for name, target, target_size, draft, draft_size, here in cells:
        models = "\n".join(shortened(model, room) for model in (target, draft) if model)
        made.add_row(name, models, f"{target_size}\n{draft_size}", here)
    return made


def _between(columns: int) -> int:
    """What stands between the cells of a row of :func:`_table`, and at its ends."""
    return 3 * columns - 1


def checks(document: CheckDocument) -> Table:
    """One row per profile, and below it what is wrong."""
    from rich.text import Text

    made = _table("Profile", "Target", "Draft", "Found", right=(1, 2))
    for row in document.checks:
        said = [Text(problem, "bold red") for problem in row.problems]
        said += [Text(warning, "yellow") for warning in row.warnings]
        said += [Text(f"next: {hint}", "dim") for hint in dict.fromkeys(row.hints) if hint]
        found = Text("\n").join(said) if said else Text("good", "green")
        made.add_row(row.name, of_file(row.target_bytes), of_file(row.draft_bytes), found)
    return made


def facts(document: ProfileDocument) -> Table:
    """One profile in two columns."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    row = document.profile
    for name, value in _facts(document):
        if value:
            made.add_row(name, value)
    if row.error:
        made.add_row("error", row.error)
    return made


def _facts(document: ProfileDocument) -> list[tuple[str, str]]:
    row = document.profile
    settings = ", ".join(f"{key} {value}" for key, value in row.settings.items() if value is not None)
    verdict = {"yes": "yes", "yes-with-warning": "yes, but ", "no": "no: "}.get(document.compatible or "", "")
    return [
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
    ]


def _source(model: ProfileModel | None) -> str:
    if model is None:
        return ""
    where = f"{model.repo}/{model.file}" if model.repo else model.file
    where += f"@{model.revision}" if model.revision else ""
    layers = f"{model.layers} layers" if model.layers else ""
    source = "" if model.read or not model.size_bytes else "by the profile"
    known = ", ".join(filter(None, (of_file(model.size_bytes), layers, source)))
    return f"{where}  ({known})" if known else where


def _table(*columns: str, right: tuple[int, ...]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns):
        made.add_column(
            column,
            justify="right" if index in right else "left",
            no_wrap=index == 0 or index in right,
            overflow="fold",
        )
    return made
