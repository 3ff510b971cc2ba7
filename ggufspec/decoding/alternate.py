"""Alternating decoding of two answers on one target: a segment of one answer, then the same positions in the other.

Other programs start and end within seconds, but two consecutive segments run under nearly the same load. While both
texts are equal, a switch only rewinds the target's cache to the length of the answer that continues. After the texts
diverge, the tokens after their common prefix are decoded again at every switch, outside the measured time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ggufspec.decoding.answer import Emitted, PairAnswer, Statistics
from ggufspec.hardware.disturbance import SystemCounters

SEGMENT_TOKENS, SEGMENT_S = 16, 0.2  # minimum tokens and seconds per segment; CPU times have a resolution of 10 ms


@dataclass(frozen=True, slots=True)
class AnswerSegment:
    """Consecutive rounds of one answer."""

    statistics: Statistics  # statistics of these rounds; ``tokens`` also counts the token before the first round
    others_cpus: float  # CPUs that other programs kept busy during these rounds


class AlternatingAnswer:
    """One of two alternating answers.

    Args:
        begin: creates the answer on its first turn, when its time to first token starts to count.
        stopping: called between rounds; True ends the answer.
        counters: reads the system's counters.

    Attributes:
        answer: the underlying answer; None before its first turn.
        emitted: tokens emitted so far.
        segments: measurements of each segment; measurements of the prompt are in the answer's statistics.
        has_ended: True if the answer has no more tokens.
        repeated: number of tokens decoded again at the start of the last turn.
    """

    def __init__(
        self, begin: Callable[[], PairAnswer], stopping: Callable[[], bool], counters: Callable[[], SystemCounters]
    ) -> None:
        self._begin, self._stopping, self._counters = begin, stopping, counters
        self.answer: PairAnswer | None = None
        self.emitted: list[Emitted] = []
        self.segments: list[AnswerSegment] = []
        self.has_ended, self.repeated = False, 0

    @property
    def count(self) -> int:
        """Tokens emitted so far."""
        return self.answer.count if self.answer else 0

    def decode(self, count: float, seconds: float = 0.0) -> None:
        """Decode rounds until ``count`` tokens are emitted and this call's rounds took ``seconds``, or to the end."""
        if self.answer is None:
            self.answer = answer = self._begin()
            self._steps = answer.give()
            self._round(answer)  # yields the first token, from the prompt's batch
        else:
            answer = self.answer
            self.repeated = answer.resume()
        first, given, before = len(answer.rounds), answer.count, self._counters()
        while not (self.has_ended or self._stopping()) and (
            answer.count < count or sum(one.total_s for one in answer.rounds[first:]) < seconds
        ):
            self._round(answer)
        others_cpus = self._counters().since(before).others_cpus
        self.segments.append(AnswerSegment(answer.part(answer.rounds[first:], answer.count - given), others_cpus))

    def _round(self, answer: PairAnswer) -> None:
        for emitted in self._steps:
            self.emitted.append(emitted)
            if answer.can_pause:
                return
        self.has_ended = True

    def close(self) -> None:
        if self.answer:
            self._steps.close()


def alternate(
    first: Callable[[], PairAnswer],
    second: Callable[[], PairAnswer],
    stopping: Callable[[], bool] = lambda: False,
    counters: Callable[[], SystemCounters] = SystemCounters.now,
    most: float = math.inf,
) -> tuple[AlternatingAnswer, AlternatingAnswer]:
    """Decode two answers in turn until one of them ends or both have ``most`` tokens, alternating which goes first.

    Segments with the same index cover the same positions, give or take a round; the last ones may be empty. Segments
    grow with the number of tokens to decode again, so that decoding these stays a small part of the time.
    """
    order = halves = AlternatingAnswer(first, stopping, counters), AlternatingAnswer(second, stopping, counters)
    try:
        while not (any(half.has_ended for half in halves) or stopping()) and min(half.count for half in halves) < most:
            leader, follower = order
            least = max(SEGMENT_TOKENS, leader.repeated, follower.repeated)
            leader.decode(min(most, max(leader.count, follower.count) + least), SEGMENT_S)
            follower.decode(leader.count)
            order = follower, leader
        if any(half.has_ended for half in halves):
            for half in order:  # the finished answer may be longer, so bring the other to the same length
                if not half.has_ended:
                    half.decode(max(one.count for one in halves))
    finally:
        for half in halves:
            half.close()
    return halves
