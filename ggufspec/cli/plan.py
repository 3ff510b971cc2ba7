"""Command ``ggufspec plan``: show what fits, where each layer goes, how fast it is, and whether the draft pays."""

from __future__ import annotations

import shlex
from typing import Annotated

from ggufspec.api import repository
from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import FILES_OR_URLS, command, command_option, takes
from ggufspec.cli.results import show_models
from ggufspec.errors import UsageError
from ggufspec.hardware.backends import is_guess
from ggufspec.models.hub.client import UnreachableError
from ggufspec.models.hub.repository import HubRepository
from ggufspec.reports import plan as report
from ggufspec.reports import ranking as ranks
from ggufspec.reports import table
from ggufspec.schema.plan import PlanDocument
from ggufspec.settings.table import Settings


@command(
    "ggufspec plan llama3-70b --gpu 'RTX 4090'",
    "ggufspec plan -m TARGET.gguf -md DRAFT.gguf --vram 24GiB -c 8192 --sweep",
    "ggufspec plan -hf USER/REPO --draft-repo USER/SMALL-REPO",
    "ggufspec plan --search 'qwen3 coder' --gpu 'RTX 4090'",
)
def plan(
    *,
    calibrate: Annotated[
        bool,
        command_option("--calibrate", "Measure this machine's speed again. It takes about ten seconds and is saved."),
    ] = False,
    sweep: Annotated[bool, command_option("--sweep", "Predict tokens/s by number of offloaded layers.")] = False,
    search: Annotated[str | None, command_option("--search WORDS", "Rank models found on the hub.")] = None,
    draft_repo: Annotated[
        str | None, command_option("--draft-repo USER/REPO", "Rank this repository's drafts for the target.")
    ] = None,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "simulated", "placement", "devices", "allow_kv", "acceptance", "draft_max"),
            *("context", "drafter", "vision", "parallel", "no_calibrate"),
            **FILES_OR_URLS,
        ),
    ],
) -> int:
    """Show what fits, how fast it is, and whether the draft pays.

    Also shows where each layer goes. Needs no download, because it reads only headers from the hub, a few MB. Needs no
    GPU: name one with --gpu or --vram. -hf USER/REPO without a QUANT ranks all models in the repository.
    """
    _check_ranked(given, search, draft_repo)
    among = repository.several(given.hf_repo)
    if among or search is not None or draft_repo is not None:
        if sweep:
            raise UsageError("--sweep needs a single pair, not a ranking", "name the files: -hf USER/REPO:QUANT")
        if given.mmproj is not None:
            raise UsageError("--mmproj needs a single target, not a ranking", "name the file: -hf USER/REPO:QUANT")
        return _rank(given, among, search, draft_repo, calibrate=calibrate)
    calibrator = inputs.calibrator(given, always=calibrate)
    try:
        opened = inputs.open_here(inputs.pair_spec(given), given, loads=True)
    except UnreachableError as unreachable:
        raise UnreachableError(unreachable.message, _offline(given, unreachable.hint)) from None
    made = inputs.make_plan_shown(opened, calibrate=calibrator)
    document = made.document(sweep=sweep, contexts=ui.flags().json or ui.flags().verbose)  # doubles the planning time
    ui.result(document, lambda: show_plan(document, has_contexts=made.has_contexts))
    return 0


def _check_ranked(given: Settings, search: str | None, draft_repo: str | None) -> None:
    names = [given.pair, given.model, given.hf_repo]
    if search is not None and any(names):
        raise UsageError("both --search and a target are given", "give one of them")
    if search is not None and not search.strip():
        raise UsageError("--search has no words", "--search 'qwen3 8b'")
    if draft_repo is not None and (given.model_draft or given.hf_repo_draft):
        raise UsageError("both --draft-repo and a draft are given", "give one of them")


def _offline(given: Settings, hint: str) -> str:
    """Return the hint for an unreachable hub; for a profile it names a command that works offline."""
    if given.pair is None:
        return hint
    words = [
        word
        for flag, values in (("--gpu", given.gpu), ("--vram", given.vram))
        for value in values or ()
        for word in (flag, value)
    ]
    return f"{shlex.join(['ggufspec', 'profiles', 'list', *words])} estimates it offline; or {hint.partition(';')[0]}"


def _rank(
    given: Settings, among: HubRepository | None, search: str | None, draft_repo: str | None, *, calibrate: bool
) -> int:
    measure = inputs.calibrator(given, always=calibrate)
    with inputs.planning() as on_event:
        document = repository.rank(
            given, among, words=search, draft_repo=draft_repo, calibrate=measure, on_event=on_event
        )
    out = ui.out()

    def show() -> None:
        for one in ranks.tables(document, out.width):
            out.print(table.terminal(one, out.width))
        for line, style in ranks.lines(document):
            out.whole(line, style=style) if line.startswith("next: ") else out.print(line, style=style)

    ui.result(document, show)
    return 0


def show_plan(document: PlanDocument, *, has_contexts: bool = False) -> None:
    """Print a plan with its choice first; ``--verbose`` adds the figures behind it."""
    out, everything = ui.out(), ui.flags().verbose
    out.print(document.why, style="bold green" if document.choice == "speculative" else "bold")
    for typed in (document.next, *document.also):
        out.whole(f"next: {typed}", style="bold")
    out.print(table.terminal(report.options(document)))
    for explanation in report.explanations(document):
        out.print(explanation, style="dim")
    show_models({role: document.pair.get(f"{role}_shape") for role in ("target", "draft")})
    for line in report.bars(document, min(out.width, 100), everything=everything):
        out.print(line)
    if everything and document.draft_lengths:
        out.print(table.terminal(report.draft_lengths(document)))
        out.print(
            "Accepted is the expected ratio accepted ÷ drafted tokens. The draft pays where a log shows more than Pays "
            "above; the chance next to it is the same limit for a single token.",
            style="dim",
        )
    if everything and len(document.contexts) > 1:
        out.print(table.terminal(report.contexts(document)))
    if len(document.sweep) > 1:
        out.print(table.terminal(report.sweep(document)))
    elif document.sweep:
        out.print("No GPU found: nothing is offloaded, whatever -ngl is. Use --gpu or --vram to sweep a GPU's layers.")
    out.print(f"The plan is for {report.context(document)}.", style="dim")
    bytes_are = "llama.cpp's own, from a dry run" if document.confirmed else "estimates, not llama.cpp's own"
    speeds_are = f"{'guesses' if document.guessed else 'predictions'}, {document.speed}"
    says_bytes = everything or not document.confirmed
    if says_bytes or document.guessed:
        out.print(f"Bytes are {bytes_are}. " * says_bytes + f"Speeds are {speeds_are}.", style="dim")
    if everything and any(is_guess(device.overhead_bytes) for device in document.devices):
        out.print("The driver's overhead is a guess until a bench has run on the GPU.", style="dim")
    if everything and (document.draft is not None or document.options["speculative"] is not None):
        chance = document.predicted["acceptance"]
        out.print(f"Chance per token: {chance:.0%}, {document.settings['acceptance_from']}.", style="dim")
    for note in document.notes:
        out.say(f"Note: {note}.", style="yellow")
    if not everything and not ui.flags().quiet:
        more = "draft lengths, " * bool(document.draft_lengths) + "other contexts, " * has_contexts
        out.print(f"-v adds {more}all memory and the basis of the figures.", style="dim")
