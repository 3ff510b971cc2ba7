"""Plans of a pair, the requests and machines that they are for; :mod:`ggufspec.planning.search` makes them."""

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
    """Device for offloading."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    overhead_bytes: int = 0  # memory that its driver takes for a process
    mmproj_bytes: int = 0  # memory of an image projector
    pool_bytes: int | None = None  # free memory for GPU and CPU together; None if the GPU has its own


ENOUGH_BYTES = 2**50  # assumed RAM next to simulated GPUs if none is given


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine to plan for."""

    cards: tuple[Card, ...]  # GPUs, in llama.cpp's order
    memory_bytes: int  # free RAM; ``ENOUGH_BYTES`` if unknown
    headroom_bytes: int  # memory to leave free on each GPU
    speed: MachineProfile
    simulated: bool = False  # True if the GPUs are not installed
    rpc: tuple[str, ...] = ()  # endpoints of the RPC workers among the devices
    mmproj_bytes: int = 0  # RAM of an image projector

    def with_mmproj(self, card: str, card_bytes: int, host_bytes: int) -> Machine:
        """Return this machine with an image projector's memory on ``card`` and in RAM."""
        cards = tuple(replace(one, mmproj_bytes=card_bytes) if one.name == card else one for one in self.cards)
        return replace(self, cards=cards, mmproj_bytes=host_bytes)

    def budget_bytes(self, card: Card) -> int:
        """Return the memory that a plan may use on a GPU, its overhead included."""
        return max(0, card.free_bytes - self.headroom_bytes)

    @property
    def card_names(self) -> tuple[str, ...]:
        """GPU names in llama.cpp's order."""
        return tuple(card.name for card in self.cards)

    @property
    def described(self) -> dict[str, str]:
        """Descriptions of the GPUs by name, in llama.cpp's order."""
        return {card.name: card.description for card in self.cards}


_HIGHEST = 0.97  # highest acceptance per token that drafts reach over texts of all kinds

# Fields of a placement that a plan can choose
FREE = frozenset({"gpu_layers", "n_cpu_moe", "n_cpu_ffn", "load_mode", "no_host"})


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Model to place."""

    header: ModelHeader
    metadata_only: Path  # file without weights, for dry runs
    context: ContextOptions
    placement: Placement = field(default_factory=Placement)
    free: frozenset[str] = FREE  # placement fields that the plan chooses; the others hold
    rehearsed: RehearsedLatency | None = None  # latency measured on this machine
    as_read: ModelHeader | None = None  # part that a step of a draft head reads
    in_target: bool = False  # True if a draft head's blocks are in the target's file
    mtp: bool = False  # True to load the file's MTP blocks

    def at(self, placement: Placement, target: Request | None = None) -> Request:
        """Return the memory request, with defaults for options that take no memory; a draft head needs ``target``."""
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
        """Return the machine's speeds, as corrected by a rehearsal of this model if there is one."""
        return self.rehearsed.speed if self.rehearsed else machine.speed

    def read_at(self, placement: Placement) -> tuple[ModelHeader, Placement]:
        """Return what a pass reads, as a model of its own, and its placement."""
        if self.as_read is None:
            return self.header, placement
        before = self.header.blocks - self.as_read.blocks  # the head's blocks are counted from 0
        return self.as_read, replace(
            placement,
            gpu_layers=min(placement.offloaded(self.header.blocks), self.as_read.layers),
            n_cpu_moe=max(0, placement.n_cpu_moe - before),
            n_cpu_ffn=max(0, placement.n_cpu_ffn - before),
            override_tensor=(),
        )

    @property
    def usual_depth(self) -> int:
        """Default number of cached tokens for predictions: half of the context."""
        return self.context.ctx_size // 2

    def pass_s(self, machine: Machine, placement: Placement, tokens: int, depth: int | None = None) -> float:
        """Return the predicted seconds of a batch with ``depth`` cached tokens (default: :attr:`usual_depth`)."""
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
    """Pair to place."""

    target: ModelRequest
    target_only: ModelRequest  # the target without a draft, which reserves fewer rows of logits
    draft: ModelRequest | None
    acceptance: float  # expected chance that a drafted token is accepted if all before it were, 0 to 1
    draft_max: int  # maximum draft length
    kv_types: tuple[tuple[str, str], ...] = ()  # other (cache_type_k, cache_type_v) that the target may get
    rewinds: tuple[int, ...] = ()  # other rollback capacities, which limit drafts with recurrent states
    may_stream: bool = False  # True if a GPU may copy CPU weights for smaller batches than by default
    acceptance_from: str = "given"  # origin of ``acceptance``, in words
    is_adaptive: bool = True  # False for a fixed draft length
    has_lookup: bool = False  # True if the n-gram lookup drafts too
    lookup: LookupRounds | None = None  # the lookup's results on this machine, if known

    def longest(self, target: ModelRequest) -> int:
        """Return the maximum draft length that can be rolled back."""
        header, context = target.header, target.context
        bounded = any(header.recurrent) and context.rewind
        return min(self.draft_max, context.rewind) if bounded else self.draft_max


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Option, pair or target-only: placements, bytes by device, and predicted speed."""

    target: Placement
    draft: Placement | None
    context: ContextOptions
    target_bytes: dict[str, Bytes]
    draft_bytes: dict[str, Bytes]
    tokens_per_s: float
    draft_length: int = 0
    draft_max: int = 0  # maximum that its context can roll back

    def used(self, device: str) -> Bytes:
        """Return the memory of target and draft on one device."""
        return self.target_bytes.get(device, Bytes()) + self.draft_bytes.get(device, Bytes())


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a pair, compared with target-only."""

    request: PlanRequest
    machine: Machine
    target_only: PlannedRun  # target-only at its own best placement
    pair: PlannedRun | None  # best placement of both; None without a draft or if it does not fit
    default: PlannedRun | None  # ``pair``, but adaptive and with the lookup, as a run is; None for a fixed draft length
    at_pair: float  # predicted tokens/s of target-only at the pair's placement
    break_even_acceptance: float | None  # acceptance per token from which on the pair wins; None if it never does
    break_even_length: int  # draft length at that acceptance; 0 if the pair never wins
    draft_costs_layers: int  # target layers that the draft's memory would hold
    draft_lengths: tuple[DraftLengthRow, ...]  # predictions for several draft lengths at the pair's placement
    confirmed: bool  # True if llama.cpp's dry run confirmed the plan
    notes: tuple[str, ...]  # further information for the user
    tuned: Tuned | None = None  # measurement by ``tune`` of this pair on this machine

    @property
    def choice(self) -> str:
        """Option to use: ``speculative`` if the draft is predicted to win or won when tuned, else ``target-only``."""
        wins = self.pair and (self.tuned or self.pair.tokens_per_s > self.target_only.tokens_per_s)
        return "speculative" if wins else "target-only"

    @property
    def judged_length(self) -> int:
        """Draft length for acceptance rates: the pair's; if that loses, the break-even length if reachable, else 0."""
        if self.pair and self.choice == "speculative":
            return self.pair.draft_length
        even = self.break_even_acceptance
        return 0 if even is None or even > _HIGHEST else self.break_even_length

    @property
    def accepted_share(self) -> float | None:
        """Expected accepted ÷ drafted tokens at :attr:`judged_length`; None without a draft."""
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
        """Return (seconds of a token with an empty cache, seconds per cached token); None if not well measured."""
        machine, target = self.machine, replace(self.request.target, context=run.context)
        sources = {machine.speed.device(name).source for name in (HOST, *machine.card_names)}
        if machine.speed.disturbed or (sources != {"measured"} and not target.rehearsed):
            return None
        empty_s, full_s = (target.pass_s(machine, run.target, 1, depth) for depth in (0, run.context.ctx_size))
        return empty_s, max(0.0, full_s - empty_s) / run.context.ctx_size

    @property
    def is_guessed(self) -> bool:
        """True if target weights are on a CPU whose speed was not measured, so that the prediction is only a guess."""
        return self.rests_on_host and self.machine.speed.device(HOST).source == "guess"

    @property
    def rests_on_host(self) -> bool:
        """True if the CPU's own speed counts: it has target weights, and no rehearsal measured the target."""
        if self.request.target.rehearsed:
            return False
        runs, names = [self.target_only, *([self.pair] if self.pair else [])], self.machine.card_names
        return any(host_bytes(self.request.target.header, run.target, names) for run in runs)
