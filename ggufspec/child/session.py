"""The parent's side: opens, asks and ends a child process."""

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
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from ggufspec.child.death import OnCard, died
from ggufspec.child.job import GRACE_S, Emit
from ggufspec.errors import BlamedError, ChildError, GgufspecError, ModelError, UsageError
from ggufspec.schema import codec, interrupts

Outcome = tuple[str, int, *tuple[Any, ...]]  # as received
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
    """Run the job of ``module``, a dotted name, in a child process: takes its ``Spec``, returns its ``Result``.

    Events go to ``on_event`` as they come; ``verbose`` lets llama.cpp's log through to stderr.

    Raises:
        GgufspecError: raised by the job.
        ChildError: the child ended without a result; ``ended_by`` names the signal, or is ``deadline``.
        Interrupted: Ctrl-C; has the unfinished result.
    """
    with Session(verbose=verbose) as session:
        return session.open(module, spec, result_type, on_event=on_event)


class Session:
    """A child process that is opened once and answers many requests.

    ``open(module, Spec(…), Ready)`` starts it, ``ask(Request(…), Reply)`` sends a request. Call all methods except
    :meth:`stop` and :meth:`kill` from one thread. A session can be reopened at any time, also after its child has died.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._child: _Child | None = None

    @property
    def is_open(self) -> bool:
        return self._child is not None and self._child.lives

    def open(self, module: str, spec: object, ready_type: type[Result], *, on_event: Emit | None = None) -> Result:
        """Start the child and send its spec; a previous child is ended. An exception from ``on_event`` ends it, too.

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

    def stop(self) -> None:
        """Ask the running request, if any, to stop at its next token; its reply has what it got by then.

        May be called by any thread and from a signal handler.
        """
        if child := self._child:
            child.stop()

    def kill(self) -> None:
        """Kill the child; a thread that waits for it gets a ChildError. Any thread may call it."""
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

    A thread reads them, because an interrupted read would lose part of a line. The newest outcome is retained, so that
    an interrupted caller can wait for it again.
    """

    def __init__(self, module: str, *, verbose: bool) -> None:
        self.works = False  # a request is unanswered
        self._number = -1  # number of the newest request
        self._stopped = -1  # number of the request to stop
        self._writing = threading.Lock()
        self._outcome: Outcome | None = None  # of the newest request
        self._ended = False
        self._on_cards: list[OnCard] = []
        self._limit: tuple[float, float, str, str] | None = None  # deadline, and the arguments of ``within``
        self._arrived: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()  # None at the end; [] is no message
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._logged_bytes = 0  # before the newest request
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
    def stops(self) -> bool:
        return self._stopped == self._number

    def send(self, request: object) -> None:
        self._number += 1
        self.works = True
        self._peers = getattr(request, "rpc", self._peers)
        self._logged_bytes = os.fstat(self._log.fileno()).st_size
        line = json.dumps({"request": codec.dump(request)})
        with self._writing:
            self._write(line)
        if self.stops:  # asked to stop before it was written
            self.stop()

    def stop(self) -> None:
        """Ask the newest request to stop; if another thread is writing, that thread does it afterwards."""
        if self.works:
            self._stopped = number = self._number
            if self._writing.acquire(blocking=False):
                try:
                    self._write(json.dumps({"stop": number}))
                finally:
                    self._writing.release()

    def outcome(self, on_event: Emit | None, patience_s: float | None = None) -> Outcome:
        """Wait for the outcome of the newest request.

        Raises:
            TimeoutError: none within ``patience_s``.
            ChildError: the child has ended, or exceeded the limit that it set itself.
            KeyboardInterrupt: Ctrl-C; the messages read so far have been handled.
        """
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        with interrupts.held(lambda: self._arrived.put([])) as check:
            while self._outcome is None or self._outcome[1] != self._number:
                check()
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
                    late = f"{what} takes more than {seconds:g} s: it may be a trap"
                    raise BlamedError(late, hint, "deadline") from None
                self._take(message, on_event)
        self.works = False
        return self._outcome

    def _take(self, message: list[Any] | None, on_event: Emit | None) -> None:
        match message:
            case None:
                self._ended = True
            case ["event", event]:
                if on_event is not None:
                    on_event(event)
            case ["on_card", model, card, hint]:
                self._on_cards.append((model, card, hint))
            case ["within", None]:
                self._limit = None
            case ["within", seconds, what, hint]:
                self._limit = (time.monotonic() + seconds, seconds, what, hint)
            case ["result" | "error", *_]:
                self._outcome = tuple(message)

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
            with contextlib.suppress(ValueError):  # a line cut short by the child's death
                self._arrived.put(json.loads(line))
        self._arrived.put(None)

    def _death(self) -> ChildError:
        code = self._process.wait()
        self._log.seek(0)
        log = self._log.read()
        last = log[self._logged_bytes :].strip() or log
        blame = self._limit and self._limit[2:]
        return died(code, last.decode("utf-8", "replace"), self._peers, blame, self._on_cards)
