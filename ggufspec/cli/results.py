"""Steps before and after a long measurement: check export files; show and save its document, return the exit code."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.text import Text

from ggufspec.cli import ui
from ggufspec.errors import GgufspecError, StopError, UsageError
from ggufspec.files.cache import is_temporary, results_folder, writable
from ggufspec.files.write import check_writable, write_whole
from ggufspec.reports.html.page import page
from ggufspec.schema.base import to_json
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.compare import CompareDocument
from ggufspec.schema.sweep import SweepDocument
from ggufspec.schema.text import counted, visible
from ggufspec.schema.tune import TuneDocument
from ggufspec.schema.verify import VerifyDocument
from ggufspec.settings.table import OPTIONS, Settings

_Document = TypeVar("_Document", "BenchDocument", "CompareDocument", "SweepDocument", "TuneDocument", "VerifyDocument")


_EXPORTS = ("export_json", "export_markdown", "export_csv", "html")


def check_exports(given: Settings, *more: Path | None) -> None:
    """Check before the run that export files and ``more`` can be written; overwrite empty files without asking.

    Raises:
        GgufspecError: a file cannot be written.
        UsageError: a file exists and may not be overwritten.
    """
    for path in filter(None, (*given.given(_EXPORTS).values(), *more)):
        check_writable(path)
        if path.is_file() and path.stat().st_size:
            check_overwrites(path)


def check_overwrites(path: Path, hint: str = "add -y to overwrite it, or name another file") -> None:
    """Raise a UsageError unless ``-y``, or an answer on the terminal, permits overwriting a file that exists."""
    question = f"{path} exists already. Overwrite it?"
    if not ui.flags().yes and not (ui.can_ask() and ui.confirmed(question, default=False)):
        raise UsageError(f"{path} exists already", hint)


def write_export(path: Path, text: str) -> None:
    """Write an export file that :func:`check_exports` has checked, and print a note."""
    write_whole(path, text)
    if path.is_file():  # not a device or pipe
        ui.note(f"wrote {path}")


def folder(given: Settings) -> Path:
    return given.results or writable(results_folder())


def measured(
    run: Callable[[Any], object],
    has_results: Callable[[], object],
    shown: Callable[[], AbstractContextManager[Any]] = ui.progress,
) -> bool:
    """Run a measurement and show its progress; return True if Ctrl-C ended it after some results.

    Raises:
        StopError: Ctrl-C came before the first result.
    """
    try:
        with shown() as progress:
            run(progress)
    except KeyboardInterrupt:
        if not has_results():
            raise StopError("interrupted before anything was measured", "") from None
        return True
    return False


def finish(
    document: _Document,
    show: Callable[[], None],
    given: Settings,
    *,
    markdown: Callable[[_Document], str] = lambda _: "",
    csv: Callable[[_Document], str] = lambda _: "",
    notes: Iterable[str] = (),
    kept: Path | None = None,
    resumed: int = 0,
    failed: GgufspecError | None = None,
    hint: str = "the same command resumes",
) -> int:
    """Print the document before writing its files, so that a full disk does not lose the result.

    ``kept`` is the file that saves the document, ``resumed`` the number of trials that an earlier run measured,
    ``failed`` an earlier failure, and ``hint`` the advice after Ctrl-C. Return the exit code: 130 after Ctrl-C,
    otherwise the code of the first failure, or 0.
    """
    ui.result(document, show)
    for note in () if ui.flags().json else notes:
        ui.note(note)
    failures = [failed] if failed else []

    def export(path: Path | None, text: Callable[[], str], how: Callable[[Path, str], None] = write_export) -> bool:
        if path is None:
            return False
        try:
            how(path, text())
        except GgufspecError as error:
            failures.append(error)
            return False
        return True

    if kept and export(kept, lambda: to_json(document) + "\n", write_whole) and not is_temporary(kept):
        before = f"; {counted(resumed, 'trial')} from before, --fresh measures everything again"
        ui.note(f"kept in {kept}{before if resumed else ''}")
    export(given.export_json, lambda: to_json(document) + "\n")
    export(given.export_markdown, lambda: markdown(document))
    export(given.export_csv, lambda: visible(csv(document)))
    export(given.html, lambda: page([cast(Any, document)]))
    for failure in failures:
        ui.failure(failure.message, failure.hint)
    if document.interrupted:
        if hint and given.given(_EXPORTS):
            hint += "; -y overwrites what it wrote"
        ui.failure("interrupted; the results so far are shown", hint, stopped=True)
        return 130
    return failures[0].exit_code if failures else 0


def same_pair(command: str, given: Settings, *more: str, kept: Iterable[str] = ()) -> str:
    """Return another command's command line for the same pair, with its placement, drafters and ``kept`` options."""
    names = ["pair", "model", "model_draft", "hf_repo", "hf_repo_draft", "drafter"]
    names += ["gpu_layers", "gpu_layers_draft", "ctx_size", "threads", *kept]
    found = [(OPTIONS[name].flags[:1], value) for name, value in given.given(names).items()]
    words = [word for flag, value in found for word in (*flag, *([] if value is True else [str(value)]))]
    return shlex.join(["ggufspec", command, *words, *more])


def show_models(shown: dict[str, Any]) -> None:
    """Print one line each for the target and the draft; ``shown`` maps these roles to texts."""
    for role in ("target", "draft"):
        if shown.get(role):
            ui.out().print(Text.assemble((f"{role:<6} ", "bold"), shown[role]))


def show_files(pair: dict[str, Any]) -> None:
    show_models({role: Path(str(file)).name for role, file in pair.items() if file})
