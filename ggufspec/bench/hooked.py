"""A trial through llama-cpp-python's ``Llama``, with or without our draft; see :mod:`ggufspec.bench.trial`.

``Llama`` takes the first token from the prompt's batch, as our own loop does: tokens per second are of the same tokens.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ggufspec import worker
from ggufspec.bench import trial
from ggufspec.bench.trial import WARM_UP_PROMPT, Answer, LoadedModel, Result, Spec
from ggufspec.cache import cache_folder
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ModelError, UsageError
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.model import Model
from ggufspec.settings import OPTIONS

if TYPE_CHECKING:
    from ggufspec.decoding.hook import DraftModel

__all__ = ["Result", "Spec", "check", "measure", "run"]

_WARM_UP_TOKENS = 8  # in the first rounds the hook learns how long the target takes


def check(options: DecoderOptions, sampling: Sampling) -> None:
    """Refuse what ``Llama`` with the hook cannot do.

    Raises:
        UsageError: the options ask for it.
    """
    own = "leave it out, or --engine own"
    if sampling.penalises:  # llama_cpp/llama.py, generate: its sampler is not given the prompt's tokens
        raise UsageError("Llama's penalties do not count the prompt, as those of our own loop do", own)
    if not options.needs_draft:
        raise UsageError(f"the hook needs a draft model, and --drafter {options.drafter} has none", own)
    if options.accept != "exact":
        raise UsageError(
            f"--accept {options.accept} needs our own loop: Llama accepts only what it samples itself", own
        )
    if options.strict:
        raise UsageError("--strict needs our own loop: Llama chooses its own batch sizes", own)
    if options.lookup_corpus is not None:
        raise UsageError("--lookup-corpus needs our own loop: the hook looks up in the text only", own)
    for name in ("n_cpu_moe", "n_cpu_ffn", "override_tensor"):
        if getattr(options, name):
            raise UsageError(
                f"Llama cannot place single tensors ({OPTIONS[name].flags[-1]}, or {name} of the profile)", own
            )


def run(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Result:
    """Do the trial in this process; its events are those of :func:`ggufspec.bench.trial.run`."""
    return trial.run(spec, emit, stopping, _llama)


@contextlib.contextmanager
def _llama(spec: Spec, emit: worker.Emit, stopping: threading.Event) -> Iterator[trial.Engine]:  # noqa: ARG001
    """A ``Llama``, with a draft or without."""
    from ggufspec.llamacpp.hook import Borrowed, make_llama, scores_bytes  # which load llama_cpp: not in the parent

    options = spec.options
    context = options.context(with_draft=spec.draft is not None)
    with contextlib.closing(make_llama(spec.target, options.placement, context)) as llama:
        draft = _draft(spec, llama) if spec.draft is not None else None
        target = Borrowed(llama)
        notes: list[str] = []
        if draft is not None:
            whole = scores_bytes(options.ctx_size, target.vocab_size)
            message = f"Llama keeps no logits beside the hook: {options.ctx_size:,} × {target.vocab_size:,}"
            notes = draft.notes
            notes.append(f"{message} of them, with logits_all=True, would take {whole / 2**20:,.0f} MiB of host memory")
        answering = _Answering(llama, target, draft, spec, stopping)

        def read(prompt: str) -> list[int]:
            return target.tokenize(prompt, special=spec.templated)

        yield trial.Engine(
            _loaded(target, options.placement.offloaded(target.layers)),
            _loaded(draft.model, draft.model.gpu_layers) if draft else None,
            draft.drafters if draft else (),
            notes,
            lambda: answering.answer(read(spec.prompts[0])[:WARM_UP_PROMPT], _WARM_UP_TOKENS),
            lambda prompt: answering.answer(read(prompt), spec.max_tokens),
        )


def _draft(spec: Spec, llama: Any) -> DraftModel:
    from ggufspec.decoding.hook import DraftModel

    options = spec.options
    assert spec.draft is not None
    return DraftModel(
        spec.draft,
        llama,
        draft_max=options.draft_max,
        draft_policy=options.draft_policy,
        lookup="lookup" in options.drafters,
        ctx_size=options.ctx_size,
        gpu_layers=options.gpu_layers_draft,
        split=options.draft_split,
        threads=options.threads,
        flash_attn=options.flash_attn,
        ubatch_size=options.ubatch_size,
        cache=cache_folder(),
    )


def _loaded(model: Model, gpu_layers: int) -> LoadedModel:
    return LoadedModel(model.description, model.layers, gpu_layers if devices.has_gpu() else 0, model.size_bytes)


class _Answering:
    """A ``Llama`` that answers prompts, with a draft or without."""

    def __init__(
        self, llama: Any, target: Model, draft: DraftModel | None, spec: Spec, stopping: threading.Event
    ) -> None:
        self.llama, self.target, self.draft, self.stopping = llama, target, draft, stopping
        self.ctx_size, self.draft_max = spec.options.ctx_size, spec.options.draft_max
        self.sampling: Sampling = spec.sampling

    def answer(self, tokens: list[int], max_tokens: int) -> Answer:
        """The answer to a prompt's tokens."""
        if not tokens or len(tokens) > self.ctx_size:
            raise ModelError(
                f"the prompt has {len(tokens):,} tokens and the context holds {self.ctx_size:,}",
                f"-c {-(-(len(tokens) + max_tokens) // 256) * 256} would hold it",
            )
        if self.draft is not None:
            self.draft.rounds = []
        clock = time.perf_counter
        requested = clock()
        self.llama.reset()
        emitted: list[int] = []
        stop_reason, first_s = "", None
        for token in self._generate(tokens):
            emitted.append(token)
            first_s = clock() - requested if first_s is None else first_s
            stop_reason = self._stop_reason(token, len(tokens), len(emitted), max_tokens)
            if stop_reason or self.stopping.is_set():
                break
        total_s = clock() - requested
        rounds = self.draft.rounds if self.draft else []
        found = Statistics.of(
            rounds,
            self.draft_max if self.draft else 0,
            prompt_tokens=len(tokens),
            prompt_read=len(tokens),
            prompt_s=total_s if first_s is None else first_s,
            tokens=len(emitted),
            decode_s=0.0 if first_s is None else total_s - first_s,
            stop_reason=stop_reason,
            time_to_first_token_s=first_s,
        )
        text = b"".join(map(self.target.piece, emitted)).decode("utf-8", "replace")
        return Answer(text, tuple(emitted), self._completed(found, sum(len(one.emitted) for one in rounds)))

    def _generate(self, tokens: list[int]) -> Any:
        sampling = self.sampling
        self.llama.set_seed(sampling.seed % 2**32)
        return self.llama.generate(
            tokens,
            temp=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=1.0,
        )

    def _stop_reason(self, token: int, prompt: int, count: int, max_tokens: int) -> str:
        if self.target.is_end(token):
            return "end"
        if count >= max_tokens:
            return "length"
        return "context" if prompt + count > self.ctx_size else ""

    def _completed(self, found: Statistics, known: int) -> Statistics:
        """The hook does not know how the last round ended, and without it none is known.

        Args:
            found: of the rounds that it knows.
            known: tokens of these.
        """
        plain = found.decoded if self.draft is None else 0
        last = self.draft is not None and found.tokens > known + 1
        return replace(
            found,
            rounds=found.rounds + plain + last,
            plain_rounds=found.plain_rounds + plain,
            verify_s=found.decode_s - found.draft_s,
        )


def measure(spec: Spec, *, verbose: bool = False) -> Result:
    """Do the trial in a child process.

    Raises:
        GgufspecError: what the user can mend.
        Interrupted: Ctrl-C; its ``partial`` is the result so far, or None.
    """
    return worker.call(__name__, spec, Result, verbose=verbose)
