"""Output to the terminal: data to stdout, everything else to stderr."""

from __future__ import annotations

import codecs
import functools
import json
import logging
import math
import os
import re
import shutil
import sys
import time
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
from ggufspec.settings.table import OutputFlags

_flags = OutputFlags()
_live: list[Console] = []  # consoles with a bar or spinner, above which notes are printed
_paused_until_s = 0.0  # end of the last pause that was noted
_NOTED_S = 2  # shortest pause to note


def begin_command(given: OutputFlags) -> None:
    from ggufspec.models.hub import client

    global _flags
    _flags = given
    interrupts.acknowledge_with(_stopping)
    client.show_requests_with(requests)


def flags() -> OutputFlags:
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
    """Return standard output's console, as wide as the terminal even if piped; 100 columns without a terminal."""
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
    """Print a document to standard output, showing control characters, which JSON has escaped already.

    Unless the encoding is UTF-8, non-ASCII characters become JSON escapes, so that JSON stays valid.
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
    """Print a note to standard error unless ``-q`` is given; without ``-v``, some are shown only once a day."""
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
    """Show control characters in libraries' warnings and logs, which may quote hub responses."""

    def seen(*args: Any, **more: Any) -> logging.LogRecord:
        record = logging.LogRecord(*args, **more)
        record.msg, record.args = visible(record.getMessage()), ()
        return record

    if logging.getLogRecordFactory() is logging.LogRecord:  # no factory was set yet
        logging.setLogRecordFactory(seen)
    warnings.showwarning = lambda message, *_, **__: note(str(message))


class _Done(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if (task.total or 0) > 1 else Text()  # a single step needs no count


class _Left(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        return Text("left: ").append_text(super().render(task)) if task.time_remaining is not None else Text()


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar if :func:`is_live`; yield its update(done, total, current step), with total 0 if unknown."""
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
    """Show a spinner during work of unknown length if :func:`is_live`; yield a function to call with each step."""
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
def requests(doing: str) -> Iterator[Callable[[str, float], None]]:
    """Show a spinner for a request to a server, with the seconds left if the server asks for a pause."""
    is_nested = bool(_live)  # another bar or spinner is shown
    with busy() as show:
        if doing and not is_nested:
            show(doing)
        yield functools.partial(show_pause, None if is_nested else show)


def show_pause(show: Callable[[str], None] | None, why: str, left_s: float) -> None:
    """Show a pause that a server asks for: each second with ``show``, or once in a note if no progress is shown."""
    global _paused_until_s
    if show is not None and is_live():
        show(f"again in {math.ceil(left_s)} s: {why}")
    elif round(left_s) >= _NOTED_S and (until_s := time.monotonic() + left_s) > _paused_until_s:
        _paused_until_s = until_s + 1
        note(f"{why}: trying again in {left_s:.0f} s")


@contextmanager
def loading(name: str) -> Iterator[Callable[[], None]]:
    """Show a spinner while a pair loads and processes the prompt; yield a function that ends it."""
    with ExitStack() as waiting:
        waiting.enter_context(busy(f"loading {name} and processing the prompt"))
        yield waiting.close


@contextmanager
def making() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show the progress of a profile's expanded models; yield a callback for :func:`ggufspec.models.sparse.fill`."""
    with busy() as show:
        yield lambda event: show(f"making {event['file']}, once: {event['bytes'] / event['of']:.0%}")
