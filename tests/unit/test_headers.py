"""Headers from files, URLs and the hub: what is read, what is refused, what is kept."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufspec import child
from ggufspec.errors import ChildError, GgufspecError, ModelError
from ggufspec.llamacpp import gguf
from ggufspec.llamacpp.library import load_library
from ggufspec.models import headers, locate
from ggufspec.models.headers import KnownHeader, read_headers
from ggufspec.models.hub import choice, client
from ggufspec.models.hub.client import HubFile
from ggufspec.models.profile import ModelSource, Profile, header_sources, load_profile
from tests.support import gguf_files, shapes
from tests.support.server import COMMIT, Server, serving

MB = 1 << 20
TINY = shapes.SHAPES["tiny-llama"]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """31 GB of a 70B model, of which the header is there."""
    return shapes.write(tmp_path_factory.mktemp("big") / "big.gguf", shapes.SHAPES["llama3-70b-q3_k_s"], tokenizer=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "parts"
    folder.mkdir()
    return shapes.write_split(folder, TINY, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "headers"


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, no token and no cache of the user's own, here and in children; no pauses here."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hub" / "token"))
    monkeypatch.setattr(client, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(client, "_silent", {})
    _http.close_session()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        yield served


@pytest.fixture
def hub_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server as HF_ENDPOINT, here and in children."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return server


def read_one(where: locate.Source, folder: Path) -> KnownHeader:
    (known,) = read_headers([where], folder)
    return known


def read_here(where: locate.Source, folder: Path) -> headers.HeaderResult:
    """Read in this process."""
    spec = headers.HeaderJob((locate.locate(where),), folder)
    return headers.run(spec, lambda event: None, threading.Event())


def no_child(*arguments: object, **options: object) -> None:
    raise AssertionError("a child was started")


# ---- a local file -------------------------------------------------------------------------------------------------


def test_of_a_large_file_its_first_bytes_are_read(big: Path, folder: Path) -> None:
    events: list[child.Event] = []
    (known,) = read_headers([big], folder, events.append)
    assert big.stat().st_size > 30e9
    assert known.bytes_read <= 12 * MB
    assert known.header.blocks == 80
    assert known.header.tokenizer.size == shapes.LLAMA3_TOKENS
    assert len(known.header.tensors) == 723
    assert known.header.size_bytes == known.sparse.stat().st_size == big.stat().st_size
    assert known.origin == str(big)
    assert known.bytes_read
    assert {(event["event"], event["file"]) for event in events} == {("reading", "big.gguf")}
    assert events[-1]["bytes"] == known.bytes_read
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 10 * MB


def test_a_kept_header_needs_no_child_and_no_time(big: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_one(big, folder)
    monkeypatch.setattr(child, "call", no_child)
    again = read_one(str(big), folder)
    assert again == replace(first, bytes_read=0)
    began = time.process_time()
    read_one(big, folder)
    assert time.process_time() - began < 0.2


def test_one_child_reads_all_that_is_missing(
    tiny: Path, draft: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_one(tiny, folder)
    calls: list[int] = []
    call = child.call

    def counted(module: str, spec: headers.HeaderJob, *arguments: object, **options: object) -> object:
        calls.append(len(spec.found))
        return call(module, spec, *arguments, **options)

    monkeypatch.setattr(child, "call", counted)
    copy = folder.parent / "copy.gguf"
    shutil.copyfile(tiny, copy)
    known = read_headers([draft, tiny, copy, draft], folder)
    assert calls == [2]
    assert [each.bytes_read == 0 for each in known] == [False, True, False, False]
    assert [each.header.name for each in known] == [draft.name, "tiny.gguf", "copy.gguf", draft.name]
    assert known[0] == known[3]


def test_a_changed_file_is_read_again(tiny: Path, folder: Path) -> None:
    path = folder.parent / "model.gguf"
    shutil.copyfile(tiny, path)
    assert read_one(path, folder).bytes_read
    os.utime(path, ns=(1, 1))
    assert read_one(path, folder).bytes_read
    shapes.write(path, shapes.SHAPES["tiny-moe"])
    assert read_one(path, folder).header.experts > 0


def test_llama_cpp_reads_the_sparse_file_with_its_vocabulary(draft: Path, folder: Path) -> None:
    known = read_one(draft, folder)
    assert vocabulary(known.sparse) == vocabulary(draft) > 1000


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        ({"add": {"general.file_type": True}}, "general.file_type"),
        ({"add": {"tokenizer.ggml.add_bos_token": "yes"}}, "tokenizer.ggml.add_bos_token"),
        ({"add": {"tokenizer.ggml.merges": "a b"}}, "merges"),
        ({"add": {"llama.attention.layer_norm_rms_epsilon": "1e-5"}}, "llama.attention.layer_norm_rms_epsilon"),
        ({"drop": ("llama.attention.layer_norm_rms_epsilon",)}, "llama.attention.layer_norm_rms_epsilon"),
        ({"drop": ("tokenizer.ggml.model",)}, "tokenizer.ggml.model"),
        ({"drop": ("tokenizer.ggml.tokens",)}, "vocab"),
    ],
)
def test_what_llama_cpp_would_refuse_is_refused(
    edit: dict[str, Any], key: str, draft: Path, folder: Path, tmp_path: Path
) -> None:
    path = gguf_files.rewritten(draft, tmp_path / "edited.gguf", **edit)
    read_one(path, folder)  # its shape is clear
    for _ in range(2):  # the second time from the cache, which does not say that it loads
        with pytest.raises(ModelError, match=f"^edited.gguf: llama.cpp cannot load it: .*{key}") as caught:
            read_headers([path], folder, loads=True)
        assert caught.value.hint.startswith("the file is damaged or made for another llama.cpp")


def test_llama_cpp_loads_a_header_once(draft: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_headers([draft], folder, loads=True)
    monkeypatch.setattr(child, "call", no_child)
    read_headers([draft], folder, loads=True)


def vocabulary(path: Path) -> int:
    lib = load_library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model
    try:
        return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    finally:
        lib.llama_model_free(model)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("empty", "is empty"),
        ("no GGUF", "a Git LFS pointer"),
        ("cut in the magic", "not a GGUF file"),
        ("cut in the counts", "truncated within its header"),
        ("cut in the keys", "truncated within its header"),
        ("cut in the data", r"truncated: it has [\d,]+ of [\d,]+ bytes"),
        ("noise after the magic", "damaged"),
        ("noise after the version", "damaged"),
        ("noise after the counts", "damaged"),
        ("noise after some keys", "damaged"),
    ],
)
def test_a_damaged_file_is_refused(damaged: dict[str, Path], damage: str, says: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=says) as refusal:
        read_here(damaged[damage], folder)
    assert refusal.value.hint
    assert not list(folder.glob("*"))


def test_a_damaged_file_is_refused_in_the_child(damaged: dict[str, Path], folder: Path) -> None:
    with pytest.raises(ModelError, match="truncated"):
        read_one(damaged["cut in the data"], folder)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("nothing.gguf", "does not exist"),
        (".", "is a folder"),
        ("/dev/null", "is not a file"),
        ("a\0b", "cannot be read"),
        ("b\udcffd.gguf", "not UTF-8"),
        ("https://", "not a valid URL"),
        ("http://[", "not a valid URL"),
        ("x-00004-of-00003.gguf", "part 4 of 3"),
        ("x-00000-of-00003.gguf", "part 0 of 3"),
        ("x-00001-of-99999.gguf", "part 1 of 99999"),
    ],
)
def test_what_is_no_file_is_refused(where: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "call", no_child)
    with pytest.raises(GgufspecError, match=says) as refusal:
        read_one(where, folder)
    assert refusal.value.hint


def test_no_more_than_the_bound_is_read(big: Path) -> None:
    reads: list[tuple[int, int]] = []

    class Watched(locate.LocalFile):
        def read(self, offset: int, count: int) -> bytes:
            reads.append((offset, count))
            return super().read(offset, count)

    with pytest.raises(ModelError, match="no complete header in its first 3,000,000 bytes"):
        headers.read_prefix(Watched.at(big), 3_000_000)
    assert [offset for offset, _ in reads] == [0, MB, 2 * MB]
    assert sum(count for _, count in reads) == 3_000_000


def test_the_child_is_bounded_in_memory() -> None:
    program = """
from ggufspec.child import limited_memory
with limited_memory(1 << 28):
    kept = bytearray(1 << 20)
    try:
        bytearray(1 << 29)
    except MemoryError:
        print("bounded")
bytearray(1 << 29)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ("bounded\n" if sys.platform == "linux" else "")


def test_a_death_in_the_child_names_the_file(tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*arguments: object, **options: object) -> None:
        raise ChildError("ended by SIGABRT")

    monkeypatch.setattr(child, "call", dies)
    with pytest.raises(ChildError, match=r"tiny\.gguf.*SIGABRT"):
        read_one(tiny, folder)


# ---- split models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_stands_for_all(parts: list[Path], tiny: Path, folder: Path, given: int) -> None:
    read_here(parts[given], folder)
    known = read_one(parts[given], folder)
    assert known.bytes_read == 0
    assert known.header.parts == 3
    assert known.header.name == parts[0].name
    assert known.header.size_bytes == sum(path.stat().st_size for path in parts)
    assert sorted(t.name for t in known.header.tensors) == sorted(t.name for t in TINY.tensors)
    assert known.header.weight_bytes() == read_one(tiny, folder).header.weight_bytes()
    assert known.sparse.name.endswith("-00001-of-00003.gguf")
    metadata_only = gguf.parse_header(known.metadata_only.read_bytes()[:MB])
    assert len(metadata_only.tensors) == len(TINY.tensors)
    assert vocabulary(known.sparse) == TINY.vocabulary


def test_a_missing_part_is_named(parts: list[Path], folder: Path) -> None:
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"part 2 of 3 is missing: .*-00002-of-00003\.gguf"):
        read_one(parts[0], folder)
    with pytest.raises(ModelError, match="part 2 of 3 is missing"):
        read_one(parts[1], folder)


def test_parts_in_the_wrong_order_are_refused(parts: list[Path], folder: Path) -> None:
    other = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(other)
    with pytest.raises(ModelError, match=r"part 2 of 3 .* claims to be part 3 of 3"):
        read_here(parts[0], folder)


def test_parts_of_another_split_are_refused(parts: list[Path], folder: Path) -> None:
    two = shapes.write_split(folder.parent, TINY, 2)
    shutil.copyfile(two[1], parts[1])
    with pytest.raises(ModelError, match=r"part 2 of 3 .* claims to be part 2 of 2"):
        read_here(parts[0], folder)


def test_a_part_without_a_number_is_refused(parts: list[Path], tiny: Path, folder: Path) -> None:
    shutil.copyfile(tiny, parts[0])
    with pytest.raises(ModelError, match=r"part 1 of 3 .* claims to be part 1 of 1"):
        read_here(parts[0], folder)


def test_a_part_under_another_name_is_refused(parts: list[Path], folder: Path) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ModelError, match="one of 3 parts, but not named as one"):
        read_here(renamed, folder)


@pytest.mark.parametrize("empty", [False, True])
def test_parts_that_cat_joined_are_refused(parts: list[Path], folder: Path, empty: bool) -> None:
    if empty:  # llama-gguf-split --no-tensor-first-split
        keys = {
            "split.count": np.uint16(3),
            "split.tensors.count": np.int32(len(TINY.tensors)),
            "split.no": np.uint16(0),
        }
        shapes.write_file(parts[0], TINY.metadata | keys, [])
    joined = folder.parent / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(ModelError, match="3 parts joined by cat: its header covers only the first") as refusal:
        read_here(joined, folder)
    assert "llama-gguf-split --merge NAME-00001-of-00003.gguf" in refusal.value.hint


def test_a_first_part_without_tensors_is_one(folder: Path) -> None:
    names = [folder.parent / f"{TINY.name}-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    count = {"split.count": np.uint16(3), "split.tensors.count": np.int32(len(TINY.tensors))}
    step = -(-len(TINY.tensors) // 2)
    for i, tensors in enumerate(([], TINY.tensors[:step], TINY.tensors[step:])):
        own = {} if i else TINY.metadata | shapes.NO_TOKENIZER
        shapes.write_file(names[i], own | count | {"split.no": np.uint16(i)}, tensors)
    header = read_one(names[0], folder).header
    assert (header.parts, len(header.tensors)) == (3, len(TINY.tensors))


@pytest.mark.parametrize(
    ("kind", "says", "hint"),
    [
        (156, "has the type 156, IQ3_KS of ik_llama.cpp", "run it with ik_llama.cpp"),
        (137, "has the type 137, IQ2_K of ik_llama.cpp", "run it with ik_llama.cpp"),
        (212, "has the type 212, a type of ik_llama.cpp", "run it with ik_llama.cpp"),
        (3000, "has the type 3000, which this llama.cpp does not support", "update llama-cpp-python"),
        (99, "has the type 99, which this llama.cpp does not support", "update llama-cpp-python"),
        (31, "has the type Q4_0_4_4 REMOVED", "choose a file in another type"),
    ],
)
def test_a_type_that_llama_cpp_does_not_have_is_named(
    draft: Path, folder: Path, kind: int, says: str, hint: str
) -> None:
    data, name = bytearray(draft.read_bytes()), b"blk.0.ffn_down.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    data[place : place + 4] = kind.to_bytes(4, "little")
    foreign = folder.parent / "foreign.gguf"
    foreign.write_bytes(data)
    with pytest.raises(ModelError, match=f"foreign.gguf: {name.decode()} {says}") as refusal:
        read_here(foreign, folder)
    assert hint in refusal.value.hint
    foreign.write_bytes(data[: place + 2])  # what is left of the type is none
    with pytest.raises(ModelError, match="truncated within its header"):
        read_here(foreign, folder)


def test_a_tensor_in_two_parts_is_refused(folder: Path) -> None:
    keys = {"split.count": np.uint16(2), "split.tensors.count": np.int32(2)}
    tensor = shapes.Tensor("output_norm.weight", "F32", (8,))
    names = [folder.parent / f"x-{i}-of-00002.gguf" for i in ("00001", "00002")]
    shapes.write_file(names[0], TINY.metadata | keys | {"split.no": np.uint16(0)}, [tensor])
    shapes.write_file(names[1], keys | {"split.no": np.uint16(1)}, [tensor])
    with pytest.raises(ModelError, match="a tensor of the same name"):
        read_here(names[1], folder)
    shapes.write_file(names[1], keys | {"split.no": np.uint16(1)}, [])
    with pytest.raises(ModelError, match="have 1 of 2 tensors"):
        read_here(names[1], folder)


# ---- what is kept -------------------------------------------------------------------------------------------------


def test_a_damaged_entry_is_read_again(tiny: Path, folder: Path) -> None:
    first = read_one(tiny, folder)
    entry = next(folder.glob("*.json"))
    text = entry.read_text()

    def other_version() -> None:
        entry.write_text(text.replace("ggufspec/header@2", "ggufspec/header@1"))

    def other_key() -> None:
        entry.write_text(text.replace(locate.locate(tiny).key, "0" * 64))

    damages = [
        lambda: entry.write_text(text[:-1]),
        lambda: entry.write_text("[]"),
        lambda: entry.write_bytes(b"\xff" * 100),
        other_version,
        other_key,
        lambda: first.metadata_only.unlink(),
        lambda: first.sparse.unlink(),
        lambda: entry.unlink(),
    ]
    for damage in damages:
        damage()
        assert headers.header_cache.load_header(folder, locate.locate(tiny).locator) is None
        read_here(tiny, folder)
        assert read_one(tiny, folder) == replace(first, bytes_read=0)


def test_an_entry_is_written_whole_or_not_at_all(tiny: Path, folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        known = list(pool.map(lambda _: read_one(tiny, folder), range(4)))
    assert len({each.metadata_only for each in known}) == 1
    assert known[0].header == known[3].header
    assert not list(folder.glob("new-*"))
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_written(tiny: Path, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(GgufspecError, match="cannot be written") as refusal:
        read_here(tiny, folder)
    assert refusal.value.hint


def test_numbers_that_are_none_are_kept(folder: Path) -> None:
    odd = {"x.nan": math.nan, "x.big": math.inf, "x.flag": True, "x.no": [], "x.many": [True, False], "x.one": 1.0}
    metadata = {key: value for key, value in odd.items() if value != []}
    path = shapes.write_file(folder.parent / "odd.gguf", TINY.metadata | shapes.NO_TOKENIZER | metadata, TINY.tensors)
    read_here(path, folder)
    kept = read_one(path, folder)
    assert kept.bytes_read == 0
    assert math.isnan(kept.header.metadata["x.nan"])
    assert kept.header.metadata["x.big"] == math.inf
    assert kept.header.metadata["x.flag"] is True
    assert kept.header.metadata["x.many"] == (True, False)
    assert isinstance(kept.header.metadata["x.one"], float)


# ---- over HTTP ----------------------------------------------------------------------------------------------------


def test_of_a_remote_file_its_first_bytes_are_fetched(big: Path, folder: Path, server: Server) -> None:
    url = server.add("models/big.gguf", big)
    known = read_one(url, folder)
    assert known.header == replace(read_one(big, folder).header)
    assert known.bytes_read <= 12 * MB
    assert server.sent["/models/big.gguf"] <= 12 * MB
    assert known.origin == url
    asked = len(server.requests)
    again = read_one(url, folder)
    assert again == replace(known, bytes_read=0)
    assert len(server.requests) == asked + 1


def test_a_signature_is_neither_kept_nor_compared(tiny: Path, folder: Path, server: Server) -> None:
    address = server.add("tiny.gguf", tiny).replace("http://", "http://me:secret@")
    first = read_one(f"{address}?file=1&X-Amz-Signature=secret1&Expires=2", folder)
    assert first.origin == f"{server.address}/tiny.gguf?file=1"
    assert read_one(f"{address}?file=1&X-Amz-Signature=secret2&Expires=3", folder).bytes_read == 0
    assert not any("secret" in path.read_text() for path in folder.glob("*.json"))
    assert locate.locate(f"{address}?file=2").key != locate.locate(f"{address}?file=1").key


@pytest.mark.parametrize(
    ("modes", "says"),
    [
        (["no ranges"], "does not support ranges"),
        (["404"], "there is no "),
        (["401"], "refuses .*401"),
        (["403"], "refuses .*403"),
        (["416"], "empty or truncated"),
        (["418"], "answers 418"),
        (["503"], "is busy .503"),
        (["429"], "is busy .429"),
        (["hang up"], "the connection broke"),
        (["fine", "wrong start"], "has 1-"),
        (["absurd size"], "of 100000000000000000"),
        (["no size"], "does not name its range"),
        (["no words"], "does not name its range"),
        (["fine", "shorter"], "has 0-"),
        (["fine", "short"], "the connection broke"),
        (["fine", "short close"], r"sent [\d,]+ of [\d,]+ bytes"),
        (["fine", "endless"], "more than the "),
        (["fine", "changed"], "changed while it was read"),
    ],
)
def test_a_bad_answer_is_refused(tiny: Path, server: Server, modes: list[str], says: str) -> None:
    url = server.add("tiny.gguf", tiny, *modes)
    with pytest.raises(GgufspecError, match=says) as refusal:
        headers.read_prefix(locate.locate(url).files[0])
    assert refusal.value.hint
    assert server.sent["/tiny.gguf"] < 16 * MB


def test_a_lie_about_the_size_is_seen(big: Path, server: Server) -> None:
    url = server.add("big.gguf", big, "fine", "fine", "wrong size")
    with pytest.raises(ModelError, match="changed while it was read"):
        headers.read_prefix(locate.locate(url).files[0])


def test_an_empty_file_has_no_range(folder: Path, server: Server) -> None:
    empty = folder.parent / "empty.gguf"
    empty.touch()
    with pytest.raises(ModelError, match="empty or truncated"):
        locate.locate(server.add("empty.gguf", empty))


@pytest.mark.parametrize("trouble", ["503", "500", "429", "hang up", "short", "short close"])
def test_it_tries_three_times(tiny: Path, server: Server, trouble: str) -> None:
    url = server.add("tiny.gguf", tiny, "fine", trouble, trouble, "fine")
    parsed, _, _ = headers.read_prefix(locate.locate(url).files[0])
    assert len(parsed.tensors) == len(TINY.tensors)
    assert len(server.requests) == 4


def test_a_server_without_ranges_is_left_at_once(big: Path, folder: Path, server: Server) -> None:
    with pytest.raises(ModelError, match="does not support ranges"):
        read_one(server.add("big.gguf", big, "no ranges"), folder)
    assert server.sent["/big.gguf"] < 16 * MB  # what was on its way


def test_a_file_without_a_version(tiny: Path, folder: Path, server: Server) -> None:
    url = server.add("tiny.gguf", tiny, etag=None)
    assert read_one(url, folder).header.blocks == read_one(url, folder).header.blocks


def test_a_split_model_over_http(parts: list[Path], folder: Path, server: Server) -> None:
    urls = [server.add(f"parts/{path.name}", path) for path in parts]
    known = read_one(urls[1], folder)
    assert known.header.parts == 3
    assert known.origin == urls[0]
    assert read_one(urls[2], folder).bytes_read == 0
    del server.files[f"/parts/{parts[2].name}"]
    with pytest.raises(ModelError, match=r"there is no .*-00003-of-00003"):
        read_one(urls[0], folder)


def test_redirects_are_followed_to_another_server(tiny: Path, folder: Path, server: Server) -> None:
    with serving() as other:
        there = other.add("elsewhere.gguf", tiny)
        url = server.add("tiny.gguf", tiny, redirect=there)
        known = read_one(url.replace("http://", "http://me:secret@"), folder)
        assert known.header.name == "tiny.gguf"
        assert all("authorization" in headers for _, _, headers in server.requests)
        assert not any("authorization" in headers for _, _, headers in other.requests)
    circle = server.add("circle.gguf", tiny, redirect=f"{server.address}/circle.gguf")
    with pytest.raises(GgufspecError, match="cannot be read"):
        locate.locate(circle)
    away = server.add("away.gguf", tiny, redirect="ftp://127.0.0.1/x.gguf")
    with pytest.raises(GgufspecError, match="cannot be read"):
        locate.locate(away)


def test_without_a_network_the_kept_header_is_stale(tiny: Path, folder: Path) -> None:
    with serving() as server:
        url = server.add("tiny.gguf", tiny)
        first = read_one(url, folder)
    assert read_one(url, folder) == replace(first, bytes_read=0)
    with pytest.raises(client.UnreachableError, match="cannot be reached") as refusal:
        read_one(url.replace("tiny", "other"), folder)
    assert refusal.value.hint
    next(folder.glob("*.json")).write_bytes(b"../\xff")
    with pytest.raises(client.UnreachableError):
        read_one(url, folder)


def test_a_busy_server_leaves_the_kept_header(tiny: Path, folder: Path, server: Server) -> None:
    url = server.add("tiny.gguf", tiny)
    read_one(url, folder)
    server.files["/tiny.gguf"].modes = ["503"]
    assert read_one(url, folder).bytes_read == 0
    server.files["/tiny.gguf"].modes = ["404"]
    client._silent.clear()  # else it is not asked for a minute
    with pytest.raises(ModelError, match="there is no"):
        read_one(url, folder)


# ---- on the hub ---------------------------------------------------------------------------------------------------


@pytest.fixture
def repo(tmp_path: Path, tiny: Path, parts: list[Path]) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf"):
        shutil.copyfile(tiny, folder / name)
    for path in parts:
        shutil.copyfile(path, folder / path.name.replace(TINY.name, "m-F16"))
    return folder


def test_a_file_of_the_hub(hub_server: Server, repo: Path, folder: Path) -> None:
    hub_server.add_repo("user/m-GGUF", repo)
    known = read_one(HubFile("user/m-GGUF", "m-Q8_0.gguf"), folder)
    assert known.origin == f"user/m-GGUF/m-Q8_0.gguf@{COMMIT}"
    assert known.header.name == "m-Q8_0.gguf"
    assert f"/user/m-GGUF/resolve/{COMMIT}/m-Q8_0.gguf" in hub_server.asked("GET")
    asked = len(hub_server.requests)
    assert read_one(HubFile("user/m-GGUF", "m-Q8_0.gguf"), folder).bytes_read == 0
    assert hub_server.requests[asked:][0][:2] == ("HEAD", "/user/m-GGUF/resolve/main/m-Q8_0.gguf")
    assert len(hub_server.requests) == asked + 1
    pinned = HubFile("user/m-GGUF", "m-Q8_0.gguf", COMMIT)
    read_one(pinned, folder)
    asked = len(hub_server.requests)
    assert read_one(pinned, folder).bytes_read == 0  # a commit cannot change
    assert len(hub_server.requests) == asked


@pytest.mark.parametrize("kind", ["resolve", "blob"])
def test_a_link_to_the_hub_is_a_file_of_it(hub_server: Server, repo: Path, folder: Path, kind: str) -> None:
    hub_server.add_repo("user/m-GGUF", repo)
    link = f"{hub_server.address}/user/m-GGUF/{kind}/main/m-Q8_0.gguf?download=true"
    assert locate.plain(link) == HubFile("user/m-GGUF", "m-Q8_0.gguf", "main")
    assert read_one(link, folder).origin.startswith("user/m-GGUF/")


def test_a_split_model_of_the_hub(hub_server: Server, repo: Path, folder: Path) -> None:
    hub_server.add_repo("user/m-GGUF", repo)
    known = read_one(HubFile("user/m-GGUF", "m-F16-00002-of-00003.gguf"), folder)
    assert known.header.parts == 3
    assert known.header.name == "m-F16-00001-of-00003.gguf"


def test_the_token_goes_to_the_hub_alone(
    hub_server: Server, repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving() as cdn:
        there = cdn.add("blob", repo / "m-Q8_0.gguf")
        hub_server.add_repo("user/m-GGUF", repo, token="hf_secret", redirect=there)
        known = read_one(HubFile("user/m-GGUF", "m-Q8_0.gguf"), folder)
        assert known.header.name == "m-Q8_0.gguf"
        assert {headers["authorization"] for _, _, headers in hub_server.requests} == {"Bearer hf_secret"}
        assert cdn.sent["/blob"] > 0
        assert not any("authorization" in headers for _, _, headers in cdn.requests)
        plain = cdn.add("plain.gguf", repo / "m-Q8_0.gguf")
        locate.locate(plain)
        assert not any("authorization" in headers for _, _, headers in cdn.requests)


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfhf_secret\n", "hf_s\u00e9cret".encode(), b"hf_\xff"])
@pytest.mark.parametrize("place", ["file", "variable"])
def test_a_token_that_cannot_be_sent_is_named(
    hub_server: Server, repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, place: str
) -> None:
    from huggingface_hub import constants

    path = repo / "token"
    path.write_bytes(data)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path))
    if place == "variable":
        monkeypatch.setenv("HF_TOKEN", os.fsdecode(data))
    hub_server.add_repo("user/m-GGUF", repo)
    for ask in (
        lambda: read_one(HubFile("user/m-GGUF", "m-Q8_0.gguf"), folder),
        lambda: client.contents("user/m-GGUF"),
        lambda: client.search("m", 1),
    ):
        with pytest.raises(GgufspecError, match="the Hugging Face token has") as refusal:
            ask()
        assert "HF_TOKEN" in refusal.value.hint
    assert not hub_server.requests


@pytest.mark.parametrize(
    ("name", "more", "says", "hint"),
    [
        (HubFile("user/gated", "m-Q8_0.gguf"), {"token": "x", "gated": True}, "is gated", "HF_TOKEN"),
        (
            HubFile("user/gated", "m-Q8_0.gguf"),
            {"token": "x"},
            "no repository user/gated, or it is private",
            "HF_TOKEN",
        ),
        (HubFile("user/gated", "m-Q9.gguf"), {}, "has no file 'm-Q9.gguf'", "/user/gated"),
        (HubFile("user/gated", "m-Q8_0.gguf", "v2"), {}, "has no revision 'v2'", "/user/gated"),
        (HubFile("user/none", "m-Q8_0.gguf"), {}, "no repository user/none", "/user/none"),
        (HubFile("a/b/c", "m-Q8_0.gguf"), {}, "is not a repository on the hub", "USER/NAME"),
    ],
)
def test_what_the_hub_refuses(
    hub_server: Server, repo: Path, folder: Path, name: HubFile, more: dict[str, object], says: str, hint: str
) -> None:
    hub_server.add_repo("user/gated", repo, **more)
    with pytest.raises(GgufspecError, match=says) as refusal:
        read_one(name, folder)
    assert hint in refusal.value.hint


def test_a_busy_hub_is_asked_again(hub_server: Server, repo: Path, folder: Path) -> None:
    hub_server.add_repo("user/m-GGUF", repo)
    hub_server.repos["user/m-GGUF"]["m-Q8_0.gguf"].modes = ["503", "503", "fine"]
    assert client.remote_file("user/m-GGUF", "m-Q8_0.gguf").size_bytes == (repo / "m-Q8_0.gguf").stat().st_size
    hub_server.repos["user/m-GGUF"]["m-Q8_0.gguf"].modes = ["503"]
    with pytest.raises(client.UnreachableError, match="503"):
        read_one(HubFile("user/m-GGUF", "m-Q8_0.gguf"), folder)


def test_a_downloaded_file_is_read_here(hub_server: Server, repo: Path, folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "hub" / "models--user--m-GGUF"
    (cache / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    for name in ("m-Q8_0.gguf", "m-F16-00001-of-00003.gguf"):
        shutil.copyfile(repo / name, cache / "snapshots" / COMMIT / name)
    known = read_one(HubFile("user/m-GGUF", "m-Q8_0.gguf"), folder)
    assert known.origin == str(cache / "snapshots" / COMMIT / "m-Q8_0.gguf")
    assert hub_server.requests == []
    one = ModelSource(repo="user/m-GGUF", file="m-Q8_0.gguf")
    split = ModelSource(repo="user/m-GGUF", file="m-F16-00001-of-00003.gguf")
    profile = Profile(name="p", why="", source="", target=one, draft=split)
    assert header_sources(profile) == (Path(known.origin), HubFile("user/m-GGUF", split.file))
    hub_server.add_repo("user/m-GGUF", repo)  # of the split model one part is here, which does not do
    assert read_one(HubFile("user/m-GGUF", "m-F16-00001-of-00003.gguf"), folder).origin.startswith("user/m-GGUF/")


OFFLINE = """
import json, sys
from pathlib import Path
from ggufspec.errors import GgufspecError
from ggufspec.models.hub import choice
from ggufspec.models.headers import HubFile, read_headers
try:
    (known,) = read_headers([HubFile("user/m-GGUF", "m-Q8_0.gguf")], Path(sys.argv[1]))
    print(json.dumps([known.bytes_read == 0, known.origin]))
    choice.hub_file("user/m-GGUF:Q8_0")
except GgufspecError as error:
    print(json.dumps([error.message, error.hint]))
"""


def test_the_environment_rules_the_hub(hub_server: Server, repo: Path, folder: Path) -> None:
    hub_server.add_repo("user/m-GGUF", repo)

    def lines(**more: str) -> list[list[object]]:
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE, folder], capture_output=True, text=True, env={**os.environ, **more}
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    ((message, hint),) = lines(HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids" in str(message)
    assert hint.startswith("unset HF_HUB_OFFLINE")
    assert lines()[0] == [False, f"user/m-GGUF/m-Q8_0.gguf@{COMMIT}"]
    kept, (message, _) = lines(HF_HUB_OFFLINE="1")
    assert kept == [True, f"user/m-GGUF/m-Q8_0.gguf@{COMMIT}"]
    assert "HF_HUB_OFFLINE forbids" in str(message)


def test_a_quant_is_found(hub_server: Server, repo: Path) -> None:
    hub_server.add_repo("user/m-GGUF", repo)
    assert choice.hub_file("user/m-GGUF:Q8_0") == HubFile("user/m-GGUF", "m-Q8_0.gguf")
    assert choice.hub_file("user/m-GGUF:f16").file == "m-F16-00001-of-00003.gguf"
    assert choice.hub_file("user/m-GGUF:q8_0") == HubFile("user/m-GGUF", "m-Q8_0.gguf")
    assert choice.hub_file("user/m-GGUF").file == "m-Q4_K_M.gguf"
    with pytest.raises(ModelError, match="has no model in Q5_K_M; it has F16, Q4_K_M, Q8_0") as refusal:
        choice.hub_file("user/m-GGUF:Q5_K_M")
    assert refusal.value.hint == "for example user/m-GGUF:Q4_K_M"
    with pytest.raises(ModelError, match="no repository user/none"):
        choice.hub_file("user/none:Q8_0")


@pytest.mark.parametrize(
    ("there", "quant", "found"),
    [
        (["a.Q4_K_M.gguf", "a.Q4_K_S.gguf"], "Q4_K_M", ["a.Q4_K_M.gguf"]),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"], "UD-Q4_K_XL", ["a-UD-Q4_K_XL.gguf"]),
        (["Q8_0/a-Q8_0-00002-of-00002.gguf", "Q8_0/a-Q8_0-00001-of-00002.gguf"], "Q8_0", None),
        (["a_q4_k_m.gguf"], "", ["a_q4_k_m.gguf"]),
    ],
)
def test_which_file_a_quant_means(there: list[str], quant: str, found: list[str] | None) -> None:
    assert choice.choose_files("user/a", there, quant) == tuple(found or sorted(there))


HEADS = [
    *("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mtp-a-Q4_0.gguf", "mtp-a-Q8_0.gguf", "sub/eagle3-a-Q8_0.gguf"),
    *("dflash-a-Q4_K_M.gguf", "dspark-a-Q4_K_M.gguf"),
]


@pytest.mark.parametrize(
    ("there", "quant", "draft", "found"),
    [
        (HEADS, "", False, "a-Q4_K_M.gguf"),
        (HEADS, "Q8_0", False, "a-Q8_0.gguf"),
        (HEADS, "Q8_0", True, "a-Q8_0.gguf"),
        (HEADS[1:], "", False, "a-Q8_0.gguf"),  # the only model
        (HEADS, "eagle3", True, "sub/eagle3-a-Q8_0.gguf"),
        (HEADS, "mtp-Q8_0", True, "mtp-a-Q8_0.gguf"),
        (["eagle3-a-Q8_0.gguf"], "", True, "eagle3-a-Q8_0.gguf"),
        (["mtp.gguf", "dflash.gguf"], "dflash", False, "dflash.gguf"),  # names of models
    ],
)
def test_a_head_is_no_quantisation_of_its_target(there: list[str], quant: str, draft: bool, found: str) -> None:
    assert choice.choose_files("user/a", there, quant, draft=draft) == (found,)


@pytest.mark.parametrize(
    ("there", "quant", "draft", "says", "hint"),
    [
        (HEADS, "Q4_0", False, "no model in Q4_0; it has Q4_K_M, Q8_0", "for example user/a:Q"),
        (HEADS, "mtp", True, "2 mtp heads: mtp-a-Q4_0.gguf, mtp-a-Q8_0.gguf", "user/a:mtp-a-Q4_0.gguf"),
        (HEADS, "mtp-Q6_K", True, "no mtp head in Q6_K; it has Q4_0, Q8_0", "user/a:mtp-Q4_0"),
        (HEADS[:4], "eagle3", True, "no eagle3-….gguf; its heads are mtp-a-Q4_0.gguf, mtp", "see https://"),
        (HEADS[:2], "mtp", True, "has no mtp-….gguf", "--drafter mtp uses blocks in the target's own file"),
        (HEADS[2:4], "", False, "has heads but no target: mtp-a-Q4_0.gguf", "-hf TARGET -hfd user/a"),
    ],
)
def test_a_head_that_is_not_there(there: list[str], quant: str, draft: bool, says: str, hint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)) as refusal:
        choice.choose_files("user/a", there, quant, draft=draft)
    assert hint in refusal.value.hint


def test_a_head_has_its_role() -> None:
    assert choice.hub_file("user/a/mtp-a-Q8_0.gguf", draft=True).file == "mtp-a-Q8_0.gguf"
    with pytest.raises(
        ModelError, match=r"mtp-a-Q8_0\.gguf is a head for multi-token prediction, not a target"
    ) as target:
        choice.hub_file("user/a/mtp-a-Q8_0.gguf")
    assert target.value.hint == "-hf TARGET -hfd user/a/mtp-a-Q8_0.gguf"
    for kind, name in (("dflash", "a DFlash drafter"), ("dspark", "a DSpark drafter")):
        with pytest.raises(ModelError, match=rf"{kind}-a\.gguf is {name}, which ggufspec cannot run") as refusal:
            choice.hub_file(f"user/a/{kind}-a.gguf", draft=True)
        assert f"--spec-type draft-{kind}" in refusal.value.hint


@pytest.mark.parametrize(
    ("there", "quant", "says"),
    [
        (["README.md"], "Q4_K_M", "has no GGUF file"),
        (["a-Q4_K_M.gguf"], "Q4_K", "has no model in Q4_K; it has Q4_K_M"),
        (["a.gguf"], "Q4_K", "it has a"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "has 2 models in Q8_0: a-Q8_0.gguf, b-Q8_0.gguf"),
        (["a-Q8_0.gguf", "a-Q6_K.gguf"], "", "has no model in Q4_K_M; it has Q6_K, Q8_0"),
    ],
)
def test_which_file_a_quant_does_not_mean(there: list[str], quant: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refusal:
        choice.choose_files("user/a", there, quant)
    assert refusal.value.hint


# ---- profiles -----------------------------------------------------------------------------------------------------


def test_a_profile_can_be_read_before_its_download(tmp_path: Path) -> None:
    bundled = Path(__file__).parents[2] / "profiles"
    target, draft = header_sources(load_profile(bundled / "demo.toml"))
    assert isinstance(target, Path)
    assert target.is_file()
    assert isinstance(draft, Path)
    big, small = header_sources(load_profile("llama3-70b"))
    assert isinstance(big, HubFile)
    assert big.file == "Meta-Llama-3-70B-Instruct-Q3_K_S.gguf"
    assert isinstance(small, HubFile)
    with pytest.raises(ModelError, match="which does not exist"):
        header_sources(load_profile(shutil.copy(bundled / "demo.toml", tmp_path)))
