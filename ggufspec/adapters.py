"""Pydantic's adapters: values as JSON and back."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

from ggufspec import interrupts

Value = TypeVar("Value")

_made: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[Value]) -> TypeAdapter[Value]:
    """A type's adapter. It is made once, and Ctrl-C waits for that: pydantic-core drops an interrupt meanwhile."""
    if kind not in _made:
        with interrupts.Held():
            _made[kind] = TypeAdapter(kind)
    return _made[kind]
