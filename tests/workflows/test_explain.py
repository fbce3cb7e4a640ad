"""`vitdeploy explain`: planted attention is found where it was put, and what cannot be explained says why."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.pipeline import planted
from tests.report.test_attention import patch, tile
from vitdeploy.document.commands import Explanation
from vitdeploy.errors import GraphError, InputError, OutputError
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.passes.optimize import optimize
from vitdeploy.graph.passes.tokens import merge_tokens
from vitdeploy.spec import decode, encode
from vitdeploy.workflows.explain import explain

BRIGHT, DARK = (1, 2), (3, 0)
# Of the planted models: the image, rollout, mean of the heads, and a head each for bright and dark.
IMAGE, ROLLOUT, MEAN, HEAD_BRIGHT, HEAD_DARK = range(5)


def brightest(picture, index, columns=3):
    """The patch with the lightest colour of a tile."""
    pixels = tile(picture, index, columns)
    light = {(row, column): patch(pixels, row, column, (4, 4)).mean() for row in range(4) for column in range(4)}
    return max(light, key=light.get)


def optimized(model):
    normalise(model)
    assert optimize(model)["class_token_only"] == 1
    return model


CLASSIFIERS = {
    "class token": (lambda: planted.classifier(), 1, "last attention, read by the class token", 2),
    "class token only": (lambda: optimized(planted.classifier()), 1, "last attention, read by the class token", 2),
    "average": (lambda: planted.classifier("average"), 0, "last attention, read by all patches", 2),
    "pooling": (lambda: planted.classifier("learned"), 0, "last attention, read by the pooling query", 3),
    "fixed batch": (lambda: planted.classifier(batch=2), 1, "last attention, read by the class token", 2),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_map_has_its_maximum_where_the_attention_was_planted(kind, tmp_path):
    make, prefix, reader, blocks = CLASSIFIERS[kind]
    image, out = planted.picture(tmp_path, BRIGHT, DARK), tmp_path / "out.png"
    facts = explain(planted.bundle(tmp_path, make(), labels=["bright", "one"]), image, out)
    assert encode(facts) == {
        "path": str(out),
        "image": str(image),
        "task": "classification",
        "size": list(facts.size),
        "grid": [4, 4],
        "heads": 2,
        "blocks": blocks,
        "prefix_tokens": prefix,
        "read": reader,
        "maps": [f"Rollout over {blocks} attentions", "Mean of the 2 heads", "Head 1", "Head 2"],
    }
    picture = Image.open(out).convert("RGB")
    assert picture.size == facts.size
    assert brightest(picture, IMAGE) == brightest(picture, HEAD_BRIGHT) == BRIGHT
    assert brightest(picture, HEAD_DARK) == DARK
    for index in (ROLLOUT, MEAN):
        shown = tile(picture, index, 3)
        strong = [patch(shown, *place, (4, 4)).mean() for place in (BRIGHT, DARK)]
        assert min(strong) > patch(shown, 0, 0, (4, 4)).mean() + 30


def test_a_detector_shows_the_look_and_the_box_of_each_detected_object(tmp_path):
    image, out = planted.picture(tmp_path, BRIGHT, DARK), tmp_path / "out.png"
    bundle = planted.bundle(tmp_path, planted.detector(), "detection", labels=["bright", "dark", "never"])
    facts = explain(bundle, image, out)
    assert facts.maps == ("bright, 94.8 %", "dark, 87.0 %")
    assert (facts.grid, facts.heads, facts.blocks, facts.prefix_tokens) == ((4, 4), 2, 1, 0)
    picture = Image.open(out).convert("RGB")
    # The key's score is its brightness in one head, and the reverse in the other: each object has one of both.
    for index, place in ((1, BRIGHT), (2, DARK)):
        shown = tile(picture, index, 3)
        assert patch(shown, *place, (4, 4)).mean() > patch(shown, 2, 3, (4, 4)).mean() + 30
    # The box, (0, 0) to (16, 16) of 32 pixels, ends in the middle of the tile in white.
    shown = tile(picture, 1, 3)
    middle = shown.shape[0] // 2
    assert shown[middle - 3 : middle + 3, middle // 2].max(axis=0) == pytest.approx([255, 255, 255], abs=3)


def refused(tmp_path, model, task="classification", **options):
    image = planted.picture(tmp_path)
    with pytest.raises((GraphError, InputError)) as caught:
        explain(planted.bundle(tmp_path, model, task, **options), image, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
    return caught.value


def test_attention_in_windows_is_refused_with_the_reason_and_what_would_do(tmp_path):
    error = refused(tmp_path, planted.windowed())
    assert isinstance(error, GraphError)
    assert "attends inside windows" in error.message
    assert error.found == "layers.0.attn: rows of 4 tokens, for 4x4 patches"
    assert "ViT" in error.expected
    assert "occlusion" in error.fix


def test_attentions_over_different_tokens_are_refused(tmp_path):
    error = refused(tmp_path, planted.uneven())
    assert "over different tokens" in error.message
    assert error.found == "queries x keys: 16x16, 17x17"


def test_merged_tokens_are_told_from_windows(tmp_path):
    model = planted.classifier("learned")
    normalise(model)
    merge_tokens(model, {0: 12})
    error = refused(tmp_path, model)
    assert "over different tokens" in error.message
    assert error.fix == "explain a bundle built without optimize.token_merging"


def test_a_graph_without_attention_is_refused(tmp_path):
    assert refused(tmp_path, planted.convolutional()).found.startswith("no attention")


def test_a_graph_without_a_patch_grid_is_refused(tmp_path):
    error = refused(tmp_path, planted.classifier("average", convolution=False))
    assert error.found == "no patch embedding by a convolution"


def test_a_detector_whose_queries_do_not_attend_to_the_image_is_refused(tmp_path):
    error = refused(tmp_path, planted.detector(cross=False), "detection")
    assert "no attention over the whole image" in error.message


def test_an_image_without_detected_objects_is_refused(tmp_path):
    error = refused(tmp_path, planted.detector(), "detection", threshold=0.999)
    assert "the model detects nothing" in error.message
    assert error.found == "no object with a score above 0.999"


def test_a_bundle_of_sequences_is_refused(tmp_path):
    error = refused(tmp_path, planted.classifier(), "sequence")
    assert error.message.endswith("takes no images: explain draws attention maps over an image")


def test_a_bundle_whose_graph_is_a_placement_is_refused(tmp_path):
    error = refused(tmp_path, planted.classifier(), precision="int8")
    assert "contains no float graph" in error.message
    assert error.found == "model.onnx placed in int8 for openvino-cpu"


@pytest.mark.parametrize(
    ("name", "found"),
    [("out.jpg", "the suffix .jpg"), ("out", "a name without a suffix"), ("d.png", "a folder")],
)
def test_an_output_that_is_no_png_file_is_refused(tmp_path, name, found):
    (tmp_path / "d.png").mkdir()
    with pytest.raises(OutputError) as caught:
        explain(tmp_path, tmp_path / "image.png", tmp_path / name)
    assert caught.value.found == found


def test_the_image_is_not_overwritten(tmp_path):
    image = planted.picture(tmp_path)
    with pytest.raises(OutputError) as caught:
        explain(tmp_path, image, image.parent / "." / image.name)
    assert caught.value.found == "the image itself"


def test_a_changed_graph_is_refused(tmp_path):
    image, bundle = planted.picture(tmp_path), planted.bundle(tmp_path, planted.classifier())
    with (bundle / "model.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(Exception, match="is not the file that the manifest records"):
        explain(bundle, image, tmp_path / "out.png")


def test_the_command_prints_one_document_and_writes_the_picture_alone(cli, tmp_path):
    image, bundle = planted.picture(tmp_path), planted.bundle(tmp_path, planted.classifier())
    before = set(tmp_path.iterdir())
    done = cli("explain", bundle, image, "-o", "new/out.png", "--json")
    assert done.returncode == 0, done.stderr
    facts = decode(Explanation, json.loads(done.stdout))
    assert (facts.grid, facts.heads, facts.prefix_tokens) == ((4, 4), 2, 1)
    assert Image.open(tmp_path / facts.path).size == facts.size
    assert set(tmp_path.iterdir()) - before == {tmp_path / "new"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.png"]
    assert "4x4 patches, 1 prefix token, 2 heads, 2 attentions" in done.stderr


def test_of_a_real_model_the_weights_that_are_drawn_sum_to_one(small_export, tmp_path, digits):
    """Through export, rewrites and bundle, as a user does."""
    from vitdeploy.attention import run_instrumented
    from vitdeploy.graph.analysis.attention import token_views
    from vitdeploy.graph.passes.optimize import OptimizeOptions
    from vitdeploy.runtime.preprocess import load_pixels
    from vitdeploy.stages import optimize as stage
    from vitdeploy.workflows.explain import _float_graph
    from vitdeploy.workflows.placement import compile_bundle

    for name in ("float", "bundle"):
        (tmp_path / name).mkdir()
    stage.optimize({"model": small_export / "model.onnx"}, OptimizeOptions(), tmp_path / "float")
    manifest = compile_bundle(tmp_path / "float" / "model.onnx", "onnxruntime-cpu", None, None, tmp_path / "bundle")
    model = _float_graph(tmp_path / "bundle", manifest)
    views = token_views(model, "the bundle")
    assert (views.grid, views.prefix, views.rows) == ((4, 4), 1, (0,))
    pixels = load_pixels(digits / "evaluation" / "7" / "0017.png", manifest.preprocess)
    [instrumented] = run_instrumented(model, views, [pixels], manifest.preprocess)
    weights = [*instrumented.means, instrumented.heads]
    assert [each.shape for each in weights] == [(17, 17), (2, 1, 17)]
    for each in weights:
        np.testing.assert_allclose(each.sum(axis=-1), 1, atol=1e-5)
