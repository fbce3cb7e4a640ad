"""A predictor and other processes: forked in the middle of work, pickled, sent to workers, preloaded by a server."""

import contextlib
import copy
import http.client
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from vitdeploy.errors import InputError
from vitdeploy.runtime import load
from vitdeploy.runtime.predictor import Predictor

ROOT = Path(__file__).parents[2]
SECONDS = 60

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(scope="module")
def bundles(small_bundle, small_export, tmp_path_factory):
    """The small model for each runtime on the CPU."""
    from vitdeploy.workflows.placement import compile_bundle

    folder = tmp_path_factory.mktemp("openvino")
    if importlib.util.find_spec("openvino"):
        compile_bundle(small_export / "model.onnx", "openvino-cpu", None, None, folder)
    return {"onnxruntime": small_bundle, "openvino": folder}


@pytest.fixture(scope="module")
def image(digits):
    return sorted((digits / "evaluation").glob("*/*.png"))[0]


@pytest.fixture(scope="module")
def answers(bundles, image):
    found = {}
    for name, bundle in bundles.items():
        with load(bundle) as predictor:
            found[name] = predictor.predict(image)
    return found


def script(code, *arguments):
    """What a program prints, whose children are ended with it."""
    argv = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                               start_new_session=True)  # fmt: skip
    try:
        out, error = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, error
    return out


# The parent's thread predicts all the time. Each child does one thing; the parent says how it ended.
BUSY = """
import itertools, os, sys, threading, time, warnings
from vitdeploy.errors import ClosedError
from vitdeploy.runtime import load

bundle, image, streams = sys.argv[1], sys.argv[2], int(sys.argv[3])
predictor = load(bundle, streams=streams)
expected = predictor.predict(image)
running = True
def work():
    while running:
        predictor.predict(image)
threads = [threading.Thread(target=work) for _ in range(streams)]
for thread in threads:
    thread.start()
answers = predictor.stream(itertools.repeat(image), in_flight=2)
next(answers)

def predicts():
    if "openvino" in predictor.target and streams > 1:
        try:
            predictor.predict(image)
        except ClosedError as error:
            assert "load the bundle after the fork" in error.fix
            return
        raise AssertionError
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert predictor.predict(image) == predictor.predict(image) == expected
    (text,) = [str(each.message) for each in heard if each.category is RuntimeWarning]
    assert "loaded before this process was forked" in text and "after the fork" in text, text

def closes():
    predictor.close()
    try:
        predictor.predict(image)
    except ClosedError:
        return
    raise AssertionError

def goes_on():
    try:
        next(answers)
    except ClosedError as error:
        assert "the stream was started before this process was forked" in error.message, error

for act in (predicts, closes, goes_on):
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            print(act.__name__, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    for _ in range(1200):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.01)
    else:
        print(act.__name__, "hangs", flush=True)
        os.kill(child, 9)
        os.waitpid(child, 0)
running = False
for thread in threads:
    thread.join()
answers.close()
assert predictor.predict(image) == expected
predictor.close()
print("ended")
"""


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_child_that_is_forked_in_the_middle_of_a_prediction(bundles, image, runtime, streams):
    pytest.importorskip(runtime)
    assert script(BUSY, bundles[runtime], image, streams).split() == ["ended"]


def test_a_child_that_only_ends_does_not_wait_for_threads_of_openvino(bundles):
    pytest.importorskip("openvino")
    code = """
        import os, sys, time
        from vitdeploy.runtime import load
        predictor = load(sys.argv[1])
        child = os.fork()
        if child:
            print(os.waitpid(child, 0)[1])
    """
    assert script(code, bundles["openvino"]).split() == ["0"]


def test_copies_load_the_bundle_again_with_the_same_arguments(small_bundle, image, monkeypatch):
    monkeypatch.chdir(small_bundle.parent)
    with load(small_bundle.name, "onnxruntime-cpu", threads=1, reduced=True) as predictor:
        expected = predictor.predict(image)
        data = pickle.dumps(predictor)
        monkeypatch.chdir("/")
        for other in (copy.deepcopy(predictor), pickle.loads(data)):  # noqa: TID251
            with other:
                assert other.predict(image) == expected
                assert other.runner is not predictor.runner
                assert (other.reduced, other.runner.threads, other.why) == (True, 1, predictor.why)


def test_what_cannot_be_copied_says_what_to_do(small_bundle):
    with load(small_bundle) as predictor:
        for each in (predictor.runner, Predictor(predictor.runner, predictor.preprocess)):
            with pytest.raises(InputError, match="cannot be pickled or copied") as error:
                pickle.dumps(each)
            assert "load it there" in error.value.fix


def _answer(predictor, image, answers):
    answers.put(predictor.predict(image))


@pytest.mark.parametrize(
    ("runtime", "method"), [("onnxruntime", "fork"), ("openvino", "fork"), ("onnxruntime", "spawn")]
)
def test_a_predictor_is_given_to_a_process(bundles, image, answers, method, runtime):
    """By `spawn` it is pickled; a forked child has it, and loads it again."""
    pytest.importorskip(runtime)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with load(bundles[runtime]) as predictor, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of the child; and from Python 3.12 on one of forks beside threads
        process = context.Process(target=_answer, args=(predictor, image, queue))
        process.start()
        found = queue.get(timeout=SECONDS)
        process.join(SECONDS)
    assert process.exitcode == 0
    assert found == answers[runtime]


class Answers:
    """A data set of answers, as somebody writes it who labels with a bundle."""

    def __init__(self, predictor, images):
        self.predictor, self.images = predictor, images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.predictor.predict(self.images[index]).index


@pytest.fixture
def signals_of_children():
    """PyTorch's data loader leaves a handler behind. Whatever has ended a stack for signals in this thread, as an
    `openvino.Core` of another test may have, would make the end of any later child a SIGSEGV."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("signals_of_children")
def test_workers_of_a_data_loader(small_bundle, image, answers):
    data = pytest.importorskip("torch.utils.data")
    with load(small_bundle) as predictor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": SECONDS}
        loader = data.DataLoader(Answers(predictor, [image] * 4), **how)
        assert [int(each) for each in loader] == [answers["onnxruntime"].index] * 4


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_gunicorn_with_the_application_loaded_before_its_workers(bundles, image, answers, runtime, tmp_path):
    if importlib.util.find_spec("gunicorn") is None:
        pytest.skip("gunicorn is not installed: pip install gunicorn")
    (tmp_path / "served.py").write_text(
        "from vitdeploy.runtime import load\n"
        f"predictor = load({str(bundles[runtime])!r})\n"
        "def app(environ, start_response):\n"
        f"    label = predictor.predict({str(image)!r}).label\n"
        "    start_response('200 OK', [('Content-Type', 'text/plain')])\n"
        "    return [label.encode()]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = ["--preload", "--workers", "2", "--graceful-timeout", "5", "--bind", f"127.0.0.1:{port}", "served:app"]
    argv = [sys.executable, "-m", "gunicorn", *how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with (tmp_path / "log").open("w+") as log:
        server = subprocess.Popen(argv, cwd=tmp_path, env=environment, stderr=log)
        try:
            end = time.monotonic() + SECONDS
            while True:
                try:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                    connection.request("GET", "/")
                    break
                except ConnectionRefusedError:
                    assert server.poll() is None and time.monotonic() < end
                    time.sleep(0.05)
            assert connection.getresponse().read().decode() == answers[runtime].label
            connection.close()
            server.terminate()
            assert server.wait(SECONDS) == 0
        finally:
            server.kill()
        log.seek(0)
        assert "loaded before this process was forked" in log.read()


@pytest.mark.parametrize("ends", ["in another thread", "first made, first closed"])
def test_a_signal_after_an_engine_of_openvino_has_ended(bundles, image, ends):
    """Whose thread's stack for signals ended with it, so that Ctrl-C ended the process with SIGSEGV."""
    pytest.importorskip("openvino")
    code = """
        import gc, os, signal, sys, threading
        from vitdeploy.runtime import load
        signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
        predictors = [load(sys.argv[1]) for _ in range(2)]
        predictors[0].predict(sys.argv[2])
        def end():
            while predictors:
                predictors.pop(0).close()
                gc.collect()
        if sys.argv[3] == "in another thread":
            thread = threading.Thread(target=end)
            thread.start()
            thread.join()
        else:
            end()
        os.kill(os.getpid(), signal.SIGUSR1)
    """
    assert script(code, bundles["openvino"], image, ends).split() == ["handled"]
