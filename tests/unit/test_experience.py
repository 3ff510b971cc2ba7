"""What a pair's drafters have shown, from session to session."""

from pathlib import Path

import pytest

from ggufspec import DecoderOptions, SpeculativeDecoder, demo_pair
from ggufspec.decoding.drafters.base import ShadowEvaluation
from ggufspec.decoding.loop import Round
from ggufspec.decoding.policy.adaptive import AdaptivePolicy
from ggufspec.decoding.policy.draft_latency import DraftLatency
from ggufspec.decoding.policy.experience import PairExperience
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.models.headers import read_headers
from ggufspec.planning.history import accepted_here, expected_acceptance, experience

DRAFTERS = {"draft": "d", "lookup": "lookup"}
F16 = LatencyModel({1: 0.052, 2: 0.066, 4: 0.074, 8: 0.100, 16: 0.153})


def round_(drafters: tuple[str, ...], accepted: int) -> Round:
    return Round((5,) * len(drafters), drafters, accepted, (5,) * (accepted + 1), len(drafters) + 1, 0, 1, 1)


def policy(one: PairExperience) -> AdaptivePolicy:
    return AdaptivePolicy(
        F16, {"draft": DraftLatency(LatencyModel({1: 0.02, 16: 0.05}), F16)}, one.estimators, None, one.trials
    )


def learn(one: PairExperience, agreement: float) -> None:
    policy(one).shadow_evaluated("draft", [ShadowEvaluation(0.9, agreement)] * 60)


def test_tokens_are_of_who_drafted_them(tmp_path):
    one = PairExperience(tmp_path, "t", DRAFTERS)
    one.count([round_(("draft", "draft", "lookup"), 1), round_(("lookup", "draft"), 2), round_((), 0)], [*DRAFTERS])
    one.save()
    draft, lookup = (experience(tmp_path, "t", key) for key in DRAFTERS.values())
    assert (draft.accepted, draft.reached) == ([1, 1], [1, 2])
    assert (lookup.accepted, lookup.reached) == ([1], [1])
    assert [(draft.drafted, draft.emitted), (lookup.drafted, lookup.emitted)] == [(3, 6), (2, 6)]
    assert accepted_here(tmp_path, "t", DRAFTERS.values()) == "60% of 5 drafted tokens"
    assert expected_acceptance(tmp_path, "t", "d", None)[1] == "mostly assumed, 3 tokens measured here"


def test_a_session_begins_with_what_the_last_one_knew(tmp_path):
    one = PairExperience(tmp_path, "t", DRAFTERS)
    assert one.estimators == {}
    learn(one, 1.0)
    before = one.estimators["draft"].chance(0.9, 0)
    one.save()
    again = PairExperience(tmp_path, "t", DRAFTERS)
    assert again.trials.answers == 1  # what a first answer may spend on finding out is spent
    estimator = policy(again).estimator("draft")
    assert estimator.chance(0.9, 0) == pytest.approx(before, abs=0.1)
    assert estimator.known > 0.5
    others = PairExperience(tmp_path, "t", {"draft": "another"})
    assert others.estimators == {}


@pytest.mark.parametrize(("folder", "target"), [(None, "t"), (Path("here"), "")])
def test_what_is_not_known_is_neither_read_nor_written(folder, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = PairExperience(folder, target, DRAFTERS)
    one.count([round_(("draft",), 1)], ["draft"])
    one.save()
    assert not list(tmp_path.iterdir())


def test_bins_of_another_version_are_left(tmp_path):
    one = PairExperience(tmp_path, "t", DRAFTERS)
    learn(one, 1.0)
    one.save()
    path = tmp_path / "acceptance.json"
    path.write_text(path.read_text().replace('"run": [', '"run": [1.0, '))
    assert PairExperience(tmp_path, "t", DRAFTERS).estimators == {}


def test_a_decoder_writes_down_what_its_drafts_became(tmp_path):
    target, draft = demo_pair()
    headers = [one.header.fingerprint for one in read_headers([target, draft], tmp_path / "headers")]
    options = DecoderOptions(ctx_size=256, threads=1, drafters=("draft",), draft_policy="fixed", draft_max=3)
    with SpeculativeDecoder(target, draft, options, cache=tmp_path) as decoder:
        list(decoder.generate("import os\n\ndef ", max_tokens=24))
        statistics = decoder.statistics
    found = experience(tmp_path, *headers)
    assert sum(found.accepted) == statistics.accepted > 0
    assert found.accepted == list(statistics.accepted_by_position)
    with SpeculativeDecoder(
        target, draft, DecoderOptions(ctx_size=256, threads=1, accept="top-k:2"), cache=tmp_path
    ) as decoder:
        list(decoder.generate("import os\n\ndef ", max_tokens=24))
    assert experience(tmp_path, *headers) == found  # a lossy rule's say nothing


def test_answers_without_a_drafter_say_nothing_of_it(tmp_path):
    """Those of one model alone, as in a bench, would halve the share of the text that the lookup drafted."""
    target, draft = demo_pair()
    headers = [one.header.fingerprint for one in read_headers([target, draft], tmp_path / "headers")]
    options = DecoderOptions(ctx_size=256, threads=1, drafters=("draft", "lookup"), draft_policy="fixed", draft_max=3)
    with SpeculativeDecoder(target, draft, options, cache=tmp_path) as decoder:
        list(decoder.generate("import os\n\ndef ", max_tokens=24))
        tokens = decoder.statistics.tokens
        for alone in ("target", "draft"):
            list(decoder.generate("import os\n\ndef ", max_tokens=24, alone=alone))
        decoder.alternate("import os\n\ndef ", max_tokens=24)
    emitted = [experience(tmp_path, headers[0], key).emitted for key in (headers[1], "lookup")]
    assert emitted[0] == emitted[1]
    assert (
        2 * tokens - 4 <= emitted[0] <= 2 * tokens + 4
    )  # of the two answers that drafted, but for their prompts' token
