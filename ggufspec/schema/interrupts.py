"""Ctrl-C and termination signals: held back while a block must complete, and acknowledged where stopping takes long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_MOMENT_S = 0.1
_acknowledge: Callable[[], None] | None = None

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def acknowledge_with(call: Callable[[], None]) -> None:
    """Call this, from any thread, where what Ctrl-C interrupted takes longer to stop than a moment."""
    global _acknowledge
    _acknowledge = call


@contextmanager
def stopping() -> Iterator[None]:
    """Stop something in the block, after Ctrl-C."""
    timer = threading.Timer(_MOMENT_S, _acknowledge or (lambda: None))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def held(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Hold signals back until the end of the block, in the main thread; a second signal is not held.

    Held are SIGINT if it raises KeyboardInterrupt, and SIGTERM and SIGHUP if Python handles them. The handler calls
    ``wake``. The yielded function calls the original handler of a signal that has arrived: KeyboardInterrupt for
    SIGINT.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        if came:
            before[number](number, frame)
        came[:] = [number]
        wake()

    def check() -> None:
        if came:
            number = came.pop()
            before[number](number, None)

    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if handler is signal.default_int_handler or (number != signal.SIGINT and callable(handler)):
                before[number] = handler
                signal.signal(number, hold)
    try:
        yield check
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)
    check()
