"""Profiles: what is refused and how it is said, and where files are looked for."""

import json
import re

import pytest

from ggufspec.errors import GgufspecError, ModelError, UsageError
from ggufspec.files.write import as_file_name
from ggufspec.models import profile
from ggufspec.models.hub import client
from ggufspec.models.profile import demo_pair, find_profile, known_profiles, load_profile, local_pair
from ggufspec.settings.table import Settings

GOOD = """
name = "mine"
why = "a test"
source = "nowhere"

[target]
file = "target.gguf"

[draft]
file = "sub/draft.gguf"
gpu_layers = -1

[settings]
ctx_size = 512
"""
REMOTE = """
name = "far"
why = "a test"
source = "nowhere"

[target]
repo = "someone/models"
file = "target.gguf"
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def load(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return load_profile(path)

    return write


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The user's folder of profiles, which is not there yet."""
    folder = tmp_path / "user" / "profiles"
    monkeypatch.setattr(profile, "user_folder", lambda: folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache: what is in it is what ``hf download`` leaves there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--models"

    def put(name, commit=COMMIT, ref="main"):
        for path, text in ((repository / "snapshots" / commit / name, "GGUF"), (repository / "refs" / ref, commit)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return repository / "snapshots" / commit / name

    return put


def refused(load, text):
    with pytest.raises(GgufspecError) as caught:
        load(text)
    assert "mine.toml" in caught.value.message
    assert caught.value.hint
    return caught.value


def test_a_good_profile(load):
    mine = load(GOOD)
    assert (mine.name, mine.target.file, mine.target.repo) == ("mine", "target.gguf", None)
    assert (mine.draft.file, mine.draft.gpu_layers) == ("sub/draft.gguf", -1)
    assert (mine.settings.ctx_size, mine.settings.draft_max) == (512, None)


def test_acceptance_may_be_that_of_a_log(load):
    def settings(value):
        return GOOD.replace("[settings]", f"[settings]\nacceptance = {value}")

    assert load(settings(0.7)).settings.acceptance == 0.7
    assert load(settings('"0.26@16"')).settings.acceptance == pytest.approx(0.8118, abs=1e-4)
    for wrong, words in (('"0.26@"', "not a number"), ('"0.2@0"', "needs a draft length"), (1.5, "out of range")):
        assert words in refused(load, settings(wrong)).message


def test_a_draft_and_settings_may_be_left_out(load):
    mine = load(GOOD.split("[draft]")[0])
    assert mine.draft is None
    assert mine.settings.given() == {}


@pytest.mark.parametrize(
    ("old", "new", "key", "nearest"),
    [
        ("why =", "whi =", "whi", "why"),  # which is missing, too
        ("[target]", "[taget]", "taget", "target"),
        ("[settings]", "[setings]", "setings", "settings"),
        ("gpu_layers", "gpu_layer", "draft.gpu_layer", "gpu_layers"),
        ('file = "target.gguf"', 'file = "target.gguf"\nrevison = "main"', "target.revison", "revision"),
        ("ctx_size = 512", "ctx_size = 512\ndraftmax = 3", "settings.draftmax", "draft_max"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(load, old, new, key, nearest):
    error = refused(load, GOOD.replace(old, new, 1))
    assert f"unknown key '{key}'" in error.message
    assert error.hint == f"did you mean '{nearest}'?"


def test_an_unknown_key_with_no_near_one_gets_all_of_its_table(load):
    error = refused(load, GOOD.replace("ctx_size = 512", "zzz = 1"))
    assert "unknown key 'settings.zzz'" in error.message
    assert (
        error.hint
        == "known keys: n_cpu_moe, n_cpu_ffn, override_tensor, load_mode, no_host, mmproj, no_mmproj_offload, "
        "acceptance, drafter, draft_policy, draft_max, ctx_size, threads, cache_type_k, cache_type_v, "
        "cache_type_k_draft, cache_type_v_draft, flash_attn, ubatch_size, no_op_offload, op_offload_min_batch"
    )


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("n_ctx", "ctx_size", 1024),
        ("type_k", "cache_type_k", "q8_0"),
        ("type_v", "cache_type_v", "q8_0"),
        ("flash_attention", "flash_attn", "on"),
        ("micro_batch", "ubatch_size", 64),
        ("cpu_experts", "n_cpu_moe", 3),
    ],
)
def test_a_key_of_an_older_version_is_read(load, old, new, value):
    written = f'"{value}"' if isinstance(value, str) else value
    mine = load(GOOD.replace("ctx_size = 512", f"{old} = {written}"))
    assert mine.settings.given() == {new: value}


def test_an_old_key_with_a_wrong_value_is_named_as_it_is_written(load):
    error = refused(load, GOOD.replace("ctx_size = 512", "cpu_experts = -1"))
    assert "settings.cpu_experts: " in error.message
    assert "out of range" in error.message


@pytest.mark.parametrize(
    ("old", "key"),
    [('name = "mine"', "name"), ('source = "nowhere"', "source"), ('file = "sub/draft.gguf"', "draft.file")],
)
def test_a_missing_key_is_named(load, old, key):
    error = refused(load, GOOD.replace(old, ""))
    assert f"key '{key}' is missing" in error.message
    assert error.hint == f"add {key} to the file"


def test_a_missing_table_is_named(load):
    assert "key 'target' is missing" in refused(load, 'name = "a"\nwhy = "b"\nsource = "c"').message


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("ctx_size = 512", 'ctx_size = "512"', "settings.ctx_size"),
        ("ctx_size = 512", "ctx_size = 512.0", "settings.ctx_size"),
        ("ctx_size = 512", "ctx_size = true", "settings.ctx_size"),
        ("ctx_size = 512", "ctx_size = -1", "settings.ctx_size"),
        ("ctx_size = 512", "draft_max = 0", "settings.draft_max"),
        ('name = "mine"', "name = 1", "name"),
        ("gpu_layers = -1", 'gpu_layers = "all"', "draft.gpu_layers"),
        ("[settings]\nctx_size = 512", "", "draft"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(load, old, new, key):
    text = GOOD.replace(old, new)
    if key == "draft":
        text = 'draft = "draft.gguf"\n' + text.split("[draft]")[0]
    assert f": {key}: " in refused(load, text).message


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("ctx_size = 512", 'ctx_size = "512"', "14: settings.ctx_size: "),
        ('why = "a test"', "why = 1", "3: why: "),
        ("gpu_layers = -1", '"gpu_layers" = "all"', "11: draft.gpu_layers: "),
        ("ctx_size = 512", "# ctx_size = -1\nctx_size = -1", "15: settings.ctx_size: "),
        ("[settings]\nctx_size = 512", "settings.ctx_size = 1", "13: unknown key 'draft.settings'"),
        (
            '[target]\nfile = "target.gguf"',
            'target = {file = "target.gguf", gpu_layers = "x"}',
            "6: target.gpu_layers: ",
        ),
        ("ctx_size = 512", "ctx_size = 512\nzzz = 1", "15: unknown key 'settings.zzz'"),
        ('file = "sub/draft.gguf"', "", "9: key 'draft.file' is missing"),
    ],
)
def test_the_line_is_named(load, old, new, place):
    assert f"mine.toml:{place}" in refused(load, GOOD.replace(old, new, 1)).message


def test_a_key_that_is_nowhere_has_no_line(load):
    assert "mine.toml: key 'why' is missing" in refused(load, GOOD.replace('why = "a test"', "")).message


@pytest.mark.parametrize("text", ["name = ", "[target", "name = 'a'\nname = 'b'", "a b"])
def test_a_file_that_is_no_toml(load, text):
    assert re.search(r"mine\.toml: .*\(at (line 1|end of document)", refused(load, text).message)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(GgufspecError, match=r"mine\.toml.*utf-8"):
        load_profile(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(GgufspecError, match=r"mine\.toml.*No such file"):
        load_profile(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    "file",
    [
        *("../secret.gguf", "sub/../../secret.gguf", "/etc/passwd", "..", ".", "a//b.gguf", "./a.gguf", "a/", ""),
        *("..\\a.gguf", "a\\b.gguf", "\\\\host\\a.gguf", "C:/a.gguf", "c:a.gguf", "sub/C:a.gguf"),
        *("~/a.gguf", "~root/a.gguf", "a\0b.gguf", "a\nb.gguf", "a\x1b[2Jb.gguf"),
    ],
)
def test_a_file_outside_its_repository(load, file):
    text = REMOTE.replace('"target.gguf"', json.dumps(file))
    assert f"{file!r} leaves the repository" in refused(load, text).message
    assert "is not a branch, tag or commit" in refused(load, REMOTE + f"revision = {json.dumps(file)}").message


def test_a_local_name_with_a_nul_is_no_name(load):
    assert "is not a file name" in refused(load, GOOD.replace("target.gguf", "a\\u0000b")).message


def test_a_local_file_may_be_anywhere(load):
    assert load(GOOD.replace("target.gguf", "../target.gguf")).target.file == "../target.gguf"


def test_local_files_are_found_beside_the_profile(load, tmp_path):
    for name in ("target.gguf", "sub/draft.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    pair = local_pair(load(GOOD))
    assert (pair.target, pair.draft) == (tmp_path / "target.gguf", tmp_path / "sub/draft.gguf")
    assert pair.settings == Settings(gpu_layers_draft=-1, ctx_size=512)
    assert pair.describe() == {"name": "mine", "target": str(pair.target), "draft": str(pair.draft)}


def test_a_target_alone_is_a_pair_too(load, tmp_path):
    (tmp_path / "target.gguf").touch()
    pair = local_pair(load(GOOD.split("[draft]")[0]))
    assert (pair.draft, pair.settings.gpu_layers_draft, pair.describe()["draft"]) == (None, None, None)


def test_a_local_file_that_is_not_there_is_named(load, tmp_path):
    (tmp_path / "target.gguf").touch()
    with pytest.raises(ModelError) as caught:
        local_pair(load(GOOD))
    assert str(tmp_path / "sub/draft.gguf") in caught.value.message
    assert caught.value.hint == f"ls {tmp_path / 'sub'}"


@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_remote_file_that_is_not_here_comes_with_the_command_that_fetches_it(load, tmp_path, cache, revision):
    text = REMOTE + (f'revision = "{revision}"' if revision else "")
    with pytest.raises(ModelError) as caught:
        local_pair(load(text))
    assert "target.gguf of profile 'far'" in caught.value.message
    assert caught.value.hint == "ggufspec pull far"


def test_a_remote_file_in_the_cache_is_found(load, tmp_path, cache):
    path = cache("target.gguf")
    assert local_pair(load(REMOTE)).target == path


def test_a_remote_file_in_a_folder_of_its_repository_is_found(load, tmp_path, cache):
    path = cache("Q4/target.gguf")
    assert local_pair(load(REMOTE.replace("target.gguf", "Q4/target.gguf"))).target == path


def test_the_revision_chooses_the_file(load, tmp_path, cache):
    cache("target.gguf")
    other = cache("target.gguf", commit="f" * 40, ref="v2")
    assert local_pair(load(REMOTE + 'revision = "v2"')).target == other
    assert local_pair(load(REMOTE + f'revision = "{"f" * 40}"')).target == other


def test_a_file_that_the_hub_is_known_not_to_have_is_not_here(cache, tmp_path):
    cache("other.gguf")
    absent = tmp_path / "hub/models--someone--models/.no_exist" / COMMIT / "target.gguf"
    absent.parent.mkdir(parents=True)
    absent.touch()
    assert client.cached_file("someone/models", "target.gguf") is None


@pytest.mark.parametrize("repo", ["a/b/c", "no repo", "..", "a--b"])
def test_what_cannot_be_a_repository_is_refused(load, tmp_path, cache, repo):
    with pytest.raises(GgufspecError, match="is not a repository on the hub") as caught:
        local_pair(load(REMOTE.replace("someone/models", repo)))
    assert "USER/NAME" in caught.value.hint


def test_profiles_are_found_by_name_and_by_path(users, tmp_path):
    assert find_profile("demo") == profile.bundled_folder() / "demo.toml"
    path = tmp_path / "mine.toml"
    path.touch()
    assert find_profile(str(path)) == path


def test_the_users_profile_wins_over_the_bundled_one(users):
    users.mkdir(parents=True)
    (users / "demo.toml").write_text(GOOD)
    (users / "mine.toml").write_text(GOOD)
    assert find_profile("demo") == users / "demo.toml"
    assert find_profile("mine") == users / "mine.toml"
    assert known_profiles() == sorted({*bundled(), "mine"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dmeo", "did you mean 'demo'?"),
        ("llama3-70", "did you mean 'llama3-70b'"),
        ("xyzzy", "ggufspec profiles list"),
        ("model.gguf", "-m model.gguf"),
        ("gone.toml", "ggufspec profiles list"),
    ],
)
def test_an_unknown_profile_comes_with_the_nearest(users, name, hint):
    with pytest.raises(UsageError) as caught:
        find_profile(name)
    assert name in caught.value.message
    assert hint in caught.value.hint


def bundled():
    return sorted(path.stem for path in profile.bundled_folder().glob("*.toml"))


def test_there_are_bundled_profiles():
    assert {"demo", "llama3-70b"} <= set(bundled())


CATALOGUE = {
    *("demo", "qwen3.8-27b", "qwen3.8-27b-10gb", "qwen3.6-27b", "gemma-4-12b", "gemma-4-31b", "devstral-24b"),
    *(
        "qwen2.5-coder-32b",
        "qwen2.5-coder-14b",
        "qwen2.5-coder-7b",
        "qwen2.5-coder-1.5b",
        "qwen3-32b",
        "qwen3-14b",
        "mistral-small-24b",
    ),
    *("llama3.3-70b", "llama3.1-8b"),
}
OFF = {"gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3.6-35b-a3b"}  # drafting does not pay there
REFERENCE = {"llama3-70b", "llama3.2-3b", "gemma3-27b", "gpt2-xl", "r1-qwen-32b"}


def test_the_catalogue_has_what_people_run_and_says_where_drafting_is_off():
    loaded = {name: load_profile(profile.bundled_folder() / f"{name}.toml") for name in bundled()}
    assert set(loaded) >= CATALOGUE | OFF | REFERENCE
    assert {name for name, one in loaded.items() if one.group == "reference"} == REFERENCE
    assert {name for name, one in loaded.items() if one.settings.drafter == "none"} == OFF
    assert all(loaded[name].why.startswith("Off: ") for name in OFF)


@pytest.mark.parametrize("name", bundled())
def test_every_bundled_profile_says_where_it_is_from(name):
    path = profile.bundled_folder() / f"{name}.toml"
    loaded, text = load_profile(path), path.read_text()
    comment = text[: text.index("name =")]
    assert comment.startswith("# ")
    assert all(line.startswith("#") for line in comment.splitlines())
    assert loaded.why.endswith(".")
    if loaded.target.repo is not None:
        assert loaded.source.startswith("https://")
    for model in filter(None, (loaded.target, loaded.draft)):
        assert model.file.endswith(".gguf")
    if logged := re.search(r'^acceptance = "([\d.]+)@\d+"', text, re.MULTILINE):
        assert logged[1] in comment
    elif loaded.settings.acceptance is not None:  # a figure has its arithmetic beside it
        assert f"an acceptance of {loaded.settings.acceptance} a token" in comment


@pytest.mark.parametrize("name", bundled())
def test_every_bundled_profile_is_good(name):
    loaded = load_profile(profile.bundled_folder() / f"{name}.toml")
    assert loaded.name == name
    if loaded.draft is None:
        assert loaded.settings.drafter in ("mtp", "lookup", "none")
    else:
        assert (loaded.target.repo is None) == (loaded.draft.repo is None)
    for model in filter(None, (loaded.target, loaded.draft)):
        assert model.repo is None or model.size_bytes


def test_the_demo_pair_is_here():
    assert [path.read_bytes()[:4] for path in demo_pair()] == [b"GGUF", b"GGUF"]


@pytest.mark.parametrize("name", ["x/../../../out", "..", "a\\b", "", ".hidden", "a\\u001b[2J", "a\\u202eb", "a" * 101])
def test_a_name_is_no_path_and_can_be_shown(load, name):
    with pytest.raises(GgufspecError, match=r"mine.toml:2: name: .* is not a valid name") as refused:
        load(GOOD.replace('"mine"', f'"{name}"' if "u0" in name or "u2" in name else json.dumps(name)))
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo-target-F16", "demo-target-F16"),
        ("Llama 3.1 (70B)", "Llama-3.1-70B-"),
        ("x/../../../out", "x-..-..-..-out"),
        ("../..", "unnamed"),
        ("-rf", "rf"),
        ("a\x1b[2J\n\u202eb\0c", "a-2J-b-c"),
        ("名前", "名前"),
        ("\ud800", "unnamed"),
        ("", "unnamed"),
    ],
)
def test_file_names_are_made_of_safe_characters(text, name):
    assert as_file_name(text) == name


def test_a_long_name_is_cut_and_stays_text():
    assert as_file_name("a" * 5000) == "a" * 120
    assert as_file_name("名" * 5000) == "名" * 40
    assert as_file_name("a" + "名" * 5000) == "a" + "名" * 39
