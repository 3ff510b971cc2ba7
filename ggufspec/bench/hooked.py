"""Trials through llama-cpp-python's ``Llama``, with or without our draft; see :mod:`ggufspec.bench.trial`.

Speeds are comparable, because ``Llama`` samples the first token from the prompt's batch, as our own loop does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from ggufspec import child
from ggufspec.bench import trial
from ggufspec.bench.trial import TrialAnswer, TrialJob, TrialRequest
from ggufspec.decoding.alternate import SEGMENT_TOKENS
from ggufspec.decoding.decoder import Statistics
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import ModelError, UsageError
from ggufspec.files.cache import cache_folder
from ggufspec.llamacpp.library import complaints, forget_complaints, load_library
from ggufspec.llamacpp.options import context_hint
from ggufspec.llamacpp.params import kv_type
from ggufspec.settings.table import OPTIONS

_WARM_UP_TOKENS = 8  # length of the warm-up, in whose first rounds the hook times the target
TRUNCATIONS = ("top_k", "top_p", "min_p")  # truncations that llama-cpp-python's Llama supports
_OWN_LOOP = {  # options that need our own loop, with reasons
    "accept": "Llama accepts only what it samples itself",
    "strict": "Llama chooses its own batch sizes",
    "lookup_corpus": "the hook looks up n-grams in the text only",
    "n_cpu_moe": "Llama cannot place individual tensors",
    "n_cpu_ffn": "Llama cannot place individual tensors",
    "override_tensor": "Llama cannot place individual tensors",
    "cache_type_k_draft": "the hook's draft has an f16 cache",
    "cache_type_v_draft": "the hook's draft has an f16 cache",
}


def check_hook(options: DecoderOptions, sampling: Sampling) -> None:
    """Raise UsageError if ``Llama`` with the hook does not support the options."""
    own = "leave it out, or use --engine own"
    if sampling.penalises:  # llama_cpp/llama.py, generate: its sampler is not given the prompt's tokens
        raise UsageError("Llama's penalties ignore the prompt, unlike those of our own loop", own)
    if not options.needs_draft:
        raise UsageError(f"the hook needs a draft model, and --drafter {options.drafter} has none", own)
    for name, why in _OWN_LOOP.items():
        if options.flat()[name] != DecoderOptions().flat()[name]:
            raise UsageError(f"{OPTIONS[name].flags[-1]} needs our own loop: {why}", own)


@contextlib.contextmanager
def opened(spec: TrialJob, emit: child.Emit, stopping: threading.Event) -> Iterator[trial.LoadedRun]:
    """Load the models in this process; see :func:`ggufspec.bench.trial.opened`."""
    with trial.opened(spec, emit, stopping, _engine, _WARM_UP_TOKENS) as serving:
        yield serving


def _llama(spec: TrialJob) -> Any:
    """Return a ``Llama`` with those of our options that it supports; ``flash_attn`` auto means on."""
    from ggufspec.decoding.hook import Llama  # imports llama_cpp, which the parent must not load

    options, placement = spec.options.context(with_draft=spec.draft is not None), spec.options.target
    lib = load_library()
    forget_complaints()
    try:
        return Llama(
            str(spec.target),
            n_ctx=options.ctx_size,
            n_batch=options.n_batch,
            n_ubatch=options.ubatch_size or options.n_batch,
            n_gpu_layers=placement.gpu_layers,
            tensor_split=list(placement.split) or None,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            type_k=kv_type(lib, options.cache_type_k),
            type_v=kv_type(lib, options.cache_type_v),
            flash_attn=options.flash_attn != "off",
            op_offload=options.op_offload,
            use_mmap=placement.is_mapped,
            verbose=False,
        )
    except ValueError as error:
        reason = complaints(str(error))
        raise ModelError(f"Llama cannot load {spec.target}: {reason}", context_hint(reason)) from None


@contextlib.contextmanager
def _engine(spec: TrialJob, emit: child.Emit, stopping: Callable[[], bool]) -> Iterator[trial.Engine]:  # noqa: ARG001
    from ggufspec.decoding.hook import BorrowedModel, DraftModel

    options, sampling = spec.options, spec.sampling
    same = ("draft_max", "draft_policy", "ctx_size", "threads", "flash_attn", "ubatch_size")
    with contextlib.closing(_llama(spec)) as llama:
        target = BorrowedModel(llama)
        target.gpu_layers = options.target.offloaded(target.layers)
        draft = spec.draft and DraftModel(
            spec.draft,
            llama,
            lookup="lookup" in options.drafters,
            gpu_layers=options.draft.gpu_layers,
            split=options.draft.split,
            cache=cache_folder(),
            **{name: getattr(options, name) for name in same},
        )

        def answer(_: str, prompt: list[int], request: TrialRequest) -> TrialAnswer:
            if draft:
                draft.rounds = []
            llama.reset()
            llama.set_seed(sampling.seed % 2**32)
            most = min(request.max_tokens, options.ctx_size + 1 - len(prompt))
            truncation = {name: getattr(sampling, name) for name in TRUNCATIONS}
            tokens, times = list[int](), [time.perf_counter()]
            for token in islice(llama.generate(prompt, temp=sampling.temperature, **truncation), most):
                tokens.append(token)
                times.append(time.perf_counter())
                if target.is_end(token) or stopping():
                    break
            reasons = {
                "end": target.is_end(tokens[-1]),
                "length": len(tokens) == request.max_tokens,
                "context": len(tokens) == most,
            }
            rounds, first_s, decode_s = draft.rounds if draft else [], times[1] - times[0], times[-1] - times[1]
            # Tokens of the last round; without a draft, all tokens except the first
            unreported = len(tokens) - 1 - sum(len(one.emitted) for one in rounds)
            found = Statistics.of(
                rounds,
                options.draft_max if draft else 0,
                prompt_tokens=len(prompt),
                prompt_read=len(prompt),
                prompt_s=first_s,
                tokens=len(tokens),
                decode_s=decode_s,
                verify_s=decode_s - sum(one.draft_s for one in rounds),
                stop_reason=next((reason for reason, applies in reasons.items() if applies), ""),
                time_to_first_token_s=first_s,
            )
            plain = 0 if draft else unreported
            more = plain or int(unreported > 0)
            found = replace(found, rounds=found.rounds + more, plain_rounds=found.plain_rounds + plain)
            text = b"".join(map(target.piece, tokens)).decode("utf-8", "replace")
            first = min(len(tokens), SEGMENT_TOKENS)
            start = replace(found, prompt_tokens=0, prompt_s=0.0, tokens=first, decode_s=times[first] - times[1])
            return TrialAnswer(text, tuple(tokens), found, start=start)

        yield trial.Engine(
            trial.loaded_model(target),
            trial.loaded_model(draft.model) if draft else None,
            draft.drafters if draft else (),
            draft.notes if draft else [],
            lambda prompt: target.tokenize(prompt, special=True),
            answer,
        )
