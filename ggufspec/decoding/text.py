"""Conversion of tokens to text as they arrive: characters and stop strings may span several tokens. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Converter of token bytes into text that is safe to show.

    It holds back an incomplete character until all its bytes have arrived, and text that may be the beginning of a
    ``stop`` string. A complete stop string ends the text and is not part of it.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """Return the text that can be shown after this piece; set ``stopped`` once a stop string is complete."""
        return self._release(self._decoder.decode(piece), final=False)

    def finish(self) -> str:
        """Return the text that is still held back after the last token."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(index + len(stop), index) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:  # the stop string completed first ends the text, wherever token boundaries fall
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts."""
    for count, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return count
    return min(len(one), len(other))
