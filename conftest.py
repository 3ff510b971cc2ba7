"""The two tiers, and what tests share: the pair that ships and its timings, a clean environment, damaged files."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

# Two test processes share the cores: a thread of llama.cpp that waits for another sleeps, as spinning takes the other's
# core (four to six times as long with two threads each). Read when libgomp is loaded, by children too.
os.environ["OMP_WAIT_POLICY"] = "passive"

import gguf
import pytest
from hypothesis import is_hypothesis_test, settings

from ggufspec import DecoderOptions, demo_pair
from ggufspec.child import session
from ggufspec.decoding.policy import latency_cache
from ggufspec.llamacpp.model import Context, Model
from tests.support import forks
from tests.support.gguf_files import rewritten
from tests.support.processes import Cli

# Properties are held with few examples, the same ones each time; in the full tier with many, found anew.
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile("full", max_examples=400, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("quick", "full"), help="only the tests of one tier; without it, all")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("tier") == "full" else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The full tier is what is marked ``full``, and the properties once more."""
    tier = config.getoption("tier")
    if tier is None:
        return

    def chosen(item: pytest.Item) -> bool:
        full = item.get_closest_marker("full") is not None
        return not full if tier == "quick" else full or is_hypothesis_test(getattr(item, "obj", None))

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: a run that is cut has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed: {report.longreprtext[-1000:]}", flush=True)  # noqa: T201


@pytest.fixture(scope="session")
def target() -> Path:
    return demo_pair()[0]


@pytest.fixture(scope="session")
def draft() -> Path:
    return demo_pair()[1]


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    """Children that run llama.cpp are forks, too, where tests call the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "subprocess", forks.FORKING)
        yield


@pytest.fixture(scope="session")
def batch_latencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T(n) of the pair that ships by one thread, measured once for all tests: a folder with the cache's file."""
    folder, (target, draft) = tmp_path_factory.mktemp("batch_latencies"), demo_pair()
    options = DecoderOptions(threads=1)
    wanted = (
        (target, options.target, options.context(with_draft=True), None, False),
        (target, options.target, options.context(with_draft=True), None, True),
        (draft, options.draft_placement, options.draft_context(), 1, False),
    )
    for path, placement, context_options, outputs, strict in wanted:
        key = latency_cache.latency_key(path, placement, context_options, outputs=outputs, strict=strict)
        with Model(path, placement) as model, closing(Context(model, context_options)) as context:
            batch_latency, _ = latency_cache.load_or_measure(context, key, None, time.perf_counter)
        batch_latency.trusted = True  # of a busy machine, too
        latency_cache.save_latency(folder, key, batch_latency)
    return folder


@pytest.fixture(scope="session")
def new_cli(tmp_path_factory: pytest.TempPathFactory, batch_latencies: Path) -> Callable[[], Cli]:
    """Makes command lines: one thread (llama.cpp's threads spin), no settings of the user, no network."""

    def make() -> Cli:
        home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("folder")
        shutil.copytree(batch_latencies, home / ".cache" / "ggufspec")
        own = ("GGUFSPEC_", "HF_", "HUGGINGFACE_", "XDG_", "PYTEST_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        for key in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            inherited.pop(key, None)
        return Cli(
            folder,
            inherited
            | {
                "GGUFSPEC_NO_CALIBRATE": "1",
                "GGUFSPEC_THREADS": "1",
                "HF_HOME": str(home / "hub"),
                "HF_HUB_OFFLINE": "1",
                "HOME": str(home),
                "LC_ALL": "C.UTF-8",
                "TERM": "xterm-256color",
            },
        )

    return make


@pytest.fixture
def cli(new_cli: Callable[[], Cli]) -> Cli:
    """The command line of one test."""
    return new_cli()


@pytest.fixture(scope="session")
def damaged(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> dict[str, Path]:
    """Files that are no whole model, by what is wrong with them."""
    folder = tmp_path_factory.mktemp("damaged")
    whole = draft.read_bytes()
    noise = random.Random(0).randbytes(len(whole))
    contents = {
        "empty": b"",
        "no GGUF": b"version https://git-lfs.github.com/spec/v1\n",
        "cut in the magic": whole[:2],
        "cut in the counts": whole[:20],
        "cut in the keys": whole[:5000],
        "cut in the data": whole[: len(whole) * 9 // 10],
        "cut by one byte": whole[:-1],
        "noise after the magic": whole[:4] + noise[4:8192],
        "noise after the version": whole[:8] + noise[8:8192],
        "noise after the counts": whole[:24] + noise[24:],
        "noise after some keys": whole[:3000] + noise[3000:],
    }
    files = {name: folder / f"{name.replace(' ', '-')}.gguf" for name in contents}
    for name, data in contents.items():
        files[name].write_bytes(data)
    return files


@pytest.fixture(scope="session")
def other_token(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> tuple[Path, int, str, str]:
    """The draft with one token renamed: (file, token, its text before, its text now)."""
    path = tmp_path_factory.mktemp("renamed") / "renamed.gguf"
    shutil.copyfile(draft, path)
    reader = gguf.GGUFReader(path, "r+")
    field = reader.get_field("tokenizer.ggml.tokens")
    texts = [bytes(field.parts[index]) for index in field.data]
    token = next(i for i, text in enumerate(texts) if i > 300 and len(text) == 4 and text.isalpha())
    renamed = next(text for text in (b"zzqx", b"xqzz", b"qxzq") if text not in texts)
    field.parts[field.data[token]][:] = bytearray(renamed)
    reader.data.flush()
    return path, token, texts[token].decode(), renamed.decode()


@pytest.fixture(scope="session")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> Path:
    """The draft with the first 1,000 of its tokens."""
    kept = 1000

    def fewer(name: str, value: Any) -> Any:
        if name == "llama.vocab_size":
            return kept
        if isinstance(value, list):
            return value[: 16 if name.endswith("merges") else kept]
        return value

    return rewritten(
        draft,
        tmp_path_factory.mktemp("small") / "small.gguf",
        value=fewer,
        data=lambda name, data: data[:kept] if name == "token_embd.weight" else data,
    )
