"""Prompts of ``run`` and ``trace``: a message by the model's chat template, or a text to continue."""

from __future__ import annotations

from pathlib import Path

import chat_models
import pytest
from chat_models import END, START, with_marks
from gguf_files import rewritten
from processes import Cli

from ggufspec import ModelError, chat_prompt
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.llamacpp.model import Model

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
