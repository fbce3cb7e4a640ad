"""Images decoded once: the same pixels here and in processes of their own, whatever a file does to its decoder."""

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data import decoding
from vitdeploy.data import decoding as decoded
from vitdeploy.data.containers.uris import load_held
from vitdeploy.data.decoding import DecodedImages, DecodedSet, Skipped, decode_images
from vitdeploy.data.folder import Sample
from vitdeploy.errors import DataError, ImageError, StorageError
from vitdeploy.runtime.preprocess import load_image
from vitdeploy.spec import PreprocessSpec

SPEC = PreprocessSpec(24, (16, 20), "bilinear", (0.5,) * 3, (0.5,) * 3)
# Of the worker: a file of this name ends it, as a bug in a decoder's own code does.
FATAL = "fatal.png"
DIES = """
import os, sys
from vitdeploy.data import decode_worker
load = decode_worker.load_held
decode_worker.load_held = lambda path, *more: os.abort() if path.name == "fatal.png" else load(path, *more)
sys.exit(decode_worker.main())
"""


@pytest.fixture
def samples(tmp_path):
    """Twelve noisy images of different sizes; the sixth is no image."""
    generator = np.random.default_rng(0)
    paths = [tmp_path / f"{i:02}.png" for i in range(12)]
    for i, path in enumerate(paths):
        Image.fromarray(generator.integers(0, 256, (30 + i, 40, 3), np.uint8)).save(path)
    paths[5].write_bytes(b"not an image")
    return [Sample(path, 0) for path in paths]


@pytest.fixture
def processes(monkeypatch):
    """Two processes from the third image on. The list of those that were started."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(decoding, "FIRST_IMAGES", 2)
    monkeypatch.setattr(decoding, "WORTH_SECONDS", -1.0)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 2)

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(decoding.subprocess, "Popen", start)
    return started


def as_loaded(found):
    return [(sample.path.name, pixels.tobytes(), size) for sample, pixels, size in found]


def expected(samples):
    return [(s.path.name, *(load_image(s.path, SPEC)[i] for i in (0, 1))) for s in samples]


def test_processes_give_the_same_pixels_in_the_same_order_and_end(samples, processes):
    skipped = Skipped([])
    found = as_loaded(decode_images(samples, SPEC, skipped))
    good = [sample for sample in samples if sample.path.name != "05.png"]
    assert found == [(name, pixels.tobytes(), size) for name, pixels, size in expected(good)]
    assert skipped.paths == [str(samples[5].path)]
    assert [process.poll() is None for process in processes] == [False, False]


def test_a_broken_file_is_named_by_its_process(samples, processes):
    with pytest.raises(ImageError, match=r"05\.png cannot be read as an image") as caught:
        list(decode_images(samples, SPEC))
    assert caught.value.fix.endswith("; --skip-bad skips and counts such files")
    assert all(process.poll() is not None for process in processes)


def test_a_file_that_ends_its_process_is_named_and_no_other_is_lost(samples, processes, monkeypatch):
    monkeypatch.setattr(decoding, "module_argv", lambda module: (sys.executable, "-c", DIES))
    samples[5].path.unlink()
    fatal = samples[5].path.with_name(FATAL)
    fatal.write_bytes(samples[4].path.read_bytes())
    samples[5] = Sample(fatal, 0)
    skipped = Skipped([])
    names = [name for name, _, _ in as_loaded(decode_images(samples, SPEC, skipped))]
    assert names == [sample.path.name for sample in samples if sample.path.name != FATAL]
    assert skipped.paths == [str(fatal)]
    with pytest.raises(ImageError, match=r"fatal\.png crashed the image decoder") as caught:
        list(decode_images(samples, SPEC))
    assert caught.value.found == f"exit status {-signal.SIGABRT if os.name == 'posix' else 3}"
    assert caught.value.fix.count("--skip-bad") == 1
    assert all(process.poll() is not None for process in processes)


def test_an_interrupt_ends_the_processes(samples, processes):
    samples.pop(5)
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(decode_images(samples, SPEC)):
            if number == 4:
                raise KeyboardInterrupt
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)


@pytest.mark.skipif(os.name != "posix", reason="process groups of POSIX")
def test_ctrl_c_is_for_the_parent_alone(samples, processes):
    samples.pop(5)
    found = decode_images(samples, SPEC)
    for _ in range(4):
        next(found)
    assert [os.getpgid(process.pid) == process.pid for process in processes] == [True, True]
    found.close()


def test_a_broken_file_in_this_process_is_told_with_the_way_on(samples):
    with pytest.raises(ImageError) as caught:
        list(decode_images(samples, SPEC))
    assert caught.value.fix.endswith("; --skip-bad skips and counts such files")


def test_few_images_start_no_process(samples, monkeypatch):
    samples.pop(5)
    monkeypatch.setattr(decoding.subprocess, "Popen", None)
    assert len(as_loaded(decode_images(samples, SPEC))) == 11


def test_not_one_readable_image_is_an_error(samples):
    with pytest.raises(DataError, match="no image"):
        list(decode_images(samples[5:6], SPEC, Skipped([])))


# --- kept -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch):
    """How often each file was decoded."""
    counts = Counter()

    def load(path, *more):
        counts[path.name] += 1
        return load_held(path, *more)

    monkeypatch.setattr(decoding, "load_held", load)
    return counts


def test_an_image_is_decoded_once_for_each_geometry_whoever_reads_it(samples, loads, tmp_path):
    skipped, seen = Skipped([]), []
    images = DecodedSet(samples, tmp_path)
    good = images.check(SPEC, skipped, seen.append)
    assert (len(good), len(seen), skipped.paths) == (11, 11, [str(samples[5].path)])
    normalised = replace(SPEC, mean=(0.0,) * 3, std=(1.0,) * 3)
    for spec in (SPEC, normalised, SPEC):
        for (name, pixels, size), (ours, shown) in zip(expected(good), images.of(spec), strict=True):
            np.testing.assert_array_equal(ours, pixels, err_msg=name)
            assert shown == size
    assert images.of(SPEC)[10][0].tobytes() == load_image(samples[11].path, SPEC)[0].tobytes()
    assert set(loads.values()) == {1}
    larger = replace(SPEC, resize=30)
    assert [images.of(larger)[0][0].shape for _ in range(3)] == [(16, 20, 3)] * 3
    assert {loads[sample.path.name] for sample in good} == {2}


def test_the_file_has_no_name(samples, tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    images = DecodedImages(samples[:5], SPEC, folder)
    images.fill(None, lambda count: None)
    assert (images.kept, len(images)) == (True, 5)
    if os.name == "posix":
        assert list(folder.iterdir()) == []


def test_where_there_is_no_room_every_reader_decodes(samples, loads, tmp_path, monkeypatch):
    monkeypatch.setattr(decoded, "DISK_SHARE", 0.0)
    images = DecodedImages(samples[:5], SPEC, tmp_path)
    images.fill(None, lambda count: None)
    pixels_of_each = [pixels.tobytes() for _, pixels, _ in expected(samples[:5])]
    assert [[pixels.tobytes() for pixels, _ in images] for _ in range(2)] == [pixels_of_each, pixels_of_each]
    assert images[3][0].tobytes() == pixels_of_each[3]
    assert (images.kept, loads["03.png"], loads["04.png"]) == (False, 4, 3)
    with pytest.raises(IndexError):
        images[5]


def test_a_full_disk_is_a_storage_error(samples, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    images = DecodedImages(samples[:5], SPEC, tmp_path)
    images._file = full.open("wb", buffering=0)
    with pytest.raises(StorageError, match="no space left"):
        images.fill(None, lambda count: None)
    images._file.close()


def test_images_that_were_not_all_kept_are_not_given(samples, tmp_path, monkeypatch):
    images = DecodedSet(samples[:5], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "decode_images", lambda *_: (_ for _ in ()).throw(StorageError("no space left")))
        with pytest.raises(StorageError):
            images.of(SPEC)
    kept = images.of(SPEC)
    assert len(list(kept)) == 5
    kept._file.truncate(4 * kept._bytes)
    with pytest.raises(StorageError, match="are incomplete") as caught:
        kept[4]
    assert caught.value.found == "0 bytes of image 4"
