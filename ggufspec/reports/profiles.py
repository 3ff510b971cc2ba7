"""Tables of profiles and of their checks, and the facts about one profile."""

from __future__ import annotations

from ggufspec.reports import table
from ggufspec.reports.table import ReportColumn, ReportTable
from ggufspec.reports.words import base_name, fitted, shortened
from ggufspec.schema.profiles import (
    CheckDocument,
    ProfileCheck,
    ProfileDocument,
    ProfileModel,
    ProfileRow,
    ProfilesDocument,
)
from ggufspec.schema.text import of_file

FITS = {"whole": "fits whole", "partly": "in part", "no": "too large", "unknown": "unknown until its header is read"}
_FIT = len("≈ 51/81 layers")  # terminal columns for the longest text that says how much of a pair fits
# Drafters without a draft file, in words
_WITHOUT_FILE = {"mtp": "its own MTP block", "lookup": "n-grams, no draft", "none": "no draft: it does not pay"}


def _here(row: ProfileRow) -> str:
    if row.fits != "partly" or row.target is None or row.fits_layers is None:
        return FITS[row.fits]
    about = "" if row.target.read else "≈ "
    return f"{about}{row.fits_layers}/{row.target.layers} layers"


def profile_rows(document: ProfilesDocument, width: int, there: str = "") -> ReportTable:
    """Return a table with a row per profile, its drafter below its target; the user's own profiles are starred.

    Reference profiles come last, below a heading row. ``there`` names a GPU that is not installed.
    """
    there = shortened(there or "Here", _FIT)
    fits = ["no profile" if row.error else "?" if row.fits == "unknown" else _here(row) for row in document.profiles]
    files = (base_name(model.file) for row in document.profiles for model in (row.target, row.draft) if model)
    longest = max((len(row.name) + row.mine for row in document.profiles), default=0)
    room = max(16, width - longest - max(map(len, (there, *fits))) - 17)
    short = fitted(files, room)
    rows: list[tuple[str, ...]] = []
    groups: list[int] = []
    for row, here in zip(document.profiles, fits, strict=True):
        if row.group and not groups:
            groups.append(len(rows))
            rows.append((row.group, "", "", ""))
        models = [model for model in (row.target, row.draft) if model]
        names = [short[base_name(model.file)] for model in models]
        sizes = [_size(model) for model in models]
        if row.draft is None and (drafter := row.settings.get("drafter")):
            names.append(_WITHOUT_FILE.get(drafter, drafter))
        rows.append((row.name + ("*" if row.mine else ""), "\n".join(names), "\n".join(sizes), here))
    columns = table.columns("Profile", table.word("Target and draft"), "Size", table.word(there))
    return ReportTable("Profiles", columns, rows, leading=groups, groups=groups)


def _size(model: ProfileModel) -> str:
    return ("≈ " if model.approximate and not model.read else "") + of_file(model.size_bytes)


def checks(document: CheckDocument) -> ReportTable:
    columns = table.columns(
        "Profile", "Target", "Draft", ReportColumn("Found", _found, "left", wraps=True, style=_colour)
    )
    rows = [(row.name, of_file(row.target_bytes), of_file(row.draft_bytes), row) for row in document.checks]
    return ReportTable("Checks", columns, rows)


def _found(row: ProfileCheck) -> str:
    return "\n".join((*row.problems, *row.warnings)) or "good"


def _colour(row: ProfileCheck) -> str:
    return "bold red" if row.problems else "yellow" if row.warnings else "green"


def facts(document: ProfileDocument) -> list[tuple[str, str]]:
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
    source = "" if model.read or not model.size_bytes else "according to the profile, unchecked"
    known = ", ".join(filter(None, (_size(model), layers, source)))
    return f"{where}  ({known})" if known else where
