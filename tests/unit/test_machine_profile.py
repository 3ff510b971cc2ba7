"""What a measurement means and for how long it counts, the catalogue against public figures, a small real one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_rpc import worker  # noqa: F401

from ggufspec.api.pairs import open_pair, spec_of
from ggufspec.api.plan import make_plan
from ggufspec.cli import inputs
from ggufspec.errors import ChildError, ModelError
from ggufspec.files import cache
from ggufspec.hardware import host
from ggufspec.hardware.cards import find_card
from ggufspec.hardware.disturbance import Disturbance
from ggufspec.llamacpp.devices import Device, offloading
from ggufspec.llamacpp.gguf import parse_header, write_model
from ggufspec.llamacpp.model import Context, ContextOptions, Model
from ggufspec.models.header import interpret
from ggufspec.planning import machine_profile
from ggufspec.planning.machine_profile import (
    DummyModel,
    DummyTiming,
    MachineProfileJob,
    MachineProfileResult,
    dummy_models,
    expected_speeds,
    load_speeds,
)
from ggufspec.planning.memory import HOST
from ggufspec.planning.plan import Plan
from ggufspec.planning.speed import DeviceProfile, MachineProfile, weight_bytes
from ggufspec.planning.verdict import why
from ggufspec.settings.table import Settings

CPU = Device("CPU", "a processor", "cpu", 0, 0)
CUDA = Device("CUDA0", "NVIDIA GeForce RTX 4090", "gpu", 0, 0)
RPC = Device("RPC0", "127.0.0.1:50052", "gpu", 0, 0)
TINY = MachineProfileJob(
    threads=1,
    types=("f16", "q4_K"),
    batch_sizes=(1, 2, 4),
    wide_bytes=2**22,
    rounds=2,
    model_s=0.01,
    cache_types=("q8_0",),
    heads=(128,),
    depth=128,
)


# ---- dummy models


@pytest.mark.parametrize("kind", machine_profile.TYPES)
def test_a_stand_in_is_a_sparse_model_of_zeros(kind: str, tmp_path: Path):
    dummy = DummyModel(kind, 512, 768, 3)
    path = tmp_path / "model.gguf"
    dummy.write(path)
    assert path.stat().st_blocks * 512 < 2**15 < path.stat().st_size
    header = interpret(path.name, [parse_header(path.read_bytes())], path.stat().st_size)
    assert (header.blocks, header.embedding, header.heads[0], header.kv_heads[0]) == (3, 512, 8, 2)
    assert {t.type for t in header.tensors if "norm" not in t.name} == {kind}
    numbers = sum(math.prod(t.shape) for t in header.tensors if "norm" not in t.name)
    assert numbers == dummy.numbers + 512 * dummy.vocabulary  # the embedding is only looked up
    with Model(path) as model:
        assert model.parameters == sum(math.prod(t.shape) for t in header.tensors)
        context = Context(model, ContextOptions(ctx_size=16, max_outputs=4, threads=1))
        assert not context.decode([1, 2, 3, 4], 4).any()  # zeros, no NaN
        context.close()


def test_wide_stand_ins_have_the_bytes_that_were_asked_for():
    narrow, more, *wide = dummy_models(machine_profile.TYPES, 128 * 2**20)
    assert narrow.blocks < more.blocks
    assert [dummy.kind for dummy in wide] == list(machine_profile.TYPES)
    bits = {"f16": 16, "q8_0": 8.5, "q6_K": 6.5625, "q4_0": 4.5, "q4_K": 4.5, "q3_K": 3.4375}
    for dummy in wide:
        size = dummy.numbers * bits[dummy.kind] / 8
        assert 96 * 2**20 < size < 260 * 2**20
    assert all(dummy.width < 1024 for dummy in dummy_models(("f16",), 2**20))


@pytest.mark.parametrize(("kind", "shape"), [("q9_K", (256,)), ("f17", (8, 8))])
def test_a_type_that_ggml_does_not_have_is_refused(kind: str, shape: tuple[int, ...], tmp_path: Path):
    with pytest.raises(ValueError, match=kind):
        write_model(tmp_path / "model.gguf", {"general.architecture": "llama"}, [("weight", kind, shape)])


def test_a_model_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(ModelError, match="cannot be written"):
        write_model(tmp_path / "none" / "model.gguf", {"general.architecture": "llama"}, [("weight", "f16", (8,))])


def test_every_scalar_survives(tmp_path: Path):
    metadata: dict[str, Any] = {"general.architecture": "llama", "a": 7, "b": 0.5, "c": True, "d": "ü"}
    write_model(tmp_path / "model.gguf", metadata, [("x", "q4_0", (64, 3)), ("y", "f32", (5,))])
    read = parse_header((tmp_path / "model.gguf").read_bytes())
    assert read.metadata == metadata
    assert [(t.name, t.type, t.shape, t.size_bytes) for t in read.tensors] == [
        ("x", "q4_0", (64, 3), 108),
        ("y", "f32", (5,), 20),
    ]
    last = read.tensors[-1]
    assert (tmp_path / "model.gguf").stat().st_size >= read.data_offset + last.offset + last.size_bytes


# ---- what a measurement means

NARROW, MORE, WIDE = DummyModel("f16", 256, 256, 4), DummyModel("f16", 256, 256, 28), DummyModel("f16", 2048, 8192, 2)


def made_up(pass_s: float, layer_s: float, bandwidth: float, types: dict[str, dict[int, float]]) -> list[DummyTiming]:
    """Timings of a device with these speeds; ``types`` gives T(n) / T(1) of each."""

    def timing(dummy: DummyModel, batch_latency: dict[int, float]) -> DummyTiming:
        size = dummy.numbers * 2
        fixed = pass_s + dummy.blocks * layer_s
        return DummyTiming(
            dummy, size, 1.0, {n: fixed + size / bandwidth * factor for n, factor in batch_latency.items()}
        )

    first = next(iter(types.values()))
    wide = [timing(replace(WIDE, kind=kind), batch_latency) for kind, batch_latency in types.items()]
    return [timing(NARROW, first), timing(MORE, first), *wide]


def test_costs_are_told_apart():
    batch_latencies = {"f16": {1: 1.0, 2: 1.5, 8: 3.0}, "q4_K": {1: 1.0, 2: 2.0, 8: 8.0}}
    timings = {HOST: made_up(1e-4, 3e-5, 4e10, batch_latencies), "CUDA0": made_up(3e-4, 2e-5, 8e11, batch_latencies)}
    there = machine_profile.interpret_timings(MachineProfileResult(timings, (CPU, CUDA)), 1e10, "made up")
    assert there.pass_s == pytest.approx(1e-4)
    assert there.crossing_s == pytest.approx(1e-4)  # there and back
    assert (there.link_bytes_per_s, there.streams, there.origin) == (1e10, True, "made up")
    for name, bandwidth, layer_s in ((HOST, 4e10, 3e-5), ("CUDA0", 8e11, 2e-5)):
        device = there.device(name)
        assert device.layer_s == pytest.approx(layer_s)
        assert device.bandwidth_bytes_per_s == pytest.approx(bandwidth)
        assert device.by_type == pytest.approx({"f16": bandwidth, "q4_K": bandwidth})
        assert {
            kind: pytest.approx(batch_latency) for kind, batch_latency in batch_latencies.items()
        } == device.batch_latencies
        widest_s = WIDE.numbers * 2 / bandwidth * 3
        assert device.flops_per_s == pytest.approx(2 * WIDE.numbers * 8 / widest_s)
        assert device.source == "measured"


def test_noise_makes_no_negative_costs():
    timings = {HOST: made_up(0.0, 0.0, 4e10, {"f16": {1: 1.0}})}
    first, second, wide = timings[HOST]
    timings[HOST] = [first, replace(second, seconds={1: first.seconds[1] / 2}), wide]
    there = machine_profile.interpret_timings(MachineProfileResult(timings, (CPU,)), 1e10, "noise")
    assert there.pass_s >= 0
    assert there.device(HOST).layer_s >= 0
    assert there.device(HOST).bandwidth_bytes_per_s > 0


def test_the_link_to_workers_alone_is_what_loading_reached():
    timings = {name: made_up(1e-4, 3e-5, 4e10, {"f16": {1: 1.0}}) for name in (HOST, "RPC0")}
    there = machine_profile.interpret_timings(MachineProfileResult(timings, (CPU, RPC)), 1e10, "made up")
    assert there.link_bytes_per_s == WIDE.numbers * 2
    assert not there.streams


@pytest.mark.parametrize(
    ("kinds", "expected_names"),
    [
        ("CPU cpu", []),
        ("CPU cpu, CUDA0 gpu, RPC0 gpu", ["RPC0", "CUDA0"]),
        ("Vulkan0 igpu, CPU cpu", ["Vulkan0"]),
        ("Vulkan0 igpu, CUDA0 gpu, CPU cpu", ["CUDA0"]),
        ("BLAS accelerator, CPU cpu", []),
    ],
)
def test_devices_are_those_that_llama_cpp_offloads_to(kinds: str, expected_names: list[str]):
    here = [Device(*pair.split()[:1], "", pair.split()[1], 0, 0) for pair in kinds.split(", ")]
    assert [device.name for device in offloading(here)] == expected_names


# ---- a small real one


def sane(there: MachineProfile) -> bool:
    figures = [there.link_bytes_per_s]
    for device in there.devices.values():
        figures += [device.bandwidth_bytes_per_s, device.flops_per_s, *device.by_type.values()]
        figures += [value for batch_latency in device.batch_latencies.values() for value in batch_latency.values()]
    fixed = [there.pass_s, there.crossing_s, *(device.layer_s for device in there.devices.values())]
    return all(0 < figure < math.inf for figure in figures) and all(0 <= cost < 1 for cost in fixed)


def test_the_host_and_a_worker_are_measured_and_kept(
    worker: tuple[str, Any],  # noqa: F811
    tmp_path: Path,
):
    events: list[dict[str, Any]] = []
    spec = replace(TINY, rpc=(worker[0],))
    there = machine_profile.measure_machine(tmp_path, spec, on_event=events.append)
    assert sane(there)
    assert set(there.devices) == {HOST, "RPC0"}
    assert {kind for device in there.devices.values() for kind in device.by_type} == {"f16", "q4_K"}
    assert set(there.device("RPC0").batch_latencies["q4_K"]) == {1, 2, 4}
    assert there.origin.startswith("measured on ")
    assert not there.streams
    assert [event["type"] for event in events if event["device"] == HOST] == ["f16", "f16", "f16, q4_K", "attention"]
    assert len(events) == 4 + 5  # a worker's wide models are timed one by one
    for device in there.devices.values():
        assert set(device.attention["q8_0"]) == {128}
        assert device.attention["q8_0"][128].keys() <= {1, 8}  # a rise that is not noise
    (kept,) = json.loads((tmp_path / "calibration.json").read_text()).values()
    assert set(kept) == {"identity", "speed"}
    known = machine_profile._kept(tmp_path, 1)
    assert known is not None
    assert known.speed == there
    everywhere = expected_speeds({"RPC0": None}, folder=tmp_path, threads=1)
    assert everywhere == replace(there, memory_bytes=everywhere.memory_bytes)


def test_a_measurement_that_is_stopped_ends():
    class Stop:
        def is_set(self) -> bool:
            return True

    result = machine_profile.run(TINY, lambda _: None, Stop())  # type: ignore[arg-type]
    assert result.timings == {HOST: []}


# ---- measured where a plan needs it


def test_a_plan_measures_what_it_does_not_know_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    specs: list[MachineProfileJob] = []

    def measure(folder: Path, spec: MachineProfileJob, **_: Any) -> MachineProfile:
        specs.append(spec)
        speed = profile(dict.fromkeys(spec.types, 1e10))
        machine_profile._keep(folder, speed, machine_profile.machine_identity(spec.threads))
        return speed

    def planned(**given: Any) -> Plan:
        settings = Settings(threads=1, ctx_size=512, **given)
        return make_plan(open_pair(spec_of("demo"), settings), calibrate=inputs.calibrator(settings)).plan

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_profile, "measure_machine", measure)
    guess = planned(no_calibrate=True)
    assert guess.is_guessed
    assert "Without a draft: guessed " in why(planned(no_calibrate=True, drafter="none"))
    assert not planned(vram=("24GiB",)).is_guessed  # all of it is on the card
    assert specs == []
    prediction = planned()
    assert [(spec.threads, spec.cache_types) for spec in specs] == [(1, ("f16",))]
    assert "measuring this machine's speed" in capsys.readouterr().err
    assert not prediction.is_guessed
    assert prediction.target_only.tokens_per_s < guess.target_only.tokens_per_s
    planned()
    assert len(specs) == 1  # it is kept
    disturbed = profile(dict.fromkeys(specs[0].types, 1e10), BUSY)
    machine_profile._keep(tmp_path / "ggufspec", disturbed, machine_profile.machine_identity(1))
    monkeypatch.setattr(host, "others_cpus", lambda *_: 0.0)
    planned()
    assert len(specs) == 1  # it would be faster now, but once a day is enough
    (tmp_path / "ggufspec" / "daily.json").unlink()
    monkeypatch.setattr(cache, "_today", set())
    planned()
    assert len(specs) == 2

    def fails(*_: Any, **__: Any) -> MachineProfile:
        raise ChildError("llama.cpp died", "try again")

    monkeypatch.setattr(machine_profile, "measure_machine", fails)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert planned().is_guessed
    assert "could not be measured, and is guessed: llama.cpp died" in capsys.readouterr().err
    assert inputs.calibrator(Settings(no_calibrate=True), always=True) is not None  # the variable may be set


# ---- beside other programs


BUSY = "other programs used 1.0 CPUs"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Disturbance(), ""),
        (Disturbance(others_cpus=0.4), ""),
        (Disturbance(others_cpus=1.0), BUSY),
        (Disturbance(disk_bytes=3 << 30), "3,221 MB of weights were read from the disk"),
    ],
)
def test_what_disturbed_a_measurement_is_kept_with_it(monkeypatch, tmp_path: Path, seen: Disturbance, why: str):
    result = MachineProfileResult({HOST: made_up(1e-4, 3e-5, 4e10, {"f16": {1: 1.0}})}, (CPU,), seen)
    monkeypatch.setattr(machine_profile.child, "call", lambda *_, **__: result)
    monkeypatch.setattr(host, "usable_cpus", lambda: 2)
    spec = MachineProfileJob(2)
    measured = machine_profile.measure_machine(tmp_path, spec)
    assert measured.disturbed == why
    assert measured.origin.endswith(f" while {why}") == bool(why)
    assert machine_profile.expected_speeds({}, folder=tmp_path, threads=2).disturbed == why  # a plan's


def test_every_plan_says_that_its_measurement_was_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_profile._keep(
        tmp_path / "ggufspec",
        profile(dict.fromkeys(machine_profile.TYPES, 1e10), BUSY),
        machine_profile.machine_identity(1),
    )

    def notes(**given: Any) -> list[str]:
        result = make_plan(open_pair(spec_of("demo"), Settings(threads=1, ctx_size=512, **given)))
        assert result.plan.notes == result.document().notes
        return [note for note in result.plan.notes if "measured" in note]

    said = f"this machine was measured while {BUSY}: measure it again with ggufspec plan --calibrate when it is idle"
    for _ in range(2):
        assert notes() == [said]
    assert notes(gpu=("RTX 4090",), gpu_layers=1) == [said]
    assert notes(gpu=("RTX 4090",)) == []  # all of it is on the card
    assert notes(cpu="8xavx2") == []  # a CPU that is assumed


def test_a_plan_expects_a_speed_of_the_target_where_all_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def planned(disturbed: str = "", **given: Any) -> Plan:
        speed = profile(dict.fromkeys(machine_profile.TYPES, 1e10), disturbed)
        machine_profile._keep(tmp_path / "ggufspec", speed, machine_profile.machine_identity(1))
        return make_plan(open_pair(spec_of("demo"), Settings(threads=1, ctx_size=512, **given))).plan

    plan = planned()
    expected_s = plan.target_s(plan.target_only)
    assert expected_s is not None
    assert 1 / (expected_s[0] + 256 * expected_s[1]) == pytest.approx(plan.target_only.tokens_per_s, rel=0.02)
    for other in (planned(BUSY), planned(gpu=("RTX 4090",)), planned(cpu="8xavx2")):
        assert other.target_s(other.target_only) is None


def profile(types: dict[str, float], disturbed: str = "", heads: tuple[int, ...] = (64, 128)) -> MachineProfile:
    """A host that reads these types with these bandwidths."""
    attention = {"f16": {head: {1: 1e9} for head in heads}}
    latencies = {kind: {1: 1.0, 2: 1.5} for kind in types}
    device = DeviceProfile(1e10, 1e12, 1e-5, "measured", dict(types), latencies, attention)
    return MachineProfile({HOST: device}, 1e-4, 1e-4, 1e10, "made up", disturbed=disturbed)


def test_a_measurement_is_kept_beside_what_was_known():
    before, more = profile({"f16": 1.0, "q4_K": 2.0}, heads=(64,)), profile({"f16": 3.0, "q6_K": 4.0}, heads=(128,))
    both = machine_profile.merged(more, before)
    assert both.device(HOST).by_type == {"f16": 3.0, "q4_K": 2.0, "q6_K": 4.0}
    assert set(both.device(HOST).batch_latencies) == {"f16", "q4_K", "q6_K"}
    assert set(both.device(HOST).attention["f16"]) == {64, 128}
    assert machine_profile.merged(more, None) == more


def test_a_disturbed_measurement_takes_the_place_of_none_but_a_disturbed_one():
    good, busy = profile({"f16": 1.0}), profile({"f16": 3.0}, BUSY)
    assert machine_profile.merged(busy, good) == good
    assert machine_profile.merged(good, busy) == good
    assert machine_profile.merged(busy, busy) == busy
    added = machine_profile.merged(profile({"f16": 3.0, "q6_K": 4.0}, BUSY), good)
    assert added.device(HOST).by_type == {"f16": 1.0, "q6_K": 4.0}
    assert added.disturbed == BUSY


def test_what_is_due_is_what_is_not_known(tmp_path: Path):
    needed: list[bool] = []

    def due(*types: str, others_cpus: float = 0.0, threads: int = 2, head: int = 64) -> tuple[set[str], str]:
        spec = MachineProfileJob(threads, types=types, heads=(head,), cache_types=("f16",))
        found = machine_profile.due(tmp_path, spec, 2, lambda: others_cpus)
        needed.append(bool(found and found.needs))
        return (set(found.spec.types), found.why) if found else (set(), "")

    def kept(speed: MachineProfile) -> None:
        machine_profile._keep(tmp_path, speed, machine_profile.machine_identity(2, (CPU,)))

    assert due("f16") == ({"f16"}, "it is not known yet")
    kept(profile({"f16": 1.0, "q4_K": 2.0}, heads=(64,)))
    assert due("f16", "q4_K") == (set(), "")
    assert due("f16", "q5_0", "q6_K") == ({"q5_0", "q6_K"}, "q5_0, q6_K were not measured yet")
    assert due("q4_K", head=128) == ({"q4_K"}, "heads of 128 were not measured yet")
    assert due("f16", threads=1) == ({"f16"}, "it is not known yet")
    kept(profile({"f16": 1.0, "q4_K": 2.0}, BUSY, heads=(64,)))
    assert due("f16") == due("f16", others_cpus=0.4) == ({"f16", "q4_K"}, f"it was measured while {BUSY}")
    assert due("f16", others_cpus=1.0) == (set(), "")  # not yet
    assert due("q5_0", "f16", others_cpus=1.0) == ({"q5_0"}, "q5_0 were not measured yet")
    assert needed == [True, False, False, False, True, False, False, False, True]


def test_the_types_and_heads_of_models(target: Path, draft: Path):
    headers = [interpret(path.name, [parse_header(path.read_bytes())], path.stat().st_size) for path in (target, draft)]
    types = machine_profile.types_of(headers)
    counted = {kind: sum(weight_bytes(header).get(kind, 0) for header in headers) for kind in types}
    assert sorted(counted.values(), reverse=True) == list(counted.values())
    assert "f32" not in types  # norms
    assert set(machine_profile.heads_of(headers)) <= {64, 128}


def keep(folder: Path, here: tuple[Device, ...], threads: int = 2) -> MachineProfile:
    timings = {HOST: made_up(1e-4, 3e-5, 4e10, {"f16": {1: 1.0, 2: 1.5}})}
    timings |= {d.name: made_up(3e-4, 2e-5, 8e11, {"f16": {1: 1.0, 2: 1.2}}) for d in here if d.kind == "gpu"}
    there = machine_profile.interpret_timings(MachineProfileResult(timings, here), 1e10, "measured once")
    machine_profile._keep(folder, there, machine_profile.machine_identity(threads, here))
    return there


def test_it_is_read_back(tmp_path: Path):
    there = keep(tmp_path, (CPU, CUDA))
    assert load_speeds(tmp_path, 2, (CPU, CUDA)) == there


@pytest.mark.parametrize("change", ["threads", "devices", "cpu", "version", "damage", "schema", "absence"])
def test_it_is_ignored_when_the_machine_has_changed(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep(tmp_path, (CPU, CUDA))
    file = tmp_path / "calibration.json"
    threads, here = 2, (CPU, CUDA)
    if change == "threads":
        threads = 4
    elif change == "devices":
        here = (CPU, replace(CUDA, description="NVIDIA GeForce RTX 3090"))
    elif change == "cpu":
        monkeypatch.setattr(host, "cpu_name", lambda: "another")
    elif change == "version":
        monkeypatch.setattr(machine_profile, "version", lambda _: "9.9.9")
    elif change == "damage":
        file.write_text(file.read_text()[:100])
    elif change == "schema":
        kept = json.loads(file.read_text())
        file.write_text(json.dumps({key: entry | {"speed": {"devices": 3}} for key, entry in kept.items()}))
    else:
        file.unlink()
    assert load_speeds(tmp_path, threads, here) is None


def test_what_was_measured_goes_before_the_catalogue(tmp_path: Path):
    card, other = find_card("RTX 4090"), find_card("RTX 3090")
    nothing = expected_speeds({"CUDA0": card}, folder=tmp_path, threads=2)
    assert nothing.device("CUDA0").source == "catalogue"
    assert nothing.device(HOST).source == "guess"
    assert nothing.memory_bytes is not None
    there = keep(tmp_path, (CPU, CUDA))
    found, known = expected_speeds({"CUDA0": card}, folder=tmp_path, threads=2), nothing.device("CUDA0")
    assert found.device(HOST) == there.device(HOST)
    # what is not measured on a card is the catalogue's
    completed = replace(there.device("CUDA0"), attention=known.attention, experts=known.experts)
    assert found.device("CUDA0") == completed != there.device("CUDA0")
    what_if = expected_speeds({"CUDA0": other}, folder=tmp_path, threads=2)
    assert what_if.device("CUDA0").source == "catalogue"
    assert what_if.device(HOST) == there.device(HOST)
    assert "measured once" in what_if.origin
    mixed = expected_speeds({"CUDA0": card, "RPC0": None}, folder=tmp_path, threads=2)
    assert [mixed.device(name).source for name in ("CUDA0", "RPC0")] == ["measured", "unknown"]
    assert expected_speeds({}, folder=tmp_path, threads=2).device(HOST) == there.device(HOST)
    assert expected_speeds({"CUDA0": card}, folder=tmp_path, threads=3).device("CUDA0").source == "catalogue"


# ---- the catalogue against what is public
