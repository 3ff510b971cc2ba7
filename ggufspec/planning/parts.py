"""Parts that the blocks of a model are made of, as sizes: what all share, and feed-forward layers. Pure.

Which parts a block has is read off its tensors. Operations are added in the order of src/llama-graph.cpp and
src/models/*.cpp, since the allocator's holes depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ggufspec.planning.allocator import Graph

_SOFTMAX_OF_CHOSEN = frozenset({"gpt-oss"})


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
    cache_type_k: tuple[int, int]
    cache_type_v: tuple[int, int]
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


class Parts:
    """What one graph is built with. ``rows`` are the tokens in flight: fewer after the last block's attention."""

    kind: Kind  # of the block that is being built

    def __init__(self, trunk: Trunk, batch: Batch) -> None:
        self.graph = Graph()
        self.trunk = trunk
        self.batch = batch
        self.rows = batch.tokens
        self.row = 4 * trunk.embedding
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.where = Where(0, 0)
        self.following: tuple[Kind, Where] | None = None
        self.loaded: list[int] = []  # states of the block that is or comes next
        self.state_ids = self.other_ids = self.output_ids = self.positions = -1
        self.residual = self.last_rows = -1

    def _has(self, name: str, part: str = "weight") -> bool:
        return f"{name}.{part}" in self.shapes or (part == "weight" and name in self.shapes)  # Falcon-H1's ffn_norm

    def _out(self, name: str, default: int = 0) -> int:
        """Rows of a weight: numbers per token that it makes."""
        return self._edge(name, 1, default)

    def _edge(self, name: str, axis: int, default: int = 0) -> int:
        shape = self.shapes.get(f"{name}.weight", ())
        return shape[axis] if len(shape) > axis else default

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

    # ---- depth first ------------------------------------------------------------------------------

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
        if not self.loaded:
            self._load(self.kind, self.where)
        loaded, self.loaded = self.loaded, []
        return loaded

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
        size = 4 * self.rows * self._edge(f"ffn_down{suffix}", 0)
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

        inner = 4 * u * used * self._edge("ffn_down_exps", 0)
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
