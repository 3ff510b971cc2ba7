"""Summaries of evidence: the largest placement that fits, variants over repetitions, predicted speeds, scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec import demo_pair
from ggufspec.errors import ChildError, GgufspecError
from ggufspec.hardware.cards import find_card
from ggufspec.llamacpp.gguf import parse_header
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import interpret
from ggufspec.planning.catalogue import from_catalogue
from ggufspec.planning.speed import pass_s
from lab import evidence_bytes, evidence_ways, peers
from lab.evidence_bytes import largest
from lab.evidence_device import LocalCard
from lab.evidence_documents import (
    BytesFound,
    Card,
    Part,
    PlacedModel,
    Row,
    Sizes,
    WayResult,
    WaysFound,
    WidthsFound,
)
from lab.evidence_lab import Lab
from lab.evidence_models import SCALES, File, Shelf, Space, choose_scale, kept_bytes, lacking
from lab.evidence_speed import predictions
from lab.evidence_ways import ADAPTIVE, OWN_BEST, TARGET_ONLY, fixed, ways
from lab.expansion import SHAPES, Model


@given(st.integers(0, 90), st.integers(-1, 90), st.integers(-5, 100))
def test_the_largest_is_found_whatever_the_guess(most: int, truth: int, guess: int) -> None:
    truth = min(truth, most)
    asked: list[int] = []

    def fits(number: int) -> bool:
        assert 0 <= number <= most
        asked.append(number)
        return number <= truth

    assert largest(fits, guess, most) == (truth if truth >= 0 else None)
    assert len(set(asked)) == len(asked) <= 16


def test_a_good_guess_takes_two_questions() -> None:
    for guess in (56, 57):
        asked: list[int] = []

        def fits(number: int, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number <= 56

        assert largest(fits, guess, 81) == 56
        assert len(asked) == 2


def on_a_card(tmp_path: Path, vram_bytes: int | None = None) -> Lab:
    card = Card("CUDA0", "NVIDIA Test", "cuda", 24 << 30, None)
    return Lab(LocalCard(card), SCALES["tiny"], Shelf(tmp_path / "models", "holes"), 1, vram_bytes)


def test_what_is_too_large_is_not_loaded(tmp_path: Path) -> None:
    lab = on_a_card(tmp_path, 1 << 20)
    file, context = File(Model("tiny-draft", "Q8_0"), "draft"), lab.options().context(with_draft=True)
    with pytest.raises(GgufspecError, match=r"tiny-draft-Q8_0-draft.gguf takes .* and 0.0 GiB may be used") as raised:
        lab.check_room(file, Placement(-1), context)
    assert "--vram" in raised.value.hint
    lab.check_room(file, Placement(0), context)
    on_a_card(tmp_path).check_room(file, Placement(-1), context)


def test_only_a_card_that_is_nearly_full_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below that a failure is one of something else, and says nothing of the largest placement."""

    def fail(*arguments: object) -> None:
        raise ChildError("the child process ended with status 1")

    monkeypatch.setattr(evidence_bytes, "_load", fail)
    lab = on_a_card(tmp_path)
    tried = evidence_bytes._try(lab, 24 << 30, 5, [])
    assert (tried.fits, tried.why) == (False, "the child process ended with status 1")
    with pytest.raises(ChildError):
        evidence_bytes._try(lab, 12 << 30, 5, [])


# ---- ways -----------------------------------------------------------------------------------------

TARGET, DRAFT = PlacedModel("t.gguf", 9, 5), PlacedModel("d.gguf", 4, 4)


def row(
    repetition: int, results: dict[str, WayResult], *, target: PlacedModel = TARGET, draft: PlacedModel | None = DRAFT
) -> Row[Any]:
    found = WaysFound("p", repetition, target, draft, 512, 100, results)
    return Row(f"{repetition}{sorted(results)}", "r", "done", 1.0, found=found)


def test_ways_are_held_against_the_best_rivals_of_their_own_repetition() -> None:
    """The machine is twice as slow in the second repetition, which no ratio notices."""
    rows = []
    for repetition, slower in enumerate((1.0, 2.0, 1.0)):
        rows += [
            row(repetition, {OWN_BEST: WayResult(20, 2.0 * slower)}, target=replace(TARGET, gpu_layers=7), draft=None),
            row(repetition, {f"{TARGET_ONLY} at 5 layers": WayResult(20, 4.0 * slower)}, draft=None),
            row(
                repetition,
                {
                    fixed(2).name: WayResult(20, 1.0 * slower, rounds=10, drafted=20, accepted=10),
                    f"{peers.PROGRAM}, 2 drafted": WayResult(20, 2.5 * slower, drafted=20, accepted=9),
                    f"{peers.PROGRAM}, 4 drafted": WayResult(20, 1.25 * slower, drafted=40, accepted=9),
                },
            ),
        ]
    rows.append(Row("x", "failed", "failed", 1.0, error="no"))
    found = {way.name: way for way in ways(rows)}
    pair, alone = found[fixed(2).name], found[f"{TARGET_ONLY} at 5 layers"]
    assert pair.tokens_per_s.samples == (20.0, 10.0, 20.0)
    assert pair.over_target_only is not None
    assert pair.over_peer is not None
    assert pair.over_target_only.samples == (2.0, 2.0, 2.0)
    assert pair.over_peer.median == 1.25  # at the peer's best draft length
    assert (pair.acceptance_rate, pair.tokens_per_round) == (0.5, 2.0)
    assert (pair.gpu_layers, pair.gpu_layers_draft, pair.layers) == (5, 4, 9)
    assert alone.over_target_only is not None
    assert (alone.over_target_only.median, alone.gpu_layers_draft, alone.acceptance_rate) == (0.5, None, None)
    assert found[OWN_BEST].over_target_only is None  # the rival itself
    assert found[f"{peers.PROGRAM}, 4 drafted"].over_peer is None


def test_repetitions_at_another_placement_are_another_way() -> None:
    rows = [
        row(0, {fixed(2).name: WayResult(20, 1.0)}),
        row(1, {fixed(2).name: WayResult(20, 1.0)}, target=replace(TARGET, gpu_layers=6)),
    ]
    assert sorted(way.gpu_layers for way in ways(rows)) == [5, 6]


# ---- predictions ----------------------------------------------------------------------------------


def test_a_speed_is_predicted_for_every_placement_that_was_run() -> None:
    path = demo_pair()[0]
    header = interpret(path.name, [parse_header(path.read_bytes())], path.stat().st_size)
    speed = from_catalogue([find_card("RTX 4090")], ["RPC0"])
    target = PlacedModel(path.name, header.layers, 5)
    sizes = Sizes(1, 1, 1)
    parts: list[Part[Any]] = [
        Part("a", "", "", (Row("1", "half", "done", 1.0, found=BytesFound(
            "dense", (target,), 512, "f16", "f16", sizes, sizes, sizes, 0, None, (50.0,), 100)),)),
        Part("c", "", "", (Row("2", "F16", "done", 1.0, found=WidthsFound(
            target, "F16", 512, 100, 1, 1.0, 1.0, {1: (0.01, 0.02, 0.03)}, {1: 1.0})),)),
        Part("d", "", "", (
            row(0, {
                f"{TARGET_ONLY} at 5 layers": WayResult(20, 1.0, rounds=20),
                fixed(3).name: WayResult(20, 1.0, rounds=10, drafted=30, accepted=10),
                ADAPTIVE: WayResult(20, 1.0, rounds=10, drafted=25, accepted=10),
            }, target=target, draft=target),
            row(1, {fixed(3).name: WayResult(20, 1.0, rounds=10, drafted=30)}, target=target, draft=target),
            row(0, {fixed(3).name: WayResult(20, 1.0, rounds=10, drafted=30)}, target=PlacedModel("gone.gguf", 9, 5)),
        )),
    ]  # fmt: skip
    found = predictions(parts, speed, "RPC0", lambda name: header if name == path.name else None)
    assert [one.part for one in found] == ["a", "c", "d", "d"]
    assert [one.measured for one in found] == [50.0, 50.0, 20.0, 20.0]

    def seconds(tokens: int) -> float:
        context = ContextOptions(512, tokens, 1)
        return pass_s(header, Placement(5), speed, ("RPC0",), tokens=tokens, depth=100, context=context)

    assert found[0].predicted == found[1].predicted == found[2].predicted == pytest.approx(1 / seconds(1))
    assert found[3].predicted == pytest.approx(2 / (seconds(4) + 3 * seconds(1)))


# ---- scales ---------------------------------------------------------------------------------------

PLENTY = Space(10**12, 10**12, 80 << 30, in_memory=False)


def test_full_shapes_where_there_is_room_else_small_ones_with_the_reason() -> None:
    assert choose_scale("auto", PLENTY, "holes") == (SCALES["full"], ())
    for space, what in (
        (replace(PLENTY, disk_bytes=10**8), "disk"),
        (replace(PLENTY, memory_bytes=16 * 10**9), "memory"),
        (replace(PLENTY, device_bytes=6 << 30), "the device's memory"),
    ):
        scale, reasons = choose_scale("auto", space, "holes")
        assert scale is SCALES["small"]
        assert f"of {what}, and " in reasons[0]
        with pytest.raises(GgufspecError, match=f"no room for the full shapes: .* of {what}") as raised:
            choose_scale("full", space, "holes")
        assert "--shapes auto" in raised.value.hint
    assert lacking(SCALES["full"], replace(PLENTY, disk_bytes=20 * 10**9), "holes") == ""
    assert "20.0 GB of disk" in lacking(SCALES["full"], replace(PLENTY, disk_bytes=20 * 10**9), "blocks")
    scale, reasons = choose_scale("auto", replace(PLENTY, in_memory=True), "holes")
    assert (scale.name, len(reasons)) == ("small", 1)
    assert choose_scale("tiny", replace(PLENTY, disk_bytes=0), "holes") == (SCALES["tiny"], ())


def test_the_full_shapes_are_the_notebook_s() -> None:
    pair = SCALES["full"].notebook
    assert (SHAPES[pair.target.model.shape].layers, pair.target.model.type) == (80, "Q3_K_S")
    assert pair.target.about_bytes == pytest.approx(30e9, rel=0.1)
    assert pair.draft.about_bytes == pytest.approx(4.3e9, rel=0.1)
    assert round(SCALES["full"].notebook_layers * 81) == 45


def test_a_file_is_made_once_and_a_hopeless_one_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File(Model("tiny-draft", "Q8_0"), "draft")
    hopeless = replace(file, role="hopeless")
    shelf = Shelf(tmp_path / "models", "holes")
    assert not shelf.has(file)
    assert kept_bytes(shelf.folder) == 0
    path = shelf.path(file)
    assert kept_bytes(shelf.folder) == path.stat().st_blocks * 512 > 0
    made = path.stat().st_mtime_ns
    assert shelf.path(file) == path
    assert path.stat().st_mtime_ns == made
    assert shelf.path(hopeless) != path
    assert shelf.path(hopeless).read_bytes() != path.read_bytes()
    assert shelf.known(file).header.layers == SHAPES["tiny-draft"].layers + 1
    assert shelf.named("nothing.gguf") is None
    monkeypatch.setattr("ggufspec.hardware.host.free_memory_bytes", lambda: 10**9)
    with pytest.raises(GgufspecError, match="of memory to run") as raised:
        shelf.path(SCALES["full"].notebook.target)
    assert "--shapes small" in raised.value.hint


# ---- llama.cpp's own program ----------------------------------------------------------------------


def test_the_program_is_not_there(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(peers.NotThereError) as raised:
            peers.find(folder)
        assert "scripts/peers" in raised.value.hint


def program(folder: Path, body: str) -> Path:
    path = folder / peers.PROGRAM
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return peers.find(folder)


def ask(path: Path) -> peers.Answer:
    return peers.answer(path, Path("t"), Path("d"), "x", tokens=8, draft_max=4, threads=1, ctx_size=512)


def test_what_the_program_says_is_read(tmp_path: Path) -> None:
    said = "encoded   30 tokens in    0.500 seconds, speed: 60 t/s\n"
    said += "decoded   64 tokens in    2.500 seconds, speed: 25.6 t/s\nn_draft   = 4\nn_drafted = 40\nn_accept  = 30"
    assert ask(program(tmp_path, f"cat >&2 <<'END'\n{said}\nEND")) == peers.Answer(64, 2.5, 0.5, 40, 30)


def test_a_program_that_fails(tmp_path: Path) -> None:
    for body, said in (
        ("echo 'error: unknown argument' >&2; exit 1", "status 1: error: unknown argument"),
        ("echo all is well", "status 0: all is well"),
        ("exit 3", "status 3: it said nothing"),
    ):
        with pytest.raises(ChildError, match=said):
            ask(program(tmp_path, body))
    path = program(tmp_path, "")
    path.write_bytes(b"no program")
    with pytest.raises(ChildError, match="cannot be run"):
        ask(path)


def test_another_way_is_first_in_each_repetition() -> None:
    turned = [evidence_ways._turned("abc", by) for by in range(4)]
    assert turned == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]
