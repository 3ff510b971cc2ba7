"""llama.cpp's parameters for our options."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggufspec.llamacpp.library import load_library
from ggufspec.llamacpp.model import Model, size_label
from ggufspec.llamacpp.options import ContextOptions
from ggufspec.llamacpp.params import context_params
from tests.support.gguf_files import rewritten


@pytest.mark.parametrize(("batch_size", "sequences", "made"), [(1, 1, 16), (2, 20, 32), (17, 4, 32), (64, 1, 64)])
def test_outputs_fill_lines_of_the_cache(batch_size: int, sequences: int, made: int) -> None:
    options = ContextOptions(512, max_outputs=batch_size, threads=1, sequences=sequences)
    assert context_params(load_library(), options).n_outputs_max == made


@pytest.mark.parametrize(
    ("parameters", "label"),
    [
        (10_200_000, "10M"),
        (134_515_008, "135M"),
        (494_032_768, "0.5B"),
        (1_543_714_304, "1.5B"),
        (70_553_706_496, "71B"),
    ],
)
def test_a_size_label_has_two_digits(parameters: int, label: str) -> None:
    assert size_label(parameters) == label


def test_a_model_is_described_by_its_own_size_and_not_by_a_known_model_of_as_many_layers(
    target: Path, tmp_path: Path
) -> None:
    with Model(target) as model:
        assert model.description == f"llama {size_label(model.parameters)} F16"
    with Model(rewritten(target, tmp_path / "labelled.gguf", size_label="0.5B")) as model:
        assert model.description == "llama 0.5B F16"
