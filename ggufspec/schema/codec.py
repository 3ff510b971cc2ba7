"""Converts values to plain JSON data and back, by pydantic.

Ctrl-C is held back meanwhile: pydantic-core drops an interrupt, or turns it into another error.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

from ggufspec.schema import interrupts

Value = TypeVar("Value")

_adapters: dict[Any, TypeAdapter[Any]] = {}  # making one takes longer than using it


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def dump(value: object, kind: Any = None) -> Any:
    """Convert a value to plain data; ``kind`` is its type if its class is not enough, such as ``list[int]``."""
    with interrupts.held():
        return _adapter(kind or type(value)).dump_python(value, mode="json")


def load(kind: type[Value], data: object) -> Value:
    """Make a value from plain data; pydantic.ValidationError if it does not fit the type."""
    with interrupts.held():
        value: Value = _adapter(kind).validate_python(data)
    return value


def load_json(kind: type[Value], text: bytes) -> Value:
    """Make a value from JSON, which may have NaN and Infinity."""
    with interrupts.held():
        value: Value = _adapter(kind).validate_json(text)
    return value
