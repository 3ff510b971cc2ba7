"""``ggufspec run``: one answer, streamed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.cli import console, options, planned
from ggufspec.errors import StopError, UsageError

if TYPE_CHECKING:
    from ggufspec.bench.trial import Result
    from ggufspec.reports.document import RunDocument


def run(
    pair: options.PairName = None,
    model: options.TargetFile = None,
    model_draft: options.DraftFile = None,
    hf_repo: options.TargetRepo = None,
    hf_repo_draft: options.DraftRepo = None,
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
    gpu_layers: options.GpuLayers = None,
    gpu_layers_draft: options.DraftGpuLayers = None,
    tensor_split: options.TensorSplit = None,
    n_cpu_moe: options.CpuExperts = None,
    headroom: options.Headroom = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="The target alone.")] = False,
    drafter: options.DrafterName = None,
    draft_policy: options.DraftPolicy = options.Policy.ADAPTIVE,
    draft_max: options.DraftCap = None,
    lookup_corpus: options.LookupCorpus = None,
    accept: options.Accept = "exact",
    strict: options.Strict = False,
    ctx_size: options.ContextSize = None,
    threads: options.Threads = None,
    cache_type_k: options.TypeK = None,
    cache_type_v: options.TypeV = None,
    flash_attn: options.FlashAttention = None,
    temp: options.Temperature = 0.0,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    seed: options.Seed = 0,
    rpc: options.Rpc = None,
    yes: options.Yes = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Stream one answer; the statistics follow on standard error."""
    from ggufspec.bench import trial
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.worker import Interrupted

    text = options.read_prompt(prompt, file)
    if not text:
        raise UsageError("there is no prompt", 'give one with -p "…", -f FILE, or -p - for standard input')
    chosen = options.choose_pair(
        pair,
        model,
        model_draft,
        hf_repo,
        hf_repo_draft,
        no_draft=no_draft or drafter in ("lookup", "none"),
        yes=yes,
        quiet=quiet,
    )
    if no_draft:
        drafter = options.Drafter.NONE
    if chosen.draft is None:
        if drafter in ("draft", "both"):
            raise UsageError(
                f"--drafter {drafter} needs a draft model, and none is given", "-md DRAFT, or --drafter lookup"
            )
        if drafter is None and lookup_corpus is not None:
            raise UsageError("a corpus is for the lookup, and without a draft model nobody drafts", "--drafter lookup")
    decoder = options.decoder_options(
        chosen.settings,
        n_ctx=ctx_size,
        draft_max=draft_max,
        threads=threads,
        type_k=cache_type_k,
        type_v=cache_type_v,
        flash_attention=flash_attn,
        drafter=drafter,
        draft_policy=draft_policy,
        lookup_corpus=lookup_corpus,
        accept=accept,
        strict=strict,
    )
    asked = planned.placement_asked(
        chosen,
        gpu_layers=gpu_layers,
        gpu_layers_draft=gpu_layers_draft,
        tensor_split=tensor_split,
        n_cpu_moe=n_cpu_moe,
        draft_max=draft_max,
        headroom=headroom,
        rpc=rpc,
    )
    spec = trial.Spec(
        target=chosen.target,
        draft=chosen.draft,
        options=planned.place(planned.of_pair(chosen), decoder, asked, quiet=quiet, verbose=verbose).pair,
        sampling=Sampling(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        prompts=(text,),
        max_tokens=predict,
        stop=tuple(stop or ()),
        grammar=options.read_grammar(grammar, grammar_file, json_schema, json_schema_file),
        stream=not json,
        rpc=tuple(rpc or ()),
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
