"""What the answers of an artifact depend on beside its images: the part of a key that is the artifact's."""

from __future__ import annotations

from pathlib import PurePosixPath

from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import EngineSpec, Manifest, encode
from vitdeploy.stages.reference_model import ReferenceModel
from vitdeploy.stages.shards import Identity
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions
from vitdeploy.store.sources import code_version


def engine_identity(manifest: Manifest, engine: EngineSpec, *, compiled: bool) -> Identity:
    """The identity of a bundle's engine: all files beside those that it loads. If it was `compiled` for this command,
    its graph and the code that compiles in place of what was made of it: OpenVINO writes another model.xml each time.

    Raises:
        MissingPackageError, EngineError, CapabilityError: this machine lacks what the engine needs.
    """
    parts = engine.parts or (engine,)
    graphs, files = tuple(part.graph for part in parts), {name for part in parts for name in part.files}
    folders = {PurePosixPath(name).parent for name in (*graphs, *files)}
    inputs = {each.path: each.sha256 for each in manifest.files if PurePosixPath(each.path).parent in folders}
    if compiled:
        made = {name for name in files if not name.startswith(graphs)}
        inputs = {name: digest for name, digest in inputs.items() if name not in made}
    code = code_version(everything=compiled)
    return Identity({"engine": encode(engine)}, inputs, {**target_tools(engine.target), "code": code})


def original_identity(reference_model: ReferenceModel) -> Identity:
    """The identity of an original."""
    packages = package_versions(("torch", "timm", "transformers", "onnxruntime"))
    tools = {**packages, "host": str(describe_host()), "code": code_version()}
    return Identity(reference_model.identity(), dict(reference_model.digests), tools)
