"""How many tokens of context: ``-c max``, a context beyond what a model was trained for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from processes import Cli

from ggufspec import SpeculativeDecoder, api
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.models.source import read_headers
from ggufspec.settings import Settings


@pytest.fixture(scope="module")
def trained(target: Path) -> int:
    return read_headers([target])[0].header.context_length


@pytest.mark.parametrize("typed", ["0", "max", "MAX"])
def test_max_is_what_the_target_was_trained_for(cli: Cli, trained: int, typed: str) -> None:
    plan = cli("plan", "demo", "-c", typed, "--vram", "24GiB", "--json").document()
    assert plan["settings"]["ctx_size"] == trained
    assert not any("trained for" in note for note in plan["notes"])


def test_every_command_takes_it(cli: Cli, trained: int) -> None:
    run = cli("run", "demo", "-c", "max", "-p", "import", "-n", "2", "--json").document()
    assert run["settings"]["ctx_size"] == trained
    assert f"-c {trained + 256} " in cli("export", "demo", "-c", "max", "--to", "llama-server").stdout
    assert Settings(ctx_size="max").ctx_size == 0  # type: ignore[arg-type]  # as Python callers may type it
    resolved = api.resolve(api.spec_of("demo"), Settings(ctx_size=0), rival=True)
    assert (resolved.pair.ctx_size, resolved.alone.ctx_size) == (trained, trained)


def test_a_decoder_takes_it(target: Path, trained: int) -> None:
    with SpeculativeDecoder(target, None, DecoderOptions(ctx_size=0, threads=1)) as decoder:
        assert decoder.options.ctx_size == trained
        assert decoder.notes == []


def test_a_target_that_does_not_say(target: Path) -> None:
    silent = replace(read_headers([target])[0].header, context_length=0)
    with pytest.raises(UsageError, match="does not say") as refused:
        api.with_context(DecoderOptions(ctx_size=0), silent)
    assert refused.value.hint == "give a number: -c 8192"
    assert api.with_context(DecoderOptions(ctx_size=512), silent).ctx_size == 512


def test_beyond_the_training_is_a_warning_that_says_what_it_does(cli: Cli, trained: int) -> None:
    plan = cli("plan", "demo", "-c", str(trained + 1), "--vram", "24GiB", "--json").document()
    notes = [note for note in plan["notes"] if "trained for" in note]
    assert len(notes) == 2
    assert f"was trained for {trained:,} tokens of context: beyond them answers get worse" in notes[0]
    assert "fewer of its drafts are accepted" in notes[1]
    done = cli("run", "demo", "--no-draft", "-c", str(trained + 1), "-p", "import", "-n", "2")
    assert done.code == 0
    assert "beyond them answers get worse, as no rope scaling is set" in done.stderr
