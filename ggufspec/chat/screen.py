"""Where a chat shows itself, and the answer that is coming."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ggufspec.chat import report
from ggufspec.chat.commands import Switches
from ggufspec.chat.stream import Plain, Rendered, stream
from ggufspec.schema import codec
from ggufspec.schema.rounds import TracedRound

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LONG_PROMPT = 256  # tokens of a prompt from which it is said that it is being read


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a chat shows itself."""

    console: Console  # standard output's, with :data:`ggufspec.chat.markdown.THEME`
    stderr: Console  # standard error's
    say: Callable[[str], None]  # prints a sentence that is not an answer
    busy: Callable[[], contextlib.AbstractContextManager[Callable[[str], None]]]  # shows what is waited for
    interactive: bool  # somebody types and looks
    streams: bool = True  # whether answers go to standard output
    quiet: bool = False  # no notes

    def note(self, text: str) -> None:
        """A sentence that may be missed."""
        if not self.quiet:
            self.say(text)

    def gap(self) -> None:
        """An empty line, if somebody looks."""
        if self.interactive:
            self.console.print()

    def show(self, what: RenderableType) -> None:
        """What was asked for and is not an answer: among the answers only if somebody looks."""
        (self.console if self.interactive else self.stderr).print(what)


class Answering:
    """Shows the events of one answer (:mod:`ggufspec.chat.session`); a context manager, which ends what is shown.

    With ``/debug on`` every round is a line as it comes, and the answer follows them.

    Args:
        screen: where.
        settings: how.
        dropped: turns that the last answer left out; more of them are said.
    """

    def __init__(self, screen: Screen, settings: Switches, dropped: int) -> None:
        self._screen, self._settings, self.dropped = screen, settings, dropped
        self._stream: Plain | Rendered | None = None
        self._waiting = contextlib.ExitStack()
        self._pieces: list[tuple[str, str]] = []
        self._thinks = False

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(text for text, _ in self._pieces)

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        match event["event"]:
            case "dropped":
                self._drop(event["turns"])
            case "prompt" if event["tokens"] > _LONG_PROMPT:
                self._wait(f"reading a prompt of {event['tokens']:,} tokens")
            case "reasoning" if not self._thinks:
                self._thinks = True
                self._wait("the model thinks")
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
            self._screen.say(f"{which} not fit the context any more: left out; -c makes it larger")
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

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.close()
        if self._settings.debug:
            for text, source in self._pieces:
                self._push(text, source)
        if self._stream is not None:
            self._stream.finish()
