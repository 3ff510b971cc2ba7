"""``ggufspec report``: results that were kept, as tables and a page; several machines in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec import foreign
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import takes
from ggufspec.errors import GgufspecError
from ggufspec.settings import Settings

if TYPE_CHECKING:
    from ggufspec.reports.reading import Result
    from ggufspec.schema.report import LeftOut

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE.json", help="Results; all of the results folder if none.", show_default=False),
]


def report(
    files: Files = None,
    *,
    given: Annotated[Settings, takes("results", "html", "export_markdown")],
) -> int:
    """Show results that were kept. They are of bench --export-json, compare, tune, bench --sweep and plan --json.

    Tables go to the terminal. --html makes one page with plots that needs no network, with the results of all machines
    that are given. --json gives all of them as one document, which a report on another machine takes as a file.
    """
    from ggufspec.files import write_whole
    from ggufspec.reports import report as reports
    from ggufspec.reports import sections
    from ggufspec.reports.html.page import page
    from ggufspec.schema.base import to_json
    from ggufspec.schema.report import ReportDocument

    inputs.check_exports(given)
    found, left_out = _given(files) if files else _kept(given.results)
    machines = sections.report(list(found.values()))
    if given.html is not None:  # before anything is printed: its reader may go, as head does
        write_whole(given.html, page(list(found.values())))
    if given.export_markdown is not None:
        write_whole(given.export_markdown, reports.markdown(machines))
    if ui.flags().json:
        bodies = {name: _body(document) for name, document in found.items()}
        ui.data(to_json(ReportDocument(bodies, left_out)))
    else:
        out = ui.out()
        for line in reports.terminal(machines, out.width):
            out.print(line)
    for each in left_out:
        ui.note(f"left out: {each.failure.error}")
    return 0


def _given(files: list[Path]) -> tuple[dict[str, Result], tuple[LeftOut, ...]]:
    """The files that were named: one that cannot be read is an error. The same file twice counts once."""
    from ggufspec.reports.reading import read

    found: dict[str, Result] = {}
    for path in {foreign.real(path): path for path in files}.values():
        found |= read(path)
    return found, ()


def _kept(folder: Path | None) -> tuple[dict[str, Result], tuple[LeftOut, ...]]:
    """Everything in the results folder, oldest first: a file that cannot be read is told, and not the end.

    Raises:
        GgufspecError: there is nothing to report.
    """
    from ggufspec.cache import results_folder
    from ggufspec.reports.reading import read
    from ggufspec.schema.base import Failure
    from ggufspec.schema.report import LeftOut

    place = folder or results_folder()
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
            left_out.append(LeftOut(str(path), Failure(error.message, error.hint)))
    if not found:
        why = f"none of the {len(paths)} files in {place} is a result" if paths else f"no results are kept in {place}"
        raise GgufspecError(why, "ggufspec report RESULT.json; bench --export-json, compare and tune make some")
    return found, tuple(left_out)


def _body(document: Result) -> dict[str, object]:
    import json

    from ggufspec.schema.base import to_json

    body: dict[str, object] = json.loads(to_json(document))
    return body
