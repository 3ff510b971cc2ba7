"""What a tuning found, as its document, and why it chose what it chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ggufspec.bench.disturbed import repeated
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import machine, settings_of
from ggufspec.schema.base import Spread
from ggufspec.schema.text import counted
from ggufspec.schema.tune import TuneDocument, TunedSetting, TuneTrial
from ggufspec.settings.registry import DRAFTERS, drafters_label, parse_drafters
from ggufspec.tune.run import Measurement, Tuning
from ggufspec.tune.space import DEFAULT_MICRO_BATCH, Candidate, difference

_SAME = 1.0
FEWEST = 3  # trials side by side, for an interval to mean something
_MOST_EFFECTS = 8


def tune_document(tuning: Tuning, *, interrupted: bool = False) -> TuneDocument:
    """Everything that has been measured so far; nothing is saved yet."""
    rows = _trials(tuning)
    place = {row.setting: row.index for row in rows}
    space, first = tuning.experiment.space, tuning.experiment.first[0]
    winner = tuning.winner()

    def row(index: int | None) -> int | None:
        return None if index is None else place.get(space[index].setting)

    return TuneDocument(
        pair=tuning.experiment.pair,
        machine=machine(),
        settings=settings_of(tuning.experiment.spec)
        | {
            "space": len(space),
            "threshold": tuning.experiment.threshold,
            "budget_s": tuning.experiment.budget_s,
            "repeats": tuning.experiment.repeats,
            "results": str(tuning.log.path),
        },
        trials=tuple(rows),
        winner=row(winner),
        baseline=row(first),
        target_only=row(tuning.target_only()),
        gain=tuning.ratio(winner, first) if winner is not None and winner != first else None,
        stopped=tuning.stopped,
        saved=None,
        explanation=tuple(explanation(tuning)),
        notes=(*tuning.experiment.notes, *tuning.log.notes, *repeated(tuning.tries().values()), *_uneven(tuning)),
        interrupted=interrupted,
    )


def _uneven(tuning: Tuning) -> tuple[str, ...]:
    """Whether repetitions of the final do not count, or should not."""
    uneven = tuning.uneven()
    if not uneven:
        return ()
    which = f"{counted(len(uneven), 'repetition')} of the final"
    if uneven == tuning.rounds():
        return (f"in {which}, all there are, the finalists met different loads: tune again on an idle machine",)
    return (f"{which} {'does' if len(uneven) == 1 else 'do'} not count: the finalists met different loads",)


def _trials(tuning: Tuning) -> list[TuneTrial]:
    """A row for each setting, in the order in which they were first measured."""
    rows: dict[TunedSetting, list[Measurement]] = {}
    for kept in tuning.kept:
        rows.setdefault(kept.setting, []).append(kept)
    made = []
    for index, (setting, mine) in enumerate(rows.items()):
        speeds, before = tuning.speeds(setting)
        prompts = [kept.prompt_tokens_per_s for kept in mine if kept.prompt_tokens_per_s]
        made.append(
            TuneTrial(
                index,
                setting,
                mine[0].predicted_tokens_per_s,
                spread(speeds) if speeds else None,
                spread(prompts).median if prompts else None,
                sum(kept.seconds for kept in mine),
                mine[0].why,
                next((kept.failure for kept in mine if kept.failure), None),
                tuple(before),
            )
        )
    return made


def explanation(tuning: Tuning) -> list[str]:
    """Why this setting, a sentence each."""
    space, first = tuning.experiment.space, tuning.experiment.first[0]
    rows, winner = _trials(tuning), tuning.winner()
    failed, count = sum(row.tokens_per_s is None for row in rows), len(tuning.kept)
    sentences = [
        f"{len(rows)} of {len(space):,} settings {'was' if len(rows) == 1 else 'were'} measured, "
        f"{counted(count, 'trial')} in all"
        + (f", {tuning.resumed} of them by an earlier search" if tuning.resumed else "")
        + (f"; {failed} failed, and settings that need more memory were left out." if failed else ".")
    ]
    if winner is None:
        return [*sentences, "All failed."]
    if tuning.stopped:
        sentences.append(f"The search ended: {tuning.stopped}.")
    sentences.append(
        f"The planner's predictions were off by a factor of {math.exp(tuning.search.error()):.2f} in the median; "
        "every measurement corrected them for all similar settings."
    )
    sentences += (f"{change}: {gain}." for change, gain in _effects(space, tuning.measured(), tuning.spread).items())
    best = space[winner].setting
    if winner == first:
        beaten = "beat it side by side" if tuning.rounds() else "that was measured beat it"
        sentences.append(
            f"What was planned is the fastest: no other setting {beaten}."
            if len(rows) > 1
            else "Only what was planned was measured."
        )
    elif first in tuning.measured():
        changed = ", ".join(difference(space[first].setting, best))
        sentences.append(
            f"Against what was planned the winner has: {changed}{_ratio_text(tuning.ratio(winner, first))}."
        )
    alone = tuning.target_only()
    sentences += filter(None, [not_worth_it(rows, best)])
    if best.drafted and alone is not None:
        ratio = _ratio_text(tuning.ratio(winner, alone), comma=" it is")
        sentences.append(f"Against the fastest target-only setting{ratio}." if ratio else "Target-only is slower.")
    prompts = {row.setting: row.prompt_tokens_per_s for row in rows}
    planned_speed, own_speed = prompts.get(space[first].setting), prompts.get(best)
    if best.ubatch_size != DEFAULT_MICRO_BATCH and planned_speed and own_speed:
        sentences.append(
            f"The micro-batch of {best.ubatch_size} makes room for layers; prompts are processed at {own_speed:.0f} "
            f"tokens/s instead of {planned_speed:.0f}."
        )
    return sentences


def not_worth_it(trials: Sequence[TuneTrial], best: TunedSetting) -> str:
    """Which drafters were measured and are not in the best setting, in a sentence; empty without any."""
    measured = {name for trial in trials if trial.tokens_per_s for name in parse_drafters(trial.setting.drafter)}
    left = [DRAFTERS[name].label for name in DRAFTERS if name in measured - {*parse_drafters(best.drafter)}]
    if not left:
        return ""
    without = f"the {drafters_label(best.drafter)} alone is faster" if best.drafted else "target-only is the fastest"
    verb = f"The {left[0]} is not" if len(left) == 1 else f"Neither the {' nor the '.join(left)} is"
    return f"{verb} worth it here: {without}."


def _ratio_text(ratio: Spread | None, comma: str = ":") -> str:
    if ratio is None:
        return ""
    low, high = ratio.ci95
    if len(ratio.samples) < FEWEST:
        return f"{comma} {ratio.median:.2f}× as fast, from too few trials for an interval"
    doubt = "" if low > _SAME or high < _SAME else ", within the noise"
    return f"{comma} {ratio.median:.2f}× as fast (95 % interval {low:.2f} to {high:.2f}){doubt}"


def _effects(space: Sequence[Candidate], measured: Sequence[int], spread_of: Callable[[int], Spread]) -> dict[str, str]:
    """The effect of single changes, where two settings were measured that differ in nothing else."""
    found: dict[str, list[float]] = {}
    for left in sorted(measured):
        for right in sorted(measured):
            old, new = space[left].setting, space[right].setting
            others = asdict(new)  # the load mode follows the placement
            changed = [key for key, value in asdict(old).items() if others[key] != value and key != "load_mode"]
            if len(changed) == 1 and left < right:
                names = difference(old, new)
                if names:
                    before = str(getattr(old, changed[0]))
                    before = drafters_label(before) if changed[0] == "drafter" else before
                    change = f"{names[0][0].upper()}{names[0][1:]} instead of {before}"
                    found.setdefault(change, []).append(spread_of(right).median / spread_of(left).median)
    return {change: f"{spread(ratios).median - 1:+.0%}" for change, ratios in list(found.items())[:_MOST_EFFECTS]}
