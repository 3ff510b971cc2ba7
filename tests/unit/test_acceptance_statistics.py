"""The lossless rules at 10**6 samples: chi-square and total variation against the target's law; bugs must be seen."""

import numpy as np
import pytest
from scipy import stats

from ggufspec.decoding import noise
from ggufspec.decoding.rules import make_rule, speculative
from ggufspec.decoding.rules.base import DraftToken
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.decoding.rules.distribution import Distribution
from ggufspec.decoding.rules.speculative import SpeculativeRule
from ggufspec.decoding.sampling import Sampling, TokenCandidates, token_candidates

SAMPLES = 1_000_000
VOCAB = 8
SAMPLING = Sampling(temperature=0.8, top_k=5, top_p=0.97, min_p=0.02, seed=2024)
rng = np.random.default_rng(5)
TARGET = (rng.normal(size=(VOCAB + 1, VOCAB)) * 1.2).astype(np.float32)  # row 0 opens, row 1 + t follows token t
DRAFT = (TARGET + rng.normal(size=TARGET.shape)).astype(np.float32)


def dense(rows, sampling=SAMPLING):
    """(rows, vocab) probabilities after the real sampler chain."""
    table = np.zeros(rows.shape)
    for i, logits in enumerate(rows):
        found = token_candidates(logits, sampling)
        table[i, found.ids] = found.probabilities()
    return table


P, Q = dense(TARGET), dense(DRAFT)
PAIRS = (P[0][:, None] * P[1:]).ravel()  # the target's law of two tokens


def agrees(outcomes, law):
    """Whether counts of outcomes can come from ``law``: chi-square p above 1e-4, total variation within its noise."""
    counts = np.bincount(outcomes, minlength=law.size)
    possible = law > 0
    if counts[~possible].any():
        return False
    n = counts.sum()
    chi_square = stats.chisquare(counts[possible], n * law[possible]).pvalue
    total_variation = np.abs(counts / n - law).sum() / 2
    expected = np.sqrt(2 * law * (1 - law) / (np.pi * n)).sum() / 2
    return bool(chi_square > 1e-4 and total_variation < expected + 4 / np.sqrt(n))


# --- coupled noise ---------------------------------------------------------------------------------------------------


def coupled(rows, which, positions):
    """``noise.choose_with_noise`` of candidates, for many positions at once; ``which`` row is that of each position."""
    start = np.array([noise._start(SAMPLING.seed, position) for position in positions.tolist()])[:, None]
    with np.errstate(divide="ignore"):
        scores = np.log(dense(rows))
    return (scores[which] + noise._gumbel(start, np.arange(VOCAB)[None, :])).argmax(axis=1)


def test_the_batch_is_the_real_choice():
    rule = CoupledRule(SAMPLING)
    found = coupled(TARGET, np.zeros(2000, int), np.arange(2000))
    assert found.tolist() == [rule.verify(TARGET[:1], [], position).token for position in range(2000)]


def test_keyed_noise_samples_the_target():
    positions = 2 * np.arange(SAMPLES // 2)
    first = coupled(TARGET, np.zeros(positions.size, int), positions)
    second = coupled(TARGET, 1 + first, positions + 1)
    assert agrees(first * VOCAB + second, PAIRS)
    assert not agrees(first * VOCAB + coupled(TARGET, 1 + first, positions), PAIRS)  # bug: one position's noise twice


def test_shared_noise_makes_the_draft_agree():
    positions = np.arange(100_000)
    target, draft = (coupled(rows, np.zeros(positions.size, int), positions) for rows in (TARGET, DRAFT))
    overlap = np.minimum(P[0], Q[0]).sum()  # what the residual rule would accept, the most that is possible
    independent = (P[0] * Q[0]).sum()
    assert independent + 0.1 < (target == draft).mean() <= overlap + 0.005
    assert (target == draft).mean() >= overlap / (2 - overlap) - 0.005  # arXiv:2408.07978, theorem 3


# --- the residual rule ---------------------------------------------------------------------------------------------


def drawn(q, uniform):
    return speculative.pick(q, uniform)


def argmax(q, _):
    return q.argmax(axis=-1)


def residual_rounds(n, draw=drawn, p_min=0.0):
    """Two tokens from each of n rounds of two drafted ones, by the rule's own arithmetic on whole arrays.

    After a rejection of the first token the second is the target's own, as a next round's would be.
    """
    uniform = np.random.default_rng(1).random((7, n))
    each = np.arange(n)

    def one_step(p, q, uniform):
        token = draw(q, uniform[0])
        kept = uniform[1] < speculative.acceptance_probability(p[each, token], q[each, token])
        again = speculative.pick(speculative.residual(p, q), uniform[2])
        dropped = q[each, token] < p_min
        return np.where(dropped, speculative.pick(p, uniform[2]), np.where(kept, token, again)), kept & ~dropped

    first, kept = one_step(np.tile(P[0], (n, 1)), np.tile(Q[0], (n, 1)), uniform[:3])
    second, _ = one_step(P[1 + first], Q[1 + first], uniform[3:6])
    second = np.where(kept, second, speculative.pick(P[1 + first], uniform[6]))
    return first * VOCAB + second


def test_the_residual_rule_samples_the_target():
    assert agrees(residual_rounds(SAMPLES), PAIRS)


def test_mutant_a_greedy_draft_accepted_at_p_over_q():
    assert not agrees(residual_rounds(SAMPLES, draw=argmax), PAIRS)


def test_mutant_dropping_a_token_because_of_its_own_probability():
    assert not agrees(residual_rounds(SAMPLES, p_min=0.3), PAIRS)


def test_mutant_resampling_from_p_after_a_rejection(monkeypatch):
    monkeypatch.setattr(speculative, "residual", lambda p, _: p)
    assert not agrees(residual_rounds(SAMPLES), PAIRS)


def rounds_of_the_rule(n):
    """First tokens of n rounds of the real rule, from logits."""
    rule, tokens = SpeculativeRule(SAMPLING, np.random.default_rng(3)), []
    rows = TARGET[:2]
    for _ in range(n):
        proposal = rule.draft_token(DRAFT[0], 0)
        verdict = rule.verify(rows, [proposal], 0)
        tokens.append(proposal.token if verdict.accepted else verdict.token)
    return np.array(tokens)


def test_the_real_rule_from_logits_to_tokens():
    assert agrees(rounds_of_the_rule(20_000), P[0])


def test_mutant_residual_by_index_over_differently_truncated_lists(monkeypatch):
    assert set(np.flatnonzero(P[0])) != set(np.flatnonzero(Q[0]))
    by_id = Distribution.at

    def by_index(self, ids):
        return np.resize(self.probabilities, ids.size) if ids.size > 1 else by_id(self, ids)

    monkeypatch.setattr(Distribution, "at", by_index)
    assert not agrees(rounds_of_the_rule(20_000), P[0])


@pytest.mark.parametrize("token", range(VOCAB))
def test_a_lookup_draft_is_a_point_mass(token):
    rule = SpeculativeRule(SAMPLING, np.random.default_rng(token))
    verdicts = [rule.verify(TARGET[:2], [DraftToken(token)], 0) for _ in range(2000)]
    assert agrees(np.array([token if verdict.accepted else verdict.token for verdict in verdicts]), P[0])


def test_mutant_a_lookup_draft_taken_for_a_drawn_one():
    q = token_candidates(DRAFT[0], SAMPLING)
    token = int(q.ids[q.scores.argmax()])
    rule = SpeculativeRule(SAMPLING, np.random.default_rng(0))
    proposal = DraftToken(token, TokenCandidates(q.ids, q.scores))
    verdicts = [rule.verify(TARGET[:2], [proposal], 0) for _ in range(5000)]
    assert not agrees(np.array([token if verdict.accepted else verdict.token for verdict in verdicts]), P[0])


# --- with a grammar ------------------------------------------------------------------------------------------------


class Odd:
    """A language without even tokens."""

    odd = np.arange(VOCAB) % 2 == 1

    def start(self):
        return 0

    def is_free(self, _):
        return False

    def permits(self, _, token):
        return token % 2 == 1

    def permitted(self, _, ids):
        return ids % 2 == 1

    def mask(self, _):
        return self.odd

    def advance(self, state, token):
        return state if token % 2 else None


def odd_tokens(name, n):
    """First tokens of n rounds with one drafted token, nothing truncated."""
    rule, tokens = make_rule(name, Sampling(0.8, 0, 1.0, 0.0, seed=8), Odd()), []
    for position in range(n):
        rule.begin(range(position))
        rule.follow([0] * position)
        proposal = rule.draft_token(DRAFT[0], position)
        tokens.append(rule.verify(TARGET[:2], [proposal], position).emitted([proposal.token])[0])
    return np.array(tokens)


@pytest.mark.parametrize("name", ["exact", "residual"])
def test_lossless_rules_sample_the_masked_target(name):
    """With the noise of one position the best permitted token is the same whether others were looked at or not."""
    masked = dense(np.where(Odd.odd, TARGET[:1], -np.inf).astype(np.float32), Sampling(0.8, 0, 1.0, 0.0))[0]
    found = odd_tokens(name, 5000)
    assert agrees(found, masked)
    assert not agrees(
        found, dense(np.where(Odd.odd, DRAFT[:1], -np.inf).astype(np.float32), Sampling(0.8, 0, 1.0, 0.0))[0]
    )
