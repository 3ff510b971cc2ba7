"""Incremental parsing of an answer: converts pieces of text to additions to the chat message."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from ggufspec.llamacpp.chat_library import AnswerReader, AppliedTemplate, ChatError, MessageDelta
from ggufspec.prompting.workarounds import new_id

_SHARE = 0.01  # maximum share of time for parsing, because each parse starts at the beginning of the answer
_PIECES = 64  # number of pieces in which an invalid answer is parsed


def _random_id() -> str:
    return new_id(secrets.randbits(64))


class AnswerReading:
    """Parser of one answer.

    Args:
        applied: result of applying the template to the prompt; None: all text is content.
        tools: parse tool calls.
        goes_on: the answer continues the prompt's last message.
        most_calls: number of tool calls after which further ones are dropped; 0: unlimited.
        clock: returns seconds.
        make_id: returns an id for a tool call without one.

    Attributes:
        is_enough: True once a call beyond ``most_calls`` has begun.
    """

    def __init__(
        self,
        applied: AppliedTemplate | None,
        *,
        tools: bool = False,
        goes_on: bool = False,
        most_calls: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        make_id: Callable[[], str] = _random_id,
    ) -> None:
        self._reader: AnswerReader | None = None
        if applied is not None and applied.reading:
            self._reader = AnswerReader({**applied.reading, "tools": tools, "continue": goes_on})
        self._clock, self._make_id, self._most_calls = clock, make_id, most_calls
        self.is_enough = False
        self._unread, self._text, self._found = "", "", 0  # unparsed text, whole text, end of the returned part
        self._gave = False  # True once something was returned
        self._next_s = 0.0
        self._ids: dict[int, str] = {}
        self._names: dict[int, str] = {}  # names of calls not yet returned, which may still grow

    def push(self, text: str) -> list[MessageDelta]:
        """Add a piece of the answer; return the deltas that later text cannot change."""
        if self._reader is None:
            return [MessageDelta(text)] if text else []
        self._unread += text
        self._text += text
        if not self._unread or self._clock() < self._next_s:
            return []
        return self._read(final=False)

    def finish(self) -> list[MessageDelta]:
        """End the answer; return the deltas held back. If the answer does not parse, the rest becomes content."""
        return [] if self._reader is None else self._read(final=True)

    def _read(self, *, final: bool) -> list[MessageDelta]:
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
            if not (self._gave or found or rest) and self._text.strip():  # the text is only empty markup
                found.append(MessageDelta(self._text))
            found += [MessageDelta(rest)] if rest else []
        self._gave = self._gave or bool(found)
        return found

    def _read_in_part(self) -> tuple[list[MessageDelta], str]:
        """Parse the valid start of the pending text; return (deltas, rest). On failure, rest is all unreturned text."""
        assert self._reader is not None
        deltas: list[MessageDelta] = []
        read, end, step = 0, 0, max(8, len(self._unread) // _PIECES)
        while step and end < len(self._unread):
            try:
                more = self._reader.read(self._unread[read : end + step])
            except ChatError:  # retry with a shorter piece, so that calls found earlier are not lost
                step //= 2
                continue
            end += step
            read, deltas = end if more else read, deltas + more
        try:
            return [*deltas, *self._reader.read(self._unread[read:end], final=True)], self._unread[end:]
        except ChatError:
            return [], self._text[self._found :]

    def _given(self, delta: MessageDelta) -> list[MessageDelta]:
        found: list[MessageDelta] = []
        for text in (delta.reasoning, delta.content, delta.arguments):
            place = self._text.find(text, self._found) if text else -1
            self._found = place + len(text) if place >= 0 else self._found
        if delta.reasoning or delta.content:
            found += [self._begun(index) for index in list(self._names)]
            found += [MessageDelta(reasoning=delta.reasoning)] if delta.reasoning else []
            found += [MessageDelta(delta.content)] if delta.content else []
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
            found.append(MessageDelta(call=delta.call, arguments=delta.arguments))
        return found

    def _begun(self, index: int) -> MessageDelta:
        """Return the first delta of a call, whose name is now complete."""
        return MessageDelta(call=index, id=self._ids[index] or self._make_id(), name=self._names.pop(index))
