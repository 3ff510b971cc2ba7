"""Runs a job in a child process, so that an abort of llama.cpp ends the job and not the program.

The child is ``python -P -m ggufspec.worker MODULE``; without ``-P`` a ``json.py`` in the current folder would run.
There are two kinds of job:

- A call. The module has a ``Spec``, a ``Result`` and ``run(spec, emit, stopping) -> Result``.
- A session, whose child answers many requests. The module has a ``Spec``, a ``Ready``, a ``Request``, a ``Reply`` and
  ``opened(spec, emit, stopping)``, a context manager. Its value has ``ready`` and ``answer(request, emit, stopping)``,
  which gives a ``Reply``; what it raises as GgufspecError leaves the session open.

``emit`` sends an event, ``stopping`` is set when the request is to stop with what it has.

Both use one protocol, lines of JSON. On stdin come the spec, which is request 0, and in a session requests 1, 2, …,
each after the reply to the one before. On stdout come ``["event", {…}]`` and, for every request, one outcome:
``["result", N, …]`` or ``["error", N, message, hint, exit code]``. After ``["within", S, what, hint]`` the parent
kills the child in S seconds, unless ``["within", null]`` follows. ``{"stop": N}`` on stdin asks request N to stop.
The end of stdin asks the child to end: Ctrl-C in the parent, or the parent's death. It ends within ``_GRACE_S`` then,
whatever llama.cpp is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from ggufspec import interrupts, plain
from ggufspec.errors import BlamedError, GgufspecError, ModelError, UsageError, WorkerError

Event = dict[str, Any]
Emit = Callable[[Event], None]
Outcome = tuple[str, int, *tuple[Any, ...]]  # as it came
Result = TypeVar("Result")

COMMAND = (sys.executable, "-P", "-m", "ggufspec.worker")  # a module and -v or -q follow
CHECK_HINT = "ggufspec doctor checks how llama.cpp was built; in a checkout scripts/bootstrap --check mends it"

_GRACE_S = 5.0
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # linux/prctl.h, asm-generic/signal.h
# By backend, what avoids that a card's driver crashes: variables of ggml/src
_DRIVER_HINTS = {
    "CUDA": "update NVIDIA's driver, or set GGML_CUDA_DISABLE_FUSION=1 or GGML_CUDA_DISABLE_GRAPHS=1",
    "Vulkan": "update the card's driver, or set GGML_VK_DISABLE_FUSION=1 or GGML_VK_DISABLE_F16=1",
    "MTL": "update macOS, or set GGML_METAL_FUSION_DISABLE=1",
    "SYCL": "update the card's driver, or set GGML_SYCL_ENABLE_FUSION=0",
}
_OF_RPC = re.compile(r"ggml-rpc|\bRPC\b")
# What to do about a death, by its signal (on Windows its status) and the last line of stderr, with names of llama.cpp
_HINTS = (
    (_OF_RPC, "look at the output of `ggufspec worker`{peers} and start it again, or drop --rpc"),
    (
        re.compile(r"(?i)out of memory|bad_alloc|MemoryError|(failed|unable) to allocate|alloc\w* failed"),
        "lower -c, -ngl or -ngld if memory is short; -v shows llama.cpp's log",
    ),
    (
        re.compile(r"\bsrc/(llama-(arch|hparams|model|vocab)|unicode)|\bgguf\.(cpp|h)|error loading model"),
        "the model's file is damaged or made for another llama.cpp: download it again, or update llama-cpp-python",
    ),
    (re.compile(r"^(SIGSEGV|SIGILL|SIGBUS|SIGFPE|an )"), CHECK_HINT),  # of kernels: lack of memory ends otherwise
    (re.compile(r"^\S"), f"{CHECK_HINT}; -v shows llama.cpp's log"),
    (re.compile(""), "-v shows llama.cpp's log"),
)
_BUILT_IN = re.compile(r"^\S*/vendor/llama\.cpp/")  # the folder of the build
_OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # what a new session is on Windows
_NTSTATUS = {0xC0000005: "an access violation", 0xC000001D: "an illegal instruction"}  # ntstatus.h


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a job; ``partial`` is the unfinished result, or None."""

    def __init__(self, partial: Any) -> None:
        super().__init__()
        self.partial = partial


def call(
    module: str,
    spec: object,
    result_type: type[Result],
    *,
    on_event: Emit | None = None,
    verbose: bool = False,
) -> Result:
    """Run ``module``'s job in a child process and return its result.

    Args:
        module: dotted name of the job's module.
        spec: the job's ``Spec``.
        result_type: the job's ``Result``.
        on_event: called with each event as it comes.
        verbose: let llama.cpp's log through to stderr.

    Raises:
        GgufspecError: as the job raised it.
        WorkerError: the child ended without a result; ``ended_by`` names the signal, or is ``deadline``.
        Interrupted: Ctrl-C; has the unfinished result.
    """
    with Session(verbose=verbose) as session:
        return session.open(module, spec, result_type, on_event=on_event)


class Session:
    """A child process that is opened once and answers many requests.

    ``open(module, Spec(…), Ready)`` starts it, ``ask(Request(…), Reply)`` sends a request. All methods but :meth:`stop`
    and :meth:`kill` belong to one thread. A session can be opened again at any time, also after its child has died.

    Args:
        verbose: let llama.cpp's log through to stderr.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._child: _Child | None = None

    @property
    def is_open(self) -> bool:
        """Whether the child is alive."""
        return self._child is not None and self._child.lives

    def open(self, module: str, spec: object, ready_type: type[Result], *, on_event: Emit | None = None) -> Result:
        """Start the child and send its spec; a previous child is ended.

        Args:
            module: dotted name of the job's module.
            spec: its ``Spec``.
            ready_type: its ``Ready``; of a call its ``Result``.
            on_event: called with each event as it comes; what it raises ends the child.

        Raises:
            GgufspecError: as the job raised it; the child has ended.
            WorkerError: the child died.
            Interrupted: Ctrl-C; the child has ended. ``partial`` is its unfinished result.
        """
        self.close()
        child = self._child = _Child(module, verbose=self._verbose)
        try:
            child.send(spec)
            result = _result(child.outcome(on_event), ready_type)
        except KeyboardInterrupt:
            try:
                raise Interrupted(_partial(child.last_outcome(on_event), ready_type)) from None
            finally:
                self._end(0)
        except BaseException:
            self.close()
            raise
        return result

    def ask(self, request: object, reply_type: type[Result], *, on_event: Emit | None = None) -> Result:
        """Send a request and wait for the reply.

        Ctrl-C asks the child to stop and waits for its unfinished reply; a second Ctrl-C kills the child.

        Args:
            request: the module's ``Request``.
            reply_type: its ``Reply``.
            on_event: called with each event as it comes; what it raises ends the child.

        Raises:
            GgufspecError: as the job raised it; the session continues.
            WorkerError: the child has died, or was never opened.
            Interrupted: Ctrl-C; ``partial`` is the unfinished reply, or None if the child was killed.
        """
        child = self._child
        if child is None:
            raise WorkerError("the session has no child process", "open the session first")
        try:
            child.send(request)
            try:
                outcome = child.outcome(on_event)
            except KeyboardInterrupt:
                if child.stops:  # a second Ctrl-C
                    raise
                child.stop()
                raise Interrupted(_partial(child.outcome(on_event), reply_type)) from None
        except Interrupted:
            raise
        except KeyboardInterrupt:
            self._end(0)
            raise Interrupted(None) from None
        except BaseException:
            self._end(0)
            raise
        return _result(outcome, reply_type)

    def stop(self) -> None:
        """Ask the running request, if any, to stop at its next token; its reply is what it has by then.

        May be called by any thread and from a signal handler.
        """
        if child := self._child:
            child.stop()

    def kill(self) -> None:
        """Kill the child, whatever it does; whoever waits for it gets a WorkerError. Any thread may call it."""
        if child := self._child:
            child.kill()

    def close(self) -> None:
        """End the child: at once if it is busy, else after its cleanup, within ``_GRACE_S``."""
        if child := self._child:
            self._end(0 if child.works else _GRACE_S)

    def _end(self, patience_s: float) -> None:
        if child := self._child:
            self._child = None
            child.end(patience_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _result(outcome: Outcome, kind: type[Result]) -> Result:
    """The result of a request.

    Raises:
        GgufspecError: as the job raised it.
    """
    if outcome[0] == "error":
        _, _, message, hint, exit_code = outcome
        raise {2: UsageError, 1: ModelError}.get(exit_code, GgufspecError)(message, hint)
    return plain.load(kind, outcome[2])


def _partial(outcome: Outcome | None, kind: type[Result]) -> Result | None:
    """The result of an interrupted request, if there is one."""
    return None if outcome is None or outcome[0] == "error" else plain.load(kind, outcome[2])


class _Child:
    """A child process, and the messages of it.

    A thread reads them, since an interrupted read would lose part of a line. The newest outcome stays, so that whoever
    was interrupted can wait for it again.

    Attributes:
        works: whether a request is unanswered.
    """

    def __init__(self, module: str, *, verbose: bool) -> None:
        self.works = False
        self._number = -1  # of the newest request
        self._stopped = -1  # the request that is to stop
        self._writing = threading.Lock()
        self._outcome: Outcome | None = None  # the newest
        self._ended = False
        self._on_cards: list[tuple[str, str, str]] = []
        self._limit: tuple[float, float, str, str] | None = None  # until when, and what ``within`` was called with
        self._arrived: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()  # None at the end; [] is no message
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._logged_bytes = 0  # before the newest request
        self._peers: Sequence[str] = ()  # RPC workers, as the spec has them
        self._process = subprocess.Popen(
            [*COMMAND, module, "-v" if verbose else "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent, which asks the child to stop
            creationflags=_OWN_GROUP,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def stops(self) -> bool:
        """Whether the newest request was asked to stop."""
        return self._stopped == self._number

    def send(self, request: object) -> None:
        """Send a request, whose :meth:`outcome` is to be waited for."""
        self._number += 1
        self.works = True
        self._peers = getattr(request, "rpc", self._peers)
        self._logged_bytes = os.fstat(self._log.fileno()).st_size
        line = json.dumps({"request": plain.dump(request)})
        with self._writing:
            self._write(line)
        if self.stops:  # since before it was written
            self.stop()

    def stop(self) -> None:
        """Ask the newest request to stop; if another thread is writing, that thread does it afterwards."""
        if self.works:
            self._stopped = number = self._number
            if self._writing.acquire(blocking=False):
                try:
                    self._write(json.dumps({"stop": number}))
                finally:
                    self._writing.release()

    def outcome(self, on_event: Emit | None, patience_s: float | None = None) -> Outcome:
        """Wait for the outcome of the newest request.

        Raises:
            TimeoutError: none within ``patience_s``.
            WorkerError: the child has ended, or exceeded the limit that it set itself.
            KeyboardInterrupt: Ctrl-C; the messages read so far have been handled.
        """
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        with interrupts.held(lambda: self._arrived.put([])) as check:
            while self._outcome is None or self._outcome[1] != self._number:
                check()
                if self._ended:
                    raise self._death()
                moment = min(until, self._limit[0] if self._limit else math.inf)
                try:
                    message = self._arrived.get(
                        timeout=None if moment == math.inf else max(moment - time.monotonic(), 0)
                    )
                except queue.Empty:
                    if self._limit is None or self._limit[0] > moment:
                        raise TimeoutError from None
                    _, seconds, what, hint = self._limit
                    late = f"{what} takes more than {seconds:g} s: it may be a trap"
                    raise BlamedError(late, hint, "deadline") from None
                self._take(message, on_event)
        self.works = False
        return self._outcome

    def _take(self, message: list[Any] | None, on_event: Emit | None) -> None:
        match message:
            case None:
                self._ended = True
            case ["event", event]:
                if on_event is not None:
                    on_event(event)
            case ["on_card", model, device, description]:
                self._on_cards.append((model, device, description))
            case ["within", None]:
                self._limit = None
            case ["within", seconds, what, hint]:
                self._limit = (time.monotonic() + seconds, seconds, what, hint)
            case ["result" | "error", *_]:
                self._outcome = tuple(message)

    def last_outcome(self, on_event: Emit | None) -> Outcome | None:
        """The outcome of the newest request, after asking the child to end; None if none comes in time."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(TimeoutError, WorkerError):
            return self.outcome(on_event, _GRACE_S)
        return None

    def kill(self) -> None:
        """Kill it; it is not waited for."""
        self._process.kill()

    def end(self, patience_s: float) -> None:
        """Wait for its end, then kill it."""
        try:
            with contextlib.suppress(OSError):
                self._stdin.close()
            self._reader.join(patience_s)
        finally:
            if self._reader.is_alive():
                self._process.kill()
            self._process.wait()
            self._reader.join()
            self._stdout.close()
            self._log.close()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or its stdin is closed
            self._stdin.write(line + "\n")
            self._stdin.flush()

    def _read(self) -> None:
        for line in self._stdout:
            with contextlib.suppress(ValueError):  # a line cut short by the child's death
                self._arrived.put(json.loads(line))
        self._arrived.put(None)

    def _death(self) -> WorkerError:
        """The error for a child that has ended without an outcome, from the end of its stderr."""
        code = self._process.wait()
        self._log.seek(0)
        log = self._log.read()
        last = log[self._logged_bytes :].strip() or log
        blame = self._limit and self._limit[2:]
        return _died(code, last.decode("utf-8", "replace"), self._peers, blame, self._on_cards)


def _died(
    code: int,
    stderr: str,
    peers: Sequence[str] = (),
    blame: tuple[str, str] | None = None,
    on_cards: Sequence[tuple[str, str, str]] = (),
) -> WorkerError:
    """The error for a child that ended without an outcome: the last line of its stderr that tells why.

    Args:
        code: its exit code.
        stderr: what it printed.
        peers: its RPC workers.
        blame: what ran within a limit, and a hint.
        on_cards: models that were loaded, each with the device that has layers of it and that device's description.
    """
    lines = [_BUILT_IN.sub("", line.strip()) for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "GGML_ASSERT" in line or "error" in line.lower() or _OF_RPC.search(line)]
    of_card = [line for line in lines if line.startswith(("CUDA error: ", "ROCm error: "))]  # its abort says no why
    last = (of_card or telling or lines or ["it printed nothing"])[-1]
    name = _NTSTATUS.get(code) or (signal.Signals(-code).name if code < 0 else "")
    reason = "out of memory, most likely" if name == "SIGKILL" else last
    if blame:
        return BlamedError(f"{blame[0]} made llama.cpp end, by {name or f'status {code}'}: {reason}", blame[1], name)
    hint = next(hint for pattern, hint in _HINTS if pattern.search(f"{name} {reason}"))
    if on_cards and hint == CHECK_HINT:
        models = " and ".join(dict.fromkeys(model for model, *_ in on_cards))
        device, description = on_cards[-1][1:]
        text = f"the driver of {device}, {description}, most likely crashed with {models} loaded: {name}"
        driver = _DRIVER_HINTS.get(device.rstrip("0123456789"), "update the card's driver")
        hint = f"{driver}; ggufspec doctor checks the card; -ngl 0 -ngld 0 does without it"
        return WorkerError(text + (f", {lines[-1]}" if lines else ""), hint, name)
    hint = hint.format(peers=f" at {', '.join(peers)}" if peers else "")
    if name:
        return WorkerError(f"the child process that ran llama.cpp was ended by {name}: {reason}", hint, name)
    return WorkerError(f"the child process ended with status {code}: {last}", hint)


# ---- the child's side ----------------------------------------------------------------------------------------------

_Request = tuple[int, Any, threading.Event]  # its number, its value, and what is set when it is to stop
_say: Callable[..., None] | None = None  # to the parent, where there is one
_parent = 0  # its number


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let this process allocate ``more`` bytes of address space in the block, where the platform can limit it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    wanted = pages * resource.getpagesize() + more
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def within(seconds: float, what: str, hint: str) -> Iterator[None]:
    """In a child: its parent kills it if the block takes longer, and blames ``what`` for that or for its death.

    For foreign code that may stay in one call of C, where no other thread runs, not even the one that waits for the end
    of stdin. On Linux the kernel therefore kills the child if its parent dies meanwhile; nothing is cleaned up then.
    Outside a child nothing happens.
    """
    if _say is None:
        yield
        return
    try:
        _end_with_parent(_SIGKILL)
        if os.getppid() != _parent:  # it died before the kernel knew
            raise BrokenPipeError("the parent is gone")
        _say("within", seconds, what, hint)
        yield
    finally:
        _end_with_parent(0)
        _say("within", None)


def note_on_card(model: str, device: str, description: str) -> None:
    """In a child: tell the parent that ``device`` has layers of ``model``, for what it says if a driver crashes."""
    if _say is not None:
        _say("on_card", model, device, description)


def _end_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent dies; 0 for none. See prctl(2), PR_SET_PDEATHSIG."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _receive(lines: IO[str], requests: queue.SimpleQueue[_Request | None]) -> None:
    """Read the parent's lines to their end, in a thread of its own so that the running request can be stopped."""
    number, stopping = -1, threading.Event()
    for line in lines:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:  # cut short by the parent's death
            break
        if "request" in message:
            number, stopping = number + 1, threading.Event()
            requests.put((number, message["request"], stopping))
        elif message["stop"] == number:
            stopping.set()
    stopping.set()
    requests.put(None)


def _serve(module: Any, requests: queue.SimpleQueue[_Request | None], say: Callable[..., None]) -> None:
    """Answer requests until the end of stdin."""

    def emit(event: Event) -> None:
        say("event", event)

    def give(number: int, kind: type[object], value: object) -> None:
        say("result", number, plain.dump(value, kind))

    def fail(number: int, error: GgufspecError) -> None:
        say("error", number, error.message, error.hint, error.exit_code)

    if (first := requests.get()) is None:
        return
    try:
        spec, stopping = plain.load(module.Spec, first[1]), first[2]
        if not hasattr(module, "opened"):
            give(0, module.Result, module.run(spec, emit, stopping))
            return
        with module.opened(spec, emit, stopping) as serving:
            give(0, module.Ready, serving.ready)
            while (request := requests.get()) is not None:
                number, value, stopping = request
                try:
                    reply = serving.answer(plain.load(module.Request, value), emit, stopping)
                except GgufspecError as error:
                    fail(number, error)
                else:
                    give(number, module.Reply, reply)
    except GgufspecError as error:
        fail(0, error)


def main(argv: list[str]) -> None:
    """The child's side."""
    global _parent, _say
    _parent = os.getppid()
    module_name, verbosity = argv
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on an abort: ggml/src/ggml.c
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints to stdout goes to stderr
    if verbosity == "-v":
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stderr)
    else:  # why CUDA aborts is in llama.cpp's log alone: ggml_cuda_error in ggml/src/ggml-cuda/ggml-cuda.cu
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        logging.getLogger("ggufspec.llamacpp").addHandler(errors)

    def say(*message: object) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def receive() -> None:
        _receive(sys.stdin, requests)
        time.sleep(_GRACE_S)  # enough for a token and the result
        os._exit(1)

    _say = say
    requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
    module = importlib.import_module(module_name)
    threading.Thread(target=receive, daemon=True).start()
    try:
        _serve(module, requests, say)
        channel.flush()
    except BrokenPipeError:  # the parent is gone
        pass
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an interpreter that ends would wait for the thread at stdin
    os._exit(0)  # nothing is left to do, and CUDA's teardown may abort


if __name__ == "__main__":
    from ggufspec import worker  # the module that jobs import is another one than this

    worker.main(sys.argv[1:])
