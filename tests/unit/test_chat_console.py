"""The line that is typed in a chat, by keys from a pipe."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ggufspec.chat.commands import COMMANDS
from ggufspec.chat.console import UserInput, _Completions, _history

CTRL_C, CTRL_D, ENTER, ALT_ENTER = "\x03", "\x04", "\r", "\x1b\r"


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


def typing(keys: PipeInput, history: Path | None = None) -> UserInput:
    return UserInput(history, lambda: [("demo", False), ("lossy", True)], input=keys, output=DummyOutput())


def typed(keys: PipeInput, text: str, history: Path | None = None) -> str:
    keys.send_text(text)
    return typing(keys, history).read()


@pytest.mark.parametrize(
    ("pressed", "text"),
    [
        (f"hello{ENTER}", "hello"),
        ("hello\n", "hello"),
        (f"one\\{ENTER}two{ENTER}", "one\ntwo"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (paste("one\r\ntwo\rthree\n") + ENTER, "one\ntwo\nthree\n"),
        (paste("one\\") + f"{ENTER}{ENTER}", "one\n"),
        (f"wrong{CTRL_C}right{ENTER}", "right"),
    ],
)
def test_what_keys_say(keys: PipeInput, pressed: str, text: str) -> None:
    assert typed(keys, pressed) == text


@pytest.mark.parametrize("pressed", [CTRL_D, CTRL_C + CTRL_C, f"text{CTRL_C}{CTRL_C}", f"{CTRL_C}x{CTRL_C}{CTRL_C}"])
def test_leaving(keys: PipeInput, pressed: str) -> None:
    with pytest.raises(EOFError):
        typed(keys, pressed)


def test_one_ctrl_c_does_not_leave_later(keys: PipeInput) -> None:
    assert typed(keys, f"{CTRL_C}a{CTRL_C}b{ENTER}") == "b"


def test_history_is_kept_for_its_owner_alone(keys: PipeInput, tmp_path: Path) -> None:
    file = tmp_path / "state" / "chat_history"
    assert typed(keys, f"first{ENTER}", file) == "first"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    assert typed(keys, paste("y" * 1500 + "\nz") + ENTER, file).endswith("\nz")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(_history(file).load_history_strings()) == ["y" * 1500 + "\nz", "first"]


def test_without_a_place_for_the_history_the_chat_goes_on(keys: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert typed(keys, f"hello{ENTER}", tmp_path / "file" / "chat_history") == "hello"


def test_bytes_that_are_no_text(keys: PipeInput, tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    keys.send_bytes(b"a\xff\xfeb\r")
    asked = typing(keys, file)
    assert asked.read().encode("utf-8").startswith(b"a")
    assert file.read_text(encoding="utf-8")


def completions(before: str) -> list[Completion]:
    return list(_Completions().get_completions(Document(before), CompleteEvent(text_inserted=True)))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("/draft-m", ["/draft-max"]),
        ("/s", ["/speculative", "/seed", "/system", "/save", "/settings"]),
        ("/draft-max ", ["max"]),
        ("/draft-max x", []),
        ("/markdown o", ["on", "off"]),
        ("/draft-policy ", ["adaptive", "fixed"]),
        ("/drafter l", ["lookup"]),
        ("/drafter lookup ", []),
        ("/drafter lookup x", []),
        ("/accept t", ["top-k:", "typical:"]),
        ("/help draft-m", ["draft-max"]),
        ("/help /draft-m", ["draft-max"]),
        ("hello /dr", []),
        ("//dr", []),
        ("/nothing ", []),
        ("/draft\n", []),
        ("", []),
    ],
)
def test_commands_and_their_arguments_are_offered(before: str, words: list[str]) -> None:
    assert [one.text for one in completions(before)] == words


def test_all_commands_are_offered_and_files_if_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found.json").write_text("")
    monkeypatch.chdir(tmp_path)
    assert [one.text for one in completions("/")] == [f"/{name}" for name in COMMANDS]
    assert completions("/")[0].display_meta_text == "draft and target together"
    assert [one.text for one in completions("/save fo")] == ["und.json"]
    for before in ("/save", "/top-k fo", "save fo"):
        assert "und.json" not in [one.text for one in completions(before)]


@pytest.mark.parametrize(
    ("before", "whole"),
    [
        ("/draft-m", "/draft-max"),
        ("/drafter loo", "/drafter lookup"),
        ("/save sa", "/save said.json"),
        ("/load ./sa", "/load ./said.json"),
    ],
)
def test_completion(before: str, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said.json").write_text("")
    monkeypatch.chdir(tmp_path)
    found = completions(before)[0]
    assert before[: len(before) + found.start_position] + found.text == whole


def test_a_toolbar_marks_warnings(keys: PipeInput) -> None:
    asked = UserInput(None, lambda: [("demo", False), ("top-k:3 (lossy)", True)], input=keys, output=DummyOutput())
    assert asked._bottom() == [
        ("class:bottom-toolbar", "demo"),
        ("class:bottom-toolbar", " · "),
        ("class:bottom-toolbar.lossy", "top-k:3 (lossy)"),
    ]


def test_a_toolbar_is_as_wide_as_the_terminal_in_whole_words(keys: PipeInput) -> None:
    words = [("a" * 30, False), ("b" * 40, True), ("seven", False)]  # 76 columns, and eight more
    asked = UserInput(None, lambda: words, input=keys, output=DummyOutput())  # of 80 columns
    assert [text for _, text in asked._bottom()] == ["a" * 30, " · ", "b" * 40]
    wide = UserInput(None, lambda: [("a" * 100, False), ("b", False)], input=keys, output=DummyOutput())
    assert [text for _, text in wide._bottom()] == ["a" * 100], "the name stays, whatever there is room for"
