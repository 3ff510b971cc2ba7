"""The sampler's own time, per row of logits and per emitted token.

    .venv/bin/python tests/evidence/sampler.py        # two minutes

Real decoding of the demo pair, its vocabulary padded to 128,256 tokens by scripts/grow_pair.py, with four drafted
tokens a round. Around every call of the acceptance rule stands a stop-watch: ``propose`` reads one row, ``verify`` one
for each token that it emits. The time of both over the tokens that were emitted is the sampler's time per token. It
depends on the pair, since every drafted token costs a row: so it is given too for a pair whose tokens are each kept
with a chance of 60 %, from the median rows. Of target-only a token is one row.

The decoding between the rows takes them, and NumPy's code, out of the nearest caches: a row costs about twice what it
does in a loop of its own. The padding of that pair is never likely, unlike a big model's rare tokens. So each sampling
is timed too over made rows: a normal bulk with a standard deviation of 2.5 under 200 tokens that fall off as a power
of their rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from common import expanded, save

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS
from ggufspec.decoding import sampling
from ggufspec.decoding.rules.coupled import CoupledRule
from ggufspec.models.profile import demo_pair

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.8, llama.cpp's default truncation": Sampling(temperature=0.8, seed=1),
    "temperature 0.8, top-p 0.95 alone": Sampling(temperature=0.8, top_k=0, min_p=0.0, seed=1),
    "temperature 0.8, no truncation": Sampling(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=1),
}
GOAL_S = 0.5e-3  # per emitted token, at 128,256 tokens
DRAFT_MAX = 4
EMITTED_AT_60 = sum(0.6**kept for kept in range(DRAFT_MAX + 1))  # tokens of a round


class Watch:
    """Seconds in ``propose`` and ``verify`` of every exact rule, and the rows and tokens they were for."""

    def __init__(self) -> None:
        self.propose_s: list[float] = []  # of one row
        self.verify_s: list[float] = []  # of one round
        self.emitted: list[int] = []  # tokens of one round
        self.drafted: list[int] = []  # tokens that this round verified

    @contextmanager
    def on(self) -> Iterator[None]:
        """Time the rule while this lasts."""
        propose, verify = CoupledRule.propose, CoupledRule.verify

        def timed_propose(rule: CoupledRule, *arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            proposal = propose(rule, *arguments, **named)
            self.propose_s.append(time.perf_counter() - began)
            return proposal

        def timed_verify(rule: CoupledRule, *arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            verdict = verify(rule, *arguments, **named)
            self.verify_s.append(time.perf_counter() - began)
            self.emitted.append(verdict.accepted + (verdict.token is not None))
            self.drafted.append(len(arguments[1]))
            return verdict

        with (
            mock.patch.object(CoupledRule, "draft_token", timed_propose),
            mock.patch.object(CoupledRule, "verify", timed_verify),
        ):
            yield

    def figures(self) -> dict[str, Any]:
        """The median row and, with as many rows as were read, the time per emitted token."""
        emitted, drafted = sum(self.emitted), sum(self.drafted)
        verified_s = [s / count for s, count in zip(self.verify_s, self.emitted, strict=True)]  # of one row
        propose_s = statistics.median(self.propose_s)
        return {
            "rounds": len(self.verify_s),
            "emitted": emitted,
            "drafted": drafted,
            "acceptance_rate": (emitted - len(self.emitted)) / drafted,
            "row_s": {
                "median": statistics.median(self.propose_s + verified_s),
                "p95": float(np.percentile(self.propose_s + verified_s, 95)),
                "propose_median": propose_s,
                "verify_median": statistics.median(verified_s),
            },
            "token_s": {
                "mean": (sum(self.propose_s) + sum(self.verify_s)) / emitted,
                "of_median_rows": propose_s * len(self.propose_s) / emitted + statistics.median(verified_s),
                "at_60_percent": propose_s * DRAFT_MAX / EMITTED_AT_60 + statistics.median(verified_s),
            },
            "propose_samples_s": [round(s, 7) for s in self.propose_s],
            "verify_samples_s": [round(s, 7) for s in self.verify_s],
        }


def decoded(pair: tuple[Any, ...], settings: Sampling) -> dict[str, Any]:
    """Figures of real rounds over the bundled prompts."""
    watch = Watch()
    options = DecoderOptions(ctx_size=1024, draft_max=DRAFT_MAX, threads=1, **fixed_draft())
    target, draft = pair
    with SpeculativeDecoder(target, draft, options) as decoder, watch.on():
        for prompt in PROMPTS:
            for _ in decoder.generate(prompt.text, max_tokens=48, sampling=settings):
                pass
    return watch.figures()


def fixed_draft() -> dict[str, Any]:
    """The options that draft with the model, always the full length, where there is a choice."""
    wanted = {"drafter": "draft", "draft_policy": "fixed"}
    return {name: value for name, value in wanted.items() if name in DecoderOptions.__dataclass_fields__}


def made_rows(vocabulary: int, count: int = 60) -> np.ndarray:
    """(count, vocabulary) logits with a bulk and a head like a big model's."""
    rng = np.random.default_rng(0)
    rows = rng.normal(-2, 2.5, size=(count, vocabulary)).astype(np.float32)
    rank = np.arange(1, 201)
    for row in rows:
        falling = rng.uniform(14, 26) - rng.uniform(0.8, 3) * np.log(rank)
        row[rng.permutation(vocabulary)[: rank.size]] = falling + rng.normal(0, 0.7, rank.size)
    return rows


def row_s(rows: np.ndarray, call: Callable[[np.ndarray, int], Any]) -> dict[str, float]:
    """Seconds of one row; another row each time, so that none is in the nearest cache."""
    spent = []
    for _ in range(3):
        for position, row in enumerate(rows):
            began = time.perf_counter()
            call(row, position)
            spent.append(time.perf_counter() - began)
    return {"median": statistics.median(spent), "p95": float(np.percentile(spent, 95))}


def main() -> None:
    """Measure both vocabularies, print, save."""
    target, draft = demo_pair()
    pairs = {
        4096: (target, draft),
        128256: tuple(
            expanded(path, f"{path.stem}-128k", "--width", str(batch_size), "--vocab", "128256")
            for path, batch_size in ((target, 352), (draft, 160))
        ),
    }
    results, confidence_s = [], {}
    for vocabulary, pair in pairs.items():
        rows = made_rows(vocabulary)
        confidence_s[str(vocabulary)] = row_s(rows, lambda row, _: sampling.confidence(row))
        print(f"{vocabulary:7,} tokens, confidence of a row: {confidence_s[str(vocabulary)]['median'] * 1e6:.0f} µs")
        for name, settings in SAMPLINGS.items():
            rule = CoupledRule(settings)
            made = row_s(rows, rule.propose)
            figures = decoded(pair, settings)
            token_s = figures["token_s"]
            results.append(
                {
                    "vocabulary": vocabulary,
                    "sampling": name,
                    "goal_s": GOAL_S,
                    "reached": {
                        "a token of target-only": figures["row_s"]["verify_median"] <= GOAL_S,
                        "a token of the pair": token_s["at_60_percent"] <= GOAL_S,
                    },
                    "made_row_s": made,
                    **figures,
                }
            )
            print(
                f"{vocabulary:7,} tokens, {name:48} {token_s['mean'] * 1e6:5.0f} µs a token, of median rows "
                f"{token_s['of_median_rows'] * 1e6:.0f}, with 60 % kept {token_s['at_60_percent'] * 1e6:.0f} "
                f"(goal {GOAL_S * 1e6:.0f}); a row of the draft "
                f"{figures['row_s']['propose_median'] * 1e6:.0f}, of the target "
                f"{figures['row_s']['verify_median'] * 1e6:.0f}, a made row {made['median'] * 1e6:.0f}, "
                f"acceptance {figures['acceptance_rate']:.0%}",
                flush=True,
            )
    save("sampler", {"draft_max": DRAFT_MAX, "confidence_s": confidence_s, "results": results})


if __name__ == "__main__":
    main()
