"""docs/guide.md and README.md: their Python runs, and their commands are commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from ggufspec.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
GUIDE, README = ROOT / "docs" / "guide.md", ROOT / "README.md"
NOT_RUN = "<!-- not run: "


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(why it is not run, code) of each fenced block of a language."""
    found = re.findall(
        rf"(?:{NOT_RUN}(.+?) -->\n+)?```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return [(why, code) for why, code in found]


def commands(page: Path) -> list[str]:
    """Every line of the page's shell blocks that runs ggufspec, without its comment."""
    lines = [line for _, code in blocks(page, "bash") for line in re.sub(r"\\\n\s*", "", code).splitlines()]
    return [line for line in lines if re.match(r"(\.venv/bin/)?ggufspec ", line)]


@pytest.mark.parametrize(("page", "least"), [(GUIDE, 4), (README, 1)], ids=["guide.md", "README.md"])
def test_its_python_runs(page: Path, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block in one program, as they are read, but those about files of the reader's own."""
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    found = [(why, code) for why, code in blocks(page, "python") if not re.search(r"""["']\w+\.gguf["']""", code)]
    assert all("download" in why for why, _ in found if why)
    run = [code for why, code in found if not why]
    assert len(run) >= least
    namespace: dict[str, object] = {"__name__": "guide"}
    for code in run:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, str(page), "exec"), namespace)
        assert ("print(" in code) == bool(said.getvalue().strip()), code
        assert "0 of 0" not in said.getvalue(), "the example shows that nothing was drafted"


@pytest.mark.parametrize("page", [GUIDE, README], ids=lambda page: page.name)
def test_its_commands_are_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is parsed to its end, every option and value; none is run."""
    for variable in [name for name in os.environ if name.startswith("GGUFSPEC_")]:
        monkeypatch.delenv(variable)
    lines = commands(page)
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(re.split(r"\s[|>&]", line.partition("  #")[0])[0], comments=True)[1:]
        top = get_command(app)
        if words[0].startswith("-"):  # which would be done at once
            assert words[0] in {name for option in top.params for name in option.opts}, line
            continue
        context = top.make_context("ggufspec", words.copy())
        left = [*context._protected_args, *context.args]
        while left:
            name, command, left = context.command.resolve_command(context, left)
            context = command.make_context(name, left, parent=context)
            left = [*context._protected_args, *context.args]
        assert context.command.callback is not None, line


def test_the_guide_has_every_command() -> None:
    named = {line.removeprefix(".venv/bin/").split()[1] for line in commands(GUIDE)}
    assert {name for name, command in get_command(app).commands.items() if not command.hidden} <= named


def test_the_guide_is_no_book() -> None:
    assert len(GUIDE.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("page", [GUIDE, README, ROOT / "docs" / "commands.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.skipif(sys.platform == "win32", reason="paths")
def test_no_output_in_the_guide_is_wider_than_a_terminal() -> None:
    for _, code in blocks(GUIDE, "text"):
        assert max(map(len, code.splitlines())) <= 80
