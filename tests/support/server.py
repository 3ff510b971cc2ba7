"""An HTTP server on loopback that serves ranges of files, or answers wrongly in a way that a test asks for."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "0123"
ENDLESS_CHUNK = bytes(1 << 16)
MOST_SENT = 256 << 20  # an endless body ends when nobody stopped reading it
SLOW_CHUNK, SLOW_S = 1 << 15, 0.01


@dataclass
class Served:
    """One path of the server.

    ``modes`` are what goes wrong, in the order of the requests; the last one stays. ``fine`` is nothing; a number is
    that status. ``bodies`` are the same for GETs alone.
    """

    path: Path
    modes: list[str] = field(default_factory=lambda: ["fine"])
    etag: str | None = '"one"'
    token: str = ""  # which must be sent
    redirect: str = ""  # where to, instead of the file
    gated: bool = False
    bodies: list[str] = field(default_factory=list)
    retry_after: str = ""
    git: bool = False  # a small file, which the hub serves itself, and names by git's digest

    def mode(self, method: str) -> str:
        """What goes wrong with this request."""
        modes = self.bodies if self.bodies and method == "GET" else self.modes
        return modes.pop(0) if len(modes) > 1 else modes[0]


@dataclass
class Server:
    """``files`` by path; the rest is what was asked of the server, with headers' names in lower case."""

    address: str
    files: dict[str, Served] = field(default_factory=dict)
    repos: dict[str, dict[str, Served]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    raw: dict[str, list[bytes]] = field(default_factory=dict)  # whole answers by path, piece by piece
    pause_s: float = 0.0  # before each further piece
    instead: list[bytes] = field(default_factory=list)  # what everything is answered with, piece by piece
    commits: list[str] = field(default_factory=lambda: [COMMIT])  # that there are; main is the first
    headers: dict[str, str] = field(default_factory=dict)  # of every answer
    over: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, path: Path, *modes: str, **more: Any) -> str:
        """Serve a file; returns its URL."""
        self.files[f"/{name}"] = Served(path, list(modes) or ["fine"], **more)
        return f"{self.address}/{name}"

    def add_repo(self, repo: str, folder: Path, **more: Any) -> None:
        """Serve a folder's files as a repository on the hub, from a CDN at another path as the hub does."""
        self.repos[repo] = {path.name: Served(path, **more) for path in sorted(folder.glob("*.gguf"))}

    def add_models(self, repo: str, folder: Path, *bodies: str, **more: Any) -> dict[str, Served]:
        """The same with the digests that the hub names its files by; ``bodies`` go wrong with each of them."""
        self.repos[repo] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            served = Served(path, bodies=list(bodies), **more)
            served.etag = f'"{git_digest(path) if served.git else digest(path)}"'
            self.repos[repo][path.relative_to(folder).as_posix()] = served
        return self.repos[repo]

    def asked(self, method: str = "") -> list[str]:
        """The paths that were asked for."""
        return [path for verb, path, _ in self.requests if not method or verb == method]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_digest(path: Path) -> str:
    """SHA-1 of a file as git makes it."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # huggingface_hub asks once, for its user agent
            return self.head(404, {"Content-Length": "0"})
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.served.requests.append((self.command, path, headers))
        with suppress(ConnectionError):
            if self.served.instead:
                self.pieces(self.served.instead)
            elif path in self.served.raw:
                self.pieces(self.served.raw[path])
            elif path in self.served.files:
                self.file(path, self.served.files[path])
            elif path == "/api/models":
                self.search(parse_qs(urlsplit(self.path).query))
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self.contents(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.resolve(*match.groups())
            else:
                self.head(404, {"Content-Length": "0"})
        return None

    # ---- the hub ------------------------------------------------------------------------------------------------

    def contents(self, repo: str, revision: str) -> None:
        if repo not in self.served.repos:
            return self.head(404, {"X-Error-Code": "RepoNotFound", "Content-Length": "0"})
        commit = self.served.commits[0] if revision == "main" else revision
        if commit not in self.served.commits:
            return self.head(404, {"X-Error-Code": "RevisionNotFound", "Content-Length": "0"})
        files = [
            {"rfilename": name, "size": served.path.stat().st_size, "blobId": "0" * 40}
            for name, served in self.served.repos[repo].items()
        ]
        body = json.dumps({"id": repo, "sha": commit, "siblings": files}).encode()
        self.head(200, {"Content-Length": str(len(body)), "Content-Type": "application/json"})
        self.wfile.write(body)
        return None

    def search(self, query: dict[str, list[str]]) -> None:
        """Repositories whose names have all the words, in the order in which they were added."""
        words = query["search"][0].lower().split()
        found = [{"id": repo} for repo in self.served.repos if all(word in repo.lower() for word in words)]
        body = json.dumps(found[: int(query["limit"][0])]).encode()
        self.head(200, {"Content-Length": str(len(body)), "Content-Type": "application/json"})
        self.wfile.write(body)

    def resolve(self, repo: str, revision: str, name: str) -> None:
        commit = self.served.commits[0] if revision == "main" else revision
        nothing = {"X-Repo-Commit": commit, "Content-Length": "0"}
        if repo not in self.served.repos:
            return self.head(401, {"X-Error-Code": "RepoNotFound"} | nothing)
        if commit not in self.served.commits:
            return self.head(404, {"X-Error-Code": "RevisionNotFound"} | nothing)
        served = self.served.repos[repo].get(name)
        if served is None:
            return self.head(404, {"X-Error-Code": "EntryNotFound"} | nothing)
        if served.token and self.headers.get("Authorization") != f"Bearer {served.token}":
            code = {"X-Error-Code": "GatedRepo" if served.gated else "RepoNotFound"}
            return self.head(403 if served.gated else 401, code | nothing)
        if served.redirect:
            size = str(served.path.stat().st_size)
            linked = {"X-Linked-Etag": served.etag or "", "X-Linked-Size": size, "Location": served.redirect}
            return self.head(302, nothing | linked | {"Accept-Ranges": "bytes"})
        return self.file(f"/{repo}/{name}", served, {"X-Repo-Commit": commit})

    # ---- files --------------------------------------------------------------------------------------------------

    def file(self, path: str, served: Served, more: dict[str, str] | None = None) -> None:
        mode = served.mode(self.command)
        if mode.isdecimal():
            wait = {"Retry-After": served.retry_after} if served.retry_after else {}
            return self.head(int(mode), {"Content-Length": "0"} | wait)
        if served.redirect:
            return self.head(302, {"Location": served.redirect, "Content-Length": "0"})
        if served.token and self.headers.get("Authorization") != f"Bearer {served.token}":
            return self.head(401, {"Content-Length": "0"})
        if mode == "hang up":
            self.close_connection = True
            return None
        etag = '"two"' if mode == "changed" else served.etag
        headers = {**(more or {}), "Accept-Ranges": "bytes"} | ({"ETag": etag} if etag else {})
        size = served.path.stat().st_size
        if self.command == "HEAD":
            return self.head(200, headers | {"Content-Length": str(size)})
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if mode == "no ranges" or match is None:
            self.head(200, headers | {"Content-Length": str(size)})
            return self.body(path, served, 0, size, mode)
        first, last = int(match[1]), min(int(match[2]), size - 1)
        if first > last:
            return self.head(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
        length = last - first + 1
        ranges = {
            "wrong start": f"bytes {first + 1}-{last + 1}/{size}",
            "wrong size": f"bytes {first}-{last}/{size + 1}" if first else f"bytes {first}-{last}/{size}",
            "absurd size": f"bytes {first}-{last}/{10**17}",
            "no size": f"bytes {first}-{last}/*",
            "no words": "words",
            "shorter": f"bytes {first}-{first + length // 2}/{size}",
        }
        headers["Content-Range"] = ranges.get(mode, f"bytes {first}-{last}/{size}")
        if mode == "endless":
            self.head(206, headers | {"Connection": "close"})
            return self.endless(path)
        if mode == "short close":
            self.head(206, headers | {"Connection": "close"})
            return self.body(path, served, first, length // 2)
        self.head(206, headers | {"Content-Length": str(length)})
        if mode == "short":  # fewer than its own headers say
            self.close_connection = True
            return self.body(path, served, first, length // 2)
        return self.body(path, served, first, length, mode)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | self.served.headers).items():
            self.send_header(name, value)
        self.end_headers()

    def body(self, path: str, served: Served, first: int, length: int, mode: str = "fine") -> None:
        """Send a range: slowly, half of it ("cut", and "stall" until the client leaves), or with a "flipped" bit."""
        half = length // 2
        with served.path.open("rb") as file:
            file.seek(first)
            while length:
                most = SLOW_CHUNK if mode == "slow" else 1 << 16
                chunk = file.read(min(most, length - half if length > half else length))
                if mode == "slow":
                    time.sleep(SLOW_S)
                if mode == "flipped" and length == half:
                    chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                self.wfile.write(chunk)
                self.served.sent[path] += len(chunk)
                length -= len(chunk)
                if length == half and mode in ("cut", "stall"):
                    self.close_connection = True
                    if mode == "stall":
                        self.served.over.wait()
                    return

    def pieces(self, pieces: list[bytes]) -> None:
        """Send an answer as it is; the connection ends with it."""
        self.close_connection = True
        for piece in pieces:
            self.wfile.write(piece)
            if self.served.over.wait(self.served.pause_s):
                return

    def endless(self, path: str) -> None:
        while self.served.sent[path] < MOST_SENT:
            self.wfile.write(ENDLESS_CHUNK)
            self.served.sent[path] += len(ENDLESS_CHUNK)


class _Http(ThreadingHTTPServer):
    """Ends its connections with itself, so that it is gone then."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, served: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), served)
        self.connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving() -> Iterator[Server]:
    """A server with nothing to serve yet."""
    handler: Any = type("OwnHandler", (Handler,), {})
    httpd = _Http(handler)
    server = Server(f"http://127.0.0.1:{httpd.server_port}")
    handler.served = server
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()
