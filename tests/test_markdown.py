"""Markdown in blocks: what is final stays as it is, and no letter is lost."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from rich.console import Console

from ggufspec.chat import markdown
from ggufspec.chat.markdown import Block, ansi, cells, cut_code, needs_space, rendered, split
from ggufspec.display import visible

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
    done, open_ = split(source)
    return [
        "".join(segment.text for segment in line)
        for block in [*done, *([open_] if open_ else [])]
        for line in rendered(block, console(), width)
    ]


def letters(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


@examples(300)
@given(TEXTS.map(visible), st.integers(min_value=8, max_value=100))
def test_no_letter_is_lost_and_no_line_is_too_wide(source: str, width: int) -> None:
    done, open_ = split(source)
    blocks = [*done, *([open_] if open_ else [])]
    assert "".join(block.source for block in blocks) == source or not source.strip()
    for block in blocks:
        shown = rendered(block, console(), width)
        assert letters("".join(segment.text for line in shown for segment in line)) >= letters(block.source)
        assert all(cells(line) <= width for line in shown)
        assert not any("\n" in segment.text or "\x1b" in segment.text for line in shown for segment in line)


@examples(300)
@given(TEXTS.map(visible), st.data())
def test_what_is_final_stays(source: str, data: st.DataObject) -> None:
    """However much of a text is there, the blocks that are final then are the first ones of all that is there later."""
    cut = data.draw(st.integers(min_value=0, max_value=len(source)))
    early, open_ = split(source[:cut])
    final = []
    rest = source
    for _ in early:
        again, last = split(rest)
        now = again[0] if again else last
        assert now is not None
        final.append(now.source)
        rest = rest[len(now.source) :]
    assert final == [block.source for block in early]
    assert source[:cut].endswith(open_.source if open_ else "")


def test_blocks() -> None:
    done, open_ = split("# Head\n\ntext\nmore\n\n- one\n  deep\n- two\n\n```py\nx\n\ny\n```\nend")
    assert [(block.kind, block.source) for block in done] == [
        ("other", "# Head\n\n"),
        ("other", "text\nmore\n\n"),
        ("item", "- one\n  deep\n"),
        ("item", "- two\n\n"),
    ]
    assert open_ == Block("```py\nx\n\ny\n```\nend", "fence")
    done, open_ = split("```py\nx\n\ny\n```\nend\n")
    assert [block.kind for block in done] == ["fence"]
    assert open_ == Block("end\n", "other")


def test_a_line_that_has_just_begun_decides_nothing() -> None:
    assert split("text\n#") == ([], Block("text\n#", "other"))
    assert split("text\n#hash\n")[0] == []
    assert len(split("text\n# head\n")[0]) == 1
    assert split("") == ([], None)
    assert split("\n \n") == ([], None)


def test_spaces_between_blocks() -> None:
    done, _ = split("- a\n- b\n\n- c\n\ntext\n\n- d\n- e\n")
    assert [needs_space(one, other) for one, other in pairwise(done)] == [
        False,
        True,
        True,
        True,
    ]
    assert not needs_space(Block("```\na\n", "fence"), Block("```\nb\n", "fence", goes_on=True))


def test_code_is_cut_at_lines_with_something_on_them() -> None:
    block = Block("```py\na\nb\n\nc\nd\ne", "fence")
    first, rest = cut_code(block, 2) or (None, None)
    assert first == Block("```py\na\n", "fence")
    assert rest == Block("```py\nb\n\nc\nd\ne", "fence", goes_on=True)
    assert cut_code(Block("```py\nlong line", "fence"), 1) is None
    assert lines("```py\na\n") == ["```py", "a"]
    assert ["".join(segment.text for segment in line) for line in rendered(rest, console(), 20)] == [
        "b",
        "",
        "c",
        "d",
        "e",
    ]


def test_code_shows_its_fences_and_its_indent() -> None:
    assert lines("```python\ndef f():\n\treturn 1\n```\n") == ["```python", "def f():", "    return 1", "```"]
    assert lines("```\nopen") == ["```", "open"]
    assert lines("text\n\n    indented\n") == ["text", "    indented"]
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


def test_colours_are_left_out_where_none_are_wanted() -> None:
    block = Block("**bold** `code`\n", "other")
    (line,) = rendered(block, console(color_system="standard"), 40)
    assert "\x1b[1m" in ansi(line, console(color_system="standard"))
    assert "36m" in ansi(line, console(color_system="standard"))
    assert "36m" not in ansi(line, console(color_system="standard", no_color=True))
    assert ansi(line, console(color_system=None)) == "bold code"


def test_a_table_that_is_too_narrow_is_shown_as_its_source() -> None:
    source = "| kilometres | Donaudampfschifffahrt |\n|---|---|\n| 1 | 2 |\n"
    assert "│" not in "".join(lines(source, 60))
    assert "|---|---|" in "".join(lines(source, 14))
    assert "|---|" not in "".join(lines(source, 60))
