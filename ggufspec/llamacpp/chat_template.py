"""A model's chat template: messages in, the text of a prompt out, as Hugging Face's ``apply_chat_template`` renders it.

llama-cpp-python's formatter renders it in Jinja's immutable sandbox. A template comes with a file from anywhere: it is
for a child process, which its parent ends when the time is up, and has bounds of memory and length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from ggufspec import foreign, worker
from ggufspec.errors import GgufspecError, ModelError

# What the formatter itself gives a template
_OWN = {"messages", "tools", "tool_choice", "functions", "function_call", "eos_token", "bos_token", "strftime_now"}
_OWN |= {"raise_exception", "add_generation_prompt"}
_Value = TypeVar("_Value")

_HINT = "/chat off goes on without the template; another GGUF of the model may have a better one"
_MAX_SECONDS = 5.0  # to compile, and to render once
_MAX_CHARACTERS = 1_000_000  # of the text, beside four times those of the messages
_MAX_BYTES = 1 << 28  # beside what the process has, where the platform can say so


class ChatTemplate:
    """A template, compiled.

    Args:
        source: Jinja, the file's ``tokenizer.chat_template``.
        now: what the template is told if it asks for the date. It stays, as a new one would void the cache.
        bos: text of the token that begins a text.
        eos: text of the token that ends one.
        hint: of the errors.

    Raises:
        ModelError: it is no template.
    """

    def __init__(self, source: str, now: datetime, *, bos: str = "", eos: str = "", hint: str = _HINT) -> None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        self._hint = hint
        self._formatter: Any = _bounded(lambda: Jinja2ChatFormatter(source, eos_token=eos, bos_token=bos), hint)
        self._formatter.strftime_now = now.strftime

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> str:
        """The prompt for the next answer.

        Args:
            messages: each with ``role`` and ``content``, and what else the template reads of them. Arguments of tool
                calls, JSON in requests, are objects there.
            tools: what the model may call.
            options: further variables of the template.

        Raises:
            ModelError: it fails, refuses these messages, or its text is too long.
        """
        own, offered = [_parsed(message) for message in messages], [dict(tool) for tool in tools] or None
        more = {key: value for key, value in options.items() if key not in _OWN}
        text: str = _bounded(
            lambda: self._formatter(messages=own, tools=offered, **({"documents": None} | more)).prompt, self._hint
        )
        longest = _MAX_CHARACTERS + 4 * len(json.dumps([own, offered], default=str))
        if len(text) > longest:
            raise ModelError(f"the model's chat template makes a text of more than {longest:,} characters", self._hint)
        return text


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as objects, where they are the JSON of one."""

    def called(call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        text = function.get("arguments")
        if not isinstance(text, str):
            return dict(call)
        try:
            arguments = foreign.parse_json(text, "the arguments")
        except GgufspecError:
            return dict(call)
        return {**call, "function": function | {"arguments": arguments}} if isinstance(arguments, dict) else dict(call)

    calls = message.get("tool_calls")
    return dict(message) | ({"tool_calls": [called(call) for call in calls]} if calls else {})


def _bounded(work: Callable[[], _Value], hint: str) -> _Value:
    """Run foreign code within the bounds; every failure of it is a ModelError."""
    name = "the model's chat template"
    try:
        with worker.within(_MAX_SECONDS, name, hint), worker.limited_memory(_MAX_BYTES):
            return work()
    except MemoryError:
        raise ModelError(f"{name} takes too much memory: it may be a trap", hint) from None
    except Exception as error:  # whatever foreign code may raise
        failed = "refuses this conversation" if type(error) is ValueError else "fails"  # raise_exception
        raise ModelError(f"{name} {failed}: {_plain(error) or type(error).__name__}", hint) from None


def _plain(message: object) -> str:
    """A foreign message, in one line and short."""
    return " ".join("".join(each if each.isprintable() else " " for each in str(message)[:1000]).split())[:300]
