"""Draft-and-verify loop, independent of files and of the target: the clock and the logits are passed in.

The first token comes from the prompt's own batch. Each later round drafts a chain of tokens, verifies them in one
target batch, accepts the prefix that the rule allows and adds one token that the target chooses. Without a drafter
every round yields one target token, so target-only decoding is the same loop.

:func:`decode_prompt` and :func:`rounds` are generators that yield batches to decode (:mod:`ggufspec.decoding.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from ggufspec.decoding.batch import AnswerClock, Batch, Clock, Decoded
from ggufspec.decoding.drafters.base import Drafter
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.base import DraftPolicy, RoundOutcome
from ggufspec.decoding.rules.base import AcceptanceRule, DraftToken
from ggufspec.llamacpp.model import Logits
from ggufspec.schema.rounds import DrafterReading

PaddedSize = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification, or the first token (batch size 0), which has neither."""

    drafted: tuple[int, ...]  # drafted tokens that were verified
    drafters: tuple[str, ...]  # name of each token's drafter
    accepted: int
    emitted: tuple[int, ...]  # accepted tokens and the target's own token, truncated after a token that ends the text
    batch_size: int  # target batch size, padding included
    draft_s: float  # seconds for drafting and for drafters to read unread tokens
    verify_s: float  # seconds for the target to decode the batch
    total_s: float
    dead_end: bool = False  # True if the grammar permits no further token
    readings: tuple[DrafterReading, ...] = ()  # what drafters with a model read before drafting

    def source(self, index: int) -> str:
        """Return the source of an emitted token: a drafter's name, or for the target ``bonus`` after a fully accepted
        draft and ``target`` otherwise.
        """
        if index < self.accepted:
            return self.drafters[index]
        return "bonus" if self.drafted and self.accepted == len(self.drafted) else "target"

    def until(self, count: int) -> Round:
        """Return the round as if its draft had ended with its ``count``-th emitted token, where the answer ended."""
        if count >= len(self.emitted):
            return self
        drafted, drafters = self.drafted[:count], self.drafters[:count]
        return replace(self, drafted=drafted, drafters=drafters, accepted=count, emitted=self.emitted[:count])


Rounds = Generator[Batch | Round, Decoded, None]


def decode_prompt(
    prompt: Sequence[int],
    drafters: Sequence[Drafter] = (),
    policy: DraftPolicy | None = None,
    *,
    batch: int,
    cached: int = 0,
    draft_cached: int = 0,
    apart: int = 0,
) -> Generator[Batch, Decoded, Logits]:
    """Decode ``prompt`` and return the logits (1, vocab) after it, from which the first token is chosen.

    Drafters read the prompt later, if the policy finds that worth the time. With a policy, they are evaluated on the
    prompt's last positions against the target's likeliest tokens there. The target's cache holds ``cached`` < n of
    the prompt's (n,) tokens, the drafters' caches ``draft_cached``. The target decodes up to ``batch`` tokens at once.
    If ``apart`` is not 0, the last token gets a batch of this size, as strict mode needs for all logits that count.
    """
    new = prompt[cached:]
    choices: list[int] = []
    for part, batch_size in ((new[:-1], 0), (new[-1:], apart)) if apart else ((new, 0),):
        for first in range(0, len(part), batch):
            tokens, is_last = part[first : first + batch], first + batch >= len(part)
            outputs = (min(ROWS, len(tokens)) if policy is not None else 1) if is_last else 0
            rows = (yield Batch(tokens, outputs, batch_size, is_prompt=True)).rows
            choices += [int(row.argmax()) for row in rows] if policy is not None else []
    for drafter in drafters:
        seen = drafter.begin(prompt, choices[:-1], draft_cached)  # the last choice is for the answer's first token
        if policy is not None:
            policy.shadow_evaluated(drafter.name, seen)
    return rows[-1:]


def rounds(
    prompt: Sequence[int],
    rows: Logits,
    rule: AcceptanceRule,
    *,
    capacity: int,
    max_tokens: int,
    is_end: Callable[[int], bool],
    drafters: Sequence[Drafter] = (),
    policy: DraftPolicy | None = None,
    draft_max: int = 0,
    batch_size: PaddedSize = lambda count: count,
    clock: Clock,
    observe: Callable[[Logits], None] | None = None,
) -> Rounds:
    """Yield the first token, then rounds until ``max_tokens`` are emitted, a token ends the text, or the context is
    full.

    The target has decoded the ``prompt`` (n,), and ``rows`` (1, vocab) are the logits after it (:func:`decode_prompt`).
    Its context holds ``capacity`` tokens. Without a policy every draft has ``draft_max`` tokens. ``batch_size`` returns
    the padded size of a batch. ``observe`` is called with the target's logits (drafted + 1, vocab) before
    verification; they are valid only during the call.
    """
    policy, decoded, clock = policy or DraftPolicy(), Decoded(rows), AnswerClock(clock)
    tokens, chain = list(prompt), list[tuple[str, DraftToken]]()
    last = min(len(prompt) + max_tokens, capacity + 1)
    rule.begin(prompt)
    size, learning_s = 0, 0.0
    # cooldown: rounds left in it; idle: (verify, total) seconds of its rounds; idle_size: their batch size, 0 if shared
    cooldown, idle, idle_size = 0, list[tuple[float, float]](), 0
    while len(tokens) < last:
        waited_s = clock.waited_s
        reading_s, readings, began = 0.0, tuple[DrafterReading, ...](), clock()
        verify_began = verify_ended = began
        if len(tokens) > len(prompt):  # the prompt's batch has already produced the first token's logits
            limit, chain = min(draft_max, last - len(tokens) - 1), []
            if drafters and not cooldown:
                policy.begin(limit, last - len(tokens), may_trim=rule.may_trim)
                reading_s, readings = yield from catch_up(tokens, drafters, policy, rule, clock)
                began += reading_s
                chain = yield from draft(tokens, limit, drafters, policy, rule, is_end, clock)
            size = batch_size(1 + len(chain))
            if drafters and not chain and not cooldown:
                size = policy.target_only_batch_size(size)
            unverified = (tokens[-1], *(token.token for _, token in chain))
            verify_began = clock()
            decoded = yield from clock.decode(Batch(unverified, len(unverified), size))
            rows, verify_ended = decoded.rows, clock()
        if observe is not None:
            observe(rows)
        drafted = tuple(token.token for _, token in chain)
        result = rule.verify(rows, [token for _, token in chain], len(tokens))
        emitted = result.emitted(drafted)
        end = next((i for i, token in enumerate(emitted) if is_end(token)), None)
        emitted = emitted if end is None else emitted[: end + 1]
        tokens.extend(emitted)
        is_last = end is not None or result.token is None or len(tokens) >= last
        ended = clock()
        spent_s, verify_s = ended - began, verify_ended - verify_began
        if cooldown:
            idle_size = 0 if decoded.batch_size or (idle and not idle_size) else size
            idle.append((verify_s, spent_s))
            cooldown -= 1
        if not cooldown or is_last:
            for drafter in drafters:
                drafter.commit(len(tokens) - 1)
            if idle:
                policy.observe_cooldown(idle_size, idle)
                idle.clear()
            elif drafters and size:
                ended = clock()
                policy.observe_round(
                    RoundOutcome(size, result.accepted, len(emitted), verify_s, spent_s, learning_s, decoded.batch_size)
                )
                cooldown = policy.cooldown
                learning_s = clock() - ended
        yield Round(
            drafted,
            tuple(name for name, _ in chain),
            result.accepted,
            emitted,
            size,
            reading_s + verify_began - began + clock() - ended,
            verify_s,
            reading_s + clock() - began + clock.waited_s - waited_s,
            result.token is None,
            readings,
        )
        if end is not None or result.token is None:
            return


def draft(
    tokens: Sequence[int],
    limit: int,
    drafters: Sequence[Drafter],
    policy: DraftPolicy,
    rule: AcceptanceRule,
    is_end: Callable[[int], bool],
    clock: AnswerClock,
) -> Generator[Batch, Decoded, list[tuple[str, DraftToken]]]:
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
            began, drafter, unread = clock(), by_name[name], pending[name]
            if (batch := drafter.to_propose(text)) is not None:
                decoded = yield from clock.decode(batch)
                drafter.receive(decoded.rows)
                unread = 0 if decoded.batch_size else unread
            candidate = drafter.propose(text, rule)
            if candidate is None:  # the drafter has given up
                del by_name[name]
                continue
            policy.proposed(name, unread, clock() - began)
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
    tokens: Sequence[int], drafters: Sequence[Drafter], policy: DraftPolicy, rule: AcceptanceRule, clock: AnswerClock
) -> Generator[Batch, Decoded, tuple[float, tuple[DrafterReading, ...]]]:
    """Let drafters read unread tokens if that is worth the time, and score the tokens they would have drafted there.

    A draft model with a stale latency is timed first if the policy asks for it.

    Returns:
        seconds spent reading, as reported to the policy, and how many tokens each drafter read.
    """
    reading_s, readings = 0.0, list[DrafterReading]()
    for drafter in drafters:
        pending = drafter.pending(len(tokens))
        if pending and (why := policy.probe(drafter.name, pending)):
            began = clock()
            policy.probed(drafter.name, drafter.time_token(tokens, clock))
            reading_s += (spent := clock() - began)
            readings.append(DrafterReading(drafter.name, 0, spent, policy.expected_gain.get(drafter.name, 0.0), why))
        count = policy.catch_up_count(drafter.name, pending) if pending else 0
        if count or not pending:
            began = clock()
            if count and (batch := drafter.to_catch_up(tokens, count)) is not None:
                drafter.receive((yield from clock.decode(batch)).rows)
            seen = drafter.catch_up(tokens, rule, count)
            spent = clock() - began if count else 0.0
            policy.shadow_evaluated(drafter.name, seen, spent)
            if count:
                reading_s += spent
                readings.append(DrafterReading(drafter.name, count, spent, policy.expected_gain.get(drafter.name, 0.0)))
    return reading_s, tuple(readings)
