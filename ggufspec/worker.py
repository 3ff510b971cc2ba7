"""Runs a job in a child process, so that an abort of llama.cpp ends the job and not the program.

The child is ``python -m ggufspec.worker MODULE``; the module has a ``Spec``, a ``Result`` and
``run(spec, emit, stopping) -> Result``. The spec goes in on stdin as JSON, events and the result come out as lines of
JSON. An end of stdin asks the child to stop: Ctrl-C in the parent, or the parent's death. It ends within ``_GRACE_S``
then, whatever llama.cpp is doing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter

from ggufspec.errors import GgufspecError, ModelError, UsageError, WorkerError

Event = dict[str, Any]
Emit = Callable[[Event], None]
Result = TypeVar("Result")

_GRACE_S = 5.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a job; ``partial`` is the result as far as it came, or None."""

    def __init__(self, partial: Any) -> None:
        super().__init__()
        self.partial = partial


def call(
    module: str, spec: object, result_type: type[Result], *, on_event: Emit | None = None, verbose: bool = False
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
        WorkerError: the child ended without a result.
        Interrupted: Ctrl-C; holds what the child had when it was asked to stop.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, module, "-v" if verbose else "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else complaints,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent, which asks the child to stop
        )
        assert child.stdin is not None
        assert child.stdout is not None
        listener = _Listener(child.stdout, on_event)
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps({"spec": TypeAdapter(type(spec)).dump_python(spec, mode="json")}) + "\n")
                child.stdin.flush()
            listener.listen()
            child.wait()
        except KeyboardInterrupt:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            with contextlib.suppress(TimeoutError):
                listener.listen(_GRACE_S)
            partial = None if listener.result is None else TypeAdapter(result_type).validate_python(listener.result)
            raise Interrupted(partial) from None
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            if child.poll() is None:
                child.kill()
                child.wait()
            listener.close()
        if listener.error is not None:
            raise listener.error
        if listener.result is None:
            complaints.seek(0)
            raise _died(child.returncode, complaints.read())
        return TypeAdapter(result_type).validate_python(listener.result)


class _Listener:
    """Takes the child's messages: events, then one result or one error.

    A thread reads them, since an interrupted read would lose the part of a line that it had.
    """

    def __init__(self, lines: IO[str], on_event: Emit | None) -> None:
        self.on_event = on_event
        self.result: Any = None
        self.error: GgufspecError | None = None
        self._lines = lines
        self._arrived: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the child has closed its end
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last words of a child that died
                self._arrived.put(json.loads(line))
        self._arrived.put(None)

    def listen(self, patience_s: float = math.inf) -> None:
        """Take messages until the child closes its end.

        Raises:
            TimeoutError: it has not within ``patience_s``.
        """
        until = time.monotonic() + patience_s
        while True:
            left = until - time.monotonic()
            try:
                message = self._arrived.get(timeout=None if math.isinf(left) else max(left, 0))
            except queue.Empty:
                raise TimeoutError from None
            if message is None:
                return
            if "result" in message:
                self.result = message["result"]
            elif "error" in message:
                kind = {2: UsageError, 1: ModelError}.get(message["exit_code"], GgufspecError)
                self.error = kind(message["error"], message["hint"])
            elif self.on_event is not None:
                self.on_event(message)

    def close(self) -> None:
        """Let go of the child, which has ended."""
        self._reader.join()
        self._lines.close()


def _died(code: int, stderr: str) -> WorkerError:
    """The error for a child that ended without a word, with llama.cpp's last words."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "GGML_ASSERT" in line or "error" in line.lower()]
    last = (telling or lines or ["it said nothing"])[-1]
    if code < 0:
        name = signal.Signals(-code).name
        reason = "out of memory, most likely" if name == "SIGKILL" else last
        return WorkerError(
            f"the child process that ran llama.cpp was ended by {name}: {reason}",
            "lower -c, -ngl or -ngld if memory is short; -v shows llama.cpp's log",
        )
    return WorkerError(f"the child process ended with status {code}: {last}", "-v shows llama.cpp's log")


def main(argv: list[str]) -> None:
    """The child's side."""
    module_name, verbosity = argv
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on an abort: ggml/src/ggml.c
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints to stdout goes to stderr
    if verbosity == "-v":
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stderr)

    def emit(event: Event) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    module = importlib.import_module(module_name)
    spec = TypeAdapter(module.Spec).validate_python(json.loads(sys.stdin.readline())["spec"])
    stopping = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        stopping.set()
        time.sleep(_GRACE_S)  # enough for a token and the result; not for the rest of a model's file
        os._exit(1)

    threading.Thread(target=await_end, daemon=True).start()
    try:
        result = module.run(spec, emit, stopping)
        emit({"result": TypeAdapter(module.Result).dump_python(result, mode="json")})
    except GgufspecError as error:
        emit({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})
    except BrokenPipeError:  # the parent is gone
        pass
    channel.flush()
    os._exit(0)  # nothing of value is left, and CUDA's teardown may abort


if __name__ == "__main__":
    main(sys.argv[1:])
