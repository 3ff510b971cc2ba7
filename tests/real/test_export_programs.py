"""llama.cpp's own programs take the exported commands, and place the same layers as the decoder here does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp.options import Placement
from ggufspec.reports.export import ExportSettings, ModelFile, export_for
from ggufspec.schema import codec
from tests.support.processes import PATIENCE_S, Cli, rpc_worker

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.full
BUILD_S = 3600  # 12 minutes on two cores that have nothing else to do
DECODER = """
import json, logging, sys
from pathlib import Path
from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.options import DecoderOptions
from ggufspec.llamacpp.devices import add_rpc_workers
from ggufspec.schema import codec

target, draft, endpoint, options = json.loads(sys.argv[1])
logging.basicConfig(level=logging.DEBUG, format="%(message)s")
add_rpc_workers([endpoint])
options = codec.load(DecoderOptions, options)
SpeculativeDecoder(Path(target), Path(draft) if draft else None, options).close()
"""
ONE_CARD = (1.0, 0.0)


def at(target: Placement, draft: Placement, ctx_size: int = 2048, **more: Any) -> DecoderOptions:
    return DecoderOptions(target, draft, ctx_size, threads=1, **more)


PLACES = {
    "some layers": at(Placement(4, ONE_CARD), Placement(1, ONE_CARD), 1000),
    "the output only": at(Placement(1, ONE_CARD), Placement(0, ONE_CARD)),
    "all layers": at(Placement(-1, ONE_CARD), Placement(-1, ONE_CARD)),
    "no layers": at(Placement(), Placement(), 192),
    "more layers than there are": at(Placement(99, ONE_CARD), Placement(99, ONE_CARD)),
    "two cards": at(Placement(7, (3.0, 1.0)), Placement(-1, (3.0, 1.0))),
    "the draft on the second card": at(Placement(7, (3.0, 1.0)), Placement(-1, (0.0, 1.0))),
    "experts that a dense model has not": at(Placement(5, ONE_CARD, n_cpu_moe=3), Placement(2, ONE_CARD)),
    "feed-forwards on the CPU": at(Placement(-1, ONE_CARD, n_cpu_ffn=3), Placement(2, ONE_CARD)),
    "tensors elsewhere": at(
        Placement(-1, ONE_CARD, n_cpu_ffn=3, override_tensor=("ffn_up=RPC1", "attn_k=CPU")), Placement(2, ONE_CARD)
    ),
    "a quantised cache": at(
        Placement(5, ONE_CARD),
        Placement(2, ONE_CARD),
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        flash_attn="on",
        draft_max=7,
    ),
}


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of llama.cpp's programs, built where they are missing."""
    made = subprocess.run(
        [ROOT / "scripts" / "peers", "llama-server", "llama-cli"], capture_output=True, text=True, timeout=BUILD_S
    )
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def cards() -> Iterator[str]:
    """The endpoint of a worker that offers two devices, RPC0 and RPC1."""
    with rpc_worker(devices=("CPU", "CPU")) as (found, _):
        yield found


def layout(log: str, *, context: bool = True) -> dict[str, list[Any]]:
    """What a log of llama.cpp says about where everything is: first the target's, then the draft's."""
    patterns = {
        "layers": r"layer +(\d+) assigned to device (\w+)",
        "offloaded": r"offloaded (\d+)/(\d+) layers",
        "weights": r"(\w+)(?:\[[^]]*\])? +model buffer size = +([\d.]+) MiB",
        "kv": r"(\w+)(?:\[[^]]*\])? +KV buffer size = +([\d.]+) MiB",
        "cells": r"llama_context: n_ctx += (\d+)",
    }
    names = patterns if context else ("layers", "offloaded", "weights")
    return {name: re.findall(patterns[name], log) for name in names}


def decoder_log(target: Path, draft: Path | None, endpoint: str, options: DecoderOptions) -> str:
    request = json.dumps([str(target), str(draft) if draft else None, endpoint, codec.dump(options)])
    done = subprocess.run([sys.executable, "-c", DECODER, request], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def arguments(program: str, target: Path, draft: Path | None, endpoint: str, options: DecoderOptions) -> list[str]:
    """The exported command without the program's name."""
    small = ModelFile(str(draft)) if draft else None
    settings = ExportSettings(ModelFile(str(target)), small, options, rpc=(endpoint,), devices=("RPC0", "RPC1"))
    return list(export_for(program, settings).arguments)[1:]


def run(command: list[str | Path], folder: Path) -> str:
    """The log of a program that ends."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        timeout=PATIENCE_S,
    )
    log = done.stdout.decode(errors="replace")
    assert done.returncode == 0, log[-2000:]
    return log


def serve(command: list[str | Path], folder: Path) -> str:
    """The log of a server that has answered a request, with a draft where it has one."""
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0", "-v"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        log, address = _until_listening(process.stdout)
        body = json.dumps({"prompt": "def f(", "n_predict": 16, "temperature": 0}).encode()
        request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            timings = json.load(answer)["timings"]
        assert timings["predicted_n"] > 0
        assert bool(timings.get("draft_n")) is ("-md" in command)
        return log
    finally:
        process.kill()
        process.communicate()


def _until_listening(lines: IO[str]) -> tuple[str, str]:
    log = ""
    for line in lines:
        log += line
        if found := re.search(r"listening on (http://[\d.:]+)", line):
            return log, found[1]
    raise AssertionError(log[-2000:])


@pytest.mark.parametrize("place", PLACES)
def test_the_same_layers_at_the_same_places(
    place: str, programs: Path, cards: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    options = PLACES[place]
    log = decoder_log(*pair, cards, options)
    ours = layout(log)
    assert len(ours["offloaded"]) == len(ours["cells"]) == 2
    assert len(ours["layers"]) == 12

    def reported(program: str) -> list[str | Path]:
        return [programs / program, *arguments(program, *pair, cards, options)]

    prompt = ("-p", "def f(", "-n", "4", "-v")
    assert layout(run([*reported("llama-speculative-simple"), *prompt], tmp_path)) == ours
    assert layout(run([*reported("llama-cli"), *prompt, "-st"], tmp_path)) == ours
    assert layout(serve(reported("llama-server"), tmp_path)) == ours

    alone = layout(decoder_log(pair[0], None, cards, options), context=False)
    bench = run([*reported("llama-bench"), "-n", "4", "-p", "0", "-r", "1", "-v"], tmp_path)
    assert layout(bench, context=False) == alone


def test_the_target_alone(programs: Path, cards: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = PLACES["some layers"]
    ours = layout(decoder_log(pair[0], None, cards, options))
    reported = arguments("llama-server", pair[0], None, cards, options)
    assert layout(serve([programs / "llama-server", *reported], tmp_path)) == ours


def test_a_place_that_shows_in_the_log(cards: str, pair: tuple[Path, Path]) -> None:
    """Else two logs that say nothing would be equal."""
    ours = layout(decoder_log(*pair, cards, PLACES["the draft on the second card"]))
    assert ours["offloaded"] == [("7", "9"), ("3", "3")]
    devices = [device for _, device in ours["layers"]]
    assert devices == ["CPU"] * 2 + ["RPC0"] * 6 + ["RPC1"] + ["RPC1"] * 3
    assert ours["cells"] == ["2304", "2304"]


def test_the_printed_text_in_a_shell(
    cli: Cli, programs: Path, cards: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "it's a folder, $HOME & more"
    folder.mkdir()
    target, draft = (shutil.copy(path, folder / path.name) for path in pair)
    flags = ("-ngl", "4", "-ngld", "1", "-ts", "1,0", "--rpc", cards)
    printed = cli("export", "-m", target, "-md", draft, "--to", "llama-cli", *flags)
    assert printed.code == 0
    done = subprocess.run(
        ["sh", "-c", f"{printed.stdout.strip()} -p 'def f(' -n 4 -st"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_preset_in_the_router(cli: Cli, programs: Path, cards: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two sections in one file: the router lists both, and loads the first as the exported command would."""
    folder = tmp_path / "it's a folder, $HOME & [more]"
    folder.mkdir()
    target, draft = (shutil.copy(path, folder / path.name) for path in pair)
    flags = ("--to", "models-preset", "-ngl", "4", "-ngld", "1", "-ts", "1,0", "--rpc", cards)
    presets = tmp_path / "presets.ini"
    exported = [
        cli("export", "-m", target, "-md", draft, *flags),
        cli("export", "-m", shutil.copy(pair[0], folder / "alone.gguf"), *flags),
    ]
    assert [one.code for one in exported] == [0, 0]
    presets.write_text("".join(one.stdout for one in exported))
    process = subprocess.Popen(
        [programs / "llama-server", "--models-preset", presets, "--host", "127.0.0.1", "--port", "0", "-v"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "home")},
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        _, address = _until_listening(process.stdout)
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        with urllib.request.urlopen(f"{address}/models", timeout=PATIENCE_S) as answer:
            listed = {model["id"]: model["status"] for model in json.load(answer)["data"]}
        assert set(listed) == {target.stem, "alone"}
        started = listed[target.stem]["args"]
        for name, value in {
            "--model": str(target),
            "--model-draft": str(draft),
            "--n-gpu-layers": "4",
            "--n-gpu-layers-draft": "1",
            "--tensor-split": "1,0",
            "--rpc": cards,
            "--spec-type": "draft-simple",
        }.items():
            assert started[started.index(name) + 1] == value
        assert "--spec-type" not in listed["alone"]["args"]
        body = {"model": target.stem, "prompt": "def f(", "n_predict": 16, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            timings = json.load(answer)["timings"]
        assert timings["predicted_n"] > 0
        assert timings["draft_n"] > 0
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_hub_names(cli: Cli, programs: Path, cards: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Out of the cache of the hub, since a test has no network."""
    home, revision = tmp_path / "home", "0123456789" * 4
    repo = home / "hub" / "models--someone--pair"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    snapshot = repo / "snapshots" / revision
    snapshot.mkdir(parents=True)
    target, draft = (shutil.copy(path, snapshot / path.name) for path in pair)
    flags = ("-ngl", "4", "-ngld", "1", "-ts", "1,0", "--rpc", cards, "--hub")
    for program in ("llama-speculative-simple", "llama-cli", "llama-bench"):
        printed = cli("export", "-m", target, "-md", draft, "--to", program, *flags)
        assert printed.code == 0
        _, *reported = shlex.split(printed.stdout)
        ending = ("-n", "4", "-p", "0", "-r", "1", "-v") if program == "llama-bench" else ("-n", "4", "-p", "x", "-v")
        done = subprocess.run(
            [programs / program, *reported, *ending, "--offline", *(["-st"] if program == "llama-cli" else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=os.environ | {"HF_HOME": str(home)},
            timeout=PATIENCE_S,
        )
        log = done.stdout.decode(errors="replace")
        assert done.returncode == 0, log[-2000:]
        wanted = [("4", "9")] if program == "llama-bench" else [("4", "9"), ("1", "3")]
        assert layout(log)["offloaded"] == wanted
