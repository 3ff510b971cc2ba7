"""Files of others: bounded before a parser sees them, whatever they are."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.reports.documents import parse_document
from tests.support import kept_results
from tests.support.processes import Cli

NO_JSON = {
    "not a number": ('{"a": NaN}', "NaN is not an allowed number"),
    "no end": ('{"a": -Infinity}', "-Infinity is not an allowed number"),
    "more than a double": ('{"a": 1e999}', "1e999 is not an allowed number"),
    "more than 64 bits": ('{"a": 123456789012345678901}', "21 digits"),
    "thousands of digits": ("9" * 50_000, "50,000 digits"),
    "torn": ('{"a": [1, 2', "not a complete JSON document"),
    "null character": ('{"a": "\0"}', "not a complete JSON document"),
    "empty": (" \n", "is empty"),
    "deep lists": ("[" * 65, "nested more than 64 deep"),
    "very deep": ('{"a":' * 1_000_000, "nested more than 64 deep"),
    "deep behind a string": (r'["\"]]]]\\", ' + "[" * 65, "nested more than 64 deep"),
}


@pytest.mark.parametrize("what", NO_JSON)
def test_json_that_is_none(what: str) -> None:
    text, words = NO_JSON[what]
    with pytest.raises(GgufspecError, match=words):
        untrusted.parse_json(text, "a.json")


def test_json_is_what_it_was() -> None:
    value = {"a": [1, -2.5, '[[\\"{', None, True, {"b": {}}], "": "\ufeff", "c": -(2**63), "d": 2**64 - 1}
    assert untrusted.parse_json(json.dumps(value), "a.json") == value
    deepest = "[" * 64 + "]" * 64
    assert json.dumps(untrusted.parse_json(deepest, "a.json")) == deepest


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf12345")
    assert untrusted.read_text(file, 8) == "12345"  # without the mark
    assert untrusted.read_bytes(file, 4, cut=True) == b"\xef\xbb\xbf1"
    with pytest.raises(UsageError, match="has more than 0 KiB") as refused:
        untrusted.read_bytes(file, 7, failure=UsageError)
    assert refused.value.hint == f"ls -l {file}"
    file.write_bytes(b"\xff\xfe1\0")
    with pytest.raises(GgufspecError, match=r"a\.txt is not UTF-8 text"):
        untrusted.read_text(file, 8)


@pytest.mark.parametrize("name", ["missing", ".", "loop", "x" * 5000, "a\0b", "socket"])
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    if name == "socket":
        os.mknod(tmp_path / "socket", 0o140600)
    with pytest.raises(GgufspecError, match="cannot be read: ") as refused:
        untrusted.read_json(tmp_path / name)
    assert refused.value.hint


def test_a_mistyped_file_gets_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "prediction.txt").write_text("x")
    with pytest.raises(GgufspecError) as refused:
        untrusted.read_text(tmp_path / "predicton.txt", 8)
    assert refused.value.hint == "did you mean 'prediction.txt'?"
    with pytest.raises(GgufspecError) as refused:
        untrusted.read_text(tmp_path / "none" / "x", 8)
    assert refused.value.hint == f"ls {tmp_path / 'none'}"


def test_a_device_without_end_is_too_large() -> None:
    with pytest.raises(GgufspecError, match="/dev/zero has more than 1 MiB"):
        untrusted.read_bytes(Path("/dev/zero"), 1 << 20)


def test_a_pipe_is_read_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"[1]",))
    writer.start()
    assert untrusted.read_json(pipe) == [1]
    writer.join()
    monkeypatch.setattr(untrusted, "PATIENCE_S", 0.01)
    with pytest.raises(GgufspecError, match="no data arrived within"):
        untrusted.read_json(pipe)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".".join("a" * 30_000) + " = 1", "more than 16 KiB"),
        ("a = " + "[" * 15_000, "nested too deeply"),
        ("a = " + "{a = " * 3_000, "nested too deeply"),
    ],
)
def test_a_profile_that_is_large_or_deep_is_refused(cli: Cli, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(text)
    done = cli("profiles", "show", str(file))
    assert (done.code, done.stdout) == (1, "")
    assert f"error: {file} " in done.stderr
    assert words in done.stderr
    assert "next: fix the file" in done.stderr


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("runs", "target_only", "gpu_layers"), -1),
        (("runs", "target_only", "tokens_per_s", "median"), -1.0),
        (("runs", "speculative", "acceptance_rate"), 1.5),
        (("runs", "speculative", "drafted"), -1),
    ],
)
def test_a_result_has_no_counts_below_zero(place: tuple[str | int, ...], value: float) -> None:
    body = kept_results.as_json(kept_results.bench())
    parse_document(body)
    part = body
    for key in place[:-1]:
        part = part[key]  # type: ignore[index]
    part[place[-1]] = value  # type: ignore[index]
    with pytest.raises(GgufspecError, match=str(place[-1])):
        parse_document(body)
