"""Devices that stand for cards which are not here compute large batches with the host's weights, as cards do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggufspec.llamacpp import dryrun
from ggufspec.llamacpp.options import HOST, OP_OFFLOAD_MIN_BATCH, ContextOptions, Placement
from tests.support.shapes import SHAPES, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPES["tiny-llama"])


def asked(model: Path, *contexts: ContextOptions) -> list[dict[str, dryrun.AllocatedBytes]]:
    """Bytes by device with no layer on the simulated card."""
    runs = [dryrun.PlacedModel(model, Placement(0), context) for context in contexts]
    return [answer.devices for answer in dryrun.ask(dryrun.DryRunJob(simulated_devices=1), runs)]


def test_weights_of_the_host_are_copied_to_the_card_for_large_batches_only(model: Path) -> None:
    large, without, least, small = asked(
        model,
        ContextOptions(4096, 9, 1),
        ContextOptions(4096, 9, 1, op_offload=False),
        ContextOptions(4096, 9, 1, ubatch_size=OP_OFFLOAD_MIN_BATCH),
        ContextOptions(4096, 9, 1, ubatch_size=OP_OFFLOAD_MIN_BATCH - 1),
    )
    assert large["RPC0"].weights == least["RPC0"].weights == 0
    assert large["RPC0"].compute > least["RPC0"].compute > 0
    for none in (without, small):
        assert none.get("RPC0", dryrun.AllocatedBytes(0, 0, 0)).compute == 0
    assert large[HOST].weights == small[HOST].weights


def test_a_simulated_card_is_used_alone(model: Path) -> None:
    """Whatever other devices llama.cpp sees."""
    runs = [dryrun.PlacedModel(model, Placement(-1), ContextOptions(512, 9, 1))]
    for count in (1, 2):
        (answer,) = dryrun.ask(dryrun.DryRunJob(simulated_devices=count), runs)
        assert {name for name in answer.devices if name != HOST} == {f"RPC{i}" for i in range(count)}
