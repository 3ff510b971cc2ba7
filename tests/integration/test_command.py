"""The promise as a user types it: one seed, one text, with and without a draft."""

from __future__ import annotations

import pytest

PROMPT = "import os\n\n\ndef read_lines(path):\n    "
WAYS = (("--no-draft",), ("--draft-max", "1"), ("--draft-max", "4"), ("--draft-max", "8"))


@pytest.mark.parametrize("sampling", [("--temp", "0.8", "-s", "7"), ()], ids=["temperature 0.8", "greedy"])
def test_run_in_strict_mode_gives_the_same_token_ids(cli, sampling):
    texts = set()
    for way in WAYS:
        done = cli("run", "demo", "-p", PROMPT, "-n", "48", "--strict", "--json", *sampling, *way)
        assert done.code == 0, done.stderr
        document = done.document()
        assert document["schema"] == "ggufspec/run@1"
        assert len(document["tokens"]) == 48
        assert ("acceptance_rate" in document["statistics"]) == (way != ("--no-draft",))
        texts.add(tuple(document["tokens"]))
    assert len(texts) == 1
