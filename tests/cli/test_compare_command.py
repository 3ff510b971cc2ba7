"""``ggufspec compare`` as a user runs it: real models in child processes, killed, interrupted, aborted."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from ggufspec.llamacpp import quantize
from ggufspec.schema.text import counted
from tests.support import heads, nvml
from tests.support.processes import Cli, eventually, plain, rest

SHORT = ("-p", "def main(", "-n", "8", "-r", "1")
SABOTAGE = """
import sys
if "ggufspec.bench.trial" in sys.orig_argv:
    import functools, os, resource
    from ggufspec.bench import trial
    good = trial.opened
    @functools.wraps(good)  # with its annotations, from which a job takes its types
    def bad(spec, emit, stopping):
        name = spec.draft.name if spec.draft else ""
        if "abort" in name:
            os.abort()
        if "memory" in name:
            pages = int(open("/proc/self/statm").read().split()[0])
            limit = pages * resource.getpagesize() + (24 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return good(spec, emit, stopping)
    trial.opened = bad
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory, target, draft):
    """The demo target in three quantisations, the largest F16."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copyfile(target, folder / "t-F16.gguf")
    shutil.copyfile(draft, folder / "d.gguf")
    for kind in ("Q8_0", "Q4_0"):
        quantize.write_quantised(target, folder / f"t-{kind}.gguf", kind, 1)
    return folder


def run_log(folder):
    """(path, values by key) of the one run log in a folder."""
    (path,) = folder.glob("compare-*.jsonl")
    lines = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return path, {line["key"]: line["value"] for line in lines[1:]}


def trials(folder):
    """The trials that are kept, by key; one that was disturbed and repeated counts once."""
    return {key: value for key, value in run_log(folder)[1].items() if isinstance(value, dict) and "answers" in value}


def names(document):
    return [(cell["target"], cell["draft"]) for cell in document["cells"]]


def test_a_matrix_with_everything(cli: Cli, models: Path, tmp_path: Path) -> None:
    targets, drafts = f"{models / 't-Q4_0.gguf'},{models / 't-F16.gguf'}", f"none,{models / 'd.gguf'},lookup"
    exports = {kind: tmp_path / f"result.{kind}" for kind in ("json", "markdown", "csv")}
    flags = [word for kind, path in exports.items() for word in (f"--export-{kind}", path)]
    flags += ("--html", tmp_path / "page.html")
    done = cli("compare", "-m", targets, "-md", drafts, *SHORT, "--results", tmp_path / "kept", *flags, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert document["schema"] == "ggufspec/compare@1"
    assert names(document) == [
        *[("t-Q4_0", None), ("t-Q4_0", "d"), ("t-Q4_0", "lookup")],
        *[("t-F16", None), ("t-F16", "d"), ("t-F16", "lookup")],
    ]
    for cell in document["cells"]:
        assert cell["failure"] is None
        assert cell["run"]["tokens"] == 8
        assert (cell["speedup"] is None) == (cell["draft"] is None)
        assert cell["bytes"]["CPU"]["target weights"] > 0
        assert ("draft weights" in cell["bytes"]["CPU"]) == (cell["draft"] == "d")
    small, reference = (model["quality"] for model in document["targets"])
    assert (reference["mean_kl"], reference["reference"], small["reference"]) == (0, "t-F16", "t-F16")
    assert 0.005 < small["mean_kl"] < 0.1
    assert 0.8 < small["top1_agreement"] < 0.97
    kept = [path for path in (tmp_path / "kept").iterdir() if path.suffix == ".json"]
    assert len(kept) == 1
    assert str(kept[0]) in done.stderr
    assert json.loads(kept[0].read_text()) == json.loads(exports["json"].read_text()) == document
    assert len(list(csv.DictReader(exports["csv"].open()))) == 6
    assert "| t-F16 | lookup |" in exports["markdown"].read_text()
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} == {".json", ".jsonl"}  # nothing else is left


def test_the_same_command_measures_nothing_twice(cli: Cli, models: Path) -> None:
    command = ("compare", "-m", models / "t-Q8_0.gguf", "-md", models / "d.gguf", *SHORT, "--json")
    first = cli(*command).document()
    again = cli(*command)
    assert again.document()["cells"] == first["cells"]
    assert "2 trials from before" in again.stderr
    fresh = cli(*command, "--fresh")
    assert "from before" not in fresh.stderr
    assert fresh.document()["cells"] != first["cells"]
    home = Path(cli.environment["HOME"]) / ".local/share/ggufspec/results"
    assert [path.suffix for path in sorted(home.iterdir())] == [".json", ".jsonl", ".old"]


@pytest.mark.full
def test_an_abort_and_a_lack_of_memory_are_rows(cli: Cli, models: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    drafts = []
    for name in ("abort", "memory"):
        drafts.append(str(models / f"{name}.gguf"))
        shutil.copyfile(models / "d.gguf", drafts[-1])
    paths = os.pathsep.join(filter(None, [str(tmp_path), cli.environment.get("PYTHONPATH")]))
    command = ("compare", "-m", models / "t-Q8_0.gguf", "-md", f"{drafts[0]},{drafts[1]},{models / 'd.gguf'}", *SHORT)
    done = cli(*command, "--json", PYTHONPATH=paths)
    assert done.code == 0, done.stderr
    cells = {cell["draft"]: cell for cell in done.document()["cells"]}
    assert "ended by SIGABRT" in cells["abort"]["failure"]["error"]
    memory = cells["memory"]["failure"]
    assert any(word in memory["error"] for word in ("alloc", "memory", "SIGABRT", "SIGSEGV")), memory
    assert cells["abort"]["run"] is None is cells["memory"]["run"]
    assert cells["d"]["run"]["tokens"] == cells[None]["run"]["tokens"] == 8
    shown = cli(*command)  # the one after tries what failed again, and nothing is wrong with it now
    assert shown.code == 0
    assert "failed" not in shown.stdout


@pytest.mark.parametrize("after", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
def test_killed_at_any_trial_it_goes_on(cli: Cli, models: Path, tmp_path: Path, after: int) -> None:
    command = ("compare", "-m", models / "t-Q8_0.gguf", "-md", f"{models / 'd.gguf'},lookup", "-p", "def main(")
    command = (*command, "-n", "64", "-r", "2", "--results", str(tmp_path), "--json")

    def count() -> int:
        return len(trials(tmp_path)) if list(tmp_path.glob("*.jsonl")) else 0

    with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert eventually(lambda: count() >= after)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    before = trials(tmp_path)
    assert len(before) >= after
    done = cli(*command)
    assert done.code == 0, done.stderr
    assert {key: trials(tmp_path)[key] for key in before} == before
    samples = [cell["run"]["tokens_per_s"]["samples"] for cell in done.document()["cells"]]
    assert min(map(len, samples)) >= 2
    assert f"{counted(len(before), 'trial')} from before" in done.stderr


def test_a_torn_line_costs_that_line(cli: Cli, models: Path, tmp_path: Path) -> None:
    command = ("compare", "-m", models / "t-Q8_0.gguf", *SHORT, "--results", tmp_path, "--json")
    cli(*command)
    path, _ = run_log(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"answers"' in line)
    path.write_bytes(b"".join(lines[:at]) + lines[at][:100])
    done = cli(*command)
    assert done.code == 0
    assert len(trials(tmp_path)) == 1


def test_results_of_another_version_are_put_aside(cli: Cli, models: Path, tmp_path: Path) -> None:
    command = ("compare", "-m", models / "t-Q8_0.gguf", *SHORT, "--results", tmp_path, "--json")
    cli(*command)
    path, _ = run_log(tmp_path)
    old = path.read_text().replace("compare-log@2", "compare-log@1")
    path.write_text(old)
    done = cli(*command)
    assert done.code == 0
    assert "another version" in " ".join(done.document()["notes"])
    assert path.with_name(path.name + ".old").read_text() == old


def test_ctrl_c_shows_what_was_measured(cli: Cli, models: Path, tmp_path: Path) -> None:
    command = ("compare", "-m", models / "t-F16.gguf", "-md", models / "d.gguf", "-n", "64", "-r", "20")
    with cli.start(*command, "--results", tmp_path, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert eventually(lambda: list(tmp_path.glob("*.jsonl")) and len(trials(tmp_path)) >= 2)
        parent.send_signal(signal.SIGINT)
        stdout, stderr = parent.communicate()
    assert parent.returncode == 130
    assert json.loads(stdout)["interrupted"]
    assert "the same command resumes" in stderr
    assert "Traceback" not in stderr


def test_a_budget_makes_trials_shorter(cli: Cli, models: Path, tmp_path: Path) -> None:
    command = ("compare", "-m", models / "t-F16.gguf", "-md", f"{models / 'd.gguf'},lookup", "--budget", "20s")
    done = cli(*command, "--no-quality", "--results", tmp_path, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    settings = document["settings"]
    assert settings["budget_s"] == 20
    assert (settings["max_tokens"], settings["repetitions"]) < (128, 3)
    for cell in document["cells"]:
        assert cell["run"] is None or cell["run"]["prompts"] == settings["prompts"]
    before = trials(tmp_path)
    again = cli(*command, "--no-quality", "--results", tmp_path, "--json").document()
    assert again["settings"] == settings
    assert {key: trials(tmp_path)[key] for key in before} == before


def test_rows_are_shown_as_they_finish(cli: Cli, models: Path, tmp_path: Path) -> None:
    command = ("compare", "-m", str(models / "t-F16.gguf"), "-md", str(models / "d.gguf"), "-n", "16", "-r", "2")
    command += ("--draft-policy", "fixed")  # drafts however busy the machine is
    text = plain(rest(cli.terminal(*command, "--results", str(tmp_path), columns=100)))
    assert re.search(r"t-F16 \(target-only\): [\d.]+ tokens/s", text)
    assert re.search(r"t-F16 \+ d: [\d.]+ tokens/s, speedup [\d.]+×(, \d+% accepted)?", text)
    assert re.search(r"1 of 4: t-F16 \(target-only\), \d of 8 answers +\d:\d\d:\d\d left: ", text)
    assert "By kind of prompt: t-F16 + d:" in text
    piped = cli(*command, "--results", tmp_path)
    assert "1 of 4" not in piped.stdout + piped.stderr


def test_the_table_in_a_terminal(cli: Cli, models: Path, tmp_path: Path) -> None:
    targets = f"{models / 't-F16.gguf'},{models / 't-Q4_0.gguf'}"
    command = ("compare", "-m", targets, "-md", str(models / "d.gguf"), *SHORT, "--sort", "speed")
    text = plain(rest(cli.terminal(*command, "--results", str(tmp_path), columns=80)))
    lines = [line for line in text.splitlines() if line.strip()]
    assert any("Perplexity" in line and "Mean KL" in line for line in lines)
    assert any(line.split()[:1] == ["Q4_0"] for line in lines)
    assert "Fastest: t-" in text
    assert "* is the best of its column" in text
    coloured = cli(*command, "--results", tmp_path, COLUMNS="80", NO_COLOR="1")
    assert "\x1b" not in coloured.stdout
    assert max(map(len, coloured.stdout.splitlines())) <= 80


@pytest.mark.skipif(nvml.COMPILER is None, reason="no C compiler")
def test_energy_and_what_goes_on_on_a_card(cli: Cli, models: Path, tmp_path: Path) -> None:
    """By an NVML that is made up: its counter goes on by 1.5 J from the first prompt to the last token."""
    card = nvml.build(tmp_path) | {"FAKE_NVML": "hot"}
    done = cli("compare", "-m", models / "t-Q8_0.gguf", *SHORT, "--json", **card)
    assert done.code == 0, done.stderr
    document = done.document()
    assert document["cells"][0]["energy_j_per_token"] == 1.5 / 8
    name = "NVIDIA GeForce RTX 4090"
    assert f"{name} reduced its clocks: heat" in document["warnings"]
    assert f"{name} was 37% busy before the first trial: something else is running on it" in document["warnings"]


def test_one_target_file_that_is_damaged_is_a_row(cli: Cli, models: Path, damaged: dict[str, Path]) -> None:
    broken = damaged["cut in the keys"]
    done = cli("compare", "-m", f"{models / 't-Q8_0.gguf'},{broken}", *SHORT, "--json")
    assert done.code == 0, done.stderr
    good, bad = done.document()["cells"]
    assert good["run"]["tokens"] == 8
    assert "truncated" in bad["failure"]["error"]


def test_a_target_that_lacks_one_of_its_parts_is_a_row(cli: Cli, models: Path, tmp_path: Path) -> None:
    part = tmp_path / "big-00001-of-00002.gguf"
    shutil.copyfile(models / "t-Q8_0.gguf", part)
    done = cli("compare", "-m", f"{models / 't-Q8_0.gguf'},{part}", *SHORT, "--json")
    assert done.code == 0, done.stderr
    good, bad = done.document()["cells"]
    assert good["run"]["tokens"] == 8
    assert "part 2 of 2 is missing" in bad["failure"]["error"]
    assert done.document()["targets"][1]["failure"] == bad["failure"]


def test_a_draft_that_cannot_serve_is_a_row(cli: Cli, models: Path, small_vocabulary: Path) -> None:
    done = cli("compare", "-m", models / "t-Q8_0.gguf", "-md", small_vocabulary, *SHORT, "--json")
    assert done.code == 0, done.stderr
    assert "cannot draft for" in done.document()["cells"][1]["failure"]["error"]


def test_targets_with_other_tokens_have_no_quality(cli: Cli, models: Path, small_vocabulary: Path) -> None:
    done = cli("compare", "-m", f"{models / 't-Q8_0.gguf'},{small_vocabulary}", *SHORT, "--json")
    assert done.code == 0, done.stderr
    reference, other = done.document()["targets"]
    assert reference["quality"]["mean_kl"] == 0
    assert other["quality"] is None
    assert "its tokens differ from those of t-Q8_0" in other["failure"]["error"]


def test_files_of_one_name_are_told_apart_by_their_folders(cli: Cli, models: Path, tmp_path: Path) -> None:
    for folder, kind in (("one", "Q8_0"), ("two", "Q4_0")):
        (tmp_path / folder).mkdir()
        shutil.copyfile(models / f"t-{kind}.gguf", tmp_path / folder / "model.gguf")
    targets = ",".join(str(tmp_path / folder / "model.gguf") for folder in ("one", "two"))
    done = cli("compare", "-m", targets, *SHORT, "--no-quality", "--json")
    assert [model["name"] for model in done.document()["targets"]] == ["model (one)", "model (two)"]


def test_profiles_are_compared(cli: Cli, models: Path, tmp_path: Path) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text(
        'name = "small"\nwhy = "a test"\nsource = "here"\n'
        f'[target]\nfile = "{models / "t-Q4_0.gguf"}"\n[draft]\nfile = "{models / "d.gguf"}"\n'
        "[settings]\nctx_size = 512\n"
    )
    done = cli("compare", "demo", profile, *SHORT, "--no-quality", "--json")
    assert done.code == 0, done.stderr
    assert names(done.document()) == [
        *[("demo-target-F16", None), ("demo-target-F16", "demo-draft-Q8_0")],
        *[("t-Q4_0", None), ("t-Q4_0", "d")],
    ]
    other = cli("compare", "demo", "-md", "none,lookup", *SHORT, "--no-quality", "--json").document()
    assert names(other) == [("demo-target-F16", None), ("demo-target-F16", "lookup")]
    alone = cli("compare", "demo", "-md", "none", *SHORT, "--no-quality", "--json")
    assert alone.code == 0, alone.stderr
    assert names(alone.document()) == [("demo-target-F16", None)]


def test_heads_are_cells(cli: Cli, models: Path, tmp_path: Path) -> None:
    """MTP blocks of a target's own by name or by --drafter, in a profile too; a head's file is a draft like another."""
    whole = heads.write_mtp(models / "t-F16.gguf", tmp_path / "whole.gguf")
    head = heads.write_eagle3(models / "t-F16.gguf", tmp_path / "eagle3-t.gguf")
    flags = (*SHORT, "--no-quality", "--json")
    done = cli("compare", "-m", f"{whole},{models / 't-F16.gguf'}", "-md", f"mtp,lookup,{head}", *flags)
    assert done.code == 0, done.stderr
    cells = {(cell["target"], cell["draft"]): cell for cell in done.document()["cells"]}
    assert len(cells) == 8
    assert {key for key, cell in cells.items() if cell["failure"]} == {("t-F16", "mtp")}
    assert "its file has no MTP blocks" in cells["t-F16", "mtp"]["failure"]["error"]
    for key in (("whole", "mtp"), ("whole", "eagle3-t"), ("t-F16", "eagle3-t")):
        assert cells[key]["bytes"]["CPU"]["draft kv"] > 0
    profile = tmp_path / "own.toml"
    text = f'name = "own"\nwhy = "a test"\nsource = "here"\n[target]\nfile = "{whole}"\n'
    profile.write_text(f'{text}[settings]\ndrafter = "mtp"\n')
    for arguments in (("-m", whole, "--drafter", "mtp"), (profile,)):
        assert names(cli("compare", *arguments, *flags).document()) == [("whole", None), ("whole", "mtp")]


@pytest.mark.parametrize(("ref", "at"), [("main", ""), ("refs/pr/2", "@refs/pr/2")])
def test_a_repository_with_several_quantisations(cli: Cli, models: Path, ref: str, at: str) -> None:
    """From the local cache, without a network."""
    repo = Path(cli.environment["HF_HOME"]) / "hub" / "models--someone--pair"
    commit = "0" * 40
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs" / ref).parent.mkdir(parents=True)
    (repo / "refs" / ref).write_text(commit)
    for kind in ("Q8_0", "Q4_0"):
        shutil.copyfile(models / f"t-{kind}.gguf", repo / "snapshots" / commit / f"t-{kind}.gguf")
    done = cli("compare", "-hf", f"someone/pair:Q8_0{at},Q4_0", "-hfd", "none", *SHORT, "--no-quality", "--json")
    assert done.code == 0, done.stderr
    assert names(done.document()) == [("t-Q8_0", None), ("t-Q4_0", None)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "nothing is given to compare: the matrix is empty"),
        (("-m", " , "), "-m names no file: the matrix is empty"),
        (("-md", "{d}"), "only drafts are given: the matrix is empty"),
        (("-m", "{t},{t}"), "is given twice"),
        (("-m", "{t},{link}"), "is given twice, also as"),
        (("-m", "{t}", "-md", "{d},{d}"), "is given twice"),
        (("-m", "{t},{nothing}"), "does not exist"),
        (("-m", "{folder}"), "is a folder"),
        (("-hf", "Q8_0"), "'Q8_0' names no repository"),
        (("-m", "{t}", "-hfd", "Q8_0"), "'Q8_0' names no repository"),
        (("demo", "-md", ","), "-md names no file: the matrix is empty"),
        (("demo", "-m", "{t}"), "both profiles and targets are given"),
        (("demo", "demo"), "two profiles pair demo-target-F16.gguf with the same draft"),
        (("no-such-profile",), "there is no profile 'no-such-profile'"),
        (("-m", "{t}", "--sort", "beauty"), "'beauty'"),
        (("-m", "{t}", "--drafter", "lookup"), "--drafter lookup uses no draft file"),
        (("-m", "{t}", "--results", "{t}/folder"), "results cannot be saved in"),
        (("-m", "{t}", "--export-csv", "{nothing}/x.csv"), "cannot be written"),
        (("-m", "{t}", "-c", "1"), "1 is out of range"),
    ],
)
def test_bad_input_is_told_before_anything_runs(
    cli: Cli, models: Path, tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(models / "t-Q8_0.gguf")
    known = {"t": models / "t-Q8_0.gguf", "d": models / "d.gguf", "link": link, "nothing": tmp_path / "no"}
    words = [word.format(folder=models, **known) for word in arguments]
    done = cli("compare", *words, *SHORT, "--json")
    assert done.code in (1, 2)
    assert error in done.document()["error"]
    assert "Traceback" not in done.stderr
    home = Path(cli.environment["HOME"])
    assert not list(home.rglob("compare-*.json"))


def test_nothing_that_can_run_is_a_failure_with_its_reasons(cli: Cli, damaged: dict[str, Path]) -> None:
    done = cli("compare", "-m", damaged["cut in the keys"], *SHORT)
    assert done.code == 1
    assert "truncated" in done.stdout
    assert "no cell could be measured" in done.stderr
