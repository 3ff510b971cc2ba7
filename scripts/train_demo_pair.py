#!/usr/bin/env python3
"""Train the pair that ships: a llama target and the draft that is distilled from it while it learns.

The text is what every machine with Python has: the standard library's own source (its tests left out)
and the language reference that ``help()`` prints. The target learns the text. The draft then learns to guess
the target: the texts that the target itself writes, since these are what it will be asked to draft, and the
target's distribution on the corpus. Seeds are fixed; the same Python, torch and thread count give the same weights.

    pip install -e '.[train]'
    scripts/train_demo_pair.py --out .cache/train     # about 80 minutes on two cores; goes on where it left off
    cp .cache/train/demo-target-F16.gguf .cache/train/demo-draft-Q8_0.gguf .cache/train/training.json profiles/demo/

Sources: RMSNorm, rotary embeddings and SwiGLU as in Llama (Touvron et al. 2023, arXiv:2302.13971);
distillation on the target's own texts, DistillSpec (Zhou et al. 2023, arXiv:2310.08461).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from ggufspec.llamacpp.quantize import write_quantised

END_OF_TEXT = "<|endoftext|>"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Shape:
    """The shape of one llama model; ``ffn`` is the width of the gated feed-forward."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    head_size: int = 64
    context: int = 2048
    rope_base: float = 10_000.0
    eps: float = 1e-5


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights depend on, beside the text and the versions."""

    target: Shape = Shape("ggufspec demo target", layers=8, width=320, heads=5, kv_heads=1, ffn=896)
    draft: Shape = Shape("ggufspec demo draft", layers=2, width=128, heads=2, kv_heads=1, ffn=384)
    vocab: int = 4096
    target_steps: int = 1000
    draft_steps: int = 1700
    batch_tokens: int = 4096
    sequence: int = 512
    long_sequence: int = 1024
    long_share: float = 0.12
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    warmup: int = 40
    decay_share: float = 0.38
    written_batches: int = 12  # texts that the target writes greedily, ``written_rows`` at a time
    written_rows: int = 512
    written_length: int = 256
    written_prompt: int = 64
    soft_every: int = 6  # of the draft's steps, one learns the target's distribution on the corpus
    seed: int = 7


# ---- the text -------------------------------------------------------------------------------------


def documents() -> Iterator[tuple[str, str]]:
    """(name, text) of each source file and each documentation topic, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            yield str(relative), path.read_text(encoding="utf-8", errors="replace")
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topics/{name}", text


def is_held_out(name: str) -> bool:
    """One document in 32, chosen by its name, is never trained on."""
    return hashlib.sha256(name.encode()).digest()[0] < 8


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with GPT-2's pre-tokenizer, which llama.cpp knows as ``gpt-2``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one stream of token ids, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.concatenate([np.array([*encoding.ids, end], np.int64) for encoding in tokenizer.encode_batch(texts)])


# ---- the model ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(shape.width, shape.heads * shape.head_size, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * shape.head_size, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * shape.head_size, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)

    def forward(self, x: Tensor, rope: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        batch, length, _ = x.shape
        size = self.shape.head_size
        q = rotate(self.q(x).view(batch, length, -1, size), rope).transpose(1, 2)
        k = rotate(self.k(x).view(batch, length, -1, size), rope).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, size).transpose(1, 2)
        if cache is not None:  # (2, batch, kv_heads, context, size)
            cache[0][:, :, start : start + length], cache[1][:, :, start : start + length] = k, v
            k, v = cache[:, :, :, : start + length]
        if length == 1:  # the query heads of a group as rows of one: nothing is copied
            groups = q.view(batch, self.shape.kv_heads, -1, size)
            return self.o(F.scaled_dot_product_attention(groups, k, v).reshape(batch, length, -1))
        k, v = (t.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding over adjacent pairs, llama.cpp's NORM order; x is (batch, length, heads, size)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = rope[:, None, :, 0], rope[:, None, :, 1]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.attn = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.gate = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor, rope: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, cache, start)
        hidden = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Llama(nn.Module):
    """A llama-architecture language model with tied embeddings."""

    def __init__(self, shape: Shape, vocab: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        nn.init.normal_(self.embed.weight, std=0.02)
        for block in self.blocks:
            for linear in (block.attn.q, block.attn.k, block.attn.v, block.gate, block.up):
                nn.init.normal_(linear.weight, std=shape.width**-0.5)
            nn.init.zeros_(block.attn.o.weight)
            nn.init.zeros_(block.down.weight)
        frequency = shape.rope_base ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
        angle = torch.outer(torch.arange(shape.context), frequency)
        self.register_buffer("rope", torch.stack((angle.cos(), angle.sin()), -1), persistent=False)

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, start: int = 0) -> Tensor:
        """Logits (batch, length, vocab) of tokens (batch, length) that stand at ``start`` and after."""
        x = self.embed(tokens)
        rope = self.rope[start : start + tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, rope, caches[i] if caches else None, start)
        return F.linear(self.norm(x), self.embed.weight)

    @torch.inference_mode()
    def write(self, prompts: Tensor, length: int) -> Tensor:
        """Continue prompts (batch, n) greedily to (batch, length)."""
        shape = (2, len(prompts), self.shape.kv_heads, length, self.shape.head_size)
        caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in self.blocks]
        text, new, start = prompts, prompts, 0
        while text.shape[1] < length:
            with autocast():
                new, start = self(new, caches, start)[:, -1].argmax(-1, keepdim=True), text.shape[1]
            text = torch.cat((text, new), 1)
        return text

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


# ---- training -------------------------------------------------------------------------------------


class Optimizer:
    """Muon for the matrices inside the blocks, AdamW for embeddings and norms, one schedule."""

    def __init__(self, model: Llama, recipe: Recipe, steps: int) -> None:
        self.recipe, self.steps = recipe, steps
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.parts = [
            torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base = [recipe.muon_lr, recipe.adam_lr]

    def step(self, step: int) -> None:
        for part, base in zip(self.parts, self.base, strict=True):
            part.param_groups[0]["lr"] = base * self._schedule(step)
            part.step()
            part.zero_grad(set_to_none=True)

    def _schedule(self, step: int) -> float:
        """Learning-rate factor: linear warm-up, flat, linear decay to zero."""
        left = (self.steps - step) / (self.steps * self.recipe.decay_share)
        return min((step + 1) / self.recipe.warmup, 1.0, left)


@dataclass
class Text:
    """The token streams that are learned and held out, and the tokenizer."""

    tokenizer: Tokenizer
    names: list[str]
    learned: np.ndarray
    held_out: np.ndarray

    @classmethod
    def read(cls, recipe: Recipe) -> Text:
        everything = list(documents())
        learned = [text for name, text in everything if not is_held_out(name)]
        held_out = [text for name, text in everything if is_held_out(name)]
        tokenizer = train_tokenizer(learned, recipe.vocab)
        return cls(tokenizer, [name for name, _ in everything], encode(tokenizer, learned), encode(tokenizer, held_out))

    def batch(self, step: int, steps: int, recipe: Recipe) -> Tensor:
        """The (sequences, length + 1) tokens of one step; depends on the seed and the step alone."""
        is_long = step >= steps * (1 - recipe.long_share)
        length = recipe.long_sequence if is_long else recipe.sequence
        rng = np.random.default_rng((recipe.seed, step))
        starts = rng.integers(0, len(self.learned) - length - 1, recipe.batch_tokens // length)
        return torch.from_numpy(np.stack([self.learned[s : s + length + 1] for s in starts]))

    def held_out_windows(self, length: int) -> Iterator[Tensor]:
        for start in np.linspace(0, len(self.held_out) - length - 1, 32).astype(int):
            yield torch.from_numpy(self.held_out[None, start : start + length + 1])


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Checkpoint:
    """A model in training: saved every hundred steps, found again by the next run."""

    def __init__(self, path: Path, model: Llama, optimizer: Optimizer) -> None:
        self.path, self.model, self.optimizer = path, model, optimizer
        self.step, self.spent_s = 0, 0.0
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.step, self.spent_s = saved["step"], saved["spent_s"]
            model.load_state_dict(saved["model"])
            for part, state in zip(optimizer.parts, saved["optimizer"], strict=True):
                part.load_state_dict(state)
        self.began = time.monotonic() - self.spent_s

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def save(self, step: int) -> None:
        self.step, self.spent_s = step, self.seconds()
        torch.save(
            {
                "step": step,
                "spent_s": self.spent_s,
                "model": self.model.state_dict(),
                "optimizer": [part.state_dict() for part in self.optimizer.parts],
            },
            self.path,
        )


def train_target(recipe: Recipe, text: Text, out: Path) -> tuple[Llama, dict[str, object]]:
    """Learn the text; cross entropy."""
    torch.manual_seed(recipe.seed)
    target = Llama(recipe.target, recipe.vocab)
    optimizer = Optimizer(target, recipe, recipe.target_steps)
    checkpoint = Checkpoint(out / "target.pt", target, optimizer)
    for step in range(checkpoint.step, recipe.target_steps):
        batch = text.batch(step, recipe.target_steps, recipe)
        with autocast():
            logits = target(batch[:, :-1]).flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        optimizer.step(step)
        if step % 20 == 0:
            print(f"target {step:5d} {checkpoint.seconds():6.0f}s loss {loss:.3f}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.target_steps:
            checkpoint.save(step + 1)
            write_gguf(target, text.tokenizer, out / "demo-target-F16.gguf")
    with torch.inference_mode(), autocast():
        held_out = [
            F.cross_entropy(target(w[:, :-1])[0].float(), w[0, 1:]).item()
            for w in text.held_out_windows(recipe.sequence)
        ]
    return target, {"seconds": round(checkpoint.spent_s), "held_out_loss": round(float(np.mean(held_out)), 4)}


def written_texts(recipe: Recipe, target: Llama, text: Text, path: Path) -> Tensor:
    """(rows, length + 1) texts that the target writes greedily, from beginnings that it has learned."""
    if path.exists():
        return torch.load(path, weights_only=True)
    rng = np.random.default_rng(recipe.seed)
    batches = []
    for i in range(recipe.written_batches):
        starts = rng.integers(0, len(text.learned) - recipe.written_prompt, recipe.written_rows)
        prompts = torch.from_numpy(np.stack([text.learned[s : s + recipe.written_prompt] for s in starts]))
        batches.append(target.write(prompts, recipe.written_length + 1))
        print(f"written {i + 1} of {recipe.written_batches}", flush=True)
    torch.save(torch.cat(batches), path)
    return torch.cat(batches)


def distil_draft(recipe: Recipe, target: Llama, text: Text, out: Path) -> tuple[Llama, dict[str, object]]:
    """Learn to guess the target: the tokens that it wrote, and now and then its distribution on the corpus."""
    written = written_texts(recipe, target, text, out / "written.pt")
    torch.manual_seed(recipe.seed)
    draft = Llama(recipe.draft, recipe.vocab)
    optimizer = Optimizer(draft, recipe, recipe.draft_steps)
    checkpoint = Checkpoint(out / "draft.pt", draft, optimizer)
    for step in range(checkpoint.step, recipe.draft_steps):
        if step % recipe.soft_every == recipe.soft_every - 1:
            inputs = text.batch(step, recipe.draft_steps, recipe)[:, :-1]
            with torch.no_grad(), autocast():
                labels = target(inputs).flatten(0, 1).float().softmax(-1)
        else:
            rng = np.random.default_rng((recipe.seed, step))
            rows = written[rng.integers(0, len(written), recipe.batch_tokens // recipe.written_length)]
            inputs, labels = rows[:, :-1], rows[:, 1:].clone()
            labels[:, : recipe.written_prompt - 1] = -100  # not the target's words
            labels = labels.flatten()
        with autocast():
            guess = draft(inputs).flatten(0, 1).float()
        loss = F.cross_entropy(guess, labels)
        loss.backward()
        optimizer.step(step)
        if step % 50 == 0:
            agreement = (guess.argmax(-1) == labels)[labels >= 0].float().mean()
            print(f"draft {step:5d} {checkpoint.seconds():6.0f}s loss {loss:.3f} agreement {agreement:.3f}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.draft_steps:
            checkpoint.save(step + 1)
            write_gguf(draft, text.tokenizer, out / "demo-draft-F16.gguf")
    with torch.inference_mode(), autocast():
        agreement = [
            (draft(w[:, :-1]).argmax(-1) == target(w[:, :-1]).argmax(-1)).float().mean().item()
            for w in text.held_out_windows(recipe.sequence)
        ]
    return draft, {"seconds": round(checkpoint.spent_s), "held_out_top1_agreement": round(float(np.mean(agreement)), 4)}


def train(recipe: Recipe, out: Path) -> None:
    text = Text.read(recipe)
    print(f"{len(text.names)} documents, {len(text.learned):,} tokens, {len(text.held_out):,} held out", flush=True)
    target, target_record = train_target(recipe, text, out)
    draft, draft_record = distil_draft(recipe, target, text, out)
    write_quantised(out / "demo-draft-F16.gguf", out / "demo-draft-Q8_0.gguf", "Q8_0", 1)
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "recipe": asdict(recipe),
        "target": {"parameters": target.parameter_count(), **target_record},
        "draft": {"parameters": draft.parameter_count(), **draft_record},
        "corpus": {
            "documents": len(text.names),
            "tokens": len(text.learned),
            "held_out_tokens": len(text.held_out),
            "held_out": [name for name in text.names if is_held_out(name)],
        },
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"target": record["target"], "draft": record["draft"]}), flush=True)


# ---- the files ------------------------------------------------------------------------------------


def write_gguf(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    """One llama GGUF: matrices in F16, norms in F32, a BPE tokenizer with no chat template."""
    shape = model.shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(shape.name)
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(tokenizer.get_vocab_size())

    bpe = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(bpe["vocab"], key=bpe["vocab"].get)
    end = tokenizer.token_to_id(END_OF_TEXT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if piece == END_OF_TEXT else gguf.TokenType.NORMAL for piece in pieces]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)

    def add(name: str, weight: Tensor) -> None:
        dtype = np.float32 if weight.ndim == 1 else np.float16
        writer.add_tensor(name, weight.detach().float().numpy().astype(dtype))

    add("token_embd.weight", model.embed.weight)
    for i, block in enumerate(model.blocks):
        add(f"blk.{i}.attn_norm.weight", block.attn_norm.weight)
        add(f"blk.{i}.attn_q.weight", block.attn.q.weight)
        add(f"blk.{i}.attn_k.weight", block.attn.k.weight)
        add(f"blk.{i}.attn_v.weight", block.attn.v.weight)
        add(f"blk.{i}.attn_output.weight", block.attn.o.weight)
        add(f"blk.{i}.ffn_norm.weight", block.ffn_norm.weight)
        add(f"blk.{i}.ffn_gate.weight", block.gate.weight)
        add(f"blk.{i}.ffn_up.weight", block.up.weight)
        add(f"blk.{i}.ffn_down.weight", block.down.weight)
    add("output_norm.weight", model.norm.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, GGUF files and training.json")
    parser.add_argument("--target-steps", type=int, default=Recipe.target_steps)
    parser.add_argument("--draft-steps", type=int, default=Recipe.draft_steps)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(Recipe(target_steps=arguments.target_steps, draft_steps=arguments.draft_steps), arguments.out)


if __name__ == "__main__":
    main()
