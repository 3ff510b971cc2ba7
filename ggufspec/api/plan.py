"""Planning of an opened pair."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec.api.options import machine_to_plan_for, placement_of, placement_of_draft, unplaced
from ggufspec.api.pairs import OnEvent, OpenedPair
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware.host import cpu_name, physical_cores
from ggufspec.llamacpp.library import min_batch_from_environment
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH
from ggufspec.models import heads, mmproj
from ggufspec.models.header import ModelHeader
from ggufspec.models.hub.choice import quant_of
from ggufspec.models.hub.client import HubFile
from ggufspec.models.profile import TuneEvidence
from ggufspec.planning import rehearsed, search
from ggufspec.planning.describe import plan_document
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.history import accepted_here, expected_acceptance, lookup_rounds
from ggufspec.planning.memory import check_overrides, check_part, has_snapshots
from ggufspec.planning.plan import ModelRequest, Plan, PlanMachine, PlanRequest
from ggufspec.planning.quantisations import TWIN_ORIGIN, twin_acceptance
from ggufspec.schema.plan import PlanDocument
from ggufspec.schema.text import counted, of_file
from ggufspec.settings.table import DRAFT_MAX, Settings, names

# Function that measures this machine if that is due for a plan of these models; returns whether it measured
Calibrate = Callable[[PlanMachine | None, Sequence[ModelHeader], DecoderOptions, OnEvent | None], bool]

_FEWER_STATES = (3, 7)  # smaller values of draft_max to try, to save recurrent states (150 MiB each in Qwen3.5-27B)
CONTEXT_GIVEN = "given with -c"


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Plan, with the opened pair and the dry runs from which it was made."""

    plan: Plan
    opened: OpenedPair
    context_from: str
    dry_runs: DryRuns

    def described(self) -> dict[str, Any]:
        """Return the pair's file names and model shapes for JSON documents."""
        spec, draft = self.opened.spec, self.plan.request.draft
        found: dict[str, Any] = {"name": spec.name, "target": str(spec.target)}
        target_shape = _shape(self.opened.target.header)
        if draft is not None and draft.in_target:
            blocks = counted(draft.header.nextn_blocks, "MTP block")
            return found | {
                "draft": None,
                "target_shape": target_shape,
                "draft_shape": f"{blocks} of the target's file",
            }
        found |= {"draft": str(spec.draft) if spec.draft else None, "target_shape": target_shape}
        return found | ({"draft_shape": _shape(self.opened.draft.header)} if self.opened.draft else {})

    @property
    def has_contexts(self) -> bool:
        """True if no context size was given and there are others to show."""
        return self.context_from != CONTEXT_GIVEN and len(search.context_sizes(self.plan)) > 1

    def document(self, *, sweep: bool = False, contexts: bool = False) -> PlanDocument:
        """Return the document of ``plan --json``; ``contexts`` adds other context sizes unless ``-c`` is given.

        ``sweep`` adds target-only and speculative tokens/s by number of target layers, in eight steps and for the
        planned placements.
        """
        with self.dry_runs:
            rows = search.sweep_rows(self.plan, self.dry_runs) if sweep else ()
            others = (
                search.context_rows(self.plan, self.dry_runs) if contexts and self.context_from != CONTEXT_GIVEN else ()
            )
        sources = {"acceptance_from": self.plan.request.acceptance_from, "context_from": self.context_from}
        return plan_document(self.plan, self.described(), sources | self._seen(), rows, others, self._next())

    def _seen(self) -> dict[str, str]:
        """Return the drafters' acceptance in earlier runs here, and the predicted share of text from lookup rounds."""
        request, found = self.plan.request, dict[str, str]()
        if request.draft is not None:
            drafters = [request.draft.header.fingerprint, *["lookup"] * request.has_lookup]
            found["accepted_here"] = accepted_here(cache_folder(), request.target.header.fingerprint, drafters)
        if self.plan.default is not None and request.has_lookup:
            known = request.lookup
            found["lookup"] = f"{known.share:.0%} of the text here" if known else "not counted: too little seen here"
        return found

    def _next(self) -> list[str]:
        """Return the commands to try next: ``run`` if tuned or if no draft would pay off, ``bench`` if a pair fits."""
        given, plan = self.opened.given, self.plan
        words = [] if given.model or given.hf_repo else [given.pair or "demo"]
        for flag, value in (("-m", given.model), ("-hf", given.hf_repo)):
            words += [flag, value] if value else []
        target_only = ["--no-draft"] * bool(given.pair and not plan.tuned)
        run = shlex.join(["ggufspec", "run", *words, *target_only, "-p", "Hello"])
        if plan.pair is None:
            return [run]
        for flag, value in (("-md", given.model_draft), ("-hfd", given.hf_repo_draft), ("--drafter", given.drafter)):
            words += [flag, value] if value else []
        bench = shlex.join(["ggufspec", "bench", *words])
        return [run, bench] if plan.tuned or not plan.judged_length else [bench]


def _shape(header: ModelHeader) -> str:
    experts = f", {header.experts_used} of {header.experts} experts" if header.experts else ""
    blocks = counted(header.blocks, "block")
    return f"{header.name}  ({header.architecture}, {blocks}{experts}, {of_file(header.size_bytes)})"


def make_plan(
    opened: OpenedPair,
    *,
    where: PlanMachine | None = None,
    calibrate: Calibrate | None = None,
    on_event: OnEvent | None = None,
    verbose: bool = False,
) -> PlanResult:
    """Plan an opened pair for the machine ``where``, by default the machine in the pair's settings.

    ``calibrate`` measures this machine's speed if the plan needs it and it is unknown. ``verbose`` shows llama.cpp's
    log during dry runs.

    Raises:
        GgufspecError: nothing fits, or an option is out of range.
    """
    opened = replace(opened, read=opened.target)  # reads the header only once
    wanted, options, target, draft = opened.wanted, opened.options, opened.target, opened.draft
    threads = options.threads or physical_cores()
    where = where or machine_to_plan_for(wanted, threads)
    acceptance, acceptance_from = _acceptance(opened)
    check_overrides(target.header, wanted.override_tensor or (), where.card_names)
    request = replace(
        request_of(opened, acceptance),
        acceptance_from=acceptance_from,
        is_adaptive=options.draft_policy == "adaptive",
        has_lookup="lookup" in options.drafters,
        lookup=lookup_rounds(cache_folder(), target.header.fingerprint) if "lookup" in options.drafters else None,
    )
    if wanted.mmproj:
        where = with_mmproj(wanted, where, target.header, verbose=verbose)
    dry_runs = DryRuns(
        where.described, simulated=where.simulated, rpc=where.rpc, folder=cache_folder(), verbose=verbose
    )
    known = [one.header for one in (target, draft) if one]
    with dry_runs:
        search.check_fits(request, where, dry_runs)
        if calibrate is not None and calibrate(where, known, options, on_event):
            where = replace(where, speed=machine_to_plan_for(wanted, threads).speed)
        if not where.simulated:
            request, where = rehearsed.as_rehearsed(request, where, cache_folder(), threads)
        plan = search.search_plan(request, where, dry_runs)
    warnings = opened.warnings
    if dry_runs.limits:
        warnings = (*warnings, f"{dry_runs.limits}: bytes are estimates; `ggufspec doctor` says how to build one")
    notes = (*plan.notes, *warnings)
    plan = replace(plan, notes=notes, confirmed=not dry_runs.limits, tuned=_tuned(opened, where))
    context_from = "from its profile" if wanted.ctx_size else "the default"
    if opened.given.ctx_size is not None:
        context_from = CONTEXT_GIVEN
    return PlanResult(plan, opened, context_from, dry_runs)


def _tuned(opened: OpenedPair, where: PlanMachine) -> TuneEvidence | None:
    """Return ``tune``'s measurement of the profile on this machine; None if given options differ from the profile's."""
    tuned = opened.spec.tuned
    if tuned is None or where.simulated or not tuned.machine.startswith(cpu_name()):
        return None
    rows = [name for group in ("drafting", "placement", "context") for name in names(group=group)]
    given, own = opened.given.given(rows), opened.spec.settings
    return tuned if all(value == getattr(own, name) for name, value in given.items()) else None


def _acceptance(opened: OpenedPair) -> tuple[float, str]:
    """Return the expected acceptance per token, and its origin in words."""
    given, draft = opened.given.acceptance, opened.draft
    if given is not None:
        return given, f"given with --acceptance {given:.2g}"
    known = cache_folder(), opened.target.header.fingerprint, draft.header.fingerprint if draft else ""
    profile, origin = opened.spec.settings.acceptance, "from its profile"
    match opened.spec.target, opened.spec.draft:
        case HubFile(repo=repo), HubFile(repo=same, file=file) if repo == same and draft and profile is None:
            profile, origin = twin_acceptance(opened.target.header, draft.header, quant_of(file)), TWIN_ORIGIN
    return expected_acceptance(*known, profile, origin)


def with_mmproj(wanted: Settings, where: PlanMachine, target: ModelHeader, *, verbose: bool = False) -> PlanMachine:
    """Return the machine with memory reserved for ``--mmproj`` on the GPU that llama.cpp uses for it, or on the host.

    llama.cpp uses the first local GPU in ggml's order, or else an RPC worker's GPU (clip_ctx in tools/mtmd/clip.cpp).

    Raises:
        GgufspecError: the projector's file is missing, is not a projector, or belongs to another model.
    """
    assert wanted.mmproj is not None
    local = [name for name in where.card_names if not name.startswith("RPC")]
    card = "" if wanted.no_mmproj_offload else next(iter((*local, *where.card_names)), "")
    used = mmproj.measure_projector(wanted.mmproj, card, simulated=where.simulated, rpc=where.rpc, verbose=verbose)
    mmproj.check_projector(used, target)
    return where.with_mmproj(card, used.card_bytes, used.host_bytes)


def request_of(opened: OpenedPair, acceptance: float) -> PlanRequest:
    """Return the plan request for an opened pair; raise as :func:`plan_request` does."""
    target, *draft = ((one.header, one.metadata_only) for one in (opened.target, opened.draft) if one)
    return plan_request(target, draft[0] if draft else None, opened.options, acceptance, opened.wanted)


def plan_request(
    target: tuple[ModelHeader, Path],
    draft: tuple[ModelHeader, Path] | None,
    options: DecoderOptions,
    acceptance: float,
    wanted: Settings = Settings(),
) -> PlanRequest:
    """Return the request for a plan, in which a pair's baseline is target-only at its own best placement.

    Each model is a tuple (header, metadata-only GGUF file). Placements in ``options`` are ignored; ``wanted`` has the
    fixed placements, the permitted cache types, and the maximum draft length. ``acceptance`` is per token.

    Raises:
        UsageError: ``n_cpu_moe`` without experts, ``n_cpu_ffn`` without a dense feed-forward, or a small
            ``op_offload_min_batch`` with a mixture of experts.
    """
    if wanted.n_cpu_moe:
        check_part(target[0], "experts", "--n-cpu-moe")
    if wanted.n_cpu_ffn:
        check_part(target[0], "ffn", "--n-cpu-ffn")
    if target[0].experts and options.op_offload_min_batch < OP_OFFLOAD_MIN_BATCH:
        raise UsageError(
            f"{target[0].name} is a mixture of experts: even a few tokens use most of them, and copying these takes "
            f"longer than computing on the CPU, so a minimum batch of {options.op_offload_min_batch} is too small",
            f"--op-offload-min-batch {OP_OFFLOAD_MIN_BATCH}, or more",
        )
    longest = wanted.draft_max or DRAFT_MAX
    widest = replace(options, draft_max=longest)
    fixed = ModelRequest(*target, widest.context(with_draft=draft is not None), *placement_of(wanted))
    draft_request = ModelRequest(*draft, options.draft_context(), *placement_of_draft(wanted)) if draft else None
    if draft and draft_request and options.head:
        in_target, mtp = draft[1] == target[1], options.head == "mtp"
        as_read = heads.as_read(target[0], target[0] if in_target else draft[0])
        draft_request = replace(draft_request, as_read=as_read, in_target=in_target, mtp=mtp)
        fixed = replace(fixed, mtp=in_target, context=replace(fixed.context, hidden=heads.hidden_sources(draft[0])))
    without_draft = replace(widest, drafters=(), lookup_corpus=None)
    target_only = ModelRequest(*target, without_draft.context(with_draft=False), *placement_of(unplaced(wanted)))
    if wanted.n_cpu_ffn == 0:
        target_only = replace(target_only, free=target_only.free - {"n_cpu_ffn"})
    return PlanRequest(
        target=fixed,
        target_only=target_only if draft else fixed,
        draft=draft_request,
        acceptance=acceptance,
        kv_types=tuple((name, name) for name in wanted.allow_kv or ()),
        draft_max=longest,
        rewinds=_FEWER_STATES if draft and not wanted.draft_max and has_snapshots(target[0]) else (),
        may_stream=not (
            wanted.op_offload_min_batch or min_batch_from_environment() or options.strict or target[0].experts
        ),
    )
