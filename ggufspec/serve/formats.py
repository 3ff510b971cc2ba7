"""The formats in which chat templates have tools called and reasoning written. Pure; the one module that knows them.

A row of :data:`FORMATS` is a format: how a template is known to be of it, how a call is read, how one is forced.
What is no whole call becomes content: nothing is lost, and nothing depends on how an answer's text was cut.

Sources: the chat templates of Qwen2.5, Qwen3, Hermes 3, Llama 3.1 to 3.3, Mistral 7B v0.3 and Devstral, gpt-oss, and
llama.cpp's common/chat.cpp.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ggufspec import foreign
from ggufspec.errors import GgufspecError, UsageError

Calls = list[tuple[str, str]]  # (name, arguments as JSON) of each

_THINK, _UNTHINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Format:
    """One format of tool calls."""

    name: str
    special: bool  # whether control tokens must be part of an answer's text
    begins: tuple[str, ...]  # a call begins with one of these; empty: with the answer
    reads: Callable[[str], Calls | None]  # the calls of a text that begins so; None where it is no whole call
    opening: str = ""  # the text of a call that is forced, up to its JSON; {name} where the function is named there
    before: str = ""
    after: str = ""
    arguments: str = "arguments"  # the key of them; empty: they are the JSON
    listed: bool = False  # whether calls stand in a list


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: text, reasoning, or a call of a tool."""

    kind: Literal["content", "reasoning", "tool"]
    text: str = ""
    index: int = 0  # of the call
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Forced:
    """How one call is forced: the prompt ends with ``opening``; ``before``, JSON of ``schema`` and ``after`` follow."""

    opening: str
    schema: dict[str, Any]
    before: str
    after: str


# ---- what is read ----------------------------------------------------------------------------------------------------


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = foreign.parse_json(text, "a call")
    except GgufspecError:
        return None
    return found if isinstance(found, dict) else None


def _call(found: Any) -> tuple[str, str] | None:
    """A call as JSON has it: ``name``, and ``arguments`` or ``parameters``."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _all(found: Sequence[tuple[str, str] | None]) -> Calls | None:
    calls = [one for one in found if one is not None]
    return calls if calls and len(calls) == len(found) else None


_XML = re.compile(r"<function=([^>\n]+)>\s*(.*?)\s*</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _hermes(text: str) -> Calls | None:
    bodies = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    if not bodies or re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL).strip():
        return None
    found: list[tuple[str, str] | None] = []
    for body in bodies:
        xml = _XML.fullmatch(body)  # Qwen3-Coder
        if xml:
            given = {key: _value(value) for key, value in _PARAMETER.findall(xml[2])}
            found.append((xml[1], json.dumps(given, ensure_ascii=False)))
        else:
            found.append(_call(_object(body)))
    return _all(found)


def _value(text: str) -> Any:
    """A parameter as JSON, where it is any but a text."""
    try:
        found = foreign.parse_json(text, "a parameter")
    except GgufspecError:
        return text
    return text if isinstance(found, str) else found


def _llama3(text: str) -> Calls | None:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if whole := _call(_object(body)):
        return [whole]
    return _all([_call(_object(part)) for part in body.split(";")])


def _mistral(text: str) -> Calls | None:
    parts = text.split("[TOOL_CALLS]")[1:]
    found: list[tuple[str, str] | None] = []
    for part in parts:
        name, args, rest = part.partition("[ARGS]")
        if args:
            found.append((name.strip(), rest.strip()) if _object(rest) is not None else None)
            continue
        try:
            listed = foreign.parse_json(part, "calls")
        except GgufspecError:
            return None
        found += [_call(one) for one in listed] if isinstance(listed, list) and listed else [_call(listed)]
    return _all(found)


_CHANNEL = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?P<role>[^<]*)<\|channel\|>(?P<header>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_TO = re.compile(r"to=functions\.([A-Za-z0-9_.:-]+)")


def _gpt_oss(text: str) -> Calls | None:
    header = _CHANNEL.match(text)
    if not header:
        return None
    to = _TO.search(header["role"] + " " + header["header"])
    body = text[header.end() :].removesuffix("<|call|>").removesuffix("<|end|>").strip()
    return [(to[1], body)] if to and _object(body) is not None else None


FORMATS = (
    (("<|channel|>", "<|message|>"), Format(
        "gpt-oss", True, (), _gpt_oss, "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        arguments="",
    )),
    (("[TOOL_CALLS]",), Format(
        "mistral", True, ("[TOOL_CALLS]",), _mistral, "[TOOL_CALLS]", listed=True,
    )),
    (("<tool_call>",), Format(
        "hermes", False, ("<tool_call>",), _hermes, "", "<tool_call>\n", "\n</tool_call>",
    )),
    (("<|start_header_id|>", "parameters"), Format(
        "llama3", False, ("<|python_tag|>", '{"name"'), _llama3, arguments="parameters",
    )),
)  # fmt: skip


def format_of(template: str) -> Format | None:
    """The format in which a chat template has tools called; None where it takes none, or the format is not known."""
    if "tools" not in template and "<|channel|>" not in template:
        return None
    return next((row for marks, row in FORMATS if all(mark in template for mark in marks)), None)


def reasons(template: str) -> bool:
    """Whether a chat template's model writes its reasoning apart."""
    return _THINK in template or _UNTHINK in template or ("<|channel|>" in template and "<|message|>" in template)


# ---- what is forced --------------------------------------------------------------------------------------------------


def forced(form: Format, tools: Sequence[Mapping[str, Any]], name: str | None) -> Forced:
    """How exactly one call is forced, of one function or of any.

    Args:
        form: the template's.
        tools: as OpenAI has them.
        name: of the function; None: any.

    Raises:
        UsageError: there is no such function, or the format names it where no choice is left.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        raise UsageError(f"there is no tool {name!r}", "name one of tools in tool_choice")
    named = functions[0]["name"]
    if "{name}" in form.opening and len(functions) > 1:
        raise UsageError(f"{form.name} names a tool before it is chosen", "name the function in tool_choice")
    definitions: dict[str, Any] = {}
    schemas = [_schema(form, one, number, definitions) for number, one in enumerate(functions)]
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if form.listed:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    if definitions:
        schema = {**schema, "$defs": definitions}
    return Forced(form.opening.replace("{name}", named), schema, form.before, form.after)


def _schema(form: Format, function: Mapping[str, Any], number: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON of one function's call. Its own definitions go where references find them."""
    own = dict(function.get("parameters") or {"type": "object"})
    for key in ("$defs", "definitions"):
        for name, value in (own.pop(key, None) or {}).items():
            definitions[f"{number}-{name}"] = _moved(value, number)
    arguments = _moved(own, number)
    if not form.arguments:
        return dict(arguments)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _moved(value: Any, number: int) -> Any:
    """A schema whose references lead to the moved definitions."""
    if isinstance(value, dict):
        found = {key: _moved(one, number) for key, one in value.items()}
        if isinstance(reference := found.get("$ref"), str):
            found["$ref"] = re.sub(r"^#/(\$defs|definitions)/", rf"#/$defs/{number}-", reference)
        return found
    return [_moved(one, number) for one in value] if isinstance(value, list) else value


def surrounded(grammar: str, before: str, after: str) -> str:
    """A GBNF grammar with texts in front of it and behind it."""
    if not before and not after:
        return grammar
    inner = re.sub(r"(?m)^root(\s*::=)", r"root-inner\1", grammar)
    return f"root ::= {_literal(before)} root-inner {_literal(after)}\n{inner}"


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# ---- the parser ------------------------------------------------------------------------------------------------------


def _new_id() -> str:
    return "call_" + secrets.token_hex(12)


@dataclass(slots=True)
class Parser:
    """Reads one answer as it comes.

    Args:
        format: the template's, or None.
        tools: whether calls are looked for.
        reasoning: whether reasoning is.
        thinking: whether the prompt's end has opened ``<think>``.
        opening: what the prompt ends with of a call that is forced.
        new_id: makes the id of a call.
    """

    format: Format | None
    tools: bool
    reasoning: bool
    thinking: bool = False
    opening: str = ""
    new_id: Callable[[], str] = _new_id
    _held: str = ""
    _state: str = "start"  # start, reasoning, content, call
    _calls: int = 0
    _wrote: bool = False  # whether there was content
    _thought: bool = False  # whether there was reasoning

    def __post_init__(self) -> None:
        if self.thinking and self.reasoning:
            self._state = "reasoning"
        self._held = self.opening

    def push(self, text: str) -> list[Delta]:
        """What a piece of the answer makes certain."""
        self._held += text
        return _joined(self._harmony(final=False) if self._is_harmony else self._plain(final=False))

    def finish(self) -> list[Delta]:
        """What was held back, at the end."""
        return _joined(self._harmony(final=True) if self._is_harmony else self._plain(final=True))

    @property
    def _is_harmony(self) -> bool:
        return self.format is not None and self.format.name == "gpt-oss"

    # ---- <think>, and calls that begin with a mark -------------------------------------------------------------------

    def _plain(self, *, final: bool) -> Iterator[Delta]:
        before = None
        while (self._state, self._held) != before:
            before = self._state, self._held
            yield from getattr(self, f"_{self._state}")(final)

    def _start(self, final: bool) -> Iterator[Delta]:
        """Is there reasoning, which comes first?"""
        text = self._held.lstrip()
        if self.reasoning and text.startswith(_THINK):
            self._held, self._state = text[len(_THINK) :], "reasoning"
        elif not self.reasoning or final or not _THINK.startswith(text[: len(_THINK)]):
            self._state = "content"
        yield from ()

    def _reasoning(self, final: bool) -> Iterator[Delta]:
        if not self._thought:
            self._held = self._held.lstrip("\n")
        thought, end, rest = self._held.partition(_UNTHINK)
        self._thought = self._thought or bool(thought)
        if end:
            self._held, self._state = rest.lstrip(), "after"
            yield Delta("reasoning", thought.rstrip("\n"))
            return
        # White space at the end may be that before </think>
        kept = 0 if final else _tail(self._held, (_UNTHINK,))
        ready = self._held[: len(self._held) - kept]
        stripped = ready if final else ready.rstrip("\n")
        self._held = self._held[len(stripped) :]
        if stripped:
            yield Delta("reasoning", stripped)

    def _after(self, final: bool) -> Iterator[Delta]:
        """White space between reasoning and content is dropped."""
        self._held = self._held.lstrip()
        if self._held or final:
            self._state = "content"
        yield from ()

    def _content(self, final: bool) -> Iterator[Delta]:
        marks = self.format.begins if self.format and self.tools else ()
        at = min((place for mark in marks if (place := self._held.find(mark)) >= 0), default=-1)
        if at >= 0 and (self._at_start(at) or not self._must_start):
            text, self._held = self._held[:at], self._held[at:]
            self._state = "call"
            if text.strip():
                self._wrote = True
                yield Delta("content", text.rstrip())
            return
        kept = 0
        if marks and not final and (not self._must_start or not (self._wrote or self._held.strip())):
            kept = _tail(self._held, marks)
        elif marks and not final and self._must_start and not self._wrote:
            head = self._held.lstrip()
            kept = len(self._held) if any(mark.startswith(head[: len(mark)]) for mark in marks) else 0
        ready = self._held[: len(self._held) - kept]
        if marks and not final:  # white space in front of a call is dropped
            ready = ready.rstrip() if not self._must_start else ready
        self._held = self._held[len(ready) :]
        if ready:
            self._wrote = True
            yield Delta("content", ready)

    @property
    def _must_start(self) -> bool:
        """Whether a call is the whole answer."""
        return self.format is not None and self.format.name == "llama3"

    def _at_start(self, at: int) -> bool:
        return not self._wrote and not self._held[:at].strip()

    def _call(self, final: bool) -> Iterator[Delta]:
        """Calls go to the end of the answer, but Hermes' have one of their own."""
        assert self.format is not None
        if self.format.name == "hermes":
            body, end, rest = self._held.partition("</tool_call>")
            if end:
                self._held, self._state = rest.lstrip(), "after"
                yield from self._called(body + end)
                return
        if final:
            text, self._held = self._held, ""
            yield from self._called(text)

    def _called(self, text: str) -> Iterator[Delta]:
        assert self.format is not None
        calls = self.format.reads(text)
        if calls is None:
            self._wrote = True
            yield Delta("content", text)
            return
        for name, arguments in calls:
            yield Delta("tool", "", self._calls, self.new_id(), name, arguments)
            self._calls += 1

    # ---- harmony -----------------------------------------------------------------------------------------------------

    def _harmony(self, *, final: bool) -> Iterator[Delta]:
        """Channels: analysis is reasoning, commentary to a function a call, everything else content."""
        while True:
            header = _CHANNEL.match(self._held)
            if header is None:
                if final and self._held:
                    text, self._held = self._held, ""
                    yield Delta("content", text)
                return
            end = re.search(r"<\|(end|call|return)\|>", self._held[header.end() :])
            name = header["header"].split()[:1]
            to = _TO.search(header["role"] + " " + header["header"])
            if to or not self._streams(name):
                if end is None and not final:
                    return
                cut = len(self._held) if end is None else header.end() + end.end()
                text, self._held = self._held[:cut], self._held[cut:]
                yield from self._channel(text, text[header.end() :], is_call=bool(to))
            else:
                body = self._held[header.end() :]
                kept = 0 if final or end else _tail(body, ("<|end|>", "<|return|>", "<|call|>"))
                ready = body[: end.start()] if end else body[: len(body) - kept]
                self._held = body[end.end() :] if end else self._held[: header.end()] + body[len(ready) :]
                if ready:
                    yield Delta("reasoning" if name == ["analysis"] and self.reasoning else "content", ready)
                if end is None:
                    if final:
                        self._held = ""
                    return
            if final and not self._held:
                return

    def _streams(self, name: list[str]) -> bool:
        return bool(name) and name[0] in ("analysis", "final", "commentary")

    def _channel(self, text: str, body: str, *, is_call: bool) -> Iterator[Delta]:
        if is_call and self.tools:
            yield from self._called(text)
        else:
            yield Delta("content", re.sub(r"<\|(end|call|return)\|>$", "", body))


def _joined(deltas: Iterator[Delta]) -> list[Delta]:
    return [delta for delta in deltas if delta.text or delta.kind == "tool"]


def _tail(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may become one of ``marks``, with white space before it."""
    for length in range(min(len(text), max(map(len, marks))), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
