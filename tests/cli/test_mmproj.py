"""Image projectors: found by name, counted by llama.cpp, held against a real load, and in plans and exports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from ggufspec.errors import ModelError
from ggufspec.models import mmproj
from ggufspec.models.profile import demo_pair
from tests.support import projectors
from tests.support.processes import Cli
from tests.support.server import serving

WIDTH = 320  # of the demo target's embeddings
ROOM = ("--vram", "600MiB", "--headroom", "0")
LOAD = """
import ctypes, sys
import llama_cpp.mtmd_cpp as mtmd
from llama_cpp import llama_cpp
params = llama_cpp.llama_model_default_params()
params.n_gpu_layers = 0
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
params = mtmd.mtmd_context_params_default()
params.use_gpu = False
print("made", bool(mtmd.mtmd_init_from_file(sys.argv[2].encode(), model, params)))
"""


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return projectors.write(
        tmp_path_factory.mktemp("vision") / "mmproj-f16.gguf", WIDTH, hidden=256, blocks=4, image=448
    )


def weights(path: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


def test_bytes_are_those_of_a_real_load(projector: Path) -> None:
    """Its log has the compute buffer to a hundredth of a MiB."""
    used = mmproj.measure_projector(str(projector))
    assert (used.name, used.card_bytes) == ("mmproj-f16.gguf", 0)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, demo_pair()[0], projector], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "made True\n"  # llama.cpp, too, takes it for the demo target's
    (buffer,) = set(re.findall(r"CPU compute buffer size = +([\d.]+) MiB", done.stderr))
    assert (used.host_bytes - weights(projector)) / 2**20 == pytest.approx(float(buffer), abs=0.006)


def test_on_a_card_that_is_not_here(projector: Path) -> None:
    here, there = (
        mmproj.measure_projector(str(projector)),
        mmproj.measure_projector(str(projector), "GPU0", simulated=True),
    )
    assert there.card_bytes == here.host_bytes > weights(projector)
    assert there.host_bytes < here.host_bytes  # what it hands over
    assert WIDTH in there.widths


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["m-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        (["mmproj-model-bf16.gguf", "mmproj-model-q8_0.gguf"], "mmproj-model-bf16.gguf"),
        (["m.gguf", "m.mmproj-Q8_0.gguf"], "m.mmproj-Q8_0.gguf"),
        (["m.gguf", "sub/mmproj-new.gguf", "mmproj.txt"], "sub/mmproj-new.gguf"),
    ],
)
def test_the_projector_of_a_repository(files: list[str], chosen: str) -> None:
    assert mmproj.choose_projector("user/m", files) == chosen


def test_a_repository_without_one_says_so() -> None:
    with pytest.raises(ModelError, match=r"user/m has no mmproj-….gguf"):
        mmproj.choose_projector("user/m", ["m-Q4_K_M.gguf"])


def test_a_plan_leaves_room_for_it(cli: Cli, projector: Path) -> None:
    used = mmproj.measure_projector(str(projector), "GPU0", simulated=True)
    plain, beside = (cli("plan", *ROOM, "--json", *more).document() for more in ((), ("--mmproj", str(projector))))
    for device, size in ((0, used.card_bytes), (1, used.host_bytes)):
        assert plain["devices"][device]["mmproj_bytes"] == 0
        assert beside["devices"][device]["mmproj_bytes"] == size
        assert beside["devices"][device]["used_bytes"] == plain["devices"][device]["used_bytes"] + size
    tight = ("--vram", f"{plain['devices'][0]['used_bytes'] // 2**20 + 2}MiB", "--headroom", "0", "--json")
    plain, beside = (cli("plan", *tight, *more).document() for more in ((), ("--mmproj", str(projector))))
    assert beside["target"]["gpu_layers"] < plain["target"]["gpu_layers"] == 9
    on_host = cli("plan", *tight, "--mmproj", projector, "--no-mmproj-offload").document()
    assert on_host["target"]["gpu_layers"] == 9
    assert [device["mmproj_bytes"] for device in on_host["devices"]] == [
        0,
        mmproj.measure_projector(str(projector)).host_bytes,
    ]
    assert "▪ mmproj 14 MiB" in cli("plan", *ROOM, "--mmproj", projector).stdout


def test_of_a_repository_on_the_hub(cli: Cli, projector: Path) -> None:
    with serving() as hub:
        hub.add_repo("user/seeing-GGUF", projector.parent)
        online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        done = cli("plan", *ROOM, "--json", "--mmproj", "user/seeing-GGUF", **online)
        assert done.code == 0, done.stderr
        assert done.document()["devices"][0]["mmproj_bytes"] > weights(projector)
        assert sum(hub.sent.values()) < 1.2 * 2**20 < projector.stat().st_size
        none = cli("plan", *ROOM, "--json", "--mmproj", "user/none-GGUF", **online)
        assert (none.code, "user/none-GGUF" in none.document()["error"]) == (1, True)
        command = cli("export", *ROOM, "--mmproj", "user/seeing-GGUF", **online).stdout
        assert "--mmproj-url https://huggingface.co/user/seeing-GGUF/resolve/main/mmproj-f16.gguf" in command


def test_an_export_hands_it_over(cli: Cli, projector: Path, tmp_path: Path) -> None:
    command = cli("export", *ROOM, "--mmproj", projector, "--no-mmproj-offload").stdout.split()
    assert command[command.index("--mmproj") + 1] == str(projector)
    assert "--no-mmproj-offload" in command
    profile = tmp_path / "seeing.toml"
    target, draft = demo_pair()
    profile.write_text(
        f'name = "seeing"\nwhy = "a test"\nsource = "here"\n[target]\nfile = "{target}"\n[draft]\nfile = "{draft}"\n'
        f'[settings]\nmmproj = "{projector}"\n'
    )
    assert f"--mmproj {projector}" in cli("export", profile, *ROOM).stdout
    assert "--mmproj" not in cli("export", *ROOM).stdout


def test_what_is_no_projector_of_this_model(cli: Cli, projector: Path, tmp_path: Path) -> None:
    other = projectors.write(tmp_path / "mmproj-other.gguf", 384)
    data = bytearray(projector.read_bytes())
    at = data.index(b"gemma3")
    unknown, cut = tmp_path / "mmproj-new.gguf", tmp_path / "mmproj-cut.gguf"
    unknown.write_bytes(data[:at] + b"future" + data[at + 6 :])
    cut.write_bytes(data[:2000])
    for path, words in (
        (
            other,
            "mmproj-other.gguf is the mmproj of another model: demo-target-F16.gguf has embeddings of size 320, but",
        ),
        (demo_pair()[1], "demo-draft-Q8_0.gguf is not an mmproj"),
        (unknown, "mmproj-new.gguf: llama.cpp cannot load it as an mmproj"),
        (cut, "mmproj-cut.gguf is truncated"),
        (tmp_path / "none.gguf", "none.gguf does not exist"),
    ):
        done = cli("plan", *ROOM, "--json", "--mmproj", path)
        assert done.code == 1, done.stderr
        assert words in done.document()["error"]
        assert done.document()["hint"]
        assert "Traceback" not in done.stderr
