"""Output of an answer while it is written: as Markdown, coloured by who wrote each token, or plain."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from ggufspec.chat import markdown
from ggufspec.schema.text import visible
from ggufspec.settings.registry import DRAFTERS

NARROW = 20  # columns below which Markdown is not rendered
_SOURCE_STYLES = {  # (style with colours, style without)
    "draft": ("green", "underline"),
    **{name: ("magenta", "underline italic") for name, row in DRAFTERS.items() if row.is_head},
    "lookup": ("cyan", "italic"),
    "bonus": ("bold", "bold"),
}


def source_styles(console: Console) -> dict[str, str]:
    """Return the styles of tokens by who wrote them; the target's own have none."""
    number = 0 if console.color_system and not console.no_color else 1
    return {source: styles[number] for source, styles in _SOURCE_STYLES.items()}


class Plain:
    """Output as it arrives: on a terminal with control characters shown, otherwise byte for byte."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ended = True

    def push(self, text: str, source: str) -> None:
        """Write the next piece; ``source`` is one of ``DRAFTERS``, ``target`` or ``bonus``."""
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
    """Output as it arrives, coloured by who wrote each token."""

    def _write(self, text: str, source: str) -> None:
        style = source_styles(self._console).get(source, "none")
        self._console.print(Text(visible(text), style), end="", soft_wrap=True)


class Rendered(Live):
    """Markdown output: finished blocks are printed, the unfinished one is shown below them as it grows.

    Of an unfinished block taller than the terminal, only the end is shown.
    """

    def __init__(self, console: Console) -> None:
        self._block = ""  # the unfinished one
        self._printed = False  # True if there is a block above it
        super().__init__(console=console, refresh_per_second=10, transient=True)
        self.start()

    def push(self, text: str, source: str) -> None:  # noqa: ARG002 - for Tinted
        """Add text, which the screen shows within a tenth of a second."""
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
        if len(others) > height:  # makes the cost of rendering independent of the block's length
            others = others[-height:]
        yield SegmentLines(self._lines("\n".join([first, *others]), options)[-height:], new_lines=True)

    def _print(self, finished: str, block: str) -> None:
        with self._lock:
            if lines := self._lines(finished, self.console.options):
                self._block, self._printed = block, True
                self.console.print(SegmentLines(lines, new_lines=True))

    def _lines(self, source: str, options: ConsoleOptions) -> list[list[Segment]]:
        """Return rendered lines, after an empty one if something was printed before."""
        width = max(1, self.console.width - 1)
        lines = markdown.rendered(source, self.console, options.update(width=width))
        return [[], *lines] if self._printed and lines else lines


def stream(console: Console, *, as_markdown: bool, tint: bool) -> Plain | Rendered:
    """Return the output of an answer: ``tint`` wins over ``as_markdown``; plain if the terminal cannot show it.

    ``console`` is standard output's, with :data:`ggufspec.chat.markdown.THEME`.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        if tint:
            return Tinted(console)
        if as_markdown and console.width >= NARROW:
            return Rendered(console)
    return Plain(console)
