"""``ggufspec chat --url``: a chat with a running server, which here is a script."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from processes import Cli, eventually
from rich.console import Console
from screens import Session
from served import HOSTILE, Endpoint, served
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from ggufspec.chat import markdown
from ggufspec.chat.actions import take
from ggufspec.chat.commands import Switches
from ggufspec.chat.remote import Remote, base_url
from ggufspec.chat.screen import Screen
from ggufspec.chat.session import Request as Question
from ggufspec.chat.talk import Talk
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.prompting.conversation import Conversation


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with served(Endpoint("")) as running:
        yield running


def ignore(_: dict[str, Any]) -> None:
    pass


def question(text: str = "hi", **more: Any) -> Question:
    return Question(Conversation().ask(text), **more)


# ---- the address -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://localhost:8080", "http://localhost:8080/v1"),
        ("http://localhost:8080/", "http://localhost:8080/v1"),
        ("http://localhost:8080/v1/", "http://localhost:8080/v1"),
        ("http://localhost:8080/v1/chat/completions", "http://localhost:8080/v1"),
        ("https://example.org/api/v1", "https://example.org/api/v1"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
    ],
)
def test_addresses_may_be_short(typed, base):
    assert base_url(typed) == base


@pytest.mark.parametrize(
    "typed", ["", "ftp://host", "http://", "http://host:port", "http://host:0", "http://a b", "a?b=1"]
)
def test_what_is_no_address_is_refused(typed):
    with pytest.raises(UsageError, match="is not the URL of a server") as caught:
        base_url(typed)
    assert "http://127.0.0.1:8080/v1" in caught.value.hint


# ---- the client ------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(endpoint: Endpoint) -> Iterator[Remote]:
    made = Remote(f"{endpoint.url}/v1")
    assert not made.is_open
    made.open()
    yield made
    made.close()
    assert not made.is_open


def test_the_model_of_the_server_answers(endpoint, remote):
    assert remote.model == "the pair"
    events: list[dict[str, Any]] = []
    endpoint.reasoning = ["Let me ", "think."]
    reply = remote.ask(question(max_tokens=9, sampling=Sampling(temperature=0.5, seed=7)), on_event=events.append)
    assert reply.text == "Hello, world."
    assert not reply.stopped
    assert [(event["event"], event["text"]) for event in events] == [
        ("reasoning", "Let me "),
        ("reasoning", "think."),
        ("token", "Hello"),
        ("token", ", "),
        ("token", "world."),
    ]
    assert endpoint.asked == [
        {
            "path": "/v1/chat/completions",
            "model": "the pair",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.95,
            "seed": 7,
            "messages": [{"role": "user", "content": "hi"}],
        }
    ]


def test_what_only_llama_cpp_knows_is_sent_where_it_was_changed(endpoint, remote):
    remote.ask(question(sampling=Sampling(min_p=0.2, repeat_penalty=1.1)), on_event=ignore)
    (asked,) = endpoint.asked
    assert {key: asked[key] for key in set(asked) & {"top_k", "min_p", "repeat_penalty", "repeat_last_n"}} == {
        "min_p": 0.2,
        "repeat_penalty": 1.1,
    }


def test_without_the_template_the_text_is_continued(endpoint, remote):
    talk = Conversation(system="Be terse.").ask("one ").reply("two").ask("three ")
    reply = remote.ask(Question(talk, chat=False), on_event=ignore)
    assert reply.text == "Hello, world."
    (asked,) = endpoint.asked
    assert asked["path"] == "/v1/completions"
    assert asked["prompt"] == "Be terse.\n\none two\nthree "


def test_figures_are_the_servers(endpoint, remote):
    endpoint.usage = {
        "prompt_tokens": 50,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 40},
        "completion_tokens_details": {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 4},
        "speculation": {"rounds": 8},
    }
    endpoint.more = {"timings": {"prompt_ms": 500.0, "predicted_ms": 2000, "draft_n": 16, "draft_n_accepted": 12}}
    took = remote.ask(question(), on_event=ignore).statistics
    assert (took.prompt_tokens, took.prompt_read, took.tokens) == (50, 10, 20)
    assert (took.prompt_s, took.decode_s) == (0.5, 2.0)
    assert (took.drafted, took.accepted, took.rounds, took.stop_reason) == (16, 12, 8, "end")
    assert took.time_to_first_token_s > 0
    endpoint.usage = {"prompt_tokens": 50, "completion_tokens": 20}
    took = remote.ask(question(), on_event=ignore).statistics
    assert (took.drafted, took.accepted) == (16, 12)  # of llama-server's timings
    endpoint.more = {}
    took = remote.ask(question(), on_event=ignore).statistics
    assert (took.drafted, took.prompt_read) == (0, 50)
    assert took.decode_s > 0  # as it came here


def test_a_server_that_counts_nothing_has_no_figures(endpoint, remote):
    endpoint.usage = {}
    reply = remote.ask(question(), on_event=ignore)
    assert (reply.text, reply.statistics) == ("Hello, world.", None)
    endpoint.usage = {"completion_tokens": "many", "prompt_tokens": None, "completion_tokens_details": [1]}
    assert remote.ask(question(), on_event=ignore).statistics is None


def test_stop_closes_the_stream_with_what_there_is(endpoint, remote):
    endpoint.open = True

    def hear(event: dict[str, Any]) -> None:
        if event["text"] == "world.":
            remote.stop()

    reply = remote.ask(question(), on_event=hear)
    assert (reply.text, reply.stopped) == ("Hello, world.", True)
    assert endpoint.left.wait(20)
    endpoint.open = False
    again = remote.ask(question(), on_event=ignore)
    assert (again.text, again.stopped) == ("Hello, world.", False)


def test_stop_ends_the_wait_for_a_server_that_is_silent():
    """By a signal, as Ctrl-C does it, while nothing comes: not even headers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, served(Endpoint("")) as endpoint:
        remote = Remote(f"{endpoint.url}/v1")
        remote.open()
        remote.url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        before = signal.signal(signal.SIGINT, lambda *_: remote.stop())

        def interrupt() -> None:
            connection, _ = silent.accept()
            connection.recv(1)  # it has been asked
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            reply = remote.ask(question(), on_event=ignore)
        finally:
            signal.signal(signal.SIGINT, before)
            thread.join()
            remote.close()
        assert (reply.text, reply.stopped, reply.statistics) == ("", True, None)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_nothing_answers():
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    with pytest.raises(GgufspecError, match=f"nothing answers at http://127.0.0.1:{port}/v1") as caught:
        Remote(f"http://127.0.0.1:{port}/v1").open()
    assert "ggufspec serve" in caught.value.hint


def test_keys(endpoint):
    endpoint.key = "sesame"
    with pytest.raises(GgufspecError, match="asks for an API key") as caught:
        Remote(f"{endpoint.url}/v1").open()
    assert "--api-key KEY, or GGUFSPEC_API_KEY" in caught.value.hint
    with pytest.raises(GgufspecError, match="does not take this API key"):
        Remote(f"{endpoint.url}/v1", "wrong").open()
    with pytest.raises(UsageError, match="no header takes"):
        Remote(f"{endpoint.url}/v1", "a\nb").open()
    remote = Remote(f"{endpoint.url}/v1", "sesame")
    remote.open()
    assert remote.ask(question(), on_event=ignore).text == "Hello, world."
    remote.close()


def models(*names: str) -> Callable[[Request], Any]:
    async def answer(_: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in names]})

    return answer


async def redirect(_: Request) -> Response:
    return RedirectResponse("https://elsewhere.example/v1/models")


async def page(_: Request) -> Response:
    return PlainTextResponse("<html>Sign in</html>")


async def loading(_: Request) -> Response:
    return JSONResponse({"error": {"message": "Loading model", "code": 503}}, 503)


async def missing(_: Request) -> Response:
    return PlainTextResponse("Not Found", 404)


async def odd(_: Request) -> Response:
    return JSONResponse({"data": 7})


@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        (models("a", "b"), "has 2 models", "--served-model a, or b"),
        (models(), "has no model", "--served-model NAME"),
        (redirect, "moves to https://elsewhere.example", "if it is yours"),
        (page, "does not answer with a list of models", "--url has the base URL"),
        (odd, "does not answer with a list of models", "--url has the base URL"),
        (loading, "is busy or not ready: Loading model", "in a moment"),
        (missing, r"/v1/models is not there \(404\)", "--url has the base URL"),
    ],
)
def test_what_is_no_such_server_is_named(endpoint, answer, words, hint):
    endpoint.app.router.routes.insert(0, Route("/v1/models", answer))
    with pytest.raises(GgufspecError, match=words) as caught:
        Remote(f"{endpoint.url}/v1").open()
    assert hint in caught.value.hint


def test_one_of_several_models(endpoint):
    endpoint.app.router.routes.insert(0, Route("/v1/models", models("a", "b")))
    remote = Remote(f"{endpoint.url}/v1", model="b")
    assert remote.open().target.description == "b"
    remote.ask(question(), on_event=ignore)
    assert endpoint.asked[0]["model"] == "b"
    remote.close()
    with pytest.raises(UsageError, match="has no model 'c'"):
        Remote(f"{endpoint.url}/v1", model="c").open()


def test_a_refusal_has_the_servers_words(endpoint, remote):
    endpoint.fault = (400, "the prompt has 9,000 tokens", "shorten it")
    with pytest.raises(GgufspecError, match="the prompt has 9,000 tokens") as caught:
        remote.ask(question(), on_event=ignore)
    assert caught.value.hint == "shorten it"
    endpoint.fault = (500, "", "")
    with pytest.raises(GgufspecError, match="answers with status 500"):
        remote.ask(question(), on_event=ignore)


def refusing(status: int, body: dict[str, Any], field: str = "") -> Callable[[Request], Any]:
    """A server that answers so to requests with a field, or to all."""

    async def answer(request: Request) -> Response:
        asked = await request.json()
        if field and field not in asked:
            done = {"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]}
            return PlainTextResponse(f"data: {json.dumps(done)}\n\ndata: [DONE]\n\n")
        return JSONResponse(body, status)

    return answer


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"object": "error", "message": "roles must alternate"}, "^roles must alternate$"),
        (400, {"detail": "roles must alternate"}, "^roles must alternate$"),
        (400, {"error": "roles must\x1b alternate"}, "^roles must. alternate$"),
        (422, {"detail": [{"loc": ["body", "messages", 0], "msg": "too long"}]}, "^body.messages.0: too long$"),
        (422, {"detail": [7, {"loc": 3}]}, "422|:"),
        (422, {"message": {"detail": [{"loc": ["body", "n"], "msg": "too many"}]}}, "^body.n: too many$"),
        (400, {"error": {"message": None}}, "answers with status 400"),
        (400, {"message": "temperature: at most 2"}, "^temperature: at most 2$"),  # which is not left out
        (400, {"message": "messages: extra inputs are not permitted"}, "^messages: extra"),
    ],
)
def test_errors_of_other_forms_are_shown(endpoint, remote, status, body, words):
    endpoint.app.router.routes.insert(0, Route("/v1/chat/completions", refusing(status, body), methods=["POST"]))
    with pytest.raises(GgufspecError, match=words):
        remote.ask(question(), on_event=ignore)


@pytest.mark.parametrize(
    ("status", "body", "field"),
    [
        (
            422,
            {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]},
            "stream_options",
        ),
        (400, {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported"}}, "max_tokens"),
        (400, {"message": "seed: unexpected field"}, "seed"),
    ],
)
def test_a_field_that_a_server_does_not_take_is_left_out(endpoint, remote, status, body, field):
    endpoint.app.router.routes.insert(0, Route("/v1/chat/completions", refusing(status, body, field), methods=["POST"]))
    first, second = (remote.ask(question(), on_event=ignore) for _ in range(2))
    assert (first.text, second.text) == ("Hello", "Hello")
    assert first.notes == (f"the server does not take {field}: it was left out",)
    assert second.notes == ()


def test_fields_that_are_refused_one_after_another(endpoint, remote):
    """As OpenAI's own servers do it; the newer name of a limit keeps the limit."""

    async def strict(request: Request) -> Response:
        asked = await request.json()
        endpoint.asked.append(asked)
        if "max_tokens" in asked:
            said = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
            return JSONResponse({"error": {"message": said}}, 400)
        for name in ("stream_options", "seed", "top_p"):
            if name in asked:
                return PlainTextResponse(f"unknown field {name}", 400)
        done = {"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "length"}]}
        return PlainTextResponse(f"data: {json.dumps(done)}\n\n")

    endpoint.app.router.routes.insert(0, Route("/v1/chat/completions", strict, methods=["POST"]))
    reply = remote.ask(question(max_tokens=9), on_event=ignore)
    assert reply.text == "Hello"
    assert [note.split()[5] for note in reply.notes] == ["stream_options:", "seed:", "top_p:"]
    assert endpoint.asked[-1]["max_completion_tokens"] == 9
    assert len(endpoint.asked) == 5
    assert remote.ask(question(), on_event=ignore).notes == ()
    assert len(endpoint.asked) == 6


def test_a_stream_without_its_end_is_no_answer(endpoint, remote):
    async def cut(_: Request) -> Response:
        part = {"choices": [{"index": 0, "delta": {"content": "par"}, "finish_reason": None}]}
        return PlainTextResponse(f"data: {json.dumps(part)}\n\n")

    endpoint.app.router.routes.insert(0, Route("/v1/chat/completions", cut, methods=["POST"]))
    with pytest.raises(GgufspecError, match="the answer broke off: the connection was closed"):
        remote.ask(question(), on_event=ignore)


def test_an_answer_that_breaks_off(endpoint, remote):
    endpoint.late_fault = "the child process ended"
    with pytest.raises(GgufspecError, match="the answer broke off: the child process ended"):
        remote.ask(question(), on_event=ignore)


def test_a_server_that_does_not_stream(endpoint, remote):
    endpoint.app.router.routes.insert(0, Route("/v1/chat/completions", page, methods=["POST"]))
    with pytest.raises(GgufspecError, match="not a stream of events"):
        remote.ask(question(), on_event=ignore)


# ---- the chat --------------------------------------------------------------------------------------------------------


@pytest.fixture
def talk(endpoint: Endpoint) -> Iterator[Talk]:
    @contextlib.contextmanager
    def idle() -> Iterator[Callable[[str], None]]:
        yield lambda _: None

    out, err = Console(theme=markdown.THEME, highlight=False), Console(stderr=True, highlight=False)
    screen = Screen(out, err, lambda text: err.print(text, soft_wrap=True), idle, False)
    remote = Remote(f"{endpoint.url}/v1")
    made = Talk(remote, Switches(has_draft=False), screen, name=remote.url, about={"url": remote.url})
    made.open()
    yield made
    made.close()


def test_a_conversation_goes_on(endpoint, talk, capsys, tmp_path):
    endpoint.usage |= {"completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 2}}
    take(talk, "/system Be terse.")
    take(talk, "/temp 0.7")
    take(talk, "/seed 5")
    take(talk, "/length 33")
    take(talk, "one")
    out, err = capsys.readouterr()
    assert out == "Hello, world.\n"
    assert "3 tokens, " in err
    assert "50% accepted" in err
    assert "tokens/round" not in err  # it does not say
    take(talk, "two")
    (_, asked) = endpoint.asked
    assert asked["messages"] == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello, world."},
        {"role": "user", "content": "two"},
    ]
    assert (asked["temperature"], asked["seed"], asked["max_tokens"]) == (0.7, 5, 33)
    take(talk, "/undo")
    take(talk, "/retry")
    assert [one["content"] for one in endpoint.asked[2]["messages"]] == ["Be terse.", "one"]
    take(talk, f"/save {tmp_path / 'talk.json'}")
    take(talk, "/clear")
    assert talk.turns == 0
    take(talk, f"/load {tmp_path / 'talk.json'}")
    assert talk.turns == 1
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["pair"] == {"url": f"{endpoint.url}/v1", "model": "the pair"}
    assert saved["settings"]["temperature"] == 0.7
    take(talk, "/chat off")
    take(talk, "three")
    assert endpoint.asked[3]["path"] == "/v1/completions"


@pytest.mark.parametrize(
    "typed",
    [
        "/speculative",
        "/target",
        "/draft",
        "/drafter lookup",
        "/draft-max 4",
        "/compare hi",
        "/gamma 4",
        "/ngram on",
        "/accept exact",
        "/cache off",
        "/debug on",
        "/tint on",
    ],
)
def test_what_the_server_decides_is_said(talk, endpoint, typed):
    with pytest.raises(UsageError, match="the server decides that"):
        take(talk, typed)
    assert endpoint.asked == []


def test_settings_and_status_are_those_of_the_server(talk, endpoint, capsys):
    take(talk, "hi")
    take(talk, "/settings")
    shown = capsys.readouterr().err
    assert "the pair" in shown
    assert endpoint.url in shown
    assert "/draft-max" not in shown
    assert "/top-k" in shown
    assert "8 tokens" in shown
    assert talk.status() == [("the pair", False), ("8 tokens", False), ("greedy", False)]
    talk.greet()
    assert f"the pair at {endpoint.url}/v1" in capsys.readouterr().err


def test_a_failure_leaves_the_conversation(talk, endpoint):
    take(talk, "one")
    endpoint.fault = (503, "the queue is full", "")
    with pytest.raises(GgufspecError, match="the queue is full"):
        take(talk, "two")
    assert talk.turns == 1
    endpoint.fault = None
    take(talk, "two")
    assert talk.turns == 2


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(talk, endpoint, capsys):
    endpoint.open = True

    def interrupt() -> None:
        assert eventually(lambda: endpoint.asked)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    take(talk, "one")
    thread.join()
    assert talk.stopped
    assert endpoint.left.wait(20)
    endpoint.open = False
    assert talk.turns <= 1  # as far as it came
    before = talk.turns
    take(talk, "two")
    assert talk.turns == before + 1
    assert "Hello, world." in capsys.readouterr().out


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_answers_lines(endpoint, cli: Cli):
    endpoint.key = "sesame"
    lines = "one\n/length 5\ntwo\n"
    done = cli("chat", "--url", endpoint.url, "--json", "--temp", "0.5", stdin=lines, GGUFSPEC_API_KEY="sesame")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["pair"] == {"url": f"{endpoint.url}/v1", "model": "the pair"}
    assert [turn["answer"] for turn in document["turns"]] == ["Hello, world."] * 2
    assert [asked["max_tokens"] for asked in endpoint.asked] == [512, 5]
    assert [asked["temperature"] for asked in endpoint.asked] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [(("demo",), "PAIR"), (("-m", "a.gguf"), "-m"), (("-ngl", "4"), "-ngl"), (("--no-draft",), "--no-draft")],
)
def test_what_the_server_has_is_not_given_too(cli: Cli, arguments, what):
    done = cli("chat", *arguments, "--url", "http://127.0.0.1:1", stdin="hi\n")
    assert done.code == 2
    assert f"both --url and {what} are given" in done.stderr


def test_a_server_that_is_not_there_ends_the_command(cli: Cli):
    done = cli("chat", "--url", "http://127.0.0.1:9", stdin="hi\n")
    assert done.code == 1
    assert "nothing answers at http://127.0.0.1:9/v1" in done.stderr
    done = cli("chat", "--served-model", "x", stdin="hi\n")
    assert done.code == 2


def test_a_terminal_shows_nothing_that_a_server_could_do_harm_with(endpoint, cli: Cli):
    endpoint.pieces = [HOSTILE]
    session = Session(cli.terminal("chat", "--url", endpoint.url, "--no-markdown"))
    try:
        session.until("the pair at")
        session.say("hi")
        session.until("␛[31m")
        session.say("/gamma 4")
        session.until("the server decides that")
        session.say("/quit")
        session.end()
    finally:
        session.child.close(force=True)
