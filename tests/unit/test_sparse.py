"""Files that are mostly holes: what is written is there, nothing is left of what is not finished."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ggufspec.errors import GgufspecError, StopError
from ggufspec.models import sparse


def empty(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_pieces_are_where_they_belong_and_the_rest_is_holes(tmp_path: Path) -> None:
    path, events = empty(tmp_path / "f", 64 << 20), []
    pieces = [(5, b"abc"), (1 << 20, memoryview(b"x" * 5000)), ((64 << 20) - 1, b"z")]
    disk = sparse.fill(path, "name", pieces, events.append, threading.Event())
    data = path.read_bytes()
    assert len(data) == 64 << 20
    assert (data[5:8], data[1 << 20 : (1 << 20) + 5000], data[-1:]) == (b"abc", b"x" * 5000, b"z")
    assert len(data) - data.count(0) == 3 + 5000 + 1
    assert disk == path.stat().st_blocks * 512 < 1 << 20
    assert events[0] == {"event": "writing", "file": "name", "bytes": 8, "of": 64 << 20}


@pytest.mark.parametrize("count", [1, 3, 4, 1000, (16 << 20) + 7, 40 << 20])
def test_a_pattern_is_repeated_to_the_byte(count: int) -> None:
    pieces = list(sparse.repeated_bytes(100, b"abcd", count))
    assert [place for place, _ in pieces] == [100 + sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))]
    whole = b"".join(bytes(piece) for _, piece in pieces)
    assert whole == (b"abcd" * (count // 4 + 1))[:count]


def test_a_stop_leaves_nothing(tmp_path: Path) -> None:
    stopping = threading.Event()

    def pieces():
        yield 0, b"first"
        stopping.set()
        yield 5, b"second"

    with pytest.raises(StopError, match="big"), sparse.appearing(tmp_path / "big") as part:
        sparse.fill(empty(part, 100), "big", pieces(), lambda event: None, stopping)
    assert not list(tmp_path.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    with sparse.appearing(tmp_path / "big") as part:
        part.write_bytes(b"x")
        assert list(tmp_path.iterdir()) == [part.parent]
    assert [path.name for path in tmp_path.iterdir()] == ["big"]
    with pytest.raises(GgufspecError, match="cannot be written: No space"):
        fail(tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == b"x"
    assert len(list(tmp_path.iterdir())) == 1


def fail(path: Path) -> None:
    with sparse.appearing(path) as part:
        part.write_bytes(b"y")
        raise OSError(28, "No space left on device")


def test_room_is_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sparse, "free_disk_bytes", lambda path: 10 << 30)
    sparse.check_room(tmp_path, 9 << 30, "m")
    with pytest.raises(GgufspecError, match=r"m need 10.8 GB of disk, but .* has 10.7 GB"):
        sparse.check_room(tmp_path, 10 << 30, "m")
