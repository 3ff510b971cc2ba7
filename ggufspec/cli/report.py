"""Command ``ggufspec report``: show saved results of one or several machines as tables and a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from ggufspec.cli import ui
from ggufspec.cli.parameters import command, takes
from ggufspec.cli.results import check_exports, write_export
from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.files.cache import results_folder
from ggufspec.reports import report as reports
from ggufspec.reports.documents import ResultDocument, read_document
from ggufspec.reports.html import sections
from ggufspec.reports.html.page import page
from ggufspec.schema.base import Failure
from ggufspec.schema.report import ReportDocument, UnreportedFile
from ggufspec.settings.table import Settings

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE.json", help="Saved results.  [all in the results folder]", show_default=False),
]


@command(
    "ggufspec report --html report.html",
    "ggufspec report desktop.json laptop.json --html both.html",
    confirms=True,
)
def report(files: Files = None, *, given: Annotated[Settings, takes("results", "html", "export_markdown")]) -> int:
    """Show saved results. They come from bench, compare and tune, or from the JSON files given.

    Prints tables, or writes them to files. --html writes a self-contained page with plots of the results of all
    machines. --json prints all results as one document, which can be given to report on another machine.
    """
    check_exports(given)
    found, left_out = _given(files) if files else _kept(given.results or results_folder())
    machines = sections.report_section(list(found.values()))
    if given.html is not None:  # written first, because printing ends the command if a pipe's reader exits
        write_export(given.html, page(list(found.values())))
    if given.export_markdown is not None:
        write_export(given.export_markdown, reports.markdown(machines))
    bodies = {name: {"schema": document.schema, **asdict(document)} for name, document in found.items()}
    out = ui.out()

    def show() -> None:
        if given.html is None and given.export_markdown is None:
            out.print(Group(*reports.terminal(machines, out.width)))

    ui.result(ReportDocument(bodies, left_out), show)
    for each in left_out:
        ui.note(f"left out: {each.failure.error}")
    return 0


def _given(files: list[Path]) -> tuple[dict[str, ResultDocument], tuple[UnreportedFile, ...]]:
    """Read the named files, each once; raise an error if one cannot be read."""
    found: dict[str, ResultDocument] = {}
    for path in {untrusted.real(path): path for path in files}.values():
        found |= read_document(path)
    return found, ()


def _kept(place: Path) -> tuple[dict[str, ResultDocument], tuple[UnreportedFile, ...]]:
    """Read the results folder, oldest first; a file that cannot be read causes a note, not an error."""
    try:
        paths = sorted(place.glob("*.json"), key=lambda path: (path.lstat().st_mtime, path.name))
    except OSError as error:
        raise GgufspecError(f"{place} cannot be read: {error.strerror}", f"ls -ld {place}") from None
    found: dict[str, ResultDocument] = {}
    left_out = []
    for path in paths:
        try:
            found |= read_document(path)
        except GgufspecError as error:
            left_out.append(UnreportedFile(str(path), Failure.of(error)))
    if not found:
        why = f"none of the {len(paths)} files in {place} is a result" if paths else f"no results are saved in {place}"
        raise GgufspecError(why, "ggufspec report RESULT.json; bench --export-json, compare and tune save results")
    return found, tuple(left_out)
