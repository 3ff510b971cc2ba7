"""``ggufspec bench --sweep``: one option at several values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.cli import given, planned, ui
from ggufspec.display import counted
from ggufspec.errors import GgufspecError, StopError, UsageError

if TYPE_CHECKING:
    from ggufspec.bench.sweep import Experiment, Sweep, Value
    from ggufspec.bench.trial import Spec
    from ggufspec.models.profile import Pair
    from ggufspec.schema.sweep import SweepDocument

_AT_EACH = ("gpu_layers", "n_cpu_moe")  # values that the target alone runs at too


def asked(several: given.Several | None, *, sweep: bool) -> given.Several | None:
    """The option to sweep; None for a bench of one setting.

    Raises:
        UsageError: a list without ``--sweep``, or ``--sweep`` without a list.
    """
    if several is not None and not sweep:
        shown = ",".join(shown for shown, _ in several.values)
        raise UsageError(f"{several.flag} {shown} is a list", "add --sweep to measure each of the values")
    if sweep and several is None:
        flags = ", ".join(flag for _, flag in given.SWEEPABLE.values())
        raise UsageError(
            "--sweep needs an option with several values",
            f"ggufspec bench --sweep --draft-max 1,2,4,8; a list may be given to one of {flags}",
        )
    return several


def prepare(
    chosen: Pair,
    spec: Spec,
    several: given.Several,
    placing: given.Placing,
    decoding: given.Decoding,
    drafting: given.Drafting,
    *,
    repetitions: int,
) -> Experiment:
    """Place the pair for each of the values.

    Args:
        chosen: the pair.
        spec: what is the same for all of them; its options are not looked at.
        several: the option and its values.
        placing: the command line's other options.
        decoding: the same.
        drafting: the same.
        repetitions: trials of each run.

    Raises:
        UsageError: a value is out of range.
    """
    from ggufspec.bench.sweep import Experiment, Value, value
    from ggufspec.schema.base import Failure

    several, notes = _distinct(several, chosen)
    decoders = [  # all of them first: a typo is no row
        planned.decoder(chosen.settings, several.put(decoding, one), several.put(drafting, one))
        for _, one in several.values
    ]
    at_each = several.key in _AT_EACH
    values: list[Value] = []
    for (shown, one), decoder in zip(several.values, decoders, strict=True):
        try:
            places = planned.settle(
                planned.of_pair(chosen),
                several.put(placing, one),
                several.put(decoding, one),
                several.put(drafting, one),
                rival=not at_each,
            )
        except GgufspecError as error:
            values.append(Value(shown, None, None, Failure(error.message, error.hint)))
            continue
        draft = chosen.draft if decoder.needs_draft else None
        values.append(
            value(shown, replace(spec, draft=draft, options=places.pair), places.pair if at_each else places.alone)
        )
    return Experiment(
        chosen.describe(),
        several.key,
        tuple(values),
        repetitions,
        notes + _notes(several, values),
        ui.flags().verbose,
    )


def _distinct(several: given.Several, chosen: Pair) -> tuple[given.Several, tuple[str, ...]]:
    """The option without numbers of layers that mean what another one means, and a note where there were some."""
    from ggufspec.decoding.planned import layers_asked
    from ggufspec.llamacpp.options import offloaded
    from ggufspec.models.source import read_headers

    file = {"gpu_layers": chosen.target, "gpu_layers_draft": chosen.draft}.get(several.key)
    if file is None:
        return several, ()
    layers = read_headers([file])[0].header.layers
    meant: dict[int | None, tuple[str, str]] = {}
    for shown, one in several.values:
        count = layers_asked(one)
        meant.setdefault(None if count is None else offloaded(count, layers), (shown, one))
    left = tuple(meant.values())
    same = [shown for shown, _ in several.values if shown not in dict(left)]
    if not same:
        return several, ()
    note = f"{several.flag} {meant[layers][0]} is all {layers} layers; so are {', '.join(same)}, which were left out"
    return replace(several, values=left), (note,)


def _notes(several: given.Several, values: list[Value]) -> tuple[str, ...]:
    if several.key in _AT_EACH:
        return (f"target-only ran at each value of {several.flag} too, not at its own best placement",)
    places = {one.alone.options.placement for one in values if one.alone}
    own = any(one.pair and one.alone and one.pair.options.placement != one.alone.options.placement for one in values)
    return ("target-only ran at its own best placement",) if own and len(places) == 1 else ()


def measure(experiment: Experiment, exports: given.Exports, *, results: Path | None, fresh: bool) -> int:
    """Measure every value, show and keep what came of it; trials of an interrupted run are not made again.

    Raises:
        GgufspecError: results cannot be kept.
        StopError: Ctrl-C before anything was measured.
    """
    from ggufspec.bench.run_log import RunLog
    from ggufspec.bench.sweep import LOG, Sweep, identity
    from ggufspec.cache import is_temporary, results_folder, writable
    from ggufspec.files import file_name
    from ggufspec.schema.base import to_json

    pair = file_name(experiment.pair["name"])
    path = (
        results or writable(results_folder())
    ) / f"sweep-{pair}-{experiment.option}-{identity(experiment)[:8]}.jsonl"
    with RunLog(path, LOG, fresh=fresh) as log:
        sweep = Sweep(experiment, log)
        for note in (*log.notes, *_resumed(sweep)):
            ui.note(note)
        interrupted = False
        try:
            with ui.progress() as progress:
                sweep.run(progress)
        except KeyboardInterrupt:
            if not sweep.measured:
                raise StopError("interrupted before anything was measured") from None
            interrupted = True
        document = sweep.document(interrupted=interrupted)
        kept = path.with_suffix(".json")
        failed = None if interrupted else _replace(path, kept, to_json(document) + "\n")
    code = _report(document, exports)
    if interrupted:
        ui.failure("interrupted; what is shown was measured before", "the same command goes on where it was")
        return 130
    if failed is not None:  # the result was shown, as one document with --json
        ui.failure(failed.message, failed.hint)
        return code or failed.exit_code
    if not is_temporary(kept):
        ui.note(f"kept in {kept}")
    return code


def _replace(log: Path, kept: Path, text: str) -> GgufspecError | None:
    """Keep the document in place of the log: the next run of this command is a new measurement. What failed."""
    from ggufspec.bench.run_log import set_aside
    from ggufspec.files import write_whole

    try:
        if kept.exists():  # an earlier measurement of the same
            set_aside(kept)
        write_whole(kept, text)
        log.unlink(missing_ok=True)
    except GgufspecError as error:
        return error
    except OSError as error:
        return GgufspecError(f"{log} cannot be removed: {error.strerror}", "--results FOLDER names another folder")
    return None


def _resumed(sweep: Sweep) -> tuple[str, ...]:
    count = sweep.measured
    if not count:
        return ()
    return (f"{counted(count, 'trial')} of an interrupted run taken over; --fresh measures all of them again",)


def _report(document: SweepDocument, exports: given.Exports) -> int:
    """Print first, then write the files: a full disk costs a file and not the result."""
    from ggufspec.reports import sweep as report
    from ggufspec.schema.base import to_json

    if ui.flags().json:
        ui.data(to_json(document))
    else:
        _show(document)
        for note in document.notes:
            ui.note(note)
    failed = exports.write(document, markdown=report.markdown, csv=report.comma_separated)
    if failed:
        return failed.exit_code
    return 0 if report.best(document) else 1


def _show(document: SweepDocument) -> None:
    from rich.text import Text

    from ggufspec.reports import sweep as report
    from ggufspec.reports import tables

    out = ui.out()
    for role in ("target", "draft"):
        if document.pair.get(role):
            out.print(Text.assemble((f"{role:<6} ", "bold"), Path(str(document.pair[role])).name))
    if "threads" in document.settings:  # absent where no value had a placement
        out.print(Text(tables.conditions(document.settings, document.option), style="dim"))
    out.print(report.terminal(document, out.width))
    for line in report.failures(document):
        out.print(Text(line, style="red"))
    out.print(Text(report.summary(document), style="bold"))
