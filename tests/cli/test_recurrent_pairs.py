"""Recurrent and hybrid models in pairs: every command gives the same answer, with a card and without one."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from llama_cpp import Llama
from test_rpc import worker as card  # noqa: F401

from ggufspec.decoding.hook import DraftModel
from ggufspec.errors import ModelError
from tests.support import random_weights
from tests.support.processes import Cli
from tests.support.shapes import Dims, Label, Ssm, hybrid, lfm2, pure_mamba, transformer

VOCABULARY = 1024
BIG, SMALL = Dims(4, 256, 4, 2, 512, VOCABULARY), Dims(1, 256, 4, 2, 512, VOCABULARY)
MODELS = (
    pure_mamba(Label("mamba", "recurrent", "mamba", "Q8_0"), BIG, Ssm(512, 16, 32)),
    hybrid(Label("granite", "hybrid", "granitehybrid", "Q8_0"), BIG, (1, 3), Ssm(512, 64, 8, 1)),
    lfm2(Label("lfm2", "hybrid", "lfm2", "Q8_0"), BIG, (2,)),
    transformer(Label("llama", "dense", "llama", "Q8_0"), BIG),
    transformer(Label("small", "dense", "llama", "Q8_0"), SMALL),
    pure_mamba(Label("small-mamba", "recurrent", "mamba", "Q8_0"), SMALL, Ssm(512, 16, 32)),
)
PAIRS = {
    ("mamba", "small"): "the target is recurrent (mamba): after a rejection it decodes the accepted",
    ("granite", "small"): "the target is hybrid (granitehybrid): after a rejection it decodes the accepted",
    ("lfm2", "small"): "the target is hybrid (lfm2): it keeps a state for each token of a draft",
    ("llama", "small-mamba"): "the draft is recurrent (mamba): after a rejection it decodes the accepted",
}
SHORT = ("-p", "def f(", "-n", "8", "--json")
Card = tuple[str, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {one.name: random_weights.write(folder / f"{one.name}.gguf", one, tokenizer=True) for one in MODELS}


def pair(models: dict[str, Path], names: tuple[str, str]) -> tuple[str, str, str, str]:
    return "-m", str(models[names[0]]), "-md", str(models[names[1]])


@pytest.mark.parametrize("names", PAIRS)
def test_they_are_planned_and_warned_of(cli: Cli, models: dict[str, Path], names: tuple[str, str]) -> None:
    for where in ((), ("--vram", "8GiB"), ("--vram", "8GiB", "-ngl", "99", "-ngld", "99")):
        done = cli("plan", *pair(models, names), *where, "--json")
        assert done.code == 0, done.stderr
        assert sum(PAIRS[names] in note for note in done.document()["notes"]) == 1
        assert done.document()["options"]["speculative"] is not None


@pytest.mark.parametrize("names", PAIRS)
def test_they_run(cli: Cli, models: dict[str, Path], names: tuple[str, str], card: Card) -> None:  # noqa: F811
    for where in ((), ("--rpc", card[0])):
        done = cli("run", *pair(models, names), *where, "--draft-policy", "fixed", *SHORT)
        assert done.code == 0, done.stderr
        assert done.document()["statistics"]["drafted"] > 0


@pytest.mark.parametrize("names", [("granite", "small"), ("llama", "small-mamba")])
def test_they_are_measured(cli: Cli, models: dict[str, Path], names: tuple[str, str], card: Card) -> None:  # noqa: F811
    for where in ((), ("--rpc", card[0])):
        done = cli("bench", *pair(models, names), *where, "--draft-policy", "fixed", "-r", "1", *SHORT)
        assert done.code == 0, done.stderr
        document = done.document()
        assert document["runs"]["speculative"]["drafted"] > 0
        if names[0] == "granite":  # strict mode is not kept, which is no proof of another text
            assert document["identical_output"] is None
            assert "strict mode is impossible" in document["identity_check"]["note"]
        else:
            assert document["identical_output"] is True


def test_they_are_compared(cli: Cli, models: dict[str, Path], card: Card) -> None:  # noqa: F811
    for where in ((), ("--rpc", card[0])):
        flags = ("-m", f"{models['granite']},{models['mamba']}", "-md", f"{models['small-mamba']},lookup", *where)
        more = ("-r", "1", "--no-quality", "--results", "kept", "--fresh", *SHORT)
        done = cli("compare", *flags, *more)
        assert done.code == 0, done.stderr
        assert [cell["failure"] for cell in done.document()["cells"]] == [None] * 6


def test_a_llama_does_not_take_their_tokens_back(models: dict[str, Path]) -> None:
    """Our loop does; a ``Llama`` with a draft goes on from a state that was never taken back, and says nothing."""
    for name in ("mamba", "granite", "lfm2"):
        with (
            contextlib.closing(Llama(str(models[name]), n_ctx=512, n_threads=1, verbose=False)) as llama,
            pytest.raises(ModelError, match="cannot roll back tokens"),
        ):
            DraftModel(models["small"], llama, threads=1)
