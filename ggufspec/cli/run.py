"""``ggufspec run``: one answer, streamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.cli import given, options, planned, ui
from ggufspec.display import visible
from ggufspec.errors import StopError, UsageError

if TYPE_CHECKING:
    from ggufspec.bench.trial import Result, Spec
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.models.profile import Pair
    from ggufspec.schema.run import RunDocument
    from ggufspec.schema.trace import TraceDocument


def run(
    *,
    files: given.Files,
    question: given.Question,
    predict: options.MaxTokens = 128,
    placing: given.Placing,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Target-only: no draft, no lookup.")] = False,
    drafting: given.Drafting,
    decoding: given.Decoding,
    choosing: given.Choosing,
) -> int:
    """Stream one answer; the statistics follow on standard error."""
    from ggufspec.bench import trial
    from ggufspec.worker import Interrupted

    chosen, spec = prepare(
        files,
        question,
        placing,
        drafting,
        decoding,
        choosing,
        predict,
        no_draft=no_draft,
    )
    spec = replace(spec, stream=not ui.flags().json)
    interrupted = False
    try:
        with ui.loading(chosen.name) as begin:

            def show(event: dict[str, Any]) -> None:
                if event["event"] == "token":
                    begin()
                    _print(event["text"])

            result: Result | None = trial.measure(
                spec, on_event=None if ui.flags().json else show, verbose=ui.flags().verbose
            )
    except Interrupted as stopped:
        result, interrupted = stopped.partial, True
    if not ui.flags().json:
        ui.data("")
    if result is None or not result.answers:
        raise StopError("interrupted before there was an answer")
    document = _document(chosen.describe(), spec, result, interrupted)
    if ui.flags().json:
        from ggufspec.schema.base import to_json

        ui.data(to_json(document))
    else:
        show_statistics(document)
    if interrupted:
        ui.failure("interrupted", "")
        return 130
    return 0


def prepare(
    files: given.Files,
    question: given.Question,
    placing: given.Placing,
    drafting: given.Drafting,
    decoding: given.Decoding,
    choosing: given.Choosing,
    max_tokens: int,
    *,
    no_draft: bool,
) -> tuple[Pair, Spec]:
    """The pair, its files here, and the trial that gives one answer, its layers placed.

    Raises:
        GgufspecError: there is no prompt, an option does not fit the others, a file is missing or damaged.
    """
    from ggufspec.bench.trial import Spec

    text = question.text()
    chosen, decoder = paired(files, placing, drafting, decoding, no_draft=no_draft)
    spec = Spec(
        target=chosen.target,
        draft=chosen.draft,
        options=decoder,
        sampling=choosing.drawn().sampling(),
        prompts=(text,),
        max_tokens=max_tokens,
        stop=tuple(question.stop or ()),
        grammar=question.rules(),
        stream=True,
        rpc=tuple(placing.rpc or ()),
    )
    return chosen, spec


def paired(
    files: given.Files,
    placing: given.Placing,
    drafting: given.Drafting,
    decoding: given.Decoding,
    *,
    no_draft: bool,
) -> tuple[Pair, DecoderOptions]:
    """The pair, its files here, and how it is placed and decoded.

    Raises:
        GgufspecError: an option does not fit the others, a file is missing or damaged.
    """
    drafter = options.Drafter.NONE if no_draft else drafting.drafter
    chosen = files.choose(no_draft=drafter in ("lookup", "none"))
    if chosen.draft is None:
        if drafter in ("draft", "both"):
            raise UsageError(
                f"--drafter {drafter} needs a draft model, and none is given", "-md DRAFT, or --drafter lookup"
            )
        if drafter is None and drafting.lookup_corpus is not None:
            raise UsageError("--lookup-corpus needs --drafter lookup", "--drafter lookup")
    drafting = replace(drafting, drafter=drafter)
    places = planned.settle(planned.of_pair(chosen), placing, decoding, drafting)
    return chosen, places.pair


def _print(text: str) -> None:
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _document(pair: dict[str, Any], spec: Any, result: Result, interrupted: bool) -> RunDocument:
    from ggufspec.bench.summary import notes_of, settings_of, summarise
    from ggufspec.decoding.options import is_lossy
    from ggufspec.schema.run import RunDocument

    answer = result.answers[0]
    return RunDocument(
        pair=pair,
        settings=settings_of(spec),
        text=answer.text,
        tokens=answer.tokens,
        stop_reason=answer.statistics.stop_reason,
        statistics=summarise([result], lossy=is_lossy(spec.options.accept)),
        notes=notes_of([result]),
        interrupted=interrupted,
    )


def show_statistics(document: RunDocument | TraceDocument) -> None:
    """Say what an answer took."""
    from ggufspec.reports.tables import prompt_figures
    from ggufspec.schema.base import SpeculativeRun

    figures = document.statistics
    if prompt := prompt_figures(figures):
        ui.note(f"prompt: {prompt}")
    parts = [f"{figures.tokens} tokens", f"{figures.tokens_per_s.median:.1f} tokens/s"]
    if isinstance(figures, SpeculativeRun):
        accepted = f"{figures.acceptance_rate:.0%} accepted" if figures.drafted else "nothing drafted"
        parts += [accepted, f"{figures.tokens_per_round:.2f} tokens/round"]
        if figures.lossy:
            parts.append("lossy")
    if document.stop_reason == "context":
        parts.append("the context is full")
    ui.note(", ".join(parts))
    for note in document.notes:
        ui.note(note)
