"""Detection of a target that is slower or faster than expected, from answer to answer. Pure: no clock, no counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, log2
from statistics import median

from ggufspec.schema.text import number

_CHANGED = 1.5  # minimum factor, faster or slower, for a change to be reported
_USUAL = 1.2  # a reported change is over when the speed is within this factor of the expected speed
_FEWEST_TOKENS = 16  # minimum number of tokens in an answer; shorter answers say little about the machine
_NEAR = 2  # maximum distance in depth ranges from a disturbed answer to the shallower one that it is compared with
_SHALLOW = 128  # depth in tokens below which context costs next to nothing; all such depths form one range
_FIRST_ANSWERS = 3  # number of undisturbed answers whose median is the expected speed


@dataclass(frozen=True, slots=True)
class TargetSpeed:
    """Target speed without drafts, as observed in one answer.

    Attributes:
        tokens_per_s: speed in this answer.
        expected: tokens/s at this depth, from the plan or the session's first undisturbed answers; None if unknown.
        state: ``slower`` or ``faster`` than expected as last reported, else empty.
        reason: why the target is slower, or what disturbed the answer if no speed is expected yet; empty if unknown.
        change: a sentence for the user if this answer changed the state, else empty.
    """

    tokens_per_s: float
    expected: float | None = None
    state: str = ""
    reason: str = ""
    change: str = ""


@dataclass(slots=True)
class SpeedWatch:
    """Comparison of answers with the speed expected at their depth; a change by a factor above 1.5 is reported once.

    Answers are compared within ranges of depth, each a factor of √2 wide. In a new range, only a speed too low for the
    increase in depth indicates a change, because time per token grows at most in proportion to depth.

    Args:
        planned: seconds per token in an empty context, and extra seconds per token of context; None: learn from
            answers.
    """

    planned: tuple[float, float] | None = None
    _first: dict[tuple[bool, int], list[float]] = field(default_factory=dict)  # tokens/s by (drafts, range of depth)
    _level: float = 1.0  # speed ÷ expected, as last reported
    _reason: str = ""

    def observe(
        self,
        tokens_per_s: float | None,
        *,
        tokens: int,
        depth: int,
        drafts: bool = False,
        disturbed: str = "",
        look: Callable[[], str] = lambda: "",
    ) -> TargetSpeed | None:
        """Compare an answer's speed with the expected one; return None if the answer is too short or its speed unknown.

        Args:
            tokens_per_s: target speed without drafts; None if unknown.
            tokens: number of tokens in the answer.
            depth: mean number of tokens in the context.
            drafts: True if drafters were active: the speed then comes from the latency model, not the answer's time.
            disturbed: what slowed the machine down; empty if nothing did.
            look: looks for another cause; called only if the target became slower and ``disturbed`` is empty.
        """
        if tokens_per_s is None or tokens < _FEWEST_TOKENS or not 0 < tokens_per_s < inf:
            return None
        expected = self._expected(tokens_per_s, depth, drafts, disturbed)
        if expected is None:
            return TargetSpeed(tokens_per_s, None, self._state, self._reason or disturbed)
        ratio, level, how = tokens_per_s / expected, self._level, ""
        if level != 1 and 1 / _USUAL <= ratio <= _USUAL:
            self._level, how = 1.0, "as fast as expected again"
        elif ratio < min(level, 1) / _CHANGED:
            self._level, how = ratio, "slower now"
        elif ratio > max(level, 1) * _CHANGED:
            self._level, how = ratio, "faster now"
        if how:
            self._reason = (disturbed or look()) if self._level < 1 else ""
            how = f"the target is {how}: {number(tokens_per_s)} tokens/s, expected {number(expected)}"
            how += f" ({self._reason})" if self._reason else ""
        return TargetSpeed(tokens_per_s, expected, self._state, self._reason, how)

    @property
    def _state(self) -> str:
        return "" if self._level == 1 else "slower" if self._level < 1 else "faster"

    def _expected(self, tokens_per_s: float, depth: int, drafts: bool, disturbed: str) -> float | None:
        """Return the expected tokens/s, or None. Without a plan, the first undisturbed answers (up to now) set it."""
        if self.planned is not None:
            empty_s, more_s = self.planned
            return 1 / (empty_s + more_s * depth)
        here = int(2 * log2(max(depth, _SHALLOW)))
        first = self._first.get((drafts, here))
        if first is None:
            shallower = max((range_ for way, range_ in self._first if way == drafts and range_ < here), default=None)
            most = inf if shallower is None else median(self._first[drafts, shallower])
            least = 0.0 if shallower is None else most * 2 ** ((shallower - here - 1) / 2)
            if tokens_per_s < self._level * least / _CHANGED:
                return least
            if disturbed:  # a disturbance slows a token down more than a context twice as deep does
                return most if shallower is not None and here - shallower <= _NEAR else None
            first = self._first[drafts, here] = [min(tokens_per_s / self._level, most)]
        elif not disturbed and self._level == 1 and len(first) < _FIRST_ANSWERS:
            first += [tokens_per_s] if tokens_per_s > median(first) / _CHANGED else []
        return median(first)
