"""Result of a tuning run as a document, with an explanation of the choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ggufspec.bench.disturbed import repeated_note
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import machine_and_versions, used_settings
from ggufspec.hardware.host import BUSY_CPUS
from ggufspec.schema.base import Spread
from ggufspec.schema.text import counted
from ggufspec.schema.tune import TuneDocument, TunedSetting, TuneTrial
from ggufspec.settings.registry import drafters_label
from ggufspec.tune.run import LoggedTrial, Tuning
from ggufspec.tune.space import DEFAULT_MICRO_BATCH, TuneCandidate, difference
from ggufspec.tune.verdict import TuneVerdict, not_worth_it, tune_verdict

_MOST_EFFECTS = 8


def tune_document(tuning: Tuning, *, interrupted: bool = False) -> TuneDocument:
    """Return everything measured so far, before a winner is saved."""
    rows = _trials(tuning)
    place = {row.setting: row.index for row in rows}
    space, first = tuning.experiment.space, tuning.experiment.first[0]
    winner, target_only, verdict = tuning.winner(), tuning.target_only(), tune_verdict(tuning)

    def row(index: int | None) -> int | None:
        return None if index is None else place.get(space[index].setting)

    return TuneDocument(
        pair=tuning.experiment.pair,
        machine=machine_and_versions(),
        settings=used_settings(tuning.experiment.spec)
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
        target_only=row(target_only),
        gain=tuning.ratio(winner, first) if winner is not None and winner != first else None,
        speedup=tuning.ratio(winner, target_only) if winner is not None and target_only not in (None, winner) else None,
        decided=verdict.decided,
        close=tuple(found for index in verdict.close if (found := row(index)) is not None),
        verdict=" ".join(filter(None, (verdict.text, not_worth_it(tuning)))),
        advice=verdict.advice,
        stopped=tuning.stopped,
        saved=None,
        explanation=tuple(explanation(tuning, verdict)),
        notes=(
            *tuning.experiment.notes,
            *tuning.log.notes,
            *repeated_note(tuning.tries().values()),
            *_disturbed(tuning),
        ),
        interrupted=interrupted,
    )


def _disturbed(tuning: Tuning) -> tuple[str, ...]:
    """Return notes on repetitions of the final round that do not count, and on disturbed trials that do count."""
    uneven, notes = tuning.uneven(), list[str]()
    if uneven and uneven != tuning.rounds():
        verb = "does" if len(uneven) == 1 else "do"
        which = f"{counted(len(uneven), 'repetition')} of the final"
        notes.append(f"{which} {verb} not count: the finalists ran under different loads")
    others = sorted(tuning.loads())
    if others and (middle := others[len(others) // 2]) >= BUSY_CPUS:
        notes.append(
            f"the verdict rests on trials during which other programs used {middle:.1f} CPUs: "
            "another setting may win on an idle machine"
        )
    return tuple(notes)


def _trials(tuning: Tuning) -> list[TuneTrial]:
    """Return a row per setting, in the order of their first trials."""
    rows: dict[TunedSetting, list[LoggedTrial]] = {}
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


def explanation(tuning: Tuning, verdict: TuneVerdict) -> list[str]:
    """Return the reasons for the chosen setting, one sentence each."""
    space, first = tuning.experiment.space, tuning.experiment.first[0]
    rows, winner = _trials(tuning), tuning.winner()
    failed, count = sum(row.tokens_per_s is None for row in rows), len(tuning.kept)
    sentences = [
        f"{len(rows)} of {len(space):,} settings {'was' if len(rows) == 1 else 'were'} measured, "
        f"{counted(count, 'trial')} in all"
        + (f", {tuning.resumed} of them in an earlier search" if tuning.resumed else "")
        + (f"; {failed} failed, and settings that need more memory were skipped." if failed else ".")
    ]
    if winner is None:
        return [*sentences, "All failed."]
    if tuning.stopped:
        sentences.append(f"The search ended: {tuning.stopped}.")
    sentences.append(
        f"The planner's predictions were off by a median factor of {math.exp(tuning.search.error()):.2f}; "
        "every measurement corrected them for all similar settings."
    )
    sentences += (f"{change}: {gain}." for change, gain in _effects(space, tuning.measured(), tuning.spread).items())
    best = space[winner].setting
    if winner != first:
        changed = ", ".join(difference(space[first].setting, best))
        lead = "The winner" if verdict.decided else "The leading setting"
        sentences.append(f"{lead} differs from the planned setting in: {changed}.")
    sentences += filter(None, [verdict.text, not_worth_it(tuning)])
    prompts = {row.setting: row.prompt_tokens_per_s for row in rows}
    planned_speed, own_speed = prompts.get(space[first].setting), prompts.get(best)
    if best.ubatch_size != DEFAULT_MICRO_BATCH and planned_speed and own_speed:
        sentences.append(
            f"The micro-batch of {best.ubatch_size} frees memory for layers; prompts are processed at {own_speed:.0f} "
            f"tokens/s instead of {planned_speed:.0f}."
        )
    return sentences


def _effects(
    space: Sequence[TuneCandidate], measured: Sequence[int], spread_of: Callable[[int], Spread]
) -> dict[str, str]:
    """Return the effects of single changes, from pairs of measured settings that differ in one value."""
    found: dict[str, list[float]] = {}
    for left in sorted(measured):
        for right in sorted(measured):
            old, new = space[left].setting, space[right].setting
            others = asdict(new)  # load_mode is ignored, because it follows from the placement
            changed = [key for key, value in asdict(old).items() if others[key] != value and key != "load_mode"]
            if len(changed) == 1 and left < right:
                names = difference(old, new)
                if names:
                    before = str(getattr(old, changed[0]))
                    before = drafters_label(before) if changed[0] == "drafter" else before
                    change = f"{names[0][0].upper()}{names[0][1:]} instead of {before}"
                    found.setdefault(change, []).append(spread_of(right).median / spread_of(left).median)
    return {change: f"{spread(ratios).median - 1:+.0%}" for change, ratios in list(found.items())[:_MOST_EFFECTS]}
