"""llama.cpp's chat library through its C functions: prompts, constraints, answers however they come, and without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec import child
from ggufspec.decoding.grammar import GrammarPath
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.llamacpp import chat_library
from ggufspec.llamacpp.chat_library import AppliedTemplate, MessageDelta
from ggufspec.llamacpp.chat_template import ChatTemplate, TemplateOptions
from ggufspec.llamacpp.grammar import LazyGrammar, check_schema, compile_grammar, schema_to_grammar
from ggufspec.llamacpp.model import Model
from ggufspec.serve.reading import AnswerReading
from tests.support import jobs_template
from tests.support.chat_templates import BARE, HERMES, NOTE, OPENED, THINKING, WEATHER, tool

NOW = datetime(2026, 11, 26, 12)
ASKED = [{"role": "user", "content": "What is it like in Oslo?"}]
TOOLS = (WEATHER, NOTE)
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln </tool_call> \\"x\\"", "days": 2}}\n</tool_call>'
)
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}'
SECOND = '<tool_call>\n{"name": "note", "arguments": {"text": "a; b"}}\n</tool_call>'
WANTED = ("get_weather", {"city": 'Köln </tool_call> "x"', "days": 2})


def applied(wishes: TemplateOptions = TemplateOptions(), source: str = THINKING) -> AppliedTemplate:
    return ChatTemplate(source, NOW).apply(ASKED, wishes)


def read(pieces: list[str], made: AppliedTemplate) -> list[MessageDelta]:
    reading = AnswerReading(made, tools=True, clock=lambda: 0.0, make_id=lambda: "abcdefghi")
    return [one for piece in pieces for one in reading.push(piece)] + reading.finish()


def message(deltas: list[MessageDelta]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning, and calls, of which each has one id and a name that came whole."""
    calls: dict[int, list[MessageDelta]] = {}
    for one in deltas:
        if one.call >= 0:
            calls.setdefault(one.call, []).append(one)
    for parts in calls.values():
        assert [bool(one.id) and bool(one.name) for one in parts] == [True] + [False] * (len(parts) - 1)
    found = [(parts[0].name, json.loads("".join(one.arguments for one in parts))) for parts in calls.values()]
    return "".join(one.content for one in deltas), "".join(one.reasoning for one in deltas), found


# ---- answers ---------------------------------------------------------------------------------------------------------

ANSWERS = [
    ("Hello.", "Hello.", "", []),
    ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Yes.", "Hm, 1 < 2.", []),
    (CALL, "", "", [WANTED]),
    (f"I look.\n{CALL}\n{SECOND}", "I look.", "", [WANTED, ("note", {"text": "a; b"})]),
    (f"<think>\nHm.\n</think>\n\n{CALL}", "", "Hm.", [WANTED]),
    ("Write <tool and see", "Write <tool and see", "", []),
]


@pytest.mark.parametrize(("answer", "content", "reasoning", "calls"), ANSWERS)
def test_an_answer_is_read_however_it_is_cut(answer: str, content: str, reasoning: str, calls: list[Any]) -> None:
    made = applied(TemplateOptions(TOOLS, parallel=True))
    cuts = [[answer], list(answer), *([answer[:place], answer[place:]] for place in range(1, len(answer), 7))]
    for pieces in cuts:
        found = message(read(pieces, made))
        assert (found[0].strip(), found[1].strip(), found[2]) == (content, reasoning, calls)


@given(st.lists(st.sampled_from(["a", " ", "\n", "<tool_call>", "</tool_call>", '{"name": ', "<think>", "é"])))
def test_an_answer_without_its_form_loses_nothing(pieces: list[str]) -> None:
    """However it breaks off, something of it comes back, in the order of the text."""
    text = "".join(pieces)
    content, reasoning, calls = message(read(pieces, applied(TemplateOptions(TOOLS))))
    assert bool((content + reasoning).strip() or calls) == bool(
        text.replace("<think>", "").strip() or "<think>" in text
    )
    assert content.strip() in text
    assert reasoning.strip() in text


BARE_CALL = '{"name": "note", "parameters": {"text": "a; b"}}'
BROKEN = [  # answers of a template whose calls have no marks
    (BARE_CALL, "", True),
    (f"{BARE_CALL}; {BARE_CALL}", f"; {BARE_CALL}", True),
    (f"{BARE_CALL} and so on", "and so on", True),
    (f"Sure: {BARE_CALL} Bye", "Sure: Bye", True),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', False),
    ('{"type": "note", "text": "a"}', '{"type": "note", "text": "a"}', False),
]


@pytest.mark.parametrize(("answer", "content", "calls"), BROKEN)
def test_a_call_is_whole_whatever_is_behind_it(answer: str, content: str, calls: bool) -> None:
    """However the answer comes, and however seldom it is read."""
    made = applied(TemplateOptions(TOOLS), BARE)
    assert not made.grammar
    wanted = (content, "", [("note", {"text": "a; b"})] if calls else [])
    for pieces in ([answer], list(answer), *([answer[:place], answer[place:]] for place in range(1, len(answer), 5))):
        assert message(read(pieces, made)) == wanted
    now = iter(float(number) for number in range(100_000))
    reading = AnswerReading(made, tools=True, clock=lambda: next(now), make_id=lambda: "abcdefghi")
    assert message([one for letter in answer for one in reading.push(letter)] + reading.finish()) == wanted


def test_what_is_read_seldom_is_read_whole() -> None:
    """Reading takes a small share of the time; what was held back meanwhile comes at the end."""
    now = iter(float(number) for number in range(10_000))
    reading = AnswerReading(applied(), clock=lambda: next(now))
    found = [one for letter in "abc" * 20 for one in reading.push(letter)]
    assert 0 < len(found) < 20
    assert "".join(one.content for one in [*found, *reading.finish()]) == "abc" * 20


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_a_call_that_must_be_made_is_all_that_the_grammar_permits(target: Path) -> None:
    with Model(target, vocab_only=True) as model:
        for wishes, name in (
            (TemplateOptions(TOOLS, must_call=True), "note"),
            (TemplateOptions(TOOLS, True, "note"), "note"),
        ):
            grammar = compile_grammar(model, applied(wishes, HERMES))
            assert follows(
                grammar, model, f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "x"}}}}\n</tool_call>'
            )
            assert not follows(grammar, model, "Well, ")
        assert not follows(grammar, model, '<tool_call>\n{"name": "get_weather"')  # another one is named
        assert not follows(grammar, model, '<tool_call>\n{"name": "note", "arguments": {"text": "a\nb"')


def test_a_template_that_cannot_force_says_so() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    with pytest.raises(UsageError, match="no call can be forced"):
        ChatTemplate(plain, NOW).apply(ASKED, TemplateOptions(TOOLS, must_call=True))
    free = ChatTemplate(plain, NOW).apply(ASKED, TemplateOptions(TOOLS))
    assert not free.grammar
    assert message(read([f"Hm. {SECOND}"], free)) == (f"Hm. {SECOND}", "", [])


def test_what_templates_of_others_use() -> None:
    source = (
        "{%- set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}{{ ns.n }} "
        '{{ {"ö": [1]} | tojson(ensure_ascii=False) }} {{ [1] | tojson(indent=2) }} {{ strftime_now("%Y-%m-%d") }}'
    )
    said = [{"role": "user", "content": text} for text in "abc"]
    made = ChatTemplate(source, NOW).apply(said, TemplateOptions())
    begin = 'a;b;2 {"ö": [1]} [\n  1\n] '
    assert made.prompt.startswith(begin)
    assert datetime.strptime(made.prompt.removeprefix(begin), "%Y-%m-%d")


def test_a_schema_binds_behind_the_reasoning(target: Path) -> None:
    made = applied(TemplateOptions(json_schema=SCHEMA))
    with Model(target, vocab_only=True) as model:
        grammar = compile_grammar(model, made)
        assert follows(grammar, model, '{"a": 1}')
        assert not follows(grammar, model, '{"b"')
    assert message(read(['{"a": 1}'], made))[:2] == ('{"a": 1}', "")


@pytest.mark.parametrize(
    ("wishes", "held"), [(TemplateOptions(json_schema=SCHEMA), '{"a": 1}'), (TemplateOptions(TOOLS, True), SECOND)]
)
def test_what_binds_an_answer_binds_behind_a_reasoning_that_the_prompt_opens(
    target: Path, wishes: TemplateOptions, held: str
) -> None:
    made = applied(wishes, OPENED)
    with Model(target, vocab_only=True) as model:
        grammar = compile_grammar(model, made)
        for answer, may_follow in ((held, True), ('{"b"', False), ("Well", False)):
            assert follows(grammar, model, f"Hm, {{.\n</think>\n\n{answer}") is may_follow


def test_a_schema_that_cannot_be_held_is_refused() -> None:
    with pytest.raises(UsageError, match="pattern"):
        check_schema(json.dumps({"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=a)b$"}}}))


def test_classes_of_patterns_are_ranges(target: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"zip": {"type": "string", "pattern": r"^\d{5}[\w-]$"}},
        "required": ["zip"],
    }
    with Model(target, vocab_only=True) as model:
        grammar = compile_grammar(model, schema_to_grammar(json.dumps(schema)))
        assert follows(grammar, model, '{"zip": "01234-"}')
        assert not follows(grammar, model, '{"zip": "0123a')


def test_classes_of_patterns_are_ranges_in_a_tool_too(target: Path) -> None:
    """The prompt has the tool as it was given."""
    found = tool("post", zip={"type": "string", "pattern": r"^\d{2}$"})
    made = applied(TemplateOptions((found,), must_call=True), HERMES)
    assert r"^\\d{2}$" in made.prompt
    begin = '<tool_call>\n{"name": "post", "arguments": {"zip": '
    with Model(target, vocab_only=True) as model:
        grammar = compile_grammar(model, made)
        assert follows(grammar, model, f'{begin}"01"}}}}\n</tool_call>')
        assert not follows(grammar, model, f'{begin}"0a')


def test_an_answer_that_goes_on_has_only_what_follows() -> None:
    said = [*ASKED, {"role": "assistant", "content": "It is"}]
    made = ChatTemplate(HERMES, NOW).apply(said, TemplateOptions(goes_on=True))
    assert made.prompt.endswith("It is")
    reading = AnswerReading(made, goes_on=True, clock=lambda: 0.0)
    found = [one for piece in (" col", "d.") for one in reading.push(piece)] + reading.finish()
    assert "".join(one.content for one in found) == " cold."


def follows(grammar: Any, model: Model, text: str) -> bool:
    state = grammar.start()
    for token in model.tokenize(text, start=False):
        state = None if state is None else grammar.advance(state, token)
    return state is not None


# ---- grammars that begin later ---------------------------------------------------------------------------------------


@pytest.fixture
def lazy(target: Path) -> Iterator[tuple[Model, LazyGrammar]]:
    made = applied(TemplateOptions(TOOLS))
    assert made.lazy
    with Model(target, vocab_only=True) as model:
        grammar = compile_grammar(model, made)
        assert isinstance(grammar, LazyGrammar)
        yield model, grammar


def test_a_lazy_grammar_binds_from_its_trigger_on(lazy: tuple[Model, LazyGrammar]) -> None:
    model, grammar = lazy
    path = GrammarPath(grammar)
    path.begin(5)
    free, begun = (model.tokenize(text, start=False) for text in ("I look. ", "<tool_call>\n"))
    path.follow(free + begun)
    for place in range(len(free) + 1):
        assert grammar.is_free(path.state(5 + place))
    bound = path.state(5 + len(free) + len(begun))
    assert bound is not None
    assert not grammar.is_free(bound)
    letter, brace = model.tokenize("x", start=False)[-1], model.tokenize("{", start=False)[-1]
    assert grammar.permits(bound, brace)
    assert not grammar.permits(bound, letter)
    path.follow([*free, letter])  # the drafted call is rejected: the text is free again
    assert path.permits(letter, 5 + len(free) + 1)


def test_nothing_triggers_within_a_reasoning(lazy: tuple[Model, LazyGrammar]) -> None:
    model, grammar = lazy
    state = grammar.start()
    for text, is_free in (("<think>\nI may <tool_call> it\n", True), ("</think>\n\n", True), ("<tool_call>\n", False)):
        for token in model.tokenize(text, start=False):
            state = grammar.advance(state, token)
            assert state is not None
        assert grammar.is_free(state) == is_free


def test_a_text_that_leaves_its_grammar_within_a_token_goes_on(lazy: tuple[Model, LazyGrammar]) -> None:
    """llama.cpp throws there, which would end the process."""
    model, grammar = lazy
    state = grammar.start()
    for token in model.tokenize("<tool_call", start=False):
        state = grammar.advance(state, token)
    other = next(
        token
        for token in range(model.vocab_size)
        if model.piece(token).startswith(b">") and len(model.piece(token)) > 1
    )
    state = grammar.advance(state, other)
    assert grammar.is_free(state)
    assert grammar.is_free(grammar.advance(state, model.tokenize("<tool_call>\n", start=False)[0]))


# ---- without it ------------------------------------------------------------------------------------------------------


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A path where the library would be."""
    path = tmp_path / "libchat.so"
    monkeypatch.setattr(chat_library, "library_path", lambda: path)
    chat_library.load_chat_library.cache_clear()
    yield path
    chat_library.load_chat_library.cache_clear()


def test_without_the_library_there_are_prompts_and_no_tools(absent: Path) -> None:
    said = [*ASKED, {"role": "assistant", "content": "Cold."}, {"role": "developer", "content": "Be brief."}]
    sandboxed = ChatTemplate(HERMES, NOW)
    assert sandboxed.render(said).endswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UsageError, match="tools, --json-schema and response_format") as raised:
        sandboxed.apply(said, TemplateOptions(TOOLS))
    assert raised.value.hint == "ggufspec doctor --chat-library"
    with pytest.raises(UsageError, match="tools, --json-schema and response_format"):
        schema_to_grammar('{"type": "object"}')


def test_with_and_without_it_a_prompt_is_the_same(absent: Path) -> None:
    said = [*ASKED, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "é <b>"}]
    without = ChatTemplate(HERMES, NOW).render(said)
    absent.symlink_to(_real_path())
    chat_library.load_chat_library.cache_clear()
    assert ChatTemplate(HERMES, NOW).render(said) == without


def test_a_library_that_cannot_be_opened_says_what_to_type(absent: Path) -> None:
    absent.write_bytes(b"no library")
    with pytest.raises(GgufspecError, match="cannot be opened") as raised:
        chat_library.load_chat_library()
    assert raised.value.hint == "ggufspec doctor --chat-library"


_real_path = chat_library.library_path


# ---- hostile templates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'x' | no_such_filter }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "\x00",
    ],
)
def test_a_hostile_template_costs_its_child_at_most(source: str) -> None:
    with pytest.raises(GgufspecError) as failed:
        child.call(jobs_template.__name__, jobs_template.Spec(source), jobs_template.Result)
    assert "Traceback" not in failed.value.message
    assert len(failed.value.message) < 600
