"""Conformance: the clients that NVIDIA and KServe publish talk to the server."""

import asyncio
import warnings

import numpy as np
import pytest


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(3).integers(0, 256, (3, 8, 8, 1), np.uint8)


@pytest.fixture(scope="module")
def expected(engines, images):
    return engines.predictor.run(images)["logits"]


@pytest.fixture(scope="module")
def triton():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")


@pytest.fixture
def client(triton, server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as client:
        yield client


def test_triton_asks_for_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("quarters")
    assert client.is_model_ready("quarters", "1")
    assert not client.is_model_ready("cats")
    assert client.get_server_metadata()["name"] == "vitdeploy"
    metadata = client.get_model_metadata("quarters")
    assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == ["image", "logits"]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_triton_infers(triton, client, images, expected, binary_in, binary_out):
    tensor = triton.InferInput("image", list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images, binary_data=binary_in)
    output = triton.InferRequestedOutput("logits", binary_data=binary_out)
    result = client.infer("quarters", [tensor], outputs=[output], request_id="a7", model_version="1")
    assert np.allclose(result.as_numpy("logits"), expected)
    assert result.get_response()["id"] == "a7"
    assert np.allclose(client.infer("quarters", [tensor]).as_numpy("logits"), expected)


def test_triton_infers_many_at_once(triton, client, images, expected):
    def tensor(row):
        given = triton.InferInput("image", [1, 8, 8, 1], "UINT8")
        given.set_data_from_numpy(images[row : row + 1])
        return given

    pending = [client.async_infer("quarters", [tensor(number % 3)]) for number in range(24)]
    for number, request in enumerate(pending):
        assert np.allclose(request.get_result().as_numpy("logits"), expected[number % 3])


def test_triton_is_told_what_is_wrong(triton, client, images):
    from tritonclient.utils import InferenceServerException

    tensor = triton.InferInput("image", [3, 8, 8, 1], "FP32")
    tensor.set_data_from_numpy(images.astype(np.float32))
    with pytest.raises(InferenceServerException, match="datatype 'FP32', but the model takes UINT8") as error:
        client.infer("quarters", [tensor])
    assert "400" in error.value.status()
    with pytest.raises(InferenceServerException, match="no model cats"):
        client.get_model_metadata("cats")


def test_kserve_infers(server, images, expected):
    kserve = pytest.importorskip("kserve", reason="pip install kserve (it brings FastAPI and the Kubernetes client)")

    async def talk(binary):
        config = kserve.inference_client.RESTConfig(protocol="v2", retries=0)
        client = kserve.InferenceRESTClient(config)
        base = f"http://127.0.0.1:{server.port}"
        assert await client.is_server_live(base)
        assert await client.is_server_ready(base)
        assert await client.is_model_ready(base, "quarters")
        tensor = kserve.InferInput("image", list(images.shape), "UINT8")
        tensor.set_data_from_numpy(images, binary_data=binary)
        request = kserve.InferRequest("quarters", [tensor], request_id="a7")
        return await client.infer(base, request, model_name="quarters")

    for binary in (True, False):
        answer = asyncio.run(talk(binary))
        assert answer.id == "a7"
        assert np.allclose(answer.outputs[0].as_numpy(), expected)
