"""Instance segmentation by transformers' modules: which spec a folder gets, and instances equal to the library's.

Exports to both engines are measured where the page of models is written, or with VITDEPLOY_TEST_DEPTH.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.dense_models import save
from tests.models.external.detectors import DETECTORS
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.models.source import Source
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.tasks.instance_segmentation import QUERIES_ASSUMED, InstanceSpec, overlaps, segment_instances
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import find_reference_model, reference_runner

HEADS = {
    "Mask2Former": InstanceSpec(mask_size=(384, 384)),
    "MaskFormer": InstanceSpec(),
    "EoMT": InstanceSpec("softmax", "queries", (64, 64), "bilinear", 0.8),
    "RF-DETR": InstanceSpec("sigmoid", enlarge="bilinear"),
}
SIZE = (80, 80)  # of an original image: square, as EoMT's processor pads others
TASK = "instance-segmentation"


def folder_of(kind, folder):
    if kind != "RF-DETR":
        return save(kind, folder)
    torch.manual_seed(1)
    library = reference("transformers")
    model = library.RfDetrForInstanceSegmentation(library.RfDetrConfig(**DETECTORS[kind].config))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.5 / np.sqrt(parameter.shape[1]) if "backbone" not in name else 0.08)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["Mask2Former", "EoMT"])
def test_a_folder_of_queries_is_of_instances_where_that_is_asked_for(kind, tmp_path):
    folder = f"hf:{save(kind, tmp_path)}"
    model = find_reference_model(Source(model=folder, task=TASK))
    assert (model.task, model.postprocess, model.classes) == (TASK, HEADS[kind], 5)
    assert QUERIES_ASSUMED not in model.notes
    unasked = find_reference_model(Source(model=folder))
    assert unasked.task == "segmentation" and QUERIES_ASSUMED in unasked.notes


def library_instances(kind, head, outputs):
    """Class, score and mask of each that transformers' processor finds; of EoMT, whose masks it lays upon each other,
    None for the mask."""
    name = {"EoMT": "Eomt", "RF-DETR": "RfDetr"}.get(kind, kind)
    processor = getattr(reference("transformers"), f"{name}ImageProcessor")()
    names = ("logits", "pred_masks") if kind == "RF-DETR" else ("class_queries_logits", "masks_queries_logits")
    given = [torch.from_numpy(outputs[each])[None] for each in ("class_logits", "masks")]
    more = {"size": {"shortest_edge": 64, "longest_edge": 64}} if kind == "EoMT" else {"return_binary_maps": True}
    [found] = processor.post_process_instance_segmentation(
        SimpleNamespace(**dict(zip(names, given, strict=True))),
        target_sizes=[SIZE[::-1]],
        threshold=head.threshold,
        **more,
    )
    masks = [None] * len(found["segments_info"]) if kind == "EoMT" else found["segmentation"].numpy().astype(bool)
    return [(told["label_id"], told["score"], mask) for told, mask in zip(found["segments_info"], masks, strict=True)]


@pytest.mark.parametrize("kind", HEADS)
def test_instances_of_the_graph_are_the_librarys_on_both_engines(kind, tmp_path, parity, request):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ and not request.config.getoption("record_parity"):
        pytest.skip("takes long; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it too")
    model = find_reference_model(Source(model=f"hf:{folder_of(kind, tmp_path / 'model')}", task=TASK))
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
                if kind == "RF-DETR":  # the graphs of all others are those of semantic segmentation
                    both = ([each[name] for name in expected] for each in (found, expected))
                    parity("RF-DETR with masks, transformers' module", engine, *both)
                sides = [{name: each[0] for name, each in side.items()} for side in (found, expected)]
                assert_same_instances(kind, model, *sides)


def assert_same_instances(kind, model, ours, theirs):
    """At a threshold between two scores, so that rounding moves none across it."""
    head = dataclasses.replace(model.postprocess, threshold=0.0)
    scores = sorted(each.score for each in segment_instances(theirs, SIZE, model.images, head, None).objects)
    gap = int(np.argmax(np.diff(scores)))
    head = dataclasses.replace(head, threshold=float(np.mean(scores[gap : gap + 2])))
    found = segment_instances(ours, SIZE, model.images, head, None).objects
    expected = library_instances(kind, head, theirs)
    assert len(found) == len(expected) == len(scores) - gap - 1
    for index, score, mask in expected:
        same = [each for each in found if each.index == index and abs(each.score - score) < 1e-4]
        assert same
        if mask is not None:
            assert overlaps([RunLengths.of(mask)], [each.runs for each in same]).max() > 0.99
