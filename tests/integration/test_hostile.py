"""Nothing hostile gets in, nothing runs away, nothing misleads: every row of the table, as a user would run it."""

from __future__ import annotations

from pathlib import Path

import hostile
import pytest


def marked(row: hostile.Row) -> object:
    waits = [pytest.mark.xfail(strict=True, reason=row.waits_for)] if row.waits_for else []
    return pytest.param(row, id=row.name, marks=waits)


@pytest.mark.full
@pytest.mark.parametrize("row", [marked(row) for row in hostile.rows()])
def test_a_hostile_input(tmp_path: Path, row: hostile.Row) -> None:
    root = tmp_path / "root"
    root.mkdir()
    cost = hostile.attack(row, root)
    assert not cost.wrong, cost.output[-3000:]
