"""Plans made by :mod:`ggufspec.planning.search`, and the pairs and machines that they are for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, ContextOptions, Placement
from ggufspec.models.header import ModelHeader
from ggufspec.planning.memory import HOST, DeviceBytes, MemoryRequest
from ggufspec.planning.rehearsed import RehearsedLatency
from ggufspec.planning.speed import LookupRounds, MachineProfile, host_bytes, pass_s
from ggufspec.planning.speed import accepted_share as share_of
from ggufspec.schema.plan import DraftLengthRow

if TYPE_CHECKING:
    from ggufspec.models.profile import TuneEvidence


@dataclass(frozen=True, slots=True)
class OffloadDevice:
    """Device to which layers can be offloaded."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    overhead_bytes: int = 0  # memory that the driver uses per process
    mmproj_bytes: int = 0  # memory for an image projector
    pool_bytes: int | None = None  # free memory shared by GPU and CPU; None if the GPU has its own memory


ENOUGH_BYTES = 2**50  # RAM assumed for simulated GPUs if no size is given


@dataclass(frozen=True, slots=True)
class PlanMachine:
    """Machine to plan for."""

    cards: tuple[OffloadDevice, ...]  # GPUs, in llama.cpp's order
    memory_bytes: int  # free RAM; ``ENOUGH_BYTES`` if unknown
    headroom_bytes: int  # memory to leave free on each GPU
    speed: MachineProfile
    simulated: bool = False  # True if the GPUs are not installed
    rpc: tuple[str, ...] = ()  # endpoints of the RPC workers among the devices
    mmproj_bytes: int = 0  # RAM for an image projector

    def with_mmproj(self, card: str, card_bytes: int, host_bytes: int) -> PlanMachine:
        """Return this machine with an image projector's memory on ``card`` and in RAM."""
        cards = tuple(replace(one, mmproj_bytes=card_bytes) if one.name == card else one for one in self.cards)
        return replace(self, cards=cards, mmproj_bytes=host_bytes)

    def budget_bytes(self, card: OffloadDevice) -> int:
        """Return the memory that a plan may use on a GPU, including the driver's overhead."""
        return max(0, card.free_bytes - self.headroom_bytes)

    @property
    def card_names(self) -> tuple[str, ...]:
        """GPU names in llama.cpp's order."""
        return tuple(card.name for card in self.cards)

    @property
    def described(self) -> dict[str, str]:
        """Descriptions of the GPUs by name, in llama.cpp's order."""
        return {card.name: card.description for card in self.cards}


_HIGHEST = 0.97  # highest acceptance per token that drafts reach when averaged over all kinds of text

# Placement fields that a plan can choose
FREE = frozenset({"gpu_layers", "n_cpu_moe", "n_cpu_ffn", "load_mode", "no_host"})


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Model to place on a machine, and the placement fields that the plan may choose."""

    header: ModelHeader
    metadata_only: Path  # GGUF file without weights, for dry runs
    context: ContextOptions
    placement: Placement = field(default_factory=Placement)
    free: frozenset[str] = FREE  # placement fields that the plan chooses; the others keep their values
    rehearsed: RehearsedLatency | None = None  # latency that was measured on this machine
    as_read: ModelHeader | None = None  # part of the model that each step of a draft head reads; None if not a head
    in_target: bool = False  # True if a draft head's blocks are in the target's file
    mtp: bool = False  # True to load the file's MTP blocks

    def at(self, placement: Placement, target: MemoryRequest | None = None) -> MemoryRequest:
        """Return the memory request; options that do not affect memory get defaults. A draft head needs ``target``."""
        context = self.context
        if context.computed >= OP_OFFLOAD_MIN_BATCH and context.op_offload_min_batch != OP_OFFLOAD_MIN_BATCH:
            context = replace(context, op_offload_min_batch=OP_OFFLOAD_MIN_BATCH)
        placement = replace(placement, mtp=self.mtp, load_mode="auto", no_host=False)
        if self.as_read is None:
            return MemoryRequest(self.header, self.metadata_only, placement, context)
        assert target is not None
        return MemoryRequest(
            self.header, self.metadata_only, target.placement if self.in_target else placement, context, target
        )

    def speed_on(self, machine: PlanMachine) -> MachineProfile:
        """Return the machine's speeds, corrected by a rehearsal of this model if there was one."""
        return self.rehearsed.speed if self.rehearsed else machine.speed

    def read_at(self, placement: Placement) -> tuple[ModelHeader, Placement]:
        """Return the header and the placement of the part of the model that a pass reads."""
        if self.as_read is None:
            return self.header, placement
        before = self.header.blocks - self.as_read.blocks  # in ``as_read``, the head's blocks begin at 0
        return self.as_read, replace(
            placement,
            gpu_layers=min(placement.offloaded(self.header.blocks), self.as_read.layers),
            n_cpu_moe=max(0, placement.n_cpu_moe - before),
            n_cpu_ffn=max(0, placement.n_cpu_ffn - before),
            override_tensor=(),
        )

    @property
    def usual_depth(self) -> int:
        """Default number of cached tokens for predictions: half the context."""
        return self.context.ctx_size // 2

    def pass_s(self, machine: PlanMachine, placement: Placement, tokens: int, depth: int | None = None) -> float:
        """Return the predicted seconds for a batch with ``depth`` cached tokens (default: :attr:`usual_depth`)."""
        header, placement = self.read_at(placement)
        op_offload_min_batch = self.context.op_offload_min_batch
        cards = machine.card_names
        return pass_s(
            header,
            placement,
            self.speed_on(machine),
            cards,
            tokens=tokens,
            depth=self.usual_depth if depth is None else depth,
            context=self.context,
            measured=self.rehearsed.nearest(header, placement, cards, op_offload_min_batch) if self.rehearsed else None,
        )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Pair to place on a machine, with what is known about its drafting."""

    target: ModelRequest
    target_only: ModelRequest  # the target without a draft; its batches need fewer logits
    draft: ModelRequest | None
    acceptance: float  # expected probability that a drafted token is accepted if all earlier ones were
    draft_max: int  # maximum draft length
    kv_types: tuple[tuple[str, str], ...] = ()  # further (cache_type_k, cache_type_v) that the target may use
    rewinds: tuple[int, ...] = ()  # further rollback capacities, which limit the draft length of recurrent targets
    may_stream: bool = False  # True if a GPU may copy CPU weights for smaller batches than by default
    acceptance_from: str = "given"  # origin of ``acceptance``, in words
    is_adaptive: bool = True  # False for a fixed draft length
    has_lookup: bool = False  # True if the n-gram lookup drafts too
    lookup: LookupRounds | None = None  # the lookup's statistics on this machine, if known

    def longest(self, target: ModelRequest) -> int:
        """Return the maximum draft length that this target can roll back."""
        header, context = target.header, target.context
        bounded = any(header.recurrent) and context.rewind
        return min(self.draft_max, context.rewind) if bounded else self.draft_max


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Placements of a pair or of target-only, with bytes by device and predicted speed."""

    target: Placement
    draft: Placement | None
    context: ContextOptions
    target_bytes: dict[str, DeviceBytes]
    draft_bytes: dict[str, DeviceBytes]
    tokens_per_s: float
    draft_length: int = 0
    draft_max: int = 0  # maximum draft length that the target's context can roll back

    def used(self, device: str) -> DeviceBytes:
        """Return the memory of target and draft on one device."""
        return self.target_bytes.get(device, DeviceBytes()) + self.draft_bytes.get(device, DeviceBytes())


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for running a pair, compared with target-only."""

    request: PlanRequest
    machine: PlanMachine
    target_only: PlannedRun  # target-only at its own best placement
    pair: PlannedRun | None  # best placement of target and draft; None without a draft or if the pair does not fit
    default: PlannedRun | None  # ``pair`` with the adaptive policy and the lookup; None if the draft length is fixed
    at_pair: float  # predicted tokens/s of target-only at the pair's placement
    break_even_acceptance: float | None  # minimum acceptance per token for the pair to win; None if it never wins
    break_even_length: int  # draft length at that acceptance; 0 if the pair never wins
    draft_costs_layers: int  # target layers that would fit in the draft's memory
    draft_lengths: tuple[DraftLengthRow, ...]  # predictions by draft length at the pair's placement
    confirmed: bool  # True if llama.cpp's dry run confirmed the plan
    notes: tuple[str, ...]  # further information for the user
    tuned: TuneEvidence | None = None  # ``tune``'s measurement of this pair on this machine

    @property
    def choice(self) -> str:
        """Recommended option: ``speculative`` if ``tune`` or the prediction favours the draft, else ``target-only``."""
        wins = self.pair and (self.tuned or self.pair.tokens_per_s > self.target_only.tokens_per_s)
        return "speculative" if wins else "target-only"

    @property
    def judged_length(self) -> int:
        """Draft length of the stated rates: the pair's if it wins, else the break-even length (0 if unreachable)."""
        if self.pair and self.choice == "speculative":
            return self.pair.draft_length
        even = self.break_even_acceptance
        return 0 if even is None or even > _HIGHEST else self.break_even_length

    @property
    def accepted_share(self) -> float | None:
        """Expected ratio of accepted to drafted tokens at :attr:`judged_length`; None without a draft."""
        length = self.judged_length or (self.pair.draft_length if self.pair else 0)
        return share_of(self.request.acceptance, length) if length else None

    @property
    def break_even_share(self) -> float | None:
        """Minimum accepted ÷ drafted tokens at :attr:`judged_length` for the pair to win; None if it never wins."""
        rows = {row.draft_length: row.break_even_accepted_share for row in self.draft_lengths}
        return rows.get(self.judged_length)

    @property
    def chosen(self) -> PlannedRun:
        """Run of the recommended option."""
        return self.pair if self.pair and self.choice == "speculative" else self.target_only

    def target_s(self, run: PlannedRun) -> tuple[float, float] | None:
        """Return (seconds per token with an empty cache, extra seconds per cached token); None if not well measured."""
        machine, target = self.machine, replace(self.request.target, context=run.context)
        sources = {machine.speed.device(name).source for name in (HOST, *machine.card_names)}
        if machine.speed.disturbed or (sources != {"measured"} and not target.rehearsed):
            return None
        empty_s, full_s = (target.pass_s(machine, run.target, 1, depth) for depth in (0, run.context.ctx_size))
        return empty_s, max(0.0, full_s - empty_s) / run.context.ctx_size

    @property
    def is_guessed(self) -> bool:
        """True if the prediction is only a guess, because target weights are on a CPU whose speed was not measured."""
        return self.rests_on_host and self.machine.speed.device(HOST).source == "guess"

    @property
    def rests_on_host(self) -> bool:
        """True if predictions depend on the CPU's speed: it has target weights, and the target was not rehearsed."""
        if self.request.target.rehearsed:
            return False
        runs, names = [self.target_only, *([self.pair] if self.pair else [])], self.machine.card_names
        return any(host_bytes(self.request.target.header, run.target, names) for run in runs)
