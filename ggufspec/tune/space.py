"""Settings that tuning chooses from, with predicted speed and memory. Pure.

Settings that cannot win are left out: those with fewer layers on the GPU than fit (except a few, which show how fast
the GPU is relative to the CPU), and those with a smaller micro-batch although the usual one fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, Placement, offloaded
from ggufspec.planning.memory import HOST, ByDevice, DryRun, MemoryEstimates, total
from ggufspec.planning.plan import ModelRequest, OffloadDevice, Plan, PlanMachine, PlanRequest
from ggufspec.planning.search import may_stream, offload_min_batch, partly_on_host, with_load_options
from ggufspec.planning.speed import cost, expected_tokens
from ggufspec.schema.text import counted
from ggufspec.schema.tune import TunedSetting
from ggufspec.settings.registry import drafters_label, drafts_with_corpus, drafts_with_file, parse_drafters

DEFAULT_MICRO_BATCH = 512
_FIXED = (1, 2, 3, 4, 6, 8)
_LONGEST = max(_FIXED)
_OVER = 1.1  # settings are tried up to this share of a GPU's memory, because estimates may be too high
_EDGE = 1.03
_NEAR_EDGE = 6  # number of placements just below the largest that may fit, all of which are searched
_STEPS = 8
_FEWER_THREADS_COST = 0.5  # exponent of cores ÷ threads in the CPU's time
_KINDS = ((True, False), (False, True), (True, True))  # (drafts with the model file, drafts with the n-gram lookup)
_LOOKUP_ACCEPTANCE = 0.3  # assumed acceptance rate of n-gram lookup
_BOTH_GAIN = 1.03  # assumed ratio of acceptance rates: draft with lookup ÷ draft only

# Standard deviations of log(true ÷ predicted): for a part's time and the acceptance, and for everything else. Finer
# distinctions and correlations between errors did not lead to faster settings.
_PART, _OTHER = 0.35, 0.12


@dataclass(frozen=True, slots=True)
class TuneCandidate:
    """Setting with its prediction."""

    setting: TunedSetting
    options: DecoderOptions  # the setting as decoder options, with splits over several GPUs
    predicted: float  # tokens/s that the planner's model predicts
    features: tuple[float, ...]  # standard deviation of log(true ÷ predicted) by possible error
    memory: tuple[float, ...]  # share of each GPU's free memory; without GPUs, only for ranking, as RAM may be exceeded
    offloaded: float  # share of the target's layers on GPUs


@dataclass(frozen=True, slots=True)
class FreeValues:
    """Values that tuning may choose from; only one if the user fixed the option. Placements come from the plan."""

    threads: tuple[int, ...]
    drafters: tuple[str, ...]
    policies: tuple[tuple[str, int], ...]  # (draft policy, maximum draft length)
    flash_attn: tuple[str, ...] = ("auto", "off")
    kv_types: tuple[tuple[str, str], ...] = (("f16", "f16"),)  # (cache_type_k, cache_type_v)
    ubatch_sizes: tuple[int, ...] = (DEFAULT_MICRO_BATCH, 256, 128)
    within_budget: bool = False  # True to stay in the memory budget; False to search up to the GPUs' limits


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts to try: all cores, three quarters, half. Fewer threads often reach full bandwidth."""
    return tuple(sorted({max(1, cores // 2), max(1, round(0.75 * cores)), cores}, reverse=True))


def policies(draft_max: int) -> tuple[tuple[str, int], ...]:
    """Return the adaptive policy with up to ``draft_max`` tokens, and fixed draft lengths up to that."""
    return (("adaptive", draft_max), *(("fixed", length) for length in _FIXED if length <= draft_max))


def difference(old: TunedSetting, new: TunedSetting) -> tuple[str, ...]:
    """Describe the changes from ``old`` to ``new`` in words."""
    changes = []
    if old.drafted and not new.drafted:
        changes.append("no draft")
    elif new.drafted and new.drafter != old.drafter:
        only = "" if len(parse_drafters(new.drafter)) > 1 else "only the "
        changes.append(only + drafters_label(new.drafter))
    if new.gpu_layers != old.gpu_layers:
        changes.append(f"{new.gpu_layers} target layers")
    if drafts_with_file(new.drafter) and new.gpu_layers_draft != old.gpu_layers_draft:
        changes.append(f"{new.gpu_layers_draft} draft layers")
    if new.n_cpu_moe != old.n_cpu_moe:
        changes.append(f"experts of {new.n_cpu_moe} blocks on the CPU")
    if new.n_cpu_ffn != old.n_cpu_ffn:
        changes.append(f"feed-forwards of {new.n_cpu_ffn} blocks on the CPU")
    if new.op_offload_min_batch != old.op_offload_min_batch:
        changes.append(f"GPU copies of CPU weights for batches ≥ {new.op_offload_min_batch}")
    if new.drafted and (not old.drafted or (new.draft_policy, new.draft_max) != (old.draft_policy, old.draft_max)):
        changes.append(drafts(new))
    if (new.cache_type_k, new.cache_type_v) != (old.cache_type_k, old.cache_type_v):
        changes.append(f"{new.cache_type_k} cache")
    if new.flash_attn != old.flash_attn:
        changes.append(f"flash attention {new.flash_attn}")
    if new.threads != old.threads:
        changes.append(counted(new.threads, "thread"))
    if new.ubatch_size != old.ubatch_size:
        changes.append(f"micro-batch {new.ubatch_size}")
    return tuple(changes)


def drafts(setting: TunedSetting) -> str:
    """Describe a setting's draft length in words."""
    return f"adaptive, ≤ {setting.draft_max}" if setting.draft_policy == "adaptive" else f"always {setting.draft_max}"


def tune_candidates(plan: Plan, options: DecoderOptions, free: FreeValues, dry_run: DryRun) -> list[TuneCandidate]:
    """Return every setting to choose from: ``free`` values around a plan, other options as in ``options``."""
    memory = MemoryEstimates(plan.machine.card_names, dry_run)
    return list(_Space(plan.request, plan.machine, options, free, _split(plan), memory).all())


def nearest_setting(space: Sequence[TuneCandidate], options: DecoderOptions, *, drafted: bool) -> int | None:
    """Return the index of the setting most like ``options``, with or without drafts; None if no setting matches."""
    cores = options.threads

    def far(index: int) -> tuple[float, ...]:
        setting = space[index].setting
        return (
            abs(setting.n_cpu_moe - options.target.n_cpu_moe),
            abs(setting.n_cpu_ffn - options.target.n_cpu_ffn),
            setting.op_offload_min_batch != options.op_offload_min_batch,
            abs(setting.gpu_layers - options.target.gpu_layers),
            setting.drafter != options.drafter,
            abs(setting.gpu_layers_draft - options.draft.gpu_layers) if drafted else 0,
            (setting.draft_policy, setting.draft_max) != (options.draft_policy, options.draft_max),
            (setting.cache_type_k, setting.cache_type_v) != (options.cache_type_k, options.cache_type_v),
            setting.flash_attn != options.flash_attn,
            abs(setting.threads - cores) if cores else -setting.threads,
            -setting.ubatch_size,
        )

    return min((i for i, one in enumerate(space) if one.setting.drafted is drafted), key=far, default=None)


def _split(plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
    option = plan.pair or plan.target_only
    return plan.target_only.target.split or option.target.split, option.draft.split if option.draft else ()


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds that a forward pass takes, by part."""

    host: float = 0.0
    card: float = 0.0
    copies: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.host + self.card + self.copies + self.fixed

    def times(self, factor: float, host: float = 1.0) -> _Time:
        return _Time(self.host * factor * host, self.card * factor, self.copies * factor, self.fixed * factor)


@dataclass
class _Space:
    request: PlanRequest
    machine: PlanMachine
    options: DecoderOptions
    free: FreeValues
    splits: tuple[tuple[float, ...], tuple[float, ...]]
    memory: MemoryEstimates

    def __post_init__(self) -> None:
        self._times: dict[object, _Time] = {}
        self._bytes: dict[object, tuple[float, ...]] = {}

    @cached_property
    def cores(self) -> int:
        return max(self.free.threads)

    def all(self) -> Iterator[TuneCandidate]:
        shown = Placement.__dataclass_fields__.keys() & TunedSetting.__dataclass_fields__.keys()
        for drafter in self.free.drafters:
            drafted = drafter != "none"
            policies = self.free.policies if drafted else self.free.policies[:1]
            for kv, flash in itertools.product(self.free.kv_types, self.free.flash_attn):
                if flash == "off" and kv[1] != "f16":
                    continue  # llama.cpp rejects this combination
                for draft_layers in self._draft_layers() if drafts_with_file(drafter) else [0]:
                    for at, micro in self._placements(drafter, draft_layers, kv, flash):
                        memory = self._bytes[drafter, draft_layers, at, kv, flash, micro]
                        placed = self._loaded(drafter, at, draft_layers)
                        target = {name: getattr(placed[0], name) for name in shown}
                        free = self._computed_by(placed[0], flash, drafted=drafted)
                        for (streamed_from, threads), (policy, longest) in itertools.product(free, policies):
                            setting = TunedSetting(
                                **target,
                                gpu_layers_draft=draft_layers,
                                drafted=drafted,
                                drafter=drafter,
                                draft_policy=policy,
                                draft_max=longest,
                                cache_type_k=kv[0],
                                cache_type_v=kv[1],
                                flash_attn=flash,
                                threads=threads,
                                ubatch_size=micro,
                                op_offload_min_batch=streamed_from,
                            )
                            yield self._candidate(setting, *placed, memory)

    # ---- placements

    def _draft_layers(self) -> list[int]:
        assert self.request.draft is not None
        if self.request.draft.in_target:  # the draft's layers are the target's last layers
            return [0]
        layers = self.request.draft.header.layers
        if "gpu_layers" not in self.request.draft.free:
            return [offloaded(self.request.draft.placement.gpu_layers, layers)]
        return list(dict.fromkeys((0, layers // 2, layers))) if self.machine.cards else [0]

    def _placements(
        self, drafter: str, draft_layers: int, kv: tuple[str, str], flash: str
    ) -> Iterator[tuple[Placement, int]]:
        """Yield (target placement, micro-batch)."""
        layers, dense = self._families
        found = [*self._near_the_edge(layers, drafter, draft_layers, kv, flash, _STEPS)]
        yield from found
        if dense and (layers[-1], self.free.ubatch_sizes[0]) not in found:
            yield from self._near_the_edge(dense, drafter, draft_layers, kv, flash, 0)

    @cached_property
    def _families(self) -> tuple[list[Placement], list[Placement]]:
        """Two lists of target placements by GPU memory: varied by layers and experts, and by feed-forward weights."""
        target = self.request.target
        layers, wanted = target.header.layers, replace(target.placement, split=self.splits[0])
        if not self.machine.cards:
            return [replace(wanted, gpu_layers=0)], []
        counts: Sequence[int] = range(layers + 1)
        if "gpu_layers" not in target.free:
            counts = [offloaded(wanted.gpu_layers, layers)]
        *fewer, most = (replace(wanted, gpu_layers=count) for count in counts)
        kept = partly_on_host(target, most)[::-1] if most.gpu_layers == layers else []
        return ([*fewer, *kept, most], []) if target.header.experts else ([*fewer, most], kept)

    def _near_the_edge(
        self, placed: Sequence[Placement], drafter: str, draft_layers: int, kv: tuple[str, str], flash: str, steps: int
    ) -> Iterator[tuple[Placement, int]]:
        """Yield placements that may fit and ``steps`` smaller ones, with a smaller micro-batch if only that fits."""
        usual = self.free.ubatch_sizes[0]

        def uses(some: Sequence[Placement], micro: int) -> list[float]:
            self._fill(drafter, draft_layers, some, kv, flash, micro)
            return [max(self._bytes[drafter, draft_layers, at, kv, flash, micro]) for at in some]

        fitting, possible = self._edges
        used = uses(placed, usual)
        # index of the largest placement that may fit with the usual micro-batch
        edge = max((index for index, share in enumerate(used) if share <= fitting), default=-1)
        smaller = [(micro, uses(placed[edge + 1 :], micro)) for micro in self.free.ubatch_sizes[1:]]
        coarse = max(1, math.ceil(len(placed) / max(steps, 1)))
        for index, at in enumerate(placed):
            near = edge - _NEAR_EDGE <= index or (steps and index % coarse == 0)
            if near and used[index] <= possible:
                yield at, usual
            if index > edge:
                fits = (micro for micro, shares in smaller if shares[index - edge - 1] <= fitting)
                if micro := next(fits, 0):
                    yield at, micro

    def _draft_at(self, layers: int) -> Placement:
        wanted = self.request.draft.placement if self.request.draft else Placement()
        return replace(wanted, gpu_layers=layers, split=self.splits[1])

    def _loaded(self, drafter: str, at: Placement, draft_layers: int) -> tuple[Placement, Placement]:
        """Return target and draft placements with their load options."""
        draft, draft_at = self.request.draft, self._draft_at(draft_layers)
        if draft is None or not drafts_with_file(drafter):
            return with_load_options(self.machine, (self.request.target_only, at))[0], draft_at
        target, draft_at = with_load_options(self.machine, (self.request.target, at), (draft, draft_at))
        return target, draft_at

    def _computed_by(self, at: Placement, flash: str, *, drafted: bool) -> list[tuple[int, int]]:
        """Return (op_offload_min_batch, threads) pairs; threads hardly matter if a GPU computes with CPU weights."""
        found = [(self.options.op_offload_min_batch, threads) for threads in self.free.threads]
        if flash == self.free.flash_attn[0] and may_stream(self.request, at, self.machine):
            found.append((offload_min_batch(drafted=drafted), self.cores))
        return found

    # ---- memory

    def _as_options(self, s: TunedSetting, at: Placement, draft_at: Placement) -> DecoderOptions:
        return replace(
            self.options,
            target=at,
            draft=draft_at,
            op_offload_min_batch=s.op_offload_min_batch,
            threads=0 if self.options.threads == 0 and s.threads == self.cores else s.threads,
            cache_type_k=s.cache_type_k,
            cache_type_v=s.cache_type_v,
            flash_attn=s.flash_attn,
            drafters=parse_drafters(s.drafter),
            draft_policy=s.draft_policy,
            draft_max=s.draft_max,
            ubatch_size=s.ubatch_size,
            lookup_corpus=self.options.lookup_corpus if drafts_with_corpus(s.drafter) else None,
        )

    def _fill(
        self,
        drafter: str,
        draft_layers: int,
        placed: Sequence[Placement],
        kv: tuple[str, str],
        flash: str,
        micro: int,
    ) -> None:
        """Calculate the share of GPU memory that each target placement takes."""
        options = replace(
            self.options,
            cache_type_k=kv[0],
            cache_type_v=kv[1],
            flash_attn=flash,
            ubatch_size=micro,
            drafters=parse_drafters(drafter),
            draft_max=max(longest for _, longest in self.free.policies),
            lookup_corpus=None,
        )
        draft = self.request.draft if drafts_with_file(drafter) else None
        model = self.request.target if draft else self.request.target_only
        context = replace(options.context(with_draft=draft is not None), hidden=model.context.hidden)
        model = replace(model, context=context)
        requests = [model.at(at) for at in placed]
        drafts_used: list[list[ByDevice]] = [[] for _ in requests]
        if draft is not None:
            draft_at, draft = self._draft_at(draft_layers), replace(draft, context=options.draft_context())
            on = requests if draft.as_read else requests[:1]  # a draft head's memory depends on its target
            found = self.memory.estimates([draft.at(draft_at, request) for request in on])
            drafts_used = [[one] for one in (found if draft.as_read else found * len(requests))]
        used = [self.memory.resident(request) for request in requests]
        possible = [
            index
            for index, draft_used in enumerate(drafts_used)
            if max(self._shares(total([used[index], *draft_used]))) <= self._edges[1]
        ]
        estimates = self.memory.estimates([requests[index] for index in possible])
        for index, estimate in zip(possible, estimates, strict=True):
            used[index] = estimate
        for at, own, draft_used in zip(placed, used, drafts_used, strict=True):
            key = (drafter, draft_layers, at, kv, flash, micro)
            self._bytes[key] = self._shares(total([own, *draft_used]))

    def _shares(self, used: ByDevice) -> tuple[float, ...]:
        return tuple(
            (used[card.name].total + (card.overhead_bytes if used[card.name].total else 0)) / self._room(card)
            for card in self.machine.cards
        ) or (self._host_share(used[HOST].total),)

    def _host_share(self, size: int) -> float:
        return size / (size + max(self.machine.memory_bytes, 1))

    def _room(self, card: OffloadDevice) -> int:
        return max(self.machine.budget_bytes(card) if self.free.within_budget else card.free_bytes, 1)

    @property
    def _edges(self) -> tuple[float, float]:
        """Maximum shares of memory that (should fit, might fit)."""
        return (1.0, 1.0) if self.free.within_budget else (_EDGE, _OVER)

    # ---- speed

    def _pass(
        self, subject: ModelRequest, placement: Placement, kv: tuple[str, str], streamed_from: int, tokens: int
    ) -> _Time:
        """Return the time of one batch with all cores and half of the context filled."""
        key = (id(subject.as_read or subject.header), placement, kv, streamed_from, tokens)
        if key not in self._times:
            typed = replace(subject.context, cache_type_k=kv[0], cache_type_v=kv[1])
            subject = replace(subject, context=replace(typed, op_offload_min_batch=streamed_from))
            parts = cost(
                *subject.read_at(placement),
                subject.speed_on(self.machine),
                self.machine.card_names,
                tokens=tokens,
                depth=subject.context.ctx_size // 2,
                context=subject.context,
            )
            seconds = subject.pass_s(self.machine, placement, tokens)
            host = parts.devices[HOST]
            whole = _Time(host, sum(parts.devices.values()) - host, parts.copies_s, parts.fixed_s)
            self._times[key] = whole.times(seconds / whole.total)
        return self._times[key]

    def _candidate(
        self, s: TunedSetting, at: Placement, draft_at: Placement, memory: tuple[float, ...]
    ) -> TuneCandidate:
        kv, streamed_from = (s.cache_type_k, s.cache_type_v), s.op_offload_min_batch
        slower = (self.cores / s.threads) ** _FEWER_THREADS_COST
        acceptance = self._acceptance(s.drafter)
        draft_token = _Time()
        if drafts_with_file(s.drafter) and (draft := self.request.draft) is not None:
            where = at if draft.in_target else draft_at
            draft_token = self._pass(draft, where, ("f16", "f16"), streamed_from, 1).times(1.0, slower)
        if not s.drafted:
            lengths: Sequence[int] = (0,)
        elif s.draft_policy == "fixed":
            lengths = (s.draft_max,)
        else:
            lengths = range(min(s.draft_max, _LONGEST) + 1)
        best: tuple[float, int, _Time, _Time] | None = None
        for length in lengths:
            verify = self._pass(self.request.target, at, kv, streamed_from, length + 1).times(1.0, slower)
            drafting = draft_token.times(length)
            rate = expected_tokens(acceptance, length) / (verify.total + drafting.total)
            if best is None or rate > best[0]:
                best = rate, length, verify, drafting
        assert best is not None
        rate, length, verify, drafting = best
        return TuneCandidate(
            setting=s,
            options=self._as_options(s, at, draft_at),
            predicted=rate,
            features=self._features(s, verify, drafting, acceptance, length),
            memory=memory,
            offloaded=at.offloaded(self.request.target.header.blocks) / self.request.target.header.layers,
        )

    def _acceptance(self, drafter: str) -> float:
        if not drafts_with_file(drafter):
            return _LOOKUP_ACCEPTANCE
        known = self.request.acceptance
        return min(known * _BOTH_GAIN, 0.98) if drafts_with_corpus(drafter) else known

    def _features(
        self, s: TunedSetting, verify: _Time, drafting: _Time, acceptance: float, length: int
    ) -> tuple[float, ...]:
        round_s = verify.total + drafting.total
        host = (verify.host + drafting.host) / round_s
        times = (
            *(verify.host, verify.card, verify.copies + drafting.copies, verify.fixed),
            *(drafting.host, drafting.card + drafting.fixed),
        )
        tokens, nudged = (expected_tokens(rate, length) for rate in (acceptance, min(acceptance * 1.01, 1.0)))
        steep = (nudged / tokens - 1) / 0.01 if length else 0.0  # d log tokens / d log α
        mine = drafts_with_file(s.drafter), drafts_with_corpus(s.drafter)
        by_kind = [s.drafted and mine == kind for kind in _KINDS]
        fixed = s.drafted and s.draft_policy == "fixed"
        others = (
            True,
            *(host * (s.threads == count) for count in self.free.threads),
            s.drafted,
            *by_kind,
            fixed,
            *(fixed and s.draft_max == length for length in _FIXED),
            s.flash_attn == "off",
            s.cache_type_k != "f16",
            bool(s.n_cpu_moe),
            bool(s.n_cpu_ffn),
            s.op_offload_min_batch < OP_OFFLOAD_MIN_BATCH,
        )
        return (
            *(_PART * seconds / round_s for seconds in times),
            *(_PART * steep * one for one in by_kind),
            *(_OTHER * one for one in others),
        )
