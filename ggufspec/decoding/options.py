"""Decoder options: how a pair is placed and decoded. Planning and the command line use them without the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from ggufspec.errors import UsageError
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.library import min_batch_from_environment
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, REWIND_BY, ContextOptions, Placement
from ggufspec.settings.registry import DRAFTERS, check_drafters, check_rule, drafter_text, with_head
from ggufspec.settings.table import DRAFT_MAX, OPTIONS

STRICT_IMPOSSIBLE = "strict mode is impossible"  # first words of an error that bench and verify report without stopping
ROWS = 16  # rows of logits per call when evaluating drafters; every context of a drafting pair has at least as many
_MOST_SHARED = 64  # maximum rows of logits to reserve for batches of several answers
_PADDED_TO = 4  # strict mode's usual batch sizes are multiples of this: docs/decisions/003


class AnswerOptions(TypedDict, total=False):
    """The options of :class:`DecoderOptions` that may change from answer to answer, with the same models loaded."""

    drafters: tuple[str, ...]
    draft_policy: str
    draft_max: int
    lookup_corpus: Path | None
    accept: str


_LEFT_OUT = ("threads", "ubatch_size")  # options for which 0 means that they were not given


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Placement and decoding options of a pair, in llama.cpp's terms.

    Args:
        target: placement of the target's layers.
        draft: placement of the draft's layers.
        ctx_size: context size in tokens, for prompt and answer; 0: the context that the target was trained with.
        threads: CPU threads; 0: the physical cores, or fewer while other programs use the CPUs
            (:mod:`ggufspec.decoding.threads`).
        cache_type_k: type of the target's key cache, e.g. f16 or q8_0.
        cache_type_v: type of the target's value cache.
        cache_type_k_draft: type of the key cache of the draft or head.
        cache_type_v_draft: type of the value cache of the draft or head.
        flash_attn: auto, on or off.
        ubatch_size: prompt tokens computed at once; 0: 512. Smaller values shrink the compute buffers.
        no_op_offload: True to let the GPU compute only with the weights that it holds. Otherwise it copies CPU weights
            for batches of ``op_offload_min_batch`` tokens or more, which takes VRAM even without layers on the GPU.
        op_offload_min_batch: smallest batch for which the GPU copies CPU weights. Only prompts reach llama.cpp's
            default, 32; with 2, drafts are verified this way, too. The value applies to the whole process and is set
            when llama.cpp is loaded; default: ``GGML_OP_OFFLOAD_MIN_BATCH``.
        drafters: names from :data:`ggufspec.settings.registry.DRAFTERS`: ``draft`` (the model), ``mtp`` or ``eagle3``
            (a head on the target), ``lookup`` (n-grams of the text); empty for target-only. At most one may need a
            draft file; if that file is not loaded, nothing is drafted.
        draft_policy: ``adaptive`` (draft while it pays off, possibly never) or ``fixed`` (always ``draft_max``).
        draft_max: maximum draft length, in tokens; with the fixed policy, the length of every draft.
        lookup_corpus: a text file whose n-grams the lookup also uses.
        accept: name of the acceptance rule.
        strict: decode the target in batch sizes with bit-identical logits only, so that a draft cannot change the text.
        parallel: number of conversations, each with its own cache, that can be answered at once
            (:meth:`ggufspec.decoding.decoder.SpeculativeDecoder.group`).
    """

    target: Placement = field(default_factory=Placement)
    draft: Placement = field(default_factory=Placement)
    ctx_size: int = 2048
    threads: int = 0
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    cache_type_k_draft: str = "f16"
    cache_type_v_draft: str = "f16"
    flash_attn: str = "auto"
    ubatch_size: int = 0
    no_op_offload: bool = False
    op_offload_min_batch: int = field(default_factory=lambda: min_batch_from_environment() or OP_OFFLOAD_MIN_BATCH)
    drafters: tuple[str, ...] = ("draft", "lookup")
    draft_policy: str = "adaptive"
    draft_max: int = DRAFT_MAX
    lookup_corpus: Path | None = None
    accept: str = "exact"
    strict: bool = False
    parallel: int = 1

    def __post_init__(self) -> None:
        for name, value in self.flat().items():
            if name in OPTIONS and (value or name not in _LEFT_OUT):
                OPTIONS[name].check(value)
        check_drafters(self.drafters)
        if len(files := [name for name in self.drafters if DRAFTERS[name].needs_model]) > 1:
            raise UsageError(f"--drafter {'+'.join(files)} needs two draft files", f"--drafter {files[0]}+lookup")
        if self.lookup_corpus is not None and not any(DRAFTERS[name].needs_corpus for name in self.drafters):
            raise UsageError("--lookup-corpus needs --drafter lookup", "--drafter both")
        check_rule(self.accept)
        if self.strict and self.op_offload_min_batch < OP_OFFLOAD_MIN_BATCH:
            raise UsageError(
                f"strict mode, which verify needs, and --op-offload-min-batch {self.op_offload_min_batch} cannot be "
                "combined: a single token is computed on the CPU and a batch on the GPU, which round differently",
                f"--op-offload-min-batch {OP_OFFLOAD_MIN_BATCH}, or run without --strict",
            )

    def flat(self) -> dict[str, Any]:
        """Return the options by their JSON names in one flat dict, with separate names for the draft's placement."""
        options = {name: getattr(self, name) for name in self.__dataclass_fields__}
        target, draft = asdict(options.pop("target")), options.pop("draft")
        del target["mtp"]
        return {
            "ctx_size": options.pop("ctx_size"),
            "gpu_layers": target.pop("gpu_layers"),
            "gpu_layers_draft": draft.gpu_layers,
            "split": target.pop("split"),
            "draft_split": draft.split,
            **target,
            **options,
        }

    @property
    def draft_placement(self) -> Placement:
        """Placement of the draft, including the MTP blocks in its file if they draft."""
        return replace(self.draft, mtp=self.head == "mtp")

    @property
    def needs_draft(self) -> bool:
        """True if one of the drafters needs a model."""
        return any(DRAFTERS[name].needs_model for name in self.drafters)

    @property
    def head(self) -> str:
        """Drafter whose file is a head on the target: ``mtp``, ``eagle3`` or empty."""
        return next((name for name in self.drafters if DRAFTERS[name].is_head), "")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process that loads the pair."""
        return self.context(with_draft=False).environment

    def with_head(self, head: str) -> DecoderOptions:
        """Return a copy with the drafters of :func:`ggufspec.settings.registry.with_head`."""
        return replace(self, drafters=with_head(self.drafters, head))

    @property
    def drafter(self) -> str:
        """Drafters as ``--drafter`` names them: ``draft``, ``lookup``, ``both`` or ``none``."""
        return drafter_text(self.drafters)

    def drafts(self, *, with_draft: bool) -> bool:
        """Return True if anything drafts, given whether a draft is loaded (MTP blocks may be in the target's file)."""
        return bool(self.drafters) and (with_draft or not any(DRAFTERS[name].needs_file for name in self.drafters))

    def with_answer(
        self, changes: AnswerOptions, *, has_draft: bool, max_draft_length: int, head: str = ""
    ) -> DecoderOptions:
        """Return a copy with changed per-answer options.

        Args:
            changes: the options to change.
            has_draft: True if a draft model is loaded.
            max_draft_length: maximum draft length that the target's context was created for; 0: no drafts.
            head: name of the head that is loaded as the draft, if any.

        Raises:
            UsageError: an option can only be set at load time, is out of range, or exceeds what the loaded pair allows.
        """
        if others := changes.keys() - AnswerOptions.__annotations__.keys():
            raise UsageError(
                f"{', '.join(sorted(others))} cannot change while a pair is loaded", "make another SpeculativeDecoder"
            )
        if not any(DRAFTERS[name].needs_corpus for name in changes.get("drafters", ("lookup",)) if name in DRAFTERS):
            changes = {"lookup_corpus": None, **changes}
        options = replace(self, **changes)
        if head:
            options = options.with_head(head)
        elif options.head:
            raise UsageError(
                f"no head is loaded for the drafter {options.drafter!r}", "make another SpeculativeDecoder"
            )
        if "drafters" in changes and options.needs_draft and not has_draft:
            raise UsageError(f"the drafter {options.drafter!r} needs a draft model, and none is loaded", "load one")
        if options.drafts(with_draft=has_draft) and options.draft_max > max_draft_length:
            raise UsageError(
                f"a draft of {options.draft_max} tokens is too long: the pair was loaded for up to {max_draft_length}",
                f"load the pair with draft_max={options.draft_max}" + ("" if max_draft_length else " and a drafter"),
            )
        return options

    @property
    def shares_batches(self) -> bool:
        """True if answers that run at once may share batches; whether they can depends on the models' memories, too."""
        return self.parallel > 1 and not (self.strict or self.head)

    def context(self, *, with_draft: bool) -> ContextOptions:
        """Return the target's context options. Without a drafter, fewer rows of logits are reserved."""
        drafts = self.drafts(with_draft=with_draft)
        # Recurrent states and strict batch sizes are expensive, so by default none are reserved for long drafts
        spared = ROWS if self.draft_max == DRAFT_MAX else max(ROWS, self.draft_max + 1)
        max_outputs = spared if self.strict else max(ROWS, self.draft_max + 1) if drafts else 2
        if self.shares_batches:
            max_outputs = max(max_outputs, min(self.parallel * (ROWS // 2 if drafts else 2), _MOST_SHARED))
        return ContextOptions(
            ctx_size=self.ctx_size,
            max_outputs=max_outputs,
            threads=self.threads or physical_cores(),
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attn=self.flash_attn,
            ubatch_size=self.ubatch_size,
            op_offload=not self.no_op_offload,
            op_offload_min_batch=self.op_offload_min_batch,
            # Drafts change the order of a sliding window's cells, and the order affects rounding
            swa_full=self.strict,
            rewind=min(spared, -(-(self.draft_max + 1) // _PADDED_TO) * _PADDED_TO) - 1 if drafts else 0,
            rewind_by=REWIND_BY["target"],
            sequences=self.parallel,
            shared_cells=self.shares_batches,
        )

    def draft_context(self) -> ContextOptions:
        """Return the draft's context options."""
        return ContextOptions(
            ctx_size=self.ctx_size,
            max_outputs=max(ROWS, self.parallel) if self.shares_batches else ROWS,
            threads=self.threads or physical_cores(),
            cache_type_k=self.cache_type_k_draft,
            cache_type_v=self.cache_type_v_draft,
            flash_attn=self.flash_attn,
            ubatch_size=self.ubatch_size,
            op_offload=not self.no_op_offload,
            op_offload_min_batch=self.op_offload_min_batch,
            swa_full=bool(self.head),
            rewind=max(ROWS, self.draft_max + 1),
            rewind_by=REWIND_BY["draft"],
            sequences=self.parallel,
            shared_cells=self.shares_batches,
        )


class WithOptions:
    """Base of jobs with a pair's options, whose process gets the environment variables that the options need."""

    __slots__ = ()
    options: DecoderOptions

    @property
    def environment(self) -> dict[str, str]:
        return self.options.environment


def check_one_of(value: str, known: Sequence[str], what: str) -> None:
    """Raise UsageError unless ``value`` is one of ``known``."""
    if value not in known:
        raise UsageError(f"there is no {what} {value!r}", "one of " + ", ".join(known))
