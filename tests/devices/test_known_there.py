"""The table asked for a device: by the release and the instruction sets there, before anything is built."""

import dataclasses

import pytest

from tests.known_bad.test_commands import saved
from vitdeploy.compilation.backend import TargetState
from vitdeploy.devices.agent.probe import DeviceProbe
from vitdeploy.devices.on_devices import suspects_of
from vitdeploy.devices.shipment import placed_shipment
from vitdeploy.errors import KnownBadError
from vitdeploy.workflows.placement import place_graphs

ATTENTION, PADS = "openvino-constant-attention", "onnxruntime-sme-unequal-pads"
WORKS = TargetState(True, None, (), "", "")


@pytest.fixture
def suspects(tmp_path):
    def make(case, target, accepted=(), index=0):
        saved(case, tmp_path / "graph", index)
        (tmp_path / "placed").mkdir()
        graphs = place_graphs(tmp_path / "graph" / "model.onnx", target, None, tmp_path / "placed")
        # Operands of attention are no images with something beside them.
        graphs = dataclasses.replace(graphs, metadata=dataclasses.replace(graphs.metadata, preprocess=None))
        return suspects_of(placed_shipment("it", graphs, 1), accepted)

    return make


def probe(target, isa="", works=True, **runtime):
    state = dataclasses.replace(WORKS, works=works)
    nothing = {"machine": "aarch64", "isa": isa}
    return DeviceProbe(nothing, "python", "", {}, {target: state}, 1, 1, {}, "", (), runtimes={target: runtime})


def test_the_release_there_decides_not_the_one_here(suspects):
    found = suspects(ATTENTION, "openvino-cpu")
    with pytest.raises(KnownBadError, match=r"openvino 2025\.4\.1 is known to compute it wrongly") as refused:
        found.check(probe("openvino-cpu", openvino="2025.4.1-20426-x"))
    assert refused.value.entries == (ATTENTION,)
    assert f"--accept-known-bad {ATTENTION}" in refused.value.fix
    found.check(probe("openvino-cpu", openvino="2026.1.0-1"))
    found.check(probe("openvino-cpu", works=False))  # which says itself that it does not
    with pytest.raises(KnownBadError, match="of an unknown version"):
        found.check(probe("openvino-cpu"))


def test_an_accepted_entry_refuses_nothing_there(suspects):
    suspects(ATTENTION, "openvino-cpu", [ATTENTION]).check(probe("openvino-cpu", openvino="2025.4.1"))


@pytest.mark.parametrize(("isa", "refused"), [("asimd sme", True), ("asimd asimddp", False)])
def test_the_instruction_sets_there_decide_too(suspects, isa, refused):
    found, there = suspects(PADS, "onnxruntime-cpu"), probe("onnxruntime-cpu", isa, onnxruntime="1.27.0")
    if refused:
        with pytest.raises(KnownBadError, match="wrongly"):
            found.check(there)
    else:
        found.check(there)


def test_a_graph_without_a_pattern_is_not_suspect(suspects):
    assert not suspects(ATTENTION, "openvino-cpu", index=1)
