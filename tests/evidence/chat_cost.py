"""What llama.cpp's chat library costs a chat: first tokens against another checkout's, and long answers with tools.

    git worktree add /tmp/old COMMIT && cp -r .venv /tmp/old
    .venv/bin/python tests/evidence/chat_cost.py /tmp/old --model SmolLM2-135M-Instruct.Q4_1.gguf

A request of one token is asked of both checkouts in turn, each with a question of its own, so that nothing is cached
but the beginning that all prompts share. Then answers of up to 4,000 tokens are streamed from this checkout's server,
with two tools and without, in turn; what counts is the time of a token from the prompt's end on, as a client sees it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from common import EVIDENCE, ROOT, save

from ggufspec.bench.statistics import paired_ratios

sys.path.insert(0, str(ROOT))
from tests.support.chat_templates import NOTE, WEATHER

GOALS = {"first token ÷ the other checkout's": 1.02, "tokens/s with tools ÷ without": 0.99}


@contextmanager
def serving(checkout: Path, model: Path, ctx_size: int, folder: Path) -> Iterator[str]:
    """The address of a server of a checkout."""
    words = [
        sys.executable,
        "-m",
        "ggufspec",
        "serve",
        "-m",
        model,
        "-c",
        ctx_size,
        "-t",
        2,
        "--port",
        0,
        "--json",
        "-q",
    ]
    variables = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder)}
    with subprocess.Popen(
        [*map(str, words)], stdout=subprocess.PIPE, text=True, env=variables, cwd=checkout
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["endpoint"].rstrip("/")
        finally:
            process.terminate()


def streamed(client: httpx2.Client, base: str, question: str, most: int, **more: Any) -> tuple[float, float, int]:
    """Seconds to the first piece and to the end, and tokens."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": most, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **more}
    began, first, tokens = time.perf_counter(), 0.0, 0
    with client.stream("POST", f"{base}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            if not first and any((one.get("delta") or {}).get("content") for one in chunk.get("choices", ())):
                first = time.perf_counter() - began
    return first, time.perf_counter() - began, tokens


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("-n", type=int, default=40, help="requests of one token")
    parser.add_argument("-r", type=int, default=3, help="long answers")
    parser.add_argument("--folder", type=Path, default=EVIDENCE)
    arguments = parser.parse_args()
    firsts: dict[str, list[float]] = {"this": [], "other": []}
    rates: dict[str, list[float]] = {"tools": [], "plain": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(httpx2.Client(timeout=3600))
        ways = {"this": ROOT, "other": arguments.other}
        bases = {name: stack.enter_context(serving(path, arguments.model, 8192, folder)) for name, path in ways.items()}
        for number in range(arguments.n + 2):
            for name in sorted(ways, reverse=bool(number % 2)):
                first, _, _ = streamed(client, bases[name], f"What is {number} plus {number}?", 1)
                firsts[name] += [first] if number >= 2 else []
        for number in range(arguments.r):
            for name in sorted(rates, reverse=bool(number % 2)):
                tools = {"tools": [WEATHER, NOTE]} if name == "tools" else {}
                bias = {"logit_bias": {"2": -100}}  # SmolLM2's end: the answer is as long as it may be
                first, total, tokens = streamed(client, bases["this"], "Tell a long story.", 4000, **bias, **tools)
                rates[name].append(tokens / (total - first))
                print(name, tokens, f"{rates[name][-1]:.1f} tokens/s", flush=True)
    ratios = {
        "first token ÷ the other checkout's": paired_ratios(firsts["this"], firsts["other"]),
        "tokens/s with tools ÷ without": paired_ratios(rates["tools"], rates["plain"]),
    }
    figures = {name: {"limit": GOALS[name], **asdict(found)} for name, found in ratios.items()}
    for name, found in ratios.items():
        print(f"{name}: {found.median:.3f} ({found.ci95[0]:.3f} to {found.ci95[1]:.3f}), goal {GOALS[name]}")
    print({name: median(found) for name, found in firsts.items()})
    print(save("chat-cost", {"figures": figures, "first_s": firsts, "tokens_per_s": rates}, arguments.folder))


if __name__ == "__main__":
    main()
