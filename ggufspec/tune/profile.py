"""Profile that ``ggufspec tune`` writes: its name, its source, and the winning setting."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from ggufspec.decoding.options import DecoderOptions
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.files import untrusted
from ggufspec.files.write import as_file_name, check_writable, write_whole
from ggufspec.hardware.host import physical_cores
from ggufspec.models.profile import (
    Pair,
    Profile,
    TuneEvidence,
    find_profile,
    is_name,
    load_profile,
    toml_of,
    user_folder,
)
from ggufspec.schema.tune import TuneDocument, TunedSetting
from ggufspec.settings.table import OLD_NAMES, names
from ggufspec.tune.run import FEWEST
from ggufspec.tune.space import DEFAULT_MICRO_BATCH

_COMMENTS = {
    "date": "when ggufspec tune measured this",
    "gain": "relative to the planned setting",
    "results": "log of all measurements",
}
_TUNED = "Tuned on this machine: "
_OURS = (_TUNED, "The fastest setting of this pair that tuning found")  # prefixes of descriptions that tune has written


def profile_name(save: str | None, profile: str | None, pair: Pair, *, own_draft: bool) -> str:
    """Return the name of the profile to write: ``save``, or else the tuned profile's name or the target file's.

    ``own_draft`` is True if the user replaced the profile's draft; the draft file's name is then appended.

    Raises:
        UsageError: ``save`` is not a valid name, or ``profile`` does not exist.
    """
    if save is not None:
        if not is_name(save) or save.endswith((".toml", ".gguf")):
            raise UsageError(f"{save!r} is not a profile name", "--save my-pair")
        return save
    if profile is None:
        return as_file_name(pair.target.stem)
    name = find_profile(profile).stem
    return f"{name}-{as_file_name(pair.draft.stem)}" if pair.draft is not None and own_draft else name


def template(name: str, profile: str | None, pair: Pair) -> Path | None:
    """Check before the search that its winner can be saved, and return the profile whose other keys are retained.

    This is the profile called ``name``, otherwise ``profile``; None without a profile, or if its
    draft was replaced.

    Raises:
        GgufspecError: a profile of another pair has this name, or the file cannot be written.
    """
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GgufspecError(f"{path} cannot be written: {error.strerror}", "--no-save writes no profile") from None
    check_writable(path)
    tuned = find_profile(profile) if profile else None
    if not path.exists():
        return tuned
    files = (("target", pair.target), ("draft", pair.draft))
    models = _models(tuned) if tuned else {role: (None, str(file.absolute())) for role, file in files if file}
    existing = _models(path)
    if any(existing.get(role) != model for role, model in models.items()):
        raise UsageError(f"{path} is the profile of another pair", "--save OTHER-NAME, or --no-save")
    return path


def save_winner(
    document: TuneDocument, name: str, made_from: Path | None, pair: Pair, base: DecoderOptions, trials: int
) -> str:
    """Write the winner to the user's profile, based on :func:`template`'s result; return the path.

    Raises:
        GgufspecError: the profile cannot be written.
    """
    assert document.winner is not None
    best = document.trials[document.winner]
    assert best.tokens_per_s is not None
    machine, gain = document.machine, document.gain
    cards = [str(gpu["name"]) for gpu in machine["gpus"]]
    tuned = TuneEvidence(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        tokens_per_s=round(best.tokens_per_s.median, 2),
        gain=round(gain.median, 3) if gain else None,
        gain_ci95=[round(value, 3) for value in gain.ci95] if gain and len(gain.samples) >= FEWEST else None,
        trials=trials,
        machine=", ".join([str(machine["cpu"]), *cards]),
        versions=f"ggufspec {machine['ggufspec']}, llama-cpp-python {machine['llama_cpp_python']}",
        results=str(Path(document.settings["results"]).absolute()),
    )
    setting = best.setting
    with_draft = setting.drafter in ("draft", "both")
    text = profile_text(
        made_from,
        name=name,
        why=description(document),
        target=pair.target.absolute(),
        draft=pair.draft.absolute() if pair.draft else None,
        layers={"target": setting.gpu_layers, "draft": setting.gpu_layers_draft if with_draft else None},
        settings=_settings(setting, base),
        tuned=tuned,
    )
    path = _path(name)
    write_whole(path, text)
    return str(path)


def description(document: TuneDocument) -> str:
    """Describe what the trials showed about the saved setting, and say so if it does not draft."""
    assert document.winner is not None
    if len(document.trials) == 1:
        text = "the only setting that was measured."
    elif not document.decided:
        text = "the leading setting, which was not shown to be faster than the others."
    elif document.winner == document.baseline:
        text = "the planned setting; no other was clearly faster."
    else:
        text = "the fastest setting found."
    idle = "" if document.trials[document.winner].setting.drafted else " It does not draft."
    return f"{_TUNED}{text}{idle}"


def _path(name: str) -> Path:
    return user_folder() / f"{name}.toml"


def _settings(setting: TunedSetting, base: DecoderOptions) -> dict[str, object]:
    """Return the settings as a profile stores them; None for defaults."""
    usual = DecoderOptions(ubatch_size=DEFAULT_MICRO_BATCH).flat()
    found: dict[str, object] = {
        "ctx_size": base.ctx_size,
        "threads": setting.threads if base.threads or setting.threads < physical_cores() else None,
        "drafter": setting.drafter,
        "draft_policy": setting.draft_policy if setting.drafted else None,
        "draft_max": setting.draft_max if setting.drafted else None,
    }
    for name in names(profile=True):
        if name in setting.__dataclass_fields__ and name not in found:
            value = getattr(setting, name)
            found[name] = None if value == usual[name] else [*value] if isinstance(value, tuple) else value
    found["no_op_offload"] = base.no_op_offload or None
    return found


# ---- the file


def _models(path: Path) -> dict[str, tuple[str | None, str]]:
    """Return (repository or None, file) of a profile's models by role; local files have absolute paths."""
    profile = load_profile(path)
    return {
        role: (model.repo, model.file if model.repo else _absolute(path, model.file))
        for role, model in (("target", profile.target), ("draft", profile.draft))
        if model
    }


def _absolute(profile: Path, file: str) -> str:
    return str((profile.parent / untrusted.at_home(file)).absolute())


def profile_text(
    profile: Path | None,
    *,
    name: str,
    why: str,
    target: Path,
    draft: Path | None,
    layers: Mapping[str, int | None],
    settings: Mapping[str, Any],
    tuned: TuneEvidence,
) -> str:
    """Return the profile as TOML: a copy of ``profile`` with its comments and other keys, or a new one for these files.

    Args:
        profile: the profile file to copy; raises GgufspecError if it cannot be read.
        name: name of the profile and its file.
        why: description, used unless the user wrote another one.
        target: the target's file.
        draft: the draft's file.
        layers: ``gpu_layers`` by role; None leaves it to the plan.
        settings: keys of ``[settings]``; None removes a key.
        tuned: evidence from the tuning run.
    """
    if profile is None:
        document = tomlkit.document()
        document.add(tomlkit.comment("Made with: ggufspec tune"))
        document["name"] = name
        document["why"] = why
        document["source"] = str(target)
        document["target"] = {"file": str(target)}
        if draft is not None:
            document["draft"] = {"file": str(draft)}
    else:
        document = tomlkit.parse(toml_of(profile))
        if profile.stem != name:  # --save NAME creates a new profile
            document["name"] = name
        if str(document.get("why", "")).startswith(_OURS):
            document["why"] = why
        for role in ("target", "draft"):
            model = document.get(role)
            if model is not None and "repo" not in model:  # the new profile is in another folder
                model["file"] = _absolute(profile, model["file"])
    for role, count in layers.items():
        if role in document:
            _set(document[role], {"gpu_layers": count})
    if "settings" not in document:
        document["settings"] = tomlkit.table()
    _set(document["settings"], settings)
    document.pop("tuned", None)
    evidence = tomlkit.table()
    for key, value in tuned.model_dump().items():
        if value is not None:
            item = tomlkit.item(value)
            if key in _COMMENTS:
                item.comment(_COMMENTS[key])
            evidence.add(key, item)
    document["tuned"] = evidence
    text = tomlkit.dumps(document).replace("\n[tuned]", "\n\n[tuned]").replace("\n\n\n[tuned]", "\n\n[tuned]")
    Profile.model_validate(tomlkit.parse(text).unwrap())
    return text


def _set(table: Any, values: Mapping[str, Any]) -> None:
    assert isinstance(table, Table)
    for old, name in OLD_NAMES.items():  # remove keys that older profiles use
        if name in values:
            table.pop(old, None)
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
