"""Entries of the table seen in the releases themselves, each in an environment of its own: VITDEPLOY_TEST_DEPTH=1.

Without it, what is seen with the releases that are here.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from packaging.version import Version

from tests.graph.builder import run
from tests.known_bad import bundles
from tests.known_bad.graphs import CASES
from vitdeploy.known_bad.entries import table
from vitdeploy.known_bad.platform import holds_for
from vitdeploy.releases.api import versions
from vitdeploy.releases.environments import Environments
from vitdeploy.runtime.host import describe_host

DEEP = pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="installs releases: VITDEPLOY_TEST_DEPTH=1")
BY_ID = {entry.id: entry for entry in table()}
# Runs graph.onnx on feeds.npz, in order, and writes what a release gives; with its own choice of everything.
SCRIPT = """
import json, sys, numpy as np
folder, runtime, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
feeds = [dict(np.load(f"{folder}/{index}.npz")) for index in range(count)]
if runtime == "openvino":
    import openvino
    compiled = openvino.Core().compile_model(f"{folder}/graph.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request, found = compiled.create_infer_request(), []
    for feed in feeds:
        request.infer(feed)
        found.append([np.array(request.get_output_tensor(i).data) for i in range(len(compiled.outputs))])
else:
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(f"{folder}/graph.onnx", options, providers=["CPUExecutionProvider"])
    found = [session.run(None, feed) for feed in feeds]
for index, outputs in enumerate(found):
    np.savez(f"{folder}/found-{index}.npz", *outputs)
"""


def is_right(name, python, folder, case=0):
    """Whether a Python's release gives for the graph of a case what ONNX Runtime without optimisation gives."""
    proto, feeds = CASES[name][case]()
    folder.mkdir(parents=True)
    (folder / "graph.onnx").write_bytes(proto.SerializeToString())
    for index, feed in enumerate(feeds):
        np.savez(folder / f"{index}.npz", **feed)
    words = [str(folder), BY_ID[name].runtime, str(len(feeds))]
    subprocess.run([str(python), "-I", "-c", SCRIPT, *words], check=True, capture_output=True)
    for index, feed in enumerate(feeds):
        expected = run(proto, **feed)
        with np.load(folder / f"found-{index}.npz") as file:
            found = [file[each] for each in file.files]
        for a, b in zip(found, expected, strict=True):
            if a.shape != b.shape or not np.abs(a.astype(float) - b).max() <= 1e-3 * max(1e-30, np.abs(b).max()):
                return False
    return True


ALWAYS = ("openvino-tokens-as-heads", "openvino-resize-antialias")
HERE = (
    *("openvino-free-lengths", "openvino-topk-ties", "openvino-transposed-convolution-free-auto-pad"),
    *("openvino-reduction-axes", "openvino-log-reduction-axes"),
)


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=DEEP) for name in HERE)])
def test_the_release_that_is_here_is_still_wrong(name, tmp_path):
    """Where this fails with a new release, the entry has come to its end: give its `versions` an upper bound."""
    pytest.importorskip("openvino")
    assert not is_right(name, sys.executable, tmp_path / "shows")


def test_a_vector_behind_scores_is_still_wrong_on_amx_and_exchanged_operands_are_right(tmp_path):
    """Where this fails with a new release, the entry has come to its end: give its `versions` an upper bound."""
    pytest.importorskip("openvino")
    if "amx_int8" not in describe_host()["isa"].split():
        pytest.skip("needs a CPU with AMX (Intel Xeon of the fourth generation, or newer)")
    name = "openvino-vector-behind-scores"
    assert not is_right(name, sys.executable, tmp_path / "shows")
    assert is_right(name, sys.executable, tmp_path / "near", 1)


# Whose near misses are entries of other releases.
NEAR_TOO = ("openvino-argmax-ties", "openvino-reduction-axes")
SEEN = {
    "openvino-free-lengths": (["2024.4.0", "2025.2.0"], ["2024.3.0"]),
    "openvino-tokens-as-heads": (["2024.4.0", "2025.2.0"], []),
    "openvino-constant-attention": (["2025.3.0", "2026.0.0"], ["2025.2.0", "2026.1.0"]),
    "openvino-resize-antialias": (["2025.2.0", "2026.0.0"], []),
    "openvino-transposed-convolution-auto-pad": (["2025.2.0", "2025.3.0"], ["2025.4.0"]),
    "openvino-mean-axes": (["2024.2.0"], ["2024.3.0"]),
    "openvino-reduction-axes": (["2025.2.0", "2026.0.0"], ["2024.3.0"]),
    "openvino-log-reduction-axes": ([], ["2025.2.0", "2026.1.0"]),
    "openvino-argmax-ties": (["2025.2.0", "2025.3.0"], ["2025.4.0"]),
    "openvino-topk-ties": (["2025.2.0", "2026.0.0"], []),
}


@DEEP
@pytest.mark.parametrize("name", SEEN)
def test_a_release_is_wrong_where_its_entry_says_so(name, tmp_path):
    environments, (wrong, right) = Environments(), SEEN[name]
    for version in (*wrong, *right):
        assert holds_for(BY_ID[name].versions, version) is (version in wrong)
        python = environments.of(BY_ID[name].runtime, Version(version)).python
        assert is_right(name, python, tmp_path / version) is (version in right), version
        if name != "openvino-topk-ties":
            assert is_right(name, python, tmp_path / f"near {version}", 1) or name in NEAR_TOO, version


@DEEP
def test_large_blocks_of_4_bits_are_wrong_before_1_27_and_refused_from_then_on(tmp_path):
    """The graph's weights are -0.5 everywhere, so that each answer is minus half the sum of its input."""
    environments, [proto, [feed]] = Environments(), CASES["onnxruntime-large-blocks"][0]()
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "graph.onnx").write_bytes(proto.SerializeToString())
    np.savez(folder / "0.npz", **feed)
    words = ["-I", "-c", SCRIPT, str(folder), "onnxruntime", "1"]
    subprocess.run([str(environments.of("onnxruntime", Version("1.26.0")).python), *words], check=True)
    with np.load(folder / "found-0.npz") as file:
        found = file[file.files[0]]
    expected = -0.5 * feed["x"].sum(axis=1, keepdims=True)
    assert not np.allclose(found, expected, rtol=1e-3, atol=1e-3)
    newer = environments.of("onnxruntime", Version("1.27.0")).python
    done = subprocess.run([str(newer), *words], capture_output=True, text=True, check=False)
    assert done.returncode and "block_size" in done.stderr


@DEEP
@pytest.mark.parametrize("version", ["2025.2.0", "2026.2.1", "2026.3.0"])
def test_the_modes_of_grid_sample_in_opset_20_are_read_from_2026_3_on(version, tmp_path):
    name = "openvino-grid-sample-modes"
    python = Environments().of("openvino", Version(version)).python
    assert is_right(name, python, tmp_path / "near", 1)
    if not holds_for(BY_ID[name].versions, version):
        assert is_right(name, python, tmp_path / "shows")
        return
    with pytest.raises(subprocess.CalledProcessError) as refused:
        is_right(name, python, tmp_path / "shows")
    assert b"GridSample" in refused.value.stderr


# --- `vitdeploy lab versions` -----------------------------------------------------------------------------------------


CONSTANT = ("2025.3.0", "2025.4.0", "2025.4.1")


@DEEP
@pytest.mark.parametrize(
    ("case", "asked", "rebuild", "wrong"),
    [
        (bundles.constant_attention, "openvino==2025.2..2026.1", False, {*CONSTANT, "2026.0.0"}),
        (bundles.norm, "openvino==2024.2..2024.3", True, {"2024.2.0"}),
        (bundles.ties, "openvino==2025.3..2025.4", True, {"2025.3.0"}),
    ],
)
def test_versions_finds_the_releases_of_an_entry(case, asked, rebuild, wrong, tmp_path):
    bundle = bundles.written(case(), "openvino-cpu", tmp_path / "bundle")
    found = versions(bundle, asked, rebuild=rebuild, duration=0.5, progress=False)
    assert set(found.wrong) == wrong
    rows = found.document.releases
    right = {row.version for row in rows if row.answers is not None and row.answers.ok}
    assert right == {row.version for row in rows} - wrong
