"""Profiles: strict TOML files, each of which describes a pair and how to run it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from ggufspec import child
from ggufspec.errors import GgufspecError, ModelError, UsageError, did_you_mean
from ggufspec.files import untrusted
from ggufspec.files.cache import config_folder
from ggufspec.models.hub.client import HubFile, stays_inside
from ggufspec.models.hub.download import cached_model
from ggufspec.settings import table as settings_
from ggufspec.settings.option import Option
from ggufspec.settings.table import Settings

_LONGEST_NAME = 100
_MOST = 2**63 - 1  # largest TOML integer
_MOST_BYTES = 16 << 10  # size limit (bundled profiles take 1 kB), because parsing a long key takes quadratic time
_MEND = "fix the file, or name another profile"


def is_name(text: str) -> bool:
    return (
        0 < len(text) <= _LONGEST_NAME
        and text.isprintable()
        and not text.startswith(".")
        and not set(text) & set("/\\")
    )


def _named(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text[:_LONGEST_NAME]!r} is not a valid name: use 1 to {_LONGEST_NAME} characters without /")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSource(_Strict):
    """Location of a model's ``file``, next to the profile or in the hub repository ``repo``.

    ``expand`` names a published shape and a type, such as ``smollm2-360m:F16``, to which a file next to the profile is
    expanded (:mod:`ggufspec.models.expanded`).

    Sizes serve the list of profiles, which works offline; a cached header takes precedence. ``approximate`` is True if
    the bytes were computed from the model's shape or published with only a few digits.
    """

    file: str
    expand: str | None = None
    repo: str | None = None
    revision: str | None = None
    gpu_layers: int | None = None
    size_bytes: Annotated[int, Field(ge=1, le=_MOST)] | None = None  # file size
    approximate: bool = False
    layers: Annotated[int, Field(ge=2, le=_MOST)] | None = None  # number of layers as -ngl counts them
    # Size of the f16 KV cache per token, in bytes, counting only layers without a sliding window
    cache_bytes: Annotated[int, Field(ge=0, le=_MOST)] | None = None


class _Keys(_Strict):
    @model_validator(mode="before")
    @classmethod
    def _with_new_names(cls, data: Any) -> Any:
        return settings_.renamed(data)


def _check(row: Option) -> AfterValidator:
    def check(value: Any) -> Any:
        try:
            return row.check(value)
        except UsageError as error:
            raise ValueError(error.message) from None

    return AfterValidator(check)


def settings_model(rows: Iterable[Option]) -> type[BaseModel]:
    """Make the pydantic model for ``[settings]``, with a key for each option that profiles may set."""

    def kind(row: Option) -> Any:
        if row.repeated:
            return list[str]
        return float | str if row.kind is float and row.reader else row.kind  # e.g. 0.26@16

    fields: dict[str, Any] = {row.name: (Annotated[kind(row), _check(row)] | None, None) for row in rows if row.profile}
    return create_model("Settings", __base__=_Keys, **fields)


_SETTINGS = settings_model(settings_.OPTIONS.values())


def _settings(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ARG001 - pydantic's signature
    """Return a schema that validates a profile's keys and produces the ``Settings`` that commands and Python use."""
    return no_info_after_validator_function(lambda keys: Settings(**keys.model_dump()), handler(_SETTINGS))


PromptKind = Literal[  # kinds of chat requests, then kinds of plain text, which also include "edit" and "list"
    "edit", "rename", "port", "tests", "json", "list", "chat", "summary",
    "code", "prose", "numbers", "noise",
]  # fmt: skip


class BenchDefaults(_Strict):
    """Defaults for ``bench`` with the profile's pair.

    ``prompts`` are kinds of bundled prompts; ``budget_s`` applies if no number of repetitions is set.
    """

    prompts: list[PromptKind] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    repetitions: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    budget_s: Annotated[float, Field(gt=0)] | None = None


class TuneEvidence(_Strict):
    """Evidence that ``tune`` recorded for a profile's settings."""

    date: str
    tokens_per_s: float  # median speed with the best settings
    gain: float | None = None  # median speedup over the planned settings; absent if nothing else was measured
    gain_ci95: list[float] | None = None
    trials: int
    machine: str
    versions: str  # versions of ggufspec and llama-cpp-python
    results: str  # file with every measurement


class Profile(_Strict):
    """Content of one TOML file. ``why`` is the purpose of the pairing, ``source`` its origin.

    ``group`` marks profiles that exist for their published figures and not for use.
    """

    name: Annotated[str, AfterValidator(_named)]
    why: str
    source: str
    group: Literal["", "reference"] = ""
    target: ModelSource
    draft: ModelSource | None = None
    settings: Annotated[Settings, GetPydanticSchema(_settings)] = Field(default_factory=Settings)
    bench: BenchDefaults = Field(default_factory=BenchDefaults)
    tuned: TuneEvidence | None = None
    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def folder(self) -> Path:
        """Folder of the TOML file, which relative file names refer to."""
        return self._folder

    @property
    def placed_settings(self) -> Settings:
        """Settings, including both models' numbers of GPU layers."""
        draft = self.draft.gpu_layers if self.draft else None
        return replace(self.settings, gpu_layers=self.target.gpu_layers, gpu_layers_draft=draft)

    @property
    def note(self) -> str:
        """Caveat to show with every result, if a model is expanded; otherwise empty."""
        return self.why if any(model and model.expand for model in (self.target, self.draft)) else ""

    @model_validator(mode="after")
    def _inside(self) -> Profile:
        for model in filter(None, (self.target, self.draft)):
            if model.repo and model.expand:
                raise ValueError("only a file on this machine can be expanded, but repo names one on the hub")
            if model.repo and not stays_inside(model.file):
                raise ValueError(f"{model.file!r} leaves the repository")
            if model.revision is not None and not stays_inside(model.revision):
                raise ValueError(f"{model.revision!r} is not a branch, tag or commit")
            if "\0" in model.file:
                raise ValueError(f"{model.file!r} is not a file name")
        return self


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Locations of a pair's files (local, URL or hub), with its profile's settings.

    ``note`` is the profile's caveat for every result, and ``tuned`` is the evidence from ``tune``.
    """

    name: str
    target: str | Path | HubFile
    draft: str | Path | HubFile | None
    settings: Settings = field(default_factory=Settings)
    bench: BenchDefaults = field(default_factory=BenchDefaults)
    note: str = ""
    tuned: TuneEvidence | None = None


@dataclass(frozen=True, slots=True)
class Pair(PairSpec):
    """Target and draft whose files are on this machine."""

    target: Path
    draft: Path | None

    def describe(self) -> dict[str, Any]:
        """Return the pair's description for JSON documents."""
        files = {"name": self.name, "target": str(self.target), "draft": str(self.draft) if self.draft else None}
        return files | ({"note": self.note} if self.note else {})


def bundled_folder() -> Path:
    """Return the folder of bundled profiles, in the installed package or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def user_folder() -> Path:
    """Return the folder of the user's own profiles, which override bundled ones."""
    return config_folder() / "profiles"


def known_profiles() -> list[str]:
    files = [path for folder in (user_folder(), bundled_folder()) for path in folder.glob("*.toml")]
    return sorted({path.stem for path in files if is_name(path.stem)})


def own_profiles() -> list[str]:
    return sorted(path.stem for path in user_folder().glob("*.toml"))


def own_profile(name: str) -> Path:
    """Return the file of one of the user's own profiles, valid or not.

    Raises:
        UsageError: the name is a path, there is no such profile, or it is bundled.
    """
    if name.endswith(".toml") or Path(name).name != name or "\\" in name:
        raise UsageError(f"{name!r} is not a profile name", "ggufspec profiles list marks your own with a star")
    own = own_profiles()
    if name in own:
        return user_folder() / f"{name}.toml"
    if (bundled_folder() / f"{name}.toml").is_file():
        raise UsageError(
            f"{name!r} is a bundled profile and cannot be removed",
            f"ggufspec profiles new {name} makes one of your own, which overrides it",
        )
    yours = f"yours are: {', '.join(own)}" if own else "you have none: ggufspec profiles new NAME makes one"
    raise UsageError(f"you have no profile {name!r}", did_you_mean(name, own) or yours)


def find_profile(name: str) -> Path:
    """Find a profile's file by name or path; if it is missing, raise a UsageError that suggests the nearest name."""
    if name.endswith(".toml"):
        path = untrusted.at_home(name)
        if untrusted.is_file(path):
            return path
        raise UsageError(f"there is no profile at {name}", "ggufspec profiles list shows the profiles")
    for folder in (user_folder(), bundled_folder()):
        path = folder / f"{name}.toml"
        if is_name(name) and path.is_file():
            return path
    hint = (
        did_you_mean(name, known_profiles(), 3)
        or "ggufspec profiles list shows the profiles; -m FILE.gguf takes a file"
    )
    if name.endswith(".gguf") or untrusted.is_file(Path(name)):
        hint = f"ggufspec … -m {name} -md DRAFT.gguf"
    raise UsageError(f"there is no profile {name[:_LONGEST_NAME]!r}", hint)


def load_profile(name: str | Path) -> Profile:
    """Load a profile: a pair of models and how to run it.

    >>> profile = load_profile("demo")
    >>> profile.target.file
    'demo/demo-target-F16.gguf'
    >>> profile.settings.ctx_size
    2048

    Args:
        name: name of a bundled profile or one of the user's, or the path of a TOML file.

    Raises:
        UsageError: no profile has this name; the hint names the nearest.
        GgufspecError: the file is not TOML, or a key is unknown, missing or of the wrong type; the message says where.
    """
    path = name if isinstance(name, Path) else find_profile(name)
    text = toml_of(path)
    try:
        profile = Profile.model_validate(tomllib.loads(text))
    except ValidationError as invalid:
        raise _explained(path, text, invalid) from None
    except ValueError as error:  # not TOML, or a number with thousands of digits
        raise GgufspecError(f"{path}: {error}", _MEND) from None
    except RecursionError:
        raise GgufspecError(f"{path} is nested too deeply", _MEND) from None
    profile._folder = path.parent
    return profile


def toml_of(path: Path) -> str:
    """Return the text of a profile; raise GgufspecError if it cannot be read or is too large."""
    return untrusted.read_text(path, _MOST_BYTES, hint=_MEND)


def local_pair(profile: Profile, on_event: child.Emit | None = None) -> Pair:
    """Return a profile's pair if its files are on this machine.

    Raises:
        ModelError: a file is missing; the hint is the command that downloads it.
        GgufspecError: an expanded model cannot be written.
    """
    target, draft = header_sources(profile, on_event)
    for place in (target, draft):
        if isinstance(place, HubFile):
            message = f"{place.file} of profile {profile.name!r} is not on this machine"
            raise ModelError(message, f"ggufspec pull {profile.name}")
    assert isinstance(target, Path)
    assert not isinstance(draft, HubFile)
    return Pair(profile.name, target, draft, profile.placed_settings, profile.bench, profile.note)


def header_sources(
    profile: Profile, on_event: child.Emit | None = None
) -> tuple[Path | HubFile, Path | HubFile | None]:
    """Return the sources of a pair's headers (target, draft or None), for planning before a download.

    Expanded models are written if necessary, with progress reported to ``on_event``.

    Raises:
        ModelError: a local file is missing.
        GgufspecError: an expanded model cannot be written.
    """
    draft = model_source(profile.draft, profile, on_event) if profile.draft else None
    return model_source(profile.target, profile, on_event), draft


def on_hub(model: ModelSource) -> HubFile | None:
    """Return the model's file on the hub; None for a local file."""
    return HubFile(model.repo, model.file, model.revision) if model.repo else None


def model_source(model: ModelSource, profile: Profile, on_event: child.Emit | None = None) -> Path | HubFile:
    wanted = on_hub(model)
    if wanted is not None:
        return cached_model(wanted) or wanted
    path = _file(model, profile)
    if model.expand is None:
        return path
    from ggufspec.models.expanded import expanded  # imported late because it needs numpy

    return expanded(path, model.expand, on_event)


def is_made(profile: Profile) -> bool:
    """Return True if all of a profile's expanded models already exist; raise as :func:`model_source` does."""
    from ggufspec.models.expanded import place

    models = (profile.target, profile.draft)
    return all(place(_file(one, profile), one.expand).is_file() for one in models if one and one.expand)


def _file(model: ModelSource, profile: Profile) -> Path:
    path = profile.folder / untrusted.at_home(model.file)
    if path.is_file():
        return path
    raise ModelError(f"profile {profile.name!r} names {path}, which does not exist", f"ls {path.parent}")


def demo_pair() -> tuple[Path, Path]:
    """Return the files (target, draft) of the bundled pair."""
    pair = local_pair(load_profile(bundled_folder() / "demo.toml"))
    assert pair.draft is not None
    return pair.target, pair.draft


_TABLES = {
    "target": ModelSource,
    "draft": ModelSource,
    "settings": _SETTINGS,
    "bench": BenchDefaults,
    "tuned": TuneEvidence,
}


def _explained(path: Path, text: str, invalid: ValidationError) -> GgufspecError:
    errors = invalid.errors(include_url=False)
    # A mistyped key also makes the correct key missing, so report the unknown key by the name that was typed.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    key = _as_written(text, ".".join(map(str, first["loc"])))
    line = _line(text, key)
    place = f"{path}:{line}" if line else str(path)
    if first["type"] == "extra_forbidden":
        table: Any = _TABLES[str(first["loc"][0])] if len(first["loc"]) > 1 else Profile
        known = list(table.model_fields)
        hint = did_you_mean(str(first["loc"][-1]), known) or "known keys: " + ", ".join(known)
        return GgufspecError(f"{place}: unknown key {key!r}", hint)
    if first["type"] == "missing":
        return GgufspecError(f"{place}: key {key!r} is missing", f"add {key} to the file")
    message = first["msg"].removeprefix("Value error, ")
    return GgufspecError(f"{place}: {key or 'profile'}: {message}", "correct the value in the file")


def _as_written(text: str, key: str) -> str:
    """Return the key, or its old name if the file uses the old name."""
    table, _, name = key.rpartition(".")
    olds = (old for old, new in settings_.OLD_NAMES.items() if new == name)
    return next((f"{table}.{old}" for old in olds if re.search(rf"^\s*{old}\s*=", text, re.MULTILINE)), key)


def _line(text: str, key: str) -> int | None:
    """Return the line number of a dotted key in TOML text, or of the key's table; None if both are missing.

    This is needed because ``tomllib`` does not say where it found a value.
    """
    table, last = "", None
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, _ = line.partition("=")
        name = "".join(character for character in name if not character.isspace() and character not in "\"'")
        if name.startswith("["):
            here = table = name.partition("]")[0].strip("[")
        elif equals and not name.startswith("#"):
            here = f"{table}.{name}" if table else name
        else:
            continue
        if f"{here}.".startswith(f"{key}."):
            return number
        if key.startswith(f"{here}."):
            last = number
    return last
