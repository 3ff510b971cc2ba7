"""A public model, SmolLM2-135M-Instruct, through the commands: another tokenizer, a real chat template, real answers.

It has no draft, so that the lookup drafts. ``scripts/real-models`` fetches it, 98 MB, once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.endpoints import serving
from tests.support.processes import Cli, Finished

pytestmark = pytest.mark.full

REPEATING = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n" * 4 + "The quick brown"


def document(done: Finished) -> dict[str, Any]:
    assert done.code == 0, done.stderr
    return done.document()


def test_run_knows_something_and_drafting_changes_nothing(cli: Cli, smollm2: Path) -> None:
    asked = ("run", "-m", smollm2, "-p", "Name the capital of France.", "-n", "24", "--strict", "--json")
    alone, drafted = document(cli(*asked, "--no-draft")), document(cli(*asked, "--drafter", "lookup"))
    assert "Paris" in alone["text"]
    assert drafted["tokens"] == alone["tokens"]


def test_chat_goes_on_and_reads_only_what_is_new(cli: Cli, smollm2: Path) -> None:
    question = "Which city did you just name?\n"

    def chat(lines: str) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = document(cli("chat", "-m", smollm2, "-n", "16", "--json", stdin=lines))["turns"]
        return turns

    first, second = chat(f"What is the capital of France?\n{question}")
    assert second["answer"] != chat(question)[0]["answer"]  # it knows what was said
    figures = second["figures"]
    assert 0 < figures["prompt_read"] <= figures["prompt_tokens"] - first["figures"]["prompt_tokens"]


def test_serve_uses_its_template_and_drafts_what_repeats(smollm2: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 4}
    text = {"prompt": REPEATING, "max_tokens": 24, "temperature": 0}
    fixed = ("-t", "1", "--drafter", "lookup", "--draft-policy", "fixed", "--draft-max", "4")  # whatever batches take
    with serving(tmp_path, *fixed, pair=("-m", smollm2)) as endpoint, endpoint.client() as client:
        asked = client.post("/v1/chat/completions", json=chat).json()
        once, again = (client.post("/v1/completions", json=text).json() for _ in range(2))
    assert asked["usage"]["prompt_tokens"] == 37  # with the template's own system prompt
    for one in (once, again):  # behind it the two may part: batches of other sizes round otherwise
        assert one["choices"][0]["text"].startswith(" fox jumps over the lazy dog, and the dog")
        assert one["usage"]["speculation"]["accepted"] > 8
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_bench_judges_the_lookup(cli: Cli, smollm2: Path) -> None:
    small = ("-p", REPEATING, "-n", "16", "-r", "2")
    found = document(cli("bench", "-m", smollm2, "--drafter", "lookup", *small, "--json"))
    alone, drafted = (found["runs"][name] for name in ("target_only", "speculative"))
    assert alone["tokens"] == drafted["tokens"] > 0
    assert 0 <= drafted["accepted"] <= drafted["drafted"]
    assert len(alone["tokens_per_s"]["samples"]) == len(drafted["tokens_per_s"]["samples"]) > 0
    low, high = found["speedup"]["ci95"]
    assert low <= found["speedup"]["median"] <= high


def test_verify_certifies_the_lookup(cli: Cli, smollm2: Path) -> None:
    found = document(cli("verify", "-m", smollm2, "--drafter", "lookup", "--quick", "--no-hash", "--json"))
    assert found["passed"]
    assert {check["rule"] for check in found["checks"]} >= {"greedy"}
    assert sum(check["drafted"] for check in found["checks"]) > 0, json.dumps(found["checks"])
