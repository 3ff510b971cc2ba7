"""The page, its figures and the reading of kept results, without a browser: what is in them and what cannot be."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ggufspec.errors import GgufspecError
from ggufspec.reports import compare, report, sweep, words
from ggufspec.reports.documents import KNOWN, parse_document, read_document
from ggufspec.reports.html import charts, figures, sections
from ggufspec.reports.html.page import render
from ggufspec.schema.base import Failure, Spread
from ggufspec.schema.compare import cell_name
from ggufspec.schema.sweep import SweepDocument
from tests.support import kept_results
from tests.support.pages import Elements

DOCUMENTS = {
    "bench": kept_results.bench,
    "compare": kept_results.compare,
    "plan": kept_results.plan,
    "sweep": kept_results.sweep,
    "tune": kept_results.tune,
}


@pytest.fixture(scope="module")
def page() -> str:
    return render(kept_results.all_kinds())


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_what_a_command_wrote_is_read_back(kind):
    document = DOCUMENTS[kind]()
    assert parse_document(kept_results.as_json(document)) == document


def test_results_with_the_old_names_of_options_are_read():
    """Of the last version before options had llama.cpp's names: n_ctx, type_k, draft_gpu_layers, …"""
    path = Path(__file__).parents[1] / "support" / "results_with_old_names.json"
    kinds = DOCUMENTS | {"sweep": lambda: kept_results.sweep("cache_type_k")}
    for name, document in read_document(path).items():
        expected = kinds[name.split()[0]]()
        assert replace(document, notes=expected.notes) == expected
    assert "n_ctx" in path.read_text()


def test_keys_that_a_later_version_added_are_passed_over():
    body = kept_results.as_json(kept_results.sweep()) | {"new_key": 1}
    assert parse_document(body) == kept_results.sweep()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ('{"schema": "ggufspec/bench@1", "pair": {', "is not a complete JSON document"),
        ("[" * 100_000, "is nested more than 64 deep"),
        ("[" + "1" * 5000 + "]", "a number of 5,000 digits"),
        (
            '{"schema": "ggufspec/bench@1", "pair": ' + "[" * 600 + "]" * 600 + "}",
            "nested more than 64 deep",
        ),
        ('{"schema": "ggufspec/\\u001b]0;taken@1"}', "has the schema ggufspec/␛]0;taken@1"),
        ('{"schema": "ggufspec/report@1", "results": {}}', "contains no results"),
        ('{"schema": "ggufspec/report@1"}', "has the schema ggufspec/report@1; a report can show"),
        (
            '{"schema": "ggufspec/report@1", "results": {"old": {"schema": "ggufspec/tune@0"}}}',
            "^old in .*/tune@0, but",
        ),
        ("[1, 2]", "has no schema"),
        ('"text"', "has no schema"),
        ('{"schema": 7}', "has no schema"),
        (
            '{"schema": "ggufspec/bench@2"}',
            "the schema ggufspec/bench@2, but this ggufspec reads ggufspec/bench@1",
        ),
        (
            '{"schema": "ggufspec/doctor@1"}',
            "the schema ggufspec/doctor@1; a report can show ggufspec/bench@1, ",
        ),
        ('{"schema": "ggufspec/error@1", "error": "x"}', "is an error message"),
        ('{"schema": "somebody/else@1"}', "has the schema somebody/else@1"),
        ('{"schema": "ggufspec/bench@1"}', "pair: field required"),
        ('{"schema": "ggufspec/sweep@1", "option": [1]}', "pair: field required"),
    ],
)
def test_what_is_no_result_is_named(tmp_path, content, words):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(GgufspecError, match=re.escape(str(path))) as caught:
        read_document(path)
    assert re.search(words, caught.value.message)
    assert caught.value.hint


def test_a_file_of_bytes_and_no_file_are_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff\xfe")
    for name, reason in (("model.gguf", "is not UTF-8 text"), ("none.json", "No such file"), (".", "Is a directory")):
        with pytest.raises(GgufspecError, match=reason):
            read_document(tmp_path / name)


def test_a_wrong_value_is_named_by_its_place():
    body = kept_results.as_json(kept_results.compare())
    body["cells"][0]["run"]["tokens_per_s"]["median"] = "fast"
    with pytest.raises(GgufspecError, match=r"document 1 .* cells\.0\.run\.tokens_per_s\.median: .*number"):
        render([body])


def test_every_key_of_every_known_document_may_be_hostile():
    """No value of a document, whatever text it is, becomes an element."""
    mark = "<i data-taken>\x1b[31m\x00\u202e]]>"

    def spoiled(value: Any) -> Any:
        if isinstance(value, str):
            return value + mark
        if isinstance(value, dict):
            return {key: spoiled(each) for key, each in value.items()}
        return [spoiled(each) for each in value] if isinstance(value, list) else value

    for make in DOCUMENTS.values():
        body = kept_results.as_json(make())
        shown = render([spoiled(body) | {"schema": body["schema"]}])
        assert "<i data-taken" not in shown
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", shown)
        assert "&lt;i data-taken" in shown


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing(page):
    elements = Elements(page)
    assert not elements.named("script")
    assert not [tag for tag, attributes in elements.tags for name in attributes if name.startswith("on") and tag]
    (link,) = elements.named("link")
    assert link == {"rel": "icon", "href": "data:,"}
    places = [a[name] for _, a in elements.tags for name in ("src", "href", "xlink:href", "data") if name in a]
    assert {place[0] for place in places if place and place != "data:,"} == {"#"}
    assert "url(" not in page
    assert "@import" not in page
    policy = next(a["content"] for a in elements.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not [a for _, a in elements.tags if "style" in a]  # the policy would forbid it


def test_every_link_and_label_has_its_place_once(page):
    elements = Elements(page)
    places = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(places) == len(set(places))
    links = {a["href"].removeprefix("#") for a in elements.named("a")}
    labels = {a["aria-labelledby"] for _, a in elements.tags if "aria-labelledby" in a}
    assert links | labels <= set(places)
    assert len(links) == len(kept_results.all_kinds())


def test_every_figure_has_a_plot_and_its_numbers_a_table(page):
    elements = Elements(page)
    expected = [
        figure
        for machine in sections.report_section([parse_document(body) for body in kept_results.all_kinds()])
        for section in machine.sections
        for figure in section.figures
    ]
    plotted = [a for a in elements.named("svg") if a.get("class") == "plot"]
    assert [a["aria-label"] for a in plotted] == [figure.title for figure in expected]
    assert page.count("<figure ") == page.count("</figure>") == len(expected)
    regions = [a.get("aria-label") for a in elements.named("div") if a.get("role") == "region"]
    assert {figure.table.title for figure in expected if figure.table} <= set(regions)


def test_a_section_for_each_machine_and_plans_beside_their_card():
    documents = [kept_results.plan(), kept_results.bench(), kept_results.compare(), kept_results.tune()]
    machines = sections.report_section(documents)
    assert [machine.name for machine in machines] == ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4060 Laptop GPU"]
    assert [[each.kind for each in machine.sections] for machine in machines] == [
        ["bench", "tune", "plan"],
        ["compare"],
    ]
    (alone,) = sections.report_section([kept_results.plan()])
    assert alone.name == "Planned for NVIDIA GeForce RTX 4090"
    other = kept_results.bench(machine=kept_results.DESKTOP | {"memory_bytes": 2**35})
    assert len(sections.report_section([kept_results.bench(), other])) == 2


def test_a_machine_without_a_card_is_its_processor():
    (machine,) = sections.report_section([kept_results.bench(machine=kept_results.DESKTOP | {"gpus": []})])
    assert machine.name == "AMD Ryzen 7 7700X 8-Core Processor"
    (bare,) = sections.report_section([kept_results.bench(machine={})])
    assert bare.name == "an unnamed processor"


# ---- figures --------------------------------------------------------------------------------------------------------


def of(document: Any) -> dict[str, figures.Figure]:
    return {figure.name: figure for figure in sections.section(document).figures}


def test_quality_puts_cells_at_their_targets_distance():
    document = kept_results.compare()
    figure = of(document)["quality"]
    measured = [cell for cell in compare.ordered(document, compare.CompareSort.SPEED) if cell.run]
    assert len(figure.marks) == len(measured) == 10
    for cell, mark in zip(measured, figure.marks, strict=True):
        quality = next(model.quality for model in document.targets if model.name == cell.target)
        assert (mark.x, mark.y) == (quality.mean_kl, cell.run.tokens_per_s.median)
        assert (mark.low, mark.high) == cell.run.tokens_per_s.ci95
    assert [mark.label for mark in figure.marks if mark.label] == ["Q3_K_S", "Q4_K_M", "Q8_0"]


def test_without_quality_there_is_no_such_plot():
    document = kept_results.compare()
    bare = replace(document, targets=tuple(replace(model, quality=None) for model in document.targets))
    assert "quality" not in of(bare)
    assert [table.title for table in sections.section(bare).tables] == ["Results"]


def test_memory_parts_add_up_and_the_card_is_a_line():
    document = kept_results.compare()
    figure = of(document)["memory"]
    targets, drafts = compare.names_of(document)
    for cell in document.cells:
        name = cell_name(targets[cell.target], drafts[cell.draft] if cell.draft else None)
        parts = [mark.y for mark in figure.marks if mark.x == name]
        assert sum(parts) == pytest.approx(sum(cell.bytes.get("CUDA0", {}).values()) / 2**30)
    (limit,) = [mark for mark in figure.marks if mark.kind == "limit"]
    assert limit.y == 8
    assert figure.title == "VRAM by part, as planned"


def test_without_a_card_memory_is_the_hosts():
    document = kept_results.compare(machine=kept_results.LAPTOP | {"gpus": []})
    cells = tuple(replace(cell, bytes={"CPU": {"target weights": 2**30}}) for cell in document.cells)
    figure = of(replace(document, cells=cells))["memory"]
    assert figure.title == "Memory by part, as planned"
    assert {mark.y for mark in figure.marks} == {1.0}


def test_memory_in_the_table_is_what_the_command_shows():
    """What was measured: the cards' where anything is on one, else the process's."""
    document = kept_results.compare()
    cells = tuple(
        replace(cell, bytes={}, run=replace(cell.run, vram_bytes=0, peak_rss_bytes=3 * 2**30) if cell.run else None)
        for cell in document.cells
    )
    for shown, title, size in (
        (document, "VRAM", f"{max(cell.run.vram_bytes for cell in document.cells if cell.run) / 2**30:.1f} GiB"),
        (replace(document, cells=cells), "Memory", "3.0 GiB"),
    ):
        table = sections.section(shown).tables[0]
        place = [column.label for column in table.columns].index(title)
        assert size in {row[place] for row in table.cells if len(row) > 3}


def test_a_trial_that_failed_is_a_cross_with_its_reason():
    document = kept_results.tune()
    figure = of(document)["search"]
    (failed,) = [mark for mark in figure.marks if mark.kind == "failed"]
    assert failed.x == 6  # counted from 1, as the command's own table does
    assert failed.description.endswith("out of memory: CUDA0 could not give 391 MiB")
    (best,) = [mark for mark in figure.marks if mark.label]
    assert (best.x, best.label) == (document.winner + 1, "winner")
    assert "measured again at the end" in figure.caption
    assert not any(mark.kind == "line" for mark in figure.marks)


def test_one_point_is_no_plot():
    document = kept_results.tune()
    for count, drawn in ((1, False), (2, True)):
        some = replace(document, trials=document.trials[:count], winner=0, baseline=0)
        assert ("search" in of(some)) is drawn
    bench = kept_results.bench()
    assert "acceptance" in of(bench)
    run = replace(bench.runs["speculative"], accepted_by_position=(0.5,), drafted_by_position=(100,))
    assert "acceptance" not in of(replace(bench, runs=bench.runs | {"speculative": run}))


def test_positions_that_were_hardly_drafted_are_left_out():
    bench = kept_results.bench()
    shares, counts = (0.9, 0.8, 1.0, 0.0), (100, 10, 9, 1)
    run = replace(bench.runs["speculative"], accepted_by_position=shares, drafted_by_position=counts)
    figure = of(replace(bench, runs=bench.runs | {"speculative": run}))["acceptance"]
    assert [(mark.x, mark.y) for mark in figure.marks] == [(1, 0.9), (2, 0.8)]
    (row,) = figure.table.cells
    assert row[2:] == ("90%", "80%")  # no columns for the others


def test_an_axis_of_few_whole_numbers_has_each_once():
    figure = of(kept_results.tune())["search"]
    layer = charts.specification(figure)["layer"][0]
    trials = len(kept_results.tune().trials)
    assert layer["encoding"]["x"]["axis"]["values"] == [*range(1, trials + 1)]


def test_a_cell_that_failed_is_a_row_with_its_reason():
    (table, _) = sections.section(kept_results.compare()).tables
    assert {why.partition(":")[0] for why in table.failed.values()} == {"failed"}
    assert [table.cells[row] for row in sorted(table.failed)] == [("Q8_0", "Q8_0"), ("Q8_0", "Q2_K")]
    assert len(table.rows) == 12


def test_what_was_not_reached_has_not_failed():
    document = kept_results.compare(interrupted=True)
    cells = (*document.cells[:-1], replace(document.cells[-1], run=None, speedup=None))
    section = sections.section(replace(document, cells=cells))
    assert section.title.endswith(", 2 failed")
    assert section.tables[0].failed[len(cells) - 1] == "not measured"


def test_a_setting_that_failed_once_has_its_speed():
    document = kept_results.tune()
    trials = (replace(document.trials[0], failure=Failure("aborted")), *document.trials[1:])
    section = sections.section(replace(document, trials=trials))
    assert section.title.endswith("12 settings, 1 failed")
    assert "#1 failed: aborted" in section.notes


def test_all_failed_is_still_a_report():
    document = kept_results.compare()
    lost = {"run": None, "speedup": None, "bytes": {}, "failure": Failure("aborted")}
    cells = tuple(replace(cell, **lost) for cell in document.cells)
    section = sections.section(replace(document, cells=cells))
    assert section.lead == "Nothing could be measured."
    assert not section.good
    assert "aborted" in render([kept_results.as_json(replace(document, cells=cells))])
    tune = kept_results.tune()
    trials = tuple(replace(trial, tokens_per_s=None, failure=Failure("aborted")) for trial in tune.trials)
    failed = replace(tune, trials=trials, winner=None, gain=None)
    assert "No trial succeeded" in render([kept_results.as_json(failed)])
    empty = replace(tune, trials=(), winner=None, baseline=None, target_only=None, gain=None)
    assert sections.section(empty).figures == ()
    render([kept_results.as_json(empty)])


def test_a_gain_within_the_noise_is_none():
    document = kept_results.compare()
    assert sections.section(document).good
    unsure = Spread(1.02, (0.97, 1.07), (0.97, 1.02, 1.07))
    cells = tuple(replace(cell, speedup=unsure) if cell.speedup else cell for cell in document.cells)
    assert not sections.section(replace(document, cells=cells)).good
    sweep = kept_results.sweep()
    assert sections.section(sweep).good
    points = tuple(replace(point, speedup=unsure) for point in sweep.points)
    assert not sections.section(replace(sweep, points=points)).good


def test_a_page_and_a_command_say_the_same():
    assert sections.section(kept_results.compare()).lead == compare.verdict(kept_results.compare())
    assert sections.section(kept_results.sweep()).lead == sweep.summary(kept_results.sweep())


def test_what_may_change_the_text_is_a_warning():
    document = kept_results.bench()
    assert sections.section(document).warnings == ()
    lossy = replace(document.runs["speculative"], lossy=True)
    section = sections.section(replace(document, runs=document.runs | {"speculative": lossy}, identical_output=False))
    assert ["lossy" in each or "NOT the same text" in each for each in section.warnings] == [True, True]


def test_what_a_tuning_searched_is_no_condition_of_it():
    document = kept_results.tune(settings={"ctx_size": 4096, "threads": 8, "cache_type_k": "f16", "budget_s": 600})
    facts = dict(sections.section(document).facts)
    assert (facts["Context size"], facts["Key cache type"], facts["Budget, seconds"]) == ("4,096", "f16", "600")
    assert "Threads" not in facts  # 7 and 8 were tried


def test_a_figure_without_a_place_is_left_out():
    """A divergence that overflowed is described in the tables, and drawn nowhere."""
    document = kept_results.compare()
    lost = replace(document.targets[2], quality=replace(document.targets[2].quality, mean_kl=float("inf")))
    broken = replace(document, targets=(*document.targets[:2], lost))
    assert len(of(broken)["quality"].marks) == len(of(document)["quality"].marks) - 4
    assert ">inf<" in render([kept_results.as_json(broken)])


@pytest.mark.parametrize("cards", [None, 7, ["card"], [{"name": "card", "total_bytes": "much"}]])
def test_a_machine_in_strange_words_is_still_one(cards):
    machine = kept_results.LAPTOP | {"gpus": cards}
    assert sections.section(kept_results.compare(machine=machine)).figures
    (found,) = sections.report_section([kept_results.compare(machine=machine)])
    assert found.name in ("card", machine["cpu"])


def test_the_best_of_each_column_is_marked():
    (table, _) = sections.section(kept_results.compare()).tables
    best: dict[str, set[str]] = {}
    for row, column in table.best:
        best.setdefault(table.columns[column].label, set()).add(table.cells[row][column])
    assert best["Tokens/s"] == {table.cells[0][2]}
    assert best["Mean KL"] == {"0.0000"}
    sizes = [float(row[6].split()[0]) for number, row in enumerate(table.cells) if number not in table.failed]
    assert best["VRAM"] == {f"{min(sizes):.1f} GiB"}


def test_a_sweep_has_a_point_for_each_value():
    lengths = of(kept_results.sweep())["sweep"]
    assert [mark.x for mark in lengths.marks if mark.series == "speculative"] == ["1", "2", "4", "8", "16"]
    assert [mark.x for mark in of(kept_results.sweep("cache_type_k"))["sweep"].marks][:2] == ["f16", "f16"]
    assert [mark.kind for mark in of(kept_results.sweep("gpu_layers"))["sweep"].marks].count("failed") == 1


def test_a_sweep_without_a_draft_is_one_series():
    document = kept_results.sweep("cache_type_k")
    alone = tuple(replace(point, speculative=None, speedup=None) for point in document.points)
    bare: SweepDocument = replace(document, points=alone)
    assert {mark.series for mark in of(bare)["sweep"].marks} == {"target-only"}


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["m-F16", "m-Q8_0"], ["F16", "Q8_0"]),
        (["m-Q3_K_S", "m-Q3_K_M"], ["Q3_K_S", "Q3_K_M"]),
        (["Qwen2.5-7B-Q4_0", "Qwen2.0-7B-Q4_0"], ["Qwen2.5-7B-Q4_0", "Qwen2.0-7B-Q4_0"]),
        (["a/llama.Q4_0.gguf", "a/llama.Q8_0.gguf"], ["Q4_0", "Q8_0"]),
        (["only-one"], ["only-one"]),
        (["a/m.gguf", "b/m.gguf"], ["a/m.gguf", "b/m.gguf"]),
        (["m", "m-Q8_0"], ["m", "m-Q8_0"]),
        ([], []),
    ],
)
def test_names_are_shortened_to_what_tells_them_apart(names, short):
    assert list(words.shorter(names).values()) == short


CODER = "qwen2.5-coder-{}-instruct-{}"


@pytest.mark.parametrize("most", [16, 20, 28, 33])
@pytest.mark.parametrize(
    "names",
    [
        [CODER.format("0.5b", "q4_k_m"), CODER.format("1.5b", "q4_k_m")],
        [CODER.format(size, kind) for size in ("0.5b", "1.5b", "14b") for kind in ("q4_k_m", "q4_k_s", "F16")],
        ["Meta-Llama-3.1-8B-Instruct-Q4_K_M", "Meta-Llama-3.2-8B-Instruct-Q4_K_M", "Mistral-7B"],
        ["first-of-all-models-of-this-family-Q8_0", "other-of-all-models-of-this-family-Q8_0"],
        ["a-" * 20 + f"{one}-in-the-middle-of-it-{other}" + "-z" * 20 for one in "xy" for other in "xy"],
    ],
)
def test_names_that_are_cut_still_differ(names, most):
    cut = words.fitted(names, most)
    assert list(cut) == names
    assert len(set(cut.values())) == len(names)
    assert max(map(len, cut.values())) <= most
    for name, short in cut.items():
        assert re.fullmatch(".*".join(map(re.escape, short.split("…"))), name)


@pytest.mark.parametrize("most", [16, 20, 28])
def test_the_words_that_differ_stay_whole(most):
    """Not only those in which it differs from the one most like it."""
    names = [CODER.format("0.5b", "q4_k_m"), CODER.format("1.5b", "q4_k_m"), CODER.format("1.5b", "F16")]
    for (size, kind), short in zip(
        [("0.5b", "q4_k_m"), ("1.5b", "q4_k_m"), ("1.5b", "F16")], words.fitted(names, most).values(), strict=True
    ):
        assert size in short
        assert kind in short


def test_the_middle_of_what_all_have_goes_first():
    cut = words.fitted([CODER.format("0.5b", "q4_k_m"), CODER.format("1.5b", "q4_k_m")], 28)
    assert list(cut.values()) == ["qwen2.5-coder-0.5b-…q4_k_m", "qwen2.5-coder-1.5b-…q4_k_m"]
    assert words.fitted(["short", "a" * 30], 20) == {"short": "short", "a" * 30: "a" * 7 + "…" + "a" * 12}


def test_what_cannot_be_cut_and_still_differ_stays_whole():
    names = ["x" * 12 + one + "y" * 12 for one in "12"]
    assert words.fitted(names, 10) == {name: name for name in names}


def test_targets_and_drafts_of_one_table_are_told_apart():
    big, small = CODER.format("1.5b", "q4_k_m"), CODER.format("0.5b", "q4_k_m")
    model = kept_results.compare().targets[0]
    cell = kept_results.compare().cells[1]
    document = replace(
        kept_results.compare(),
        targets=(replace(model, name=big),),
        drafts=(replace(model, name=small),),
        cells=(replace(cell, target=big, draft=small),),
    )
    targets, drafts = compare.names_of(document, 26)
    assert (targets[big], drafts[small]) == ("qwen2.5-coder-1.5b-…q4_k_m", "qwen2.5-coder-0.5b-…q4_k_m")


# ---- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_drawing_has_the_words_of_every_mark_and_the_colours_of_the_page(kind):
    for figure in sections.section(DOCUMENTS[kind]()).figures:
        root = ElementTree.fromstring(charts.draw(figure))
        titles = {element.text for element in root.iter("{http://www.w3.org/2000/svg}title")}
        assert {mark.description for mark in figure.marks if mark.kind != "line"} <= titles
        colours = {value for element in root.iter() for key in ("fill", "stroke") if (value := element.get(key))}
        assert {colour for colour in colours if not colour.startswith("var(")} <= {"none", "transparent"}


def test_a_plot_that_cannot_be_drawn_is_told(monkeypatch):
    import vl_convert

    def refuse(*_: Any, **__: Any) -> str:
        raise ValueError("no such mark")

    monkeypatch.setattr(vl_convert, "vegalite_to_svg", refuse)
    with pytest.raises(GgufspecError, match="'Tokens/s' cannot be drawn: no such mark"):
        render([kept_results.as_json(kept_results.bench())])


def test_one_point_and_equal_points_can_be_drawn():
    document = kept_results.compare()
    one = replace(document, cells=document.cells[:1], drafts=(), targets=document.targets[:1])
    for figure in sections.section(one).figures:
        charts.draw(figure)
    single = kept_results.sweep(points=kept_results.sweep().points[:1])
    for figure in sections.section(single).figures:
        charts.draw(figure)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_report_keeps_to_the_width(width):
    out = Console(file=io.StringIO(), width=width)
    for line in report.terminal(sections.report_section([make() for make in DOCUMENTS.values()]), width):
        out.print(line)
    assert max(map(len, out.file.getvalue().splitlines())) <= width
    assert "Speedup" in out.file.getvalue()


# ---- Markdown -------------------------------------------------------------------------------------------------------


def test_markdown_has_every_table_and_no_stranger_breaks_it():
    text = report.markdown(sections.report_section([kept_results.compare(prefix="a|b*c<d>-"), kept_results.bench()]))
    tables = [line for line in text.splitlines() if line.startswith("| ---")]
    assert len(tables) == 4 + 2
    assert "a\\|b\\*c&lt;d>" in text
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1


def test_known_schemas_are_those_of_their_documents(tmp_path: Path):
    for kind, make in DOCUMENTS.items():
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(kept_results.as_json(make())), encoding="utf-8")
        (document,) = read_document(path).values()
        assert isinstance(document, KNOWN[document.schema])
