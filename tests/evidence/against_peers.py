"""Our loop against llama.cpp's own ``llama-speculative-simple``: same files, prompts, draft lengths and threads.

    scripts/peers && .venv/bin/python tests/evidence/against_peers.py      # about 15 minutes on two idle cores

Each pair of runs is one of ours and one of theirs, one right after the other, in alternating order. Both decode
greedily; speed is tokens ÷ seconds from the end of the prompt, as the program itself reports it, without loading.
The figure is the ratio ours ÷ theirs over Σ seconds, with the interval of the paired ratios.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from common import ROOT, grown_draft, grown_targets, save

from ggufspec import DecoderOptions, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS
from ggufspec.bench.statistics import paired_ratios
from lab import peers

KINDS = ("F16", "Q4_0")
DRAFT_LENGTHS = (2, 3, 4, 7)
PEERS = ROOT / ".cache" / "peers" / "bin"


def ours(decoder: SpeculativeDecoder, prompt: str, tokens: int) -> dict[str, float]:
    """One answer of ours."""
    ids = [e.token for e in decoder.generate(prompt, max_tokens=tokens)]
    s = decoder.statistics
    assert s is not None
    assert s.tokens == len(ids)
    return {"tokens": s.decoded, "seconds": s.decode_s, "drafted": s.drafted, "accepted": s.accepted}


def theirs(target: Path, draft: Path, prompt: str, tokens: int, draft_max: int, threads: int) -> dict[str, float]:
    """One answer of llama.cpp's program."""
    reported = peers.answer(
        peers.find(PEERS),
        target,
        draft,
        prompt,
        tokens=tokens,
        draft_max=draft_max,
        threads=threads,
        ctx_size=2048,
        offload=False,
    )
    return asdict(reported)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=64, help="tokens an answer")
    parser.add_argument("-r", type=int, default=3, help="repetitions")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("--prompts", type=int, nargs="*", default=[0, 2, 3], help="indices of the bundled prompts")
    arguments = parser.parse_args()
    draft = grown_draft()
    cases = []
    for kind, target in grown_targets(KINDS).items():
        for draft_max in DRAFT_LENGTHS:
            pairs = []
            options = DecoderOptions(
                ctx_size=2048, drafters=("draft",), draft_policy="fixed", draft_max=draft_max, threads=arguments.t
            )
            with SpeculativeDecoder(target, draft, options) as decoder:
                for repetition in range(arguments.r):
                    for place, index in enumerate(arguments.prompts):
                        prompt = PROMPTS[index].text
                        runs = {
                            "ours": lambda p=prompt, d=decoder: ours(d, p, arguments.n),
                            "theirs": lambda p=prompt, t=target, k=draft_max: theirs(
                                t, draft, p, arguments.n, k, arguments.t
                            ),
                        }
                        order = ("ours", "theirs") if (repetition + place) % 2 else ("theirs", "ours")
                        measured = {name: runs[name]() for name in order}
                        pairs.append({"prompt": index, **measured})
            speeds = {
                name: sum(p[name]["tokens"] for p in pairs) / sum(p[name]["seconds"] for p in pairs)
                for name in ("ours", "theirs")
            }
            ratios = paired_ratios(*([p[n]["tokens"] / p[n]["seconds"] for p in pairs] for n in ("ours", "theirs")))
            case = {
                "target": kind,
                "draft_max": draft_max,
                "tokens_per_s": speeds,
                "ratio_of_sums": speeds["ours"] / speeds["theirs"],
                "ratio_median": ratios.median,
                "ratio_ci95": ratios.ci95,
                "pairs": pairs,
            }
            cases.append(case)
            print(
                f"{kind:5} K={draft_max}  ours {speeds['ours']:6.2f}  theirs {speeds['theirs']:6.2f} t/s  "
                f"ratio {case['ratio_of_sums']:.3f}  (median {ratios.median:.3f}, "
                f"95 % {ratios.ci95[0]:.3f} to {ratios.ci95[1]:.3f})",
                flush=True,
            )
            save("against-peers", {"settings": vars(arguments), "cases": cases})


if __name__ == "__main__":
    main()
