"""Command ``ggufspec compare``: measure speed and quality of pairs, each at its own best placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Annotated

import typer
from rich.text import Text

from ggufspec.api.options import decoder_options, sampling
from ggufspec.bench.compare import LOG, Comparison
from ggufspec.bench.matrix import (
    NONE,
    TOKENS,
    WORDS,
    LabelledModel,
    Matrix,
    Pairing,
    check_twice,
    with_draft,
    with_target_only,
    without_file,
)
from ggufspec.bench.run_log import RunLog
from ggufspec.bench.trials import Progress
from ggufspec.cli import inputs, pull, ui
from ggufspec.cli.live import ProgressLine, live
from ggufspec.cli.parameters import FIXED_LENGTH, command, command_option, parse_seconds, profile_names, takes
from ggufspec.cli.results import check_exports, finish, folder, measured
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.files.write import check_writable
from ggufspec.models.hub.choice import HubName, hub_file, parse_name
from ggufspec.models.locate import first_part
from ggufspec.models.profile import load_profile, local_pair, on_hub
from ggufspec.reports import compare as report
from ggufspec.reports import table
from ggufspec.reports.compare import CompareSort
from ggufspec.schema.compare import CompareDocument
from ggufspec.settings.registry import drafts_with_file
from ggufspec.settings.table import Settings

_EXAMPLE = "ggufspec compare -m A-Q4_K_M.gguf,A-Q8_0.gguf -md DRAFT.gguf"


@command(
    "ggufspec compare -m A-Q4_K_M.gguf,A-Q8_0.gguf -md DRAFT.gguf --html c.html",
    "ggufspec compare -hf USER/REPO:Q3_K_S,Q4_K_M -hfd USER/SMALL --sort speed",
    "ggufspec compare llama3-70b llama3.1-8b",
    confirms=True,
)
def compare(
    *,
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PAIR",
            help="Profiles, by name or path.",
            show_default=False,
            autocompletion=profile_names,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        command_option(
            "--budget TIME",
            "Time limit, such as 90s or 10m. To meet it, answers get shorter first; then trials, prompts and the last "
            "cells are cut.  [none]",
            parser=parse_seconds,
        ),
    ] = None,
    no_quality: Annotated[bool, command_option("--no-quality", "Skip measuring the targets' quality.")] = False,
    sort: Annotated[
        CompareSort, command_option("--sort COLUMN", f"Column to sort the rows by. One of {', '.join(CompareSort)}.")
    ] = CompareSort.MATRIX,
    given: Annotated[
        Settings,
        takes(
            *("files", "hub", "prompt", "prompts", "raw", "predict", "repetitions", "devices", "drafting", "context"),
            *("sampling", "results", "fresh", "exports"),
            model={"metavar": "FILE,FILE", "help": "Target models, GGUF files."},
            model_draft={
                "metavar": "FILE,FILE",
                "help": "Draft models: files, lookup, or mtp (own head). Target-only is always "
                "measured (none: nothing else).",
            },
            hf_repo={"metavar": "REPO", "help": "Target models, USER/REPO:QUANT,QUANT."},
            hf_repo_draft={"metavar": "REPO", "help": "Draft models, USER/REPO:QUANT,QUANT."},
            predict={**FIXED_LENGTH, "shown": f"{TOKENS}; what fits with --budget"},
            repetitions={"default": 3, "help": "Trials per cell; leaders get more."},
            rare=("sampling", "raw", "fresh", "file", "draft_max"),
        ),
    ],
) -> int:
    """Compare many pairs by speed, memory, energy and quality.

    Pairs every target with every draft, and also shows speedup and acceptance rate. Every cell runs at its own best
    placement, interleaved with the others. A failed cell is shown with the reason. The same command resumes an
    interrupted run. Quality is measured against the largest target.
    """
    own_prompts = inputs.own_prompts(given)
    check_exports(given)
    if not drafts_with_file(word := given.drafter or "both"):
        raise UsageError(f"--drafter {word} uses no draft file", f"-md {word} makes it a cell of its own")
    sampling(given)  # finds typos before anything is downloaded
    decoder_options(given)
    given = inputs.with_seed(given)
    matrix = Matrix(_pairings(pairs, given), given, own_prompts, verbose=ui.flags().verbose)
    stem = folder(given) / f"compare-{matrix.key}"
    path, kept = stem.with_suffix(".jsonl"), stem.with_suffix(".json")
    with RunLog(path, LOG, fresh=bool(given.fresh)) as log:
        check_writable(kept)
        with inputs.planning() as on_event:
            experiment = matrix.experiment(log, on_event, quality=not no_quality, budget_s=budget)
        comparison = Comparison(experiment, log)
        trials = comparison.trials
        interrupted = measured(
            lambda line: comparison.run(_watched(comparison, line)), lambda: any(trials.results.values()), live
        )
    document = comparison.document(interrupted=interrupted)
    failed = not interrupted and not any(cell.run for cell in document.cells)
    return finish(
        document,
        lambda: _show(document, sort),
        given,
        markdown=lambda one: report.markdown(one, sort),
        csv=lambda one: report.comma_separated(one, sort),
        notes=document.notes,
        kept=kept,
        resumed=trials.resumed,
        failed=GgufspecError("no cell could be measured", "the reasons are above") if failed else None,
    )


def _pairings(profiles: Sequence[str] | None, given: Settings) -> list[Pairing]:
    """Return every pairing, each target's target-only run first; missing files are downloaded from the hub."""
    if profiles and (given.model is not None or given.hf_repo is not None):
        hint = "give either profiles, or -m (or GGUFSPEC_MODEL) and -hf"
        raise UsageError("both profiles and targets are given", hint)
    targets = [*_files(given.model, "-m"), *_of_hub(given.hf_repo, "-hf")]
    draft_files = [*_files(given.model_draft, "-md"), *_of_hub(given.hf_repo_draft, "-hfd")]
    words = {word for text in (given.model_draft, given.hf_repo_draft) for word in split_list(text)} & {*WORDS}
    given_drafts = bool(draft_files or words)
    if not given_drafts and not profiles and (word := without_file(given.drafter)):
        words = {word}
    if not (targets or profiles):
        what = "only drafts are given" if given_drafts else "nothing is given to compare"
        raise UsageError(f"{what}: the matrix is empty", _EXAMPLE)
    check_twice(targets, "target")
    check_twice(draft_files, "draft")
    drafts: list[LabelledModel | str | None] = [None, *draft_files, *(word for word in WORDS if word in words - {NONE})]
    if not profiles:
        pairings = [Pairing(target, draft, Settings()) for target in targets for draft in drafts]
    else:
        pairings = list(_of_profiles(profiles, own_drafts=not given_drafts))
        if given_drafts:
            pairings = [with_draft(one, draft) for one in pairings for draft in drafts]
    return with_target_only(pairings)


def split_list(text: str | None) -> list[str]:
    """Split a list at commas, unless it is an existing file with a comma in its name."""
    if text and untrusted.is_file(Path(text)):
        return [text]
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _files(text: str | None, flag: str) -> list[LabelledModel]:
    words = WORDS if flag == "-md" else ()
    parts = split_list(text)
    if text is not None and not parts:
        raise UsageError(f"{flag} names no file: the matrix is empty", _EXAMPLE)
    paths = [untrusted.at_home(part) for part in parts if part not in words]  # a shell expands only a leading ~
    for path in paths:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "does not exist"
            raise ModelError(f"{path} {reason}", f"ls {path if path.is_dir() else path.parent}")
    paths = [first_part(path) for path in paths]  # any part of a split model may be given
    return [LabelledModel(path, path.absolute()) for path in paths]


def _of_hub(text: str | None, flag: str) -> list[LabelledModel]:
    """Return the files in ``USER/REPO:Q3_K_S,Q4_K_M``; an item without a slash belongs to the preceding repository."""
    example = f"{flag} USER/REPO:Q3_K_S,Q4_K_M"
    if text is not None and not split_list(text):
        raise UsageError(f"{flag} names no repository: the matrix is empty", example)
    names: list[HubName] = []
    for part in split_list(text):
        if part in WORDS:
            continue
        if "/" in part.partition("@")[0]:
            names.append(parse_name(part))
        elif names:
            more = parse_name(f"{names[-1].repo}:{part}")
            names.append(replace(more, revision=more.revision or names[-1].revision))
        else:
            raise UsageError(f"{part!r} names no repository", example)
    sources = [hub_file(str(name), draft=flag == "-hfd") for name in names]
    again = " && ".join(pull.command_line(None, str(name), None) for name in names)  # `ggufspec pull` takes no lists
    paths = pull.have(sources, "the comparison", again)
    return [
        LabelledModel(path, PurePath("/", source.repo, source.file))
        for path, source in zip(paths, sources, strict=True)
    ]


def _of_profiles(profiles: Sequence[str], *, own_drafts: bool) -> Iterator[Pairing]:
    for name in profiles:
        profile = load_profile(name)
        if not own_drafts:
            profile = profile.model_copy(update={"draft": None})
        sources = [source for one in (profile.target, profile.draft) if one and (source := on_hub(one))]
        pull.have(sources, f"profile {profile.name!r}", pull.command_line(name, None, None))
        pair = local_pair(profile)
        files = [
            LabelledModel(file, PurePath("/", one.repo, one.file) if one.repo else file.absolute())
            for file, one in ((pair.target, profile.target), (pair.draft, profile.draft))
            if file is not None and one is not None
        ]
        usual = without_file(profile.settings.drafter) if own_drafts else None
        draft = files[1] if len(files) > 1 else usual
        yield Pairing(files[0], draft, pair.settings)


def _watched(comparison: Comparison, line: ProgressLine) -> Progress:
    """Return a callback that shows progress, and each cell after its first trial."""
    shown = set[str]()

    def progress(done: int, total: int, what: str) -> None:
        for one in comparison.experiment.contenders:
            if one.spec and one.name not in shown and comparison.trials.results.get(one.spec):
                shown.add(one.name)
                line.say(report.in_a_line(comparison.cell(one)))
        line(f"{min(done + 1, total)} of {total}: {what}", comparison.left_s)

    return progress


def _show(document: CompareDocument, sort: CompareSort) -> None:
    out = ui.out()
    names = report.names_of(document, max(12, out.width // 4))
    shown = [report.quality(document, names[0])] if report.has_quality(document) else []
    shown.append(report.results(document, sort, names, grouped=True))
    for one in shown:
        out.print(table.terminal(one, out.width))
    for reason in report.failures(document):
        out.print(Text.assemble(("failed ", "bold red"), reason))
    out.print(report.verdict(document), style="bold")
    if portions := report.portions_of_best(document, names):
        out.print(f"{portions.title}:")
        out.print(table.terminal(portions, out.width))
    legend = table.marks(*shown)
    if tokens := next((model.quality.tokens for model in document.targets if model.quality), 0):
        legend.append(f"quality measured on a bundled text of {tokens:,} tokens")
    if legend:
        out.print(f"{'; '.join(legend)}.", style="dim")
    for warning in document.warnings:
        out.print(f"Warning: {warning}.", style="yellow")
