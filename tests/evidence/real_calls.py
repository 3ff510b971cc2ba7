"""Tool calls of real models by their own chat templates: twenty requests, whole and streamed.

    scripts/real-models; scripts/real-models qwen-coder; .venv/bin/python -m pip install jsonschema
    .venv/bin/python tests/evidence/real_calls.py       # 10 minutes on two cores

A request must call a tool, any or a named one; arguments are files with quotes, line ends, backslashes and JSON, edits,
commands, nested records. A call counts where its arguments are JSON that jsonschema finds valid. The stream's are
compared with those of a second whole answer: both find the prompt in the cache, which in a near tie chooses otherwise.
Where a model's template has no tools, nothing can be forced: that is a 400, and counted as such.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
from common import EVIDENCE, ROOT, save
from servers import ours

MODELS = ROOT / ".cache" / "real-models"
FILES = (
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
)


def tool(name: str, about: str, required: list[str], **properties: Any) -> dict[str, Any]:
    """A tool as OpenAI's API has it."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TEXT: dict[str, Any] = {"type": "string"}
WRITE = tool("write_file", "Write a file.", ["path", "content"], path=TEXT, content=TEXT)
EDIT = tool(
    "edit_file", "Replace text.", ["path", "old", "new"], path=TEXT, old=TEXT, new=TEXT, all={"type": "boolean"}
)
RUN = tool("run_command", "Run a command.", ["command"], command={"type": "array", "items": TEXT, "minItems": 1})
WEATHER = tool("get_weather", "The weather.", ["city", "unit"], city=TEXT, unit={"enum": ["celsius", "fahrenheit"]})
ORDER = tool(
    "place_order",
    "Order things.",
    ["customer", "items"],
    customer={
        "type": "object",
        "properties": {"name": TEXT, "email": {"type": ["string", "null"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
    items={
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"sku": TEXT, "count": {"type": "integer"}},
            "required": ["sku", "count"],
            "additionalProperties": False,
        },
    },
)
NOW = tool("now", "The time.", [])
ALL = [WRITE, EDIT, RUN, WEATHER, ORDER, NOW]
ASKED: tuple[tuple[str, list[dict[str, Any]], str], ...] = (  # what is asked, the tools, the one that is named
    ('Write a package.json for a project called "colours" with a build script.', [WRITE], ""),
    ("Write hello.py, which prints \"it's\" and 'so' with both kinds of quotes.", [WRITE], "write_file"),
    ("Write a C file main.c that prints a line with \\n and a tab.", [WRITE, RUN], "write_file"),
    ('Write config.json with {"a": [1, 2, {"b": "c"}]}.', ALL, "write_file"),
    ("Write a Makefile with two targets; recipes begin with tabs.", [WRITE], ""),
    ("Write README.md with a fenced code block in Python.", [WRITE, EDIT], "write_file"),
    ("Write an HTML page that has <tool_call> and </tool_call> in its text.", [WRITE], "write_file"),
    ("Write a file grüße.txt that greets in German, Japanese and with an emoji.", [WRITE], ""),
    ('In app.py replace "helo" by "hello", everywhere.', [EDIT], ""),
    ("In main.rs rename the function foo to bar.", [EDIT, WRITE], "edit_file"),
    ("In notes.txt replace the two lines a and b by one line c.", ALL, "edit_file"),
    ("List the files of this folder, hidden ones too.", [RUN], ""),
    ('Commit everything with the message "fix: it\'s done".', [RUN, WRITE], "run_command"),
    ("Find lines with \\d+ in all .py files with grep.", ALL, "run_command"),
    ("How is the weather in Oslo, in celsius?", [WEATHER], ""),
    ("Weather in São Paulo in fahrenheit, please.", [WEATHER, NOW], "get_weather"),
    ("Order two of SKU A-1 for Jörg, who has no e-mail.", [ORDER], ""),
    ('Order one "X/9" and three Y for Ann <ann@example.org>.', [ORDER, WEATHER], "place_order"),
    ("What time is it?", [NOW], ""),
    ("What time is it? Do not guess.", ALL, "now"),
)


def asked(client: httpx2.Client, base: str, body: dict[str, Any]) -> tuple[int, list[dict[str, str]], str]:
    """The status of a whole answer, the calls in it, and why it ended."""
    response = client.post(f"{base}/v1/chat/completions", json=body)
    if response.status_code != 200:
        return response.status_code, [], response.json()["error"]["message"]
    choice = response.json()["choices"][0]
    calls = [one["function"] for one in choice["message"].get("tool_calls", ())]
    return 200, calls, choice["finish_reason"]


def streamed(client: httpx2.Client, base: str, body: dict[str, Any]) -> list[dict[str, str]]:
    """The calls of a streamed answer."""
    calls: dict[int, dict[str, str]] = {}
    with client.stream("POST", f"{base}/v1/chat/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    for one in choice["delta"].get("tool_calls", ()):
                        call = calls.setdefault(one["index"], {"name": "", "arguments": ""})
                        for name in call:
                            call[name] += one["function"].get(name, "")
    return [calls[index] for index in sorted(calls)]


def fault(calls: list[dict[str, str]], tools: list[dict[str, Any]], name: str) -> str:
    """What is wrong with calls; empty for nothing."""
    if not calls:
        return "no call"
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for call in calls:
        if call["name"] not in schemas or (name and call["name"] != name):
            return f"the call is of {call['name']!r}"
        try:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def main() -> None:
    """Ask, count, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(FILES), help="files of .cache/real-models")
    parser.add_argument("--tokens", type=int, default=600, help="of an answer at most")
    parser.add_argument("--folder", type=Path, default=EVIDENCE, help="of the JSON file: another one for a trial")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for file in arguments.models.split(","):
        with ours(file, "-m", MODELS / file, "-c", "4096") as server, httpx2.Client(timeout=900) as client:
            for number, (text, tools, name) in enumerate(ASKED):
                choice = {"type": "function", "function": {"name": name}} if name else "required"
                body = {"messages": [{"role": "user", "content": text}], "tools": tools, "tool_choice": choice}
                body |= {"temperature": 0, "max_tokens": arguments.tokens}
                began = time.perf_counter()
                status, calls, ended = asked(client, server.base, body)
                wrong = fault(calls, tools, name) if status == 200 else ""
                same = status != 200 or streamed(client, server.base, body) == asked(client, server.base, body)[1]
                rows.append(
                    {
                        "model": file,
                        "asked": text,
                        "named": name,
                        "status": status,
                        "calls": calls,
                        "ended": ended,
                        "fault": wrong,
                        "streamed_same": same,
                        "seconds": round(time.perf_counter() - began, 2),
                    }
                )
                print(
                    file[:20], number, status, wrong or "valid", "" if same else "STREAMED DIFFERS", ended, flush=True
                )
    summary = {
        file: {
            "requests": len(own),
            "refused": sum(one["status"] != 200 for one in own),
            "valid": sum(one["status"] == 200 and not one["fault"] for one in own),
            "streamed_same": sum(one["streamed_same"] for one in own),
            "unfinished": sum(one["ended"] == "length" for one in own),
        }
        for file in arguments.models.split(",")
        if (own := [one for one in rows if one["model"] == file])
    }
    print(json.dumps(summary, indent=1))
    print(save("real-calls", {"summary": summary, "rows": rows}, arguments.folder))


if __name__ == "__main__":
    main()
