"""Shared by all tests: a small model exported once, the embedded digits, the command line as a child process, a Ray
cluster."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from tests.parity import Recorder
    from vitdeploy.models.source import Source

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "calibration" / "digits"
REVERSE = ROOT / "calibration" / "reverse"
# Small enough to export in a few seconds, and still every part of a ViT.
SMALL_MODEL = "vit_w32d2h2_patch8_32"
DIGITS_MODEL = "vit_w192d4h3_patch4_32"
SEQUENCE_MODEL = "transformer_w32e2d2h4_v13_l20"
NO_RAY = "Ray is not installed: pip install 'vitdeploy[ray]'"
# Of tests that `make scale`, a part of CI too, does the like of at more size.
IN_SCALE = pytest.mark.skipif(
    "VITDEPLOY_TEST_DEPTH" not in os.environ, reason="make scale does as much; VITDEPLOY_TEST_DEPTH=1 runs this, too"
)
# Of a cluster only what runs tasks: no dashboard, no autoscaler, nobody who reads logs.
HEAD_NODE = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
# The Ray cluster that runs, if one does.
CLUSTERS: list[Any] = []

# Files that use a Ray cluster, which runs from the first of them to the last, in one process of tests.
RAY = (
    *("test_sweep_on_ray.py", "test_executors.py", "test_run_executors.py", "test_ray_connections.py"),
    *("test_shard_executors.py", "test_calibrate_shards.py"),
)
# Files that take longest, longest first: started last, one would run on alone when all others are done.
LONGEST = (
    *("test_walks.py", "test_modules.py", "test_notebooks.py", "test_detectors.py", "test_tasks.py", "test_kill.py"),
    *("test_readme.py", "test_values.py", "test_web.py", "test_graphs.py", "test_dense.py", "test_digits.py"),
    *RAY,
    "test_tune_executors.py",
    *("test_cpp_maps.py", "test_run.py", "test_packaging.py", "test_image_to_text.py", "test_tune.py", "test_ssh.py"),
    *("test_sweep.py", "test_sizes.py", "test_vit_export.py", "test_prompted.py", "test_verbs.py", "test_bad_input.py"),
    *("test_external_modules.py", "test_bisect.py", "test_zero_shot.py", "test_family.py", "test_working_folder.py"),
    *("test_detector_folders.py", "test_unrelated.py", "test_prepare.py"),
    *("test_families.py", "test_real_weights.py", "test_module.py", "test_modules_as_bundles.py"),
    *("test_dense_modules.py", "test_selftest.py", "test_layout.py", "test_detr_export.py", "test_export.py"),
    *("test_docs.py", "test_whole_pipeline.py", "test_regression.py", "test_determinism.py", "test_compile.py"),
)

# Files of half a minute and more: `make test` runs them, `make test-PACKAGE` leaves them out.
SLOW = {
    *("compatibility/test_modules.py", "embed/test_web.py", "faults/test_kill.py"),
    *("workflows/test_sweep_on_ray.py", "workflows/test_tune_executors.py"),
    *("workflows/test_sweep.py", "tasks/test_tasks.py", "workflows/test_tune.py", "api/test_notebooks.py"),
    *("tasks/test_dense.py", "external/test_detectors.py", "devices/test_fleet.py"),
}

# Threads that wait for others sleep. By default they spin, which takes the core that the other process of tests needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Threads of small tensors wait more than they compute, and every worker has the cores' number of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("torch") is None:

    class Absent:
        """What imports PyTorch skips where it is not installed, as in `make test-lowest`."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "torch":
                pytest.skip("needs PyTorch", allow_module_level=True)

    sys.meta_path.append(Absent())

Cli = Callable[..., subprocess.CompletedProcess[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-parity", type=Path, metavar="FILE", help="append what parity tests measure to FILE")
    parser.addoption("--write-compatibility", action="store_true", help="rewrite docs/results/compatibility")


def pytest_configure(config: pytest.Config) -> None:
    """The embedded images, where `make` did not unpack them; before any worker looks for them."""
    if not hasattr(config, "workerinput") and not (DIGITS / "training").is_dir():
        subprocess.run([sys.executable, "-m", "tarfile", "-e", str(DIGITS / "images.tar.gz"), str(DIGITS)], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """pytest rewrites the assertions of all files of tests once: here each process of a clean clone begins at another
    file, and reads those that the others have rewritten meanwhile."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files = sorted(file for argument in session.config.args for file in Path(argument).rglob("test_*.py"))
    first = int(os.environ["PYTEST_XDIST_WORKER"][2:]) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in (*files[first:], *files[:first]):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which come again where it is collected
            importlib.import_module(".".join(file.resolve().relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; `-m parity` selects the tests that take that fixture, `-m slow` those of SLOW."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        if "parity" in getattr(item, "fixturenames", ()):
            item.add_marker("parity")
        if f"{item.path.parent.name}/{item.path.name}" in SLOW:
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Benches of the tests wait for no other. What a user's cache would remember lies in a folder of the tests."""
    from tests.command_line import undisturbed

    cache = base_of(tmp_path_factory) / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with undisturbed(tmp_path_factory.mktemp("lock")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


def pytest_collection_finish() -> None:
    """Nothing that is loaded by now goes, so no garbage collection needs to look at it."""
    gc.collect()
    gc.freeze()
    if "onnxruntime" in sys.modules:
        import onnxruntime

        class Waiting(onnxruntime.SessionOptions):
            """As OMP_WAIT_POLICY: ONNX Runtime reads no environment."""

            def __init__(self) -> None:
                super().__init__()
                self.add_session_config_entry("session.intra_op.allow_spinning", "0")

        onnxruntime.SessionOptions = Waiting


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Recorder:
    """The recorded check of our result against another implementation's. Random weights and inputs are seeded."""
    import torch

    from tests.parity import Recorder

    torch.manual_seed(0)
    return Recorder(request.config.getoption("--record-parity"))


@pytest.fixture(scope="session")
def digits() -> Path:
    """The embedded data set: training/, calibration/, evaluation/, and vit_digits.safetensors."""
    return DIGITS


def base_of(factory: pytest.TempPathFactory) -> Path:
    """The folder of all processes of tests."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills, once for all processes of tests. Who changes something in it copies it first."""
    from filelock import FileLock  # PyTorch depends on it

    out = base_of(factory) / name
    with FileLock(out.with_suffix(".lock")):
        if not out.exists():
            work = factory.mktemp(name)
            make(work)
            work.rename(out)
    return out


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of SMALL_MODEL with 10 classes and 1 channel, trained for seconds on the digits: a model that answers
    everything alike proves nothing."""
    return _checkpoint(tmp_path_factory, "small", trained)


@pytest.fixture(scope="session")
def seeded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded weights of SMALL_MODEL, which know nothing of the digits."""
    return _checkpoint(tmp_path_factory, "seeded", seeded)


def _checkpoint(factory: pytest.TempPathFactory, name: str, make: Callable[[], torch.nn.Module]) -> Path:
    import torch
    from safetensors.torch import save_file

    def write(folder: Path) -> None:
        with torch.random.fork_rng(devices=()):
            save_file(make().state_dict(), folder / f"{name}.safetensors")

    return made_once(factory, f"{name}_checkpoint", write) / f"{name}.safetensors"


def seeded() -> torch.nn.Module:
    """SMALL_MODEL with 10 classes and 1 channel, and seeded weights."""
    import dataclasses

    import torch

    from vitdeploy.models.catalog import find_or_raise

    torch.manual_seed(1)
    family, config = find_or_raise(SMALL_MODEL)
    model = family.build(dataclasses.replace(config, num_classes=10, in_channels=1))
    with torch.no_grad():  # a fresh model's weights are so small that all logits are nearly equal
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def trained() -> torch.nn.Module:
    """The same after some epochs on all digits, as it is for tests alone: it answers 9 of 10 of them rightly."""
    import numpy as np
    import torch
    from PIL import Image

    model = seeded().train()
    files = sorted(DIGITS.glob("*/*/*.png"))
    large = [np.asarray(Image.open(file).resize((32, 32), Image.Resampling.BICUBIC), np.float32) for file in files]
    pixels = torch.tensor(np.stack(large))[:, None] / 127.5 - 1
    classes = torch.tensor([int(file.parent.name) for file in files])
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        for batch in torch.randperm(len(files)).split(64):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), classes[batch]).backward()
            optimiser.step()
    return model.eval()


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory, small_checkpoint: Path) -> Path:
    """A folder with SMALL_MODEL's model.onnx (opset 20, dynamic batch, uint8 NHWC in) and export.json."""
    return made_once(tmp_path_factory, "small_export", lambda out: export_of(small_checkpoint, out))


@pytest.fixture(scope="session")
def seeded_export(tmp_path_factory: pytest.TempPathFactory, seeded_checkpoint: Path) -> Path:
    """As `small_export`, of seeded weights: one layer's errors can be planted among them."""
    return made_once(tmp_path_factory, "seeded_export", lambda out: export_of(seeded_checkpoint, out))


@pytest.fixture(scope="session")
def digits_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the trained model of the digits."""
    weights = DIGITS / "vit_digits.safetensors"
    return made_once(tmp_path_factory, "digits_export", lambda out: export_of(weights, out, "digits", DIGITS_MODEL))


def export_of(checkpoint: Path, out: Path, name: str = "small", model: str = SMALL_MODEL) -> None:
    from vitdeploy.models.source import Source
    from vitdeploy.spec import PreprocessSpec
    from vitdeploy.stages.export import ExportConfig, export
    from vitdeploy.stages.reference_model import Overrides, find_reference_model

    preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    reference_model = find_reference_model(Source(model, checkpoint), Overrides(preprocess))
    export(reference_model, ExportConfig(name, opset=20, batch=None, in_graph=True), out)


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory, small_export: Path) -> Path:
    """The small model compiled for ONNX Runtime, in float32. Tests copy it before they damage it."""
    from vitdeploy.workflows.placement import compile_bundle

    return made_once(
        tmp_path_factory,
        "small_bundle",
        lambda folder: compile_bundle(small_export / "model.onnx", "onnxruntime-cpu", None, None, folder),
    )


@pytest.fixture(scope="session")
def external_graph(tmp_path_factory: pytest.TempPathFactory, small_export: Path) -> Path:
    """The graph of small_export as one of more than 2 GB is written: model.onnx, and model.onnx.data beside it."""
    from vitdeploy.graph.io import files

    path = tmp_path_factory.mktemp("external") / "model.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MAX_WEIGHT_BYTES", 50_000)
        files.save_graph(files.load_graph(small_export / "model.onnx"), path)
    return path


@pytest.fixture(scope="session")
def sequence_source() -> Source:
    """The embedded encoder-decoder, which writes digits backwards: its answers end after different lengths."""
    from vitdeploy.models.source import Source

    return Source(SEQUENCE_MODEL, REVERSE / "transformer_reverse.safetensors", heads=4)


@pytest.fixture(scope="session")
def sequence_export(tmp_path_factory: pytest.TempPathFactory, sequence_source: Source) -> Path:
    """A folder with its encoder.onnx, decoder_step.onnx (opset 18) and export.json."""
    from vitdeploy.stages.export import ExportConfig, export
    from vitdeploy.stages.reference_model import find_reference_model

    def write(folder: Path) -> None:
        config = ExportConfig("reverse", opset=18, batch=None, in_graph=True)
        export(find_reference_model(sequence_source), config, folder)

    return made_once(tmp_path_factory, "sequence_export", write)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests that do not test the store, in all processes of tests: equal work is done once."""
    return base_of(tmp_path_factory) / "store"


@pytest.fixture
def cli(shared_store: Path, tmp_path: Path) -> Cli:
    """Run `vitdeploy ARGS` as a child process in an empty folder; returns the finished process with its output."""

    def run(
        *args: object, cwd: Path = tmp_path, store: Path = shared_store, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "VITDEPLOY_STORE": str(store), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-m", "vitdeploy.cli.main", *map(str, args)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this test begin with PyTorch and the runtimes loaded."""
    from tests import forked
    from vitdeploy.workflows import executors

    monkeypatch.setattr(executors, "ProcessPoolExecutor", forked.worker_pool)


@pytest.fixture
def forked_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring processes of this test are forked."""
    from tests import forked
    from vitdeploy.benchmark import process

    monkeypatch.setattr(process, "subprocess", forked.SUBPROCESS)


@pytest.fixture(scope="session")
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The token of a Ray cluster, and ways of these tests: no address is asked without one."""
    from vitdeploy.workflows.executors import MODE, TOKEN

    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODE, TOKEN)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        yield path


@pytest.fixture(scope="module")
def cluster(token: Path) -> str:
    """The address of a Ray head node and a second node, of one CPU each; the second one measures."""
    pytest.importorskip("ray", reason=NO_RAY)
    from ray.cluster_utils import Cluster

    from vitdeploy.workflows.executors import DEVICE

    if not CLUSTERS:
        nodes = Cluster(initialize_head=True, head_node_args=HEAD_NODE)
        nodes.add_node(num_cpus=1, resources={DEVICE: 1})
        nodes.wait_for_nodes()
        CLUSTERS.append(nodes)
    return str(CLUSTERS[0].address)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last file that uses it: its processes slow down all others."""
    if CLUSTERS and (nextitem is None or nextitem.path.name not in RAY):
        CLUSTERS.pop().shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """As `--dist loadfile`, with the files of RAY as one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ray" if Path(file).name in RAY else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
