"""MVTec AD's folders: what is found, and what is refused before anything is measured."""

import re

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.decoding import Skipped
from vitdeploy.data.folder import digest
from vitdeploy.data.masks import normal_folder, read_mvtec, split_mvtec
from vitdeploy.errors import DataError, ImageError, MissingFileError


def picture(path, seed, mode="RGB", size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else size[::-1]
    pixels = np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def root(tmp_path):
    for i in range(6):
        picture(tmp_path / f"train/good/{i:03d}.png", i)
    for i in range(3):
        picture(tmp_path / f"test/good/{i:03d}.png", 10 + i)
        picture(tmp_path / f"test/crack/{i:03d}.png", 20 + i)
        picture(tmp_path / f"ground_truth/crack/{i:03d}_mask.png", 30 + i, "L")
    return tmp_path


def split(root, evaluation="all", seed=0):
    normal, test = read_mvtec(root)
    return split_mvtec(root, normal, test, calibration=4, evaluation=evaluation, seed=seed), test


def test_normal_images_calibrate_and_test_images_judge(root):
    parts, test = split(root)
    assert len(parts.calibration) == 4 and len(parts.evaluation) == 6
    assert {sample.path.parent for sample in parts.calibration} == {root / "train" / "good"}
    kinds = [test.annotations[sample.path].defect for sample in parts.evaluation]
    assert sorted(map(str, kinds)) == ["None"] * 3 + ["crack"] * 3
    crack, good = (test.annotations[root / "test" / kind / "000.png"] for kind in ("crack", "good"))
    expected = np.asarray(Image.open(root / "ground_truth/crack/000_mask.png")) != 0
    np.testing.assert_array_equal(crack.load(), expected)
    assert good.load().shape == (6, 8) and not good.load().any()
    assert split(root, seed=0)[0] == split(root, seed=0)[0] != split(root, seed=1)[0]
    assert digest(parts.evaluation, root)  # paths are below the root


def test_the_normal_images_of_a_root_or_a_plain_folder(root):
    assert normal_folder(root) == root / "train" / "good"
    assert normal_folder(root / "test" / "good") == root / "test" / "good"


def test_masks_may_have_the_name_of_the_image_or_be_unknown(root):
    for path in (root / "ground_truth/crack").iterdir():
        path.rename(path.with_name(path.name.replace("_mask", "")))
    assert split(root)[1].annotations[root / "test/crack/001.png"].load().any()
    for path in (root / "ground_truth/crack").iterdir():
        path.unlink()
    (root / "ground_truth/crack").rmdir()
    (root / "ground_truth").rmdir()
    assert split(root)[1].annotations[root / "test/crack/001.png"].load() is None


def test_a_missing_mask_is_an_error(root):
    (root / "ground_truth/crack/001_mask.png").unlink()
    with pytest.raises(DataError, match=r"1 of 6 images below .*test have no mask") as error:
        read_mvtec(root)
    assert "001_mask.png" in error.value.found and "no folder ground_truth" in error.value.expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: picture(path, 1, "L", (4, 4)), "does not have the size of its image"),
        (lambda path: picture(path, 1, "RGB"), "is not a map of numbers"),
        (lambda path: Image.new("L", (8, 6)).save(path), "marks no defect"),
    ],
)
def test_a_mask_that_is_none_is_an_error(root, change, message):
    change(root / "ground_truth/crack/001_mask.png")
    with pytest.raises(DataError, match=message):
        split(root)[1].annotations[root / "test/crack/001.png"].load()


def test_other_layouts_are_refused(root, tmp_path):
    with pytest.raises(MissingFileError):
        read_mvtec(tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not have the layout of MVTec AD") as error:
        read_mvtec(root / "test")
    assert error.value.found == "no train/good and no test/good" and "MVTec AD" in error.value.expected


def test_an_image_that_is_known_before_is_refused(root):
    (root / "test/good/000.png").write_bytes((root / "train/good/003.png").read_bytes())
    with pytest.raises(DataError, match=re.escape(f"{root / 'test'} contains images that are also in ")) as error:
        read_mvtec(root)
    assert error.value.found.endswith("000.png")


def test_images_of_one_kind_have_no_auroc(root):
    for path in (root / "test/crack").iterdir():
        path.unlink()
    (root / "test/crack").rmdir()
    with pytest.raises(DataError, match="AUROC needs both good and defective evaluation images") as error:
        split(root)
    assert error.value.found == "3 good and 0 defective images"


def test_a_broken_image_is_an_error_or_left_out(root):
    (root / "test/crack/000.png").write_bytes(b"no picture")
    with pytest.raises(ImageError):
        read_mvtec(root)
    skipped = Skipped([])
    assert len(read_mvtec(root, skipped)[1].samples) == 5 and len(skipped.paths) == 1
