"""The command reference: written from the help, and what the help says now."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("commands", ROOT / "scripts" / "commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_help_says_now() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "commands.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout  # it names the command that writes it anew


def test_a_stale_page_is_found_and_written(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name in ("MARKDOWN", "MAN"):
        monkeypatch.setattr(script, name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["commands.py", "--check"])
    assert script.main() == 1
    assert f"MAN is not what the help says now: {script.COMMAND}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["commands.py"])
    assert script.main() == 0
    monkeypatch.setattr(sys, "argv", ["commands.py", "--check"])
    assert script.main() == 0
    assert (tmp_path / "MARKDOWN").read_text() == (ROOT / "docs" / "commands.md").read_text()


def test_every_command_is_there_with_its_usage_options_and_examples(script: ModuleType) -> None:
    pages = list(script.pages())
    names = [page.name for page in pages]
    assert names[0] == "ggufspec"
    assert len(set(names)) == len(names) >= 18
    assert {"ggufspec bench", "ggufspec profiles show", "ggufspec doctor"} <= set(names)
    for page in pages[1:]:
        assert page.paragraphs[0], page.name
        assert page.examples, page.name
        assert all("ggufspec " in example for example in page.examples), page.examples
        assert any("--help" in option for option, _ in page.options), page.name
    bench = pages[names.index("ggufspec bench")]
    assert ("-r, --repetitions N") in dict(bench.options)
    assert bench.usage.startswith("ggufspec bench [OPTIONS]")
    assert [page.name for page in pages if page.switches] == ["ggufspec chat"]
    assert "/draft-max N|max" in dict(pages[names.index("ggufspec chat")].switches)


def test_it_is_the_same_in_any_terminal(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = list(script.pages())
    for variable, value in (("COLUMNS", "40"), ("GGUFSPEC_NGL", "7"), ("NO_COLOR", "1"), ("LC_ALL", "C")):
        monkeypatch.setenv(variable, value)
    assert list(script.pages()) == pages
    assert max(len(line) for page in pages for line in page.formatted.splitlines()) <= script.WIDTH


def test_links_of_the_page_lead_somewhere(script: ModuleType) -> None:
    page = script.markdown(list(script.pages()))
    heads = {head.replace(" ", "-") for head in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == heads
    assert page.count("```") % 2 == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--sweep measures -ngl 0-80+8", "`--sweep` measures `-ngl` 0-80+8"),
        ("by range-reads, a <b> and two * stars_", "by range-reads, a \\<b\\> and two \\* stars\\_"),
        ("ggufspec --version and\n  GGUFSPEC_NGL=45 say", "`ggufspec --version` and `GGUFSPEC_NGL=45` say"),
        ("GGUFSPEC_DRAFT_MAX (--draft-max)", "`GGUFSPEC_DRAFT_MAX` (`--draft-max`)"),
    ],
)
def test_prose(script: ModuleType, text: str, shown: str) -> None:
    assert script._prose(text) == shown


@pytest.mark.parametrize(("text", "line"), [("-a \\b", "\\-a \\eb"), (".dot", "\\&.dot"), ("'x'", "\\&'x'")])
def test_lines_of_the_man_page(script: ModuleType, text: str, line: str) -> None:
    assert script._line(text) == line


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_reads_the_man_page_without_a_word() -> None:
    groff = ["groff", "-k", "-ww", "-man", "-Tutf8", ROOT / "docs" / "ggufspec.1"]
    done = subprocess.run(groff, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    for words in ("ggufspec bench", "--repetitions", "EXIT STATUS", "ggufspec bench demo --sweep"):
        assert words in shown
