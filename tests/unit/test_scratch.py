"""Folders for a while: gone with their block, and those of a killed process at the next one."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ggufspec.files import cache
from ggufspec.files.write import scratch

HOLDS = """
import sys
from pathlib import Path
from ggufspec.files.write import scratch
with scratch(Path(sys.argv[1])) as folder:
    (folder / "large").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with scratch(tmp_path) as folder:
        (folder / "in" / "it").mkdir(parents=True)
    with pytest.raises(ZeroDivisionError), scratch(tmp_path):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that end with their process")
def test_what_a_killed_process_left_goes_and_what_another_one_uses_stays(tmp_path: Path) -> None:
    (mine := tmp_path / "ggufspec-scratch-of-somebody").mkdir()
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with scratch(tmp_path) as folder:
            assert (left / "large").exists()
        other.kill()
    assert (left / "large").exists()
    with scratch(tmp_path) as folder:
        assert {*tmp_path.iterdir()} == {folder, mine}


def test_threads_do_not_remove_each_others_new_folders(tmp_path: Path) -> None:
    def use(number: int) -> str:
        with scratch(tmp_path) as folder:
            (folder / "file").write_text(str(number))
            return (folder / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(200))) == [str(number) for number in range(200)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of files")
def test_a_disk_that_is_full_keeps_no_half_of_a_cache(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        cache.write_value(tmp_path / "batch-latency.json", {"long": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
