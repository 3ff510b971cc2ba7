"""``ggufspec serve`` against llama-server: same files, prompts, threads, one client; then conversations by turns.

    scripts/peers llama-server && .venv/bin/python tests/evidence/serving.py      # about 20 minutes on two idle cores

All servers run at once and only one of them works: ours (adaptive, with draft and n-gram lookup), llama-server
target-only, and llama-server at each fixed draft length. A repetition asks all of them the same, one right after the
other, in an order that rotates. Answers are greedy and streamed; what is timed is what a client sees:

- tokens/s: tokens ÷ seconds from the request to its end;
- first token of a second turn: a conversation of about 1,000 tokens, then a short question more;
- three conversations by turns: the prompt tokens that are read, and those that are new;
- what HTTP, the child process and the queue add: seconds of the whole request less those that the child was at work
  (its prompt, and from there to its last token), by token; with all cores busy decoding, and with one free.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
from common import ROOT, grown_draft, grown_targets, save
from servers import Server, ask, ours, rotated, theirs

from ggufspec.bench.prompts import PROMPTS
from ggufspec.bench.statistics import paired_ratios

DRAFT_LENGTHS = (2, 3, 4, 7)
CONVERSATIONS = 3
CTX_SIZE = 2048
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def own(target: Path, draft: Path, threads: int, folder: Path) -> AbstractContextManager[Server]:
    """``ggufspec serve``."""
    command = ["-m", target, "-md", draft, "-c", str(CTX_SIZE), "-t", str(threads), "--parallel", str(CONVERSATIONS)]
    return ours("ggufspec", *command, "--chat-template", _template(folder))


def other(target: Path, draft: Path, threads: int, draft_max: int, folder: Path) -> AbstractContextManager[Server]:
    """llama-server, target-only where ``draft_max`` is 0. Its context is that of all conversations together."""
    cells = CONVERSATIONS * (CTX_SIZE + 64)
    command = ["-m", target, "-c", str(cells), "-b", "512", "-ub", "512", "-t", str(threads), "-np", str(CONVERSATIONS)]
    command += ["--chat-template-file", _template(folder)]
    if draft_max:
        command += ["-md", draft, "-ngld", "0", "--spec-type", "draft-simple", "--spec-draft-n-max", str(draft_max)]
    name = f"llama-server, draft length {draft_max}" if draft_max else "llama-server target-only"
    return theirs(name, *command, log=folder / f"{draft_max}.log")


def _template(folder: Path) -> Path:
    path = folder / "chatml.jinja"
    path.write_text(TEMPLATE)
    return path


def one_client(client: httpx2.Client, servers: Sequence[Server], tokens: int, repetitions: int) -> dict[str, Any]:
    """Tokens/s of completions; a repetition's prompts differ in their first line, so that nothing is cached."""
    seconds: dict[str, list[float]] = {one.name: [] for one in servers}
    rates: dict[str, list[float]] = {one.name: [] for one in servers}
    same = []
    for repetition in range(repetitions):
        for number, prompt in enumerate(PROMPTS):
            texts = {}
            for server in rotated(servers, repetition * len(PROMPTS) + number):
                body = {"prompt": f"# {repetition}\n{prompt.text}", "max_tokens": tokens}
                found = ask(client, server, "completions", body)
                texts[server.name] = found.text
                seconds[server.name].append(found.total_s / found.tokens)
                rates[server.name].append(found.tokens / found.total_s)
            same.append(len(set(texts.values())) == 1)
    own = next(iter(seconds))
    against = {name: asdict(paired_ratios(values, seconds[own])) for name, values in seconds.items() if name != own}
    return {"tokens_per_s": rates, "speed_of_ours_over": against, "same_text": f"{sum(same)} of {len(same)}"}


def second_turn(client: httpx2.Client, servers: Sequence[Server], repetitions: int) -> dict[str, Any]:
    """Seconds to the first token of a second turn of about 1,000 tokens' conversation."""
    long = "\n".join(f"def part_{i}(value):\n    return value + {i}\n" for i in range(60))
    first_s: dict[str, list[float]] = {one.name: [] for one in servers}
    read: dict[str, list[int]] = {one.name: [] for one in servers}
    for repetition in range(repetitions):
        for server in rotated(servers, repetition):
            messages = [{"role": "user", "content": f"# {repetition}\n{long}"}]
            before = ask(client, server, "chat/completions", {"messages": messages, "max_tokens": 48})
            messages += [{"role": "assistant", "content": before.text}, {"role": "user", "content": "def total(self):"}]
            found = ask(client, server, "chat/completions", {"messages": messages, "max_tokens": 8})
            first_s[server.name].append(found.first_s)
            read[server.name].append(found.prompt_tokens - found.cached)
    own = next(iter(first_s))
    ratios = {name: asdict(paired_ratios(first_s[own], one)) for name, one in first_s.items() if name != own}
    return {"first_token_s": first_s, "prompt_tokens_read": read, "ours_over": ratios}


def by_turns(client: httpx2.Client, server: Server, turns: int) -> dict[str, Any]:
    """Three conversations by turns: prompt tokens read of each turn, and the new ones."""
    talks = [[{"role": "user", "content": f"# {name}\n" + "import os\n" * 60}] for name in ("editor", "chat", "agent")]
    rows = []
    for turn in range(turns):
        for index, messages in enumerate(talks):
            found = ask(client, server, "chat/completions", {"messages": messages, "max_tokens": 16})
            rows.append(
                {"conversation": index, "turn": turn, **{k: v for k, v in asdict(found).items() if k != "text"}}
            )
            messages.append({"role": "assistant", "content": found.text})
            messages.append({"role": "user", "content": f"def step_{turn}(self):"})
    for row, before in zip(rows[len(talks) :], rows, strict=False):
        row["new"] = row["prompt_tokens"] - before["prompt_tokens"] - before["tokens"]
    later = [row for row in rows if row["turn"]]
    reading = sum(row["prompt_tokens"] - row["cached"] for row in later)
    return {
        "turns": rows,
        "read_of_later_turns": reading,
        "prompt_tokens_of_later_turns": sum(r["prompt_tokens"] for r in later),
    }


def added(client: httpx2.Client, server: Server, tokens: int, repetitions: int) -> dict[str, Any]:
    """Seconds a token that are not the child's, over whole requests."""
    found = []
    for repetition in range(repetitions):
        for prompt in PROMPTS:
            body = {"prompt": f"# {repetition}\n{prompt.text}", "max_tokens": tokens}
            one = ask(client, server, "completions", body)
            found.append((one.total_s - one.prompt_s - one.decode_s) / one.tokens)
    return {"seconds_a_token": found, "median": statistics.median(found)}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=96, help="tokens an answer")
    parser.add_argument("-r", type=int, default=3, help="repetitions")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("--kinds", nargs="*", default=["Q4_0"], help="types of the target")
    parser.add_argument("--folder", type=Path, help="write the JSON there")
    arguments = parser.parse_args()
    body: dict[str, Any] = {"threads": arguments.t, "tokens": arguments.n, "repetitions": arguments.r, "kinds": {}}
    draft = grown_draft()
    scratch = ROOT / ".cache" / "serving"
    scratch.mkdir(parents=True, exist_ok=True)

    def report(name: str, found: dict[str, Any]) -> dict[str, Any]:
        shown = {key: value for key, value in found.items() if key not in ("turns", "tokens_per_s", "seconds_a_token")}
        print(name, json.dumps(shown, indent=1), flush=True)
        return found

    for kind, target in grown_targets(tuple(arguments.kinds)).items():
        with ExitStack() as stack:
            # A connection each, as llama-server closes idle ones after 5 s
            limits = httpx2.Limits(max_keepalive_connections=0)
            client = stack.enter_context(httpx2.Client(timeout=600, limits=limits))
            mine = stack.enter_context(own(target, draft, arguments.t, scratch))
            lengths = (0, *DRAFT_LENGTHS)
            others = [stack.enter_context(other(target, draft, arguments.t, length, scratch)) for length in lengths]
            servers = [mine, *others]
            for server in servers:  # to be warm
                ask(client, server, "completions", {"prompt": "def main(", "max_tokens": 8})
            body["kinds"][kind] = {
                "one_client": report(f"{kind}, one client", one_client(client, servers, arguments.n, arguments.r)),
                "second_turn": report(f"{kind}, second turn", second_turn(client, servers, 2 * arguments.r)),
                "by_turns": report(f"{kind}, three conversations", by_turns(client, mine, 4)),
                "added": report(f"{kind}, added", added(client, mine, arguments.n, arguments.r)),
            }
        with own(target, draft, 1, scratch) as single, httpx2.Client(timeout=600) as client:
            ask(client, single, "completions", {"prompt": "def main(", "max_tokens": 8})
            found = added(client, single, arguments.n, arguments.r)
            body["kinds"][kind]["added_with_a_free_core"] = report(f"{kind}, added, one thread", found)
    print(save("serving", body, *([arguments.folder] if arguments.folder else [])))


if __name__ == "__main__":
    main()
