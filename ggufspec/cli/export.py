"""Command ``ggufspec export``: print a pair's placement as settings of other programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ggufspec.cli import inputs, ui
from ggufspec.cli.parameters import FILES_OR_URLS, command, one_of, option, takes
from ggufspec.cli.results import check_exports, write
from ggufspec.errors import GgufspecError
from ggufspec.models import mmproj
from ggufspec.models.headers import read_headers
from ggufspec.models.hub.client import HubFile
from ggufspec.models.locate import is_url
from ggufspec.reports.export import ALWAYS_AS_A_PAIR, PROGRAMS, ModelFile
from ggufspec.reports.export import Settings as Exported
from ggufspec.reports.export import export as exported
from ggufspec.schema.base import to_json
from ggufspec.settings.table import Settings


@command(
    "ggufspec export demo --to llama-server",
    "ggufspec export -m TARGET.gguf -md DRAFT.gguf -ngl 45 -c 4096 --to ollama -o Modelfile",
    confirms=True,
)
def export(
    *,
    to: Annotated[
        str, option("--to PROGRAM", f"Program to export to. One of {', '.join(PROGRAMS)}.", **one_of(PROGRAMS))
    ] = PROGRAMS[0],
    hub: Annotated[
        bool, option("--hub", "Name files by repository. For a machine that has yet to download them.")
    ] = False,
    output: Annotated[Path | None, option("-o --output FILE", "Write to this file instead of standard output.")] = None,
    given: Annotated[
        Settings,
        takes(
            *("profile", "files", "hub", "target-only", "simulated", "placement", "devices", "drafter", "draft_max"),
            *("acceptance", "context", "vision"),
            **FILES_OR_URLS,
        ),
    ],
) -> int:
    """Print a pair's placement as settings of another program.

    models-preset is an INI section for llama-server --models-preset, llama-swap a configuration in YAML. Where the plan
    finds that drafting does not pay, target-only is exported; --drafter draft or mtp keeps the drafter. Notes on
    standard error say what the program has no setting for.
    """
    check_exports(given, output)
    if given.no_draft:
        given = replace(given, drafter="none")
    pair = inputs.pair_spec(given)
    resolved = inputs.resolve(pair, replace(given, draft_policy="fixed"))  # other programs have no other policy
    if not resolved.pair.needs_draft:  # its profile says so: tuning found that the draft does not pay
        pair = replace(pair, draft=None)
    plan, options, why = resolved.plan, resolved.pair, resolved.plan.why if resolved.plan else ""
    if plan and plan.choice == "target-only" and options.drafters and not given.drafter and to not in ALWAYS_AS_A_PAIR:
        pair, options = replace(pair, draft=None), replace(resolved.alone, drafters=())
        why = f"drafting does not pay here: {why}"
    settings = Exported(
        _file(pair.target, hub),
        _file(pair.draft, hub) if pair.draft else None,
        options,
        blocks=read_headers([pair.target])[0].header.blocks if to == "lm-studio" else 0,  # offloads a share of them
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
        write(output, text + "\n")
    for note in () if ui.flags().json else made.notes:
        if output is not None or note not in made.text:
            ui.note(note)
    return 0


def _projector(wanted: Settings, hub: bool) -> ModelFile | None:
    if not wanted.mmproj:
        return None
    return ModelFile(wanted.mmproj) if is_url(wanted.mmproj) else _file(mmproj.source(wanted.mmproj), hub)


def _file(source: str | Path | HubFile, hub: bool) -> ModelFile:
    """Return a file as other programs name it: by its repository if it is not local, or with ``hub``."""
    if isinstance(source, HubFile):
        return ModelFile(source.file, source.repo)
    path = Path(source).absolute()
    if not hub:
        return ModelFile(str(path))
    # huggingface_hub's cache has models--USER--NAME/snapshots/REVISION/FILE.
    for folder in path.parents:
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            repo = folder.parents[1].name.removeprefix("models--").replace("--", "/")
            return ModelFile(path.relative_to(folder).as_posix(), repo)
    raise GgufspecError(f"{path} did not come from the hub", "leave --hub out, or give a profile that names a repo")
