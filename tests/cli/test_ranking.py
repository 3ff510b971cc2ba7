"""Every model of a repository: headers read in part, what fits of each, drafts, searches, rows that fail."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.headers import KnownHeader, read_headers, read_in_part
from ggufspec.models.hub.repository import HubRepository, RepositoryModel
from ggufspec.models.locate import LocalFile, ModelFiles
from ggufspec.planning.dry_runs import DryRuns
from ggufspec.planning.memory import DeviceBytes, MemoryRequest
from ggufspec.planning.quantisations import DIVERGENCE, bits_per_weight, pareto, sharing
from tests.support import heads, repositories, shapes
from tests.support.processes import Cli, Finished, plain, rest
from tests.support.repositories import SMALL
from tests.support.server import COMMIT, Server, serving

REPO = "user/Small-GGUF"
MIXES = ("Q2_K", "Q4_K_M", "Q6_K", "Q8_0", "F16")
# Bytes of a weight in F16, and of the rows of a micro-batch twice: the most that copies of weights can differ by
COPIES = 2 * SMALL.ffn * SMALL.width + 2 * 4 * 512 * (SMALL.ffn + SMALL.width)
CARD = ("--vram", "1GiB")  # headroom and the driver take 0.7 GiB at most


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in five quantisations."""
    made = tmp_path_factory.mktemp("small")
    repositories.write(made, "Small", SMALL, MIXES)
    return made


@pytest.fixture
def hub() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def online(cli: Cli, hub: Server, folder: Path) -> Callable[..., Finished]:
    """The command line with the hub, which has the repository."""
    hub.add_repo(REPO, folder)
    return lambda *words: cli(*words, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="0")


def here(path: Path) -> ModelFiles:
    return ModelFiles(str(path), f"file {path}", (LocalFile.at(path),))


def read_whole(paths: list[Path], folder: Path) -> list[KnownHeader]:
    return read_headers(paths, folder)


# ---- headers -------------------------------------------------------------------------------------------------------


def test_a_header_that_is_read_in_part_is_the_one_that_is_read_whole(folder: Path, tmp_path: Path) -> None:
    paths = sorted(folder.glob("*.gguf"))
    known = read_whole(paths, tmp_path)
    found = read_in_part([here(path) for path in paths], known[1].sparse)
    assert [one.header for one in found] == [one.header for one in known]
    assert max(one.bytes_read for one in found) < 200_000
    assert min(path.stat().st_size for path in paths) > 2_000_000
    assert [one.header.fingerprint for one in found if one.header] == [one.header.fingerprint for one in known]


def other_vocabulary(path: Path) -> Path:
    return repositories.write_one(path, SMALL._replace(vocabulary=8192), "Q4_0", shapes.bpe(8192))


def one_token_longer(path: Path) -> Path:
    vocabulary = shapes.bpe(SMALL.vocabulary)
    vocabulary["tokenizer.ggml.tokens"][9000] += "s"
    return repositories.write_one(path, SMALL, "Q4_0", vocabulary)


def longer_behind(path: Path) -> Path:
    more = {"tokenizer.chat_template.tools": "{{ tools }}" * 40_000}
    return repositories.write_one(path, SMALL, "Q4_0", shapes.bpe(SMALL.vocabulary) | more)


def longer_before(path: Path) -> Path:
    more = {"general.description": "words " * 20_000}
    return repositories.write_one(path, SMALL, "Q4_0", more | shapes.bpe(SMALL.vocabulary))


def without_vocabulary(path: Path) -> Path:
    return repositories.write_one(path, SMALL, "Q4_0", shapes.NO_TOKENIZER)


def other_shape(path: Path) -> Path:
    return repositories.write_one(path, SMALL._replace(blocks=6), "Q4_0", shapes.bpe(SMALL.vocabulary), tied=True)


@pytest.mark.parametrize(
    "write", [other_vocabulary, one_token_longer, longer_behind, longer_before, without_vocabulary, other_shape]
)
def test_a_header_that_is_not_like_the_known_one_is_right_as_well(
    folder: Path, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "other.gguf")
    like, known = read_whole([folder / "Small-Q8_0.gguf", path], tmp_path / "cache")
    (found,) = read_in_part([here(path)], like.sparse)
    assert found.header == known.header


def test_bytes_at_the_end_of_a_file_are_not_taken_for_weights(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "Small-Q6_K.gguf"
    shutil.copyfile(folder / path.name, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    like = read_whole([folder / "Small-Q8_0.gguf"], tmp_path / "cache")[0]
    (found,) = read_in_part([here(path)], like.sparse)
    assert found.header is None
    assert "is truncated" in found.error


def test_the_extent_of_a_header(folder: Path) -> None:
    data = (folder / "Small-Q8_0.gguf").read_bytes()[: 4 << 20]
    extent = gguf.extent(data)
    assert extent is not None
    places, end = extent
    parsed = gguf.parse_header(data)
    assert places.keys() == parsed.metadata.keys() | parsed.lengths.keys()
    assert end <= parsed.data_offset < end + 32
    assert gguf.extent(data[: end - 1]) is None
    assert gguf.extent(data[:20]) is None
    assert gguf.extent(b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 4096) is None


# ---- one model for all of its shape ---------------------------------------------------------------------------------


def test_compute_buffers_are_those_of_any_model_of_the_shape(folder: Path, tmp_path: Path) -> None:
    """Beside each other: every model's own dry run, and that of one of them for all."""
    known = read_whole(sorted(folder.glob("*.gguf")), tmp_path)
    like, context = known[0], ContextOptions(2048, 16, 1)
    with DryRuns({"GPU0": "any card"}, simulated=True, rpc=(), folder=tmp_path) as dry_runs:
        shared = sharing(dry_runs, [(like.header, like.metadata_only)], ("GPU0",))
        for layers in (0, 3, 5):
            own = [MemoryRequest(one.header, one.metadata_only, Placement(layers), context) for one in known]
            found = shared([replace(one, file=like.metadata_only) for one in own])
            for one, truth in zip(found, dry_runs(own), strict=True):
                assert not isinstance(one, str)
                assert not isinstance(truth, str)
                more = one["GPU0"].compute - truth["GPU0"].compute
                assert one == truth | {"GPU0": truth["GPU0"] + DeviceBytes(compute=more)}
                assert more == 0 if layers == 5 else 0 <= more <= COPIES


def test_bits_per_weight(folder: Path, tmp_path: Path) -> None:
    bits = {one.header.name: bits_per_weight(one.header) for one in read_whole([*folder.glob("*.gguf")], tmp_path)}
    assert 16 <= bits["Small-F16.gguf"] < 16.1
    assert 8.5 <= bits["Small-Q8_0.gguf"] < 8.6
    assert bits["Small-Q2_K.gguf"] < bits["Small-Q4_K_M.gguf"] < bits["Small-Q6_K.gguf"]


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(10, 4, None), (8, 5, None), (8, 4.5, None)], [True, True, False]),
        ([(10, 4.25, 0.036), (9, 4.5, 0.072)], [True, False]),  # IQ4_XS and Q4_0: fewer bits, and better
        ([(10, 4, 0.1), (10, 4, 0.1)], [True, True]),
        ([(10, 4, None), (10, 4, 0.1), (12, 3, None)], [True, True, True]),
        ([], []),
    ],
)
def test_what_no_other_row_beats(rows: list[Any], best: list[bool]) -> None:
    assert pareto(rows) == best


def test_the_published_figures_fall_with_the_bits() -> None:
    order = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "Q5_K_M", "Q6_K"]
    found = [DIVERGENCE[name] for name in [*order, "Q8_0"]]
    assert found == sorted(found, reverse=True)


def test_a_model_is_named_by_its_quantisation_where_that_is_enough() -> None:
    models = tuple(
        RepositoryModel((file,), (1,)) for file in ("a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "a-UD-Q4_K_XL.gguf", "odd.gguf")
    )
    repository = HubRepository("u/r", None, models)
    assert [repository.named(model) for model in models] == [
        "u/r:a-Q4_K_M.gguf",
        "u/r:b-Q4_K_M.gguf",
        "u/r:UD-Q4_K_XL",
        "u/r:odd.gguf",
    ]


# ---- the command ---------------------------------------------------------------------------------------------------


def test_all_models_of_a_repository(online: Callable[..., Finished], hub: Server, folder: Path) -> None:
    done = online("plan", "-hf", REPO, *CARD, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert document["schema"] == "ggufspec/ranking@1"
    rows = document["rows"]
    assert [row["number"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["quant"] for row in rows] == list(MIXES)  # the smallest first
    assert [row["bytes"] for row in rows] == [(folder / row["file"]).stat().st_size for row in rows]
    assert {row["fits"] for row in rows} == {"whole"}
    assert all(0 <= row["gpu_layers"] <= row["layers"] + 1 == 5 for row in rows)
    assert [row["divergence"] for row in rows] == [DIVERGENCE.get(mix) for mix in MIXES]
    speeds = [row["target_only_tokens_per_s"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert document["repositories"][0]["commit"] == COMMIT
    assert document["next"] == f"ggufspec plan -hf {REPO}:Q8_0 --vram 1GiB"
    assert document["bytes_read"] == sum(hub.sent.values()) < 3e6
    hub.sent.clear()
    again = online("plan", "-hf", REPO, *CARD, "--json").document()
    assert sum(hub.sent.values()) == again["bytes_read"] == 0
    assert again["rows"] == rows


def test_a_row_is_what_a_plan_of_its_model_says(online: Callable[..., Finished]) -> None:
    """And with the longest context all layers fit, with 256 tokens more they do not, to an estimate's margin."""
    card = ("--vram", "680MiB", "--json")
    rows = online("plan", "-hf", REPO, *card).document()["rows"]
    for row in (rows[0], rows[3]):
        plan = online("plan", "-hf", row["name"], *card).document()
        assert plan["target"]["gpu_layers"] == row["gpu_layers"]
        assert plan["predicted"]["target_only_tokens_per_s"] == pytest.approx(row["target_only_tokens_per_s"])
    longest = rows[0]["largest_context"]
    assert 2048 < longest < 131_072
    for context, all_fit in ((longest, True), (int(1.1 * longest), False)):
        plan = online("plan", "-hf", rows[0]["name"], *card, "-c", str(context), "--n-cpu-ffn", "0").document()
        assert (plan["target"]["gpu_layers"] == 5) == all_fit


def test_a_repository_with_one_model_has_a_plan(online: Callable[..., Finished], hub: Server, tmp_path: Path) -> None:
    repositories.write(tmp_path, "One", SMALL, ["Q8_0"])
    hub.add_repo("user/One-GGUF", tmp_path)
    assert online("plan", "-hf", "user/One-GGUF", *CARD, "--json").document()["schema"] == "ggufspec/plan@1"


def test_run_takes_the_usual_quantisation_as_before(online: Callable[..., Finished]) -> None:
    done = online("run", "-hf", REPO, "-p", "x", "-n", "1")
    assert f"{REPO}/Small-Q4_K_M.gguf" in done.stderr  # which is not here


@pytest.mark.parametrize(("columns", "colour"), [(80, True), (120, False)])
def test_the_table_in_a_terminal(
    cli: Cli, hub: Server, tmp_path: Path, folder: Path, columns: int, colour: bool
) -> None:
    """Long names, too."""
    for path in folder.glob("*.gguf"):
        name = path.name.replace("Small", "A-Model.With-a-Very-Long-Name.Instruct-2507-Abliterated-v1.1.i1")
        (tmp_path / name).symlink_to(path)
    hub.add_repo(REPO, tmp_path)
    more = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"} | ({} if colour else {"NO_COLOR": "1"})
    child = cli.terminal("plan", "-hf", REPO, "--vram", "800MiB", columns=columns, **more)
    shown = rest(child)
    assert child.exitstatus == 0, shown
    assert ("\x1b[32m" in shown) == colour
    lines = plain(shown).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(re.search(r"\b2 +(◆ +)?Q4_K_M .* whole +[\d.]+ ", line) for line in lines)
    assert any(re.search(r"\d +◆ +\w+ .* MB ", line) for line in lines)
    assert any("KLD" in line and "Context" in line for line in lines)
    assert any(line.startswith(f"next: ggufspec plan -hf {REPO}:") for line in lines)


# ---- drafts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def drafts(hub: Server, tmp_path: Path) -> str:
    """A repository of drafts."""
    small = SMALL._replace(blocks=1, ffn=256)
    repositories.write(tmp_path / "drafts", "Tiny", small, ("Q4_0", "Q8_0", "F16"))
    hub.add_repo("user/Tiny-GGUF", tmp_path / "drafts")
    return "user/Tiny-GGUF"


def test_every_model_with_a_draft(online: Callable[..., Finished], drafts: str) -> None:
    document = online("plan", "-hf", REPO, "-hfd", f"{drafts}:Q8_0", "--acceptance", "0.9", *CARD, "--json").document()
    assert document["draft"] == f"{drafts}:Q8_0"
    assert document["settings"]["acceptance"] == 0.9
    assert document["next"].endswith(f"-hfd {drafts}:Q8_0 --vram 1GiB")
    row = document["rows"][1]
    plan = online("plan", "-hf", row["name"], "-hfd", f"{drafts}:Q8_0", "--acceptance", "0.9", *CARD, "--json")
    predicted = plan.document()["predicted"]
    assert row["speculative_tokens_per_s"] == pytest.approx(predicted["speculative_tokens_per_s"])
    assert row["break_even_acceptance"] == pytest.approx(predicted["break_even_acceptance"], abs=1e-6)


@pytest.mark.parametrize("named", [False, True])
def test_the_drafts_of_a_repository(online: Callable[..., Finished], drafts: str, named: bool) -> None:
    target = f"{REPO}:Q6_K" if named else REPO
    done = online("plan", "-hf", target, "--draft-repo", drafts, *CARD, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert document["target"] == f"{REPO}:{'Q6_K' if named else 'Q8_0'}"
    assert len(document["rows"]) == (1 if named else 5)
    rows = document["drafts"]
    assert [row["quant"] for row in rows] == ["Q4_0", "Q8_0", "F16"]
    fastest = max(rows, key=lambda row: row["tokens_per_s"])
    assert document["draft"] == fastest["name"]
    assert all(row["speculative_tokens_per_s"] for row in document["rows"])
    shown = online("plan", "-hf", target, "--draft-repo", drafts, *CARD)
    assert "Pays above" in shown.stdout
    assert f"next: {document['next']}" in " ".join(shown.stdout.split())


def test_a_target_s_own_quantisations_as_its_drafts(online: Callable[..., Finished]) -> None:
    """Accepted as often as the divergence published of their type promises; a plan of one of them says the same."""
    done = online("plan", "-hf", f"{REPO}:Q8_0", "--draft-repo", REPO, *CARD, "--json").document()
    rates = {row["quant"]: row["tokens_per_s"] for row in done["drafts"]}
    assert rates["Q2_K"] < rates["Q4_K_M"]  # nearly as fast, and accepted far less often
    plan = online("plan", "-hf", f"{REPO}:Q8_0", "-hfd", f"{REPO}:Q4_K_M", *CARD, "--json").document()
    assert plan["predicted"]["acceptance"] == pytest.approx(1 - (DIVERGENCE["Q4_K_M"] / 2) ** 0.5)
    assert plan["predicted"]["speculative_tokens_per_s"] == pytest.approx(rates["Q4_K_M"], rel=1e-3)
    larger = online("plan", "-hf", f"{REPO}:Q4_K_M", "-hfd", f"{REPO}:Q8_0", *CARD, "--json").document()
    assert larger["predicted"]["acceptance"] == pytest.approx(0.7)  # a prior: nobody drafts with that


def test_the_drafts_beside_a_profile_s_target(online: Callable[..., Finished], drafts: str) -> None:
    document = online("plan", "demo", "--draft-repo", drafts, *CARD, "--json").document()
    assert document["target"].endswith("demo-target-F16.gguf")
    assert document["next"] == f"ggufspec plan -m {document['target']} --vram 1GiB"
    assert {bool(row["error"]) for row in document["drafts"]} == {True}  # another vocabulary


def test_drafts_of_another_vocabulary_say_so(online: Callable[..., Finished], hub: Server, tmp_path: Path) -> None:
    other = SMALL._replace(vocabulary=4096)
    repositories.write(tmp_path, "Other", other, ("Q4_0", "Q8_0"))
    hub.add_repo("user/Other-GGUF", tmp_path)
    done = online("plan", "-hf", REPO, "--draft-repo", "user/Other-GGUF", *CARD, "--json")
    document = done.document()
    assert document["draft"] is None
    assert all("cannot draft for" in row["error"] for row in document["drafts"])
    assert len(document["rows"]) == 5


# ---- a search ------------------------------------------------------------------------------------------------------


def test_a_search(online: Callable[..., Finished], hub: Server, drafts: str) -> None:
    hub.repos["other/Small-gated-GGUF"] = {
        name: replace(served, token="secret", gated=True) for name, served in hub.repos[REPO].items()
    }
    done = online("plan", "--search", "small gguf", "--vram", "800MiB", "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert [one["repo"] for one in document["repositories"]] == [REPO]
    assert {row["repo"] for row in document["rows"]} == {REPO, "other/Small-gated-GGUF"}
    assert len([row for row in document["rows"] if row["repo"] == REPO]) == 4
    assert "is gated" in document["rows"][-1]["error"]
    assert [asked for asked in hub.asked() if "Tiny" in asked] == []
    shown = online("plan", "--search", "small gguf", "--vram", "800MiB")
    assert "is gated" in shown.stdout
    assert f"1 to 4: {REPO}" in shown.stdout
    assert [row["pareto"] for row in document["rows"]].count(True) >= 1
    assert document["next"].startswith(f"ggufspec plan -hf {REPO}:")


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (("--search", "nothing like it"), {}, "the hub has no GGUF repository for 'nothing like it'"),
        (("--search", "small"), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids requests"),
        (("--search", " "), {}, "--search has no words"),
        (("--search", "x", "-hf", REPO), {}, "both --search and a target are given"),
        (("-hf", REPO, "--draft-repo", "user/x", "-hfd", "user/y"), {}, "both --draft-repo and a draft are given"),
        (("-hf", REPO, "--draft-repo", "user/x:Q8_0"), {}, "'user/x:Q8_0' is not a repository on the hub"),
        (("-hf", REPO, "--draft-repo", "user/nothing"), {}, "there is no repository user/nothing"),
        (("-hf", REPO, "--sweep"), {}, "--sweep needs a single pair"),
        (("-hf", "user/nothing"), {}, "there is no repository user/nothing"),
        (("-hf", REPO), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids requests"),
    ],
)
def test_what_cannot_be_ranked(
    cli: Cli,
    hub: Server,
    online: Callable[..., Finished],
    words: tuple[str, ...],
    environment: dict[str, str],
    message: str,
) -> None:
    done = cli("plan", *words, **({"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"} | environment))
    assert done.code in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# ---- rows that fail ------------------------------------------------------------------------------------------------


def unknown_type(path: Path, folder: Path) -> None:
    """The first tensor's type is one of ik_llama.cpp."""
    data = bytearray((folder / "Small-Q6_K.gguf").read_bytes())
    place = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    data[place : place + 4] = (156).to_bytes(4, "little")
    path.write_bytes(data)


def web_page(path: Path, folder: Path) -> None:
    path.write_text("<!doctype html><title>Sign in</title>" + " " * 100_000)


def cut_short(path: Path, folder: Path) -> None:
    path.write_bytes((folder / "Small-Q6_K.gguf").read_bytes()[:1_000_000])


def cut_in_the_header(path: Path, folder: Path) -> None:
    path.write_bytes((folder / "Small-Q6_K.gguf").read_bytes()[:100_000])


def empty(path: Path, folder: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (unknown_type, "token_embd.weight has the type 156, IQ3_KS of ik_llama.cpp"),
        (web_page, "is not a GGUF file but a web page"),
        (cut_short, "is truncated"),
        (cut_in_the_header, "is truncated"),
        (empty, "is not a GGUF file: it is empty"),
    ],
)
def test_one_bad_file_is_a_row_with_the_reason(
    online: Callable[..., Finished],
    hub: Server,
    folder: Path,
    tmp_path: Path,
    damage: Callable[[Path, Path], None],
    reason: str,
) -> None:
    """The one that would be read first."""
    for mix in ("Q2_K", "Q8_0"):
        (tmp_path / f"Small-{mix}.gguf").symlink_to(folder / f"Small-{mix}.gguf")
    for mix in ("Q4_K_M", "Q5_K_M"):
        damage(tmp_path / f"Small-{mix}.gguf", folder)
    hub.add_repo("user/Bad-GGUF", tmp_path)
    done = online("plan", "-hf", "user/Bad-GGUF", *CARD, "--json")
    assert done.code == 0, done.stderr
    rows = {row["quant"]: row for row in done.document()["rows"]}
    for mix in ("Q4_K_M", "Q5_K_M"):
        assert reason in rows[mix]["error"]
        assert rows[mix]["target_only_tokens_per_s"] is None
    assert rows["Q2_K"]["fits"] == rows["Q8_0"]["fits"] == "whole"
    shown = online("plan", "-hf", "user/Bad-GGUF", *CARD)
    assert reason in " ".join(shown.stdout.split())


def test_one_model_beside_data_with_models_names(
    online: Callable[..., Finished], hub: Server, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "Small-Q8_0.gguf").symlink_to(folder / "Small-Q8_0.gguf")
    writer = GGUFWriter(tmp_path / "calibration.gguf", "llama")
    writer.add_type("imatrix")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    hub.add_repo("user/Data-GGUF", tmp_path)
    shown = online("plan", "-hf", "user/Data-GGUF", *CARD)
    assert shown.code == 0, shown.stderr
    assert [line.split()[:3] for line in shown.stdout.splitlines() if " 8.5" in line] == [["1", "◆", "Small-Q8_0"]]


def test_a_usable_file_among_those_of_another_fork(
    online: Callable[..., Finished], hub: Server, folder: Path, tmp_path: Path
) -> None:
    for mix in ("IQ1_KT", "IQ2_KS", "IQ3_KS", "IQ4_KSS"):
        unknown_type(tmp_path / f"Small-{mix}.gguf", folder)
    (tmp_path / "Small-Q8_0.gguf").symlink_to(folder / "Small-Q8_0.gguf")
    hub.add_repo("user/Fork-GGUF", tmp_path)
    done = online("plan", "-hf", "user/Fork-GGUF", *CARD, "--json")
    assert done.code == 0, done.stderr
    errors = {row["quant"]: row["error"] for row in done.document()["rows"]}
    assert [quant for quant, error in errors.items() if not error] == ["Q8_0"]
    assert all("ik_llama.cpp" in error for error in errors.values() if error)


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://127.0.0.1:port", "127.0.0.1:80", "hub"])
def test_an_endpoint_that_is_no_address(cli: Cli, address: str) -> None:
    done = cli("plan", "-hf", REPO, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
    assert done.code == 2
    assert f"HF_ENDPOINT={address} is not a server address" in done.stderr


def test_a_repository_with_split_files(online: Callable[..., Finished], hub: Server, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shapes.write_split(tmp_path / name, shapes.SHAPES["tiny-llama"], 3 if name == "a" else 2)
    for path in [*tmp_path.glob("*/*.gguf")]:
        path.rename(tmp_path / path.name.replace("tiny-llama", f"{path.parent.name}-Q4_K_M"))
    next(tmp_path.glob("b-*-00002-of-00002.gguf")).unlink()
    repositories.write(tmp_path, "c", SMALL, ["Q8_0"])
    hub.add_repo("user/Split-GGUF", tmp_path)
    rows = online("plan", "-hf", "user/Split-GGUF", *CARD, "--json").document()["rows"]
    found = {row["file"][0]: row for row in rows}
    assert len(rows) == 3
    assert found["a"]["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("a-*"))
    assert found["a"]["fits"] == "whole"
    assert "b-Q4_K_M-00002-of-00002.gguf" in found["b"]["error"]


def test_heads_and_projectors_are_no_models(online: Callable[..., Finished], hub: Server, tmp_path: Path) -> None:
    repositories.write(tmp_path, "Small", SMALL, ("Q4_K_M", "Q8_0"))
    for name in ("mmproj-Small-F16.gguf", "mtp-Small-Q8_0.gguf"):
        shutil.copyfile(tmp_path / "Small-Q8_0.gguf", tmp_path / name)
    hub.add_repo("user/Heads-GGUF", tmp_path)
    document = online("plan", "-hf", "user/Heads-GGUF", *CARD, "--json").document()
    assert [row["file"] for row in document["rows"]] == ["Small-Q4_K_M.gguf", "Small-Q8_0.gguf"]
    assert document["repositories"][0]["heads"] == ["mtp-Small-Q8_0.gguf"]
    shown = online("plan", "-hf", "user/Heads-GGUF", *CARD).stdout
    assert "-hfd user/Heads-GGUF:mtp-Small-Q8_0.gguf" in shown


@pytest.mark.parametrize("models", [("Q4_K_M", "Q8_0"), ("Q8_0", "F16"), ("Q8_0",)])
def test_a_file_of_another_kind_is_no_row(
    online: Callable[..., Finished], hub: Server, folder: Path, tmp_path: Path, models: tuple[str, ...]
) -> None:
    """By its header where its name says nothing, though it is the smallest and may be the first that is read."""
    for mix in models:
        (tmp_path / f"Small-{mix}.gguf").symlink_to(folder / f"Small-{mix}.gguf")
    tensors = [shapes.Tensor("blk.0.attn_q.weight", "F32", (32, 1))]
    kinds = {"calibration": {"general.type": "imatrix"}, "style": {"general.type": "adapter"}}
    kinds["seeing"] = {"general.architecture": "clip"}
    for name, metadata in kinds.items():
        shapes.write_file(tmp_path / f"{name}.gguf", {"general.architecture": "llama"} | metadata, tensors)
    hub.add_repo("user/Mixed-GGUF", tmp_path)
    done = online("plan", "-hf", "user/Mixed-GGUF", *CARD, "--json")
    assert done.code == 0, done.stderr
    files = [f"Small-{mix}.gguf" for mix in models]
    assert [(row["number"], row["file"], row["error"]) for row in done.document()["rows"]] == [
        (number, file, "") for number, file in enumerate(files, 1)
    ]
    (pulled,) = online("pull", "-hf", "user/Mixed-GGUF", "--row", "1", "--dry-run", "--json").document()["files"]
    assert pulled["file"] == files[0]
    for name, what in (("calibration", "an importance matrix"), ("style", "an adapter"), ("seeing", "a projector")):
        refused = online("plan", "-hf", f"user/Mixed-GGUF/{name}.gguf", *CARD, "--json")
        assert refused.document()["error"] == f"{name}.gguf is {what}, not a model"
        assert refused.document()["hint"]


def test_a_head_whose_name_does_not_say_so_is_no_target(
    online: Callable[..., Finished], hub: Server, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "demo-F16.gguf").symlink_to(target)
    heads.write_eagle3(target, tmp_path / "demo-EAGLE3-Q4_0.gguf")
    hub.add_repo("user/Unsaid-GGUF", tmp_path)
    document = online("plan", "-hf", "user/Unsaid-GGUF", *CARD, "--json").document()
    head, model = document["rows"]
    assert head["error"] == "demo-EAGLE3-Q4_0.gguf is an EAGLE-3 head and no target"
    assert head["hint"] == "-hf TARGET -hfd user/Unsaid-GGUF:Q4_0"
    assert (model["fits"], document["target"]) == ("whole", "user/Unsaid-GGUF:F16")


def test_the_only_model_beside_its_importance_matrix(
    online: Callable[..., Finished], hub: Server, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "Small-Q8_0.gguf").symlink_to(folder / "Small-Q8_0.gguf")
    (tmp_path / "imatrix_unsloth.gguf").write_bytes(b"GGUF")
    hub.add_repo("user/One-GGUF", tmp_path)
    plan = online("plan", "-hf", "user/One-GGUF", *CARD, "--json")
    assert plan.document()["target"]["file"] == "Small-Q8_0.gguf"
    (pulled,) = online("pull", "-hf", "user/One-GGUF", "--dry-run", "--json").document()["files"]
    assert pulled["file"] == "Small-Q8_0.gguf"


def test_a_table_of_a_revision(online: Callable[..., Finished], hub: Server, folder: Path) -> None:
    hub.commits.insert(0, "ab" * 20)
    document = online("plan", "-hf", f"{REPO}@{COMMIT}", *CARD, "--json").document()
    assert {row["name"].partition("@")[2] for row in document["rows"]} == {COMMIT}
    assert document["repositories"][0]["commit"] == COMMIT
    assert document["next"].split()[3] in [row["name"] for row in document["rows"]]
    words = ("--row", "1", "--dry-run", "--json")
    (file,) = online("pull", "-hf", f"{REPO}@{COMMIT}", *words).document()["files"]
    assert (file["file"], file["revision"], file["commit"]) == (document["rows"][0]["file"], COMMIT, COMMIT)
    assert "no table of" in online("pull", "-hf", REPO, *words).document()["error"]  # of its main


def test_of_hundreds_of_models_the_smaller_ones_are_ranked(
    online: Callable[..., Finished], hub: Server, tmp_path: Path
) -> None:
    repositories.write(tmp_path, "Small", SMALL, ["Q4_K_M"])
    for number in range(300):
        (tmp_path / f"Small-v{number:03}-Q8_0.gguf").symlink_to(tmp_path / "Small-Q4_K_M.gguf")
    hub.add_repo("user/Many-GGUF", tmp_path)
    done = online("plan", "-hf", "user/Many-GGUF", *CARD)
    assert done.code == 0, done.stderr
    assert "261 larger models not listed" in " ".join(done.stdout.split())
    assert sum(hub.sent.values()) < 40e6


def test_a_gated_repository(online: Callable[..., Finished], hub: Server) -> None:
    hub.repos[REPO] = {name: replace(served, token="secret", gated=True) for name, served in hub.repos[REPO].items()}
    done = online("plan", "-hf", REPO, *CARD)
    assert done.code == 1
    assert f"{REPO} is gated" in done.stderr


def test_a_repository_without_a_model(online: Callable[..., Finished], hub: Server, tmp_path: Path) -> None:
    hub.add_repo("user/Nothing", tmp_path)
    done = online("plan", "-hf", "user/Nothing", *CARD)
    assert done.code == 1
    assert "user/Nothing has no GGUF file" in done.stderr


def test_without_the_hub_the_last_table_is_ranked(cli: Cli, hub: Server, online: Callable[..., Finished]) -> None:
    rows = online("plan", "-hf", REPO, *CARD, "--json").document()["rows"]
    offline = cli("plan", "-hf", REPO, *CARD, "--json", HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")
    assert offline.document()["rows"] == rows


def test_a_new_commit_is_read_anew(online: Callable[..., Finished], hub: Server, tmp_path: Path) -> None:
    repositories.write(tmp_path, "Small", SMALL, ("Q4_K_M", "Q8_0"))
    hub.add_repo("user/New-GGUF", tmp_path)
    before = online("plan", "-hf", "user/New-GGUF", *CARD, "--json").document()
    repositories.write_one(tmp_path / "Small-Q8_0.gguf", SMALL._replace(blocks=6), "Q8_0", shapes.bpe(SMALL.vocabulary))
    hub.commits.insert(0, "ab" * 20)
    after = online("plan", "-hf", "user/New-GGUF", *CARD, "--json").document()
    assert [one["repositories"][0]["commit"] for one in (before, after)] == [COMMIT, "ab" * 20]
    assert [one["rows"][1]["layers"] for one in (before, after)] == [4, 6]
    assert after["rows"][0]["bits_per_weight"] == before["rows"][0]["bits_per_weight"]


# ---- pull ----------------------------------------------------------------------------------------------------------


def test_pull_takes_the_number_of_a_row(online: Callable[..., Finished], folder: Path) -> None:
    online("plan", "-hf", REPO, *CARD)
    done = online("pull", "-hf", REPO, "--row", "3", "--dry-run", "--json")
    assert [file["file"] for file in done.document()["files"]] == ["Small-Q6_K.gguf"]
    done = online("pull", "-hf", REPO, "--row", "3", "--dry-run")
    assert f"row 3 is {REPO}:Small-Q6_K.gguf" in done.stderr
    assert (folder / "Small-Q6_K.gguf").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-hf", REPO, "--row", "6"), f"the table of {REPO} has 5 rows"),
        (("-hf", REPO, "--row", "0"), f"the table of {REPO} has 5 rows"),
        (("-hf", "user/Other", "--row", "1"), "no table of user/Other was printed here"),
        (("-hf", f"{REPO}:Q8_0", "--row", "1"), "--row needs a repository without a QUANT"),
        (("demo", "--row", "1"), "--row needs a repository without a QUANT"),
    ],
)
def test_a_row_that_is_not_there(online: Callable[..., Finished], words: tuple[str, ...], message: str) -> None:
    online("plan", "-hf", REPO, *CARD)
    done = online("pull", *words, "--dry-run")
    assert done.code == 2
    assert message in done.stderr
