"""ONNX Runtime's GPU providers on a machine without them: what is refused and how; what does not need a GPU runs here.

What takes buffers on the GPU is run for real with the CPU provider and buffers in host memory.
"""

import ctypes
import os
import shutil
import stat

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from vitdeploy.errors import CapabilityError, EngineError, MissingPackageError, UnsafeError, UntrustedEngineError
from vitdeploy.runtime import ort, ort_gpu
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.ort_gpu import CUDA, SHAPE_NODES, TENSORRT, OnnxRuntimeGpuRunner
from vitdeploy.runtime.trust import private_folder
from vitdeploy.spec import EngineSpec, TensorSpec

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
TARGETS = (CUDA, TENSORRT)
# A provider of the CPU's package that takes no node, so that ONNX Runtime would run all of them on the CPU.
TAKES_NOTHING = "AzureExecutionProvider"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitdeploy"


@pytest.fixture
def graph(small_export):
    return small_export / "model.onnx"


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The runner's own code, with the one provider that is here."""
    monkeypatch.setitem(ort_gpu.PROVIDERS, CUDA, ort.CPU_PROVIDER)
    monkeypatch.setattr(ort_gpu, "DEVICE", "cpu")


def cpu_package_only(target):
    if ort_gpu.PROVIDERS[target] in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has {ort_gpu.PROVIDERS[target]}")


def images(seed, batch=2):
    return {"image": np.random.default_rng(seed).integers(0, 256, (batch, 32, 32, 1), dtype=np.uint8)}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_the_package_for_cpus_is_refused_with_what_it_has(target):
    cpu_package_only(target)
    for require in (ort_gpu.require_provider, require_runtime):
        with pytest.raises(CapabilityError, match=f"has no {ort_gpu.PROVIDERS[target]}") as caught:
            require(target)
        assert ort.CPU_PROVIDER in caught.value.found
        assert caught.value.expected == ort_gpu.PROVIDERS[target]
        assert "pip uninstall onnxruntime" in caught.value.fix
        assert "pip install 'vitdeploy[cuda]'" in caught.value.fix


@pytest.mark.parametrize("target", TARGETS)
def test_without_any_package_the_one_for_gpus_is_named(target, monkeypatch):
    def missing():
        raise MissingPackageError("onnxruntime", "onnxruntime", "running")

    monkeypatch.setattr(ort, "require", missing)
    with pytest.raises(MissingPackageError, match="onnxruntime-gpu") as caught:
        ort_gpu.require_provider(target)
    assert caught.value.fix == "pip install 'vitdeploy[cuda]'"


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_for_a_gpu_does_not_load_here(target, graph):
    cpu_package_only(target)
    spec = TensorSpec("image", "uint8", (1, 32, 32, 1))
    engine = EngineSpec(target, "fp32", graph.name, (graph.name,), 1, True, "", (spec,), (spec,))
    with pytest.raises(CapabilityError, match="has no"):
        make_runner(graph.parent, engine).load()


def test_a_graph_that_would_run_on_the_cpu_is_refused(graph, monkeypatch):
    """ONNX Runtime itself refuses it: the provider asked for takes no node."""
    if TAKES_NOTHING not in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has no {TAKES_NOTHING}")
    monkeypatch.setitem(ort_gpu.PROVIDERS, CUDA, TAKES_NOTHING)
    monkeypatch.setattr(ort_gpu, "provider_options", lambda *args, **kwargs: {})
    with pytest.raises(CapabilityError, match=f"{TAKES_NOTHING} does not support every node") as caught:
        OnnxRuntimeGpuRunner(graph, target=CUDA, name="engine", batch=1, options={}).load()
    assert caught.value.expected == f"all nodes on {TAKES_NOTHING}"


def test_a_file_that_is_no_graph_is_refused(tmp_path, on_the_cpu):
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError, match="ONNX Runtime cannot load"):
        ort_gpu.open_session(tmp_path / "graph.onnx", CUDA, batch=1, capture=False, strict=False)


def test_a_library_that_does_not_load_is_named_by_the_loader(tmp_path, monkeypatch):
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").write_bytes(b"no library")
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    found = ort_gpu.missing_library(onnxruntime, CUDA)
    assert "libonnxruntime_providers_cuda.so" in found
    error = ort_gpu._missing(onnxruntime, CUDA)
    assert error.found == found
    assert "onnxruntime-gpu[cuda,cudnn]" in error.fix
    assert ort_gpu.missing_library(onnxruntime, TENSORRT) == ""


def test_a_dynamic_axis_beside_the_batch_is_refused():
    source = ir.val("source", ir.DataType.INT64, ("batch", "length"))
    same = ir.node("Identity", [source])
    same.outputs[0].name, same.outputs[0].dtype, same.outputs[0].shape = "same", source.dtype, source.shape
    graph = ir.Graph([source], same.outputs, nodes=[same], opset_imports={"": 20}, name="tokens")
    session = ort.open_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    with pytest.raises(CapabilityError, match="needs fixed shapes") as caught:
        ort_gpu.tensors(session, 2)
    assert caught.value.found == "source: int64[2, length]"


# --- what runs --------------------------------------------------------------------------------------------------------


def test_a_run_over_bound_buffers_gives_the_answers_of_a_plain_one(graph, on_the_cpu):
    with OnnxRuntimeRunner(graph, name="plain", batch=2) as plain:
        expected = [plain.infer(images(seed))["logits"] for seed in range(3)]
    options = {SHAPE_NODES: "none"}  # the CPU's provider cannot refuse the CPU
    with OnnxRuntimeGpuRunner(graph, target=CUDA, name="bound", batch=2, options=options) as runner:
        assert [tensor.shape for tensor in (*runner.inputs, *runner.outputs)] == [(2, 32, 32, 1), (2, 10)]
        ours = [runner.infer(images(seed))["logits"].copy() for seed in range(3)]
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("capture", [False, True])
def test_no_option_says_a_precision(tmp_path, capture):
    flag = "1" if capture else "0"
    cuda = ort_gpu.provider_options(CUDA, capture=capture)
    assert (cuda["enable_cuda_graph"], cuda["use_tf32"]) == (flag, "0")
    tensorrt = ort_gpu.provider_options(TENSORRT, capture=capture, cache=tmp_path)
    assert tensorrt["trt_cuda_graph_enable"] == flag
    assert tensorrt["trt_engine_cache_path"] == tensorrt["trt_timing_cache_path"] == str(tmp_path)
    assert not {"trt_fp16_enable", "trt_int8_enable", "trt_bf16_enable"} & {*cuda, *tensorrt}


# --- engines that a runtime caches are code ---------------------------------------------------------------------------


def test_each_graph_with_its_weights_and_each_version_has_a_cache_of_its_own(cache, external_graph, tmp_path):
    copy = tmp_path / "graph.onnx"
    for suffix in ("", ".data"):
        shutil.copyfile(f"{external_graph}{suffix}", f"{tmp_path / 'model.onnx'}{suffix}")
    first = ort_gpu.engine_cache(external_graph, "1.31.1")
    assert ort_gpu.engine_cache(tmp_path / "model.onnx", "1.31.1") == first
    with (tmp_path / "model.onnx.data").open("r+b") as file:
        file.write(b"\1\2\3\4")
    other = ort_gpu.engine_cache(tmp_path / "model.onnx", "1.31.1")
    assert len({first, other, ort_gpu.engine_cache(external_graph, "1.32.0")}) == 3
    assert all(folder.is_relative_to(cache / TENSORRT) for folder in (first, other))
    assert not copy.exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_with_an_engine_inside_is_refused(cache, tmp_path, monkeypatch, target):
    monkeypatch.setitem(ort_gpu.PROVIDERS, target, ort.CPU_PROVIDER)
    engine = onnx.helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context=b"plan")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([engine], "engine", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "graph.onnx")
    with pytest.raises(UntrustedEngineError, match="it contains a compiled engine") as caught:
        OnnxRuntimeGpuRunner(tmp_path / "graph.onnx", target=target, name="engine", batch=1, options={}).load()
    assert caught.value.exit_code == 3


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes are POSIX")
def test_private_folders_are_the_users_alone(cache):
    folder = private_folder("engines", "one")
    assert folder == cache / "engines" / "one"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    assert private_folder("engines", "one") == folder
    folder.parent.chmod(0o755)
    with pytest.raises(UnsafeError, match="must be private") as caught:
        private_folder("engines", "one")
    assert caught.value.found.startswith("mode 0755")
    assert caught.value.exit_code == 3


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="links and modes are POSIX")
def test_a_link_is_no_private_folder(cache, tmp_path):
    cache.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="must be private") as caught:
        private_folder("engines")
    assert caught.value.found == "a link"


def test_a_cache_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    from vitdeploy.errors import StorageError

    with pytest.raises(StorageError, match="cannot be written"):
        private_folder("engines")


def test_the_loader_is_the_one_of_this_process():
    """What `missing_library` relies on: loading says by name what is missing."""
    with pytest.raises(OSError, match=r"libnothing\.so\.9"):
        ctypes.CDLL("libnothing.so.9")
