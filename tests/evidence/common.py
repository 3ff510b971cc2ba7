"""What the evidence scripts share: the expanded pairs, the machine's description, the JSON file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ggufspec.bench.summary import machine_and_build
from ggufspec.models.profile import demo_pair

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models"
EVIDENCE = ROOT / "docs" / "evidence"
DEMO = ROOT / "profiles" / "demo"


def expanded(source: Path, name: str, *arguments: str) -> Path:
    """``source`` expanded by scripts/grow_pair.py into .cache/models; made again when the source is newer."""
    path = MODELS / f"{name}.gguf"
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        MODELS.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, ROOT / "scripts" / "grow_pair.py", source, path, *arguments], check=True)
    return path


def grown_targets(kinds: tuple[str, ...]) -> dict[str, Path]:
    """The demo target expanded to about a billion parameters, by quantisation."""
    target, _ = demo_pair()
    return {kind: expanded(target, f"demo-1b-{kind}", "--shape", "1b", "--type", kind) for kind in kinds}


def grown_draft(shape: str = "50m") -> Path:
    """The demo draft expanded to about fifty million parameters, or to another shape of scripts/grow_pair.py."""
    _, draft = demo_pair()
    return expanded(draft, f"demo-draft-{shape}-F16", "--shape", shape, "--type", "F16")


def demo_target(kind: str) -> Path:
    """The demo target in its own size, quantised."""
    target, _ = demo_pair()
    return target if kind == "F16" else expanded(target, f"demo-target-{kind}", "--type", kind)


def demo_mimo2() -> Path:
    """The demo target as ``mimo2`` with the MTP block that ships."""
    from lab.mimo2 import read_blocks, write_mimo2

    target, block = demo_pair()[0], DEMO / "mtp-demo-Q8_0.gguf"
    path = MODELS / "demo-mimo2-F16.gguf"
    if not path.exists() or path.stat().st_mtime < max(target.stat().st_mtime, block.stat().st_mtime):
        MODELS.mkdir(parents=True, exist_ok=True)
        write_mimo2(target, part := path.with_suffix(".part"), read_blocks(block))
        part.rename(path)
    return path


def random_draft() -> Path:
    """A draft of fifty million random weights and the demo pair's vocabulary: it knows nothing and is sure of it.

    The output norm's weight of 10 makes the likeliest token's probability as high as a trained model's.
    """
    like = grown_draft()
    path = MODELS / "random-draft-50m-F16.gguf"
    if path.exists() and path.stat().st_mtime >= like.stat().st_mtime:
        return path
    import gguf
    import numpy as np

    part = path.with_suffix(".part")
    shutil.copyfile(like, part)
    rng = np.random.default_rng(0)
    reader = gguf.GGUFReader(part, "r+")
    for tensor in reader.tensors:
        if tensor.data.ndim == 1:
            tensor.data[:] = 10 if tensor.name == "output_norm.weight" else 1
        else:
            std = 0.02 if tensor.name == "token_embd.weight" else tensor.data.shape[1] ** -0.5
            tensor.data[:] = std * rng.standard_normal(tensor.data.shape, np.float32)
    reader.data.flush()
    return part.rename(path)


def save(name: str, body: dict[str, Any], folder: Path = EVIDENCE) -> Path:
    """Write docs/evidence/NAME.json with date, machine, build and command; into another folder for a trial."""
    command = " ".join(["python", *sys.argv])
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    document = {"date": date, "command": command, "machine": machine_and_build(), **body}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    return part.replace(path)
