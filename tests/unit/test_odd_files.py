"""Whole files unlike most, with the demo pair's weights: another alignment, padded vocabularies, texts that repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufspec import SpeculativeDecoder
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import ModelError
from ggufspec.llamacpp.gguf import UnusableError, parse_header
from ggufspec.llamacpp.model import Model
from ggufspec.llamacpp.quantize import run_dry, write_quantised
from ggufspec.models.headers import read_prefix
from ggufspec.models.locate import LocalFile
from tests.support.gguf_files import rewritten
from tests.support.processes import Cli

PROMPT = "import os\n\ndef "
ALONE = DecoderOptions(ctx_size=512, threads=1, drafters=())
TOKENS = "tokenizer.ggml.tokens"


def written(target: Path, draft: Path | None = None, options: DecoderOptions = ALONE, **more: Any) -> list[int]:
    with SpeculativeDecoder(target, draft, options) as decoder:
        return [one.token for one in decoder.generate(more.pop("prompt", PROMPT), max_tokens=24, **more)]


# ---- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [8, 16, 64, 128])
def test_another_alignment_changes_nothing(draft: Path, tmp_path: Path, alignment: int) -> None:
    """Weights of the smaller ones may begin where llama.cpp cannot use a mapped file."""
    expected, begins = written(draft), set()
    for length in range(0, 32, 8):
        file = rewritten(draft, tmp_path / "aligned.gguf", alignment=alignment, template=" " * (length + 1))
        begins.add(parse_header(file.read_bytes()).data_offset % 32)
        assert written(file) == expected
    assert len(begins) == max(1, 32 // alignment)


@pytest.mark.parametrize("alignment", [16, 64, 128])
def test_what_is_quantised_of_it_is_the_same(draft: Path, tmp_path: Path, alignment: int) -> None:
    file = rewritten(draft, tmp_path / "aligned.gguf", alignment=alignment)
    data = []
    for source in (draft, file):
        chosen = run_dry(source, "Q4_0")
        write_quantised(source, tmp_path / "out.gguf", "Q4_0", 1, requantize=True)
        out = (tmp_path / "out.gguf").read_bytes()
        assert len(out) == chosen.file_bytes
        data.append(out[parse_header(out).data_offset :])
    assert parse_header(out).metadata["general.alignment"] == 32
    assert data[0] == data[1]


def test_a_file_without_the_padding_at_its_end_is_whole(draft: Path, tmp_path: Path) -> None:
    file = rewritten(draft, tmp_path / "cut.gguf", alignment=4096)
    data = file.read_bytes()
    end = parse_header(data).end
    assert end < len(data)
    file.write_bytes(data[:end])
    read_prefix(LocalFile.at(file))
    assert written(file) == written(draft)
    file.write_bytes(data[: end - 1])
    with pytest.raises(ModelError, match=f"truncated: it has {end - 1:,} of {end:,} bytes"):
        read_prefix(LocalFile.at(file))


@pytest.mark.parametrize("alignment", [0, 24])
def test_an_impossible_alignment_is_said(draft: Path, tmp_path: Path, alignment: int) -> None:
    data = bytearray(rewritten(draft, tmp_path / "odd.gguf", alignment=64).read_bytes())
    place = data.index(b"general.alignment") + len(b"general.alignment") + 4
    data[place : place + 4] = alignment.to_bytes(4, "little")
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=f"^odd.gguf: alignment {alignment} is not a power of 2$"):
        read_prefix(LocalFile.at(tmp_path / "odd.gguf"))


# ---- texts of tokens -------------------------------------------------------------------------------------------------


def with_tokens(change: Callable[[list[str]], None]) -> Callable[[str, Any], Any]:
    def value(name: str, value: Any) -> Any:
        if name == TOKENS:
            change(value)
        return value

    return value


def test_two_tokens_with_one_text_are_told_by_their_ids(cli: Cli, target: Path, draft: Path, tmp_path: Path) -> None:
    def change(texts: list[str]) -> None:
        texts[302] = texts[301]

    twice = rewritten(draft, tmp_path / "twice.gguf", value=with_tokens(change))
    for files in (("-m", twice), ("-m", target, "-md", twice)):
        for command in (("plan",), ("run", "-p", "x", "-n", "1")):
            done = cli(*command, *files)
            assert done.code == 1
            assert "twice.gguf: tokens 301 and 302 have the same text" in done.stderr
            assert "SIGABRT" not in done.stderr


def test_empty_texts_are_not_one_text(draft: Path, tmp_path: Path) -> None:
    """llama.cpp calls them by their ids, which another token's text may be."""

    def change(texts: list[str]) -> None:
        texts[301] = texts[302] = ""

    empty = rewritten(draft, tmp_path / "empty.gguf", value=with_tokens(change))
    parse_header(empty.read_bytes())
    with Model(empty, vocab_only=True) as model:
        assert model.vocabulary()[301:303] == [b"[EMPTY_301]", b"[EMPTY_302]"]

    def spell(texts: list[str]) -> None:
        texts[301], texts[302] = "", "[EMPTY_301]"

    spelt = rewritten(draft, tmp_path / "spelt.gguf", value=with_tokens(spell))
    with pytest.raises(UnusableError, match="tokens 301 and 302"):
        parse_header(spelt.read_bytes())


def test_a_vocabulary_alone_is_told_before_it_is_loaded(cli: Cli, draft: Path, tmp_path: Path) -> None:
    data = draft.read_bytes()
    place = 8  # the number of tensors
    (tmp_path / "vocabulary.gguf").write_bytes(data[:place] + bytes(8) + data[place + 8 :])
    for command in (("plan",), ("run", "-p", "x")):
        done = cli(*command, "-m", tmp_path / "vocabulary.gguf")
        assert done.code == 1
        assert "vocabulary.gguf has no tensors\n  next: a vocabulary alone is not a model" in done.stderr


# ---- vocabularies of other lengths -----------------------------------------------------------------------------------


def padded(source: Path, path: Path, more: int) -> Path:
    """With ``more`` unused tokens, whose rows are those of token 0."""

    def value(name: str, value: Any) -> Any:
        if name == TOKENS:
            return value + [f"[PAD{i}]" for i in range(more)]
        if name == "tokenizer.ggml.token_type":
            return value + [5] * more
        if name == "tokenizer.ggml.scores":
            return value + [-1e4] * more
        return value + more if name.endswith("vocab_size") else value

    def data(name: str, data: Any) -> Any:
        rows = name in ("token_embd.weight", "output.weight")
        return np.concatenate([data, np.repeat(data[:1], more, axis=0)]) if rows else data

    return rewritten(source, path, value=value, data=data)


@pytest.mark.parametrize("more", [64, 128])
@pytest.mark.parametrize("longer", ["target", "draft"])
def test_a_vocabulary_that_is_padded_otherwise_serves(
    target: Path, draft: Path, tmp_path: Path, more: int, longer: str
) -> None:
    """The prompt has a token that the shorter one lacks, where that is the draft."""
    with Model(target, vocab_only=True) as model:
        prompt = model.tokenize(PROMPT)
        size = model.vocab_size
    if longer == "target":
        target, prompt = padded(target, tmp_path / "padded.gguf", more), [size + more - 1, *prompt, size, *prompt]
    else:
        draft = padded(draft, tmp_path / "padded.gguf", more)
    options = DecoderOptions(ctx_size=256, threads=1, draft_policy="fixed", draft_max=4, strict=True)
    with SpeculativeDecoder(target, draft, options) as pair:
        answer = [one.token for one in pair.generate(prompt, max_tokens=24)]
        assert pair.statistics is not None
        assert pair.statistics.accepted > 0
        assert answer == [one.token for one in pair.generate(prompt, max_tokens=24, alone="target")]


def test_one_that_is_longer_by_more_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    longer = padded(target, tmp_path / "padded.gguf", 129)
    with pytest.raises(ModelError, match=r"the target has 4,225 tokens, the draft 4,096"):
        SpeculativeDecoder(longer, draft, DecoderOptions(ctx_size=256, threads=1)).close()


def test_equal_requests_are_drafted_for_alike(draft: Path) -> None:
    """Past a micro-batch, up to the context's end, and again and again."""
    options = DecoderOptions(
        ctx_size=512, threads=1, ubatch_size=64, drafters=("lookup",), draft_policy="fixed", draft_max=8
    )
    with SpeculativeDecoder(draft, None, options) as decoder:
        prompt = (decoder.target.tokenize("    return os.path.join(a, b)\n") * 60)[:470]
        seen = []
        for _ in range(10):
            tokens = [one.token for one in decoder.generate(prompt, max_tokens=32)]
            assert decoder.statistics is not None
            seen.append((tokens, decoder.statistics.drafted, decoder.statistics.accepted))
    assert seen[0][1] >= seen[0][2] > 0
    assert seen == seen[:1] * 10


def test_what_lookup_drafts_is_within_the_grammar(draft: Path) -> None:
    options = DecoderOptions(ctx_size=512, threads=1, drafters=("lookup",), draft_policy="fixed", draft_max=8)
    more = {"prompt": "[1, 2, 3]\n" * 20, "grammar": 'root ::= "[" [0-9]+ (", " [0-9]+)* "]"'}
    assert written(draft, None, options, **more) == written(draft, None, **more)
