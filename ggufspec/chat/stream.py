"""An answer while it is written: as Markdown on a terminal, coloured by who wrote it, or plain."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from ggufspec.chat import markdown
from ggufspec.schema.text import visible
from ggufspec.settings.registry import DRAFTERS

NARROW = 20  # columns below which Markdown is no help
_SOURCE_STYLES = {  # with colours, and without
    "draft": ("green", "underline"),
    **{name: ("magenta", "underline italic") for name, row in DRAFTERS.items() if row.is_head},
    "lookup": ("cyan", "italic"),
    "bonus": ("bold", "bold"),
}


def source_styles(console: Console) -> dict[str, str]:
    """The styles of tokens by who wrote them; the target's own have none."""
    number = 0 if console.color_system and not console.no_color else 1
    return {source: styles[number] for source, styles in _SOURCE_STYLES.items()}


class Plain:
    """As it comes; harmless if a terminal shows it, otherwise byte for byte."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ended = True

    def push(self, text: str, source: str) -> None:
        """Write the next piece, by one of :data:`ggufspec.settings.registry.DRAFTERS`, ``target`` or ``bonus``."""
        if text:
            self._write(text, source)
            self._ended = text.endswith("\n")

    def finish(self) -> None:
        if not self._ended:
            self.push("\n", "target")

    def _write(self, text: str, source: str) -> None:  # noqa: ARG002 - for Tinted
        file = self._console.file
        file.write(visible(text) if self._console.is_terminal else text)
        file.flush()


class Tinted(Plain):
    """As it comes, coloured by who wrote it."""

    def _write(self, text: str, source: str) -> None:
        style = source_styles(self._console).get(source, "none")
        self._console.print(Text(visible(text), style), end="", soft_wrap=True)


class Rendered(Live):
    """Markdown: finished blocks are printed, the one that is being written is shown below them as it grows.

    Of a block that is higher than the terminal its end is shown until all of it is printed.
    """

    def __init__(self, console: Console) -> None:
        self._block = ""  # that is being written
        self._printed = False  # whether there is one above it
        super().__init__(console=console, refresh_per_second=10, transient=True)
        self.start()

    def push(self, text: str, source: str) -> None:  # noqa: ARG002 - for Tinted
        """Add it; the screen follows within a tenth of a second."""
        self._block += visible(text)
        if "\n" in text:
            self._print(*markdown.split(self._block))

    def finish(self) -> None:
        try:
            self._print(self._block, "")
        finally:
            self.stop()

    def get_renderable(self) -> Rendered:
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(1, console.height - 2)
        first, *others = self._block.lstrip("\n").rstrip().split("\n")
        if len(others) > height:  # the cost of showing it follows the terminal, not the block
            others = others[-height:]
        yield SegmentLines(self._lines("\n".join([first, *others]), options)[-height:], new_lines=True)

    def _print(self, finished: str, block: str) -> None:
        with self._lock:
            if lines := self._lines(finished, self.console.options):
                self._block, self._printed = block, True
                self.console.print(SegmentLines(lines, new_lines=True))

    def _lines(self, source: str, options: ConsoleOptions) -> list[list[Segment]]:
        """With an empty line before them, if something was printed."""
        width = max(1, self.console.width - 1)
        lines = markdown.rendered(source, self.console, options.update(width=width))
        return [[], *lines] if self._printed and lines else lines


def stream(console: Console, *, as_markdown: bool, tint: bool) -> Plain | Rendered:
    """Where an answer goes: coloured before rendered, and plain if the terminal is not able to.

    ``console`` is standard output's, with :data:`ggufspec.chat.markdown.THEME`.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        if tint:
            return Tinted(console)
        if as_markdown and console.width >= NARROW:
            return Rendered(console)
    return Plain(console)
