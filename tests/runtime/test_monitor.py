"""The monitor of a predictor: what it looks at, how often it is wrong, and what it finds."""

import dataclasses
import itertools
import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.golden_bundle import write_golden_bundle
from vitdeploy.bundle.read import file_sha256, read_bundle
from vitdeploy.errors import InputError, ManifestError
from vitdeploy.runtime import Monitor, MonitorWarning, load
from vitdeploy.runtime.monitor import Monitoring, control_limits
from vitdeploy.runtime.monitor_reference import (
    input_names,
    input_statistics,
    output_names,
    output_statistics,
    reference_beside,
    reference_text,
)
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

SPEC = PreprocessSpec(32, (32, 32), "bicubic", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
NOISY = {"window": 16, "every": 10**9, "share": float("inf")}


def noise(count, seed=0, high=256):
    return np.random.default_rng(seed).integers(0, high, (count, 32, 32, 1), np.uint8)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_the_numbers_of_an_image_are_what_they_are_called():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    pixels[:4] = 255
    found = dict(zip(input_names(3), input_statistics(pixels, SPEC), strict=True))
    shown = pixels[:, :31] / 255  # the last column has no neighbour
    for channel in range(3):
        assert found[f"mean.{channel}"] == pytest.approx(shown[..., channel].mean(), abs=1e-5)
        assert found[f"std.{channel}"] == pytest.approx(shown[..., channel].std(), abs=1e-5)
    assert found["saturated"] == np.isin(pixels[:, :31], (0, 255)).mean()
    assert found["contrast"] == pytest.approx(np.abs(np.diff(pixels / 255, axis=1)).mean(), abs=1e-5)


@pytest.mark.parametrize("side", [(32, 32), (224, 224), (31, 700), (2, 2)])
def test_an_image_has_the_same_numbers_in_both_forms(side):
    pixels = np.random.default_rng(1).integers(0, 256, (*side, 3), np.uint8)
    tensor = normalise(pixels[None], SPEC)[0]
    np.testing.assert_allclose(input_statistics(pixels, SPEC), input_statistics(tensor, SPEC), atol=1e-5)


def test_what_is_no_image_has_no_numbers():
    assert input_statistics(np.zeros((4, 8), np.float32), SPEC) is None
    assert input_statistics(np.zeros((8, 8, 1), np.uint8), SPEC) is None
    assert input_statistics(np.zeros((8, 1, 3), np.uint8), SPEC) is None


def test_the_numbers_of_outputs():
    outputs = {"logits": np.log(np.array([0.5, 0.25, 0.25], np.float32)), "more": np.full((3, 4), 7, np.float32)}
    names = output_names("classification", list(outputs))
    found = dict(zip(names, output_statistics("classification", outputs, list(outputs)), strict=True))
    assert found["entropy"] == pytest.approx(1.5 * np.log(2), abs=1e-6)
    assert (found["logits.max"], found["more.min"]) == (pytest.approx(np.log(0.5)), 7)
    assert output_names("depth", ["depth"]) == ["depth.min", "depth.max"]
    broken = output_statistics("depth", {"depth": np.array([1, np.nan, 3], np.float32)}, ["depth"])
    assert not np.isfinite(broken).any()


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.01])
def test_false_alarms_are_as_rare_as_asked_for_and_a_shift_is_found(rate):
    """Skewed and dependent statistics, references and windows of one population: the rate is of both together."""
    generator, alarms, found, windows = np.random.default_rng(0), 0, 0, 0
    mixing = generator.normal(size=(5, 5))

    def draw(*shape):
        numbers = generator.normal(size=(*shape, 5)) @ mixing
        numbers[..., 0] = np.exp(numbers[..., 0] / 3)
        return numbers

    for _ in range(6):
        limits = control_limits("abcde", draw(128), np.full(5, 1e-9), window=64, rate=rate)
        for images in draw(100, 64):
            windows += 1
            alarms += bool(limits.outside(limits.clipped(images).mean(axis=0)))
            shifted = images + 0.8 * np.sqrt((mixing[:, 3] ** 2).sum()) * np.eye(5)[3]
            found += 3 in limits.outside(limits.clipped(shifted).mean(axis=0))
    assert alarms <= rate * windows + 4 * np.sqrt(rate * windows * 8)  # windows of one reference go together
    assert alarms >= 0.1 * rate * windows
    assert found > 0.95 * windows


def test_the_furthest_comes_first_and_a_number_that_is_none_is_outside():
    limits = control_limits("ab", np.random.default_rng(0).normal(size=(64, 2)), np.full(2, 1e-9), 32, 0.01)
    assert limits.outside(np.array([1.0, -3.0])) == [1, 0]
    assert limits.outside(limits.mean) == []
    assert limits.outside(np.array([np.nan, limits.mean[1]])) == [0]
    low, high = limits.bounds(0)
    assert low < limits.mean[0] < high


def test_what_was_the_same_in_all_images_may_differ_a_little():
    limits = control_limits("a", np.zeros((64, 1)), np.array([0.01]), 64, 0.001)
    assert limits.outside(np.array([0.0005])) == []
    assert limits.outside(np.array([0.05])) == [0]


# --- a predictor that is watched --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(small_bundle, tmp_path_factory):
    """Five golden inputs, and a reference of 64 images of noise."""
    (engine,) = read_bundle(small_bundle).engines
    home, out = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("watched")
    shutil.copy(small_bundle / engine.graph, home / "graph.onnx")
    own = dataclasses.replace(engine, graph="graph.onnx", files=("graph.onnx",))
    spec = read_bundle(small_bundle).preprocess
    images = noise(64, seed=7)
    with load(small_bundle) as predictor:
        logits = predictor.run(images)["logits"]
    inputs = [input_statistics(each, spec) for each in images]
    rows = [output_statistics("classification", {"logits": each}, ["logits"]) for each in logits]
    text = reference_text(inputs, 1, {engine.artifact: (output_names("classification", ["logits"]), rows)})
    return write_golden_bundle(small_bundle, own, home, out, images=5, tolerance=1e-3, monitor=text)


def watched(bundle, **options):
    """A predictor, and the events that its monitor tells."""
    events = []
    predictor = load(bundle, monitor=Monitor(on_event=events.append, **{**NOISY, **options}))
    return predictor, events


def test_usual_images_are_steady_and_others_are_told_once(bundle):
    predictor, events = watched(bundle)
    with predictor:
        monitor = predictor.monitor
        assert monitor.watched == ("inputs", "outputs", "canary", "non-finite")
        assert monitor.state == "starting"
        predictor.predict_batch(list(noise(16, 1)))
        assert (monitor.state, monitor.counts.windows, events) == ("steady", 1, [])
        predictor.predict_batch(list(noise(32, 2, high=64)))  # dark
        assert (monitor.state, monitor.counts.drifted, len(events)) == ("drift", 2, 1)
        assert events[0].kind == "inputs"
        mean, low, high = events[0].statistics["mean.0"]
        assert mean == pytest.approx(63 / 2 / 255, abs=0.01) and mean < low < 0.5 < high
        assert "the images differ from the calibration images" in events[0].message
        assert events[0].to_dict()["statistics"]["mean.0"] == {"mean": mean, "low": low, "high": high}
        predictor.predict_batch(list(noise(16, 3)))
        assert (monitor.state, len(events)) == ("steady", 1)
        assert monitor.counts.events == {"inputs": 1, "outputs": 0, "canary": 0, "non-finite": 0}


def test_without_a_callback_a_warning_is_given(bundle):
    warned = pytest.warns(MonitorWarning, match=r"mean\.0 0\.\d+ \(usual 0\.\d+ to 0\.\d+\)")
    with load(bundle, monitor=Monitor(**NOISY)) as predictor, warned:
        predictor.predict_batch(list(noise(16, 2, high=64)))


def test_every_so_many_runs_a_golden_input_is_run_and_a_broken_engine_is_told(bundle, monkeypatch):
    predictor, events = watched(bundle, every=5)
    with predictor:
        predictor.predict_batch(list(noise(50)))
        assert (predictor.monitor.counts.canaries, predictor.monitor.counts.wrong, events) == (10, 0, [])
        infer = predictor.runner.infer
        monkeypatch.setattr(predictor.runner, "infer", lambda feeds: {k: v + 0.5 for k, v in infer(feeds).items()})
        predictor.predict_batch(list(noise(10)))
        assert (predictor.monitor.state, predictor.monitor.counts.wrong) == ("fault", 2)
        assert [event.kind for event in events] == ["canary"]
        assert "a golden answer was correct at loading and no longer is" in events[0].message
        monkeypatch.setattr(
            predictor.runner, "infer", lambda feeds: {k: v * (1 + 1e-6) for k, v in infer(feeds).items()}
        )
        predictor.predict_batch(list(noise(5)))
        assert (predictor.monitor.counts.wrong, predictor.monitor.counts.changed) == (2, 1)
        monkeypatch.undo()
        predictor.predict_batch(list(noise(5)))
        assert predictor.monitor.counts.changed == 1


def test_numbers_that_are_not_finite_are_a_fault_until_a_whole_window_is(bundle, monkeypatch):
    predictor, events = watched(bundle)
    with predictor:
        infer = predictor.runner.infer
        monkeypatch.setattr(predictor.runner, "infer", lambda feeds: {k: v * np.inf for k, v in infer(feeds).items()})
        predictor.run(noise(3))
        monkeypatch.undo()
        assert (predictor.monitor.state, predictor.monitor.counts.non_finite) == ("fault", 3)
        assert [event.kind for event in events] == ["non-finite"]
        predictor.predict_batch(list(noise(15)))
        assert predictor.monitor.state == "fault"
        predictor.predict_batch(list(noise(1)))
        assert predictor.monitor.state == "steady"


@pytest.mark.parametrize(("nanoseconds", "looked_at"), [(50_000, 34), (3_000_000, 2000)])
def test_looking_takes_its_share_of_the_time_and_no_more(monkeypatch, nanoseconds, looked_at):
    """2,000 runs of so many nanoseconds, at each of which a look would take 30,000."""
    clock = itertools.count(0, 30_000)
    monkeypatch.setattr("vitdeploy.runtime.monitor.perf_counter_ns", lambda: next(clock))
    logits = {"logits": np.zeros((1, 10), np.float32)}
    monitor = Monitoring(Monitor(share=0.01), "e", "classification", SPEC)
    for _ in range(2000):
        monitor.saw(np.zeros((1, 32, 32, 3), np.uint8), logits, nanoseconds)
    assert (monitor.counts.runs, monitor.counts.looked_at) == (2000, looked_at)


def test_threads_share_a_monitor(bundle):
    predictor, events = watched(bundle, every=7)
    with predictor, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: predictor.predict_batch(list(noise(35, seed))), range(4)))
        counts = predictor.monitor.counts
    assert (counts.runs, counts.looked_at, counts.windows, counts.canaries) == (140, 140, 140 // 16, 20)
    assert events == []


def test_answers_are_the_same_with_a_monitor(bundle):
    images = list(noise(20))
    with load(bundle) as alone, watched(bundle, every=1)[0] as predictor:
        assert predictor.predict_batch(images) == alone.predict_batch(images)
        assert (alone.monitor, alone.canary) == (None, None)


def test_a_bundle_without_a_reference_is_watched_as_far_as_it_can(small_bundle):
    with pytest.warns(RuntimeWarning, match="has no monitor reference") as told:
        predictor = load(small_bundle, monitor=True)
    assert told[0].filename == __file__  # of whoever loads it
    with predictor, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predictor.monitor.watched == ("non-finite",)
        predictor.predict(noise(1)[0])
        assert predictor.monitor.counts.looked_at == 1


@pytest.mark.parametrize(
    "options",
    [
        *({"window": 7}, {"window": 16.0}, {"every": 0}),
        *({"false_alarms": 0}, {"false_alarms": 0.9}, {"share": 0}, {"share": float("nan")}),
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match="invalid Monitor settings"):
        Monitor(**options)


def test_what_is_no_monitor_is_refused(bundle):
    with pytest.raises(InputError, match="monitor must be"):
        load(bundle, monitor="yes")


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(format=2),
        lambda document: document.update(images=3),
        lambda document: document["inputs"].pop("saturated"),
        lambda document: document["inputs"]["std.0"].pop(),
        lambda document: document["inputs"]["std.0"].__setitem__(0, float("nan")),
        lambda document: document["inputs"]["std.0"].__setitem__(0, "0.1"),
        lambda document: document["outputs"]["onnxruntime-cpu-fp32"].pop("entropy"),
        lambda document: document.update(more=1),
    ],
)
def test_a_reference_that_is_none_is_refused(bundle, tmp_path, change):
    folder = shutil.copytree(bundle, tmp_path / "copy")
    document = json.loads((folder / "monitor.json").read_text())
    change(document)
    (folder / "monitor.json").write_text(json.dumps(document))
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == "monitor.json":
            entry.update(bytes=(folder / "monitor.json").stat().st_size, sha256=file_sha256(folder / "monitor.json"))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=r"monitor\.json (is not|does not match)"):
        load(folder, monitor=True)
    load(folder).close()  # who does not ask for it does not read it


def test_a_file_of_that_name_beside_a_graph_must_be_a_reference(bundle, tmp_path, monkeypatch):
    good, file = (bundle / "monitor.json").read_bytes(), tmp_path / "monitor.json"
    assert reference_beside(tmp_path, 1) is None
    file.write_bytes(good)
    assert reference_beside(tmp_path, 1) == good.decode()
    for channels, text in ((3, good), (1, b"\xff"), (1, b"{}")):
        file.write_bytes(text)
        with pytest.raises(ManifestError, match="is not a valid monitor reference") as caught:
            reference_beside(tmp_path, channels)
        assert "vitdeploy quantize" in caught.value.fix
    monkeypatch.setattr("vitdeploy.runtime.monitor_reference.MAX_BYTES", len(good) - 1)
    file.write_bytes(good)
    with pytest.raises(ManifestError, match="is too large"):
        reference_beside(tmp_path, 1)
