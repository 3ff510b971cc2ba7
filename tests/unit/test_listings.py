"""What repositories offer: file lists as public ones have them, made up anew, on a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ggufspec.errors import GgufspecError
from ggufspec.models.hub import choice, repository
from ggufspec.planning.quantisations import DIVERGENCE
from tests.support.server import Served, Server, serving

REPO = "user/Model-GGUF"


def split(name: str, count: int) -> list[str]:
    return [f"{name}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


@dataclass(frozen=True)
class Listing:
    """A repository's files, each larger than the one before it, and what is made of them."""

    style: str
    files: Sequence[str]
    rows: Sequence[str]  # the quantisations of the table's rows, the smallest model first
    chosen: dict[str, str]  # the file by what stands behind the colon of -hf, or what the error says
    heads: Sequence[str] = ()
    drafts: dict[str, str] = field(default_factory=dict)  # of -hfd


QWEN = ("IQ2_XXS", "Q2_K", "Q3_K_S", "IQ4_XS", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
LISTINGS = [
    Listing(
        "bartowski",
        [
            *("Qwen_Qwen3-8B-imatrix.gguf", "mmproj-Qwen_Qwen3-8B-f16.gguf", "README.md"),
            *(f"Qwen_Qwen3-8B-{one}.gguf" for one in (*QWEN[:6], "Q4_K_L", "Q6_K_L", "Q8_0", "bf16")),
        ],
        [*QWEN[:6], "Q4_K_L", "Q6_K_L", "Q8_0", "BF16"],
        {
            "": "Qwen_Qwen3-8B-Q4_K_M.gguf",
            "q4_k_l": "Qwen_Qwen3-8B-Q4_K_L.gguf",
            "BF16": "Qwen_Qwen3-8B-bf16.gguf",
            "F16": "has no model in F16; it has BF16, IQ2_XXS",
            "Q6_K": "has no model in Q6_K; it has",
        },
    ),
    Listing(
        "bartowski, split into folders",
        [
            *("Llama-3.3-70B-IQ2_M.gguf", "Llama-3.3-70B-Q4_K_M.gguf", "Llama-3.3-70B.imatrix"),
            *split("Llama-3.3-70B-Q6_K/Llama-3.3-70B-Q6_K", 2),
            *split("Llama-3.3-70B-Q8_0/Llama-3.3-70B-Q8_0", 3),
        ],
        ["IQ2_M", "Q4_K_M", "Q6_K", "Q8_0"],
        {"Q8_0": "Llama-3.3-70B-Q8_0/Llama-3.3-70B-Q8_0-00001-of-00003.gguf", "": "Llama-3.3-70B-Q4_K_M.gguf"},
    ),
    Listing(
        "unsloth",
        [
            *("imatrix_unsloth.gguf", "imatrix_unsloth.dat", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"),
            *("M-27B-UD-IQ1_S.gguf", "M-27B-UD-TQ1_0.gguf", "M-27B-UD-Q2_K_XL.gguf", "M-27B-IQ4_NL.gguf"),
            *("M-27B-Q4_K_M.gguf", "M-27B-UD-Q4_K_M.gguf", "M-27B-UD-Q4_K_XL.gguf", "M-27B-Q8_0.gguf"),
            *split("BF16/M-27B-BF16", 2),
        ],
        ["UD-IQ1_S", "UD-TQ1_0", "UD-Q2_K_XL", "IQ4_NL", "Q4_K_M", "UD-Q4_K_M", "UD-Q4_K_XL", "Q8_0", "BF16"],
        {
            "": "M-27B-Q4_K_M.gguf",
            "Q4_K_M": "M-27B-Q4_K_M.gguf",
            "UD-Q4_K_M": "M-27B-UD-Q4_K_M.gguf",
            "ud-q4_k_xl": "M-27B-UD-Q4_K_XL.gguf",
            "Q4_K_XL": "M-27B-UD-Q4_K_XL.gguf",  # the only one
            "BF16": "BF16/M-27B-BF16-00001-of-00002.gguf",
            "F16": "has no model in F16",  # which is a projector
        },
    ),
    Listing(
        "unsloth, the quantisation in the folder's name",
        [
            *split("UD-Q2_K_XL/M-235B-UD-Q2_K_XL", 2),
            *split("Q4_K_M/M-235B-Q4_K_M", 3),
            *split("UD-Q4_K_M/M-235B-UD-Q4_K_M", 3),
            *("imatrix_unsloth.gguf_file", "config.json"),
        ],
        ["UD-Q2_K_XL", "Q4_K_M", "UD-Q4_K_M"],
        {"": "Q4_K_M/M-235B-Q4_K_M-00001-of-00003.gguf", "UD-Q4_K_M": "UD-Q4_K_M/M-235B-UD-Q4_K_M-00001-of-00003.gguf"},
    ),
    Listing(
        "the quantisation in the folder's name alone",
        [*split("Q4_K_M/M", 2), *split("Q8_0/M", 2), "mmproj-F16.gguf"],
        ["Q4_K_M", "Q8_0"],
        {"": "Q4_K_M/M-00001-of-00002.gguf", "Q8_0": "Q8_0/M-00001-of-00002.gguf", "F16": "has no model in F16"},
    ),
    Listing(
        "TheBloke",
        [
            *(f"llama-2-70b-chat.{one}.gguf" for one in ("Q2_K", "Q3_K_S", "Q4_K_M", "Q5_K_M")),
            *("llama-2-70b-chat.Q6_K.gguf-split-a", "llama-2-70b-chat.Q6_K.gguf-split-b", "LICENSE.txt"),
        ],
        ["Q2_K", "Q3_K_S", "Q4_K_M", "Q5_K_M"],
        {
            "": "llama-2-70b-chat.Q4_K_M.gguf",
            "q6_k": "has llama-2-70b-chat.Q6_K.gguf in 2 pieces that must be joined",
            "llama-2-70b-chat.Q6_K.gguf-split-a": "in 2 pieces",
            "Q8_0": "has no model in Q8_0; it has Q2_K, Q3_K_S",
        },
    ),
    Listing(
        "lower case, as TheBloke's first",
        ["codellama-7b.q2_k.gguf", "codellama-7b.q4_k_m.gguf", "codellama-7b.q8_0.gguf"],
        ["Q2_K", "Q4_K_M", "Q8_0"],
        {"": "codellama-7b.q4_k_m.gguf", "Q8_0": "codellama-7b.q8_0.gguf", "q2_k": "codellama-7b.q2_k.gguf"},
    ),
    Listing(
        "Qwen",
        [
            *("qwen2.5-7b-instruct-q2_k.gguf", "qwen2.5-7b-instruct-q3_k_m.gguf"),
            *split("qwen2.5-7b-instruct-q4_k_m", 2),
            *split("qwen2.5-7b-instruct-q8_0", 3),
            *split("qwen2.5-7b-instruct-fp16", 4),
        ],
        ["Q2_K", "Q3_K_M", "Q4_K_M", "Q8_0", "F16"],
        {
            "": "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf",
            "F16": "qwen2.5-7b-instruct-fp16-00001-of-00004.gguf",
            "fp16": "qwen2.5-7b-instruct-fp16-00001-of-00004.gguf",
            "BF16": "has no model in BF16; it has F16, Q2_K",
        },
    ),
    Listing(
        "Qwen's first, in pieces",
        ["qwen1_5-72b-q2_k.gguf", *(f"qwen1_5-72b-q5_k_m.gguf.{part}" for part in "ab")],
        ["Q2_K"],
        {"": "qwen1_5-72b-q2_k.gguf", "Q5_K_M": "has qwen1_5-72b-q5_k_m.gguf in 2 pieces"},
    ),
    Listing(
        "Microsoft",
        ["Phi-3-mini-4k-instruct-q4.gguf", "Phi-3-mini-4k-instruct-fp16.gguf"],
        ["Q4", "F16"],
        {"q4": "Phi-3-mini-4k-instruct-q4.gguf", "": "has no model in Q4_K_M; it has F16, Q4"},
    ),
    Listing(
        "ggml-org",
        [
            "mmproj-gemma-3-4b-it-f16.gguf",
            "gemma-3-4b-it-Q4_K_M.gguf",
            "gemma-3-4b-it-Q8_0.gguf",
            "gemma-3-4b-it-f16.gguf",
        ],
        ["Q4_K_M", "Q8_0", "F16"],
        {"": "gemma-3-4b-it-Q4_K_M.gguf", "f16": "gemma-3-4b-it-f16.gguf", "fp16": "gemma-3-4b-it-f16.gguf"},
    ),
    Listing(
        "ggml-org, one model",
        [*split("gpt-oss-120b-mxfp4", 3), "README.md"],
        ["MXFP4"],
        {"": "gpt-oss-120b-mxfp4-00001-of-00003.gguf", "MXFP4": "gpt-oss-120b-mxfp4-00001-of-00003.gguf"},
    ),
    Listing(
        "lmstudio-community",
        ["mmproj-model-f16.gguf", *(f"Qwen3-VL-8B-{one}.gguf" for one in ("Q3_K_L", "Q4_K_M", "Q6_K", "Q8_0"))],
        ["Q3_K_L", "Q4_K_M", "Q6_K", "Q8_0"],
        {"": "Qwen3-VL-8B-Q4_K_M.gguf", "Q3_K_L": "Qwen3-VL-8B-Q3_K_L.gguf", "f16": "has no model in f16"},
    ),
    Listing(
        "mradermacher, static",
        [
            *("M.mmproj-Q8_0.gguf", "M.mmproj-f16.gguf", "M.Q2_K.gguf", "M.IQ4_XS.gguf", "M.Q4_K_M.gguf"),
            *(f"M.Q8_0.gguf.part{number}of12" for number in range(1, 13)),
        ],
        ["Q2_K", "IQ4_XS", "Q4_K_M"],
        {
            "": "M.Q4_K_M.gguf",
            "Q8_0": "has M.Q8_0.gguf in 12 pieces that must be joined",
            "M.Q8_0.gguf.part2of12": "in 12 pieces",
        },
    ),
    Listing(
        "mradermacher, i1",
        ["M.imatrix.gguf", "imatrix.dat", "M.i1-IQ1_S.gguf", "M.i1-Q4_0.gguf", "M.i1-Q4_K_M.gguf", "M.i1-Q6_K.gguf"],
        ["IQ1_S", "Q4_0", "Q4_K_M", "Q6_K"],
        {"": "M.i1-Q4_K_M.gguf", "i1-Q4_0": "M.i1-Q4_0.gguf", "Q6_K": "M.i1-Q6_K.gguf"},
    ),
    Listing(
        "both of mradermacher's",
        ["M.Q4_K_M.gguf", "M.i1-Q4_K_M.gguf"],
        ["Q4_K_M", "Q4_K_M"],
        {"": "has 2 models in Q4_K_M: M.Q4_K_M.gguf, M.i1-Q4_K_M.gguf", "i1-Q4_K_M": "M.i1-Q4_K_M.gguf"},
    ),
    Listing(
        "new types of four bits",
        ["M-NVFP4.gguf", "M-MXFP4_MOE.gguf", "M-MXFP4_MOE_BF16.gguf", "M-Q4_K_M-imat.gguf"],
        ["NVFP4", "MXFP4_MOE", "MXFP4_MOE_BF16", "Q4_K_M"],
        {
            "nvfp4": "M-NVFP4.gguf",
            "MXFP4_MOE": "M-MXFP4_MOE.gguf",
            "BF16": "has no model in BF16",
            "": "M-Q4_K_M-imat.gguf",
        },
    ),
    Listing(
        "bits of their own",
        [f"M-{one}bpw.gguf" for one in ("Q3_K_S-2.70", "IQ4_XS-3.53", "IQ4_XS-4.00", "IQ4_XS-4.24")]
        + ["M-IQ4_XS.gguf"],
        ["Q3_K_S-2.70BPW", "IQ4_XS-3.53BPW", "IQ4_XS-4.00BPW", "IQ4_XS-4.24BPW", "IQ4_XS"],
        {
            "IQ4_XS": "M-IQ4_XS.gguf",
            "IQ4_XS-3.53bpw": "M-IQ4_XS-3.53bpw.gguf",
            "Q3_K_S": "M-Q3_K_S-2.70bpw.gguf",
            "": "has no model in Q4_K_M; it has IQ4_XS, IQ4_XS-3.53BPW",
        },
    ),
    Listing(
        "what it was made from in the name",
        ["M-bf16.Q4_K_M.gguf", "M-bf16.Q8_0.gguf", "M-bf16-q6_k-00001-of-00001.gguf"],
        ["Q4_K_M", "Q8_0", "Q6_K"],
        {
            "": "M-bf16.Q4_K_M.gguf",
            "Q8_0": "M-bf16.Q8_0.gguf",
            "BF16": "has no model in BF16; it has Q4_K_M, Q6_K, Q8_0",
        },
    ),
    Listing(
        "ik_llama.cpp",
        [
            *split("smol-IQ1_KT/M-smol-IQ1_KT", 2),
            *split("IQ2_KS/M-IQ2_KS", 2),
            *split("IQ4_K/M-IQ4_K", 3),
            "imatrix-M-BF16.gguf",
        ],
        ["IQ1_KT", "IQ2_KS", "IQ4_K"],
        {
            "iq2_ks": "IQ2_KS/M-IQ2_KS-00001-of-00002.gguf",
            "smol-IQ1_KT": "smol-IQ1_KT/M-smol-IQ1_KT-00001-of-00002.gguf",
        },
    ),
    Listing(
        "heads beside the target",
        [
            *("eagle3-M-F16.gguf", "mtp-M-Q4_0.gguf", "mtp-M-Q8_0.gguf", "mmproj-M-F16.gguf", "M-MTP-Q4_K_M.gguf"),
            *("M-Q4_K_S.gguf", "M-Q8_0.gguf"),
        ],
        ["Q4_K_M", "Q4_K_S", "Q8_0"],
        {"": "M-MTP-Q4_K_M.gguf", "Q8_0": "M-Q8_0.gguf", "Q4_0": "has no model in Q4_0", "F16": "has no model in F16"},
        ["eagle3-M-F16.gguf", "mtp-M-Q4_0.gguf", "mtp-M-Q8_0.gguf"],
        {"eagle3": "eagle3-M-F16.gguf", "mtp-Q8_0": "mtp-M-Q8_0.gguf", "mtp": "has 2 mtp heads", "Q8_0": "M-Q8_0.gguf"},
    ),
    Listing(
        "a model whole and in parts, and an older split",
        ["M-Q4_K_M.gguf", *split("M-Q8_0", 2), *split("M-Q8_0", 3), "M-Q8_0.gguf"],
        ["Q4_K_M", "Q8_0", "Q8_0", "Q8_0"],
        {"": "M-Q4_K_M.gguf", "Q8_0": "has 3 models in Q8_0", "M-Q8_0.gguf": "M-Q8_0.gguf"},
    ),
    Listing(
        "one file beside its calibration data",
        ["imatrix_unsloth.gguf", "M-Q8_0.gguf"],
        ["Q8_0"],
        {"": "M-Q8_0.gguf", "Q4_K_M": "has no model in Q4_K_M; it has Q8_0"},
    ),
    Listing("no quantisation in the name", ["2b_it_v2.gguf"], [""], {"": "2b_it_v2.gguf"}),
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from huggingface_hub import constants

    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield server


def listed(hub: Server, folder: Path, files: Sequence[str]) -> None:
    """A repository with these files, each larger than the one before it; of their bytes there are none."""
    hub.repos[REPO] = {}
    for number, name in enumerate(files, 1):
        path = folder / str(number)
        with path.open("wb") as file:
            file.truncate(number << 20)
        hub.repos[REPO][name] = Served(path)


def answer(text: str, *, draft: bool) -> str:
    try:
        return choice.hub_file(text, draft=draft).file
    except GgufspecError as error:
        return error.message


@pytest.mark.parametrize("listing", LISTINGS, ids=lambda one: one.style)
def test_what_a_repository_offers(hub: Server, tmp_path: Path, listing: Listing) -> None:
    listed(hub, tmp_path, listing.files)
    found = repository.list_models(REPO)
    rows = {model.file: choice.quant_of(model.file) for model in found.models}
    assert [*rows.values()] == [*listing.rows]
    assert found.heads == tuple(listing.heads)
    for model in found.models:  # what the table calls a row is that row
        assert choice.hub_file(found.named(model)).file == model.file
        assert model.size_bytes == sum(hub.repos[REPO][file].path.stat().st_size for file in model.files)
    for asked, draft in [(listing.chosen, False), (listing.drafts, True)]:
        for quant, wanted in asked.items():
            got = answer(f"{REPO}:{quant}", draft=draft)
            assert (got == wanted) if wanted in listing.files else (wanted in got), (quant, got)


@pytest.mark.parametrize(
    ("file", "of"),
    [
        ("M.i1-Q4_K_M.gguf", "Q4_K_M"),
        ("m-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("Q4_K_M/M.gguf", "Q4_K_M"),
        ("M-bf16.Q4_K_M.gguf", "Q4_K_M"),
        ("M-UD-Q4_K_M.gguf", None),  # other mixes, which the published figure is not of
        ("M-IQ4_XS-3.53bpw.gguf", None),
        ("M-Q4_K_L.gguf", None),
        ("M-fp16.gguf", None),
    ],
)
def test_a_published_divergence_is_of_that_quantisation(file: str, of: str | None) -> None:
    assert DIVERGENCE.get(choice.quant_of(file)) == (DIVERGENCE[of] if of else None)
