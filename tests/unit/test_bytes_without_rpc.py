"""Bytes where no dry run is as on the card: sums, the CPU's compute buffer, and copies of the host's weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from ggufspec.api.plan import plan_request
from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp import devices, dryrun
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.headers import read_headers
from ggufspec.models.profile import bundled_folder
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import HOST, MemoryRequest
from tests.support import heads
from tests.support.shapes import SHAPES, write

SHIPPED = "eagle3 that ships"


class WithoutRpc:
    """A session of dry runs in this process, as a llama.cpp without RPC makes them: on the CPU alone."""

    def __init__(self) -> None:
        self._spec = dryrun.DryRunJob(simulated_devices=1)
        self._opened = dryrun.opened(self._spec, lambda _: None, threading.Event())
        self._serving = self._opened.__enter__()
        self.ready = self._serving.ready

    def ask(self, runs: Sequence[dryrun.PlacedModel]) -> tuple[dryrun.DryRunBytes, ...]:
        return self._serving.answer(dryrun.DryRunRequest(tuple(runs)), lambda _: None, threading.Event()).answers

    def close(self) -> None:
        self._opened.__exit__(None, None, None)


@pytest.fixture(scope="module")
def files(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(target, head) of each kind."""
    shipped = bundled_folder() / "demo" / "demo-eagle3-Q8_0.gguf"
    return heads.write_all(target, tmp_path_factory.mktemp("heads")) | {SHIPPED: (target, shipped)}


def requests(target: Path, head: Path, ctx_size: int) -> Iterator[MemoryRequest]:
    """The head with none, some and all layers of both offloaded."""
    known = [(one.header, one.metadata_only) for one in read_headers([target, head])]
    drafter = "eagle3" if "eagle3" in known[1][0].architecture else "mtp"
    options = DecoderOptions(ctx_size=ctx_size, threads=1, drafters=(drafter,))
    request = plan_request(known[0], known[0] if head == target else known[1], options, 0.7)
    assert request.draft is not None
    for layers in (0, 1, 4, 99):
        on = request.target.at(Placement(layers))
        yield from (request.draft.at(Placement(own), on) for own in ((layers,) if head == target else (0, 1, 99)))


def check(asked: Sequence[MemoryRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and caches are as dry runs on a simulated card have them, and compute buffers are not below those."""
    with DryRuns({"GPU0": "a card"}, simulated=True, rpc=(), folder=tmp_path / "true") as dry_runs:
        truth = dry_runs(asked)
    assert not dry_runs.limits
    monkeypatch.setattr(devices, "has_rpc", lambda: False)
    limited = DryRuns({"GPU0": "a card"}, simulated=True, rpc=(), folder=tmp_path / "limited")
    monkeypatch.setattr(limited, "_session", WithoutRpc())
    with limited:
        estimates = limited(asked)
    assert "without RPC" in limited.limits
    for request, true, estimate in zip(asked, truth, estimates, strict=True):
        assert not isinstance(true, str)
        assert not isinstance(estimate, str)
        assert request.resident(("GPU0",)).keys() == {HOST, "GPU0"}
        for name in true:
            one, other = true[name], estimate[name]
            assert (other.weights, other.kv, other.overhead) == (one.weights, one.kv, one.overhead)
            assert other.compute >= one.compute


@pytest.mark.parametrize("kind", [SHIPPED, *heads.KINDS])
def test_bytes_of_a_head(
    files: dict[str, tuple[Path, Path]], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check([one for ctx_size in (512, 8192) for one in requests(*files[kind], ctx_size)], tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("tiny-")])
def test_bytes_of_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", SHAPES[name])
    (known,) = read_headers([path])
    layers = known.header.layers
    kept = {"n_cpu_moe" if known.header.experts else "n_cpu_ffn": layers}
    placements = [*map(Placement, (0, 1, layers // 2, layers - 1, layers)), Placement(layers, **kept)]
    contexts = [ContextOptions(size, batch_size, 1, flash_attn="on") for size in (512, 8192) for batch_size in (1, 16)]
    check(
        [MemoryRequest(known.header, known.metadata_only, *one) for one in product(placements, contexts)],
        tmp_path,
        monkeypatch,
    )
