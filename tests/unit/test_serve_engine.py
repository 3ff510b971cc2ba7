"""The engine behind ``ggufspec serve``, with a child that misbehaves: nothing waits for ever, and others go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ggufspec import DecoderOptions
from ggufspec.errors import ChildError, GgufspecError, ModelError
from ggufspec.serve import engine as engines
from ggufspec.serve.engine import GoneError, PendingAnswer, QueueFullError, RefusedError, ServerProcess
from ggufspec.serve.session import ChatJob, ServeRequest
from tests.support import jobs_serve
from tests.support.processes import PATIENCE_S, eventually


def spec(how: str = "") -> ChatJob:
    return ChatJob(Path("none.gguf"), None, DecoderOptions(), chat_template=how)


@pytest.fixture
def engine() -> Iterator[ServerProcess]:
    made = ServerProcess(spec(), module=jobs_serve.__name__, most_waiting=8)
    made.start()
    yield made
    made.close()


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """In an event loop, within a test's patience."""
    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


async def text(answer: PendingAnswer) -> str:
    rounds = [event["deltas"] async for event in answer.events() if event["event"] == "round"]
    return "".join(one["content"] for deltas in rounds for one in deltas)


async def until(condition: Callable[[], bool]) -> None:
    last = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < last
        await asyncio.sleep(0)


def ask(engine: ServerProcess, prompt: str, client: str = "one") -> PendingAnswer:
    return engine.submit(ServeRequest(prompt=prompt), client)


def test_clients_take_turns_and_what_waits_can_leave(engine: ServerProcess) -> None:
    async def work() -> list[str]:
        first = ask(engine, "forever")
        await until(lambda: engine.running)
        order: list[str] = []

        async def answered(answer: PendingAnswer) -> None:
            order.append(await text(answer))

        greedy = [ask(engine, f"greedy {number}") for number in range(3)]
        modest = ask(engine, "modest", "two")
        tasks = [asyncio.create_task(answered(one)) for one in (*greedy[:2], modest)]
        greedy[2].cancel()
        with pytest.raises(GoneError):
            await text(greedy[2])
        first.cancel()
        assert await text(first) == "forever"
        assert first.reply is not None
        assert first.reply.statistics.stop_reason == ""
        await asyncio.gather(*tasks)
        return order

    assert run(work) == ["greedy 0", "modest", "greedy 1"]


def test_an_answer_that_has_ended_runs_no_longer(engine: ServerProcess) -> None:
    async def work() -> None:
        assert await text(ask(engine, "x")) == "x"

    run(work)
    engine.close()
    assert not engine.running


def test_a_queue_that_is_full_says_so(engine: ServerProcess) -> None:
    async def work() -> None:
        first = ask(engine, "forever")
        await until(lambda: engine.running)
        waiting = [ask(engine, "x", str(number)) for number in range(8)]
        with pytest.raises(QueueFullError, match="8 requests wait"):
            ask(engine, "y")
        first.cancel()
        assert [await text(one) for one in waiting] == ["x"] * 8

    run(work)


def test_a_refusal_and_a_death_cost_one_answer(engine: ServerProcess) -> None:
    deaths: list[str] = []
    engine.on_restart.append(deaths.append)

    async def work() -> None:
        with pytest.raises(RefusedError) as refused:
            await text(ask(engine, "refuse"))
        assert refused.value.details["code"] == "context_length_exceeded"
        dying, next_one = ask(engine, "die"), ask(engine, "next")
        with pytest.raises(GoneError, match="status 3"):
            await text(dying)
        assert await text(next_one) == "next"
        assert engine.failure is None

    run(work)
    assert len(deaths) == 1


def test_a_child_that_cannot_be_loaded_again_is_tried_by_every_request(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    engine = ServerProcess(spec(str(broken)), module=jobs_serve.__name__)
    deaths: list[str] = []
    engine.on_restart.append(deaths.append)
    engine.start()

    async def work() -> None:
        broken.touch()
        with pytest.raises(GoneError):
            await text(ask(engine, "die"))
        for _ in range(2):
            with pytest.raises(GoneError, match="it cannot be loaded"):
                await text(ask(engine, "x"))
            assert engine.failure is not None
        broken.unlink()
        assert await text(ask(engine, "x")) == "x"
        assert engine.failure is None

    try:
        run(work)
    finally:
        engine.close()
    assert len(deaths) == 1, "one death, however often it was tried"


def test_a_child_that_does_not_stop_is_killed(engine: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_STUCK_S", 0.1)

    async def work() -> None:
        deaf = ask(engine, "deaf")
        await until(lambda: engine.running)
        deaf.cancel()
        with pytest.raises(GoneError):
            await text(deaf)
        assert await text(ask(engine, "next")) == "next"

    run(work)


def test_one_that_is_cancelled_on_its_way_is_stopped(engine: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_STUCK_S", 0.1)
    begin, cancelled = engine._session.begin, threading.Event()

    def late(request: object) -> int:
        assert cancelled.wait(PATIENCE_S)
        return begin(request)

    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine._session, "begin", late)
            deaf = ask(engine, "deaf")
            await until(lambda: engine.running)
            deaf.cancel()
            cancelled.set()
            with pytest.raises(GoneError):
                await text(deaf)
        assert await text(ask(engine, "next")) == "next"

    run(work)


def test_a_bug_costs_its_own_request(engine: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine._session, "begin", lambda *_, **__: 1 / 0)
            with pytest.raises(GoneError, match="ZeroDivisionError"):
                await text(ask(engine, "x"))
        assert await text(ask(engine, "next")) == "next"

    run(work)


def test_who_waits_long_is_told_that_he_waits(engine: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_WAITING_S", 0.01)

    async def work() -> None:
        first = ask(engine, "forever")
        second = ask(engine, "x", "two")
        events = second.events()
        assert [(await anext(events))["event"] for _ in range(3)] == ["waiting"] * 3
        first.cancel()
        (found,) = await anext(event["deltas"] async for event in events if event["event"] == "round")
        assert found == {"content": "x"}

    run(work)


@pytest.mark.parametrize("prompt", ["forever", "deaf", ""])
def test_it_ends_whatever_the_child_does(prompt: str) -> None:
    engine = ServerProcess(spec(), module=jobs_serve.__name__)
    engine.start()

    async def work() -> None:
        if prompt:
            ask(engine, prompt)
            await until(lambda: engine.running)
            waiting = ask(engine, "x", "two")
            engine.close(0.1)
            with pytest.raises(GoneError, match="the server ends"):
                await text(waiting)
        engine.close(0.1)
        with pytest.raises(GoneError, match="the server ends"):
            ask(engine, "x")

    run(work)
    assert not engine._session.is_open


def test_it_ends_while_it_loads() -> None:
    engine = ServerProcess(spec("slow"), module=jobs_serve.__name__)
    failed: list[GgufspecError] = []

    def start() -> None:
        try:
            engine.start()
        except GgufspecError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert eventually(lambda: engine._session.is_open)
    engine.close()
    thread.join(PATIENCE_S)
    assert isinstance(failed[0], ChildError)


def test_what_cannot_be_loaded_at_first_is_an_error(tmp_path: Path) -> None:
    engine = ServerProcess(spec(str(tmp_path)), module=jobs_serve.__name__)
    with pytest.raises(ModelError, match="it cannot be loaded"):
        engine.start()
    engine.close()


# ---- several at once -------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[ServerProcess]:
    made = ServerProcess(spec("together"), module=jobs_serve.__name__, most_waiting=8)
    made.start()
    yield made
    made.close()


async def begun(answer: PendingAnswer) -> None:
    """Wait until the child has begun to answer; its events so far are taken."""
    async for event in answer.events():
        if event["event"] == "round":
            return


def test_two_are_answered_at_once_and_a_third_waits(pair: ServerProcess) -> None:
    async def work() -> None:
        first, second = ask(pair, "forever 1"), ask(pair, "forever 2", "two")
        await begun(first)
        await begun(second)
        third = ask(pair, "third", "three")
        await asyncio.sleep(0.1)
        assert (pair.running, pair.waiting) == (2, 1)
        second.cancel()
        assert await text(third) == "third", "a place is free"
        assert first.reply is None
        with pytest.raises(RefusedError, match="too long"):
            await text(ask(pair, "refuse"))
        first.cancel()
        await text(first)
        assert first.reply is not None
        assert first.reply.statistics.stop_reason == ""

    run(work)
    pair.close()
    assert pair.running == 0


def test_a_death_costs_what_was_running(pair: ServerProcess) -> None:
    async def work() -> None:
        first = ask(pair, "forever")
        await begun(first)
        dying, third = ask(pair, "die"), ask(pair, "third", "three")
        for lost in (first, dying):
            with pytest.raises(GoneError, match="status 3"):
                await text(lost)
        assert await text(third) == "third"

    run(work)


def test_the_one_that_hangs_is_blamed(pair: ServerProcess) -> None:
    async def work() -> None:
        first = ask(pair, "forever")
        await begun(first)
        hanging = ask(pair, "hang")
        with pytest.raises(RefusedError, match="the template takes more than"):
            await text(hanging)
        with pytest.raises(GoneError):
            await text(first)
        assert await text(ask(pair, "next")) == "next"

    run(work)


def test_a_bug_costs_what_was_running(pair: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        first = ask(pair, "forever")
        await begun(first)
        with monkeypatch.context() as patch:
            patch.setattr(pair._session, "receive", lambda *_: 1 / 0)
            pair._session.wake()
            with pytest.raises(GoneError, match="ZeroDivisionError"):
                await text(first)
        assert await text(ask(pair, "next")) == "next"

    run(work)


def test_it_ends_while_two_are_answered(pair: ServerProcess) -> None:
    async def work() -> None:
        answers = [ask(pair, "forever 1"), ask(pair, "forever 2", "two")]
        for one in answers:
            await begun(one)
        pair.close(5.0)
        for one in answers:
            await text(one)
            assert one.reply is not None

    run(work)
    assert not pair._session.is_open
