"""The drawn scenes: the same pixels on every run, and labels that fit them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calibration.scenes import captions, figures, lines, parts, rooms, shapes
from calibration.scenes.stream import KINDS, SPLITS, stream
from calibration.scenes.write import render, run_lengths
from tests.conftest import ROOT

# SHA-256, shortened, of all files of the first calibration and the first two evaluation scenes. Who changes a drawing
# trains its model again.
DIGESTS = {
    "detection": "38a4e586742fd7bd",
    "prompted": "81a341c4dce47185",
    "semantic": "bacb4426058ac380",
    "captions": "4ab555c3687fdb16",
    "zero-shot": "062f7ad27e9ca5d2",
    "depth": "857a3565c48771ec",
    "keypoints": "903dbb00a900fa7b",
    "text": "8d5264a2ac54de85",
    "anomaly": "929648f20cecc7e8",
    "foreground": "f051920c364a1060",
    "identities": "5e4a56c9996e3057",
    "digits": "b42d3d4a481ecd68",
    "counts": "19cbe99c7797502f",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each kind."""
    root = tmp_path_factory.mktemp("scenes")
    for kind in KINDS:
        render(kind, root / kind, {"calibration": 1, "evaluation": 2})
    return root


def digest(folder: Path) -> str:
    """Of names, pixels, arrays and labels: the bytes of a PNG file are zlib's business."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = np.asarray(Image.open(path)).tobytes() if path.suffix == ".png" else path.read_bytes()
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + content)
    return total.hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_scenes_are_the_same_on_every_run(kind, folders):
    assert digest(folders / kind) == DIGESTS[kind]


def test_a_scene_does_not_depend_on_those_before_it(folders, tmp_path):
    render("text", tmp_path / "more", {"training": 1, "evaluation": 3})
    name = "images/evaluation/000001.png"
    assert (tmp_path / "more" / name).read_bytes() == (folders / "text" / name).read_bytes()


def test_seeds_of_two_splits_differ():
    first = {stream(kind, split, 0).bytes(16) for kind in KINDS for split in SPLITS}
    assert len(first) == len(KINDS) * len(SPLITS)


@pytest.mark.parametrize("kind", ["detection", "prompted"])
def test_instances_are_what_is_drawn(kind, folders):
    """The mask that pycocotools reads has the box and the area told, and its pixels have the colour told."""
    mask_of = pytest.importorskip("pycocotools.mask")
    document = json.loads((folders / kind / "annotations.json").read_text("utf-8"))
    images = {each["id"]: each for each in document["images"]}
    assert len(document["annotations"]) > 5
    for each in document["annotations"]:
        name = images[each["image_id"]]["file_name"]
        pixels = np.asarray(Image.open(folders / kind / "images" / name))
        mask = mask_of.decode(mask_of.frPyObjects(each["segmentation"], *pixels.shape[:2])).astype(bool)
        rows, columns = np.nonzero(mask)
        x, y, w, h = each["bbox"]
        assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x, y, x + w, y + h)
        assert each["area"] == mask.sum()
        colour = np.median(pixels[mask], axis=0) / 255
        nearest = min(shapes.COLOURS, key=lambda name: np.abs(colour - shapes.COLOURS[name]).sum())
        assert nearest == each["colour"]


def test_run_lengths_of_masks_that_fill_the_first_pixel_or_nothing():
    for mask in (np.array([[1, 0], [1, 1]], bool), np.zeros((2, 3), bool), np.ones((2, 3), bool)):
        counts = run_lengths(mask)["counts"]
        values = [value for k, count in enumerate(counts) for value in [k % 2] * count]
        assert np.array_equal(np.reshape(values, mask.shape, order="F"), mask)


def test_prompts_lie_inside_their_masks(folders):
    prompts = json.loads((folders / "prompted/prompts.json").read_text("utf-8"))
    for each in prompts:
        mask = np.asarray(Image.open(folders / "prompted/masks" / each["file_name"])) == each["instance"]
        column, row = each["point"]
        assert mask[int(row), int(column)]
        assert each["box"] == [*np.argwhere(mask).min(axis=0)[::-1], *(np.argwhere(mask).max(axis=0)[::-1] + 1)]


def test_semantic_maps_have_the_class_of_each_shape(folders):
    scene = shapes.scattered(stream("semantic", "evaluation", 0), 96)
    classes = json.loads((folders / "semantic/classes.json").read_text("utf-8"))
    drawn = np.asarray(Image.open(folders / "semantic/semantic/evaluation/000000.png"))
    assert classes[0] == "ground" and not drawn[scene.owner == 0].any()
    for k, shape in enumerate(scene.shapes, 1):
        assert set(drawn[scene.owner == k]) == {classes.index(shape.name)}


def test_captions_say_what_is_where():
    """The shape named first is where the caption says, seen from the second; none of training is held out."""
    for index in range(20):
        scene, caption = captions.two(stream("captions", "training", index), 64, "training")
        first, second = (np.argwhere(scene.owner == k).mean(axis=0)[::-1] for k in (1, 2))
        relation = next(name for name in captions.RELATIONS if f" {name} a " in caption)
        assert np.dot(first - second, captions.RELATIONS[relation]) > 10
        assert caption.startswith(f"a {scene.shapes[0].colour} {scene.shapes[0].name} ")
        assert not any(captions.held_out(shape.colour, shape.name) for shape in scene.shapes)
    assert sum(captions.held_out(*label.split()) for label in captions.LABELS) == 6


def test_depth_is_that_of_planes():
    """1 / z is linear in the picture on a plane (any textbook of projective geometry), and rooms are mostly planes."""
    inverse = 1 / rooms.room(stream("depth", "evaluation", 0), 96).depth.astype(np.float64)
    bent = np.abs(np.diff(inverse, 2, axis=1))[1:-1] + np.abs(np.diff(inverse, 2, axis=0))[:, 1:-1]
    assert (bent < 1e-6).mean() > 0.6


def test_depth_of_a_sphere_ahead():
    rays = rooms.Rays(65, pitch=0.0)
    rooms.add_sphere(rays, np.array([0, rooms.CAMERA_HEIGHT, 5.0]), 1.0, np.ones(3))
    assert rays.depth[32, 32] == pytest.approx(4.0) and rays.depth[0, 0] == np.inf


def test_a_matte_is_what_the_figures_cover(folders):
    """Stored in 8 bits; half or more of a pixel is covered inside the boxes of the figures alone."""
    picture = figures.before_shapes(stream("foreground", "evaluation", 0), 96)
    stored = np.asarray(Image.open(folders / "foreground/mattes/evaluation/000000.png"))
    assert np.array_equal(stored, np.rint(255 * picture.matte)) and {0, 255} < set(np.unique(stored).tolist())
    outside = np.ones_like(picture.matte, bool)
    for figure in picture.figures:
        x0, y0, x1, y1 = (int(side) for side in figure.box)
        assert picture.matte[y0:y1, x0:x1].mean() > 0.15
        outside[y0:y1, x0:x1] = False
    assert picture.matte[outside].max() < 0.5


def test_eyes_are_where_the_key_points_say(folders):
    document = json.loads((folders / "keypoints/annotations.json").read_text("utf-8"))
    images = {each["id"]: each["file_name"] for each in document["images"]}
    for each in document["annotations"]:
        pixels = np.asarray(Image.open(folders / "keypoints/images" / images[each["image_id"]])).astype(int)
        points = np.reshape(each["keypoints"], (17, 3))
        for eye in (figures.NAMES.index("left_eye"), figures.NAMES.index("right_eye")):
            column, row = np.rint(points[eye, :2]).astype(int)
            face = pixels[row + 2 : row + 4, column - 1 : column + 2].mean()  # the cheek below
            assert pixels[row, column].mean() < 0.7 * face
        left, right = (points[figures.NAMES.index(f"{side}_shoulder"), 0] for side in ("left", "right"))
        assert left > right


def test_pairs_are_of_one_number_or_of_two(tmp_path):
    render("identities", tmp_path / "numbers", {"calibration": 4, "evaluation": 12})
    header, *rows = (tmp_path / "numbers" / "pairs.csv").read_text("utf-8").splitlines()
    assert header == "image_a,image_b,same" and len(rows) == 3 + 9 + 8
    for row in rows:
        a, b, same = row.split(",")
        assert all((tmp_path / "numbers" / "images" / name).is_file() for name in (a, b))
        assert (Path(a).parts[0], Path(a).parent == Path(b).parent) == (Path(b).parts[0], same == "1")


def test_no_number_is_in_two_splits():
    identities = [lines.numbers(split) for split in SPLITS]
    assert sum(map(len, identities)) == len({each for split in identities for each in split}) == 1000


def test_counts_are_those_of_the_shapes_that_can_be_seen(tmp_path):
    render("counts", tmp_path / "counts", {"evaluation": 12})
    header, *rows = (tmp_path / "counts" / "labels.csv").read_text("utf-8").splitlines()
    assert header == "image,shapes" and len({row.split(",")[1] for row in rows}) > 3
    for index, row in enumerate(rows):
        scene = shapes.scattered(stream("counts", "evaluation", index), 64)
        assert row == f"evaluation/{index:06d}.png,{len(np.unique(scene.owner[scene.owner > 0]))}"


def test_a_text_belongs_to_one_split(folders):
    entries = json.loads((folders / "text/texts.json").read_text("utf-8"))
    assert all(lines.part(each["text"]) == each["file_name"].split("/")[0] for each in entries)


@pytest.mark.parametrize("defect", parts.DEFECTS)
def test_a_defect_is_where_its_mask_says(defect):
    """The same part without it differs there, and nowhere else by more than noise."""
    for index in range(3):
        good, nothing = parts.part(stream("anomaly", "calibration", index), 64)
        image, mask = parts.part(stream("anomaly", "calibration", index), 64, defect)
        apart = np.abs(image.astype(int) - good).max(axis=-1)
        assert not nothing.any() and 0.002 < mask.mean() < 0.2
        assert np.median(apart[mask]) > 20 and apart[~mask].max() < 30


def test_parts_lie_as_in_mvtec_ad(folders):
    root = folders / "anomaly"
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    test = ["test/good/000000.png", "test/missing/000001.png"]
    assert files == ["ground_truth/missing/000001_mask.png", *test, "train/good/000000.png"]
    mask, image = (Image.open(root / files[index]) for index in (0, 2))
    assert mask.size == image.size and set(np.unique(mask)) == {0, 255}


def test_what_cannot_be_rendered_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo.png").touch()
    with pytest.raises(FileExistsError, match="holds files already: name a new or an empty folder"):
        render("text", tmp_path / "mine", {"evaluation": 1})
    with pytest.raises(ValueError, match="zero-shot scenes have no training split"):
        render("zero-shot", tmp_path / "new", {"training": 1})
    with pytest.raises(ValueError, match="anomaly scenes have no training split"):
        render("anomaly", tmp_path / "other", {"training": 1})


def test_the_command_line_tells_what_it_wrote(tmp_path):
    command = [sys.executable, "-m", "calibration.scenes", "render", "text", str(tmp_path / "text")]
    done = subprocess.run(
        [*command, "--calibration", "0", "--evaluation", "3"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("text: 3 evaluation pictures\n")
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "holds files already" in again.stderr
