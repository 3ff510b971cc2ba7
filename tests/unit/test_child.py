"""Child processes that are called once, and those that stay: replies, stops, Ctrl-C, deaths and no orphans."""

from __future__ import annotations

import importlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import pytest

from ggufspec import child
from ggufspec.child import Interrupted, Session, call, job
from ggufspec.child import __main__ as child_main
from ggufspec.child.death import died as _died
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import ChildError, GgufspecError, UsageError
from ggufspec.hardware.backends import backend_of
from tests.support import forks, jobs_call, jobs_session
from tests.support.jobs_call import Result, Spec
from tests.support.jobs_session import Ready
from tests.support.processes import PATIENCE_S, all_end, eventually

ENDLESS = 1_000_000_000


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C is heeded whatever the shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def opened(session: Session, *, count: int = 0, how: str = "") -> Ready:
    return session.open(jobs_session.__name__, Spec(count, how), Ready)


def run(spec: Spec, **more: Any) -> Result:
    return call(jobs_call.__name__, spec, Result, **more)


def interrupting(after: int, do: Callable[[], object] | None = None) -> Callable[[dict[str, Any]], None]:
    """Sends this process SIGINT once, behind so many events; or does something else."""
    seen: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        seen.append(event["number"])
        if len(seen) == after:
            os.kill(os.getpid(), signal.SIGINT) if do is None else do()

    return listen


def stop_until(session: Session, answered: threading.Event) -> None:
    """Again and again, for the first may come before the request does."""
    while not answered.wait(0.05):
        session.stop()


# ---- calls ---------------------------------------------------------------------------------------------------------


def test_a_job_has_the_environment_that_its_spec_asks_for() -> None:
    events: list[dict[str, Any]] = []
    run(Spec(0, "environment"), on_event=events.append)
    assert events == [{"event": "environment", "job": "environment"}]
    assert "GGUFSPEC_JOB" not in os.environ


def jobs() -> dict[str, dict[str, Any]]:
    """The types of the function that starts each job of the package, by module; they must be known at run time."""
    package = Path(child.__file__).parents[1]
    start = re.compile(r"^(?:def )?(run|opened)(?:\(\s*spec: | = )", re.MULTILINE)
    found = {path: match for path in package.rglob("*.py") if (match := start.search(path.read_text(encoding="utf-8")))}
    types = {}
    for path, match in found.items():
        name = ".".join(("ggufspec", *path.relative_to(package).with_suffix("").parts))
        types[name] = get_type_hints(getattr(importlib.import_module(name), match[1]))
    return types


def test_each_job_tells_its_types() -> None:
    found = jobs()
    assert {"ggufspec.bench.trial", "ggufspec.llamacpp.dryrun", "ggufspec.llamacpp.probe"} <= set(found)
    assert all("spec" in types and "return" in types for types in found.values())
    specs = [types["spec"] for name, types in found.items() if not name.endswith(("hooked", "serve.session"))]
    assert len({spec.__name__ for spec in specs}) in (1, len(specs)), "two jobs' specs have one name"


def test_a_job_that_loads_a_pair_asks_for_what_llama_cpp_reads_when_it_is_loaded() -> None:
    """Any job, of this package, whose spec has the options of a pair."""
    options = DecoderOptions(op_offload_min_batch=2)
    specs = {types["spec"] for types in jobs().values()}
    placed = [spec for spec in specs if "options" in spec.__dataclass_fields__]
    assert len(placed) >= 5
    for spec in placed:
        known = dict.fromkeys(spec.__dataclass_fields__) | {"options": options}
        assert spec(**known).environment == {"GGML_OP_OFFLOAD_MIN_BATCH": "2"}


def test_a_call_gives_events_and_a_result() -> None:
    events: list[dict[str, Any]] = []
    result = run(Spec(3), on_event=events.append)
    assert result.counted == 3
    assert events == [{"event": "counted", "number": number} for number in range(3)]
    assert not psutil.pid_exists(result.pid)


def test_an_event_is_no_outcome_whatever_is_in_it() -> None:
    events: list[dict[str, Any]] = []
    assert run(Spec(1, "keys"), on_event=events.append).counted == 1
    assert events[0] == {"event": "keys", "error": "one", "result": "two", "request": 0}


def test_a_call_raises_what_the_job_raises() -> None:
    with pytest.raises(UsageError) as refused:
        run(Spec(1, "refuse"))
    assert (refused.value.message, refused.value.hint) == ("it cannot be done", "try something else")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("abort", "was ended by SIGABRT: GGML_ASSERT(the last word) failed"),
        ("card", "was ended by SIGABRT: CUDA error: out of memory"),
        ("bug", "ended with status 1: RuntimeError: a bug of ours"),
    ],
)
def test_a_child_that_dies_says_its_last_words(how: str, says: str) -> None:
    with pytest.raises(ChildError) as died:
        run(Spec(1, how))
    assert says in died.value.message


BUILT = "/tmp/pip-wheel-x/llama-cpp-python_y/vendor/llama.cpp/"
FILE, MEMORY, CHECK = "download it again", "lower -c, -ngl or -ngld", "ggufspec doctor"


@pytest.mark.parametrize(
    ("code", "said", "advice"),
    [
        (-signal.SIGABRT, f"{BUILT}src/llama-model.cpp:13: GGML_ASSERT(hparams.n_layer_all > 0) failed", FILE),
        (-signal.SIGABRT, f"{BUILT}src/llama-vocab.cpp:3: GGML_ASSERT(id < n) failed", FILE),
        (-signal.SIGABRT, f"{BUILT}ggml/src/gguf.cpp:3: GGML_ASSERT(ok) failed", FILE),
        (-signal.SIGABRT, f"{BUILT}ggml/src/ggml-rpc/ggml-rpc.cpp:354: Remote RPC server crashed", "10.0.0.7:50052"),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", MEMORY),
        (-signal.SIGABRT, "CUDA error: out of memory", MEMORY),
        (-signal.SIGKILL, "", MEMORY),
        (1, "MemoryError", MEMORY),
        (-signal.SIGSEGV, "", CHECK),
        (-signal.SIGILL, "llama_context: n_ctx = 512", CHECK),
        (-signal.SIGABRT, f"{BUILT}ggml/src/ggml-cpu/ops.cpp:9: GGML_ASSERT(nb0 == 4) failed", CHECK),
        (7, "RuntimeError: a bug of ours", "-v shows llama.cpp's log"),
    ],
)
def test_the_hint_follows_the_cause_of_a_death(code: int, said: str, advice: str) -> None:
    died = _died(code, f"llama_model_loader: loaded\n{said}\n", ("10.0.0.7:50052",))
    assert [each for each in (FILE, MEMORY, CHECK, "10.0.0.7:50052") if each in died.hint] == (
        [advice] if code != 7 else []
    )
    assert advice in died.hint
    assert "/tmp/pip-wheel" not in died.message


def test_a_child_that_stays_in_one_call_of_c_is_ended() -> None:
    with pytest.raises(ChildError) as late:
        run(Spec(1, "limited"))
    assert (late.value.message, late.value.hint) == ("the tuple takes more than 0.5 s: it may be malicious", "leave it")
    assert late.value.ended_by == "deadline"
    assert not forks.alive()


def test_a_limit_ends_with_its_block_however_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(job, "_say", lambda *message: said.append(message))
    monkeypatch.setattr(job, "_parent", os.getppid())
    with pytest.raises(UsageError), child.within(1.5, "the tuple", "leave it"):
        raise UsageError("it fails")
    assert said == [("within", 1.5, "the tuple", "leave it"), ("within", None)]


def test_an_orphan_begins_nothing_that_may_stay_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent died before the kernel was told to end it with that."""
    monkeypatch.setattr(job, "_say", lambda *message: None)
    monkeypatch.setattr(job, "_parent", os.getppid() + 1)
    with pytest.raises(BrokenPipeError), child.within(1.5, "the tuple", "leave it"):
        pytest.fail("it began")


def test_a_limit_that_was_kept_counts_no_more() -> None:
    assert run(Spec(1, "kept")).counted == 1


def test_ctrl_c_gives_what_a_call_had() -> None:
    with pytest.raises(Interrupted) as stopped:
        run(Spec(ENDLESS), on_event=interrupting(5))
    assert stopped.value.partial.counted >= 5
    assert not psutil.pid_exists(stopped.value.partial.pid)


def test_ctrl_c_in_the_midst_of_an_event_waits_for_its_end_and_none_is_lost() -> None:
    began: list[int] = []
    ended: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        began.append(event["number"])
        if len(began) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        ended.append(event["number"])

    with pytest.raises(Interrupted) as stopped:
        run(Spec(ENDLESS), on_event=listen)
    assert began == ended == list(range(stopped.value.partial.counted))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_cuts_an_event_short() -> None:
    ended: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        if event["number"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        ended.append(event["number"])

    with pytest.raises(Interrupted):
        run(Spec(ENDLESS), on_event=listen)
    assert 2 not in ended
    assert ended[:2] == [0, 1]


def test_ctrl_c_does_not_wait_for_a_call_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufspec.child.session.GRACE_S", 0.2)
    with pytest.raises(Interrupted) as stopped:
        run(Spec(5, "deaf"), on_event=interrupting(5))
    assert stopped.value.partial is None
    assert not forks.alive()


def test_what_a_listener_raises_ends_the_child() -> None:
    def listen(_: dict[str, Any]) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(Spec(ENDLESS), on_event=listen)
    assert not forks.alive()


# ---- sessions ------------------------------------------------------------------------------------------------------


def test_one_child_answers_again_and_again() -> None:
    with Session() as session:
        ready = opened(session)
        assert session.is_open
        replies = [session.ask(Spec(count), Result) for count in range(4)]
        assert replies == [Result(count, ready.pid) for count in range(4)]
    assert not session.is_open
    assert not psutil.pid_exists(ready.pid)


def test_events_belong_to_their_request() -> None:
    with Session() as session:
        opened(session)
        events: list[dict[str, Any]] = []
        for count in (3, 0, 2):
            events.clear()
            session.ask(Spec(count), Result, on_event=events.append)
            assert [event["number"] for event in events] == list(range(count))


def test_the_job_frees_what_it_holds_in_the_end(tmp_path: Path) -> None:
    with Session() as session:
        opened(session, how=str(tmp_path / "said"))
    assert (tmp_path / "said").read_text() == "freed"


def test_a_job_may_use_the_pause_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called until it has nothing left to do, and told whether a request has come meanwhile."""
    monkeypatch.setattr(child_main, "_IDLE_S", 0.01)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request, seen = (0, {}, threading.Event()), []

    def idle(goes_on: Callable[[], bool]) -> bool:
        seen.append(goes_on())
        if len(seen) == 2:
            requests.put(request)
            seen.append(goes_on())
        return True

    assert child_main._next(requests, idle) == request
    assert seen == [True, True, False]

    def fails(_: Callable[[], bool]) -> bool:
        requests.put(None)
        raise GgufspecError("no room", "try less")

    assert child_main._next(requests, fails) is None
    requests.put(request)
    assert child_main._next(requests, lambda _: False) == request


def test_an_error_leaves_the_session_as_it_is() -> None:
    with Session() as session:
        ready = opened(session)
        with pytest.raises(UsageError, match="it cannot be done"):
            session.ask(Spec(1, "refuse"), Result)
        assert session.ask(Spec(2), Result) == Result(2, ready.pid)


def test_a_session_that_cannot_be_opened() -> None:
    with Session() as session:
        with pytest.raises(UsageError, match="it cannot be done"):
            opened(session, how="refuse")
        assert not session.is_open
        with pytest.raises(ChildError, match="no child process"):
            session.ask(Spec(1), Result)
        opened(session)
        assert session.ask(Spec(1), Result).counted == 1


@pytest.mark.parametrize("how", ["thread", "listener"])
def test_stop_ends_a_request_and_not_the_child(how: str) -> None:
    with Session() as session:
        ready = opened(session)
        session.stop()  # nothing runs
        for _ in range(3):
            if how == "listener":
                reply = session.ask(Spec(ENDLESS), Result, on_event=interrupting(3, session.stop))
                assert reply.counted >= 3
            else:
                answered = threading.Event()
                stopper = threading.Thread(target=stop_until, args=(session, answered), daemon=True)
                stopper.start()
                reply = session.ask(Spec(1, "patient"), Result)
                answered.set()
                stopper.join()
                assert reply.counted == 0
            assert reply.pid == ready.pid
            assert session.ask(Spec(5), Result) == Result(5, ready.pid)


def test_stop_from_the_handler_of_a_signal() -> None:
    with Session() as session:
        ready = opened(session)
        signal.signal(signal.SIGINT, lambda number, frame: session.stop())
        reply = session.ask(Spec(ENDLESS), Result, on_event=interrupting(3))
        assert 3 <= reply.counted < ENDLESS
        assert session.ask(Spec(1), Result) == Result(1, ready.pid)


def test_ctrl_c_stops_a_request_and_not_the_child() -> None:
    with Session() as session:
        ready = opened(session)
        for _ in range(3):
            with pytest.raises(Interrupted) as stopped:
                session.ask(Spec(ENDLESS), Result, on_event=interrupting(3))
            assert stopped.value.partial.counted >= 3
            assert session.ask(Spec(5), Result) == Result(5, ready.pid)


def test_a_second_ctrl_c_ends_the_child() -> None:
    with Session() as session:
        ready = opened(session)
        heard: list[int] = []

        def again(event: dict[str, Any]) -> None:
            heard.append(event["number"])
            if len(heard) == 1:
                timer.start()
            if len(heard) == 5:
                os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted) as stopped:
            session.ask(Spec(5, "deaf"), Result, on_event=again)
        timer.join()
        assert stopped.value.partial is None
        assert not psutil.pid_exists(ready.pid)
        assert opened(session).pid != ready.pid


def test_what_a_listener_raises_ends_the_session() -> None:
    def listen(_: dict[str, Any]) -> None:
        raise BrokenPipeError

    with Session() as session:
        ready = opened(session)
        with pytest.raises(BrokenPipeError):
            session.ask(Spec(ENDLESS), Result, on_event=listen)
        assert not psutil.pid_exists(ready.pid)


@pytest.mark.parametrize(
    ("how", "says"),
    [("abort", "SIGABRT: GGML_ASSERT(the last word) failed"), ("bug", "status 1: RuntimeError: a bug of ours")],
)
def test_a_session_whose_child_died_can_be_opened_again(how: str, says: str) -> None:
    with Session() as session:
        first = opened(session)
        with pytest.raises(ChildError) as died:
            session.ask(Spec(1, how), Result)
        assert says in died.value.message
        assert not session.is_open
        second = opened(session)
        assert second.pid != first.pid
        assert session.ask(Spec(1), Result) == Result(1, second.pid)


def test_a_child_that_is_killed_between_two_requests() -> None:
    with Session() as session:
        ready = opened(session)
        os.kill(ready.pid, signal.SIGKILL)
        assert eventually(lambda: not session.is_open)
        with pytest.raises(ChildError, match="SIGKILL: out of memory, most likely"):
            session.ask(Spec(1), Result)


def test_a_child_that_is_killed_at_work() -> None:
    with Session() as session:
        ready = opened(session)
        with pytest.raises(ChildError, match="SIGKILL"):
            session.ask(Spec(ENDLESS), Result, on_event=interrupting(3, lambda: os.kill(ready.pid, signal.SIGKILL)))


def test_opening_again_ends_the_child_before() -> None:
    with Session() as session:
        first, second = opened(session), opened(session)
        assert first.pid != second.pid
        assert not psutil.pid_exists(first.pid)


def test_a_large_request_is_whole_and_can_be_stopped_while_it_is_written() -> None:
    """Larger than a pipe holds, so that writing it takes the child's reading."""
    with Session() as session:
        opened(session)
        for _ in range(5):
            timer = threading.Timer(0.02, session.stop)
            timer.start()
            reply = session.ask(Spec(ENDLESS, " " * 3_000_000), Result, on_event=interrupting(2000, session.stop))
            timer.join()
            assert reply.counted < ENDLESS
            assert session.ask(Spec(2), Result).counted == 2


SERVES = """
import sys
import threading
from tests.support.jobs_session import Ready, Spec
from tests.support.jobs_call import Result
from ggufspec.child import Session
session = Session()
start = lambda: print(session.open("tests.support.jobs_session", Spec(0), Ready).pid, flush=True)
if sys.argv[3] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
first = lambda event: event["number"] or print("counts", flush=True)
session.ask(Spec(int(sys.argv[1]), sys.argv[2]), Result, on_event=first)
print("answered", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("count", "task"),
    [
        (1, ""),
        (ENDLESS, ""),
        (1, "deaf"),
        pytest.param(1, "held", marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it")),
    ],
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_when_the_parent_is_killed(how: signal.Signals, count: int, task: str) -> None:
    no_orphan(how, count, task, "main")


@pytest.mark.parametrize("task", ["", "deaf"])
def test_a_thread_s_child_lives_on_without_it_and_ends_with_the_process(task: str) -> None:
    no_orphan(signal.SIGKILL, 1, task, "thread")


def no_orphan(how: signal.Signals, count: int, task: str, thread: str) -> None:
    program = [sys.executable, "-c", SERVES, str(count), task, thread]
    found = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}  # the jobs of the tests
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=found) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "counts\n"
        if (count, task) == (1, ""):
            assert parent.stdout.readline() == "answered\n"
        parent.send_signal(how)
        assert parent.wait(PATIENCE_S) == -how
    assert all_end([child])


@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("Vulkan0", "GGML_VK_DISABLE_FUSION=1"),
        ("CUDA1", "GGML_CUDA_DISABLE_FUSION=1"),
        ("CANN0", "update the GPU driver"),
    ],
)
def test_a_driver_that_dies_is_told_with_what_was_loaded_and_what_to_try(device: str, what: str) -> None:
    loaded = [(model, f"{device} (a card)", backend_of(device).driver_hint) for model in ("target.gguf", "draft.gguf")]
    error = _died(-signal.SIGSEGV, "", on_cards=loaded)
    assert f"the driver of {device} (a card) most likely crashed" in error.message
    assert "with target.gguf and draft.gguf loaded: SIGSEGV" in error.message
    assert what in error.hint
    assert "-ngl 0 -ngld 0" in error.hint
    assert "lower -c" in _died(-signal.SIGABRT, "ggml: failed to allocate buffer", on_cards=loaded).hint
    assert "driver" not in _died(-signal.SIGSEGV, "").message
