"""Verdict of a tuning run: the winner, settings too close to call, and how to decide between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.schema.base import Spread
from ggufspec.schema.text import as_budget
from ggufspec.settings.registry import DRAFTERS, parse_drafters
from ggufspec.tune.run import FEWEST, FINAL_SHARE, Tuning
from ggufspec.tune.space import difference

_SAME = 1.0
_FEW_ROUNDS = 3  # minimum repetitions to suggest
_MOST_ROUNDS = 60  # maximum repetitions to suggest; more are not worth the time


@dataclass(frozen=True, slots=True)
class TuneVerdict:
    """Verdict of a tuning run."""

    decided: bool  # True if the winner may be saved: the planned setting, or one clearly faster than it and target-only
    text: str  # the result, in sentences; empty if every setting failed
    close: tuple[int, ...] = ()  # indices of settings that trials do not distinguish from the winner
    advice: str = ""  # action that may settle the verdict; empty if decided


def tune_verdict(tuning: Tuning) -> TuneVerdict:
    """Return the verdict on the leading setting from the trials so far."""
    winner, first = tuning.winner(), tuning.experiment.first[0]
    if winner is None:
        return TuneVerdict(False, "")
    if len(tuning.experiment.space) == 1:
        return TuneVerdict(True, "It is the only setting that the options leave.")
    if len({kept.setting for kept in tuning.kept}) == 1:
        advice = f"{tuning.enough()} compares it with another" if tuning.experiment.budget_s else ""
        late = f": it {slower}" if (slower := tuning.slower()) else ""
        return TuneVerdict(False, f"Only the planned setting was measured{late}.", advice=advice)
    if tuning.measured() == [winner]:
        return TuneVerdict(True, "Every other setting that was measured failed.")
    others = dict.fromkeys((*tuning.standing(), *tuning.left_out()))
    close = tuple(index for index in others if index != winner and not _is_slower(tuning, index, winner))
    if tuning.rounds() and tuning.rounds() == tuning.uneven():
        advice = "another setting may win on an idle machine: rerun with --fresh when it is quiet"
        return TuneVerdict(False, "No verdict: the finalists never ran under similar loads.", close, advice)
    ties = f" {_capital(_names(tuning, close, winner))} may be as fast." if close else ""
    if winner == first:
        if close and len(tuning.rounds()) < FEWEST:
            text = f"Too few trials to tell the planned setting from {_names(tuning, close, winner)}."
            late = f": the first trial {slower}" if (slower := tuning.slower()) else ""
            return TuneVerdict(False, text, close, f"{_more_time(tuning)} may settle it{late}")
        return TuneVerdict(True, f"This is the planned setting: no other is clearly faster.{ties}", close)
    baselines = _baselines(tuning, winner)
    unclear = [index for index in baselines if not _is_gain(tuning.ratio(winner, index))]
    untold = close if len(tuning.rounds()) < FEWEST else tuning.left_out()
    unclear += [index for index in untold if index in close and index not in unclear]
    found = " and ".join(filter(None, (_gain(tuning, winner, index) for index in baselines)))
    if not unclear:
        failed = "" if tuning.experiment.first[0] in tuning.measured() else " The planned setting failed."
        return TuneVerdict(True, f"{_capital(found)}.{failed}{ties}" if found else f"{failed}{ties}".strip(), close)
    untried = [index for index in unclear if tuning.ratio(winner, index) is None]
    if untried:
        found = ", ".join(filter(None, (found, f"{_names(tuning, untried, winner)} had no trial side by side with it")))
    text = f"Too close to call: {found}."
    return TuneVerdict(False, text, tuple(dict.fromkeys((*unclear, *close))), _settles(tuning, winner, unclear))


def not_worth_it(tuning: Tuning) -> str:
    """Return a sentence on drafters that are clearly slower in all settings measured with them; otherwise empty."""
    space, winner = tuning.experiment.space, tuning.winner()
    if winner is None:
        return ""
    settings: dict[str, list[int]] = {}
    for index in tuning.measured():
        for name in parse_drafters(space[index].setting.drafter):
            settings.setdefault(name, []).append(index)
    slow = [
        DRAFTERS[name].label
        for name in DRAFTERS
        if name in settings and all(index != winner and _is_slower(tuning, index, winner) for index in settings[name])
    ]
    if not slow:
        return ""
    verb = f"The {slow[0]} is not" if len(slow) == 1 else f"Neither the {' nor the '.join(slow)} is"
    return f"{verb} worth it here: every setting with it was clearly slower."


def _baselines(tuning: Tuning, winner: int) -> list[int]:
    """Return the settings that a winner must beat: the planned one and, if it drafts, the fastest target-only one."""
    space, first = tuning.experiment.space, tuning.experiment.first[0]
    failed = {kept.setting for kept in tuning.kept if kept.failure}
    baselines = [first] if space[first].setting not in failed else []
    if space[winner].setting.drafted:
        target_only = (i for i, one in enumerate(space) if not one.setting.drafted and one.setting not in failed)
        fastest = tuning.target_only()
        baselines += [
            index for index in (next(target_only, None) if fastest is None else fastest,) if index is not None
        ]
    return list(dict.fromkeys(baselines))


def _is_slower(tuning: Tuning, index: int, than: int) -> bool:
    """Return whether a setting is slower: by its interval or, if never measured side by side, by the trials' noise."""
    ratio = tuning.ratio(than, index)
    if ratio is not None and len(ratio.samples) >= FEWEST:
        return ratio.ci95[0] > _SAME
    return tuning.search.is_clearly_slower(index, than)


def _is_gain(ratio: Spread | None) -> bool:
    return ratio is not None and len(ratio.samples) >= FEWEST and ratio.ci95[0] > _SAME


def _gain(tuning: Tuning, winner: int, baseline: int) -> str:
    ratio = tuning.ratio(winner, baseline)
    if ratio is None:
        return ""
    name, low, high = _name(tuning, baseline, winner), *ratio.ci95
    interval = f"95% interval {low:.2f} to {high:.2f}" if len(ratio.samples) >= FEWEST else "one trial each"
    space = tuning.experiment.space
    is_speedup = space[winner].setting.drafted and not space[baseline].setting.drafted
    text = f"speedup {ratio.median:.2f}× over" if is_speedup else f"{ratio.median:.2f}× as fast as"
    return f"{text} {name} ({interval})"


def _name(tuning: Tuning, index: int, winner: int) -> str:
    space, is_planned = tuning.experiment.space, index == tuning.experiment.first[0]
    if not space[index].setting.drafted and space[winner].setting.drafted:
        return "target-only, as planned" if is_planned else "target-only"
    changes = ", ".join(difference(space[winner].setting, space[index].setting))
    return "the planned setting" if is_planned else f"the same with {changes}"


def _names(tuning: Tuning, indices: Sequence[int], winner: int) -> str:
    shown = [_name(tuning, index, winner) for index in indices[:2]]
    more = len(indices) - len(shown)
    return " and ".join([*shown, f"{more} more"] if more else shown)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- how to settle it


def _more_time(tuning: Tuning, rounds: int = 0) -> str:
    """Return the option for a final round of ``rounds`` repetitions, or of the usual number if that is larger."""
    usual = tuning.experiment.repeats
    rounds = max(rounds, usual, _FEW_ROUNDS, len(tuning.rounds()) + 1)
    if tuning.experiment.budget_s is None:
        return f"-r {rounds}"
    final_s = rounds * tuning.round_s(tuning.finalists() or tuning.experiment.first[:2])
    whole_s = tuning.least_s() if rounds <= usual else final_s / FINAL_SHARE
    return f"--budget {as_budget(max(tuning.spent_s + final_s, whole_s))}"


def _settles(tuning: Tuning, winner: int, unclear: Sequence[int]) -> str:
    """Return the option for a final round whose intervals would exclude 1 if the ratios stay the same."""
    needed = 0.0
    for index in unclear:
        ratio = tuning.ratio(winner, index)
        if ratio is not None and len(ratio.samples) >= FEWEST:
            gain, half = math.log(ratio.median), math.log(ratio.ci95[1] / ratio.ci95[0]) / 2
            needed = max(needed, len(ratio.samples) * (half / max(gain, 1e-9)) ** 2)
    if needed > _MOST_ROUNDS:
        return "more trials will hardly tell them apart: they are about equally fast"
    return f"{_more_time(tuning, math.ceil(needed))} may settle it"
