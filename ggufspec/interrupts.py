"""Holds back Ctrl-C and termination signals while a block must complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Held:
    """Hold signals back until the end of the block, or until :meth:`check`; a second one is not held.

    These are SIGINT if it raises KeyboardInterrupt, and SIGTERM and SIGHUP if Python handles them; only in the main
    thread.

    Args:
        wake: called in the signal handler.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._came: int | None = None
        self._before: dict[int, Any] = {}

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._before[number](number, frame)
        self._came = number
        self._wake()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if handler is signal.default_int_handler or (number != signal.SIGINT and callable(handler)):
                    self._before[number] = handler
                    signal.signal(number, self._hold)
        return self

    def check(self) -> None:
        """Call the original handler of a signal that has arrived, which raises KeyboardInterrupt for SIGINT."""
        if self._came is not None:
            number, self._came = self._came, None
            self._before[number](number, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)
        if error is None:
            self.check()
