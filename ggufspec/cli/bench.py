"""Command ``ggufspec bench``: measure target-only, draft-only and speculative decoding, and judge the draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.text import Text

from ggufspec.api.options import decoder_options, sampling
from ggufspec.bench import hooked, prompting
from ggufspec.bench.history import learn
from ggufspec.bench.lengths import DEFAULT_TOKENS
from ggufspec.bench.trial import TrialJob, check_context
from ggufspec.bench.versus import ENGINES, Bench, BenchExperiment
from ggufspec.cli import inputs, ui
from ggufspec.cli import sweep as sweeping
from ggufspec.cli.parameters import FIXED_LENGTH, SweptOption, command, command_option, one_of, parse_seconds, takes
from ggufspec.cli.results import check_exports, finish, folder, measured, same_pair, show_models
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files.write import as_file_name
from ggufspec.models.profile import Pair
from ggufspec.reports import bench as report
from ggufspec.reports import table, words
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.text import as_budget, duration
from ggufspec.settings.registry import DRAFTERS, parse_drafters
from ggufspec.settings.table import Settings

SWEPT_TOKENS, SWEPT_TRIALS = 128, 5
_HOOK = "Decoding loops to measure: own (ggufspec's), or hook (also llama-cpp-python's Llama)."
_UNTIL_CLEAR = f"until clear; {SWEPT_TRIALS} with --sweep"
BENCH_PAIR = "demo-360m"  # the demo pair expanded to a real pair's shape, and thus to its cost


@command(
    "ggufspec bench demo",
    "ggufspec bench -m TARGET.gguf -md DRAFT.gguf -r 10 --export-json result.json",
    "ggufspec bench demo --sweep --draft-policy fixed --draft-max 1,2,4,8",
    confirms=True,
)
def bench(
    *,
    engine: Annotated[
        str, command_option(f"--engine {'|'.join(ENGINES)}", _HOOK, rare=True, **one_of(ENGINES))
    ] = "own",
    budget: Annotated[
        float | None,
        command_option(
            "--budget TIME",
            "Time limit, such as 10m. Loading is not counted.  [3m; or the profile's; no limit with -r]",
            parser=parse_seconds,
        ),
    ] = None,
    depth: Annotated[
        int,
        command_option("--depth N", "Tokens in the context before each prompt; must fit in -c.", min=0, rare=True),
    ] = 0,
    sweep: Annotated[
        bool, command_option("--sweep", "Measure a list of values: --draft-max 1,2,4,8. Only one list is allowed.")
    ] = False,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "prompt", "prompts", "raw", "predict", "repetitions", "placement", "devices"),
            *("drafting", "context", "sampling", "results", "fresh", "exports", "no_calibrate"),
            pair={"shown": BENCH_PAIR},
            predict={
                **FIXED_LENGTH,
                "help": "Answer length that the verdict is for.",
                "shown": f"{DEFAULT_TOKENS}; or the profile's, or that of answers to your prompts",
            },
            repetitions={"help": "Answers per prompt.", "shown": _UNTIL_CLEAR},
            rare=("sampling", "raw", "fresh", "html"),
        ),
    ],
    swept: SweptOption | None,
) -> int:
    """Measure target-only, draft-only and speculative decoding.

    Says whether the draft was worth it. The modes' answers are interleaved. It ends when the verdict is clear, or after
    --budget at the latest. The verdict is for whole answers of -n tokens, prompt included. Without -n, only as much of
    each answer is measured as fits the budget, and the rest is extrapolated. Without -p, -f or --prompts, eight short
    bundled prompts are used: chat requests, or plain text if the target has no chat template. Without a pair, demo-360m
    is measured: the demo pair at the cost of a real one, in less than a minute. `ggufspec report` shows results again.

    --sweep measures one option at several values: -ngl 0-80+8, --draft-max 1,2,4,8 or -ctk f16,q8_0. Trials are saved:
    the same command measures only what is missing, and --fresh measures everything again.

    --depth N puts N tokens of text before each prompt, to measure the speed of a long conversation.

    --engine hook also measures llama-cpp-python's Llama, with and without ggufspec.DraftModel, in one table with our
    own loop.
    """
    sweeping.check_swept(swept, sweep=sweep)
    if swept is None and given.fresh:
        raise UsageError("--fresh needs --sweep: other benches measure everything anyway", "leave --fresh out")
    if depth and engine == "hook":
        raise UsageError("--depth works only with our own loop", "leave --depth or --engine hook out")
    if swept and engine == "hook":
        raise UsageError("--sweep works only with our own loop", "leave --sweep or --engine hook out")
    if swept and budget:
        raise UsageError("--budget limits a bench without --sweep", "an interrupted sweep resumes where it stopped")
    own_prompts = inputs.own_prompts(given)
    check_exports(given)
    drafters = [value for _, value in swept.values] if swept and swept.option.name == "drafter" else [given.drafter]
    wanted = [
        DRAFTERS[name] for one in drafters for name in parse_drafters(one or "both")
    ]  # drafters that the swept values need
    no_draft = not any(row.needs_model for row in wanted)
    if given.drafter == "none" and swept is None:
        message = "bench needs a drafter to compare with, but --drafter none is target-only"
        raise UsageError(message, "--drafter lookup needs no model")
    if not given.given(("pair", "model", "model_draft", "hf_repo", "hf_repo_draft")):
        given = replace(given, pair=BENCH_PAIR)
    pair = inputs.pair(given, need_draft=any(row.needs_file for row in wanted), no_draft=no_draft)
    repetitions = given.repetitions or pair.bench.repetitions
    texts = prompting.PromptsJob(pair.target, own_prompts, bool(given.raw), tuple(pair.bench.prompts or ()))
    asked = prompting.make_texts(texts, verbose=ui.flags().verbose)
    spec = TrialJob(
        target=pair.target,
        draft=pair.draft,
        options=DecoderOptions(),
        sampling=sampling(inputs.with_seed(given)),
        **asked.trial,
        max_tokens=given.predict or pair.bench.max_tokens or (SWEPT_TOKENS if swept else DEFAULT_TOKENS),
        rpc=given.rpc or (),
        depth=depth,
    )
    if swept:
        return sweeping.measure_sweep(
            sweeping.place_values(pair, spec, swept, given, repetitions or SWEPT_TRIALS), given
        )
    own_lengths = bool(own_prompts) and not (given.predict or pair.bench.max_tokens)
    return _measure(pair, spec, given, asked, engine, repetitions, budget, own_lengths=own_lengths)


def _measure(
    pair: Pair,
    spec: TrialJob,
    given: Settings,
    asked: prompting.PromptsResult,
    engine: str,
    repetitions: int | None,
    budget: float | None,
    *,
    own_lengths: bool,
) -> int:
    if given.drafter is None and pair.settings.drafter == "none":
        ui.note(f"the profile of {pair.name} turns speculation off; measuring as with --drafter both")
        given = replace(given, drafter="both")
    if engine == "hook":
        hooked.check_hook(decoder_options(given.over(pair.settings)), spec.sampling)
    resolved = inputs.resolve_shown(pair, given, best_target_only=True, calibrate=inputs.calibrator(given))
    if engine == "hook":  # check again, because a plan may put experts on the CPU
        hooked.check_hook(resolved.pair, spec.sampling)
        hooked.check_hook(resolved.target_only, spec.sampling)
    spec = replace(spec, draft=pair.draft if resolved.pair.needs_draft else None, options=resolved.pair)
    check_context(spec, max(asked.tokens))
    limit = budget or (None if repetitions else pair.bench.budget_s)
    placed = (ui.flags().verbose, resolved.target_only, resolved.plan)
    run = Bench(BenchExperiment(pair, spec, repetitions, *placed, engine, limit, given.predict is None, own_lengths))
    kept = folder(given) / f"bench-{as_file_name(pair.name)}-{run.experiment.key}.json"
    noted = (lambda _: None) if ui.flags().json else ui.note
    modes = ", ".join(mode.replace("_", "-") for mode in run.experiment.modes)
    limit = run.experiment.limit_s
    noted(f"measuring {pair.name}: {modes}" + (f"; at most {duration(limit)} after loading" if limit else ""))
    interrupted = measured(lambda progress: run.run(progress, noted), lambda: any(run.results.values()))
    notes, document = learn(resolved, spec, run.counting, is_quiet=run.is_quiet), run.document(interrupted=interrupted)
    document = replace(document, notes=(*document.notes, *notes), next=_next(document, given))
    return finish(
        document,
        lambda: _show(document),
        given,
        markdown=report.markdown,
        csv=report.comma_separated,
        notes=(*asked.notes, *document.notes, *(document.hook.notes if document.hook else ())),
        kept=None if interrupted else kept,
        failed=_crash(run.crashes),
        hint="",
    )


def _next(document: BenchDocument, given: Settings) -> str:
    """Return the next command to suggest, or an empty string."""
    text, is_chat = document.verdict.text, document.settings["prompt_format"] == "chat template"
    if given.pair == BENCH_PAIR:
        return "ggufspec bench -m TARGET.gguf -md DRAFT.gguf"
    if document.verdict.worth_it:
        return same_pair("chat", given) if is_chat else same_pair("run", given, "-p", "TEXT")
    if text.startswith("Not worth it"):
        return same_pair("tune", given)
    limit = document.settings.get("budget_s")
    if not isinstance(limit, float):
        return ""
    enough = as_budget(max(2 * limit, document.settings.get("enough_s") or 0.0))
    return same_pair("bench", given, "--budget", enough, kept=("prompt", "file", "prompts", "raw", "predict"))


def _crash(crashes: Mapping[str, GgufspecError]) -> GgufspecError | None:
    if not crashes:
        return None
    names = " and ".join(words.mode_name(mode) for mode in crashes)
    return GgufspecError(f"{names} could not be measured; the reason is above", next(iter(crashes.values())).hint)


def _show(document: BenchDocument) -> None:
    """Print a bench's results with the verdict first; ``--verbose`` adds the evidence."""
    out, everything = ui.out(), ui.flags().verbose
    out.print(document.verdict.text, style="bold green" if document.verdict.worth_it else "bold")
    if document.next:
        out.print(f"next: {document.next}", style="bold", soft_wrap=True)
    if document.hook is not None:
        out.print(document.hook.text, style="bold")
    out.print(table.terminal(report.results(document), out.width))
    if footnote := report.footnote(document):
        out.print(footnote, style="dim")
    if note := document.pair.get("note"):
        out.print(note)
    shown = {}
    for role in ("target", "draft"):
        if (placed := document.plan.get(role)) and document.pair[role]:  # MTP blocks may be in the target's file
            name, size = Path(str(document.pair[role])).name, f"{placed['size_bytes'] / 1e6:,.0f} MB"
            # The demo pair's note replaces llama.cpp's description, which would name a published model.
            about = size if note else f"{placed['description']}, {size}"
            shown[role] = Text.assemble(f"{name}  ", (f"({about})", "dim"))
    show_models(shown)
    out.print(words.conditions(document.settings, extent=False), style="dim")
    if document.verdict.why:
        out.print(document.verdict.why, style="dim")
    portions = report.portions(document.by_kind, document.by_part)
    if portions and everything:
        out.print(table.terminal(portions, out.width))
    for line in report.remarks(document, everything=everything):
        out.print(line, style="dim")
    if not everything and not ui.flags().quiet:
        kinds = "each kind of prompt, " if portions else ""
        out.print(f"-v adds {kinds}prompt speeds and llama.cpp's log.", style="dim")
