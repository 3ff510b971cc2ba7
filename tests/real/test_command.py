"""The promises as a user types them: one seed, one text, whoever drafts; and what the commands say of how it went."""

from __future__ import annotations

import csv
import io
import json
import shutil

import gguf
import pytest

PROMPT = "import os\n\n\ndef read_lines(path):\n    "
FIXED = ("--draft-policy", "fixed")
STRICT = ("-p", PROMPT, "-n", "24", "--strict")
ALONE = (("--no-draft",), ("--drafter", "none"))
WAYS = (
    *ALONE,
    (),
    ("--draft-max", "1"),
    ("--draft-max", "8"),
    *(("--drafter", drafter, *FIXED) for drafter in ("draft", "lookup", "both")),
)
GREEDY, WARM = (), ("--temp", "0.8", "-s", "7")
FULL = pytest.mark.full
DEAD_END = 'root ::= "yes" "\\x00"'  # no token has a null character
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "lines": {"type": "integer"}},
    "required": ["name", "lines"],
}


@pytest.mark.parametrize("sampling", [WARM, GREEDY], ids=["temperature 0.8", "greedy"])
def test_run_in_strict_mode_gives_the_same_token_ids(cli, sampling):
    texts = set()
    for way in WAYS:
        done = cli("run", "demo", *STRICT, "--json", *sampling, *way)
        assert done.code == 0, done.stderr
        document = done.document()
        assert document["schema"] == "ggufspec/run@1"
        assert len(document["tokens"]) == 24
        assert ("acceptance_rate" in document["statistics"]) == (way not in ALONE)
        texts.add(tuple(document["tokens"]))
    assert len(texts) == 1


# temperature


@pytest.mark.parametrize("temperature", [pytest.param("0", marks=FULL), "0.8", pytest.param("2", marks=FULL)])
def test_the_temperature_of_a_chat_is_that_of_a_run(cli, temperature):
    flags, line = ("-n", "16", "--json", "--strict"), PROMPT.splitlines()[0]
    given = cli("chat", "demo", *flags, "--temp", temperature, "-s", "7", stdin=line).document()
    typed = cli("chat", "demo", *flags, stdin=f"/seed 7\n/temp {temperature}\n{line}").document()
    run = cli("run", "demo", *flags, "-p", line, "--temp", temperature, "-s", "7").document()
    greedy = cli("run", "demo", *flags, "-p", line).document()
    assert typed["turns"][0]["answer"] == given["turns"][0]["answer"] == run["text"]
    assert typed["settings"]["temperature"] == run["settings"]["temperature"] == float(temperature)
    assert (run["text"] == greedy["text"]) == (temperature == "0")


# seeds


def test_a_seed_that_is_drawn_is_told_and_gives_the_text_again(cli):
    hot = ("run", "demo", "-p", PROMPT, "-n", "24", "--strict", "--temp", "1.5", "--top-k", "0", "--top-p", "1")
    drawn = [cli(*hot, "--json", "-s", "-1") for _ in range(2)]
    documents = [done.document() for done in drawn]
    seeds = [document["settings"]["seed"] for document in documents]
    assert seeds[0] != seeds[1]
    assert documents[0]["tokens"] != documents[1]["tokens"]
    assert f"-s {seeds[0]} gives the same text again" in drawn[0].stderr
    again = cli(*hot, "--json", "-s", str(seeds[0]))
    assert again.document()["tokens"] == documents[0]["tokens"]
    assert "gives the same text again" not in again.stderr
    assert cli(*hot, "-q", "-s", "-1").stderr == ""


def test_a_seed_that_is_drawn_in_a_chat(cli):
    flags = ("-n", "8", "--json", "--temp", "1.5", "-s", "-1")
    done = cli("chat", "demo", *flags, stdin="def f(\n/settings\n/seed -1\n")
    seeds = [done.stderr.split("/seed")[1].split()[0], done.stderr.split("seed: ")[1].split()[0]]
    assert len(set(seeds)) == 2
    assert done.document()["settings"]["seed"] == int(seeds[1])


# penalties

PENALTIES = (
    "--repeat-penalty",
    "1.5",
    "--repeat-last-n",
    "-1",
    "--presence-penalty",
    "0.5",
    "--frequency-penalty",
    "0.2",
)


@pytest.mark.parametrize("sampling", [WARM, pytest.param(GREEDY, marks=FULL)], ids=["temperature 0.8", "greedy"])
def test_penalties_give_another_text_and_drafts_do_not(cli, sampling):
    documents = [
        cli("run", "demo", *STRICT, "--json", *sampling, *way).document()
        for way in ((), PENALTIES, (*PENALTIES, "--no-draft"), (*PENALTIES, "--drafter", "lookup", *FIXED))
    ]
    plain, *penalised = [document["tokens"] for document in documents]
    assert penalised[0] == penalised[1] == penalised[2] != plain
    settings = documents[1]["settings"]
    values = {key: settings[key] for key in settings if "penalty" in key or "repeat" in key}
    assert values == {
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    }
    off = cli("run", "demo", *STRICT, "--json", *sampling, *PENALTIES, "--repeat-last-n", "0").document()
    assert off["tokens"] == plain


def test_a_chat_with_penalties_is_a_run_with_them(cli):
    switches = "/repeat-penalty 1.5\n/repeat-last-n -1\n/presence-penalty 0.5"
    lines = f"{PROMPT.splitlines()[0]}\n/repeat-penalty 1\n/retry\n{switches}\n/retry\n"
    flags = ("-n", "24", "--json", "--strict", "-q", "--temp", "0")
    switched = cli("chat", "demo", *flags, stdin=lines).document()
    given = cli("chat", "demo", *flags, *PENALTIES[:6], stdin=PROMPT.splitlines()[0]).document()
    assert switched["turns"][-1]["answer"] == given["turns"][0]["answer"]
    assert switched["settings"]["repeat_penalty"] == given["settings"]["repeat_penalty"] == 1.5
    plain = cli("chat", "demo", *flags, stdin=PROMPT.splitlines()[0]).document()
    assert plain["turns"][0]["answer"] != given["turns"][0]["answer"]


# the lookup


def test_a_lookup_needs_no_draft_and_knows_its_corpus(cli, pair, tmp_path):
    alone = cli("run", "-m", pair[0], *STRICT, "--json").document()
    assert alone["pair"]["draft"] is None
    assert "rounds" not in alone["statistics"]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(PROMPT + alone["text"], encoding="utf-8")
    flags = ("--drafter", "lookup", *FIXED, "--lookup-corpus", corpus, "--json")
    found = cli("run", "-m", pair[0], *STRICT, *flags).document()
    assert found["tokens"] == alone["tokens"]
    assert found["settings"]["lookup_corpus"] == str(corpus)
    statistics = found["statistics"]
    assert statistics["draft_layers"] == 0
    assert statistics["lookup_drafted"] == statistics["drafted"] > 0
    assert statistics["lookup_accepted"] == statistics["accepted"] > 8


def test_the_drafter_by_variable_and_a_flag_over_it(cli):
    flags = ("run", "demo", "-p", PROMPT, "-n", "2", *FIXED, "--json")
    lookup = cli(*flags, GGUFSPEC_DRAFTER="lookup").document()
    assert (lookup["settings"]["drafter"], lookup["pair"]["draft"]) == ("lookup", None)
    draft = cli(*flags, "--drafter", "draft", GGUFSPEC_DRAFTER="lookup").document()
    assert (draft["settings"]["drafter"], draft["statistics"]["lookup_drafted"]) == ("draft", 0)
    alone = cli(*flags, "--no-draft", GGUFSPEC_DRAFTER="draft").document()
    assert (alone["settings"]["drafter"], "rounds" in alone["statistics"]) == ("none", False)


def test_bench_of_a_lookup(cli, pair):
    done = cli("bench", "-m", pair[0], "--drafter", "lookup", *FIXED, "-p", PROMPT * 3, "-n", "8", "-r", "1")
    assert done.code == 0
    assert done.stderr.startswith("measuring ")
    assert "n-gram lookup (4 tokens a round)" in done.stdout
    assert "draft-only" not in done.stdout
    assert "The same text with and without a draft: " in done.stdout
    assert "No verdict" in done.stdout  # its reason depends on how steady the machine is


# lossy rules


@pytest.mark.parametrize("rule", ["top-k:2", "typical:0.2"])
def test_a_lossy_run_says_so(cli, rule):
    flags = ("run", "demo", "-p", PROMPT, "-n", "8", *FIXED)
    assert cli(*flags, "--accept", rule).stderr.endswith(" tokens/round, lossy\n")
    document = cli(*flags, "--accept", rule, "--json").document()
    assert document["statistics"]["lossy"] is document["settings"]["lossy"] is True
    assert "lossy" not in cli(*flags, "--accept", "residual").stderr


def test_a_lossy_bench_says_so(cli, tmp_path):
    files = tmp_path / "r.json", tmp_path / "r.csv"
    exports = ("--export-json", files[0], "--export-csv", files[1])
    done = cli("bench", "demo", "-p", PROMPT, "-n", "8", "-r", "1", *FIXED, "--accept", "top-k:2", "-q", *exports)
    assert (done.code, done.stderr) == (0, "")
    assert "top-k:2 (lossy)" in " ".join(done.stdout.split())
    assert "\n speculative (lossy) " in done.stdout
    assert "The rule is lossy" in " ".join(done.stdout.split())
    assert "compared in strict mode under the exact rule" in " ".join(done.stdout.split())
    document = json.loads(files[0].read_text())
    assert document["settings"]["lossy"] is document["runs"]["speculative"]["lossy"] is True
    lines = csv.DictReader(io.StringIO(files[1].read_text()))
    assert {line["run"]: line["lossy"] for line in lines} == {
        "target_only": "False",
        "draft_only": "False",
        "speculative": "True",
    }


# grammars


@pytest.mark.parametrize("sampling", [WARM, GREEDY], ids=["temperature 0.8", "greedy"])
def test_an_answer_by_a_schema_is_json_and_the_same_with_and_without_draft(cli, tmp_path, sampling):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    flags = ("run", "demo", "-p", PROMPT, "-n", "64", "--strict", "--json", *sampling)
    drafted = cli(*flags, *FIXED, "-j", json.dumps(SCHEMA)).document()
    alone = cli(*flags, "--no-draft", "-jf", file).document()
    assert drafted["tokens"] == alone["tokens"]
    assert drafted["stop_reason"] == "end"
    answer = json.loads(drafted["text"])
    assert set(answer) == {"name", "lines"}
    assert isinstance(answer["lines"], int)
    assert len(answer["name"]) <= 6


def test_an_answer_by_a_grammar(cli, tmp_path):
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "yes" | "no"\n')
    for flags in (("--grammar-file", file), ("--grammar", file.read_text())):
        done = cli("run", "demo", "-p", "Is it? ", *flags, *FIXED)
        assert done.code == 0, done.stderr
        assert done.stdout in ("yes\n", "no\n")


def test_a_grammar_that_leads_nowhere_is_a_note(cli):
    flags = ("run", "demo", "-p", PROMPT, "--grammar", DEAD_END, *FIXED)
    done = cli(*flags)
    assert (done.code, done.stdout) == (0, "yes\n")
    assert done.stderr.endswith("\nthe answer ends where the grammar permits no further token\n")
    document = cli(*flags, "--json").document()
    assert (document["text"], document["stop_reason"]) == ("yes", "grammar")
    assert document["notes"] == ["the answer ends where the grammar permits no further token"]


# what a run notes


@pytest.fixture(scope="session")
def nan_draft(tmp_path_factory, pair):
    """The draft with one damaged tensor: whatever it reads, its logits are NaN."""
    path = tmp_path_factory.mktemp("damaged") / "nan.gguf"
    shutil.copyfile(pair[1], path)
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight").data[:] = float("nan")
    reader.data.flush()
    return path


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_a_damaged_draft_costs_the_speedup_and_not_the_answer(cli, pair, nan_draft, policy):
    flags = ("run", "-m", pair[0], "-md", nan_draft, "-p", PROMPT, "-n", "16", "--strict")
    drafted = cli(*flags, "--draft-policy", policy)
    alone = cli(*flags, "--no-draft")
    assert (drafted.code, drafted.stdout) == (0, alone.stdout)
    assert "NaN logits; it drafts no more\n" in drafted.stderr
    assert "NaN" not in alone.stderr
