"""Markdown: what is final stays as it is, and no letter is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from ggufspec.chat import markdown
from ggufspec.chat.markdown import rendered, split_blocks
from ggufspec.schema.text import visible
from tests.support.properties import examples

PIECES = (
    "# Title ",
    "words in a row ",
    "\n",
    "\n\n",
    "- item ",
    "  - nested ",
    "1. first ",
    "10. tenth ",
    "```python\n",
    "```\n",
    "~~~ \n",
    "    indented code\n",
    "def f(x):\n    return x\n",
    "| a | b |\n",
    "|---|:-:|\n",
    "| one | two | three |\n",
    "> quoted ",
    "**bold** ",
    "*",
    "_",
    "`code` ",
    "``",
    "<think>",
    "<b>html</b> ",
    "&amp; &#27; ",
    "![alt](http://e.x/i.png) ",
    "[text](http://e.x 'title') ",
    "[ref]: http://e.x\n",
    "<http://e.x> ",
    "***\n",
    "---\n",
    "\t",
    "\\",
    "  \n",
    "\x1b[31m",
    "漢字 ",
    "Donaudampfschifffahrtsgesellschaft",
    "{}[]()",
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text("ab \n*_`#->|.1[]()<&\\", max_size=6), max_size=30).map("".join)


def console(**more: object) -> Console:
    return Console(force_terminal=True, theme=markdown.THEME, highlight=False, **more)


def lines(source: str, width: int = 60) -> list[str]:
    shown = rendered(source, console(), console().options.update(width=width))
    return ["".join(segment.text for segment in line).rstrip() for line in shown]


def letters(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


@examples(300)
@given(TEXTS.map(visible), st.integers(min_value=8, max_value=100))
def test_no_letter_is_lost_and_no_line_is_too_wide(source: str, width: int) -> None:
    final, last = split_blocks(source)
    assert final + last == source
    for part in (source, final, last):
        shown = lines(part, width)
        assert letters("".join(shown)) >= letters(part)
        assert all(cell_len(line) <= width for line in shown)
        assert not any("\n" in line or "\x1b" in line for line in shown)


@examples(300)
@given(TEXTS.map(visible), st.data())
def test_what_is_final_stays(source: str, data: st.DataObject) -> None:
    """However much of a text is there, the blocks that are final then are those of all that is there later."""
    early, _ = split_blocks(source[: data.draw(st.integers(min_value=0, max_value=len(source)))])
    final, last = split_blocks(source)
    assert final.startswith(early)
    rest, end = split_blocks(source[len(early) :])
    assert (early + rest, end) == (final, last) or not source[len(early) :].strip()


def test_blocks() -> None:
    text = "# Head\n\ntext\nmore\n\n- one\n  deep\n- two\n\n"
    assert split_blocks(f"{text}```py\nx\n\ny\n```\nend") == (text, "```py\nx\n\ny\n```\nend")
    assert split_blocks("```py\nx\n\ny\n```\nend\n") == ("```py\nx\n\ny\n```\n", "end\n")


def test_a_line_that_has_just_begun_decides_nothing() -> None:
    assert split_blocks("text\n#") == ("", "text\n#")
    assert split_blocks("text\n#hash\n")[0] == ""
    assert split_blocks("text\n# head\n") == ("text\n", "# head\n")
    assert split_blocks("") == ("", "")
    assert split_blocks("\n \n") == ("", "\n \n")


def test_code_shows_its_fences_and_its_indent() -> None:
    assert lines("```python\ndef f():\n\treturn 1\n```\n") == ["```python", "def f():", "    return 1", "```"]
    assert lines("```\nopen") == ["```", "open"]
    assert lines("```py\na\n\nb\n") == ["```py", "a", "", "b"]
    assert lines("text\n\n    indented\n") == ["text", "", "    indented"]
    assert lines("- item\n  ```\n  x\n  ```\n")[-2:] == ["   x", "   ```"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("<think>why</think>", "<think>why</think>"),
        ("a &amp; b &#27;", "a &amp; b &#27;"),
        ("![alt](u.png)", "!alt (u.png)"),
        ("[text](u)", "text (u)"),
        ("[text](u 'title')", "[text](u 'title')"),
        ("[ref]: http://e.x", "[ref]: http://e.x"),
        ("<http://e.x>", "<http://e.x>"),
        ("**bold** and `code` and snake_case", "bold and code and snake_case"),
        ("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n", "| 1 | 2 | 3 |"),
        ("01. item", "01. item"),
    ],
)
def test_what_markdown_would_swallow_stays(source: str, shown: str) -> None:
    assert shown in "\n".join(lines(source))


def test_line_ends_are_the_models_own() -> None:
    assert lines("roses\nviolets\n") == ["roses", "violets"]


def test_a_table_that_is_too_narrow_is_shown_as_its_source() -> None:
    source = "| kilometres | Donaudampfschifffahrt |\n|---|---|\n| 1 | 2 |\n"
    assert "│" not in "".join(lines(source, 60))
    assert "|---|---|" in "".join(lines(source, 14))
    assert "|---|" not in "".join(lines(source, 60))
