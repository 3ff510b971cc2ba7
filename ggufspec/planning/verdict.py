"""Explanation of a plan in sentences: what fits, what is assumed, and whether to use the draft. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggufspec.planning.catalogue import UNKNOWN
from ggufspec.planning.memory import HOST
from ggufspec.planning.plan import Plan, PlanMachine
from ggufspec.planning.speed import host_bytes
from ggufspec.schema.text import counted, memory_of, number

_CLEAR = 1.1  # speedup over target-only below which a draft with assumed acceptance should be measured first


def why(plan: Plan) -> str:
    """Return the whole explanation of a plan."""
    return " ".join([_fit(plan), *(f"{one}." for one in _unknown(plan)), *_advice(plan)])


def assumptions(plan: Plan) -> tuple[str, ...]:
    """Return the assumptions behind the predicted speeds, for values that were neither measured nor given."""
    found = [*_unknown(plan)]
    if plan.is_guessed:
        found.append("The speeds of the CPU and its memory are guesses")
    if plan.accepted_share is not None and _is_acceptance_assumed(plan):
        found.append(f"Acceptance rate: {plan.accepted_share:.0%}, {plan.request.acceptance_from}")
    return tuple(found)


def _is_acceptance_assumed(plan: Plan) -> bool:
    return plan.request.acceptance_from.startswith(("assumed", "mostly"))


def _fit(plan: Plan) -> str:
    machine, header, run = plan.machine, plan.request.target.header, plan.chosen
    host = run.used(HOST).total + machine.mmproj_bytes
    needed = memory_of(host, machine.memory_bytes)
    if not machine.cards:
        if host > machine.memory_bytes:
            return f"No GPU found. Does not fit into memory: {needed} needed."
        return f"No GPU found. Fits into memory, all on the CPU: {needed}."
    used = sum(run.used(one.name).total + one.overhead_bytes + one.mmproj_bytes for one in machine.cards)
    count, gpu = run.target.offloaded(header.blocks), "GPU" if len(machine.cards) == 1 else "GPUs"
    on_card = f"{count}/{header.layers} layers on the {gpu}"
    for what, blocks in (("experts", run.target.n_cpu_moe), ("feed-forward weights", run.target.n_cpu_ffn)):
        on_card += f" without the {what} of {counted(blocks, 'block')}" if blocks else ""
    on_card += f", {memory_of(used, sum(one.free_bytes for one in machine.cards))}"
    if not host_bytes(header, run.target, machine.card_names):
        return f"Fits whole: {on_card}."
    if host > machine.memory_bytes:
        return f"Does not fit: {on_card}, and the rest needs {needed} of free memory."
    return f"Fits in part: {on_card}; the rest is in RAM."


def _unknown(plan: Plan) -> list[str]:
    return [] if plan.request.target.rehearsed else unknown_cards(plan.machine)


def unknown_cards(machine: PlanMachine) -> list[str]:
    """Return the assumptions about GPUs that are not in the catalogue."""
    unknown = [card.description for card in machine.cards if machine.speed.device(card.name).source == "unknown"]
    taken = f"assuming {UNKNOWN.bandwidth_bytes_per_s / 1e9:.0f} GB/s"
    if machine.simulated:
        return [f"GPU unknown, {taken}: name it with --gpu"] if unknown else []
    return [f"{', '.join(unknown)} is not in the catalogue ({taken}): bench measures it"] if unknown else []


def _advice(plan: Plan) -> Iterator[str]:
    request, target_only = plan.request, plan.target_only.tokens_per_s
    expected = "guessed" if plan.is_guessed or _unknown(plan) else "predicted"
    if plan.tuned:
        more = f", {plan.tuned.gain:.2f}× what was planned then" if plan.tuned.gain else ""
        yield f"Tuned here on {plan.tuned.date}: {number(plan.tuned.tokens_per_s)} tokens/s{more}, measured."
    elif request.draft is None:
        yield f"Without a draft: {expected} {number(target_only)} tokens/s."
    elif plan.pair is None:
        yield f"The draft does not fit next to the target. Without it: {expected} {number(target_only)} tokens/s."
    else:
        is_assumed, run = _is_acceptance_assumed(plan), plan.pair
        if plan.choice == "speculative":
            run, even, pays = plan.default or plan.pair, plan.break_even_share, "pays"
            unclear = run.tokens_per_s < _CLEAR * target_only and is_assumed
            advice = f"{'Measure' if unclear else 'Use'} the draft: {expected}"
            rate = f"{plan.accepted_share:.0%} accepted at draft length {plan.judged_length}"
        else:  # state acceptance per token, because the share at a losing length says nothing about other lengths
            even, pays = plan.break_even_acceptance if plan.judged_length else None, "would pay"
            advice = "Leave the draft out" + ", or measure it" * (is_assumed and even is not None)
            advice += f": drafting is {expected} to be"
            rate = f"a {request.acceptance:.0%} chance of acceptance per token"
        speeds = f"{number(run.tokens_per_s)} against {number(target_only)} tokens/s without it"
        pays = "no usual rate would make it pay" if even is None else f"it {pays} above {even:.0%}"
        gain = f"{run.tokens_per_s / target_only:.2f}× ({speeds})"
        yield f"{advice} {gain}, with {rate} ({request.acceptance_from}; {pays})."
        yield from _reasons(plan)


def _reasons(plan: Plan) -> Iterator[str]:
    assert plan.pair is not None
    if plan.draft_costs_layers:
        yield f"The draft costs {counted(plan.draft_costs_layers, 'target layer')}."
    if plan.default and plan.choice != "speculative" and plan.default.tokens_per_s != plan.pair.tokens_per_s:
        gain, drafts = plan.default.tokens_per_s / plan.target_only.tokens_per_s, "would not draft"
        if plan.default.tokens_per_s > max(plan.at_pair, plan.pair.tokens_per_s):
            drafts = "would draft with the n-gram lookup"
        yield f"The default {drafts}: {gain:.2f}×."
    if plan.request.target.header.experts and plan.choice != "speculative":
        target, tokens = replace(plan.request.target, context=plan.pair.context), plan.pair.draft_length + 1
        one_s, batch_s = (target.pass_s(plan.machine, plan.pair.target, count) for count in (1, tokens))
        cost = f"verifying {tokens} costs as much as {batch_s / one_s:.1f} single tokens"
        yield f"Each token in a batch uses different experts: {cost}."
