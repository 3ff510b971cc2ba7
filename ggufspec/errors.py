"""Failures that a user can fix: each has a message, a hint with the next command, and an exit code."""

from __future__ import annotations

from collections.abc import Iterable


class GgufspecError(Exception):
    """A failure that the user can fix.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next, preferably a command to type; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(GgufspecError):
    """The command line or a call's arguments are wrong."""

    exit_code = 2


class ModelError(GgufspecError):
    """A model file is missing, damaged or unfit."""


class ChildError(GgufspecError):
    """A child process ended before it returned its result.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next.
        ended_by: name of the signal that ended it; ``deadline`` if the parent did; or empty.
    """

    def __init__(self, message: str, hint: str = "", ended_by: str = "") -> None:
        super().__init__(message, hint)
        self.ended_by = ended_by


class BlamedError(ChildError):
    """The child ended because of an input that would end it again, e.g. a chat template or a grammar."""


class StopError(GgufspecError):
    """Ctrl-C before there was anything to show."""

    exit_code = 130


def nearest(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return "did you mean X?" for a mistyped name, or "" if no known name is near."""
    import difflib

    near = difflib.get_close_matches(word.lower(), list(known), n=most, cutoff=0.65)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
