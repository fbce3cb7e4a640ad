"""A module with a placement's quantizers: it gives the graph's answers, trains, and becomes the same graph again."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitdeploy as vd
from tests.qat.conftest import PREPROCESS, TARGETS
from vitdeploy import qat
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.qat.trained import placed_file
from vitdeploy.runtime.preprocess import normalise


@pytest.fixture(scope="module")
def images(digits):
    """uint8 [32, 32, 32, 1] and their classes."""
    files = sorted((digits / "training").glob("*/*.png"))[::32][:32]
    pixels = [np.asarray(Image.open(file).convert("L").resize((32, 32))) for file in files]
    return np.stack(pixels)[..., None], torch.tensor([int(file.parent.name) for file in files])


@pytest.fixture(scope="module")
def trained(prepared, images):
    """After some steps of the user's own loop."""
    found, (pixels, labels) = {}, images
    tensors = torch.from_numpy(np.ascontiguousarray(normalise(pixels, PREPROCESS)))
    for target, module in prepared.items():
        torch.manual_seed(0)
        own = copy.deepcopy(module).train()
        optimizer = torch.optim.AdamW(own.parameters(), lr=2e-3)
        for _ in range(6):
            loss = nn.functional.cross_entropy(own(tensors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found[target] = own.eval()
    return found


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return {target: qat.export(module, folder / target) for target, module in trained.items()}


def constants(graph):
    model = load_graph(graph.file)
    return {str(each.name): each.const_value.numpy() for each in model.graph.initializers.values()}


def nodes(graph):
    return [(node.op_type, str(node.name)) for node in load_graph(graph.file).graph]


def on_runtime(bundle, pixels):
    with bundle.load() as predictor:
        return predictor.runner.infer({"image": pixels[:1]})["logits"]


@pytest.mark.parametrize("target", TARGETS)
def test_untrained_it_is_the_graph_with_all_its_integers(prepared, placed, net, target):
    before = {name: each.clone() for name, each in net.state_dict().items()}
    again, expected = constants(qat.export(prepared[target])), constants(placed[target])
    assert set(again) == set(expected)
    copies = "blocks.0.fc2"  # whose copies the placement rounds each by itself
    for name, array in expected.items():
        if array.dtype == np.int8 and copies in name and array.shape[0] > 256:
            assert np.abs(again[name].astype(int) - array).max() <= 1
        elif array.dtype in (np.int8, np.uint8):
            assert np.array_equal(again[name], array), name
        elif array.dtype == np.float32:
            assert np.allclose(again[name], array, rtol=1e-5, atol=1e-6 * np.abs(array).max()), name
    assert all(torch.equal(net.state_dict()[name], each) for name, each in before.items())


def test_copies_of_hidden_channels_are_among_what_these_tests_read(placed):
    shapes = {each.shape for target in TARGETS for name, each in constants(placed[target]).items() if "fc2" in name}
    assert any(shape and shape[0] > 256 for shape in shapes)


@pytest.mark.parametrize("target", TARGETS)
def test_trained_it_gives_what_the_runtime_gives(trained, exported, placed, images, target):
    assert nodes(exported[target]) == nodes(placed[target])
    assert exported[target].int8 == placed[target].int8
    pixels = images[0]
    with torch.no_grad():
        expected = trained[target](torch.from_numpy(np.ascontiguousarray(normalise(pixels[:1], PREPROCESS)))).numpy()
    pytest.importorskip(target.split("-")[0])
    bundle = vd.compile(exported[target], target, split_rows="none", progress=False)
    found = on_runtime(bundle, pixels)
    assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)
    assert placed_file(bundle, None) == placed_file(bundle.folder, target) == bundle.folder / bundle.engines[0].graph


@pytest.mark.parametrize("target", TARGETS)
def test_training_moves_steps_weights_and_norms_and_so_the_graph(exported, placed, trained, target):
    before, after = constants(placed[target]), constants(exported[target])
    integers = [name for name, each in before.items() if each.dtype == np.int8 and each.ndim == 2]
    assert all((before[name] != after[name]).any() for name in integers)
    scales = [name for name in before if "norm1" in name and name.endswith(".scale")]
    assert scales and all(before[name] != after[name] for name in scales)
    moved = qat.steps(trained[target])
    frozen = [name for name, each in moved.items() if not each.requires_grad]
    assert all("patch" in name for name in frozen) and all(each.any() for name, each in moved.items() if "norm" in name)


def test_a_state_dict_brings_what_was_learned_into_another_copy(prepared, trained, images, tmp_path):
    module, learned = copy.deepcopy(prepared[TARGETS[0]]), trained[TARGETS[0]]
    image = torch.from_numpy(np.ascontiguousarray(normalise(images[0][:4], PREPROCESS)))
    module.load_state_dict(learned.state_dict())
    torch.save(learned, tmp_path / "whole.pt")  # the whole module, as other processes of a training get it
    for other in (module, torch.load(tmp_path / "whole.pt", weights_only=False)):
        with torch.no_grad():
            assert torch.equal(other.eval()(image), learned(image))
    assert qat.steps(other).keys() == qat.steps(learned).keys()


def test_parameters_keep_their_names_and_the_module_its_training_mode(net, placed, prepared):
    own = prepared[TARGETS[0]]
    assert set(net.state_dict()) <= set(own.state_dict())
    own.train()
    image = torch.randn(2, 1, 32, 32)
    assert not torch.equal(own(image), own(image))  # dropout
    own.eval()
    assert torch.equal(own(image), own(image))


def test_frozen_layers_stay(net, placed):
    module = copy.deepcopy(net)
    module.blocks[0].requires_grad_(False)
    own = qat.prepare(module, placed[TARGETS[0]])
    inside = {name: each.requires_grad for name, each in own.blocks[0].named_parameters()}
    assert not any(inside.values()) and any("log_ratio" in name for name in inside)
    assert all(each.requires_grad for each in own.blocks[1].parameters())


def test_a_layer_whose_input_the_runtime_quantizes_trains_its_weights(net, placed, tmp_path):
    layer, model = "model.blocks.0.fc1", load_graph(placed["openvino-cpu"].file)
    node = next(node for node in model.graph if node.name == f"{layer}/MatMul")
    node.replace_input_with(0, node.inputs[0].producer().inputs[0].producer().inputs[0])
    drop_unused(model)
    save_graph(model, tmp_path / "dynamic.onnx")
    prepared = qat.prepare(net, tmp_path / "dynamic.onnx")
    again = qat.export(prepared)
    assert again.dynamic == (layer,) and set(again.int8) == set(placed["openvino-cpu"].int8)
    before, after = (constants(each)[f"{layer}.weight.int8"] for each in (placed["openvino-cpu"], again))
    assert np.array_equal(before, after)
    steps = [name for name in qat.steps(prepared) if "blocks.0.fc1" in name]
    assert len(steps) == 1 and "weight" in steps[0]  # no step of what it reads
    with torch.no_grad():
        dict(prepared.named_parameters())["blocks.0.fc1.weight"].mul_(torch.rand(256, 1) + 0.5)
    assert (constants(qat.export(prepared))[f"{layer}.weight.int8"] != before).any()
