"""``ggufspec compare``: many targets with many drafts, each at its own best placement, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec.cli import contenders, given, options, planned, ui
from ggufspec.cli.matrix import matrix
from ggufspec.errors import GgufspecError, StopError
from ggufspec.reports.compare import Sort

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
            autocompletion=options.profile_names,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="FILE,FILE", help="Targets.", envvar="GGUFSPEC_MODEL", show_envvar=False),
    ] = None,
    model_draft: Annotated[
        str | None,
        typer.Option(
            *("-md", "--model-draft"),
            metavar="FILE,FILE",
            help="Drafts for each target; lookup needs no file; none is target-only, which is always measured.",
            envvar="GGUFSPEC_MODEL_DRAFT",
            show_envvar=False,
        ),
    ] = None,
    hf_repo: Annotated[
        str | None, typer.Option("-hf", "--hf-repo", metavar="USER/REPO:QUANT,QUANT", help="Targets in the hub.")
    ] = None,
    hf_repo_draft: Annotated[
        str | None, typer.Option("-hfd", "--hf-repo-draft", metavar="USER/REPO:QUANT,QUANT", help="Drafts in the hub.")
    ] = None,
    prompt: options.PromptText = None,
    file: options.PromptFile = None,
    predict: options.MaxTokens = 128,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Trials of each cell; leaders get more.")
    ] = 3,
    no_quality: Annotated[bool, typer.Option("--no-quality", help="Do not measure the targets' quality.")] = False,
    sort: Annotated[
        Sort, typer.Option("--sort", metavar="COLUMN", help=f"Order of the rows: {', '.join(Sort)}.")
    ] = Sort.MATRIX,
    room: given.Room,
    drafting: given.Drafting,
    decoding: given.Decoding,
    choosing: given.Choosing,
    results: options.Results = None,
    fresh: options.Fresh = False,
    exports: given.Exports,
) -> int:
    """Compare many pairs by speed, memory, energy and quality. Speedup and acceptance are there too, and the
    quality is each quantisation's.

    Every cell runs at its own best placement, by turns with the others. What fails is a row with its reason. The same
    command goes on where it was stopped. Quality is judged against the largest target.
    """
    from ggufspec.bench.compare import LOG, Comparison
    from ggufspec.bench.run_log import RunLog
    from ggufspec.cache import results_folder, writable
    from ggufspec.files import check_writable

    own_prompt = options.read_prompt(prompt, file)
    exports.check()
    choosing = choosing.drawn()
    wanted = contenders.Wanted(room, drafting, decoding, choosing, own_prompt, predict, repetitions)
    wanted.check()
    pairings = matrix(pairs, model, model_draft, hf_repo, hf_repo_draft)
    stem = (results or writable(results_folder())) / f"compare-{wanted.key(pairings)}"
    path, kept = stem.with_suffix(".jsonl"), stem.with_suffix(".json")
    interrupted = False
    with RunLog(path, LOG, fresh=fresh) as log:
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
    return _report(document, sort, exports, kept, comparison.trials.resumed)


def _learn(comparison: Comparison, places: contenders.Places) -> None:
    """Later plans know what was seen of acceptance."""
    for contender, results in comparison.measured.items():
        if contender.name in places and contender.spec is not None and contender.spec.draft is not None:
            planned.learn(*places[contender.name], results)


def _report(
    document: CompareDocument,
    sort: Sort,
    exports: given.Exports,
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
        exports.write(
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

    out = ui.out()
    if any(model.quality or model.failure for model in document.targets):
        out.print(report.targets(document, out.width))
    out.print(report.terminal(document, sort, out.width))
    for reason in report.failures(document):
        out.print(Text.assemble(("failed ", "bold red"), reason))
    out.print(Text(report.verdict(document), style="bold"))
    told = ["* is the best of its column", "± is the 95 % interval"]
    if tokens := next((model.quality.tokens for model in document.targets if model.quality), 0):
        told.append(f"quality by a bundled text of {tokens:,} tokens")
    out.print(f"{'; '.join(told)}.", style="dim")
    for warning in document.warnings:
        out.print(Text(f"Warning: {warning}.", style="yellow"))
