"""What each row of the table of hostile inputs took (``tests/support/hostile.py``), two at a time.

.venv/bin/python tests/evidence/hostile_inputs.py
.venv/bin/python tests/evidence/hostile_inputs.py "hub: "        (rows whose names begin so; nothing is saved)
.venv/bin/python tests/evidence/hostile_inputs.py --edits 100     (random edits of a model's keys × 8 commands)
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import save

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import hostile

_AT_ONCE = 2


def cost_of(row: hostile.Row) -> hostile.Cost:
    """Try a row in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "root"
        root.mkdir()
        return hostile.attack(row, root)


def main() -> None:
    """Try every row, print and save."""
    load = os.getloadavg()
    begins = sys.argv[1] if len(sys.argv) > 1 else ""
    is_edits = begins == "--edits"
    edits = hostile.edit_rows(*map(int, sys.argv[2:])) if is_edits else ()
    rows = list(edits) if is_edits else [row for row in hostile.rows() if row.name.startswith(begins)]
    found = []
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for row, cost in zip(rows, threads.map(cost_of, rows), strict=True):
            print(f"{cost.code:>4} {cost.seconds:5.1f} s {cost.parent_bytes / 1e6:6.0f} MB  {row.name}")
            for line in cost.output.splitlines() if is_edits else ():
                if line.startswith("error: "):
                    print(f"      {line}")
            for wrong in cost.wrong:
                print(f"      {wrong}")
            facts = {"name": row.name, "command": row.command[:200], "code": cost.code}
            figures = {"seconds": round(cost.seconds, 2), "parent_bytes": cost.parent_bytes}
            bounds = {"most_seconds": row.seconds, "most_parent_bytes": row.parent_bytes}
            found.append(facts | figures | bounds)
    if not begins:
        save("hostile", {"at_once": _AT_ONCE, "load_before_and_after": [load, os.getloadavg()], "rows": found})


if __name__ == "__main__":
    main()
