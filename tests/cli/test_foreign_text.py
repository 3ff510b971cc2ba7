"""No text of others is obeyed: not by the terminal, not as Rich's markup, not in Markdown, wherever it comes from."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.table import Table
from rich.text import Text

import ggufspec
from ggufspec.cli import ui
from ggufspec.cli.terminal import Console
from ggufspec.reports.table import escaped
from tests.support import kept_results
from tests.support.gguf_files import rewritten
from tests.support.processes import Cli, rest
from tests.support.server import Server, serving

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e[bold][/red]:smile:"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
PROMPT = ("-p", "def f(", "-n", "4")


def harmless(*texts: str) -> None:
    """Nothing in them is obeyed, and nothing went wrong over it."""
    for text in texts:
        found = OBEYED.search(text)
        assert found is None, repr(text[max(0, found.start() - 200) : found.end() + 200])
        assert "Traceback" not in text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> dict[str, str]:
    """Files whose names, folders, metadata and keys are hostile, by what they are."""
    root = tmp_path_factory.mktemp("hostile")
    folder, _, name = HOSTILE.rpartition("/")
    (root / folder).mkdir()
    model, tokens, architecture = root / folder / f"{name}.gguf", root / "tokens.gguf", root / "architecture.gguf"
    rewritten(draft, model, value=lambda key, value: HOSTILE if key == "general.name" else value)
    rewritten(draft, tokens, value=lambda key, value: HOSTILE if key == "tokenizer.ggml.pre" else value)
    whole, key = draft.read_bytes(), b"general.architecture" + bytes([8, 0, 0, 0, 5, *bytes(7)])
    assert key + b"llama" in whole
    architecture.write_bytes(whole.replace(key + b"llama", key + b"\x1b[2J\x07"))
    profile, result = root / "profile.toml", root / "result.json"
    named = root / "named.toml"
    named.write_text(f"name = {json.dumps(HOSTILE)}\n[target]\nfile = {json.dumps(str(draft))}\n", encoding="utf-8")
    profile.write_text(
        f'name = "hostile"\nwhy = {json.dumps(HOSTILE)}\nsource = {json.dumps(HOSTILE)}\n'
        f"[target]\nfile = {json.dumps(str(model))}\n[draft]\nfile = {json.dumps(str(draft))}\n",
        encoding="utf-8",
    )
    bench = next(body for body in kept_results.all_kinds() if body["schema"] == "ggufspec/bench@1")
    bench["machine"] |= {"cpu": HOSTILE, "gpus": [{"name": HOSTILE, "total_bytes": 1 << 34}], "system": HOSTILE}
    bench |= {"notes": [HOSTILE], "pair": {"name": HOSTILE, "target": str(model), "draft": HOSTILE}}
    bench["verdict"]["text"] = HOSTILE
    result.write_text(json.dumps(bench), encoding="utf-8")
    found = {"model": model, "tokens": tokens, "architecture": architecture, "profile": profile, "result": result}
    found["named"] = named
    return {key: str(path) for key, path in found.items()} | {"text": HOSTILE, "none": str(root / folder / "none")}


# Each with the exit code that it ends with; a word in braces is of the fixture.
COMMANDS = {
    "plan {architecture}": (1, "plan", "-m", "{architecture}"),
    "plan {tokens}": (1, "plan", "-m", "{tokens}"),
    "plan {model}": (0, "plan", "-m", "{model}", "--sweep"),
    "plan {profile}": (0, "plan", "{profile}"),
    "plan --gpu": (2, "plan", "--gpu", "{text}"),
    "run {architecture}": (1, "run", "-m", "{architecture}", *PROMPT),
    "run {tokens}": (1, "run", "-m", "{tokens}", *PROMPT),
    "run {model}": (0, "run", "-m", "{model}", *PROMPT, "-v"),
    "run {profile}": (0, "run", "{profile}", *PROMPT),
    "trace {model}": (0, "trace", "-m", "{model}", *PROMPT),
    "export {model}": (0, "export", "-m", "{model}"),
    "profiles show": (0, "profiles", "show", "{profile}"),
    "profiles check": (0, "profiles", "check", "{profile}"),
    "profiles show {named}": (1, "profiles", "show", "{named}"),
    "profiles new": (0, "profiles", "new", "mine", "-m", "{model}"),
    "report": (0, "report", "{result}"),
    "no report": (1, "report", "{model}"),
    "unknown command": (2, "{text}"),
    "unknown option": (2, "run", "--{text}"),
    "unknown profile": (2, "run", "{text}"),
    "no value": (2, "run", "demo", "-ngl", "{text}", *PROMPT),
    "no endpoint": (2, "run", "demo", "--rpc", "{text}:1", *PROMPT),
    "no file": (2, "run", "demo", "-f", "{none}"),
    "no grammar": (2, "run", "demo", *PROMPT, "--grammar", "root ::= {text}"),
    "no repository": (1, "pull", "-hf", "{text}"),
    "no export": (1, "bench", "demo", "--export-json", "{none}/x.json"),
    "no address": (2, "worker", "--host", "{text}"),
    "no types": (2, "quantize", "{model}", "--types", "{text}"),
}
SLOW = {
    "bench {profile}": (0, "bench", "{profile}", "-r", "1", *PROMPT),
    "bench --sweep": (0, "bench", "{profile}", "-r", "1", "--sweep", "--draft-max", "1,2", *PROMPT),
    "compare": (0, "compare", "-m", "{model}", "-md", "lookup", "-r", "1", *PROMPT),
    "rehearse": (0, "rehearse", "-m", "{model}"),
    "tune": (0, "tune", "{profile}", "--budget", "5s", "--no-save", *PROMPT),
    "verify": (0, "verify", "{profile}", "--quick"),
    "doctor": (0, "doctor", "--quick"),
}
every = pytest.mark.parametrize("case", [*COMMANDS, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])


def words(case: str, hostile: dict[str, str]) -> tuple[int, list[str]]:
    """(exit code, arguments)."""
    code, *arguments = (COMMANDS | SLOW)[case]
    assert isinstance(code, int)
    return code, [re.sub(r"\{(\w+)\}", lambda found: hostile[found[1]], str(word)) for word in arguments]


@every
def test_what_is_printed_into_pipes(cli: Cli, hostile: dict[str, str], case: str) -> None:
    code, arguments = words(case, hostile)
    done = cli(*arguments)
    assert done.code == code, done.stderr
    harmless(done.stderr, *([] if case.startswith("run") else [done.stdout]))
    if "-v" in arguments or case == "profiles new":  # whose name is taken now
        return
    done = cli(*arguments, "--json")
    assert done.code == code, done.stderr
    harmless(done.stdout, done.stderr)
    for line in done.stdout.splitlines() if case.startswith("trace") else [done.stdout]:
        json.loads(line)


@pytest.mark.full
@every
def test_what_is_printed_on_a_terminal(cli: Cli, hostile: dict[str, str], case: str) -> None:
    """Colours, and what moves the cursor for a progress bar, are ours."""
    code, arguments = words(case, hostile)
    child = cli.terminal(*arguments, columns=80)
    shown = rest(child)
    assert child.exitstatus == code, shown
    ours = re.compile(r"\x1b\[(?:[\d;]*m|\?25[lh]|1A|2K)|\r")
    harmless(ours.sub("", shown))


def test_the_environment(cli: Cli, hostile: dict[str, str]) -> None:
    done = cli("run", "demo", *PROMPT, GGUFSPEC_NGL=HOSTILE)
    assert done.code == 2
    harmless(done.stderr)
    assert "GGUFSPEC_NGL=␛]0;title␛[2J<U+009B>31m<U+202E>[bold][/red]" in done.stderr


def test_a_list_of_profiles(cli: Cli, hostile: dict[str, str]) -> None:
    folder = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(Path(hostile["profile"]).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / f"broken{HOSTILE.replace('/', '')}.toml").write_text("[[[")
    for more in ((), ("--json",)):
        done = cli("profiles", "list", *more)
        assert done.code == 0
        harmless(done.stdout, done.stderr)


def test_a_chat(cli: Cli, hostile: dict[str, str]) -> None:
    typed = f"/pair\n/set\n/{HOSTILE}\n"
    done = cli("chat", hostile["profile"], "--system", HOSTILE, stdin=typed)
    assert done.code == 2
    harmless(done.stdout, done.stderr)


# ---- a hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(hostile: dict[str, str]) -> Iterator[Server]:
    with serving() as served:
        yield served


@pytest.fixture
def online(cli: Cli, server: Server) -> Cli:
    more = {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return replace(cli, environment=cli.environment | more)


@pytest.mark.parametrize("file", ["architecture", "tokens", "model"])
@pytest.mark.parametrize("command", [("plan",), ("pull", "--dry-run"), ("pull", "-y")])
def test_models_of_a_hub(
    online: Cli, server: Server, hostile: dict[str, str], tmp_path: Path, file: str, command: tuple[str, ...]
) -> None:
    (tmp_path / f"{HOSTILE.replace('/', '')}-Q8_0.gguf").write_bytes(Path(hostile[file]).read_bytes())
    server.add_models("user/small-GGUF", tmp_path)
    for more in ((), ("--json",)):
        done = online(*command, "-hf", "user/small-GGUF:Q8_0", *more)
        harmless(done.stdout, done.stderr)
    harmless(online("plan", "-hf", "user/small-GGUF:Q4_K_M").stderr)  # it names what there is


def test_what_a_hub_warns_of(online: Cli, server: Server, hostile: dict[str, str], tmp_path: Path) -> None:
    """huggingface_hub logs what a header says."""
    (tmp_path / "small-Q8_0.gguf").write_bytes(Path(hostile["model"]).read_bytes())
    server.add_models("user/small-GGUF", tmp_path)
    server.headers["X-HF-Warning"] = "topic; take \x9b31m care"
    done = online("pull", "--dry-run", "-hf", "user/small-GGUF:Q8_0")
    assert done.code == 0
    assert "take <U+009B>31m care" in done.stderr
    harmless(done.stdout, done.stderr)


# ---- the console ----------------------------------------------------------------------------------------------------


def printed(what: object, **how: str) -> str:
    file = io.StringIO()
    Console(file=file, width=60).print(what, **how)
    return file.getvalue()


def test_markup_and_emoji_are_text() -> None:
    assert printed("[bold]x[/red] :smile:", style="dim") == "[bold]x[/red] :smile:\n"
    assert printed(Text("[bold]x[/red]")) == "[bold]x[/red]\n"


def test_columns_are_as_wide_as_what_is_seen() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("size")
    for name in ("\x9b\x1b", Text("\u202e"), "plain"):
        table.add_row(name, "1 GB")
    lines = printed(table).splitlines()
    assert lines[1].startswith("<U+009B>␛ ")
    assert len({line.index("1 GB") for line in lines[1:]}) == 1


def test_styles_stay_with_their_characters() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", _environ={})
    console.print(Text.assemble(("\x9b", "red"), "plain", ("\x1b", "blue")))
    assert file.getvalue() == "\x1b[31m<U+009B>\x1b[0mplain\x1b[34m␛\x1b[0m\n"


# ---- Markdown and CSV -----------------------------------------------------------------------------------------------

PIECES = [
    *("<script>alert(1)</script>", "![x](http://a/b.png)", "[x](http://a)", "a | b", "`x`", "*x*", "**x**", "~~x~~"),
    *("_x_", "# x", "- x", "+ x", "1. x", "1) x", "> x", "---", "===", "&lt;", "a\\", "\\|", "x\n\n# y", "    x"),
    *("Llama-3-70B_Q4_K_M.gguf", "-1.5", "1.28× (95 % interval 1.20 to 1.31)", "snake_case_name"),
]


@pytest.mark.parametrize("text", PIECES)
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    """By itself, in a table, in a list."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for source in (escaped(text), f"| a | b |\n| --- | --- |\n| {escaped(text)} | c |", f"- {escaped(text)}"):
        page = parser.render(source)
        shown = re.sub(r"</?(?:p|ul|li|table|thead|tbody|tr|th|td)>|\n", "", page)
        assert "<" not in shown
        if not source.startswith("|"):
            assert (
                shown.split()
                == " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split()
            )
        else:
            assert page.count("<td>") == 2


def test_names_that_need_no_escape_have_none() -> None:
    for text in ("Llama-3-70B_Q4_K_M.gguf", "-1.5", "12.3 ± 0.4", "1.28× (95 % interval 1.20 to 1.31)"):
        assert escaped(text) == text


def test_the_markdown_and_csv_of_a_bench(cli: Cli, hostile: dict[str, str], tmp_path: Path) -> None:
    table = tmp_path / "report.md"
    done = cli("report", hostile["result"], "--export-markdown", table)
    assert done.code == 0, done.stderr
    text = table.read_text(encoding="utf-8")
    harmless(text)
    assert "\\[bold\\]" in text


@pytest.mark.full
def test_the_exports_of_a_comparison(cli: Cli, target: Path, draft: Path, tmp_path: Path) -> None:
    name = 'a\n| b |,"c" <script> ![](x)\x1b[2J'
    model = rewritten(draft, tmp_path / f"{name.replace('/', '')}.gguf")
    table, lines = tmp_path / "r.md", tmp_path / "r.csv"
    done = cli(
        *("compare", "-m", model, "-md", "lookup", "-r", "1", *PROMPT),
        *("--export-markdown", table, "--export-csv", lines),
    )
    assert done.code == 0, done.stderr
    harmless(table.read_text(encoding="utf-8"), lines.read_text(encoding="utf-8"))
    assert "<script>" not in table.read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(lines.read_text(encoding="utf-8"), newline="")))
    assert len({len(row) for row in rows}) == 1


def test_no_other_console_is_made() -> None:
    root = Path(str(ggufspec.__file__)).parent
    made = {path.name for path in root.rglob("*.py") if re.search(r"\bConsole\(|from_markup", path.read_text("utf-8"))}
    assert made == {"terminal.py", "ui.py"}


def test_commands_in_one_process_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    try:
        for _ in range(2000):
            ui.hear()
        logging.getLogger("anybody").warning("%s", HOSTILE)
    finally:
        logging.setLogRecordFactory(factory)
    harmless(caplog.messages[-1])
