"""Real servers for the tests of the endpoint: ``ggufspec serve`` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATIENCE_S = 240.0
VARIABLES: dict[str, str] = {}  # further variables of the servers' environment


@dataclass
class Endpoint:
    """A server that runs."""

    base: str
    process: subprocess.Popen[bytes]
    document: dict[str, Any]

    def client(self, **more: Any) -> httpx2.Client:
        """A client of it."""
        return httpx2.Client(base_url=self.base, timeout=PATIENCE_S, **more)

    @property
    def child(self) -> psutil.Process:
        """The process that runs llama.cpp."""
        return next(one for one in psutil.Process(self.process.pid).children() if one.status() != psutil.STATUS_ZOMBIE)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stderr.decode()


@contextmanager
def serving(
    folder: Path, *arguments: str | Path, pair: tuple[str | Path, ...] = ("demo",), **variables: str
) -> Iterator[Endpoint]:
    """``ggufspec serve`` on a free port, ready to answer; by one thread, as two spin where other tests run.

    ``variables`` are of its environment.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GGUFSPEC_", "HF_"))}
    environment |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), **VARIABLES, **variables}
    words = [sys.executable, "-m", "ggufspec", "serve", *pair, "--port", "0", "--json", "-t", "1", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=folder) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                assert process.stderr is not None
                raise AssertionError(process.stderr.read().decode())
            document = json.loads(line)
            yield Endpoint(document["endpoint"], process, document)
        finally:
            if process.poll() is None:
                process.kill()


def template(folder: Path, text: str = CHATML) -> Path:
    """A chat template's file."""
    path = folder / "template.jinja"
    path.write_text(text, encoding="utf-8")
    return path


def events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """The documents of a stream, up to its ``[DONE]``."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])
