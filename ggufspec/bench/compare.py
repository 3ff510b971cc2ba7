"""Many targets with many drafts: every cell at its own best placement, by turns, and what each target is worth."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ggufspec.bench import attempt, drift, quality, trial
from ggufspec.bench.ledger import ByDevice, Kept, Ledger
from ggufspec.bench.stats import paired_ratios, spread
from ggufspec.bench.versus import Progress, busy_notes, machine, notes_of, speed, summarise
from ggufspec.bench.watch import Watch
from ggufspec.decoding.options import DecoderOptions, is_lossy
from ggufspec.display import counted
from ggufspec.errors import GgufspecError
from ggufspec.hardware import host
from ggufspec.schema.base import Failure, Run, SpeculativeRun, Spread
from ggufspec.schema.compare import Cell, ComparedModel, CompareDocument, Quality, cell_name
from ggufspec.schema.plan import PlannedModel, PlannedOption

MORE = 2  # times the repetitions asked for, at most, where leaders overlap
_FEWEST = 3  # trials of which an interval can be told
_NAMED = 3  # cells of a long list


@dataclass(frozen=True, slots=True)
class Subject:
    """A target or draft file. ``identity`` is another one when the file's contents are; ``alone`` is how a target's
    quality is measured, where it was placed.
    """

    name: str
    path: Path | None
    size_bytes: int
    identity: str
    alone: DecoderOptions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """One cell of the matrix: a target with a draft, or alone. ``failure`` says why there is no ``spec``."""

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


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to compare.

    Args:
        targets: their files.
        drafts: theirs.
        contenders: every cell, the target alone of each target among them.
        repetitions: trials of each cell; up to :data:`MORE` times as many more of those that lead.
        settings: what was asked for, for the document.
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


@dataclass
class Comparison:
    """An experiment and what has been measured of it. :meth:`run` may be interrupted, or killed and begun again with
    the same ledger; :meth:`document` tells of what is there.
    """

    experiment: Experiment
    ledger: Ledger
    now: Callable[[], float] = time.time
    trials: dict[Contender, dict[int, Kept]] = field(init=False, default_factory=dict)
    qualities: dict[str, Quality | Failure] = field(init=False, default_factory=dict)
    measured: dict[Contender, list[trial.Result]] = field(init=False, default_factory=dict)
    kept_from_before: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._contenders = [one for one in self.experiment.contenders if one.spec is not None]
        self.trials = {contender: {} for contender in self.experiment.contenders}
        self.measured = {contender: [] for contender in self.experiment.contenders}
        self._watch: Watch | None = None
        self._done = 0

    def run(self, progress: Progress) -> None:
        """Measure every cell by turns, those that lead some more, then the qualities.

        Raises:
            GgufspecError: what was measured cannot be kept.
            KeyboardInterrupt: Ctrl-C.
        """
        self._watch = Watch()
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
        self.ledger.done()

    def _repeat(self, contenders: Sequence[Contender], repetition: int) -> None:
        first = repetition % max(len(contenders), 1)
        for contender in (*contenders[first:], *contenders[:first]):
            self._tell(contender.name)
            if not any(kept.failure for kept in self.trials[contender].values()):
                self._measure(contender, repetition)
            self._done += 1

    def _measure(self, contender: Contender, repetition: int) -> None:
        assert contender.spec is not None
        assert self._watch is not None
        kept = self.ledger.trial_of(contender.identity, contender.spec, repetition)
        if kept is None:
            self._watch.clear()
            done = attempt.attempt(contender.spec, on_event=self._watch.see, verbose=self.experiment.verbose)
            self._watch.look_for_strangers()
            kept = Kept(done.result, done.failure, self.now(), self._watch.throttled, self._watch.strangers)
            self.ledger.keep_trial(contender.identity, contender.spec, repetition, kept)
            if done.result is not None:
                self.measured[contender].append(done.result)
        else:
            self.kept_from_before += 1
        self.trials[contender][repetition] = kept

    def _tell(self, what: str) -> None:
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
                self._tell(f"quality of {subject.name}")
                spec = self._quality_spec(subject, reference or subject, rows)
                identity = (subject.identity, (reference or subject).identity)
                found = self.ledger.quality_of(identity, spec)
                if found is None and reference is not None and not written:  # resumed: its file is gone
                    again = self._read(self._quality_spec(reference, reference, rows))
                    found = again if isinstance(again, Failure) else None
                    written = found is None
                if found is None:
                    found = self._read(spec)
                    self.ledger.keep_quality(identity, spec, found)
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

    # ---- what it says

    def _speeds(self, contender: Contender) -> dict[int, float]:
        """Tokens/s by repetition."""
        kept = self.trials[contender]
        return {repetition: speed(one.result) for repetition, one in sorted(kept.items()) if one.result is not None}

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
        results = [kept.result for trials in self.trials.values() for kept in trials.values() if kept.result]
        return CompareDocument(
            machine=machine(),
            settings=self.experiment.settings,
            targets=tuple(self._model(one, self.qualities.get(one.name)) for one in self.experiment.targets),
            drafts=tuple(self._model(one, None) for one in self.experiment.drafts),
            cells=cells,
            warnings=tuple(self._warnings(leaders)),
            notes=(*self.ledger.notes, *_once(notes_of(results)), *busy_notes(results)),
            interrupted=interrupted,
        )

    def _model(self, subject: Subject, found: Quality | Failure | None) -> ComparedModel:
        file = str(subject.path) if subject.path else ""
        good = found if isinstance(found, Quality) else None
        failure = found if isinstance(found, Failure) else None
        return ComparedModel(subject.name, file, subject.size_bytes, good, failure)

    def _cell(self, contender: Contender, leads: bool) -> Cell:
        kept = self.trials[contender]
        results = [one.result for _, one in sorted(kept.items()) if one.result is not None]
        failure = contender.failure or next((one.failure for one in kept.values() if one.failure), None)
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
        told: list[str] = []
        counts = {len(self._speeds(one)) for one in leaders}
        if len(leaders) > 1:
            best = max(leaders, key=lambda one: spread(list(self._speeds(one).values())).median)
            others = [one.name for one in leaders if one is not best]
            names = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
            told.append(
                f"the ranking is unsure: after {counted(max(counts), 'trial')} each the interval of {best.name} "
                f"overlaps {'that' if len(others) == 1 else 'those'} of {names}"
            )
        elif counts and max(counts) < _FEWEST:
            told.append(
                f"the ranking is unsure: {counted(max(counts), 'trial')} of each cell "
                f"{'gives' if max(counts) == 1 else 'give'} no interval; -r 5 is usual"
            )
        trials = sorted(
            (kept.at, one.name, repetition, kept)
            for one, by_repetition in self.trials.items()
            for repetition, kept in by_repetition.items()
        )
        samples = [
            drift.Sample(name, repetition, speed(kept.result)) for _, name, repetition, kept in trials if kept.result
        ]
        told += drift.words(drift.find(samples))
        for reason in sorted({reason for _, _, _, kept in trials for reason in kept.throttled}):
            count = sum(reason in kept.throttled for _, _, _, kept in trials)
            told.append(f"{reason} in {counted(count, 'trial')} of {len(trials)}: the cards were held back")
        for name in sorted({name for _, _, _, kept in trials for name in kept.strangers}):
            told.append(f"another program came onto a card meanwhile: {name}")
        if self._watch is not None:
            told += self._watch.at_first
        for one, by_repetition in self.trials.items():
            good = sum(kept.result is not None for kept in by_repetition.values())
            for kept in by_repetition.values():
                if kept.failure is not None and good:
                    told.append(f"{one.name} failed after {counted(good, 'trial')}: {kept.failure.error}")
        return told


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
