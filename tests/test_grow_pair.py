"""scripts/grow_pair.py: the grown model computes what the small one did."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp.library import load
from ggufspec.llamacpp.quantize import FILE_TYPES, quantize

ROOT = Path(__file__).resolve().parent.parent
TRAINED = ROOT / "profiles" / "demo" / "demo-target-F16.gguf"
PROMPTS = (
    "def main():\n",
    "class Error(Exception):\n    ",
    "import os\nimport sys\n\n",
    "The with statement is used to",
)

Rows = npt.NDArray[np.float32]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grow_pair", ROOT / "scripts" / "grow_pair.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


grow_pair = _script()


# ---- a tiny model, and a plain decoding loop ------------------------------------------------------


TINY = grow_pair.Shape(width=48, layers=2, heads=6, kv_heads=2, ffn=80, vocab=290, head_size=8)


def write_tiny(path: Path, *, is_tied: bool, has_rope_freqs: bool = False, architecture: str = "llama") -> Path:
    """A llama model of random weights whose tokens are the 256 bytes and some more."""
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(TINY.width)
    writer.add_block_count(TINY.layers)
    writer.add_feed_forward_length(TINY.ffn)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.kv_heads)
    writer.add_rope_dimension_count(TINY.head_size)
    writer.add_layer_norm_rms_eps(0.02)  # large enough to be missed if it is wrong
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's names of bytes
    hidden = [byte for byte in range(256) if byte not in shown]
    pieces = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))] + ["<|endoftext|>"]
    pieces += [f"a{chr(byte)}" for byte in shown[: TINY.vocab - len(pieces)]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if piece == "<|endoftext|>" else gguf.TokenType.NORMAL for piece in pieces]
    )
    writer.add_token_merges([f"a {piece[1:]}" for piece in pieces[257:]])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, (rng.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float16))

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, rng.uniform(0.5, 1.5, size).astype(np.float32))

    q, kv = TINY.heads * TINY.head_size, TINY.kv_heads * TINY.head_size
    matrix("token_embd.weight", TINY.vocab, TINY.width)
    for i in range(TINY.layers):
        vector(f"blk.{i}.attn_norm.weight", TINY.width)
        matrix(f"blk.{i}.attn_q.weight", q, TINY.width)
        matrix(f"blk.{i}.attn_k.weight", kv, TINY.width)
        matrix(f"blk.{i}.attn_v.weight", kv, TINY.width)
        matrix(f"blk.{i}.attn_output.weight", TINY.width, q)
        vector(f"blk.{i}.ffn_norm.weight", TINY.width)
        matrix(f"blk.{i}.ffn_gate.weight", TINY.ffn, TINY.width)
        matrix(f"blk.{i}.ffn_up.weight", TINY.ffn, TINY.width)
        matrix(f"blk.{i}.ffn_down.weight", TINY.width, TINY.ffn)
    vector("output_norm.weight", TINY.width)
    if not is_tied:
        matrix("output.weight", TINY.vocab, TINY.width)
    if has_rope_freqs:
        vector("rope_freqs.weight", TINY.head_size // 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Decoder:
    """One token at a time through llama.cpp."""

    def __init__(self, lib: Any, model: Any, context: Any) -> None:
        self.lib, self.model, self.context = lib, model, context
        self.vocab = lib.llama_model_get_vocab(model)
        self.vocab_size = lib.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        buffer = (self.lib.llama_token * 64)()
        return list(buffer[: self.lib.llama_tokenize(self.vocab, text.encode(), len(text), buffer, 64, False, False)])

    def forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def step(self, token: int) -> Rows:
        one = (self.lib.llama_token * 1)(token)
        assert self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(one, 1)) == 0
        row = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), shape=(self.vocab_size,))
        return np.array(row)

    def follow(self, tokens: list[int]) -> Rows:
        """The logits after each of ``tokens``."""
        self.forget()
        return np.stack([self.step(token) for token in tokens])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt and ``count`` tokens after it."""
        self.forget()
        row = [self.step(token) for token in prompt][-1]
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(row.argmax()))
            row = self.step(tokens[-1])
        return tokens


@contextmanager
def decoder(path: Path) -> Iterator[Decoder]:
    lib = load()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path} does not load"
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 32, 32
    settings.n_threads = settings.n_threads_batch = 1
    settings.flash_attn_type = 1
    context = lib.llama_init_from_model(model, settings)
    try:
        yield Decoder(lib, model, context)
    finally:
        lib.llama_free(context)
        lib.llama_model_free(model)


def assert_same_text(small: Path, big: Path, prompts: list[list[int]], count: int, noise: float) -> None:
    """``big`` gives ``small``'s logits up to ``noise`` and a constant, and so its greedy text; no padding is chosen."""
    with decoder(small) as one, decoder(big) as other:
        for prompt in prompts:
            tokens = one.greedy(prompt, count)
            wanted, got = one.follow(tokens), other.follow(tokens)
            real = got[:, : one.vocab_size]
            difference = real - wanted
            shift = np.median(difference, axis=1, keepdims=True)
            assert np.abs(difference - shift).max() < noise
            best_two = np.sort(wanted, axis=1)[:, -2:]
            is_clear = best_two[:, 1] - best_two[:, 0] > 2 * noise
            assert is_clear.mean() > 0.8  # or this would prove little
            assert (got.argmax(1) == wanted.argmax(1))[is_clear].all()
            if other.vocab_size > one.vocab_size:
                padded = got[:, one.vocab_size :]
                assert np.isfinite(padded).all()
                assert (real.min(1) - padded.max(1) > 50).all()


def grow(*arguments: object) -> int:
    code: int = grow_pair.main([str(argument) for argument in arguments])
    return code


def options(**shape: int) -> list[str]:
    return [part for name, number in shape.items() for part in (f"--{name.replace('_', '-')}", str(number))]


TINY_PROMPTS = [[1, 2, 3], [200, 100], [65, 66, 67, 68], [257, 30, 257]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", is_tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("untied") / "untied.gguf", is_tied=False, has_rope_freqs=True)


@pytest.fixture(scope="module")
def trained() -> Path:
    if not TRAINED.exists():
        pytest.skip("the demo pair is not there")
    return TRAINED


# ---- the function stays ---------------------------------------------------------------------------


SHAPES = {
    "as it is": [],
    "width": options(width=112),
    "feed-forward": options(ffn=100),
    "depth": options(layers=5),
    "heads in larger groups": options(heads=12),
    "heads in smaller groups": options(heads=8, kv_heads=4),
    "a key-value head for every head": options(heads=7, kv_heads=7),
    "vocabulary": options(vocab=333, width=49),
    "head size, exact": options(head_size=32),
    "all": options(width=112, layers=3, heads=15, kv_heads=5, ffn=96, vocab=1000, head_size=32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["tiny", "untied"])
def test_grown_random_model_has_the_same_logits(
    kind: str, shape: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small = request.getfixturevalue(kind)
    assert grow(small, tmp_path / "big.gguf", *shape) == 0
    assert_same_text(small, tmp_path / "big.gguf", TINY_PROMPTS, 24, noise=0.01)


@pytest.mark.parametrize("size", [10, 16])
def test_other_head_sizes_round_the_queries(size: int, tiny: Path, untied: Path, tmp_path: Path) -> None:
    for small in (tiny, untied):
        assert grow(small, tmp_path / "big.gguf", "--head-size", size) == 0
        assert_same_text(small, tmp_path / "big.gguf", TINY_PROMPTS, 24, noise=0.03)


TRAINED_SHAPES = {
    "odd": options(width=416, layers=11, heads=12, kv_heads=4, ffn=1000, vocab=5001),
    "head size": options(width=384, heads=6, kv_heads=2, head_size=128),
}


@pytest.mark.parametrize("shape", TRAINED_SHAPES.values(), ids=TRAINED_SHAPES)
def test_grown_trained_model_writes_the_same_text(shape: list[str], trained: Path, tmp_path: Path) -> None:
    assert grow(trained, tmp_path / "big.gguf", *shape) == 0
    with decoder(trained) as model:
        prompts = [model.tokenize(prompt) for prompt in PROMPTS]
    assert_same_text(trained, tmp_path / "big.gguf", prompts, 64, noise=0.03)


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_quantised_model_decodes(file_type: str, tiny: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.gguf"
    shape = options(width=512, layers=4, heads=64, kv_heads=16, ffn=256, vocab=320)
    assert grow(tiny, big, *shape, "--type", file_type) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["big.gguf"]
    correlations = []
    with decoder(tiny) as small, decoder(big) as grown:
        for prompt in TINY_PROMPTS:
            wanted, got = small.follow(prompt), grown.follow(prompt)
            assert np.isfinite(got).all()
            assert (got[:, : TINY.vocab].max(1) - got[:, TINY.vocab :].max(1) > 50).all()
            correlations += [np.corrcoef(a, b[: TINY.vocab])[0, 1] for a, b in zip(wanted, got, strict=True)]
    assert np.mean(correlations) > {"Q8_0": 0.999, "Q4_0": 0.9, "Q4_K_M": 0.9}[file_type]


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0"])
def test_quantised_trained_model_decodes(file_type: str, trained: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.gguf"
    assert grow(trained, big, "--width", 512, "--layers", 9, "--heads", 8, "--kv-heads", 2, "--type", file_type) == 0
    with decoder(trained) as small, decoder(big) as grown:
        tokens = small.greedy(small.tokenize(PROMPTS[0]), 32)
        wanted, got = small.follow(tokens), grown.follow(tokens)
    assert np.isfinite(got).all()
    assert (got.argmax(1) == wanted.argmax(1)).mean() > 0.6


# ---- where heads go -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "big", "query_at", "kv_of"),
    [
        ((6, 2), (6, 2), (0, 1, 2, 3, 4, 5), (0, 1)),
        ((6, 2), (8, 2), (0, 1, 2, 4, 5, 6), (0, 1)),
        ((6, 2), (8, 4), (0, 1, 2, 4, 5, 6), (0, 0, 1, 1)),
        ((5, 1), (32, 8), (0, 1, 2, 3, 4), (0, 0)),
        ((4, 4), (8, 4), (0, 2, 4, 6), (0, 1, 2, 3)),
        ((2, 1), (3, 3), (0, 1), (0, 0)),
    ],
)
def test_query_heads_meet_their_own_key_value_head(
    small: tuple[int, int], big: tuple[int, int], query_at: tuple[int, ...], kv_of: tuple[int, ...], tiny: Path
) -> None:
    def shape(heads: int, kv_heads: int) -> Any:
        return grow_pair.replace(TINY, heads=heads, kv_heads=kv_heads)

    source = grow_pair.replace(grow_pair.read_source(tiny), shape=shape(*small))
    layout = grow_pair.fit(source, shape(*big), "F16")
    assert (layout.query_at, layout.kv_of) == (query_at, kv_of)
    for head, place in enumerate(layout.query_at):
        assert layout.kv_of[place // (big[0] // big[1])] == head // (small[0] // small[1])


# ---- the file -------------------------------------------------------------------------------------


def test_metadata_tell_the_shape_and_where_it_came_from(tiny: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.gguf"
    assert grow(tiny, big, "--width", 64, "--vocab", 300, "--layers", 3) == 0
    fields = gguf.GGUFReader(big).fields
    assert fields["general.name"].contents() == "tiny, grown to 64 wide, 3 blocks"
    assert fields["llama.context_length"].contents() == 512
    assert fields["llama.vocab_size"].contents() == 300
    tokens, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    assert tokens[-1] == "[PAD299]"
    assert types[-1] == gguf.TokenType.UNUSED
    assert len(tokens) == len(types) == 300


def test_the_same_seed_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        assert grow(tiny, file, "--layers", 4, "--random-seed", seed) == 0
    a, b, c = (file.read_bytes() for file in files)
    assert a == b
    assert a != c


def test_every_preset_holds_the_demo_target() -> None:
    target = grow_pair.Shape(width=320, layers=8, heads=5, kv_heads=1, ffn=896, vocab=4096, head_size=64)
    source = grow_pair.Source(Path("x"), "x", target, 1e-5, 1e4, "none", {}, {})
    sizes = {}
    for name, numbers in grow_pair.SHAPES.items():
        big = grow_pair.replace(target, **numbers)
        grow_pair.fit(source, grow_pair.replace(big, vocab=5000), "Q4_K_M")
        sizes[name] = big.parameters()
    millions = {"50m": 50, "150m": 150, "0.3b": 300, "1b": 1000, "3b": 3000, "8b": 7000}
    assert sizes == {name: pytest.approx(count * 1e6, rel=0.1) for name, count in millions.items()}


# ---- what is refused ------------------------------------------------------------------------------


REFUSED_SHAPES = {
    "smaller": (["--width", 32], "width 32 < 48"),
    "a smaller preset number": (["--layers", 1, "--ffn", 8], "layers 1 < 2, ffn 8 < 80"),
    "negative": (["--heads", -1], "heads -1 < 6"),
    "uneven groups": (["--heads", 7], "7 query heads cannot share 2"),
    "too few key-value heads": (["--kv-heads", 3], "need 4 key-value heads"),
    "odd head size": (["--head-size", 9], "odd"),
    "RoPE base": (["--head-size", 128], "overflows"),
    "vocabulary without a spare dimension": (["--vocab", 300], "spare dimension"),
    "vocabulary in a shared block": (
        ["--vocab", 300, "--width", 64, "--ffn", 96, "--heads", 8, "--type", "Q8_0"],
        "spare dimension",
    ),
    "rows that no block divides": (["--type", "Q4_0"], "multiple of 32 wide: width 48, ffn 80, heads x head size 48"),
    "unknown type": (["--type", "Q4_9"], "Q4_9"),
    "negative seed": (["--random-seed", -1], "negative"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED_SHAPES.values(), ids=REFUSED_SHAPES)
def test_bad_shapes_are_refused(
    arguments: list[object], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grow(tiny, tmp_path / "big.gguf", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_files_are_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "missing": (tmp_path / "missing.gguf", "No such file"),
        "folder": (tmp_path, "directory"),
        "text": (tmp_path / "text.gguf", "no GGUF file"),
        "empty": (tmp_path / "empty.gguf", "no GGUF file"),
        "short header": (tmp_path / "header.gguf", "damaged"),
        "short data": (tmp_path / "data.gguf", "damaged"),
        "other architecture": (tmp_path / "qwen.gguf", "'qwen2'"),
    }
    files["text"][0].write_text("hello")
    files["empty"][0].write_bytes(b"")
    files["short header"][0].write_bytes(tiny.read_bytes()[:1500])
    files["short data"][0].write_bytes(tiny.read_bytes()[:-20_000])
    write_tiny(files["other architecture"][0], is_tied=True, architecture="qwen2")
    for name, (path, message) in files.items():
        assert grow(path, tmp_path / "big.gguf") == 1, name
        assert message in capsys.readouterr().err, name
        assert not (tmp_path / "big.gguf").exists()


def test_unknown_tensors_are_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    biased = tmp_path / "biased.gguf"
    biased.write_bytes(tiny.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.attn_qkvx.weight"))
    assert grow(biased, tmp_path / "big.gguf") == 1
    assert "blk.0.attn_norm.weight" in capsys.readouterr().err


def test_the_result_is_whole_or_not_there(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    assert grow(copy, copy) == 2
    assert copy.read_bytes() == tiny.read_bytes()
    assert grow(copy, tmp_path / "nowhere" / "big.gguf") == 1
    assert "No such file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy.gguf"]


# ---- the quantiser --------------------------------------------------------------------------------


def test_every_file_type_is_llama_cpps_and_needs_no_importance_matrix(tiny: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.gguf"
    assert grow(tiny, wide, "--width", 256, "--heads", 32, "--kv-heads", 8, "--ffn", 256) == 0
    for name in FILE_TYPES:
        quantize(wide, tmp_path / f"{name}.gguf", name, threads=1)
        written = gguf.GGUFReader(tmp_path / f"{name}.gguf").fields["general.file_type"].contents()
        prefix = "ALL_" if name == "F32" else "MOSTLY_"
        assert gguf.LlamaFileType(written).name == prefix + name


def test_quantiser_says_what_is_wrong(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="Q4_K_X") as unknown:
        quantize(tiny, target, "Q4_K_X", 1)
    assert "Q4_K_M" in unknown.value.hint
    with pytest.raises(UsageError, match="overwrite"):
        quantize(tiny, tiny, "F16", 1)
    with pytest.raises(ModelError, match="does not exist"):
        quantize(tmp_path / "missing.gguf", target, "F16", 1)
    with pytest.raises(ModelError, match="cannot be written"):
        quantize(tiny, tmp_path / "nowhere" / "out.gguf", "F16", 1)
    text = tmp_path / "text.gguf"
    text.write_text("hello, this is no model")
    with pytest.raises(ModelError, match="cannot be quantised"):
        quantize(text, target, "F16", 1)
    assert not target.exists()
