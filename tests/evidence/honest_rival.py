"""What ``ggufspec plan`` predicts for Llama-3-70B Q3_K_S with its 8B draft on a 24 GB card that is not here.

The files have the published shapes and no weights, which a plan does not read. Beside the predictions: what a notebook
measured with the real files. scripts/pictures.py draws both.

.venv/bin/python tests/evidence/honest_rival.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import save

from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH
from tests.support import shapes

TARGET, DRAFT = "Meta-Llama-3-70B-Instruct-Q3_K_S.gguf", "Meta-Llama-3-8B-Instruct.Q3_K_L.gguf"
CARD, ACCEPTANCE = "RTX 4090", 0.84
CPU, RAM_GB_PER_S = "5xavx2", 51.2  # not told; these explain the time of a token and that of a batch of four
PUBLISHED = {
    "source": "a published notebook: the same two files, 45 of 80 layers on a 24 GB card, draft length 3",
    "gpu_layers": 45,
    "draft_max": 3,
    "acceptance_rate": 0.71,
    "target_only_tokens_per_s": 2.01,
    "speculative_tokens_per_s": 2.58,
}


def plan(folder: Path, *arguments: object) -> Any:
    """Return the document that ``ggufspec plan`` prints in a folder, which has its cache and its profiles, too."""
    program = Path(sys.executable).with_name("ggufspec").absolute()
    command = [program, "plan", *map(str, arguments), "--json"]
    folders = {"XDG_CACHE_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}  # this machine's speed is not to be known
    environment = os.environ | folders
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return json.loads(done.stdout)


def main() -> None:
    """Plan, print, save."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, shape in ((TARGET, "llama3-70b-q3_k_s"), (DRAFT, "llama3-8b-q3_k_l")):
            shapes.write(folder / file, shapes.SHAPES[shape], tokenizer=True)
        published = ("-ngl", PUBLISHED["gpu_layers"], "-ngld", "all", "--draft-max", PUBLISHED["draft_max"])
        as_usual = ("--op-offload-min-batch", OP_OFFLOAD_MIN_BATCH, "-lm", "mmap")  # llama.cpp's own
        machine = ("--gpu", CARD, "--cpu", CPU, "--ram-bandwidth", RAM_GB_PER_S, "--no-calibrate")
        options = ("-m", TARGET, "-md", DRAFT, "-c", 2048, *machine, "--acceptance", ACCEPTANCE)
        plans = {
            "fastest": plan(folder, *options),
            "fastest as usual": plan(folder, *options, *as_usual),
            "as published": plan(folder, *options, *published, *as_usual),
        }
    for what, document in plans.items():
        print(f"{what}: {document['predicted']}")
    save("honest-rival", {"card": CARD, "published": PUBLISHED, "plans": plans})


if __name__ == "__main__":
    main()
