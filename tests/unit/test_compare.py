"""A comparison whose trials are made by hand: order, repeats, pairs, resumption, what it says."""

import csv
import errno
import io
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ggufspec.bench import compare, matrix, trial, trials
from ggufspec.bench.compare import LOG, CompareExperiment, Comparison, Contender
from ggufspec.bench.matrix import PlannedCell
from ggufspec.bench.run_log import RunLog
from ggufspec.cli.compare import _show, split_list
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import Placement
from ggufspec.models.profile import Settings
from ggufspec.reports import compare as report
from ggufspec.reports import table
from ggufspec.reports.compare import CompareSort
from ggufspec.schema.base import Failure, MeasuredRun, SpeculativeRun, Spread
from ggufspec.schema.compare import CompareCell, ComparedModel, CompareDocument, Quality
from ggufspec.schema.doctor import Gpu, GpuProcess
from ggufspec.schema.plan import PlannedModel, PlannedOption


def result(tokens_per_s, drafted=0, accepted=0, energy_j=None, draft=True):
    statistics = Statistics(
        prompt_tokens=10,
        prompt_s=0.5,
        tokens=101,
        decode_s=100 / tokens_per_s,
        rounds=50,
        drafted=drafted,
        accepted=accepted,
        drafted_by_position=(drafted,),
        accepted_by_position=(accepted,),
        draft_s=0.1,
        verify_s=0.2,
        stop_reason="length",
    )
    return trial.TrialResult(
        answers=(trial.TrialAnswer("", tuple(range(101)), statistics),),
        target=trial.LoadedModel("llama 1B", 16, 9, 1000),
        draft=trial.LoadedModel("llama 50M", 4, 5, 50) if draft else None,
        load_s=1.0,
        peak_rss_bytes=2**30,
        vram_bytes=0,
        finished=True,
        drafters=("draft",) if draft else (),
        energy_j=energy_j,
    )


def spec(target, draft=None):
    options = DecoderOptions(drafters=("draft",) if draft else ())
    path = Path(draft) if draft else None
    return trial.TrialJob(Path(target), path, options, Sampling(), ("a prompt",), 100)


def contender(target, draft=None, **rest):
    return Contender(target, draft, spec(target, draft), **rest)


def experiment(*contenders, repetitions=3, quality=False, targets=None):
    named = dict.fromkeys(one.target for one in contenders)
    subjects = targets or tuple(ComparedModel(name, name, 100) for name in named)
    drafts = dict.fromkeys(one.draft for one in contenders if one.draft)
    return CompareExperiment(
        subjects,
        tuple(ComparedModel(name, name, 10) for name in drafts),
        contenders,
        repetitions,
        {"prompts": 1},
        quality,
    )


@pytest.fixture
def run_log(tmp_path):
    """Open the same run log again and again."""
    opened = []

    def book(name="compare"):
        for one in opened:
            one.close()
        opened.append(RunLog(tmp_path / f"{name}.jsonl", LOG))
        return opened[-1]

    yield book
    for one in opened:
        one.close()


class Machine:
    """Measures as it is reported: tokens/s by (target, draft), each a number, a list, a failure, or Ctrl-C."""

    def __init__(self, speeds):
        self.speeds, self.asked = speeds, []

    def __call__(self, spec, **_):
        name = (str(spec.target), str(spec.draft) if spec.draft else None)
        count = self.asked.count(name)
        self.asked.append(name)
        said = self.speeds[name]
        said = said[min(count, len(said) - 1)] if isinstance(said, list) else said
        if said is KeyboardInterrupt:
            raise KeyboardInterrupt
        if isinstance(said, Failure):
            return trial.TrialAttempt(None, said)
        return trial.TrialAttempt(result(said, draft=spec.draft is not None))


@pytest.fixture
def machine(monkeypatch):
    def made(speeds):
        found = Machine(speeds)
        monkeypatch.setattr(trial, "attempt", found)
        return found

    return made


def run(asked, run_log, **rest):
    comparison = Comparison(asked, run_log, **rest)
    comparison.run(lambda *_: None)
    return comparison


APART = {("a", None): 10.0, ("a", "d"): 20.0, ("b", None): [30.0, 31.0, 32.0], ("b", "d"): 50.0}
FOUR = (contender("a"), contender("a", "d"), contender("b"), contender("b", "d"))


def test_cells_take_turns_in_an_order_that_rotates(machine, run_log):
    found = machine(APART)
    run(experiment(*FOUR), run_log())
    names = list(APART)
    assert found.asked == [*names, *names[1:], names[0], *names[2:], *names[:2]]


def test_a_speedup_is_over_the_same_target_alone_pair_by_pair(machine, run_log):
    machine(APART)
    cells = run(experiment(*FOUR), run_log()).document().cells
    assert [cell.speedup and cell.speedup.samples for cell in cells] == [
        None,
        (2.0, 2.0, 2.0),
        None,
        pytest.approx((50 / 30, 50 / 31, 50 / 32)),
    ]
    assert [cell.leads for cell in cells] == [False, False, False, True]


def disturbed_at(trials, others):
    """An attempt of a machine, with ``others`` CPUs used in these trials, which take twice as long."""
    made, count = trial.attempt, iter(range(1000))

    def attempt(spec, **more):
        done, number = made(spec, **more), next(count)
        if number not in trials or done.result is None:
            return done
        (answer,) = done.result.answers
        slower = replace(answer, statistics=replace(answer.statistics, decode_s=2 * answer.statistics.decode_s))
        return trial.TrialAttempt(replace(done.result, answers=(slower,), others_cpus=others))

    return attempt


def test_a_trial_beside_other_programs_is_repeated(machine, run_log):
    """The first one too, once another shows that the machine can be quieter."""
    speeds = {("a", None): 10.0, ("a", "d"): 20.0}
    found, log = machine(speeds), run_log()
    comparison = run(experiment(*FOUR[:2]), log, attempt=disturbed_at({0, 5}, 1.8))
    assert found.asked == [*speeds, *[("a", None)], *[("a", "d"), ("a", None)], *[("a", None)] * 2, ("a", "d")]
    document = comparison.document()
    assert [cell.run.tokens_per_s.samples for cell in document.cells] == [(10.0,) * 3, (20.0,) * 3]
    (note,) = document.notes
    assert note == ("2 trials were repeated because other programs used up to 1.8 CPUs; the least disturbed try counts")
    log.close()
    again = run(experiment(*FOUR[:2]), run_log(), attempt=disturbed_at(range(1000), 2.0))
    assert again.trials.resumed == 6
    assert [cell.run.tokens_per_s.samples for cell in again.document().cells] == [(10.0,) * 3, (20.0,) * 3]


def test_what_stays_disturbed_is_compared_with_nothing(machine, run_log):
    found = machine({("a", None): 10.0, ("a", "d"): 50.0})
    document = run(experiment(*FOUR[:2]), run_log(), attempt=disturbed_at({1, 2, 3}, 1.8)).document()
    assert len(found.asked) == 6 + 2
    assert document.cells[1].speedup.samples == (5.0, 5.0)
    assert document.cells[1].run.tokens_per_s.samples == (25.0, 50.0, 50.0)
    assert "speedups exclude 1 pair of trials run under different loads" in document.notes


def test_leaders_that_overlap_are_measured_again_and_no_others(machine, run_log):
    speeds = {("a", None): 10.0, ("a", "d"): [40.0, 50.0], ("b", None): [41.0, 49.0], ("b", "d"): 5.0}
    found = machine(speeds)
    document = run(experiment(*FOUR, repetitions=2), run_log()).document()
    counts = {name: found.asked.count(name) for name in speeds}
    assert counts == {("a", None): 2, ("a", "d"): 6, ("b", None): 6, ("b", "d"): 2}  # 2, and at most 2 × 2 more
    assert "after 6 trials each the interval of a + d overlaps that of b (target-only)" in document.warnings[0]


def test_repeats_end_when_the_leader_is_known(machine, run_log):
    speeds = {("a", None): [40.0, 50.0, 50.0, 50.0, 50.0, 50.0], ("b", None): [45.0, 45.0, 45.0, 45.0, 45.0, 45.0]}
    found = machine(speeds)
    asked = experiment(contender("a"), contender("b"), repetitions=3)
    document = run(asked, run_log()).document()
    assert 6 < len(found.asked) < 18
    assert [cell.leads for cell in document.cells] == [True, False]
    assert document.warnings == ()


def test_one_trial_each_tells_of_no_interval(machine, run_log):
    found = machine(APART)
    document = run(experiment(*FOUR, repetitions=1), run_log()).document()
    assert len(found.asked) == 4
    assert document.warnings == (
        "the ranking is uncertain: 1 trial per cell is too few for an interval; use a larger -r or a longer --budget",
    )


def test_what_fails_is_a_row_and_is_not_tried_again(machine, run_log):
    dead = Failure("the child process was ended by SIGABRT", "-v shows more")
    found = machine(APART | {("a", "d"): dead})
    document = run(experiment(*FOUR), run_log()).document()
    assert found.asked.count(("a", "d")) == 1
    assert (document.cells[1].run, document.cells[1].failure) == (None, dead)
    assert all(cell.run is not None for index, cell in enumerate(document.cells) if index != 1)


def test_a_cell_that_fails_later_keeps_what_it_has(machine, run_log):
    found = machine(APART | {("b", "d"): [50.0, Failure("out of memory")]})
    document = run(experiment(*FOUR), run_log()).document()
    assert found.asked.count(("b", "d")) == 2
    cell = document.cells[3]
    assert cell.run is not None
    assert (cell.run.tokens_per_s.samples, cell.failure) == ((50.0,), None)
    assert any("b + d failed after 1 trial: out of memory" in warning for warning in document.warnings)


def test_a_cell_that_was_never_placed_is_a_row(machine, run_log):
    machine(APART)
    lost = Contender("a", "x", None, failure=Failure("the draft does not fit"))
    document = run(experiment(*FOUR, lost), run_log()).document()
    assert document.cells[4].failure == Failure("the draft does not fit")


def test_a_target_that_cannot_run_alone_gives_no_speedups(machine, run_log):
    machine(APART | {("a", None): Failure("dead")})
    cells = run(experiment(*FOUR), run_log()).document().cells
    assert cells[1].run is not None
    assert cells[1].speedup is None


def test_every_trial_is_kept_and_none_is_made_twice(machine, run_log):
    """Stopped after each number of trials in turn, the comparison needs the missing ones only, and says the same."""
    found = machine(APART)
    whole = run(experiment(*FOUR), run_log("whole")).document()
    total = len(found.asked)
    for stop in range(1, total):
        first = machine(APART)
        count = iter(range(stop))
        book = run_log(f"stopped after {stop}")

        def until(spec, first=first, count=count, **rest):
            if next(count, None) is None:
                raise KeyboardInterrupt
            return first(spec, **rest)

        comparison = Comparison(experiment(*FOUR), book, until)
        with pytest.raises(KeyboardInterrupt):
            comparison.run(lambda *_: None)
        assert sum(map(len, comparison.trials.results.values())) == stop
        assert comparison.document(interrupted=True).interrupted
        second = machine(APART)
        second.asked = list(first.asked)  # goes on in its lists of speeds
        again = run(experiment(*FOUR), run_log(f"stopped after {stop}"))
        assert len(second.asked) == total
        assert again.trials.resumed == stop
        assert again.document().cells == whole.cells


def test_what_failed_is_tried_again_by_the_next_run(machine, run_log):
    machine(APART | {("a", "d"): Failure("dead")})
    run(experiment(*FOUR), run_log())
    mended = machine(APART)
    document = run(experiment(*FOUR), run_log()).document()
    assert mended.asked == [("a", "d")] * 3
    assert document.cells[1].run is not None


def test_another_file_is_measured_anew(machine, run_log, tmp_path):
    target = tmp_path / "t.gguf"
    found = machine({(str(target), None): 10.0})
    for content, times in (("one", 3), ("one", 3), ("another", 6)):
        target.write_text(content)
        os.utime(target, ns=(len(content), len(content)))
        run(experiment(contender(str(target))), run_log())
        assert len(found.asked) == times


def test_more_repetitions_add_to_what_is_there(machine, run_log):
    machine(APART)
    run(experiment(*FOUR, repetitions=3), run_log())
    found = machine(APART)
    run(experiment(*FOUR, repetitions=4), run_log())
    assert len(found.asked) == 4


def test_a_placement_is_kept_as_it_was(run_log):
    planned = PlannedCell(DecoderOptions(Placement(7, (3.0, 1.0))), {"CUDA0": {"target weights": 5}})
    run_log().put("placement", planned)
    assert run_log().get("placement", PlannedCell) == planned


def test_what_is_kept_in_another_shape_is_measured_anew(machine, run_log, tmp_path):
    machine(APART)
    run(experiment(*FOUR), run_log())
    path = tmp_path / "compare.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["value"].pop("load_s")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = machine(APART)
    again = run(experiment(*FOUR), run_log())
    assert (found.asked, again.trials.resumed) == ([("a", None)], 11)


def test_a_child_that_cannot_be_started_is_a_failure(monkeypatch):
    def measure(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(trial, "run_trial", measure)
    failure = trial.attempt(spec("a")).failure
    assert failure is not None
    assert "Cannot allocate memory" in failure.error


def test_energy_is_over_the_trials_that_have_it():
    known = [result(10.0, energy_j=50.5), result(10.0, energy_j=70.7), result(10.0)]
    assert compare.energy_j_per_token(known) == pytest.approx(0.6)
    assert compare.energy_j_per_token(known[2:]) is None
    assert compare.energy_j_per_token([]) is None


def test_bytes_by_device_and_part():
    def model(**devices):
        return PlannedModel("x.gguf", 1, 2, (), 0, "f16", "f16", devices)

    used = {"weights": 100, "kv": 10, "compute": 5, "overhead": 1}
    option = PlannedOption(model(GPU=used, CPU=used), model(GPU=used), 1.0, 3)
    assert matrix.part_bytes(option, {"GPU": 1000}) == {
        "GPU": {
            "target weights": 100,
            "target kv": 10,
            "target compute": 5,
            "draft weights": 100,
            "draft kv": 10,
            "draft compute": 5,
            "overhead": 1002,
        },
        "CPU": {"target weights": 100, "target kv": 10, "target compute": 5, "overhead": 1},
    }


# what goes on on a card


def card(**more):
    return Gpu(0, "RTX 4090", "", 24, 20, 4, "575", **more)


def test_a_card_that_is_held_back_and_a_stranger_on_it(machine, run_log, monkeypatch):
    ours, desktop = GpuProcess(1, "python", 1), GpuProcess(2, "Xorg", 1)
    cards = [card(utilisation=0.4, processes=(desktop,))]
    monkeypatch.setattr(trials.gpus, "gpus", lambda: cards)
    numbers = iter(range(100))

    def measure(spec, *, on_event=None, verbose=False):
        hot = next(numbers) == 1
        cards[0] = card(processes=(ours, desktop), throttled=("heat",) if hot else ())
        on_event({"event": "answer", "index": 0})
        cards[0] = card(processes=(desktop, GpuProcess(3, "blender", 9))) if hot else card(processes=(desktop,))
        return trial.TrialAttempt(result(10.0 if spec.target == Path("a") else 20.0))

    monkeypatch.setattr(trial, "attempt", measure)
    document = run(experiment(contender("a"), contender("b")), run_log()).document()
    assert document.warnings == (
        "RTX 4090 was 40% busy before the first trial: something else is running on it",
        "RTX 4090 reduced its clocks: heat",
        "another program started to use a GPU during the trials: blender",
    )


# a budget


def shared(budget_s, repetitions=3, prompts=4, cut=True):
    """An experiment with a prediction for each cell, that is off by 2: trials of 100 tokens at 10 tokens/s."""
    asked = experiment(*FOUR, repetitions=repetitions)
    contenders = tuple(
        replace(one, spec=replace(one.spec, prompts=("a prompt",) * prompts), predicted_tokens_per_s=20.0)
        for one in asked.contenders
    )
    return replace(asked, contenders=contenders, budget_s=budget_s, cut=cut)


class Timed:
    """Takes as long as it says: answers at 10 tokens/s, by a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.asked = 0.0, []
        monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(trial, "attempt", self)

    def __call__(self, spec, **_):
        self.asked.append(spec)
        one = result(10.0)
        (answer,) = one.answers
        statistics = replace(answer.statistics, tokens=spec.max_tokens + 1, decode_s=spec.max_tokens / 10.0)
        answers = tuple(replace(answer, statistics=statistics) for _ in spec.prompts)
        found = replace(one, answers=answers, draft=one.draft if spec.draft else None)
        self.now += trials.trial_s(found)
        return trial.TrialAttempt(found)


@pytest.mark.parametrize("budget_s", [30.0, 60.0, 120.0, 300.0, 1000.0])
def test_a_budget_is_kept_and_shared(run_log, monkeypatch, budget_s):
    """What is cut first: the length of answers, then trials, then prompts, then cells."""
    clock = Timed(monkeypatch)
    document = run(shared(budget_s=budget_s), run_log()).document()
    assert clock.now <= budget_s
    assert clock.now > 0.5 * budget_s or budget_s == 1000.0
    settings = document.settings
    assert settings["budget_s"] == budget_s
    shape = settings["prompts"], settings["max_tokens"], settings["repetitions"]
    assert shape == clock_shapes()[budget_s]
    measured = [cell.run is not None for cell in document.cells]
    assert all(measured)
    assert len({(len(one.prompts), one.max_tokens) for one in clock.asked[1:]}) == 1, "cells are measured alike"
    assert any("to finish within" in note for note in document.notes) == (shape != (4, 100, 3))
    count = len(clock.asked)
    again = run(shared(budget_s=budget_s), run_log())
    assert len(clock.asked) == count, "the same command measures nothing twice, the short trial neither"
    assert again.document().cells == document.cells


def clock_shapes():
    """(prompts, tokens, trials) by budget."""
    return {
        30.0: (1, 32, 1),
        60.0: (2, 45, 1),
        120.0: (4, 52, 1),
        300.0: (4, 43, 3),
        1000.0: (4, 100, 3),
    }


def test_what_does_not_fit_at_all_is_left_out(run_log, monkeypatch):
    clock = Timed(monkeypatch)
    document = run(shared(budget_s=16.0), run_log()).document()
    measured = [cell.run is not None for cell in document.cells]
    assert measured[0]
    assert not measured[-1]
    assert clock.now <= 16.0
    assert any("did not fit in the budget" in note for note in document.notes)
    assert report.results(document).failed[3] == "not measured"


def test_answers_of_a_requested_length_are_not_cut(run_log, monkeypatch):
    Timed(monkeypatch)
    document = run(shared(budget_s=100.0, cut=False), run_log()).document()
    assert (document.settings["prompts"], document.settings["max_tokens"]) == (1, 100)


def test_the_time_left_is_known_from_the_predictions_and_then_from_trials(run_log, monkeypatch):
    Timed(monkeypatch)
    comparison = Comparison(shared(budget_s=None, repetitions=1), run_log())
    left = []
    comparison.run(lambda *_: left.append(comparison.left_s))
    one = 1 + 1 + 0.5 + 4 * 10.5
    assert left[0] == pytest.approx(4 * (1 + 4 * 100 / 20), rel=0.05)
    assert left[1:] == pytest.approx([3 * one, 2 * one, one], rel=0.05)


# quality


@pytest.fixture
def qualities(monkeypatch):
    """Qualities are made by hand; what was asked of a child is noted, and that the reference's file is there."""
    asked = []
    fails = set()

    def measure(spec, *, on_event=None, verbose=False):
        asked.append((spec.model.name, spec.reference))
        if spec.model.name in fails:
            raise compare.GgufspecError(f"{spec.model.name} cannot be loaded", "a hint")
        if spec.is_reference:
            spec.rows.touch()
        assert spec.rows.exists()
        return Quality(spec.reference, 100, 5.0, 0.1, 0.0 if spec.is_reference else 0.1, 0.01, 0.9, 0.01)

    monkeypatch.setattr(compare.quality, "measure_quality", measure)
    return SimpleNamespace(asked=asked, fails=fails)


def judged(*sizes):
    names = [f"t{size}" for size in sizes]
    subjects = tuple(ComparedModel(f"t{size}", f"t{size}", size) for size in sizes)
    return experiment(*(contender(name) for name in names), repetitions=1, quality=True, targets=subjects)


def speeds(*sizes):
    return {(f"t{size}", None): float(size) for size in sizes}


def test_the_largest_target_is_the_reference(machine, run_log, qualities, tmp_path):
    machine(speeds(5, 9, 7))
    document = run(judged(5, 9, 7), run_log()).document()
    assert qualities.asked == [("t9", "t9"), ("t7", "t9"), ("t5", "t9")]
    assert [model.quality.reference for model in document.targets] == ["t9"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["compare.jsonl"]
    run(judged(5, 9, 7), run_log())
    assert len(qualities.asked) == 3  # kept


def test_a_reference_that_cannot_be_read_makes_way(machine, run_log, qualities):
    machine(speeds(5, 9, 7))
    qualities.fails.add("t9")
    document = run(judged(5, 9, 7), run_log()).document()
    assert qualities.asked == [("t9", "t9"), ("t7", "t7"), ("t5", "t7")]
    assert document.targets[1].failure == Failure("t9 cannot be loaded", "a hint")
    assert document.targets[0].quality.reference == "t7"


def test_a_resumed_comparison_reads_the_reference_again_if_it_must(machine, run_log, qualities):
    machine(speeds(5, 9))
    qualities.fails.add("t5")
    document = run(judged(5, 9), run_log()).document()
    assert document.targets[0].quality is None
    qualities.fails.clear()
    qualities.asked.clear()
    document = run(judged(5, 9), run_log()).document()
    assert qualities.asked == [("t9", "t9"), ("t5", "t9")]
    assert document.targets[0].quality is not None


def test_a_target_that_cannot_run_says_why_it_has_no_quality(machine, run_log, qualities):
    machine(speeds(5, 7))
    asked, dead = judged(5, 7), Failure("it does not fit")
    lost = Contender("t9", None, None, failure=dead)
    asked = replace(
        asked,
        targets=(*asked.targets, ComparedModel("t9", "t9", 9)),
        contenders=(*asked.contenders, lost),
    )
    document = run(asked, run_log()).document()
    assert [model.quality and model.quality.reference for model in document.targets] == ["t7", "t7", None]
    assert document.targets[2].failure == dead


def test_one_target_has_nothing_to_be_judged_by(machine, run_log, qualities):
    machine(speeds(5))
    run(judged(5), run_log())
    assert qualities.asked == []


# what is shown


def made(tokens_per_s, **more):
    value = Spread(tokens_per_s, (tokens_per_s * 0.9, tokens_per_s * 1.1), (tokens_per_s * 0.9, tokens_per_s * 1.1))
    return MeasuredRun(9, 16, 100, value, 50.0, 2**30, **({"vram_bytes": 0, "load_s": 1.5} | more))


def reported(**more):
    quality = Quality("model-F16", 2000, 6.1, 0.1, 0.02, 0.001, 0.91, 0.005)
    cells = (
        CompareCell("model-F16", None, made(10.0, vram_bytes=2**31), None),
        CompareCell("model-F16", "draft", made(15.0), Spread(1.5, (1.4, 1.6), (1.4, 1.5, 1.6)), {"GPU": {"x": 2**30}}),
        CompareCell(
            "model-Q4_0", None, made(30.0, load_s=0.5, vram_bytes=2**31), None, leads=True, energy_j_per_token=2.5
        ),
        CompareCell("model-Q4_0", "draft", None, None, failure=Failure("ended by SIGABRT", "-v shows more")),
    )
    models = (
        ComparedModel("model-F16", "/m/model-F16.gguf", 2 * 10**9, replace(quality, mean_kl=0.0)),
        ComparedModel("model-Q4_0", "/m/model-Q4_0.gguf", 5 * 10**8, quality),
    )
    body = {"targets": models, "drafts": (ComparedModel("draft", "/m/draft.gguf", 10**8),), "cells": cells}
    return CompareDocument({}, {"repetitions": 2}, **(body | {"warnings": ("it was hot",)} | more))


def test_the_best_of_each_column_is_marked():
    document = reported()
    shown = report.results(document)
    titles = [column.label for column in shown.columns]
    assert titles == [
        *("Target", "Draft", "Tokens/s", "Speedup", "GPU layers", "VRAM", "Load", "J/token", "Mean KL")  # none drafted
    ]
    best = {cells[:2]: {titles[c] for r, c in shown.best if r == n} for n, cells in enumerate(shown.cells)}
    assert best[("model-Q4_0", "–")] == {"Tokens/s", "Load"}
    assert best[("model-F16", "draft")] == {"VRAM", "Mean KL"}  # a speedup without a rival is the best of nothing
    assert best[("model-F16", "–")] == {"Mean KL"}


@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        (CompareSort.MATRIX, ("model-F16", None), ("model-Q4_0", "draft")),
        (CompareSort.SPEED, ("model-Q4_0", None), ("model-Q4_0", "draft")),
        (CompareSort.SPEEDUP, ("model-F16", "draft"), ("model-Q4_0", "draft")),
        (CompareSort.MEMORY, ("model-F16", "draft"), ("model-Q4_0", "draft")),
        (CompareSort.LOAD, ("model-Q4_0", None), ("model-Q4_0", "draft")),
        (CompareSort.ENERGY, ("model-Q4_0", None), ("model-Q4_0", "draft")),
        (CompareSort.QUALITY, ("model-F16", None), ("model-Q4_0", "draft")),
        (CompareSort.DRAFT, ("model-F16", None), ("model-Q4_0", "draft")),
    ],
)
def test_rows_can_be_ordered_and_failures_come_last(sort, first, last):
    cells = report.ordered(reported(), sort)
    assert [(cell.target, cell.draft) for cell in (cells[0], cells[-1])] == [first, last]


def test_every_order_works_with_nothing_to_order_by():
    empty = reported(cells=(CompareCell("a", None, None, None),), targets=())
    for sort in CompareSort:
        assert len(report.ordered(empty, sort)) == 1
    assert report.verdict(empty) == "Nothing could be measured."


def test_the_verdict_names_the_price():
    text = report.verdict(reported())
    assert text.startswith("Fastest: model-Q4_0 (target-only), 30.0 ± 3.0 tokens/s.")
    assert "Its likeliest token is the same as that of model-F16 at 91.0% of positions (mean KL 0.0200" in text


def idle(tokens_per_s):
    """Return a run whose draft was never asked."""
    found = made(tokens_per_s)
    facts = {one.name: getattr(found, one.name) for one in fields(found)}
    return SpeculativeRun(**facts, **IDLE)


IDLE = {"gpu_layers_draft": 0, "draft_layers": 4, "acceptance_rate": 0.0, "tokens_per_round": 1.0}
IDLE |= {"accepted_by_position": (), "drafted": 0, "accepted": 0, "rounds": 9, "draft_s": 0.0, "verify_s": 0.1}


def test_a_pair_that_drafted_nothing_has_no_speedup():
    ratio = Spread(1.24, (1.2, 1.3), (1.2, 1.3))
    cells = (CompareCell("a", None, made(10.0), None), CompareCell("a", "d", idle(12.4), ratio, leads=True))
    document = reported(cells=cells, targets=())
    text = report.verdict(document)
    assert text == "Fastest: a (target-only), 10.0 ± 1.0 tokens/s. a + d drafted nothing and ran as target-only."
    assert "1.24" not in report.markdown(document) + report.comma_separated(document)
    assert report.in_a_line(cells[1]) == "a + d: 12.4 ± 1.2 tokens/s, nothing drafted"
    assert "**12.4" not in report.markdown(document)  # nor is it the best of its column
    assert report.portions_of_best(document) is None


@pytest.mark.parametrize(("drafted", "by_lookup", "said"), [(3, 3, True), (3, 2, False), (0, 0, False)])
def test_a_pair_for_which_only_the_lookup_drafted_is_named(drafted, by_lookup, said):
    pair = replace(idle(12.4), drafted=drafted, accepted=1, lookup_drafted=by_lookup)
    cells = (
        CompareCell("a", None, made(10.0), None),
        CompareCell("a", "d", pair, Spread(1.24, (1.2, 1.3), (1.2, 1.3))),
    )
    text = report.verdict(reported(cells=cells, targets=()))
    assert text.endswith(" a + d drafted with the n-gram lookup only, not with the draft.") == said
    if drafted:
        assert report.in_a_line(cells[1]).endswith("1 of 3 accepted")


def single(tokens_per_s):
    return replace(made(tokens_per_s), tokens_per_s=Spread(tokens_per_s, (tokens_per_s,) * 2, (tokens_per_s,)))


@pytest.mark.parametrize(
    ("runs", "legend"),
    [
        ((made(10.0), made(20.0)), "* is the best of its column; ± is the 95% interval."),
        ((made(10.0),), "± is the 95% interval."),
        ((single(10.0), single(20.0)), "* is the best of its column."),
        ((single(10.0),), ""),
    ],
)
def test_only_marks_that_the_tables_show_are_explained(runs, legend, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    cells = tuple(CompareCell(name, None, run, None) for name, run in zip("ab", runs, strict=False))
    _show(reported(cells=cells, targets=(), warnings=()), CompareSort.MATRIX)
    shown = capsys.readouterr().out
    assert ("±" in shown.partition("Fastest")[0]) == ("±" in legend)
    assert [line for line in shown.splitlines() if "is the" in line] == [legend] * bool(legend)


def test_quality_has_an_interval_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    _show(reported(cells=(CompareCell("model-F16", None, single(10.0), None),)), CompareSort.MATRIX)
    assert "± is the 95% interval; quality measured on a bundled text of 2,000 tokens." in capsys.readouterr().out


def test_one_cell_is_not_the_fastest():
    cells = (CompareCell("a", None, made(10.0), None), CompareCell("a", "d", None, None))
    text = report.verdict(reported(cells=cells, targets=()))
    assert text == "Nothing to compare: only a (target-only), 10.0 ± 1.0 tokens/s, was measured."


def test_failures_with_one_reason_are_told_once():
    dead = Failure("no room", "lower -c")
    cells = (CompareCell("a", None, None, None, failure=dead), CompareCell("a", "d", None, None, failure=dead))
    document = reported(cells=cells, targets=(ComparedModel("b", "", 1, failure=Failure("other tokens")),))
    assert report.failures(document) == ["a (target-only), a + d: no room (lower -c)", "quality of b: other tokens"]


def test_markdown_survives_hostile_names():
    cells = (
        CompareCell("a|b<script>", None, made(1.0), None),
        CompareCell("c", None, None, None, failure=Failure("x\ny|z")),
    )
    lines = report.markdown(reported(cells=cells, targets=())).splitlines()
    assert lines[2].startswith("| a\\|b&lt;script> | – |")
    assert "failed: x y\\|z" in lines[3]
    assert "- Warning: it was hot" in lines


def test_markdown_marks_the_best():
    assert "| **30.0 ± 3.0** |" in report.markdown(reported())


def test_csv_has_a_line_for_each_trial_and_each_failure():
    rows = list(csv.DictReader(io.StringIO(report.comma_separated(reported()))))
    assert [(row["target"], row["draft"], row["trial"]) for row in rows] == [
        ("model-F16", "", "1"),
        ("model-F16", "", "2"),
        ("model-F16", "draft", "1"),
        ("model-F16", "draft", "2"),
        ("model-Q4_0", "", "1"),
        ("model-Q4_0", "", "2"),
        ("model-Q4_0", "draft", ""),
    ]
    assert (rows[0]["tokens_per_s"], rows[0]["vram_bytes"], rows[2]["vram_bytes"]) == ("9.0", str(2**31), str(2**30))
    assert (rows[5]["energy_j_per_token"], rows[5]["mean_kl"], rows[6]["failure"]) == (
        "2.5",
        "0.02",
        "ended by SIGABRT",
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width):
    from rich.console import Console

    long = "Meta-Llama-3-70B-Instruct"
    names = {"model-F16": f"{long}-F16", "model-Q4_0": f"{long}-Q4_0", "draft": "Meta-Llama-3.2-1B-Instruct-Q8_0"}
    document = reported()
    document = replace(
        document,
        targets=tuple(replace(model, name=names[model.name]) for model in document.targets),
        drafts=tuple(replace(model, name=names[model.name]) for model in document.drafts),
        cells=tuple(
            replace(cell, target=names[cell.target], draft=cell.draft and names[cell.draft], energy_j_per_token=None)
            for cell in document.cells
        ),
    )
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        names = report.names_of(document, max(12, width // 4))
        console.print(table.terminal(report.results(document, CompareSort.MATRIX, names), width))
    lines = capture.get().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= max(width, 80)
    assert any(line.split()[:1] == ["F16"] for line in lines)
    assert any("30.0 ± 3.0*" in line for line in lines)
    assert any("Q8_0" in line and "failed" in line for line in lines)


def test_a_kept_trial_is_the_same_again(run_log):
    one = result(10.0, energy_j=5.0)
    run_log().put("a 0", one)
    assert run_log().get("a 0", trial.TrialResult) == one
    assert run_log().get("a 1", trial.TrialResult) is None


def file(path):
    return matrix.LabelledModel(Path(path), Path(path))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/m/a-Q4.gguf", "/m/a-Q8.gguf"], ["a-Q4", "a-Q8"]),
        (["/m/one/a.gguf", "/m/two/a.gguf", "/m/b.gguf"], ["a (one)", "a (two)", "b"]),
        (["/one/m/a.gguf", "/two/m/a.gguf"], ["/one/m/a.gguf", "/two/m/a.gguf"]),
        (["/m.gguf", "/x/m.gguf"], ["m (/)", "m (x)"]),
        (["/p/x/m.gguf", "/q/x/m.gguf", "/q/p/m.gguf"], ["/p/x/m.gguf", "/q/x/m.gguf", "/q/p/m.gguf"]),
    ],
)
def test_names_of_files(paths, names):
    assert list(matrix.unique_names([file(path) for path in paths]).values()) == names


def test_notes_that_differ_in_numbers_are_told_once():
    notes = ("took up to 11.8 ms of a.1", "took up to 12 ms of b.2", "something else", "took up to 3 ms of c.3")
    assert compare._once(notes) == ("took up to 11.8 ms of a.1 (and 2 more like it)", "something else")


def test_a_long_list_is_no_name_of_a_file():
    parts = [f"{'x' * 60}-{number}.gguf" for number in range(6)]
    assert split_list(", ".join(parts)) == parts


def test_a_target_alone_has_the_profile_s_settings_and_not_its_placement():
    pair = matrix.Pairing(file("/m/t.gguf"), file("/m/d.gguf"), Settings(ctx_size=512, n_cpu_moe=3, gpu_layers=45))
    alone, same = matrix.with_target_only([pair])
    assert (alone.draft, alone.settings) == (None, Settings(ctx_size=512))
    assert same is pair


def test_two_profiles_that_would_run_one_target_in_two_ways():
    target = file("/m/t.gguf")
    short = matrix.Pairing(target, file("/m/d.gguf"), Settings(ctx_size=512, acceptance=0.5))
    long = matrix.Pairing(target, file("/m/e.gguf"), Settings(ctx_size=1024))
    with pytest.raises(UsageError, match="differ in ctx_size"):
        matrix.with_target_only([short, long])
    assert len(matrix.with_target_only([short, replace(long, settings=Settings(ctx_size=512, acceptance=0.9))])) == 3
