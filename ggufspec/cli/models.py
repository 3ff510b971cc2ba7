"""Command ``ggufspec models``: list local GGUF models with their drafts; the error of commands without a model."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from ggufspec.cli import ui
from ggufspec.cli.parameters import command
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware.gpus import gpus
from ggufspec.hardware.host import free_memory_bytes
from ggufspec.models import heads, local
from ggufspec.models.headers import read_headers
from ggufspec.models.hub.choice import quant_of
from ggufspec.models.hub.client import HubFile
from ggufspec.models.local import Found, LocalModel, Place
from ggufspec.models.profile import Pair, Profile, known_profiles, load_profile
from ggufspec.reports import models as report
from ggufspec.reports import table
from ggufspec.schema.models import LeftOutFile, ModelRow, ModelsDocument
from ggufspec.schema.text import counted, of_file
from ggufspec.settings.table import Settings

_ON_CPU_BYTES = 8 << 30  # on CPUs, larger models write more slowly than people read
_QUICK_S = 2.0  # for headers that are not cached, before a chat begins


@command("ggufspec models", "ggufspec models --json")
def models() -> int:
    """List the GGUF models on this disk, and what each can draft with.

    Looks into the caches of Hugging Face and llama.cpp, the folders of LM Studio and Ollama, and the current folder.
    Nothing is loaded; headers are read once. -v names what is left out: projectors, embedding models, damaged files.
    """
    found = _look()
    document = _document(found)
    if ui.flags().json:
        ui.result(document, lambda: None)
        return 0
    if document.models:
        out = ui.out()
        out.print(table.terminal(report.listing(document, out.width), out.width))
    _notes(document, found)
    if document.next:
        ui.err().whole(("  next: ", "bold"), document.next)
    else:
        ui.note("there are no GGUF models in the folders of Hugging Face, llama.cpp, LM Studio and Ollama, nor here")
        ui.err().whole(("  next: ", "bold"), _without_any("chat"))
    return 0


def is_missing(given: Settings) -> bool:
    """Return whether neither a pair nor a target is given."""
    return given.pair is None and given.model is None and given.hf_repo is None


def no_model(name: str) -> UsageError:
    """List local models on standard error, and return the error of the command ``name`` without a model."""
    found = _look()
    document = _document(found, name)
    if not document.next:
        return UsageError("no model is given, and there is none on this disk", _without_any(name))
    if not ui.flags().json:
        err = ui.err()
        err.print(table.terminal(report.listing(document, err.width), err.width))
        _notes(document, found)
    return UsageError("no model is given", document.next)


def draft_line(name: str, given: Settings, target: Path) -> str:
    """Return a line that offers a draft for a target given without one, as options of the command ``name``.

    The target's own MTP blocks come first, then a local model, then that of a profile of the same family; the hub is
    not asked. Empty if none is known, or if the user or a profile chose the drafter.
    """
    if given.pair or given.model_draft or given.hf_repo_draft or given.drafter or given.no_draft:
        return ""
    words: tuple[str, ...]
    try:
        header = read_headers([target])[0].header
        if heads.in_target(header):
            what, words = "its own MTP blocks", ("--drafter", heads.MTP.drafter)
        elif drafts := local.drafts_for(target, header, _look(_QUICK_S)):
            what = f"{drafts[0].file.name} ({of_file(drafts[0].header.size_bytes)}, on this disk)"
            words = drafts[0].file.draft_words
        elif place := local.suggested(_names(target.stem, header.metadata), header.size_bytes):
            what, words = f"{Path(place.file).stem}, to download", ("-hfd", _hub_name(place))
        else:
            return ""
    except GgufspecError:  # loading the model reports what is wrong
        return ""
    own = ("-hf", given.hf_repo) if given.hf_repo else ("-m", str(given.model))
    return f"a draft for it: {what}: {shlex.join(['ggufspec', name, *own, *words])}"


def called(pair: Pair) -> str:
    """Return a pair's name; for an Ollama file, which is named by its digest, the model's own name."""
    if not re.fullmatch(r"sha256-[0-9a-f]{64}", pair.name):
        return pair.name
    named = read_headers([pair.target])[0].header.metadata.get("general.name")
    return named if isinstance(named, str) and named.strip() else pair.name[:14]


def _look(seconds: float = local.READ_S) -> Found:
    with ui.busy() as show:
        return local.find(
            places(), seconds=seconds, on_event=lambda event: show(f"reading the header of {event['file']}")
        )


def places() -> list[Place]:
    """Return the model folders of this user's programs, and the current folder."""
    try:
        current = [Path.cwd()]
    except OSError:  # the current folder was removed
        current = []
    found = local.places(os.environ, Path.home())
    return [*found, *(Place(local.HERE, folder, 2) for folder in current)]


def _document(found: Found, name: str = "chat") -> ModelsDocument:
    best = local.best(found.models, _room_bytes())
    rows = tuple(map(_row, found.models))
    return ModelsDocument(
        models=rows,
        left_out=tuple(LeftOutFile(str(one.path), one.why) for one in found.left_out),
        folders=tuple(str(place.folder) for place in places() if os.path.isdir(place.folder)),  # noqa: PTH112  # never raises
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
    draft = model.drafts[0].file.draft_words if model.drafts else ()
    return shlex.join(["ggufspec", name, *model.file.words, *draft])


def _notes(document: ModelsDocument, found: Found) -> None:
    if ui.flags().verbose:
        for one in document.left_out:
            ui.note(f"left out: {one.path}: {one.why}")
    if not document.complete:
        unread = sum(one.unread for one in found.left_out)
        ui.note(f"{counted(unread, 'place')} left unread, too large or too slow: -v names them")
    if document.models and not any(row.chats for row in document.models):
        ui.note(f"none of these has a chat template, they only continue text; to chat: {_without_any('chat')}")
    for row in report.suggestions(document)[:3]:
        words = shlex.join(["ggufspec", "chat", *row.options, "-hfd", row.suggestion])
        ui.note(f"a draft for {row.name}, to download: {words}")


def _room_bytes() -> int:
    """Return the memory for a fast pair: free VRAM of NVIDIA GPUs, else some RAM. Starts no child process."""
    in_gpus = sum(card.free_bytes or 0 for card in gpus())
    return in_gpus or min(free_memory_bytes(), _ON_CPU_BYTES)


def _without_any(name: str) -> str:
    """Return the hint if there is no model on this disk: profiles whose pair fits."""
    room = _room_bytes()
    sizes: dict[str, int] = {}
    for one in known_profiles():
        try:
            size = _download_bytes(load_profile(one))
        except GgufspecError:  # a damaged profile of the user's
            continue
        if 0 < size <= room:
            sizes[one] = size
    fit = sorted(sizes, key=lambda one: -sizes[one])[:3]
    shown = ", ".join(f"{one} ({of_file(sizes[one])})" for one in fit)
    begin = f"ggufspec {name} {fit[0]}, which downloads it; profiles that fit: {shown}; " if fit else ""
    return f"{begin}ggufspec profiles list shows all"


def _download_bytes(profile: Profile) -> int:
    """Return the bytes of a profile's files on the hub; 0 if unknown or if it is for reference only."""
    models = [one for one in (profile.target, profile.draft) if one]
    if profile.group or not all(one.repo and one.size_bytes for one in models):
        return 0
    return sum(one.size_bytes or 0 for one in models)
