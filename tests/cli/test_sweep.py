"""One option at several values: which trials are made, what is kept of them, and what is said."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ggufspec.bench import sweep, trial, trials
from ggufspec.bench.run_log import RunLog
from ggufspec.bench.trial import TrialAttempt
from ggufspec.child import Emit
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.llamacpp.options import Placement
from ggufspec.reports import sweep as report
from ggufspec.reports import table, words
from ggufspec.schema.base import Failure, to_json
from ggufspec.schema.doctor import Gpu, GpuProcess
from ggufspec.schema.sweep import SweepDocument
from ggufspec.settings import table as settings_table
from tests.support.processes import Cli, plain, rest, workers

OPTIONS = DecoderOptions(draft_policy="fixed")
SPEC = trial.TrialJob(Path("t.gguf"), Path("d.gguf"), OPTIONS, Sampling(), ("a prompt",), 20)


def of(**changes: Any) -> trial.TrialJob:
    return replace(SPEC, options=replace(OPTIONS, **changes))


def lengths(*numbers: int, repetitions: int = 2) -> sweep.SweepExperiment:
    words = tuple(sweep.value(str(one), of(draft_max=one), OPTIONS) for one in numbers)
    return sweep.SweepExperiment({"name": "mine"}, "draft_max", words, repetitions)


class Machine:
    """Does trials by arithmetic: a run with drafts of n tokens does 10 n tokens/s, target-only 15."""

    def __init__(self, dies_at: int = 10**9, fails: tuple[int, ...] = ()) -> None:
        self.done: list[int] = []
        self.dies_at, self.fails = dies_at, fails

    def __call__(self, spec: trial.TrialJob, **_: Any) -> TrialAttempt:
        drafts = spec.options.drafts(with_draft=spec.draft is not None)
        length = spec.options.draft_max if drafts else 0
        if len(self.done) == self.dies_at:
            raise KeyboardInterrupt
        self.done.append(length)
        if length in self.fails:
            return TrialAttempt(None, Failure("out of memory", "lower -ngl"))
        places = (8,) * length
        statistics = Statistics(5, 0.5, 31, 2.0 if not drafts else 3.0 / length, 8, 8 * length, 8, places, places,
                                0.1, 0.2, "length")  # fmt: skip
        return TrialAttempt(
            trial.TrialResult(
                (trial.TrialAnswer("é", (1, 2), statistics),),
                trial.LoadedModel("llama", 16, spec.options.target.gpu_layers, 1000),
                trial.LoadedModel("llama", 2, 0, 10) if drafts else None,
                1.0,
                100,
                0,
                True,
                ("draft",) if drafts else (),
                ("a note",) if drafts else (),
            )
        )


def made(experiment: sweep.SweepExperiment, folder: Path, machine: Callable[..., TrialAttempt]) -> sweep.Sweep:
    """As much of a sweep as the machine does."""
    with RunLog(folder / "it.jsonl", sweep.LOG) as log:
        one = sweep.Sweep(experiment, log, machine)
        with contextlib.suppress(KeyboardInterrupt):
            one.run(lambda *_: None)
        return one


def measured(one: sweep.Sweep) -> int:
    """How many trials there are results of."""
    return sum(map(len, one.trials.results.values()))


# ---- which trials


def test_values_take_turns_and_share_the_target_s_own_run(tmp_path: Path) -> None:
    machine = Machine()
    made(lengths(1, 2, 4), tmp_path, machine)
    assert machine.done == [0, 1, 2, 4, 1, 2, 4, 0]


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"draft_max": 2}, False),
        ({"drafters": ("lookup",)}, False),
        ({"draft_policy": "adaptive"}, False),
        ({"draft": Placement(3)}, False),
        ({"threads": 2}, True),
        ({"cache_type_k": "q8_0"}, True),
        ({"ctx_size": 512}, True),
        ({"strict": True, "draft_max": 30}, True),
    ],
)
def test_what_only_a_drafter_looks_at_is_no_other_run_of_the_target(changes: dict[str, Any], own: bool) -> None:
    options = replace(OPTIONS, **changes)
    usual = sweep.value("0", SPEC, OPTIONS).target_only
    assert (sweep.value("1", replace(SPEC, options=options), options).target_only != usual) is own


def test_a_value_without_a_drafter_is_the_target_alone() -> None:
    assert sweep.value("none", of(drafters=()), OPTIONS).pair is None
    assert sweep.value("lookup", replace(of(drafters=("lookup",)), draft=None), OPTIONS).pair is not None


def test_a_value_that_fails_is_a_row_and_not_tried_again(tmp_path: Path) -> None:
    machine = Machine(fails=(2,))
    document = made(lengths(1, 2, 4, repetitions=3), tmp_path, machine).document()
    assert machine.done.count(2) == 1
    failed = document.points[1]
    assert failed.failure == Failure("out of memory", "lower -ngl")
    assert (failed.speculative, failed.speedup) == (None, None)
    assert failed.target_only is not None
    assert [point.failure for point in document.points if point is not failed] == [None, None]


def test_a_target_that_fails_alone_fails_every_value(tmp_path: Path) -> None:
    document = made(lengths(1, 2), tmp_path, Machine(fails=(0,))).document()
    assert [point.failure.error for point in document.points if point.failure] == ["target-only: out of memory"] * 2
    assert all(point.speculative and not point.target_only and not point.speedup for point in document.points)


def test_ratios_are_of_the_same_repetition(tmp_path: Path) -> None:
    document = made(lengths(1, 4), tmp_path, Machine()).document()
    assert [point.speedup.samples for point in document.points if point.speedup] == [
        pytest.approx((10 / 15,) * 2),
        pytest.approx((40 / 15,) * 2),
    ]
    assert document.settings["draft_max"] == ["1", "4"]
    assert (document.option, document.settings["repetitions"], document.notes) == ("draft_max", 2, ("a note",))


def test_what_goes_on_on_a_card_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def card(*processes: GpuProcess, **more: Any) -> Gpu:
        return Gpu(0, "RTX 4090", "", 24, 20, 4, "575", processes=processes, **more)

    desktop = GpuProcess(2, "Xorg", 1)
    cards = [card(desktop, utilisation=0.4)]
    monkeypatch.setattr(trials.gpus, "gpus", lambda: cards)
    machine = Machine()

    def measure(spec: trial.TrialJob, *, on_event: Emit, verbose: bool) -> TrialAttempt:
        cards[0] = card(desktop, throttled=("heat",))
        on_event({"event": "answer", "index": 0})
        cards[0] = card(desktop, GpuProcess(3, "blender", 9))
        return machine(spec)

    assert made(lengths(1, 2), tmp_path, measure).document().notes == (
        "RTX 4090 was 40% busy before the first trial: something else is running on it",
        "RTX 4090 reduced its clocks: heat",
        "another program started to use a GPU during the trials: blender",
        "a note",
    )


def test_layers_that_no_device_took(tmp_path: Path) -> None:
    words = tuple(sweep.value(str(n), of(target=Placement(n)), of(target=Placement(n)).options) for n in (0, 8))
    experiment = sweep.SweepExperiment({"name": "mine"}, "gpu_layers", words, 1)
    assert not any("no GPU" in note for note in made(experiment, tmp_path, Machine()).document().notes)

    class NoGpu(Machine):
        def __call__(self, spec: trial.TrialJob, **_: Any) -> TrialAttempt:
            return super().__call__(replace(spec, options=replace(spec.options, target=Placement())))

    (tmp_path / "it.jsonl").unlink()
    assert any("no GPU" in note for note in made(experiment, tmp_path, NoGpu()).document().notes)


# ---- what is kept


@pytest.mark.parametrize("dies_at", range(8))
def test_killed_at_any_trial_it_goes_on_where_it_was(tmp_path: Path, dies_at: int) -> None:
    before, after = Machine(dies_at), Machine()
    part = made(lengths(1, 2, 4), tmp_path, before)
    assert (measured(part), len(before.done)) == (dies_at, dies_at)
    whole = made(lengths(1, 2, 4), tmp_path, after)
    assert [*before.done, *after.done] == [0, 1, 2, 4, 1, 2, 4, 0]
    (tmp_path / "it.jsonl").unlink()
    assert whole.document() == made(lengths(1, 2, 4), tmp_path, Machine()).document()


def test_more_repetitions_go_on_from_fewer(tmp_path: Path) -> None:
    made(lengths(1, 2, repetitions=1), tmp_path, Machine())
    machine = Machine()
    assert measured(made(lengths(1, 2, repetitions=2), tmp_path, machine)) == 6
    assert machine.done == [1, 2, 0]


def test_another_file_of_the_same_name_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    file.write_bytes(b"one")
    spec = replace(of(draft_max=4), target=file)
    experiment = sweep.SweepExperiment({"name": "mine"}, "draft_max", (sweep.value("4", spec, OPTIONS),), 1)
    made(experiment, tmp_path, Machine())
    file.write_bytes(b"another")
    machine = Machine()
    made(experiment, tmp_path, machine)
    assert machine.done == [0, 4]


def test_a_corpus_that_changed_makes_another_measurement(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one")
    value = sweep.value("4", of(draft_max=4, lookup_corpus=corpus), OPTIONS)
    experiment = sweep.SweepExperiment({"name": "mine"}, "draft_max", (value,), 1)
    made(experiment, tmp_path, Machine())
    corpus.write_text("another")
    machine = Machine()
    made(experiment, tmp_path, machine)
    assert machine.done == [4]


def test_a_kept_trial_of_another_shape_is_measured_again(tmp_path: Path) -> None:
    made(lengths(4, repetitions=1), tmp_path, Machine())
    run_log = tmp_path / "it.jsonl"
    lines = [json.loads(line) for line in run_log.read_text().splitlines()]
    for line in lines[1:]:
        line["value"].pop("load_s")
    run_log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    machine = Machine()
    made(lengths(4, repetitions=1), tmp_path, machine)
    assert machine.done == [0, 4]


# ---- what is said


@pytest.fixture
def document(tmp_path: Path) -> SweepDocument:
    return made(lengths(1, 2, 4), tmp_path, Machine(fails=(2,))).document()


def test_the_document_keeps_its_contract(document: SweepDocument) -> None:
    text = to_json(document)
    assert text.startswith('{\n  "schema": "ggufspec/sweep@1"')
    reported = json.loads(text)
    assert {"pair", "machine", "settings", "option", "points", "notes", "interrupted"} <= set(reported)
    assert [set(point) for point in reported["points"]] == [
        {"value", "target_only", "speculative", "speedup", "failure"}
    ] * 3
    assert reported["points"][1]["failure"] == {"error": "out of memory", "hint": "lower -ngl"}


def test_the_fastest_is_named(document: SweepDocument) -> None:
    leader = report.best_point(document)
    assert leader is not None
    assert leader.value == "4"
    said = report.summary(document)
    assert said == "Fastest: --draft-max 4, 40.0 ± 0.0 tokens/s, 2.67× target-only (95% interval 2.67 to 2.67)."
    assert report.failures(document) == ["--draft-max 2 failed: out of memory (next: lower -ngl)"]


def test_a_target_alone_that_is_faster_is_named_too(tmp_path: Path) -> None:
    said = report.summary(made(lengths(1), tmp_path, Machine()).document())
    assert "0.67× target-only" in said
    assert said.endswith("Target-only is faster: 15.0 ± 0.0 tokens/s.")


def test_leaders_that_overlap_are_no_ranking(document: SweepDocument) -> None:
    first, _, last = document.points
    assert first.speculative is not None
    near = replace(first.speculative, tokens_per_s=replace(first.speculative.tokens_per_s, ci95=(9.0, 41.0)))
    unsure = replace(document, points=(replace(first, speculative=near), last))
    assert "Not shown to be faster than 1: their intervals overlap." in report.summary(unsure)


def test_one_trial_says_that_it_tells_nothing(tmp_path: Path) -> None:
    said = report.summary(made(lengths(1, 4, repetitions=1), tmp_path, Machine()).document())
    assert "A single trial has no interval" in said
    assert "95%" not in said


def test_nothing_measured(tmp_path: Path) -> None:
    document = made(lengths(1, 2), tmp_path, Machine(fails=(0, 1, 2))).document()
    assert (report.summary(document), report.best_point(document)) == ("Nothing was measured.", None)
    assert table.terminal(report.results(document)).row_count == 2
    none = sweep.SweepExperiment(
        {"name": "mine"}, "draft_max", (sweep.SweptValue("1", None, None, Failure("no room")),), 1
    )
    (tmp_path / "it.jsonl").unlink()
    assert report.failures(made(none, tmp_path, Machine()).document()) == ["--draft-max 1 failed: no room"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_bars_are_in_proportion(document: SweepDocument, width: int) -> None:
    out = Console(width=width, file=io.StringIO(), record=True)
    out.print(table.terminal(report.results(document, width), width))
    lines = out.export_text().splitlines()
    assert max(map(len, lines)) <= width
    bars = {line.split()[0]: line.count("█") + line.count("│") for line in lines if "█" in line}
    assert bars["4"] in range(4 * bars["1"] - 12, 4 * bars["1"] + 1)
    assert all(cell in "\n".join(lines) for row in report.results(document).cells for cell in (row[0], *row[1:3]))


def test_markdown_and_lines_for_spreadsheets(document: SweepDocument) -> None:
    table = [line for line in report.markdown(document).splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1
    assert "| out of memory |" in table[3]
    assert report.summary(document) in report.markdown(document)
    lines = list(csv.DictReader(io.StringIO(report.comma_separated(document))))
    assert [(line["draft_max"], line["run"], line["trial"]) for line in lines if line["run"] == "speculative"] == [
        ("1", "speculative", "1"),
        ("1", "speculative", "2"),
        ("4", "speculative", "1"),
        ("4", "speculative", "2"),
    ]
    assert [line["failure"] for line in lines if line["failure"]] == ["out of memory"]
    assert all(float(line["tokens_per_s"]) > 0 for line in lines if not line["failure"])


@pytest.mark.parametrize(
    ("swept", "there", "gone"),
    [
        ("", ("draft model and n-gram lookup (4 tokens a round)", "exact", "1 thread"), ()),
        ("draft_max", ("draft model and n-gram lookup, greedy",), ("a round",)),
        ("drafter", ("4 tokens a round, greedy",), ("draft model",)),
        ("threads", ("greedy",), ("thread",)),
        ("accept", ("greedy, 1 thread",), ("exact",)),
    ],
)
def test_conditions_leave_out_what_was_swept(swept: str, there: tuple[str, ...], gone: tuple[str, ...]) -> None:
    settings = {"prompts": 1, "max_tokens": 8, "drafter": "both", "draft_policy": "fixed", "draft_max": 4}
    settings |= {"temperature": 0, "accept": "exact", "lossy": False, "strict": False, "threads": 1, "repetitions": 2}
    said = words.conditions(settings | ({swept: ["a", "b"]} if swept else {}), swept)
    assert all(text in said for text in there)
    assert not any(text in said for text in gone)


# ---- the command

SHORT = ("bench", "demo", "--sweep", "-n", "4", "-p", "def f(", "-r", "1")


def test_a_sweep_on_the_pair_that_ships(cli: Cli, tmp_path: Path) -> None:
    folder, page = tmp_path / "results", tmp_path / "page.html"
    exports = ("--export-markdown", tmp_path / "s.md", "--export-csv", tmp_path / "s.csv", "--html", page)
    flags = ("--draft-policy", "fixed", "--draft-max", "1,3", "--results", folder, *exports)
    done = cli(*SHORT, *flags, "--json", "-q")
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    assert (document["schema"], document["option"]) == ("ggufspec/sweep@1", "draft_max")
    assert [point["value"] for point in document["points"]] == ["1", "3"]
    for point in document["points"]:
        assert point["speculative"]["tokens_per_s"]["median"] > 0
        assert point["target_only"] == document["points"][0]["target_only"]
        assert len(point["speculative"]["accepted_by_position"]) <= int(point["value"])
    kept, _ = sorted(folder.iterdir())
    assert json.loads(kept.read_text()) == document
    assert "| 3 |" in (tmp_path / "s.md").read_text()
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 5
    assert "<svg" in page.read_text()
    again = cli(*SHORT, *flags, "--json", "-y")
    assert (again.document()["points"], "3 trials from before" in again.stderr) == (document["points"], True)
    assert cli(*SHORT, *flags, "--json", "--fresh", "-y").document()["points"] != document["points"]


def test_a_value_without_a_context_is_a_row(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SHORT, "-fa", "off", "-ctv", "f16,q8_0", "--results", tmp_path, COLUMNS="80")
    assert done.code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "-ctv q8_0 failed: -ctv q8_0 needs flash attention" in done.stdout
    assert "Fastest: -ctv f16" in done.stdout


def test_a_drafter_that_needs_the_draft_has_it_wherever_in_the_list(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SHORT, "--draft-policy", "fixed", "--drafter", "lookup,draft", "--results", tmp_path, "--json")
    assert done.code == 0, done.stderr
    lookup, draft = (point["speculative"] for point in done.document()["points"])
    assert lookup["draft_layers"] == 0 < draft["draft_layers"]


def test_every_value_without_a_context_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SHORT, "-fa", "off", "-ctv", "q5_1,q8_0", "--results", tmp_path, "--json")
    assert done.code == 1
    assert [point["failure"]["hint"] for point in done.document()["points"]] == ["-fa on, or -ctv f16"] * 2


def test_kill_and_go_on(cli: Cli, tmp_path: Path) -> None:
    flags = (*SHORT[:-1], "3", "--drafter", "lookup", "--draft-max", "1,2", "--results", tmp_path)
    parent = cli.start(*flags)
    run_log = None
    while parent.poll() is None and (run_log is None or run_log.read_bytes().count(b"\n") < 3):
        run_log = next(tmp_path.glob("*.jsonl"), None)
    assert run_log is not None
    running = workers(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    for one in running:
        one.wait(60)
    whole = [line for line in run_log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = len({json.loads(line)["key"] for line in whole[1:]})  # one that was disturbed and repeated counts once
    done = cli(*flags)
    assert done.code == 0, done.stderr
    assert kept >= 1
    assert f"{kept} trials from before" in done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".jsonl"]


def test_ctrl_c_shows_what_was_measured_and_the_next_run_goes_on(cli: Cli, tmp_path: Path) -> None:
    flags = (*SHORT[:-1], "1000000", "--drafter", "lookup", "--draft-max", "1,2", "--results", str(tmp_path))
    child = cli.terminal(*flags)
    child.expect(r" ([3-9]|\d\d+)/3000000")
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "Fastest: --draft-max" in left
    assert "the same command resumes" in left
    assert "Traceback" not in left
    (run_log,) = tmp_path.glob("*.jsonl")
    assert run_log.read_bytes().count(b"\n") >= 4


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--draft-max", "1,2"), "--draft-max 1,2 is a list", "add --sweep"),
        (("--sweep",), "--sweep needs an option with several values", "--draft-max 1,2,4,8"),
        (("--sweep", "--draft-max", "4"), "--sweep needs an option with several values", "--sweep"),
        (("--sweep", "--draft-max", "1,2", "-t", "1,2"), "--draft-max and -t have lists", "one option at a time"),
        (("--sweep", "--draft-max", "0,2"), "0 is out of range", "--draft-max"),
        (("--sweep", "--draft-max", "1,x"), "'x' is not a whole number", "--draft-max 63 is the default"),
        (("--sweep", "--draft-max", "1,,2"), "has an empty value", "--draft-max VALUE"),
        (("--sweep", "-t", "8-1"), "'8-1' is not a range", "0-80+8"),
        (("--sweep", "-t", "1-8*1"), "is not a range", "0-80+8"),
        (("--sweep", "-t", "1-1000"), "more than 64 values", "give fewer"),
        (("--sweep", "-ngl", "0,some"), "'some' is not a number of layers", "45, all or auto"),
        (("--sweep", "--n-cpu-moe", "0,-1"), "-1 is out of range", "--n-cpu-moe 10"),
        (
            ("--sweep", "--drafter", "draft,nobody"),
            "there is no drafter 'nobody'",
            "one of " + ", ".join(settings_table.OPTIONS["drafter"].words),
        ),
        (("--sweep", "-ctk", "f16,q9"), "there is no key cache type 'q9'", "one of f16"),
        (("--sweep", "--accept", "exact,top-k:0"), "'top-k:0' needs a number of tokens", "--accept top-k:3"),
        (("--fresh",), "--fresh needs --sweep", "leave --fresh out"),
    ],
)
def test_what_is_no_sweep(cli: Cli, arguments: tuple[str, ...], message: str, hint: str) -> None:
    done = cli("bench", "demo", *arguments, "--json")
    assert done.code == 2
    error = done.document()
    assert message in error["error"]
    assert hint in error["hint"]


def test_results_that_cannot_be_kept_are_found_before_the_first_trial(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli(*SHORT, "--draft-max", "1,2", "--results", tmp_path / "file", "--json")
    assert done.code == 1
    assert "results cannot be saved in" in done.document()["error"]
    assert "--results FOLDER" in done.document()["hint"]
