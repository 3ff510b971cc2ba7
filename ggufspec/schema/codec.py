"""Conversion of values to plain JSON data and back with pydantic.

Ctrl-C is held back during conversions, because pydantic-core drops interrupts or turns them into other errors.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

from ggufspec.schema import interrupts

Value = TypeVar("Value")

_adapters: dict[Any, TypeAdapter[Any]] = {}  # cache, because creating an adapter takes longer than using it


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def dump(value: object, kind: Any = None) -> Any:
    """Convert a value to plain data; pass its type as ``kind`` if its class is not enough (``list[int]``)."""
    with interrupts.held():
        return _adapter(kind or type(value)).dump_python(value, mode="json")


def load(kind: type[Value], data: object) -> Value:
    """Convert plain data to a value of type ``kind``; raise pydantic.ValidationError if the data do not fit."""
    with interrupts.held():
        value: Value = _adapter(kind).validate_python(data)
    return value


def load_json(kind: type[Value], text: bytes) -> Value:
    """Convert JSON text, in which NaN and Infinity are allowed, to a value of type ``kind``."""
    with interrupts.held():
        value: Value = _adapter(kind).validate_json(text)
    return value
