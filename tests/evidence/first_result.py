"""What ``ggufspec bench`` without a pair shows, and what it would show on processors that are not here.

    .venv/bin/python tests/evidence/first_result.py A.json B.json C.json    # of `ggufspec bench --export-json`

Put into one record are benches of this machine, and a forecast for others: the demo pair's own text, and the chains
that its draft would draft at every place of it, are decoded by the real loop, lookup and controller in virtual time
(``replay.py``). Batches take the seconds of a table that was measured there on a model of a billion parameters in F16,
by the ratio of the files' bytes, since F16 weights are read as fast at any size.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import save
from replay import WIDTH, chains, session

from ggufspec import DecoderOptions, SpeculativeDecoder, load_profile
from ggufspec.bench.prompts import PROMPTS, Prompt
from ggufspec.decoding.options import ROWS
from ggufspec.models.profile import demo_pair

GROWN_BYTES, TARGET_BYTES = 2.47e9, 0.725e9  # of the model of the tables, of demo-360m's target
# Milliseconds by width on two cores: a target of a billion parameters in F16, and one of 25 MB in Q8_0. The draft's are
# of this project's own machine, made slower by as much as Q8_0 is slower there.
PROCESSORS: dict[str, tuple[dict[int, float], float]] = {
    "Intel Xeon with AMX": ({1: 83, 4: 94, 8: 154, 16: 261}, 41 / 36),
    "an AMD EPYC of earlier records": ({1: 52, 2: 66, 3: 72, 4: 74, 5: 80, 6: 77, 8: 100, 12: 118, 16: 153}, 1.0),
}
DRAFT_MS = {1: 1.3, 2: 1.6, 4: 1.7, 8: 2.1, 16: 2.6, 32: 4.0, 64: 7.0}
SEEDS = 16


def collect(prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
    """What the demo pair says after the bundled prompts, and would draft at every place of it."""
    target, draft = demo_pair()
    kinds: dict[str, Any] = {}
    with SpeculativeDecoder(
        target, draft, DecoderOptions(drafters=("draft",), draft_policy="fixed", threads=1)
    ) as decoder:
        for number, prompt in enumerate(prompts):
            ids = decoder.target.tokenize(prompt.text)
            answer = [one.token for one in decoder.generate(ids, max_tokens=tokens, alone="target")]
            decoder._target.rewind(0)
            rows = decoder._target.decode(ids[:-1], outputs=ROWS)
            text: dict[str, Any] = {"prompt": ids, "tokens": ids + answer, "drafts": {}}
            text["choices"] = [int(row.argmax()) for row in rows]
            text["drafts"]["demo"] = chains(decoder, text)
            kinds[f"{prompt.kind} {number}"] = text
    return kinds


def forecast(kinds: dict[str, Any], target_ms: dict[int, float], draft_factor: float) -> dict[str, Any]:
    """Speedup over target-only of a session of all prompts, and of each."""
    import numpy as np

    share = TARGET_BYTES / GROWN_BYTES
    every = np.interp(range(1, WIDTH + 1), list(target_ms), list(target_ms.values())) * share / 1e3
    document = {
        "kinds": kinds,
        "target_s": dict(enumerate(map(float, every), 1)),
        "draft_s": {"demo": {width: ms * draft_factor / 1e3 for width, ms in DRAFT_MS.items()}},
    }
    ratios: list[float] = []
    by_prompt: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(SEEDS):
        with_draft, alone = (list(session(document, "demo", mode, seed)) for mode in ("both", "target-only"))
        for kind, a, b in zip(kinds, with_draft, alone, strict=True):
            by_prompt[kind].append(a / b)
        ratios.append(sum(1 / b for b in alone) / sum(1 / a for a in with_draft))  # as many tokens of each
    return {
        "target_ms": {str(width): round(1e3 * document["target_s"][width], 2) for width in (1, 2, 4, 8, 16)},
        "speedup": {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)},
        "by_prompt": {kind: statistics.median(found) for kind, found in by_prompt.items()},
    }


def main() -> int:
    """Forecast, print and save, with the benches that are named."""
    bench = load_profile("demo-360m").bench
    assert bench.prompts
    assert bench.max_tokens
    chosen = collect([prompt for prompt in PROMPTS if prompt.kind in bench.prompts], bench.max_tokens)
    every = collect(PROMPTS, bench.max_tokens)
    forecasts = {
        name: {"measured_by_default": forecast(chosen, *table), "all_bundled_prompts": forecast(every, *table)}
        for name, table in PROCESSORS.items()
    }
    for name, found in forecasts.items():
        print(name, {which: round(one["speedup"]["median"], 2) for which, one in found.items()})
    measured = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    sys.argv[1:] = [Path(name).name for name in sys.argv[1:]]
    for one in measured:
        one["pair"] |= {role: Path(one["pair"][role]).name for role in ("target", "draft")}
        print(one["verdict"]["text"])
    save("first-result", {"forecasts": forecasts, "measured": measured})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
