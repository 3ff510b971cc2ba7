"""llama.cpp's own chat library: templates, tools, reasoning and JSON schemas for every model family it supports.

The library comes with llama-cpp-python as ``libllama-common``, whose functions take C++ types; ``chat_library.cpp``
wraps them in C functions, and :mod:`ggufspec.llamacpp.chat_build` compiles the wrapper. Templates and schemas are
untrusted, so call the library only in a child process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.errors import GgufspecError
from ggufspec.files import untrusted
from ggufspec.hardware import install
from ggufspec.llamacpp.library import bound, imported

SOURCE = Path(__file__).with_name("chat_library.cpp")
WITHOUT = "tools, --json-schema and response_format need llama.cpp's chat library"

_TEXT, _HANDLE, _NUMBER = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
_OUT = ctypes.POINTER(_HANDLE)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "chat_free": (None, [_HANDLE]),
    "chat_open": (_HANDLE, [_TEXT, _TEXT, _TEXT, _OUT]),
    "chat_close": (None, [_HANDLE]),
    "chat_apply": (_HANDLE, [_HANDLE, _TEXT]),
    "chat_reader": (_HANDLE, [_TEXT, _OUT]),
    "chat_reader_close": (None, [_HANDLE]),
    "chat_read": (_HANDLE, [_HANDLE, _TEXT, _NUMBER]),
    "chat_schema": (_HANDLE, [_TEXT]),
    "chat_accept": (_NUMBER, [_HANDLE, _NUMBER]),
}


class ChatError(Exception):
    """Error from llama.cpp's chat library about a template, a conversation, a schema or an answer."""


@dataclass(frozen=True, slots=True)
class GrammarTrigger:
    """Trigger that starts a lazy grammar: a word or a regular expression."""

    type: int  # enum common_grammar_trigger_type, common/common.h
    value: str


@dataclass(frozen=True, slots=True)
class AppliedTemplate:
    """A prompt, and how to constrain and parse its answer."""

    prompt: str
    grammar: str = ""  # GBNF; empty: unconstrained
    lazy: bool = False  # True if the grammar applies only after a trigger
    triggers: tuple[GrammarTrigger, ...] = ()
    generation_prompt: str = ""  # end of the prompt that belongs to the answer, e.g. the start of reasoning
    thinking: tuple[str, tuple[str, ...]] = ("", ())  # start marker of reasoning, and possible end markers
    preserved: tuple[str, ...] = ()  # control tokens that are part of the answer's text
    stops: tuple[str, ...] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)  # arguments of :class:`AnswerReader`


def library_path() -> Path:
    """Return the path of the compiled library, which may not exist; the name contains the version and a source hash."""
    made_of = hashlib.sha256(untrusted.read_bytes(SOURCE, 1 << 20)).hexdigest()[:8]
    version = importlib.metadata.version("llama-cpp-python")
    ending = "dylib" if platform.system() == "Darwin" else "so"
    return Path(sys.prefix) / "lib" / "ggufspec" / f"libchat-{version}-{made_of}.{ending}"


@functools.cache
def load_chat_library() -> Any:
    """Return llama.cpp's chat library.

    Raises:
        GgufspecError: the library is missing, of another version, or cannot be opened; the hint is the build command.
    """
    llama = imported()
    try:
        path = library_path()
        if not path.is_file():
            raise GgufspecError("llama.cpp's chat library is missing or of another version", install.CHAT_LIBRARY)
        ctypes.CDLL(str(common_library(llama)))  # uses the loaded libllama; a second copy must not be loaded
        return bound(ctypes.CDLL(str(path)), _FUNCTIONS)
    except (OSError, AttributeError, importlib.metadata.PackageNotFoundError) as error:
        raise GgufspecError(f"llama.cpp's chat library cannot be opened: {error}", install.CHAT_LIBRARY) from None


def common_library(llama: Any) -> Path:
    """Return the path of the installed llama-cpp-python's ``libllama-common``; raise GgufspecError if it is missing."""
    folder = Path(llama.__file__).parent.parent / "lib"
    for name in ("libllama-common.so.0", "libllama-common.so", "libllama-common.dylib"):
        if (folder / name).exists():
            return folder / name
    raise GgufspecError(
        "this llama-cpp-python does not include llama.cpp's chat library", install.repair_command(source=True)
    )


def why_chat_library_is_missing() -> GgufspecError | None:
    """Return why the library cannot be used; None if it can."""
    try:
        load_chat_library()
    except GgufspecError as error:
        return error
    return None


class CompiledTemplate:
    """A compiled Jinja chat template with the variables ``bos_token`` and ``eos_token`` set to ``bos`` and ``eos``.

    Raises:
        ChatError: the source is not a valid template.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self._library = load_chat_library()
        self._handle = _made(self._library, "chat_open", source.encode(), bos.encode(), eos.encode())

    def apply(self, request: Mapping[str, Any]) -> AppliedTemplate:
        """Render a request to a prompt.

        The request has ``messages``, ``tools``, ``tool_choice`` and ``parallel_tool_calls`` as in OpenAI's API,
        ``json_schema`` and ``grammar`` as text, the template's variables as ``options``, and the Unix time ``now``.

        Raises:
            ChatError: the template fails, or refuses the conversation.
        """
        found = _answer(self._library, self._library.chat_apply(self._handle, _encoded(request)))
        return AppliedTemplate(
            prompt=found["prompt"],
            grammar=found["grammar"],
            lazy=found["lazy"],
            triggers=tuple(GrammarTrigger(*one) for one in found["triggers"]),
            generation_prompt=found["generation_prompt"],
            thinking=(found["thinking_start"], tuple(found["thinking_ends"])),
            preserved=tuple(found["preserved"]),
            stops=tuple(found["stops"]),
            reading={name: found[name] for name in ("format", "generation_prompt", "parser")},
        )

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.chat_close(handle)


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """Addition to a message from one piece of an answer."""

    content: str = ""
    reasoning: str = ""
    call: int = -1  # index of the tool call that the other fields belong to
    id: str = ""
    name: str = ""
    arguments: str = ""

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {"call": self.call} if self.call >= 0 else {}
        texts = ("content", "reasoning", "id", "name", "arguments")
        return found | {name: text for name in texts if (text := getattr(self, name))}


class AnswerReader:
    """Incremental parser of an answer, configured by ``AppliedTemplate.reading``; ``tools: False`` disables tool calls.

    Raises:
        ChatError: the answer cannot be parsed.
    """

    def __init__(self, reading: Mapping[str, Any]) -> None:
        self._library = load_chat_library()
        self._handle = _made(self._library, "chat_reader", _encoded(reading))

    def read(self, piece: str, *, final: bool = False) -> list[MessageDelta]:
        """Return what a piece adds to the message; if it adds nothing, the caller must prepend it to the next piece."""
        found = _answer(self._library, self._library.chat_read(self._handle, piece.encode(), int(final)))
        return [MessageDelta(**one) for one in found["deltas"]]

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.chat_reader_close(handle)


def schema_grammar(schema: str) -> str:
    """Convert a JSON schema to a GBNF grammar.

    Raises:
        ChatError: the text is not a schema or cannot be converted.
        GgufspecError: the library is missing.
    """
    library = load_chat_library()
    grammar: str = _answer(library, library.chat_schema(schema.encode()))["grammar"]
    return grammar


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _taken(library: Any, pointer: Any) -> str:
    text = ctypes.string_at(pointer).decode("utf-8", "replace")
    library.chat_free(pointer)
    return text


def _answer(library: Any, pointer: Any) -> dict[str, Any]:
    text = _taken(library, pointer)
    if text.startswith("!"):
        raise ChatError(text[1:])
    found: dict[str, Any] = untrusted.parse_json(text, "the output of llama.cpp's chat library")
    return found


def _made(library: Any, name: str, *arguments: bytes) -> Any:
    error = _HANDLE()
    handle = getattr(library, name)(*arguments, ctypes.byref(error))
    if not handle:
        raise ChatError(_taken(library, error))
    return handle
