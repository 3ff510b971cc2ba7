"""Nothing hostile gets in, nothing runs away, nothing misleads: every second row of the table, as a user would run it.

All of them, which take twice as long: tests/evidence/hostile_inputs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import hostile


@pytest.mark.full
@pytest.mark.parametrize("row", hostile.rows()[::2], ids=lambda row: row.name)
def test_a_hostile_input(tmp_path: Path, row: hostile.Row) -> None:
    root = tmp_path / "root"
    root.mkdir()
    cost = hostile.attack(row, root)
    assert not cost.wrong, cost.output[-3000:]
