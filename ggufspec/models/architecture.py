"""Facts about architectures that are in llama.cpp's source but not in GGUF headers.

Source: src/models/*.cpp (``load_arch_hparams``), src/llama-arch.cpp, ``llama_model::create_memory`` in
src/llama-model.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


def kind_of_state(name: str) -> str:
    """Return ``recurrent``, ``hybrid`` or "", like ``llama_model_is_recurrent`` and ``llama_model_is_hybrid``."""
    return "recurrent" if name in RECURRENT else "hybrid" if name in HYBRID else ""


@dataclass(frozen=True, slots=True)
class WindowPattern:
    """Pattern of blocks with a sliding window (``set_swa_pattern`` in src/llama-hparams.cpp)."""

    pattern: int  # every ``pattern``-th block has full attention; 0: the header lists the blocks
    dense_first: bool = False  # True if the first block of each group has full attention, False if the last one has
    size: int = 0  # window in tokens if the header states none; 0: no window
    fixed: bool = False  # True if ``size`` overrides the header's window, except a window of 0


WINDOWS = {
    "afmoe": WindowPattern(4),
    "cohere2": WindowPattern(4),
    "cohere2moe": WindowPattern(4, dense_first=True),
    "exaone-moe": WindowPattern(4, size=128),
    "exaone4": WindowPattern(4, size=4096),  # only if the model has 64 blocks
    "gemma-embedding": WindowPattern(6),
    "gemma2": WindowPattern(2, size=4096),
    "gemma3": WindowPattern(6),
    "gemma3n": WindowPattern(5),
    "gemma4": WindowPattern(0),
    "gemma4-assistant": WindowPattern(0),
    "gpt-oss": WindowPattern(2),
    "granite_swa": WindowPattern(0),
    "laguna": WindowPattern(4, dense_first=True),
    "lfm2": WindowPattern(0),  # every attention block has the window
    "lfm2moe": WindowPattern(0),
    "llama4": WindowPattern(4, size=8192, fixed=True),
    "maple": WindowPattern(0),
    "mellum": WindowPattern(4),
    "mimo2": WindowPattern(0),
    "modern-bert": WindowPattern(3, dense_first=True),
    "muse-glimmer": WindowPattern(4),
    "olmo2": WindowPattern(4),
    "plamo3": WindowPattern(8),
    "smallthinker": WindowPattern(4, dense_first=True, size=4096, fixed=True),
    "spark2.5": WindowPattern(0),
    "step35": WindowPattern(0),
}

# Architectures in which every block has a recurrent state and none has a KV cache.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

# Architectures in which blocks without key-value heads have a state (in Nemotron-H, only those without feed-forward).
STATE_WITHOUT_HEADS = frozenset(
    {"jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"}
)
NEMOTRON_H = frozenset({"nemotron_h", "nemotron_h_moe"})

# Architectures in which all blocks except every n-th have a state, unless the header lists the blocks with a state.
STATE_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}

# Architectures in which every block has a state and a cache.
STATE_AND_CACHE = frozenset({"falcon-h1"})

# Architectures in which some blocks have a state and some a cache (llm_arch_is_hybrid in src/llama-arch.cpp).
HYBRID = STATE_WITHOUT_HEADS | NEMOTRON_H | STATE_INTERVAL.keys() | STATE_AND_CACHE | {"deepseek4"}

# Architectures whose state size follows from kda.head_dim and the number of heads.
KDA = frozenset({"kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"})

# Architectures that cache latent vectors instead of keys and values if the header has attention.key_length_mla.
LATENT = frozenset({"deepseek2", "deepseek2-ocr", "mistral4", "kimi-linear", "kimi-k3", "bailingmoe3"})

# Encoders and diffusion models, which retain nothing between calls.
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

# Architectures whose memory planning.memory cannot compute (only a dry run can), because they have special caches (an
# indexer's keys, another model's cells), more blocks than the header states, or an encoder in addition to the decoder.
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

# Architectures in which all blocks are for multi-token prediction.
NO_TRUNK = frozenset({"gemma4-assistant"})

# Index of the first block that reuses the keys and values of an earlier block, by architecture.
FIRST_WITHOUT_CACHE = {"gemma3n": 20}
