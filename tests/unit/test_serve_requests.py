"""Requests as clients send them: what is absent, off, without limit, spelled otherwise; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from ggufspec.serve.requests import ChatBody, CompletionBody
from tests.support.chat_templates import WEATHER

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"size": {"enum": ["s", "l"]}}, "required": ["size"]}


def chat(**more: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({"messages": [USER], **more}))


def completion(**more: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "x", **more}))


def test_null_is_absent_wherever_it_may_stand() -> None:
    nulls = dict.fromkeys(set(ChatBody.model_fields) - {"messages"})
    assert chat(**nulls).model_dump() == chat().model_dump()
    nested = {"stream_options": {"include_usage": None}, "response_format": {"type": None, "json_schema": None}}
    assert not chat(**nested).stream_options.include_usage
    nulls = dict.fromkeys(set(CompletionBody.model_fields) - {"prompt"})
    assert completion(**nulls).model_dump() == completion().model_dump()
    tool = {"type": None, "function": {"name": "f", "description": None, "parameters": None}}
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    found = ChatBody.model_validate(
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
    (message,) = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    assert message.plain()["tool_calls"][0]["function"]["arguments"] == text


def test_a_refusal_is_text_and_a_bad_call_stays_sayable() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{bad"}}
    message = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": [call]}
    plain = ChatBody.model_validate({"messages": [message]}).messages[0].plain()
    assert plain["content"] == "No."
    assert json.loads(plain["tool_calls"][0]["function"]["arguments"]) == {"arguments": "{bad"}


def test_names_of_speakers_and_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for name, kept in (("Jörg M.", True), ("", False)):
        (message,) = ChatBody.model_validate({"messages": [{"role": "user", "content": parts, "name": name}]}).messages
        assert message.plain() == {"role": "user", "content": "a\nb", **({"name": name} if kept else {})}


def test_tokens_biases_and_echo() -> None:
    assert completion(prompt=[[5, 6, 7]]).text() == (5, 6, 7)
    assert completion(prompt=[5, 6]).text() == (5, 6)
    assert completion(logit_bias={"7": -100, "8": 2.5}).logit_bias == {7: -100, 8: 2.5}
    assert completion(echo=True).echo


def test_every_seed_of_64_bits_is_a_seed_of_its_own() -> None:
    seeds = [-(2**63), -77, -2, 0, 1, 2**63 - 1]
    found = [chat(seed=seed).sampling().seed for seed in seeds]
    assert len(set(found)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in found)
    assert found[-3:] == seeds[-3:]
    assert len({completion(seed=-1).sampling().seed for _ in range(8)}) > 1


def test_a_part_that_cannot_be_read_is_named() -> None:
    messages: list[dict[str, Any]] = [USER] * 30
    messages[11] = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}
    with pytest.raises(ValidationError, match=r"messages\[11\]\.content\[1\]: a part of type 'input_audio'"):
        chat(messages=messages)


def test_an_answer_is_gone_on_with() -> None:
    begun = {"messages": [USER, {"role": "assistant", "content": "def main("}]}
    assert ChatBody.model_validate(begun).wishes.goes_on
    assert ChatBody.model_validate(
        begun | {"continue_final_message": True, "add_generation_prompt": False}
    ).wishes.goes_on
    assert not ChatBody.model_validate(begun | {"add_generation_prompt": True}).wishes.goes_on
    assert not chat().wishes.goes_on
    twice = [USER, *[{"role": "assistant", "content": "x"}] * 2]
    assert not ChatBody.model_validate({"messages": twice, "add_generation_prompt": True}).wishes.goes_on


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


@pytest.mark.parametrize(("content", "text"), [
    ("a = 1\n", "a = 1\n"),
    ([{"type": "text", "text": "a = "}, {"type": "text", "text": "1\n"}], "a = 1\n"),
    ("", ""),
    ([], ""),
])  # fmt: skip
def test_a_prediction_is_text_or_parts_of_text(content: Any, text: str) -> None:
    predicted = {"prediction": {"type": "content", "content": content}}
    assert chat(**predicted).common["prediction"] == text
    assert completion(**predicted).common["prediction"] == text
    assert chat(prediction=None).common["prediction"] == chat().common["prediction"] == ""


@pytest.mark.parametrize("prediction", [
    "a = 1",
    [],
    {},
    {"type": "content"},
    {"content": "a"},
    {"type": "text", "content": "a"},
    {"type": "content", "content": 7},
    {"type": "content", "content": {"text": "a"}},
    {"type": "content", "content": ["a"]},
    {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"type": "content", "content": [{"type": "text"}]},
])  # fmt: skip
def test_what_is_no_prediction_is_refused(prediction: Any) -> None:
    with pytest.raises(ValidationError, match="prediction"):
        chat(prediction=prediction)
