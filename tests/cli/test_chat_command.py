"""``ggufspec chat``: driven through a pseudo-terminal and through pipes, with the pair that ships."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import chat_models, heads
from tests.support.gguf_files import rewritten
from tests.support.processes import SCRIPT, Cli, all_end, eventually, read_only_its_beginning, workers
from tests.support.screens import Session, flat

SHORT = ("-n", "12", "-c", "512")


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return rewritten(target, tmp_path_factory.mktemp("chat") / "talks.gguf", template=chat_models.PLAIN)


@pytest.fixture
def chat(cli: Cli) -> Iterator[Callable[..., Session]]:
    """chat(arguments…, columns=…) -> a chat in a terminal, at its prompt."""
    running: list[Session] = []

    def start(*arguments: str | Path, columns: int = 100, **more: str) -> Session:
        child = cli.terminal("chat", *map(str, arguments), columns=columns, **more)
        session = Session(child, columns)
        running.append(session)
        session.until("/help lists commands")
        return session

    yield start
    for session in running:
        session.child.close(force=True)


def answers(text: str) -> int:
    """How many answers have had their line of figures."""
    return len(re.findall("prompt tokens? decoded", flat(text)))


def answered(count: int) -> Callable[[str], bool]:
    return lambda text: answers(text) == count


def after(session: Session, line: str, what: str | Callable[[str], object]) -> str:
    """Say a line and wait for what comes of it."""
    session.say(line)
    return session.until(what)


def test_every_switch_in_one_chat(chat: Callable[..., Session], tmp_path: Path) -> None:
    session = chat("demo", *SHORT)
    running = workers(session.pid)
    after(session, "def main(", answered(1))
    after(session, "/target", "target-only")
    after(session, "def main(", answered(2))
    after(session, "/draft", "draft-only")
    after(session, "def main(", answered(3))
    after(session, "/speculative", "\nspeculative")
    after(session, "/draft-policy fixed", "draft-policy: fixed")
    after(session, "/draft-max 3", "draft-max: 3, always")
    after(session, "/draft-max", lambda text: text.count("draft-max: 3, always") == 2)
    after(session, "/processor topknucleus 0.8 40 0.95", "top-p: 0.95\nmin-p: 0\n")
    after(session, "/top-k 20", "top-k: 20")
    after(session, "/seed 7", "seed: 7")
    after(session, "/predict 9", "predict: 9 tokens at most")
    after(session, "/drafter lookup", "drafter: lookup (n-gram lookup)")
    after(session, "/accept top-k:3", "accept: top-k:3 (lossy)")
    after(session, "import os", lambda text: answers(text) == 4 and "lossy: top-k:3" in flat(text))
    after(session, "/accept exact", "accept: exact")
    after(session, "/drafter both", "drafter: both (draft model and n-gram lookup)")
    after(session, "/temp 0", "temp: 0")
    after(session, "/gamma auto", "draft-policy: adaptive\ndraft-max: 63 at most")
    after(session, "/cache off", "cache: off")
    after(session, "/tint on", "written by: draft model")
    after(session, "/debug on", "debug: on")
    after(session, "def f(", lambda text: answers(text) == 5 and "round   1" in text)
    after(session, "/debug off", "debug: off")
    after(session, "/tint off", "tint: off")
    after(session, "/markdown on", "markdown: on")
    after(session, "/system You are terse.", "system: You are terse.")
    after(session, "x = 1", answered(6))
    after(session, "/chat on", "no usable chat template")
    text = after(session, "/settings", "tokens\n")
    assert "adaptive" in text.rpartition("\nmode")[2]
    after(session, "/undo", "removed: x = 1")
    file = tmp_path / "said.json"
    after(session, f"/save {file}", "5 turns in")
    after(session, "/clear", "the conversation is empty")
    after(session, "/undo", "nothing to undo")
    after(session, f"/load {file}", "5 turns from")
    after(session, "/retry", answered(7))
    after(session, "/help", "leave; so does Ctrl-D")
    after(session, "/help gamma", "now: 63 at most")
    after(session, "/help gama", "/gamma is the nearest")
    assert workers(session.pid) == running, "nothing was loaded again"
    session.say("/quit")
    session.end()
    assert session.child.exitstatus == 0
    assert all_end(running)
    assert json.loads(file.read_text())["schema"] == "ggufspec/chat@1"


def test_comparing_three_ways(chat: Callable[..., Session]) -> None:
    session = chat("demo", *SHORT)
    text = after(session, "/compare def main(", lambda text: re.search(r"speculative  +\d", text))
    for row in ("target-only", "draft-only", "speculative"):
        assert row in text
    assert re.search(r"speculative  +\d.*the same", text)
    after(session, "/compare", lambda text: text.count("Tokens/round") == 2)
    after(session, "/settings", "mode")
    session.say("/quit")
    session.end()


def test_mistakes_are_told_and_change_nothing(chat: Callable[..., Session], cli: Cli) -> None:
    session = chat("demo", "--no-draft", *SHORT)
    assert "has no chat template" in flat(session.terminal.text)
    after(session, "/gama 4", "/gamma is the nearest")
    after(session, "/gamma 99", "is not possible")
    after(session, "/top-k x", "is not a whole number")
    after(session, "/draft", "no draft model")
    after(session, "/compare x", "nothing to compare")
    after(session, "/save", "needs the name of a file")
    after(session, "/load nothing.json", "cannot be read")  # a short name: its message is one line
    (cli.folder / "damaged.json").write_text('{"schema": "ggufspec/chat@1", "turns": [{"user"')
    after(session, "/load damaged.json", "not a complete JSON")
    after(session, "word " * 600, "the context holds 512")
    session.type("/draft-m")
    session.until("maximum tokens to draft per round")  # the menu
    session.type("\t")
    session.until(lambda text: "\n> /draft-max" in text.rpartition("next: ")[2])
    session.say(" 4")
    session.until("draft-max: 4 at most")
    after(session, "def main(", answered(1))
    session.type("\x04")
    session.end()
    assert session.child.exitstatus == 0
    assert "Traceback" not in session.terminal.text


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(chat: Callable[..., Session], tmp_path: Path) -> None:
    session = chat("demo", "-n", "100000", "-c", "20000", "--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    running = workers(session.pid)
    session.say("def main(")
    session.until(lambda text: len(text.partition("def main(")[2]) > 200)
    session.type("\x03")
    session.until(lambda text: answers(text) == 1 and ", stopped" in flat(text))
    assert workers(session.pid) == running
    file = tmp_path / "said.json"
    after(session, f"/save {file}", "1 turn in")
    (turn,) = json.loads(file.read_text())["turns"]
    assert turn["stopped"] is True
    assert len(turn["answer"]) > 20
    session.type("typed\x03\x03")
    session.end()
    assert session.child.exitstatus == 0
    assert all_end(running)


def is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_child_that_is_killed_is_told_and_loaded_again(chat: Callable[..., Session]) -> None:
    session = chat("demo", *SHORT)
    (child,) = workers(session.pid)
    after(session, "def main(", answered(1))
    child.kill()
    assert eventually(lambda: not child.is_running() or is_zombie(child))
    text = after(session, "def main(", answered(2))
    assert "loading the pair again" in text
    assert workers(session.pid)
    assert workers(session.pid) != [child]
    session.say("/quit")
    session.end()


def test_a_child_that_is_killed_over_an_answer(chat: Callable[..., Session]) -> None:
    session = chat("demo", "-n", "100000", "-c", "20000", "--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    (child,) = workers(session.pid)
    session.say("def main(")
    session.until(lambda text: len(text.partition("def main(")[2]) > 100)
    child.kill()
    text = session.until("the next question loads the pair again")
    assert "ended by SIGKILL" in text
    after(session, "/predict 8", "predict: 8")
    after(session, "def main(", answered(1))
    assert "Traceback" not in session.terminal.text


def test_a_long_conversation_says_what_it_leaves_out(
    chat: Callable[..., Session], templated: Path, draft: Path
) -> None:
    session = chat("-m", templated, "-md", draft, "-n", "40", "-c", "256")
    number = 0
    while "left out" not in session.terminal.text:
        number += 1
        assert number < 20
        after(session, f"message {number}: def function_{number}(argument):", answered(number))
    after(session, "the last one", answered(number + 1))
    text = flat(session.terminal.text)
    assert "the oldest turn does not fit the context any more" in text or "oldest turns do not fit" in text
    assert "oldest turn left out" in text or "oldest turns left out" in text


def test_the_second_turn_reads_only_what_is_new(chat: Callable[..., Session], templated: Path, draft: Path) -> None:
    session = chat("-m", templated, "-md", draft, *SHORT, "--system", "Write Python. " * 20)
    after(session, "def main(", answered(1))
    after(session, "x", answered(2))
    _, (read, whole) = re.findall(r"(\d+) of (\d+) prompt tokens decoded", flat(session.terminal.text))
    read, whole = int(read), int(whole)
    assert read < 20 < whole


def test_a_paste_of_100_kb(chat: Callable[..., Session]) -> None:
    session = chat("demo", *SHORT)
    session.paste("".join(f"line {number} of a large text\r\n" for number in range(4000)))
    session.until("line 3999 of a large text")
    session.type("\r")
    session.until("the context holds 512")
    after(session, "def main(", answered(1))


def test_control_characters_of_a_model_are_shown(
    chat: Callable[..., Session], cli: Cli, target: Path, tmp_path: Path
) -> None:
    hostile = chat_models.with_escapes(target, tmp_path / "hostile.gguf")
    session = chat("-m", hostile, "-n", "60", "-c", "512")
    before = len(session.raw)
    text = after(session, "def main(", answered(1))
    assert "␛" in text
    assert "␛" in session.raw[before:]
    child = cli.terminal("run", "-m", str(hostile), "-p", "def main(", "-n", "60")
    run = Session(child)
    assert "␛" in run.end()
    piped = cli("run", "-m", hostile, "-p", "def main(", "-n", "60")
    assert "\x1b" in piped.stdout
    assert "␛" not in piped.stdout


def test_a_template_that_fails_is_told(chat: Callable[..., Session], target: Path, tmp_path: Path) -> None:
    broken = rewritten(target, tmp_path / "broken.gguf", template=chat_models.FAILING)
    session = chat("-m", broken, *SHORT)
    after(session, "hello", "chat template fails")
    after(session, "/chat off", "chat: off")
    after(session, "def main(", answered(1))


@pytest.mark.full
@pytest.mark.parametrize("template", ["LOOPING"])
def test_a_template_that_never_ends(chat: Callable[..., Session], target: Path, tmp_path: Path, template: str) -> None:
    session = chat("-m", rewritten(target, tmp_path / "trap.gguf", template=getattr(chat_models, template)), *SHORT)
    (child,) = workers(session.pid)
    after(session, "hello", "the model's chat template takes more than 5 s: it may be malicious")
    session.until("/chat off continues without")
    assert all_end([child])
    after(session, "/chat off", "chat: off")
    after(session, "def main(", answered(1))


def test_markdown_and_a_resize(chat: Callable[..., Session], templated: Path, draft: Path) -> None:
    session = chat("-m", templated, "-md", draft, "-n", "400", "-c", "2048", columns=100)
    session.say("write a long function")
    session.until(lambda text: len(text.partition("a long function")[2]) > 100)
    session.resize(60, 20)
    session.until(lambda text: answers(text) == 1 or len(text) > 600)
    session.resize(120, 40)
    session.until(answered(1))
    after(session, "/length 5", "predict: 5")
    after(session, "again", answered(2))
    assert "Traceback" not in session.terminal.text


@pytest.mark.parametrize("more", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"COLUMNS": "30"}])
def test_terminals_that_can_less(chat: Callable[..., Session], more: dict[str, str]) -> None:
    session = chat("demo", *SHORT, **more)
    before = len(session.raw)
    after(session, "def main(", answered(1))
    if "NO_COLOR" in more:
        assert not re.search(r"\x1b\[(\d+;)*3[0-7](;\d+)*m", session.raw[before:])


def test_what_was_typed_is_kept_for_its_owner(chat: Callable[..., Session], cli: Cli) -> None:
    session = chat("demo", *SHORT)
    after(session, "def remembered(", answered(1))
    session.say("/quit")
    session.end()
    (file,) = Path(cli.environment["HOME"]).rglob("chat_history")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "+def remembered(" in file.read_text()


# ---- without a terminal ----------------------------------------------------------------------------------------------


def test_lines_of_standard_input(cli: Cli) -> None:
    done = cli("chat", "demo", *SHORT, stdin="def main(\n\n/target\ndef main(\n")
    assert done.code == 0, done.stderr
    assert answers(done.stderr) == 2
    assert "target-only" in done.stderr
    assert done.stdout.count("\n") >= 2
    assert "prompt tokens" not in done.stdout
    assert cli("chat", "demo", *SHORT, "-q", stdin="def main(").stderr.strip() == ""


def test_a_byte_order_mark_of_standard_input_is_dropped(cli: Cli) -> None:
    document = cli("chat", "demo", *SHORT, "--json", stdin="\ufeff/accept top-k:3\n\ufeffdef main(\n").document()
    assert document["settings"]["accept"] == "top-k:3"
    assert [turn["user"] for turn in document["turns"]] == ["\ufeffdef main("]


def test_one_document(cli: Cli) -> None:
    lines = "def main(\n/accept top-k:3\n/compare import os\n"
    done = cli("chat", "demo", *SHORT, "--json", "--system", "x = 1", stdin=lines)
    assert done.code == 0, done.stderr
    document = done.document()
    assert document["schema"] == "ggufspec/chat@1"
    assert document["system"] == "x = 1"
    assert document["settings"]["accept"] == "top-k:3"
    assert document["interrupted"] is False
    first, second = document["turns"]
    assert first["user"] == "def main("
    assert first["figures"]["tokens"] == 12
    assert first["figures"]["prompt_read"] == first["figures"]["prompt_tokens"]
    assert first["figures"]["lossy"] is False
    assert [run["name"] for run in second["compared"]] == ["target-only", "draft-only", "speculative"]
    assert [run["figures"]["lossy"] for run in second["compared"]] == [False, False, True]
    assert second["answer"] == second["compared"][2]["answer"]
    assert second["compared"][0]["differs_at"] is None


def test_a_document_can_be_loaded(cli: Cli, tmp_path: Path) -> None:
    greedy = (*SHORT, "--temp", "0", "--json")
    said = cli("chat", "demo", *greedy, stdin="def main(\n").stdout
    (tmp_path / "said.json").write_text(said)
    again = cli("chat", "demo", *greedy, "--load", tmp_path / "said.json", stdin="/retry\n").document()
    assert again["turns"][0]["answer"] == json.loads(said)["turns"][0]["answer"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ((), "", "standard input is empty"),
        ((), "\n \n", "standard input is empty"),
        ((), b"\xff\xfe\n", "not UTF-8"),
        ((), "/gama 4\n", "no command /gama"),
        ((), "/predict none\n", "is not a whole number"),
        (("--drafter", "both", "--no-draft", "--system", "a", "--system-file", "b"), "x\n", "--system-file"),
        (("--system-file", "nothing.txt"), "x\n", "nothing.txt cannot be read"),
        (("--load", "nothing.json"), "x\n", "nothing.json cannot be read"),
    ],
)
def test_what_is_wrong_without_a_terminal(
    cli: Cli, arguments: tuple[str, ...], stdin: str | bytes, message: str
) -> None:
    done = cli("chat", "demo", *SHORT, *arguments, "--json", stdin=stdin)
    assert done.code in (1, 2)
    assert message in done.document()["error"]
    assert done.document()["hint"]
    assert "Traceback" not in done.stderr


def test_a_line_that_is_wrong_loses_nothing_that_was_said(cli: Cli) -> None:
    done = cli("chat", "demo", *SHORT, "--json", stdin="def main(\n/gama 4\nnever asked\n")
    document = done.document()
    assert done.code == 2
    assert [turn["user"] for turn in document["turns"]] == ["def main("]
    assert document["turns"][0]["answer"]
    assert "no command /gama" in document["error"]
    assert document["hint"]
    assert "no command /gama" in done.stderr


def test_ctrl_c_without_a_terminal_keeps_what_was_said(cli: Cli) -> None:
    endless = ("-n", "100000", "-c", "100000", "--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with cli.start("chat", "demo", *endless, **pipes) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write("def main(\n")
        parent.stdin.flush()
        assert parent.stdout.read(20)
        running = workers(parent.pid)
        parent.send_signal(signal.SIGINT)
        _, stderr = parent.communicate()
    assert parent.returncode == 130
    assert ", stopped" in stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert all_end(running)


def test_a_reader_that_goes_away(cli: Cli) -> None:
    command = shlex.join([str(SCRIPT), *["chat", "demo", "-n", "100000", "-c", "20000", "--temp", "2", "--top-k", "0"]])
    read_only_its_beginning(f"echo 'def main(' | {command}", cli)


def test_no_child_is_left_when_the_terminal_goes(chat: Callable[..., Session]) -> None:
    session = chat("demo", *SHORT)
    running = workers(session.pid)
    session.child.close(force=True)
    assert all_end(running)
    assert eventually(lambda: not session.child.isalive())


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_chat_with_a_head(cli: Cli, target: Path, kind: str) -> None:
    """Who drafts is shown and switched; a head does not answer alone, and is not compared as if it did."""
    pair = ("demo-eagle3",) if kind == "eagle3" else ("-m", heads.write_mtp(target, cli.folder / "w.gguf"))
    label = {"eagle3": "EAGLE-3 head", "mtp": "MTP head"}[kind]
    flags = (*SHORT, "--drafter", f"{kind}+lookup", "--draft-policy", "fixed", "--draft-max", "2")
    lines = ("/settings", "class Stack:", "/drafter draft", "/settings", "/compare", "/target", "/settings", "/draft")
    done = cli("chat", *pair, *flags, stdin="\n".join(lines), COLUMNS="100")
    assert (done.code, f"an {label} cannot answer alone" in done.stderr) == (2, True), done.stderr
    shown = re.findall(r"^/drafter +\S+ \((.+?)\) *$", done.stderr + done.stdout, re.MULTILINE)
    assert shown == [f"{label} and n-gram lookup", label, label]
    assert "draft-only" not in done.stdout + done.stderr
    document = cli("chat", *pair, *flags, "--json", stdin="def f(\n/compare\n").document()
    assert [run["name"] for run in document["turns"][-1]["compared"]] == ["target-only", "speculative"]
    assert document["turns"][0]["figures"]["drafted"] > 0


# ---- without a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_without_a_model_what_is_here_is_listed(cli: Cli, target: Path, draft: Path, command: str) -> None:
    shutil.copyfile(target, cli.folder / "big-F16.gguf")
    shutil.copyfile(draft, cli.folder / "small-Q8_0.gguf")
    done = cli(command, stdin="hello\n")
    assert (done.code, done.stdout) == (2, "")
    assert re.search(r"big-F16 .*\n +draft: small-Q8_0", done.stderr)
    typed = f"ggufspec {command} -m big-F16.gguf -md small-Q8_0.gguf"
    assert f"error: no model is given\n  next: {typed}\n" in done.stderr
    assert cli(command, "--json").document() == {
        "schema": "ggufspec/error@1",
        "error": "no model is given",
        "hint": typed,
    }
    words = shlex.split(typed)[1:]
    again = cli(*words, "--dry-run") if command == "serve" else cli(*words, "-n", "4", stdin="def f(\n")
    assert again.code == 0, again.stderr


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_without_any_model_profiles_are_named(cli: Cli, command: str) -> None:
    done = cli(command)
    assert done.code == 2
    assert "no model is given, and there is none on this disk" in done.stderr
    assert "ggufspec profiles list shows all" in done.stderr
    assert "demo" not in done.stderr


def test_the_demo_says_what_it_is(cli: Cli) -> None:
    done = cli("chat", "demo", *SHORT, stdin="def main(\n")
    assert "a 10M-parameter toy that only continues Python code; it cannot chat" in done.stderr


def test_a_person_s_defaults(cli: Cli, target: Path, draft: Path) -> None:
    """A temperature, a seed for each answer, and a context of 4,096 tokens or as many as the model knows."""
    pair = ("-m", target, "-md", draft, "-n", "8")
    settings = cli("chat", *pair, "--json", stdin="def main(\n/retry\n").document()["settings"]
    assert (settings["temperature"], settings["top_k"], settings["top_p"], settings["min_p"]) == (0.8, 40, 0.95, 0.05)
    assert settings["ctx_size"] == 2048, "what the demo pair was trained for"
    assert cli("chat", *pair, "-c", "512", "--json", stdin="x\n").document()["settings"]["ctx_size"] == 512
    profile = cli("chat", "demo-eagle3", "-n", "8", "--json", stdin="x\n").document()
    assert profile["settings"]["ctx_size"] == 2048


def test_a_model_that_knows_more_gets_4096_tokens(cli: Cli, target: Path, tmp_path: Path) -> None:
    def longer(name: str, value: Any) -> Any:
        return 8192 if name == "llama.context_length" else value

    long = rewritten(target, tmp_path / "long.gguf", value=longer)
    settings = cli("chat", "-m", long, "-n", "4", "--json", stdin="x\n").document()["settings"]
    assert settings["ctx_size"] == 4096


def test_a_draft_is_offered_in_the_greeting(chat: Callable[..., Session], cli: Cli, target: Path, draft: Path) -> None:
    shutil.copyfile(draft, cli.folder / "small-Q8_0.gguf")
    session = chat("-m", target, *SHORT)
    offer = re.compile(r"a draft for it: (small|demo-draft)-Q8_0 \(1 MB, on this disk\): ggufspec chat -m")
    session.until(lambda text: offer.search(flat(text)))
    session.say("/quit")
    session.end()
