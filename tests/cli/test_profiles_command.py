"""``ggufspec profiles`` as a user types it: list, show, new and check, with a hub on loopback."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.api.options import machine_to_plan_for
from ggufspec.cli import profiles
from ggufspec.cli.app import main
from ggufspec.models.profile import bundled_folder
from ggufspec.planning.plan import PlanMachine
from ggufspec.settings.table import Settings
from tests.support import heads, shapes
from tests.support.processes import Cli, plain, rest
from tests.support.server import COMMIT, serving

BUNDLED = sorted(path.stem for path in bundled_folder().glob("*.toml"))
TARGET, DRAFT = "user/big-GGUF:Q4_K_M", "user/small-GGUF:Q8_0"


def write(path: Path, shape: str, words: str = "text", **keys: Any) -> Path:
    """A model of 4,096 tokens."""
    made = shapes.SHAPES[shape]
    own = {"model": "gpt2", "pre": "gpt-2", "tokens": [f"{words} {i}" for i in range(4096)], "merges": ["t e"]} | keys
    return shapes.write_file(path, made.metadata | {f"tokenizer.ggml.{k}": v for k, v in own.items()}, made.tensors)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """Three repositories: a target, its draft, and a model with other tokens."""
    with serving() as server:
        for repo, name, shape, words in (
            ("user/big-GGUF", "big-Q4_K_M", "tiny-moe", "text"),
            ("user/small-GGUF", "small-Q8_0", "tiny-llama", "text"),
            ("user/other-GGUF", "other-Q8_0", "tiny-llama", "word"),
        ):
            folder = tmp_path_factory.mktemp(name)
            write(folder / f"{name}.gguf", shape, words)
            server.add_repo(repo, folder)
        yield server


@pytest.fixture
def online(hub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}


@pytest.fixture
def mine(cli: Cli) -> Path:
    """The user's folder of profiles, which is there."""
    folder = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles"
    folder.mkdir(parents=True)
    return folder


def profile(name: str, target: str, draft: str, more: str = "") -> str:
    """A profile of two files of the hub, USER/REPO/FILE each."""
    models = {"target": target.rpartition("/"), "draft": draft.rpartition("/")}
    tables = "".join(f'[{role}]\nrepo = "{repo}"\nfile = "{file}"\n' for role, (repo, _, file) in models.items())
    return f'# For a test.\nname = "{name}"\nwhy = "a test"\nsource = "nowhere"\n{tables}{more}'


GOOD = profile("good", "user/big-GGUF/big-Q4_K_M.gguf", "user/small-GGUF/small-Q8_0.gguf")


# ---- list and show --------------------------------------------------------------------------------------------------


def test_the_list_asks_nobody(cli: Cli, hub) -> None:
    asked = len(hub.requests)
    done = cli("profiles", "list", "--json", HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="0")
    assert (done.code, done.stderr) == (0, "")
    assert len(hub.requests) == asked
    document = done.document()
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/profiles@1"
    rows = {row["name"]: row for row in document["profiles"]}
    assert sorted(rows) == BUNDLED
    assert rows["demo"]["fits"] == "whole"
    assert rows["demo"]["target"]["size_bytes"] > rows["demo"]["draft"]["size_bytes"] > 1_000_000
    assert rows["demo"]["target"]["layers"] == 9
    big = rows["llama3-70b"]
    model = big["target"]
    assert (model["size_bytes"], model["layers"], model["read"], big["mine"]) == (30_912_000_000, 81, False, False)
    assert rows["demo"]["target"]["read"]
    assert big["settings"]["acceptance"] == 0.84
    memory = document["budgets"].pop("CPU")
    assert not document["budgets"]
    assert all(row["fits"] in ("whole", "no") and row["fits_layers"] is None for row in rows.values())
    assert rows["llama3.3-70b"]["fits"] == ("whole" if memory > 46e9 else "no")
    assert rows["gpt2-xl"]["fits"] == ("whole" if memory > 3e9 else "no")


def test_on_a_card_the_list_says_how_many_layers_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:

    def with_a_card(given: Settings, threads: int) -> PlanMachine:
        return replace(machine_to_plan_for(replace(given, vram=("24GiB",)), threads), memory_bytes=64 << 30)

    monkeypatch.setattr(profiles, "machine_to_plan_for", with_a_card)
    monkeypatch.setenv("COLUMNS", "120")
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert main(["profiles", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["profiles"]}
    assert (rows["qwen3-32b"]["fits"], rows["qwen3-32b"]["fits_layers"]) == ("whole", 65)
    layers = rows["llama3-70b"]["fits_layers"]
    assert rows["llama3-70b"]["fits"] == "partly"
    assert 49 <= layers <= 54  # the plan for such a card: 52
    assert main(["profiles", "list"]) == 0
    assert f"≈ {layers}/81 layers" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_the_list_in_a_terminal(cli: Cli, columns: int) -> None:
    child = cli.terminal("profiles", columns=columns)
    lines = plain(rest(child)).splitlines()
    assert child.exitstatus == 0
    assert max(map(len, lines)) <= columns
    assert all(any(line.lstrip().startswith(name) for line in lines) for name in BUNDLED)
    assert any(line.split()[0] == "demo" and "fits whole" in line for line in lines if line.strip())


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_a_draft_is_below_its_target(cli: Cli, columns: str) -> None:
    lines = cli("profiles", "list", COLUMNS=columns).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("llama3-70b"))
    assert "Meta-Llama-3-70B-Instruct-Q3_K_S" in lines[at]
    assert "Meta-Llama-3-8B-Instruct.Q3_K_L" in lines[at + 1]
    assert lines[at].split()[-2:] in (["fits", "whole"], ["too", "large"])
    pairs = len(BUNDLED)
    assert len([line for line in lines if line.strip()]) == 3 + pairs * 2  # no name is folded
    reference = next(i for i, line in enumerate(lines) if line.split() == ["reference"])
    assert reference < at
    assert all(line.split()[0] not in ("demo", "qwen3-14b") for line in lines[reference:] if line.strip())
    for name, words in (("qwen3.8-27b ", "its own MTP block"), ("gpt-oss-20b", "no draft: it does not pay")):
        assert words in lines[next(i for i, line in enumerate(lines) if line.strip().startswith(name)) + 1]
    longest = next(line for line in lines if "mistral-small-24b" in line)
    assert ("…" in longest) == (columns == "80")
    assert "Q4_K_M" in longest


def test_what_fits_on_a_card_that_is_not_here(cli: Cli) -> None:
    rows = {name: cli("profiles", "list", "--vram", name, "--json").document() for name in ("8GiB", "24GiB")}
    fits = {name: {row["name"]: row["fits"] for row in rows[name]["profiles"]} for name in rows}
    assert fits["8GiB"]["qwen2.5-coder-7b"] == fits["24GiB"]["qwen3.8-27b"] == "whole"
    assert fits["8GiB"]["qwen3.8-27b-10gb"] != "whole"
    models = {row["name"]: row["target"] for row in rows["24GiB"]["profiles"]}
    assert [models[name]["approximate"] for name in ("qwen3.8-27b", "qwen3-14b")] == [False, True]
    shown = cli("profiles", "list", "--gpu", "RTX 4090")
    assert "RTX 4090" in shown.stdout.splitlines()[1]
    assert "≈ 9.0 GB" in shown.stdout
    assert "unchecked" in shown.stderr
    refused = cli("profiles", "list", "--gpu", "RTX 9999")
    assert (refused.code, refused.stdout) == (2, "")


def test_sizes_of_a_profile_are_not_needed(cli: Cli, mine: Path) -> None:
    (mine / "good.toml").write_text(GOOD)
    (mine / "half.toml").write_text(GOOD.replace("[draft]", "size_bytes = 1000\nlayers = 3\n[draft]"))
    done = cli("profiles", "list", "--json")
    rows = {row["name"]: row for row in done.document()["profiles"]}
    assert (rows["good"]["fits"], rows["good"]["target"]["size_bytes"]) == ("unknown", None)
    assert (rows["half"]["fits"], rows["half"]["target"]["size_bytes"]) == ("unknown", 1000)
    shown = cli("profiles", "list")
    assert next(line for line in shown.stdout.splitlines() if line.strip().startswith("good*")).rstrip().endswith("?")
    assert "? is unknown until its headers are read" in shown.stderr
    (mine / "half.toml").write_text(GOOD.replace("[draft]", "size_byte = 1000\n[draft]"))
    wrong = cli("profiles", "show", "half", "--json")
    assert (wrong.code, wrong.document()["hint"]) == (1, "did you mean 'size_bytes'?")


def test_your_own_have_a_star_and_win_and_a_broken_one_is_a_row(cli: Cli, mine: Path) -> None:
    (mine / "demo.toml").write_text(GOOD)
    (mine / "broken.toml").write_text(GOOD.replace('why = "a test"', "why = 1"))
    rows = {row["name"]: row for row in cli("profiles", "list", "--json").document()["profiles"]}
    assert (rows["demo"]["mine"], rows["demo"]["target"]["file"]) == (True, "big-Q4_K_M.gguf")
    assert f"{mine / 'broken.toml'}:3: why: " in rows["broken"]["error"]
    shown = cli("profiles", "list")
    assert shown.code == 0
    assert "demo*" in shown.stdout
    assert "no profile" in shown.stdout
    assert "broken.toml:3: why: " in shown.stderr


def test_show(cli: Cli) -> None:
    done = cli("profiles", "show", "demo", "--json")
    document = done.document()
    assert (done.code, document["schema"]) == (0, "ggufspec/profile@1")
    assert (document["compatible"], document["reasons"]) == ("yes", [])
    assert document["comment"].startswith("The pair that ships")
    assert document["profile"]["why"]
    shown = " ".join(cli("profiles", "show", "llama3.1-8b", COLUMNS="200").stdout.split())
    for words in (
        "bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q8_0.gguf",
        "0.89",
        "(≈ 1.3 GB, 17 layers, according to the profile, unchecked)",
    ):
        assert words in shown
    unknown = cli("profiles", "show", "dmeo", "--json")
    assert (unknown.code, unknown.document()["hint"]) == (2, "did you mean 'demo'?")


# ---- new ------------------------------------------------------------------------------------------------------------


def test_a_profile_of_the_hub(cli: Cli, online: dict[str, str]) -> None:
    words = ("-hf", TARGET, "-hfd", f"{DRAFT}@{COMMIT}", "--why", 'to "try"', "-c", "512", "--draft-max", "3")
    done = cli("profiles", "new", "my-pair", *words, **online)
    assert done.code == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles" / "my-pair.toml"
    written = tomllib.loads(path.read_text())
    sizes = [written[role].pop("size_bytes") for role in ("target", "draft")]
    assert all(size > 1_000_000 for size in sizes)
    outline = {"layers": 5, "cache_bytes": 2048}  # 4 blocks of 2 heads, 64 wide, twice, in f16
    assert written["target"] == {"repo": "user/big-GGUF", "file": "big-Q4_K_M.gguf"} | outline
    assert written["draft"] == {"repo": "user/small-GGUF", "file": "small-Q8_0.gguf", "revision": COMMIT} | outline
    assert (written["name"], written["why"]) == ("my-pair", 'to "try"')
    assert written["settings"] == {"ctx_size": 512, "draft_max": 3}
    assert "user/big-GGUF" in written["source"]

    again = cli("profiles", "new", "my-pair", "-hf", TARGET, "-hfd", DRAFT, **online)
    assert again.code == 2
    assert "-y overwrites it" in again.stderr
    forced = cli("profiles", "new", "my-pair", "-hf", TARGET, "-hfd", DRAFT, "-y", "--json", **online)
    assert forced.document()["profile"]["settings"]["ctx_size"] is None
    assert forced.document()["compatible"] == "yes"

    rows = {row["name"]: row for row in cli("profiles", "list", "--json").document()["profiles"]}
    assert (rows["my-pair"]["mine"], rows["my-pair"]["fits"]) == (True, "whole")  # its headers were read
    assert rows["my-pair"]["target"]["size_bytes"] > 0


def test_a_profile_of_files_here(cli: Cli, tmp_path: Path) -> None:
    target = write(tmp_path / "a target.gguf", "tiny-moe")
    draft = write(cli.folder / "draft.gguf", "tiny-llama", eos_token_id=7)
    done = cli("profiles", "new", "demo", "-m", target, "-md", "draft.gguf")
    assert done.code == 0, done.stderr
    written = tomllib.loads(Path(done.stdout.strip()).read_text())
    assert (written["target"], written["draft"]) == ({"file": str(target)}, {"file": str(draft)})
    assert "it overrides the bundled profile demo" in done.stderr
    plan = cli("plan", "demo", "--json").document()
    assert plan["target"]["file"] == "a target.gguf"


def test_what_is_missing_is_asked_for_on_a_terminal(cli: Cli, online: dict[str, str]) -> None:
    child = cli.terminal("profiles", "new", "asked", **online)
    child.expect("The target: a file, or USER/REPO:QUANT on the hub")
    child.sendline(TARGET)
    child.expect("The draft: a file")
    child.sendline(DRAFT)
    child.expect("What is it for")
    child.sendline("")
    shown = plain(rest(child))
    assert child.exitstatus == 0
    assert "asked.toml" in shown
    path = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles" / "asked.toml"
    assert tomllib.loads(path.read_text())["why"] == "A pair of my own."


def test_enter_is_no_draft_and_no_target_is_an_error(cli: Cli, online: dict[str, str]) -> None:
    child = cli.terminal("profiles", "new", "lonely", **online)
    for question, typed in (("The target", TARGET), (r"The draft.* \(Enter for none\)", ""), ("What is it for", "")):
        child.expect(question)
        child.sendline(typed)
    rest(child)
    assert child.exitstatus == 0
    path = Path(cli.environment["HOME"]) / ".config" / "ggufspec" / "profiles" / "lonely.toml"
    assert set(tomllib.loads(path.read_text())) == {"name", "why", "source", "target"}
    child = cli.terminal("profiles", "new", "nothing", **online)
    child.expect("The target")
    child.sendline("")
    assert "no target is given" in plain(rest(child))
    assert child.exitstatus == 2


def test_nothing_is_asked_where_the_models_are_given(cli: Cli, online: dict[str, str]) -> None:
    child = cli.terminal("profiles", "new", "given", "-hf", TARGET, "-hfd", DRAFT, **online)
    assert "What is it for" not in plain(rest(child))
    assert child.exitstatus == 0


@pytest.mark.parametrize(
    ("name", "flags", "code", "words"),
    [
        ("../x", ("-hf", TARGET, "-hfd", DRAFT), 2, "'../x' is not a profile name"),
        ("x.toml", ("-hf", TARGET, "-hfd", DRAFT), 2, "'x.toml' is not a profile name"),
        ("x", (), 2, "no target is given"),
        ("x", ("-hf", TARGET, "-m", "a.gguf", "-hfd", DRAFT), 2, "and -hf are given"),
        ("x", ("-hf", TARGET, "-md", "http://127.0.0.1:1/x.gguf"), 2, "a profile names files on this machine"),
        ("x", ("-hf", TARGET, "-hfd", "user/none:Q8_0"), 1, "no repository user/none"),
        ("x", ("-hf", TARGET, "-hfd", "user/small-GGUF:Q2_K"), 1, "has no model in Q2_K; it has Q8_0"),
        ("x", ("-hf", TARGET, "-md", "none.gguf"), 1, "none.gguf does not exist"),
        (
            "x",
            ("-hf", TARGET, "-hfd", "user/other-GGUF"),
            1,
            "other-Q8_0.gguf cannot draft for big-Q4_K_M.gguf: token 5",
        ),
    ],
)
def test_what_becomes_no_profile(
    cli: Cli, online: dict[str, str], name: str, flags: tuple[str, ...], code: int, words: str
) -> None:
    done = cli("profiles", "new", name, *flags, "--json", **online)
    assert done.code == code
    assert words in done.document()["error"]
    assert done.document()["hint"]
    assert not list(Path(cli.environment["HOME"]).rglob("*.toml"))
    assert "Traceback" not in done.stderr


# ---- rm -------------------------------------------------------------------------------------------------------------


def test_a_profile_of_yours_is_removed(cli: Cli, mine: Path) -> None:
    for name in ("good", "demo"):
        (mine / f"{name}.toml").write_text(GOOD)
    (mine / "broken.toml").write_text("broken = [")
    done = cli("profiles", "rm", "good")
    assert (done.code, done.stdout, done.stderr) == (0, f"{mine / 'good.toml'}\n", "")
    done = cli("profiles", "rm", "demo", "--json")
    assert done.document() == {
        "schema": "ggufspec/profile-removed@1",
        "name": "demo",
        "path": str(mine / "demo.toml"),
        "bundled": True,
    }
    assert "demo is the bundled profile again" in done.stderr
    assert cli("profiles", "rm", "broken", "-q").code == 0
    assert list(mine.iterdir()) == []
    assert cli("profiles", "show", "demo", "--json").document()["profile"]["mine"] is False


def test_a_link_is_removed_and_what_it_leads_to_is_not(cli: Cli, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.toml").write_text(GOOD)
    (mine / "linked.toml").symlink_to(tmp_path / "elsewhere.toml")
    assert cli("profiles", "rm", "linked").code == 0
    assert list(mine.iterdir()) == []
    assert (tmp_path / "elsewhere.toml").read_text() == GOOD


def test_a_terminal_is_asked_first(cli: Cli, mine: Path) -> None:
    path = mine / "good.toml"
    path.write_text(GOOD)
    for answer, code, there in (("", 1, True), ("y", 0, False)):
        child = cli.terminal("profiles", "rm", "good", columns=200)
        child.expect(r"Remove .*good\.toml\? \[y/N\]:")
        child.sendline(answer)
        assert ("nothing was removed" in plain(rest(child))) == there
        assert (child.exitstatus, path.exists()) == (code, there)


@pytest.mark.full
def test_a_terminal_is_not_asked_with_yes(cli: Cli, mine: Path) -> None:
    path = mine / "good.toml"
    path.write_text(GOOD)
    child = cli.terminal("profiles", "rm", "good", "-y", columns=200)
    assert "Remove" not in plain(rest(child))
    assert (child.exitstatus, path.exists()) == (0, False)


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("godo", "you have no profile 'godo'", "did you mean 'good'?"),
        ("quite-another", "you have no profile 'quite-another'", "yours are: good"),
        ("llama3-70b", "'llama3-70b' is a bundled profile", "ggufspec profiles new llama3-70b"),
        ("good.toml", "'good.toml' is not a profile name", "profiles list"),
        ("../profiles/good", "'../profiles/good' is not a profile name", "profiles list"),
        ("/etc/passwd", "'/etc/passwd' is not a profile name", "profiles list"),
        ("..", "you have no profile '..'", "yours are: good"),
        ("", "you have no profile ''", "yours are: good"),
    ],
)
def test_what_is_not_removed(cli: Cli, mine: Path, name: str, error: str, hint: str) -> None:
    (mine / "good.toml").write_text(GOOD)
    (mine.parent / "outside.toml").write_text(GOOD)
    done = cli("profiles", "rm", name, "-y", "--json")
    assert done.code == 2
    document = done.document()
    assert document["schema"] == "ggufspec/error@1"
    assert error in document["error"]
    assert hint in document["hint"]
    assert (mine / "good.toml").exists()
    assert (mine.parent / "outside.toml").exists()
    assert sorted(path.stem for path in bundled_folder().glob("*.toml")) == BUNDLED


def test_without_any_of_yours_there_is_nothing_to_remove(cli: Cli) -> None:
    done = cli("profiles", "rm", "mine")
    assert done.code == 2
    assert "you have none: ggufspec profiles new NAME makes one" in done.stderr


# ---- check ----------------------------------------------------------------------------------------------------------


def test_a_good_profile_and_the_one_that_ships(cli: Cli, mine: Path, online: dict[str, str]) -> None:
    (mine / "good.toml").write_text(GOOD)
    done = cli("profiles", "check", "good", "demo", "good", "--json", **online)
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    assert (document["schema"], document["ok"]) == ("ggufspec/profile-check@1", True)
    assert [row["name"] for row in document["checks"]] == ["good", "demo"]
    assert all(row["ok"] and not row["problems"] and row["target_bytes"] > 0 for row in document["checks"])


def test_profiles_name_heads(cli: Cli, mine: Path, target: Path, tmp_path: Path) -> None:
    """A head in a file of its own, MTP blocks of the target's, and a target that has none of those."""
    trunk = heads.write_mtp(target, tmp_path / "trunk.gguf", part="trunk")
    head = heads.write_mtp(target, tmp_path / "mtp-trunk.gguf", part="head")
    whole = heads.write_mtp(target, tmp_path / "whole.gguf")
    own = '[settings]\ndrafter = "mtp+lookup"\n'
    for name, models in {
        "beside": f'[target]\nfile = "{trunk}"\n[draft]\nfile = "{head}"\n',
        "own": f'[target]\nfile = "{whole}"\n{own}',
        "none": f'[target]\nfile = "{target}"\n{own}',
    }.items():
        (mine / f"{name}.toml").write_text(f'name = "{name}"\nwhy = "a test"\nsource = "nowhere"\n{models}')
    rows = {
        row["name"]: row for row in cli("profiles", "check", "beside", "own", "none", "--json").document()["checks"]
    }
    assert {name: row["ok"] for name, row in rows.items()} == {"beside": True, "own": True, "none": False}
    assert rows["none"]["problems"] == ["its file has no MTP blocks"]
    assert cli("profiles", "show", "own", "--json").document()["compatible"] == "yes"
    assert cli("run", "own", "-p", "def f(", "-n", "4", "--json").document()["settings"]["drafter"] == "mtp+lookup"
    assert cli("profiles", "new", "made", "-m", trunk, "-md", head).code == 0
    assert cli("run", "made", "-p", "def f(", "-n", "4", "--json").document()["settings"]["drafter"] == "mtp+lookup"


def test_each_failure_is_a_row(cli: Cli, mine: Path, online: dict[str, str]) -> None:
    draft = "user/small-GGUF/small-Q8_0.gguf"
    broken = {
        "gone": (profile("gone", "user/big-GGUF/big-Q8_0.gguf", draft), "has no file 'big-Q8_0.gguf'"),
        "moved": (profile("moved", "nobody/big-GGUF/big.gguf", draft), "no repository nobody/big-GGUF"),
        "odd": (
            GOOD.replace("user/small-GGUF", "user/other-GGUF").replace("small-Q8_0", "other-Q8_0"),
            "token 5 is 'text 5' to the target and 'word 5' to the draft; 4,091 tokens differ",
        ),
        "typo": (GOOD.replace("why =", "whi ="), "typo.toml:3: unknown key 'whi'"),
        "wrong": (GOOD + '[settings]\nctx_size = "big"\n', "wrong.toml:12: settings.ctx_size: "),
        "lost": (
            GOOD.replace('repo = "user/big-GGUF"\nfile = "big-Q4_K_M.gguf"', 'file = "no.gguf"'),
            "which does not exist",
        ),
    }
    for name, (text, _) in broken.items():
        (mine / f"{name}.toml").write_text(text)
    (mine / "good.toml").write_text(GOOD)
    done = cli("profiles", "check", *broken, "good", "nothing", "--json", **online)
    assert done.code == 1
    rows = {row["name"]: row for row in done.document()["checks"]}
    for name, (_, words) in broken.items():
        assert not rows[name]["ok"]
        assert any(words in problem for problem in rows[name]["problems"]), rows[name]
    assert rows["good"]["ok"]
    assert "there is no profile 'nothing'" in rows["nothing"]["problems"][0]
    shown = cli("profiles", "check", "gone", "good", **online)
    assert shown.code == 1
    assert "has no file" in " ".join(shown.stdout.split())
    assert "good" in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("next: ")  # whole, to be copied


def test_a_file_that_was_replaced_at_its_source(cli: Cli, mine: Path, online: dict[str, str], tmp_path: Path) -> None:
    """What is in the cache is another file than the hub has now."""
    (mine / "good.toml").write_text(GOOD)
    cached = Path(cli.environment["HF_HOME"]) / "hub" / "models--user--small-GGUF"
    for path in (cached / "snapshots" / COMMIT, cached / "refs"):
        path.mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    write(cached / "snapshots" / COMMIT / "small-Q8_0.gguf", "tiny-moe")
    (row,) = cli("profiles", "check", "good", "--json", **online).document()["checks"]
    assert "bytes on the hub and" in row["problems"][0]
    assert row["hints"] == ["the file was changed at its source: ggufspec pull"]


def test_without_a_network_all_but_local_ones_fail(cli: Cli, mine: Path) -> None:
    (mine / "good.toml").write_text(GOOD)
    done = cli("profiles", "check", "good", "demo", "--json")
    assert done.code == 1
    good, demo = done.document()["checks"]
    assert "HF_HUB_OFFLINE" in good["problems"][0]
    assert "ggufspec profiles list" in good["hints"][0]
    assert demo["ok"]
