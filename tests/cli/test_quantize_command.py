"""``ggufspec quantize``: the grid of one's own model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggufspec.llamacpp.quantize import FILE_TYPES
from ggufspec.reports.quantize import outputs
from tests.support.processes import Cli, all_end, eventually, plain, rest, workers


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "out"
    made.mkdir()
    yield made
    assert not list(made.glob("ggufspec-scratch-*"))


def test_the_grid(cli: Cli, target: Path, folder: Path) -> None:
    done = cli("quantize", target, "--types", "q8_0, Q4_0,Q4_K_M,Q8_0", "-o", folder, "--json")
    assert done.code == 0
    unfit = "{}: another type for {} of 74 tensors, because their row length is not a multiple of its block size\n"
    assert done.stderr == unfit.format("Q4_0", 1) + unfit.format("Q4_K_M", 56)
    document = done.document()
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/quantize@1"
    assert document["weights"] == 10163520
    assert [file["type"] for file in document["files"]] == ["Q8_0", "Q4_0", "Q4_K_M"]
    for file in document["files"]:
        path = Path(file["file"])
        assert path == folder / f"demo-target-{file['type']}.gguf"
        assert path.stat().st_size == file["size_bytes"]
        assert file["expected_bytes"] == file["size_bytes"]
        answer = cli("run", "-m", path, "-p", "def f(", "-n", "4", "--json").document()
        assert len(answer["tokens"]) == 4
    assert document["files"][0]["bits_per_weight"] == pytest.approx(8.5, abs=0.02)
    assert len(list(folder.iterdir())) == 3


def test_in_a_terminal(cli: Cli, target: Path, folder: Path) -> None:
    child = cli.terminal("quantize", str(target), "--types", "Q4_0", "-o", str(folder), columns=80)
    shown = plain(rest(child))
    assert child.exitstatus == 0
    assert "Q4_0 " in shown.partition("File")[0]  # the bar names what it writes
    lines = shown[shown.index(" File") :].splitlines()
    assert max(map(len, lines)) <= 80
    assert any("demo-target-Q4_0.gguf" in line and "6.5 MB" in line and "5.03" in line for line in lines)


def test_nothing_is_written_over_without_force(cli: Cli, target: Path, folder: Path) -> None:
    there = folder / "demo-target-Q4_0.gguf"
    there.write_bytes(b"mine")
    refused = cli("quantize", target, "--types", "Q8_0,Q4_0", "-o", folder, "--json")
    assert refused.code == 2
    assert "exists already" in refused.document()["error"]
    assert [path.name for path in folder.iterdir()] == [there.name]
    assert there.read_bytes() == b"mine"
    assert cli("quantize", target, "--types", "Q4_0", "-o", folder, "--force").code == 0
    assert there.read_bytes()[:4] == b"GGUF"
    own = cli("quantize", target, "--types", "F16", "--force", "--json")
    assert "is the model itself" in own.document()["error"]


def test_a_quantised_source_must_be_meant(cli: Cli, draft: Path, folder: Path) -> None:
    refused = cli("quantize", draft, "--types", "Q4_0", "-o", folder, "--json")
    assert refused.code == 2
    said = refused.document()
    assert "quantised already (mostly q8_0)" in said["error"]
    assert "--requantize" in said["hint"]
    done = cli("quantize", draft, "--types", "Q4_0", "-o", folder, "--requantize")
    assert done.code == 0
    assert "warning: demo-draft-Q8_0.gguf is quantised already" in done.stderr


@pytest.mark.parametrize("columns", ["80", "100"])
def test_the_help_lists_the_types_and_no_other(cli: Cli, columns: str) -> None:
    text = cli("quantize", "--help", COLUMNS=columns).stdout
    listed = text.partition("The types")[2].partition("Arguments:")[0].splitlines()[1:]
    groups = [line.strip().partition("  ") for line in listed if line.strip()]
    assert [name.strip() for _, _, names in groups for name in names.split(",")] == list(FILE_TYPES)
    for group, _, names in groups:
        bits = group.removesuffix(" bits")
        assert all(re.match(rf"I?Q{bits}_", name.strip()) for name in names.split(",")) or group == "whole"
    assert max(map(len, text.splitlines())) <= int(columns)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--types", "Q9_9"), ("'Q9_9' is not a supported file type", "did you mean Q")),
        (("--types", "Q4_K_X"), ("Q4_K_X", "did you mean Q4_K_")),
        (("--types", "q4km"), ("q4km", "did you mean Q4_K_M", "--help lists all")),
        (("--types", "%%%"), ("'%%%'", "F32, F16, BF16, Q8_0", "Q2_K")),
        (("--types", ", "), ("no type is given",)),
        (("--types", "Q8_0", "-o", "nowhere"), ("nowhere is not a folder", "mkdir")),
        (("--types", "Q8_0", "-t", "-3"), ("--threads -3 is out of range",)),
        ((), ("--types",)),
    ],
)
def test_bad_input(cli: Cli, target: Path, folder: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = cli("quantize", target, "-o", folder, *flags, "--json")
    error = json.loads(done.stdout)
    assert done.code in (1, 2)
    assert all(word in error["error"] + " " + error["hint"] for word in words), error
    assert "Traceback" not in done.stderr


def test_sources_that_are_no_models(cli: Cli, damaged: dict[str, Path], tmp_path: Path, folder: Path) -> None:
    for source in (tmp_path / "none.gguf", tmp_path, damaged["empty"], damaged["cut in the data"]):
        done = cli("quantize", source, "--types", "Q4_0", "-o", folder, "--json")
        assert done.code == 1, source
        assert done.document()["schema"] == "ggufspec/error@1"
    assert not list(folder.iterdir())


def test_a_disk_without_room(cli: Cli, target: Path) -> None:
    done = cli("quantize", target, "--types", "Q4_0,Q8_0", "-o", "/proc", "--json")
    assert done.code == 1
    assert "but /proc has only 0 B free" in done.document()["error"]
    assert "Q4_0 6.5 MB, Q8_0 10.9 MB" in done.document()["error"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_half_written_is_left(cli: Cli, target: Path, folder: Path, how: signal.Signals) -> None:
    types = "Q5_K_M,Q5_K_S,Q6_K,Q3_K_L,Q3_K_M,IQ3_S,Q2_K"
    command = ("quantize", target, "--types", types, "-o", folder, "--json")
    with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert eventually(lambda: list(folder.glob("ggufspec-scratch-*")))
        running = workers(parent.pid)
        parent.send_signal(how)
        stdout, stderr = parent.communicate()
    assert "Traceback" not in stderr
    assert all_end(running)
    assert not list(folder.glob("ggufspec-scratch-*"))
    assert all(path.read_bytes()[:4] == b"GGUF" for path in folder.iterdir())
    if how is signal.SIGINT:
        assert parent.returncode == 130
        assert json.loads(stdout)["error"] == "interrupted"


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("model-F16.gguf", "model"),
        ("Meta-Llama-3-8B.Q4_K_M.gguf", "Meta-Llama-3-8B"),
        ("model.gguf", "model"),
        ("m-UD-Q4_K_XL.gguf", "m"),
        ("m-bf16-00001-of-00003.gguf", "m"),
        ("F16.gguf", "F16"),
    ],
)
def test_names(name: str, stem: str) -> None:
    assert outputs(Path("a") / name, Path("b"), ["Q8_0"]) == {"Q8_0": Path("b") / f"{stem}-Q8_0.gguf"}
