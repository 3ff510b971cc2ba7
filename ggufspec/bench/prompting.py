"""Conversion of prompts, from files or bundled, to the texts of a trial, by the target's chat template.

A template is untrusted code, and tokenizing needs the model file: both happen in a child process, once per command.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec import child
from ggufspec.bench.prompts import PROMPTS, REQUESTS, Prompt
from ggufspec.errors import ChildError, GgufspecError, ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.llamacpp.chat_template import ChatTemplate
from ggufspec.llamacpp.model import Model
from ggufspec.models.headers import read_headers
from ggufspec.prompting.prompt import WITHOUT_TEMPLATE

MOST_PROMPTS = 32  # maximum; of more prompts an evenly spaced sample is used
MOST_FILE_BYTES = 64 << 20  # holds a log of some ten thousand requests
MOST_LINE_BYTES = 1 << 20  # holds some hundred thousand tokens
_FORMS = 'a line is a text, or JSON: {"prompt": "…"}, or {"messages": […], "tools": […]} as in a request'
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Spec:
    """Prompts for a model; ``raw``: without its chat template.

    Without ``prompts`` the bundled ones are used: requests if there is a chat template, else texts to continue; of the
    ``kinds``, if given, every ``every``-th.
    """

    target: Path
    prompts: tuple[Prompt, ...] = ()
    raw: bool = False
    kinds: tuple[str, ...] = ()
    every: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Texts of a trial, with their ``kinds`` and lengths in ``tokens``; ``templated``: by the chat template."""

    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    tokens: tuple[int, ...]
    templated: bool
    notes: tuple[str, ...] = ()

    @property
    def trial(self) -> dict[str, Any]:
        """Fields for :class:`ggufspec.bench.trial.Spec`."""
        return {"prompts": self.texts, "kinds": self.kinds, "templated": self.templated}


def prepare(spec: Spec, *, verbose: bool = False) -> Result:
    """Make the texts, in a child process.

    Raises:
        UsageError: no bundled prompt is of these kinds; the chat template does not support a prompt's tools.
        ModelError: the file is damaged, or its chat template fails.
    """
    count = len(spec.prompts)
    notes: tuple[str, ...] = ()
    if count > MOST_PROMPTS:
        spread = (spec.prompts[number * count // MOST_PROMPTS] for number in range(MOST_PROMPTS))
        spec = replace(spec, prompts=tuple(spread))
        notes = (f"{MOST_PROMPTS} of the {count:,} prompts are used, at equal distances",)
    try:
        found = child.call(__name__, spec, Result, verbose=verbose)
    except (ModelError, ChildError):
        read_headers([spec.target])  # its error says what is wrong with a damaged file
        raise
    return replace(found, notes=(*notes, *found.notes))


def run(spec: Spec, emit: child.Emit, stopping: threading.Event) -> Result:  # noqa: ARG001
    """Make the texts in this process, without loading weights."""
    with Model(spec.target, vocab_only=True) as model:
        source = "" if spec.raw else model.chat_template.strip()
        prompts = spec.prompts or _bundled(REQUESTS if source else PROMPTS, spec)
        notes: list[str] = []
        texts = list(_templated(model, prompts, notes) if source else map(_plain, prompts))
        tokens = [len(model.tokenize(text, special=True)) for text in texts]
    kinds = tuple(one.kind for one in prompts)
    return Result(tuple(texts), kinds, tuple(tokens), bool(source), tuple(dict.fromkeys(notes)))


def _bundled(prompts: Sequence[Prompt], spec: Spec) -> tuple[Prompt, ...]:
    found = tuple(one for one in prompts if not spec.kinds or one.kind in spec.kinds)
    if not found:
        known = ", ".join(dict.fromkeys(one.kind for one in prompts))
        raise UsageError(
            f"no bundled prompt for {spec.target.name} is of kind {' or '.join(spec.kinds)}",
            f"the profile's [bench] may have prompts of {known}",
        )
    return found[:: spec.every]


# ---- by the chat template --------------------------------------------------------------------------------------------


def _templated(model: Model, prompts: Sequence[Prompt], notes: list[str]) -> Iterator[str]:
    """Yield the text of each prompt by the template, without the BOS token that tokenizing adds."""
    bos, _ = model.token_texts
    template = ChatTemplate.of(model, hint=WITHOUT_TEMPLATE)
    for prompt in prompts:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        try:
            text = template.render(messages, tools=prompt.tools)
            ignored = bool(prompt.tools) and text == template.render(messages)
        except ModelError as error:
            raise ModelError(
                f"{prompt.origin}: {error.message}" if prompt.origin else error.message, WITHOUT_TEMPLATE
            ) from None
        if ignored and prompt.origin:
            raise UsageError(
                f"{prompt.origin} offers tools, and the chat template of {model.path.name} does not know them",
                f'leave "tools" out of the line; {WITHOUT_TEMPLATE}',
            )
        if ignored:
            notes.append(f"the chat template does not know tools: the prompt of kind {prompt.kind} has none")
        first = bos if model.first_token is not None else ""
        yield text.removeprefix(first)


def _plain(prompt: Prompt) -> str:
    return prompt.text or "\n\n".join(one["content"] for one in prompt.messages if one["content"])


# ---- files -----------------------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read the prompts of a file: one per line, plain text or, if the file's name or first line says so, JSON.

    A JSON line is a text, ``{"prompt": "…"}`` or a request of OpenAI's chat API, whose ``messages`` and ``tools`` are
    used; ``kind`` may be next to them. Empty lines are skipped.

    Raises:
        UsageError: the file cannot be read or has no prompt, or a line is not a prompt; names the line.
    """
    lines = untrusted.read_bytes(path, MOST_FILE_BYTES, failure=UsageError).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    written = [(f"line {number} of {path.name}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not written:
        raise UsageError(f"{path} has no prompts: it is empty", _FORMS)
    is_json = path.suffix in (".jsonl", ".ndjson", ".json") or written[0][1].lstrip().startswith(b'{"')
    return tuple(_of_line(_text(line, origin), origin, is_json=is_json) for origin, line in written)


def _text(line: bytes, origin: str) -> str:
    if len(line) > MOST_LINE_BYTES:
        raise UsageError(f"{origin} has {len(line) >> 20} MiB, more than any prompt", "leave the line out")
    try:
        text = line.decode("utf-8").rstrip("\r")
    except UnicodeDecodeError:
        raise UsageError(f"{origin} is not UTF-8 text", "convert the file to UTF-8, with iconv for example") from None
    if found := _NO_TEXT.search(text):
        raise UsageError(f"{origin} has the byte 0x{ord(found[0]):02x}, which no text has", "leave the line out")
    return text


def _of_line(text: str, origin: str, *, is_json: bool) -> Prompt:
    if not is_json:
        return Prompt("", text, origin=origin)
    try:
        value = untrusted.parse_json(text, origin)
        value = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise UsageError(f"{origin} is not a prompt", _FORMS)
        prompt = Prompt(
            kind if isinstance(kind := value.get("kind"), str) else "",
            said if isinstance(said := value.get("prompt"), str) and "messages" not in value else "",
            tuple(_message(one, origin) for one in _records(value.get("messages"), origin)),
            tuple(_tool(one, origin) for one in _records(value.get("tools"), origin)),
            origin=origin,
        )
        if not _plain(prompt).strip():
            raise UsageError(f"{origin} has no text", _FORMS)
        _plain(prompt).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{origin} has half a character (a lone surrogate)", "leave the line out") from None
    except UsageError:
        raise
    except GgufspecError as error:  # not JSON
        raise UsageError(error.message.partition(" (line")[0], _FORMS) from None
    return prompt


def _records(value: Any, origin: str) -> list[dict[str, Any]]:
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UsageError(f"{origin}: messages and tools are lists of objects", _FORMS)
    return found


def _message(message: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a message with its content as one text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UsageError(f"{origin} has a part of type {kind}: only text can be read", "leave the line out")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise UsageError(f"{origin} has a message without role, or whose content is not text", _FORMS)
    return {**message, "content": content}


def _tool(tool: Mapping[str, Any], origin: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"{origin} has a tool without a name", 'a tool is {"type": "function", "function": {"name": "…", …}}'
        )
    return dict(tool)
