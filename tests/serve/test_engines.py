"""Which engine runs how many images: none is lost, none is added, and only what is faster is batched."""

import numpy as np
import pytest

from vitdeploy.runtime import load
from vitdeploy.serve import engines as module
from vitdeploy.serve.batcher import Batcher
from vitdeploy.serve.engines import load_engines


@pytest.fixture(autouse=True)
def threads_of_the_runtime(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("seconds", [4.0, 2.0, 1.0], ids=["never", "from 3", "from 2"])
def test_every_count_gives_the_same_answers_at_any_threshold(served_bundle, monkeypatch, count, seconds):
    """A run of the large one takes so many times as long as one of an image."""
    monkeypatch.setattr(module, "usable_cores", lambda: 1)  # no streams
    monkeypatch.setattr(module, "_seconds", lambda predictor, images: 1.0 if len(images) == 1 else seconds + 0.5)
    monkeypatch.setattr(module, "TRIAL_SECONDS", 0.0)
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), np.uint8)
    with load_engines(served_bundle, max_batch=4) as engines, load(served_bundle) as predictor:
        assert engines.threshold == {4.0: 5, 2.0: 3, 1.0: 2}[seconds]
        assert ("not faster" in engines.describe()) == (seconds == 4.0)
        assert np.array_equal(engines.plan(count, 0).run(images)["logits"], predictor.run(images)["logits"])
        assert (engines.model.max_batch, engines.workers) == (4, 1)
        alone = engines.threshold - 1
        assert (engines.plan(alone, 0).images, engines.plan(4, 0).images) == (1, 1 if seconds == 4.0 else 4)
        assert engines.plan(4, 1) is None


@pytest.mark.parametrize(
    ("large", "streams", "kept"),
    [(2.0, 1.0, True), (2.0, 2.05, True), (2.0, 2.2, False), (5.0, 1.0, False)],
    ids=["faster", "as fast", "slower", "no batches"],
)
def test_full_batches_run_in_streams_where_those_are_faster(openvino_bundle, monkeypatch, large, streams, kept):
    """Seconds of a batch of four, where an image takes one; streams of batches that bring nothing are not tried on."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(module, "_seconds", lambda predictor, images: 1.0 if len(images) == 1 else large)
    monkeypatch.setattr(module, "_seconds_side_by_side", lambda *_: streams)
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)
    with load_engines(openvino_bundle, max_batch=4) as engines, load(openvino_bundle) as predictor:
        assert engines.workers == (2 if kept else 1)
        assert ("(2 in parallel from 8)" in engines.describe()) == kept
        assert engines.plan(7, 0).alone  # work for one stream and a half
        assert engines.plan(3, 1) is None
        assert (engines.plan(4, 1) is None) == (not kept)
        plan = engines.plan(8, 0)
        assert (plan.alone, plan.images) == (not kept, 1 if large > 4 else 4)
        np.testing.assert_allclose(plan.run(images)["logits"], predictor.run(images)["logits"], atol=1e-6)


@pytest.mark.parametrize("bundle", ["openvino_bundle", "served_bundle"])
def test_streams_answer_many_requests_at_once(request, monkeypatch, bundle):
    """After the real trial, whose choice is overruled; every answer is of its own images."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    real = module._times_as_long
    monkeypatch.setattr(module, "_times_as_long", lambda *given: dict.fromkeys(real(*given), 1.0))
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), np.uint8)
    expected = images.reshape(60, 4, 16).sum(2) / np.float32(255)
    with load_engines(request.getfixturevalue(bundle), max_batch=4) as engines:
        assert engines.workers == 2
        batcher = Batcher(engines.plan, 4, workers=engines.workers)
        bounds = list(zip(range(0, 60, 5), (start + 1 + start % 4 for start in range(0, 60, 5)), strict=True))
        futures = [batcher.submit(images[start:stop]) for start, stop in bounds]
        batcher.close()
        for (start, stop), future in zip(bounds, futures, strict=True):
            np.testing.assert_allclose(future.result(0).outputs["logits"], expected[start:stop], rtol=1e-5)


def test_one_thread_has_no_streams(openvino_bundle):
    with load_engines(openvino_bundle, max_batch=4, threads=1) as engines:
        assert engines.workers == 1


def test_an_engine_with_a_static_batch_is_padded(static_bundle):
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), np.uint8)
    with load_engines(static_bundle, max_batch=8) as engines:
        assert engines.model.max_batch == 3
        assert engines.describe() == "batches of 3 (fixed in the engine); smaller batches are padded"
        assert (engines.plan(1, 0).images, engines.plan(1, 1)) == (3, None)
        assert np.allclose(engines.plan(2, 0).run(images)["logits"], images.reshape(2, 4, 16).sum(2) / np.float32(255))


def test_without_batching_one_engine_is_loaded(served_bundle):
    with load_engines(served_bundle, max_batch=1) as engines:
        assert engines.describe() == "one by one"
        assert engines.plan(9, 0).images == 1
        assert engines.predictor.why.startswith("onnxruntime-cpu-fp32: the bundle's only engine")
