"""Comparison of targets and drafts: interleaved trials of each cell at its best placement, and target quality."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec.bench import quality, trial
from ggufspec.bench.extent import AnswerExtent, CellCosts, fit_extent
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.statistics import spread
from ggufspec.bench.summary import by_kind, by_part, machine_and_versions, trial_speed
from ggufspec.bench.trials import START_S, Progress, RepeatedTrials, file_identity, size_bytes
from ggufspec.errors import GgufspecError
from ggufspec.files.write import scratch
from ggufspec.schema import codec
from ggufspec.schema.base import Failure, Portion, Spread
from ggufspec.schema.compare import CompareCell, ComparedModel, CompareDocument, Quality, cell_name
from ggufspec.schema.text import as_budget, counted, duration

LOG = "ggufspec/compare-log@2"
MORE = 2  # maximum extra repetitions for leaders with overlapping intervals, as a multiple of the requested number
_FEWEST = 3  # minimum trials for an interval
_NAMED = 3  # maximum number of cells that a warning names
_MEASURED_SHARE = 0.85  # share of the budget spent on trials; the rest covers estimation errors
_QUALITY_SHARE = 0.25  # maximum share of the budget for measuring the targets' quality
_QUALITY_TOKENS = 3500  # prompt tokens that take as long as the quality text (2,276 tokens, all with logits)

ByDevice = dict[str, dict[str, int]]


@dataclass(frozen=True, eq=False)
class Contender:
    """Cell of the comparison: a target with a draft, or target-only. ``failure`` says why there is no ``spec``."""

    target: str
    draft: str | None
    spec: trial.TrialJob | None
    bytes: ByDevice = field(default_factory=dict)
    failure: Failure | None = None
    predicted_tokens_per_s: float = 0.0  # predicted speed; 0 if there is no prediction

    @property
    def name(self) -> str:
        return cell_name(self.target, self.draft)


@dataclass(frozen=True, slots=True)
class CompareExperiment:
    """Cells to compare, including target-only for each target, and whether to measure the targets' quality.

    Each cell gets ``repetitions`` trials, and leaders get up to :data:`MORE` times as many in addition. A ``budget_s``
    may reduce repetitions, prompts and, if ``cut``, answer lengths. ``settings`` and ``notes`` go into the document.
    """

    targets: tuple[ComparedModel, ...]
    drafts: tuple[ComparedModel, ...]
    contenders: tuple[Contender, ...]
    repetitions: int
    settings: dict[str, object]
    quality: bool = False
    verbose: bool = False
    notes: tuple[str, ...] = ()
    budget_s: float | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """Extent of trials that fits in a budget; ``off`` is the ratio of measured to predicted speed."""

    extent: AnswerExtent
    off: float = 1.0


class Comparison:
    """Experiment and its measurements. :meth:`run` may be interrupted or killed, and resumes from the log."""

    def __init__(
        self, experiment: CompareExperiment, log: RunLog, attempt: Callable[..., trial.TrialAttempt] | None = None
    ) -> None:
        self.experiment = experiment
        self.trials = RepeatedTrials(log, verbose=experiment.verbose, attempt=attempt)
        self._log = log
        self._use(experiment)
        self._judged = sorted(experiment.targets, key=lambda one: -one.size_bytes)
        if not experiment.quality or len(self._judged) < 2:
            self._judged = []
        self._unjudged = self._judged
        self._qualities: dict[str, Quality | Failure] = {}

    def _use(self, experiment: CompareExperiment) -> None:
        self.experiment = experiment
        self._runs = {one.spec: one for one in experiment.contenders if one.spec is not None}
        self.trials.predicted = {run: one.predicted_tokens_per_s for run, one in self._runs.items()}

    def run(self, progress: Progress) -> None:
        """Measure all cells interleaved, then the leaders again, then the targets' quality.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        if self.experiment.budget_s is not None and self._runs:
            progress(0, len(self._runs), "a short trial, to divide up the budget")
            self._share(self.experiment.budget_s)
        names = {run: contender.name for run, contender in self._runs.items()}
        done = self.trials.run(
            names, self.experiment.repetitions, progress, more=MORE, leaders=self._again, later=len(self._judged)
        )
        total, self.trials.left_s = done + len(self._judged), 0.0
        self._judge(lambda number, name: progress(done + number, total, f"quality of {name}"))

    @property
    def left_s(self) -> float:
        """Estimated seconds left; infinity if unknown."""
        quality_s = sum(map(self._quality_s, self._unjudged))
        return max(0.0, min(self.trials.left_s + quality_s, self.trials.budget_s - self.trials.spent_s))

    def _quality_s(self, model: ComparedModel) -> float:
        runs = (run for run, one in self._runs.items() if (one.target, one.draft) == (model.name, None))
        results = [result for run in runs for result in self.trials.results[run].values()]
        read = trial.prompt_speed(answer for result in results for answer in result.answers)
        return START_S + results[0].load_s + _QUALITY_TOKENS / read if read else 0.0

    def _share(self, budget_s: float) -> None:
        """Shorten the trials to fit in the budget, based on one short trial and the plan's speeds."""
        experiment, first = self.experiment, next(iter(self._runs))
        most = AnswerExtent(len(first.prompts), first.max_tokens, experiment.repetitions, bool(self._judged))
        key = key_of("extent", budget_s, codec.dump(most))
        share = self._log.get(key, BudgetShare)  # reuse an earlier run's share, so that its logged trials still match
        if share is None:
            share = self._shared(budget_s, most)
            self._log.put(key, share)
        extent, self.trials.budget_s = share.extent, budget_s
        notes = [_left_out(budget_s, most, extent)] if replace(extent, quality=most.quality) != most else []
        if most.quality and not extent.quality:
            self._judged = self._unjudged = []
            notes.append(
                f"--budget {duration(budget_s)} leaves no time to measure the targets' quality: use a longer one"
            )
        contenders = (
            replace(
                one,
                spec=_shortened(one.spec, extent) if one.spec else None,
                predicted_tokens_per_s=one.predicted_tokens_per_s * share.off,
            )
            for one in experiment.contenders
        )
        settings = {"prompts": extent.prompts, "max_tokens": extent.max_tokens, "repetitions": extent.repetitions}
        self._use(
            replace(
                experiment,
                contenders=tuple(contenders),
                repetitions=extent.repetitions,
                settings=experiment.settings | settings | {"budget_s": budget_s},
                notes=(*experiment.notes, *notes),
            )
        )

    def _shared(self, budget_s: float, most: AnswerExtent) -> BudgetShare:
        probed = None
        for run in self._runs:
            short = replace(run, prompts=run.prompts[:1], kinds=run.kinds[:1], max_tokens=min(16, run.max_tokens))
            if (probed := self.trials.probe(short)) is not None:
                break
        if probed is None:  # nothing can run; the trials will report why
            return BudgetShare(most)
        read = [answer.statistics for answer in probed.answers]
        prompt_s, tokens_per_s = sum(one.prompt_s for one in read), trial_speed(probed)
        slower = self.trials.predicted[run] or tokens_per_s
        costs = []
        for one in self._runs:
            ratio = slower / (self.trials.predicted[one] or slower)
            load_s = START_S + probed.load_s * size_bytes(one) / max(size_bytes(run), 1)
            costs.append(CellCosts(load_s, prompt_s * ratio, ratio / tokens_per_s))
        prompt_tokens = sum(one.prompt_read for one in read)
        quality_s = sum(
            START_S + probed.load_s + _QUALITY_TOKENS * prompt_s / max(prompt_tokens, 1) for _ in self._judged
        )
        quality = most.quality and quality_s <= _QUALITY_SHARE * budget_s
        left_s = _MEASURED_SHARE * budget_s - self.trials.spent_s - (quality_s if quality else 0.0)
        extent = fit_extent(left_s, costs, replace(most, quality=quality), cut=self.experiment.cut)
        return BudgetShare(extent, tokens_per_s / slower)

    def _again(self) -> list[trial.TrialJob]:
        """Return the leaders if they have enough trials for an interval; otherwise an empty list."""
        leaders = self.leaders()
        return leaders if leaders and len(self.trials.speeds(leaders[0])) > 1 else []

    def _judge(self, progress: Callable[[int, str], None]) -> None:
        """Measure the targets' quality; the reference is the largest target that can be measured."""
        target_only = {one.target: one for one in self.experiment.contenders if one.draft is None}
        reference: quality.QualityJob | None = None
        with scratch(self._log.path.parent) as folder:
            for number, model in enumerate(self._judged):
                self._unjudged = self._judged[number:]
                progress(number, model.name)
                cell = target_only[model.name]
                if cell.spec is None:  # the quality run needs the target-only placement
                    self._qualities[model.name] = cell.failure or Failure("it has no placement")
                    continue
                spec = quality.QualityJob(
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

    def _quality(self, spec: quality.QualityJob, reference: quality.QualityJob) -> Quality:
        facts = codec.dump(replace(spec, rows=Path()))
        key = key_of("quality", file_identity(spec.model), file_identity(reference.model), facts)
        found = self._log.get(key, Quality)
        if found is None:
            if spec is not reference and not spec.rows.exists():  # the reference was in the log, but its rows are gone
                quality.measure_quality(reference, verbose=self.experiment.verbose)
            found = quality.measure_quality(spec, verbose=self.experiment.verbose)
            self._log.put(key, found)
        return found

    # ---- the document

    def _spread(self, run: trial.TrialJob) -> Spread:
        return spread(list(self.trials.speeds(run).values()))

    def leaders(self) -> list[trial.TrialJob]:
        """Return the fastest cell and all cells whose intervals overlap its interval, in matrix order."""
        spreads = {run: self._spread(run) for run in self._runs if self.trials.results[run]}
        if not spreads:
            return []
        best = max(spreads.values(), key=lambda one: one.median)
        return [run for run, found in spreads.items() if found is best or overlap(found, best)]

    def document(self, *, interrupted: bool = False) -> CompareDocument:
        """Return everything measured so far."""
        leaders = self.leaders()
        missing = [run for run in self._runs if not self.trials.results[run] and run not in self.trials.failures]
        cells = tuple(self.cell(one, leads=one.spec in leaders) for one in self.experiment.contenders)
        notes = (*self.experiment.notes, *self._log.notes, *_once(self.trials.notes()))
        if missing and not interrupted:
            notes = (
                *notes,
                f"{counted(len(missing), 'cell')} did not fit in the budget: {self._longer(missing)} measures all",
            )
        return CompareDocument(
            machine=machine_and_versions(),
            settings=self.experiment.settings,
            targets=tuple(map(self._target, self.experiment.targets)),
            drafts=self.experiment.drafts,
            cells=cells,
            warnings=tuple(self._warnings(leaders)),
            notes=notes,
            interrupted=interrupted,
        )

    def _longer(self, missing: Sequence[trial.TrialJob]) -> str:
        """Return the ``--budget`` option that leaves enough time to try every missing cell, plus 25 %."""
        rest_s = sum(map(self.trials.trial_s, missing))
        if not rest_s:
            return "a longer --budget"
        return f"--budget {as_budget(1.25 * (self.trials.spent_s + rest_s))}"

    def _target(self, model: ComparedModel) -> ComparedModel:
        found = self._qualities.get(model.name)
        return replace(model, failure=found) if isinstance(found, Failure) else replace(model, quality=found)

    def cell(self, contender: Contender, *, leads: bool = False) -> CompareCell:
        """Return a cell with its measurements so far."""
        spec, run, speedup, failure = contender.spec, None, None, contender.failure
        kinds: tuple[Portion, ...] = ()
        thinking: tuple[Portion, ...] = ()
        if spec is not None:
            run = self.trials.summary(spec)
            failure = self.trials.failures.get(spec) if run is None else None
            baselines = [
                one for one, cell in self._runs.items() if (cell.target, cell.draft) == (contender.target, None)
            ]
            if contender.draft is not None and baselines:
                speedup = self.trials.speedup(spec, baselines[0])
                paired = self.trials.paired(baselines[0], spec)
                kinds, thinking = by_kind(spec.kinds, *paired), by_part(*paired)
        return CompareCell(
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

    def _warnings(self, leaders: Sequence[trial.TrialJob]) -> list[str]:
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
                f"the ranking is uncertain: {counted(count, 'trial')} per cell {'is' if count == 1 else 'are'} too few "
                "for an interval; use a larger -r or a longer --budget"
            )
        warnings += self.trials.watch.notes()
        for run, failure in self.trials.failures.items():
            if good := len(self.trials.results[run]):
                warnings.append(f"{self._runs[run].name} failed after {counted(good, 'trial')}: {failure.error}")
        return warnings


def _shortened(spec: trial.TrialJob, extent: AnswerExtent) -> trial.TrialJob:
    """Return a trial with shorter answers and fewer prompts, evenly spaced so that all kinds stay represented."""
    chosen = [number * len(spec.prompts) // extent.prompts for number in range(extent.prompts)]
    prompts, kinds = (
        tuple(texts[number] for number in chosen) if texts else () for texts in (spec.prompts, spec.kinds)
    )
    return replace(spec, prompts=prompts, kinds=kinds, max_tokens=extent.max_tokens)


def _left_out(budget_s: float, most: AnswerExtent, extent: AnswerExtent) -> str:
    counts = (
        (extent.max_tokens, most.max_tokens, "token"),
        (extent.repetitions, most.repetitions, "trial"),
        (extent.prompts, most.prompts, "prompt"),
    )
    cut = [f"{found} of {counted(wanted, thing)}" for found, wanted, thing in counts if found < wanted]
    return f"to finish within {duration(budget_s)}, each cell has {', '.join(cut)}"


def overlap(one: Spread, other: Spread) -> bool:
    """Return whether two confidence intervals overlap."""
    return one.ci95[0] <= other.ci95[1] and other.ci95[0] <= one.ci95[1]


def energy_j_per_token(results: Sequence[trial.TrialResult]) -> float | None:
    """Return joules per token over all GPUs, from the trials that measured energy; None if no trial did."""
    known = [one for one in results if one.energy_j is not None]
    tokens = sum(answer.statistics.tokens for one in known for answer in one.answers)
    return sum(one.energy_j or 0.0 for one in known) / tokens if tokens else None


def _once(notes: Sequence[str]) -> tuple[str, ...]:
    """Merge notes that differ only in numbers and files into the first of them, with a count of the others."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\S*\d\S*", "", note), []).append(note)
    return tuple(
        found[0] + (f" (and {len(found) - 1} more like it)" if len(found) > 1 else "") for found in alike.values()
    )
