"""The line that is typed in a chat: history, completion, several lines, large pastes. All of prompt_toolkit is here."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from prompt_toolkit.styles import Style

from ggufspec.chat import commands as chat_commands
from ggufspec.display import counted, visible

_LONG_PASTE = 2_000  # characters from which a paste is shown as a placeholder
_LONG_ENTRY = 10_000  # characters from which a message is left out of the history
_MOST_HISTORY_BYTES = 1_000_000
_STYLE = Style.from_dict(
    {
        "prompt": "bold",
        "continuation": "#888888",
        "bottom-toolbar": "noreverse #888888",
        "bottom-toolbar.lossy": "bold",
        "completion-menu.meta.completion": "noreverse",
    }
)


class Typing:
    """Reads what the user types next.

    Args:
        history: the file that keeps what was typed; None keeps nothing.
        toolbar: the words of the line below, the important ones first, and whether each is a warning.
        input: a terminal; the program's own by default.
        output: the same.
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
        self._pasted: dict[str, str] = {}  # by placeholder; the history may bring it back
        self._leaving = False
        self._session: PromptSession[str] = PromptSession(
            message=[("class:prompt", "> ")],
            multiline=True,
            prompt_continuation=_continuation,
            completer=_Completions(),
            complete_while_typing=Condition(self._is_command),
            history=_history(history, self._whole) if history else InMemoryHistory(),
            key_bindings=self._keys(),
            bottom_toolbar=self._bottom,
            style=_STYLE,
            enable_suspend=True,
            input=input,
            output=output,
        )
        self._session.default_buffer.on_text_changed += self._stay

    def read(self) -> str:
        """What is typed next, with all that was pasted.

        Raises:
            EOFError: Ctrl-D, or Ctrl-C twice: the user leaves.
        """
        self._leaving = False
        text = self._whole(self._session.prompt())
        return text.encode("utf-8", "replace").decode("utf-8")  # bytes that were no UTF-8 came as half characters

    def _stay(self, _: object) -> None:
        self._leaving = False

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")

    def _bottom(self) -> StyleAndTextTuples:
        if self._leaving:
            return [("class:bottom-toolbar", "Ctrl-C again, or Ctrl-D, leaves")]
        words: list[tuple[str, bool]] = []
        left = self._session.output.get_size().columns - 1
        for word, warning in self._toolbar():
            word = visible(word)
            left -= len(word) + 3 * bool(words)
            if left < 0:
                break
            words.append((word, warning))
        shown: StyleAndTextTuples = []
        for word, warning in words:
            shown += [("class:bottom-toolbar", " · ")] * bool(shown)
            shown.append((f"class:bottom-toolbar{'.lossy' * warning}", word))
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

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._shortened(event.data.replace("\r\n", "\n").replace("\r", "\n")))

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if self._leaving and not event.current_buffer.text:
                event.app.exit(exception=EOFError)
                return
            event.current_buffer.reset()
            self._leaving = True

        return keys

    def _shortened(self, text: str) -> str:
        """A paste, or a placeholder for a long one: the editor would have to draw it at every key."""
        if len(text) < _LONG_PASTE:
            return text
        lines = text.count("\n") + 1
        word = f"[paste {len(self._pasted) + 1}: {len(text):,} characters, {counted(lines, 'line')}]"
        self._pasted[word] = text
        return word

    def _whole(self, text: str) -> str:
        """A text with what was pasted in place of its placeholders."""
        if not self._pasted:
            return text
        return re.sub("|".join(map(re.escape, self._pasted)), lambda found: self._pasted[found[0]], text)


def _continuation(width: int, line: int, wraps: int) -> StyleAndTextTuples:  # noqa: ARG001 - what prompt_toolkit gives
    """Before a further line; the rest of one that is too long for the terminal has only space there."""
    return [("class:continuation", "  " if wraps else "· ")]


class _Completions(Completer):
    """Of commands, their arguments, and files."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        if chat_commands.takes_path(before):
            argument = before.partition(" ")[2]
            yield from self._paths.get_completions(Document(argument, len(argument)), complete_event)
            return
        last = before.rpartition(" ")[2]
        for word, does in chat_commands.candidates(before):
            yield Completion(word, start_position=-len(last), display_meta=does)


class _History(FileHistory):
    """Without long messages; with the text of pastes, as the next chat does not know their placeholders."""

    def __init__(self, path: Path, whole: Callable[[str], str]) -> None:
        super().__init__(str(path))
        self._whole = whole

    def store_string(self, string: str) -> None:
        string = self._whole(string)
        if len(string) <= _LONG_ENTRY:
            with contextlib.suppress(OSError):
                super().store_string(string.encode("utf-8", "replace").decode("utf-8"))


def _history(path: Path, whole: Callable[[str], str] = str) -> History:
    """What was typed before, in a file of mode 600; in memory where it cannot be written.

    Args:
        path: the file.
        whole: puts what was pasted into a text.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            path.chmod(0o600)
            if path.stat().st_size > _MOST_HISTORY_BYTES:
                file.seek(-_MOST_HISTORY_BYTES // 2, os.SEEK_END)
                kept = file.read().partition(b"\n\n")[2]
                file.seek(0)
                file.write(kept)
                file.truncate()
    except OSError:
        return InMemoryHistory()
    return _History(path, whole)


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """While an answer is written: keys are not shown, and wait for the next question."""
    try:
        import termios
    except ImportError:
        yield
        return
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
