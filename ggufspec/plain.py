"""Values as plain data (what JSON has) and back, by pydantic.

Ctrl-C waits for each of these: an interrupt that meets pydantic-core at work is dropped, or comes out as another error.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

from ggufspec import interrupts

Value = TypeVar("Value")

_adapters: dict[Any, TypeAdapter[Any]] = {}  # making one takes longer than using it


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def dump(value: object, kind: Any = None) -> Any:
    """A value as plain data; ``kind`` is its type where its class does not tell all."""
    with interrupts.Held():
        return _adapter(kind or type(value)).dump_python(value, mode="json")


def load(kind: type[Value], data: object) -> Value:
    """A value of type ``kind`` from plain data.

    Raises:
        pydantic.ValidationError: it is none.
    """
    with interrupts.Held():
        value: Value = _adapter(kind).validate_python(data)
    return value


def load_json(kind: type[Value], text: bytes) -> Value:
    """The same from JSON, which may have numbers that are none (NaN, Infinity).

    Raises:
        pydantic.ValidationError: it is none, or no JSON.
    """
    with interrupts.Held():
        value: Value = _adapter(kind).validate_json(text)
    return value
