"""docs/results/compatibility/outputs.md: what outputs of others' models mean, from the file to the answer of an engine.

The value that is right is the file's on ONNX Runtime, or the module's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import vitdeploy as vd
from tests.compatibility_page import Page
from tests.graph.builder import Builder, values
from tests.references import reference
from vitdeploy.errors import VitdeployError
from vitdeploy.runtime.tasks.tensors import Tensors

SIDE, CLASSES, WIDTH = 8, 5, 16
SPEC = vd.Preprocess(SIDE, (SIDE, SIDE), mean=(0.0,) * 3, std=(1.0,) * 3)
AS_LOGITS, AS_SCORES, AS_NUMBERS = "softmax added", "no softmax added", ""
AS_SIGMOIDS, AS_PROBABILITIES = "sigmoid added", "no sigmoid added"


@dataclass(frozen=True)
class Case:
    """What a model returns; the task that it is taken for; and the answer."""

    what: str
    task: str
    answer: str
    make: Callable
    names: tuple[str, ...] = ("output",)
    note: str = ""
    last: bool = False  # channels


def logits(b, image, width=CLASSES, bias=True):
    pooled = b.add("ReduceMean", b.add("Conv", image, values(WIDTH, 3, 3, 3)), axes=[2, 3], keepdims=0)
    product = b.add("MatMul", pooled, 3 * values(WIDTH, width, seed=1))
    return b.add("Add", product, values(width, seed=2)) if bias else product


def softmax_written_out(b, image):
    found = logits(b, image)
    powers = b.add("Exp", b.add("Sub", found, b.add("ReduceMax", found, axes=[1])))
    return b.add("Div", powers, b.add("ReduceSum", powers, np.array([1])))


def two_softmaxes(b, image):
    found = logits(b, image)
    parts = (b.add("Softmax", b.add("Mul", found, np.float32(factor)), axis=1) for factor in (0.3, 1))
    return b.add("Mul", b.add("Add", *parts), np.float32(0.5))


def percent(operator):
    return lambda b, image: b.add("Mul", b.add(operator, logits(b, image)), np.float32(100))


def sigmoid_written_out(b, image):
    return b.add("Div", np.float32(1), b.add("Add", np.float32(1), b.add("Exp", b.add("Neg", logits(b, image)))))


def limited(b, image):
    scores = b.add("Softmax", logits(b, image), axis=-1)
    return b.add("Div", b.add("Clip", scores, np.float32(1e-7), np.float32(1 - 1e-7)), np.float32(0.5))


def two_sides(b, image):
    yes = b.add("Sigmoid", logits(b, image, 1))
    return b.add("Concat", b.add("Sub", np.float32(1), yes), yes, axis=1)


def squeezed(b, image):
    scores = b.add("Softmax", b.add("Reshape", logits(b, image), np.array([-1, CLASSES, 1, 1])), axis=1)
    return b.add("Identity", b.add("Squeeze", scores, np.array([2, 3])))


def normalised(b, image):
    found = logits(b, image)
    return b.add("Div", found, b.add("Clip", b.add("ReduceL2", found, axes=[1]), np.float32(1e-12)))


def with_age(b, image):
    return logits(b, image), b.add("ReduceMean", logits(b, image, 2), axes=[1])


def maps(channels):
    return lambda b, image: b.add("Conv", image, values(channels, 3, 1, 1))


CASES = (
    Case("logits, by name", "classification", AS_LOGITS, logits, ("logits",)),
    Case("logits without a name", "classification", AS_LOGITS, logits, note="is assumed to be the logits"),
    Case("Softmax", "classification", AS_SCORES, lambda b, image: b.add("Softmax", logits(b, image), axis=-1),
         note="no second softmax"),
    Case("Softmax, channels last", "classification", AS_SCORES,
         lambda b, image: b.add("Softmax", logits(b, image), axis=-1), ("predictions",), "no second softmax", True),
    Case("Softmax before Squeeze and Identity", "classification", AS_SCORES, squeezed, note="no second softmax"),
    Case("Exp, ReduceSum, Div", "classification", AS_SCORES, softmax_written_out, note="no second softmax"),
    Case("the mean of two softmaxes", "classification", AS_SCORES, two_softmaxes, note="no second softmax"),
    Case("a softmax in percent", "classification", AS_SCORES, percent("Softmax"), note="no second softmax"),
    Case("a clipped softmax, doubled", "classification", AS_SCORES, limited, note="no second softmax"),
    Case("1 - p and p, with a sigmoid p", "classification", AS_SCORES, two_sides, note="no second softmax"),
    Case("LogSoftmax", "classification", AS_LOGITS, lambda b, image: b.add("LogSoftmax", logits(b, image), axis=-1)),
    Case("Sigmoid", "multi-label", AS_PROBABILITIES, lambda b, image: b.add("Sigmoid", logits(b, image)),
         note="a sigmoid"),
    Case("1 / (1 + Exp(-x))", "multi-label", AS_PROBABILITIES,
         sigmoid_written_out, note="a sigmoid"),
    Case("Sigmoid of one logit", "binary", AS_PROBABILITIES, lambda b, image: b.add("Sigmoid", logits(b, image, 1)),
         note="the probability of yes"),
    Case("Sigmoid in percent", "tensors", AS_NUMBERS, percent("Sigmoid"), note="a scaled sigmoid"),
    Case("one logit", "tensors", AS_NUMBERS, lambda b, image: logits(b, image, 1), ("logits",), "one number per image"),
    Case("one number, without an axis", "tensors", AS_NUMBERS,
         lambda b, image: b.add("Squeeze", logits(b, image, 1), np.array([1])), ("age",), "one number per image"),
    Case("angles, by name", "tensors", AS_NUMBERS, lambda b, image: logits(b, image, 3), ("pose",), "measures"),
    Case("logits and another head", "tensors", AS_NUMBERS, with_age, ("logits", "age"), "in addition to logits"),
    Case("logits and hidden states", "classification", AS_LOGITS,
         lambda b, image: (logits(b, image), maps(4)(b, image)), ("logits", "hidden_states"), "left out"),
    Case("an embedding, by name", "features", AS_NUMBERS, logits, ("embedding",), "an embedding"),
    Case("an embedding, by MXNet's name", "features", AS_NUMBERS, logits, ("fc1",), "an embedding"),
    Case("a vector of length 1", "features", AS_NUMBERS, normalised, note="an embedding"),
    Case("a linear without a bias", "features", AS_NUMBERS, lambda b, image: logits(b, image, bias=False),
         note="an embedding"),
    Case("one map", "tensors", AS_NUMBERS, maps(1), note="fit no known task"),
    Case("two maps", "tensors", AS_NUMBERS, maps(2), note="fit no known task"),
)  # fmt: skip


class Model(nn.Module):
    """`returned` makes what it returns of its layers, an image and the pooled features."""

    def __init__(self, returned, width=CLASSES):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.maps = nn.Conv2d(3, WIDTH, 3), nn.Conv2d(3, width, 1)
        self.head, self.embedding, self.age = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width), nn.Linear(WIDTH, 1)
        self.returned = returned
        with torch.no_grad():
            self.head.weight.mul_(20)

    def forward(self, image):
        return self.returned(self, image, self.stem(image).mean((2, 3)))


MODULES = (
    (Case("`logits.softmax(-1)`", "classification", AS_SCORES, lambda m, x, f: m.head(f).softmax(-1), note="no second"),
     CLASSES),
    (Case("`{'logits': softmax}`", "classification", AS_SCORES, lambda m, x, f: {"logits": m.head(f).softmax(1)},
          note="no second"), CLASSES),
    (Case("`100 * logits.softmax(-1)`", "classification", AS_SCORES, lambda m, x, f: 100 * m.head(f).softmax(-1),
          note="no second"), CLASSES),
    (Case("`logits.sigmoid() * 100`", "tensors", AS_NUMBERS, lambda m, x, f: m.head(f).sigmoid() * 100,
          note="a scaled sigmoid"), CLASSES),
    (Case("`(logits.sigmoid(),)`", "multi-label", AS_PROBABILITIES, lambda m, x, f: (m.head(f).sigmoid(),),
          note="a sigmoid"), CLASSES),
    (Case("`logit.sigmoid()[:, 0]`", "binary", AS_PROBABILITIES, lambda m, x, f: m.head(f).sigmoid()[:, 0],
          note="the probability of yes"), 1),
    (Case("`[b, 1]`", "tensors", AS_NUMBERS, lambda m, x, f: m.head(f), note="one number per image"), 1),
    (Case("`[b]`", "tensors", AS_NUMBERS, lambda m, x, f: m.head(f)[:, 0], note="one number per image"), 1),
    (Case("`{'logits': ..., 'age': ...}`", "tensors", AS_NUMBERS,
          lambda m, x, f: {"logits": m.head(f), "age": m.age(f)}, note="in addition to logits"), CLASSES),
    (Case("`F.normalize(...)`", "features", AS_NUMBERS, lambda m, x, f: nn.functional.normalize(m.head(f)),
          note="an embedding"), CLASSES),
    (Case("`self.embedding(...)`", "features", AS_NUMBERS, lambda m, x, f: m.embedding(f), note="an embedding"), 128),
    (Case("`self.head(...)`", "classification", AS_LOGITS, lambda m, x, f: m.head(f)), CLASSES),
    (Case("`[b, 1, h, w]`", "tensors", AS_NUMBERS, lambda m, x, f: m.maps(x), note="fit no known task"), 1),
    (Case("`[b, 2, h, w]`", "tensors", AS_NUMBERS, lambda m, x, f: m.maps(x), note="fit no known task"), 2),
)  # fmt: skip
FOLDERS = (
    ("ViT", {"problem_type": "multi_label_classification", "num_labels": 3}, "problem_type", "multi-label"),
    ("DeiT", {"problem_type": "multi_label_classification", "num_labels": 3}, "problem_type", "multi-label"),
    ("ViT", {"problem_type": "regression", "id2label": {0: "roll", 1: "pitch"}}, "problem_type", "regression"),
    ("Beit", {"num_labels": 1}, "one number per image", "tensors"),
)
WRAPPER = "timm in transformers' wrapper, multi_label_classification"
FOLDER_ROWS = {f"transformers' {row[0]}, {row[1].get('problem_type', 'one label')}": row for row in FOLDERS}
PAGE = Page(
    "outputs",
    """# Outputs

The task that vitdeploy takes a model for, from the end of its graph, the names of its outputs or its config, and what
it adds. Numbers of `tensors`, `features` and `regression` stay unchanged. Every assumption is a note; to overrule it,
set the task (`--task`, `source.task`, `task=`). `tests/compatibility/test_meaning_outputs.py` writes this page.
""",
    ("output", "taken for"),
    tuple(
        [f"ONNX: {case.what}" for case in CASES]
        + [f"module: {case.what}" for case, _ in MODULES]
        + [f"folder: {name}" for name in (*FOLDER_ROWS, WRAPPER)]
    ),
)


def taken_for(task, answer):
    return f"{task}, {answer}" if answer else task


@pytest.fixture
def page(request):
    return lambda *cells: PAGE.check(cells, write=request.config.getoption("--write-compatibility"))


def onnx_file(folder, make, names=("output",), last=False):
    """A file with these outputs, and what it gives for uint8 pixels [side, side, 3]."""
    b = Builder(17)
    shape = [SIDE, SIDE, 3] if last else [3, SIDE, SIDE]
    image = b.input("pixel_values", ["n", *shape])
    found = make(b, b.add("Transpose", image, perm=[0, 3, 1, 2]) if last else image)
    outputs = found if isinstance(found, tuple) else (found,)
    for node in b.nodes:
        for part in (node.input, node.output):
            for index, name in enumerate(part):
                if name in outputs:
                    part[index] = names[outputs.index(name)]
    proto = b.model(*names, rank=2)
    file = folder / "model.onnx"
    onnx.save(proto, str(file))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def answer(pixels):
        scaled = pixels[None].astype(np.float32) / 255
        feed = scaled if last else scaled.transpose(0, 3, 1, 2)
        return dict(zip(names, session.run(None, {"pixel_values": feed}), strict=True))

    return file, answer


def pictures(count=3):
    return np.random.default_rng(5).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def deployed(read, target="onnxruntime-cpu"):
    """The predictor of a model's float engine."""
    return vd.compile(vd.export(read, progress=False), target, progress=False).load()


def scores_of(found):
    return np.array([each.score for each in sorted(found.top, key=lambda each: each.index)])


def softmax(array):
    powers = np.exp(array.astype(np.float64) - array.max())
    return powers / powers.sum()


def check_answer(case, predictor, answer):
    with predictor:
        for pixels in pictures():
            found, right = predictor.predict(pixels), answer(pixels)
            first = next(iter(right.values()))[0]
            if case.task == "classification":
                expected = first / first.sum() if case.answer == AS_SCORES else softmax(first)
                np.testing.assert_allclose(scores_of(found), expected, atol=2e-6)
            elif case.task == "multi-label":
                shares = first if case.answer == AS_PROBABILITIES else 1 / (1 + np.exp(-first.astype(np.float64)))
                np.testing.assert_allclose([each.score for each in found.scores], shares, atol=2e-6)
            elif case.task == "binary":
                np.testing.assert_allclose(found.score, first.reshape(()), atol=2e-6)
            elif case.task == "features":
                np.testing.assert_allclose(found.vector, first, rtol=1e-4, atol=1e-5)
            else:
                assert isinstance(found, Tensors) and len(found.outputs) == len(right)
                for ours, theirs in zip(found.outputs.values(), right.values(), strict=True):
                    np.testing.assert_allclose(ours, theirs[0], rtol=1e-4, atol=1e-5)


def check_notes(case, read):
    begins = ("outputs: ", "the outputs are", "the outputs fit")
    notes = [note for note in read.reference.notes if note.startswith(begins)]
    assert (read.task, [case.note in note for note in notes]) == (case.task, [True] if case.note else [])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_an_output_of_an_onnx_file_is_what_its_graph_shows(case, tmp_path, page):
    file, answer = onnx_file(tmp_path, case.make, case.names, case.last)
    read = vd.model(file)
    check_notes(case, read)
    check_answer(case, deployed(read, "openvino-cpu" if case.last else "onnxruntime-cpu"), answer)
    page(f"ONNX: {case.what}", taken_for(case.task, case.answer))


@pytest.mark.parametrize(("case", "width"), MODULES, ids=lambda value: getattr(value, "what", ""))
def test_an_output_of_a_module_is_what_its_run_shows(case, width, page):
    module = Model(case.make, width).eval()
    read = vd.model(module, preprocess=SPEC)
    check_notes(case, read)

    def answer(pixels):
        with torch.no_grad():
            found = module(torch.tensor(pixels[None].astype(np.float32) / 255).permute(0, 3, 1, 2))
        named = found if isinstance(found, dict) else {"output": found[0] if isinstance(found, tuple) else found}
        return {name: tensor.numpy() for name, tensor in named.items()}

    if case.answer in (AS_SCORES, AS_PROBABILITIES) or "age" in case.what:
        check_answer(case, deployed(read), answer)
    page(f"module: {case.what}", taken_for(case.task, case.answer))


@pytest.mark.parametrize("name", FOLDER_ROWS)
def test_a_config_says_that_outputs_are_no_logits(name, tmp_path, page):
    transformers = reference("transformers")
    kind, told, note, task = FOLDER_ROWS[name]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(image_size=SIDE, patch_size=4, **sizes, **told)
    torch.manual_seed(0)
    module = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    module.save_pretrained(tmp_path)
    read = vd.model(f"hf:{tmp_path}")
    answer = AS_SIGMOIDS if task == "multi-label" else AS_NUMBERS
    check_notes(Case(name, task, answer, logits, note=note), read)
    assert vd.model(module).task == task  # in memory, too
    with pytest.raises(VitdeployError, match="cannot be used for the task"):
        vd.model(f"hf:{tmp_path}", task="classification")
    page(f"folder: {name}", taken_for(task, answer))


def test_a_wrapper_of_timm_says_it_too_and_so_does_a_config_beside_an_onnx_file(tmp_path, page):
    timm = reference("timm")
    from safetensors.torch import save_file

    arguments = {"img_size": SIDE, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments, "num_classes": 3}
    config |= {"problem_type": "multi_label_classification", "model_type": "timm_wrapper"}
    module = timm.create_model(config["architecture"], **arguments)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    case = Case(WRAPPER, "multi-label", AS_SIGMOIDS, logits, note="problem_type")
    check_notes(case, vd.model(f"hf:{tmp_path}"))
    file, answer = onnx_file(tmp_path, logits, ("logits",))
    read = vd.model(file)
    check_notes(case, read)
    check_answer(case, deployed(read), answer)
    with pytest.raises(VitdeployError, match="cannot be used for the task"):
        vd.model(file, task="classification")
    page(f"folder: {WRAPPER}", taken_for(case.task, case.answer))


def test_labels_beside_a_file_make_a_bare_output_logits(tmp_path):
    file, _ = onnx_file(tmp_path, lambda b, image: logits(b, image, bias=False))
    assert vd.model(file).task == "features"
    with pytest.raises(VitdeployError, match=r"has labels, but .* has no classes"):
        vd.model(file, labels=list("abcde"))
    assert vd.model(file, labels=list("abcde"), task="classification").task == "classification"
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    assert (vd.model(file).task, vd.model(file).labels) == ("classification", tuple("abcde"))
    (tmp_path / "other").mkdir()
    assumed, _ = onnx_file(tmp_path / "other", logits)
    assert any("is assumed to be the logits" in note for note in vd.model(assumed).reference.notes)
    known = vd.model(assumed, labels=list("abcde")).reference.notes
    assert not any("is assumed to be the logits" in note for note in known)


def test_a_head_that_differs_is_compared_or_said_to_be_left_out(tmp_path):
    """Two files with the same logits, and an age of the other sign."""
    files = []
    for name, sign in (("a", 1), ("b", -1)):
        (tmp_path / name).mkdir()

        def make(b, image, sign=sign):
            return logits(b, image), b.add("Mul", logits(b, image, 1), np.float32(sign))

        files.append(onnx_file(tmp_path / name, make, ("logits", "age"))[0])
    images = list(pictures(8))
    kept = vd.verify(vd.export(vd.model(files[0]), progress=False), vd.model(files[1]), images, progress=False)
    assert "the graph differs" in str(kept) and "age: signal to noise -6.0 dB" in str(kept)
    chosen = [vd.model(file, task="classification") for file in files]
    assert "outputs: left out, and not compared: age" in chosen[1].reference.notes
    left = vd.verify(vd.export(chosen[0], progress=False), chosen[1], images, progress=False)
    assert "the same function" in str(left) and str(left).endswith("outputs: left out, and not compared: age")


@pytest.mark.parametrize(
    ("make", "found"),
    [(lambda b, image: b.add("Sigmoid", logits(b, image)), "a sigmoid"), (lambda b, i: logits(b, i, 1), "one number")],
)
def test_what_is_no_logits_is_not_taken_for_logits_where_that_is_asked_for(make, found, tmp_path):
    file, _ = onnx_file(tmp_path, make)
    with pytest.raises(VitdeployError, match="cannot be used for the task") as caught:
        vd.model(file, task="classification")
    assert found in caught.value.found


def masked(b, image):
    """Logits of an image under a mask, float [n, 1, side, side], times a temperature, float []."""
    seen = b.add("Mul", image, b.input("mask", ["n", 1, SIDE, SIDE]))
    return b.add("Div", logits(b, seen), b.input("temperature", []))


def test_further_inputs_are_bound_to_a_number_or_a_file(tmp_path):
    b = Builder(17)
    scores = masked(b, b.input("pixel_values", ["n", 3, SIDE, SIDE]))
    file = tmp_path / "model.onnx"
    onnx.save(b.model(scores, rank=2), str(file))
    with pytest.raises(VitdeployError, match="does not take one image") as caught:
        vd.model(file)
    assert caught.value.fix.startswith("vitdeploy export FILE --bind NAME=VALUE")
    mask = np.random.default_rng(1).integers(0, 2, (1, SIDE, SIDE)).astype(np.float32)
    np.save(tmp_path / "mask.npy", mask)
    np.savez(tmp_path / "both.npz", mask=mask[None], other=mask)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for value, told in ((tmp_path / "mask.npy", "mask.npy"), (tmp_path / "both.npz", "both.npz"), (1, "1")):
        read = vd.model(file, bind={"mask": value, "temperature": 2.0})
        assert f"the input mask is bound to {told}" in read.reference.notes
        assert "the input temperature is bound to 2.0" in read.reference.notes
        graph = vd.export(read, progress=False)
        assert f"the input mask is bound to {told}" in vd.model(graph.file).reference.notes  # the file says so itself
        with vd.compile(graph, "onnxruntime-cpu", progress=False).load() as predictor:
            for pixels in pictures(2):
                image = (pixels[None].astype(np.float32) / 255).transpose(0, 3, 1, 2)
                feed = {"mask": mask[None] if told != "1" else np.ones((1, 1, SIDE, SIDE), np.float32)}
                feed |= {"pixel_values": image, "temperature": np.array(2, np.float32)}
                [right] = session.run(None, feed)
                np.testing.assert_allclose(scores_of(predictor.predict(pixels)), softmax(right[0]), atol=2e-6)
    keys = [json.dumps(vd.model(file, bind={"mask": value, "temperature": 2}).reference.identity()) for value in (0, 1)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ({"other": 1, "temperature": 1, "mask": 1}, "no input 'other' to bind"),
        ({"mask": [1, 2], "temperature": 1}, "does not fit the input 'mask'"),
        ({"mask": "a lot", "temperature": 1}, "invalid value for the input mask"),
        ({"mask": "missing.npy", "temperature": 1}, "no file at missing.npy"),
        ({"mask": 1}, "does not take one image"),
    ],
)
def test_a_value_that_does_not_fit_an_input_is_refused_by_name(bind, message, tmp_path):
    b = Builder(17)
    scores = masked(b, b.input("pixel_values", ["n", 3, SIDE, SIDE]))
    onnx.save(b.model(scores, rank=2), str(tmp_path / "model.onnx"))
    with pytest.raises(VitdeployError, match=message):
        vd.model(tmp_path / "model.onnx", bind=bind)
    with pytest.raises(VitdeployError, match="has no further inputs to bind"):
        vd.model("vit_w32d2h2_patch8_32", bind={"mask": 1})
