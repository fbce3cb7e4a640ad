"""Describe graphs, bundles and this machine; pack and check bundles. Light imports, except for `selftest`."""

from __future__ import annotations

import collections
import itertools
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.values import human_bytes
from vitdeploy.backends import TARGETS
from vitdeploy.bundle.checked import open_checked
from vitdeploy.bundle.pack import Packed, pack_bundle, read_packed, unlisted_files
from vitdeploy.bundle.pack import unpack as unpack_file
from vitdeploy.bundle.read import (
    MANIFEST_FILE,
    SIZES_FOLDER,
    is_bundle,
    is_packed,
    read_bundle,
    require_graphs,
    verify_files,
)
from vitdeploy.bundle.sign import SIGNATURE_FILE, sign_bundle, signed_by
from vitdeploy.bundle.write import slim_bundle
from vitdeploy.compilation.backend import finding_lines
from vitdeploy.compilation.engine import examine, probe_target
from vitdeploy.errors import HostError, OutputError, SignatureError, TargetError
from vitdeploy.extensions import has_wing, installed_version, wing
from vitdeploy.progress import Progress
from vitdeploy.publish import replacing, replacing_file, storage_errors, temporary_folder
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden
from vitdeploy.runtime.host import describe_host, name_host
from vitdeploy.runtime.values import int8_instructions
from vitdeploy.spec import RESIZING, EngineSpec, Manifest, PreprocessSpec, encode
from vitdeploy.stages.step import check_target, find_graph, graphs_in

if TYPE_CHECKING:
    from vitdeploy.document.commands import SelftestDocument
    from vitdeploy.lint.view import LintFinding


# --- Describe the content of a bundle or an ONNX file -----------------------------------------------------------------


def inspect(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The document and its printed lines; every digest of a bundle is checked. Errors of reading propagate."""
    return _bundle(path) if is_bundle(path) else _graph(path)


def _bundle(path: Path) -> tuple[dict[str, Any], list[str]]:
    manifest = read_bundle(path)
    verify_files(path, manifest)
    count = len(manifest.files)
    lines = [f"bundle {manifest.name}: {manifest.task}, format {manifest.format}, {count} files, all digests match"]
    for name, graph in manifest.graphs.items():
        lines.append(f"graph {name}: {'; '.join(map(str, graph.inputs))} -> {'; '.join(map(str, graph.outputs))}")
    pre = manifest.preprocess
    if pre is not None:
        lines.append(
            f"preprocess: {_resize(pre)} {pre.interpolation}, crop {pre.crop[0]}x{pre.crop[1]}, {pre.normalisation}"
        )
    for engine in manifest.engines:
        size = sum(entry.bytes for entry in manifest.files if entry.path in engine.files)
        kernels = ", ".join(f"{count} {kind}" for kind, count in engine.kernels.items())
        lines.append(
            f"engine {engine.artifact}: {engine.provider}, batch {engine.batch}, {human_bytes(size)}, kernels {kernels}"
            + (f"; {engine.form_told}" if engine.form_told else "")
        )
    lines += [f"image size {size}: {path / SIZES_FOLDER / size}" for size in manifest.sizes]
    known = _known_bad({name: path / graph.file for name, graph in manifest.graphs.items()})
    return {**encode(manifest), "known_bad": known[0]}, [*lines, *known[1]]


def _graph(path: Path) -> tuple[dict[str, Any], list[str]]:
    file = find_graph(path)

    from vitdeploy.graph.analysis.attention import find_attentions
    from vitdeploy.graph.analysis.rows import find_linears
    from vitdeploy.graph.io.admit import admit_graph
    from vitdeploy.graph.io.files import METADATA_KEY, get_metadata, graph_spec
    from vitdeploy.graph.values import dim

    model = admit_graph(file)
    spec = graph_spec(model, file.name)
    operators = collections.Counter(node.op_type for node in model.graph)
    layers = [linear.name for linear in find_linears(model)]
    tokens = [dim(attention.softmax.outputs[0], -1) for attention in find_attentions(model)]
    metadata = encode(get_metadata(model, str(file))) if METADATA_KEY in model.metadata_props else None
    opsets = {domain or "ai.onnx": version for domain, version in model.opset_imports.items()}
    lines = [
        f"{file}: opset {opsets['ai.onnx']}, IR {model.ir_version}, {human_bytes(file.stat().st_size)}, "
        f"{sum(operators.values())} nodes",
        f"{'; '.join(map(str, spec.inputs))} -> {'; '.join(map(str, spec.outputs))}",
        "operators: " + ", ".join(f"{count} {kind}" for kind, count in operators.most_common()),
        *([f"attention, {_over(tokens)}"] if tokens else []),
        f"float linears and convolutions: {len(layers)}" + "".join(f"\n  {name}" for name in layers),
    ]
    document = {
        "path": str(file),
        "opsets": opsets,
        "ir_version": model.ir_version,
        "bytes": file.stat().st_size,
        "graph": encode(spec),
        "operators": dict(operators),
        "attention_tokens": tokens,
        "float_layers": layers,
        "metadata": metadata,
    }
    known = _known_bad({"model": file})
    return {**document, "known_bad": known[0]}, [*lines, *known[1]]


def _known_bad(graphs: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """The entries of the known-bad runtime table that match the graphs, for any runtime: by graph, and as lines. A
    device install has no package that reads graphs; then a line says so."""
    try:
        from vitdeploy.graph.io.admit import admit_graph
        from vitdeploy.known_bad.find import described, match_lines, matches, releases
    except ModuleNotFoundError as error:
        return {}, [f"known-bad runtimes were not checked: {error.name} is not installed here"]
    document, lines = {}, []
    here = {name for entries in (known_bad() or {}).values() for name in entries}
    for name, file in graphs.items():
        found = matches(admit_graph(file))
        document[name] = [{**described(match), "here": match.entry.id in here} for match in found]
        concern = [match for match in found if match.entry.id in here]
        others = [f"{match.entry.id} ({releases(match.entry)})" for match in found if match.entry.id not in here]
        if concern:
            lines.append(f"graph {name}: runtimes installed here that are known to compute it wrongly:")
            lines += [f"  {line}" for match in concern for line in match_lines(match)]
        if others:
            lines.append(f"graph {name}: no known problem here; known to be wrong elsewhere: {', '.join(others)}")
    return document, lines


def _over(tokens: list[int | None]) -> str:
    """The counts of consecutive attentions over the same number of tokens; token merging reduces the tokens."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(tokens)]
    return ", ".join(f"{count} over {'any number of' if size is None else size} tokens" for size, count in runs)


def _resize(spec: PreprocessSpec) -> str:
    if isinstance(spec.resize, int):
        return f"short side {spec.resize}"
    return f"{RESIZING[spec.fit]} {spec.resize[0]}x{spec.resize[1]}"


# --- Run the linter on graphs, for `vitdeploy inspect --target` -------------------------------------------------------


TARGET = "tensorrt"
# Nodes named per rule; the JSON document has all.
SHOWN_NODES = 4


def lint_graphs(path: Path, target: str, version: str | None) -> tuple[dict[str, Any], list[str], list[LintFinding]]:
    """(document, lines, findings of all graphs) for a graph, a folder of graphs or a bundle, whose digests are checked.

    Raises:
        TargetError: a target or version without known rules. Errors of reading propagate.
    """
    check_target(target)
    if target != TARGET:
        raise TargetError(
            f"vitdeploy has no static rules for {target}; only compiling shows whether it takes a graph",
            found=f"--target {target}",
            expected=f"--target {TARGET}",
            fix=f"compile it: {shlex.join(['vitdeploy', 'compile', str(path), '--target', target, '-o', 'DIR'])}",
        )

    from vitdeploy.graph.io.admit import admit_graph
    from vitdeploy.known_bad.find import known_findings
    from vitdeploy.lint.linter import SEVERITIES, counts, lint
    from vitdeploy.lint.support import VERSIONS

    versions = VERSIONS if version is None else (version,)
    lines, every, graphs = [], [], {}
    for name, file in _graphs(path).items():
        model = admit_graph(file)
        findings = [*lint(model, versions), *known_findings(model, versions)]
        findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        number = counts(findings)
        graphs[name] = {"file": str(file), "counts": number, "findings": encode(findings)}
        summary = ", ".join(
            f"{count} {severity}s" if count != 1 else f"1 {severity}" for severity, count in number.items()
        )
        lines += [f"{file} for TensorRT {', '.join(versions)}: {summary}", *_finding_lines(findings, versions)]
        every += findings
    lines.append("checked against the TensorRT documentation; TensorRT itself was not run")
    return {"path": str(path), "target": target, "versions": list(versions), "graphs": graphs}, lines, every


def _graphs(path: Path) -> dict[str, Path]:
    """The graphs that TensorRT would build: those placed for it in a bundle, or else the float graphs."""
    if not is_bundle(path):
        file = find_graph(path)
        return (graphs_in(path) if path.is_dir() else {}) or {"model": file}
    manifest = read_bundle(path)
    verify_files(path, manifest)
    require_graphs(path, manifest, "a check of its graphs")
    engines = [engine for engine in manifest.engines if engine.target == TARGET]
    placed = {part.part: path / part.graph for engine in engines[:1] for part in engine.parts or (engine,)}
    return placed or {name: path / graph.file for name, graph in manifest.graphs.items()}


def _finding_lines(findings: Sequence[LintFinding], versions: Sequence[str]) -> list[str]:
    """One paragraph per rule and fix: the finding at each node, the expected value, the fix."""
    groups: dict[tuple[str, ...], list[LintFinding]] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.expected, finding.fix, *finding.versions)
        groups.setdefault(key, []).append(finding)
    lines = []
    for (rule, severity, expected, fix, *names), group in groups.items():
        where = f" ({', '.join(names)})" if len(names) < len(versions) else ""
        rest = [f"and {len(group) - SHOWN_NODES} more"] if len(group) > SHOWN_NODES else []
        found = [*(f"{finding.node}: {finding.found}" for finding in group[:SHOWN_NODES]), *rest]
        lines.append(f"{rule}  {severity}{where}")
        lines += [f"        {'found:' if not index else '':<10}{text}" for index, text in enumerate(found)]
        lines += [f"        expected: {expected}", f"        fix:      {fix}"]
    return lines


# --- Installed packages, working targets, and what the others need ----------------------------------------------------


PACKAGES = {
    "export": (
        "torch",
        "onnx",
        "onnxscript",
        "onnx_ir",
        "safetensors",
        "pydantic",
        "PyYAML",
        "rich",
        "Jinja2",
        "matplotlib",
        "scipy",
        "platformdirs",
    ),
    "base": ("numpy", "pillow", "click"),
}


NOT_COMPARED = "missing  packaging: known-bad runtime releases are not checked"


def diagnose() -> tuple[dict[str, Any], list[str]]:
    """The machine, its packages and every target: the document, and its printed lines."""
    host, known = describe_host(), known_bad()
    packages = {name: installed_version(name) for names in PACKAGES.values() for name in names}
    targets = {name: probe_target(name) for name in TARGETS}
    missing = [name for name in PACKAGES["export"] if packages[name] is None]
    advice, advised = wing("devices.advice").of_this_machine(host) if has_wing("devices") else ([], [])
    lines = _host_lines(host)
    for name, found in targets.items():
        # A target without its device is not a fault of this machine.
        state = "works" if found.works else "missing" if found.fix else "absent"
        lines.append(f"{state:<7}  {name:<20} {found.detail}")
        if found.fix:
            lines.append(f"         fix: {found.fix}")
        lines += known_lines((known or {}).get(name, {}))
    lines += [NOT_COMPARED] if known is None else []
    if missing:
        lines += [
            f"missing  export, quantize, verify, run: {', '.join(missing)}",
            "         fix: pip install 'vitdeploy[export]'",
        ]
    else:
        lines.append("works    export, quantize, verify, run")
    lines += advised
    document: dict[str, Any] = {"host": host, "packages": packages, "targets": encode(targets), "export": not missing}
    document["known_bad"] = known
    document["advice"] = encode(advice)
    return document, lines


def measure_layers(target: str | None, progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """Measure the cost of layers on this CPU, for one target or for all installed targets with cost tables; see
    `search.costs`."""
    from vitdeploy.search import costs

    targets = [target] if target is not None else [name for name in TARGETS if costs.has_costs(name)]
    check_target(targets[0])
    tables = {name: costs.measure_costs(name, progress) for name in targets if target or probe_target(name).works}
    lines = [f"{name}: {table}" for name, table in tables.items()]
    return {"costs": encode(tables)}, [*lines, "builds on this machine use these costs from now on"]


def _host_lines(host: dict[str, str]) -> list[str]:
    """The lines on this machine and the INT8 instructions of its CPU."""
    cores = f"{host['cores']} cores" + (f" (a quota of {host['quota']})" if "quota" in host else "")
    words = [*name_host(host), cores, host["isa"], host["system"], f"Python {host['python']}"]
    caches = f"caches: {host['caches']}" if "caches" in host else ""
    emulated = "emulator detected: compile and verify work, benchmarks do not" if "emulated" in host else ""
    return [", ".join(words), *(line for line in (caches, emulated, int8_instructions(host["isa"])) if line)]


def diagnose_target(target: str) -> tuple[dict[str, Any], list[str]]:
    """Everything that one target needs, one line each, with its fix; the document's `works` tells whether it is all
    here.

    Raises:
        TargetError: an unknown target.
    """
    check_target(target)
    findings = examine(target)
    missing = [finding.name for finding in findings if not finding.ok]
    verdict = f"{target} does not work here: missing {', '.join(missing)}" if missing else f"{target} works here"
    known = known_bad((target,)) or {}
    document = {"target": target, "works": not missing, "findings": [encode(each) for each in findings]}
    document["known_bad"] = known.get(target, {})
    return document, [*finding_lines(findings), *known_lines(known.get(target, {})), verdict]


def known_bad(targets: Iterable[str] | None = None) -> dict[str, dict[str, str]] | None:
    """By installed target, the entries of the known-bad runtime table for its release: by id, what vitdeploy does about
    it. None without the package that reads version ranges.

    Raises:
        KnownBadTableError: the table cannot be read.
    """
    try:
        from vitdeploy.known_bad.entries import DONE
        from vitdeploy.known_bad.platform import entries_for, platform_here
    except ModuleNotFoundError:  # packaging, which a device install may lack
        return None

    found = {}
    for name in targets or TARGETS:
        platform = platform_here(name)
        entries = entries_for(platform) if platform.version is not None else ()
        if entries:
            found[name] = {entry.id: DONE[entry.action] for entry in entries}
    return found


def known_lines(known: Mapping[str, str]) -> list[str]:
    """One line on a target; [] without entries."""
    if not known:
        return []
    listed = ", ".join(f"{name} ({done})" for name, done in known.items())
    return [f"         known to be wrong on some graphs (`vitdeploy inspect GRAPH` finds them): {listed}"]


# --- A bundle as one file: packed, unpacked and checked, each as a document and its printed lines ---------------------


Outcome = tuple[dict[str, Any], list[str]]


def pack(bundle: Path, output: Path, progress: Progress) -> Outcome:
    """Pack a bundle's folder into one file; an existing packed bundle is replaced.

    Raises:
        OutputError: the file would be inside the bundle, or replace another file. Errors of `pack_bundle` propagate.
    """
    if bundle.resolve() in output.resolve().parents:
        raise OutputError(
            f"{output} is inside the bundle to pack",
            found=str(output),
            expected=f"a file outside of {bundle}",
            fix="choose another -o",
        )
    with replacing_file(output, is_packed) as file:
        packed = pack_bundle(bundle, file, _megabytes(progress))
    left_out = unlisted_files(bundle, packed.manifest)
    lines = [*_lines(output, packed), *_named("left out (not listed in the manifest)", left_out)]
    lines += ["signed: the signature is in the file"] if packed.signed else []
    return {**_document(output, packed), "left_out": left_out}, lines


def pack_slim(bundle: Path, target: str, output: Path, key: Path | None, progress: Progress) -> Outcome:
    """Pack only what a device needs to run a bundle on one target into one file; `key` signs it.

    Raises:
        SignatureError: the bundle is signed, and `key` is None: the signature covers only the whole bundle.
        Errors of `pack`, `slim_bundle` and `sign_bundle` propagate.
    """
    if key is None and (bundle / SIGNATURE_FILE).exists():
        raise SignatureError(
            f"the signature of {bundle} covers only the whole bundle, not a slim one",
            found="a signed bundle without --key",
            expected="the private key to sign the slim bundle",
            fix="add --key KEY.pem, or pack the whole bundle",
        )
    rebuilt = RUNTIME[target].engine_is_code if target in TARGETS else False
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as work, storage_errors(Path(work)):
        folder = Path(work) / bundle.resolve().name
        folder.mkdir()
        _, left_out = slim_bundle(bundle, target, folder, rebuilt=rebuilt)
        if key is not None:
            sign_bundle(folder, key)
        document, lines = pack(folder, output, progress)
    bytes_left_out = sum((bundle / name).stat().st_size for name in left_out)
    left = f"left out: {_files(len(left_out))}, {human_bytes(bytes_left_out)}"
    return {**document, "left_out": left_out}, [*lines, *_named(left, left_out)]


def unpack(file: Path, output: Path, expect: str | None, trust: Path | None, progress: Progress) -> Outcome:
    """Unpack a bundle into a folder; arguments and errors as `bundle.pack.unpack`."""

    packed = unpack_file(file, output, expect_digest=expect, trust=trust, progress=_megabytes(progress))
    document = {**_document(file, packed), "folder": str(output), "signed_by": str(trust) if trust else None}
    return document, [*_lines(file, packed), _signature(packed.signed, trust)]


def check(bundle: Path, expect: str | None, trust: Path | None, progress: Progress) -> Outcome:
    """Check that a bundle, folder or packed, is unchanged: every digest; with `expect` also the SHA-256 of its manifest
    in hex, and with `trust` its signer. Errors of `read_packed`, `verify_files` and `signed_by` propagate."""
    document, lines = (_verify_file if bundle.is_file() else _verify_folder)(bundle, expect, trust, progress)
    return {**document, "signed_by": str(trust) if trust else None}, lines


def _verify_file(
    file: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:

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

    files = open_checked(folder, expect_digest=expect)
    manifest, digest = files.manifest, files.digest
    progress("check digests", 0, 1)
    files.require()
    signed_by(folder, trust)
    signed, unlisted = (folder / SIGNATURE_FILE).is_file(), unlisted_files(folder, manifest)
    document = {"path": str(folder), "name": manifest.name, "manifest_sha256": digest, "files": len(manifest.files)}
    lines = [
        f"{folder}: bundle {manifest.name}, {_files(len(manifest.files))}, all digests match",
        f"its {MANIFEST_FILE}: sha256:{digest}",
        _signature(signed, trust),
        *_named("not part of the bundle (not listed in the manifest)", unlisted),
    ]
    return {**document, "signed": signed, "unlisted": unlisted}, lines


def _megabytes(progress: Progress) -> Progress:
    """Report progress in megabytes instead of bytes."""

    def in_megabytes(text: str, done: int, total: int) -> None:
        progress(f"{text}ing, in MB", done // 1_000_000, total // 1_000_000)

    return in_megabytes


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


def _named(what: str, names: list[str]) -> list[str]:
    """A line that names files; [] without files."""
    shown = ", ".join(map(ascii, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{what}: {shown}"] if names else []


def _signature(signed: bool, trust: Path | None) -> str:
    if trust is not None:
        return f"signed by {trust}"
    return "signed, but the signer was not checked: name a key with --trust" if signed else "not signed"


# --- Compare every engine of a bundle with its golden answers, on this machine ----------------------------------------


def check_bundle(folder: Path, trust: Path | None) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The result for each engine, its printed lines, and whether all engines that run here give the golden answers.

    Raises:
        HostError: no engine runs here. Errors of reading the bundle propagate.
    """

    manifest = read_bundle(folder)
    signed_by(folder, trust)
    documents = [_check(folder, manifest, engine, trust) for engine in manifest.engines]
    if all(document["ok"] is None for document in documents):
        raise HostError(
            f"no engine of {folder} runs here",
            found="; ".join(each["error"] for each in documents) or "no engine",
            expected="an engine for this machine",
            fix="vitdeploy doctor lists what each target needs",
        )
    return documents, [_line(each) for each in documents], all(each["ok"] is not False for each in documents)


def _check(folder: Path, manifest: Manifest, engine: EngineSpec, trust: Path | None) -> dict[str, Any]:
    """`ok` is None if the engine does not run here."""

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
    failed = "; its budget failed when the bundle was built" if found["gate"] == "fail" else ""
    return (
        f"golden {found['engine']}: {verdict}, {found['same']} of {found['inputs']} answers match the original "
        f"(minimum {found['least_same']}), maximum difference from the recorded outputs {found['difference']:.1e} "
        f"(relative, limit {found['tolerance']:.1e}){failed}"
    )


# --- Self-test of one target on this machine, into one folder to send back --------------------------------------------


def selftest(target: str, folder: Path, duration: float, progress: Progress) -> tuple[SelftestDocument, list[str]]:
    """Build, verify and bench engines of built-in models; write the report to `folder`. A failed step is recorded.

    Args:
        duration: seconds per artifact and scenario of the bench.

    Raises:
        TargetError: an unknown target. OutputError: `folder` holds something else.
    """
    from vitdeploy.benchmark.protocol import Protocol

    check_target(target)
    from vitdeploy.store.store import Store
    from vitdeploy.workflows.selftest import REPORT_NAMES, default_cases, run_selftest

    with replacing(folder, REPORT_NAMES) as work, temporary_folder(folder.parent) as store:
        protocol = Protocol(duration=duration)
        document = run_selftest(target, default_cases(), work, Store(store), protocol=protocol, progress=progress)
    lines = (folder / "doctor.txt").read_text(encoding="utf-8").splitlines()
    for row in document.steps:
        seconds = f"{row.seconds:.1f} s" if row.status == "done" else row.detail
        lines.append(f"{row.status:<7}  {row.model:<16} {row.step:<28} {seconds}")
    return document, [*lines, document.sentence]
