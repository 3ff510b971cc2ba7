"""The models of one repository of the hub: their files and sizes, and their headers, which are kept together.

:mod:`ggufspec.models.shared_headers` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec import foreign, plain, worker
from ggufspec.cache import cache_folder, write
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.models import hub, shared_headers, source
from ggufspec.models.files import ModelFiles, digest, downloaded, locator, part_names
from ggufspec.models.header import ModelHeader
from ggufspec.models.heads import sidecar
from ggufspec.models.hub import HubFile
from ggufspec.models.ranges import RemoteFile
from ggufspec.models.shared_headers import Read

MOST_MODELS = 40  # of a repository; the usual ones have twenty
_MOST_BYTES = 64 << 20  # of JSON; twenty models of 300 tensors have 1 MB
_SCHEMA = "ggufspec/repository@1"


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One model: its file, or all parts in order, and their bytes."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def file(self) -> str:
        """The name of the file, or of the first part."""
        return self.files[0]

    @property
    def size_bytes(self) -> int:
        """Of all parts."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Repository:
    """The models that the hub lists, without their headers.

    Args:
        repo: its name.
        revision: branch, tag or commit that was asked for; None is main.
        models: targets, or drafts, the smallest first.
        heads: files that draft for its models.
        left_out: names of models beyond ``MOST_MODELS``.
        commit: that all files are read at; empty where the hub was not reached.
    """

    repo: str
    revision: str | None
    models: tuple[RepositoryModel, ...]
    heads: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    commit: str = ""

    def source(self, model: RepositoryModel) -> HubFile:
        """One of its models."""
        return HubFile(self.repo, model.file, self.revision)

    def named(self, model: RepositoryModel) -> str:
        """What ``-hf`` takes for a model: with its quantisation where that is enough, else with its file."""
        files = [file for one in self.models for file in one.files] + [*self.left_out]
        quant = hub.quant_of(model.file)
        try:
            alone = bool(quant) and hub.choose(self.repo, files, quant)[0] == model.file
        except ModelError:
            alone = False
        return f"{self.repo}:{quant if alone else model.file}"


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model with its header, or why it has none. ``metadata_only`` is of ``like``, a model of its shape."""

    model: RepositoryModel
    header: ModelHeader | None = None
    like: source.Known | None = None
    error: str = ""
    hint: str = ""
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept of a repository: the listing, and headers by the key of their files."""

    made_by: str
    repository: Repository
    headers: dict[str, ModelHeader] = field(default_factory=dict)


def look(repo: str, revision: str | None = None) -> Repository:
    """What models a repository has, by its list of files; the last list has to do where the hub is not reached.

    Raises:
        UnreachableError: the hub is not reached, and there is no list of before.
        ModelError: there is no such repository, or no GGUF file in it.
    """
    try:
        sizes = hub.sizes(repo, revision)
    except hub.UnreachableError:
        if entry := _load(repo, revision):
            return entry.repository
        raise
    every = hub.models(sizes)
    if not every:
        raise hub.no_gguf(repo)
    for parts in every.values():
        hub.check_names(repo, parts[0], revision)
    models = [RepositoryModel(tuple(parts), tuple(sizes[part] for part in parts)) for parts in every.values()]
    targets = sorted(
        (model for model in models if sidecar(model.file) is None), key=lambda model: (model.size_bytes, model.file)
    )
    heads = tuple(model.file for model in models if sidecar(model.file))
    left_out = tuple(model.file for model in targets[MOST_MODELS:])
    return Repository(repo, revision, tuple(targets[:MOST_MODELS]), heads, left_out)


def last_read(repo: str) -> Repository | None:
    """The repository as it was last read, or None."""
    entry = _load(repo, None)
    return entry.repository if entry else None


def read(repository: Repository, on_event: worker.Emit | None = None) -> tuple[Repository, list[ReadModel]]:
    """The headers of a repository's models, and the repository at the commit that they are of.

    One header of each shape is read whole, of the others what is their own. A model whose header cannot be read has
    the reason, and the others go on.

    Args:
        repository: whose models to read.
        on_event: called with progress: :func:`ggufspec.models.source.read_headers`.

    Raises:
        GgufspecError: none of them can be read; the reason is that of the first.
    """
    before = _load(repository.repo, repository.revision)
    known = dict(before.headers) if before else {}
    first, failed = _unchanged(repository, before), dict[RepositoryModel, ReadModel]()
    if first is None:
        first, failed = _first(repository, on_event)
    elif before:
        repository = before.repository
    like = first[1] if first else None
    if first and not repository.commit:
        repository = replace(repository, commit=_commit(repository, first[0]))
    found, located = dict(failed), dict[RepositoryModel, ModelFiles]()
    for model in repository.models:
        if first and model == first[0]:
            found[model] = ReadModel(model, first[1].header, first[1], bytes_read=first[1].bytes_read)
        elif model not in failed:
            try:
                located[model] = _locate(repository, model)
            except GgufspecError as error:
                found[model] = ReadModel(model, error=error.message, hint=error.hint)
    missing = [model for model, files in located.items() if files.key not in known]
    if like is not None and missing:
        reads = shared_headers.read_headers([located[model] for model in missing], like.sparse, on_event)
    else:
        reads = [Read(error="no header of its repository can be read")] * len(missing)
    fresh = dict(zip(missing, reads, strict=True))
    shapes = {_shape(like.header): like} if like else {}
    for model, files in located.items():
        one = fresh.get(model) or Read(known[files.key])
        if one.header is None:
            found[model] = ReadModel(model, None, None, one.error, one.hint, one.bytes_read)
            continue
        known[files.key] = one.header
        found[model] = _of_shape(repository, model, one, shapes, on_event)
    if fresh or before is None or before.repository != repository:
        present = {files.key for files in located.values()}
        entry = _Entry(_SCHEMA, repository, {key: header for key, header in known.items() if key in present})
        write(_path(repository.repo, repository.revision), entry)
    return repository, [found[model] for model in repository.models]


def _unchanged(repository: Repository, before: _Entry | None) -> tuple[RepositoryModel, source.Known] | None:
    """The model whose header was read whole and is kept, where the repository is at the commit of then; one request."""
    if before is None or replace(repository, commit=before.repository.commit) != before.repository:
        return None
    model = _usual_first(repository)[0]
    known = source.cached_header(repository.source(model))
    if known is None or (not repository.commit and _commit(repository, model) != before.repository.commit):
        return None
    return model, known


def _usual_first(repository: Repository) -> list[RepositoryModel]:
    """The model that ``-hf`` alone takes, and then the others."""
    return sorted(repository.models, key=lambda one: hub.quant_of(one.file) != hub.USUAL_QUANT)


def _first(
    repository: Repository, on_event: worker.Emit | None
) -> tuple[tuple[RepositoryModel, source.Known] | None, dict[RepositoryModel, ReadModel]]:
    """The model whose header is read whole: the one that ``-hf`` alone takes if it can be read; and what could not.

    Raises:
        GgufspecError: three models cannot be read, or there are no more; the reason is that of the first.
    """
    failed: dict[RepositoryModel, ReadModel] = {}
    reason: GgufspecError | None = None
    for model in _usual_first(repository):
        try:
            return (model, source.read_headers([repository.source(model)], None, on_event)[0]), failed
        except hub.UnreachableError:
            raise
        except GgufspecError as error:
            reason = reason or error
            failed[model] = ReadModel(model, error=error.message, hint=error.hint)
            if len(failed) == _MOST_FAILED:
                break
    assert reason is not None  # there is a model
    raise reason


_MOST_FAILED = 3


def _of_shape(
    repository: Repository,
    model: RepositoryModel,
    one: Read,
    shapes: dict[object, source.Known],
    on_event: worker.Emit | None,
) -> ReadModel:
    """The model with one of its shape, whose header is read whole where it is the first of that."""
    assert one.header is not None
    shape, read = _shape(one.header), one.bytes_read
    if shape not in shapes:
        try:
            shapes[shape] = source.read_headers([repository.source(model)], None, on_event)[0]
        except GgufspecError as error:
            return ReadModel(model, None, None, error.message, error.hint, read)
        read += shapes[shape].bytes_read
    return ReadModel(model, one.header, shapes[shape], bytes_read=read)


def _shape(header: ModelHeader) -> object:
    """What placements and compute buffers depend on, besides the weights' types."""
    tensors = tuple((tensor.name, tensor.shape) for tensor in header.tensors)
    scalars = {key: value for key, value in header.metadata.items() if key.startswith(f"{header.architecture}.")}
    return header.architecture, json.dumps(scalars, sort_keys=True), tensors


def _commit(repository: Repository, model: RepositoryModel) -> str:
    return hub.remote_file(repository.repo, model.file, repository.revision).commit


def _locate(repository: Repository, model: RepositoryModel) -> ModelFiles:
    """The files of a model as the list has them; those in the hub's cache if all of them are.

    Raises:
        ModelError: a part is missing.
    """
    wanted = repository.source(model)
    names = part_names(model.file)
    if lost := [name for name in names if name not in model.files]:
        raise ModelError(f"{lost[0]} is not in the repository", f"see {hub.page(repository.repo)}/tree/main")
    if here := downloaded(wanted):
        return here
    files = tuple(_files(repository, model, names))
    return ModelFiles(str(replace(wanted, revision=repository.commit)), locator(wanted), files)


def _files(repository: Repository, model: RepositoryModel, names: Sequence[str]) -> Iterator[RemoteFile]:
    for name in names:
        size = model.sizes[model.files.index(name)]
        url = hub.url(repository.repo, name, repository.commit)
        yield RemoteFile(url, size, commit=repository.commit, repo=repository.repo)


def _path(repo: str, revision: str | None) -> Path:
    return cache_folder() / "repositories" / f"{digest(f'{repo} {revision}')}.json"


def _load(repo: str, revision: str | None) -> _Entry | None:
    from pydantic import ValidationError

    try:
        entry = plain.load_json(_Entry, foreign.read_bytes(_path(repo, revision), _MOST_BYTES))
    except (GgufspecError, ValidationError):
        return None
    return entry if entry.made_by == _SCHEMA else None
