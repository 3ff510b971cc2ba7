"""GBNF grammars and JSON schemas, enforced by llama.cpp's own grammar sampler.

The sampler's ``apply`` marks forbidden tokens. Its ``accept`` advances it, but a forbidden token aborts the process, so
every token is checked first. A state is a clone of the sampler that is not advanced again (src/llama-grammar.cpp).

llama.cpp's parser does not survive every grammar: hidden left recursion and rules that lead to each other in
exponentially many ways exhaust its stack, memory or time. In a child process this ends only the child, with an error
that names the grammar (:func:`ggufspec.child.within`).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ggufspec import child
from ggufspec.errors import ChildError, GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.llamacpp import chat_library
from ggufspec.llamacpp.chat_library import AppliedTemplate, ChatError
from ggufspec.llamacpp.library import complaints, forget_complaints, load_library
from ggufspec.llamacpp.model import Model

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MAX_BYTES = 1 << 20  # maximum number of characters in a grammar
MAX_NESTING = 1000  # maximum depth of groups; the parser is recursive, and 20,000 levels overflow an 8 MiB stack
MAX_REPETITION = 2000  # MAX_REPETITION_THRESHOLD in src/llama-grammar.cpp
MAX_ALTERNATIVES = 100_000
_MAX_SECONDS, _MAX_MEMORY = 5.0, 2 << 30  # seconds and bytes allowed for parsing
_HINT = "the syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md"

# Match string literals, character sets and comments; everything else is rule names, groups and repetitions.
_TEXT = re.compile(r'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)|\[[^\]\\]*(?:\\.?[^\]\\]*)*(?:\]|\Z)|#[^\n]*', re.DOTALL)
_RULE = re.compile(r"^[ \t]*([a-zA-Z0-9-]+)[ \t]*::=", re.MULTILINE)
_REPETITION = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")
_ALL_RULES = "ggufspec-all-rules"

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data, llama.h
_REFUSED = -np.inf
_MOST_SCHEMA = 1 << 17  # maximum number of characters in a JSON schema
_SCHEMA_HINT = "use fewer properties, or a smaller minLength, maxLength, minItems or maxItems"


class GrammarState:
    """A position in a grammar; ``handle`` is None after the end of the text."""

    __slots__ = ("_free", "handle", "mask")

    def __init__(self, lib: Any, handle: Any) -> None:
        self.handle = handle
        self.mask: Mask | None = None
        self._free = lib.llama_sampler_free

    def __del__(self) -> None:
        if self.handle:
            self._free(self.handle)


class Grammar:
    """A grammar over one model's vocabulary; a draft with the same vocabulary can use it too.

    Special tokens match by name, e.g. ``<|tool|>``, although they add nothing to the text. The model must not be closed
    while the grammar is in use. ``text`` is GBNF with a rule named ``root``.

    Raises:
        UsageError: the text is not a grammar, exceeds a limit, or is refused by llama.cpp.
    """

    def __init__(self, model: Model, text: str) -> None:
        self._model = model
        self._lib = lib = model._lib
        self._start = _parse(lib, model._vocab, text)
        self._end = GrammarState(lib, None)
        self._one = lib.llama_token_data()
        self._one_array = lib.llama_token_data_array(ctypes.pointer(self._one), 1, -1, False)
        self._one_pointer = ctypes.byref(self._one_array)

    def start(self) -> GrammarState:
        """Return the state before the first token."""
        return self._start

    def begin_after(self, text: str) -> None:
        """Make :meth:`start` the state after ``text``; raise UsageError if the grammar does not begin with it."""
        state: GrammarState | None = self._start
        for index, token in enumerate(self._model.tokenize(text, special=True, start=False)):
            piece = self._model.piece(token, special=True)
            if index == 0 and piece[:1].isspace() and not text[:1].isspace():
                continue  # some tokenizers put a space before the first word
            state = None if state is None else self.advance(state, token)
        if state is None:
            raise UsageError("the chat template's grammar does not match the end of its prompt", "leave the tools out")
        self._start = state

    def is_free(self, state: GrammarState) -> bool:  # noqa: ARG002
        """Return True if every token may follow, as before a lazy grammar begins."""
        return False

    def permits(self, state: GrammarState, token: int) -> bool:
        """Return True if ``token`` may follow or, for an end token, if the grammar may end here."""
        if not state.handle or not 0 <= token < self._model.vocab_size:
            return False
        self._one.id = token
        self._one.logit = 0.0
        self._lib.llama_sampler_apply(state.handle, self._one_pointer)
        return bool(self._one.logit != _REFUSED)

    def permitted(self, state: GrammarState, ids: Ids) -> Mask:
        """Return a mask (n,) of the ``ids`` that :meth:`permits` allows."""
        if not state.handle:
            return np.zeros(ids.size, np.bool_)
        if state.mask is not None:
            return state.mask[ids]
        rows = np.zeros(ids.size, _CANDIDATE)
        rows["id"] = ids
        data = rows.ctypes.data_as(self._lib.llama_token_data_p)
        self._lib.llama_sampler_apply(
            state.handle, ctypes.byref(self._lib.llama_token_data_array(data, ids.size, -1, False))
        )
        mask: Mask = rows["logit"] != _REFUSED
        return mask

    def mask(self, state: GrammarState) -> Mask:
        """Return a mask (vocab,) of the tokens that :meth:`permits` allows. Do not change it: the state caches it."""
        if state.mask is None:
            state.mask = self.permitted(state, np.arange(self._model.vocab_size))
        return state.mask

    def advance(self, state: GrammarState, token: int) -> GrammarState | None:
        """Return the state after ``token``; None if it is not permitted. No token is permitted after the end."""
        if not self.permits(state, token):
            return None
        if self._model.is_end(token, of_grammar=True):
            return self._end
        after = GrammarState(self._lib, self._lib.llama_sampler_clone(state.handle))
        self._lib.llama_sampler_accept(after.handle, token)
        return after


class _Free(GrammarState):
    """State before a lazy grammar takes effect, or after the text has left it; every token is permitted.

    The state holds the end of the text, in which a trigger may begin, and its tokens. Nothing triggers the grammar
    within reasoning (``thinking``), or after text that only looked like a call (``over``).
    """

    __slots__ = ("over", "text", "thinking", "tokens")

    def __init__(self, text: bytes = b"", tokens: tuple[int, ...] = (), *, thinking: bool, over: bool = False) -> None:
        self.handle, self.mask, self._free = None, None, None
        self.text, self.tokens, self.thinking, self.over = text, tokens, thinking, over


class LazyGrammar(Grammar):
    """Grammar that takes effect at a trigger, e.g. the start of a tool call; before it, every token is permitted.

    If the text after a trigger violates the grammar, e.g. within the same token, it is not a call, and every token is
    permitted again. Raises as :class:`Grammar` does.
    """

    def __init__(self, model: Model, applied: AppliedTemplate) -> None:
        super().__init__(model, applied.grammar)
        patterns = [_PATTERNS[one.type](one.value) for one in applied.triggers]
        self._trigger = re.compile("|".join(f"(?:{one})" for one in patterns).encode())
        texts = (ctypes.c_char_p * len(patterns))(*(one.encode() for one in patterns))
        made = self._lib.llama_sampler_init_grammar_lazy_patterns
        grammar = applied.grammar.encode()
        self._begin = GrammarState(self._lib, made(model._vocab, grammar, b"root", texts, len(patterns), None, 0))
        opens, closes = applied.thinking
        self._opens = opens.strip().encode()
        self._closes = [one.strip().encode() for one in closes if one.strip()]
        prompt = applied.generation_prompt.encode()
        opened = self._opens and prompt.rfind(self._opens) > max(map(prompt.rfind, self._closes), default=-1)
        self._first = _Free(thinking=bool(opened))

    def start(self) -> GrammarState:
        return self._first

    def is_free(self, state: GrammarState) -> bool:
        return isinstance(state, _Free)

    def permits(self, state: GrammarState, token: int) -> bool:
        return isinstance(state, _Free) or super().permits(state, token)

    def permitted(self, state: GrammarState, ids: Ids) -> Mask:
        return np.ones(ids.size, np.bool_) if isinstance(state, _Free) else super().permitted(state, ids)

    def advance(self, state: GrammarState, token: int) -> GrammarState | None:
        if not isinstance(state, _Free):
            return super().advance(state, token)
        if self._model.is_end(token):
            return self._end
        if state.over:
            return state
        text, tokens = state.text + self._model.piece(token, special=True), (*state.tokens, token)
        if state.thinking:
            closed = any(one in text for one in self._closes)
            return _Free(b"" if closed else text[-_MARK_BYTES:], thinking=not closed)
        if self._opens and text.endswith(self._opens):
            return _Free(thinking=True)
        if not self._trigger.search(text):
            return _Free(text, tokens, thinking=False)
        begun = GrammarState(self._lib, self._lib.llama_sampler_clone(self._begin.handle))
        accept = chat_library.load_chat_library().chat_accept
        if all(accept(begun.handle, one) for one in tokens):
            return begun
        return _Free(thinking=False, over=True)


def _anchored(pattern: str) -> str:
    return f"{'' if pattern.startswith('^') else '^'}{pattern}{'' if pattern.endswith('$') else '$'}"


# Patterns by common_grammar_trigger_type (common/common.h), built as in common_sampler_init (common/sampling.cpp)
_PATTERNS: dict[int, Callable[[str], str]] = {1: re.escape, 2: str, 3: _anchored}
_MARK_BYTES = 256  # maximum length of the marker that ends reasoning, which may span several tokens


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """A grammar to check, or a JSON schema to convert to a grammar."""

    text: str
    is_schema: bool = False


@dataclass(frozen=True, slots=True)
class GrammarResult:
    """A grammar that llama.cpp can use."""

    text: str


def check_grammar(text: str) -> str:
    """Parse a grammar in a child process, without a model, and return it.

    Raises:
        UsageError: as for :class:`Grammar`, or parsing takes too long.
        ChildError: llama.cpp crashed on the grammar.
    """
    _check_limits(text)
    return _checked(GrammarJob(text))


def check_schema(text: str) -> str:
    """Convert a JSON schema to a grammar and check it, in a child process because the result may take gigabytes.

    Raises:
        UsageError: as for :func:`schema_to_grammar`; or llama.cpp cannot use the grammar, or takes too long.
        ChildError: llama.cpp crashed on the grammar.
    """
    if len(text) > _MOST_SCHEMA:
        raise UsageError(f"the schema has more than {_MOST_SCHEMA:,} characters", "use a smaller schema or a grammar")
    return _checked(GrammarJob(text, is_schema=True))


def _checked(spec: GrammarJob) -> str:
    try:
        return child.call(__name__, spec, GrammarResult).text
    except ChildError as error:
        if error.ended_by != "deadline":
            raise
        raise UsageError(error.message, error.hint) from None


def run(spec: GrammarJob, emit: child.Emit, stopping: threading.Event) -> GrammarResult:  # noqa: ARG001
    """Convert and parse the text in this process."""
    lib = load_library()
    if not spec.is_schema:
        _parse(lib, None, spec.text)
        return GrammarResult(spec.text)
    try:
        with child.within(_MAX_SECONDS, "the schema", _SCHEMA_HINT), child.limited_memory(_MAX_MEMORY):
            text = schema_to_grammar(spec.text)
    except MemoryError:
        raise UsageError("the schema takes too much memory", _SCHEMA_HINT) from None
    try:
        _parse(lib, None, text)
    except UsageError as error:
        raise UsageError(f"the schema cannot be used: {error.message}", _SCHEMA_HINT) from None
    return GrammarResult(text)


def _parse(lib: Any, vocabulary: Any, text: str) -> GrammarState:
    names = _check_limits(text)
    hint = "simplify it: use fewer alternatives, and no rule that begins with itself"
    with child.within(_MAX_SECONDS, "the grammar", hint), child.limited_memory(_MAX_MEMORY):
        start = GrammarState(lib, _init(lib, vocabulary, text, "root"))
        if len(names) > 1:  # parse all rules now, so that an invalid rule fails here and not in the middle of an answer
            GrammarState(lib, _init(lib, vocabulary, f"{text}\n{_ALL_RULES} ::= {' | '.join(names)}\n", _ALL_RULES))
    return start


def _init(lib: Any, vocabulary: Any, text: str, root: str) -> Any:
    forget_complaints()
    with _c_stderr() as printed:  # the parser prints its messages to stderr
        handle = lib.llama_sampler_init_grammar(vocabulary, text.encode(), root.encode())
        printed.seek(0)
        reason = _reason(printed.read().decode("utf-8", "replace"), text)
    if not handle:
        raise UsageError(f"llama.cpp refuses the grammar: {reason or complaints()}", _HINT)
    return handle


def _check_limits(text: str) -> list[str]:
    """Check sizes, and syntax on which llama.cpp fails later or aborts, and return the names of the rules."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"the grammar has more than {MAX_BYTES:,} characters", "use fewer or shorter rules")
    if "\0" in text or (not text.isascii() and any("\ud800" <= one <= "\udfff" for one in text)):
        raise UsageError("the grammar has a null character or is not Unicode text", _HINT)
    bare = _TEXT.sub(" ", text)
    names = list(dict.fromkeys(_RULE.findall(bare)))
    if "root" not in names:
        raise UsageError("the grammar has no rule named root", 'root ::= "yes" | "no"')
    if bare.count("|") > MAX_ALTERNATIVES:
        raise UsageError(f"the grammar has more than {MAX_ALTERNATIVES:,} alternatives", "use fewer alternatives")
    steps = np.frombuffer(bare.encode(), np.uint8)
    if np.cumsum((steps == ord("(")) * 1 - (steps == ord(")"))).max(initial=0) > MAX_NESTING:
        raise UsageError(f"the grammar nests more than {MAX_NESTING:,} groups", "use fewer parentheses")
    for low, high in _REPETITION.findall(bare):
        if max(len(low), len(high)) > 9 or max(int(low), int(high or 0)) > MAX_REPETITION:
            raise UsageError(f"the grammar repeats something more than {MAX_REPETITION:,} times", "use * or +")
        if high and int(high) < int(low):
            raise UsageError(f"the grammar's {{{low},{high}}} has a maximum below its minimum", f"{{{high},{low}}}")
    if found := re.search(r"[<!][^\s]*", bare):  # llama.cpp's apply and accept disagree on this syntax
        raise UsageError(f"the grammar names a token, {found[0][:30]}: only characters are supported", _HINT)
    return names


def _reason(printed: str, text: str) -> str:
    """Return the parser's error with a line number; the parser prints "MESSAGE at REST", a blank line and the text."""
    message = printed.removesuffix(f"\n\n{text}\n").removeprefix("parse: ").removeprefix("error parsing grammar: ")
    what, at, rest = message.partition(" at ")
    if not at or not text.endswith(rest):
        return message.partition("\n")[0][:300].strip()
    line = text[: len(text) - len(rest)].count("\n") + 1
    place = repr(rest.partition("\n")[0][:30]) if rest.strip() else "the end"
    return f"line {line}: {what} at {place}"


def compile_grammar(model: Model, wanted: str | AppliedTemplate) -> Grammar:
    """Compile a GBNF grammar or a chat template's grammar into a constraint on a model's tokens.

    A template's grammar is either lazy, or begins with the generation prompt, which is the end of the prompt.

    Raises:
        UsageError: as for :class:`Grammar`, or the grammar does not begin with the generation prompt.
    """
    if isinstance(wanted, str):
        return Grammar(model, wanted)
    if wanted.lazy:
        return LazyGrammar(model, wanted)
    grammar = Grammar(model, wanted.grammar)
    grammar.begin_after(wanted.generation_prompt)
    return grammar


def schema_to_grammar(text: str) -> str:
    """Convert a JSON schema to a GBNF grammar with llama.cpp's converter.

    Keywords that the converter does not support, such as ``uniqueItems``, are ignored. Objects have the schema's
    properties, in its order, and no others unless it allows them.

    Raises:
        UsageError: the text is not JSON, or the schema cannot be converted or enforced.
        GgufspecError: llama.cpp's chat library is missing.
    """
    hint = """--json-schema '{"type": "object"}'"""
    try:
        schema = untrusted.parse_json(text, "the schema")
    except GgufspecError as error:
        raise UsageError(f"the schema is not JSON: {error.message}", hint) from None
    if not isinstance(schema, dict):
        raise UsageError("the schema is not a JSON object", hint)
    if lacking := chat_library.why_chat_library_is_missing():
        raise UsageError(chat_library.WITHOUT, lacking.hint)
    with _c_stderr() as printed:  # the converter prints what it cannot enforce
        try:
            grammar = chat_library.schema_grammar(plain_patterns(text))
        except ChatError as error:
            what = f"the schema cannot be converted to a grammar: {error}"
            raise UsageError(what, "write a grammar instead") from None
        printed.seek(0)
        warned = printed.read().decode("utf-8", "replace").partition("incomplete: ")[2].strip()
    if warned:
        why = warned.partition(", accepting any string")[0][:300]
        raise UsageError(f"the schema cannot be enforced: {why}", "leave that out, or write a grammar instead")
    return grammar


_PATTERN = re.compile(r'("pattern"\s*:\s*)("(?:[^"\\]|\\.)*")')
_CLASS = re.compile(r"\\(.)|\[|\]", re.DOTALL)
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \t\n\r"}


def plain_patterns(schema: str) -> str:
    """Replace character classes that the converter does not support, e.g. digits, in a JSON schema's patterns."""

    def pattern(found: re.Match[str]) -> str:
        inside = False

        def one(part: re.Match[str]) -> str:
            nonlocal inside
            if part[1] is None:
                inside = part[0] == "["
                return part[0]
            known = _CLASSES.get(part[1])
            return part[0] if known is None else known if inside else f"[{known}]"

        return found[1] + json.dumps(_CLASS.sub(one, untrusted.parse_json(found[2], "a pattern")), ensure_ascii=False)

    return _PATTERN.sub(pattern, schema)


@contextmanager
def _c_stderr() -> Iterator[IO[bytes]]:
    """Redirect C code's stderr output to a file."""
    with tempfile.TemporaryFile() as file:
        try:
            saved = os.dup(2)
        except OSError:  # there is no stderr
            yield file
            return
        try:
            os.dup2(file.fileno(), 2)
            yield file
        finally:
            with suppress(OSError):
                os.dup2(saved, 2)
            os.close(saved)
