"""What ``ggufspec plan`` says of Llama 3.1 8B with a 1B draft on a card of 12 GB, next to what a user measured there.

The files have the published shapes and no weights, which a plan does not read. Context and acceptance are those of the
profile ``llama3.1-8b``; its acceptance is that of the user's run.

.venv/bin/python tests/evidence/card_12gb.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import save
from honest_rival import plan
from published_models import typed, write

FILES = {
    "llama3-8b": "Meta-Llama-3.1-8B-Instruct-Q8_0.gguf",
    "llama3.2-1b": "Llama-3.2-1B-Instruct-Q8_0.gguf",
}
CARD, CONTEXT, ACCEPTANCE = "RTX 3060 12GB", 8192, 0.89
PUBLISHED = {
    "source": "https://github.com/ggml-org/llama.cpp/issues/5877",
    "draft_max": 5,
    "drafted": 730,
    "accepted": 526,
    "target_only_tokens_per_s": 32.5,
    "speculative_tokens_per_s": 55.5,
}


def main() -> None:
    """Plan, print, save."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, file in FILES.items():
            write(folder / file, typed(model, "Q8_0", folder), tokenizer=True)
        machine = ("--gpu", CARD, "--no-calibrate", "-c", CONTEXT, "--acceptance", ACCEPTANCE)
        document = plan(folder, *FILES.values(), *machine)
    print(document["why"])
    save("card-12gb", {"card": CARD, "published": PUBLISHED, "plan": document})


if __name__ == "__main__":
    main()
