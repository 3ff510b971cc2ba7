"""The model behind the endpoint: one child process, and a fair queue in front of it.

A thread owns the child, which generates as many answers at once as it has conversation slots. Further requests wait in
a queue that serves clients in turn; events and replies go back to the event loop. If the child dies, it is restarted at
once, so that only its running answers are lost. A child that does not stop when asked is killed.
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

_STUCK_S = 300.0  # time that an answer gets to stop, enough for a prompt batch on a slow machine
_WAITING_S = 10.0  # interval between ``waiting`` events

_Item = TypeVar("_Item")


class QueueFullError(GgufspecError):
    """The queue is full."""


class GoneError(GgufspecError):
    """The child died or cannot be started, or the server is shutting down; a retry may work."""


class RefusedError(GgufspecError):
    """A request that cannot be answered, with details from the child's ``refused`` event."""

    def __init__(self, error: GgufspecError, details: Mapping[str, Any]) -> None:
        super().__init__(error.message, error.hint)
        self.details = dict(details)


class FairQueue(Generic[_Item]):
    """Queue that serves clients in turn, so that a client with many requests delays only itself."""

    def __init__(self) -> None:
        self._clients: dict[str, deque[_Item]] = {}  # items by client, in order of turns

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
        """Remove this item; return True if it was in the queue."""
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


class PendingAnswer:
    """A request and its results, for one task of the event loop; ``reply`` is set at the end."""

    def __init__(self, engine: ServerProcess, request: session.ServeRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.reply: session.ServeReply | None = None
        self.cancelled = False
        self.is_begun = False  # the child has begun to answer
        self.details: dict[str, Any] = {}  # details of a refusal
        self._engine, self._loop = engine, loop
        self._killing: asyncio.TimerHandle | None = None  # timer that kills the child if it does not stop
        self._items: asyncio.Queue[dict[str, Any] | session.ServeReply | GgufspecError] = asyncio.Queue()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the child's events as they arrive, and ``waiting`` in long gaps; ``reply`` is set after the last event.

        Raises:
            RefusedError: the request cannot be answered.
            GoneError: the child died, or the server is shutting down.
        """
        while True:
            try:
                async with asyncio.timeout(_WAITING_S):
                    item = await self._items.get()
            except TimeoutError:
                yield {"event": "waiting"}
                continue
            if isinstance(item, session.ServeReply):
                self.reply = item
                return
            if isinstance(item, GgufspecError):
                raise item
            yield item

    def cancel(self) -> None:
        """Cancel the answer: remove it from the queue, or end it after the round that is being decoded."""
        self.cancelled = True
        self._engine.cancel(self)

    def put(self, item: dict[str, Any] | session.ServeReply | GgufspecError) -> None:
        """Pass an item to the event loop; any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody is waiting
            self._loop.call_soon_threadsafe(self._take, item)

    def _take(self, item: dict[str, Any] | session.ServeReply | GgufspecError) -> None:
        self._items.put_nowait(item)
        if self._killing is not None and not isinstance(item, dict):
            self._killing.cancel()

    def kill_later(self, kill: Callable[[], None]) -> None:
        """Schedule a call of ``kill`` in case no reply arrives for a long time; must be called in the event loop."""
        self._killing = self._loop.call_later(_STUCK_S, kill)


class ServerProcess:
    """The child process and the queue in front of it.

    Args:
        module: dotted name of the child's job.
        most_waiting: maximum number of waiting requests.
        verbose: show llama.cpp's log on stderr.

    Attributes:
        spec: models to load.
        on_restart: called from the engine's thread with the reason when the child is restarted.
        ready: description of the last loaded pair.
        failure: reason why no child is running; None while one is running, or during the first start.
    """

    def __init__(
        self,
        spec: session.ChatJob,
        *,
        module: str = session.__name__,
        most_waiting: int = 64,
        verbose: bool = False,
    ) -> None:
        self.spec = spec
        self.ready: session.ChatReady | None = None
        self.failure: GgufspecError | None = None
        self._module, self._most = module, most_waiting
        self.on_restart: list[Callable[[str], None]] = []
        self._session = Session(verbose=verbose)
        self._waiting: FairQueue[PendingAnswer] = FairQueue()
        self._running: dict[int, PendingAnswer] = {}  # running answers by the child's request number
        self._starting: PendingAnswer | None = None  # answer on its way from the queue to the child
        self._ending = self._closed = self._is_down = False
        self._changed = threading.Condition()
        self._first: Future[session.ChatReady] = Future()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> session.ChatReady:
        """Start the child and wait until it is ready.

        Raises:
            GgufspecError: the pair cannot be loaded.
        """
        self._thread.start()
        return self._first.result()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that are being answered."""
        return len(self._running) + (self._starting is not None)

    @property
    def is_ending(self) -> bool:
        """True if no more requests are accepted."""
        return self._ending

    def submit(self, request: session.ServeRequest, client: str) -> PendingAnswer:
        """Put a request into the queue; must be called in the event loop.

        Raises:
            QueueFullError: the queue is full.
            GoneError: the server is shutting down.
        """
        answer = PendingAnswer(self, request, asyncio.get_running_loop())
        with self._changed:
            if self._ending:
                raise _ends()
            if len(self._waiting) >= self._most:
                raise QueueFullError(f"{self._most} requests wait already", "try again in some seconds")
            self._waiting.put(client, answer)
            self._changed.notify()
        self._session.wake()
        return answer

    def cancel(self, answer: PendingAnswer) -> None:
        """Remove an answer from the queue, or stop it."""
        with self._changed:
            if self._waiting.remove(answer):
                answer.put(_ends())
                return
            number = self._number_of(answer)
            if number is not None:
                self._session.stop(number)
            elif answer is not self._starting:  # it has ended; a starting answer is stopped once sent
                return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and ``close`` kills the child
            answer.kill_later(lambda: self._kill_if_at(answer))

    def _number_of(self, answer: PendingAnswer) -> int | None:
        return next((number for number, one in [*self._running.items()] if one is answer), None)

    def _kill_if_at(self, answer: PendingAnswer) -> None:
        if self._number_of(answer) is not None:
            self._session.kill()

    def drain(self) -> None:
        """Accept no more requests, and refuse the waiting ones; running answers continue."""
        with self._changed:
            self._ending = True
            for answer in self._waiting.clear():
                answer.put(_ends())

    def cut(self) -> None:
        """End the running answers after the round that is being decoded."""
        self.drain()
        with self._changed:
            if self._starting is not None:
                self._starting.cancelled = True
            for number, answer in self._running.items():
                answer.cancelled = True
                self._session.stop(number)

    def close(self, patience_s: float = 2.0) -> None:
        """End the child in any state; running answers have ``patience_s`` seconds to stop."""
        self.cut()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._session.wake()
        if self._thread.ident is None:
            return
        if self._first.done():
            self._thread.join(patience_s)
        while self._thread.is_alive():  # the child is loading or stuck
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
            while self._work_on():
                pass
        finally:
            self._session.close()

    def _open(self) -> None:
        try:
            self.ready = self._session.open(self._module, self.spec, session.ChatReady)
        except GgufspecError as error:
            self.failure = error
            raise
        except OSError as error:  # the child could not be started, e.g. for lack of memory
            self.failure = GgufspecError(str(error))
            raise self.failure from None
        self.failure, self._is_down = None, False

    def _work_on(self) -> bool:
        """Send a waiting request if the child has a free slot, else wait for its output; return False once closed."""
        assert self.ready is not None
        with self._changed:
            while not (self._closed or self._running or len(self._waiting)):
                self._changed.wait()
            if self._closed and not self._running:
                return False
            if len(self._waiting) and len(self._running) < self.ready.parallel:
                self._starting = self._waiting.get()
        try:
            self._send() if self._starting else self._receive()
        except ChildError as error:
            self._lose(error)
        except Exception as error:  # a bug of ours must fail only the running requests
            self._lose(ChildError(f"{type(error).__name__}: {error}", ""))
        return True

    def _send(self) -> None:
        """Send the starting request to the child, and restart the child first if it has ended."""
        answer = self._starting
        assert answer is not None
        try:
            if not self._session.is_open:
                self._lose(ChildError(self.failure.message if self.failure else "it ended while it was idle", ""))
            if self._closed or answer.cancelled:
                raise _ends()
            if self.failure is not None:
                raise GoneError(f"the model cannot be loaded: {self.failure.message}", self.failure.hint)
            number = self._session.begin(answer.request)
        except GoneError as error:
            answer.put(error)
        except Exception as error:  # a bug of ours must fail only this request
            answer.put(GoneError(f"the request failed: {type(error).__name__}: {error}"))
        else:
            with self._changed:
                self._running[number], self._starting = answer, None
                if answer.cancelled:
                    self._session.stop(number)
        finally:
            self._starting = None

    def _receive(self) -> None:
        """Wait for a message from the child, and pass it to the request that it belongs to."""

        def on_event(number: int, event: dict[str, Any]) -> None:
            answer = self._running[number]
            answer.is_begun = True
            if event["event"] == "refused":
                answer.details = {key: value for key, value in event.items() if key != "event"}
            else:
                answer.put(event)

        received = self._session.receive(session.ServeReply, on_event)
        if received is None:
            return
        number, reply = received
        with self._changed:
            answer = self._running.pop(number)
        answer.put(RefusedError(reply, answer.details) if isinstance(reply, GgufspecError) else reply)

    def _lose(self, error: ChildError) -> None:
        """Tell the running requests that the child has died, and restart it."""
        self.failure = error  # cleared when the pair is loaded again
        with self._changed:
            lost, self._running = self._running, {}
        gone = GoneError(f"the model's process ended: {error.message}", "it is started again: try again")
        blamed = min((number for number, answer in lost.items() if not answer.is_begun), default=None)
        for number, answer in lost.items():
            is_blamed = isinstance(error, BlamedError) and number == blamed  # its client should not try again
            answer.put(RefusedError(error, {}) if is_blamed else gone)
        with contextlib.suppress(GoneError):  # the next request retries, and reports a failure
            self._reopen(error.message)

    def _reopen(self, why: str) -> None:
        """Load the pair again; raise GoneError on failure."""
        if self._closed:
            raise _ends()
        if not self._is_down:  # report only once that the pair cannot be loaded
            self._is_down = True
            for callback in self.on_restart:
                callback(why)
        try:
            self._open()
        except GgufspecError as error:
            raise GoneError(f"the model cannot be loaded: {error.message}", error.hint) from None


def _ends() -> GoneError:
    return GoneError("the server ends", "start it again")
