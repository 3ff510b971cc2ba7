"""The commands as a user meets them: help, streams, documents, exports, precedence."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from pathlib import Path

import pexpect
import pytest

from ggufspec.cli.app import with_huge_pages
from tests.support.processes import SCRIPT, Cli, plain, rest
from tests.support.screens import Session

COMMANDS = (
    *("bench", "run", "verify", "plan", "pull", "export", "worker", "doctor", "rehearse", "quantize", "profiles"),
    *("compare", "tune", "report", "trace", "serve", "models"),
)
LINES = {"run": 45}  # of a help at most
PROMPT = ("-p", "def f(")
SHORT_BENCH = ("bench", "demo", *PROMPT, "-r", "1", "-n", "8", "-t", "1")

RUN_KEYS = {"gpu_layers", "tokens", "tokens_per_s", "prompt_tokens_per_s", "peak_rss_bytes", "vram_bytes"}
SPECULATIVE_KEYS = RUN_KEYS | {
    *("acceptance_rate", "tokens_per_round", "accepted_by_position", "drafted", "accepted", "rounds")
}


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_data(cli: Cli, flag: str) -> None:
    done = cli(flag)
    assert re.fullmatch(r"ggufspec \d+\.\d+\.\d+ \(llama-cpp-python \d+\.\d+\.\d+\)\n", done.stdout)
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_top_help_lists_the_commands(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert (done.code, done.stderr) == (0, "")
    assert "Example: ggufspec bench demo" in done.stdout
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("group", [(), ("profiles",)])
def test_a_list_of_commands_cuts_no_description(cli: Cli, group: tuple[str, ...], columns: str) -> None:
    _, _, rows = cli(*group, "--help", COLUMNS=columns).stdout.partition("Commands:\n")
    listed = rows.partition("\n\n")[0].splitlines()
    assert len(listed) == (5 if group else len(COMMANDS) + 1)
    assert all(line.startswith("  ") and line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_what_verifies_on_a_card_is_compared_in_strict_mode_all_the_same(cli: Cli, how: str) -> None:
    """Strict mode refuses the threshold, and so the comparison leaves it out."""
    given = ("--op-offload-min-batch", "2") if how == "option" else ()
    more = {} if how == "option" else {"GGML_OP_OFFLOAD_MIN_BATCH": "2"}
    found = cli(*SHORT_BENCH, *given, "--json", **more).document()
    assert found["identical_output"] is True
    assert found["settings"]["op_offload_min_batch"] == 2
    refused = cli("run", "demo", *PROMPT, "--strict", *given, **more)
    assert refused.code == 2
    assert "--op-offload-min-batch 32, or run without --strict" in refused.stderr


@pytest.mark.parametrize(("command", "default"), [("bench", "demo-360m"), ("run", "demo")])
def test_the_help_says_which_pair_a_command_takes_without_one(cli: Cli, command: str, default: str) -> None:
    assert f"Profile or GGUF files: target, draft. [{default}]" in " ".join(cli(command, "--help").stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_help_has_an_example_and_fits_the_terminal(cli: Cli, command: str, columns: int) -> None:
    done = cli(command, "--help", COLUMNS=str(columns))
    assert (done.code, done.stderr) == (0, "")
    assert f"  ggufspec {command} " in done.stdout.partition("Examples:")[2]
    assert ("GGUFSPEC_" in done.stdout) == (command not in ("doctor", "models", "report", "profiles", "pull"))
    assert "env var" not in done.stdout
    assert len(done.stdout.splitlines()) <= LINES.get(command, 53)
    assert max(map(len, done.stdout.splitlines())) <= max(columns, 90)


def test_files_in_place_of_a_pair(cli: Cli, target: Path, draft: Path) -> None:
    typed = (*PROMPT, "-n", "4", "--strict", "--json")
    found, same = (
        cli("run", target, draft, *typed).document(),
        cli("run", "-m", target, "-md", draft, *typed).document(),
    )
    assert (found["pair"], found["tokens"]) == (same["pair"], same["tokens"])


def test_an_answer_without_a_limit_ends_by_itself(cli: Cli) -> None:
    document = cli("run", "demo", *PROMPT, "-n", "-1", "-c", "64", "--json").document()
    assert document["stop_reason"] in ("end", "context")
    assert len(document["tokens"]) <= 64


def test_the_help_of_a_command_loads_no_model_library(cli: Cli) -> None:
    done = cli("bench", "--help", PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"llama_cpp", "huggingface_hub"}


def test_completion_knows_the_commands(cli: Cli) -> None:
    done = cli(_GGUFSPEC_COMPLETE="complete_bash", COMP_WORDS="ggufspec r", COMP_CWORD="1")
    assert sorted(done.stdout.split()) == ["rehearse", "report", "run"]


def test_run_prints_the_answer_alone_and_says_the_rest_on_stderr(cli: Cli) -> None:
    fixed = ("--draft-policy", "fixed")  # times nothing, so that there is nothing to say of a busy machine
    document = cli("run", *PROMPT, "-n", "6", *fixed, "--json").document()
    done = cli("run", *PROMPT, "-n", "6", *fixed)
    assert done.code == 0
    assert done.stdout == document["text"] + "\n"
    demo, without_template, prompt, answer = done.stderr.splitlines()
    assert demo.startswith("no model is named: using the bundled demo pair, a toy; ")
    assert without_template.endswith("has no chat template: it continues the prompt as plain text")
    assert re.fullmatch(r"prompt: \d+ tokens? at [\d.]+/s, first token after [\d.]+ m?s, plain text", prompt)
    assert re.fullmatch(r"6 tokens, [\d.]+ tokens/s, (\d+ of \d+|\d+%) accepted, [\d.]+ tokens/round", answer)
    one = cli("run", *PROMPT, "-n", "1", *fixed)
    assert one.stderr.splitlines()[3] == "1 token, nothing drafted"  # which has no speed


def test_run_document(cli: Cli) -> None:
    done = cli("run", *PROMPT, "-n", "8", "--json")
    document = done.document()
    assert (done.code, done.stderr) == (0, "")
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/run@1"
    assert len(document["tokens"]) == document["statistics"]["tokens"] == 8
    assert set(document["statistics"]) >= SPECULATIVE_KEYS
    assert document["stop_reason"] == "length"
    assert document["interrupted"] is False


def test_without_draft_the_text_is_the_same_and_no_drafts_are_counted(cli: Cli) -> None:
    alone = cli("run", *PROMPT, "-n", "12", "--strict", "--no-draft", "--json").document()
    drafted = cli("run", *PROMPT, "-n", "12", "--strict", "--json").document()
    assert alone["tokens"] == drafted["tokens"]
    assert "rounds" not in alone["statistics"]
    assert drafted["statistics"]["rounds"] > 0


def test_prompts_from_stdin_and_from_a_file_are_the_same_prompt(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("größe = [", encoding="utf-8")
    flags = ("-n", "4", "--json")
    texts = [
        cli("run", "-p", "größe = [", *flags),
        cli("run", "-p", "-", *flags, stdin="größe = ["),
        cli("run", "-f", file, *flags),
    ]
    assert len({tuple(done.document()["tokens"]) for done in texts}) == 1


def test_quiet_leaves_the_answer(cli: Cli) -> None:
    done = cli("run", *PROMPT, "-n", "4", "-q")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


def test_verbose_shows_the_log_of_llama_cpp_on_stderr(cli: Cli) -> None:
    done = cli("run", *PROMPT, "-n", "4", "-v", "--json")
    assert "llama_model_loader" in done.stderr
    assert "Attempting to acquire lock" not in done.stderr  # the log of filelock
    assert done.document()["schema"] == "ggufspec/run@1"


def test_streaming_comes_token_by_token(cli: Cli) -> None:
    child = cli.terminal("run", *PROMPT, "-n", "400")
    pieces = 0
    while True:
        try:
            child.read_nonblocking(65536, timeout=180)
        except pexpect.EOF:
            break
        pieces += 1
    child.close()
    assert child.exitstatus == 0
    assert pieces > 5


# bench


def test_bench_document_and_exports(cli: Cli, tmp_path: Path) -> None:
    as_json, as_markdown, as_csv = (tmp_path / name for name in ("r.json", "r.md", "r.csv"))
    exports = ("--export-json", as_json, "--export-markdown", as_markdown, "--export-csv", as_csv)
    done = cli(*SHORT_BENCH, "--json", *exports)
    assert done.code == 0
    assert done.stderr.startswith("kept in ")
    document = done.document()
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/bench@1"
    assert {"pair", "machine", "plan", "settings", "divergences", "verdict"} <= set(document)
    assert "CPU" in document["machine"]["build"]["system_info"]
    assert document["identical_output"] is True
    assert set(document["runs"]) == {"target_only", "draft_only", "speculative"}
    for run in document["runs"].values():
        assert set(run) >= RUN_KEYS
        assert len(run["tokens_per_s"]["samples"]) == 1
        assert run["tokens_per_s"]["median"] > 0
    assert set(document["runs"]["speculative"]) >= SPECULATIVE_KEYS
    low, high = document["speedup"]["ci95"]
    assert low <= document["speedup"]["median"] <= high
    assert isinstance(document["verdict"]["worth_it"], bool)
    assert document["verdict"]["text"]
    assert document["interrupted"] is False
    assert document["settings"]["threads"] == 1

    assert json.loads(as_json.read_text()) == document
    table = [line for line in as_markdown.read_text().splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1
    assert document["verdict"]["text"] in as_markdown.read_text()
    lines = list(csv.DictReader(io.StringIO(as_csv.read_text())))
    assert [line["run"] for line in lines] == ["target_only", "draft_only", "speculative"]
    assert all(float(line["tokens_per_s"]) > 0 for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.json", "r.md"]


def test_a_full_disk_behind_standard_output_is_an_error_and_no_traceback(cli: Cli) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([SCRIPT, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_the_table_is_whole_and_a_full_disk_costs_the_file_alone(cli: Cli, tmp_path: Path, columns: int) -> None:
    """In a real terminal: no line is longer than it, every run is one line, no word is broken."""
    kept = tmp_path / "r.md"
    exports = ("--export-json", "/dev/full", "--export-markdown", str(kept))
    drafting = ("--draft-policy", "fixed", "--draft-max", "12", "--accept", "top-k:2")  # the widest row
    child = cli.terminal(*SHORT_BENCH, *drafting, *exports, columns=columns)
    shown = plain(rest(child))
    result, _, failure = shown.partition("error: ")
    assert child.exitstatus == 1
    assert failure.startswith("/dev/full cannot be written: No space left on device")
    assert "Traceback" not in shown
    assert "speculative" in kept.read_text()

    paths = ("/bench-demo-", str(kept))  # which are not broken
    lines = [line for line in result.splitlines() if not any(path in line for path in paths)]
    assert max(map(len, lines)) <= columns
    assert any(re.search(r"Run +Tokens/s +8 tokens +Speedup +Accepted", line) for line in lines)
    row = r"speculative \(lossy\) +[\d.]+ +[\d.]+ m?s +[\d.]+× +(\d+%|\d+ of \d+)"
    assert any(re.search(row, line) for line in lines)
    assert "No verdict" in result


def test_colour_only_where_it_is_wanted(cli: Cli) -> None:
    assert "\x1b[" in rest(cli.terminal("run", "nonsense"))
    assert "\x1b[3" not in rest(cli.terminal("run", "nonsense", NO_COLOR="1"))
    assert "\x1b[" not in rest(cli.terminal("run", "nonsense", TERM="dumb"))


# precedence: flag, variable, profile, default

PROFILE = """
name = "mine"
why = "for a test"
source = "here"
[target]
file = "{target}"
[draft]
file = "{draft}"
[settings]
{settings}
"""


def test_precedence(cli: Cli, tmp_path: Path, target: Path, draft: Path) -> None:
    set_, bare = tmp_path / "set.toml", tmp_path / "bare.toml"
    set_.write_text(PROFILE.format(target=target, draft=draft, settings="draft_max = 3"))
    fixed = ("--draft-policy", "fixed")
    bare.write_text(PROFILE.format(target=target, draft=draft, settings=""))

    def draft_max(*arguments: str | Path, **environment: str) -> int:
        done = cli("run", *arguments, *PROMPT, "-n", "1", "--json", **environment)
        value: int = done.document()["settings"]["draft_max"]
        return value

    assert draft_max(bare) == 63
    assert draft_max(bare, *fixed) == 4
    assert draft_max(set_) == draft_max(set_, *fixed) == 3
    assert draft_max(set_, GGUFSPEC_DRAFT_MAX="2") == 2
    assert draft_max(set_, "--draft-max", "1", GGUFSPEC_DRAFT_MAX="2") == 1


def test_a_bad_variable_is_named(cli: Cli) -> None:
    done = cli("run", *PROMPT, GGUFSPEC_NGL="many")
    assert done.code == 2
    assert "GGUFSPEC_NGL=many" in done.stderr


def test_files_by_variable(cli: Cli, target: Path, draft: Path) -> None:
    files = {"GGUFSPEC_MODEL": str(target), "GGUFSPEC_MODEL_DRAFT": str(draft)}
    pair = cli("run", *PROMPT, "-n", "1", "--json", **files).document()["pair"]
    assert (pair["target"], pair["draft"]) == (str(target), str(draft))


# what takes long before there is text


@pytest.mark.parametrize("command", ["run", pytest.param("trace", marks=pytest.mark.full)])
def test_a_terminal_is_told_of_loading_until_the_text_begins(cli: Cli, command: str) -> None:
    session = Session(cli.terminal(command, "demo", *PROMPT, "-n", "4"))
    shown = session.end()
    _, _, after = session.raw.partition("loading demo and processing the prompt")
    assert after
    assert "\x1b[2K" in after  # the line is erased
    assert "loading" not in shown
    assert "4 tokens" in shown


def test_nothing_is_told_of_loading_elsewhere(cli: Cli) -> None:
    assert "loading" not in cli("run", "demo", *PROMPT, "-n", "4").stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_child_processes_ask_for_huge_pages_unless_the_user_said_otherwise(before, after):
    assert with_huge_pages(before) == after
