"""Prompts of ``run`` and ``trace``: a message by the model's chat template, or a text to continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ggufspec import DecoderOptions, ModelError, SpeculativeDecoder, chat_prompt
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.llamacpp.model import Model
from tests.support import chat_models
from tests.support.chat_models import END, START, with_marks
from tests.support.gguf_files import rewritten
from tests.support.processes import Cli

SHORT = ("-n", "4", "-c", "512", "--temp", "0")
MESSAGE = "def main("


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The small model with ChatML's template and its two control tokens."""
    return with_marks(target, tmp_path_factory.mktemp("run") / "talks.gguf")


def prompt_tokens(cli: Cli, *arguments: str | Path) -> int:
    """Tokens of the prompt that a run has read."""
    found = cli("run", *map(str, arguments), *SHORT, "--json").document()
    return int(found["statistics"]["prompt_tokens"])


def expected(model: Model, *messages: tuple[str, str]) -> list[int]:
    """The tokens that llama.cpp makes of the template's text."""
    text = ChatTemplate.of(model).render([{"role": role, "content": content} for role, content in messages])
    return model.tokenize(text, special=True)


def test_a_prompt_is_a_message_by_the_chat_template(cli: Cli, talks: Path) -> None:
    with Model(talks, vocab_only=True) as model:
        alone = expected(model, ("user", MESSAGE))
        with_system = expected(model, ("system", "Be terse."), ("user", MESSAGE))
        raw = model.tokenize(MESSAGE)
        assert chat_prompt(model, MESSAGE) == alone
        assert chat_prompt(model, MESSAGE, system="Be terse.") == with_system
    given = ("-m", talks, "-p", MESSAGE)
    assert prompt_tokens(cli, *given) == len(alone)
    assert prompt_tokens(cli, *given, "-sys", "Be terse.") == len(with_system)
    assert prompt_tokens(cli, *given, "--raw") == len(raw) < len(alone)
    done = cli("run", *map(str, given), *SHORT)
    assert "chat template" in done.stderr
    assert "plain text" in cli("run", *map(str, given), *SHORT, "--raw").stderr
    traced = cli("trace", *map(str, given), *SHORT, "--json").stdout.splitlines()[-1]
    assert '"chat template"' in traced


def test_control_tokens_of_a_prompt(cli: Cli, talks: Path) -> None:
    """In a message they are text; a text to continue may have them, as llama.cpp's completion has it."""
    text = f"{START}user\n{MESSAGE}{END}\n{START}assistant\n"
    with Model(talks, vocab_only=True) as model:
        by_hand, as_text = model.tokenize(text, special=True), model.tokenize(text)
        inside = chat_prompt(model, text)
        assert inside.count(model.tokenize(START, special=True)[0]) == 2  # of the template alone
    assert len(by_hand) < len(as_text)
    assert prompt_tokens(cli, "-m", talks, "--raw", "-p", text) == len(by_hand)
    assert prompt_tokens(cli, "-m", talks, "-p", text) == len(inside)


def test_a_system_prompt_comes_from_a_file(cli: Cli, talks: Path, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Be terse.")
    with Model(talks, vocab_only=True) as model:
        count = len(expected(model, ("system", "Be terse."), ("user", MESSAGE)))
    assert prompt_tokens(cli, "-m", talks, "-p", MESSAGE, "--system-file", file) == count


def test_a_model_without_a_template_continues_the_text(cli: Cli, target: Path) -> None:
    with Model(target, vocab_only=True) as model:
        plain, with_system = len(model.tokenize(MESSAGE)), len(model.tokenize(f"# Python\n\n{MESSAGE}"))
        with pytest.raises(ModelError, match="has no chat template"):
            chat_prompt(model, MESSAGE)
    done = cli("run", "-m", target, "-p", MESSAGE, *SHORT)
    assert f"{target.name} has no chat template: it continues the prompt as plain text" in done.stderr
    assert prompt_tokens(cli, "-m", target, "-p", MESSAGE) == plain
    assert prompt_tokens(cli, "-m", target, "-p", MESSAGE, "--system", "# Python") == with_system


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (("--raw", "--system", "x"), "no place for a system prompt", "leave --raw out"),
        (("--system", "x", "--system-file", "y"), "both --system and --system-file", "give one"),
        (("--system-file", "none.txt"), "none.txt cannot be read", "ls"),
    ],
)
def test_system_prompts_that_are_refused(cli: Cli, flags: tuple[str, ...], message: str, hint: str) -> None:
    done = cli("run", "demo", "-p", MESSAGE, *flags)
    assert done.code == 2
    assert message in done.stderr
    assert hint in done.stderr


def test_a_template_that_fails_names_the_way_without_it(cli: Cli, target: Path, tmp_path: Path) -> None:
    broken = rewritten(target, tmp_path / "broken.gguf", template=chat_models.FAILING)
    done = cli("run", "-m", broken, "-p", MESSAGE, *SHORT)
    assert done.code == 1
    assert "chat template fails" in done.stderr
    assert "--raw" in done.stderr
    assert cli("run", "-m", broken, "-p", MESSAGE, *SHORT, "--raw").code == 0


ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"


def test_no_end_token_follows_a_prompt(cli: Cli, target: Path, draft: Path, tmp_path: Path) -> None:
    file = rewritten(draft, tmp_path / "ends.gguf", add={ADD_EOS: True, ADD_BOS: True})
    with Model(draft, vocab_only=True) as plain, Model(file, vocab_only=True) as model:
        assert model.tokenize(MESSAGE) == [model.first_token, *plain.tokenize(MESSAGE)]
        assert model.tokenize(MESSAGE, start=False) == plain.tokenize(MESSAGE)
        assert model.tokenize("") == [model.first_token]


def test_a_text_that_begins_with_its_bos_token_gets_no_other(draft: Path, tmp_path: Path) -> None:
    file = rewritten(draft, tmp_path / "begins.gguf", add={ADD_BOS: True})
    with Model(file, vocab_only=True) as model:
        first = model.token_texts[0]
        once = model.tokenize(MESSAGE)
        assert model.tokenize(first + MESSAGE, special=True) == once
        assert model.tokenize(2 * first + MESSAGE, special=True) == [once[0], *once]  # only the added one is left out
        assert len(model.tokenize(first + MESSAGE)) > len(once)  # as text


def test_a_draft_that_only_adds_a_bos_token_serves(cli: Cli, target: Path, draft: Path, tmp_path: Path) -> None:
    file = rewritten(draft, tmp_path / "begins.gguf", add={ADD_BOS: True})
    answers = []
    for other in (draft, file):
        done = cli("run", "-m", target, "-md", other, "--drafter", "draft", "-p", MESSAGE, *SHORT, "--json")
        assert done.code == 0, done.stderr
        answers.append((done.document()["text"], done.document()["statistics"]["prompt_tokens"]))
    assert answers[0] == answers[1]


def test_a_model_without_an_end_token(cli: Cli, draft: Path, tmp_path: Path) -> None:
    """llama.cpp assumes that token 11 of such a vocabulary ends texts."""

    def renamed(name: str, value: Any) -> Any:
        return ["<first>", *value[1:]] if name == "tokenizer.ggml.tokens" else value

    file = rewritten(draft, tmp_path / "endless.gguf", value=renamed, drop=("tokenizer.ggml.eos_token_id",))
    with Model(file, vocab_only=True) as model:
        assert not any(map(model.is_end, range(model.vocab_size)))
        assert (model.has_end, model.token_texts) == (False, ("<first>", ""))
        (plus,) = model.tokenize("+")
        assert plus == 11
    with SpeculativeDecoder(file, options=DecoderOptions(ctx_size=256, threads=1, drafters=("lookup",))) as decoder:
        texts = [one.text for one in decoder.generate(MESSAGE, max_tokens=5, bias={plus: 1000.0})]
        assert texts == ["+"] * 5
        assert decoder.statistics is not None
        assert decoder.statistics.stop_reason == "length"
        assert "".join(one.text for one in decoder.generate(MESSAGE, max_tokens=5, grammar='root ::= "x"')) == "x"
    done = cli("run", "-m", file, "-p", MESSAGE, *SHORT)
    assert "endless.gguf has no token that ends an answer" in done.stderr


def test_a_byte_order_mark_on_standard_input_is_dropped(cli: Cli) -> None:
    tokens = [
        cli("run", "demo", "-p", "-", *SHORT, "--json", stdin=text).document()["statistics"]["prompt_tokens"]
        for text in (MESSAGE, "\ufeff" + MESSAGE)
    ]
    assert tokens[0] == tokens[1]


def test_a_predicted_answer_comes_from_a_file(cli: Cli, target: Path, tmp_path: Path) -> None:
    expected = cli("run", "-m", str(target), "--raw", "-p", MESSAGE, *SHORT).stdout
    file = tmp_path / "expected.py"
    file.write_text(expected)
    done = cli("run", "-m", str(target), "--raw", "-p", MESSAGE, *SHORT, "--prediction", str(file))
    assert done.stdout == expected
    assert "of the prediction's" in done.stderr
    document = cli("run", "-m", str(target), "--raw", "-p", MESSAGE, *SHORT, "--prediction", str(file), "--json")
    assert document.document()["settings"]["drafter"] == "lookup"  # without a draft model


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff\xfe\x00GGUF", "UTF-8")])
def test_a_prediction_that_is_no_text(cli: Cli, tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "expected.py"
    if content is not None:
        file.write_bytes(content)
    done = cli("run", "demo", "-p", MESSAGE, *SHORT, "--prediction", str(file))
    assert done.code == 2
    assert str(file) in done.stderr
    assert reason.casefold() in done.stderr.casefold()


def test_a_prediction_with_nothing_that_drafts(cli: Cli, tmp_path: Path) -> None:
    (file := tmp_path / "expected.py").write_text("x")
    for more in (("--drafter", "none"), ("--no-draft",)):
        assert "--prediction" in cli("run", "demo", "-p", MESSAGE, *SHORT, "--prediction", str(file), *more).stderr
