"""Perplexity, KL divergence and agreement: exact on rows made by hand, and true to a model read in one piece."""

import math
from itertools import pairwise

import numpy as np
import pytest

from ggufspec.bench import quality
from ggufspec.bench.prompts import PASSAGES
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions


def logits(*rows):
    return np.log(np.array(rows, np.float64)).astype(np.float32)


def judged(ours, theirs, following):
    return quality.score_tokens(logits(*ours), quality.compress(logits(*theirs)), following)


def test_a_row_that_is_the_reference_itself_costs_nothing():
    rows = [(0.5, 0.25, 0.125, 0.125), (0.1, 0.2, 0.3, 0.4)]
    found = judged(rows, rows, [0, 2])
    assert found.divergence == pytest.approx([0, 0], abs=1e-6)
    assert found.surprise == pytest.approx([math.log(2), -math.log(0.3)], abs=1e-6)
    assert found.agrees.all()


def test_the_divergence_is_the_reference_against_the_other():
    """Not the other way round: KL(p ‖ q) of p = (3/4, 1/4) and q = (1/4, 3/4, …)."""
    found = judged([(0.25, 0.75)], [(0.75, 0.25)], [1])
    assert found.divergence == pytest.approx([0.5 * math.log(3)], rel=1e-3)
    skew = judged([(0.5, 0.25, 0.25)], [(0.8, 0.1, 0.1)], [0])
    assert skew.divergence == pytest.approx([0.8 * math.log(1.6) + 0.2 * math.log(0.4)], rel=1e-3)
    assert list(found.agrees) == [False]


def test_what_is_kept_survives_any_logits():
    """A shift means nothing; what is impossible stays so, and −∞ cannot be used in arithmetic."""
    row = np.array([[1e4, 1e4 - 1, -1e9, -np.inf]], np.float32)
    kept = quality.compress(row)
    assert np.isfinite(kept).all()
    assert quality.score_tokens(
        np.array([[0.0, -1.0, -500.0, -500.0]], np.float32), kept, [0]
    ).divergence == pytest.approx([0], abs=1e-6)


def test_rounding_adds_next_to_nothing():
    rng = np.random.default_rng(0)
    rows = (4 * rng.standard_normal((200, 5000))).astype(np.float32)
    found = quality.score_tokens(rows, quality.compress(rows), np.zeros(200, int))
    assert found.divergence.max() < 1e-5


def test_estimates_and_their_errors():
    first = quality.TokenScores(np.array([1.0, 3.0]), np.array([0.0, 0.4]), np.array([True, False]))
    second = quality.TokenScores(np.array([2.0, 2.0]), np.array([0.2, 0.2]), np.array([True, True]))
    found = quality.estimate_quality([first, second], "big", is_reference=False)
    assert (found.reference, found.tokens) == ("big", 4)
    assert (found.perplexity, found.mean_kl, found.top1_agreement) == pytest.approx((math.exp(2), 0.2, 0.75))
    error = math.sqrt(2 / 3) / 2  # of the surprise: sample variance 2/3, four tokens
    assert found.perplexity_error == pytest.approx(math.exp(2) * error)
    assert found.mean_kl_error == pytest.approx(math.sqrt(0.08 / 3) / 2)
    assert found.top1_agreement_error == pytest.approx(0.5 / 2)


def test_the_reference_is_its_own_measure():
    rattle = quality.TokenScores(np.array([1.0, 2.0]), np.array([1e-7, 2e-7]), np.array([True, False]))
    found = quality.estimate_quality([rattle], "big", is_reference=True)
    assert (found.mean_kl, found.mean_kl_error, found.top1_agreement, found.top1_agreement_error) == (0, 0, 1, 0)


def test_errors_shrink_as_the_text_grows():
    rng = np.random.default_rng(1)

    def error(count):
        one = quality.TokenScores(rng.exponential(size=count), rng.exponential(size=count), rng.random(count) < 0.8)
        return quality.estimate_quality([one], "", is_reference=False).mean_kl_error

    assert error(400) / error(40000) == pytest.approx(10, rel=0.2)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Read the text in child processes, the first model as the reference."""
    rows = tmp_path_factory.mktemp("rows") / "rows.npy"

    def go(*models, passages=PASSAGES[:2]):
        specs = [
            quality.QualityJob(model, DecoderOptions(threads=1), rows, index == 0, "the first", passages)
            for index, model in enumerate(models)
        ]
        return [quality.measure_quality(spec) for spec in specs]

    return go


def test_a_real_model_against_itself_and_another(read, target, draft):
    first, same, other = read(target, target, draft)
    assert (first.mean_kl, first.top1_agreement) == (0, 1)
    assert same.perplexity == first.perplexity
    assert same.mean_kl < 1e-5
    assert same.top1_agreement > 0.99  # rows whose two best are equal as float16
    assert other.mean_kl > 0.5
    assert other.top1_agreement < 0.6
    assert other.perplexity > first.perplexity


def test_perplexity_is_that_of_the_text_read_one_token_at_a_time(read, target):
    (found,) = read(target, passages=(PASSAGES[6],))
    with Model(target) as model:
        context = Context(model, ContextOptions(ctx_size=512, max_outputs=2, threads=1))
        tokens = model.tokenize(PASSAGES[6])
        total = 0.0
        for here, following in pairwise(tokens):
            row = context.decode([here], 1)[0].astype(np.float64)
            total += float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[following])
        context.close()
    assert found.tokens == len(tokens) - 1
    assert math.log(found.perplexity) == pytest.approx(total / (len(tokens) - 1), abs=2e-3)


def test_other_tokens_cannot_be_compared(read, target, small_vocabulary):
    with pytest.raises(ModelError, match="its tokens differ from those of the first"):
        read(target, small_vocabulary)


def test_a_disk_that_is_too_small_is_told_before_it_is_full(monkeypatch, tmp_path):
    monkeypatch.setattr(quality.host, "free_disk_bytes", lambda _: 100 << 20)
    with pytest.raises(ModelError, match=r"take 200\.0 MB") as error:
        quality._create(tmp_path / "rows", 100_000, [range(1000)])
    assert "--no-quality" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_passages_fit_a_context_and_tell_something(target):
    with Model(target) as model:
        lengths = [len(model.tokenize(passage)) for passage in PASSAGES]
    assert max(lengths) <= quality._CELLS
    assert sum(lengths) > 1500
    assert len(set(PASSAGES)) == len(PASSAGES)
