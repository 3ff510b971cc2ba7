"""A child of :mod:`ggufspec.serve.engine` for its tests: it answers with its prompt, and misbehaves when asked to.

The spec's ``chat_template`` is how it loads: ``slow`` never ends, a path that begins with a slash makes it fail while
there is such a file. A prompt that begins with ``forever`` goes on until it is stopped, ``deaf`` cannot be stopped,
``die`` ends the process, ``refuse`` does not fit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ggufspec import child
from ggufspec.bench.trial import LoadedModel
from ggufspec.decoding.decoder import Statistics
from ggufspec.errors import ModelError, UsageError
from ggufspec.serve.session import Ready, Reply, Request, Spec

__all__ = ["Ready", "Reply", "Request", "Spec", "opened"]


class Echo:
    ready = Ready(LoadedModel("echo", 1, 0, 1), None, (), (), 4096, 1, "")

    def answer(self, request: Request, emit: child.Emit, stopping: threading.Event) -> Reply:
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
        reason = "" if stopping.is_set() else "end"
        took = Statistics(1, 0.0, 1, 0.0, 1, 0, 0, (), (), 0.0, 0.0, reason)
        return Reply(statistics=took, cached=0, sequence=0, target_only_s=None, speculation=False)


@contextmanager
def opened(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Iterator[Echo]:
    if spec.chat_template == "slow":
        threading.Event().wait()
    if spec.chat_template.startswith("/") and Path(spec.chat_template).exists():
        raise ModelError("it cannot be loaded", "another file")
    yield Echo()
