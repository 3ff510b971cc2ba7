"""Several clients at once: ``ggufspec serve --parallel N`` against ``llama-server -np N`` of the same source.

    scripts/real-models qwen-coder Q4_K_M && scripts/peers llama-server
    .venv/bin/python tests/evidence/many_clients.py --targets Q4_K_M

1, 2, 4 and 8 clients ask at the same moment, each another task (real_pair_tasks.py), greedy and streamed. What is timed
is what the clients see: the tokens of all answers ÷ the seconds from the first request to the last token, and the
seconds to each client's first token. A repetition asks every server the same, one right after the other, in an order
that rotates; its prompts differ in their first words, so that nothing is cached. Servers:

- ``ggufspec``: the default, with the draft and the lookup; ``ggufspec target-only``: ``--no-draft``;
- ``llama-server``: target-only, with its n-gram kinds ``ngram-simple`` and ``ngram-mod``, and with so many tokens of
  the draft model a round.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from common import save
from real_pair import DRAFT, MODELS, TARGETS
from real_pair_tasks import MESSAGES
from servers import Answer, Server, ask, ours, rotated, theirs

from ggufspec.bench.statistics import paired_mean
from ggufspec.hardware.host import physical_cores

CTX_SIZE = 2048
OWN = ("ggufspec", "ggufspec target-only")


def servers(target: Path, draft: Path | None, most: int, lengths: Sequence[int], folder: Path) -> list[Any]:
    """Context managers of all servers, each for ``most`` clients with ``CTX_SIZE`` tokens of context each."""
    threads, pair = str(physical_cores()), ["-m", target, *(["-md", draft] if draft else [])]
    own = ["-c", str(CTX_SIZE), "-t", threads, "--parallel", str(most)]
    cells = ["-c", str(most * CTX_SIZE), "-t", threads, "-np", str(most)]
    found: list[AbstractContextManager[Server]] = [
        ours(OWN[0], *pair, *own, environment={"XDG_CACHE_HOME": str(folder / "default")}),
        ours(OWN[1], "-m", target, "--no-draft", *own, environment={"XDG_CACHE_HOME": str(folder / "target-only")}),
    ]
    kinds = {"target-only": [], "ngram-simple": ["--spec-type", "ngram-simple"]}
    kinds |= {"ngram-mod": ["--spec-type", "ngram-mod"]}
    for length in lengths if draft else ():
        drafting = ["-md", draft, "-ngld", "0", "--spec-type", "draft-simple", "--spec-draft-n-max", str(length)]
        kinds[f"draft-{length}"] = drafting
    for kind, more in kinds.items():
        name = f"llama-server {kind}"
        found.append(theirs(name, "-m", target, *cells, *more, log=folder / f"{kind}.log"))
    return found


def together(server: Server, clients: int, tokens: int, repetition: int) -> tuple[float, list[Answer]]:
    """Seconds until all clients have their answers, and the answers."""
    tasks = rotated(list(MESSAGES), repetition * clients)
    start = threading.Barrier(clients + 1)

    def one(index: int) -> Answer:
        first, *rest = MESSAGES[tasks[index % len(tasks)]]
        messages = [{**first, "content": f"Session {clients}.{repetition}.{index}. {first['content']}"}, *rest]
        with httpx2.Client(timeout=3600) as client:
            start.wait()
            return ask(client, server, "chat/completions", {"messages": messages, "max_tokens": tokens})

    with ThreadPoolExecutor(clients) as pool:
        answers = [pool.submit(one, index) for index in range(clients)]
        start.wait()
        began = time.perf_counter()
        found = [answer.result() for answer in answers]
        return time.perf_counter() - began, found


def summary(rows: list[dict[str, Any]], clients: Sequence[int]) -> dict[str, Any]:
    """By number of clients, ours ÷ llama-server's fastest kind, and ÷ our own target-only."""
    found: dict[str, Any] = {}
    for count in clients:
        of = [row for row in rows if row["clients"] == count]
        rates: dict[str, list[float]] = {}
        for row in of:
            rates.setdefault(row["server"], []).append(row["tokens_per_s"])
        firsts = {name: [max(row["first_s"]) for row in of if row["server"] == name] for name in rates}
        rivals = {name: geometric_mean(values) for name, values in rates.items() if name not in OWN}
        best = max(rivals, key=lambda name: rivals[name])
        quickest = min((name for name in rivals), key=lambda name: sum(firsts[name]))
        found[str(count)] = {
            "tokens_per_s": {name: geometric_mean(values) for name, values in rates.items()},
            "best_rival": best,
            "over_best_rival": asdict(paired_mean(rates[OWN[0]], rates[best])),
            "over_target_only": asdict(paired_mean(rates[OWN[0]], rates[OWN[1]])),
            "worst_first_s": {name: sum(values) / len(values) for name, values in firsts.items()},
            "worst_first_over_quickest": asdict(paired_mean(firsts[OWN[0]], firsts[quickest])),
        }
    ratios = [one["over_best_rival"]["median"] for one in found.values()]
    return {**found, "over_best_rival": {"geomean": geometric_mean(ratios), "worst": min(ratios)}}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=128, help="tokens an answer")
    parser.add_argument("-r", type=int, default=2, help="repetitions")
    parser.add_argument("--targets", default="Q4_K_M,SmolLM2")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--lengths", default="3", help="draft lengths of llama-server")
    parser.add_argument("--folder", type=Path, help="write the JSON there")
    options = parser.parse_args()
    clients = [int(one) for one in options.clients.split(",")]
    lengths = [int(one) for one in options.lengths.split(",") if one]
    body: dict[str, Any] = {"tokens": options.n, "repetitions": options.r, "targets": {}}
    for name in options.targets.split(","):
        draft = None if name == "SmolLM2" else MODELS / DRAFT
        rows: list[dict[str, Any]] = []
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            managers = servers(MODELS / TARGETS[name], draft, max(clients), lengths, folder)
            standing = [stack.enter_context(one) for one in managers]
            for server in standing:  # to be warm
                together(server, 2, 32, -1)
            for repetition in range(options.r):
                for count in clients:
                    for server in rotated(standing, repetition + count):
                        seconds, answers = together(server, count, options.n, repetition)
                        row = {
                            "server": server.name,
                            "clients": count,
                            "repetition": repetition,
                            "seconds": seconds,
                            "tokens_per_s": sum(one.tokens for one in answers) / seconds,
                            "first_s": [one.first_s for one in answers],
                            "tokens": [one.tokens for one in answers],
                            "drafted": sum(one.drafted for one in answers),
                            "accepted": sum(one.accepted for one in answers),
                        }
                        rows.append(row)
                        print(name, {key: row[key] for key in ("server", "clients", "tokens_per_s")}, flush=True)
        found = summary(rows, clients)
        print(name, found, flush=True)
        body["targets"][name] = {"summary": found, "rows": rows}
    print(save("many-clients", body, *([options.folder] if options.folder else [])))


if __name__ == "__main__":
    main()
