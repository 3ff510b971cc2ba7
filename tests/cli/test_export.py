"""A plan as settings of other programs: every format, and the command that prints them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import UsageError
from ggufspec.llamacpp.library import load_library
from ggufspec.llamacpp.options import Placement
from ggufspec.llamacpp.params import context_params
from ggufspec.reports.export import PROGRAMS, ExportSettings, ModelFile, export_for
from tests.support.processes import Cli, rest

PAIR = ExportSettings(
    ModelFile("/models/big one.gguf"),
    ModelFile("/models/small.gguf"),
    DecoderOptions(
        Placement(45),
        Placement(-1),
        ctx_size=4096,
        threads=8,
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        flash_attn="on",
        draft_max=3,
    ),
    blocks=80,
)
ALONE = replace(PAIR, draft=None)
IN_HUB = replace(PAIR, target=ModelFile("big.gguf", "user/big"), draft=ModelFile("q4/small.gguf", "user/small"))


def changed(settings: ExportSettings, **options: Any) -> ExportSettings:
    """The same pair with other options of the decoder, or of the target's placement."""
    at = {name: options.pop(name) for name in [*options] if name in Placement.__dataclass_fields__}
    target = replace(settings.options.target, **at)
    return replace(settings, options=replace(settings.options, target=target, **options))


TWO_CARDS = replace(changed(PAIR, split=(3.0, 1.0), draft=Placement(-1, (0.0, 1.0))), devices=("CUDA0", "CUDA1"))


def command(program: str, settings: ExportSettings) -> list[str]:
    return list(export_for(program, settings).arguments)


def flag(arguments: list[str], name: str) -> str | None:
    """The value of an option; None where it is not given."""
    assert arguments.count(name) <= 1
    return arguments[arguments.index(name) + 1] if name in arguments else None


def note(program: str, settings: ExportSettings, words: str) -> bool:
    return any(words in line for line in export_for(program, settings).notes)


def test_the_draft_s_cache_has_types_of_its_own() -> None:
    arguments = command("llama-server", changed(PAIR, cache_type_k_draft="q8_0", cache_type_v_draft="q5_1"))
    assert [flag(arguments, name) for name in ("-ctk", "-ctv", "-ctkd", "-ctvd")] == ["q8_0", "q8_0", "q8_0", "q5_1"]


def test_how_weights_come_into_memory() -> None:
    read = changed(PAIR, load_mode="none")
    assert flag(command("llama-server", read), "-lm") == "none"
    assert flag(command("llama-server", PAIR), "-lm") is None
    assert flag(command("llama-bench", replace(read, draft=None)), "-lm") == "none"
    repacked = changed(PAIR, no_host=True)
    assert "--no-host" in command("llama-server", repacked)
    assert "--no-host" not in command("llama-server", PAIR)
    assert flag(command("llama-bench", replace(repacked, draft=None)), "--no-host") == "1"
    assert note("ollama", repacked, "--no-host")


def test_what_llama_cpp_has_no_option_for_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = changed(PAIR, op_offload_min_batch=2)
    for program in ("llama-server", "llama-speculative-simple", "llama-bench"):
        assert command(program, streamed)[:3] == ["env", "GGML_OP_OFFLOAD_MIN_BATCH=2", program]
        assert command(program, PAIR)[0] == program
    assert "    env: [GGML_OP_OFFLOAD_MIN_BATCH=2]" in export_for("llama-swap", streamed).text.splitlines()
    for program in ("models-preset", "ollama", "lm-studio"):
        assert note(program, streamed, "GGML_OP_OFFLOAD_MIN_BATCH=2")
        assert not note(program, PAIR, "GGML_OP_OFFLOAD_MIN_BATCH")
    assert command("llama-server", changed(PAIR, op_offload_min_batch=2, no_op_offload=True))[0] == "llama-server"
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "2")
    assert command("llama-server", PAIR)[1] == "GGML_OP_OFFLOAD_MIN_BATCH=32"  # this shell's would hold


def test_the_server() -> None:
    assert shlex.join(command("llama-server", PAIR)) == (
        "llama-server -m '/models/big one.gguf' -ngl 45 -c 4352 -b 512 -ub 512 -ctk q8_0 -ctv q8_0 -fa on -t 8 "
        "--fit off -np 1 -md /models/small.gguf -ngld all -ctkd f16 -ctvd f16 "
        "--spec-type draft-simple --spec-draft-n-max 3"
    )


def test_llama_cli_is_the_server_without_slots() -> None:
    expected = ["llama-cli", *command("llama-server", PAIR)[1:]]
    at = expected.index("-np")
    assert command("llama-cli", PAIR) == expected[:at] + expected[at + 2 :]


def test_speculative_simple_takes_a_prompt_as_long_as_the_context() -> None:
    arguments = command("llama-speculative-simple", PAIR)
    assert (flag(arguments, "-b"), flag(arguments, "-ub"), flag(arguments, "-c")) == ("4352", "512", "4352")
    assert note("llama-speculative-simple", PAIR, "-p TEXT")
    with pytest.raises(UsageError, match="needs a draft"):
        command("llama-speculative-simple", ALONE)


def test_the_bench_is_the_target_alone() -> None:
    assert shlex.join(command("llama-bench", PAIR)) == (
        "llama-bench -m '/models/big one.gguf' -ngl 45 -b 512 -ub 512 -ctk q8_0 -ctv q8_0 -fa on -t 8"
    )
    assert note("llama-bench", PAIR, "cannot use a draft")
    assert not note("llama-bench", ALONE, "cannot use a draft")
    assert note("llama-bench", PAIR, "-d 4224 fills the plan's 4352 cells")


def test_the_bench_has_its_own_grammar() -> None:
    arguments = command("llama-bench", replace(changed(TWO_CARDS, gpu_layers=-1, n_cpu_moe=7), rpc=("a:1", "b:2")))
    assert [flag(arguments, name) for name in ("-ngl", "-ts", "-ncmoe", "-rpc")] == ["-1", "3/1", "7", "a:1,b:2"]
    with pytest.raises(UsageError, match="comma"):
        command("llama-bench", replace(PAIR, target=ModelFile("/models/a,b.gguf")))
    with pytest.raises(UsageError, match="f32"):
        command("llama-bench", changed(PAIR, cache_type_v="f32"))


@pytest.mark.parametrize("program", ["llama-server", "llama-cli", "llama-bench"])
def test_without_a_draft_there_is_no_word_of_one(program) -> None:
    arguments = command(program, ALONE)
    assert [word for word in arguments if word in ("-md", "-ngld", "-ctkd", "--spec-type", "--spec-draft-n-max")] == []


def test_all_layers_are_a_word_since_a_negative_number_is_auto() -> None:
    arguments = command("llama-server", changed(PAIR, gpu_layers=-1, draft=Placement()))
    assert (flag(arguments, "-ngl"), flag(arguments, "-ngld")) == ("all", "0")


@pytest.mark.parametrize("ctx_size", [2, 191, 192, 193, 448, 2048, 100_000])
def test_cells_and_batch_are_those_of_our_own_context(ctx_size: int) -> None:
    settings = changed(PAIR, ctx_size=ctx_size)
    params = context_params(load_library(), settings.context)
    assert settings.context.cells == -(-params.n_ctx // 256) * 256
    assert settings.context.batch == params.n_batch == params.n_ubatch


def test_windows_keep_the_whole_context_as_the_plan_has_it() -> None:
    """Only strict mode asks for that; two programs cannot be told."""
    whole = changed(PAIR, strict=True)
    assert "--swa-full" in command("llama-server", whole)
    assert "--swa-full" not in command("llama-server", PAIR)
    for program in ("llama-bench", "ollama"):
        assert note(program, whole, "--swa-full")
        assert not note(program, PAIR, "--swa-full")


def test_two_cards() -> None:
    arguments = command("llama-server", TWO_CARDS)
    assert (flag(arguments, "-ts"), flag(arguments, "-devd")) == ("3,1", "CUDA1")
    assert not note("llama-server", TWO_CARDS, "-ts")


@pytest.mark.parametrize(
    ("target", "draft", "devices", "device", "told"),
    [
        ((), (), ("CUDA0", "CUDA1"), None, True),  # both by free memory
        ((3, 1), (0.75, 0.25), ("CUDA0", "CUDA1"), None, True),  # one split means both
        ((1,), (1,), ("CUDA0",), None, True),
        ((0, 1), (1, 0), ("CUDA0", "CUDA1"), "CUDA0", True),
        ((), (0, 1), ("CUDA0", "CUDA1"), "CUDA1", True),
        ((3, 1), (1, 0), (), None, False),  # the name is not known
        ((3, 1), (1, 1), ("CUDA0", "CUDA1"), None, False),
        ((3, 1), (), ("CUDA0", "CUDA1"), None, False),
    ],
)
def test_the_drafts_split(target, draft, devices, device, told) -> None:
    settings = replace(changed(PAIR, split=target, draft=Placement(-1, draft)), devices=devices)
    assert flag(command("llama-server", settings), "-devd") == device
    assert note("llama-server", settings, "-ts also splits the draft") is not told


def test_a_draft_on_the_cpu_has_no_split() -> None:
    settings = changed(TWO_CARDS, draft=Placement(0, (0.0, 1.0)))
    assert flag(command("llama-server", settings), "-devd") is None
    assert not note("llama-server", settings, "-ts")


def test_shares_keep_the_precision_of_a_float() -> None:
    settings = changed(PAIR, split=(1 / 3, 2 / 3))
    assert flag(command("llama-server", settings), "-ts") == "0.333333333,0.666666667"


def test_tensors_elsewhere() -> None:
    settings = changed(PAIR, n_cpu_ffn=2)
    assert flag(command("llama-server", settings), "--n-cpu-ffn") == "2"
    assert flag(command("llama-bench", settings), "-ot") == r"blk\.(0|1)\.ffn_(up|down|gate)\.=CPU"
    two = changed(
        replace(settings, devices=("RPC0", "RPC1", "CUDA0"), rpc=("a:1",)), override_tensor=("up=RPC1", "q=CPU")
    )
    arguments = command("llama-server", two)
    assert flag(arguments, "-ot") == r"up=RPC1[a:1],q=CPU,blk\.(0|1)\.ffn_(up|down|gate)\.=CPU"
    assert arguments.index("--rpc") < arguments.index("-ot")
    assert flag(arguments, "--n-cpu-ffn") is None
    assert flag(command("llama-bench", replace(two, rpc=("a:1", "b:1"))), "-ot").startswith("up=RPC0[b:1];q=CPU;blk")
    assert note("llama-server", changed(PAIR, override_tensor=("up=GPU0",)), "GPU0")
    for program, words in (("ollama", "Ollama has no -ot"), ("lm-studio", "feed-forward weights of 2")):
        assert note(program, two, words)


def test_experts_and_workers() -> None:
    settings = replace(changed(PAIR, n_cpu_moe=12), rpc=("10.0.0.2:50052", "b:1"))
    arguments = command("llama-cli", settings)
    wanted = {"--n-cpu-moe": "12", "--rpc": "10.0.0.2:50052,b:1"}
    assert {name: flag(arguments, name) for name in wanted} == wanted


def test_hub_names() -> None:
    for program in ("llama-server", "llama-cli", "llama-speculative-simple", "llama-bench"):
        arguments = command(program, IN_HUB)
        assert (flag(arguments, "-hf"), flag(arguments, "-hff"), flag(arguments, "-m")) == (
            "user/big",
            "big.gguf",
            None,
        )
    assert (flag(command("llama-server", IN_HUB), "-hfd"), flag(command("llama-server", IN_HUB), "-md")) == (
        "user/small",
        "q4/small.gguf",
    )
    assert "--no-mmproj" in command("llama-server", IN_HUB)
    assert "--no-mmproj" not in command("llama-speculative-simple", IN_HUB)  # it does not know the option
    assert "FROM hf.co/user/big:big.gguf" in export_for("ollama", IN_HUB).text
    assert command("lm-studio", IN_HUB)[2] == "user/big/big.gguf"
    assert note("llama-server", IN_HUB, "revision")
    assert not note("llama-server", PAIR, "revision")
    assert note("ollama", IN_HUB, "revision")
    assert not note("ollama", PAIR, "revision")


def test_a_modelfile() -> None:
    lines = export_for("ollama", PAIR).text.splitlines()
    assert [line for line in lines if not line.startswith("# ")] == [
        "FROM /models/big one.gguf",
        "PARAMETER num_gpu 45",
        "PARAMETER num_ctx 4352",
        "PARAMETER num_batch 512",
        "PARAMETER num_thread 8",
    ]
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    assert comments == list(export_for("ollama", PAIR).notes)
    for words in ("target-only", "num_gpu includes the output layer", "OLLAMA_KV_CACHE_TYPE=q8_0"):
        assert any(words in comment for comment in comments)


def test_a_modelfile_cannot_say_everything() -> None:
    assert "num_gpu 999" in export_for("ollama", changed(PAIR, gpu_layers=-1)).text  # -1 would be "choose for me"
    settings = replace(
        changed(PAIR, split=(3.0, 1.0), n_cpu_moe=12, cache_type_k="f16", flash_attn="off"), rpc=("a:1",)
    )
    for words in ("f16 and q8_0", "OLLAMA_FLASH_ATTENTION=0", "not by the plan's split", "experts of 12", "no RPC"):
        assert note("ollama", settings, words)
    with pytest.raises(UsageError, match="cannot name"):
        export_for("ollama", replace(PAIR, target=ModelFile("/models/a\nSYSTEM b.gguf")))


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        (
            ModelFile("/a/big q4-00001-of-00003.gguf"),
            "Ollama cannot load a model that is split into 3 files",
            "llama-gguf-split --merge '/a/big q4-00001-of-00003.gguf' ONE.gguf && ggufspec export -m ONE.gguf",
        ),
        (
            ModelFile("Q4/big-00002-of-00002.gguf", "user/big"),
            "Ollama cannot load a model that is split into 2 files",
            (
                "hf download user/big Q4/big-00001-of-00002.gguf Q4/big-00002-of-00002.gguf --local-dir . && "
                "llama-gguf-split --merge Q4/big-00001-of-00002.gguf ONE.gguf && ggufspec export -m ONE.gguf"
            ),
        ),
        (
            ModelFile("Q4/big.gguf", "user/big"),
            "Ollama cannot load a file in a folder of a repository: Q4/big.gguf",
            "hf download user/big Q4/big.gguf --local-dir . && ggufspec export -m Q4/big.gguf --to ollama",
        ),
    ],
)
def test_a_modelfile_names_one_file(target: ModelFile, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        export_for("ollama", replace(PAIR, target=target))
    assert hint in refusal.value.hint
    assert target.name in export_for("llama-server", replace(PAIR, target=target)).text


def test_lm_studio() -> None:
    text = export_for("lm-studio", PAIR).text
    assert text.splitlines()[-1] == "lms load 'big one.gguf' --gpu 0.5501 --context-length 4352"
    for name, value in {
        "GPU Offload": "44 of 80",
        "V Cache Quantization Type": "q8_0",
        "Flash Attention": "on",
    }.items():
        assert any(line.startswith(f"# {name}") and line.endswith(value) for line in text.splitlines())
    assert "small.gguf" in text
    assert note("lm-studio", PAIR, "lms import '/models/big one.gguf'")
    assert "Draft" not in export_for("lm-studio", ALONE).text


@pytest.mark.parametrize(
    ("layers", "blocks", "share"),
    [(0, 80, "off"), (1, 80, "off"), (2, 80, "0.0126"), (81, 80, "max"), (-1, 0, "max"), (0, 0, "off")],
)
def test_lm_studios_share(layers: int, blocks: int, share: str) -> None:
    settings = replace(changed(PAIR, gpu_layers=layers), blocks=blocks)
    assert flag(command("lm-studio", settings), "--gpu") == share
    assert export_for("lm-studio", settings).text


def test_lm_studios_share_gives_the_blocks_back() -> None:
    for blocks in range(1, 130):
        for layers in range(2, blocks + 1):
            share = flag(command("lm-studio", replace(changed(PAIR, gpu_layers=layers), blocks=blocks)), "--gpu")
            assert int(float(share or "") * blocks) == round(float(share or "") * blocks) == layers - 1


HOSTILE = '/models/it\'s a $HOME \\\\ "big" one: [x] & é.gguf'


def ini(text: str) -> dict[str, dict[str, str]]:
    """Sections of an INI file as llama.cpp's common/preset.cpp reads them: nothing is quoted, ; and # end a value."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        bare = re.split("[;#]", line)[0].strip()
        if bare.startswith("["):
            section = found.setdefault(bare[1 : bare.index("]")], {})
        elif bare:
            key, _, value = bare.partition("=")
            assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_.-]*", key.strip())
            section[key.strip()] = value.strip()
    return found


def swap(text: str) -> dict[str, list[str]]:
    """Commands by model of a llama-swap configuration, with the rules that its config-schema.json has for our keys."""
    read = yaml.safe_load(text)
    assert set(read) == {"models"}
    for model in read["models"].values():
        assert set(model) == {"cmd"}
        assert isinstance(model["cmd"], str)
        assert re.findall(r"\$\{[^}]*\}", model["cmd"]) == ["${PORT}"]
        assert not any(line.lstrip().startswith("#") or line.endswith("\\") for line in model["cmd"].splitlines())
    return {name: shlex.split(model["cmd"]) for name, model in read["models"].items()}


def test_a_preset() -> None:
    lines = export_for("models-preset", replace(TWO_CARDS, name="a pair", rpc=("a:1",))).text.splitlines()
    assert [line for line in lines if not line.startswith("; ")] == [
        "[a pair]",
        "model = /models/big one.gguf",
        "n-gpu-layers = 45",
        "tensor-split = 3,1",
        "ctx-size = 4352",
        "batch-size = 512",
        "ubatch-size = 512",
        "cache-type-k = q8_0",
        "cache-type-v = q8_0",
        "flash-attn = on",
        "threads = 8",
        "fit = off",
        "rpc = a:1",
        "parallel = 1",
        "model-draft = /models/small.gguf",
        "n-gpu-layers-draft = all",
        "device-draft = CUDA1",
        "cache-type-k-draft = f16",
        "cache-type-v-draft = f16",
        "spec-type = draft-simple",
        "spec-draft-n-max = 3",
    ]


@pytest.mark.parametrize(
    "settings", [PAIR, ALONE, IN_HUB, TWO_CARDS, changed(PAIR, n_cpu_moe=7), changed(PAIR, strict=True)]
)
def test_files_of_a_server_have_its_options(settings: ExportSettings) -> None:
    settings = replace(settings, name='it\'s: "mine" é')
    wanted = command("llama-server", settings)
    assert swap(export_for("llama-swap", settings).text) == {
        settings.name: ["llama-server", "--port", "${PORT}", *wanted[1:]]
    }
    ((name, values),) = ini(export_for("models-preset", replace(settings, name="it's mine")).text).items()
    assert name == "it's mine"
    switches = [word for word in wanted if word in ("--swa-full", "--no-mmproj")]
    assert len(values) == (len(wanted) - 1 - len(switches)) // 2 + len(switches)
    assert all(len(key) > 2 for key in values)
    assert [word for word in wanted[2:] if word == "true" or word in values.values()]
    assert [values[word.lstrip("-")] for word in switches] == ["true"] * len(switches)


def test_odd_names_reach_the_server() -> None:
    odd = replace(PAIR, target=ModelFile(HOSTILE))
    assert flag(swap(export_for("llama-swap", odd).text)["model"], "-m") == HOSTILE
    assert ini(export_for("models-preset", odd).text)["model"]["model"] == HOSTILE


@pytest.mark.parametrize("name", ["/m/a\nb.gguf", "/m/a;b.gguf", "/m/a #1.gguf", "/m/a.gguf ", "/m/\x1b[31m.gguf"])
def test_what_a_preset_cannot_say(name: str) -> None:
    for settings in (replace(PAIR, target=ModelFile(name)), replace(PAIR, draft=ModelFile(name))):
        with pytest.raises(UsageError, match="preset cannot contain"):
            export_for("models-preset", settings)


@pytest.mark.parametrize("name", ["*", "a]b", "repo:q4_0", "a\nb", " a"])
def test_what_a_preset_cannot_be_named(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        export_for("models-preset", replace(PAIR, name=name))


@pytest.mark.parametrize("name", ["/m/a\n#b.gguf", "/m/${env.HOME}.gguf", "/m/\x07.gguf"])
def test_what_llama_swap_cannot_be_given(name: str) -> None:
    for settings in (replace(PAIR, target=ModelFile(name)), replace(PAIR, name=name)):
        with pytest.raises(UsageError, match="llama-swap cannot take"):
            export_for("llama-swap", settings)


def test_the_plan_says_why() -> None:
    why = "The draft costs 12 target layers."
    for program, sign in (("models-preset", ";"), ("llama-swap", "#"), ("ollama", "#")):
        assert export_for(program, replace(PAIR, why=why)).text.startswith(f"{sign} {why}\n")
    assert export_for("llama-server", replace(PAIR, why=why)).notes[0] == why


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program(program: str) -> None:
    made = export_for(program, PAIR)
    assert made.text.strip() == made.text
    assert made.notes
    assert all(line.strip() == line and "\n" not in line for line in made.notes)
    assert (program in ("ollama", "models-preset", "llama-swap")) is (made.arguments == ())
    if made.arguments:
        assert shlex.split(made.text.splitlines()[-1]) == list(made.arguments)


def test_the_command(cli: Cli, target: Path, draft: Path) -> None:
    done = cli("export", "demo", "-ngl", "4", "-ngld", "1", "-c", "1000", "--draft-max", "7", "--rpc", "127.0.0.1:1")
    assert done.code == 0
    arguments = shlex.split(done.stdout)
    assert arguments[0] == "llama-server"
    wanted = {
        "-m": str(target),
        "-md": str(draft),
        "-ngl": "4",
        "-ngld": "1",
        "-c": "1280",
        "-t": "1",
        "--spec-draft-n-max": "7",
        "--rpc": "127.0.0.1:1",
    }
    assert {name: flag(arguments, name) for name in wanted} == wanted
    assert "--cache-ram 0" in done.stderr
    quiet = cli("export", "demo", "-ngl", "4", "--no-draft", "-q")
    assert "-md" not in shlex.split(quiet.stdout)
    assert quiet.stderr == ""


def test_the_document(cli: Cli, target: Path) -> None:
    done = cli("export", "demo", "--to", "llama-bench", "-ngl", "4", "--json")
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    assert list(document) == ["schema", "to", "text", "arguments", "notes"]
    assert (document["schema"], document["to"]) == ("ggufspec/export@1", "llama-bench")
    assert shlex.split(document["text"]) == document["arguments"]
    assert any("cannot use a draft" in line for line in document["notes"])


def test_what_does_not_pay_is_left_out(cli: Cli) -> None:
    """A plan that finds target-only faster exports that, unless a drafter is asked for."""
    card = ("--vram", "1GiB", "--acceptance", "0.01")
    alone = cli("export", "demo", *card)
    assert alone.code == 0
    assert "-md" not in shlex.split(alone.stdout)
    assert "drafting does not pay here: " in alone.stderr
    assert "Leave the draft out: " in alone.stderr
    kept = cli("export", "demo", *card, "--drafter", "draft")
    assert flag(shlex.split(kept.stdout), "--spec-type") == "draft-simple"
    pays = cli("export", "demo", "--vram", "1GiB", "--acceptance", "0.95", "--to", "llama-swap")
    assert "-md" in swap(pays.stdout)["demo"]
    simple = cli("export", "demo", *card, "--to", "llama-speculative-simple")
    assert "-md" in shlex.split(simple.stdout)


def test_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    done = cli("export", "demo", "--to", "ollama", "-ngl", "9", "-o", path)
    assert (done.code, done.stdout) == (0, "")
    assert "PARAMETER num_gpu 9\n" in path.read_text()
    assert "MTP" in done.stderr
    missing = cli("export", "demo", "--to", "ollama", "-ngl", "9", "-o", tmp_path / "none" / "Modelfile")
    assert missing.code == 1
    assert "cannot be written" in missing.stderr


def test_a_file_that_exists_is_asked_about(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "pair.ini"
    path.write_text("mine")
    words = ("export", "demo", "--to", "models-preset", "-ngl", "9", "-o", path)
    refused = cli(*words)
    assert (refused.code, path.read_text()) == (2, "mine")
    assert refused.stderr == f"error: {path} exists already\n  next: add -y to overwrite it, or name another file\n"
    for answer, code in (("", 2), ("n", 2), ("y", 0)):
        child = cli.terminal(*map(str, words))
        child.expect("Overwrite it?")
        child.sendline(answer)
        rest(child)
        assert child.exitstatus == code
        assert (path.read_text() == "mine") == (code != 0)
    path.write_text("mine again")
    assert cli(*words, "-y").code == 0
    assert "demo-target" in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_lm_studio_asks_the_header_for_the_blocks(cli: Cli) -> None:
    done = cli("export", "demo", "--to", "lm-studio", "-ngl", "4", "--json")
    assert done.code == 0
    assert done.document()["text"].endswith("\nlms load demo-target-F16.gguf --gpu 0.3751 --context-length 2304")


def test_hub_names_come_from_the_cache(cli: Cli, tmp_path: Path, target: Path, draft: Path) -> None:
    folder = tmp_path / "hub" / "models--someone--some-pair" / "snapshots" / ("0" * 40)
    (folder / "small").mkdir(parents=True)
    (folder / "t.gguf").symlink_to(target)
    (folder / "small" / "d.gguf").symlink_to(draft)
    done = cli("export", "-m", folder / "t.gguf", "-md", folder / "small" / "d.gguf", "-ngl", "4", "--hub", "--json")
    assert done.code == 0
    arguments = done.document()["arguments"]
    wanted = {"-hf": "someone/some-pair", "-hff": "t.gguf", "-hfd": "someone/some-pair", "-md": "small/d.gguf"}
    assert {name: flag(arguments, name) for name in wanted} == wanted
    refused = cli("export", "demo", "--hub", "--json")
    assert refused.code == 1
    assert "did not come from the hub" in json.loads(refused.stdout)["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "ollma"), "llama-server"),
        (("--to", "llama-speculative-simple", "--no-draft"), "needs a draft"),
        (("--to", "llama-bench", "-ctk", "f32"), "f32"),
        (("--rpc", "nowhere"), "host:port"),
        (("-ngl", "some"), "-ngl"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    done = cli("export", "demo", *arguments)
    assert done.code == 2
    assert words in done.stderr
    assert done.stdout == ""
