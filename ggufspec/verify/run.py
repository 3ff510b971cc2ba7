"""Checks of a certificate, run as a job in a child process (:mod:`ggufspec.child`)."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial

from ggufspec import child
from ggufspec.bench import divergence
from ggufspec.bench.trial import LoadedModel, loaded_models
from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.options import ROWS, STRICT_IMPOSSIBLE
from ggufspec.decoding.penalties import Penalties
from ggufspec.decoding.sampling import Logits
from ggufspec.errors import ModelError
from ggufspec.files.cache import cache_folder
from ggufspec.hardware import host
from ggufspec.llamacpp import devices
from ggufspec.llamacpp.head import Head, head_sources
from ggufspec.llamacpp.model import Context, Model
from ggufspec.schema import codec
from ggufspec.schema.bench import Divergence
from ggufspec.schema.verify import CertificateCheck
from ggufspec.settings.registry import drafts_with_file, parse_drafters
from ggufspec.verify.certificate import (
    ADAPTIVE,
    DEFAULT,
    NOT_POSSIBLE,
    STRICT,
    TARGET_ONLY,
    TWO_POLICIES,
    Answers,
    CertificateAnswer,
    CertificateJob,
    CertificateRequest,
    CertifiedPolicy,
    Divergent,
    Events,
    answers_needed,
    compare_answers,
    identical_requests,
    judge_distribution,
    proposed_tokens,
    sampled_requests,
    token_events,
)

Reader = Callable[[Sequence[int], Sequence[int]], Iterator[Logits]]
"""Yields the logits (vocab,) for each token of an answer, given the prompt and the answer."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Completed checks. After a stop, ``finished`` is False and some checks are missing."""

    checks: tuple[CertificateCheck, ...]
    target: LoadedModel | None
    draft: LoadedModel | None
    notes: tuple[str, ...]
    finished: bool


class _StoppedError(Exception):
    """The parent asked the job to stop."""


def run(spec: CertificateJob, emit: child.Emit, stopping: threading.Event) -> VerifyResult:
    """Decode and judge in this process; emit ``progress`` and ``check`` events."""
    devices.add_rpc_workers(spec.rpc)
    job = _Job(spec, emit, stopping)
    try:
        if "exact" in spec.rules:
            job.strict()
            job.default()
        job.distribution()
        finished = True
    except _StoppedError:
        finished = False
    return VerifyResult(tuple(job.checks), *job.models, tuple(job.notes), finished)


def measure_exactness(spec: CertificateJob, *, on_event: child.Emit, verbose: bool = False) -> VerifyResult:
    """Decode and judge in a child process.

    Raises:
        GgufspecError: a model does not load, or llama.cpp died.
        Interrupted: Ctrl-C; its ``partial`` holds the completed checks.
    """
    seen: list[CertificateCheck] = []

    def listen(event: child.Event) -> None:
        if event["event"] == "check":
            seen.append(codec.load(CertificateCheck, event["check"]))
        on_event(event)

    try:
        return child.call(__name__, spec, VerifyResult, on_event=listen, verbose=verbose)
    except child.Interrupted as stop:  # a large model may be too slow to answer in time
        raise child.Interrupted(stop.partial or VerifyResult(tuple(seen), None, None, (), finished=False)) from None


class _Job:
    """Runner of the certificate's sections, with only one decoder at a time, because a planned pair fills the GPU."""

    def __init__(self, spec: CertificateJob, emit: child.Emit, stopping: threading.Event) -> None:
        # All answers use the same number of threads, because flash attention's order of summation depends on it.
        self.spec = replace(spec, options=replace(spec.options, threads=spec.options.threads or host.physical_cores()))
        self.checks: list[CertificateCheck] = []
        self.notes: list[str] = []
        self.models: tuple[LoadedModel | None, LoadedModel | None] = (None, None)
        self._emit, self._stopping = emit, stopping
        self._done, self._total = 0, answers_needed(spec)

    def strict(self) -> None:
        """Check that answers equal target-only's token by token, with all batch sizes from one class."""
        drafter = "all"
        try:
            alone = self._alone(identical_requests(self.spec), strict=True)
            for drafter in self.spec.drafters:
                given = {
                    policy: self._answers(identical_requests(self.spec), drafter, policy, strict=True)
                    for policy in self.spec.policies
                }
                self._add(compare_answers(STRICT, drafter, alone, given))
        except ModelError as error:
            if STRICT_IMPOSSIBLE not in error.message:
                raise
            self._add([CertificateCheck(STRICT, drafter, "exact", NOT_POSSIBLE, reason=error.message)])

    def default(self) -> None:
        """Check that answers equal target-only's or differ only at near ties."""
        requests = identical_requests(self.spec)
        alone = self._alone(requests)
        given = {
            drafter: {policy: self._answers(requests, drafter, policy) for policy in TWO_POLICIES}
            for drafter in self.spec.drafters
        }
        answers = [answer for by_policy in given.values() for some in by_policy.values() for answer in some]
        explained = self._explain(alone, answers)
        for drafter, by_policy in given.items():
            self._add(compare_answers(DEFAULT, drafter, alone, by_policy, explained))

    def _explain(self, alone: Answers, answers: Iterable[CertificateAnswer]) -> dict[Divergent, Divergence]:
        """Explain every distinct divergence from target-only."""
        cases: dict[Divergent, divergence.DivergenceCase] = {}
        for answer in answers:
            request, expected = answer.request, alone[answer.request]
            at = divergence.first_difference(expected, answer.tokens)
            if at < min(len(expected), len(answer.tokens)):
                prompt, begun = self.spec.prompts[request.prompt], answer.tokens[: at + 1]
                cases[request, begun] = divergence.DivergenceCase(len(cases), prompt, expected, begun, request.sampling)
        if not cases:
            return {}
        self._progress("measuring the noise between batch sizes")
        spec = divergence.DivergenceJob(
            self.spec.target, self.spec.options, tuple(cases.values())
        )  # the RPC workers have already been added
        found = divergence.run(spec, self._emit, self._stopping)
        if self._stopping.is_set():
            raise _StoppedError
        return dict(zip(cases, found, strict=True))

    def distribution(self) -> None:
        """Compare the residual rule's samples with the target's own probabilities; target-only is the control."""
        legs: dict[tuple[str, str], dict[CertifiedPolicy | None, list[CertificateAnswer]]] = {}
        if "exact" in self.spec.rules:
            legs[TARGET_ONLY, "coupled"] = {None: self._answers(sampled_requests(self.spec, 0), None)}
        if "residual" in self.spec.rules:
            for drafter in self.spec.drafters:
                legs[drafter, "residual"] = {
                    policy: self._answers(sampled_requests(self.spec, 1 + number), drafter, policy, accept="residual")
                    for number, policy in enumerate(TWO_POLICIES)
                }
        with ExitStack() as stack:
            target, readers = self._readers(stack)
            for (drafter, rule), by_policy in legs.items():
                self._progress(f"scoring: {drafter}, {rule}")
                answers = [answer for some in by_policy.values() for answer in some]
                events = self._read(target, readers, answers)
                drafted = [policy for policy, some in by_policy.items() if any(answer.drafted for answer in some)]
                policies = tuple(str(policy) for policy in drafted or by_policy if policy)
                self._add([judge_distribution(drafter, rule, policies, answers, events, tests=len(legs))])

    def _readers(self, stack: ExitStack) -> tuple[Model, list[Reader]]:
        """Return the target and readers of logits: the target's, and the draft's or head's, which shows faults best."""
        spec, options = self.spec, self.spec.options
        own = options.head == "mtp" and spec.draft in (None, spec.target)
        target = stack.enter_context(Model(spec.target, replace(options.target, mtp=own)))
        draft = target if own else None
        if spec.draft is not None and not own:
            draft = stack.enter_context(Model(spec.draft, options.draft_placement))
        sources = head_sources(draft) if draft and options.head else ()
        wanted = replace(options.context(with_draft=True), hidden=sources)
        context = stack.enter_context(closing(Context(target, wanted)))
        readers: list[Reader] = [partial(_rows, context)]
        if draft and options.head:
            head = stack.enter_context(closing(Head(draft, context, options.draft_context())))
            if not head.shares_cache:  # a head on the target's cache can decode only at the end of its text
                readers.append(partial(_head_rows, HeadDrafter(head, context, options.head), context))
        elif draft:
            readers.append(partial(_rows, stack.enter_context(closing(Context(draft, options.draft_context())))))
        return target, readers

    def _read(self, target: Model, readers: Sequence[Reader], answers: Iterable[CertificateAnswer]) -> Events:
        events: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        for answer in answers:
            prompt = target.tokenize(self.spec.prompts[answer.request.prompt])
            rows = zip(*(read(prompt, answer.tokens) for read in readers), strict=True)
            penalties = Penalties(answer.request.sampling)
            penalties.follow(0, (*prompt, *answer.tokens))
            for index, views in enumerate(rows):
                for view in views:
                    penalties.apply(view, len(prompt) + index)
                proposed = answer.proposed.get(index)
                for name, event in token_events(views, answer.tokens[index], answer.request.sampling, proposed).items():
                    events[name].append(event)
            if self._stopping.is_set():
                raise _StoppedError
        return events

    def _alone(self, requests: Sequence[CertificateRequest], *, strict: bool = False) -> Answers:
        return {answer.request: answer.tokens for answer in self._answers(requests, None, strict=strict)}

    def _answers(
        self,
        requests: Sequence[CertificateRequest],
        drafter: str | None,
        policy: CertifiedPolicy = ADAPTIVE,
        *,
        strict: bool = False,
        accept: str = "exact",
    ) -> list[CertificateAnswer]:
        """Return the answers of one drafter under one policy, or target-only ones from a decoder without drafters."""
        spec = self.spec
        own = spec.draft if drafter and drafts_with_file(drafter) else None
        options = replace(
            spec.options,
            drafters=parse_drafters(drafter or "both"),  # without a draft file, as with --no-draft
            draft_policy=policy.name,
            draft_max=policy.draft_max,
            strict=strict,
            accept=accept,
        )
        what = f"{'strict' if strict else accept if accept != 'exact' else 'default'}: " + (
            f"{drafter}, {policy}" if drafter else TARGET_ONLY
        )
        self._progress(what)
        with SpeculativeDecoder(spec.target, own, options, cache=cache_folder()) as decoder:
            target, draft = loaded_models(decoder)
            self.models = (target, draft or self.models[1])
            answers = []
            for request in requests:
                answers.append(self._answer(decoder, request, alone="" if drafter else "target"))
                self._done += 1
                self._progress(what)
            if drafter and not any(answer.drafted for answer in answers):  # perhaps because drafting does not pay off
                self.notes.append(f"{what}: not one token was drafted, so it is not counted")
                self.notes += decoder.notes if policy is not ADAPTIVE else ()
        return answers

    def _answer(self, decoder: SpeculativeDecoder, request: CertificateRequest, *, alone: str) -> CertificateAnswer:
        tokens = []
        for emitted in decoder.generate(
            self.spec.prompts[request.prompt],
            max_tokens=self.spec.max_tokens,
            sampling=request.sampling,
            alone=alone,
        ):
            tokens.append(emitted.token)
            if self._stopping.is_set():
                raise _StoppedError
        found = decoder.statistics
        assert found is not None
        return CertificateAnswer(request, tuple(tokens), found.drafted, found.accepted, proposed_tokens(decoder.rounds))

    def _progress(self, what: str) -> None:
        if self._stopping.is_set():
            raise _StoppedError
        self._emit({"event": "progress", "done": self._done, "total": self._total, "what": what})

    def _add(self, checks: Iterable[CertificateCheck]) -> None:
        for check in checks:
            self.checks.append(check)
            self._emit({"event": "check", "check": asdict(check)})


def _rows(context: Context, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Logits]:
    """Yield a model's logits (vocab,) for each token of an answer. Unknown tokens are replaced by token 0."""
    text = [token if token < context.vocab_size else 0 for token in (*prompt, *answer[:-1])]
    start = len(prompt) - 1
    context.rewind(0)
    if start:
        context.decode(text[:start], 0)
    for first in range(start, len(text), context.max_outputs):
        batch = text[first : first + context.max_outputs]
        yield from context.decode(batch, len(batch)).copy()


def _head_rows(drafter: HeadDrafter, target: Context, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Logits]:
    """Yield a head's logits (vocab,) for each token of an answer; the target's reader must be ahead of this one."""
    text, first = (*prompt, *answer[:-1]), len(prompt) - 1
    drafter.begin(prompt)
    drafter.read(text[:first], 0)
    while first < len(text):
        last = min(first + ROWS, target.length + 1, len(text))
        yield from drafter.read(text[:last], last - first).copy()
        first = last
