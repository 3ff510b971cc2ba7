"""llama.cpp's own expectations, read from the source of its tests: what a chat's answers and JSON schemas must come to.

``scripts/peers --source`` fetches that source. Only literals and calls of helpers are evaluated: a small reader of C++
expressions. Nothing of the source is kept.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/"""
    r"""|(?P<raw>R"(?P<d>[^()\s\\]{0,16})\((?P<body>.*?)\)(?P=d)")"""
    r"""|(?P<str>"(?:\\.|[^"\\])*")"""
    r"""|(?P<num>-?\d+(?:\.\d+)?)"""
    r"""|(?P<id>[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)"""
    r"""|(?P<op>[-+{}()\[\],.;=<>&|!?:*/%\\'~^#])""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "'": "'", "0": "\0"}
_END = ("end", "")


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        if found[1]:
            return bytes([int(found[1], 16)]).decode("latin-1")
        return chr(int(found[2], 16)) if found[2] else _ESCAPES[found[3]]

    plain = re.sub(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", one, text)
    if re.search(r"\\x[0-9a-fA-F]{2}", text):  # bytes of UTF-8
        return b"".join(one.encode("latin-1") if ord(one) < 256 else one.encode() for one in plain).decode()
    return plain


class Reader:
    """Evaluates C++ expressions.

    Args:
        text: begins with one.
        names: values and functions.
    """

    def __init__(self, text: str, names: dict[str, Any]) -> None:
        self.text, self.names, self.end = text, names, 0
        self.token: tuple[str, Any] = _END
        self.next()

    def next(self) -> None:
        """Take the next token."""
        self.token = _END
        while self.token is _END and self.end < len(self.text):
            found = _TOKEN.match(self.text, self.end)
            if not found:
                raise SyntaxError(self.text[self.end : self.end + 60])
            self.end = found.end()
            if found["raw"]:
                self.token = ("str", found["body"])
            elif found["str"]:
                self.token = ("str", _unescaped(found["str"][1:-1]))
            elif found["num"]:
                self.token = ("num", json.loads(found["num"]))
            elif found["id"]:
                self.token = ("id", found["id"])
            elif found["op"]:
                self.token = ("op", found["op"])

    def eat(self, op: str) -> None:
        """Take this operator."""
        if self.token != ("op", op):
            raise SyntaxError(f"{self.token} in place of {op}")
        self.next()

    def many(self, close: str) -> list[Any]:
        """Expressions up to the closing bracket."""
        found = []
        while self.token != ("op", close):
            found.append(self.expression())
            if self.token == ("op", ","):
                self.next()
        self.next()
        return found

    def expression(self) -> Any:
        """A sum."""
        left = self._atom()
        while self.token == ("op", "+"):
            self.next()
            left = left + self._atom()
        return left

    def _atom(self) -> Any:
        kind, value = self.token
        self.next()
        if kind == "str":
            while self.token[0] == "str":
                value += self.token[1]
                self.next()
            return value
        if kind == "num":
            return value
        if (kind, value) == ("op", "{"):
            return self.many("}")
        if (kind, value) == ("op", "("):
            found = self.expression()
            self.eat(")")
            return found
        if kind == "id":
            return self._named(value)
        raise SyntaxError(str((kind, value)))

    def _named(self, name: str) -> Any:
        if self.token == ("op", "<"):  # std::vector<T>{…}
            depth = 0
            while True:
                depth += (self.token == ("op", "<")) - (self.token == ("op", ">"))
                self.next()
                if not depth:
                    break
        if self.token == ("op", "("):
            self.next()
            arguments = self.many(")")
            return arguments[0] if name in ("std::string", "json") else self.names[name](*arguments)
        if self.token == ("op", "{") and name not in self.names:
            self.next()
            return self.many("}")
        if name in ("true", "false"):
            return name == "true"
        if name.startswith(("COMMON_", "common_")) and name not in self.names:
            return name
        return self.names[name]


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Message:
    """What an answer comes to: the calls are (name, arguments, id)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Case:
    """A text under a template, and the message that it is."""

    template: str
    line: int
    text: str = ""
    expected: Message = field(default_factory=Message)
    more: dict[str, Any] = field(default_factory=dict)  # what else the test sets, by its name there

    def wish(self, name: str, prefix: str, otherwise: str) -> str:
        """One of an enumeration's values, in lower case."""
        return str(self.more.get(name, prefix + otherwise)).removeprefix(prefix).lower()


def _message(content: str = "", reasoning: str = "", name: str = "", arguments: str = "", id_: str = "") -> Message:
    return Message(content, reasoning, [(name, arguments, id_)] if name or id_ else [])


_HELPERS: dict[str, Callable[..., Message]] = {
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: _message("", why, name, arguments),
    "message_with_content_and_tool_call": lambda text, name, arguments: _message(text, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda why, name, arguments: _message("", why, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda why, text, calls: Message(
        text, why, [(name, arguments, "") for name, arguments in calls]
    ),
}


def tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    """A tool as OpenAI's API has it."""
    function = {"name": name, "description": description, "parameters": json.loads(parameters)}
    return {"type": "function", "function": function}


_STATEMENT = re.compile(
    r"(?P<new>auto (?P<name>tst\w*) = peg_tester\((?P<path>[^,)]+)[,)])"
    r"|(?P<decl>(?:const std::string|auto|const char \*|common_chat_msg|const auto)\s+(?P<var>\w+)\s*=(?!=))"
    r"|(?P<member>^\s+(?P<object>user_start|tool_result|user_continue|tool_msg)\.(?P<key>\w+)\s*=)"
    r"|(?P<case>\b(?P<tester>tst\w*)\s*\.\s*test\()"
    r"|(?P<loop>for \((?:const char \*|const auto &) (?P<each>\w+)\s*:\s*)"
    r"|(?P<lfm>test_lfm2_parser\()",
    re.MULTILINE,
)


class ChatCases:
    """The cases of tests/test-chat.cpp.

    Args:
        root: llama.cpp's source.
    """

    def __init__(self, root: Path) -> None:
        self.cases: list[Case] = []
        self.text = text = (root / "tests" / "test-chat.cpp").read_text()
        self.names: dict[str, Any] = {**_HELPERS, "message_user": {"role": "user", "content": "Hey there!"}}
        for found in re.finditer(r"static common_chat_tool (\w+)\s*\{", text):
            self.names[found[1]] = tool(*Reader(text[found.end() :], self.names).many("}")[:3])
        for found in re.finditer(r"^const common_chat_msg (message_assist\w*)\s*=", text, re.MULTILINE):
            self.names[found[1]] = Reader(text[found.end() :], self.names).expression()
        begin = re.search(r"static std::vector<common_chat_tool> tools\s*\{", text)
        assert begin
        self.names["tools"] = Reader(text[begin.end() :], self.names).many("}")
        start = text.index("static void test_template_output_peg_parsers")
        self._body(start, text.index("static void test_template_generation_prompt"), [])

    def _body(self, start: int, end: int, templates: list[str]) -> None:
        """The statements of a function, in order."""
        source, line = self.text[start:end], self.text.count("\n", 0, start) + 1
        testers: dict[str, list[str]] = {}
        loops: dict[str, Any] = {}
        at = 0
        while found := _STATEMENT.search(source, at):
            at, rest = found.end(), source[found.end() :]
            if found["loop"]:
                loops[found["each"]] = self._value(rest)
            elif found["lfm"]:
                lfm = self.text.index("static void test_lfm2_parser")
                if "tmpl" in loops:
                    self._body(lfm, self.text.index("static void test_template_output_peg_parsers"), loops["tmpl"])
            elif found["new"]:
                path = found["path"].strip()
                named = templates if path == "template_path" else loops.get(path, [])
                testers[found["name"]] = [path.strip('"')] if path.startswith('"') else named
            elif found["decl"]:
                if (value := self._value(rest)) is not None:
                    self.names[found["var"]] = value
            elif found["member"]:
                known = self.names.get(found["object"])
                self.names[found["object"]] = {
                    **(known if isinstance(known, dict) else {}),
                    found["key"]: self._value(rest),
                }
            else:
                at += self._case(rest, testers.get(found["tester"], []), line + source.count("\n", 0, found.start()))

    def _value(self, rest: str) -> Any:
        try:
            return Reader(rest, self.names).expression()
        except (SyntaxError, KeyError, TypeError, ValueError, IndexError):  # an expression of another kind
            return None

    def _case(self, rest: str, templates: list[str], line: int) -> int:
        """``text).expect(…).tools(…).run()``; the characters that it takes."""
        reader = Reader(rest, self.names)
        try:
            text, expected, more = reader.many(")")[0], Message(), dict[str, Any]()
            while True:
                reader.eat(".")
                name = reader.token[1]
                reader.next()
                reader.eat("(")
                arguments = reader.many(")")
                if name == "run":
                    break
                if name == "expect":
                    expected = Message(arguments[0].content, arguments[0].reasoning, list(arguments[0].calls))
                elif name == "expect_content":
                    expected.content = arguments[0]
                elif name == "expect_reasoning":
                    expected.reasoning = arguments[0]
                elif name == "expect_tool_calls":
                    expected.calls = [(one[0], one[1], one[2] if len(one) > 2 else "") for one in arguments[0]]
                else:
                    more[name] = arguments[0] if arguments else True
        except (SyntaxError, KeyError, TypeError, ValueError, IndexError):
            return 0
        self.cases += [Case(Path(one).name, line, text, expected, more) for one in templates]
        return reader.end - 1


# ---- schemas ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Texts:
    """A schema or grammar, and texts that follow it or do not."""

    kind: str  # schema, grammar
    name: str
    text: str
    passes: list[str]
    fails: list[str]


def schema_texts(root: Path) -> list[Texts]:
    """The cases of tests/test-grammar-integration.cpp."""
    text = (root / "tests" / "test-grammar-integration.cpp").read_text()
    found = []
    for begin in re.finditer(r"^    test_(schema|grammar)\(", text, re.MULTILINE):
        with contextlib.suppress(KeyError):  # two have their passing texts as tokens
            found.append(Texts(begin[1], *Reader(text[begin.end() :], {}).many(")")[:4]))
    return found


def as_request(message: Message | dict[str, Any]) -> dict[str, Any]:
    """A message of a case's conversation, as OpenAI's API has it."""
    if isinstance(message, dict):
        return message
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments, id_ in message.calls
    ]
    plain = {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning}
    return plain | ({"tool_calls": calls} if calls else {})
