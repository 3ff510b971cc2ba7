"""The bench through llama-cpp-python's Llama: what it refuses, what it counts, what its one table shows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.bench import hooked, trial, versus
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import Placement
from ggufspec.models.profile import Pair
from ggufspec.reports import bench as report
from ggufspec.reports.documents import parse_document
from ggufspec.reports.html.page import render
from ggufspec.schema.base import SpeculativeRun, to_json
from tests.support.processes import plain, rest

RUNS = ["target_only", "draft_only", "speculative", "llama_target_only", "llama_hook"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": ("lookup",)}, "--drafter lookup has none"),
        ({"drafters": ()}, "--drafter none has none"),
        ({"accept": "residual"}, "--accept needs our own loop"),
        ({"cache_type_k_draft": "q8_0"}, "--cache-type-k-draft needs our own loop"),
        ({"accept": "top-k:3"}, "--accept needs our own loop"),
        ({"strict": True}, "--strict"),
        ({"lookup_corpus": Path("corpus.txt")}, "corpus"),
        ({"target": Placement(n_cpu_moe=4)}, "--n-cpu-moe"),
    ],
)
def test_what_the_hook_cannot_do_is_refused(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        hooked.check_hook(DecoderOptions(**options), Sampling())
    assert "--engine own" in caught.value.hint


def test_what_it_can_do_is_not():
    hooked.check_hook(
        DecoderOptions(
            drafters=("draft",), draft_policy="fixed", draft_max=4, cache_type_k="q8_0", target=Placement(9)
        ),
        Sampling(),
    )


# ---- the document ---------------------------------------------------------------------------------------------------


def result(seconds, tokens=21, drafters=(), notes=(), ids=None):
    statistics = Statistics(
        prompt_tokens=10,
        prompt_s=0.5,
        tokens=tokens,
        decode_s=seconds,
        rounds=8 if drafters else tokens - 1,
        drafted=16 if drafters else 0,
        accepted=12 if drafters else 0,
        drafted_by_position=(8, 8) if drafters else (),
        accepted_by_position=(7, 5) if drafters else (),
        draft_s=1.0,
        verify_s=seconds - 1.0,
        stop_reason="length",
    )
    return trial.TrialResult(
        answers=(trial.TrialAnswer("", tuple(range(tokens)) if ids is None else ids, statistics),),
        target=trial.LoadedModel("llama 1B", 16, 0, 1000),
        draft=trial.LoadedModel("llama 50M", 4, 0, 50) if drafters else None,
        load_s=1.0,
        peak_rss_bytes=100,
        vram_bytes=0,
        finished=True,
        drafters=drafters,
        notes=notes,
    )


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(versus, "machine_and_build", lambda system_info: {"cpu": "a cpu"})
    spec = trial.TrialJob(Path("t.gguf"), Path("d.gguf"), DecoderOptions(threads=2), Sampling(), ("one",), 20)
    return versus.Bench(versus.BenchExperiment(Pair("mine", spec.target, spec.draft), spec, 3, engine="hook"))


def measured(bench):
    both = ("draft", "lookup")
    bench.results["target_only"] = [result(10.0)] * 3
    bench.results["draft_only"] = [result(1.0)] * 3
    bench.results["speculative"] = [result(4.0, drafters=both)] * 3
    bench.results["llama_target_only"] = [result(12.0), result(12.0), result(15.0)]
    bench.results["llama_hook"] = [result(5.0, drafters=both, notes=("no logits",))] * 3
    return bench.document()


def test_both_ways_are_in_one_document(bench):
    document = measured(bench)
    assert list(document.runs) == RUNS
    assert document.hook.speedup.samples == pytest.approx((2.27, 2.27, 2.81), abs=0.01)  # their prompts take 0.5 s
    assert document.hook.over_own.samples == pytest.approx((0.82, 0.82, 0.82), abs=0.01)
    assert document.hook.notes == ("no logits",)
    assert isinstance(document.runs["llama_hook"], SpeculativeRun)
    assert document.speedup.median == pytest.approx(2.33, abs=0.01)  # our own loop's, as without the hook
    again = parse_document(json.loads(to_json(document)))
    assert (again.hook, again.runs) == (document.hook, document.runs)


def test_our_own_engine_has_no_such_keys(bench):
    bench = versus.Bench(replace(bench.experiment, engine="own"))
    assert list(bench.document().runs) == RUNS[:3]
    assert bench.document().hook is None


def test_both_ways_are_in_one_table(bench):
    document = measured(bench)
    rows = {row[0]: row for row in report.results(document).cells}
    assert list(rows) == ["target-only", "draft-only", "speculative", "Llama alone", "Llama + hook"]
    assert (rows["speculative"][4], rows["Llama + hook"][4], rows["Llama alone"][4]) == ("2.33×", "2.27×", "")
    assert document.hook.text == (
        "Llama with the hook: 2.27× (95% interval 2.27 to 2.81) Llama alone, "
        "0.82× (95% interval 0.82 to 0.82) our own loop with the same draft."
    )
    page = render([json.loads(to_json(document))])
    assert "Llama + hook" in page
    assert document.hook.text in page
    lines = list(csv.DictReader(report.comma_separated(document).splitlines()))
    assert [line["run"] for line in lines[::3]] == RUNS


def test_an_interrupted_hook_says_so(bench):
    bench.results["target_only"] = [result(10.0)]
    document = bench.document(interrupted=True)
    assert (document.hook.speedup, document.hook.over_own) == (None, None)
    assert "interrupted" in document.hook.text


def test_each_way_is_measured_its_own_way(bench, monkeypatch):
    """And the identity of the hook is checked greedily, against Llama alone."""
    asked, cases = [], []

    class Load:
        ready = trial.TrialReady(1.0, (11,), True)

        def __init__(self, spec, engine, **_):
            self.spec, self.engine = spec, "Llama" if engine == hooked.__name__ else "own"

        def ask(self, request):
            spec, drafts = self.spec, bool(self.spec.draft) and not request.alone
            if not request.warm_up:
                asked.append((self.engine, drafts, spec.sampling.temperature, spec.options.strict))
            wrong = self.engine == "Llama" and drafts
            return result(5.0, drafters=("draft",) if drafts else (), ids=(*range(19), 99) if wrong else None)

        def close(self):
            pass

    monkeypatch.setattr(versus.divergence, "explain", lambda spec, verbose: cases.append(spec.cases) or ())
    bench = versus.Bench(bench.experiment, opened=Load)
    bench.run(lambda *_: None)
    each = [
        ("own", False, 0.0, False),
        ("own", False, 0.0, False),
        ("own", True, 0.0, False),
        ("Llama", False, 0.0, False),
        ("Llama", True, 0.0, False),
    ]
    assert sorted(asked[:5]) == sorted(each)
    assert asked[-4:] == [
        ("own", True, 0.0, True),
        ("own", False, 0.0, True),
        ("Llama", True, 0.0, False),
        ("Llama", False, 0.0, False),
    ]
    assert {mode: len(results) for mode, results in bench.results.items()} == dict.fromkeys(RUNS, 3)
    assert (bench.own.identical, bench.hook.identical) == (True, False)
    assert [len(case) for case in cases] == [0, 1]
    assert cases[1][0].position == 19

    greedy = bench.experiment.spec  # above temperature 0 Llama's random numbers are not ours: no divergence of it
    cases.clear()
    spec = replace(greedy, sampling=Sampling(temperature=0.8))
    bench = versus.Bench(replace(bench.experiment, spec=spec), opened=Load)
    bench.run(lambda *_: None)
    assert len(cases) == 1
    assert bench.hook.identical is False


# ---- the command ----------------------------------------------------------------------------------------------------

SHORT = ("bench", "demo", "--engine", "hook", "-p", "import os\nimport sys\n\n\ndef main(", "-n", "24", "-r", "1")


def test_the_command_with_json_and_files(cli, tmp_path):
    done = cli(*SHORT, "--json", "--export-markdown", tmp_path / "b.md", "--html", tmp_path / "b.html")
    assert done.code == 0, done.stderr
    document = done.document()
    assert list(document["runs"]) == RUNS
    hook, alone = document["runs"]["llama_hook"], document["runs"]["llama_target_only"]
    assert (hook["tokens"], alone["tokens"]) == (24, 24)
    assert hook["rounds"] <= 24
    assert hook["accepted"] <= hook["drafted"]
    assert hook["tokens_per_s"]["median"] > 0
    assert document["hook"]["identical_output"] is True
    assert "greedy" in document["hook"]["identity_check"]["note"]
    assert isinstance(document["hook"]["notes"], list)
    assert document["hook"]["speedup"]["samples"]
    assert "| Llama + hook |" in (tmp_path / "b.md").read_text()
    assert "Llama + hook" in (tmp_path / "b.html").read_text()


def test_the_command_shows_one_table(cli):
    done = cli(*SHORT, "--draft-policy", "fixed", "--draft-max", "3", "--drafter", "draft")
    assert done.code == 0, done.stderr
    for shown in ("speculative", "Llama alone", "Llama + hook", "Llama with the hook: ", "Hook check: the same text"):
        assert shown in done.stdout


def test_ctrl_c_shows_what_was_measured(cli):
    child = cli.terminal(*SHORT[:-1], "1000000")
    child.expect(r" ([5-9]|\d\d+)/4000000")
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "target-only" in left
    assert "error: interrupted" not in left
    assert "interrupted; the results so far are shown" in left
    assert "Traceback" not in left


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--accept", "residual"), "--accept needs"),
        (("--strict",), "--strict"),
        (("--drafter", "lookup"), "--drafter lookup has none"),
        (("--lookup-corpus", "corpus.txt"), "corpus"),
        (("--n-cpu-moe", "2"), "--n-cpu-moe"),
        (("--sweep", "--draft-max", "1,2"), "--sweep"),
        (("--engine", "other"), "other"),
    ],
)
def test_the_command_refuses_what_the_hook_cannot_do(cli, more, told):
    (cli.folder / "corpus.txt").write_text("import os\n")
    done = cli(*SHORT, "--json", *more)
    assert done.code == 2
    assert done.document()["schema"] == "ggufspec/error@1"
    assert told in done.document()["error"]
    assert "next: " in done.stderr
