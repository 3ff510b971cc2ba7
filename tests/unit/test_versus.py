"""What measured trials say about a pair; the trials are made by hand."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ggufspec.bench import answers, summary, trial, versus
from ggufspec.cli.parameters import parse_seconds
from ggufspec.decoding.alternate import AnswerSegment
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ChildError, UsageError
from ggufspec.llamacpp import library
from ggufspec.llamacpp.options import Placement
from ggufspec.models.profile import Pair
from ggufspec.reports import bench as bench_report
from ggufspec.reports.doctor import features
from ggufspec.schema.base import MeasuredRun, SpeculativeRun, Spread, to_json
from ggufspec.schema.bench import BenchVerdict
from ggufspec.schema.doctor import LlamaBuild


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
    return trial.TrialResult(
        answers=tuple(trial.TrialAnswer("", tuple(range(one.tokens)), one) for one in answers),
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
    return MeasuredRun(
        gpu_layers, 16, 20, Spread(tokens_per_s, (tokens_per_s, tokens_per_s), (tokens_per_s,)), 20, 100, 0, 1
    )


def speculative(tokens_per_s=4.0, gpu_layers=0, gpu_layers_draft=0, lossy=False):
    base = run(tokens_per_s, gpu_layers)
    return SpeculativeRun(
        **{name: getattr(base, name) for name in MeasuredRun.__slots__},
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
    assert summary.trial_speed(result(statistics(10, 1.0), statistics(10, 3.0))) == 5.0


def test_a_target_only_run_in_one_row():
    found = summary.summarise([alone(10, load_s=3, rss=50, vram=7), alone(8, load_s=1), alone(5, load_s=2, vram=3)])
    assert type(found) is MeasuredRun
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


def judge(*measured, **more):
    return versus.bench_verdict(*measured, tokens=256, **more)


# of a target-only token that takes 0.5 s
WHY = "A round yields 2.50 tokens and costs as much as 1.25 target-only tokens (1.00 verifying, 0.25 drafting)."
WHY_NOT = "A round yields 2.50 tokens and costs as much as 3.12 target-only tokens (1.00 verifying, 0.25 drafting)."
NEITHER = "A round yields 2.50 tokens and costs as much as 2.27 target-only tokens (1.00 verifying, 0.25 drafting)."
FOR, LARGER = "for answers of 256 tokens", "A larger --budget may settle it."
AS_FAST = f"as fast as without a draft {FOR}"


@pytest.mark.parametrize(
    ("speedup", "tokens_per_s", "worth_it", "text", "why"),
    [
        ((1.8, 1.7, 1.9), 4.0, True, f"Worth it: 1.80× {AS_FAST} (95% interval 1.70 to 1.90).", WHY),
        ((0.8, 0.7, 0.9), 1.6, False, f"Not worth it: 0.80× {AS_FAST} (95% interval 0.70 to 0.90).", WHY_NOT),
        (
            (1.0, 0.99, 1.01),
            4.0,
            False,
            f"Not worth it: no faster than without a draft {FOR}, 1.00× (95% interval 0.99 to 1.01).",
            WHY,
        ),
        (
            (1.1, 0.9, 1.3),
            2.2,
            False,
            f"Inconclusive: 1.10× with the draft {FOR}, but the 95% interval (0.90 to 1.30) includes 1. {LARGER}",
            NEITHER,
        ),
    ],
)
def test_the_verdict(speedup, tokens_per_s, worth_it, text, why):
    """What a round costs is of decoding; the speedup is of answers with their prompts."""
    median, low, high = speedup
    verdict = judge(Spread(median, (low, high), (low, median, high)), run(), speculative(tokens_per_s))
    assert verdict == BenchVerdict(worth_it, text, why)


@pytest.mark.parametrize(("plain", "said"), [(8, "100%"), (5, "62%"), (4, "")])
def test_where_it_was_not_worth_it_since_no_draft_paid_it_says_so(plain, said):
    drafted = replace(speculative(), plain_rounds=plain)
    more = f" In {said} of the rounds no draft would have paid, and none was made." if said else ""
    assert judge(Spread(2.0, (0.9, 2.1), (0.9, 2.0, 2.1)), run(), drafted).why == WHY + more
    assert judge(SPEEDUP, run(), drafted).why == WHY


@pytest.mark.parametrize(("layers", "what"), [(4, "the draft was not used"), (0, "nothing was drafted")])
@pytest.mark.parametrize(("low", "high"), [(0.97, 0.99), (0.99, 1.01), (0.9, 1.3), (1.01, 1.06)])
def test_a_draft_that_was_not_used_is_no_gain_and_no_question_of_more_time(layers, what, low, high):
    """Whatever the interval is: without a draft both runs do the same."""
    idle = replace(speculative(2.0), draft_layers=layers, drafted=0, accepted=0, acceptance_rate=0.0)
    middle = (low + high) / 2
    verdict = judge(Spread(middle, (low, high), (low, middle, high)), run(), replace(idle, tokens_per_round=1.0))
    interval = f"95% interval {low:.2f} to {high:.2f}"
    assert not verdict.worth_it
    assert verdict.text == f"Not worth it: {what}; {middle:.2f}× {AS_FAST} ({interval})."
    few = judge(Spread(middle, (low, high), (low, high)), run(), idle)
    assert few.text.startswith("No verdict from so few trials")
    assert few.text.endswith(f" {what.capitalize()}.")


@pytest.mark.parametrize(
    ("by_lookup", "layers", "said"), [(16, 4, True), (15, 4, False), (0, 4, False), (16, 0, False)]
)
def test_a_verdict_on_a_draft_for_which_only_the_lookup_drafted_says_so(by_lookup, layers, said):
    pair = replace(speculative(), lookup_drafted=by_lookup, draft_layers=layers)
    text = judge(SPEEDUP, run(), pair).text
    assert text.endswith("The draft itself was not used, only the n-gram lookup.") == said


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.2), (0.9, 1.0)])
def test_an_interval_that_touches_one_shows_nothing(low, high):
    verdict = judge(Spread((low + high) / 2, (low, high), (low, (low + high) / 2, high)), run(), speculative())
    assert (verdict.worth_it, verdict.text.split(":")[0]) == (False, "Inconclusive")


def test_a_gain_that_rounds_of_one_token_cannot_give_is_not_worth_it():
    """Measured beside programs that came and went: 1.04 times, 1.01 to 1.06, by rounds that drafted nothing."""
    drafted = replace(speculative(2.08), tokens_per_round=1.0)
    verdict = judge(Spread(1.04, (1.01, 1.06), (1.01, 1.04, 1.06)), run(), drafted)
    assert not verdict.worth_it
    assert verdict.text.startswith("Inconclusive: 1.04× as fast as without a draft")
    assert verdict.text.endswith("but a round yields only 1.00 tokens.")


@pytest.mark.parametrize("samples", [(0.5,), (2.0,), (2.0, 2.1)])
def test_one_or_two_trials_give_no_verdict(samples):
    verdict = judge(Spread(samples[0], (samples[0], samples[-1]), samples), run(), speculative())
    assert not verdict.worth_it
    assert verdict.text.startswith("No verdict from so few trials")


SPEEDUP = Spread(2.0, (1.9, 2.1), (1.9, 2.0, 2.1))


@pytest.mark.parametrize(
    "measured",
    [(None, run(), speculative()), (SPEEDUP, None, speculative()), (SPEEDUP, run(), None), (None, None, None)],
)
def test_no_verdict_when_interrupted(measured):
    verdict = judge(*measured)
    assert not verdict.worth_it
    assert verdict.text.startswith("No verdict: the measurement was interrupted")


def test_a_rival_at_another_placement_is_named():
    same = judge(SPEEDUP, run(gpu_layers=9), speculative(4.0, 9, 5))
    assert "placement" not in same.why
    better = judge(SPEEDUP, run(gpu_layers=14), speculative(4.0, 9, 5))
    assert "its own best placement, 14/17 layers against 9/17" in better.why
    assert better.worth_it


def test_a_pair_that_nobody_drafts_for_was_not_interrupted():
    """Its memory forgets at a price that no draft earns: the note says so, and it runs as target-only does."""
    found = summary.summarise([result(statistics(20, 5.0), draft=0, drafters=())])
    assert type(found) is MeasuredRun
    verdict = judge(SPEEDUP, run(), found)
    assert (verdict.worth_it, verdict.text.split(":")[0]) == (False, "Not worth it")


def test_a_verdict_on_a_lossy_rule_says_so():
    lossless, lossy = (judge(SPEEDUP, run(), speculative(lossy=lossy)) for lossy in (False, True))
    assert lossy.text == f"{lossless.text} The rule is lossy: the text is not the target's own."
    assert lossy.worth_it


def gain(tokens, target=0.1, pair=0.05):
    """How many times as fast an answer is whose prompt takes 0.5 s, by the seconds of a token."""
    return (0.5 + target * (tokens - 1)) / (0.5 + pair * (tokens - 1))


OPTIONS = DecoderOptions(Placement(9), Placement(5), threads=2, draft_max=2)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(versus, "machine_and_build", lambda system_info: {"build": system_info, "cpu": "a cpu"})
    spec = trial.TrialJob(Path("t.gguf"), Path("d.gguf"), OPTIONS, Sampling(seed=7), ("one", "two"), 20)
    return versus.Bench(versus.BenchExperiment(Pair("mine", spec.target, spec.draft), spec, 3))


def test_the_document(bench):
    bench.results["target_only"] = [alone(10), alone(8), alone(20)]
    bench.results["draft_only"] = [alone(1)] * 3
    bench.results["speculative"] = [pair(5), pair(4), pair(5)]
    bench.own = versus.SameText(True, "a note")
    document = bench.document()
    assert document.machine["build"] == "CPU : AVX2 = 1"
    expected = gain(20, 0.5, 0.25), gain(20, 0.4, 0.2), gain(20, 1.0, 0.25)
    assert document.speedup.samples == pytest.approx(expected)
    assert document.speedup.median == pytest.approx(expected[0])
    assert document.verdict.text.startswith("Worth it: 1.90× as fast as without a draft for answers of 20 tokens")
    assert (document.answer_tokens, document.measured_tokens) == (20, 21)
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
    assert (document.interrupted, document.runs["draft_only"]) == (True, None)
    assert document.speedup.samples == pytest.approx([gain(20, 0.5, 0.25)])


def test_a_document_of_nothing(bench):
    document = bench.document(interrupted=True)
    assert (document.runs, document.speedup, document.plan) == (dict.fromkeys(versus.MODES), None, {})
    assert (document.identical_output, document.verdict.worth_it) == (None, False)


class Machine:
    """Loads and answers by arithmetic, on a clock of its own: a token of the target's takes 0.1 s, of a pair's less.

    ``token_s`` of a way is a number, or a number by prompt; ``crashing`` are ways whose child dies. With ``alternates``
    answers of a load alternate in segments of 16 tokens, and ``busy`` says by the clock how many CPUs other programs
    use: a token takes 1 + 4 × as long then. The first sixteen tokens of a pair take ``lost_s`` longer.
    """

    def __init__(
        self,
        *,
        token_s=None,
        prompt_tokens=(10,) * 8,
        alone=True,
        crashing=(),
        dies_at_load=(),
        texts=None,
        alternates=False,
        busy=lambda now: 0.0,
        lost_s=0.0,
    ):
        self.lost_s = lost_s
        self.now, self.loads, self.asked, self.expected, self.closed = 0.0, [], [], [], 0
        self.alternates, self.busy = alternates, busy
        self.token_s = {"target": 0.1, "draft": 0.01, "pair": 0.05} | (token_s or {})
        self.prompt_tokens, self.alone, self.crashing, self.dies_at_load = prompt_tokens, alone, crashing, dies_at_load
        self.texts = texts or {}

    def clock(self):
        return self.now

    def opened(self, spec, _engine, **_):
        kind = "pair" if spec.options.drafters else "draft" if spec.target == Path("d.gguf") else "target"
        self.loads.append((kind, spec))
        self.now += 1000.0  # loading is nobody's budget
        if kind in self.dies_at_load:
            raise ChildError("the driver most likely crashed", "update it", "SIGSEGV")
        return Loaded(self, spec, kind)


class Loaded:
    def __init__(self, machine, spec, kind):
        self.machine, self.spec, self.kind = machine, spec, kind
        prompt_tokens = machine.prompt_tokens[: len(spec.prompts)]
        self.ready = trial.TrialReady(1.0, prompt_tokens, machine.alone, machine.alternates)

    def ask(self, request):
        machine, way = self.machine, request.alone or self.kind
        prompts = range(len(self.spec.prompts)) if request.prompts is None else request.prompts
        most = request.most or request.max_tokens
        machine.asked.append((way, "warm-up" if request.warm_up else tuple(prompts), most))
        machine.expected.append(request.max_tokens)
        ways = {"pair", "target"} if request.alternate else {way}
        if ways & set(machine.crashing) and not request.warm_up:
            raise ChildError("the driver most likely crashed", "update it", "SIGSEGV")
        if request.alternate:
            return self.alternate(request)
        answers = []
        for prompt in prompts[:1] if request.warm_up else prompts:
            tokens = 4 if request.warm_up else most or self.spec.max_tokens
            each = machine.token_s[way]
            seconds = (tokens - 1) * (each if isinstance(each, float) else each[prompt])
            took = statistics(tokens - 1, seconds, max(tokens // 2, 1), (tokens // 2,), (tokens // 2,), 0.0, seconds)
            machine.now += seconds + took.prompt_s
            ids = machine.texts.get(way, tuple(range(tokens)))[:tokens]
            answers.append(trial.TrialAnswer("", ids, took))
        drafts = way == "pair"
        return replace(
            result(draft=0 if drafts and self.spec.draft else None, drafters=("draft",) if drafts else ()),
            answers=tuple(answers),
        )

    def alternate(self, request):
        machine, (prompt,) = self.machine, request.prompts
        parts = {"pair": [], "target": []}
        order = sorted(parts, key=lambda way: way != request.alternate)
        most = request.most or request.max_tokens
        for first in range(1, most, 16):
            for way in order:
                count, each = min(16, most - first), machine.token_s[way]
                others = machine.busy(machine.now)
                seconds = count * (each if isinstance(each, float) else each[prompt]) * (1 + 4 * others)
                seconds += machine.lost_s * (way == "pair" and first == 1)
                machine.now += seconds
                parts[way].append(AnswerSegment(statistics(count, seconds, max(count // 2, 1), (1,), (1,)), others))
            order.reverse()
        found = {}
        for way, segments in parts.items():
            machine.now += 0.5
            whole = statistics(0, 0.0, 1, (0,), (0,)).only([one.statistics for one in segments])
            start = segments[0].statistics
            found[way] = (trial.TrialAnswer("", tuple(range(whole.tokens)), whole, (), tuple(segments), start),)
        return replace(result(draft=0), answers=found["pair"], target_only=found["target"])

    def stop(self):
        raise AssertionError("nothing here takes as long as the budget")

    def close(self):
        self.machine.closed += 1


def prompted(count, *, kinds=(), max_tokens=128, **options):
    return trial.TrialJob(
        Path("t.gguf"),
        Path("d.gguf"),
        replace(OPTIONS, target=Placement(), draft=Placement(), **options),
        Sampling(seed=7),
        tuple(f"prompt {i}" for i in range(count)),
        max_tokens,
        kinds=kinds,
    )


@pytest.fixture
def measured(monkeypatch):
    """A bench of so many prompts on a machine of arithmetic; what it said, too."""
    monkeypatch.setattr(versus, "machine_and_build", lambda system_info: {"cpu": "a cpu"})
    monkeypatch.setattr(versus.divergence, "explain", lambda spec, verbose: ())
    monkeypatch.setattr(answers, "_fit_side_by_side", lambda specs: False)

    def measure(machine, spec, repetitions=None, **more):
        found = versus.Bench(
            versus.BenchExperiment(Pair("mine", spec.target, spec.draft), spec, repetitions, **more),
            opened=machine.opened,
            clock=machine.clock,
        )
        found.said = []
        found.run(lambda *_: None, found.said.append)
        return found

    return measure


def test_one_load_serves_the_ways_of_a_placement(measured):
    """Each prompt is answered in every way before the next; draft-only a few times, shortly."""
    machine = Machine()
    bench = measured(machine, prompted(4, max_tokens=64), 2)
    assert [kind for kind, _ in machine.loads] == ["pair", "pair"]  # the second one for the check in strict mode
    assert machine.loads[1][1].options.strict
    first = machine.asked[3:]  # after the warm-ups
    assert [(way, prompt, tokens) for way, prompt, tokens in first[:6]] == [
        ("target", (0,), 64),
        ("pair", (0,), 64),
        ("draft", (0,), 32),
        ("pair", (1,), 64),
        ("target", (1,), 64),
        ("draft", (1,), 32),
    ]
    assert [len(one.answers) for one in bench.results["draft_only"]] == [3, 3]
    assert [len(one.answers) for one in bench.results["speculative"]] == [4, 4]
    document = bench.document()
    assert document.speedup.median == pytest.approx(gain(64))
    assert document.runs["target_only"].tokens_per_s.median == pytest.approx(10.0)
    assert document.runs["draft_only"].tokens_per_s.median == pytest.approx(100.0)
    assert bench.said == ["4 prompts × 64 tokens, 2 times: about 1 min 30 s"]
    assert machine.closed == 2


def test_the_first_pass_shares_the_budget(measured):
    """The longer a pass takes, the shorter its answers are; faster answers leave the rest more time.

    Rather than very short answers it asks fewer prompts, four at least.
    """
    machine = Machine(token_s={"target": 0.3, "pair": 0.15})
    bench = measured(machine, prompted(8), budget_s=180.0)
    lengths = bench.answers.lengths
    assert len(lengths) == 4
    assert 64 <= min(lengths) < max(lengths) < 128
    assert bench.answers.budget.spent_s <= 180
    assert bench.answers.budget.spent_s > 150
    assert [len(one.answers) for one in bench.results["target_only"]] == [4]
    settings = bench.document().settings
    assert (settings["prompts"], settings["max_tokens"], settings["repetitions"]) == (4, max(lengths), 1)
    assert bench.said == [f"4 prompts × about {lengths[0]} tokens: about 3 min"]


def test_a_slow_pair_leaves_prompts_out_rather_than_a_few_tokens_of_each(measured):
    kinds = ("code", "code", "prose", "prose", "list")
    machine = Machine(token_s={"target": 1.0, "pair": 0.9}, prompt_tokens=(10,) * 5)
    bench = measured(machine, prompted(5, kinds=kinds), budget_s=180.0)
    assert 0 < bench.answers.prompts < 5
    assert min(bench.answers.lengths) >= 32
    assert bench.experiment.spec.kinds == ("code", "prose", "list", "code", "prose")  # those that are asked first
    assert bench.experiment.spec.prompts[:3] == ("prompt 0", "prompt 2", "prompt 4")
    assert bench.answers.budget.spent_s <= 180


@pytest.mark.parametrize(("cut", "budget_s", "count"), [(True, 4.0, 8), (False, 20.0, 8), (True, 4.0, 2)])
def test_a_budget_shorter_than_one_answer_says_what_is_enough_for_a_verdict(measured, cut, budget_s, count):
    with pytest.raises(UsageError, match="too short for one answer") as caught:
        measured(Machine(), prompted(count), budget_s=budget_s, cut=cut)
    assert ("or fewer tokens with -n" in caught.value.hint) == (count < 3 or not cut)
    enough_s = parse_seconds(caught.value.hint.split()[1].rstrip(","))
    found = measured(Machine(), prompted(count), budget_s=enough_s, cut=cut)
    assert found.document().verdict.text.startswith("Worth it")
    assert len(found.said) == 1  # no word of a shortage


@pytest.mark.parametrize(
    ("count", "budget_s", "needs"), [(8, 15.0, "answers to 3 prompts"), (1, 40.0, "3 answers to each prompt")]
)
def test_a_budget_too_short_for_a_verdict_is_told_before_the_answers(measured, count, budget_s, needs):
    """With the budget that allows one, which the command that is suggested afterwards has, too."""
    machine = Machine()
    told = []

    class Watched(list):
        def append(self, text):
            told.append((text, [what for _, what, _ in machine.asked if what != "warm-up"]))
            super().append(text)

    spec = prompted(count)
    bench = versus.Bench(
        versus.BenchExperiment(Pair("mine", spec.target, spec.draft), spec, budget_s=budget_s),
        opened=machine.opened,
        clock=machine.clock,
    )
    bench.run(lambda *_: None, Watched().append)
    (shortage, answered) = told[-1]
    assert shortage.startswith(f"{budget_s:.0f} s is too short for a verdict, which needs {needs} with and without the")
    assert answered == []
    document = bench.document()
    assert document.verdict.text.startswith("No verdict from so few trials")
    found = re.search(r"--budget (\w+)", shortage)
    assert found
    enough_s = parse_seconds(found[1])
    assert document.settings["enough_s"] <= enough_s
    better = measured(Machine(), spec, budget_s=enough_s)
    assert len(better.said) == 1
    assert better.document().verdict.text.startswith("Worth it")


def test_a_budget_that_ends_in_the_warm_up_names_a_longer_one(measured):
    class Endless(Machine):
        def opened(self, *arguments, **more):
            loaded = super().opened(*arguments, **more)
            loaded.ask = lambda request: replace(result(), finished=False)
            return loaded

    with pytest.raises(UsageError, match="a budget of 1 min is too short for one answer") as caught:
        measured(Endless(), prompted(8), budget_s=60.0)
    assert caught.value.hint == "--budget 8m"


def test_it_stops_when_the_verdict_is_clear(measured):
    bench = measured(Machine(token_s={"target": 0.01, "pair": 0.005}), prompted(8, max_tokens=32), budget_s=180.0)
    assert len(bench.results["speculative"]) == 1
    assert bench.document().verdict.text.startswith(f"Worth it: {gain(32, 0.01, 0.005):.2f}×")
    assert bench.said == ["8 prompts × 32 tokens: 16 s to 3 min, until the verdict is clear"]


def test_it_stops_when_the_speeds_are_the_same(measured):
    bench = measured(Machine(token_s={"target": 0.01, "pair": 0.01}), prompted(8, max_tokens=32), budget_s=180.0)
    assert len(bench.results["speculative"]) == 1
    assert bench.document().speedup.ci95 == pytest.approx((1.0, 1.0))


def test_what_is_not_clear_is_measured_until_the_budget_ends(measured):
    """Here drafts help some prompts and harm others: more passes say so no better, up to the last that fits."""
    pair = [0.05, 0.15, 0.05, 0.15, 0.06, 0.14, 0.08, 0.12]
    machine = Machine(token_s={"target": 0.1, "pair": pair})
    bench = measured(machine, prompted(8, max_tokens=32), budget_s=180.0)
    assert len(bench.results["speculative"]) > 1
    assert 100 < bench.answers.budget.spent_s <= 180
    assert bench.document().verdict.text.startswith("Inconclusive: 1.00× with the draft")
    pairs = zip(bench.results["speculative"], bench.results["target_only"], strict=True)
    assert all(len(a.answers) == len(b.answers) for a, b in pairs)


def test_repetitions_are_exactly_so_many(measured):
    machine = Machine(token_s={"target": 0.01, "pair": 0.005})
    bench = measured(machine, prompted(8, max_tokens=32), 4)
    assert [len(results) for results in bench.results.values()] == [4, 4, 4]
    assert bench.document().settings["budget_s"] is None
    bench = measured(Machine(), prompted(8, max_tokens=32), 40, budget_s=60.0)
    assert 0 < len(bench.results["speculative"]) < 40
    assert bench.answers.budget.spent_s <= 60


def test_one_prompt_is_repeated_before_it_is_judged(measured):
    bench = measured(Machine(), prompted(1, max_tokens=16), budget_s=180.0)
    assert len(bench.results["speculative"]) == 6
    assert bench.document().speedup.samples == pytest.approx((gain(16),) * 6)


def test_what_is_before_the_prompts_is_read_at_nobody_s_expense(measured):
    machine = Machine(prompt_tokens=(1010,) * 3)
    deep = replace(prompted(3, max_tokens=16), depth=1000)
    bench = measured(machine, deep, 1, budget_s=60.0)
    warm_ups = 3 * (0.5 + 4 * 0.1)
    counted = replace(deep, depth=0, options=deep.options)
    machine = Machine()
    assert bench.answers.budget.spent_s < measured(machine, counted, 1, budget_s=60.0).answers.budget.spent_s < 60
    assert bench.answers.budget.spent_s > warm_ups


def test_another_placement_is_another_load_and_a_pass_goes_on_with_the_one_that_is_open(measured):
    machine = Machine()
    spec = prompted(3, max_tokens=16)
    bench = measured(machine, spec, 3, target_only=replace(spec.options, target=Placement(14), draft=Placement()))
    assert [kind for kind, _ in machine.loads] == ["pair", "target", "pair", "target", "pair"]  # and the check
    assert {mode: len(results) for mode, results in bench.results.items()} == dict.fromkeys(
        (*versus.MODES, versus.AT_PAIR), 3
    )
    assert machine.loads[1][1].options.target.gpu_layers == 14
    assert machine.closed == 5


def test_a_pair_that_keeps_states_for_drafts_is_no_load_for_target_only(measured):
    machine = Machine(alone=False)
    measured(machine, prompted(3, max_tokens=16), 1)
    assert [kind for kind, _ in machine.loads] == ["pair", "target", "pair", "target"]  # the last two for the check
    assert ("draft", (0,), 16) in machine.asked  # the draft's own context is no other
    assert "target" not in [way for way, what, _ in machine.asked[:2]]


def test_a_run_that_crashes_costs_itself(measured):
    """It is not tried again, and the others are measured, each in a load of its own."""
    machine = Machine(crashing=("pair",))
    bench = measured(machine, prompted(4, max_tokens=16), 2)
    document = bench.document()
    assert [len(bench.results[mode]) for mode in versus.MODES] == [2, 2, 0]
    assert document.failures["speculative"].error == "the driver most likely crashed"
    assert "not every run could be measured" in document.verdict.text
    assert document.identical_output is None
    assert [one for one in machine.asked if one[0] == "pair" and one[1] != "warm-up"] == [
        ("pair", (0,), 16),
        ("pair", (0, 1, 2), 0),  # the check of the text
    ]
    said = "speculative was not measured: the driver most likely crashed"
    assert bench_report.failures(document) == [said]


def test_a_pair_that_cannot_be_loaded_leaves_its_models_to_be_measured(measured):
    bench = measured(Machine(dies_at_load=("pair",)), prompted(4, max_tokens=16), 1)
    assert [len(bench.results[mode]) for mode in versus.MODES] == [1, 1, 0]
    assert set(bench.crashes) == {"speculative"}


def test_where_every_run_crashes_there_is_no_document(measured):
    with pytest.raises(ChildError, match="crashed"):
        measured(Machine(dies_at_load=("pair", "target", "draft")), prompted(2), 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (tuple(range(40)), "The same text with and without a draft in 1 measured answer"),
        ((*range(20), 99, *range(21, 40)), "With a draft 1 of 1 answer differs"),
    ],
)
def test_a_check_that_the_budget_leaves_no_time_for_is_left_out(measured, text, said):
    """What was measured is compared nevertheless, and one sentence has both."""
    machine = Machine(token_s={"target": 1.0, "pair": 1.0}, prompt_tokens=(200,), texts={"pair": text})
    bench = measured(machine, prompted(1, max_tokens=40), 1, budget_s=142.0, cut=False)
    document = bench.document()
    assert document.identical_output is None
    unchecked = "strict mode was not checked: the budget left no time for it."
    assert bench_report.same_text(document) == f"{said}; {unchecked}"


def test_answers_that_the_budget_left_no_time_to_explain_are_counted_too(measured):
    text = (*range(20), 99, *range(21, 128))
    slow = measured(Machine(token_s={"target": 0.5, "pair": 0.25}, texts={"pair": text}), prompted(8), budget_s=180.0)
    count = slow.answers.prompts
    assert f"{count} of {count} answers differ" in bench_report.same_text(slow.document())


def test_divergences_are_looked_into_as_far_as_the_budget_goes(measured):
    text = (*range(20), 99, *range(21, 128))
    slow = measured(Machine(token_s={"target": 0.5, "pair": 0.25}, texts={"pair": text}), prompted(8), budget_s=180.0)
    (note,) = [one for one in slow.document().notes if "the budget left no time" in one]
    assert note.startswith(f"{slow.answers.prompts} answers with a draft differ from target-only")
    fast = measured(Machine(texts={"pair": text}), prompted(8), 1)
    assert not [one for one in fast.document().notes if "budget" in one]


def test_answers_of_one_load_alternate_and_the_other_one_begins_each_time(measured):
    machine = Machine(alternates=True)
    bench = measured(machine, prompted(4, max_tokens=64), 2)
    main = [one for one in machine.asked[3:] if one[0] == "pair"]
    assert [prompt for _, prompt, _ in main] == [(0,), (1,), (2,), (3,)] * 2 + [(0, 1, 2)]  # and the check
    assert [[len(one.answers) for one in bench.results[mode]] for mode in versus.MODES] == [[4, 4], [3, 3], [4, 4]]
    assert all(not one.target_only and one.drafters for one in bench.results["speculative"])
    assert all(not one.target_only and not one.drafters for one in bench.results["target_only"])
    document = bench.document()
    assert document.speedup.median == pytest.approx(gain(64))
    assert document.runs["target_only"].tokens_per_s.median == pytest.approx(10.0)
    assert type(document.runs["target_only"]) is MeasuredRun
    assert document.disturbance.part == "quiet"
    assert document.notes == ()


@pytest.mark.parametrize("period", [24.0, 37.0, 60.0])
def test_a_load_that_comes_and_goes_changes_no_verdict(measured, period):
    """Half of the time other programs make every token five times as slow."""
    quiet = measured(Machine(alternates=True), prompted(8, max_tokens=64), 1).document()
    machine = Machine(alternates=True, busy=lambda now: float(now % period > period / 2))
    document = measured(machine, prompted(8, max_tokens=64), budget_s=180.0).document()
    assert document.speedup.median == pytest.approx(quiet.speedup.median, rel=0.02)
    low, high = document.speedup.ci95
    assert low < gain(64) < high or (low, high) == pytest.approx((gain(64), gain(64)))
    assert document.verdict.text.startswith("Worth it: 1.8")
    assert document.runs["target_only"].tokens_per_s.median == pytest.approx(10.0, rel=0.02)
    assert 0 < document.disturbance.counting < document.disturbance.pairs
    (note,) = document.notes
    assert "of the run; the verdict rests on the segments in which the machine was quiet" in note
    found = json.loads(to_json(document))
    assert 0.3 < found["disturbance"]["busy_share"] < 1.0


def test_a_bench_goes_on_while_too_little_was_quiet(measured):
    """Here the first minutes are busy."""
    machine = Machine(alternates=True, busy=lambda now: float(4 < now - 1000 < 60))
    bench = measured(machine, prompted(3, max_tokens=32), budget_s=180.0)
    assert len(bench.results["speculative"]) > 1
    assert bench.document().disturbance.part == "quiet"
    assert bench.document().speedup.median == pytest.approx(gain(32))


def test_a_bench_of_two_prompts_needs_no_pass_in_which_both_were_quiet(measured):
    """Other programs are busy during the second and the third of the four answers."""
    machine = Machine(alternates=True)
    machine.busy = lambda now: float(len([way for way, *_ in machine.asked if way == "pair"]) in (2, 3))
    document = measured(machine, prompted(2, max_tokens=32), 2).document()
    assert (document.disturbance.part, document.disturbance.counting) == ("quiet", document.disturbance.pairs // 2)
    assert document.speedup.median == pytest.approx(gain(32))
    assert "interrupted" not in document.verdict.text


@pytest.mark.parametrize("crashing", ["pair", "target"])
def test_where_answers_that_alternate_crash_the_way_that_does_is_found(measured, crashing):
    machine = Machine(alternates=True, crashing=(crashing,))
    bench = measured(machine, prompted(4, max_tokens=16), 2)
    wrong, right = ("speculative", "target_only") if crashing == "pair" else ("target_only", "speculative")
    assert set(bench.crashes) == {wrong}
    assert len(bench.results[right]) == 2
    assert [len(one.answers) for one in bench.results[right]] == [4, 4]


def test_a_short_measurement_says_what_a_long_answer_gains(measured):
    """What the first tokens cost is paid once, and the policy drafts as for the answer that the verdict is for."""
    slow = {"target": 0.2, "pair": 0.1}
    machine = Machine(alternates=True, lost_s=2.0, token_s=slow)
    bench = measured(machine, prompted(8, max_tokens=256), budget_s=180.0)
    both = zip(machine.asked, machine.expected, strict=True)
    shorter = [expected for (_, what, most), expected in both if what != "warm-up" and 40 <= most < 256]
    assert set(shorter) == {256}
    document = bench.document()
    assert 48 <= document.measured_tokens < 128

    def expected(tokens):
        return (0.5 + 0.2 * (tokens - 1)) / (2.5 + 0.1 * (tokens - 1))

    found = {one.tokens: one for one in document.by_length}
    assert set(found) == {50, 128, 256, 500}
    for tokens, one in found.items():
        assert one.speedup.median == pytest.approx(expected(tokens))
        assert one.target_only_s / one.speculative_s == pytest.approx(expected(tokens))
    assert document.speedup == found[256].speedup
    assert document.answer_tokens == 256
    assert document.answer_times["speculative"].once_s == pytest.approx(2.5)
    assert document.answer_times["speculative"].token_s == pytest.approx(0.1)
    assert document.answer_times["target_only"].once_s == pytest.approx(0.5)
    assert f"{expected(256):.2f}× as fast as without a draft for answers of 256 tokens" in document.verdict.text


def test_the_pair_s_first_answer_is_no_measured_one(measured):
    """In a few rounds its policy times the drafts and sees what they are worth; the others are warmed up shortly."""
    machine = Machine()
    measured(machine, prompted(2, max_tokens=64), 1)
    warm_ups = {way: most for way, what, most in machine.asked[:3] if what == "warm-up"}
    assert warm_ups == {"target": 0, "pair": 32, "draft": 0}


def ending(answer, tokens, stop_reason="end"):
    return replace(answer, statistics=replace(answer.statistics, stop_reason=stop_reason, tokens=tokens))


@pytest.mark.parametrize(
    ("own", "lengths", "expected"),
    [(True, (30, 40, 64), 40), (True, (30, 64, 64), 256), (False, (30, 40, 40), 256), (True, (), 256)],
)
def test_own_prompts_say_how_long_their_answers_are(bench, own, lengths, expected):
    """If most of them end by themselves; what was cut off at 64 tokens may have gone on."""
    spec = replace(bench.experiment.spec, prompts=("a", "b", "c"), max_tokens=256)
    bench = versus.Bench(replace(bench.experiment, spec=spec, own_lengths=own))
    answers = [ending(trial.TrialAnswer("", (), statistics(20, 2.0)), n, "end" if n < 64 else "") for n in lengths]
    for mode in ("target_only", "speculative"):
        bench.results[mode] = [replace(alone(), answers=tuple(answers))] if answers else []
    assert bench.answer_tokens == expected


def test_a_budget_counts_what_is_decoded_again(measured):
    """Texts that differ: the same tokens take longer than their statistics say."""

    class Slower(Machine):
        def opened(self, *arguments, **more):
            loaded = super().opened(*arguments, **more)
            alternate = loaded.alternate

            def slower(request):
                before = self.now
                found = alternate(request)
                self.now += 0.5 * (self.now - before)
                return found

            loaded.alternate = slower
            return loaded

    machine = Slower(alternates=True)
    bench = measured(machine, prompted(8), budget_s=120.0)
    assert 1.3 < bench.answers.budget.overhead < 1.6
    assert bench.answers.budget.spent_s <= 120
    assert [len(one.answers) for one in bench.results["target_only"]] == [8]
    assert bench.own.identical is not None


def test_a_gain_that_is_more_than_a_round_s_tokens_is_no_verdict():
    """A round of 1.12 tokens that costs as much as 0.78 would contradict itself."""
    impossible = Spread(1.43, (0.95, 2.13), (0.95, 1.43, 2.13))
    pair = replace(speculative(2.86), tokens_per_round=1.12)
    verdict = judge(impossible, run(), pair)
    assert verdict == BenchVerdict(
        False,
        "No verdict: the machine's speed changed during the measurement.",
        "The draft seemed to decode 1.43 times as fast, which is more than the 1.12 tokens that a round yields. "
        "Measure again while other programs are idle, or for longer.",
    )
    idle = judge(impossible, run(), replace(pair, drafted=0))
    assert idle.text.endswith("during the measurement. The draft was not used.")
    assert idle.why.startswith("The speculative run seemed")
    assert judge(impossible, run(), pair, streams=True).text.startswith("Inconclusive")
    assert judge(impossible, run(gpu_layers=14), pair).text.startswith("Inconclusive")  # placed otherwise
    nearly = replace(speculative(2.3), tokens_per_round=1.12)
    nearly = judge(Spread(1.15, (1.1, 1.2), (1.1, 1.15, 1.2)), run(), nearly)
    assert nearly.text.startswith("Worth it: 1.15×")
    assert nearly.why.startswith("A round yields 1.12 tokens and costs as much as 1.00 target-only tokens")


def test_tokens_per_round_are_weighed_as_the_speedup_is(bench):
    """By kinds: five prompts of one kind that give a token a round, one of another that gives ten."""
    spec = replace(bench.experiment.spec, prompts=tuple("abcdef"), kinds=("story",) * 5 + ("copy",))
    bench = versus.Bench(replace(bench.experiment, spec=spec))
    answers = [statistics(20, 2.0, 20, (1,), (0,))] * 5
    kinds = bench.experiment.spec.kinds
    answers.insert(kinds.index("copy"), statistics(20, 0.2, 2, (9,), (9,)))
    bench.results["target_only"] = [result(*[statistics(20, 2.0)] * 6)]
    bench.results["speculative"] = [result(*answers, draft=0)]
    document = bench.document()
    assert document.speedup.median == pytest.approx(2 * 2.4 / (2.4 + 0.69))
    assert document.runs["speculative"].tokens_per_round == pytest.approx(2 / 1.1)
    assert "costs as much as 1.00 target-only tokens" in document.verdict.why


def test_answers_of_one_token_have_no_speed(bench, measured, monkeypatch):
    with pytest.raises(trial.NoSpeedError, match="one-token answers"):
        measured(Machine(), prompted(2, max_tokens=1), 1)
    monkeypatch.setattr(trial, "run_trial", lambda spec, **_: result(statistics(0, 0.0)))
    found = trial.attempt(bench.experiment.spec)
    assert found.result is None
    assert found.failure.hint.startswith("-n ")


def test_what_each_mode_runs(bench):
    spec = bench.experiment.spec
    assert bench.experiment.variants["speculative"].spec == spec
    only = bench.experiment.variants["target_only"].spec
    assert (only.target, only.draft, only.options) == (spec.target, None, replace(OPTIONS, drafters=()))
    draft = bench.experiment.variants["draft_only"].spec
    assert (draft.target, draft.draft, draft.options.target.gpu_layers) == (spec.draft, None, 5)
    assert draft.options.drafter == "none"


def test_a_lookup_alone_has_no_draft_to_measure(bench):
    options = replace(OPTIONS, drafters=("lookup",), lookup_corpus=Path("corpus.txt"))
    spec = replace(bench.experiment.spec, draft=None, options=options)
    bench = versus.Bench(replace(bench.experiment, spec=spec))
    assert bench.experiment.modes == ("target_only", "speculative")
    assert bench.experiment.variants["speculative"].spec == spec
    only = bench.experiment.variants["target_only"].spec.options
    assert (only.drafter, only.lookup_corpus) == ("none", None)
    bench.results["target_only"] = [alone(10)] * 3
    bench.results["speculative"] = [result(statistics(20, 5.0, 8, (8,), (7,)), drafters=("lookup",))] * 3
    document = json.loads(to_json(bench.document()))
    assert document["settings"]["lookup_corpus"] == "corpus.txt"
    assert document["plan"]["draft"] is None
    assert document["speedup"]["median"] == pytest.approx(gain(20, 0.5, 0.25))


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


def test_a_divergence_is_judged_by_the_sampling_that_made_it(measured, monkeypatch):
    """An answer that was stopped early says the same as far as it goes."""
    seen = []
    monkeypatch.setattr(versus.divergence, "explain", lambda spec, verbose: seen.append(spec) or ())
    measured(Machine(texts={"target": (*range(9), 99, *range(10, 20))}), prompted(1, max_tokens=20), 1)
    measured(Machine(texts={"target": tuple(range(12))}), prompted(1, max_tokens=20), 1)
    (case,) = seen[0].cases
    assert (case.sampling, case.index, case.position) == (Sampling(seed=7), 0, 9)
    assert seen[1].cases == ()


def test_the_rival_runs_at_its_own_placement(bench):
    rival = replace(OPTIONS, target=Placement(14), draft=Placement())
    bench = versus.Bench(replace(bench.experiment, target_only=rival))
    assert bench.experiment.modes == (*versus.MODES, versus.AT_PAIR)
    specs = {mode: way.spec for mode, way in bench.experiment.variants.items()}
    assert specs["target_only"].options.target.gpu_layers == 14
    assert specs[versus.AT_PAIR].options.target.gpu_layers == specs["speculative"].options.target.gpu_layers == 9
    assert specs[versus.AT_PAIR].draft is None
    bench.results["target_only"], bench.results[versus.AT_PAIR] = [alone(8)] * 3, [alone(10)] * 3
    bench.results["speculative"] = [pair(5)] * 3
    document = bench.document()
    # against the better rival, not against target-only at the pair's placement
    assert document.speedup.samples == pytest.approx([gain(20, 0.4, 0.25)] * 3)
    assert set(document.runs) == {*versus.MODES, versus.AT_PAIR}


def test_the_threads_are_told_as_used(bench, monkeypatch):
    monkeypatch.setattr(summary.host, "physical_cores", lambda: 6)
    spec = trial.TrialJob(Path("t"), None, DecoderOptions(), Sampling(), ("one",), 1)
    assert summary.used_settings(spec)["threads"] == 6


def test_the_machine_is_told():
    assert {"cpu", "cores", "memory_bytes", "gpus", "llama_cpp_python"} <= set(summary.machine_and_versions())


def test_a_record_names_the_processor_and_how_llama_cpp_was_built(monkeypatch):
    args = """-DGGML_RPC=on '-DCMAKE_CXX_FLAGS=-I/a/b -include "/home/some one/scripts/amx_tile_config.h"'"""
    monkeypatch.setattr(summary.install, "built", lambda: LlamaBuild("tile-load", "why", args))
    found = summary.machine_and_build("CPU : AVX2 = 1")
    assert found["processor"] == asdict(summary.host.processor())
    assert found["build"] == {
        "system_info": "CPU : AVX2 = 1",
        "cpu": "tile-load",
        "cmake_args": """-DGGML_RPC=on '-DCMAKE_CXX_FLAGS=-Ib -include "amx_tile_config.h"'""",
    }
    assert summary.machine_and_versions().items() <= found.items()
    monkeypatch.setattr(summary.install, "built", lambda: None)
    assert summary.machine_and_build("x")["build"] == {"system_info": "x"}  # a wheel's


def test_the_installed_llama_cpp_is_asked_for_its_build_where_nothing_ran():
    found = summary.machine_and_build()["build"]["system_info"]
    assert found == library.system_info()
    assert features(found)


def test_answers_with_fewer_places_of_a_draft_are_added_up() -> None:
    """A policy may refuse to draft in one trial and not in the next: batch_latencies are measured."""
    assert summary.by_position([(3, 2, 1), (), (1,)]) == [4, 2, 1]
    assert summary.by_position([()]) == []
