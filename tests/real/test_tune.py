"""Real tuning of the pair that ships: on the CPU with an RPC device, killed midway and resumed; trials that die."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ggufspec.models.profile import load_profile
from tests.support.processes import Cli, all_end, eventually, rpc_worker, workers

CARD_BYTES = 20_000_000  # the target's seven layers take more


@pytest.fixture
def worker() -> Iterator[str]:
    """The endpoint of a worker that answers."""
    with rpc_worker() as (endpoint, _):
        yield endpoint


def kept(cli: Cli) -> list[dict[str, Any]]:
    """The measurements so far."""
    lines = [
        json.loads(line)
        for path in cli.folder.glob("results/tune-*.jsonl")
        for line in path.read_text().splitlines()[1:]
        if line.endswith("}")
    ]
    return [entry["value"] for entry in lines if entry["key"] != "final"]


def test_a_card_with_a_budget_killed_and_resumed(cli: Cli, worker: str) -> None:
    plan = cli("plan", "demo", "--rpc", worker, "--json").document()
    card = next(device for device in plan["devices"] if device["name"] != "CPU")
    flags = ("--rpc", worker, "--headroom", str(card["free_bytes"] - CARD_BYTES), "--results", "results")
    flags += ("-p", "def f(", "-n", "16", "-r", "2", "--draft-policy", "adaptive", "-fa", "on", "--threshold", "5")
    with cli.start("tune", "demo", *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert eventually(lambda: len(kept(cli)) >= 3)
        running = workers(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    assert all_end(running)
    before = kept(cli)
    done = cli("tune", "demo", *flags, "--save", "demo", "--json")
    assert done.code == 0, done.stderr
    assert kept(cli)[: len(before)] == before
    document = done.document()
    tried = [trial["setting"] for trial in document["trials"]]
    assert len({(setting["gpu_layers"], setting["n_cpu_ffn"]) for setting in tried}) > 1
    assert max(setting["gpu_layers"] - setting["n_cpu_ffn"] for setting in tried) <= 7
    assert document["settings"]["space"] >= len(tried)
    profile = load_profile(Path(document["saved"]))
    winner = tried[document["winner"]]
    assert profile.target.gpu_layers == winner["gpu_layers"]
    ran = cli("run", "demo", "--rpc", worker, "-p", "def f(", "-n", "4", "--json").document()
    assert ran["statistics"]["gpu_layers"] == winner["gpu_layers"]
    assert ran["settings"]["drafter"] == winner["drafter"]
    assert ran["settings"]["ubatch_size"] in (0, winner["ubatch_size"])


ABORTS = """
import os, sys
from ggufspec.llamacpp import model
made = model.Model.__init__
def abort(self, path, *more, **named):
    if {condition}:
        {what}
    made(self, path, *more, **named)
model.Model.__init__ = abort
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("os.abort()", ("SIGABRT", "abort")),
        pytest.param(
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))",
            ("memory", "load", "SIG"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_trial_that_dies_is_a_row(cli: Cli, tmp_path: Path, what: str, words: tuple[str, ...]) -> None:
    """Whoever loads the draft dies for real, in the trial's own process."""
    folder = tmp_path / "site"
    folder.mkdir()
    condition = "'draft' in str(path) and 'ggufspec.bench.trial' in sys.argv"
    (folder / "sitecustomize.py").write_text(ABORTS.format(condition=condition, what=what))
    flags = ("-p", "def f(", "-n", "8", "-r", "1", "-fa", "auto", "--draft-policy", "adaptive", "--no-save", "--json")
    done = cli("tune", "demo", *flags, PYTHONPATH=str(folder))
    assert done.code == 0, done.stderr
    document = done.document()
    died = [trial for trial in document["trials"] if trial["failure"]]
    assert died
    assert all(trial["setting"]["drafter"] in ("draft", "both") for trial in died)
    assert any(word in died[0]["failure"]["error"] + died[0]["failure"]["hint"] for word in words)
    winner = document["trials"][document["winner"]]
    assert winner["setting"]["drafter"] in ("lookup", "none")
