"""Two servers of chat answers, ours and llama.cpp's, and what a client sees of one answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from common import ROOT

PROGRAM = ROOT / ".cache" / "peers" / "bin" / "llama-server"
START_S = 300.0


@dataclass(frozen=True)
class Server:
    """One that answers."""

    name: str
    base: str


@dataclass
class Answer:
    """What a client saw of one request; ``prompt_s``, ``decode_s`` and the draft are as the server says."""

    tokens: int
    prompt_tokens: int
    cached: int
    first_s: float
    total_s: float
    prompt_s: float
    decode_s: float
    drafted: int
    accepted: int
    text: str = field(repr=False)


@contextmanager
def ours(name: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """``ggufspec serve`` with these arguments, in a process of its own."""
    command = [sys.executable, "-m", "ggufspec", "serve", *map(str, arguments), "--port", "0", "--json", "-q"]
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        try:
            yield Server(name, json.loads(process.stdout.readline())["endpoint"].rstrip("/"))
        finally:
            process.terminate()


@contextmanager
def theirs(name: str, *arguments: str | Path, log: Path) -> Iterator[Server]:
    """``llama-server`` with these arguments, all layers on the CPU; what it says goes into ``log``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PROGRAM, *arguments, "-ngl", "0", "--fit", "off", "--jinja", "--port", str(port)]
    with log.open("w") as out, subprocess.Popen(list(map(str, command)), stdout=out, stderr=out) as process:
        try:
            base, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while not _is_up(base):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(log.read_text()[-2000:])
                time.sleep(0.2)
            yield Server(name, base)
        finally:
            process.terminate()


def _is_up(base: str) -> bool:
    try:
        return httpx2.get(f"{base}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def ask(client: httpx2.Client, server: Server, path: str, body: Mapping[str, Any]) -> Answer:
    """One streamed, greedy answer."""
    body = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    began, first, text, usage, timings = time.perf_counter(), 0.0, [], {}, {}
    with client.stream("POST", f"{server.base}/v1/{path}", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{server.name}: {response.read()!r}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage, timings = chunk.get("usage") or usage, chunk.get("timings") or timings
            for choice in chunk.get("choices", ()):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if piece:
                    first = first or time.perf_counter() - began
                    text.append(piece)
    return Answer(
        tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached=timings["cache_n"],
        first_s=first,
        total_s=time.perf_counter() - began,
        prompt_s=timings["prompt_ms"] / 1000,
        decode_s=timings["predicted_ms"] / 1000,
        drafted=timings.get("draft_n", 0),
        accepted=timings.get("draft_n_accepted", 0),
        text="".join(text),
    )


def rotated(things: Sequence[Any], by: int) -> list[Any]:
    """Another one first each time."""
    by %= len(things)
    return [*things[by:], *things[:by]]
