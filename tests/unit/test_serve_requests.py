"""Requests as clients send them: what is absent, off, without limit, spelled otherwise; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import WEATHER
from pydantic import ValidationError

from ggufspec.serve.requests import Chat, Completion

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"size": {"enum": ["s", "l"]}}, "required": ["size"]}


def chat(**more: Any) -> Chat:
    return Chat.model_validate_json(json.dumps({"messages": [USER], **more}))


def completion(**more: Any) -> Completion:
    return Completion.model_validate_json(json.dumps({"prompt": "x", **more}))


def test_null_is_absent_wherever_it_may_stand() -> None:
    nulls = dict.fromkeys(set(Chat.model_fields) - {"messages"})
    assert chat(**nulls).model_dump() == chat().model_dump()
    nested = {"stream_options": {"include_usage": None}, "response_format": {"type": None, "json_schema": None}}
    assert not chat(**nested).stream_options.include_usage
    nulls = dict.fromkeys(set(Completion.model_fields) - {"prompt"})
    assert completion(**nulls).model_dump() == completion().model_dump()
    tool = {"type": None, "function": {"name": "f", "description": None, "parameters": None}}
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    found = Chat.model_validate(
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool]}
    )
    assert found.wishes.tools == ({"type": "function", "function": {"name": "f"}},)


@pytest.mark.parametrize(("given", "name", "expected"), [
    ({"top_k": -1}, "top_k", 0),
    ({"top_p": 0}, "top_k", 1),
    ({"temperature": None}, "temperature", 1.0),
    ({"temperature": "0.5"}, "temperature", 0.5),
])  # fmt: skip
def test_off_in_other_spellings(given: dict[str, Any], name: str, expected: float) -> None:
    assert getattr(chat(**given).sampling(), name) == expected


@pytest.mark.parametrize(
    ("given", "most"), [({}, 0), ({"max_tokens": -1}, 0), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 5}, 5)]
)
def test_no_limit_in_other_spellings(given: dict[str, Any], most: int) -> None:
    assert chat(**given).common["max_tokens"] == most


@pytest.mark.parametrize("body", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_object"}, "json_schema": SCHEMA},
    {"json_schema": SCHEMA},
])  # fmt: skip
def test_a_schema_binds_wherever_it_stands(body: dict[str, Any]) -> None:
    assert json.loads(chat(**body).wishes.json_schema) == SCHEMA
    assert json.loads(completion(**body).schema_text) == SCHEMA


def test_json_without_a_schema_is_any_object() -> None:
    assert json.loads(chat(response_format={"type": "json_object"}).schema_text) == {"type": "object"}
    assert chat(response_format={"type": "text"}).schema_text == ""


def test_stops() -> None:
    assert chat(stop="").stops == ()
    assert chat(stop=["", "a"]).stops == ("a",)
    assert chat(stop="a").stops == ("a",)


@pytest.mark.parametrize(("choice", "must", "function"), [
    ("auto", False, ""),
    ("required", True, ""),
    ("any", True, ""),
    ({"type": "auto"}, False, ""),
    ({"type": "function", "function": {"name": "get_weather"}}, True, "get_weather"),
    ({"type": "function", "name": "get_weather"}, True, "get_weather"),
])  # fmt: skip
def test_choices_of_tools(choice: Any, must: bool, function: str) -> None:
    found = chat(tools=[WEATHER], tool_choice=choice).wishes
    assert (found.must_call, found.function, len(found.tools)) == (must, function, 1)


def test_no_tool_is_offered_where_none_is_wanted() -> None:
    for choice in ("none", {"type": "none"}):
        assert chat(tools=[WEATHER], tool_choice=choice).wishes.tools == ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "{}"),
        (None, "{}"),
        ({"c": "Oslo"}, '{"c": "Oslo"}'),
        ("{}", "{}"),
        (r'{"c": "\ud83d \ud83d\ude00 \\ud83d"}', r'{"c": "\ufffd \ud83d\ude00 \\ud83d"}'),
    ],
)
def test_arguments_of_any_shape(arguments: Any, text: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    (message,) = Chat.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    assert message.plain()["tool_calls"][0]["function"]["arguments"] == text


def test_a_refusal_is_text_and_a_bad_call_stays_sayable() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{bad"}}
    message = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": [call]}
    plain = Chat.model_validate({"messages": [message]}).messages[0].plain()
    assert plain["content"] == "No."
    assert json.loads(plain["tool_calls"][0]["function"]["arguments"]) == {"arguments": "{bad"}


def test_names_of_speakers_and_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for name, kept in (("Jörg M.", True), ("", False)):
        (message,) = Chat.model_validate({"messages": [{"role": "user", "content": parts, "name": name}]}).messages
        assert message.plain() == {"role": "user", "content": "a\nb", **({"name": name} if kept else {})}


def test_tokens_biases_and_echo() -> None:
    assert completion(prompt=[[5, 6, 7]]).text() == (5, 6, 7)
    assert completion(prompt=[5, 6]).text() == (5, 6)
    assert completion(logit_bias={"7": -100, "8": 2.5}).logit_bias == {7: -100, 8: 2.5}
    assert completion(echo=True).echo


def test_an_answer_is_gone_on_with() -> None:
    begun = {"messages": [USER, {"role": "assistant", "content": "def main("}]}
    assert Chat.model_validate(begun).wishes.goes_on
    assert Chat.model_validate(begun | {"continue_final_message": True, "add_generation_prompt": False}).wishes.goes_on
    assert not Chat.model_validate(begun | {"add_generation_prompt": True}).wishes.goes_on
    assert not chat().wishes.goes_on
    twice = [USER, *[{"role": "assistant", "content": "x"}] * 2]
    assert not Chat.model_validate({"messages": twice, "add_generation_prompt": True}).wishes.goes_on


@pytest.mark.parametrize("more", [
    {"max_tokens": 0},
    {"tools": [{"type": "web_search"}]},
    {"tools": [WEATHER], "tool_choice": "sometimes"},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tool_choice": "required"},
    {"tools": [WEATHER], "grammar": "root ::= 'a'"},
    {"grammar": "root ::= 'a'", "json_schema": SCHEMA},
    {"response_format": {"type": "json_schema"}},
    {"continue_final_message": True},
    {"functions": [WEATHER["function"]]},
    {"tools": [WEATHER], "function_call": {"name": "get_weather"}},
    {"n": 2, "stream": True},
    {"n": 0},
    {"messages": [USER, *[{"role": "assistant", "content": "x"}] * 2]},
])  # fmt: skip
def test_what_cannot_be_had_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**more)
