"""``ggufspec plan`` as a user types it: headers from a hub on loopback, cards that are not here, terminals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec import demo_pair
from ggufspec.hardware.host import cpu_name
from ggufspec.planning import catalogue, machine_profile
from tests.support import shapes
from tests.support.processes import Cli, plain, rest
from tests.support.server import serving

TARGET, DRAFT = "Meta-Llama-3-70B-Instruct-Q3_K_S.gguf", "Meta-Llama-3-8B-Instruct.Q3_K_L.gguf"
CARD = ("--gpu", "RTX 4090")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The profile's two repositories, files of true size, on loopback."""
    folder = tmp_path_factory.mktemp("hub")
    with serving() as server:
        for repo, name, shape in (
            ("NousResearch/Meta-Llama-3-70B-Instruct-GGUF", TARGET, "llama3-70b-q3_k_s"),
            ("QuantFactory/Meta-Llama-3-8B-Instruct-GGUF", DRAFT, "llama3-8b-q3_k_l"),
        ):
            (folder / name).mkdir()
            shapes.write(folder / name / name, shapes.SHAPES[shape], tokenizer=True)
            server.add_repo(repo, folder / name)
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same files here: (target, draft)."""
    folder = tmp_path_factory.mktemp("files")
    return tuple(
        shapes.write(folder / f"{name}.gguf", shapes.SHAPES[name], tokenizer=True)
        for name in ("llama3-70b-q3_k_s", "llama3-8b-q3_k_l")
    )


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_answer_comes_first(cli: Cli, files: tuple[Path, Path], columns: str) -> None:
    """What fits, the verdict, what to type and the options of a pair on one card; -v has the rest, and no log."""
    asked = ("plan", "-m", files[0], "-md", files[1], *CARD)
    done = cli(*asked, COLUMNS=columns)
    lines = plain(done.stdout).splitlines()
    plan = cli(*asked, "--json").document()
    typed = " next: ".join([plan["why"], plan["next"], *plan["also"]])
    assert " ".join(done.stdout.split()).startswith(f"{typed} ")
    assert re.match(
        r"Fits in part: \d\d/81 layers on the GPU.* the rest is in RAM\. (Use|Leave) the draft", plan["why"]
    )
    assert f"next: ggufspec bench -m {files[0]} -md {files[1]}" in lines  # not wrapped, to be pasted
    note = sum("--ram SIZE plans with less" in line for line in lines)
    assert len(lines) <= 25 + 2 * note
    assert "Pays above" not in done.stdout
    assert not re.search(r"\bt/s\b|streamed", done.stdout)
    everything = cli(*asked, "-v", COLUMNS=columns)
    assert everything.stderr == ""
    assert plain(everything.stdout).splitlines()[:10] == lines[:10]
    assert all(words in everything.stdout for words in ("Pays above", "Context", "Bytes are", "Chance per token"))


@pytest.mark.full
@pytest.mark.parametrize("command", [("plan", "demo"), ("tune", "demo", "-p", "def f(", "-n", "4", "--budget", "5s")])
def test_what_was_measured_on_a_busy_machine_is_measured_again(cli: Cli, command: tuple[str, ...]) -> None:
    """One thread, which others always leave: that the machine of the tests is busy tells nothing here."""
    folder = Path(cli.environment["HOME"], ".cache", "ggufspec")
    speed = replace(catalogue.from_catalogue([]), origin="measured once", disturbed="other programs used 1.0 CPUs")
    machine_profile._keep(folder, speed, machine_profile.machine_identity(1))
    done = cli(*command, "--json", GGUFSPEC_NO_CALIBRATE="")
    assert "it was measured while other programs used 1.0 CPUs" in done.stderr
    again = machine_profile._kept(folder, 1)
    assert again is not None
    assert again.speed.disturbed == ""
    assert done.code == 0


def test_a_pair_that_is_not_here_on_a_card_that_is_not_here(cli: Cli, hub) -> None:
    online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
    done = cli("plan", "llama3-70b", *CARD, "--json", **online)
    assert done.code == 0, done.stderr
    plan = done.document()
    assert plan["schema"] == "ggufspec/plan@1"
    assert plan["confirmed"]
    card, host = plan["devices"]
    assert (card["name"], card["description"], host["name"]) == ("GPU0", "RTX 4090", "CPU")
    assert 0.9 * card["budget_bytes"] < card["used_bytes"] <= card["budget_bytes"] < card["free_bytes"] == 24 << 30
    assert plan["target"]["layers"] == 80
    assert 45 < plan["options"]["target_only"]["target"]["gpu_layers"] < 81
    used = sum(sum(model["bytes"]["GPU0"].values()) for model in (plan["target"], plan["draft"]) if model)
    assert used + card["overhead_bytes"] == card["used_bytes"]
    assert {"target_only_tokens_per_s", "speculative_tokens_per_s", "break_even_acceptance"} <= set(plan["predicted"])
    predicted, run = plan["predicted"], plan["options"]["default"]
    at_pair = predicted["target_only_at_pair_tokens_per_s"]
    assert run["tokens_per_s"] == max(at_pair, predicted["speculative_tokens_per_s"])
    assert plan["settings"]["acceptance_from"] == "from its profile"
    assert predicted["accepted_share"] > predicted["break_even_accepted_share"]
    assert plan["assumptions"] == ["The speeds of the CPU and its memory are guesses"]
    assert (plan["next"], plan["tuned"]) == ("ggufspec bench llama3-70b", None)
    assert plan["choice"] in ("speculative", "target-only")
    assert plan["why"].endswith(".")
    assert sum(hub.sent.values()) < 2 * 12e6

    again = cli("plan", "llama3-70b", *CARD, "--json", HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")
    assert again.document()["target"] == plan["target"]  # what was read is kept


def test_the_draft_is_priced_in_target_layers(cli: Cli, files) -> None:
    """The draft wholly on the card: the notebook's arithmetic."""
    done = cli("plan", "-m", files[0], "-md", files[1], *CARD, "-ngld", "all", "--n-cpu-ffn", "0", "--json")
    plan = done.document()
    assert 10 <= plan["draft_costs_layers"] <= 16
    assert f"costs {plan['draft_costs_layers']} target layers" in plan["why"]
    pair, alone = plan["options"]["speculative"], plan["options"]["target_only"]
    assert alone["target"]["gpu_layers"] - pair["target"]["gpu_layers"] == plan["draft_costs_layers"]


def test_the_draft_is_priced_in_weights_where_blocks_are_divided(cli: Cli, files) -> None:
    done = cli("plan", "-m", files[0], "-md", files[1], *CARD, "-ngld", "all", "--n-cpu-ffn", "40", "--json")
    plan = done.document()
    assert plan["options"]["target_only"]["target"]["n_cpu_ffn"] < 40  # it is free there
    assert 8 <= plan["draft_costs_layers"] <= 18


@pytest.mark.parametrize(("columns", "colour"), [(80, True), (120, False)])
def test_the_plan_in_a_terminal(cli: Cli, files, columns: int, colour: bool) -> None:
    more = {} if colour else {"NO_COLOR": "1"}
    child = cli.terminal("plan", "-m", str(files[0]), "-md", str(files[1]), *CARD, "--sweep", columns=columns, **more)
    shown = rest(child)
    assert child.exitstatus == 0
    assert ("\x1b[34m" in shown) == colour
    lines = plain(shown).splitlines()
    assert max(len(line) for line in lines if not line.startswith("next: ")) <= columns
    bar = next(line for line in lines if line.startswith("█"))
    assert len(bar.rstrip()) == min(columns, 100)
    assert any("█ target" in line for line in lines)
    assert any("· free" in line for line in lines)
    assert any("Target layers" in line for line in lines)
    assert any("81/81" in line and "–" in line for line in lines)  # does not fit
    chosen = re.search(r"target-only +(\d+)/81 .*?speculative +(\d+)/81\b", " ".join(lines))
    assert chosen
    rows = [f"{chosen[1]}/81 target-only", f"{chosen[2]}/81 speculative"]
    rows = [f"{chosen[1]}/81 both"] if chosen[1] == chosen[2] else rows
    shown_rows = [" ".join([line.split()[0], line.split()[-1]]) for line in lines if re.match(r" *\d+/81 ", line)]
    assert set(rows) <= set(shown_rows)


def test_without_a_gpu_no_row_reads_as_a_failure_to_fit(cli: Cli) -> None:
    shown = cli("plan", "demo", "-v", COLUMNS="120").stdout
    assert shown.startswith("No GPU found. Fits into memory, all on the CPU: ")
    assert not re.search(r"\b0/\d", shown)
    assert re.search(r"target-only +CPU .*\n *speculative +CPU +CPU ", plain(shown))


@pytest.mark.parametrize("acceptance", ["0.9", "0.01"])
def test_a_pair_is_always_benched_next(cli: Cli, files, acceptance: str) -> None:
    """Its draft pays, or never does: then the target is also run without it. No line is wrapped."""
    pair = ("-m", files[0], "-md", files[1])
    lines = plain(cli("plan", *pair, *CARD, "--acceptance", acceptance, COLUMNS="80").stdout).splitlines()
    assert f"next: ggufspec bench -m {files[0]} -md {files[1]}" in lines
    alone = cli("plan", "-m", files[0], *CARD, COLUMNS="80").stdout
    assert [line for line in alone.splitlines() if line.startswith("next: ")] == [
        f"next: ggufspec run -m {files[0]} -p Hello"
    ]


def test_a_draft_that_loses_is_told_apart_from_the_default(cli: Cli, files) -> None:
    plan = cli("plan", "-m", files[0], "-md", files[1], *CARD, "--acceptance", "0.3", "--json").document()
    assert plan["choice"] == "target-only"
    predicted = plan["predicted"]
    drafting = predicted["speculative_tokens_per_s"] / predicted["target_only_tokens_per_s"]
    default = predicted["default_tokens_per_s"] / predicted["target_only_tokens_per_s"]
    assert f"Leave the draft out: drafting is guessed to be {drafting:.2f}× (" in plan["why"]
    assert "with a 30% chance of acceptance per token (given with --acceptance 0.3; " in plan["why"]
    assert f"The default would not draft: {default:.2f}×." in plan["why"]


@pytest.mark.parametrize("command", [("plan",), ("export",)])
def test_without_a_model_the_demo_pair_is_named_first(cli: Cli, command: tuple[str, ...]) -> None:
    said = "no model is named: using the bundled demo pair, a toy; name yours with -m TARGET.gguf -md DRAFT.gguf"
    assert cli(*command).stderr.splitlines()[0] == said
    for named in (("demo",), ("-m", demo_pair()[0]), ("--json",)):
        assert said not in cli(*command, *named).stderr


def test_only_a_repository_without_a_quantisation_is_asked_for(cli: Cli, files) -> None:
    assert "asking the hub" not in rest(cli.terminal("plan", "-m", str(files[1]), *CARD, columns=100))


def test_the_sweep_is_in_the_document(cli: Cli, files) -> None:
    rows = cli("plan", "-m", files[0], *CARD, "--sweep", "--json").document()["sweep"]
    assert [rows[0]["gpu_layers"], rows[-1]["gpu_layers"]] == [0, 81]
    assert rows[-1]["target_only_tokens_per_s"] is None
    assert rows[0]["speculative_tokens_per_s"] is None


def test_without_a_card_a_sweep_says_why_it_has_no_rows(cli: Cli) -> None:
    done = cli("plan", "demo", "--sweep", COLUMNS="80")
    assert "No GPU found: nothing is offloaded" in done.stdout
    assert "Target layers" not in done.stdout
    assert "nothing was measured on this machine" not in done.stdout


def test_a_card_that_nobody_named_is_taken_for_one_and_that_is_said_first(cli: Cli, files) -> None:
    plan = cli("plan", "-m", files[1], "--vram", "12GiB", "--json").document()
    unknown = "GPU unknown, assuming 300 GB/s: name it with --gpu"
    assert re.match(rf"Fits whole: 33/33 layers on the GPU, \d\.\d of 12\.0 GiB\. {unknown}\. Without", plan["why"])
    assert plan["assumptions"][0] == unknown
    assert plan["devices"][0]["description"] == "unknown GPU"
    assert plan["speed"].startswith("assumed for an unknown GPU; ")
    named = cli("plan", "-m", files[1], *CARD, "--json").document()
    assert unknown not in named["why"]
    assert "assumed" not in " ".join(named["assumptions"])


def test_few_tokens_do_not_turn_a_plan_and_repeated_plans_are_the_same(cli: Cli) -> None:
    """One answer of the demo pair, whose draft is right nearly always there."""
    before = cli("plan", "demo", "--vram", "12GiB", "--json").document()
    fixed = ("--drafter", "draft", "--draft-policy", "fixed", "--draft-max", "2")  # drafts on a busy machine, too
    run = cli("run", "demo", "-p", "import os\n\ndef ", "-n", "48", *fixed, "--json").document()["statistics"]
    after, again = (cli("plan", "demo", "--vram", "12GiB", "--json").document() for _ in range(2))
    assert after == again
    assert before["settings"]["acceptance_from"] == "assumed"
    assert re.fullmatch(r"mostly assumed, \d+ tokens measured here", after["settings"]["acceptance_from"])
    assert abs(after["predicted"]["acceptance"] - before["predicted"]["acceptance"]) < 0.08
    assert after["settings"]["acceptance_from"] in after["why"]
    seen = re.fullmatch(r"\d+% of (\d+) drafted tokens", after["settings"]["accepted_here"])
    assert seen is not None
    assert 0 <= int(seen[1]) - run["drafted"] < 8  # the warm-up drafts, too


def test_a_tuned_profile_is_planned_as_it_was_tuned(cli: Cli) -> None:
    """On this machine, as the profile has it; otherwise it is predicted like any other."""
    target, draft = demo_pair()
    tuned = {
        "date": "2026-11-28", "tokens_per_s": 8.3, "gain": 1.31, "trials": 9, "machine": cpu_name(), "versions": "",
        "results": "",
    }  # fmt: skip
    folder = Path(cli.environment["HOME"], ".config", "ggufspec", "profiles")
    folder.mkdir(parents=True)
    for name, machine in (("mine", cpu_name()), ("other", "Another CPU")):
        lines = [
            f'name = "{name}"',
            'why = "w"',
            'source = "s"',
            f'target.file = "{target}"',
            f'draft.file = "{draft}"',
        ]
        values = (tuned | {"machine": machine}).items()
        lines += ["settings.threads = 1", "[tuned]", *(f"{key} = {json.dumps(value)}" for key, value in values)]
        (folder / f"{name}.toml").write_text("\n".join(lines))
    done = cli("plan", "mine")
    assert "Tuned here on 2026-11-28: 8.30 tokens/s, 1.31× what was planned then, measured." in " ".join(
        done.stdout.split()
    )
    assert re.search(r"tuned here +CPU .* 8\.30", plain(done.stdout))
    assert "no usual rate would" not in done.stdout
    plan = cli("plan", "mine", "--json").document()
    assert (plan["choice"], plan["next"]) == ("speculative", "ggufspec run mine -p Hello")
    assert plan["also"] == ["ggufspec bench mine"]
    assert plan["tuned"]["tokens_per_s"] == 8.3
    for changed in (("other",), ("mine", "-c", "1024"), ("mine", "--vram", "12GiB")):
        assert cli("plan", *changed, "--json").document()["tuned"] is None


def test_without_a_card_the_plan_is_the_host(cli: Cli) -> None:
    plan = cli("plan", "demo", "--json").document()
    assert [device["name"] for device in plan["devices"]] == ["CPU"]
    assert (plan["target"]["gpu_layers"], plan["target"]["bytes"]["CPU"]["weights"]) == (0, 20337920)


def test_more_memory_holds_more_layers(cli: Cli, files) -> None:
    counts = [
        cli("plan", "-m", files[0], "--vram", size, "--json").document()["target"]["gpu_layers"]
        for size in ("8GiB", "12GiB", "48GiB")
    ]
    assert counts == sorted(set(counts))
    assert counts[-1] == 81


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpu", "RTX 4091"), ("RTX 4091", "RTX 4090")),
        (("--vram", "much"), ("'much' is not a memory size", "--vram 24GiB")),
        (("--vram", "-1GiB"), ("is not a memory size",)),
        (("--vram", "8"), ("'8' has no unit", "--vram 8GiB")),
        (("--vram", "99999999TiB"), ("is not a memory size",)),
        (("--gpu", "RTX 4090", "--vram", "1G", "--vram", "2G"), ("more --vram than --gpu",)),
        (("--vram", "24G", "--rpc", "127.0.0.1:1"), ("--rpc cannot be combined with --gpu",)),
        (("--vram", "24G", "-ngl", "82"), ("needs", "the budget is 23.75 GiB", "auto")),
        (("--vram", "24G", "-ub", "4097"), ("--ubatch-size 4097 is out of range", "1 to 4096")),
        (("--vram", "24G", "-ub", "many"), ("--ubatch-size", "is not a whole number")),
        (("--vram", "24G", "-ngl", "all"), ("needs", "the budget is 23.75 GiB", "auto")),
        (("--vram", "24G", "-c", "-5"), ("--ctx-size -5 is out of range", "-c max")),
        (("--vram", "24G", "--acceptance", "2"), ("--acceptance",)),
        (("--vram", "24G", "--allow-kv", "q9_9"), ("q9_9", "q8_0")),
        (("--vram", "24G", "--n-cpu-moe", "3"), ("no experts", "--n-cpu-moe")),
        (("--vram", "100M", "--headroom", "1G"), ("the budget is 0 MiB", "--headroom")),
        (("--vram", "24G", "-ctv", "q8_0", "-fa", "off"), ("-ctv q8_0 needs flash attention", "-fa on")),
    ],
)
def test_bad_input(cli: Cli, files, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = cli("plan", "-m", files[0], *flags, "--json")
    assert done.code in (1, 2)
    error = json.loads(done.stdout)
    assert error["schema"] == "ggufspec/error@1"
    said = error["error"] + " " + error["hint"]
    assert all(word in said for word in words), said
    assert "Traceback" not in done.stderr


def test_a_budget_that_not_even_the_draft_fits(cli: Cli, files) -> None:
    """The draft asked for in whole is refused; left to the plan it stays on the host, and that is said."""
    pair = ("-m", files[0], "-md", files[1], "--vram", "2GiB", "--json")
    refused = cli("plan", *pair, "-ngld", "all")
    assert refused.code == 1
    assert "llama3-8b-q3_k_l.gguf needs" in refused.document()["error"]
    plan = cli("plan", *pair).document()
    assert plan["options"]["speculative"]["draft"]["gpu_layers"] == 0


def test_a_machine_that_is_not_here(cli: Cli, files) -> None:
    """Its link decides where drafts are verified, its memory what is pinned; enough memory is supposed."""
    pair = ("plan", "-m", files[0], "-md", files[1], *CARD, "--acceptance", "0.84", "--ram-bandwidth", "89.6", "--json")
    found = {link: cli(*pair, "--link", link).document() for link in ("pcie5x16", "pcie4x16", "pcie3x4")}
    speeds = [plan["predicted"]["speculative_tokens_per_s"] for plan in found.values()]
    assert speeds == sorted(speeds, reverse=True)
    assert [plan["choice"] for plan in found.values()] == ["speculative", "speculative", "target-only"]
    streamed = [plan["options"]["speculative"]["target"]["op_offload_min_batch"] for plan in found.values()]
    assert streamed == [2, 2, 32]
    fast, slow = found["pcie4x16"], cli(*pair, "--ram-bandwidth", "51.2").document()
    assert fast["speed"].endswith("assuming 8 cores with AVX2 and memory of 89.6 GB/s; assuming pcie4x16")
    two_cores = cli(*pair, "--cpu", "2xAVX512").document()
    assert "2 cores with AVX-512 and memory of 89.6 GB/s" in two_cores["speed"]
    assert two_cores["predicted"]["target_only_tokens_per_s"] < fast["predicted"]["target_only_tokens_per_s"]
    rates = [plan["predicted"]["target_only_tokens_per_s"] for plan in (fast, slow)]
    assert rates[0] > 1.1 * rates[1]  # the slower memory's card computes target-only, too
    assert slow["target"]["load_mode"] == "none"
    assert fast["devices"][-1]["free_bytes"] == fast["devices"][-1]["used_bytes"] > 5 * 2**30
    assert any("--ram SIZE plans with less" in note for note in fast["notes"])
    little = cli(*pair, "--ram", "6GiB").document()
    assert little["devices"][-1]["free_bytes"] == 6 * 2**30
    assert any("are needed in RAM" in note or "too little" in note for note in little["notes"])
    assert little["predicted"]["speculative_tokens_per_s"] < fast["predicted"]["speculative_tokens_per_s"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--link", "usb"), "is not a valid PCIe link"),
        (("--link", "pcie4x3"), "is not a valid PCIe link"),
        (("--cpu", "fast"), "is not a valid CPU"),
        (("--cpu", "0xavx2"), "is not a valid CPU"),
        (("--cpu", "8xmmx"), "is not a valid CPU"),
        (("--ram", "lots"), "--ram 'lots' is not a memory size"),
        (("--ram-bandwidth", "0"), "--ram-bandwidth 0 is out of range"),
        (("--ram-bandwidth", "fast"), "--ram-bandwidth 'fast' is not a number"),
        (("--op-offload-min-batch", "0"), "--op-offload-min-batch 0 is out of range"),
        (("--op-offload-min-batch", "two"), "--op-offload-min-batch 'two' is not a whole number"),
        (("-lm", "swap"), "there is no load mode 'swap'"),
    ],
)
def test_what_a_machine_cannot_be_is_refused(cli: Cli, files, given: tuple[str, str], said: str) -> None:
    refused = cli("plan", "-m", files[0], *CARD, *given)
    assert refused.code == 2
    assert said in refused.stderr
    assert "next: " in refused.stderr


def test_files_that_are_not_there(cli: Cli, tmp_path: Path) -> None:
    missing = cli("plan", "-m", tmp_path / "none.gguf", *CARD, "--json")
    assert missing.code == 1
    assert "none.gguf" in missing.document()["error"]
    both = cli("plan", "demo", "-m", tmp_path / "x.gguf")
    assert both.code == 2
    offline = cli("plan", "llama3-70b", *CARD, "--json")
    assert offline.code == 1
    assert "HF_HUB_OFFLINE" in offline.document()["error"]
    way = "ggufspec profiles list --gpu 'RTX 4090' estimates it offline; or unset HF_HUB_OFFLINE"
    assert offline.document()["hint"] == way
    assert "51/81" in cli("profiles", "list", *CARD).stdout  # as it says


@pytest.mark.parametrize("what", [("demo", "--vram", "1MiB"), ("--search", "llama")], ids=["too small", "offline"])
def test_what_cannot_be_planned_is_refused_before_anything_is_measured(cli: Cli, what: tuple[str, ...]) -> None:
    refused = cli("plan", *what, GGUFSPEC_NO_CALIBRATE="")
    assert refused.code == 1
    assert "measur" not in refused.stderr


def test_a_card_without_room_for_a_batch_s_copies_is_told_to_make_none(cli: Cli, files) -> None:
    """Then a plan without layers fits, and other programs get its flag."""
    little = ("-m", files[0], "--vram", "600MiB", "-c", "2048")
    plan = cli("plan", *little, "--json").document()
    assert (plan["target"]["gpu_layers"], plan["target"]["op_offload"]) == (0, False)
    assert plan["target"]["bytes"]["GPU0"]["compute"] == 0
    assert "GPU0 has no room to process prompts with the CPU's weights" in " ".join(plan["notes"])
    assert "--no-op-offload" in cli("export", *little, "--to", "llama-server").stdout.split()
    assert "-nopo 1" in cli("export", *little, "--to", "llama-bench").stdout
    more = cli("plan", *little[:3], "1GiB", *little[4:], "--json").document()["target"]
    assert more["op_offload"]
    assert more["bytes"]["GPU0"]["compute"] > 200 * 2**20
    never = cli("plan", *little[:3], "1GiB", *little[4:], "--no-op-offload", "--json").document()["target"]
    assert never["gpu_layers"] >= more["gpu_layers"]
    assert never["bytes"]["GPU0"]["compute"] < more["bytes"]["GPU0"]["compute"]
    assert [one["no_host"] for one in (plan["target"], more, never)] == [True, False, True]
    assert ", repacked" in cli("plan", *little).stdout
    assert "--no-host" in cli("export", *little, "--to", "llama-server").stdout.split()


def test_a_pair_without_room_for_them_has_the_cpu_read_prompts(cli: Cli, files) -> None:
    """Target-only, for which there is room, is as it was."""
    found = cli("plan", "-m", files[0], "-md", files[1], "--vram", "880MiB", "-c", "2048", "--json").document()
    alone, pair = (found["options"][name]["target"] for name in ("target_only", "speculative"))
    assert (alone["op_offload"], alone["no_host"]) == (True, False)
    assert (pair["op_offload"], pair["no_host"]) == (False, True)
    assert any("GPU0 has no room next to the draft to process prompts" in note for note in found["notes"])
