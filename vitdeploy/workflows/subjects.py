"""Find what a name on the command line stands for: a bundle, a graph or a built-in model; all can be benched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.candidate import BenchCandidate, engine_candidate
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.sign import signed_digests
from vitdeploy.errors import CapabilityError, EngineError, InputError, MissingPackageError
from vitdeploy.graph.half.emulated import emulate
from vitdeploy.graph.io.files import (
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    read_metadata,
    serialised,
)
from vitdeploy.graph.io.meanings import OUTPUTS
from vitdeploy.known_bad.words import in_spite
from vitdeploy.models.model_folder.hub import is_hub_name
from vitdeploy.models.names import FUNCTION
from vitdeploy.models.source import Source
from vitdeploy.pipeline.artifact import default_target, form_of, kind_of, new_folder, open_bundle
from vitdeploy.pipeline.fitted import fitted
from vitdeploy.pipeline.measure import original_candidate
from vitdeploy.pipeline.setting import engine_setting, graph_setting, reference_setting
from vitdeploy.runtime.backend import engine_is_code, loads_here
from vitdeploy.runtime.choice import select_engines
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.weight_bits import weight_remarks
from vitdeploy.spec import EngineSpec, Manifest, encode
from vitdeploy.stages.files import MODEL_FILE, find_graph, is_ours
from vitdeploy.stages.reference_model import ReferenceModel, find_reference_model, reference_runner
from vitdeploy.stages.shards import Identity
from vitdeploy.tasks.adapter import Setting
from vitdeploy.workflows.identities import engine_identity, original_identity
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.portable import Portable, PortableEngine, PortableOriginal
from vitdeploy.workflows.seeded import require_seeded, seeded_answers

REBUILT = "{} was built again, of the bundle's graph: its plan is not of this user and this machine."
EMULATED = "Emulated on this CPU: storage in the types of the graph, sums in float32. No GPU was asked."


@dataclass(frozen=True)
class Subject:
    """One artifact to verify or bench, and how its inputs and outputs are read.

    `own` is False if the setting is only the architecture's default: the other side's preprocessing is used then.
    `remarks`: remarks about it on this machine. `artifact`: an engine's name in its bundle. `identity`: what its
    answers depend on beside the images, where that can be told; then `portable` is what another process runs it by.
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


Finder = Callable[[str], list[Subject]]


@contextlib.contextmanager
def opened(
    *,
    target: str | None,
    source: Source,
    emulated: bool = False,
    trust: Path | None = None,
    accepted: Sequence[str] = (),
    proven: bool = False,
) -> Iterator[Finder]:
    """A finder of subjects by what the user typed; graphs are compiled into a folder that goes at the end.

    Args:
        emulated: graphs that are typed for a GPU are evaluated on this CPU, with the storage of their types.
        trust: bundles must be signed by this identity (`bundle.sign.signed_by`).
        accepted: entries of the table of runtimes known to be wrong that are no reason to refuse a graph.
        proven: engines of graphs must give the graph's own answers (`seeded`).
    """

    def find(text: str) -> list[Subject]:
        typed = _typed_graph(text, target) if emulated else None
        if typed is not None:
            return [_emulated_subject(text, typed, trust)]
        return find_subjects(
            text, target=target, source=source, work=work, trust=trust, accepted=accepted, proven=proven
        )

    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        work = Path(folder)
        yield find


@contextlib.contextmanager
def emulation_offered(text: str, target: str | None) -> Iterator[None]:
    """Errors of a machine that lacks what a typed graph needs say that its types can be evaluated all the same."""
    try:
        yield
    except (MissingPackageError, CapabilityError, EngineError) as error:
        if _typed_graph(text, target) is not None:
            offer = "evaluate its types on this CPU: the same command with --emulate"
            error.fix = f"{error.fix}; or {offer}" if error.fix else offer
        raise


def _typed_graph(text: str, target: str | None) -> Path | None:
    """The graph that an argument names, where precision is typed in it; of a bundle, that of the engine to verify."""
    path = Path(text)
    if form_of(text) == "bundle":
        file = path / select_engines(read_bundle(path), target or "auto")[0].graph
    else:
        file = path / MODEL_FILE if path.is_dir() else path
    if file.suffix != ".onnx" or not file.is_file() or not is_ours(file):
        return None
    target = read_metadata(file).target
    return file if target is not None and TARGETS[target].typed else None


def _emulated_subject(text: str, file: Path, trust: Path | None) -> Subject:
    model = load_graph(file)
    metadata, spec = get_metadata(model, str(file)), graph_spec(model, file.name)
    labels = open_bundle(Path(text), trust)[1] if form_of(text) == "bundle" else None
    setting = graph_setting(file, metadata, spec, labels)
    name = f"{text}:{metadata.target}-{metadata.precision}, emulated"

    def runner() -> Runner:
        data = serialised(emulate(model))
        return OnnxRuntimeRunner(data, name=name, batch=fixed_batch(spec) or 1, as_written=True)

    def bench_candidate(name: str) -> BenchCandidate:
        raise AssertionError("an emulated graph has no latency")

    return Subject(name, metadata.precision or "fp32", setting, True, runner, bench_candidate, (EMULATED,))


def find_subjects(
    text: str,
    *,
    target: str | None,
    source: Source,
    work: Path,
    trust: Path | None = None,
    accepted: Sequence[str] = (),
    proven: bool = False,
) -> list[Subject]:
    """The subjects of an argument: every engine of a bundle (or the one for `target`), a graph, or an original.

    `source` has the command line's options for a model besides its name. A graph that vitdeploy did not write counts as
    an original.

    Raises:
        UnknownModelError: neither a path nor a built-in model. Errors of reading and compiling propagate.
    """
    path = Path(text)
    bundle = find_bundle(text, target=target, work=work, accepted=accepted, proven=proven)
    if bundle is not None:
        given = bundle == path
        subjects = _bundle_subjects(bundle, target, work, trust if given else None, compiled=not given)
        return subjects if given else [dataclasses.replace(s, name=str(path)) for s in subjects]
    # Which know recipes and PyTorch too: a bundle's bench needs neither.
    from vitdeploy.stages.batches import settle_batch

    reference_model, batch = settle_batch(find_reference_model(fitted(_named(text, source))))
    return [original_subject(text, reference_model, own=is_hub_name(text), noted=batch is not None)]


def original_subject(name: str, reference_model: ReferenceModel, *, own: bool, noted: bool = False) -> Subject:
    """An original as a subject. `own`: it has its own preprocessing; `noted`: its last note is shown with its
    results. What is assumed of its outputs always is."""
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
        portable=PortableOriginal(reference_model.source),
    )


def _named(text: str, source: Source) -> Source:
    """The source of a model's name; package.module:function names the user's own, as --model does.

    Raises:
        InputError: --model says another one.
    """
    own = FUNCTION.fullmatch(text) is not None and not is_hub_name(text)
    if source.function not in (None, text):
        raise InputError(
            f"two models are named: {text}, and --model {source.function}",
            wanted="one",
            fix=f"give {source.function} in the place of {text}, or leave --model out",
        )
    return dataclasses.replace(source, model=None if own else text, function=text if own else None)


def find_bundle(
    text: str, *, target: str | None, work: Path, accepted: Sequence[str] = (), proven: bool = False
) -> Path | None:
    """The bundle that an argument names, or that its graph is compiled to, in a new folder of `work`; None for an
    original. Errors of reading and compiling propagate.

    Raises:
        AnswersError: the graph is to be `proven`, and its engine does not give the graph's own answers.
    """
    path, kind = Path(text), kind_of(text)
    if kind == "bundle":
        return path
    if kind == "model":
        return None
    compiled, file = new_folder(work, "graph"), find_graph(path)
    manifest = compile_bundle(file, target or default_target(file), None, None, compiled, accepted=accepted)
    if proven:
        engine = manifest.engines[0]
        require_seeded(seeded_answers(compiled / engine.graph, engine.target), engine, compiled)
    return compiled


def _bundle_subjects(
    folder: Path, target: str | None, work: Path, trust: Path | None, *, compiled: bool
) -> list[Subject]:
    manifest, labels = open_bundle(folder, trust)
    chosen = select_engines(manifest, target or "auto")
    signed = signed_digests(folder, trust) if any(map(engine_is_code, chosen)) else frozenset()
    subjects = []
    for engine in chosen:
        subject = _engine_subject(folder, manifest, engine, labels, trust, folder, compiled=compiled)
        if not loads_here(folder, engine, signed):
            subject = _rebuilt(subject, folder, engine, labels, work)
        subjects.append(subject)
    return subjects


def _rebuilt(subject: Subject, folder: Path, engine: EngineSpec, labels: tuple[str, ...], work: Path) -> Subject:
    """The subject of an engine that is built here, of the graph in the bundle, in a new folder of `work`."""
    out = new_folder(work, "engine")
    accepted = engine.accepted or ()
    manifest = compile_bundle(
        folder / engine.graph, engine.target, engine.batch, engine.precision, out, accepted=accepted
    )
    built = _engine_subject(out, manifest, manifest.engines[0], labels, None, folder, compiled=True)
    return dataclasses.replace(built, name=subject.name, remarks=(*built.remarks, REBUILT.format(subject.name)))


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
    """`golden`: the bundle whose golden answers it must give. `compiled`: for this command."""
    setting = engine_setting(folder, manifest, engine, labels)
    return Subject(
        f"{folder}:{engine.artifact}",
        engine.precision,
        setting,
        True,
        lambda: make_runner(folder, engine, trust=trust, spinning=False),
        lambda name: engine_candidate(engine, folder, name, trust, image_request(setting), golden),
        (*weight_remarks(engine, describe_host()["isa"]), *in_spite(engine.artifact, engine.accepted or ())),
        engine.artifact,
        functools.cache(lambda: engine_identity(manifest, engine, compiled=compiled)),
        PortableEngine(folder, engine, trust, compiled),
    )


def image_request(setting: Setting) -> dict[str, object] | None:
    """The request that measures the way from an image to its answer; None if the input is not an image alone."""
    if setting.preprocess is None or setting.task in FLOWS:
        return None
    facts = {"task": setting.task, "preprocess": setting.preprocess, "postprocess": setting.postprocess}
    return {**encode(facts), "labels": list(setting.labels) or None}
