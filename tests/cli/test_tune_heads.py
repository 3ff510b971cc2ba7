"""Tuning of a pair with a head: the head is one of the drafters, and what wins goes on to the other commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggufspec.api.pairs import open_pair
from ggufspec.api.plan import make_plan
from ggufspec.api.resolve import with_placement
from ggufspec.decoding.options import DecoderOptions
from ggufspec.models.profile import PairSpec, bundled_folder, load_profile
from ggufspec.schema.tune import TunedSetting
from ggufspec.settings.table import Settings
from ggufspec.tune.space import FreeValues, difference, nearest_setting, tune_candidates
from tests.support import heads
from tests.support.processes import Cli

ONE = ("-p", "def f(", "-n", "4", "-r", "1", "-fa", "auto", "-ub", "512", "--draft-policy", "adaptive")
DEMO = bundled_folder() / "demo"


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target with an MTP block in its own file."""
    return heads.write_mtp(target, tmp_path_factory.mktemp("mtp") / "whole.gguf")


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_memory_of_a_setting_is_that_of_the_plan(target: Path, whole: Path, kind: str) -> None:
    """On a card that is not here, by the same dry runs: with the head, and without it."""
    spec = PairSpec("p", target, DEMO / "demo-eagle3-Q8_0.gguf") if kind == "eagle3" else PairSpec("p", whole, None)
    options = DecoderOptions(ctx_size=512, threads=1, drafters=(kind, "lookup"), draft_max=8)
    planned = make_plan(open_pair(spec, Settings(vram=("24GiB",), draft_max=8), options))
    plan, card = planned.plan, planned.plan.machine.cards[0]
    assert plan.pair is not None
    free = FreeValues((1,), (f"{kind}+lookup", "lookup", "none"), (("adaptive", 8),), ("auto",), ubatch_sizes=(512,))
    with planned.dry_runs:
        space = tune_candidates(plan, with_placement(options, plan.pair), free, planned.dry_runs)
    for option, drafted in ((plan.pair, True), (plan.target_only, False)):
        index = nearest_setting(space, with_placement(options, option), drafted=drafted)
        assert index is not None
        found = space[index]
        assert found.setting.drafter == (f"{kind}+lookup" if drafted else "none")
        assert found.setting.gpu_layers == option.target.gpu_layers
        used = option.used(card.name).total + card.overhead_bytes
        assert found.memory[0] * card.free_bytes == pytest.approx(used, rel=1e-6)
        if not drafted:
            assert found.predicted == pytest.approx(option.tokens_per_s, rel=1e-6)
    with_head = {one.setting.gpu_layers: one.memory[0] for one in space if one.setting.drafter == f"{kind}+lookup"}
    lookup = {one.setting.gpu_layers: one.memory[0] for one in space if one.setting.drafter == "lookup"}
    assert all(with_head[layers] > lookup[layers] for layers in lookup if layers)


def test_a_head_is_one_of_the_drafters(cli: Cli) -> None:
    done = cli("tune", "demo-eagle3", *ONE, "--save", "demo-eagle3", "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    drafters = {trial["setting"]["drafter"] for trial in document["trials"]}
    assert drafters == {"eagle3+lookup", "eagle3", "lookup", "none"}
    best = document["trials"][document["winner"]]["setting"]
    saved = load_profile(Path(document["saved"]))
    assert (saved.settings.drafter, saved.draft is not None) == (best["drafter"], True)


def test_mtp_blocks_of_the_target_take_part_without_being_asked_for(cli: Cli, whole: Path) -> None:
    done = cli("tune", "-m", whole, *ONE, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert {trial["setting"]["drafter"] for trial in document["trials"]} == {"mtp+lookup", "mtp", "lookup", "none"}
    assert document["pair"]["draft"] is None
    assert document["pair"]["draft_shape"] == "1 MTP block of the target's file"


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_won_goes_on_to_the_other_commands(cli: Cli, whole: Path, kind: str) -> None:
    pair = ("demo-eagle3",) if kind == "eagle3" else ("-m", str(whole))
    done = cli("tune", *pair, *ONE, "--drafter", kind, "--save", "won", COLUMNS="120")
    assert done.code == 0, done.stderr
    label = {"eagle3": "ngl 0, ngld 0, EAGLE-3 head", "mtp": "ngl 0, MTP head"}[kind]
    assert f"The fastest: {label}, adaptive up to 63, 1 thread." in done.stdout
    assert load_profile(Path(cli.environment["HOME"]) / ".config/ggufspec/profiles/won.toml").settings.drafter == kind
    settings = cli("run", "won", "-p", "def f(", "-n", "4", "--json").document()["settings"]
    assert settings["drafter"] == kind
    bench = cli("bench", "won", "-p", "def f(", "-n", "4", "-r", "1", "--json")
    assert bench.code == 0, bench.stderr
    assert bench.document()["settings"]["drafter"] == kind
    assert f"--spec-type draft-{kind}" in cli("export", "won").stdout


def test_a_profile_without_a_draft_is_benched_by_its_own_drafter(cli: Cli, target: Path) -> None:
    path = cli.folder / "own.toml"
    text = f'name = "own"\nwhy = "w"\nsource = "s"\n[target]\nfile = "{target}"\n'
    path.write_text(f'{text}[settings]\ndrafter = "lookup"\n')
    done = cli("bench", path, "-p", "def f(", "-n", "4", "-r", "1", "--json")
    assert done.code == 0, done.stderr
    assert done.document()["settings"]["drafter"] == "lookup"
    path.write_text(text)
    assert "a bench compares with a draft, but none is given" in cli("bench", path, "-n", "4", "-r", "1").stderr


def test_another_draft_than_a_profile_s_head_need_be_none(cli: Cli, draft: Path) -> None:
    path = cli.folder / "own.toml"
    text = (bundled_folder() / "demo-eagle3.toml").read_text().replace('"demo/', f'"{DEMO}/')
    path.write_text(f'{text}drafter = "eagle3+lookup"\n')
    document = cli("run", path, "-p", "def f(", "-n", "4", "--json").document()
    assert document["settings"]["drafter"] == "eagle3+lookup"
    done = cli("run", path, "-md", draft, "-p", "def f(", "-n", "4", "--json")
    assert done.code == 0, done.stderr
    assert done.document()["settings"]["drafter"] == "both"


def test_a_head_is_named_in_what_changes() -> None:
    def setting(drafter: str) -> TunedSetting:
        return TunedSetting(0, 0, 0, drafter != "none", drafter, "adaptive", 15, "f16", "f16", "auto", 1, 512)

    assert difference(setting("none"), setting("eagle3"))[0] == "only the EAGLE-3 head"
    assert difference(setting("none"), setting("eagle3+lookup"))[0] == "EAGLE-3 head and n-gram lookup"


def test_acceptance_of_the_target_s_own_head_is_known_to_later_plans(cli: Cli, whole: Path) -> None:
    pair = ("-m", whole, "--drafter", "mtp")
    assert "Chance per token: 70%, assumed." in cli("plan", *pair, "-v", COLUMNS="120").stdout
    done = cli("bench", *pair, "-p", "def f(", "-n", "16", "-r", "1", "--draft-policy", "fixed", "--json")
    assert done.document()["runs"]["speculative"]["drafted"] > 0, done.stderr
    assert "tokens measured here" in cli("plan", *pair, "-v", COLUMNS="120").stdout
