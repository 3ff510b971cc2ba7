"""Measurements that survive a crash at any byte."""

import json
import subprocess
import sys

import pytest

from ggufspec.bench.run_log import RunLog, key_of, set_aside
from ggufspec.errors import GgufspecError

SCHEMA = "ggufspec/test-log@1"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "folder" / "trials.jsonl"


def kept(path, schema=SCHEMA):
    with RunLog(path, schema) as run_log:
        return dict(run_log._values), run_log.notes


def test_what_was_put_is_there_again(path):
    with RunLog(path, SCHEMA) as run_log:
        run_log.put("one", {"speed": [1.5, 2.0]})
        run_log.put("two", None)
        run_log.put("one", "later")
        assert (run_log.get("one", object), run_log.get("two", object), run_log.get("three", object)) == (
            "later",
            None,
            None,
        )
    assert kept(path) == ({"one": "later", "two": None}, ())


def test_a_file_cut_anywhere_loses_its_last_line_at_most(path):
    with RunLog(path, SCHEMA) as run_log:
        for number in range(3):
            run_log.put(f"key {number}", f"välue {number}")
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found, notes = kept(path)
        assert notes == ()
        assert len(found) == max(sum(end <= length for end in ends) - 1, 0)
        with RunLog(path, SCHEMA) as run_log:
            run_log.put("after", 1)
        assert kept(path)[0] == {**found, "after": 1}


@pytest.mark.parametrize(
    "content",
    [
        '{"schema": "ggufspec/test-log@2"}\n{"key": "a", "value": 1}\n',
        "[1, 2]\n",
        "no JSON at all\n",
        '{"schema": "ggufspec/test-log@1"}\n{"value": 1}\n',
        '{"schema": "ggufspec/test-log@1"}\n{"key": ["a"], "value": 1}\n',
        '{"schema": "ggufspec/test-log@1"}\n{"key": "a", "value": NaN}\n',
        '{"schema": "ggufspec/test-log@1"}\n' + '{"key":' * 100_000 + "\n",
        '{"schema": "ggufspec/test-log@1"}\n{"key": "a", "value": ' + "9" * 5000 + "}\n",
        '{"schema": "ggufspec/test-log@1", "schema": "b"}\n',
        "\0\n",
    ],
    ids=range(10),
)
def test_another_schema_is_put_aside_whole(path, content):
    path.parent.mkdir(parents=True)
    path.write_text(content)
    found, notes = kept(path)
    assert found == {}
    assert path.with_name("trials.jsonl.old").read_text() == content
    assert "trials.jsonl.old" in notes[0]
    assert kept(path) == ({}, ())


def test_a_process_that_is_killed_has_put_what_it_put(path):
    """SIGKILL right after a put; no close, no flush of its own."""
    program = (
        "import os, signal, sys; from pathlib import Path; from ggufspec.bench.run_log import RunLog\n"
        f"run_log = RunLog(Path(sys.argv[1]), {SCHEMA!r})\n"
        "run_log.put('a', 1); run_log.put('b', 2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)])
    assert done.returncode == -9
    assert kept(path)[0] == {"a": 1, "b": 2}


def test_one_process_at_a_time(path):
    """The second is refused and moves nothing; whoever is killed leaves no lock."""
    with RunLog(path, SCHEMA) as run_log:
        run_log.put("a", 1)
        for fresh in (False, True):
            with pytest.raises(GgufspecError, match="another process is running the same measurements") as error:
                RunLog(path, SCHEMA, fresh=fresh)
            assert "--results" in error.value.hint
    assert kept(path)[0] == {"a": 1}
    with RunLog(path, SCHEMA, fresh=True) as run_log:
        assert run_log.get("a", object) is None
    assert path.with_name("trials.jsonl.old").exists()


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(GgufspecError, match="results cannot be saved") as error:
        RunLog(tmp_path / "file" / "trials.jsonl", SCHEMA)
    assert "--results" in error.value.hint


def test_a_disk_that_is_full_keeps_what_was_there(path):
    with RunLog(path, SCHEMA) as run_log:
        run_log.put("a", 1)
        run_log._file.close()
        run_log._file = open("/dev/full", "ab")  # noqa: PTH123, SIM115
        with pytest.raises(GgufspecError, match="No space left"):
            run_log.put("b", 2)
        run_log._file = path.open("ab")
    assert kept(path)[0] == {"a": 1}


def test_a_full_disk_is_told_once_in_our_words(path):
    """What could not be written is not tried again when the run_log is closed, which would hide why."""

    def fill():
        with RunLog(path, SCHEMA) as run_log:
            run_log._file.close()
            run_log._file = open("/dev/full", "ab")  # noqa: PTH123, SIM115
            run_log.put("a", 1)

    with pytest.raises(GgufspecError, match="No space left"):
        fill()
    assert kept(path) == ({}, ())


def test_what_is_put_aside_stays_whatever_comes_after(path):
    path.parent.mkdir(parents=True)
    places = []
    for content in ("first", "second", "third"):
        path.write_text(content)
        places.append(set_aside(path))
    assert [place.name for place in places] == ["trials.jsonl.old", "trials.jsonl.old.2", "trials.jsonl.old.3"]
    assert [place.read_text() for place in places] == ["first", "second", "third"]
    with pytest.raises(GgufspecError, match="cannot be renamed"):
        set_aside(path)


def test_keys_tell_facts_apart():
    facts = [("trial", "a", 1), ("trial", "a", 2), ("trial", "a", "1"), ("trial", ["a", 1]), ("trial",)]
    keys = [key_of(*one) for one in facts]
    assert len(set(keys)) == len(facts)
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_a_journal_is_json_lines(path):
    with RunLog(path, SCHEMA) as run_log:
        run_log.put("a", [1])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"schema": SCHEMA},
        {"key": "a", "value": [1]},
    ]
