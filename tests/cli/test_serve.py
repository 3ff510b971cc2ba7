"""``ggufspec serve`` as its clients meet it: real servers, real sockets, the demo pair."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pexpect
import psutil
import pytest

from ggufspec import Sampling, load_pair
from ggufspec.bench.prompting import read_prompts
from ggufspec.errors import UsageError
from ggufspec.schema.text import number
from ggufspec.serve.app import LOCAL, AccessRules
from ggufspec.serve.engine import FairQueue
from tests.support import chat_models, endpoints
from tests.support.endpoints import CHATML, PATIENCE_S, Endpoint, events, serving, template
from tests.support.gguf_files import rewritten
from tests.support.processes import Cli, eventually

CODE = {"role": "user", "content": "def main(argv):"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, "--parallel", "3", "--strict", "--chat-template", template(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """Without strict mode, which would keep less of a prompt."""
    folder = tmp_path_factory.mktemp("plain")
    with serving(folder, "--parallel", "3", "--chat-template", template(folder)) as found:
        yield found


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[httpx2.Client]:
    with endpoint.client() as found:
        yield found


def complete(client: httpx2.Client, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def error(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    assert "Traceback" not in found["message"]
    return found


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_library_gives(client: httpx2.Client) -> None:
    prompt, sampling = "import os\n\n\ndef walk(path):\n", Sampling(temperature=0.7, seed=5)
    with load_pair("demo", threads=1, strict=True, ctx_size=2048) as decoder:
        expected = "".join(one.text for one in decoder.generate(prompt, max_tokens=24, sampling=sampling))
    found = complete(client, prompt, temperature=0.7, seed=5)
    assert found["choices"][0]["text"] == expected
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 24
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + 24
    with client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": prompt, "max_tokens": 24, "temperature": 0.7, "seed": 5, "stream": True},
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "".join(chunk["choices"][0]["text"] for chunk in events(response)) == expected


def test_a_chat_goes_on_where_it_was(plain: Endpoint) -> None:
    """The second turn reads only what is new, in each of three conversations by turns."""
    talks = [[{"role": "user", "content": f"# {name}\n" + "import os\n" * 20}] for name in ("a", "b", "c")]
    with plain.client() as client:
        for turn in range(3):
            for messages in talks:
                body = {"messages": messages, "max_tokens": 12, "temperature": 0}
                found = client.post("/v1/chat/completions", json=body).json()
                usage = found["usage"]
                new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                assert new < 60 if turn else new == usage["prompt_tokens"]
                messages += [found["choices"][0]["message"], {"role": "user", "content": f"def step_{turn}("}]


def test_the_same_seed_is_the_same_text_while_others_ask(endpoint: Endpoint, tmp_path: Path) -> None:
    """In strict mode, with a draft and without, alone and with two clients that keep the queue busy."""
    bodies = [{"messages": [CODE], "max_tokens": 32, "temperature": 0.9, "seed": seed} for seed in (1, 2, 3)]

    def answers(at: Endpoint) -> list[str]:
        with at.client() as client:
            found = [client.post("/v1/chat/completions", json=body).json() for body in bodies]
        return [one["choices"][0]["message"]["content"] for one in found]

    alone = answers(endpoint)
    over = threading.Event()
    counts = [0, 0]

    def other(index: int) -> None:
        with endpoint.client() as client:
            while not over.is_set():
                complete(client, f"# {index}\nclass Stack:\n" * (8 + counts[index] % 3), temperature=1.0)
                counts[index] += 1

    threads = [threading.Thread(target=other, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        busy = [answers(endpoint) for _ in range(2)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert busy == [alone] * 2
    assert min(counts) > 0
    with serving(tmp_path, "--no-draft", "--strict", "--chat-template", template(tmp_path)) as target_only:
        assert answers(target_only) == alone


def test_several_answers_are_given_at_once(plain: Endpoint) -> None:
    """Three streams have begun and none has ended; a fourth waits, and one that is left makes room."""
    begun, counted = threading.Barrier(4), threading.Barrier(4)
    body = {"prompt": "import os\n\ndef ", "max_tokens": 1900, "ignore_eos": True, "stream": True}

    def stream(seed: int) -> None:
        with (
            plain.client() as client,
            client.stream("POST", "/v1/completions", json={**body, "seed": seed}) as response,
        ):
            chunks = events(response)  # kept: without it the connection is closed
            assert next(chunks)["choices"][0]["finish_reason"] is None
            begun.wait(PATIENCE_S)
            counted.wait(PATIENCE_S)

    def gauge(client: httpx2.Client, name: str) -> int:
        found = re.search(rf"^llamacpp:{name} (\d+)", client.get("/metrics").text, re.MULTILINE)
        assert found
        return int(found[1])

    with ThreadPoolExecutor(4) as pool, plain.client() as client:
        streams = [pool.submit(stream, seed) for seed in range(3)]
        begun.wait(PATIENCE_S)
        fourth = pool.submit(complete, client, "def main(")
        assert eventually(lambda: gauge(client, "requests_deferred") == 1)
        assert gauge(client, "requests_processing") == 3
        counted.wait(PATIENCE_S)
        for one in streams:
            one.result()
        assert fourth.result()["usage"]["completion_tokens"] == 24
        assert eventually(lambda: gauge(client, "requests_processing") == 0)


def test_json_follows_its_schema(client: httpx2.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 2, 3]}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    body = {"messages": [CODE], "max_tokens": 200, "temperature": 0.5, "seed": 1, "response_format": wanted}
    text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"name", "count"}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}
    assert error(client.post("/v1/chat/completions", json=body), 400)["message"]


def test_log_probabilities_and_stops(client: httpx2.Client) -> None:
    body = {"messages": [CODE], "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    listed = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in listed) == choice["message"]["content"]
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] <= 0 for one in listed)
    found = complete(client, "def main(", logprobs=1)["choices"][0]
    assert len(found["logprobs"]["token_logprobs"]) == 24
    text = found["text"]
    stop = text[6:9]
    stopped = complete(client, "def main(", stop=[stop, "never"])["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_requests_are_logged_as_bench_reads_them(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    arguments = ("--chat-template", template(tmp_path), "--log-requests", log)
    with serving(tmp_path, *arguments) as logging, logging.client() as client:
        complete(client, "def main(", max_tokens=2)
        client.post("/v1/chat/completions", json={"messages": [CODE], "max_tokens": 2, "user": "me"})
        error(client.post("/v1/completions", content=b"{}"), 400)
        begun = [CODE, {"role": "assistant", "content": "return "}]
        client.post("/v1/chat/completions", json={"messages": begun, "max_tokens": 2})
        client.post("/v1/completions", json={"prompt": [[70, 71]], "max_tokens": 2})
    assert [(one.text, one.messages, one.goes_on, one.tokens) for one in read_prompts(log)] == [
        ("def main(", (), False, ()),
        ("", (CODE,), False, ()),
        ("", tuple(begun), True, ()),
        ("", (), False, (70, 71)),
    ]
    assert log.stat().st_mode & 0o777 == 0o600
    failed = cli("serve", "demo", "--log-requests", tmp_path / "none" / "x")
    assert (failed.code, "cannot be written" in failed.stderr) == (2, True)


def test_several_answers_to_one_request(client: httpx2.Client) -> None:
    body = {"messages": [CODE], "max_tokens": 8, "temperature": 1.0}
    one, other = (client.post("/v1/chat/completions", json=body | {"seed": seed}).json() for seed in (7, 8))
    both = client.post("/v1/chat/completions", json=body | {"seed": 7, "n": 2, "verbose": True}).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert [choice["message"] for choice in both["choices"]] == [
        answer["choices"][0]["message"] for answer in (one, other)
    ]
    assert both["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert both["usage"]["completion_tokens"] == 16
    assert both["usage"]["total_tokens"] == both["usage"]["prompt_tokens"] + 16
    assert both["__verbose"]["prompt"].endswith("<|im_start|>assistant\n")
    assert "__verbose" not in one


def test_names_tags_and_reasoning(tmp_path: Path) -> None:
    """As llama-server has them: aliases in the alphabet's order, and a model that does not reason unless asked."""
    thinking = template(tmp_path, CHATML + "{% if not enable_thinking %}<think></think>{% endif %}")
    given = ("--alias", "small, code", "--tags", "fim,chat", "--reasoning", "off", "--chat-template", thinking)
    with serving(tmp_path, *given) as endpoint, endpoint.client() as client:
        listed = client.get("/v1/models").json()["data"][0]
        assert (listed["id"], listed["aliases"], listed["tags"]) == ("code", ["code", "small"], ["fim", "chat"])
        assert client.get("/v1/models/small").json() == listed
        for more, off in (
            ({}, True),
            ({"chat_template_kwargs": {"enable_thinking": True}}, False),
            ({"reasoning_effort": "high"}, False),
            ({"chat_template_kwargs": {"reasoning_effort": "low"}}, False),
            ({"reasoning_effort": "none"}, True),
        ):
            prompt = client.post("/apply-template", json={"messages": [CODE], **more}).json()["prompt"]
            assert prompt.endswith("<think></think>") is off, more
    with serving(tmp_path, "--reasoning", "on", "--chat-template", thinking) as endpoint, endpoint.client() as client:
        for effort, off in ((None, False), ("none", True), ("medium", False)):
            body = {"messages": [CODE], "reasoning_effort": effort}
            prompt = client.post("/apply-template", json=body).json()["prompt"]
            assert prompt.endswith("<think></think>") is off, effort


def test_the_cache_is_left_alone_where_that_is_asked_for(plain: Endpoint) -> None:
    prompt = "# a prompt of its own\n" + "import sys\n" * 30

    def cached(**more: Any) -> int:
        usage = complete(client, prompt, max_tokens=2, **more)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with plain.client() as client:
        cached()
        assert cached() > 60
        assert cached(cache_prompt=False) == 0
        assert cached(cache_prompt=True) > 60


def test_a_grammar_that_ends_within_a_stop_ends_no_server(tmp_path: Path) -> None:
    """The answer's end is forbidden, so the grammar ends it while "def main" may still become the stop."""
    with (
        serving(tmp_path, "--no-draft", "--chat-template", template(tmp_path)) as endpoint,
        endpoint.client() as client,
    ):
        bound = {"grammar": 'root ::= "def main"', "ignore_eos": True, "stop": ["main("]}
        body: dict[str, Any] = {"messages": [CODE], "max_tokens": 20, "temperature": 0}
        for stream in (False, True):
            response = client.post("/v1/chat/completions", json=body | bound | {"stream": stream})
            assert response.status_code == 200
        said = client.post("/v1/chat/completions", json=body | bound).json()
        message = said["choices"][0]["message"]
        assert message["content"] == "def main"
        tokens = client.post("/tokenize", json={"content": "def main"}).json()["tokens"]
        assert said["usage"]["completion_tokens"] <= len(tokens) + 2
        body["messages"] = [CODE, {"role": "assistant", "content": "def main"}]
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        body["messages"] += [{"role": "user", "content": "Go on."}]
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert "ggufspec:restarts_total 0" in client.get("/metrics").text
    with load_pair("demo", threads=1, ctx_size=256) as decoder:
        for wrong in (-1, decoder.target.vocab_size):
            with pytest.raises(UsageError, match="is not one of the model's"):
                decoder.target.piece(wrong)
            with pytest.raises(UsageError, match="is not one of the model's"):
                next(iter(decoder.generate([5, wrong], max_tokens=1)))
        assert not decoder.target.is_end(-1)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def test_half_a_character_is_replaced(client: httpx2.Client) -> None:
    """A client has cut a text within it: the conversation would be refused for ever."""
    for body in (
        rb'{"prompt": "cut \ud83d", "max_tokens": 1}',
        rb'{"prompt": "\ude00 \\ud83d \ud83d\ude00", "max_tokens": 1}',
    ):
        assert client.post("/v1/completions", content=body).status_code == 200
    assert (
        client.post("/tokenize", content=rb'{"content": "\ud83d\ude00"}').json()
        == client.post("/tokenize", json={"content": "😀"}).json()
    )


def test_a_byte_order_mark_before_a_body_is_dropped(client: httpx2.Client) -> None:
    response = client.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}')
    assert response.status_code == 200, response.text
    error(client.post("/v1/completions", content=b"\xef\xbb\xbf"), 400)


BAD = {
    "no JSON": b"{",
    "an array": b"[]",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": 1e999}',
    "a huge number": b'{"prompt": "x", "max_tokens": ' + b"9" * 400 + b"}",
    "a negative number": b'{"prompt": "x", "max_tokens": -2}',
    "no tokens": b'{"prompt": "x", "max_tokens": 0}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "nested": b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "no prompt": b"{}",
    "an empty prompt": b'{"prompt": ""}',
    "two prompts": b'{"prompt": ["a", "b"]}',
    "a token that is none": b'{"prompt": [1, 99999999999999999999]}',
    "many stops": b'{"prompt": "x", "stop": [' + b'"a",' * 16 + b'"a"]}',
    "two answers at once": b'{"prompt": "x", "n": 2, "stream": true}',
    "a large bias": b'{"prompt": "x", "logit_bias": {"3": 500}}',
    "a bias of no token": b'{"prompt": "x", "logit_bias": {"x": 5}}',
    "the prompt's log-probabilities": b'{"prompt": "x", "echo": true, "logprobs": 1}',
    "a bad grammar": b'{"prompt": "x", "grammar": "root ::= ("}',
    "many log-probabilities": b'{"prompt": "x", "logprobs": 1000}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_bad_completions_are_400(client: httpx2.Client, body: bytes) -> None:
    error(client.post("/v1/completions", content=body), 400)


BAD_CHATS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "a role with a control character": {"messages": [{"role": "user\u0000", "content": "x"}]},
    "an unknown role": {"messages": [{"role": "root", "content": "x"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "a name with a line": {"messages": [{"role": "user", "content": "x", "name": "a\nb"}]},
    "tools of another type": {"messages": [CODE], "tools": [{"type": "web_search"}]},
    "a call that cannot be forced": {
        "messages": [CODE],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
    },
    "a choice of no tool": {
        "messages": [CODE],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "to go on with a question": {"messages": [CODE], "continue_final_message": True},
    "a choice without tools": {"messages": [CODE], "tool_choice": "required"},
    "top without logprobs": {"messages": [CODE], "top_logprobs": 3},
    "a format without schema": {"messages": [CODE], "response_format": {"type": "json_schema"}},
    "too many messages": {"messages": [{"role": "user", "content": "x"}] * 10_001},
}


@pytest.mark.parametrize("body", BAD_CHATS.values(), ids=BAD_CHATS)
def test_bad_chats_are_400(client: httpx2.Client, body: dict[str, Any]) -> None:
    error(client.post("/v1/chat/completions", json=body), 400)


def test_a_part_that_is_no_text_is_named(client: httpx2.Client) -> None:
    messages: list[dict[str, Any]] = [CODE] * 40
    messages[17] = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}
    found = error(client.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert found["message"].startswith("messages[17].content[1]: a part of type 'image_url'")
    assert found["param"] == "messages[17].content[1]"


def test_a_prompt_beyond_the_context(client: httpx2.Client) -> None:
    found = error(client.post("/v1/completions", json={"prompt": "word " * 9000}), 400)
    assert (found["code"], found["type"]) == ("context_length_exceeded", "exceed_context_size_error")
    assert "-c " in found["message"]
    assert found["n_prompt_tokens"] > found["n_ctx"] == 2048
    found = error(client.post("/v1/completions", json={"prompt": "word " * 9000, "stream": True}), 400)
    assert found["code"] == "context_length_exceeded"


def test_paths_and_methods(client: httpx2.Client) -> None:
    for path in ("/nope", "/v1/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%7f", "/page.html"):
        error(client.get(path), 404)
    error(client.put("/v1/models"), 405)
    error(client.get("/v1/completions"), 405)
    assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert client.get("/v1/models/demo").json()["id"] == "demo"
    assert client.get("/health").json() == {"status": "ok"}
    assert "connect-src 'self'" in client.get("/").headers["content-security-policy"]


def test_slashes_too_many_change_nothing(client: httpx2.Client) -> None:
    body = {"messages": [CODE], "max_tokens": 2, "temperature": 0}
    expected = client.post("/v1/chat/completions", json=body).json()["choices"]
    for path in ("//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/"):
        found = client.post(path, json=body, follow_redirects=False)
        assert found.status_code == 200, path
        assert found.json()["choices"] == expected
    assert client.get("/v1/models/").json()["object"] == "list"
    assert client.head("/v1/models").status_code == 200


def test_what_front_ends_ask_of_llama_server(client: httpx2.Client) -> None:
    text = "def main(é):\n"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    pieces = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [one["id"] for one in pieces] == tokens
    whole = b"".join(one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces)
    assert whole.decode() == text
    prompt = client.post("/apply-template", json={"messages": [CODE]}).json()["prompt"]
    assert prompt == "<|im_start|>user\ndef main(argv):<|im_end|>\n<|im_start|>assistant\n"
    counted = client.post("/v1/chat/completions/input_tokens", json={"messages": [CODE]}).json()
    assert counted["input_tokens"] == len(client.post("/tokenize", json={"content": prompt}).json()["tokens"])
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == client.get("/v1/models").json()["data"][0]["meta"]["n_ctx"]
    assert (props["model_alias"], props["total_slots"]) == ("demo", 3)
    assert "im_start" in props["chat_template"]
    assert "99999999" in error(client.post("/detokenize", json={"tokens": [99999999]}), 400)["message"]
    error(client.post("/tokenize", json={}), 400)


@pytest.mark.parametrize("stop", ["TRE\nXX", "UNO D", "😀", "b😀 U", "E"])
def test_stops_cut_the_same_in_pieces(client: httpx2.Client, stop: str) -> None:
    """Characters of several tokens and stops over several; what was held back for a stop that does not come is sent."""
    said = "ab😀 UNO DUE TRE"
    asked = {"grammar": f'root ::= "{said}"', "stop": [stop], "max_tokens": 60}
    whole = complete(client, "x", **asked)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (said.partition(stop)[0], "stop")
    body = {"prompt": "x", "temperature": 0, "stream": True, **asked}
    with client.stream("POST", "/v1/completions", json=body) as response:
        pieces = [chunk["choices"][0]["text"] for chunk in events(response)]
    assert "".join(pieces) == whole["text"]
    assert "\ufffd" not in "".join(pieces)


def test_a_control_token_can_be_a_stop(target: Path, tmp_path: Path) -> None:
    marked = chat_models.with_marks(target, tmp_path / "marked.gguf")
    with serving(tmp_path, pair=("-m", marked)) as endpoint, endpoint.client() as client:
        (token,) = client.post("/tokenize", json={"content": chat_models.START}).json()["tokens"]
        forced = {"logit_bias": [[token, 100]], "max_tokens": 3}
        never = complete(client, "def main(", **forced)["choices"][0]
        assert (never["text"], never["finish_reason"]) == ("", "length")  # it has no text
        found = complete(client, "def main(", stop=["more", chat_models.START], **forced)
        assert (found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]) == ("stop", 1)


def test_how_far_a_prompt_is_read_and_what_each_piece_took(client: httpx2.Client) -> None:
    content = "import os, sys\n" * 200
    for seen in range(2):  # the second finds it in the cache
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, "stream": True}
        body |= {"return_progress": True, "timings_per_token": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = list(events(response))
        progress = [one["prompt_progress"] for one in chunks if "prompt_progress" in one]
        total = progress[0]["total"]
        assert progress[0]["cache"] == progress[0]["processed"] >= seen * 512
        assert progress[-1] | {"processed": total} == progress[-1]
        assert [one["processed"] for one in progress] == sorted({one["processed"] for one in progress})
        assert len(progress) >= (2 if seen else total // 512 + 1)
        timings = [one["timings"] for one in chunks if "timings" in one]
        assert [one["predicted_n"] for one in timings] == sorted(one["predicted_n"] for one in timings)
        last = timings[-1]
        for one in timings[:-1]:
            assert (one["prompt_n"], one["cache_n"]) == (last["prompt_n"], last["cache_n"])
            assert 0 <= one["predicted_ms"] <= last["predicted_ms"]
        assert timings[-2] == pytest.approx(last, rel=0.2)
    body |= {"return_progress": False, "timings_per_token": False}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert sum("timings" in one or "prompt_progress" in one for one in events(response)) == 1


def test_the_end_is_ignored_where_that_is_asked_for(client: httpx2.Client) -> None:
    (end,) = client.post("/tokenize", json={"content": client.get("/props").json()["eos_token"]}).json()["tokens"]
    usage = [
        complete(client, "x", logit_bias={str(end): 50}, ignore_eos=ignored, max_tokens=4)["usage"]
        for ignored in (False, True)
    ]
    assert [one["completion_tokens"] for one in usage] == [1, 4]


def test_a_prompt_is_echoed_and_a_bias_holds(client: httpx2.Client) -> None:
    plain = complete(client, "def main(")["choices"][0]["text"]
    assert complete(client, "def main(", echo=True)["choices"][0]["text"] == "def main(" + plain
    first = client.post("/tokenize", json={"content": "def main(" + plain}).json()["tokens"]
    begun = len(client.post("/tokenize", json={"content": "def main("}).json()["tokens"])
    biased = complete(client, "def main(", logit_bias={str(first[begun]): -100})["choices"][0]["text"]
    assert biased != plain


def test_bytes_of_tokens_are_their_own(client: httpx2.Client) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "😀é漢"', "max_tokens": 20, "logprobs": 3}
    found = client.post("/v1/completions", json=body).json()["choices"][0]
    assert found["text"] == "😀é漢"
    chat = {"messages": [CODE], "grammar": body["grammar"], "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    listed = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in listed).decode().startswith("😀é漢")
    assert len(found["logprobs"]["text_offset"]) == len(found["logprobs"]["tokens"])


@pytest.mark.full
def test_a_body_without_end_is_refused(client: httpx2.Client) -> None:
    """100 MB, announced or not: 413 long before it is all there."""
    sent = 0

    def flood() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b" " * (1 << 20)

    try:
        error(client.post("/v1/completions", content=flood()), 413)
    except httpx2.HTTPError:  # it is refused while we still write
        assert sent < 100 << 20
    assert client.get("/health").status_code == 200


@pytest.mark.full
def test_slow_and_half_closed_clients_hold_nobody_up(endpoint: Endpoint, client: httpx2.Client) -> None:
    """Others are answered beside heads that drip; a client that has closed its half gets its answer."""
    address = endpoint.base.removeprefix("http://").split(":")
    sockets = [socket.create_connection((address[0], int(address[1])), timeout=PATIENCE_S) for _ in range(40)]
    try:
        for one in sockets:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Drip: ")
        assert complete(client, "def main(")["usage"]["completion_tokens"] == 24
    finally:
        for one in sockets:
            one.close()
    with socket.create_connection((address[0], int(address[1])), timeout=PATIENCE_S) as half:
        body = b'{"prompt": "def main(", "max_tokens": 4}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        half.sendall(head.encode() + body)
        half.shutdown(socket.SHUT_WR)
        half.recv(1)  # an answer, or the end: either is well
    assert client.get("/health").status_code == 200


def test_other_hosts_are_refused(client: httpx2.Client) -> None:
    """A page elsewhere whose name resolves to this machine (DNS rebinding)."""
    assert "--api-key" in error(client.get("/v1/models", headers={"Host": "evil.example"}), 403)["message"]
    error(client.get("/v1/models", headers={"Host": "127.0.0.1.evil.example:80"}), 403)
    assert client.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.1 is the only loopback address of other systems")
def test_the_host_that_is_served_on_is_allowed(tmp_path: Path) -> None:
    for host, names in (("127.0.1.1", ("127.0.1.1", "localhost")), ("LOCALHOST", ("localhost", "127.0.0.1"))):
        with serving(tmp_path, "--host", host) as endpoint, endpoint.client() as client:
            for name in names:
                assert client.get("/v1/models", headers={"Host": f"{name}:80"}).status_code == 200, name
            assert client.get("/v1/models").status_code == 200
            error(client.get("/v1/models", headers={"Host": "evil.example"}), 403)
    assert endpoint_names("::1") == (True, False)


def endpoint_names(address: str) -> tuple[bool, bool]:
    rules = AccessRules(hosts=(*LOCAL, "box.lan"))
    allowed = [
        rules.refusal({"headers": [(b"host", host.encode())], "path": "/"}) is None
        for host in (f"[{address}]:8080", "[::2]:8080")
    ]
    return allowed[0], allowed[1]


def test_pages_of_other_sites_are_refused(client: httpx2.Client) -> None:
    """Without reading the answer they could ask all the same: a simple request needs no leave (CORS)."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    for origin in ("https://evil.example", "null", "http://localhost:1", f"{client.base_url}"[:-2]):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        assert error(client.post("/v1/completions", content=body, headers=headers), 403)["code"] == "unknown_origin"
    own = {"Origin": str(client.base_url).rstrip("/")}
    assert client.post("/v1/completions", content=body, headers=own).status_code == 200


# ---- cancelling, and a child that dies -------------------------------------------------------------------------------


def idle(client: httpx2.Client) -> bool:
    return "llamacpp:requests_processing 0" in client.get("/metrics").text


def until(condition: Any, what: str) -> None:
    last = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < last, what


def test_a_client_that_goes_away_stops_its_answer(client: httpx2.Client) -> None:
    body = {"prompt": "def f(", "max_tokens": 1900, "temperature": 1.5, "stream": True, "seed": 2}
    for _ in range(3):
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(events(response))
        until(lambda: idle(client), "the answer goes on for nobody")
    before = [one for one in client.get("/figures").json()["answers"] if one["stop_reason"] == "cancelled"]
    assert len(before) >= 3
    assert all(one["tokens"] < 1900 for one in before)
    assert complete(client, "def main(")["usage"]["completion_tokens"] == 24


def test_a_dead_child_costs_one_answer(tmp_path: Path) -> None:
    with serving(tmp_path, "-c", "4096") as endpoint, endpoint.client() as client:
        expected = complete(client, "def main(")["choices"][0]["text"]
        body = {"prompt": "def f(", "max_tokens": 4000, "temperature": 1.5, "stream": True, "seed": 2}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = events(response)
            next(found)
            endpoint.child.send_signal(signal.SIGKILL)
            last = list(found)[-1]
        assert last["error"]["code"] == "model_unavailable"
        assert complete(client, "def main(")["choices"][0]["text"] == expected
        endpoint.child.send_signal(signal.SIGKILL)  # while it is idle
        until(lambda: client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200, "503")
        assert complete(client, "def main(")["choices"][0]["text"] == expected
        assert "ggufspec:restarts_total 2" in client.get("/metrics").text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_when_told(tmp_path: Path, number: int, code: int) -> None:
    """The answer that runs is cut after the time of grace, and told so."""
    with serving(tmp_path, "--grace", "0", "-c", "4096") as endpoint, endpoint.client() as client:
        body = {"prompt": "def f(", "max_tokens": 4000, "temperature": 1.5, "stream": True, "seed": 2}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = events(response)
            next(found)
            endpoint.process.send_signal(number)
            assert "error" in list(found)[-1]
        assert endpoint.process.wait(PATIENCE_S) == code
        assert endpoint.process.stderr is not None
        assert b"Traceback" not in endpoint.process.stderr.read()


@pytest.mark.parametrize(
    ("flags", "idle"), [((), False), (("--drafter", "none"), True), (("--drafter", "lookup"), False)]
)
def test_its_first_line_says_if_nothing_is_drafted(cli: Cli, flags: tuple[str, ...], idle: bool) -> None:
    """As with a profile for which tuning found that drafts do not pay."""
    child = cli.terminal("serve", "demo", "--port", "0", *flags, columns=120)
    child.expect(r"serving demo( \(target-only: nothing is drafted\))? at http")
    assert bool(child.match[1]) == idle
    child.expect(r"page: http")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_its_first_lines_can_be_copied(cli: Cli) -> None:
    """A terminal breaks a long line itself, and copies it as one; a line end of ours would be copied, too."""
    child = cli.terminal("serve", "demo", "--port", "0", columns=80)
    child.expect("Ctrl-C ends it")
    child.expect(r"page: http://[\d.:]+/")
    lines = child.before.splitlines()
    (command,) = (line for line in lines if "curl" in line)
    words = shlex.split(re.sub(r"\x1b\[[\d;]*m", "", command).partition("try: ")[2])
    assert words[0] == "curl"
    assert json.loads(words[-1])["max_tokens"] == 32
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


# ---- keys, and how it begins -----------------------------------------------------------------------------------------


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    file.chmod(0o600)
    given = ("--api-key-file", file, "--api-key", "third", "--cors", "https://a.example")
    with serving(tmp_path, *given) as endpoint, endpoint.client() as client:
        assert client.get("/health").status_code == client.get("/").status_code == 200
        for key in ("", "wrong", "firs", "first2", "é"):
            headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
            found = error(client.get("/v1/models", headers=headers), 401)
            assert found["code"] == "invalid_api_key"
        for path in ("/metrics", "/figures", "/nope"):
            error(client.get(path), 401)
        for key in ("first", "second", "third"):
            answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}", "Origin": "https://a.example"})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = client.get("/v1/models", headers={"Authorization": "Bearer first", "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        asks |= {"Origin": "https://a.example", "Access-Control-Request-Private-Network": "true"}
        allowed = client.options("/v1/chat/completions", headers=asks)  # a browser sends no key with it
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-private-network"] == "true"
        wrong = client.post("/v1/completions", headers={"Authorization": "Bearer x", "Origin": "https://a.example"})
        assert error(wrong, 401)
        assert wrong.headers["access-control-allow-origin"] == "https://a.example"  # so that the page can read it


def test_a_key_of_the_environment_is_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "VARIABLES", {"GGUFSPEC_API_KEY": "blue  whale"})
    with serving(tmp_path) as endpoint, endpoint.client() as client:
        for key, status in (("blue  whale", 200), ("blue", 401), ("whale", 401), ("blue whale", 401)):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status, key


def test_what_is_wrong_before_it_begins(cli: Cli, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = cli("serve", "demo", "--port", str(taken.getsockname()[1]))
        assert (done.code, "is in use" in done.stderr, "--port 0" in done.stderr) == (1, True, True)
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o644)
    cases = [
        (("--host", "192.0.2.1"), "not an address of this machine"),
        (("--host", "no such host"), "not an address or name"),
        (("--host", "0.0.0.0", "--port", "0"), "so a key is required"),
        (("--api-key-file", str(keys)), "chmod 600"),
        (("--api-key-file", str(tmp_path / "none")), "none"),
        (("--api-key", ""), "an API key is empty"),
        (("--api-key", "x", "--no-api-key"), "give one of them"),
        (("--chat-template", str(tmp_path / "none")), "none"),
    ]
    for arguments, message in cases:
        done = cli("serve", "demo", *arguments)
        assert done.code == 2, (arguments, done.stderr)
        assert message in done.stderr
    done = cli("serve", "-m", tmp_path / "missing.gguf", "--port", "0")
    assert done.code == 1
    assert "does not exist" in done.stderr


def test_a_dry_run_shows_the_plan(cli: Cli) -> None:
    done = cli("serve", "demo", "--dry-run", "--parallel", "2", "--json")
    assert done.code == 0, done.stderr
    assert done.document()["schema"] == "ggufspec/plan@1"
    assert done.document()["settings"]["sequences"] == 2


def test_a_tuned_profile_is_served_as_it_is(cli: Cli, target: Path, draft: Path) -> None:
    """By its name, or by the target's file that was tuned; what was not tuned is refused."""
    done = cli("serve", "demo", "--profile-from-tune", "--dry-run")
    assert (done.code, "demo was not tuned" in done.stderr, "ggufspec tune demo" in done.stderr) == (2, True, True)
    folder = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles"
    folder.mkdir(parents=True)
    name = target.stem
    (folder / f"{name}.toml").write_text(
        f"""name = "{name}"
why = "tuned"
source = "here"
target = {{file = "{target}"}}
draft = {{file = "{draft}"}}
[settings]
ctx_size = 768
draft_max = 5
[tuned]
date = "2026-11-24"
tokens_per_s = 100.0
trials = 4
machine = "this one"
versions = "1"
results = "none.json"
"""
    )
    for words in ((name,), ("-m", str(target))):
        done = cli("serve", *words, "--profile-from-tune", "--dry-run", "--json")
        assert done.code == 0, done.stderr
        assert (done.document()["settings"]["ctx_size"], done.document()["settings"]["draft_max"]) == (768, 5)
    done = cli("serve", "-m", str(draft), "--profile-from-tune", "--dry-run")
    assert (done.code, "no profile was tuned" in done.stderr) == (2, True)


def test_a_template_that_ends_the_child_is_a_bad_request(cli: Cli, target: Path, tmp_path: Path) -> None:
    """A client that tries again would load the pair again and again; a file that is none is told before."""
    trap = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    file = template(tmp_path, trap)
    for text in (trap, "{% for %}{{"):
        file.write_text(text)
        done = cli("serve", "demo", "--port", "0", "--chat-template", file)
        assert (done.code, f"{file.name} cannot be used" in " ".join(done.stderr.split())) == (2, True), done.stderr
    own = rewritten(target, tmp_path / "trap.gguf", template=trap)
    with serving(tmp_path, pair=("-m", own)) as endpoint, endpoint.client() as client:
        found = error(client.post("/v1/chat/completions", json={"messages": [CODE], "max_tokens": 2}), 400)
        assert "chat template" in found["message"]
        assert "--chat-template FILE" in found["message"]
        assert complete(client, "def main(", max_tokens=2)["choices"][0]["text"]


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as endpoint, endpoint.client() as client:
        found = error(client.post("/v1/chat/completions", json={"messages": [CODE]}), 400)
        assert "--chat-template FILE" in found["message"]
        assert complete(client, "def main(")["usage"]["completion_tokens"] == 24


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_clients_are_served_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(4):
        queue.put("greedy", f"g{index}")
    queue.put("modest", "m0")
    queue.put("other", "o0")
    queue.put("modest", "m1")
    assert len(queue) == 7
    assert queue.remove("g1")
    assert not queue.remove("g1")
    assert [queue.get() for _ in range(6)] == ["g0", "m0", "o0", "g2", "m1", "g3"]
    with pytest.raises(LookupError):
        queue.get()
    queue.put("a", "x")
    assert queue.clear() == ["x"]
    assert len(queue) == 0


def test_a_full_queue_is_503(tmp_path: Path) -> None:
    with serving(tmp_path, "--queue", "1", "--parallel", "1", "-c", "4096") as endpoint, endpoint.client() as client:
        body = {"prompt": "def f(", "max_tokens": 4000, "temperature": 1.5, "stream": True, "seed": 2}
        with client.stream("POST", "/v1/completions", json=body) as running:
            found = events(running)  # kept: a generator that is collected closes the stream
            next(found)
            waiting = threading.Thread(target=lambda: complete(client, "def main("))
            waiting.start()
            until(lambda: "llamacpp:requests_deferred 1" in client.get("/metrics").text, "nothing waits")
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert error(refused, 503)["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) > 0
        waiting.join()


# ---- a machine whose speed changes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """The process runs for a few milliseconds of every thirty, as beside programs that hold its CPUs."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.005):
            process.suspend()
            over.wait(0.025)
            process.resume()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_target_that_has_become_slower_is_told(tmp_path: Path) -> None:
    with serving(tmp_path) as endpoint, endpoint.client() as client:

        def ask() -> dict[str, Any]:
            complete(client, "import os\n\n\ndef walk(path):\n", max_tokens=40, ignore_eos=True)
            target: dict[str, Any] = client.get("/figures").json()["target"]
            return target

        complete(client, "def f(", max_tokens=1)
        assert client.get("/figures").json()["target"] is None  # which says nothing of the machine
        for _ in range(3):
            assert ask()["expected"] > 0
        with slowed(endpoint.child):
            slow = next(target for _ in range(12) if (target := ask())["state"] == "slower")
            assert slow["change"].startswith(f"the target is slower now: {number(slow['tokens_per_s'])} tokens/s, exp")
        text = client.get("/metrics").text
        assert f"\nggufspec:target_tokens_seconds {slow['tokens_per_s']!r}\n" in text
        assert f"\nggufspec:target_tokens_seconds_expected {slow['expected']!r}\n" in text
        again = [ask()["tokens_per_s"] for _ in range(4)]
        assert max(again) > 1.5 * slow["tokens_per_s"]
