"""A folder of evidence: what is measured when, what is saved, and what a second sitting adds to the first."""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.errors import ChildError, GgufspecError, UsageError
from lab import evidence
from lab.evidence import Budget, Evidence, check_parts, ordered
from lab.evidence_device import LocalCard
from lab.evidence_documents import PARTS, Agreeing, Card, ClassesFound, PlacedModel, read_part, read_run
from lab.evidence_lab import Lab, Task
from lab.evidence_models import SCALES, File, Shelf
from lab.expansion import Model
from lab.peers import NotThereError

CARD = Card("CUDA0", "NVIDIA Test 24GB", "cuda", 24 << 30, None, "")
FOUND = ClassesFound(PlacedModel("m.gguf", 9, 9), "F16", 1, 16, (Agreeing((1, 2)),), (1, 2))


class Clock:
    """Clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """GPU whose memory in use is set by the test."""

    card = CARD
    slack_bytes = 0

    def __init__(self) -> None:
        self.used: int | None = 100

    def endpoints(self) -> tuple[str, ...]:
        return ()

    def used_bytes(self) -> int | None:
        return self.used

    def renew(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def task(name: str, run: Any = lambda lab: FOUND, *, rank: int = 0, part: str = "h", expected_s: float = 1.0) -> Task:
    return Task(part, name, rank, expected_s, run)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(LocalCard(CARD), SCALES["tiny"], Shelf(tmp_path / "models", "holes"), 1)


def begin(folder: Path, lab: Lab, todo: list[Task], *, budget: Budget | None = None, letters: str = "h") -> Evidence:
    asked = evidence.settings(lab.scale, device="cuda", threads=1, vram_bytes=None, fill="holes")
    run = evidence.start(folder, CARD, asked, (), "scripts/gpu_evidence")
    return Evidence(folder, run, lab, letters, budget or Budget(1000.0), todo=todo)


def rows(folder: Path, letter: str = "h") -> dict[str, Any]:
    part = read_part(folder, letter)
    assert part is not None
    return {row.name: row for row in part.rows}


# ---- which and when -------------------------------------------------------------------------------


def test_a_budget_learns_how_wrong_guesses_are() -> None:
    clock = Clock()
    budget = Budget(100.0, clock)
    assert budget.fits(100.0)
    assert not budget.fits(101.0)
    budget.learn(10.0, 20.0)
    assert budget.factor == 2.0
    assert not budget.fits(51.0)
    clock.now = 60.0
    assert budget.left_s == 40.0
    assert budget.fits(20.0)
    for _ in range(6):
        budget.learn(1.0, 1000.0)
    assert budget.factor == 4.0  # one that hung says little about the others


def test_the_most_telling_comes_first_and_what_failed_last() -> None:
    todo = [
        task("late", part="d", rank=1),
        task("c", part="c"),
        task("d", part="d"),
        task("failed", part="d"),
        task("done", part="d"),
        task("calibration", part="g", rank=-1),
    ]
    states = {evidence.key(todo[3]): "failed", evidence.key(todo[4]): "done", evidence.key(todo[1]): "not run"}
    assert [one.name for one in ordered(todo, states)] == ["calibration", "d", "c", "late", "failed"]
    assert set(evidence.VALUE) == set(PARTS)


def test_a_measurement_s_key_is_what_it_depends_on() -> None:
    one = Task("a", "x", 0, 1.0, lambda lab: FOUND, (File(Model("tiny", "Q8_0")),), (0.5,))
    same = replace(one, rank=2, expected_s=9.0, run=lambda lab: None)
    others = [replace(one, facts=(0.25,)), replace(one, files=()), replace(one, part="b"), replace(one, name="y")]
    assert evidence.key(one) == evidence.key(same)
    assert len({evidence.key(other) for other in (one, *others)}) == 5


def test_every_part_has_something_that_comes_first(lab: Lab) -> None:
    for scale in SCALES.values():
        todo = evidence.tasks(replace(lab, scale=scale), "abcdefgh")
        assert {one.part for one in todo if one.rank <= 0} == set(PARTS)
        assert len({(one.part, one.name) for one in todo}) == len(todo)
        assert len({evidence.key(one) for one in todo}) == len(todo)
        assert all(one.expected_s > 0 for one in todo)


def test_only_parts_that_there_are() -> None:
    assert check_parts("d, a,d") == "da"
    for text in ("x", "a,zz", "", ","):
        with pytest.raises(UsageError, match="no part") as raised:
            check_parts(text)
        assert "d (notebook)" in raised.value.hint


def test_a_quick_look_leaves_the_rest_as_not_run(tmp_path: Path, lab: Lab) -> None:
    todo = [task("first"), task("second", rank=1), task("calibration", rank=-1)]
    asked = evidence.settings(lab.scale, device="cuda", threads=1, vram_bytes=None, fill="holes")
    run = evidence.start(tmp_path / "f", CARD, asked, (), "")
    outcome = Evidence(tmp_path / "f", run, lab, "h", Budget(1000.0), todo=todo, quick=True).make()
    assert (outcome.done, outcome.left) == (2, 1)
    assert rows(tmp_path / "f")["second"].state == "not run"


# ---- what becomes of it ---------------------------------------------------------------------------


def test_what_fails_is_a_row_and_sinks_nothing(tmp_path: Path, lab: Lab) -> None:
    def fail(error: Exception) -> Any:
        def run(lab: Lab) -> ClassesFound:
            raise error

        return run

    todo = [
        task("abort", fail(ChildError("GGML_ASSERT(x)", "-v shows llama.cpp's log"))),
        task("no memory", fail(OSError(12, "Cannot allocate memory"))),
        task("no program", fail(NotThereError("it is not there", "scripts/peers"))),
        task("good"),
    ]
    outcome = begin(tmp_path / "f", lab, todo).make()
    assert (outcome.done, outcome.failed, outcome.left) == (1, 2, 1)
    found = rows(tmp_path / "f")
    assert (found["abort"].state, found["abort"].error) == ("failed", "GGML_ASSERT(x)")
    assert "Cannot allocate memory" in found["no memory"].error
    assert (found["no program"].state, found["no program"].hint) == ("not run", "scripts/peers")
    assert (found["good"].state, found["good"].found) == ("done", FOUND)
    page = (tmp_path / "f" / "README.md").read_text()
    assert "failed: abort: GGML_ASSERT(x)" in page
    assert "Not run yet, 1 (it is not there): no program." in page


def test_a_mistake_of_our_own_is_a_row_that_says_where(tmp_path: Path, lab: Lab) -> None:
    """A bug in one measurement must not waste time on a rented GPU."""

    def broken(lab: Lab) -> ClassesFound:
        raise KeyError("sizes")

    outcome = begin(tmp_path / "f", lab, [task("broken", broken), task("good")]).make()
    assert (outcome.done, outcome.failed) == (1, 1)
    row = rows(tmp_path / "f")["broken"]
    assert row.error == "a mistake of ggufspec's own: KeyError: 'sizes'"
    assert "in broken" in row.hint


def test_a_failure_is_not_forgotten_for_want_of_time(tmp_path: Path, lab: Lab) -> None:
    def fail(lab: Lab) -> ClassesFound:
        raise GgufspecError("out of memory")

    begin(tmp_path / "f", lab, [task("x", fail, expected_s=5.0)]).make()
    begin(tmp_path / "f", lab, [task("x", fail, expected_s=5.0)], budget=Budget(1.0)).make()
    assert (rows(tmp_path / "f")["x"].state, rows(tmp_path / "f")["x"].error) == ("failed", "out of memory")


def test_memory_over_the_ceiling_is_a_failed_row_that_shows_what_was_found(tmp_path: Path, lab: Lab) -> None:
    memory = Memory()
    lab = replace(lab, site=memory, vram_bytes=1 << 30)

    def hungry(lab: Lab) -> ClassesFound:
        with lab.watch() as meter:
            memory.used = 100 + (3 << 30)
            meter.look()
            memory.used = 100
        return FOUND

    def modest(lab: Lab) -> ClassesFound:
        with lab.watch() as meter:
            memory.used = 100 + (1 << 29)
            meter.look()
            memory.used = 100
        return FOUND

    outcome = begin(tmp_path / "f", lab, [task("hungry", hungry), task("modest", modest)]).make()
    assert (outcome.done, outcome.failed) == (1, 1)
    found = rows(tmp_path / "f")
    assert "used 3.0 GiB of the device, over the ceiling of 1.0 GiB" in found["hungry"].error
    assert (found["hungry"].peak_bytes, found["hungry"].found) == (3 << 30, FOUND)
    assert (found["modest"].peak_bytes, found["modest"].state) == (1 << 29, "done")


def test_what_does_not_fit_the_time_is_listed_and_run_by_the_next_sitting(tmp_path: Path, lab: Lab) -> None:
    clock = Clock()
    ran: list[str] = []

    def run(name: str) -> Any:
        def measure(lab: Lab) -> ClassesFound:
            ran.append(name)
            return FOUND

        return measure

    todo = [task(name, run(name), expected_s=s) for name, s in (("short", 5.0), ("long", 500.0), ("shorter", 1.0))]
    first = begin(tmp_path / "f", lab, todo, budget=Budget(10.0, clock)).make()
    assert ran == ["short", "shorter"]
    assert (first.done, first.left) == (2, 1)
    part = read_part(tmp_path / "f", "h")
    assert part is not None
    assert not part.complete
    assert "Not run yet, 1 (about" in (tmp_path / "f" / "README.md").read_text()
    before = rows(tmp_path / "f")

    second = begin(tmp_path / "f", lab, todo, budget=Budget(1000.0, clock)).make()
    assert ran == ["short", "shorter", "long"]
    assert (second.done, second.left) == (3, 0)
    after = rows(tmp_path / "f")
    assert all(after[name] == before[name] for name in ("short", "shorter"))
    run_document = read_run(tmp_path / "f")
    assert run_document is not None
    assert [one.ended for one in run_document.sittings] == ["time", "done"]


def test_what_hangs_is_cut_off(tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_PATIENCE_S", 0.2)
    began = time.monotonic()
    hanging = task("hanging", lambda lab: threading.Event().wait(60), expected_s=0.01)
    outcome = begin(tmp_path / "f", lab, [hanging, task("good")]).make()
    assert time.monotonic() - began < 30
    assert (outcome.done, outcome.failed) == (1, 1)
    assert "did not end within" in rows(tmp_path / "f")["hanging"].error
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_what_is_under_way_when_the_time_is_up_is_not_failed(
    tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_GRACE_S", 0.0)
    slow = task("slow", lambda lab: threading.Event().wait(60), expected_s=0.1)
    outcome = begin(tmp_path / "f", lab, [slow], budget=Budget(0.3, Clock())).make()
    assert (outcome.failed, outcome.left) == (0, 1)
    row = rows(tmp_path / "f")["slow"]
    assert (row.state, row.error) == ("not run", "the time was up meanwhile")
    assert row.expected_s > 0.3


def test_ctrl_c_keeps_what_was_done(tmp_path: Path, lab: Lab) -> None:
    def interrupted(lab: Lab) -> ClassesFound:
        raise KeyboardInterrupt

    todo = [task("good"), task("interrupted", interrupted), task("never")]
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "f", lab, todo).make()
    assert {name: row.state for name, row in rows(tmp_path / "f").items()} == {
        "good": "done",
        "interrupted": "not run",
        "never": "not run",
    }
    run = read_run(tmp_path / "f")
    assert run is not None
    assert run.sittings[-1].ended == "interrupted"


def test_a_sitting_that_was_killed_is_told(tmp_path: Path, lab: Lab) -> None:
    begin(tmp_path / "f", lab, [task("good")])  # and nothing more
    begin(tmp_path / "f", lab, [task("good")]).make()
    run = read_run(tmp_path / "f")
    assert run is not None
    assert [one.ended for one in run.sittings] == ["killed", "done"]


def test_a_failed_row_is_tried_again(tmp_path: Path, lab: Lab) -> None:
    def fail(lab: Lab) -> ClassesFound:
        raise GgufspecError("not now")

    begin(tmp_path / "f", lab, [task("x", fail)]).make()
    begin(tmp_path / "f", lab, [task("x")]).make()
    assert rows(tmp_path / "f")["x"].state == "done"


# ---- whose figures they are -----------------------------------------------------------------------


def test_figures_of_other_settings_are_not_mixed(tmp_path: Path, lab: Lab) -> None:
    begin(tmp_path / "f", lab, [task("good")]).make()
    before = (tmp_path / "f" / "run.json").read_text()
    others = [
        (CARD, {"vram_bytes": 24 << 30}, "vram was None, is 25769803776"),
        (CARD, {"threads": 8}, "threads was 1, is 8"),
        (replace(CARD, description="another"), {}, "card was NVIDIA Test 24GB, is another"),
        (replace(CARD, driver="600"), {}, "driver was , is 600"),
    ]
    for card, changed, said in others:
        asked = evidence.settings(
            lab.scale, **{"device": "cuda", "threads": 1, "vram_bytes": None, "fill": "holes", **changed}
        )
        with pytest.raises(UsageError, match="figures of something else") as raised:
            evidence.start(tmp_path / "f", card, asked, (), "")
        assert said in raised.value.message
    assert (tmp_path / "f" / "run.json").read_text() == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "ggufspec/evidence@9"}', '{"schema": "ggufspec/evidence@1"}']
)
def test_a_damaged_folder_is_refused(tmp_path: Path, lab: Lab, text: str) -> None:
    begin(tmp_path / "f", lab, [task("good")]).make()
    (tmp_path / "f" / "run.json").write_text(text)
    with pytest.raises(GgufspecError) as raised:
        begin(tmp_path / "f", lab, [task("good")])
    assert "--folder" in raised.value.hint


def test_a_damaged_part_is_refused_and_left_alone(tmp_path: Path, lab: Lab) -> None:
    begin(tmp_path / "f", lab, [task("good")]).make()
    path = tmp_path / "f" / PARTS["h"].file
    body = json.loads(path.read_text())
    body["rows"][0]["found"]["limit"] = "many"
    path.write_text(json.dumps(body))
    with pytest.raises(GgufspecError, match="damaged: rows"):
        begin(tmp_path / "f", lab, [task("good")])
    assert json.loads(path.read_text()) == body


def test_a_folder_that_cannot_be_made(tmp_path: Path, lab: Lab) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GgufspecError, match="cannot be made") as raised:
        begin(tmp_path / "file" / "f", lab, [task("good")])
    assert "--folder" in raised.value.hint


def test_a_folder_is_named_after_day_and_card(tmp_path: Path) -> None:
    card = replace(CARD, description="RPC worker on Intel(R) Xeon(R)  @ 2.20GHz ✓")
    assert evidence.default_folder(tmp_path, CARD, "2026-11-21").name == "2026-11-21-nvidia-test-24gb"
    assert (
        evidence.default_folder(tmp_path, card, "2026-11-21").name == "2026-11-21-rpc-worker-on-intel-r-xeon-r-2-20ghz"
    )
