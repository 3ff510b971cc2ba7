"""Mixtures of experts on small GPUs, and tensors placed elsewhere, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evidence import mixtures

from tests.support import shapes
from tests.support.processes import Cli

RECORD = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "mixtures.json"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-ot", "ffn_("), ("'ffn_(' is not PATTERN=DEVICE", "-ot 'ffn_.*_exps=CPU'")),
        (("-ot", "ffn_(=CPU"), ("is not a valid regular expression: missing )",)),
        (("-ot", "(?i)ffn=CPU"), ("'(?'", "llama.cpp's regular expressions")),
        (("-ot", "ffn_exps=CPU"), ("matches no tensor's name", "ffn_gate_exps", "-ot 'ffn_.*_exps=CPU'")),
        (("-ot", "ffn=CUDA7"), ("-ot ffn=CUDA7 names a device", "CPU, GPU0")),
        (("--n-cpu-ffn", "2"), ("no dense feed-forward weights", "--n-cpu-moe")),
        (("--n-cpu-ffn", "-1"), ("--n-cpu-ffn -1 is out of range", "--n-cpu-ffn 10")),
    ],
)
def test_bad_input(cli: Cli, tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    file = shapes.write(tmp_path / "tiny-moe.gguf", shapes.SHAPES["tiny-moe"])
    done = cli("plan", "-m", file, "--vram", "1GiB", *flags)
    assert done.code == 2
    assert all(word in done.stderr.replace("\n", " ") for word in words), done.stderr


def test_a_run_refuses_a_pattern_before_it_loads(cli: Cli) -> None:
    done = cli("run", "demo", "-p", "hi", "-n", "2", "-ngl", "0", "-ngld", "0", "-ot", "nothing=CPU")
    assert done.code == 2
    assert "matches no tensor's name" in done.stderr


def test_a_plan_shows_tensors_elsewhere(cli: Cli, tmp_path: Path) -> None:
    file = shapes.write(tmp_path / "tiny-moe.gguf", shapes.SHAPES["tiny-moe"])
    given = ("-ngl", "all", "-ot", "attn_q=CPU,_exps=GPU0", "--n-cpu-moe", "2")
    target = cli("plan", "-m", file, "--vram", "2GiB", *given, "--json").document()["target"]
    assert (target["override_tensor"], target["n_cpu_moe"]) == (["attn_q=CPU", "_exps=GPU0"], 2)
    shown = cli("plan", "-m", file, "--vram", "2GiB", *given).stdout
    assert "-ot attn_q=CPU _exps=GPU0" in " ".join(shown.split())


@pytest.mark.full
def test_a_draft_is_left_off_on_a_small_active_mixture(tmp_path: Path) -> None:
    target, draft = mixtures.pairs()["qwen3-30b-a3b"]
    files = [shapes.write(tmp_path / f"{shape.name}.gguf", shape) for shape in (target, draft)]
    document, _ = mixtures.plan(*files, 8, tmp_path / "cache")
    assert document["choice"] == "target-only"
    assert "uses different experts: verifying" in document["why"]
    assert document["confirmed"]
    assert document["target"]["n_cpu_moe"] > 0
    option = document["options"]["target_only"]
    assert mixtures.sums_agree(option, mixtures.header_of(files[0]), document["settings"])


def test_the_record_says_the_same() -> None:
    rows = json.loads(RECORD.read_text())["results"]["plans"].values()
    assert len(rows) == 8
    assert all(row["confirmed"] and row["sums"] and row["choice"] == "target-only" for row in rows)
    assert all(row["card_bytes"] <= row["budget_bytes"] for row in rows)
