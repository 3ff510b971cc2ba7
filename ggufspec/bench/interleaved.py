"""Trials of several runs in turn, each written to a run log, and what disturbed the machine meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ggufspec import worker
from ggufspec.bench import trial
from ggufspec.bench.run_log import RunLog
from ggufspec.bench.statistics import Sample, drift_notes, find_drift
from ggufspec.bench.summary import speed
from ggufspec.display import counted
from ggufspec.hardware import gpus
from ggufspec.schema.base import Failure

_BUSY = 0.1  # of a card's time, before the first trial

Progress = Callable[[int, int, str], None]
_Item = TypeVar("_Item")


def in_turn(items: Sequence[_Item], repetition: int) -> tuple[_Item, ...]:
    """``items`` with another one first in each repetition, so that a drift of the machine favours none of them."""
    first = repetition % max(len(items), 1)
    return (*items[first:], *items[:first])


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial as the run log has it.

    Args:
        result: what was measured, or None.
        failure: why not.
        at: when it ended, in seconds of the epoch.
        throttled: what reduced a card's clocks meanwhile.
        strangers: programs that came onto a card meanwhile.
    """

    result: trial.Result | None
    failure: Failure | None = None
    at: float = 0.0
    throttled: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()


class Trials:
    """Trials by run and repetition; a run that failed is not tried again.

    Args:
        log: has the trials of an earlier run of the same measurement, and takes those of this one.
        verbose: show llama.cpp's log.
        attempt: does a trial.
        now: seconds of the epoch.
    """

    def __init__(
        self,
        log: RunLog,
        *,
        verbose: bool = False,
        attempt: Callable[..., trial.Attempt] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.by_run: dict[str, dict[int, Trial]] = defaultdict(dict)
        self.resumed = 0
        self._log, self._verbose, self._attempt, self._now = log, verbose, attempt or trial.attempt, now
        self._watch: CardWatch | None = None

    def recall(self, run: str, repetition: int) -> bool:
        """Take a trial from the log; False if it has none."""
        name = f"{run} {repetition}"
        found = self._log.load(name, Trial) or self._log.load(name, Trial, failed=True)
        if found is None:
            return False
        self.by_run[run][repetition] = found
        self.resumed += 1
        return True

    def measure(self, run: str, spec: trial.Spec, repetition: int) -> trial.Result | None:
        """Do a trial unless the run has failed, or the trial is known; what was measured just now.

        Raises:
            GgufspecError: it cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        self._watch = watch = self._watch or CardWatch()
        if self.failure(run) or repetition in self.by_run[run] or self.recall(run, repetition):
            return None
        watch.clear()
        done = self._attempt(spec, on_event=watch.see, verbose=self._verbose)
        watch.look_for_strangers()
        made = Trial(done.result, done.failure, self._now(), watch.throttled, watch.strangers)
        self._log.keep(f"{run} {repetition}", made, failed=made.result is None)
        self.by_run[run][repetition] = made
        return made.result

    def failure(self, run: str) -> Failure | None:
        """Why a run failed; None if it did not."""
        return next((one.failure for one in self.by_run[run].values() if one.failure), None)

    def results(self, run: str) -> dict[int, trial.Result]:
        """What was measured of a run, by repetition."""
        return {number: one.result for number, one in sorted(self.by_run[run].items()) if one.result is not None}

    def speeds(self, run: str) -> dict[int, float]:
        """Tokens/s of a run by repetition."""
        return {number: speed(result) for number, result in self.results(run).items()}

    def disturbances(self) -> list[str]:
        """Whether the machine changed its speed, and what went on on its cards: a sentence each."""
        trials = sorted(
            ((run, number, one) for run, some in self.by_run.items() for number, one in some.items()),
            key=lambda entry: entry[2].at,
        )
        notes = drift_notes(
            find_drift([Sample(run, number, speed(one.result)) for run, number, one in trials if one.result])
        )
        for reason in sorted({reason for _, _, one in trials for reason in one.throttled}):
            count = sum(reason in one.throttled for _, _, one in trials)
            notes.append(f"{reason} in {counted(count, 'trial')} of {len(trials)}: the clocks were reduced")
        for name in sorted({name for _, _, one in trials for name in one.strangers}):
            notes.append(f"another program began to use a card meanwhile: {name}")
        return [*notes, *(self._watch.at_first if self._watch else ())]


class CardWatch:
    """Sees throttled clocks and other programs on the cards while trials run; nothing where there is no card.

    Attributes:
        at_first: what ran on them before the first trial, a sentence each.
        throttled: what has held a card's clocks down since :meth:`clear`.
        strangers: programs that were on a card after a trial since then, and not before the first.
    """

    def __init__(self) -> None:
        self.throttled: tuple[str, ...] = ()
        self.strangers: tuple[str, ...] = ()
        before = gpus.gpus()
        self._cards = bool(before)
        self._known = {process.pid for card in before for process in card.processes}
        self.at_first = tuple(
            f"{card.name} was {card.utilisation:.0%} busy before the first trial: something else runs on it"
            for card in before
            if card.utilisation is not None and card.utilisation > _BUSY
        )

    def clear(self) -> None:
        """Before a trial."""
        self.throttled = self.strangers = ()

    def see(self, event: worker.Event) -> None:
        """At each answer: what holds the clocks down just then."""
        if self._cards and event.get("event") == "answer":
            reasons = (f"{card.name}: {reason}" for card in gpus.gpus() for reason in card.throttled)
            self.throttled = tuple(dict.fromkeys((*self.throttled, *reasons)))

    def look_for_strangers(self) -> None:
        """After a trial, when nothing of ours is on a card. A container may not see whose a process is."""
        if self._cards:
            processes = [process for card in gpus.gpus() for process in card.processes]
            strangers = [
                process.name or f"process {process.pid}" for process in processes if process.pid not in self._known
            ]
            self.strangers = tuple(dict.fromkeys((*self.strangers, *strangers)))

    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that was seen."""
        return (
            *self.at_first,
            *(f"{reason}: the clocks were reduced" for reason in self.throttled),
            *(f"another program began to use a card meanwhile: {name}" for name in self.strangers),
        )
