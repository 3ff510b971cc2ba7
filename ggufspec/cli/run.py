"""``ggufspec run``: one answer, streamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.cli import console, given, options, planned
from ggufspec.errors import StopError, UsageError

if TYPE_CHECKING:
    from ggufspec.bench.trial import Result
    from ggufspec.reports.document import RunDocument


def run(
    *,
    files: given.Files,
    prompt: options.PromptText = None,
    file: options.PromptFile = None,
    predict: options.MaxTokens = 128,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    grammar: options.Grammar = None,
    grammar_file: options.GrammarFile = None,
    json_schema: options.JsonSchema = None,
    json_schema_file: options.JsonSchemaFile = None,
    placing: given.Placing,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="The target alone.")] = False,
    drafting: given.Drafting,
    decoding: given.Decoding,
    choosing: given.Choosing,
    yes: options.Yes = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Stream one answer; the statistics follow on standard error."""
    from ggufspec.bench import trial
    from ggufspec.worker import Interrupted

    text = options.read_prompt(prompt, file)
    if not text:
        raise UsageError("there is no prompt", 'give one with -p "…", -f FILE, or -p - for standard input')
    drafter = options.Drafter.NONE if no_draft else drafting.drafter
    chosen = files.choose(no_draft=drafter in ("lookup", "none"), yes=yes, quiet=quiet)
    if chosen.draft is None:
        if drafter in ("draft", "both"):
            raise UsageError(
                f"--drafter {drafter} needs a draft model, and none is given", "-md DRAFT, or --drafter lookup"
            )
        if drafter is None and drafting.lookup_corpus is not None:
            raise UsageError("a corpus is for the lookup, and without a draft model nobody drafts", "--drafter lookup")
    drafting = replace(drafting, drafter=drafter)
    places = planned.settle(planned.of_pair(chosen), placing, decoding, drafting, quiet=quiet, verbose=verbose)
    spec = trial.Spec(
        target=chosen.target,
        draft=chosen.draft,
        options=places.pair,
        sampling=choosing.sampling(),
        prompts=(text,),
        max_tokens=predict,
        stop=tuple(stop or ()),
        grammar=options.read_grammar(grammar, grammar_file, json_schema, json_schema_file),
        stream=not json,
        rpc=tuple(placing.rpc or ()),
    )
    interrupted = False
    try:
        result: Result | None = trial.measure(spec, on_event=None if json else _print, verbose=verbose)
    except Interrupted as stopped:
        result, interrupted = stopped.partial, True
    if not json:
        console.data("")
    if result is None or not result.answers:
        raise StopError("interrupted before there was an answer")
    document = _document(chosen.describe(), spec, result, interrupted)
    if json:
        from ggufspec.reports.document import to_json

        console.data(to_json(document))
    elif not quiet:
        _show(document)
    if interrupted:
        console.failure("interrupted", "")
        return 130
    return 0


def _print(event: dict[str, Any]) -> None:
    if event["event"] == "token":
        sys.stdout.write(event["text"])
        sys.stdout.flush()


def _document(pair: dict[str, Any], spec: Any, result: Result, interrupted: bool) -> RunDocument:
    from ggufspec.bench.versus import notes_of, settings_of, summarise
    from ggufspec.decoding.options import is_lossy
    from ggufspec.reports.document import RunDocument

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


def _show(document: RunDocument) -> None:
    from ggufspec.reports.document import SpeculativeRun

    figures = document.statistics
    parts = [f"{figures.tokens} tokens", f"{figures.tokens_per_s.median:.1f} tokens/s"]
    if isinstance(figures, SpeculativeRun):
        accepted = f"{figures.acceptance_rate:.0%} accepted" if figures.drafted else "nothing drafted"
        parts += [accepted, f"{figures.tokens_per_round:.2f} tokens/round"]
        if figures.lossy:
            parts.append("lossy")
    if document.stop_reason == "context":
        parts.append("the context is full")
    console.note(", ".join(parts))
    for note in document.notes:
        console.note(note)
