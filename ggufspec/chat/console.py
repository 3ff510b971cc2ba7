"""Chat input line, with history, completion and multi-line input. The only module that imports prompt_toolkit."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import get_cwidth

from ggufspec.chat.commands import COMMANDS
from ggufspec.schema.text import visible

_STYLE = Style.from_dict(
    {
        "prompt": "bold",
        "continuation": "#888888",
        "bottom-toolbar": "noreverse #888888",
        "bottom-toolbar.lossy": "bold",
        "completion-menu.meta.completion": "noreverse",
    }
)


class UserInput:
    """Reader of the user's input.

    Args:
        history: file in which to save the input; None saves nothing.
        toolbar: returns pairs (text, is a warning) for the toolbar below the input, the most important first.
        input: terminal input (``output`` likewise); default: the process's terminal.
    """

    def __init__(
        self,
        history: Path | None,
        toolbar: Callable[[], list[tuple[str, bool]]],
        *,
        input: Input | None = None,  # noqa: A002
        output: Output | None = None,
    ) -> None:
        self._toolbar = toolbar
        self._leaving = False
        self._session: PromptSession[str] = PromptSession(
            message=[("class:prompt", "> ")],
            multiline=True,
            prompt_continuation=_continuation,
            completer=_Completions(),
            complete_while_typing=Condition(self._is_command),
            history=_history(history) if history else InMemoryHistory(),
            key_bindings=self._keys(),
            bottom_toolbar=self._bottom,
            style=_STYLE,
            enable_suspend=True,
            input=input,
            output=output,
        )
        self._session.default_buffer.on_text_changed += self._stay

    def read(self) -> str:
        """Return the next input; raise EOFError if the user leaves with Ctrl-D or by pressing Ctrl-C twice."""
        self._leaving = False
        return _text(self._session.prompt())

    def _stay(self, _: object) -> None:
        self._leaving = False

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")

    def _bottom(self) -> StyleAndTextTuples:
        if self._leaving:
            return [("class:bottom-toolbar", "press Ctrl-C again, or Ctrl-D, to leave")]
        shown: StyleAndTextTuples = []
        room = self._session.output.get_size().columns
        for word, warning in self._toolbar():
            text = visible(word)
            room -= get_cwidth(text) + 3 * bool(shown)
            if shown and room < 0:  # show no partial entries
                break
            shown += [("class:bottom-toolbar", " · ")] * bool(shown)
            shown.append((f"class:bottom-toolbar{'.lossy' * warning}", text))
        return shown

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.text_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if self._leaving and not event.current_buffer.text:
                event.app.exit(exception=EOFError)
                return
            event.current_buffer.reset()
            self._leaving = True

        return keys


def _continuation(width: int, line: int, wraps: int) -> StyleAndTextTuples:  # noqa: ARG001 - prompt_toolkit's signature
    """Return the prefix of a continuation line; wrapped lines are only indented."""
    return [("class:continuation", "  " if wraps else "· ")]


def _words(does: Mapping[str, str]) -> Completer:
    return WordCompleter([*does], ignore_case=True, sentence=True, meta_dict=does)


_NAMES = _words({f"/{name}": about.does for name, about in COMMANDS.items()})
_ARGUMENTS: dict[str, Completer] = {
    f"/{name}": PathCompleter(expanduser=True)
    if about.form == "FILE"
    else _words({re.sub(":.*", ":", word): "" for word in about.words})  # a number follows the colon
    for name, about in COMMANDS.items()
}
_ARGUMENTS["/help"] = _words({name: about.does for name, about in COMMANDS.items()})


class _Completions(Completer):
    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        name, space, argument = document.text_before_cursor.partition(" ")
        completer, begun = (_ARGUMENTS.get(name.lower()), argument.lstrip()) if space else (_NAMES, name)
        if name == "/help":
            begun = begun.removeprefix("/")
        if name and completer:
            yield from completer.get_completions(Document(begun), complete_event)


class _History(FileHistory):
    """History file whose write errors are ignored, so that the chat continues."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(_text(string))


def _text(typed: str) -> str:
    """Replace lone surrogates, which stand for input bytes that are not UTF-8."""
    return typed.encode("utf-8", "replace").decode("utf-8")


def _history(path: Path) -> History:
    """Return a history in a file with mode 600, or in memory if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return _History(str(path))


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """Suppress the echo of keys typed during an answer; they become the input for the next question."""
    if sys.platform == "win32":
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = list(before)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)
