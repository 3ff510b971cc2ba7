"""A model's chat template: messages in, the text of a prompt out, as Hugging Face's ``apply_chat_template`` renders it.

A template comes with a file from anywhere. It runs in Jinja's immutable sandbox, within bounds of time, memory and
length. What stands in the messages is told from the template's own text, so that the caller can keep a user's
``<|im_end|>`` from ending the turn.

Source: ``_compile_jinja_template`` and ``render_jinja_template`` in transformers/utils/chat_template_utils.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from ggufspec import worker
from ggufspec.errors import ModelError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]  # role and content
_Made = TypeVar("_Made")

_HINT = "/chat off goes on without the template; another GGUF of the model may have a better one"
_LAST_S = 2.0
_MARKS = range(0xF0000, 0xFFFFE)  # private use: nobody's text
_Spans: TypeAlias = "tuple[_Spans, int, int] | None"  # the last, and those before it


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a template may take.

    Args:
        seconds: to compile, and to render once; a child that stays in one call of C is ended after ``_LAST_S`` more.
        characters: of the text, beside four times those of the messages.
        memory_bytes: beside what the process has, where the platform can say so.
    """

    seconds: float = 5.0
    characters: int = 1_000_000
    memory_bytes: int = 1 << 28


class RefusalError(ModelError):
    """The template itself says that it cannot render these messages (``raise_exception``)."""


class _TooLongError(BaseException):
    """The time is up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt's text: what the message of that index says, or what the template says (None)."""

    text: str
    message: int | None


class ChatTemplate:
    """A template, compiled.

    Args:
        source: Jinja, the file's ``tokenizer.chat_template``.
        bos: text of the token that begins a text.
        eos: text of the token that ends one.
        bounds: what it may take.

    Raises:
        ModelError: it is no template, or takes too long to read.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "", bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._tokens = {"bos_token": bos, "eos_token": eos}
        environment = _environment()  # its import is none of the template's time
        self._template = self._bounded(lambda: environment.from_string(source))

    def render(self, messages: Sequence[Message], now: datetime) -> str:
        """The prompt for the next answer.

        Args:
            messages: each with ``role`` (system, user, assistant) and ``content``.
            now: what the template is told if it asks for the date.

        Raises:
            RefusalError: the template says that such messages cannot be rendered.
            ModelError: it fails, takes too long, or its text is too long.
        """
        most = self._bounds.characters + 4 * sum(len(message["content"]) for message in messages)

        def refuse(message: object = "it gave no reason") -> NoReturn:
            raise RefusalError(f"the model's chat template refuses this conversation: {_plain(message)}", _HINT)

        def today(pattern: str) -> str:
            return now.strftime(pattern)

        def work() -> str:
            parts: list[str] = []
            length = 0
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                raise_exception=refuse,
                strftime_now=today,
                **self._tokens,
            ):
                parts.append(part)
                length += len(part)
                if length > most:
                    raise ModelError(f"the model's chat template makes a text of more than {most:,} characters", _HINT)
            return "".join(parts)

        return self._bounded(work)

    def pieces(self, messages: Sequence[Message], now: datetime, loose: Callable[[str], bool]) -> list[Piece]:
        """The rendered prompt, cut where a message's content begins and ends.

        A content may have been stripped of white space; one that ``loose`` allows may have been changed in any way.

        Args:
            messages: as for :meth:`render`.
            now: as for :meth:`render`.
            loose: whether it does no harm if a content's ends are mistaken.

        Returns:
            The pieces, which are the text together; it alone where the contents cannot be found in it.

        Raises:
            RefusalError: the template says that such messages cannot be rendered.
            ModelError: it fails, takes too long, or its text is too long.
        """
        text = self.render(messages, now)
        contents = [message["content"] for message in messages]
        taken = set(text).union(*contents)
        first, last = islice((chr(code) for code in _MARKS if chr(code) not in taken), 2)
        marked = [
            {**message, "content": f"{first}{index}{last}" if message["content"] else ""}
            for index, message in enumerate(messages)
        ]
        try:
            frame = re.split(f"{first}([0-9]+){last}", self.render(marked, now))
        except ModelError:
            return [Piece(text, None)]
        own, order = frame[::2], [int(index) for index in frame[1::2]]
        spans = _align(text, own, [contents[index] for index in order], lambda _: False)
        if spans is None:
            spans = _align(text, own, [contents[index] for index in order], loose)
        if spans is None:
            return [Piece(text, None)]
        pieces: list[Piece] = []
        end = 0
        for index, (start, stop) in zip(order, spans, strict=True):
            pieces += [Piece(text[end:start], None), Piece(text[start:stop], index)]
            end = stop
        return [piece for piece in (*pieces, Piece(text[end:], None)) if piece.text]

    def _bounded(self, work: Callable[[], _Made]) -> _Made:
        """Run foreign code within the bounds; every failure of it is a ModelError."""
        seconds = self._bounds.seconds
        too_long = ModelError(f"the model's chat template takes more than {seconds:g} s: it may be a trap", _HINT)
        try:
            with worker.within(seconds + _LAST_S, too_long), _limited_memory(self._bounds.memory_bytes):
                return _in_time(seconds, work)
        except ModelError:
            raise
        except _TooLongError:
            raise too_long from None
        except MemoryError:
            raise ModelError("the model's chat template takes too much memory: it may be a trap", _HINT) from None
        except Exception as error:  # whatever foreign code may raise
            said = _plain(error) or type(error).__name__
            raise ModelError(f"the model's chat template fails: {said}", _HINT) from None


def _plain(said: object) -> str:
    """A foreign message, in one line and short."""
    return " ".join("".join(each if each.isprintable() else " " for each in str(said)[:1000]).split())[:300]


def _align(
    text: str, own: Sequence[str], contents: Sequence[str], loose: Callable[[str], bool]
) -> list[tuple[int, int]] | None:
    """Where each content is in ``text``, which is ``own[0]``, a content, ``own[1]``, …, ``own[-1]``."""
    if not text.startswith(own[0]):
        return None
    stack: list[tuple[int, int, _Spans]] = [(0, len(own[0]), None)]  # contents found, where the next begins, the spans
    seen = set()
    while stack:
        count, start, spans = stack.pop()
        if count == len(contents):
            if start == len(text):
                return _unrolled(spans)
        elif (count, start) not in seen:
            seen.add((count, start))
            content, after = contents[count], own[count + 1]
            ends = _ends(text, start, content, after, free=loose(content))
            stack += [(count + 1, end + len(after), (spans, start, end)) for end in reversed(ends)]
    return None


def _ends(text: str, start: int, content: str, after: str, *, free: bool) -> list[int]:
    """Where a content that begins at ``start`` may end, so that ``after`` follows; the likeliest first."""
    forms = dict.fromkeys((content, content.strip(), content.rstrip(), content.lstrip()))
    ends = [start + len(form) for form in forms if text.startswith(form + after, start)]
    if free and after:
        end = text.find(after, start)
        while end >= 0:
            ends.append(end)
            end = text.find(after, end + 1)
    elif free:
        ends.append(len(text))
    return ends


def _unrolled(spans: _Spans) -> list[tuple[int, int]]:
    found = []
    while spans is not None:
        spans, start, end = spans
        found.append((start, end))
    return found[::-1]


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks answers for training, and means nothing here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        optimized=False,  # it would evaluate "x" * 10**9 while it compiles
        cache_size=0,
    )
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@contextlib.contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """Let the process take ``more`` bytes of address space in the block, where the platform can say so."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    wanted = pages * resource.getpagesize() + more
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _in_time(seconds: float, work: Callable[[], _Made]) -> _Made:
    """Do ``work``, which _TooLongError ends when the time is up, inside whatever loop it is.

    An alarm does it in the main thread of a process that has set none; elsewhere a look at the clock at every line.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        return _with_alarm(seconds, work)
    return _with_watch(seconds, work)


def _with_alarm(seconds: float, work: Callable[[], _Made]) -> _Made:
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if armed:
            raise _TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)  # again, should the first be lost in a destructor
            return work()
        finally:
            armed = False
    finally:  # once more, for the first may have been interrupted
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _with_watch(seconds: float, work: Callable[[], _Made]) -> _Made:
    until = time.monotonic() + seconds

    def look(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ARG001
        if time.monotonic() > until:
            raise _TooLongError
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        return work()
    finally:
        sys.settrace(before)
