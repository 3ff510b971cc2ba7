"""What a terminal would obey is shown instead."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.schema.text import visible

ANYTHING = st.text(st.characters(exclude_categories=()) | st.sampled_from("\x1b\x9b\x07\r\x08\u202e\n\t[31m]0;"))


@given(ANYTHING)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", shown)
    assert not any(unicodedata.category(character) == "Cs" for character in shown)
    shown.encode("utf-8")


@given(st.lists(ANYTHING))
def test_it_does_not_matter_where_a_text_is_cut(pieces: list[str]) -> None:
    assert "".join(map(visible, pieces)) == visible("".join(pieces))


@given(ANYTHING)
def test_harmless_characters_stay_and_the_rest_is_replaced_once(text: str) -> None:
    assert visible(visible(text)) == visible(text)
    harmless = "".join(character for character in text if visible(character) == character)
    assert visible(harmless) == harmless


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x9b31m", "<U+009B>31m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("over\rwritten\x08", "over␍written␈"),
        ("\x7f\x00", "␡␀"),
        ("ab\u202ecd\u2066", "ab<U+202E>cd<U+2066>"),
        ("one\u2028two\x85", "one<U+2028>two<U+0085>"),
        ("\ud83d", "\ufffd"),
        ("👩‍💻 żółć 字 שלום", "👩‍💻 żółć 字 שלום"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert visible(text) == shown
