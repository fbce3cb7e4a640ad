"""A model that takes a mask with each image, through all of `vitdeploy run`, and what cannot take such a model."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitdeploy as vd
from tests.command_line import ROOT, command_line
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CapabilityError
from vitdeploy.graph.half.half import emulate
from vitdeploy.graph.io.files import load_graph, serialised
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.pipeline.job import prepare
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe, recipe_text
from vitdeploy.runtime import load
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.stages.optimize import optimize

SIDE, FUNCTION = 32, "masked:Masked"
TARGETS = ("onnxruntime-cpu", "openvino-cpu")
# docs/recipes.md is executed.
SECTION = (
    (ROOT / "docs/recipes.md").read_text(encoding="utf-8").split("### What each image brings\n")[1].split("\n## ")[0]
)
MODULE, RECIPE, COMMANDS, PYTHON = re.findall(r"```\w+\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """A finished run: its folder, bundle and report, the images, and what each brings."""
    home, random = tmp_path_factory.mktemp("masked"), np.random.default_rng(0)
    (home / "masked.py").write_text(MODULE, encoding="utf-8")
    images, masks = [], []
    for number in range(104):
        name = f"{'ab'[number % 2]}/{number:03}"
        pixels = np.kron(random.integers(0, 256, (4, 4, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
        mask = np.zeros((1, SIDE, SIDE), np.float32)
        top, left = random.integers(0, SIDE // 2, 2)
        mask[:, top : top + 16, left : left + 16] = 1
        for folder in (home / "images", home / "beside/mask"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(home / "images" / f"{name}.png")
        if number % 3:
            np.save(home / "beside/mask" / f"{name}.npy", mask)
        else:
            Image.fromarray((255 * mask[0]).astype(np.uint8)).save(home / "beside/mask" / f"{name}.png")
        images.append(pixels)
        masks.append(mask)
    (home / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    with command_line(home, home / "store", short_bench=True) as command:
        done = command(*shlex.split(COMMANDS.splitlines()[0])[1:], "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads((home / "bundle/report.json").read_text(encoding="utf-8"))
    return SimpleNamespace(home=home, bundle=home / "bundle", report=report, images=images, masks=masks)


@pytest.fixture(scope="module")
def module(line):
    spec = importlib.util.spec_from_file_location("masked_here", line.home / "masked.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.Masked().eval()


def logits(module: nn.Module, images, masks) -> np.ndarray:
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        return module((pixels / 255 - 0.5) / 0.5, torch.from_numpy(np.stack(masks))).numpy()


def test_every_engine_is_verified_with_what_each_image_brings(line):
    assert {each["artifact"] for each in line.report["engines"]} == {
        f"{target}-{precision}" for target in TARGETS for precision in ("int8", "fp32")
    }
    for engine in line.report["engines"]:
        verified = engine["verify"]
        assert verified["agreement"] > 90 and verified["control"]["agreement"] < 60


def test_the_bundle_says_what_images_bring_and_keeps_it_golden(line):
    manifest = read_bundle(line.bundle)
    assert manifest.graphs["model"].inputs[1].shape == ("batch", 1, SIDE, SIDE)
    for engine in manifest.engines:
        assert [tensor.name for tensor in engine.inputs] == ["image", "mask"]
        assert engine.inputs[1].dtype == "float32" and engine.inputs[1].shape[1:] == (1, SIDE, SIDE)
    with np.load(line.bundle / manifest.golden.inputs) as golden:
        assert golden["mask"].shape == (len(golden["image"]), 1, SIDE, SIDE) and golden["mask"].any()
    assert manifest.monitor is None


@pytest.mark.parametrize("target", TARGETS)
def test_the_answer_depends_on_the_mask(line, module, target):
    right = logits(module, line.images[:16], line.masks[:16])
    others = logits(module, line.images[:16], line.masks[1:17])
    assert (right.argmax(1) != others.argmax(1)).mean() > 0.3
    with load(line.bundle, target) as predictor:
        found = [predictor.predict_with(i, {"mask": m}, 1) for i, m in zip(line.images[:16], line.masks, strict=False)]
    assert np.mean([each.top[0].index for each in found] == right.argmax(1)) > 0.8


def test_golden_answers_with_another_mask_are_refused(line, tmp_path):
    """The negative control of the self-check."""
    from vitdeploy.runtime.golden import engine_outputs, largest_difference, read_golden

    manifest = read_bundle(line.bundle)
    golden = read_golden(line.bundle, manifest, manifest.engines[0])
    with load(line.bundle) as predictor:
        runner = predictor.runner
        same = engine_outputs(runner, manifest.preprocess, golden.inputs["image"], {"mask": golden.inputs["mask"]})
        other = engine_outputs(
            runner, manifest.preprocess, golden.inputs["image"], {"mask": np.roll(golden.inputs["mask"], 1, 0)}
        )
    assert largest_difference(same, golden.outputs, ["logits"]) <= golden.tolerance
    assert largest_difference(other, golden.outputs, ["logits"]) > golden.tolerance


def test_predict_takes_a_file_for_each_input(line):
    image, mask = "images/a/000.png", "beside/mask/a/000.png"
    with command_line(line.home, line.home / "store") as command:
        done = command(*shlex.split(COMMANDS.splitlines()[1])[1:], "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["predictions"][0]
        missing = command("predict", "bundle", image)
        wrong = command("predict", "bundle", image, "--input", f"maks={mask}")
        checked = command("inspect", "bundle", "--check")
    with load(line.bundle) as predictor:
        ours = predictor.predict_with(line.home / image, {"mask": line.masks[0]}, 3).to_dict()
    assert {key: found[key] for key in ours} == ours
    assert missing.returncode == 2 and "--input mask=FILE" in missing.stderr
    assert wrong.returncode == 2 and "maks" in wrong.stderr
    assert checked.returncode == 0, checked.stderr


def test_the_python_of_the_page_runs(line):
    done = subprocess.run(
        [sys.executable, "-c", f"{PYTHON}\nprint(answer.index)"],
        cwd=line.home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    with load(line.bundle) as predictor:
        expected = predictor.predict_with(line.images[0], {"mask": line.masks[0]}).index
    assert done.stdout.strip() == str(expected), done.stderr


def test_the_steps_alone_give_the_same(line, module):
    with command_line(line.home, line.home / "store") as command:
        data = ("--data", "images", "--inputs", "beside", "--labels", "none")
        bound = ("--bind", "mask=input:float32:1x32x32", "--image-size", "32")
        for step in (
            ("export", "--model", FUNCTION, *bound, "-o", "f"),
            ("quantize", "f", *data, "--num-samples", "32", "--target", "onnxruntime-cpu", "-o", "q"),
            ("compile", "q", "--target", "onnxruntime-cpu", "-o", "e"),
            ("verify", "e", "--against", "f", *data, "--min-agreement", "70"),
        ):
            done = command(*step)
            assert done.returncode == 0, (step, done.stderr)
        assert "agreement" in done.stdout
        done = command("verify", "e", "--against", "f", "--data", "images")
        assert done.returncode == 2 and "--inputs" in done.stderr
        done = command("quantize", "f", "--data", "images", "--target", "onnxruntime-cpu", "-o", "x")
        assert done.returncode == 2 and "mask/STEM.npy" in done.stderr
        done = command("bench", "e", "--duration", "0.2")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
def test_types_of_gpus_are_chosen_with_what_each_image_brings(line, module, tmp_path, precision):
    """The graph with its types, evaluated on this CPU: TensorRT builds it."""
    read = vd.model(module, bind={"mask": "input:float32:1x32x32"}, image_size=(SIDE, SIDE))
    given = vd.images(line.home / "images", "none", inputs=line.home / "beside")
    how = {"precision": precision, "num_samples": 16, "progress": False}
    placed = vd.quantize(vd.export(read, progress=False), given, "tensorrt", **how)
    graph = emulate(load_graph(placed.file))
    with OnnxRuntimeRunner(serialised(graph), name="emulated") as runner:
        assert [tensor.name for tensor in runner.inputs] == ["image", "mask"]
        feeds = {"image": np.stack(line.images[:8]), "mask": np.stack(line.masks[:8])}
        found = runner.infer(feeds)["logits"]
    right = logits(module, line.images[:8], line.masks[:8])
    assert np.abs(found - right).max() < {"fp16": 0.02, "bf16": 0.1, "fp8": 0.3}[precision] * np.abs(right).max()
    with pytest.raises(CapabilityError, match="precision int8 supports only models whose single input is an image"):
        vd.quantize(vd.export(read, progress=False), given, "tensorrt", progress=False)


def test_a_copy_is_one_of_image_and_mask(line, tmp_path):
    """Of the same image with another mask nothing is a copy; with the same mask it is."""
    for folder in ("images", "beside/mask"):
        (tmp_path / folder).mkdir(parents=True)
    for number, (image, mask) in enumerate([(0, 0), (0, 1), (1, 0), (1, 0), (1, 0), (2, 0)]):
        Image.fromarray(line.images[image]).save(tmp_path / f"images/{number}.png")
        np.save(tmp_path / f"beside/mask/{number}.npy", line.masks[mask])
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "masked.py").write_text(MODULE, encoding="utf-8")
    sys.path.insert(0, str(line.home))
    try:
        recipe = load_recipe(tmp_path / "recipe.yaml", ["data.calibration.images=1"], FUNCTION)
        [job] = prepare(recipe, skip_bad=False, progress=silent, function=FUNCTION)
    finally:
        sys.path.remove(str(line.home))
    different = {(0, 0), (0, 1), (1, 0), (2, 0)}
    [shown] = [int(sample.path.stem) for sample in job.data.calibration]
    assert len(job.data.evaluation) == len(different) - (shown in (0, 1, 5))


def test_what_knows_images_alone_refuses_and_says_what_works(line, tmp_path):
    from vitdeploy.embed.source import find_embedded
    from vitdeploy.workflows.explain import explain

    calls = {
        "a page": lambda: find_embedded(line.bundle, TARGETS, "a page", lambda task: True),
        "an attention map": lambda: explain(line.bundle, line.home / "images/a/000.png", tmp_path / "a.png"),
        "token merging": lambda: optimize(
            {"model": line.bundle / "model.onnx"}, OptimizeOptions(token_merging=((0, 4),)), tmp_path
        ),
    }
    for what, call in calls.items():
        supported = f"{what} supports only models whose single input is an image"
        with pytest.raises(CapabilityError, match=supported) as refused:
            call()
        assert "mask" in refused.value.found and "--bind mask=VALUE" in refused.value.fix
    given = ("recipe.yaml", "--model", FUNCTION, "-o", "x")
    with command_line(line.home, line.home / "store") as command:
        for arguments, what in (
            (("run", *given, "--set", "precision=mixed"), "precision: mixed"),
            (("run", *given, "--set", "optimize.prune=0.3"), "optimize.prune"),
            (("tune", *given), "a search"),
            (("verify", "bundle", "--against", "bundle/model.onnx", "--data", "images", "--bisect"), "--bisect"),
        ):
            done = command(*arguments)
            supported = f"{what} supports only models whose single input is an image"
            assert done.returncode == 4 and supported in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"data": {"inputs": None}}, "VD2301", "the model needs additional inputs"),
        ({"source": {"bind": {"mask": 1}}}, "VD2301", "the model takes only images"),
        ({"data": {"inputs": "images"}}, "VD2", "with the input mask of each image"),
        ({"source": {"bind": {"mask": "input:float32:1x8x8"}}}, "VD2102", "does not run on an image of 32x32"),
    ],
)
def test_a_recipe_that_does_not_go_together_is_refused_before_any_work(line, change, code, message):
    sets = []
    for section, values in change.items():
        sets += [f"--set={section}.{key}={json.dumps(value)}" for key, value in values.items()]
    with command_line(line.home, line.home / "store") as command:
        done = command("run", "recipe.yaml", "--model", FUNCTION, *sets, "-o", "x")
    assert done.returncode == 2 and message in done.stderr and code in done.stderr, done.stderr


def test_a_recipe_is_written_elsewhere_with_the_folder_of_inputs(line, tmp_path):
    recipe = load_recipe(line.home / "recipe.yaml", function=FUNCTION)
    assert recipe.data.inputs == str(line.home / "beside")
    (tmp_path / "r.yaml").write_text(recipe_text(recipe, tmp_path, "Mine."), encoding="utf-8")
    again = load_recipe(tmp_path / "r.yaml", function=FUNCTION)
    assert again.source.bind == recipe.source.bind and (tmp_path / again.data.inputs).resolve() == line.home / "beside"


def test_deploy_in_python_takes_inputs_with_its_images(line, module):
    given = vd.images(line.home / "images", "none", inputs=line.home / "beside")
    read = vd.model(module, bind={"mask": "input:float32:1x32x32"}, image_size=(SIDE, SIDE))
    made = vd.deploy(
        read,
        given,
        precision="fp32",
        targets=["onnxruntime-cpu"],
        min_agreement=70,
        calibration=8,
        duration=0.1,
        progress=False,
    )
    assert made.status == "pass"
    with made.load() as predictor:
        found = predictor.predict_with(line.images[0], {"mask": line.masks[0]}).top[0].index
    assert found == logits(module, line.images[:1], line.masks[:1])[0].argmax()
