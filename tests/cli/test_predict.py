"""`vitdeploy predict`: what its inputs may be, and that one that cannot be read does not take the others' answers."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.command_line import command_line


@pytest.fixture
def run(shared_store, tmp_path):
    with command_line(tmp_path, shared_store) as run:
        yield run


@pytest.fixture
def shots(tmp_path, digits):
    """One digit in every format that is read, in folders, beside files that are no images and one that is broken."""
    image = Image.open(next(digits.glob("evaluation/3/*.png")))
    folder = tmp_path / "my shots"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.png", "b.bmp", "c.tiff", "d.gif", "deep/e.webp"):
        image.save(folder / name, **({"lossless": True} if name.endswith("webp") else {}))
    (folder / "notes.txt").write_text("none", encoding="utf-8")
    return folder


def test_a_folder_is_answered_image_by_image_and_its_other_files_are_named(run, small_bundle, shots):
    done = run("predict", small_bundle, "my shots", "--json")
    names = [each["image"] for each in done.document["predictions"]]
    assert names == [f"my shots/{name}" for name in ("a.png", "b.bmp", "c.tiff", "d.gif", "deep/e.webp")]
    assert len({each["label"] for each in done.document["predictions"]}) == 1  # whatever the format
    assert "my shots: skipped 1 .txt" in done.stderr
    assert done.document["errors"] == []


def test_patterns_name_files_and_folders_below(run, small_bundle, shots):
    done = run("predict", small_bundle, "my shots/**/*.[pw]*", "--json")
    assert [each["image"] for each in done.document["predictions"]] == ["my shots/a.png", "my shots/deep/e.webp"]
    done = run("predict", small_bundle, "my sho*", "--json")  # of folders alone: as a shell would give them
    assert len(done.document["predictions"]) > 2
    done = run("predict", small_bundle, "*.jpg")
    assert (done.returncode, "no image at *.jpg" in done.stderr) == (2, True)
    done = run("predict", small_bundle, "absent.png", "*.jpg")  # all of them are named
    assert [each for each in ("absent.png", "*.jpg", "0 of 2 inputs answered") if each not in done.stdout] == []


def test_boxes_are_four_numbers_and_for_models_of_one_object(run, small_bundle, shots):
    done = run("predict", small_bundle, "my shots/a.png", "--box", "1,2,3")
    assert (done.returncode, "'1,2,3' is not left,top,right,bottom in pixels" in done.stderr) == (2, True)
    done = run("predict", small_bundle, "my shots/a.png", "--box", "0,0,9,9")
    assert (done.returncode, "this model takes whole images" in done.stderr) == (2, True)


def test_an_image_of_standard_input(run, small_bundle, shots, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO((shots / "a.png").read_bytes()))
    monkeypatch.setattr("sys.stdin", stream)
    document = run("predict", small_bundle, "-", shots / "b.bmp", "--json").document
    given, same = document["predictions"]
    assert given.pop("image") == "-"
    same.pop("image")
    assert given == same
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert "predict BUNDLE - < IMAGE" in run("predict", small_bundle, "-").stderr


def test_it_goes_on_past_files_that_cannot_be_read_and_names_them(run, small_bundle, shots):
    (shots / "aa.png").write_bytes((shots / "a.png").read_bytes()[:60])
    (shots / "b.jpg").write_bytes(b"\0\0\0\x20ftypheic\0\0")
    done = run("predict", small_bundle, "my shots", "absent.png", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, len(document["predictions"])) == (2, 5)
    wrong = {each["input"]: each["code"] for each in document["errors"]}
    assert wrong == {"my shots/aa.png": "VD2302", "my shots/b.jpg": "VD2302", "absent.png": "VD2002"}
    assert "VD2302  my shots/b.jpg cannot be read as an image (a HEIC image)" in done.stderr
    assert "5 of 8 inputs answered" in done.stderr


def test_one_input_alone_that_cannot_be_read_is_the_error_itself(run, small_bundle, tmp_path):
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    done = run("predict", small_bundle, "text.png", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["exit_code"]) == (2, "VD2302", 2)
    assert error["fix"] == "convert it to one of these formats, or remove it"  # predict has no --skip-bad


def test_a_folder_without_images_says_what_it_holds(run, small_bundle, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.heic").touch()
    done = run("predict", small_bundle, "docs")
    assert done.returncode == 2
    assert "found:    1 .heic" in done.stderr


def test_token_files_are_taken_by_folder_and_pattern_too(run, sequence_export, tmp_path):
    assert run("compile", sequence_export, "--target", "onnxruntime-cpu", "-o", "translator").returncode == 0
    (tmp_path / "tokens").mkdir()
    np.savez(tmp_path / "tokens" / "a.npz", source=np.ones((2, 3), np.int64))
    (tmp_path / "tokens" / "broken.npz").write_bytes(b"no archive")
    done = run("predict", "translator", "tokens", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2
    rows = [(each["file"], each["row"]) for each in document["predictions"]]
    assert rows == [("tokens/a.npz", 0), ("tokens/a.npz", 1)]
    assert [each["input"] for each in document["errors"]] == ["tokens/broken.npz"]
