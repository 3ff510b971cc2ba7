"""Streaming output of an answer: rendered Markdown, text coloured by the source of each token, or plain text."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from ggufspec.chat import markdown
from ggufspec.schema.text import visible
from ggufspec.settings.registry import DRAFTERS

NARROW = 20  # minimum terminal columns for rendering Markdown
_SOURCE_STYLES = {  # (style with colours, style without colours)
    "draft": ("green", "underline"),
    **{name: ("magenta", "underline italic") for name, row in DRAFTERS.items() if row.is_head},
    "lookup": ("cyan", "italic"),
    "prediction": ("cyan", "italic"),
    "bonus": ("bold", "bold"),
}


def source_styles(console: Console) -> dict[str, str]:
    """Return token styles by source; the target's own tokens have no style."""
    number = 0 if console.color_system and not console.no_color else 1
    return {source: styles[number] for source, styles in _SOURCE_STYLES.items()}


class PlainOutput:
    """Plain streaming output; control characters are made visible on a terminal and left unchanged elsewhere."""

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

    def _write(self, text: str, source: str) -> None:  # noqa: ARG002 - for TintedOutput
        file = self._console.file
        file.write(visible(text) if self._console.is_terminal else text)
        file.flush()


class TintedOutput(PlainOutput):
    """Streaming output coloured by the source of each token."""

    def _write(self, text: str, source: str) -> None:
        style = source_styles(self._console).get(source, "none")
        self._console.print(Text(visible(text), style), end="", soft_wrap=True)


class RenderedOutput(Live):
    """Markdown output: finished blocks are printed, and the unfinished block is shown below them as it grows.

    If an unfinished block is taller than the terminal, only its end is shown.
    """

    def __init__(self, console: Console) -> None:
        self._block = ""  # source of the unfinished block
        self._printed = False  # True once a finished block has been printed
        super().__init__(console=console, refresh_per_second=10, transient=True)
        self.start()

    def push(self, text: str, source: str) -> None:  # noqa: ARG002 - as in TintedOutput
        """Add text, which appears on the screen within a tenth of a second."""
        self._block += visible(text)
        if "\n" in text:
            self._print(*markdown.split_blocks(self._block))

    def finish(self) -> None:
        try:
            self._print(self._block, "")
        finally:
            self.stop()

    def get_renderable(self) -> RenderedOutput:
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(1, console.height - 2)
        first, *others = self._block.lstrip("\n").rstrip().split("\n")
        if len(others) > height:  # keeps the cost of rendering independent of the block's length
            others = others[-height:]
        yield SegmentLines(self._lines("\n".join([first, *others]), options)[-height:], new_lines=True)

    def _print(self, finished: str, block: str) -> None:
        with self._lock:
            if lines := self._lines(finished, self.console.options):
                self._block, self._printed = block, True
                self.console.print(SegmentLines(lines, new_lines=True))

    def _lines(self, source: str, options: ConsoleOptions) -> list[list[Segment]]:
        """Return rendered lines, with an empty line before them if something was already printed."""
        width = max(1, self.console.width - 1)
        lines = markdown.rendered(source, self.console, options.update(width=width))
        return [[], *lines] if self._printed and lines else lines


def stream(console: Console, *, as_markdown: bool, tint: bool) -> PlainOutput | RenderedOutput:
    """Return the requested kind of output, plain if the terminal cannot show it; ``tint`` overrides ``as_markdown``.

    ``console`` writes to standard output and uses :data:`ggufspec.chat.markdown.THEME`.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        if tint:
            return TintedOutput(console)
        if as_markdown and console.width >= NARROW:
            return RenderedOutput(console)
    return PlainOutput(console)
