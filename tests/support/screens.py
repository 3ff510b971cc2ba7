"""A terminal without a person: what it shows after what was written to it, as pyte emulates one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pexpect
import pyte

from tests.support.processes import PATIENCE_S


class Terminal:
    """A terminal of so many columns and rows that remembers what has scrolled away."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self.screen.set_mode(pyte.modes.LNM)  # as a terminal's own driver does: a line feed begins a line
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> None:
        """What a program writes."""
        self._stream.feed(text)

    def size(self) -> tuple[int, int]:
        """(columns, rows)."""
        return self.screen.columns, self.screen.lines

    def resize(self, columns: int, rows: int) -> None:
        """Another size; lines are not wrapped again. Those above a cursor that would be too low scroll away."""
        screen = self.screen
        at, above = screen.cursor.y, max(0, screen.cursor.y - rows + 1)
        screen.cursor.y = screen.lines - 1
        for _ in range(above):
            screen.index()
        screen.cursor.y = at - above
        for row in range(rows, screen.lines):
            screen.buffer.pop(row, None)
        screen.lines = rows
        screen.resize(rows, columns)

    @property
    def shown(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def text(self) -> str:
        """The same behind all that has scrolled away."""
        above = ["".join(line[x].data for x in sorted(line)).rstrip() for line in self.screen.history.top]
        return "\n".join([*above, self.shown]).rstrip()


def flat(text: str) -> str:
    """A text in one line, with single spaces."""
    return " ".join(text.split())


class Session:
    """A program in a pseudo-terminal whose screen is looked at."""

    def __init__(self, child: pexpect.spawn[str], columns: int = 100, rows: int = 40) -> None:
        self.child = child
        self.terminal = Terminal(columns, rows)
        self.raw = ""
        self.terminal.screen.write_process_input = child.send  # where its cursor is, if a program asks

    def type(self, text: str) -> None:
        """Keys."""
        self.child.send(text)

    def say(self, line: str) -> None:
        """A line and the enter key."""
        self.child.send(f"{line}\r")

    def paste(self, text: str) -> None:
        """A bracketed paste, in pieces as a terminal sends it, while the screen is kept up to date."""
        data = f"\x1b[200~{text}\x1b[201~"
        for start in range(0, len(data), 1024):
            self.child.send(data[start : start + 1024])
            self._take(0)

    def resize(self, columns: int, rows: int) -> None:
        """Pull at the window's corner."""
        self.child.setwinsize(rows, columns)
        self.terminal.resize(columns, rows)

    def until(self, what: str | Callable[[str], Any]) -> str:
        """Wait until the screen, with what has scrolled away, has a text, wherever its lines end, or fits a condition.

        All of it is returned.
        """
        condition = (lambda text: what in text or what in flat(text)) if isinstance(what, str) else what
        until = time.monotonic() + PATIENCE_S
        while not condition(self.terminal.text):
            assert time.monotonic() < until, f"not seen: {what}\n{self.terminal.text}"
            assert self._take(0.1), f"it ended before: {what}\n{self.terminal.text}"
        return self.terminal.text

    def end(self) -> str:
        """Wait until the program has ended."""
        while self._take(0.1):
            pass
        self.child.close()
        return self.terminal.text

    def _take(self, patience_s: float) -> bool:
        """Show what has come; False at the end."""
        try:
            text = self.child.read_nonblocking(65536, patience_s)
        except pexpect.TIMEOUT:
            return True
        except (pexpect.EOF, OSError):
            return False
        self.raw += text
        self.terminal.write(text)
        return True

    @property
    def pid(self) -> int:
        """Of the program."""
        return int(self.child.pid)


def interrupt(session: Session) -> None:
    """The signal of Ctrl-C, wherever the terminal's own keys go."""
    os.kill(session.pid, 2)
