"""Steps of a plan: a stage with the parts of its key, its tools and its files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import MONITOR_FILE
from vitdeploy.bundle.sign import SIGNATURE_FILE
from vitdeploy.data.label_file import read_labels
from vitdeploy.errors import CapabilityError, GraphError, MissingFileError, VitdeployError, quoted
from vitdeploy.extensions import extension_versions, installed_version
from vitdeploy.paths import is_dir, is_file
from vitdeploy.runtime import backend, flows
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import EngineSpec, Precision, decode, encode
from vitdeploy.store.key import Identity, code_version

if TYPE_CHECKING:
    from vitdeploy.graph.io.files import GraphMetadata
    from vitdeploy.store.store import Artifact
    from vitdeploy.tasks.adapter import Data


# --- Steps, candidates and searches -----------------------------------------------------------------------------------


Folders: TypeAlias = "Mapping[str, Artifact]"
# Names of steps that occur once in a plan.
EXPORT, CALIBRATE, REFERENCE, ATTENTION = "export", "calibrate", "reference", "attention"
OPTIMIZE: str = "optimize"
# The rewritten graph of a job that prunes it afterwards; OPTIMIZE then has the pruned graph. Its first word is the
# kind, so that it has the same key as in a job without pruning.
UNPRUNED = f"{OPTIMIZE} unpruned"
# The kind of the step that keeps layers in higher precision.
HIGH_PRECISION = "high_precision"
# What kinds of steps do that have no plain names; the engine follows.
_IN_WORDS = {
    HIGH_PRECISION: "choose layers in higher precision of", "float_rest": "choose float operators of",
    "search": "choose mixed precision of", "parts": "choose token rows of", "place": "prepare the graph of",
    REFERENCE: "run the original", ATTENTION: "draw attention maps", "pruning": "choose what to prune",
}  # fmt: skip
# The original's name among the artifacts.
ORIGINAL = "original"
# Precisions that need calibration.
QUANTIZED = ("int8", "mixed", "fp8", "int4")


@dataclass(frozen=True)
class Step:
    """One stage with its config. `inputs` are names of earlier steps; `outside` are digests of external files;
    `packages` are the versions of the packages that compute it, and the machine if that matters.

    `write` takes the folders of the inputs, the empty folder to fill, and a progress; if the step is `resumable` also
    `scratch`: a folder for its key, which keeps what an interrupted run needs to resume. A step needs no
    version number: the source code of the package is part of the key.
    `measured`: it holds times of this device, whose reuse is reported. `shared_out`: `write` distributes tasks over
    workers from the process that runs it. `usable` returns whether this user may use a stored folder; otherwise the
    folder is computed again.
    `about`: the amount of work, such as the number of images, for time estimates; not part of the key.
    An outline has no `write`, which would keep all images in memory, and has all its tools in `packages`.
    """

    name: str
    kind: str
    write: Callable[..., object] | None
    config: dict[str, Any]
    inputs: tuple[str, ...] = ()
    outside: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    resumable: bool = False
    measured: bool = False
    shared_out: bool = False
    usable: Callable[[Path], bool] = lambda folder: True
    about: dict[str, int] = field(default_factory=dict)

    @property
    def modules(self) -> frozenset[str]:
        """The modules where the code of `write` starts: its own, and those of the values in its closure, whose classes
        its module may not import (such as a task adapter)."""
        assert self.write is not None, "an outline has no code"
        values = inspect.getclosurevars(self.write).nonlocals.values()
        return frozenset({self.write.__module__, *(getattr(value, "__module__", "") for value in values)})

    @property
    def tools(self) -> dict[str, str]:
        """The versions of its packages and of vitdeploy's code, and the modules where `write` starts."""
        if self.write is None:
            return self.packages
        return {**self.packages, "code": code_version(), "modules": " ".join(sorted(self.modules))}

    def outline(self) -> Step:
        """The step without `write`, so that many steps fit in memory."""
        return replace(self, write=None, packages=self.tools)

    def identity(self, made: Mapping[str, Artifact | str]) -> Identity:
        """The identity of its folder, with inputs by their kind, or by their full name if several have the same kind.
        `made`: the artifact of each input, or its digest."""
        kinds = [name.split()[0] for name in self.inputs]
        names = [name if kinds.count(kind) > 1 else kind for name, kind in zip(self.inputs, kinds, strict=True)]
        artifacts = {name: made[of] for name, of in zip(names, self.inputs, strict=True)}
        inputs = {name: of if isinstance(of, str) else of.digest for name, of in artifacts.items()}
        return Identity(self.kind, self.config, {**self.outside, **inputs}, self.tools)

    def key(self, made: Mapping[str, Artifact | str]) -> str:
        """The key of its folder; `made` as for `identity`."""
        return self.identity(made).key


def in_words(name: str) -> str:
    """The name of a step for people, such as "prepare the graph of openvino-cpu-int8"."""
    return " ".join(_IN_WORDS.get(word, word) for word in name.split())


@dataclass(frozen=True)
class Candidate:
    """A target in one precision; `shipped` if the recipe requests it, otherwise a baseline."""

    target: str
    precision: Precision
    shipped: bool

    @property
    def artifact(self) -> str:
        return f"{self.target}-{self.precision}"

    def step(self, kind: str) -> str:
        return f"{kind} {self.artifact}"


Found = TypeVar("Found")


@dataclass(frozen=True)
class Search(Generic[Found]):
    """A kind of search that can be a step of a plan. It writes `file`, whose content is a `table`; `packages` are the
    packages that compute it besides the target's."""

    kind: str
    file: str
    table: type[Found]
    packages: tuple[str, ...] = ("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy")

    def read(self, folder: Path) -> Found:
        return decode(self.table, read_json(folder / self.file))

    def write(self, found: Found, out: Path) -> Found:
        write_json(out / self.file, encode(found))
        return found

    def step(
        self,
        name: str,
        write: Callable[[Folders, Path, Callable[[str, int, int], None]], object],
        config: Facts,
        inputs: tuple[str, ...],
        target: str | None,
        data: Data | None = None,
    ) -> Step:
        """The step with this name. `target`: the target whose runtime it uses; `data`: the data whose calibration
        samples it uses."""
        images = {"images": data.calibration_digest} if data is not None else {}
        versions = {**(target_tools(target) if target is not None else {}), **package_versions(self.packages)}
        return Step(name, self.kind, write, config, inputs, images, versions)


# --- The versions of installed packages, which are part of the keys of stages -----------------------------------------


# Other packages that install a package's module.
SUBSTITUTES = {"onnxruntime": ("onnxruntime-gpu",)}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by package name; "absent" if not installed.

    For a package with substitutes, the version of the one whose module is imported, with the substitute's name, such as
    "onnxruntime-gpu 1.31.1".
    """
    return {
        package: _substituted(package) if package in SUBSTITUTES else installed_version(package) or "absent"
        for package in packages
    }


def _substituted(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "absent"
    home = Path(spec.origin).parent.parent
    # Substitutes first: if both are installed into one folder (which is not supported), the package itself came first.
    for name in (*SUBSTITUTES[package], package):
        for found in importlib.metadata.distributions(name=name):
            if Path(str(found.locate_file(""))).resolve() == home.resolve():
                return found.version if name == package else f"{name} {found.version}"
    return installed_version(package) or "absent"


def backend_versions(target: str) -> dict[str, str]:
    """Versions of the packages that make up the back end of a target."""
    return dict(extension_versions(target, TARGETS[target].backend))


# --- Everything besides the graph that a target's engines depend on ---------------------------------------------------


def target_tools(target: str) -> dict[str, str]:
    """The tools that an engine depends on: the versions of its runtime and of extensions of its back end, this machine,
    and the GPU and its driver.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT or GPU, if the target needs them.
    """
    versions = {**package_versions((TARGETS[target].package,)), **backend_versions(target)}
    return {**versions, "host": str(describe_host()), **RUNTIME[target].describe_device()}


# --- Checks of targets and precisions by the table of targets ---------------------------------------------------------


def check_target(target: str) -> None:
    """Raise TargetError if no target has that name."""
    TARGETS[target]


def check_engine(name: str) -> None:
    """Raise TargetError if `name` is neither a target nor the name of an engine, such as "openvino-cpu-int8"."""
    target = name.rpartition("-")[0]
    check_target(target if target in TARGETS else name)


def check_precision(target: str, precision: str) -> None:
    """Raise the error that `compile` would raise, before any work is done."""
    check_target(target)
    if precision not in TARGETS[target].precisions:
        others = [name for name, row in TARGETS.items() if precision in row.precisions]
        raise CapabilityError(
            f"{target} does not support {precision}",
            found=precision,
            expected=", ".join(TARGETS[target].precisions),
            fix=f"choose one of these, or a target that supports {precision}: {', '.join(others)}"
            if others
            else "choose one of these",
        )


# --- The files that stages write --------------------------------------------------------------------------------------


# Facts about a stage's work, as JSON values.
Facts: TypeAlias = dict[str, Any]

MODEL_FILE = "model.onnx"
LABELS_FILE, TOKENIZER_FILE = "labels.txt", "tokenizer.json"
STATISTICS_FILE, MIXED_FILE, HIGH_PRECISION_FILE = "statistics.npz", "mixed.json", "high_precision.json"
# Every name that a command writes at the top of an output folder; a folder with any other name is never replaced.
OUTPUT_NAMES = (
    *(
        MODEL_FILE,
        "model.onnx.data",
        LABELS_FILE,
        TOKENIZER_FILE,
        *(f"{part}.onnx" for parts in flows.PARTS for part in parts),
    ),
    *("export.json", "optimize.json", "placement.json", "calibration.json", "manifest.json"),
    *("sensitivity.json", "sensitivity.html", MIXED_FILE, HIGH_PRECISION_FILE),
    *("engines", "golden", "sizes", "report.html", "report.json", "bom.cdx.json", MONITOR_FILE, SIGNATURE_FILE),
)
# The same for `vitdeploy tune`.
RECIPE_FILE = "recipe.yaml"
TUNED_NAMES = ("tune.json", "tune.html", RECIPE_FILE)
_WEIGHTS = ("a checkpoint", "vitdeploy export --checkpoint {} -o DIR")
_RECIPE = ("a recipe", "vitdeploy run {}")
# Files that users pass instead of a graph: what they are, and the command that takes them.
_OTHERS = {
    **dict.fromkeys((".safetensors", ".pt", ".pth", ".bin", ".npz", ".ckpt"), _WEIGHTS),
    **dict.fromkeys((".yaml", ".yml"), _RECIPE),
    ".json": ("a JSON file", "pass a graph or its folder; for a model folder: vitdeploy export hf:{1} -o DIR"),
    ".html": ("an HTML page", "open it in a browser, and pass the bundle's folder here"),
}


# Before the libraries that read a graph are imported: the first byte of a file whose first field is one of ModelProto
# (onnx.proto; its number and type).
_FIRST_BYTES = (b"\x08", b"\x12", b"\x1a", b'"', b"(", b"2", b":", b"B", b"r", b"\xa2", b"\xca", b"\xd2")


def graphs_in(folder: Path) -> dict[str, Path]:
    """The graphs in a stage's folder by name: {"model": ...}, or those of a flow, such as {"encoder": ...,
    "decoder_step": ...}."""
    if is_file(folder / MODEL_FILE):
        return {"model": folder / MODEL_FILE}
    found = [{part: folder / f"{part}.onnx" for part in parts} for parts in flows.PARTS]
    return max(({part: file for part, file in each.items() if is_file(file)} for each in found), key=len)


def statistics_file(name: str) -> str:
    """The file of a graph's statistics in the folder of a calibration."""
    return STATISTICS_FILE if name == "model" else f"{name}.{STATISTICS_FILE}"


def find_graph(path: Path) -> Path:
    """The ONNX file in a folder with model.onnx (or encoder.onnx), or the file itself.

    Raises:
        MissingFileError: the file does not exist. GraphError: it is another kind of file.
    """
    file = next(iter(graphs_in(path).values()), path / MODEL_FILE) if is_dir(path) else path
    if not is_file(file):
        raise MissingFileError(
            f"no graph at {path}",
            found=f"no {MODEL_FILE} in the folder" if is_dir(path) else "no such file",
            expected="a folder with model.onnx, or an .onnx file",
            fix="vitdeploy export MODEL --checkpoint FILE -o DIR",
        )
    what, command = _OTHERS.get(file.suffix.lower(), ("", ""))
    with contextlib.suppress(OSError), file.open("rb") as content:
        start = content.read(16)
        if not what and start[:1] not in _FIRST_BYTES:
            what = f"a file that begins with {start!r}" if start else "an empty file"
            command = "vitdeploy export MODEL --checkpoint FILE -o DIR"
    if what:
        raise GraphError(
            f"{path} is not an ONNX graph",
            found=what,
            expected="a folder with model.onnx, or an .onnx file",
            fix=command.format(quoted(path), quoted(path.parent)),
        )
    return file


def require_onnx_file(path: Path) -> None:
    if not is_file(path):
        raise MissingFileError(f"no ONNX file at {path}", fix="check the path")
    find_graph(path)


def require_label_file(path: Path) -> None:
    if not is_file(path):
        raise MissingFileError(
            f"no label file at {path}", expected="a text file with one class name per line", fix="check the path"
        )


def is_ours(file: Path) -> bool:
    """Whether an ONNX file claims that vitdeploy wrote it; False if it cannot be parsed."""
    # Imported here, so that checks of file names do not wait for onnx.
    from vitdeploy.graph.io.admit import metadata_keys
    from vitdeploy.graph.io.files import METADATA_KEY

    try:
        return METADATA_KEY in metadata_keys(file)
    except VitdeployError:
        return False


def labels_beside(graph: Path) -> tuple[str, ...]:
    """The class names in the file next to a graph, () without one.

    Raises:
        DataError: it is not UTF-8.
    """
    file = graph.parent / LABELS_FILE
    return read_labels(file) if is_file(file) else ()


def known_labels(graph: Path, metadata: GraphMetadata) -> tuple[str, ...]:
    """The class names of a graph: its own, or those in the file next to it.

    Raises:
        GraphError: both exist and differ.
        DataError: as in `labels_beside`.
    """
    file, beside = graph.parent / LABELS_FILE, labels_beside(graph)
    if beside and metadata.labels and beside != metadata.labels:
        differ = next((i for i, (a, b) in enumerate(zip(beside, metadata.labels, strict=False)) if a != b), None)
        at = f"{len(beside)} lines" if differ is None else f"line {differ + 1}: {beside[differ]!r}"
        expected = f"{len(metadata.labels)}" if differ is None else repr(metadata.labels[differ])
        raise GraphError(
            f"the class names in {file} and {graph.name} differ",
            found=at,
            expected=f"{expected}, as in {graph.name}",
            fix=f"remove {file}; or, for other names: vitdeploy export {quoted(graph)} --labels FILE -o DIR",
        )
    return metadata.labels or beside


def copy_labels(source: Path, out: Path) -> None:
    """Copy the label file and the tokenizer that belong to a graph."""
    for name in (LABELS_FILE, TOKENIZER_FILE):
        if is_file(source / name):
            shutil.copyfile(source / name, out / name)


def json_text(value: object) -> str:
    """JSON values, or dataclasses, as JSON text."""
    return json.dumps(encode(value), indent=1, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: object) -> None:
    """Write `json_text`, into a folder that is published as a whole."""
    path.write_text(json_text(value), encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# --- The folder of an engine: its metadata, and whether it may be loaded here -----------------------------------------


def read_engine(folder: Path) -> EngineSpec:
    return decode(EngineSpec, read_json(folder / "engine.json"))


def may_load(folder: Path) -> bool:
    """Whether this user may load the stage's engine in `folder`; engines can contain code."""
    return backend.may_load(folder, read_engine(folder))
