"""Chat screen, and the display of an answer as it is generated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ggufspec.chat import report
from ggufspec.chat.commands import ChatSwitches
from ggufspec.chat.stream import PlainOutput, RenderedOutput, stream
from ggufspec.schema import codec
from ggufspec.schema.rounds import TracedRound

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LONG_PROMPT = 256  # prompt length in tokens above which a message is shown during processing


@dataclass(frozen=True, slots=True)
class ChatScreen:
    """Output channels of a chat."""

    console: Console  # standard output, with :data:`ggufspec.chat.markdown.THEME`
    stderr: Console  # standard error
    say: Callable[[str], None]  # prints a sentence that is not part of an answer
    busy: Callable[[], contextlib.AbstractContextManager[Callable[[str], None]]]  # shows the current step
    interactive: bool  # True if a person types and reads
    streams: bool = True  # print answers to standard output
    quiet: bool = False  # True to print no notes

    def note(self, text: str) -> None:
        if not self.quiet:
            self.say(text)

    def gap(self) -> None:
        if self.interactive:
            self.console.print()

    def show(self, what: RenderableType) -> None:
        """Print requested output that is not an answer: to standard output if ``interactive``, else standard error."""
        (self.console if self.interactive else self.stderr).print(what)


class AnswerDisplay:
    """Display of one answer's events (:mod:`ggufspec.chat.session`), as a context manager.

    With ``/debug on`` every round is shown on a line as it arrives, and the answer follows at the end. ``dropped`` is
    the number of turns that the previous answer left out; only a larger number is reported.
    """

    def __init__(self, screen: ChatScreen, settings: ChatSwitches, dropped: int) -> None:
        self._screen, self._settings, self.dropped = screen, settings, dropped
        self._stream: PlainOutput | RenderedOutput | None = None
        self._waiting = contextlib.ExitStack()
        self._pieces: list[tuple[str, str]] = []

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self._pieces)

    def show(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "dropped":
                self._drop(event["turns"])
            case "prompt" if event["tokens"] > _LONG_PROMPT:
                self._wait(f"processing a prompt of {event['tokens']:,} tokens")
            case "round":
                self._waiting.close()
                self._screen.show(report.round_line(codec.load(TracedRound, event["round"])))
            case "token":
                self._waiting.close()
                self._pieces.append((event["text"], event["source"]))
                if not self._settings.debug:
                    self._push(event["text"], event["source"])

    def _drop(self, turns: int) -> None:
        if turns > self.dropped:
            which = "the oldest turn does" if turns == 1 else f"the {turns} oldest turns do"
            self._screen.say(f"{which} not fit the context any more (left out); use -c for a larger context")
        self.dropped = turns

    def _wait(self, what: str) -> None:
        if self._screen.interactive:
            self._waiting.enter_context(self._screen.busy())(what)

    def _push(self, text: str, source: str) -> None:
        if not self._screen.streams:
            return
        if self._stream is None:
            as_markdown = self._settings.renders and self._screen.interactive
            self._stream = stream(self._screen.console, as_markdown=as_markdown, tint=self._settings.tint)
        self._stream.push(text, source)

    def __enter__(self) -> AnswerDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.close()
        if self._settings.debug:
            for text, source in self._pieces:
                self._push(text, source)
        if self._stream is not None:
            self._stream.finish()
