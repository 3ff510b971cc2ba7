"""For those who have a ``Llama`` of llama-cpp-python: a GGUF file as its draft model.

    from llama_cpp import Llama
    from ggufspec.hook import DraftModel

    llama = Llama(model_path="big.gguf", n_ctx=4096)
    DraftModel("small.gguf", llama)

ggufspec's own loop (:class:`ggufspec.SpeculativeDecoder`) is faster; ``ggufspec bench --engine hook`` measures both.
"""

from ggufspec.decoding.hook import DraftModel, scores_bytes

__all__ = ["DraftModel", "scores_bytes"]
