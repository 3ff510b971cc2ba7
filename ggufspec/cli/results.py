"""The end of a long measurement: its document is shown, then written, and gives the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ggufspec.cli import inputs, ui
from ggufspec.display import counted
from ggufspec.errors import GgufspecError, StopError
from ggufspec.settings import Settings

if TYPE_CHECKING:
    from ggufspec.schema.compare import CompareDocument
    from ggufspec.schema.sweep import SweepDocument
    from ggufspec.schema.tune import TuneDocument
    from ggufspec.schema.verify import VerifyDocument

_Document = TypeVar("_Document", "CompareDocument", "SweepDocument", "TuneDocument", "VerifyDocument")


@dataclass
class Measuring:
    """Whether Ctrl-C ended the measurement."""

    interrupted: bool = False


@contextmanager
def interruptible(has_results: Callable[[], object]) -> Iterator[Measuring]:
    """Measure inside; Ctrl-C ends it with the results so far.

    Raises:
        StopError: Ctrl-C before there was a result.
    """
    state = Measuring()
    try:
        yield state
    except KeyboardInterrupt:
        if not has_results():
            raise StopError("interrupted before anything was measured", "") from None
        state.interrupted = True


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
    """Print the document, then write its files: a full disk costs a file, not the result.

    Args:
        document: what was measured.
        show: prints it for people.
        given: the files to export.
        markdown: its table.
        csv: its lines.
        notes: for people.
        kept: its own file; None writes none.
        resumed: trials that an earlier run of the same had measured.
        failed: what failed before.
        hint: what to do after Ctrl-C.

    Returns:
        the exit code: 130 after Ctrl-C, that of the first failure, or 0.
    """
    from ggufspec.cache import is_temporary
    from ggufspec.files import write_whole
    from ggufspec.schema.base import to_json

    ui.result(document, show)
    for note in () if ui.flags().json else notes:
        ui.note(note)
    if kept is not None:
        try:
            write_whole(kept, to_json(document) + "\n")
        except GgufspecError as error:
            failed = failed or error
        else:
            if not is_temporary(kept):
                before = f"; {counted(resumed, 'trial')} from before, --fresh measures everything again"
                ui.note(f"kept in {kept}{before if resumed else ''}")
    if failed is not None:
        ui.failure(failed.message, failed.hint)
    failed = inputs.write_exports(given, document, markdown=markdown, csv=csv) or failed
    if document.interrupted:
        ui.failure("interrupted; what is shown was measured before", hint)
        return 130
    return failed.exit_code if failed else 0
