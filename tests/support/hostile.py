"""Hostile inputs, each with the command that it is given to and what it may cost; and the one way to try any of them.

A row is run as a process of its own, in a home, a folder and a folder for temporary files that are new and empty.
"""

from __future__ import annotations

import json
import os
import pty
import random
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import gguf

from ggufspec.models.profile import demo_pair
from tests.support import kept_results
from tests.support.gguf_files import add_field, rewritten, write
from tests.support.server import COMMIT, Server, serving

GIB = 1 << 30
SECONDS, PARENT_BYTES = 10.0, GIB  # that a row may cost, unless it says otherwise
_DATA_BYTES = 4 * GIB  # of memory that each process may write to: so that a row that fails does no harm
_PATIENCE_S = 20.0  # beyond what a row may take
_LAST_WORDS_S = 5.0  # for children to notice that their parent has gone
# Escape sequences that our own output has on a terminal: colours, the cursor's line and column, whether it is shown
_OURS = re.compile(r"\x1b\[[0-9;]*[mKAGB]|\x1b\[\?(25|2004)[hl]|\r")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb]")
_OWN = (".cache/ggufspec", ".local/share/ggufspec", ".local/state/ggufspec", "hub")  # what a command may write at home

Make: TypeAlias = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """One hostile input.

    Args:
        name: of the row.
        command: with ``{in}`` for the folder of the input, ``{file}`` for the input, ``{hub}`` for a server's address.
        code: the exit code; None where any of 0, 1 and 2 will do.
        make: writes the input; without it there is none.
        file: its name in the folder.
        says: what an error has to say; by default the file's name.
        stdin: a file to read as standard input.
        raw: answers of the server, by path: their pieces; ``None`` for a hub that serves nothing.
        environment: more of it.
        terminal: run on a pseudo-terminal.
        writes: names in the folder of the input that the command was reported to write.
        seconds: that it may take on a machine that has nothing else to do.
        parent_bytes: of memory that the command itself may take, not its children.
    """

    name: str
    command: str
    code: int | None = 1
    make: Make | None = None
    file: str = ""
    says: str | None = None
    stdin: str = ""
    raw: dict[str, list[bytes]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    terminal: bool = False
    writes: tuple[str, ...] = ()
    seconds: float = SECONDS
    parent_bytes: int = PARENT_BYTES


@dataclass(frozen=True)
class Cost:
    """What a row took, and what is wrong with how it went: empty if nothing is."""

    code: int
    seconds: float
    parent_bytes: int
    wrong: tuple[str, ...]
    output: str


# ---- how a row is tried ---------------------------------------------------------------------------------------------


def attack(row: Row, root: Path) -> Cost:
    """Run a row and look at all that it may not do. ``root`` is an empty folder."""
    home, folder, given = root / "home", root / "cwd", root / "in"
    for place in (home, folder, given, root / "tmp"):
        place.mkdir()
    if row.make is not None:
        row.make(given / row.file)
    with _hub(row) as address:
        return _judged(row, root, _words(row, given, address), address)


def _words(row: Row, given: Path, address: str) -> list[str]:
    places = {"{in}": str(given), "{file}": str(given / row.file), "{draft}": str(demo_pair()[1]), "{hub}": address}
    words = row.command.split(" ")
    for key, value in places.items():
        words = [word.replace(key, value) for word in words]
    return [word.replace("␠", " ") for word in words]


def _judged(row: Row, root: Path, words: Sequence[str], address: str) -> Cost:
    mark = uuid.uuid4().hex
    before = _tree(root)
    began = time.monotonic()
    code, out, err = _run(row, root, words, address, mark)
    seconds = time.monotonic() - began
    reported = root / "rss"
    parent_bytes = int(reported.read_text() or 0) << 10 if reported.exists() else 0
    wrong = []
    if code != row.code if row.code is not None else code not in (0, 1, 2):
        wrong.append(f"ended with {code}, not {row.code}")
    if seconds > row.seconds * _crowd():
        wrong.append(f"took {seconds:.1f} s, more than {row.seconds:.0f}, with {_crowd():.1f} programs a CPU")
    if not 0 < parent_bytes <= row.parent_bytes:
        wrong.append(f"took {parent_bytes >> 20} MiB of memory, more than {row.parent_bytes >> 20}")
    text = out + err
    if "Traceback" in text or "Error:" in text.replace("error:", ""):
        wrong.append("told how it is programmed")
    shown = _OURS.sub("", text) if row.terminal else text
    if found := _OBEYED.search(shown):
        wrong.append(f"printed {found[0]!r} of {shown[max(0, found.start() - 20) : found.end() + 20]!r}")
    if code and code != 130:
        plain = " ".join(_OURS.sub("", text).split())
        says = row.says if row.says is not None else (root / "in" / row.file).name
        wrong += [
            f"said nothing of {word!r}" for word in ("error: ", "next: ", *filter(None, [says])) if word not in plain
        ]
    wrong += [f"left a process: {one}" for one in _left(mark)]
    wrong += [f"wrote {one}" for one in sorted(_tree(root) ^ before) if not _may_write(one, row)]
    return Cost(code, seconds, parent_bytes, tuple(wrong), text)


def _run(row: Row, root: Path, words: Sequence[str], address: str, mark: str) -> tuple[int, str, str]:
    environment = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ} | {
        "COLUMNS": "100",
        "GGUFSPEC_THREADS": "1",
        "HF_ENDPOINT": address,
        "HF_HOME": str(root / "home" / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        "HF_HUB_OFFLINE": "0" if address else "1",
        "HOME": str(root / "home"),
        "LC_ALL": "C.UTF-8",
        "ROW": mark,
        "TERM": "xterm-256color",
        "TMPDIR": str(root / "tmp"),
    }
    command = [sys.executable, str(Path(__file__).with_name("measured_cli.py")), str(root / "rss"), *words]
    started: dict[str, Any] = {
        "cwd": root / "cwd",
        "env": environment | row.environment,
        "preexec_fn": _bounded,
        "start_new_session": True,
    }
    if row.terminal:
        return _on_a_terminal(command, started, row.seconds)
    with (
        Path(row.stdin or os.devnull).open("rb") as stdin,
        (root / "out").open("w+b") as out,
        (root / "err").open("w+b") as err,
    ):
        process = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=err, **started)
        _ended(process, row.seconds)
        texts = [Path(one.name).read_bytes()[:GIB].decode("utf-8", "surrogateescape") for one in (out, err)]
    return process.returncode, texts[0], texts[1]


def _on_a_terminal(command: list[str], started: dict[str, Any], seconds: float) -> tuple[int, str, str]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **started)
    os.close(theirs)
    text = bytearray()
    while True:
        try:
            some = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not some:
            break
        text += some
    os.close(ours)
    _ended(process, seconds)
    return process.returncode, text.decode("utf-8", "surrogateescape"), ""


def _crowd() -> float:
    """Programs for each CPU: a machine that has other work takes so many times as long."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ended(process: subprocess.Popen[Any], seconds: float) -> None:
    try:
        process.wait(seconds * _crowd() + _PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _left(mark: str) -> list[str]:
    """The processes of a row that go on without their parent."""
    until = time.monotonic() + _LAST_WORDS_S
    while True:
        found = [one for one in Path("/proc").iterdir() if one.name.isdigit() and _is_of(one, mark)]
        if not found or time.monotonic() > until:
            break
        time.sleep(0.02)
    names = [f"{one.name} {_read(one / 'cmdline')[:200]!r}" for one in found]
    for one in found:
        os.kill(int(one.name), signal.SIGKILL)
    return names


def _is_of(process: Path, mark: str) -> bool:
    return f"ROW={mark}".encode() in _read(process / "environ") and b"\nState:\tZ" not in _read(process / "status")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _tree(root: Path) -> set[str]:
    """Everything below a folder and beside it, with its size."""
    found = {f"../{path.name}" for path in root.parent.iterdir()}
    for path in root.rglob("*"):
        size = path.lstat().st_size if path.is_file() or path.is_symlink() else "folder"
        found.add(f"{path.relative_to(root)} ({size})")
    return found


def _may_write(entry: str, row: Row) -> bool:
    name = entry.rsplit(" (", 1)[0]
    if name in ("out", "err", "rss", "home/.cache", "home/.local", "home/.local/share", "home/.local/state"):
        return True
    if any(name == f"home/{own}" or name.startswith(f"home/{own}/") for own in _OWN):
        return True
    return any(name.startswith(f"in/{one}") for one in row.writes)


class _Nothing:
    address = ""


def _hub(row: Row) -> Any:
    import contextlib

    if row.raw is None:
        return contextlib.nullcontext("")

    @contextlib.contextmanager
    def served() -> Iterator[str]:
        with serving() as server:
            prepare(server)
            server.raw |= {
                path: [piece.replace(b"{hub}", server.address.encode()) for piece in p]
                for path, p in (row.raw or {}).items()
            }
            yield server.address

    return served()


def prepare(server: Server) -> None:
    """A repository with the pair that ships, which answers as a hub does where a row does not answer instead."""
    server.add_models(REPO, demo_pair()[0].parent)


REPO = "user/repo"


# ---- GGUF -----------------------------------------------------------------------------------------------------------

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(data: bytes | str, length: int | None = None) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: bytes | str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    sizes = b"".join(map(u64, shape))
    return text(name) + u32(len(shape) if dims is None else dims) + sizes + u32(kind) + u64(offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))
LLAMA = (
    ARCHITECTURE,
    key("tokenizer.ggml.model", STRING, text("none")),
    key("llama.vocab_size", U32, u32(32)),
    key("llama.block_count", U32, u32(1)),
    key("llama.context_length", U32, u32(64)),
    key("llama.embedding_length", U32, u32(32)),
    key("llama.feed_forward_length", U32, u32(32)),
    key("llama.attention.head_count", U32, u32(1)),
    key("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
)
OF_BLOCK = {
    "attn_norm": 1,
    "attn_q": 2,
    "attn_k": 2,
    "attn_v": 2,
    "attn_output": 2,
    "ffn_norm": 1,
    "ffn_gate": 2,
    "ffn_up": 2,
    "ffn_down": 2,
}


def model(
    keys: Sequence[bytes] = LLAMA,
    tensors: Sequence[bytes] = (),
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 1 << 20,
) -> Make:
    """A file of these keys and tensors, and so many zeros."""

    def make(path: Path) -> None:
        head = b"GGUF" + u32(version) + b"".join(map(u64, counts or (len(tensors), len(keys))))
        path.write_bytes(head + b"".join(keys) + b"".join(tensors) + bytes(data))

    return make


def whole_tensors() -> list[bytes]:
    """Of the model that ``LLAMA`` describes."""
    found, offset = [], 0
    shapes_of = {"token_embd": 2, "output": 2, "output_norm": 1} | {
        f"blk.0.{name}": dims for name, dims in OF_BLOCK.items()
    }
    for name, dims in shapes_of.items():
        found.append(tensor(f"{name}.weight", [32] * dims, 0, offset))
        offset += 4 * 32**dims
    return found


def changed(name: str, kind: int, value: bytes) -> tuple[bytes, ...]:
    """The keys of a good model with another value of one of them."""
    return (*(one for one in LLAMA if not one.startswith(text(name))), key(name, kind, value))


def raw(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


ESCAPES = "\x1b]0;taken\x07\x1b[2J\x9b31m\u202edetpircs\x00"
MESSAGE = str(Path(__file__).with_name("message.txt"))


def gguf_rows() -> Iterator[Row]:
    w = whole_tensors()
    deep = b"".join(u32(ARRAY) + u64(1) for _ in range(1000)) + u32(U8) + u64(1) + b"\0"
    files: dict[str, Make] = {
        "empty": raw(b""),
        "cut in the magic": raw(b"GG"),
        "a web page": raw(b"<!doctype html><html>sign in</html>"),
        "a Git LFS pointer": raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
        "cut in the counts": raw(b"GGUF" + u32(3) + b"\1\0\0"),
        "version 0": model(version=0),
        "version 1": model(version=1),
        "version 2³²-1": model(version=2**32 - 1),
        "big endian": raw(b"GGUF" + struct.pack(">IQQ", 3, 1, 1)),
        "2⁶³ tensors": model(counts=(2**63, len(LLAMA))),
        "2⁶³-1 tensors": model(counts=(2**63 - 1, len(LLAMA))),
        "2³¹ tensors": model(counts=(2**31, len(LLAMA))),
        "2⁶³ keys": model(counts=(0, 2**63)),
        "2³² keys": model(counts=(0, 2**32)),
        "no keys": model((), ()),
        "a key's length of 2⁶³": model((text("a", 2**63),)),
        "a string's length of 2⁶⁴-1": model((ARCHITECTURE, key("a", STRING, text("b", 2**64 - 1)))),
        "a string's length of 2⁴⁰": model((ARCHITECTURE, key("a", STRING, text("b", 2**40)))),
        "an array of 2⁶² numbers": model((ARCHITECTURE, key("a", ARRAY, u32(U64) + u64(2**62)))),
        "an array of 2³² strings": model((ARCHITECTURE, key("a", ARRAY, u32(STRING) + u64(2**32)))),
        "arrays in arrays": model((ARCHITECTURE, key("a", ARRAY, deep))),
        "a type of 99": model((ARCHITECTURE, key("a", 99, b"\0" * 8))),
        "an array of type 99": model((ARCHITECTURE, key("a", ARRAY, u32(99) + u64(1) + b"\0" * 8))),
        "a boolean of 7": model((*LLAMA, key("a", BOOL, b"\7")), w),
        "a key twice": model((*LLAMA, ARCHITECTURE), w),
        "an architecture that is a number": model(changed("general.architecture", U32, u32(7)), w),
        "no architecture": model(LLAMA[1:], w),
        "an unknown architecture": model(changed("general.architecture", STRING, text("no-such-thing")), w),
        "a tensor of 2⁶² × 2⁶²": model(LLAMA, [tensor("token_embd.weight", (2**62, 2**62)), *w[1:]]),
        "a tensor of 2³² × 2³²": model(LLAMA, [tensor("token_embd.weight", (2**32, 2**32)), *w[1:]]),
        "a tensor of no rows": model(LLAMA, [tensor("token_embd.weight", (32, 0)), *w[1:]]),
        "a tensor of 100 dimensions": model(LLAMA, [tensor("token_embd.weight", (1,) * 100), *w[1:]]),
        "a tensor that says 2³²-1 dimensions": model(
            LLAMA, [tensor("token_embd.weight", (32, 32), dims=2**32 - 1), *w[1:]]
        ),
        "a tensor of type 255": model(LLAMA, [tensor("token_embd.weight", (32, 32), 255), *w[1:]]),
        "tensors over each other": model(
            LLAMA, [tensor("token_embd.weight", (32, 32), 0, 0), tensor("output.weight", (32, 32), 0, 64), *w[2:]]
        ),
        "an offset of 2⁶³": model(LLAMA, [w[0], tensor("output.weight", (32, 32), 0, 2**63), *w[2:]]),
        "a tensor twice": model(LLAMA, [w[0], tensor("token_embd.weight", (32, 32), 0, 4096), *w[2:]]),
        "a tensor's name of 1 MB": model(LLAMA, [tensor("a" * 1_000_000, (32, 32)), *w[1:]]),
        "an alignment of 0": model((*LLAMA, key("general.alignment", U32, u32(0))), w),
        "an alignment of 3": model((*LLAMA, key("general.alignment", U32, u32(3))), w),
        "an alignment of 2³¹": model((*LLAMA, key("general.alignment", U32, u32(2**31))), w),
        "2³¹ blocks": model(changed("llama.block_count", U32, u32(2**31)), w),
        "no blocks and 2³² of context": model(changed("llama.context_length", U32, u32(2**32 - 1)), w, data=0),
        "no heads": model(changed("llama.attention.head_count", U32, u32(0)), w),
        "2³²-1 tokens": model(changed("llama.vocab_size", U32, u32(2**32 - 1)), w),
        "a width that is text": model(changed("llama.embedding_length", STRING, text("wide")), w),
        "parts without end": model((*LLAMA, key("split.count", U16, struct.pack("<H", 65535))), w),
        "no data": model(LLAMA, w, data=0),
        "a vocabulary of another type": model(
            (*LLAMA, key("tokenizer.ggml.tokens", ARRAY, u32(U8) + u64(3) + b"abc")), w
        ),
        "a key with a null character": model((*LLAMA, key(b"a\0b", U32, u32(1)), key(b"\xff\xfe", U32, u32(1))), w[:3]),
    }
    for name, make in files.items():
        code = 0 if name == "a boolean of 7" else 1
        yield Row(f"GGUF: {name}", "plan -m {file}", code, make, "model.gguf")
    for command in (
        "run -p x -m {file}",
        "quantize {file} --types Q4_0 -o {in}/out",
        "verify -m {file} -md {draft}",
        "export --to llama-server -m {file}",
        "rehearse -m {file}",
        "chat -m {file}",
        "bench -m {file} -md {draft}",
        "trace -p x -m {file}",
    ):
        for name in ("2⁶³ tensors", "a string's length of 2⁶⁴-1", "a tensor of 2³² × 2³²", "no data"):
            if command.startswith(("run", "quantize")) or name == "a tensor of 2³² × 2³²":
                code = 0 if command.startswith("export") else 1  # which reads no header where there is no card
                yield Row(
                    f"GGUF: {name}: {command.split()[0]}", command, code, files[name], "model.gguf", stdin=MESSAGE
                )
    escaped = ESCAPES.replace("\x00", "")
    for name, keys in {
        "architecture": changed("general.architecture", STRING, text(escaped)),
        "tokenizer": (
            *LLAMA,
            key("tokenizer.ggml.model", STRING, text(escaped)),
            key("tokenizer.ggml.pre", STRING, text(escaped)),
        ),
        "name": (*LLAMA, key("general.name", STRING, text(escaped))),
    }.items():
        for terminal in (False, True):
            yield Row(
                f"GGUF: escapes in the {name}{' on a terminal' * terminal}",
                "plan -m {file}",
                1,
                model(keys, w[:3]),
                "model.gguf",
                terminal=terminal,
            )
    for terminal in (False, True):
        yield Row(
            f"GGUF: escapes in the file's name{' on a terminal' * terminal}",
            "plan -m {file}",
            1,
            model(counts=(0, 2**63)),
            "\x1b]0;taken\x07\x1b[2J.gguf",
            says="",
            terminal=terminal,
        )
    yield Row("GGUF: part 1 of 99999", "plan -m {file}", 1, model(LLAMA, w), "a-00001-of-99999.gguf")
    yield Row("GGUF: part 2 of 1", "plan -m {file}", 1, model(LLAMA, w), "a-00002-of-00001.gguf")


# ---- profiles -------------------------------------------------------------------------------------------------------

PROFILE = 'name = "{name}"\nwhy = "{why}"\nsource = "nowhere"\n\n[target]\nfile = "{target}"\n'


def profile(name: str = "mine", why: str = "a test", target: str = "target.gguf", more: str = "") -> Make:
    return raw((PROFILE.format(name=name, why=why, target=target) + more).encode())


def special(what: str) -> Make:
    """What is no regular file."""

    def make(path: Path) -> None:
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "loop":
            path.symlink_to(path)
        elif what == "nothing":
            path.symlink_to(path.with_name("not there"))
        elif what == "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        else:
            path.symlink_to(what)

    return make


SPECIAL = {
    "a folder": "folder",
    "a pipe": "pipe",
    "a link to itself": "loop",
    "a link to nothing": "nothing",
    "a socket": "socket",
    "a device without end": "/dev/zero",
    "a device without content": "/dev/null",
}


def toml_rows() -> Iterator[Row]:
    escapes = "\\u001b]0;taken\\u0007\\u001b[2J\\u009b31m\\u202e"
    files: dict[str, Make] = {
        "empty": raw(b""),
        "noise": raw(os.urandom(0) + bytes(range(256)) * 16),
        "dotted keys of 100 kB": raw(".".join("a" * 50_000).encode() + b" = 1"),
        "dotted keys of 60 kB": raw(".".join("a" * 30_000).encode() + b" = 1"),
        "a dotted table": raw(b"[" + b".".join([b"a"] * 30_000) + b"]"),
        "arrays in arrays": raw(b"a = " + b"[" * 50_000),
        "tables in tables": raw(b"a = " + b"{a = " * 10_000),
        "many tables": raw(b"".join(b"[a%d]\n" % i for i in range(7_000))),
        "10 MB": raw(b"# a comment\n" * 1_000_000),
        "a number of 5,000 digits": profile(more="[settings]\nctx_size = " + "9" * 5000),
        "a number of 100 digits": profile(more="[settings]\nctx_size = " + "9" * 100),
        "not a number": profile(more="[settings]\nacceptance = nan"),
        "without end": profile(more="[bench]\nminutes = inf"),
        "a key twice": profile(more="[target]\nfile = 'b'"),
        "a null character": profile(why="a\0b"),
        "latin-1": raw(b'name = "\xe4"'),
        "UTF-16": raw("name = 'a'".encode("utf-16")),
        "a byte order mark": raw(b"\xef\xbb\xbf[[["),
        "wrong types": raw(b"name = 1\nwhy = []\nsource = {}\ntarget = 7"),
        "a name that is a path": profile(name="x/../../../../out"),
        "a name with escapes": profile(name=escapes),
        "an unknown key with escapes": profile(more=f'"{escapes}" = 1'),
        "a key of 50 kB": profile(more="a" * 50_000 + " = 1"),
        "a file beyond its repository": profile(target="../../../etc/passwd", more='repo = "a/b"'),
        "a revision beyond its repository": profile(more='repo = "a/b"\nrevision = "../../main"'),
        "a file with a null character": profile(target="a\\u0000b"),
        "a shape that is none": profile(more='expand = "../../x:F16"'),
        "counts below zero": profile(more="[settings]\ncpu_experts = -1"),
    }
    for name, make in files.items():
        code, says = (2, "does not name a shape") if name == "a shape that is none" else (1, None)
        yield Row(f"profile: {name}", "profiles show {file}", code, make, "hostile.toml", says)
    for name in ("dotted keys of 60 kB", "a name that is a path", "a number of 100 digits"):
        yield Row(f"profile: {name}: plan", "plan {file}", 1, files[name], "hostile.toml")
    yield Row(
        "profile: a name that is a path: sweep",
        "bench {file} --sweep --draft-max 1,2",
        1,
        files["a name that is a path"],
        "hostile.toml",
    )
    for name, kind in SPECIAL.items():
        yield Row(f"profile: {name}", "profiles show {file}", 2, special(kind), "hostile.toml")
    for terminal in (False, True):
        yield Row(
            f"profile: escapes in why and source{' on a terminal' * terminal}",
            "profiles show {file}",
            0,
            profile(why=escapes),
            "hostile.toml",
            terminal=terminal,
        )
    yield Row(
        "profile: 10⁹ tokens of context",
        "plan {file}",
        1,
        profile(target=str(demo_pair()[0]), more="[settings]\nctx_size = 1000000000"),
        "hostile.toml",
        says="settings.ctx_size",
    )
    yield Row(
        "profile: 10⁹ experts on the host",
        "plan {file} --vram 2GiB",
        2,
        profile(target=str(demo_pair()[0]), more="[settings]\ncpu_experts = 1000000000"),
        "hostile.toml",
        says="no experts",
    )
    yield Row("profile: a name that is not there, of 5,000 characters", f"profiles show {'a' * 5000}", 2, says="")
    yield Row("profile: --save of a path", "tune demo --save ../../out", 2, says="not a profile name")
    yield Row("profile: new of a path", "profiles new ../../out -m a -md b", 2, says="is not a profile name")


# ---- results --------------------------------------------------------------------------------------------------------


def result(**changes: Any) -> Make:
    return lambda path: path.write_text(json.dumps(kept_results.as_json(kept_results.bench()) | changes))


def broken(*places: tuple[Sequence[str | int], Any]) -> Make:
    """A bench with values put in at these places."""

    def make(path: Path) -> None:
        body = kept_results.as_json(kept_results.bench())
        for place, value in places:
            part: Any = body
            for step in place[:-1]:
                part = part[step]
            part[place[-1]] = value
        path.write_text(json.dumps(body))

    return make


def tuned(**changes: Any) -> Make:
    return lambda path: path.write_text(json.dumps(kept_results.as_json(kept_results.tune()) | changes))


def json_rows() -> Iterator[Row]:
    runs = "runs", "target_only"
    files: dict[str, Make] = {
        "empty": raw(b""),
        "torn": raw(b'{"schema": "ggufspec/bench@1", "pair": {'),
        "deep lists": raw(b"[" * 10_000_000),
        "deep objects": raw(b'{"a":' * 2_000_000),
        "deep within": broken((("pair", "a"), json.loads("[" * 300 + "]" * 300))),
        "20 MB": raw(b'{"schema": "' + b"a" * 20_000_000 + b'"}'),
        "8 MB of empty lists": raw(b"[" + b"[]," * 2_700_000 + b"[]]"),
        "8 MB of objects": raw(b"[" + b'{"a":{}},' * 900_000 + b"1]"),
        "a number of 100,000 digits": raw(b'{"schema": ' + b"9" * 100_000 + b"}"),
        "not a number": raw(b'{"schema": NaN}'),
        "more than a double": broken((("settings", "threads"), 10**400)),
        "a key twice": raw(b'{"schema": "ggufspec/bench@1", "schema": "ggufspec/tune@1"}'),
        "UTF-16": raw("{}".encode("utf-16")),
        "noise": raw(bytes(range(256)) * 64),
        "null characters": raw(b'{"schema": "\0"}'),
        "a list": raw(b"[1, 2, 3]"),
        "an unknown schema with escapes": raw(json.dumps({"schema": ESCAPES}).encode()),
        "counts below zero": broken(((*runs, "gpu_layers"), -1)),
        "speeds below zero": broken(((*runs, "tokens_per_s", "median"), -5.0)),
        "shares above one": broken((("runs", "speculative", "acceptance_rate"), 12.5)),
        "text for a number": broken(((*runs, "load_s"), "long")),
        "a list for text": broken((("verdict", "text"), ["a"])),
        "a bundle of garbage": raw(json.dumps({"schema": "ggufspec/report@1", "results": {ESCAPES: 7}}).encode()),
        "a bundle in a bundle": raw(
            json.dumps(
                {"schema": "ggufspec/report@1", "results": {"a": {"schema": "ggufspec/report@1", "results": {}}}}
            ).encode()
        ),
    }
    for name, make in files.items():
        yield Row(f"result: {name}", "report {file}", 1, make, "result.json")
    for name, kind in SPECIAL.items():
        says = "result.json" if kind != "/dev/null" else "is empty"
        yield Row(f"result: {name}", "report {file}", 1, special(kind), "result.json", says=says)
    for name in ("torn", "deep lists", "20 MB", "not a number"):
        yield Row(f"conversation: {name}", "chat demo --load {file}", 1, files[name], "chat.json", stdin=MESSAGE)
    for name, kind in SPECIAL.items():
        if kind in ("folder", "pipe", "/dev/zero"):
            yield Row(f"conversation: {name}", "chat demo --load {file}", 1, special(kind), "chat.json", stdin=MESSAGE)
    for name, make in {
        "no samples": broken(((*runs, "tokens_per_s", "samples"), [])),
        "a winner that is not there": tuned(winner=10**9, baseline=10**9, target_only=10**9),
    }.items():
        yield Row(
            f"result: {name}", "report {file} --html {in}/page.html", 0, make, "result.json", writes=("page.html",)
        )
    names = {"name": f"{ESCAPES}<script>alert(1)</script>[bold red]", "target": f"/{ESCAPES}.gguf", "draft": "d"}
    for terminal in (False, True):
        yield Row(
            f"result: escapes in every name{' on a terminal' * terminal}",
            "report {file} --html {in}/page.html --export-markdown {in}/page.md",
            0,
            result(pair=names),
            "result.json",
            terminal=terminal,
            writes=("page.html", "page.md"),
        )
    yield Row(
        "result: a page into a folder",
        "report {file} --html {in}",
        1,
        result(),
        "result.json",
        says="cannot be written",
    )
    yield Row(
        "result: a page onto a full disk",
        "report {file} --html /dev/full",
        1,
        result(),
        "result.json",
        says="/dev/full",
    )
    yield Row("result: a folder that is a file", "report --results {file}", 1, result(), "result.json")
    yield Row(
        "result: results kept in a file",
        "bench demo --sweep --draft-max 1,2 --results {file}",
        1,
        result(),
        "result.json",
    )


# ---- templates ------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a range of 10¹²": "{% for i in range(1000000000000) %}{% endfor %}",
    "a power": "{{ 7 ** 100000000 }}",
    "a product of text": "{{ 'x' * 10000000000 }}",
    "text that doubles": "{% set ns = namespace(x='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a width of 10¹⁰": "{{ '{:10000000000}'.format(1) }}",
    "an answer without end": "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "macros that call themselves": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attributes of classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attributes by filter": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('true') }}",
    "what is not there": "{{ nothing.there[7]() }}",
    "no template": "{% for %}{{",
    "1 MB of brackets": "{{ " + "(" * 1_000_000,
    "100,000 branches": "{% if a %}" * 100_000,
    "a refusal with escapes": "{{ raise_exception('\\x1b]0;taken\\x07\\x1b[2J') }}",
    "a list that holds itself": "{% set a = [] %}{{ a.append(a) }}{{ a == a }}",
    "shared tuples that are compared": "{% set ns = namespace(a=('x',), b=('x',)) %}{% for i in range(40) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}{{ ns.a == ns.b }}",
    "shared tuples that are hashed": "{% set ns = namespace(a=('x',)) %}{% for i in range(40) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ {ns.a: 1} }}",
}


def with_template(source: str) -> Make:
    return lambda path: rewritten(demo_pair()[1], path, template=source)


def template_rows() -> Iterator[Row]:
    for name, source in TEMPLATES.items():
        yield Row(
            f"template: {name}",
            "chat -m {file}",
            1,
            with_template(source),
            "model.gguf",
            "template",
            MESSAGE,
            seconds=15.0,
        )


# ---- the hub --------------------------------------------------------------------------------------------------------

LIST = f"/api/models/{REPO}"
TARGET = "demo-target-F16.gguf"
HEAD = f"/{REPO}/resolve/main/{TARGET}"
BODY = f"/{REPO}/resolve/{COMMIT}/{TARGET}"
PAGE = b"<!doctype html><html><title>Welcome to the hotel</title></html>"


def answer(body: bytes = b"", headers: str = "", status: str = "200 OK", length: object = None) -> list[bytes]:
    shown = len(body) if length is None else length
    return [f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {shown}\r\n{headers}\r\n".encode() + body]


def about(
    etag: str = '"' + "a" * 64 + '"', commit: str = COMMIT, size: object = 20_000_000, more: str = ""
) -> list[bytes]:
    """The hub's answer to a question for a file's version."""
    return answer(b"", f"ETag: {etag}\r\nX-Repo-Commit: {commit}\r\n{more}", length=size)


def hub_rows() -> Iterator[Row]:
    def listed(*names: str) -> bytes:
        return json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode()

    lists = {
        "a web page for the list": answer(PAGE, "Content-Type: text/html\r\n"),
        "a page of the hotel by redirect": answer(b"", "Location: /hotel\r\n", "302 Found"),
        "a redirect to itself": answer(b"", f"Location: {LIST}\r\n", "302 Found"),
        "nothing": answer(),
        "no HTTP": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10],
        "a connection that ends": [b""],
        "a header of 1 MB": answer(b"[]", f"X: {'a' * 1_000_000}\r\n"),
        "100,000 files": answer(listed(*(f"{i}-Q4_K_M.gguf" for i in range(100_000)))),
        "a list without end": answer(b"[" + b" " * (20 << 20), length=10**12),
        "compressed zeros": answer(b"\x1f\x8b\x08" + b"\0" * 100, "Content-Encoding: gzip\r\n"),
        "a list of lists": answer(b"[" * 1_000_000),
        "files beyond the repository": answer(listed("../../../../out-Q4_K_M.gguf")),
        "names with escapes": answer(listed(f"{ESCAPES}-Q4_K_M.gguf")),
        "names with escapes of other types": answer(listed(*(f"{ESCAPES}{i}.gguf" for i in range(3)))),
        "an error with escapes": answer(b"", "X-Error-Message: \x1b]0;taken\x07\r\n", "418 \x1b[2J"),
        "access refused": answer(PAGE, "", "511 Network Authentication Required"),
    }
    for name, pieces in lists.items():
        served = {LIST: pieces, "/hotel": answer(PAGE)}
        yield Row(
            f"hub: {name}",
            f"plan -hf {REPO}:Q4_K_M --vram 2GiB",
            1,
            raw=served,
            says=REPO,
            seconds=20.0 if "end" in name else SECONDS,
        )
    heads = {
        "a web page for a file": answer(PAGE, "Content-Type: text/html\r\n"),
        "a size of 10¹⁸": about(size=10**18),
        "a size below zero": about(size=-1),
        "a size that is text": about(size="large"),
        "a version that is a path": about(etag='"../../../../out"'),
        "a version with escapes": about(etag='"\x1b]0;taken\x07"'),
        "a commit that is a path": about(commit="../../../../out"),
        "no commit": about(commit=""),
        "a redirect to itself": answer(b"", f"Location: {HEAD}\r\n", "302 Found"),
        "a redirect to a file": answer(b"", "Location: file:///etc/passwd\r\n", "302 Found"),
        "asked too often for 10⁹ s": answer(b"", "Retry-After: 1000000000\r\n", "429 Too Many Requests"),
    }
    for name, pieces in heads.items():
        yield Row(f"hub: {name}: pull", f"pull -hf {REPO}/{TARGET} -y", 1, raw={HEAD: pieces}, says="")
    yield Row(
        "hub: a web page for a header: plan",
        f"plan -hf {REPO}/{TARGET} --vram 2GiB",
        1,
        raw={BODY: answer(PAGE, "Content-Type: text/html\r\n")},
        says="",
    )
    whole = demo_pair()[0].read_bytes() if demo_pair()[0].is_file() else b""
    bodies = {
        "a web page in place of weights": answer(PAGE),
        "fewer bytes than it says": answer(whole[:100_000], length=len(whole)),
        "other bytes than it says": answer(bytes(len(whole))),
        "more bytes than it says": answer(whole + bytes(1000)),
        "bytes without end": answer(bytes(30 << 20), length=10**12),
    }
    for name, pieces in bodies.items():
        yield Row(
            f"hub: {name}",
            f"pull -hf {REPO}/{TARGET} -y",
            1,
            raw={BODY: pieces},
            says="",
            seconds=SECONDS if "more" in name or "other" in name else 30.0,
        )
    ranges = {
        "a range that it did not ask for": "Content-Range: bytes 5-9/20000000\r\n",
        "a range of 2⁶⁴": f"Content-Range: bytes 0-{2**64}/{2**64}\r\n",
        "a range that is text": "Content-Range: bytes x-y/z\r\n",
        "no range": "",
    }
    for name, header in ranges.items():
        yield Row(
            f"URL: {name}",
            "plan -m {hub}/model.gguf --vram 2GiB",
            1,
            raw={"/model.gguf": answer(b"G", header, "206 Partial Content")},
            says="model.gguf",
        )
    yield Row(
        "URL: no HTTP",
        "plan -m {hub}/model.gguf --vram 2GiB",
        1,
        raw={"/model.gguf": [b"\0" * 1000]},
        says="model.gguf",
    )
    yield Row(
        "URL: a redirect to itself",
        "plan -m {hub}/model.gguf --vram 2GiB",
        1,
        raw={"/model.gguf": answer(b"", "Location: /model.gguf\r\n", "302 Found")},
        says="model.gguf",
    )
    yield Row("URL: a name with escapes", "plan -m {hub}/%1b]0;taken%07%1b[2J.gguf --vram 2GiB", 1, raw={}, says="")


# ---- prompts, grammars and other texts -----------------------------------------------------------------------------


def sparse(size: int) -> Make:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


def text_rows() -> Iterator[Row]:
    run = "run demo -n 4 "
    for name, kind in SPECIAL.items():
        if kind not in ("/dev/null", "socket"):
            code, says = (2, "hostile.txt")
            yield Row(f"prompt: {name}", f"{run}-f {{file}}", code, special(kind), "hostile.txt", says=says)
            yield Row(
                f"corpus: {name}",
                f"{run}-p x --lookup-corpus {{file}}",
                code,
                special(kind),
                "hostile.txt",
                says=says,
            )
    yield Row("prompt: empty", f"{run}-f /dev/null", 2, says="no prompt")
    yield Row("prompt: 1 GB", f"{run}-f {{file}}", 2, sparse(1 << 30), "hostile.txt")
    yield Row("corpus: 1 GB", f"{run}-p x --lookup-corpus {{file}}", 2, sparse(1 << 30), "hostile.txt")
    yield Row("prompt: noise", f"{run}-f {{file}}", 2, raw(bytes(range(256))), "hostile.txt")
    yield Row("prompt: null characters", f"{run}-f {{file}}", 0, raw(b"a\0b\0"), "hostile.txt")
    yield Row(
        "prompt: 2 MB of one letter",
        f"{run}-f {{file}}",
        1,
        raw(b"a" * 2_000_000),
        "hostile.txt",
        says="the context holds",
    )
    yield Row(
        "prompt: standard input without end",
        f"{run}-p -",
        2,
        stdin="/dev/zero",
        says="more text than any context holds",
    )
    yield Row(
        "prompt: a conversation without end", "chat demo", 2, stdin="/dev/zero", says="more text than any context holds"
    )
    yield Row("prompt: system text without end", "chat demo --system-file /dev/zero", 2, says="/dev/zero")
    grammars = {
        "repeated 10⁶ times": 'root ::= "a"{1000000}',
        "repeated 10¹⁸ times": 'root ::= "a"{999999999999999999}',
        "groups in groups": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
        "1,000,000 alternatives": 'root ::= "a"' + "|" * 1_000_000,
        "100,000 rules": "\n".join(f"r{i} ::= r{i + 1}" for i in range(60_000)) + '\nroot ::= r0\nr60000 ::= "a"',
        "left recursion": 'root ::= root "a" | "a"',
        "left recursion behind nothing": 'root ::= a root "b" | "c"\na ::= ""',
        "empty": "",
        "noise": "\x01\x02\x03",
        "2 MB": "# " + "a" * 2_000_000,
    }
    for name, one in grammars.items():
        yield Row(
            f"grammar: {name}",
            f"{run}-p x --grammar-file {{file}}",
            2,
            raw(one.encode()),
            "hostile.gbnf",
            says="grammar",
        )
    schemas: dict[str, Any] = {
        "maxLength": {"type": "string", "maxLength": 10**9},
        "maxItems": {"type": "array", "items": {"type": "null"}, "maxItems": 10**9},
        "a quantifier": {"type": "string", "pattern": "^a{1000000000}$"},
        "references in a circle": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}},
        "a reference elsewhere": {"$ref": "http://192.0.2.1/x"},
        "5,000 properties": {"properties": {f"p{i}": {"type": "null"} for i in range(5000)}},
        "wrong types": {"type": 7, "properties": [], "items": "x", "enum": 5},
    }
    for name, schema in schemas.items():
        yield Row(
            f"schema: {name}",
            f"{run}-p x -jf {{file}}",
            2,
            raw(json.dumps(schema).encode()),
            "hostile.json",
            says="",
            seconds=20.0,
        )
    yield Row("schema: deep", f"{run}-p x -jf {{file}}", 2, raw(b'{"items":' * 100_000), "hostile.json", says="schema")


# ---- folders --------------------------------------------------------------------------------------------------------


def decoys(path: Path) -> None:
    """What a child may import by mistake, in the folder where the command is given."""
    folder = path.parents[1] / "cwd"
    for name in ("numpy", "json", "llama_cpp", "ggufspec", "ctypes", "logging", "typing_extensions", "psutil"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'taken')!r}, 'w').close()\nraise SystemExit(77)\n")


def folder_rows() -> Iterator[Row]:
    for command, code in (("run demo -p x -n 2", 0), ("plan demo --vram 2GiB", 0), ("trace demo -p x -n 2", 0)):
        yield Row(
            f"folder: decoys of modules: {command.split()[0]}",
            command,
            code,
            decoys,
            "x",
            seconds=20.0,
        )
    for name, kind in SPECIAL.items():
        yield Row(f"folder: {name} as a model", "run -p x -m {file}", 1, special(kind), "model.gguf")
        if kind != "nothing":
            yield Row(f"folder: {name} as a model to plan", "plan -m {file}", 1, special(kind), "model.gguf")
    yield Row("folder: a name of 5,000 characters", f"run -p x -m {'a' * 5000}.gguf", 1, says="File name too long")
    yield Row("folder: a name of 5,000 characters to plan", f"plan -m {'a' * 5000}.gguf", 1, says="File name too long")
    yield Row(
        "folder: a file in the place of one",
        "quantize {file} --types Q4_0 -o {file}",
        2,
        model(LLAMA, whole_tensors()),
        "model.gguf",
    )
    yield Row("folder: an export onto a folder", "bench demo --export-json {in}", 1, says="cannot be written")
    yield Row(
        "folder: an export into nothing", "bench demo --export-json {in}/none/x.json", 1, says="cannot be written"
    )
    yield Row(
        "folder: a home that is none",
        "plan demo --vram 2GiB",
        0,
        environment={"HOME": "/proc/nowhere", "HF_HOME": "/proc/nowhere"},
    )


# ---- values ---------------------------------------------------------------------------------------------------------

NUMBERS = ("0", "-1", "1000000000", "100000000000000000000", "nan", "inf", "-inf", "1e999", "0x7f", "１")
# Options whose every number ends soon, with a command that takes them
VALUES = {
    "plan demo --vram 2GiB": (
        "-ngl",
        "-ngld",
        "--n-cpu-moe",
        "-c",
        "-ub",
        "--draft-max",
        "--acceptance",
        "-t",
        "--headroom",
    ),
    "run demo -p x": ("-n",),
    "run demo -p x -n 2": ("--temp", "--top-k", "--top-p", "--min-p", "-s", "--n-cpu-moe", "-ts"),
    "export demo --to llama-server": ("-c", "--n-cpu-moe", "-ngl"),
}


def value_rows() -> Iterator[Row]:
    yield Row(
        "value: 10⁹ tokens of context",
        "run demo -p x -n 2 -c 1000000000",
        2,
        says="--ctx-size 1000000000 is out of range",
    )
    yield Row("value: 16 million tokens of context", "run demo -p x -n 2 -c 16777216", 1, says="no context of 16777216")
    yield Row("value: 10⁹ blocks of experts on the host", "run demo -p x -n 2 --n-cpu-moe 1000000000", 0)
    yield Row("value: 10²⁰ blocks of experts on the host", "run demo -p x -n 2 --n-cpu-moe 99999999999999999999", 0)
    yield Row("value: 10²⁰ likeliest tokens", "run demo -p x -n 2 --top-k 99999999999999999999", 0)
    yield Row("value: 10⁹ threads", "run demo -p x -n 2 -t 1000000000", 2, says="--threads 1000000000 is out")
    yield Row("value: a port of 10⁹", "worker --port 1000000000", 2, says="--port")
    yield Row("value: an RPC worker that is none", "plan demo --rpc 127.0.0.1:1", 1, says="127.0.0.1:1", seconds=20.0)
    yield Row("value: a budget without end", "tune demo --no-save --budget infm", 2, says="--budget")
    yield Row(
        "value: escapes in an option",
        "run demo -p x --drafter \x1b]0;taken\x07\x1b[2J",
        2,
        says="--drafter",
    )
    yield Row("value: escapes in a command", "\x1b]0;taken\x07\x1b[2J", 2, says="there is no command")


EDITED = (  # commands for edited models
    "run -p x -n 2 -m {file}",
    "trace -p x -n 2 -m {file}",
    "plan -m {file}",
    "export --to llama-server -m {file}",
    "chat -m {file}",
    "verify -m {file} -md {draft} -n 2",
    "bench -m {file} -md {draft} -n 2 -r 1 -p x --no-calibrate",
    "quantize {file} --types Q4_0 --requantize",
)
_LIMITS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, float("nan"), float("inf"), 1e-30, "", "x", True)


def edited(seed: int) -> tuple[str, Make]:
    """Drop a key of the draft that ships, change its type, or set it to a limit: (what was done, how to write it)."""
    chance, source = random.Random(seed), demo_pair()[1]
    reader = gguf.GGUFReader(source)
    fields = [field for field in reader.fields.values() if not field.name.startswith("GGUF.")]
    field = chance.choice(fields)
    what = chance.choice(("dropped", "of another type", "at a limit"))
    kinds = {bool: gguf.GGUFValueType.BOOL, str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32}
    limit = chance.choice(_LIMITS)
    kind = kinds.get(type(limit), gguf.GGUFValueType.INT64)
    if what == "at a limit" and field.types[0] not in (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING):
        bits = {gguf.GGUFValueType.BOOL: 1, gguf.GGUFValueType.UINT32: 32, gguf.GGUFValueType.UINT64: 64}
        kind = field.types[0]
        limit = chance.choice(_LIMITS[:10]) if kind == gguf.GGUFValueType.FLOAT32 else chance.choice(_LIMITS[:7])
        limit = limit if kind not in bits else limit % 2 ** bits[kind]

    def make(path: Path) -> object:
        writer = gguf.GGUFWriter(path, "llama")
        for other in fields:
            if other is field or other.name == "general.architecture":
                continue
            add_field(writer, other, other.contents())
        if what != "dropped":
            writer.kv_data[0].pop(field.name, None)
            writer.add_key_value(field.name, limit, kind)
        elif field.name == "general.architecture":
            writer.kv_data[0].pop(field.name)
        for one in reader.tensors:
            writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
        write(writer)
        return path

    done = f"{field.name} {what}" + ("" if what == "dropped" else f": {limit!r} as {kind.name}")
    return done, make


def edit_rows(count: int, first: int = 0) -> Iterator[Row]:
    """Random edits of a model's keys, each with every command of ``EDITED``."""
    for number in range(first, first + count):
        what, make = edited(number)
        for command in EDITED:
            name = f"edit {number}: {what}: {command.split()[0]}"
            writes = ("model-Q4_0.gguf",) if command.startswith("quantize") else ()
            yield Row(name, command, None, make, "model-Q8_0.gguf", stdin=MESSAGE, writes=writes, seconds=60.0)


def rows() -> list[Row]:
    """All of them, each with a name of its own."""
    made = [
        *gguf_rows(),
        *toml_rows(),
        *json_rows(),
        *template_rows(),
        *hub_rows(),
        *text_rows(),
        *folder_rows(),
        *value_rows(),
    ]
    assert len({row.name for row in made}) == len(made)
    return made
