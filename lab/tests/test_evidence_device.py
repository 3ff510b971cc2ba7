"""The device that evidence is taken on: why there is none, who else uses it, a worker on loopback, its memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import psutil
import pytest

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.hardware.gpus import GpuSurvey, gpus
from ggufspec.llamacpp import probe
from ggufspec.llamacpp.devices import Device
from ggufspec.schema.doctor import Gpu, GpuProcess
from lab.evidence_device import LocalCard, Loopback, Meter, find_card, open_site, others
from lab.evidence_documents import Card

GIB = 2**30
GPU = Gpu(0, "NVIDIA Test", "GPU-0", 24 * GIB, 23 * GIB, 300 << 20, "575.57")
CPU = Device("CPU", "a processor", "cpu", 8 * GIB, 16 * GIB)
CUDA = Device("CUDA0", "NVIDIA Test", "gpu", 23 * GIB, 24 * GIB)
VULKAN = Device("Vulkan0", "A card of another maker", "gpu", 11 * GIB, 12 * GIB)
NOTHING = GpuSurvey((), (), None)


def test_the_card_that_is_here() -> None:
    found = find_card("auto", probe.ProbeResult(("CUDA", "CPU"), (CUDA, CPU)), GpuSurvey((GPU,), (), "575.57"))
    assert (found.name, found.kind, found.driver, found.total_bytes) == ("CUDA0", "cuda", "575.57", 24 * GIB)
    other = find_card("vulkan", probe.ProbeResult(("Vulkan", "CPU"), (VULKAN, CPU)), NOTHING)
    assert (other.name, other.kind, other.driver) == ("Vulkan0", "vulkan", "")


@pytest.mark.parametrize(
    ("name", "devices", "backends", "survey", "said", "hint"),
    [
        ("cuda", (CPU,), ("CPU",), NOTHING, "no NVIDIA driver", "--device rpc"),
        ("auto", (CPU,), ("CPU",), NOTHING, "no NVIDIA driver", "--device rpc"),
        ("cuda", (CPU,), ("CPU",), GpuSurvey((), ("the NVIDIA driver does not start",), None), "does not start", "rpc"),
        ("cuda", (CPU,), ("CPU",), GpuSurvey((), (), "575.57"), "driver 575.57 finds no card", "lspci"),
        ("cuda", (CPU,), ("CPU",), GpuSurvey((GPU,), (), "575.57"), "without CUDA and leaves NVIDIA Test", "bootstrap"),
        ("cuda", (CPU,), ("CUDA", "CPU"), GpuSurvey((GPU,), (), "470.1"), "driver 470.1 .* older than", "nvidia-smi"),
        ("metal", (CUDA, CPU), ("CUDA",), NOTHING, "no device called metal", "it has CUDA0, CPU, and rpc"),
        ("auto", (CUDA, VULKAN), ("CUDA",), NOTHING, "of one card, and llama.cpp sees 2", "CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_why_there_is_none(name, devices, backends, survey, said, hint) -> None:
    with pytest.raises(GgufspecError, match=said) as raised:
        find_card(name, probe.ProbeResult(backends, devices), survey)
    assert hint in raised.value.hint


def test_others_on_the_card_are_named() -> None:
    idle = GpuSurvey((GPU,), (), "575.57")
    assert others(idle) == ""
    working = GpuProcess(123, "/usr/bin/python3", 20 * GIB)
    busy = replace(GPU, used_bytes=21 * GIB, utilisation=0.97, processes=(working,))
    said = others(GpuSurvey((busy,), (), "575.57"))
    assert said == "NVIDIA Test has 21.0 GiB in use and is 97% busy: python3 (123, 20.0 GiB)"
    hidden = others(GpuSurvey((replace(GPU, used_bytes=5 * GIB),), (), "575.57"))
    assert hidden == "NVIDIA Test has 5.0 GiB in use: by processes that cannot be seen from here"


def test_a_card_is_looked_at_when_its_memory_has_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([900, 500, 100, 100, 7])
    monkeypatch.setattr("ggufspec.hardware.gpus.nvml_used_bytes", lambda: next(readings))
    card = LocalCard(Card("CUDA0", "NVIDIA Test", "cuda", 24 * GIB, None, "575"))
    card.settle()
    assert card.used_bytes() == 7
    unwatched = LocalCard(Card("Vulkan0", "A card", "vulkan", 24 * GIB, None))
    unwatched.settle()
    assert unwatched.used_bytes() is None


def test_no_card_on_this_machine() -> None:
    """There is none where the tests run."""
    if gpus():
        pytest.skip("there is one here")
    with pytest.raises(GgufspecError) as raised, open_site("cuda", 1, share=True):
        pass
    assert "--device rpc" in raised.value.hint


def test_a_worker_on_loopback_is_a_device_and_ends_with_its_block() -> None:
    with open_site("rpc", 1, share=False) as (site, notes):
        assert isinstance(site, Loopback)
        assert (site.card.name, site.card.kind) == ("RPC0", "rpc")
        assert "speed is this machine's CPU's" in notes[0]
        assert "resident memory" in notes[1]
        first = site.endpoints()
        assert site.endpoints() == first
        assert site._process is not None
        process = psutil.Process(site._process.pid)
        used = site.used_bytes()
        assert used is not None
        assert used > 1 << 20
        here = probe.inspect(first)
        assert [device.name for device in here.devices if device.kind == "gpu"] == ["RPC0"]
        process.kill()  # it may die over a message that it does not expect
        process.wait()
        second = site.endpoints()
        assert probe.inspect(second).devices
        process = psutil.Process(site._process.pid)
    assert not process.is_running()
    assert site.used_bytes() is None


def test_a_meter_sees_the_most_that_memory_rose_by() -> None:
    used, seen = 1000, threading.Event()

    def look() -> int:
        seen.set()
        return used

    with Meter(look) as meter:
        seen.clear()
        used = 5000
        assert seen.wait(30)
        meter.look()
        used = 2000
        meter.look()
    assert meter.rise_bytes == 4000
    with Meter(lambda: None) as blind:
        blind.look()
    assert blind.rise_bytes is None


def test_a_card_beside_a_worker_would_take_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "inspect", lambda rpc=(): probe.ProbeResult(("CUDA",), (CUDA, CPU)))
    with pytest.raises(UsageError, match="sees NVIDIA Test too") as raised:
        Loopback(1)
    assert "CUDA_VISIBLE_DEVICES=" in raised.value.hint
