"""An answer while it is written: as Markdown on a terminal, coloured by who wrote it, or plain."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rich.console import Console
from rich.segment import Segment

from ggufspec.chat import markdown
from ggufspec.display import visible

Write = Callable[[str], None]
Size = Callable[[], tuple[int, int]]

NARROW = 20  # columns below which Markdown is no help
_PAUSE_S = 0.04  # between two paintings at least, and _SHARE times what the last one took
_SHARE = 4.0
_TINTS = {"draft": "green", "lookup": "cyan", "bonus": "bold"}
_TINTS_WITHOUT_COLOUR = {"draft": "underline", "lookup": "italic", "bonus": "bold"}


class Stream(Protocol):
    """Where an answer goes, piece by piece."""

    def push(self, text: str, source: str) -> None:
        """The next piece, and who wrote it: ``draft``, ``lookup``, ``target`` or ``bonus``."""
        ...

    def finish(self) -> None:
        """The answer is over; what is written next begins a line."""
        ...


def write(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def size(console: Console) -> tuple[int, int]:
    """(columns, rows): what ``COLUMNS`` and ``LINES`` say, but not more than the terminal has."""
    columns, rows = console.size
    try:
        real = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return columns, rows
    return min(columns, real.columns or columns), min(rows, real.lines or rows)


def tints(console: Console) -> dict[str, str]:
    """The styles of tokens by who wrote them; the target's own have none."""
    return _TINTS if console.color_system and not console.no_color else _TINTS_WITHOUT_COLOUR


class Plain:
    """As it comes; harmless where a terminal shows it, byte for byte where none does."""

    def __init__(self, write: Write, *, terminal: bool) -> None:
        self._write, self._terminal = write, terminal
        self._ended = True

    def push(self, text: str, source: str) -> None:  # noqa: ARG002 - the others' need
        """Write it."""
        if text:
            self._write(visible(text) if self._terminal else text)
            self._ended = text.endswith("\n")

    def finish(self) -> None:
        """End the line."""
        if not self._ended:
            self._write("\n")
            self._ended = True


class Tinted(Plain):
    """As it comes, coloured by who wrote it."""

    def __init__(self, write: Write, console: Console) -> None:
        super().__init__(write, terminal=True)
        self._console = console
        self._styles = tints(console)

    def push(self, text: str, source: str) -> None:
        """Write it in its colour."""
        if text:
            style = self._console.get_style(self._styles.get(source, "none"))
            self._write(markdown.ansi([Segment(visible(text), style)], self._console))
            self._ended = text.endswith("\n")


class Window:
    """The last lines of the output, which may still change. The cursor is at the beginning of the line below them."""

    def __init__(self, write: Write, size: Size) -> None:
        self._write, self._size = write, size
        self._shown: list[str] = []
        self._widest = 0
        self._columns = size()[0]

    def update(self, settled: Sequence[tuple[str, int]], open_: Sequence[tuple[str, int]], then: str = "") -> None:
        """Replace the lines by others; only those that differ are written again.

        A terminal that has become narrower, or too low, has wrapped or scrolled away what was there: that stays then,
        and all is written below it.

        Args:
            settled: lines that stay for good, each with its width.
            open_: lines below them that may still change.
            then: written after them.
        """
        lines = [*settled, *open_]
        columns, rows = self._size()
        same = 0
        for before, (now, _) in zip(self._shown, lines, strict=False):
            if before != now:
                break
            same += 1
        up = len(self._shown) - same
        if (columns < self._columns and self._widest > columns) or up >= rows:
            same = up = 0
        moved = f"\x1b[{up}A\r\x1b[J" if up else ""
        text = moved + "".join(f"{line}\n" for line, _ in lines[same:]) + then
        if text:
            self._write(text)
        self._shown = [line for line, _ in open_]
        self._widest = max((width for _, width in open_), default=0)
        self._columns = columns


class Painting:
    """Markdown while it is written: what is final is printed once, the block below it is painted over as it grows.

    Nothing is ever taken from the screen but to be written again in the same breath. A block that would not fit the
    screen is not painted over any more: code is printed line by line, other blocks as their source.

    Args:
        write: writes to the terminal.
        console: for its styles: one with :data:`ggufspec.chat.markdown.THEME`.
        size: (columns, rows) of the terminal now.
    """

    def __init__(self, write: Write, console: Console, size: Size) -> None:
        self._write, self._console, self._size = write, console, size
        self._window = Window(write, size)
        self._pending = ""  # from the beginning of the block that is being written
        self._goes_on = False  # that is the rest of code which was printed in part
        self._before: markdown.Block | None = None
        self._raw: int | None = None  # characters of that block that were written as its source

    def add(self, text: str) -> None:
        """More of the answer; it is painted with the next :meth:`paint`."""
        self._pending += visible(text)

    def paint(self, *, final: bool = False) -> None:
        """Show all that was added.

        Args:
            final: no more will be.
        """
        if self._raw is not None and not self._paint_source(final):
            return
        columns, rows = self._size()
        width, most = max(1, columns - 1), max(1, rows - 2)
        done, block = markdown.split(self._pending)
        if self._goes_on and (first := done[0] if done else block):
            first = replace(first, goes_on=True)
            done, block = ([first, *done[1:]], block) if done else (done, first)
        if final and block is not None:
            done, block = [*done, block], None
        settled = [line for each in done for line in self._shown(each, width, settle=True)]
        if done or block is None:
            self._goes_on = False
            self._pending = block.source if block else ("" if done else self._pending)
        open_ = self._shown(block, width) if block else []
        while block and len(open_) > most:
            parts = None
            if block.kind == "fence":
                parts = next((cut for keep in (most // 2, 1) if (cut := markdown.cut_code(block, keep))), None)
            if parts is None:
                self._begin_source(block, settled)
                return
            settled += self._shown(parts[0], width, settle=True)
            block, self._goes_on = parts[1], True
            self._pending = block.source
            open_ = self._shown(block, width)
        self._window.update(settled, open_)

    def _shown(self, block: markdown.Block, width: int, *, settle: bool = False) -> list[tuple[str, int]]:
        """A block's lines and their widths, with the empty line before them."""
        space = [("", 0)] if self._before is not None and markdown.needs_space(self._before, block) else []
        if settle:
            self._before = block
        lines = markdown.rendered(block, self._console, width)
        return space + [(markdown.ansi(line, self._console), markdown.cells(line)) for line in lines]

    def _begin_source(self, block: markdown.Block, settled: list[tuple[str, int]]) -> None:
        """Take the block from the window and write its source from now on."""
        if self._before is not None and markdown.needs_space(self._before, block):
            settled.append(("", 0))
        source = block.source
        lead = len(source) - len(source.lstrip("\n"))
        if block.goes_on:  # the line that opens the code was printed
            lead = source.index("\n") + 1
        self._raw = max(lead, _sure(block))
        self._goes_on = False
        self._window.update(settled, [], then=source[lead : self._raw])

    def _paint_source(self, final: bool) -> bool:
        """Write more of a block's source; whether that is over."""
        assert self._raw is not None
        done, block = markdown.split(self._pending)
        first = done[0] if done else block
        assert first is not None
        over = bool(done) or final
        sure = len(first.source.rstrip("\n")) if over else _sure(first)
        text = first.source[self._raw : sure] + "\n" * over
        self._raw = max(self._raw, sure)
        if text:
            self._write(text)
        if over:
            self._raw, self._before = None, first
            self._pending = self._pending[len(first.source) :]
        return over


def _sure(block: markdown.Block) -> int:
    """Characters of an unfinished block that cannot belong to the next one: not the line ends at its end, nor a line
    that has just begun as a heading, a fence or an item might.
    """
    complete, _, begun = block.source.rpartition("\n")
    if not complete:
        return len(block.source)
    if block.kind == "fence":
        goes_on = begun.lstrip(" ")[:1] not in ("", "`", "~")
    else:
        goes_on = begun[:1].isalpha() and not complete.endswith("\n")
    is_open = goes_on and not markdown.split(f"{complete}\nx\n")[0]  # a heading is not, nor a fence that has its end
    return len(block.source if is_open else complete.rstrip("\n"))


class Live:
    """A :class:`Painting` that a thread keeps up to date, so that the one who pushes never waits for the terminal.

    ``push`` and ``finish`` raise what the painting raised, a terminal that is gone say.
    """

    def __init__(self, write: Write, console: Console, size: Size) -> None:
        self._painting = Painting(write, console, size)
        self._added: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._news, self._over = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self._painter = threading.Thread(target=self._paint, daemon=True)
        self._painter.start()

    def push(self, text: str, source: str) -> None:  # noqa: ARG002 - the others' need
        """Add it; it is on the screen within some hundredths of a second."""
        if self._failure is not None:
            raise self._failure
        self._added.put(text)
        self._news.set()

    def finish(self) -> None:
        """Paint what is left, for good."""
        self._over.set()
        self._news.set()
        self._painter.join()
        if self._failure is not None:
            raise self._failure
        self._take()
        self._painting.paint(final=True)

    def _paint(self) -> None:
        try:
            while not self._over.is_set():
                self._news.wait()
                self._news.clear()
                began = time.monotonic()
                self._take()
                self._painting.paint()
                self._over.wait(max(_PAUSE_S, _SHARE * (time.monotonic() - began)))
        except Exception as failure:  # the other thread raises it
            self._failure = failure

    def _take(self) -> None:
        """Hand what was added over to the painting, which one thread has at a time."""
        while not self._added.empty():
            self._painting.add(self._added.get())


class Rounds:
    """Every round in a line as it comes; the answer when it is over.

    Args:
        answer: where that goes then.
        show: prints a round.
    """

    def __init__(self, answer: Callable[[], Stream], show: Callable[[dict[str, Any]], None]) -> None:
        self._answer, self._show = answer, show
        self._pieces: list[tuple[str, str]] = []

    def round(self, told: dict[str, Any]) -> None:
        """A round, as :class:`ggufspec.schema.rounds.TracedRound` has it."""
        self._show(told)

    def push(self, text: str, source: str) -> None:
        """Keep it."""
        self._pieces.append((text, source))

    def finish(self) -> None:
        """Write the answer."""
        answer = self._answer()
        for text, source in self._pieces:
            answer.push(text, source)
        answer.finish()


def stream(console: Console, *, terminal: bool, as_markdown: bool, tint: bool) -> Stream:
    """Where an answer goes.

    Args:
        console: standard output's, with :data:`ggufspec.chat.markdown.THEME`.
        terminal: whether that is a terminal.
        as_markdown: whether to render it, where the terminal can move its cursor and is wide enough.
        tint: whether to colour it by who wrote it; that comes first.
    """
    if terminal and not console.is_dumb_terminal:
        if tint:
            return Tinted(write, console)
        if as_markdown and size(console)[0] >= NARROW:
            return Live(write, console, lambda: size(console))
    return Plain(write, terminal=terminal)
