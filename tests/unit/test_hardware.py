"""The host, and NVIDIA cards through an NVML that is made up: a real library in child processes (``fake_nvml.c``)."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ggufspec.hardware import gpus, host
from ggufspec.schema.doctor import Gpu
from tests.support import nvml

GIB = 2**30
SURVEY = """
import dataclasses, json
from ggufspec.hardware import gpus
print(json.dumps([dataclasses.asdict(gpus.survey()), [card.index for card in gpus.gpus()], gpus.nvml_used_bytes()]))
"""


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def survey(fake):
    """``survey("card,bare")``: what :func:`gpus.survey` finds among these cards, in a process of its own."""

    def ask(cards, init="0"):
        done = subprocess.run(
            [sys.executable, "-c", SURVEY],
            env=os.environ | fake | {"FAKE_NVML": cards, "FAKE_NVML_INIT": init},
            capture_output=True,
            text=True,
            check=True,
        )
        found, indices, used = json.loads(done.stdout)
        assert done.stderr == ""
        assert indices == [card["index"] for card in found["cards"]]
        used_bytes = [card["used_bytes"] for card in found["cards"]]
        assert used == (sum(used_bytes) if used_bytes and None not in used_bytes else None)
        return found

    return ask


def test_a_card_and_all_that_it_tells(survey):
    found = survey("card")
    card = Gpu(
        index=0,
        name="NVIDIA GeForce RTX 4090",
        uuid="GPU-00000004",
        total_bytes=24 * GIB,
        free_bytes=23 * GIB,
        used_bytes=GIB,
        driver="575.57.08",
        compute_capability=(8, 9),
        pcie_generation=4,  # not the 1 of a link at rest
        pcie_width=16,
        pcie_max_generation=4,
        pcie_max_width=16,
        utilisation=0.37,
        pci_id="000f:c1:00.0",
    )
    everything = {"cards": [dataclasses.asdict(card)], "problems": [], "driver": card.driver, "cuda": (12, 9)}
    assert found == json.loads(json.dumps(everything))


def test_what_a_card_does_not_support_is_none_and_costs_no_card(survey):
    bare, card = survey("bare,card")["cards"]
    unknown = {key for key, value in bare.items() if value in (None, "", [])}
    assert unknown == {
        *("uuid", "pci_id", "compute_capability", "utilisation", "processes", "throttled"),
        *("pcie_generation", "pcie_width", "pcie_max_generation", "pcie_max_width"),
    }
    assert (bare["used_bytes"], card["compute_capability"]) == (GIB, [8, 9])


@pytest.mark.parametrize("card", ["3@nvmlDeviceGetMemoryInfo", "4@nvmlDeviceGetMemoryInfo", "empty"])
def test_a_card_that_shares_the_hosts_memory_stays_and_tells_none(survey, card):
    """GB10 and Jetson: not supported, or 0 bytes; a part of a card may not be permitted."""
    found = survey(f"{card},card")
    shared, other = found["cards"]
    assert (shared["name"], found["problems"]) == ("NVIDIA GeForce RTX 4090", [])
    assert [shared[f"{of}_bytes"] for of in ("total", "free", "used")] == [None] * 3
    assert (shared["pci_id"], shared["utilisation"], other["used_bytes"]) == ("000f:c1:00.0", 0.37, GIB)
    assert other["pci_id"] == "000f:c2:00.0"


def test_who_has_the_memory(survey):
    """Largest first; one that draws and computes is counted once; one of another container has no name."""
    (card,) = survey("busy")["cards"]
    assert card["processes"] == [
        {"pid": 4242, "name": "/usr/bin/blender", "used_bytes": 17 * GIB},
        {"pid": 77, "name": "", "used_bytes": 3 * GIB},
        {"pid": 88, "name": "", "used_bytes": None},  # neither its name nor its memory is known
    ]


def test_what_holds_the_clocks_down(survey):
    """Under the name that the driver knows; rest and the power limit hold nothing down."""
    cards = survey("card,hot,old,bare")["cards"]
    assert [card["throttled"] for card in cards] == [[], ["heat"], ["hardware slowdown", "heat, by hardware"], []]


@pytest.mark.parametrize(
    ("cards", "joules"),
    [
        ("card", 1.5),
        ("card,hot", 4.5),  # 1.5 J and then 3 J, as the counter goes on
        ("card,bare", None),  # a sum that leaves a card out is none
        ("", None),
        ("card,15@nvmlDeviceGetTotalEnergyConsumption", None),
        ("1@nvmlDeviceGetHandleByIndex_v2,card", None),
    ],
)
def test_energy_of_all_cards(fake, cards, joules):
    done = subprocess.run(
        [sys.executable, "-c", "from ggufspec.hardware import gpus; print(gpus.energy_j())"],
        env=os.environ | fake | {"FAKE_NVML": cards},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(joules)


def test_a_narrow_slot(survey):
    (card,) = survey("narrow")["cards"]
    link = {key: value for key, value in card.items() if key.startswith("pcie")}
    assert link == {"pcie_generation": 3, "pcie_width": 4, "pcie_max_generation": 4, "pcie_max_width": 16}


@pytest.mark.parametrize("call", ["GetHandleByIndex_v2", "GetMemoryInfo", "GetUUID", "GetComputeRunningProcesses_v3"])
@pytest.mark.parametrize("place", range(3))
def test_a_card_that_is_lost_costs_its_own_row(survey, call, place):
    cards = ["card", "busy"]
    cards.insert(place, f"15@nvmlDevice{call}")
    found = survey(",".join(cards))
    assert [(card["index"], card["used_bytes"]) for card in found["cards"]] == [
        (int(place < 1), GIB),
        (1 + (place < 2), 21 * GIB),
    ]
    assert found["problems"] == [f"card {place} does not answer: GPU is lost"]


@pytest.mark.parametrize("call", ["GetHandleByIndex_v2", "GetMemoryInfo", "GetUUID", "GetMaxPcieLinkWidth"])
def test_a_driver_that_is_lost_ends_the_list(survey, call):
    found = survey(f"card,1@nvmlDevice{call},card")
    assert [card["index"] for card in found["cards"]] == [0]
    assert found["problems"] == ["the NVIDIA driver stopped responding at card 1 of 3: Uninitialized"]
    assert found["driver"] == "575.57.08"


def test_a_field_that_fails_costs_the_field(survey):
    (card,) = survey("999@nvmlDeviceGetUtilizationRates")["cards"]
    assert (card["utilisation"], card["compute_capability"]) == (None, [8, 9])


def test_a_driver_without_cards(survey):
    assert survey("") == {"cards": [], "problems": [], "driver": "575.57.08", "cuda": [12, 9]}


@pytest.mark.parametrize(
    ("code", "problem"),
    [("9", "Driver Not Loaded"), ("18", "RM has detected an NVML/RM version mismatch."), ("42", "a made-up error")],
)
def test_a_driver_that_does_not_start(survey, code, problem):
    problems = [f"the NVIDIA driver does not start: {problem}"]
    assert survey("card", code) == {"cards": [], "problems": problems, "driver": None, "cuda": None}


def test_no_library_is_no_problem(survey):
    assert survey("card", "12") == {"cards": [], "problems": [], "driver": None, "cuda": None}


def test_without_pynvml_there_are_no_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert gpus.energy_j() is None
    assert (gpus.gpus(), gpus.nvml_used_bytes(), gpus.survey().problems) == ([], None, ())


# the host


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Put files into a root of its own: ``root({"proc/cpuinfo": "…"})``."""

    def put(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    monkeypatch.setattr(host, "_ROOT", tmp_path)
    return put


V2 = "0::{}\n"
V1 = "12:pids:/other\n4:memory:{0}\n3:cpu,cpuacct:{0}\n2:cpuset:/other\n1:name=systemd:/other\n"


@pytest.fixture
def cores(monkeypatch, root):
    """Set what the machine says: physical and logical cores, those allowed, and the container's quota."""

    def say(physical, logical, allowed, quota):
        monkeypatch.setattr(host.psutil, "cpu_count", lambda logical=True, n=(physical, logical): n[logical])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
        if quota is not None:
            root({"proc/self/cgroup": V2.format("/"), "sys/fs/cgroup/cpu.max": quota})

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


FAST, SLOW = "5200000", "3900000"


@pytest.mark.parametrize(
    ("file", "speeds", "allowed", "used"),
    [
        ("cpufreq/cpuinfo_max_freq", [FAST] * 8 + [SLOW] * 12, range(20), 8),
        ("cpufreq/cpuinfo_max_freq", [SLOW] * 12 + [FAST] * 8, range(20), 8),
        ("cpufreq/cpuinfo_max_freq", ["5800000"] * 2 + [FAST] * 6 + [SLOW] * 12, range(20), 8),  # two boost more
        ("cpu_capacity", ["1024"] * 8 + ["460"] * 12, range(20), 8),
        ("cpu_capacity", ["1024"] * 4 + ["930"] * 4 + ["280"] * 4, range(12), 8),
        ("cpu_capacity", ["1024"] * 8, range(8), 8),
        ("cpu_capacity", ["1024"] * 8 + ["460"] * 12, range(6, 20), 2),
        ("cpu_capacity", ["1024"] * 8 + ["460"] * 12, range(8, 20), 12),  # bound to slow ones alone
        ("cpu_capacity", ["1024"] * 8 + ["?"] * 12, range(20), 20),  # not told of all
    ],
)
def test_threads_start_from_the_fast_cores(monkeypatch, cores, root, file, speeds, allowed, used):
    cores(20, 20, 20, None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
    root({f"sys/devices/system/cpu/cpu{cpu}/{file}": speed for cpu, speed in enumerate(speeds)})
    assert host.physical_cores() == used


@pytest.mark.parametrize(("allowed", "quota", "used"), [(range(28), None, 8), ({0, 1, 2}, None, 2), (range(28), 4, 4)])
def test_fast_cores_of_two_threads_count_once(monkeypatch, cores, root, allowed, quota, used):
    """Eight of them, of two threads each, and twelve slow ones."""
    cores(20, 28, 28, quota and f"{quota}00000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
    folder = "sys/devices/system/cpu/cpu"
    siblings = [f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 16 else str(cpu) for cpu in range(28)]
    root({f"{folder}{cpu}/topology/thread_siblings_list": text for cpu, text in enumerate(siblings)})
    root({f"{folder}{cpu}/cpufreq/cpuinfo_max_freq": FAST if cpu < 16 else SLOW for cpu in range(28)})
    assert host.physical_cores() == used


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"sys/fs/cgroup/a/b/cpu.max": "200000 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 2),
        ({"sys/fs/cgroup/a/c/cpu.max": "200000 100000"}, 0),  # another group's
        ({"sys/fs/cgroup/a/b/cpu.max": "200000 0"}, 0),
    ],
)
def test_the_quota_of_every_group_on_the_way_up(root, files, cores):
    assert host._cgroup_cores(root(files | {"proc/self/cgroup": V2.format("/a/b")})) == cores


def version_2(folder, current, cached=0, **limits):
    """A group of version 2, sizes in GiB."""
    half = cached * GIB // 2
    stat = f"anon 1\ninactive_file {half}\nactive_file {half}\n"
    files = {"memory.current": str(current * GIB), "memory.stat": stat}
    files |= {f"memory.{key}": str(value * GIB) if value else "max" for key, value in limits.items()}
    return {f"sys/fs/cgroup{folder}/{name}": f"{text}\n" for name, text in files.items()}


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        (version_2("/a/b", 6, max=8, high=None), 2),
        (version_2("/a/b", 6, cached=4, max=8, high=None), 6),  # cached files go when memory is wanted
        (version_2("/a/b", 6, max=8, high=7), 1),
        (version_2("/a/b", 6, max=8, high=5), 0),  # above it already
        (version_2("/a/b", 6, max=None, high=None), None),
        (version_2("/a/b", 1, max=8) | version_2("/a", 6, max=9), 3),  # what the others of /a took
        (version_2("/a/b", 1, max=None) | version_2("/a", 6, max=9), 3),
        (version_2("/a/b", 1, max=8) | version_2("", 60, max=64), 4),
        (version_2("/a/c", 6, max=8), None),  # another group's
        ({"sys/fs/cgroup/a/b/memory.max": str(8 * GIB)}, 8),  # use not told
        ({}, None),
    ],
)
def test_memory_within_every_limit(root, groups, left):
    found = host._cgroup_memory_bytes(root(groups | {"proc/self/cgroup": V2.format("/a/b")}))
    assert found == (None if left is None else left * GIB)


def version_1(controller, folder, **files):
    return {f"sys/fs/cgroup/{controller}{folder}/{name.replace('__', '.')}": text for name, text in files.items()}


NO_LIMIT = version_1("memory", "", memory__limit_in_bytes="9223372036854771712")
TWO_GIB = version_1("memory", "/x", memory__limit_in_bytes=f"{2 * GIB}\n")
TWO_CORES = version_1("cpu", "/x", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
USED = f"cache 1\ninactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB // 2}\n"


@pytest.mark.parametrize(
    ("lines", "files", "left", "cores"),
    [
        (V1.format("/x"), TWO_GIB | TWO_CORES, 2, 2),
        ("4:memory:/x\n3:cpu:/x\n", TWO_GIB | TWO_CORES, 2, 2),
        (V1.format("/x/below"), TWO_GIB | TWO_CORES, 2, 2),
        (V1.format("/other"), TWO_GIB | TWO_CORES, None, 0),
        (
            V1.format("/x"),
            NO_LIMIT | version_1("cpu", "", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000"),
            None,
            0,
        ),
        # cached files go when memory is wanted, those of the groups below too
        (
            V1.format("/x"),
            TWO_GIB | version_1("memory", "/x", memory__usage_in_bytes=f"{2 * GIB}", memory__stat=USED),
            1.5,
            0,
        ),
        # in a container the path is the host's
        (V1.format("/docker/1"), version_1("memory", "", memory__limit_in_bytes=f"{2 * GIB}"), 2, 0),
        # both versions: by which of them each is limited
        (V1.format("/x") + V2.format("/x"), TWO_CORES | version_2("/x", 6, max=8), 2, 2),
        (V2.format("/x") + V1.format("/x"), TWO_CORES | version_2("/unified/x", 6, max=8), 2, 2),
        (V2.format("/x") + V1.format("/x"), TWO_GIB | version_2("/x", 7, max=8), 1, 0),
    ],
)
def test_limits_of_version_1_and_of_both(root, lines, files, left, cores):
    there = root(files | {"proc/self/cgroup": lines})
    assert host._cgroup_memory_bytes(there) == (None if left is None else left * GIB)
    assert host._cgroup_cores(there) == cores


def test_free_memory_is_what_is_left_everywhere(root, monkeypatch):
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GIB))
    assert host.free_memory_bytes() == 5 * GIB
    root(version_2("", 6, max=8) | {"proc/self/cgroup": V2.format("/")})
    assert host.free_memory_bytes() == 2 * GIB
    root(version_2("", 6, max=80))
    assert host.free_memory_bytes() == 5 * GIB


def test_free_disk(tmp_path):
    free = host.free_disk_bytes(tmp_path / "not" / "there" / "yet")
    assert abs(free - psutil.disk_usage(str(tmp_path)).free) < GIB
    assert host.free_disk_bytes(Path("nothing-of-this-name")) > 0


def test_this_machine():
    assert 1 <= host.physical_cores() <= os.cpu_count()
    assert 2**20 < host.peak_rss_bytes() < host.total_memory_bytes()
    assert 2**20 < host.free_memory_bytes() < host.total_memory_bytes()
    assert host.cpu_name().strip() == host.cpu_name() != ""


def test_peak_memory_is_not_the_parents():
    ballast = bytearray(b"x") * (300 << 20)
    program = "from ggufspec.hardware import host; print(host.peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 2**20 < int(done.stdout) < 150 << 20 < len(ballast)


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
def test_the_processors_name(monkeypatch, root, text, name):
    if text is not None:
        root({"proc/cpuinfo": text})
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    monkeypatch.setattr(host.platform, "machine", lambda: "arm")
    assert host.cpu_name() == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            """
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse2 avx2 fma avx512f amx_int8 f16c smep

processor\t: 1
model\t\t: 3
""",
            host.Processor("AuthenticAMD", "26", "2", "1", ("amx_int8", "avx2", "avx512f", "f16c", "fma")),
        ),
        (
            """
processor\t: 0
Features\t: fp asimd asimddp i8mm sve2
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 1
""",
            host.Processor("0x41", "8", "0xd4f", "1", ("asimd", "asimddp", "i8mm", "sve2")),
        ),
        ("", host.Processor("", "", "", "", ())),
    ],
)
def test_the_processors_numbers_and_vector_sets(root, text, expected):
    root({"proc/cpuinfo": text})
    assert host.processor() == expected
