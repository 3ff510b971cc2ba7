"""Conversion of a plan to its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import HOST, DeviceBytes
from ggufspec.planning.plan import ENOUGH_BYTES, ModelRequest, Plan, PlannedRun
from ggufspec.planning.verdict import assumptions, why
from ggufspec.schema.plan import ContextRow, PlanDocument, PlannedDevice, PlannedModel, PlannedOption, SweepRow


def plan_document(
    plan: Plan,
    pair: dict[str, object],
    sources: dict[str, str],
    sweep: Sequence[SweepRow] = (),
    contexts: Sequence[ContextRow] = (),
    commands: Sequence[str] = (),
) -> PlanDocument:
    """Return a plan as ``ggufspec/plan@1``; ``sources``: origin of each setting; ``commands``: commands to try next."""
    chosen = _option(plan, plan.chosen)
    request = plan.request
    return PlanDocument(
        pair=pair,
        devices=tuple(_devices(plan)),
        target=chosen.target,
        draft=chosen.draft,
        options={
            "target_only": _option(plan, plan.target_only),
            "speculative": _option(plan, plan.pair) if plan.pair else None,
            "default": _option(plan, plan.default) if plan.default else None,
        },
        predicted={
            "target_only_tokens_per_s": plan.target_only.tokens_per_s,
            "speculative_tokens_per_s": plan.pair.tokens_per_s if plan.pair else None,
            "default_tokens_per_s": plan.default.tokens_per_s if plan.default else None,
            "target_only_at_pair_tokens_per_s": plan.at_pair if plan.pair else None,
            "accepted_share": plan.accepted_share,
            "break_even_accepted_share": plan.break_even_share,
            "break_even_acceptance": plan.break_even_acceptance,
            "acceptance": request.acceptance if request.draft else None,
            "depth": request.target.usual_depth,
        },
        choice=plan.choice,
        why=why(plan),
        next=next(iter(commands), ""),
        also=tuple(commands[1:]),
        assumptions=assumptions(plan),
        tuned=None if plan.tuned is None else plan.tuned.model_dump(),
        settings=asdict(plan.chosen.context) | sources | {"draft_max": plan.chosen.draft_max or request.draft_max},
        draft_costs_layers=plan.draft_costs_layers,
        confirmed=plan.confirmed,
        speed=plan.machine.speed.origin,
        guessed=plan.is_guessed,
        notes=plan.notes,
        sweep=tuple(sweep),
        contexts=tuple(contexts),
        draft_lengths=plan.draft_lengths,
    )


def _devices(plan: Plan) -> list[PlannedDevice]:
    machine, chosen = plan.machine, plan.chosen
    rows = [
        PlannedDevice(
            name=card.name,
            description=card.description + (", the host's memory" if card.pool_bytes is not None else ""),
            total_bytes=card.total_bytes,
            free_bytes=card.free_bytes,
            budget_bytes=machine.budget_bytes(card),
            used_bytes=chosen.used(card.name).total + card.overhead_bytes + card.mmproj_bytes,
            overhead_bytes=card.overhead_bytes,
            mmproj_bytes=card.mmproj_bytes,
        )
        for card in machine.cards
    ]
    used = chosen.used(HOST).total + machine.mmproj_bytes
    free, whose = machine.memory_bytes, "memory next to the cards" if machine.simulated else "memory of this machine"
    if free == ENOUGH_BYTES:
        free, whose = used, f"{whose}, as much as is needed"
    return [*rows, PlannedDevice(HOST, whose, free, free, free, used, 0, machine.mmproj_bytes)]


def _option(plan: Plan, option: PlannedRun) -> PlannedOption:
    request = plan.request
    draft = None
    if option.draft is not None and request.draft is not None:
        draft = _model(request.draft, option.draft, request.draft.context, option.draft_bytes)
    target = _model(request.target, option.target, option.context, option.target_bytes)
    return PlannedOption(target, draft, option.tokens_per_s, option.draft_length)


def _model(
    subject: ModelRequest, placement: Placement, context: ContextOptions, by_device: dict[str, DeviceBytes]
) -> PlannedModel:
    at = asdict(placement)
    return PlannedModel(
        **{name: at[name] for name in PlannedModel.__dataclass_fields__.keys() & at.keys() - {"gpu_layers"}},
        file=subject.header.name,
        gpu_layers=placement.offloaded(subject.header.blocks),
        layers=subject.header.blocks,
        cache_type_k=context.cache_type_k,
        cache_type_v=context.cache_type_v,
        op_offload=context.op_offload,
        op_offload_min_batch=context.op_offload_min_batch,
        bytes={name: asdict(used) for name, used in by_device.items()},
    )
