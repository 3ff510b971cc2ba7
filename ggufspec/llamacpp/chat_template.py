"""A model's chat template: turns a conversation into the text of a prompt, and says how its answer is read.

llama.cpp's chat library does all of it. Without that library (:mod:`ggufspec.llamacpp.chat_library`) Jinja's immutable
sandbox renders the prompt, with llama-cpp-python's formatter, and answers are plain text. Templates come from untrusted
files: they run in a child process, which its parent ends after a time limit, with limits on memory and length.
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
from ggufspec.llamacpp.chat_library import Applied, Templates
from ggufspec.llamacpp.grammar import plain_patterns
from ggufspec.llamacpp.model import Model

# Variables that the formatter itself gives a template
_OWN = {"messages", "tools", "tool_choice", "functions", "function_call", "eos_token", "bos_token", "strftime_now"}
_OWN |= {"raise_exception", "add_generation_prompt"}
_Value = TypeVar("_Value")

_HINT = "/chat off goes on without the template; another GGUF of the model may have a better one"
_BEFORE_CALLS = re.compile(r"(?<= )until-\d+\?? (?=(?:space )?[\w-]*tool-calls?(?:-root)?\b)")
_PLACE = re.compile(r"at (line \d+, column \d+) in source:.*\nError: (.*)", re.DOTALL)
_MAX_SECONDS = 5.0  # to compile, and to render once
_MAX_CHARACTERS = 1_000_000  # most characters of the text, in addition to four times those of the messages
_MAX_BYTES = 1 << 28  # in addition to the process's memory, if the platform can limit it


@dataclass(frozen=True, slots=True)
class Wishes:
    """Template options: what an answer needs in addition to its messages."""

    tools: tuple[dict[str, Any], ...] = ()  # tools that the model may call, as in OpenAI's API
    must_call: bool = False
    function: str = ""  # function that it must call; empty: any
    parallel: bool | None = None  # may call several at once; None: the template's default
    json_schema: str = ""
    begins: bool = True  # the prompt ends with what an answer begins with
    goes_on: bool = False  # the last message is the assistant's, and the answer continues it
    options: dict[str, Any] = field(default_factory=dict)  # further variables of the template: enable_thinking, …

    @property
    def needs_library(self) -> bool:
        """True if only llama.cpp's chat library can do it."""
        return bool(self.tools or self.json_schema or self.goes_on)


class ChatTemplate:
    """A Jinja template, replaced by ``tool_use`` if there are tools; ``hint`` goes with its errors.

    It is compiled at first use, so that a malicious one cannot break loading. ``now`` is the date that it gets: the
    same for all prompts, because a new one would invalidate the cache.
    """

    def __init__(
        self, source: str, now: datetime, *, bos: str = "", eos: str = "", tool_use: str = "", hint: str = _HINT
    ) -> None:
        self._hint, self._now = hint, now
        self._knows_developer = "developer" in source  # the newer name of "system", unknown to most templates
        self._sources, self._texts = (source, tool_use or source), (bos, eos)
        self._compiled: dict[tuple[str, str, str], Templates] = {}
        self._library = chat_library.missing() is None

    @classmethod
    def of(cls, model: Model, source: str = "", *, hint: str = _HINT) -> ChatTemplate:
        """Return a model's template, with the present date, or ``source`` instead of it."""
        own = not source or source == model.chat_template
        bos, eos = model.token_texts
        tool_use = model.tool_template if own else ""
        return cls(source or model.chat_template, datetime.now(), bos=bos, eos=eos, tool_use=tool_use, hint=hint)

    def _templates(self, bos: str, eos: str, *, tools: bool) -> Templates:
        key = self._sources[tools], bos, eos
        if key not in self._compiled:
            self._compiled[key] = _bounded(lambda: Templates(*key), self._hint)
        return self._compiled[key]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> str:
        """Return the prompt for the next answer; see :meth:`apply`."""
        return self.apply(messages, Wishes(tuple(map(dict, tools)), options=options)).prompt

    def apply(self, messages: Sequence[Mapping[str, Any]], wishes: Wishes) -> Applied:
        """Return the prompt for the next answer to OpenAI-style messages, and how that is constrained and read.

        Raises:
            UsageError: something needs llama.cpp's chat library, which is missing; a tool must be called, and this
                template cannot force a call.
            ModelError: it is not a template, fails, refuses these messages, or its text is too long.
        """
        found = self._applied(messages, wishes) if self._library else Applied(self._sandboxed(messages, wishes))
        longest = _MAX_CHARACTERS + 4 * len(json.dumps([list(messages), list(wishes.tools)], default=str))
        if len(found.prompt) > longest:
            raise ModelError(f"the model's chat template makes a text of more than {longest:,} characters", self._hint)
        if wishes.must_call:
            if found.lazy or not found.grammar:
                said = "tool_choice: with this chat template no call can be forced"
                raise UsageError(said, 'send "tool_choice": "auto"')
            # Unlimited text is allowed before a call; forbid it if the model must call
            found = replace(found, grammar=_BEFORE_CALLS.sub("", found.grammar))
        return found

    def _applied(self, messages: Sequence[Mapping[str, Any]], wishes: Wishes) -> Applied:
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
        # The analysis of some templates, e.g. Mistral Small 3.2's, finds no calls if these have a text
        bare = self._templates("", "", tools=has_tools)
        answer = _bounded(lambda: bare.apply(request), self._hint)
        return replace(answer, prompt=found.prompt)

    def _sandboxed(self, messages: Sequence[Mapping[str, Any]], wishes: Wishes) -> str:
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
    """Return a message with the arguments of its tool calls as objects, if they are JSON objects."""

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
    """Run untrusted code within the limits; every failure of it is a ModelError."""
    name = "the model's chat template"
    try:
        with child.within(_MAX_SECONDS, name, hint), child.limited_memory(_MAX_BYTES):
            return work()
    except MemoryError:
        raise ModelError(f"{name} takes too much memory: it may be a trap", hint) from None
    except GgufspecError:
        raise
    except Exception as error:  # untrusted code may raise anything
        # raise_exception, here and in llama.cpp's engine
        refused = type(error) is ValueError or "Jinja Exception: " in str(error)
        said = str(error).rpartition("Jinja Exception: ")[2].replace("std::exception", "it is no Jinja")
        if place := _PLACE.search(said):  # llama.cpp's engine puts excerpts of the source between the two
            said = f"{place[2]} ({place[1]})"
        if "bad_alloc" in said:
            raise ModelError(f"{name} takes too much memory: it may be a trap", hint) from None
        if "JSON schema" in said:
            raise UsageError(f"a schema cannot be used: {_plain(said)}", "mend the schema") from None
        failed = "refuses this conversation" if refused else "fails"
        raise ModelError(f"{name} {failed}: {_plain(said) or type(error).__name__}", hint) from None


def _plain(message: object) -> str:
    """Shorten a foreign message to one printable line."""
    return " ".join("".join(each if each.isprintable() else " " for each in str(message)[:1000]).split())[:300]
