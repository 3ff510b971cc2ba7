"""JSON document of ``ggufspec models``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Model on this disk.

    ``options`` name it as a target, ``draft_options`` as a draft. ``drafts`` are the paths of the models of the list
    that can draft for it, the best first; ``suggestion`` is a draft that a profile has for it, if none is here.
    """

    name: str
    path: str  # of a split model its first part's
    program: str  # whose folder it is in
    size_bytes: int  # of all parts
    architecture: str
    parameters: int
    size_label: str  # as the model is named by it: 1.5B; the file may have more, of an output of its own
    quantization: str
    context_length: int  # that it was trained for
    chats: bool  # whether it has a chat template
    is_head: bool  # whether it only drafts
    drafts: tuple[str, ...]
    suggestion: str
    options: tuple[str, str]
    draft_options: tuple[str, str]


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """File or folder that is not listed, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelsDocument:
    """``ggufspec/models@1``. ``next`` is the command that talks with the best pair; empty without a model.

    ``folders`` were searched; ``complete`` says that no file was left unread for lack of time.
    """

    models: tuple[ModelRow, ...]
    left_out: tuple[LeftOutFile, ...]
    folders: tuple[str, ...]
    complete: bool
    next: str
    schema: str = field(default="ggufspec/models@1")
