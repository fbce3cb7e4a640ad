"""transformers' detectors from a folder: the graph is the library's module, and an app finds the same objects as
`post_process_object_detection` of the image processor that belongs to the model.

Those that are much like another are measured where the page of models is written, or with VITDEPLOY_TEST_DEPTH.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.external.detectors import DETECTORS, saved
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.load import load_model
from vitdeploy.models.model_folder.folder import PROCESSOR_OF
from vitdeploy.models.source import Source
from vitdeploy.runtime.tasks.detection import detect

# What an exporter leaves of a loop over levels, of masks of padding and of tables that no pixel enters.
NOT_IN_A_GRAPH = {"Loop", "If", "Scan", "CumSum", "NonZero", "GatherND", "Range", "ConstantOfShape", "Where"}
THRESHOLD = 0.05
SIZE = (200, 120)  # width, height of a photograph
# tests/test_walks.py exports a trained RT-DETRv2 and judges it by its labels; D-FINE's module answers as its repository
# in tests/models/keys/test_rtdetr.py.
ALWAYS = ("RF-DETR", "YOLOS")


def images(family, batch):
    """Seeded noise in which the scores that choose queries are further apart than rounding moves them."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, *DETECTORS[family].image_size, generator=generator)


@pytest.fixture(scope="module", params=list(DETECTORS))
def exported(request, tmp_path_factory):
    """The family's name, the loaded model and its graph, for engines with any batch."""
    asked = "VITDEPLOY_TEST_DEPTH" in os.environ or request.config.getoption("record_parity")
    if request.param not in ALWAYS and not asked:
        pytest.skip("much like another detector; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it too")
    folder = saved(request.param, tmp_path_factory.mktemp("detector"))
    original = load_model(Source(f"hf:{folder}", image_size=DETECTORS[request.param].image_size))
    signature = original.signature
    graph = export_graph(
        original.module, name="model", preprocess=original.preprocess, image_size=signature.image_size, opset=20,
        batch=None, in_graph=False, task=signature.task, outputs=[each.name for each in signature.outputs],
        postprocess=signature.postprocess,
    )  # fmt: skip
    save_graph(graph, folder / "model.onnx")
    return request.param, original, folder / "model.onnx", graph


@pytest.mark.parametrize("engine", ENGINES)
def test_the_graph_is_transformers_module_at_any_batch(exported, engine, parity):
    family, original, path, _ = exported
    for batch in BATCHES:
        image = images(family, batch)
        with torch.no_grad(), engine_runner(engine, path, batch) as runner:
            found, expected = runner.infer({"image": image.numpy()}), original.module(image)
        parity(f"{family}, transformers' module", engine, [found["logits"], found["boxes"]], expected, top1=True)


def test_objects_are_those_of_transformers_post_processing(exported):
    family, original, path, _ = exported
    transformers = reference("transformers")
    reference("torchvision")
    processor = getattr(transformers, f"{PROCESSOR_OF[original.module.model.config.model_type]}ImageProcessor")()
    image = images(family, 2)
    with torch.no_grad(), engine_runner("ONNX Runtime", path, 2) as runner:
        found, returned = runner.infer({"image": image.numpy()}), original.module.returned(image)
    expected = processor.post_process_object_detection(returned, threshold=THRESHOLD, target_sizes=[SIZE[::-1]] * 2)
    for index, theirs in enumerate(expected):
        outputs = {name: value[index] for name, value in found.items()}
        head = original.signature.postprocess
        ours = detect(outputs, SIZE, original.preprocess, replace(head, threshold=THRESHOLD), None).objects
        order = np.argsort(-theirs["scores"].numpy(), kind="stable")
        boxes = np.clip(theirs["boxes"].numpy()[order], 0, [*SIZE, *SIZE])
        assert len(ours) == len(order) > 0
        assert [each.index for each in ours] == theirs["labels"].numpy()[order].tolist()
        np.testing.assert_allclose([each.score for each in ours], theirs["scores"].numpy()[order], atol=1e-5)
        np.testing.assert_allclose([each.box for each in ours], boxes, atol=2e-2)


def test_no_loop_no_mask_and_no_table_is_left(exported):
    family, _, _, graph = exported
    operators = [node.op_type for node in graph.graph]
    assert not NOT_IN_A_GRAPH & set(operators)
    layers, levels = DETECTORS[family].samplings
    assert operators.count("GridSample") == layers * levels
