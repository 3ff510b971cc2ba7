"""``ggufspec models``: what is on this disk, as people and programs read it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.gguf_files import rewritten
from tests.support.processes import Cli, plain
from tests.support.screens import Session


@pytest.fixture
def studio(cli: Cli, target: Path, draft: Path) -> Path:
    """LM Studio's folder with a pair, a projector and half a file."""
    folder = Path(cli.environment["HOME"]) / ".lmstudio" / "models" / "some one" / "Demo-GGUF"
    folder.mkdir(parents=True)
    shutil.copyfile(target, folder / "Demo-10M-F16.gguf")
    shutil.copyfile(draft, folder / "Demo-1M-Q8_0.gguf")
    shutil.copyfile(draft, folder / "mmproj-Demo-F16.gguf")
    (folder / "Half-Q8_0.gguf").write_bytes(draft.read_bytes()[:5000])
    return folder


def test_a_document(cli: Cli, studio: Path) -> None:
    done = cli("models", "--json")
    assert (done.code, done.stderr) == (0, "")
    found = done.document()
    assert found["schema"] == "ggufspec/models@1"
    big, small = found["models"]
    assert (big["name"], big["program"], big["quantization"]) == ("Demo-10M-F16", "LM Studio", "F16")
    assert (big["drafts"], small["drafts"]) == ([small["path"]], [])
    assert big["options"] == ["-m", str(studio / "Demo-10M-F16.gguf")]
    assert small["draft_options"] == ["-md", str(studio / "Demo-1M-Q8_0.gguf")]
    assert big["context_length"] == 2048
    assert {Path(one["path"]).name for one in found["left_out"]} == {"mmproj-Demo-F16.gguf", "Half-Q8_0.gguf"}
    assert found["complete"] is True
    assert str(studio.parents[1]) in found["folders"]
    again = cli(*shlex.split(found["next"])[1:], "-n", "4", stdin="def f(\n")
    assert again.code == 0, again.stderr


@pytest.mark.parametrize("name", ["models", "list"])
def test_a_table_and_the_command_below_it(cli: Cli, studio: Path, name: str) -> None:
    done = cli(name)
    assert done.code == 0, done.stderr
    assert re.search(r"Demo-10M-F16 +20 MB +10M +F16 +LM Studio +llama +\n +draft: Demo-1M-Q8_0", done.stdout)
    pair = [str(studio / "Demo-10M-F16.gguf"), "-md", str(studio / "Demo-1M-Q8_0.gguf")]
    left_out, note, following = done.stderr.splitlines()
    assert left_out == "left out: 1 damaged or unreadable file, 1 projector or adapter; -v says which and why"
    assert note.startswith("none of these has a chat template, so they only continue text; to chat: ggufspec chat ")
    raw = ("--raw", "-p", "Once upon a time")
    assert following == f"  next: {shlex.join(['ggufspec', 'run', '-m', *pair, *raw])}"
    said = cli(name, "-v").stderr
    assert "Half-Q8_0.gguf: Half-Q8_0.gguf is truncated" in said
    assert "mmproj-Demo-F16.gguf: by its name it is not a model" in said


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_of_any_width(cli: Cli, studio: Path, columns: int) -> None:
    session = Session(cli.terminal("models", columns=columns), columns)
    text = plain(session.end())
    assert "Demo-10M-F16" in text
    assert f"-m '{studio / 'Demo-10M-F16.gguf'}' -md" in text.replace("\n", ""), "the command is whole"


def test_nothing_here(cli: Cli) -> None:
    done = cli("models")
    assert (done.code, done.stdout) == (0, "")
    assert "there are no GGUF models" in done.stderr
    assert "ggufspec profiles list" in done.stderr
    assert cli("models", "--json").document()["next"] == ""


def test_a_family_that_a_profile_knows(cli: Cli, target: Path) -> None:
    rewritten(target, cli.folder / "Qwen3-14B-Q4_K_M.gguf")
    with (cli.folder / "Qwen3-14B-Q4_K_M.gguf").open("ab") as file:
        file.truncate(9 << 30)  # as large as its name says
    done = cli("models")
    typed = "ggufspec chat -m Qwen3-14B-Q4_K_M.gguf -hfd Qwen/Qwen3-0.6B-GGUF:Q8_0"
    assert f"a draft for Qwen3-14B-Q4_K_M, to download: {typed}" in done.stderr


def test_a_damaged_cache_of_vocabularies_is_no_matter(cli: Cli, studio: Path) -> None:
    before = json.loads(cli("models", "--json").stdout)
    (Path(cli.environment["HOME"]) / ".cache" / "ggufspec" / "vocabularies.json").write_text("{")
    assert json.loads(cli("models", "--json").stdout) == before
    assert studio.exists()


def test_folders_that_are_named(cli: Cli, studio: Path, target: Path, tmp_path: Path) -> None:
    """Only these are searched; a model in them is named as it was typed."""
    own = cli.folder / "mine"
    own.mkdir()
    rewritten(target, own / "chatty-F16.gguf", template="{{ messages[0].content }}")
    found = cli("models", "mine", "--json").document()
    assert [one["name"] for one in found["models"]] == ["chatty-F16"]
    assert found["next"] == "ggufspec chat -m mine/chatty-F16.gguf"
    both = cli("models", "mine", studio, "--json").document()
    assert {one["name"] for one in both["models"]} == {"chatty-F16", "Demo-10M-F16", "Demo-1M-Q8_0"}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"there are no GGUF models in {empty}" in cli("models", empty).stderr


def test_a_folder_that_is_none(cli: Cli, studio: Path) -> None:
    for name, why in (("/no such folder", "does not exist"), (str(studio / "Half-Q8_0.gguf"), "is not a folder")):
        done = cli("models", name, "--json")
        assert (done.code, done.document()["error"], done.document()["hint"]) == (2, f"{name} {why}", "ggufspec models")
        assert done.stderr == f"error: {name} {why}\n  next: ggufspec models\n"
