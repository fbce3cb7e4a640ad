"""What `make arm64` takes for right, and for a machine that cannot run it. The boards themselves need minutes."""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.arm64 import __main__ as command
from tests.arm64 import root
from tests.arm64.engines import Engine, Proof
from tests.arm64.instructions import dot_products
from tests.arm64.sums import COLUMNS, DEPTH, STEP, weights, write_graphs
from tests.arm64.table import table
from vitdeploy.devices.agent.documents import PlacedArtifact
from vitdeploy.devices.shipment import Shipment
from vitdeploy.runtime.golden import GoldenSet
from vitdeploy.runtime.ort import OnnxRuntimeRunner

EMULATED = {"machine": "aarch64", "emulated": "qemu-aarch64 on x86"}
LOG = """----------------
IN:
0x7f90a7835728:  6e9f9400  udot     v0.4s, v0.16b, v31.16b
0x7f90a783572c:  d53b00e0  mrs      x0, dczid_el0
"""


def engine(precision, placed):
    golden = GoldenSet({"image": np.zeros((8, 1))}, {}, {}, 0.1, 7)
    shipment = Shipment(PlacedArtifact("digits", "openvino-cpu", precision, 1, ()), {})
    return Engine("digits", f"openvino-cpu-{precision}", shipment, None, golden, placed)


NO_FP16 = "OpenVINO does not support fp16 on this CPU"
IN_FLOAT = "openvino-cpu did not run the graph in INT8"
RIGHT = Proof(engine("int8", 23), "cortex-a53", EMULATED, {"int8": 23, "fp32": 2}, 7, 0.01)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"same": 6}, False),
        ({"difference": 0.2}, False),
        ({"difference": float("nan")}, False),
        ({"kernels": {"int8": 22, "fp32": 3}}, False),
        ({"host": {"machine": "aarch64"}}, False),  # a board that takes itself for a real one
        ({"host": {**EMULATED, "machine": "x86_64"}}, False),
        ({"refused": "OpenVINO does not support int8 on this CPU"}, False),
        ({"engine": engine("fp16", 0), "refused": NO_FP16}, True),
        ({"engine": engine("fp16", 0), "refused": NO_FP16, "cpu": "neoverse-n1"}, False),
        ({"engine": engine("fp16", 0), "kernels": {"fp32": 19}}, False),
        ({"engine": dataclasses.replace(engine("int8", 73), convolutions=True), "refused": IN_FLOAT}, True),
        ({"engine": dataclasses.replace(engine("int8", 23), convolutions=True)}, False),  # no longer refused
    ],
)
def test_an_engine_is_right_as_placed_and_as_golden(changes, ok):
    assert dataclasses.replace(RIGHT, **changes).ok is ok


def test_the_table_says_what_ran():
    refused = Proof(engine("fp16", 0), "cortex-a53", {}, {}, refused="OpenVINO does not support fp16 on this CPU")
    other, wrong = (dataclasses.replace(RIGHT, cpu="max", **facts) for facts in ({"difference": 0.03}, {"same": 6}))
    executed = {("cortex-a53", "openvino-cpu-int8"): "none", ("max", "openvino-cpu-int8"): "sdot"}
    rows = table([RIGHT, refused, other, wrong], executed).splitlines()[2:]
    first = "| digits | openvino-cpu-int8 |"
    assert rows[0] == f"{first} cortex-a53 (none), max (sdot) | 23 int8, 2 fp32 | 7 of 8 | 3e-02 |"
    assert rows[1] == f"{first} max (sdot) | 23 int8, 2 fp32 | 6 of 8 | 1e-02 |"
    assert "refused: OpenVINO does not support fp16 on this CPU" in rows[2]


def test_dot_products_are_read_of_qemus_log(tmp_path):
    log = tmp_path / "log"
    for text, expected in ((LOG, "udot"), (LOG.replace("udot", "umull"), "none"), ("", "")):
        log.write_text(text)
        assert dot_products(log) == expected


def test_the_largest_sums_are_exact_where_nothing_saturates(tmp_path):
    write_graphs(tmp_path)
    pixels = np.full((1, 8, DEPTH), 255, np.float32)
    with OnnxRuntimeRunner(tmp_path / "onnxruntime-cpu-0.onnx", name="sums") as runner:
        [found] = runner.infer({"x": pixels}).values()
    assert found.shape == (1, 8, COLUMNS) and found[0, 0, 0] == 255 * 127 * DEPTH * STEP
    np.testing.assert_array_equal(found, pixels @ weights().astype(np.float32) * STEP)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="says that first")
@pytest.mark.parametrize(
    ("module", "name", "value", "why"),
    [
        (sys, "platform", "darwin", "it needs Linux on x86-64"),
        (os, "geteuid", lambda: 1000, "it needs root"),
        (root, "KEYRING", Path("/no/keyring"), "install debian-archive-keyring"),
        (root.shutil, "which", lambda name: None, "install apt-get, dpkg-deb, tar"),
    ],
)
def test_a_machine_that_cannot_says_why_in_a_line(monkeypatch, capsys, tmp_path, module, name, value, why):
    monkeypatch.setattr(root, "KEYRING", tmp_path)
    monkeypatch.setattr(root.Path, "is_file", lambda path: path == tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(root.shutil, "which", lambda name: "/usr/bin/true")
    monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["arm64", "--work", str(tmp_path / "work")])
    assert command.main() == 77
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("arm64: not run: ") and why in last
