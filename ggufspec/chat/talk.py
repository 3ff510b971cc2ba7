"""A chat, whoever types: a pair that stays loaded, what was said to it, and what its commands do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ggufspec.chat import commands as chat_commands
from ggufspec.chat import conversation, session
from ggufspec.chat import report as shown
from ggufspec.chat import stream as chat_stream
from ggufspec.chat.commands import COMMANDS, Command, Settings
from ggufspec.chat.conversation import Conversation
from ggufspec.cli import ui
from ggufspec.decoding.decoder import Statistics
from ggufspec.display import counted
from ggufspec.errors import GgufspecError, StopError, UsageError, WorkerError
from ggufspec.schema.chat import ChatDocument, ChatFigures, ChatRun, ChatTurn
from ggufspec.settings import drafter_text
from ggufspec.worker import Interrupted, Session

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LONG_PROMPT = 256  # tokens of a prompt from which it is said that it is being read
_NAMES = {"target": "target-only", "draft": "draft-only", "": "speculative"}


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a chat shows itself.

    Args:
        console: standard output's, with :data:`ggufspec.chat.markdown.THEME`.
        interactive: somebody types and looks.
        streams: whether answers go to standard output.
        quiet: no notes.
    """

    console: Console
    interactive: bool
    streams: bool = True
    quiet: bool = False

    def note(self, text: str) -> None:
        """Something that is no answer, in a line."""
        if not self.quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        """The same of what was asked for, or must not be missed."""
        ui.note(text)

    def gap(self) -> None:
        """An empty line, where somebody looks."""
        if self.interactive:
            self.console.print()

    def show(self, what: RenderableType) -> None:
        """Something that was asked for and is no answer: among the answers only where somebody looks."""
        (self.console if self.interactive else ui.err()).print(what)

    def answer(self, settings: Settings) -> chat_stream.Stream:
        """Where the next answer goes."""
        return chat_stream.stream(
            self.console,
            as_markdown=settings.renders and self.interactive,
            tint=settings.tint,
        )


@dataclass(frozen=True, slots=True)
class _Said:
    """An answer, as far as it came; without figures where the child was ended over it."""

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics | None
    stopped: bool
    dropped: int


class Talk:
    """A conversation with a pair.

    Args:
        spec: the pair, placed.
        settings: how it begins.
        screen: where it is shown.
        name: the pair's.
        about: the pair in documents.
        verbose: show llama.cpp's log.
    """

    def __init__(
        self,
        spec: session.Spec,
        settings: Settings,
        screen: Screen,
        *,
        name: str,
        about: Mapping[str, Any],
        verbose: bool = False,
    ) -> None:
        self.spec, self.settings, self.screen = spec, settings, screen
        self.name, self.about = name, about
        self.conversation = Conversation()
        self.notes: list[str] = []
        self._turns: list[ChatTurn] = []
        self._session = Session(verbose=verbose)
        self._verbose = verbose
        self._ready: session.Ready | None = None
        self.stopped = False  # whether Ctrl-C came over the last answer
        self._dropped = 0
        self._used = 0

    # ---- the pair --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Load the pair.

        Raises:
            GgufspecError: it cannot be loaded.
            StopError: Ctrl-C.
        """
        try:
            with ui.busy() as say:
                say(f"loading {self.name}")
                ready = self._session.open(session.__name__, self.spec, session.Ready)
        except Interrupted:
            raise StopError("interrupted before the pair was loaded") from None
        self._ready = ready
        self.settings = replace(
            self.settings, has_draft=ready.draft is not None, chat=self.settings.chat and ready.has_template
        )
        self._note(ready.notes)

    def greet(self) -> None:
        """Say who is there."""
        ready = self._ready
        assert ready is not None
        models = " + ".join(placed.description for placed in (ready.target, ready.draft) if placed)
        self.screen.note(
            f"{self.name}: {models}, {self.ctx_size:,} tokens of context. /help lists commands, Ctrl-D leaves."
        )
        self.screen.gap()

    def close(self) -> None:
        """End the child."""
        self._session.close()

    @property
    def ctx_size(self) -> int:
        """Tokens of context."""
        return self._ready.ctx_size if self._ready else self.spec.options.ctx_size

    def _note(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            if note not in self.notes:  # a pair that is loaded again says its own once more
                self.notes.append(note)
                self.screen.note(note)

    # ---- asking ----------------------------------------------------------------------------------------------------

    def take(self, typed: str) -> bool:
        """Do what was typed: a message or a command. Whether the chat goes on.

        Raises:
            GgufspecError: what was typed is wrong, or the pair could not answer; nothing has changed then.
        """
        read = chat_commands.read(typed)
        if isinstance(read, Command):
            return self._obey(read)
        if read.text.strip():
            self.say(read.text)
        return True

    def say(self, text: str) -> bool:
        """Ask, and show the answer. Whether there is one: stopped before it began, the conversation is as it was.

        Raises:
            GgufspecError: there is no answer; the conversation is as it was.
        """
        settings = self.settings
        asked = replace(self.conversation, system=settings.system).ask(text)
        said = self._ask(asked, settings, settings.alone)
        if said.stopped and not said.text and not said.tokens:
            self.screen.tell("stopped before the answer began: the question is not kept")
            self.screen.gap()
            return False
        self.conversation = asked.reply(said.text, said.tokens, stopped=said.stopped)
        figures = _figures(said.statistics, lossy=settings.lossy)
        reason = said.statistics.stop_reason if said.statistics else ""
        self._turns.append(ChatTurn(text, said.text, said.stopped, said.dropped, reason, figures))
        if figures is not None:
            rule = settings.accept if settings.lossy else ""
            self.screen.note(
                shown.took(figures, rule=rule, stop_reason=reason, stopped=said.stopped, dropped=said.dropped)
            )
        if not said.text.strip() and not said.stopped:
            self.screen.tell("the answer is empty")
        self.screen.gap()
        return True

    def _ask(self, asked: Conversation, settings: Settings, alone: str, *, cache: bool | None = None) -> _Said:
        """The answer of one model or both, shown as it comes."""
        if not self._session.is_open:
            self.screen.tell("loading the pair again")
            self.open()
        hearing = _Hearing(self, settings)
        request = session.Request(
            conversation=asked,
            chat=settings.chat,
            alone=alone,
            drafters=settings.drafters,
            draft_policy="adaptive" if settings.gamma is None else "fixed",
            draft_max=settings.auto_most if settings.gamma is None else settings.gamma,
            lookup_corpus=self.spec.options.lookup_corpus if "lookup" in settings.drafters else None,
            accept=settings.accept,
            sampling=settings.sampling,
            max_tokens=settings.length,
            cache=settings.cache if cache is None else cache,
            trace=settings.debug,
        )
        try:
            with self._stopping(), hearing:
                reply = self._session.ask(request, session.Reply, on_event=hearing.hear)
        except Interrupted:  # Ctrl-C twice: the child is gone
            self.screen.tell("stopped at once: the next question loads the pair again")
            return _Said(hearing.text, (), None, stopped=True, dropped=hearing.dropped)
        except WorkerError as error:
            raise WorkerError(error.message, f"the next question loads the pair again; {error.hint}") from None
        self._used, self._dropped = reply.context_used, reply.dropped
        self._note(reply.notes)
        return _Said(reply.text, reply.tokens, reply.statistics, reply.stopped, reply.dropped)

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Ctrl-C asks for the end of the answer; once more ends the child."""
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

    def tell_dropped(self, turns: int) -> None:
        """Say how many of the oldest turns are left out, when there are more than there were."""
        if turns > self._dropped:
            which = "the oldest turn does" if turns == 1 else f"the {turns} oldest turns do"
            self.screen.tell(f"{which} not fit the context any more: left out; -c makes it larger")
        self._dropped = turns

    # ---- commands --------------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> bool:
        if command.name == "quit":
            return False
        if chat_commands.is_switch(command.name):
            self._switch(command)
        else:
            getattr(self, f"_{command.name}")(command.argument)
        return True

    def _switch(self, command: Command) -> None:
        if command.argument or not COMMANDS[command.name].form:
            changed = chat_commands.change(self.settings, command)
            if changed.chat and not self.settings.chat and self._ready and not self._ready.has_template:
                raise UsageError("the model has no chat template that could be used", "the text goes on as it is")
            self.settings = changed
        said = chat_commands.shown(self.settings, command.name)
        self.screen.tell(said if command.name in chat_commands.MODES else f"{command.name}: {said}")
        if command.name == "tint" and self.settings.tint:
            self._legend()

    def _legend(self) -> None:
        from rich.text import Text

        styles = chat_stream.tints(self.screen.console)
        words = (("draft", "draft model"), ("lookup", "n-gram lookup"), ("target", "target"), ("bonus", "bonus"))
        text = Text("written by: ", style="dim")
        for source, word in words:
            text.append(word, style=styles.get(source, "none"))
            text.append("  ")
        self.screen.show(text)

    def _settings(self, _: str) -> None:
        rows = [("mode", chat_commands.mode(self.settings))]
        rows += [(f"/{name}", chat_commands.shown(self.settings, name)) for name in chat_commands.SHOWN]
        rows.append(("context", f"{self._used:,} of {self.ctx_size:,} tokens"))
        rows += [(role, str(self.about[role])) for role in ("target", "draft") if self.about.get(role)]
        self.screen.show(shown.pairs(rows))

    def _help(self, argument: str) -> None:
        word = argument.lstrip("/").partition(" ")[0]
        if not word:
            rows = [(f"/{name} {about.form}".strip(), about.does) for name, about in COMMANDS.items()]
            self.screen.show(shown.pairs(rows))
            if self.screen.interactive:
                self.screen.note(
                    "Alt-Enter or \\ at the end begins a new line; Ctrl-C stops an answer; "
                    "a message that begins with a slash has two"
                )
            return
        found = chat_commands.read(f"/{word}")  # or tells the nearest
        assert isinstance(found, Command)
        name, about = found.name, COMMANDS[found.name]
        lines = [(f"/{name} {about.form}".strip(), about.does), *(("", line) for line in about.more)]
        if chat_commands.is_switch(name):
            lines.append(("", f"now: {chat_commands.shown(self.settings, name)}"))
        self.screen.show(shown.pairs(lines))

    def _clear(self, _: str) -> None:
        self.conversation = self.conversation.clear()
        self._turns.clear()
        self._dropped = self._used = 0
        self.screen.tell("the conversation is empty")

    def _undo(self, _: str) -> None:
        self._require_turn("take back")
        text = self.conversation.turns[-1].user
        self._take_back()
        self.screen.tell(f"taken back: {chat_commands.shortened(text)}")

    def _retry(self, _: str) -> None:
        self._require_turn("answer again")
        before, turns = self.conversation, list(self._turns)
        text = before.turns[-1].user
        self._take_back()
        answered = False
        try:
            answered = self.say(text)
        finally:
            if not answered:
                self.conversation, self._turns = before, turns

    def _take_back(self) -> None:
        self.conversation = self.conversation.undo()
        del self._turns[-1:]

    def _require_turn(self, what: str) -> None:
        if not self.conversation.turns:
            raise UsageError(f"there is nothing to {what}", "say something first")

    def _save(self, argument: str) -> None:
        if not argument:
            raise UsageError("/save needs the name of a file", "/save conversation.json")
        path = Path(argument).expanduser()
        said = replace(self.conversation, system=self.settings.system)
        conversation.save(path, said, pair=self.about, settings=self._as_json())
        self.screen.tell(f"{counted(len(said.turns), 'turn')} in {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            raise UsageError("/load needs the name of a file", "/load conversation.json")
        self.resume(Path(argument).expanduser())

    def resume(self, path: Path) -> None:
        """Go on with the conversation in a file.

        Raises:
            GgufspecError: it is not there, or damaged.
        """
        loaded = conversation.load(path)
        self.conversation = replace(loaded, turns=loaded.answered)
        self._turns = [ChatTurn(turn.user, turn.answer, turn.stopped) for turn in self.conversation.turns]
        self.settings = replace(self.settings, system=loaded.system)
        self._dropped = self._used = 0
        self.screen.tell(f"{counted(len(self._turns), 'turn')} from {path}")
        if loaded.open:
            self.screen.tell(f"its last question has no answer: {chat_commands.shortened(loaded.turns[-1].user)}")

    def _compare(self, argument: str) -> None:
        """One question to the target, to the draft model, and to both."""
        before = self.conversation
        if not argument:
            self._require_turn("compare")
            argument, before = before.turns[-1].user, before.undo()
        settings = replace(self.settings, mode="speculative")
        ways = ["target", *(["draft"] if settings.has_draft else []), *([""] if settings.drafters else [])]
        if len(ways) == 1:
            raise UsageError("there is only the target: nothing to compare it with", "/ngram on")
        asked = replace(before, system=settings.system).ask(argument)
        runs: list[ChatRun] = []
        kept: _Said | None = None
        reference: tuple[int, ...] = ()
        for way in ways:
            if self.screen.streams:
                self.screen.note(f"── {shown.WAYS[_NAMES[way]]} ──")
            said = self._ask(asked, settings, way, cache=False)
            lossy = settings.lossy and not way
            figures = _figures(said.statistics, lossy=lossy)
            if figures is None or (said.stopped and not said.tokens):
                break
            if way == "target":
                reference = said.tokens
            runs.append(ChatRun(_NAMES[way], said.text, figures, _differs(said.tokens, reference), said.stopped))
            if way != "draft":
                kept = said
            if self.stopped:
                break
        if runs:
            self.screen.show(shown.comparison(runs))
        if kept is None:
            return
        reason = kept.statistics.stop_reason if kept.statistics else ""
        if before is not self.conversation:
            self._take_back()
        self.conversation = asked.reply(kept.text, kept.tokens, stopped=kept.stopped)
        last = next(run.figures for run in reversed(runs) if run.name != "draft-only")
        self._turns.append(ChatTurn(argument, kept.text, kept.stopped, kept.dropped, reason, last, tuple(runs)))

    # ---- what is known of it ---------------------------------------------------------------------------------------

    def status(self) -> list[tuple[str, bool]]:
        """The toolbar's words, the important ones first, and whether each is a warning."""
        settings = self.settings
        words = [(self.name, False), (chat_commands.mode(settings), False)]
        if settings.mode == "speculative" and settings.drafters:
            words.append((f"γ {settings.gamma or 'auto'}", False))
            words.append((f"{settings.accept} (lossy)" if settings.lossy else settings.accept, settings.lossy))
        words.append((f"{self._used:,}/{self.ctx_size:,} tokens", False))
        if self._dropped:
            words.append((f"{self._dropped} left out", True))
        words.append((chat_commands.processor(settings.sampling), False))
        words += [("penalties", False)] * settings.sampling.penalises
        words += [("chat off", False)] * (not settings.chat) + [("cache off", False)] * (not settings.cache)
        return words

    @property
    def turns(self) -> int:
        """How many there are, those of a file that was loaded among them."""
        return len(self._turns)

    def document(self, *, interrupted: bool = False, failure: GgufspecError | None = None) -> ChatDocument:
        """All of it, and what ended it."""
        return ChatDocument(
            pair=dict(self.about),
            settings=self._as_json(),
            system=self.settings.system,
            turns=tuple(self._turns),
            notes=tuple(self.notes),
            interrupted=interrupted,
            error=failure.message if failure else "",
            hint=failure.hint if failure else "",
        )

    def _as_json(self) -> dict[str, Any]:
        """The settings, as they are now."""
        own, now = self.spec.options, self.settings
        return {
            **asdict(own),
            "lookup_corpus": str(own.lookup_corpus) if own.lookup_corpus else None,
            "alone": now.alone,
            "drafters": now.drafters,
            "drafter": drafter_text(now.drafters),
            "draft_policy": "adaptive" if now.gamma is None else "fixed",
            "draft_max": now.auto_most if now.gamma is None else now.gamma,
            "accept": now.accept,
            "lossy": now.lossy,
            **asdict(now.sampling),
            "max_tokens": now.length,
            "chat": now.chat,
            "cache": now.cache,
        }


class _Hearing:
    """Takes the events of one answer and shows them; a context manager, which ends what is shown."""

    def __init__(self, talk: Talk, settings: Settings) -> None:
        self._talk, self._settings = talk, settings
        self._stream: chat_stream.Stream | None = None
        self._waiting = contextlib.ExitStack()
        self._pieces: list[str] = []
        self.dropped = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces)

    def hear(self, event: dict[str, Any]) -> None:
        """One event of :mod:`ggufspec.chat.session`."""
        match event["event"]:
            case "dropped":
                self.dropped = event["turns"]
                self._talk.tell_dropped(self.dropped)
            case "prompt":
                if event["tokens"] > _LONG_PROMPT and self._talk.screen.interactive:
                    say = self._waiting.enter_context(ui.busy())
                    say(f"reading a prompt of {event['tokens']:,} tokens")
            case "round":
                if isinstance(stream := self._begun(), chat_stream.Rounds):
                    stream.round(event["round"])
            case "token":
                self._pieces.append(event["text"])
                if self._talk.screen.streams:
                    self._begun().push(event["text"], event["source"])

    def _begun(self) -> chat_stream.Stream:
        if self._stream is None:
            self._waiting.close()
            answer: Callable[[], chat_stream.Stream] = lambda: self._talk.screen.answer(self._settings)  # noqa: E731
            if self._settings.debug:
                self._stream = chat_stream.Rounds(answer, lambda told: self._talk.screen.show(shown.round_line(told)))
            else:
                self._stream = answer()
        return self._stream

    def __enter__(self) -> _Hearing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._waiting.close()
        if self._stream is not None and self._talk.screen.streams:
            self._stream.finish()


def _figures(statistics: Statistics | None, *, lossy: bool) -> ChatFigures | None:
    if statistics is None:
        return None
    return ChatFigures(
        prompt_tokens=statistics.prompt_tokens,
        prompt_read=statistics.prompt_read,
        prompt_s=statistics.prompt_s,
        tokens=statistics.tokens,
        tokens_per_s=statistics.tokens / statistics.decode_s if statistics.decode_s > 0 else 0.0,
        rounds=statistics.rounds,
        drafted=statistics.drafted,
        accepted=statistics.accepted,
        lookup_drafted=statistics.lookup_drafted,
        lookup_accepted=statistics.lookup_accepted,
        lossy=lossy,
        prompt_tokens_per_s=statistics.prompt_decoded / statistics.prompt_s if statistics.prompt_s > 0 else 0.0,
        time_to_first_token_s=statistics.time_to_first_token_s,
    )


def _differs(tokens: tuple[int, ...], reference: tuple[int, ...]) -> int | None:
    """The place of the first token, from 1, that is another than the reference's; None if none is."""
    same = next((i for i, (one, other) in enumerate(zip(tokens, reference, strict=False)) if one != other), None)
    if same is not None:
        return same + 1
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference)) + 1
