"""A plan in sentences: what fits, what is assumed, and whether to use the draft. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggufspec.planning.catalogue import UNKNOWN
from ggufspec.planning.memory import HOST
from ggufspec.planning.plan import Machine, Plan
from ggufspec.planning.speed import host_bytes
from ggufspec.schema.text import counted, memory_of, number

_SAME = 0.995  # ratio to target-only from which on 1.00× is displayed
_CLEAR = 1.1  # ratio to target-only; below it a gain that assumes an acceptance should be measured first


def why(plan: Plan) -> str:
    """Return the whole explanation of a plan."""
    return " ".join([_fit(plan), *(f"{one}." for one in _unknown(plan)), *_advice(plan)])


def assumptions(plan: Plan) -> tuple[str, ...]:
    """Return the assumptions behind the predicted speeds: values that were neither measured nor given."""
    found = [*_unknown(plan)]
    if plan.is_guessed:
        found.append("The speed of the CPU and of its memory is guessed")
    if plan.accepted_share is not None and _is_acceptance_assumed(plan):
        found.append(f"Acceptance rate: {plan.accepted_share:.0%}, {plan.request.acceptance_from}")
    return tuple(found)


def _is_acceptance_assumed(plan: Plan) -> bool:
    return plan.request.acceptance_from.startswith(("assumed", "mostly"))


def _fit(plan: Plan) -> str:
    machine, header, run = plan.machine, plan.request.target.header, plan.chosen
    host = run.used(HOST).total + machine.mmproj_bytes
    missing = f"{memory_of(host, machine.memory_bytes)} of free memory are needed"
    if not machine.cards:
        if host > machine.memory_bytes:
            return f"Does not fit into memory: {missing}."
        return f"Fits into memory: {memory_of(host, machine.memory_bytes)}."
    used = sum(run.used(one.name).total + one.overhead_bytes + one.mmproj_bytes for one in machine.cards)
    count, gpu = run.target.offloaded(header.blocks), "GPU" if len(machine.cards) == 1 else "GPUs"
    on_card = f"{count}/{header.layers} layers on the {gpu}"
    for what, blocks in (("experts", run.target.n_cpu_moe), ("feed-forward weights", run.target.n_cpu_ffn)):
        on_card += f" without the {what} of {counted(blocks, 'block')}" if blocks else ""
    on_card += f", {memory_of(used, sum(one.free_bytes for one in machine.cards))}"
    if not host_bytes(header, run.target, machine.card_names):
        return f"Fits whole: {on_card}."
    if host > machine.memory_bytes:
        return f"Does not fit: {on_card}, and for the rest {missing}."
    return f"Fits in part: {on_card}; the rest is in RAM."


def _unknown(plan: Plan) -> list[str]:
    return [] if plan.request.target.rehearsed else unknown_cards(plan.machine)


def unknown_cards(machine: Machine) -> list[str]:
    """Return the assumptions about GPUs that are not in the catalogue."""
    unknown = [card.description for card in machine.cards if machine.speed.device(card.name).source == "unknown"]
    taken = f"taken as {UNKNOWN.bandwidth_bytes_per_s / 1e9:.0f} GB/s"
    if machine.simulated:
        return [f"GPU unknown, {taken}: name it with --gpu"] if unknown else []
    return [f"{', '.join(unknown)} is in no catalogue and {taken}: bench measures it"] if unknown else []


def _advice(plan: Plan) -> Iterator[str]:
    request, alone = plan.request, plan.target_only.tokens_per_s
    expected = "guessed" if plan.is_guessed or _unknown(plan) else "predicted"
    if plan.tuned:
        more = f", {plan.tuned.gain:.2f}× what was planned then" if plan.tuned.gain else ""
        yield f"Tuned here on {plan.tuned.date}: {number(plan.tuned.tokens_per_s)} tokens/s{more}, measured."
    elif request.draft is None:
        yield f"Without a draft: {expected} {number(alone)} tokens/s."
    elif plan.pair is None:
        yield f"The draft does not fit beside the target. Without it: {expected} {number(alone)} tokens/s."
    else:
        run = plan.default or plan.pair
        gain, rate, even = run.tokens_per_s / alone, plan.accepted_share, plan.break_even_share
        if plan.choice != "speculative":
            advice = "Leave the draft away" + ", or measure it" * (gain >= _SAME)
        else:
            advice = "Measure the draft" if gain < _CLEAR and _is_acceptance_assumed(plan) else "Use the draft"
        speeds = f"{number(run.tokens_per_s)} against {number(alone)} tokens/s without it"
        pays = f"it {'would pay' if plan.choice == 'target-only' else 'pays'} above {even or 0:.0%}"
        pays = "no usual rate would make it pay" if even is None else pays
        yield (
            f"{advice}: {expected} {gain:.2f}× ({speeds}), with "
            f"{rate:.0%} accepted at draft length {plan.judged_length or plan.pair.draft_length} "
            f"({request.acceptance_from}; {pays})."
        )
        yield from _reasons(plan)


def _reasons(plan: Plan) -> Iterator[str]:
    assert plan.pair is not None
    if plan.draft_costs_layers:
        yield f"The draft costs {counted(plan.draft_costs_layers, 'target layer')}."
    if plan.default and not plan.default.draft_length:
        yield "A run drafts only where that pays, which is hardly anywhere here."
    if plan.request.target.header.experts and plan.choice != "speculative":
        target, tokens = replace(plan.request.target, context=plan.pair.context), plan.pair.draft_length + 1
        one_s, batch_s = (target.pass_s(plan.machine, plan.pair.target, count) for count in (1, tokens))
        cost = f"verifying {tokens} costs {batch_s / one_s:.1f} of one"
        yield f"Each token of a batch runs through other experts: {cost}."
