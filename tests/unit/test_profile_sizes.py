"""The sizes in the profiles that ship: of the published shapes, with the types that llama.cpp would choose.

The hub is not asked. What its pages showed, to the digits that they show, is held against the same figures.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.llamacpp.quantize import row_bytes, run_dry
from ggufspec.models.profile import ModelSource, bundled_folder, load_profile
from tests.support.shapes import SANDWICH, Dims, Experts, Label, Shape, Tensor, gpt2, padded, transformer, write

# Bytes of a header, nearly all of them tokens and merges
HEADER = {"llama3": 7_820_000, "qwen": 5_930_000, "gemma": 5_900_000, "gpt2": 1_700_000, "tekken": 7_100_000}
LLAMA_70B, LLAMA_8B = Dims(80, 8192, 64, 8, 28672, 128256), Dims(32, 4096, 32, 8, 14336, 128256)
LLAMA_1B, LLAMA_3B = Dims(16, 2048, 32, 8, 8192, 128256), Dims(28, 3072, 24, 8, 8192, 128256, 128)
QWEN_32B = Dims(64, 5120, 40, 8, 27648, 152064)


def dense(architecture: str, dims: Dims, **more: Any) -> Shape:
    return transformer(Label("model", "dense", architecture, "F16"), dims, **more)


def llama(dims: Dims, **more: Any) -> Shape:
    return dense("llama", dims, ends={"rope_freqs.weight": (64,)}, **more)


def qwen2(dims: Dims, **more: Any) -> Shape:
    return dense("qwen2", dims, bias=True, **more)


def gemma3(dims: Dims) -> Shape:
    window = {"attention.sliding_window": 1024}
    return dense("gemma3", dims, norms=SANDWICH, qk_norm=True, tied=True, keys=window)


def untied_gpt2(dims: Dims) -> Shape:
    """As converters wrote GPT-2: the embedding once more, as the output."""
    shape = gpt2(Label("model", "dense", "gpt2", "F16"), dims)
    return replace(shape, tensors=(*shape.tensors, Tensor("output.weight", "F16", (dims.width, dims.vocabulary))))


# file: (shape, type, header, GB that the hub's pages showed of it, or of another file of that shape and type)
# fmt: off
FILES: dict[str, tuple[Shape, str, str, float | None]] = {
    "Meta-Llama-3-70B-Instruct-Q3_K_S": (dense("llama", LLAMA_70B), "Q3_K_S", "llama3", 30.91),
    "Meta-Llama-3-8B-Instruct.Q3_K_L": (dense("llama", LLAMA_8B), "Q3_K_L", "llama3", 4.32),
    "Llama-3.3-70B-Instruct-Q4_K_M": (llama(LLAMA_70B), "Q4_K_M", "llama3", 42.52),
    "Meta-Llama-3.1-8B-Instruct-Q8_0": (llama(LLAMA_8B), "Q8_0", "llama3", 8.54),
    "Llama-3.2-1B-Instruct-Q8_0": (llama(LLAMA_1B, tied=True), "Q8_0", "llama3", None),
    "Llama-3.2-1B-Instruct-Q4_K_M": (llama(LLAMA_1B, tied=True), "Q4_K_M", "llama3", None),
    "Llama-3.2-3B-Instruct-Q4_K_M": (llama(LLAMA_3B, tied=True), "Q4_K_M", "llama3", None),
    "mistralai_Mistral-Small-3.1-24B-Instruct-2503-Q4_K_M": (
        dense("llama", Dims(40, 5120, 32, 8, 32768, 131072, 128)), "Q4_K_M", "tekken", 14.3),
    "alamios_Mistral-Small-3.1-DRAFT-0.5B-Q4_K_M": (
        qwen2(Dims(24, 896, 14, 2, 4864, 131072), tied=True), "Q4_K_M", "tekken", None),
    "qwen2.5-coder-32b-instruct-q4_k_m": (qwen2(QWEN_32B), "Q4_K_M", "qwen", None),
    "DeepSeek-R1-Distill-Qwen-32B-Q4_K_M": (qwen2(QWEN_32B), "Q4_K_M", "qwen", None),
    "Qwen2.5-Coder-14B-Instruct-Q4_K_M": (qwen2(Dims(48, 5120, 40, 8, 13824, 152064)), "Q4_K_M", "qwen", None),
    "qwen2.5-coder-7b-instruct-q4_k_m": (qwen2(Dims(28, 3584, 28, 4, 18944, 152064)), "Q4_K_M", "qwen", None),
    # Qwen's own file has the embedding once more, as the output; others' of 531 MB do not.
    "qwen2.5-coder-0.5b-instruct-q8_0": (qwen2(Dims(24, 896, 14, 2, 4864, 151936)), "Q8_0", "qwen", None),
    "DeepSeek-R1-Distill-Qwen-1.5B-Q8_0": (qwen2(Dims(28, 1536, 12, 2, 8960, 151936)), "Q8_0", "qwen", 1.89),
    "Qwen3-14B-Q4_K_M": (dense("qwen3", Dims(40, 5120, 40, 8, 17408, 151936, 128), qk_norm=True),
                         "Q4_K_M", "qwen", None),
    "Qwen3-32B-Q4_K_M": (dense("qwen3", Dims(64, 5120, 64, 8, 25600, 151936, 128), qk_norm=True),
                         "Q4_K_M", "qwen", None),
    "Qwen3-0.6B-Q8_0": (dense("qwen3", Dims(28, 1024, 16, 8, 3072, 151936, 128), qk_norm=True, tied=True),
                        "Q8_0", "qwen", None),
    "Qwen3-30B-A3B-Q4_K_M": (
        dense("qwen3moe", Dims(48, 2048, 32, 4, 6144, 151936, 128), moe=Experts(128, 8, 768), qk_norm=True),
        "Q4_K_M", "qwen", 18.6),
    "gemma-3-27b-it-Q4_K_M": (gemma3(Dims(62, 5376, 32, 16, 21504, 262208, 128)), "Q4_K_M", "gemma", 16.5),
    "gemma-3-1b-it-Q8_0": (gemma3(Dims(26, 1152, 4, 1, 6912, 262144, 256)), "Q8_0", "gemma", None),
    "gpt2-xl.Q8_0": (untied_gpt2(Dims(48, 1600, 25, 25, 6400, 50257)), "Q8_0", "gpt2", 1.75),
    "distilgpt2.Q8_0": (untied_gpt2(Dims(6, 768, 12, 12, 3072, 50257)), "Q8_0", "gpt2", 0.132),
}
# fmt: on

# What was published of files whose types a shape does not tell. file: (bytes, digits of GB or None where every byte is
# published, blocks with those of MTP, (blocks with a cache of the whole context, heads, width of a key) …)
PUBLISHED: dict[str, tuple[int, int | None, int, tuple[tuple[int, int, int], ...]]] = {
    "Qwen3.8-27B-Q4_K_M": (17_106_773_984, None, 65, ((16, 4, 256),)),
    "Qwen3.8-27B-UD-IQ2_XXS": (9_010_048_064, None, 65, ((16, 4, 256),)),
    "Qwen3.6-27B-MTP-UD-IQ3_XXS": (12_450_000_000, 2, 65, ((16, 4, 256),)),
    "Qwen3.6-35B-A3B-UD-Q4_K_XL": (22_850_000_000, 2, 41, ((10, 2, 256),)),
    "gpt-oss-20b-MXFP4": (12_110_000_000, 2, 24, ((12, 8, 64),)),
    "gpt-oss-120b-mxfp4-00001-of-00003": (63_390_000_000, 2, 36, ((18, 8, 64),)),  # all three; published in GiB
    "gemma-4-12B-it-qat-UD-Q4_K_XL": (6_716_356_800, None, 48, ((8, 1, 512),)),
    "mtp-gemma-4-12B-it": (253_708_800, None, 4, ()),
    "gemma-4-31B_q4_0-it": (17_651_001_568, None, 60, ((10, 4, 512),)),
    "mtp-gemma-4-31B-it": (279_955_968, None, 4, ()),
    "qwen2.5-coder-1.5b-instruct-q4_k_m": (1_117_320_768, None, 28, ((28, 2, 128),)),
    "qwen2.5-coder-0.5b-instruct-q4_k_m": (491_400_064, None, 24, ((24, 2, 64),)),
    "Devstral-Small-2-24B-Instruct-2512-Q4_K_M": (14_330_000_000, 2, 40, ((40, 8, 128),)),
}


def shipped() -> list[ModelSource]:
    """The models of the profiles that name the hub, each once."""
    found: dict[str, ModelSource] = {}
    for path in sorted(bundled_folder().glob("*.toml")):
        profile = load_profile(path)
        for model in (profile.target, profile.draft):
            if model is not None and model.repo is not None:
                assert found.setdefault(model.file, model) == model  # the same in every profile
    return list(found.values())


def test_every_model_that_ships_has_its_sizes() -> None:
    assert sorted(model.file.removesuffix(".gguf") for model in shipped()) == sorted(FILES | PUBLISHED)


def test_published_sizes_are_as_published_and_say_whether_they_are_rounded() -> None:
    models = {model.file.removesuffix(".gguf"): model for model in shipped()}
    for name, (size, digits, blocks, cached) in PUBLISHED.items():
        model = models[name]
        assert (model.size_bytes, model.approximate) == (size, digits is not None)
        assert digits is None or size % 10 ** (9 - digits) == 0
        assert model.layers == blocks + 1
        assert model.cache_bytes == sum(count * heads * width * 2 * 2 for count, heads, width in cached)


@pytest.mark.parametrize(
    "model", [one for one in shipped() if one.file.removesuffix(".gguf") in FILES], ids=lambda model: model.file
)
def test_the_sizes_are_those_of_the_published_shape(tmp_path: Path, model: ModelSource) -> None:
    shape, kind, header, seen_gb = FILES[model.file.removesuffix(".gguf")]
    types = run_dry(write(tmp_path / "model.gguf", shape), kind).types
    weights = 0
    for tensor in shape.tensors:
        row = row_bytes(types.get(tensor.name, tensor.type.lower()), tensor.ne[0])
        weights += padded(row * (math.prod(tensor.ne) // tensor.ne[0]))
    assert model.approximate
    assert model.size_bytes is not None
    assert model.size_bytes == pytest.approx(weights + HEADER[header], abs=600_000)
    if seen_gb is not None:
        digits = 3 if seen_gb < 1 else 1 if seen_gb in (14.3, 16.5, 18.6) else 2
        assert abs(model.size_bytes / 1e9 - seen_gb) <= 10**-digits
    keys = {key.partition(".")[2]: value for key, value in shape.metadata.items()}
    heads, blocks = keys.get("attention.head_count_kv", keys["attention.head_count"]), keys["block_count"]
    head = keys.get("attention.key_length", keys["embedding_length"] // keys["attention.head_count"])
    assert model.layers == blocks + 1
    whole = blocks // 6 if "attention.sliding_window" in keys else blocks  # of Gemma 3: every sixth has no window
    assert model.cache_bytes == whole * heads * head * 2 * 2
