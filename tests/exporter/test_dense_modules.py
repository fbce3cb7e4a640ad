"""Modules of transformers with an answer for every pixel: graphs on both engines, and maps equal to the library's.

Exports of the slower ones are measured where the page of models is written, or with VITDEPLOY_TEST_DEPTH.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.dense_models import MAKERS, save
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.source import Source
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.tasks.depth import DepthSpec, depth_of
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec, classes_of
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import Overrides, find_reference_model, reference_runner

ALWAYS = ("SegFormer", "Depth Anything")
HEADS = {
    "SegFormer": SegmentationSpec(reduce_labels=True),
    "Mask2Former": SegmentationSpec("queries", (384, 384), ignore=254),
    "MaskFormer": SegmentationSpec("queries"),
    "EoMT": SegmentationSpec("queries", (64, 64)),
    "Depth Anything": DepthSpec("metric", max_depth=20.0),
    "DPT": DepthSpec(),
}
SIZE = (90, 50)  # of an original image: width, height


def library_map(kind, head, outputs):
    """What transformers' own image processor makes of the outputs of one image."""
    library = reference("transformers")
    found = {name: torch.from_numpy(array)[None] for name, array in outputs.items()}
    target = [SIZE[::-1]]
    if kind in ("Depth Anything", "DPT"):
        processor = library.DPTImageProcessor()
        expected = processor.post_process_depth_estimation(SimpleNamespace(predicted_depth=found["depth"]), target)
        return expected[0]["predicted_depth"].numpy()
    names = {"class_logits": "class_queries_logits", "masks": "masks_queries_logits", "logits": "logits"}
    given = SimpleNamespace(**{names[name]: each for name, each in found.items()}, patch_offsets=None)
    processor = getattr(library, {"EoMT": "Eomt", "SegFormer": "Segformer"}.get(kind, kind) + "ImageProcessor")()
    more = {"size": {"shortest_edge": 64, "longest_edge": 64}} if kind == "EoMT" else {}
    return processor.post_process_semantic_segmentation(given, target, **more)[0].numpy()


def our_map(spec, head, outputs):
    return (depth_of if isinstance(head, DepthSpec) else classes_of)(outputs, SIZE, spec, head)


def assert_same_map(head, ours, theirs):
    if isinstance(head, DepthSpec):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    else:  # of two classes with scores nearer than float32 tells them apart either may be first
        assert (ours == theirs).mean() > 0.999


@pytest.mark.parametrize("kind", MAKERS)
def test_maps_of_random_outputs_are_the_librarys(kind):
    head, generator = HEADS[kind], np.random.default_rng(1)
    shapes = {"depth": (20, 30)} if isinstance(head, DepthSpec) else {"logits": (7, 16, 16)}
    if kind not in ("SegFormer", "Depth Anything", "DPT"):
        shapes = {"class_logits": (10, 6), "masks": (10, 16, 16)}
    outputs = {name: 3 * generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    theirs = library_map(kind, head, outputs)
    assert_same_map(head, our_map(PreprocessSpec((64, 64), (64, 64)), head, outputs), theirs)
    assert len(np.unique(theirs)) > 3


@pytest.mark.parametrize("kind", MAKERS)
def test_the_graph_is_the_module_on_both_engines_and_its_maps_are_the_librarys(kind, tmp_path, parity, request):
    asked = "VITDEPLOY_TEST_DEPTH" in os.environ or request.config.getoption("record_parity")
    if kind not in ALWAYS and not asked:
        pytest.skip("takes long; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it too")
    model = find_reference_model(Source(model=f"hf:{save(kind, tmp_path / 'model')}"))
    assert model.postprocess == HEADS[kind]
    (tmp_path / "exported").mkdir()
    export(model, ExportConfig("small", 20, None, True), tmp_path / "exported")
    generator = np.random.default_rng(0)
    with reference_runner(model.source) as theirs:
        for batch in BATCHES:
            pixels = generator.integers(0, 256, (batch, *model.image_size, 3), dtype=np.uint8)
            expected = theirs.infer({"image": normalise(pixels, model.images)})
            for engine in ENGINES:
                with engine_runner(engine, tmp_path / "exported" / "model.onnx", batch) as runner:
                    found = runner.infer({"image": pixels})
                both = ([each[name] for name in expected] for each in (found, expected))
                parity(f"{kind}, transformers' module", engine, *both)
                ours, first = ({name: each[0] for name, each in side.items()} for side in (found, expected))
                assert_same_map(
                    HEADS[kind], our_map(model.images, HEADS[kind], ours), library_map(kind, HEADS[kind], first)
                )


def test_sizes_that_patches_do_not_divide_are_refused_with_the_nearest(tmp_path):
    folder = save("Depth Anything", tmp_path)
    with pytest.raises(CheckpointError, match="do not cover an image of 75x84") as caught:
        find_reference_model(Source(model=f"hf:{folder}", image_size=(75, 84)))
    assert "70x84 or 84x84, which patches of 14 pixels divide" in caught.value.expected
    assert caught.value.fix == "--image-size 70x84"
    assert find_reference_model(Source(model=f"hf:{folder}", image_size=(70, 98))).image_size == (70, 98)
    with pytest.raises(CheckpointError, match="the post-processing does not fit") as caught:
        find_reference_model(Source(model=f"hf:{folder}"), Overrides(postprocess=SegmentationSpec()))
    assert (caught.value.expected, "for the task depth" in caught.value.fix) == ("values, resize, max_depth", True)
