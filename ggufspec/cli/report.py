"""Command ``ggufspec report``: show saved results of one or several machines as tables and a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from ggufspec.cli import ui
from ggufspec.cli.parameters import command, takes
from ggufspec.cli.results import check_exports, write
from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.files.cache import results_folder
from ggufspec.reports import report as reports
from ggufspec.reports.documents import Result, read
from ggufspec.reports.html import sections
from ggufspec.reports.html.page import page
from ggufspec.schema.base import Failure
from ggufspec.schema.report import LeftOut, ReportDocument
from ggufspec.settings.table import Settings

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE.json", help="Saved results.  [all in the results folder]", show_default=False),
]


@command(
    "ggufspec report --html report.html",
    "ggufspec report desktop.json laptop.json --html both.html --export-markdown both.md",
    confirms=True,
)
def report(files: Files = None, *, given: Annotated[Settings, takes("results", "html", "export_markdown")]) -> int:
    """Show saved results. They come from bench, compare and tune, or from the JSON files given.

    Prints tables, or writes them to files. --html writes one page with plots, which needs no network and has the
    results of all machines. --json prints all results as one document, which report on another machine reads as a file.
    """
    check_exports(given)
    found, left_out = _given(files) if files else _kept(given.results or results_folder())
    machines = sections.report(list(found.values()))
    if given.html is not None:  # first, because printing ends the command if a pipe's reader leaves
        write(given.html, page(list(found.values())))
    if given.export_markdown is not None:
        write(given.export_markdown, reports.markdown(machines))
    bodies = {name: {"schema": document.schema, **asdict(document)} for name, document in found.items()}
    out = ui.out()

    def show() -> None:
        if given.html is None and given.export_markdown is None:
            out.print(Group(*reports.terminal(machines, out.width)))

    ui.result(ReportDocument(bodies, left_out), show)
    for each in left_out:
        ui.note(f"left out: {each.failure.error}")
    return 0


def _given(files: list[Path]) -> tuple[dict[str, Result], tuple[LeftOut, ...]]:
    """Read the named files, each once; one that cannot be read is an error."""
    found: dict[str, Result] = {}
    for path in {untrusted.real(path): path for path in files}.values():
        found |= read(path)
    return found, ()


def _kept(place: Path) -> tuple[dict[str, Result], tuple[LeftOut, ...]]:
    """Read the results folder, oldest first; a file that cannot be read is a note, not an error."""
    try:
        paths = sorted(place.glob("*.json"), key=lambda path: (path.lstat().st_mtime, path.name))
    except OSError as error:
        raise GgufspecError(f"{place} cannot be read: {error.strerror}", f"ls -ld {place}") from None
    found: dict[str, Result] = {}
    left_out = []
    for path in paths:
        try:
            found |= read(path)
        except GgufspecError as error:
            left_out.append(LeftOut(str(path), Failure.of(error)))
    if not found:
        why = f"none of the {len(paths)} files in {place} is a result" if paths else f"no results are kept in {place}"
        raise GgufspecError(why, "ggufspec report RESULT.json; bench --export-json, compare and tune make some")
    return found, tuple(left_out)
