"""llama.cpp's own expectations of chats and schemas, read from its source; and real answers under its templates."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.llamacpp.chat_library import AppliedTemplate, ChatError, CompiledTemplate
from ggufspec.llamacpp.chat_template import ChatTemplate, TemplateOptions
from ggufspec.llamacpp.grammar import compile_grammar, schema_to_grammar
from ggufspec.llamacpp.model import Model
from ggufspec.serve import session
from ggufspec.serve.reading import AnswerReading
from tests.support.chat_templates import NOTE, WEATHER
from tests.support.peer_cases import Case, ChatCases, Message, as_request, schema_texts, tool

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def peer() -> Path:
    """llama.cpp's source, of the version that is installed."""
    done = subprocess.run([ROOT / "scripts" / "peers", "--source"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"llama.cpp's source cannot be had: {done.stderr.splitlines()[-1:]}")
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def templates(peer: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((peer / "models" / "templates").glob("*.jinja"))}


# ---- parses ----------------------------------------------------------------------------------------------------------


def test_answers_are_read_as_llama_cpp_reads_them(peer: Path, templates: dict[str, str]) -> None:
    """All but three, whose difference is of form: whole, letter by letter and cut in two."""
    compiled = {name: CompiledTemplate(source) for name, source in templates.items()}
    cases = ChatCases(peer).cases
    assert len(cases) >= 460
    wrong, cut = [], []
    for case in cases:
        made = compiled[case.template].apply(asked(case))
        whole = read(case, made, [case.text])
        if not alike(whole, case.expected):
            wrong.append((case.template, case.line, whole, case.expected))
        for pieces in (list(case.text), *halves(case.text)):
            if without_ids(read(case, made, pieces)) != without_ids(whole):  # some come behind their call
                cut.append((case.template, case.line, pieces))
                break
    assert len(cases) - len(wrong) >= 460, wrong
    assert not cut, cut


def halves(text: str) -> Iterator[list[str]]:
    step = max(1, len(text) // 40)
    for place in range(1, len(text), step):
        yield [text[:place], text[place:]]


def asked(case: Case) -> dict[str, Any]:
    more = case.more
    goes_on = more.get("continue_final_message", "COMMON_CHAT_CONTINUATION_NONE") != "COMMON_CHAT_CONTINUATION_NONE"
    request = {
        "messages": [as_request(one) for one in more.get("messages", [])]
        or [{"role": "user", "content": "Hey there!"}],
        "json_schema": more.get("json_schema", ""),
        "continue": goes_on,
        "enable_thinking": more.get("enable_thinking", True),
        "reasoning_format": case.wish("reasoning_format", "COMMON_REASONING_FORMAT_", "NONE"),
        "parallel_tool_calls": bool(more.get("parallel_tool_calls")),
        "tool_choice": case.wish("tool_choice", "COMMON_CHAT_TOOL_CHOICE_", "AUTO"),
        "options": {},
    }
    tools = [one if isinstance(one, dict) else tool(*one[:3]) for one in more.get("tools", [])]
    return request | ({"tools": tools} if tools else {})


def read(case: Case, made: AppliedTemplate, pieces: list[str]) -> Message:
    form = case.wish("reasoning_format", "COMMON_REASONING_FORMAT_", "NONE")
    made = AppliedTemplate("", reading={**made.reading, "reasoning_format": form})
    reading = AnswerReading(made, tools=bool(case.more.get("tools")), clock=lambda: 0.0, make_id=lambda: "")
    deltas = [one for piece in pieces for one in reading.push(piece)]
    deltas += [] if case.more.get("is_partial") else reading.finish()
    calls: dict[int, list[str]] = {}
    for one in deltas:
        if one.call >= 0:
            known = calls.setdefault(one.call, ["", "", ""])
            for place, text in enumerate((one.name, one.arguments, one.id)):
                known[place] += text
    found = [(name, arguments, id_) for name, arguments, id_ in calls.values()]
    return Message("".join(one.content for one in deltas), "".join(one.reasoning for one in deltas), found)


def without_ids(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [one[:2] for one in message.calls]


def alike(found: Message, wanted: Message) -> bool:
    return (
        found.content.strip() == wanted.content.strip()
        and found.reasoning.strip() == wanted.reasoning.strip()
        and len(found.calls) == len(wanted.calls)
        and all(
            one[0] == other[0] and same(one[1], other[1]) for one, other in zip(found.calls, wanted.calls, strict=True)
        )
    )


def same(found: str, wanted: str) -> bool:
    try:
        return bool(json.loads(found or "{}") == json.loads(wanted or "{}"))
    except ValueError:  # of an answer that is still being written
        return wanted.startswith(found)


# ---- schemas ---------------------------------------------------------------------------------------------------------


def test_texts_follow_a_schema_or_do_not(peer: Path, target: Path) -> None:
    cases = schema_texts(peer)
    assert sum(len(one.passes) + len(one.fails) for one in cases) >= 360
    wrong = []
    with Model(target, vocab_only=True) as model:
        for case in cases:
            grammar = compile_grammar(model, schema_to_grammar(case.text) if case.kind == "schema" else case.text)
            for texts, right in ((case.passes, True), (case.fails, False)):
                wrong += [(case.name, text, right) for text in texts if accepts(grammar, model, text) != right]
    assert not wrong, wrong


def accepts(grammar: Any, model: Model, text: str) -> bool:
    state = grammar.start()
    for token in model.tokenize(text, start=False):
        state = None if state is None else grammar.advance(state, token)
    end = next(token for token in range(model.vocab_size) if model.is_end(token))
    return state is not None and grammar.permits(state, end)


# ---- templates -------------------------------------------------------------------------------------------------------

USER, ANSWER, SYSTEM = ({"role": role, "content": role} for role in ("user", "assistant", "system"))
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "note", "arguments": '{"text": "x"}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": "done"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], TemplateOptions]] = {
    "a question": ([USER], TemplateOptions()),
    "with a system prompt": ([SYSTEM, USER, ANSWER, USER], TemplateOptions()),
    "a developer's": ([{**SYSTEM, "role": "developer"}, USER], TemplateOptions()),
    "without thinking": ([USER], TemplateOptions(options={"enable_thinking": False})),
    "with tools": ([SYSTEM, USER], TemplateOptions((WEATHER, NOTE))),
    "a tool's result": ([USER, CALLED, RESULT], TemplateOptions((WEATHER, NOTE))),
    "behind a result": ([USER, CALLED, RESULT, ANSWER, USER], TemplateOptions((WEATHER, NOTE))),
    "a reasoning": ([USER, {**ANSWER, "reasoning_content": "Hm."}, USER], TemplateOptions()),
    "two questions": ([USER, USER], TemplateOptions()),
    "an instruction in the middle": ([USER, ANSWER, SYSTEM, USER], TemplateOptions()),
    "control tokens' text": (
        [{"role": "user", "content": "a<|im_end|></s><end_of_turn>\n"}, ANSWER, USER],
        TemplateOptions(),
    ),
    "nothing but white space": ([{"role": "user", "content": " \n"}], TemplateOptions()),
    "a schema": ([USER], TemplateOptions(json_schema='{"type": "object"}')),
}


def test_what_llama_cpp_renders_is_rendered(templates: dict[str, str], smollm2: Path) -> None:
    """The same prompt through our prompter: marks, mends and all."""
    refused = []
    with Model(smollm2, vocab_only=True) as model:
        for name, source in templates.items():
            try:
                template = ChatTemplate(source, datetime(2026, 11, 26, 12))
            except ModelError:
                with pytest.raises(ChatError):
                    CompiledTemplate(source)
                continue
            from ggufspec.prompting.prompt import Prompter
            from ggufspec.prompting.workarounds import TokenizedMessage as Said

            for what, (messages, wishes) in CONVERSATIONS.items():
                said = [
                    Said(m["role"], m["content"], more={k: v for k, v in m.items() if k not in ("role", "content")})
                    for m in messages
                ]
                try:
                    expected = template.apply(messages, wishes).prompt
                except GgufspecError:
                    continue
                try:
                    ids, made = Prompter(model, template).of_messages(said, wishes)
                except GgufspecError as error:
                    refused.append((name, what, error.message))
                    continue
                lost = "system" in (m["role"] for m in messages) and "system" not in expected
                text = b"".join(model.piece(token, special=True) for token in ids).decode()
                assert lost or made.prompt == expected == text, (name, what)
    assert not refused, refused


# ---- real answers ----------------------------------------------------------------------------------------------------


OPTIONS = DecoderOptions(
    ctx_size=8192,
    threads=1,
    flash_attn="off",  # half the time for batches of so small a model
    drafters=("lookup",),
    draft_policy="fixed",
    draft_max=3,
    strict=True,
)


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(smollm2, None, OPTIONS) as found:
        yield found


def answer(loaded: session.ServePair, wishes: TemplateOptions, *, most: int = 100) -> tuple[str, list[dict[str, Any]]]:
    """Its stop reason and its deltas."""
    events: list[dict[str, Any]] = []
    asked = ({"role": "user", "content": "What is the weather in Oslo for 3 days? Keep a note of it."},)
    loaded.begin(0, session.ServeRequest(asked, wishes, max_tokens=most), events.append, threading.Event())
    while not (ended := loaded.step()):
        pass
    ((_, reply),) = ended
    assert isinstance(reply, session.ServeReply), reply
    deltas = [one for event in events if event["event"] == "round" for one in event["deltas"]]
    return reply.statistics.stop_reason, deltas


def joined(deltas: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: dict[int, list[str]] = {}
    for one in deltas:
        if "call" in one:
            known = calls.setdefault(one["call"], ["", ""])
            known[0] += one.get("name", "")
            known[1] += one.get("arguments", "")
    texts = ["".join(one.get(kind, "") for one in deltas) for kind in ("content", "reasoning")]
    return texts[0], texts[1], [(name, arguments) for name, arguments in calls.values()]


NO_THINKING = {"enable_thinking": False}
FORCED = TemplateOptions((WEATHER, NOTE), must_call=True, function="get_weather", parallel=False, options=NO_THINKING)
FREE = TemplateOptions((WEATHER, NOTE), options=NO_THINKING)


def outcome(stop: str, deltas: list[dict[str, Any]]) -> str:
    """What came of a call that must be made."""
    *_, calls = joined(deltas)
    if stop == "length":  # it reasons first, as its template has it
        return "unfinished"
    try:
        ((called, arguments),) = calls
        given = json.loads(arguments)
    except ValueError:
        return f"not read: {deltas}"
    valid = called == "get_weather" and isinstance(given["city"], str) and given["days"] in range(1, 10)
    return "called" if valid else f"not valid: {calls}"


def test_calls_are_forced_and_free_under_every_template(templates: dict[str, str], decoder: SpeculativeDecoder) -> None:
    """A call that must be made is made, valid and read; every sixth without drafts gives the same."""
    found, differ = {}, []
    for number, (name, source) in enumerate(templates.items()):
        loaded = session.ServePair(decoder, source)
        texts = []
        for drafters in (("lookup",), ())[: 2 if number % 6 == 0 else 1]:
            decoder.configure(drafters=drafters)
            try:
                stop, deltas = answer(loaded, FORCED)
            except (ModelError, UsageError) as error:
                found[name] = error.message
                continue
            found[name] = outcome(stop, deltas)
            free = answer(loaded, FREE, most=24)[1] if number % 6 == 0 else []
            texts.append((joined(deltas), joined(free)))
        if number % 6 == 0 and texts[:1] != texts[1:]:
            differ.append((name, texts))
    called = sum(one == "called" for one in found.values())
    unread = {name: one for name, one in found.items() if one.startswith("not ")}
    assert called >= 34, found  # others reason first, whatever they are told, and a tiny model does not end
    assert len(unread) <= 5, unread  # families whose arguments are free text: a tiny model's never end
    assert not differ, differ
