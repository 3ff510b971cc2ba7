"""An answer on a terminal while it is written, judged by what the terminal shows."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from rich.console import Console
from screens import Terminal
from test_markdown import TEXTS, letters

from ggufspec.chat import markdown
from ggufspec.chat.stream import Live, Painting, Plain, Rounds, Tinted, Window, size, stream
from ggufspec.display import visible


def console(**more: object) -> Console:
    return Console(force_terminal=True, color_system="standard", theme=markdown.THEME, highlight=False, **more)


def painting(terminal: Terminal) -> Painting:
    return Painting(terminal.write, console(), terminal.size)


def painted(text: str, terminal: Terminal, cuts: int = 1) -> str:
    painter = painting(terminal)
    for start in range(0, len(text), cuts):
        painter.add(text[start : start + cuts])
        painter.paint()
    painter.paint(final=True)
    return terminal.text


@examples(150)
@given(TEXTS, st.lists(st.integers(min_value=1, max_value=40), min_size=1), st.integers(20, 60), st.integers(4, 12))
def test_every_letter_is_on_the_screen_once_at_any_time(text: str, cuts: list[int], columns: int, rows: int) -> None:
    terminal = Terminal(columns, rows)
    painter = painting(terminal)
    at, number = 0, 0
    while at < len(text):
        end = at + cuts[number % len(cuts)]
        painter.add(text[at:end])
        painter.paint()
        at, number = end, number + 1
        seen, said = letters(terminal.text), letters(visible(text[:at]))
        assert seen <= said, "something is there twice"
        if painter._raw is None:  # as source, a line that may begin another block waits for its end
            assert seen == said
    painter.paint(final=True)
    assert letters(terminal.text) == letters(visible(text))


def test_markdown_is_rendered_and_painted_over() -> None:
    text = "# Head\n\nSome **bold** text\n\n- one\n- two\n\n```python\nx = 1\n```\n"
    assert painted(text, Terminal()) == "Head\n\nSome bold text\n\n • one\n • two\n\n```python\nx = 1\n```"


def test_only_lines_that_change_are_written_again() -> None:
    written: list[str] = []
    window = Window(written.append, lambda: (80, 24))
    window.update([], [("one", 3), ("two", 3)])
    window.update([], [("one", 3), ("two more", 8)])
    assert written[1] == "\x1b[1A\r\x1b[Jtwo more\n"
    window.update([], [("one", 3), ("two more", 8)])
    assert len(written) == 2
    window.update([("one", 3), ("two more", 8)], [("three", 5)])
    assert written[2] == "three\n"


def test_a_narrower_terminal_loses_nothing() -> None:
    terminal = Terminal(60, 20)
    painter = painting(terminal)
    painter.add("these are words that fill more than half of a line of the terminal")
    painter.paint()
    terminal.resize(30, 20)
    painter.add(" and then some")
    painter.paint(final=True)
    shown = " ".join(terminal.text.split())
    assert "these are words that fill" in shown
    assert shown.endswith("of the terminal and then some")


def test_a_wider_terminal_is_painted_in_place() -> None:
    terminal = Terminal(30, 20)
    painter = painting(terminal)
    painter.add("these are words that fill more than one line of this")
    painter.paint()
    terminal.resize(60, 20)
    painter.add(" terminal")
    painter.paint(final=True)
    assert terminal.text == "these are words that fill more than one line of this\nterminal"


def test_a_low_terminal_loses_nothing() -> None:
    terminal = Terminal(40, 20)
    painter = painting(terminal)
    painter.add("".join(f"line{number}\n" for number in range(15)))
    painter.paint()
    terminal.resize(40, 5)
    painter.add("last")
    painter.paint(final=True)
    assert all(f"line{number}" in terminal.text for number in range(15))
    assert terminal.text.endswith("last")


def test_long_code_is_printed_line_by_line() -> None:
    text = "```python\n" + "".join(f"value{number} = {number}\n" for number in range(100)) + "```\n\ndone\n"
    shown = painted(text, Terminal(40, 10), cuts=7).splitlines()
    assert shown == [*text.splitlines()[:-2], "", "done"]


def test_a_long_paragraph_goes_on_as_its_source() -> None:
    text = " ".join(f"**word{number}**" for number in range(200)) + "\n\nand *more*\n"
    shown = painted(text, Terminal(40, 10), cuts=5)
    assert "**word199**" in shown.replace("\n", "")
    assert shown.endswith("\n\nand more")


def test_a_long_line_of_code_goes_on_as_its_source() -> None:
    text = "```\n" + "x" * 1000 + "\nshort\n```\n\nend\n"
    shown = painted(text, Terminal(40, 10), cuts=9)
    assert shown.replace("\n", "").count("x") == 1000
    assert shown.endswith("short\n```\n\nend")


def test_a_heading_on_a_terminal_of_four_lines() -> None:
    assert painted("# Title\ndef f(x):\n    return x\n", Terminal(20, 4)).endswith("def f(x):\n    return x")


def test_control_characters_do_nothing_even_when_cut() -> None:
    shown = painted("safe \x1b[2J\x1b[H \x07 text\r overwritten \x9b1A", Terminal(60, 10), cuts=1)
    assert shown == "safe ␛[2J␛[H ␇ text␍ overwritten <U+009B>1A"


def test_the_thread_paints_all_of_it() -> None:
    terminal, text = Terminal(40, 10), "one **two** three\n\n- four\n" * 20
    before = threading.active_count()
    live = Live(terminal.write, console(), terminal.size)
    for letter in text:
        live.push(letter, "target")
    live.finish()
    assert letters(terminal.text) == letters(text)
    assert threading.active_count() <= before


def test_what_the_terminal_raises_is_raised() -> None:
    gone = threading.Event()

    def write(_: str) -> None:
        gone.set()
        raise BrokenPipeError

    live = Live(write, console(), lambda: (40, 10))
    live.push("text", "target")
    assert gone.wait(60)
    with pytest.raises(BrokenPipeError):
        live.finish()
    with pytest.raises(BrokenPipeError):
        live.push("more", "target")


def test_plain_text_is_harmless_on_a_terminal_and_as_it_is_elsewhere() -> None:
    for terminal, expected in ((True, "a␛[1mb\n"), (False, "a\x1b[1mb\n")):
        written: list[str] = []
        plain = Plain(written.append, terminal=terminal)
        plain.push("a\x1b", "target")
        plain.push("", "target")
        plain.push("[1mb", "draft")
        plain.finish()
        plain.finish()
        assert "".join(written) == expected


def test_tinted_by_who_wrote_it() -> None:
    written: list[str] = []
    tinted = Tinted(written.append, console())
    for text, source in (("t", "target"), ("d", "draft"), ("l", "lookup"), ("b\x1b", "bonus")):
        tinted.push(text, source)
    tinted.finish()
    assert "".join(written) == "t\x1b[32md\x1b[0m\x1b[36ml\x1b[0m\x1b[1mb␛\x1b[0m\n"
    written.clear()
    Tinted(written.append, console(no_color=True)).push("d", "draft")
    assert written == ["\x1b[4md\x1b[0m"]


def test_rounds_come_before_their_answer() -> None:
    said: list[str] = []
    rounds = Rounds(lambda: Plain(said.append, terminal=True), lambda told: said.append(f"<{told['number']}>"))
    rounds.round({"number": 1})
    rounds.push("one ", "target")
    rounds.round({"number": 2})
    rounds.push("two", "draft")
    rounds.finish()
    assert said == ["<1>", "<2>", "one ", "two", "\n"]


def test_where_an_answer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide, dumb = console(), Console(force_terminal=True, _environ={"TERM": "dumb"}, theme=markdown.THEME)
    narrow = console(width=15, height=10)
    assert isinstance(stream(wide, terminal=True, as_markdown=True, tint=True), Tinted)
    live = stream(wide, terminal=True, as_markdown=True, tint=False)
    assert isinstance(live, Live)
    live.finish()
    for given_console, terminal, as_markdown, tint in (
        (wide, True, False, False),
        (wide, False, True, True),
        (dumb, True, True, True),
        (narrow, True, True, False),
    ):
        assert type(stream(given_console, terminal=terminal, as_markdown=as_markdown, tint=tint)) is Plain
    assert size(narrow)[0] <= 15
