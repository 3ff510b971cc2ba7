"""Writes what tuning found into a profile of the user's own; the rest of the profile stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from ggufspec.models.profile import Profile, Tuned, load_profile, toml_of

_WORDS = {
    "date": "when ggufspec tune measured this",
    "gain": "over what was planned",
    "results": "every measurement",
}


def models_of(path: Path) -> dict[str, tuple[str | None, str]]:
    """(repository or None, file) of a profile's models by their role; a file of this machine with its whole path.

    Raises:
        GgufspecError: it is no profile.
    """
    profile = load_profile(path)
    return {
        role: (model.repo, model.file if model.repo else _whole(path, model.file))
        for role, model in (("target", profile.target), ("draft", profile.draft))
        if model
    }


def _whole(profile: Path, file: str) -> str:
    return str((profile.parent / Path(file).expanduser()).absolute())


def text_of(
    profile: Path | None,
    *,
    name: str,
    target: Path,
    draft: Path | None,
    layers: Mapping[str, int | None],
    settings: Mapping[str, Any],
    tuned: Tuned,
) -> str:
    """The profile as TOML.

    Args:
        profile: the file that it was made from, whose comments and other keys are kept; None makes a new one.
        name: what the profile is called, and its file.
        target: the target's file; only looked at for a new profile.
        draft: the draft's, or None.
        layers: ``gpu_layers`` of ``target`` and of ``draft``; None leaves it to the plan.
        settings: keys of ``[settings]``; None takes a key away.
        tuned: the evidence.

    Raises:
        GgufspecError: the file cannot be read.
    """
    if profile is None:
        document = tomlkit.document()
        document.add(tomlkit.comment("Made with: ggufspec tune"))
        document["name"] = name
        document["why"] = "The fastest setting of this pair that tuning found on this machine."
        document["source"] = str(target)
        document["target"] = {"file": str(target)}
        if draft is not None:
            document["draft"] = {"file": str(draft)}
    else:
        document = tomlkit.parse(toml_of(profile))
        if profile.stem != name:  # --save: it is another profile now
            document["name"] = name
        for role in ("target", "draft"):
            model = document.get(role)
            if model is not None and "repo" not in model:  # the new file is in another folder
                model["file"] = _whole(profile, model["file"])
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
            if key in _WORDS:
                item.comment(_WORDS[key])
            evidence.add(key, item)
    document["tuned"] = evidence
    text = tomlkit.dumps(document).replace("\n[tuned]", "\n\n[tuned]").replace("\n\n\n[tuned]", "\n\n[tuned]")
    Profile.model_validate(tomlkit.parse(text).unwrap())
    return text


def _set(table: Any, values: Mapping[str, Any]) -> None:
    """Put ``values`` into a table, at its end where they are new."""
    assert isinstance(table, Table)
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
