"""The models of one hub repository: their files and sizes, and their headers, which are cached together."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec import child
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.files import untrusted
from ggufspec.files.cache import cache_folder, write
from ggufspec.llamacpp.gguf import OF_IK_LLAMA
from ggufspec.models import headers
from ggufspec.models.header import ModelHeader
from ggufspec.models.heads import sidecar
from ggufspec.models.hub import choice, client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.hub.ranges import RemoteFile
from ggufspec.models.locate import ModelFiles, digest, downloaded, locator, part_names
from ggufspec.schema import codec

MOST_MODELS = 40  # in a repository; the usual ones have twenty
_MOST_TRIES = 8  # whole headers to try
_MOST_BYTES = 64 << 20  # most bytes of JSON; twenty models of 300 tensors have 1 MB
_SCHEMA = "ggufspec/repository@1"


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One model: its file, or all parts in order, and their bytes."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def file(self) -> str:
        """File name, of the first part if split."""
        return self.files[0]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Repository:
    """The models that the hub lists, without their headers."""

    repo: str  # repository name
    revision: str | None  # requested branch, tag or commit; None is main
    models: tuple[RepositoryModel, ...]  # targets, or drafts, the smallest first
    heads: tuple[str, ...] = ()  # files that draft for its models
    left_out: tuple[str, ...] = ()  # names of models beyond ``MOST_MODELS``
    commit: str = ""  # commit at which all files are read

    def source(self, model: RepositoryModel) -> HubFile:
        return HubFile(self.repo, model.file, self.revision)

    def named(self, model: RepositoryModel) -> str:
        """Return the ``-hf`` argument for a model: with its quantisation if that is enough, else with its file."""
        files = [file for one in self.models for file in one.files] + [*self.left_out]
        quant = choice.quant_of(model.file)
        try:
            alone = bool(quant) and choice.choose(self.repo, files, quant)[0] == model.file
        except ModelError:
            alone = False
        return str(choice.Name(self.repo, quant if alone else model.file, self.revision))


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model with its header, or why it has none. ``metadata_only`` is that of ``like``, a model of the same shape."""

    model: RepositoryModel
    header: ModelHeader | None = None
    like: headers.Known | None = None
    error: str = ""
    hint: str = ""
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """Cached data of a repository: the listing, and headers by the key of their files."""

    made_by: str
    repository: Repository
    headers: dict[str, ModelHeader] = field(default_factory=dict)


def look(repo: str, revision: str | None = None) -> Repository:
    """List the models of a repository; if the hub is unreachable, from the last list.

    Raises:
        UnreachableError: the hub is unreachable, and there is no earlier list.
        ModelError: there is no such repository, or no GGUF file in it.
    """
    try:
        commit, sizes = client.contents(repo, revision)
    except client.UnreachableError:
        if entry := _load(repo, revision):
            return entry.repository
        raise
    every = choice.models(sizes)
    if not every:
        raise choice.no_model(repo, sizes)
    for parts in every.values():
        client.check_names(repo, parts[0], revision)
    models = [RepositoryModel(tuple(parts), tuple(sizes[part] for part in parts)) for parts in every.values()]
    targets = sorted(
        (model for model in models if sidecar(model.file) is None), key=lambda model: (model.size_bytes, model.file)
    )
    heads = tuple(model.file for model in models if sidecar(model.file))
    left_out = tuple(model.file for model in targets[MOST_MODELS:])
    return Repository(repo, revision, tuple(targets[:MOST_MODELS]), heads, left_out, commit)


def last_read(repo: str, revision: str | None = None) -> Repository | None:
    entry = _load(repo, revision)
    return entry.repository if entry else None


def read(repository: Repository, on_event: child.Emit | None = None) -> list[ReadModel]:
    """Read the headers of a repository's models.

    One header of each shape is read whole; of the others only the differing parts. If a header cannot be read, the
    result has the reason and the others go on; a file of another kind is left out. ``on_event`` as in
    :func:`ggufspec.models.headers.read_headers`.

    Raises:
        GgufspecError: none of them can be read; the reason is that of the first.
    """
    found: dict[RepositoryModel, ReadModel] = {}
    located: dict[RepositoryModel, ModelFiles] = {}
    like, reason = None, None
    # Read the default model of -hf whole, or one of the next few if it is unreadable: a file may not be a model, or
    # have a type that this llama.cpp does not know.
    quants = {model: choice.quant_of(model.file) for model in repository.models}

    def doubts(model: RepositoryModel) -> tuple[bool, ...]:
        quant = quants[model]
        return quant in OF_IK_LLAMA, quant != choice.USUAL_QUANT, not quant

    for model in sorted(quants, key=doubts):
        try:
            located[model] = _locate(repository, model)
            if like is None and len(located) <= _MOST_TRIES:
                like = headers.read_headers([repository.source(model)], None, on_event)[0]
                found[model] = ReadModel(model, like.header, like, bytes_read=like.bytes_read)
        except GgufspecError as error:
            if model not in located:
                found[model] = ReadModel(model, error=error.message, hint=error.hint)
            reason = reason or error
    if like is None:
        assert reason is not None  # there is a model
        raise reason
    before = _load(repository.repo, repository.revision)
    known = before.headers if before else {}
    others = {model: files for model, files in located.items() if model not in found}
    missing = [model for model, files in others.items() if files.key not in known]
    fresh = headers.read_in_part([others[model] for model in missing], like.sparse, on_event)
    reads = {model: headers.Read(0, known[files.key]) for model, files in others.items() if files.key in known}
    reads |= dict(zip(missing, fresh, strict=True))
    shapes = {_shape(like.header): like}
    for model, one in reads.items():
        if one.is_model:
            found[model] = _of_shape(model, one, repository.source(model), shapes, on_event)
    repository = replace(repository, models=tuple(model for model in repository.models if model in found))
    kept = {others[model].key: one.header for model, one in reads.items() if one.header}
    entry = _Entry(_SCHEMA, repository, kept)
    if entry != before:
        write(_path(repository.repo, repository.revision), entry)
    return [found[model] for model in repository.models]


def _of_shape(
    model: RepositoryModel,
    one: headers.Read,
    wanted: HubFile,
    shapes: dict[object, headers.Known],
    on_event: child.Emit | None,
) -> ReadModel:
    """Return the model with one of its shape; the first of a shape has its header read whole."""
    if one.header is None:
        return ReadModel(model, error=one.error, hint=one.hint, bytes_read=one.bytes_read)
    shape, read = _shape(one.header), one.bytes_read
    if shape not in shapes:
        try:
            shapes[shape] = headers.read_headers([wanted], None, on_event)[0]
        except GgufspecError as error:
            return ReadModel(model, error=error.message, hint=error.hint, bytes_read=read)
        read += shapes[shape].bytes_read
    return ReadModel(model, one.header, shapes[shape], bytes_read=read)


def _shape(header: ModelHeader) -> object:
    """Return what placements and compute buffers depend on, in addition to the weights' types."""
    tensors = tuple((tensor.name, tensor.shape) for tensor in header.tensors)
    scalars = {key: value for key, value in header.metadata.items() if key.startswith(f"{header.architecture}.")}
    return header.architecture, json.dumps(scalars, sort_keys=True), tensors


def _locate(repository: Repository, model: RepositoryModel) -> ModelFiles:
    """Return the files of a model as listed, or those in the hub's cache if all of them are there."""
    wanted, sizes = repository.source(model), dict(zip(model.files, model.sizes, strict=True))
    names, repo, commit = part_names(model.file), repository.repo, repository.commit
    if lost := [name for name in names if name not in sizes]:
        raise ModelError(f"{lost[0]} is not in the repository", f"see {client.page(repo)}/tree/main")
    if here := downloaded(wanted):
        return here
    files = [RemoteFile(client.url(repo, name, commit), sizes[name], commit=commit, repo=repo) for name in names]
    return ModelFiles(str(replace(wanted, revision=commit)), locator(wanted), tuple(files))


def _path(repo: str, revision: str | None) -> Path:
    return cache_folder() / "repositories" / f"{digest(f'{repo} {revision}')}.json"


def _load(repo: str, revision: str | None) -> _Entry | None:
    from pydantic import ValidationError

    try:
        entry = codec.load_json(_Entry, untrusted.read_bytes(_path(repo, revision), _MOST_BYTES))
    except (GgufspecError, ValidationError):
        return None
    return entry if entry.made_by == _SCHEMA else None
