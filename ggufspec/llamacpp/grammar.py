"""GBNF grammars and JSON schemas on llama.cpp's own grammar sampler.

``apply`` marks the tokens that may not follow; ``accept`` moves on and ends the process if the token may not, so a
token is always asked for first. A state is a clone of the sampler that is never moved (src/llama-grammar.cpp).
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ggufspec import foreign
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.llamacpp.gbnf import HINT, MAX_BYTES, MAX_REPETITION, check_gbnf
from ggufspec.llamacpp.library import complaints, forget_complaints, load
from ggufspec.llamacpp.model import Model

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data, llama.h
_REFUSED = -np.inf
_MOST_SCHEMA = 1 << 17  # characters
_MOST_NAME = 4096  # characters of a rule's name, or of a pattern
_BRACES = re.compile(r"\{([^}]*)")
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems")


class State:
    """What has been read of a grammar; ``handle`` is None behind the end of the text."""

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

    Of special tokens llama.cpp matches the name, ``<|tool|>`` say, though the text shows nothing of them.

    Args:
        model: the vocabulary; it must not be closed while the grammar is in use.
        text: GBNF, with a rule ``root``.

    Raises:
        UsageError: the text is no grammar, or one that llama.cpp refuses.
    """

    def __init__(self, model: Model, text: str) -> None:
        check_gbnf(text)
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the grammar is not Unicode text: {error.reason}", HINT) from None
        self._model = model
        self._lib = lib = model._lib
        forget_complaints()
        with _c_stderr() as printed:  # the parser's own complaints go there
            handle = lib.llama_sampler_init_grammar(model._vocab, data, b"root")
            printed.seek(0)
            said = printed.read().decode("utf-8", "replace").partition("\n")[0].removeprefix("parse: ")
        if not handle:
            raise UsageError(f"llama.cpp refuses the grammar: {said or complaints() or 'it gave no reason'}", HINT)
        self._start = State(lib, handle)
        self._end = State(lib, None)
        self._one = lib.llama_token_data()
        self._one_array = lib.llama_token_data_array(ctypes.pointer(self._one), 1, -1, False)
        self._one_pointer = ctypes.byref(self._one_array)

    def start(self) -> State:
        """The state before the first token."""
        return self._start

    def permits(self, state: State, token: int) -> bool:
        """Whether a text may go on with ``token``; a token that ends it, where the grammar may end."""
        if not state.handle or not 0 <= token < self._model.vocab_size:
            return False
        self._one.id = token
        self._one.logit = 0.0
        self._lib.llama_sampler_apply(state.handle, self._one_pointer)
        return bool(self._one.logit != _REFUSED)

    def permitted(self, state: State, ids: Ids) -> Mask:
        """(n,) :meth:`permits` of ``ids``."""
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

    def mask(self, state: State) -> Mask:
        """(vocab,) :meth:`permits` of the whole vocabulary; kept with the state, not to be changed."""
        if state.mask is None:
            state.mask = self.permitted(state, np.arange(self._model.vocab_size))
        return state.mask

    def advance(self, state: State, token: int) -> State | None:
        """The state after ``token``; None if it is not permitted. Nothing is permitted after the end."""
        if not self.permits(state, token):
            return None
        if self._model.is_end(token):
            return self._end
        after = State(self._lib, self._lib.llama_sampler_clone(state.handle))
        self._lib.llama_sampler_accept(after.handle, token)
        return after


def compile_grammar(model: Model, text: str) -> Grammar:
    """The constraint that a GBNF grammar is on a model's tokens.

    Raises:
        UsageError: the text is no grammar, or one that llama.cpp refuses.
    """
    return Grammar(model, text)


def schema_to_grammar(text: str) -> str:
    """The GBNF grammar of the JSON that a JSON schema describes, by llama-cpp-python's converter.

    Keywords that the converter does not know, ``minimum`` and ``uniqueItems`` say, restrict nothing. Objects have the
    properties of the schema, in its order, and no others unless it allows them.

    Raises:
        UsageError: the text is not JSON, or is no schema that the converter can read.
    """
    hint = """--json-schema '{"type": "object"}'"""
    if len(text) > _MOST_SCHEMA:
        raise UsageError(f"the schema has more than {_MOST_SCHEMA:,} characters", "a smaller one, or a grammar")
    try:
        schema = foreign.parse_json(text, "the schema")
    except GgufspecError as error:
        raise UsageError(f"the schema is not JSON: {error.message}", hint) from None
    if not isinstance(schema, dict):
        raise UsageError("the schema is not a JSON object", hint)
    _check_repetitions(schema)
    load()
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):  # type: ignore[misc]
        _size = 0

        def _format_literal(self, literal: str) -> str:
            """llama-cpp-python 0.3.36 leaves backslashes as they are."""
            return str(super()._format_literal(literal.replace("\\", "\\\\")))

        def _add_rule(self, name: str, rule: str) -> str:
            """A rule's name has those of all properties around it, and a repetition writes it out each time."""
            if len(name) > _MOST_NAME:
                raise ValueError(f"the names of its properties have {len(name):,} characters together")
            self._size += len(name) + len(rule)
            if self._size > MAX_BYTES:
                raise ValueError(f"it would have more than {MAX_BYTES:,} characters")
            return str(super()._add_rule(name, rule))

        def _visit_pattern(self, pattern: str, name: str) -> str:
            if len(pattern) > _MOST_NAME:
                raise ValueError(f"a pattern has {len(pattern):,} characters")
            return str(super()._visit_pattern(pattern, name))

    converter = Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    try:
        converter.visit(converter.resolve_refs(schema, "stdin"), "")
        grammar: str = converter.format_grammar()
    except (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = str(error) or type(error).__name__
        raise UsageError(f"the schema cannot be made a grammar: {what}", "write a grammar instead") from None
    return grammar


def _check_repetitions(schema: Any) -> None:
    """Refuse lengths that llama.cpp has no grammar for: the converter writes each repetition out.

    Raises:
        UsageError: names the keyword.
    """
    todo = [schema]
    while todo:
        part = todo.pop()
        items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, value in items:
            todo.append(value)
            counts: list[float]
            if key == "pattern" and isinstance(value, str):
                counts = [int(digits[:9]) for braces in _BRACES.findall(value) for digits in re.findall(r"\d+", braces)]
            else:
                counts = [value] if key in _LENGTHS and isinstance(value, (int, float)) else []
            if any(count > MAX_REPETITION for count in counts):
                raise UsageError(f"the schema's {key} repeats more than {MAX_REPETITION:,} times", "a smaller one")


@contextmanager
def _c_stderr() -> Iterator[IO[bytes]]:
    """What C code of this process prints to stderr meanwhile goes into a file."""
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
