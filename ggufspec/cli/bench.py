"""``ggufspec bench``: target-only, draft-only and speculative, and whether it was worth it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggufspec.cli import console, options, planned
from ggufspec.errors import GgufspecError, StopError, UsageError

if TYPE_CHECKING:
    from ggufspec.bench.versus import Bench
    from ggufspec.reports.document import BenchDocument

Export = Path | None


def bench(
    pair: options.PairName = None,
    model: options.TargetFile = None,
    model_draft: options.DraftFile = None,
    hf_repo: options.TargetRepo = None,
    hf_repo_draft: options.DraftRepo = None,
    prompt: options.PromptText = None,
    file: options.PromptFile = None,
    predict: options.MaxTokens = 128,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Trials of each run.")
    ] = 5,
    gpu_layers: options.GpuLayers = None,
    gpu_layers_draft: options.DraftGpuLayers = None,
    tensor_split: options.TensorSplit = None,
    n_cpu_moe: options.CpuExperts = None,
    headroom: options.Headroom = None,
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
    export_json: Annotated[Export, typer.Option(metavar="FILE", help="Write the JSON document to this file.")] = None,
    export_markdown: Annotated[Export, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
    export_csv: Annotated[Export, typer.Option(metavar="FILE", help="Write one line per trial as CSV.")] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure target-only, draft-only and speculative decoding, and say whether it was worth it.

    Trials are interleaved, each in its own process. Without -p or -f, eight short bundled prompts are used.
    """
    from ggufspec.bench.prompts import PROMPTS
    from ggufspec.bench.trial import Spec
    from ggufspec.bench.versus import Bench, Experiment
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.reports.files import check_writable

    if drafter == "none":
        raise UsageError(
            "a bench compares with a draft, and --drafter none has none", "--drafter lookup needs no model"
        )
    own_prompt = options.read_prompt(prompt, file)
    exports = [path for path in (export_json, export_markdown, export_csv) if path is not None]
    for path in exports:
        check_writable(path)
    chosen = options.choose_pair(
        pair,
        model,
        model_draft,
        hf_repo,
        hf_repo_draft,
        need_draft=drafter != "lookup",
        no_draft=drafter == "lookup",
        yes=yes,
        quiet=quiet,
    )
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
    pair_of_files = planned.of_pair(chosen)
    places = planned.place(pair_of_files, decoder, asked, rival=True, quiet=quiet, verbose=verbose)
    spec = Spec(
        target=chosen.target,
        draft=chosen.draft,
        options=places.pair,
        sampling=Sampling(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        prompts=(own_prompt,) if own_prompt is not None else tuple(p.text for p in PROMPTS),
        max_tokens=predict,
        rpc=tuple(rpc or ()),
    )
    run = Bench(Experiment(chosen, spec, repetitions, verbose, alone=places.alone, plan=places.plan))
    interrupted = False
    try:
        with console.progress(quiet or verbose) as progress:
            run.run(progress)
    except KeyboardInterrupt:
        if not any(run.results.values()):
            raise StopError("interrupted before anything was measured") from None
        interrupted = True
    planned.learn(pair_of_files, places, run.results["speculative"])
    return _report(run, interrupted, json, quiet, export_json, export_markdown, export_csv)


def _report(
    run: Bench, interrupted: bool, json: bool, quiet: bool, export_json: Export, export_md: Export, export_csv: Export
) -> int:
    """Print first, then write the files: a full disk costs a file and not the result."""
    from ggufspec.reports import tables
    from ggufspec.reports.document import to_json
    from ggufspec.reports.files import write_whole

    document = run.document(interrupted=interrupted)
    if json:
        console.data(to_json(document))
    else:
        _show(document)
        if not quiet:
            for note in document.notes:
                console.note(note)
    writers = (
        (export_json, lambda d: to_json(d) + "\n"),
        (export_md, tables.markdown),
        (export_csv, tables.comma_separated),
    )
    failed: GgufspecError | None = None
    for path, render in writers:
        if path is not None:
            try:
                write_whole(path, render(document))
            except GgufspecError as error:
                failed = failed or error
                console.failure(error.message, error.hint)
    if interrupted:
        console.failure("interrupted; what is shown was measured before", "")
        return 130
    return failed.exit_code if failed else 0


def _show(document: BenchDocument) -> None:
    from rich.text import Text

    from ggufspec.reports import tables
    from ggufspec.reports.document import SpeculativeRun

    out = console.out()
    settings, plan = document.settings, document.plan
    for role in ("target", "draft"):
        placed = plan.get(role)
        if placed:
            name = Path(str(document.pair[role])).name
            out.print(
                f"[bold]{role:<6}[/] {name}  [dim]({placed['description']}, {placed['size_bytes'] / 1e6:,.0f} MB)[/]"
            )
    parts = (
        f"{_count(settings['prompts'], 'prompt')} × {_count(settings['max_tokens'], 'token')}",
        _drafting(settings),
        "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}",
        f"{settings['accept']}{' (lossy)' if settings['lossy'] else ''}{', strict' if settings['strict'] else ''}",
        _count(settings["threads"], "thread"),
        f"{_count(settings['repetitions'], 'trial')} each",
    )
    out.print(f"[dim]{', '.join(parts)}[/]")
    out.print(tables.terminal(document))
    if by_position := tables.by_position(document):
        out.print(f"[dim]Accepted by position of the draft: {by_position}.[/]")
    out.print(Text(document.verdict.text, style="bold green" if document.verdict.worth_it else "bold"))
    if document.identical_output is not None:
        same = "the same text with and without draft" if document.identical_output else "NOT the same text"
        out.print(f"[dim]Strict check: {same} ({document.identity_check['note']}).[/]")
    run = document.runs.get("speculative")
    if isinstance(run, SpeculativeRun):
        told = []
        if run.plain_rounds:
            told.append(f"{run.plain_rounds / run.rounds:.0%} of the rounds had no draft")
        if run.lookup_accepted:
            told.append(f"{run.lookup_accepted / run.accepted:.0%} of the accepted tokens came from the lookup")
        if told:
            out.print(f"[dim]{'; '.join(told)}.[/]")
    if document.divergences:
        explained = sum(d.explained for d in document.divergences)
        out.print(
            f"[dim]{len(document.divergences)} of {_count(settings['prompts'], 'answer')} left target-only's text, "
            f"{explained} of them at a near tie that rounding between batch widths explains. --strict avoids it.[/]"
        )


def _drafting(settings: dict[str, Any]) -> str:
    """Who drafts, and how far."""
    who = {"draft": "draft model", "lookup": "n-gram lookup", "both": "draft model and n-gram lookup"}
    most = "at most " if settings["draft_policy"] == "adaptive" else ""
    return f"{who[settings['drafter']]} ({most}{_count(settings['draft_max'], 'token')} a round)"


def _count(number: Any, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
