"""A trial that reports every round as it ends. Runs in a child process (:mod:`ggufspec.worker`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from ggufspec import plain, worker
from ggufspec.bench import trial
from ggufspec.bench.trial import Result, Spec
from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.trace import Trace, spelled
from ggufspec.schema.rounds import TracedRound
from ggufspec.schema.trace import Written

__all__ = ["Result", "Spec", "measure", "recorder", "run"]


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Do the trial in this process; besides its own events there is ``round``, before those of the round's tokens."""
    return trial.run(spec, emit, stopping, trace=lambda decoder: recorder(decoder, emit))


def recorder(decoder: SpeculativeDecoder, emit: worker.Emit) -> Trace:
    """A trace of an answer, whose rounds become events ``round``."""
    model, names = decoder.target, cache(decoder.target.vocabulary)
    return Trace(
        lambda token: spelled(model.piece(token) or names()[token]),  # special tokens have no bytes
        lambda round_: emit({"event": "round", "round": asdict(round_)}),
    )


def measure(
    spec: Spec,
    *,
    on_round: Callable[[TracedRound], None],
    on_token: Callable[[Written], None],
    verbose: bool = False,
) -> Result:
    """Do the trial in a child process.

    Args:
        spec: what to run; it streams.
        on_round: called with every round when it is over, before its tokens.
        on_token: called with every token of the answer.
        verbose: let llama.cpp's log through to stderr.

    Raises:
        GgufspecError: what the user can mend.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    number = 0

    def on_event(event: dict[str, Any]) -> None:
        nonlocal number
        if event["event"] == "round":
            round_ = plain.load(TracedRound, event["round"])
            number = round_.number
            on_round(round_)
        elif event["event"] == "token":
            on_token(Written(event["token"], event["text"], event["source"], number))

    return worker.call(__name__, spec, Result, on_event=on_event, verbose=verbose)
