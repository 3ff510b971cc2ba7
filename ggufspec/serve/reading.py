"""Reads an answer as it comes: takes its text, returns what it adds to a chat's message."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from ggufspec.llamacpp.chat_library import Applied, ChatError, Delta, Reader
from ggufspec.prompting.mends import new_id

_SHARE = 0.01  # maximum share of time for reading: an answer is read from its beginning each time
_PIECES = 64  # pieces to try of a broken answer


def _random_id() -> str:
    return new_id(secrets.randbits(64))


class Reading:
    """Reader of one answer.

    Args:
        applied: result of the template for its prompt; None: all of it is content.
        tools: look for calls.
        goes_on: it continues a message of the prompt.
        most_calls: further calls are left out; 0: none are.
        clock: returns seconds.
        make_id: makes the id of a call that has none.

    Attributes:
        is_enough: a call beyond ``most_calls`` has begun.
    """

    def __init__(
        self,
        applied: Applied | None,
        *,
        tools: bool = False,
        goes_on: bool = False,
        most_calls: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        make_id: Callable[[], str] = _random_id,
    ) -> None:
        self._reader: Reader | None = None
        if applied is not None and applied.reading:
            self._reader = Reader({**applied.reading, "tools": tools, "continue": goes_on})
        self._clock, self._make_id, self._most_calls = clock, make_id, most_calls
        self.is_enough = False
        self._unread, self._text, self._found = "", "", 0  # the answer, and how far returned text was found in it
        self._gave = False  # anything was returned
        self._next_s = 0.0
        self._ids: dict[int, str] = {}
        self._names: dict[int, str] = {}  # names of calls not returned yet, which may still grow

    def push(self, text: str) -> list[Delta]:
        """Return what a piece of the answer makes certain."""
        if self._reader is None:
            return [Delta(text)] if text else []
        self._unread += text
        self._text += text
        if not self._unread or self._clock() < self._next_s:
            return []
        return self._read(final=False)

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end. An answer without its required form ends as content."""
        return [] if self._reader is None else self._read(final=True)

    def _read(self, *, final: bool) -> list[Delta]:
        assert self._reader is not None
        began, rest = self._clock(), ""
        try:
            deltas = self._reader.read(self._unread, final=final)
            self._unread = "" if deltas else self._unread
        except ChatError:
            if not final:
                return []
            deltas, rest = self._read_in_part()
        finally:
            ended = self._clock()
            self._next_s = ended + (ended - began) / _SHARE
        found = [one for delta in deltas for one in self._given(delta)]
        if final:
            found += [self._begun(index) for index in list(self._names)]
            if not (self._gave or found or rest) and self._text.strip():  # only marks, with nothing within them
                found.append(Delta(self._text))
            found += [Delta(rest)] if rest else []
        self._gave = self._gave or bool(found)
        return found

    def _read_in_part(self) -> tuple[list[Delta], str]:
        """Read the unread text as far as it has its form; the rest is text, or all of it if it breaks off within."""
        assert self._reader is not None
        deltas: list[Delta] = []
        read, end, step = 0, 0, max(8, len(self._unread) // _PIECES)
        while step and end < len(self._unread):
            try:
                more = self._reader.read(self._unread[read : end + step])
            except ChatError:  # a call found before would be lost
                step //= 2
                continue
            end += step
            read, deltas = end if more else read, deltas + more
        try:
            return [*deltas, *self._reader.read(self._unread[read:end], final=True)], self._unread[end:]
        except ChatError:
            return [], self._text[self._found :]

    def _given(self, delta: Delta) -> list[Delta]:
        found: list[Delta] = []
        for text in (delta.reasoning, delta.content, delta.arguments):
            place = self._text.find(text, self._found) if text else -1
            self._found = place + len(text) if place >= 0 else self._found
        if delta.reasoning or delta.content:
            found += [self._begun(index) for index in list(self._names)]
            found += [Delta(reasoning=delta.reasoning)] if delta.reasoning else []
            found += [Delta(delta.content)] if delta.content else []
        if delta.call < 0:
            return found
        if self._most_calls and delta.call >= self._most_calls:
            self.is_enough = True
            return found
        if delta.call not in self._ids:
            found += [self._begun(index) for index in list(self._names)]
            self._ids[delta.call], self._names[delta.call] = "", ""
        if delta.call in self._names:
            self._names[delta.call] = delta.name or self._names[delta.call]
            self._ids[delta.call] = delta.id or self._ids[delta.call]
        if delta.arguments:
            found += [self._begun(index) for index in list(self._names)]
            found.append(Delta(call=delta.call, arguments=delta.arguments))
        return found

    def _begun(self, index: int) -> Delta:
        """Return the beginning of a call, whose name is complete."""
        return Delta(call=index, id=self._ids[index] or self._make_id(), name=self._names.pop(index))
