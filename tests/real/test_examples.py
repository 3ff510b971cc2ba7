"""The examples that people copy: the docstring of SpeculativeDecoder; those of pages are in test_guide.py."""

from __future__ import annotations

import doctest

from ggufspec.decoding import decoder


def test_the_docstring_of_the_decoder():
    result = doctest.testmod(decoder)
    assert result.attempted >= 4
    assert result.failed == 0
