"""``ggufspec compare``: many targets with many drafts, each at its own best placement, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec.cli import contenders, inputs, ui
from ggufspec.cli.matrix import matrix
from ggufspec.cli.parameters import profile_names, takes
from ggufspec.errors import GgufspecError, StopError
from ggufspec.reports.compare import Sort
from ggufspec.settings import Settings

if TYPE_CHECKING:
    from ggufspec.bench.compare import Comparison
    from ggufspec.schema.compare import CompareDocument


def compare(
    *,
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PAIR",
            help="Profiles, each by its name or path.",
            show_default=False,
            autocompletion=profile_names,
        ),
    ] = None,
    no_quality: Annotated[bool, typer.Option("--no-quality", help="Do not measure the targets' quality.")] = False,
    sort: Annotated[
        Sort, typer.Option("--sort", metavar="COLUMN", help=f"Order of the rows: {', '.join(Sort)}.")
    ] = Sort.MATRIX,
    given: Annotated[
        Settings,
        takes(
            *("files", "hub", "prompt", "predict", "repetitions", "devices", "drafting", "context", "sampling"),
            *("results", "exports"),
            model={"metavar": "FILE,FILE", "help": "Targets."},
            model_draft={
                "metavar": "FILE,FILE",
                "help": "Drafts for each target; lookup needs no file; none is target-only, which is always measured.",
            },
            hf_repo={"metavar": "USER/REPO:QUANT,QUANT", "help": "Targets in the hub."},
            hf_repo_draft={"metavar": "USER/REPO:QUANT,QUANT", "help": "Drafts in the hub."},
            predict={"default": 128},
            repetitions={"default": 3, "help": "Trials of each cell; leaders get more."},
        ),
    ],
) -> int:
    """Compare many pairs by speed, memory, energy and quality. Speedup and acceptance are there too, and the
    quality is each quantisation's.

    Every cell runs at its own best placement, in turn with the others. A failure is a row with its reason. The same
    command resumes an interrupted run. Quality is measured against the largest target.
    """
    from ggufspec.bench.compare import LOG, Comparison
    from ggufspec.bench.run_log import RunLog
    from ggufspec.cache import results_folder, writable
    from ggufspec.files import check_writable

    own_prompt = inputs.read_prompt(given.prompt, given.file)
    inputs.check_exports(given)
    wanted = contenders.Wanted(inputs.with_seed(given), own_prompt)
    wanted.check()
    pairings = matrix(pairs, given)
    stem = (given.results or writable(results_folder())) / f"compare-{wanted.key(pairings)}"
    path, kept = stem.with_suffix(".jsonl"), stem.with_suffix(".json")
    interrupted = False
    with RunLog(path, LOG, fresh=bool(given.fresh)) as log:
        check_writable(kept)
        rows = None if no_quality else stem.with_suffix(".rows")
        experiment, places = contenders.experiment(pairings, wanted, log, rows)
        comparison = Comparison(experiment, log)
        try:
            with ui.progress() as progress:
                comparison.run(progress)
        except KeyboardInterrupt:
            if not any(comparison.trials.by_run.values()):
                raise StopError("interrupted before anything was measured") from None
            interrupted = True
        _learn(comparison, places)
    document = comparison.document(interrupted=interrupted)
    return _report(document, sort, given, kept, comparison.trials.resumed)


def _learn(comparison: Comparison, places: contenders.Places) -> None:
    """Later plans use the measured acceptance."""
    from ggufspec.bench.learned import learn

    for contender, results in comparison.measured.items():
        if contender.name in places and contender.spec is not None and contender.spec.draft is not None:
            learn(*places[contender.name], results)


def _report(
    document: CompareDocument,
    sort: Sort,
    given: Settings,
    kept: Path,
    from_before: int,
) -> int:
    """Print first, then write the files: a full disk costs a file and not the result."""
    from ggufspec.cache import is_temporary
    from ggufspec.display import counted
    from ggufspec.files import write_whole
    from ggufspec.reports import compare as report
    from ggufspec.schema.base import to_json

    if ui.flags().json:
        ui.data(to_json(document))
    else:
        _show(document, sort)
    for note in document.notes:
        ui.note(note)
    failed: GgufspecError | None = None
    try:
        write_whole(kept, to_json(document) + "\n")
    except GgufspecError as error:
        failed = error
        ui.failure(error.message, error.hint)
    else:
        if not is_temporary(kept):
            again = f"; {counted(from_before, 'trial')} from before, --fresh measures everything again"
            ui.note(f"kept in {kept}{again if from_before else ''}")
    failed = (
        inputs.write_exports(
            given,
            document,
            markdown=lambda one: report.markdown(one, sort),
            csv=lambda one: report.comma_separated(one, sort),
        )
        or failed
    )
    if document.interrupted:
        ui.failure("interrupted; what is shown was measured before", "the same command goes on from here")
        return 130
    if not any(cell.run for cell in document.cells):
        ui.failure("no cell could be measured", "the reasons are above")
        return 1
    return failed.exit_code if failed else 0


def _show(document: CompareDocument, sort: Sort) -> None:
    from rich.text import Text

    from ggufspec.reports import compare as report
    from ggufspec.reports import table

    out = ui.out()
    names = report.names_of(document, max(12, out.width // 4))
    if report.has_quality(document):
        out.print(table.terminal(report.quality(document, names[0]), out.width))
    out.print(table.terminal(report.results(document, sort, names, grouped=True), out.width))
    for reason in report.failures(document):
        out.print(Text.assemble(("failed ", "bold red"), reason))
    out.print(Text(report.verdict(document), style="bold"))
    legend = ["* is the best of its column", "± is the 95 % interval"]
    if tokens := next((model.quality.tokens for model in document.targets if model.quality), 0):
        legend.append(f"quality by a bundled text of {tokens:,} tokens")
    out.print(f"{'; '.join(legend)}.", style="dim")
    for warning in document.warnings:
        out.print(Text(f"Warning: {warning}.", style="yellow"))
