"""Tuning with trials that are simulated: the run_log, the budget, the final, and what is said of it all."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.bench import trial
from ggufspec.bench.run_log import RunLog
from ggufspec.bench.summary import trial_speed
from ggufspec.bench.trial import TrialAttempt
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.reports import table
from ggufspec.reports import tune as report
from ggufspec.schema.base import Failure, to_json
from ggufspec.schema.tune import TuneDocument
from ggufspec.tune.document import tune_document
from ggufspec.tune.profile import description
from ggufspec.tune.run import LOG, TuneExperiment, Tuning, out_of_memory
from tests.support import simulator

TIGHT = simulator.Case(2, "llama3-70b-q3_k_s", "llama3-8b-q3_k_l", "RTX 3090", 4, 45e9, 6)
TOKENS = 100


@pytest.fixture(scope="module")
def machine() -> simulator.Simulated:
    return simulator.Simulated(TIGHT)


@pytest.fixture
def experiment(machine: simulator.Simulated, tmp_path: Path) -> TuneExperiment:
    files = [tmp_path / "target.gguf", tmp_path / "draft.gguf"]
    for path in files:
        path.write_bytes(b"GGUF")
    spec = trial.TrialJob(files[0], files[1], machine.options, Sampling(temperature=0.0), ("a prompt",), TOKENS)
    pair = {"name": "simulated", "target": str(files[0]), "draft": str(files[1])}
    return TuneExperiment(pair, spec, tuple(machine.space), tuple(simulator.first_choices(machine)))


class Trials:
    """Simulated trials on a simulated clock; ``stop`` is the trial in which the program dies."""

    def __init__(self, machine: simulator.Simulated, stop: int | None = None) -> None:
        self.machine, self.stop = machine, stop
        self.now, self.count = 0.0, 0
        self.run: Tuning | None = None  # whose trials they are
        self.noise = random.Random(0)
        self.by_options = {one.options: one for one in machine.space}
        self.busy: Callable[[float], float] = lambda now: 0.0  # CPUs that others use at a time; tokens take longer then

    def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
        self.count += 1
        if self.count == self.stop:
            raise KeyboardInterrupt
        one = self.by_options[spec.options]
        speed = self.machine.true(one)
        if not speed:
            self.now += 3
            if self.count % 2:
                return TrialAttempt(None, Failure("llama.cpp died (SIGABRT)", "lower -ngl"))
            return TrialAttempt(None, Failure("no context of 4096 tokens: out of memory", "lower -c"))
        speed *= self.machine._wobble(0.01, one.setting, self.count)
        others_cpus = self.busy(self.now)
        speed /= 1 + others_cpus
        self.now += 10 + TOKENS / speed
        return TrialAttempt(replace(result(speed, drafted=one.setting.drafted), others_cpus=others_cpus))


def result(speed: float, *, drafted: bool) -> trial.TrialResult:
    statistics = statistics_of(TOKENS / speed)
    placed = trial.LoadedModel("a model", 80, 40, 10**9)
    answer = trial.TrialAnswer("text", tuple(range(statistics.tokens)), statistics)
    return trial.TrialResult(
        (answer,), placed, placed if drafted else None, 9.0, 10**9, 10**9, True, ("draft",) * drafted
    )


def statistics_of(decode_s: float) -> Statistics:
    values: dict[str, object] = {}
    for one in dataclasses.fields(Statistics):
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            values[one.name] = () if "tuple" in str(one.type) else "length" if "str" in str(one.type) else 0
    values |= {"tokens": TOKENS + 1, "decode_s": decode_s, "prompt_tokens": 50, "prompt_s": 0.5}
    return Statistics(**values)  # type: ignore[arg-type]


def tune(
    experiment: TuneExperiment, path: Path, trials: Trials, watch: Callable[..., None] = lambda *_: None
) -> tuple[Tuning, TuneDocument]:
    with RunLog(path, LOG) as run_log:
        trials.run = run = Tuning(experiment, run_log, attempt=trials, clock=lambda: trials.now)
        run.run(watch)
        return run, tune_document(run)


def test_a_trial_beside_other_programs_is_repeated_and_the_least_disturbed_counts(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    """Also the first ones, which only later trials show to have been disturbed; it goes on after any trial."""
    trials = Trials(machine)
    trials.busy = lambda now: 1.9 if now < 60 or 200 < now < 260 else 0.1
    short = smaller(experiment)
    run, document = tune(short, tmp_path / "busy", trials)
    counts = [kept for (_, repetition), kept in run._by_round.items() if repetition == 0]
    assert {kept.others_cpus for kept in counts if kept.failure is None} == {0.1}
    assert sum(len(others) > 1 for others in run.tries().values()) >= 2
    assert max(map(len, run.tries().values())) <= 3
    (note,) = [note for note in document.notes if "were repeated" in note]
    assert "because other programs used up to 1.9 CPUs" in note
    _, quiet = tune(short, tmp_path / "quiet", Trials(machine))
    best = {found.trials[found.winner].setting for found in (document, quiet) if found.winner is not None}
    assert len(best) == 1
    for row in document.trials:
        if row.tokens_per_s is not None and row.index != document.winner:
            true = machine.true(next(one for one in machine.space if one.setting == row.setting))
            assert row.tokens_per_s.median > true / 1.5  # none as it was beside others
    again, _ = tune(short, tmp_path / "busy", trials)
    assert len(again.kept) == len(run.kept) == again.resumed


def test_a_load_that_stays_costs_two_more_trials_of_a_setting(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    trials = Trials(machine)
    trials.busy = lambda now: 0.0 if now < 40 else 1.0
    run, _ = tune(replace(smaller(experiment), budget_s=1500.0), tmp_path / "log", trials)
    assert max(map(len, run.tries().values())) == 3
    assert run.spent_s <= 1500


def test_a_repetition_of_the_final_with_different_loads_does_not_count(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    """It is repeated; if all are like that they count, and it is said."""
    finals = 0

    def make(busy: Callable[[int], float]) -> tuple[Tuning, TuneDocument]:
        nonlocal finals
        finals, trials = 0, Trials(machine)

        def cpus(now: float) -> float:
            nonlocal finals
            if trials.run is None or trials.run._final is None:
                return 0.0
            finals += 1
            return busy(finals)

        trials.busy = cpus
        return tune(experiment, tmp_path / str(len(list(tmp_path.iterdir()))), trials)

    run, document = make(lambda trial: 1.5 * (trial == 2))
    above = run._final.above if run._final else 0
    assert run.uneven() == [above + 1]
    assert len(run.rounds()) >= run.experiment.repeats
    assert above + 1 not in run.rounds()
    assert "1 repetition of the final does not count: the finalists ran under different loads" in document.notes
    run, document = make(lambda trial: 1.5 * (trial % 2))
    if run.uneven() == run.rounds():
        assert "No verdict: the finalists never ran under similar loads" in document.verdict
        assert "when it is quiet" in document.advice
        assert not document.decided
    run, document = make(lambda trial: 1.5)
    assert run.uneven() == []
    assert any("the verdict rests on trials during which other programs used 1.5 CPUs" in one for one in document.notes)


def test_a_log_of_the_version_before_goes_on(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    """Its trials do not say what others used."""
    path, short = tmp_path / "log", smaller(experiment)
    run, before = tune(short, path, Trials(machine))
    lines = path.read_text().splitlines()
    assert sum(', "others_cpus": 0.0' in line for line in lines) > 3
    path.write_text("\n".join(line.replace(', "others_cpus": 0.0', "") for line in lines) + "\n")
    again, after = tune(short, path, Trials(machine))
    assert again.resumed == len(again.kept) == len(run.kept)
    assert after.winner == before.winner
    assert again.tries() == {}


def smaller(experiment: TuneExperiment, count: int = 150) -> TuneExperiment:
    """Every so many settings of the space, and the planner's."""
    chosen = [experiment.space[index] for index in experiment.first]
    chosen += experiment.space[:: max(1, len(experiment.space) // count)]
    return replace(experiment, space=tuple(dict.fromkeys(chosen)), first=tuple(range(len(experiment.first))))


def test_the_winner_is_nearly_the_best(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    run, document = tune(experiment, tmp_path / "j", Trials(machine))
    winner = run.winner()
    assert winner is not None
    assert machine.true(machine.space[winner]) >= 0.97 * max(simulator.exhaust(machine))
    assert document.winner is not None
    assert document.trials[document.winner].setting == machine.space[winner].setting


def test_trials_that_fail_are_rows_and_the_search_steps_back(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    _, document = tune(experiment, tmp_path / "j", Trials(machine))
    failed = [row for row in document.trials if row.failure]
    assert failed
    assert all(row.tokens_per_s is None for row in failed)
    assert document.winner is not None
    use = {one.setting: one.memory[0] for one in machine.space}
    for row in failed:  # what comes after a failure takes less
        later = [other for other in document.trials if other.index > row.index]
        assert all(use[other.setting] < use[row.setting] for other in later)
    assert any("failed: " in line for line in report.failures(document))


@pytest.mark.full
def test_killed_at_any_trial_it_goes_on_as_if_nothing_had_happened(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    """Killed at every trial in turn: one trial is measured again each time, and none is lost."""

    class Same(Trials):  # the same measurement whenever it is made
        def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
            before, self.count = self.count, 0
            stop, self.stop = self.stop, None
            found = super().__call__(spec)
            self.count, self.stop = before + 1, stop
            if self.count == self.stop:
                raise KeyboardInterrupt
            return found

    run, whole = tune(experiment, tmp_path / "whole", Same(machine))
    total = len(run.kept)
    path = tmp_path / "torn"
    for _ in range(total - 1):
        with pytest.raises(KeyboardInterrupt):
            tune(experiment, path, Same(machine, stop=2))
    last = Same(machine)
    _, document = tune(experiment, path, last)
    assert last.count == 1
    assert [row.setting for row in document.trials] == [row.setting for row in whole.trials]
    assert [row.tokens_per_s for row in document.trials] == [row.tokens_per_s for row in whole.trials]
    assert (document.winner, document.baseline, document.stopped) == (whole.winner, whole.baseline, whole.stopped)


def test_the_budget_is_kept(experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path) -> None:
    for budget in (120.0, 600.0, 1500.0):
        trials = Trials(machine)
        run, document = tune(replace(experiment, budget_s=budget), tmp_path / f"j{budget}", trials)
        assert run.spent_s == pytest.approx(trials.now), "each trial counts, once"
        assert trials.now <= 1.25 * budget + 60  # a trial may be slower than was believed
        assert "would not fit in" in document.stopped or trials.now < budget
        assert document.winner is not None or budget == 120.0


def test_trials_of_other_options_cost_no_budget(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    """They are in the same log, and were made under a budget of their own."""
    by_threads = {
        count: tuple(one for one in experiment.space if one.setting.threads == count)[::40] for count in (6, 3)
    }
    for space in by_threads.values():
        some = replace(experiment, space=space, first=(0,), budget_s=200.0)
        run, document = tune(some, tmp_path / "j", Trials(machine))
        assert run.search.trials > 1
        assert document.winner is not None
        assert document.trials[document.winner].setting in {one.setting for one in space}


def test_a_budget_too_short_for_one_trial(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    trials = Trials(machine)
    with pytest.raises(UsageError, match="too short for one trial") as caught:
        tune(replace(experiment, budget_s=2.0), tmp_path / "j", trials)
    assert "--budget" in caught.value.hint
    assert trials.count == 0


def test_the_final_is_interleaved(experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path) -> None:
    run, _ = tune(experiment, tmp_path / "j", Trials(machine))
    final = [kept for kept in run.kept if kept.repetition]
    rounds = [list(group) for _, group in itertools.groupby(final, lambda kept: kept.repetition)]
    assert len(rounds) >= experiment.repeats
    assert len({frozenset(kept.setting for kept in one) for one in rounds}) == 1
    assert rounds[0][0].setting != rounds[1][0].setting
    settings = {kept.setting for kept in rounds[0]}
    assert any(not setting.drafted for setting in settings)


def test_leaders_that_overlap_get_more_trials(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    level = Level(machine, 1)  # of which no setting looks ahead by chance
    run, document = tune(replace(experiment, most=8), tmp_path / "j", level)
    assert max(kept.repetition for kept in run.kept) == 2 * experiment.repeats
    assert not document.decided or document.winner == document.baseline
    assert re.search(r"-r \d+ may settle it|equally fast", document.advice) or document.decided


@pytest.mark.parametrize("first", [{"budget_s": 400.0}, {"threshold": 0.2}])
def test_with_a_larger_budget_or_a_smaller_threshold_a_search_that_ended_goes_on(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path, first: dict[str, Any]
) -> None:
    short, ended = tune(replace(experiment, **first), tmp_path / "j", Trials(machine))
    again = Trials(machine)
    _, same = tune(replace(experiment, **first), tmp_path / "j", again)
    assert again.count == 0
    assert (same.trials, same.winner, same.stopped) == (ended.trials, ended.winner, ended.stopped)
    whole, _ = tune(experiment, tmp_path / "j", Trials(machine))
    assert whole.kept[: len(short.kept)] == short.kept
    assert sum(not kept.repetition for kept in whole.kept) > sum(not kept.repetition for kept in short.kept)
    finalists = {experiment.space[index].setting for index in whole.finalists()}
    for number in whole.rounds():  # side by side, not with what was measured long before
        mine = [kept for kept in whole.kept if kept.repetition == number]
        assert {kept.setting for kept in mine} >= finalists
    assert len(whole.rounds()) >= experiment.repeats


class Level(Trials):
    """Every setting is as fast as every other, but for the noise."""

    def __init__(self, machine: simulator.Simulated, seed: int) -> None:
        super().__init__(machine)
        self.noise.seed(seed)
        self.fastest = 10.0

    def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
        self.count += 1
        speed = self.fastest * (1 + 0.02 * self.noise.gauss(0, 1))
        self.now += 10 + TOKENS / speed
        return TrialAttempt(result(speed, drafted=self.by_options[spec.options].setting.drafted))


def test_what_chance_decides_is_too_close_to_call(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    level = replace(smaller(experiment, 20), most=6, budget_s=700.0)
    undecided, wrong = 0, 0
    for seed in range(20):
        run, document = tune(level, tmp_path / str(seed), Level(machine, seed))
        if document.winner == document.baseline:
            assert document.decided
            continue
        wrong += document.decided
        if document.decided:
            continue
        undecided += 1
        assert document.close
        assert document.verdict.startswith("Too close to call: ")
        assert "95% interval" in document.verdict
        assert "not worth it" not in document.verdict
        assert "may settle it" in document.advice or "about equally fast" in document.advice
        assert run.experiment.budget_s
        left_s = run.experiment.budget_s - run.spent_s
        assert 0 <= left_s < run.round_s(run.finalists()), "as long as there is time, the finalists are repeated"
    assert undecided >= 5
    assert wrong <= 2


def test_a_winner_is_faster_than_the_plan_and_target_only_by_intervals(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    class Apart(Level):
        def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
            self.fastest = 10.0 if self.by_options[spec.options].setting.drafter == "lookup" else 8.0
            return super().__call__(spec)

    _, document = tune(replace(smaller(experiment, 20), most=8), tmp_path / "j", Apart(machine, 0))
    assert document.decided
    assert document.winner is not None
    assert document.trials[document.winner].setting.drafter == "lookup"
    for ratio, words in (
        (document.gain, "{:.2f}× as fast as the planned setting (95% interval "),
        (document.speedup, "speedup {:.2f}× over target-only (95% interval "),
    ):
        assert ratio is not None
        assert ratio.ci95[0] > 1
        assert words.format(ratio.median) in document.verdict.replace("Speedup", "speedup")
    assert document.advice == ""


def test_no_winner_is_chosen_from_one_trial_each(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    """Nor against the table: what looked faster in the search, and had no time for the final, is named."""
    for budget in (100.0, 150.0, 200.0, 300.0):
        run, document = tune(replace(experiment, budget_s=budget), tmp_path / f"j{budget}", Trials(machine))
        if len(run.rounds()) < 2 and document.winner != document.baseline and len(run.measured()) > 1:
            assert not document.decided
            assert "--budget" in document.advice
        for index in run.left_out():
            assert index not in run.finalists()


def test_a_budget_that_is_too_short_is_told_before_the_first_trial(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.tune.run._START_S", 10.0)  # as long as a simulated load takes

    def shortage(**changes: Any) -> str:
        with RunLog(tmp_path / f"{len(list(tmp_path.iterdir()))}", LOG) as run_log:
            return Tuning(replace(experiment, **changes), run_log).shortage()

    assert shortage() == ""
    said = shortage(budget_s=100.0)
    assert "of about" in said
    assert "comparing two settings and repeating them takes at least --budget" in said
    found = re.search(r"--budget (\d+)m", said)
    assert found
    enough = 60.0 * int(found[1])
    assert shortage(budget_s=enough) == ""
    assert "or -n " in shortage(budget_s=0.7 * enough)
    assert shortage(budget_s=1.0) == "", "an error says it"
    run, _ = tune(replace(experiment, budget_s=enough), tmp_path / "j", Level(machine, 0))
    assert len(run.measured()) >= 2
    assert len(run.rounds()) >= experiment.repeats


class Busy(Trials):
    """After so many trials, or with the final, something else takes most of the machine."""

    def __init__(self, machine: simulator.Simulated, calm: int | None) -> None:
        super().__init__(machine)
        self.calm = calm

    def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
        began, found = self.now, super().__call__(spec)
        assert self.run is not None
        if found.result is None or not (self.run.stopped if self.calm is None else self.count > self.calm):
            return found
        slow = 0.6 * trial_speed(found.result)
        self.now = began + 10 + TOKENS / slow
        return TrialAttempt(result(slow, drafted=self.by_options[spec.options].setting.drafted))


@pytest.mark.parametrize("calm", [None, 4, 9, 20])
@pytest.mark.parametrize("budget", [None, 250.0, 450.0, 900.0])
def test_no_winner_is_slower_than_the_target_alone(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path, budget: float | None, calm: int | None
) -> None:
    made = replace(smaller(experiment), budget_s=budget)
    run, document = tune(made, tmp_path / "j", Busy(machine, calm))
    came = [made.space[index].setting.drafted for index in run.measured()]
    assert ((document.winner is None), (document.target_only is None)) == (not came, all(came))
    if document.winner is None or document.target_only is None:
        return
    best, alone = document.trials[document.winner], document.trials[document.target_only]
    assert best.tokens_per_s is not None
    assert alone.tokens_per_s is not None
    assert best.tokens_per_s.median >= alone.tokens_per_s.median
    assert bool(best.searched) == bool(alone.searched)  # both by the final, or both by the search


def test_what_dies_in_the_final_does_not_win(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    class Dying(Trials):
        def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
            found = super().__call__(spec)
            assert self.run is not None
            dies = self.run.stopped and self.by_options[spec.options].setting.drafted
            return TrialAttempt(None, Failure("llama.cpp died (SIGABRT)")) if dies else found

    _, document = tune(experiment, tmp_path / "j", Dying(machine))
    assert document.winner is not None
    assert not document.trials[document.winner].setting.drafted
    assert any(row.failure and row.tokens_per_s for row in document.trials)
    assert any("SIGABRT" in line for line in report.failures(document))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("no context of 4096 tokens: failed to allocate the cache", True),
        ("the child process that ran llama.cpp was ended by SIGKILL: out of memory, most likely", True),
        ("the child process that ran llama.cpp was ended by SIGABRT: CUDA error: out of memory", True),
        ("the child process that ran llama.cpp was ended by SIGABRT: GGML_ASSERT(ok) failed", None),
        ("t.gguf cannot take tokens back (recurrent memory)", None),
    ],
)
def test_an_abort_is_not_taken_for_want_of_memory_by_its_hint(error: str, expected: bool | None) -> None:
    hint = "lower -c, -ngl or -ngld if memory is short; -v shows llama.cpp's log"
    assert out_of_memory(Failure(error, hint)) is expected


def test_all_that_fails_is_told(experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path) -> None:
    def fail(spec: trial.TrialJob) -> TrialAttempt:
        return TrialAttempt(None, Failure("llama.cpp died (SIGABRT)"))

    with RunLog(tmp_path / "j", LOG) as run_log:
        run = Tuning(experiment, run_log, attempt=fail)
        run.run(lambda *_: None)
        document = tune_document(run)
    assert (document.winner, document.target_only, document.gain) == (None, None, None)
    assert document.explanation[-1] == "All failed."
    assert '"ggufspec/tune@1"' in to_json(document)


def test_tables(experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path) -> None:
    from rich.console import Console

    run, document = tune(experiment, tmp_path / "j", Trials(machine))
    assert document.decided
    console = Console(width=80, record=True)
    shown = report.trials(document, best=5)
    console.print(table.terminal(shown))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert sum(line.rstrip().endswith("best") for line in text.splitlines()) == 1
    assert report.markdown(document).count("| best |") == 1
    lines = report.comma_separated(document).splitlines()
    assert len(lines) == len(run.kept) + 1
    assert sum(",final," in line for line in lines) == sum(kept.repetition > 0 for kept in run.kept)


def test_a_draft_that_does_not_pay_is_said(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    class Alone(Trials):
        def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
            found = super().__call__(spec)
            drafted = self.by_options[spec.options].setting.drafted
            return TrialAttempt(result(0.1, drafted=True)) if drafted and found.result else found

    _, document = tune(experiment, tmp_path / "j", Alone(machine))
    assert document.winner is not None
    assert not document.trials[document.winner].setting.drafted
    claim = "worth it here: every setting with it was clearly slower."
    assert "Neither the draft model nor the n-gram lookup is " + claim in document.verdict


def test_one_setting_alone_is_no_comparison(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    _, document = tune(replace(experiment, most=1, first=experiment.first[:1]), tmp_path / "j", Trials(machine))
    assert len(document.trials) == 1
    assert not document.decided
    assert document.verdict == "" or document.verdict.startswith("Only the planned setting was measured")
    assert document.advice == ""  # no budget ended it


class AsPredicted(Trials):
    """Each trial is as fast as predicted, or takes ``factor`` times as long."""

    def __init__(self, machine: simulator.Simulated, factor: float) -> None:
        super().__init__(machine)
        self.factor = factor

    def __call__(self, spec: trial.TrialJob) -> TrialAttempt:
        assert self.run is not None
        one = self.by_options[spec.options]
        self.now += self.factor * self.run._predicted_s(one.predicted)
        return TrialAttempt(result(one.predicted / self.factor, drafted=one.setting.drafted))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_budget_for_one_trial_names_the_same_one_that_is_enough_before_and_after(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path, factor: float
) -> None:
    """Unless the trial took longer than was predicted, which is then said."""
    with RunLog(tmp_path / "before", LOG) as run_log:
        before = Tuning(experiment, run_log)
        short = replace(experiment, budget_s=1.2 * before._trial_s(experiment.first[0]))
    with RunLog(tmp_path / "j", LOG) as run_log:
        trials = AsPredicted(machine, factor)
        trials.run = run = Tuning(short, run_log, attempt=trials, clock=lambda: trials.now)
        told = re.findall(r"--budget (\d+)([sm])", run.shortage())
        run.run(lambda *_: None)
        document = tune_document(run)
    assert len(document.trials) == 1
    asked = re.findall(r"--budget (\d+)([sm])", document.advice)
    assert document.advice.endswith(" compares it with another")
    assert document.verdict.startswith("Only the planned setting was measured")
    assert ("it took " in document.verdict) == (factor > 1)
    if factor == 1:
        assert asked == told
        enough = replace(experiment, budget_s=float(asked[0][0]) * {"s": 1, "m": 60}[asked[0][1]])
        run, _ = tune(enough, tmp_path / "enough", AsPredicted(machine, factor))
        assert len(run.measured()) >= 2
        assert len(run.rounds()) >= experiment.repeats


def test_a_profile_is_described_by_what_its_trials_showed(
    experiment: TuneExperiment, machine: simulator.Simulated, tmp_path: Path
) -> None:
    _, document = tune(experiment, tmp_path / "j", Trials(machine))
    planned = next(trial for trial in document.trials if trial.index == document.baseline)
    others = [trial for trial in document.trials if trial.index != planned.index]
    drafts, alone = (
        replace(others[0], index=1, setting=replace(others[0].setting, drafted=drafted)) for drafted in (True, False)
    )
    first = replace(planned, index=0, setting=replace(planned.setting, drafted=True))
    for decided, trials, winner, words in (
        (False, (first,), 0, "the only setting that was measured."),
        (True, (first,), 0, "the only setting that was measured."),
        (False, (first, drafts), 1, "the leading setting, which was not shown to be faster than the others."),
        (True, (first, drafts), 0, "the planned setting; no other was clearly faster."),
        (True, (first, drafts), 1, "the fastest setting found."),
        (True, (first, alone), 1, "the fastest setting found. It does not draft."),
    ):
        found = description(replace(document, decided=decided, trials=trials, winner=winner, baseline=0))
        assert found == f"Tuned on this machine: {words}"
