"""Tool calls and reasoning in answers' texts: every format, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.errors import UsageError
from ggufspec.llamacpp.grammar import check_grammar, check_schema
from ggufspec.serve.formats import FORMATS, Delta, Parser, forced, format_of, reasons, surrounded

BY_NAME = {row.name: row for _, row in FORMATS}
TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools>{% endif %}<tool_call>\n{}\n</tool_call><think>",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "llama3": '<|start_header_id|>{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}',
    "gpt-oss": "<|start|>assistant<|channel|>analysis<|message|>{{ tools }}",
}
CALL = '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}'
SECOND = '{"name": "now", "arguments": {}}'
WEATHER = ("get_weather", {"city": "Köln", "days": 2})
NOW = ("now", {})
XML = "<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
# (format, answer, content, reasoning, calls)
ANSWERS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", "", [WEATHER]),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{SECOND}\n</tool_call>", "", "", [WEATHER, NOW]),
    ("hermes", f"I look.\n<tool_call>\n{CALL}\n</tool_call>", "I look.", "", [WEATHER]),
    ("hermes", f"<think>\nHm.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", "", "Hm.", [WEATHER]),
    ("hermes", f"<tool_call>\n{XML}\n</tool_call>", "", "", [WEATHER]),
    ("hermes", "<think>a < b</think>\n\nYes, 1 <tool", "Yes, 1 <tool", "a < b", []),
    ("hermes", '<tool_call>\n{"name": broken\n</tool_call>', '<tool_call>\n{"name": broken\n</tool_call>', "", []),
    ("hermes", f"<tool_call>\n{CALL}", f"<tool_call>\n{CALL}", "", []),
    ("llama3", CALL.replace("arguments", "parameters"), "", "", [WEATHER]),
    ("llama3", "<|python_tag|>" + CALL.replace("arguments", "parameters"), "", "", [WEATHER]),
    ("llama3", "It is " + CALL, "It is " + CALL, "", []),
    ("llama3", '{"name": 1}', '{"name": 1}', "", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {SECOND}]", "", "", [WEATHER, NOW]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln", "days": 2}', "", "", [WEATHER]),
    ("mistral", f"Wait.[TOOL_CALLS][{CALL}]", "Wait.", "", [WEATHER]),
    ("mistral", "[TOOL_CALLS][oops", "[TOOL_CALLS][oops", "", []),
    ("mistral", "[TOO] long", "[TOO] long", "", []),
    (
        "gpt-oss",
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
            '<|constrain|>json<|message|>{"city": "Köln", "days": 2}'
        ),
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "gpt-oss",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        "",
        [NOW],
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        "Hm.",
        [],
    ),
    ("gpt-oss", "no channel at all", "no channel at all", "", []),
]
IDS = [f"{row[0]}-{number}" for number, row in enumerate(ANSWERS)]


def read(name: str, pieces: Iterable[str], **more: object) -> list[Delta]:
    numbers = itertools.count()
    given = {"tools": True, "reasoning": True, "new_id": lambda: f"call_{next(numbers)}", **more}
    parser = Parser(BY_NAME[name], **given)  # type: ignore[arg-type]
    return [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.finish()]


def summed(deltas: Iterable[Delta]) -> tuple[str, str, list[tuple[str, object]]]:
    found = list(deltas)
    content = "".join(one.text for one in found if one.kind == "content")
    reasoning = "".join(one.text for one in found if one.kind == "reasoning")
    calls: dict[int, list[str]] = {}
    for one in found:
        if one.kind == "tool":
            call = calls.setdefault(one.index, ["", ""])
            call[0] += one.name
            call[1] += one.arguments
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_known_by_their_marks(name: str) -> None:
    found = format_of(TEMPLATES[name])
    assert found is not None
    assert found.name == name
    assert reasons(TEMPLATES[name]) is (name in ("hermes", "gpt-oss"))


def test_a_template_without_tools_has_no_format() -> None:
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert format_of("{{ tools }} in another way") is None


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), ANSWERS, ids=IDS)
def test_an_answer_is_read(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, object]]) -> None:
    assert summed(read(name, [text])) == (content, reasoning, calls)
    assert summed(read(name, list(text))) == (content, reasoning, calls)


@pytest.mark.parametrize(("name", "text"), [row[:2] for row in ANSWERS], ids=IDS)
@given(data=st.data())
def test_nothing_depends_on_how_it_is_cut(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert summed(read(name, pieces)) == summed(read(name, [text]))


ALPHABET = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "\n", "x", "<", "[TOOL_CALLS]", "{", "<|"]


@given(st.sampled_from([*BY_NAME]), st.lists(st.sampled_from(ALPHABET), max_size=12), st.data())
def test_any_text_is_read_alike_however_it_is_cut(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert summed(read(name, pieces)) == summed(read(name, [text]))


def test_what_was_not_asked_for_is_content() -> None:
    text = f"<think>a</think><tool_call>\n{CALL}\n</tool_call>"
    assert summed(read("hermes", [text], tools=False, reasoning=False)) == (text, "", [])
    assert summed(read("hermes", ["a</think>b"], thinking=True)) == ("b", "a", [])


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("get_weather", {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
                         "$defs": {"City": {"type": "string", "maxLength": 5}}}),
        ("now", None),
    )
]  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_a_forced_call_can_only_be_one(name: str) -> None:
    """The grammar is llama.cpp's, and a text of it is read as the call."""
    form = BY_NAME[name]
    wanted = forced(form, TOOLS, "get_weather")
    grammar = surrounded(check_schema(json.dumps(wanted.schema)), wanted.before, wanted.after)
    assert check_grammar(grammar) == grammar
    call: object = {"city": "Köln"}
    if form.arguments:
        call = {"name": "get_weather", form.arguments: call}
    text = wanted.before + json.dumps([call] if form.listed else call) + wanted.after
    assert summed(read(name, [text], opening=wanted.opening)) == ("", "", [("get_weather", {"city": "Köln"})])
    if name == "gpt-oss":
        with pytest.raises(UsageError, match="before it is chosen"):
            forced(form, TOOLS, None)
    else:
        both = forced(form, TOOLS, None)
        assert check_grammar(surrounded(check_schema(json.dumps(both.schema)), both.before, both.after))
    with pytest.raises(UsageError, match="there is no tool"):
        forced(form, TOOLS, "other")
