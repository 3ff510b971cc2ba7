"""Models in a hub repository, with their files, sizes and headers, which are cached together."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec import child
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.files import untrusted
from ggufspec.files.cache import cache_folder, write_value
from ggufspec.llamacpp.gguf import OF_IK_LLAMA
from ggufspec.models import headers
from ggufspec.models.header import ModelHeader
from ggufspec.models.heads import sidecar
from ggufspec.models.hub import choice, client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.hub.ranges import RemoteFile
from ggufspec.models.locate import ModelFiles, digest, downloaded, locator, part_names
from ggufspec.schema import codec

MOST_MODELS = 40  # maximum number of models to list; most repositories have about twenty
_MOST_TRIES = 8  # maximum number of models to try until one header is read completely
_MOST_BYTES = 64 << 20  # maximum size of the cache file; twenty models with 300 tensors take 1 MB
_SCHEMA = "ggufspec/repository@1"


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """Model in a repository: its file, or all parts in order, and their sizes in bytes."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def file(self) -> str:
        """Name of the file, or of the first part if the model is split."""
        return self.files[0]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class HubRepository:
    """Repository with the models that the hub lists, without their headers."""

    repo: str  # repository name
    revision: str | None  # requested branch, tag or commit; None: main
    models: tuple[RepositoryModel, ...]  # targets or draft models, smallest first
    heads: tuple[str, ...] = ()  # files of heads, which draft for the models
    left_out: tuple[str, ...] = ()  # files of models beyond the first ``MOST_MODELS``
    commit: str = ""  # commit from which all files are read

    def source(self, model: RepositoryModel) -> HubFile:
        return HubFile(self.repo, model.file, self.revision)

    def named(self, model: RepositoryModel) -> str:
        """Return the ``-hf`` argument that names a model: by quantisation if that is unique, otherwise by file."""
        files = [file for one in self.models for file in one.files] + [*self.left_out]
        quant = choice.quant_of(model.file)
        try:
            alone = bool(quant) and choice.choose_files(self.repo, files, quant)[0] == model.file
        except ModelError:
            alone = False
        return str(choice.HubName(self.repo, quant if alone else model.file, self.revision))


@dataclass(frozen=True, slots=True)
class ReadModel:
    """Model with its header or an error; ``like`` is a model of the same shape whose metadata-only file serves both."""

    model: RepositoryModel
    header: ModelHeader | None = None
    like: headers.KnownHeader | None = None
    error: str = ""
    hint: str = ""
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """Cache entry of a repository: its list of models, and headers by the key of their files."""

    made_by: str
    repository: HubRepository
    headers: dict[str, ModelHeader] = field(default_factory=dict)


def list_models(repo: str, revision: str | None = None, *, soon: bool = False) -> HubRepository:
    """List the models in a repository; use a cached list if the hub does not answer within seconds.

    Raises:
        UnreachableError: the hub is unreachable, or with ``soon`` does not answer within seconds, and no list is
            cached.
        ModelError: there is no such repository, or it has no GGUF file.
    """

    def ask() -> tuple[str, dict[str, int]]:
        return client.contents(repo, revision)

    entry = _load(repo, revision)
    try:
        commit, sizes = client.soon(ask) if entry or soon else ask()
    except client.UnreachableError as error:
        if entry is None:
            raise
        client.warn_stale(f"using the cached list of {repo}", error)
        return entry.repository
    every = choice.names_of_models(sizes)
    if not every:
        raise choice.no_model_in_repository(repo, sizes)
    for parts in every.values():
        client.check_names(repo, parts[0], revision)
    models = [RepositoryModel(tuple(parts), tuple(sizes[part] for part in parts)) for parts in every.values()]
    targets = sorted(
        (model for model in models if sidecar(model.file) is None), key=lambda model: (model.size_bytes, model.file)
    )
    heads = tuple(model.file for model in models if sidecar(model.file))
    left_out = tuple(model.file for model in targets[MOST_MODELS:])
    return HubRepository(repo, revision, tuple(targets[:MOST_MODELS]), heads, left_out, commit)


def last_read(repo: str, revision: str | None = None) -> HubRepository | None:
    entry = _load(repo, revision)
    return entry.repository if entry else None


def read_models(repository: HubRepository, on_event: child.Emit | None = None) -> list[ReadModel]:
    """Read the headers of a repository's models.

    One header of each shape is read completely, and only the parts that differ are read from the others. An unreadable
    header becomes a result with the error; a file that is not a model is omitted. For ``on_event``, see
    :func:`ggufspec.models.headers.read_headers`.

    Raises:
        GgufspecError: no header can be read; the first failure is raised.
    """
    found: dict[RepositoryModel, ReadModel] = {}
    located: dict[RepositoryModel, ModelFiles] = {}
    like, reason = None, None
    # Read the header of -hf's default model completely. If it is unreadable (not a model, or a weight type that this
    # llama.cpp does not support), read one of the next few.
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
        assert reason is not None  # a repository has at least one model, so reading failed
        raise reason
    before = _load(repository.repo, repository.revision)
    known = before.headers if before else {}
    others = {model: files for model, files in located.items() if model not in found}
    missing = [model for model, files in others.items() if files.key not in known]
    fresh = headers.read_in_part([others[model] for model in missing], like.sparse, on_event)
    reads = {model: headers.HeaderRead(0, known[files.key]) for model, files in others.items() if files.key in known}
    reads |= dict(zip(missing, fresh, strict=True))
    shapes = {_shape(like.header): like}
    for model, one in reads.items():
        if one.is_model:
            found[model] = _of_shape(model, one, repository.source(model), shapes, on_event)
    repository = replace(repository, models=tuple(model for model in repository.models if model in found))
    kept = {others[model].key: one.header for model, one in reads.items() if one.header}
    entry = _Entry(_SCHEMA, repository, kept)
    if entry != before:
        write_value(_path(repository.repo, repository.revision), entry)
    return [found[model] for model in repository.models]


def _of_shape(
    model: RepositoryModel,
    one: headers.HeaderRead,
    wanted: HubFile,
    shapes: dict[object, headers.KnownHeader],
    on_event: child.Emit | None,
) -> ReadModel:
    """Return the model with its header and a model of the same shape; without one, read this header in full."""
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
    """Return everything that placements and compute buffers depend on, except the weight types."""
    tensors = tuple((tensor.name, tensor.shape) for tensor in header.tensors)
    scalars = {key: value for key, value in header.metadata.items() if key.startswith(f"{header.architecture}.")}
    return header.architecture, json.dumps(scalars, sort_keys=True), tensors


def _locate(repository: HubRepository, model: RepositoryModel) -> ModelFiles:
    """Return a model's files in the hub's cache if all are present, otherwise as the repository lists them."""
    wanted, sizes = repository.source(model), dict(zip(model.files, model.sizes, strict=True))
    names, repo, commit = part_names(model.file), repository.repo, repository.commit
    if lost := [name for name in names if name not in sizes]:
        raise ModelError(f"{lost[0]} is not in the repository", f"see {client.model_page_url(repo)}/tree/main")
    if here := downloaded(wanted):
        return here
    files = [RemoteFile(client.file_url(repo, name, commit), sizes[name], commit=commit, repo=repo) for name in names]
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
