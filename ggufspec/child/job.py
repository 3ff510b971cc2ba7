"""Events and limits for a job in a child process; its parent enforces the limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Emit = Callable[[Event], None]

GRACE_S = 5.0  # seconds for a child to end after it was asked to
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # linux/prctl.h, asm-generic/signal.h
_say: Callable[..., None] | None = None  # sends a message to the parent, if there is one
_parent = 0  # parent's process id


def begin(parent: int, say: Callable[..., None]) -> None:
    """Set, in a child, the parent's process id and the function that sends messages to the parent."""
    global _parent, _say
    _parent, _say = parent, say


@contextlib.contextmanager
def limited_memory(more: int, *, only_data: bool = False) -> Iterator[None]:
    """Limit this process to ``more`` additional bytes of address space inside the ``with``, if the platform can.

    With ``only_data``, the limit applies to memory that the process writes, not to files that it maps.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    kind, column = (resource.RLIMIT_DATA, 5) if only_data else (resource.RLIMIT_AS, 0)  # column of statm, see proc(5)
    soft, hard = resource.getrlimit(kind)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column])
    wanted = pages * resource.getpagesize() + more
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([wanted, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextlib.contextmanager
def within(seconds: float, what: str, hint: str) -> Iterator[None]:
    """Have the parent kill this child after ``seconds`` in the ``with``, and blame ``what`` for that or for a crash.

    This is for foreign code that may hang in a C call in which no other thread can run, not even the one that waits
    for the end of stdin. On Linux the kernel therefore kills the child, without cleanup, if its parent dies meanwhile.
    Outside a child, this does nothing.
    """
    if _say is None:
        yield
        return
    try:
        _end_with_parent(_SIGKILL)
        if os.getppid() != _parent:  # the parent died before prctl was called
            raise BrokenPipeError("the parent is gone")
        _say("within", seconds, what, hint)
        yield
    finally:
        _end_with_parent(0)
        _say("within", None)


def note_on_card(model: str, card: str, hint: str) -> None:
    """Report, in a child, that the GPU ``card`` holds layers of ``model``, and what to do if its driver crashes."""
    if _say is not None:
        _say("on_card", model, card, hint)


def _end_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent dies; 0 for none. See prctl(2), PR_SET_PDEATHSIG."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
