"""The model behind the endpoint: one child process, one answer at a time, and a fair queue in front of it.

A thread owns the child. Requests come from the event loop and wait in a queue that serves clients in turn; events and
replies go back to the loop. If a child dies, only its current answer is lost: it is restarted at once. A child that
does not stop when asked is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ggufspec.child import Session
from ggufspec.errors import BlamedError, ChildError, GgufspecError
from ggufspec.serve import session

_STUCK_S = 300.0  # time in which even a batch of a prompt on a slow machine ends, when an answer is to stop
_WAITING_S = 10.0  # between two ``waiting`` events

_Item = TypeVar("_Item")


class BusyError(GgufspecError):
    """The queue is full."""


class GoneError(GgufspecError):
    """The child died, cannot be started, or the server ends; a retry may work."""


class RefusedError(GgufspecError):
    """A request that cannot be answered, with details from the child (its event ``refused``)."""

    def __init__(self, error: GgufspecError, details: Mapping[str, Any]) -> None:
        super().__init__(error.message, error.hint)
        self.details = dict(details)


class FairQueue(Generic[_Item]):
    """First come, first served, but clients in turn: one with many requests holds up only its own."""

    def __init__(self) -> None:
        self._clients: dict[str, deque[_Item]] = {}  # the next client in turn is first

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def put(self, client: str, item: _Item) -> None:
        self._clients.setdefault(client, deque()).append(item)

    def get(self) -> _Item:
        """Take the next client's oldest item and move that client to the end.

        Raises:
            LookupError: no client has an item.
        """
        client = next(iter(self._clients), "")
        items = self._clients.pop(client)
        item = items.popleft()
        if items:
            self._clients[client] = items
        return item

    def remove(self, item: _Item) -> bool:
        """Remove this item; return True if it was there."""
        for client, items in self._clients.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._clients[client]
                return True
        return False

    def clear(self) -> list[_Item]:
        found = [item for items in self._clients.values() for item in items]
        self._clients.clear()
        return found


class Answer:
    """A request and its results, for one task of the event loop; ``reply`` is set at the end."""

    def __init__(self, engine: Engine, request: session.Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.reply: session.Reply | None = None
        self.cancelled = False
        self.details: dict[str, Any] = {}  # details of a refusal
        self._engine, self._loop = engine, loop
        self._items: asyncio.Queue[dict[str, Any] | session.Reply | GgufspecError] = asyncio.Queue()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the child's events as they come, and ``waiting`` in between; ``reply`` is set after the last.

        Raises:
            RefusedError: the request cannot be answered.
            GoneError: the child died, or the server ends.
        """
        while True:
            try:
                async with asyncio.timeout(_WAITING_S):
                    item = await self._items.get()
            except TimeoutError:
                yield {"event": "waiting"}
                continue
            if isinstance(item, session.Reply):
                self.reply = item
                return
            if isinstance(item, GgufspecError):
                raise item
            yield item

    def cancel(self) -> None:
        """Cancel: leave the queue, or end with the round that is being decoded."""
        self.cancelled = True
        self._engine.cancel(self)

    def put(self, item: dict[str, Any] | session.Reply | GgufspecError) -> None:
        """Hand an item to the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class Engine:
    """The child process and the queue in front of it.

    Args:
        module: dotted name of the child's job.
        most_waiting: requests that may wait.
        verbose: let llama.cpp's log through to stderr.

    Attributes:
        spec: what to load.
        on_restart: called from the engine's thread with the reason when the child is restarted.
        ready: description of the last loaded pair.
        failure: why no child runs; None while one does, or during the first start.
    """

    def __init__(
        self,
        spec: session.Spec,
        *,
        module: str = session.__name__,
        most_waiting: int = 64,
        verbose: bool = False,
    ) -> None:
        self.spec = spec
        self.ready: session.Ready | None = None
        self.failure: GgufspecError | None = None
        self._module, self._most = module, most_waiting
        self.on_restart: list[Callable[[str], None]] = []
        self._session = Session(verbose=verbose)
        self._waiting: FairQueue[Answer] = FairQueue()
        self._running: Answer | None = None
        self._ending = self._closed = self._is_down = False
        self._changed = threading.Condition()
        self._first: Future[session.Ready] = Future()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> session.Ready:
        """Start the child and wait until it is ready.

        Raises:
            GgufspecError: it cannot load the pair.
        """
        self._thread.start()
        return self._first.result()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def is_ending(self) -> bool:
        """True if no more requests are accepted."""
        return self._ending

    def submit(self, request: session.Request, client: str) -> Answer:
        """Put a request into the queue; call in the event loop.

        Raises:
            BusyError: the queue is full.
            GoneError: the server ends.
        """
        answer = Answer(self, request, asyncio.get_running_loop())
        with self._changed:
            if self._ending:
                raise _ends()
            if len(self._waiting) >= self._most:
                raise BusyError(f"{self._most} requests wait already", "try again in some seconds")
            self._waiting.put(client, answer)
            self._changed.notify()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Remove an answer from the queue, or stop it."""
        with self._changed:
            if self._waiting.remove(answer):
                answer.put(_ends())
                return
            if self._running is not answer:
                return
            self._session.stop()  # under the lock; otherwise the next answer might be stopped
        with contextlib.suppress(RuntimeError):  # the loop has ended: ``close`` kills
            asyncio.get_running_loop().call_later(_STUCK_S, self._kill_if_at, answer)

    def _kill_if_at(self, answer: Answer) -> None:
        if self._running is answer:
            self._session.kill()

    def drain(self) -> None:
        """Accept no more requests, and refuse the waiting ones; the running answer goes on."""
        with self._changed:
            self._ending = True
            for answer in self._waiting.clear():
                answer.put(_ends())

    def cut(self) -> None:
        """End the running answer with the round that is being decoded."""
        self.drain()
        with self._changed:
            if self._running is not None:
                self._running.cancelled = True
                self._session.stop()

    def close(self, patience_s: float = 2.0) -> None:
        """End the child in any state; a running answer has ``patience_s`` to stop."""
        self.cut()
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is None:
            return
        if self._first.done():
            self._thread.join(patience_s)
        while self._thread.is_alive():  # it is loading or stuck
            self._session.kill()
            self._thread.join(0.1)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._first.set_exception(error)
            return
        assert self.ready is not None
        self._first.set_result(self.ready)
        try:
            while (answer := self._next()) is not None:
                self._answer(answer)
                with self._changed:
                    self._running = None
        finally:
            self._session.close()

    def _open(self) -> None:
        try:
            self.ready = self._session.open(self._module, self.spec, session.Ready)
        except GgufspecError as error:
            self.failure = error
            raise
        except OSError as error:  # no process, memory or file
            self.failure = GgufspecError(str(error))
            raise self.failure from None
        self.failure, self._is_down = None, False

    def _next(self) -> Answer | None:
        with self._changed:
            while not self._closed:
                if len(self._waiting):
                    self._running = self._waiting.get()
                    return self._running
                self._changed.wait()
        return None

    def _answer(self, answer: Answer) -> None:
        def on_event(event: dict[str, Any]) -> None:
            if answer.cancelled:  # cancelled before the child had the request
                self._session.stop()
            if event["event"] == "refused":
                answer.details = {key: value for key, value in event.items() if key != "event"}
            else:
                answer.put(event)

        try:
            if not self._session.is_open:
                self._reopen(self.failure.message if self.failure else "it ended while it was idle")
            if answer.cancelled:  # cancelled during the restart
                raise _ends()
            answer.put(self._session.ask(answer.request, session.Reply, on_event=on_event))
        except ChildError as error:
            self.failure = error  # until it is loaded again
            if isinstance(error, BlamedError):  # clients should not retry
                answer.put(RefusedError(error, {}))
            else:
                answer.put(GoneError(f"the model's process ended: {error.message}", "it is started again: try again"))
            with contextlib.suppress(GoneError):  # the next request retries, and reports it
                self._reopen(error.message)
        except GoneError as error:
            answer.put(error)
        except GgufspecError as error:
            answer.put(RefusedError(error, answer.details))
        except Exception as error:  # a bug of ours costs only its own request
            answer.put(GoneError(f"the request failed: {type(error).__name__}: {error}"))

    def _reopen(self, why: str) -> None:
        """Load the pair again; raise GoneError on failure."""
        if self._closed:
            raise _ends()
        if not self._is_down:  # report an unloadable pair once
            self._is_down = True
            for callback in self.on_restart:
                callback(why)
        try:
            self._open()
        except GgufspecError as error:
            raise GoneError(f"the model cannot be loaded: {error.message}", error.hint) from None


def _ends() -> GoneError:
    return GoneError("the server ends", "start it again")
