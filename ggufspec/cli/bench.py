"""``ggufspec bench``: target-only, draft-only and speculative, and whether it was worth it."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec.cli import given, options, planned, ui
from ggufspec.cli import sweep as sweeping
from ggufspec.errors import StopError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ggufspec.schema.bench import BenchDocument, HookComparison

TOKENS, TRIALS = 128, 5


class Engine(StrEnum):
    """Of :data:`ggufspec.bench.versus.ENGINES`."""

    OWN = "own"
    HOOK = "hook"


def bench(
    *,
    files: given.BenchFiles,
    prompt: options.PromptText = None,
    file: options.PromptFile = None,
    predict: options.BenchTokens = None,
    repetitions: Annotated[
        int | None,
        typer.Option("-r", "--repetitions", metavar="N", min=1, help="Trials of each run.  [the profile's, or 5]"),
    ] = None,
    placing: given.Placing,
    drafting: given.Drafting,
    decoding: given.Decoding,
    choosing: given.Choosing,
    engine: Annotated[
        Engine,
        typer.Option("--engine", metavar="own|hook", help="hook: llama-cpp-python's Llama with our draft, too."),
    ] = Engine.OWN,
    exports: given.Exports,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Measure each value of the one option that has a list: --draft-max 1,2,4,8.")
    ] = False,
    results: options.Results = None,
    fresh: options.Fresh = False,
    several: given.Several | None,
) -> int:
    """Measure target-only, draft-only and speculative decoding. Say whether it was worth it.

    Trials are interleaved, each in its own process. Without -p or -f, eight short bundled prompts are used. Without a
    pair, demo-360m: the demo pair at the cost of a real one, in about two minutes.

    --sweep measures one option at several values: -ngl 0-80+8, --draft-max 1,2,4,8 or -ctk f16,q8_0. Trials are kept:
    the same command goes on after an interruption.

    --engine hook measures the same through llama-cpp-python's Llama, alone and with ggufspec.hook.DraftModel, in one
    table with our own loop.
    """
    from ggufspec.bench import hooked
    from ggufspec.bench.prompts import PROMPTS
    from ggufspec.bench.trial import Spec
    from ggufspec.bench.versus import Bench, Experiment
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.display import counted

    swept = sweeping.asked(several, sweep=sweep)
    if swept is None and (fresh or results is not None):
        raise UsageError("--results and --fresh need --sweep", "--export-json keeps a bench")
    if swept and engine == "hook":
        raise UsageError("--sweep measures our own loop", "leave --sweep or --engine hook out")
    own_prompt = options.read_prompt(prompt, file)
    exports.check()
    drafters = [value for _, value in swept.values] if swept and swept.name == "drafter" else [drafting.drafter]
    alone = all(one in ("lookup", "none") for one in drafters)  # of a sweep any value may need the draft
    if drafting.drafter == "none" and swept is None:
        raise UsageError(
            "bench needs a drafter to compare with, and --drafter none is target-only",
            "--drafter lookup needs no model",
        )
    if files == given.BenchFiles():
        files = given.BenchFiles(options.BENCH_PAIR)
    chosen = files.choose(need_draft=not alone, no_draft=alone)
    usual = (predict, repetitions, own_prompt) == (None, None, None)
    repetitions = repetitions or chosen.bench.repetitions or TRIALS
    kinds = chosen.bench.prompts or {p.kind for p in PROMPTS}
    prompts = (own_prompt,) if own_prompt is not None else tuple(p.text for p in PROMPTS if p.kind in kinds)
    spec = Spec(
        target=chosen.target,
        draft=chosen.draft,
        options=DecoderOptions(),
        sampling=choosing.drawn().sampling(),
        prompts=prompts,
        max_tokens=predict or chosen.bench.max_tokens or TOKENS,
        rpc=tuple(placing.rpc or ()),
    )
    if swept:
        experiment = sweeping.prepare(
            chosen,
            spec,
            swept,
            placing,
            decoding,
            drafting,
            repetitions=repetitions,
        )
        return sweeping.measure(experiment, exports, results=results, fresh=fresh)
    if drafting.drafter is None and chosen.settings.drafter == "none":
        ui.note(f"the profile {chosen.name} turns speculation off: measured with --drafter both")
        drafting = replace(drafting, drafter=options.Drafter.BOTH)
    if engine == "hook":
        hooked.check(planned.decoder(chosen.settings, decoding, drafting), spec.sampling)
    pair = planned.of_pair(chosen)
    places = planned.settle(pair, placing, decoding, drafting, rival=True)
    if engine == "hook":  # a plan may put experts on the CPU
        hooked.check(places.pair, spec.sampling)
        hooked.check(places.alone, spec.sampling)
    spec = replace(spec, draft=chosen.draft if places.pair.needs_draft else None, options=places.pair)
    run = Bench(Experiment(chosen, spec, repetitions, ui.flags().verbose, places.alone, places.plan, engine))
    interrupted = False
    if not ui.flags().json:
        modes = ", ".join(mode.replace("_", "-") for mode in run.experiment.modes)
        minutes = f"; about {chosen.bench.minutes:g} minutes on two cores" if usual and chosen.bench.minutes else ""
        ui.note(f"measuring {chosen.name}: {modes}, {counted(repetitions, 'trial')} each{minutes}")
    try:
        with ui.progress() as progress:
            run.run(progress)
    except KeyboardInterrupt:
        if not any(run.results.values()):
            raise StopError("interrupted before anything was measured") from None
        interrupted = True
    planned.learn(pair, places, run.results["speculative"])
    return _report(run.document(interrupted=interrupted), exports)


def _report(document: BenchDocument, exports: given.Exports) -> int:
    """Print first, then write the files: a full disk costs a file and not the result."""
    from ggufspec.reports import tables
    from ggufspec.schema.base import to_json

    if ui.flags().json:
        ui.data(to_json(document))
    else:
        _show(document)
        for note in (*document.notes, *(document.hook.notes if document.hook else ())):
            ui.note(note)
    failed = exports.write(document, markdown=tables.markdown, csv=tables.comma_separated)
    if document.interrupted:
        ui.failure("interrupted; what is shown was measured before", "")
        return 130
    return failed.exit_code if failed else 0


def _show(document: BenchDocument) -> None:
    from rich.text import Text

    from ggufspec.reports import tables

    out = ui.out()
    if note := document.pair.get("note"):
        out.print(Text(note))
    for role in ("target", "draft"):
        placed = document.plan.get(role)
        if placed:
            name, size = Path(str(document.pair[role])).name, f"{placed['size_bytes'] / 1e6:,.0f} MB"
            about = size if note else f"{placed['description']}, {size}"  # llama.cpp takes it for a published model
            out.print(Text.assemble((f"{role:<6} ", "bold"), f"{name}  ", (f"({about})", "dim")))
    out.print(tables.conditions(document.settings), style="dim")
    out.print(tables.terminal(document))
    out.print(Text(document.verdict.text, style="bold green" if document.verdict.worth_it else "bold"))
    for line in (document.verdict.why, tables.same_text(document), tables.prompts(document)):
        if line:
            out.print(Text(line, style="dim"))
    if document.hook is not None:
        _show_hook(out, document.hook)


def _show_hook(out: Console, hook: HookComparison) -> None:
    from ggufspec.display import counted

    out.print(hook.text, style="bold")
    if hook.identical_output is not None:
        same = "the same text with and without the hook" if hook.identical_output else "NOT the same text"
        out.print(f"Hook check: {same} ({hook.identity_check['note']}).", style="dim")
    if hook.divergences:
        explained = sum(one.explained for one in hook.divergences)
        out.print(
            f"With the hook {counted(len(hook.divergences), 'answer')} left the text of Llama alone, "
            f"{explained} of them at a near tie.",
            style="dim",
        )
