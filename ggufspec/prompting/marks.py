"""Marks in a conversation that show up in its prompt: where text must be no token, and where an answer is. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ggufspec.prompting.mends import Message

_PRIVATE = range(0xE000, 0xF8FF)  # Unicode's private use: in hardly any text


@dataclass(frozen=True, slots=True)
class Marks:
    """Three characters that occur in no text of a request.

    Args:
        cut: stands within what would be read as a control token.
        begin: stands before an answer whose tokens are known.
        end: stands behind it.
    """

    cut: str
    begin: str
    end: str


Special = Callable[[str], list[int]]  # where control tokens begin in a text


def unused(texts: Sequence[str]) -> Marks:
    """Marks that are in none of the texts."""
    taken = set("".join(texts))
    return Marks(*islice((chr(code) for code in _PRIVATE if chr(code) not in taken), 3))


def guarded(text: str, special: Special, marks: Marks) -> str:
    """A text with a mark behind the first character of what would be a control token."""
    parts, end = [], 0
    for place in special(text):
        parts += [text[end : place + 1], marks.cut]
        end = place + 1
    return "".join([*parts, text[end:]])


def guarded_all(value: Any, special: Special, marks: Marks) -> Any:
    """The same of every text in plain data; keys stay."""
    if isinstance(value, str):
        return guarded(value, special, marks)
    if isinstance(value, Mapping):
        return {key: guarded_all(one, special, marks) for key, one in value.items()}
    return [guarded_all(one, special, marks) for one in value] if isinstance(value, list | tuple) else value


def marked(message: Message, special: Special, marks: Marks, *, known: bool) -> Message:
    """A message with its marks; white space at its ends stays outside, as templates strip it."""
    content = guarded(message.content, special, marks)
    if known and (core := content.strip()):
        before, after = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
        content = f"{before}{marks.begin}{core}{marks.end}{after}"
    return replace(message, content=content, more=guarded_all(message.more, special, marks))


def bare(text: str, marks: Marks) -> str:
    """A prompt without marks."""
    return re.sub(f"[{marks.cut}{marks.begin}{marks.end}]", "", text)


def unescaped(text: str, marks: Marks) -> str:
    """A prompt whose template has written marks as JSON's escapes."""
    for mark in (marks.cut, marks.begin, marks.end):
        text = re.sub(rf"\\u{ord(mark):04x}", mark, text, flags=re.IGNORECASE)
    return text


def segments(text: str, answers: Sequence[Message], marks: Marks) -> list[str | Message]:
    """A marked prompt, as texts to be tokenized one by one, and the answers whose tokens are known, in their order.

    Args:
        text: the prompt.
        answers: those that were marked, in their order.
        marks: of both.

    Returns:
        texts with the marks ``cut``, and answers.
    """
    parts = re.split(f"{marks.begin}(.*?){marks.end}", text, flags=re.DOTALL)
    found: list[str | Message] = []
    for index, answer in enumerate(answers[: len(parts) // 2]):
        own, core, following = parts[2 * index : 2 * index + 3]
        before, _, after = answer.content.partition(answer.content.strip())
        if own.endswith(before) and following.startswith(after):
            found += [own.removesuffix(before), answer]
            parts[2 * index + 2] = following.removeprefix(after)
        else:  # stripped: it is not what was emitted
            parts[2 * index + 2] = own + core + following
            parts[2 * index] = parts[2 * index + 1] = ""
    return [*found, parts[-1]]
