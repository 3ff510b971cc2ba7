"""Command ``ggufspec bench``: measure target-only, draft-only and speculative, and decide whether the draft pays."""

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
from ggufspec.bench.trial import Spec, check_room
from ggufspec.bench.versus import ENGINES, Bench, Experiment
from ggufspec.cli import inputs, ui
from ggufspec.cli import sweep as sweeping
from ggufspec.cli.parameters import FIXED_LENGTH, Swept, command, one_of, option, seconds, takes
from ggufspec.cli.results import check_exports, finish, folder, measured, same_pair, show_models
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files.write import file_name
from ggufspec.models.profile import Pair
from ggufspec.reports import bench as report
from ggufspec.reports import table, words
from ggufspec.schema.bench import BenchDocument
from ggufspec.schema.text import duration
from ggufspec.settings.registry import DRAFTERS, parse_drafters
from ggufspec.settings.table import Settings

SWEPT_TOKENS, SWEPT_TRIALS = 128, 5
_HOOK = "Decoding loop: our own, or hook to also measure llama-cpp-python's Llama with our draft."
_UNTIL_CLEAR = f"until the verdict is clear; {SWEPT_TRIALS} with --sweep"
BENCH_PAIR = "demo-360m"  # the demo pair expanded to the shape, and so the cost, of a real one


@command(
    "ggufspec bench demo",
    "ggufspec bench -m TARGET.gguf -md DRAFT.gguf -ngl 45 -r 10 --export-json result.json",
    "ggufspec bench demo --sweep --draft-policy fixed --draft-max 1,2,4,8",
    confirms=True,
)
def bench(
    *,
    engine: Annotated[str, option(f"--engine {'|'.join(ENGINES)}", _HOOK, rare=True, **one_of(ENGINES))] = "own",
    budget: Annotated[
        float | None,
        option(
            "--budget TIME",
            "Time limit, such as 10m. Loading is not counted.  [3m; or the profile's; no limit with -r]",
            parser=seconds,
        ),
    ] = None,
    depth: Annotated[
        int, option("--depth N", "Tokens of text in the cache before each prompt; -c holds them.", min=0, rare=True)
    ] = 0,
    sweep: Annotated[
        bool, option("--sweep", "Measure a list of values: --draft-max 1,2,4,8. One option may have a list.")
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
            repetitions={"help": "Answers to each prompt.", "shown": _UNTIL_CLEAR},
            rare=("sampling", "raw", "fresh", "html"),
        ),
    ],
    swept: Swept | None,
) -> int:
    """Measure target-only, draft-only and speculative decoding.

    Says whether the draft was worth it. Answers are interleaved. It ends when the verdict is clear, and at the latest
    after --budget. The verdict is for whole answers, prompt included, of -n tokens. Without -n, only as much of them is
    measured as fits the budget, and the rest is extrapolated. Without -p, -f or --prompts, eight short bundled prompts
    are used: requests by the target's chat template, or plain text if it has none. Without a pair, demo-360m: the demo
    pair at the cost of a real one, in less than a minute. `ggufspec report` shows results again.

    --sweep measures one option at several values: -ngl 0-80+8, --draft-max 1,2,4,8 or -ctk f16,q8_0. Trials are kept:
    the same command measures what is missing, --fresh everything again.

    --depth N puts N tokens of text before each prompt: how fast a long conversation is.

    --engine hook measures the same through llama-cpp-python's Llama, alone and with ggufspec.DraftModel, in one
    table with our own loop.
    """
    sweeping.check(swept, sweep=sweep)
    if swept is None and given.fresh:
        raise UsageError("--fresh needs --sweep: other benches measure everything anyway", "leave --fresh out")
    if depth and engine == "hook":
        raise UsageError("--depth measures our own loop", "leave --depth or --engine hook away")
    if swept and engine == "hook":
        raise UsageError("--sweep measures our own loop", "leave --sweep or --engine hook away")
    if swept and budget:
        raise UsageError("--budget ends a bench of one setting", "a sweep that is interrupted goes on where it was")
    own_prompts = inputs.own_prompts(given)
    check_exports(given)
    drafters = [value for _, value in swept.values] if swept and swept.option.name == "drafter" else [given.drafter]
    wanted = [DRAFTERS[name] for one in drafters for name in parse_drafters(one or "both")]  # by any value of a sweep
    no_draft = not any(row.needs_model for row in wanted)
    if given.drafter == "none" and swept is None:
        message = "bench needs a drafter to compare with, and --drafter none is target-only"
        raise UsageError(message, "--drafter lookup needs no model")
    if not given.given(("pair", "model", "model_draft", "hf_repo", "hf_repo_draft")):
        given = replace(given, pair=BENCH_PAIR)
    pair = inputs.pair(given, need_draft=any(row.needs_file for row in wanted), no_draft=no_draft)
    repetitions = given.repetitions or pair.bench.repetitions
    texts = prompting.Spec(pair.target, own_prompts, bool(given.raw), tuple(pair.bench.prompts or ()))
    asked = prompting.prepare(texts, verbose=ui.flags().verbose)
    spec = Spec(
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
        return sweeping.measure(sweeping.prepare(pair, spec, swept, given, repetitions or SWEPT_TRIALS), given)
    own_lengths = bool(own_prompts) and not (given.predict or pair.bench.max_tokens)
    return _measure(pair, spec, given, asked, engine, repetitions, budget, own_lengths=own_lengths)


def _measure(
    pair: Pair,
    spec: Spec,
    given: Settings,
    asked: prompting.Result,
    engine: str,
    repetitions: int | None,
    budget: float | None,
    *,
    own_lengths: bool,
) -> int:
    if given.drafter is None and pair.settings.drafter == "none":
        ui.note(f"the profile of {pair.name} turns speculation off: measured as with --drafter both")
        given = replace(given, drafter="both")
    if engine == "hook":
        hooked.check(decoder_options(given.over(pair.settings)), spec.sampling)
    resolved = inputs.resolve(pair, given, rival=True, calibrate=inputs.calibrator(given))
    if engine == "hook":  # a plan may put experts on the CPU
        hooked.check(resolved.pair, spec.sampling)
        hooked.check(resolved.alone, spec.sampling)
    spec = replace(spec, draft=pair.draft if resolved.pair.needs_draft else None, options=resolved.pair)
    check_room(spec, max(asked.tokens))
    limit = budget or (None if repetitions else pair.bench.budget_s)
    placed = (ui.flags().verbose, resolved.alone, resolved.plan)
    run = Bench(Experiment(pair, spec, repetitions, *placed, engine, limit, given.predict is None, own_lengths))
    kept = folder(given) / f"bench-{file_name(pair.name)}-{run.experiment.key}.json"
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
    minutes, rest = divmod(round(2 * limit), 60)
    kept = ("prompt", "file", "prompts", "raw", "predict")
    return same_pair("bench", given, "--budget", f"{60 * minutes + rest}s" if rest else f"{minutes}m", kept=kept)


def _crash(crashes: Mapping[str, GgufspecError]) -> GgufspecError | None:
    if not crashes:
        return None
    names = " and ".join(words.mode_name(mode) for mode in crashes)
    return GgufspecError(f"{names} could not be measured; the reason is above", next(iter(crashes.values())).hint)


def _show(document: BenchDocument) -> None:
    """Print a bench, its verdict first; ``--verbose`` adds what that rests on."""
    out, everything = ui.out(), ui.flags().verbose
    out.print(document.verdict.text, style="bold green" if document.verdict.worth_it else "bold")
    if document.next:
        out.print(f"next: {document.next}", style="bold", soft_wrap=True)
    if document.hook is not None:
        out.print(document.hook.text, style="bold")
    out.print(table.terminal(report.results(document), out.width))
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
