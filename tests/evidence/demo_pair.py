"""Is the demo pair worth drafting for? Greedy acceptance on held-out prompts, and cost per token of both models.

    .venv/bin/python tests/evidence/demo_pair.py        # a minute

Held-out prompts are of two kinds: pieces of the source files and topics that training never saw (training.json lists
them), and the bundled prompts of the bench, which were written for it and are in no corpus.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import time
from pathlib import Path
from pydoc_data.topics import topics

from common import save

from ggufspec import DecoderOptions, Sampling, SpeculativeDecoder
from ggufspec.bench.prompts import PROMPTS
from ggufspec.models.profile import demo_pair

DRAFT_MAX, TOKENS = 4, 256


def held_out_prompts(record: Path) -> list[str]:
    """About 400 characters from the middle of each held-out document."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for name in json.loads(record.read_text())["corpus"]["held_out"]:
        topic = name.removeprefix("topics/")
        text = topics[topic] if name != topic else (library / name).read_text(encoding="utf-8", errors="replace")
        if len(text) >= 400:
            middle = text.rfind("\n", 0, len(text) // 2) + 1
            texts.append(text[middle : middle + 400])
    return texts


def acceptance(decoder: SpeculativeDecoder, prompts: list[str], sampling: Sampling) -> dict[str, object]:
    """Accepted ÷ drafted over all prompts, and by position."""
    drafted, accepted = [0] * DRAFT_MAX, [0] * DRAFT_MAX
    for prompt in prompts:
        for _ in decoder.generate(prompt, max_tokens=TOKENS, sampling=sampling):
            pass
        s = decoder.statistics
        assert s is not None
        drafted = [a + b for a, b in zip(drafted, s.drafted_by_position, strict=True)]
        accepted = [a + b for a, b in zip(accepted, s.accepted_by_position, strict=True)]
    return {
        "prompts": len(prompts),
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "acceptance_rate": sum(accepted) / sum(drafted),
        "accepted_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
    }


def token_seconds(path: Path, threads: int) -> float:
    """Median seconds of a single-token decode with some context."""
    with SpeculativeDecoder(path, None, DecoderOptions(ctx_size=1024, threads=threads)) as decoder:
        model = decoder._pair.target
        model.decode(list(range(5, 105)), 0)
        samples = []
        for i in range(300):
            began = time.perf_counter()
            model.decode([i + 5], 1)
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def main() -> None:
    """Measure, print, save."""
    target, draft = demo_pair()
    prompts = {
        "documents": held_out_prompts(target.parent / "training.json"),
        "bundled": [prompt.text for prompt in PROMPTS],
    }
    prompts["all"] = [*prompts["documents"], *prompts["bundled"]]
    results: dict[str, object] = {}
    with SpeculativeDecoder(
        target, draft, DecoderOptions(drafters=("draft",), draft_policy="fixed", draft_max=DRAFT_MAX, threads=1)
    ) as decoder:
        for kind, texts in prompts.items():
            for name, sampling in (("greedy", Sampling()), ("temperature 0.8", Sampling(temperature=0.8))):
                results[f"{kind}, {name}"] = figures = acceptance(decoder, texts, sampling)
                print(f"{kind:9} {name:16} acceptance {figures['acceptance_rate']:.3f}", flush=True)
        parameters = {"target": decoder.target.parameters, "draft": decoder.draft.parameters if decoder.draft else 0}
    costs = []
    for threads in (1, 2):
        rounds = [(token_seconds(target, threads), token_seconds(draft, threads)) for _ in range(5)]
        ratios = [t / d for t, d in rounds]
        costs.append({"threads": threads, "seconds": rounds, "ratio_median": statistics.median(ratios)})
        print(
            f"{threads} threads: target {rounds[0][0] * 1e3:.3f} ms, draft {rounds[0][1] * 1e3:.3f} ms, "
            f"ratio {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
            flush=True,
        )
    ratio = parameters["target"] / parameters["draft"]
    print(f"parameters: {parameters['target']:,} and {parameters['draft']:,}, ratio {ratio:.1f}")
    save(
        "demo-pair",
        {"draft_max": DRAFT_MAX, "tokens": TOKENS, "acceptance": results, "parameters": parameters, "cost": costs},
    )


if __name__ == "__main__":
    main()
