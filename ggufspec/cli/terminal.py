"""Console for all output, which shows control characters instead of sending them to the terminal.

Names, metadata, profiles, results and hub responses come from others, so their text must not move the cursor
(:mod:`ggufspec.schema.text`) or be parsed as Rich markup: styles are separate arguments, ``print("…", style="dim")``.
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

# Pieces that are never broken: a word, or a command up to the punctuation after it.
_WHOLE = re.compile(
    r"(?:\S*/)?(?:ggufspec (?!is |needs |wrote )|pip |python[\d.]* |ls )(?:(?![;:,)] | \().)*[;:,)]?\s*|\S+\s*"
)


class Console(console.Console):
    """Rich console without markup that shows control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Show control characters before the text is measured, so that columns are wide enough."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Show control characters in all other text; everything printed passes through here or :meth:`render_str`."""
        return super().render(_visible(renderable) if isinstance(renderable, Text) else renderable, options)

    def print(self, *what: Any, **how: Any) -> None:
        """Print, ignoring failures to write to standard error."""
        with suppress(OSError) if self.stderr else nullcontext():
            super().print(*what, **how)

    def on_broken_pipe(self) -> None:
        """End the command if standard output's reader has gone; if standard error's has, stop printing to it."""
        if self.stderr:
            self.quiet = True
        else:
            super().on_broken_pipe()

    def whole(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print a line that is never broken, such as a command or an address, so that it can be copied."""
        self.print(Text.assemble(*parts, style=style), soft_wrap=True)

    def say(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print sentences with styled parts, wrapped between words; unwrapped if standard error is not a terminal.

        Commands and words longer than a line stay whole, so that they can be copied.
        """
        if self.stderr and not self.is_terminal:
            self.whole(*parts, style=style)
            return
        for line in _visible(Text.assemble(*parts, style=style)).split(allow_blank=True):
            for piece in line.divide(_ends(line.plain, self.width)):
                piece.rstrip()
                self.print(piece, soft_wrap=True)


def _ends(line: str, width: int) -> Iterable[int]:
    """Yield the positions at which to break a line so that each part fits into ``width`` columns."""
    used = 0
    for found in _WHOLE.finditer(line):
        if used and used + cell_len(found[0].rstrip()) > width:
            yield found.start()
            used = 0
        used += cell_len(found[0])


def _visible(text: Text) -> Text:
    """Return ``text`` with control characters shown and its styles in place."""
    pieces = [visible(character) for character in text.plain]
    ends = [0, *accumulate(map(len, pieces))]
    shown = text.blank_copy("".join(pieces))
    shown.spans = [Span(ends[span.start], ends[min(span.end, len(pieces))], span.style) for span in text.spans]
    return shown
