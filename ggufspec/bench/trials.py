"""Interleaved trials of several runs, each saved in a run log so that an interrupted command can resume."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from ggufspec import child
from ggufspec.bench import trial
from ggufspec.bench.disturbed import are_alike, repeated_note, to_repeat
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import busy_notes, notes_of, summarise, trial_speed, unwatched_notes
from ggufspec.errors import GgufspecError
from ggufspec.hardware import gpus
from ggufspec.models.locate import locate
from ggufspec.schema import codec
from ggufspec.schema.base import Failure, MeasuredRun, SpeculativeRun, Spread
from ggufspec.schema.text import counted
from ggufspec.settings.registry import is_lossy

_BUSY = 0.1  # GPU utilisation above which the GPU counts as busy before the first trial
START_S = 1.0  # seconds to start a child process
LOAD_BYTES_PER_S = 1e9  # load speed assumed until a model has been loaded

Progress = Callable[[int, int, str], None]
_Item = TypeVar("_Item")


def in_turn(items: Sequence[_Item], repetition: int) -> tuple[_Item, ...]:
    """Rotate ``items``: each repetition starts with a different one, so that drift of the machine favours none."""
    first = repetition % max(len(items), 1)
    return (*items[first:], *items[:first])


def order_of_trials(
    items: Sequence[_Item], repetitions: int, more: int = 0, leaders: Callable[[], Sequence[_Item]] = tuple
) -> Iterator[tuple[int, tuple[_Item, ...]]]:
    """Yield (repetition, items in the order to measure them), first for all items, then for the leaders.

    ``more`` limits the leaders' extra repetitions, as a multiple of ``repetitions``; a single leader gets none.
    """
    for repetition in range(repetitions * (1 + more)):
        if repetition >= repetitions:
            items = leaders()
            if len(items) < 2:
                return
        yield repetition, in_turn(items, repetition)


def file_identity(path: Path) -> str:
    """Return a key that changes with the contents of a model file or, if it is split, of any part."""
    try:
        return locate(path).key
    except GgufspecError:  # the trial will report the error
        return str(path)


def trial_s(result: trial.TrialResult) -> float:
    """Return the seconds that a trial took, including process start, load and warm-up."""
    answers = [one.statistics for one in result.answers]
    warm_up_s = max((one.prompt_s for one in answers), default=0.0)
    return START_S + result.load_s + warm_up_s + sum(one.prompt_s + one.decode_s for one in answers)


class RepeatedTrials:
    """Trials by run and repetition. Trials in the log are not measured again; a failed run is not retried.

    A trial disturbed by other programs is repeated, even if only a later trial shows that the machine can be quieter.
    ``attempt`` runs a trial; ``resumed`` counts trials found in the log. ``predicted`` has the plan's tokens/s by run.
    ``spent_s`` is the time of all trials, including logged ones. A trial that is expected to exceed ``budget_s`` does
    not start. ``left_s`` is the estimated time left.
    """

    def __init__(
        self, log: RunLog, *, verbose: bool = False, attempt: Callable[..., trial.TrialAttempt] | None = None
    ) -> None:
        self.results: dict[trial.TrialJob, dict[int, trial.TrialResult]] = defaultdict(dict)
        self.failures: dict[trial.TrialJob, Failure] = {}
        self.resumed = 0
        self.predicted: dict[trial.TrialJob, float] = {}
        self.budget_s, self.spent_s, self.left_s = math.inf, 0.0, math.inf
        self.watch = CardWatch()
        self._log, self._verbose, self._attempt = log, verbose, attempt or trial.attempt
        self._keys: dict[trial.TrialJob, str] = {}
        self._tries: dict[tuple[trial.TrialJob, int], list[float]] = {}  # CPUs that other programs used in each try
        self._unlike: set[tuple[frozenset[trial.TrialJob], int]] = set()  # not used in ratios, because loads differed

    def run(
        self,
        names: Mapping[trial.TrialJob, str],
        repetitions: int,
        progress: Progress,
        *,
        more: int = 0,
        leaders: Callable[[], Sequence[trial.TrialJob]] = tuple,
        later: int = 0,
    ) -> int:
        """Measure the missing trials that fit in the budget, in :func:`order_of_trials`; return the number completed.

        ``progress`` gets a run's name before its trial and after each answer. The total that it gets includes the
        ``later`` steps that the caller takes afterwards.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        done, total = 0, repetitions * len(names) + later
        for repetition, runs in order_of_trials(tuple(names), repetitions, more, leaders):
            total += len(runs) if repetition >= repetitions else 0
            for place, run in enumerate(runs):
                rest_s = self._rest_s(runs[place + 1 :])
                if (rounds_left := repetitions - 1 - repetition) > 0:
                    rest_s += rounds_left * self._rest_s(names)
                tell = partial(self._tell, partial(progress, done, total), names[run], run, rest_s)
                tell(0)
                if not self.measure(run, repetition, tell):
                    return done
                done += 1
        return done

    def _tell(
        self, progress: Callable[[str], None], name: str, run: trial.TrialJob, rest_s: float, answers: int
    ) -> None:
        many = len(run.prompts)
        self.left_s = rest_s + (1 - answers / max(many, 1)) * self._rest_s([run])
        progress(name + (f", {answers} of {counted(many, 'answer')}" if answers else ""))

    def measure(self, run: trial.TrialJob, repetition: int, tell: Callable[[int], None] = lambda _: None) -> bool:
        """Run a trial and repeat disturbed ones, unless the run has failed or the log has the trial.

        Return False if the budget did not allow it.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        if run in self.failures:
            return True
        if (result := self._log.get(self._entry(run, repetition), trial.TrialResult)) is not None:
            self.resumed += 1
            self.spent_s += trial_s(result)
            self.results[run][repetition] = result
            return True
        again: tuple[trial.TrialJob, int] | None = (run, repetition)
        while again is not None:
            if self.spent_s + self.trial_s(again[0]) > self.budget_s:
                return repetition in self.results[run]  # a disturbed result is better than none
            self._try(*again, tell)
            least = min((one.others_cpus for found in self.results.values() for one in found.values()), default=0.0)
            again = to_repeat(self._tries, least)
        return True

    def probe(self, run: trial.TrialJob) -> trial.TrialResult | None:
        """Run a trial that does not count; return None if it fails."""
        began = time.monotonic()
        done = self._attempt(run, verbose=self._verbose)
        self.spent_s += time.monotonic() - began
        return done.result

    def _try(self, run: trial.TrialJob, repetition: int, tell: Callable[[int], None]) -> None:
        """Run a trial; of several tries, the least disturbed counts."""
        began = time.monotonic()

        def see(event: child.Event) -> None:
            self.watch.see(event)
            if event.get("event") == "answer":
                tell(event["index"] + 1)

        done, tries = self._attempt(run, on_event=see, verbose=self._verbose), (run, repetition)
        self.spent_s += time.monotonic() - began
        self.watch.look_for_strangers()
        if done.failure is not None:
            self.failures[run] = done.failure
        if done.result is None:
            self._tries.pop(tries, None)
            return
        before = self._tries.setdefault(tries, [])
        if not before or done.result.others_cpus < min(before):
            self._log.put(self._entry(run, repetition), done.result)
            self.results[run][repetition] = done.result
        before.append(done.result.others_cpus)

    def trial_s(self, run: trial.TrialJob) -> float:
        """Return the expected seconds of a trial; 0 if unknown.

        It is the mean of the run's trials; without trials, the predicted time corrected by other predictions' errors.
        """
        if known := self.results.get(run):
            return fmean(map(trial_s, known.values()))
        tokens = len(run.prompts) * run.max_tokens
        results = [(one, result) for one, found in self.results.items() for result in found.values()]
        off = [trial_speed(result) / self.predicted[one] for one, result in results if self.predicted.get(one)]
        speeds = [trial_speed(result) for _, result in results]
        tokens_per_s = self.predicted.get(run, 0.0) * (median(off) if off else 1.0)
        tokens_per_s = tokens_per_s or (fmean(speeds) if speeds else 0.0)
        if not tokens_per_s:
            return 0.0
        fixed = [trial_s(one) - sum(answer.statistics.decode_s for answer in one.answers) for _, one in results]
        load_s = fmean(fixed) if fixed else START_S + size_bytes(run) / LOAD_BYTES_PER_S
        return load_s + tokens / tokens_per_s

    def _rest_s(self, runs: Iterable[trial.TrialJob]) -> float:
        """Return the expected seconds of one trial of each of ``runs``; infinity if unknown."""
        found = [self.trial_s(run) for run in runs if run not in self.failures]
        return sum(found) if all(found) else math.inf

    def _entry(self, run: trial.TrialJob, repetition: int) -> str:
        return f"{self.key(run)} {repetition}"

    def key(self, run: trial.TrialJob) -> str:
        """Return a key made from a run and its files' contents, equal in any process."""
        if run not in self._keys:
            files = [path for path in (run.target, run.draft, run.options.lookup_corpus) if path is not None]
            self._keys[run] = key_of(codec.dump(run), [file_identity(path) for path in files])
        return self._keys[run]

    def speeds(self, run: trial.TrialJob) -> dict[int, float]:
        return {repetition: trial_speed(result) for repetition, result in sorted(self.results[run].items())}

    def speedup(self, run: trial.TrialJob, baseline: trial.TrialJob) -> Spread | None:
        """Return the speedup over another run, paired by repetition; None if no repetition has both."""
        ours, theirs = self.paired(run, baseline)
        return paired_ratios(list(map(trial_speed, ours)), list(map(trial_speed, theirs))) if ours else None

    def paired(self, *runs: trial.TrialJob) -> list[list[trial.TrialResult]]:
        """Return each run's results in the repetitions that all have, if possible only those with similar loads."""
        common = sorted(set.intersection(*(set(self.results[run]) for run in runs)))
        alike = [n for n in common if are_alike([self.results[run][n].others_cpus for run in runs])]
        if alike:
            self._unlike |= {(frozenset(runs), n) for n in {*common} - {*alike}}
            common = alike
        return [[self.results[run][repetition] for repetition in common] for run in runs]

    def summary(self, run: trial.TrialJob) -> MeasuredRun | SpeculativeRun | None:
        results = list(self.results[run].values())
        return summarise(results, lossy=is_lossy(run.options.accept)) if results else None

    def notes(self) -> tuple[str, ...]:
        results = [result for by_repetition in self.results.values() for result in by_repetition.values()]
        notes = (
            *notes_of(results),
            *busy_notes(results),
            *repeated_note(self._tries.values()),
            *unwatched_notes(results),
        )
        if not self._unlike:
            return notes
        return (*notes, f"speedups exclude {counted(len(self._unlike), 'pair')} of trials run under different loads")


def size_bytes(run: trial.TrialJob) -> int:
    """Return the bytes of a run's files; a missing file counts as 0, because the trial will report it."""
    return sum(path.stat().st_size for path in (run.target, run.draft) if path is not None and path.exists())


class CardWatch:
    """Monitor for throttled clocks and other programs on the GPUs during trials; does nothing without GPUs."""

    def __init__(self) -> None:
        before = gpus.gpus()
        self._cards = bool(before)
        self._known = {process.pid for card in before for process in card.processes}
        self._notes = [
            f"{card.name} was {card.utilisation:.0%} busy before the first trial: something else is running on it"
            for card in before
            if card.utilisation is not None and card.utilisation > _BUSY
        ]

    def see(self, event: child.Event) -> None:
        """Note throttled clocks after each answer."""
        if self._cards and event.get("event") == "answer":
            self._notes += [
                f"{card.name} reduced its clocks: {reason}" for card in gpus.gpus() for reason in card.throttled
            ]

    def look_for_strangers(self) -> None:
        """Note other programs on the GPUs after a trial's process has ended. A container may hide their names."""
        if self._cards:
            self._notes += [
                "another program started to use a GPU during the trials: " + (process.name or f"process {process.pid}")
                for card in gpus.gpus()
                for process in card.processes
                if process.pid not in self._known
            ]

    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._notes))
