"""The child's side of :class:`ggufspec.child.Session`: reads requests, runs the job, writes its messages."""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from ggufspec.child import job
from ggufspec.child.job import Event
from ggufspec.errors import GgufspecError
from ggufspec.schema import codec

_IDLE_S = 1.0
_Request = tuple[int, Any, threading.Event]  # its number, its value, and the event that stops it


def _receive(lines: IO[str], requests: queue.SimpleQueue[_Request | None]) -> None:
    """Read the parent's lines to their end, in a separate thread so that the running request can be stopped."""
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


def _next(
    requests: queue.SimpleQueue[_Request | None], idle: Callable[[Callable[[], bool]], bool] | None
) -> _Request | None:
    """Wait for the next request; call ``idle`` once a second meanwhile, until it has nothing left to do.

    Its argument returns True while no request has come.
    """
    while idle is not None:
        try:
            return requests.get(timeout=_IDLE_S)
        except queue.Empty:
            try:
                idle = idle if idle(requests.empty) else None
            except GgufspecError:  # the next request reports the failure if it matters there
                idle = None
    return requests.get()


def _serve(
    module: Any,
    requests: queue.SimpleQueue[_Request | None],
    say: Callable[..., None],
    prepare: Callable[[dict[str, str]], None],
) -> None:
    """Answer requests until the end of stdin. A spec may have an ``environment`` to set before llama.cpp is loaded."""

    def emit(event: Event) -> None:
        say("event", event)

    def give(number: int, kind: type[object], value: object) -> None:
        say("result", number, codec.dump(value, kind))

    def fail(number: int, error: GgufspecError) -> None:
        say("error", number, error.message, error.hint, error.exit_code)

    if (first := requests.get()) is None:
        return
    try:
        spec, stopping = codec.load(module.Spec, first[1]), first[2]
        prepare(getattr(spec, "environment", {}))
        if not hasattr(module, "opened"):
            give(0, module.Result, module.run(spec, emit, stopping))
            return
        with module.opened(spec, emit, stopping) as serving:
            give(0, module.Ready, serving.ready)
            while (request := _next(requests, getattr(serving, "idle", None))) is not None:
                number, value, stopping = request
                try:
                    reply = serving.answer(codec.load(module.Request, value), emit, stopping)
                except GgufspecError as error:
                    fail(number, error)
                else:
                    give(number, module.Reply, reply)
    except GgufspecError as error:
        fail(0, error)


def main(argv: list[str]) -> None:
    """Run the child's side."""
    parent = os.getppid()
    module_name, verbosity = argv
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on an abort: ggml/src/ggml.c
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints to stdout goes to stderr
    if verbosity == "-v":
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        logging.getLogger("ggufspec").setLevel(logging.DEBUG)  # llama.cpp's log, and of other libraries only warnings
    else:  # only llama.cpp's log says why CUDA aborts: ggml_cuda_error in ggml/src/ggml-cuda/ggml-cuda.cu
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        logging.getLogger("ggufspec.llamacpp").addHandler(errors)

    def say(*message: object) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def receive() -> None:
        _receive(sys.stdin, requests)
        time.sleep(job.GRACE_S)  # enough for a token and the result
        os._exit(1)

    job.begin(parent, say)
    requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
    module = importlib.import_module(module_name)
    threading.Thread(target=receive, daemon=True).start()
    try:
        _serve(module, requests, say, os.environ.update)
        channel.flush()
    except BrokenPipeError:  # the parent is gone
        pass
    except Exception:
        traceback.print_exc()
        os._exit(1)  # a normal exit would wait for the thread at stdin
    os._exit(0)  # nothing is left to do, and CUDA's teardown may abort


if __name__ == "__main__":
    main(sys.argv[1:])
