"""Files of the Hugging Face hub; the only importer of ``huggingface_hub``."""

from __future__ import annotations

from pathlib import Path


def cached_file(repo: str, name: str, revision: str | None = None) -> Path | None:
    """The file in the local Hugging Face cache (``HF_HOME`` is honoured), or None. No network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None
