"""The console that everything is printed on: what is printed is seen, and nothing of it is obeyed.

Names, metadata, profiles, results and answers of a hub come from others. Here no text of theirs moves the cursor of a
terminal (:mod:`ggufspec.schema.text`), and none is markup to Rich: styles are given apart, ``print("…", style="dim")``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from itertools import accumulate
from typing import Any

from rich import console
from rich.cells import cell_len
from rich.segment import Segment
from rich.text import Span, Text

from ggufspec.schema.text import visible

# What no line ends in: a word, or a command up to the punctuation after it.
_WHOLE = re.compile(
    r"(?:\S*/)?(?:ggufspec (?!is |needs |wrote )|pip |python[\d.]* |ls )(?:(?![;:,)] | \().)*[;:,)]?\s*|\S+\s*"
)


class Console(console.Console):
    """A console of Rich's without markup, which shows what a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Before it is measured, so that columns are as wide as what is seen."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Of whatever is printed, its parts too: all text comes here or through :meth:`render_str`."""
        return super().render(_visible(renderable) if isinstance(renderable, Text) else renderable, options)

    def print(self, *what: Any, **how: Any) -> None:
        """Standard error that cannot be written to is no reason to fail."""
        with suppress(OSError) if self.stderr else nullcontext():
            super().print(*what, **how)

    def on_broken_pipe(self) -> None:
        """A reader that is gone ends the command, unless it read what is not data."""
        if self.stderr:
            self.quiet = True
        else:
            super().on_broken_pipe()

    def whole(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print a line that is never broken, such as a command or an address: what is copied is one line."""
        self.print(Text.assemble(*parts, style=style), soft_wrap=True)

    def say(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print sentences, some parts with a style of their own, broken between words.

        Standard error that is no terminal has one line.
        Words that are longer than a line and commands stay whole, so that they can be copied.
        """
        if self.stderr and not self.is_terminal:
            self.whole(*parts, style=style)
            return
        for line in _visible(Text.assemble(*parts, style=style)).split(allow_blank=True):
            for piece in line.divide(_ends(line.plain, self.width)):
                piece.rstrip()
                self.print(piece, soft_wrap=True)


def _ends(line: str, width: int) -> Iterable[int]:
    """The positions at which a line is broken, so that as much as possible fits ``width`` columns."""
    used = 0
    for found in _WHOLE.finditer(line):
        if used and used + cell_len(found[0].rstrip()) > width:
            yield found.start()
            used = 0
        used += cell_len(found[0])


def _visible(text: Text) -> Text:
    """The same, its styles where they were."""
    pieces = [visible(character) for character in text.plain]
    ends = [0, *accumulate(map(len, pieces))]
    shown = text.blank_copy("".join(pieces))
    shown.spans = [Span(ends[span.start], ends[min(span.end, len(pieces))], span.style) for span in text.spans]
    return shown
