"""Image folders: order, classes, splits, digests."""

import contextlib
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitdeploy.data.folder import Sample, Samples, digest, list_split, scan, split
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.runtime.preprocess import SUFFIXES


def make(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(name))
    return folder


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """a/00.png ... a/09.png, b/00.png ... b/09.png."""
    return make(tmp_path_factory.mktemp("twenty"), *(f"{c}/{i:02}.png" for c in "ab" for i in range(10)))


@pytest.fixture(scope="module")
def presplit(tmp_path_factory):
    """A folder that brings its own split: 6 images to calibrate, 8 to evaluate."""
    names = [f"calibration/{c}/{i}.png" for c in "ab" for i in range(3)]
    names += [f"evaluation/{c}/{i}.png" for c in "ab" for i in range(4)]
    return make(tmp_path_factory.mktemp("presplit"), *names)


def relative(samples, folder):
    return [sample.path.relative_to(folder).as_posix() for sample in samples]


# --- scanning ---------------------------------------------------------------------------------------------------------


def test_samples_are_sorted_by_class_and_file_name(tmp_path):
    make(tmp_path, "b/2.png", "a/10.png", "b/1.jpg", "a/9.png", "c/deep/x.webp")
    samples, classes = scan(tmp_path, "folders")
    assert classes == ("a", "b", "c")
    assert relative(samples, tmp_path) == ["a/10.png", "a/9.png", "b/1.jpg", "b/2.png", "c/deep/x.webp"]
    assert [sample.label for sample in samples] == [0, 0, 1, 1, 2]


def test_only_image_files_are_samples(tmp_path):
    make(tmp_path, "a/x.PNG", "a/y.JpEg", "a/notes.txt", "a/z.gif", "a/q.heic", "a/noending")
    samples, _ = scan(tmp_path, "folders")
    assert relative(samples, tmp_path) == ["a/x.PNG", "a/y.JpEg", "a/z.gif"]


def test_a_class_folder_without_images_keeps_its_index(tmp_path):
    make(tmp_path, "a/x.png", "c/x.png")
    (tmp_path / "b").mkdir()
    samples, classes = scan(tmp_path, "folders")
    assert (classes, [sample.label for sample in samples]) == (("a", "b", "c"), [0, 2])


def test_without_labels_every_image_below_the_folder_counts(tmp_path):
    make(tmp_path, "x.png", "sub/y.png")
    samples, classes = scan(tmp_path, "none")
    assert (relative(samples, tmp_path), classes) == (["sub/y.png", "x.png"], ())
    assert {sample.label for sample in samples} == {None}


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(MissingFileError) as caught:
        scan(tmp_path / "absent", "folders")
    assert str(tmp_path / "absent") in caught.value.message


def test_a_file_is_not_a_folder(tmp_path):
    make(tmp_path, "x.png")
    with pytest.raises(MissingFileError):
        scan(tmp_path / "x.png", "none")


def test_labels_from_folders_need_class_folders(tmp_path):
    make(tmp_path, "x.png", "y.png")
    with pytest.raises(DataError, match="no class folders") as caught:
        scan(tmp_path, "folders")
    assert caught.value.found == "2 images directly in it"


@pytest.mark.parametrize("labels", ["folders", "none"])
def test_a_folder_without_images_is_refused(tmp_path, labels):
    make(tmp_path, "a/readme.txt")
    with pytest.raises(DataError, match="contains no images"):
        scan(tmp_path, labels)


# --- splitting --------------------------------------------------------------------------------------------------------


def test_the_split_is_the_frozen_permutation_of_randomstate(twenty):
    assert np.random.RandomState(0).permutation(20)[:5].tolist() == [18, 1, 19, 8, 10]
    parts = split(twenty, "folders", calibration=3, evaluation=2, seed=0)
    assert relative(parts.calibration, twenty) == ["b/08.png", "a/01.png", "b/09.png"]
    assert relative(parts.evaluation, twenty) == ["a/08.png", "b/00.png"]
    assert [sample.label for sample in parts.calibration] == [1, 0, 1]
    assert parts.classes == ("a", "b")


@given(calibration=st.integers(1, 19), rest=st.integers(0, 18), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_are_disjoint_and_reproducible(twenty, calibration, rest, seed):
    evaluation = max(1, min(rest, 20 - calibration))
    parts = split(twenty, "folders", calibration=calibration, evaluation=evaluation, seed=seed)
    assert parts == split(twenty, "folders", calibration=calibration, evaluation=evaluation, seed=seed)
    assert (len(parts.calibration), len(parts.evaluation)) == (calibration, evaluation)
    both = {sample.path for sample in (*parts.calibration, *parts.evaluation)}
    assert len(both) == calibration + evaluation


@given(seed=st.integers(0, 2**32 - 1), calibration=st.integers(1, 19))
@settings(max_examples=30, deadline=None)
def test_all_evaluates_every_image_that_does_not_calibrate(twenty, seed, calibration):
    parts = split(twenty, "folders", calibration=calibration, evaluation="all", seed=seed)
    samples, _ = scan(twenty, "folders")
    assert {*parts.calibration, *parts.evaluation} == set(samples)
    assert len(parts.evaluation) == 20 - calibration


def test_another_seed_chooses_other_images(twenty):
    chosen = {split(twenty, "none", calibration=5, evaluation=5, seed=seed).calibration for seed in range(10)}
    assert len(chosen) == 10


def test_asking_for_more_evaluation_images_keeps_the_calibration_images(twenty):
    few, many = (split(twenty, "none", calibration=5, evaluation=n, seed=1) for n in (3, 12))
    assert few.calibration == many.calibration
    assert few.evaluation == many.evaluation[:3]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_a_folder_with_its_own_split_is_sampled_within_each_part(presplit, seed):
    parts = split(presplit, "folders", calibration=4, evaluation=5, seed=seed)
    assert all(name.startswith("calibration/") for name in relative(parts.calibration, presplit))
    assert all(name.startswith("evaluation/") for name in relative(parts.evaluation, presplit))
    assert (len(set(parts.calibration)), len(set(parts.evaluation))) == (4, 5)
    assert parts.classes == ("a", "b")


def test_a_folder_with_its_own_split_may_calibrate_with_all_of_its_part(presplit):
    parts = split(presplit, "none", calibration=6, evaluation="all", seed=0)
    assert (len(parts.calibration), len(parts.evaluation), parts.classes) == (6, 8, ())


def test_the_classes_of_a_split_folder_are_those_of_both_parts(tmp_path):
    make(tmp_path, "calibration/a/x.png", "calibration/b/x.png", "evaluation/a/x.png", "evaluation/c/x.png")
    (tmp_path / "evaluation" / "b").mkdir()
    (tmp_path / "evaluation" / "d").mkdir()
    parts = split(tmp_path, "folders", calibration=2, evaluation="all", seed=0)
    named = {(s.path.parent.name, parts.classes[s.label]) for s in (*parts.calibration, *parts.evaluation)}
    assert named == {("a", "a"), ("b", "b"), ("c", "c")}
    assert (parts.classes, parts.empty) == (("a", "b", "c", "d"), {"d"})


@pytest.mark.parametrize(
    ("names", "proposed"), [(("train", "val"), "val"), (("training", "test"), "test"), (("evaluation",), "evaluation")]
)
def test_the_parts_of_a_data_set_are_not_taken_for_classes(tmp_path, names, proposed):
    make(tmp_path, *(f"{part}/{name}/x.png" for part in names for name in "ab"))
    with pytest.raises(DataError, match="parts of a data set, not classes") as caught:
        scan(tmp_path, "folders")
    assert caught.value.fix == f"pass one of them: {tmp_path / proposed}"
    assert len(scan(tmp_path / proposed, "folders")[0]) == 2


def test_a_class_may_be_called_train(tmp_path):
    make(tmp_path, "train/x.png", "bus/x.png")
    assert scan(tmp_path, "folders")[1] == ("bus", "train")
    make(tmp_path, "train/express/y.png")
    assert scan(tmp_path, "folders")[1] == ("bus", "train")


def test_what_is_hidden_is_no_data(tmp_path):
    make(tmp_path, "a/x.png", "b/x.png", ".git/x.png", "a/.ipynb_checkpoints/x-checkpoint.png", "b/._x.png")
    for labels in ("folders", "none"):
        assert relative(scan(tmp_path, labels)[0], tmp_path) == ["a/x.png", "b/x.png"]


@pytest.mark.parametrize(
    ("calibration", "evaluation", "what", "found"),
    [
        (20, "all", "calibration", "19 images"),
        (18, 3, "evaluation", "2 images"),
    ],
)
def test_too_few_images_are_refused(twenty, calibration, evaluation, what, found):
    with pytest.raises(DataError, match=f"too few images for {what}") as caught:
        split(twenty, "folders", calibration=calibration, evaluation=evaluation, seed=0)
    assert caught.value.found == found


@pytest.mark.parametrize(("calibration", "evaluation"), [(7, 1), (6, 9)])
def test_too_few_images_in_a_part_are_refused(presplit, calibration, evaluation):
    with pytest.raises(DataError, match="too few images"):
        split(presplit, "folders", calibration=calibration, evaluation=evaluation, seed=0)


# --- in little memory -------------------------------------------------------------------------------------------------


def listed_as_paths(folder, labels):
    """The samples of a folder as `pathlib` finds and sorts them, one Sample each."""

    def images(below):
        return sorted(
            path
            for path in below.rglob("*")
            if path.suffix.lower() in SUFFIXES
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(below).parts)
        )

    if labels == "none":
        return [Sample(path, None) for path in images(folder)]
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    return [Sample(path, i) for i, name in enumerate(classes) for path in images(folder / name)]


@pytest.fixture(scope="module")
def odd_names(tmp_path_factory):
    """Names whose order as whole paths is not that of their parts, and what is no image."""
    folder = tmp_path_factory.mktemp("odd")
    names = ["a/b/1.png", "a/b.png", "a/b-/1.png", "a/b0/1.JPG", "a/B.png", "a/é.png", "a/e\u0301.png", "a/x.y.png"]
    make(folder, *names, "b/1.png", "b c/1.png", "b/2.txt", "b/.h/1.png", "b/.1.png", "b/png", "b/.png", "b/1.png.")
    (folder / "b" / "folder.png").mkdir()
    (folder / "b" / "gone.png").symlink_to("nowhere.png")
    (folder / "b" / "link.png").symlink_to("1.png")
    (folder / "b" / "followed").symlink_to(folder / "a", target_is_directory=True)
    with contextlib.suppress(OSError):  # not every file system takes it
        make(folder, "a/caf\udce9.png")
    return folder


@pytest.mark.parametrize("labels", ["folders", "none"])
def test_samples_are_those_that_pathlib_finds_and_in_its_order(odd_names, twenty, labels):
    for folder in (odd_names, twenty):
        samples, _ = scan(folder, labels)
        assert list(samples) == listed_as_paths(folder, labels)
        assert [folder / name for name in samples.names] == [sample.path for sample in samples]


@given(seed=st.integers(0, 2**32 - 1), calibration=st.integers(0, 10), labels=st.sampled_from(["folders", "none"]))
@settings(max_examples=30, deadline=None)
def test_a_listed_split_is_a_permutation_of_the_list_of_samples(twenty, seed, calibration, labels):
    samples = listed_as_paths(twenty, labels)
    expected = [samples[i] for i in np.random.RandomState(seed).permutation(20)]
    found = list_split(twenty, labels, calibration=calibration, evaluation=8, seed=seed)
    assert list(found.calibration) == expected[:calibration]
    assert list(found.evaluation) == expected[calibration : calibration + 8]
    assert [samples[place] for place in found.evaluation.places] == list(found.evaluation)


@given(picked=st.lists(st.integers(0, 19), max_size=30), start=st.integers(-25, 25), step=st.sampled_from([1, 2, -1]))
def test_parts_of_samples_are_those_of_a_list(twenty, picked, start, step):
    samples, _ = scan(twenty, "folders")
    assert list(samples.pick(np.array(picked, np.int64))) == [samples[i] for i in picked]
    assert list(samples[start::step]) == list(samples)[start::step]
    assert samples[-1] == list(samples)[-1]
    with pytest.raises(IndexError):
        samples[20]


def test_samples_with_other_numbers_have_the_same_images(twenty):
    samples, _ = scan(twenty, "folders")
    other = samples[5:15].renumbered([7, 3])
    assert [sample.label for sample in other] == other.labels.tolist() == [7] * 5 + [3] * 5
    assert list(other.names) == list(samples[5:15].names)
    assert samples.labels.tolist() == [0] * 10 + [1] * 10
    unlabelled, _ = scan(twenty, "none")
    assert list(unlabelled.renumbered([7, 3])) == list(unlabelled) and unlabelled.labels is None


def test_an_image_takes_twenty_bytes_beside_its_name():
    names = [f"n01440764_{n:08}.JPEG" for n in range(10_000)]
    tracemalloc.start()
    samples = Samples(Path("images"), [(3, names)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(samples) < 1.15 * len(names[0]) + 20 + 1


# --- digest -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    make(tmp_path, "a/x.png", "a/y.png", "b/z.png")
    return tmp_path, scan(tmp_path, "folders")[0]


def test_the_digest_does_not_depend_on_where_the_folder_lies(three, tmp_path_factory):
    folder, samples = three
    other = make(tmp_path_factory.mktemp("other"), "a/x.png", "a/y.png", "b/z.png")
    assert digest(samples, folder) == digest(scan(other, "folders")[0], other)
    assert len(digest(samples, folder)) == 64


def test_the_digest_changes_with_the_bytes(three):
    folder, samples = three
    before = digest(samples, folder)
    samples[1].path.write_bytes(b"other")
    assert digest(samples, folder) != before


def test_the_digest_changes_with_label_order_name_and_number(three):
    folder, samples = three
    relabelled = [Sample(samples[0].path, 1), *samples[1:]]
    renamed = make(folder, "a/w.png")
    (renamed / "a/w.png").write_bytes((folder / "a/x.png").read_bytes())
    variants = [
        samples,
        relabelled,
        samples[::-1],
        samples[:2],
        [Sample(renamed / "a/w.png", 0), *samples[1:]],
        [Sample(sample.path, None) for sample in samples],
    ]
    assert len({digest(variant, folder) for variant in variants}) == len(variants)
