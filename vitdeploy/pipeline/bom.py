"""The bill of materials of a bundle, `bom.cdx.json`: a CycloneDX 1.6 ML-BOM of what the manifest records.

It holds no time, host or path of the maker, so the same manifest gives the same bytes.
"""

import importlib.metadata
import json
import uuid
from collections.abc import Iterable, Mapping

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from vitdeploy.spec import Manifest

# The serial number is derived from the content under this name; random ones would make each file different.
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://cyclonedx.org/schema/bom-1.6.schema.json")
DATA = ("calibration", "evaluation")


def bom_text(manifest: Manifest, *, license: str | None = None, metrics: Mapping[str, tuple[str, float]]) -> str:
    """Return the text of the bill of materials.

    Args:
        manifest: lists the files of the graphs and engines; its `provenance` has the digests of the source and of the
            data, and the versions of the tools (`document.report.Provenance`).
        license: what the model's source states, an SPDX identifier or expression where possible; None if it states
            nothing.
        metrics: by artifact, the name of a measure on the evaluation data, and its value.
    """
    digests, source = manifest.provenance.get("data", {}), manifest.provenance.get("source", {})
    model = Component(
        name=manifest.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        licenses=_licenses(license),
        properties=_source(source.get("sha256", {}).values(), source.get("revision")),
        components=_files(manifest),
    )
    bom = Bom(serial_number=NAMESPACE, components=[_data(name, digests[name]) for name in DATA if digests.get(name)])
    bom.metadata.component = model
    bom.register_dependency(model, bom.components)
    bom.metadata.tools = ToolRepository(components=_tools(manifest.provenance.get("tools", {})))
    bom.metadata.timestamp = None  # type: ignore[assignment]  # optional in the format, and not in the library's types
    document = json.loads(make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string())
    # The library has no classes for the card of a model yet; tests check it with the library's strict validator.
    document["metadata"]["component"]["modelCard"] = _card(manifest, metrics)
    del document["serialNumber"]
    content = json.dumps(document, sort_keys=True, allow_nan=False)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(NAMESPACE, content)}"
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _sha256(digest: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def _files(manifest: Manifest) -> list[Component]:
    """The graphs and the engines, by the digests of the manifest."""
    kept = tuple(graph.file for graph in manifest.graphs.values())
    return [
        Component(name=entry.path, type=ComponentType.FILE, bom_ref=f"file:{entry.path}", hashes=_sha256(entry.sha256))
        for entry in manifest.files
        if entry.path in kept or entry.path.endswith(".onnx.data") or entry.path.startswith("engines/")
    ]


def _source(digests: Iterable[str], revision: str | None) -> list[Property]:
    """The digests of the files that the model was read from, without their names, which are the maker's own."""
    sources = [Property(name="vitdeploy:source:sha256", value=digest) for digest in digests]
    return [*sources, *([Property(name="vitdeploy:source:revision", value=revision)] if revision else [])]


def _data(name: str, digest: str) -> Component:
    """A part of the data: one digest over its samples, never their names. Some tasks join several digests."""
    hashes = _sha256(digest) if len(digest) == 64 else ()
    joined = () if hashes else (Property(name="vitdeploy:data:digests", value=digest),)
    return Component(
        name=f"{name} data", type=ComponentType.DATA, bom_ref=f"data:{name}", hashes=hashes, properties=joined
    )


def _tools(versions: Mapping[str, str]) -> list[Component]:
    tools = []
    for package, version in versions.items():
        if version != "absent":
            substitute, _, number = version.rpartition(" ")  # "onnxruntime-gpu 1.31.1" instead of onnxruntime
            name = substitute or package
            purl = PackageURL("pypi", name=name, version=number)
            licenses = _licenses(_license_of(name, number))
            ref = str(purl)
            tools.append(Component(name=name, version=number, bom_ref=ref, purl=purl, licenses=licenses))
    return tools


def _license_of(package: str, version: str) -> str | None:
    """The licence in the metadata of an installed package; None if that is absent, or is that of another version."""
    try:
        metadata = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if metadata["Version"] != version:
        return None
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    # Old metadata: "License :: OSI Approved :: MIT License", whose short form is the identifier for MIT alone.
    names = [
        line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if line.startswith("License :: ")
    ]
    return names[0].replace("MIT License", "MIT") if names else None


def _licenses(license: str | None) -> list[License]:
    return [LicenseFactory().make_from_string(license)] if license else []


def _card(manifest: Manifest, metrics: Mapping[str, tuple[str, float]]) -> dict[str, object]:
    digests = manifest.provenance.get("data", {})
    measured = [
        {"type": measure, "value": repr(value), "slice": artifact} for artifact, (measure, value) in metrics.items()
    ]
    parameters = {
        "task": manifest.task,
        "datasets": [{"ref": f"data:{name}"} for name in DATA if digests.get(name)],
    }
    return {"modelParameters": parameters, "quantitativeAnalysis": {"performanceMetrics": measured}}
