"""Conversation with a pair, independent of the source of its input. Commands are in :mod:`ggufspec.chat.actions`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ggufspec.chat import commands as chat_commands
from ggufspec.chat import report, session
from ggufspec.chat.commands import ChatSwitches
from ggufspec.chat.screen import AnswerDisplay, ChatScreen
from ggufspec.child import Interrupted, Session
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import random_seed
from ggufspec.decoding.threads import is_busy, is_due
from ggufspec.errors import ChildError, GgufspecError, StopError
from ggufspec.prompting import conversation
from ggufspec.prompting.conversation import Conversation
from ggufspec.reports.words import shortened
from ggufspec.schema.chat import ChatDocument, ChatFigures
from ggufspec.schema.text import counted


class Talk:
    """Conversation with a pair, which is loaded for it.

    Args:
        spec: the placed pair, which a child process loads.
        settings: initial switches.
        screen: where the conversation is shown.
        name: the pair's name.
        about: description of the pair for documents.
        verbose: show llama.cpp's log.

    Attributes:
        ready: the models that :meth:`open` loaded.
        stopped: True if Ctrl-C was pressed during the last answer.
    """

    ready: session.ChatReady
    _last: session.ChatReply  # last reply, with the context tokens used and the number of turns that did not fit

    def __init__(
        self,
        spec: session.ChatJob,
        settings: ChatSwitches,
        screen: ChatScreen,
        *,
        name: str,
        about: Mapping[str, Any],
        verbose: bool = False,
    ) -> None:
        self._spec = spec
        self._session = Session(verbose=verbose)
        self.settings, self.screen = settings, screen
        self.name, self.about = name, about
        self.notes: list[str] = []
        self._waiting: list[str] = []
        self.stopped = False
        self.start_with(Conversation())

    # ---- the pair --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Load the pair.

        Raises:
            GgufspecError: the pair cannot be loaded.
            StopError: Ctrl-C was pressed.
        """
        try:
            with self.screen.busy() as say:
                say(f"loading {self.name}")
                ready = self._session.open(session.__name__, self._spec, session.ChatReady)
        except KeyboardInterrupt:
            raise StopError("interrupted before the pair was loaded") from None
        self.ready = ready
        chat = self.settings.chat and bool(ready.chat_template)
        self.settings = replace(self.settings, has_draft=ready.draft is not None, chat=chat)
        self._note(*ready.notes)
        self.show_notes()

    @property
    def target(self) -> Path:
        return self._spec.target

    def greet(self, offered: str = "") -> None:
        """Show which models answer, /help and how to leave; ``offered`` is a line that suggests a draft."""
        ready = self.ready
        models = " + ".join(placed.description for placed in (ready.target, ready.draft) if placed)
        context = f"{ready.ctx_size:,} tokens of context"
        self.screen.note(f"{self.name}: {models}, {context}. /help lists commands, Ctrl-D leaves.")
        if offered:
            self.screen.note(offered)
        self.note_tint()
        self.screen.gap()

    def note_tint(self) -> None:
        """Note once that coloured answers are not rendered as Markdown."""
        if self.settings.tint and self.settings.renders and self.screen.interactive:
            self._note("coloured answers are streamed without Markdown; /tint off renders it again")
            self.show_notes()

    def close(self) -> None:
        self._session.close()

    def _note(self, *notes: str) -> None:
        """Queue new notes for :meth:`show_notes`."""
        for note in notes:
            if note not in self.notes:  # a reloaded pair repeats its notes
                self.notes.append(note)
                in_toolbar = self.screen.interactive and is_busy(note)
                if not in_toolbar and is_due(note):
                    self._waiting.append(note)

    def show_notes(self) -> None:
        """Show the queued notes, below an answer and its statistics."""
        for note in self._waiting:
            self.screen.note(note)
        self._waiting.clear()

    # ---- questions -------------------------------------------------------------------------------------------------

    def say(self, text: str) -> bool:
        """Ask a question and show the answer; return False if the answer was stopped before its first token."""
        settings = self.with_seed()
        asked = replace(self.conversation, system=settings.system).ask(text)
        answer = self.ask(asked, settings)
        if answer.stopped and not answer.text and not answer.tokens:
            self.screen.say("stopped before the answer began: the question is dropped")
            self.screen.gap()
            return False
        figures = report.figures(answer.statistics, lossy=settings.lossy)
        self.keep(asked, answer, figures, seed=settings.sampling.seed)
        if figures is not None:
            rule = settings.accept if settings.lossy else ""
            self.screen.note(report.took(figures, self.conversation.turns[-1], rule))
        if not answer.text.strip() and not answer.stopped:
            self.screen.say("the answer is empty")
        self.show_notes()
        self.screen.gap()
        return True

    def with_seed(self) -> ChatSwitches:
        """Return the settings for the next answer, with a new seed if every answer gets one."""
        if self.settings.redraws:
            self.settings = replace(self.settings, sampling=replace(self.settings.sampling, seed=random_seed()))
        return self.settings

    def ask(self, asked: Conversation, settings: ChatSwitches, *, cache: bool = True) -> session.ChatReply:
        """Get an answer from one model or both, and show it as it arrives."""
        if not self._session.is_open:
            self.screen.say("loading the pair again")
            self.open()
        request = session.ChatRequest(
            conversation=asked,
            chat=settings.chat,
            alone=settings.alone,
            options=self._options(settings),
            sampling=settings.sampling,
            max_tokens=settings.predict,
            cache=settings.cache and cache,
            trace=settings.debug,
        )
        answering = AnswerDisplay(self.screen, settings, self._last.dropped)
        try:
            with self._stopping(), answering:
                self._last = self._session.ask(request, session.ChatReply, on_event=answering.show)
        except Interrupted:  # Ctrl-C twice: the child process has ended
            self.screen.say("stopped immediately: the next question loads the pair again")
            self._last = session.ChatReply(answering.text, stopped=True, dropped=answering.dropped)
        except ChildError as error:
            raise ChildError(error.message, f"the next question loads the pair again; {error.hint}") from None
        self._note(*self._last.notes)
        if (speed := self._last.target) and speed.change:  # unlike notes, a speed change is shown every time
            self.notes.append(speed.change)
            self._waiting.append(speed.change)
        return self._last

    def keep(self, asked: Conversation, answer: session.ChatReply, figures: ChatFigures | None, **more: Any) -> None:
        """Add this answer to the conversation; ``more`` are further fields of its turn."""
        self.conversation = asked.reply(
            answer.text,
            answer.tokens,
            stopped=answer.stopped,
            dropped=answer.dropped,
            stop_reason=answer.statistics.stop_reason if answer.statistics else "",
            figures=figures,
            **more,
        )

    def _options(self, settings: ChatSwitches) -> DecoderOptions:
        """Return the options with which the pair was loaded, with the switches applied."""
        own, drafters = self._spec.options, settings.drafters
        return replace(
            own,
            drafters=drafters,
            draft_policy=settings.draft_policy,
            draft_max=settings.draft_max,
            lookup_corpus=own.lookup_corpus if "lookup" in drafters else None,
            accept=settings.accept,
        )

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Stop the answer on the first Ctrl-C; on the second, raise KeyboardInterrupt, which ends the child."""
        self.stopped = False

        def stop(_: int, __: FrameType | None) -> None:
            if self.stopped:
                raise KeyboardInterrupt
            self.stopped = True
            self._session.stop()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # ---- state -----------------------------------------------------------------------------------------------------

    def start_with(self, said: Conversation) -> None:
        self.conversation = said
        self._last = session.ChatReply("")

    def resume(self, path: Path) -> None:
        """Resume the conversation in a file; drop a final question that has no answer."""
        loaded = conversation.load_conversation(path)
        self.start_with(replace(loaded, turns=loaded.answered))
        self.settings = replace(self.settings, system=loaded.system)
        self.screen.say(f"{counted(self.turns, 'turn')} from {path}")
        if loaded.open:
            question = chat_commands.beginning(loaded.turns[-1].user)
            self.screen.say(f"its last question has no answer and is dropped: {question}")

    @property
    def turns(self) -> int:
        return len(self.conversation.turns)

    def context(self, between: str) -> str:
        """Describe the context tokens used, with ``between`` before the context size if that is known."""
        most = f"{between}{self.ready.ctx_size:,}" if self.ready.ctx_size else ""
        return f"{self._last.context_used:,}{most} tokens"

    def status(self) -> list[tuple[str, bool]]:
        """Return pairs (text, is a warning) for the toolbar, the most important first."""
        settings = self.settings
        words = [(shortened(self.name, 24), False), (chat_commands.mode(settings).partition(":")[0], False)]
        words.append((self.context("/"), False))
        if self._last.dropped:
            words.append((f"{self._last.dropped} left out", True))
        if any(map(is_busy, self.notes)):
            words.append(("other programs use the CPUs", True))
        speculates = not settings.alone and bool(settings.drafters)
        if speculates and settings.lossy:
            words.append((f"{settings.accept} (lossy)", True))
        words += [("chat off", False)] * (not settings.chat) + [("cache off", False)] * (not settings.cache)
        words.append((chat_commands.sampled(settings), False))
        words += [("penalties", False)] * settings.sampling.penalises
        if speculates:
            words.append((f"draft-max {chat_commands.shown(settings, 'draft-max')}", False))
        return words

    def document(self, *, interrupted: bool = False, failure: GgufspecError | None = None) -> ChatDocument:
        """Return the whole conversation as a document, with the reason why it ended."""
        return conversation.chat_document(
            replace(self.conversation, system=self.settings.system),
            self.about,
            self._settings_now(),
            notes=tuple(self.notes),
            interrupted=interrupted,
            error=failure.message if failure else "",
            hint=failure.hint if failure else "",
        )

    def _settings_now(self) -> dict[str, Any]:
        now, options = self.settings, self._options(self.settings)
        return {
            **options.flat(),
            "lookup_corpus": str(options.lookup_corpus) if options.lookup_corpus else None,
            "alone": now.alone,
            "drafter": options.drafter,
            "lossy": now.lossy,
            **asdict(now.sampling),
            "max_tokens": now.predict,
            "chat": now.chat,
            "cache": now.cache,
        }
