"""A folder answered into one file: each image once, in order, broken ones told, all or nothing."""

import json
import shutil
import signal
import sys

import pytest

from vitdeploy.runtime import load

SCRIPT = (sys.executable, "examples/batch_folder.py", "out/digits")


@pytest.fixture
def photos(clone, tmp_path):
    """Ten images in folders, and five files that are none or cannot be read."""
    images = sorted((clone.folder / "calibration").rglob("*.png"))[:10]
    for number, image in enumerate(images):
        place = tmp_path / "photos" / f"{number % 3}" / f"{number}.PNG"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, place)
    whole = images[0].read_bytes()
    for name, data in {"empty.png": b"", "1/cut.png": whole[:-40], "2/text.jpg": b"no image"}.items():
        (tmp_path / "photos" / name).write_bytes(data)
    (tmp_path / "photos" / "notes.txt").write_text("not an image, and not taken for one", encoding="utf-8")
    (tmp_path / "photos" / "a folder.png").mkdir()
    return tmp_path / "photos"


def test_the_page_runs_word_for_word(clone):
    told, first = clone.shell("examples/batch_folder.py")
    images = sorted((clone.folder / "calibration").rglob("*.png"))
    assert f"answers.jsonl: {len(images)} answers, 0 files" in told
    lines = (clone.folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert first == lines[0][:110]
    with load(clone.folder / "out" / "digits") as predictor:
        for line, image in zip(lines, images, strict=True):
            name = image.relative_to(clone.folder / "calibration" / "digits" / "evaluation").as_posix()
            assert json.loads(line) == {"path": name, **predictor.predict(image).to_dict()}


def test_files_that_cannot_be_used_are_told_and_left_out(clone, photos):
    done = clone.run(*SCRIPT, str(photos), "-o", "some.jsonl", "--batch", "4")
    assert (done.returncode, "10 answers, 3 files that cannot be used" in done.stdout) == (1, True), done.stderr
    told = [line.split(" cannot be read as an image: ")[0] for line in done.stderr.splitlines()]
    assert told == [str(photos / name) for name in ("1/cut.png", "2/text.jpg", "empty.png")]
    lines = (clone.folder / "some.jsonl").read_text(encoding="utf-8").splitlines()
    names = [f"{number % 3}/{number}.PNG" for number in range(10)]
    assert [json.loads(line)["path"] for line in lines] == sorted(names)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("absent", "-o", "x.jsonl"), "no images below absent"),
        (("calibration", "-o", "absent/x.jsonl"), "absent"),
        (("calibration", "-o", "x.jsonl", "--batch", "0"), "--batch"),
        (("calibration",), "-o/--output"),
    ],
)
def test_wrong_arguments_are_told(clone, arguments, says):
    done = clone.run(*SCRIPT, *arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_bundle_is_told(clone):
    done = clone.run(*SCRIPT[:2], "calibration", "calibration", "-o", "x.jsonl")
    assert (done.returncode, "VD2002" in done.stderr) == (2, True)


def test_an_interrupted_run_leaves_what_was_there(clone, digits):
    output = clone.folder / "kept.jsonl"
    output.write_text("before\n", encoding="utf-8")
    process = clone.start(*SCRIPT, str(digits), "-o", output.name)
    while not list(clone.folder.glob(".kept.jsonl.*")) and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert output.read_text(encoding="utf-8") == "before\n"
    assert not list(clone.folder.glob(".kept.jsonl.*"))
