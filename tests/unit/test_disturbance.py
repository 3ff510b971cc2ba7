"""What disturbs a measurement, from counters that the system may lack."""

import psutil
import pytest

from ggufspec.hardware import disturbance, gpus, host
from ggufspec.hardware.disturbance import Disturbance, SystemCounters
from ggufspec.hardware.host import CpuUse


def counters(clock_s, all_s, own_s, disk_bytes=0):
    return SystemCounters(CpuUse(clock_s, all_s, own_s), disk_bytes)


def test_an_idle_machine_disturbs_nothing():
    assert counters(2.0, 3.0, 2.0).since(counters(1.0, 1.0, 0.0)).reason(2, 2) == ""


def test_others_count_where_they_take_a_cpu_that_a_thread_needs():
    seen = counters(2.0, 3.5, 2.0).since(counters(1.0, 0.0, 0.0))
    assert seen.others_cpus == pytest.approx(1.5)
    assert seen.reason(2, 2) == "other programs used 1.5 CPUs"
    assert seen.reason(2, 8) == ""


def test_weights_from_the_disk_are_named():
    seen = counters(2.0, 1.0, 1.0, 3 << 30).since(counters(1.0, 0.0, 0.0, 0))
    assert seen.reason(2, 2) == "3,221 MB of weights were read from the disk"


def test_the_first_gpu_is_named():
    assert Disturbance(gpus=("the clocks of A were reduced (heat)", "b")).reason(2, 2).startswith("the clocks of A")


@pytest.mark.parametrize("later_s", [1.0, 0.5, -3600.0])
def test_a_clock_that_stands_or_jumps_back_tells_nothing(later_s):
    assert counters(later_s, 9.0, 0.0, -5).since(counters(1.0, 0.0, 0.0)) == Disturbance()


def test_a_system_without_counters_is_an_idle_one(monkeypatch, tmp_path):
    def fail(**_):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "cpu_times", fail)
    monkeypatch.setattr(disturbance, "_IO", tmp_path / "io")
    before = SystemCounters.now()
    assert SystemCounters.now().since(before, with_gpus=True).reason(host.physical_cores(), host.usable_cpus()) == ""


@pytest.mark.parametrize("text", ["", "rchar: 1\n", "read_bytes: many\n", "read_bytes\n"])
def test_a_strange_io_file_counts_nothing(monkeypatch, tmp_path, text):
    (tmp_path / "io").write_text(text)
    monkeypatch.setattr(disturbance, "_IO", tmp_path / "io")
    assert SystemCounters.now().disk_bytes == 0


def test_the_real_counters_grow():
    before = SystemCounters.now()
    assert sum(range(10**6)) > 0
    seen = SystemCounters.now().since(before)
    assert seen.others_cpus <= host.usable_cpus() + 1
    assert seen.disk_bytes >= 0
    assert gpus.disturbances() == () or gpus.gpus()
