"""The C++ program of a bundle: built with CMake, and its answers against the Predictor's."""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import ROOT, command_line
from tests.examples_page import block
from tests.golden_bundle import write_golden_bundle
from tests.shell import reader_environment
from vitdeploy.bundle.read import read_bundle
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.embed import cpp
from vitdeploy.errors import CapabilityError, InputError, TargetError
from vitdeploy.runtime import load

LABELS = ["zero", "one", "two", "th\u2028ree", "four", "five", "six", "seven", "eight", "ni\tne"]


@pytest.fixture(scope="module")
def bundle(small_bundle, small_export, tmp_path_factory):
    """The small model for OpenVINO, with labels and six golden inputs that its engine answers exactly."""
    home = tmp_path_factory.mktemp("engine")
    engine = compile_engine(
        small_export / "model.onnx", home, target="openvino-cpu", precision="fp32", batch=1, placed=0
    )
    out = tmp_path_factory.mktemp("bundle")
    return write_golden_bundle(small_bundle, engine, home, out, images=6, tolerance=1e-4, labels=LABELS)


@pytest.fixture(scope="module")
def program(bundle, tmp_path_factory):
    """The program as the page of the examples builds it."""
    if not all(map(shutil.which, ("cmake", "g++"))) or not Path("/usr/include/png.h").exists():
        pytest.skip("install g++ cmake libjpeg-dev libpng-dev")
    folder = tmp_path_factory.mktemp("program")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "out").mkdir()
    (folder / "out" / "digits").symlink_to(bundle)
    build, use = block("sh", "cpp/build.sh").splitlines()
    assert build.endswith(" app") and use.startswith("app/build/digits ")
    environment = reader_environment(folder / "bin")
    done = subprocess.run(["sh", "-c", build], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout + done.stderr
    assert "100% tests passed" in done.stdout
    return folder / "app" / "build" / "small_model"


def run(program, *arguments, **environment):
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of every kind that the program reads."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(1)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), np.uint8))
    colour = coarse.resize((131, 97), Image.Resampling.BICUBIC)
    grey = colour.convert("L")
    files = {
        "colour.jpg": colour,
        "grey.jpg": grey,
        "small.png": coarse.resize((20, 17)),
        "alpha.png": Image.merge("RGBA", [*colour.split(), grey]),
        "grey-alpha.png": Image.merge("LA", [grey, grey]),
        "palette.png": colour.quantize(60),
        "one-bit.png": grey.convert("1"),
        "sixteen.png": Image.fromarray(generator.integers(0, 65536, (40, 50), np.uint16)),
        "square.png": colour.resize((32, 32)),
        "tall.png": colour.resize((40, 150)),  # Pillow 13 resizes it in the other order
    }
    for name, image in files.items():
        image.save(folder / name)
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        colour.save(folder / f"turned{orientation}.jpg", exif=exif)
    colour.save(folder / "progressive.jpg", progressive=True, subsampling=2)
    return sorted(folder.iterdir())


def test_answers_are_the_predictors(program, bundle, pictures):
    done = run(program, *pictures)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split("\t") for line in done.stdout.removesuffix("\n").split("\n")]
    with load(bundle) as predictor:
        expected = {str(path): predictor.predict(path, top=cpp.TOP).top for path in pictures}
    assert len(lines) == cpp.TOP * len(pictures)
    for path, best in expected.items():
        found = [line for line in lines if line[0] == path]
        assert [int(line[1]) for line in found] == [each.index for each in best], path
        assert [line[2] for line in found] == [each.label.replace("\t", " ") for each in best]
        np.testing.assert_allclose([float(line[3]) for line in found], [e.score for e in best], atol=2e-6, err_msg=path)


def test_the_golden_answers_are_its_test(program, bundle, tmp_path):
    done = run(program, "--check")
    assert (done.returncode, "logits\tok\t" in done.stdout, "6 images" in done.stdout) == (0, True, True)
    tested = subprocess.run(["ctest", "--test-dir", program.parent], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    changed = tmp_path / "changed"
    shutil.copytree(program.parents[1], changed, ignore=shutil.ignore_patterns("build"))
    logits = np.fromfile(changed / "golden" / "logits.f32", np.float32)
    logits[7] += 1
    logits.tofile(changed / "golden" / "logits.f32")
    done = run(program, "--check", MODEL_DIR=str(changed))
    assert (done.returncode, "DIFFERS" in done.stdout) == (1, True)
    logits[:-1].tofile(changed / "golden" / "logits.f32")
    assert run(program, "--check", MODEL_DIR=str(changed)).returncode == 1


def test_a_wrong_engine_never_answers(program, pictures, tmp_path):
    """One weight of the engine is changed; the golden answers are those of the bundle."""
    changed = tmp_path / "changed"
    shutil.copytree(program.parents[1], changed, ignore=shutil.ignore_patterns("build"))
    weights = np.fromfile(changed / "model.bin", np.float32)
    weights[np.abs(weights[-400:]).argmax() - 400] += 10
    weights.tofile(changed / "model.bin")
    done = run(program, *pictures, MODEL_DIR=str(changed))
    assert (done.returncode, done.stdout, "gives wrong answers" in done.stderr) == (1, "", True)


def test_files_that_are_no_images_are_told_and_the_others_answered(program, pictures, tmp_path):
    jpeg = next(path for path in pictures if path.name == "colour.jpg").read_bytes()
    png = next(path for path in pictures if path.name == "small.png").read_bytes()
    spoilt = {
        "absent.png": (None, "cannot be opened"),
        "text.jpg": (b"no image", "not a JPEG or PNG file"),
        "empty.png": (b"", "not a JPEG or PNG file"),
        "short.jpg": (jpeg[: len(jpeg) // 2], "corrupt or truncated"),
        "header.jpg": (jpeg[:20], ""),
        "short.png": (png[:-30], "corrupt or truncated"),
        "flipped.png": (png[:60] + bytes([png[60] ^ 255]) + png[61:], "corrupt or truncated"),
    }
    for name, (data, _) in spoilt.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    Image.new("CMYK", (8, 8)).save(tmp_path / "cmyk.jpg")
    done = run(program, *(tmp_path / name for name in (*spoilt, "cmyk.jpg")), pictures[0])
    assert done.returncode == 2
    told = dict(line.split(": ", 1) for line in done.stderr.splitlines())
    assert set(told) == {str(tmp_path / name) for name in (*spoilt, "cmyk.jpg")}
    for name, (_, says) in spoilt.items():
        assert says in told[str(tmp_path / name)]
    assert "unsupported JPEG colour space" in told[str(tmp_path / "cmyk.jpg")]
    assert done.stdout.count(str(pictures[0])) == cpp.TOP


def test_a_program_without_images_or_a_model_says_so(program, tmp_path):
    assert (run(program).returncode, "usage:" in run(program).stderr) == (2, True)
    done = run(program, "x.png", MODEL_DIR=str(tmp_path))
    assert done.returncode == 1 and done.stderr


def test_the_command_writes_all_of_it(bundle, small_bundle, tmp_path, shared_store):
    with command_line(tmp_path, shared_store) as here:
        done = here("embed", bundle, "--as", "cpp", "-o", "app")
        assert done.returncode == 0 and "next: cd app && cmake -B build" in done.stdout
        names = {path.relative_to(tmp_path / "app").as_posix() for path in (tmp_path / "app").rglob("*")}
        assert {"main.cpp", "CMakeLists.txt", "README.md", "model.xml", "model.bin", "golden/inputs.u8"} <= names
        assert not re.search(r"{[{] |{%", (tmp_path / "app" / "main.cpp").read_text())  # of the template
        assert here("embed", bundle, "--as", "cpp", "-o", "app").returncode == 2
        assert "expected cpp" in here("embed", bundle, "--as", "cobol", "-o", "other").stderr
        refused = here("embed", small_bundle, "--as", "cpp", "-o", "other")
        assert refused.returncode == 2 and not (tmp_path / "other").exists()


def test_what_it_cannot_be_written_for_is_refused(bundle, small_bundle, tmp_path, monkeypatch):
    with pytest.raises(TargetError, match="no engine that the C\\+\\+ program can run"):
        cpp.write(small_bundle, tmp_path)
    from vitdeploy.embed import source

    manifest = read_bundle(bundle)
    for changes, error in (({"golden": None}, InputError), ({"task": "panoptic"}, CapabilityError)):
        changed = dataclasses.replace(manifest, **changes)
        monkeypatch.setattr(source, "read_bundle", lambda folder, changed=changed: changed)
        with pytest.raises(error):
            cpp.write(bundle, tmp_path)


def test_a_half_precision_is_asked_for_again_by_the_program(bundle, tmp_path, monkeypatch):
    """OpenVINO takes bf16 for fp16 where a CPU lacks that. Of float32 there is nothing to ask."""
    from vitdeploy.embed import source

    manifest = read_bundle(bundle)
    for hint, asked in (("f16", True), ("f32", False)):
        [engine] = manifest.engines
        engine = dataclasses.replace(engine, options={**engine.options, "INFERENCE_PRECISION_HINT": hint})
        changed = dataclasses.replace(manifest, engines=(engine,))
        monkeypatch.setattr(source, "read_bundle", lambda folder, changed=changed: changed)
        (tmp_path / hint).mkdir()
        cpp.write(bundle, tmp_path / hint)
        assert ("made for a CPU that computes in f16" in (tmp_path / hint / "main.cpp").read_text()) is asked
