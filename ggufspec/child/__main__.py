"""Child's side of :class:`ggufspec.child.Session`: reading requests, running the job and writing messages."""

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
from typing import IO, Any, get_type_hints

from ggufspec.child import job
from ggufspec.child.job import Emit
from ggufspec.errors import GgufspecError
from ggufspec.schema import codec

_IDLE_S = 1.0
_Request = tuple[int, Any, threading.Event]  # a request's number, its value, and the event that stops it


def _receive(
    lines: IO[str], requests: queue.SimpleQueue[_Request | None], stopping: dict[int, threading.Event]
) -> None:
    """Read lines from the parent until stdin ends, in a separate thread so that running requests can be stopped.

    ``stopping`` holds the stop events of the unanswered requests, by number.
    """
    number = -1
    for line in lines:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:  # truncated by the parent's death
            break
        if "request" in message:
            number += 1
            stopping[number] = threading.Event()
            requests.put((number, message["request"], stopping[number]))
        elif (asked := stopping.get(message["stop"])) is not None:
            asked.set()
    for asked in [*stopping.values()]:
        asked.set()
    requests.put(None)


def _next(
    requests: queue.SimpleQueue[_Request | None], idle: Callable[[Callable[[], bool]], bool] | None
) -> _Request | None:
    """Wait for the next request; call ``idle`` once a second meanwhile, until it has nothing left to do.

    The argument of ``idle`` returns True while no request has come.
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
    stopping: dict[int, threading.Event],
    say: Callable[..., None],
    prepare: Callable[[dict[str, str]], None],
) -> None:
    """Answer requests until the end of stdin. A spec may have an ``environment`` to set before llama.cpp is loaded."""

    def emitter(number: int) -> Emit:
        return lambda event: say("event", number, event)

    def give(number: int, kind: Any, value: object) -> None:
        stopping.pop(number, None)
        say("result", number, codec.dump(value, kind))

    def fail(number: int, error: GgufspecError) -> None:
        stopping.pop(number, None)
        say("error", number, error.message, error.hint, error.exit_code)

    if (first := requests.get()) is None:
        return
    try:
        opened = getattr(module, "opened", None)
        types = get_type_hints(opened or module.run)
        spec = codec.load(types["spec"], first[1])
        prepare(getattr(spec, "environment", {}))
        if opened is None:
            give(0, types["return"], module.run(spec, emitter(0), first[2]))
            return
        with opened(spec, emitter(0), first[2]) as serving:
            give(0, type(serving.ready), serving.ready)
            answer = getattr(serving, "answer", None)
            types, running = get_type_hints(answer or serving.begin), 0
            while True:
                if running and requests.empty():
                    for number, outcome in serving.step():
                        running -= 1
                        if isinstance(outcome, GgufspecError):
                            fail(number, outcome)
                        else:
                            give(number, type(outcome), outcome)
                    continue
                if (request := _next(requests, getattr(serving, "idle", None))) is None:
                    return
                number, value, stop = request
                try:
                    asked = codec.load(types["request"], value)
                    if answer is not None:
                        give(number, types["return"], answer(asked, emitter(number), stop))
                    else:
                        serving.begin(number, asked, emitter(number), stop)
                        running += 1
                except GgufspecError as error:
                    fail(number, error)
    except GgufspecError as error:
        fail(0, error)


def main(argv: list[str]) -> None:
    """Run the child's side."""
    parent = os.getppid()
    module_name, verbosity = argv
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on an abort: ggml/src/ggml.c
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything that a library prints to stdout goes to stderr
    if verbosity == "-v":
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        logging.getLogger("ggufspec").setLevel(logging.DEBUG)  # llama.cpp's log; other libraries only warn
    else:  # only llama.cpp's log says why CUDA aborts: ggml_cuda_error in ggml/src/ggml-cuda/ggml-cuda.cu
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        logging.getLogger("ggufspec.llamacpp").addHandler(errors)

    def say(*message: object) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def receive() -> None:
        _receive(sys.stdin, requests, stopping)
        time.sleep(job.GRACE_S)  # enough to finish a token and send the result
        os._exit(1)

    job.begin(parent, say)
    requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
    stopping: dict[int, threading.Event] = {}
    module = importlib.import_module(module_name)
    threading.Thread(target=receive, daemon=True).start()
    try:
        _serve(module, requests, stopping, say, os.environ.update)
        channel.flush()
    except BrokenPipeError:  # the parent is gone
        pass
    except Exception:
        traceback.print_exc()
        os._exit(1)  # a normal exit would wait for the thread at stdin
    os._exit(0)  # nothing is left to do, and CUDA's teardown may abort


if __name__ == "__main__":
    main(sys.argv[1:])
