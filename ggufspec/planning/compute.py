"""The graph of one full batch of a model, as sizes: what its compute buffers hold. Pure.

One builder for each part that blocks are made of, following the order in which src/llama-graph.cpp and src/models/*.cpp
add the operations. Which parts a block has is read off its tensors. A block like its neighbours adds nothing to the
high-water mark, so that a graph has a few blocks of each kind and not all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ggufspec.planning.allocator import Graph

# Architectures whose attention knows positions otherwise, or not at all: no inp_pos and no rotation.
_NO_ROTATION = frozenset({"gpt2", "bloom", "mpt", "starcoder", "jais", "refact", "jamba", "granitehybrid"})
# The rows that are asked for are picked after the last block, or after the last norm; elsewhere after its attention.
_LAST_ROWS_LATE = frozenset({"gpt-oss"})
_LAST_ROWS_LATEST = frozenset({"qwen3next"})
_RESIDUAL_FIRST = frozenset({"jamba", "lfm2", "lfm2moe"})  # the sums name it before what is added
_SOFTMAX_OF_CHOSEN = frozenset({"gpt-oss"})
_LAST_ROWS_OF_SUM = frozenset({"falcon-h1"})
_FOUR_POSITIONS = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "hunyuan_vl", "paddleocr"})


@dataclass(frozen=True, slots=True)
class Batch:
    """One full batch. ``cells`` and ``cells_windowed`` are of the KV caches; ``values_turned``: the V cache
    has a column per token, as without flash attention. ``type_*`` are
    (numbers, bytes) of a block; ``turn_*`` edges of Hadamard matrices.
    """

    tokens: int
    outputs: int
    cells: int
    cells_windowed: int
    flash: bool
    values_turned: bool
    type_k: tuple[int, int]
    type_v: tuple[int, int]
    turn_k: int = 0
    turn_v: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """Blocks with equal ``Kind`` compute alike. ``shapes`` are its tensors by name without the block's number."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    windowed: bool
    recurrent: bool
    conv_numbers: int
    state_numbers: int


@dataclass(frozen=True, slots=True)
class Trunk:
    """What all blocks of a model share."""

    architecture: str
    embedding: int
    vocabulary: int
    experts_used: int
    expert_groups: int
    expert_groups_used: int
    weights_normed: bool
    weights_scaled: bool
    windows: bool
    value_width: int
    latent: bool
    layer_norm: bool
    learned_positions: bool
    embedding_norm: bool


@dataclass(frozen=True, slots=True)
class Where:
    """Devices of a block: its own and that of its experts."""

    block: int
    experts: int


def begins_with_state(kind: Kind) -> bool:
    """Whether the block before ends after this one's states are loaded: the graph is made depth first."""
    names = {name for name, _ in kind.shapes}
    first = {"ssm_in.weight", "shortconv.in_proj.weight", "time_mix_key.weight"}
    return kind.recurrent and bool(names & first) and "attn_q.weight" not in names


def graph(trunk: Trunk, batch: Batch, blocks: Sequence[tuple[Kind, Where]], output: int) -> Graph:
    """The graph of ``blocks`` and an output layer on the device ``output``."""
    return _Builder(trunk, batch).model(blocks, output)


def _bytes(numbers: int, block: tuple[int, int]) -> int:
    return numbers // block[0] * block[1]


class _Builder:
    def __init__(self, trunk: Trunk, batch: Batch) -> None:
        self.graph = Graph()
        self.trunk = trunk
        self.batch = batch
        self.rows = batch.tokens  # tokens in flight: fewer after the last block's attention
        self.row = 4 * trunk.embedding
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.where = Where(0, 0)

    # ---- the whole --------------------------------------------------------------------------------

    def model(self, blocks: Sequence[tuple[Kind, Where]], output: int) -> Graph:
        g, trunk, batch = self.graph, self.trunk, self.batch
        u = batch.tokens
        tokens = g.input(4 * u)
        g.input(self.row * u)  # inp_embd, for those who hand in embeddings
        self.positions = -1
        if trunk.learned_positions or (batch.cells and trunk.architecture not in _NO_ROTATION):
            self.positions = g.input((16 if trunk.architecture in _FOUR_POSITIONS else 4) * u)
        self.caches: dict[bool, tuple[int, ...]] = {}
        for kind, _ in blocks:  # in the order of their first readers
            if kind.windowed not in self.caches and kind.kv_heads and batch.cells:
                cells = batch.cells_windowed if kind.windowed else batch.cells
                self.caches[kind.windowed] = self._cache_inputs(cells)
        self.state_ids = g.input(4) if any(kind.recurrent for kind, _ in blocks) else -1
        self.other_ids = g.stored(0, 0)  # of sequences that are not in the batch: none
        self.output_ids = g.input(4 * batch.outputs)
        self.first_values = -1
        self.loaded: list[int] = []
        self.following: tuple[Kind, Where] | None = None

        x = g.node(self.row * u, tokens, on=0)
        if trunk.learned_positions:
            x = g.node(self.row * u, x, g.node(self.row * u, self.positions, on=0), over=2)
        if trunk.embedding_norm and blocks and not begins_with_state(blocks[0][0]):
            x = self._norm(x, "token_embd_norm", on=blocks[0][1].block)
        late = trunk.architecture in _LAST_ROWS_LATE | _LAST_ROWS_LATEST
        shapes = {kind: dict(kind.shapes) for kind, _ in blocks}
        for i, (kind, where) in enumerate(blocks):
            self.kind, self.where, self.shapes = kind, where, shapes[kind]
            self.following = blocks[i + 1] if i + 1 < len(blocks) else None
            x = self._block(x, last=i == len(blocks) - 1 and not late)
        self.where = Where(output, output)
        if trunk.architecture in _LAST_ROWS_LATE:
            g.keep(x)
            self.rows = batch.outputs
            x = g.node(self.row * batch.outputs, x, self.output_ids)
        self.shapes = {}
        x = self._norm(x, "output_norm", on=output)
        if trunk.architecture in _LAST_ROWS_LATEST:
            g.keep(x)
            x = g.node(self.row * batch.outputs, x, self.output_ids)
        g.node(4 * trunk.vocabulary * batch.outputs, x, on=output)
        return g

    def _cache_inputs(self, cells: int) -> tuple[int, ...]:
        """(K's rows, V's rows, mask, K's turn, V's turn): ``llm_graph_input_attn_kv``."""
        g, trunk, batch = self.graph, self.trunk, self.batch
        turn_k = g.input(4 * batch.turn_k**2) if batch.turn_k and not trunk.latent else -1
        turn_v = g.input(4 * batch.turn_v**2) if batch.turn_v and not trunk.latent else -1
        rows_k = g.input(8 * batch.tokens)
        rows_v = -1
        if not trunk.latent:
            rows_v = g.input(8 * batch.tokens * (trunk.value_width if batch.values_turned else 1))
        mask = g.input((2 if batch.flash else 4) * cells * batch.tokens)
        return rows_k, rows_v, mask, turn_k, turn_v

    def _block(self, x: int, *, last: bool) -> int:
        g, on = self.graph, self.where.block
        self.residual, self.last_rows = (x, -1) if last and self._residual_first() else (-1, -1)
        if begins_with_state(self.kind) and not self.loaded:
            self._load(self.kind, self.where)
        if self._has("time_mix_key"):
            return self._rwkv(x, last=last)
        normed = self._norm(x, "attn_norm", on=on) if self._has("attn_norm") else x
        mixed, viewed = self._mix(x, normed)
        parallel = self._has_ffn() and not self._has("ffn_norm") and not self._has("post_attention_norm")
        if parallel and self._has("attn_norm_2"):
            normed = self._norm(x, "attn_norm_2", on=on)
        if last and self.trunk.architecture in _LAST_ROWS_OF_SUM:
            self.rows = self.batch.outputs
            whole = g.node(self.row * self.batch.tokens, mixed, x, over=2)
            return self._feed(g.node(self.row * self.rows, whole, self.output_ids), "ffn_norm")
        if last:
            self.rows, viewed = self.batch.outputs, False
            mixed = g.node(self.row * self.rows, mixed, self.output_ids)
            x = self.last_rows if self.last_rows >= 0 else g.node(self.row * self.rows, x, self.output_ids)
            if parallel:
                normed = g.node(self.row * self.rows, normed, self.output_ids)
        before_ffn = "ffn_norm" if self._has("ffn_norm") else "post_attention_norm"
        if self._has("post_attention_norm") and (before_ffn == "ffn_norm" or not self._has("attn_norm")):
            mixed, viewed = self._norm(mixed, "post_attention_norm", on=on), False
        if not self._has_ffn():
            return self._add(mixed, x, viewed)
        if parallel:
            fed = self._feed_forward(normed)
            return g.node(self.row * self.rows, g.node(self.row * self.rows, fed, mixed, over=2), x, over=2)
        return self._feed(self._add(mixed, x, viewed), before_ffn)

    def _feed(self, x: int, norm: str) -> int:
        """The second half of a block: its feed-forward on its first half's sum."""
        on = self.where.block
        fed = self._feed_forward(self._norm(x, norm, on=on) if self._has("attn_norm") else x)
        if self._has("post_ffw_norm"):
            fed = self._norm(fed, "post_ffw_norm", on=on)
        return self._add(fed, x, viewed=False)

    def _residual_first(self) -> bool:
        return self.trunk.architecture in _RESIDUAL_FIRST

    def _add(self, y: int, x: int, viewed: bool) -> int:
        """The residual ``x`` and what a part of the block adds to it; what is ``viewed`` is never overwritten."""
        size = self.row * self.rows
        if viewed:
            return self.graph.node(size, x, y, over=1)
        first, second = (x, y) if self._residual_first() else (y, x)
        return self.graph.node(size, first, second, over=2)

    def _has_ffn(self) -> bool:
        return any(name.startswith(("ffn_up", "ffn_down", "channel_mix")) for name in self.shapes)

    def _mix(self, x: int, normed: int) -> tuple[int, bool]:
        """Everything between a block's first norm and its residual, and whether that is known by a view."""
        kind = self.kind
        if not kind.recurrent:
            if not kind.heads or not (self._has("attn_q") or self._has("attn_qkv") or self._has("attn_kv_a_mqa")):
                return normed, True
            return (self._latent_attention(normed) if self.trunk.latent else self._attention(normed)), False
        if self._has("attn_q") and self._has("ssm_in"):  # Falcon-H1: both on one input, and its norm twice
            finish = self._kqv(normed)
            self._load(self.kind, self.where)
            again = self._norm(x, "attn_norm", on=self.where.block)
            attended: list[int] = []
            mixed = self._mamba(again, lambda: attended.append(finish()))
            mixed = self.graph.node(self.row * self.rows, attended[0], mixed, over=2)
            return mixed, False
        if self._has("shortconv.in_proj"):
            return self._short_convolution(normed), False
        if self._has("ssm_in"):
            return self._mamba(normed), self._has("ssm_x") and not self._residual_first()
        return self._delta_net(normed), True

    # ---- small parts ------------------------------------------------------------------------------

    def _has(self, name: str, part: str = "weight") -> bool:
        return f"{name}.{part}" in self.shapes or (part == "weight" and name in self.shapes)  # Falcon-H1's ffn_norm

    def _out(self, name: str, default: int = 0) -> int:
        """Rows of a weight: numbers per token that it makes."""
        shape = self.shapes.get(f"{name}.weight", ())
        return shape[1] if len(shape) > 1 else default

    def _norm(self, x: int, name: str, *, on: int, size: int = 0, viewed: bool = False) -> int:
        g, size = self.graph, size or self.row * self.rows
        x = g.node(size, x, over=0 if self.trunk.layer_norm or viewed else 1)
        x = g.node(size, x, over=1, on=on)
        return g.node(size, x, over=1, on=on) if self._has(name, "bias") else x

    def _linear(self, name: str, x: int, default: int = 0) -> int:
        """A weight on ``x``, and its bias."""
        g, on = self.graph, self.where.block
        size = 4 * self.rows * self._out(name, default)
        x = g.node(size, x, on=on)
        return g.node(size, x, over=1, on=on) if self._has(name, "bias") else x

    # ---- attention --------------------------------------------------------------------------------

    def _attention(self, x: int) -> int:
        """``build_qkv`` and ``build_attn``."""
        finish = self._kqv(x)
        self._prefetch(mixing=True)
        return finish()

    def _kqv(self, x: int) -> Callable[[], int]:
        """Attention up to what the heads say; what it returns does the rest, when it is asked for."""
        g, kind, u, on = self.graph, self.kind, self.rows, self.where.block
        q, k, v, gate = self._queries_keys_values(x)
        rows_k, rows_v, mask, _, turn_v = self.caches[kind.windowed]
        if k >= 0:
            g.write(k, rows_k, on=on)
            g.write(v, rows_v, on=on)
        out = 4 * u * kind.heads * kind.value_size
        cells = self.batch.cells_windowed if kind.windowed else self.batch.cells
        cached_k = self._cached(cells, kind.kv_heads * kind.key_size, self.batch.type_k)
        cached_v = self._cached(cells, kind.kv_heads * kind.value_size, self.batch.type_v)
        if self.batch.flash:
            kqv = g.node(out, q, cached_k, cached_v, mask)
        else:
            if not self.batch.values_turned:
                cached_v = g.node(_bytes(cells * kind.kv_heads * kind.value_size, self.batch.type_v), cached_v)
            scores = 4 * cells * u * kind.heads
            kqv = g.node(scores, g.node(scores, cached_k, q), mask, over=1)
            kqv = g.node(out, g.node(out, cached_v, kqv))

        def finish() -> int:
            x = g.node(out, turn_v, kqv) if turn_v >= 0 else kqv
            if gate >= 0:  # the second half of attn_q: src/models/qwen3next.cpp
                opened = g.node(out, g.node(out, gate), over=1)
                x = (
                    g.node(out, opened, x, over=1)
                    if self.batch.flash or turn_v >= 0
                    else g.node(out, x, opened, over=2)
                )
            elif self._has("attn_gate"):
                x = g.node(out, x, self._linear("attn_gate", x), over=1)
            return self._linear("attn_output", x, self.trunk.embedding)

        return finish

    def _queries_keys_values(self, x: int) -> tuple[int, int, int, int]:
        """(queries, keys, values, what holds a gate): -1 where there is none."""
        g, kind, u, on = self.graph, self.kind, self.rows, self.where.block
        _, _, _, turn_k, turn_v = self.caches[kind.windowed]
        queries = 4 * u * kind.heads * kind.key_size
        keys, values = 4 * u * kind.kv_heads * kind.key_size, 4 * u * kind.kv_heads * kind.value_size
        fused = self._linear("attn_qkv", x) if self._has("attn_qkv") else -1
        rotates = self.trunk.architecture not in _NO_ROTATION

        def headwise(x: int, size: int, name: str) -> int:
            """Norm, rotation, Hadamard turn. Cut into heads, ``x`` is a view, and a view is never overwritten."""
            changed = False
            if self._has(f"attn_{name}_norm"):
                x, changed = g.node(size, g.node(size, x), over=1, on=on), True
            if rotates:
                x, changed = g.node(size, x, self.positions, over=1 if changed else 0), True
            if turn_k >= 0:
                x = g.node(size, turn_k, x if changed or fused < 0 else g.node(size, x))
            return x

        def value() -> int:
            if fused < 0:
                v = self._linear("attn_v", x) if self._has("attn_v") else k
            else:
                v = fused if self.batch.flash and turn_v < 0 else g.node(values, fused)
            return g.node(values, turn_v, v) if turn_v >= 0 else v

        whole = fused if fused >= 0 else self._linear("attn_q", x)
        gate = whole if fused < 0 and 4 * u * self._out("attn_q") > queries else -1
        q = headwise(whole, queries, "q")
        if fused < 0 and not self._has("attn_k"):  # the block reads another one's cache
            return q, -1, -1, gate
        values_first = fused < 0 and self._has("attn_v") and not self.trunk.windows  # each build_attn has its order
        if values_first or (fused >= 0 and turn_v >= 0):
            k = -1
            v = value()
            k = headwise(fused if fused >= 0 else self._linear("attn_k", x), keys, "k")
        else:
            k = headwise(fused if fused >= 0 else self._linear("attn_k", x), keys, "k")
            v = value()
        return q, k, v, gate

    def _cached(self, cells: int, width: int, block: tuple[int, int]) -> int:
        """A cache as flash attention reads it: f32 is cast."""
        cache = self.graph.stored(cells * _bytes(width, block), self.where.block)
        return self.graph.node(2 * cells * width, cache) if self.batch.flash and block == (1, 4) else cache

    def _latent_attention(self, x: int) -> int:
        """src/models/deepseek2.cpp with ``attn_k_b``: one latent key per token, which is its value too."""
        g, kind, u, on = self.graph, self.kind, self.rows, self.where.block
        rows_k, _, mask, _, _ = self.caches[False]
        latent = self.shapes.get("attn_kv_a_norm.weight", (0,))[0]
        rope = kind.key_size - latent
        heads = kind.heads
        if self._has("attn_q_a"):
            low = self._linear("attn_q_a", x)
            q = self._linear("attn_q_b", self._norm(low, "attn_q_a_norm", on=on, size=4 * u * self._out("attn_q_a")))
        else:
            q = self._linear("attn_q", x)
        absorbed = g.node(4 * u * heads * latent, q, on=on)
        turned = g.node(4 * u * heads * rope, q, self.positions)
        q = g.node(4 * u * heads * kind.key_size, absorbed, turned)
        joint = self._linear("attn_kv_a_mqa", x)
        key = g.node(4 * u * latent, joint)
        key = g.node(4 * u * latent, key, over=1, on=on)
        k = g.node(4 * u * kind.key_size, key, g.node(4 * u * rope, joint, self.positions))
        g.write(k, rows_k, on=on)
        out = 4 * u * heads * (self.shapes.get("attn_v_b.weight", (0, 0))[1])
        if self.batch.flash:
            keys, values = (self._cached(self.batch.cells, n, self.batch.type_k) for n in (kind.key_size, latent))
            x = g.node(4 * u * heads * latent, q, keys, values, mask)
        else:
            v = g.node(self.batch.type_k[1] * self.batch.cells * latent)
            scores = 4 * self.batch.cells * u * heads
            x = g.node(scores, g.node(scores, q), mask, over=1)
            x = g.node(4 * u * heads * latent, v, x)
        x = g.node(out, g.node(out, x, on=on))
        return self._linear("attn_output", x)

    # ---- state ------------------------------------------------------------------------------------

    def _state(self, numbers: int, on: int) -> int:
        """The sequence's rows of a state: ``build_rs``."""
        g = self.graph
        stored = g.stored(4 * numbers, on)
        g.write(on=on)  # clears what is stale, where the state is
        rows = g.node(4 * numbers, stored, self.state_ids)
        g.write(g.node(0, stored, self.other_ids), on=on)
        return rows

    def _load(self, kind: Kind, where: Where) -> None:
        """The states that a block begins with."""
        self.loaded = [self._state(kind.conv_numbers, where.block)]
        if any(name.startswith("time_mix") for name, _ in kind.shapes):
            self.loaded.append(self._state(kind.state_numbers, where.block))

    def _prefetch(self, *, mixing: bool) -> None:
        """What comes before the rest of this block, which nothing has asked for yet: the graph is made depth first.

        The next block asks for its states first; a sum that names the residual first asks for its rows.
        """
        if self.residual >= 0 and self.last_rows < 0:
            self.last_rows = self.graph.node(self.row * self.batch.outputs, self.residual, self.output_ids)
        if mixing and self._has("ffn_gate_inp"):
            return  # build_moe_ffn asks for its weights, and so for all before them
        if self.following and not self.loaded and begins_with_state(self.following[0]):
            self._load(*self.following)

    def _taken(self) -> list[int]:
        loaded, self.loaded = self.loaded, []
        return loaded

    def _convolution(self, before: int, x: int, rows: int, then: Callable[[], None] | None = None) -> int:
        """``x`` behind the last rows of the batch before, through the convolution and its activation."""
        g, u, on = self.graph, self.rows, self.where.block
        kernel = self.shapes.get("ssm_conv1d.weight", (4,))[0]
        joined = g.node(4 * (u + kernel - 1) * rows, before, x)
        g.write(joined, on=on)
        if then is not None:
            then()
        x = g.node(4 * u * rows, joined, on=on)
        if self._has("ssm_conv1d", "bias"):
            x = g.node(4 * u * rows, x, over=1, on=on)
        return g.node(4 * u * rows, x, over=1)

    def _mamba(self, x: int, before_rest: Callable[[], None] | None = None) -> int:
        """src/models/mamba-base.cpp: ``build_mamba_layer`` and ``build_mamba2_layer``."""
        g, u, on = self.graph, self.rows, self.where.block
        inner = self.shapes.get("ssm_out.weight", (0,))[0]
        whole = self._linear("ssm_in", x)
        size, state = 4 * u * inner, 4 * self.kind.state_numbers
        conv_rows = self.shapes.get("ssm_conv1d.weight", (0, inner))[1]
        x = self._convolution(self._taken()[0], whole, conv_rows)
        before = g.stored(state, on)
        if self._has("ssm_x"):
            rank, low = self.shapes["ssm_dt.weight"][0], self._linear("ssm_x", x)
            step = g.node(4 * u * rank, low)
            sides = [low]
            if self._has("ssm_dt_norm"):
                step = g.node(4 * u * rank, step, over=1, on=on)
            step = self._linear("ssm_dt", step)
            if self._has("ssm_b_norm"):
                side = 4 * u * (self._out("ssm_x") - rank) // 2
                sides = [g.node(side, g.node(side, low), over=1, on=on) for _ in "bc"]
            y = g.node(size + state, before, x, step, *sides, self.state_ids, on=on)
        else:
            heads = self.shapes.get("ssm_dt.bias", (1,))[0]
            step = g.node(4 * u * heads, whole)
            step = g.node(4 * u * heads, step, over=1, on=on)
            y = g.node(size + state, before, x, step, self.state_ids, on=on)
        g.write(g.node(0, before, self.other_ids), on=on)
        g.write(y, on=on)
        if before_rest:
            before_rest()
        self._prefetch(mixing=True)
        z = g.node(size, whole)
        x = g.node(size, x, over=1 if self._has("ssm_x") else 0, on=on)
        y = g.node(size, x, y, over=1)
        y = g.node(size, z, y)
        if self._has("ssm_norm"):
            y = self._norm(y, "ssm_norm", on=on, size=size, viewed=True)
        return self._linear("ssm_out", y)

    def _short_convolution(self, x: int) -> int:
        """``build_shortconv_block`` in src/models/lfm2.cpp."""
        g, u, on = self.graph, self.rows, self.where.block
        kernel = self.shapes.get("shortconv.conv.weight", (3,))[0]
        whole = self._linear("shortconv.in_proj", x)
        x = g.node(self.row * u, whole)
        joined = g.node(self.row * (u + kernel - 1), self._taken()[0], x)
        g.write(joined, on=on)
        self._prefetch(mixing=True)
        x = g.node(self.row * u, joined, on=on)
        x = g.node(self.row * u, x, whole, over=1)
        return self._linear("shortconv.out_proj", x)

    def _delta_net(self, x: int) -> int:
        """``build_layer_attn_linear`` in src/models/qwen3next.cpp, and near enough the likes of it."""
        g, u, on = self.graph, self.rows, self.where.block
        inner = self.shapes.get("ssm_out.weight", self.shapes.get("attn_output.weight", (0,)))[0]
        size, state = 4 * u * inner, 4 * self.kind.state_numbers
        split = [self._out(f"ssm_conv1d_{name}") or self._out(f"attn_{name}") for name in "qkv"]
        rows = self._out("attn_qkv") or sum(split)
        before: list[int] = []
        conv = self._state(self.kind.conv_numbers, on)
        whole = g.node(4 * u * rows, x, on=on)
        joined = self._convolution(conv, whole, rows, lambda: before.append(self._state(self.kind.state_numbers, on)))
        groups = 4 * u * max(rows - inner, 0) // 2
        sides = []
        for _ in "qk":
            side = g.node(groups, g.node(groups, joined), over=1)
            sides.append(g.node(size, side) if groups != size else side)
        heads = self.shapes.get("ssm_dt.bias", (1,))[0]
        steps = g.node(8 * u * heads, x, on=on)
        decay = g.node(4 * u * heads, g.node(4 * u * heads, steps), over=1, on=on)
        rate = g.node(4 * u * heads, steps)
        y = g.node(size + state, *sides, joined, decay, rate, *before)
        g.write(y, on=on)
        y = self._norm(y, "ssm_norm", on=on, size=size, viewed=True)
        z = g.node(size, g.node(size, x, on=on))
        y = g.node(size, y, z, over=2)
        return g.node(self.row * u, y, on=on)

    def _rwkv(self, x: int, *, last: bool) -> int:
        """A whole block of src/models/rwkv7.cpp."""
        g, on = self.graph, self.where.block
        u, outputs = self.row * self.batch.tokens, self.row * self.batch.outputs
        conv, before = self._taken()
        if self.first_values < 0 and self.trunk.embedding_norm:
            x = self._norm(x, "token_embd_norm", on=on)
        normed = self._norm(x, "attn_norm", on=on, viewed=True)
        mixed = self._time_mix(normed, conv, before)
        x = g.node(u, mixed, x)
        again = self._norm(x, "attn_norm_2", on=on, viewed=True)
        tail = g.node(2 * self.row, normed, again)
        g.write(tail, on=on)
        self._prefetch(mixing=True)
        shifted = g.node(u, conv, g.view(again))
        if last:
            self.rows = self.batch.outputs
            shifted = g.node(outputs, shifted, self.output_ids)
            again = g.node(outputs, again, self.output_ids)
        size = self.row * self.rows
        fed = g.node(size, g.node(size, shifted, again, over=2 if last else 0), over=1, on=on)
        fed = self._linear("channel_mix_key", g.node(size, fed, again, over=1))
        fed = self._linear("channel_mix_value", fed)
        if last:
            x = g.node(outputs, x, self.output_ids)
        return g.node(size, fed, x, over=1)

    def _time_mix(self, x: int, shifted: int, before: int) -> int:
        """``build_rwkv7_time_mix`` in src/models/rwkv7-base.cpp."""
        g, on = self.graph, self.where.block
        size = self.row * self.rows
        difference = g.node(size, g.node(size, shifted, x), x, over=1)
        many = 6 if self._has("time_mix_g1") else 5
        mixed = g.node(many * size, difference)
        mixed = g.node(many * size, mixed, over=1, on=on)
        mixed = g.node(many * size, mixed, x, over=1)
        r = g.node(size, mixed, on=on)
        w = self._low_rank("w", mixed)
        k = g.node(size, mixed, on=on)
        a = self._low_rank("a", mixed)
        scaled = g.node(size, k, on=on)
        rate = g.node(size, g.node(size, a, scaled), scaled, over=1)
        keys = g.node(size, k, rate, over=2)
        v = g.node(size, mixed, on=on)
        if self.first_values < 0:
            self.first_values = v
        else:
            delta = g.node(size, self.first_values, v)
            delta = g.node(size, delta, self._low_rank("v", mixed), over=1)
            v = g.node(size, v, delta, over=2)
        unit = g.node(size, g.node(size, k, over=1, on=on))
        minus = g.node(size, unit)
        y = g.node(size + 4 * self.kind.state_numbers, r, w, keys, v, minus, g.node(size, unit, a, over=1), before)
        g.write(y, on=on)
        y = g.node(size, g.node(size, g.node(size, y), on=on), over=1, on=on)
        bonus = g.node(size, g.node(size, keys, r), over=1, on=on)
        y = g.node(size, y, g.node(size, v, g.node(size // 64, bonus)), over=1)
        if self._has("time_mix_g1"):
            y = g.node(size, y, self._low_rank("g", mixed, bias=False), over=1)
        return g.node(size, y, on=on)

    def _low_rank(self, name: str, x: int, *, bias: bool = True) -> int:
        g, on, size = self.graph, self.where.block, self.row * self.rows
        y = g.node(size, self._linear(f"time_mix_{name}1", x), on=on)
        return g.node(size, y, over=1, on=on) if bias else y

    # ---- feed-forward -----------------------------------------------------------------------------

    def _feed_forward(self, x: int) -> int:
        if not self._has("ffn_gate_inp"):
            return self._gated(x, "")
        routed = self._experts(x)
        if self._has("ffn_up_shexp"):
            g, size = self.graph, self.row * self.rows
            shared = self._gated(x, "_shexp")
            if self._has("ffn_gate_inp_shexp"):
                gate = g.node(4 * self.rows, g.node(4 * self.rows, x, on=self.where.block), over=1)
                shared = g.node(size, shared, gate, over=1)
            routed = g.node(size, routed, shared, over=2)
        return routed

    def _gated(self, x: int, suffix: str) -> int:
        """``build_ffn``."""
        g = self.graph
        down = self.shapes.get(f"ffn_down{suffix}.weight", (0, 0))
        size = 4 * self.rows * down[0]
        if self._has(f"ffn_gate{suffix}"):
            gate = self._linear(f"ffn_gate{suffix}", x)
            x = g.node(size, gate, self._linear(f"ffn_up{suffix}", x))
        else:
            up = self._linear(f"ffn_up{suffix}", x)
            x = g.node(size, up, over=1)
        return self._linear(f"ffn_down{suffix}", x)

    def _experts(self, x: int) -> int:
        """``build_moe_ffn``."""
        g, u, used = self.graph, self.rows, self.trunk.experts_used
        on, experts = self.where.block, self.where.experts
        count = self._out("ffn_gate_inp")
        scores = g.node(4 * u * count, x, on=on)
        if self._has("ffn_gate_inp", "bias"):
            scores = g.node(4 * u * count, scores, over=1, on=on)
        else:
            scores = g.node(4 * u * count, scores, over=1)
        ranked = scores
        if self._has("exp_probs_b", "bias"):
            ranked = g.node(4 * u * count, scores, on=on)
        if self.trunk.expert_groups > 1:
            groups, kept = self.trunk.expert_groups, self.trunk.expert_groups_used
            best = g.node(8 * u * groups, ranked, g.node(4 * u * count, ranked))
            best = g.node(4 * u * groups, g.node(4 * u * groups, best))
            picked = g.node(4 * u * count * kept // groups, ranked, best)
            ranked = g.node(4 * u * count, ranked)
            g.write(picked, best, ranked, on=None)
        chosen = g.node(4 * u * count, ranked)
        weights = g.node(4 * u * used, scores, chosen)
        direct = True
        if self.trunk.architecture in _SOFTMAX_OF_CHOSEN:
            weights = g.node(4 * u * used, weights)
        if self.trunk.weights_normed:
            total = g.node(4 * u, weights)
            weights, direct = g.node(4 * u * used, weights, g.node(4 * u, total, over=1)), False
        if self.trunk.weights_scaled:
            weights = g.node(4 * u * used, weights, over=1 if direct else 0)
        if self.trunk.architecture == "llama4":  # weighs what goes in and not what comes out
            x = g.node(self.row * u * used, g.node(self.row * u * used, x), weights, over=1)
        biased = self._has("ffn_down_exps", "bias")

        def routed(name: str, x: int) -> int:
            size = 4 * u * used * self._out(name)
            y = g.node(size, x, chosen, on=experts)
            return g.node(size, y, chosen, over=1, on=experts) if biased else y

        inner = 4 * u * used * self.shapes.get("ffn_down_exps.weight", (0,))[0]
        if self._has("ffn_gate_up_exps"):
            y = g.node(inner, routed("ffn_gate_up_exps", x))
        elif self._has("ffn_gate_exps"):
            gate = routed("ffn_gate_exps", x)
            y = g.node(inner, gate, routed("ffn_up_exps", x))
        else:
            y = g.node(inner, routed("ffn_up_exps", x), over=1)
        y = routed("ffn_down_exps", y)
        y = g.node(self.row * u * used, y, weights, over=1)
        total = g.node(self.row * u, y)
        for _ in range(used - 2):
            total = g.node(self.row * u, total, y, over=1)
        self._prefetch(mixing=False)
        return total
