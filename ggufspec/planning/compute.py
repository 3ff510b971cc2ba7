"""The graph of one full batch of a model, as sizes: what its compute buffers hold. Pure.

It follows the order in which src/llama-graph.cpp and src/models/*.cpp add the operations, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.planning.allocator import Graph
from ggufspec.planning.mixers import NO_ROTATION, Mixers
from ggufspec.planning.parts import Batch, Kind, Trunk, Where, begins_with_state

# The rows that are asked for are picked after the last block, or after the last norm; elsewhere after its attention.
_LAST_ROWS_LATE = frozenset({"gpt-oss"})
_LAST_ROWS_LATEST = frozenset({"qwen3next"})
_LAST_ROWS_OF_SUM = frozenset({"falcon-h1"})
_RESIDUAL_FIRST = frozenset({"jamba", "lfm2", "lfm2moe"})  # the sums name it before what is added
_FOUR_POSITIONS = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "hunyuan_vl", "paddleocr"})


def graph(trunk: Trunk, batch: Batch, blocks: Sequence[tuple[Kind, Where]], output: int) -> Graph:
    """The graph of ``blocks`` and an output layer on the device ``output``."""
    return _Builder(trunk, batch).model(blocks, output)


class _Builder(Mixers):
    def model(self, blocks: Sequence[tuple[Kind, Where]], output: int) -> Graph:
        g, trunk, batch = self.graph, self.trunk, self.batch
        u = batch.tokens
        tokens = g.input(4 * u)
        g.input(self.row * u)  # inp_embd, for those who hand in embeddings
        if trunk.learned_positions or (batch.cells and trunk.architecture not in NO_ROTATION):
            self.positions = g.input((16 if trunk.architecture in _FOUR_POSITIONS else 4) * u)
        for kind, _ in blocks:  # in the order of their first readers
            if kind.windowed not in self.caches and kind.kv_heads and batch.cells:
                self._cache(kind.windowed)
        self.state_ids = g.input(4) if any(kind.recurrent for kind, _ in blocks) else -1
        self.other_ids = g.stored(0, 0)  # of sequences that are not in the batch: none
        self.output_ids = g.input(4 * batch.outputs)

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
