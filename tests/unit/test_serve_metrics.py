"""What an endpoint counts: Prometheus's text, read by a strict parser, and the figures of the page."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.speed_watch import TargetSpeed
from ggufspec.serve.metrics import Metrics
from ggufspec.serve.session import ServeReply

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'


def parsed(text: str) -> tuple[dict[str, str], dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """(type by family, value by sample) of text format 0.0.4; anything that it does not allow is an error."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    family, helped = "", set()
    for line in text.splitlines():
        if found := re.fullmatch(rf"# HELP ({NAME}) ([^\\]+)", line):
            assert found[1] not in helped
            helped.add(family := found[1])
        elif found := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|summary|histogram|untyped)", line):
            assert found[1] == family
            assert family not in kinds
            kinds[family] = found[2]
        else:
            found = re.fullmatch(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ([0-9.e+-]+)", line)
            assert found, line
            ends = ("_sum", "_count") if kinds[family] == "summary" else ("",)
            assert found[1] in {family + end for end in ends}, "a sample outside its family"
            labels = tuple(re.findall(LABEL, found[2] or ""))
            assert (found[1], labels) not in samples
            samples[found[1], labels] = float(found[7])
            assert kinds[family] != "counter" or found[1].endswith("_total")
    return kinds, samples


def reply(**changes: Any) -> ServeReply:
    """An answer of 13 tokens, 12 of them in 9 rounds and 2 seconds, 6 of the rounds without a draft."""
    own = {key: changes.pop(key) for key in set(changes) & set(Statistics.__dataclass_fields__)}
    statistics = Statistics(
        **{
            "prompt_tokens": 100,
            "prompt_s": 0.5,
            "tokens": 13,
            "decode_s": 2.0,
            "rounds": 9,
            "drafted": 6,
            "accepted": 3,
            "drafted_by_position": (3, 2, 1, 0),
            "accepted_by_position": (2, 1, 0, 0),
            "draft_s": 0.2,
            "verify_s": 1.8,
            "stop_reason": "end",
            "plain_rounds": 6,
            "prompt_read": 41,
            "time_to_first_token_s": 0.75,
        }
        | own
    )
    usual = {"cached": 59, "sequence": 0, "target_only_s": 3.0, "speculation": True}
    by_drafter = {"accepted_by_drafter": {"draft": (4, 2), "lookup": (2, 1)}}
    return ServeReply(statistics, **usual | by_drafter | changes)


def read(metrics: Metrics, **gauges: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return parsed(metrics.text(**{"waiting": 0, "running": 0, "kept": 0} | gauges))[1]


def test_before_the_first_answer_counters_are_zero_and_nothing_is_made_up():
    samples = read(Metrics(), waiting=2, running=1, kept=3)
    assert samples["llamacpp:tokens_predicted_total", ()] == 0
    assert samples["llamacpp:predicted_tokens_seconds", ()] == 0
    assert samples["llamacpp:requests_deferred", ()] == 2
    assert samples["llamacpp:requests_processing", ()] == 1
    assert samples["ggufspec:conversations_kept", ()] == 3
    assert ("ggufspec:speculation", ()) not in samples
    assert not [name for name, labels in samples if labels]


def test_an_answer_is_counted_in_every_way():
    metrics = Metrics()
    metrics.answered(reply(), seconds=2.75)
    samples = read(metrics)
    assert samples["llamacpp:prompt_tokens_total", ()] == 41
    assert samples["llamacpp:prompt_seconds_total", ()] == 0.5
    assert samples["llamacpp:prompt_tokens_seconds", ()] == 82
    assert samples["llamacpp:tokens_predicted_total", ()] == 13
    assert samples["llamacpp:tokens_predicted_seconds_total", ()] == 2
    assert samples["llamacpp:predicted_tokens_seconds", ()] == 6
    assert samples["llamacpp:prompt_tokens_cached_total", ()] == 59
    assert samples["ggufspec:rounds_total", ()] == 9
    assert samples["ggufspec:plain_rounds_total", ()] == 6
    assert samples["ggufspec:answers_total", (("stop_reason", "end"),)] == 1
    assert samples["ggufspec:speculation", ()] == 1
    assert samples["ggufspec:answer_seconds_sum", ()] == 2.75
    assert samples["ggufspec:answer_seconds_count", ()] == 1
    assert samples["ggufspec:first_token_seconds_sum", ()] == 0.75
    drafted = {
        labels[0][1]: value for (name, labels), value in samples.items() if name == "ggufspec:drafted_tokens_total"
    }
    accepted = {
        labels[0][1]: value for (name, labels), value in samples.items() if name == "ggufspec:accepted_tokens_total"
    }
    assert (drafted, accepted) == ({"draft": 4, "lookup": 2}, {"draft": 2, "lookup": 1})
    at = {
        name: {labels[0][1]: value for (each, labels), value in samples.items() if each == f"ggufspec:{name}_at_total"}
        for name in ("drafted", "accepted")
    }
    assert at == {"drafted": {"1": 3, "2": 2, "3": 1}, "accepted": {"1": 2, "2": 1}}


def test_counters_only_grow_and_are_sums():
    metrics, before = Metrics(), {}
    for number in range(30):
        metrics.answered(reply(tokens=number, stop_reason="" if number % 2 else "length"), seconds=1.0)
        kinds, samples = parsed(metrics.text(waiting=0, running=0, kept=0))
        for (name, labels), value in samples.items():
            if kinds.get(name) != "gauge":
                assert value >= before.get((name, labels), 0)
        before = samples
    assert before["llamacpp:tokens_predicted_total", ()] == sum(range(30))
    assert before["ggufspec:answers_total", (("stop_reason", "length"),)] == 15
    assert before["ggufspec:answers_total", (("stop_reason", "cancelled"),)] == 15
    assert (
        before["llamacpp:predicted_tokens_seconds", ()] == sum(range(9, 29)) / 40
    )  # of the last twenty, without the first of each


def test_positions_are_in_order_and_every_one_is_there():
    metrics = Metrics()
    metrics.answered(reply(drafted_by_position=(5,) * 12, accepted_by_position=(1,) * 12), seconds=1.0)
    places = re.findall(
        r'^ggufspec:drafted_at_total\{position="(\d+)"\} 5$', metrics.text(waiting=0, running=0, kept=0), re.MULTILINE
    )
    assert places == [str(place) for place in range(1, 13)]


def test_refusals_and_restarts():
    metrics = Metrics()
    for status in (400, 401, 400, 503):
        metrics.refused(status)
    metrics.restarted()
    samples = read(metrics)
    assert {labels[0][1]: value for (name, labels), value in samples.items() if name == "ggufspec:refused_total"} == {
        "400": 2,
        "401": 1,
        "503": 1,
    }
    assert samples["ggufspec:restarts_total", ()] == 1
    assert metrics.figures()["totals"]["refused"] == 4


def test_speculation_that_backed_off_is_zero():
    metrics = Metrics()
    metrics.answered(reply(), seconds=1.0)
    metrics.answered(reply(speculation=False), seconds=1.0)
    assert read(metrics)["ggufspec:speculation", ()] == 0


def test_the_target_s_speed_is_that_of_the_last_answer_that_showed_it():
    metrics, now, expected = Metrics(), "ggufspec:target_tokens_seconds", "ggufspec:target_tokens_seconds_expected"
    metrics.answered(reply(), seconds=1.0)
    assert not {(now, ()), (expected, ())} & set(read(metrics))
    assert metrics.figures()["target"] is None
    metrics.answered(reply(target=TargetSpeed(3.5)), seconds=1.0)
    assert read(metrics)[now, ()] == 3.5
    assert (expected, ()) not in read(metrics)
    metrics.answered(reply(target=TargetSpeed(3.5, 8.5, "slower", "other programs used 1.5 CPUs")), seconds=1.0)
    metrics.answered(reply(tokens=1), seconds=1.0)
    assert (read(metrics)[now, ()], read(metrics)[expected, ()]) == (3.5, 8.5)
    target = json.loads(json.dumps(metrics.figures()))["target"]
    assert (target["state"], target["reason"]) == ("slower", "other programs used 1.5 CPUs")


def test_a_strange_name_breaks_no_line():
    metrics = Metrics()
    metrics.answered(reply(accepted_by_drafter={'a"b\\c\nd': (1, 1)}), seconds=1.0)
    assert read(metrics)["ggufspec:drafted_tokens_total", (("drafter", r"a\"b\\c\nd"),)] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "a 1",
        "# TYPE a counter\na_total 1\n",
        "# HELP a b\n# TYPE a counter\na 1\n",
        "# HELP a b\n# TYPE a gauge\nb 1\n",
    ],
)
def test_the_parser_is_strict(wrong):
    with pytest.raises((AssertionError, KeyError)):
        parsed(wrong)


def test_figures_are_the_last_answers_newest_first():
    metrics = Metrics()
    totals = dict.fromkeys(metrics.figures()["totals"], 0)
    now = {"running": 1, "waiting": 2, "answers_per_batch": None}
    assert metrics.figures(waiting=2, running=1) == {"answers": [], "totals": totals, "target": None, "now": now}
    for number in range(25):
        metrics.answered(reply(tokens=number + 1), seconds=2.75)
    figures = json.loads(json.dumps(metrics.figures(), allow_nan=False))
    assert [answer["number"] for answer in figures["answers"]] == [*range(25, 5, -1)]
    newest = figures["answers"][0]
    assert newest == {
        "number": 25,
        "tokens": 25,
        "tokens_per_s": 12.0,
        "prompt_tokens": 100,
        "cached": 59,
        "time_to_first_token_s": 0.75,
        "seconds": 2.75,
        "drafted": 6,
        "accepted": 3,
        "acceptance_rate": 0.5,
        "rounds": 9,
        "tokens_per_round": 24 / 9,
        "gain": 1.5,
        "stop_reason": "end",
        "speculation": True,
    }
    assert figures["totals"]["tokens"] == sum(range(1, 26))
    assert figures["totals"]["drafted"] == 150


def test_answers_that_share_batches_have_more_rounds_than_the_target_has_batches():
    metrics = Metrics()
    assert read(metrics)["llamacpp:n_busy_slots_per_decode", ()] == 0
    metrics.answered(reply(rounds=9, batches=9), seconds=1.0)
    assert read(metrics)["llamacpp:n_busy_slots_per_decode", ()] == 1
    metrics.answered(reply(rounds=9, batches=3), seconds=1.0)
    assert read(metrics)["llamacpp:n_busy_slots_per_decode", ()] == 1.5
    assert metrics.figures()["now"]["answers_per_batch"] == 1.5


def test_what_is_not_known_is_none():
    metrics = Metrics()
    nothing = {"tokens": 0, "decode_s": 0.0, "rounds": 0, "drafted": 0, "accepted": 0}
    metrics.answered(reply(**nothing, target_only_s=None, time_to_first_token_s=None, stop_reason=""), seconds=0.1)
    (answer,) = metrics.figures()["answers"]
    unknown = ("tokens_per_s", "time_to_first_token_s", "acceptance_rate", "tokens_per_round", "gain")
    assert {name for name, value in answer.items() if value is None} == set(unknown)
    assert answer["stop_reason"] == "cancelled"
    assert read(metrics)["ggufspec:first_token_seconds_count", ()] == 0


def test_an_answer_without_a_draft_gains_nothing():
    """It is target-only: what is predicted of that says how good the prediction is."""
    metrics = Metrics()
    metrics.answered(reply(drafted=0, accepted=0, target_only_s=1.6), seconds=2.0)
    assert metrics.figures()["answers"][0]["gain"] is None


def test_threads_lose_nothing():
    metrics = Metrics()

    def work() -> None:
        for _ in range(200):
            metrics.answered(reply(), seconds=1.0)
            metrics.text(waiting=0, running=0, kept=0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(metrics)["llamacpp:tokens_predicted_total", ()] == 800 * 13
