"""Trials of several runs in turn, each written to a run log, and what else went on on the machine's cards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ggufspec import plain, worker
from ggufspec.bench import trial
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import busy_notes, notes_of, speed, summarise, unwatched_notes
from ggufspec.errors import GgufspecError
from ggufspec.hardware import gpus
from ggufspec.models.files import locate
from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread
from ggufspec.settings import is_lossy

_BUSY = 0.1  # of a card's time, before the first trial

Progress = Callable[[int, int, str], None]
_Item = TypeVar("_Item")


def in_turn(items: Sequence[_Item], repetition: int) -> tuple[_Item, ...]:
    """``items`` with another one first in each repetition, so that a drift of the machine favours none of them."""
    first = repetition % max(len(items), 1)
    return (*items[first:], *items[:first])


def identity(path: Path) -> str:
    """Another one when a file's contents are, of any of the parts of a split model."""
    try:
        return locate(path).key
    except GgufspecError:  # the trial will say why
        return str(path)


class Trials:
    """Trials by run and repetition; a run that failed is not tried again.

    Args:
        log: has the trials of an earlier run of the same measurement, and takes those of this one.
        verbose: show llama.cpp's log.
        attempt: does a trial.

    Attributes:
        results: what was measured, by run and repetition, trials of the log included.
        measured: what was measured by this process.
        failures: why runs failed.
        resumed: trials that the log had.
        watch: what went on on the cards.
    """

    def __init__(
        self, log: RunLog, *, verbose: bool = False, attempt: Callable[..., trial.Attempt] | None = None
    ) -> None:
        self.results: dict[trial.Spec, dict[int, trial.Result]] = defaultdict(dict)
        self.measured: dict[trial.Spec, list[trial.Result]] = defaultdict(list)
        self.failures: dict[trial.Spec, Failure] = {}
        self.resumed = 0
        self.watch = CardWatch()
        self._log, self._verbose, self._attempt = log, verbose, attempt or trial.attempt
        self._keys: dict[trial.Spec, str] = {}

    def measure(self, run: trial.Spec, repetition: int) -> None:
        """Do a trial unless the run has failed, or the trial is in the log.

        Raises:
            GgufspecError: it cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        if run in self.failures:
            return
        key = f"{self.key(run)} {repetition}"
        result = self._log.load(key, trial.Result)
        if result is not None:
            self.resumed += 1
        else:
            done = self._attempt(run, on_event=self.watch.see, verbose=self._verbose)
            self.watch.look_for_strangers()
            if done.failure is not None:
                self.failures[run] = done.failure
            if done.result is None:
                return
            result = done.result
            self._log.keep(key, result)
            self.measured[run].append(result)
        self.results[run][repetition] = result

    def key(self, run: trial.Spec) -> str:
        """The same for the same run of the same files, in any process."""
        if run not in self._keys:
            files = [path for path in (run.target, run.draft, run.options.lookup_corpus) if path is not None]
            self._keys[run] = key_of(plain.dump(run), [identity(path) for path in files])
        return self._keys[run]

    def speeds(self, run: trial.Spec) -> dict[int, float]:
        """Tokens/s of a run by repetition."""
        return {repetition: speed(result) for repetition, result in sorted(self.results[run].items())}

    def speedup(self, run: trial.Spec, rival: trial.Spec) -> Spread | None:
        """Over another run, paired by repetition; None where no repetition has both."""
        ours, theirs = self.paired(run, rival)
        return paired_ratios(list(map(speed, ours)), list(map(speed, theirs))) if ours else None

    def paired(self, *runs: trial.Spec) -> list[list[trial.Result]]:
        """The results of each run, of the repetitions that all of them have."""
        common = sorted(set.intersection(*(set(self.results[run]) for run in runs)))
        return [[self.results[run][repetition] for repetition in common] for run in runs]

    def summary(self, run: trial.Spec) -> Run | SpeculativeRun | None:
        """All trials of a run as one row; None where there is none."""
        results = list(self.results[run].values())
        return summarise(results, lossy=is_lossy(run.options.accept)) if results else None

    def notes(self) -> tuple[str, ...]:
        """What the decoders had to say, and whether other programs were at work."""
        results = [result for by_repetition in self.results.values() for result in by_repetition.values()]
        return (*notes_of(results), *busy_notes(results), *unwatched_notes(results))


class CardWatch:
    """Sees throttled clocks and other programs on the cards while trials run; nothing where there is no card."""

    def __init__(self) -> None:
        before = gpus.gpus()
        self._cards = bool(before)
        self._known = {process.pid for card in before for process in card.processes}
        self._notes = [
            f"{card.name} was {card.utilisation:.0%} busy before the first trial: something else runs on it"
            for card in before
            if card.utilisation is not None and card.utilisation > _BUSY
        ]

    def see(self, event: worker.Event) -> None:
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
        """A sentence for each thing that was seen."""
        return tuple(dict.fromkeys(self._notes))
