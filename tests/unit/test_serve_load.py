"""``ggufspec serve`` under load: clients that leave, and a model's process that is killed."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.endpoints import PATIENCE_S, Endpoint, events, serving

CLIENTS, REQUESTS, WARM = 20, 200, 10
TOKENS = 24
PROMPTS = [f"# {name}\ndef {name}_{number}(" for name in ("read", "walk", "parse", "send") for number in range(5)]


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **more}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    """In strict mode, so that an answer does not depend on what the cache holds."""
    with serving(tmp_path, "--parallel", "3", "--strict", "-c", "1024", "--queue", str(CLIENTS)) as found:
        yield found


@pytest.fixture
def alone(endpoint: Endpoint) -> dict[str, str]:
    """What each prompt is answered with while nobody else asks."""
    with endpoint.client() as client:
        found = {}
        for prompt in PROMPTS:
            found[prompt] = client.post("/v1/completions", json=body(prompt)).json()["choices"][0]["text"]
    assert len(set(found.values())) > len(PROMPTS) // 2, "answers tell prompts apart"
    return found


def resident_bytes(endpoint: Endpoint) -> tuple[int, int]:
    """Of the server, and of its child."""
    return psutil.Process(endpoint.process.pid).memory_info().rss, endpoint.child.memory_info().rss


def ask(client: httpx2.Client, prompt: str, chance: random.Random) -> tuple[str, str, str]:
    """(what was done, the prompt, the text as far as it came): a whole answer, a stream, or a stream that is left."""
    how = chance.choice(("whole", "streamed", "left"))
    if how == "whole":
        response = client.post("/v1/completions", json=body(prompt))
        if response.status_code == 503:
            return "told", prompt, ""
        assert response.status_code == 200, response.text
        return how, prompt, response.json()["choices"][0]["text"]
    text, most = "", chance.randrange(1, 4) if how == "left" else None
    with client.stream("POST", "/v1/completions", json=body(prompt, stream=True)) as response:
        if response.status_code == 503:
            return "told", prompt, ""
        assert response.status_code == 200
        for count, chunk in enumerate(events(response)):
            if "error" in chunk:
                return "told", prompt, text
            text += chunk["choices"][0]["text"]
            if count == most:
                break
    return how, prompt, text


def load(endpoint: Endpoint, requests: int, over: Callable[[], bool] = lambda: False) -> list[tuple[str, str, str]]:
    """What became of that many requests, of all clients together."""

    def work(number: int) -> list[tuple[str, str, str]]:
        chance, found = random.Random(number), []
        with endpoint.client(headers={"User-Agent": f"client {number}"}) as client:
            while len(found) < requests // CLIENTS or not (over() or requests):
                found.append(ask(client, chance.choice(PROMPTS), chance))
        return found

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [one for each in pool.map(work, range(CLIENTS)) for one in each]


def check(found: list[tuple[str, str, str]], alone: dict[str, str]) -> None:
    """Every answer is that of its own prompt, or a beginning of it where it was left."""
    for how, prompt, text in found:
        if how in ("whole", "streamed"):
            assert text == alone[prompt], (how, prompt)
        else:
            assert alone[prompt].startswith(text), (how, prompt)


def idle(client: httpx2.Client) -> bool:
    text = client.get("/metrics").text
    return "llamacpp:requests_processing 0" in text and "llamacpp:requests_deferred 0" in text


def until(condition: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < last, what


@pytest.mark.full
def test_many_clients_a_third_of_which_leave(endpoint: Endpoint, alone: dict[str, str]) -> None:
    with endpoint.client() as client:
        check([ask(client, prompt, random.Random(3)) for prompt in PROMPTS[:WARM]], alone)
        check(load(endpoint, REQUESTS), alone)  # its memory grows by a twentieth, and then no more
        before = resident_bytes(endpoint)
        found = load(endpoint, REQUESTS)
        until(lambda: idle(client), "an answer goes on for nobody")
        after = resident_bytes(endpoint)
    check(found, alone)
    assert len(found) == REQUESTS
    counts = {how: sum(one[0] == how for one in found) for how in ("whole", "streamed", "left", "told")}
    assert counts["told"] == 0
    assert min(counts["whole"], counts["streamed"], counts["left"]) > REQUESTS // 5
    for then, now in zip(before, after, strict=True):
        assert now < 1.05 * then, f"{then:,} bytes became {now:,}"


@pytest.mark.full
def test_a_child_that_is_killed_twenty_times_under_load(endpoint: Endpoint, alone: dict[str, str]) -> None:
    """Who is told that an answer was lost may ask again; nobody waits for ever, and nothing is mixed up."""
    ended = threading.Event()
    with endpoint.client() as client, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, endpoint, 0, ended.is_set)
        try:
            for _ in range(20):
                answered = figures(client)
                until(lambda: figures(client) > answered or loading.done(), "nothing is answered")  # noqa: B023
                with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
                    endpoint.child.send_signal(signal.SIGKILL)
        finally:
            ended.set()
        found = loading.result(PATIENCE_S)
        until(lambda: idle(client), "an answer goes on for nobody")
        check(found, alone)
        # A death costs the three answers that run, and perhaps a request on its way
        assert 10 <= sum(how == "told" for how, _, _ in found) <= 20 * (3 + 1)
        for prompt in PROMPTS:
            answer = client.post("/v1/completions", json=body(prompt))
            assert answer.json()["choices"][0]["text"] == alone[prompt]
    assert endpoint.process.poll() is None


def figures(client: httpx2.Client) -> int:
    """Answers so far."""
    found: int = client.get("/figures").json()["totals"]["answers"]
    return found
