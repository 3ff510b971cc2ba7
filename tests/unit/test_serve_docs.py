"""docs/serve.md: its curl commands, run by curl against a server that runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Cli
from tests.support.serving import Server, serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
ADDRESS = "http://127.0.0.1:8080"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed")


def commands() -> list[str]:
    """Every curl command of the page, each with all of its lines."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [found for block in blocks for found in re.findall(r"^curl .*?(?=^\S|\Z)", block, re.DOTALL | re.MULTILINE)]


@pytest.fixture(scope="module")
def server(new_cli: Callable[[], Cli], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(new_cli(), tmp_path_factory.mktemp("serve"), "-c", "1024") as running:
        yield running


def is_text(body: str) -> bool:
    """Whether it is an answer; at the API's temperature of 1, the small model may also end it at once."""
    value = json.loads(body)
    (choice,) = value["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return bool(text or choice["finish_reason"] == "stop") and value["usage"]["completion_tokens"] > 0


def is_stream(body: str) -> bool:
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return events[-1] == "[DONE]" and all("choices" in json.loads(event) for event in events[:-1]) and len(events) > 2


def message(body: str) -> Any:
    return json.loads(body)["choices"][0]["message"]


def is_call(body: str) -> bool:
    (call,) = message(body)["tool_calls"]
    return call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["city"] in (
        "Oslo",
        "Paris",
    )


EXPECTED: list[Callable[[str], bool]] = [  # of each command, in the page's order
    lambda body: json.loads(body)["data"][0]["id"] == "demo",
    is_text,
    is_stream,
    is_text,
    is_call,
    lambda body: json.loads(message(body)["content"])["size"] in ("small", "large"),
    lambda body: len(json.loads(body)["choices"][0]["logprobs"]["content"]) in (1, 2),
    lambda body: is_text(body) and 0 < sum(json.loads(body)["usage"]["completion_tokens_details"].values()) < 30,
    lambda body: re.search(r"^llamacpp:tokens_predicted_total [1-9]", body, re.MULTILINE) is not None,
    lambda body: len(json.loads(body)["answers"]) == 7,
    lambda body: json.loads(body)["status"] == "ok",
]


def test_every_command_of_the_page_does_what_it_says(server: Server) -> None:
    found = commands()
    assert len(found) == len(EXPECTED)
    for command, expected in zip(found, EXPECTED, strict=True):
        assert ADDRESS in command
        line = command.replace(ADDRESS, server.url).replace("curl ", "curl --noproxy '*' --fail-with-body -sS ", 1)
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}{done.stdout}{done.stderr}"
        assert expected(done.stdout), f"{command}{done.stdout}"
