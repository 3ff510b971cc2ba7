"""What decoding needs of a model; ``llamacpp.model.Context`` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class Model(Protocol):
    """One sequence of tokens in one model's cache."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that fit its cache."""
        ...

    @property
    def length(self) -> int:
        """Tokens in its cache."""
        ...

    def decode(self, tokens: Sequence[int], outputs: int, width: int = 0) -> Logits:
        """Append tokens; logits (outputs, vocab) of the last ones, the caller's to change, valid until the next call.

        The batch is padded to ``width`` tokens; the padding is taken back and changes nothing but which kernels run.
        """
        ...

    def hidden(self) -> Logits:
        """Hidden rows (tokens, size) of the last decode, one for each of its tokens: what some drafters read.

        Raises:
            ModelError: it has none to give.
        """
        ...

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens, which are certain from now on."""
        ...

    def mark(self) -> None:
        """The next batch may be taken back whole, even if it is a single token."""
        ...
