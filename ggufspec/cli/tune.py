"""Command ``ggufspec tune``: find the fastest settings for a pair on this machine and save them as a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ggufspec.bench import prompting
from ggufspec.bench.run_log import RunLog
from ggufspec.cli import inputs, ui
from ggufspec.cli.live import live
from ggufspec.cli.parameters import FIXED_LENGTH, command, command_option, parse_seconds, takes
from ggufspec.cli.results import check_exports, finish, folder, measured, show_files
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.reports import table
from ggufspec.reports import tune as report
from ggufspec.schema.text import counted
from ggufspec.schema.tune import TuneDocument
from ggufspec.settings.registry import drafts_with_file
from ggufspec.settings.table import Settings
from ggufspec.tune.document import tune_document
from ggufspec.tune.experiment import EVERY, without_tuned
from ggufspec.tune.experiment import experiment as tune_experiment
from ggufspec.tune.profile import profile_name, template
from ggufspec.tune.profile import save_winner as save_profile
from ggufspec.tune.run import LOG, Tuning, log_path

_SHOWN = 10  # maximum settings shown without --explain


@command(
    "ggufspec tune demo --budget 5m",
    "ggufspec tune -m TARGET.gguf -md DRAFT.gguf --allow-kv q8_0 --save my-pair",
    confirms=True,
)
def tune(
    *,
    budget: Annotated[
        float | None,
        command_option("--budget TIME", "Time limit, such as 90s, 10m or 2h.  [none]", parser=parse_seconds),
    ] = None,
    threshold: Annotated[
        float,
        command_option(
            "--threshold PERCENT",
            "Stop when no untried setting is predicted to gain more than this.",
            rare=True,
            min=0,
            max=50,
        ),
    ] = 0.1,
    save: Annotated[
        str | None,
        command_option(
            "--save NAME", "Profile to save, even if too close to call.  [if clear: PAIR, or the target's name]"
        ),
    ] = None,
    no_save: Annotated[bool, command_option("--no-save", "Do not save a profile.")] = False,
    explain: Annotated[
        bool, command_option("--explain", "Explain why this setting won. Also says what was learned.")
    ] = False,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "prompt", "prompts", "raw", "predict", "repetitions", "allow_kv", "placement"),
            *("devices", "drafting", "context", "sampling", "results", "fresh", "exports", "no_calibrate"),
            predict={**FIXED_LENGTH, "default": 64},
            repetitions={"default": 3, "help": "Trials of each finalist, interleaved."},
            rare=("sampling", "raw", "fresh", "file", "draft_max", "html"),
        ),
    ],
) -> int:
    """Find the fastest settings for a pair on this machine.

    Searches layers, drafts, threads, flash attention and more. It starts from the plan, measures the most promising
    settings, learns from every trial, and stops when nothing promises more or the budget is spent. A winner that is
    clearly faster than the planned setting and target-only is saved as a profile of yours, which run and bench use from
    then on; otherwise it is too close to call. A trial that runs out of memory is shown as failed. The same command
    resumes an interrupted search. Options that are given are not searched.
    """
    if save is not None and no_save:
        raise UsageError("both --save and --no-save are given", "give one of them")
    own_prompts = inputs.own_prompts(given)
    check_exports(given)
    pair = inputs.pair(given, no_draft=not drafts_with_file(given.drafter or "both"))
    tuned = None if given.model or given.hf_repo else given.pair or "demo"
    own_draft = pair.draft is not None and bool(given.model_draft or given.hf_repo_draft)
    name = profile_name(save, tuned, pair, own_draft=own_draft)
    made_from = None if no_save else template(name, None if own_draft else tuned, pair)
    asked = prompting.make_texts(
        prompting.PromptsJob(pair.target, own_prompts, bool(given.raw), every=EVERY), verbose=ui.flags().verbose
    )
    given = inputs.with_seed(given)
    opened = inputs.open_here(without_tuned(pair, given), given, finds_head=True)
    planned = inputs.make_plan_shown(opened, calibrate=inputs.calibrator(given))
    experiment = tune_experiment(
        pair, given, planned, asked=asked, threshold=threshold / 100, budget_s=budget, verbose=ui.flags().verbose
    )
    path = log_path(folder(given), experiment)
    with RunLog(path, LOG, fresh=bool(given.fresh)) as log:
        run = Tuning(experiment, log)
        if run.resumed:
            ui.note(f"resuming with {counted(run.resumed, 'trial')} from {path}; --fresh starts over")
        if shortage := run.shortage():
            ui.note(shortage)
        interrupted = measured(run.run, lambda: run.kept, live)
        failed: GgufspecError | None = None
        document = tune_document(run, interrupted=interrupted)
        if document.winner is None and not interrupted:
            failed = GgufspecError("every setting failed", "ggufspec doctor; -v shows llama.cpp's log")
        elif not no_save and not interrupted and (document.decided or save is not None):
            try:
                saved = save_profile(document, name, made_from, pair, opened.options, len(run.kept))
                document = replace(document, saved=saved)
            except GgufspecError as error:  # the results are shown anyway
                failed = error
    return finish(
        document,
        lambda: _show(document, name, explain=explain, no_save=no_save),
        given,
        markdown=report.markdown,
        csv=report.comma_separated,
        notes=(*report.failures(document), *document.notes),
        kept=path.with_suffix(".json"),  # for ggufspec report
        failed=failed,
    )


# ---- output ----------------------------------------------------------------------------------------------------------


def _show(document: TuneDocument, name: str, *, explain: bool, no_save: bool) -> None:
    out = ui.out()
    show_files(document.pair)
    settings = document.settings
    work = f"{counted(settings['prompts'], 'prompt')} × {settings['max_tokens']} tokens"
    out.print(f"{work}, {settings['space']:,} settings to choose from", style="dim")
    fewer = len(document.trials) if explain else _SHOWN
    shown = report.trials(document, best=fewer)
    out.print(table.terminal(shown))
    if len(document.trials) > fewer:
        out.print(f"{fewer} of {len(document.trials)} settings; --explain and --json show all.", style="dim")
    if document.winner is not None:
        best = document.trials[document.winner]
        assert best.tokens_per_s is not None
        leads = "Leading" if len(document.trials) > 1 else "Measured"
        lead = "So far" if document.interrupted else "The fastest" if document.decided else leads
        style = "bold green" if document.decided else "bold"
        out.print(f"{lead}: {report.setting_name(document, best.setting)}.", style=style)
        out.print(document.verdict)
        if not document.decided and not document.interrupted:
            saved = f"Nothing was saved; --save {name} saves it anyway." if not (document.saved or no_save) else ""
            advice = f"{document.advice[:1].upper()}{document.advice[1:]}." if document.advice else ""
            out.say(" ".join(filter(None, (saved, advice))))
    if explain:
        for sentence in document.explanation:
            out.print(f"- {sentence}")
    elif document.stopped:
        out.print(f"The search ended: {document.stopped}. --explain gives the reasons.", style="dim")
    if document.saved:
        out.whole(f"Saved to {document.saved}", style="dim")
        out.whole("next: ", (f"ggufspec bench {name}", "bold"))
