"""What the doctor says of a device, from what it said of itself."""

import pytest

from tests.runtime.boards import plant
from vitdeploy.compilation.backend import TargetState
from vitdeploy.devices.agent.documents import Probe
from vitdeploy.devices.doctor import diagnose
from vitdeploy.devices.registry import Device
from vitdeploy.runtime.host import describe_host

WITHOUT = TargetState(False, None, (), "no module tensorrt", "pip install tensorrt")


def said_of(root, name):
    host = describe_host(root, "aarch64", range(plant(root, name)))
    packages = {"numpy": "2.0", "pillow": "11.0"}
    probe = Probe(host, "/usr/bin/python3", "2.35", packages, {"tensorrt": WITHOUT}, 10**9, 10**9, {}, "", ())
    return diagnose(Device("orin", "10.0.0.7"), probe)[1]


@pytest.mark.parametrize(
    ("name", "head", "int8"),
    [
        (
            "jetson-orin-nano",
            "orin: NVIDIA Orin Nano Developer Kit, 6x Cortex-A78AE, asimd asimdhp asimddp, 6 cores, aarch64",
            "works    dot products: INT8 weights are made with 8 bits",
        ),
        (
            "raspberry-pi-4b",
            "orin: Raspberry Pi 4 Model B Rev 1.1, 4x Cortex-A72, asimd, 4 cores, aarch64",
            "missing  dot products: INT8 is right with 8 bits, by slower instructions: bench says whether it pays",
        ),
    ],
)
def test_a_device_is_its_board_with_its_cores_and_what_they_have_for_int8(tmp_path, name, head, int8):
    lines = said_of(tmp_path, name)
    assert lines[0].startswith(head)
    assert int8 in lines


def test_a_jetson_gets_the_python_that_sees_its_tensorrt_and_no_other_board_does(tmp_path):
    for name in ("jetson-orin-nano", "jetson-nano", "jetson-xavier-nx", "jetson-agx-orin"):
        [fix] = [line for line in said_of(tmp_path / name, name) if "fix:" in line]
        assert "python3 -m venv --system-site-packages ~/venv" in fix
        assert "pip install" not in fix
    [fix] = [line for line in said_of(tmp_path / "pi", "raspberry-pi-5") if "fix:" in line]
    assert "pip install tensorrt" in fix
