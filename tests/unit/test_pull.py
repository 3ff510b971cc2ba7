"""Downloads from a hub on loopback: resumed, verified; killed, cut, stalled, full disks and bad names."""

from __future__ import annotations

import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.cli.app import main
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.models import locate
from ggufspec.models.hub import choice, client, download
from ggufspec.models.hub.client import HubFile
from ggufspec.schema.text import of_download
from tests.support import shapes
from tests.support.processes import SCRIPT, Cli, eventually, plain, rest
from tests.support.server import COMMIT, Served, Server, digest, serving

NEWER = "beefed" * 6 + "4567"
BIG, SMALL = "user/big-GGUF", "user/small-GGUF"
TARGET, DRAFT = "big-Q4_K_M.gguf", "small-Q8_0.gguf"
MB = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two repositories: two models of 4 and 1 MB, and one in three parts."""
    folder, noise = tmp_path_factory.mktemp("made"), random.Random(1)
    for repo, name, size in ((BIG, TARGET, 4 * MB), (BIG, "sub/big-Q8_0.gguf", 5000), (SMALL, DRAFT, MB)):
        path = folder / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF" + noise.randbytes(size))
    for path in shapes.write_split(folder, shapes.SHAPES["tiny-llama"], 3):
        path.rename(folder / BIG / path.name.replace("tiny-llama", "big-F16"))
    return folder


@pytest.fixture
def server(made: Path) -> Iterator[Server]:
    with serving() as served:
        for repo in (BIG, SMALL):
            served.add_models(repo, made / repo)
        yield served


@pytest.fixture
def online(cli: Cli, server: Server) -> Cli:
    """The command line with the server as its hub."""
    hub_of = {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return replace(cli, environment=cli.environment | hub_of)


@pytest.fixture
def here(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server as this process's hub, with an empty cache and no pauses: the cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_"))]:
        monkeypatch.delenv(name)
    cache = tmp_path / "hub"
    for name, value in {
        "ENDPOINT": server.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_DOWNLOAD_TIMEOUT": 1,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(client, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(download, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(client, "_silent", {})
    _http.close_session()
    return cache


def cache_of(cli: Cli, repo: str = BIG) -> Path:
    return Path(cli.environment["HF_HOME"]) / "hub" / f"models--{repo.replace('/', '--')}"


def partial(cli: Cli, path: Path) -> Path:
    return cache_of(cli) / "blobs" / f"{digest(path)}.ggufspec.incomplete"


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def sent(server: Server, repo: str = BIG, name: str = TARGET) -> int:
    return server.sent[f"/{repo}/{name}"]


def pulled(*sources: HubFile) -> tuple[download.DownloadItem, ...]:
    return download.fetch(download.look_up(sources)).items


# ---- a pull --------------------------------------------------------------------------------------------------------


def test_target_and_draft_come_whole_and_verified(online: Cli, server: Server, made: Path) -> None:
    arguments = ("pull", "-hf", f"{BIG}:F16", "-hfd", f"{SMALL}/{DRAFT}", "-y", "--json")
    done = online(*arguments)
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/pull@1"
    assert document["needed_bytes"] == sum(file["bytes"] for file in document["files"]) < document["free_bytes"]
    names = [f"big-F16-0000{part}-of-00003.gguf" for part in (1, 2, 3)] + [DRAFT]
    assert [file["file"] for file in document["files"]] == names
    for file in document["files"]:
        original = made / file["repo"] / file["file"]
        assert Path(file["path"]).read_bytes() == original.read_bytes()
        assert (file["sha256"], file["verified"], file["commit"]) == (digest(original), True, COMMIT)
        assert file["downloaded_bytes"] == file["bytes"] == sent(server, file["repo"], file["file"])
        assert file["revision"] is None
        assert cache_of(online, file["repo"]) in Path(file["path"]).parents
    again = online(*arguments).document()
    assert [file["downloaded_bytes"] for file in again["files"]] == [0] * 4
    assert all(file["verified"] for file in again["files"])
    assert sum(server.sent.values()) == document["needed_bytes"]
    assert not list(cache_of(online).rglob("*.incomplete"))


@pytest.fixture
def with_heads(server: Server, made: Path, tmp_path: Path) -> str:
    """A repository that has heads beside its target."""
    folder = tmp_path / "with-heads"
    for name, size in (("big-Q8_0.gguf", 3000), ("mtp-big-Q8_0.gguf", 700), ("dflash-big-Q8_0.gguf", 900)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"GGUF" + bytes(size))
    server.add_models("user/heads-GGUF", folder)
    return "user/heads-GGUF"


def test_heads_beside_the_target_are_named(online: Cli, with_heads: str) -> None:
    done = online("pull", "-hf", with_heads, "-y", COLUMNS="120")
    assert done.code == 0, done.stderr
    assert "mtp-big" not in done.stdout
    assert (
        f"{with_heads} has a head for multi-token prediction for it, mtp-big-Q8_0.gguf: "
        f"-hfd {with_heads}:mtp-big-Q8_0.gguf fetches it too\n"
    ) in done.stderr
    assert f"{with_heads} has a DFlash drafter for it, dflash-big-Q8_0.gguf: ggufspec cannot run it\n" in done.stderr
    document = online("pull", "-hf", with_heads, "--dry-run", "--json").document()
    assert document["heads"] == ["dflash-big-Q8_0.gguf", "mtp-big-Q8_0.gguf"]


def test_a_head_is_fetched_with_its_target(online: Cli, with_heads: str) -> None:
    done = online("pull", "-hf", f"{with_heads}:Q8_0", "-hfd", f"{with_heads}:mtp", "-y", "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert [file["file"] for file in document["files"]] == ["big-Q8_0.gguf", "mtp-big-Q8_0.gguf"]
    assert document["heads"] == ["dflash-big-Q8_0.gguf"]
    again = online("pull", "-hf", f"{with_heads}:Q8_0", "-hfd", f"{with_heads}:mtp", "--json", HF_HUB_OFFLINE="1")
    assert [file["downloaded_bytes"] for file in again.document()["files"]] == [0, 0]
    refused = online("pull", "-hf", with_heads, "-hfd", f"{with_heads}:dflash", "-y")
    assert (refused.code, "is a DFlash drafter, which ggufspec cannot run" in refused.stderr) == (1, True)


def test_a_dry_run_fetches_nothing(online: Cli, server: Server, made: Path) -> None:
    flags = ("pull", "-hf", f"{BIG}:Q4_K_M", "-hfd", f"{SMALL}:Q8_0", "--dry-run")
    document = online(*flags, "--json").document()
    assert document["dry_run"]
    assert [(f["bytes"], f["path"], f["verified"]) for f in document["files"]] == [
        (size(made / BIG / TARGET), None, False),
        (size(made / SMALL / DRAFT), None, False),
    ]
    assert document["files"][0]["sha256"] == digest(made / BIG / TARGET)
    table = online(*flags, COLUMNS="80")
    assert re.search(rf"{BIG}/{TARGET} +4\.2 MB +0 B +4\.2 MB +c0ffeec0f", table.stdout)
    assert "5.2 MB to fetch, " in table.stdout
    assert not server.sent
    assert not cache_of(online).exists()


def test_a_pair_that_ships_needs_no_hub(online: Cli, server: Server) -> None:
    assert online("pull", "--json").document()["files"] == []
    assert "is here" in online("pull", "demo").stderr
    assert not server.requests


def test_the_revision_is_pinned_and_recorded(online: Cli, server: Server, made: Path) -> None:
    server.commits.insert(0, NEWER)
    (file,) = online("pull", "-hf", f"{BIG}@{COMMIT}", "-y", "--json").document()["files"]
    assert (file["revision"], file["commit"]) == (COMMIT, COMMIT)
    (file,) = online("pull", "-hf", BIG, "-y", "--json").document()["files"]
    assert (file["commit"], file["downloaded_bytes"]) == (NEWER, 0)  # the same bytes
    assert (cache_of(online) / "refs" / "main").read_text() == NEWER
    for words in (("-hf", f"{BIG}/{TARGET}@v2"), ("-hf", f"{BIG}:Q4_K_M@v2"), ("-hf", f"{BIG}@v2")):
        assert "has no revision 'v2'" in online("pull", *words, "-y", "--json").document()["error"]


@pytest.mark.parametrize("what", ["", ":Q4_K_M", f":{TARGET}", f"/{TARGET}"])
def test_a_name_has_its_revision(online: Cli, server: Server, made: Path, what: str) -> None:
    server.commits.insert(0, NEWER)
    name = f"{BIG}{what}@{COMMIT}"
    (file,) = online("pull", "-hf", name, "-y", "--json").document()["files"]
    assert (file["file"], file["revision"], file["commit"]) == (TARGET, COMMIT, COMMIT)
    refused = online(
        "run", "-hf", name, "-hfd", f"{SMALL}:Q8_0@{NEWER}", "-p", "x", "--json", HF_HUB_OFFLINE="0"
    ).document()
    assert refused["hint"] == f"ggufspec pull -hf {name} -hfd {SMALL}:Q8_0@{NEWER}"
    assert f"{SMALL}/{DRAFT} of" in refused["error"]  # the target is here
    assert len(server.requests) == len([path for path in server.asked() if COMMIT in path or NEWER in path])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b@v1", choice.HubName("a/b", "", "v1")),
        ("a/b:Q8_0@refs/pr/3", choice.HubName("a/b", "Q8_0", "refs/pr/3")),
        ("a/b/c/d.gguf@v1", choice.HubName("a/b", "c/d.gguf", "v1")),
        ("a/b:c@d.gguf", choice.HubName("a/b", "c@d.gguf")),
        ("a/b/c@d.gguf@v1", choice.HubName("a/b", "c@d.gguf", "v1")),
        ("a/b:", choice.HubName("a/b")),
    ],
)
def test_the_parts_of_a_name(text: str, name: choice.HubName) -> None:
    assert choice.parse_name(text) == name
    assert choice.parse_name(str(name)) == name


@pytest.mark.parametrize("text", ["a", "a@v1", "a/b@", "a/b/", "https://huggingface.co/a/b", "/a/b.gguf"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(GgufspecError, match="is not a repository on the hub"):
        choice.parse_name(text)


def test_a_profile_names_what_to_pull(online: Cli, server: Server, made: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(
        f'name = "mine"\nwhy = "a test"\nsource = "here"\n[target]\nrepo = "{BIG}"\nfile = "{TARGET}"\n'
        f'revision = "{COMMIT}"\n[draft]\nrepo = "{SMALL}"\nfile = "{DRAFT}"\n'
    )
    refused = online("run", profile, "-p", "x", "--json").document()
    assert "not on this machine" in refused["error"]
    assert refused["hint"] == f"ggufspec pull {profile}"
    assert not server.sent
    refused = online("pull", profile, "--json").document()
    assert refused["error"] == "2 files, 5.2 MB, would be downloaded, but there is no terminal to ask on"
    assert refused["hint"] == f"ggufspec pull {profile} -y"
    document = online("pull", profile, "-y", "--json").document()
    assert [(file["file"], file["revision"]) for file in document["files"]] == [(TARGET, COMMIT), (DRAFT, None)]
    plan = online("run", profile, "-p", "x", "--json", HF_HUB_OFFLINE="1").document()
    assert "or damaged" in plan["error"]  # random bytes: it was found


def test_what_was_pulled_is_there_without_a_network(online: Cli, server: Server) -> None:
    online("pull", "-hf", BIG, "-y")
    (file,) = online("pull", "-hf", BIG, "--json", HF_HUB_OFFLINE="1").document()["files"]
    assert (file["verified"], file["commit"], file["downloaded_bytes"]) == (True, COMMIT, 0)
    done = online("pull", "-hf", f"{BIG}:Q8_0", "-y", "--json", HF_HUB_OFFLINE="1")
    assert done.document()["error"] == f"on this machine {BIG} has no model in Q8_0; it has Q4_K_M"
    assert done.document()["hint"].startswith("unset HF_HUB_OFFLINE")
    done = online("pull", "-hf", SMALL, "-y", "--json", HF_HUB_OFFLINE="1")
    assert done.document()["hint"].startswith("unset HF_HUB_OFFLINE; offline, ggufspec profiles list ")


# ---- what breaks off -----------------------------------------------------------------------------------------------


def killed_at(cli: Cli, path: Path, part: float) -> int:
    """Pull and kill -9 when ``part`` of the file is here: how much there was."""
    there, wanted = partial(cli, path), part * size(path)
    with cli.start("pull", "-hf", BIG, "-y", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert eventually(lambda: size(there) >= wanted or child.poll() is not None)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert wanted <= size(there) < size(path)
    return size(there)


def test_a_pull_that_was_killed_goes_on_where_it_ended(online: Cli, server: Server, made: Path) -> None:
    path, served = made / BIG / TARGET, server.repos[BIG][TARGET]
    served.bodies = ["stall"]  # at half of it
    had = killed_at(online, path, 0.4)
    assert "not on this machine" in online("run", "-hf", BIG, "-p", "x", "--json").document()["error"]
    assert not [path for path in (cache_of(online)).rglob("snapshots/**/*") if path.is_file()]
    served.bodies = ["fine"]
    before = sent(server)
    (file,) = online("pull", "-hf", BIG, "-y", "--json").document()["files"]
    assert file["present_bytes"] == had
    assert sent(server) - before == file["downloaded_bytes"] == size(path) - had
    assert (file["sha256"], file["verified"]) == (digest(path), True)
    assert digest(Path(file["path"])) == digest(path)


def test_a_part_is_never_taken_for_the_whole(server: Server, here: Path, made: Path) -> None:
    source = HubFile(BIG, TARGET)
    order = download.look_up([source])
    (item,) = order.items
    blob = client.blob_path(BIG, item.etag)
    blob.parent.mkdir(parents=True)
    unfinished = blob.with_name(f"{blob.name}.ggufspec.incomplete")
    unfinished.write_bytes((made / BIG / TARGET).read_bytes()[: 3 * MB])
    assert client.cached_file(BIG, TARGET) is None
    assert download.cached_model(source) is None
    assert locate.locate(source).origin.startswith(f"{BIG}/")
    (item,) = download.look_up([source]).items
    assert (item.present_bytes, item.path) == (3 * MB, None)
    pulled(source)
    assert sent(server) == size(made / BIG / TARGET) - 3 * MB


def test_two_pulls_at_once_fetch_once(online: Cli, server: Server, made: Path) -> None:
    server.repos[BIG][TARGET].bodies = ["slow"]
    arguments = ("pull", "-hf", BIG, "-y", "--json")
    children = [online.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert all(f'"sha256": "{digest(made / BIG / TARGET)}"' in stdout for stdout, _ in outputs)
    assert sent(server) == size(made / BIG / TARGET)


def test_one_killed_pull_does_not_hold_up_another(online: Cli, server: Server, made: Path) -> None:
    path = made / BIG / TARGET
    server.repos[BIG][TARGET].bodies = ["stall", "fine"]
    with online.start("pull", "-hf", BIG, "-y", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        assert eventually(lambda: size(partial(online, path)) > 0)
        with online.start("pull", "-hf", BIG, "-y", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as second:
            assert eventually(lambda: len(server.asked("HEAD")) >= 2)
            first.kill()
            second.communicate()
    assert second.returncode == 0
    assert digest(cache_of(online) / "snapshots" / COMMIT / TARGET) == digest(path)


@pytest.mark.parametrize("mode", ["slow", "stall"])
def test_ctrl_c_is_quiet_and_keeps_what_came(online: Cli, server: Server, made: Path, mode: str) -> None:
    path = made / BIG / TARGET
    server.repos[BIG][TARGET].bodies = [mode]
    child = online.terminal("pull", "-hf", BIG, "-y", columns=80)
    assert eventually(lambda: size(partial(online, path)) > MB)
    began = time.monotonic()
    child.sendintr()
    shown = plain(rest(child))
    assert child.exitstatus == 130
    assert time.monotonic() - began < 5
    assert "interrupted; what was downloaded is kept" in shown
    assert "Traceback" not in shown
    assert "big-Q4_K_M.gguf" in shown
    assert size(partial(online, path)) > MB


@pytest.mark.parametrize("bodies", [["cut", "fine"], ["cut"] * 4 + ["fine"], ["stall", "fine"], ["503", "429", "fine"]])
def test_a_connection_that_breaks_or_falls_silent_is_taken_up(server: Server, here: Path, bodies: list[str]) -> None:
    server.repos[BIG][TARGET].bodies = bodies
    (fetched,) = pulled(HubFile(BIG, TARGET))
    assert fetched.verified
    assert sent(server) == fetched.downloaded_bytes == fetched.size_bytes


def test_a_hub_that_stays_away_is_given_up(server: Server, here: Path) -> None:
    server.repos[BIG][TARGET].bodies = ["cut", "503"]
    with pytest.raises(client.HubBusyError, match="503") as lost:
        pulled(HubFile(BIG, TARGET))
    assert lost.value.hint
    server.repos[BIG][TARGET].bodies = ["fine"]
    (fetched,) = pulled(HubFile(BIG, TARGET))
    assert sent(server) == fetched.size_bytes


def test_a_busy_hub_is_left_alone_as_long_as_it_asks(online: Cli, server: Server) -> None:
    served = server.repos[BIG][TARGET]
    served.modes, served.bodies, served.retry_after = ["429", "fine"], ["429", "fine"], "1"
    began = time.monotonic()
    done = online("pull", "-hf", f"{BIG}/{TARGET}", "-y", "--json")
    assert done.document()["files"][0]["verified"]
    assert time.monotonic() - began > 2
    served.bodies, served.retry_after = ["429"], "3600"
    shutil.rmtree(cache_of(online))
    refused = online("pull", "-hf", f"{BIG}/{TARGET}", "-y", "--json").document()
    assert "too many requests" in refused["error"]
    assert refused["hint"] == "try again in 3600 s"


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({"retry-after": "7"}, 7),
        ({"ratelimit": '"resolvers";r=0;t=137'}, 137),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"retry-after": "-1"}, 0),
        ({"ratelimit": "t=x"}, 0),
        ({}, 0),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], pause_s: float) -> None:
    assert client.asked_pause_s(headers) == pause_s


def test_a_server_without_ranges_begins_anew(server: Server, here: Path) -> None:
    server.repos[BIG][TARGET].bodies = ["cut", "no ranges"]
    (fetched,) = pulled(HubFile(BIG, TARGET))
    assert fetched.verified
    assert fetched.downloaded_bytes == sent(server) > fetched.size_bytes


@pytest.mark.parametrize("mode", ["wrong start", "no words", "no size", "endless"])
def test_a_wrong_answer_is_refused(server: Server, here: Path, mode: str) -> None:
    served = server.repos[BIG][TARGET]
    served.bodies = ["cut", mode]
    if mode == "no size":  # a beginning is enough
        assert pulled(HubFile(BIG, TARGET))[0].verified
        return
    with pytest.raises(ModelError) as refusal:
        pulled(HubFile(BIG, TARGET))
    assert refusal.value.hint
    assert client.cached_file(BIG, TARGET) is None


def test_an_older_version_stays_until_the_newer_is_whole(server: Server, here: Path, made: Path) -> None:
    source = HubFile(BIG, "big-F16-00001-of-00003.gguf")
    pulled(source)
    old = download.cached_model(source)
    newer = here.parent / "newer"
    shutil.copytree(made / BIG, newer)
    for path in newer.glob("big-F16*"):
        path.write_bytes(path.read_bytes() + b"newer")
    server.add_models(BIG, newer)
    server.commits.insert(0, NEWER)
    server.repos[BIG]["big-F16-00003-of-00003.gguf"].bodies = ["404"]
    with pytest.raises(ModelError, match="refuses"):
        pulled(source)
    assert download.cached_model(source) == old
    server.repos[BIG]["big-F16-00003-of-00003.gguf"].bodies = ["fine"]
    pulled(source)
    assert download.cached_model(source) == here / f"models--{BIG.replace('/', '--')}/snapshots/{NEWER}/{source.file}"


# ---- what is not the hub's -----------------------------------------------------------------------------------------


def test_a_byte_damaged_on_the_way_is_found(online: Cli, server: Server, made: Path) -> None:
    server.repos[BIG][TARGET].bodies = ["flipped", "fine"]
    refused = online("pull", "-hf", BIG, "-y", "--json").document()
    assert f"{BIG}/{TARGET} is damaged" in refused["error"]
    assert "downloads it again" in refused["hint"]
    assert not [path for path in cache_of(online).rglob("blobs/*") if path.is_file()]
    assert online("pull", "-hf", BIG, "-y", "--json").document()["files"][0]["verified"]


def test_a_byte_damaged_on_the_disk_is_found(online: Cli, server: Server, made: Path) -> None:
    (file,) = online("pull", "-hf", BIG, "-y", "--json").document()["files"]
    with Path(file["path"]).open("r+b") as blob:
        blob.seek(MB)
        blob.write(b"damaged!")
    done = online("pull", "-hf", BIG, "--json")
    assert done.code == 1
    assert "is damaged" in done.document()["error"]
    assert not Path(file["path"]).is_symlink()
    assert not list((cache_of(online) / "blobs").iterdir())
    (file,) = online("pull", "-hf", BIG, "-y", "--json").document()["files"]
    assert file["downloaded_bytes"] == file["bytes"]
    assert digest(Path(file["path"])) == digest(made / BIG / TARGET)


def test_a_beginning_that_is_another_files_is_found(online: Cli, server: Server, made: Path) -> None:
    path = partial(online, made / BIG / TARGET)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(MB))
    assert "is damaged" in online("pull", "-hf", BIG, "-y", "--json").document()["error"]
    assert not path.exists()
    path.write_bytes(bytes(9 * MB))  # longer than the file: no beginning of it
    assert online("pull", "-hf", BIG, "-y", "--json").document()["files"][0]["verified"]


def test_without_a_digest_that_is_said(online: Cli, server: Server) -> None:
    server.repos[BIG][TARGET].etag = '"some-version"'
    (file,) = online("pull", "-hf", BIG, "-y", "--json").document()["files"]
    assert (file["sha256"], file["verified"]) == (None, False)
    assert "the hub has no digest" in online("pull", "-hf", BIG, COLUMNS="120").stdout


@pytest.mark.parametrize("etag", ['"../../x"', '""', '".hidden"', '"a/b"'])
def test_a_version_that_is_no_file_name(server: Server, here: Path, etag: str) -> None:
    server.repos[BIG][TARGET].etag = etag
    with pytest.raises(ModelError, match="invalid ETag"):
        pulled(HubFile(BIG, TARGET))
    assert not server.sent


def test_what_is_no_model_is_refused(server: Server, here: Path, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "link-Q8_0.gguf").write_text("../../etc/passwd")  # how git keeps a link
    server.add_models("user/odd", tmp_path / "repo", git=True)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        pulled(choice.hub_file("user/odd"))


def test_the_largest_files_are_left_to_huggingface_hub(
    server: Server, here: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "largest_by_http_bytes", lambda: MB)
    with pytest.raises(GgufspecError, match=r"big-Q4_K_M\.gguf has 4\.2 MB, and the hub serves files") as refusal:
        pulled(HubFile(BIG, TARGET))
    assert refusal.value.hint == f"hf download {BIG} {TARGET}, then the same command again"
    assert not server.sent


# ---- names ---------------------------------------------------------------------------------------------------------

OUTSIDE = [
    *("../x-Q8_0.gguf", "a/../../x-Q8_0.gguf", "/x-Q8_0.gguf", "..\\x-Q8_0.gguf", "a\\x-Q8_0.gguf", "C:/x-Q8_0.gguf"),
    *("C:x-Q8_0.gguf", "a/C:x-Q8_0.gguf", "~/x-Q8_0.gguf", "a//x-Q8_0.gguf", "./x-Q8_0.gguf", "x\0-Q8_0.gguf"),
    *("\\\\host\\x-Q8_0.gguf", "x\n-Q8_0.gguf", "x\x1b[2J-Q8_0.gguf", "x\ud800-Q8_0.gguf"),
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_cache_is_refused(server: Server, here: Path, made: Path, name: str) -> None:
    server.repos["user/evil"] = {name: Served(made / SMALL / DRAFT)}
    for ask in (
        lambda: choice.hub_file("user/evil:Q8_0"),
        lambda: download.look_up([HubFile("user/evil", name)]),
        lambda: client.cached_file("user/evil", name),
        lambda: locate.locate(HubFile("user/evil", name)),
        lambda: download.look_up([HubFile(BIG, TARGET, name)]),
    ):
        with pytest.raises(ModelError, match=r"leaves the repository|is not a revision") as refusal:
            ask()
        assert refusal.value.hint
    assert not [path for _, path, _ in server.requests if "resolve" in path]
    assert not here.exists()


@pytest.mark.parametrize("name", ["a.gguf", "Q8_0/a.gguf", "..a.gguf", "a..gguf", "größe.gguf", "a b~.gguf", ".a.gguf"])
def test_a_name_that_stays(name: str) -> None:
    assert client.stays_inside(name)


def test_a_refusal_on_the_command_line(online: Cli, server: Server, made: Path) -> None:
    server.repos["user/evil"] = {"../x-Q8_0.gguf": Served(made / SMALL / DRAFT)}
    for name in ("user/evil:Q8_0", "user/evil/../../x.gguf"):
        done = online("pull", "-hf", name, "-y", "--json")
        assert done.code == 1
        assert "leaves the repository" in done.document()["error"]
    assert not server.sent


def test_the_quantisation_is_the_folder_s_name_alone(online: Cli, server: Server, tmp_path: Path) -> None:
    for kind in ("Q4_K_M", "Q8_0"):
        (tmp_path / kind).mkdir()
        for part in shapes.write_split(tmp_path / kind, shapes.SHAPES["tiny-llama"], 2):
            part.rename(part.with_name(part.name.replace("tiny-llama", "M")))
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    server.add_models("user/folders", tmp_path)
    parts = [f"Q4_K_M/M-0000{number}-of-00002.gguf" for number in (1, 2)]
    pulled = online("pull", "-hf", "user/folders:Q4_K_M", "-y", "--json").document()["files"]
    assert [file["file"] for file in pulled] == parts
    assert {Path(file["path"]).parent.name for file in pulled} == {"Q4_K_M"}
    asked = len(server.requests)
    again = online("pull", "-hf", "user/folders:Q4_K_M", "--json", HF_HUB_OFFLINE="1").document()["files"]
    assert [file["path"] for file in again] == [file["path"] for file in pulled]
    plan = online("plan", "-hf", "user/folders:Q4_K_M", "--json", HF_HUB_OFFLINE="1")
    assert plan.code == 0, plan.stderr
    words = ("export", "-hf", "user/folders", "--to", "llama-cli", "--hub", "--json")
    command = online(*words, HF_HUB_OFFLINE="1").document()["arguments"]
    assert command[command.index("-hff") + 1] == parts[0]
    assert len(server.requests) == asked


def test_a_repository_that_was_renamed(online: Cli, server: Server) -> None:
    """The hub redirects what is asked of the old name, under which it is found again."""
    for path in (f"/api/models/{BIG}", *(f"/{BIG}/resolve/{at}/{TARGET}" for at in ("main", COMMIT))):
        moved = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {path}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        server.raw[path.replace(BIG, "user/old")] = [moved.encode()]
    done = online("pull", "-hf", "user/old", "-y")
    assert done.code == 0, done.stderr
    assert done.stderr.count(f"user/old is now called {BIG}") == 1
    assert cache_of(online, "user/old").is_dir()
    assert not cache_of(online).exists()
    (file,) = online("pull", "-hf", "user/old", "--json", HF_HUB_OFFLINE="1").document()["files"]
    assert (file["repo"], file["commit"], file["verified"]) == ("user/old", COMMIT, True)


# ---- what the hub refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "lacks"),
    [
        ("308 Permanent Redirect\r\nLocation: http://127.0.0.1:1/M.gguf", "size"),
        ("200 OK\r\nX-Repo-Commit: " + COMMIT, "size"),
        ('200 OK\r\nETag: "one"\r\nContent-Length: 9', "commit"),
    ],
)
def test_a_mirror_that_leaves_something_out(here: Path, server: Server, head: str, lacks: str) -> None:
    server.raw[f"/{BIG}/resolve/main/{TARGET}"] = [f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode()]
    with pytest.raises(ModelError, match=f"{server.address} does not return the {lacks} of {BIG}/{TARGET}") as refused:
        download.look_up([HubFile(BIG, TARGET)])
    assert "unset HF_ENDPOINT" in refused.value.hint


@pytest.mark.parametrize(
    ("proxy", "says", "hint"),
    [
        (
            "socks5://127.0.0.1:9",
            "names a SOCKS proxy, which needs the package socksio",
            "install socksio|--python .* socksio",
        ),
        ("socks5h://127.0.0.1:9", "names a SOCKS proxy", "socksio"),
        ("socks://127.0.0.1:9", r"Unknown scheme for proxy URL URL\('socks://127", "ALL_PROXY=socks5://HOST:PORT"),
        ("http://127.0.0.1:port", "Invalid port: 'port'", "http://HOST:PORT"),
    ],
)
def test_a_proxy_that_cannot_be_used(
    here: Path, server: Server, monkeypatch: pytest.MonkeyPatch, proxy: str, says: str, hint: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed
    for ask in (
        lambda: client.contents(BIG),
        lambda: client.search("x", 5),
        lambda: download.look_up([HubFile(BIG, TARGET)]),
        lambda: locate.locate("http://192.0.2.1/a.gguf"),
    ):
        with pytest.raises(client.UnreachableError, match=says) as refused:
            ask()
        assert re.search(hint, refused.value.hint)
    assert not server.requests


def test_a_proxy_is_no_traceback(online: Cli, server: Server) -> None:
    for words in (("plan", "-hf", BIG), ("pull", "-hf", f"{BIG}/{TARGET}"), ("profiles", "check", "llama3-70b")):
        done = online(*words, ALL_PROXY="socks://127.0.0.1:9")
        assert done.code == 1
        assert "ALL_PROXY=socks5://HOST:PORT" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    online("pull", "-hf", BIG, "-y")
    (file,) = online("pull", "-hf", BIG, "--json", ALL_PROXY="socks://127.0.0.1:9").document()["files"]
    assert file["verified"]  # what is here needs no proxy


@pytest.mark.parametrize(
    ("name", "more", "says", "hint"),
    [
        (f"{BIG}/{TARGET}", {"token": "x", "gated": True}, "is gated", "hf auth login"),
        (f"{BIG}/{TARGET}", {"token": "x"}, "no repository user/big-GGUF, or it is private", "HF_TOKEN"),
        (f"{BIG}/big-Q4_K_S.gguf", {}, "has no file 'big-Q4_K_S.gguf'", f"did you mean {TARGET}"),
        (f"{BIG}:Q5_K_M", {}, "has no model in Q5_K_M; it has F16, Q4_K_M, Q8_0", f"{BIG}:Q4_K_M"),
        ("user/none:Q8_0", {}, "no repository user/none", "/user/none"),
        ("none", {}, "is not a repository on the hub", "USER/NAME"),
    ],
)
def test_refusals_are_explained(
    server: Server, here: Path, made: Path, name: str, more: dict[str, object], says: str, hint: str
) -> None:
    server.add_models(BIG, made / BIG, **more)
    with pytest.raises(GgufspecError, match=says) as refusal:
        download.look_up([choice.hub_file(name)])
    assert hint in refusal.value.hint
    if more.get("gated"):
        assert f"{server.address}/{BIG}" in refusal.value.hint
        assert "HF_TOKEN" in refusal.value.hint


def test_the_token_stays_with_the_hub(server: Server, here: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request goes through the hub, so that a signed address that ran out is replaced when a pull goes on."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving() as cdn:
        there = cdn.add("blob", made / BIG / TARGET)
        cdn.files["/blob"].bodies = ["cut", "fine"]
        server.add_models(BIG, made / BIG, token="hf_secret")
        server.repos[BIG][TARGET].redirect = there
        assert choice.hub_file(BIG).file == TARGET
        assert client.search("big", 5) == [BIG]
        (fetched,) = pulled(HubFile(BIG, TARGET))
        assert fetched.verified
        assert cdn.sent["/blob"] == fetched.size_bytes
        assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer hf_secret"}
        assert not any("authorization" in headers for _, _, headers in cdn.requests)
        assert [headers.get("range", "") for _, _, headers in cdn.requests] == [
            "",
            f"bytes={-(-fetched.size_bytes // 2)}-{fetched.size_bytes - 1}",
        ]


# ---- the disk ------------------------------------------------------------------------------------------------------


def test_the_disk_is_asked_first(server: Server, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.host, "free_disk_bytes", lambda path: 5 * MB if path == here else 0)
    order = download.look_up([HubFile(BIG, TARGET), HubFile(SMALL, DRAFT)])
    with pytest.raises(GgufspecError, match=r"5\.2 MB have to be downloaded, but only 5\.2 MB are free") as refusal:
        download.fetch(replace(order, free_bytes=order.missing_bytes - 1))
    assert "HF_HOME" in refusal.value.hint
    assert not server.sent
    assert download.look_up([HubFile(BIG, TARGET), HubFile(BIG, TARGET)]).missing_bytes == order.items[0].size_bytes
    download.check_disk(replace(order, free_bytes=order.missing_bytes))


def test_a_disk_that_is_too_small(online: Cli, server: Server, tmp_path: Path) -> None:
    """A real one, of 3 MB; where the system lets a user have it."""
    mounted = f"mount -t tmpfs -o size=3m none {shlex.quote(str(tmp_path))}"
    alone = ["unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, mounted], capture_output=True).returncode:
        pytest.skip("no mounts for this user")
    done = subprocess.run(
        [*alone, f"{mounted} && exec {shlex.quote(str(SCRIPT))} pull -hf {BIG} -y"],
        env=online.environment | {"HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"4.2 MB have to be downloaded, but only 3.1 MB are free on the disk with {tmp_path}" in done.stderr
    assert not server.sent


def test_what_the_disk_took_is_kept(online: Cli, server: Server, made: Path) -> None:
    """A limit on the size of files, since it makes writing fail like a full disk does."""
    path = made / BIG / TARGET

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MB, MB))

    arguments = ("pull", "-hf", BIG, "-y", "--json")
    child = online.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, first=limit)
    _, stderr = child.communicate()
    assert child.returncode == 1
    assert "cannot be read or written: File too large" in stderr
    assert "what was downloaded is kept" in stderr
    assert "Traceback" not in stderr
    assert size(partial(online, path)) == MB
    (file,) = online(*arguments).document()["files"]
    assert (file["verified"], file["downloaded_bytes"]) == (True, size(path) - MB)


def test_a_cache_that_cannot_be_written(server: Server, here: Path) -> None:
    here.write_text("a file where the cache should be")
    with pytest.raises(GgufspecError, match="cannot be read or written"):
        pulled(HubFile(BIG, TARGET))


@pytest.mark.parametrize(
    ("bytes_", "shown"),
    [(0, "0 B"), (999, "999 B"), (31_900_000_000, "31.9 GB"), (999_960, "1.0 MB"), (10**16, "10000.0 TB")],
)
def test_sizes_for_people(bytes_: int, shown: str) -> None:
    assert of_download(bytes_) == shown


# ---- who is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_a_terminal_is_asked(online: Cli, server: Server, columns: int) -> None:
    for name, repo in ((TARGET, BIG), (DRAFT, SMALL)):
        server.repos[repo][name].bodies = ["slow"]
    child = online.terminal("pull", "-hf", BIG, "-hfd", SMALL, columns=columns)
    child.expect("Fetch 2 files, 5.2 MB, ")
    child.sendline("n")
    assert "nothing was downloaded" in rest(child)
    assert child.exitstatus == 1
    assert not server.sent
    child = online.terminal("pull", "-hf", BIG, "-hfd", SMALL, columns=columns)
    child.expect("Fetch 2 files, 5.2 MB, ")
    child.sendline("")
    shown = plain(rest(child))
    assert child.exitstatus == 0
    bars = [line for line in shown.splitlines() if "MB/s" in line]
    assert any(line.startswith("big-Q4_K_M.gguf") for line in bars)
    assert any(line.startswith("small-Q8_0.gguf") for line in bars)
    assert max(map(len, bars)) <= columns
    assert re.search(rf"{BIG}/{TARGET} +4\.2 MB +4\.2 MB +c0ffeec0f +yes", shown)


def test_a_command_fetches_what_it_needs(
    online: Cli, server: Server, target: Path, draft: Path, tmp_path: Path
) -> None:
    """With the pair that ships as a repository: run it by the hub's name, then without a network."""
    (tmp_path / "repo").mkdir()
    shutil.copyfile(draft, tmp_path / "repo" / "demo-Q8_0.gguf")
    shutil.copyfile(target, tmp_path / "repo" / "demo-F16.gguf")
    server.add_models("user/demo", tmp_path / "repo")
    flags = ("-hf", "user/demo:Q8_0", "-p", "def f(", "-n", "3", "--json")
    refused = online("run", *flags, "-hf", "user/demo:F16", "-hfd", "user/demo:Q8_0").document()
    assert "not on this machine" in refused["error"]
    assert refused["hint"] == "ggufspec pull -hf user/demo:F16 -hfd user/demo:Q8_0"
    assert not server.sent
    child = online.terminal("run", *flags[:-1])
    child.expect("Fetch 1 file, 1.1 MB, ")
    child.sendline("n")
    assert "ggufspec pull -hf user/demo:Q8_0 -y" in rest(child)
    done = online("run", *flags, "-y")
    assert (done.code, done.stderr) == (0, "")
    assert len(done.document()["tokens"]) == 3
    assert server.sent["/user/demo/demo-Q8_0.gguf"] == size(draft)
    bench = ("bench", "-hf", "user/demo/demo-Q8_0.gguf", "--drafter", "lookup", *flags[2:], "-r", "1")
    document = online(*bench, HF_HUB_OFFLINE="1").document()
    assert document["schema"] == "ggufspec/bench@1"
    assert "models--user--demo" in document["pair"]["target"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("pull demo -hf a/b", "both a PAIR and -hf"),
        ("run -p x -m a.gguf -hf a/b", "both -m (or GGUFSPEC_MODEL) and -hf"),
        ("run -p x -m a.gguf -md a.gguf -hfd a/b", "both -md"),
        ("run -p x demo -hf a/b", "both a PAIR and -hf"),
        ("bench -hf a/b", "none is given"),
    ],
)
def test_contradictions(
    server: Server, here: Path, capsys: pytest.CaptureFixture[str], arguments: str, says: str
) -> None:
    assert main([*arguments.split(), "--json"]) == 2
    assert says in capsys.readouterr().out
    assert not server.requests


# ---- what is no answer -------------------------------------------------------------------------------------------

LIST = f"/api/models/{BIG}"
PORTAL = b"<!doctype html><html><title>Welcome to the hotel</title></html>"


def answer(body: bytes, headers: str = "", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n".encode() + body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (PORTAL, "it may be a web page"),
        (b"", "did not come from the hub"),
        (b"[" * 1_000_000, "did not come from the hub"),
        (b"{}", "did not come from the hub"),
        (b'{"id": "a"}', "has no GGUF file"),
        (b'{"id": "a", "siblings": []}', "has no GGUF file"),
        (b'{"id": "a", "siblings": 1}', "did not come from the hub"),
        (b'{"id": "a", "siblings": [1, 2]}', "did not come from the hub"),
        (b'{"id": "a", "siblings": [{"size": 1}]}', "did not come from the hub"),
        (b'{"id": "a", "siblings": [{"rfilename": "a.gguf", "size": "large"}]}', "did not come from the hub"),
        (b'{"id": "a", "lastModified": 1}', "did not come from the hub"),
        (b"[1, 2]", "did not come from the hub"),
        (b"\xff\xfe\x00", "did not come from the hub"),
        (b'{"id": "a", "siblings": [{"rfilename": "../../x.gguf"}]}', "leaves the repository"),
        (b'{"id": "a", "siblings": [{"rfilename": "\\u001b[2J.gguf"}]}', "leaves the repository"),
    ],
)
def test_a_list_of_files_that_is_none(here: Path, server: Server, body: bytes, words: str) -> None:
    """A hotel's network answers every question with its own page."""
    server.raw[LIST] = [answer(body)]
    with pytest.raises(GgufspecError, match=words) as refused:
        choice.hub_file(BIG)
    assert refused.value.hint


@pytest.mark.parametrize("body", [PORTAL, b"[1]", b'[{"name": "a"}]'])
def test_a_search_that_the_hub_does_not_answer(here: Path, server: Server, body: bytes) -> None:
    server.raw["/api/models"] = [answer(body)]
    with pytest.raises(client.ForeignError, match="the reply about a search for 'x' did not come from the hub"):
        client.search("x", 5)


def test_the_contents_of_a_revision(here: Path, server: Server, made: Path) -> None:
    server.commits.insert(0, NEWER)
    sizes = {path.relative_to(made / BIG).as_posix(): size(path) for path in (made / BIG).rglob("*.gguf")}
    assert client.contents(BIG) == (NEWER, sizes)
    assert client.contents(BIG, COMMIT) == (COMMIT, sizes)
    with pytest.raises(ModelError, match="has no revision 'a/b'"):
        client.contents(BIG, "a/b")


def test_a_silent_hub_is_given_up(here: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    server.pause_s = 5.0
    server.raw[LIST] = server.raw["/api/models"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"{}"]
    for ask in (lambda: client.contents(BIG), lambda: client.search("x", 5)):
        with pytest.raises(client.UnreachableError, match="cannot be reached"):
            ask()


def test_a_download_that_crawls_ends_and_goes_on_later(
    here: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = download.look_up([HubFile(SMALL, DRAFT)])
    path = f"/{SMALL}/resolve/{COMMIT}/{DRAFT}"
    whole = (server.repos[SMALL][DRAFT].path).read_bytes()
    crawl = [bytes([byte]) for byte in whole[100_000:101_000]]
    server.raw[path] = [answer(whole[:100_000], f"Content-Length: {len(whole)}\r\n"), *crawl]
    server.pause_s = 0.02
    monkeypatch.setattr(download, "_STALL_S", 0.4)
    with pytest.raises(GgufspecError, match="is too slow") as slow:
        download.fetch(order)
    assert "the same command resumes at" in slow.value.hint
    server.raw.clear()
    fetched = download.fetch(download.look_up([HubFile(SMALL, DRAFT)])).items[0]
    assert fetched.path.read_bytes() == whole
    assert fetched.downloaded_bytes < len(whole)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../../x", b"a" * 10_000, b"\0"])
def test_a_damaged_reference_in_the_cache_is_none(here: Path, server: Server, content: bytes) -> None:
    download.fetch(download.look_up([HubFile(SMALL, DRAFT)]))
    (ref,) = here.glob("models--*/refs/main")
    ref.write_bytes(content)
    client.point(SMALL, None, COMMIT)
    assert ref.read_text() == COMMIT
    ref.write_bytes(content)
    assert client.cached_names(SMALL, None) == []
    assert client.cached_file(SMALL, DRAFT) is None


# ---- what is here does not wait for the hub ------------------------------------------------------------------------

REFUSED = "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\n{}\r\n"
INSTEAD = {  # what answers in place of the hub: (pieces, what the note says)
    "too many requests": ([REFUSED.format("429 No", "Retry-After: 40\r\n").encode()], "too many requests"),
    "broken": ([REFUSED.format("502 Bad", "").encode()], "cannot serve .* now \\(502\\)"),
    "a network that wants a login": ([REFUSED.format("511 Login", "").encode()], "now \\(511\\)"),
    "a proxy": ([REFUSED.format("407 Who", "").encode()], "refuses .*407"),
    "a token that ran out": ([REFUSED.format("401 No", "X-Error-Code: RepoNotFound\r\n").encode()], "private"),
    "gone": ([REFUSED.format("404 No", "X-Error-Code: RepoNotFound\r\n").encode()], "no repository"),
    "a login page": ([answer(PORTAL, 'ETag: "x"\r\nContent-Type: text/html\r\n')], "did not come from|does not return"),
    "another page": ([answer(b"", "Location: /login\r\n", "302 Found")], "small-GGUF"),
    "not HTTP": ([b"SSH-2.0-OpenSSH_9.9\r\n"], "small-GGUF"),
    "silence": ([b"", b""], "does not answer within"),
    "a trickle": ([b"HTTP/1.1 200 OK\r\nX-Slow: ", *[b"a"] * 10_000], "does not answer within"),
}


@pytest.fixture
def cached(server: Server, here: Path, monkeypatch: pytest.MonkeyPatch) -> HubFile:
    """A model in the cache; from then on the hub is waited for a moment, and a pause at its request fails the test."""
    (item,) = pulled(HubFile(SMALL, DRAFT))

    def paused(seconds: float, tell: object) -> None:
        assert seconds == 0, "the hub's pause was kept"

    monkeypatch.setattr(client, "pause", paused)
    monkeypatch.setattr(client, "_SOON_S", 0.3)
    return item.source


def used(source: HubFile, says: str) -> None:
    """Choose, look and find: all from the cache, with a note that says why."""
    with pytest.warns(UserWarning, match=f"using {SMALL} as it is on this machine: .*({says})"):
        assert choice.hub_file(f"{SMALL}:Q8_0") == choice.hub_file(SMALL) == source
    client._silent.clear()
    with pytest.warns(UserWarning, match=f"using {SMALL} as it is on this machine: .*({says})"):
        assert download.look_up([source]).items[0].path == download.cached_model(source)
    client._silent.clear()


@pytest.mark.parametrize("instead", INSTEAD)
def test_what_is_here_does_not_wait_for_the_hub(server: Server, cached: HubFile, instead: str) -> None:
    server.instead, says = INSTEAD[instead]
    server.pause_s = {"silence": 60.0, "a trickle": 0.02}.get(instead, 0.0)
    used(cached, says)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://nowhere.invalid", "https://{}"])
def test_what_is_here_needs_no_hub(
    server: Server, cached: HubFile, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    from huggingface_hub import constants

    there = address.format(server.address.removeprefix("http://"))
    monkeypatch.setattr(constants, "ENDPOINT", there)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", there + "/{repo_id}/resolve/{revision}/{filename}")
    used(cached, "cannot be reached|does not answer")


def test_a_silent_hub_is_asked_once(server: Server, cached: HubFile, recwarn: pytest.WarningsRecorder) -> None:
    server.instead, _ = INSTEAD["too many requests"]
    before = len(server.requests)
    for _ in range(3):
        choice.hub_file(SMALL)
        download.look_up([cached])
    assert len(server.requests) == before + 1
    assert {str(one.message)[:40] for one in recwarn} == {f"using {SMALL} as it is on this machine"[:40]}


def test_a_hub_that_answers_is_heeded(server: Server, cached: HubFile, made: Path, tmp_path: Path) -> None:
    """The cache has one model, and the hub a newer commit with the usual one."""
    newer = tmp_path / "newer"
    shutil.copytree(made / SMALL, newer)
    shutil.copyfile(newer / DRAFT, newer / "small-Q4_K_M.gguf")
    server.add_models(SMALL, newer)
    server.commits.insert(0, NEWER)
    assert choice.hub_file(SMALL).file == "small-Q4_K_M.gguf"
    assert download.look_up([cached]).items[0].commit == NEWER


def test_what_is_not_here_waits_for_the_hub(server: Server, here: Path, made: Path) -> None:
    pulled(HubFile(BIG, TARGET))
    server.repos[BIG]["sub/big-Q8_0.gguf"].modes = ["503", "429", "fine"]
    (item,) = download.look_up([choice.hub_file(f"{BIG}:Q8_0")]).items
    assert (item.path, item.size_bytes) == (None, size(made / BIG / "sub/big-Q8_0.gguf"))


def test_a_command_uses_what_was_pulled(online: Cli, server: Server, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    shutil.copyfile(draft, tmp_path / "repo" / "demo-Q8_0.gguf")
    server.add_models("user/demo", tmp_path / "repo")
    online("pull", "-hf", "user/demo", "-y")
    server.instead, _ = INSTEAD["too many requests"]
    before = len(server.requests)
    for words in (("run", "-hf", "user/demo", "-p", "def f(", "-n", "3"), ("plan", "-hf", "user/demo")):
        done = online(*words, "--json")
        assert done.code == 0, done.stderr
        notes = [line for line in done.stderr.splitlines() if line.startswith("using user/demo as it is on this")]
        assert len(notes) == 1
        assert notes[0].endswith("too many requests to the hub, the last for user/demo (429)")
    assert len(server.requests) == before + 2  # one for each command
    assert "is used" not in online("run", "-hf", "user/demo", "-p", "x", "-n", "1", HF_HUB_OFFLINE="1").stderr


# ---- the pauses that a hub asks for ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["modes", "bodies"])  # while the hub is asked for the version, or for the bytes
def test_a_pause_is_shown_and_can_be_interrupted(online: Cli, server: Server, what: str) -> None:
    served = server.repos[SMALL][DRAFT]
    setattr(served, what, ["429", "fine"])
    served.retry_after = "2"
    child = online.terminal("pull", "-hf", f"{SMALL}/{DRAFT}", "-y", columns=80)
    child.expect("again in 2 s: ")
    child.expect("again in 1 s: ")
    rest(child)
    assert child.exitstatus == 0
    shutil.rmtree(cache_of(online, SMALL))
    setattr(served, what, ["429"])
    served.retry_after = "55"
    child = online.terminal("pull", "-hf", f"{SMALL}/{DRAFT}", "-y", columns=80)
    child.expect("again in 5[345] s: ")
    child.sendintr()
    assert "interrupted" in plain(rest(child))
    assert child.exitstatus == 130


def test_a_pause_is_noted_without_a_terminal(online: Cli, server: Server) -> None:
    served = server.repos[SMALL][DRAFT]
    served.modes, served.bodies, served.retry_after = ["429", "fine"], ["429", "fine"], "2"
    done = online("pull", "-hf", f"{SMALL}/{DRAFT}", "-y")
    assert done.code == 0
    assert done.stderr.count(f"for {SMALL}/{DRAFT} (429): trying again in 2 s\n") == 2
    assert online("pull", "-hf", f"{SMALL}/{DRAFT}", "-y", "-q").stderr == ""
