"""Speculative decoding of GGUF models on one consumer GPU, with a measurement of whether it is worth it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggufspec.api.python import load_pair, plan_pair
    from ggufspec.bench.pair import bench_pair
    from ggufspec.decoding.decoder import Emitted, SpeculativeDecoder, Statistics
    from ggufspec.decoding.hook import DraftModel
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.errors import GgufspecError, ModelError, UsageError
    from ggufspec.llamacpp.options import Placement
    from ggufspec.models.profile import Pair, Profile, demo_pair, load_profile
    from ggufspec.prompting.prompt import chat_prompt
    from ggufspec.schema.bench import BenchDocument
    from ggufspec.schema.plan import PlanDocument
    from ggufspec.settings.table import Settings

__version__ = "0.1.0"

_NAMES = {
    "ggufspec.api.python": ("load_pair", "plan_pair"),
    "ggufspec.bench.pair": ("bench_pair",),
    "ggufspec.decoding.decoder": ("Emitted", "SpeculativeDecoder", "Statistics"),
    "ggufspec.decoding.hook": ("DraftModel",),
    "ggufspec.decoding.options": ("DecoderOptions",),
    "ggufspec.decoding.sampling": ("Sampling",),
    "ggufspec.errors": ("GgufspecError", "ModelError", "UsageError"),
    "ggufspec.llamacpp.options": ("Placement",),
    "ggufspec.models.profile": ("Pair", "Profile", "demo_pair", "load_profile"),
    "ggufspec.prompting.prompt": ("chat_prompt",),
    "ggufspec.schema.bench": ("BenchDocument",),
    "ggufspec.schema.plan": ("PlanDocument",),
    "ggufspec.settings.table": ("Settings",),
}

__all__ = [
    "BenchDocument",
    "DecoderOptions",
    "DraftModel",
    "Emitted",
    "GgufspecError",
    "ModelError",
    "Pair",
    "Placement",
    "PlanDocument",
    "Profile",
    "Sampling",
    "Settings",
    "SpeculativeDecoder",
    "Statistics",
    "UsageError",
    "__version__",
    "bench_pair",
    "chat_prompt",
    "demo_pair",
    "load_pair",
    "load_profile",
    "plan_pair",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``ggufspec --help`` loads neither numpy nor llama.cpp."""
    import importlib

    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
