"""Modules in memory, as others write them: what is read from them, every refusal, and by what stored work is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.references import reference
from vitdeploy.errors import CheckpointError, ExportError, UserCodeError
from vitdeploy.export.torch_onnx import export_graph
from vitdeploy.graph.io import serialised
from vitdeploy.models.external.module import from_module
from vitdeploy.models.external.program import save_program
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.pipeline.reference_model import find_reference_model, from_request, to_request
from vitdeploy.pipeline.stages.export import ExportConfig, export
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import PreprocessSpec

SIZE = (32, 48)


class Plain(nn.Module):
    """A convolutional stem before PyTorch's own encoder."""

    def __init__(self, classes=6, factor=1.0):
        super().__init__()
        self.factor = factor
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.BatchNorm2d(16), nn.ReLU())
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)

    def forward(self, image):
        tokens = self.stem(image).flatten(2).transpose(1, 2)
        return self.factor * self.head(self.encoder(tokens).mean(dim=1))


class TwoHeads(nn.Module):
    """A classifier that gives what it was trained with, too."""

    def __init__(self, kind="dict"):
        super().__init__()
        self.kind = kind
        self.stem = nn.Conv2d(1, 8, 8, 8)
        self.head, self.age = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, image):
        features = self.stem(image).mean(dim=(2, 3))
        both = {"logits": self.head(features), "age": self.age(features)}
        return both if self.kind == "dict" else tuple(both.values()) if self.kind == "tuple" else features


def spec(size=SIZE, channels=3):
    return PreprocessSpec(size, size, mean=(0.4,) * channels, std=(0.2,) * channels)


def plain(**arguments):
    torch.manual_seed(0)
    return Plain(**arguments)


def check_export(original):
    """The graph answers as the module does."""
    signature = original.signature
    graph = export_graph(
        original.module,
        name="own",
        preprocess=original.preprocess,
        image_size=signature.image_size,
        opset=20,
        batch=None,
        in_graph=False,
        task=signature.task,
        outputs=[output.name for output in signature.outputs],
    )
    image = torch.randn(3, signature.channels, *signature.image_size)
    with OnnxRuntimeRunner(serialised(graph), name="own") as runner:
        found = runner.infer({"image": image.numpy()})
    wanted = original.module(image)
    torch.testing.assert_close(torch.from_numpy(found[signature.outputs[0].name]), wanted, rtol=1e-3, atol=1e-5)


def test_a_module_is_copied_with_all_that_is_given_of_it():
    module = plain().half().train()
    labels = [f"class {number}" for number in range(6)]
    original = from_module(module, name="mine", preprocess=spec(), labels=labels)
    assert (original.name, original.family, original.labels) == ("mine", "module", tuple(labels))
    assert (original.signature.task, original.signature.image_size, original.preprocess) == (
        "classification",
        SIZE,
        spec(),
    )
    assert original.notes == ()
    assert module.training and module.head.weight.dtype == torch.float16
    assert not original.module.training and original.module(torch.zeros(2, 3, *SIZE)).dtype == torch.float32
    check_export(original)


def test_what_is_not_given_is_assumed_and_told():
    original = from_module(plain())
    assert (original.name, original.signature.image_size) == ("Plain", (224, 224))
    assert [note.partition(":")[0] for note in original.notes] == [
        "the module does not say how images are prepared",
        "the module does not say its image size",
    ]


def test_a_module_of_timm_says_size_and_preprocessing():
    timm = reference("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7)
    original = from_module(model)
    assert (original.signature.image_size, original.classes) == ((64, 64), 7)
    assert original.preprocess.mean == (0.5, 0.5, 0.5) and original.preprocess.resize == 71
    check_export(original)
    pooled = from_module(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=0))
    assert (pooled.signature.task, pooled.signature.outputs[0].name) == ("features", "features")


def test_of_two_heads_in_a_dict_the_logits_are_the_answer():
    original = from_module(TwoHeads(), preprocess=spec(channels=1), labels=list("abcde"))
    assert [(output.name, output.shape) for output in original.signature.outputs] == [("logits", ("batch", 5))]
    check_export(original)
    with pytest.raises(CheckpointError, match="returns something that vitdeploy has no task for") as raised:
        from_module(TwoHeads("tuple"), preprocess=spec(channels=1))
    assert raised.value.found == "for 2 images: tuple of float32 [2, 5], float32 [2, 3]"


def test_one_output_is_features_where_the_task_says_so():
    original = from_module(TwoHeads("features"), preprocess=spec(channels=1), task="features")
    assert (original.signature.task, original.signature.outputs[0].name) == ("features", "features")
    assert from_module(TwoHeads("features"), preprocess=spec(channels=1)).signature.task == "classification"


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserCodeError, match="is no model") as raised:
        from_module(Plain)
    assert raised.value.found == "the class Plain itself"
    with pytest.raises(CheckpointError, match="the labels do not fit Plain") as raised:
        from_module(plain(), preprocess=spec(), labels=["one"])
    assert (raised.value.found, raised.value.wanted) == ("1 labels", "one per class: 6")
    with pytest.raises(CheckpointError, match="the labels do not fit") as raised:
        from_module(TwoHeads("features"), preprocess=spec(channels=1), task="features", labels=["one"])
    assert raised.value.wanted == "none: it has no classes"
    with pytest.raises(CheckpointError, match="gives no answers of the task") as raised:
        from_module(plain(), preprocess=spec(), task="detection")
    assert raised.value.found == "classification: logits ['batch', 6]"
    with pytest.raises(CheckpointError, match="the preprocessing does not fit Plain") as raised:
        from_module(plain(), preprocess=spec(), image_size=(32, 32))
    assert raised.value.found == "crop 32x48"
    with pytest.raises(CheckpointError, match="does not run on an image"):
        from_module(plain(), preprocess=spec(channels=1))
    module = plain()
    module.cached = module.head.weight * 2
    with pytest.raises(UserCodeError, match="cannot be copied"):
        from_module(module, preprocess=spec())


# --- as a file --------------------------------------------------------------------------------------------------------


def modules():
    timm = reference("timm")
    torch.manual_seed(0)
    yield from_module(plain(), preprocess=spec(), labels=list("abcdef"))
    yield from_module(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7))
    yield from_module(TwoHeads("features"), preprocess=spec(channels=1), task="features")


def test_a_program_is_the_module_with_all_that_is_known_of_it(tmp_path):
    for number, original in enumerate(modules()):
        loaded = load_model(save_program(original, tmp_path / f"own{number}.pt2"))
        assert loaded.name == f"own{number}"
        for field in ("signature", "preprocess", "labels", "notes", "family"):
            assert getattr(loaded, field) == getattr(original, field)
        image = torch.randn(5, original.signature.channels, *original.signature.image_size)
        torch.testing.assert_close(loaded.module(image), original.module(image))


def test_another_process_runs_it_and_writes_the_same_bytes(tmp_path):
    code = """if True:
        import json, sys, torch
        from pathlib import Path
        from tests.models.external.test_module import from_module, plain, save_program, spec
        from vitdeploy.models.load import load_model
        from vitdeploy.pipeline.reference_model import from_request
        original = load_model(from_request(json.loads(sys.argv[1])))
        print(original.module(torch.ones(2, 3, 32, 48)).tolist())
        save_program(from_module(plain(), preprocess=spec()), Path(sys.argv[2]))
    """
    original = from_module(plain(), preprocess=spec())
    request = json.dumps(to_request(save_program(original, tmp_path / "own.pt2")))
    done = subprocess.run(
        [sys.executable, "-c", code, request, str(tmp_path / "again.pt2")],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), original.module(torch.ones(2, 3, *SIZE)))
    assert digest(tmp_path / "again.pt2") == digest(tmp_path / "own.pt2")


def digest(path):
    """As the pipeline has it in the keys of what it stores."""
    [value] = find_reference_model(Source(program=path)).digests.values()
    return value


def test_its_digest_follows_weights_and_code(tmp_path):
    def found(module, name="own.pt2"):
        return digest(save_program(from_module(module, preprocess=spec()), tmp_path / name).program)

    module = plain().train()
    same = found(module)
    assert same == found(plain())
    assert same != found(plain(factor=1 + 1e-6))
    with torch.no_grad():
        module.head.bias[0] += 1e-6
    assert same != found(module)


def test_the_pipeline_exports_it(tmp_path):
    source = save_program(from_module(plain(), preprocess=spec(), labels=list("abcdef")), tmp_path / "own.pt2")
    assert from_request(to_request(source)) == source
    found = find_reference_model(source)
    assert (found.name, found.family, found.classes, found.labels) == ("own", "module", 6, tuple("abcdef"))
    (tmp_path / "out").mkdir()
    facts = export(found, ExportConfig("own", 20, None, True), tmp_path / "out")
    assert all(row["max_relative_difference"] < 1e-4 for row in facts["parity"])


class Branching(Plain):
    def forward(self, image):
        return super().forward(image if image.sum() > 1e9 else image * 2)


class Drawing(Plain):
    def forward(self, image):
        return super().forward(image) + torch.rand(1)


@pytest.mark.parametrize(("kind", "told"), [(Branching, "cannot be traced"), (Drawing, "answers otherwise")])
def test_what_no_program_can_be_is_refused(kind, told, tmp_path):
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=told) as raised:
        save_program(from_module(kind(), preprocess=spec()), tmp_path / "own.pt2")
    assert "--model package.module:function" in raised.value.fix
    assert not (tmp_path / "own.pt2").exists()


def test_files_and_sizes_that_do_not_fit_a_program_are_refused(tmp_path):
    source = save_program(from_module(plain(), preprocess=spec()), tmp_path / "own.pt2")
    with pytest.raises(CheckpointError, match="is of one image size alone") as raised:
        load_model(Source(program=source.program, image_size=(64, 64)))
    assert raised.value.wanted == "32x48"
    torch.export.save(torch.export.export(nn.ReLU(), (torch.zeros(1),)), tmp_path / "other.pt2")
    (tmp_path / "text.pt2").write_text("no program")
    for name in ("other.pt2", "text.pt2", "absent.pt2"):
        with pytest.raises(CheckpointError, match="is no program that vitdeploy wrote"):
            load_model(Source(program=Path(tmp_path / name)))
