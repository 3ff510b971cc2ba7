"""Files of the Hugging Face hub, and the one HTTP client; the only importer of ``huggingface_hub`` and ``httpx2``.

The client is huggingface_hub's own, so that proxies, certificates and HF_HUB_OFFLINE hold for every request.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ggufspec import __version__
from ggufspec.errors import GgufspecError, ModelError

Answer = TypeVar("Answer")

_NAME = "ggufspec"  # to the hub
_TIMEOUT_S = 15.0
_PAUSES_S = (0.2, 1.0)  # between three tries
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_QUANT = re.compile(r"(?i)(?:^|[-._/])((?:UD-)?(?:I?Q\d+_[A-Z0-9_]+|TQ\d_0|MXFP4(?:_MOE)?|BF16|F16|F32))(?=$|[-./])")
_USUAL_QUANT = "Q4_K_M"


class UnreachableError(GgufspecError):
    """There is no way to the server: no network, nobody listening, or the hub's offline mode."""


class BrokenConnectionError(UnreachableError):
    """The server went away in the middle of an answer."""


class BusyError(UnreachableError):
    """The server says that it may answer later."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository of the hub; of a split model any part."""

    repo: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class Remote:
    """Where the hub serves a file. ``url`` holds to ``commit``, so that every read is of the same version."""

    url: str
    etag: str
    size_bytes: int
    commit: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a GET; ``chunks`` is its body as it comes and may be longer or shorter than the headers say."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


def cached_file(repo: str, name: str, revision: str | None = None) -> Path | None:
    """The file in the local Hugging Face cache (``HF_HOME`` is honoured), or None. No network.

    Raises:
        GgufspecError: ``repo`` cannot be a repository's name.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, name, revision=revision)
    except HFValidationError:
        raise _no_repository(repo) from None
    return Path(found) if isinstance(found, str) else None


def remote_file(repo: str, file: str, revision: str | None = None) -> Remote:
    """Ask the hub for a file's version and size; one HEAD. HF_ENDPOINT and HF_TOKEN are honoured.

    Raises:
        UnreachableError: there is no network, or HF_HUB_OFFLINE is set.
        ModelError: there is no such file, or it is not for this user.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    def ask() -> Remote:
        with _explained(repo, file, revision):
            found = get_hf_file_metadata(
                hf_hub_url(repo, file, revision=revision),
                timeout=_TIMEOUT_S,
                library_name=_NAME,
                library_version=__version__,
            )
            commit = found.commit_hash or ""
            url = hf_hub_url(repo, file, revision=commit or revision)
        if found.size is None:
            raise ModelError(f"the hub does not say how large {repo}/{file} is", f"hf download {repo} {file}")
        return Remote(url, found.etag or "", found.size, commit)

    return patiently(ask)


def hub_file(name: str) -> HubFile:
    """The file that ``USER/REPO:QUANT`` means, as llama.cpp's ``-hf`` spells it.

    Without a quant it is Q4_K_M, or the only model of the repository. A file's name may stand for the quant.

    Raises:
        GgufspecError: no such repository, or none or several files for that quant; lists what there is.
    """
    repo, _, quant = name.partition(":")
    return HubFile(repo, find_quant(repo, quant)[0])


def find_quant(repo: str, quant: str = "", revision: str | None = None) -> tuple[str, ...]:
    """The file of a repository with the weights' type ``quant``; of a split model its parts in order.

    Raises:
        UnreachableError: there is no network, or HF_HUB_OFFLINE is set.
        ModelError: no such repository, or none or several files for that quant; lists what there is.
    """
    from huggingface_hub import HfApi

    def ask() -> list[str]:
        with _explained(repo, "", revision):
            return HfApi(library_name=_NAME, library_version=__version__).list_repo_files(repo, revision=revision)

    return choose(repo, patiently(ask), quant)


def choose(repo: str, files: Sequence[str], quant: str) -> tuple[str, ...]:
    """The files among a repository's that ``quant`` means. Pure.

    Raises:
        ModelError: there is none, or more than one.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and "mmproj" not in file.lower():
            models.setdefault(_SPLIT.sub("", file.removesuffix(".gguf")), []).append(file)
    if not models:
        raise ModelError(f"{repo} has no GGUF file", f"https://huggingface.co/models?search={repo.split('/')[-1]}+gguf")
    wanted = quant or (_USUAL_QUANT if len(models) > 1 else "")
    pattern = re.compile(rf"(?i)(?:^|[-._/]){re.escape(wanted)}(?=$|[-./])")
    found = [parts for stem, parts in models.items() if quant in parts or not wanted or pattern.search(stem)]
    if len(found) == 1:
        return tuple(found[0])
    quants = sorted({match[1].upper() for stem in models if (match := _QUANT.search(stem))})
    if found:
        raise ModelError(
            f"{repo} has {len(found)} models in {wanted}: " + ", ".join(parts[0] for parts in found),
            f"name the file: {repo}:{found[0][0]}",
        )
    near = difflib.get_close_matches(wanted.upper(), quants, n=1) or quants[:1] or [next(iter(models.values()))[0]]
    there = ", ".join(quants or list(models))
    raise ModelError(f"{repo} has no model in {wanted}; it has {there}", f"for example {repo}:{near[0]}")


def from_url(url: str) -> HubFile | None:
    """The file that a link to the hub means (``/resolve/`` or the page ``/blob/``), or None for another link."""
    from urllib.parse import unquote, urlsplit

    from huggingface_hub import constants

    parts, home = urlsplit(url), urlsplit(constants.ENDPOINT)
    if (parts.scheme, parts.netloc) != (home.scheme, home.netloc):
        return None
    match = re.fullmatch(r"/([^/]+/[^/]+)/(?:resolve|blob)/([^/]+)/(.+)", unquote(parts.path[len(home.path) :]))
    return HubFile(match[1], match[3], match[2]) if match else None


@contextmanager
def get(url: str, headers: Mapping[str, str], *, hub: bool = False, shown: str = "") -> Iterator[Reply]:
    """GET a URL; the body is left to the caller, and what it leaves unread is never fetched.

    Redirects are followed; credentials do not follow to another host.

    Args:
        url: http or https.
        headers: of the request.
        hub: whether it is the hub's, which is sent the user's token.
        shown: what to call the file in errors; the URL may hold a signature.

    Raises:
        UnreachableError: no answer.
        BrokenConnectionError: the answer broke off.
        GgufspecError: the URL is none, or leads in circles.
    """
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    sent = {
        **(build_hf_headers(library_name=_NAME, library_version=__version__) if hub else {}),
        "Accept-Encoding": "identity",
        **headers,
    }
    shown = shown or url
    try:
        with get_session().stream("GET", url, headers=sent, timeout=_TIMEOUT_S, follow_redirects=True) as response:
            yield Reply(response.status_code, response.headers, response.iter_raw())
    except (httpx2.ConnectError, httpx2.ProxyError, httpx2.TimeoutException) as error:
        raise _unreachable(shown, error) from None
    except OfflineModeIsEnabled:
        raise _offline(shown) from None
    except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
        raise BrokenConnectionError(f"the connection broke while reading {shown}: {error}", "try again") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise GgufspecError(f"{shown} cannot be read: {error}", "check the address") from None


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Ask again after a pause while the server is busy or the connection breaks; other failures are final."""
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except (BusyError, BrokenConnectionError):
            time.sleep(pause_s)
    return ask()


def page(repo: str) -> str:
    """The repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


@contextmanager
def _explained(repo: str, file: str, revision: str | None) -> Iterator[None]:
    """Turn huggingface_hub's errors into ours."""
    import httpx2
    from huggingface_hub import errors

    shown = f"{repo}/{file}" if file else repo
    try:
        yield
    except errors.HFValidationError:
        raise _no_repository(repo) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: its owner gives access on request",
            f"ask for access at {page(repo)}, then set HF_TOKEN (or: hf auth login)",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision!r}", f"see {page(repo)}/commits/main") from None
    except errors.RemoteEntryNotFoundError:
        raise ModelError(f"{repo} has no file {file!r}", f"see {page(repo)}/tree/{revision or 'main'}") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no repository {repo}, or it is private",
            f"check the name at {page(repo)}; for a private one set HF_TOKEN (or: hf auth login)",
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _offline(shown) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ModelError(f"the hub refuses {shown} ({status})", "check HF_TOKEN, or: hf auth login") from None
        raise BusyError(f"the hub does not serve {shown} now ({status})", "try again later") from None
    except (httpx2.HTTPError, errors.FileMetadataError) as error:
        raise _unreachable(shown, error) from None


def _no_repository(repo: str) -> GgufspecError:
    return GgufspecError(f"{repo!r} is no repository of the hub", "a repository is USER/NAME")


def _offline(shown: str) -> UnreachableError:
    return UnreachableError(
        f"{shown} is not on this machine, and HF_HUB_OFFLINE forbids to ask for it", "unset HF_HUB_OFFLINE"
    )


def _unreachable(shown: str, error: Exception) -> UnreachableError:
    return UnreachableError(
        f"{shown} cannot be reached: {str(error) or type(error).__name__}", "check the network, then again"
    )
