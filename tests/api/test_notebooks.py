"""The notebooks of examples/ run from top to bottom in one kernel, which is as new to each of them."""

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="pip install nbformat nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="pip install nbformat nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbformat nbclient ipykernel")
jupyter_client = pytest.importorskip("jupyter_client.manager", reason="pip install nbformat nbclient ipykernel")
pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# What a reader's kernel does not do: benches that are over at once and wait for nobody, and the tests' stored work.
IN_FRONT = """
import atexit, contextlib, pathlib, sys
sys.path.insert(0, {root!r})
from tests.command_line import command_line, undisturbed
stack = contextlib.ExitStack()
stack.enter_context(undisturbed(pathlib.Path({lock!r})))
stack.enter_context(command_line(pathlib.Path({examples!r}), pathlib.Path({store!r}), short_bench=True))
atexit.register(stack.close)
"""
# What the last cells must have said, by notebook.
SAYS = {
    "own_module": "% of the answers are the module's, of 640 images",
    "int8_accuracy": "% of the answers are the float graph's",
    "compare_versions": "latency ",
    "quantization_aware_training": "% of 640 held-out digits",
}


def output_of(notebook):
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text", ""))
            texts += [str(text) for text in output.get("data", {}).values()]
    return "\n".join(texts)


def test_each_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS} == set(SAYS)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, shared_store):
    """A kernel in the folder of the notebooks. To load PyTorch takes as long as half of what they do."""
    folder = tmp_path_factory.mktemp("kernel")
    examples = str(NOTEBOOKS[0].parent)
    front = IN_FRONT.format(root=str(ROOT), examples=examples, store=str(shared_store), lock=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        manager, client = jupyter_client.start_new_kernel(kernel_name="python3", cwd=examples)
    assert client.execute_interactive(front)["content"]["status"] == "ok"
    client.stop_channels()
    yield manager
    manager.shutdown_kernel()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_values(path, kernel):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset_selective -f ^[^_]"))
    client = nbclient.NotebookClient(notebook, timeout=300, km=kernel)
    client.execute()
    client.kc.stop_channels()
    said = output_of(notebook)
    assert SAYS[path.stem] in said
    assert '<div style="overflow-x:auto' in said  # values as a notebook shows them
    if path.stem == "own_module":
        share = float(said.partition(SAYS["own_module"])[0].split()[-1])
        assert share > 98 and "<svg" in said
    if path.stem == "quantization_aware_training":
        shares = [float(part.split()[-1]) for part in said.split(SAYS[path.stem])[:-1]]
        first, calibrated, trained, longer = shares
        assert calibrated < first - 10 and trained > calibrated + 20 and trained > longer - 10
    if path.stem == "int8_accuracy":
        assert "gate        fail" in said and "\npass " in f"\n{said}"


def test_a_notebook_of_the_repository_holds_the_outputs_of_a_run():
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), f"run {Path(path).name} again"
        assert all(output.output_type != "error" for cell in code for output in cell.outputs)
