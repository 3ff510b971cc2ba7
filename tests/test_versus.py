"""What measured trials say about a pair; the trials are made by hand."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ggufspec.bench import summary, trial, versus
from ggufspec.bench.history import record_results
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import WorkerError
from ggufspec.llamacpp import library
from ggufspec.models.profile import Pair, demo_pair
from ggufspec.models.source import read_headers
from ggufspec.reports import bench as bench_report
from ggufspec.reports.doctor import features
from ggufspec.schema.base import Run, SpeculativeRun, Spread, to_json
from ggufspec.schema.bench import Verdict
from ggufspec.schema.doctor import Build
from ggufspec.settings import parse_drafters


def statistics(decoded, decode_s, rounds=None, drafted=(0,), accepted=(0,), draft_s=0.0, verify_s=0.0):
    return Statistics(
        prompt_tokens=10,
        prompt_s=0.5,
        tokens=decoded + 1,
        decode_s=decode_s,
        rounds=rounds or decoded,
        drafted=sum(drafted),
        accepted=sum(accepted),
        drafted_by_position=drafted,
        accepted_by_position=accepted,
        draft_s=draft_s,
        verify_s=verify_s,
        stop_reason="length",
        prompt_read=10,
        time_to_first_token_s=0.25 + decode_s / 100,
    )


def result(*answers, draft=None, drafters=None, gpu_layers=0, load_s=1.0, rss=100, vram=0, notes=()):
    return trial.Result(
        answers=tuple(trial.Answer("", tuple(range(one.tokens)), one) for one in answers),
        target=trial.LoadedModel("llama 1B", 16, gpu_layers, 1000),
        draft=None if draft is None else trial.LoadedModel("llama 50M", 4, draft, 50),
        load_s=load_s,
        peak_rss_bytes=rss,
        vram_bytes=vram,
        finished=True,
        drafters=(() if draft is None else ("draft",)) if drafters is None else drafters,
        notes=notes,
        system_info="CPU : AVX2 = 1",
    )


def alone(seconds=10.0, **rest):
    return result(statistics(20, seconds), **rest)


def pair(seconds=5.0, draft=0, **rest):
    return result(statistics(20, seconds, 8, (8, 8), (7, 5), 1.0, 4.0), draft=draft, **rest)


def run(tokens_per_s=2.0, gpu_layers=0):
    return Run(gpu_layers, 16, 20, Spread(tokens_per_s, (tokens_per_s, tokens_per_s), (tokens_per_s,)), 20, 100, 0, 1)


def speculative(tokens_per_s=4.0, gpu_layers=0, gpu_layers_draft=0, lossy=False):
    base = run(tokens_per_s, gpu_layers)
    return SpeculativeRun(
        **{name: getattr(base, name) for name in Run.__slots__},
        gpu_layers_draft=gpu_layers_draft,
        draft_layers=4,
        acceptance_rate=0.75,
        tokens_per_round=2.5,
        accepted_by_position=(0.875, 0.625),
        drafted=16,
        accepted=12,
        rounds=8,
        draft_s=0.125,
        verify_s=0.5,
        lossy=lossy,
    )


def test_speed_is_all_tokens_over_all_seconds():
    """Not the mean of the answers' speeds."""
    assert summary.speed(result(statistics(10, 1.0), statistics(10, 3.0))) == 5.0


def test_a_target_only_run_in_one_row():
    found = summary.summarise([alone(10, load_s=3, rss=50, vram=7), alone(8, load_s=1), alone(5, load_s=2, vram=3)])
    assert type(found) is Run
    assert (found.tokens, found.layers, found.gpu_layers) == (21, 16, 0)
    assert (found.tokens_per_s.median, found.tokens_per_s.samples) == (2.5, (2.0, 2.5, 4.0))
    assert (found.prompt_tokens_per_s, found.load_s) == (20.0, 2.0)
    assert (found.prompt_tokens, found.time_to_first_token_s) == (10, 0.33)
    assert (found.peak_rss_bytes, found.vram_bytes) == (100, 7)


def test_prompts_count_as_far_as_they_were_decoded():
    """Not what a cache held; nor is there a speed without any."""
    kept = replace(statistics(10, 1.0), prompt_tokens=500, prompt_read=100, prompt_s=2.0)
    single = replace(statistics(10, 1.0), prompt_tokens=1, prompt_read=0, prompt_s=0.0, time_to_first_token_s=None)
    found = summary.summarise([result(kept, single)])
    assert (found.prompt_tokens, found.prompt_tokens_per_s) == (100, 50.0)
    assert found.time_to_first_token_s == kept.time_to_first_token_s
    none = summary.summarise([result(single)])
    assert (none.prompt_tokens, none.prompt_tokens_per_s, none.time_to_first_token_s) == (0, 0.0, None)


def test_a_speculative_run_in_one_row():
    """8 rounds with drafts of 2 in the first trial, 4 rounds in the second."""
    other = result(statistics(10, 5.0, 4, (4, 2), (4, 1), 2.0, 2.0), draft=5)
    found = summary.summarise([pair(draft=5), other])
    assert isinstance(found, SpeculativeRun)
    assert (found.rounds, found.drafted, found.accepted) == (12, 22, 17)
    assert found.acceptance_rate == 17 / 22
    assert found.tokens_per_round == 30 / 12
    assert found.accepted_by_position == (11 / 12, 6 / 10)
    assert (found.draft_s, found.verify_s) == (3 / 12, 6 / 12)
    assert (found.draft_layers, found.gpu_layers_draft) == (4, 5)
    assert found.tokens == 21  # of one trial


def test_a_pair_that_never_drafted_divides_by_nothing():
    found = summary.summarise([result(statistics(1, 1.0), draft=0)])
    assert (found.acceptance_rate, found.accepted_by_position, found.tokens_per_round) == (0.0, (), 1.0)


def test_a_lookup_needs_no_draft_model():
    found = summary.summarise([result(statistics(20, 5.0, 8, (8, 8), (7, 5)), drafters=("lookup",))], lossy=True)
    assert isinstance(found, SpeculativeRun)
    assert (found.draft_layers, found.gpu_layers_draft, found.drafted, found.lossy) == (0, 0, 16, True)


def test_rounds_without_a_draft_and_tokens_of_the_lookup_are_added_up():
    one = replace(statistics(20, 5.0, 8, (6, 6), (5, 4)), plain_rounds=2, lookup_drafted=5, lookup_accepted=3)
    other = replace(one, plain_rounds=1, lookup_drafted=0, lookup_accepted=0)
    found = summary.summarise([result(one, other, drafters=("draft", "lookup")), result(one, draft=0)])
    assert (found.plain_rounds, found.lookup_drafted, found.lookup_accepted) == (5, 10, 6)


def test_what_the_lookup_alone_kept_is_not_taken_for_the_pair_s(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr("ggufspec.planning.history.record_acceptance", lambda *reported: kept.append(reported))
    monkeypatch.setattr("ggufspec.cache.user_cache_path", lambda _: tmp_path)
    target, draft = demo_pair()
    for drafter in ("lookup", "both"):
        options = DecoderOptions(drafters=parse_drafters(drafter))
        spec = trial.Spec(target, draft, options, Sampling(), ("one",), 20)
        record_results(spec, [pair(drafters=(drafter,))])
    names = [known.header.fingerprint for known in read_headers([target, draft])]
    assert [reported[1:] for reported in kept] == [(*names, [7, 5], [8, 8])]


# of a target-only token that takes 0.5 s
WHY = "A round gives 2.50 tokens in the time of 1.25 without a draft: 1.00 to verify, 0.25 to draft."
WHY_NOT = "A round gives 2.50 tokens in the time of 3.12 without a draft: 2.50 to verify, 0.62 to draft."
INTERVAL = "95 % interval 0.90 to 1.30"
NEITHER = "A round gives 2.50 tokens in the time of 2.27 without a draft: 1.82 to verify, 0.45 to draft."


@pytest.mark.parametrize(
    ("speedup", "worth_it", "text", "why"),
    [
        ((2.0, 1.9, 2.1), True, "Worth it: 2.00× as fast as without a draft (95 % interval 1.90 to 2.10).", WHY),
        (
            (0.8, 0.7, 0.9),
            False,
            "Not worth it: 0.80× as fast as without a draft (95 % interval 0.70 to 0.90).",
            WHY_NOT,
        ),
        (
            (1.1, 0.9, 1.3),
            False,
            f"Not shown to be worth it: 1.10× as fast as without a draft, within the noise ({INTERVAL}).",
            NEITHER,
        ),
    ],
)
def test_the_verdict(speedup, worth_it, text, why):
    median, low, high = speedup
    verdict = versus.judge(Spread(median, (low, high), (low, median, high)), run(), speculative())
    assert verdict == Verdict(worth_it, text, why)


@pytest.mark.parametrize(("plain", "said"), [(8, "100%"), (5, "62%"), (4, "")])
def test_where_it_was_not_worth_it_since_no_draft_paid_it_says_so(plain, said):
    drafted = replace(speculative(), plain_rounds=plain)
    more = f" In {said} of the rounds no draft would have paid, and none was made." if said else ""
    assert versus.judge(Spread(2.0, (0.9, 2.1), (0.9, 2.0, 2.1)), run(), drafted).why == WHY + more
    assert versus.judge(SPEEDUP, run(), drafted).why == WHY


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.2), (0.9, 1.0)])
def test_an_interval_that_touches_one_shows_nothing(low, high):
    verdict = versus.judge(Spread((low + high) / 2, (low, high), (low, (low + high) / 2, high)), run(), speculative())
    assert (verdict.worth_it, verdict.text.split(":")[0]) == (False, "Not shown to be worth it")


@pytest.mark.parametrize("samples", [(0.5,), (2.0,), (2.0, 2.1)])
def test_one_or_two_trials_give_no_verdict(samples):
    verdict = versus.judge(Spread(samples[0], (samples[0], samples[-1]), samples), run(), speculative())
    assert not verdict.worth_it
    assert verdict.text.startswith("No verdict from so few trials")


SPEEDUP = Spread(2.0, (1.9, 2.1), (1.9, 2.0, 2.1))


@pytest.mark.parametrize(
    "measured",
    [(None, run(), speculative()), (SPEEDUP, None, speculative()), (SPEEDUP, run(), None), (None, None, None)],
)
def test_no_verdict_when_interrupted(measured):
    verdict = versus.judge(*measured)
    assert not verdict.worth_it
    assert verdict.text.startswith("No verdict: the measurement was interrupted")


def test_a_rival_at_another_placement_is_named():
    same = versus.judge(SPEEDUP, run(gpu_layers=9), speculative(4.0, 9, 5))
    assert "placement" not in same.why
    better = versus.judge(SPEEDUP, run(gpu_layers=14), speculative(4.0, 9, 5))
    assert "its own best placement, 14/17 layers against 9/17" in better.why
    assert better.worth_it


def test_a_pair_that_nobody_drafts_for_was_not_interrupted():
    """Its memory forgets at a price that no draft earns: the note says so, and it runs as target-only does."""
    found = summary.summarise([result(statistics(20, 5.0), draft=0, drafters=())])
    assert type(found) is Run
    verdict = versus.judge(SPEEDUP, run(), found)
    assert (verdict.worth_it, verdict.text.split(":")[0]) == (False, "Not worth it")


def test_a_verdict_on_a_lossy_rule_says_so():
    lossless, lossy = (versus.judge(SPEEDUP, run(), speculative(lossy=lossy)) for lossy in (False, True))
    assert lossy.text == f"{lossless.text} The rule is lossy: the text is not the target's own."
    assert lossy.worth_it


OPTIONS = DecoderOptions(gpu_layers=9, gpu_layers_draft=5, threads=2, draft_max=2)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(versus, "machine_and_build", lambda system_info: {"build": system_info, "cpu": "a cpu"})
    spec = trial.Spec(Path("t.gguf"), Path("d.gguf"), OPTIONS, Sampling(seed=7), ("one", "two"), 20)
    return versus.Bench(versus.Experiment(Pair("mine", spec.target, spec.draft), spec, 3))


def test_the_document(bench):
    bench.results["target_only"] = [alone(10), alone(8), alone(20)]
    bench.results["draft_only"] = [alone(1)] * 3
    bench.results["speculative"] = [pair(5), pair(4), pair(5)]
    bench.own = versus.SameText(True, "a note")
    document = bench.document()
    assert document.machine["build"] == "CPU : AVX2 = 1"
    assert document.speedup.samples == (2.0, 2.0, 4.0)
    assert document.speedup.median == 2.0
    assert document.verdict.text.startswith("Worth it: 2.00×")
    assert {mode: row.tokens_per_s.median for mode, row in document.runs.items()} == {
        "target_only": 2.0,
        "draft_only": 20.0,
        "speculative": 4.0,
    }
    assert document.pair == {"name": "mine", "target": "t.gguf", "draft": "d.gguf"}
    assert document.plan["draft"] == {"description": "llama 50M", "layers": 4, "gpu_layers": 0, "size_bytes": 50}
    wanted = {"repetitions": 3, "threads": 2, "seed": 7, "prompts": 2, "max_tokens": 20, "draft_max": 2}
    assert {key: document.settings[key] for key in wanted} == wanted
    assert (document.identical_output, document.identity_check, document.interrupted) == (
        True,
        {"note": "a note"},
        False,
    )


def test_an_interrupted_document_pairs_what_is_there(bench):
    bench.results["target_only"] = [alone(10), alone(8)]
    bench.results["speculative"] = [pair(5)]
    document = bench.document(interrupted=True)
    assert (document.interrupted, document.speedup.samples, document.runs["draft_only"]) == (True, (2.0,), None)


def test_a_document_of_nothing(bench):
    document = bench.document(interrupted=True)
    assert (document.runs, document.speedup, document.plan) == (dict.fromkeys(versus.MODES), None, {})
    assert (document.identical_output, document.verdict.worth_it) == (None, False)


def test_a_run_that_crashes_costs_itself(bench, monkeypatch):
    """It is not tried again, and the others are measured."""
    tried = []

    def measure(spec, *, verbose):
        tried.append(spec)
        if spec.draft is not None:
            raise WorkerError("the driver most likely crashed", "update it", "SIGSEGV")
        return alone(10)

    monkeypatch.setattr(versus.trial, "measure", measure)
    bench.run(lambda *_: None)
    document = bench.document()
    assert document.runs["target_only"].tokens_per_s.samples
    assert document.runs["speculative"] is None
    assert document.failures["speculative"].error == "the driver most likely crashed"
    assert "not every run could be measured" in document.verdict.text
    assert sum(spec.draft is not None for spec in tried) == 2  # the check of the text, and one trial
    assert any("was not measured" in line for line in bench_report.failures(document))


def test_where_every_run_crashes_there_is_no_document(bench, monkeypatch):
    def measure(spec, *, verbose):
        raise WorkerError("the driver most likely crashed", "update it", "SIGSEGV")

    monkeypatch.setattr(versus.trial, "measure", measure)
    with pytest.raises(WorkerError, match="crashed"):
        bench.run(lambda *_: None)


def test_answers_of_one_token_have_no_speed(bench, monkeypatch):
    monkeypatch.setattr(versus.trial, "measure", lambda spec, **_: result(statistics(0, 0.0)))
    with pytest.raises(trial.NoSpeedError, match="one token"):
        bench.run(lambda *_: None)
    found = trial.attempt(bench.experiment.spec)
    assert found.result is None
    assert found.failure.hint.startswith("-n ")


def test_what_each_mode_runs(bench):
    spec = bench.experiment.spec
    assert bench.spec_of("speculative") == spec
    only = bench.spec_of("target_only")
    assert (only.target, only.draft, only.options) == (spec.target, None, replace(OPTIONS, drafters=()))
    draft = bench.spec_of("draft_only")
    assert (draft.target, draft.draft, draft.options.gpu_layers) == (spec.draft, None, 5)
    assert draft.options.drafter == "none"


def test_a_lookup_alone_has_no_draft_to_measure(bench):
    options = replace(OPTIONS, drafters=("lookup",), lookup_corpus=Path("corpus.txt"))
    spec = replace(bench.experiment.spec, draft=None, options=options)
    bench = versus.Bench(replace(bench.experiment, spec=spec))
    assert bench.experiment.modes == ("target_only", "speculative")
    assert bench.spec_of("speculative") == spec
    only = bench.spec_of("target_only").options
    assert (only.drafter, only.lookup_corpus) == ("none", None)
    bench.results["target_only"] = [alone(10)] * 3
    bench.results["speculative"] = [result(statistics(20, 5.0, 8, (8,), (7,)), drafters=("lookup",))] * 3
    document = json.loads(to_json(bench.document()))
    assert document["settings"]["lookup_corpus"] == "corpus.txt"
    assert document["plan"]["draft"] is None
    assert document["speedup"]["median"] == 2.0


@pytest.mark.parametrize(("accept", "lossy"), [("exact", False), ("residual", False), ("top-k:2", True)])
def test_only_what_may_change_the_text_is_lossy(bench, accept, lossy):
    spec = replace(bench.experiment.spec, options=replace(OPTIONS, accept=accept))
    bench = versus.Bench(replace(bench.experiment, spec=spec))
    bench.results["target_only"], bench.results["speculative"] = [alone(10)], [pair(5)]
    document = bench.document()
    assert (document.settings["accept"], document.settings["lossy"]) == (accept, lossy)
    assert document.runs["speculative"].lossy is lossy


def test_what_the_decoders_had_to_say_is_told_once(bench):
    bench.results["speculative"] = [pair(5, notes=("busy",)), pair(5, notes=("busy", "a dead end")), pair(5)]
    assert bench.document().notes == ("busy", "a dead end")


def test_a_divergence_is_judged_by_the_sampling_that_made_it(bench, monkeypatch):
    asked = []
    other = result(statistics(20, 1))
    answer = replace(other.answers[0], tokens=(*range(9), 99, *range(10, 20)))
    cut = replace(other.answers[0], tokens=tuple(range(12)))  # was stopped early, and says the same as far as it goes
    other = replace(other, answers=(answer, cut))
    drafted = replace(pair(5), answers=2 * pair(5).answers)
    monkeypatch.setattr(versus.divergence, "explain", lambda spec, verbose: asked.append(spec) or ())
    monkeypatch.setattr(versus.trial, "measure", lambda spec, **_: drafted if spec.draft else other)
    bench.run(lambda *_: None)
    (case,) = asked[0].cases
    assert (case.sampling, case.index, case.position) == (Sampling(seed=7), 0, 9)


def test_the_rival_runs_at_its_own_placement(bench):
    rival = replace(OPTIONS, gpu_layers=14, gpu_layers_draft=0)
    bench = versus.Bench(replace(bench.experiment, alone=rival))
    assert bench.experiment.modes == (*versus.MODES, versus.AT_PAIR)
    assert bench.spec_of("target_only").options.gpu_layers == 14
    assert bench.spec_of(versus.AT_PAIR).options.gpu_layers == bench.spec_of("speculative").options.gpu_layers == 9
    assert bench.spec_of(versus.AT_PAIR).draft is None
    bench.results["target_only"], bench.results[versus.AT_PAIR] = [alone(8)] * 3, [alone(10)] * 3
    bench.results["speculative"] = [pair(5)] * 3
    document = bench.document()
    assert document.speedup.samples == (1.6, 1.6, 1.6)  # against the better rival, not against 2.0 at the pair's
    assert set(document.runs) == {*versus.MODES, versus.AT_PAIR}


def test_the_threads_are_told_as_used(bench, monkeypatch):
    monkeypatch.setattr(summary.host, "physical_cores", lambda: 6)
    spec = trial.Spec(Path("t"), None, DecoderOptions(), Sampling(), ("one",), 1)
    assert summary.settings_of(spec)["threads"] == 6


def test_the_machine_is_told():
    assert {"cpu", "cores", "memory_bytes", "gpus", "llama_cpp_python"} <= set(summary.machine())


def test_a_record_names_the_processor_and_how_llama_cpp_was_built(monkeypatch):
    args = """-DGGML_RPC=on '-DCMAKE_CXX_FLAGS=-I/a/b -include "/home/some one/scripts/amx_tile_config.h"'"""
    monkeypatch.setattr(summary.installation, "built", lambda: Build("tile-load", "why", args))
    found = summary.machine_and_build("CPU : AVX2 = 1")
    assert found["processor"] == asdict(summary.host.processor())
    assert found["build"] == {
        "system_info": "CPU : AVX2 = 1",
        "cpu": "tile-load",
        "cmake_args": """-DGGML_RPC=on '-DCMAKE_CXX_FLAGS=-Ib -include "amx_tile_config.h"'""",
    }
    assert summary.machine().items() <= found.items()
    monkeypatch.setattr(summary.installation, "built", lambda: None)
    assert summary.machine_and_build("x")["build"] == {"system_info": "x"}  # a wheel's


def test_the_installed_llama_cpp_is_asked_for_its_build_where_nothing_ran():
    found = summary.machine_and_build()["build"]["system_info"]
    assert found == library.system_info()
    assert features(found)


def test_answers_with_fewer_places_of_a_draft_are_added_up() -> None:
    """A policy may refuse to draft in one trial and not in the next: batch_latencies are measured."""
    assert summary.by_position([(3, 2, 1), (), (1,)]) == [4, 2, 1]
    assert summary.by_position([()]) == []
