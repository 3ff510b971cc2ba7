"""A job for a child: it renders a chat template, whatever that does to the process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime

from ggufspec import child
from ggufspec.llamacpp.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Spec:
    """The template."""

    source: str


@dataclass(frozen=True, slots=True)
class Result:
    """The prompt."""

    text: str


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:
    del emit, stopping
    said = [{"role": "user", "content": "Hi"}]
    return Result(ChatTemplate(spec.source, datetime(2026, 11, 26)).render(said))
