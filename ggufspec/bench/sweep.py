"""One option at several values: interleaved trials, every value a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.bench import trial
from ggufspec.bench.interleaved import Progress, Trials, in_turn
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_ratios
from ggufspec.bench.summary import alone, busy_notes, machine, notes_of, settings_of, summarise
from ggufspec.decoding.options import DecoderOptions
from ggufspec.schema.base import Failure, Run, SpeculativeRun
from ggufspec.schema.sweep import SweepDocument, SweepPoint
from ggufspec.settings import is_lossy

LOG = "ggufspec/sweep-log@1"

_LAYERS = ("gpu_layers", "gpu_layers_draft")


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the option.

    Args:
        shown: as it was typed.
        pair: the speculative run with it; None if it has no placement, or drafts nothing.
        alone: the target-only run that it is compared with; None if it has no placement.
        failure: why it has no placement.
    """

    shown: str
    pair: trial.Spec | None
    alone: trial.Spec | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to measure.

    Args:
        pair: as :meth:`ggufspec.models.profile.Pair.describe` has it.
        option: its name in documents, ``draft_max``, for example.
        values: of the option, in the order in which they are shown.
        repetitions: trials of each run.
        notes: for the document.
        verbose: show llama.cpp's log.
    """

    pair: dict[str, Any]
    option: str
    values: tuple[Value, ...]
    repetitions: int
    notes: tuple[str, ...] = ()
    verbose: bool = False


def value(shown: str, spec: trial.Spec, rival: DecoderOptions) -> Value:
    """One value and its target-only run.

    Options that only a drafter reads are reset in the target-only run, so that values that differ in nothing else
    share it.

    Args:
        shown: the value as it was typed.
        spec: the run with it.
        rival: the options of target-only.
    """
    target_only = alone(replace(spec, options=rival))
    options = replace(target_only.options, gpu_layers_draft=0, draft_split=())
    if not options.strict:  # strict mode's batch size depends on the draft length
        usual = DecoderOptions()
        options = replace(options, draft_policy=usual.draft_policy, draft_max=usual.draft_max)
    drafts = spec.options.drafts(with_draft=spec.draft is not None)
    return Value(shown, spec if drafts else None, replace(target_only, options=options))


def identity(experiment: Experiment) -> str:
    """A key of the whole sweep: the same files and settings on the same machine give the same, in any process."""
    return key_of(
        experiment.option, [(one.shown, _key(one.pair), _key(one.alone)) for one in experiment.values], machine()
    )


def _key(spec: trial.Spec | None) -> str:
    """Of a spec and the identity of its files: another file of the same name is another measurement."""
    if spec is None:
        return ""
    return key_of(asdict(spec), [_file(path) for path in (spec.target, spec.draft, spec.options.lookup_corpus) if path])


def _file(path: Path) -> list[Any]:
    try:
        status = path.stat()
    except OSError:  # the trial will say so
        return [str(path)]
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


class Sweep:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted, and resumes from the log.

    Args:
        experiment: what to measure.
        log: where trials are written.
        attempt: does a trial.
        now: seconds of the epoch.
    """

    def __init__(
        self,
        experiment: Experiment,
        log: RunLog,
        attempt: Callable[..., trial.Attempt] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.experiment = experiment
        self._keys = {spec: _key(spec) for _, spec in self._runs()}
        self._trials = Trials(log, verbose=experiment.verbose, attempt=attempt, now=now)
        for repetition in range(experiment.repetitions):
            for key in set(self._keys.values()):
                self._trials.recall(key, repetition)

    @property
    def measured(self) -> int:
        """How many trials there are results of."""
        return sum(len(self._trials.results(key)) for key in set(self._keys.values()))

    def run(self, progress: Progress) -> None:
        """Measure what is missing, values in turn; a run that has failed is not tried again.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        total = self.experiment.repetitions * len(set(self._keys.values()))
        done = 0
        for repetition in range(self.experiment.repetitions):
            seen = set[str]()
            for name, spec in self._runs(repetition):
                key = self._keys[spec]
                if key in seen:
                    continue
                seen.add(key)
                progress(done, total, f"{self.experiment.option.replace('_', ' ')} {name}")
                self._trials.measure(key, spec, repetition)
                done += 1
        progress(total, total, "done")

    def document(self, *, interrupted: bool = False) -> SweepDocument:
        """Everything that has been measured so far."""
        experiment = self.experiment
        spec = next((spec for one in experiment.values for spec in (one.pair, one.alone) if spec), None)
        results = [result for one in experiment.values for result in self._results(one.pair).values()]
        return SweepDocument(
            pair=experiment.pair,
            machine=machine(),
            settings=(settings_of(spec) if spec else {})
            | {experiment.option: [one.shown for one in experiment.values], "repetitions": experiment.repetitions},
            option=experiment.option,
            points=tuple(self._point(one) for one in experiment.values),
            notes=(
                *experiment.notes,
                *self._no_gpu(),
                *self._trials.disturbances(),
                *notes_of(results),
                *busy_notes(results),
            ),
            interrupted=interrupted,
        )

    def _no_gpu(self) -> tuple[str, ...]:
        """Whether layers were requested that no device took."""
        requested = any(spec.options.gpu_layers or spec.options.gpu_layers_draft for spec in self._keys)
        placed = [result.target.gpu_layers for spec in self._keys for result in self._results(spec).values()]
        if self.experiment.option not in _LAYERS or not requested or not placed or any(placed):
            return ()
        return ("there is no GPU here: every layer ran on the CPU",)

    def _point(self, one: Value) -> SweepPoint:
        pair, target_only = (self._trials.speeds(self._keys[spec]) if spec else {} for spec in (one.pair, one.alone))
        both = sorted(pair.keys() & target_only.keys())
        ratios = paired_ratios([pair[i] for i in both], [target_only[i] for i in both]) if both else None
        return SweepPoint(
            one.shown, self._summary(one.alone), self._summary(one.pair), ratios, one.failure or self._failure(one)
        )

    def _failure(self, one: Value) -> Failure | None:
        for spec, role in ((one.pair, ""), (one.alone, "target-only: ")):
            if spec is not None and (failure := self._trials.failure(self._keys[spec])):
                return Failure(role + failure.error, failure.hint)
        return None

    def _summary(self, spec: trial.Spec | None) -> Run | SpeculativeRun | None:
        results = list(self._results(spec).values())
        return summarise(results, lossy=is_lossy(spec.options.accept)) if results and spec else None

    def _results(self, spec: trial.Spec | None) -> dict[int, trial.Result]:
        """What was measured of a run, by repetition."""
        return self._trials.results(self._keys[spec]) if spec else {}

    def _runs(self, repetition: int = 0) -> Iterator[tuple[str, trial.Spec]]:
        """Every run, each value's target-only first."""
        for one in in_turn(self.experiment.values, repetition):
            for spec, role in ((one.alone, "target-only"), (one.pair, "speculative")):
                if spec is not None:
                    yield f"{one.shown}: {role}", spec
