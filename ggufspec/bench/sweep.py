"""One option at several values: interleaved trials, every value a row, kept as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ggufspec import plain
from ggufspec.bench import drift, trial
from ggufspec.bench.attempt import Attempt, attempt
from ggufspec.bench.journal import Journal, key_of
from ggufspec.bench.stats import paired_ratios
from ggufspec.bench.versus import alone, busy_notes, machine, notes_of, settings_of, speed, summarise
from ggufspec.bench.watch import Watch
from ggufspec.decoding.options import DecoderOptions, is_lossy
from ggufspec.schema.base import Failure, Run, SpeculativeRun
from ggufspec.schema.sweep import SweepDocument, SweepPoint

JOURNAL = "ggufspec/sweep-journal@1"

_LAYERS = ("gpu_layers", "gpu_layers_draft")

Progress = Callable[[int, int, str], None]
Try = Callable[[trial.Spec], Attempt]


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the option.

    Args:
        shown: as it was typed.
        pair: the run with it; None where it has no placement.
        alone: the target-only run that it is held against; None as well.
        failure: why it has none.
    """

    shown: str
    pair: trial.Spec | None
    alone: trial.Spec | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to measure.

    Args:
        pair: as :meth:`ggufspec.models.profile.Pair.describe` tells of it.
        option: its name in documents, ``draft_max`` say.
        values: of the option, in the order in which they are shown.
        repetitions: trials of each run.
        notes: what is to be said with the results.
        verbose: show llama.cpp's log.
    """

    pair: dict[str, Any]
    option: str
    values: tuple[Value, ...]
    repetitions: int
    notes: tuple[str, ...] = ()
    verbose: bool = False


def value(shown: str, spec: trial.Spec, rival: DecoderOptions) -> Value:
    """One value and the target-only run that goes with it.

    What only a drafter looks at is set aside in the target's own run, so that values that differ in nothing else share
    it.

    Args:
        shown: the value as it was typed.
        spec: the run with it.
        rival: how the target runs alone.
    """
    by_itself = alone(replace(spec, options=rival))
    options = replace(by_itself.options, gpu_layers_draft=0, draft_split=())
    if not options.strict:  # where it is, the draft length is in the width
        usual = DecoderOptions()
        options = replace(options, draft_policy=usual.draft_policy, draft_max=usual.draft_max)
    by_itself = replace(by_itself, options=options)
    drafts = spec.options.drafts(with_draft=spec.draft is not None)
    return Value(shown, spec if drafts else None, by_itself)


def identity(experiment: Experiment) -> str:
    """A key for the whole of it: the same files and settings on the same machine give the same, in any process."""
    specs = [(one.shown, _facts(one.pair), _facts(one.alone)) for one in experiment.values]
    return key_of(experiment.option, specs, machine())


def _facts(spec: trial.Spec | None) -> list[Any]:
    """A spec and what its files are: another file of the same name is another measurement."""
    return [] if spec is None else [asdict(spec), *map(_file, (spec.target, spec.draft, spec.options.lookup_corpus))]


def _file(path: Path | None) -> list[Any]:
    if path is None:
        return []
    try:
        status = path.stat()
    except OSError:  # the trial will say so
        return [str(path)]
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


@dataclass
class Sweep:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted, and goes on where it was as long
    as the journal is kept.

    Args:
        experiment: what to measure.
        journal: where trials are kept.
        tried: does a trial.
    """

    experiment: Experiment
    journal: Journal
    tried: Try | None = None
    _results: dict[tuple[str, int], trial.Result] = field(default_factory=dict)
    _failures: dict[str, Failure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._watch: Watch | None = None
        self._keys = {one: key_of(_facts(one)) for one in self._specs()}
        for repetition in range(self.experiment.repetitions):
            for key in set(self._keys.values()):
                if result := self._kept(key, repetition):
                    self._results[key, repetition] = result

    @property
    def measured(self) -> int:
        """How many trials there are results of."""
        return len(self._results)

    def run(self, progress: Progress) -> None:
        """Measure what is missing, values in turn; a run that has failed is not tried again.

        Raises:
            GgufspecError: the journal cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        self._watch = watch = Watch()
        total = self.experiment.repetitions * len(set(self._keys.values()))
        for repetition, what, spec in self._order():
            key = self._keys[spec]
            if (key, repetition) in self._results or key in self._failures:
                continue
            progress(len(self._results), total, what)
            if self.tried:
                made = self.tried(spec)
            else:
                made = attempt(spec, on_event=watch.see, verbose=self.experiment.verbose)
            watch.look_for_strangers()
            if made.result is None:
                self._failures[key] = made.failure or Failure("it failed")
                total -= self.experiment.repetitions - repetition
                continue
            self._results[key, repetition] = made.result
            self.journal.put(_name(key, repetition), plain.dump(made.result))
        progress(total, total, "done")

    def document(self, *, interrupted: bool = False) -> SweepDocument:
        """Everything that has been measured so far."""
        asked = self.experiment
        spec = next((one.pair or one.alone for one in asked.values if one.pair or one.alone), None)
        settings = settings_of(spec) if spec else {}
        results = [result for one in asked.values if one.pair for result in self._of(one.pair).values()]
        seen = self._watch.words() if self._watch else ()
        return SweepDocument(
            pair=asked.pair,
            machine=machine(),
            settings=settings | {asked.option: [one.shown for one in asked.values], "repetitions": asked.repetitions},
            option=asked.option,
            points=tuple(self._point(one) for one in asked.values),
            notes=(*asked.notes, *self._nowhere(), *self._drifted(), *seen, *notes_of(results), *busy_notes(results)),
            interrupted=interrupted,
        )

    def _nowhere(self) -> tuple[str, ...]:
        """Whether layers were asked for that no device took."""
        asked = [spec.options for spec in self._specs()]
        offloads = any(one.gpu_layers or one.gpu_layers_draft for one in asked)
        placed = [result.target for result in self._results.values()]
        if self.experiment.option not in _LAYERS or not offloads or not placed or any(p.gpu_layers for p in placed):
            return ()
        return ("there is no GPU here: every layer was on the CPU, whatever was asked for",)

    def _drifted(self) -> tuple[str, ...]:
        """Whether the machine changed its speed, which ratios within a repetition suffer little from."""
        seen: dict[tuple[str, int], drift.Sample] = {}
        for repetition, _, spec in self._order():
            key = self._keys[spec]
            if (key, repetition) in self._results:
                seen.setdefault((key, repetition), drift.Sample(key, repetition, speed(self._results[key, repetition])))
        return tuple(drift.words(drift.find(list(seen.values()))))

    def _point(self, one: Value) -> SweepPoint:
        pair, by_itself = self._of(one.pair), self._of(one.alone)
        both = sorted(pair.keys() & by_itself.keys())
        ratios = paired_ratios([speed(pair[i]) for i in both], [speed(by_itself[i]) for i in both]) if both else None
        return SweepPoint(
            one.shown, self._summary(one.alone), self._summary(one.pair), ratios, one.failure or self._failure(one)
        )

    def _failure(self, one: Value) -> Failure | None:
        for spec, role in ((one.pair, ""), (one.alone, "target-only: ")):
            if spec is not None and (failure := self._failures.get(self._keys[spec])):
                return Failure(role + failure.error, failure.hint)
        return None

    def _summary(self, spec: trial.Spec | None) -> Run | SpeculativeRun | None:
        results = list(self._of(spec).values())
        return summarise(results, lossy=is_lossy(spec.options.accept)) if results and spec else None

    def _of(self, spec: trial.Spec | None) -> dict[int, trial.Result]:
        """What was measured of a run, by repetition."""
        if spec is None:
            return {}
        key, every = self._keys[spec], range(self.experiment.repetitions)
        return {i: self._results[key, i] for i in every if (key, i) in self._results}

    def _specs(self) -> Iterator[trial.Spec]:
        for one in self.experiment.values:
            yield from (spec for spec in (one.alone, one.pair) if spec is not None)

    def _order(self) -> Iterator[tuple[int, str, trial.Spec]]:
        """Every trial. In each repetition another value is the first, so that a drift is no value's own."""
        values = self.experiment.values
        for repetition in range(self.experiment.repetitions):
            for one in rotated(values, repetition):
                roles = ((one.alone, "target-only"), (one.pair, "speculative"))
                for spec, role in roles:
                    if spec is not None:
                        yield repetition, f"{self.experiment.option.replace('_', ' ')} {one.shown}: {role}", spec

    def _kept(self, key: str, repetition: int) -> trial.Result | None:
        """A trial of an earlier run; None where there is none, or one of another shape."""
        kept = self.journal.get(_name(key, repetition))
        try:
            return None if kept is None else plain.load(trial.Result, kept)
        except ValidationError:
            return None


def rotated(values: Sequence[Value], by: int) -> Sequence[Value]:
    """``values`` with another one first."""
    first = by % max(len(values), 1)
    return (*values[first:], *values[:first])


def _name(key: str, repetition: int) -> str:
    return f"{key}-{repetition}"
