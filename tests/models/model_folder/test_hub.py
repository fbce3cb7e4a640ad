"""Model folders: local ones, the hub's cache without a network, and everything that can be wrong with either."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.references import reference
from vitdeploy.errors import CheckpointError, HubError, MissingFileError, MissingPackageError
from vitdeploy.models.model_folder.folder import ModelFolder
from vitdeploy.models.model_folder.hub import _tagged, is_hub_name, locate, pinned

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def folder_with(path, *names):
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_text("{}", encoding="utf-8")
    return path


def names(paths):
    return [path.name for path in paths]


# --- local folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["pytorch_model.bin", "model.safetensors", "tf_model.h5"], ["model.safetensors"]),
        (["pytorch_model.bin.index.json", "pytorch_model-1.bin", "model.safetensors"], ["model.safetensors"]),
        (["model.safetensors.index.json", "model.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin.index.json", "pytorch_model.bin"], ["pytorch_model.bin"]),
    ],
)
def test_the_weights_of_a_folder(tmp_path, files, weights):
    folder = locate(f"hf:{folder_with(tmp_path, 'config.json', *files)}")
    assert folder == ModelFolder(tmp_path)
    assert names(folder.weights) == weights


def test_the_files_that_a_model_is_a_function_of(tmp_path):
    configs = ["config.json", "preprocessor_config.json", "processor_config.json"]
    folder = ModelFolder(folder_with(tmp_path, *configs, "model.safetensors", "README.md", "tokenizer.json"))
    assert names(folder.files) == [*configs, "model.safetensors"]


def test_a_folder_named_from_home_and_from_here(tmp_path, monkeypatch):
    folder_with(tmp_path / "models" / "vit", "config.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("hf:models/vit").path.resolve() == tmp_path / "models" / "vit"
    assert locate("hf:~/models/vit").path == tmp_path / "models" / "vit"


def sharded(path, shards, *present):
    folder_with(path, *present)
    mapping = {f"layer.{i}": name for i, name in enumerate(shards)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}), encoding="utf-8")
    return ModelFolder(path)


def test_weights_in_several_files_are_taken_in_order(tmp_path):
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    older = ["pytorch_model.bin", "pytorch_model.bin.index.json"]
    folder = sharded(tmp_path, [parts[1], parts[0], parts[1]], *parts, *older)
    assert names(folder.weights) == parts


def test_a_missing_part_is_named(tmp_path):
    folder = sharded(tmp_path, ["model-1.safetensors", "model-2.safetensors"], "model-1.safetensors")
    with pytest.raises(MissingFileError, match="1 of 2 weight files are missing from") as caught:
        _ = folder.weights
    assert caught.value.found == "no model-2.safetensors"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", 7])
def test_an_index_that_names_files_outside_its_folder_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        _ = sharded(tmp_path, [name]).weights


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}', "\0"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json is not a"):
        _ = ModelFolder(tmp_path).weights


@pytest.mark.parametrize(
    ("files", "found"), [([], "an empty folder"), (["config.json", "tf_model.h5"], "config.json, tf_model.h5")]
)
def test_a_folder_without_weights(tmp_path, files, found):
    with pytest.raises(MissingFileError, match="no weights in") as caught:
        _ = ModelFolder(folder_with(tmp_path, *files)).weights
    assert caught.value.found == found


@pytest.mark.parametrize("name", ["/absent/model", "./absent", "~/absent/model", "a/b/c", "gpt2", "../a@b"])
def test_a_path_that_is_no_folder(name):
    with pytest.raises(MissingFileError, match="no folder at"):
        locate(f"hf:{name}")


def test_hub_names():
    assert [is_hub_name(name) for name in ("hf:a/b", "timm:vit", "vit_base_patch16_224", "a.b:c")] == [1, 1, 0, 0]


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """huggingface_hub without a network, with an empty cache in `tmp_path`. Whatever opens a socket fails the test.

    The package reads HF_HUB_OFFLINE once, at import, into the constants that are set here.
    """
    constants = pytest.importorskip("huggingface_hub.constants", reason="pip install 'vitdeploy[export]'")

    def refuse(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path / "cache"


def cached(cache, repository, *files, branch="main"):
    """A repository as huggingface_hub keeps it: files are links from the snapshot's folder to blobs."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for part in (root / "blobs", root / "refs" / Path(branch).parent, snapshot):
        part.mkdir(parents=True)
    (root / "refs" / branch).write_text(COMMIT, encoding="utf-8")
    for i, name in enumerate(files):
        (root / "blobs" / f"{i:064x}").write_text("{}", encoding="utf-8")
        (snapshot / name).symlink_to(Path("../..") / "blobs" / f"{i:064x}")
    return snapshot


@pytest.mark.parametrize(
    ("model", "repository"),
    [
        ("hf:google/vit-base-patch16-224", "google/vit-base-patch16-224"),
        ("timm:vit_tiny_patch16_224.augreg_in21k", "timm/vit_tiny_patch16_224.augreg_in21k"),
    ],
)
def test_without_a_network_the_error_says_how_to_fetch_elsewhere(offline, model, repository):
    with pytest.raises(HubError, match=f"{repository} cannot be downloaded") as caught:
        locate(model)
    assert (caught.value.code, caught.value.exit_code) == ("VD4102", 4)
    assert f"hf download {repository} --local-dir DIR" in caught.value.fix
    assert "HF_HUB_OFFLINE" in caught.value.found


def test_a_revision_that_cannot_be_had_is_named(offline):
    with pytest.raises(HubError) as caught:
        locate("hf:a/b@v1.0")
    assert caught.value.expected.endswith("at v1.0")


def test_the_environment_variable_is_enough(tmp_path):
    code = (
        "from vitdeploy.models.model_folder.hub import locate\ntry: locate('hf:a/b')\nexcept Exception as e: print(e)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    pytest.importorskip("huggingface_hub", reason="pip install 'vitdeploy[export]'")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("VD4102  a/b cannot be downloaded")


@pytest.mark.parametrize(
    ("model", "repository", "branch"),
    [
        ("hf:owner/name", "owner/name", "main"),
        ("hf:owner/name@v2", "owner/name", "v2"),
        ("hf:owner/name@refs/pr/1", "owner/name", "refs/pr/1"),
        (f"hf:owner/name@{COMMIT}", "owner/name", "main"),
        ("timm:vit.tag", "timm/vit.tag", "main"),
        ("timm:vit.tag@v2", "timm/vit.tag", "v2"),
    ],
)
def test_what_was_downloaded_before_is_found_and_pinned(offline, model, repository, branch):
    snapshot = cached(offline, repository, "config.json", "model.safetensors", branch=branch)
    folder = locate(model)
    assert folder == ModelFolder(snapshot, repository, COMMIT)
    assert pinned(model, folder) == f"hf:{repository}@{COMMIT}"
    assert locate(pinned(model, folder)) == folder
    assert names(folder.files) == ["config.json", "model.safetensors"]
    assert all(path.is_symlink() and path.read_text() == "{}" for path in folder.files)


def test_the_snapshot_folder_itself_is_a_local_folder(offline):
    snapshot = cached(offline, "owner/name", "config.json", "model-1.safetensors", "model-2.safetensors")
    folder = sharded(snapshot, ["model-1.safetensors", "model-2.safetensors"])
    assert names(locate(f"hf:{snapshot}").weights) == names(folder.weights)
    assert pinned(f"hf:{snapshot}", locate(f"hf:{snapshot}")) == f"hf:{snapshot.resolve()}"


@pytest.mark.parametrize(
    ("present", "asked"), [("model.safetensors", 1), ("model-00001-of-00002.safetensors", 1), ("pytorch_model.bin", 2)]
)
def test_old_weights_are_fetched_only_where_there_are_no_others(tmp_path, monkeypatch, present, asked):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'vitdeploy[export]'")
    calls = []

    def snapshot_download(repository, revision, allow_patterns):
        calls.append((repository, revision, allow_patterns))
        return str(folder_with(tmp_path / COMMIT, "config.json", present))

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert locate("hf:owner/name@v2").revision == COMMIT
    assert calls[0][:2] == ("owner/name", "v2")
    assert "pytorch_model.bin" not in calls[0][2]
    assert calls[1:] == [("owner/name", COMMIT, ["pytorch_model.bin"])][: asked - 1]


@pytest.mark.parametrize(
    ("there", "fetched"),
    [
        (["open_clip_model.safetensors", "open_clip_pytorch_model.bin"], ["open_clip_model.safetensors"]),
        (["open_clip_pytorch_model.bin"], ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"]),
    ],
)
def test_weights_of_open_clip_are_fetched_where_a_repository_has_only_its_layout(tmp_path, monkeypatch, there, fetched):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'vitdeploy[export]'")
    calls, remote = [], ["open_clip_config.json", "tokenizer.json", *there]

    def snapshot_download(repository, revision, allow_patterns):
        calls.append(allow_patterns)
        return str(folder_with(tmp_path / COMMIT, *(name for name in remote if name in allow_patterns)))

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert names(locate("hf:owner/name").weights) == fetched[-1:]
    assert calls[1:] == [["pytorch_model.bin"], *([name] for name in fetched)]


def test_whatever_a_download_dies_of_is_a_hub_error(monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'vitdeploy[export]'")

    def snapshot_download(*_, **__):
        raise RuntimeError("connection\n  reset")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(HubError) as caught:
        locate("hf:owner/name")
    assert caught.value.found == "connection reset"


@pytest.mark.parametrize("name", ["owner/na me", "owner/-name", "owner/na--me"])
def test_a_name_that_no_repository_can_have(offline, name):
    with pytest.raises(HubError, match="is not a valid repository name"):
        locate(f"hf:{name}")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError) as caught:
        locate("hf:owner/name")
    assert caught.value.exit_code == 4
    assert caught.value.fix == "pip install 'vitdeploy[export]'"


def test_a_name_of_timm_without_tag_is_that_of_its_default_weights():
    reference("timm")
    assert _tagged("vit_tiny_patch16_224") == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert _tagged("vit_tiny_patch16_224.augreg_in21k") == "vit_tiny_patch16_224.augreg_in21k"
    assert _tagged("no_such_architecture") == "no_such_architecture"


def test_a_name_of_timm_without_tag_and_without_timm_is_told_of_tags(offline, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.models", None)
    with pytest.raises(HubError, match="timm/vit_tiny_patch16_224 cannot be downloaded") as caught:
        locate("timm:vit_tiny_patch16_224")
    assert caught.value.expected.endswith("timm's are named NAME.TAG")
