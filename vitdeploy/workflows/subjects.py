"""The subjects of commands: bundles, originals and engines, compiled for the machine that runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate
from vitdeploy.bundle.read import read_bundle, require_graphs
from vitdeploy.bundle.sign import signed_digests
from vitdeploy.data.classes import differing
from vitdeploy.document import report, verified
from vitdeploy.errors import CapabilityError, EngineError, InputError, MissingPackageError, StorageError, WorkerError
from vitdeploy.graph.half.half import emulate
from vitdeploy.graph.io.files import (
    admitted_metadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    serialised,
)
from vitdeploy.graph.io.meanings import OUTPUTS
from vitdeploy.known_bad.find import check_ids, in_spite
from vitdeploy.models.model_folder.hub import is_hub_name
from vitdeploy.models.names import FUNCTION
from vitdeploy.models.source import Source
from vitdeploy.pipeline.early import default_target, form_of, kind_of, new_folder, open_bundle
from vitdeploy.pipeline.measure import original_candidate
from vitdeploy.pipeline.setting import engine_setting, fitted, graph_setting, reference_setting
from vitdeploy.runtime import backend, choice, ort, values
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.spec import EngineSpec, Manifest, encode
from vitdeploy.stages.reference_model import ReferenceModel, find_reference_model, reference_runner
from vitdeploy.stages.step import MODEL_FILE, find_graph, is_ours, package_versions, target_tools
from vitdeploy.store.key import Identity, code_version
from vitdeploy.store.store import Store
from vitdeploy.tasks.adapter import Data, Setting
from vitdeploy.verification.gate import Gate
from vitdeploy.workflows import placement, seeded

# --- The identity of an artifact: the part of a key that covers everything its answers depend on, except images -------


def engine_identity(manifest: Manifest, engine: EngineSpec, *, compiled: bool) -> Identity:
    """The identity of a bundle's engine: the files that it loads. If it was `compiled` for this command, its graph and
    the compiling code instead, because OpenVINO writes a different model.xml each time.

    Raises:
        MissingPackageError, EngineError, CapabilityError: this machine lacks what the engine needs.
    """
    parts = engine.parts or (engine,)
    graphs, files = tuple(part.graph for part in parts), {name for part in parts for name in part.files}
    folders = {PurePosixPath(name).parent for name in (*graphs, *files)}
    inputs = {file.path: file.sha256 for file in manifest.files if PurePosixPath(file.path).parent in folders}
    if compiled:
        made = {name for name in files if not name.startswith(graphs)}
        inputs = {name: digest for name, digest in inputs.items() if name not in made}
    code = code_version(everything=compiled)
    tools = {**target_tools(engine.target), "code": code}
    return Identity("evaluated-engine", {"engine": encode(engine)}, inputs, tools)


def original_identity(reference_model: ReferenceModel) -> Identity:
    """The identity of an original."""
    packages = package_versions(("torch", "timm", "transformers", "onnxruntime"))
    tools = {**packages, "host": str(describe_host()), "code": code_version()}
    return Identity("evaluated-original", reference_model.identity(), dict(reference_model.digests), tools)


# --- Picklable subjects: plain data from which another process, here or elsewhere, makes a runner ---------------------


# `sent` returns the subject with its files in the store; `runner` makes its runner (not loaded yet) in this process.
# Raises:
#     WorkerError: the subject differs here from the one in the requesting process, which passes its `identity`.
#     StorageError: its files are not in the store. Errors of reading it propagate.


@dataclass(frozen=True)
class _PortableOriginal:
    """An original: its source, whose paths must lead to the same files on all machines."""

    source: Source

    def sent(self, identity: Identity, store: Store) -> _PortableOriginal:
        return self

    def runner(self, identity: Identity, store: Store) -> Runner:
        _require_same(original_identity(find_reference_model(self.source)), identity)
        return reference_runner(self.source)


@dataclass(frozen=True)
class _PortableEngine:
    """An engine of a bundle. If `compiled` for this command, into a temporary folder, it is sent by the store under
    `key`."""

    folder: Path
    engine: EngineSpec
    trust: Path | None
    compiled: bool
    key: str = ""

    def sent(self, identity: Identity, store: Store) -> _PortableEngine:
        if not self.compiled:
            return dataclasses.replace(self, folder=self.folder.absolute())
        if store.find(identity.key) is None:
            store.make(identity, lambda out: shutil.copytree(self.folder, out, dirs_exist_ok=True))
        return dataclasses.replace(self, key=identity.key)

    def runner(self, identity: Identity, store: Store) -> Runner:
        folder, engine = self.folder, self.engine
        if self.key:
            found = store.find(self.key)
            if found is None:
                raise StorageError(
                    f"{engine.artifact} is not in the store of {socket.gethostname()}",
                    found="no artifact with its key",
                    expected="one store for the whole evaluation",
                    fix="set VITDEPLOY_SHARED_STORE on all machines",
                )
            folder = found.path
        manifest, _ = open_bundle(folder, self.trust)
        _require_same(engine_identity(manifest, engine, compiled=self.compiled), identity)
        return make_runner(folder, engine, trust=self.trust, spinning=False)


Portable = _PortableOriginal | _PortableEngine


def _require_same(here: Identity, identity: Identity) -> None:
    """Raise WorkerError if an artifact has other files or tools on this machine."""
    for found, expected in ((here.inputs, identity.inputs), (here.tools, identity.tools)):
        if name := next((each for each in sorted({*found, *expected}) if found.get(each) != expected.get(each)), ""):
            raise WorkerError(
                f"{socket.gethostname()} differs from the requesting machine and could give other answers",
                found=f"{name}: {found.get(name, 'nothing')}"[:300],
                expected=f"{name}: {expected.get(name, 'nothing')}"[:300],
                fix="use the same files and packages on all nodes, and nodes of one kind",
            )


# --- Resolve a name on the command line: a bundle, a graph or a built-in model ----------------------------------------


REBUILT = "{} was rebuilt from the bundle's graph: its engine file was not built by this user on this machine."
EMULATED = "Emulated on this CPU: storage in the types of the graph, sums in float32. No GPU was used."


@dataclass(frozen=True)
class Subject:
    """One artifact to verify or bench, with the setting of its inputs and outputs.

    `own` is False if the setting is only the architecture's default: the other side's preprocessing is used then.
    `remarks`: remarks about it on this machine. `artifact`: an engine's name in its bundle. `identity`: everything that
    its answers depend on except the images, if known; then `portable` is the form for another process.
    """

    name: str
    precision: str
    setting: Setting
    own: bool
    runner: Callable[[], Runner]
    bench_candidate: Callable[[str], BenchCandidate]
    remarks: tuple[str, ...] = ()
    artifact: str = ""
    identity: Callable[[], Identity] | None = None
    portable: Portable | None = None


@dataclass(frozen=True)
class Finder:
    """Finds subjects by the user's argument. Graphs are compiled into new folders of `work`.

    `target`: selects one of several engines, and the target of graphs; `emulated`: graphs typed for a GPU are evaluated
    on this CPU, with the storage of their types; `trust`: bundles must be signed by this identity
    (`bundle.sign.signed_by`); `accepted`: accepted entries of the known-bad runtime table; `proven`: engines of graphs
    must give the graph's own answers (`seeded`).
    """

    work: Path
    target: str | None = None
    emulated: bool = False
    trust: Path | None = None
    accepted: Sequence[str] = ()
    proven: bool = False

    def find(self, text: str, source: Source | None = None) -> list[Subject]:
        """Return the subjects of an argument: every engine of a bundle, a graph, or an original.

        `source` has the command-line options for a model besides its name. A graph that vitdeploy did not write
        counts as an original.

        Raises:
            UnknownModelError: neither a path nor a built-in model. Errors of reading and compiling propagate.
        """
        typed = _typed_graph(text, self.target) if self.emulated else None
        if typed is not None:
            return [_emulated_subject(text, typed, self.trust)]
        path, bundle = Path(text), self.bundle(text)
        if bundle == path:
            return self._engines(path, self.trust, compiled=False)
        if bundle is not None:
            return [dataclasses.replace(each, name=str(path)) for each in self._engines(bundle, None, compiled=True)]
        # Imported here: these need recipes and PyTorch, which a bundle's bench does not.
        from vitdeploy.stages.export import settle_batch

        reference_model, batch = settle_batch(find_reference_model(fitted(_named(text, source or Source()))))
        return [original_subject(text, reference_model, own=is_hub_name(text), noted=batch is not None)]

    def bundle(self, text: str) -> Path | None:
        """Return the bundle that an argument names, or that its graph is compiled to; None for an original. Errors of
        reading and compiling propagate.

        Raises:
            AnswersError: with `proven`, the engine does not give the graph's own answers.
        """
        path, kind = Path(text), kind_of(text)
        if kind == "bundle":
            return path
        if kind == "model":
            return None
        compiled, file = new_folder(self.work, "graph"), find_graph(path)
        target = self.target or default_target(file)
        manifest = placement.compile_bundle(file, target, None, None, compiled, accepted=self.accepted)
        if self.proven:
            engine = manifest.engines[0]
            seeded.require_seeded(seeded.seeded_answers(compiled / engine.graph, engine.target), engine, compiled)
        return compiled

    def _engines(self, folder: Path, trust: Path | None, *, compiled: bool) -> list[Subject]:
        manifest, labels = open_bundle(folder, trust)
        chosen = choice.select_engines(manifest, self.target or "auto")
        signed = signed_digests(folder, trust) if any(map(backend.engine_is_code, chosen)) else frozenset()
        subjects = []
        for engine in chosen:
            subject = _engine_subject(folder, manifest, engine, labels, trust, folder, compiled=compiled)
            if not backend.loads_here(folder, engine, signed):
                subject = self._rebuilt(subject, folder, engine, labels)
            subjects.append(subject)
        return subjects

    def _rebuilt(self, subject: Subject, folder: Path, engine: EngineSpec, labels: tuple[str, ...]) -> Subject:
        """The subject of an engine that is rebuilt here from the graph in the bundle."""
        require_graphs(folder, read_bundle(folder), "rebuilding an engine")
        out, accepted = new_folder(self.work, "engine"), engine.accepted or ()
        manifest = placement.compile_bundle(
            folder / engine.graph, engine.target, engine.batch, engine.precision, out, accepted=accepted
        )
        built = _engine_subject(out, manifest, manifest.engines[0], labels, None, folder, compiled=True)
        return dataclasses.replace(built, name=subject.name, remarks=(*built.remarks, REBUILT.format(subject.name)))


@contextlib.contextmanager
def opened(
    *,
    target: str | None,
    emulated: bool = False,
    trust: Path | None = None,
    accepted: Sequence[str] = (),
    proven: bool = False,
) -> Iterator[Finder]:
    """A finder with a temporary folder; arguments as in `Finder`.

    Raises:
        InputError: one of `accepted` is not an entry of the table.
    """
    if accepted:
        check_ids(accepted)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        yield Finder(Path(folder), target, emulated, trust, accepted, proven)


@contextlib.contextmanager
def emulation_offered(text: str, target: str | None) -> Iterator[None]:
    """Offer --emulate in errors of a machine that cannot run a typed graph."""
    try:
        yield
    except (MissingPackageError, CapabilityError, EngineError) as error:
        if _typed_graph(text, target) is not None:
            offer = "emulate its types on this CPU: add --emulate"
            error.fix = f"{error.fix}; or {offer}" if error.fix else offer
        raise


def _typed_graph(text: str, target: str | None) -> Path | None:
    """The graph that an argument names if it is typed; for a bundle, the graph of the engine to verify."""
    path = Path(text)
    if form_of(text) == "bundle":
        file = path / choice.select_engines(read_bundle(path), target or "auto")[0].graph
    else:
        file = path / MODEL_FILE if path.is_dir() else path
    if file.suffix != ".onnx" or not file.is_file() or not is_ours(file):
        return None
    target = admitted_metadata(file).target
    return file if target is not None and TARGETS[target].typed else None


def _emulated_subject(text: str, file: Path, trust: Path | None) -> Subject:
    model = load_graph(file)
    metadata, spec = get_metadata(model, str(file)), graph_spec(model, file.name)
    labels = open_bundle(Path(text), trust)[1] if form_of(text) == "bundle" else None
    setting = graph_setting(file, metadata, spec, labels)
    name = f"{text}:{metadata.target}-{metadata.precision}, emulated"

    def runner() -> Runner:
        data = serialised(emulate(model))
        return ort.OnnxRuntimeRunner(data, name=name, batch=fixed_batch(spec) or 1, as_written=True)

    def bench_candidate(name: str) -> BenchCandidate:
        raise AssertionError("an emulated graph has no latency")

    return Subject(name, metadata.precision or "fp32", setting, True, runner, bench_candidate, (EMULATED,))


def original_subject(name: str, reference_model: ReferenceModel, *, own: bool, noted: bool = False) -> Subject:
    """An original as a subject. `own`: it has its own preprocessing; `noted`: its last note is shown with its results.
    Assumptions about its outputs are always shown."""
    assumed = tuple(note for note in reference_model.notes if note.startswith(OUTPUTS))
    return Subject(
        name,
        "fp32",
        reference_setting(reference_model),
        own,
        lambda: reference_runner(reference_model.source),
        lambda name: original_candidate(reference_model.source, name),
        (*assumed, *(reference_model.notes[-1:] if noted else ())),
        identity=functools.cache(lambda: original_identity(reference_model)),
        portable=_PortableOriginal(reference_model.source),
    )


def _named(text: str, source: Source) -> Source:
    """The source of a model's name; package.module:function names the user's own model, like --model.

    Raises:
        InputError: --model names another one.
    """
    own = FUNCTION.fullmatch(text) is not None and not is_hub_name(text)
    if source.function not in (None, text):
        raise InputError(
            f"expected one model, found two: {text}, and --model {source.function}",
            expected="one",
            fix=f"replace {text} by {source.function}, or leave --model out",
        )
    return dataclasses.replace(source, model=None if own else text, function=text if own else None)


def _engine_subject(
    folder: Path,
    manifest: Manifest,
    engine: EngineSpec,
    labels: tuple[str, ...],
    trust: Path | None,
    golden: Path,
    *,
    compiled: bool,
) -> Subject:
    """A bundle's engine as a subject. `golden`: the bundle with its golden answers. `compiled`: for this command."""
    setting = engine_setting(folder, manifest, engine, labels)
    return Subject(
        f"{folder}:{engine.artifact}",
        engine.precision,
        setting,
        True,
        lambda: make_runner(folder, engine, trust=trust, spinning=False),
        lambda name: engine_candidate(engine, folder, name, trust, image_request(setting), golden),
        (*values.weight_remarks(engine, describe_host()["isa"]), *in_spite(engine.artifact, engine.accepted or ())),
        engine.artifact,
        functools.cache(lambda: engine_identity(manifest, engine, compiled=compiled)),
        _PortableEngine(folder, engine, trust, compiled),
    )


def image_request(setting: Setting) -> dict[str, object] | None:
    """The request that measures the path from an image to its answer; None if the input is not only an image."""
    if setting.preprocess is None or flow_of(setting.task):
        return None
    facts = {"task": setting.task, "preprocess": setting.preprocess, "postprocess": setting.postprocess}
    return {**encode(facts), "labels": list(setting.labels) or None}


# --- The two sides of a comparison: their settings, and the document of both ------------------------------------------


def settings_of(ours: Subject, theirs: Subject) -> tuple[Setting, Setting]:
    """The setting of each side; a side without its own preprocessing uses the other's."""
    own, other = ours.setting, theirs.setting
    if not ours.own and not theirs.own and own.preprocess is not None:
        raise InputError(
            "neither side has preprocessing of its own",
            found="two built-in models",
            expected="at least one exported graph or bundle",
        )
    if own.task != other.task or own.classes != other.classes:
        # A model's outputs may fit several tasks, and the user chooses one; a bundle has a fixed task.
        free = own.task != other.task and not theirs.artifact
        raise InputError(
            "the tasks or classes of the two models differ",
            found=f"{own.task} with {own.classes} classes, and {other.task} with {other.classes}",
            expected="the same task, and the same number of classes",
            fix=f"if {theirs.name} is a model for it: --task {own.task} (task= in Python)" if free else "",
        )
    brought = [[(tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in side.inputs] for side in (own, other)]
    if brought[0] != brought[1]:
        raise InputError(
            "the two models take different further inputs",
            found=" against ".join(", ".join(map(str, side.inputs)) or "none" for side in (own, other)),
            expected="the same inputs: each image brings them for both models",
            fix="pass the same --bind for the original",
        )
    if (differs := differing(own.labels, other.labels)) is not None:
        raise InputError(
            "the two models have their classes in different orders",
            found=differs,
            expected="the same classes in the same order: answers are compared by class index",
            fix="use the original that the artifact was made from, or correct the wrong labels.txt",
        )
    own = dataclasses.replace(own, labels=own.labels or other.labels, claim=other.claim)
    if not ours.own:
        own = _taken(ours.name, own, other)
    if not theirs.own:
        other = _taken(theirs.name, other, own)
    return own, other


def _taken(name: str, setting: Setting, other: Setting) -> Setting:
    """The setting of an original without preprocessing, with the other side's preprocessing.

    Raises:
        InputError: it takes images of a different size.
    """
    ours, theirs = setting.preprocess, other.preprocess
    if ours is not None and theirs is not None and ours.crop != theirs.crop:
        raise InputError(
            f"{name} takes a different image size than the other side",
            found=f"{ours.crop[0]}x{ours.crop[1]}",
            expected=f"{theirs.crop[0]}x{theirs.crop[1]}",
            fix=f"if the model takes that size: --image-size {theirs.crop[0]}x{theirs.crop[1]}",
        )
    return dataclasses.replace(setting, preprocess=theirs)


def verification(
    ours: Subject, theirs: Subject, found: verified.Verified, data: Data, gate: Gate, doubt: str | None
) -> report.VerifyDocument:
    """The document of a comparison."""
    return report.VerifyDocument(
        artifact=ours.name,
        against=theirs.name,
        verified=found,
        mapping=data.mapping_facts,
        skipped=tuple(data.skipped),
        remarks=(*ours.remarks, *theirs.remarks, *data.notes),
        warnings=(*data.warnings, *([doubt] if doubt is not None else [])),
        gate=gate,
        copies=data.copies,
    )
