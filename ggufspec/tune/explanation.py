"""Why tuning chose what it chose, in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ggufspec.bench.statistics import spread
from ggufspec.display import counted
from ggufspec.schema.base import Spread
from ggufspec.tune.space import DEFAULT_MICRO_BATCH, Candidate, difference

if TYPE_CHECKING:
    from ggufspec.tune.run import Tuning

_SAME = 1.0
_FEWEST = 3  # trials side by side, for an interval to say something
_MOST_EFFECTS = 8


def explanation(tuning: Tuning) -> list[str]:
    """Sentences that tell why this setting."""
    space, first = tuning.experiment.space, tuning.experiment.first[0]
    rows, winner = tuning.trials(), tuning.winner()
    failed, count = sum(row.tokens_per_s is None for row in rows), len(tuning.kept)
    said = [
        f"{len(rows)} of {len(space):,} settings {'was' if len(rows) == 1 else 'were'} measured, "
        f"{counted(count, 'trial')} in all"
        + (f", {tuning.resumed} of them by an earlier search" if tuning.resumed else "")
        + (f"; {failed} did not come through, and what needs more memory was left out." if failed else ".")
    ]
    if winner is None:
        return [*said, "None came through."]
    if tuning.stopped:
        said.append(f"The search ended since {tuning.stopped}.")
    said.append(
        f"The planner's predictions were off by a factor of {math.exp(tuning.search.error()):.2f} in the median; "
        "every measurement corrected them for all settings that share what it showed."
    )
    said += (f"{change}: {gain}." for change, gain in _effects(space, tuning.measured(), tuning.spread).items())
    best = space[winner].setting
    if winner == first:
        beaten = "beat it side by side" if tuning.rounds() else "that was measured beat it"
        said.append(
            f"What was planned is the fastest: no other setting {beaten}."
            if len(rows) > 1
            else "Only what was planned was measured."
        )
    elif first in tuning.measured():
        changed = ", ".join(difference(space[first].setting, best))
        said.append(f"Against what was planned the winner has: {changed}{_shown(tuning.ratio(winner, first))}.")
    alone = tuning.target_only()
    if not best.drafted:
        said.append("No draft pays here: the target alone is the fastest.")
    elif alone is not None:
        told = _shown(tuning.ratio(winner, alone), comma=" it is")
        said.append(f"Against the target alone at its fastest{told}." if told else "The target alone is slower.")
    prompts = {row.setting: row.prompt_tokens_per_s for row in rows}
    planned_speed, own_speed = prompts.get(space[first].setting), prompts.get(best)
    if best.ubatch_size != DEFAULT_MICRO_BATCH and planned_speed and own_speed:
        said.append(
            f"The micro-batch of {best.ubatch_size} makes room for layers; prompts are read at {own_speed:.0f} "
            f"tokens/s instead of {planned_speed:.0f}."
        )
    return said


def _shown(ratio: Spread | None, comma: str = ":") -> str:
    if ratio is None:
        return ""
    low, high = ratio.ci95
    if len(ratio.samples) < _FEWEST:
        return f"{comma} {ratio.median:.2f}× as fast, from too few trials for an interval"
    doubt = "" if low > _SAME or high < _SAME else ", which is within the noise"
    return f"{comma} {ratio.median:.2f}× as fast (95 % interval {low:.2f} to {high:.2f}){doubt}"


def _effects(space: Sequence[Candidate], measured: Sequence[int], spread_of: Callable[[int], Spread]) -> dict[str, str]:
    """Single changes, as far as two settings were measured that differ in nothing else: what each was worth."""
    found: dict[str, list[float]] = {}
    for left in sorted(measured):
        for right in sorted(measured):
            old, new = space[left].setting, space[right].setting
            changed = [key for key, value in asdict(old).items() if asdict(new)[key] != value]
            if len(changed) == 1 and left < right:
                words = difference(old, new)
                if words:
                    found.setdefault(f"{words[0].capitalize()} instead of {getattr(old, changed[0])}", []).append(
                        spread_of(right).median / spread_of(left).median
                    )
    return {change: f"{spread(ratios).median - 1:+.0%}" for change, ratios in list(found.items())[:_MOST_EFFECTS]}
