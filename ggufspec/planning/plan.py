"""A plan: where each layer of a pair goes, what it costs, how fast it will be, and whether target-only would be faster.

The values; :mod:`ggufspec.planning.search` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ggufspec.llamacpp.options import STREAM_WIDTH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.memory import HOST, Bytes, Request
from ggufspec.planning.rehearsed import RehearsedLatency
from ggufspec.planning.speed import MachineProfile, host_bytes, pass_s
from ggufspec.schema.plan import DraftLengthRow
from ggufspec.schema.text import counted


@dataclass(frozen=True, slots=True)
class Card:
    """A device that layers can be offloaded to.

    ``overhead_bytes`` is what its driver takes for a process, ``mmproj_bytes`` what an image projector takes there. If
    it shares the host's memory, ``pool_bytes`` are free for both together.
    """

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    overhead_bytes: int = 0
    mmproj_bytes: int = 0
    pool_bytes: int | None = None


ENOUGH_BYTES = 2**50  # of memory next to cards that are not here, unless somebody says how much there is


@dataclass(frozen=True, slots=True)
class Machine:
    """What to plan for.

    Args:
        cards: in llama.cpp's order.
        memory_bytes: the RAM that is free; ``ENOUGH_BYTES`` is not known.
        headroom_bytes: what is left free on each card.
        speed: how fast it is.
        simulated: whether the cards are not here.
        rpc: endpoints of the workers among them.
        mmproj_bytes: what an image projector takes of the RAM.
    """

    cards: tuple[Card, ...]
    memory_bytes: int
    headroom_bytes: int
    speed: MachineProfile
    simulated: bool = False
    rpc: tuple[str, ...] = ()
    mmproj_bytes: int = 0

    def with_mmproj(self, card: str, card_bytes: int, host_bytes: int) -> Machine:
        """The same with an image projector next to the target, on ``card`` and on the host."""
        cards = tuple(replace(one, mmproj_bytes=card_bytes) if one.name == card else one for one in self.cards)
        return replace(self, cards=cards, mmproj_bytes=host_bytes)

    def budget_bytes(self, card: Card) -> int:
        """What a plan may use of a card, its overhead included."""
        return max(0, card.free_bytes - self.headroom_bytes)

    @property
    def card_names(self) -> tuple[str, ...]:
        """In llama.cpp's order."""
        return tuple(card.name for card in self.cards)

    @property
    def described(self) -> dict[str, str]:
        """What each card is, by name and in llama.cpp's order."""
        return {card.name: card.description for card in self.cards}


# Of a placement: what a plan can choose
FREE = frozenset({"gpu_layers", "n_cpu_moe", "n_cpu_ffn", "load_mode", "no_host"})


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model of the request: header, metadata-only file for dry runs, context, and its placement.

    Of the placement, the fields that are ``free`` are the plan's to choose, the others hold. ``rehearsed`` is how fast
    a rehearsal on this machine found the model. A head has ``as_read``: what a step of it reads; it is ``in_target`` if
    its blocks are in the target's own file. ``mtp``: the file's MTP blocks are loaded.
    """

    header: ModelHeader
    metadata_only: Path
    context: ContextOptions
    placement: Placement = field(default_factory=Placement)
    free: frozenset[str] = FREE
    rehearsed: RehearsedLatency | None = None
    as_read: ModelHeader | None = None
    in_target: bool = False
    mtp: bool = False

    def at(self, placement: Placement, target: Request | None = None) -> Request:
        """What to estimate or to dry-run; a head next to its ``target``. What takes no other bytes is as by default."""
        context = self.context
        if context.computed >= STREAM_WIDTH and context.op_offload_min_batch != STREAM_WIDTH:
            context = replace(context, op_offload_min_batch=STREAM_WIDTH)
        placement = replace(placement, mtp=self.mtp, load_mode="auto", no_host=False)
        if self.as_read is None:
            return Request(self.header, self.metadata_only, placement, context)
        assert target is not None
        return Request(
            self.header, self.metadata_only, target.placement if self.in_target else placement, context, target
        )

    def speed_on(self, machine: Machine) -> MachineProfile:
        """The machine's speeds, as a rehearsal found them for this model if there was one."""
        return self.rehearsed.speed if self.rehearsed else machine.speed

    def read_at(self, placement: Placement) -> tuple[ModelHeader, Placement]:
        """What a pass reads, as a model of its own, and where that is."""
        if self.as_read is None:
            return self.header, placement
        before = self.header.blocks - self.as_read.blocks  # whose numbers the head's blocks do not have
        return self.as_read, replace(
            placement,
            gpu_layers=min(placement.offloaded(self.header.blocks), self.as_read.layers),
            n_cpu_moe=max(0, placement.n_cpu_moe - before),
            n_cpu_ffn=max(0, placement.n_cpu_ffn - before),
            override_tensor=(),
        )

    @property
    def usual_depth(self) -> int:
        """The tokens in the cache that predictions are for where no depth is named: half of the context."""
        return self.context.ctx_size // 2

    def pass_s(self, machine: Machine, placement: Placement, tokens: int, depth: int | None = None) -> float:
        """Predicted seconds of a batch with ``depth`` tokens in the cache, by default :attr:`usual_depth`."""
        header, placement = self.read_at(placement)
        streams_from = self.context.op_offload_min_batch
        cards = machine.card_names
        return pass_s(
            header,
            placement,
            self.speed_on(machine),
            cards,
            tokens=tokens,
            depth=self.usual_depth if depth is None else depth,
            context=self.context,
            measured=self.rehearsed.nearest(header, placement, cards, streams_from) if self.rehearsed else None,
        )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A pair to place.

    Args:
        target: the target in the pair.
        target_only: the target without a draft: fewer rows of logits are reserved.
        draft: the draft, or None.
        acceptance: the expected share of drafted tokens that the target keeps, 0 to 1.
        draft_max: the longest draft to consider.
        kv_types: (cache_type_k, cache_type_v) of the target's cache that may be chosen besides the one asked for.
        rewinds: tokens that may be taken back, which bounds a draft, besides those that the context has a state for.
        may_stream: whether a card may compute with the host's weights in narrower batches than it does anyway.
    """

    target: ModelRequest
    target_only: ModelRequest
    draft: ModelRequest | None
    acceptance: float
    draft_max: int
    kv_types: tuple[tuple[str, str], ...] = ()
    rewinds: tuple[int, ...] = ()
    may_stream: bool = False

    def longest(self, target: ModelRequest) -> int:
        """The longest draft to consider that can be taken back."""
        header, context = target.header, target.context
        bounded = any(header.recurrent) and context.rewind
        return min(self.draft_max, context.rewind) if bounded else self.draft_max


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One way of running: placements, bytes by device, and what it will reach."""

    target: Placement
    draft: Placement | None
    context: ContextOptions
    target_bytes: dict[str, Bytes]
    draft_bytes: dict[str, Bytes]
    tokens_per_s: float
    draft_length: int = 0
    draft_max: int = 0  # what its context has room for

    def used(self, device: str) -> Bytes:
        """Target and draft together on one device."""
        return self.target_bytes.get(device, Bytes()) + self.draft_bytes.get(device, Bytes())


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Args:
        target_only: target-only at its own best placement.
        pair: the best placement of both; None without a draft, or where the draft does not fit.
        at_pair: predicted tokens/s of target-only at the pair's placement of the target.
        break_even_acceptance: from which acceptance on the pair wins; None if it never does.
        draft_costs_layers: target layers that the draft's memory would hold.
        draft_lengths: what some draft lengths reach at the pair's placement, and what they need.
        confirmed: whether llama.cpp's dry run answered.
        notes: what the user should know besides.
    """

    request: PlanRequest
    machine: Machine
    target_only: PlannedRun
    pair: PlannedRun | None
    at_pair: float
    break_even_acceptance: float | None
    draft_costs_layers: int
    draft_lengths: tuple[DraftLengthRow, ...]
    confirmed: bool
    notes: tuple[str, ...]

    @property
    def choice(self) -> str:
        """``speculative`` where the pair is predicted to win, else ``target-only``."""
        return "speculative" if self.pair and self.pair.tokens_per_s > self.target_only.tokens_per_s else "target-only"

    @property
    def chosen(self) -> PlannedRun:
        """The faster option."""
        return self.pair if self.pair and self.choice == "speculative" else self.target_only

    def target_s(self, run: PlannedRun) -> tuple[float, float] | None:
        """Seconds of a token of the target's with an empty context, and those that each token in it adds; None unless
        the devices were measured undisturbed.
        """
        machine, target = self.machine, replace(self.request.target, context=run.context)
        sources = {machine.speed.device(name).source for name in (HOST, *machine.card_names)}
        if machine.speed.disturbed or (sources != {"measured"} and not target.rehearsed):
            return None
        empty_s, full_s = (target.pass_s(machine, run.target, 1, depth) for depth in (0, run.context.ctx_size))
        return empty_s, max(0.0, full_s - empty_s) / run.context.ctx_size

    @property
    def is_guessed(self) -> bool:
        """Whether target weights are on a host whose speed was not measured: what it reaches is no prediction then."""
        return self.rests_on_host and self.machine.speed.device(HOST).source == "guess"

    @property
    def rests_on_host(self) -> bool:
        """Whether target weights are on a host whose own speed counts, no rehearsal's."""
        if self.request.target.rehearsed:
            return False
        runs, names = [self.target_only, *([self.pair] if self.pair else [])], self.machine.card_names
        return any(host_bytes(self.request.target.header, run.target, names) for run in runs)

    def why(self) -> str:
        """The choice in words."""
        layers, target_only = self.request.target.header.layers, self.target_only
        at = target_only.target
        rival = f"target-only at {at.offloaded(layers - 1)}/{layers} layers"
        for what, blocks in (("experts", at.n_cpu_moe), ("feed-forward weights", at.n_cpu_ffn)):
            rival += f" with the {what} of {counted(blocks, 'block')} on the CPU" if blocks else ""
        expected = "guessed" if self.is_guessed else "predicted"
        if self.request.draft is None:
            return f"{rival} is {expected} to reach {_rate(target_only.tokens_per_s)}."
        if self.pair is None:
            rate = _rate(target_only.tokens_per_s)
            return f"The draft does not fit beside the target; {rival} is {expected} to reach {rate}."
        assert self.pair.draft is not None
        said = []
        if self.draft_costs_layers:
            said.append(f"The draft costs {counted(self.draft_costs_layers, 'target layer')}")
        said.append(
            f"{rival} would reach {_rate(target_only.tokens_per_s)}, the pair {_rate(self.pair.tokens_per_s)} at "
            f"{self.request.acceptance:.0%} acceptance and draft length {self.pair.draft_length}"
        )
        said += self._experts_cost()
        if self.break_even_acceptance is None:
            said.append("no acceptance would make the draft worth it here")
        else:
            said.append(f"break-even acceptance is {self.break_even_acceptance:.2f}")
        return "; ".join(said) + "."

    def _experts_cost(self) -> list[str]:
        """Why drafting does not pay on a mixture of experts, if it does not."""
        target = self.request.target
        if self.pair is None or not target.header.experts or self.choice == "speculative":
            return []
        target, tokens = replace(target, context=self.pair.context), self.pair.draft_length + 1
        one_s, batch_s = (target.pass_s(self.machine, self.pair.target, count) for count in (1, tokens))
        cost = f"verifying {tokens} costs {batch_s / one_s:.1f} of one"
        return [f"each token of a batch runs through other experts: {cost}"]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f} t/s"
