"""The runners: input checks, life-cycle, threads, and what goes wrong with a runtime."""

import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.graph.builder import Builder, difference, run, values
from vitdeploy.errors import (
    CapabilityError,
    ClosedError,
    EngineError,
    MissingPackageError,
    TargetError,
    TensorError,
    VitdeployError,
)
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import usable_cores
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner, open_session
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec, TensorSpec

RUNNERS = {"onnxruntime": OnnxRuntimeRunner, "openvino": OpenVinoRunner}


class Echo(Runner):
    """Gives its inputs back; has one input of pixels and one of numbers."""

    def __init__(self, name, batch="batch"):
        super().__init__(name)
        self.batch = batch

    def _load(self):
        self.inputs = (TensorSpec("image", "uint8", (self.batch, 4, 4, 3)), TensorSpec("scale", "float32", (1,)))
        self.outputs = self.inputs
        self.provider = "echo"

    def _infer(self, feeds):
        return dict(feeds)

    def _close(self):
        self.provider = ""


@pytest.fixture(params=["batch", 2])
def echo(request):
    """Of any batch, and pinned to the one that `feeds` have, which is checked faster."""
    with Echo("echo", request.param) as runner:
        yield runner


@pytest.fixture(params=RUNNERS)
def runtime(request):
    pytest.importorskip(request.param, reason=f"pip install 'vitdeploy[{request.param}]'")
    return request.param


@pytest.fixture
def small(runtime, small_export):
    """The small model on each runtime, pinned to a batch of 2."""
    with RUNNERS[runtime](small_export / "model.onnx", name="small", batch=2) as runner:
        yield runner


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 1), np.uint8)


def feeds(**changes):
    return {"image": np.zeros((2, 4, 4, 3), np.uint8), "scale": np.ones(1, np.float32), **changes}


# --- checks -----------------------------------------------------------------------------------------------------------


def test_what_fits_is_passed_on(echo):
    given = feeds(image=np.full((2 if echo.batch == 2 else 5, 4, 4, 3), 7, np.uint8))
    assert np.array_equal(echo.infer(given)["image"], given["image"])


@pytest.mark.parametrize("names", [(), ("image",), ("image", "scale", "more"), ("pixels", "scale")])
def test_other_input_names_are_refused(echo, names):
    with pytest.raises(TensorError, match="wrong input names") as caught:
        echo.infer({name: np.zeros((2, 4, 4, 3), np.uint8) for name in names})
    assert caught.value.expected == "image, scale"
    assert caught.value.found == (", ".join(names) or "none")


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint16", "bool", "int64"])
def test_another_dtype_is_refused(echo, dtype):
    with pytest.raises(TensorError, match="dtype or shape of input 'image'") as caught:
        echo.infer(feeds(image=np.zeros((2, 4, 4, 3), dtype)))
    assert caught.value.found == f"{dtype} [2, 4, 4, 3]"
    assert caught.value.expected == f"uint8 {[echo.batch, 4, 4, 3]}"


@pytest.mark.parametrize("shape", [(4, 4, 3), (2, 3, 4, 4), (2, 4, 4, 1), (2, 4, 4, 3, 1), (), (0, 4, 4, 3)])
def test_another_shape_and_an_empty_batch_are_refused(echo, shape):
    with pytest.raises(TensorError, match="wrong dtype or shape") as caught:
        echo.infer(feeds(image=np.zeros(shape, np.uint8)))
    assert str(list(shape)) in caught.value.found


def test_numbers_in_the_other_byte_order_are_refused(echo):
    swapped = np.ones(1, np.dtype(np.float32).newbyteorder("S"))
    with pytest.raises(TensorError, match="dtype or shape of input 'scale'"):
        echo.infer(feeds(scale=swapped))


def test_what_is_not_contiguous_is_made_so(echo):
    turned = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 4).transpose(0, 2, 3, 1)
    checked = echo.check(feeds(image=turned))["image"]
    assert checked.flags.c_contiguous
    assert np.array_equal(checked, turned)


# --- life-cycle -------------------------------------------------------------------------------------------------------


def test_infer_before_load_is_a_mistake_of_the_caller():
    with pytest.raises(RuntimeError, match=r"load\(\) must be called before infer\(\)"):
        Echo("echo").infer(feeds())


def test_infer_after_close_is_a_mistake_of_the_caller(small):
    small.close()
    with pytest.raises(ClosedError, match="is closed"):
        small.infer({"image": images(2)})


def test_a_closed_runner_can_be_opened_again(small):
    before = small.infer({"image": images(2)})["logits"]
    small.close()
    small.close()
    assert np.array_equal(small.load().infer({"image": images(2)})["logits"], before)


def test_loading_twice_loads_once(small):
    inputs = small.inputs
    assert small.load() is small
    assert small.inputs is inputs


def test_a_loaded_runner_says_what_it_takes_and_gives(small):
    assert [str(tensor) for tensor in small.inputs] == ["image: uint8[2, 32, 32, 1]"]
    assert [str(tensor) for tensor in small.outputs] == ["logits: float32[2, 10]"]
    assert "CPU" in small.provider


def test_without_a_batch_any_batch_runs(runtime, small_export):
    with RUNNERS[runtime](small_export / "model.onnx", name="small") as runner:
        assert isinstance(runner.inputs[0].shape[0], str)
        shapes = [runner.infer({"image": images(count)})["logits"].shape for count in (1, 3)]
    assert shapes == [(1, 10), (3, 10)]


def test_another_batch_than_the_pinned_one_is_refused(small):
    with pytest.raises(TensorError) as caught:
        small.infer({"image": images(3)})
    assert caught.value.found == "uint8 [3, 32, 32, 1]"


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_are_not_overwritten_by_the_next_call(small):
    first = small.infer({"image": images(2, seed=1)})["logits"]
    kept = first.copy()
    second = small.infer({"image": images(2, seed=2)})["logits"]
    assert np.array_equal(first, kept)
    assert not np.array_equal(first, second)


def test_outputs_stay_after_close(small):
    output = small.infer({"image": images(2)})["logits"]
    kept = output.copy()
    small.close()
    assert np.array_equal(output, kept)


def test_inputs_are_not_changed(small):
    given = images(2)
    small.infer({"image": given})
    assert np.array_equal(given, images(2))


def test_as_many_run_at_once_as_the_back_end_is_made_for_and_closing_waits_for_all():
    both, go_on, ran = threading.Barrier(3), threading.Event(), []

    class Two(Echo):
        def _infer(self, feeds):
            both.wait(10)
            go_on.wait(10)
            ran.append(1)
            return {}

        def _close(self):
            ran.append("closed")

    runner = Two("two")
    Runner.__init__(runner, "two", at_once=2)
    runner.load()
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(runner.infer, feeds()) for _ in range(2)]
        both.wait(10)  # both are in it
        ends = [pool.submit(runner.close) for _ in range(2)]
        assert not wait(ends, 0.05).done
        go_on.set()
        for each in (*runs, *ends):
            each.result(10)
    assert ran == [1, 1, "closed"]


def test_streams_give_every_thread_the_answer_to_its_own_images(small_export, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pytest.importorskip("openvino", reason="pip install 'vitdeploy[openvino]'")
    model = small_export / "model.onnx"
    given = [images(2, seed) for seed in range(24)]
    with OpenVinoRunner(model, name="one", batch=2) as one:
        expected = [one.infer({"image": each})["logits"] for each in given]
    with OpenVinoRunner(model, name="two", batch=2, streams=2) as two, ThreadPoolExecutor(5) as pool:
        assert (two.at_once, two.compiled.get_property("NUM_STREAMS")) == (2, min(2, usable_cores()))
        found = list(pool.map(lambda each: two.infer({"image": each})["logits"], given))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_closing_waits_for_the_run_of_another_thread_and_none_comes_after_it():
    began, go_on, order = threading.Event(), threading.Event(), []

    class Slow(Echo):
        def _infer(self, feeds):
            began.set()
            go_on.wait(10)
            order.append("ran")
            return {}

        def _close(self):
            order.append("closed")

    runner = Slow("slow").load()
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(runner.infer, feeds())
        began.wait(10)
        end = pool.submit(runner.close)
        assert not wait([end], 0.05).done
        go_on.set()
        run.result(10), end.result(10)
    assert order == ["ran", "closed"]
    with pytest.raises(RuntimeError, match="slow is closed"):
        runner.infer(feeds())


def test_eight_threads_give_the_answers_of_one(small):
    batches = [images(2, seed) for seed in range(24)]
    alone = [small.infer({"image": batch})["logits"] for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda batch: small.infer({"image": batch})["logits"], batches))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_both_runtimes_agree(small_export):
    logits = {}
    for name, kind in RUNNERS.items():
        pytest.importorskip(name, reason=f"pip install 'vitdeploy[{name}]'")
        with kind(small_export / "model.onnx", name=name, batch=4) as runner:
            logits[name] = runner.infer({"image": images(4)})["logits"]
            if name == "openvino":  # left to itself it takes half precision, where the CPU has it
                assert runner.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
    np.testing.assert_allclose(logits["onnxruntime"], logits["openvino"], rtol=0, atol=1e-4)


OPENS = """
import sys
events = []
sys.addaudithook(lambda event, _: events.append(event) if event in ("os.fork", "socket.connect") else None)
from vitdeploy.runtime.openvino import the_core
the_core()
print(events, "openvino_telemetry.main" in sys.modules)
"""


def test_openvino_reports_to_nobody():
    """Its own import forks a process that sends an event."""
    pytest.importorskip("openvino", reason="pip install 'vitdeploy[openvino]'")
    pytest.importorskip("openvino_telemetry", reason="nothing to turn off")
    done = subprocess.run([sys.executable, "-c", OPENS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[] False\n"


@pytest.mark.parametrize("between", ["norm", "root mean square", "sum"])
@pytest.mark.parametrize(("queries", "heads"), [(2, 2), (3, 2)])
def test_both_runtimes_agree_on_as_many_queries_as_heads(queries, heads, between, tmp_path):
    pytest.importorskip("openvino", reason="pip install 'vitdeploy[openvino]'")
    b = Builder()

    def projected(name, tokens, seed):
        x = b.add("MatMul", name, values(heads * 8, heads * 8, seed=seed))
        return b.add("Transpose", b.add("Reshape", x, np.array([-1, tokens, heads, 8])), perm=[0, 2, 1, 3])

    def changed(x):
        if between == "norm":
            return b.add("LayerNormalization", x, values(8, seed=4), axis=-1)
        if between == "sum":
            return b.add("Add", x, values(8, seed=4))
        squares = b.add("ReduceMean", b.add("Mul", x, x), np.array([-1]), keepdims=1)
        return b.add("Div", x, b.add("Sqrt", b.add("Add", squares, 1e-6)))

    x, y = b.input("x", ["batch", queries, heads * 8]), b.input("y", ["batch", 10, heads * 8])
    query, key = changed(projected(x, queries, 1)), changed(projected(y, 10, 2))
    scores = b.add("MatMul", b.add("Mul", query, 0.3), b.add("Transpose", key, perm=[0, 1, 3, 2]))
    answer = b.add("MatMul", b.add("Softmax", scores, axis=-1), projected(y, 10, 3))
    proto = b.model(b.add("Transpose", answer, perm=[0, 2, 1, 3]), rank=4)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    feeds = {"x": values(2, queries, heads * 8), "y": values(2, 10, heads * 8, seed=5)}
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    with OpenVinoRunner(tmp_path / "model.onnx", name="heads", batch=2, options=options) as runner:
        assert difference(list(runner.infer(feeds).values()), run(proto, **feeds)) <= 1e-5


@pytest.mark.parametrize("runtime", RUNNERS)
def test_outputs_keep_the_names_of_the_file(runtime, tmp_path):
    """OpenVINO moves what works on single numbers before a Gather, and the output then has the Gather's name, too."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Gather", ["product", "zero"], ["Gather_1"], axis=2),
        helper.make_node("Elu", ["Gather_1"], ["scale"]),
    ]
    weights = [helper.make_tensor("w", TensorProto.FLOAT, [2, 1], [1.0, -2.0])]
    weights.append(helper.make_tensor("zero", TensorProto.INT64, [], [0]))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, 2])]
    found = [helper.make_tensor_value_info("scale", TensorProto.FLOAT, ["b", 3])]
    graph = helper.make_graph(nodes, "g", given, found, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "g.onnx")
    x = np.array([[[1, 1], [3, 1], [0, 0]]], np.float32)
    with RUNNERS[runtime](tmp_path / "g.onnx", name="names") as runner:
        assert [tensor.name for tensor in runner.outputs] == ["scale"]
        np.testing.assert_allclose(runner.infer({"x": x})["scale"], [[np.exp(-1) - 1, 1, 0]], atol=1e-6)


def test_the_number_of_threads_does_not_change_the_answer(runtime, small, small_export):
    with RUNNERS[runtime](small_export / "model.onnx", name="one thread", batch=2, threads=1) as runner:
        alone = runner.infer({"image": images(2)})["logits"]
    np.testing.assert_allclose(alone, small.infer({"image": images(2)})["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("spinning", "told"), [(True, None), (False, "1")])
def test_threads_that_wait_spin_unless_cores_are_for_others(small_export, spinning, told):
    session = open_session(small_export / "model.onnx", batch=1, spinning=spinning)
    options = session.get_session_options()
    found = None
    with contextlib.suppress(RuntimeError):  # it has no such entry
        found = options.get_session_config_entry("session.force_spinning_stop")
    assert found == told


# --- what goes wrong with a runtime -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNNERS)
def test_a_missing_runtime_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError) as caught:
        RUNNERS[name](tmp_path / "model.onnx", name="engine").load()
    assert (caught.value.package, caught.value.extra) == (name, name)
    assert caught.value.fix == f"pip install 'vitdeploy[{name}]'"


def broken_graph(path, kind, good):
    data = good.read_bytes()
    path.write_bytes({"empty": b"", "text": b"<html></html>", "cut": data[: len(data) // 2]}[kind])
    return path


@pytest.mark.parametrize("kind", ["empty", "text", "cut"])
def test_a_broken_graph_is_an_engine_error(runtime, kind, tmp_path, small_export):
    graph = broken_graph(tmp_path / "model.onnx", kind, small_export / "model.onnx")
    with pytest.raises(EngineError, match="cannot load") as caught:
        RUNNERS[runtime](graph, name="broken").load()
    assert caught.value.exit_code == 4
    assert str(graph) in caught.value.message
    assert caught.value.found


def test_a_graph_that_is_not_there_is_an_engine_error(runtime, tmp_path):
    with pytest.raises(EngineError):
        RUNNERS[runtime](tmp_path / "absent.onnx", name="absent").load()


def test_a_runner_that_failed_to_load_can_be_tried_again(runtime, tmp_path, small_export):
    graph = broken_graph(tmp_path / "model.onnx", "text", small_export / "model.onnx")
    runner = RUNNERS[runtime](graph, name="fixed", batch=2)
    with pytest.raises(EngineError):
        runner.load()
    graph.write_bytes((small_export / "model.onnx").read_bytes())
    assert runner.load().infer({"image": images(2)})["logits"].shape == (2, 10)
    runner.close()


def test_a_graph_that_fails_while_running_is_an_engine_error(tmp_path):
    pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
    onnx = pytest.importorskip("onnx", reason="pip install 'vitdeploy[export]'")
    number, helper = onnx.TensorProto, onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "index"], ["row"])],
        "gather",
        [helper.make_tensor_value_info("table", number.FLOAT, [4]), helper.make_tensor_value_info("index", 7, [1])],
        [helper.make_tensor_value_info("row", number.FLOAT, [1])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "g.onnx")
    with OnnxRuntimeRunner(tmp_path / "g.onnx", name="gather") as runner:
        table = np.arange(4, dtype=np.float32)
        assert runner.infer({"table": table, "index": np.array([3])})["row"].tolist() == [3.0]
        with pytest.raises(EngineError, match="gather: ONNX Runtime failed"):
            runner.infer({"table": table, "index": np.array([9])})


# --- engines ----------------------------------------------------------------------------------------------------------


def engine(target="onnxruntime-cpu", batch=2, dynamic_batch=False):
    return EngineSpec(target, "fp32", "model.onnx", ("model.onnx",), batch, dynamic_batch, "CPU", (), ())


def test_a_static_engine_has_one_batch(tmp_path):
    with pytest.raises(TargetError, match="onnxruntime-cpu-fp32 cannot run at batch 4") as caught:
        make_runner(tmp_path, engine(), batch=4)
    assert caught.value.found == "a graph with the fixed batch 2"


@pytest.mark.parametrize("batch", [None, 2])
def test_a_static_engine_runs_at_its_own_batch(small_export, batch):
    assert make_runner(small_export, engine(), batch=batch).batch == 2


def test_a_dynamic_engine_runs_at_any_batch(small_export, runtime):
    for batch in (None, 1, 5):
        with make_runner(small_export, engine(f"{runtime}-cpu", dynamic_batch=True), batch=batch) as runner:
            assert runner.infer({"image": images(batch or 2)})["logits"].shape == (batch or 2, 10)


@pytest.mark.parametrize(("target", "kind"), [("onnxruntime-cpu", OnnxRuntimeRunner), ("openvino-cpu", OpenVinoRunner)])
def test_each_target_has_its_runner(tmp_path, target, kind):
    runner = make_runner(tmp_path, engine(target))
    assert type(runner) is kind
    assert runner.name == f"{target}-fp32"


def test_an_unknown_target_is_refused(tmp_path):
    with pytest.raises(TargetError, match="'tpu'") as caught:
        make_runner(tmp_path, engine("tpu"))
    assert "openvino-cpu" in caught.value.expected


def test_a_half_precision_that_this_cpu_lacks_is_told_and_not_replaced(small_export):
    """OpenVINO itself takes another one without a word: bf16 for fp16, float32 for both."""
    openvino = pytest.importorskip("openvino")
    has = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    for hint, precision in (("f16", "fp16"), ("bf16", "bf16")):
        options = {"INFERENCE_PRECISION_HINT": hint}
        runner = OpenVinoRunner(small_export / "model.onnx", name="engine", batch=1, options=options)
        if precision.upper() in has:
            runner.load().close()
            continue
        with pytest.raises(CapabilityError, match=f"engine needs a CPU with {precision}") as refused:
            runner.load()
        assert refused.value.found.startswith("OpenVINO runs it in ")


@pytest.mark.parametrize("streams", [1, 2])
def test_a_close_under_load_refuses_by_name_what_comes_after_it(runtime, small_export, streams):
    """Threads ask without a pause, which must neither keep the closing one waiting nor reach a runtime that is gone."""
    runner = RUNNERS[runtime](small_export / "model.onnx", name="small", batch=2, threads=1, streams=streams).load()
    expected, going = runner.infer({"image": images(2)})["logits"], threading.Barrier(5)

    def ask():
        going.wait(10)
        for count in range(1_000_000):
            try:
                found = runner.infer({"image": images(2)})["logits"]
            except VitdeployError as error:
                return count, error
            assert np.array_equal(found, expected)
        raise AssertionError("never closed")

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        going.wait(10)
        time.sleep(0.05)
        runner.close()
        ends = [each.result(20) for each in asked]
    assert sum(count for count, _ in ends) > 0
    assert {(type(error), error.code, error.message.partition(":")[0]) for _, error in ends} == {
        (ClosedError, "VD2404", "small is closed")
    }


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "ORT_INTRA_OP_NUM_THREADS"])
def test_threads_of_the_environment_are_those_that_run(small_bundle, monkeypatch, kind, variable):
    pytest.importorskip(kind)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(variable, "2")
    expected = 2 if kind == "onnxruntime" or variable == "OMP_NUM_THREADS" else 1
    with RUNNERS[kind](small_bundle / "model.onnx", name="small", batch=1) as runner:
        assert runner.engine_threads == min(expected, usable_cores()) or kind == "onnxruntime"
        assert runner.engine_threads == expected or kind == "openvino"
    with RUNNERS[kind](small_bundle / "model.onnx", name="small", batch=1, threads=1) as runner:
        assert runner.engine_threads == 1
