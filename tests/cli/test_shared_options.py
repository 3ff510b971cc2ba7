"""Options that mean the same to every command: all of the layers, the micro-batch, the longest draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

from ggufspec import plan_pair
from ggufspec.api.pairs import open_pair, spec_of
from ggufspec.api.plan import make_plan
from ggufspec.api.resolve import resolve
from ggufspec.cli.app import app
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.llamacpp.options import Placement, offloaded
from ggufspec.settings.table import DRAFT_MAX, Settings
from tests.support.processes import Cli

CARD = ("--vram", "24GiB")
EVERYTHING = ("-ngl", "99", "-ngld", "1000")
PLACE = {"bench", "chat", "export", "plan", "rehearse", "run", "serve", "trace", "tune", "verify"}
DECODE = PLACE | {"compare"}


def layers(plan: dict) -> tuple[int, int]:
    return plan["target"]["gpu_layers"], plan["draft"]["gpu_layers"]


@pytest.mark.parametrize(
    ("wanted", "found"), [(-1, 9), (-7, 9), (0, 0), (1, 1), (8, 8), (9, 9), (10, 9), (99, 9), (2**40, 9)]
)
def test_a_number_beyond_the_layers_is_all_of_them(wanted: int, found: int) -> None:
    assert offloaded(wanted, 9) == Placement(wanted).offloaded(8) == found


def test_a_plan_takes_it(cli: Cli) -> None:
    typed = cli("plan", "demo", *CARD, *EVERYTHING, "--acceptance", "0.99", "--json").document()
    said = cli("plan", "demo", *CARD, "-ngl", "all", "-ngld", "all", "--acceptance", "0.99", "--json").document()
    assert typed["options"] == said["options"]
    assert layers(typed["options"]["speculative"]) == (9, 3)


def test_a_variable_takes_it(cli: Cli) -> None:
    everything = {"GGUFSPEC_NGL": "99", "GGUFSPEC_NGLD": "99"}
    few, many = (
        cli("plan", "demo", *CARD, "--json", GGUFSPEC_UBATCH_SIZE=size, **everything).document()["options"][
            "speculative"
        ]
        for size in ("32", "512")
    )
    assert layers(few) == layers(many) == (9, 3)
    assert few["target"]["bytes"]["GPU0"]["compute"] < many["target"]["bytes"]["GPU0"]["compute"]


def test_a_profile_takes_it(cli: Cli, target: Path, draft: Path) -> None:
    profile = cli.folder / "mine.toml"
    models = "".join(
        f"[{role}]\nfile = '{file}'\ngpu_layers = 99\n" for role, file in (("target", target), ("draft", draft))
    )
    settings = "[settings]\nmicro_batch = 32\n"
    profile.write_text(f"name = 'mine'\nwhy = 'x'\nsource = 'x'\n{models}{settings}", encoding="utf-8")
    plan = cli("plan", profile, *CARD, "--json").document()
    assert layers(plan["options"]["speculative"]) == (9, 3)
    less = plan["options"]["target_only"]["target"]["bytes"]["GPU0"]["compute"]
    more = cli("plan", profile, *CARD, "-ub", "512", "--json").document()
    assert less < more["options"]["target_only"]["target"]["bytes"]["GPU0"]["compute"]
    ran = cli("run", profile, "-p", "def f(", "-n", "4", "--json")
    assert ran.code == 0, ran.stderr


def test_a_keyword_takes_it() -> None:
    plan = plan_pair("demo", vram="24GiB", gpu_layers=99, gpu_layers_draft=99, acceptance=0.99)
    assert (plan.target.gpu_layers, plan.draft and plan.draft.gpu_layers) == (9, 3)
    few, many = (plan_pair("demo", vram="24GiB", gpu_layers=99, ubatch_size=size) for size in (32, 512))
    assert few.target.bytes["GPU0"]["compute"] < many.target.bytes["GPU0"]["compute"]
    with pytest.raises(UsageError, match="--ubatch-size 5000"):
        plan_pair("demo", vram="24GiB", ubatch_size=5000)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("llama-server", ("-ngl 99", "-ngld 1000", "-ub 64")),
        ("llama-bench", ("-ngl 99", "-ub 64")),
        ("ollama", ("PARAMETER num_gpu 99",)),
        ("lm-studio", ("--gpu max",)),
    ],
)
def test_an_export_takes_it(cli: Cli, program: str, words: tuple[str, ...]) -> None:
    done = cli("export", "demo", "--to", program, *EVERYTHING, "-ub", "64")
    assert done.code == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_a_sweep_measures_all_of_the_layers_once(cli: Cli) -> None:
    flags = ("--drafter", "lookup", "-p", "def f(", "-n", "4", "-r", "1", "--json")
    done = cli("bench", "demo", "--sweep", "-ngl", "0,9,20-99+60,all", *flags)
    swept = done.document()
    assert [point["value"] for point in swept["points"]] == ["0", "9"]
    assert "-ngl 9 is all 9 layers; so are 20, 80, all, which were left out" in swept["notes"]


def test_the_micro_batch_is_swept(cli: Cli) -> None:
    flags = ("--drafter", "lookup", "-p", "def f(", "-n", "4", "-r", "1", "--json")
    swept = cli("bench", "demo", "--sweep", "-ub", "16-64*2", *flags).document()
    assert swept["option"] == "ubatch_size"
    assert [point["value"] for point in swept["points"]] == swept["settings"]["ubatch_size"] == ["16", "32", "64"]
    refused = cli("bench", "demo", "--sweep", "-ub", "16,5000", *flags)
    assert (refused.code, "1 to 4096" in refused.document()["hint"]) == (2, True)


def test_every_command_that_places_or_decodes_has_them() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    flags = {name: {flag for option in one.whole.params for flag in option.opts} for name, one in commands.items()}
    assert {name for name, known in flags.items() if "-ngl" in known} == PLACE
    assert {name for name, known in flags.items() if "-ub" in known} == DECODE


def test_the_longest_draft_is_explained_once() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    said = [option.help for one in commands.values() for option in one.whole.params if "--draft-max" in option.opts]
    assert len(said) >= len(PLACE) - 1
    assert len(set(said)) == 1


def test_a_plan_considers_drafts_as_long_as_the_decoder_s() -> None:
    """One default: what is planned, rehearsed and decoded is the same where nothing is said."""
    pair = spec_of("demo")
    given = Settings(vram=("24GiB",))
    plan = make_plan(open_pair(pair, given)).plan
    assert plan.request.draft_max == DRAFT_MAX == DecoderOptions().draft_max
    assert plan.pair is not None
    fixed = resolve(open_pair(pair, replace(given, draft_policy="fixed")))
    assert fixed.pair.draft_max == plan.pair.draft_length
    short = resolve(open_pair(pair, replace(given, draft_max=3)))
    assert (short.pair.draft_max, short.pair.draft_policy) == (3, "adaptive")
