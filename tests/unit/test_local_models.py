"""The models on this disk: the folders of other programs as they are, huge, unreadable and broken ones too."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggufspec import child
from ggufspec.errors import ChildError
from ggufspec.models import local
from ggufspec.models.hub import client
from ggufspec.models.local import LocalModels, ProgramFolder, family, first_choice, suggested
from ggufspec.reports.models import model_rows
from ggufspec.schema.models import ModelRow, ModelsDocument
from tests.support import heads, shapes
from tests.support.gguf_files import rewritten

COMMIT, OLDER = "a" * 40, "b" * 40
Find = Callable[..., LocalModels]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """find(program, folder) -> what is there, with caches of its own."""
    monkeypatch.setattr(local, "cache_folder", lambda: tmp_path / "cache")

    def look(program: str, folder: Path, *others: ProgramFolder, **more: Any) -> LocalModels:
        return local.find_models(
            [ProgramFolder(program, folder), *others], headers=tmp_path / "cache" / "headers", **more
        )

    return look


def names(found: LocalModels) -> list[str]:
    return [one.file.name for one in found.models]


def reasons(found: LocalModels) -> dict[str, str]:
    return {one.path.name: one.why for one in found.left_out}


def drafts(found: LocalModels) -> dict[str, list[str]]:
    return {one.file.name: [draft.file.name for draft in one.drafts] for one in found.models}


def copies(folder: Path, **files: Path) -> Path:
    """A folder with these files, by their names without the ending."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / f"{name}.gguf")
    return folder


# ---- where they are --------------------------------------------------------------------------------------------------


def test_the_folders_of_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(client, "hub_cache_folder", lambda: tmp_path / "hub")
    usual = {(place.program, place.folder) for place in local.program_folders({}, tmp_path)}
    assert usual == {
        ("Hugging Face", tmp_path / "hub"),
        ("llama.cpp", tmp_path / ".cache" / "llama.cpp"),
        ("LM Studio", tmp_path / ".lmstudio" / "models"),
        ("LM Studio", tmp_path / ".cache" / "lm-studio" / "models"),
        ("Ollama", tmp_path / ".ollama" / "models"),
        ("Ollama", Path("/usr/share/ollama/.ollama/models")),
    }
    moved = {"LLAMA_CACHE": "/l", "OLLAMA_MODELS": "/o", "XDG_CACHE_HOME": "/never"}
    named = {place.program: place.folder for place in local.program_folders(moved, tmp_path)}
    assert (named["llama.cpp"], named["Ollama"]) == (Path("/l"), Path("/o"))


def hub(folder: Path, repo: str, file: str, content: Path, *, commit: str = COMMIT) -> None:
    root = folder / f"models--{repo.replace('/', '--')}"
    blob = root / "blobs" / f"{commit}-{file.replace('/', '-')}"
    link = root / "snapshots" / commit / file
    for path in (blob, link, root / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(content, blob)
    link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs" / "main").write_text(COMMIT)


def test_the_hub_names_what_its_main_branch_has(find: Find, tmp_path: Path, target: Path, draft: Path) -> None:
    hub(tmp_path / "hub", "user/Big-GGUF", "F16/Big-F16.gguf", target)
    hub(tmp_path / "hub", "user/Small-GGUF", "Small-Q8_0.gguf", draft, commit=OLDER)
    (tmp_path / "hub" / "datasets--user--x" / "snapshots").mkdir(parents=True)
    (tmp_path / "hub" / "models--user--Small-GGUF" / "snapshots" / OLDER / "Gone-Q8_0.gguf").symlink_to("nowhere")
    found = find("Hugging Face", tmp_path / "hub")
    big, small = found.models
    assert (big.file.name, big.file.words) == ("Big-F16", ("-hf", "user/Big-GGUF/F16/Big-F16.gguf"))
    assert small.file.draft_words == ("-md", str(small.file.path)), "an older commit is found by its path alone"
    assert small.file.path.name == "Small-Q8_0.gguf"
    assert "does not exist" in reasons(found)["Gone-Q8_0.gguf"]
    assert (big.quantization, big.header.architecture) == ("F16", "llama")
    assert big.parameters == pytest.approx(10e6, rel=0.1)


def ollama(folder: Path, name: str, content: Path | str, *, media: str = "model") -> None:
    """A model in Ollama's folder, or with a text the manifest."""
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        manifest.write_text(content)
        return
    digest = ("c" if media == "model" else "d") * 64
    (folder / "blobs").mkdir(exist_ok=True)
    shutil.copyfile(content, folder / "blobs" / f"sha256-{digest}")
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'0' * 64}"},
        {"mediaType": f"application/vnd.ollama.image.{media}", "digest": f"sha256:{digest}", "size": 7},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))


def test_a_manifest_names_a_blob_of_ollama(find: Find, tmp_path: Path, draft: Path) -> None:
    folder, library = tmp_path / "ollama", "registry.ollama.ai/library"
    ollama(folder, f"{library}/small/1b", draft)
    ollama(folder, f"{library}/small/latest", draft)
    ollama(folder, "hf.co/user/Other-GGUF/Q8_0", draft)
    ollama(folder, f"{library}/seeing/latest", draft, media="projector")
    broken = {"cut": '{"layers": [', "list": "[1]", "deep": "[" * 5000, "worded": '{"layers": [{"mediaType": 1}, 2]}'}
    gone = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'e' * 64}"}]}
    escaping = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../secret"}]}
    for name, text in (broken | {"gone": json.dumps(gone), "escaping": json.dumps(escaping)}).items():
        ollama(folder, f"{library}/{name}/latest", text)
    found = find("Ollama", folder)
    assert names(found) == ["user/Other-GGUF:Q8_0"] or names(found) == ["hf.co/user/Other-GGUF:Q8_0"]
    assert found.models[0].file.path.name == f"sha256-{'c' * 64}"
    assert "it is missing, but gone:latest needs it" in reasons(found)[f"sha256-{'e' * 64}"]
    assert len(found.left_out) == 7


def test_a_split_model_is_one_and_a_part_of_none_is_told(find: Find, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    parts = shapes.write_split(folder, shapes.SHAPES["tiny-llama"], 3)
    found = find("LM Studio", folder)
    assert [(one.header.parts, one.header.size_bytes) for one in found.models] == [
        (3, sum(part.stat().st_size for part in parts))
    ]
    assert not found.left_out
    parts[0].unlink()
    lost = find("LM Studio", folder)
    assert (names(lost), [*reasons(lost).values()]) == ([], [f"its first part is missing: {parts[0].name}"] * 2)


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_damaged_files_and_others_are_left_out(
    find: Find, tmp_path: Path, damaged: dict[str, Path], target: Path, draft: Path
) -> None:
    folder = copies(tmp_path / "m", good=draft, sound=target)
    shutil.copyfile(draft, folder / "mmproj-F16.gguf")
    for name, file in damaged.items():
        shutil.copyfile(file, folder / f"{name}.gguf")
    (folder / "folder.gguf").mkdir()
    (folder / os.fsdecode(b"\xff.gguf")).touch()
    os.mkfifo(folder / "pipe.gguf")
    found = find("LM Studio", folder)
    assert names(found) == ["sound", "good"]
    why = reasons(found)
    assert len(why) == len(damaged) + 2, why
    assert "by its name it is not a model" in why["mmproj-F16.gguf"]
    assert "is truncated" in why["cut in the data.gguf"]


def test_a_model_that_only_embeds_is_left_out(find: Find, tmp_path: Path) -> None:
    shape = shapes.SHAPES["tiny-llama"]
    path = tmp_path / "embeds.gguf"
    shapes.write_file(path, {**shape.metadata, "llama.pooling_type": 1}, shape.tensors)
    found = find("LM Studio", tmp_path)
    assert names(found) == []
    assert "it is an embedding model" in reasons(found)["embeds.gguf"]


def test_a_head_is_only_a_draft(find: Find, tmp_path: Path, target: Path) -> None:
    folder = copies(tmp_path / "m", big=target)
    shutil.copyfile(target.parent / "demo-eagle3-Q8_0.gguf", folder / "eagle3-big.gguf")
    found = find("LM Studio", folder)
    assert drafts(found) == {"big": ["eagle3-big"], "eagle3-big": []}
    assert found.models[1].is_head
    chosen = first_choice(found.models, 1 << 40)
    assert chosen is not None
    assert chosen.file.name == "big"


def test_loops_depth_and_hidden_folders(find: Find, tmp_path: Path, draft: Path) -> None:
    folder = copies(tmp_path / "m", top=draft)
    (folder / "again").symlink_to(folder)
    (folder / "self").symlink_to("self")
    copies(folder / ".hidden", hidden=draft)
    (folder / "cache").symlink_to(tmp_path / "cache")
    copies(folder / "1" / "2" / "3" / "4", deep=draft)
    copies(folder / "1" / "2" / "3" / "4" / "5", deeper=draft)
    began = time.monotonic()
    found = find("LM Studio", folder)
    assert time.monotonic() - began < 20
    assert sorted(names(found)) == ["deep", "top"]
    twice = find("LM Studio", folder, ProgramFolder("llama.cpp", folder), ProgramFolder("this folder", folder / "1"))
    assert sorted(names(twice)) == ["deep", "top"], "each file is the first program's"


def test_an_unreadable_folder_is_named_and_the_others_are_read(
    find: Find, tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copies(tmp_path / "m", top=draft)
    copies(folder / "locked", never=draft)
    scan = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)  # who is root may read everything
    found = find("LM Studio", folder)
    assert names(found) == ["top"]
    assert reasons(found) == {"locked": "the folder cannot be read: Permission denied"}


def test_a_huge_folder_ends_the_search_there(
    find: Find, tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MOST_ENTRIES", 10)
    folder = tmp_path / "huge"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").touch()
    other = copies(tmp_path / "other", small=draft)
    found = find("LM Studio", folder, ProgramFolder("llama.cpp", other))
    assert names(found) == ["small"]
    assert "too many files" in reasons(found)["huge"]
    assert [one.unread for one in found.left_out] == [True]


def test_no_more_than_so_many_headers_are_read(
    find: Find, tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MOST_MODELS", 2)
    found = find("LM Studio", copies(tmp_path / "m", a=draft, b=draft, c=draft))
    assert (names(found), [*reasons(found)]) == (["a", "b"], ["c.gguf"])


def test_what_is_not_read_in_time_is_read_the_next_time(find: Find, tmp_path: Path, draft: Path, target: Path) -> None:
    folder = copies(tmp_path / "m", a=draft, b=target)
    late = find("LM Studio", folder, seconds=-1)
    assert names(late) == []
    assert {one.why for one in late.left_out if one.unread} == {"its header was not read in time"}
    assert names(find("LM Studio", folder)) == ["b", "a"]
    assert drafts(find("LM Studio", folder, seconds=-1)) == {"b": ["a"], "a": []}, "both are cached now"


def test_a_header_that_ends_llama_cpp_costs_no_other(
    find: Find, tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copies(tmp_path / "m", a=draft, deadly=draft, z=draft)
    call = child.call

    def dying(module: str, spec: Any, kind: type[Any], **more: Any) -> Any:
        if any(one.origin.endswith("deadly.gguf") for one in spec.found):
            raise ChildError("GGML_ASSERT(false) failed", "")
        return call(module, spec, kind, **more)

    monkeypatch.setattr(child, "call", dying)
    found = find("LM Studio", folder)
    assert sorted(names(found)) == ["a", "z"]
    assert "llama.cpp crashed on its header" in reasons(found)["deadly.gguf"]


# ---- which drafts for which ------------------------------------------------------------------------------------------


def test_a_smaller_model_of_the_same_vocabulary_drafts(
    find: Find,
    tmp_path: Path,
    target: Path,
    draft: Path,
    other_token: tuple[Path, int, str, str],
    small_vocabulary: Path,
) -> None:
    folder = copies(tmp_path / "m", big=target, twin=target, small=draft, other=other_token[0], few=small_vocabulary)
    found = drafts(find("LM Studio", folder))
    assert found == {"big": ["small"], "twin": ["small"], "small": [], "other": [], "few": []}
    assert len(json.loads((tmp_path / "cache" / "vocabularies.json").read_text())) == 1, "compared once for all"


def test_the_best_pair_is_the_largest_that_fits(find: Find, tmp_path: Path, target: Path, draft: Path) -> None:
    found = find("LM Studio", copies(tmp_path / "m", big=target, small=draft)).models

    def name(room: int) -> str:
        chosen = first_choice(found, room)
        assert chosen is not None
        return chosen.file.name

    both = target.stat().st_size + draft.stat().st_size
    assert (name(both), name(both - 1), name(0)) == ("big", "small", "small")
    assert first_choice([], both) is None


def test_a_chat_model_comes_before_a_pair_without_a_template(
    find: Find, tmp_path: Path, target: Path, draft: Path
) -> None:
    folder = copies(tmp_path / "m", big=target, small=draft)
    rewritten(draft, folder / "chats.gguf", template="{{ messages[0].content }}")
    chosen = first_choice(find("LM Studio", folder).models, 1 << 40)
    assert chosen is not None
    assert chosen.file.name == "chats"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen2.5-Coder-7B-Instruct-Q5_K_M.gguf", "qwen2.5coder"),
        ("Qwen2.5 Coder 7B Instruct", "qwen2.5coder"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m", "qwen2.5coder"),
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "qwen3"),
        ("Meta-Llama-3.1-8B-Instruct-Q8_0.gguf", "llama3.1"),
        ("Llama-3.3-70B-Instruct-Q4_K_M.gguf", "llama3.1"),
        ("Meta-Llama-3-70B-Instruct-Q3_K_S.gguf", "llama3"),
        ("model.gguf", ""),
    ],
)
def test_the_family_of_a_model_by_its_name(name: str, found: str) -> None:
    assert family(name) == found


@pytest.mark.parametrize(
    ("given", "size", "file"),
    [
        (["my-model", "Qwen2.5 Coder 7B Instruct"], 4.7e9, "qwen2.5-coder-0.5b-instruct-q8_0.gguf"),
        (["Qwen2.5-Coder-1.5B-Instruct-Q4_K_M"], 1.1e9, "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        (["Qwen2.5-Coder-0.5B-Instruct-Q8_0"], 0.68e9, None),
        (["Llama-3.3-70B-Instruct-IQ3_M"], 32e9, "Llama-3.2-1B-Instruct-Q8_0.gguf"),
        (["gemma-4-12B-it-Q4_K_M"], 7e9, None),
        (["demo-10M-F16"], 2e7, None),
        (["Unheard-7B", ""], 4e9, None),
    ],
)
def test_profiles_suggest_a_draft_of_the_family(given: Sequence[str], size: float, file: str | None) -> None:
    found = suggested(given, int(size))
    assert (found.file if found else None) == file


def test_mtp_blocks_are_no_draft_of_another(find: Find, tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    heads.write_mtp(target, folder / "own.gguf")
    found = find("LM Studio", folder)
    assert drafts(found) == {"own": []}


@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_table_shows_where_names_differ(width: int) -> None:
    """Also those of drafts, which have less room."""
    names = [f"qwen2.5-coder-{size}-instruct-q4_k_m" for size in ("0.5b", "1.5b", "3b")]
    paths = [f"/models/{name}.gguf" for name in names]
    options = ("-m", ""), ("-md", "")
    rows = tuple(
        ModelRow(name, path, "", 10**9, "qwen2", 1, "1B", "Q4_K_M", 1, True, False, tuple(paths[:index]), "", *options)
        for index, (name, path) in enumerate(zip(names, paths, strict=True))
    )
    cells = [row[0].split("\n") for row in model_rows(ModelsDocument(rows, (), (), True, ""), width).cells]
    for name, (first, *_) in zip(names, cells, strict=True):
        assert name.split("-")[2] in first
    assert [lines[1].startswith("  draft: ") and "0.5b" in lines[1] for lines in cells[1:]] == [True, True]
    assert max(len(line) for lines in cells for line in lines) <= max(28, width - 36 - len("Q4_K_M"))
