"""What an engine belongs to, and how far beyond it may go."""

import pytest

from vitdeploy.errors import EngineError
from vitdeploy.runtime.tensorrt import HARDWARE, VERSIONS, differences, refuse_other_device

HERE = {
    "tensorrt": "11.4.0.106",
    "gpu": "NVIDIA L4",
    "compute_capability": "8.9",
    "driver": "580.65.06",
    "cuda": "13.0",
    "os": "Linux x86_64",
}
AMPERE = {HARDWARE: "ampere+"}
SAME = {HARDWARE: "same-compute-capability"}
NEWER = {VERSIONS: "newer"}


def test_the_machine_that_built_an_engine_runs_it():
    assert differences({**HERE, HARDWARE: "this", VERSIONS: "this"}, HERE) == []


@pytest.mark.parametrize("key", ["tensorrt", "gpu", "compute_capability", "driver", "os"])
def test_an_engine_of_another_machine_is_refused_with_both_named(key):
    recorded = {**HERE, key: "9.9"}
    with pytest.raises(EngineError, match="vit was built for a different machine") as caught:
        refuse_other_device("vit", recorded, HERE, "do this")
    assert caught.value.found == f"{key} 9.9"
    assert caught.value.expected == f"{key} {HERE[key]}"
    assert caught.value.fix == "rebuild it: do this"


def test_an_engine_without_a_record_is_refused():
    with pytest.raises(EngineError) as caught:
        refuse_other_device("vit", {}, HERE, "do this")
    assert caught.value.found.startswith("tensorrt not recorded, gpu not recorded")


@pytest.mark.parametrize(
    ("asked", "built", "different"),
    [
        (AMPERE, {"compute_capability": "8.6", "gpu": "A10", "driver": "1.2"}, []),
        (AMPERE, {"tensorrt": "11.3.0"}, ["tensorrt"]),
        (AMPERE, {"os": "Windows AMD64"}, ["os"]),
        (SAME, {"gpu": "RTX 4090", "driver": "1.2"}, []),
        (SAME, {"compute_capability": "8.6"}, ["compute_capability"]),
        (NEWER, {"tensorrt": "10.16.0", "driver": "1.2"}, []),
        (NEWER, {"tensorrt": "11.5.0"}, ["tensorrt"]),
        (NEWER, {"tensorrt": ""}, ["tensorrt"]),
        (NEWER, {"gpu": "RTX 4090"}, ["gpu"]),
    ],
)
def test_an_engine_goes_as_far_as_it_was_built_for(asked, built, different):
    assert differences({**HERE, **built, **asked}, HERE) == different


def test_hardware_before_ampere_runs_no_ampere_engine():
    turing = {**HERE, "compute_capability": "7.5"}
    assert differences({**HERE, **AMPERE}, turing) == ["compute_capability"]
