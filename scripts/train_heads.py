#!/usr/bin/env python3
"""Train the heads of the demo target: an EAGLE-3 head, and an MTP block for the target in its form as ``mimo2``.

Both learn the target's own distribution on the text that it was trained on (scripts/train_demo_pair.py), with the
target's weights as they ship. Each step reads the target's rows once and unrolls the head over three drafted tokens, on
its own rows after the first, as it will be used ("training-time test").

    pip install -e '.[train]'
    scripts/train_heads.py --out .cache/heads     # about 30 minutes on two cores; goes on where it left off
    cp .cache/heads/demo-eagle3-Q8_0.gguf .cache/heads/mtp-demo-Q8_0.gguf .cache/heads/heads.json profiles/demo/

Sources: EAGLE-3 (Li et al. 2025, arXiv:2503.01840); multi-token prediction (DeepSeek-V3, 2024, arXiv:2412.19437);
tensors and order of rows as in llama.cpp's src/models/eagle3.cpp and src/models/mimo2.cpp.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_demo_pair as pair  # noqa: E402

from ggufspec.llamacpp.quantize import write_quantised  # noqa: E402
from lab.mimo2 import write_mimo2  # noqa: E402

TARGET = ROOT / "profiles" / "demo" / "demo-target-F16.gguf"


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights depend on, beside the text, the target and the versions."""

    target: pair.Shape = pair.Recipe().target
    layers: tuple[int, ...] = (2, 4, 6)  # whose inputs EAGLE-3 reads
    draft_vocab: int = 2048
    steps: int = 700
    batch_tokens: int = 2048
    sequence: int = 256
    unrolled: int = 3
    fade: float = 0.8  # weight of each further drafted token
    muon_lr: float = 0.01
    adam_lr: float = 0.002
    warmup: int = 20
    decay_share: float = 0.5
    seed: int = 11
    vocab: int = field(default=pair.Recipe().vocab)


# ---- the target, as it ships ----------------------------------------------------------------------


def read_target(recipe: Recipe) -> tuple[pair.Llama, Tokenizer]:
    """The shipped target's weights, and its tokenizer."""
    reader = gguf.GGUFReader(TARGET)
    values = {t.name: torch.from_numpy(np.array(t.data, np.float32)) for t in reader.tensors}
    target = pair.Llama(recipe.target, recipe.vocab)
    state = {"embed.weight": values["token_embd.weight"], "norm.weight": values["output_norm.weight"]}
    for i in range(recipe.target.layers):
        for ours, theirs in BLOCK.items():
            state[f"blocks.{i}.{ours}.weight"] = values[f"blk.{i}.{theirs}.weight"]
    target.load_state_dict(state)
    target.requires_grad_(requires_grad=False)
    fields = {f.name: f.contents() for f in reader.fields.values() if f.name.startswith("tokenizer.")}
    tokens = {text: index for index, text in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(tokens, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return target, tokenizer


BLOCK = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


@torch.no_grad()
def rows_of(target: pair.Llama, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(joined inputs of ``layers``, rows behind the last block, logits) of tokens (batch, length)."""
    x = target.embed(tokens)
    rope = target.rope[: tokens.shape[1]]
    inputs = {}
    for i, block in enumerate(target.blocks):
        inputs[i] = x
        x = block(x, rope)
    return torch.cat([inputs[i] for i in layers], -1), x, F.linear(target.norm(x), target.embed.weight)


# ---- the heads ------------------------------------------------------------------------------------


class HeadAttention(nn.Module):
    """Attention over the true pairs before a chain, and over the chain's own."""

    def __init__(self, shape: pair.Shape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(inputs, shape.heads * shape.head_size, bias=False)
        self.k = nn.Linear(inputs, shape.kv_heads * shape.head_size, bias=False)
        self.v = nn.Linear(inputs, shape.kv_heads * shape.head_size, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)

    def forward(self, x: Tensor, rope: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend at step ``len(cache)`` of a chain, and add its keys and values to the cache.

        At position p of step s the true pairs are those up to p - s, and of step t > 0 there is one, at p - s + t.
        """
        batch, length, _ = x.shape
        size, step = self.shape.head_size, len(cache)
        q = pair.rotate(self.q(x).view(batch, length, -1, size), rope).transpose(1, 2)
        k = pair.rotate(self.k(x).view(batch, length, -1, size), rope).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, size).transpose(1, 2)
        cache.append((k, v))
        first_k, first_v = cache[0]
        allowed = torch.ones(length, length, dtype=torch.bool).tril(-step)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(~allowed, -torch.inf)]
        chain = [(shifted(k, step - t), shifted(v, step - t)) for t, (k, v) in enumerate(cache) if t]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in chain]
        weights = (torch.cat(scores, -1) / size**0.5).softmax(-1)
        mixed = weights[..., :length] @ first_v
        for t, (_, v) in enumerate(chain):
            mixed = mixed + weights[..., length + t : length + t + 1] * v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


def shifted(x: Tensor, count: int) -> Tensor:
    """The numbers (batch, heads, length, size) that stand ``count`` positions before each."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


class Head(nn.Module):
    """One block that reads (token, row) pairs; what both kinds share."""

    def __init__(self, shape: pair.Shape, attention_inputs: int) -> None:
        super().__init__()
        self.attn = HeadAttention(shape, attention_inputs)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.gate = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        for linear in (self.attn.q, self.attn.k, self.attn.v, self.gate, self.up):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.attn.o.weight)
        nn.init.zeros_(self.down.weight)

    def feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Eagle3(Head):
    """Reads rows of three layers through ``fc``; knows the likeliest tokens only."""

    def __init__(self, recipe: Recipe) -> None:
        shape = recipe.target
        super().__init__(shape, 2 * shape.width)
        self.fc = nn.Linear(len(recipe.layers) * shape.width, shape.width, bias=False)
        self.embed_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.row_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.output = nn.Linear(shape.width, recipe.draft_vocab, bias=False)
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)

    def step(self, embedded: Tensor, row: Tensor, rope: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The row after these pairs."""
        joined = torch.cat([self.embed_norm(embedded), self.row_norm(row)], -1)
        return self.feed_forward(row + self.attn(joined, rope, cache))


class Mtp(Head):
    """Reads the rows behind the last block through ``eh_proj``."""

    def __init__(self, recipe: Recipe) -> None:
        shape = recipe.target
        super().__init__(shape, shape.width)
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.enorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.hnorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.eh_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        nn.init.normal_(self.eh_proj.weight, std=(2 * shape.width) ** -0.5)

    def step(self, embedded: Tensor, row: Tensor, rope: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The row after these pairs."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(row)], -1))
        return self.feed_forward(x + self.attn(self.attn_norm(x), rope, cache))


# ---- training -------------------------------------------------------------------------------------


def chains(kind: str, head: Head, target: pair.Llama, known: Tensor, tokens: Tensor, recipe: Recipe) -> list[Tensor]:
    """Loss of each drafted token, (steps,), and the share of top-1 agreement in the last entry, (steps,)."""
    features, last, logits = rows_of(target, tokens, recipe.layers)
    if kind == "eagle3":  # the pair at position p is token p + 1 and the row of p; it foretells token p + 2
        rows, paired, wanted = head.fc(features[:, :-1]), tokens[:, 1:], logits[:, 1:]
    else:  # token p and the row of p - 1; it foretells token p + 1
        rows, paired, wanted = F.pad(last, (0, 0, 1, 0))[:, :-1], tokens, logits
    rope = target.rope[: paired.shape[1]]
    embedded = F.embedding(paired, target.embed.weight)
    losses, agreements = [], []
    cache: list[tuple[Tensor, Tensor]] = []
    for step in range(recipe.unrolled):
        out = head.step(embedded, rows, rope, cache)
        normed = head.norm(out)
        guess = head.output(normed) if kind == "eagle3" else F.linear(normed, target.embed.weight)
        labels = wanted[..., known] if kind == "eagle3" else wanted
        seen = slice(step, None)  # positions that have a whole chain before them
        loss = F.cross_entropy(guess[:, seen].flatten(0, 1).float(), labels[:, seen].flatten(0, 1).float().softmax(-1))
        losses.append(loss)
        ours = known[guess.argmax(-1)] if kind == "eagle3" else guess.argmax(-1)
        agreements.append((ours == wanted.argmax(-1))[:, seen].float().mean())
        rows = F.pad(out, (0, 0, 1, 0))[:, :-1]  # of the pair before: its own row
    return [torch.stack(losses), torch.stack(agreements)]


def train(
    kind: str, recipe: Recipe, target: pair.Llama, text: pair.Text, known: Tensor, out: Path
) -> dict[str, object]:
    """Train one kind of head, and write its file every hundred steps."""
    torch.manual_seed(recipe.seed)
    head = Eagle3(recipe) if kind == "eagle3" else Mtp(recipe)
    head.norm.weight.data.copy_(target.norm.weight)
    if isinstance(head, Eagle3):
        head.output.weight.data.copy_(target.embed.weight[known])
    optimizer = pair.Optimizer(head, recipe, recipe.steps)
    checkpoint = pair.Checkpoint(out / f"{kind}.pt", head, optimizer)
    weights = recipe.fade ** torch.arange(recipe.unrolled)
    for step in range(checkpoint.step, recipe.steps):
        tokens = batch(text.learned, step, recipe)
        with pair.autocast():
            losses, agreements = chains(kind, head, target, known, tokens, recipe)
        (losses * weights).sum().backward()
        optimizer.step(step)
        if step % 20 == 0:
            shares = " ".join(f"{share:.3f}" for share in agreements)
            print(f"{kind} {step:5d} {checkpoint.seconds():6.0f}s loss {losses[0]:.3f} agreement {shares}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            checkpoint.save(step + 1)
            write(kind, head, known, recipe, out)
    with torch.inference_mode(), pair.autocast():
        windows = [w[:, :-1] for w in text.held_out_windows(recipe.sequence)]
        agreements = [chains(kind, head, target, known, w, recipe)[1] for w in windows]
    return {
        "parameters": sum(p.numel() for p in head.parameters()),
        "seconds": round(checkpoint.spent_s),
        "held_out_top1_agreement": [round(float(share), 4) for share in torch.stack(agreements).mean(0)],
    }


def batch(learned: np.ndarray, step: int, recipe: Recipe) -> Tensor:
    """The (sequences, length) tokens of one step; depends on the seed and the step alone."""
    rng = np.random.default_rng((recipe.seed, step))
    starts = rng.integers(0, len(learned) - recipe.sequence, recipe.batch_tokens // recipe.sequence)
    return torch.from_numpy(np.stack([learned[s : s + recipe.sequence] for s in starts]))


# ---- the files ------------------------------------------------------------------------------------


def write(kind: str, head: Head, known: Tensor, recipe: Recipe, out: Path) -> None:
    """The head's GGUF in F16 and in Q8_0."""
    state = {name: value.detach().numpy() for name, value in head.state_dict().items()}
    if kind == "mtp":
        names = {**{f"{ours}.weight": f"{theirs}.weight" for ours, theirs in BLOCK.items()}}
        names |= {f"{n}.weight": f"nextn.{n}.weight" for n in ("eh_proj", "enorm", "hnorm")}
        names |= {"norm.weight": "nextn.shared_head_norm.weight"}
        block = {names[ours]: value for ours, value in state.items()}
        write_mimo2(TARGET, out / "mtp-demo-F16.gguf", [block], "head")
        write_mimo2(TARGET, out / "demo-mimo2-F16.gguf", [block])
        write_quantised(out / "mtp-demo-F16.gguf", out / "mtp-demo-Q8_0.gguf", "Q8_0", 1)
        return
    write_eagle3(state, known, recipe, out / "demo-eagle3-F16.gguf")
    write_quantised(out / "demo-eagle3-F16.gguf", out / "demo-eagle3-Q8_0.gguf", "Q8_0", 1)


def write_eagle3(state: dict[str, np.ndarray], known: Tensor, recipe: Recipe, path: Path) -> None:
    """The EAGLE-3 head: matrices in F16, norms in F32, the target's tokenizer; embeddings are the target's."""
    shape = recipe.target
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_name("ggufspec demo EAGLE-3 head")
    writer.add_license("MIT")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_uint32("eagle3.vocab_size", recipe.vocab)
    writer.add_array("eagle3.target_layers", list(recipe.layers))
    writer.add_uint32("eagle3.target_hidden_size", shape.width)
    for entry in gguf.GGUFReader(TARGET).fields.values():
        if entry.name.startswith("tokenizer."):
            kind, of = entry.types[0], entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(entry.name, entry.contents(), kind, of)
    names = {f"{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in BLOCK.items() if ours != "attn_norm"}
    names |= {"embed_norm.weight": "blk.0.attn_norm.weight", "row_norm.weight": "blk.0.attn_norm_2.weight"}
    names |= {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight", "output.weight": "output.weight"}
    for ours, value in state.items():
        writer.add_tensor(names[ours], value.astype(np.float16 if value.ndim > 1 else np.float32))
    writer.add_tensor("d2t", known.numpy().astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, both heads and the record")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="optimizer steps of each head")
    parser.add_argument("--kinds", nargs="+", default=["eagle3", "mtp"], choices=["eagle3", "mtp"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(steps=arguments.steps)
    target, tokenizer = read_target(recipe)
    everything = list(pair.documents())
    learned = pair.encode(tokenizer, [text for name, text in everything if not pair.is_held_out(name)])
    held_out = pair.encode(tokenizer, [text for name, text in everything if pair.is_held_out(name)])
    text = pair.Text(tokenizer, [name for name, _ in everything], learned, held_out)
    counts = np.bincount(learned, minlength=recipe.vocab)
    known = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: recipe.draft_vocab]))
    print(f"{len(learned):,} tokens, {counts[known].sum() / counts.sum():.1%} of them known to EAGLE-3", flush=True)
    began = time.monotonic()
    path = arguments.out / "heads.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    for kind in arguments.kinds:
        records[kind] = {
            **train(kind, recipe, target, text, known, arguments.out),
            "recipe": asdict(recipe),
            "corpus": {"documents": len(everything), "tokens": len(learned), "held_out_tokens": len(held_out)},
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        path.write_text(json.dumps(records, indent=1) + "\n")
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
