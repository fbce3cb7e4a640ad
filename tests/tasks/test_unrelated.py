"""Two models that have nothing to do with each other pass nothing: no gate, no golden check, no canary; of any task."""

import typing

import pytest

import vitdeploy as vd
from tests.conftest import REVERSE
from tests.sabotage import require_unproven
from tests.workflows.dense_graphs import HEADS, OTHERS, graph, picture
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import write_bundle
from vitdeploy.errors import AnswersError
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.models.source import Source
from vitdeploy.pipeline.assemble import golden_set
from vitdeploy.progress import silent
from vitdeploy.runtime.canary import require_golden_answers
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden
from vitdeploy.spec import Task
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.tasks.registry import TASKS as ADAPTERS
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import find_subjects

TARGETS = ("onnxruntime-cpu", "openvino-cpu")
# So many that full agreement would prove the guard's 95 %.
IMAGES = 76
# Of several graphs: in the tests of these tasks.
FLOWS = {"sequence", "zero-shot", "open-vocabulary-detection", "promptable-segmentation", "image-to-text"}
TASKS = [*HEADS, *OTHERS]


def test_no_task_is_left_out():
    assert {*TASKS, *FLOWS} == {*typing.get_args(Task)}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed in range(IMAGES):
        picture(folder / f"{seed:03}.png", seed)
    return folder


def compiled(file, target, out):
    out.mkdir()
    compile_bundle(file, target, None, None, out)
    return out


def verified(ours, theirs, images, least=None):
    return vd.verify(ours, theirs, vd.images(images, labels="none"), min_agreement=least, progress=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("task", TASKS)
def test_models_with_shuffled_weights_never_pass(task, target, images, tmp_path):
    graphs = [graph(task, tmp_path / f"{seed}.onnx", shuffled=seed) for seed in (1, 2)]
    ours, other = (compiled(file, target, tmp_path / file.stem) for file in graphs)
    found = verified(other, graphs[0], images, ADAPTERS[task].guard)
    assert found.status != "pass", found.lines()
    assert "the same function" not in found.found.verified.diagnosis
    assert verified(ours, graphs[0], images).found.verified.diagnosis.startswith("the same function")
    right, wrong = golden(graphs[0], ours, other, images, tmp_path / "bundle")
    assert right.within_bounds and not wrong.ok


def test_shuffled_weights_of_an_encoder_decoder_never_pass(sequence_export, tmp_path):
    require_unproven(sequence_export, "encoder.onnx", REVERSE / "tokens.npz", tmp_path)


def golden(file, ours, other, images, out):
    """The golden checks of the engines of two bundles by the golden answers of the first."""
    manifest, foreign = read_bundle(ours), read_bundle(other)
    (engine,), (wrong,) = manifest.engines, foreign.engines
    [subject] = find_subjects(str(file), target=None, source=Source(), work=out.parent)
    adapter = make_adapter(subject.setting)
    data = adapter.load(DataChoice(images, "none", None, 0, "all", 0), skip_bad=False, progress=silent)
    answers = adapter.answers(make_runner(ours, engine), data, lambda count: None)
    gates = {engine.artifact: "none"}
    with make_runner(ours, engine) as original:
        found = golden_set(adapter, data, answers, original, [(engine, ours)], gates, adapter.guard)
    out.mkdir()
    made = write_bundle(
        out,
        name="golden",
        task=manifest.task,
        graphs={"model": (file, graph_spec(load_graph(file), file.name))},
        preprocess=manifest.preprocess,
        postprocess=manifest.postprocess,
        engines=[(engine, ours)],
        golden=found,
    )
    checks = []
    for folder, each in ((ours, engine), (other, wrong)):
        with make_runner(folder, each) as runner:
            checks.append(check_golden(out, made, each, runner))
            if each is wrong and not checks[0].proves_nothing:
                with pytest.raises(AnswersError):
                    require_golden_answers(out, made, each, runner)
    return checks
