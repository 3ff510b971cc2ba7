"""Two answers decoded in turn on one target: a segment of one, then the same positions of the other.

Other programs come and go within seconds, and consecutive segments meet the same load. While both texts are equal, the
target's cache is only rewound to the length of the answer that goes on. After they diverge, the tokens after the common
prefix are decoded again, outside of the measured time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ggufspec.decoding.answer import Answer, Emitted, Statistics
from ggufspec.hardware.disturbance import Counters

SEGMENT_TOKENS, SEGMENT_S = 16, 0.2  # minimum per segment; the system counts CPU time in steps of 10 ms


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rounds of one answer."""

    statistics: Statistics  # statistics of the rounds; ``tokens`` includes the token before them
    others_cpus: float  # CPUs that other programs kept busy meanwhile


class Half:
    """One of two alternating answers.

    Args:
        begin: makes the answer at its first turn, so that its time to first token starts there.
        stopping: called between rounds; True ends the answer.
        counters: reads the system's counters.

    Attributes:
        answer: None before its first turn.
        emitted: its tokens.
        segments: measurements; those of the prompt are in the answer's statistics.
        has_ended: True if no token follows.
        repeated: tokens that were decoded again for its last turn.
    """

    def __init__(
        self, begin: Callable[[], Answer], stopping: Callable[[], bool], counters: Callable[[], Counters]
    ) -> None:
        self._begin, self._stopping, self._counters = begin, stopping, counters
        self.answer: Answer | None = None
        self.emitted: list[Emitted] = []
        self.segments: list[Segment] = []
        self.has_ended, self.repeated = False, 0

    @property
    def count(self) -> int:
        """Tokens emitted so far."""
        return self.answer.count if self.answer else 0

    def decode(self, count: float, seconds: float = 0.0) -> None:
        """Decode whole rounds until ``count`` tokens are emitted and the rounds took ``seconds``, or until the end."""
        if self.answer is None:
            self.answer = answer = self._begin()
            self._steps = answer.give()
            self._round(answer)  # the first token, from the prompt's batch
        else:
            answer = self.answer
            self.repeated = answer.resume()
        first, given, before = len(answer.rounds), answer.count, self._counters()
        while not (self.has_ended or self._stopping()) and (
            answer.count < count or sum(one.total_s for one in answer.rounds[first:]) < seconds
        ):
            self._round(answer)
        others_cpus = self._counters().since(before).others_cpus
        self.segments.append(Segment(answer.part(answer.rounds[first:], answer.count - given), others_cpus))

    def _round(self, answer: Answer) -> None:
        for emitted in self._steps:
            self.emitted.append(emitted)
            if answer.can_pause:
                return
        self.has_ended = True

    def close(self) -> None:
        if self.answer:
            self._steps.close()


def alternate(
    first: Callable[[], Answer],
    second: Callable[[], Answer],
    stopping: Callable[[], bool] = lambda: False,
    counters: Callable[[], Counters] = Counters.now,
    most: float = math.inf,
) -> tuple[Half, Half]:
    """Decode two answers in turn until one of them ends or both have ``most`` tokens, alternating which goes first.

    Segments with the same number cover the same positions, give or take a round; the last ones may be empty. Segments
    grow with the number of tokens to decode again, so that this stays a small part of the time.
    """
    order = halves = Half(first, stopping, counters), Half(second, stopping, counters)
    try:
        while not (any(half.has_ended for half in halves) or stopping()) and min(half.count for half in halves) < most:
            leader, follower = order
            least = max(SEGMENT_TOKENS, leader.repeated, follower.repeated)
            leader.decode(min(most, max(leader.count, follower.count) + least), SEGMENT_S)
            follower.decode(leader.count)
            order = follower, leader
        if any(half.has_ended for half in halves):
            for half in order:  # the other's last round may have been longer
                if not half.has_ended:
                    half.decode(max(one.count for one in halves))
    finally:
        for half in halves:
            half.close()
    return halves
