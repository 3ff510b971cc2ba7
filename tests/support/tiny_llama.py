"""A tiny llama model of random weights, and a plain decoding loop on llama.cpp's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ggufspec.llamacpp.library import load_library
from lab.expansion import Shape

Rows = npt.NDArray[np.float32]

TINY = Shape(width=48, layers=2, heads=6, kv_heads=2, ffn=80, vocab=290, head_size=8)
PROMPTS = [[1, 2, 3], [200, 100], [65, 66, 67, 68], [257, 30, 257]]


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
    lib = load_library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # AMX's kernels, for some shapes only, do not round activations to F16
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
