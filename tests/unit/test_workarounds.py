"""Conversations that a template refuses: each kind is sent in a form that it takes, and others stay as they are."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from test_chat_prompt import CHATML, Pairs, spelled

from ggufspec.errors import ModelError
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.prompting import workarounds
from ggufspec.prompting.prompt import Prompter
from ggufspec.prompting.workarounds import TokenizedMessage

NOW = datetime(2026, 11, 26)
STRICT = (
    '{% for m in messages %}{% if m.role == "system" and not loop.first %}{{ raise_exception("system only first") }}'
    "{% endif %}{% endfor %}"
)
IN_TURN = (
    '{% set ns = namespace(last="") %}{% for m in messages %}{% if m.role == ns.last %}'
    '{{ raise_exception("roles must alternate") }}{% endif %}{% set ns.last = m.role %}{% endfor %}'
)
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.id }}]{{ c.function.name }}{% endfor %}{% endfor %}"
)
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    '{{ raise_exception("id length") }}{% endif %}{% endfor %}{% endfor %}'
)
ONE = (
    "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}"
    '{{ raise_exception("one call at once") }}{% endif %}{% endfor %}'
)


def say(role: str, content: str, **more: object) -> TokenizedMessage:
    return TokenizedMessage(role, content, more=more)


def calling(*ids: str) -> TokenizedMessage:
    calls = [{"id": id_, "type": "function", "function": {"name": f"f{id_[-1]}", "arguments": "{}"}} for id_ in ids]
    return TokenizedMessage("assistant", "", more={"tool_calls": calls})


def prompt(template: str, *messages: TokenizedMessage) -> tuple[str, list[str]]:
    one = Prompter(Pairs(), ChatTemplate(template, NOW))
    return spelled(one.of_messages(messages)[0]), one.notes


TALK = [say("user", "a"), say("assistant", "b"), say("user", "c")]


def test_what_renders_is_not_touched() -> None:
    messages = [say("system", "s"), say("user", "a"), say("user", "b"), say("system", "t"), say("user", "c")]
    text, notes = prompt(CHATML, *messages)
    assert [line for line in text.replace("<|e|>", "").split("\n") if line in "sabtc" and line] == list("sabtc")
    assert notes == []


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([*TALK[:2], say("system", "note"), TALK[2]], "note\n\nc"),
        ([*TALK, say("developer", "note")], "<|s|>user\nnote<|e|>"),
        ([say("system", "s"), say("system", "t"), TALK[0]], "<|s|>system\ns\n\nt<|e|>"),
        ([TALK[0], say("system", "note"), TALK[1], TALK[2]], "<|s|>user\nnote<|e|>\n<|s|>assistant\nb"),
    ],
)
def test_a_system_message_in_the_middle(messages: list[TokenizedMessage], expected: str) -> None:
    """It stays where it was: what is before it is in the cache."""
    text, notes = prompt(STRICT + CHATML, *messages)
    assert expected in text
    assert len(notes) == 1


def test_questions_in_a_row_are_joined() -> None:
    text, notes = prompt(IN_TURN + CHATML, say("system", "s"), say("user", "a"), say("user", "b"))
    assert "<|s|>user\na\n\nb<|e|>" in text
    assert len(notes) == 1


def test_several_calls_go_one_after_another() -> None:
    results = [say("tool", "1", tool_call_id="call_1"), say("tool", "2", tool_call_id="call_2")]
    messages = [TALK[0], calling("call_1", "call_2"), *results, TALK[2]]
    split = workarounds.one_call_each(messages)
    assert [(one.role, [call["id"] for call in one.calls]) for one in split] == [
        ("user", []),
        ("assistant", ["call_1"]),
        ("tool", []),
        ("assistant", ["call_2"]),
        ("tool", []),
        ("user", []),
    ]
    text, notes = prompt(ONE + CALLS + CHATML, *messages)
    assert re.match(r"\[\w{9}\]f1\[\w{9}\]f2<", text)
    assert len(notes) == 1


def test_ids_are_shortened_alike_in_calls_and_results() -> None:
    messages = [TALK[0], calling("call_0123456789abcdef1"), say("tool", "ok", tool_call_id="call_0123456789abcdef1")]
    short = workarounds.short_ids(messages)
    (call,), result = short[1].calls, short[2]
    assert call["id"] == result.more["tool_call_id"]
    assert len(call["id"]) == 9
    assert workarounds.short_ids(short) == short
    text, notes = prompt(NINE + CALLS + CHATML, *messages)
    assert f"[{call['id']}]" in text
    assert notes == []  # nothing that a user would see


def test_what_cannot_be_mended_is_refused_for_its_first_reason() -> None:
    with pytest.raises(ModelError, match="no way"):
        prompt('{{ raise_exception("no way") }}' + CHATML, *TALK)
