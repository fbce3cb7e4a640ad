"""Commands that are killed: processes that call the command line's `main`, with PyTorch loaded already (`forked`).

They measure in fewer and shorter blocks, and once where they are not to be killed while they do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import vitdeploy
from tests.forked import start

ROOT = Path(vitdeploy.__file__).parents[1]
RUN = ("run", "recipe.yaml", "-o", "out/bundle", "-v")
# Each stage with the line that says it has begun (or that the kill before came too late for it), and the longest delay.
STAGES = {
    "export": ("export to ONNX|reused export", 2.0),
    "optimize": ("optimize|reused optimize", 0.05),
    "calibrate": ("calibrate|reused calibrate", 0.05),
    "place": ("write float graph |quantize for |reused place", 0.01),
    "compile": ("compile |reused compile", 0.05),
    "reference": ("original on the evaluation images|reused reference", 0.1),
    "verify": ("onnxruntime-cpu-.* on the evaluation images|reused verify", 0.05),
    "bench": ("bench$", 0.2),
}
# Run in the forked process, in a session of its own.
COMMAND = """
import contextlib, functools, os, pathlib, resource, signal, sys, tempfile
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests themselves run in the background
os.chdir(home)
os.environ.update(VITDEPLOY_STORE=store, TMPDIR=scratch, PYTHONPATH=root)
tempfile.tempdir = None
os.dup2(os.open(os.devnull, os.O_RDWR), 1)
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
sys.argv = ["vitdeploy", *words]
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.cli.main import main
from vitdeploy.pipeline import assemble
from tests.command_line import undisturbed
from tests.faults.crash import recording
blocks = {"block_seconds": 0.1, "min_rounds": 3, "warmup": 0.1, "processes": 1}
if short:
    blocks |= {"block_seconds": 0.02, "max_extension": 1}
assemble.Protocol = functools.partial(Protocol, **blocks)
assemble.RUN_ROUNDS = 3
if file_bytes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
recorded = recording(pathlib.Path(home), pathlib.Path(record)) if record else contextlib.nullcontext()
with undisturbed(pathlib.Path(home)) if short else contextlib.nullcontext(), recorded:
    main()
"""
# The same stages without the command line; the measurements, which always differ, are those of another run.
UNINTERRUPTED = """
import json, os
from pathlib import Path
from vitdeploy.document.bench import Bench
from vitdeploy.pipeline.assemble import write_run
from vitdeploy.pipeline.job import prepare
from vitdeploy.pipeline.outcome import conclude
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.recipe.load import load_recipe
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.spec import decode
from vitdeploy.store.store import Store
os.chdir(home)
recipe = load_recipe(Path("recipe.yaml"))
(job,) = prepare(recipe, skip_bad=False, progress=silent)
artifacts = run_plan(make_plan(job), Store(Path("calm-store")), resume=True, progress=silent)
bench = decode(Bench, json.loads(Path("out/bundle/report.json").read_text())["bench"])
write_run([conclude(job, artifacts, lambda kept: bench)], recipe, Path("calm"))
"""
# As the fixture `small_checkpoint`, in a process that has PyTorch.
CHECKPOINT = """
import dataclasses, torch
from safetensors.torch import save_file
from vitdeploy.models.catalog import find_or_raise
torch.manual_seed(1)
family, config = find_or_raise(name)
model = family.build(dataclasses.replace(config, num_classes=10, in_channels=1))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
save_file(model.state_dict(), path)
"""
# The files of a bundle that are equal whatever a run measured, by which it chooses engines.
ALWAYS_EQUAL = ("model.onnx", "labels.txt", "calibration.json", "golden/inputs.npz", "golden/outputs.npz")
SMALL_MODEL = "vit_w32d2h2_patch8_32"
# For a command to say something or to end, and for its children to notice that they are alone.
LIMIT_SECONDS, CHILDREN_SECONDS = 120.0, 20.0


def forked(code: str, **names: object) -> BaseProcess:
    """A new process that runs these lines with these names, and a torch that is loaded already."""
    return start(exec, code, names)


def make_checkpoint(path: Path) -> Path:
    """Seeded weights of the small model."""
    process = forked(CHECKPOINT, name=SMALL_MODEL, path=str(path))
    process.join(timeout=120)
    assert process.exitcode == 0
    return path


def write_recipe(home: Path, checkpoint: Path, data: Path) -> None:
    """`home`/recipe.yaml, of a small model for one target."""
    (home / "recipe.yaml").write_text(
        "vitdeploy: 1\n"
        "name: killed\n"
        f"source: {{model: {SMALL_MODEL}, checkpoint: {checkpoint}}}\n"
        "preprocess: {resize: 32, crop: 32, mean: [0.5], std: [0.5]}\n"
        f"data: {{path: {data}, calibration: {{images: 32}}, evaluation: {{images: 64}}}}\n"
        "targets: [onnxruntime-cpu]\n"
        "budget: {min_agreement: 0}\n"
        "bench: {scenarios: [single], batch: [1], duration: 0.3}\n",
        encoding="utf-8",
    )


class Child:
    """`vitdeploy WORDS` in a session of its own, and the lines that it wrote.

    `short`: its bench is over at once. `file_bytes`: no file of its own may become larger. `disk`: where its store and
    its temporary files lie; None: in `home`. `record`: the file that gets what it did to the store and the output in
    `home`, as `tests.faults.crash` reads it.
    """

    def __init__(
        self,
        home: Path,
        short: bool = False,
        words: Sequence[object] = RUN,
        file_bytes: int = 0,
        disk: Path | None = None,
        record: Path | None = None,
    ) -> None:
        disk = disk or home
        (disk / "tmp").mkdir(exist_ok=True)
        self.log = home / "log.txt"
        self.log.unlink(missing_ok=True)
        self.lines: list[str] = []
        places = {"store": disk / "store", "scratch": disk / "tmp", "log": self.log, "root": ROOT}
        named = {name: str(path) for name, path in places.items()}
        named |= {"home": str(home), "record": str(record or "")}
        self.process = forked(COMMAND, words=[*map(str, words)], short=short, file_bytes=file_bytes, **named)

    def wait_for(self, pattern: str) -> None:
        """Wait until a line that begins like this has been written; AssertionError if none comes."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.process.is_alive() and time.monotonic() < deadline:
            if self.log.exists() and re.search(f"^({pattern})", self.log.read_text(encoding="utf-8"), re.MULTILINE):
                return
            time.sleep(0.002)
        self.kill()
        text = "\n".join(self.lines)
        raise AssertionError(f"no line like {pattern!r}, exit status {self.process.exitcode}:\n{text}")

    def wait_for_bundle(self) -> None:
        """Wait until it begins to write the bundle, or ends."""
        self.wait_for("bench$")
        deadline = time.monotonic() + 60
        out = self.log.parent / "out"
        while self.process.is_alive() and not list(out.glob(".tmp-*/*")) and time.monotonic() < deadline:
            time.sleep(0.002)

    def signal(self, number: int, *, group: bool = True) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def kill(self, *, group: bool = True) -> int | None:
        """Its exit status: that of the kill, or its own if that came too late."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL, group=group)
        return self.end()

    def end(self) -> int | None:
        """Its exit status, when it and all its children are gone; None if one of them had to be killed."""
        self.process.join(timeout=LIMIT_SECONDS)
        deadline = time.monotonic() + CHILDREN_SECONDS
        while (left := processes_of(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return None if left else self.process.exitcode


def processes_of(session: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(number) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def digests(bundle: Path) -> dict[str, str]:
    """The digest of every file of a bundle that must not depend on how it was made."""
    names = ["model.onnx", "labels.txt", "calibration.json"]
    names += ["monitor.json"] if (bundle / "monitor.json").is_file() else []
    names += [path.relative_to(bundle).as_posix() for path in sorted(bundle.glob("engines/*/graph.onnx"))]
    names += [path.relative_to(bundle).as_posix() for path in sorted(bundle.glob("golden/*.npz"))]
    return {name: hashlib.sha256((bundle / name).read_bytes()).hexdigest() for name in names}


def published(home: Path) -> list[str]:
    """What stands in the folder of the output under names that are not temporary."""
    return [path.name for path in (home / "out").glob("[!.]*")]


def unfinished(home: Path) -> list[Path]:
    """What is being written, or was: in the store, and beside the output."""
    return [path for place in ("store", "out") for path in (home / place).rglob(".[to][ml][pd]-*")]


def scratch(home: Path) -> set[Path]:
    """What the system's folder for temporary files holds of ours."""
    return set((home / "tmp").glob("vitdeploy*"))
