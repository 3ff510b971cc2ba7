"""Rendering of Markdown with rich on a terminal, without ever losing text.

HTML, entities, images and link definitions stay as typed. If rendering would still lose a letter or digit, as for a
table in a narrow terminal, the source is shown. Texts must have passed :func:`ggufspec.schema.text.visible`.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

THEME = Theme(  # uses the terminal's own colours and background
    {
        "markdown.code": "cyan",
        "markdown.code_block": "cyan",
        "markdown.h2": "bold magenta",
        "markdown.h6": "italic",
        "markdown.link_url": "underline",
    }
)
_TAB = 4


@functools.cache
def _parser(*disabled: str) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return parser.disable(["reference", "image", "autolink", "entity", *disabled])


def split_blocks(source: str) -> tuple[str, str]:
    """Split a growing text into (blocks that no later text can change, the last block, which may still grow).

    An incomplete line is not considered, because its next letter may change its meaning.
    """
    complete = source[: source.rfind("\n") + 1]
    starts = [token.map[0] for token in _parser("inline").parse(complete) if token.level == 0 and token.map]
    if not starts:
        return "", source
    lines = source.split("\n")
    return "".join(f"{line}\n" for line in lines[: starts[-1]]), "\n".join(lines[starts[-1] :])


def rendered(source: str, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
    """Render Markdown as lines of at most ``options.max_width`` cells, without leading and trailing blank lines."""
    lines = console.render_lines(_Faithful(source), options, pad=False)
    if _letters(source) - _letters("".join(segment.text for line in lines for segment in line)):
        lines = console.render_lines(Text(source.expandtabs(_TAB), overflow="fold"), options, pad=False)
    shown = [bool("".join(segment.text for segment in line).strip()) for line in lines]
    return lines[shown.index(True) : len(shown) - shown[::-1].index(True)] if any(shown) else []


def _letters(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


class _Code(CodeBlock):
    """Code block with its fences, in the terminal's own colours; indented code stays indented."""

    opening = closing = ""
    indent = "    "

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:  # noqa: ARG003 - rich's signature
        code = cls(token.info.partition(" ")[0] or "text", "ansi_dark")
        if token.type == "fence" and token.map:
            code.indent, code.opening = "", token.markup + token.info
            begin, end = token.map
            is_closed = end - begin == len(token.content.splitlines()) + 2  # markdown_it/rules_block/fence.py
            code.closing = token.markup if is_closed else ""
        return code

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.opening:
            yield Text(self.opening, style="dim", overflow="fold")
        if code := str(self.text).removesuffix("\n"):
            code = "".join(self.indent + line for line in code.splitlines(keepends=True))
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")
        if self.closing:
            yield Text(self.closing, style="dim")


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {f"h{level}": "default" for level in range(1, 7)}


class _Faithful(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
    }

    def __init__(self, source: str) -> None:
        super().__init__("", justify="default", hyperlinks=False)
        self.parsed = _parser().parse(source)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":  # keep the model's line breaks
                    child.type = "hardbreak"
