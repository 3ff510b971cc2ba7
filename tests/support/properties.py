"""With how many examples a property is held, by the tier: see the profiles in ``conftest.py``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(count: int, **more: Any) -> settings:
    """So many examples in the full tier, an eighth of them in the quick one; ``more`` goes to ``settings``."""
    few = settings.default.derandomize
    return settings(max_examples=max(10, count // 8) if few else count, **more)
