"""The draft-and-verify loop. It knows no files, no clock but the one passed in, and no target: it is sent logits.

The prompt's own batch gives the first token. Each later round drafts a chain of tokens, verifies them in one target
batch, accepts the prefix that the rule allows and adds one token of the target's own. Without a drafter every round is
one target token: target-only is the same loop.

An answer is a generator: it yields the batches to decode, is sent their rows, and yields its rounds (:func:`read`,
:func:`rounds`). Its driver (:func:`drive`) owns the target and may drive several answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

from ggufspec.decoding.drafters.base import Drafter
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.base import Outcome, Policy
from ggufspec.decoding.rules.base import DraftToken, Rule
from ggufspec.llamacpp.model import Context, Logits
from ggufspec.schema.rounds import Reading

Clock = Callable[[], float]
Width = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification, or the first token (batch size 0), which has neither."""

    drafted: tuple[int, ...]  # tokens that were verified
    drafters: tuple[str, ...]  # name of the drafter of each
    accepted: int
    emitted: tuple[int, ...]  # the accepted tokens and the target's own, cut after a token that ends the text
    width: int  # target batch size, padding included
    draft_s: float  # seconds of drafting and of drafters catching up
    verify_s: float  # seconds of the target's decode
    total_s: float
    dead_end: bool = False  # the grammar permits no further token
    readings: tuple[Reading, ...] = ()  # catch-up of drafters with a model

    def source(self, index: int) -> str:
        """Return who wrote an emitted token: a drafter's name, or for the target ``bonus`` after a fully accepted draft
        and ``target`` otherwise.
        """
        if index < self.accepted:
            return self.drafters[index]
        return "bonus" if self.drafted and self.accepted == len(self.drafted) else "target"


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens for the target to decode after its text; the logits of the last ``outputs`` of them are needed."""

    tokens: Sequence[int]
    outputs: int
    width: int = 0  # batch size to pad to, if the target can


Rounds = Generator[Batch | Round, Logits, None]


def drive(target: Context, steps: Rounds) -> Generator[Round]:
    """Run one answer on a target that serves no other; after each round rewind its cache to the accepted tokens."""
    length, rows = target.length, None
    while True:
        try:
            step = next(steps) if rows is None else steps.send(rows)
        except StopIteration:
            return
        if isinstance(step, Batch):
            rows = target.decode(step.tokens, outputs=step.outputs, width=step.width)
        else:
            length, rows = length + len(step.emitted), None
            target.rewind(length - 1)
            yield step


def prefill(
    target: Context, steps: Generator[Batch, Logits, Logits], goes_on: Callable[[], bool] = lambda: True
) -> Logits | None:
    """Run :func:`read` on a target that serves no other answer; None if ``goes_on`` is False between two batches."""
    rows: Logits | None = None
    while True:
        try:
            batch = next(steps) if rows is None else steps.send(rows)
        except StopIteration as end:
            return cast(Logits, end.value)
        if rows is not None and not goes_on():
            return None
        rows = target.decode(batch.tokens, outputs=batch.outputs, width=batch.width)


def read(
    prompt: Sequence[int],
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    *,
    batch: int,
    cached: int = 0,
    draft_cached: int = 0,
    apart: int = 0,
) -> Generator[Batch, Logits, Logits]:
    """Decode ``prompt`` and return the logits (1, vocab) after it, from which the first token is chosen.

    Drafters read the prompt later, if the policy finds that worth the time. With a policy, they are evaluated on the
    prompt's last positions against the target's likeliest tokens there. The target's cache has ``cached`` < n of the
    prompt's (n,) tokens, the drafters' have ``draft_cached``; the target decodes ``batch`` tokens at once. If ``apart``
    is not 0, the last token is decoded in its own batch of this size, as strict mode does with every token whose logits
    count.
    """
    new = prompt[cached:]
    choices: list[int] = []
    for part, width in ((new[:-1], 0), (new[-1:], apart)) if apart else ((new, 0),):
        for first in range(0, len(part), batch):
            tokens, is_last = part[first : first + batch], first + batch >= len(part)
            outputs = (min(ROWS, len(tokens)) if policy is not None else 1) if is_last else 0
            rows = yield Batch(tokens, outputs, width)
            choices += [int(row.argmax()) for row in rows] if policy is not None else []
    for drafter in drafters:
        seen = drafter.begin(prompt, choices[:-1], draft_cached)  # the last choice is for the first token's position
        if policy is not None:
            policy.shadow_evaluated(drafter.name, seen)
    return rows[-1:]


def rounds(
    prompt: Sequence[int],
    rows: Logits,
    rule: Rule,
    *,
    capacity: int,
    max_tokens: int,
    is_end: Callable[[int], bool],
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    draft_max: int = 0,
    width: Width = lambda count: count,
    clock: Clock,
    observe: Callable[[Logits], None] | None = None,
) -> Rounds:
    """Yield the first token, then rounds until ``max_tokens`` are emitted, a token ends the text, or the context is
    full.

    The target has read the ``prompt`` (n,), and ``rows`` (1, vocab) are the logits after it (:func:`read`). Its context
    holds ``capacity`` tokens. Without a policy every draft has ``draft_max`` tokens. ``width`` returns the padded size
    of a batch. ``observe`` is called with the target's rows (drafted + 1, vocab) before they are judged, valid only
    meanwhile.
    """
    policy = policy or Policy()
    tokens, chain = list(prompt), list[tuple[str, DraftToken]]()
    last = min(len(prompt) + max_tokens, capacity + 1)
    rule.begin(prompt)
    batch_width, learning_s = 0, 0.0
    cooldown, idle = 0, list[tuple[float, float]]()  # rounds left without a decision; (verify, total) seconds of each
    while len(tokens) < last:
        reading_s, readings, began = 0.0, tuple[Reading, ...](), clock()
        verify_began = verify_ended = began
        if len(tokens) > len(prompt):  # the prompt's batch already has the first token's row
            limit, chain = min(draft_max, last - len(tokens) - 1), []
            if drafters and not cooldown:
                policy.begin(limit, last - len(tokens), may_trim=rule.may_trim)
                reading_s, readings = catch_up(tokens, drafters, policy, rule, clock)
                began += reading_s
                chain = draft(tokens, limit, drafters, policy, rule, is_end, clock)
            batch_width = width(1 + len(chain))
            if drafters and not chain and not cooldown:
                batch_width = policy.undrafted_width(batch_width)
            unverified = (tokens[-1], *(token.token for _, token in chain))
            verify_began = clock()
            rows = yield Batch(unverified, len(unverified), batch_width)
            verify_ended = clock()
        if observe is not None:
            observe(rows)
        drafted = tuple(token.token for _, token in chain)
        result = rule.verify(rows, [token for _, token in chain], len(tokens))
        emitted = result.emitted(drafted)
        end = next((i for i, token in enumerate(emitted) if is_end(token)), None)
        emitted = emitted if end is None else emitted[: end + 1]
        tokens.extend(emitted)
        is_last = end is not None or result.token is None or len(tokens) >= last
        verify_s, ended = verify_ended - verify_began, clock()
        if cooldown:
            idle.append((verify_s, ended - began))
            cooldown -= 1
        if not cooldown or is_last:
            for drafter in drafters:
                drafter.commit(len(tokens) - 1)
            if idle:
                policy.observe_cooldown(batch_width, idle)
                idle.clear()
            elif drafters and batch_width:
                ended = clock()
                policy.observe_round(
                    Outcome(batch_width, result.accepted, len(emitted), verify_s, ended - began, learning_s)
                )
                cooldown = policy.cooldown
                learning_s = clock() - ended
        yield Round(
            drafted,
            tuple(name for name, _ in chain),
            result.accepted,
            emitted,
            batch_width,
            reading_s + verify_began - began + clock() - ended,
            verify_s,
            reading_s + clock() - began,
            result.token is None,
            readings,
        )
        if end is not None or result.token is None:
            return


def draft(
    tokens: Sequence[int],
    limit: int,
    drafters: Sequence[Drafter],
    policy: Policy,
    rule: Rule,
    is_end: Callable[[int], bool],
    clock: Clock,
) -> list[tuple[str, DraftToken]]:
    """Return the chain to verify as (drafter name, token) pairs."""
    by_name = {drafter.name: drafter for drafter in drafters}
    text = list(tokens)
    chain: list[tuple[str, DraftToken]] = []
    while len(chain) < limit and by_name:
        rule.follow(text)
        pending = {name: drafter.pending(len(text)) for name, drafter in by_name.items()}
        free = {
            name: candidate
            for name, drafter in by_name.items()
            if not pending[name] and (candidate := drafter.propose(text, rule)) is not None
        }
        confidences = {name: candidate.confidence for name, candidate in free.items()}
        name = policy.choose(confidences, {name: unread for name, unread in pending.items() if unread})
        if name is None:
            break
        candidate = free.get(name)
        if candidate is None:
            began = clock()
            candidate = by_name[name].propose(text, rule)
            if candidate is None:  # the drafter has given up
                del by_name[name]
                continue
            policy.proposed(name, pending[name], clock() - began)
        if not policy.extend(name, candidate.confidence):
            break
        token = candidate.draw()
        if not rule.permits(token.token, len(text)):
            break
        chain.append((name, token))
        text.append(token.token)
        if is_end(token.token):
            break
    return chain[: policy.verify_count()]


def catch_up(
    tokens: Sequence[int], drafters: Sequence[Drafter], policy: Policy, rule: Rule, clock: Clock
) -> tuple[float, tuple[Reading, ...]]:
    """Let drafters read text that they did not draft, if that is worth it, and evaluate what they would have drafted.

    A draft model with a stale latency is timed first if the policy asks for it.

    Returns:
        seconds of reading, which are reported to the policy, and how many tokens each drafter read.
    """
    reading_s, readings = 0.0, list[Reading]()
    for drafter in drafters:
        pending = drafter.pending(len(tokens))
        if pending and (why := policy.probe(drafter.name, pending)):
            began = clock()
            policy.probed(drafter.name, drafter.time_token(tokens, clock))
            reading_s += (spent := clock() - began)
            readings.append(Reading(drafter.name, 0, spent, policy.hoped.get(drafter.name, 0.0), why))
        count = policy.catch_up_count(drafter.name, pending) if pending else 0
        if count or not pending:
            began = clock()
            seen = drafter.catch_up(tokens, rule, count)
            spent = clock() - began if count else 0.0
            policy.shadow_evaluated(drafter.name, seen, spent)
            if count:
                reading_s += spent
                readings.append(Reading(drafter.name, count, spent, policy.hoped.get(drafter.name, 0.0)))
    return reading_s, tuple(readings)
