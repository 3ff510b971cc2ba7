"""Command ``ggufspec export``: print a pair's placement as settings for other programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import FILES_OR_URLS, command, command_option, one_of, takes
from ggufspec.cli.results import check_exports, write_export
from ggufspec.errors import GgufspecError
from ggufspec.models import mmproj
from ggufspec.models.headers import read_headers
from ggufspec.models.hub.client import HubFile
from ggufspec.models.locate import first_part, is_url, part_names
from ggufspec.reports.export import ALWAYS_AS_A_PAIR, PROGRAMS, ModelFile
from ggufspec.reports.export import ExportSettings as Exported
from ggufspec.reports.export import export_for as exported
from ggufspec.schema.base import to_json
from ggufspec.settings.table import Settings


@command(
    "ggufspec export demo --to llama-server",
    "ggufspec export -m TARGET.gguf -md DRAFT.gguf --to ollama -o Modelfile",
    confirms=True,
)
def export(
    *,
    to: Annotated[
        str, command_option("--to PROGRAM", f"Program to export to. One of {', '.join(PROGRAMS)}.", **one_of(PROGRAMS))
    ] = PROGRAMS[0],
    hub: Annotated[
        bool, command_option("--hub", "Name files by repository. For a machine that has not downloaded them yet.")
    ] = False,
    output: Annotated[
        Path | None, command_option("-o --output FILE", "Write to this file instead of standard output.")
    ] = None,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "target-only", "simulated", "placement", "devices", "drafter", "draft_max"),
            *("acceptance", "context", "vision"),
            **FILES_OR_URLS,
        ),
    ],
) -> int:
    """Print a pair's placement as settings for another program.

    models-preset is an INI section for llama-server --models-preset; llama-swap is a YAML configuration. If the plan
    finds that drafting does not pay, target-only is exported; --drafter draft or mtp keeps the drafter. Notes on
    standard error list what the program has no setting for.
    """
    check_exports(given, output)
    if given.no_draft:
        given = replace(given, drafter="none")
    pair = inputs.pair_spec(given)
    fixed = replace(given, draft_policy="fixed")  # other programs support only the fixed policy
    resolved = inputs.resolve_shown(pair, fixed, loads=True)
    if not resolved.pair.needs_draft:  # the profile says so: tuning found that the draft does not pay off
        pair = replace(pair, draft=None)
    plan, options, why = resolved.plan, resolved.pair, resolved.plan.why if resolved.plan else ""
    if plan and plan.choice == "target-only" and options.drafters and not given.drafter and to not in ALWAYS_AS_A_PAIR:
        pair, options = replace(pair, draft=None), replace(resolved.target_only, drafters=())
        why = f"drafting does not pay here: {why}"
    settings = Exported(
        _file(pair.target, hub),
        _file(pair.draft, hub) if pair.draft else None,
        options,
        blocks=read_headers([pair.target])[0].header.blocks if to == "lm-studio" else 0,  # a share of them is offloaded
        devices=() if given.gpu or given.vram else resolved.cards,
        rpc=given.rpc or (),
        name=pair.name,
        why=why,
        mmproj=_projector(given.over(pair.settings), hub),
        mmproj_offload=not given.over(pair.settings).no_mmproj_offload,
    )
    made = exported(to, settings)
    text = to_json(made) if ui.flags().json else made.text
    if output is None:
        ui.data(text)
    else:
        write_export(output, text + "\n")
    for note in () if ui.flags().json else made.notes:
        if output is not None or note not in made.text:
            ui.note(note)
    return 0


def _projector(wanted: Settings, hub: bool) -> ModelFile | None:
    if not wanted.mmproj:
        return None
    return ModelFile(wanted.mmproj) if is_url(wanted.mmproj) else _file(mmproj.projector_source(wanted.mmproj), hub)


def _file(source: str | Path | HubFile, hub: bool) -> ModelFile:
    """Return a file's name for other programs: its repository if it is a hub file or ``hub`` is set, else its path."""
    if isinstance(source, HubFile):
        return ModelFile(part_names(source.file)[0], source.repo)
    path = first_part(Path(source).absolute())
    if not hub:
        return ModelFile(str(path))
    # huggingface_hub's cache has models--USER--NAME/snapshots/REVISION/FILE.
    for folder in path.parents:
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            repo = folder.parents[1].name.removeprefix("models--").replace("--", "/")
            return ModelFile(path.relative_to(folder).as_posix(), repo)
    raise GgufspecError(f"{path} did not come from the hub", "leave --hub out, or give a profile that names a repo")
