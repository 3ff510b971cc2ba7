"""Many targets with many drafts: every cell at its own best placement, interleaved, and each target's quality."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ggufspec import plain
from ggufspec.bench import quality, trial
from ggufspec.bench.interleaved import Progress, Trials, in_turn
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import paired_ratios, spread
from ggufspec.bench.summary import busy_notes, machine, notes_of, summarise
from ggufspec.decoding.options import DecoderOptions
from ggufspec.display import counted
from ggufspec.errors import GgufspecError
from ggufspec.hardware import host
from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread
from ggufspec.schema.compare import Cell, ComparedModel, CompareDocument, Quality, cell_name
from ggufspec.schema.plan import PlannedModel, PlannedOption
from ggufspec.settings import is_lossy

LOG = "ggufspec/compare-log@1"
MORE = 2  # times the requested repetitions, at most, where leaders overlap
_FEWEST = 3  # trials for an interval
_NAMED = 3  # cells of a long list

ByDevice = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A target or draft file. ``identity`` changes with the file's contents; ``alone`` is how a target was placed
    without a draft, which is how its quality is measured.
    """

    name: str
    path: Path | None
    size_bytes: int
    identity: str
    alone: DecoderOptions | None = None


@dataclass(frozen=True, eq=False)
class Contender:
    """One cell of the matrix: a target with a draft, or target-only. ``failure`` is why there is no ``spec``;
    ``identity`` is that of its files.
    """

    target: str
    draft: str | None
    identity: tuple[str, ...]
    spec: trial.Spec | None
    bytes: ByDevice = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def name(self) -> str:
        """For people."""
        return cell_name(self.target, self.draft)

    @cached_property
    def key(self) -> str:
        """Of its trials in the run log."""
        return key_of("trial", self.identity, plain.dump(self.spec))


@dataclass(frozen=True, slots=True)
class Planned:
    """Where a cell runs, as it was planned for the first run of a comparison; a resumed one uses it again."""

    options: DecoderOptions
    bytes: ByDevice


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to compare.

    Args:
        targets: their files.
        drafts: theirs.
        contenders: every cell, target-only of each target among them.
        repetitions: trials of each cell; up to :data:`MORE` times as many more of those that lead.
        settings: for the document.
        rows: where the reference's probabilities are kept while qualities are measured; None measures none.
        rpc: RPC workers.
        verbose: let llama.cpp's log through.
    """

    targets: tuple[Subject, ...]
    drafts: tuple[Subject, ...]
    contenders: tuple[Contender, ...]
    repetitions: int
    settings: dict[str, object]
    rows: Path | None = None
    rpc: tuple[str, ...] = ()
    verbose: bool = False


class Comparison:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted, or killed and begun again with
    the same log; :meth:`document` has what is there.
    """

    def __init__(
        self,
        experiment: Experiment,
        log: RunLog,
        attempt: Callable[..., trial.Attempt] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.experiment = experiment
        self.qualities: dict[str, Quality | Failure] = {}
        self.measured: dict[Contender, list[trial.Result]] = {contender: [] for contender in experiment.contenders}
        self.trials = Trials(log, verbose=experiment.verbose, attempt=attempt, now=now)
        self._log = log
        self._contenders = [one for one in experiment.contenders if one.spec is not None]
        self._done = 0

    def run(self, progress: Progress) -> None:
        """Measure every cell in turn, the leading ones again, then the qualities.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        repetitions = self.experiment.repetitions
        jobs = len(self._judged()) if len(self.experiment.targets) > 1 else 0
        self._total, self._progress = repetitions * len(self._contenders) + jobs, progress
        for repetition in range(repetitions):
            self._repeat(self._contenders, repetition)
        for repetition in range(repetitions, repetitions * (1 + MORE)):
            leaders = self.leaders()
            if len(leaders) < 2 or len(self._speeds(leaders[0])) < 2:
                break
            self._total += len(leaders)
            self._repeat(leaders, repetition)
        self._judge()
        self._log.done()

    def _repeat(self, contenders: Sequence[Contender], repetition: int) -> None:
        for contender in in_turn(contenders, repetition):
            assert contender.spec is not None
            self._show(contender.name)
            if result := self.trials.measure(contender.key, contender.spec, repetition):
                self.measured[contender].append(result)
            self._done += 1

    def _show(self, what: str) -> None:
        self._progress(self._done, self._total, what)

    # ---- quality

    def _judged(self) -> list[Subject]:
        """Targets whose quality is to be measured, largest first."""
        if self.experiment.rows is None:
            return []
        subjects = [one for one in self.experiment.targets if one.alone is not None]
        return sorted(subjects, key=lambda one: -one.size_bytes)

    def _judge(self) -> None:
        subjects, rows = self._judged(), self.experiment.rows
        if len(self.experiment.targets) < 2 or rows is None:
            return
        for cell in self.experiment.contenders:
            if cell.draft is None and cell.failure is not None:  # what cannot run cannot be read with either
                self.qualities[cell.target] = cell.failure
        reference: Subject | None = None
        written = False
        try:
            for subject in subjects:
                found: Quality | Failure | None
                self._show(f"quality of {subject.name}")
                spec = self._quality_spec(subject, reference or subject, rows)
                key = _quality_key(spec, subject, reference or subject)
                found = self._log.load(key, Quality) or self._log.load(key, Failure, failed=True)
                if found is None and reference is not None and not written:  # resumed: its file is gone
                    again = self._read(self._quality_spec(reference, reference, rows))
                    found = again if isinstance(again, Failure) else None
                    written = found is None
                if found is None:
                    found = self._read(spec)
                    self._log.keep(key, found, failed=isinstance(found, Failure))
                    written = written or (reference is None and isinstance(found, Quality))
                if isinstance(found, Quality):
                    reference = reference or subject
                self.qualities[subject.name] = found
                self._done += 1
        finally:
            quality.forget(rows)

    def _read(self, spec: quality.Spec) -> Quality | Failure:
        try:
            return quality.measure(spec, verbose=self.experiment.verbose)
        except GgufspecError as error:
            return Failure(error.message, error.hint)

    def _quality_spec(self, subject: Subject, reference: Subject, rows: Path) -> quality.Spec:
        assert subject.path is not None
        assert subject.alone is not None
        return quality.Spec(
            model=subject.path,
            placement=subject.alone.placement,
            threads=subject.alone.threads or host.physical_cores(),
            rows=rows,
            is_reference=subject is reference,
            reference=reference.name,
            cache_type_k=subject.alone.cache_type_k,
            cache_type_v=subject.alone.cache_type_v,
            flash_attn=subject.alone.flash_attn,
            rpc=self.experiment.rpc,
        )

    # ---- the document

    def _speeds(self, contender: Contender) -> dict[int, float]:
        """Tokens/s by repetition."""
        return self.trials.speeds(contender.key)

    def leaders(self) -> list[Contender]:
        """The fastest cell, and those whose intervals overlap its own; in the order of the matrix."""
        spreads = {one: spread(list(speeds.values())) for one in self._contenders if (speeds := self._speeds(one))}
        if not spreads:
            return []
        best = max(spreads.values(), key=lambda one: one.median)
        return [one for one, found in spreads.items() if found is best or overlap(found, best)]

    def document(self, *, interrupted: bool = False) -> CompareDocument:
        """Everything that has been measured so far."""
        leaders = self.leaders()
        cells = tuple(self._cell(one, one in leaders) for one in self.experiment.contenders)
        results = [result for one in self._contenders for result in self.trials.results(one.key).values()]
        return CompareDocument(
            machine=machine(),
            settings=self.experiment.settings,
            targets=tuple(self._model(one, self.qualities.get(one.name)) for one in self.experiment.targets),
            drafts=tuple(self._model(one, None) for one in self.experiment.drafts),
            cells=cells,
            warnings=tuple(self._warnings(leaders)),
            notes=(*self._log.notes, *_once(notes_of(results)), *busy_notes(results)),
            interrupted=interrupted,
        )

    def _model(self, subject: Subject, found: Quality | Failure | None) -> ComparedModel:
        file = str(subject.path) if subject.path else ""
        good = found if isinstance(found, Quality) else None
        failure = found if isinstance(found, Failure) else None
        return ComparedModel(subject.name, file, subject.size_bytes, good, failure)

    def _cell(self, contender: Contender, leads: bool) -> Cell:
        results = list(self.trials.results(contender.key).values())
        failure = contender.failure or self.trials.failure(contender.key)
        run: Run | SpeculativeRun | None = None
        if results:
            assert contender.spec is not None
            run = summarise(results, lossy=is_lossy(contender.spec.options.accept))
        return Cell(
            target=contender.target,
            draft=contender.draft,
            run=run,
            speedup=self._speedup(contender),
            bytes=contender.bytes,
            energy_j_per_token=energy_j_per_token(results),
            leads=leads,
            failure=failure if run is None else None,
        )

    def _speedup(self, contender: Contender) -> Spread | None:
        if contender.draft is None:
            return None
        rival = next(
            (one for one in self._contenders if (one.target, one.draft) == (contender.target, None)),
            None,
        )
        ours, theirs = self._speeds(contender), self._speeds(rival) if rival else {}
        both = [repetition for repetition in ours if repetition in theirs]
        return paired_ratios([ours[i] for i in both], [theirs[i] for i in both]) if both else None

    def _warnings(self, leaders: Sequence[Contender]) -> list[str]:
        warnings: list[str] = []
        counts = {len(self._speeds(one)) for one in leaders}
        if len(leaders) > 1:
            best = max(leaders, key=lambda one: spread(list(self._speeds(one).values())).median)
            others = [one.name for one in leaders if one is not best]
            names = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
            warnings.append(
                f"the ranking is uncertain: after {counted(max(counts), 'trial')} each the interval of {best.name} "
                f"overlaps {'that' if len(others) == 1 else 'those'} of {names}"
            )
        elif counts and max(counts) < _FEWEST:
            warnings.append(
                f"the ranking is uncertain: {counted(max(counts), 'trial')} of each cell "
                f"{'gives' if max(counts) == 1 else 'give'} no interval; -r 5 is usual"
            )
        warnings += self.trials.disturbances()
        for one in self._contenders:
            failure, good = self.trials.failure(one.key), len(self._speeds(one))
            if failure is not None and good:
                warnings.append(f"{one.name} failed after {counted(good, 'trial')}: {failure.error}")
        return warnings


def _quality_key(spec: quality.Spec, subject: Subject, reference: Subject) -> str:
    facts = plain.dump(spec)
    del facts["rows"]
    return key_of("quality", subject.identity, reference.identity, facts)


def overlap(one: Spread, other: Spread) -> bool:
    """Whether two intervals have a point in common."""
    return one.ci95[0] <= other.ci95[1] and other.ci95[0] <= one.ci95[1]


def energy_j_per_token(results: Sequence[trial.Result]) -> float | None:
    """Joules of all cards for a token, over the trials of which they are known; None if they are of none."""
    known = [one for one in results if one.energy_j is not None]
    tokens = sum(answer.statistics.tokens for one in known for answer in one.answers)
    return sum(one.energy_j or 0.0 for one in known) / tokens if tokens else None


def parts(option: PlannedOption, overheads: dict[str, int]) -> ByDevice:
    """A planned option's bytes by device, under the names of :class:`ggufspec.schema.compare.Cell`.

    Args:
        option: of a plan.
        overheads: what each device's driver takes for itself.
    """
    found: ByDevice = {}
    models: tuple[tuple[str, PlannedModel | None], ...] = (("target", option.target), ("draft", option.draft))
    for role, model in models:
        for device, used in (model.bytes if model else {}).items():
            row = found.setdefault(device, {})
            for part in ("weights", "kv", "compute"):
                row[f"{role} {part}"] = used[part]
            row["overhead"] = row.get("overhead", overheads.get(device, 0)) + used.get("overhead", 0)
    return {device: row for device, row in found.items() if any(row.values())}


def _once(notes: Sequence[str]) -> tuple[str, ...]:
    """Of notes that differ in their numbers and files only, the first, and how many there were."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\S*\d\S*", "", note), []).append(note)
    return tuple(
        found[0] + (f" (and {counted(len(found) - 1, 'time')} more like it)" if len(found) > 1 else "")
        for found in alike.values()
    )
