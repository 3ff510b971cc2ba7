"""Command ``ggufspec models``: list local GGUF models with their drafts; the error for commands without a model."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ggufspec.cli import ui
from ggufspec.cli.parameters import command
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.hardware.gpus import gpus
from ggufspec.hardware.host import free_memory_bytes
from ggufspec.models import heads, local
from ggufspec.models.headers import read_headers
from ggufspec.models.hub.choice import quant_of
from ggufspec.models.hub.client import HubFile
from ggufspec.models.local import LocalModel, LocalModels, ProgramFolder
from ggufspec.models.locate import Source
from ggufspec.models.profile import Pair, Profile, known_profiles, load_profile
from ggufspec.reports import models as report
from ggufspec.reports import table
from ggufspec.schema.models import LeftOutFile, ModelRow, ModelsDocument
from ggufspec.schema.text import counted, of_file
from ggufspec.settings.table import Settings

_ON_CPU_BYTES = 8 << 30  # on CPUs, larger models generate more slowly than people read
_QUICK_S = 2.0  # time limit for reading uncached headers before a chat begins


@command("ggufspec models", "ggufspec models ~/Downloads", "ggufspec models --json")
def models(
    *,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Look only in these folders.", show_default=False)
    ] = None,
) -> int:
    """List the GGUF models on this disk, with the drafts for each.

    Looks in the caches of Hugging Face and llama.cpp, the folders of LM Studio and Ollama, and the current folder.
    No model is loaded; headers are read once. -v lists what is left out: projectors, embedding models, damaged files.
    """
    for folder in folders or ():
        if not os.path.isdir(folder):  # noqa: PTH112  # os.path.isdir never raises
            reason = "is not a folder" if os.path.lexists(folder) else "does not exist"
            raise UsageError(f"{folder} {reason}", "ggufspec models")
    where = [ProgramFolder(local.GIVEN, folder) for folder in folders or ()] or model_folders()
    found = _look(where)
    document = _document(found, where)
    if ui.flags().json:
        ui.result(document, lambda: None)
        return 0
    if document.models:
        out = ui.out()
        out.print(table.terminal(report.model_rows(document, out.width), out.width))
    _notes(document, found)
    if document.next:
        ui.err().whole(("  next: ", "bold"), document.next)
    else:
        usual = "the folders of Hugging Face, llama.cpp, LM Studio and Ollama, or in this folder"
        ui.note(f"there are no GGUF models in {', '.join(map(str, folders)) if folders else usual}")
        ui.err().whole(("  next: ", "bold"), _without_any("chat"))
    return 0


def is_missing(given: Settings) -> bool:
    """Return whether neither a pair nor a target is given."""
    return given.pair is None and given.model is None and given.hf_repo is None


def no_model_error(name: str) -> UsageError:
    """List local models on standard error, and return the error for the command ``name`` run without a model."""
    where = model_folders()
    found = _look(where)
    document = _document(found, where, name)
    if not document.next:
        return UsageError("no model is given, and there is none on this disk", _without_any(name))
    if not ui.flags().json:
        err = ui.err()
        err.print(table.terminal(report.model_rows(document, err.width), err.width))
        _notes(document, found)
    return UsageError("no model is given", document.next)


def draft_line(name: str, given: Settings, target: Path) -> str:
    """Return a line that suggests a draft for a target without one, with the ``ggufspec NAME`` command that uses it.

    Empty if no draft is known, or if the user or a profile chose the drafter.
    """
    if given.pair or given.model_draft or given.hf_repo_draft or given.drafter or given.no_draft:
        return ""
    what, words = _draft_for(target)
    own = ("-hf", given.hf_repo) if given.hf_repo else ("-m", str(given.model))
    return f"a draft for it: {what}: {shlex.join(['ggufspec', name, *own, *words])}" if words else ""


def fitting(error: GgufspecError, target: Source, draft: Source | None) -> ModelError:
    """Return the error for an incompatible draft, with a compatible draft in its hint; a head's error is unchanged."""
    with contextlib.suppress(GgufspecError):
        if draft is not None and heads.head_kind(read_headers([draft])[0].header):
            return ModelError(error.message, error.hint)
    what, words = _draft_for(target)
    hint = f"{shlex.join(words)} fits ({what}), or --drafter none" if words else error.hint
    on_disk = words and words[0] == "-md"
    return ModelError(error.message, hint, (str(draft), words[1]) if on_disk else None)


def _draft_for(target: Source) -> tuple[str, tuple[str, ...]]:
    """Return (description, options) of a known draft for a target, else ("", ()). The hub is not contacted.

    The target's own MTP blocks come first, then a local model, then the draft of a profile of the same family.
    """
    file = Path(target.file if isinstance(target, HubFile) else target)
    with contextlib.suppress(GgufspecError):  # an unreadable header is reported when the model is loaded
        header = read_headers([target])[0].header
        if heads.in_target(header):
            return "its own MTP blocks", ("--drafter", heads.MTP.drafter)
        where = (
            model_folders()
            if isinstance(target, HubFile)
            else [*model_folders(), ProgramFolder(local.GIVEN, file.parent, 0)]
        )
        if drafts := local.drafts_for(file, header, _look(where, _QUICK_S)):
            what = f"{drafts[0].file.name} ({of_file(drafts[0].header.size_bytes)}, on this disk)"
            return what, drafts[0].file.draft_words
        if place := local.suggested(_names(file.stem, header.metadata), header.size_bytes):
            return f"{Path(place.file).stem}, to download", ("-hfd", _hub_name(place))
    return "", ()


def called(pair: Pair) -> str:
    """Return a pair's name; for an Ollama file, which is named after its digest, the model's own name."""
    if not re.fullmatch(r"sha256-[0-9a-f]{64}", pair.name):
        return pair.name
    named = read_headers([pair.target])[0].header.metadata.get("general.name")
    return named if isinstance(named, str) and named.strip() else pair.name[:14]


def _look(where: list[ProgramFolder], seconds: float = local.READ_S) -> LocalModels:
    with ui.busy() as show:
        return local.find_models(
            where, seconds=seconds, on_event=lambda event: show(f"reading the header of {event['file']}")
        )


def model_folders() -> list[ProgramFolder]:
    """Return the model folders of this user's programs, and the current folder."""
    try:
        current = [Path.cwd()]
    except OSError:  # the current folder was removed
        current = []
    found = local.program_folders(os.environ, Path.home())
    return [*found, *(ProgramFolder(local.HERE, folder, 2) for folder in current)]


def _document(found: LocalModels, where: list[ProgramFolder], name: str = "") -> ModelsDocument:
    best = local.first_choice(found.models, _room_bytes())
    rows = tuple(map(_row, found.models))
    return ModelsDocument(
        models=rows,
        left_out=tuple(LeftOutFile(str(one.path), one.why) for one in found.left_out),
        folders=tuple(str(place.folder) for place in where if os.path.isdir(place.folder)),  # noqa: PTH112  # never raises
        complete=not any(one.unread for one in found.left_out),
        next=_command(name, best) if best else "",
    )


def _row(model: LocalModel) -> ModelRow:
    header = model.header
    place = None
    if not model.drafts and not model.is_head:
        place = local.suggested(_names(model.file.name, header.metadata), header.size_bytes)
    return ModelRow(
        name=model.file.name,
        path=str(model.file.path),
        program=model.file.program,
        size_bytes=header.size_bytes,
        architecture=header.architecture,
        parameters=model.parameters,
        size_label=model.size_label,
        quantization=model.quantization,
        context_length=header.context_length,
        chats=model.chats,
        is_head=model.is_head,
        drafts=tuple(str(one.file.path) for one in model.drafts),
        suggestion=_hub_name(place) if place else "",
        options=model.file.words,
        draft_options=model.file.draft_words,
    )


def _names(name: str, metadata: object) -> list[str]:
    named = metadata.get("general.name") if isinstance(metadata, dict) else None
    return [name, *([named] if isinstance(named, str) else [])]


def _hub_name(place: HubFile) -> str:
    quant = quant_of(place.file)
    return f"{place.repo}:{quant}" if quant else f"{place.repo}/{place.file}"


def _command(name: str, model: LocalModel) -> str:
    """Return a command line for a model and its draft; without a ``name``, choose a command that suits the model."""
    draft = model.drafts[0].file.draft_words if model.drafts else ()
    text = [] if name or model.chats else ["--raw", "-p", "Once upon a time"]
    return shlex.join(["ggufspec", name or ("run" if text else "chat"), *model.file.words, *draft, *text])


def _notes(document: ModelsDocument, found: LocalModels) -> None:
    if ui.flags().verbose:
        for one in document.left_out:
            ui.note(f"left out: {one.path}: {one.why}")
    elif kinds := Counter(one.kind for one in found.left_out if not one.unread):
        parts = (counted(number, kind) for kind, number in sorted(kinds.items()))
        ui.note(f"left out: {', '.join(parts)}; -v says which and why")
    if not document.complete:
        unread = sum(one.unread for one in found.left_out)
        ui.note(f"{counted(unread, 'place')} skipped as too large or too slow to read; -v lists them")
    if document.models and not any(row.chats for row in document.models):
        ui.note(f"none of these has a chat template, so they only continue text; to chat: {_without_any('chat')}")
    for row in report.suggestions(document)[:3]:
        words = shlex.join(["ggufspec", "chat", *row.options, "-hfd", row.suggestion])
        ui.note(f"a draft for {row.name}, to download: {words}")


def _room_bytes() -> int:
    """Return the memory for a fast pair (NVIDIA GPUs' free VRAM, or up to 8 GiB of RAM) without starting a process."""
    in_gpus = sum(card.free_bytes or 0 for card in gpus())
    return in_gpus or min(free_memory_bytes(), _ON_CPU_BYTES)


def _without_any(name: str) -> str:
    """Return the hint for a disk without models, which names profiles whose pairs fit in memory."""
    room = _room_bytes()
    sizes: dict[str, int] = {}
    for one in known_profiles():
        try:
            size = _download_bytes(load_profile(one))
        except GgufspecError:  # the user's profile is damaged
            continue
        if 0 < size <= room:
            sizes[one] = size
    fit = sorted(sizes, key=lambda one: -sizes[one])[:3]
    shown = ", ".join(f"{one} ({of_file(sizes[one])})" for one in fit)
    begin = f"ggufspec {name} {fit[0]} (downloads it); profiles that fit: {shown}; " if fit else ""
    return f"{begin}ggufspec profiles list shows all"


def _download_bytes(profile: Profile) -> int:
    """Return the bytes of a profile's files on the hub; 0 if unknown, or if the profile is for reference only."""
    models = [one for one in (profile.target, profile.draft) if one]
    if profile.group or not all(one.repo and one.size_bytes for one in models):
        return 0
    return sum(one.size_bytes or 0 for one in models)
