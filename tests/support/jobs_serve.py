"""A child of :mod:`ggufspec.serve.engine` for its tests: it answers with its prompt, and misbehaves when asked to.

The spec's ``chat_template`` is how it loads: ``slow`` never ends, a path that begins with a slash makes it fail while
there is such a file. A prompt that begins with ``forever`` goes on until it is stopped, ``deaf`` cannot be stopped,
``die`` ends the process, ``refuse`` does not fit, ``hang`` does not come to an end while its prompt is made. With the
template ``together`` it answers two requests at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ggufspec import child
from ggufspec.bench.trial import LoadedModel
from ggufspec.decoding.decoder import Statistics
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.serve.session import ChatJob, ChatReady, ServeReply, ServeRequest


class Echo:
    ready = ChatReady(LoadedModel("echo", 1, 0, 1), None, (), (), 4096, 1, "")

    def answer(self, request: ServeRequest, emit: child.Emit, stopping: threading.Event) -> ServeReply:
        prompt = str(request.prompt)
        if prompt.startswith("refuse"):
            emit({"event": "refused", "code": "context_length_exceeded"})
            raise UsageError("too long", "shorten it")
        emit({"event": "prompt", "tokens": 1})
        emit(
            {
                "event": "round",
                "deltas": [{"content": prompt}],
                "tokens": [1],
                "sources": ["target"],
                "logprobs": [],
                "took": None,
            }
        )
        if prompt.startswith("die"):
            os._exit(3)
        if prompt.startswith("deaf"):
            threading.Event().wait()
        if prompt.startswith("forever"):
            stopping.wait()
        return reply("" if stopping.is_set() else "end")


def reply(reason: str) -> ServeReply:
    took = Statistics(1, 0.0, 1, 0.0, 1, 0, 0, (), (), 0.0, 0.0, reason)
    return ServeReply(statistics=took, cached=0, sequence=0, target_only_s=None, speculation=False)


class EchoTogether:
    """Answers two requests at once: each gets its prompt, and ends with the step after it."""

    ready = ChatReady(LoadedModel("echo", 1, 0, 1), None, (), (), 4096, 2, "")

    def __init__(self) -> None:
        self.running: dict[int, tuple[str, threading.Event]] = {}

    def begin(self, number: int, request: ServeRequest, emit: child.Emit, stopping: threading.Event) -> None:
        prompt = str(request.prompt)
        if prompt.startswith("refuse"):
            raise UsageError("too long", "shorten it")
        if prompt.startswith("hang"):
            with child.within(0.2, "the template", "another one"):
                threading.Event().wait()
        emit({"event": "prompt", "tokens": 1})
        deltas = [{"content": prompt}]
        emit({"event": "round", "deltas": deltas, "tokens": [1], "sources": ["target"], "logprobs": [], "took": None})
        if prompt.startswith("die"):
            os._exit(3)
        self.running[number] = prompt, stopping

    def step(self) -> list[tuple[int, ServeReply | GgufspecError]]:
        ended: list[tuple[int, ServeReply | GgufspecError]] = []
        for number, (prompt, stopping) in [*self.running.items()]:
            if stopping.is_set() or not prompt.startswith("forever"):
                del self.running[number]
                ended.append((number, reply("" if stopping.is_set() else "end")))
        time.sleep(0.01)
        return ended


@contextmanager
def opened(spec: ChatJob, emit: child.Emit, stopping: threading.Event) -> Iterator[Echo | EchoTogether]:
    if spec.chat_template == "slow":
        threading.Event().wait()
    if spec.chat_template.startswith("/") and Path(spec.chat_template).exists():
        raise ModelError("it cannot be loaded", "another file")
    yield EchoTogether() if spec.chat_template == "together" else Echo()
