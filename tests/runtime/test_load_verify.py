"""Which files of a bundle are checked when it is loaded, and which bundle it is."""

import hashlib
import json
import shutil

import numpy as np
import onnx
import pytest

from tests.command_line import command_line
from tests.golden_bundle import golden_small_bundle
from tests.replaced import replace_while_loading
from vitdeploy.bundle.checked import READS, open_checked
from vitdeploy.bundle.read import MANIFEST_FILE, read_bundle
from vitdeploy.errors import AnswersError, DigestError, EngineError, InputError, ManifestError
from vitdeploy.runtime import choice, golden, load
from vitdeploy.serve import engines as serving
from vitdeploy.serve.engines import load_engines


@pytest.fixture(scope="module")
def made(small_bundle, tmp_path_factory):
    return golden_small_bundle(small_bundle, tmp_path_factory)


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "bundle")


def damage(path):
    """One bit in the middle, and the same size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_files_that_are_not_read_are_checked_where_all_are_asked_for(bundle):
    damage(bundle / "model.onnx")
    load(bundle).close()
    with pytest.raises(DigestError, match=r"model\.onnx is not the file"):
        load(bundle, verify="all")
    load(bundle, verify="none").close()


def test_what_is_read_is_checked_unless_nothing_is_to_be(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load(bundle).close()  # its golden answers are noted
    (name,) = read_bundle(bundle).engines[0].files
    matrix = max((each for each in onnx.load(bundle / name).graph.initializer), key=lambda each: len(each.raw_data))
    data = (bundle / name).read_bytes()
    assert data.count(matrix.raw_data) == 1
    other = (-np.frombuffer(matrix.raw_data, np.float32)).tobytes()
    (bundle / name).write_bytes(data.replace(matrix.raw_data, other))
    for verify in ("used", "all"):
        with pytest.raises(DigestError, match="is not the file"):
            load(bundle, verify=verify)
    # Nobody has checked the file, so what was noted of its digest says nothing: it is asked, and refused.
    with pytest.raises(AnswersError):
        load(bundle, verify="none")


def test_without_digests_the_golden_answers_are_asked_each_time_and_nothing_is_noted(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked, check = [], golden.check_golden
    monkeypatch.setattr(golden, "check_golden", lambda *given: asked.append(1) or check(*given))
    for count in (1, 2):
        load(bundle, verify="none").close()
        assert len(asked) == count
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("verify", ["none", "used"])
def test_links_and_other_sizes_are_refused_in_any_case(bundle, verify):
    (name,) = read_bundle(bundle).engines[0].files
    target = bundle / name
    data = target.read_bytes()
    target.write_bytes(data + b"x")
    with pytest.raises(DigestError, match="is not the file"):
        load(bundle, verify=verify)
    target.unlink()
    (bundle.parent / "elsewhere").write_bytes(data)
    target.symlink_to(bundle.parent / "elsewhere")
    with pytest.raises(DigestError, match="not a regular file"):
        load(bundle, verify=verify)


def test_what_is_parsed_here_is_what_was_hashed(bundle):
    files = open_checked(bundle)
    assert files.read("model.onnx") == (bundle / "model.onnx").read_bytes()
    with pytest.raises(ManifestError, match="is too large") as caught:
        files.read("model.onnx", most=10)
    assert caught.value.expected == "at most 10 bytes"
    damage(bundle / "model.onnx")
    with pytest.raises(DigestError, match="is not the file"):
        files.read("model.onnx")
    (bundle / "model.onnx").write_bytes(b"")
    with pytest.raises(DigestError, match="is not the file"):
        files.read("model.onnx")


def test_a_file_that_was_found_to_be_another_one_stays_so(bundle):
    damage(bundle / "model.onnx")
    files = open_checked(bundle)
    for _ in range(2):
        with pytest.raises(DigestError, match="is not the file"):
            files.require(["model.onnx"])


@pytest.mark.parametrize("how", ["written", "replaced", "gone"])
def test_a_file_that_changes_between_its_check_and_its_use_is_noticed(bundle, monkeypatch, how):
    """The runtime opens the graph by its name, after it was hashed."""
    (name,) = read_bundle(bundle).engines[0].files
    make, made = choice.make_runner, []

    def swapped(*given, **more):
        made.append(given)
        runner = make(*given, **more).load()
        data = (bundle / name).read_bytes()
        if how != "written":
            (bundle / name).unlink()
        if how != "gone":
            (bundle / name).write_bytes(data)  # the same bytes again: what was in between nobody knows
        return runner

    monkeypatch.setattr(choice, "make_runner", swapped)
    with pytest.raises(DigestError, match="changed while it was loaded"):
        load(bundle)
    assert len(made) == 1  # the folder is the same: there is nothing else to read
    if how == "written":
        load(bundle, verify="none").close()


def test_an_engine_that_fails_while_its_files_change_is_not_passed_over(bundle, monkeypatch):
    """The next one of the list would be taken, and nobody would know why."""
    document = json.loads((bundle / MANIFEST_FILE).read_text())
    (engine,) = document["engines"]
    document["engines"].append({**engine, "precision": "int8"})
    (bundle / MANIFEST_FILE).write_text(json.dumps(document))
    make, (name,) = choice.make_runner, engine["files"]

    def half_written(folder, spec, **more):
        if spec.precision == "int8":
            return make(folder, spec, **more)
        data = (bundle / name).read_bytes()
        (bundle / name).unlink()
        (bundle / name).write_bytes(data)
        raise EngineError("no graph")

    monkeypatch.setattr(choice, "make_runner", half_written)
    with pytest.raises(DigestError, match="changed while it was loaded"):
        load(bundle)


@pytest.mark.parametrize("verify", ["all", "used", "none"])
def test_a_bundle_that_is_replaced_while_it_is_loaded_is_read_again(bundle, monkeypatch, verify):
    made = replace_while_loading(bundle, monkeypatch, range(1, READS))
    load(bundle, verify=verify).close()
    assert len(made) == READS


@pytest.mark.parametrize("verify", ["used", "none"])
def test_a_bundle_that_is_replaced_again_and_again_is_refused(bundle, monkeypatch, verify):
    made = replace_while_loading(bundle, monkeypatch, range(1, 100))
    with pytest.raises(DigestError, match="changed while it was loaded"):
        load(bundle, verify=verify)
    assert len(made) == READS


def test_what_a_runtime_says_of_a_bundle_that_is_replaced_is_not_believed(bundle, monkeypatch):
    made = replace_while_loading(bundle, monkeypatch, [1], EngineError("no graph"))
    load(bundle).close()
    assert len(made) == 2


@pytest.mark.parametrize("moment", [1, 2])
def test_all_engines_of_a_server_are_of_one_bundle(bundle, monkeypatch, moment):
    monkeypatch.setattr(serving, "TRIAL_SECONDS", 0.0)
    made = replace_while_loading(bundle, monkeypatch, [moment])
    with load_engines(bundle, max_batch=2, threads=1) as engines:
        assert engines.model.name == f"new-{moment}"
    assert len(made) == moment + 2


def test_a_digest_pins_the_manifest(bundle):
    digest = hashlib.sha256((bundle / MANIFEST_FILE).read_bytes()).hexdigest()
    for given in (digest, f"sha256:{digest.upper()}"):
        load(bundle, expect_digest=given).close()
    with pytest.raises(DigestError, match="not the expected bundle") as caught:
        load(bundle, expect_digest=f"sha256:{'0' * 64}")
    assert digest in caught.value.found
    with pytest.raises(DigestError):
        load_engines(bundle, max_batch=1, expect_digest="0" * 64)
    with load_engines(bundle, max_batch=1, expect_digest=digest) as engines:
        assert engines.model.name == "small"


@pytest.mark.parametrize(
    "given", [{"verify": "most"}, {"verify": None}, {"expect_digest": "sha1:1"}, {"expect_digest": 5}]
)
def test_arguments_that_say_nothing_are_refused(bundle, given):
    with pytest.raises(InputError, match=r"verify must be|is not a SHA-256"):
        load(bundle, **given)


def test_labels_that_are_no_text_are_refused(bundle):
    document = json.loads((bundle / MANIFEST_FILE).read_text())
    (bundle / "labels.txt").write_bytes(b"\xff\xfe\n" * 10)
    digest = hashlib.sha256((bundle / "labels.txt").read_bytes()).hexdigest()
    document["files"] = [each for each in document["files"] if each["path"] != "labels.txt"]
    document["files"].append({"path": "labels.txt", "bytes": 30, "sha256": digest})
    document["labels"] = "labels.txt"
    (bundle / MANIFEST_FILE).write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="is not UTF-8"):
        load(bundle)


def test_commands_pin_the_bundle_that_they_take(bundle, shared_store, tmp_path):
    (tmp_path / "image.png").touch()  # a missing one is refused before the bundle is read
    digest = hashlib.sha256((bundle / MANIFEST_FILE).read_bytes()).hexdigest()
    with command_line(tmp_path, shared_store, short_bench=True) as here:
        assert here("inspect", bundle, "--expect-digest", digest).returncode == 0
        for command in (
            ("inspect", bundle),
            ("predict", bundle, "image.png"),
            ("bench", bundle, "--duration", "0.1"),
            ("verify", bundle, "--against", bundle, "--data", "."),
            ("compile", bundle, "--target", "onnxruntime-cpu", "-o", "out"),
            ("serve", bundle, "--port", "0"),
        ):
            done = here(*command, "--expect-digest", f"sha256:{'0' * 64}")
            assert done.returncode == 3, (command, done.stderr)
            assert "VD3101" in done.stderr and digest in done.stderr
        done = here("inspect", bundle / "model.onnx", "--expect-digest", digest)
        assert done.returncode == 2 and "needs exactly one bundle" in done.stderr
        done = here("bench", bundle, bundle, "--expect-digest", digest)
        assert done.returncode == 2
        assert here("inspect", bundle, "--expect-digest", "sha1:12").returncode == 2
