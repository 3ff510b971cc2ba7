"""``ggufspec bench`` in this process: what is measured without a pair, and what is seen of the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from test_reports import ALONE, PAIR, document

from ggufspec.bench import versus
from ggufspec.bench.prompts import PROMPTS
from ggufspec.cli import bench, inputs, ui
from ggufspec.cli.app import main
from ggufspec.models.profile import BenchDefaults, Pair
from ggufspec.schema.base import Spread
from ggufspec.schema.bench import AnswerTime, BenchDocument, BenchVerdict, LengthSpeedup
from ggufspec.settings.table import OutputFlags, Settings
from tests.support.processes import Cli

Run = Callable[..., tuple[str | None, versus.BenchExperiment]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, target: Path, draft: Path) -> Run:
    """The name of the pair that a command line chose and what it would have measured; nothing is."""
    seen: list[tuple[str | None, versus.BenchExperiment]] = []
    names: list[str | None] = []

    def choose(given: Settings, **_: object) -> Pair:
        name = given.pair
        names.append(name)
        small = (
            BenchDefaults(prompts=["edit", "prose"], max_tokens=48, budget_s=45)
            if name == bench.BENCH_PAIR
            else BenchDefaults()
        )
        return Pair(name or "files", target, draft, bench=small)

    def measure(self: versus.Bench, progress: object, note: object) -> None:
        seen.append((names[-1], self.experiment))
        raise KeyboardInterrupt

    monkeypatch.setattr(inputs, "pair", choose)
    monkeypatch.setattr(versus.Bench, "run", measure)

    def command(*arguments: str) -> tuple[str | None, versus.BenchExperiment]:
        assert main(["bench", *arguments]) == 130
        return seen[-1]

    return command


def test_without_a_pair_it_measures_the_expanded_one_and_says_how_long(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    name, experiment = run()
    assert (name, experiment.repetitions, experiment.limit_s, experiment.cut) == ("demo-360m", None, 45, True)
    assert experiment.spec.prompts == tuple(prompt.text for prompt in PROMPTS[2:5])
    assert (experiment.spec.max_tokens, experiment.own_lengths) == (48, False)
    first = capfd.readouterr().err.splitlines()[0]
    assert first.startswith("measuring demo-360m: target-only, draft-only, speculative; at most 45 s after loading")


def test_what_the_command_line_says_goes_over_the_profile(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    _, experiment = run("-n", "7", "-p", "a text", "-r", "3")
    assert (experiment.spec.prompts, experiment.spec.max_tokens, experiment.repetitions) == (("a text",), 7, 3)
    assert (experiment.limit_s, experiment.cut) == (None, False)  # exactly so many answers, of exactly so many tokens
    assert not experiment.own_lengths
    assert "at most" not in capfd.readouterr().err
    _, experiment = run("--budget", "1m", "-r", "3")
    assert (experiment.limit_s, experiment.repetitions, experiment.cut) == (60, 3, True)


def test_a_pair_that_is_named_is_measured_as_ever(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    name, experiment = run("demo")
    assert (experiment.repetitions, experiment.limit_s) == (None, 180)
    assert (name, len(experiment.spec.prompts), experiment.spec.max_tokens) == ("demo", len(PROMPTS), 256)
    assert not experiment.own_lengths
    _, own = run("demo", "-p", "a text")
    assert (own.spec.max_tokens, own.own_lengths) == (256, True)
    assert run("-m", "t.gguf", "-md", "d.gguf")[0] is None
    capfd.readouterr()
    run("demo", "-q")
    assert "measuring" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "0"), "not a duration"),
        (("--budget", "soon"), "not a duration"),
        (("--budget", "1m", "--sweep", "--draft-max", "1,2"), "--budget limits a bench without --sweep"),
    ],
)
def test_a_budget_is_a_time(arguments: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "demo", *arguments]) == 2
    assert said in capfd.readouterr().err


def test_a_budget_shorter_than_one_answer(cli: Cli) -> None:
    done = cli("bench", "demo", "-p", "def main(", "-n", "1000", "--budget", "0.3s", "--json")
    assert done.code == 2
    assert "is too short for one answer" in done.document()["error"]
    assert "--budget" in done.document()["hint"]


def test_a_profile_knows_the_kinds_of_prompts_that_there_are() -> None:
    for prompt in PROMPTS:
        assert BenchDefaults.model_validate({"prompts": [prompt.kind]}).prompts == [prompt.kind]
    with pytest.raises(ValidationError):
        BenchDefaults.model_validate({"prompts": ["poetry"]})


SETTINGS = {
    "prompts": 3,
    "max_tokens": 48,
    "drafter": "both",
    "draft_policy": "adaptive",
    "draft_max": 15,
    "temperature": 0,
    "accept": "exact",
    "lossy": False,
    "strict": False,
    "threads": 2,
    "repetitions": 5,
}


AS_FAST, LENGTHS = "1.31× as fast as without a draft for answers of 256 tokens", (50, 128, 256, 500)


def result() -> BenchDocument:
    alone, pair = (replace(one, gpu_layers=0) for one in (ALONE, PAIR))
    why = "A round yields 2.03 tokens and costs as much as 1.54 target-only tokens (1.42 verifying, 0.12 drafting)."
    model = {"description": "llama 3B F16", "size_bytes": 724_000_000}
    return document(
        pair={"name": "x", "target": "a/t.gguf", "draft": "a/d.gguf", "note": "The pair, expanded to another shape."},
        plan={"target": model, "draft": model},
        settings=SETTINGS,
        runs={"target_only": alone, "draft_only": None, "speculative": replace(pair, gpu_layers_draft=0)},
        verdict=BenchVerdict(True, f"Worth it: {AS_FAST} (95% interval 1.11 to 1.51).", why),
        answer_tokens=256,
        measured_tokens=80,
        answer_times={"target_only": AnswerTime(1.5, 0.131), "speculative": AnswerTime(2.5, 0.098)},
        by_length=tuple(LengthSpeedup(n, 0.131 * n, 0.1 * n, Spread(1.31, (1.11, 1.51), (1.2, 1.4))) for n in LENGTHS),
        next="ggufspec chat -m a/t.gguf -md a/d.gguf",
    )


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_the_result_reads_at_a_glance(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer comes first, and what to type next; nothing is cut, and no number is said twice."""
    monkeypatch.setenv("COLUMNS", str(columns))
    bench._show(result())
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert len(shown.splitlines()) <= 23
    text = re.sub(r"\s+", " ", shown)
    verdict = result().verdict
    assert text.startswith(f"{verdict.text} next: {result().next} Run Tokens/s 256 tokens Speedup Accepted ")
    assert "The pair, expanded to another shape. target t.gguf (724 MB) draft d.gguf (724 MB) draft model" in text
    below = (
        "Tokens/s covers generation only; 256 tokens and Speedup cover whole answers of that length, prompt included"
    )
    assert f" {below} (extrapolated). The pair, expanded" in text
    assert f" {verdict.why} Speedup by length: 50 tokens 1.31× (1.11 to 1.51), 500 tokens 1.31× (1.11 to 1.51)" in text
    assert "; extrapolated beyond 80. The same text with and without a draft" in text
    assert re.search(r"target-only +2.00 ± 0.10 +33.5 s", shown)
    assert "An answer takes: " not in shown
    assert "GPU layers" not in shown
    monkeypatch.setattr(ui, "_flags", OutputFlags(verbose=True))
    bench._show(result())
    everything = capsys.readouterr().out
    assert everything.splitlines()[:11] == shown.splitlines()[:11]
    assert "speculative 2.50 s plus 98 ms per token" in re.sub(r"\s+", " ", everything)
    assert ("Prompts: " in shown, "Prompts: " in everything) == (False, True)


def test_a_bench_is_kept_and_its_next_command_can_be_typed(cli: Cli, tmp_path: Path) -> None:
    """Under its settings: the same command replaces it, and report finds it."""
    command = ("bench", "demo", "-p", "def main(", "-n", "24", "-r", "1", "-t", "1", "--results", tmp_path)
    first, again, other = cli(*command), cli(*command, "--json"), cli(*command[:-2], "-s", "5", *command[-2:])
    assert [done.code for done in (first, again, other)] == [0, 0, 0]
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 2
    assert all(re.fullmatch(r"bench-demo-[0-9a-f]{8}\.json", path.name) for path in kept)
    assert "kept in " in first.stderr
    assert again.document() in [json.loads(path.read_text()) for path in kept]
    report = cli("report", "--results", tmp_path)
    assert report.stdout.count("Bench of demo") == 2
    assert not [line for line in first.stdout.splitlines() if line.startswith("next: ")]  # -r: a budget is no help
    unclear = cli("bench", "demo", "-p", "def main(", "-n", "16", "--budget", "20s", "-t", "1")
    (following,) = [line for line in unclear.stdout.splitlines() if line.startswith("next: ggufspec ")]
    assert following.split()[2:4] in (["run", "demo"], ["tune", "demo"], ["bench", "demo"])
    assert following.endswith("-t 1") or " -t 1 " in following


def test_a_bench_teaches_the_speed_of_its_target(cli: Cli) -> None:
    """If it does not, a note says that other programs used the machine."""
    said = "demo-target-F16.gguf as measured here on"
    assert said not in cli("plan", "demo", "--json").document()["speed"]
    done = cli("bench", "demo", "-p", "def main(", "-n", "24", "-r", "2", "--json")
    document = done.document()
    busy = any("other programs used" in note for note in document["notes"])
    plan = cli("plan", "demo", "-c", "64", "--json").document()  # as deep in the text as the answers were
    assert said in plan["speed"] or busy
    if not busy:
        measured = document["runs"]["target_only"]["tokens_per_s"]["median"]
        assert plan["predicted"]["target_only_tokens_per_s"] == pytest.approx(measured, rel=0.2)
