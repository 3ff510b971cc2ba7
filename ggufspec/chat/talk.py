"""A chat, whoever types: a pair that stays loaded, what was said to it, and what its commands do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from ggufspec.chat import commands as chat_commands
from ggufspec.chat import report, session
from ggufspec.chat.commands import COMMANDS, MODES, Command, Switches
from ggufspec.chat.stream import Plain, Rendered, source_styles, stream
from ggufspec.child import Interrupted, Session
from ggufspec.errors import ChildError, GgufspecError, StopError, UsageError
from ggufspec.prompting import conversation
from ggufspec.prompting.conversation import Conversation
from ggufspec.reports.table import pairs
from ggufspec.schema import codec
from ggufspec.schema.chat import ChatDocument, ChatRun
from ggufspec.schema.rounds import TracedRound
from ggufspec.schema.text import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ggufspec.chat.remote import Remote
    from ggufspec.decoding.options import DecoderOptions

_LONG_PROMPT = 256  # tokens of a prompt from which it is said that it is being read


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a chat shows itself."""

    console: Console  # standard output's, with :data:`ggufspec.chat.markdown.THEME`
    stderr: Console  # standard error's
    say: Callable[[str], None]  # prints a sentence that is no answer
    busy: Callable[[], contextlib.AbstractContextManager[Callable[[str], None]]]  # shows what is waited for
    interactive: bool  # somebody types and looks
    streams: bool = True  # whether answers go to standard output
    quiet: bool = False  # no notes

    def note(self, text: str) -> None:
        """Something that is no answer and may be missed."""
        if not self.quiet:
            self.say(text)

    def gap(self) -> None:
        """An empty line, where somebody looks."""
        if self.interactive:
            self.console.print()

    def show(self, what: RenderableType) -> None:
        """Something that was asked for and is no answer: among the answers only where somebody looks."""
        (self.console if self.interactive else self.stderr).print(what)

    def answer(self, settings: Switches) -> Plain | Rendered:
        """Where the next answer goes."""
        return stream(self.console, as_markdown=settings.renders and self.interactive, tint=settings.tint)


class Talk:
    """A conversation with a pair.

    Args:
        spec: the pair, placed.
        settings: how it begins.
        screen: where it is shown.
        name: the pair's.
        about: the pair in documents.
        verbose: show llama.cpp's log.
        opened_by: what answers; None: a child process that loads the pair.

    Attributes:
        stopped: whether Ctrl-C came over the last answer.
    """

    opening: ClassVar = ("loading", "the pair was loaded")  # what is done first, and what it ends with

    def __init__(
        self,
        spec: session.Spec,
        settings: Switches,
        screen: Screen,
        *,
        name: str,
        about: Mapping[str, Any],
        verbose: bool = False,
        opened_by: Remote | None = None,
    ) -> None:
        self.spec, self.settings, self.screen = spec, settings, screen
        self.name, self.about = name, about
        self.conversation = Conversation()
        self.notes: list[str] = []
        self.stopped = False
        self._session: Session | Remote = opened_by or Session(verbose=verbose)
        self._ready: session.Ready | None = None
        self._dropped = self._used = 0  # turns that did not fit, and tokens of the context

    # ---- the pair --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Load the pair, or reach the server.

        Raises:
            GgufspecError: it cannot be loaded, or reached.
            StopError: Ctrl-C.
        """
        doing, done = self.opening
        try:
            with self.screen.busy() as say:
                say(f"{doing} {self.name}")
                ready = self._session.open(session.__name__, self.spec, session.Ready)
        except KeyboardInterrupt:
            raise StopError(f"interrupted before {done}") from None
        self._ready = ready
        chat = self.settings.chat and bool(ready.chat_template)
        self.settings = replace(self.settings, has_draft=ready.draft is not None, chat=chat)
        self._note(ready.notes)

    def greet(self) -> None:
        """Name the models, and the way in and out."""
        assert self._ready is not None
        models = " + ".join(placed.description for placed in (self._ready.target, self._ready.draft) if placed)
        context = f"{self.ctx_size:,} tokens of context"
        self.screen.note(f"{self.name}: {models}, {context}. /help lists commands, Ctrl-D leaves.")
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
            if note not in self.notes:  # a pair that is loaded again repeats its own
                self.notes.append(note)
                self.screen.note(note)

    # ---- questions -------------------------------------------------------------------------------------------------

    def take(self, typed: str) -> bool:
        """Do what was typed: a message or a command. Whether the chat goes on.

        Raises:
            GgufspecError: what was typed is wrong, or the pair could not answer; nothing has changed then.
        """
        read = chat_commands.read(typed)
        if not isinstance(read, str):
            return self._run(read)
        if read.strip():
            self.say(read)
        return True

    def say(self, text: str) -> bool:
        """Ask, and show the answer. Whether there is one: stopped before it began, the conversation is as it was.

        Raises:
            GgufspecError: there is no answer; the conversation is as it was.
        """
        settings = self.settings
        asked = replace(self.conversation, system=settings.system).ask(text)
        answer = self._ask(asked, settings, settings.alone)
        if answer.stopped and not answer.text and not answer.tokens:
            self.screen.say("stopped before the answer began: the question is dropped")
            self.screen.gap()
            return False
        figures = report.figures(answer.statistics, lossy=settings.lossy)
        self._keep(asked, answer, figures=figures)
        if figures is not None:
            rule = settings.accept if settings.lossy else ""
            self.screen.note(report.took(figures, self.conversation.turns[-1], rule))
        if not answer.text.strip() and not answer.stopped:
            self.screen.say("the answer is empty")
        self.screen.gap()
        return True

    def _keep(self, asked: Conversation, answer: session.Reply, **more: Any) -> None:
        self.conversation = asked.reply(
            answer.text,
            answer.tokens,
            stopped=answer.stopped,
            dropped=answer.dropped,
            stop_reason=answer.statistics.stop_reason if answer.statistics else "",
            **more,
        )

    def _ask(self, asked: Conversation, settings: Switches, alone: str, *, cache: bool = True) -> session.Reply:
        """The answer of one model or both, shown as it comes."""
        if not self._session.is_open:
            self.screen.say("loading the pair again")
            self.open()
        events = _Events(self, settings)
        request = session.Request(
            conversation=asked,
            chat=settings.chat,
            alone=alone,
            options=self._options(settings),
            sampling=settings.sampling,
            max_tokens=settings.predict,
            cache=settings.cache and cache,
            trace=settings.debug,
        )
        try:
            with self._stopping(), events:
                reply = self._session.ask(request, session.Reply, on_event=events.show)
        except Interrupted:  # Ctrl-C twice: the child is gone
            self.screen.say("stopped at once: the next question loads the pair again")
            return session.Reply(events.text, stopped=True, dropped=events.dropped)
        except ChildError as error:
            raise ChildError(error.message, f"the next question loads the pair again; {error.hint}") from None
        self._used, self._dropped = reply.context_used, reply.dropped
        self._note(reply.notes)
        return reply

    def _options(self, settings: Switches) -> DecoderOptions:
        """Those that the pair was loaded with, as they are switched."""
        own, drafters = self.spec.options, settings.drafters
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

    def note_dropped(self, turns: int) -> None:
        """Say how many of the oldest turns are left out, when there are more than there were."""
        if turns > self._dropped:
            which = "the oldest turn does" if turns == 1 else f"the {turns} oldest turns do"
            self.screen.say(f"{which} not fit the context any more: left out; -c makes it larger")
        self._dropped = turns

    # ---- commands --------------------------------------------------------------------------------------------------

    def _run(self, commands: tuple[Command, ...]) -> bool:
        name, argument = commands[0]
        if name == "quit":
            return False
        if chat_commands.is_switch(name):
            self._switch(commands)
        else:
            getattr(self, f"_{name}")(argument)
        return True

    def _switch(self, commands: tuple[Command, ...]) -> None:
        changed = self.settings
        for command in commands:
            if command.argument or not COMMANDS[command.name].form:
                changed = chat_commands.change(changed, command)
        if changed.chat and not self.settings.chat and self._ready and not self._ready.chat_template:
            raise UsageError("the model has no usable chat template", "messages are continued as plain text")
        self.settings = changed
        for name, _ in commands:
            value = chat_commands.shown(changed, name)
            self.screen.say(f"{name}: {value}" if COMMANDS[name].form else value)
        if changed.tint and commands[0].name == "tint":
            self.screen.show(report.legend(source_styles(self.screen.console), self.settings.drafters))

    def _settings(self, _: str) -> None:
        rows = [("mode", chat_commands.mode(self.settings))]
        rows += [(f"/{name}", chat_commands.shown(self.settings, name)) for name in chat_commands.SHOWN]
        rows.append(("context", f"{self._used:,} of {self.ctx_size:,} tokens"))
        rows += [(role, str(self.about[role])) for role in ("target", "draft") if self.about.get(role)]
        self.screen.show(pairs(rows))

    def _help(self, argument: str) -> None:
        word = argument.lstrip("/").partition(" ")[0]
        if not word:
            self.screen.show(pairs((about.typed(name), about.does) for name, about in COMMANDS.items()))
            if self.screen.interactive:
                self.screen.note(
                    "Alt-Enter or \\ at the end begins a new line; Ctrl-C stops an answer; "
                    "a message that begins with a slash has two"
                )
            return
        lines: list[tuple[str, str]] = []
        for found in chat_commands.read(f"/{word}"):  # or an error with the nearest
            assert isinstance(found, Command)
            about = COMMANDS[found.name]
            lines += [(about.typed(found.name), about.does), *[("", about.more)] * bool(about.more)]
            if chat_commands.is_switch(found.name):
                lines.append(("", f"now: {chat_commands.shown(self.settings, found.name)}"))
        self.screen.show(pairs(lines))

    def _clear(self, _: str) -> None:
        self.conversation = self.conversation.clear()
        self._dropped = self._used = 0
        self.screen.say("the conversation is empty")

    def _undo(self, _: str) -> None:
        text = self._last_question("undo")
        self.conversation = self.conversation.undo()
        self.screen.say(f"removed: {chat_commands.shortened(text)}")

    def _retry(self, _: str) -> None:
        text, before = self._last_question("retry"), self.conversation
        self.conversation = before.undo()
        answered = False
        try:
            answered = self.say(text)
        finally:
            if not answered:
                self.conversation = before

    def _last_question(self, purpose: str) -> str:
        if not self.conversation.turns:
            raise UsageError(f"there is nothing to {purpose}", "say something first")
        return self.conversation.turns[-1].user

    def _save(self, argument: str) -> None:
        path = _path("save", argument)
        conversation.save(path, self.document())
        self.screen.say(f"{counted(self.turns, 'turn')} in {path}")

    def _load(self, argument: str) -> None:
        self.resume(_path("load", argument))

    def resume(self, path: Path) -> None:
        """Go on with the conversation in a file.

        Raises:
            GgufspecError: it is not there, or damaged.
        """
        loaded = conversation.load(path)
        self.conversation = replace(loaded, turns=loaded.answered)
        self.settings = replace(self.settings, system=loaded.system)
        self._dropped = self._used = 0
        self.screen.say(f"{counted(self.turns, 'turn')} from {path}")
        if loaded.open:
            self.screen.say(
                f"its last question has no answer and is dropped: {chat_commands.shortened(loaded.turns[-1].user)}"
            )

    def _compare(self, argument: str) -> None:
        """One question to the target, to the draft model, and to both."""
        before = self.conversation
        if not argument:
            argument, before = self._last_question("compare"), before.undo()
        settings = replace(self.settings, alone="")
        ways = [
            "target",
            *(["draft"] if settings.has_draft and not settings.head else []),
            *([""] if settings.drafters else []),
        ]
        if len(ways) == 1:
            raise UsageError("there is nothing to compare target-only with", "/drafter lookup")
        asked = replace(before, system=settings.system).ask(argument)
        runs: list[ChatRun] = []
        answers: dict[str, session.Reply] = {}
        for way in ways:
            if self.screen.streams:
                self.screen.note(f"── {MODES[way]} ──")
            answer = self._ask(asked, settings, way, cache=False)
            figures = report.figures(answer.statistics, lossy=settings.lossy and not way)
            if figures is None or (answer.stopped and not answer.tokens):
                break
            answers[way] = answer
            differs_at = _differs_at(answer.tokens, answers["target"].tokens)
            runs.append(ChatRun(MODES[way], answer.text, figures, differs_at, answer.stopped))
            if self.stopped:
                break
        if runs:
            self.screen.show(report.comparison(runs))
        for way in ("", "target"):
            if way in answers:
                figures = next(run.figures for run in runs if run.name == MODES[way])
                self._keep(asked, answers[way], figures=figures, compared=tuple(runs))
                break

    # ---- what is known of it ---------------------------------------------------------------------------------------

    def status(self) -> list[tuple[str, bool]]:
        """The toolbar's words, the important ones first, and whether each is a warning."""
        settings = self.settings
        words = [(self.name, False), (chat_commands.mode(settings), False)]
        if not settings.alone and settings.drafters:
            words.append((f"draft-max {chat_commands.shown(settings, 'draft-max')}", False))
            words.append((f"{settings.accept} (lossy)" if settings.lossy else settings.accept, settings.lossy))
        words.append((f"{self._used:,}/{self.ctx_size:,} tokens", False))
        if self._dropped:
            words.append((f"{self._dropped} left out", True))
        words.append((chat_commands.sampled(settings), False))
        words += [("penalties", False)] * settings.sampling.penalises
        words += [("chat off", False)] * (not settings.chat) + [("cache off", False)] * (not settings.cache)
        return words

    @property
    def turns(self) -> int:
        """How many there are, those of a file that was loaded among them."""
        return len(self.conversation.turns)

    def document(self, *, interrupted: bool = False, failure: GgufspecError | None = None) -> ChatDocument:
        """All of it, and what ended it."""
        return conversation.document(
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


class _Events:
    """Shows the events of one answer; a context manager, which ends what is shown.

    With ``/debug on`` every round is a line as it comes, and the answer follows them.
    """

    def __init__(self, talk: Talk, settings: Switches) -> None:
        self._talk, self._screen, self._settings = talk, talk.screen, settings
        self._stream: Plain | Rendered | None = None
        self._waiting = contextlib.ExitStack()
        self._pieces: list[tuple[str, str]] = []
        self._thinks = False
        self.dropped = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(text for text, _ in self._pieces)

    def show(self, event: dict[str, Any]) -> None:
        """One event of :mod:`ggufspec.chat.session`."""
        match event["event"]:
            case "dropped":
                self.dropped = event["turns"]
                self._talk.note_dropped(self.dropped)
            case "prompt" if event["tokens"] > _LONG_PROMPT and self._screen.interactive:
                self._waiting.enter_context(self._screen.busy())(f"reading a prompt of {event['tokens']:,} tokens")
            case "reasoning" if not self._thinks and self._screen.interactive:
                self._thinks = True
                self._waiting.enter_context(self._screen.busy())("the model thinks")
            case "round":
                self._waiting.close()
                self._screen.show(report.round_line(codec.load(TracedRound, event["round"])))
            case "token":
                self._waiting.close()
                self._pieces.append((event["text"], event["source"]))
                if not self._settings.debug:
                    self._push(event["text"], event["source"])

    def _push(self, text: str, source: str) -> None:
        if self._screen.streams:
            if self._stream is None:
                self._stream = self._screen.answer(self._settings)
            self._stream.push(text, source)

    def __enter__(self) -> _Events:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.close()
        if self._settings.debug:
            for text, source in self._pieces:
                self._push(text, source)
        if self._stream is not None:
            self._stream.finish()


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise UsageError(f"/{command} needs the name of a file", f"/{command} conversation.json")
    return Path(argument).expanduser()


def _differs_at(tokens: tuple[int, ...], reference: tuple[int, ...]) -> int | None:
    """The position of the first token, from 1, that is not the reference's; None if there is none."""
    both = enumerate(zip_longest(tokens, reference), 1)
    return next((number for number, (one, other) in both if one != other), None)
