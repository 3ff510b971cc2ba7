"""llama.cpp's parameters for our options."""

from __future__ import annotations

import pytest

from ggufspec.llamacpp.library import load
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.llamacpp.params import context_params


@pytest.mark.parametrize(("width", "sequences", "made"), [(1, 1, 16), (2, 20, 32), (17, 4, 32), (64, 1, 64)])
def test_outputs_fill_lines_of_the_cache(width: int, sequences: int, made: int) -> None:
    options = ContextOptions(512, width=width, threads=1, sequences=sequences)
    assert context_params(load(), options).n_outputs_max == made
