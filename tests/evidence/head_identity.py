"""Strict identity with heads: every token equal to target-only, whoever drafts beside the head.

    .venv/bin/python tests/evidence/head_identity.py       # some ten minutes on two cores

200 prompts of up to 1,000 tokens, each head alone and with the lookup, greedy and coupled at temperature 0.8. The draft
lengths and the policy change from prompt to prompt. Target-only is a decoder without a head, so that handing out hidden
rows is under test, too: its text must not depend on that. The heads are those that ship.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import DEMO, demo_mimo2, save

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench.divergence import first_difference
from ggufspec.models.profile import demo_pair
from tests.support.texts import source_texts

CTX_SIZE, THREADS = 1536, 1
SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling(temperature=0.8)}
POLICIES = (("fixed", 1), ("fixed", 3), ("fixed", 7), ("adaptive", 15))
BY_HEAD, BY_LOOKUP = ("drafted", "accepted"), ("lookup_drafted", "lookup_accepted")
COLUMNS = ("prompt", "prompt_tokens", "tokens", "differs_at", *BY_HEAD, *BY_LOOKUP)


def answers(decoder: SpeculativeDecoder, prompts: Sequence[str], tokens: int) -> Iterator[tuple[int, str, list[int]]]:
    """(prompt, sampling, its tokens) of all prompts; those that share a policy follow each other."""
    for first, (policy, draft_max) in enumerate(POLICIES):
        if decoder.drafters:
            decoder.configure(draft_policy=policy, draft_max=draft_max)
        for i in range(first, len(prompts), len(POLICIES)):
            for name, sampling in SAMPLINGS.items():
                found = decoder.generate(prompts[i], max_tokens=tokens, sampling=replace(sampling, seed=i))
                yield i, name, [one.token for one in found]


def measure(kind: str, target: Path, head: Path, prompts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """A row for each way to draft and sampling."""
    options = DecoderOptions(ctx_size=CTX_SIZE, threads=THREADS, strict=True, drafters=())
    with SpeculativeDecoder(target, None, options) as decoder:
        alone = {(i, name): text for i, name, text in answers(decoder, prompts, tokens)}
    rows = []
    for drafters in ((kind,), (kind, "lookup")):
        widest = replace(options, drafters=drafters, draft_max=max(most for _, most in POLICIES))
        found: dict[str, dict[str, list[int]]] = {name: {column: [] for column in COLUMNS} for name in SAMPLINGS}
        with SpeculativeDecoder(target, head, widest) as decoder:
            assert decoder.drafters == drafters
            for i, name, text in answers(decoder, prompts, tokens):
                statistics, expected = decoder.statistics, alone[i, name]
                assert statistics is not None
                differs_at = -1 if text == expected else first_difference(tuple(expected), tuple(text))
                by_lookup = statistics.lookup_drafted, statistics.lookup_accepted
                by_head = statistics.drafted - by_lookup[0], statistics.accepted - by_lookup[1]
                row = (i, statistics.prompt_tokens, len(text), differs_at, *by_head, *by_lookup)
                for column, value in zip(COLUMNS, row, strict=True):
                    found[name][column].append(value)
        for name, some in found.items():
            rows.append({"head": kind, "drafters": list(drafters), "sampling": name, "answers": some})
            differ = sum(place >= 0 for place in some["differs_at"])
            total = {column: f"{sum(some[column]):,}" for column in COLUMNS}
            print(
                f"{'+'.join(drafters):14} {name:8} {len(some['prompt'])} answers, {total['tokens']} tokens, {differ} "
                f"differ; head {total['accepted']} of {total['drafted']} accepted, "
                f"lookup {total['lookup_accepted']} of {total['lookup_drafted']}",
                flush=True,
            )
    return rows


def main() -> int:
    """Measure, print, save; 0 if all texts are equal and every head drafted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("-n", "--predict", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--folder", type=Path, help="save there; for trials")
    arguments = parser.parse_args()
    began = time.perf_counter()
    prompts = source_texts(arguments.prompts)
    cases = [("eagle3", demo_pair()[0], DEMO / "demo-eagle3-Q8_0.gguf"), ("mtp", demo_mimo2(), demo_mimo2())]
    rows = [row for case in cases for row in measure(*case, prompts, arguments.predict)]
    given = [row["answers"] for row in rows]
    count = sum(len(some["prompt"]) for some in given)
    unequal = sum(place >= 0 for some in given for place in some["differs_at"])
    longest = max(length for some in given for length in some["prompt_tokens"])
    drafts = all(any(some["drafted"]) for some in given)
    minutes = round((time.perf_counter() - began) / 60, 1)
    print(f"{count:,} answers, prompts of up to {longest:,} tokens, {unequal} differ; {minutes} minutes")
    summary = {"answers": count, "unequal": unequal, "longest_prompt_tokens": longest}
    folder = {"folder": arguments.folder} if arguments.folder else {}
    save("head-identity", {"goal": 0, **summary, "policies": POLICIES, "ways": rows}, **folder)
    return 0 if drafts and not unequal else 1


if __name__ == "__main__":
    raise SystemExit(main())
