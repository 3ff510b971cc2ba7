"""Two answers on one target in turn: a segment of one, then the same positions of the other.

Other programs come and go within seconds, and segments that follow each other meet the same load. While both texts are
equal, the target's cache only goes back to the length of the answer that goes on; where they differ, the tokens after
the common beginning are decoded again, and that is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ggufspec.decoding.answer import Answer, Emitted, Statistics
from ggufspec.hardware.disturbance import Counters

SEGMENT_TOKENS, SEGMENT_S = 16, 0.2  # at least; the system counts CPU time in steps of 10 ms


@dataclass(frozen=True, slots=True)
class Segment:
    """Rounds of an answer that were decoded without a break."""

    statistics: Statistics  # of the rounds; ``tokens`` includes the token before them
    others_cpus: float  # CPUs that other programs kept busy meanwhile


class Half:
    """One of two answers.

    Args:
        begin: makes the answer when its turn comes first, so that its time to the first token is its own.
        stopping: asked between rounds.
        counters: reads the system's counters.

    Attributes:
        answer: None before its first turn.
        emitted: its tokens.
        segments: what was measured of it; the prompt is in the answer's statistics.
        has_ended: whether no token follows.
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
        """Tokens given so far."""
        return self.answer.count if self.answer else 0

    def decode(self, count: int, seconds: float = 0.0) -> None:
        """Decode whole rounds until so many tokens are given and the rounds took so long, or the answer ends."""
        if self.answer is None:
            self.answer = answer = self._begin()
            self._steps = answer.give()
            self._round(answer)  # the first token, which the prompt's batch gives
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
) -> tuple[Half, Half]:
    """Decode two answers in turn until one of them ends, each time beginning with the other one.

    Segments of the same number are of the same positions, up to a round; the last ones may be empty. They grow with
    what has to be decoded again, so that all of that is a small part of the time.
    """
    order = halves = Half(first, stopping, counters), Half(second, stopping, counters)
    try:
        while not (any(half.has_ended for half in halves) or stopping()):
            leader, follower = order
            least = max(SEGMENT_TOKENS, leader.repeated, follower.repeated)
            leader.decode(max(leader.count, follower.count) + least, SEGMENT_S)
            follower.decode(leader.count)
            order = follower, leader
        if any(half.has_ended for half in halves):
            for half in order:  # the last round of the other one may have been longer
                if not half.has_ended:
                    half.decode(max(one.count for one in halves))
    finally:
        for half in halves:
            half.close()
    return halves
