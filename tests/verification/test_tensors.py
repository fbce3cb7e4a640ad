"""Numbers of no known meaning: distances by hand, and from which one on an image counts as answered otherwise."""

import math

import numpy as np
import pytest

from vitdeploy.runtime.postprocess import equal_share, signal_to_noise
from vitdeploy.runtime.tasks.tensors import Tensors
from vitdeploy.runtime.values import last_resort
from vitdeploy.tasks.tensors import LEAST_SNR, compare_tensors, tensor_changes

RANDOM = np.random.default_rng(0)
MAPS = tuple(RANDOM.standard_normal((4, 6, 5)).astype(np.float32))
BEST = tuple(RANDOM.integers(0, 9, (4, 10)))


def moved(array, decibels):
    """The array with a noise at exactly so many decibels."""
    noise = RANDOM.standard_normal(array.shape)
    noise *= math.sqrt(np.square(array, dtype=np.float64).sum() / np.square(noise).sum()) * 10 ** (-decibels / 20)
    return array.astype(np.float64) + noise


def test_the_ratio_of_signal_to_noise_is_that_of_the_energies():
    assert signal_to_noise(np.array([1.1, 2.0]), np.array([1.0, 2.0])) == pytest.approx(10 * math.log10(5 / 0.01))
    assert signal_to_noise(MAPS[0], MAPS[0]) == math.inf
    assert signal_to_noise(MAPS[0], np.zeros_like(MAPS[0])) == -math.inf
    assert signal_to_noise(moved(MAPS[1], 23.0), MAPS[1]) == pytest.approx(23.0)
    # 17 dB is a cosine of at least 0.99; twice the scale has a cosine of 1 and 0 dB.
    assert signal_to_noise(2 * MAPS[0], MAPS[0]) == pytest.approx(0.0)


def test_an_image_agrees_where_all_of_its_outputs_do():
    theirs = {"map": MAPS, "best": BEST}
    half = BEST[3].copy()
    half[:5] += 1
    ours = {"map": (MAPS[0], moved(MAPS[1], 20), moved(MAPS[2], 16), MAPS[3]), "best": (*BEST[:3], half)}
    found = compare_tensors(ours, theirs, ["best"])
    assert (found.n, found.metric, found.agreement) == (4, None, 50.0)
    assert found.agreement_of == f"images with a signal-to-noise ratio of {LEAST_SNR:g} dB or more in all outputs"
    numbers, exact = found.outputs
    assert (numbers.name, numbers.equal, exact.name, exact.cosine_min) == ("map", None, "best", None)
    assert numbers.snr_min == pytest.approx(16.0) and exact.equal == 100 * (1 + 1 + 1 + 0.5) / 4
    assert (found.snr_min, found.equal_min, found.cosine_min) == (numbers.snr_min, exact.equal, numbers.cosine_min)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours["map"], MAPS, strict=True))
    assert found.max_difference == numbers.max_difference == pytest.approx(apart / np.abs(np.stack(MAPS)).max())
    changes = tensor_changes(ours, theirs, ["best"])
    assert changes.changed.tolist() == [False, False, True, True] and changes.severity[3] > changes.severity[2] > 0


def test_equal_outputs_have_no_noise_and_json_has_no_infinity():
    found = compare_tensors({"map": MAPS}, {"map": MAPS}, [])
    assert (found.agreement, found.max_difference, found.outputs[0].snr, found.snr_min) == (100.0, 0.0, None, None)
    zeros = {"map": (np.zeros(3, np.float32),)}
    assert compare_tensors({"map": (np.ones(3, np.float32),)}, zeros, []).outputs[0].snr == -1000.0
    with pytest.raises(ValueError, match="against"):
        compare_tensors({"map": MAPS[:2]}, {"map": MAPS}, [])


def test_the_result_says_what_it_holds_and_small_outputs_whole():
    result = Tensors({"map": MAPS[0], "big": np.zeros((40, 40)), "none": np.zeros((0, 4))})
    said = result.to_dict()["outputs"]
    assert said["map"]["values"] == MAPS[0].tolist() and said["map"]["max"] == float(MAPS[0].max())
    assert "values" not in said["big"] and said["none"] == {"dtype": "float64", "shape": [0, 4], "values": []}
    assert str(result).split("\n")[1] == "big float64[40, 40] from 0 to 0, mean 0"
    assert "map [6, 5]" in repr(result) and equal_share(np.zeros(0), np.zeros(0)) == 1.0


def test_what_a_task_of_its_own_would_add_is_said():
    assert last_resort(()).endswith("a custom task would add readable answers, labels and a metric")
    assert "--task features or --task depth can read them" in last_resort(("features", "depth"))
