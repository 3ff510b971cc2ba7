"""Interpretation of a model's header as its shape. Pure: parsed GGUF parts in, a :class:`ModelHeader` out.

:mod:`ggufspec.models.headers` reads and caches headers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ggufspec.errors import ModelError
from ggufspec.llamacpp.gguf import Gguf, GgufTensor, Value
from ggufspec.models import architecture

_BLOCK = re.compile(r"blk\.(\d+)\.")
_SPECIAL = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
_MOST_BLOCKS, _MOST_EXPERTS = 512, 1024  # llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS (src/llama-hparams.h)
_MOST = 1 << 24  # maximum of any size, so that a product of three sizes, summed over all blocks, fits in 64 bits
_LONGEST_WINDOW = 2**31 - 1
_MOST_BYTES = 2**63
_AGAIN = "the file is damaged or not a language model: download it again"
# Files that are not models, by general.type (GGUFType in gguf-py/gguf/constants.py) or, in older files, by architecture
_OTHERS = {"imatrix": "an importance matrix", "adapter": "an adapter", "controlvector": "a control vector"}
_OTHERS |= {"mmproj": "a projector", "clip": "a projector"}


class NoModelError(ModelError):
    """Error for a GGUF file that is not a model."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Vocabulary of a model. ``digest`` is the SHA-256 of all token texts; equal digests mean equal vocabularies."""

    model: str
    pre: str
    size: int
    digest: str
    adds_bos: bool | None
    special: dict[str, int]


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """Shape of one model, read only from its header.

    Per-block tuples have ``blocks`` entries, including NextN blocks, as in placements (src/llama-model.cpp).
    """

    name: str  # name of the file, or of the first part if the model is split
    size_bytes: int  # total size of all parts
    parts: int  # number of files
    architecture: str  # llama.cpp's name for the architecture
    blocks: int  # number of all blocks
    nextn_blocks: int  # number of multi-token-prediction blocks at the end
    embedding: int  # width of the residual stream
    heads: tuple[int, ...]  # query heads per block; 0 if a block has no attention
    kv_heads: tuple[int, ...]  # key-value heads per block
    key_size: int  # elements in one head's key
    value_size: int  # elements in one head's value
    key_size_windowed: int  # ``key_size`` in blocks with a sliding window
    value_size_windowed: int  # ``value_size`` in blocks with a sliding window
    feed_forward: tuple[int, ...]  # width of each block's feed-forward
    experts: int  # experts per block; 0 for a dense model
    experts_used: int  # experts used per token
    sliding_window: int  # size of the sliding attention window in tokens; 0 if no block has one
    windowed: tuple[bool, ...]  # True for each block with a sliding window
    recurrent: tuple[bool, ...]  # True for each block with a recurrent state
    conv_numbers: int  # f32 elements of a recurrent block's convolution or token-shift state, per sequence
    state_numbers: int  # f32 elements of a recurrent block's main state, per sequence
    cached: tuple[bool, ...]  # True for each block with its own KV cache
    latent: int  # elements that MLA caches per token instead of keys and values; 0 without MLA
    vocabulary: int  # number of rows in the output matrix
    context_length: int  # context length that the model was trained with, in tokens
    tokenizer: Tokenizer  # vocabulary, which gives token ids their meaning
    regular: bool  # True if :mod:`ggufspec.planning.memory` can compute cache sizes, False if only a dry run can
    metadata: dict[str, Value]  # every scalar and short array in the header, by key
    tensors: tuple[GgufTensor, ...]  # all tensors in all parts

    @property
    def fingerprint(self) -> str:
        """Digest of the whole header, equal for all copies of a file under any name, on the hub or on this machine."""
        said = [self.architecture, self.metadata, self.tokenizer.digest, [asdict(tensor) for tensor in self.tensors]]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def has_chat_template(self) -> bool:
        return bool(str(self.metadata.get("tokenizer.chat_template", "")).strip())

    @property
    def layers(self) -> int:
        """Number of layers as ``-ngl`` counts them: the blocks and the output."""
        return self.blocks + 1

    @property
    def tied(self) -> bool:
        """True if the token embedding is also the output matrix."""
        return not any(tensor.name == "output.weight" for tensor in self.tensors)

    def keys(self, block: int) -> int:
        """Return the number of key elements per token in a block."""
        return self.kv_heads[block] * (self.key_size_windowed if self.windowed[block] else self.key_size)

    def values(self, block: int) -> int:
        """Return the number of value elements per token in a block; MLA does not cache them."""
        return self.kv_heads[block] * (self.value_size_windowed if self.windowed[block] else self.value_size)

    def weight_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def block_of(tensor: GgufTensor) -> int | None:
    """Return the index of a tensor's block, or None for a tensor outside the blocks, such as the embedding."""
    match = _BLOCK.match(tensor.name)
    return int(match[1]) if match else None


def interpret(name: str, parts: Sequence[Gguf], size_bytes: int) -> ModelHeader:
    """Interpret a model's header, or the headers of all parts of a split model in order.

    Source: ``llama_model_base::load_hparams`` in src/llama-model.cpp and the sources of
    :mod:`ggufspec.models.architecture`.

    Raises:
        NoModelError: the file is not a model.
        ModelError: a header key that llama.cpp needs is missing or has an impossible value.
    """
    if not parts:
        raise ModelError(f"{name} has no header", _AGAIN)
    metadata = parts[0].metadata
    for key in ("general.type", "general.architecture"):
        if (kind := metadata.get(key)) in _OTHERS:
            way = "; plan and export take a projector as --mmproj" if kind in ("mmproj", "clip") else ""
            raise NoModelError(f"{name} is {_OTHERS[kind]}, not a model", f"name the model that it is for{way}")
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    read = _Reader(name, metadata)
    _check_parts(read, parts, tensors)
    read.begin()
    embedding = read.number("embedding_length", low=1)
    if not any(read.heads) and read.architecture not in architecture.RECURRENT:
        raise read.absurd("attention.head_count", "no block has attention")
    heads = read.heads[0]
    default = embedding // heads if heads else 0
    key_size = read.number("attention.key_length", default) if heads else 0
    value_size = read.number("attention.value_length", default) if heads else 0
    recurrent = _recurrent(read)
    window, windowed = _windowed(read, recurrent)
    latent = 0
    if read.architecture in architecture.LATENT and read.number("attention.key_length_mla", 0):
        latent = key_size * max(read.kv_heads)
    experts = read.number("expert_count", 0, high=_MOST_EXPERTS)
    used = max(read.per_block("expert_used_count", 0))
    if used > experts:
        raise read.absurd("expert_used_count", f"there are {experts} experts")
    return ModelHeader(
        name=name,
        size_bytes=size_bytes,
        parts=len(parts),
        architecture=read.architecture,
        blocks=read.blocks,
        nextn_blocks=read.nextn,
        embedding=embedding,
        heads=read.heads,
        kv_heads=read.kv_heads,
        key_size=key_size,
        value_size=value_size,
        key_size_windowed=read.number("attention.key_length_swa", key_size),
        value_size_windowed=read.number("attention.value_length_swa", value_size),
        feed_forward=read.feed_forward,
        experts=experts,
        experts_used=used,
        sliding_window=window,
        windowed=windowed,
        recurrent=recurrent,
        conv_numbers=_conv_numbers(read, embedding) if any(recurrent) else 0,
        state_numbers=_state_numbers(read, embedding, key_size) if any(recurrent) else 0,
        cached=_cached(read, recurrent),
        latent=latent,
        vocabulary=_vocabulary(read, parts[0], tensors),
        context_length=read.number("context_length", low=1),
        tokenizer=_tokenizer(metadata, parts[0]),
        regular=read.architecture not in architecture.IRREGULAR,
        metadata=dict(metadata),
        tensors=tensors,
    )


class _Reader:
    """Typed access to metadata; a wrong type or an impossible value raises a ModelError that names the key."""

    def __init__(self, name: str, metadata: Mapping[str, Value]) -> None:
        self.name = name
        self.metadata = metadata
        own = metadata.get("general.architecture")
        if not isinstance(own, str) or not own:
            raise ModelError(f"{name}: the header names no architecture", _AGAIN)
        self.architecture = own

    def begin(self) -> None:
        """Read the number of blocks, the number of MTP blocks at the end (``nextn``), heads and feed-forward widths."""
        self.blocks = self.number("block_count", low=1, high=_MOST_BLOCKS)
        trunk = 0 if self.architecture in architecture.NO_TRUNK else 1
        self.nextn = self.number("nextn_predict_layers", 0, high=self.blocks - trunk)
        self.main = self.blocks - self.nextn
        self.heads = self.per_block("attention.head_count", 0)
        self.kv_heads = self.per_block("attention.head_count_kv", self.heads)
        self.feed_forward = self.per_block("feed_forward_length", 0)

    def value(self, key: str) -> Value | None:
        """Return the value of ``key`` under the architecture's prefix, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def absurd(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self.name}: {self.architecture}.{key} is impossible: {why}", _AGAIN)

    def number(self, key: str, default: int | None = None, *, low: int = 0, high: int = _MOST) -> int:
        """Return an integer within bounds; without ``default`` the key is required."""
        value = self.value(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.name}: the header has no {self.architecture}.{key}", _AGAIN)
            return default
        return self._checked(key, value, low, high)

    def per_block(self, key: str, default: int | tuple[int, ...]) -> tuple[int, ...]:
        """Return a number for each block, from an array or from a single number that applies to all blocks."""
        value = self.value(key)
        if value is None:
            return default if isinstance(default, tuple) else (default,) * self.blocks
        if not isinstance(value, tuple):
            return (self._checked(key, value, 0, _MOST),) * self.blocks
        if len(value) != self.blocks:
            raise self.absurd(key, f"{len(value)} values for {self.blocks} blocks")
        return tuple(self._checked(key, item, 0, _MOST) for item in value)

    def flags(self, key: str) -> tuple[bool, ...] | None:
        """Return a flag for each block from an array, ignoring further entries; None if there is no array."""
        value = self.value(key)
        if not isinstance(value, tuple):
            return None
        if not self.blocks <= len(value) <= _MOST_BLOCKS:
            raise self.absurd(key, f"{len(value)} values for {self.blocks} blocks")
        return tuple(bool(item) for item in value[: self.blocks])

    def _checked(self, key: str, value: Value | float, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.absurd(key, f"{str(value)[:40]!r} is not a whole number")
        if not low <= value <= high:
            raise self.absurd(key, f"{value} is not within {low} … {high}")
        return value


def _check_parts(read: _Reader, parts: Sequence[Gguf], tensors: Sequence[GgufTensor]) -> None:
    if not tensors:
        raise ModelError(f"{read.name} has no tensors", "a vocabulary alone is not a model: choose another file")
    wanted = read.metadata.get("split.count", 0)
    if isinstance(wanted, int) and wanted > 1 and wanted != len(parts):
        raise ModelError(f"{read.name} is split into {wanted} parts, but {len(parts)} are here", "download all parts")
    if any(min(tensor.shape, default=0) < 1 or tensor.size_bytes < 0 for tensor in tensors):
        raise ModelError(f"{read.name} has a tensor without a shape", _AGAIN)
    if sum(tensor.size_bytes for tensor in tensors) >= _MOST_BYTES:
        raise ModelError(f"{read.name} has tensors of impossible size", _AGAIN)


def _recurrent(read: _Reader) -> tuple[bool, ...]:
    kind, blocks, kv_heads = read.architecture, range(read.blocks), read.kv_heads
    if kind in architecture.RECURRENT or kind in architecture.STATE_AND_CACHE:
        return tuple(i < read.main for i in blocks)
    if kind in architecture.STATE_WITHOUT_HEADS:
        return tuple(i < read.main and not kv_heads[i] for i in blocks)
    if kind in architecture.NEMOTRON_H:
        return tuple(i < read.main and not kv_heads[i] and not read.feed_forward[i] for i in blocks)
    if kind in architecture.STATE_INTERVAL:
        listed = read.flags("attention.recurrent_layers")
        interval = read.number("full_attention_interval", architecture.STATE_INTERVAL[kind], low=1)
        return tuple(i < read.main and (listed[i] if listed else (i + 1) % interval != 0) for i in blocks)
    return (False,) * read.blocks


def _windowed(read: _Reader, recurrent: tuple[bool, ...]) -> tuple[int, tuple[bool, ...]]:
    """Return the window in tokens and, for each block, whether it has a sliding window."""
    none = 0, (False,) * read.blocks
    window = architecture.WINDOWS.get(read.architecture)
    if window is None or (read.architecture == "exaone4" and read.main != 64):
        return none
    size = read.number("attention.sliding_window", window.size, high=_LONGEST_WINDOW)
    if not size:
        return none
    size = window.size if window.fixed else size
    if read.architecture.startswith("lfm2"):
        return size, tuple(not state for state in recurrent)
    if listed := read.flags("attention.sliding_window_pattern"):
        return size, listed
    if not window.pattern:
        raise ModelError(f"{read.name}: the header does not list the blocks with a sliding window", _AGAIN)
    pattern = read.number("attention.sliding_window_pattern", window.pattern)
    full = 0 if window.dense_first else pattern - 1
    return size, tuple(i < read.main and (not pattern or i % pattern != full) for i in range(read.blocks))


def _cached(read: _Reader, recurrent: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which blocks have a KV cache, as ``llama_model::create_memory`` and ``llama_hparams::has_kv`` do."""
    kind = read.architecture
    if kind in architecture.RECURRENT or kind in architecture.NO_MEMORY:
        return (False,) * read.blocks
    if kind in architecture.STATE_AND_CACHE:
        return (True,) * read.blocks
    if kind in architecture.NEMOTRON_H:
        return tuple(not state and not width for state, width in zip(recurrent, read.feed_forward, strict=True))
    if kind in architecture.STATE_WITHOUT_HEADS:
        return tuple(not state for state in recurrent)
    end = min(read.main, architecture.FIRST_WITHOUT_CACHE.get(kind, read.main))
    if kind == "gemma4":
        end = min(end, read.blocks - read.number("attention.shared_kv_layers", 0, high=read.blocks))
    return tuple(i < end and not state for i, state in enumerate(recurrent))


def _conv_numbers(read: _Reader, embedding: int) -> int:
    """Return the convolution state's size, as ``llama_hparams::n_embd_r`` does."""
    if read.value("wkv.head_size") is not None:
        return read.number("token_shift_count", 2) * embedding
    if read.value("shortconv.l_cache") is not None:
        return embedding * (read.number("shortconv.l_cache", low=1) - 1)
    kernel = max(read.number("ssm.conv_kernel", 0) - 1, 0)
    if read.architecture in architecture.KDA:
        return 3 * (kernel or 3) * read.heads[0] * read.number("kda.head_dim")
    if read.architecture == "minimax-01":
        return 0
    groups = 0 if read.architecture in ("mamba", "jamba") else read.number("ssm.group_count", 0)
    return kernel * (read.number("ssm.inner_size", 0) + 2 * groups * read.number("ssm.state_size", 0))


def _state_numbers(read: _Reader, embedding: int, key_size: int) -> int:
    """Return the recurrent state's size, as ``llama_hparams::n_embd_s`` does."""
    if read.value("wkv.head_size") is not None:
        return embedding * read.number("wkv.head_size")
    if read.architecture in architecture.KDA:
        return read.number("kda.head_dim") ** 2 * read.heads[0]
    if read.architecture == "minimax-01":
        return key_size * key_size * read.heads[0]
    return read.number("ssm.state_size", 0) * read.number("ssm.inner_size", 0)


def _vocabulary(read: _Reader, part: Gguf, tensors: Sequence[GgufTensor]) -> int:
    size = part.lengths.get("tokenizer.ggml.tokens", 0) or read.number("vocab_size", 0)
    for name in ("output.weight", "token_embd.weight"):
        for tensor in tensors:
            if tensor.name == name and len(tensor.shape) == 2:
                return tensor.shape[1]
    if not size:
        raise ModelError(f"{read.name} has neither a vocabulary nor embeddings", _AGAIN)
    return size


def _tokenizer(metadata: Mapping[str, Value], part: Gguf) -> Tokenizer:
    def text(key: str) -> str:
        value = metadata.get(f"tokenizer.ggml.{key}", "")
        return value if isinstance(value, str) else ""

    bos = metadata.get("tokenizer.ggml.add_bos_token")
    special = {
        match[1]: value
        for key, value in metadata.items()
        if (match := _SPECIAL.fullmatch(key)) and isinstance(value, int) and not isinstance(value, bool)
    }
    size = part.lengths.get("tokenizer.ggml.tokens", 0)
    return Tokenizer(
        text("model"), text("pre"), size, part.tokens_digest, bos if isinstance(bos, bool) else None, special
    )
