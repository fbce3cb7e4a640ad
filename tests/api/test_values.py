"""The values of the API: each is passed on without naming a file, shows itself, and is what the command line makes."""

import doctest
import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitdeploy as vd
from tests.conftest import ROOT, SMALL_MODEL
from vitdeploy.api.values import Reporter
from vitdeploy.data.folder import scan
from vitdeploy.errors import CheckpointError, InputError, TargetError, UnknownModelError, UserCodeError
from vitdeploy.runtime.preprocess import load_image

pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
TARGET = "onnxruntime-cpu"
SPEC = vd.Preprocess(32, (32, 32), "bicubic", (0.5,), (0.5,))


class Tiny(torch.nn.Module):
    """A module as somebody else would write it: a convolution, a transformer encoder, a mean, a head."""

    def __init__(self, width=32, classes=10):
        super().__init__()
        self.stem = torch.nn.Conv2d(1, width, 8, 8)
        layer = torch.nn.TransformerEncoderLayer(width, 2, 64, batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, image):
        tokens = self.stem(image).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


def tiny():
    torch.manual_seed(3)
    module = Tiny().eval()
    with torch.no_grad():
        module.head.weight.mul_(20)  # answers that are not nearly equal
        module.head.bias.sub_(module(-torch.ones(1, 1, 32, 32))[0])  # nor of one class for all images
    return module


@pytest.fixture(scope="module")
def small(workplace, small_checkpoint):
    return vd.model(SMALL_MODEL, checkpoint=small_checkpoint, preprocess=SPEC)


@pytest.fixture(scope="module")
def graph(small):
    return vd.export(small, progress=False)


@pytest.fixture(scope="module")
def calibration(digits):
    return digits / "calibration"


def shown(value):
    """What a notebook and a terminal show of it."""
    assert repr(value) == str(value)
    page = value._repr_html_()
    assert page.startswith("<div") and page.endswith("</div>")
    return str(value), page


def test_from_a_model_to_a_verified_and_measured_engine_without_naming_a_file(small, graph, calibration):
    assert "classification" in shown(small)[0]
    assert (graph.task, graph.preprocess, graph.file.name) == ("classification", SPEC, "model.onnx")
    optimized = vd.optimize(graph, progress=False)
    assert "largest difference" in shown(optimized)[0]
    assert str(optimized).endswith(f"\nin {optimized.folder}, until Python ends; folder= keeps it")
    int8 = vd.quantize(graph, calibration, TARGET, num_samples=16, progress=False)
    assert int8.int8 and int8.calibration_images == 16
    bundle = vd.compile(int8, TARGET, progress=False)
    assert [engine.artifact for engine in bundle.engines] == ["onnxruntime-cpu-int8"]
    found = vd.verify(bundle, small, calibration, min_agreement=10, progress=False)
    assert found.status in ("pass", "undecided") and found.drop is not None
    assert "agreement" in shown(found)[0]
    measured = vd.bench(bundle, small, scenarios=["single"], duration=0.1, progress=False)
    assert len(measured.latency_ms) == 2 and measured.ratios[0].metric == "latency"
    text, page = shown(measured)
    assert "p50 ms" in text and "<table" in page and "<svg" in page and "var(--" not in page
    with bundle.load() as predictor:
        assert predictor.predict(next(calibration.rglob("*.png"))).top


def test_images_in_memory_calibrate_to_the_same_bytes_as_their_folder(graph, calibration):
    samples, _ = scan(calibration, "none")
    chosen = [sample.path for sample in samples][:12]
    opened = [Image.open(path) for path in chosen]
    arrays = [np.asarray(Image.open(path)) for path in chosen]
    paths, pictures, pixels = (
        vd.quantize(graph, images, TARGET, num_samples=None, progress=False).file.read_bytes()
        for images in (chosen, opened, arrays)
    )
    assert paths == pictures == pixels


@pytest.fixture(scope="module")
def tiny_model(workplace):
    return vd.model(tiny(), preprocess=SPEC, labels=[str(digit) for digit in range(10)])


def test_a_budget_that_is_not_met_is_said_and_nothing_is_raised(graph, tiny_model, calibration):
    found = vd.verify(graph, graph, calibration, min_agreement=100, num_samples=10, progress=False)
    assert found.status == "undecided" and found.reasons
    other = vd.export(tiny_model, progress=False)
    assert vd.verify(other, graph, calibration, min_agreement=90, progress=False).status == "fail"


def test_a_module_in_memory_is_deployed_with_a_data_loader_and_its_bundle_answers_like_it(tiny_model, digits):
    module = tiny()
    samples, _ = scan(digits / "calibration", "folders")
    rows = []
    for sample in samples[::4]:
        pixels, _ = load_image(sample.path, SPEC)
        rows.append((torch.tensor(pixels).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5), sample.label))
    loader = torch.utils.data.DataLoader(rows, batch_size=5)
    made = vd.deploy(
        tiny_model,
        loader,
        targets=[TARGET],
        precision="fp32",
        calibration=16,
        min_agreement=0,
        duration=0.1,
        progress=False,
    )
    text, page = shown(made)
    assert made.status in ("pass", "undecided") and made.report.is_file() and "original" in text and "<svg" in page
    assert made.document.bench.row("original").provider.startswith("PyTorch eager")  # in a process of its own
    with made.load() as predictor, torch.no_grad():
        for sample in samples[:20]:
            pixels, _ = load_image(sample.path, SPEC)
            outputs = predictor.outputs([pixels])["logits"][0]
            image = torch.tensor(pixels).permute(2, 0, 1)[None].float().div(255).sub(0.5).div(0.5)
            np.testing.assert_allclose(outputs, module(image)[0].numpy(), atol=1e-4)


class Masked(Tiny):
    """The same with a second input: what is outside of a mask is not seen."""

    def forward(self, image, mask):
        return super().forward(torch.where(mask > 0, image, -1.0))


def test_a_module_with_a_bound_mask_is_deployed_in_int8(workplace, digits):
    torch.manual_seed(3)
    module, mask = Masked().eval(), np.ones((1, 32, 32), np.float32)
    mask[:, :, 16:] = 0
    with torch.no_grad():
        module.head.weight.mul_(20)
        module.head.bias.sub_(module(-torch.ones(1, 1, 32, 32), torch.ones(1, 1, 1, 1))[0])
    read = vd.model(module, preprocess=SPEC, bind={"mask": mask})
    how = {"calibration": 32, "min_agreement": 0, "duration": 0.1, "progress": False}
    made = vd.deploy(read, digits, targets=[TARGET], **how)
    assert "the input mask is bound to mask.npy: float32 [batch, 1, 32, 32]" in made.document.model.notes
    assert "mask=mask.npy" in made.document.provenance.source.sha256
    with made.load(f"{TARGET}-int8") as predictor, torch.no_grad():  # whichever is fastest
        assert len(predictor.runner.inputs) == 1
        agreed, errors, sizes, samples = 0, [], [], scan(digits / "evaluation", "folders")[0][::16]
        for sample in samples:
            pixels, _ = load_image(sample.path, SPEC)
            image = torch.tensor(pixels).permute(2, 0, 1)[None].float().div(255).sub(0.5).div(0.5)
            right = module(image, torch.from_numpy(mask)[None])[0].numpy()
            answer = predictor.outputs([pixels])["logits"][0]
            agreed += int(answer.argmax() == right.argmax())
            errors.append(np.abs(answer - right).max())
            sizes.append(np.abs(right).max())
        assert agreed >= 0.9 * len(samples) and max(errors) < 0.1 * max(sizes)


def test_a_module_of_another_process_is_the_same(tiny_model):
    """What measures the original loads it with its code, which no file of that process has."""
    code = """if True:
        import json, sys, torch
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        sys.modules["tests"] = None
        from vitdeploy.models.external.module import open_module
        original = open_module(Path(sys.argv[2]))
        print(json.dumps(original.module(torch.ones(1, 1, 32, 32)).tolist()[0]))
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, ROOT, tiny_model.source.module],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        own = tiny()(torch.ones(1, 1, 32, 32))[0]
    np.testing.assert_allclose(np.array(json.loads(done.stdout)), own.numpy(), atol=1e-5)


def test_its_stored_work_is_found_again_and_follows_weights_and_code(workplace):
    class Doubled(Tiny):
        def forward(self, image):
            return 2 * super().forward(image)

    def digests(module):
        return vd.model(module, preprocess=SPEC).reference.digests

    module = tiny()
    first = digests(module)
    assert first == digests(tiny())
    other = Doubled()
    other.load_state_dict(module.state_dict())
    assert set(first.values()) != set(digests(other.eval()).values())
    with torch.no_grad():
        module.head.bias.add_(1e-3)
    assert first != digests(module)


def test_an_interrupt_leaves_nothing_half_written(small, tmp_path):
    class Interrupted(Reporter):
        def progress(self, text, done, total):
            if text == "compare with the original":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vd.export(small, tmp_path / "out", progress=Interrupted(quiet=True))
    assert list(tmp_path.iterdir()) == []


# --- errors: the same classes and texts as on the command line --------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda g: vd.model("vit_base_patch16_225"), UnknownModelError, "vit_base_patch16_225"),
        (lambda g: vd.model(SMALL_MODEL, task="features"), CheckpointError, "cannot be used for the task"),
        (
            lambda g: vd.model(Tiny(), checkpoint="x.pt"),
            InputError,
            "a module in memory takes no further source arguments",
        ),
        (lambda g: vd.model(7), InputError, "source is not a model"),
        (lambda g: vd.model(Tiny), UserCodeError, "the object is not a model"),
        (lambda g: vd.model(SMALL_MODEL, labels=["a\nb"]), InputError, "a class name contains a line break"),
        (lambda g: vd.model(Tiny(), preprocess=SPEC, labels=["a"]), CheckpointError, "does not fit"),
        (lambda g: vd.optimize(g, without=["everything"]), InputError, "no rewrite is called everything"),
        (lambda g: vd.quantize(g, "x", "openvino"), TargetError, "unknown target 'openvino'"),
        (lambda g: vd.quantize(g, [], TARGET, min_agreement=9.0), InputError, "needs precision mixed"),
        (lambda g: vd.quantize(g, [], "tensorrt", vnni=True), InputError, "apply to CPU targets"),
        (lambda g: vd.bench(), InputError, "no artifact to measure"),
        (lambda g: vd.bisect(tiny(), g, "."), InputError, "a model in memory has no graph"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(graph, call, error, says):
    with pytest.raises(error, match=says):
        call(graph)


def test_a_module_that_cannot_be_given_to_other_processes_says_so():
    module = Tiny()
    module.log = Path(__file__).open()  # noqa: SIM115 - what users leave in attributes
    with pytest.raises(UserCodeError, match="Tiny cannot be"):
        vd.model(module, preprocess=SPEC)
    module.log.close()


# --- the package itself -----------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_in_the_stub():
    stub = (ROOT / "vitdeploy" / "__init__.pyi").read_text()
    for name in vd.__all__:
        assert getattr(vd, name) is not None
        assert f" {name}\n" in stub or f"\n{name}:" in stub or f"\n{name} =" in stub
    with pytest.raises(AttributeError, match="no attribute 'deplyo'"):
        vd.deplyo  # noqa: B018


def test_importing_it_loads_nothing():
    code = "import sys; before = set(sys.modules); import vitdeploy; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "numpy" not in done.stdout and "torch" not in done.stdout and "importlib.metadata" not in done.stdout


MODULES = ("model", "images", "graph", "quantize", "verify", "bench", "deploy")


@pytest.fixture(scope="module")
def one_export():
    """Most examples begin with the float graph of one model, which is exported once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vd, "export", functools.cache(vd.export))
        yield


@pytest.mark.usefixtures("one_export", "workplace")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(small, digits, name):
    module = importlib.import_module(f"vitdeploy.api.{name}")
    found = doctest.testmod(module, extraglobs={"MODEL": small, "DIGITS": digits / "calibration"}, verbose=False)
    assert found.attempted and not found.failed
