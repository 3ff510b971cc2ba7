"""Sweep over the values of one option: interleaved trials, one row per value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ggufspec.bench import trial
from ggufspec.bench.run_log import RunLog, key_of
from ggufspec.bench.summary import machine_and_versions, used_settings, without_draft
from ggufspec.bench.trials import Progress, RepeatedTrials
from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp.options import Placement
from ggufspec.schema.base import Failure
from ggufspec.schema.sweep import SweepDocument, SweepPoint

LOG = "ggufspec/sweep-log@2"

_LAYERS = ("gpu_layers", "gpu_layers_draft")


@dataclass(frozen=True, slots=True)
class SweptValue:
    """Value of the option, ``shown`` as typed, with its runs; ``pair`` is None if nothing drafts.

    ``failure`` says why the value has no placement and therefore no runs.
    """

    shown: str
    pair: trial.TrialJob | None
    target_only: trial.TrialJob | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SweepExperiment:
    """Values of an ``option`` (e.g. ``draft_max``) to measure, in display order.

    ``pair`` is a description from :meth:`ggufspec.models.profile.Pair.describe`.
    """

    pair: dict[str, Any]
    option: str
    values: tuple[SweptValue, ...]
    repetitions: int
    notes: tuple[str, ...] = ()
    verbose: bool = False

    @property
    def key(self) -> str:
        """Key made from the settings and the machine, but not from file contents, which are in each trial's key."""
        return key_of(
            self.option,
            [(one.shown, trial.key_text(one.pair), trial.key_text(one.target_only)) for one in self.values],
            machine_and_versions(),
        )[:8]


def value(shown: str, spec: trial.TrialJob, best_target_only: DecoderOptions) -> SweptValue:
    """Return a value with its speculative and target-only runs; ``best_target_only`` are the target-only options.

    Drafting options are reset in the target-only run, so that values that differ only in these options share the run.
    """
    target_only = without_draft(replace(spec, options=best_target_only))
    options = replace(target_only.options, draft=Placement())
    if not options.strict:  # strict mode's batch size depends on the draft length
        usual = DecoderOptions()
        options = replace(options, draft_policy=usual.draft_policy, draft_max=usual.draft_max)
    drafts = spec.options.drafts(with_draft=spec.draft is not None)
    return SweptValue(shown, spec if drafts else None, replace(target_only, options=options))


class Sweep:
    """Experiment with its measurements. :meth:`run` may be interrupted and resumes from the log."""

    def __init__(
        self, experiment: SweepExperiment, log: RunLog, attempt: Callable[..., trial.TrialAttempt] | None = None
    ) -> None:
        self.experiment = experiment
        self.trials = RepeatedTrials(log, verbose=experiment.verbose, attempt=attempt)
        self._runs: dict[trial.TrialJob, str] = {}
        for one in experiment.values:
            for spec, role in ((one.target_only, "target-only"), (one.pair, "speculative")):
                if spec is not None:
                    self._runs.setdefault(spec, f"{experiment.option.replace('_', ' ')} {one.shown}: {role}")

    def run(self, progress: Progress) -> None:
        """Measure the missing trials, with the runs interleaved.

        Raises:
            GgufspecError: the log cannot be written.
            KeyboardInterrupt: Ctrl-C.
        """
        done = self.trials.run(self._runs, self.experiment.repetitions, progress)
        progress(done, done, "done")

    def document(self, *, interrupted: bool = False) -> SweepDocument:
        """Return everything measured so far."""
        experiment = self.experiment
        spec = next((spec for one in experiment.values for spec in (one.pair, one.target_only) if spec), None)
        return SweepDocument(
            pair=experiment.pair,
            machine=machine_and_versions(),
            settings=(used_settings(spec) if spec else {})
            | {experiment.option: [one.shown for one in experiment.values], "repetitions": experiment.repetitions},
            option=experiment.option,
            points=tuple(self._point(one) for one in experiment.values),
            notes=(*experiment.notes, *self._no_gpu(), *self.trials.watch.notes(), *self.trials.notes()),
            interrupted=interrupted,
        )

    def _no_gpu(self) -> tuple[str, ...]:
        requested = any(spec.options.target.gpu_layers or spec.options.draft.gpu_layers for spec in self._runs)
        placed = [result.target.gpu_layers for spec in self._runs for result in self.trials.results[spec].values()]
        if self.experiment.option not in _LAYERS or not requested or not placed or any(placed):
            return ()
        return ("this machine has no GPU: every layer ran on the CPU",)

    def _point(self, one: SweptValue) -> SweepPoint:
        pair, target_only, trials = one.pair, one.target_only, self.trials
        return SweepPoint(
            value=one.shown,
            target_only=trials.summary(target_only) if target_only else None,
            speculative=trials.summary(pair) if pair else None,
            speedup=trials.speedup(pair, target_only) if pair and target_only else None,
            failure=one.failure or self._failure(pair, "") or self._failure(target_only, "target-only: "),
        )

    def _failure(self, spec: trial.TrialJob | None, role: str) -> Failure | None:
        failure = self.trials.failures.get(spec) if spec is not None else None
        return Failure(role + failure.error, failure.hint) if failure else None
