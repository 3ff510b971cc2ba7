"""Certificate document, including the model files that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ggufspec.bench.summary import machine_and_versions
from ggufspec.bench.trial import LoadedModel
from ggufspec.errors import ModelError
from ggufspec.hardware.host import physical_cores
from ggufspec.models.locate import part_names
from ggufspec.models.profile import Pair
from ggufspec.schema.verify import VerifyDocument
from ggufspec.verify.certificate import FALSE_ALARM, TWO_POLICIES, CertificateJob, certificate_verdict
from ggufspec.verify.run import VerifyResult

Files = dict[str, list[dict[str, object]]]  # name, size and SHA-256 of every file, by model


def certified_files(spec: CertificateJob, progress: Callable[[int, int, str], None], *, no_hash: bool) -> Files:
    """Return a pair's files, each with its hash unless ``no_hash``; hashing reads them in full.

    Raises:
        ModelError: a file cannot be read.
    """
    parts = [
        (role, path.with_name(name))
        for role, path in (("target", spec.target), ("draft", spec.draft))
        if path is not None
        for name in part_names(path.name)
    ]
    found: Files = {role: [] for role, _ in parts}
    for number, (role, path) in enumerate(parts):
        progress(number, len(parts), f"SHA-256 of {path.name}")
        try:
            with path.open("rb") as file:
                sha256 = None if no_hash else hashlib.file_digest(file, "sha256").hexdigest()
            found[role].append({"name": path.name, "size_bytes": path.stat().st_size, "sha256": sha256})
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}", "ls -l the model's folder") from None
    return found


def verify_document(pair: Pair, spec: CertificateJob, result: VerifyResult, files: Files) -> VerifyDocument:
    """Make the document: what was checked, and whether the certificate is granted."""

    def described(role: str, path: Path | None, model: LoadedModel | None) -> dict[str, object] | None:
        if path is None:
            return None
        return {"file": str(path), "files": files[role]} | (asdict(model) if model else {})

    varied = ("drafters", "draft_policy", "draft_max", "lookup_corpus", "accept", "strict")
    placement = {key: value for key, value in spec.options.flat().items() if key not in varied}
    passed, verdict = certificate_verdict(result.checks, interrupted=not result.finished)
    return VerifyDocument(
        pair=pair.describe(),
        models={
            "target": described("target", spec.target, result.target),
            "draft": described("draft", spec.draft, result.draft),
        },
        machine=machine_and_versions(),
        settings=placement
        | asdict(spec.sampling)
        | {
            "threads": spec.options.threads or physical_cores(),
            "rpc": spec.rpc,
            "prompts": len(spec.prompts),
            "max_tokens": spec.max_tokens,
            "seeds": spec.seeds,
            "drafters": spec.drafters,
            "rules": spec.rules,
            "policies": {"strict": list(map(str, spec.policies)), "default": list(map(str, TWO_POLICIES))},
            "false_alarm": FALSE_ALARM,
        },
        checks=result.checks,
        passed=passed,
        verdict=verdict,
        notes=result.notes,
        interrupted=not result.finished,
    )
