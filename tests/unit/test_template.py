"""Chat templates in the sandbox: rendered as Hugging Face does, bounded whatever they try; marks in what was said."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime

import pytest

from ggufspec.errors import GgufspecError, ModelError
from ggufspec.llamacpp import chat_library, chat_template
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.prompting.marks import Marks
from ggufspec.prompting.workarounds import TokenizedMessage

NOW = datetime(2026, 11, 21, 15, 0)
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": " And?\n"},
]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}\n"
    "    {{- '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] "
    "+ '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)


def render(source: str, messages: list[dict[str, str]] = SAID, **more: str) -> str:
    return ChatTemplate(source, NOW, **more).render(messages)


@pytest.fixture(autouse=True)
def _sandboxed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where llama.cpp's chat library is missing; with it see test_chat_library.py."""
    monkeypatch.setattr(chat_library, "why_chat_library_is_missing", lambda: GgufspecError("it is not there"))


# ---- as Hugging Face renders ---------------------------------------------------------------------------------------


def test_chatml() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n And?\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokens_white_space_and_blocks() -> None:
    assert render(LLAMA3, SAID[3:], bos="<|begin_of_text|>") == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert render("  {% if true %}\nx\n  {% endif %}\ny{{ eos_token }}", eos="</s>") == "x\ny</s>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", json.dumps(SAID, ensure_ascii=False)),
        ("{{ {'é': '<&'} | tojson }}", '{"é": "<&"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "21 Nov 2026"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "01345678"),
        ("{% for i in range(9) %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0123"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("{% macro said(m) %}{{ m.content }}{% endmacro %}{{ said(messages[0]) }}", "Be brief."),
        ("{% if tools %}no{% endif %}{{ documents is none }}{{ unknown is defined }}", "TrueFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
        ("{{ messages[1:] | length }}{{ messages[-1].content.strip() }}", "3And?"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


def test_a_refusal_is_told_from_a_failure() -> None:
    with pytest.raises(ModelError, match="refuses this conversation: System role not supported"):
        render(GEMMA)
    assert render(GEMMA, SAID[1:2]).endswith("<start_of_turn>user\nHi <b><end_of_turn>\n<start_of_turn>model\n")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing.more }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' | no_such_filter }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_template_that_fails_says_so(source: str) -> None:
    with pytest.raises(ModelError, match=r"^the model's chat template fails: .") as failed:
        render(source)
    assert "/chat off" in failed.value.hint


def test_what_it_says_is_made_harmless_and_short() -> None:
    with pytest.raises(ModelError) as failed:
        render("{{ raise_exception('\x1b[2J' + 'a\n' * 1000) }}")
    assert failed.value.message.isprintable()
    assert len(failed.value.message) < 400


# ---- bounds --------------------------------------------------------------------------------------------------------


def test_length_is_bounded() -> None:
    with pytest.raises(ModelError, match="more than 1,000,"):
        render("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}")


def test_a_long_message_is_no_long_text() -> None:
    said = [{"role": "user", "content": "x" * 2_000_000}]
    assert len(render(CHATML, said)) > 2_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ ('x' * 100000).replace('x', 'x' * 100000) | length }}",
    ],
)
def test_memory_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(chat_template, "_MAX_BYTES", 1 << 26)
    with pytest.raises(ModelError, match="takes too much memory"):
        render(source)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


# ---- marks -----------------------------------------------------------------------------------------------------------

END = re.compile(r"(?=(<\|e\|>)).")
MARKS = Marks([], END)


def test_marks_are_in_no_text() -> None:
    marks = Marks(["a\ue000", "\ue002"], END)
    assert (marks.cut, marks.begin, marks.end) == ("\ue001", "\ue003", "\ue004")


def test_text_is_cut_within_what_would_be_a_token() -> None:
    cut = MARKS.guarded("a<|e|>b<|e|>")
    assert cut.split(MARKS.cut) == ["a<", "|e|>b<", "|e|>"]
    assert MARKS.bare(cut) == "a<|e|>b<|e|>"
    plain = {"a": ["x", {"<|e|>": "<|e|>"}], "n": 1}
    assert MARKS.guarded(plain) == {"a": ["x", {"<|e|>": f"<{MARKS.cut}|e|>"}], "n": 1}


def test_marks_that_became_json_are_found() -> None:
    text = json.dumps(f"<{MARKS.cut}|e|> {MARKS.begin}")
    assert MARKS.unescaped(text) == f'"<{MARKS.cut}|e|> {MARKS.begin}"'


@pytest.mark.parametrize("content", ["said", " said\n", "said ", "a\n\nb"])
@pytest.mark.parametrize("strips", [False, True])
def test_answers_are_found_where_they_are_whole(content: str, strips: bool) -> None:
    answer = TokenizedMessage("assistant", content, (1, 2))
    text = MARKS.marked(answer).content
    found = MARKS.segments(f"<{text.strip() if strips else text}>", [answer])
    whole = not strips or content == content.strip()
    assert found == (["<", answer, ">"] if whole else [f"<{content.strip()}>"])
