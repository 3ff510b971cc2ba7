"""Trials of several runs in turn, each written to a run log, so that what was interrupted goes on."""

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
from ggufspec.bench.disturbed import are_alike, repeated, to_repeat
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import busy_notes, notes_of, speed, summarise, unwatched_notes
from ggufspec.errors import GgufspecError
from ggufspec.hardware import gpus
from ggufspec.models.locate import locate
from ggufspec.schema import codec
from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread
from ggufspec.schema.text import counted
from ggufspec.settings.registry import is_lossy

_BUSY = 0.1  # of a card's time, before the first trial
START_S = 1.0  # of a child process
LOAD_BYTES_PER_S = 1e9  # a guess, until something was loaded

Progress = Callable[[int, int, str], None]
_Item = TypeVar("_Item")


def in_turn(items: Sequence[_Item], repetition: int) -> tuple[_Item, ...]:
    """``items`` with another one first in each repetition, so that a drift of the machine favours none of them."""
    first = repetition % max(len(items), 1)
    return (*items[first:], *items[:first])


def rounds(
    items: Sequence[_Item], repetitions: int, more: int = 0, leaders: Callable[[], Sequence[_Item]] = tuple
) -> Iterator[tuple[int, tuple[_Item, ...]]]:
    """The order of an experiment: (repetition, items in turn).

    Args:
        items: what is measured.
        repetitions: of all of them.
        more: times the repetitions that follow at most, of those that lead.
        leaders: who leads by now; of fewer than two no more is to be learned.
    """
    for repetition in range(repetitions * (1 + more)):
        if repetition >= repetitions:
            items = leaders()
            if len(items) < 2:
                return
        yield repetition, in_turn(items, repetition)


def identity(path: Path) -> str:
    """Changes with a file's contents, of any of the parts of a split model."""
    try:
        return locate(path).key
    except GgufspecError:  # the trial will say why
        return str(path)


def seconds(result: trial.Result) -> float:
    """What a trial took, with its start, its load and its warm-up."""
    answers = [one.statistics for one in result.answers]
    warm_up_s = max((one.prompt_s for one in answers), default=0.0)
    return START_S + result.load_s + warm_up_s + sum(one.prompt_s + one.decode_s for one in answers)


class Trials:
    """Trials by run and repetition, of an earlier measurement too if the log has them; what failed is not tried again.
    A trial that other programs disturbed is repeated, also if only a later one shows that the machine can be quieter.

    ``resumed`` is how many the log had, ``attempt`` what does a trial. ``predicted`` are tokens/s by the plan.
    ``spent_s`` is what trials took, those of the log too; no trial begins that would end after ``budget_s``.
    ``left_s`` is an estimate of what the rest takes.
    """

    def __init__(
        self, log: RunLog, *, verbose: bool = False, attempt: Callable[..., trial.Attempt] | None = None
    ) -> None:
        self.results: dict[trial.Spec, dict[int, trial.Result]] = defaultdict(dict)
        self.failures: dict[trial.Spec, Failure] = {}
        self.resumed = 0
        self.predicted: dict[trial.Spec, float] = {}
        self.budget_s, self.spent_s, self.left_s = math.inf, 0.0, math.inf
        self.watch = CardWatch()
        self._log, self._verbose, self._attempt = log, verbose, attempt or trial.attempt
        self._keys: dict[trial.Spec, str] = {}
        self._tries: dict[tuple[trial.Spec, int], list[float]] = {}  # CPUs that others used in each of this process
        self._unlike: set[tuple[frozenset[trial.Spec], int]] = set()  # that were compared with nothing

    def run(
        self,
        names: Mapping[trial.Spec, str],
        repetitions: int,
        progress: Progress,
        *,
        more: int = 0,
        leaders: Callable[[], Sequence[trial.Spec]] = tuple,
        later: int = 0,
    ) -> int:
        """Measure what is missing, in the order of :func:`rounds`, and what the budget allows; returns how many trials.

        ``progress`` is told the name of each run before its trial and with each answer, and of so many steps that
        follow ``later``.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        done, total = 0, repetitions * len(names) + later
        for repetition, runs in rounds(tuple(names), repetitions, more, leaders):
            total += len(runs) if repetition >= repetitions else 0
            for place, run in enumerate(runs):
                later_s = (
                    self._rest_s(names) * rounds_left if (rounds_left := repetitions - 1 - repetition) > 0 else 0.0
                )
                rest_s = self._rest_s(runs[place + 1 :]) + later_s
                tell = partial(self._tell, partial(progress, done, total), names[run], run, rest_s)
                tell(0)
                if not self.measure(run, repetition, tell):
                    return done
                done += 1
        return done

    def _tell(self, progress: Callable[[str], None], name: str, run: trial.Spec, rest_s: float, answers: int) -> None:
        many = len(run.prompts)
        self.left_s = rest_s + (1 - answers / max(many, 1)) * self._rest_s([run])
        progress(name + (f", {answers} of {counted(many, 'answer')}" if answers else ""))

    def measure(self, run: trial.Spec, repetition: int, tell: Callable[[int], None] = lambda _: None) -> bool:
        """Do a trial unless the run has failed, or the trial is in the log, and repeat what was disturbed.

        Returns whether the budget allowed it.

        Raises:
            GgufspecError: it cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        if run in self.failures:
            return True
        if (result := self._log.get(self._entry(run, repetition), trial.Result)) is not None:
            self.resumed += 1
            self.spent_s += seconds(result)
            self.results[run][repetition] = result
            return True
        again: tuple[trial.Spec, int] | None = (run, repetition)
        while again is not None:
            if self.spent_s + self.trial_s(again[0]) > self.budget_s:
                return repetition in self.results[run]  # what was disturbed stays so
            self._try(*again, tell)
            least = min((one.others_cpus for found in self.results.values() for one in found.values()), default=0.0)
            again = to_repeat(self._tries, least)
        return True

    def probe(self, run: trial.Spec) -> trial.Result | None:
        """Do a trial that does not count; None if it fails."""
        began = time.monotonic()
        done = self._attempt(run, verbose=self._verbose)
        self.spent_s += time.monotonic() - began
        return done.result

    def _try(self, run: trial.Spec, repetition: int, tell: Callable[[int], None]) -> None:
        """Do a trial; of several tries at it the least disturbed counts."""
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

    def trial_s(self, run: trial.Spec) -> float:
        """Seconds that a trial will take; 0 if nothing is known.

        They are those of the run's others, or else what its prediction comes to, and how far predictions are off.
        """
        if known := self.results.get(run):
            return fmean(map(seconds, known.values()))
        tokens = len(run.prompts) * run.max_tokens
        results = [(one, result) for one, found in self.results.items() for result in found.values()]
        off = [speed(result) / self.predicted[one] for one, result in results if self.predicted.get(one)]
        speeds = [speed(result) for _, result in results]
        tokens_per_s = self.predicted.get(run, 0.0) * (median(off) if off else 1.0)
        tokens_per_s = tokens_per_s or (fmean(speeds) if speeds else 0.0)
        if not tokens_per_s:
            return 0.0
        fixed = [seconds(one) - sum(answer.statistics.decode_s for answer in one.answers) for _, one in results]
        load_s = fmean(fixed) if fixed else START_S + size_bytes(run) / LOAD_BYTES_PER_S
        return load_s + tokens / tokens_per_s

    def _rest_s(self, runs: Iterable[trial.Spec]) -> float:
        """What these trials take; infinity if that is not known."""
        found = [self.trial_s(run) for run in runs if run not in self.failures]
        return sum(found) if all(found) else math.inf

    def _entry(self, run: trial.Spec, repetition: int) -> str:
        return f"{self.key(run)} {repetition}"

    def key(self, run: trial.Spec) -> str:
        """The same for the same run of the same files, in any process."""
        if run not in self._keys:
            files = [path for path in (run.target, run.draft, run.options.lookup_corpus) if path is not None]
            self._keys[run] = key_of(codec.dump(run), [identity(path) for path in files])
        return self._keys[run]

    def speeds(self, run: trial.Spec) -> dict[int, float]:
        return {repetition: speed(result) for repetition, result in sorted(self.results[run].items())}

    def speedup(self, run: trial.Spec, rival: trial.Spec) -> Spread | None:
        """Over another run, paired by repetition; None if no repetition has both."""
        ours, theirs = self.paired(run, rival)
        return paired_ratios(list(map(speed, ours)), list(map(speed, theirs))) if ours else None

    def paired(self, *runs: trial.Spec) -> list[list[trial.Result]]:
        """The results of each run, of the repetitions that all of them have and in which they met the same load."""
        common = sorted(set.intersection(*(set(self.results[run]) for run in runs)))
        alike = [n for n in common if are_alike([self.results[run][n].others_cpus for run in runs])]
        if alike:
            self._unlike |= {(frozenset(runs), n) for n in {*common} - {*alike}}
            common = alike
        return [[self.results[run][repetition] for repetition in common] for run in runs]

    def summary(self, run: trial.Spec) -> Run | SpeculativeRun | None:
        results = list(self.results[run].values())
        return summarise(results, lossy=is_lossy(run.options.accept)) if results else None

    def notes(self) -> tuple[str, ...]:
        results = [result for by_repetition in self.results.values() for result in by_repetition.values()]
        notes = (*notes_of(results), *busy_notes(results), *repeated(self._tries.values()), *unwatched_notes(results))
        if not self._unlike:
            return notes
        return (*notes, f"{counted(len(self._unlike), 'pair')} of trials met different loads: no speedup counts them")


def size_bytes(run: trial.Spec) -> int:
    """Bytes of a run's files; those that are not there will be its failure."""
    return sum(path.stat().st_size for path in (run.target, run.draft) if path is not None and path.exists())


class CardWatch:
    """Sees throttled clocks and other programs on the cards while trials run; nothing if there is no card."""

    def __init__(self) -> None:
        before = gpus.gpus()
        self._cards = bool(before)
        self._known = {process.pid for card in before for process in card.processes}
        self._notes = [
            f"{card.name} was {card.utilisation:.0%} busy before the first trial: something else runs on it"
            for card in before
            if card.utilisation is not None and card.utilisation > _BUSY
        ]

    def see(self, event: child.Event) -> None:
        """At each answer: what holds the clocks down just then."""
        if self._cards and event.get("event") == "answer":
            self._notes += [
                f"{card.name}: {reason}: the clocks were reduced" for card in gpus.gpus() for reason in card.throttled
            ]

    def look_for_strangers(self) -> None:
        """After a trial, when nothing of ours is on a card. A container may not see whose a process is."""
        if self._cards:
            self._notes += [
                "another program began to use a card meanwhile: " + (process.name or f"process {process.pid}")
                for card in gpus.gpus()
                for process in card.processes
                if process.pid not in self._known
            ]

    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._notes))
