"""Ctrl-C, held back while what it would break into must be done whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Held:
    """Holds Ctrl-C back until the block's end, or until :meth:`check`; a second one is not held.

    It does nothing where Ctrl-C does not raise KeyboardInterrupt here: in other threads, and where the caller has a
    handler of its own.

    Args:
        wake: called when one has come; safe in the handler of a signal.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._came = False
        self._holds = False

    def _hold(self, _: int, __: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
        self._wake()

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._holds = True
            signal.signal(signal.SIGINT, self._hold)
        return self

    def check(self) -> None:
        """Raise KeyboardInterrupt if one has come."""
        if self._came:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()
