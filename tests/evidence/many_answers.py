"""Several answers at once: whether each text is target-only's, and whether a server's memory grows.

    .venv/bin/python tests/evidence/many_answers.py                      # five minutes

``identity``: the demo pair generates 200 answers, four at once, each begun at a random step; greedy and at temperature
0.8. In strict mode every token must equal target-only's in a conversation of its own. Without it, a greedy answer's
first token that differs is judged by target-only's logits there: how much the two tokens' logits differ, as a share of
the range of all logits. ``memory``: resident bytes of ``ggufspec serve demo`` and of its child
process after 200 and after 2,000 requests of four clients, a third of which leave early.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import numpy as np
import psutil
from common import save
from servers import ours

from ggufspec import Sampling, SpeculativeDecoder, demo_pair
from ggufspec.decoding.answer import AnswerRequest, Emitted
from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions

AT_ONCE, CTX_SIZE = 4, 512
STARTS = ("import os\n\ndef ", "class Reader:\n    def ", "for name in names:\n    ", "# 1. ", "def read_file(path):\n")


def prompts(count: int) -> list[str]:
    """Return different prompts."""
    return [f"# part {number}\n{STARTS[number % len(STARTS)]}" for number in range(count)]


def several(decoder: SpeculativeDecoder, texts: Sequence[str], tokens: int, sampling: Sampling) -> list[list[int]]:
    """Return the answers' tokens; each answer begins at a random step, in any free conversation."""
    chance, found = random.Random(7), [list[int]() for _ in texts]
    waiting, free = list(range(len(texts)))[::-1], list(range(AT_ONCE))
    with decoder.group() as group:
        while waiting or group.running:
            while waiting and free and (not group.running or chance.random() < 0.3):
                index = waiting.pop()

                def take(emitted: Emitted, index: int = index) -> bool:
                    found[index].append(emitted.token)
                    return True

                place = free.pop(chance.randrange(len(free)))
                group.begin(place, AnswerRequest(texts[index], tokens, sampling), take)
            for ended in group.step():
                assert ended.failure is None
                free.append(ended.sequence)
    return found


def gap(target: Context, prompt: Sequence[int], own: Sequence[int], other: Sequence[int]) -> float:
    """Return the difference of the logits of the first two tokens that differ ÷ the range of all logits; 0 is a tie."""
    place = next(index for index, (one, two) in enumerate(zip(own, other, strict=False)) if one != two)
    target.rewind(0)
    row = target.decode([*prompt, *own[:place]], 1)[0]
    return float(abs(row[own[place]] - row[other[place]]) / np.ptp(row))


def identity(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return a row for each mode and temperature."""
    rows = []
    for strict in (True, False):
        for temperature in (0.0, 0.8):
            sampling = Sampling(temperature=temperature, seed=11)
            options = DecoderOptions(ctx_size=CTX_SIZE, threads=1, parallel=AT_ONCE, strict=strict)
            texts = prompts(count)
            with SpeculativeDecoder(*demo_pair(), options) as decoder:
                alone = {"max_tokens": tokens, "sampling": sampling, "alone": "target"}
                own = [[one.token for one in decoder.generate(text, **alone)] for text in texts]
                found = several(decoder, texts, tokens, sampling)
            differ = [index for index in range(count) if own[index] != found[index]]
            row = {"strict": strict, "temperature": temperature, "answers": count, "tokens": sum(map(len, found))}
            row["differ"] = len(differ)
            if differ and not temperature:
                with Model(demo_pair()[0]) as model, closing(Context(model, ContextOptions(CTX_SIZE, 1, 1))) as target:
                    found_gaps = [
                        gap(target, model.tokenize(texts[index], special=True), own[index], found[index])
                        for index in differ
                    ]
                row |= {"gap_median": median(found_gaps), "gap_most": max(found_gaps)}
            rows.append(row)
            print(row, flush=True)
    return rows


def resident_mib(process: psutil.Process) -> list[float]:
    """Return the resident memory of a server and of its child that decodes."""
    (child,) = (one for one in process.children(recursive=True) if "ggufspec.serve.session" in " ".join(one.cmdline()))
    return [one.memory_info().rss / 2**20 for one in (process, child)]


def memory(requests: int) -> dict[str, Any]:
    """Return the resident memory after a tenth of the requests and after all."""

    def ask(base: str, number: int) -> None:
        chance = random.Random(number)
        body = {"prompt": chance.choice(STARTS) + str(number), "max_tokens": 24, "stream": True, "temperature": 0.8}
        leaves = chance.random() < 1 / 3
        with httpx2.Client(timeout=600) as client, client.stream("POST", f"{base}/completions", json=body) as response:
            for count, _ in enumerate(response.iter_lines()):
                if leaves and count > 4:
                    break

    found: dict[str, Any] = {"requests": requests}
    with (
        tempfile.TemporaryDirectory() as folder,
        ours("demo", "demo", environment={"XDG_CACHE_HOME": folder}) as server,
    ):
        process = next(p for p in psutil.Process().children(recursive=True) if "serve" in p.cmdline())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for name, numbers in (("tenth", range(requests // 10)), ("all", range(requests // 10, requests))):
                list(pool.map(lambda number: ask(server.base, number), numbers))
                found[f"mib_{name}"] = resident_mib(process)
    found["growth"] = [after / before for before, after in zip(found["mib_tenth"], found["mib_all"], strict=True)]
    print(found, flush=True)
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("-n", type=int, default=48, help="tokens an answer")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="write the JSON there")
    options = parser.parse_args()
    body = {"identity": identity(options.answers, options.n), "memory": memory(options.requests)}
    print(save("many-answers", body, *([options.folder] if options.folder else [])))


if __name__ == "__main__":
    main()
