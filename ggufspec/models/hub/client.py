"""Files of the Hugging Face hub, its cache on this machine, and the HTTP client of all downloads.

The only importer of ``huggingface_hub``, and with :mod:`ggufspec.chat.remote` of ``httpx2``. Client and cache are
huggingface_hub's: proxies, certificates and HF_HUB_OFFLINE apply to every request, and other programs find the files.
"""

from __future__ import annotations

import difflib
import functools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ggufspec import __version__
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.files import untrusted, write
from ggufspec.hardware import install

if TYPE_CHECKING:
    import httpx2

Answer = TypeVar("Answer")

_NAME = "ggufspec"  # user agent for the hub
_TIMEOUT_S = 15.0
_PAUSES_S = (0.2, 1.0)  # between three tries
_MOST_PAUSE_S = 60.0  # longest wait at a server's request without telling the user
_DRIVE = re.compile(r"[A-Za-z]:")
_PLAIN = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,199}")
_PROXIES = "ALL_PROXY, HTTPS_PROXY or HTTP_PROXY"
_WITHOUT_NETWORK = "without a network, ggufspec profiles list says what fits, and ggufspec models what is on this disk"
COMMIT = re.compile(r"[0-9a-f]{40}")


class UnreachableError(GgufspecError):
    """The server cannot be reached: no network, no listener, or the hub's offline mode."""

    wait_s = 0.0  # wait that the server asks for


class BrokenConnectionError(UnreachableError):
    """The connection broke in the middle of an answer."""


class OfflineError(UnreachableError):
    """HF_HUB_OFFLINE is set."""


class BusyError(UnreachableError):
    """The server asks to try again later."""

    def __init__(self, message: str, hint: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message, hint)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository of the hub; any part of a split model."""

    repo: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class Remote:
    """Location of a file on the hub. ``url`` names ``commit``, so that every read is of the same version.

    ``etag`` is the SHA-256 of a large file, and git's SHA-1 of a small one.
    """

    url: str
    etag: str
    size_bytes: int
    commit: str


def stays_inside(name: str) -> bool:
    """Return True if a printable file name stays in the folder that it is joined to, on every system. Pure."""
    return (
        name.isprintable()  # no NUL, line break or surrogate
        and "\\" not in name
        and not name.startswith("~")
        and not any(part in ("", ".", "..") or _DRIVE.match(part) for part in name.split("/"))
    )


def check_names(repo: str, file: str, revision: str | None) -> None:
    """Raise ModelError if the file's name or the revision leaves the repository's folder of the cache."""
    if not stays_inside(file):
        raise ModelError(f"{file!r} leaves the repository {repo}", f"choose a file that {page(repo)}/tree/main shows")
    if revision is not None and not stays_inside(revision):
        raise ModelError(f"{revision!r} is no revision of {repo}", "a revision is a branch, a tag or a commit")


def no_repository(repo: str) -> GgufspecError:
    return GgufspecError(f"{repo!r} is not a repository of the hub", "a repository is USER/NAME")


def cached_file(repo: str, name: str, revision: str | None = None) -> Path | None:
    """Return the file in the local Hugging Face cache (``HF_HOME`` is honoured), or None. No network.

    Raises:
        GgufspecError: ``repo`` is not a valid name, or ``name`` leaves it.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    check_names(repo, name, revision)
    try:
        found = try_to_load_from_cache(repo, name, revision=revision)
    except HFValidationError:
        raise no_repository(repo) from None
    except (OSError, ValueError):  # the cache's reference is damaged
        return None
    return Path(found) if isinstance(found, str) else None


def remote_file(repo: str, file: str, revision: str | None = None) -> Remote:
    """Ask the hub for a file's version and size, with one HEAD request. HF_ENDPOINT and HF_TOKEN are honoured.

    Raises:
        UnreachableError: there is no network, or HF_HUB_OFFLINE is set.
        ModelError: there is no such file, this user has no access, or its name leaves the repository.
    """
    from huggingface_hub import get_hf_file_metadata

    check_names(repo, file, revision)

    def ask() -> Remote:
        address = url(repo, file, revision)
        found = get_hf_file_metadata(address, timeout=_TIMEOUT_S, library_name=_NAME, library_version=__version__)
        if found.size is None:
            raise lacks("size", f"{repo}/{file}")
        commit = found.commit_hash or ""
        return Remote(url(repo, file, commit or revision), found.etag or "", found.size, commit)

    return _asked(ask, repo, file, revision)


def lacks(what: str, name: str) -> ModelError:
    """Return the error for a hub, or a mirror in HF_ENDPOINT, that leaves out what a download needs."""
    from huggingface_hub import constants

    hint = "unset HF_ENDPOINT, or set it to a mirror that gives what the hub does"
    return ModelError(f"the hub at {constants.ENDPOINT} gives no {what} of {name}", hint)


def remote_parts(repo: str, files: Sequence[str], revision: str | None) -> list[Remote]:
    """Run :func:`remote_file` for all parts of a model, at the commit of the first."""
    found: list[Remote] = []
    for file in files:
        found.append(remote_file(repo, file, (found[0].commit if found else "") or revision))
    return found


def contents(repo: str, revision: str | None = None) -> tuple[str, dict[str, int]]:
    """Return the commit of a revision, and its files with their bytes; one request.

    Raises:
        UnreachableError: there is no network, or HF_HUB_OFFLINE is set.
        ModelError: there is no such repository, or the answer is not the hub's.
    """
    from huggingface_hub import HfApi

    def ask() -> tuple[str, dict[str, int]]:
        # list_repo_tree has no time-out, and retries for as long as a server asks
        api = HfApi(library_name=_NAME, library_version=__version__)
        found = api.model_info(repo, revision=revision, timeout=_TIMEOUT_S, files_metadata=True)
        if found.id != repo:  # the hub redirects
            _renamed(repo, found.id)
        return str(found.sha or ""), {str(one.rfilename): int(one.size or 0) for one in found.siblings or ()}

    return _asked(ask, repo, "", revision)


@functools.cache  # once
def _renamed(repo: str, name: str) -> None:
    warnings.warn(f"{repo} is called {name} now", stacklevel=1)


def search(words: str, most: int) -> list[str]:
    """Return repositories with GGUF files that match ``words``, most downloaded first; fails as :func:`contents`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = f"{constants.ENDPOINT}/api/models"  # HfApi.list_models has no time-out
    asked = {"search": words, "filter": "gguf", "sort": "downloads", "direction": "-1", "limit": str(most)}

    def ask() -> list[str]:
        headers = build_hf_headers(library_name=_NAME, library_version=__version__)
        reply = _session().get(url, params=asked, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
        hf_raise_for_status(reply)
        return [str(entry["id"]) for entry in reply.json()][:most]

    return _asked(ask, f"a search for {words!r}", "", None)


def choose(repo: str, revision: str | None, pick: Callable[[Sequence[str]], Answer]) -> Answer:
    """Apply ``pick`` to the names of a repository's files, or of those in the cache if the hub is unreachable."""
    try:
        return pick([*contents(repo, revision)[1]])
    except UnreachableError as unreachable:
        here = _cached_names(repo, revision)
        if not here:
            raise
        try:
            return pick(here)
        except ModelError as error:
            raise UnreachableError(f"on this machine {error.message}", f"{unreachable.hint}; {error.hint}") from None


def from_url(url: str) -> HubFile | None:
    """Return the file of a link to the hub (``/resolve/`` or ``/blob/``), or None for another link."""
    from urllib.parse import unquote, urlsplit

    from huggingface_hub import constants

    parts, home = urlsplit(url), urlsplit(constants.ENDPOINT)
    if (parts.scheme, parts.netloc) != (home.scheme, home.netloc):
        return None
    match = re.fullmatch(r"/([^/]+/[^/]+)/(?:resolve|blob)/([^/]+)/(.+)", unquote(parts.path[len(home.path) :]))
    return HubFile(match[1], match[3], match[2]) if match else None


@contextmanager
def get(url: str, headers: Mapping[str, str], *, hub: bool, shown: str) -> Iterator[httpx2.Response]:
    """GET a URL. The caller reads the body (``iter_raw``), which may be longer or shorter than the headers claim.

    Redirects are followed; credentials are not sent to another host. HF_HUB_DOWNLOAD_TIMEOUT limits a silent server.
    ``hub`` sends the user's token; ``shown`` is the file's name in errors, because the URL may contain a signature.

    Raises:
        UnreachableError: no answer.
        BrokenConnectionError: the connection broke.
        GgufspecError: the URL is invalid, or redirects in circles.
    """
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    timeout_s, session = float(constants.HF_HUB_DOWNLOAD_TIMEOUT), _session()
    own = build_hf_headers(library_name=_NAME, library_version=__version__) if hub else {}
    sent = {**own, "Accept-Encoding": "identity", **headers}
    try:
        with session.stream("GET", url, headers=sent, timeout=timeout_s, follow_redirects=True) as response:
            yield response
    except (httpx2.ConnectError, httpx2.ProxyError, httpx2.TimeoutException) as error:
        raise _unreachable(shown, error) from None
    except OfflineModeIsEnabled:
        raise _offline(shown) from None
    except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
        raise BrokenConnectionError(f"the connection broke while reading {shown}: {error}", "try again") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise GgufspecError(f"{shown} cannot be read: {error}", "check the address") from None


def _session() -> httpx2.Client:
    """Return huggingface_hub's client, made at the first call."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    with proxies_explained():
        return get_session()


@contextmanager
def proxies_explained() -> Iterator[None]:
    """Explain why a client cannot be made, with the proxies that the environment names."""
    import httpx2

    try:
        yield
    except ImportError:
        message = f"{_PROXIES} names a SOCKS proxy, which needs the package socksio"
        raise UnreachableError(message, f"{install.pip()} socksio") from None
    except (ValueError, httpx2.InvalidURL) as error:
        hint = "export ALL_PROXY=socks5://HOST:PORT, or http://HOST:PORT"
        raise UnreachableError(f"{_PROXIES} names a proxy that cannot be used: {error}", hint) from None


def with_retries(ask: Callable[[], Answer]) -> Answer:
    """Call ``ask`` again after a pause while the server is busy or the connection breaks; other failures are final."""
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except (BusyError, BrokenConnectionError) as error:
            if error.wait_s > _MOST_PAUSE_S:
                raise
            time.sleep(max(pause_s, error.wait_s))
    return ask()


def _asked(ask: Callable[[], Answer], repo: str, file: str, revision: str | None) -> Answer:
    """Return the hub's answer, with retries; errors of huggingface_hub become ours."""
    _session()

    def once() -> Answer:
        with _explained(repo, file, revision):
            return ask()

    return with_retries(once)


def asked_pause_s(headers: Mapping[str, str]) -> float:
    """Return the pause that a busy server asks for; 0 without one.

    Source: RFC 9110, section 10.2.3; the hub's own ``RateLimit: "api";r=0;t=SECONDS`` is from
    draft-ietf-httpapi-ratelimit-headers.
    """
    for name, pattern in (("retry-after", r"\s*(\d{1,9})\s*"), ("ratelimit", r".*\bt=(\d{1,9}).*")):
        if match := re.fullmatch(pattern, headers.get(name, "")):
            return float(match[1])
    return 0.0


def url(repo: str, file: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, file, revision=revision)


def page(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


# ---- the cache -----------------------------------------------------------------------------------------------------
# models--USER--REPO/{blobs/ETAG, snapshots/COMMIT/FILE -> blob, refs/REVISION}: file_download.py in huggingface_hub.


def cache_folder() -> Path:
    """Return the hub's cache; HF_HOME and HF_HUB_CACHE are honoured."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def largest_by_http_bytes() -> int:
    """Return the size above which the hub serves files through hf_xet only."""
    from huggingface_hub import constants

    return constants.MAX_HTTP_DOWNLOAD_SIZE


def blob_path(repo: str, etag: str) -> Path:
    """Return the cache's path of a file's complete content; ModelError if the etag is not a valid file name."""
    if not _PLAIN.fullmatch(etag):
        raise ModelError(f"the hub gives no version of a file of {repo}: {etag!r}", f"see {page(repo)}")
    return _repo_folder(repo) / "blobs" / etag


@contextmanager
def locked(repo: str, etag: str) -> Iterator[None]:
    """Hold huggingface_hub's lock for writing a blob."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path = cache_folder() / ".locks" / _repo_folder(repo).name / f"{etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


def link(repo: str, file: str, commit: str) -> Path:
    """Let huggingface_hub link a complete blob into the cache's folder of ``commit``; fails as :func:`contents`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def ask() -> Path:
        try:
            return Path(hf_hub_download(repo, file, revision=commit, library_name=_NAME))
        except LocalEntryNotFoundError as error:  # its cause is what happened
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise _unreachable(f"{repo}/{file}", error) from None

    return _asked(ask, repo, file, commit)


def point(repo: str, revision: str | None, commit: str) -> None:
    """Set a branch or a tag to ``commit`` in the cache."""
    if revision != commit:
        ref = _repo_folder(repo) / "refs" / (revision or "main")
        if commit_of(ref) == commit:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        with write.replacing(ref) as new:
            new.write_text(commit, encoding="utf-8")


def commit_of(ref: Path) -> str:
    """Return the commit of a branch or a tag in the cache; empty if absent or damaged."""
    try:
        commit = untrusted.read_text(ref, 256).strip()
    except GgufspecError:
        return ""
    return commit if stays_inside(commit) else ""


def _repo_folder(repo: str) -> Path:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        return cache_folder() / repo_folder_name(repo_id=repo, repo_type="model")
    except HFValidationError:
        raise no_repository(repo) from None


def _cached_names(repo: str, revision: str | None) -> list[str]:
    folder, wanted = _repo_folder(repo), revision or "main"
    snapshot = folder / "snapshots" / (commit_of(folder / "refs" / wanted) or wanted)
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


@contextmanager
def _explained(repo: str, file: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's errors."""
    import httpx2
    from huggingface_hub import errors

    shown = f"{repo}/{file}" if file else repo
    try:
        yield
    except errors.HFValidationError:
        raise no_repository(repo) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: its owner gives access on request",
            f"ask for access at {page(repo)}, then set HF_TOKEN (or: hf auth login)",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision!r}", f"see {page(repo)}/commits/main") from None
    except errors.RemoteEntryNotFoundError:
        hint = f"see {page(repo)}/tree/{revision or 'main'}"
        if near := _near(repo, file, revision):
            hint = f"did you mean {' or '.join(near)}? {hint}"
        raise ModelError(f"{repo} has no file {file!r}", hint) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no repository {repo}, or it is private",
            f"check the name at {page(repo)}; for a private one set HF_TOKEN (or: hf auth login)",
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _offline(shown) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status < 500 and status not in (408, 429):
            is_login = status in (401, 403)
            hint = "check HF_TOKEN, or: hf auth login" if is_login else f"see {page(repo)}, and check HF_ENDPOINT"
            raise ModelError(f"the hub refuses {shown} ({status})", hint) from None
        raise busy(shown, status, error.response.headers) from None
    except (httpx2.HTTPError, errors.FileMetadataError) as error:
        raise _unreachable(shown, error) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # a captive portal answered
        raise ModelError(
            f"something else than the hub answers about {shown}, a web page perhaps",
            "sign in to the network if it asks for that (a hotel's, say), and check HF_ENDPOINT",
        ) from None


def busy(shown: str, status: int, headers: Mapping[str, str]) -> BusyError:
    wait_s = asked_pause_s(headers)
    message = f"the hub cannot serve {shown} now ({status})"
    if status == 429:
        message = f"too many requests to the hub, the last for {shown} (429)"
    return BusyError(message, f"try again in {wait_s:.0f} s" if wait_s else "try again later", wait_s)


def _near(repo: str, file: str, revision: str | None) -> list[str]:
    """Return files with names similar to a missing one; none if the hub does not answer."""
    with suppress(Exception):
        return difflib.get_close_matches(file, contents(repo, revision)[1], n=2)
    return []


def _offline(shown: str) -> OfflineError:
    message = f"{shown} is not on this machine, and HF_HUB_OFFLINE forbids requests"
    return OfflineError(message, f"unset HF_HUB_OFFLINE; {_WITHOUT_NETWORK}")


def _unreachable(shown: str, error: Exception) -> UnreachableError:
    import httpx2

    broke = isinstance(error, httpx2.ReadError | httpx2.RemoteProtocolError)  # e.g. a connection kept too long
    message = f"{shown} cannot be reached: {str(error) or type(error).__name__}"
    hint = f"check the network and try again; {_WITHOUT_NETWORK}"
    return (BrokenConnectionError if broke else UnreachableError)(message, hint)
