"""Evidence, part h: batch-size classes of this device, identity in strict mode, divergences in default mode."""

from __future__ import annotations

from collections.abc import Iterator

from ggufspec import child
from ggufspec.bench.prompts import PROMPTS
from ggufspec.decoding.sampling import Sampling
from ggufspec.llamacpp.options import Placement
from ggufspec.verify import certificate
from ggufspec.verify import run as verify
from lab import width_classes
from lab.evidence_documents import Agreeing, ChecksFound, ClassesFound
from lab.evidence_lab import Lab, Task
from lab.evidence_models import File
from lab.expansion import Model

_LIMIT = 16
_READ = 0.15 * (900 + 6 * _LIMIT * _LIMIT)  # cost of a comparison, in tokens decoded one at a time
_PROMPTS = (1, 3, 2, 5, 0, 4)  # indices of bundled prompts; first those with long answers in every weight type
_SAMPLING = Sampling(temperature=0.8, seed=7)


def exact_tasks(lab: Lab) -> Iterator[Task]:
    """Yield the certificate of a wholly offloaded pair, classes by file type, and the certificate half offloaded."""
    yield _checks_task(lab, 1.0, "wholly offloaded", 0)
    scale = lab.scale
    shape = scale.offloaded[-1].target.model.shape
    for number, kind in enumerate(scale.types):
        yield _classes_task(lab, File(Model(shape, kind)), 1.0, f"{kind}, all layers", min(number, 1))
    yield _classes_task(lab, File(Model(shape, scale.types[0])), 0.5, f"{scale.types[0]}, half of the layers", 1)
    yield _checks_task(lab, 0.5, "half of the target's layers offloaded", 2)


def _classes_task(lab: Lab, file: File, share: float, name: str, rank: int) -> Task:
    def run(lab: Lab) -> ClassesFound:
        header = lab.shelf.known(file).header
        placement = Placement(round(share * header.layers))
        context = lab.options(draft_max=_LIMIT - 1).context(with_draft=True)
        lab.check_room(file, placement, context)
        spec = width_classes.Spec(lab.shelf.path(file), placement, context, _LIMIT, lab.site.endpoints())
        with lab.watch():
            result = width_classes.measure(spec, verbose=lab.verbose)
        return ClassesFound(
            model=lab.placed(file, placement),
            file_type=file.model.type,
            threads=lab.threads,
            limit=_LIMIT,
            classes=tuple(map(Agreeing, result.classes)),
            strict=result.strict,
            refusal=result.refusal,
        )

    read_s = _READ * lab.rates.token_s(file, share)
    return Task("h", f"classes: {name}", rank, lab.rates.load_s(file) + read_s, run, (file,), (share, _LIMIT))


def _checks_task(lab: Lab, share: float, words: str, rank: int) -> Task:
    pair, scale = lab.scale.certified, lab.scale

    def run(lab: Lab) -> ChecksFound:
        lab.fitting(pair)
        layers = round(share * lab.shelf.known(pair.target).header.layers)
        options = lab.options(target=Placement(layers), draft=Placement(-1))
        spec = certificate.CertificateJob(
            target=lab.shelf.path(pair.target),
            draft=lab.shelf.path(pair.draft),
            options=options,
            drafters=("draft",),
            rules=("exact",),
            prompts=tuple(PROMPTS[index].text for index in _PROMPTS[: scale.checked]),
            max_tokens=scale.checked_tokens,
            sampling=_SAMPLING,
            seeds=1,
            policies=certificate.TWO_POLICIES,
            rpc=lab.site.endpoints(),
        )

        def report(event: child.Event) -> None:
            if event["event"] == "progress":
                lab.say(f"{event['done']} of {event['total']}: {event['what']}")

        with lab.watch():
            result = verify.measure_exactness(spec, on_event=report, verbose=lab.verbose)
        passed, text = certificate.certificate_verdict(result.checks, interrupted=not result.finished)
        return ChecksFound(
            target=lab.placed(pair.target, Placement(layers)),
            draft=lab.placed(pair.draft, Placement(-1)),
            checks=result.checks,
            passed=passed,
            text=text,
        )

    # Per prompt a greedy and a coupled answer, target-only and under two policies, strict and not.
    answers = scale.checked * 2 * 6
    seconds = 8 * lab.rates.load_s(pair.target, pair.draft)
    seconds += answers * (scale.checked_tokens + 60) * lab.rates.token_s(pair.target, share)
    seconds += 2 * _READ * lab.rates.token_s(pair.target, share)
    facts = (share, scale.checked, scale.checked_tokens)
    return Task("h", f"certificate: {pair.name}, {words}", rank, seconds, run, (pair.target, pair.draft), facts)
