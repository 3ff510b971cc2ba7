"""Search for the fastest placement that fits. Pure except for llama.cpp's dry runs.

Placements are tried in order of predicted tokens/s, and the first that fits is the plan. Those whose estimated memory
(:mod:`ggufspec.planning.memory`) is far over budget are skipped, and the others are dry-run. Therefore, llama.cpp has
confirmed that the plan fits; with one more layer, it would not.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ggufspec.errors import GgufspecError, ModelError
from ggufspec.llamacpp.dryrun import CANNOT_LOAD
from ggufspec.llamacpp.options import (
    OP_OFFLOAD_MIN_BATCH,
    Placement,
    beyond_training,
    context_hint,
    is_remote,
    load_hint,
    offloaded,
)
from ggufspec.planning.memory import (
    HOST,
    ByDevice,
    DeviceBytes,
    DryRun,
    MemoryEstimates,
    MemoryRequest,
    SameHeader,
    part_rules,
    streaming_card,
)
from ggufspec.planning.plan import ENOUGH_BYTES, ModelRequest, Plan, PlanMachine, PlannedRun, PlanRequest
from ggufspec.planning.speed import (
    DraftChoice,
    LookupRounds,
    accepted_share,
    best_length,
    break_even_acceptance,
    host_bytes,
    with_lookup,
)
from ggufspec.schema.plan import ContextRow, DraftLengthRow, SweepRow
from ggufspec.schema.text import of_memory

_WAYS = (False, True)  # without and with GPU copies of CPU weights for small batches
_WORTH_DIVIDING_BLOCKS = 1.03  # gain required for feed-forwards on the CPU: crossing costs are the least certain
_WORTH_A_SMALLER_CACHE = 1.02  # gain required for a quantised KV cache, which costs quality
_UNSURE = 0.15  # share of a compute buffer by which its estimate may be too high
_AT_ONCE = 2  # number of placements to estimate or dry-run together
_MOST_ASKED = 120
_FILLED = 0.9  # maximum share of free RAM for unmapped weights, which cannot be evicted
_DRAFT_STEPS = _SWEEP_STEPS = 8
_LENGTHS = (1, 2, 3, 4, 8, 16)  # draft lengths for which a plan lists speed and break-even acceptance
_SHORTEST, _STEP = 1024, 256  # shortest context to try, and step between contexts, in tokens


def search_plan(request: PlanRequest, machine: PlanMachine, dry_run: DryRun) -> Plan:
    """Find the fastest placements for a pair and for target-only that fit the budget.

    Raises:
        GgufspecError: nothing fits the budget, or the requested layers do not fit.
        ModelError: llama.cpp refuses a placement that would fit.
    """
    return _plan(request, machine, dry_run, confirms=True)


def check_fits(request: PlanRequest, machine: PlanMachine, dry_run: DryRun) -> None:
    """Check that a target's smallest placement fits, before anything is measured.

    Raises:
        GgufspecError: it does not fit; :func:`search_plan` would raise the same error.
    """
    searches = [_Search(asked, machine, dry_run) for asked in _as_asked_and_smaller(request, machine)]
    if not any(one.has_room(one.request.target_only) for one in searches):
        raise searches[-1].too_large(searches[-1].request.target_only, None)


def estimate_plan(request: PlanRequest, machine: PlanMachine, dry_run: DryRun) -> Plan:
    """Plan as :func:`search_plan` does, but from estimates: few placements are dry-run, perhaps not the chosen one."""
    return replace(_plan(request, machine, dry_run, confirms=False), confirmed=False)


def largest_context(subject: ModelRequest, machine: PlanMachine, dry_run: DryRun) -> int | None:
    """Estimate the longest context at which all layers fit on the GPUs; None without a GPU or if no context fits.

    The result is at most the training context, or the requested context if that is longer.
    """
    layers, most = subject.header.layers, max(subject.header.context_length, subject.context.ctx_size)
    search = _Search(PlanRequest(subject, subject, None, 0.0, 1), machine, dry_run)
    found = [search.longest(subject, split, most) for split in search.splits(subject, layers)] if machine.cards else []
    return max(found, default=0) or None


def _plan(request: PlanRequest, machine: PlanMachine, dry_run: DryRun, *, confirms: bool) -> Plan:
    notes, target_only, pair = list[str](), None, None
    searches = [
        _Search(asked, machine, dry_run, confirms=confirms) for asked in _as_asked_and_smaller(request, machine)
    ]
    for search in searches:
        if target_only := search.best([(search.request.target_only, None)]):
            break
    if target_only is None:
        raise search.too_large(search.request.target_only, None)
    if sum(not is_remote(name) for name in machine.card_names) > 1:
        notes.append(
            "layers are split over the cards; llama.cpp's -sm row, which splits each matrix and may be faster over a "
            "fast link, is not considered"
        )
    if not machine.cards and "gpu_layers" not in request.target.free and request.target.placement.gpu_layers:
        notes.append("no GPU found: -ngl has no effect (--gpu NAME plans for one that is not installed)")
    last = search
    if request.draft is not None:
        for last in searches[searches.index(search) :]:
            if pair := last.best(last.pairs()):
                break
        if pair is None:
            error = last.too_large(last.request.target, last.request.draft)
            if "gpu_layers" not in request.target.free & request.draft.free:
                raise error
            notes.append(error.message)
    if last is not searches[0] and (pair or last is search):
        where = " next to the draft" if last is not search else ""
        notes.append(
            f"{streaming_card(machine.card_names)} has no room{where} to process prompts with the CPU's weights, so "
            "the CPU does that, which is slower (--no-op-offload)"
        )
    return _finished(search, target_only, pair, notes)


def _as_asked_and_smaller(request: PlanRequest, machine: PlanMachine) -> Iterator[PlanRequest]:
    """Yield the request and, if it uses op offload, one without op offload, which saves the VRAM for copied weights."""
    yield request
    if streaming_card(machine.card_names) and request.target_only.context.op_offload:
        yield _with_contexts(request, op_offload=False)


def sweep_rows(plan: Plan, dry_run: DryRun) -> list[SweepRow]:
    """Return estimated tokens/s by target layers on GPUs, with and without the draft at its best placement.

    The rows include the numbers of layers that the plan uses. Without a GPU, the only row has 0 layers.
    """
    request, machine = plan.request, plan.machine
    blocks = request.target.header.blocks
    layers = request.target.header.layers if machine.cards else 0
    counts = {round(step * layers / _SWEEP_STEPS) for step in range(_SWEEP_STEPS + 1)}
    counts |= {option.target.offloaded(blocks) for option in (plan.target_only, plan.pair) if option}
    search = _Search(request, machine, dry_run)

    def speed(count: int, chosen: PlannedRun | None, subjects: Iterable[_Subject]) -> float | None:
        if chosen is not None and chosen.target.offloaded(blocks) == count:
            return chosen.tokens_per_s
        return search.best_estimate(_at_layers(one, count) for one in subjects)

    return [
        SweepRow(
            count,
            speed(count, plan.target_only, [(request.target_only, None)]),
            speed(count, plan.pair, search.pairs()) if request.draft else None,
        )
        for count in sorted(counts)
    ]


def _at_layers(subject: _Subject, count: int) -> _Subject:
    target, draft = subject
    at = replace(target.placement, gpu_layers=count)
    return replace(target, placement=at, free=target.free - {"gpu_layers"}), draft


CONTEXTS = (4096, 32768, 131072)  # context sizes, in tokens, for which plans are shown side by side


def context_sizes(plan: Plan) -> list[int]:
    """Return the sorted context sizes to plan for: ``CONTEXTS``, the plan's, and the target's training context."""
    planned, trained = plan.request.target.context.ctx_size, plan.request.target.header.context_length
    most = max(planned, trained) if trained else max(planned, *CONTEXTS)
    return sorted({planned, most, *(size for size in CONTEXTS if size <= most)})


def context_rows(plan: Plan, dry_run: DryRun) -> list[ContextRow]:
    """Return a row per size in :func:`context_sizes` for the option that is faster with a half-full cache."""
    request, blocks = plan.request, plan.request.target.header.blocks
    planned, rows = request.target.context.ctx_size, list[ContextRow]()
    for size in context_sizes(plan):
        for asked in _as_asked_and_smaller(_with_contexts(request, ctx_size=size), plan.machine):
            search = _Search(asked, plan.machine, dry_run)
            if option := plan.chosen if size == planned else search.fastest():
                break
        if option is None:
            rows.append(ContextRow(size, fits=False))
            continue
        host = option.used(HOST).total
        placed = replace(asked.target if option.draft else asked.target_only, context=option.context)
        draft = asked.draft if option.draft else None
        empty, full = (search.choice(placed, option.target, draft, option.draft, depth) for depth in (0, size))
        rows.append(
            ContextRow(
                size,
                fits=host <= plan.machine.memory_bytes,
                target_layers=option.target.offloaded(blocks),
                n_cpu_moe=option.target.n_cpu_moe,
                n_cpu_ffn=option.target.n_cpu_ffn,
                draft_layers=option.draft.offloaded(draft.header.blocks) if draft and option.draft else None,
                cache_type_k=option.context.cache_type_k,
                cache_type_v=option.context.cache_type_v,
                host_bytes=host,
                empty_tokens_per_s=empty.tokens_per_s,
                full_tokens_per_s=full.tokens_per_s,
            )
        )
    return rows


def _with_contexts(request: PlanRequest, **changes: Any) -> PlanRequest:
    """Return the request with these context options changed for all models."""

    def changed(subject: ModelRequest) -> ModelRequest:
        return replace(subject, context=replace(subject.context, **changes))

    draft = changed(request.draft) if request.draft else None
    target_only = changed(request.target_only)
    target = target_only if request.target is request.target_only else changed(request.target)
    return replace(request, target=target, target_only=target_only, draft=draft)


def can_stream(subject: ModelRequest, machine: PlanMachine) -> bool:
    """Return whether a GPU can compute this model's batches with copies of CPU weights."""
    return machine.speed.streams and subject.context.op_offload and bool(streaming_card(machine.card_names))


def _on_host(subject: ModelRequest, at: Placement, machine: PlanMachine) -> int:
    return 0 if subject.in_target else host_bytes(*subject.read_at(at), machine.card_names)


def with_load_options(machine: PlanMachine, *placed: tuple[ModelRequest, Placement]) -> list[Placement]:
    """Return the placements of models that are loaded together, with the fastest load options if RAM suffices.

    CPU weights are read into pinned RAM if a GPU computes with copies of them; otherwise they are repacked for the CPU.
    """
    on_host = [_on_host(subject, at, machine) for subject, at in placed]
    fits, found = sum(on_host) <= _FILLED * machine.memory_bytes, list[Placement]()
    for size, (subject, at) in zip(on_host, placed, strict=True):
        if fits and size and "load_mode" in subject.free:
            if not at.no_host and can_stream(subject, machine):
                at = replace(at, load_mode="none")
            elif "no_host" in subject.free and machine.speed.repacked and not subject.context.op_offload:
                at = replace(at, no_host=True)
        found.append(at)
    return found


def may_stream(request: PlanRequest, at: Placement, machine: PlanMachine) -> bool:
    """Return whether a GPU may compute small batches with the CPU weights of a target placed ``at``."""
    target = request.target
    streams = request.may_stream and not at.is_mapped and can_stream(target, machine)
    return streams and bool(_on_host(target, at, machine))


def _kv_types(subject: ModelRequest) -> tuple[str, str]:
    return subject.context.cache_type_k, subject.context.cache_type_v


def offload_min_batch(*, drafted: bool) -> int:
    """Return the minimum batch size for a GPU to compute with CPU weights: 2 for drafts, 1 for target-only."""
    return 2 if drafted else 1


def partly_on_host(subject: ModelRequest, at: Placement) -> list[Placement]:
    """Return full offloads, but with the experts (dense: feed-forwards) of the first 1, 2, … blocks on the CPU."""
    header, counts = subject.header, range(1, subject.header.blocks + 1)
    if header.experts:
        return [replace(at, n_cpu_moe=count) for count in counts] if "n_cpu_moe" in subject.free else []
    free = subject.free >= {"gpu_layers", "n_cpu_ffn"} and "ffn" in part_rules(SameHeader(header), ())
    return [replace(at, n_cpu_ffn=count) for count in counts] if free else []


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Placements of a target and its draft, if any, to be tried."""

    target: ModelRequest
    placement: Placement
    draft: ModelRequest | None
    draft_placement: Placement | None
    choice: DraftChoice

    def requests(self) -> list[MemoryRequest]:
        """Return the memory requests of the models, starting with the target's."""
        return _requests(self.target, self.placement, self.draft, self.draft_placement)


def _requests(
    target: ModelRequest, at: Placement, draft: ModelRequest | None, draft_at: Placement | None
) -> list[MemoryRequest]:
    asked = [target.at(at)]
    if draft is not None and draft_at is not None:
        asked.append(draft.at(draft_at, asked[0]))
    return asked


_Subject: TypeAlias = tuple[ModelRequest, ModelRequest | None]  # (target, its draft or None)


class _Search:
    """Search for one request; ``confirms``: True if a dry run by llama.cpp must confirm the result."""

    def __init__(self, request: PlanRequest, machine: PlanMachine, dry_run: DryRun, *, confirms: bool = True) -> None:
        self.request, self.machine, self.confirms = request, machine, confirms
        self._memory = MemoryEstimates(machine.card_names, dry_run)
        self._passes: dict[object, dict[int, float]] = {}

    # ---- predictions

    def pass_s(
        self, subject: ModelRequest, placement: Placement, depth: int | None = None, taken: int = 0
    ) -> Callable[[int], float]:
        """Return a function from batch size to predicted seconds; other models occupy ``taken`` bytes of RAM."""
        context = subject.context
        offload_min_batch = context.op_offload and context.op_offload_min_batch
        key = (id(subject.as_read or subject.header), placement, _kv_types(subject), offload_min_batch, depth, taken)
        known = self._passes.setdefault(key, {})

        def seconds(tokens: int) -> float:
            if tokens not in known:
                machine, speed = self.machine, self.machine.speed
                if taken and speed.memory_bytes is not None:
                    machine = replace(machine, speed=replace(speed, memory_bytes=speed.memory_bytes - taken))
                known[tokens] = subject.pass_s(machine, placement, tokens, depth)
            return known[tokens]

        return seconds

    def choice(
        self,
        target: ModelRequest,
        at: Placement,
        draft: ModelRequest | None,
        draft_at: Placement | None,
        depth: int | None = None,
    ) -> DraftChoice:
        """Return the best draft length at these placements and its tokens/s; length 0 means target-only."""
        if draft is None or draft_at is None:
            return DraftChoice(0, 1 / self.pass_s(target, at, depth)(1))
        others, whole = _on_host(draft, draft_at, self.machine), self.machine.memory_bytes
        taken = others if others + _on_host(target, at, self.machine) > whole else 0
        return best_length(
            self.pass_s(target, at, depth, taken),
            self.pass_s(draft, at if draft.in_target else draft_at, depth)(1),
            self.request.acceptance,
            most=self.request.longest(target),
            least=1,
        )

    # ---- the search

    def pairs(self) -> list[_Subject]:
        """Return the pair with each permitted KV cache type and rollback capacity."""
        target, found = self.request.target, list[_Subject]()
        for cache_type_k, cache_type_v in dict.fromkeys((_kv_types(target), *self.request.kv_types)):
            typed = replace(target.context, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
            for rewind in (typed.rewind, *self.request.rewinds):
                found.append((replace(target, context=replace(typed, rewind=rewind)), self.request.draft))
        return found

    def _placed(
        self,
        target: ModelRequest,
        at: Placement,
        draft: ModelRequest | None,
        draft_at: Placement | None,
        *,
        streams: bool,
    ) -> Iterator[_Candidate]:
        """Yield the placement with its load options; nothing if ``streams`` is set but not possible.

        With ``streams``, a GPU computes with CPU weights for verification or target-only tokens, not only for prompts.
        """
        if draft is not None and draft_at is not None:
            at, draft_at = with_load_options(self.machine, (target, at), (draft, draft_at))
        else:
            (at,) = with_load_options(self.machine, (target, at))
        if streams:
            if not may_stream(self.request, at, self.machine):
                return
            context = replace(target.context, op_offload_min_batch=offload_min_batch(drafted=draft is not None))
            target = replace(target, context=context)
        yield _Candidate(target, at, draft, draft_at, self.choice(target, at, draft, draft_at))

    def best(self, subjects: Iterable[_Subject]) -> PlannedRun | None:
        """Return the fastest placements that fit, or None.

        Raises:
            ModelError: llama.cpp refuses placements that would fit.
        """
        if not self.confirms:
            return next((self._planned(one, parts) for one, parts in self._fitting(subjects, unsure=0.0)), None)
        left = (one for one, _ in self._fitting(subjects, unsure=_UNSURE))
        asked, refusal = 0, None
        while (some := list(itertools.islice(left, _AT_ONCE))) and asked < _MOST_ASKED:
            asked += len(some)
            requests = [one.requests() for one in some]
            answers = iter(self._memory.dry_run([request for pair in requests for request in pair]))
            for one, pair in zip(some, requests, strict=True):
                parts = [(request, next(answers)) for request in pair]
                known = [part for _, part in parts if not isinstance(part, str)]
                refusal = next(((request, part) for request, part in parts if isinstance(part, str)), refusal)
                if len(known) == len(parts) and self._within(known):
                    return self._planned(one, known)
        if refusal:
            request, reason = refusal
            hint = load_hint(reason) if reason.startswith(CANNOT_LOAD) else context_hint(reason)
            raise ModelError(f"{request.header.name}: {reason}", hint)
        return None

    def fastest(self) -> PlannedRun | None:
        """Return the faster run that fits, with or without draft; None if neither fits or llama.cpp rejects both."""
        request, found = self.request, list[PlannedRun | None]()
        with contextlib.suppress(ModelError):
            found.append(self.best([(request.target_only, None)]))
        if request.draft is not None:
            with contextlib.suppress(ModelError):
                found.append(self.best(self.pairs()))
        return max(filter(None, found), key=lambda option: option.tokens_per_s, default=None)

    def best_estimate(self, subjects: Iterable[_Subject]) -> float | None:
        """Return the tokens/s of the fastest placements that fit by estimate, or None."""
        return next((one.choice.tokens_per_s for one, _ in self._fitting(subjects, unsure=0.0)), None)

    def _fitting(self, subjects: Iterable[_Subject], unsure: float) -> Iterator[tuple[_Candidate, list[ByDevice]]]:
        """Yield placements that may fit, with memory estimates, fastest first; each is evaluated only when needed."""
        ordered = (family for target, draft in subjects for family in self._fastest_first(target, draft))
        left = heapq.merge(*ordered, key=self._rank, reverse=True)
        while some := list(itertools.islice(left, _AT_ONCE)):
            requests = [one.requests() for one in some]
            estimates = iter(self._memory.estimates([request for pair in requests for request in pair]))
            for one, pair in zip(some, requests, strict=True):
                parts = [next(estimates) for _ in pair]
                if self._within(parts, unsure):
                    yield one, parts

    def _rank(self, one: _Candidate) -> float:
        asked = _kv_types(one.target) in (_kv_types(self.request.target), _kv_types(self.request.target_only))
        streamed = one.target.context.op_offload_min_batch < OP_OFFLOAD_MIN_BATCH  # then attention runs on the GPU
        divided = one.placement.n_cpu_ffn > one.target.placement.n_cpu_ffn and not streamed
        worth = (1.0 if asked else _WORTH_A_SMALLER_CACHE) * (_WORTH_DIVIDING_BLOCKS if divided else 1.0)
        return one.choice.tokens_per_s / worth

    def _fastest_first(self, target: ModelRequest, draft: ModelRequest | None) -> Iterator[Iterator[_Candidate]]:
        """Yield families of placements of both models whose weights and caches fit, each ordered fastest first.

        Within a family, speed is monotonic in the share on GPUs, so comparing its two ends gives the order.
        """
        drafts: list[tuple[Placement | None, ByDevice]] = [(None, {})]
        if draft:  # a draft head's bytes depend on its target
            places = self._placements(draft)
            drafts = [(at, {} if draft.as_read else self._memory.resident(draft.at(at))) for at in places]
        families = [[(at, self._memory.resident(target.at(at))) for at in one] for one in self._families(target)]
        for (draft_at, draft_used), family in itertools.product(drafts, families):
            fit = [at for at, used in family if self._within([used, draft_used])]
            for streams in _WAYS:
                place = functools.partial(self._placed, target, draft=draft, draft_at=draft_at, streams=streams)
                ends = [self._rank(one) for at in fit[:: max(1, len(fit) - 1)] for one in place(at)]
                ordered = fit[::-1] if ends and ends[-1] > ends[0] else fit
                yield itertools.chain.from_iterable(map(place, ordered))

    def _families(self, target: ModelRequest) -> list[list[Placement]]:
        """Group placements; within a group, only the number of GPU layers or of blocks partly on the CPU varies."""
        found: dict[object, list[Placement]] = {}
        for at in self._placements(target):
            kept = bool(at.n_cpu_moe), bool(at.n_cpu_ffn)
            found.setdefault((kept, self._moved(target, at)), []).append(at)
        return [*found.values()]

    def _placements(self, subject: ModelRequest) -> list[Placement]:
        """Return the placements that a request permits, beginning with those that put the most on GPUs."""
        layers = subject.header.layers
        if not self.machine.cards or subject.in_target:
            return [Placement(0)]
        counts: Iterable[int] = range(layers, -1, -1)
        if subject is self.request.draft:  # partial offload of a draft is rarely best, so a few steps suffice
            counts = sorted({round(step * layers / _DRAFT_STEPS) for step in range(_DRAFT_STEPS + 1)}, reverse=True)
        if "gpu_layers" not in subject.free:
            counts = [offloaded(subject.placement.gpu_layers, layers)]
        found = []
        for count in counts:
            for split in self.splits(subject, count):
                at = replace(subject.placement, gpu_layers=count, split=split)
                found.append(at)
                if count == layers and subject is not self.request.draft:
                    found += partly_on_host(subject, at)
        return found

    def longest(self, subject: ModelRequest, split: tuple[float, ...], most: int) -> int:
        """Return the longest context up to ``most`` at which all layers fit, in steps of ``_STEP``; 0 if none fits.

        Because compute buffers grow with the context, those for the next power of two are assumed.
        """
        placement = Placement(subject.header.layers, split)
        steps = [
            1 << power for power in range(_SHORTEST.bit_length() - 1, max(most, 2).bit_length()) if 1 << power < most
        ]
        steps.append(most)
        sized = [replace(subject, context=replace(subject.context, ctx_size=size)) for size in steps]
        buffers = self._memory.estimates([one.at(placement) for one in sized])
        longest = 0
        for size, buffer in zip(steps, buffers, strict=True):
            if self._within([buffer]):
                longest = size
                continue
            low, high = longest // _STEP, size // _STEP  # ``low`` fits, ``high`` does not
            while subject.header.regular and high - low > 1:
                middle = (low + high) // 2
                at = replace(subject, context=replace(subject.context, ctx_size=middle * _STEP))
                used = self._memory.resident(at.at(placement))
                found = {name: replace(one, compute=buffer[name].compute) for name, one in used.items()}
                low, high = (middle, high) if self._within([found]) else (low, middle)
            return max(longest, low * _STEP)
        return longest

    def splits(self, subject: ModelRequest, count: int) -> list[tuple[float, ...]]:
        """Return splits over GPUs by budget, also with 1 to 3 fewer layers on the last GPU, which has the output."""
        cards = self.machine.cards
        if subject.placement.split or len(cards) < 2 or count < len(cards):
            return [subject.placement.split]
        budgets = [self.machine.budget_bytes(card) for card in cards]
        ends = [round(count * sum(budgets[: i + 1]) / max(sum(budgets), 1)) for i in range(len(cards))]
        shares = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return [
            tuple(map(float, (shares[0] + moved, *shares[1:-1], shares[-1] - moved)))
            for moved in range(4)
            if shares[-1] - moved > 0
        ]

    def _moved(self, subject: ModelRequest, at: Placement) -> int:
        return self.splits(subject, at.gpu_layers).index(at.split) if at.split else 0

    # ---- memory

    def _within(self, parts: Sequence[ByDevice], unsure: float = 0.0) -> bool:
        return all(self._excess(parts, index, unsure) <= 0 for index in range(len(self.machine.cards)))

    def _excess(self, parts: Sequence[ByDevice], index: int, unsure: float = 0.0) -> int:
        """Return the bytes by which a GPU exceeds its budget, excluding a share ``unsure`` of its compute buffers."""
        card = self.machine.cards[index]
        used = sum(
            (part.get(card.name, DeviceBytes()) for part in parts),
            DeviceBytes(overhead=card.overhead_bytes + card.mmproj_bytes),
        )
        room = self.machine.budget_bytes(card)
        if card.pool_bytes is not None and used.weights + used.kv:
            others = sum(part[HOST].total for part in parts if part)
            room = min(room, card.pool_bytes - self.machine.headroom_bytes - others)
        return used.total - int(unsure * used.compute) - room

    def _planned(self, one: _Candidate, parts: Sequence[ByDevice]) -> PlannedRun:
        return PlannedRun(
            target=one.placement,
            draft=one.placement if one.draft and one.draft.in_target else one.draft_placement,
            context=one.target.context,
            target_bytes=parts[0],
            draft_bytes=parts[1] if len(parts) > 1 else {},
            tokens_per_s=one.choice.tokens_per_s,
            draft_length=one.choice.length,
            draft_max=self.request.longest(one.target) if one.draft else 0,
        )

    def has_room(self, subject: ModelRequest) -> bool:
        """Return whether weights and caches fit at any permitted placement."""
        return any(self._within([self._memory.resident(subject.at(at))]) for at in self._placements(subject))

    def too_large(self, target: ModelRequest, draft: ModelRequest | None) -> GgufspecError:
        """Return the error for a model that fits nowhere, with the smallest placement's need on the tightest GPU."""
        asked = [target.at(self._placements(target)[-1])]
        if draft:
            asked.append(draft.at(self._placements(draft)[-1], asked[0]))
        smallest = self._memory.estimates(asked)
        index = max(range(len(self.machine.cards)), key=lambda i: self._excess(smallest, i))
        card = self.machine.cards[index]
        needed = self._excess(smallest, index) + self.machine.budget_bytes(card)
        what = f"{target.header.name} with {draft.header.name}" if draft else target.header.name
        hint, fits = "give more with --vram, or lower --headroom", ""
        if "gpu_layers" not in target.free or draft:
            hint = (
                "-ngl auto and -ngld auto find the most layers that fit; or lower -c, or use a smaller KV type "
                "(-ctk q8_0 -ctv q8_0)"
            )
        if "gpu_layers" not in target.free:
            free = replace(target, free=(target.free | {"gpu_layers"}) - {"n_cpu_ffn"})
            free_draft = draft and replace(draft, free=draft.free | {"gpu_layers"})
            largest = next(self._fitting([(free, free_draft)], unsure=0.0), None)
            layers = target.header.layers
            fits = f"; {largest[0].placement.offloaded(layers - 1)} of {layers} layers fit" if largest else ""
        return GgufspecError(
            f"{what} needs at least {of_memory(needed, 2)} of {card.name}, but the budget is "
            f"{of_memory(self.machine.budget_bytes(card), 2)}{fits}",
            hint,
        )


# ---- the plan


def _finished(search: _Search, target_only: PlannedRun, pair: PlannedRun | None, notes: list[str]) -> Plan:
    request, machine = search.request, search.machine
    target, draft = request.target, request.draft
    at_pair, even, even_length, costs, default = target_only.tokens_per_s, None, 0, 0, None
    lengths: tuple[DraftLengthRow, ...] = ()
    if pair is not None and draft is not None and pair.draft is not None:
        placed = replace(target, context=pair.context)
        draft_s = search.pass_s(draft, pair.target if draft.in_target else pair.draft)(1)
        target_s = search.pass_s(placed, pair.target)
        at_pair = 1 / target_s(1)
        even = break_even_acceptance(target_s, draft_s, target_only.tokens_per_s, most=pair.draft_max)
        if even is not None:
            even_length = best_length(target_s, draft_s, even, most=pair.draft_max, least=1).length
        lengths = tuple(
            _at_length(length, target_s, draft_s, request.acceptance, target_only.tokens_per_s)
            for length in sorted({*_LENGTHS, pair.draft_length, even_length} - {0})
            if length <= pair.draft_max
        )
        costs = _layers_between(request, machine, target_only, pair)
        if request.is_adaptive:
            default = _default(pair, at_pair, target_s, request.lookup)
    plan = Plan(
        request, machine, target_only, pair, default, at_pair, even, even_length, costs, lengths, True, tuple(notes)
    )
    return replace(plan, notes=(*notes, *_warnings(plan)))


def _default(
    pair: PlannedRun, at_pair: float, target_s: Callable[[int], float], lookup: LookupRounds | None
) -> PlannedRun:
    """Return the pair as ``run`` uses it: at the best draft length (0 if drafting loses), plus known lookup rounds."""
    length, rate = (pair.draft_length, pair.tokens_per_s) if pair.tokens_per_s > at_pair else (0, at_pair)
    rate = with_lookup(rate, target_s, lookup) if lookup else rate
    return replace(pair, tokens_per_s=rate, draft_length=length)


def _layers_between(request: PlanRequest, machine: PlanMachine, target_only: PlannedRun, pair: PlannedRun) -> int:
    """Return how many target layers the draft displaces from GPUs, from weight bytes if ``n_cpu_ffn`` differs."""
    header = request.target.header
    if target_only.target.n_cpu_ffn == pair.target.n_cpu_ffn:
        return max(0, target_only.target.offloaded(header.blocks) - pair.target.offloaded(header.blocks))
    without, with_draft = (
        sum(option.target_bytes[card.name].weights for card in machine.cards) for option in (target_only, pair)
    )
    return max(0, round((without - with_draft) / (header.weight_bytes() / header.layers)))


def _warnings(plan: Plan) -> Iterator[str]:
    request, machine = plan.request, plan.machine
    host = plan.chosen.used(HOST).total + machine.mmproj_bytes
    if host > machine.memory_bytes:
        yield (
            f"{host / 2**30:.1f} GiB are needed in RAM, but only {machine.memory_bytes / 2**30:.1f} GiB "
            "are free: the rest is read from disk for every token"
        )
    if machine.memory_bytes == ENOUGH_BYTES and host_bytes(
        request.target.header, plan.chosen.target, machine.card_names
    ):
        yield f"also needs {host / 2**30:.1f} GiB of system RAM (--ram SIZE plans with less)"
    if machine.speed.disturbed and plan.rests_on_host:
        yield (
            f"this machine was measured while {machine.speed.disturbed}: "
            "measure it again with ggufspec plan --calibrate when it is idle"
        )
    for role, subject in (("target", request.target), ("draft", request.draft)):
        if subject is None:
            continue
        header = subject.header
        if note := beyond_training(role, header.name, header.context_length, subject.context.ctx_size):
            yield note


def _at_length(
    length: int, target_s: Callable[[int], float], draft_s: float, acceptance: float, rival_tokens_per_s: float
) -> DraftLengthRow:
    even = break_even_acceptance(target_s, draft_s, rival_tokens_per_s, most=length, least=length)
    return DraftLengthRow(
        draft_length=length,
        tokens_per_s=best_length(target_s, draft_s, acceptance, most=length, least=length).tokens_per_s,
        accepted_share=accepted_share(acceptance, length),
        break_even_accepted_share=None if even is None else accepted_share(even, length),
        break_even_acceptance=even,
    )
