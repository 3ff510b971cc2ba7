"""A trial that may fail: out of memory, an abort of llama.cpp. The failure is a row, not the end."""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec import worker
from ggufspec.bench import trial
from ggufspec.errors import GgufspecError
from ggufspec.schema.base import Failure


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of a trial: a result, or why there is none."""

    result: trial.Result | None
    failure: Failure | None = None


def attempt(spec: trial.Spec, *, on_event: worker.Emit | None = None, verbose: bool = False) -> Attempt:
    """Run a trial in a child process.

    Args:
        spec: the trial.
        on_event: told how far it is.
        verbose: let llama.cpp's log through.

    Raises:
        Interrupted: Ctrl-C; nothing else that goes wrong with the child.
    """
    try:
        return Attempt(trial.measure(spec, on_event=on_event, verbose=verbose))
    except GgufspecError as error:
        return Attempt(None, Failure(error.message, error.hint))
    except OSError as error:  # no memory for a process, no room for its log
        return Attempt(None, Failure(f"the trial could not be started: {error.strerror}", "free some memory, or disk"))
