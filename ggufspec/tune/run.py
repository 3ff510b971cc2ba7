"""Search for the fastest setting with trials in child processes, followed by a final round of the leaders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ggufspec import child
from ggufspec.bench import trial
from ggufspec.bench.disturbed import are_alike, to_repeat
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_mean, spread
from ggufspec.bench.summary import machine_and_versions, trial_speed
from ggufspec.bench.trial import TrialAttempt, attempt
from ggufspec.bench.trials import file_identity, order_of_trials
from ggufspec.errors import UsageError
from ggufspec.files.write import as_file_name
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH
from ggufspec.schema import codec
from ggufspec.schema.base import Failure, Spread
from ggufspec.schema.text import as_budget, counted, duration, number
from ggufspec.schema.tune import TunedSetting
from ggufspec.tune.search import NextTrial, SearchEnd, TuneSearch
from ggufspec.tune.space import TuneCandidate, difference

LOG = "ggufspec/tune-log@1"
_LOAD_BYTES_PER_S = 1e9  # load speed assumed until a trial has been measured
_MEMORY_WORDS = ("out of memory", "alloc", "no context of", "cannot be loaded", "buffer")
_START_S = 1.0  # seconds to start a child process
_LATE = 1.25  # ratio of measured to predicted seconds above which the verdict mentions that the first trial was slow
_LETTERS = 4  # assumed characters per token
_READ = 8  # prompt tokens processed in the time of one generated token; assumed until a trial has been measured
_SAME = 1.0
FINAL_SHARE = 0.4  # share of the budget reserved for the final round
_FEWEST_FINALISTS, _BASELINES = 2, 3  # baselines: the best, target-only, and the planned setting
FEWEST = 2  # minimum repetitions of the final round for an interval
_MORE, _MORE_IN_BUDGET = 1, 99  # maximum extra repetitions while first place is undecided, as a multiple of repeats
_FINAL = "final"  # key of the final round in the log; a trial's key is its number


@dataclass(frozen=True, slots=True)
class TuneExperiment:
    """Description of a tuning run."""

    pair: dict[str, Any]  # description from ``Pair.describe``
    spec: trial.TrialJob  # template for the trials; each setting replaces its options
    space: tuple[TuneCandidate, ...]
    first: tuple[int, ...]  # indices of the planner's choice, then of its other option (with or without a draft)
    threshold: float = 0.001  # minimum expected relative gain of a trial
    budget_s: float | None = None  # seconds for all trials, including a resumed search's; None for no limit
    repeats: int = 3  # interleaved trials of each finalist
    most: int = 60  # maximum number of settings to measure
    notes: tuple[str, ...] = ()  # notes for the document
    verbose: bool = False  # True to show llama.cpp's log

    def facts(self) -> list[Any]:
        """Return everything that measurements depend on: files, prompts, fixed options, this machine and versions."""
        spec = replace(self.spec, options=type(self.spec.options)(), stream=False)
        fixed = codec.dump(
            replace(
                self.spec.options,
                threads=0,
                ubatch_size=0,
                drafters=("draft", "lookup"),
                draft_policy="adaptive",
                draft_max=1,
                op_offload_min_batch=OP_OFFLOAD_MIN_BATCH,
            )
        )
        files = [file_identity(path) for path in (spec.target, spec.draft) if path is not None]
        return [codec.dump(spec), fixed, files, machine_and_versions()]

    def rules(self) -> str:
        """Return a key made from the search space and limits; a finished search continues if the key changes."""
        settings = [repr(one.setting) for one in self.space]
        return key_of(settings, [settings[index] for index in self.first], self.threshold, self.budget_s, self.most)


def log_path(folder: Path, experiment: TuneExperiment) -> Path:
    """Return the path of an experiment's run log."""
    return folder / f"tune-{as_file_name(experiment.spec.target.stem)}-{key_of(experiment.facts())[:12]}.jsonl"


@dataclass(frozen=True, slots=True)
class LoggedTrial:
    """Trial in the run log."""

    setting: TunedSetting
    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    seconds: float
    predicted_tokens_per_s: float
    why: str
    repetition: int = 0  # number of the repetition in the final round; 0 in the search
    failure: Failure | None = None
    others_cpus: float | None = None  # CPUs that other programs used; None if the trial failed or an old version ran it


@dataclass(frozen=True, slots=True)
class LoggedFinal:
    """End of a search in the run log, and its finalists."""

    settings: tuple[TunedSetting, ...]  # settings of the finalists
    above: int  # last repetition number of an earlier final round; the numbering continues from there
    searched: int  # number of trials in the search
    rules: str  # key of the search space and limits; if it changes (e.g. by a larger budget), the search continues
    stopped: str  # reason why the search ended
    left_out: tuple[TunedSetting, ...] = ()  # settings that would have been finalists if the budget had allowed


Try = Callable[[trial.TrialJob], TrialAttempt]
Show = Callable[[str, float], None]


@dataclass
class Tuning:
    """Search in progress; :meth:`run` resumes from the log, :mod:`ggufspec.tune.document` reports the results."""

    experiment: TuneExperiment
    log: RunLog
    attempt: Try | None = None
    clock: Callable[[], float] = time.monotonic
    kept: list[LoggedTrial] = field(default_factory=list, init=False)
    stopped: str = field(default="", init=False)
    resumed: int = field(default=0, init=False)
    spent_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.search = TuneSearch(
            self.experiment.space, self.experiment.first, self.experiment.threshold, self.experiment.most
        )
        self._index = {one.setting: index for index, one in enumerate(self.experiment.space)}
        self._by_round: dict[tuple[TunedSetting, int], LoggedTrial] = {}
        self._rules = self.experiment.rules()
        while (kept := self.log.get(str(len(self.kept)), LoggedTrial)) is not None:
            self._learn(kept)
        self.resumed = len(self.kept)
        self._final = self.log.get(_FINAL, LoggedFinal)

    def run(self, show: Show) -> None:
        """Search, then measure the finalists interleaved.

        ``show`` receives the current trial and the seconds left in the budget.

        Raises:
            UsageError: the budget is too short for one trial.
            GgufspecError: results cannot be saved.
            KeyboardInterrupt: Ctrl-C.
        """
        self._check_budget()
        before = self._final
        if before is not None and (before.rules, before.searched) == (self._rules, self._searched):
            self.stopped = before.stopped
        else:
            self._search(show)
        self._side_by_side(show)

    def _search(self, show: Show) -> None:
        while True:
            proposal = (self._again() if self.search.tried_first else None) or self.search.suggest()
            if isinstance(proposal, SearchEnd):
                self.stopped = proposal.why
                break
            if self.search.trials and self._left_s < self._trial_s(proposal.index) + self._final_s():
                budget = duration(self.experiment.budget_s or 0)
                self.stopped = f"another trial and the final would not fit in {budget}"
                break
            self._measure(proposal, 0, show)
        self._end()

    def tries(self) -> dict[int, list[float]]:
        """Return the CPUs that other programs used in each search trial, for every setting that succeeded."""
        found: dict[int, list[float]] = {}
        for kept in self.kept:
            index, counts = self._index.get(kept.setting), self._by_round[kept.setting, kept.repetition]
            if index is not None and kept.repetition == 0 and counts.others_cpus is not None:
                found.setdefault(index, []).append(math.inf if kept.others_cpus is None else kept.others_cpus)
        return found

    def _again(self) -> NextTrial | None:
        """Return a disturbed trial to repeat, so that no setting wins only because others ran on a busy machine."""
        least = min((kept.others_cpus for kept in self.kept if kept.others_cpus is not None), default=0.0)
        index = to_repeat(self.tries(), least)
        return (
            None
            if index is None
            else NextTrial(index, self.search.expected(index), "repeated: other programs were busy the first time")
        )

    def _end(self) -> None:
        """Choose the finalists; if they are the same as in an earlier final round, continue that round."""
        before, leading = self._final, self._leading()
        left_out = list[int]()
        for fewest, repetitions in ((_BASELINES, self.experiment.repeats), (_FEWEST_FINALISTS, FEWEST)):
            while len(leading) > fewest and repetitions * self.round_s(leading) > self._left_s:
                left_out.append(leading.pop())
        settings = tuple(self.experiment.space[index].setting for index in leading)
        above = max((kept.repetition for kept in self.kept), default=0)
        if before is not None and (before.searched == self._searched or set(before.settings) == set(settings)):
            settings, above = before.settings, before.above
        others = tuple(self.experiment.space[index].setting for index in left_out)
        self._final = LoggedFinal(settings, above, self._searched, self._rules, self.stopped, others)
        self.log.put(_FINAL, self._final)

    def _side_by_side(self, show: Show) -> None:
        """Measure the finalists in turn, and repeat if first place is undecided or they ran under different loads.

        With a budget, these repetitions may continue until it is spent.
        """
        finalists, above = self.finalists(), self._final.above if self._final else 0
        if len(finalists) < _FEWEST_FINALISTS:
            return

        def leaders() -> list[int]:
            few = len(self._whole()) - len(self.uneven()) < self.experiment.repeats
            return finalists if few or self._unsure() else []

        more = _MORE if self.experiment.budget_s is None else _MORE_IN_BUDGET
        turns = order_of_trials(finalists, self.experiment.repeats, more, leaders)
        for repetition, turn in turns:
            number = above + repetition + 1
            missing = [index for index in turn if not self._has(index, number)]
            if missing and self._left_s < self.round_s(missing):
                if repetition < self.experiment.repeats:
                    self.stopped += "; the budget left no time for a complete final"
                return
            for index in missing:
                proposal = NextTrial(index, self.search.expected(index), f"final, repetition {repetition + 1}")
                self._measure(proposal, number, show)

    def _unsure(self) -> bool:
        """Return whether the winner may be no faster than another finalist."""
        best = self.winner()
        ratios = [self.ratio(best, index) for index in self.finalists() if index != best] if best is not None else []
        return any(ratio is not None and ratio.ci95[0] <= _SAME for ratio in ratios)

    def finalists(self) -> list[int]:
        """Return the settings to measure side by side, once the search has ended."""
        settings = self._final.settings if self._final else ()
        return [self._index[setting] for setting in settings if setting in self._index]

    def left_out(self) -> list[int]:
        """Return the settings that would have been finalists if the budget had allowed."""
        settings = self._final.left_out if self._final else ()
        return [self._index[setting] for setting in settings if setting in self._index]

    def _leading(self) -> list[int]:
        """Return the current candidates for the final round, the most important first."""
        return self.search.finalists(self.experiment.first[:1])

    # ---- one trial

    def _measure(self, proposal: NextTrial, repetition: int, show: Show) -> None:
        candidate = self.experiment.space[proposal.index]
        changes = ", ".join(difference(self.experiment.space[self.experiment.first[0]].setting, candidate.setting))
        left_s, began, doing = self._left_s, self.clock(), proposal.why if repetition else changes
        show(self._progress(doing), left_s)

        def on_event(event: child.Event) -> None:
            if event.get("event") == "answer":
                answers = f", {event['index'] + 1} of {counted(len(spec.prompts), 'answer')}"
                show(self._progress(doing, answers), left_s - (self.clock() - began))

        spec = replace(
            self.experiment.spec,
            options=candidate.options,
            draft=self.experiment.spec.draft if candidate.options.needs_draft else None,
        )
        verbose = self.experiment.verbose
        tried = self.attempt(spec) if self.attempt else attempt(spec, on_event=on_event, verbose=verbose)
        seconds = self.clock() - began
        result = tried.result
        kept = LoggedTrial(
            candidate.setting,
            trial_speed(result) if result else None,
            trial.prompt_speed(result.answers) if result else None,
            seconds,
            proposal.predicted_tokens_per_s,
            proposal.why,
            repetition,
            tried.failure,
            result.others_cpus if result else None,
        )
        self.log.put(str(len(self.kept)), kept)
        self._learn(kept)

    def _progress(self, doing: str, answers: str = "") -> str:
        speeds = [kept.tokens_per_s for kept in self.kept if kept.tokens_per_s]
        best = f", best {number(max(speeds))} tokens/s" if speeds else ""
        return f"trial {len(self.kept) + 1}{answers}{best}: {doing or 'the planned setting'}"

    def _learn(self, kept: LoggedTrial) -> None:
        """Add a trial from this run or an earlier one."""
        self.kept.append(kept)
        before = self._by_round.get((kept.setting, kept.repetition))
        counts = before is None or (kept.others_cpus is not None and kept.others_cpus < (before.others_cpus or 0.0))
        if counts:
            self._by_round[kept.setting, kept.repetition] = kept
        index = self._index.get(kept.setting)
        if index is None:  # the space has changed, e.g. because of less free memory or other options
            return
        self.spent_s += kept.seconds
        if not counts:
            return
        if before is not None:
            self.search.forget(index)
        if kept.failure is not None:
            self.search.observe(index, None, of_memory=out_of_memory(kept.failure))
        else:
            self.search.observe(index, kept.tokens_per_s)

    def _has(self, index: int, repetition: int) -> bool:
        return (self.experiment.space[index].setting, repetition) in self._by_round

    @property
    def _searched(self) -> int:
        return sum(kept.repetition == 0 for kept in self.kept)

    # ---- time

    @property
    def _left_s(self) -> float:
        budget = self.experiment.budget_s
        return float("inf") if budget is None else budget - self.spent_s

    def _tokens(self) -> int:
        return len(self.experiment.spec.prompts) * self.experiment.spec.max_tokens

    def _trial_s(self, index: int) -> float:
        """Return the expected seconds of a setting's trial: the mean fixed time plus the time for its tokens."""
        fixed = [kept.seconds - self._tokens() / kept.tokens_per_s for kept in self.kept if kept.tokens_per_s]
        if not fixed:
            return self._predicted_s(self.search.expected(index))
        return max(0.0, sum(fixed) / len(fixed)) + self._tokens() / self.search.expected(index)

    def _predicted_s(self, tokens_per_s: float) -> float:
        """Return the expected seconds of a trial at a predicted speed, before any has been measured."""
        spec = self.experiment.spec
        size = sum(path.stat().st_size for path in (spec.target, spec.draft) if path)
        read = sum(map(len, (*spec.prompts, spec.prompts[0]))) / _LETTERS  # the warm-up repeats the first prompt
        return _START_S + size / _LOAD_BYTES_PER_S + (read / _READ + self._tokens()) / tokens_per_s

    def round_s(self, indices: Iterable[int]) -> float:
        """Return the expected seconds of one trial of each of these settings."""
        return sum(self._trial_s(index) for index in indices)

    def _final_s(self) -> float:
        """Return seconds to reserve for a final round; 0 until the planner's choices and two settings are measured."""
        leading = self._leading()
        if not self.search.tried_first or len(self.measured()) < _FEWEST_FINALISTS:
            return 0.0
        trial_s = self.round_s(leading) / len(leading)
        needed, least = (
            self.experiment.repeats * trial_s * max(_FEWEST_FINALISTS, count)
            for count in (len(leading), min(len(leading), _BASELINES))
        )
        return min(needed, max(least, FINAL_SHARE * (self.experiment.budget_s or math.inf)))

    def least_s(self) -> float:
        """Return the seconds needed to compare the planner's choices: a trial of each, plus their final round."""
        first = self.experiment.first[:2]
        return (1 + self.experiment.repeats) * self.round_s((*first, first[-1])[:2])

    def _check_budget(self) -> None:
        budget, first = self.experiment.budget_s, self.experiment.first[0]
        if budget is None or self.search.trials:
            return
        needed = self._trial_s(first)
        if needed > budget:
            raise UsageError(
                f"a budget of {duration(budget)} is too short for one trial, which takes about {duration(needed)}",
                f"{self.enough()} compares two settings",
            )

    def slower(self) -> str:
        """Return how long the first trial took if that is clearly longer than predicted; otherwise an empty string."""
        took, predicted_s = self.kept[0].seconds, self._predicted_s(self.kept[0].predicted_tokens_per_s)
        is_late = took > _LATE * predicted_s
        return f"took {duration(took)} instead of about {duration(predicted_s)}" if is_late else ""

    def enough(self) -> str:
        """Return options that are enough to compare two settings, at the speeds known so far."""
        return f"--budget {as_budget(self.least_s())}{self._fewer_tokens()}"

    def shortage(self) -> str:
        """Return a sentence with the budget that a comparison needs if the present one is too small; else empty."""
        budget, least_s, trial_s = self.experiment.budget_s, self.least_s(), self._trial_s(self.experiment.first[0])
        if budget is None or not trial_s <= budget < least_s or len(self.experiment.space) < 2:
            return ""
        holds = counted(int(budget / trial_s), "trial")
        return (
            f"{duration(budget)} fits {holds} of about {duration(trial_s)}; comparing two settings and repeating them "
            f"takes at least {self.enough()}"
        )

    def _fewer_tokens(self) -> str:
        """Return the ``-n`` with which a comparison fits in the budget; empty if none does."""
        first = self.experiment.first[0]
        tokens_s = self._tokens() / self.search.expected(first)
        trial_s = (self.experiment.budget_s or math.inf) / (2 + 2 * self.experiment.repeats)
        room_s = trial_s - (self._trial_s(first) - tokens_s)
        tokens = int(self.experiment.spec.max_tokens * room_s / tokens_s) // 4 * 4
        return f", or -n {tokens}," if tokens > 0 else ""

    # ---- the result

    def winner(self) -> int | None:
        """Return the index of the winning setting; the planner's choice unless another one is faster."""
        first = self.experiment.first[0]
        return max(self.standing(), key=lambda index: (self.spread(index).median, index == first), default=None)

    def target_only(self) -> int | None:
        """Return the index of the fastest target-only setting, judged by the same kind of trials as the winner."""
        others = [
            index for index in self.measured() if index not in self.finalists()
        ]  # fallback without a qualifying finalist
        for among in (self.standing(), others):
            target_only = [index for index in among if not self.experiment.space[index].setting.drafted]
            if target_only:
                return max(target_only, key=lambda index: self.spread(index).median)
        return None

    def standing(self) -> list[int]:
        """Return settings that may win: finalists that never failed in the final round, or else all that succeeded."""
        rounds, finalists = self.rounds(), self.finalists()
        sound = [i for i in finalists if rounds and all(self._speed(i, number) for number in rounds)]
        return sound or self.measured()

    def measured(self) -> list[int]:
        """Return the indices of settings that succeeded, in order of measurement."""
        found = [self._index[k.setting] for k in self.kept if k.tokens_per_s and k.setting in self._index]
        return list(dict.fromkeys(found))

    def rounds(self) -> list[int]:
        """Return the final round's repetitions that count: complete and under similar loads, or else just complete."""
        uneven = self.uneven()
        return [number for number in self._whole() if number not in uneven] or self._whole()

    def uneven(self) -> list[int]:
        """Return complete repetitions of the final round in which other programs disturbed the finalists unequally."""

        def loads(repetition: int) -> list[float]:
            rows = [self._by_round[self.experiment.space[index].setting, repetition] for index in self.finalists()]
            return [row.others_cpus for row in rows if row.others_cpus is not None]

        return [repetition for repetition in self._whole() if not are_alike(loads(repetition))]

    def _whole(self) -> list[int]:
        """Return the complete repetitions of the final round; partial ones would compare some finalists unfairly."""
        finalists = self.finalists()
        if self._final is None or len(finalists) < _FEWEST_FINALISTS:
            return []
        numbers = {kept.repetition for kept in self.kept if kept.repetition > self._final.above}
        return [number for number in sorted(numbers) if all(self._has(index, number) for index in finalists)]

    def _speed(self, index: int, repetition: int) -> float | None:
        kept = self._by_round.get((self.experiment.space[index].setting, repetition))
        return kept.tokens_per_s if kept else None

    def speeds(self, setting: TunedSetting) -> tuple[list[float], list[float]]:
        """Return (tokens/s of the trials that count, tokens/s of the others).

        The final round's trials count if there are any, because a setting that led by luck is measured again there.
        """
        rounds = set(self.rounds())
        mine = [kept for kept in self._by_round.values() if kept.setting == setting and kept.tokens_per_s]
        final = [kept.tokens_per_s for kept in mine if kept.tokens_per_s and kept.repetition in rounds]
        before = [kept.tokens_per_s for kept in mine if kept.tokens_per_s and kept.repetition not in rounds]
        return (final, before) if final else (before, [])

    def spread(self, index: int) -> Spread:
        return spread(self.speeds(self.experiment.space[index].setting)[0])

    def ratio(self, index: int, baseline: int) -> Spread | None:
        """Return a setting's speedup over a baseline in the final round; a single repetition yields no interval."""
        both = [(self._speed(index, number), self._speed(baseline, number)) for number in self.rounds()]
        pairs = [(own, other) for own, other in both if own and other]
        return paired_mean([own for own, _ in pairs], [other for _, other in pairs]) if pairs else None

    def loads(self) -> list[float]:
        """Return the CPUs that other programs used in each trial of the final round or, without one, of the search."""
        numbers = self.rounds() or [0]
        rows = [kept for (_, number), kept in self._by_round.items() if number in numbers]
        return [kept.others_cpus for kept in rows if kept.others_cpus is not None]


def out_of_memory(failure: Failure) -> bool | None:
    """Return whether a trial failed for lack of memory, judging by its message; None if that is unclear."""
    return any(word in failure.error.lower() for word in _MEMORY_WORDS) or None
