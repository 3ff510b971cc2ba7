"""Completion: what the shells ask, by Typer's own protocol, and a bash that is typed into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pexpect
import pytest

from ggufspec.models.profile import bundled_folder
from ggufspec.settings.table import OPTIONS
from tests.support.processes import SCRIPT, Cli

BUNDLED = sorted(path.stem for path in bundled_folder().glob("*.toml"))
QUICK_S = 0.5  # of a processor: the tests may run beside others


def offered(cli: Cli, typed: str, shell: str = "bash") -> list[str]:
    """What is offered for the last word of a line; ``typed`` ends in a space where that is empty."""
    words = typed.split(" ")
    asked = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    done = cli(_GGUFSPEC_COMPLETE=f"complete_{shell}", **asked[shell])
    assert (done.code, done.stderr) == (0, "")
    if shell == "zsh":
        return re.findall(r'"([^"]+)"(?::"[^"]*")?', done.stdout) if "_arguments" in done.stdout else []
    return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]


def full(*typed: str) -> list[Any]:
    """Parameters of the full tier."""
    return [pytest.param(each, marks=pytest.mark.full) for each in typed]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    "typed",
    [
        "ggufspec run -n 4 ",
        *full("ggufspec bench ", "ggufspec profiles show ", "ggufspec compare demo "),
    ],
)
def test_names_of_profiles(cli: Cli, shell: str, typed: str) -> None:
    assert offered(cli, typed, shell) == BUNDLED


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_your_own_profiles_too(cli: Cli, shell: str) -> None:
    mine = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles"
    mine.mkdir(parents=True)
    (mine / "llama-of-mine.toml").write_text("broken = [")
    expected = ["llama-of-mine", *(name for name in BUNDLED if name.startswith("llama"))]
    assert sorted(offered(cli, "ggufspec tune llama", shell)) == sorted(expected)
    assert offered(cli, "ggufspec profiles rm ", shell) == ["llama-of-mine"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("ggufspec ben", {"bench"}),
        ("ggufspec profiles ", {"list", "show", "new", "rm", "check"}),
        ("ggufspec bench --draft-p", {"--draft-policy"}),
        ("ggufspec bench --drafter ", set(OPTIONS["drafter"].words)),
        ("ggufspec bench demo --drafter l", {"lookup"}),
        ("ggufspec export --to o", {"ollama"}),
    ],
)
def test_commands_options_and_their_values(cli: Cli, typed: str, words: set[str]) -> None:
    assert set(offered(cli, typed)) == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    "typed",
    [
        "ggufspec bench -m ",
        *full("ggufspec plan -md x", "ggufspec bench ./my", "ggufspec quantize "),
    ],
)
def test_where_a_file_is_meant_the_shell_offers_its_own(cli: Cli, shell: str, typed: str) -> None:
    assert offered(cli, typed, shell) == []


def test_it_is_quick(cli: Cli) -> None:
    before = os.times()
    assert offered(cli, "ggufspec bench dem") == ["demo", "demo-360m", "demo-eagle3"]
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < QUICK_S


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (("ggufspec", "be"), "typer", {"ggufspec.cli.bench", "numpy", "rich", "llama_cpp", "huggingface_hub"}),
        (("ggufspec", "bench", "dem"), "ggufspec.models.profile", {"llama_cpp", "huggingface_hub", "prompt_toolkit"}),
    ],
)
def test_it_loads_no_command_but_the_one_that_is_typed(
    cli: Cli, words: tuple[str, ...], has: str, lacks: set[str]
) -> None:
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    program = [SCRIPT.with_name("python"), "-X", "importtime", SCRIPT]
    environment = cli.environment | asked | {"_GGUFSPEC_COMPLETE": "complete_bash"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert has in loaded
    assert not loaded & lacks


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_shown(cli: Cli, shell: str) -> None:
    done = cli("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.code == 0
    assert f"_GGUFSPEC_COMPLETE=complete_{shell}" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_bash_that_is_typed_into(cli: Cli) -> None:
    """Installed as the help says, in a home of its own; the next bash completes."""
    path = f"{SCRIPT.parent}:{cli.environment['PATH']}"
    environment = cli.environment | {"PATH": path, "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null"}
    install = ["bash", "--norc", "-c", "ggufspec --install-completion; echo installed"]
    done = subprocess.run(install, env=environment, cwd=cli.folder, capture_output=True, text=True, timeout=60)
    assert "installed" in done.stdout.splitlines(), done.stderr
    home = Path(cli.environment["HOME"])
    assert (home / ".bash_completions" / "ggufspec.sh").is_file()
    (cli.folder / "my-model.gguf").touch()
    shell = pexpect.spawn(
        "bash",
        ["--noprofile", "--rcfile", str(home / ".bashrc"), "-i"],
        env=environment,  # type: ignore[arg-type]
        cwd=str(cli.folder),
        encoding="utf-8",
        timeout=60,
        dimensions=(40, 200),
    )
    shell.send("PS1='> '\r")
    shell.expect("> $")
    for typed, completed in (
        ("ggufspec ben\t", "ggufspec bench "),
        ("ggufspec bench qwen3-1\t", "ggufspec bench qwen3-14b "),
        ("ggufspec bench -m my-\t", "ggufspec bench -m my-model.gguf "),
    ):
        shell.send(typed)
        shell.expect_exact(completed)
        shell.send("\x15")  # the line is cleared
    shell.send("exit\r")
    shell.expect(pexpect.EOF)
