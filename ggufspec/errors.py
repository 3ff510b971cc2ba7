"""Errors that a user can fix, each with a message, a hint and an exit code."""

from __future__ import annotations

from collections.abc import Iterable


class GgufspecError(Exception):
    """Failure that the user can fix.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next, preferably a command to type; may be empty.
        instead: (wrong, right) file; if the command line has the wrong one, the hint repeats it with the right one.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", instead: tuple[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.instead = instead


class UsageError(GgufspecError):
    """Wrong command line or arguments."""

    exit_code = 2


class ModelError(GgufspecError):
    """Missing, damaged or unsuitable model file."""


class MisfitError(ModelError):
    """Draft that cannot draft for the target."""


class ChildError(GgufspecError):
    """End of a child process before it returned its result.

    ``ended_by`` is the name of the signal, ``deadline`` if the parent ended it, or empty.
    """

    def __init__(self, message: str, hint: str = "", ended_by: str = "") -> None:
        super().__init__(message, hint)
        self.ended_by = ended_by


class BlamedError(ChildError):
    """End of a child process caused by an input that would end it again, e.g. a chat template or a grammar."""


class StopError(GgufspecError):
    """Ctrl-C before there was anything to show."""

    exit_code = 130


def alike(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known names that a mistyped one may mean, the nearest first."""
    import difflib

    names = {name.lower().lstrip("-"): name for name in known}  # ignore dashes, which all options share
    near = difflib.get_close_matches(word.lower().lstrip("-"), names, n=most, cutoff=0.65)
    return [names[one] for one in near]


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return "did you mean X?" for a mistyped name, or "" if no known name is near."""
    near = alike(word, known, most)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
