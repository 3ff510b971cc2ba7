"""Placement and context options, usable without the llama.cpp library."""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.errors import UsageError

# (numbers, bytes) per block of a type: ggml/src/ggml-common.h
KV_TYPES = {
    "f16": (1, 2),
    "bf16": (1, 2),
    "f32": (1, 4),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
REWINDS = ("auto", "snapshots", "checkpoint")
REWIND_BY = {"target": "auto", "draft": "checkpoint"}  # rollback by role in a pair; a draft takes several batches
MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS, src/llama-hparams.h
HOST = "CPU"
# Default size of the smallest batch for which a GPU computes with copies of CPU weights (only the experts used;
# offload_op in ggml-cuda.cu, ggml-backend.cpp), and its variable, which ggml reads once, when it registers backends
OP_OFFLOAD_MIN_BATCH, STREAM_VARIABLE = 32, "GGML_OP_OFFLOAD_MIN_BATCH"
# Names of a block's feed-forward tensors, after "blk.N": LLM_FFN_EXPS_REGEX and LLM_FFN_DENSE_REGEX, common/common.h
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE_FFN = r"\.ffn_(up|down|gate)\."
SLACK = 64  # cells beyond ctx_size, so that a padded batch at the very end still fits
AGAIN_MAX = 4
HEAD_BATCH = 128  # tokens that a head computes at once; llama.cpp's 512 take gigabytes with a large vocabulary
HIDDEN_RING = 2048  # tokens whose hidden states are stored; a head that lags further behind starts over
LAST_HIDDEN = -1  # in ContextOptions.hidden: the output of the last block
# Parts of messages in ggml/src/gguf.cpp and src/llama-model-loader.cpp about incomplete files
_CUT = ("gguf_init_from_reader", "corrupted or incomplete", "not within", "unexpectedly reached end")
_CELLS_STEP = 256  # llama.cpp rounds the number of cells up to a multiple of this: src/llama-context.cpp


def is_remote(device: str) -> bool:
    """Return True if a device's name is an RPC worker's (ggml/src/ggml-rpc/ggml-rpc.cpp)."""
    return device.startswith("RPC")


def offloaded(gpu_layers: int, layers: int) -> int:
    """Return how many of a model's layers ``-ngl gpu_layers`` offloads: all if negative or more than their number.

    Args:
        gpu_layers: as requested, e.g. -1 or 99.
        layers: number of layers in the model, including the output.
    """
    return layers if gpu_layers < 0 else min(gpu_layers, layers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one model's layers.

    Block i is offloaded iff i ≥ max(blocks + 1 − gpu_layers, 0); the output has index ``blocks``, so it is offloaded
    first. The offloaded layers are divided among the devices in order, by ``split``. Source: src/llama-model.cpp.

    Args:
        gpu_layers: offloaded layers as llama.cpp counts them, the output included; see :func:`offloaded`.
        split: share of the offloaded layers for each device; empty: in proportion to their free memory.
        n_cpu_moe: number of leading blocks whose expert tensors stay on the CPU (llama.cpp's ``--n-cpu-moe``).
        mtp: True to load the file's MTP blocks, which waste memory unless a head uses them.
        n_cpu_ffn: number of leading blocks whose dense feed-forward tensors stay on the CPU (``--n-cpu-ffn``).
        override_tensor: ``PATTERN=DEVICE`` pairs, which take precedence over the other options (``-ot``).
        load_mode: how weights are loaded, as in llama.cpp's ``--load-mode``; ``auto`` maps the file if all devices can.
        no_host: True to repack the CPU's weights for the CPU even next to a GPU; the GPU then cannot compute with them.
    """

    gpu_layers: int = 0
    split: tuple[float, ...] = ()
    n_cpu_moe: int = 0
    mtp: bool = False
    n_cpu_ffn: int = 0
    override_tensor: tuple[str, ...] = ()
    load_mode: str = "auto"
    no_host: bool = False

    @property
    def is_mapped(self) -> bool:
        """True if the CPU's weights are mapped from the file, which a GPU cannot copy as fast as pinned memory."""
        return self.load_mode in ("auto", "mmap", "mmap+mlock")

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """(pattern, device) pairs for tensors that do not follow their layer; the first pattern found in a tensor's
        name wins. Source: ``llama_model_loader::create_tensor`` in src/llama-model-loader.cpp.
        """
        first_blocks = ((EXPERTS, self.n_cpu_moe), (DENSE_FFN, self.n_cpu_ffn))
        return (
            *map(parse_override, self.override_tensor),
            *((rf"blk\.{i}{part}", HOST) for part, count in first_blocks for i in range(min(count, MAX_BLOCKS))),
        )

    def offloaded(self, blocks: int) -> int:
        """Return how many of ``blocks`` + 1 layers are offloaded."""
        return offloaded(self.gpu_layers, blocks + 1)


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options for decoding with one model.

    Args:
        ctx_size: context size in tokens; llama.cpp rounds the number of cells up to a multiple of 256.
        max_outputs: maximum number of rows of logits per call (``n_outputs_max``).
        threads: CPU threads for both prefill and generation.
        cache_type_k: type of the key cache, one of ``KV_TYPES``.
        cache_type_v: type of the value cache; anything but f16, bf16, f32 needs flash attention.
        flash_attn: ``auto``, ``on`` or ``off``.
        n_batch: maximum number of tokens per call during prefill.
        ubatch_size: maximum number of tokens computed at once (llama.cpp's ``n_ubatch``); it determines the size of the
            compute buffers; 0: all tokens of a call. A verification batch is never split.
        op_offload: True to let a GPU compute batches of ``op_offload_min_batch`` tokens or more with copies of CPU
            weights; the minimum applies to all models in a process.
        swa_full: True to retain the whole context in layers with a sliding window, so that any token can be rolled
            back. Otherwise they retain the window and a micro-batch, which is enough to roll back the last batch, or
            ``rewind`` tokens decoded one by one (:class:`ggufspec.llamacpp.rewind.WindowedRollback`).
        rewind: maximum number of tokens to roll back from one batch. This is free for an attention cache; a recurrent
            or hybrid memory takes more space for it, and cannot roll back if ``rewind`` is 0.
        rewind_by: how a recurrent memory rolls back, one of ``REWINDS``. Only a checkpoint can undo several batches, as
            a draft must; only snapshots avoid decoding tokens again. ``auto``: snapshots if the architecture has them,
            otherwise a checkpoint.
        again_max: maximum number of tokens decoded again after a return to a checkpoint, in one batch with the new
            tokens. More get their own batch and a new checkpoint, or each rejection would make the next one costlier.
        hidden: layers whose inputs are stored with the logits for a drafter that reads them; ``LAST_HIDDEN`` stands for
            the output of the last block.
        sequences: number of texts with their own caches of ``ctx_size`` tokens
            (:meth:`ggufspec.llamacpp.model.Context.use`).
        shared_cells: True if all sequences take their cells from one pool, so that one batch can hold tokens of
            several; a text's rounding then depends on other texts. Only a plain attention cache can do this.
    """

    ctx_size: int
    max_outputs: int
    threads: int
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    n_batch: int = 512
    ubatch_size: int = 0
    op_offload: bool = True
    op_offload_min_batch: int = OP_OFFLOAD_MIN_BATCH
    swa_full: bool = True
    rewind: int = 0
    rewind_by: str = "auto"
    again_max: int = AGAIN_MAX
    hidden: tuple[int, ...] = ()
    sequences: int = 1
    shared_cells: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for settings that are not llama.cpp parameters; set them before llama.cpp loads."""
        return {STREAM_VARIABLE: str(self.op_offload_min_batch)}

    def keeps_rope_factors(self, original: int) -> bool:
        """Return whether a pool of cells for all sequences has the RoPE factors that one sequence would have.

        Contexts larger than ``original`` tokens have other factors.
        """
        return (self.cells > original) == (self.sequences * self.cells > original)

    @property
    def cells(self) -> int:
        """KV cache cells per text: ``ctx_size`` plus space for padding, rounded up as llama.cpp does."""
        return -(-(self.ctx_size + SLACK) // _CELLS_STEP) * _CELLS_STEP

    @property
    def batch(self) -> int:
        """Maximum number of tokens in one decode call."""
        return min(max(self.n_batch, self.ubatch_size), self.ctx_size + SLACK)

    @property
    def computed(self) -> int:
        """Maximum number of tokens per micro-batch; a sliding-window cache has this many extra cells."""
        return min(max(self.ubatch_size, self.max_outputs, self.rewind), self.batch) if self.ubatch_size else self.batch


def parse_override(text: str) -> tuple[str, str]:
    """Split ``PATTERN=DEVICE`` into (pattern, device), at the first = as llama.cpp does (common/arg.cpp)."""
    pattern, _, device = text.partition("=")
    return pattern, device


def check_rewind(name: str) -> None:
    """Raise UsageError unless ``name`` is one of ``REWINDS``."""
    if name not in REWINDS:
        raise UsageError(f"{name!r} is not a rollback method", "use one of " + ", ".join(REWINDS))


def beyond_training(role: str, name: str, trained: int, ctx_size: int) -> str:
    """Return a warning if the context exceeds the model's training context; empty if not, or if that is unknown."""
    if not 0 < trained < ctx_size:
        return ""
    does = "answers get worse" if role == "target" else "fewer of its drafts are accepted"
    return f"{name} was trained for {trained:,} tokens of context; beyond that {does}, because no RoPE scaling is set"


def load_hint(reason: str) -> str:
    """Return a hint for the user, based on llama.cpp's reason for failing to load a model."""
    if any(sign in reason for sign in _CUT):
        return "the file is truncated or damaged: download it again"
    if "unknown model architecture" in reason:
        return "this llama.cpp does not support the architecture: update llama-cpp-python"
    if "unknown pre-tokenizer" in reason:
        return "this llama.cpp does not support the tokenizer: update llama-cpp-python"
    if "alloc" in reason or "memory" in reason:
        return "lower -ngl or -ngld so that fewer layers go to the GPU"
    if "error loading model" in reason:
        return "the file is damaged or made for another llama.cpp: download it again, or update llama-cpp-python"
    return "-v shows llama.cpp's log"


def context_hint(reason: str) -> str:
    """Return a hint for the user, based on llama.cpp's reason for failing to create a context."""
    if "requires flash_attn" in reason:
        return "-fa on, or -ctv f16"
    if "different K" in reason:
        return "give both caches the same type: -ctk q8_0 -ctv q8_0, or neither"
    return "lower -c, -ngl or -ngld, or use a smaller KV type (-ctk q8_0 -ctv q8_0)"
