"""Text as it comes: characters over token borders, stop strings over token borders."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ggufspec.decoding.text import TextStream
from tests.support.properties import examples


def reported(pieces, stop=()):
    """(the texts of the pieces, then of the end; whether it stopped before the end)."""
    stream = TextStream(stop)
    texts = [stream.push(piece) for piece in pieces]
    stopped = stream.stopped
    return [*texts, stream.finish()], stopped


def by_hand(text, stop):
    """What is left of a text that is said character by character: a stop string ends it as soon as it is complete."""
    for end in range(1, len(text) + 1):
        complete = [end - len(one) for one in stop if text[:end].endswith(one)]
        if complete:
            return text[: min(complete)]
    return text


@pytest.mark.parametrize("text", ["é", "€", "𝄞", "aé€𝄞z", "e\u0301", "👩‍👧"])
def test_characters_split_at_every_cut(text):
    data = text.encode()
    for cut in range(len(data) + 1):
        (first, second, rest), stopped = reported([data[:cut], data[cut:]])
        assert first + second == text
        assert first == data[:cut].decode("utf-8", "ignore")  # whole characters come at once
        assert (rest, stopped) == ("", False)


def test_a_character_in_single_bytes_comes_with_its_last():
    assert reported([bytes([byte]) for byte in "€x".encode()])[0] == ["", "", "€", "x", ""]


def test_an_empty_piece_says_nothing():
    assert reported([b"", b"a", b""], ["ab"])[0] == ["", "", "", "a"]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ([b"a\xffb"], ["a\ufffdb", ""]),
        ([b"\xe2", b"(", b"x"], ["", "\ufffd(", "x", ""]),  # the second byte is no continuation
        ([b"\xe2\x82"], ["", "\ufffd"]),  # cut short by the end
        ([b"\xed\xa0\x80"], ["\ufffd\ufffd\ufffd", ""]),  # a surrogate is no character
        ([b"\x80", b"\xc3", b"\xa9"], ["\ufffd", "", "é", ""]),
    ],
)
def test_bytes_that_are_no_text(data, texts):
    assert reported(data)[0] == texts


@pytest.mark.parametrize("stop", ["END", "é!", "\n\n", "x"])
def test_a_stop_string_split_at_every_cut(stop):
    data = f"before{stop}after".encode()
    for cut in range(len(data) + 1):
        texts, stopped = reported([data[:cut], data[cut:]], [stop])
        assert "".join(texts) == "before"
        assert stopped


def test_what_may_become_a_stop_string_is_held_back():
    assert reported([b"aE", b"N", b"x", b"EN"], ["END"]) == (["a", "", "ENx", "", "EN"], False)


def test_nothing_is_held_back_without_need():
    assert reported([b"abc", b"xyz"], ["cd", "zz"])[0] == ["ab", "cxy", "z"]


def test_nothing_follows_a_stop_string():
    stream = TextStream(["END"])
    assert stream.push(b"aENDb") == "a"
    assert stream.stopped
    assert [stream.push(b"c"), stream.push(b"END"), stream.finish()] == ["", "", ""]


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("aaab", ["aab"], "a"),  # the match begins inside a failed one
        ("ababac", ["abac"], "ab"),
        ("aaaa", ["aa"], ""),
        ("xabcd", ["abcd", "bc"], "xa"),  # the one that is complete first, though it begins later
        ("xabc", ["bc", "abc"], "x"),  # both complete at once
        ("xabc", ["ab", "abc"], "x"),  # one is a prefix of the other
        ("xabc", ["abc", "ab"], "x"),
        ("xabd", ["abc", "abd"], "x"),
        ("xab", ["abc", "abd"], "xab"),
        ("abc", ["abc"], ""),
        ("abc", [], "abc"),
    ],
)
def test_overlapping_and_several_stop_strings_at_every_cut(text, stop, left):
    assert by_hand(text, stop) == left
    for one in range(len(text) + 1):
        for other in range(one, len(text) + 1):
            pieces = [text[:one].encode(), text[one:other].encode(), text[other:].encode()]
            texts, stopped = reported(pieces, stop)
            assert ("".join(texts), stopped) == (left, left != text)


def test_a_replacement_character_at_the_end_may_complete_a_stop_string():
    stream = TextStream(["a\ufffd"])
    assert [stream.push(b"xa\xc3"), stream.finish()] == ["x", ""]
    assert stream.stopped


words = st.text("abé", min_size=1, max_size=4)
stops = st.lists(words, max_size=3)
cuts = st.lists(st.integers(0, 40), max_size=6)


def cut_up(data, places):
    borders = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


@examples(500)
@given(st.text("abéc", max_size=20), stops, cuts)
@example("abc", ["abc", "b"], [2])
def test_any_split_of_a_text_gives_the_same_text(text, stop, places):
    texts, stopped = reported(cut_up(text.encode(), places), stop)
    assert "".join(texts) == by_hand(text, stop)
    assert stopped == any(one in text for one in stop)


@examples(500)
@given(st.lists(st.sampled_from([*"aé€𝄞".encode(), 0xFF, 0xED, 0xA0]), max_size=20).map(bytes), stops, cuts)
def test_any_split_of_any_bytes_gives_the_same_text(data, stop, places):
    whole, split = reported([data], stop), reported(cut_up(data, places), stop)
    assert ("".join(split[0]), split[1]) == ("".join(whole[0]), whole[1])
    assert "".join(whole[0]) == by_hand(data.decode("utf-8", "replace"), stop)
