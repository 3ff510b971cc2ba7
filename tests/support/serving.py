"""The endpoint as a user starts it: ``ggufspec serve`` in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import PATIENCE_S, Cli

# As Qwen2.5's and Hermes' templates do it: tools in the system prompt, calls between tags.
HERMES = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- 'You may call functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nFor each call, return a JSON object with its name and arguments:\\n' }}
{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Server:
    """An endpoint that runs."""

    url: str  # without a slash at its end
    process: subprocess.Popen[str]
    document: dict[str, Any]  # what --json printed

    @property
    def base(self) -> str:
        """What clients call the base URL."""
        return f"{self.url}/v1"


@contextlib.contextmanager
def serving(cli: Cli, folder: Path, *arguments: str | Path, template: str | None = HERMES) -> Iterator[Server]:
    """``ggufspec serve demo`` with these arguments, until the block's end.

    Args:
        cli: the command line.
        folder: for files of the server.
        arguments: further ones.
        template: its chat template; None: the pair's own, which is none.
    """
    words: list[str | Path] = ["serve", "demo", "--port", "0", "--json"]
    if template is not None:
        path = folder / "template.jinja"
        path.write_text(template, encoding="utf-8")
        words += ["--chat-template", path]
    with (folder / "stderr.txt").open("w+", encoding="utf-8") as log:
        process = cli.start(*words, *arguments, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            document = _first_document(process)
            assert document, (folder / "stderr.txt").read_text(encoding="utf-8")
            yield Server(document["endpoint"].rstrip("/"), process, document)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
                process.wait()


def _first_document(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it prints first: one JSON document, on one line or more; empty where it ends before."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.loads(text)
            return found
    return {}
