"""Command ``ggufspec bench --sweep``: measure one option at several values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ggufspec.api.options import decoder_options, layers_of
from ggufspec.bench.run_log import RunLog
from ggufspec.bench.sweep import LOG, Sweep, SweepExperiment, SweptValue, value
from ggufspec.bench.trial import TrialJob
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import SweptOption
from ggufspec.cli.results import finish, folder, measured, show_files
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files.write import as_file_name
from ggufspec.llamacpp.options import offloaded
from ggufspec.models.headers import read_headers
from ggufspec.models.profile import Pair
from ggufspec.reports import sweep as report
from ggufspec.reports import table, words
from ggufspec.schema.base import Failure
from ggufspec.schema.sweep import SweepDocument
from ggufspec.settings.table import OPTIONS, Settings, names

_AT_EACH = ("gpu_layers", "n_cpu_moe", "n_cpu_ffn")  # options for which target-only also runs at every value


def check_swept(swept: SweptOption | None, *, sweep: bool) -> None:
    """Raise a UsageError for a list without ``--sweep``, or ``--sweep`` without a list."""
    if swept is not None and not sweep:
        shown = ",".join(shown for shown, _ in swept.values)
        raise UsageError(f"{swept.option.flag} {shown} is a list", "add --sweep to measure each value")
    if sweep and swept is None:
        flags = ", ".join(OPTIONS[name].flag for name in names(sweep=True))
        raise UsageError(
            "--sweep needs an option with several values",
            f"ggufspec bench --sweep --draft-max 1,2,4,8; options that take a list: {flags}",
        )


def place_values(pair: Pair, spec: TrialJob, swept: SweptOption, given: Settings, repetitions: int) -> SweepExperiment:
    """Place the pair for each value; all trials are like ``spec``, except for the draft and the options."""
    swept, notes = _distinct(swept, pair)
    settings = [swept.put(given, one).over(pair.settings) for _, one in swept.values]
    decoders = [decoder_options(one) for one in settings]  # check all now: a typo is an error, not a failed row
    at_each = swept.option.name in _AT_EACH
    values: list[SweptValue] = []
    for (shown, one), decoder in zip(swept.values, decoders, strict=True):
        try:
            resolved = inputs.resolve_shown(pair, swept.put(given, one), best_target_only=not at_each)
        except GgufspecError as error:
            values.append(SweptValue(shown, None, None, Failure.of(error)))
            continue
        trial = replace(spec, draft=pair.draft if decoder.needs_draft else None, options=resolved.pair)
        values.append(value(shown, trial, resolved.pair if at_each else resolved.target_only))
    notes += _notes(swept, values)
    return SweepExperiment(pair.describe(), swept.option.name, tuple(values), repetitions, notes, ui.flags().verbose)


def _distinct(swept: SweptOption, pair: Pair) -> tuple[SweptOption, tuple[str, ...]]:
    """Drop layer counts that mean the same as an earlier one, and return a note about them."""
    file = {"gpu_layers": pair.target, "gpu_layers_draft": pair.draft}.get(swept.option.name)
    if file is None:
        return swept, ()
    layers = read_headers([file])[0].header.layers
    meant: dict[int | None, tuple[str, Any]] = {}
    for shown, one in swept.values:
        count = layers_of(one)
        meant.setdefault(None if count is None else offloaded(count, layers), (shown, one))
    left = tuple(meant.values())
    same = [shown for shown, _ in swept.values if shown not in dict(left)]
    if not same:
        return swept, ()
    first = meant[layers][0]
    note = f"{swept.option.flag} {first} is all {layers} layers; so are {', '.join(same)}, which were left out"
    return replace(swept, values=left), (note,)


def _notes(swept: SweptOption, values: list[SweptValue]) -> tuple[str, ...]:
    if swept.option.name in _AT_EACH:
        return (f"target-only ran at each value of {swept.option.flag} too, not at its own best placement",)
    places = {one.target_only.options.target for one in values if one.target_only}
    own = any(
        one.pair and one.target_only and one.pair.options.target != one.target_only.options.target for one in values
    )
    return ("target-only ran at its own best placement",) if own and len(places) == 1 else ()


def measure_sweep(experiment: SweepExperiment, given: Settings) -> int:
    """Measure every value, show and write the results; an interrupted run resumes."""
    path = folder(given) / f"sweep-{as_file_name(experiment.pair['name'])}-{experiment.option}-{experiment.key}.jsonl"
    with RunLog(path, LOG, fresh=bool(given.fresh)) as log:
        sweep = Sweep(experiment, log)
        interrupted = measured(sweep.run, lambda: any(sweep.trials.results.values()))
    document = sweep.document(interrupted=interrupted)
    code = finish(
        document,
        lambda: _show(document),
        given,
        markdown=report.markdown,
        csv=report.comma_separated,
        notes=(*log.notes, *document.notes),
        kept=path.with_suffix(".json"),
        resumed=sweep.trials.resumed,
    )
    return code or (0 if report.best_point(document) else 1)


def _show(document: SweepDocument) -> None:
    out = ui.out()
    show_files(document.pair)
    if "threads" in document.settings:  # absent if no value had a placement
        out.print(words.conditions(document.settings, document.option), style="dim")
    out.print(table.terminal(report.results(document, out.width), out.width))
    for line in report.failures(document):
        out.print(line, style="red")
    out.print(report.summary(document), style="bold")
