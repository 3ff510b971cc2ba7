"""Commands and llama.cpp's children without the seconds that Python takes to start and import.

A process, the fork server, imports what they import, and from then on only forks. A fork is as fresh as a process that
was started: its own environment, folder, streams, signals and death. :class:`Popen` is ``subprocess.Popen`` whose
process is such a fork for two programs, the console script and ``ggufspec.child``. All else is started as ever; so are
these two where a variable or an option reaches further back than a fork: to the interpreter, a library as it is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pty
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import psutil
import ptyprocess

from ggufspec.child.session import COMMAND

SCRIPT = Path(sys.executable).with_name("ggufspec")
_NOT_FORKED = ("PYTHON", "LD_", "LLAMA_", "OMP_", "GOMP_", "KMP_", "GGML_", "OPENBLAS_", "TYPER_", "_TYPER_")
# What the two programs load; not huggingface_hub, which reads the environment as it is loaded.
_PRELOADED = (
    "ggufspec.child.__main__",
    *("llama_cpp", "numpy", "psutil", "pynvml", "httpx2", "filelock", "platformdirs", "tomlkit", "jinja2.sandbox"),
    *(
        "prompt_toolkit.shortcuts",
        "markdown_it",
        "rich.console",
        "rich.live",
        "rich.markdown",
        "rich.progress",
        "rich.table",
    ),
)
_BEFORE = dict(os.environ)
_address = ""  # of the fork server: known in it and in its forks


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``; a fork of the fork server where it may be one."""

    _server: socket.socket | None = None  # says how the fork ended; None: a process that was started

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        """In the place of fork and exec."""
        started = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(started).bind(*args, **kwargs).arguments
        words = [os.fsdecode(word) for word in asked["args"]] if isinstance(asked["args"], list | tuple) else []
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        further = any(asked[name] for name in ("preexec_fn", "pass_fds", "shell", "executable"))
        if further or not may_fork(words, environment):
            started(*args, **kwargs)
            return
        streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        request = {
            "words": words,
            "environment": environment,
            "folder": str(Path(asked["cwd"] or ".").absolute()),
            "session": asked["start_new_session"],
            "parent": os.getpid(),
        }
        self._server, self.pid = _fork(request, [own if fd == -1 else fd for own, fd in enumerate(streams)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._server is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc, no-any-return]
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._server is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._server.recv(64))
            self._server.close()
        return self.returncode


class Terminal(pexpect.spawn):  # type: ignore[type-arg]
    """``pexpect.spawn`` whose process is such a fork."""

    def _spawnpty(self, args: list[str], **kwargs: Any) -> Any:
        return _Pty.spawn(args, **kwargs)


class _Pty(ptyprocess.PtyProcess):  # type: ignore[misc]
    """``PtyProcess``, which waits for its own children only, for a fork."""

    process: Popen

    @classmethod
    def spawn(cls, argv: list[str], cwd: str, env: dict[str, str], dimensions: tuple[int, int], **_: Any) -> _Pty:
        own, of_child = pty.openpty()
        termios.tcsetwinsize(of_child, dimensions)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), of_child)
        process = Popen(argv, cwd=cwd, env=env, start_new_session=True, **streams)
        os.close(of_child)
        made = cls(process.pid, own)
        made.process = process
        return made

    def isalive(self) -> bool:
        code = self.process.poll()
        if code is not None:
            self.terminated = True
            self.exitstatus, self.signalstatus = (code, None) if code >= 0 else (None, -code)
        return code is None

    def wait(self) -> int | None:
        self.process.wait()
        self.isalive()
        return self.exitstatus  # type: ignore[no-any-return]


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": Popen})  # for a module that says ``subprocess.Popen``


def may_fork(words: list[str], environment: dict[str, str]) -> bool:
    """Whether a fork is the same as a process that is started."""
    changed = {key for key, value in environment.items() if _BEFORE.get(key) != value}
    known = words[:1] == [str(SCRIPT)] or words[: len(COMMAND)] == [*COMMAND]
    return sys.platform == "linux" and known and not any(key.startswith(_NOT_FORKED) for key in changed)


def _fork(request: dict[str, Any], streams: list[int]) -> tuple[socket.socket, int]:
    """(connection that says how the fork ends, its process id)."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(_address or _start())
    data = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("!I", len(data))], streams)
    server.sendall(data)
    return server, struct.unpack("!I", server.recv(4))[0]


@functools.cache
def _start() -> str:
    """Start the fork server, which ends with this process; its address."""
    address = f"\0ggufspec-tests-{secrets.token_hex(8)}"  # of no file
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GGUFSPEC_", "HF_"))}
    command = [sys.executable, __file__, address[1:]]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment | {"LC_ALL": "C.UTF-8"}
    )
    assert server.stdout is not None
    assert server.stdout.read(1) == b"+"  # it listens
    _start.process = server  # type: ignore[attr-defined]  # its stdin stays open as long as this process lives
    return address


def alive(pid: int | None = None) -> list[psutil.Process]:
    """The forks that have not ended; those that process ``pid`` wanted, if it is given."""
    found: list[psutil.Process] = []
    if not _start.cache_info().currsize:  # all is started where nothing is forked
        return found
    for one in psutil.Process(_start.process.pid).children():  # type: ignore[attr-defined]
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE and pid in (None, _wanted_by(one)):
                found.append(one)
    return found


def _wanted_by(fork: psutil.Process) -> int:
    """The process that wanted a fork, which its name has."""
    with contextlib.suppress(ValueError):
        return int(fork.name())
    return 0


# ---- the server's side ---------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork what is asked for; returns in each fork, and ends with the parent."""
    global _address
    from ggufspec.child import session

    _preload()
    _address = address
    session.subprocess = FORKING  # type: ignore[assignment]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}  # by the process that was forked
    os.write(1, b"+")
    while True:
        ready = select.select([0, listener, ended], [], [])[0]
        if 0 in ready:
            os._exit(0)
        if ended in ready:
            os.read(ended, 512)
            _bury(clients)
        if listener in ready:
            client = listener.accept()[0]
            try:
                request, streams = _taken(client)
            except (OSError, ValueError, struct.error):  # it was interrupted meanwhile, or killed
                client.close()
                continue
            pid = os.fork()
            if pid == 0:
                _become(request, streams)
                return
            for fd in streams:
                os.close(fd)
            clients[pid] = client
            with contextlib.suppress(OSError):  # likewise
                client.sendall(struct.pack("!I", pid))


def _taken(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and the streams that came with it."""
    head, streams, *_ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as data:
        return json.loads(data.read(struct.unpack("!I", head)[0])), streams


def _bury(clients: dict[int, socket.socket]) -> None:
    """Say how forks ended, where anybody still wants to know."""
    for pid in list(clients):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with clients.pop(pid) as client, contextlib.suppress(OSError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _preload() -> None:
    """Load what a fork would; what starts threads as it is loaded must not be among it."""
    import typer

    from ggufspec.cli import app

    package = Path(importlib.import_module("ggufspec").__file__ or "").parent
    own = (path.relative_to(package.parent).with_suffix("") for path in sorted(package.rglob("*.py")))
    names = (".".join(path.parts) for path in own if path.name not in ("__init__", "__main__"))
    for name in (*_PRELOADED, *names):
        importlib.import_module(name)
    typer.main.get_command = functools.cache(
        typer.main.get_command
    )  # building all commands takes as long as a short one
    for command in typer.main.get_command(app.app).commands.values():  # type: ignore[attr-defined]
        command.whole  # noqa: B018
    gc.freeze()  # so that no fork copies what it does not touch


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Make this fork what a started process would be."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    Path("/proc/self/comm").write_text(str(request["parent"]), encoding="ascii")
    for own, fd in enumerate(streams):
        os.dup2(fd, own)
    if request["session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    time.tzset()
    words = request["words"]
    sys.argv = [words[0], *words[1:]] if words[0] == str(SCRIPT) else ["ggufspec.child", *words[len(COMMAND) :]]
    sys.stdin = _stream(0, "r", sys.stdin)  # type: ignore[arg-type]
    sys.stdout, sys.stderr = _stream(1, "w", sys.stdout), _stream(2, "w", sys.stderr)  # type: ignore[arg-type]
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _stream(own: int, mode: str, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream as the interpreter makes it: Python/pylifecycle.c, create_stdio."""
    terminal = os.isatty(own)
    return io.TextIOWrapper(
        open(own, mode + "b", closefd=False),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=terminal or own == 2,
    )


def _run() -> int:
    """The program of this fork to its end; its exit code, as an interpreter that ends gives it, but sooner."""
    from ggufspec.child import __main__ as child
    from ggufspec.cli import app

    code = 0
    try:
        if sys.argv[0] == str(SCRIPT):
            app.entry()
        else:
            child.main(sys.argv[1:])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {sys.stdout!r}\n{error!r}", file=sys.stderr)  # noqa: T201
        code = 120
    return code


if __name__ == "__main__":
    serve(f"\0{sys.argv[1]}")
    os._exit(_run())
