"""Parent's side: opening, querying and ending a child process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from ggufspec.child.death import OnCard, died
from ggufspec.child.job import GRACE_S, Emit, Event
from ggufspec.errors import BlamedError, ChildError, GgufspecError, ModelError, UsageError
from ggufspec.schema import codec, interrupts

Outcome = tuple[str, int, *tuple[Any, ...]]  # a message as received from the child
Result = TypeVar("Result")

COMMAND = (sys.executable, "-P", "-m", "ggufspec.child")  # followed by a module and -v or -q
_OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Windows' equivalent of a new session


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a job; ``partial`` is the unfinished result, or None."""

    def __init__(self, partial: Any) -> None:
        super().__init__()
        self.partial = partial


def call(
    module: str,
    spec: object,
    result_type: type[Result],
    *,
    on_event: Emit | None = None,
    verbose: bool = False,
) -> Result:
    """Run the job of ``module`` (a dotted name) with a spec in a child process, and return the result.

    Events go to ``on_event`` as they come; ``verbose`` passes llama.cpp's log on to stderr.

    Raises:
        GgufspecError: raised by the job.
        ChildError: the child ended without a result; ``ended_by`` names the signal, or is ``deadline``.
        Interrupted: Ctrl-C; holds the unfinished result.
    """
    with Session(verbose=verbose) as session:
        return session.open(module, spec, result_type, on_event=on_event)


class Session:
    """A child process that is opened once and answers many requests.

    ``open(module, spec, type of ready)`` starts it, ``ask(request, type of reply)`` sends a request and waits for the
    reply. If the child can answer several requests at once, :meth:`begin` sends one and :meth:`receive` waits for
    messages about them. Call all methods except :meth:`stop`, :meth:`wake` and :meth:`kill` from one thread. A session
    can be reopened at any time, even after its child died.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._child: _Child | None = None

    @property
    def is_open(self) -> bool:
        return self._child is not None and self._child.lives

    def open(self, module: str, spec: object, ready_type: type[Result], *, on_event: Emit | None = None) -> Result:
        """Start the child, ending any previous one, and send its spec. An exception from ``on_event`` ends the child.

        Raises:
            GgufspecError: raised by the job; the child has ended.
            ChildError: the child died.
            Interrupted: Ctrl-C; the child has ended. ``partial`` is its unfinished result.
        """
        self.close()
        child = self._child = _Child(module, verbose=self._verbose)
        try:
            child.send(spec)
            result = _result(child.outcome(on_event), ready_type)
        except KeyboardInterrupt:
            with interrupts.stopping():
                try:
                    raise Interrupted(_partial(child.last_outcome(on_event), ready_type)) from None
                finally:
                    self._end(0)
        except BaseException:
            self.close()
            raise
        return result

    def ask(self, request: object, reply_type: type[Result], *, on_event: Emit | None = None) -> Result:
        """Send a request and wait for the reply. An exception from ``on_event`` ends the child.

        Ctrl-C asks the child to stop and waits for its unfinished reply; a second Ctrl-C kills the child.

        Raises:
            GgufspecError: raised by the job; the session continues.
            ChildError: the child has died, or was never opened.
            Interrupted: Ctrl-C; ``partial`` is the unfinished reply, or None if the child was killed.
        """
        child = self._child
        if child is None:
            raise ChildError("the session has no child process", "open the session first")
        try:
            child.send(request)
            try:
                outcome = child.outcome(on_event)
            except KeyboardInterrupt:
                if child.stops:  # a second Ctrl-C
                    raise
                child.stop()
                with interrupts.stopping():
                    raise Interrupted(_partial(child.outcome(on_event), reply_type)) from None
        except Interrupted:
            raise
        except KeyboardInterrupt:
            self._end(0)
            raise Interrupted(None) from None
        except BaseException:
            self._end(0)
            raise
        return _result(outcome, reply_type)

    def begin(self, request: object) -> int:
        """Send a request and return its number.

        Raises:
            ChildError: the session was never opened.
        """
        if self._child is None:
            raise ChildError("the session has no child process", "open the session first")
        return self._child.send(request)

    def receive(
        self, reply_type: type[Result], on_event: Callable[[int, Event], None]
    ) -> tuple[int, Result | GgufspecError] | None:
        """Wait for a message or for :meth:`wake`; return (request number, reply) if the message is a reply.

        Events go to ``on_event`` with the number of their request.

        Raises:
            ChildError: the child has died.
        """
        assert self._child is not None
        outcome = self._child.receive(on_event)
        if outcome is None:
            return None
        try:
            return outcome[1], _result(outcome, reply_type)
        except GgufspecError as error:
            return outcome[1], error

    def wake(self) -> None:
        """Make :meth:`receive` return; any thread may call this."""
        if child := self._child:
            child.wake()

    def stop(self, number: int | None = None) -> None:
        """Ask a request, by default the newest, to stop at its next token; the reply then holds the result so far.

        May be called from any thread and from a signal handler.
        """
        if child := self._child:
            child.stop(number)

    def kill(self) -> None:
        """Kill the child; a thread that waits for it gets a ChildError. Any thread may call this."""
        if child := self._child:
            child.kill()

    def close(self) -> None:
        """End the child: at once if it is busy, otherwise after its cleanup, within ``GRACE_S``."""
        if child := self._child:
            self._end(0 if child.works else GRACE_S)

    def _end(self, patience_s: float) -> None:
        if child := self._child:
            self._child = None
            child.end(patience_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _result(outcome: Outcome, kind: type[Result]) -> Result:
    if outcome[0] == "error":
        _, _, message, hint, exit_code = outcome
        raise {2: UsageError, 1: ModelError}.get(exit_code, GgufspecError)(message, hint)
    return codec.load(kind, outcome[2])


def _partial(outcome: Outcome | None, kind: type[Result]) -> Result | None:
    return None if outcome is None or outcome[0] == "error" else codec.load(kind, outcome[2])


class _Child:
    """A child process and its messages.

    A thread reads the messages, because an interrupted read would lose part of a line. The newest outcome is retained,
    so that an interrupted caller can wait for it again.
    """

    def __init__(self, module: str, *, verbose: bool) -> None:
        self._unanswered: set[int] = set()
        self._number = -1  # number of the newest request
        self._stopped: set[int] = set()  # requests that were asked to stop
        self._to_stop: list[int] = []  # stopped requests that the child has not been told about
        self._writing = threading.Lock()
        self._outcome: Outcome | None = None  # outcome of the newest request
        self._ended = False
        self._on_cards: list[OnCard] = []
        self._limit: tuple[float, float, str, str] | None = None  # deadline, and the arguments of ``within``
        self._arrived: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()  # []: wakes get(); None: end of output
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._logged_bytes = 0  # length of the log before the newest request
        self._peers: Sequence[str] = ()  # RPC workers, from the spec
        self._process = subprocess.Popen(
            [*COMMAND, module, "-v" if verbose else "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches only the parent, which asks the child to stop
            creationflags=_OWN_GROUP,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def works(self) -> bool:
        """True while a request is unanswered."""
        return bool(self._unanswered)

    @property
    def stops(self) -> bool:
        """True if the newest request was asked to stop."""
        return self._number in self._stopped

    def send(self, request: object) -> int:
        self._peers = getattr(request, "rpc", self._peers)
        self._logged_bytes = os.fstat(self._log.fileno()).st_size
        with self._writing:  # stop() leaves its message to this thread until the request is written
            self._number += 1
            self._unanswered.add(self._number)
            try:
                line = json.dumps({"request": codec.dump(request)})
            except BaseException:
                self._unanswered.discard(self._number)
                self._number -= 1
                raise
            self._write(line)
        self._write_stops()  # for requests that were asked to stop meanwhile
        return self._number

    def stop(self, number: int | None = None) -> None:
        """Ask a request to stop; if another thread is writing, that thread does it afterwards."""
        number = self._number if number is None else number
        if number in self._unanswered:
            self._stopped.add(number)
            self._to_stop.append(number)
            self._write_stops()

    def _write_stops(self) -> None:
        while self._to_stop and self._writing.acquire(blocking=False):
            try:
                while self._to_stop:
                    self._write(json.dumps({"stop": self._to_stop.pop()}))
            finally:
                self._writing.release()

    def wake(self) -> None:
        self._arrived.put([])

    def outcome(self, on_event: Emit | None, patience_s: float | None = None) -> Outcome:
        """Wait for the outcome of the newest request.

        Raises:
            TimeoutError: no outcome within ``patience_s``.
            ChildError: the child has ended, or exceeded the limit that it set itself.
            KeyboardInterrupt: Ctrl-C; the messages read so far have been handled.
        """
        until = math.inf if patience_s is None else time.monotonic() + patience_s

        def of_request(_: int, event: Event) -> None:
            if on_event is not None:
                on_event(event)

        with interrupts.held(self.wake) as check:
            while self._outcome is None or self._outcome[1] != self._number:
                check()
                self._receive(of_request, until)
        return self._outcome

    def receive(self, on_event: Callable[[int, Event], None]) -> Outcome | None:
        """Wait for one message or for :meth:`wake`; return the message if it is the outcome of a request.

        Raises:
            ChildError: as in :meth:`outcome`.
        """
        self._outcome = None
        self._receive(on_event, math.inf)
        return self._outcome

    def _receive(self, on_event: Callable[[int, Event], None], until: float) -> None:
        if self._ended:
            raise self._death()
        moment = min(until, self._limit[0] if self._limit else math.inf)
        left = None if moment == math.inf else max(moment - time.monotonic(), 0)
        try:
            message = self._arrived.get(timeout=left)
        except queue.Empty:
            if self._limit is None or self._limit[0] > moment:
                raise TimeoutError from None
            _, seconds, what, hint = self._limit
            late = f"{what} takes more than {seconds:g} s: it may be malicious"
            raise BlamedError(late, hint, "deadline") from None
        self._take(message, on_event)

    def _take(self, message: list[Any] | None, on_event: Callable[[int, Event], None]) -> None:
        match message:
            case None:
                self._ended = True
            case ["event", number, event]:
                on_event(number, event)
            case ["on_card", model, card, hint]:
                self._on_cards.append((model, card, hint))
            case ["within", None]:
                self._limit = None
            case ["within", seconds, what, hint]:
                self._limit = (time.monotonic() + seconds, seconds, what, hint)
            case ["result" | "error", number, *_]:
                self._outcome = tuple(message)
                self._unanswered.discard(number)
                self._stopped.discard(number)

    def last_outcome(self, on_event: Emit | None) -> Outcome | None:
        """Return the outcome of the newest request, after asking the child to end; None if none comes in time."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(TimeoutError, ChildError):
            return self.outcome(on_event, GRACE_S)
        return None

    def kill(self) -> None:
        self._process.kill()

    def end(self, patience_s: float) -> None:
        try:
            with contextlib.suppress(OSError):
                self._stdin.close()
            self._reader.join(patience_s)
        finally:
            if self._reader.is_alive():
                self._process.kill()
            self._process.wait()
            self._reader.join()
            self._stdout.close()
            self._log.close()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the child has ended, or its stdin is closed
            self._stdin.write(line + "\n")
            self._stdin.flush()

    def _read(self) -> None:
        for line in self._stdout:
            with contextlib.suppress(ValueError):  # a line truncated by the child's death
                self._arrived.put(json.loads(line))
        self._arrived.put(None)

    def _death(self) -> ChildError:
        code = self._process.wait()
        self._log.seek(0)
        log = self._log.read()
        last = log[self._logged_bytes :].strip() or log
        blame = self._limit and self._limit[2:]
        return died(code, last.decode("utf-8", "replace"), self._peers, blame, self._on_cards)
