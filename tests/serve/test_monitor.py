"""A server that watches its engine: what it counts, and the line in its log."""

import json
import logging

import numpy as np
import pytest

from tests.serve.conftest import Running, make_bundle
from tests.serve.test_server import INFER, JSON, message
from vitdeploy.runtime.monitor import Monitor
from vitdeploy.runtime.monitor_reference import input_statistics, output_names, output_statistics, reference_text
from vitdeploy.serve.engines import load_engines
from vitdeploy.serve.settings import LOGGER, JsonFormatter, log_event
from vitdeploy.spec import PreprocessSpec

SPEC = PreprocessSpec(8, (8, 8), "bicubic", (0.5,), (0.5,))


def noise(count, seed, high=256):
    return np.random.default_rng(seed).integers(0, high, (count, 8, 8, 1), np.uint8)


@pytest.fixture
def told():
    """Lines of the log, as they are written."""
    lines = []

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(JsonFormatter().format(record)))

    handler = Kept()
    LOGGER.addHandler(handler)
    yield lines
    LOGGER.removeHandler(handler)


def test_drift_is_counted_and_logged_once(tmp_path, told):
    images = noise(64, 0)
    logits = images.reshape(64, 4, 16).sum(2) / np.float32(255)
    rows = [output_statistics("classification", {"logits": each}, ["logits"]) for each in logits]
    outputs = {"onnxruntime-cpu-fp32": (output_names("classification", ["logits"]), rows)}
    text = reference_text([input_statistics(each, SPEC) for each in images], 1, outputs)
    bundle = make_bundle(tmp_path, "batch", monitor=text)
    options = Monitor(window=16, share=float("inf"), on_event=log_event)
    with load_engines(bundle, max_batch=4, monitor=options) as engines, Running(engines) as server:
        assert engines.predictor.monitor.watched == ("inputs", "outputs", "non-finite")
        assert engines.predictor.monitor.counts.runs == 0  # not of what was tried at the start

        def asked(images):
            for image in images:
                assert server.ask("POST", INFER, message(image), JSON)[0] == 200
            lines = server.ask("GET", "/metrics")[2].decode().splitlines()
            pairs = (line.rpartition(" ") for line in lines if line.startswith("vitdeploy_monitor_"))
            return {name.removeprefix("vitdeploy_monitor_"): float(value) for name, _, value in pairs}

        found = asked(noise(16, 1))
        assert (found["runs_total"], found["images_total"], found["windows_total"]) == (16, 16, 1)
        assert (found['state{state="steady"}'], found["drifted_windows_total"]) == (1, 0)
        found = asked(noise(32, 2, high=100))
        assert (found["windows_total"], found["drifted_windows_total"]) == (3, 2)
        assert (found['events_total{kind="inputs"}'], found['state{state="drift"}']) == (1, 1)
    (line,) = [line for line in told if line.get("event")]
    assert (line["event"], line["level"], line["engine"]) == ("monitor inputs", "warning", "onnxruntime-cpu-fp32")
    assert line["statistics"]["mean.0"]["mean"] < line["statistics"]["mean.0"]["low"]
    assert line["message"].startswith("onnxruntime-cpu-fp32: the images differ from")
