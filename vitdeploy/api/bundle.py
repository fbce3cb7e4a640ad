"""Bundles: read, packed, verified."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from vitdeploy.api.graph import Graph, GraphLike, graph_file
from vitdeploy.api.model import Model, model
from vitdeploy.api.values import Line, Reporter, Shown, filling, home_of, human_bytes, is_unnamed, reporting
from vitdeploy.backends import TARGETS
from vitdeploy.extensions import wing
from vitdeploy.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from vitdeploy.bundle.pack import Packed
    from vitdeploy.compilation.build_options import BuildOptions
    from vitdeploy.document.commands import SelftestDocument
    from vitdeploy.models.source import Source
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.spec import EngineSpec, Manifest
    from vitdeploy.workflows.subjects import Subject


# --- Engines: a graph compiled for one target, in a bundle that an app loads ------------------------------------------


@dataclass(frozen=True, repr=False)
class Bundle(Shown):
    """A folder with engines that `vitdeploy.load`, every command and every app can load."""

    folder: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, ...] = ()

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The bundle's manifest; raises ManifestError if it breaks a rule of the format."""
        from vitdeploy.bundle.read import read_bundle

        return read_bundle(self.folder)

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Its engines, the recommended one first."""
        return self.manifest.engines

    def load(self, target: str = "auto", **options: Any) -> Predictor:
        """A predictor of its first engine that works here, or of the one for `target`; options and errors as
        `vitdeploy.load`."""
        from vitdeploy.runtime.load import load

        return load(self.folder, target=target, **options)

    def lines(self) -> list[Line]:
        return [*self.text, str(self.folder)]


def compile(
    graph: GraphLike,
    target: str,
    folder: str | Path | None = None,
    *,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
    batch: int | None = None,
    build: BuildOptions | None = None,
    on: str | None = None,
    accept_known_bad: Sequence[str] = (),
    split_rows: Literal["auto", "none"] | Sequence[int] = "auto",
    progress: bool | Reporter = True,
) -> Bundle:
    """Compile a graph to an engine for one target.

    Args:
        graph: of `export` or `quantize`, its folder, or its model.onnx.
        target: such as "openvino-cpu"; `vitdeploy doctor` lists them.
        folder: as for `export`.
        precision: of a float graph; None: fp32, or what the graph was placed for.
        batch: the batch to compile at; None: the graph's own, or 1.
        build: how TensorRT builds.
        on: the name of a registered device, which compiles the engine; it is fetched.
        accept_known_bad: ids of the table of runtimes known to be wrong that are no reason to refuse.
        split_rows: the parts in which an INT8 engine for openvino-cpu computes the rows of its tokens, such as
            (192, 5), or more rows, such as (200,); "auto": what is measured to be faster on this machine, or on the
            device.
        progress: as for `export`.

    Raises:
        TargetError: the graph was placed for another target, or has a fixed batch.
        KnownBadError: this release of the runtime is known to compute such a graph wrongly.
        CapabilityError: the target cannot do the precision or the task, or the engine did not run as placed.
        MissingPackageError, EngineError: of the runtime.
        GraphError: parts for a graph of other rows.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> [engine] = vd.compile(graph, "onnxruntime-cpu", progress=False).engines
    >>> engine.artifact
    'onnxruntime-cpu-fp32'
    """
    from vitdeploy.pipeline.available import require_target
    from vitdeploy.stages.capability import check_precision
    from vitdeploy.stages.step import OUTPUT_NAMES

    if on is None:
        require_target(target, precision or "fp32")
    else:
        check_precision(target, precision or "fp32")
    file, home, reporter = graph_file(graph), home_of(folder, "bundle", OUTPUT_NAMES), reporting(progress)

    from vitdeploy.known_bad.find import check_ids, engine_matches
    from vitdeploy.known_bad.words import described, match_lines
    from vitdeploy.workflows.placement import compile_bundle
    from vitdeploy.workflows.seeded import answers_told, require_seeded, seeded_answers

    check_ids(accept_known_bad)
    with reporter, filling(home, OUTPUT_NAMES) as work:
        reporter.progress(f"compile for {target}", 0, 1)
        if on is None:
            manifest = compile_bundle(
                file, target, batch, precision, work, reporter.progress, build, accept_known_bad, split_rows
            )
            engine = manifest.engines[0]
            seeded = seeded_answers(work / engine.graph, target)
            compared = answers_told(seeded, require_seeded(seeded, engine, work), bool(engine.accepted))
        else:
            manifest, compared = wing("devices.api").compile_on(
                on, file, target, batch, precision, work, build, accept_known_bad, split_rows, reporter
            )
            engine = manifest.engines[0]
        reporter.progress(f"compile for {target}", 1, 1)
    document = {
        "artifact": engine.artifact,
        "target": engine.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "batch": engine.batch,
        "kernels": engine.kernels,
        **({"row_parts": list(engine.row_parts)} if engine.row_parts else {}),
        **({"float_rest": engine.float_rest} if engine.float_rest else {}),
        "answers": compared.facts,
        "path": str(home),
    }
    known = [match for match in engine_matches(engine, home) if match.entry.action != "avoided"]
    if known:
        document["known_bad"] = [described(match) for match in known]
    taken = engine.accepted or ()
    told = [line for each in known for line in match_lines(each, "accepted" if each.entry.id in taken else "")]
    return Bundle(home, document, (_ran(engine), *told, compared.line))


def _ran(engine: EngineSpec) -> str:
    """What ran, in a line."""
    hidden = "as the graph is typed (this provider does not show its kernels)"
    kernels = ", ".join(f"{count} in {kind}" for kind, count in engine.kernels.items())
    kernels = kernels or (hidden if TARGETS[engine.target].typed else "none")
    form = f"; {engine.form_told}" if engine.form_told else ""
    return f"{engine.artifact} on {engine.provider}, batch {engine.batch}: linears and convolutions {kernels}{form}"


# --- A bundle as one file: packed, unpacked and checked, each as a document and its lines for people ------------------


Told = tuple[dict[str, Any], list[str]]


def pack(bundle: Path, output: Path, progress: Progress) -> Told:
    """Make one file of a bundle's folder; a packed bundle that is there is replaced.

    Raises:
        OutputError: the file would lie in the bundle, or another file is there. Errors of `pack_bundle` propagate.
    """
    from vitdeploy.bundle.pack import pack_bundle, unlisted_files
    from vitdeploy.bundle.read import is_packed
    from vitdeploy.errors import OutputError
    from vitdeploy.publish import replacing_file

    if bundle.resolve() in output.resolve().parents:
        raise OutputError(f"{output} would lie in the bundle that it is made of", fix="choose another -o")
    with replacing_file(output, is_packed) as file:
        packed = pack_bundle(bundle, file, _megabytes(progress))
    left_out = unlisted_files(bundle, packed.manifest)
    lines = [*_lines(output, packed), *_told("left out, as the manifest does not list them", left_out)]
    return {**_document(output, packed), "left_out": left_out}, lines


def unpack(file: Path, output: Path, expect: str | None, trust: Path | None, progress: Progress) -> Told:
    """Make the folder of a packed bundle; arguments and errors as `bundle.unpack.unpack`."""
    from vitdeploy.bundle.pack import unpack as unpack_file

    packed = unpack_file(file, output, expect_digest=expect, trust=trust, progress=_megabytes(progress))
    document = {**_document(file, packed), "folder": str(output), "signed_by": str(trust) if trust else None}
    return document, [*_lines(file, packed), _signature(packed.signed, trust)]


def check(bundle: Path, expect: str | None, trust: Path | None, progress: Progress) -> Told:
    """Check that a bundle, folder or packed, is unchanged: every digest; with `expect` also its own SHA-256 in hex, and
    with `trust` who signed it. Errors of `read_packed`, `verify_files` and `signed_by` propagate."""
    document, lines = (_verify_file if bundle.is_file() else _verify_folder)(bundle, expect, trust, progress)
    return {**document, "signed_by": str(trust) if trust else None}, lines


def _verify_file(
    file: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.bundle.pack import read_packed
    from vitdeploy.bundle.sign import signed_by
    from vitdeploy.publish import storage_errors

    if trust is None:
        packed = read_packed(file, None, expect, _megabytes(progress))
    else:  # OpenSSF's library checks a folder
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as private, storage_errors(Path(private)):
            packed = read_packed(file, Path(private), expect, _megabytes(progress))
            signed_by(Path(private), trust, called=file)
    return _document(file, packed), [*_lines(file, packed), _signature(packed.signed, trust)]


def _verify_folder(
    folder: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.bundle.checked import open_checked
    from vitdeploy.bundle.pack import unlisted_files
    from vitdeploy.bundle.read import MANIFEST_FILE
    from vitdeploy.bundle.sign import SIGNATURE_FILE, signed_by

    files = open_checked(folder, expect_digest=expect)
    manifest, digest = files.manifest, files.digest
    progress("check", 0, 1)
    files.require()
    signed_by(folder, trust)
    signed, unlisted = (folder / SIGNATURE_FILE).is_file(), unlisted_files(folder, manifest)
    document = {"path": str(folder), "name": manifest.name, "manifest_sha256": digest, "files": len(manifest.files)}
    lines = [
        f"{folder}: bundle {manifest.name}, {_files(len(manifest.files))}, all digests match",
        f"its {MANIFEST_FILE}: sha256:{digest}",
        _signature(signed, trust),
        *_told("not of the bundle, as the manifest does not list them", unlisted),
    ]
    return {**document, "signed": signed, "unlisted": unlisted}, lines


def _megabytes(progress: Progress) -> Progress:
    """Report progress in megabytes: bytes are too small a unit for a bar."""

    def told(text: str, done: int, total: int) -> None:
        progress(f"{text}, MB", done // 1_000_000, total // 1_000_000)

    return told


def _document(file: Path, packed: Packed) -> dict[str, Any]:
    return {
        "path": str(file),
        "name": packed.manifest.name,
        "bytes": packed.bytes,
        "sha256": packed.sha256,
        "manifest_sha256": packed.manifest_sha256,
        "files": len(packed.manifest.files),
        "signed": packed.signed,
    }


def _lines(file: Path, packed: Packed) -> list[str]:
    name, count = packed.manifest.name, _files(len(packed.manifest.files))
    return [
        f"{file}: bundle {name}, {count}, {human_bytes(packed.bytes)}, all digests match",
        f"the file: sha256:{packed.sha256}",
        f"its manifest.json: sha256:{packed.manifest_sha256}",
    ]


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")


def _told(what: str, names: list[str]) -> list[str]:
    """A line that names files, if there are any."""
    shown = ", ".join(map(ascii, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{what}: {shown}"] if names else []


def _signature(signed: bool, trust: Path | None) -> str:
    if trust is not None:
        return f"signed by {trust}"
    return "signed, by whom was not checked: name a key with --trust" if signed else "not signed"


# --- Artifacts that can be verified and measured: a bundle, a graph, a model; as values or as their names -------------


@dataclass(frozen=True)
class Named:
    """An artifact by its name, with further options of the command line: `source` is for a model."""

    text: str
    source: Source


ArtifactLike = Union[Bundle, Graph, Model, Named, str, Path, "nn.Module"]


def artifact_name(artifact: ArtifactLike) -> str | None:
    """The path or name that an artifact goes by; None for a model in memory."""
    if isinstance(artifact, Named):
        return artifact.text
    if isinstance(artifact, Bundle | Graph):
        return str(artifact.folder)
    return str(artifact) if isinstance(artifact, str | Path) else None


def check_early(artifact: ArtifactLike) -> None:
    """Raise for a name that nothing has, before anything heavy is imported."""
    from vitdeploy.pipeline.early import check_artifact

    if (name := artifact_name(artifact)) is not None:
        check_artifact(name)


@contextlib.contextmanager
def opened(
    *,
    target: str | None,
    emulated: bool = False,
    trust: Path | None = None,
    accepted: Sequence[str] = (),
    proven: bool = False,
) -> Iterator[Callable[[ArtifactLike], list[Subject]]]:
    """A finder of what can be run: every engine of a bundle (or the one for `target`), a graph, which is compiled into
    a folder that goes at the end, or an original.

    Args:
        emulated: graphs that are typed for a GPU are evaluated on this CPU, with the storage of their types.
        trust: bundles must be signed by this identity.
        accepted: entries of the table of runtimes known to be wrong that are no reason to refuse a graph.
        proven: engines of graphs must give the graph's own answers.

    Raises:
        InputError: one of `accepted` is no entry.
    """
    from vitdeploy.models.source import Source
    from vitdeploy.workflows.subjects import opened as opened_by_name

    @contextlib.contextmanager
    def finder(source: Source) -> Iterator[Callable[[str], list[Subject]]]:
        with opened_by_name(
            target=target, source=source, emulated=emulated, trust=trust, accepted=accepted, proven=proven
        ) as find:
            yield find

    if accepted:
        from vitdeploy.known_bad.find import check_ids

        check_ids(accepted)
    with contextlib.ExitStack() as stack:

        def find(artifact: ArtifactLike) -> list[Subject]:
            name = artifact_name(artifact)
            if name is None:
                return [_original(model(artifact))]  # type: ignore[arg-type]
            source = artifact.source if isinstance(artifact, Named) else Source()
            return [_shortened(each, artifact) for each in stack.enter_context(finder(source))(name)]

        yield find


def _original(read: Model) -> Subject:
    """A model that was read. Without preprocessing of its own it has only what is usual or assumed: the other side's is
    then taken."""
    from vitdeploy.models.model_folder.hub import is_hub_name
    from vitdeploy.stages.batches import settle_batch
    from vitdeploy.workflows.subjects import original_subject

    source = read.source
    reference, batch = settle_batch(read.reference)
    own = read.overrides.preprocess is not None or is_hub_name(source.name)
    return original_subject(read.name, reference, own=own, noted=batch is not None)


def _shortened(subject: Subject, artifact: ArtifactLike) -> Subject:
    """Results that nobody named a folder for are called by what they are, not by a temporary path."""
    if not isinstance(artifact, Bundle | Graph) or not is_unnamed(artifact.folder):
        return subject
    return dataclasses.replace(subject, name=subject.name.replace(str(artifact.folder), artifact.folder.name))


# --- Every engine of a bundle against its golden answers, on this machine ---------------------------------------------


def check_bundle(folder: Path, trust: Path | None) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The result for each engine, its lines for people, and whether all that run here give the golden answers.

    Raises:
        HostError: no engine runs here. Errors of reading the bundle propagate.
    """
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.bundle.sign import signed_by
    from vitdeploy.errors import HostError

    manifest = read_bundle(folder)
    signed_by(folder, trust)
    documents = [_check(folder, manifest, engine, trust) for engine in manifest.engines]
    if all(each["ok"] is None for each in documents):
        raise HostError(
            f"no engine of {folder} runs here", found="; ".join(each["error"] for each in documents) or "no engine"
        )
    return documents, [_line(each) for each in documents], all(each["ok"] is not False for each in documents)


def _check(folder: Path, manifest: Manifest, engine: EngineSpec, trust: Path | None) -> dict[str, Any]:
    """`ok` is None if the engine does not run here."""
    from vitdeploy.errors import HostError
    from vitdeploy.runtime.engine import make_runner
    from vitdeploy.runtime.golden import check_golden

    try:
        with make_runner(folder, engine, trust=trust) as runner:
            found = check_golden(folder, manifest, engine, runner)
    except HostError as error:
        return {"engine": engine.artifact, "ok": None, "error": error.message}
    return {"engine": engine.artifact, "ok": found.ok, "gate": manifest.gate(engine), **vars(found)}


def _line(found: dict[str, Any]) -> str:
    if found["ok"] is None:
        return f"golden {found['engine']}: does not run here: {found['error']}"
    right = found["difference"] <= found["tolerance"] and found["same"] >= found["least_same"]
    verdict = "ok" if found["ok"] else f"PROVES NOTHING ({found['proves_nothing']})" if right else "DIFFERS"
    failed = "; it failed its budget when the bundle was made" if found["gate"] == "fail" else ""
    return (
        f"golden {found['engine']}: {verdict}, {found['same']} of {found['inputs']} answers are the original's "
        f"(at least {found['least_same']} must be), largest difference {found['difference']:.1e} of the largest output "
        f"from when the bundle was made (allowed {found['tolerance']:.1e}){failed}"
    )


# --- One target proven on this machine, and one folder to send back ---------------------------------------------------


def selftest(target: str, folder: Path, duration: float, progress: Progress) -> tuple[SelftestDocument, list[str]]:
    """Build, verify and bench engines of built-in models; the report is in `folder`. A step that fails is recorded.

    Args:
        duration: seconds an artifact and scenario of the bench.

    Raises:
        TargetError: an unknown target. OutputError: `folder` holds something else.
    """
    from vitdeploy.benchmark.protocol import Protocol
    from vitdeploy.stages.capability import check_target

    check_target(target)
    from vitdeploy.publish import replacing, temporary_folder
    from vitdeploy.store.store import Store
    from vitdeploy.workflows.selftest.cases import default_cases
    from vitdeploy.workflows.selftest.selftest import REPORT_NAMES, run_selftest

    with replacing(folder, REPORT_NAMES) as work, temporary_folder(folder.parent) as store:
        protocol = Protocol(duration=duration)
        document = run_selftest(target, default_cases(), work, Store(store), protocol=protocol, progress=progress)
    lines = (folder / "doctor.txt").read_text(encoding="utf-8").splitlines()
    for row in document.steps:
        seconds = f"{row.seconds:.1f} s" if row.status == "done" else row.detail
        lines.append(f"{row.status:<7}  {row.model:<16} {row.step:<28} {seconds}")
    return document, [*lines, document.sentence]
