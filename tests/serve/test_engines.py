"""Which engine runs how many images: none is lost, none is added, and only what is faster is batched."""

import numpy as np
import pytest

from vitdeploy.runtime import load
from vitdeploy.serve import engines as module
from vitdeploy.serve.engines import load_engines


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("seconds", [(4.0, 1.0), (2.0, 1.0), (1.0, 1.0)], ids=["never", "from 2", "always"])
def test_every_count_gives_the_same_answers_at_any_threshold(served_bundle, monkeypatch, count, seconds):
    large, single = seconds
    monkeypatch.setattr(module, "_seconds", lambda predictor, images: single if len(images) == 1 else large + 0.5)
    monkeypatch.setattr(module, "TRIAL_SECONDS", 0.0)
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), np.uint8)
    with load_engines(served_bundle, max_batch=4) as engines, load(served_bundle) as predictor:
        assert engines.threshold == {4.0: 5, 2.0: 3, 1.0: 2}[large]
        assert ("not faster" in engines.describe()) == (large == 4.0)
        assert np.array_equal(engines.run(images)["logits"], predictor.run(images)["logits"])
        assert engines.model.max_batch == 4
        alone = engines.threshold - 1
        assert (engines.together(alone), engines.together(4)) == (1, 1 if large == 4.0 else 4)


def test_an_engine_with_a_static_batch_is_padded(static_bundle):
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), np.uint8)
    with load_engines(static_bundle, max_batch=8) as engines:
        assert engines.model.max_batch == 3
        assert engines.describe() == "batches of 3, the engine's own; fewer images are padded"
        assert engines.together(1) == 3
        assert np.allclose(engines.run(images)["logits"], images.reshape(2, 4, 16).sum(2) / np.float32(255))


def test_without_batching_one_engine_is_loaded(served_bundle):
    with load_engines(served_bundle, max_batch=1) as engines:
        assert engines.describe() == "one by one"
        assert engines.together(9) == 1
        assert engines.predictor.why.startswith("onnxruntime-cpu-fp32: the bundle's only engine")
