"""How a pair is placed and decoded: the decoder's options, which planning and the command line need without it."""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.errors import UsageError
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.options import (
    MAX_THREADS,
    MAX_WIDTH,
    ContextOptions,
    Placement,
    check_flash_attention,
    check_kv_type,
)

RULES = ("exact", "residual")


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """How a pair is placed and decoded; llama.cpp's meanings.

    Args:
        n_ctx: tokens of context, prompt and answer together.
        gpu_layers: layers of the target on the GPU, the output layer included; negative means all.
        draft_gpu_layers: the same of the draft.
        split: shares of the target's offloaded layers for each device; empty leaves it to llama.cpp (free memory).
        draft_split: the same of the draft.
        cpu_experts: the target's expert tensors of the first so many blocks stay on the CPU.
        threads: CPU threads; 0 means the physical cores.
        type_k: type of the target's key cache, f16 or q8_0 say.
        type_v: type of the target's value cache.
        flash_attention: auto, on or off.
        draft_max: drafted tokens a round at most.
        accept: name of the acceptance rule, ``exact`` or ``residual``.
        strict: decode the target in one width class, so that the text is the same to the bit with and without draft.
    """

    n_ctx: int = 2048
    gpu_layers: int = 0
    draft_gpu_layers: int = 0
    split: tuple[float, ...] = ()
    draft_split: tuple[float, ...] = ()
    cpu_experts: int = 0
    threads: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"
    draft_max: int = 4
    accept: str = "exact"
    strict: bool = False

    def __post_init__(self) -> None:
        if self.n_ctx < 2:
            raise UsageError(f"a context of {self.n_ctx} tokens holds no text", "-c 2048 is usual")
        if not 1 <= self.draft_max < MAX_WIDTH:
            raise UsageError(
                f"a draft length of {self.draft_max} is not possible: 1 to {MAX_WIDTH - 1} fit one target batch",
                "--draft-max 4 is usual; --no-draft runs the target alone",
            )
        if not 0 <= self.threads <= MAX_THREADS:
            raise UsageError(f"{self.threads} threads cannot run", "leave -t away for one per physical core")
        check_kv_type(self.type_k)
        check_kv_type(self.type_v)
        check_flash_attention(self.flash_attention)
        check_rule(self.accept)

    @property
    def placement(self) -> Placement:
        """Where the target's layers are."""
        return Placement(self.gpu_layers, self.split, self.cpu_experts)

    @property
    def draft_placement(self) -> Placement:
        """Where the draft's layers are."""
        return Placement(self.draft_gpu_layers, self.draft_split)

    def context(self, *, with_draft: bool) -> ContextOptions:
        """The target's context. Without a draft fewer rows of logits are reserved."""
        width = max(2, self.draft_max + 1 if with_draft else 1)
        if self.strict:
            from ggufspec.decoding.widths import LIMIT, padded

            width = max(LIMIT, padded(width))
        return ContextOptions(
            n_ctx=self.n_ctx,
            width=width,
            threads=self.threads or physical_cores(),
            type_k=self.type_k,
            type_v=self.type_v,
            flash_attention=self.flash_attention,
        )

    def draft_context(self) -> ContextOptions:
        """The draft's context."""
        return ContextOptions(self.n_ctx, 2, self.threads or physical_cores(), flash_attention=self.flash_attention)


def check_rule(name: str) -> None:
    """Raise UsageError unless ``name`` is one of ``RULES``, the acceptance rules."""
    if name not in RULES:
        raise UsageError(f"there is no acceptance rule {name!r}", f"the rules are: {', '.join(RULES)}")
