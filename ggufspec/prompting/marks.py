"""Marks that survive from a conversation into its prompt: where text must not be a token, where an answer is. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ggufspec.prompting.mends import Message

_PRIVATE = range(0xE000, 0xF8FF)  # Unicode's private use: rare in texts


class Marks:
    """Three characters that occur in no text of a request.

    Args:
        texts: the texts of the request.
        special: matches the first character of what would be read as a control token.

    Attributes:
        cut: placed after that character.
        begin: placed before an answer whose tokens are known.
        end: placed after it.
    """

    def __init__(self, texts: Iterable[str], special: re.Pattern[str]) -> None:
        taken = set[str]().union(*texts)
        self.cut, self.begin, self.end = islice((chr(code) for code in _PRIVATE if chr(code) not in taken), 3)
        self._special = special

    def guarded(self, value: Any) -> Any:
        """Insert cuts into all texts of plain data; keys stay."""
        if isinstance(value, str):
            return self._special.sub(rf"\g<0>{self.cut}", value)
        if isinstance(value, Mapping):
            return {key: self.guarded(one) for key, one in value.items()}
        return [self.guarded(one) for one in value] if isinstance(value, list | tuple) else value

    def marked(self, message: Message) -> Message:
        """Return a message with its marks; white space at its ends stays outside, because templates strip it."""
        content = self.guarded(message.content)
        if message.tokens and (core := content.strip()):
            before, _, after = content.partition(core)
            content = f"{before}{self.begin}{core}{self.end}{after}"
        return replace(message, content=content, more=self.guarded(message.more))

    def bare(self, text: str) -> str:
        """Remove the marks from a prompt."""
        return re.sub(f"[{self.cut}{self.begin}{self.end}]", "", text)

    def unescaped(self, text: str) -> str:
        """Restore marks that a template has written as JSON escapes."""
        for mark in (self.cut, self.begin, self.end):
            text = re.sub(rf"\\u{ord(mark):04x}", mark, text, flags=re.IGNORECASE)
        return text

    def segments(self, text: str, answers: Sequence[Message]) -> list[str | Message]:
        """Split a marked prompt into texts with cuts and the marked answers, in order."""
        parts = re.split(f"{self.begin}(.*?){self.end}", text, flags=re.DOTALL)
        found: list[str | Message] = []
        for index, answer in enumerate(answers[: len(parts) // 2]):
            own, core, following = parts[2 * index : 2 * index + 3]
            before, _, after = answer.content.partition(answer.content.strip())
            if own.endswith(before) and following.startswith(after):
                found += [own.removesuffix(before), answer]
                parts[2 * index + 2] = following.removeprefix(after)
            else:  # stripped by the template: no longer what was emitted
                parts[2 * index + 2] = own + core + following
        return [*found, parts[-1]]
