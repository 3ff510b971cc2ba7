"""Handling of Ctrl-C and termination signals, which can be held back and are acknowledged if stopping takes long."""

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
    """Set the function that is called, from any thread, if stopping after Ctrl-C takes longer than a moment."""
    global _acknowledge
    _acknowledge = call


@contextmanager
def stopping() -> Iterator[None]:
    """Acknowledge Ctrl-C if the block, which stops something, takes longer than a moment."""
    timer = threading.Timer(_MOMENT_S, _acknowledge or (lambda: None))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def held(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Hold signals back until the end of the block if it runs in the main thread; a second signal is not held back.

    SIGINT is held back if it would raise KeyboardInterrupt; SIGTERM and SIGHUP are held back if Python handles them.
    ``wake`` is called when a signal arrives. The yielded function calls the original handler of a signal that has
    arrived; for SIGINT, this raises KeyboardInterrupt.
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
