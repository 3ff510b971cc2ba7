"""Marks that survive a chat template, to find answers and text that must not become a control token. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ggufspec.prompting.workarounds import TokenizedMessage

_PRIVATE = range(0xE000, 0xF8FF)  # Unicode's private use area, rare in texts


class Marks:
    """Three characters that do not occur in a request's texts.

    Args:
        texts: the request's texts.
        special: matches the first character of text that would become a control token.

    Attributes:
        cut: mark after that first character, where the text is split.
        begin: mark before an answer whose tokens are known.
        end: mark after such an answer.
    """

    def __init__(self, texts: Iterable[str], special: re.Pattern[str]) -> None:
        taken = set[str]().union(*texts)
        self.cut, self.begin, self.end = islice((chr(code) for code in _PRIVATE if chr(code) not in taken), 3)
        self._special = special

    def guarded(self, value: Any) -> Any:
        """Insert ``cut`` marks into all strings in plain data, except for keys."""
        if isinstance(value, str):
            return self._special.sub(rf"\g<0>{self.cut}", value)
        if isinstance(value, Mapping):
            return {key: self.guarded(one) for key, one in value.items()}
        return [self.guarded(one) for one in value] if isinstance(value, list | tuple) else value

    def marked(self, message: TokenizedMessage) -> TokenizedMessage:
        """Return a message with its marks; they exclude whitespace at its ends, because templates strip it."""
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

    def segments(self, text: str, answers: Sequence[TokenizedMessage]) -> list[str | TokenizedMessage]:
        """Split a marked prompt into the marked answers and the texts around them (with ``cut`` marks), in order."""
        parts = re.split(f"{self.begin}(.*?){self.end}", text, flags=re.DOTALL)
        found: list[str | TokenizedMessage] = []
        for index, answer in enumerate(answers[: len(parts) // 2]):
            own, core, following = parts[2 * index : 2 * index + 3]
            before, _, after = answer.content.partition(answer.content.strip())
            if own.endswith(before) and following.startswith(after):
                found += [own.removesuffix(before), answer]
                parts[2 * index + 2] = following.removeprefix(after)
            else:  # the template stripped the answer, so its emitted tokens no longer match
                parts[2 * index + 2] = own + core + following
        return [*found, parts[-1]]
