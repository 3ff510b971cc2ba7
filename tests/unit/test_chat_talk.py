"""A chat whose pair is a script: what is said when it is stopped, dies, or leaves turns out."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ggufspec.bench.trial import LoadedModel
from ggufspec.chat import markdown
from ggufspec.chat.actions import take
from ggufspec.chat.commands import ChatSwitches
from ggufspec.chat.screen import ChatScreen
from ggufspec.chat.session import ChatJob, ChatReady, ChatReply, ChatRequest
from ggufspec.chat.talk import Talk
from ggufspec.child import Interrupted
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.speed_watch import TargetSpeed
from ggufspec.errors import ChildError, GgufspecError, UsageError
from ggufspec.prompting.conversation import Conversation
from ggufspec.prompting.workarounds import TokenizedMessage
from ggufspec.schema import codec
from ggufspec.schema.rounds import AddedToken, DraftedToken, SeenToken, TracedRound

Answer = Callable[["Script", ChatRequest, Callable[[dict[str, Any]], None]], ChatReply]


def reply(text: str, tokens: tuple[int, ...] = (1, 2, 3), **more: Any) -> ChatReply:
    statistics = Statistics(
        40, 0.1, len(tokens), 0.5, 2, 4, 3, (4,), (3,), 0.1, 0.3, "end", prompt_read=7, time_to_first_token_s=0.25
    )
    return ChatReply(text, tokens, statistics, **more)


class Script:
    """Stands for :class:`ggufspec.child.Session`: answers from a list."""

    def __init__(self, *answers: Answer | ChatReply, template: str = "{{ messages }}") -> None:
        self.answers = list(answers)
        self.asked: list[ChatRequest] = []
        self.opened = self.stops = 0
        self.is_open = False
        self._template = template

    def open(self, _module: str, spec: ChatJob, _kind: type[ChatReady]) -> ChatReady:
        self.opened += 1
        self.is_open = True
        placed = LoadedModel("llama", 4, 0, 1000)
        return ChatReady(placed, placed, (), ("a note",), spec.options.ctx_size, 1, self._template)

    def ask(
        self, request: ChatRequest, _kind: type[ChatReply], *, on_event: Callable[[dict[str, Any]], None]
    ) -> ChatReply:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if callable(answer):
            return answer(self, request, on_event)
        for letter in answer.text:
            on_event({"event": "token", "text": letter, "source": "draft"})
        return answer

    def stop(self) -> None:
        self.stops += 1

    def close(self) -> None:
        self.is_open = False


@contextlib.contextmanager
def idle() -> Iterator[Callable[[str], None]]:
    yield lambda _: None


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Talk]:
    def start(script: Script, *, quiet: bool = False, streams: bool = True, **settings: Any) -> Talk:
        spec = ChatJob(Path("t.gguf"), Path("d.gguf"), DecoderOptions(ctx_size=512))
        out, err = Console(theme=markdown.THEME, highlight=False), Console(stderr=True, highlight=False)
        screen = ChatScreen(out, err, lambda text: err.print(text, soft_wrap=True), idle, False, streams, quiet)
        made = Talk(spec, ChatSwitches(has_draft=True, **settings), screen, name="pair", about={"target": "t.gguf"})
        made._session = script  # type: ignore[assignment]
        made.open()
        return made

    return start


def test_an_answer_and_what_it_took(talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(reply("hello"), reply("again"))
    chat = talk(script, accept="top-k:3", draft_policy="fixed", draft_max=4, system="Be terse.")
    take(chat, "hi")
    out, err = capsys.readouterr()
    assert out == "hello\n"
    took = "3 tokens, 4.00 tokens/s, 3 of 4 accepted, 1.00 tokens/round, 7 of 40 prompt tokens decoded at 70.0/s"
    assert f"{took}, first token after 250 ms, lossy: top-k:3" in err
    (request,) = script.asked
    assert request.conversation.messages() == [TokenizedMessage("system", "Be terse."), TokenizedMessage("user", "hi")]
    options = request.options
    assert options is not None
    assert (options.draft_policy, options.draft_max, options.accept, request.alone) == ("fixed", 4, "top-k:3", "")
    take(chat, "/target")
    take(chat, "more")
    assert script.asked[1].alone == "target"
    assert script.asked[1].conversation.turns[0].tokens == (1, 2, 3)
    assert "lossy" not in capsys.readouterr().err


def test_a_change_of_the_target_s_speed_is_a_line_whenever_it_comes(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    slow = TargetSpeed(3.1, 8.2, "slower", "", "the target is slower now")
    usual = TargetSpeed(8.1, 8.2)
    chat = talk(Script(*(reply("so", target=one) for one in (usual, slow, usual, slow, None))))
    said = []
    for _ in range(5):
        take(chat, "hi")
        said.append(capsys.readouterr().err.count("the target is slower now\n"))
    assert said == [0, 1, 0, 1, 0]
    assert chat.document().notes.count("the target is slower now") == 2


def test_the_first_ctrl_c_stops_the_answer(talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
        hear({"event": "token", "text": "part", "source": "target"})
        signal.raise_signal(signal.SIGINT)
        assert script.stops == 1
        return reply("part", stopped=True)

    chat = talk(Script(stopped))
    before = signal.getsignal(signal.SIGINT)
    take(chat, "hi")
    assert signal.getsignal(signal.SIGINT) is before
    assert chat.stopped
    (turn,) = chat.conversation.turns
    assert (turn.answer, turn.stopped) == ("part", True)
    assert ", stopped" in capsys.readouterr().err


def test_the_second_ends_the_child_and_keeps_what_was_said(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
        hear({"event": "token", "text": "part", "source": "target"})
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            script.close()
            raise Interrupted(None) from None
        raise AssertionError

    script = Script(killed, reply("whole"))
    chat = talk(script)
    take(chat, "hi")
    (turn,) = chat.conversation.turns
    assert (turn.answer, turn.stopped, turn.tokens) == ("part", True, ())
    assert "the next question loads the pair again" in capsys.readouterr().err
    take(chat, "more")
    assert script.opened == 2
    assert not chat.stopped
    assert "loading the pair again" in capsys.readouterr().err
    assert chat.document().notes == ("a note",)


@pytest.mark.parametrize("error", [ChildError("the child died", "lower -c"), UsageError("too long", "-c 4096")])
def test_without_an_answer_nothing_has_changed(talk: Callable[..., Talk], error: GgufspecError) -> None:
    def failed(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
        raise error

    chat = talk(Script(reply("one"), failed, failed, failed))
    take(chat, "first")
    for line in ("second", "/retry", "/compare"):
        before = chat.conversation, chat.document()
        with pytest.raises(type(error)) as caught:
            take(chat, line)
        assert error.hint in caught.value.hint
        assert (chat.conversation, chat.document()) == before


def test_what_is_left_out_is_said_even_when_quiet(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    def dropping(turns: int) -> Answer:
        def answer(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
            hear({"event": "dropped", "turns": turns})
            return reply("ok", dropped=turns)

        return answer

    chat = talk(Script(dropping(1), dropping(1), dropping(3), reply("all of it"), dropping(2)), quiet=True)
    said = []
    for line in ("a", "b", "c"):
        take(chat, line)
        said.append(capsys.readouterr().err)
    assert "the oldest turn does not fit" in said[0]
    assert said[1] == ""
    assert "the 3 oldest turns do not fit" in said[2]
    assert [turn.dropped for turn in chat.document().turns] == [1, 1, 3]
    assert ("3 left out", True) in chat.status()
    take(chat, "/predict 8")
    take(chat, "d")
    assert not any("left out" in words for words, _ in chat.status())
    capsys.readouterr()
    take(chat, "e")
    assert "the 2 oldest turns do not fit" in capsys.readouterr().err


def test_comparing(talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(reply("first"), reply("t"), reply("d", (1, 9, 3)), reply("s", (1, 2)), reply("next"))
    chat = talk(script)
    take(chat, "question")
    take(chat, "/compare")
    out, err = capsys.readouterr()
    assert out == "first\nt\nd\ns\n"
    assert "differs at 2" in err
    assert "differs at 3" in err
    assert [request.alone for request in script.asked] == ["", "target", "draft", ""]
    assert all(request.conversation == Conversation().ask("question") for request in script.asked[1:])
    assert not any(request.cache for request in script.asked[1:])
    (turn,) = chat.conversation.turns
    assert (turn.user, turn.answer, turn.tokens) == ("question", "s", (1, 2))
    take(chat, "next")
    assert len(chat.conversation.turns) == 2


def test_a_comparison_that_is_stopped_keeps_what_is_there(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
        signal.raise_signal(signal.SIGINT)
        return reply("d", stopped=True)

    chat = talk(Script(reply("t"), stopped))
    take(chat, "/compare question")
    (turn,) = chat.conversation.turns
    assert turn.answer == "t"
    assert chat.stopped
    assert "speculative" not in capsys.readouterr().err.partition("Tokens/s")[2]
    assert [run.name for run in chat.document().turns[0].compared] == ["target-only", "draft-only"]


def unread(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
    """Ctrl-C while the prompt is read."""
    signal.raise_signal(signal.SIGINT)
    return reply("", (), stopped=True)


def test_a_question_that_was_not_read_is_not_kept(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = talk(Script(reply("one"), unread, unread, reply("two")))
    take(chat, "question")
    before = chat.conversation
    for typed in ("another", "/retry"):
        take(chat, typed)
        assert chat.conversation == before
        assert "is dropped" in capsys.readouterr().err
        assert [turn.answer for turn in chat.document().turns] == ["one"]
    take(chat, "/retry")
    assert [turn.answer for turn in chat.conversation.turns] == ["two"]


def test_a_comparison_keeps_the_answer_that_is_there(talk: Callable[..., Talk]) -> None:
    chat = talk(Script(reply("t"), reply("d"), unread))
    take(chat, "/compare question")
    (turn,) = chat.conversation.turns
    assert turn.answer == "t"
    assert [run.name for run in chat.document().turns[0].compared] == ["target-only", "draft-only"]


def test_rounds_in_the_stream(talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]) -> None:
    def traced(script: Script, request: ChatRequest, hear: Callable[[dict[str, Any]], None]) -> ChatReply:
        assert request.trace
        drafted = tuple(
            DraftedToken(number, "draft", 1, text, 1.0, None, result, None)
            for number, (text, result) in enumerate(((" a", "accepted"), ("\x1b", "rejected"), ("c", "unread")))
        )
        added = AddedToken(1, 2, "b", "target", "p", 1.0, 1.0, False, SeenToken(None, 1.0, ()))
        seconds = {"draft_s": 0.001, "verify_s": 0.002, "total_s": 0.003}
        one = TracedRound(1, "exact", "", True, 0.0, 0, False, drafted, added, 1, (1, 2), 4, **seconds)
        hear({"event": "round", "round": codec.dump(one)})
        hear({"event": "token", "text": " ab", "source": "draft"})
        return reply(" ab")

    chat = talk(Script(traced), debug=True)
    take(chat, "hi")
    out, err = capsys.readouterr()
    assert out == " ab\n"
    assert 'round   1  ✓" a" ✗"\\x1b" ·"c" +"b"  draft 1.0 ms, verify 2.0 ms' in err


def test_one_document_streams_nothing(talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Script(reply("hello"), reply("")), streams=False)
    take(chat, "hi")
    take(chat, "empty")
    out, err = capsys.readouterr()
    assert out == ""
    assert "the answer is empty" in err
    document = chat.document(interrupted=True)
    assert document.notes == ("a note",)
    assert document.interrupted
    assert [turn.answer for turn in document.turns] == ["hello", ""]
    assert document.turns[0].figures is not None
    figures = document.turns[0].figures
    assert figures.prompt_read == 7
    assert figures.prompt_tokens_per_s == pytest.approx(70)  # seven of them in 0.1 s
    assert figures.time_to_first_token_s == 0.25


def test_a_model_without_template(talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Script(template=""))
    assert not chat.settings.chat
    with pytest.raises(UsageError, match="no usable chat template"):
        take(chat, "/chat on")
    take(chat, "/chat")
    assert "chat: off" in capsys.readouterr().err


def test_a_terminal_that_is_gone_is_not_survived(talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    chat = talk(Script(reply("hello")))
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        take(chat, "hi")
    assert chat.conversation.turns == ()


def test_a_conversation_from_a_file(talk: Callable[..., Talk], tmp_path: Path) -> None:
    chat = talk(Script(reply("one"), reply("two")))
    take(chat, "/system Be terse.")
    take(chat, "first")
    take(chat, f"/save {tmp_path / 'said.json'}")
    take(chat, f"/save {tmp_path / 'said.json'}")  # again: a conversation may be replaced, and nothing else
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.md already exists and is not a conversation"):
        take(chat, f"/save {tmp_path / 'notes.md'}")
    assert (tmp_path / "notes.md").read_text() == "mine"
    take(chat, "/clear")
    take(chat, "/system off")
    take(chat, f"/load {tmp_path / 'said.json'}")
    assert chat.settings.system == "Be terse."
    assert [(turn.user, turn.answer, turn.tokens) for turn in chat.conversation.turns] == [("first", "one", ())]
    take(chat, "/retry")
    assert chat.conversation.turns[0].answer == "two"
    assert len(chat.document().turns) == 1


def test_a_note_comes_below_the_answer_and_its_figures(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = talk(
        Script(replace(reply("hello"), notes=("the CPUs are busy",)), reply("again", notes=("the CPUs are busy",)))
    )
    capsys.readouterr()
    take(chat, "hi")
    lines = capsys.readouterr().err.splitlines()
    assert "prompt tokens decoded" in lines[-2]
    assert lines[-1] == "the CPUs are busy"
    take(chat, "more")
    assert "busy" not in capsys.readouterr().err


def test_busy_cpus_are_in_the_toolbar_where_somebody_looks(
    talk: Callable[..., Talk], capsys: pytest.CaptureFixture[str]
) -> None:
    note = "other programs are using the CPUs: llama.cpp gets fewer threads"
    chat = talk(Script(reply("hello", notes=(note,))))
    chat.screen = replace(chat.screen, interactive=True)
    words = ("other programs use the CPUs", True)
    assert words not in chat.status()
    take(chat, "hi")
    assert words in chat.status()
    assert note not in capsys.readouterr().err
    assert chat.document().notes[-1] == note


def test_every_answer_has_a_seed_of_its_own(talk: Callable[..., Talk]) -> None:
    script = Script(*(reply(text) for text in "abcdefg"))
    chat = talk(script, redraws=True, sampling=Sampling(0.8, seed=5))
    take(chat, "hi")
    take(chat, "/retry")
    take(chat, "/compare hi")
    seeds = [request.sampling.seed for request in script.asked]
    assert seeds[0] != seeds[1]
    assert len({*seeds[2:]}) == 1, "what is compared has one seed"
    assert [turn.seed for turn in chat.document().turns] == [seeds[1], seeds[2]]
    take(chat, "/seed 7")
    take(chat, "hi")
    take(chat, "/retry")
    assert [request.sampling.seed for request in script.asked[5:]] == [7, 7]


def test_notes_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, theme=markdown.THEME, width=40)
    screen = ChatScreen(console, console, console.print, idle, True)
    screen.gap()
    assert written.getvalue() == "\n"
