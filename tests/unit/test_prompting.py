"""From what is asked to the texts of a trial: prompts files, chat templates, what of an answer is thinking."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ggufspec.bench import prompting, summary, trial
from ggufspec.bench.prompting import PromptsJob, read_prompts
from ggufspec.bench.prompts import PROMPTS, REQUESTS, BenchPrompt
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.model import Model
from tests.support.chat_models import CHATML, FAILING, with_marks

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ASKED = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain in Oslo?"}]}
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name }} {{ tools | length }}\n{% endif %}" + CHATML


def made(target: Path, *prompts: BenchPrompt, **more: Any) -> prompting.PromptsResult:
    return prompting.run(PromptsJob(target, prompts, **more), lambda _: None, threading.Event())


def lines(folder: Path, *values: object, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chats(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_marks(draft, tmp_path_factory.mktemp("chats") / "chats.gguf")


# ---- texts


def test_a_model_without_a_template_continues_plain_texts(draft: Path) -> None:
    found = made(draft)
    assert (found.texts, found.templated) == (tuple(one.text for one in PROMPTS), False)
    assert found.kinds == tuple(one.kind for one in PROMPTS)
    with Model(draft) as model:
        assert found.tokens == tuple(len(model.tokenize(text)) for text in found.texts)


def test_a_model_with_a_template_gets_requests_and_its_marks_are_tokens(chats: Path) -> None:
    found = made(chats)
    assert (found.kinds, found.templated) == (tuple(one.kind for one in REQUESTS), True)
    assert found.texts[0] == f"<|im_start|>user\n{REQUESTS[0].text}<|im_end|>\n<|im_start|>assistant\n"
    assert found.notes == ("the chat template does not support tools: the prompt of kind json gets none",)
    with Model(chats) as model:
        marks = [model.vocab_size - 2, model.vocab_size - 1]
        ids = model.tokenize(found.texts[0], special=True)
    assert (len(ids), [ids.count(mark) for mark in marks]) == (found.tokens[0], [2, 1])


def test_raw_is_plain_text_in_spite_of_a_template(chats: Path) -> None:
    assert made(chats, raw=True).texts == tuple(one.text for one in PROMPTS)
    asked = BenchPrompt("", "", tuple(ASKED["messages"]), (TOOL,), origin="line 1 of x")
    assert made(chats, asked, raw=True).texts == ("Be brief.\n\nRain in Oslo?",)


def test_every_other_request_is_a_mix_and_kinds_choose(chats: Path) -> None:
    assert made(chats, every=2).kinds == ("edit", "port", "json", "chat")
    assert made(chats, kinds=("tests", "chat")).kinds == ("tests", "chat")
    with pytest.raises(UsageError, match="is of kind prose") as failed:
        made(chats, kinds=("prose",))
    assert "edit, rename" in failed.value.hint


def test_a_template_begins_a_text_with_one_bos_token(draft: Path, tmp_path: Path) -> None:
    path = with_marks(draft, tmp_path / "bos.gguf", "{{ bos_token }}" + CHATML)
    with Model(path) as model:
        bos, first = model.token_texts[0], model.first_token
    (text,) = made(path, BenchPrompt("", "Hello")).texts
    assert text.startswith(bos) == (first is None)


def test_messages_and_tools_reach_the_template(draft: Path, tmp_path: Path) -> None:
    path = with_marks(draft, tmp_path / "tools.gguf", WITH_TOOLS)
    (prompt,) = read_prompts(lines(tmp_path, ASKED | {"tools": [TOOL], "temperature": 0.2, "kind": "weather"}))
    found = made(path, prompt)
    assert found.texts[0].startswith("get_weather 1\n<|im_start|>system\nBe brief.<|im_end|>")
    assert (found.kinds, found.notes) == (("weather",), ())


def test_a_call_of_a_tool_has_its_arguments_as_an_object(draft: Path, tmp_path: Path) -> None:
    said = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{% for name, value in call.function.arguments | items %}{{ name }} {{ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    path = with_marks(draft, tmp_path / "calls.gguf", said)
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert made(path, *read_prompts(lines(tmp_path, {"messages": messages}))).texts == ("city Oslo",)


def test_a_developer_is_the_system_where_the_template_does_not_know_one(chats: Path, tmp_path: Path) -> None:
    prompts = read_prompts(lines(tmp_path, {"messages": [{"role": "developer", "content": "Be brief."}]}))
    assert made(chats, *prompts).texts[0].startswith("<|im_start|>system\nBe brief.")


def test_tools_that_the_template_does_not_know_are_an_error_that_names_the_line(chats: Path, tmp_path: Path) -> None:
    prompts = read_prompts(lines(tmp_path, {"prompt": "x"}, ASKED | {"tools": [TOOL]}))
    with pytest.raises(UsageError, match=r"line 2 of prompts\.jsonl offers tools") as failed:
        made(chats, *prompts)
    assert "--raw" in failed.value.hint


@pytest.mark.parametrize("template", [FAILING, "{{ raise_exception('no') }}", "{% if %}"])
def test_a_template_that_fails_is_an_error_that_names_raw(template: str, draft: Path, tmp_path: Path) -> None:
    path = with_marks(draft, tmp_path / "fails.gguf", template)
    with pytest.raises(ModelError, match="the model's chat template") as failed:
        made(path)
    assert failed.value.hint.startswith("--raw")
    assert made(path, raw=True).texts[0] == PROMPTS[0].text


def test_an_answer_that_is_begun_goes_on(chats: Path, tmp_path: Path) -> None:
    begun = [*ASKED["messages"], {"role": "assistant", "content": "Rain, "}]
    path = lines(tmp_path, {"messages": begun}, {"messages": begun, "add_generation_prompt": True})
    goes_on, begins = made(chats, *read_prompts(path)).texts
    assert goes_on.endswith("<|im_start|>assistant\nRain, ")
    assert begins.endswith("Rain, <|im_end|>\n<|im_start|>assistant\n")


def test_options_of_a_request_reach_the_template(draft: Path, tmp_path: Path) -> None:
    said = "{{ reasoning_effort }} {{ enable_thinking }} {{ style }} {{ 'tools' if tools }}{{ messages[0].content }}"
    path = with_marks(draft, tmp_path / "options.gguf", said)
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "none"}
    more = {"reasoning_effort": "low", "chat_template_kwargs": {"style": "plain", "enable_thinking": False}}
    assert made(path, *read_prompts(lines(tmp_path, asked | more))).texts[0].split() == ["low", "False", "plain", "x"]


def test_token_ids_are_a_prompt_if_they_are_a_text_s(chats: Path, tmp_path: Path) -> None:
    with Model(chats, vocab_only=True) as model:
        ids = model.tokenize("def main(argv):")
        parted = [*model.tokenize("ma"), *model.tokenize("in")]
        assert model.tokenize("main") != parted
    path = lines(tmp_path, {"prompt": "Hello"}, {"prompt": ids}, {"prompt": [ids]}, {"prompt": ["Hi"]})
    found = made(chats, *read_prompts(path))
    assert found.texts[1:3] == ("def main(argv):",) * 2
    assert found.tokens[1] == len(ids)
    assert "Hi<|im_end|>" in found.texts[3]
    path = lines(tmp_path, {"prompt": "Hello"}, {"prompt": [5, 2**40]}, {"prompt": [-1]}, {"prompt": parted})
    found = made(chats, *read_prompts(path))
    assert (len(found.texts), len(found.kinds)) == (1, 1)
    assert [note.partition(" is left out")[0] for note in found.notes] == [
        f"line {number} of prompts.jsonl" for number in (2, 3, 4)
    ]
    with pytest.raises(UsageError, match=r"line 1 of prompts\.jsonl is left out"):
        made(chats, *read_prompts(lines(tmp_path, {"prompt": parted})))


def test_of_many_prompts_some_are_taken_at_equal_distances(draft: Path) -> None:
    found = prompting.make_texts(PromptsJob(draft, tuple(BenchPrompt("", f"n{number}") for number in range(64))))
    assert found.texts == tuple(f"n{number}" for number in range(0, 64, 2))
    assert found.notes == ("32 of the 64 prompts are used, evenly spaced",)


# ---- files


def test_a_file_of_text_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b'\xef\xbb\xbfFirst\r\n\n  \n"Second", he said\n{x} third')
    assert [(one.text, one.origin) for one in read_prompts(path)] == [
        ("First", "line 1 of prompts.txt"),
        ('"Second", he said', "line 4 of prompts.txt"),
        ("{x} third", "line 5 of prompts.txt"),
    ]


def test_json_lines_are_texts_prompts_and_requests(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Rain"}, {"type": "text", "text": "?"}]
    path = lines(
        tmp_path, "a text", {"prompt": "another", "kind": "x"}, {"messages": [{"role": "user", "content": parts}]}
    )
    assert [(one.kind, one.text, one.messages) for one in read_prompts(path)] == [
        ("", "a text", ()),
        ("x", "another", ()),
        ("", "", ({"role": "user", "content": "Rain\n?"},)),
    ]
    assert read_prompts(lines(tmp_path, {"prompt": "by its first line"}, name="log"))[0].text == "by its first line"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (b"fine\ncaf\xe9\n", "line 2 of x.txt is not UTF-8"),
        (b"\xff\xfeH\x00i\x00", "line 1 of x.txt is not UTF-8"),
        (b"fine\n\nnull\x00\n", "line 3 of x.txt has the byte 0x00"),
        (b"x" * (prompting.MOST_LINE_BYTES + 1), "line 1 of x.txt has 1 MiB"),
        (b'{"prompt": "x"}\nnot json\n', "line 2 of x.txt is not a complete JSON document"),
        (b'{"prompt": " "}', "line 1 of x.txt has no text"),
        (b'{"input": "x"}', "line 1 of x.txt has no text"),
        (b'{"prompt": "x"}\n[1]\n', "line 2 of x.txt is not a prompt"),
        (b'{"messages": ["x"]}', "messages and tools must be lists of objects"),
        (b'{"messages": [{"content": "x"}]}', "a message without a role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "whose content is not text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "a part of type image_url"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "x"}]}', "a tool without a name"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b'{"prompt": ' + b"[" * 99 + b"]" * 99 + b"}", "nested more than"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError) as failed:
        read_prompts(path)
    assert said in failed.value.message
    assert failed.value.hint


# ---- thinking, and what is told of kinds


@pytest.mark.parametrize(
    ("prompt", "rounds", "thinking"),
    [
        ("user: hi", ["<th", "ink>well", "</thi", "nk>\n", "Hello"], 4),
        ("assistant\n<think>\n", ["well", "</think>", "Hello"], 2),
        ("assistant\n<think>\n", ["well", "well"], 2),  # it did not come to an end
        ("<think>\n\n</think>\n\n", ["Hello"], 0),  # thinking is off
        ("user: hi", ["\n", "<think>x</think>"], 2),
        ("user: hi", ["Hello", " <think>"], 0),
        ("user: hi", ["<", "b>"], 0),
        ("user: hi", [], 0),
    ],
)
def test_thinking_ends_with_the_round_of_its_mark(prompt: str, rounds: list[str], thinking: int) -> None:
    assert trial.thinking_rounds(prompt, rounds) == thinking


def statistics(tokens: int, seconds: float, drafted: int = 0, accepted: int = 0) -> Statistics:
    return Statistics.of(
        [], 0, prompt_tokens=1, prompt_s=1.0, tokens=tokens, decode_s=seconds, stop_reason="length", drafted=drafted,
        accepted=accepted,
    )  # fmt: skip


def result(*answers: tuple[Statistics, tuple[Statistics, ...]]) -> trial.TrialResult:
    found = tuple(trial.TrialAnswer("", (), whole, parts) for whole, parts in answers)
    return cast("trial.TrialResult", SimpleNamespace(answers=found))


def test_kinds_have_their_own_acceptance_and_gain_pair_by_pair() -> None:
    alone = [result(*[(statistics(11, 1.0), ())] * 3), result(*[(statistics(11, 2.0), ())] * 3)]
    drafted = [
        result((statistics(11, 0.5, 8, 6), ()), (statistics(11, 2.0), ()), (statistics(11, 0.5, 8, 2), ())),
        result((statistics(11, 1.0, 4, 4), ()), (statistics(11, 4.0), ()), (statistics(11, 1.0), ())),
    ]
    edit, prose = summary.by_kind(("edit", "prose", "edit"), alone, drafted)
    assert (edit.name, edit.speedup.samples, edit.drafted, edit.accepted, edit.tokens) == (
        "edit",
        (2.0, 2.0),
        20,
        12,
        22,
    )
    assert (prose.name, prose.speedup.median, prose.drafted) == ("prose", 0.5, 0)
    assert prose.target_only_tokens_per_s.samples == (10.0, 5.0)
    assert summary.by_kind(("", "", ""), alone, drafted) == ()
    assert summary.by_part(alone, drafted) == ()


def test_thinking_and_answer_are_told_apart() -> None:
    def answers(seconds: float) -> trial.TrialResult:
        parts = (statistics(30, 3 * seconds, 9, 3), statistics(10, 1.0, 4, 4))
        return result((statistics(40, 4.0), parts), (statistics(5, 1.0), ()))

    thinking, answer = summary.by_part([answers(2.0)], [answers(1.0)])
    assert (thinking.name, thinking.speedup.median, thinking.accepted) == ("thinking", 2.0, 3)
    assert (answer.name, answer.speedup.median, answer.drafted) == ("answer", 1.0, 4)


def test_a_prompt_that_the_context_does_not_hold_is_told_before_anything_is_loaded(target: Path) -> None:
    spec = trial.TrialJob(target, None, DecoderOptions(ctx_size=512), Sampling(), ("x",), 64)
    trial.check_context(spec, 511)
    with pytest.raises(UsageError, match="a prompt of 512 tokens and answers of 64 tokens need 576") as failed:
        trial.check_context(spec, 512)
    assert failed.value.hint == "-c 768"
