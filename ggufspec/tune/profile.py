"""The profile that ``ggufspec tune`` writes: its name, what it is made from, the setting that won."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ggufspec.errors import GgufspecError, UsageError

if TYPE_CHECKING:
    from ggufspec.cli import given
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.models.profile import Pair
    from ggufspec.schema.tune import TuneDocument, TunedSetting

_FEWEST = 3  # trials side by side, for an interval to say something


def name_of(save: str | None, files: given.Files, chosen: Pair) -> str:
    """The profile to write: the one that was tuned; of other files, a new one.

    Raises:
        UsageError: ``--save`` is no name, or PAIR no profile.
    """
    from ggufspec.files import file_name
    from ggufspec.models.profile import find, is_name

    if save is not None:
        if not is_name(save) or save.endswith((".toml", ".gguf")):
            raise UsageError(f"{save!r} is not a profile name", "--save my-pair")
        return save
    if _of_files(files):
        return file_name(chosen.target.stem)
    name = find(files.pair or "demo").stem
    return f"{name}-{file_name(chosen.draft.stem)}" if chosen.draft is not None and _own_draft(files) else name


def prepare(name: str, files: given.Files, chosen: Pair) -> Path | None:
    """Find out before the search whether its winner can be written, and what it is written into.

    Returns:
        the profile whose other keys are kept: the one that has the name, else the one that is tuned; None for a new
        one.

    Raises:
        GgufspecError: the name is another pair's, or the file cannot be written.
    """
    from ggufspec.files import check_writable
    from ggufspec.models.profile import find
    from ggufspec.tune.profile_file import models_of

    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GgufspecError(
            f"{path} cannot be written: {error.strerror}", "--no-save leaves the profile away"
        ) from None
    check_writable(path)
    new = _of_files(files) or (chosen.draft is not None and _own_draft(files))
    made_from = None if new else find(files.pair or "demo")
    if not path.exists():
        return made_from
    here = (("target", chosen.target), ("draft", chosen.draft))
    wanted: dict[str, tuple[str | None, str]] = {role: (None, str(p.absolute())) for role, p in here if p}
    if made_from:
        wanted = models_of(made_from)
    there = models_of(path)
    if any(there.get(role) != model for role, model in wanted.items()):
        raise UsageError(f"{path} is the profile of another pair", "--save OTHER-NAME, or --no-save")
    return path


def save(
    document: TuneDocument, name: str, made_from: Path | None, chosen: Pair, base: DecoderOptions, trials: int
) -> str:
    """Write the winner to the user's profile.

    Args:
        document: the tuning; something has won.
        name: the profile's.
        made_from: as :func:`prepare` found it.
        chosen: the pair.
        base: what was not searched.
        trials: how many runs were measured.

    Returns:
        the file.

    Raises:
        GgufspecError: it cannot be written.
    """
    from datetime import UTC, datetime

    from ggufspec.files import write_whole
    from ggufspec.models.profile import Tuned
    from ggufspec.tune.profile_file import text_of

    assert document.winner is not None
    best = document.trials[document.winner]
    assert best.tokens_per_s is not None
    machine, gain = document.machine, document.gain
    cards = [str(gpu["name"]) for gpu in machine["gpus"]]
    tuned = Tuned(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        tokens_per_s=round(best.tokens_per_s.median, 2),
        gain=round(gain.median, 3) if gain else None,
        gain_ci95=[round(value, 3) for value in gain.ci95] if gain and len(gain.samples) >= _FEWEST else None,
        trials=trials,
        machine=", ".join([str(machine["cpu"]), *cards]),
        versions=f"ggufspec {machine['ggufspec']}, llama-cpp-python {machine['llama_cpp_python']}",
        results=str(Path(document.settings["results"]).absolute()),
    )
    s = best.setting
    text = text_of(
        made_from,
        name=name,
        target=chosen.target.absolute(),
        draft=chosen.draft.absolute() if chosen.draft else None,
        layers={"target": s.gpu_layers, "draft": s.gpu_layers_draft if s.drafter in ("draft", "both") else None},
        settings=_settings(s, base),
        tuned=tuned,
    )
    path = _path(name)
    write_whole(path, text)
    return str(path)


def _path(name: str) -> Path:
    from ggufspec.models.profile import user_folder

    return user_folder() / f"{name}.toml"


def _of_files(files: given.Files) -> bool:
    return files.model is not None or files.hf_repo is not None


def _own_draft(files: given.Files) -> bool:
    return files.model_draft is not None or files.hf_repo_draft is not None


def _settings(s: TunedSetting, base: DecoderOptions) -> dict[str, object]:
    """A setting as a profile has it; what is as usual is left away."""
    from ggufspec.hardware.host import physical_cores
    from ggufspec.tune.space import DEFAULT_MICRO_BATCH

    return {
        "ctx_size": base.ctx_size,
        "threads": s.threads if base.threads or s.threads < physical_cores() else None,
        "drafter": s.drafter,
        "draft_policy": s.draft_policy if s.drafted else None,
        "draft_max": s.draft_max if s.drafted else None,
        "cache_type_k": s.cache_type_k if s.cache_type_k != "f16" else None,
        "cache_type_v": s.cache_type_v if s.cache_type_v != "f16" else None,
        "flash_attn": s.flash_attn if s.flash_attn != "auto" else None,
        "n_cpu_moe": s.n_cpu_moe or None,
        "ubatch_size": s.ubatch_size if s.ubatch_size != DEFAULT_MICRO_BATCH else None,
    }
