"""What the evidence scripts share: the grown pair, the machine's description, the JSON file."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ggufspec.bench.versus import machine
from ggufspec.pairs.profile import demo_pair

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models"
EVIDENCE = ROOT / "docs" / "evidence"


def grown(source: Path, name: str, *arguments: str) -> Path:
    """``source`` grown by scripts/grow_pair.py into .cache/models; made again when the source is newer."""
    path = MODELS / f"{name}.gguf"
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        MODELS.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, ROOT / "scripts" / "grow_pair.py", source, path, *arguments], check=True)
    return path


def grown_targets(kinds: tuple[str, ...]) -> dict[str, Path]:
    """The demo target grown to about a billion parameters, by quantisation."""
    target, _ = demo_pair()
    return {kind: grown(target, f"demo-1b-{kind}", "--shape", "1b", "--type", kind) for kind in kinds}


def grown_draft() -> Path:
    """The demo draft grown to about fifty million parameters."""
    _, draft = demo_pair()
    return grown(draft, "demo-draft-50m-F16", "--shape", "50m", "--type", "F16")


def save(name: str, body: dict[str, Any]) -> Path:
    """Write docs/evidence/NAME.json with date, machine and command."""
    command = " ".join(["python", *sys.argv])
    document = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "command": command, "machine": machine(), **body}
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    path = EVIDENCE / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
