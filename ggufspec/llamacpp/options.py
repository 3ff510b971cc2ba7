"""Options of placement and context, usable without the llama.cpp library."""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.errors import UsageError

# (numbers, bytes) of a block: ggml/src/ggml-common.h
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
REWIND_BY = {"target": "auto", "draft": "checkpoint"}  # in a pair; a draft's chain is several batches
MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS, src/llama-hparams.h
HOST = "CPU"
# Default smallest batch for which a GPU copies CPU weights (of experts only those used) and computes with them, from
# ggml-cuda.cu (offload_op) and ggml-backend.cpp; and the variable that ggml reads once, when its backends register.
STREAM_WIDTH, STREAM_VARIABLE = 32, "GGML_OP_OFFLOAD_MIN_BATCH"
# Names of a block's feed-forward tensors, after "blk.N": LLM_FFN_EXPS_REGEX and LLM_FFN_DENSE_REGEX, common/common.h
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE_FFN = r"\.ffn_(up|down|gate)\."
SLACK = 64  # cells beyond ctx_size, so that a padded batch at the very end still fits
AGAIN_MAX = 4
HEAD_BATCH = 128  # tokens that a head computes at once: upstream's 512 take gigabytes with a large vocabulary
HIDDEN_RING = 2048  # tokens whose hidden rows are stored: a head that lags behind by more starts over
LAST_HIDDEN = -1  # in ContextOptions.hidden: the rows after the last block
# What ggml/src/gguf.cpp and src/llama-model-loader.cpp say of an incomplete file
_CUT = ("gguf_init_from_reader", "corrupted or incomplete", "not within", "unexpectedly reached end")
_CELLS_STEP = 256  # src/llama-context.cpp


def is_remote(device: str) -> bool:
    """Return True if a device is an RPC worker's: ggml/src/ggml-rpc/ggml-rpc.cpp names them so."""
    return device.startswith("RPC")


def offloaded(gpu_layers: int, layers: int) -> int:
    """Return how many of a model's layers ``-ngl gpu_layers`` offloads: all if negative or more than there are.

    Args:
        gpu_layers: as requested, e.g. -1 or 99.
        layers: layers of the model, the output included.
    """
    return layers if gpu_layers < 0 else min(gpu_layers, layers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one model's layers.

    Block i is offloaded iff i ≥ max(blocks + 1 − gpu_layers, 0); the output is index ``blocks``, so that it goes first.
    The offloaded layers are divided over the devices in order, by ``split``. Source: src/llama-model.cpp.

    Args:
        gpu_layers: offloaded layers as llama.cpp counts them, the output included; see :func:`offloaded`.
        split: share of the offloaded layers for each device; empty: by the devices' free memory.
        n_cpu_moe: number of first blocks whose expert tensors stay on the CPU (llama.cpp's ``--n-cpu-moe``).
        mtp: True to load the file's MTP blocks; without a head on them they would only take memory.
        n_cpu_ffn: number of first blocks whose dense feed-forward tensors stay on the CPU (``--n-cpu-ffn``).
        override_tensor: ``PATTERN=DEVICE``, tensors and their devices whatever the other options say (``-ot``).
        load_mode: how weights are loaded, as llama.cpp's ``--load-mode``; ``auto`` maps the file if devices can.
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
        """(pattern, device) of tensors that are not with their layer, in order: the first pattern found in a tensor's
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
    """Options of decoding with one model.

    Args:
        ctx_size: tokens of context; llama.cpp pads its cells to a multiple of 256.
        width: maximum rows of logits per call (``n_outputs_max``).
        threads: CPU threads, for prompts and generation alike.
        cache_type_k: type of the key cache, one of ``KV_TYPES``.
        cache_type_v: type of the value cache; anything but f16, bf16, f32 needs flash attention.
        flash_attn: ``auto``, ``on`` or ``off``.
        n_batch: maximum tokens per call while a prompt is read.
        ubatch_size: maximum tokens that are computed at once (llama.cpp's ``n_ubatch``), which determines the size of
            the compute buffers; 0: all of a call. A verification is never divided.
        op_offload: True to let a GPU compute batches of ``op_offload_min_batch`` tokens or more with copies of CPU
            weights; the same for all models of a process.
        swa_full: True to retain the whole context in layers with a sliding window, so that any token can be taken back.
            Otherwise they retain their window and a micro-batch, so that the last batch can be taken back, and
            ``rewind`` tokens that came one by one (:class:`ggufspec.llamacpp.rewind.Windowed`).
        rewind: maximum tokens of one batch to take back. An attention cache can always do that at no cost; a recurrent
            or hybrid memory needs more space for it. 0: such a memory only grows.
        rewind_by: how a recurrent memory does it, one of ``REWINDS``. Only a checkpoint goes back through several
            batches, as a draft's tokens need; only snapshots decode nothing again. ``auto``: snapshots if the
            architecture has them, else a checkpoint.
        again_max: after a checkpoint, maximum tokens that are decoded again together with the following ones. More get
            a batch of their own and a checkpoint after it, or every rejection would add to the cost of the next one.
        hidden: layers whose input rows are stored with the logits for a drafter that reads them; ``LAST_HIDDEN`` stands
            for the rows after the last block.
        sequences: texts with their own caches, each of ``ctx_size`` tokens; one is decoded at a time
            (:meth:`ggufspec.llamacpp.model.Context.use`).
    """

    ctx_size: int
    width: int
    threads: int
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    n_batch: int = 512
    ubatch_size: int = 0
    op_offload: bool = True
    op_offload_min_batch: int = STREAM_WIDTH
    swa_full: bool = True
    rewind: int = 0
    rewind_by: str = "auto"
    again_max: int = AGAIN_MAX
    hidden: tuple[int, ...] = ()
    sequences: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """Environment for settings without a parameter in llama.cpp, for a process that has not loaded it yet."""
        return {STREAM_VARIABLE: str(self.op_offload_min_batch)}

    @property
    def cells(self) -> int:
        """Cells of the KV cache per text: ``ctx_size``, space for padding, and llama.cpp's own rounding up."""
        return -(-(self.ctx_size + SLACK) // _CELLS_STEP) * _CELLS_STEP

    @property
    def batch(self) -> int:
        """Tokens in one call."""
        return min(max(self.n_batch, self.ubatch_size), self.ctx_size + SLACK)

    @property
    def computed(self) -> int:
        """Tokens that are computed at once; a window holds as many beyond itself."""
        return min(max(self.ubatch_size, self.width, self.rewind), self.batch) if self.ubatch_size else self.batch


def parse_override(text: str) -> tuple[str, str]:
    """Split ``PATTERN=DEVICE`` into (pattern, device), at the first = as llama.cpp does (common/arg.cpp)."""
    pattern, _, device = text.partition("=")
    return pattern, device


def check_rewind(name: str) -> None:
    """Raise UsageError unless ``name`` is one of ``REWINDS``."""
    if name not in REWINDS:
        raise UsageError(f"{name!r} is not a way to take tokens back", "one of " + ", ".join(REWINDS))


def beyond_training(role: str, name: str, trained: int, ctx_size: int) -> str:
    """Return a warning about a context beyond what a model was trained for; empty if it is within, or not known."""
    if not 0 < trained < ctx_size:
        return ""
    does = "answers get worse" if role == "target" else "fewer of its drafts are accepted"
    return f"{name} was trained for {trained:,} tokens of context: beyond them {does}, as no rope scaling is set"


def load_hint(reason: str) -> str:
    """Return a hint for llama.cpp's ``reason`` not to load a model."""
    if any(sign in reason for sign in _CUT):
        return "the file is cut short or damaged: download it again"
    if "unknown model architecture" in reason:
        return "this llama.cpp does not know the architecture: update llama-cpp-python"
    if "alloc" in reason or "memory" in reason:
        return "lower -ngl or -ngld so that fewer layers go to the GPU"
    if "error loading model" in reason:
        return "the file is damaged or made for another llama.cpp: download it again, or update llama-cpp-python"
    return "-v shows llama.cpp's log"


def context_hint(reason: str) -> str:
    """Return a hint for llama.cpp's ``reason`` not to make a context."""
    if "requires flash_attn" in reason:
        return "-fa on, or -ctv f16"
    if "different K" in reason:
        return "give both caches one type: -ctk q8_0 -ctv q8_0, or neither"
    return "lower -c, -ngl or -ngld, or use a smaller KV type (-ctk q8_0 -ctv q8_0)"
