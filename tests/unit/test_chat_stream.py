"""An answer on a terminal while it is written, judged by what the terminal shows."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_markdown import TEXTS, letters

from ggufspec.chat import markdown
from ggufspec.chat.stream import PlainOutput, RenderedOutput, TintedOutput, stream
from ggufspec.schema.text import visible
from tests.support.properties import examples
from tests.support.screens import Terminal


class File(io.StringIO):
    """Standard output that a terminal shows."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def write(self, text: str) -> int:
        self._terminal.write(text)
        return super().write(text)


def console(terminal: Terminal | None = None, **more: object) -> Console:
    if terminal is not None:
        columns, rows = terminal.size()
        more |= {"file": File(terminal), "width": columns, "height": rows}
    options = {"force_terminal": True, "color_system": "standard", "file": io.StringIO(), **more}
    return Console(theme=markdown.THEME, highlight=False, **options)


def rendered(text: str, terminal: Terminal, cuts: int = 1) -> str:
    live = RenderedOutput(console(terminal))
    for start in range(0, len(text), cuts):
        live.push(text[start : start + cuts], "target")
        live.refresh()
    live.finish()
    return terminal.text


def plain(to: PlainOutput, *pieces: tuple[str, str]) -> str:
    for text, source in pieces:
        to.push(text, source)
    to.finish()
    return to._console.file.getvalue()


@examples(100)
@given(TEXTS, st.lists(st.integers(min_value=1, max_value=40), min_size=1), st.integers(20, 60), st.integers(4, 12))
def test_every_letter_is_on_the_screen_once(text: str, cuts: list[int], columns: int, rows: int) -> None:
    terminal = Terminal(columns, rows)
    live = RenderedOutput(console(terminal))
    at, number = 0, 0
    while at < len(text):
        end = at + cuts[number % len(cuts)]
        live.push(text[at:end], "target")
        live.refresh()
        at, number = end, number + 1
        seen, said = letters(terminal.text), letters(visible(text[:at]))
        assert seen <= said, "something is there twice"
        if live._block.strip("\n").count("\n") <= rows - 3 and len(terminal.text.splitlines()) < rows - 2:
            assert seen == said
    live.finish()
    assert letters(terminal.text) == letters(visible(text))


def test_markdown_is_rendered_and_painted_over() -> None:
    text = "# Head\n\nSome **bold** text\n\n- one\n- two\n\n```python\nx = 1\n```\n"
    assert rendered(text, Terminal()) == "Head\n\nSome bold text\n\n • one\n • two\n\n```python\nx = 1\n```"


def test_an_answer_is_shown_while_it_comes() -> None:
    terminal = Terminal(40, 10)
    live = RenderedOutput(console(terminal))
    for text, shown in (("Some **bo", "Some **bo"), ("ld**", "Some bold"), ("\n\nmore", "Some bold\n\nmore")):
        live.push(text, "target")
        live.refresh()
        assert terminal.text == shown
    live.finish()
    assert terminal.text == "Some bold\n\nmore"


@pytest.mark.parametrize("size", [(30, 20), (90, 20), (60, 5)])
def test_a_terminal_of_another_size_loses_nothing(size: tuple[int, int]) -> None:
    terminal = Terminal(60, 20)
    screen = console(terminal)
    live = RenderedOutput(screen)
    words = "".join(f"these are words of line {number}\n" for number in range(15))
    live.push(words, "target")
    live.refresh()
    terminal.resize(*size)
    screen.size = size
    live.push("\n\nand then some", "target")
    live.finish()
    shown = " ".join(terminal.text.split())
    assert all(f"of line {number}" in shown for number in range(15))
    assert shown.endswith("and then some")


def test_of_long_code_the_end_is_shown_and_then_all_of_it() -> None:
    code = "```python\n" + "".join(f"value{number} = {number}\n" for number in range(100))
    terminal = Terminal(40, 10)
    live = RenderedOutput(console(terminal))
    live.push(code, "target")
    live.refresh()
    assert terminal.text.splitlines() == [f"value{number} = {number}" for number in range(92, 100)]
    live.push("```\n\ndone\n", "target")
    live.finish()
    assert terminal.text == f"{code}```\n\ndone"


def test_a_long_paragraph_is_rendered_when_it_is_over() -> None:
    text = " ".join(f"**word{number}**" for number in range(200)) + "\n\nand *more*\n"
    shown = rendered(text, Terminal(40, 10), cuts=50)
    assert shown.split() == [*(f"word{number}" for number in range(200)), "and", "more"]


def test_control_characters_do_nothing_even_when_cut() -> None:
    shown = rendered("safe \x1b[2J\x1b[H \x07 text\r overwritten \x9b1A", Terminal(60, 10), cuts=1)
    assert shown == "safe ␛[2J␛[H ␇ text␍ overwritten <U+009B>1A"


def test_without_colours() -> None:
    for more, bold, colour in (
        ({}, True, True),
        ({"no_color": True}, True, False),
        ({"color_system": None}, False, False),
    ):
        terminal = Terminal(40, 10)
        screen = console(terminal, **more)
        live = RenderedOutput(screen)
        live.push("**bold** `code`\n", "target")
        live.finish()
        assert terminal.text == "bold code"
        assert ("\x1b[1m" in screen.file.getvalue(), "36m" in screen.file.getvalue()) == (bold, colour)


def test_what_the_terminal_raises_is_raised() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            if "\n" in text:
                raise OSError("gone")
            return len(text)

    live = RenderedOutput(console(file=Gone()))
    live.push("text", "target")
    with pytest.raises(OSError, match="gone"):
        live.finish()


def test_plain_text_is_harmless_on_a_terminal_and_as_it_is_elsewhere() -> None:
    for terminal, expected in ((True, "a␛[1mb\n"), (False, "a\x1b[1mb\n")):
        to = PlainOutput(console(force_terminal=terminal))
        assert plain(to, ("a\x1b", "target"), ("", "target"), ("[1mb", "draft")) == expected
        to.finish()
        assert to._console.file.getvalue() == expected


def test_tinted_by_who_wrote_it() -> None:
    pieces = (("t", "target"), ("d ", "draft"), ("l", "lookup"), ("b\x1b\n", "bonus"))
    assert plain(TintedOutput(console()), *pieces) == "t\x1b[32md \x1b[0m\x1b[36ml\x1b[0m\x1b[1mb␛\x1b[0m\n"
    assert plain(TintedOutput(console(no_color=True)), ("d", "draft")) == "\x1b[4md\x1b[0m\n"
    assert plain(TintedOutput(console()), ("m", "mtp"), ("e", "eagle3")) == "\x1b[35mm\x1b[0m\x1b[35me\x1b[0m\n"
    assert plain(TintedOutput(console(no_color=True)), ("e", "eagle3")) == "\x1b[3;4me\x1b[0m\n"


def test_where_an_answer_goes() -> None:
    wide, piped, narrow = console(width=80), console(force_terminal=False), console(width=15, height=10)
    dumb = Console(force_terminal=True, _environ={"TERM": "dumb"}, theme=markdown.THEME)
    assert isinstance(stream(wide, as_markdown=True, tint=True), TintedOutput)
    live = stream(wide, as_markdown=True, tint=False)
    assert isinstance(live, RenderedOutput)
    live.finish()
    for screen, as_markdown, tint in (
        (wide, False, False),
        (piped, True, True),
        (dumb, True, True),
        (narrow, True, False),
    ):
        assert type(stream(screen, as_markdown=as_markdown, tint=tint)) is PlainOutput
