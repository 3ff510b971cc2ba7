"""A plan's bars and tables, without a terminal."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufspec.reports import plan as report
from ggufspec.reports import table
from ggufspec.schema.plan import DraftLengthRow, PlanDocument, PlannedDevice, PlannedModel, PlannedOption, SweepRow
from ggufspec.schema.text import of_memory

GIB = 2**30


def model(weights, kv=0, compute=0, overhead=0, **more):
    used = {"weights": weights, "kv": kv, "compute": compute, "overhead": overhead}
    return PlannedModel("a.gguf", 45, 80, (), 0, "f16", "f16", {"GPU0": used} | more)


def document(target, draft=None, budget=24 * GIB, **more):
    used = sum(sum(one.bytes["GPU0"].values()) for one in (target, draft) if one) + GIB // 2
    device = PlannedDevice("GPU0", "a card", 24 * GIB, 24 * GIB, budget, used, GIB // 2)
    alone = PlannedOption(target, None, 3.456, 0)
    pair = PlannedOption(target, draft, 33.33, 3) if draft else None
    fields = {
        "pair": {},
        "devices": (device,),
        "target": target,
        "draft": draft,
        "options": {"target_only": alone, "speculative": pair},
        "predicted": {},
        "choice": "speculative",
        "why": "",
        "settings": {},
        "draft_costs_layers": 0,
        "confirmed": True,
        "speed": "",
        "notes": (),
    }
    return PlanDocument(**fields | more)


def test_a_bar_has_every_part_and_its_legend():
    plan = document(model(16 * GIB, GIB, GIB // 4), model(4 * GIB, GIB // 8, 2**20))
    title, bar, *legend = report.bars(plan, 60)[:4]
    assert title.plain == "GPU0  a card  speculative: 21.9 of 24.0 GiB"
    assert len(bar.plain) == 60
    assert bar.plain == "".join(sorted(bar.plain, key="█▓▒░•·".index))
    assert bar.plain.count("█") == 40
    words = "  ".join(line.plain for line in legend)
    assert words == (
        "█ target 16.0 GiB  ▓ draft 4.0 GiB  ▒ KV 1.1 GiB  ░ compute 257 MiB  • overhead 512 MiB  · free 2.1 GiB"
    )
    assert all(len(line.plain) <= 60 for line in legend)


def test_the_other_option_is_drawn_on_the_cards_only():
    plan = document(model(16 * GIB), model(4 * GIB))
    host = PlannedDevice("CPU", "the host", 8 * GIB, 8 * GIB, 8 * GIB, 0, 0)
    lines = [line.plain for line in report.bars(replace(plan, devices=(*plan.devices, host)), 60)]
    assert [line for line in lines if " of " in line] == [
        "GPU0  a card  speculative: 20.5 of 24.0 GiB",
        "CPU  the host  speculative: 0 MiB of 8.0 GiB",
        "GPU0  a card  target-only: 16.5 of 24.0 GiB",
    ]


def test_a_bar_says_what_is_left_free_on_purpose():
    title = report.bars(document(model(16 * GIB), budget=24 * GIB - 2**28), 60)[0].plain
    assert title.endswith("16.5 of 24.0 GiB, 256 MiB of it headroom")


@given(
    st.lists(st.integers(0, 40 * GIB), min_size=len(report.PARTS), max_size=len(report.PARTS)),
    st.integers(10, 200),
)
def test_the_columns_add_up(sizes, width):
    parts = dict(zip((key for key, *_ in report.PARTS), sizes, strict=True))
    cells = report.cells(parts, width)
    assert sum(cells.values()) == width
    assert all(count >= (parts[key] > 0) for key, count in cells.items() if sum(parts.values()))
    total = sum(sizes)
    if total:
        assert all(abs(cells[key] - size * width / total) < len(sizes) for key, size in parts.items())


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 MiB"), (2**20, "1 MiB"), (1023 * 2**20, "1,023 MiB"), (GIB, "1.0 GiB"), (31 * GIB, "31.0 GiB")],
)
def test_sizes(size, text):
    assert of_memory(size) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "–"), (0.123, "0.12"), (3.456, "3.46"), (33.33, "33.3"), (1234.5, "1234")]
)
def test_rates(rate, text):
    assert report.predicted(rate) == text


def test_the_table_says_what_differs_from_the_usual():
    special = PlannedModel("a.gguf", 49, 48, (), 12, "q8_0", "q4_0", {"GPU0": {}})
    rows = report.options(document(special, model(1))).cells
    assert rows[0] == ("target-only", "49/49, experts of 12 on CPU, KV q8_0/q4_0", "", "", "≈ 3.46")
    assert rows[1][2:] == ("45/81", "3", "≈ 33.3")


def test_a_run_has_a_row_of_its_own():
    target, draft = model(16 * GIB), model(4 * GIB)
    plan = document(target, draft)
    plan.options["default"] = PlannedOption(target, draft, 40.0, 3)
    assert [row[0] for row in report.options(plan).rows] == ["target-only", "speculative", "default"]
    assert report.options(plan).rows[2][3:] == ("adaptive", "≈ 40.0")
    assert report.options(plan).leading == [2]
    plan.settings.update({"lookup": "not counted", "accepted_here": "53% of 213 drafted tokens"})
    assert report.explanations(plan)[1].startswith("Runs here accepted 53% of 213 drafted tokens, ")
    assert "run does" in report.explanations(plan)[0]
    assert "n-gram lookup (not counted)" in report.explanations(plan)[0]
    assert len(report.bars(plan, 60, everything=True)) == len(report.bars(document(target, draft), 60))
    target_only = replace(plan, choice="target-only", options=plan.options | {"default": None})
    assert report.options(target_only).leading == [0]


def test_a_tuned_profile_shows_what_was_measured():
    target, draft = model(16 * GIB), model(4 * GIB)
    plan = document(target, draft, tuned={"tokens_per_s": 8.3, "date": "2026-11-28", "gain": 1.31})
    plan.options["default"] = PlannedOption(target, draft, 4.0, 0)
    rows = report.options(plan).rows
    assert [row[0] for row in rows] == ["target-only", "speculative", "tuned here"]
    assert rows[2][-1] == "8.30"  # no sign of a prediction
    assert report.options(plan).leading == [2]


def test_copies_to_the_card_are_named_once_and_explained():
    copied = replace(model(16 * GIB), op_offload_min_batch=2)
    plan = document(copied, model(4 * GIB))
    assert report.options(plan).rows[0][1] == "45/81, rest copied over per batch"
    assert report.options(document(replace(copied, gpu_layers=81, n_cpu_ffn=36))).rows[0][1] == (
        "81/81, feed-forward of 36 on CPU, copied over per batch"
    )
    (line,) = report.explanations(plan)
    assert line.startswith("copied over per batch: for batches of 2 tokens or more the GPU computes with copies of the")
    assert report.explanations(document(model(16 * GIB))) == []


def test_a_sweep_has_a_dash_where_nothing_fits():
    plan = document(model(1), sweep=(SweepRow(0, 1.0, None), SweepRow(81, None, None)))
    shown = table.terminal(report.sweep(plan))
    assert [[str(cell) for cell in column.cells] for column in shown.columns] == [
        ["0/81", "81/81"],
        ["1.00", "–"],
        ["–", "–"],
        ["", ""],
    ]


def test_draft_lengths_are_in_the_terms_of_a_log():
    rows = (DraftLengthRow(3, 33.33, 0.51, 0.45, 0.666), DraftLengthRow(16, 9.0, 0.14, None, None))
    shown = report.draft_lengths(document(model(2**30), model(2**20), draft_lengths=rows))
    assert shown.rows == [("3", "≈ 33.3", "51%", "45%", "67%"), ("16", "≈ 9.00", "14%", "never", "never")]
    assert shown.leading == [0]
    assert max(len(line) for line in table.markdown(shown).splitlines()) <= 100
