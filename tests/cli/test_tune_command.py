"""``ggufspec tune``: the profile it writes, what it refuses, what is left after an interruption."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggufspec.models.profile import TuneEvidence, load_profile
from ggufspec.tune.profile import profile_text
from tests.support.processes import Cli, Finished, all_end, eventually, plain, rest, workers

SHORT = ("-p", "def f(", "-n", "8", "-r", "2", "-fa", "auto")  # one thread, by the variable: a small space
SMALL = (*SHORT, "--draft-policy", "adaptive")


def home(cli: Cli) -> Path:
    return Path(cli.environment["HOME"])


def own(cli: Cli, name: str = "demo") -> Path:
    return home(cli) / ".config/ggufspec/profiles" / f"{name}.toml"


def run_logs(cli: Cli) -> list[Path]:
    return sorted((home(cli) / ".local/share/ggufspec/results").glob("tune-*.jsonl"))


def kept(cli: Cli) -> list[dict[str, Any]]:
    """The measurements of the one run_log that there is."""
    lines = run_logs(cli)[0].read_text().splitlines()[1:]
    return [entry["value"] for line in lines if (entry := json.loads(line))["key"] != "final"]


# ---- to its end


@pytest.fixture(scope="module")
def tuned(new_cli: Callable[[], Cli]) -> tuple[Cli, Finished, Path]:
    """(the command line that tuned the demo pair, how that ended, its page)."""
    cli = new_cli()
    exports = ("--export-markdown", "table.md", "--export-csv", "trials.csv", "--html", "page.html")
    return cli, cli("tune", *SMALL, "--save", "demo", "--json", *exports), cli.folder


def test_the_document(tuned: tuple[Cli, Finished, Path]) -> None:
    cli, done, _ = tuned
    kept = run_logs(cli)[0].with_suffix(".json")
    written = "".join(f"wrote {name}\n" for name in ("table.md", "trials.csv", "page.html"))
    assert (done.code, done.stderr) == (0, f"kept in {kept}\n{written}")
    document = done.document()
    assert document["schema"] == "ggufspec/tune@1"
    trials = document["trials"]
    assert [trial["index"] for trial in trials] == list(range(len(trials)))
    speeds = [trial["tokens_per_s"]["median"] for trial in trials]
    assert {trial["setting"]["drafter"] for trial in trials} == {"both", "draft", "lookup", "none"}
    assert trials[document["target_only"]]["setting"]["drafted"] is False
    assert document["baseline"] in (0, 1)
    assert not document["interrupted"]
    assert min(speeds) > 0
    best = trials[document["winner"]]
    assert (len(best["tokens_per_s"]["samples"]) >= 2, len(best["searched"])) == (True, 1)  # the final; the search
    alone = trials[document["target_only"]]
    assert best["tokens_per_s"]["median"] >= alone["tokens_per_s"]["median"]
    if document["winner"] != document["baseline"]:
        assert len(document["gain"]["samples"]) >= 2
    assert document["explanation"]
    assert document["saved"] == str(own(tuned[0]))


def test_the_document_is_kept_and_reported(tuned: tuple[Cli, Finished, Path]) -> None:
    cli, done, _ = tuned
    file = run_logs(cli)[0].with_suffix(".json")
    assert json.loads(file.read_text())["trials"] == done.document()["trials"]
    shown = cli("report")
    assert (shown.code, shown.stderr) == (0, "")
    assert "Tuning of demo" in plain(shown.stdout)


def test_the_profile_has_the_winner_and_its_evidence(tuned: tuple[Cli, Finished, Path]) -> None:
    cli, done, _ = tuned
    document = done.document()
    setting = document["trials"][document["winner"]]["setting"]
    profile = load_profile(own(cli))
    assert (profile.settings.drafter, profile.settings.threads) == (setting["drafter"], 1)
    assert profile.target.gpu_layers == setting["gpu_layers"]
    assert profile.tuned is not None
    assert profile.tuned.trials == len(kept(cli))
    assert Path(profile.tuned.results) == run_logs(cli)[0]
    few = not document["gain"] or len(document["gain"]["samples"]) < 2  # one has no interval
    assert (profile.tuned.gain_ci95 is None) == few
    assert Path(profile.target.file).is_absolute()
    assert own(cli).read_text().startswith("# The pair that ships")  # the bundled profile's own words


def test_run_uses_it_from_then_on_and_a_flag_wins(tuned: tuple[Cli, Finished, Path]) -> None:
    cli = tuned[0]
    text = own(cli).read_text()
    try:
        changed = text.replace(f'drafter = "{load_profile(own(cli)).settings.drafter}"', 'drafter = "lookup"')
        own(cli).write_text(changed.replace("threads = 1", "threads = 2\nmicro_batch = 64"))
        cli.environment.pop("GGUFSPEC_THREADS")
        settings = cli("run", "demo", "-p", "def f(", "-n", "2", "--json").document()["settings"]
        assert (settings["drafter"], settings["threads"], settings["ubatch_size"]) == ("lookup", 2, 64)
        flags = ("--drafter", "draft", "-t", "1")
        settings = cli("run", "demo", "-p", "def f(", "-n", "2", "--json", *flags).document()["settings"]
        assert (settings["drafter"], settings["threads"]) == ("draft", 1)
    finally:
        cli.environment["GGUFSPEC_THREADS"] = "1"
        own(cli).write_text(text)


def test_a_bench_of_a_profile_without_drafters_compares_with_both(tuned: tuple[Cli, Finished, Path]) -> None:
    cli = tuned[0]
    text = own(cli).read_text()
    try:
        own(cli).write_text(text.replace(f'drafter = "{load_profile(own(cli)).settings.drafter}"', 'drafter = "none"'))
        done = cli("bench", "demo", "-p", "def f(", "-n", "4", "-r", "1", "--json")
        assert done.code == 0, done.stderr
        assert "the profile of demo turns speculation off" in done.stderr
        assert done.document()["settings"]["drafter"] == "both"
    finally:
        own(cli).write_text(text)


def test_the_exports(tuned: tuple[Cli, Finished, Path]) -> None:
    _, done, folder = tuned
    document = done.document()
    table = (folder / "table.md").read_text().splitlines()
    assert sum("| best |" in line for line in table) == document["decided"]
    measured = sum(len(trial["tokens_per_s"]["samples"] + trial["searched"]) for trial in document["trials"])
    assert len((folder / "trials.csv").read_text().splitlines()) == 1 + measured
    assert (folder / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_the_same_command_again_measures_nothing(tuned: tuple[Cli, Finished, Path]) -> None:
    cli, done, _ = tuned
    before = kept(cli)
    again = cli("tune", *SMALL, "--json")
    assert again.code == 0
    assert "resuming with" in again.stderr
    assert kept(cli) == before
    assert again.document()["trials"] == done.document()["trials"]
    assert again.document()["stopped"] == done.document()["stopped"]


def test_an_earlier_winner_does_not_narrow_the_search(tuned: tuple[Cli, Finished, Path]) -> None:
    cli, done, _ = tuned
    before, text = kept(cli), own(cli).read_text()
    try:
        settings = "threads = 1\ndraft_max = 2\nmicro_batch = 64"
        own(cli).write_text(re.sub(r"draft_max = .*\n", "", text).replace("threads = 1", settings))
        again = cli("tune", *SMALL, "--no-save", "--json")
    finally:
        own(cli).write_text(text)
    assert again.code == 0, again.stderr
    assert again.document()["settings"]["space"] == done.document()["settings"]["space"]
    assert (len(run_logs(cli)), kept(cli)) == (1, before)


def test_what_is_too_close_to_call_is_not_saved_unless_a_name_is_given(cli: Cli) -> None:
    """With a trial of each there is no interval."""
    flags = ("-p", "def f(", "-n", "8", "-r", "1", "-fa", "auto", "--draft-policy", "adaptive", "--budget", "4s")
    done = cli("tune", *flags, COLUMNS="120")
    assert done.code == 0, done.stderr
    assert "comparing two settings and repeating them" in done.stderr
    assert "--budget" in done.stderr
    document = json.loads(run_logs(cli)[0].with_suffix(".json").read_text())
    if not document["decided"]:
        assert "Leading: " in done.stdout
        assert "Nothing was saved; --save demo saves it anyway." in done.stdout
        assert not own(cli).exists()
    saved = cli("tune", *flags, "--save", "mine")
    assert saved.code == 0, saved.stderr
    assert "next: ggufspec bench mine" in saved.stdout.splitlines()
    assert own(cli, "mine").exists()


# ---- interrupted


def test_killed_at_a_trial_it_goes_on_and_loses_no_other(cli: Cli) -> None:
    trials = 0
    for enough in (2, 4):
        with cli.start("tune", *SMALL, "--no-save", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
            assert eventually(lambda: run_logs(cli) and len(kept(cli)) >= enough)  # noqa: B023
            running = workers(parent.pid)
            parent.send_signal(signal.SIGKILL)
            parent.communicate()
        assert all_end(running)
        seen = len(kept(cli))
        assert seen >= max(trials, enough)
        trials = seen
    before = kept(cli)[:trials]
    done = cli("tune", *SMALL, "--no-save", "--json")
    assert done.code == 0
    assert f"resuming with {trials} trials" in done.stderr
    assert kept(cli)[:trials] == before
    assert not own(cli).exists()


def test_ctrl_c_shows_what_there_is_and_saves_nothing(cli: Cli) -> None:
    child = cli.terminal("tune", *SMALL, columns=80)
    child.expect("trial [4-6]")  # a trial of a few tokens may end between two redraws
    running = workers(child.pid)
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "So far: " in left
    assert "the same command resumes" in left
    assert "Traceback" not in left
    assert len(kept(cli)) >= 3
    assert not own(cli).exists()
    assert all_end(running)


# ---- refused


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (("--budget", "0"), 2, "is not a duration"),
        (("--budget", "10x"), 2, "is not a duration"),
        (("--budget", "0.01s", *SHORT, "-n", "2000"), 2, "too short for one trial"),
        (("--save", "a/b"), 2, "is not a profile name"),
        (("--save", "a", "--no-save"), 2, "both --save and --no-save"),
        (("--allow-kv", "q9"), 2, "there is no key cache type"),
        (("--threshold", "-1"), 2, "threshold"),
        (("--export-json", "nowhere/result.json"), 1, "cannot be written"),
    ],
)
def test_bad_input(cli: Cli, flags: tuple[str, ...], code: int, word: str) -> None:
    done = cli("tune", *flags)
    assert (done.code, word in done.stderr) == (code, True), done.stderr
    assert not own(cli).exists()


def test_results_that_cannot_be_kept_are_told_before_the_first_trial(cli: Cli) -> None:
    file = cli.folder / "a-file"
    file.write_text("")
    done = cli("tune", *SHORT, "--results", str(file / "below"))
    assert done.code == 1
    assert "results cannot be saved" in done.stderr
    assert "--results" in done.stderr


def test_results_of_another_version_are_put_aside(cli: Cli) -> None:
    fixed = ("--drafter", "none", "--no-save", "--json")
    assert cli("tune", *SHORT, *fixed).code == 0
    run_log = run_logs(cli)[0]
    old = '{"schema": "ggufspec/tune-log@0"}\n{"key": "0", "value": 1}\n'
    run_log.write_text(old)
    done = cli("tune", *SHORT, *fixed)
    assert done.code == 0
    assert run_log.with_name(run_log.name + ".old").read_text() == old
    assert any("another version" in note for note in done.document()["notes"])


def test_one_setting_that_is_left_is_the_winner(cli: Cli) -> None:
    done = cli("tune", *SHORT, "--drafter", "none", "--save", "plain", "--json")
    document = done.document()
    assert (document["winner"], document["baseline"], document["target_only"]) == (0, 0, 0)
    profile = load_profile(own(cli, "plain"))
    assert (profile.name, profile.settings.drafter) == ("plain", "none")


def test_files_become_a_new_profile(cli: Cli, target: Path, draft: Path) -> None:
    done = cli("tune", "-m", target, "-md", draft, *SHORT, "--drafter", "draft", "--draft-policy", "adaptive")
    assert done.code == 0, done.stderr
    profile = load_profile(own(cli, target.stem))
    assert profile.draft is not None
    assert (profile.target.file, profile.draft.file) == (str(target), str(draft))
    assert f"ggufspec bench {target.stem}" in plain(done.stdout)


def test_the_profile_of_another_pair_is_not_written_over(cli: Cli, target: Path, draft: Path) -> None:
    path = own(cli, target.stem)
    path.parent.mkdir(parents=True)
    text = f'name = "mine"\nwhy = "w"\nsource = "s"\n\n[target]\nfile = "{draft}"\n'
    path.write_text(text)
    done = cli("tune", "-m", target, "-md", draft, *SHORT)
    assert done.code == 2
    assert "is the profile of another pair" in done.stderr
    assert "--save" in done.stderr
    assert path.read_text() == text
    assert not run_logs(cli)


def test_a_profile_that_cannot_be_written_is_told_before_the_first_trial(cli: Cli) -> None:
    (home(cli) / ".config").write_text("")
    done = cli("tune", *SHORT)
    assert done.code == 1
    assert "cannot be written" in done.stderr
    assert "--no-save" in done.stderr
    assert not run_logs(cli)


# ---- the profile's text

EVIDENCE = TuneEvidence(
    date="2026-11-21",
    tokens_per_s=12.5,
    gain=1.25,
    gain_ci95=[1.2, 1.3],
    trials=20,
    machine="a CPU, a card",
    versions="ggufspec 1",
    results="/tmp/x.jsonl",
)


def test_what_is_not_tuned_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '# my words\nname = "mine"\nwhy = "w"\nsource = "s"\n\n[target]  # big\nrepo = "a/b"\nfile = "t.gguf"\n\n'
        '[draft]\nfile = "d.gguf"\ngpu_layers = 3\n\n[settings]\nacceptance = 0.6\nmicro_batch = 64 # old\n'
    )
    layers = {"target": 5, "draft": None}
    text = profile_text(
        path,
        name="mine",
        why="new words",
        target=Path("/t"),
        draft=None,
        layers=layers,
        settings={"threads": 4, "ubatch_size": None},
        tuned=EVIDENCE,
    )
    found = tomllib.loads(text)
    assert text.startswith("# my words\n")
    assert "[target]  # big" in text
    assert found["why"] == "w"
    assert found["target"] == {"repo": "a/b", "file": "t.gguf", "gpu_layers": 5}
    assert found["draft"] == {"file": str(tmp_path / "d.gguf")}
    assert found["settings"] == {"acceptance": 0.6, "threads": 4}
    assert found["tuned"]["gain_ci95"] == [1.2, 1.3]
    path.write_text(text)
    again = profile_text(
        path,
        name="mine",
        why="new words",
        target=Path("/t"),
        draft=None,
        layers=layers,
        settings={"threads": 4, "ubatch_size": None},
        tuned=EVIDENCE,
    )
    assert again == text


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("The fastest setting of this pair that tuning found on this machine.", "new"),
        ("Tuned on this machine: the only setting that was measured.", "new"),
        ("My own words.", "My own words."),
        (None, "new"),
    ],
)
def test_a_description_of_ours_is_replaced_and_nobody_else_s(tmp_path: Path, why: str | None, expected: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nwhy = "{why}"\nsource = "s"\n\n[target]\nfile = "t.gguf"\n')
    text = profile_text(
        path if why else None,
        name="mine",
        why="new",
        target=Path("/t"),
        draft=None,
        layers={},
        settings={},
        tuned=EVIDENCE,
    )
    assert tomllib.loads(text)["why"] == expected
