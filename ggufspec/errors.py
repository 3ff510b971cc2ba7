"""Every failure that a user can mend: a message, a hint with the next thing to type, and an exit code."""

from __future__ import annotations


class GgufspecError(Exception):
    """A failure that the user can mend.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next, best a command to type; may be empty.
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
    """A child process ended before it gave its result.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next.
        ended_by: the name of the signal that ended it; ``deadline`` where the parent did; or empty.
    """

    def __init__(self, message: str, hint: str = "", ended_by: str = "") -> None:
        super().__init__(message, hint)
        self.ended_by = ended_by


class BlamedError(ChildError):
    """The child ended over something that would end it again: a chat template or a grammar, say."""


class StopError(GgufspecError):
    """Ctrl-C before there was anything to show."""

    exit_code = 130
