"""A session for tests of :mod:`ggufspec.child`: it counts as often as it is asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ggufspec import child
from tests.support.jobs_call import Result, Spec, count


@dataclass(frozen=True)
class Ready:
    pid: int


class Counting:
    ready = Ready(os.getpid())

    def answer(self, request: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
        return count(request.count, request.how, emit, stopping)


@contextmanager
def opened(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Iterator[Counting]:
    count(spec.count, spec.how, emit, stopping)
    yield Counting()
    if spec.how.startswith("/"):
        Path(spec.how).write_text("freed", encoding="utf-8")
