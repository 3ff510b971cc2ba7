"""Ten thousand damaged headers through llama.cpp's parser, in one child process of bounded memory.

Run as a program it is that child: it writes the number of each case before it, so that a death names its case.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ggufspec.errors import ModelError
from ggufspec.llamacpp import gguf

CASES, SEED, SKELETONS = 10_000, 20_240, 300
LENGTHS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TYPES = range(14)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass
class Seed:
    """A good header and where its fields are: what is worth a wrong value."""

    data: bytes
    lengths: list[int]  # of 64-bit counts, lengths, dimensions and offsets
    types: list[int]  # of 32-bit types
    pairs: list[tuple[int, int]]  # of keys with their values: (begin, end)
    values: list[tuple[int, int]]  # of numbers: (begin, bytes)
    tensors: list[tuple[int, int]]  # of what says what a tensor is: (begin, end)


def dissect(data: bytes) -> Seed:
    """Find the fields of a good header: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    seed = Seed(b"", [8, 16], [4], [], [], [])
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    at = 24

    def u32() -> int:
        nonlocal at
        at += 4
        return int(struct.unpack_from("<I", data, at - 4)[0])

    def u64(*, note: bool = True) -> int:
        nonlocal at
        if note:
            seed.lengths.append(at)
        at += 8
        return int(struct.unpack_from("<Q", data, at - 8)[0])

    def text(*, note: bool = True) -> None:
        nonlocal at
        length = u64(note=note)
        at += length

    for _ in range(keys):
        begin = at
        text()
        seed.types.append(at)
        kind = u32()
        if kind == _STRING:
            text()
        elif kind == _ARRAY:
            seed.types.append(at)
            item, count = u32(), u64()
            if item == _STRING:
                for index in range(count):
                    text(note=index < 4)
            else:
                at += count * _SIZES[item]
        else:
            seed.values.append((at, _SIZES[kind]))
            at += _SIZES[kind]
        seed.pairs.append((begin, at))
    for _ in range(tensors):
        begin = at
        text()
        for _ in range(u32()):
            u64()
        seed.types.append(at)
        u32()
        u64()
        seed.tensors.append((begin, at))
    seed.data = data[: at + 32 + -at % 32]
    return seed


def seeds(folder: Path) -> list[Seed]:
    from ggufspec import demo_pair
    from tests.support import shapes

    paths = [demo_pair()[1]]
    names = ("tiny-llama", "tiny-moe", "tiny-mla", "tiny-hybrid", "tiny-swa")
    paths += [shapes.write(folder / f"{name}.gguf", shapes.SHAPES[name]) for name in names]
    paths += shapes.write_split(folder, shapes.SHAPES["tiny-llama"], 2)
    return [dissect(path.read_bytes()[: 1 << 20]) for path in paths]


def flip(rng: random.Random, seed: Seed) -> bytes:
    data = bytearray(seed.data)
    for _ in range(rng.choice((1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def flip_early(rng: random.Random, seed: Seed) -> bytes:
    data = bytearray(seed.data)
    data[rng.randrange(min(len(data), 2048))] = rng.randrange(256)
    return bytes(data)


def lie(rng: random.Random, seed: Seed) -> bytes:
    data = bytearray(seed.data)
    for at in rng.sample(seed.lengths, rng.choice((1, 1, 2))):
        near = struct.unpack_from("<Q", data, at)[0] + rng.choice((-1, 1, 32))
        struct.pack_into("<Q", data, at, rng.choice((*LENGTHS, near)) % 2**64)
    return bytes(data)


def retype(rng: random.Random, seed: Seed) -> bytes:
    data = bytearray(seed.data)
    for at in rng.sample(seed.types, rng.choice((1, 1, 3))):
        struct.pack_into("<I", data, at, rng.choice((*TYPES, 39, 2**31, 2**32 - 1)))
    return bytes(data)


def revalue(rng: random.Random, seed: Seed) -> bytes:
    data = bytearray(seed.data)
    for at, size in rng.sample(seed.values, rng.choice((1, 1, 2))):
        data[at : at + size] = (rng.choice((0, 1, 2, 511, 512, 2**31, 2**63, 2**64 - 1)) % 256**size).to_bytes(
            size, "little"
        )
    return bytes(data)


def cut(rng: random.Random, seed: Seed) -> bytes:
    return seed.data[: rng.randrange(len(seed.data))]


def duplicate(rng: random.Random, seed: Seed) -> bytes:
    begin, end = rng.choice(seed.pairs)
    data = seed.data[:end] + seed.data[begin:]
    return data[:16] + struct.pack("<Q", len(seed.pairs) + 1) + data[24:]


def drop(rng: random.Random, seed: Seed) -> bytes:
    """Without a key, or a tensor; the data section may move."""
    which, count, at = rng.choice(((seed.pairs, len(seed.pairs), 16), (seed.tensors, len(seed.tensors), 8)))
    begin, end = rng.choice(which)
    data = seed.data[:begin] + seed.data[end:]
    return data[:at] + struct.pack("<Q", count - 1) + data[at + 8 :] + bytes(32)


def swap(rng: random.Random, seed: Seed) -> bytes:
    """Two keys' places, and so values of wrong types under them."""
    (a, b), (c, d) = sorted(rng.sample(seed.pairs, 2))
    data = seed.data
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def regroup(rng: random.Random, seed: Seed) -> bytes:
    """One key with another's value."""
    (a, b), (c, d) = rng.sample(seed.pairs, 2)
    data = seed.data
    key = data[a : a + 8 + struct.unpack_from("<Q", data, a)[0]]
    value = data[c + 8 + struct.unpack_from("<Q", data, c)[0] : d]
    return data[:a] + key + value + data[b:] + bytes(32)


def noise(rng: random.Random, seed: Seed) -> bytes:
    at = rng.choice((4, 8, 24, rng.randrange(len(seed.data))))
    return seed.data[:at] + rng.randbytes(min(len(seed.data) - at, 4096)) + seed.data[at + 4096 :]


def zero(rng: random.Random, seed: Seed) -> bytes:
    """No text, of a key, a value or a tensor's name."""
    data = bytearray(seed.data)
    begin, end = rng.choice(seed.pairs + seed.tensors)
    for at in range(begin + 8, min(end, begin + 8 + rng.choice((1, 8, 16)))):
        data[at] = 0
    return bytes(data)


MUTATIONS: tuple[Callable[[random.Random, Seed], bytes], ...] = (
    flip, flip_early, lie, lie, retype, revalue, revalue, cut, duplicate, drop, swap, regroup, noise, zero,
)  # fmt: skip


def cases(count: int, folder: Path) -> Iterator[tuple[str, bytes]]:
    """(what was done, the header), the same ones every time."""
    rng = random.Random(SEED)
    good = seeds(folder)
    for index in range(count):
        mutation = MUTATIONS[index % len(MUTATIONS)]
        yield mutation.__name__, mutation(rng, rng.choice(good))


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def child(count: int, files: int, folder: Path) -> None:
    from ggufspec.child import limited_memory
    from ggufspec.llamacpp.library import load_library
    from ggufspec.models.headers import MAX_MEMORY

    load_library()
    with limited_memory(MAX_MEMORY):
        _damage(count, files, folder)


def _damage(count: int, files: int, folder: Path) -> None:
    from ggufspec.models.header import ModelHeader, interpret

    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    good: list[tuple[int, bytes]] = []
    before = 0
    for index, (what, data) in enumerate(cases(count, folder)):
        if index == 200:  # Python's and llama.cpp's own is allocated
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report(f"{index} {what}")
        try:
            header = interpret("fuzz.gguf", [gguf.parse_header(data)], 1 << 30)
            assert isinstance(header, ModelHeader)
            outcomes[f"{what}: header"] += 1
            if len(good) < files and index % (count // files // 3) == 0:
                good.append((index, data))
        except ModelError:
            outcomes[f"{what}: error"] += 1
        except Exception as error:
            wrong.append(f"case {index}, {what}: {type(error).__name__}: {error}")
    expanded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for index, data in good:
        report(f"{index} metadata-only file")
        try:
            gguf.write_metadata_only([data], folder / "metadata-only.gguf")
            outcomes["files"] += 1
        except ModelError:
            outcomes["no files"] += 1
        except Exception as error:
            wrong.append(f"metadata-only file of case {index}: {type(error).__name__}: {error}")
    scale = 1 if sys.platform == "darwin" else 1024
    report(json.dumps({"outcomes": outcomes, "wrong": wrong, "grown_bytes": expanded * scale}))


def test_no_damaged_header_harms(tmp_path: Path) -> None:
    program = [sys.executable, __file__, str(CASES), str(SKELETONS), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, f"died at case {last}: {done.stderr[-2000:]}"
    reported = json.loads(last)
    assert reported["wrong"] == []
    outcomes = reported["outcomes"]
    assert sum(count for what, count in outcomes.items() if ":" in what) == CASES
    assert outcomes["files"] > SKELETONS // 2
    assert min(outcomes.get(f"{mutation.__name__}: error", 0) for mutation in MUTATIONS) > 0
    assert sum(count for what, count in outcomes.items() if what.endswith("header")) > CASES // 10
    assert reported["grown_bytes"] < 64 << 20


def with_key(seed: Seed, key: str, value: bytes) -> bytes:
    """A good header with one more key, the first."""
    entry = struct.pack("<Q", len(key)) + key.encode() + value
    return seed.data[:16] + struct.pack("<Q", len(seed.pairs) + 1) + entry + seed.data[24:] + bytes(32)


def test_what_costs_too_much_is_refused_or_left_out(tmp_path: Path) -> None:
    seed = seeds(tmp_path)[1]
    for at in (8, 16):
        data = seed.data[:at] + struct.pack("<Q", 70_000) + seed.data[at + 8 :]
        with pytest.raises(ModelError, match="more than 65,536 keys or tensors"):
            gguf.parse_header(data)
    tokens = struct.pack("<IIQ", _ARRAY, _STRING, 3_000_000) + bytes(24_000_000)
    with pytest.raises(ModelError, match="a vocabulary of 3,000,000 tokens"):
        gguf.parse_header(with_key(seed, "tokenizer.ggml.tokens", tokens))
    data = seed.data
    many = struct.pack("<IIQ", _ARRAY, 0, 4096) + bytes(4096)
    for index in range(100):
        data = with_key(replace(seed, data=data, pairs=seed.pairs + [(0, 0)] * index), f"x.{index}", many)
    parsed = gguf.parse_header(data)
    assert sum(key.startswith("x.") for key in parsed.lengths) == 100
    assert sum(key.startswith("x.") for key in parsed.metadata) == 64


def test_the_cases_are_the_same_every_time(tmp_path: Path) -> None:
    first, again = (list(cases(50, tmp_path)) for _ in range(2))
    assert first == again
    assert len(set(first)) > 45


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        child(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else Path(own))
