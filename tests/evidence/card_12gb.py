"""What ``ggufspec plan llama3.1-8b`` says for a card of 12 GB, next to what a user measured on that card.

The files have the published shapes and no weights, which a plan does not read. The profile is the bundled one, with
these files instead of the hub's; its acceptance is that of the user's run.

.venv/bin/python tests/evidence/card_12gb.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tomlkit
from common import ROOT, save
from honest_rival import plan
from published_models import typed, write

PROFILE, CARD = "llama3.1-8b", "RTX 3060 12GB"
MODELS = {"target": "llama3-8b", "draft": "llama3.2-1b"}
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
        profile: dict[str, Any] = tomlkit.parse((ROOT / "profiles" / f"{PROFILE}.toml").read_text(encoding="utf-8"))
        for role, model in MODELS.items():
            file = write(folder / profile[role]["file"], typed(model, "Q8_0", folder), tokenizer=True)
            profile[role] = {"file": str(file)}
        own = folder / "ggufspec" / "profiles" / f"{PROFILE}.toml"
        own.parent.mkdir(parents=True)
        own.write_text(tomlkit.dumps(profile), encoding="utf-8")
        document = plan(folder, PROFILE, "--gpu", CARD, "--no-calibrate")
        document["pair"] |= {role: Path(document["pair"][role]).name for role in MODELS}
    print(document["why"])
    save("card-12gb", {"card": CARD, "published": PUBLISHED, "plan": document})


if __name__ == "__main__":
    main()
