"""Every shape of shapes.py is a model to llama.cpp: in the dry run, and the tiny ones for real."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.support.shapes import LLAMA3_MERGES, LLAMA3_TOKENS, SHAPES, bpe, padded, write, write_split

KINDS = {"dense", "tied", "moe", "swa", "mla", "recurrent", "hybrid", "nextn"}
PATIENCE_S = 120.0

# Reads jobs [path, dry] and answers each with a line; an abort ends it, and the last name on stderr is the culprit's.
LOADER = """
import ctypes, json, sys, time
from pathlib import Path
import numpy as np
from ggufspec.llamacpp.library import complaints, forget_complaints, load_library
from ggufspec.llamacpp.params import load_model

lib = load_library()
for path, dry in json.load(sys.stdin):
    print(path, file=sys.stderr, flush=True)
    forget_complaints()
    began = time.monotonic()
    for layers in (0, -1) if dry else (-1,):
        params = lib.llama_model_default_params()
        params.n_gpu_layers = layers
        if dry:
            params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
            params.use_extra_bufts = False  # as dryrun.py does
        model = load_model(lib, Path(path), params)
        assert model, complaints()
        options = lib.llama_context_default_params()
        options.ctx_size = options.n_batch = 512
        options.n_threads = options.n_threads_batch = 1
        context = lib.llama_init_from_model(model, options)
        assert context, complaints()
        tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        answer = {"tokens": tokens, "bytes": lib.llama_model_size(model)}
        if not dry:
            batch = lib.llama_batch_get_one((ctypes.c_int32 * 2)(5, 7), 2)
            answer["status"] = lib.llama_decode(context, batch)
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (tokens,))
            answer["finite"] = bool(np.isfinite(logits).all())
        lib.llama_free(context)
        lib.llama_model_free(model)
    print(json.dumps(answer | {"seconds": time.monotonic() - began}), flush=True)
"""

# Reads jobs [path of an F16 model, file type] and answers each with llama-quantize's choices, tensor by tensor.
QUANTIZER = """
import ctypes, json, re, sys
from ggufspec.llamacpp.library import load_library

lib = load_library()
said = []
callback = lib.llama_log_callback(lambda level, text, user_data: said.append(text.decode()))
lib.llama_log_set(callback, None)
for path, file_type in json.load(sys.stdin):
    said.clear()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.dry_run, params.nthread = file_type, True, 1
    assert lib.llama_model_quantize(path.encode(), (path + ".out").encode(), ctypes.byref(params)) == 0, said
    lines = re.findall(r"\\] +(\\S+) +- \\[.*?\\], type = *(\\w+),(.*)", "".join(said))
    types = {name: re.search(r"-> .*\\((\\w+)\\)", rest) or kind for name, kind, rest in lines}
    print(json.dumps({name: (kind if isinstance(kind, str) else kind[1]).upper() for name, kind in types.items()}))
"""


def child(code: str, jobs: list[tuple[Path, int]]) -> list[dict[str, Any]]:
    """What one child process answers to ``jobs``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([(str(path), detail) for path, detail in jobs]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def ask(jobs: list[tuple[Path, bool]]) -> list[dict[str, Any]]:
    """llama.cpp's answers about files, dry or for real."""
    return child(LOADER, jobs)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return {name: write(folder / f"{name}.gguf", shape) for name, shape in SHAPES.items()}


def test_kinds():
    assert {shape.kind for shape in SHAPES.values()} == KINDS
    assert all(name.startswith("tiny-") is (shape.nbytes < 2e8) for name, shape in SHAPES.items())


def test_every_shape_loads_in_the_dry_run(files):
    answers = ask([(path, True) for path in files.values()])
    for shape, answer in zip(SHAPES.values(), answers, strict=True):
        assert answer["tokens"] == shape.vocabulary, shape.name
        assert answer["bytes"] == sum(tensor.nbytes for tensor in shape.tensors), shape.name


def test_tiny_shapes_decode_for_real(files):
    tiny = [path for name, path in files.items() if name.startswith("tiny-")]
    for path, answer in zip(tiny, ask([(path, False) for path in tiny]), strict=True):
        assert (answer["status"], answer["finite"]) == (0, True), path.name
        assert answer["seconds"] < 1, path.name


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_as_long_as_its_tensors_say(files, name):
    shape, path = SHAPES[name], files[name]
    found = gguf.GGUFReader(path).tensors
    assert [(t.name, t.tensor_type.name, tuple(t.shape)) for t in found] == [tuple(t) for t in shape.tensors]
    assert [t.n_bytes for t in found] == [t.nbytes for t in shape.tensors]
    assert found[-1].data_offset + padded(found[-1].n_bytes) == path.stat().st_size
    assert found[0].data_offset + shape.nbytes == path.stat().st_size
    assert path.stat().st_blocks * 512 < 200_000  # a hole


def test_types_are_those_that_llama_quantize_chooses(tmp_path):
    halves = {
        name: replace(
            shape,
            metadata=shape.metadata | {"general.file_type": int(gguf.LlamaFileType.MOSTLY_F16)},
            tensors=tuple(tensor._replace(type="F32" if tensor.type == "F32" else "F16") for tensor in shape.tensors),
        )
        for name, shape in SHAPES.items()
        if "f16" not in name
    }
    jobs = [
        (write(tmp_path / f"{name}.gguf", half), SHAPES[name].metadata["general.file_type"])
        for name, half in halves.items()
    ]
    for name, chosen in zip(halves, child(QUANTIZER, jobs), strict=True):
        assert chosen == {tensor.name: tensor.type for tensor in SHAPES[name].tensors}, name


def test_a_split_model_is_the_same_model(tmp_path):
    shape = SHAPES["llama3-8b-q3_k_l"]
    paths = write_split(tmp_path, shape, 3)
    assert [path.name for path in paths] == [f"{shape.name}-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    readers = [gguf.GGUFReader(path) for path in paths]
    assert sum(len(reader.tensors) for reader in readers) == len(shape.tensors)
    assert [len(reader.fields) > 10 for reader in readers] == [True, False, False]
    assert ask([(paths[0], True)])[0]["bytes"] == sum(tensor.nbytes for tensor in shape.tensors)


def test_llama_cpp_loads_the_vocabulary(tmp_path):
    shape = SHAPES["llama3-8b-q3_k_l"]
    path = write(tmp_path / "words.gguf", shape, tokenizer=True)
    assert 6e6 < path.stat().st_size - shape.nbytes < 9e6
    assert ask([(path, True)])[0]["tokens"] == LLAMA3_TOKENS


def test_the_vocabulary_is_as_large_as_that_of_llama_3():
    vocabulary = bpe(LLAMA3_TOKENS)
    assert len(set(vocabulary["tokenizer.ggml.tokens"])) == LLAMA3_TOKENS
    assert len(set(vocabulary["tokenizer.ggml.merges"])) == LLAMA3_MERGES
