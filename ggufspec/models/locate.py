"""Search for a model's files on this machine, at a URL or on the hub, including all parts of a split model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from ggufspec.errors import GgufspecError, ModelError
from ggufspec.files import untrusted
from ggufspec.models.hub import client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.hub.ranges import RemoteFile, probe, unsigned

Source = str | Path | HubFile

MOST_PARTS = 512
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # format of llama_split_path in src/llama.cpp


@dataclass(frozen=True, slots=True)
class LocalFile:
    """File on this machine, with its size and modification time."""

    path: Path
    size_bytes: int
    modified_ns: int

    @classmethod
    def at(cls, path: Path) -> LocalFile:
        """Return the file at a path after checking it with :func:`ggufspec.llamacpp.gguf.check_file`."""
        from ggufspec.llamacpp.gguf import check_file  # imported late: completing profile names does not need it

        found = check_file(path)
        return cls(path, found.st_size, found.st_mtime_ns)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def identity(self) -> str:
        """Path, size and modification time, so that a copy elsewhere counts as a different file."""
        return f"{self.path.resolve()} {self.size_bytes} {self.modified_ns}"

    def read(self, offset: int, count: int) -> bytes:
        """Read ``count`` bytes from ``offset``, fewer at the end; raise ModelError if the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}", f"ls -l {self.path}") from None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model: all its parts, in order.

    ``origin`` names the first part for display, without signature and password; ``locator``: see :func:`locator`.
    """

    origin: str
    locator: str
    files: tuple[LocalFile | RemoteFile, ...]

    @property
    def key(self) -> str:
        """Key of the model's header in the header cache."""
        return digest("\n".join(file.identity for file in self.files))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def plain(source: Source) -> str | HubFile:
    """Normalise a source to a path or URL, or to a :class:`HubFile` for a hub link; raise GgufspecError if invalid."""
    if isinstance(source, HubFile):
        return source
    text = str(source)
    try:
        text.encode()
        is_address = not is_url(text) or bool(urlsplit(text).hostname)
    except UnicodeEncodeError:
        raise GgufspecError(f"{text.encode('utf-8', 'replace').decode()} is not UTF-8", "rename the file") from None
    except ValueError:
        is_address = False
    if not is_address:
        raise GgufspecError(f"{text!r} is not a valid URL", "use https://HOST/PATH.gguf")
    return (client.from_url(text) if is_url(text) else None) or text


def is_url(source: str) -> bool:
    return source.startswith(("https://", "http://"))


def locate(source: Source) -> ModelFiles:
    """Find the files of a model, with one request per part if it is remote.

    Raises:
        ModelError: a part is missing.
        UnreachableError: there is no network.
    """
    source = plain(source)
    if isinstance(source, HubFile):
        return downloaded(source) or _on_hub(source)
    if is_url(source):
        files = tuple(map(probe, _part_urls(source)))
        return ModelFiles(unsigned(files[0].url), locator(source), files)
    parts = local_parts(Path(source))
    return ModelFiles(str(parts[0].path), locator(source), parts)


def locate_soon(source: str | HubFile) -> ModelFiles:
    """Find the files of a model as :func:`locate` does, but wait only a few seconds for a server's answer."""
    if isinstance(source, HubFile):
        return downloaded(source) or client.soon(lambda: _on_hub(source))
    if is_url(source):
        return client.soon(lambda: locate(source), urlsplit(source).netloc.rpartition("@")[2])
    return locate(source)


def locator(source: str | HubFile) -> str:
    """Return an identifier of a model's location, which ignores the contents and is the same for all parts."""
    if isinstance(source, HubFile):
        return f"hub {HubFile(source.repo, part_names(source.file)[0], source.revision or 'main')}"
    return f"url {unsigned(_part_urls(source)[0])}" if is_url(source) else f"file {part_names(_absolute(source))[0]}"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split model, given any part's name; for another model, only ``name``.

    Raises:
        ModelError: the part numbers in the name are impossible.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    prefix, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= MOST_PARTS:
        message = f"{name} claims to be part {number} of {count}"
        raise ModelError(message, "restore the original file name")
    return [f"{prefix}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def local_parts(path: Path) -> tuple[LocalFile, ...]:
    """Return the parts of a model on this machine in order, given any part; raise ModelError if one is missing."""
    return _here([Path(name) for name in part_names(_absolute(path))])


def first_part(path: Path) -> Path:
    """Return the first part of a split model, from which llama.cpp loads it; for another model, ``path`` itself."""
    return Path(part_names(str(path))[0])


def _absolute(path: str | Path) -> str:
    return str(untrusted.at_home(path).absolute())


def _part_urls(url: str) -> list[str]:
    parts = urlsplit(url)
    names = part_names(parts.path)
    return [urlunsplit(parts._replace(path=quote(name, safe="/%:@!$&'()*+,;=~"))) for name in names]


def _here(paths: Sequence[Path]) -> tuple[LocalFile, ...]:
    lost = [i for i, path in enumerate(paths, 1) if not os.path.exists(path)]  # noqa: PTH110  # never raises
    if 0 < len(lost) < len(paths):
        message = f"part {lost[0]} of {len(paths)} is missing: {paths[lost[0] - 1]}"
        raise ModelError(message, "put all parts in one folder")
    return tuple(map(LocalFile.at, paths))


def downloaded(source: HubFile) -> ModelFiles | None:
    """Return the model's parts in the hub's local cache if all are present, else None."""
    paths = cached_parts(source)
    return ModelFiles(str(paths[0]), locator(source), _here(paths)) if paths else None


def cached_parts(source: HubFile) -> list[Path]:
    """Return the paths of the cached parts without checking them; empty if any is missing. Uses no network."""
    cached = [client.cached_file(source.repo, name, source.revision) for name in part_names(source.file)]
    paths = [path for path in cached if path is not None]
    return paths if len(paths) == len(cached) else []


def _on_hub(source: HubFile) -> ModelFiles:
    names = part_names(source.file)
    parts = client.remote_parts(source.repo, names, source.revision)
    files = [RemoteFile(one.url, one.size_bytes, commit=one.commit or one.etag, repo=source.repo) for one in parts]
    origin = HubFile(source.repo, names[0], parts[0].commit or source.revision)
    return ModelFiles(str(origin), locator(source), tuple(files))
