"""Answers of the pair that ships that alternate in a child process, and the bench that asks for them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from ggufspec import bench_pair
from ggufspec.bench import trial
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.schema.base import to_json

PROMPTS = ("import os\n\ndef ", "The first thing that she saw was", "def add(a, b):\n    return a + b\n\ndef add(")


def test_a_child_gives_both_answers_in_segments(pair: tuple[Path, Path]) -> None:
    options = DecoderOptions(threads=1, ctx_size=512, strict=True)  # no near tie tells them apart
    spec = trial.TrialJob(*pair, options, Sampling(), PROMPTS, 40)
    with closing(trial.ModelProcess(spec)) as load:
        assert load.ready.alternates
        for index, first in enumerate(("pair", "target", "pair")):
            both = load.ask(trial.TrialRequest((index,), alternate=first))
            whole = load.ask(trial.TrialRequest((index,), alone="target"))
            (ours,), (theirs,), (alone,) = both.answers, both.target_only, whole.answers
            assert both.finished
            assert ours.tokens == theirs.tokens == alone.tokens
            assert ours.text == theirs.text == alone.text
            assert len(ours.segments) >= 1  # of a fast machine one, of 0.2 s
            assert len(alone.segments) == 1
            assert theirs.statistics.rounds == theirs.statistics.decoded
            for answer in (ours, theirs):
                assert sum(one.statistics.decoded for one in answer.segments) == answer.statistics.decoded
                assert all(one.others_cpus >= 0 for one in answer.segments)
                assert answer.statistics.prompt_read == alone.statistics.prompt_read


def test_an_answer_may_end_before_its_policy_expects_it(pair: tuple[Path, Path]) -> None:
    """With a whole round, or a segment of 0.2 s if answers alternate; its first part is told apart."""
    spec = trial.TrialJob(*pair, DecoderOptions(threads=1, ctx_size=512), Sampling(), PROMPTS, 400)
    with closing(trial.ModelProcess(spec)) as load:
        warm = load.ask(trial.TrialRequest(max_tokens=400, warm_up=True, most=24)).answers[0]
        assert 24 <= warm.statistics.tokens < 100
        both = load.ask(trial.TrialRequest((1,), 400, alternate="pair", most=40))
        whole = load.ask(trial.TrialRequest((1,), 400, most=40))
        for answer in (*both.answers, *both.target_only, *whole.answers):
            assert 40 <= answer.statistics.tokens == len(answer.tokens) < 400
            assert answer.statistics.stop_reason == ""
            assert answer.start is not None
            assert 16 <= answer.start.tokens <= answer.statistics.tokens
            assert 0 < answer.start.decode_s <= answer.statistics.decode_s


def test_a_bench_says_what_met_a_quiet_machine(pair: tuple[Path, Path]) -> None:
    document = bench_pair("demo", prompts=PROMPTS, max_tokens=40, repetitions=1, threads=1)
    found = json.loads(to_json(document))["disturbance"]
    assert 0 < found["counting"] <= found["pairs"]
    assert found["pairs"] >= 3
    assert 0 <= found["busy_share"] <= 1
    assert found["part"] in ("quiet", "similar load", "all")
    assert document.runs["speculative"] is not None
    assert document.runs["speculative"].tokens == document.runs["target_only"].tokens == 120  # type: ignore[union-attr]
    assert document.identical_output
