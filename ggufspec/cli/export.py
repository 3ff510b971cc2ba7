"""``ggufspec export``: a plan as settings of other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggufspec.cli import given, options, planned, ui
from ggufspec.errors import GgufspecError

if TYPE_CHECKING:
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.models.hub import HubFile
    from ggufspec.planning.export import ModelFile, Settings


class Program(StrEnum):
    """The programs of :data:`ggufspec.planning.export.PROGRAMS`, by the names that ``--to`` has for them."""

    LLAMA_SERVER = "llama-server"
    LLAMA_CLI = "llama-cli"
    LLAMA_BENCH = "llama-bench"
    LLAMA_SPECULATIVE_SIMPLE = "llama-speculative-simple"
    OLLAMA = "ollama"
    LM_STUDIO = "lm-studio"


def export(
    *,
    sources: given.Sources,
    to: Annotated[Program, typer.Option("--to", help="The program that is to run it.")] = Program.LLAMA_SERVER,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Target-only: no draft, no lookup.")] = False,
    hub: Annotated[
        bool, typer.Option("--hub", help="Name files by repository, for a machine that has yet to download them.")
    ] = False,
    gpu: options.Gpu = None,
    vram: options.Vram = None,
    placing: given.Placing,
    draft_max: options.DraftMax = None,
    decoding: given.Decoding,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file, not to standard output.")
    ] = None,
) -> int:
    """Print a pair's placement as settings of another program.

    What the program cannot be told is said on standard error.
    """
    from dataclasses import replace

    from ggufspec.files import check_writable, write_whole
    from ggufspec.planning import export as planning
    from ggufspec.schema.base import to_json
    from ggufspec.schema.export import ExportDocument

    if output is not None:
        check_writable(output)
    chosen = sources.choose()
    if no_draft:
        chosen = replace(chosen, draft=None)
    drafting = given.Drafting(draft_policy=options.Policy.FIXED, draft_max=draft_max)  # other programs have no other
    places = planned.settle(chosen, placing, decoding, drafting, gpu=gpu, vram=vram)
    if not places.pair.needs_draft:  # the profile says so: tuning found that it does not pay
        chosen = replace(chosen, draft=None)
    settings = settings_from(
        _file(chosen.target, hub),
        _file(chosen.draft, hub) if chosen.draft else None,
        places.pair,
        blocks=_blocks(chosen) if to is Program.LM_STUDIO else None,
        devices=() if gpu or vram else places.cards,
        rpc=tuple(placing.rpc or ()),
    )
    made = planning.export(to.value, settings)
    text = to_json(ExportDocument(to.value, made.text, made.arguments, made.notes)) if ui.flags().json else made.text
    if output is None:
        ui.data(text)
    else:
        write_whole(output, text + "\n")
    if not ui.flags().json:
        for note in made.notes:
            if output is not None or note not in made.text:
                ui.note(note)
    return 0


def _blocks(chosen: planned.Chosen) -> int:
    """LM Studio is told a share of the target's blocks."""
    from ggufspec.models.source import read_headers

    with ui.busy():
        return read_headers([chosen.target])[0].header.blocks


def settings_from(
    target: ModelFile,
    draft: ModelFile | None,
    decoder: DecoderOptions,
    *,
    blocks: int | None = None,
    devices: tuple[str, ...] = (),
    rpc: tuple[str, ...] = (),
) -> Settings:
    """What other programs are to be told, so that they place and decode a pair as ``decoder`` says.

    Args:
        target: the target's file.
        draft: the draft's, or None.
        decoder: the placement and the context.
        blocks: of the target, where they are known.
        devices: names of the cards that the splits are over, in llama.cpp's order.
        rpc: endpoints of RPC workers.
    """
    from ggufspec.planning.export import Settings

    return Settings(
        target=target,
        placement=decoder.placement,
        context=decoder.context(with_draft=draft is not None),
        draft=draft,
        draft_placement=decoder.draft_placement,
        draft_context=decoder.draft_context() if draft else None,
        draft_max=decoder.draft_max,
        blocks=blocks,
        devices=devices,
        rpc=rpc,
    )


def _file(source: str | Path | HubFile, hub: bool) -> ModelFile:
    """How other programs are told of a file: by its repository where it is not here, or where ``hub`` asks for it."""
    from ggufspec.models.hub import HubFile
    from ggufspec.planning.export import ModelFile

    if isinstance(source, HubFile):
        return ModelFile(source.file, source.repo)
    path = Path(source).absolute()
    if not hub:
        return ModelFile(str(path))
    # models--USER--NAME/snapshots/REVISION/FILE: huggingface_hub's cache
    for folder in path.parents:
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            repo = folder.parents[1].name.removeprefix("models--").replace("--", "/")
            return ModelFile(path.relative_to(folder).as_posix(), repo)
    raise GgufspecError(f"{path} did not come from the hub", "leave --hub out, or give a profile that names a repo")
