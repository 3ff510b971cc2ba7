"""README.md and docs/*.md: their Python runs, their commands parse, their outputs and pictures are fresh."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from ggufspec.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
GUIDE, PYTHON, README = ROOT / "docs" / "guide.md", ROOT / "docs" / "python.md", ROOT / "README.md"
REFERENCE = ROOT / "docs" / "commands.md"  # which a script writes
PAGES = [README, *sorted({*ROOT.glob("docs/*.md")} - {REFERENCE})]
INDEXES = [ROOT / "docs" / "decisions" / "README.md", ROOT / "docs" / "evidence" / "README.md"]
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


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_ci_runs_the_commands_of_the_readme() -> None:
    own = [line.split("#")[0].strip() for line in blocks_of_shell(README) if line.startswith("scripts/")]
    assert own == ["scripts/bench", "scripts/test"]
    assert set(own) <= set((ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines())


def test_python_is_on_these_pages() -> None:
    assert {page for page in PAGES if blocks(page, "python")} == {PYTHON, README}


@pytest.mark.parametrize(("page", "least"), [(PYTHON, 4), (README, 1)], ids=["python.md", "README.md"])
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


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_its_commands_are_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is parsed to its end, every option and value; none is run."""
    for variable in [name for name in os.environ if name.startswith("GGUFSPEC_")]:
        monkeypatch.delenv(variable)
    for line in commands(page):
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


@pytest.mark.parametrize(("page", "most"), [(README, 170), *((page, 400) for page in PAGES if page != README)])
def test_no_page_is_a_book(page: Path, most: int) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize(
    "page", [*PAGES, REFERENCE, *INDEXES, *(ROOT / "docs" / "decisions").glob("0*.md")], ids=name_of
)
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"""(?:\]\(|srcset="|src=")([^)#:"]+)(?:#[^)]*)?[)"]""", text):
        assert (page.parent / link).exists(), link


OTHERS = {"json.py", "numpy.py", "file_download.py"}  # files of Python and of huggingface_hub


def test_files_that_are_named_exist() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for page in [*PAGES, *INDEXES, *(ROOT / "docs" / "decisions").glob("0*.md")]:
        for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|json|toml|md))`", page.read_text(encoding="utf-8")):
            assert name in OTHERS or any(f"/{path}".endswith(f"/{name}") for path in listed), (page.name, name)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=name_of)
def test_the_index_has_every_document(page: Path) -> None:
    index = (page.parent / "README.md").read_text(encoding="utf-8")
    assert page.name == "README.md" or f"({page.name})" in index


def test_the_index_has_every_decision() -> None:
    index = INDEXES[0].read_text(encoding="utf-8")
    for page in INDEXES[0].parent.glob("0*.md"):
        title, _, subtitle, *_ = page.read_text(encoding="utf-8").splitlines()
        assert f"[{title.split()[1]}]({page.name})" in index
        assert re.fullmatch(r"\*[^*]+\.\*", subtitle), "a sentence below the title says what was decided"
        assert subtitle.strip("*") in index


@pytest.mark.skipif(sys.platform == "win32", reason="paths")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "text")], ids=name_of)
def test_no_output_is_wider_than_a_terminal(page: Path) -> None:
    for _, code in blocks(page, "text"):
        assert max(map(len, code.splitlines())) <= 80


def output_of(page: Path, command: str) -> list[str]:
    """Lines of the output that follows a command on a page."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r"```text\n(.*?)```", text[text.index(command) :], re.DOTALL)
    assert found
    return found[1].splitlines()


def without_figures(line: str) -> str:
    """A line but for its numbers, its spaces and the lengths of its bars."""
    return re.sub(r"[\s█▓▒░•·─]+", " ", re.sub(r"\d[\d.,]*", "0", line)).strip()


@pytest.mark.skipif(sys.platform == "win32", reason="paths")
@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param("guide.md", 'plan demo --gpu "RTX 4090"', marks=pytest.mark.full),
        ("guide.md", "export demo --to ollama"),
        pytest.param("exactness.md", "verify demo --quick", marks=pytest.mark.full),
        pytest.param("trace.md", "trace demo -p $'import", marks=pytest.mark.full),
        pytest.param("chat.md", "printf 'def main", marks=pytest.mark.full),
    ],
)
def test_an_output_is_what_the_command_prints(page: str, command: str, tmp_path: Path) -> None:
    """Line by line but for figures; lines that depend on the machine are left out of the page by an ellipsis."""
    path = ROOT / "docs" / page
    line = next(each for each in blocks_of_shell(path) if command in each).partition("  #")[0]
    program = f"{shlex.quote(sys.executable)} -P -m ggufspec "
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    environment = os.environ | folders | {"COLUMNS": "80", "GGUFSPEC_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line.replace("ggufspec ", program)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    printed = {without_figures(each) for each in (done.stdout + done.stderr).replace(f"{ROOT}/", "").splitlines()}
    for shown in output_of(path, command):
        assert shown.strip() in ("", "…") or without_figures(shown) in printed, (shown, done.stdout)


def test_the_plan_of_a_card_has_the_figures_of_the_evidence() -> None:
    body = json.loads((ROOT / "docs" / "evidence" / "honest-rival.json").read_text(encoding="utf-8"))["plans"][
        "fastest"
    ]
    shown = next(code for _, code in blocks(ROOT / "docs" / "gpu.md", "text") if "Draft length" in code)
    assert body["why"] in " ".join(shown.split())
    for option in body["options"].values():
        row = f"{option['target']['gpu_layers']}/{option['target']['layers'] + 1}"
        if divided := option["target"]["n_cpu_ffn"]:
            row += f", feed-forward of {divided} on CPU"
        assert re.search(rf"{row},? .*≈ {option['tokens_per_s']:.2f}", shown)


def blocks_of_shell(page: Path) -> list[str]:
    return [line for _, code in blocks(page, "bash") for line in code.splitlines()]


def test_pictures_are_those_of_the_evidence() -> None:
    """What is drawn again from the same JSON has the same words, and bars and points of the same size."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert spec
    assert spec.loader
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)

    def drawn(svg: str) -> list[str]:
        return re.findall(r">([^<>\s][^<>]*)</text>| d=\"(M[^\"]*)\"", svg)

    for name, svg in pictures.pictures().items():
        assert drawn(svg) == drawn((ROOT / "docs" / name).read_text(encoding="utf-8")), "run scripts/pictures.py"
