"""The drafter without a model: it proposes what followed the last time the text read like this.

Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and llama.cpp's
common/ngram-cache.cpp. Unlike them it examines the newest occurrences rather than the oldest, measures how long each
match really is, and lets several of them vote.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ggufspec.decoding.drafters.base import Candidate, Parts, ShadowEvaluation
from ggufspec.decoding.rules.base import DraftToken, Rule

REACH = 32  # longest match, in tokens
# Few orders are better than many: the longest n-gram that occurred decides who votes, and with every n there would
# often be one voter. Measured on Python, Markdown and JSON: a fifth fewer hits without 1, no more with 3 and 6.
ORDERS = (1, 2, 4, 8)
OCCURRENCES = 8  # examined, newest first; with 4 the confidence ranks worse, with 16 no better
FADE = 0.9  # weight of an occurrence, relative to the next newer one
# Votes of an occurrence by match length in tokens, and votes that nobody cast. In a real model's answers matches of 1,
# 2, 3, 4, 8, 12, 32 tokens were right at .21, .42, .60, .63, .75, .91, .97; that is n ** 1.5 / (n ** 1.5 + 4). More
# doubt drafts less in new text: with 7 instead of 5 replayed answers gained a hundredth, with 10 they lost it again.
VOTES = [n**1.5 for n in range(REACH + 1)]
DOUBT = 7.0

# Tokens evaluated after a cooldown, which may have missed more: the earlier ones are only indexed, in one go, which
# takes a sixth of the time. On replayed answers 8 are as good as all, and 4 are worse by 1 to 2 %.
EVALUATED = 8

_TOKEN_BITS = 32
_BITS = _TOKEN_BITS * REACH
_WHOLE = (1 << _BITS) - 1
_WINDOW = struct.Struct(f"<{REACH}I")
_EDGE = 0xFFFFFFFF  # stands before the first token of an index
_BLANK = 0xFFFFFFFE  # stands before the first token of a text that is looked up: two beginnings do not match
_PRIME = 999_999_937  # the largest below 10**9: a one-digit divisor for Python, products of 64 bits for NumPy
_RADIX = 2**_TOKEN_BITS % _PRIME
_BUCKETS = 1024  # minimum, for short texts


class Guess(NamedTuple):
    """An index's guess for the next token of a text."""

    token: int  # predicted token id
    length: int  # tokens of the longest match that supports it, 1 to REACH
    # Votes for it, divided by all votes plus DOUBT; in (0, 1). A second match that agrees raises it, one that disagrees
    # lowers it.
    confidence: float


def window_of(text: Sequence[int]) -> int:
    """Return the last ``REACH`` tokens of a text as one number of 32-bit digits, the newest on top."""
    last = text[-REACH:]
    return int.from_bytes(_WINDOW.pack(*[_BLANK] * (REACH - len(last)), *last), "little")


def slide(window: int, token: int) -> int:
    """Return the window of the text with one more token."""
    return window >> _TOKEN_BITS | token << _BITS - _TOKEN_BITS


class Index:
    """Positions of a text's n-grams, for n in ``ORDERS``; append, remove and look up in constant time.

    The last n tokens choose a bucket. It points to the newest position preceded by these tokens, and each position
    points to the next older one of its bucket (the hash chains of zlib's deflate). Comparing the tokens rules out
    positions that only share the bucket. An n-gram enters with the token that follows it, so the end of the text never
    finds itself.

    Takes 36 to 56 bytes a token, and as much again while it is built.

    Args:
        tokens: (n,) ids, the beginning of the text.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = bytearray(np.array([_EDGE] * REACH, "<u4").tobytes() + np.array(tokens, "<u4").tobytes())
        self._length = len(tokens)
        self._build()

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; when the text has doubled, so do the buckets."""
        start, window = self._length, int.from_bytes(self._tokens[4 * self._length :], "little")
        self._tokens += struct.pack(f"<{len(tokens)}I", *tokens)
        self._length += len(tokens)
        if self._length - 1 > self._mask:
            self._build()
            return
        windows = [*accumulate(tokens, slide, initial=window)]  # the last is the window of the whole text
        for _, shift, newest, older in self._chains:
            for position, window in zip(range(start, self._length), windows, strict=False):
                bucket = (window >> shift) % _PRIME & self._mask
                older.append(newest[bucket])
                newest[bucket] = position

    def rewind(self, length: int) -> None:
        """Remove all but the first ``length`` tokens, as if the others had never been appended."""
        while self._length > length:
            self._length -= 1
            del self._tokens[-4:]
            window = int.from_bytes(self._tokens[4 * self._length :], "little")
            for _, shift, newest, older in self._chains:
                newest[(window >> shift) % _PRIME & self._mask] = older.pop()

    def find(self, window: int) -> Guess | None:
        """Guess what follows a text that ends with this window; None if even its last token is new.

        Only the longest n-gram that has any occurrence counts: its newest occurrences vote for what followed them, each
        with the ``VOTES`` of its match length, fading with age. Among equals the newest wins.
        """
        tokens = self._tokens
        for order, shift, newest, older in self._chains:
            votes: dict[int, float] = {}
            lengths: dict[int, int] = {}
            weight = 1.0
            position = newest[(window >> shift) % _PRIME & self._mask]
            for _ in range(OCCURRENCES):
                if not position:
                    break
                there = int.from_bytes(tokens[4 * position : 4 * (position + REACH + 1)], "little")
                length = (_BITS - ((there ^ window) & _WHOLE).bit_length()) // _TOKEN_BITS  # equal digits from the top
                if length >= order:
                    token = there >> _BITS
                    votes[token] = votes.get(token, 0.0) + weight * VOTES[length]
                    if length > lengths.get(token, 0):
                        lengths[token] = length
                    weight *= FADE
                position = older[position]
            if votes:
                token = max(votes, key=votes.__getitem__)
                return Guess(token, lengths[token], votes[token] / (sum(votes.values()) + DOUBT))
        return None

    def _build(self) -> None:
        """Build all buckets and chains at once, as appending would leave them; more buckets than tokens."""
        count = self._length
        self._mask = max(_BUCKETS, 1 << count.bit_length()) - 1
        # By order, longest first: the window's bits to drop, bucket to newest position, position to the next older one.
        # Position 0 has nothing before it and marks the end of a chain.
        self._chains: list[tuple[int, int, array[int], array[int]]] = []
        tokens = np.frombuffer(bytes(self._tokens), "<u4").astype(np.int64)
        key, back = np.zeros(count, np.int64), 0
        for order in ORDERS:
            while back < order:
                back += 1
                key = (key * _RADIX + tokens[REACH - back : REACH - back + count]) % _PRIME
            bucket = key & self._mask
            by_bucket = np.argsort(bucket, kind="stable").astype(np.int32)
            ranked = bucket[by_bucket]
            shared = np.flatnonzero(ranked[1:] == ranked[:-1])
            older = np.zeros(count, np.int32)
            older[by_bucket[shared + 1]] = by_bucket[shared]
            newest = np.zeros(self._mask + 1, np.int32)
            newest[ranked] = by_bucket  # the last assignment wins: a bucket's newest position
            shift = _BITS - _TOKEN_BITS * order
            self._chains.insert(0, (order, shift, array("i", newest.tobytes()), array("i", older.tobytes())))


class LookupDrafter:
    """Drafter that proposes what followed the longest match in the text so far or in a corpus (n,), e.g. files that an
    answer may quote; the text wins a tie.

    The index holds only final tokens. A drafted chain is part of the text that is looked up, never of the index.
    """

    name, failure = "lookup", ""

    def __init__(self, corpus: Sequence[int] = ()) -> None:
        self._corpus = Index(corpus)
        self.begin(())

    def begin(
        self,
        prompt: Sequence[int],
        choices: Sequence[int] = (),
        same: int = 0,  # noqa: ARG002 - reading is free
    ) -> list[ShadowEvaluation]:
        choices = choices[-len(prompt) :] if prompt else ()
        self._evaluated = len(prompt) - len(choices)  # earlier positions are evaluated, or never will be
        self._unreported: list[ShadowEvaluation] = []
        self._certain = len(prompt)
        self._index = Index(prompt[: self._evaluated])
        self._last = -1, 0  # index length and window of the last guess
        return self._append(prompt, len(prompt), choices)

    def pending(self, length: int) -> int:  # noqa: ARG002 - whatever it has to read is read in microseconds
        return 0

    def propose(self, text: Sequence[int], rule: Rule) -> Candidate | None:
        if len(self._index) < self._certain:
            self._unreported += self._append(text, min(self._certain, len(text)))
        guess = self._guess(window_of(text))
        if guess is None or not rule.permits(guess.token, len(text)):
            return None
        return Candidate(guess.confidence, lambda: DraftToken(guess.token))

    def catch_up(self, text: Sequence[int], rule: Rule, most: int) -> list[ShadowEvaluation]:  # noqa: ARG002 - reading is free
        self._evaluated = max(self._evaluated, len(text) - EVALUATED)
        seen, self._unreported = self._unreported + self._append(text, len(text)), []
        return seen

    def time_token(self, text: Sequence[int], clock: Callable[[], float]) -> float | None:  # noqa: ARG002
        return None

    def commit(self, length: int) -> None:
        self._certain = length
        if length < len(self._index):
            self._index.rewind(length)
            self._last = -1, 0

    def _append(self, text: Sequence[int], end: int, decided: Sequence[int] = ()) -> list[ShadowEvaluation]:
        """Append ``text`` up to ``end``; evaluate these positions against ``decided``, or else the text."""
        start = len(self._index)
        first = min(max(start, self._evaluated), end)
        self._index.extend(text[start:first])
        tokens = text[first:end]
        window = window_of(text[max(0, first - REACH) : first])
        seen = []
        for token, came in zip(tokens, decided or tokens, strict=True):
            if guess := self._guess(window):
                seen.append(ShadowEvaluation(guess.confidence, float(guess.token == came)))
            self._index.extend((token,))
            window = slide(window, token)
        self._evaluated = max(self._evaluated, end)
        return seen

    def _guess(self, window: int) -> Guess | None:
        """Return the guess, cached for a round that drafted nothing, whose evaluation looks it up again."""
        wanted = len(self._index), window
        if wanted != self._last:
            self._last, self._found = wanted, self._look_up(window)
        return self._found

    def _look_up(self, window: int) -> Guess | None:
        guess = self._index.find(window)
        if self._corpus and (guess is None or guess.length < REACH):
            other = self._corpus.find(window)
            if other and (guess is None or other.length > guess.length):
                return other
        return guess


def make(parts: Parts) -> LookupDrafter:
    return LookupDrafter(parts.corpus)
