"""What is wrong is said in one sentence with a next step; never a traceback, and with --json always one document."""

from __future__ import annotations

import itertools
import json
import resource
import shlex
import shutil
import tracemalloc
from pathlib import Path

import pytest

from ggufspec.errors import ChildError, ModelError, UsageError
from ggufspec.llamacpp import model, params
from ggufspec.llamacpp.grammar import check_grammar, check_schema
from ggufspec.llamacpp.library import load_library
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.settings.table import OPTIONS
from tests.support import shapes
from tests.support.gguf_files import rewritten, split
from tests.support.processes import Cli, Finished

PROMPT = ("-p", "def f(")
DAMAGE = {
    "empty": "is empty",
    "no GGUF": "it begins with b'vers'",
    "cut in the magic": "it begins with b'GG'",
    "cut in the counts": "failed to read header",
    "cut in the keys": "failed to read key-value pairs",
    "cut in the data": "is truncated: it has",
    "cut by one byte": "is truncated: it has",
    "noise after the magic": "claims more than 65,536 keys or tensors",
    "noise after the version": "claims more than 65,536 keys or tensors",
    "noise after the counts": "failed to read key-value pairs",
    "noise after some keys": "failed to read key-value pairs",
}


def refused(done: Finished, code: int, *words: str) -> None:
    """Hold a failure, run with --json, to what every failure promises; ``words`` are in its message or its hint."""
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    document = done.document()
    assert set(document) == {"schema", "error", "hint"}
    assert document["schema"] == "ggufspec/error@1"
    assert document["error"]
    assert document["hint"]
    assert f"error: {document['error']}\n  next: {document['hint']}\n" in done.stderr
    for word in words:
        assert word in f"{document['error']} | {document['hint']}"


# files


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_target(cli: Cli, damaged: dict[str, Path], damage: str) -> None:
    done = cli("run", "-m", damaged[damage], *PROMPT, "--json")
    refused(done, 1, damaged[damage].name, DAMAGE[damage], "download")


def test_a_damaged_draft_is_the_file_that_is_named(cli: Cli, target: Path, damaged: dict[str, Path]) -> None:
    file = damaged["cut in the data"]
    done = cli("bench", "-m", target, "-md", file, *PROMPT, "--json")
    refused(done, 1, f"{file.name} is truncated: it has", "download it again")


def test_without_json_a_failure_leaves_stdout_empty(cli: Cli, damaged: dict[str, Path]) -> None:
    done = cli("run", "-m", damaged["cut in the data"], *PROMPT)
    assert (done.code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 2


def test_a_plan_names_the_file_and_not_what_is_kept_of_it(cli: Cli, draft: Path, tmp_path: Path) -> None:
    """A header that can be read, of a model that llama.cpp refuses."""
    odd = rewritten(draft, tmp_path / "odd.gguf", value=lambda name, value: 7 if name.endswith("head_count") else value)
    refused(cli("plan", "-m", odd, "--json"), 1, "odd.gguf: llama.cpp cannot load it", "wrong shape", "download it")
    refused(cli("run", "-m", odd, *PROMPT, "--json"), 1, "odd.gguf cannot be loaded", "download it again")


def test_damaged_weights_are_noticed(cli: Cli, draft: Path, tmp_path: Path) -> None:
    """The header is whole, the numbers are not: NaN logits."""
    whole = draft.read_bytes()
    file = tmp_path / "nan.gguf"
    file.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) - len(whole) // 2))
    refused(cli("run", "-m", file, *PROMPT, "-n", "2", "--json"), 1, "NaN", "download it again")


def test_missing_file_and_folder(cli: Cli, tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    refused(
        cli("run", "-m", missing, *PROMPT, "--json"), 1, f"{missing} does not exist", "ggufspec models lists the models"
    )
    refused(cli("run", "-m", tmp_path, *PROMPT, "--json"), 1, "is a folder")


@pytest.mark.parametrize("command", [("plan",), ("run", *PROMPT), ("verify", "--quick")])
def test_a_file_that_is_no_model_is_refused_alike_by_every_command(
    cli: Cli, tmp_path: Path, target: Path, command: tuple[str, ...]
) -> None:
    empty, text, there = tmp_path / "empty.gguf", tmp_path / "text.gguf", tmp_path / "there.gguf"
    empty.touch()
    text.write_text("no model")
    there.symlink_to(target)
    for file, error, hint in (
        (empty, f"{empty} is empty", "download it again"),
        (text, "text.gguf is not a GGUF file", "download the .gguf file itself"),
        (
            tmp_path / "ther.gguf",
            "ther.gguf does not exist",
            f"ggufspec {shlex.join([*command, '-m', str(there)])} --json",
        ),
        (tmp_path / "Qwen3-4B.gguf", "Qwen3-4B.gguf does not exist", "ggufspec models lists the models"),
        (tmp_path, f"{tmp_path} is a folder", f"-m {tmp_path}/"),
    ):
        refused(cli(*command, "-m", file, "--json"), 1, error, hint)


def test_a_model_cannot_be_its_own_draft(cli: Cli, tmp_path: Path, target: Path) -> None:
    again = tmp_path / "again.gguf"
    again.symlink_to(target)
    for command in (("run", *PROMPT), ("plan",)):
        done = cli(*command, target, again, "--json")
        refused(done, 2, f"{target} is both the target and the draft", "--drafter lookup")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (b"\1\0\0\0", ("GGUF version 1, ", "convert the model again")),
        (b"\x63\0\0\0", ("GGUF version 99, ", "update llama-cpp-python")),
        (b"\0\0\0\3", ("big-endian", "gguf-convert-endian FILE little")),
    ],
)
def test_another_version_of_gguf(
    cli: Cli, target: Path, draft: Path, tmp_path: Path, version: bytes, words: tuple[str, ...]
) -> None:
    file, whole = tmp_path / "other.gguf", draft.read_bytes()
    file.write_bytes(whole[:4] + version + whole[8:])
    for given in (["-m", file], ["-m", target, "-md", file]):
        done = cli("run", *given, *PROMPT, "--json")
        refused(done, 1, "other.gguf", *words)
        assert "download" not in done.stderr


@pytest.mark.parametrize(
    ("architecture", "more", "what"),
    [
        ("bert", {}, "an embedding model (bert): it does not predict the next token"),
        ("llama", {"llama.pooling_type": 3}, "an embedding model (llama)"),
        ("dream", {}, "a diffusion model (dream)"),
    ],
)
def test_a_model_that_writes_no_text(
    cli: Cli, tmp_path: Path, architecture: str, more: dict[str, shapes.Value], what: str
) -> None:
    tiny = shapes.SHAPES["tiny-llama"]
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in tiny.metadata.items()}
    file = tmp_path / "other.gguf"
    shapes.write_file(file, keys | {"general.architecture": architecture} | more, tiny.tensors)
    for command in ("run -p x", "bench --drafter lookup", "verify", "plan", "export", "serve", "tune"):
        refused(cli(*command.split(), "-m", file, "-c", "256", "--json"), 1, f"other.gguf is {what}", "generates text")


def test_a_head_is_no_target(cli: Cli, target: Path) -> None:
    head = target.with_name("mtp-demo-Q8_0.gguf")
    refused(cli("run", "-m", head, *PROMPT, "--json"), 1, f"{head.name} is a head for", f"-m TARGET -md {head.name}")


# pairs


@pytest.mark.parametrize("draft", ["demo-draft-Q8_0", "demo-eagle3-Q8_0", ""])
def test_models_in_parts(cli: Cli, target: Path, tmp_path: Path, draft: str) -> None:
    """They are given by any part."""
    file = target.with_name(f"{draft}.gguf")
    parts = split(target, tmp_path, 3), split(file, tmp_path, 3) if draft else []
    texts = []
    for one, other in ((target, file), (parts[0][0], file), *zip(parts[0], parts[1] or parts[0], strict=True)):
        done = cli("run", "-m", one, *(["-md", other] if draft else []), *PROMPT, "-n", "8", "--json")
        assert done.code == 0, done.stderr
        texts.append(done.document()["text"])
    assert set(texts) == {texts[0]}
    assert len(texts) == 5
    command = cli("export", "-m", parts[0][1], "-c", "256").stdout
    assert f"-m {parts[0][0]} " in command


def test_a_draft_with_one_other_token(cli: Cli, target: Path, other_token: tuple[Path, int, str, str]) -> None:
    file, token, before, now = other_token
    words = (
        f"token {token} is {before!r} to the target and {now!r} to the draft",
        f"-md {target.with_name('demo-draft-Q8_0.gguf')}",
    )
    refused(cli("run", "-m", target, "-md", file, *PROMPT, "--json"), 1, *words)
    refused(cli("bench", "-m", target, "-md", file, *PROMPT, "--json"), 1, *words[:1])


def test_a_draft_with_a_much_smaller_vocabulary(cli: Cli, target: Path, small_vocabulary: Path) -> None:
    done = cli("run", "-m", target, "-md", small_vocabulary, *PROMPT, "--json")
    refused(done, 1, "the target has 4,096 tokens, the draft 1,000", f"-md {target.with_name('demo-draft-Q8_0.gguf')}")


def test_a_mistyped_file_is_corrected_in_the_command(cli: Cli, target: Path, draft: Path) -> None:
    """As it was typed: in its own folder, and each of the two files."""
    (cli.folder / "in here").mkdir()
    shutil.copyfile(target, cli.folder / "in here" / "Big-F16.gguf")
    shutil.copyfile(draft, cli.folder / "in here" / "small-Q8_0.gguf")
    big, small = "in here/Big-F16.gguf", "in here/small-Q8_0.gguf"
    for typed in ((big.lower(), small), (big, "in here/smal-Q8_0.gguf")):
        done = cli("run", *typed, "-p", "it's", "-n", "2", "--json")
        refused(
            done, 1, "does not exist", shlex.join(["ggufspec", "run", big, small, "-p", "it's", "-n", "2", "--json"])
        )
        again = cli(*shlex.split(done.document()["hint"])[1:])
        assert again.code == 0, again.stderr
    refused(cli("run", "in here/smal-Q8_0.gguf", "-p", "two\nlines", "--json"), 1, "did you mean 'small-Q8_0.gguf'?")


def test_a_draft_of_another_family_is_replaced_by_one_that_fits(
    cli: Cli, target: Path, draft: Path, small_vocabulary: Path
) -> None:
    """By one next to the target, or by that of a profile with a target of its name."""
    for name, file in (("big-F16", target), ("fits-Q8_0", draft), ("other-Q8_0", small_vocabulary)):
        shutil.copyfile(file, cli.folder / f"{name}.gguf")
    for command in (("plan",), ("run", *PROMPT)):
        done = cli(*command, "-m", "big-F16.gguf", "-md", "other-Q8_0.gguf", "--json")
        fits = [*command, "-m", "big-F16.gguf", "-md", "fits-Q8_0.gguf", "--json"]
        refused(done, 1, "the target has 4,096 tokens, the draft 1,000", shlex.join(["ggufspec", *fits]))
    (cli.folder / "fits-Q8_0.gguf").unlink()
    large = cli.folder / "Qwen3-14B-Q4_K_M.gguf"
    shutil.copyfile(target, large)
    with large.open("ab") as file:
        file.truncate(9 << 30)  # as large as its name says
    done = cli("plan", "-m", large, "-md", "other-Q8_0.gguf", "--json")
    refused(done, 1, "-hfd Qwen/Qwen3-0.6B-GGUF:Q8_0 fits (Qwen3-0.6B-Q8_0, to download), or --drafter none")


def test_a_draft_larger_than_its_target_is_noticed_before_anything_is_loaded(
    cli: Cli, target: Path, draft: Path
) -> None:
    names = f"the draft ({target.name}, 20 MB) is larger than the target ({draft.name}, 1 MB)"
    said = f"{names}: are they swapped?"
    done = cli("run", "-m", draft, "-md", target, *PROMPT, "-n", "2")
    assert done.code == 0, done.stderr
    assert done.stderr.splitlines()[0] == said
    assert said not in cli("run", "-m", target, "-md", draft, *PROMPT, "-n", "2").stderr


def test_pair_and_files_that_contradict(cli: Cli, target: Path) -> None:
    refused(cli("run", "demo", "-m", target, *PROMPT, "--json"), 2, "both a PAIR and -m")
    refused(cli("bench", "-m", target, *PROMPT, "--json"), 2, "draft", "-md DRAFT")


def test_profiles_that_are_not_there(cli: Cli, tmp_path: Path) -> None:
    refused(cli("run", "dmeo", *PROMPT, "--json"), 2, "'dmeo'", "did you mean 'demo'?")
    refused(cli("run", tmp_path / "a.toml", *PROMPT, "--json"), 2, str(tmp_path / "a.toml"), "ggufspec profiles list")
    refused(cli("run", "x.gguf", *PROMPT, "--json"), 1, "x.gguf does not exist", "ggufspec models lists")


def test_a_profile_whose_files_are_not_downloaded(cli: Cli) -> None:
    for command in ("run", "bench"):
        refused(cli(command, "llama3-70b", *PROMPT, "--json"), 1, "not on this machine", "ggufspec pull llama3-70b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[[", ("broken.toml", "line 1")),
        ('name = "a"', ("broken.toml", "is missing")),
        (
            'name="a"\nwhy="b"\nsource="c"\n[target]\nfile="x.gguf"\n[settings]\ndraft_mx=3',
            ("settings.draft_mx", "did you mean 'draft_max'?"),
        ),
        ('name="a"\nwhy="b"\nsource="c"\n[target]\nfile="x.gguf"', ("x.gguf, which does not exist",)),
    ],
)
def test_broken_profiles(cli: Cli, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    profile = tmp_path / "broken.toml"
    profile.write_text(text)
    refused(cli("run", profile, *PROMPT, "--json"), 1, *words)


# values


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--draft-max 0", "1 to 255"),
        ("--draft-max -1", "1 to 255"),
        ("--draft-max 256", "1 to 255"),
        ("--draft-max 100000", "1 to 255"),
        ("--draft-max four", "--draft-max"),
        ("-c 1", "--ctx-size 1 is out of range: 2 to"),
        ("-c 99999999999", "--ctx-size 99999999999 is out of range: 2 to"),
        ("-c 16777217", "-c 8192, or -c max"),
        ("-ngl 99999999999", "not a number of layers"),
        ("-ngl some", "45, all or auto"),
        ("-ts 1,x", "three quarters"),
        ("-ts 0,0", "three quarters"),
        ("--headroom much", "--headroom 24GiB"),
        ("--n-cpu-moe -1", "--n-cpu-moe"),
        ("-t -1", "--threads -1 is out of range"),
        ("-t 100000", "--threads 100000 is out of range"),
        ("-n 0", "--predict 0 is out of range"),
        ("--temp -1", "--temp -1 is out"),
        ("--temp nan", "--temp nan is out"),
        ("--top-p 0", "top-p 0"),
        ("--top-k -1", "top-k -1"),
        ("--min-p 2", "--min-p 2 is out of range: 0 to 1"),
        ("-s -2", "seed -2"),
        ("-s 18446744073709551616", "--seed -1 draws one"),
        ("-s 1e9", "--seed '1e9' is not a whole number"),
        ("-s random", "--seed 'random' is not a whole number"),
        ("--repeat-penalty 0", "--repeat-penalty 0 is out of range: 0.01 to 100"),
        ("--repeat-last-n -2", "-1: the whole context"),
        ("--presence-penalty nan", "--presence-penalty nan is out"),
        ("--frequency-penalty 101", "--frequency-penalty 101 is out of range: -100 to 100"),
        ("--accept nonsense", "exact, residual, top-k:N, typical:EPS"),
        ("--accept top-k:0", "--accept top-k:3"),
        ("--accept typical:1", "--accept typical:0.3"),
        ("--drafter nobody", "one of " + ", ".join(OPTIONS["drafter"].words)),
        ("--draft-policy lazy", "one of adaptive, fixed"),
        ("-ctk nonsense", "q8_0"),
        ("-ctv nonsense", "q8_0"),
        ("-fa perhaps", "auto, on, off"),
        ("-ngl -5", "45, all (same as -1), or auto"),
        ("-n -2", "--predict -2 is out of range"),
        ("--nonsense", "--nonsense"),
        ("--rpc nonsense", "host:port"),
        ("--rpc 127.0.0.1:99999", "host:port"),
        ("-f nonsense.txt", "both -p and -f"),
    ],
)
def test_values_out_of_range(cli: Cli, flags: str, word: str) -> None:
    refused(cli("run", *PROMPT, "--json", *flags.split()), 2, word)


def test_a_drafter_by_variable_that_is_none(cli: Cli) -> None:
    refused(
        cli("run", *PROMPT, "--json", GGUFSPEC_DRAFTER="nobody"),
        2,
        "there is no drafter 'nobody'",
        "GGUFSPEC_DRAFTER=nobody",
    )


# drafters


@pytest.mark.parametrize("drafter", ["draft", "both"])
def test_a_drafter_that_is_not_there(cli: Cli, target: Path, drafter: str) -> None:
    done = cli("run", "-m", target, "--drafter", drafter, *PROMPT, "--json")
    refused(done, 2, f"--drafter {drafter} needs a draft model", "-md DRAFT, or --drafter lookup")


def test_a_bench_of_nobody(cli: Cli, target: Path) -> None:
    refused(cli("bench", "--drafter", "none", "--json"), 2, "--drafter none", "--drafter lookup")
    refused(cli("bench", "-m", target, "--drafter", "draft", "--json"), 2, "-md DRAFT", "--drafter lookup")


def test_a_corpus_that_is_no_text(cli: Cli, target: Path, tmp_path: Path) -> None:
    """It is read before the models are."""
    missing, binary = tmp_path / "corpus.txt", tmp_path / "corpus.bin"
    binary.write_bytes(b"\xff\xfe")
    for command in ("run", "bench"):
        lookup = (command, "demo", *PROMPT, "--json", "--lookup-corpus")
        refused(cli(*lookup, missing), 2, f"{missing} cannot be read: No such file", "did you mean 'corpus.bin'?")
        refused(cli(*lookup, tmp_path), 2, f"{tmp_path} cannot be read: Is a directory")
        refused(cli(*lookup, binary), 2, f"{binary} is not UTF-8 text", "convert it to UTF-8")


def test_a_corpus_without_a_lookup(cli: Cli, target: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def f(x): return x")
    flags = (*PROMPT, "--lookup-corpus", corpus, "--json")
    refused(cli("run", *flags, "--drafter", "draft"), 2, "--lookup-corpus needs --drafter lookup", "--drafter both")
    refused(cli("run", *flags, "--no-draft"), 2, "--lookup-corpus needs --drafter lookup")
    refused(cli("run", "-m", target, *flags), 2, "--lookup-corpus needs --drafter lookup", "--drafter lookup")


# grammars


def test_two_grammars(cli: Cli, tmp_path: Path) -> None:
    grammars = ("--grammar", 'root ::= "a"'), ("--grammar-file", tmp_path / "a.gbnf"), ("-j", "{}"), ("-jf", tmp_path)
    for one, other in itertools.pairwise(grammars):
        refused(cli("run", *PROMPT, *one, *other, "--json"), 2, "more than one grammar", "--grammar, --grammar-file")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--grammar", 'root ::= "a'), ("unexpected end of input", "grammars/README.md")),
        (("--grammar", ""), ("no rule named root",)),
        (("--grammar", "root ::= other"), ("'other'",)),
        (("--grammar-file", "none.gbnf"), ("none.gbnf cannot be read", "ls ")),
        (("-j", "{"), ("the schema is not JSON",)),
        (("-j", "[]"), ("not a JSON object",)),
        (("-j", '{"type": "numbr"}'), ("cannot be converted to a grammar", "numbr")),
        (("-jf", "none.json"), ("none.json cannot be read", "ls ")),
    ],
)
def test_what_is_no_grammar(cli: Cli, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(cli("run", *PROMPT, *flags, "--json"), 2, *words)


GREEDY = {
    "maxLength": {"type": "string", "maxLength": 10**9},
    "minLength": {"type": "string", "minLength": 10**9},
    "minItems": {"type": "array", "items": {}, "minItems": 10**9},
    "maxItems": {"type": "array", "items": {}, "maxItems": 1e18},
    "in a list": {"anyOf": [{"type": "object", "properties": {"a": {"type": "string", "maxLength": 2001}}}]},
    "quantifier": {"type": "string", "pattern": "^a{1000000000}$"},
    "quantifier of two": {"type": "string", "pattern": "^(ab){ 1, 99999999999999999999 }$"},
    "many": {
        "properties": {f"a{i}": {"type": "array", "items": {"type": "null"}, "minItems": 2000} for i in range(9000)}
    },
    "deep": json.loads('{"items":' * 100 + "{}" + "}" * 100),
    "digits": "[" + "1" * 5000 + "]",
    "large": {"enum": ["a" * 200_000]},
}


@pytest.mark.parametrize("what", GREEDY)
def test_a_schema_that_would_take_gigabytes(what: str) -> None:
    """Refused in a child of bounded time and memory."""
    schema = GREEDY[what]
    tracemalloc.start()
    try:
        with pytest.raises((UsageError, ChildError), match=r"the schema") as refused:
            check_schema(schema if isinstance(schema, str) else json.dumps(schema))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.hint


@pytest.mark.parametrize("text", ['root ::= "a"' + "|" * (1 << 20), "root ::= a{1000000}"])
def test_a_grammar_that_would_take_gigabytes(text: str) -> None:
    with pytest.raises(UsageError, match="the grammar"):
        check_grammar(text)


@pytest.mark.parametrize(
    "command", [("run", "-f"), ("run", "-jf"), ("run", "--grammar-file"), ("run", "--lookup-corpus")]
)
def test_a_text_without_end(cli: Cli, command: tuple[str, str]) -> None:
    """A device is read up to the bound; of the corpus the child would read more than the first bytes."""
    done = cli(*command, "/dev/zero", *(PROMPT if command[1] != "-f" else ()), "--json")
    assert done.code in (1, 2)
    refused(done, done.code, "/dev/zero has more than 16 MiB")


def test_standard_input_without_end(cli: Cli) -> None:
    with Path("/dev/zero").open("rb") as zeros:
        refused(cli("run", "-p", "-", "--json", stdin=zeros.read(17 << 20)), 2, "more text than any context holds")
        done = cli("chat", "demo", "--json", stdin=zeros.read(17 << 20))
    assert (done.code, "line 1 of standard input has more text" in done.stderr) == (2, True)


@pytest.mark.parametrize("blocks", ["0", "1000000000", "99999999999999999999"])
def test_experts_of_more_blocks_than_there_are(cli: Cli, blocks: str) -> None:
    """More is all, as with -ngl; the memory for a billion of them was 17 GB."""
    done = cli("run", "--n-cpu-moe", blocks, *PROMPT, "-n", "2", "--json")
    assert done.code == 0, done.stderr
    _, alive = params.model_params(load_library(), Placement(n_cpu_moe=int(blocks)))
    assert sum(map(len, alive)) <= 513


def test_a_context_takes_no_more_than_the_memory_that_is_free(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "obtainable_memory_bytes", lambda: 64 << 20)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with model.Model(target) as one, pytest.raises(ModelError, match="no context of 16777216 tokens") as refused:
        model.Context(one, ContextOptions(1 << 24, 2, 1))
    assert "lower -c" in refused.value.hint
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_quantised_value_cache_without_flash_attention(cli: Cli) -> None:
    for command in ("run -p x", "export", "plan"):
        for flag in ("-ctv", "-ctvd"):
            done = cli(*command.split(), flag, "q8_0", "-fa", "off", "--json")
            refused(done, 2, f"{flag} q8_0 needs flash attention", f"-fa on, or {flag} f16")


def test_unknown_command(cli: Cli) -> None:
    refused(cli("bnech", "--json"), 2, "there is no command 'bnech'", "did you mean 'bench'?")
    refused(cli("xyzzy", "--json"), 2, "'xyzzy'", "ggufspec --help")


# prompts


def test_no_prompt(cli: Cli) -> None:
    refused(cli("run", "--json"), 2, "there is no prompt", "-p -")
    refused(cli("run", "-p", "", "--json"), 2, "there is no prompt")
    refused(cli("run", "-p", "-", "--json"), 2, "there is no prompt")


def test_prompts_that_are_no_text(cli: Cli, tmp_path: Path) -> None:
    refused(cli("run", "-p", "-", "--json", stdin=b"\xff"), 2, "standard input is not UTF-8")
    refused(cli("run", "-f", tmp_path / "none.txt", "--json"), 2, "none.txt cannot be read", f"ls {tmp_path}")


def test_a_prompt_longer_than_the_context(cli: Cli) -> None:
    done = cli("run", "-p", "-", "-c", "64", "-n", "100", "--json", stdin="x = 1\n" * 200)
    tokens = int(done.document()["error"].split("the prompt has ")[1].split(" ")[0].replace(",", ""))
    assert tokens > 64
    refused(done, 1, "the context holds 64")
    room = int(done.document()["hint"].split()[1])
    assert tokens + 100 <= room < tokens + 100 + 256


# exports


@pytest.mark.parametrize("option", ["--export-json", "--export-markdown", "--export-csv"])
def test_exports_are_tried_before_the_run(cli: Cli, tmp_path: Path, option: str) -> None:
    """A million repetitions would not end: the refusal comes first."""
    unwritable = tmp_path / "missing" / "result"
    done = cli("bench", *PROMPT, "-r", "1000000", option, unwritable, "--json")
    refused(done, 1, f"{unwritable} cannot be written: No such file or directory")
