"""JSON document of ``ggufspec models``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Model on this disk.

    ``options`` select the model as a target, and ``draft_options`` select it as a draft. ``drafts`` lists the paths of
    listed models that can draft for it, best first; ``suggestion`` is a draft from a profile if none is on this disk.
    """

    name: str
    path: str  # path of the first part if the model is split
    program: str  # program in whose folder the model is
    size_bytes: int  # total size of all parts
    architecture: str
    parameters: int
    size_label: str  # size as stated in model names, such as 1.5B; the exact number of parameters may differ
    quantization: str
    context_length: int  # training context in tokens
    chats: bool  # True if the model has a chat template
    is_head: bool  # True if the model can only draft
    drafts: tuple[str, ...]
    suggestion: str
    options: tuple[str, str]
    draft_options: tuple[str, str]


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """File or folder that is not listed, with the reason."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelsDocument:
    """Document ``ggufspec/models@1``. ``next`` is the command to chat with the best pair; empty without a model.

    ``folders`` are the searched folders; ``complete`` is False if a limit ended the search before every file was read.
    """

    models: tuple[ModelRow, ...]
    left_out: tuple[LeftOutFile, ...]
    folders: tuple[str, ...]
    complete: bool
    next: str
    schema: str = field(default="ggufspec/models@1")
