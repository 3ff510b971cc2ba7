"""Curves that are kept from run to run: of the same file, placement and machine, and of no other."""

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ggufspec.decoding.policy import latency_cache
from ggufspec.decoding.policy.latency import LatencyModel
from ggufspec.decoding.policy.latency_cache import (
    SavedLatency,
    latency_key,
    load_latency,
    load_or_measure,
    save_latency,
)
from ggufspec.errors import ModelError
from ggufspec.llamacpp.model import Context, Model
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.profile import demo_pair

HERE = "0.3.36", "AMD Ryzen 5 5600", ["CUDA0 NVIDIA GeForce RTX 3060"], "580.65"
OPTIONS = ContextOptions(ctx_size=2048, max_outputs=16, threads=6)
POINTS = {1: 0.02, 2: 0.03, 4: 0.035, 8: 0.05, 16: 0.1}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(latency_cache, "timing_facts", lambda: HERE)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "target.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 1024)
    return path


@pytest.fixture
def one(file):
    return latency_key(file, Placement(20), OPTIONS)


class CountingModel:
    """Batches take a millisecond and ten for each token; the logits are the same at every width, or at none."""

    vocab_size, capacity, can_pad = 4, 512, True

    def __init__(self, classes=True):
        self.model = self
        self.classes = classes
        self.length = self.batches = 0
        self.now = 0.0

    def decode(self, tokens, outputs, batch_size=0):
        batch_size = max(batch_size, len(tokens))
        self.length += len(tokens)
        self.batches += 1
        self.now += (1 + 10 * batch_size) / 1e5
        rows = [[0, 1, 2, place / 8 if not self.classes else 3.0] for place in range(outputs)]
        return np.array(rows, np.float32)

    def sample_tokens(self, text):
        return [len(word) % self.vocab_size for word in text.split()]

    def rewind(self, length):
        self.length = length

    def mark(self):
        """Any length can be gone back to."""

    def clock(self):
        return self.now


def test_round_trip(tmp_path, one):
    assert load_latency(tmp_path, one) is None
    for switch_s in (0.001, 0.002):
        save_latency(tmp_path, one, LatencyModel(POINTS, switch_s=switch_s))
        assert load_latency(tmp_path, one) == SavedLatency(pytest.approx(POINTS), switch_s, None, quiet=True)


def test_the_class_of_strict_mode_is_kept_apart(tmp_path, file, one):
    strict = latency_key(file, Placement(20), OPTIONS, strict=True)
    save_latency(tmp_path, one, LatencyModel(POINTS))
    assert load_latency(tmp_path, strict) is None
    save_latency(tmp_path, strict, LatencyModel(POINTS, batch_sizes=(4, 8, 12)))
    assert load_latency(tmp_path, strict).widths == (4, 8, 12)
    assert load_latency(tmp_path, one).widths is None


@pytest.mark.parametrize(
    "other",
    [
        {"placement": Placement(21)},
        {"placement": Placement(20, (0.5, 0.5))},
        {"threads": 5},
        {"cache_type_k": "q8_0"},
        {"cache_type_v": "q8_0"},
        {"flash_attn": "on"},
        {"limit": 8},
        {"outputs": 1},
        {"strict": True},
        {"name": "other.gguf"},
        {"head": "0"},
    ],
)
def test_whatever_else_is_decoded_has_its_own(tmp_path, one, other):
    save_latency(tmp_path, one, LatencyModel(POINTS))
    assert load_latency(tmp_path, replace(one, **other)) is None


def test_a_file_is_known_by_its_name_size_and_beginning(file, one, tmp_path):
    data = file.read_bytes()
    assert (one.name, one.limit, one.outputs) == ("target.gguf", 16, None)
    assert latency_key(file, Placement(20), OPTIONS) == one
    file.write_bytes(data + b"x")
    assert latency_key(file, Placement(20), OPTIONS) != one
    file.write_bytes(data[:100] + b"x" + data[101:])
    assert latency_key(file, Placement(20), OPTIONS) != one
    file.write_bytes(data)
    assert latency_key(file, Placement(20), OPTIONS) == one


@pytest.mark.parametrize("place", range(4))
def test_another_machine_version_device_or_driver_has_its_own(tmp_path, one, monkeypatch, place):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(latency_cache, "timing_facts", lambda: [*HERE[:place], "another", *HERE[place + 1 :]])
        save_latency(tmp_path, one, LatencyModel(POINTS))
    assert load_latency(tmp_path, one) is None
    model = CountingModel()
    _, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert notes == []
    assert model.batches > 0
    assert load_latency(tmp_path, one) is not None


def damage(entry, path, value):
    *parents, last = path
    for parent in parents:
        entry = entry[parent]
    if value is None:
        del entry[last]
    else:
        entry[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("points",), {}),
        (("points", "4"), -1.0),
        (("points", "4"), "fast"),
        (("points", "4"), float("nan")),
        (("points", "0"), 1.0),
        (("points", "x"), 1.0),
        (("widths",), [4, 8]),
        (("widths",), [10**9]),
        (("switch_s",), "soon"),
    ],
)
def test_a_damaged_curve_is_as_if_it_were_not_there(tmp_path, one, path, value):
    save_latency(tmp_path, one, LatencyModel(POINTS))
    found = json.loads((tmp_path / "batch-latency.json").read_text())
    damage(next(iter(found.values())), path, value)
    (tmp_path / "batch-latency.json").write_text(json.dumps(found))
    assert load_latency(tmp_path, one) is None


def test_a_class_wider_than_the_context_is_damage_too(tmp_path, one):
    strict = replace(one, strict=True)
    save_latency(tmp_path, strict, LatencyModel(POINTS, batch_sizes=(4, 8)))
    found = json.loads((tmp_path / "batch-latency.json").read_text())
    damage(next(iter(found.values())), ("widths",), [4, 10**9])
    (tmp_path / "batch-latency.json").write_text(json.dumps(found))
    assert load_latency(tmp_path, strict) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"x": 1}', "\0"])
def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path, one, text):
    (tmp_path / "batch-latency.json").write_text(text)
    assert load_latency(tmp_path, one) is None
    save_latency(tmp_path, one, LatencyModel(POINTS))
    assert load_latency(tmp_path, one) is not None


def test_an_entry_that_is_no_object(tmp_path, one):
    save_latency(tmp_path, one, LatencyModel(POINTS))
    name = next(iter(json.loads((tmp_path / "batch-latency.json").read_text())))
    for entry in ([], "x", 3, None):
        (tmp_path / "batch-latency.json").write_text(json.dumps({name: entry}))
        assert load_latency(tmp_path, one) is None


def test_the_oldest_go(tmp_path, one):
    for threads in range(1, 71):
        save_latency(tmp_path, replace(one, threads=threads), LatencyModel(POINTS))
    assert len(json.loads((tmp_path / "batch-latency.json").read_text())) == 64
    assert load_latency(tmp_path, replace(one, threads=6)) is None
    assert load_latency(tmp_path, replace(one, threads=7)) is not None


def test_measured_once_and_known_after(tmp_path, one):
    model = CountingModel()
    latency, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert notes == []
    assert model.batches > 0
    assert latency.seconds(4) == pytest.approx(41e-5)
    assert latency.limit == 16
    model.batches = 0
    again, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert (model.batches, notes) == (2, [])
    assert again.points() == pytest.approx(latency.points())


def test_what_the_rounds_have_taught_is_kept(tmp_path, one):
    model = CountingModel()
    latency, _ = load_or_measure(model, one, tmp_path, model.clock)
    before = latency.points()
    for _ in range(20):
        for batch_size in (1, 2, 8):
            latency.observe(batch_size, before[batch_size])
        latency.observe(4, 2 * 41e-5)
    save_latency(tmp_path, one, latency)
    again = load_latency(tmp_path, one).points
    assert again[4] == pytest.approx(82e-5, rel=0.1)
    for batch_size in (1, 2, 8):
        assert again[batch_size] == pytest.approx(before[batch_size], rel=0.1)


@pytest.mark.parametrize("factor", [3, 10])
def test_a_run_beside_others_does_not_spoil_the_next_one(tmp_path, one, factor):
    """Nor does a long text: the next run on an idle machine finds its latency, and has nothing to say."""
    model = CountingModel()
    latency, _ = load_or_measure(model, one, tmp_path, model.clock)
    before = latency.points()
    for _ in range(50):
        for batch_size in (1, 4, 2, 8):
            latency.observe(batch_size, factor * before[batch_size])
    assert latency.seconds(1) == pytest.approx(factor * before[1], rel=0.1)
    save_latency(tmp_path, one, latency)
    model.batches = 0
    again, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert (model.batches, notes) == (2, [])
    assert again.points() == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("factor", [3, 1000])
def test_a_curve_that_was_kept_on_a_busy_machine_is_measured_again(tmp_path, one, factor):
    model = CountingModel()
    latency, _ = load_or_measure(model, one, tmp_path, model.clock)
    points = latency.points()
    save_latency(tmp_path, one, LatencyModel({batch_size: factor * seconds for batch_size, seconds in points.items()}))
    latency, notes = load_or_measure(model, one, tmp_path, model.clock)
    said = "cached timings of target.gguf were taken while the machine was busier; they were measured again"
    assert notes == [said]
    assert latency.points() == pytest.approx(points)
    assert load_latency(tmp_path, one).points == pytest.approx(points)


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_a_kept_curve_is_brought_nearer_to_the_load_of_now(tmp_path, one, factor):
    model = CountingModel()
    latency, _ = load_or_measure(model, one, tmp_path, model.clock)
    points = latency.points()
    save_latency(tmp_path, one, LatencyModel({batch_size: factor * seconds for batch_size, seconds in points.items()}))
    latency, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert notes == []
    for batch_size, seconds in points.items():
        assert latency.points()[batch_size] == pytest.approx(seconds, rel=0.1)
    assert model.length == 0


def test_a_disturbed_measurement_is_used_until_the_machine_is_quiet(tmp_path, one):
    model = CountingModel()
    ticks = iter(range(10**6))
    latency, notes = load_or_measure(model, one, tmp_path, lambda: next(ticks) ** 3 / 1e6)
    assert not latency.trusted
    assert [note for note in notes if "busy" in note] == notes != []
    save_latency(tmp_path, one, latency)
    assert not load_latency(tmp_path, one).quiet
    disturbed = load_latency(tmp_path, one).points
    save_latency(tmp_path, one, LatencyModel({1: 1e-4, 16: 1e-3}, trusted=False))
    again, notes = load_or_measure(model, one, tmp_path, model.clock, quiet=False)
    assert (again.trusted, notes) == (False, [])
    again, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert (again.trusted, notes) == (True, [])
    assert load_latency(tmp_path, one).quiet
    save_latency(tmp_path, one, LatencyModel(disturbed, trusted=False))
    assert load_latency(tmp_path, one).points == pytest.approx(again.own_points())


def test_what_the_version_before_saved_is_measured_again_when_the_machine_is_quiet(tmp_path, one):
    save_latency(tmp_path, one, LatencyModel({1: 1.12, 16: 1.5}))
    found = json.loads((tmp_path / "batch-latency.json").read_text())
    del next(iter(found.values()))["quiet"]
    (tmp_path / "batch-latency.json").write_text(json.dumps(found))
    assert load_latency(tmp_path, one) == SavedLatency({1: pytest.approx(1.12), 16: pytest.approx(1.5)}, 0.0, None)
    model = CountingModel()
    model.decode = lambda tokens, outputs, batch_size=0: setattr(model, "now", model.now + 1.2)  # beside other programs
    latency, _ = load_or_measure(model, one, tmp_path, model.clock, quiet=False)
    assert not latency.trusted
    assert latency.seconds(1) == pytest.approx(1.17, rel=0.05)
    model = CountingModel()
    latency, notes = load_or_measure(model, one, tmp_path, model.clock)
    assert (latency.trusted, notes) == (True, [])
    assert latency.seconds(1) == pytest.approx(11e-5)


def test_a_measurement_that_is_stopped_changes_nothing(tmp_path, one):
    model, left = CountingModel(), iter([True, True, False])
    assert latency_cache.measure_latency(model, one, model.clock, None, 0.5, lambda: next(left)) is None
    assert (model.batches, model.length) == (2, 0)


def test_strict_mode_measures_its_class_and_only_that(tmp_path, one):
    model = CountingModel()
    strict = replace(one, strict=True)
    latency, _ = load_or_measure(model, strict, tmp_path, model.clock)
    assert latency.batch_sizes == tuple(range(1, 17))
    model.batches = 0
    assert load_or_measure(model, strict, tmp_path, model.clock)[0].batch_sizes == latency.batch_sizes
    assert model.batches == 2
    with pytest.raises(ModelError, match="strict"):
        load_or_measure(CountingModel(classes=False), replace(strict, threads=1), tmp_path, model.clock)


def test_a_kept_class_is_of_no_use_to_a_model_that_cannot_pad(tmp_path, one):
    strict = replace(one, strict=True)
    save_latency(tmp_path, strict, LatencyModel(POINTS, batch_sizes=(4, 8)))
    model = CountingModel()
    model.can_pad = False
    latency, _ = load_or_measure(model, strict, tmp_path, model.clock)
    assert not latency.can_pad
    assert latency.batch_size(3) == 3
    latency, _ = load_or_measure(model, one, tmp_path, model.clock)
    assert not latency.can_pad


def test_without_a_folder_nothing_is_kept(tmp_path, one, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    model = CountingModel()
    latency, notes = load_or_measure(model, one, None, model.clock)
    assert (latency.limit, notes) == (16, [])
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_costs_the_memory_and_not_the_run(tmp_path, one):
    (tmp_path / "taken").write_text("")
    model = CountingModel()
    latency, _ = load_or_measure(model, one, tmp_path / "taken" / "cache", model.clock)
    save_latency(tmp_path / "taken" / "cache", one, latency)
    assert latency.limit == 16


def test_the_demo_pair(tmp_path, monkeypatch):
    monkeypatch.undo()
    target, draft = demo_pair()
    ticks = iter(range(10**6))
    for path, rows in ((target, None), (draft, 1)):
        options = ContextOptions(512, 16, 1)
        wanted = latency_key(path, Placement(), options, outputs=rows)
        with Model(path) as model, closing(Context(model, options)) as context:
            latency, _ = load_or_measure(context, wanted, tmp_path, lambda: next(ticks) / 1e3)
            assert latency.batch_size(1) == 1
            found = load_latency(tmp_path, wanted)
            assert found is not None
            assert found.points == pytest.approx(latency.points())


def test_a_machine_is_known_by_versions_cpu_devices_and_driver(monkeypatch):
    monkeypatch.undo()
    here = latency_cache.timing_facts()
    for place, (module, name, other) in enumerate(
        [
            (latency_cache, "version", lambda _: "0"),
            (latency_cache.host, "cpu_name", lambda: "an abacus"),
            (latency_cache.devices, "devices", lambda: ()),
            (latency_cache.gpus, "survey", lambda: SimpleNamespace(driver="0")),
        ]
    ):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(module, name, other)
            there = latency_cache.timing_facts()
        assert [i for i in range(4) if there[i] != here[i]] == [place]
