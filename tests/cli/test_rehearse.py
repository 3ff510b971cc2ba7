"""``ggufspec rehearse``: headers from a hub on loopback, dummy weights, what was measured, and why not."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.bench import batch_timing, rehearse
from ggufspec.llamacpp import dryrun
from ggufspec.llamacpp.library import load_library
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models import dummy_weights
from ggufspec.models.headers import read_headers
from ggufspec.planning import rehearsed
from ggufspec.planning.catalogue import from_catalogue
from ggufspec.planning.memory import HOST
from ggufspec.planning.speed import MeasuredBatches, pass_s
from ggufspec.reports.doctor import features
from ggufspec.settings.table import DRAFT_MAX
from tests.support import heads, shapes
from tests.support.processes import Cli, all_end, eventually, plain, rest, rpc_worker, workers
from tests.support.server import serving

SHORT = ("-r", "1", "--depth", "16", "-c", "256")
SECONDS = {1: 0.5, 2: 0.55, 4: 0.7, 8: 1.0}


@pytest.fixture(scope="module")
def hub(tmp_path_factory, target: Path, draft: Path):
    folder = tmp_path_factory.mktemp("hub")
    with serving() as server:
        for repo, file in (("me/target", target), ("me/draft", draft)):
            (folder / repo).mkdir(parents=True)
            (folder / repo / file.name).symlink_to(file)
            server.add_repo(repo, folder / repo)
        yield server


@pytest.fixture(scope="module")
def header(target: Path, tmp_path_factory):
    return read_headers([target], tmp_path_factory.mktemp("headers"))[0].header


def counted(weights: int, slack: int = 0) -> range:
    """What llama.cpp may count for a model's weights on the host.

    AMX has a repacked copy of matrices, of Q8_0 with four bytes more for every block of 34, and the file of all stays
    mapped beside it.
    """
    has_amx = "AMX_INT8" in features(load_library().llama_print_system_info().decode())
    return range(weights - slack, weights + slack + (weights * 38 // 34 if has_amx else 0) + 1)


# ---- the command


def test_a_pair_that_is_not_here(cli: Cli, hub, target: Path, draft: Path) -> None:
    online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
    pair = ("-hf", f"me/target:{target.name}", "-hfd", f"me/draft:{draft.name}")
    done = cli("rehearse", *pair, *SHORT, "--json", "-q", **online)
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/rehearse@1"
    assert document["label"] == "measured on dummy weights; acceptance assumed"
    assert sum(hub.sent.values()) == document["dummy_weights"]["bytes_read"] < 2.2e6 < target.stat().st_size / 5
    assert 0 < document["dummy_weights"]["disk_bytes"] < 2e6
    assert document["dummy_weights"]["files"] == []

    (run,) = document["runs"]
    assert run["name"] == "pair"
    assert run["ram_bytes"] > 20e6
    assert set(run["target"]["batch_s"]) == {*map(str, range(1, 9)), "12", "16", str(DRAFT_MAX + 1)}
    assert set(run["draft"]["batch_s"]) == {"1", "2"}
    for model in (run["target"], run["draft"]):
        assert model["tokens_per_s"]["median"] > 0
        assert model["depth"] == 16
        assert all(spread["samples"] for spread in model["batch_s"].values())
        assert set(model["bytes"]["CPU"]) == {"weights", "kv", "compute"}
    assert run["target"]["bytes"]["CPU"]["weights"] in counted(20337920)
    rival = document["rival_tokens_per_s"]["median"]
    assert rival == run["target"]["tokens_per_s"]["median"]
    assert [row["acceptance"] for row in document["expected"]] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert all(row["gain"] == pytest.approx(row["tokens_per_s"] / rival) for row in document["expected"])

    home = Path(cli.environment["HOME"])
    assert not list(home.rglob("dummy_weights/*"))  # nothing is left
    plan = cli("plan", *pair, "--json", **online).document()
    assert f"{target.name} as measured here on" in plan["speed"]


@pytest.mark.full
def test_what_a_killed_rehearsal_left_goes_with_the_next_one(cli: Cli) -> None:
    folder = Path(cli.environment["HOME"], ".cache", "ggufspec", "dummy_weights")
    for _ in range(5):  # its child may be just about to clear up
        with cli.start("rehearse", "demo", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
            assert eventually(lambda: list(folder.rglob("*.gguf")))
            parent.kill()
        if list(folder.rglob("*.gguf")):
            break
    assert list(folder.rglob("*.gguf"))
    assert cli("rehearse", "demo", *SHORT).code == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_in_a_terminal(cli: Cli, columns: int) -> None:
    child = cli.terminal("rehearse", "demo", *SHORT, columns=columns)
    lines = plain(rest(child)).splitlines()
    assert child.exitstatus == 0
    assert max(map(len, lines)) <= max(columns, 90)
    text = "\n".join(lines)
    assert "dummy weights for a model of 22 MB take at most" in text
    assert "Measured on dummy weights; acceptance assumed." in text
    for word in (
        "Chance per token",
        "Accepted",
        "50%",
        "90%",
        "T(n) / T(1)",
        "0/9",
        "0/3",
        "Target-only at 0/9 layers reaches",
    ):
        assert word in text


def test_kept_files_are_said_and_load(cli: Cli) -> None:
    document = cli("rehearse", "demo", *SHORT, "--keep", "--json").document()
    assert len(document["dummy_weights"]["files"]) == 2
    answer = cli("run", "-m", document["dummy_weights"]["files"][0], "-p", "x", "-n", "2", "--json")
    assert len(answer.document()["tokens"]) == 2


def test_a_target_alone(cli: Cli, target: Path) -> None:
    document = cli("rehearse", "-m", target, *SHORT, "--json").document()
    assert [run["name"] for run in document["runs"]] == ["target_only"]
    assert (document["expected"], document["break_even_acceptance"]) == ([], None)


@pytest.mark.full
def test_a_model_of_a_billion_parameters_that_is_not_here(cli: Cli, tmp_path: Path) -> None:
    """Its vocabulary is Llama 3's; the file that stands for it on the server is a hole."""
    path = shapes.write(tmp_path / "big.gguf", shapes.SHAPES["llama-1b-q4_0"], tokenizer=True)
    with serving() as server:
        url = server.add("big.gguf", path)
        done = cli("rehearse", "-m", url, "-r", "1", "--depth", "8", "-c", "64", "--json", HF_HUB_OFFLINE="0")
        assert done.code == 0, done.stderr
        assert sum(server.sent.values()) < 12e6 < path.stat().st_size / 50
    (run,) = done.document()["runs"]
    assert run["target"]["bytes"]["CPU"]["weights"] > 0.6e9
    assert run["ram_bytes"] > 0.6e9
    assert done.document()["dummy_weights"]["disk_bytes"] < 40e6


def test_a_model_that_is_too_large_is_refused_with_figures(cli: Cli, tmp_path: Path) -> None:
    files = [
        shapes.write(tmp_path / f"{name}.gguf", shapes.SHAPES[name], tokenizer=True)
        for name in ("llama3-70b-q3_k_s", "llama3-8b-q3_k_l")
    ]
    done = cli("rehearse", "-m", files[0], "-md", files[1], "-c", "40960", "--json")
    from ggufspec.hardware.host import free_memory_bytes

    if free_memory_bytes() > 60 * 2**30:
        pytest.skip("it fits this machine")
    assert done.code == 1
    error = done.document()
    assert error["schema"] == "ggufspec/error@1"
    assert "llama3-70b-q3_k_s.gguf with llama3-8b-q3_k_l.gguf needs" in error["error"]
    assert "0/81 target layers on GPUs" in error["error"]
    assert "are free" in error["error"]
    assert "more on GPUs" in error["hint"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-c", "1"), "--ctx-size 1 is out of range"),
        (("--depth", "0"), "--depth"),
        (("-r", "0"), "--repetitions"),
        (("-m", "none.gguf"), "none.gguf"),
        (("-ngl", "many"), "many"),
        (("--draft-max", "999"), "--draft-max 999 is out of range"),
        (("--rpc", "127.0.0.1:1"), "127.0.0.1:1"),
    ],
)
def test_bad_input(cli: Cli, flags: tuple[str, ...], words: str) -> None:
    done = cli("rehearse", *flags, "--json")
    assert done.code in (1, 2)
    assert words in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


def test_a_small_context_lowers_the_depth(cli: Cli) -> None:
    run = cli("rehearse", "demo", "-r", "1", "-c", "32", "--json").document()["runs"][0]
    assert run["target"]["depth"] == 16


def test_ctrl_c_leaves_nothing(cli: Cli) -> None:
    home = Path(cli.environment["HOME"])
    command = ("rehearse", "demo", "-r", "100000000", "--json")
    with cli.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert eventually(lambda: list(home.rglob("dummy_weights/*/*/*.gguf")) and workers(parent.pid))
        running = workers(parent.pid)
        parent.send_signal(signal.SIGINT)
        stdout, stderr = parent.communicate()
    assert parent.returncode == 130
    assert json.loads(stdout)["schema"] == "ggufspec/error@1"
    assert "Traceback" not in stderr
    assert all_end(running)
    assert not list(home.rglob("dummy_weights/*"))


# ---- the job


def test_bytes_are_those_of_the_real_files(target: Path, draft: Path, tmp_path: Path) -> None:
    context = ContextOptions(512, 8, 1)
    models = read_headers([target, draft], tmp_path / "headers")
    made = []
    for index, known in enumerate(models):
        (tmp_path / str(index)).mkdir()
        made.append(dummy_weights.make_dummy(known, tmp_path / str(index)).path)
    parts = tuple(batch_timing.ModelToTime(path, Placement(), context, (1,)) for path in (*made, target, draft))
    timed = batch_timing.time_batches(batch_timing.BatchTimingJob(parts, depth=8, rounds=1)).parts
    assert [part.bytes for part in timed[:2]] == [part.bytes for part in timed[2:]]
    runs = [dryrun.PlacedModel(path, Placement(), context) for path in (target, draft)]
    for part, answer in zip(timed, dryrun.ask(dryrun.DryRunJob(real=True), runs), strict=False):
        allocated = answer.devices[HOST]
        found = part.bytes[HOST]
        assert part.bytes == {HOST: found | {"kv": allocated.kv, "compute": allocated.compute}}
        assert found["weights"] in counted(allocated.weights)


def test_a_model_that_cannot_rewind_is_timed(tmp_path: Path) -> None:
    path = shapes.write(tmp_path / "m.gguf", shapes.SHAPES["tiny-mamba"], tokenizer=True)
    part = batch_timing.ModelToTime(path, Placement(), ContextOptions(32, 2, 1), (1, 2))
    measured = batch_timing.time_batches(batch_timing.BatchTimingJob((part,), depth=4, rounds=12))
    assert sum(map(len, measured.parts[0].seconds.values())) + measured.disturbed == 24  # others may be at work here


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Of an RPC worker that answers: a card for llama.cpp."""
    with rpc_worker() as (found, _):
        yield found


def test_with_a_card_the_rival_and_two_more_placements_are_measured(cli: Cli, endpoint: str, target: Path) -> None:
    """Bytes on the card are those of the real file, by llama.cpp's own count."""
    done = cli("rehearse", "demo", *SHORT, "-ngl", "5", "-ngld", "0", "--rpc", endpoint, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    runs = {run["name"]: run for run in document["runs"]}
    layers = {name: run["target"]["gpu_layers"] for name, run in runs.items()}
    assert layers == {"pair": 5, "target_only": 9, "half": 4, "none": 0}
    best = max(run["target"]["tokens_per_s"]["median"] for run in runs.values())
    assert document["rival_tokens_per_s"]["median"] == best
    context = ContextOptions(256, DRAFT_MAX + 1, 1)
    dry_runs = [dryrun.PlacedModel(target, Placement(5), context)]
    real = dryrun.ask(dryrun.DryRunJob(rpc=(endpoint,), real=True), dry_runs)[0].devices["RPC0"]
    rehearsed_bytes = runs["pair"]["target"]["bytes"]["RPC0"]
    assert rehearsed_bytes == {"weights": real.weights, "kv": real.kv, "compute": real.compute}
    plan = cli("plan", "demo", "--rpc", endpoint, "--json").document()
    assert "as measured here on" in plan["speed"]


# ---- what it means: pure


def test_expectations_are_those_of_the_speed_model() -> None:
    rows = list(rehearse.expectations(SECONDS, 0.05, best_target_only=2.0, most=7))
    assert [row.acceptance for row in rows] == list(rehearse.ACCEPTANCES)
    assert [row.tokens_per_s for row in rows] == sorted(row.tokens_per_s for row in rows)
    one = rows[0]
    times = {2: 0.55, 3: 0.625, 4: 0.7}
    assert one.tokens_per_s == max(
        (1 + sum(0.5**i for i in range(1, k + 1))) / (k * 0.05 + times[k + 1]) for k in (1, 2, 3)
    )
    assert one.gain == one.tokens_per_s / 2.0


def point(seconds: dict[int, float], layers: int = 0, machine: str = "m") -> rehearsed.RehearsedSpeed:
    return rehearsed.RehearsedSpeed(Placement(layers), 4, 16, "f16", "f16", seconds, machine, "2026-01-01")


def test_points_are_kept_by_shape_threads_and_machine(header, tmp_path: Path) -> None:
    rehearsed.record(tmp_path, header, point({1: 0.5}))
    rehearsed.record(tmp_path, header, point(SECONDS))  # the same placement: replaced
    rehearsed.record(tmp_path, header, point({1: 0.1}, layers=9))
    assert [p.batch_s for p in rehearsed.known(tmp_path, header, 4, "m")] == [SECONDS, {1: 0.1}]
    assert rehearsed.known(tmp_path, header, 5, "m") == rehearsed.known(tmp_path, header, 4, "other") == []
    renamed = replace(header, name="elsewhere.gguf")
    assert len(rehearsed.known(tmp_path, renamed, 4, "m")) == 2
    assert rehearsed.known(tmp_path, replace(header, tensors=header.tensors[1:]), 4, "m") == []
    (tmp_path / "rehearsed.json").write_text(json.dumps({rehearsed.shape_key(header): [{"placement": 1}]}))
    assert rehearsed.known(tmp_path, header, 4, "m") == []


def test_a_point_of_one_width_keeps_the_others(header, tmp_path: Path) -> None:
    """As a bench tells it after a rehearsal: T(n) / T(1) stays."""
    rehearsed.record(tmp_path, header, point({1: 0.5, 4: 1.5}))
    rehearsed.record(tmp_path, header, point({1: 0.25}))
    (kept,) = rehearsed.known(tmp_path, header, 4, "m")
    assert kept.batch_s == {1: 0.25, 4: 0.75}


def test_a_plan_goes_by_what_was_measured(header) -> None:
    speed = from_catalogue([])
    assert rehearsed.latency([], header, speed, ()) is None
    latency = rehearsed.latency([point(SECONDS)], header, speed, ())
    assert latency is not None
    for width, seconds in SECONDS.items():
        predicted = pass_s(
            header,
            Placement(),
            latency.speed,
            tokens=width,
            depth=16,
            measured=latency.nearest(header, Placement(), ()),
        )
        assert predicted == pytest.approx(seconds, rel=0.01)


def test_two_placements_on_a_card_give_both_speeds(header) -> None:
    from ggufspec.hardware.cards import find_card

    speed = from_catalogue([find_card("RTX 3060 12GB")], ["GPU0"])
    points = [point({1: 0.02}), point({1: 0.004, 4: 0.006}, layers=9)]
    latency = rehearsed.latency(points, header, speed, ("GPU0",))
    assert latency is not None
    for layers, seconds in ((0, 0.02), (9, 0.004)):
        found = pass_s(header, Placement(layers), latency.speed, ("GPU0",), depth=16)
        assert found == pytest.approx(seconds, rel=0.05)
    assert latency.nearest(header, Placement(5), ("GPU0",)) == MeasuredBatches(Placement(9), {1: 1.0, 4: 1.5})


def test_samples_beside_other_programs_are_left_out() -> None:
    samples = [0.1, 0.5, 0.11, 0.12, 0.4]
    assert batch_timing.undisturbed(samples, [0.0, 1.9, 0.2, 0.1, 0.3], 0.0) == 2
    assert samples == [0.1, 0.11, 0.12]
    samples = [0.5, 0.1, 0.4, 0.3]
    assert batch_timing.undisturbed(samples, [1.9, 0.0, 1.5, 1.2], 0.0) == 1  # three stay, the least disturbed
    assert samples == [0.1, 0.4, 0.3]
    assert batch_timing.undisturbed([0.5], [1.9], 0.0) == batch_timing.undisturbed([], [], 0.0) == 0


@pytest.mark.parametrize("kind", ["mtp", "mtp chained", "mtp sidecar", "mtp assistant", "eagle3", "eagle3 shared"])
def test_heads_are_rehearsed(cli: Cli, target: Path, tmp_path: Path, kind: str) -> None:
    """On dummy weights beside their target's, which are theirs where the blocks are in its file."""
    on, head = heads.write_all(target, tmp_path)[kind]
    pair = ("-m", on, *(("--drafter", "mtp") if head == on else ("-md", head)))
    done = cli("rehearse", *pair, *SHORT, "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert [run["name"] for run in document["runs"]] == ["pair"]
    run = document["runs"][0]["draft"]
    assert run["tokens_per_s"]["median"] > 0
    assert {*run["batch_s"]} == {"1", "2"}
    planned = cli("plan", *pair, "--json", "-c", "256").document()["options"]["speculative"]["draft"]["bytes"]["CPU"]
    assert run["bytes"]["CPU"]["weights"] in counted(planned["weights"], slack=32)  # between tensors of a file
    assert run["bytes"]["CPU"]["kv"] == planned["kv"]
    assert (run["bytes"]["CPU"]["weights"] == 0) == (head == on)
    assert len(document["expected"]) == 5
