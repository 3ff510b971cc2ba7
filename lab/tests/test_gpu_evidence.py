"""``scripts/gpu_evidence`` as people start it, with a worker on loopback as the device and tiny models."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab import evidence
from lab.evidence_bytes import bytes_tasks
from lab.evidence_device import open_site
from lab.evidence_documents import PARTS, Part, Run, read_part, read_run
from lab.evidence_lab import Lab
from lab.evidence_models import SCALES, Shelf
from tests.support.processes import PATIENCE_S, Finished, _heed_signals, all_end, eventually, workers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_evidence"
RPC = ("--device", "rpc", "--shapes", "tiny", "-t", "1")
MINUTES = 8  # more than all of it takes on a machine that is busy with other tests


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home and models of the tests' own."""
    return tmp_path_factory.mktemp("evidence")


def environment(place: Path) -> dict[str, str]:
    own = ("GGUFSPEC_", "XDG_", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return kept | {"HOME": str(place / "home"), "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": ""}


def run(place: Path, *arguments: str | Path, patience_s: float = PATIENCE_S) -> Finished:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--models", place / "models", *arguments],
        capture_output=True,
        env=environment(place),
        timeout=patience_s,
    )
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


def start(place: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--models", place / "models", *arguments],
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_signals,
    )


def documents(folder: Path) -> tuple[Run, dict[str, Part[Any]]]:
    """Everything in a folder, held to its types."""
    found, parts = read_run(folder), {letter: read_part(folder, letter) for letter in PARTS}
    assert found is not None
    return found, {letter: part for letter, part in parts.items() if part is not None}


def done(part: Part[Any]) -> dict[str, Any]:
    return {row.name: row for row in part.rows if row.state == "done"}


@pytest.fixture(scope="module")
def measured(place: Path) -> tuple[Path, Finished, float]:
    """One sitting of all parts: (folder, what was said, seconds)."""
    began = time.monotonic()
    asked = (*RPC, "--quick", "--minutes", f"{MINUTES}", "--folder", place / "all", "--peers", place)
    finished = run(place, *asked, patience_s=60 * MINUTES + PATIENCE_S)
    return place / "all", finished, time.monotonic() - began


@pytest.mark.full
def test_every_part_is_measured_in_the_time(measured: tuple[Path, Finished, float]) -> None:
    folder, finished, seconds = measured
    assert (finished.code, finished.stderr) == (0, "")
    assert seconds < 60 * MINUTES + 30
    found, parts = documents(folder)
    assert set(parts) == set(PARTS)
    for letter, part in parts.items():
        assert [row.error for row in part.rows if row.state == "failed"] == []
        assert done(part), f"nothing of part {letter}: {finished.stdout}"
    assert found.sittings[0].ended in ("time", "done")
    assert found.card.kind == "rpc"
    assert "llama-speculative-simple is not there" in finished.stdout
    lines = finished.stdout.splitlines()
    assert all(any(line.startswith(f"  {letter}  ") for line in lines) for letter in PARTS)


@pytest.mark.full
def test_the_planner_s_bytes_are_llama_cpp_s(measured: tuple[Path, Finished, float]) -> None:
    _, parts = documents(measured[0])
    for row in done(parts["a"]).values():
        assert row.found.dry == row.found.allocated
        assert row.found.estimate.total >= row.found.allocated.total
        assert 0 <= row.found.device_bytes < row.found.allocated.total + (96 << 20)
    for row in done(parts["b"]).values():
        assert row.found.planned <= row.found.largest <= row.found.planned + 1
        assert 0 < row.found.largest < row.found.target.layers  # the ceiling holds a part of it


@pytest.mark.full
def test_times_and_ways_are_those_that_were_asked_for(measured: tuple[Path, Finished, float]) -> None:
    _, parts = documents(measured[0])
    widths = next(iter(done(parts["c"]).values())).found
    assert set(widths.seconds) == {1, 2, 4, 8}
    assert widths.relative[1] == 1.0
    assert widths.relative[8] > 1
    names = {way.name for way in parts["d"].ways}
    assert {"target-only at its own best placement", "speculative, 4 drafted", "speculative, adaptive"} <= names
    drafted = next(way for way in parts["d"].ways if way.name == "speculative, 4 drafted")
    assert drafted.over_target_only is not None
    assert drafted.over_target_only.median > 0
    assert 0 < drafted.acceptance_rate <= 1
    assert drafted.gpu_layers_draft is not None
    hopeless = next(way for way in parts["f"].ways if way.name == "speculative, 4 drafted")
    assert hopeless.acceptance_rate < 0.5 * drafted.acceptance_rate


@pytest.mark.full
def test_speeds_are_predicted_for_what_was_run(measured: tuple[Path, Finished, float]) -> None:
    _, parts = documents(measured[0])
    rows = [row for row in parts["g"].rows if row.name != "calibration"]
    assert {row.name[0] for row in rows} >= set("acdef")
    assert all(row.found.measured > 0 and row.found.predicted > 0 for row in rows)


@pytest.mark.full
def test_strict_mode_is_kept(measured: tuple[Path, Finished, float]) -> None:
    _, parts = documents(measured[0])
    certificate = next(row.found for name, row in done(parts["h"]).items() if name.startswith("certificate"))
    strict = [check for check in certificate.checks if check.section == "strict"]
    assert {check.rule for check in strict} == {"greedy", "coupled"}
    assert certificate.passed, certificate.text
    assert all(check.status != "failed" for check in certificate.checks)


@pytest.mark.full
def test_the_summary_is_readable(measured: tuple[Path, Finished, float]) -> None:
    text = (measured[0] / "README.md").read_text(encoding="utf-8")
    assert [line[3] for line in text.splitlines() if line.startswith("## ")] == list(PARTS)
    assert "None" not in text
    assert "nan" not in text


@pytest.mark.full
def test_a_second_sitting_keeps_the_rows_of_the_first(measured: tuple[Path, Finished, float], place: Path) -> None:
    folder = shutil.copytree(measured[0], place / "again")
    _, before = documents(folder)
    finished = run(place, *RPC, "--minutes", "0.1", "--only", "b,g", "--folder", folder)
    assert finished.code == 0
    found, after = documents(folder)
    assert len(found.sittings) == 2
    for letter in PARTS:
        known, now = done(before[letter]), done(after[letter])
        assert {name: row.at for name, row in known.items()}.items() <= {n: row.at for n, row in now.items()}.items()


def first_row(folder: Path, letter: str) -> Any:
    part = read_part(folder, letter) if (folder / PARTS[letter].file).exists() else None
    return next(iter(done(part).values()), None) if part else None


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_is_done_and_leaves_nothing_running(place: Path, number: signal.Signals) -> None:
    folder = place / f"interrupted-{number.name}"
    child = start(place, *RPC, "--only", "a", "--minutes", "5", "--folder", folder)
    assert eventually(lambda: first_row(folder, "a") is not None and len(workers(child.pid)) > 1)
    running = workers(child.pid)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert "interrupted: every row that was done is kept" in stderr
    assert "Traceback" not in stderr
    assert all_end(running)
    found, parts = documents(folder)
    assert found.sittings[-1].ended == "interrupted"
    assert any(row.state == "not run" for row in parts["a"].rows)
    assert (folder / "README.md").exists()


@pytest.mark.full
def test_a_kill_loses_no_row(place: Path) -> None:
    folder = place / "killed"
    child = start(place, *RPC, "--only", "a", "--minutes", "5", "--folder", folder)
    assert eventually(lambda: first_row(folder, "a") is not None and len(workers(child.pid)) > 1)
    running = workers(child.pid)
    child.kill()
    child.communicate()
    assert all_end(running)
    row = first_row(folder, "a")
    finished = run(place, *RPC, "--only", "a", "--minutes", "0.01", "--folder", folder)
    assert finished.code == 0
    found, parts = documents(folder)
    assert [one.ended for one in found.sittings] == ["killed", "time"]
    assert done(parts["a"])[row.name] == row


@pytest.mark.full
def test_a_damaged_model_costs_its_own_rows(place: Path) -> None:
    shelf = Shelf(place / "damaged", "holes")
    shelf.folder.mkdir(parents=True)
    (shelf.folder / "tiny-moe-Q8_0.gguf").write_bytes(b"GGUF" + bytes(100))
    with open_site("rpc", 1, share=False) as (site, _):
        lab = Lab(site, SCALES["tiny"], shelf, 1)
        asked = evidence.settings(lab.scale, device="rpc", threads=1, vram_bytes=None, fill="holes")
        started = evidence.start(place / "failing", site.card, asked, (), "")
        names = ("experts, half of the layers, f16 cache", "dense, all layers, f16 cache")
        todo = [task for task in bytes_tasks(lab) if task.name in names]
        outcome = evidence.Evidence(place / "failing", started, lab, "a", evidence.Budget(PATIENCE_S), todo=todo).make()
    assert (outcome.done, outcome.failed, outcome.left) == (1, 1, 0)
    failed = next(row for row in documents(place / "failing")[1]["a"].rows if row.state == "failed")
    assert failed.name == names[0]
    assert "tiny-moe-Q8_0.gguf" in failed.error
    assert failed.hint


@pytest.mark.parametrize(
    ("arguments", "code", "said", "hint"),
    [
        (("--only", "x", *RPC), 2, "there is no part x", "d (notebook)"),
        pytest.param(("--minutes", "0", *RPC), 2, "no time to spend", "--minutes 9", marks=pytest.mark.full),
        pytest.param(("--minutes", "nan", *RPC), 2, "no time to spend", "--minutes 9", marks=pytest.mark.full),
        pytest.param(("--vram", "much", *RPC), 2, "is not a memory size", "24GiB", marks=pytest.mark.full),
        pytest.param(("--vram", "1000K", *RPC), 2, "less than anything takes", "24GiB", marks=pytest.mark.full),
        pytest.param(("--vram", "900TiB", *RPC), 2, "fewer than --vram", "leave --vram out", marks=pytest.mark.full),
        pytest.param(("--threads", "-1", "--device", "rpc"), 2, "cannot run", "leave -t out", marks=pytest.mark.full),
        (("--folder", "/dev/null/x", *RPC), 1, "cannot be made", "--folder"),
        pytest.param(("--device", "cuda"), 1, "driver", "rpc", marks=pytest.mark.full),
        pytest.param(("--device", "abacus"), 2, "no device called abacus", "rpc", marks=pytest.mark.full),
    ],
)
def test_bad_input(place: Path, arguments: tuple[str, ...], code: int, said: str, hint: str) -> None:
    finished = run(place, *arguments)
    assert (finished.code, finished.stdout) == (code, finished.stdout)
    first, second = finished.stderr.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("  next: ")
    assert hint in second


@pytest.mark.full
def test_other_settings_in_the_same_folder(measured: tuple[Path, Finished, float], place: Path) -> None:
    finished = run(place, *RPC, "--vram", "64MiB", "--folder", measured[0])
    assert finished.code == 2
    assert "vram was None, is 67108864" in finished.stderr


def test_the_list_says_what_each_will_take(place: Path) -> None:
    finished = run(place, *RPC, "--list", "--only", "b", "--folder", place / "listed")
    assert finished.code == 0
    assert "b  target-only: about " in finished.stdout
    assert not (place / "listed").exists()


IMPORTED = """
import sys
sys.argv, sys.dont_write_bytecode = ["gpu_evidence"], True
from importlib.machinery import SourceFileLoader
script = SourceFileLoader("gpu_evidence", {script!r}).load_module()
from lab import evidence
from ggufspec.chat import session
from ggufspec.bench import batch_timing
from lab import width_classes
from ggufspec.verify import run as verify
from ggufspec.llamacpp import rpc
absent = {{"rich", "typer", "huggingface_hub", "gguf", "tomlkit"}}
print(sorted({{name.split(".")[0] for name in sys.modules}} & absent))
"""


def test_it_needs_few_packages(place: Path) -> None:
    """A rented machine has no more than numpy, pydantic and llama_cpp, say."""
    program = IMPORTED.format(script=str(SCRIPT))
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(place))
    assert finished.stderr.replace("\n", "") == "" or finished.returncode == 0
    assert finished.stdout.strip() == "[]"
