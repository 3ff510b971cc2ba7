"""A model's chat template, which turns a conversation into the text of a prompt and determines how to parse the answer.

llama.cpp's chat library does both. Without that library (:mod:`ggufspec.llamacpp.chat_library`), llama-cpp-python's
formatter renders the prompt in Jinja's immutable sandbox, and answers are plain text. Templates come from untrusted
files, so they run in a child process with limits on time, memory and length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from ggufspec import child
from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files import untrusted
from ggufspec.hardware import install
from ggufspec.llamacpp import chat_library
from ggufspec.llamacpp.chat_library import AppliedTemplate, CompiledTemplate
from ggufspec.llamacpp.grammar import plain_patterns
from ggufspec.llamacpp.model import Model

# Template variables that the formatter sets
_OWN = {"messages", "tools", "tool_choice", "functions", "function_call", "eos_token", "bos_token", "strftime_now"}
_OWN |= {"raise_exception", "add_generation_prompt"}
_Value = TypeVar("_Value")

_HINT = "/chat off continues without the template; another GGUF of the model may have a better one"
_BEFORE_CALLS = re.compile(r"(?<= )until-\d+\?? (?=(?:space )?[\w-]*tool-calls?(?:-root)?\b)")
_PLACE = re.compile(r"at (line \d+, column \d+) in source:.*\nError: (.*)", re.DOTALL)
_MAX_SECONDS = 5.0  # time limit for compiling a template, and for rendering it once
_MAX_CHARACTERS = 1_000_000  # maximum number of prompt characters beyond four times the messages' length
_MAX_BYTES = 1 << 28  # maximum bytes beyond the process's current memory, on platforms that can limit it


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Inputs to a chat template in addition to the messages."""

    tools: tuple[dict[str, Any], ...] = ()  # tools that the model may call, as in OpenAI's API
    must_call: bool = False
    function: str = ""  # function that the model must call; empty: any
    parallel: bool | None = None  # True if the model may call several tools at once; None: the template's default
    json_schema: str = ""
    begins: bool = True  # True if the prompt ends with the start of an answer
    goes_on: bool = False  # True if the answer continues the last message, which is the assistant's
    options: dict[str, Any] = field(default_factory=dict)  # other template variables, e.g. enable_thinking

    @property
    def needs_library(self) -> bool:
        """True if only llama.cpp's chat library supports these options."""
        return bool(self.tools or self.json_schema or self.goes_on)


class ChatTemplate:
    """A Jinja chat template; ``tool_use`` replaces it if there are tools, and ``hint`` is the hint for its errors.

    The template is compiled on first use, so that a malicious one cannot break loading. Every prompt gets the same
    date, ``now``, because a different date would invalidate the cached prompt.
    """

    def __init__(
        self, source: str, now: datetime, *, bos: str = "", eos: str = "", tool_use: str = "", hint: str = _HINT
    ) -> None:
        self._hint, self._now = hint, now
        self._knows_developer = "developer" in source  # True if the template supports this newer role name for "system"
        self._sources, self._texts = (source, tool_use or source), (bos, eos)
        self._compiled: dict[tuple[str, str, str], CompiledTemplate] = {}
        self._library = chat_library.why_chat_library_is_missing() is None

    @classmethod
    def of(cls, model: Model, source: str = "", *, hint: str = _HINT) -> ChatTemplate:
        """Return a model's chat template, or ``source`` if given, with the current date."""
        own = not source or source == model.chat_template
        bos, eos = model.token_texts
        tool_use = model.tool_template if own else ""
        return cls(source or model.chat_template, datetime.now(), bos=bos, eos=eos, tool_use=tool_use, hint=hint)

    def _templates(self, bos: str, eos: str, *, tools: bool) -> CompiledTemplate:
        key = self._sources[tools], bos, eos
        if key not in self._compiled:
            self._compiled[key] = _bounded(lambda: CompiledTemplate(*key), self._hint)
        return self._compiled[key]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> str:
        """Return the prompt for the next answer; see :meth:`apply`."""
        return self.apply(messages, TemplateOptions(tuple(map(dict, tools)), options=options)).prompt

    def apply(self, messages: Sequence[Mapping[str, Any]], wishes: TemplateOptions) -> AppliedTemplate:
        """Return the prompt for the next answer to OpenAI-style messages, and how to constrain and parse the answer.

        Raises:
            UsageError: an option needs llama.cpp's chat library, which is missing; or a tool call is required, but this
                template cannot force one.
            ModelError: the template is invalid, fails, refuses these messages, or its output is too long.
        """
        found = self._applied(messages, wishes) if self._library else AppliedTemplate(self._sandboxed(messages, wishes))
        longest = _MAX_CHARACTERS + 4 * len(json.dumps([list(messages), list(wishes.tools)], default=str))
        if len(found.prompt) > longest:
            raise ModelError(f"the model's chat template produced more than {longest:,} characters", self._hint)
        if wishes.must_call:
            if found.lazy or not found.grammar:
                said = "tool_choice: with this chat template no call can be forced"
                raise UsageError(said, 'send "tool_choice": "auto"')
            # The grammar allows text before a call; remove that part if a call is required
            found = replace(found, grammar=_BEFORE_CALLS.sub("", found.grammar))
        return found

    def _applied(self, messages: Sequence[Mapping[str, Any]], wishes: TemplateOptions) -> AppliedTemplate:
        options = dict(wishes.options)
        request: dict[str, Any] = {
            "messages": list(messages),
            "json_schema": "" if wishes.must_call else plain_patterns(wishes.json_schema),
            "continue": wishes.goes_on,
            "add_generation_prompt": wishes.begins,
            "enable_thinking": options.get("enable_thinking", True),
            "options": options,
            "now": int(self._now.timestamp()),
        }
        if options.get("reasoning_effort") == "none":
            del options["reasoning_effort"]
            request["enable_thinking"] = False
        if wishes.tools:
            request |= {"tools": list(wishes.tools), "tool_choice": "required" if wishes.must_call else "auto"}
            if wishes.parallel is not None:
                request["parallel_tool_calls"] = wishes.parallel
        has_tools = bool(wishes.tools)
        templates = self._templates(*self._texts, tools=has_tools)
        found = _bounded(lambda: templates.apply(request), self._hint)
        tools = json.dumps(wishes.tools)
        plain = plain_patterns(tools)
        if not (has_tools or wishes.json_schema) or not (any(self._texts) or wishes.function or plain != tools):
            return found
        request |= {"tools": json.loads(plain)} if has_tools else {}
        if wishes.function:
            request["tools"] = [one for one in request["tools"] if one["function"]["name"] == wishes.function]
        # With BOS and EOS set, llama.cpp misses tool calls of some templates (Mistral Small 3.2's), so leave them empty
        bare = self._templates("", "", tools=has_tools)
        answer = _bounded(lambda: bare.apply(request), self._hint)
        return replace(answer, prompt=found.prompt)

    def _sandboxed(self, messages: Sequence[Mapping[str, Any]], wishes: TemplateOptions) -> str:
        if wishes.needs_library:
            raise UsageError(chat_library.WITHOUT, install.CHAT_LIBRARY)
        more = {key: value for key, value in wishes.options.items() if key not in _OWN}
        own = [_parsed(message) for message in messages]
        if not self._knows_developer:
            own = [one | {"role": "system"} if one["role"] == "developer" else one for one in own]
        given = {"messages": own, "tools": None, "documents": None} | more
        return _bounded(lambda: str(self._formatter(**given).prompt), self._hint)

    @cached_property
    def _formatter(self) -> Any:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        bos, eos = self._texts
        found = Jinja2ChatFormatter(self._sources[False], eos_token=eos, bos_token=bos)
        found.strftime_now = self._now.strftime
        return found


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its tool-call arguments parsed if they are JSON objects."""

    def called(call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        text = function.get("arguments")
        with suppress(GgufspecError):
            arguments = untrusted.parse_json(text, "the arguments") if isinstance(text, str) else None
            if isinstance(arguments, dict):
                return {**call, "function": function | {"arguments": arguments}}
        return dict(call)

    calls = message.get("tool_calls")
    return dict(message) | ({"tool_calls": [called(call) for call in calls]} if calls else {})


def _bounded(work: Callable[[], _Value], hint: str) -> _Value:
    """Run untrusted code with limits on time and memory; every failure becomes a GgufspecError."""
    name = "the model's chat template"
    try:
        with child.within(_MAX_SECONDS, name, hint), child.limited_memory(_MAX_BYTES):
            return work()
    except MemoryError:
        raise ModelError(f"{name} takes too much memory: it may be malicious", hint) from None
    except GgufspecError:
        raise
    except Exception as error:  # untrusted code may raise anything
        # True if the template called raise_exception, in llama-cpp-python's formatter or in llama.cpp's Jinja engine
        refused = type(error) is ValueError or "Jinja Exception: " in str(error)
        said = str(error).rpartition("Jinja Exception: ")[2].replace("std::exception", "it is not valid Jinja")
        if place := _PLACE.search(said):  # llama.cpp prints a source excerpt between the position and the error
            said = f"{place[2]} ({place[1]})"
        if "bad_alloc" in said:
            raise ModelError(f"{name} takes too much memory: it may be malicious", hint) from None
        if "JSON schema" in said:
            raise UsageError(f"a schema cannot be used: {_plain(said)}", "fix the schema") from None
        failed = "refuses this conversation" if refused else "fails"
        raise ModelError(f"{name} {failed}: {_plain(said) or type(error).__name__}", hint) from None


def _plain(message: object) -> str:
    """Shorten another library's message to one printable line."""
    return " ".join("".join(each if each.isprintable() else " " for each in str(message)[:1000]).split())[:300]
