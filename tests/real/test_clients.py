"""``ggufspec serve`` by programs that people use with it, each in an environment of its own, made once, in .cache.

Tools and outputs have a finite number of values, so that the demo pair's calls are valid and end; what aider is told is
a grammar's. ``tests/unit/test_serve_clients.py`` has OpenAI's own client, which is in ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Cli
from tests.support.serving import Server, serving

pytestmark = pytest.mark.full

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "clients"
WEATHER = {"city": ("Paris", "Oslo"), "unit": ("celsius", "fahrenheit")}

LITELLM = """
import json, sys
import litellm
litellm.telemetry = False
usual = dict(model="openai/demo", api_base=sys.argv[1], api_key="none", temperature=0, max_tokens=16)
messages = [{"role": "user", "content": "def main("}]
whole = litellm.completion(messages=messages, **usual)
pieces = [each.choices[0].delta.content or "" for each in litellm.completion(messages=messages, stream=True, **usual)]
properties = {"city": {"enum": ["Paris", "Oslo"]}, "unit": {"enum": ["celsius", "fahrenheit"]}}
parameters = {"type": "object", "properties": properties, "required": ["city", "unit"], "additionalProperties": False}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
call = litellm.completion(messages=messages, tools=[tool], tool_choice="required", **usual | {"max_tokens": 400})
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "pieces": "".join(pieces),
    "tokens": whole.usage.completion_tokens,
    "calls": [json.loads(one.function.arguments) for one in call.choices[0].message.tool_calls],
}))
"""

PYDANTIC_AI = """
import asyncio, json, sys
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

class Order(BaseModel):
    size: Literal["small", "large"]
    count: Literal[1, 2, 3]

model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
settings = {"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
calls = []
agent = Agent(model, output_type=str, model_settings=settings)

@agent.tool_plain
def get_weather(city: Literal["Paris", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
    calls.append({"city": city, "unit": unit})
    return "4 degrees"

async def until_called():
    forced = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    async with agent.iter("def main(", model_settings={"extra_body": forced}) as steps:
        async for _ in steps:
            if calls:
                break

asyncio.run(until_called())
by_tool = Agent(model, output_type=Order, model_settings=settings).run_sync("def main(")
native = Agent(model, output_type=NativeOutput(Order), model_settings=settings).run_sync("def main(")
print(json.dumps({"calls": calls, "orders": [by_tool.output.model_dump(), native.output.model_dump()]}))
"""

OPENAI_AGENTS = """
import asyncio, json, sys
from typing import Literal
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

class Order(BaseModel):
    size: Literal["small", "large"]
    count: Literal[1, 2, 3]

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel("demo", AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
calls = []

@function_tool
def get_weather(city: Literal["Paris", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
    calls.append({"city": city, "unit": unit})
    return "4 degrees"

async def main():
    usual = ModelSettings(temperature=0, max_tokens=400, parallel_tool_calls=False)
    must = usual.resolve(ModelSettings(tool_choice="required"))
    caller = Agent(name="a", instructions="Be brief.", model=model, tools=[get_weather], model_settings=must,
                   tool_use_behavior="stop_on_first_tool")
    whole = await Runner.run(caller, "def main(")
    streamed = Runner.run_streamed(caller, "def main(")
    async for event in streamed.stream_events():
        pass
    typed = Agent(name="b", instructions="Be brief.", model=model, output_type=Order, model_settings=usual)
    ordered = await Runner.run(typed, "def main(")
    print(json.dumps({
        "calls": calls,
        "outputs": [whole.final_output, streamed.final_output],
        "orders": [ordered.final_output.model_dump()],
    }))

asyncio.run(main())
"""

AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, streamText, stepCountIs, tool } from "ai";
import { z } from "zod";

const made = createOpenAICompatible({ name: "demo", baseURL: process.argv[2], supportsStructuredOutputs: true });
const model = made("demo");
const weather = { city: z.enum(["Paris", "Oslo"]), unit: z.enum(["celsius", "fahrenheit"]) };
const calls = [];
const get_weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object(weather),
  execute: async (asked) => { calls.push(asked); return "4 degrees"; },
});
const usual = { model, prompt: "def main(", temperature: 0, maxRetries: 0 };
const parts = [];
const called = streamText({
  ...usual, tools: { get_weather }, toolChoice: "required", stopWhen: stepCountIs(1), maxOutputTokens: 400,
  providerOptions: { demo: { parallel_tool_calls: false } },
  onError: ({ error }) => { console.error(error); process.exit(1); },
});
for await (const part of called.fullStream) parts.push(part.type);
let text = "";
for await (const piece of streamText({ ...usual, maxOutputTokens: 16 }).textStream) text += piece;
const schema = z.object({ size: z.enum(["small", "large"]), count: z.enum(["1", "2", "3"]) });
const ordered = await generateObject({ ...usual, schema, maxOutputTokens: 100 });
console.log(JSON.stringify({ calls, parts, text, order: ordered.object, usage: await called.usage }));
"""


@pytest.fixture(scope="module")
def server(new_cli: Callable[[], Cli], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(new_cli(), tmp_path_factory.mktemp("serve"), "-c", "8192") as running:
        yield running


def installed(place: Path, command: list[str | Path], names: tuple[str, ...]) -> Path:
    """A folder with packages; a test skips where they cannot be had."""
    stamp = place / "made"
    if not stamp.exists() or stamp.read_text() != " ".join(names):
        made = subprocess.run([*command, *names], capture_output=True, text=True, timeout=900, cwd=place)
        if made.returncode:
            pytest.skip(f"{' '.join(names)} cannot be installed: {made.stderr.strip()[-300:]}")
        stamp.write_text(" ".join(names))
    return place


def python_with(*packages: str) -> Path:
    """The Python of an environment with these packages."""
    place = CACHE / packages[0].partition("[")[0]
    python, uv = place / "bin" / "python", Path(sys.executable).with_name("uv")  # in seconds what takes pip a minute
    if not python.exists():
        made = [uv, "venv", "-q", "--clear", "-p", sys.executable, place]
        subprocess.run(made, check=True, capture_output=True, timeout=120)
    installed(place, [uv, "pip", "install", "-q", "--cache-dir", CACHE / "uv", "-p", python], packages)
    return python


def run(folder: Path, *command: str | Path, **more: str) -> str:
    """What a client prints, in an empty folder that is its home."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def found(text: str) -> dict[str, Any]:
    """The JSON of the last line."""
    document: dict[str, Any] = json.loads(text.splitlines()[-1])
    return document


def check_calls(calls: list[dict[str, str]], count: int) -> None:
    assert len(calls) == count
    for call in calls:
        assert call.keys() == WEATHER.keys()
        assert all(value in WEATHER[name] for name, value in call.items())


def check_order(order: dict[str, Any]) -> None:
    assert order["size"] in ("small", "large")
    assert int(order["count"]) in (1, 2, 3)


def test_litellm(server: Server, tmp_path: Path) -> None:
    printed = found(run(tmp_path, python_with("litellm", "mcp"), "-c", LITELLM, server.base))
    assert printed["whole"] == printed["pieces"] != ""
    assert 0 < printed["tokens"] <= 16
    assert printed["calls"]
    check_calls(printed["calls"], len(printed["calls"]))


def test_pydantic_ai(server: Server, tmp_path: Path) -> None:
    """A call of a tool, an output by a forced call, an output by a schema."""
    printed = found(run(tmp_path, python_with("pydantic-ai-slim[openai]"), "-c", PYDANTIC_AI, server.base))
    check_calls(printed["calls"], 1)
    for order in printed["orders"]:
        check_order(order)


def test_openai_agents(server: Server, tmp_path: Path) -> None:
    printed = found(run(tmp_path, python_with("openai-agents"), "-c", OPENAI_AGENTS, server.base))
    check_calls(printed["calls"], 2)
    assert printed["calls"][0] == printed["calls"][1]
    assert printed["outputs"] == ["4 degrees"] * 2
    check_order(printed["orders"][0])


def test_llm(server: Server, tmp_path: Path) -> None:
    """Simon Willison's: a model of its configuration, in pieces and whole, a conversation, a schema, a tool."""
    python = python_with("llm")
    models = [{"model_id": "demo", "model_name": "demo", "api_base": server.base, "supports_schema": True}]
    models[0]["supports_tools"] = True
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def llm(*words: str) -> str:
        options = ("-m", "demo", "--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "60")
        return run(tmp_path, python, "-m", "llm", *words, *options, LLM_USER_PATH=str(tmp_path))

    whole = llm("def main(", "--no-stream")
    assert whole == llm("def main(") != "\n"
    assert llm("more", "-c") != "\n"
    check_order(json.loads(llm("def main(", "--schema", json.dumps(ORDER))))
    assert llm("def main(", "--functions", "def now() -> str:\n    return 'noon'\n") != "\n"


ORDER = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["size", "count"],
    "additionalProperties": False,
}


def test_the_ai_sdk(server: Server, tmp_path: Path) -> None:
    """Vercel's, in node: a streamed call of a tool, a streamed text, an object by a schema."""
    if not shutil.which("npm"):
        pytest.skip("npm is not there")
    place = CACHE / "ai-sdk"
    place.mkdir(parents=True, exist_ok=True)
    (place / "package.json").write_text('{"private": true, "type": "module"}')
    installed(place, ["npm", "install", "--no-audit", "--no-fund"], ("ai@5", "@ai-sdk/openai-compatible@1", "zod@4"))
    (place / "client.mjs").write_text(AI_SDK)
    printed = found(run(tmp_path, "node", place / "client.mjs", server.base))
    check_calls(printed["calls"], 1)
    assert {"tool-input-start", "tool-input-delta", "tool-call", "tool-result"} <= set(printed["parts"])
    assert printed["text"]
    check_order(printed["order"])


def test_aider_makes_an_edit(server: Server, tmp_path: Path) -> None:
    """The answer is one edit, by a grammar, in aider's own form."""
    python = python_with("aider-chat")
    source = tmp_path / "hello.py"
    source.write_text('print("helo")\n')
    edit = 'hello.py\n```python\n<<<<<<< SEARCH\nprint("helo")\n=======\nprint("hello")\n>>>>>>> REPLACE\n```\n'
    settings = [
        {
            "name": "openai/demo",
            "edit_format": "diff",
            "use_repo_map": False,
            "extra_params": {"extra_body": {"grammar": f"root ::= {json.dumps(edit)}"}},
        }
    ]
    (tmp_path / ".aider.model.settings.yml").write_text(json.dumps(settings))
    words = ("--model", "openai/demo", "--openai-api-base", server.base, "--openai-api-key", "none", "--no-git")
    quiet = ("--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty")
    shown = run(tmp_path, python, "-m", "aider", *words, *quiet, "--message", "mend the greeting", "hello.py")
    assert source.read_text() == 'print("hello")\n', shown
