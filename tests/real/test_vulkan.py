"""A real GPU backend without a GPU: llama.cpp's Vulkan on Mesa's software driver, as `scripts/vulkan` makes it.

What it computes with is this processor, so that no speed is of interest here; bytes, placements, texts and failures are
a card's. Skipped where the packages cannot be installed, and on a machine so slow that the build and these tests would
take half an hour, unless it has the build: `scripts/vulkan --install`, once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.full
BUILD_S, COMMAND_S = 3600, 900
SLOW_S = 450  # of llama.cpp's own build: half of this on two newer cores
PROMPT = ("-p", "def main(", "--draft-policy", "fixed", "--draft-max", "3")  # whatever it costs there
MIB = 2**20

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What lets a process see the software driver as Vulkan0; Mesa keeps its shaders beside the build."""
    cache = ROOT / ".cache"
    took_s = min((float(file.read_text()) for file in cache.glob("wheels/*/seconds")), default=0)
    if took_s > SLOW_S and not any(cache.glob("vulkan/*/lib")):
        pytest.skip(
            f"llama.cpp took {took_s:.0f} s to build here, and Vulkan's would take as long: scripts/vulkan --install"
        )
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "vulkan", "--install"],
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    if made.returncode:
        pytest.skip(f"no Vulkan backend: {made.stderr.strip().splitlines()[-1]}")
    libraries = Path(made.stdout.strip())
    return {
        "LLAMA_CPP_LIB_PATH": str(libraries),
        "GGML_VK_VISIBLE_DEVICES": "0",  # or llama.cpp passes over a device that is a processor
        "GGML_VK_DISABLE_FUSION": "1",  # Mesa 22.3 crashes without
        "MESA_SHADER_CACHE_DIR": str(libraries.parent / "shaders"),
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture(scope="module")
def command(variables: dict[str, str]) -> Command:
    """command(arguments, code=0, VARIABLE=…): a command of ggufspec that ends with ``code``."""

    def run(*arguments: str, code: int = 0, program: Sequence[str] = ("-m", "ggufspec"), **more: str):
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | variables | more,
            cwd=ROOT,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def test_doctor_sees_the_device_and_that_it_is_no_card(command: Command) -> None:
    found = json.loads(command("doctor", "--quick", "--json").stdout)
    assert "Vulkan" in found["llama_cpp"]["backends"]
    (device,) = [one for one in found["llama_cpp"]["devices"] if one["name"] == "Vulkan0"]
    assert "llvmpipe" in device["description"]
    assert any("software on the CPU, not a GPU" in one["text"] for one in found["findings"])
    plan = json.loads(command("plan", "demo", "--json").stdout)
    assert [device["name"] for device in plan["devices"]] == ["CPU"]  # it is none for auto
    assert plan["target"]["gpu_layers"] == 0


def test_plans_are_never_below_what_a_load_takes(command: Command, tmp_path: Path) -> None:
    """All placements of the tiny shapes, loaded with their weights: on the card, and as for a card that is not here."""
    command(str(tmp_path), program=("tests/evidence/backend_bytes.py",))
    found = json.loads((tmp_path / "backend-bytes.json").read_text())
    here, simulated = found["total"]["here"], found["total"]["simulated"]
    assert here["rows"] == simulated["rows"] >= 334
    assert here["below"] == simulated["below"] == 0
    assert here["most_over_bytes"] <= MIB
    assert simulated["most_over_percent_beyond_1_mib"] <= 10


def test_a_pair_runs_wholly_and_partly_on_the_device(command: Command) -> None:
    texts = []
    for places in (
        ("-ngl", "all", "-ngld", "all"),
        ("-ngl", "4", "-ngld", "all"),
        ("-ngl", "4", "-ngld", "0", "--no-op-offload"),  # the draft's Q8_0 is repacked
        ("-ngl", "0", "-ngld", "0"),
    ):
        done = command("run", "demo", *places, *PROMPT, "-n", "16", "--json")
        found = json.loads(done.stdout)
        texts.append(found["text"])
        assert found["statistics"]["drafted"] > 0
        expected = {"all": 9, "4": 4, "0": 0}[places[1]]
        assert found["statistics"]["gpu_layers"] == expected
    assert len(texts) == 4
    assert all(texts)


def test_drafts_are_verified_on_the_device_from_the_threshold_on(command: Command) -> None:
    """The same text with the host's weights copied to the device for four tokens at once, or never; ggml says which."""
    pair = (
        "run",
        "demo",
        "-p",
        "def",
        "-ngl",
        "4",
        "-ngld",
        "all",
        "-n",
        "16",
        "--draft-policy",
        "fixed",
        "--json",
        "-v",
    )
    found = {}
    for threshold, drafted in ((3, 3), (3, 1), (1000, 3)):
        options = ("--op-offload-min-batch", str(threshold), "--draft-max", str(drafted), "-lm", "none")
        done = command(*pair, *options, GGML_SCHED_DEBUG="2")
        copies = re.findall(r"SPLIT #\d+: Vulkan0 .*blk\.\d+\.\w+\.weight", done.stderr)
        found[threshold, drafted] = json.loads(done.stdout)["text"], len(copies)
    assert len({text for text, _ in found.values()}) == 1
    four, two, never = (copies for _, copies in found.values())
    assert four > two > never == 0  # two tokens: those of a prompt of 512, for which buffers are made


@pytest.mark.parametrize(("wanted", "layers"), [("all", 9), ("4", 4)])
def test_a_bench_with_target_and_draft_on_one_device(command: Command, wanted: str, layers: int) -> None:
    done = command("bench", "demo", "-ngl", wanted, "-ngld", "all", *PROMPT, "-n", "8", "-r", "1", "--json")
    found = json.loads(done.stdout)
    assert {run: one["gpu_layers"] for run, one in found["runs"].items()} == {
        "target_only": layers,
        "draft_only": 3,
        "speculative": layers,
    }
    assert found["identical_output"] is True
    assert found["failures"] == {}


def test_verify_passes_on_the_device(command: Command) -> None:
    places = ("-ngl", "all", "-ngld", "all")
    few = ("--quick", "-n", "4", "--prompts", "1", "--drafter", "draft", "--accept", "exact", "--no-hash")
    found = json.loads(command("verify", "demo", *few, *places, "--json").stdout)
    assert found["passed"] is True


def test_the_evidence_of_a_card_is_taken(command: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "card")
    wanted = ("--device", "vulkan", "--shapes", "tiny", "--minutes", "0.6", "--only", "a,b", "--folder", folder)
    command(*wanted, program=("scripts/gpu_evidence",))
    rows = json.loads((tmp_path / "card" / "a-bytes.json").read_text())["rows"]
    done = [row["found"] for row in rows if row["state"] == "done"]
    assert done
    assert not [row["error"] for row in rows if row["state"] == "failed"]
    assert all(row["dry"] == row["allocated"] for row in done)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_without_a_driver_that_loads_everything_runs_on_the_cpu(command: Command, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    driver = {"library_path": str(tmp_path / "none.so"), "api_version": "1.3.0"}
    bad.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))
    for path in (bad, tmp_path / "absent.json"):
        found = json.loads(command("doctor", "--quick", "--json", VK_ICD_FILENAMES=str(path)).stdout)
        assert any("has Vulkan but finds no device" in one["text"] for one in found["findings"])
        done = command("run", "demo", "-ngl", "all", *PROMPT, "-n", "4", "--json", VK_ICD_FILENAMES=str(path))
        answer = json.loads(done.stdout)
        assert answer["tokens"]
        assert answer["statistics"]["gpu_layers"] == 0
        assert any("llama.cpp finds no GPU" in note for note in answer["notes"])


def test_without_a_device_everything_runs_on_the_cpu(command: Command) -> None:
    found = json.loads(command("doctor", "--quick", "--json", GGML_VK_VISIBLE_DEVICES="7").stdout)
    assert [one["name"] for one in found["llama_cpp"]["devices"]] == ["CPU"]


def test_a_device_that_refuses_large_tensors_costs_a_row(command: Command, tmp_path: Path) -> None:
    """Mesa's driver takes no buffer above 128 MiB, and llama.cpp aborts over such a cache."""
    found = command(str(tmp_path), program=("-c", REFUSED)).stdout
    assert json.loads(found) == ["died", "answered"]


REFUSED = """
import json, sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.support.shapes import SHAPES, write
from ggufspec.errors import ChildError
from ggufspec.llamacpp import dryrun
from ggufspec.llamacpp.options import ContextOptions, Placement

outcomes = []
for name in ("gemma2-9b", "tiny-llama"):
    path = write(Path(sys.argv[1]) / "model.gguf", SHAPES[name])
    try:
        placed = dryrun.PlacedModel(path, Placement(-1), ContextOptions(32768, 9, 1))
        (answer,) = dryrun.ask(dryrun.DryRunJob(), [placed])
        outcomes.append("answered" if answer.devices else answer.error)
    except ChildError as error:
        assert "SIGABRT" in error.message, error.message
        outcomes.append("died")
print(json.dumps(outcomes))
"""


def test_a_driver_that_crashes_costs_a_row_of_a_bench(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash is sent: whether Mesa's driver crashes by itself depends on its version."""
    done = command(
        *("bench", "demo", "-ngl", "all", "-ngld", "all", *PROMPT, "-n", "8", "-r", "1", "--json"),
        code=1,
        program=("-c", CRASHING),
    )
    found = json.loads(done.stdout)
    assert found["runs"]["speculative"] is None
    assert found["runs"]["target_only"]["tokens"] > 0
    assert "SIGSEGV" in found["failures"]["speculative"]["error"]
    assert "demo-target-F16.gguf and demo-draft-Q8_0.gguf" in found["failures"]["speculative"]["error"]
    assert "GGML_VK_DISABLE_FUSION" in found["failures"]["speculative"]["hint"]


CRASHING = """
import os, signal, sys, threading
import psutil
from ggufspec.child.session import _Child

take = _Child._take

def crash(self, message, on_event):
    # both models are on the card now: the driver's death is sent
    take(self, message, on_event)
    if len({model for model, *_ in self._on_cards}) == 2:
        os.kill(self._process.pid, signal.SIGSEGV)

_Child._take = crash
from ggufspec.cli.app import main
sys.exit(main(sys.argv[1:]))
"""
