"""Markdown for a terminal, block by block while it is written, so that no letter of it is ever lost.

A block is a paragraph, a heading, a table, a piece of code, or one item of a list. It is final when the next one has
begun. What Markdown would swallow stays as it was typed: HTML, entities, images, definitions of links. A block of which
the rendering would still lose a letter or a digit, a table in a narrow terminal say, is shown as its source.

Texts must be harmless already: :func:`ggufspec.display.visible`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

THEME = Theme(  # of the terminal's own colours, on its own background
    {
        "markdown.code": "cyan",
        "markdown.code_block": "cyan",
        "markdown.h2": "bold magenta",
        "markdown.h6": "italic",
        "markdown.link_url": "underline",
    }
)
_SWALLOWING = ("reference", "image", "autolink", "entity")
_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}
Line = list[Segment]


@dataclass(frozen=True, slots=True)
class Block:
    """A block's source, its line ends included.

    Args:
        source: as the model wrote it.
        kind: ``fence``, ``item`` of a list, or ``other``.
        goes_on: it is the rest of a fence whose first lines were shown before; the line that opens it is there again.
    """

    source: str
    kind: str
    goes_on: bool = False


@functools.cache
def _parser(*leave_out: str) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return parser.disable([*_SWALLOWING, *leave_out])


def split(source: str) -> tuple[list[Block], Block | None]:
    """The blocks that are final whatever comes, and the one that is being written, if there is one.

    A line that is not complete decides nothing: it may become another thing with its next letter.
    """
    complete = source[: source.rfind("\n") + 1]
    starts = list(_starts(_parser("inline").parse(complete)))
    if not starts:
        return [], Block(source, "other") if source.strip() else None
    offsets = [0]
    for line in complete.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    cuts = [0, *(offsets[line] for line, _ in starts[1:]), len(source)]
    blocks = [Block(source[begin:end], kind) for (_, kind), begin, end in zip(starts, cuts[:-1], cuts[1:], strict=True)]
    return blocks[:-1], blocks[-1]


def _starts(tokens: list[Token]) -> Iterator[tuple[int, str]]:
    """(line, kind) of every block."""
    for token in tokens:
        if token.map is None or token.nesting < 0:
            continue
        if token.level == 1 and token.type == "list_item_open":
            yield token.map[0], "item"
        elif token.level == 0 and not token.type.endswith("_list_open"):
            yield token.map[0], "fence" if token.type == "fence" else "other"


def cut_code(block: Block, keep: int) -> tuple[Block, Block] | None:
    """A fence in two: all complete lines of code but the last ``keep``, and the rest; None if it has not so many."""
    opening, *code = block.source.splitlines(keepends=True)
    at = len(code) - (not block.source.endswith("\n")) - keep
    while 0 < at < len(code) and not (code[at - 1].strip() and code[at].strip()):  # empty lines at ends are not shown
        at -= 1
    if not 0 < at < len(code):
        return None
    return (
        Block(opening + "".join(code[:at]), "fence", block.goes_on),
        Block(opening + "".join(code[at:]), "fence", goes_on=True),
    )


def needs_space(before: Block, after: Block) -> bool:
    """Whether an empty line stands between two blocks: not between the items of a tight list, nor within code."""
    if after.goes_on:
        return False
    return before.source.endswith("\n\n") or not (before.kind == after.kind == "item")


def rendered(block: Block, console: Console, width: int) -> list[Line]:
    """A block in lines of ``width`` cells at most, without empty ones around it and spaces behind them.

    Args:
        block: what to show.
        console: for its styles: one with :data:`THEME`.
        width: cells.
    """
    shown = _lines(console, _Faithful(block), width)
    source = block.source.partition("\n")[2] if block.goes_on else block.source
    if _letters(source) - _letters("".join(segment.text for line in shown for segment in line)):
        return as_source(source, console, width)
    return shown


def as_source(source: str, console: Console, width: int) -> list[Line]:
    """A text as it is, folded."""
    return _lines(console, Text(source.expandtabs(4), overflow="fold"), width)


def ansi(line: Line, console: Console) -> str:
    """A line with its styles as the console's terminal takes them."""
    system = _SYSTEMS.get(console.color_system or "")
    return "".join(
        _style(segment.style, console).render(segment.text, color_system=system) if segment.style else segment.text
        for segment in line
    )


def cells(line: Line) -> int:
    """How wide a line is."""
    return sum(segment.cell_length for segment in line)


def _style(style: Style, console: Console) -> Style:
    return style.without_color if console.no_color else style


def _lines(console: Console, renderable: Any, width: int) -> list[Line]:
    options = console.options.update(width=width, height=None)
    lines = [_stripped(line) for line in console.render_lines(renderable, options, pad=False)]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def _stripped(line: Line) -> Line:
    """Without the spaces that rich fills a line with: a terminal that becomes narrower would wrap them."""
    kept = [segment for segment in line if segment.text and not segment.control]
    while kept and not kept[-1].text.strip(" "):
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(" "), kept[-1].style)
    return kept


def _letters(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


class _Code(CodeBlock):
    """Code between its fences, in the terminal's own colours; code that is indented only stays so."""

    fenced = False
    opening = closing = ""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        made = cls((token.info or "").partition(" ")[0] or "text", "ansi_dark")
        if token.type != "fence":
            return made
        made.fenced = True
        goes_on = isinstance(markdown, _Faithful) and markdown.block.goes_on
        made.opening = "" if goes_on else token.markup + token.info
        begin, end = token.map or (0, 0)
        is_closed = end - begin == len(token.content.splitlines()) + 2  # markdown_it/rules_block/fence.py
        made.closing = token.markup if is_closed else ""
        return made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.opening:
            yield Text(self.opening, style="dim", overflow="fold")
        if code := str(self.text).removesuffix("\n"):
            indent = "" if self.fenced else "    "
            code = "".join(indent + line for line in code.splitlines(keepends=True))
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")
        if self.closing:
            yield Text(self.closing, style="dim")


class _Heading(Heading):
    """A heading at the left, as all text is."""

    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}


class _Faithful(Markdown):
    """One block as rich renders it, but for what it would leave out or put elsewhere."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
    }

    def __init__(self, block: Block) -> None:
        super().__init__("", hyperlinks=False)
        self.block = block
        self.parsed = _parser().parse(block.source)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":  # a line's end is the model's own
                    child.type = "hardbreak"
