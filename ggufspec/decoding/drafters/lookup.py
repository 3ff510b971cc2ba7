"""Drafter without a model, which proposes the token that followed the same n-gram earlier in the text.

Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and llama.cpp's
common/ngram-cache.cpp. Unlike both, it examines the newest occurrences instead of the oldest, measures the full length
of each match, and lets several matches vote.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ggufspec.decoding.drafters.base import DraftCandidate, DrafterParts, FreeDrafter, ShadowEvaluation
from ggufspec.decoding.rules.base import AcceptanceRule, DraftToken

REACH = 32  # maximum match length, in tokens
# Lengths n of the indexed n-grams. Few are better than many: only occurrences of the longest match vote, and with every
# n that would often be just one. Without n = 1, Python, Markdown and JSON had a fifth fewer hits; 3 and 6 add none.
ORDERS = (1, 2, 4, 8)
OCCURRENCES = 8  # occurrences to examine, newest first; with 4, confidence ranks guesses worse; with 16, no better
FADE = 0.9  # weight of an occurrence, relative to the next newer one
# VOTES: votes per occurrence, by match length in tokens; DOUBT: votes for no token.
# In a real model's answers, matches of 1, 2, 3, 4, 8, 12 and 32 tokens were right in 21, 42, 60, 63, 75, 91 and 97 % of
# cases, roughly n ** 1.5 / (n ** 1.5 + 4). Replayed answers were 1 % faster with a DOUBT of 7 than with 5 or 10.
VOTES = [n**1.5 for n in range(REACH + 1)]
DOUBT = 7.0

# Number of tokens evaluated after a cooldown. Earlier tokens of the cooldown are only indexed, all at once, which
# takes a sixth as long. On replayed answers, 8 is as good as evaluating all; with 4, decoding is 1 to 2 % slower.
EVALUATED = 8

_TOKEN_BITS = 32
_BITS = _TOKEN_BITS * REACH
_WHOLE = (1 << _BITS) - 1
_WINDOW = struct.Struct(f"<{REACH}I")
_EDGE = 0xFFFFFFFF  # placeholder before the first token of an index
_BLANK = 0xFFFFFFFE  # placeholder before the first token of a text to look up, which must not match _EDGE
_PRIME = 999_999_937  # largest prime below 10**9: it fits in one digit of a Python integer, its products in 64 bits
_RADIX = 2**_TOKEN_BITS % _PRIME
_BUCKETS = 1024  # minimum number of buckets, for short texts


class LookupGuess(NamedTuple):
    """An index's guess for the next token of a text."""

    token: int  # predicted token id
    length: int  # length in tokens of the longest match that supports it, 1 to REACH
    # The token's votes ÷ (all votes + DOUBT), in (0, 1). A second match raises this if it agrees, and lowers it if not.
    confidence: float


def window_of(text: Sequence[int]) -> int:
    """Return the last ``REACH`` tokens of a text as one integer of 32-bit digits; the newest is the highest digit."""
    last = text[-REACH:]
    return int.from_bytes(_WINDOW.pack(*[_BLANK] * (REACH - len(last)), *last), "little")


def slide(window: int, token: int) -> int:
    """Return the window of the last ``REACH`` tokens after one more ``token``."""
    return window >> _TOKEN_BITS | token << _BITS - _TOKEN_BITS


class NgramIndex:
    """Index of a text's n-grams, for n in ``ORDERS``; tokens are appended, removed and looked up in constant time.

    The last n tokens choose a bucket. It points to the newest position preceded by these tokens, and each position
    points to the next older one in its bucket (like the hash chains in zlib's deflate). Comparing the tokens rules out
    positions that only share the bucket. An n-gram is added together with the token that follows it, so the end of the
    text never matches itself.

    An index takes 36 to 56 bytes per token, and as much again while it is built.

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
        """Append tokens; double the buckets whenever the text has doubled."""
        start, window = self._length, int.from_bytes(self._tokens[4 * self._length :], "little")
        self._tokens += struct.pack(f"<{len(tokens)}I", *tokens)
        self._length += len(tokens)
        if self._length - 1 > self._mask:
            self._build()
            return
        windows = [*accumulate(tokens, slide, initial=window)]  # the last one, for the whole text, is not used
        for _, shift, newest, older in self._chains:
            for position, window in zip(range(start, self._length), windows, strict=False):
                bucket = (window >> shift) % _PRIME & self._mask
                older.append(newest[bucket])
                newest[bucket] = position

    def rewind(self, length: int) -> None:
        """Remove all but the first ``length`` tokens, as if no more had been appended."""
        while self._length > length:
            self._length -= 1
            del self._tokens[-4:]
            window = int.from_bytes(self._tokens[4 * self._length :], "little")
            for _, shift, newest, older in self._chains:
                newest[(window >> shift) % _PRIME & self._mask] = older.pop()

    def find(self, window: int) -> LookupGuess | None:
        """Guess the token after a text that ends with this window; None if even the text's last token is new.

        Only the longest n-gram that has occurred counts. Each of its newest occurrences votes for the token that
        followed it, with the ``VOTES`` of its match length; older ones weigh less. In a tie the newest wins.
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
                length = (_BITS - ((there ^ window) & _WHOLE).bit_length()) // _TOKEN_BITS  # equal leading digits
                if length >= order:
                    token = there >> _BITS
                    votes[token] = votes.get(token, 0.0) + weight * VOTES[length]
                    if length > lengths.get(token, 0):
                        lengths[token] = length
                    weight *= FADE
                position = older[position]
            if votes:
                token = max(votes, key=votes.__getitem__)
                return LookupGuess(token, lengths[token], votes[token] / (sum(votes.values()) + DOUBT))
        return None

    def _build(self) -> None:
        """Build all buckets and chains at once, with the same result as appending; buckets outnumber tokens."""
        count = self._length
        self._mask = max(_BUCKETS, 1 << count.bit_length()) - 1
        # (order, window bits to drop, newest position by bucket, next older position by position), highest order first.
        # Position 0 has no tokens before it and marks the end of a chain.
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
            newest[ranked] = by_bucket  # the last assignment wins: each bucket's newest position
            shift = _BITS - _TOKEN_BITS * order
            self._chains.insert(0, (order, shift, array("i", newest.tobytes()), array("i", older.tobytes())))


class LookupDrafter(FreeDrafter):
    """Drafter that proposes the token after the longest match in the text so far or in a corpus (n,), e.g. files that
    an answer may quote; the text wins ties.

    The index holds the prompt and the emitted tokens. Drafted tokens extend the text to look up, but not the index.
    """

    name = "lookup"

    def __init__(self, corpus: NgramIndex | Sequence[int] = ()) -> None:
        self._corpus = corpus if isinstance(corpus, NgramIndex) else NgramIndex(corpus)
        self.begin(())

    def begin(
        self,
        prompt: Sequence[int],
        choices: Sequence[int] = (),
        same: int = 0,  # noqa: ARG002 - indexing is free
    ) -> list[ShadowEvaluation]:
        choices = choices[-len(prompt) :] if prompt else ()
        self._evaluated = len(prompt) - len(choices)  # positions before this are never evaluated again
        self._unreported: list[ShadowEvaluation] = []
        self._certain = len(prompt)
        self._index = NgramIndex(prompt[: self._evaluated])
        self._last = -1, 0  # index length and window of the last guess
        return self._append(prompt, len(prompt), choices)

    def propose(self, text: Sequence[int], rule: AcceptanceRule) -> DraftCandidate | None:
        if len(self._index) < self._certain:
            self._unreported += self._append(text, min(self._certain, len(text)))
        guess = self._guess(window_of(text))
        if guess is None or not rule.permits(guess.token, len(text)):
            return None
        return DraftCandidate(guess.confidence, lambda: DraftToken(guess.token))

    def catch_up(self, text: Sequence[int], rule: AcceptanceRule, most: int) -> list[ShadowEvaluation]:  # noqa: ARG002 - indexing is free
        self._evaluated = max(self._evaluated, len(text) - EVALUATED)
        seen, self._unreported = self._unreported + self._append(text, len(text)), []
        return seen

    def commit(self, length: int) -> None:
        self._certain = length
        if length < len(self._index):
            self._index.rewind(length)
            self._last = -1, 0

    def _append(self, text: Sequence[int], end: int, decided: Sequence[int] = ()) -> list[ShadowEvaluation]:
        """Index ``text`` up to ``end``; score guesses at the new positions against ``decided`` (default: ``text``)."""
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

    def _guess(self, window: int) -> LookupGuess | None:
        """Return the guess after ``window``. The last guess is cached, because evaluating a round asks for it again."""
        wanted = len(self._index), window
        if wanted != self._last:
            self._last, self._found = wanted, self._look_up(window)
        return self._found

    def _look_up(self, window: int) -> LookupGuess | None:
        guess = self._index.find(window)
        if self._corpus and (guess is None or guess.length < REACH):
            other = self._corpus.find(window)
            if other and (guess is None or other.length > guess.length):
                return other
        return guess


def make(parts: DrafterParts) -> LookupDrafter:
    return LookupDrafter(parts.like._corpus if isinstance(parts.like, LookupDrafter) else parts.corpus)
