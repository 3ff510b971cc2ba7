"""May this draft serve this target? Vocabularies, pairs of headers, and what the command line says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp import gguf
from ggufspec.models import vocabulary
from ggufspec.models.compat import (
    Vocabulary,
    differences,
    judge_pair,
    puts_bos,
    vocabulary_mismatch,
)
from ggufspec.models.header import ModelHeader, Tokenizer, interpret
from ggufspec.models.headers import read_headers
from ggufspec.models.heads import require_head
from tests.support import shapes
from tests.support.processes import Cli

TOKENS = [b"<unk>", b"<s>", b"</s>", b"x", b"y", b"a", b"b", b"\xff"]


# ---- vocabularies as the running models have them -------------------------------------------------------------------


def vocabulary_of(tokens=TOKENS, kind="BPE"):
    return Vocabulary(kind, tokens)


def test_the_same_vocabulary_serves():
    assert vocabulary_mismatch(vocabulary_of(), vocabulary_of()) is None


@pytest.mark.parametrize("token", range(5))
def test_the_first_five_tokens_may_differ(token):
    """llama.cpp common/speculative.cpp compares from token 5 on."""
    tokens = [b"?" if index == token else text for index, text in enumerate(TOKENS)]
    assert vocabulary_mismatch(vocabulary_of(), vocabulary_of(tokens)) is None


@pytest.mark.parametrize(("token", "shown"), [(5, "'a'"), (6, "'b'"), (7, "'\ufffd'")])
def test_a_token_that_differs_is_named(token, shown):
    tokens = [b"?" if index == token else text for index, text in enumerate(TOKENS)]
    reason = vocabulary_mismatch(vocabulary_of(), vocabulary_of(tokens))
    assert reason == f"token {token} is {shown} to the target and '?' to the draft"


def test_of_several_the_first_is_named_and_all_are_counted():
    reason = vocabulary_mismatch(vocabulary_of(), vocabulary_of([b"?"] * 8))
    assert reason == "token 5 is 'a' to the target and '?' to the draft; 3 tokens differ"


def test_differences_are_those_of_tokens_that_both_have():
    assert differences(TOKENS, TOKENS[:6]) is None
    assert differences([*TOKENS, b"c"], [*TOKENS, b"d", b"e"]) == "token 8 is 'c' to the target and 'd' to the draft"


def test_another_kind_of_tokenizer():
    reason = vocabulary_mismatch(vocabulary_of(kind="BPE"), vocabulary_of(kind="SPM"))
    assert reason == "the target's tokenizer is BPE, the draft's is SPM"


@pytest.mark.parametrize("sizes", [(1000, 1128), (1128, 1000)])
def test_padding_of_up_to_128_tokens_serves(sizes):
    target, draft = (vocabulary_of([b"%d" % token for token in range(size)]) for size in sizes)
    assert vocabulary_mismatch(target, draft) is None


@pytest.mark.parametrize("sizes", [(1000, 1129), (1129, 1000)])
def test_a_larger_difference_in_size_does_not(sizes):
    target, draft = (vocabulary_of([b"%d" % token for token in range(size)]) for size in sizes)
    assert vocabulary_mismatch(target, draft) == f"the target has {sizes[0]:,} tokens, the draft {sizes[1]:,}"


# ---- pairs of headers -----------------------------------------------------------------------------------------------

LLAMA3 = "{{ '<|start_header_id|>' + role + '<|end_header_id|>' }}"
TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama3": {"model": "gpt2", "pre": "llama-bpe", "bos_token_id": 128000, "eos_token_id": 128009, "size": 128256},
    "qwen2": {"model": "gpt2", "pre": "qwen2", "add_bos_token": False, "eos_token_id": 151645, "size": 151936},
    "spm": {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "size": 32000},
    "gemma": {"model": "llama", "bos_token_id": 2, "eos_token_id": 1, "eot_token_id": 107, "size": 256000},
    "gpt2": {"model": "gpt2", "pre": "gpt-2", "bos_token_id": 50256, "eos_token_id": 50256, "size": 50257},
    "bert": {"model": "bert", "pre": "jina-v2-en", "size": 30522},
    "none": {"model": "none", "size": 0},
}


def header(
    shape: str, tokenizer: str = "llama3", *, digest: str = "", template: str = "", keys: Any = (), **changed: Any
) -> ModelHeader:
    """The header of a shape with a tokenizer; ``keys`` are of the architecture, ``changed`` of the tokenizer."""
    wanted = TOKENIZERS[tokenizer] | changed
    size = wanted.pop("size")
    made = shapes.SHAPES[shape]
    metadata = {key: tuple(value) if isinstance(value, list) else value for key, value in made.metadata.items()}
    metadata |= {f"{made.architecture}.{key}": value for key, value in dict(keys).items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in wanted.items()}
    if template:
        metadata["tokenizer.chat_template"] = template
    tensors = tuple(gguf.GgufTensor(t.name, t.type.lower(), t.ne, t.nbytes, 0) for t in made.tensors)
    part = gguf.Gguf(metadata, {"tokenizer.ggml.tokens": size}, digest or tokenizer, tensors, 0)
    return interpret(f"{shape}.gguf", [part], made.nbytes)


def renamed(model: ModelHeader, architecture: str, *names: str) -> ModelHeader:
    """The same model under another architecture's name, with other tensors where they are given."""
    tensors = tuple(gguf.GgufTensor(name, "f16", (64, 64), 8192, 0) for name in names) or model.tensors
    return replace(model, architecture=architecture, tensors=tensors)


BIG, SMALL = "llama3-70b-q3_k_s", "llama3-8b-q3_k_l"
QWEN_BIG, QWEN_SMALL = "qwen2-7b", "qwen2-0.5b-q8_0"

GOOD = {
    "one family": (header(BIG), header(SMALL)),
    "another architecture with the same tokens": (header(BIG), header("qwen2-0.5b-q8_0", "llama3")),
    "padded by 128 tokens": (header(QWEN_BIG, "qwen2", size=152064, digest="padded"), header(QWEN_SMALL, "qwen2")),
    "BOS left to llama.cpp and BOS said": (header(BIG), header(SMALL, add_bos_token=True)),
    "templates on both sides": (header(BIG, template=LLAMA3), header(SMALL, template=LLAMA3 + " ")),
    "BOS ids that nobody puts": (
        header(QWEN_BIG, "qwen2", bos_token_id=1),
        header(QWEN_SMALL, "qwen2", bos_token_id=2),
    ),
    "a mixture of experts": (header("mixtral-8x7b", "spm"), header("tiny-llama", "spm")),
    "sliding windows": (header("gemma3-27b", "gemma"), header("tiny-swa", "gemma")),
    "a draft with further blocks of its own": (header("glm4.5-air", "qwen2"), header("tiny-nextn", "qwen2")),
    "GPT-2": (header("gpt2-medium-f16", "gpt2"), header("tiny-llama", "gpt2")),
}
WARNED = {
    "another BOS token": (
        (header(BIG), header(SMALL, bos_token_id=128100)),
        "the BOS token is 128000 to the target and 128100 to the draft: expect fewer",
    ),
    "another end": (
        (header(BIG), header(SMALL, eos_token_id=128001)),
        "the EOS token is 128009 to the target and 128001 to the draft",
    ),
    "another end of a turn": (
        (header("gemma2-9b", "gemma"), header("gemma-2b", "gemma", eot_token_id=106)),
        "the EOT token is 107 to the target and 106 to the draft",
    ),
    "a base model": (
        (header(BIG, template=LLAMA3), header(SMALL)),
        "only one of them has a chat template",
    ),
    "another pre-tokenizer": (
        (header(QWEN_BIG, "qwen2", pre="deepseek-r1-qwen"), header(QWEN_SMALL, "qwen2")),
        "the target splits text as deepseek-r1-qwen and the draft was trained on qwen2",
    ),
    "a larger draft": ((header(SMALL), header(BIG)), "the draft is no smaller than the target"),
    "itself": ((header(SMALL), header(SMALL)), "the draft is no smaller than the target"),
    "no vocabularies": ((header(BIG, "none"), header(SMALL, "none")), "neither header has a vocabulary"),
    "EOS behind a prompt": (
        (header(BIG, add_eos_token=True), header(SMALL)),
        "llama.cpp's own programs refuse the pair",
    ),
    "BOS on one side": (
        (header(BIG), header(SMALL, add_bos_token=False)),
        "only one of them puts a BOS token before a prompt",
    ),
}
BAD = {
    "another kind of tokenizer": (
        (header(BIG), header("tiny-llama", "spm")),
        "the target's tokenizer is BPE, the draft's is SPM",
    ),
    "no tokenizer on one side": (
        (header(BIG), header(SMALL, "none")),
        "the target's tokenizer is BPE, the draft's is none",
    ),
    "129 tokens more": (
        (header(QWEN_BIG, "qwen2", size=152065), header(QWEN_SMALL, "qwen2")),
        "the target has 152,065 tokens, the draft 151,936",
    ),
    "half the vocabulary": (
        (header("gemma2-9b", "gemma"), header("tiny-llama", "spm", bos_token_id=2)),
        "the target has 256,000 tokens, the draft 32,000",
    ),
    "an encoder": (
        (header(BIG), renamed(header("tiny-llama"), "bert")),
        "the draft is an embedding model (bert): it does not predict the next token",
    ),
    "an encoder beside a decoder": (
        (header(BIG), renamed(header("tiny-llama"), "t5")),
        "the draft is an encoder-decoder model (t5)",
    ),
    "a diffusion model": (
        (header(BIG), renamed(header("tiny-llama"), "llada")),
        "the draft is a diffusion model (llada)",
    ),
    "an embedding model by its pooling": (
        (header("qwen3-14b", "qwen2"), header(QWEN_SMALL, "qwen2", keys={"pooling_type": 3})),
        "the draft is an embedding model (qwen2)",
    ),
    "an embedding model by its attention": (
        (header(BIG), header(SMALL, keys={"attention.causal": False})),
        "the draft is an embedding model",
    ),
    "a draft whose state llama.cpp does not keep": (
        (header(BIG), renamed(header(SMALL), "deepseek4")),
        "the draft is hybrid (deepseek4): its state cannot roll back rejected tokens",
    ),
}
AGAIN = "after a rejection it decodes the accepted tokens again"
STATEFUL = {
    "a recurrent draft": ((header(BIG), header("mamba-1b")), f"the draft is recurrent (mamba): {AGAIN}"),
    "a recurrent target": ((header("rwkv7-1b"), header("tiny-llama")), f"the target is recurrent (rwkv7): {AGAIN}"),
    "a hybrid target": (
        (header("qwen3next-80b-a3b", "qwen2"), header(QWEN_SMALL, "qwen2")),
        f"the target is hybrid (qwen3next): {AGAIN}",
    ),
    "state and cache side by side": ((header("falcon-h1-1.5b"), header("tiny-llama")), "the target is hybrid"),
    "short convolutions": (
        (header("lfm2-1.2b"), header("tiny-llama")),
        "the target is hybrid (lfm2): it keeps a state for each token of a draft",
    ),
    "a hybrid draft": ((header(BIG), header("lfm2-1.2b")), f"the draft is hybrid (lfm2): {AGAIN}"),
    "a target whose states llama.cpp keeps": (
        (renamed(header(BIG), "deepseek4"), header(SMALL)),
        "the target is hybrid (deepseek4): it keeps a state",
    ),
}
HEADS = {
    "DFlash": (renamed(header("tiny-llama"), "dflash"), "a DFlash drafter", "--spec-type draft-dflash"),
    "DSpark": (
        renamed(header("tiny-llama"), "dflash", "markov_w1.weight"),
        "a DSpark drafter",
        "--spec-type draft-dspark",
    ),
    "Medusa": (renamed(header("tiny-llama"), "llama", "medusa.0.weight"), "a set of Medusa heads", ""),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_draft_that_serves(name: str) -> None:
    verdict = judge_pair(*GOOD[name], compare=lambda: None)
    assert (verdict.answer, verdict.reasons, verdict.runner) == ("yes", (), "")


@pytest.mark.parametrize("name", WARNED)
def test_a_draft_that_serves_with_a_warning(name: str) -> None:
    pair, words = WARNED[name]
    verdict = judge_pair(*pair, compare=lambda: None)
    assert verdict.answer == "yes-with-warning"
    assert len(verdict.reasons) == 1
    assert words in verdict.reasons[0]


@pytest.mark.parametrize("name", BAD)
def test_a_draft_that_does_not_serve(name: str) -> None:
    pair, words = BAD[name]
    verdict = judge_pair(*pair, compare=lambda: None)
    assert verdict.answer == "no"
    assert len(verdict.reasons) == 1
    assert words in verdict.reasons[0]


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_takes_tokens_back_at_a_price(name: str) -> None:
    (target, draft), words = STATEFUL[name]
    verdict = judge_pair(target, replace(draft, tokenizer=target.tokenizer), compare=lambda: None)
    assert verdict.answer == "yes-with-warning"
    assert sum(words in reason for reason in verdict.reasons) == 1


@pytest.mark.parametrize("name", HEADS)
def test_a_drafter_that_needs_the_targets_hidden_states(name: str) -> None:
    draft, what, flag = HEADS[name]
    verdict = judge_pair(header(BIG), draft, compare=lambda: None)
    assert verdict.answer == "no"
    assert verdict.reasons == (f"the draft is {what}: it drafts from the target's hidden states, not from tokens",)
    assert flag in verdict.runner
    assert bool(verdict.runner) == bool(flag)


TINY = header("tiny-llama", size=4096)
EAGLE3 = {"eagle3.target_layers": (0, 1, 2), "eagle3.target_hidden_size": TINY.embedding}
LAST = TINY.blocks - 1
BLOCK = ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down")
NEXTN = tuple(f"blk.{LAST}.nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm"))
MTP_NAMES = ("token_embd.weight", *(f"blk.{LAST}.{part}.weight" for part in BLOCK), *NEXTN)
MIMO2 = replace(renamed(TINY, "mimo2"), nextn_blocks=1)
QWEN35 = replace(renamed(TINY, "qwen35"), nextn_blocks=1)


def eagle3(**changed: Any) -> ModelHeader:
    made = renamed(TINY, "eagle3")
    keys = EAGLE3 | {f"eagle3.{key}": value for key, value in changed.items()}
    return replace(made, blocks=1, metadata=made.metadata | keys)


def mtp(target: ModelHeader, *names: str) -> ModelHeader:
    return replace(renamed(target, target.architecture, *(names or MTP_NAMES)), nextn_blocks=1)


def of_shape(made: shapes.Shape) -> ModelHeader:
    keys = {key: tuple(value) if isinstance(value, list) else value for key, value in made.metadata.items()}
    tensors = tuple(gguf.GgufTensor(t.name, t.type.lower(), t.ne, t.nbytes, 0) for t in made.tensors)
    return replace(interpret(made.name, [gguf.Gguf(keys, {}, "", tensors, 0)], made.nbytes), tokenizer=TINY.tokenizer)


def gemma4(windowed: tuple[bool, ...] = (True, True, False)) -> ModelHeader:
    dims = shapes.Dims(3, 256, 4, 2, 512, 4096, 64)
    return of_shape(shapes.gemma4(shapes.Label("gemma4", "swa", "gemma4", "F16"), dims, windowed))


def assistant(kv_heads: int = 2, backbone: int = 256) -> ModelHeader:
    dims, label = shapes.Dims(2, 128, 4, kv_heads, 256, 4096, 64), shapes.Label("a", "swa", "gemma4-assistant", "F16")
    return of_shape(shapes.gemma4(label, dims, (True, False), backbone=backbone))


GEMMA4 = gemma4()


def test_a_head_that_serves() -> None:
    assert judge_pair(TINY, eagle3(), lambda: None).answer == "yes"
    assert judge_pair(MIMO2, mtp(MIMO2), lambda: None).answer == "yes"
    own = renamed(MIMO2, "mimo2", "blk.0.attn_norm.weight", *MTP_NAMES)
    assert judge_pair(own, own, lambda: None, "mtp").answer == "yes"
    assert judge_pair(GEMMA4, assistant(), lambda: None).answer == "yes"


D2T = gguf.GgufTensor("d2t", "i32", (1000,), 4000, 0)
BAD_HEADS = {
    "an architecture without layer inputs": (renamed(TINY, "phi3"), eagle3(), "hidden states of the target's arch"),
    "rows of another width": (TINY, eagle3(target_hidden_size=64), "made for hidden states of size 64"),
    "layers that the target lacks": (TINY, eagle3(target_layers=(1, 2, 99)), "reads the layers 1, 2, 99"),
    "no layers": (TINY, eagle3(target_layers=0), "does not say which three layers"),
    "another vocabulary": (replace(TINY, tokenizer=header("tiny-llama", "qwen2").tokenizer), eagle3(), "token"),
    "several blocks": (TINY, replace(eagle3(), blocks=2), "has 2 blocks, but llama.cpp supports only EAGLE-3 heads"),
    "values of another size": (TINY, replace(eagle3(), value_size=32), "its keys have size 64 and its values 32"),
    "layers that are no numbers": (TINY, eagle3(target_layers=("a", 1, 2)), "reads the layers a, 1, 2"),
    "embeddings of fewer tokens": (
        TINY,
        replace(eagle3(), tensors=(gguf.GgufTensor("token_embd.weight", "f16", (64, 100), 12800, 0),)),
        "its embeddings cover 100 of",
    ),
    "ids of another type": (TINY, replace(eagle3(), tensors=(D2T,)), "token ids (d2t) have type i32"),
    "ids without an output": (TINY, replace(eagle3(), tensors=(D2T,)), "but no output of its own"),
    "MTP of another architecture": (TINY, mtp(MIMO2), "the target is llama"),
    "MTP that llama.cpp does not run": (
        renamed(TINY, "gpt-oss"),
        mtp(renamed(TINY, "gpt-oss")),
        "does not support MTP blocks of the target's architecture (gpt-oss)",
    ),
    "MTP that was trimmed": (MIMO2, mtp(MIMO2, f"blk.{LAST}.attn_norm.weight"), "the file was trimmed: its 1 MTP"),
    "MTP without a norm": (MIMO2, mtp(MIMO2, *MTP_NAMES[:-1]), f"should include {NEXTN[-1]}"),
    "MTP whose query, key and value are apart": (
        MIMO2,
        mtp(MIMO2, *(name for name in MTP_NAMES if "attn_qkv" not in name)),
        f"its 1 MTP block should include blk.{LAST}.attn_qkv.weight",
    ),
    "MTP blocks that are fewer than said": (
        MIMO2,
        replace(mtp(MIMO2), nextn_blocks=2),
        f"its 2 MTP blocks should include blk.{LAST - 1}.nextn.eh_proj.weight",
    ),
    "MTP blocks that are not said": (
        MIMO2,
        replace(mtp(MIMO2), nextn_blocks=0),
        f"it has {NEXTN[0]}, but mimo2.nextn_predict_layers is 0",
    ),
    "more MTP blocks than said": (
        MIMO2,
        mtp(MIMO2, f"blk.{LAST - 1}.nextn.eh_proj.weight", *MTP_NAMES),
        f"it has blk.{LAST - 1}.nextn.eh_proj.weight, but mimo2.nextn_predict_layers is 1",
    ),
    "several MTP blocks where llama.cpp runs one": (
        QWEN35,
        replace(mtp(QWEN35, *NEXTN, *(name.replace(str(LAST), str(LAST - 1)) for name in NEXTN)), nextn_blocks=2),
        "has 2 MTP blocks, but llama.cpp supports only one for qwen35",
    ),
    "MTP of another width": (MIMO2, replace(mtp(MIMO2), embedding=64), "reads hidden states of size 64"),
    "a target without MTP blocks": (renamed(TINY, "mimo2"), renamed(TINY, "mimo2"), "its file has no MTP blocks"),
    "an assistant of another model": (TINY, assistant(), "reads the cache of a gemma4, but the target is llama"),
    "an assistant of another width": (GEMMA4, assistant(backbone=512), "reads hidden states of size 512"),
    "an assistant of other keys": (
        GEMMA4,
        assistant(kv_heads=1),
        "its block 0 reads keys and values of sizes 64 and 64 per token, but the target's block 1 has 128 and 128",
    ),
    "an assistant of other blocks": (gemma4((True, False, True)), assistant(), "the target's last two blocks, whose"),
    "an assistant that is cut": (GEMMA4, replace(assistant(), nextn_blocks=1), "has 2 blocks, but gemma4-assistant"),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_head_that_does_not_serve(name: str) -> None:
    target, head, words = BAD_HEADS[name]
    verdict = judge_pair(target, head, lambda: None, "mtp" if head == target else "")
    assert verdict.answer == "no"
    assert any(words in reason for reason in verdict.reasons), verdict.reasons


@pytest.mark.parametrize(("drafter", "hint"), [("eagle3", "--drafter draft"), ("mtp", "--drafter draft")])
def test_a_head_is_asked_for_and_the_draft_is_none(drafter: str, hint: str) -> None:
    with pytest.raises(UsageError, match="needs such a head") as refused:
        require_head(header(BIG), header(SMALL), drafter)
    assert refused.value.hint == hint
    with pytest.raises(UsageError, match="is an EAGLE-3 head") as refused:
        require_head(TINY, eagle3(), "mtp")
    assert refused.value.hint == "--drafter eagle3"


def test_texts_are_compared_where_the_digests_differ_and_nowhere_else() -> None:
    def never() -> str | None:
        raise AssertionError("asked for")

    found = "token 139 is 'a' to the target and 'b' to the draft; 2 tokens differ"
    assert judge_pair(header(BIG), header(SMALL), never).answer == "yes"
    assert judge_pair(header(BIG, digest="one"), header("tiny-llama", "spm"), never).answer == "no"
    assert judge_pair(header(BIG, digest="one"), header(SMALL), lambda: None).answer == "yes"
    verdict = judge_pair(header(BIG, digest="one"), header(SMALL), lambda: found)
    assert (verdict.answer, verdict.reasons) == ("no", (found,))


def test_every_reason_is_said() -> None:
    verdict = judge_pair(renamed(header(BIG), "llada"), renamed(header("tiny-llama"), "bert"), compare=lambda: None)
    assert [reason.split(" (")[0] for reason in verdict.reasons] == [
        "the target is a diffusion model",
        "the draft is an embedding model",
    ]
    warned = judge_pair(header(SMALL, template=LLAMA3), header(BIG, eos_token_id=7, pre="tekken"), compare=lambda: None)
    assert len(warned.reasons) == 4


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Tokenizer("llama", "", 1, "", None, {}), True),
        (Tokenizer("llama", "", 1, "", False, {}), False),
        (Tokenizer("gpt2", "llama-bpe", 1, "", None, {}), True),
        (Tokenizer("gpt2", "tekken", 1, "", None, {}), True),
        (Tokenizer("gpt2", "qwen2", 1, "", None, {}), False),
        (Tokenizer("gpt2", "qwen2", 1, "", True, {}), True),
        (Tokenizer("gemma4", "", 1, "", False, {}), True),
        (Tokenizer("t5", "", 1, "", None, {}), False),
    ],
)
def test_bos_is_put_as_llama_cpp_does(tokenizer: Tokenizer, expected: bool) -> None:
    assert puts_bos(tokenizer) == expected


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def alike(tmp_path: Path):
    """Writes a model whose tokens' texts can be changed: its file."""

    def write(name: str, shape: str = "tiny-llama", **changed: str) -> Path:
        made = shapes.SHAPES[shape]
        texts = [changed.get(f"token_{i}", f"text {i}") for i in range(4096)]
        keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": texts}
        return shapes.write_file(tmp_path / f"{name}.gguf", made.metadata | keys, made.tensors)

    return write


def test_texts_are_read_from_the_kept_headers(alike, tmp_path: Path) -> None:
    files = [alike("target"), alike("same"), alike("other", token_9="\u00fc", token_700="no")]
    target, same, other = read_headers(files, tmp_path / "headers")
    assert gguf.tokens(target.sparse.read_bytes())[9] == b"text 9"
    assert vocabulary.judge_known(target, same).reasons == ("the draft is no smaller than the target",)
    verdict = vocabulary.judge_known(target, other)
    assert verdict.answer == "no"
    assert verdict.reasons == ("token 9 is 'text 9' to the target and 'ü' to the draft; 2 tokens differ",)
    with pytest.raises(ModelError, match=r"other\.gguf cannot draft for target\.gguf: token 9") as refused:
        vocabulary.check_pair(target, other)
    assert "--drafter none" in refused.value.hint
    assert vocabulary.check_pair(target, same) == ("the draft is no smaller than the target",)


def test_a_header_without_a_vocabulary_has_no_tokens(tmp_path: Path) -> None:
    path = shapes.write(tmp_path / "none.gguf", shapes.SHAPES["tiny-llama"])
    assert gguf.tokens(path.read_bytes()[: 1 << 20]) == []


# ---- on the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target that is named like Llama 3, a draft with other ends, one with another vocabulary."""
    folder = tmp_path_factory.mktemp("files")

    def write(name: str, shape: str, *, words: str = "text", **keys: Any) -> Path:
        made = shapes.SHAPES[shape]
        texts = [f"{words} {i}" for i in range(4096)]
        own = {"model": "gpt2", "pre": "llama-bpe", "tokens": texts, "merges": ["t e"]}
        own |= {"bos_token_id": 0, "eos_token_id": 1} | keys
        metadata = made.metadata | {f"tokenizer.ggml.{key}": value for key, value in own.items()}
        return shapes.write_file(folder / f"{name}.gguf", metadata, made.tensors)

    return {
        "target": write("Llama-3.3-70B-Instruct-Q4_K_M", "tiny-moe"),
        "other end": write("other-end", "tiny-llama", eos_token_id=2),
        "other words": write("other-words", "tiny-llama", words="word"),
    }


def test_a_plan_has_the_warning(cli: Cli, files: dict[str, Path]) -> None:
    done = cli("plan", "-m", files["target"], "-md", files["other end"], "--vram", "1GiB", "--json")
    assert done.code == 0, done.stderr
    notes = done.document()["notes"]
    assert any("the EOS token is 1 to the target and 2 to the draft" in note for note in notes)


@pytest.mark.parametrize(
    ("draft", "words"),
    [("other words", "token 5 is 'text 5' to the target and 'word 5' to the draft; 4,091 tokens differ")],
)
def test_a_plan_refuses_and_says_where_drafts_are(cli: Cli, files: dict[str, Path], draft: str, words: str) -> None:
    done = cli("plan", "-m", files["target"], "-md", files[draft], "--vram", "1GiB", "--json")
    assert done.code == 1
    error = done.document()
    assert f"{files[draft].name} cannot draft for {files['target'].name}: {words}" in error["error"]
    assert "ggufspec profiles list" in error["hint"]
