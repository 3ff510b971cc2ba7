"""What ``ggufspec run`` sends to a model, against llama-server: tokens of the prompt, and the greedy answer.

    scripts/real-models && scripts/real-models qwen-coder Q4_K_M && scripts/peers llama-server
    .venv/bin/python tests/evidence/run_prompts.py           # five minutes

Two parts. ``answers``: three real models answer the same messages, with and without a system prompt. ``templates``: the
small bundled model gets twelve of the chat templates that llama.cpp's source has; llama-server's own text and
tokenization are compared with the prompt that a run makes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx2
from common import ROOT, save
from real_pair import MODELS
from servers import ask, theirs

from ggufspec import chat_prompt, demo_pair
from ggufspec.errors import GgufspecError
from ggufspec.llamacpp.model import Model

sys.path.insert(0, str(ROOT))
from tests.support.gguf_files import rewritten

FILES = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
)
MESSAGES = (
    ("", "Write a haiku about VRAM."),
    ("", "What is the capital of France?"),
    ("", "Write a Python function that returns the head of a list."),
    ("You are a pirate.", "Who are you?"),
)
TEMPLATES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "google-gemma-2-2b-it",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "microsoft-Phi-3.5-mini-instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "openai-gpt-oss-120b",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "ibm-granite-granite-3.3-2B-Instruct",
)
COMMON = ("-t", "2", "-np", "1", "-c", "1024", "--cache-ram", "0")
TOKENS = 48


def run_of(model: Path, system: str, message: str) -> dict[str, Any]:
    """The document of ``ggufspec run``."""
    command = [sys.executable, "-m", "ggufspec", "run", "-m", str(model), "-p", message, "--temp", "0", "-c", "1024"]
    command += ["-n", str(TOKENS), "--json", "-q", *(("--system", system) if system else ())]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def conversation(system: str, message: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": message}]


def answers(client: httpx2.Client, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name in FILES:
        with theirs(name, "-m", MODELS / name, *COMMON, log=folder / "log") as server:
            for system, message in MESSAGES:
                body = {"messages": conversation(system, message), "max_tokens": TOKENS}
                peer = ask(client, server, "chat/completions", body)
                own = run_of(MODELS / name, system, message)
                rows.append(
                    {
                        "model": name,
                        "system": system,
                        "message": message,
                        "prompt_tokens": own["statistics"]["prompt_tokens"],
                        "llama_server_prompt_tokens": peer.prompt_tokens,
                        "text": own["text"],
                        "same_text": own["text"] == peer.text,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def templates(client: httpx2.Client, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run([ROOT / "scripts" / "peers", "--source"], capture_output=True, text=True, check=True)
    source = Path(done.stdout.strip()) / "models" / "templates"
    rows = []
    for name in TEMPLATES:
        path = rewritten(demo_pair()[0], folder / f"{name}.gguf", template=(source / f"{name}.jinja").read_text())
        with theirs(name, "-m", path, *COMMON, log=folder / "log") as server, Model(path, vocab_only=True) as model:
            for system, message in MESSAGES[-2:]:
                row: dict[str, Any] = {"template": name, "system": system}
                asked = client.post(
                    f"{server.base}/apply-template", json={"messages": conversation(system, message)}
                ).json()
                if "prompt" in asked:
                    body = {"content": asked["prompt"], "add_special": True, "parse_special": True}
                    row["llama_server"] = client.post(f"{server.base}/tokenize", json=body).json()["tokens"]
                try:
                    row["same"] = chat_prompt(model, message, system=system) == row.get("llama_server")
                except GgufspecError as error:
                    row["same"], row["error"] = "llama_server" not in row, error.message
                row["tokens"] = len(row.pop("llama_server", ()))
                rows.append(row)
                print(row, flush=True)
        path.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, httpx2.Client(timeout=600) as client:
        made, real = templates(client, Path(name)), answers(client, Path(name))
    summary = {
        "templates_same": [sum(row["same"] for row in made), len(made)],
        "prompts_same": [sum(row["prompt_tokens"] == row["llama_server_prompt_tokens"] for row in real), len(real)],
        "answers_same": [sum(row["same_text"] for row in real), len(real)],
    }
    print(json.dumps(summary, indent=1))
    if not arguments.no_save:
        save("run-prompts", {"summary": summary, "templates": made, "answers": real})


if __name__ == "__main__":
    main()
