"""The draft-and-verify loop, pure over a small Model protocol: no files, no clock but the one given.

A round drafts a chain of tokens, verifies them in one target batch, keeps the prefix that the rule accepts and adds
one token of the target's own. Without a drafter every round is one target token: target-only is the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ggufspec.decoding.drafters.base import Drafter
from ggufspec.decoding.model import Model
from ggufspec.decoding.options import ROWS
from ggufspec.decoding.policy.base import Outcome, Policy
from ggufspec.decoding.policy.fixed import Fixed
from ggufspec.decoding.rules.base import Proposal, Rule

Clock = Callable[[], float]
Width = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and one verification.

    Args:
        drafted: tokens that were verified.
        drafters: who offered each of them.
        accepted: how many were kept.
        emitted: the accepted tokens and the target's own, cut after a token that ends the text.
        width: tokens in the target's batch, padding included.
        draft_s: seconds of drafting, and of a draft reading along.
        verify_s: seconds in the target.
        total_s: seconds of the round.
        dead_end: the grammar permits no further token.
    """

    drafted: tuple[int, ...]
    drafters: tuple[str, ...]
    accepted: int
    emitted: tuple[int, ...]
    width: int
    draft_s: float
    verify_s: float
    total_s: float
    dead_end: bool = False

    def source(self, place: int) -> str:
        """Who wrote the emitted token at a place: a drafter's name, or ``bonus`` or ``target``: the target's own.

        It is a bonus behind a draft that was kept whole.
        """
        if place < self.accepted:
            return self.drafters[place]
        return "bonus" if self.drafted and self.accepted == len(self.drafted) else "target"


def generate(
    target: Model,
    prompt: Sequence[int],
    rule: Rule,
    *,
    max_tokens: int,
    is_end: Callable[[int], bool],
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    draft_max: int = 0,
    width: Width = lambda count: count,
    clock: Clock,
) -> Generator[Round]:
    """Rounds until ``max_tokens`` are emitted, a token ends the text, or the target's context is full.

    The target has read all but the last token of ``prompt`` already, and so have the drafters (:func:`read`).

    Args:
        target: the model whose distribution the text follows.
        prompt: (n,) token ids, at least one.
        rule: chooses drafted tokens and judges them.
        max_tokens: tokens to emit at most.
        is_end: whether a token ends the text.
        drafters: none for target-only; where two have a token, the policy chooses.
        policy: says who drafts and how far; None drafts ``draft_max`` tokens always.
        draft_max: drafted tokens a round at most.
        width: tokens to pad a target batch of so many tokens to.
        clock: seconds, monotonic.
    """
    policy = policy or Fixed()
    tokens = list(prompt)
    last = min(len(prompt) + max_tokens, target.capacity + 1)
    rule.begin(prompt)
    learning_s = 0.0
    while len(tokens) < last:
        began = clock()
        asking = bool(drafters) and not policy.resting()
        limit = min(draft_max, last - len(tokens) - 1)
        chain = draft(tokens, limit, drafters, policy, rule, is_end, clock) if asking else []
        drafted = tuple(proposal.token for _, proposal in chain)
        wide = width(1 + len(drafted))
        verify_began = clock()
        rows = target.decode((tokens[-1], *drafted), outputs=len(drafted) + 1, width=wide)
        verify_ended = clock()
        verdict = rule.verify(rows, [proposal for _, proposal in chain], len(tokens))
        emitted = verdict.emitted(drafted)
        end = next((i for i, token in enumerate(emitted) if is_end(token)), None)
        if end is not None:
            emitted = emitted[: end + 1]
        tokens.extend(emitted)
        target.rewind(len(tokens) - 1)
        for drafter in drafters:
            drafter.keep(len(tokens) - 1)
        ended = clock()
        if drafters:
            verify_s = verify_ended - verify_began
            policy.learn(Outcome(wide, verdict.accepted, len(emitted), verify_s, ended - began, learning_s))
            reviewing_s = review(tokens, drafters, policy, rule, clock) if asking else 0.0
            learning_s = clock() - ended - reviewing_s
        yield Round(
            drafted,
            tuple(name for name, _ in chain),
            verdict.accepted,
            emitted,
            wide,
            verify_began - began + clock() - ended,
            verify_ended - verify_began,
            clock() - began,
            verdict.token is None,
        )
        if end is not None or verdict.token is None:
            return


def draft(
    tokens: Sequence[int],
    limit: int,
    drafters: Sequence[Drafter],
    policy: Policy,
    rule: Rule,
    is_end: Callable[[int], bool],
    clock: Clock,
) -> list[tuple[str, Proposal]]:
    """The chain to verify: who offered each token, and the token."""
    policy.begin(limit, may_trim=rule.may_trim)
    by_name = {drafter.name: drafter for drafter in drafters}
    text = list(tokens)
    chain: list[tuple[str, Proposal]] = []
    while len(chain) < limit and by_name:
        rule.follow(text)
        pending = {name: drafter.pending(len(text)) for name, drafter in by_name.items()}
        free = {
            name: offer
            for name, drafter in by_name.items()
            if not pending[name] and (offer := drafter.offer(text, rule)) is not None
        }
        confidences = {name: offer.confidence for name, offer in free.items()}
        name = policy.choose(confidences, {name: unread for name, unread in pending.items() if unread})
        if name is None:
            break
        offer = free.get(name)
        if offer is None:
            asked = clock()
            offer = by_name[name].offer(text, rule)
            if offer is None:  # it has given up
                del by_name[name]
                continue
            policy.asked(name, pending[name], clock() - asked)
        if not policy.take(name, offer.confidence):
            break
        proposal = offer.draw()
        if not rule.permits(proposal.token, len(text)):
            break
        chain.append((name, proposal))
        text.append(proposal.token)
        if is_end(proposal.token):
            break
    return chain[: policy.verified()]


def review(tokens: Sequence[int], drafters: Sequence[Drafter], policy: Policy, rule: Rule, clock: Clock) -> float:
    """Let drafters that did not draft see what they would have said, where that is cheap or due; the seconds told."""
    told_s = 0.0
    for drafter in drafters:
        pending = drafter.pending(len(tokens))
        reading = policy.reading(drafter.name, pending) if pending else 0
        if reading or not pending:
            began = clock()
            seen = drafter.review(tokens, rule, reading)
            spent = clock() - began
            policy.reviewed(drafter.name, seen, spent)
            told_s += spent
    return told_s


def read(
    target: Model,
    prompt: Sequence[int],
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    *,
    kept: int = 0,
    draft_kept: int = 0,
) -> None:
    """Put all but the last token of ``prompt`` into the caches; the last one is the first round's.

    Where a policy learns, the drafters are judged on the prompt's last places by what the target would have said there.

    Args:
        target: the model whose distribution the text follows.
        prompt: (n,) token ids, at least one.
        drafters: those of the answer.
        policy: the answer's.
        kept: tokens of the prompt, less than n, that the target's cache begins with and keeps.
        draft_kept: the same of the drafters' text; what they have read of it.
    """
    target.rewind(kept)
    choices: list[int] = []
    new = prompt[kept:-1]
    if new:
        # One at least: it is there when the device is done, which else would be in the first round's time.
        count = min(ROWS if policy is not None else 1, len(new))
        rows = target.decode(new, outputs=count)
        choices = [int(row.argmax()) for row in rows] if policy is not None else []
    for drafter in drafters:
        seen = drafter.read(prompt, choices, draft_kept)
        if policy is not None:
            policy.reviewed(drafter.name, seen)
