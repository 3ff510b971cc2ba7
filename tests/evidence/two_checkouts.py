"""The decoding loop of this checkout against that of another one, answer by answer in turn.

    git clone . /tmp/old && git -C /tmp/old checkout d6575e9 && /tmp/old/scripts/bootstrap
    .venv/bin/python tests/evidence/two_checkouts.py /tmp/old     # ten minutes

Both load the same pair, once, and answer the same prompts in turn; the one that begins changes with every prompt. What
is compared is tokens/s of whole answers after the prompt.

A pair that is loaded second may run faster, on one machine by 4 to 7 %: which checkout loads first alternates from row
to row, so that the mean is right and single rows are not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from common import ROOT, grown_draft, grown_targets, save

from ggufspec.bench.prompts import PROMPTS
from ggufspec.bench.statistics import spread
from ggufspec.models.profile import demo_pair

WAYS = {"target-only": ("none", "fixed"), "fixed": ("draft", "fixed"), "adaptive": ("both", "adaptive")}
GOAL = 0.99

# Runs in either checkout: the options' names are those of before or of now.
PROGRAM = """
import json, sys
from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder

def options(drafter, policy):
    names = DecoderOptions.__dataclass_fields__
    size = "ctx_size" if "ctx_size" in names else "n_ctx"
    who = {"none": (), "both": ("draft", "lookup")}.get(drafter, (drafter,))
    drafting = {"drafters": who} if "drafters" in names else {"drafter": drafter}
    return DecoderOptions(**{size: 1024, "threads": 2, "draft_policy": policy, "draft_max": 4}, **drafting)

target, draft, drafter, policy = sys.argv[1:]
with SpeculativeDecoder(target, None if drafter == "none" else draft, options(drafter, policy)) as decoder:
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = [one.token for one in decoder.generate(asked["prompt"], max_tokens=asked["tokens"],
                                                        sampling=Sampling(temperature=asked["temperature"], seed=1))]
        figures = decoder.statistics
        speed = getattr(figures, "tokens_per_s", None)
        if not speed:  # once it was told with the first token; of an answer of that alone there is none
            speed = len(tokens) / figures.decode_s if figures.decode_s else None
        print(json.dumps({"tokens": tokens, "tokens_per_s": speed}), flush=True)
"""


class Other:
    """A checkout's decoder in a process of its own."""

    def __init__(self, root: Path, pair: tuple[Any, Any], way: tuple[str, str]) -> None:
        command = [str(root / ".venv" / "bin" / "python"), "-P", "-c", PROGRAM, *map(str, pair), *way]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", f"{root} does not start"

    def answer(self, **asked: Any) -> dict[str, Any]:
        """One answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", type=Path, help="the other checkout, with a .venv")
    parser.add_argument("-n", type=int, default=64, help="tokens of an answer")
    parser.add_argument("-r", type=int, default=3, help="answers to each prompt")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=arguments.other, capture_output=True, text=True, check=True
    ).stdout.strip()
    pairs = {"demo": demo_pair(), "1b-Q4_0": (grown_targets(("Q4_0",))["Q4_0"], grown_draft())}
    results = []
    for name, pair in pairs.items():
        for way, how in WAYS.items():
            for temperature in (0.0, 0.8):
                roots = [ROOT, arguments.other]
                turned = sum(divmod(len(results), 2)) % 2
                loaded = {root: Other(root, pair, how) for root in (roots[::-1] if turned else roots)}
                both = [loaded[root] for root in roots]
                for one in both:
                    one.answer(prompt=PROMPTS[0].text, tokens=arguments.n, temperature=temperature)
                samples: tuple[list[dict[str, Any]], ...] = ([], [])
                for turn in range(arguments.r):
                    for index, prompt in enumerate(PROMPTS):
                        order = (0, 1) if (turn + index) % 2 else (1, 0)
                        for which in order:
                            samples[which].append(
                                both[which].answer(prompt=prompt.text, tokens=arguments.n, temperature=temperature)
                            )
                for one in both:
                    one.close()
                new, old = ([one["tokens_per_s"] for one in some] for some in samples)
                ratio = spread([a / b for a, b in zip(new, old, strict=True) if a and b])
                same = [one["tokens"] for one in samples[0]] == [one["tokens"] for one in samples[1]]
                results.append(
                    {
                        "pair": name,
                        "way": way,
                        "temperature": temperature,
                        "ratio": {"median": ratio.median, "ci95": ratio.ci95, "samples": ratio.samples},
                        "same_text": same,
                    }
                )
                text = "the same text" if same else "other text"
                print(
                    f"{name:8} {way:11} T={temperature}: new ÷ old {ratio.median:.3f} ({ratio.ci95}), {text}",
                    flush=True,
                )
    mean = geometric_mean([one["ratio"]["median"] for one in results])
    print(f"geometric mean {mean:.3f} (goal {GOAL})")
    save("two-checkouts", {"goal": GOAL, "other": commit, "geometric_mean": mean, "results": results})
    return 0 if mean >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
