"""Benches of record: what ``ggufspec bench`` shows of a real pair, and without a pair.

    scripts/real-models qwen-coder F16
    cd .cache/real-models && ggufspec bench -m qwen2.5-coder-1.5b-instruct-F16.gguf \\
        -md qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --export-json real.json
    scripts/bench --export-json 1.json                              # and 2.json, 3.json
    .venv/bin/python tests/evidence/first_result.py real.json 1.json 2.json 3.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import save


def read(name: str) -> dict[str, Any]:
    """A bench as it was exported, without the folders of its files."""
    document: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
    document["pair"] |= {role: Path(document["pair"][role]).name for role in ("target", "draft")}
    print(document["verdict"]["text"])
    return document


def main() -> int:
    """Print the verdicts, and save the documents."""
    real, *measured = map(read, sys.argv[1:])
    sys.argv[1:] = [Path(name).name for name in sys.argv[1:]]
    save("first-result", {"real": real, "measured": measured})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
