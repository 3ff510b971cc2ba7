"""Files of the Hugging Face hub; the only importer of ``huggingface_hub``."""

from __future__ import annotations

from pathlib import Path

from ggufspec.errors import GgufspecError


def cached_file(repo: str, name: str, revision: str | None = None) -> Path | None:
    """The file in the local Hugging Face cache (``HF_HOME`` is honoured), or None. No network.

    Raises:
        GgufspecError: ``repo`` cannot be a repository's name.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, name, revision=revision)
    except HFValidationError:
        raise GgufspecError(f"{repo!r} is no repository of the hub", "a repository is USER/NAME") from None
    return Path(found) if isinstance(found, str) else None
