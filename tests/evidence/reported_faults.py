"""Faults that public reports of other programs describe, each as a small input to this one: a row says what happens.

    .venv/bin/python tests/evidence/reported_faults.py          # some minutes; prints a table
    .venv/bin/python tests/evidence/reported_faults.py D25 N3   # these rows

The demo pair, its file in parts, and copies with other keys; commands in their own processes, and ``serve`` over HTTP.
Exits with 1 if a row fails. Tests of each kind, with other inputs, are in tests/cli and tests/unit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ggufspec.models.profile import demo_pair
from tests.support.endpoints import CHATML, serving, template
from tests.support.gguf_files import rewritten, split

SHORT = ("-n", "8", "-c", "512", "--temp", "0")
BOM = "\ufeff"


class Inputs:
    """A folder with the files that the rows use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target, self.draft = demo_pair()

    def run(self, *arguments: str | Path, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        """A command of ggufspec in a home folder of its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GGUFSPEC_", "HF_"))}
        environment |= {"HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, "-m", "ggufspec", *map(str, arguments)]
        return subprocess.run(
            words, input=stdin, capture_output=True, check=False, cwd=self.folder, env=environment | more, timeout=600
        )

    def asked(self, path: str, body: dict[str, Any] | bytes, *serve: str, **more: Any) -> httpx2.Response:
        """One request to a server of the demo pair."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with serving(self.folder, "-c", "512", *serve) as server:
            return httpx2.post(server.base + path, content=data, timeout=120, **more)

    @cached_property
    def parts(self) -> tuple[list[Path], list[Path]]:
        (self.folder / "parts").mkdir()
        return split(self.target, self.folder / "parts", 3), split(self.draft, self.folder / "parts", 2)

    def changed(self, name: str, **how: Any) -> Path:
        path = self.folder / f"{name}.gguf"
        return path if path.exists() else rewritten(self.draft, path, **how)


def text_of(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def is_clean(done: subprocess.CompletedProcess[bytes]) -> bool:
    return done.returncode in (0, 1, 2) and "Traceback" not in text_of(done)


def parts(inputs: Inputs) -> bool:
    """The pair in parts gives what the whole one gives."""
    (first, *_), (draft, *_) = inputs.parts
    whole = inputs.run("run", "-m", inputs.target, "-md", inputs.draft, "-p", "def main(", *SHORT).stdout
    split_ = inputs.run("run", "-m", first, "-md", draft, "-p", "def main(", *SHORT).stdout
    return bool(whole) and whole == split_


def later_part(inputs: Inputs) -> bool:
    (_, second, _), _ = inputs.parts
    return inputs.run("run", "-m", second, "-p", "def main(", *SHORT).returncode == 0


def embedding(inputs: Inputs) -> bool:
    file = inputs.changed("embeds", add={"llama.attention.causal": False})
    found = [inputs.run(name, "-m", file, *_more(name)) for name in ("run", "bench", "plan", "verify")]
    return all(done.returncode in (1, 2) and "embedding model" in text_of(done) for done in found)


def _more(command: str) -> tuple[str, ...]:
    return {"run": ("-p", "x", *SHORT), "bench": ("--drafter", "lookup")}.get(command, ())


def version(number: int) -> Callable[[Inputs], bool]:
    def row(inputs: Inputs) -> bool:
        data = bytearray(inputs.draft.read_bytes()[:4096])
        data[4:8] = number.to_bytes(4, "little")
        (file := inputs.folder / f"version-{number}.gguf").write_bytes(bytes(data))
        said = text_of(inputs.run("plan", "-m", file))
        return "version" in said.casefold() and "download it again" not in said

    return row


def no_end(inputs: Inputs) -> bool:
    file = inputs.changed("endless", drop=("tokenizer.ggml.eos_token_id",))
    done = inputs.run("run", "-m", file, "-p", "def main(", *SHORT)
    return done.returncode == 0


def adds_eos(inputs: Inputs) -> bool:
    file = inputs.changed("adds-eos", add={"tokenizer.ggml.add_eos_token": True})
    plain = inputs.run("run", "-m", inputs.draft, "--raw", "-p", "def main(", *SHORT).stdout
    return inputs.run("run", "-m", file, "--raw", "-p", "def main(", *SHORT).stdout == plain


def adds_bos(inputs: Inputs) -> bool:
    file = inputs.changed("adds-bos", add={"tokenizer.ggml.add_bos_token": True})
    return inputs.run("run", "-m", inputs.target, "-md", file, "-p", "def main(", *SHORT).returncode == 0


def stop_in_a_block(inputs: Inputs) -> bool:
    body = {"prompt": "def main(", "max_tokens": 40, "temperature": 0, "stop": [":"]}
    usage = inputs.asked("/v1/completions", body, "--draft-policy", "fixed", "--draft-max", "8").json()["usage"]
    drafts = usage["speculation"]
    return drafts["accepted"] <= usage["completion_tokens"]


def dead_end(inputs: Inputs) -> bool:
    body = {"prompt": "x", "max_tokens": 20, "grammar": 'root ::= "def main"', "ignore_eos": True, "stop": ["main("]}
    return inputs.asked("/v1/completions", body, "--drafter", "none").status_code == 200


def key_with_a_blank(inputs: Inputs) -> bool:
    with serving(inputs.folder, "-c", "512", GGUFSPEC_API_KEY="correct horse") as server:
        codes = [
            httpx2.get(server.base + "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("horse", "correct", "correct horse")
        ]
    return codes == [401, 401, 200]


def reasoning(inputs: Inputs) -> bool:
    thinking = template(inputs.folder, CHATML + "{% if not enable_thinking %}<off>{% endif %}")
    off = []
    for flag, effort in (("on", "none"), ("off", "high")):
        body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": effort}
        reply = inputs.asked("/apply-template", body, "--reasoning", flag, "--chat-template", str(thinking))
        off.append(reply.json()["prompt"].endswith("<off>"))
    return off == [True, False]


def seed(inputs: Inputs) -> bool:
    texts = [
        inputs.asked("/v1/completions", {"prompt": "def", "max_tokens": 24, "temperature": 1, "seed": number})
        for number in (-2, -3, 2**63 - 1)
    ]
    return (
        all(one.status_code == 200 for one in texts) and len({one.json()["choices"][0]["text"] for one in texts}) == 3
    )


def marked_body(inputs: Inputs) -> bool:
    body = (BOM + json.dumps({"prompt": "def", "max_tokens": 2})).encode()
    return inputs.asked("/v1/completions", body).status_code == 200


def marked_input(inputs: Inputs) -> bool:
    counts = [
        json.loads(inputs.run("run", "demo", "-p", "-", *SHORT, "--json", stdin=text.encode()).stdout)["statistics"][
            "prompt_tokens"
        ]
        for text in ("def main(", BOM + "def main(")
    ]
    return counts[0] == counts[1]


def picture(inputs: Inputs) -> bool:
    messages = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(17)]
    messages.append(
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "y"}}]}
    )
    reply = inputs.asked("/v1/chat/completions", {"messages": messages})
    return reply.status_code == 400 and "messages[17].content[1]" in reply.text


def host_name(inputs: Inputs) -> bool:
    with serving(inputs.folder, "-c", "512", "--host", "127.0.1.1") as server:
        return httpx2.get(server.base + "/v1/models").status_code == 200


def no_home(inputs: Inputs) -> bool:
    found = [
        inputs.run(*words, HOME="/proc/nowhere", XDG_CACHE_HOME="")
        for words in (("plan", "demo"), ("profiles",), ("doctor",))
    ]
    return all(map(is_clean, found))


def logged_tokens(inputs: Inputs) -> bool:
    log = inputs.folder / "requests.jsonl"
    inputs.asked("/v1/completions", {"prompt": [100, 101, 102], "max_tokens": 2}, "--log-requests", str(log))
    done = inputs.run("bench", "demo", "--prompts", log, "-n", "8", "-r", "1", "--budget", "20s")
    return done.returncode == 0 or "left out" in text_of(done)


def strange_token(inputs: Inputs) -> bool:
    said = text_of(
        inputs.run(
            "pull", "-hf", "a/b:Q4_K_M", HF_TOKEN="hf_\u00e9", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9"
        )
    )
    return "token" in said and "hotel" not in said


def cache_type(inputs: Inputs) -> bool:
    done = inputs.run("run", "demo", "-p", "x", *SHORT, "-ctvd", "q8_0", "-fa", "off")
    return done.returncode == 2 and "-ctvd" in text_of(done)


def export_over(inputs: Inputs) -> bool:
    (file := inputs.folder / "there.txt").write_text("mine")
    done = inputs.run("export", "demo", "--for", "llama-server", "-o", file)
    return done.returncode != 0 and file.read_text() == "mine"


def prediction(inputs: Inputs) -> bool:
    body = {"prompt": "def main(", "max_tokens": 40, "temperature": 0}
    with serving(inputs.folder, "-c", "512") as server:
        plain, again = (
            httpx2.post(server.base + "/v1/completions", json=body | more, timeout=120).json()
            for more in ({}, {"prediction": {"type": "content", "content": "    return 0\n" * 4}})
        )
        bad = httpx2.post(server.base + "/v1/completions", json=body | {"prediction": "text"}, timeout=120)
    same = plain["choices"][0]["text"] == again["choices"][0]["text"]
    return (
        same
        and bad.status_code == 400
        and again["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
    )


ROWS: dict[str, tuple[str, Callable[[Inputs], bool]]] = {
    "predicted outputs": ("drafted from and counted; another form is 400", prediction),
    "N2": ("a target and a draft in parts give the whole ones' text", parts),
    "D14": ("the second of three parts loads the model", later_part),
    "N1": ("a grammar's end, with ignore_eos and a stop text", dead_end),
    "N3": ("a key with a blank is one key", key_with_a_blank),
    "D12": ("an embedding model is named before loading", embedding),
    "D10": ("no end token follows a prompt", adds_eos),
    "D02": ("accepted tokens are tokens of the answer", stop_in_a_block),
    "D24": ("a request's reasoning_effort next to --reasoning", reasoning),
    "D34": ("the URL that serve prints is answered", host_name),
    "D29": ("no home folder", no_home),
    "N4": ("bench takes what serve logs", logged_tokens),
    "D18": ("a token with a letter beyond ASCII is named", strange_token),
    "D09": ("a model without an end token", no_end),
    "D07": ("-ctvd q8_0 without flash attention is named and refused", cache_type),
    "D13 v1": ("GGUF version 1", version(1)),
    "D13 v99": ("GGUF version 99", version(99)),
    "D22": ("a byte order mark before a body", marked_body),
    "D27": ("a byte order mark on standard input", marked_input),
    "D25": ("negative and large seeds", seed),
    "D26": ("a picture among many messages is named by its place", picture),
    "D06": ("a draft that adds a BOS token", adds_bos),
    "N6": ("an existing file stays", export_over),
}


def main() -> int:
    """Try the rows and print what came of them."""
    wanted = sys.argv[1:] or [*ROWS]
    failed = 0
    for name in wanted:
        what, row = ROWS[name]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                found = "as it should" if row(Inputs(Path(folder))) else "NOT as it should"
            except Exception as error:
                found = f"NOT as it should: {type(error).__name__}: {str(error)[:200]}"
        failed += found.startswith("NOT")
        print(f"| {name} | {what} | {found} |", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
