"""Several image sizes of one model: each with its graph, engine and proof, all in one bundle."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.command_line import command_line
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.errors import DigestError
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.runtime import load
from vitdeploy.runtime.preprocess import normalise

RECIPE = """
vitdeploy: 1
name: sizes
source: {{model: vit_w32d2h2_patch8_32, checkpoint: {checkpoint}, image_sizes: [32, [32, 40]]}}
preprocess: {{resize: 36, crop: 32, interpolation: bicubic, mean: [0.5], std: [0.5]}}
data: {{path: {digits}, calibration: {{images: 8}}, evaluation: {{images: 16}}}}
precision: fp32
targets: [onnxruntime-cpu]
budget: {{max_size: 1}}
bundle: {{include_failed: true}}
bench: {{scenarios: [single], batch: [1], duration: 0.5}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, digits, small_checkpoint):
    home = tmp_path_factory.mktemp("sizes")
    (home / "recipe.yaml").write_text(RECIPE.format(checkpoint=small_checkpoint, digits=digits), encoding="utf-8")
    with command_line(home, home / "store", short_bench=True) as command:
        done = command("run", "recipe.yaml", "-o", "bundle")
        again = command("run", "recipe.yaml", "-o", "bundle", "--dry-run")
    return SimpleNamespace(home=home, bundle=home / "bundle", inner=home / "bundle/sizes/32x40", done=done, again=again)


def test_each_size_is_a_bundle_with_a_graph_of_its_size(run):
    outer, inner = read_bundle(run.bundle), read_bundle(run.inner)
    assert outer.sizes == ("32x40",)
    assert inner.sizes == ()
    assert outer.graphs["model"].inputs[0].shape == ("batch", 32, 32, 1)
    assert inner.graphs["model"].inputs[0].shape == ("batch", 32, 40, 1)
    assert (outer.preprocess.crop, inner.preprocess.crop) == ((32, 32), (32, 40))
    assert [engine.target for engine in inner.engines] == ["onnxruntime-cpu"]
    verify_files(run.bundle, outer)
    verify_files(run.inner, inner)


def test_the_same_share_of_the_image_is_cropped_at_each_size(run):
    outer, inner = (read_bundle(folder).preprocess for folder in (run.bundle, run.inner))
    assert (outer.resize, outer.fit) == (36, "stretch")
    assert (inner.resize, inner.fit) == ((36, 45), "cover")


def test_the_engine_of_a_size_answers_as_the_original_resized_to_it(run, small_checkpoint):
    original = load_model(Source("vit_w32d2h2_patch8_32", small_checkpoint, (32, 40)))
    pixels = np.load(run.inner / "golden/inputs.npz")["image"]
    with pytest.warns(RuntimeWarning, match="failed its budget"):
        predictor = load(run.inner, allow_failed=True)
    with predictor, torch.inference_mode():
        ours = predictor.outputs(list(pixels))["logits"]
        theirs = original.module(torch.from_numpy(normalise(pixels, predictor.preprocess))).numpy()
    assert pixels.shape[1:] == (32, 40, 1)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_a_change_inside_a_size_is_a_change_of_the_bundle(run, tmp_path):
    copy = shutil.copytree(run.bundle, tmp_path / "bundle")
    graph = copy / "sizes/32x40/model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestError, match=r"model\.onnx"):
        verify_files(copy, read_bundle(copy))


def test_the_outer_report_compares_the_sizes_and_the_inner_ones_are_of_one(run):
    outer, inner = (json.loads((folder / "report.json").read_text()) for folder in (run.bundle, run.inner))
    assert [(row["size"], row["path"]) for row in outer["sizes"]] == [("32x32", ""), ("32x40", "sizes/32x40/")]
    assert outer["sizes"][1]["sentence"] == inner["verdict"]["sentence"]
    assert "sizes" not in inner
    page = (run.bundle / "report.html").read_text(encoding="utf-8")
    assert '<a href="sizes/32x40/report.html">' in page
    assert "Image sizes" not in (run.inner / "report.html").read_text(encoding="utf-8")


def test_each_report_holds_the_recipe_that_makes_it_again(run):
    outer, inner = (read_bundle(folder).provenance["recipe"] for folder in (run.bundle, run.inner))
    assert (outer["source"]["image_size"], outer["source"]["image_sizes"]) == (None, [32, [32, 40]])
    assert (inner["source"]["image_size"], inner["source"]["image_sizes"]) == ([32, 40], None)


def test_every_line_says_of_which_size_it_is(run):
    assert "32x40: export to ONNX" in run.done.stderr
    assert [line for line in run.done.stdout.splitlines() if line in ("32x32:", "32x40:")] == ["32x32:", "32x40:"]
    steps = [line.split()[1] for line in run.again.stdout.splitlines() if line.startswith("reuse")]
    assert set(steps) == {"32x32:", "32x40:"}
    assert "run    32x" not in run.again.stdout


def test_what_cannot_be_proven_is_told_of_each_size_before_its_engines(run):
    cannot = "16 images are too few: even if all answers match, they prove only 80.63 % agreement"
    lines = run.done.stderr.splitlines()
    for size in ("32x32", "32x40"):
        [at] = [at for at, line in enumerate(lines) if line.startswith(f"{size}: {cannot}")]
        assert at < lines.index(f"{size}: export to ONNX")


def test_a_budget_that_a_size_misses_is_missed_and_the_bundle_is_there(run):
    assert run.done.returncode == 5
    [found] = [line for line in run.done.stderr.splitlines() if line.strip().startswith("found:")]
    for size in ("32x32", "32x40"):
        assert re.search(rf"{size}: [^;].*?size \S+ bytes, budget 1\b", found)


def test_export_makes_a_graph_for_each_size_that_is_asked_for(run, small_checkpoint):
    with command_line(run.home, run.home / "store") as command:
        sizes = ("--image-size", 32, "--image-size", "40x32")
        model = ("vit_w32d2h2_patch8_32", "--checkpoint", small_checkpoint)
        named = command("export", *model, *sizes, "-o", "graphs", "--json")
        of_recipe = command("export", "recipe.yaml", "-o", "of_recipe", "--json")
        other = command("export", "recipe.yaml", "--image-size", "24", "-o", "other", "--json")
    assert list(named.document["sizes"]) == ["32x32", "40x32"]
    assert (run.home / "graphs/model.onnx").is_file()
    assert (run.home / "graphs/sizes/40x32/model.onnx").is_file()
    assert list(of_recipe.document["sizes"]) == ["32x32", "32x40"]
    assert other.document["model"]["image_size"] == [24, 24]
    assert not (run.home / "other/sizes").exists()
