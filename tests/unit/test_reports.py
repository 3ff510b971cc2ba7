"""The JSON contract, the tables, and files that are written whole or not at all."""

import csv
import io
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ggufspec.errors import GgufspecError
from ggufspec.files.write import check_writable, write_whole
from ggufspec.reports import bench, table, words
from ggufspec.schema.base import ErrorDocument, MeasuredRun, Portion, SpeculativeRun, Spread, to_json
from ggufspec.schema.bench import BenchDocument, BenchVerdict, Divergence, LengthSpeedup
from ggufspec.schema.run import RunDocument

MODES = ("target_only", "draft_only", "speculative")
ALONE = MeasuredRun(
    gpu_layers=45,
    layers=80,
    tokens=96,
    tokens_per_s=Spread(2.0, (1.9, 2.05), (1.9, 2.0, 2.05)),
    prompt_tokens_per_s=30.0,
    prompt_tokens=24,
    time_to_first_token_s=1.234,
    peak_rss_bytes=1000,
    vram_bytes=500,
    load_s=1.5,
)
PAIR = SpeculativeRun(
    gpu_layers=45,
    layers=80,
    tokens=96,
    tokens_per_s=Spread(12.34, (12.0, 12.9), (12.0, 12.34, 12.9)),
    prompt_tokens_per_s=31.0,
    peak_rss_bytes=2000,
    vram_bytes=700,
    load_s=2.5,
    gpu_layers_draft=33,
    draft_layers=32,
    acceptance_rate=0.625,
    tokens_per_round=2.5,
    accepted_by_position=(0.8, 0.5),
    drafted=200,
    accepted=125,
    rounds=100,
    draft_s=0.01,
    verify_s=0.02,
)


def document(**changes):
    fields = {
        "pair": {"name": "mine", "target": "t.gguf", "draft": "d.gguf"},
        "machine": {"cpu": "a cpu"},
        "plan": {},
        "settings": {"draft_max": 2},
        "runs": {"target_only": ALONE, "draft_only": None, "speculative": PAIR},
        "speedup": Spread(6.17, (6.0, 6.5), (6.0, 6.17, 6.5)),
        "identical_output": True,
        "identity_check": {"note": "96 tokens"},
        "divergences": (Divergence(0, 7, 11, 12, 0.01, 0.1, True),),
        "verdict": BenchVerdict(True, "Worth it: 6.17×.", "A round gives 2.50 tokens."),
    }
    return BenchDocument(**fields | changes)


def test_the_bench_document_keeps_its_contract():
    text = to_json(document())
    found = json.loads(text)
    assert text.startswith('{\n  "schema": "ggufspec/bench@1"')
    contract = "pair machine plan settings runs speedup identical_output divergences verdict"
    assert {"schema", *contract.split()} <= set(found)
    assert set(found["runs"]) == {"target_only", "draft_only", "speculative"}
    assert found["runs"]["draft_only"] is None
    run = {"gpu_layers", "tokens", "tokens_per_s", "prompt_tokens_per_s", "peak_rss_bytes", "vram_bytes"}
    more = {"acceptance_rate", "tokens_per_round", "accepted_by_position", "drafted", "accepted", "rounds"}
    assert run <= set(found["runs"]["target_only"])
    assert run | more <= set(found["runs"]["speculative"])
    assert found["runs"]["target_only"]["tokens_per_s"] == {
        "median": 2.0,
        "ci95": [1.9, 2.05],
        "samples": [1.9, 2.0, 2.05],
    }
    assert found["speedup"]["ci95"] == [6.0, 6.5]
    assert found["runs"]["speculative"]["accepted_by_position"] == [0.8, 0.5]
    assert found["verdict"] == {
        "worth_it": True,
        "text": "Worth it: 6.17×.",
        "why": "A round gives 2.50 tokens.",
    }
    assert found["identical_output"] is True
    assert found["divergences"][0] == {
        "prompt": 0,
        "position": 7,
        "target_only": 11,
        "speculative": 12,
        "margin": 0.01,
        "noise": 0.1,
        "explained": True,
    }


def test_an_unfinished_bench_is_a_document_too():
    found = json.loads(to_json(document(runs=dict.fromkeys(MODES), speedup=None, identical_output=None)))
    assert (found["runs"], found["speedup"], found["identical_output"]) == (dict.fromkeys(MODES), None, None)


def test_the_run_document_keeps_its_contract():
    found = json.loads(to_json(RunDocument({}, {}, "é\n", (1, 2), "end", PAIR)))
    assert (found["schema"], found["text"], found["tokens"]) == ("ggufspec/run@1", "é\n", [1, 2])
    assert found["statistics"]["tokens_per_s"]["median"] == 12.34
    assert (found["notes"], found["interrupted"]) == ([], False)


def test_the_error_document_keeps_its_contract():
    found = json.loads(to_json(ErrorDocument("it broke", "ls")))
    assert found == {"schema": "ggufspec/error@1", "error": "it broke", "hint": "ls"}


def labels(document):
    return tuple(column.label for column in bench.results(document).columns)


def test_a_row_per_run_that_was_measured():
    assert bench.results(document()).cells == [
        ("target-only", "45/81", "2.00 ± 0.10", "", "", "", ""),
        ("speculative", "45/81 + 33/33", "12.3 ± 0.6", "6.17×", "62%", "2.50", "80% 50%"),
    ]


def test_nothing_drafted_is_not_nothing_accepted():
    idle = replace(PAIR, drafted=0, accepted=0, acceptance_rate=0.0, accepted_by_position=())
    rows = bench.results(document(runs={"speculative": idle})).cells
    assert rows == [("speculative", "45/81 + 33/33", "12.3 ± 0.6", "6.17×", "–", "2.50", "")]


def test_a_lookup_has_no_layers():
    lookup = replace(PAIR, gpu_layers_draft=0, draft_layers=0)
    assert bench.results(document(runs={"speculative": lookup})).cells[0][1] == "45/81"


LOSSY = document(runs={"target_only": ALONE, "draft_only": ALONE, "speculative": replace(PAIR, lossy=True)})


def test_a_lossy_run_is_labelled_everywhere():
    assert [row[0] for row in bench.results(LOSSY).cells] == ["target-only", "draft-only", "speculative (lossy)"]
    assert "| speculative (lossy) |" in bench.markdown(LOSSY)
    lines = csv.DictReader(io.StringIO(bench.comma_separated(LOSSY)))
    assert [line["lossy"] for line in lines] == ["False"] * 6 + ["True"] * 3
    assert json.loads(to_json(LOSSY))["runs"]["speculative"]["lossy"] is True


def test_no_gain_without_a_speedup():
    assert bench.results(document(speedup=None)).cells[1][3] == ""


@pytest.mark.parametrize(
    ("median", "shown"), [(0.123, "0.12 ± 1.00"), (9.99, "9.99 ± 1.00"), (10, "10.0 ± 1.0"), (123.4, "123 ± 1")]
)
def test_a_number_is_as_long_as_it_is_sure(median, shown):
    run = MeasuredRun(0, 8, 1, Spread(median, (median - 1, median + 0.5), (median - 1, median + 0.5)), 1.0, 0, 0, 0.0)
    assert bench.results(document(runs={"target_only": run})).cells[0][2] == shown


def test_one_trial_has_no_spread():
    run = MeasuredRun(0, 8, 1, Spread(2.0, (2.0, 2.0), (2.0,)), 1.0, 0, 0, 0.0)
    assert bench.results(document(runs={"target_only": run})).cells[0][2] == "2.00"


def test_markdown_has_the_same_cells_and_the_verdict():
    lines = bench.markdown(document()).splitlines()
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[:4]]
    assert [cells[0], *cells[2:]] == [labels(document()), *bench.results(document()).cells]
    assert lines[4:] == ["", "Worth it: 6.17×. A round gives 2.50 tokens."]


def test_markdown_begins_with_what_it_must_be_read_with():
    pair = {"name": "mine", "note": "An expanded pair."}
    assert bench.markdown(document(pair=pair)) == f"An expanded pair.\n\n{bench.markdown(document())}"


def test_csv_has_a_line_per_trial_with_raw_numbers():
    lines = list(csv.DictReader(io.StringIO(bench.comma_separated(document()))))
    assert [(line["run"], line["trial"], float(line["tokens_per_s"])) for line in lines] == [
        ("target_only", "1", 1.9),
        ("target_only", "2", 2.0),
        ("target_only", "3", 2.05),
        ("speculative", "1", 12.0),
        ("speculative", "2", 12.34),
        ("speculative", "3", 12.9),
    ]
    assert (lines[0]["acceptance_rate"], lines[3]["acceptance_rate"]) == ("", "0.625")
    assert (lines[0]["peak_rss_bytes"], lines[3]["peak_rss_bytes"]) == ("1000", "2000")
    assert (lines[0]["prompt_tokens_per_s"], lines[0]["time_to_first_token_s"]) == ("30.0", "1.234")
    assert lines[3]["time_to_first_token_s"] == ""


LONG = {"answer_tokens": 256, "by_length": (LengthSpeedup(256, 134.2, 21.1, Spread(6.17, (6.0, 6.5), (6.1, 6.2))),)}


@pytest.mark.parametrize("one", [document(), LOSSY, replace(LOSSY, **LONG)], ids=["exact", "lossy", "answers"])
def test_the_terminal_shows_all_but_what_is_in_files_in_80_columns(one):
    out = Console(file=io.StringIO(), width=80)
    out.print(table.terminal(bench.results(one)))
    shown = out.file.getvalue()
    assert all(cell in shown for row in (labels(one), *bench.results(one).cells) for cell in row[:-2])


def test_where_there_is_no_gpu_the_terminal_shows_no_layers():
    runs = {"target_only": replace(ALONE, gpu_layers=0), "speculative": replace(PAIR, gpu_layers=0, gpu_layers_draft=0)}
    one, out = document(runs=runs), Console(file=io.StringIO(), width=80)
    out.print(table.terminal(bench.results(one)))
    shown = out.file.getvalue()
    assert "GPU layers" not in shown
    assert "0/81" not in shown
    assert all(cell in shown for row in bench.results(one).cells for cell in (row[0], *row[2:-2]))


def test_only_the_first_positions_are_shown():
    long = replace(PAIR, accepted_by_position=(0.5,) * 15)
    assert bench.results(document(runs={"speculative": long})).cells[0][-1] == "50% " * 8 + "…"


def test_the_line_about_the_text():
    """A near tie is no other text; what is unexplained is counted too."""
    settings = {"prompts": 4}
    found = bench.same_text(document(settings=settings))
    assert found == (
        "The same text with and without a draft: 96 tokens. Without --strict 1 of 4 answers differ, "
        "1 of them at a near tie that rounding decides."
    )
    wrong = replace(document().divergences[0], explained=False)
    assert "2 of 4 answers differ, 1 of them" in bench.same_text(
        document(settings=settings, divergences=(wrong, *document().divergences))
    )
    assert bench.same_text(document(divergences=())) == "The same text with and without a draft: 96 tokens."
    assert bench.same_text(document(divergences=(), identical_output=False)).startswith("NOT the same text")
    unchecked = document(identical_output=None, identity_check={"note": "its memory is recurrent"}, divergences=())
    assert bench.same_text(unchecked) == "Whether a draft changes the text was not checked: its memory is recurrent."
    assert bench.same_text(document(identical_output=None, identity_check={"note": ""})) == ""
    check = {"note": "no time", "compared": 3, "different": 0}
    same = bench.same_text(replace(unchecked, identity_check=check))
    assert same == "The same text with and without a draft in 3 measured answers; strict mode was not checked: no time."
    differing = bench.same_text(replace(unchecked, identity_check=check | {"different": 2}))
    assert differing == "With a draft 2 of 3 answers differ; strict mode was not checked: no time."


@pytest.mark.parametrize(
    ("drafted", "kept", "shown"), [(0, 0, "–"), (3, 1, "1 of 3"), (19, 0, "0 of 19"), (20, 13, "65%"), (2000, 1, "0%")]
)
def test_few_drafted_tokens_are_counts_and_many_a_share(drafted, kept, shown):
    pair = replace(PAIR, drafted=drafted, accepted=kept, acceptance_rate=kept / max(drafted, 1))
    assert bench.results(document(runs={"speculative": pair})).cells[0][4] == shown
    portion = Portion("edit", 50, ALONE.tokens_per_s, PAIR.tokens_per_s, PAIR.tokens_per_s, drafted, kept)
    assert bench.portions((portion, portion), ()).cells[0][1] == shown
    assert (words.acceptance(pair) is None) == (drafted < 20)


@pytest.mark.parametrize(
    ("drafter", "by_lookup", "line"),
    [
        ("both", (3, 1), "Accepted: draft model 124 of 197 (63%), n-gram lookup 1 of 3."),
        ("mtp+lookup", (150, 100), "Accepted: MTP head 25 of 50 (50%), n-gram lookup 100 of 150 (67%)."),
        ("both", (0, 0), ""),
        ("both", (200, 125), ""),  # the verdict says that only the lookup drafted
        ("lookup", (200, 125), ""),
        ("draft", (0, 0), ""),
    ],
)
def test_where_two_drafters_drafted_each_has_its_tokens(drafter, by_lookup, line):
    pair = replace(PAIR, lookup_drafted=by_lookup[0], lookup_accepted=by_lookup[1])
    one = document(settings={"drafter": drafter}, runs={"target_only": ALONE, "speculative": pair})
    assert [text for text in bench.remarks(one) if text.startswith("Accepted")] == [line] * bool(line)
    assert (line in bench.markdown(one).replace("\\", "")) is True


@pytest.mark.parametrize(("measured", "end"), [(256, "included."), (255, "included (extrapolated).")])
def test_what_times_and_speedups_are_for_is_below_the_table(measured, end):
    note = bench.footnote(document(**LONG, measured_tokens=measured))
    assert note.startswith("Tokens/s covers generation only; 256 tokens and Speedup cover whole answers")
    assert note.endswith(end)
    assert bench.footnote(document()) == ""  # of an older version


def test_the_line_about_prompts():
    """A result of an earlier version does not have the wait; a prompt of one token has no speed."""
    waits = replace(PAIR, prompt_tokens=24, time_to_first_token_s=0.0123)
    assert bench.prompts(document(runs={"target_only": ALONE, "draft_only": None, "speculative": waits})) == (
        "Prompts: target-only 24 tokens at 30.0/s, first token after 1.23 s; "
        "speculative 24 tokens at 31.0/s, first token after 12 ms."
    )
    single = replace(ALONE, prompt_tokens=0, time_to_first_token_s=0.0042)
    assert bench.prompts(document(runs={"target_only": single})) == "Prompts: target-only first token after 4.2 ms."
    old = replace(ALONE, prompt_tokens=0, time_to_first_token_s=None)
    assert bench.prompts(document(runs={"target_only": old, "speculative": None})) == ""


# files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_checking_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "new.json")
    assert names(tmp_path) == []


def test_checking_leaves_what_was_there(tmp_path):
    path = tmp_path / "old.json"
    path.write_text("old")
    check_writable(path)
    assert (path.read_text(), names(tmp_path)) == ("old", ["old.json"])


@pytest.mark.parametrize("name", ["missing/new.json", ".", "file/new.json"])
@pytest.mark.parametrize("act", [check_writable, lambda path: write_whole(path, "new")])
def test_what_cannot_be_written_is_named(tmp_path, name, act):
    (tmp_path / "file").touch()
    with pytest.raises(GgufspecError, match="cannot be written") as caught:
        act(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message
    assert names(tmp_path) == ["file"]


def test_a_file_is_written(tmp_path):
    path = tmp_path / "new.json"
    write_whole(path, "é\n")
    assert (path.read_bytes(), names(tmp_path)) == ("é\n".encode(), ["new.json"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_that_was_there_is_replaced_and_keeps_its_mode(tmp_path):
    path = tmp_path / "old.json"
    path.write_text("a longer old text")
    path.chmod(0o600)
    write_whole(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


@pytest.mark.parametrize("step", ["chmod", "replace"])
def test_the_old_file_stays_when_writing_fails(tmp_path, monkeypatch, step):
    path = tmp_path / "old.json"
    path.write_text("old")

    def full(*_):
        assert path.read_text() == "old"  # until the new one is complete
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"pathlib.Path.{step}", full)
    with pytest.raises(GgufspecError, match=r"old\.json cannot be written: No space left on device"):
        write_whole(path, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["old.json"])


def test_the_old_file_stays_when_writing_is_interrupted(tmp_path, monkeypatch):
    path = tmp_path / "old.json"
    path.write_text("old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["old.json"])


def test_what_utf_8_lacks_is_replaced(tmp_path):
    """Half of a surrogate pair: a byte of a file's name that is not UTF-8, say."""
    write_whole(tmp_path / "new.txt", "a\ud800b ×")
    assert (tmp_path / "new.txt").read_bytes() == "a?b ×".encode()


def test_a_full_device_is_told():
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("no /dev/full here")
    check_writable(full)
    with pytest.raises(GgufspecError, match="No space left"):
        write_whole(full, "new")
    assert full.is_char_device()


def test_a_device_is_written_in_place():
    reader, writer = os.openpty()
    try:
        path = Path(os.ttyname(writer))
        check_writable(path)
        write_whole(path, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_link_is_written_through(tmp_path):
    """/dev/stdout is one."""
    (tmp_path / "real").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("real")
    check_writable(link)
    write_whole(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert names(tmp_path) == ["link", "real"]


def test_checking_a_link_to_nothing_leaves_it_alone(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("new")
    check_writable(link)
    assert names(tmp_path) == ["link"]
    write_whole(link, "new")
    assert (tmp_path / "new").read_text() == "new"
    assert link.is_symlink()


def test_a_bench_says_how_much_it_rests_on() -> None:
    """A budget makes answers shorter, or fewer; what only informs is measured less in any case."""
    pair = replace(PAIR, prompts=8, answers=12, tokens=8 * 38)
    alone, draft = replace(pair), replace(ALONE, prompts=3, answers=3, tokens=96)
    found = document(runs={"target_only": alone, "draft_only": draft, "speculative": pair})
    said = "Measured: target-only, speculative on 8 prompts × 38 tokens, 1 to 2 times; "
    said += "draft-only on 3 prompts × 32 tokens, once."
    assert bench.rests_on(found) == said
    assert said in bench.remarks(found)
    assert said in bench.markdown(found)
    assert bench.rests_on(document()) == ""  # of a document of before


def test_a_bench_says_what_short_and_long_answers_gain() -> None:
    rows = [
        LengthSpeedup(n, 2.0 * n, 1.0 * n, Spread(m, (m - 0.1, m + 0.2), (m, m))) for n, m in ((50, 1.2), (500, 1.7))
    ]
    found = document(answer_tokens=256, measured_tokens=66, by_length=tuple(rows))
    said = "Speedup by length: 50 tokens 1.20× (1.10 to 1.40), 500 tokens 1.70× (1.60 to 1.90)"
    assert bench.by_length(found) == f"{said}; extrapolated beyond 66."
    assert bench.by_length(replace(found, measured_tokens=500)) == f"{said}."
    assert said in bench.markdown(found)
    assert bench.by_length(document()) == bench.answer_times(document()) == ""  # of a document of before
    assert json.loads(to_json(found))["by_length"][1]["speedup"]["ci95"] == pytest.approx([1.6, 1.9])
