"""Evidence, parts d, e and f: variants of running, pairs against target-only and against llama.cpp's own program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ggufspec.api.resolve import with_placement
from ggufspec.bench.prompts import PROMPTS
from ggufspec.bench.statistics import paired_ratios, spread
from ggufspec.chat import session
from ggufspec.child import Session
from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.llamacpp.options import Placement
from ggufspec.prompting.conversation import Conversation
from ggufspec.settings.registry import parse_drafters
from lab import peers
from lab.evidence_documents import Row, Way, WayResult, WaysFound
from lab.evidence_lab import Lab, Task
from lab.evidence_models import HOPELESS, File, Pair
from lab.expansion import SHAPES

OWN_BEST = "target-only at its own best placement"
TARGET_ONLY = "target-only"
ADAPTIVE = "speculative, adaptive"
_WARM_UP_TOKENS = 4


# ---- parts d, e and f: variants ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with loaded models: ``alone`` as in a :class:`session.ChatRequest`."""

    name: str
    alone: str = ""
    drafter: str | None = None
    policy: str | None = None
    draft_max: int | None = None


def fixed(length: int) -> Run:
    """Return the variant with the draft model and a fixed draft length."""
    return Run(f"speculative, {length} drafted", "", "draft", "fixed", length)


def notebook_tasks(lab: Lab) -> Iterator[Task]:
    """Yield part d: the notebook's own target-only run, the best one, and the pair, in turn."""
    scale, pair = lab.scale, lab.scale.notebook
    count = round(scale.notebook_layers * (SHAPES[pair.target.model.shape].layers + 1))
    share = scale.notebook_layers
    answer_s = scale.notebook_tokens * len(scale.prompts) * lab.rates.token_s(pair.target, share)
    runs = (*(fixed(length) for length in scale.lengths), Run(ADAPTIVE))

    def job(repetition: int, **more: Any) -> _Job:
        return _Job(pair, scale.notebook_tokens, repetition, ceiling=lab.pair_ceiling(pair), **more)

    for repetition in range(scale.repetitions):

        def as_notebook(lab: Lab, repetition: int = repetition) -> WaysFound:
            options = lab.options(target=Placement(count), drafters=())
            lab.check_room(pair.target, options.target, options.context(with_draft=False))
            runs = (Run(f"{TARGET_ONLY} at {count} layers", "target"),)
            return _ask(lab, job(repetition, options=options, runs=runs))

        def at_best(lab: Lab, repetition: int = repetition) -> WaysFound:
            option = lab.plan(pair, lab.pair_ceiling(pair)).target_only
            options = replace(with_placement(lab.options(), option), drafters=())
            predicted = None if lab.is_remote else option.tokens_per_s
            runs = (Run(OWN_BEST, "target"),)
            return _ask(lab, job(repetition, options=options, runs=runs, predicted=predicted))

        def together(lab: Lab, repetition: int = repetition) -> WaysFound:
            option = lab.plan(pair, lab.pair_ceiling(pair)).pair
            if option is None or option.draft is None:
                raise GgufspecError(f"the draft of {pair.name} does not fit beside its target", "more --vram")
            most = max(*scale.lengths, DecoderOptions().draft_max)
            options = with_placement(lab.options(), option, draft_max=most)
            predicted = None if lab.is_remote else option.tokens_per_s
            turned = _turned(runs, repetition)
            return _ask(lab, job(repetition, draft=pair.draft, options=options, runs=turned, predicted=predicted))

        load_s = lab.rates.load_s(pair.target)
        asked = (scale.notebook_tokens, scale.prompts, repetition)
        files = (pair.target, pair.draft)  # both are in the plan and in the ceiling
        name = f"{TARGET_ONLY} at {count} layers, {repetition + 1}"
        yield Task("d", name, repetition, load_s + answer_s, as_notebook, files, asked)
        yield Task("d", f"{OWN_BEST}, {repetition + 1}", repetition, load_s + answer_s, at_best, files, asked)
        draft_s = sum(scale.lengths) * scale.notebook_tokens / 2 * lab.rates.token_s(pair.draft)
        pair_s = lab.rates.load_s(pair.target, pair.draft) + len(runs) * answer_s + draft_s
        facts = (*asked, scale.lengths)
        yield Task("d", f"the pair, {repetition + 1}", repetition, pair_s, together, files, facts)


def offloaded_tasks(lab: Lab) -> Iterator[Task]:
    """Yield part e: ours and llama.cpp's own program, in turn."""
    scale = lab.scale
    runs = (Run(TARGET_ONLY, "target"), *(fixed(length) for length in scale.peer_lengths), Run(ADAPTIVE))
    for repetition in range(scale.repetitions):
        for number, pair in enumerate(reversed(scale.offloaded)):
            rank = repetition + number
            yield _pair_of(lab, "e", pair, runs, repetition, rank)
            yield _peers_of(lab, pair, repetition, rank)


def hopeless_tasks(lab: Lab) -> Iterator[Task]:
    """Yield part f: a draft that is never right, by default and with a fixed draft length."""
    scale = lab.scale
    own = scale.offloaded[-1]
    pair = replace(own, name=f"{own.name}, hopeless", draft=File(own.draft.model, HOPELESS))
    runs = (
        Run(TARGET_ONLY, "target"),
        Run(ADAPTIVE),
        Run("speculative without the lookup, adaptive", "", "draft"),
        fixed(4),
    )
    for repetition in range(scale.repetitions):
        yield _pair_of(lab, "f", pair, runs, repetition, repetition)


def _pair_of(lab: Lab, part: str, pair: Pair, runs: tuple[Run, ...], repetition: int, rank: int) -> Task:
    scale = lab.scale

    def run(lab: Lab) -> WaysFound:
        lab.fitting(pair)
        options = lab.options(target=Placement(-1), draft=Placement(-1))
        turned = _turned(runs, repetition)
        return _ask(lab, _Job(pair, scale.tokens, repetition, draft=pair.draft, options=options, runs=turned))

    answer_s = scale.tokens * len(scale.prompts) * lab.rates.token_s(pair.target)
    draft_s = sum(one.draft_max or 4 for one in runs) * scale.tokens / 2 * lab.rates.token_s(pair.draft)
    seconds = lab.rates.load_s(pair.target, pair.draft) + len(runs) * answer_s + draft_s
    name = f"{pair.name}: ours, {repetition + 1}"
    facts = (scale.tokens, scale.prompts, repetition, tuple(asdict(one) for one in runs))
    return Task(part, name, rank, seconds, run, (pair.target, pair.draft), facts)


def _peers_of(lab: Lab, pair: Pair, repetition: int, rank: int) -> Task:
    scale = lab.scale

    def run(lab: Lab) -> WaysFound:
        program = peers.find(lab.peers)
        lab.fitting(pair)
        results = {}
        with lab.watch():
            for length in _turned(scale.peer_lengths, repetition):
                name = f"{peers.PROGRAM}, {length} drafted"
                lab.say(name)
                answers = [
                    peers.answer(
                        program,
                        lab.shelf.path(pair.target),
                        lab.shelf.path(pair.draft),
                        PROMPTS[prompt].text,
                        tokens=scale.tokens,
                        draft_max=length,
                        threads=lab.threads,
                        ctx_size=scale.ctx_size,
                        rpc=lab.site.endpoints(),
                    )
                    for prompt in scale.prompts
                ]
                results[name] = WayResult(
                    tokens=sum(one.tokens for one in answers),
                    seconds=sum(one.seconds for one in answers),
                    drafted=sum(one.drafted for one in answers),
                    accepted=sum(one.accepted for one in answers),
                )
        everything = Placement(-1)
        target, draft = (lab.placed(file, everything) for file in (pair.target, pair.draft))
        return WaysFound(pair.name, repetition, target, draft, scale.ctx_size, 0, results)

    once_s = lab.rates.load_s(pair.target, pair.draft) + scale.tokens * lab.rates.token_s(pair.target)
    seconds = len(scale.peer_lengths) * len(scale.prompts) * once_s
    name = f"{pair.name}: {peers.PROGRAM}, {repetition + 1}"
    return Task("e", name, rank, seconds, run, (pair.target, pair.draft), (scale.peer_lengths, repetition))


def _turned(things: Sequence[Any], by: int) -> tuple[Any, ...]:
    """Rotate, so that each repetition starts with another one."""
    first = by % len(things)
    return (*things[first:], *things[:first])


@dataclass(frozen=True, slots=True)
class _Job:
    """Variants to time with the same models loaded, in a separate process.

    Args:
        pair: pair with the target.
        tokens: tokens of an answer.
        repetition: from 0.
        options: placements and all others.
        runs: variants in this order.
        draft: the draft; None: target-only.
        ceiling: memory limit of the device; None: its own.
        predicted: the planner's tokens/s.
    """

    pair: Pair
    tokens: int
    repetition: int
    options: DecoderOptions
    runs: Sequence[Run]
    draft: File | None = None
    ceiling: int | None = None
    predicted: float | None = None


def _ask(lab: Lab, job: _Job) -> WaysFound:
    pair, draft, options, prompts = job.pair, job.draft, job.options, lab.scale.prompts
    target_path, draft_path = lab.shelf.path(pair.target), lab.shelf.path(draft) if draft else None
    results, depths = {}, []
    with lab.watch(job.ceiling), Session(verbose=lab.verbose) as child:
        spec = session.ChatJob(target_path, draft_path, options, lab.site.endpoints())
        lab.say("loading")
        child.open(session.__name__, spec, session.ChatReady)
        for run in job.runs:
            lab.say(run.name)
            child.ask(_request(run, options, PROMPTS[prompts[0]].text, _WARM_UP_TOKENS), session.ChatReply)
            replies = [
                child.ask(_request(run, options, PROMPTS[prompt].text, job.tokens), session.ChatReply)
                for prompt in prompts
            ]
            statistics = [reply.statistics for reply in replies if reply.statistics]
            if 2 * sum(one.tokens for one in statistics) < job.tokens * len(prompts):
                raise ModelError(f"{run.name}: the answers end after {statistics[0].tokens} tokens, too few to time")
            depths += [one.prompt_tokens + one.tokens // 2 for one in statistics]
            results[run.name] = WayResult(
                tokens=sum(one.decoded for one in statistics),
                seconds=sum(one.decode_s for one in statistics),
                rounds=sum(one.rounds for one in statistics),
                drafted=sum(one.drafted for one in statistics),
                accepted=sum(one.accepted for one in statistics),
                plain_rounds=sum(one.plain_rounds for one in statistics),
                draft_s=sum(one.draft_s for one in statistics),
                verify_s=sum(one.verify_s for one in statistics),
            )
    return WaysFound(
        pair=pair.name,
        repetition=job.repetition,
        target=lab.placed(pair.target, options.target),
        draft=lab.placed(draft, options.draft_placement) if draft else None,
        ctx_size=options.ctx_size,
        depth=round(sum(depths) / len(depths)),
        results=results,
        predicted=job.predicted,
    )


def _request(run: Run, loaded: DecoderOptions, prompt: str, tokens: int) -> session.ChatRequest:
    options = replace(
        loaded,
        drafters=loaded.drafters if run.drafter is None else parse_drafters(run.drafter),
        draft_policy=run.policy or loaded.draft_policy,
        draft_max=run.draft_max or loaded.draft_max,
    )
    return session.ChatRequest(
        Conversation().ask(prompt), chat=False, alone=run.alone, options=options, max_tokens=tokens, cache=False
    )


# ---- over all repetitions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sample:
    found: WaysFound
    result: WayResult


def ways(rows: Iterable[Row[WaysFound]]) -> tuple[Way, ...]:
    """Summarise every variant over its repetitions, and compare it with target-only and llama.cpp's program. Pure.

    Ratios are within a repetition, in which both were measured within a short time. The rival is target-only at its own
    best placement if that was run, and the program at its best draft length over all repetitions.
    """
    groups: dict[tuple[str, str, int, int | None], dict[int, _Sample]] = {}
    for row in rows:
        if row.state != "done" or row.found is None:
            continue
        found = row.found
        for name, result in found.results.items():
            key = (found.pair, name, found.target.gpu_layers, found.draft.gpu_layers if found.draft else None)
            groups.setdefault(key, {})[found.repetition] = _Sample(found, result)
    made = []
    for (pair, name, gpu_layers, draft_layers), samples in groups.items():
        rival = _rival(groups, pair, (OWN_BEST, TARGET_ONLY), name)
        peer = _best_peer(groups, pair) if not name.startswith(peers.PROGRAM) else None
        every = [sample.result for sample in samples.values()]
        drafted, rounds = sum(result.drafted for result in every), sum(result.rounds for result in every)
        first = next(iter(samples.values())).found
        made.append(
            Way(
                pair=pair,
                name=name,
                gpu_layers=gpu_layers,
                layers=first.target.layers,
                gpu_layers_draft=draft_layers,
                tokens_per_s=spread([result.tokens_per_s for result in every]),
                acceptance_rate=sum(result.accepted for result in every) / drafted if drafted else None,
                tokens_per_round=sum(result.tokens for result in every) / rounds if rounds and drafted else None,
                over_target_only=_over(samples, rival),
                over_peer=_over(samples, peer),
            )
        )
    return tuple(made)


_Samples = dict[int, _Sample]
_Groups = dict[tuple[str, str, int, int | None], _Samples]


def _rival(groups: _Groups, pair: str, names: Sequence[str], own: str) -> _Samples | None:
    """Return the first named variant that was run, at its placement with most repetitions; None for itself."""
    for name in names:
        found = [samples for key, samples in groups.items() if key[:2] == (pair, name)]
        if found:
            return None if name == own else max(found, key=len)
    return None


def _best_peer(groups: _Groups, pair: str) -> _Samples | None:
    found = [samples for key, samples in groups.items() if key[0] == pair and key[1].startswith(peers.PROGRAM)]
    return max(found, key=lambda samples: median(one.result.tokens_per_s for one in samples.values()), default=None)


def _over(samples: _Samples, rival: _Samples | None) -> Any:
    both = sorted(samples.keys() & rival.keys()) if rival else []
    if not rival or not both:
        return None
    return paired_ratios(*([of[i].result.tokens_per_s for i in both] for of in (samples, rival)))
