"""A plan: where each layer of a pair goes, what it costs, how fast it will be, and whether target-only would be faster.

The values; :mod:`ggufspec.planning.search` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.llamacpp.options import STREAM_WIDTH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.memory import HOST, Bytes, Request
from ggufspec.planning.rehearsed import RehearsedLatency
from ggufspec.planning.speed import LookupRounds, MachineProfile, host_bytes, pass_s
from ggufspec.planning.speed import accepted_share as share_of
from ggufspec.schema.plan import DraftLengthRow

if TYPE_CHECKING:
    from ggufspec.models.profile import Tuned


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


_HIGHEST = 0.97  # chance per token that drafts reach, in texts of all kinds together

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
        acceptance: the expected chance per token: that a drafted token is accepted if all before it were, 0 to 1.
        draft_max: the longest draft to consider.
        kv_types: (cache_type_k, cache_type_v) of the target's cache that may be chosen besides the one asked for.
        rewinds: tokens that may be taken back, which bounds a draft, besides those that the context has a state for.
        may_stream: whether a card may compute with the host's weights in narrower batches than it does anyway.
        acceptance_from: where the chance per token comes from, in words.
        is_adaptive: whether a run drafts as far as it pays, and not always as far.
        has_lookup: whether the n-gram lookup drafts too; ``lookup`` is what it did here, if that is known.
    """

    target: ModelRequest
    target_only: ModelRequest
    draft: ModelRequest | None
    acceptance: float
    draft_max: int
    kv_types: tuple[tuple[str, str], ...] = ()
    rewinds: tuple[int, ...] = ()
    may_stream: bool = False
    acceptance_from: str = "given"
    is_adaptive: bool = True
    has_lookup: bool = False
    lookup: LookupRounds | None = None

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
        default: what a run of the pair does: ``pair``, but adaptive and with the lookup; None where it drafts a fixed
            length.
        at_pair: predicted tokens/s of target-only at the pair's placement of the target.
        break_even_acceptance: the chance per token from which on the pair wins; None if it never does.
        break_even_length: the draft length with which it does, with that chance; 0 if it never does.
        draft_costs_layers: target layers that the draft's memory would hold.
        draft_lengths: what some draft lengths reach at the pair's placement, and what they need.
        confirmed: whether llama.cpp's dry run answered.
        notes: what the user should know besides.
        tuned: what ``tune`` measured here of the pair as it is asked for.
    """

    request: PlanRequest
    machine: Machine
    target_only: PlannedRun
    pair: PlannedRun | None
    default: PlannedRun | None
    at_pair: float
    break_even_acceptance: float | None
    break_even_length: int
    draft_costs_layers: int
    draft_lengths: tuple[DraftLengthRow, ...]
    confirmed: bool
    notes: tuple[str, ...]
    tuned: Tuned | None = None

    @property
    def choice(self) -> str:
        """``speculative`` where the draft is predicted to win, or won when it was tuned; else ``target-only``."""
        wins = self.pair and (self.tuned or self.pair.tokens_per_s > self.target_only.tokens_per_s)
        return "speculative" if wins else "target-only"

    @property
    def judged_length(self) -> int:
        """The draft length that acceptance rates are given for: the pair's, or if that does not pay, one that would
        with a better draft; 0 without such a length.
        """
        if self.pair and self.choice == "speculative":
            return self.pair.draft_length
        even = self.break_even_acceptance
        return 0 if even is None or even > _HIGHEST else self.break_even_length

    @property
    def accepted_share(self) -> float | None:
        """Accepted ÷ drafted tokens that are expected at :attr:`judged_length`; None without a draft."""
        length = self.judged_length or (self.pair.draft_length if self.pair else 0)
        return share_of(self.request.acceptance, length) if length else None

    @property
    def break_even_share(self) -> float | None:
        """Accepted ÷ drafted tokens at :attr:`judged_length` from which on the pair wins; None if it never does."""
        rows = {row.draft_length: row.break_even_accepted_share for row in self.draft_lengths}
        return rows.get(self.judged_length)

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
