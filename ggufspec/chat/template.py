"""Finds the messages in the text of a prompt that a chat template rendered. Pure.

So the caller can keep a user's ``<|im_end|>`` from ending the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ggufspec.errors import ModelError

Message = Mapping[str, Any]  # role, content and what else a template reads
Render = Callable[[Sequence[Message]], str]  # raises ModelError
_MARKS = range(0xF0000, 0xFFFFE)  # private use: in no text


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt's text: of the message with that index, or the template's own (None)."""

    text: str
    message: int | None


def rendered(render: Render, messages: Sequence[Message], loose: Callable[[str], bool]) -> list[Piece]:
    """The prompt, cut where a message's content begins and ends.

    A content may have been stripped of white space; one that ``loose`` allows may have been changed in any way.

    Args:
        render: makes the text of messages.
        messages: each with ``role`` and ``content``.
        loose: whether it does no harm if a content's ends are mistaken.

    Returns:
        The pieces, which are the text together; it alone where the contents cannot be found in it.

    Raises:
        ModelError: the template fails.
    """
    text = render(messages)
    contents = [message["content"] for message in messages]
    taken = set(text).union(*contents)
    first, last = islice((chr(code) for code in _MARKS if chr(code) not in taken), 2)
    marked = [
        {**message, "content": f"{first}{index}{last}" if message["content"] else ""}
        for index, message in enumerate(messages)
    ]
    try:
        frame = re.split(f"{first}([0-9]+){last}", render(marked))
    except ModelError:
        return [Piece(text, None)]
    own, order = frame[::2], [int(index) for index in frame[1::2]]
    found = [contents[index] for index in order]
    spans = _align(text, own, found, loose)
    pieces: list[Piece] = []
    end = 0
    for index, (start, stop) in zip(order, spans, strict=False):
        pieces += [Piece(text[end:start], None), Piece(text[start:stop], index)]
        end = stop
    return [piece for piece in (*pieces, Piece(text[end:], None)) if piece.text]


def _align(
    text: str, own: Sequence[str], contents: Sequence[str], loose: Callable[[str], bool]
) -> list[tuple[int, int]]:
    """Where each content is in ``text``, which is ``own[0]``, a content, ``own[1]``, …, ``own[-1]``; else nothing."""
    spans: list[tuple[int, int]] = []
    start = len(own[0]) if text.startswith(own[0]) else -1
    for content, after in zip(contents, own[1:], strict=True):
        end = _end(text, start, content, after, free=loose(content))
        if start < 0 or end < 0:
            return []
        spans.append((start, end))
        start = end + len(after)
    return spans if start == len(text) else []


def _end(text: str, start: int, content: str, after: str, *, free: bool) -> int:
    """Where a content that begins at ``start`` ends, so that ``after`` follows; -1 where it does not."""
    for form in (content, content.strip(), content.rstrip(), content.lstrip()):
        if text.startswith(form + after, start):
            return start + len(form)
    if not free:
        return -1
    return text.find(after, start) if after else len(text)
