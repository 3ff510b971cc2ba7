"""Conversations: what is said, what fits, and what a file keeps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.prompting.conversation import (
    SCHEMA,
    Conversation,
    Turn,
    chat_document,
    fit_context,
    load_conversation,
    reserved_tokens,
    save_conversation,
)
from ggufspec.prompting.workarounds import TokenizedMessage

TWO = Conversation("Be brief.", (Turn("one", "1", tokens=(7, 8)), Turn("two", "2", stopped=True)))


def words(conversation: Conversation) -> int:
    """A prompt of a token for each word."""
    return sum(len(message.content.split()) for message in conversation.messages())


def test_questions_and_answers() -> None:
    asked = Conversation("Be brief.").ask("one")
    assert asked.open
    assert asked.answered == ()
    answered = asked.reply("1", (7, 8))
    assert not answered.open
    assert answered.ask("two").reply("2", stopped=True) == TWO
    assert [(message.role, message.content) for message in TWO.messages()] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
        ("assistant", "2"),
    ]
    assert TWO.undo() == answered
    assert TWO.clear() == Conversation("Be brief.")


def test_a_question_that_was_never_answered_is_replaced() -> None:
    assert TWO.ask("three").ask("four").turns == (*TWO.turns, Turn("four"))
    assert TWO.ask("three").answered == TWO.turns


def test_an_answer_needs_a_question() -> None:
    with pytest.raises(ValueError, match="no question"):
        TWO.reply("3")


def test_an_empty_answer_is_an_answer() -> None:
    stopped = Conversation().ask("one").reply("", stopped=True)
    assert not stopped.open
    assert stopped.messages()[-1] == TokenizedMessage("assistant", "")


# ---- what fits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ctx_size", "max_tokens", "reserved"),
    [(2048, 128, 128), (2048, 1_000_000, 512), (2048, 512, 512), (3, 5, 1), (8, 0, 1)],
)
def test_what_is_reserved_for_an_answer(ctx_size: int, max_tokens: int, reserved: int) -> None:
    assert reserved_tokens(ctx_size, max_tokens) == reserved


def test_what_fits_stays_whole() -> None:
    asked = TWO.ask("three")
    fitted = fit_context(asked, words, ctx_size=9, max_tokens=2)  # 7 words and 2
    assert fitted == asked


def test_the_oldest_turns_go_and_the_system_prompt_stays() -> None:
    fitted = fit_context(TWO.ask("three"), words, ctx_size=8, max_tokens=2)
    assert fitted == Conversation("Be brief.", (TWO.turns[1], Turn("three")))


def test_a_message_that_cannot_fit_is_named() -> None:
    asked = TWO.ask("word " * 3000)
    with pytest.raises(UsageError) as refused:
        fit_context(asked, words, ctx_size=2048, max_tokens=512)
    assert refused.value.message == (
        "the message with the system prompt has 3,002 tokens; the context holds 2,048, 512 of them for the answer"
    )
    assert refused.value.hint == "-c 3584 would hold it"
    assert fit_context(asked, words, ctx_size=3584, max_tokens=512) == asked


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12),
    st.integers(0, 40),
    st.integers(4, 120),
    st.integers(1, 60),
)
def test_no_turn_is_dropped_without_need(
    lengths: list[tuple[int, int]], last: int, ctx_size: int, max_tokens: int
) -> None:
    turns = tuple(Turn("u " * user, "a " * answer) for user, answer in lengths)
    asked = Conversation("s s s", turns).ask("u " * last)
    most = ctx_size - reserved_tokens(ctx_size, max_tokens)
    if 3 + last > most:
        with pytest.raises(UsageError, match=f" has {3 + last} tokens"):
            fit_context(asked, words, ctx_size, max_tokens)
        return
    fitted = fit_context(asked, words, ctx_size, max_tokens)
    assert words(fitted) <= most
    dropped = len(asked.turns) - len(fitted.turns)
    assert fitted == asked.without(dropped)
    if dropped:
        assert words(asked.without(dropped - 1)) > most


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(4, 5000))
def test_the_context_of_the_hint_holds_it(tokens: int, max_tokens: int, ctx_size: int) -> None:
    asked = Conversation().ask("u " * tokens)
    try:
        fit_context(asked, words, ctx_size, max_tokens)
    except UsageError as refused:
        larger = int(refused.hint.split()[1])
        assert larger > ctx_size
        assert fit_context(asked, words, larger, max_tokens) == asked


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_file_keeps_what_was_said(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    save_conversation(path, chat_document(TWO, {"name": "demo"}, {"temperature": 0.5}))
    body = json.loads(path.read_text(encoding="utf-8"))
    assert body["schema"] == SCHEMA == "ggufspec/chat@1"
    assert (body["pair"], body["settings"]) == ({"name": "demo"}, {"temperature": 0.5})
    assert load_conversation(path) == Conversation("Be brief.", (Turn("one", "1"), Turn("two", "2", stopped=True)))


@given(st.text(max_size=20), st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20), st.booleans()), max_size=4))
def test_every_text_comes_back(tmp_path_factory: pytest.TempPathFactory, system: str, said: list) -> None:
    path = tmp_path_factory.mktemp("chat") / "chat.json"
    conversation = Conversation(system, tuple(Turn(user, answer, stopped) for user, answer, stopped in said))
    save_conversation(path, chat_document(conversation, {}, {}))
    assert load_conversation(path) == conversation
    save_conversation(path, chat_document(conversation.ask("open"), {}, {}))
    assert load_conversation(path) == conversation.ask("open")


def test_unknown_keys_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    turn = {"user": "one", "answer": "1", "statistics": {"tokens": 1}}
    path.write_text(json.dumps({"schema": SCHEMA, "turns": [turn], "mood": "good"}), encoding="utf-8")
    assert load_conversation(path) == Conversation("", (Turn("one", "1"),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ('{"schema": "ggufspec/chat@1", "tur', r"is not a complete JSON document \(line 1\)"),
        ("[" * 100_000, "is nested more than 64 deep"),
        ("[]", "has no schema"),
        ('{"schema": 1}', "has no schema"),
        ('{"schema": "ggufspec/bench@1"}', "has schema 'ggufspec/bench@1', but a conversation has 'ggufspec/chat@1'"),
        ('{"schema": "ggufspec/chat@2"}', "has schema 'ggufspec/chat@2'"),
        ('{"schema": "ggufspec/chat@1"}', "damaged conversation: turns: "),
        ('{"schema": "ggufspec/chat@1", "turns": {}}', "damaged conversation: turns: "),
        ('{"schema": "ggufspec/chat@1", "turns": [{"user": 1}]}', r"damaged conversation: turns\.0\.user: "),
        ('{"schema": "ggufspec/chat@1", "turns": [{"user": "a"}, {"user": "b"}]}', "turn 1 has no answer"),
        ('{"schema": "ggufspec/chat@1", "turns": [], "system": null}', "damaged conversation: system: "),
        ('{"schema": "ggufspec/chat@1", "turns": [{"user": "\\ud800", "answer": "b"}]}', "half a character"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GgufspecError, match=says) as damaged:
        load_conversation(path)
    assert str(path) in damaged.value.message
    assert damaged.value.hint


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(GgufspecError, match="cannot be read: No such file"):
        load_conversation(tmp_path / "none.json")
    with pytest.raises(GgufspecError, match="cannot be read: Is a directory"):
        load_conversation(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GgufspecError, match="is not UTF-8 text"):
        load_conversation(tmp_path / "binary")
    with pytest.raises(GgufspecError, match="cannot be written"):
        save_conversation(tmp_path / "none" / "chat.json", chat_document(TWO, {}, {}))
