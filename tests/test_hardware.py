"""The host, and NVIDIA cards through an NVML that is made up here."""

import os
import sys
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from ggufspec.hardware import gpus, host


class NVMLError(Exception):
    pass


class Nvml(ModuleType):
    """``pynvml`` with cards (name, total, used); a card may name the call at which it fails."""

    NVMLError = NVMLError

    def __init__(self, *cards, init=None):
        super().__init__("pynvml")
        self.cards, self.init, self.open = cards, init, 0

    def nvmlInit(self):
        if self.init:
            raise self.init
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        assert self.open
        return len(self.cards)

    def nvmlSystemGetDriverVersion(self):
        return "575.1"

    def answer(self, card, call):
        assert self.open
        if card == call:
            raise NVMLError(call)
        return card

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.answer(self.cards[index], "handle")

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(total=self.answer(card, "memory")[1], used=card[2])

    def nvmlDeviceGetName(self, card):
        return self.answer(card, "name")[0]


@pytest.fixture
def plug(monkeypatch):
    def put(*cards, init=None):
        nvml = Nvml(*cards, init=init)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def test_cards_in_order(plug):
    nvml = plug(("A", 100, 10), ("B", 200, 5))
    assert gpus.gpus() == [gpus.Gpu(0, "A", 100, 10, "575.1"), gpus.Gpu(1, "B", 200, 5, "575.1")]
    assert gpus.used_bytes() == 15
    assert nvml.open == 0


@pytest.mark.parametrize("init", [NVMLError("Driver Not Loaded"), OSError("libnvidia-ml.so.1")])
def test_without_a_driver_there_are_no_rows(plug, init):
    plug(("A", 100, 10), init=init)
    assert (gpus.gpus(), gpus.used_bytes()) == ([], 0)


def test_without_the_library_there_are_no_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert (gpus.gpus(), gpus.used_bytes()) == ([], 0)


def test_a_driver_without_cards(plug):
    nvml = plug()
    assert (gpus.gpus(), nvml.open) == ([], 0)


@pytest.mark.parametrize("call", ["handle", "memory"])
@pytest.mark.parametrize("place", range(3))
def test_a_card_that_fails_costs_its_own_row(plug, call, place):
    cards = [("A", 100, 10), ("B", 200, 5)]
    cards.insert(place, call)
    nvml = plug(*cards)
    assert [(gpu.name, gpu.index) for gpu in gpus.gpus()] == [("A", place < 1), ("B", 1 + (place < 2))]
    assert gpus.used_bytes() == 15
    assert nvml.open == 0


def test_a_driver_that_fails_behind_its_start_costs_the_rows_only(plug, monkeypatch):
    nvml = plug(("A", 100, 10))

    def lost():
        raise NVMLError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lost)
    assert gpus.gpus() == []
    assert nvml.open == 0


def test_a_shutdown_that_fails_costs_nothing(plug, monkeypatch):
    nvml = plug(("A", 100, 10))

    def lost():
        raise NVMLError("Uninitialized")

    monkeypatch.setattr(nvml, "nvmlShutdown", lost)
    assert gpus.used_bytes() == 10


# the host


@pytest.fixture
def cores(monkeypatch):
    """Set what the machine says: physical and logical cores, those allowed, and the container's quota."""

    def say(physical, logical, allowed, quota):
        monkeypatch.setattr(host.psutil, "cpu_count", lambda logical=True, n=(physical, logical): n[logical])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
        monkeypatch.setattr(host, "Path", lambda path: SimpleNamespace(read_text=lambda: files(path, quota)))

    def files(path, quota):
        assert path == "/sys/fs/cgroup/cpu.max"
        if quota is None:
            raise FileNotFoundError(path)
        return quota

    return say


@pytest.mark.parametrize(
    ("physical", "logical", "allowed", "quota", "used"),
    [
        (8, 16, 16, None, 8),  # two threads on one core gain nothing
        (8, 16, 3, None, 3),
        (8, 16, 16, "max 100000\n", 8),
        (8, 16, 16, "400000 100000\n", 4),
        (8, 16, 16, "250000 100000\n", 2),
        (8, 16, 16, "50000 100000\n", 1),
        (8, 16, 2, "400000 100000\n", 2),
        (8, 16, 16, "what is this", 8),
        (None, 6, 6, None, 6),  # in some virtual machines
        (None, None, 4, None, 1),
    ],
)
def test_cores_that_may_be_used(cores, physical, logical, allowed, quota, used):
    cores(physical, logical, allowed, quota)
    assert host.physical_cores() == used


def test_this_machine():
    assert 1 <= host.physical_cores() <= os.cpu_count()
    assert 2**20 < host.peak_rss_bytes() < host.total_memory_bytes()
    assert host.cpu_name().strip() == host.cpu_name() != ""


def test_peak_memory_is_in_bytes_and_counts_what_is_freed():
    size = 2**26
    before = psutil.Process().memory_info().rss
    block = bytearray(b"x" * size)
    del block
    assert host.peak_rss_bytes() >= before + size


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor: 0\nmodel name\t: A: fast CPU \nflags: x\n", "A: fast CPU"), ("processor: 0\n", "arm"), (None, "arm")],
)
def test_the_processors_name(monkeypatch, text, name):
    def read_text():
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(host, "Path", lambda _: SimpleNamespace(read_text=read_text))
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    monkeypatch.setattr(host.platform, "machine", lambda: "arm")
    assert host.cpu_name() == name
