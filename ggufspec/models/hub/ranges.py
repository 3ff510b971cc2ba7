"""HTTP range requests, which read a few megabytes of a file of any size.

Servers are not trusted, so an answer that is longer than requested or does not match its request is an error. Source:
RFC 9110, sections 14 (ranges) and 15.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from ggufspec.errors import GgufspecError, ModelError
from ggufspec.models.hub import client

_LARGEST_FILE = 1 << 50
_LONGEST_S, _SLOWEST_BYTES_PER_S = 30.0, 20_000
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
# Parameters of signed URLs (S3, CloudFront, Google, Azure), which are secret and change although the file does not
_SIGNATURE = re.compile(
    r"(?i)x-(amz|goog)-.*|signature|expires|policy|key-pair-id|token|awsaccesskeyid|se|sig|sp|sr|st|sv"
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File at a URL. Every read compares its ``etag``, unless that is empty because ``commit`` fixes the version."""

    url: str
    size_bytes: int
    etag: str = ""
    commit: str = ""
    repo: str = ""  # repository if the file is on the hub, else empty

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]

    @property
    def identity(self) -> str:
        """Identifier of the contents that does not depend on the URL's signature."""
        return f"{unsigned(self.url)} {self.size_bytes} {self.commit or self.etag}"

    def read(self, offset: int, count: int) -> bytes:
        """Read ``count`` bytes from ``offset``.

        Raises:
            UnreachableError: the server did not answer.
            ModelError: there is no such file, the answer is invalid, or the file has changed.
        """
        if count <= 0:
            return b""
        data, size, etag = client.with_retries(lambda: _range(self.url, offset, count, self.repo))
        if size != self.size_bytes or (self.etag and etag != self.etag):
            raise ModelError(f"{unsigned(self.url)} changed while it was read", "try again when the upload is complete")
        return data


def probe(url: str) -> RemoteFile:
    """Read one byte to get a file's size and version, because HEAD may be refused; raise as ``read`` does."""
    _, size, etag = client.with_retries(lambda: _range(url, 0, 1, ""))
    return RemoteFile(url, size, etag)


def unsigned(url: str) -> str:
    """Return the URL without its user, password, signature and fragment."""
    parts = urlsplit(url)
    query = [(key, value) for key, value in parse_qsl(parts.query, True) if not _SIGNATURE.fullmatch(key)]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, urlencode(query), ""))


def _range(url: str, offset: int, count: int, repo: str) -> tuple[bytes, int, str]:
    """Make one request and return (bytes, file size, file version)."""
    shown = unsigned(url)
    headers = {"Range": f"bytes={offset}-{offset + count - 1}"}
    with client.get(url, headers, hub=bool(repo), shown=shown) as reply:
        if reply.status_code != 206:
            raise _refused(shown, reply.status_code, repo)
        match = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", "").strip())
        if match is None or reply.headers.get("content-encoding", "identity") != "identity":
            raise _wrong(shown, "the answer does not name its range")
        first, last, size = map(int, match.groups())
        count = min(count, size - offset)
        if size > _LARGEST_FILE or first != offset or last != offset + count - 1:
            raise _wrong(shown, f"the answer to {headers['Range'][6:]} has {first}-{last} of {size}")
        data = bytearray()
        until_s = time.monotonic() + _LONGEST_S + count / _SLOWEST_BYTES_PER_S
        for chunk in reply.iter_raw():
            data += chunk
            if len(data) > count:
                raise _wrong(shown, f"the answer has more than the requested {count:,} bytes")
            if time.monotonic() > until_s:
                raise client.UnreachableError(f"{shown} arrives too slowly", "check the network and try again")
    if len(data) < count:
        raise client.BrokenConnectionError(f"{shown}: the server sent {len(data):,} of {count:,} bytes", "try again")
    version = reply.headers.get("etag", "") or reply.headers.get("last-modified", "")
    return bytes(data), size, version


def _wrong(shown: str, what: str) -> ModelError:
    return ModelError(f"{shown} cannot be read in part: {what}", "download the file first, then name it")


def _refused(shown: str, status: int, repo: str) -> GgufspecError:
    if status == 200:
        return ModelError(f"the server of {shown} does not support ranges", "download the file first, then name it")
    if status == 416:
        return ModelError(f"{shown} is empty or truncated (416)", "check the file at its source")
    if status in (404, 410):
        return ModelError(f"there is no {shown} ({status})", "check the address")
    if status in (401, 403):
        hint = (
            f"see {client.model_page_url(repo)}, and set HF_TOKEN"
            if repo
            else "a signed URL may have expired: get a new one"
        )
        return ModelError(f"the server refuses {shown} ({status})", hint)
    if status >= 500 or status in (408, 429):
        return client.HubBusyError(f"the server of {shown} is busy ({status})", "try again later")
    return ModelError(f"the server of {shown} answers {status}", "check the address")
