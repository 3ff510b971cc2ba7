"""A loaded pair: its models, their contexts, and the number of threads that they decode with."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from ggufspec.decoding.options import ROWS, DecoderOptions
from ggufspec.decoding.threads import Threads
from ggufspec.errors import ModelError
from ggufspec.hardware.host import physical_cores
from ggufspec.llamacpp.head import Head, head_sources
from ggufspec.llamacpp.library import min_batch_from_environment
from ggufspec.llamacpp.model import Context, Model, check_gguf
from ggufspec.llamacpp.options import OP_OFFLOAD_MIN_BATCH, beyond_training
from ggufspec.models.compat import Vocabulary, vocabulary_mismatch
from ggufspec.models.locate import first_part
from ggufspec.models.vocabulary import head_of


class LoadedPair:
    """A target and, if the options need one, a draft model or a head. Without a file of its own, the drafter ``mtp``
    uses the MTP blocks in the target's file.

    Attributes:
        options: options with the head, number of threads and context size in effect.
        model, draft_model: weights and vocabularies; both are the target's if its own MTP blocks draft.
        target, draft, head: the contexts; at most one of draft and head exists.
        max_draft_length: longest draft that the contexts can verify in a round.
        notes: sentences for the user about how the pair was loaded.

    Raises:
        ModelError: a file is missing or damaged, or does not fit; or the models cannot be a pair.
    """

    def __init__(self, target: Path, draft: Path | None, options: DecoderOptions) -> None:
        # Flash attention's order of summation depends on the number of threads, so strict mode fixes this number.
        self.threads = Threads(options.threads or (physical_cores() if options.strict else 0))
        self.notes: list[str] = []
        target = first_part(target)
        if options.needs_draft and (draft or options.head == "mtp"):
            draft = draft or target
            check_gguf(draft)
            draft = first_part(draft)
            options = options.with_head(head_of(target, draft, options.head))
        else:
            draft = None
        in_target = draft == target and options.head == "mtp"
        self._stack = ExitStack()
        own = self._stack.enter_context
        try:
            self.model = own(Model(target, replace(options.target, mtp=in_target)))
            self.draft_model = self.model if in_target else None
            if draft and not in_target:
                self.draft_model = own(Model(draft, options.draft_placement))
                hint = "choose a draft of the target's own family, or --no-draft"
                require_same_vocabulary(self.model, self.draft_model, hint)
            ctx_size = options.ctx_size or self.model.context_train
            self.options = options = replace(options, threads=self.threads.start(), ctx_size=ctx_size)
            self._note_what_was_loaded()

            sources = head_sources(self.draft_model) if self.draft_model and options.head else ()
            context = replace(options.context(with_draft=draft is not None), hidden=sources)
            self.target = own(closing(Context(self.model, context)))
            self.max_draft_length = self._max_draft_length()
            self.draft: Context | None = None
            self.head: Head | None = None
            if self.draft_model and options.head:
                self.head = own(closing(Head(self.draft_model, self.target, options.draft_context())))
            elif self.draft_model:
                self.draft = own(closing(Context(self.draft_model, options.draft_context())))
            for one in filter(None, (self.target, self.draft)):
                if self.drafts and not one.can_rewind:
                    raise ModelError(
                        f"{one.model.path.name} cannot take tokens back: it cannot be in a pair",
                        "run target-only with --no-draft",
                    )
        except BaseException:
            self.close()
            raise

    @property
    def drafts(self) -> bool:
        return self.options.drafts(with_draft=self.draft_model is not None)

    def _max_draft_length(self) -> int:
        if not self.drafts:
            return 0
        exact = self.target.rewind_kind != "snapshots"  # the number of snapshots is fixed at load time
        return max(self.options.draft_max, ROWS - 1) if exact else self.options.draft_max

    @property
    def contexts(self) -> list[Context | Head]:
        return [one for one in (self.target, self.draft, self.head) if one is not None]

    def use(self, sequence: int) -> None:
        """Switch all contexts to this sequence."""
        for context in self.contexts:
            context.use(sequence)

    def is_quiet(self) -> bool:
        """Return True if, when last measured, other programs left enough CPUs free for one thread per core."""
        return self.threads.quiet

    def follow_threads(self) -> None:
        """Adapt llama.cpp's number of threads to the CPUs that other programs leave idle."""
        self._follow(self.threads.look())

    def begin_threads(self) -> None:
        """Adapt the number of threads at the beginning of an answer, see :meth:`Threads.begin`."""
        self._follow(self.threads.begin())

    def _follow(self, changed: bool) -> None:
        if changed:
            for context in self.contexts:
                context.use_threads(self.threads.count)

    def close(self) -> None:
        self._stack.close()

    def _note_what_was_loaded(self) -> None:
        options = self.options
        (wanted,) = options.environment.items()
        if self.model.gpu_layers and options.op_offload_min_batch != (
            min_batch_from_environment() or OP_OFFLOAD_MIN_BATCH
        ):
            self.notes.append(f"--op-offload-min-batch {wanted[1]} has no effect: start Python with {'='.join(wanted)}")
        if not self.model.has_end:
            self.notes.append(f"{self.model.path.name} has no token that ends an answer: -n and stop texts do")
        draft = None if self.draft_model is self.model else self.draft_model
        placed = (("target", self.model, options.target.gpu_layers), ("draft", draft, options.draft.gpu_layers))
        for role, model, gpu_layers in placed:
            if model is None:
                continue
            self.notes.append(beyond_training(role, model.path.name, model.context_train, options.ctx_size))
            if model.unpinned:
                self.notes.append(f"a GPU copies the weights of {model.path.name} slowly: {model.unpinned}")
            if gpu_layers and not model.gpu_layers:
                self.notes.append("llama.cpp finds no GPU, and runs on the CPU alone; `ggufspec doctor` says why")


def require_same_vocabulary(target: Model, draft: Model, hint: str) -> None:
    """Refuse a draft whose vocabulary differs from the target's.

    Raises:
        ModelError: the vocabularies differ. The message names the first difference; ``hint`` is the error's hint.
    """
    reason = vocabulary_mismatch(*(Vocabulary(model.vocabulary_kind, model.vocabulary()) for model in (target, draft)))
    if reason:
        raise ModelError(f"{draft.path.name} cannot draft for {target.path.name}: {reason}", hint)
