"""Access to files on the Hugging Face hub and in its local cache, and the HTTP client for all downloads.

Only this module imports ``huggingface_hub`` and ``httpx2``. It uses huggingface_hub's client and cache, so proxies,
certificates and HF_HUB_OFFLINE apply to every request, and other programs find the downloaded files.
"""

from __future__ import annotations

import difflib
import functools
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
Show = Callable[[str, float], None]  # called every second of a pause with (reason, seconds left)

_NAME = "ggufspec"  # user agent for the hub
_TIMEOUT_S = 15.0
_PAUSES_S = (0.2, 1.0)  # pauses between the three attempts at a request
_MOST_PAUSE_S = 60.0  # longest pause that a server may request
_SOON_S = 4.0  # longest wait for an optional answer, e.g. one that cached data can replace
_QUIET_S = 60.0  # time until a server that did not answer gets the next optional request
_DRIVE = re.compile(r"[A-Za-z]:")
_PLAIN = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,199}")
_PROXIES = "ALL_PROXY, HTTPS_PROXY or HTTP_PROXY"
_WITHOUT_NETWORK = "offline, ggufspec profiles list shows what fits, and ggufspec models what is on this disk"
COMMIT = re.compile(r"[0-9a-f]{40}")

_hurry = threading.local()  # its attribute ``soon`` is True in a thread whose request must be answered soon
_silent: dict[str, tuple[float, UnreachableError]] = {}  # servers that did not answer: (time of next request, error)


class UnreachableError(GgufspecError):
    """Error for a server that cannot be reached: no network, no listener, or the hub's offline mode."""

    wait_s = 0.0  # pause that the server requests, in seconds


class BrokenConnectionError(UnreachableError):
    """Error for a connection that broke in the middle of an answer."""


class ForeignError(UnreachableError):
    """Error for an answer that is not the hub's, such as a network's login page."""


class OfflineError(UnreachableError):
    """Error for a request while HF_HUB_OFFLINE is set."""


class HubBusyError(UnreachableError):
    """Error for a server that asks to try again later."""

    def __init__(self, message: str, hint: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message, hint)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class HubFile:
    """File in a hub repository; for a split model, any of its parts."""

    repo: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class HubLocation:
    """Location of a file on the hub. ``url`` contains ``commit``, so that every read sees the same version.

    ``etag`` is the SHA-256 of a large file, or the git SHA-1 of a small one.
    """

    url: str
    etag: str
    size_bytes: int
    commit: str


def stays_inside(name: str) -> bool:
    """Return True if a file name is printable and stays inside the folder that it is joined to, on any system. Pure."""
    return (
        name.isprintable()  # excludes NUL, line breaks and surrogates
        and "\\" not in name
        and not name.startswith("~")
        and not any(part in ("", ".", "..") or _DRIVE.match(part) for part in name.split("/"))
    )


def check_names(repo: str, file: str, revision: str | None) -> None:
    """Raise ModelError if the file's name or the revision would leave the repository's folder in the cache."""
    if not stays_inside(file):
        raise ModelError(
            f"{file!r} leaves the repository {repo}", f"choose a file that {model_page_url(repo)}/tree/main shows"
        )
    if revision is not None and not stays_inside(revision):
        raise ModelError(f"{revision!r} is not a revision of {repo}", "a revision is a branch, a tag or a commit")


def no_repository(repo: str) -> GgufspecError:
    return GgufspecError(f"{repo!r} is not a repository on the hub", "a repository is USER/NAME")


def cached_file(repo: str, name: str, revision: str | None = None) -> Path | None:
    """Return the file in the local Hugging Face cache (``HF_HOME`` is honoured), or None. Uses no network.

    Raises:
        GgufspecError: ``repo`` is not a valid name, or ``name`` would leave the repository's folder.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    check_names(repo, name, revision)
    try:
        found = try_to_load_from_cache(repo, name, revision=revision)
    except HFValidationError:
        raise no_repository(repo) from None
    except (OSError, ValueError):  # the reference in the cache is damaged
        return None
    return Path(found) if isinstance(found, str) else None


def remote_file(repo: str, file: str, revision: str | None = None) -> HubLocation:
    """Ask the hub for a file's version and size, with one HEAD request. HF_ENDPOINT and HF_TOKEN are honoured.

    Raises:
        UnreachableError: there is no network, or HF_HUB_OFFLINE is set.
        ModelError: there is no such file, this user has no access to it, or its name would leave the repository.
    """
    from huggingface_hub import get_hf_file_metadata

    check_names(repo, file, revision)

    def ask() -> HubLocation:
        address = file_url(repo, file, revision)
        found = get_hf_file_metadata(address, timeout=_TIMEOUT_S, library_name=_NAME, library_version=__version__)
        if found.size is None:
            raise lacks("size", f"{repo}/{file}")
        commit = found.commit_hash or ""
        return HubLocation(file_url(repo, file, commit or revision), found.etag or "", found.size, commit)

    return _asked(ask, repo, file, revision)


def lacks(what: str, name: str) -> ModelError:
    """Return the error for a hub (or mirror in HF_ENDPOINT) whose answer lacks something that a download needs."""
    from huggingface_hub import constants

    hint = "unset HF_ENDPOINT, or set it to a mirror that returns everything the hub does"
    return ModelError(f"the hub at {constants.ENDPOINT} does not return the {what} of {name}", hint)


def remote_parts(repo: str, files: Sequence[str], revision: str | None) -> list[HubLocation]:
    """Call :func:`remote_file` for all parts of a model, each at the first part's commit."""
    found: list[HubLocation] = []
    for file in files:
        found.append(remote_file(repo, file, (found[0].commit if found else "") or revision))
    return found


def contents(repo: str, revision: str | None = None) -> tuple[str, dict[str, int]]:
    """Return a revision's commit, and the size of each of its files in bytes, with one request.

    Raises:
        UnreachableError: there is no network, something other than the hub answered, or HF_HUB_OFFLINE is set.
        ModelError: there is no such repository.
    """
    from huggingface_hub import HfApi

    def ask() -> tuple[str, dict[str, int]]:
        # Not list_repo_tree, which has no timeout and retries for as long as a server requests
        api = HfApi(library_name=_NAME, library_version=__version__)
        found = api.model_info(repo, revision=revision, timeout=_TIMEOUT_S, files_metadata=True)
        if found.id != repo:  # the hub redirected the request
            _renamed(repo, found.id)
        return str(found.sha or ""), {str(one.rfilename): int(one.size or 0) for one in found.siblings or ()}

    return _asked(ask, repo, "", revision)


@functools.cache  # warn only once about each repository
def _renamed(repo: str, name: str) -> None:
    warnings.warn(f"{repo} is now called {name}", stacklevel=1)


def search(words: str, most: int) -> list[str]:
    """Return repositories with GGUF files that match ``words``, most downloaded first; raise as :func:`contents`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    url = f"{constants.ENDPOINT}/api/models"  # not HfApi.list_models, which has no timeout
    asked = {"search": words, "filter": "gguf", "sort": "downloads", "direction": "-1", "limit": str(most)}

    def ask() -> list[str]:
        reply = _session().get(url, params=asked, headers=_headers(), timeout=_TIMEOUT_S, follow_redirects=True)
        hf_raise_for_status(reply)
        return [str(entry["id"]) for entry in reply.json()][:most]

    return _asked(ask, f"a search for {words!r}", "", None)


def choose_names(repo: str, revision: str | None, pick: Callable[[Sequence[str]], Answer]) -> Answer:
    """Apply ``pick`` to the names of a repository's files, or of its cached files if the hub does not answer.

    If the cached files suffice for ``pick``, the hub has only a few seconds to answer.
    """

    def ask() -> Answer:
        return pick([*contents(repo, revision)[1]])

    here = cached_names(repo, revision)
    if not here:
        return ask()
    try:
        found = pick(here)
    except ModelError as error:
        try:
            return ask()
        except UnreachableError as unreachable:
            raise UnreachableError(f"on this machine {error.message}", f"{unreachable.hint}; {error.hint}") from None
    return soon_or(found, ask, repo)


def soon_or(here: Answer, ask: Callable[[], Answer], repo: str) -> Answer:
    """Return the result of ``ask`` if the hub answers :func:`soon`, otherwise ``here`` with a warning."""
    try:
        return soon(ask)
    except GgufspecError as error:
        warn_stale(f"using {repo} as it is on this machine", error)
        return here


def warn_stale(what: str, error: GgufspecError) -> None:
    """Warn that cached data is used instead of a server's answer, except in the hub's offline mode."""
    if not isinstance(error, OfflineError):
        warnings.warn(f"{what}: {error.message}", stacklevel=1)


def soon(ask: Callable[[], Answer], server: str = "the hub") -> Answer:
    """Return the result of an optional request if it is answered within a few seconds.

    A thread makes the request, because name look-ups and trickling answers have no other timeout; a late answer is
    dropped. A ``server`` that did not answer gets no further optional request for a minute.

    Raises:
        UnreachableError: there was no answer in time.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata  # noqa: F401  # import before the clock starts

    until_s, error = _silent.get(server, (0.0, UnreachableError("")))
    if time.monotonic() < until_s:
        raise error
    answer: Future[Answer] = Future()

    def work() -> None:
        _hurry.soon = True
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    with _show_requests(f"asking {server}"):
        threading.Thread(target=work, daemon=True).start()
        try:
            return answer.result(_SOON_S)
        except OfflineError:
            raise
        except UnreachableError as unreachable:
            error = unreachable
        except TimeoutError:
            error = UnreachableError(f"{server} does not answer within {_SOON_S:.0f} s", "check the network")
    _silent[server] = time.monotonic() + _QUIET_S, error
    raise error


def from_url(url: str) -> HubFile | None:
    """Return the file that a link to the hub (``/resolve/`` or ``/blob/``) points to, or None for any other link."""
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

    Redirects are followed, without credentials if the host changes. HF_HUB_DOWNLOAD_TIMEOUT limits the server's pauses.
    ``hub``: True to send the user's token; ``shown``: name for errors, because the URL may contain a signature.

    Raises:
        UnreachableError: the server did not answer.
        BrokenConnectionError: the connection broke.
        GgufspecError: the URL is invalid, or redirects in circles.
    """
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    timeout_s, session = float(constants.HF_HUB_DOWNLOAD_TIMEOUT), _session()
    sent = {**(_headers() if hub else {}), "Accept-Encoding": "identity", **headers}
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
    """Return huggingface_hub's HTTP client, which the first call creates."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    with _proxies_explained():
        return get_session()


def _headers() -> dict[str, str]:
    """Return the headers for requests to the hub; raise ModelError if they cannot hold the user's token."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    try:
        headers: dict[str, str] = build_hf_headers(library_name=_NAME, library_version=__version__)
        headers.get("authorization", "").encode("ascii")
    except UnicodeError:
        message = "the Hugging Face token has characters beyond ASCII, such as a byte order mark"
        raise ModelError(message, "set HF_TOKEN to the token alone (or: hf auth login)") from None
    return headers


@contextmanager
def _proxies_explained() -> Iterator[None]:
    """Raise an explanatory error if the environment's proxy settings prevent the creation of a client."""
    import httpx2

    try:
        yield
    except ImportError:
        message = f"{_PROXIES} names a SOCKS proxy, which needs the package socksio"
        raise UnreachableError(message, f"{install.pip()} socksio") from None
    except (ValueError, httpx2.InvalidURL) as error:
        hint = "export ALL_PROXY=socks5://HOST:PORT, or http://HOST:PORT"
        raise UnreachableError(f"{_PROXIES} names a proxy that cannot be used: {error}", hint) from None


def with_retries(ask: Callable[[], Answer], doing: str = "") -> Answer:
    """Call ``ask``; if the server is busy or the connection breaks, pause and retry. Other errors are raised at once.

    Within :func:`soon`, a busy server is not asked again. ``doing`` is shown to users (:func:`show_requests_with`).
    """
    is_hurried = getattr(_hurry, "soon", False)
    with _unseen(doing) if is_hurried else _show_requests(doing) as show:
        for pause_s in _PAUSES_S:
            try:
                return ask()
            except (HubBusyError, BrokenConnectionError) as error:
                pause_s = max(pause_s, error.wait_s)
                if pause_s > _MOST_PAUSE_S or (is_hurried and isinstance(error, HubBusyError)):
                    raise
                pause(pause_s, functools.partial(show, error.message))
        return ask()


def pause(seconds: float, tell: Callable[[float], None]) -> None:
    """Sleep, calling ``tell`` every second with the seconds left."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        tell(left_s)
        time.sleep(min(1.0, left_s))


def _unseen(_: str) -> AbstractContextManager[Show]:
    return nullcontext(lambda *_: None)


_show_requests: Callable[[str], AbstractContextManager[Show]] = _unseen


def show_requests_with(show: Callable[[str], AbstractContextManager[Show]]) -> None:
    """Set how requests are shown: ``show(description)`` returns a context manager that yields a ``Show`` callback."""
    global _show_requests
    _show_requests = show


def _asked(ask: Callable[[], Answer], repo: str, file: str, revision: str | None) -> Answer:
    """Return the hub's answer, with retries, and convert huggingface_hub's errors to ours."""
    _session()

    def once() -> Answer:
        with _explained(repo, file, revision):
            _headers()
            return ask()

    return with_retries(once, f"asking the hub about {repo}")


def asked_pause_s(headers: Mapping[str, str]) -> float:
    """Return the pause in seconds that a busy server requests; 0 if it requests none.

    Source: RFC 9110, section 10.2.3; for the hub's own ``RateLimit: "api";r=0;t=SECONDS``,
    draft-ietf-httpapi-ratelimit-headers.
    """
    for name, pattern in (("retry-after", r"\s*(\d{1,9})\s*"), ("ratelimit", r".*\bt=(\d{1,9}).*")):
        if match := re.fullmatch(pattern, headers.get(name, "")):
            return float(match[1])
    return 0.0


def file_url(repo: str, file: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, file, revision=revision)


def model_page_url(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


# ---- the cache -----------------------------------------------------------------------------------------------------
# models--USER--REPO/{blobs/ETAG, snapshots/COMMIT/FILE -> blob, refs/REVISION}, as in huggingface_hub/file_download.py


def hub_cache_folder() -> Path:
    """Return the folder of the hub's cache; HF_HOME and HF_HUB_CACHE are honoured."""
    from huggingface_hub import constants

    return untrusted.at_home(constants.HF_HUB_CACHE)


def largest_by_http_bytes() -> int:
    """Return the file size above which the hub serves files only through hf_xet."""
    from huggingface_hub import constants

    return constants.MAX_HTTP_DOWNLOAD_SIZE


def blob_path(repo: str, etag: str) -> Path:
    """Return the cache path of a file's complete content; raise ModelError if the ETag is not a valid file name."""
    if not _PLAIN.fullmatch(etag):
        raise ModelError(f"the hub gives a file in {repo} an invalid ETag: {etag!r}", f"see {model_page_url(repo)}")
    return _repo_folder(repo) / "blobs" / etag


@contextmanager
def blob_lock(repo: str, etag: str) -> Iterator[None]:
    """Hold the lock that huggingface_hub uses for writing a blob."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path = hub_cache_folder() / ".locks" / _repo_folder(repo).name / f"{etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


def link(repo: str, file: str, commit: str) -> Path:
    """Let huggingface_hub link a complete blob into the cache folder of ``commit``; raise as :func:`contents` does."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def ask() -> Path:
        try:
            return Path(hf_hub_download(repo, file, revision=commit, library_name=_NAME))
        except LocalEntryNotFoundError as error:  # only its cause says what happened
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise _unreachable(f"{repo}/{file}", error) from None

    return _asked(ask, repo, file, commit)


def point(repo: str, revision: str | None, commit: str) -> None:
    """Make a branch or tag in the cache point to ``commit``."""
    if revision != commit:
        ref = _repo_folder(repo) / "refs" / (revision or "main")
        if commit_of(ref) == commit:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        with write.replacing(ref) as new:
            new.write_text(commit, encoding="utf-8")


def commit_of(ref: Path) -> str:
    """Return the commit of a branch or tag in the cache, given its file; "" if the file is absent or damaged."""
    try:
        commit = untrusted.read_text(ref, 256).strip()
    except GgufspecError:
        return ""
    return commit if stays_inside(commit) else ""


def _repo_folder(repo: str) -> Path:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        return hub_cache_folder() / repo_folder_name(repo_id=repo, repo_type="model")
    except HFValidationError:
        raise no_repository(repo) from None


def cached_names(repo: str, revision: str | None) -> list[str]:
    """Return the names of a repository's cached files. Uses no network."""
    folder, wanted = _repo_folder(repo), revision or "main"
    snapshot = folder / "snapshots" / (commit_of(folder / "refs" / wanted) or wanted)
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


@contextmanager
def _explained(repo: str, file: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's errors to ours."""
    import httpx2
    from huggingface_hub import errors

    shown = f"{repo}/{file}" if file else repo
    try:
        yield
    except errors.HFValidationError:
        raise no_repository(repo) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: its owner grants access on request",
            f"ask for access at {model_page_url(repo)}, then set HF_TOKEN (or: hf auth login)",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision!r}", f"see {model_page_url(repo)}/commits/main") from None
    except errors.RemoteEntryNotFoundError:
        hint = f"see {model_page_url(repo)}/tree/{revision or 'main'}"
        if near := _near(repo, file, revision):
            hint = f"did you mean {' or '.join(near)}? {hint}"
        raise ModelError(f"{repo} has no file {file!r}", hint) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no repository {repo}, or it is private",
            f"check the name at {model_page_url(repo)}; for a private one set HF_TOKEN (or: hf auth login)",
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _offline(shown) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status < 500 and status not in (408, 429):
            is_login = status in (401, 403)
            hint = (
                "check HF_TOKEN, or: hf auth login"
                if is_login
                else f"see {model_page_url(repo)}, and check HF_ENDPOINT"
            )
            raise ModelError(f"the hub refuses {shown} ({status})", hint) from None
        raise busy_error(shown, status, error.response.headers) from None
    except (httpx2.HTTPError, errors.FileMetadataError) as error:
        raise _unreachable(shown, error) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # a captive portal may have answered
        raise ForeignError(
            f"the reply about {shown} did not come from the hub; it may be a web page",
            "sign in to the network if it requires that (as in a hotel), and check HF_ENDPOINT",
        ) from None


def busy_error(shown: str, status: int, headers: Mapping[str, str]) -> HubBusyError:
    wait_s = asked_pause_s(headers)
    message = f"the hub cannot serve {shown} now ({status})"
    if status == 429:
        message = f"too many requests to the hub, the last for {shown} (429)"
    return HubBusyError(message, f"try again in {wait_s:.0f} s" if wait_s else "try again later", wait_s)


def _near(repo: str, file: str, revision: str | None) -> list[str]:
    """Return files with names similar to the missing file's; none if the hub does not answer."""
    with suppress(Exception):
        return difflib.get_close_matches(file, contents(repo, revision)[1], n=2)
    return []


def _offline(shown: str) -> OfflineError:
    message = f"{shown} is not on this machine, and HF_HUB_OFFLINE forbids requests"
    return OfflineError(message, f"unset HF_HUB_OFFLINE; {_WITHOUT_NETWORK}")


def _unreachable(shown: str, error: Exception) -> UnreachableError:
    import httpx2

    broke = isinstance(error, httpx2.ReadError | httpx2.RemoteProtocolError)  # e.g. an idle connection that was closed
    message = f"{shown} cannot be reached: {str(error) or type(error).__name__}"
    hint = f"check the network and try again; {_WITHOUT_NETWORK}"
    return (BrokenConnectionError if broke else UnreachableError)(message, hint)
