"""Conversion of prompts (bundled or from files) to a trial's texts, with the target's chat template.

A template is untrusted code and tokenizing needs the model file, so both happen in a child process, once per command.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec import child
from ggufspec.bench.prompts import PROMPTS, REQUESTS, BenchPrompt
from ggufspec.errors import ChildError, GgufspecError, ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.llamacpp.chat_template import ChatTemplate, TemplateOptions
from ggufspec.llamacpp.model import Model
from ggufspec.models.headers import read_headers
from ggufspec.prompting.prompt import WITHOUT_TEMPLATE

MOST_PROMPTS = 32  # maximum number of prompts; if there are more, an evenly spaced sample is used
MOST_FILE_BYTES = 64 << 20  # maximum file size, enough for a log of about ten thousand requests
MOST_LINE_BYTES = 1 << 20  # maximum line size, enough for more than a hundred thousand tokens
_FORMS = 'each line is text or JSON: {"prompt": "…"} or {"messages": […], "tools": […]} as in a request'
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class PromptsJob:
    """Prompts for a model; ``raw`` skips its chat template.

    Without ``prompts``, bundled prompts are used: requests if there is a chat template, otherwise texts to continue.
    ``kinds`` restricts these to prompts of the given kinds; if ``every`` is n, only every n-th of them is used.
    """

    target: Path
    prompts: tuple[BenchPrompt, ...] = ()
    raw: bool = False
    kinds: tuple[str, ...] = ()
    every: int = 1


@dataclass(frozen=True, slots=True)
class PromptsResult:
    """Texts of a trial, with their ``kinds`` and token counts; ``templated`` if the chat template made them."""

    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    tokens: tuple[int, ...]
    templated: bool
    notes: tuple[str, ...] = ()

    @property
    def trial(self) -> dict[str, Any]:
        """Fields for :class:`ggufspec.bench.trial.TrialJob`."""
        return {"prompts": self.texts, "kinds": self.kinds, "templated": self.templated}


def make_texts(spec: PromptsJob, *, verbose: bool = False) -> PromptsResult:
    """Make the texts in a child process.

    Raises:
        UsageError: no bundled prompt is of these kinds, or the chat template does not support a prompt's tools.
        ModelError: the file is damaged, or its chat template fails.
    """
    count = len(spec.prompts)
    notes: tuple[str, ...] = ()
    if count > MOST_PROMPTS:
        spread = (spec.prompts[number * count // MOST_PROMPTS] for number in range(MOST_PROMPTS))
        spec = replace(spec, prompts=tuple(spread))
        notes = (f"{MOST_PROMPTS} of the {count:,} prompts are used, evenly spaced",)
    try:
        found = child.call(__name__, spec, PromptsResult, verbose=verbose)
    except (ModelError, ChildError):
        read_headers([spec.target])  # explains what is wrong with a damaged file
        raise
    return replace(found, notes=(*notes, *found.notes))


def run(spec: PromptsJob, emit: child.Emit, stopping: threading.Event) -> PromptsResult:  # noqa: ARG001
    """Make the texts in this process, without loading weights."""
    with Model(spec.target, vocab_only=True) as model:
        source = "" if spec.raw else model.chat_template.strip()
        notes: list[str] = []
        prompts = spec.prompts or _bundled(REQUESTS if source else PROMPTS, spec)
        prompts = tuple(_spelled(model, prompts, notes))
        if not prompts:
            raise UsageError(notes[0], "give prompts as text")
        texts = list(_templated(model, prompts, notes) if source else map(_plain, prompts))
        tokens = [len(model.tokenize(text, special=True)) for text in texts]
    kinds = tuple(one.kind for one in prompts)
    return PromptsResult(tuple(texts), kinds, tuple(tokens), bool(source), tuple(dict.fromkeys(notes)))


def _bundled(prompts: Sequence[BenchPrompt], spec: PromptsJob) -> tuple[BenchPrompt, ...]:
    found = tuple(one for one in prompts if not spec.kinds or one.kind in spec.kinds)
    if not found:
        known = ", ".join(dict.fromkeys(one.kind for one in prompts))
        raise UsageError(
            f"no bundled prompt for {spec.target.name} is of kind {' or '.join(spec.kinds)}",
            f"the profile's [bench] may name these kinds: {known}",
        )
    return found[:: spec.every]


def _spelled(model: Model, prompts: Sequence[BenchPrompt], notes: list[str]) -> Iterator[BenchPrompt]:
    """Yield the prompts with token ids converted to text; skip those whose text does not tokenize to the same ids."""
    for prompt in prompts:
        ids = [*prompt.tokens]
        with suppress(UsageError, UnicodeDecodeError):  # ids from another model's vocabulary, or half a character
            text = b"".join(model.piece(one, special=True) for one in ids[ids[:1] == [model.first_token] :]).decode()
            if not ids or model.tokenize(text, special=True) == ids:
                yield replace(prompt, text=text) if ids else prompt
                continue
        notes.append(f"{prompt.origin} is left out: its token ids are not how {model.path.name} tokenizes a text")


# ---- by the chat template --------------------------------------------------------------------------------------------


def _templated(model: Model, prompts: Sequence[BenchPrompt], notes: list[str]) -> Iterator[str]:
    """Yield each prompt as formatted by the template, without the BOS token, which tokenizing adds."""
    bos, _ = model.token_texts
    template = ChatTemplate.of(model, hint=WITHOUT_TEMPLATE)
    for prompt in prompts:
        if prompt.tokens:
            yield prompt.text
            continue
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        wishes = TemplateOptions(prompt.tools, goes_on=prompt.goes_on, options=prompt.options)
        try:
            text = template.apply(messages, wishes).prompt
            ignored = bool(prompt.tools) and text == template.apply(messages, replace(wishes, tools=())).prompt
        except ModelError as error:
            raise ModelError(
                f"{prompt.origin}: {error.message}" if prompt.origin else error.message, WITHOUT_TEMPLATE
            ) from None
        if ignored and prompt.origin:
            raise UsageError(
                f"{prompt.origin} offers tools, but the chat template of {model.path.name} does not support them",
                f'leave "tools" out of the line; {WITHOUT_TEMPLATE}',
            )
        if ignored:
            notes.append(f"the chat template does not support tools: the prompt of kind {prompt.kind} gets none")
        first = bos if model.first_token is not None else ""
        yield text.removeprefix(first)


def _plain(prompt: BenchPrompt) -> str:
    return prompt.text or "\n\n".join(one["content"] for one in prompt.messages if one["content"])


# ---- files -----------------------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Read prompts from a file, one per line: plain text or, if the file's name or first line says so, JSON.

    A JSON line is a string, ``{"prompt": …}`` with a string or token ids, or a request for OpenAI's chat API, parsed as
    in ``serve``; an object may also have a ``kind``. Empty lines are skipped.

    Raises:
        UsageError: the file cannot be read or has no prompt, or a line (which the message names) is not a prompt.
    """
    lines = untrusted.read_bytes(path, MOST_FILE_BYTES, failure=UsageError).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    written = [(f"line {number} of {path.name}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not written:
        raise UsageError(f"{path} has no prompts: it is empty", _FORMS)
    is_json = path.suffix in (".jsonl", ".ndjson", ".json") or written[0][1].lstrip().startswith(b'{"')
    return tuple(_of_line(_text(line, origin), origin, is_json=is_json) for origin, line in written)


def _text(line: bytes, origin: str) -> str:
    if len(line) > MOST_LINE_BYTES:
        raise UsageError(f"{origin} has {len(line) >> 20} MiB, which is too long for a prompt", "leave the line out")
    try:
        text = line.decode("utf-8").rstrip("\r")
    except UnicodeDecodeError:
        raise UsageError(f"{origin} is not UTF-8 text", "convert the file to UTF-8, for example with iconv") from None
    if found := _NO_TEXT.search(text):
        raise UsageError(f"{origin} has the byte 0x{ord(found[0]):02x}, which is not text", "leave the line out")
    return text


def _of_line(text: str, origin: str, *, is_json: bool) -> BenchPrompt:
    if not is_json:
        return BenchPrompt("", text, origin=origin)
    try:
        value = untrusted.parse_json(text, origin)
        value = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise UsageError(f"{origin} is not a prompt", _FORMS)
        messages = tuple(_message(one, origin) for one in _records(value.get("messages"), origin))
        said = "" if messages else value.get("prompt")
        said = said[0] if isinstance(said, list) and len(said) == 1 and isinstance(said[0], str | list) else said
        prompt = BenchPrompt(
            kind if isinstance(kind := value.get("kind"), str) else "",
            said if isinstance(said, str) else "",
            messages,
            ()
            if _choice(value) == "none"
            else tuple(_tool(one, origin) for one in _records(value.get("tools"), origin)),
            goes_on=_goes_on(value, messages),
            options=_options(value),
            tokens=tuple(said) if isinstance(said, list) and all(type(one) is int for one in said) else (),
            origin=origin,
        )
        if not (prompt.tokens or _plain(prompt).strip()):
            raise UsageError(f"{origin} has no text", _FORMS)
        _plain(prompt).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{origin} has half a character (a lone surrogate)", "leave the line out") from None
    except UsageError:
        raise
    except GgufspecError as error:  # the line is not JSON
        raise UsageError(error.message.partition(" (line")[0], _FORMS) from None
    return prompt


def _records(value: Any, origin: str) -> list[dict[str, Any]]:
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UsageError(f"{origin}: messages and tools must be lists of objects", _FORMS)
    return found


def _goes_on(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the answer continues the last message, as in :class:`ggufspec.serve.requests.ChatBody`."""
    is_answer = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return is_answer and request.get("add_generation_prompt") is not True


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's variables for the template."""
    effort, given = request.get("reasoning_effort"), request.get("chat_template_kwargs")
    return ({"reasoning_effort": effort} if isinstance(effort, str) else {}) | (
        given if isinstance(given, dict) else {}
    )


def _choice(request: Mapping[str, Any]) -> Any:
    choice = request.get("tool_choice")
    return choice.get("type") if isinstance(choice, dict) else choice


def _said(part: Mapping[str, Any]) -> Any:
    return part.get("refusal") if part.get("text") is None else part["text"]


def _message(message: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a message with the parts of its content joined into one text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(_said(part), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UsageError(f"{origin} has a part of type {kind}: only text is supported", "leave the line out")
        content = "\n".join(map(_said, content))
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise UsageError(f"{origin} has a message without a role, or whose content is not text", _FORMS)
    return {**message, "content": content}


def _tool(tool: Mapping[str, Any], origin: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"{origin} has a tool without a name", 'a tool is {"type": "function", "function": {"name": "…", …}}'
        )
    return dict(tool)
