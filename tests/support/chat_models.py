"""Models to chat with: the bundled pair with chat templates, or with other bytes for its line ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from tests.support.gguf_files import rewritten

PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAILING = "{{ messages[0]['content'].nothing() }}"
LOOPING = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LINE_END, _ESCAPE = "Ċ", "ě"  # how byte-level BPE writes 0x0a and 0x1b


def with_marks(source: Path, path: Path, template: str = CHATML) -> Path:
    """The model with a chat template; its two last tokens become the marks of :data:`CHATML`."""

    def marked(name: str, value: Any) -> Any:
        if name == "tokenizer.ggml.tokens":
            return [*value[:-2], START, END]
        if name == "tokenizer.ggml.token_type":
            return [*value[:-2], gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        return value

    return rewritten(source, path, value=marked, template=template)


def with_escapes(source: Path, path: Path) -> Path:
    """The model with line ends and escapes exchanged: where it means the one it writes the other."""
    exchanged = str.maketrans(_LINE_END + _ESCAPE, _ESCAPE + _LINE_END)

    def exchange(name: str, value: Any) -> Any:
        return [text.translate(exchanged) for text in value] if name == "tokenizer.ggml.tokens" else value

    return rewritten(source, path, value=exchange)
