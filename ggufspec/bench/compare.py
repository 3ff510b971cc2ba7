"""Many targets with many drafts: every cell at its own best placement, interleaved, and each target's quality."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec.bench import quality, trial
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import by_kind, by_part, machine
from ggufspec.bench.trials import Progress, Trials, identity
from ggufspec.errors import GgufspecError
from ggufspec.files.write import scratch
from ggufspec.schema import codec
from ggufspec.schema.base import Failure, Portion, Spread
from ggufspec.schema.compare import Cell, ComparedModel, CompareDocument, Quality, cell_name
from ggufspec.schema.text import counted

LOG = "ggufspec/compare-log@2"
MORE = 2  # times the requested repetitions, at most, if leaders overlap
_FEWEST = 3  # trials for an interval
_NAMED = 3  # cells of a long list

ByDevice = dict[str, dict[str, int]]


@dataclass(frozen=True, eq=False)
class Contender:
    """One cell: a target with a draft, or target-only. ``failure`` is why there is no ``spec``."""

    target: str
    draft: str | None
    spec: trial.Spec | None
    bytes: ByDevice = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def name(self) -> str:
        return cell_name(self.target, self.draft)


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to compare: every cell, target-only of each target among them, and the targets' quality if asked for.

    ``repetitions`` are trials of each cell; up to :data:`MORE` times as many more of those that lead. ``settings`` and
    ``notes`` are for the document.
    """

    targets: tuple[ComparedModel, ...]
    drafts: tuple[ComparedModel, ...]
    contenders: tuple[Contender, ...]
    repetitions: int
    settings: dict[str, object]
    quality: bool = False
    verbose: bool = False
    notes: tuple[str, ...] = ()


class Comparison:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted, or killed and begun again with
    the same log; :meth:`document` has what is there.
    """

    def __init__(
        self, experiment: Experiment, log: RunLog, attempt: Callable[..., trial.Attempt] | None = None
    ) -> None:
        self.experiment = experiment
        self.trials = Trials(log, verbose=experiment.verbose, attempt=attempt)
        self._log = log
        self._runs = {one.spec: one for one in experiment.contenders if one.spec is not None}
        self._judged = sorted(experiment.targets, key=lambda one: -one.size_bytes)
        if not experiment.quality or len(self._judged) < 2:
            self._judged = []
        self._qualities: dict[str, Quality | Failure] = {}

    def run(self, progress: Progress) -> None:
        """Measure every cell in turn, the leading ones again, then the qualities.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        names = {run: contender.name for run, contender in self._runs.items()}
        done = self.trials.run(
            names, self.experiment.repetitions, progress, more=MORE, leaders=self._again, later=len(self._judged)
        )
        total = done + len(self._judged)
        self._judge(lambda number, name: progress(done + number, total, f"quality of {name}"))

    def _again(self) -> list[trial.Spec]:
        """The leaders, if they have an interval at all."""
        leaders = self.leaders()
        return leaders if leaders and len(self.trials.speeds(leaders[0])) > 1 else []

    def _judge(self, progress: Callable[[int, str], None]) -> None:
        """Measure the targets' quality. The largest that can be read is the reference."""
        alone = {one.target: one for one in self.experiment.contenders if one.draft is None}
        reference: quality.Spec | None = None
        with scratch(self._log.path.parent) as folder:
            for number, model in enumerate(self._judged):
                progress(number, model.name)
                cell = alone[model.name]
                if cell.spec is None:  # what cannot run cannot be read with either
                    self._qualities[model.name] = cell.failure or Failure("it has no placement")
                    continue
                spec = quality.Spec(
                    cell.spec.target,
                    cell.spec.options,
                    folder / "rows.npy",
                    reference is None,
                    reference.reference if reference else model.name,
                    rpc=cell.spec.rpc,
                )
                try:
                    self._qualities[model.name] = self._quality(spec, reference or spec)
                    reference = reference or spec
                except GgufspecError as error:
                    self._qualities[model.name] = Failure.of(error)

    def _quality(self, spec: quality.Spec, reference: quality.Spec) -> Quality:
        facts = codec.dump(replace(spec, rows=Path()))
        key = key_of("quality", identity(spec.model), identity(reference.model), facts)
        found = self._log.get(key, Quality)
        if found is None:
            if spec is not reference and not spec.rows.exists():  # the reference is in the log, and its file is gone
                quality.measure(reference, verbose=self.experiment.verbose)
            found = quality.measure(spec, verbose=self.experiment.verbose)
            self._log.put(key, found)
        return found

    # ---- the document

    def _spread(self, run: trial.Spec) -> Spread:
        return spread(list(self.trials.speeds(run).values()))

    def leaders(self) -> list[trial.Spec]:
        """The fastest cell, and those whose intervals overlap its own; in the order of the matrix."""
        spreads = {run: self._spread(run) for run in self._runs if self.trials.results[run]}
        if not spreads:
            return []
        best = max(spreads.values(), key=lambda one: one.median)
        return [run for run, found in spreads.items() if found is best or overlap(found, best)]

    def document(self, *, interrupted: bool = False) -> CompareDocument:
        """Everything that has been measured so far."""
        leaders = self.leaders()
        return CompareDocument(
            machine=machine(),
            settings=self.experiment.settings,
            targets=tuple(map(self._target, self.experiment.targets)),
            drafts=self.experiment.drafts,
            cells=tuple(self._cell(one, one.spec in leaders) for one in self.experiment.contenders),
            warnings=tuple(self._warnings(leaders)),
            notes=(*self.experiment.notes, *self._log.notes, *_once(self.trials.notes())),
            interrupted=interrupted,
        )

    def _target(self, model: ComparedModel) -> ComparedModel:
        found = self._qualities.get(model.name)
        return replace(model, failure=found) if isinstance(found, Failure) else replace(model, quality=found)

    def _cell(self, contender: Contender, leads: bool) -> Cell:
        spec, run, speedup, failure = contender.spec, None, None, contender.failure
        kinds: tuple[Portion, ...] = ()
        thinking: tuple[Portion, ...] = ()
        if spec is not None:
            run = self.trials.summary(spec)
            failure = self.trials.failures.get(spec) if run is None else None
            rivals = [one for one, cell in self._runs.items() if (cell.target, cell.draft) == (contender.target, None)]
            if contender.draft is not None and rivals:
                speedup = self.trials.speedup(spec, rivals[0])
                paired = self.trials.paired(rivals[0], spec)
                kinds, thinking = by_kind(spec.kinds, *paired), by_part(*paired)
        return Cell(
            target=contender.target,
            draft=contender.draft,
            run=run,
            speedup=speedup,
            bytes=contender.bytes,
            energy_j_per_token=energy_j_per_token(list(self.trials.results[spec].values())) if spec else None,
            leads=leads,
            failure=failure,
            by_kind=kinds,
            by_part=thinking,
        )

    def _warnings(self, leaders: Sequence[trial.Spec]) -> list[str]:
        warnings: list[str] = []
        count = max((len(self.trials.speeds(run)) for run in leaders), default=0)
        if len(leaders) > 1:
            best = max(leaders, key=lambda run: self._spread(run).median)
            others = [self._runs[run].name for run in leaders if run is not best]
            names = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
            warnings.append(
                f"the ranking is uncertain: after {counted(count, 'trial')} each the interval of "
                f"{self._runs[best].name} overlaps {'that' if len(others) == 1 else 'those'} of {names}"
            )
        elif 0 < count < _FEWEST:
            warnings.append(
                f"the ranking is uncertain: {counted(count, 'trial')} of each cell "
                f"{'gives' if count == 1 else 'give'} no interval; -r 5 is usual"
            )
        warnings += self.trials.watch.notes()
        for run, failure in self.trials.failures.items():
            if good := len(self.trials.results[run]):
                warnings.append(f"{self._runs[run].name} failed after {counted(good, 'trial')}: {failure.error}")
        return warnings


def overlap(one: Spread, other: Spread) -> bool:
    """Whether two intervals have a point in common."""
    return one.ci95[0] <= other.ci95[1] and other.ci95[0] <= one.ci95[1]


def energy_j_per_token(results: Sequence[trial.Result]) -> float | None:
    """Joules of all cards for a token, over the trials of which they are known; None if they are of none."""
    known = [one for one in results if one.energy_j is not None]
    tokens = sum(answer.statistics.tokens for one in known for answer in one.answers)
    return sum(one.energy_j or 0.0 for one in known) / tokens if tokens else None


def _once(notes: Sequence[str]) -> tuple[str, ...]:
    """Of notes that differ in their numbers and files only, the first, and how many there were."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\S*\d\S*", "", note), []).append(note)
    return tuple(
        found[0] + (f" (and {counted(len(found) - 1, 'time')} more like it)" if len(found) > 1 else "")
        for found in alike.values()
    )
