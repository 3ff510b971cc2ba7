"""Time per round outside llama.cpp's decode and the wait for logits.

    .venv/bin/python tests/evidence/round_overhead.py        # two minutes

A round here drafts four tokens and verifies five. The vocabulary of 128,256 tokens is the demo pair's padded by
scripts/grow_pair.py. Every call of llama_decode and llama_get_logits is timed and taken off the round's time; what is
left is this project's own Python: drafting, acceptance, sampling, bookkeeping, detokenising.

Then rounds in which nothing is drafted, of text that no drafter foresees (temperature 1.6): what they take outside the
target, by drafters, against target-only, answer by answer in turn.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

from common import expanded, save

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS
from ggufspec.llamacpp.model import Context
from ggufspec.models.profile import demo_pair

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.8, llama.cpp's default truncation": Sampling(temperature=0.8, seed=1),
    "temperature 0.8, top-p 0.95 alone": Sampling(temperature=0.8, top_k=0, min_p=0.0, seed=1),
    "temperature 0.8, no truncation": Sampling(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=1),
}
FIXED = DecoderOptions(ctx_size=1024, drafters=("draft",), draft_policy="fixed", draft_max=4, threads=1)
GOALS_S = {4096: 200e-6, 128256: 1e-3}
UNDRAFTED = {"target-only": (), "lookup": ("lookup",), "draft": ("draft",), "both": ("draft", "lookup")}
UNDRAFTED_GOAL_S = 20e-6


class TimedLibrary:
    """llama.cpp with a stop-watch on the calls that compute."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._library, name)
        if name not in ("llama_decode", "llama_get_logits"):
            return attribute

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return attribute(*arguments)
            finally:
                self.spent_s += time.perf_counter() - began

        setattr(self, name, timed)
        return timed


def measure(pair: tuple[Any, Any], sampling: Sampling) -> dict[str, Any]:
    """Seconds of overhead of each round over the bundled prompts."""
    per_round = []
    with SpeculativeDecoder(*pair, FIXED) as decoder:
        library = TimedLibrary(decoder.target._lib)
        for part in (decoder._pair.target, decoder._pair.draft):
            if isinstance(part, Context):
                part._lib = library
        for prompt in PROMPTS:
            answer = decoder.generate(prompt.text, max_tokens=64, sampling=sampling)
            next(answer)  # the prompt and the first token
            while True:
                # a round yields one or more tokens: time until the next call into llama.cpp has come and gone
                before, began = library.spent_s, time.perf_counter()
                rounds = decoder_rounds(answer, library, before)
                elapsed = time.perf_counter() - began
                if rounds is None:
                    break
                per_round.append(elapsed - (library.spent_s - before))
    ordered = sorted(per_round)
    return {
        "rounds": len(ordered),
        "median_s": statistics.median(ordered),
        "p95_s": ordered[int(0.95 * len(ordered))],
        "samples_s": [round(value, 7) for value in per_round],
    }


def decoder_rounds(answer: Any, library: TimedLibrary, before: float) -> int | None:
    """Take tokens until a round has been computed; None at the end."""
    for count, _ in enumerate(answer, 1):
        if library.spent_s > before:
            return count
    return None


def target_only() -> list[dict[str, Any]]:
    """Seconds outside the target of rounds without a draft, by drafters."""
    samples: dict[str, list[float]] = {way: [] for way in UNDRAFTED}
    tokens_s: dict[str, list[float]] = {way: [] for way in UNDRAFTED}
    target, draft = demo_pair()
    with ExitStack() as stack:
        decoders = {
            way: stack.enter_context(
                SpeculativeDecoder(
                    target, draft if drafters else None, DecoderOptions(ctx_size=1024, threads=1, drafters=drafters)
                )
            )
            for way, drafters in UNDRAFTED.items()
        }
        for number in range(4 * len(PROMPTS)):
            prompt = PROMPTS[number % len(PROMPTS)].text
            ways = list(UNDRAFTED)
            for way in ways[number % 4 :] + ways[: number % 4]:
                decoder = decoders[way]
                for _ in decoder.generate(prompt, max_tokens=96, sampling=Sampling(temperature=1.6, seed=number)):
                    pass
                done = [one for one in decoder.rounds if one.batch_size]
                if number and done:
                    samples[way] += [one.total_s - one.verify_s for one in done if not one.drafted]
                    tokens_s[way].append(sum(one.total_s for one in done) / sum(len(one.emitted) for one in done))
    usual_s = statistics.mean(samples["target-only"])
    return [
        {
            "drafters": way,
            "rounds": len(taken),
            "mean_s": statistics.mean(taken),
            "median_s": statistics.median(taken),
            "more_s": statistics.mean(taken) - usual_s,
            "goal_s": UNDRAFTED_GOAL_S,
            "token_s": statistics.mean(tokens_s[way]),
            "samples_s": [round(value, 7) for value in taken],
        }
        for way, taken in samples.items()
    ]


def main() -> None:
    """Measure both vocabularies, then rounds without a draft; print, save."""
    target, draft = demo_pair()
    pairs = {
        4096: (target, draft),
        128256: tuple(
            expanded(path, f"{path.stem}-128k", "--width", str(batch_size), "--vocab", "128256")
            for path, batch_size in ((target, 352), (draft, 160))
        ),
    }
    results = []
    for vocabulary, pair in pairs.items():
        for name, sampling in SAMPLINGS.items():
            figures = measure(pair, sampling)
            results.append({"vocabulary": vocabulary, "sampling": name, "goal_s": GOALS_S[vocabulary], **figures})
            print(
                f"{vocabulary:7,} tokens, {name:50} {figures['median_s'] * 1e6:7.0f} µs a round "
                f"(95th percentile {figures['p95_s'] * 1e6:.0f}; goal {GOALS_S[vocabulary] * 1e6:.0f})",
                flush=True,
            )
    without = target_only()
    for one in without:
        print(
            f"without a draft, {one['drafters']:12} {one['mean_s'] * 1e6:5.0f} µs a round (median "
            f"{one['median_s'] * 1e6:.0f}), {one['more_s'] * 1e6:+.0f} µs; a token {one['token_s'] * 1e3:.3f} ms"
        )
    save("round-overhead", {"draft_max": 4, "results": results, "undrafted": without})


if __name__ == "__main__":
    main()
