"""Two answers in turn on one target: whose turn it is, what is measured of it, and that neither changes the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder, demo_pair
from ggufspec.decoding import alternate
from ggufspec.decoding.alternate import SEGMENT_S, SEGMENT_TOKENS
from ggufspec.decoding.answer import Emitted, Statistics
from ggufspec.errors import UsageError
from ggufspec.hardware.disturbance import SystemCounters
from ggufspec.hardware.host import CpuUse
from ggufspec.llamacpp.model import Context

PROMPT = "import os\n\ndef "


@dataclass
class Taken:
    """A round, as far as :class:`alternate.AlternatingAnswer` looks at it."""

    total_s: float


class Machine:
    """A clock, and another program that keeps ``cpus`` busy from one moment to another."""

    def __init__(self, busy: tuple[float, float] = (0.0, 0.0), cpus: float = 2.0) -> None:
        self.now, self.busy, self.cpus = 0.0, busy, cpus
        self.turns: list[str] = []

    def counters(self) -> SystemCounters:
        busy_s = max(0.0, min(self.now, self.busy[1]) - self.busy[0])
        return SystemCounters(CpuUse(self.now, self.cpus * busy_s, 0.0), 0)


class FakeAnswer:
    """An answer whose rounds give ``each`` tokens in ``round_s`` seconds, and which ends after ``end`` tokens."""

    def __init__(self, machine: Machine, name: str, each: int, round_s: float, end: int, repeats: int = 0) -> None:
        self.machine, self.name, self.each, self.round_s, self.end = machine, name, each, round_s, end
        self.repeats, self.count, self.rounds, self.can_pause = repeats, 0, list[Taken](), True
        self.is_closed = False

    def give(self) -> Iterator[Emitted]:
        try:
            self.machine.now += 1.0  # the prompt
            yield self._token(1)
            while self.count < self.end:
                self.machine.now += self.round_s
                self.machine.turns.append(self.name)
                self.rounds.append(Taken(self.round_s))
                for place in range(1, self.each + 1):
                    yield self._token(place)
                    if self.count == self.end:
                        return
        finally:
            self.is_closed = True

    def _token(self, place: int) -> Emitted:
        self.count += 1
        self.can_pause = self.count < self.end and (place == self.each or not self.rounds)
        return Emitted(self.count, "x", "target")

    def resume(self) -> int:
        self.machine.now += 10.0 * bool(self.repeats)  # which nobody measures
        return self.repeats

    def part(self, rounds: list[Taken], tokens: int) -> Statistics:
        seconds = sum(one.total_s for one in rounds)
        return Statistics(0, 0.0, 1 + tokens, seconds, len(rounds), 0, 0, (), (), 0.0, seconds, "")


def decoded(half: alternate.AlternatingAnswer) -> list[int]:
    return [one.statistics.decoded for one in half.segments]


def test_each_segment_has_the_same_positions_and_another_one_begins() -> None:
    machine = Machine()
    ours, theirs = FakeAnswer(machine, "o", 3, 0.2, 100), FakeAnswer(machine, "t", 1, 0.1, 100)
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert "".join(machine.turns).startswith("o" * 5 + "t" * 15 + "t" * 16 + "o" * 6 + "o" * 6)
    assert [len(half.emitted) for half in halves] == [100, 100]
    assert [decoded(half)[:3] for half in halves] == [[15, 18, 18], [15, 16, 20]]
    assert sum(decoded(halves[0])) == sum(decoded(halves[1])) == 99
    assert len(halves[0].segments) == len(halves[1].segments)
    assert all(half.has_ended for half in halves)
    assert ours.is_closed
    assert theirs.is_closed


def test_a_segment_of_a_fast_model_is_long_enough_for_the_counters() -> None:
    machine = Machine()
    ours, theirs = (FakeAnswer(machine, name, 1, 0.001, 500) for name in "ot")
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert decoded(halves[0])[0] == pytest.approx(SEGMENT_S / 0.001, abs=1)


def test_a_segment_knows_what_others_used_meanwhile() -> None:
    """Not while prompts were read, nor while tokens were decoded again."""
    machine = Machine(busy=(0.0, 1.0))
    ours, theirs = FakeAnswer(machine, "o", 1, 0.1, 40, repeats=1), FakeAnswer(machine, "t", 1, 0.1, 40)
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert {one.others_cpus for half in halves for one in half.segments} == {0.0}
    machine = Machine(busy=(1.0, 2.5))
    ours, theirs = (FakeAnswer(machine, name, 1, 0.1, 40) for name in "ot")
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert [round(half.segments[0].others_cpus, 3) for half in halves] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("ends", "given"), [((20, 100), (20, 32)), ((100, 20), (20, 20)), ((1, 100), (1, 1)), ((100, 1), (16, 1))]
)
def test_an_answer_that_ends_ends_the_pair(ends: tuple[int, int], given: tuple[int, int]) -> None:
    machine = Machine()
    ours, theirs = (FakeAnswer(machine, name, 1, 0.1, end) for name, end in zip("ot", ends, strict=True))
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert tuple(len(half.emitted) for half in halves) == given
    assert ours.is_closed
    assert theirs.is_closed


def test_the_last_round_of_one_answer_may_be_longer() -> None:
    """The other one then has a last segment that is compared with nothing."""
    machine = Machine()
    ours, theirs = FakeAnswer(machine, "o", 9, 0.2, 37), FakeAnswer(machine, "t", 1, 0.1, 37)
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert [len(half.emitted) for half in halves] == [37, 37]
    assert [decoded(half) for half in halves] == [[18, 18], [18, 16, 2]]


def test_texts_that_differ_make_segments_longer() -> None:
    """What is decoded again stays a small part of the time."""
    machine = Machine()
    ours, theirs = FakeAnswer(machine, "o", 1, 0.1, 300, repeats=60), FakeAnswer(machine, "t", 1, 0.1, 300)
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters)
    assert decoded(halves[0])[0] == SEGMENT_TOKENS - 1
    assert set(decoded(halves[0])[2:-1]) == {60}


@pytest.mark.parametrize("most", [10, 40])
def test_both_answers_end_at_the_same_length(most: int) -> None:
    """Which is shorter than what the answers expect; the last round is whole."""
    machine = Machine()
    ours, theirs = FakeAnswer(machine, "o", 3, 0.2, 100), FakeAnswer(machine, "t", 1, 0.1, 100)
    halves = alternate.alternate(lambda: ours, lambda: theirs, counters=machine.counters, most=most)
    assert all(most <= len(half.emitted) < most + 3 for half in halves)
    assert not any(half.has_ended for half in halves)
    assert ours.is_closed
    assert theirs.is_closed


def test_a_stop_is_obeyed_between_rounds_and_closes_both() -> None:
    machine = Machine()
    ours, theirs = (FakeAnswer(machine, name, 1, 0.1, 100) for name in "ot")
    halves = alternate.alternate(lambda: ours, lambda: theirs, lambda: ours.count >= 5, machine.counters)
    assert [len(half.emitted) for half in halves] == [5, 1]
    assert ours.is_closed
    assert theirs.is_closed


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_neither_answer_changes_the_other(monkeypatch: pytest.MonkeyPatch, strict: bool, sampling: Sampling) -> None:
    """Both are what the target says alone, and whoever began; nothing is decoded twice."""
    monkeypatch.setattr(alternate, "SEGMENT_S", 0.0)
    with SpeculativeDecoder(*demo_pair(), DecoderOptions(threads=1, strict=strict)) as decoder:
        alone = [one.token for one in decoder.generate(PROMPT, max_tokens=70, sampling=sampling, alone="target")]
        for target_first in (False, True):
            halves = decoder.alternate(PROMPT, max_tokens=70, sampling=sampling, target_first=target_first)
            for half in halves:
                assert [one.token for one in half.emitted] == alone
                assert half.answer is not None
                assert sum(decoded(half)) == half.answer.statistics.decoded == 69
                assert sum(one.statistics.decode_s for one in half.segments) == pytest.approx(
                    half.answer.statistics.decode_s
                )
                assert half.answer.statistics.prompt_read == half.answer.statistics.prompt_tokens > 0
                assert half.answer.statistics.time_to_first_token_s is not None
                assert half.repeated == 0
            assert halves[1].answer is not None
            assert halves[1].answer.statistics.drafted == 0
        after = [one.token for one in decoder.generate(PROMPT, max_tokens=70, sampling=sampling, cache_prompt=True)]
        assert after == alone


def test_texts_that_differ_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lossy rule changes the text; the target's own stays what it is alone."""
    monkeypatch.setattr(alternate, "SEGMENT_S", 0.0)
    options = DecoderOptions(threads=1, accept="top-k:20", draft_policy="fixed", draft_max=4)
    with SpeculativeDecoder(*demo_pair(), options) as decoder:
        whole = [[one.token for one in decoder.generate(PROMPT, max_tokens=60, alone=one)] for one in ("", "target")]
        halves = decoder.alternate(PROMPT, max_tokens=60)
        count = [len(half.emitted) for half in halves]
        assert whole[0] != whole[1]
        assert [[one.token for one in half.emitted] for half in halves] == [
            text[:n] for text, n in zip(whole, count, strict=True)
        ]
        assert max(half.repeated for half in halves) > 0


def test_stop_strings_grammars_and_failures_are_those_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternate, "SEGMENT_S", 0.0)
    with SpeculativeDecoder(*demo_pair(), DecoderOptions(threads=1)) as decoder:
        text = "".join(one.text for one in decoder.generate(PROMPT, max_tokens=60, alone="target"))
        for stop, grammar, reason in (((text[40:46],), "", "stop"), ((), 'root ::= "abc" "def"', "end")):
            for half in decoder.alternate(PROMPT, max_tokens=60, stop=stop, grammar=grammar):
                assert half.answer is not None
                assert half.answer.statistics.stop_reason in (reason, "grammar")
        assert "".join(one.text for one in half.emitted) == "abcdef"
        with pytest.raises(UsageError, match="empty"):
            decoder.alternate("")
        decode, left = Context.decode, iter(range(40))

        def failing(self: Context, *args: object, **more: object) -> object:
            assert next(left, None) is not None, "the driver is gone"
            return decode(self, *args, **more)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", failing)
            with pytest.raises(AssertionError, match="driver"):
                decoder.alternate(PROMPT, max_tokens=60)
        again = decoder.generate(PROMPT, max_tokens=60, alone="target", cache_prompt=True)
        assert "".join(one.text for one in again) == text


def test_only_one_answer_at_a_time() -> None:
    with SpeculativeDecoder(*demo_pair(), DecoderOptions(threads=1)) as decoder:
        answer = decoder.generate(PROMPT)
        next(answer)
        with pytest.raises(UsageError, match="unfinished"):
            decoder.alternate(PROMPT)
        answer.close()
    with pytest.raises(UsageError, match="closed"):
        decoder.alternate(PROMPT)
