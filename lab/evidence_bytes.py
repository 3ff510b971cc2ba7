"""Evidence, parts a and b: memory of placements on the device, and the largest placement that loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ggufspec.bench import batch_timing
from ggufspec.errors import GgufspecError, ModelError
from ggufspec.llamacpp.options import ContextOptions, Placement
from ggufspec.planning.memory import DeviceBytes
from lab.evidence_documents import BytesFound, LargestFound, Sizes, Tried
from lab.evidence_lab import Lab, Task
from lab.evidence_models import SCALES, File, Pair

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_KV = ("f16", "q8_0")
_QUICK_S = 1.0  # after which a batch size is timed only the minimum number of times
_FULL_SHARE = 0.9  # share of a GPU's memory: a placement that fails below it does not fail for lack of memory


@dataclass(frozen=True, slots=True)
class _Model:
    """A file, how many of its layers are on the device, and its context."""

    file: File
    placement: Placement
    context: ContextOptions


# ---- part a ----------------------------------------------------------------------------------------------------------


def bytes_tasks(lab: Lab) -> Iterator[Task]:
    """Yield tasks for dense at five placements and two cache types, a mixture of experts, and pairs loaded together."""
    scale = lab.scale
    pair = scale.offloaded[-1]
    dense = pair.target

    def alone(kind: str, file: File, share: float, kv: str, rank: int, name: str) -> Task:
        def run(lab: Lab) -> BytesFound:
            layers = round(share * lab.shelf.known(file).header.layers)
            context = lab.options(cache_type_k=kv, cache_type_v=kv).context(with_draft=True)
            lab.check_room(file, Placement(layers), context)
            return _taken(lab, kind, (_Model(file, Placement(layers), context),))

        expected_s = lab.rates.load_s(file) + (lab.rates.reading * scale.depth + 16) * lab.rates.token_s(file, share)
        return Task("a", name, rank, expected_s, run, (file,), (kind, share, kv))

    if not lab.is_remote and scale.name == "full":  # a small pair: later plans use its overhead
        yield _pair_task(lab, SCALES["small"].notebook, -1, "what the driver takes for a pair, a small one")
    # One model shows the driver's overhead per process; the pair shows that of a second model.
    yield alone("dense", dense, 1.0, "f16", 0, "dense, all layers, f16 cache")
    yield _pair_task(lab, pair, 0)
    yield _planned_task(lab, scale.notebook, 0)
    yield alone("moe", scale.moe, 0.5, "f16", 1, "experts, half of the layers, f16 cache")
    yield alone("moe", scale.moe, 1.0, "f16", 1, "experts, all layers, f16 cache")
    for kv in _KV:
        for share in _SHARES:
            if (share, kv) != (1.0, "f16"):
                name = f"dense, {_words(share)}, {kv} cache"
                yield alone("dense", dense, share, kv, 1 if kv == "f16" or share == 1.0 else 2, name)
    for kv in _KV:
        for share in _SHARES:
            if kv == "q8_0" or share not in (0.5, 1.0):
                yield alone("moe", scale.moe, share, kv, 2, f"experts, {_words(share)}, {kv} cache")


def _words(share: float) -> str:
    names = {1.0: "all layers", 0.75: "¾ of the layers", 0.5: "half of the layers", 0.25: "¼ of the layers"}
    return names.get(share, "no layers")


def _pair_task(lab: Lab, pair: Pair, rank: int, name: str = "") -> Task:
    def run(lab: Lab) -> BytesFound:
        options = lab.options()
        lab.fitting(pair)
        return _taken(
            lab,
            "pair",
            (
                _Model(pair.target, Placement(-1), options.context(with_draft=True)),
                _Model(pair.draft, Placement(-1), options.draft_context()),
            ),
        )

    seconds = lab.rates.load_s(pair.target, pair.draft)
    seconds += (lab.rates.reading * lab.scale.depth + 16) * (
        lab.rates.token_s(pair.target) + lab.rates.token_s(pair.draft)
    )
    name = name or f"pair {pair.name} together, all layers"
    return Task("a", name, rank, seconds, run, (pair.target, pair.draft))


def _planned_task(lab: Lab, pair: Pair, rank: int) -> Task:
    def run(lab: Lab) -> BytesFound:
        ceiling = lab.pair_ceiling(pair)
        plan = lab.plan(pair, ceiling)
        option = plan.pair
        if option is None or option.draft is None or plan.request.draft is None:
            raise GgufspecError(f"the draft of {pair.name} does not fit beside its target", "give more with --vram")
        return _taken(
            lab,
            "pair",
            (
                _Model(pair.target, option.target, option.context),
                _Model(pair.draft, option.draft, plan.request.draft.context),
            ),
            ceiling,
        )

    share = lab.scale.notebook_layers
    seconds = lab.rates.load_s(pair.target, pair.draft)
    seconds += (lab.rates.reading * lab.scale.depth + 16) * (
        lab.rates.token_s(pair.target, share) + lab.rates.token_s(pair.draft)
    )
    return Task("a", f"pair {pair.name} where the planner puts it", rank, seconds, run, (pair.target, pair.draft))


def _taken(lab: Lab, kind: str, models: Sequence[_Model], ceiling_bytes: int | None = None) -> BytesFound:
    """Load models together, read a text, and compare the memory with the prediction."""
    device = lab.site.card.name
    requests = [lab.request(model.file, model.placement, model.context) for model in models]
    estimates = [lab.estimate(request) for request in requests]
    dry = lab.dry_run(requests)
    refused = next((answer for answer in dry if isinstance(answer, str)), None)
    if refused is not None:
        raise ModelError(f"llama.cpp refuses it: {refused}")
    overhead_bytes = lab.overhead_bytes
    lab.site.renew()
    with lab.watch(ceiling_bytes) as meter:
        result = _load(lab, models)
        rise = meter.rise_bytes
    allocated = [part.bytes.get(device, {}) for part in result.parts]
    truth = Sizes(*(sum(one.get(what, 0) for one in allocated) for what in ("weights", "kv", "compute")))
    counted = None if rise is None else max(rise, 0 if lab.is_remote else result.vram_bytes)
    if counted is not None and truth.total:
        lab.learn_overhead(counted - truth.total)
    context = models[0].context
    return BytesFound(
        kind=kind,
        models=tuple(lab.placed(model.file, model.placement) for model in models),
        ctx_size=context.ctx_size,
        cache_type_k=context.cache_type_k,
        cache_type_v=context.cache_type_v,
        estimate=_sizes(estimates),
        dry=_sizes([answer[device] for answer in dry if not isinstance(answer, str)]),
        allocated=truth,
        overhead_bytes=overhead_bytes if truth.total else 0,
        device_bytes=counted,
        tokens_per_s=tuple(1 / median(part.seconds[1]) for part in result.parts),
        depth=min(part.depth for part in result.parts),
    )


def _sizes(parts: Sequence[DeviceBytes]) -> Sizes:
    return Sizes(*(sum(getattr(part, what) for part in parts) for what in ("weights", "kv", "compute")))


def _load(lab: Lab, models: Sequence[_Model]) -> batch_timing.BatchTimingResult:
    """Load models in one child process, read a text and time one token."""
    parts = tuple(
        batch_timing.ModelToTime(lab.shelf.path(model.file), model.placement, model.context, (1,)) for model in models
    )
    spec = batch_timing.BatchTimingJob(parts, lab.scale.depth, seconds=_QUICK_S, rpc=lab.site.endpoints())

    def report(event: dict[str, object]) -> None:
        lab.say(f"{event['event']} {event.get('file', '')}".strip())

    return batch_timing.time_batches(spec, on_event=report, verbose=lab.verbose)


# ---- part b ----------------------------------------------------------------------------------------------------------


def largest_tasks(lab: Lab) -> Iterator[Task]:
    """Yield tasks for target-only, and with the draft, under a ceiling that holds only part of the target."""
    pair = lab.scale.notebook
    for with_draft, name in ((False, "target-only"), (True, "beside its draft")):
        files = (pair.target, pair.draft) if with_draft else (pair.target,)
        tokens = lab.rates.reading * lab.scale.depth + 16
        once_s = lab.rates.load_s(*files) + tokens * lab.rates.token_s(pair.target, lab.scale.notebook_layers)

        def run(lab: Lab, with_draft: bool = with_draft) -> LargestFound:
            return _largest(lab, pair, with_draft=with_draft)

        yield Task("b", name, int(with_draft), 3 * once_s, run, files, (with_draft,))


def _largest(lab: Lab, pair: Pair, *, with_draft: bool) -> LargestFound:
    ceiling = lab.pair_ceiling(pair)
    plan = lab.plan(pair, ceiling)
    option = plan.pair if with_draft else plan.target_only
    if option is None:
        raise GgufspecError(f"the draft of {pair.name} does not fit beside its target", "give more with --vram")
    header = lab.shelf.known(pair.target).header
    planned = option.target.offloaded(header.blocks)
    beside = []
    if option.draft is not None and plan.request.draft is not None:
        beside.append(_Model(pair.draft, option.draft, plan.request.draft.context))
    tried: list[Tried] = []

    def fits(layers: int) -> bool:
        target = _Model(pair.target, replace(option.target, gpu_layers=layers), option.context)
        tried.append(_try(lab, ceiling, layers, [target, *beside]))
        return tried[-1].fits

    found = largest(fits, planned, header.layers)
    if found is None:
        raise GgufspecError(f"not even the buffers fit: {tried[-1].why}", "give more with --vram")
    return LargestFound(
        target=lab.placed(pair.target, option.target),
        draft=lab.placed(pair.draft, option.draft) if option.draft is not None else None,
        ctx_size=option.context.ctx_size,
        ceiling_bytes=ceiling,
        planned=planned,
        largest=found,
        tried=tuple(tried),
    )


def _try(lab: Lab, ceiling: int, layers: int, models: Sequence[_Model]) -> Tried:
    """Load models for real: return whether it works, and the memory. For an RPC worker that is llama.cpp's own count.

    Raises:
        GgufspecError: it fails although the GPU has enough memory.
    """
    device = lab.site.card.name
    lab.say(f"trying {layers} layers")
    with lab.watch(0) as meter:
        try:
            result = _load(lab, models)
        except GgufspecError as error:
            if ceiling < _FULL_SHARE * lab.site.card.total_bytes:
                raise
            return Tried(layers, False, None, error.message)
        rise = meter.rise_bytes
    counted = sum(sum(part.bytes.get(device, {}).values()) for part in result.parts)
    used = counted if rise is None or lab.is_remote else max(rise, counted, result.vram_bytes)
    return Tried(layers, used <= ceiling, used, "" if used <= ceiling else "over the ceiling")


def largest(fits: Callable[[int], bool], guess: int, most: int) -> int | None:
    """Return the largest number from 0 to ``most`` that fits, None if not even 0 does; tries each at most once.

    Args:
        fits: returns True if a number fits; then all smaller ones do.
        guess: where to begin; near the result it takes two tries.
        most: the largest number.
    """
    low, high = -1, most + 1  # the largest known to fit, the smallest known not to
    step, at = 1, min(max(guess, 0), most)
    while high - low > 1:
        if fits(at):
            low = at
            at = min(low + step, high - 1) if high > most else (low + high) // 2
        else:
            high = at
            at = max(high - step, low + 1) if low < 0 else (low + high) // 2
        step *= 2
    return low if low >= 0 else None
