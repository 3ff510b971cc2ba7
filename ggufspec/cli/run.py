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
    no_draft: Annotated[bool, typer.Option("--no-draft", help="The target alone.")] = False,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    gpu_layers: options.GpuLayers = None,
    gpu_layers_draft: options.DraftGpuLayers = None,
    tensor_split: options.TensorSplit = None,
    n_cpu_moe: options.CpuExperts = None,
    headroom: options.Headroom = None,
    draft_max: options.DraftMax = None,
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
    accept: options.Accept = "exact",
    strict: options.Strict = False,
    rpc: options.Rpc = None,
    yes: options.Yes = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Stream one answer; the statistics follow on standard error."""
    from dataclasses import replace

    from ggufspec.bench import trial
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.worker import Interrupted

    text = options.read_prompt(prompt, file)
    if not text:
        raise UsageError("there is no prompt", 'give one with -p "…", -f FILE, or -p - for standard input')
    chosen = options.choose_pair(
        pair, model, model_draft, hf_repo, hf_repo_draft, no_draft=no_draft, yes=yes, quiet=quiet
    )
    if no_draft:
        chosen = replace(chosen, draft=None)
    decoder = options.decoder_options(
        chosen.settings,
        n_ctx=ctx_size,
        draft_max=draft_max,
        threads=threads,
        type_k=cache_type_k,
        type_v=cache_type_v,
        flash_attention=flash_attn,
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
    from ggufspec.bench.versus import settings_of, summarise
    from ggufspec.reports.document import RunDocument

    answer = result.answers[0]
    return RunDocument(
        pair=pair,
        settings=settings_of(spec),
        text=answer.text,
        tokens=answer.tokens,
        stop_reason=answer.statistics.stop_reason,
        statistics=summarise([result]),
        interrupted=interrupted,
    )


def _show(document: RunDocument) -> None:
    from ggufspec.reports.document import SpeculativeRun

    figures = document.statistics
    parts = [f"{figures.tokens} tokens", f"{figures.tokens_per_s.median:.1f} tokens/s"]
    if isinstance(figures, SpeculativeRun):
        parts += [f"{figures.acceptance_rate:.0%} accepted", f"{figures.tokens_per_round:.2f} tokens/round"]
    if document.stop_reason == "context":
        parts.append("the context is full")
    console.note(", ".join(parts))
