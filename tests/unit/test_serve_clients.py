"""``ggufspec serve`` by OpenAI's own client, as programs use it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import urlopen

import openai
import pytest

from tests.support.processes import Cli, eventually
from tests.support.serving import Server, serving

HI = [{"role": "user", "content": "def main("}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["size", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(new_cli: Callable[[], Cli], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(new_cli(), tmp_path_factory.mktemp("serve"), "-c", "1024", "--parallel", "2") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    usual: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**usual | more)


def completion(client: openai.OpenAI, **more: Any) -> Any:
    usual: dict[str, Any] = {"model": "demo", "prompt": "def main(", "max_tokens": 24, "temperature": 0}
    return client.completions.create(**usual | more)


def streamed(chunks: Any) -> str:
    """The text of a stream of chat."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_an_answer_of_a_chat(client):
    answer = chat(client)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_in_pieces_is_the_whole(client):
    whole = chat(client)
    chunks = [*chat(client, stream=True, stream_options={"include_usage": True})]
    assert streamed(chunks) == whole.choices[0].message.content
    assert [chunk.object for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == []
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_completion_whole_and_in_pieces(client):
    whole = completion(client)
    assert whole.object == "text_completion"
    pieces = completion(client, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces if chunk.choices) == whole.choices[0].text != ""


def test_the_same_seed_is_the_same_text_and_another_is_another(client):
    texts = [completion(client, temperature=1.0, seed=seed, max_tokens=40).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    pieces = completion(client, temperature=1.0, seed=7, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces if chunk.choices) == texts[0]


def test_a_conversation_goes_on_from_the_cache(client):
    first = chat(client, max_tokens=8)
    turns = [
        *HI,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "more"},
    ]
    second = chat(client, messages=turns, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_it_stops_at_a_text(client):
    whole = completion(client, max_tokens=40).choices[0].text
    stop = whole[6:9]
    cut = completion(client, max_tokens=40, stop=[stop, "never seen"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = [*completion(client, max_tokens=40, stop=stop, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in pieces if chunk.choices) == cut.choices[0].text


def test_log_probabilities(client):
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=6)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == max(each.logprob for each in token.top_logprobs)
        assert token.token == token.top_logprobs[0].token  # it is the likeliest: temperature 0
    assert b"".join(bytes(token.bytes) for token in content).decode().startswith(answer.choices[0].message.content)
    old = completion(client, logprobs=2, max_tokens=4).choices[0].logprobs
    assert len(old.tokens) == len(old.token_logprobs) == 4
    assert all(len(top) <= 3 for top in old.top_logprobs)


def test_speculation_is_in_the_usage(client):
    usage = completion(client, max_tokens=60).usage
    assert usage.speculation["drafted"] >= usage.speculation["accepted"] >= 0
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)  # nothing was predicted


def test_a_predicted_output_is_counted_and_changes_no_text(client):
    expected = chat(client, max_tokens=40).choices[0].message.content
    answer = chat(client, max_tokens=40, prediction={"type": "content", "content": expected})
    assert answer.choices[0].message.content == expected
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 30
    assert details.rejected_prediction_tokens <= 4
    wrong = chat(client, max_tokens=40, prediction={"type": "content", "content": "Ω≈ç√∫ " * 20})
    assert wrong.choices[0].message.content == expected
    details = wrong.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 0
    assert details.rejected_prediction_tokens > 20


# ---- tools and schemas -----------------------------------------------------------------------------------------------


def called(message: Any) -> tuple[str, dict[str, Any]]:
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.id
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is_called_with_valid_arguments(client, choice):
    answer = chat(client, tools=[WEATHER], tool_choice=choice, max_tokens=400, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    name, arguments = called(answer.choices[0].message)
    assert name == "get_weather"
    assert arguments["city"] in ("Paris", "Oslo")
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert set(arguments) == {"city", "unit"}


def test_a_tool_call_in_pieces_is_the_whole(client):
    asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 400, "parallel_tool_calls": False}
    whole = called(chat(client, **asked).choices[0].message)
    name, arguments, ends = "", "", []
    for chunk in chat(client, stream=True, **asked):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            ends.append(choice.finish_reason)
    assert (name, json.loads(arguments)) == whole
    assert [end for end in ends if end] == ["tool_calls"]


def test_the_result_of_a_tool_is_answered(client):
    answer = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=400, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    turns = [
        *HI,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"},
    ]
    again = chat(client, messages=turns, tools=[WEATHER], tool_choice="none")
    assert again.choices[0].message.content is not None
    assert not again.choices[0].message.tool_calls


def test_an_answer_by_a_schema(client):
    asked = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=asked, max_tokens=64)
    order = json.loads(answer.choices[0].message.content)
    assert set(order) == {"size", "count"}
    assert order["size"] in ("small", "large")
    assert order["count"] in (1, 2, 3)
    assert answer.choices[0].finish_reason == "stop"


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "hi"}]},
        {"temperature": -1},
        {"max_tokens": -5},
        {"n": 17},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "another"}}},
        {"top_logprobs": 3, "logprobs": False},
    ],
    ids=str,
)
def test_a_wrong_request_is_a_bad_request(client, more):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **more)
    assert caught.value.body["message"]
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_named_as_such(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        completion(client, prompt="word " * 3000, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "1,024" in caught.value.body["message"] or "1024" in caught.value.body["message"]


def test_what_is_not_there_is_not_found(client, server):
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing", body={}, cast_to=object)


def test_keys(new_cli, tmp_path):
    with serving(new_cli(), tmp_path, "-c", "256", "--api-key", "sesame") as server:
        for key in ("wrong", "sesam", "sesame2"):
            with (
                openai.OpenAI(base_url=server.base, api_key=key, max_retries=0) as client,
                pytest.raises(openai.AuthenticationError) as caught,
            ):
                client.models.list()
            assert caught.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=server.base, api_key="sesame", max_retries=0) as client:
            assert completion(client, max_tokens=2).choices[0].text


def test_an_answer_that_nobody_waits_for_makes_way(client, server):
    """The connection is closed in the middle; the next answer is the same as ever, and not behind the first one."""
    expected = completion(client, max_tokens=8).choices[0].text
    long = completion(client, prompt="import os\n", max_tokens=900, stream=True)
    for _, chunk in zip(range(3), long, strict=False):
        assert chunk.object == "text_completion"
    long.close()
    assert completion(client, max_tokens=8).choices[0].text == expected

    def cancelled() -> bool:
        return 'stop_reason="cancelled"' in urlopen(f"{server.url}/metrics").read().decode()

    assert eventually(cancelled)


def test_requests_at_once_are_answered_one_after_another(client):
    prompts = [f"class Name{number}:" for number in range(4)]
    alone = [completion(client, prompt=prompt, max_tokens=12).choices[0].text for prompt in prompts]
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        found[prompt] = completion(client, prompt=prompt, max_tokens=12).choices[0].text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == alone
