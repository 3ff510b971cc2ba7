"""Output to the terminal: data to stdout, everything else to stderr."""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from rich.theme import Theme

from ggufspec.cli.terminal import Console
from ggufspec.schema import interrupts
from ggufspec.schema.base import Document, to_json
from ggufspec.schema.text import visible
from ggufspec.settings.table import Flags

_flags = Flags()
_live: list[Console] = []  # consoles with a bar or spinner, above which notes are printed


def begin(given: Flags) -> None:
    global _flags
    _flags = given
    interrupts.acknowledge_with(_stopping)


def flags() -> Flags:
    """Return ``--json``, ``-q``, ``-v`` and ``-y`` of the running command."""
    return _flags


def is_live() -> bool:
    """Return whether progress is shown: on a terminal, without ``-q`` and without ``-v``, which shows a log."""
    return err().is_terminal and not (_flags.quiet or _flags.verbose)


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str, *, default: bool) -> bool:
    return typer.confirm(visible(question), default=default, err=True)


def out(theme: Theme | None = None) -> Console:
    """Return standard output's console, as wide as the terminal even if piped; 100 columns without one."""
    columns = None if sys.stdout.isatty() else shutil.get_terminal_size((_columns(), 24)).columns
    return Console(width=columns, theme=theme)


def _columns() -> int:
    for number in (2, 0):
        with suppress(OSError):
            return os.get_terminal_size(number).columns or 100
    return 100


def err() -> Console:
    return Console(stderr=True)


def data(text: str) -> None:
    """Print a document to standard output with control characters shown, which JSON has escaped already.

    If the encoding is not UTF-8, all but ASCII is escaped as in JSON, so that JSON stays valid.
    """
    text = visible(text)
    if sys.stdout.encoding and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        text = re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def result(document: Document, show: Callable[[], None]) -> None:
    """Print a command's result: the document with ``--json``, otherwise what ``show`` prints."""
    if _flags.json:
        data(to_json(document))
    else:
        show()


def note(text: str) -> None:
    """Print a note to standard error, unless ``-q`` is given; without ``-v`` only if it is due."""
    from ggufspec.decoding.threads import is_due

    if _flags.quiet or not (_flags.verbose or is_due(text)):
        return
    (_live[-1] if _live else err()).say(text, style="dim")


def _stopping() -> None:
    """Acknowledge Ctrl-C, on a line below the ``^C`` that a terminal shows."""
    note("stopping…" if _live or not err().is_terminal else "\nstopping…")


def failure(message: str, hint: str, *, stopped: bool = False) -> None:
    """Print a failure and the next command, without "error:" if the user ``stopped`` the command."""
    console = err()
    console.say(("" if stopped else "error: ", "bold red"), message)
    if hint:
        console.whole(("  next: ", "bold"), hint)


def hear() -> None:
    """Show control characters in libraries' warnings and logs, which may quote a hub's answers."""

    def seen(*args: Any, **more: Any) -> logging.LogRecord:
        record = logging.LogRecord(*args, **more)
        record.msg, record.args = visible(record.getMessage()), ()
        return record

    if logging.getLogRecordFactory() is logging.LogRecord:  # not set yet, by us or others
        logging.setLogRecordFactory(seen)
    warnings.showwarning = lambda message, *_, **__: note(str(message))


class _Done(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class _Left(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        return Text("left: ").append_text(super().render(task)) if task.time_remaining is not None else Text()


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar if :func:`is_live`; call it with (done, total, current step), a total of 0 if unknown."""
    if not is_live():
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Done(), TimeElapsedColumn(), _Left())
    console = err()
    with Progress(*columns, console=console, transient=True) as bar, above(console):
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total or None, description=what)


@contextmanager
def above(console: Console) -> Iterator[None]:
    """Print notes above the bar or spinner on this console."""
    _live.append(console)
    try:
        yield
    finally:
        _live.remove(console)


@contextmanager
def busy(with_what: str = "") -> Iterator[Callable[[str], None]]:
    """Show a spinner during work of unknown length, if :func:`is_live`; call it with each step."""
    if not is_live():
        yield lambda _: None
        return
    console = err()
    status = console.status("")
    with ExitStack() as shown:

        def show(what: str) -> None:
            status.update(Text(what, "dim", no_wrap=True, overflow="ellipsis"))
            if console not in _live:  # nothing is shown before the first step
                shown.enter_context(status)
                shown.enter_context(above(console))

        if with_what:
            show(with_what)
        yield show


@contextmanager
def loading(name: str) -> Iterator[Callable[[], None]]:
    """Show a spinner while a pair loads and reads the prompt; call it to end that when the answer begins."""
    with ExitStack() as waiting:
        waiting.enter_context(busy(f"loading {name}, and reading the prompt"))
        yield waiting.close


@contextmanager
def making() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show how far a profile's expanded models are made; call it with events of :func:`ggufspec.models.sparse.fill`."""
    with busy() as show:
        yield lambda event: show(f"making {event['file']}, once: {event['bytes'] / event['of']:.0%}")
