"""Speculative decoding of GGUF models on one consumer GPU, and whether it was worth it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggufspec.api import load_pair, plan_pair
    from ggufspec.bench.pair import bench_pair
    from ggufspec.decoding.decoder import Emitted, SpeculativeDecoder, Statistics
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.errors import GgufspecError, ModelError, UsageError
    from ggufspec.models.profile import Pair, Profile, demo_pair, load_profile
    from ggufspec.schema.bench import BenchDocument
    from ggufspec.schema.plan import PlanDocument
    from ggufspec.settings import Settings

__version__ = "0.1.0"

_HOMES = {
    "BenchDocument": "ggufspec.schema.bench",
    "DecoderOptions": "ggufspec.decoding.options",
    "Emitted": "ggufspec.decoding.decoder",
    "GgufspecError": "ggufspec.errors",
    "ModelError": "ggufspec.errors",
    "Pair": "ggufspec.models.profile",
    "PlanDocument": "ggufspec.schema.plan",
    "Profile": "ggufspec.models.profile",
    "Sampling": "ggufspec.decoding.sampling",
    "Settings": "ggufspec.settings",
    "SpeculativeDecoder": "ggufspec.decoding.decoder",
    "Statistics": "ggufspec.decoding.decoder",
    "UsageError": "ggufspec.errors",
    "bench_pair": "ggufspec.bench.pair",
    "demo_pair": "ggufspec.models.profile",
    "load_pair": "ggufspec.api",
    "load_profile": "ggufspec.models.profile",
    "plan_pair": "ggufspec.api",
}

__all__ = [
    "BenchDocument",
    "DecoderOptions",
    "Emitted",
    "GgufspecError",
    "ModelError",
    "Pair",
    "PlanDocument",
    "Profile",
    "Sampling",
    "Settings",
    "SpeculativeDecoder",
    "Statistics",
    "UsageError",
    "__version__",
    "bench_pair",
    "demo_pair",
    "load_pair",
    "load_profile",
    "plan_pair",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``ggufspec --help`` loads neither numpy nor llama.cpp."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those too that are not loaded yet."""
    return sorted({*globals(), *__all__})
