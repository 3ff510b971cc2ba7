"""What a header means: every shape, the keys that architectures add, and refusals instead of crashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ggufspec.errors import ModelError
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.gguf import Gguf, GgufTensor
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.models.header import ModelHeader, block_of, interpret
from ggufspec.planning.memory import resident
from tests.support.properties import examples
from tests.support.shapes import SHAPES, write, write_split

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 2048,
    "llama.embedding_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 512,
    "llama.vocab_size": 1000,
}
TENSORS = (
    GgufTensor("token_embd.weight", "f16", (256, 1000), 512_000, 0),
    GgufTensor("blk.0.attn_q.weight", "f16", (256, 256), 131_072, 512_000),
)


def parsed(metadata: dict[str, Any], tensors: tuple[GgufTensor, ...] = TENSORS, **lengths: int) -> Gguf:
    return Gguf(metadata, lengths, "", tensors, 4096)


def read(**changes: Any) -> ModelHeader:
    """A small Llama with keys changed; ``__`` stands for a dot, None takes a key away."""
    metadata = LLAMA | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return interpret(
        "m.gguf", [parsed({key: value for key, value in metadata.items() if value is not None})], 1_000_000
    )


def of(architecture: str, **changes: Any) -> ModelHeader:
    """The same as another architecture."""
    keys = {key.removeprefix("llama."): value for key, value in LLAMA.items() if key.startswith("llama.")}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}
    return interpret("m.gguf", [parsed(metadata)], 1_000_000)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gguf]:
    folder = tmp_path_factory.mktemp("shapes")
    found = {}
    for name, shape in SHAPES.items():
        with write(folder / f"{name}.gguf", shape).open("rb") as file:
            found[name] = gguf.parse_header(file.read(1 << 22))
    return found


def test_every_shape(shapes: dict[str, Gguf]) -> None:
    for name, shape in SHAPES.items():
        header = interpret(name, [shapes[name]], shape.nbytes)
        assert header.regular
        assert header.architecture == shape.architecture
        assert header.layers == header.blocks + 1
        assert header.vocabulary == shape.vocabulary
        assert header.tied == (not any(tensor.name == "output.weight" for tensor in shape.tensors))
        for per_block in ("heads", "kv_heads", "feed_forward", "windowed", "recurrent", "cached"):
            assert len(getattr(header, per_block)) == header.blocks
        assert any(header.recurrent) == (shape.kind in ("recurrent", "hybrid"))
        assert any(header.windowed) == any(word in name for word in ("gemma2", "gemma3", "swa", "gpt-oss"))
        assert bool(header.latent) == (shape.kind == "mla")
        assert bool(header.nextn_blocks) == (shape.kind == "nextn")
        assert header.weight_bytes() == sum(tensor.nbytes for tensor in shape.tensors)


def test_it_survives_json(shapes: dict[str, Gguf]) -> None:
    adapter = TypeAdapter(ModelHeader)
    for name in ("tiny-llama", "tiny-swa", "tiny-mla", "jamba-mini", "rwkv7-1b"):
        header = interpret(name, [shapes[name]], 1)
        assert adapter.validate_json(adapter.dump_json(header)) == header


def test_parts_are_one_model(tmp_path: Path, shapes: dict[str, Gguf]) -> None:
    parts = [gguf.parse_header(path.read_bytes()[: 1 << 20]) for path in write_split(tmp_path, SHAPES["tiny-llama"], 3)]
    header = interpret("tiny-llama", parts, 1)
    assert header.parts == 3
    assert {tensor.name for tensor in header.tensors} == {tensor.name for tensor in shapes["tiny-llama"].tensors}
    with pytest.raises(ModelError, match="3 parts, but 2 are here"):
        interpret("tiny-llama", parts[:2], 1)


def test_a_fingerprint_is_of_contents_and_not_of_names(shapes: dict[str, Gguf]) -> None:
    found = {name: interpret(name, [gguf], 1) for name, gguf in shapes.items()}
    assert len({header.fingerprint for header in found.values()}) == len(found)
    one = found["llama3-8b-q3_k_l"]
    assert replace(one, name="other.gguf").fingerprint == one.fingerprint
    tuned = replace(one, metadata=one.metadata | {"general.name": "of the same shape"})
    assert tuned.fingerprint != one.fingerprint
    again = TypeAdapter(ModelHeader).validate_json(json.dumps(asdict(one)))
    assert again.fingerprint == one.fingerprint


def test_defaults_and_arrays() -> None:
    header = read(attention__head_count_kv=None)
    assert header.kv_heads == header.heads == (4, 4, 4, 4)
    assert header.key_size == header.value_size == 64
    assert header.keys(0) == header.values(0) == 256
    header = read(attention__head_count_kv=(2, 0, 2, 4), feed_forward_length=(1, 2, 3, 4), attention__key_length=96)
    assert header.kv_heads == (2, 0, 2, 4)
    assert header.feed_forward == (1, 2, 3, 4)
    assert [header.keys(i) for i in range(4)] == [192, 0, 192, 384]
    assert [header.values(i) for i in range(4)] == [128, 0, 128, 256]


@pytest.mark.parametrize(
    ("architecture", "keys", "windowed"),
    [
        ("llama", {"attention__sliding_window": 128}, ""),
        ("phi3", {"attention__sliding_window": 128}, ""),
        ("gemma2", {}, "0 2"),
        ("gemma3", {"attention__sliding_window": 512}, "0 1 2 3"),
        ("gemma3", {}, ""),
        ("gemma3", {"attention__sliding_window": 512, "attention__sliding_window_pattern": 2}, "0 2"),
        ("gpt-oss", {"attention__sliding_window": 128}, "0 2"),
        ("cohere2", {"attention__sliding_window": 128}, "0 1 2"),
        ("llama4", {}, "0 1 2"),
        ("llama4", {"attention__sliding_window": 0}, ""),
        ("smallthinker", {"attention__sliding_window": 1}, "1 2 3"),
        (
            "gemma4",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": (True, False, False, True)},
            "0 3",
        ),
        ("exaone4", {"attention__sliding_window": 8}, ""),
    ],
)
def test_windows(architecture: str, keys: dict[str, Any], windowed: str) -> None:
    header = of(architecture, **keys)
    assert [i for i in range(4) if header.windowed[i]] == list(map(int, windowed.split()))
    assert bool(header.sliding_window) == bool(windowed)


@pytest.mark.parametrize(
    ("architecture", "keys", "recurrent", "cached"),
    [
        ("qwen2", {}, "", "0 1 2 3"),
        ("mamba", {"attention__head_count": 0}, "0 1 2 3", ""),
        ("jamba", {"attention__head_count_kv": (0, 2, 0, 0)}, "0 2 3", "1"),
        ("falcon-h1", {}, "0 1 2 3", "0 1 2 3"),
        ("qwen3next", {"nextn_predict_layers": 1}, "0 1 2", ""),
        ("qwen3next", {"full_attention_interval": 2}, "0 2", "1 3"),
        ("nemotron_h", {"attention__head_count_kv": (0, 2, 0, 0), "feed_forward_length": (0, 0, 9, 0)}, "0 3", "1"),
        ("glm4moe", {"nextn_predict_layers": 1}, "", "0 1 2"),
        ("gemma4", {"attention__shared_kv_layers": 3}, "", "0"),
        ("bert", {}, "", ""),
    ],
)
def test_states_and_caches(architecture: str, keys: dict[str, Any], recurrent: str, cached: str) -> None:
    header = of(architecture, **keys)
    assert [i for i in range(4) if header.recurrent[i]] == list(map(int, recurrent.split()))
    assert [i for i in range(4) if header.cached[i]] == list(map(int, cached.split()))


def test_blocks_without_heads_have_no_cache_wherever_the_first_with_heads_is() -> None:
    def numbers(header: ModelHeader) -> int:
        """Of a token, in all keys and values."""
        return sum(header.keys(i) + header.values(i) for i in range(header.blocks) if header.cached[i])

    lfm2 = of(
        "lfm2",
        block_count=16,
        embedding_length=2048,
        attention__head_count=32,
        shortconv__l_cache=3,
        attention__head_count_kv=(0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0),
    )
    assert 2 * numbers(lfm2) * 32_768 == 384 << 20
    assert (sum(lfm2.recurrent), lfm2.conv_numbers) == (10, 2 * 2048)
    attends, feeds = range(10, 88, 11), range(1, 88, 2)  # some of them beyond the 64th
    nemotron = of(
        "nemotron_h",
        block_count=88,
        attention__head_count_kv=tuple(2 * (i in attends and i not in feeds) for i in range(88)),
        feed_forward_length=tuple(512 * (i in feeds) for i in range(88)),
    )
    attending = [i for i in attends if i not in feeds]
    assert [i for i in range(88) if nemotron.cached[i]] == attending == [10, 32, 54, 76]
    assert sum(nemotron.recurrent) == 88 - len(feeds) - 4
    assert numbers(nemotron) == 4 * 2 * 2 * 64


def test_sizes_of_states() -> None:
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 512, "ssm__state_size": 16, "ssm__group_count": 2}
    assert (of("mamba2", **ssm).conv_numbers, of("mamba2", **ssm).state_numbers) == (3 * (512 + 2 * 2 * 16), 16 * 512)
    assert of("mamba", **ssm).conv_numbers == 3 * 512
    assert (of("rwkv7", wkv__head_size=64).conv_numbers, of("rwkv7", wkv__head_size=64).state_numbers) == (
        512,
        64 * 256,
    )
    assert of("lfm2", attention__head_count_kv=(0, 2, 0, 0), shortconv__l_cache=3).conv_numbers == 512
    kda = of("kimi-linear", attention__head_count_kv=(0, 2, 0, 0), kda__head_dim=32, ssm__conv_kernel=4)
    assert (kda.conv_numbers, kda.state_numbers) == (3 * 3 * 4 * 32, 32 * 32 * 4)


def test_an_unknown_architecture_is_read_like_any() -> None:
    header = of("tomorrow")
    assert header.regular
    assert header.cached == (True,) * 4
    assert not of("deepseek4").regular


def test_the_block_of_a_tensor() -> None:
    assert [block_of(tensor) for tensor in TENSORS] == [None, 0]


BAD: list[tuple[str, Any]] = [
    ("block_count", None),
    ("block_count", 0),
    ("block_count", 513),
    ("block_count", -1),
    ("block_count", "four"),
    ("block_count", 4.0),
    ("block_count", True),
    ("block_count", (4,)),
    ("context_length", None),
    ("context_length", 0),
    ("embedding_length", 0),
    ("embedding_length", None),
    ("embedding_length", 2**40),
    ("embedding_length", 2**31 - 1),
    ("attention.head_count", 0),
    ("attention.head_count", (4, 4)),
    ("attention.head_count_kv", -2),
    ("attention.head_count_kv", (2, 2, 2, "2")),
    ("attention.key_length", 2**31 - 1),
    ("feed_forward_length", (1,)),
    ("nextn_predict_layers", 4),
    ("expert_count", 1025),
    ("expert_used_count", 8),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_absurd_values_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        read(**{key.replace(".", "__"): value})
    assert caught.value.hint


@pytest.mark.parametrize(
    "spoil",
    [
        lambda part: replace(part, tensors=()),
        lambda part: replace(part, metadata={}),
        lambda part: replace(part, metadata=part.metadata | {"general.architecture": 3}),
        lambda part: replace(part, tensors=(replace(TENSORS[0], size_bytes=2**63),)),
        lambda part: replace(part, tensors=(replace(TENSORS[0], shape=(0, 4)),)),
        lambda part: replace(
            part,
            tensors=TENSORS[1:],
            metadata={key: value for key, value in part.metadata.items() if key != "llama.vocab_size"},
        ),
    ],
)
def test_headers_that_are_no_model_are_refused(spoil: Callable[[Gguf], Gguf]) -> None:
    with pytest.raises(ModelError) as caught:
        interpret("m.gguf", [spoil(parsed(dict(LLAMA)))], 1)
    assert caught.value.hint


def test_no_parts_are_refused() -> None:
    with pytest.raises(ModelError):
        interpret("m.gguf", [], 1)


VALUES = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([2**16, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63)]),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 2**33), max_size=6).map(tuple),
    st.lists(st.booleans(), max_size=600).map(tuple),
)


@examples(400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_metadata_is_read_or_refused(shapes: dict[str, Gguf], data: st.DataObject) -> None:
    part = shapes[data.draw(st.sampled_from(sorted(shapes)))]
    keys = sorted(part.metadata)
    metadata: dict[str, Any] = dict(part.metadata)
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4)):
        if data.draw(st.booleans()):
            metadata.pop(key, None)
        else:
            metadata[key] = data.draw(VALUES)
    metadata |= data.draw(st.dictionaries(st.sampled_from(["split.count", "tokenizer.ggml.model"]), VALUES, max_size=1))
    try:
        header = interpret("m.gguf", [replace(part, metadata=metadata)], 1)
    except ModelError:
        return
    found = resident(header, Placement(data.draw(st.integers(-1, 60))), ContextOptions(512, 2, 1), ("card",))
    assert all(device.total >= 0 for device in found.values())
