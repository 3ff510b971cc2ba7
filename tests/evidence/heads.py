"""Acceptance of heads, ours and llama.cpp's own driver on the same files at the same fixed length.

    scripts/peers
    .venv/bin/python tests/evidence/heads.py      # ten minutes

Greedy answers of 64 tokens to the bundled prompts. Both draft the same tokens where the driving is the same, so that
accepted ÷ drafted agrees but for the last round of an answer, which is cut at another place.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import DEMO, ROOT, demo_mimo2, save

from ggufspec import DecoderOptions, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS
from ggufspec.models.profile import demo_pair
from lab import peers

LENGTHS, TOKENS, GOAL = (1, 2, 3, 4), 64, 0.02


def ours(target: Path, head: Path, kind: str, length: int) -> dict[str, Any]:
    """Drafted and accepted tokens by position, over all prompts."""
    options = DecoderOptions(ctx_size=1024, threads=2, drafters=(kind,), draft_policy="fixed", draft_max=length)
    drafted, accepted = [0] * length, [0] * length
    with SpeculativeDecoder(target, head, options) as decoder:
        for prompt in PROMPTS:
            for _ in decoder.generate(prompt.text, max_tokens=TOKENS):
                pass
            assert decoder.statistics is not None
            for position in range(length):
                drafted[position] += decoder.statistics.drafted_by_position[position]
                accepted[position] += decoder.statistics.accepted_by_position[position]
    return {"drafted": drafted, "accepted": accepted, "rate": sum(accepted) / max(sum(drafted), 1)}


def theirs(program: Path, target: Path, head: Path, kind: str, length: int) -> dict[str, Any]:
    """The same of llama.cpp's program, positions together."""
    answers = [
        peers.answer(
            program,
            target,
            head,
            prompt.text,
            tokens=TOKENS,
            draft_max=length,
            threads=2,
            ctx_size=1024,
            offload=False,
            spec_type=f"draft-{kind}",
        )
        for prompt in PROMPTS
    ]
    drafted, accepted = sum(one.drafted for one in answers), sum(one.accepted for one in answers)
    return {"drafted": drafted, "accepted": accepted, "rate": accepted / max(drafted, 1)}


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache" / "peers" / "bin", help="folder of the program")
    arguments = parser.parse_args()
    program = peers.find(arguments.peers)
    cases = [("eagle3", demo_pair()[0], DEMO / "demo-eagle3-Q8_0.gguf"), ("mtp", demo_mimo2(), demo_mimo2())]
    results = []
    for kind, target, head in cases:
        for length in LENGTHS:
            mine, other = ours(target, head, kind, length), theirs(program, target, head, kind, length)
            results.append({"head": kind, "length": length, "ours": mine, "llama.cpp": other})
            shares = " ".join(f"{a / max(d, 1):.2f}" for a, d in zip(mine["accepted"], mine["drafted"], strict=True))
            print(
                f"{kind:6} length {length}: ours {mine['rate']:.3f} ({shares}), llama.cpp {other['rate']:.3f}",
                flush=True,
            )
    worst = max(abs(one["ours"]["rate"] - one["llama.cpp"]["rate"]) for one in results)
    print(f"largest difference {worst:.3f} (goal {GOAL})")
    save("heads", {"goal": GOAL, "tokens": TOKENS, "results": results})
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
