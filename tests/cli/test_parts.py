"""A pair whole and in parts through eight commands: the same pair, however its files are cut."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.gguf_files import split
from tests.support.processes import PATIENCE_S, Cli

pytestmark = pytest.mark.full

PROMPT = ("-p", "def main(")
DRAFTS = ("demo-draft-Q8_0", "demo-eagle3-Q8_0")


@pytest.fixture(scope="module", params=DRAFTS)
def pairs(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The options that name the pair: whole, by the first parts, and by later ones."""
    folder = tmp_path_factory.mktemp("parts")
    draft = target.with_name(f"{request.param}.gguf")
    targets, drafts = split(target, folder, 3), split(draft, folder, 2)
    return {
        "whole": ("-m", target, "-md", draft),
        "first": ("-m", targets[0], "-md", drafts[0]),
        "later": ("-m", targets[2], "-md", drafts[1]),
    }


def documents(cli: Cli, pairs: dict[str, Any], name: str, *arguments: str | Path) -> list[Any]:
    """One document for each way to name the pair."""
    found = []
    for pair in pairs.values():
        done = cli(name, *pair, *arguments, "--json")
        assert done.code == 0, done.stderr
        found.append(done.document())
    return found


def same(values: list[Any]) -> bool:
    return len(values) == 3 and all(value == values[0] for value in values)


def test_run(cli: Cli, pairs: dict[str, Any]) -> None:
    assert same([one["tokens"] for one in documents(cli, pairs, "run", *PROMPT, "-n", "16")])


def test_plan(cli: Cli, pairs: dict[str, Any]) -> None:
    found = documents(cli, pairs, "plan", "--vram", "1GiB", "-c", "512", "--no-calibrate")
    names = ("gpu_layers", "layers", "split", "n_cpu_moe")
    assert same([[one[role].get(name) for role in ("target", "draft") for name in names] for one in found])


def test_export(cli: Cli, pairs: dict[str, Any]) -> None:
    found = [cli("export", *pair, "-c", "512", "--drafter", "draft").stdout for pair in list(pairs.values())[1:]]
    for command in found:
        words = shlex.split(command, comments=True)
        assert words[words.index("-m") + 1].endswith("-00001-of-00003.gguf")
        assert words[words.index("-md") + 1].endswith("-00001-of-00002.gguf")


def test_bench(cli: Cli, pairs: dict[str, Any]) -> None:
    found = documents(cli, pairs, "bench", *PROMPT, "-n", "16", "-r", "1", "--no-calibrate")
    assert same([{name: run and run["tokens"] for name, run in one["runs"].items()} for one in found])
    assert all(one["failures"] == {} for one in found)


def test_compare(cli: Cli, pairs: dict[str, Any], tmp_path: Path) -> None:
    for pair in pairs.values():
        done = cli("compare", *pair, *PROMPT, "-n", "8", "-r", "1", "--results", tmp_path, "--json")
        assert done.code == 0, done.stderr
        cells = done.document()["cells"]
        assert [cell["failure"] for cell in cells] == [None, None]
        assert [cell["run"]["tokens"] for cell in cells] == [8, 8]


def test_verify(cli: Cli, pairs: dict[str, Any]) -> None:
    assert [one["passed"] for one in documents(cli, pairs, "verify", "--quick")] == [True] * 3


def test_tune(cli: Cli, pairs: dict[str, Any], tmp_path: Path) -> None:
    for pair in pairs.values():
        done = cli("tune", *pair, *PROMPT, "-n", "8", "--budget", "20s", "--no-save", "--results", tmp_path, "--json")
        assert done.code == 0, done.stderr
        document = done.document()
        assert document["trials"]
        assert not document["interrupted"]


def test_serve(cli: Cli, pairs: dict[str, Any]) -> None:
    texts = []
    for pair in pairs.values():
        command = ("serve", *pair, "-c", "512", "--port", "0", "--json", "-q")
        with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
            with contextlib.closing(httpx2.Client(timeout=PATIENCE_S)) as client:
                url = json.loads(server.stdout.readline())["endpoint"].rstrip("/")
                body = {"prompt": "def main(", "max_tokens": 16, "temperature": 0}
                answer = client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                texts.append(answer.json()["choices"][0]["text"])
            server.terminate()
            server.wait(PATIENCE_S)
    assert same(texts)
