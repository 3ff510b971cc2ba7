"""Attention and recurrent layers, as sizes. Pure.

Source: ``build_qkv``, ``build_attn`` and ``build_rs`` in src/llama-graph.cpp, src/models/*.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

from ggufspec.planning.parts import Batch, Parts, Trunk

# Architectures whose attention knows positions otherwise, or not at all: no inp_pos and no rotation.
NO_ROTATION = frozenset({"gpt2", "bloom", "mpt", "starcoder", "jais", "refact", "jamba", "granitehybrid"})


def _bytes(numbers: int, block: tuple[int, int]) -> int:
    return numbers // block[0] * block[1]


class Mixers(Parts):
    """What mixes tokens in a block."""

    def __init__(self, trunk: Trunk, batch: Batch) -> None:
        super().__init__(trunk, batch)
        self.caches: dict[bool, tuple[int, ...]] = {}
        self.first_values = -1

    # ---- attention --------------------------------------------------------------------------------

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

    def _attention(self, x: int) -> int:
        """``build_qkv`` and ``build_attn``."""
        finish = self._kqv(x)
        self._prefetch(mixing=True)
        return finish()

    def _kqv(self, x: int) -> Callable[[], int]:
        """Attention up to what the heads say; what it returns does the rest, when it is asked for."""
        g, kind, u, on = self.graph, self.kind, self.rows, self.where.block
        q, k, v, gate = self._queries_keys_values(x)
        rows_k, rows_v, mask, _, turn_v = self._cache(kind.windowed)
        if k >= 0:
            g.write(k, rows_k, on=on)
            g.write(v, rows_v, on=on)
        out = 4 * u * kind.heads * kind.value_size
        cells = self.batch.cells_windowed if kind.windowed else self.batch.cells
        cached_k = self._cached(cells, kind.kv_heads * kind.key_size, self.batch.cache_type_k)
        cached_v = self._cached(cells, kind.kv_heads * kind.value_size, self.batch.cache_type_v)
        if self.batch.flash:
            kqv = g.node(out, q, cached_k, cached_v, mask)
        else:
            if not self.batch.values_turned:
                cached_v = g.node(_bytes(cells * kind.kv_heads * kind.value_size, self.batch.cache_type_v), cached_v)
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
        _, _, _, turn_k, turn_v = self._cache(kind.windowed)
        queries = 4 * u * kind.heads * kind.key_size
        keys, values = 4 * u * kind.kv_heads * kind.key_size, 4 * u * kind.kv_heads * kind.value_size
        fused = self._linear("attn_qkv", x) if self._has("attn_qkv") else -1
        rotates = self.trunk.architecture not in NO_ROTATION

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

    def _cache(self, windowed: bool) -> tuple[int, ...]:
        if windowed not in self.caches:
            cells = self.batch.cells_windowed if windowed else self.batch.cells
            self.caches[windowed] = self._cache_inputs(cells)
        return self.caches[windowed]

    def _cached(self, cells: int, width: int, block: tuple[int, int]) -> int:
        """A cache as flash attention reads it: f32 is cast."""
        cache = self.graph.stored(cells * _bytes(width, block), self.where.block)
        return self.graph.node(2 * cells * width, cache) if self.batch.flash and block == (1, 4) else cache

    def _latent_attention(self, x: int) -> int:
        """src/models/deepseek2.cpp with ``attn_k_b``: one latent key per token, which is its value too."""
        g, kind, u, on = self.graph, self.kind, self.rows, self.where.block
        rows_k, _, mask, _, _ = self._cache(False)
        latent = self._edge("attn_kv_a_norm", 0)
        rope = max(kind.key_size - latent, 0)
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
        out = 4 * u * heads * self._out("attn_v_b")
        if self.batch.flash:
            keys, values = (self._cached(self.batch.cells, n, self.batch.cache_type_k) for n in (kind.key_size, latent))
            x = g.node(4 * u * heads * latent, q, keys, values, mask)
        else:
            v = g.node(self.batch.cache_type_k[1] * self.batch.cells * latent)
            scores = 4 * self.batch.cells * u * heads
            x = g.node(scores, g.node(scores, q), mask, over=1)
            x = g.node(4 * u * heads * latent, v, x)
        x = g.node(out, g.node(out, x, on=on))
        return self._linear("attn_output", x)

    # ---- state ------------------------------------------------------------------------------------

    def _convolution(self, before: int, x: int, rows: int, then: Callable[[], None] | None = None) -> int:
        """``x`` behind the last rows of the batch before, through the convolution and its activation."""
        g, u, on = self.graph, self.rows, self.where.block
        kernel = self._edge("ssm_conv1d", 0, 4)
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
        inner = self._edge("ssm_out", 0)
        whole = self._linear("ssm_in", x)
        size, state = 4 * u * inner, 4 * self.kind.state_numbers
        conv_rows = self._out("ssm_conv1d", inner)
        x = self._convolution(self._taken()[0], whole, conv_rows)
        before = g.stored(state, on)
        if self._has("ssm_x"):
            rank, low = self._edge("ssm_dt", 0), self._linear("ssm_x", x)
            step = g.node(4 * u * rank, low)
            sides = [low]
            if self._has("ssm_dt_norm"):
                step = g.node(4 * u * rank, step, over=1, on=on)
            step = self._linear("ssm_dt", step)
            if self._has("ssm_b_norm"):
                side = 4 * u * max(self._out("ssm_x") - rank, 0) // 2
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
        z = g.node(size, g.view(whole, 4 * ((u - 1) * self._out("ssm_in") + inner)))
        x = g.node(size, x, over=1 if self._has("ssm_x") else 0, on=on)
        y = g.node(size, x, y, over=1)
        y = g.node(size, z, y)
        if self._has("ssm_norm"):
            y = self._norm(y, "ssm_norm", on=on, size=size, viewed=True)
        return self._linear("ssm_out", y)

    def _short_convolution(self, x: int) -> int:
        """``build_shortconv_block`` in src/models/lfm2.cpp."""
        g, u, on = self.graph, self.rows, self.where.block
        kernel = self._edge("shortconv.conv", 0, 3)
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
        inner = self._edge("ssm_out", 0) or self._edge("attn_output", 0)
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
        shifted = g.node(u, conv, g.view(again, u))
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
