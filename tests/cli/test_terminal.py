"""Sentences on standard error: lines end between words, and what is copied stays whole."""

from __future__ import annotations

import io
import itertools

import pytest

from ggufspec.cli.terminal import Console

PATH = "/a/folder/with/a/long/name/and/another/one/Meta-Llama-3-70B-Instruct-Q4_K_M-00001-of-00002.gguf"
COMMAND = "ggufspec pull -hf NousResearch/Meta-Llama-3-70B-Instruct-GGUF:Q4_K_M -hfd USER/SMALL:Q8_0 -y"


def said(text: str, *, width: int = 80, terminal: bool = True) -> list[str]:
    file = io.StringIO()
    Console(file=file, stderr=True, width=width, force_terminal=terminal, no_color=True, _environ={}).say(text)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_lines_end_between_words(width: int) -> None:
    text = "the child process that ran llama.cpp was ended by SIGABRT: " + "a word or two " * 20 + "字" * 30
    lines = said(text, width=width)
    assert " ".join(lines) == text.rstrip()
    assert all(len(line) <= width for line in lines)
    assert all(len(f"{line} {after.split()[0]}") > width - 31 for line, after in itertools.pairwise(lines))


def test_what_is_no_terminal_has_one_line() -> None:
    """Standard error, which others read; standard output is a page of so many columns."""
    assert said("word " * 100 + "end", terminal=False) == ["word " * 100 + "end"]
    file = io.StringIO()
    Console(file=file, width=40, force_terminal=False, _environ={}).say(
        "measure it again later: ggufspec plan --calibrate"
    )
    assert file.getvalue() == "measure it again later:\nggufspec plan --calibrate\n"


@pytest.mark.parametrize("whole", [PATH, COMMAND, "pip install --force-reinstall --no-cache-dir " + "x" * 60])
def test_paths_and_commands_stay_whole(whole: str) -> None:
    assert f"{whole};" in said(f"some words before it that take their place, then {whole}; and some words behind it")
    assert whole in said(f"some words before it that take their place, then {whole}")[-1]


def test_what_is_whole_is_never_broken() -> None:
    file = io.StringIO()
    console = Console(file=file, width=40, force_terminal=True, no_color=True, _environ={})
    console.whole("  try: ", 'curl http://127.0.0.1:8080/v1 -d \'{"a long": "body"}\'')
    assert file.getvalue() == '  try: curl http://127.0.0.1:8080/v1 -d \'{"a long": "body"}\'\n'


def test_a_sentence_about_ggufspec_is_no_command() -> None:
    assert (
        max(map(len, said("llama-cpp-python 0.1 is installed, and ggufspec is made for " + "another one " * 9))) <= 80
    )


def test_styles_and_line_ends_stay() -> None:
    assert said("one\n\ntwo") == ["one", "", "two"]
    file = io.StringIO()
    console = Console(file=file, width=20, force_terminal=True, color_system="standard", _environ={})
    console.say(("error: ", "bold"), "a sentence that is longer")
    assert file.getvalue() == "\x1b[1merror: \x1b[0ma sentence\nthat is longer\n"
