"""llama-cpp-python's Llama with our draft beside our own loop: the demo pair, and targets of a billion parameters.

.venv/bin/python tests/evidence/hook.py [--targets demo,F16,Q8_0,Q4_0] [-n 128] [-r 5] [-t 2]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import EVIDENCE, grown_draft, grown_targets, save

from ggufspec.bench import trial, versus
from ggufspec.bench.prompts import PROMPTS
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.models.profile import Pair, demo_pair
from ggufspec.reports.bench import results

TARGETS = ("demo", "F16", "Q8_0", "Q4_0")


def pair(name: str) -> Pair:
    """The demo pair, or a expanded target of this quantisation with the expanded draft."""
    if name == "demo":
        return Pair(name, *demo_pair())
    return Pair(f"1b-{name}", grown_targets((name,))[name], grown_draft())


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One pair's bench with the engine ``hook``; its table is printed."""
    files = pair(name)
    assert files.draft is not None
    spec = trial.TrialJob(
        target=files.target,
        draft=files.draft,
        options=DecoderOptions(threads=arguments.t),
        sampling=Sampling(),
        prompts=tuple(prompt.text for prompt in PROMPTS),
        max_tokens=arguments.n,
    )
    bench = versus.Bench(versus.BenchExperiment(files, spec, arguments.r, engine="hook"))
    bench.run(lambda done, total, what: print(f"{files.name} {done}/{total} {what}", flush=True))
    document = bench.document()
    table = results(document)
    for row in ([column.label for column in table.columns], *table.cells):
        print("  ".join(f"{cell:>14}" for cell in row[:-1]))
    assert document.hook is not None
    print(document.hook.text, flush=True)
    return asdict(document)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="of " + ", ".join(TARGETS))
    parser.add_argument("-n", type=int, default=128, help="tokens an answer")
    parser.add_argument("-r", type=int, default=5, help="trials of each run")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.targets.split(","):
        found[name] = measure(name, arguments)
        save("hook", {"pairs": found}, arguments.folder)


if __name__ == "__main__":
    main()
