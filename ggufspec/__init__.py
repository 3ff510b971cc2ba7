"""Speculative decoding of GGUF models on one consumer GPU, and whether it was worth it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggufspec.decoding.decoder import Emitted, SpeculativeDecoder, Statistics
    from ggufspec.decoding.options import DecoderOptions
    from ggufspec.decoding.sampling import Sampling
    from ggufspec.pairs.profile import demo_pair

__version__ = "0.1.0"

_HOMES = {
    "DecoderOptions": "ggufspec.decoding.options",
    "Emitted": "ggufspec.decoding.decoder",
    "Sampling": "ggufspec.decoding.sampling",
    "SpeculativeDecoder": "ggufspec.decoding.decoder",
    "Statistics": "ggufspec.decoding.decoder",
    "demo_pair": "ggufspec.pairs.profile",
}

__all__ = ["DecoderOptions", "Emitted", "Sampling", "SpeculativeDecoder", "Statistics", "__version__", "demo_pair"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``ggufspec --help`` loads neither numpy nor llama.cpp."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
