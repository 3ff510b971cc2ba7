"""The search for the fastest setting with real trials, each in a child process; every one is kept as it comes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ggufspec.bench import trial
from ggufspec.bench.attempt import Attempt, attempt
from ggufspec.bench.journal import Journal, key_of
from ggufspec.bench.stats import paired_ratios, spread
from ggufspec.bench.tuning import Done, Next, Search
from ggufspec.bench.tuning_space import DEFAULT_MICRO_BATCH, Candidate, difference
from ggufspec.bench.versus import machine, settings_of, speed
from ggufspec.errors import UsageError
from ggufspec.reports.document import Failure, Spread, TuneDocument, TunedSetting, TuneTrial

JOURNAL = "ggufspec/tune-journal@1"
_LOAD_BYTES_PER_S = 1e9  # a guess, until something was loaded
_MEMORY_WORDS = ("memory", "alloc", "no context of", "cannot be loaded", "buffer")
_SAME = 1.0
_FINAL_SHARE = 0.4  # of the budget, that the final may keep back
_FEWEST = 3  # trials side by side, for an interval to say something
_MOST_REPEATED = 2  # times the repetitions that were asked for, where leaders overlap
_FINAL = "final"  # the journal's key of the finalists; trials are under their numbers


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to tune.

    Args:
        pair: as :meth:`ggufspec.pairs.profile.Pair.describe` tells of it.
        spec: a trial; its options are those of the setting.
        space: the settings.
        first: indices of the planner's choices: its first one, and its target alone.
        threshold: expected gain, as a share, that is worth a trial.
        budget_s: seconds for all trials together, those of an earlier search that goes on too; None: no limit.
        repeats: trials of each finalist in the end, interleaved.
        most: trials of the search at most.
        notes: what is to be said with the results.
        verbose: show llama.cpp's log.
    """

    pair: dict[str, Any]
    spec: trial.Spec
    space: tuple[Candidate, ...]
    first: tuple[int, ...]
    threshold: float = 0.001
    budget_s: float | None = None
    repeats: int = 3
    most: int = 60
    notes: tuple[str, ...] = ()
    verbose: bool = False

    def facts(self) -> list[Any]:
        """What the measurements belong to: files, prompts, what is fixed, this machine and its versions."""
        spec = replace(self.spec, options=type(self.spec.options)(), stream=False)
        plain = TypeAdapter(trial.Spec).dump_python(spec, mode="json")
        fixed = TypeAdapter(type(spec.options)).dump_python(
            replace(self.spec.options, threads=0, micro_batch=0, drafter="both", draft_policy="adaptive"),
            mode="json",
        )
        files = [_identity(path) for path in (spec.target, spec.draft) if path is not None]
        return [plain, fixed, files, machine()]


def _identity(path: Path) -> list[Any]:
    seen = path.stat()
    return [str(path.resolve()), seen.st_size, seen.st_mtime_ns]


def journal_path(folder: Path, experiment: Experiment) -> Path:
    """Where an experiment's measurements are kept in the folder of results."""
    return folder / f"tune-{experiment.spec.target.stem}-{key_of(experiment.facts())[:12]}.jsonl"


@dataclass(frozen=True, slots=True)
class Kept:
    """One trial as the journal has it."""

    setting: TunedSetting
    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    seconds: float
    predicted_tokens_per_s: float
    why: str
    repetition: int = 0  # of the final; 0 is the search
    failure: Failure | None = None


_KEPT = TypeAdapter(Kept)


@dataclass(frozen=True, slots=True)
class Now:
    """How far a tuning is, for who watches: what is being measured, and seconds spent of the budget."""

    doing: str
    spent_s: float


Try = Callable[[trial.Spec], Attempt]
Watch = Callable[["Tuning", Now], None]


@dataclass
class Tuning:
    """A search under way. :meth:`run` may be interrupted; :meth:`document` then tells of what is there."""

    experiment: Experiment
    journal: Journal
    attempt: Try | None = None
    clock: Callable[[], float] = time.monotonic
    kept: list[Kept] = field(default_factory=list, init=False)
    stopped: str = ""
    resumed: int = 0
    _spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.search = Search(
            self.experiment.space, self.experiment.first, self.experiment.threshold, self.experiment.most
        )
        self._index = {one.setting: index for index, one in enumerate(self.experiment.space)}
        while (value := self.journal.get(str(len(self.kept)))) is not None:
            try:
                self._take(_KEPT.validate_python(value))
            except ValidationError:
                break
        self.resumed = len(self.kept)

    def run(self, watch: Watch) -> None:
        """Search, then measure the finalists interleaved.

        Raises:
            UsageError: the budget is too short for one trial.
            GgufspecError: results cannot be kept.
            KeyboardInterrupt: Ctrl-C.
        """
        self._check_budget()
        while not self._finals_begun:
            asked = self.search.ask()
            if isinstance(asked, Done):
                self.stopped = asked.why
                break
            if self.kept and self._left_s < self._trial_s(asked.index) + self._final_s():
                self.stopped = f"the budget of {_minutes(self.experiment.budget_s or 0)} was spent"
                break
            self._measure(asked, 0, watch)
        self._final(watch)
        watch(self, Now("", self.spent_s))

    @property
    def spent_s(self) -> float:
        """Seconds of all trials."""
        return self._spent_s

    def _final(self, watch: Watch) -> None:
        finalists = self.finalists()
        if len(finalists) < 2:
            return
        if self.journal.get(_FINAL) is None:
            self.journal.put(_FINAL, [asdict(self.experiment.space[index].setting) for index in finalists])
        repetition = 1
        while repetition <= self.experiment.repeats or (
            repetition <= _MOST_REPEATED * self.experiment.repeats and self._unsure(finalists)
        ):
            for place in range(len(finalists)):
                index = finalists[(place + repetition - 1) % len(finalists)]
                if self._has(index, repetition):
                    continue
                if self._left_s < self._trial_s(index):
                    self.stopped += "; the final had no time for all of its trials"
                    return
                expected, _ = self.search.expected(index)
                self._measure(Next(index, expected, 0.0, f"final, repetition {repetition}"), repetition, watch)
            repetition += 1

    def _unsure(self, finalists: list[int]) -> bool:
        """Whether the fastest of the final may not be: its gain over another one may be none."""
        best = self.winner()
        ratios = [self.ratio(best, index) for index in finalists if index != best] if best is not None else []
        return any(ratio is not None and ratio.ci95[0] <= _SAME for ratio in ratios)

    def finalists(self) -> list[int]:
        """Settings that are measured again: those that lead, the planner's choice and the fastest without a draft.

        Once the final has begun they stay the same, after an interruption too.
        """
        if (begun := self.journal.get(_FINAL)) is not None:
            settings = TypeAdapter(list[TunedSetting]).validate_python(begun)
            return [self._index[setting] for setting in settings if setting in self._index]
        measured = self._measured()
        others = [index for index in self.experiment.first[:1] if index in measured]
        alone = [index for index in measured if not self.experiment.space[index].setting.drafted]
        others += sorted(alone, key=lambda index: -self.search.expected(index)[0])[:1]
        return list(dict.fromkeys([*self.search.leaders(), *others]))

    # ---- one trial

    def _measure(self, asked: Next, repetition: int, watch: Watch) -> None:
        candidate = self.experiment.space[asked.index]
        said = ", ".join(difference(self.experiment.space[self.experiment.first[0]].setting, candidate.setting))
        watch(self, Now(f"{asked.why}" if repetition else said or "the planner's choice", self.spent_s))
        began = self.clock()
        spec = replace(
            self.experiment.spec,
            options=candidate.options,
            draft=self.experiment.spec.draft if candidate.options.needs_draft else None,
        )
        tried = (self.attempt or self._attempt)(spec)
        seconds = self.clock() - began
        result = tried.result
        kept = Kept(
            candidate.setting,
            speed(result) if result else None,
            _prompt_speed(result) if result else None,
            seconds,
            asked.predicted_tokens_per_s,
            asked.why,
            repetition,
            tried.failure,
        )
        self.journal.put(str(len(self.kept)), _KEPT.dump_python(kept, mode="json"))
        self._take(kept)

    def _attempt(self, spec: trial.Spec) -> Attempt:
        return attempt(spec, verbose=self.experiment.verbose)

    def _take(self, kept: Kept) -> None:
        """Learn from a trial, this search's or an earlier one's."""
        self.kept.append(kept)
        self._spent_s += kept.seconds
        index = self._index.get(kept.setting)
        if index is None:  # the space is another now: less memory is free, say
            return
        if kept.failure is not None:
            words = f"{kept.failure.error} {kept.failure.hint}".lower()
            of_memory = True if any(word in words for word in _MEMORY_WORDS) else None
            self.search.tell(index, None, of_memory=of_memory)
        else:
            self.search.tell(index, kept.tokens_per_s)

    def _has(self, index: int, repetition: int) -> bool:
        setting = self.experiment.space[index].setting
        return any(kept.repetition == repetition and kept.setting == setting for kept in self.kept)

    def _measured(self) -> list[int]:
        found = [self._index[k.setting] for k in self.kept if k.tokens_per_s and k.setting in self._index]
        return list(dict.fromkeys(found))

    @property
    def _finals_begun(self) -> bool:
        begun = self.journal.get(_FINAL) is not None
        if begun and not self.stopped:
            self.stopped = "it had come to its final before"
        return begun

    # ---- time

    @property
    def _left_s(self) -> float:
        budget = self.experiment.budget_s
        return float("inf") if budget is None else budget - self.spent_s

    def _tokens(self) -> int:
        return len(self.experiment.spec.prompts) * self.experiment.spec.max_tokens

    def _trial_s(self, index: int) -> float:
        """Seconds that a trial of a setting will take: what all take, and its tokens."""
        expected, _ = self.search.expected(index)
        fixed = [kept.seconds - self._tokens() / kept.tokens_per_s for kept in self.kept if kept.tokens_per_s]
        if not fixed:
            files = (self.experiment.spec.target, self.experiment.spec.draft)
            fixed = [sum(path.stat().st_size for path in files if path) / _LOAD_BYTES_PER_S]
        return max(0.0, sum(fixed) / len(fixed)) + self._tokens() / expected

    def _final_s(self) -> float:
        needed = self.experiment.repeats * sum(self._trial_s(index) for index in self.finalists())
        return min(needed, _FINAL_SHARE * (self.experiment.budget_s or math.inf))

    def _check_budget(self) -> None:
        budget, first = self.experiment.budget_s, self.experiment.first[0]
        if budget is None or self.kept:
            return
        needed = self._trial_s(first)
        if needed > budget:
            raise UsageError(
                f"a budget of {_minutes(budget)} is too short for one trial, which takes about {_minutes(needed)}",
                f"--budget {max(1, round(20 * needed / 60))}m is enough for some twenty, or fewer tokens with -n",
            )

    # ---- the answer

    def winner(self) -> int | None:
        """Index in the space of the setting that won; the planner's own unless another one is faster in the median."""
        measured = self._measured()
        if not measured:
            return None
        finals = [index for index in measured if self._has(index, 1)]
        best = max(finals or measured, key=lambda index: self._spread(index).median)
        first = self.experiment.first[0]
        if first in (finals or measured) and best != first:
            return best if self._spread(best).median > self._spread(first).median else first
        return best

    def _spread(self, index: int) -> Spread:
        """Of the final's trials where there are any: what a search chose for its luck is measured anew there."""
        setting = self.experiment.space[index].setting
        mine = [kept for kept in self.kept if kept.setting == setting and kept.tokens_per_s]
        finals = [kept for kept in mine if kept.repetition]
        return spread([kept.tokens_per_s or 0.0 for kept in finals or mine])

    def ratio(self, index: int, rival: int) -> Spread | None:
        """By how much one setting is faster than another, repetition by repetition of the final."""
        first, second = (
            {
                kept.repetition: kept.tokens_per_s
                for kept in self.kept
                if kept.repetition and kept.tokens_per_s and kept.setting == self.experiment.space[i].setting
            }
            for i in (index, rival)
        )
        both = sorted(first.keys() & second.keys())
        return paired_ratios([first[r] for r in both], [second[r] for r in both]) if both else None

    @property
    def compared(self) -> bool:
        """Whether settings were held against each other: else nothing is worth keeping."""
        return len({kept.setting for kept in self.kept}) > 1 or len(self.experiment.space) == 1

    def trials(self) -> list[TuneTrial]:
        """A row for each setting, in the order in which they were first measured."""
        rows: dict[TunedSetting, list[Kept]] = {}
        for kept in self.kept:
            rows.setdefault(kept.setting, []).append(kept)
        made = []
        for index, (setting, mine) in enumerate(rows.items()):
            speeds = [kept.tokens_per_s for kept in mine if kept.tokens_per_s]
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
                    None if speeds else mine[0].failure,
                )
            )
        return made

    def document(self, *, saved: str | None = None, interrupted: bool = False) -> TuneDocument:
        """Everything that has been measured so far."""
        rows = self.trials()
        place = {row.setting: row.index for row in rows}
        space, first = self.experiment.space, self.experiment.first[0]
        winner = self.winner()
        alone = [index for index in self._measured() if not space[index].setting.drafted]
        fastest_alone = max(alone, key=lambda index: self._spread(index).median, default=None)

        def row(index: int | None) -> int | None:
            return None if index is None else place.get(space[index].setting)

        return TuneDocument(
            pair=self.experiment.pair,
            machine=machine(),
            settings=settings_of(self.experiment.spec)
            | {
                "space": len(space),
                "threshold": self.experiment.threshold,
                "budget_s": self.experiment.budget_s,
                "repeats": self.experiment.repeats,
                "results": str(self.journal.path),
            },
            trials=tuple(rows),
            winner=row(winner),
            baseline=row(first),
            target_only=row(fastest_alone),
            gain=self.ratio(winner, first) if winner is not None and winner != first else None,
            stopped=self.stopped,
            saved=saved,
            explanation=tuple(self.explain(winner, fastest_alone)),
            notes=(*self.experiment.notes, *self.journal.notes),
            interrupted=interrupted,
        )

    def explain(self, winner: int | None, alone: int | None) -> list[str]:
        """Sentences that tell why this setting."""
        space, first = self.experiment.space, self.experiment.first[0]
        rows = self.trials()
        failed = sum(row.failure is not None for row in rows)
        said = [
            f"{len(rows)} of {len(space):,} settings {'was' if len(rows) == 1 else 'were'} measured, "
            f"{len(self.kept)} trial{'s' * (len(self.kept) != 1)} in all"
            + (f", {self.resumed} of them by an earlier search" if self.resumed else "")
            + (f"; {failed} did not come through, and what needs more memory was left out." if failed else ".")
        ]
        if winner is None:
            return [*said, "None came through."]
        if self.stopped:
            said.append(f"The search ended since {self.stopped}.")
        said.append(
            f"The planner's predictions were off by a factor of {math.exp(self.search.error()):.2f} in the median; "
            "every measurement corrected them for all settings that share what it showed."
        )
        measured = set(self._measured())
        for change, pairs in _effects(space, sorted(measured), self._spread).items():
            said.append(f"{change}: {pairs}.")
        best = space[winner].setting
        if winner == first:
            said.append(
                "What was planned is the fastest: no other setting beat it side by side."
                if len(rows) > 1
                else "Only what was planned was measured."
            )
        elif first in measured:
            changed = ", ".join(difference(space[first].setting, best))
            gain = self.ratio(winner, first)
            said.append(f"Against what was planned the winner has: {changed}{_shown(gain)}.")
        if not best.drafted:
            said.append("No draft pays here: the target alone is the fastest.")
        elif alone is not None:
            told = _shown(self.ratio(winner, alone), comma=" it is")
            said.append(f"Against the target alone at its fastest{told}." if told else "The target alone is slower.")
        prompts = {row.setting: row.prompt_tokens_per_s for row in rows}
        planned_speed, own_speed = prompts.get(space[first].setting), prompts.get(best)
        if best.micro_batch != DEFAULT_MICRO_BATCH and planned_speed and own_speed:
            said.append(
                f"The micro-batch of {best.micro_batch} makes room for layers; prompts are read at {own_speed:.0f} "
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


def _effects(space: tuple[Candidate, ...], measured: list[int], spread_of: Callable[[int], Spread]) -> dict[str, str]:
    """Single changes, as far as two settings were measured that differ in nothing else: what each was worth."""
    found: dict[str, list[float]] = {}
    for left in measured:
        for right in measured:
            old, new = space[left].setting, space[right].setting
            changed = [key for key, value in asdict(old).items() if asdict(new)[key] != value]
            if len(changed) == 1 and left < right:
                words = difference(old, new)
                if words:
                    found.setdefault(f"{words[0].capitalize()} instead of {getattr(old, changed[0])}", []).append(
                        spread_of(right).median / spread_of(left).median
                    )
    return {change: f"{spread(ratios).median - 1:+.0%}" for change, ratios in list(found.items())[:8]}


def _prompt_speed(result: trial.Result) -> float:
    statistics = [answer.statistics for answer in result.answers]
    return sum(s.prompt_tokens for s in statistics) / max(sum(s.prompt_s for s in statistics), 1e-9)


def _minutes(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"
    return f"{seconds / 60:.0f} min"
