"""Caches: whatever is wrong with an entry, it is as if it were not there; and without a folder for them all goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.files import cache as caches
from tests.support.processes import SCRIPT, Cli, Finished

GARBAGE = {
    "empty": b"",
    "noise": b"\xff\xfe\x00\x01" * 100,
    "torn": b'{"devices": {"CPU": {"weights": 1',
    "null": b"null",
    "a list": b"[1, 2, 3]",
    "an empty object": b"{}",
    "wrong types": b'{"devices": 7, "output": [], "error": {}, "machine": 1, "identity": [], "speed": 0, "latency": 0}',
    "wrong values": b'{"devices": {"CPU": {"weights": -1, "kv": 0, "compute": 0}}, "output": 0, "error": ""}',
    "no numbers": b'{"devices": {"CPU": {"weights": NaN, "kv": 0, "compute": 0}}, "output": 0, "error": ""}',
    "deep": b'{"a":' * 100_000,
    "null characters": b'{"a": "\0"}',
}
CARD = ("--vram", "2GiB")


Plan = dict[str, Any]


def what_is_planned(done: Finished) -> Plan:
    """Without the memory that is free at the moment."""
    document = done.document()
    return {key: document[key] for key in ("target", "draft", "options", "predicted", "choice", "confirmed")}


@pytest.fixture(scope="module")
def used(new_cli) -> tuple[Cli, Path, Plan]:  # type: ignore[no-untyped-def]
    """A command line that has planned before, its cache, and the plan."""
    cli = new_cli()
    done = cli("plan", "demo", *CARD, "--json")
    assert done.code == 0, done.stderr
    cache = Path(cli.environment["HOME"]) / ".cache" / "ggufspec"
    (cache / "acceptance.json").write_text(
        json.dumps({"demo-target-F16.gguf + demo-draft-Q8_0.gguf": {"accepted": 5, "reached": 10}})
    )
    (cache / "rehearsed.json").write_text("{}")
    (cache / "calibration.json").write_text("{}")
    (cache / "overheads.json").write_text("{}")
    return cli, cache, what_is_planned(done)


@pytest.mark.parametrize("what", GARBAGE)
def test_a_damaged_entry_counts_as_absent(used: tuple[Cli, Path, Plan], what: str) -> None:
    """Of every file of the cache at once: the plan is what it was with none of them."""
    cli, cache, plan = used
    files = [path for path in cache.rglob("*") if path.suffix == ".json"]
    assert {path.parent.name for path in files} == {"ggufspec", "dry-runs", "headers"}
    for path in files:
        path.write_bytes(GARBAGE[what])
    done = cli("plan", "demo", *CARD, "--json")
    assert done.code == 0, done.stderr
    assert what_is_planned(done) == plan
    assert what_is_planned(cli("plan", "demo", *CARD, "--json")) == plan  # kept anew


@pytest.mark.parametrize("entry", [7, [], {}, {"accepted": "5", "reached": 10}, {"accepted": 11, "reached": 10}])
def test_a_damaged_acceptance_is_none(used: tuple[Cli, Path, Plan], entry: object) -> None:
    cli, cache, plan = used
    (cache / "acceptance.json").write_text(json.dumps({"demo-target-F16 + demo-draft-Q8_0": entry}))
    assert what_is_planned(cli("plan", "demo", *CARD, "--json")) == plan


def test_folders_in_the_place_of_files(used: tuple[Cli, Path, Plan]) -> None:
    cli, cache, plan = used
    for path in [*cache.glob("*.json"), *cache.glob("dry-runs/*.json")]:
        path.unlink()
        path.mkdir()
    done = cli("plan", "demo", *CARD, "--json")
    assert done.code == 0, done.stderr
    assert what_is_planned(done) == plan
    shutil.rmtree(cache)
    assert what_is_planned(cli("plan", "demo", *CARD, "--json")) == plan


# ---- no folder for them ---------------------------------------------------------------------------------------------

NOWHERE = {
    "home below a file": {"HOME": "{file}/home"},
    "home in /proc": {"HOME": "/proc/nowhere"},
    "cache is a file": {"XDG_CACHE_HOME": "{file}"},
    "cache in /proc": {"XDG_CACHE_HOME": "/proc/nowhere"},
}


def without(cli: Cli, what: str, folder: Path) -> Cli:
    """The command line where a folder cannot be written; being root does not help."""
    (folder / "file").write_text("no folder")
    return replace(
        cli, environment=cli.environment | {k: v.format(file=folder / "file") for k, v in NOWHERE[what].items()}
    )


@pytest.mark.parametrize("what", NOWHERE)
def test_a_plan_needs_no_cache(cli: Cli, tmp_path: Path, what: str) -> None:
    left = set(Path(tempfile.gettempdir()).glob("ggufspec-*"))
    done = without(cli, what, tmp_path)("plan", "demo", *CARD)
    assert done.code == 0, done.stderr
    assert "target demo-target" in done.stdout
    assert done.stderr.count("nothing is kept in ") == 1
    assert "cannot be written: " in done.stderr
    assert {one for one in set(Path(tempfile.gettempdir()).glob("ggufspec-*")) - left if one.is_dir()} == set()
    assert without(cli, what, tmp_path)("plan", "demo", *CARD, "-q").stderr.count("nothing is kept") == 0


def test_a_full_disk_is_as_good_as_none(cli: Cli, tmp_path: Path) -> None:
    """Room for the probe and not for a header; a quota of this folder alone."""
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]).returncode:
        pytest.skip("only root may mount")
    try:
        for arguments in (("plan", "demo", *CARD), ("run", "demo", "-p", "def f(", "-n", "4")):
            done = cli(*arguments, XDG_CACHE_HOME=str(tmp_path))
            assert done.code == 0, done.stderr
            assert f"nothing is kept in {tmp_path}/ggufspec/headers, which cannot be written: " in done.stderr
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_what_is_shown_once_a_day_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether the last time was in this process or in another one; a damaged file, or none, counts as never."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def in_a_new_process() -> bool:
        monkeypatch.setattr(caches, "_today", set())
        return caches.first_today("this")

    assert in_a_new_process()
    assert not caches.first_today("this")
    assert not in_a_new_process()
    assert caches.first_today("that")
    file = tmp_path / "ggufspec" / "daily.json"
    file.write_text(json.dumps({"this": json.loads(file.read_text())["this"] - 25 * 3600}))
    assert in_a_new_process()
    file.write_bytes(GARBAGE["torn"])
    assert in_a_new_process()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert in_a_new_process()
    assert not caches.first_today("this")


def test_a_rehearsal_and_an_answer_need_no_cache(cli: Cli, tmp_path: Path) -> None:
    nowhere = without(cli, "home below a file", tmp_path)
    done = nowhere("rehearse", "demo", "-r", "1", "--depth", "8")
    assert done.code == 0, done.stderr
    assert "nothing is kept in " in done.stderr
    done = nowhere("run", "demo", "-p", "def f(", "-n", "4")
    assert done.code == 0, done.stderr


@pytest.mark.full
def test_a_bench_needs_no_home(cli: Cli, tmp_path: Path) -> None:
    """Its usual pair is expanded first, and its results have a folder of their own."""
    done = without(cli, "home below a file", tmp_path)("bench", "-p", "def f(", "-n", "4", "-r", "1", "--json")
    assert done.code == 0, done.stderr
    assert done.stderr.count("nothing is kept in ") == 1
    assert done.document()["schema"] == "ggufspec/bench@1"


NOBODY = ["unshare", "-U", "--map-user=12345"]


@pytest.mark.parametrize(
    "words",
    ["run demo -p x -n 1", "plan demo", "export demo", "profiles list", "models", "pull --dry-run", "chat --help"],
)
def test_a_user_who_is_nobody_has_a_temporary_home(cli: Cli, words: str) -> None:
    """No entry of the user, and no HOME."""
    if not shutil.which("unshare") or subprocess.run([*NOBODY, "true"], capture_output=True).returncode:
        pytest.skip("no other users for this one")
    cli.environment.pop("HOME")
    cli.environment.pop("HF_HOME")
    done = subprocess.run(
        [*NOBODY, SCRIPT, *words.split()], env=cli.environment, cwd=cli.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing is kept, because this user has no home folder") == (words != "chat --help")
    assert not [path for path in cli.folder.iterdir() if path.name == "~"]


def test_the_library_of_a_user_who_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", none)
    monkeypatch.setattr(caches, "_warnings", [])
    for folder in (caches.cache_folder(), caches.config_folder(), caches.results_folder(), caches.state_folder()):
        assert caches.is_temporary(folder)
    assert caches.warning() == "nothing is kept, because this user has no home folder (HOME)"


@pytest.mark.parametrize(
    "words", ["plan -m ~nobody1/x.gguf", "profiles show ~nobody1/x.toml", "report ~nobody1/x.json"]
)
def test_a_folder_of_an_unknown_user_is_named(cli: Cli, words: str) -> None:
    done = cli(*words.split())
    assert done.code in (1, 2)
    assert "~nobody1/x" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_tuning_needs_no_cache(cli: Cli, tmp_path: Path) -> None:
    nowhere = without(cli, "home below a file", tmp_path)
    done = nowhere("tune", "demo", "--no-save", "--budget", "10s", "-r", "1", "-n", "8")
    assert done.code == 0, done.stderr
    assert "nothing is kept in " in done.stderr
    assert "kept in /" not in done.stderr.replace("nothing is kept in ", "")


def test_a_profile_is_a_file_and_needs_its_folder(cli: Cli, tmp_path: Path, target: Path, draft: Path) -> None:
    done = without(cli, "home below a file", tmp_path)("profiles", "new", "mine", "-m", target, "-md", draft)
    assert done.code == 1
    assert "profiles cannot be created: Not a directory" in done.stderr
    assert "next: XDG_CONFIG_HOME=FOLDER ggufspec profiles new mine" in done.stderr
    done = without(cli, "home below a file", tmp_path)("tune", "demo", "--budget", "10s")
    assert done.code == 1
    assert "next: --no-save writes no profile" in done.stderr


def test_a_full_disk_is_told(cli: Cli, tmp_path: Path) -> None:
    """No file may grow, in the cache or anywhere."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    process = cli.start("plan", "demo", *CARD, first=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "error: nothing can be kept in " in stderr
    assert "next: df -h " in stderr
