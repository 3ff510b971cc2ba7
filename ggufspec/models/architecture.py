"""Facts of llama.cpp about architectures that GGUF headers do not have.

Source: src/models/*.cpp (``load_arch_hparams``), src/llama-arch.cpp, ``llama_model::create_memory`` in
src/llama-model.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


def kind_of_state(name: str) -> str:
    """Return ``recurrent`` or ``hybrid``, by ``llama_model_is_recurrent`` and ``llama_model_is_hybrid``; else empty."""
    return "recurrent" if name in RECURRENT else "hybrid" if name in HYBRID else ""


@dataclass(frozen=True, slots=True)
class Window:
    """Pattern of the blocks with a sliding window (``set_swa_pattern`` in src/llama-hparams.cpp)."""

    pattern: int  # one of so many blocks attends to everything; 0: the header lists the blocks
    dense_first: bool = False  # that block is the first of its group, not the last
    size: int = 0  # window if the header has none; 0: none
    fixed: bool = False  # ``size`` overrides the header's, except 0


WINDOWS = {
    "afmoe": Window(4),
    "cohere2": Window(4),
    "cohere2moe": Window(4, dense_first=True),
    "exaone-moe": Window(4, size=128),
    "exaone4": Window(4, size=4096),  # with 64 blocks only
    "gemma-embedding": Window(6),
    "gemma2": Window(2, size=4096),
    "gemma3": Window(6),
    "gemma3n": Window(5),
    "gemma4": Window(0),
    "gemma4-assistant": Window(0),
    "gpt-oss": Window(2),
    "granite_swa": Window(0),
    "laguna": Window(4, dense_first=True),
    "lfm2": Window(0),  # all blocks with attention
    "lfm2moe": Window(0),
    "llama4": Window(4, size=8192, fixed=True),
    "maple": Window(0),
    "mellum": Window(4),
    "mimo2": Window(0),
    "modern-bert": Window(3, dense_first=True),
    "muse-glimmer": Window(4),
    "olmo2": Window(4),
    "plamo3": Window(8),
    "smallthinker": Window(4, dense_first=True, size=4096, fixed=True),
    "spark2.5": Window(0),
    "step35": Window(0),
}

# Every block has a state, none a cache.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

# A block without key-value heads has a state (in Nemotron-H only if it has no feed-forward either).
STATE_WITHOUT_HEADS = frozenset(
    {"jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"}
)
NEMOTRON_H = frozenset({"nemotron_h", "nemotron_h_moe"})

# All blocks have a state except one of so many, unless the header lists them.
STATE_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}

# Every block has both.
STATE_AND_CACHE = frozenset({"falcon-h1"})

# Some blocks have a state and some a cache: llm_arch_is_hybrid in src/llama-arch.cpp.
HYBRID = STATE_WITHOUT_HEADS | NEMOTRON_H | STATE_INTERVAL.keys() | STATE_AND_CACHE | {"deepseek4"}

# The state's size comes from this key alone.
KDA = frozenset({"kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"})

# attention.key_length_mla makes the cache one of latent numbers, without values.
LATENT = frozenset({"deepseek2", "deepseek2-ocr", "mistral4", "kimi-linear", "kimi-k3", "bailingmoe3"})

# Encoders and diffusion models retain nothing between calls.
NO_MEMORY = frozenset(
    {
        "bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "eurobert",
        "wavtokenizer-dec",
        "modern-bert",
        "gemma-embedding",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
    }
)

# A cache of a special kind (an indexer's keys, another model's cells), more blocks than the header says, or an encoder
# next to the decoder: planning.memory cannot compute these; a dry run can.
IRREGULAR = frozenset(
    {
        "deepseek32",
        "deepseek4",
        "dflash",
        "dots3note",
        "eagle3",
        "gemma4-assistant",
        "glm-dsa",
        "glm5-next",
        "graniteswitch",
        "hy_v4",
        "minimax-m3",
        "nanbeige",
        "qwen4exp",
        "t5",
        "t5encoder",
    }
)

# All blocks are for multi-token prediction.
NO_TRUNK = frozenset({"gemma4-assistant"})

# Blocks from this one on use the keys and values of an earlier one.
FIRST_WITHOUT_CACHE = {"gemma3n": 20}
